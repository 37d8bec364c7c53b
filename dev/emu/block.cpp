// The execution engine: runs the blocks of one launch. Every CUDA thread is a fiber that starts late: a thread that
// never waits costs no switch, one that waits keeps its stack and the next thread begins on another. The schedule is
// greedy: a warp runs until all its lanes wait. That is the largest skew between warps the barriers allow, so what a
// missing barrier would have protected really goes wrong.
#include <omp.h>
#include <sanitizer/asan_interface.h>                 // its macros do nothing without AddressSanitizer
#include <string.h>
#include <sys/mman.h>
#include "internal.h"

__thread uint3 blockIdx;
__thread dim3 blockDim, gridDim;

namespace emu {

__thread ThreadId* cur;
__thread Worker* worker;
__thread Kernel* entered;
__thread bool quiet;
static void fiber_entry();
static void probe_entry();

// ---------------------------------------------------------------- fibers and the choice of the next thread
static Fiber* take_fiber(Worker* w) {
    if (Fiber* f = w->pool) {
        w->pool = f->next;
        return f;
    }
    Fiber* f = new Fiber;
    fiber_create(f, options().stack, fiber_entry);
    return f;
}

static void give_fiber(Worker* w, Fiber* f) {
    f->next = w->pool;
    w->pool = f;
}

static inline void switch_to(Fiber* f) {
    Worker* w = worker;
    Fiber* from = w->running;
    w->running = f;
    fiber_switch(from, f);
}

static inline unsigned next_random(Block* b) {         // xorshift
    uint32_t x = b->random;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return b->random = x;
}

static inline int choose(Block* b, unsigned mask) {
    if (options().order == ORDER_FORWARD) return __builtin_ctz(mask);
    if (options().order == ORDER_REVERSE) return 31 - __builtin_clz(mask);
    unsigned skip = ((uint64_t)next_random(b) * __builtin_popcount(mask)) >> 32;
    while (skip--) mask &= mask - 1;
    return __builtin_ctz(mask);
}

static inline void make_ready(Block* b, int warp, unsigned lanes) {
    if (!lanes) return;
    b->lanes[warp] |= lanes;
    b->ready |= 1u << warp;
    b->poll_rounds = 0;
}

// The lanes of a warp that ask for __activemask get their answer when no other lane of it can run: those at the same
// line are the ones that are together.
static bool answer_activemask(Block* b, int warp) {
    Warp& w = b->warps[warp];
    if (!w.asking) return false;
    Thread* first = &b->threads[warp * 32 + __builtin_ctz(w.asking)];
    unsigned together = 0;
    for (int l = 0; l < 32; l++) {
        if (!(w.asking >> l & 1)) continue;
        Thread* t = &b->threads[warp * 32 + l];
        if (t->wait_line == first->wait_line && t->wait_file == first->wait_file) together |= 1u << l;
    }
    for (int l = 0; l < 32; l++) if (together >> l & 1) w.answer[l] = together;
    w.asking &= ~together;
    if (!w.asking) b->asking &= ~(1u << warp);
    make_ready(b, warp, together);
    return true;
}

static bool wake_pollers(Block* b) {
    if (!b->any_polling || b->poll_rounds > 4) return false;
    int rounds = b->poll_rounds;
    for (size_t w = 0; w < b->warps.size(); w++) {
        make_ready(b, (int)w, b->polling[w]);
        b->polling[w] = 0;
    }
    b->any_polling = false;
    b->poll_rounds = rounds + 1;
    return true;
}

// The next thread to run, or null: all have exited, or wait for each other, or poll for something other blocks must do.
static inline Thread* pick(Block* b) {
    for (;;) {
        int c = b->warp;
        if (!(b->ready >> c & 1) && b->asking >> c & 1 && answer_activemask(b, c)) continue;
        if (!b->ready) {
            if (b->asking && answer_activemask(b, __builtin_ctz(b->asking))) continue;
            if (wake_pollers(b)) continue;
            return nullptr;
        }
        if (!(b->ready >> c & 1) || (options().order == ORDER_RANDOM && (next_random(b) & 7) == 0))
            b->warp = c = choose(b, b->ready);
        int l = choose(b, b->lanes[c]);
        b->lanes[c] &= ~(1u << l);
        if (!b->lanes[c]) b->ready &= ~(1u << c);
        return &b->threads[c * 32 + l];
    }
}

// The fiber on which the thread waits, or a fresh one that will begin it.
static inline Fiber* fiber_of(Worker* w, Thread* t) {
    if (t->fiber) return t->fiber;
    w->start = t;
    return take_fiber(w);
}

// Continues with another thread; the running one has noted where it waits. Without any, the worker's main loop decides.
static inline void reschedule() {
    Worker* w = worker;
    Thread* t = pick(w->block);
    if (!t) {
        cur = nullptr;
        switch_to(&w->main);
        return;
    }
    Fiber* f = fiber_of(w, t);
    cur = t;
    if (f != w->running) switch_to(f);
}

static inline void wait_here(Thread* t, const char* what, const char* file, int line) {
    t->wait_what = what;
    t->wait_file = file;
    t->wait_line = line;
    t->fiber = worker->running;
    reschedule();
    cur = t;
}

static void thread_exit(Thread* t);

static void fiber_entry() {
    fiber_entered();
    for (;;) {
        Worker* w = worker;
        Fiber* me = w->running;
        Thread* t = w->start;
        while (t && !t->fiber) {                       // threads that never wait share this stack, with no switch
            cur = t;
            Grid* g = w->block->grid;
            g->closure.call(g->closure.data.get());
            thread_exit(t);
            t = pick(w->block);
        }
        give_fiber(w, me);
        cur = t;
        switch_to(t ? t->fiber : &w->main);
    }
}

// ---------------------------------------------------------------- barriers
static void divergent_barrier(Block* b) {
    Thread *a = b->first_arrived, *c = b->mismatch;
    report_at("divergent barrier", c->wait_file, c->wait_line,
              "thread %s waits here, thread %s at %s:%d; a barrier needs all threads of the block at the same place",
              thread_name(c->linear, blockDim).c_str(), thread_name(a->linear, blockDim).c_str(), a->wait_file,
              a->wait_line);
}

static void release_barrier(Block* b) {
    if (b->mismatch) divergent_barrier(b);
    b->mismatch = nullptr;
    b->arrived = 0;
    b->result = b->accumulated;
    worker->progress++;
    check_barrier(b);
    for (size_t w = 0; w < b->warps.size(); w++) make_ready(b, (int)w, b->warps[w].alive);
}

int barrier(int site, BarrierKind kind, int predicate, const char* f, int l) {
    Thread* t = this_thread();
    if (!t) fatal("__syncthreads() outside of a kernel, at %s:%d", f, l);
    Block* b = worker->block;
    t->wait_file = f;
    t->wait_line = l;
    if (b->arrived == 0) {
        b->site = site;
        b->kind = kind;
        b->first_arrived = t;
        b->accumulated = kind == BARRIER_AND;
    } else if (b->site != site || b->first_arrived->wait_line != l) {
        b->mismatch = t;
    }
    if (kind == BARRIER_AND) b->accumulated = b->accumulated && predicate;
    else if (kind == BARRIER_OR) b->accumulated = b->accumulated || predicate;
    else b->accumulated += predicate;
    if (++b->arrived == b->alive) {
        t->fiber = worker->running;
        release_barrier(b);
    }
    wait_here(t, "__syncthreads", f, l);
    return b->result;
}

// ---------------------------------------------------------------- warp operations
static void finish_slot(Block* b, int warp, Slot& s) {
    unsigned lanes = s.arrived;
    s.arrived = 0;
    b->warps[warp].busy &= ~(1u << (&s - b->warps[warp].slot));
    worker->finishing = &s;
    s.done(s.arg, lanes);
    worker->progress++;
    make_ready(b, warp, lanes);
}

[[noreturn]] static void abandon_launch(cudaError_t error);

static void mixed_operations(const Slot& s, const char* what, const char* f, int l, unsigned mask, int lane) {
    report_at("divergent warp operation", f, l,
              "lane %d calls %s with mask %08x while other lanes of its warp wait in %s with mask %08x at %s:%d",
              lane, what, mask, s.what, s.mask, s.file, s.line);
    abandon_launch(cudaErrorLaunchFailure);
}

// Lanes of a quad may still be together while another quad has gone on to what the whole warp does. Two operations
// exclude each other only if one waits for a lane that waits in the other, and the other for this one.
static Slot& find_slot(Warp& w, unsigned mask, const char* what, Done done, const char* f, int l, int lane) {
    for (unsigned busy = w.busy; busy; busy &= busy - 1) {
        Slot& s = w.slot[__builtin_ctz(busy)];
        if (s.mask == mask && s.done == done && !strcmp(s.what, what)) return s;
        bool it_needs_me = s.mask >> lane & 1, i_need_it = s.arrived & mask;
        if (it_needs_me && i_need_it) mixed_operations(s, what, f, l, mask, lane);
    }
    int i = __builtin_ctz(~w.busy);
    w.busy |= 1u << i;
    Slot& s = w.slot[i];
    s.arrived = 0;
    s.mask = mask;
    s.what = what;
    s.done = done;
    s.file = f;
    s.line = l;
    return s;
}

unsigned lanes_of_warp() {
    int left = (int)(blockDim.x * blockDim.y * blockDim.z) - cur->warp * 32;
    return left >= 32 ? 0xffffffffu : (1u << left) - 1;
}

void warp_op(unsigned mask, const char* what, void* arg, Done done, const char* f, int l) {
    Thread* t = this_thread();
    if (!t) fatal("%s outside of a kernel, at %s:%d", what, f, l);
    Block* b = worker->block;
    Warp& w = b->warps[t->warp];
    t->wait_file = f;
    t->wait_line = l;
    if (!(mask >> t->lane & 1)) {
        report_at("lane not in its mask", f, l, "lane %d calls %s with mask %08x, which does not contain it", t->lane,
                  what, mask);
        mask |= 1u << t->lane;
    }
    Slot& s = find_slot(w, mask, what, done, f, l, t->lane);
    s.arg[t->lane] = arg;
    s.arrived |= 1u << t->lane;
    if (s.arrived == (mask & w.alive)) {
        t->fiber = worker->running;
        finish_slot(b, t->warp, s);
    }
    wait_here(t, what, f, l);
}

static void nothing(void**, unsigned) {}
static void syncwarp_done(void** args, unsigned arrived) {
    (void)args;
    check_syncwarp(worker->block, this_thread()->warp, arrived);
}

void syncwarp(unsigned mask, const char* f, int l) {
    warp_op(mask, "__syncwarp", nullptr, checking ? syncwarp_done : nothing, f, l);
}

struct ReduceArg { int64_t v, r; RedOp op; };
static int64_t combine(RedOp op, int64_t a, int64_t b) {
    switch (op) {
        case RED_ADD: return a + b;
        case RED_MIN: return b < a ? b : a;
        case RED_MAX: return b > a ? b : a;
        case RED_AND: return a & b;
        case RED_XOR: return a ^ b;
        default: return a | b;
    }
}
template <int OP>
static void reduce_done(void** args, unsigned arrived) {    // a function for each op: the slots compare them
    int64_t r = 0;
    bool first = true;
    for (int l = 0; l < 32; l++) {
        if (!(arrived >> l & 1)) continue;
        int64_t v = ((ReduceArg*)args[l])->v;
        if (OP == RED_BALLOT) v = v ? 1ll << l : 0;
        r = first ? v : combine((RedOp)OP, r, v);
        first = false;
    }
    for (int l = 0; l < 32; l++) if (arrived >> l & 1) ((ReduceArg*)args[l])->r = r;
}
static void match_any_done(void** args, unsigned arrived) {
    for (int l = 0; l < 32; l++) {
        if (!(arrived >> l & 1)) continue;
        unsigned equal = 0;
        for (int k = 0; k < 32; k++)
            if (arrived >> k & 1 && ((ReduceArg*)args[k])->v == ((ReduceArg*)args[l])->v) equal |= 1u << k;
        ((ReduceArg*)args[l])->r = equal;
    }
}
static void match_all_done(void** args, unsigned arrived) {
    int64_t first = ((ReduceArg*)args[__builtin_ctz(arrived)])->v;
    bool all = true;
    for (int l = 0; l < 32; l++) if (arrived >> l & 1) all &= ((ReduceArg*)args[l])->v == first;
    for (int l = 0; l < 32; l++) if (arrived >> l & 1) ((ReduceArg*)args[l])->r = all ? arrived : 0;
}

int64_t reduce(unsigned mask, int64_t v, RedOp op, const char* f, int l) {
    static const Done done[] = {reduce_done<RED_ADD>,    reduce_done<RED_MIN>, reduce_done<RED_MAX>,
                                reduce_done<RED_AND>,    reduce_done<RED_OR>,  reduce_done<RED_XOR>,
                                reduce_done<RED_BALLOT>, match_any_done,       match_all_done};
    static const char* name[] = {"__reduce_add_sync",
                                 "__reduce_min_sync",
                                 "__reduce_max_sync",
                                 "__all_sync or __reduce_and_sync",
                                 "__any_sync or __reduce_or_sync",
                                 "__reduce_xor_sync",
                                 "__ballot_sync",
                                 "__match_any_sync",
                                 "__match_all_sync"};
    ReduceArg x{v, 0, op};
    warp_op(mask, name[op], &x, done[op], f, l);
    return x.r;
}

void copy_bits(void* to, const void* from, size_t n) { __builtin_memcpy(to, from, n); }

void absent_lane(const char* what, int lane, int src, unsigned mask) {
    Thread* t = &worker->block->threads[this_thread()->warp * 32 + lane];
    ThreadId* me = cur;
    cur = t;
    report_at("absent lane", t->wait_file, t->wait_line,
              "%s: lane %d reads lane %d, which does not take part (lanes %08x do); the value is undefined", what, lane,
              src, mask);
    cur = me;
}

unsigned activemask(const char* f, int l) {
    Thread* t = this_thread();
    if (!t) fatal("__activemask() outside of a kernel, at %s:%d", f, l);
    Block* b = worker->block;
    Warp& w = b->warps[t->warp];
    w.asking |= 1u << t->lane;
    b->asking |= 1u << t->warp;
    wait_here(t, "__activemask", f, l);
    return w.answer[t->lane];
}

// ---------------------------------------------------------------- waiting by polling
void poll() {
    Thread* t = this_thread();
    if (!t) return;
    Block* b = worker->block;
    b->polling[t->warp] |= 1u << t->lane;
    b->any_polling = true;
    wait_here(t, "a polling loop", nullptr, 0);
}

// A thread that looks at one address again and again waits for another thread: let that one run.
void note_poll(const void* p, void* pc) {
    Thread* t = this_thread();
    if (t->polled != p) {
        t->polled = p;
        t->polls = 0;
    }
    t->polled_pc = pc;
    if (++t->polls >= 4 || ++t->polls_of_any % 64 == 0) poll();
}

void atomic_access(const void* p, size_t n, AtomicKind kind, void* pc) {
    if (!cur) return;
    if ((uintptr_t)p % n) report("misaligned", pc, nullptr, "an atomic of %zu bytes at address %p", n, p);
    note_poll(p, pc);                                  // before the checker looks: another thread may run in between
    check_atomic(p, n, kind, pc);
}

void fence(bool device_wide) {
    if (!cur) return;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    check_fence(device_wide);
}

void trap(const char* f, int l) {
    report_at("trap", f, l, "__trap() was called");
    abandon_launch(cudaErrorLaunchFailure);
}

}
using namespace emu;
// A failed assert() in a kernel ends the launch, as on a GPU; in host code it ends the program, as everywhere.
extern "C" void __assert_fail(const char* condition, const char* file, unsigned line, const char* function) noexcept {
    if (cur) {
        report_at("assert", file, (int)line, "`%s' does not hold in %s", condition, function);
        abandon_launch(cudaErrorAssert);
    }
    fflush(stdout);
    fprintf(stderr, "%s:%u: %s: Assertion `%s' failed.\n", file, line, function, condition);
    abort();
}

namespace emu {
// ---------------------------------------------------------------- the end of a thread, of a block, of a launch
static void thread_exit(Thread* t) {
    Block* b = worker->block;
    t->done = true;
    t->copies.clear();
    b->alive--;
    b->poll_rounds = 0;
    worker->progress++;
    Warp& w = b->warps[t->warp];
    w.alive &= ~(1u << t->lane);
    for (unsigned busy = w.busy; busy; busy &= busy - 1) {                      // did they only wait for this lane?
        Slot& s = w.slot[__builtin_ctz(busy)];
        if (s.arrived == (s.mask & w.alive)) finish_slot(b, t->warp, s);
    }
    if (b->arrived && b->arrived == b->alive) release_barrier(b);
}

// Drops every thread of the running launch: after a fault from which a kernel cannot go on.
static void abandon_launch(cudaError_t error) {
    Worker* w = worker;
    w->block->grid->failed = error;
    w->block->finished = true;
    this_thread()->fiber = w->running;                 // so that it is reset with the others
    cur = nullptr;
    switch_to(&w->main);
    abort();                                           // nobody comes back here
}

static void reset_fibers(Worker* w, Block* b) {
    for (Thread& t : b->threads) {
        if (t.done || !t.fiber) continue;
        fiber_reset(t.fiber, fiber_entry);
        give_fiber(w, t.fiber);
        t.fiber = nullptr;
    }
}

static void report_deadlock(Block* b) {
    int shown = 0;
    std::string list;
    Thread* first = nullptr;
    for (Thread& t : b->threads) {
        if (t.done || (first && t.wait_line == first->wait_line && t.wait_what == first->wait_what)) continue;
        if (!first) first = &t;
        if (shown++ < 6)
            list += "\nemu:     thread " + thread_name(t.linear, blockDim) + " waits in " + t.wait_what + " at " +
                    t.wait_file + ":" + std::to_string(t.wait_line);
    }
    report_at("deadlock", first->wait_file, first->wait_line, "block %s: no thread can run, %d wait, %zu have exited%s",
              block_name(b->linear, gridDim).c_str(), b->alive, b->threads.size() - (size_t)b->alive, list.c_str());
}

// ---------------------------------------------------------------- shared memory
char* shared_alloc(Block* b, size_t n, size_t align, const char* name) {
    size_t gap = 64 + (n < 8192 ? n : 8192);           // an index past the end falls into nobody's memory
    size_t at = (b->shared_used + gap + 2 * align - 1) / (2 * align) * (2 * align);
    if (align >= 2 && align < 128) at += align;        // no more aligned than declared
    if (at + n + gap > SHARED_ARENA) fatal("%s: the emulator's shared memory is used up", name);
    b->shared_used = at + n;
    if (b->shared_dirty < b->shared_used) b->shared_dirty = b->shared_used;
    char* p = b->shared + at;
    ASAN_UNPOISON_MEMORY_REGION(p, n);
    __builtin_memset(p, options().poison ? 0xff : 0, n);
    check_shared_alloc(b, p, n);
    return p;
}

static std::atomic<int> shared_ids{0};

// What the launch could not know: variables of functions that were not inlined, and those at file scope.
static void check_static_total(Block* b) {
    Grid* g = b->grid;
    std::string wrong = shared_excess(b->static_bytes, g->config.smem, g->dynamic_limit);
    if (wrong.empty()) return;
    report_at("launch limits", g->config.file, g->config.line, "kernel %s: %s", g->config.name, wrong.c_str());
    abandon_launch(cudaErrorInvalidValue);
}

void* shared_var(SharedVar& v) {
    Block* b = worker->block;
    if (!cur) fatal("shared memory '%s' used outside of a kernel", v.name);
    int id = __atomic_load_n(&v.id, __ATOMIC_ACQUIRE);
    if (id < 0) {
        int fresh = shared_ids++;
        if (__atomic_compare_exchange_n(&v.id, &id, fresh, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) id = fresh;
    }
    for (auto& x : b->variables) if (x.first == id) return x.second;
    char* p = shared_alloc(b, v.size, v.align, v.name);
    b->variables.push_back({id, p});
    b->static_bytes += v.size;
    check_static_total(b);
    return p;
}

void* dynamic_smem(size_t) { return worker->block->dynamic; }

// ---------------------------------------------------------------- running blocks
static Block* take_block(Worker* w) {
    if (!w->idle.empty()) {
        Block* b = w->idle.back();
        w->idle.pop_back();
        return b;
    }
    Block* b = new Block();
    b->shared =
        (char*)mmap(nullptr, SHARED_ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->shared == MAP_FAILED) fatal("no memory for a block's shared memory");
    return b;
}

static void init_threads(Block* b, const Config& c) {
    int n = (int)(c.block.x * c.block.y * c.block.z);
    b->threads.resize((size_t)n);
    unsigned x = 0, y = 0, z = 0;
    for (int i = 0; i < n; i++) {
        Thread& t = b->threads[(size_t)i];
        t.tid = make_uint3(x, y, z);
        t.lane = i & 31;
        t.warp = i >> 5;
        t.linear = i;
        t.fiber = nullptr;
        t.done = false;
        t.wait_what = t.wait_file = nullptr;
        t.wait_line = 0;
        t.copy_group = 0;
        t.polled = nullptr;
        t.polls = t.polls_of_any = 0;
        t.clock = 1;
        t.fence_clock = 0;
        if (checking) {
            t.fence_device.reset();
            t.fence_block.reset();
            t.acquired.reset();
        }
        if (++x == c.block.x) {
            x = 0;
            if (++y == c.block.y) {
                y = 0;
                z++;
            }
        }
    }
    b->alive = n;
}

static void init_warps(Block* b) {
    int n = b->alive, warps = (n + 31) / 32;
    b->warps.resize((size_t)warps);
    for (int i = 0; i < warps; i++) {
        Warp& w = b->warps[(size_t)i];
        w.alive = i * 32 + 32 <= n ? 0xffffffffu : (1u << (n & 31)) - 1;
        w.asking = 0;
        w.synced = false;
        w.busy = 0;
        b->lanes[i] = w.alive;
        b->polling[i] = 0;
    }
    b->ready = (unsigned)((1ull << warps) - 1);
}

static void start_block(Worker* w, Grid& g, Block* b, long linear) {
    const Config& c = g.config;
    if (options().order == ORDER_REVERSE) linear = g.blocks - 1 - linear;
    b->grid = &g;
    b->linear = linear;
    b->index = make_uint3((unsigned)(linear % c.grid.x), (unsigned)(linear / c.grid.x % c.grid.y),
                          (unsigned)(linear / c.grid.x / c.grid.y));
    init_threads(b, c);
    init_warps(b);
    b->asking = 0;
    b->arrived = b->poll_rounds = 0;
    b->mismatch = nullptr;
    b->any_polling = b->finished = false;
    b->random = (uint32_t)(options().seed * 2654435761u + (uint32_t)g.serial * 7919u + (uint32_t)linear * 104729u) | 1;
    b->warp = choose(b, b->ready);
    b->shared_used = b->static_bytes = 0;
    b->variables.clear();
    ASAN_POISON_MEMORY_REGION(b->shared, SHARED_ARENA);
    w->block = b;
    check_block_begin(b);
    b->dynamic = shared_alloc(b, c.smem, 128, "dynamic shared memory");     // at least as aligned as on a GPU
}

// Runs a block until it has finished or every thread of it polls.
static void resume_block(Worker* w, Block* b) {
    w->block = b;
    blockIdx = b->index;
    w->running = &w->main;
    b->poll_rounds = 0;
    if (Thread* t = pick(b)) {
        cur = t;
        switch_to(fiber_of(w, t));
    }
    cur = nullptr;
    if (b->finished) return;                           // abandoned
    if (b->alive == 0) {
        b->finished = true;
    } else if (!b->any_polling) {
        report_deadlock(b);
        b->grid->failed = cudaErrorLaunchFailure;
        b->finished = true;
    }
}

static void report_endless_polling(std::vector<Block*>& active) {
    for (Block* b : active) {
        for (Thread& t : b->threads) {
            if (t.done || !t.polled_pc || !(b->polling[t.warp] >> t.lane & 1)) continue;
            worker->block = b;
            blockIdx = b->index;
            cur = &t;
            report("endless wait", t.polled_pc, nullptr,
                   "every thread that could run polls for a value that no thread can write any more");
            cur = nullptr;
            return;
        }
    }
    report_at("endless wait", active[0]->grid->config.file, active[0]->grid->config.line,
              "every thread that could run only sleeps and polls");
}

static void retire(Worker* w, Block* b) {
    reset_fibers(w, b);
    ASAN_UNPOISON_MEMORY_REGION(b->shared, SHARED_ARENA);
    w->idle.push_back(b);
}

// One worker's share of a launch. A block whose threads all poll stays resident while others run, as on a GPU.
static void run_blocks(Grid& g) {
    Worker* w = worker;
    const size_t RESIDENT = 256;
    std::vector<Block*> active;
    size_t turn = 0, stalled = 0;
    double stalled_since = 0;
    while (!g.failed) {
        Block* b;
        if (active.empty() || (stalled >= active.size() && active.size() < RESIDENT)) {
            long i = g.next++;
            if (i >= g.blocks) {
                g.next = g.blocks;
                if (active.empty()) break;
                b = active[turn++ % active.size()];
            } else {
                b = take_block(w);
                start_block(w, g, b, i);
                active.push_back(b);
            }
        } else {
            b = active[turn++ % active.size()];
        }
        long before = w->progress;
        resume_block(w, b);
        if (w->progress != before) stalled = 0;
        if (b->finished) {
            for (size_t i = 0; i < active.size(); i++) if (active[i] == b) active.erase(active.begin() + (long)i);
            retire(w, b);
        } else if (++stalled == 1) {
            stalled_since = seconds();
        } else if (stalled > 1000 * active.size() && seconds() - stalled_since > 2) {
            report_endless_polling(active);
            g.failed = cudaErrorLaunchFailure;
        }
    }
    for (Block* b : active) retire(w, b);
}

static Worker* this_worker() {
    if (!worker) {
        worker = new Worker();
        bury(worker);                                  // never freed; a host thread that ends must not leak it
        fiber_main(&worker->main);
        watch_thread();
    }
    return worker;
}

static void run_share(Grid& g) {
    Worker* w = this_worker();
    entered = nullptr;
    blockDim = g.config.block;
    gridDim = g.config.grid;
    w->progress++;
    w->grid = &g;
    run_blocks(g);
    w->grid = nullptr;
}

void run_grid(Grid& g) {
    int workers = checking ? 1 : options().workers ? options().workers : omp_get_max_threads();
    check_grid_begin(g);
    if (workers == 1 || g.blocks == 1) {
        run_share(g);
    } else {
        #pragma omp parallel num_threads(workers)
        run_share(g);
    }
    check_launch(g);
    if (g.failed != cudaSuccess) set_error(g.failed);
}

// ---------------------------------------------------------------- which kernel does a launch call?
static void probe_entry() {
    fiber_entered();
    const Closure* c = worker->probe_closure;
    c->call(c->data.get());
    worker->probing = false;                           // not a __global__ function of ours: it has simply run
    switch_to(&worker->main);
}

void enter_first(Kernel& k, void* pc) {
    if (!k.address) k.address = _Unwind_FindEnclosingFunction(pc);
    Worker* w = worker;
    if (w && w->probing) {
        w->probe_result = &k;
        w->probing = false;
        switch_to(&w->main);
    }
    if (!cur) fatal("a __global__ function is called without <<<...>>>, at %s", where(pc).c_str());
    entered = &k;
}

Kernel* probe_kernel(const Closure& c) {
    Worker* w = this_worker();
    if (!w->probe) {
        w->probe = new Fiber;
        fiber_create(w->probe, options().stack, probe_entry);
    } else {
        fiber_reset(w->probe, probe_entry);
    }
    Kernel* before = entered;
    entered = nullptr;
    w->probe_closure = &c;
    w->probe_result = nullptr;
    w->probing = true;
    w->running = &w->main;
    switch_to(w->probe);
    entered = before;
    return w->probe_result;
}

}
