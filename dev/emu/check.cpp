// The checker. Programs built with --check are compiled with -fsanitize=thread, but the functions the compiler calls at
// every access are ours: because we know the barriers, fences and streams, we can tell exactly which accesses are
// ordered.
//
// Every 4 bytes of device and shared memory have a cell with the last write and up to two reads that later accesses
// might conflict with (FastTrack, Flanagan and Freund 2009, with barriers instead of vector clocks). Two accesses are
// ordered if
//  - the same thread makes them, or a barrier or __syncwarp of both lies between;
//  - one thread fenced and then set a flag (an atomic or volatile store) which the other has seen;
//  - they belong to different operations (kernels, copies, the host) which streams, events or waits put in order.
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <map>
#include <unordered_map>
#include "internal.h"

namespace emu {

const bool checking = true;

// ---------------------------------------------------------------- shadow memory
const int ATOMIC = 1, WRITTEN = 2, VOLATILE = 4, FENCED = 8, POLLED = 16, SWAP = 64;
struct Record {                  // one access; pc 0: none
    uint32_t op, block;
    uint16_t thread;
    uint16_t flags;
    uint32_t clock, pc;
};
struct Cell { Record w, r[2]; uint32_t split; };       // split: index of four cells, one for each byte
enum State : uint8_t { ALLOCATED = 1, INITIALISED = 2, IN_FLIGHT = 4, HOST_TOO = 8, CONSTANT = 16, FREED = 32 };
struct Region {                  // `base` is a multiple of 4; the memory itself begins at `first`
    uintptr_t base;
    size_t size;
    uint8_t* state;
    Cell* cells;
    bool shared;
    const char* name;
    uintptr_t first;
};

static Region arena;
static size_t arena_top;
static Region variables[1024];   // __device__, __constant__, __managed__, and host memory that cudaHostRegister pinned
static int variables_used;
static uintptr_t variables_low = ~(uintptr_t)0, variables_high;
static Cell (*split_pool)[4];
static uint32_t split_used = 1;
static std::vector<uint32_t>& split_free() { static auto* v = new std::vector<uint32_t>; return *v; }

extern "C" char __executable_start, _end;

template <class T> static T* reserve(size_t count) {   // address space only: pages come when touched
    void* p =
        mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (T*)p;
}

static void add_variables(char* from, char* to, uint8_t state, const char* name) {
    if (!from || from == to) return;
    if (variables_used == 1024) fatal("more than 1024 calls of cudaHostRegister");
    uintptr_t base = (uintptr_t)from & ~(uintptr_t)15;
    size_t size = (uintptr_t)to - base;
    Region r{base, size, reserve<uint8_t>(size), reserve<Cell>(size / 4 + 1), false, name, (uintptr_t)from};
    memset(r.state, state, size);
    variables[variables_used++] = r;
    variables_low = std::min(variables_low, base);
    variables_high = std::max(variables_high, base + size);
}

// Address and size of every variable, from the program's own symbol table.
static std::vector<std::pair<uintptr_t, size_t>> objects() {
    std::vector<std::pair<uintptr_t, size_t>> all;
    int fd = open("/proc/self/exe", O_RDONLY);
    struct stat s;
    if (fd < 0 || fstat(fd, &s)) return all;
    char* file = (char*)mmap(nullptr, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED) return all;
    auto* head = (const ElfW(Ehdr)*)file;
    auto* section = (const ElfW(Shdr)*)(file + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        if (section[i].sh_type != SHT_SYMTAB) continue;
        auto* symbol = (const ElfW(Sym)*)(file + section[i].sh_offset);
        for (size_t k = 0; k < section[i].sh_size / sizeof *symbol; k++)
            if ((symbol[k].st_info & 15) == STT_OBJECT) all.push_back({symbol[k].st_value, symbol[k].st_size});
    }
    munmap(file, (size_t)s.st_size);
    return all;
}

// The section of device variables: what lies between them (emucc puts gaps there) belongs to nobody.
static void add_section(char* from, char* to, uint8_t state, const char* name) {
    static const auto all = objects();
    int before = variables_used;
    add_variables(from, to, state, name);
    if (variables_used == before || all.empty()) return;
    const Region& r = variables[before];
    memset(r.state, 0, r.size);
    for (auto& x : all)
        if (x.first >= (uintptr_t)from && x.first < (uintptr_t)to)
            memset(r.state + (x.first - r.base), state, x.second);
}

__attribute__((constructor(101))) static void start() {
    for (size_t size = 64ull << 30; size >= 1ull << 30; size /= 2) {
        arena = {(uintptr_t)reserve<char>(size), size,  reserve<uint8_t>(size),
                 reserve<Cell>(size / 4),        false, "global", 0};
        if (arena.base && arena.state && arena.cells) break;
    }
    if (!arena.base || !arena.cells) fatal("the checker cannot reserve its shadow memory (ulimit -v?)");
    split_pool = (Cell(*)[4])reserve<Cell>(1ull << 30);
    add_section(__start_emu_device, __stop_emu_device, ALLOCATED | INITIALISED, "__device__");
    add_section(__start_emu_constant, __stop_emu_constant, ALLOCATED | INITIALISED | CONSTANT, "__constant__");
    add_section(__start_emu_managed, __stop_emu_managed, ALLOCATED | INITIALISED | HOST_TOO, "managed");
}

void* check_malloc(size_t n, MemoryKind kind) {
    size_t gap = std::min(std::max(n, (size_t)65536), (size_t)1 << 30);          // a stray index hits nobody's memory
    size_t at = (arena_top + gap + 255) & ~(size_t)255;
    if (at + n + gap > arena.size) {
        fprintf(stderr, "emu: the checker's %zu GiB of addresses are used up (freed ones are not given out again)\n",
                arena.size >> 30);
        return nullptr;
    }
    arena_top = at + n;
    memset(arena.state + at, kind == MEMORY_DEVICE ? ALLOCATED : ALLOCATED | HOST_TOO, n);
    return (void*)(arena.base + at);
}

void check_register(void* p, size_t n) {
    add_variables((char*)p, (char*)p + n, ALLOCATED | INITIALISED | HOST_TOO, "registered");
}

void check_unregister(void* p) {
    for (int i = 0; i < variables_used; i++)
        if (variables[i].first == (uintptr_t)p) variables[i].first = ~(uintptr_t)0;
}

static void drop_pages(void* p, size_t n) {
    uintptr_t a = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, b = ((uintptr_t)p + n) & ~(uintptr_t)4095;
    if (b > a) madvise((void*)a, b - a, MADV_DONTNEED);
}

void check_free(void* p, size_t n) {
    size_t at = (uintptr_t)p - arena.base;
    memset(arena.state + at, FREED, n);
    drop_pages(p, n);
    drop_pages(arena.cells + at / 4, n / 4 * sizeof(Cell));
}

// ---------------------------------------------------------------- who acts
struct Actor { uint32_t op, host_time; Thread* thread; Block* block; };
static uint32_t now_op;          // the operation that runs: 0 = the host
static uint32_t now_op_issued;

static Actor actor() {
    Thread* t = this_thread();
    if (t) return {now_op, now_op_issued, t, worker->block};
    return {running_op ? running_op->id : 0, running_op ? running_op->host_time : host_time, nullptr, nullptr};
}

static Record record(const Actor& me, int flags, void* pc) {
    Record r{me.op, 0, 0, (uint16_t)flags, me.op ? 1 : host_time, (uint32_t)(uintptr_t)pc};
    if (me.thread) {
        r.block = (uint32_t)me.block->linear;
        r.thread = (uint16_t)me.thread->linear;
        r.clock = me.thread->clock;
    }
    return r;
}

// ---------------------------------------------------------------- what threads tell each other: fence, flag, look
struct Log;
struct Acquired { std::vector<std::pair<std::shared_ptr<Log>, size_t>> logs; };     // entries seen of each flag's log
struct Snapshot {                // what a thread knew when it fenced
    uint32_t op, block, clock, barrier_clock;
    int thread;
    bool device_wide, has_row, unfenced;               // unfenced: a counter went up, with no fence before
    uint32_t row[32];
    std::shared_ptr<std::vector<uint32_t>> fences;
    std::shared_ptr<Acquired> own, of_block;
};
struct Log {
    std::vector<std::shared_ptr<Snapshot>> entries;
    std::unordered_map<uint32_t, std::vector<size_t>> by_block;
};
static std::unordered_map<uintptr_t, std::shared_ptr<Log>>& flags_seen() {
    static auto* m = new std::unordered_map<uintptr_t, std::shared_ptr<Log>>;
    return *m;
}

static std::shared_ptr<Snapshot> snapshot(int thread, bool device_wide) {        // nothing known yet
    auto s = std::make_shared<Snapshot>();             // all zero
    s->op = now_op;
    s->block = (uint32_t)worker->block->linear;
    s->thread = thread;
    s->device_wide = device_wide;
    return s;
}

static void append(uintptr_t flag, const std::shared_ptr<Snapshot>& s) {
    std::shared_ptr<Log>& log = flags_seen()[flag];
    if (!log) log = std::make_shared<Log>();
    if (!log->entries.empty() && log->entries.back() == s) return;
    log->by_block[s->block].push_back(log->entries.size());
    log->entries.push_back(s);
}

void check_fence(bool device_wide) {
    Thread* t = this_thread();
    Block* b = worker->block;
    auto s = snapshot(t->linear, device_wide);
    s->clock = t->clock;
    s->barrier_clock = b->barrier_clock;
    const Warp& w = b->warps[(size_t)t->warp];
    s->has_row = w.synced;
    if (w.synced) memcpy(s->row, w.known[t->lane], sizeof s->row);
    s->fences = b->fences;
    s->own = t->acquired;
    s->of_block = b->acquired;
    t->fence_block = s;
    if (device_wide) {
        t->fence_device = s;
        t->fence_clock = t->clock;
        b->fenced = true;
    }
    t->clock++;
}

static void learn(std::shared_ptr<Acquired>& known, const std::shared_ptr<Log>& log, size_t entries) {
    auto more = known ? std::make_shared<Acquired>(*known) : std::make_shared<Acquired>();
    for (auto& x : more->logs) {
        if (x.first != log) continue;
        if (x.second >= entries) return;
        x.second = entries;
        known = more;
        return;
    }
    more->logs.push_back({log, entries});
    known = more;
}

static void learn_all(std::shared_ptr<Acquired>& known, const std::shared_ptr<Acquired>& other) {
    if (!other || other == known) return;
    if (!known) {
        known = other;
        return;
    }
    for (auto& x : other->logs) learn(known, x.first, x.second);
}

static void look_at_flag(Thread* t, uintptr_t a) {
    auto it = flags_seen().find(a);
    if (it != flags_seen().end()) learn(t->acquired, it->second, it->second->entries.size());
}

// Other threads of the block fenced, and a barrier followed: their stores are published by whoever sets a flag now.
static void adopt_fences(Thread* t) {
    Block* b = worker->block;
    if (!b->fences || (t->fence_device && t->fence_device->fences == b->fences)) return;
    auto s = t->fence_device ? std::make_shared<Snapshot>(*t->fence_device) : snapshot(t->linear, true);
    s->fences = b->fences;
    s->of_block = b->acquired;
    t->fence_device = s;
    if (!t->fence_block) t->fence_block = s;
}

// `volatile` results behind a counter need their fence like others: volatile does not order them before the atomic.
static bool volatile_data;                             // this kernel stores through volatile pointers in global memory
static void count_unfenced(Thread* t, uintptr_t a) {
    auto s = snapshot(t->linear, false);
    s->clock = t->clock;
    s->barrier_clock = worker->block->barrier_clock;
    s->unfenced = true;
    append(a, s);
}

// A read-modify-write adds to what the flag tells; a plain store replaces it.
static void set_flag(Thread* t, uintptr_t a, bool replaces) {
    if (replaces) flags_seen().erase(a);
    adopt_fences(t);
    if (volatile_data && !replaces) count_unfenced(t, a);
    for (auto& s : {t->fence_block, t->fence_device}) if (s) append(a, s);
}

static bool tells(const Acquired* known, const Record& r, bool other_block, int depth);

static bool snapshot_covers(const Snapshot& s, const Record& r, bool other_block) {
    if (s.unfenced) return false;
    if (s.op != r.op || s.block != r.block || (other_block && !s.device_wide)) return false;
    if (s.thread == r.thread && r.clock <= s.clock) return true;
    if (r.clock < s.barrier_clock) return true;        // a fence covers what a barrier brought before it
    if (s.has_row && s.thread >> 5 == r.thread >> 5 && r.clock <= s.row[r.thread & 31]) return true;
    return s.fences && r.clock <= (*s.fences)[r.thread];                         // others fenced, then a barrier
}

static bool log_tells(const Log& log, size_t entries, const Record& r, bool other_block, int depth) {
    auto it = log.by_block.find(r.block);
    if (it != log.by_block.end()) {
        for (size_t i : it->second) if (i < entries && snapshot_covers(*log.entries[i], r, other_block)) return true;
    }
    if (depth == 0) return false;
    for (size_t i = 0; i < entries; i++) {             // what those who set the flag had learnt from other flags
        const Snapshot& s = *log.entries[i];
        if ((s.own && tells(s.own.get(), r, other_block, depth - 1)) ||
            (s.of_block && tells(s.of_block.get(), r, other_block, depth - 1)))
            return true;
    }
    return false;
}

static bool tells(const Acquired* known, const Record& r, bool other_block, int depth) {
    if (!known) return false;
    for (auto& x : known->logs) if (log_tells(*x.first, x.second, r, other_block, depth)) return true;
    return false;
}

// ---------------------------------------------------------------- are two accesses ordered?
static bool ops_ordered(uint32_t a, uint32_t b) {
    static uint32_t last_a, last_b;
    static bool last;
    if (a != last_a || b != last_b) {
        last = op_before(a, b);
        last_a = a;
        last_b = b;
    }
    return last;
}

static bool ordered(const Record& r, const Actor& me, bool shared) {
    if (r.op != me.op) {
        if (shared) return true;                       // left over from an earlier block
        if (!r.op) return r.clock <= me.host_time;     // the host, before it issued this operation?
        return me.op ? ops_ordered(r.op, me.op) : host_knows(r.op);
    }
    if (!me.thread) return true;
    if (r.block != (uint32_t)me.block->linear) {
        if (shared) return true;
        return tells(me.thread->acquired.get(), r, true, 3) || tells(me.block->acquired.get(), r, true, 3);
    }
    if (r.thread == me.thread->linear || r.clock < me.block->barrier_clock) return true;
    if (r.thread >> 5 == me.thread->warp) {
        const Warp& w = me.block->warps[(size_t)me.thread->warp];
        if (w.synced && r.clock <= w.known[me.thread->lane][r.thread & 31]) return true;
    }
    return tells(me.thread->acquired.get(), r, false, 3) || tells(me.block->acquired.get(), r, false, 3);
}

void check_barrier(Block* b) {
    uint32_t most = 0;
    for (Thread& t : b->threads) most = std::max(most, t.clock);
    if (b->fenced) {
        auto f = std::make_shared<std::vector<uint32_t>>(b->threads.size());
        for (Thread& t : b->threads) (*f)[(size_t)t.linear] = t.fence_clock;
        b->fences = f;
        b->fenced = false;
    }
    b->barrier_clock = most + 1;
    for (Thread& t : b->threads) {
        t.clock = most + 1;
        if (!t.acquired) continue;
        learn_all(b->acquired, t.acquired);
        t.acquired.reset();
    }
}

// Lanes that fenced before a __syncwarp: whoever of them sets a flag afterwards publishes the stores of all.
static void share_fences(Thread* lanes, unsigned mask, std::shared_ptr<Snapshot> Thread::*fence) {
    uint32_t row[32] = {};
    bool any = false;
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1) || !(lanes[i].*fence)) continue;
        row[i] = (lanes[i].*fence)->clock;
        any = true;
    }
    for (int i = 0; any && i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        auto s = lanes[i].*fence ? std::make_shared<Snapshot>(*(lanes[i].*fence))
                                 : snapshot(lanes[i].linear, fence == &Thread::fence_device);
        for (int j = 0; j < 32; j++) s->row[j] = std::max(s->has_row ? s->row[j] : 0, row[j]);
        s->has_row = true;
        lanes[i].*fence = s;
    }
}

void check_syncwarp(Block* b, int warp, unsigned mask) {
    Warp& w = b->warps[(size_t)warp];
    Thread* t = &b->threads[(size_t)warp * 32];
    if (!w.synced) memset(w.known, 0, sizeof w.known);
    w.synced = true;
    uint32_t most[32] = {};
    std::shared_ptr<Acquired> acquired;
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        w.known[i][i] = t[i].clock;
        for (int j = 0; j < 32; j++) most[j] = std::max(most[j], w.known[i][j]);
        learn_all(acquired, t[i].acquired);
    }
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        memcpy(w.known[i], most, sizeof most);
        t[i].clock++;
        t[i].acquired = acquired;
    }
    share_fences(t, mask, &Thread::fence_block);
    share_fences(t, mask, &Thread::fence_device);
}

// ---------------------------------------------------------------- reports of conflicts
static const char* text_of(const Region& r) { return r.shared ? "shared" : r.name; }

static std::string other_side(const Record& r, const Actor& me) {
    if (!r.op) return "the host";
    if (r.op != me.op)
        return op_by_id(r.op) ? "'" + op_by_id(r.op)->name + "', which is not ordered with this operation"
                              : "another operation";
    std::string s = "thread " + thread_name(r.thread, blockDim);
    return r.block == (uint32_t)me.block->linear ? s : s + " of block " + block_name(r.block, gridDim);
}

static const char* kind_of(const Record& r, const Actor& me) {
    if (r.op != me.op) return !r.op || !me.op ? "missing wait" : "missing stream order";
    return r.block != (uint32_t)(me.block ? me.block->linear : 0) ? "race between blocks" : "race";
}

// Two threads may store the same value: the second store, which does not change memory, is no conflict. Whether it does
// is known at the next access.
struct Pending {
    uintptr_t a;
    size_t n;
    uint32_t before;
    std::string text;
    const char* kind;
    void *pc, *other;
    ThreadId* cur;
    Block* block;
};
static std::vector<Pending>& pending() { static auto* v = new std::vector<Pending>; return *v; }
static bool any_pending;

static void settle_now() {
    any_pending = false;
    std::vector<Pending> all;
    all.swap(pending());
    ThreadId* me = cur;
    Block* b = worker ? worker->block : nullptr;
    for (Pending& p : all) {
        if (!memcmp((void*)p.a, &p.before, p.n)) continue;
        cur = p.cur;
        worker->block = p.block;
        report(p.kind, p.pc, p.other, "%s", p.text.c_str());
    }
    cur = me;
    if (worker) worker->block = b;
}
static inline void settle() { if (__builtin_expect(any_pending, 0)) settle_now(); }
void check_settle() { settle(); }

// A compare-and-swap loop may begin with a plain read: the swap checks the guess. Such a read stands just above it.
static bool guess_for_swap(const Record& r, const Record& mine) {
    const Record &read = r.flags & WRITTEN ? mine : r, &swap = r.flags & WRITTEN ? r : mine;
    if (read.flags & WRITTEN || !(swap.flags & SWAP)) return false;
    std::string a = where((void*)(uintptr_t)read.pc), b = where((void*)(uintptr_t)swap.pc);
    size_t colon = a.rfind(':');
    if (colon == std::string::npos || b.compare(0, colon + 1, a, 0, colon + 1)) return false;
    int distance = atoi(b.c_str() + colon + 1) - atoi(a.c_str() + colon + 1);
    return distance >= 0 && distance <= 24;
}

static void conflict(const Region& g, const Record& r, const Record& mine, const Actor& me, uintptr_t a, size_t n) {
    if (guess_for_swap(r, mine)) return;
    bool write = mine.flags & WRITTEN;
    void* pc = (void*)(uintptr_t)mine.pc;
    const char* before = r.flags & WRITTEN ? "written" : "read";
    std::string text = std::string(write ? "a write to " : "a read of ") + text_of(g) + " memory that was " + before +
                       " by " + other_side(r, me) + " at " + where((void*)(uintptr_t)r.pc);
    text += r.op != me.op ? ""
            : write       ? (r.flags & WRITTEN ? " (write after write)" : " (write after read)")
                          : " (read after write)";
    if (!write || !me.thread || !(r.flags & WRITTEN)) {
        report(kind_of(r, me), pc, (void*)(uintptr_t)r.pc, "%s", text.c_str());
        return;
    }
    if (pending().size() >= 64) return;
    Pending p{a, n, 0, text, kind_of(r, me), pc, (void*)(uintptr_t)r.pc, cur, worker->block};
    memcpy(&p.before, (void*)a, n);
    pending().push_back(std::move(p));
    any_pending = true;
}

// ---------------------------------------------------------------- one cell
// Atomic and volatile accesses do not race with each other, except that lanes of a warp which exchange data through
// volatile shared memory with neither __syncwarp nor fence rely on lockstep execution, which is gone since Volta.
static bool tolerated(const Record& r, const Record& mine, bool shared) {
    if (!(r.flags & ATOMIC) || !(mine.flags & ATOMIC)) return false;
    bool lockstep = shared && r.flags & mine.flags & VOLATILE && r.thread >> 5 == mine.thread >> 5 &&
                    r.block == mine.block && r.op == mine.op;
    return !lockstep || (r.flags | mine.flags) & (FENCED | POLLED);
}

// A volatile store, then a counter without a fence, which the reader has seen.
static bool counted_unfenced(const Record& r, const Record& mine, const Actor& me) {
    if (!(r.flags & mine.flags & VOLATILE) || !(r.flags & WRITTEN) || mine.flags & WRITTEN || r.op != mine.op ||
        r.block == mine.block || !me.thread)
        return false;
    for (Acquired* known : {me.thread->acquired.get(), me.block->acquired.get()}) {
        if (!known) continue;
        for (auto& x : known->logs) {
            auto it = x.first->by_block.find(r.block);
            if (it == x.first->by_block.end()) continue;
            for (size_t i : it->second) {
                const Snapshot& s = *x.first->entries[i];
                if (i < x.second && s.unfenced && s.op == r.op &&
                    ((s.thread == r.thread && r.clock <= s.clock) || r.clock < s.barrier_clock))
                    return true;
            }
        }
    }
    return false;
}

static inline bool clash(const Record& r, const Record& mine, const Actor& me, bool shared) {
    return r.pc && (!tolerated(r, mine, shared) || (volatile_data && !shared && counted_unfenced(r, mine, me))) &&
           !ordered(r, me, shared);
}

// Keeps a read among those a later write may conflict with. Two places: prefer different blocks, then different warps.
static void remember(Cell* c, const Record& mine, const Actor& me, bool shared) {
    int at = -1;
    for (int i = 0; i < 2 && at < 0; i++) if (!c->r[i].pc) at = i;
    for (int i = 0; i < 2 && at < 0; i++) if (ordered(c->r[i], me, shared)) at = i;
    if (at < 0) {
        bool same_block = c->r[0].block == c->r[1].block;
        bool differs = mine.block != c->r[0].block || (same_block && mine.thread >> 5 != c->r[0].thread >> 5);
        at = same_block ? (differs ? 1 : 0) : mine.block == c->r[0].block ? 0 : 1;
    }
    c->r[at] = mine;
}

static bool same_access(const Record& a, const Record& b) {
    return a.pc == b.pc && a.clock == b.clock && a.thread == b.thread && a.block == b.block && a.op == b.op;
}

static void visit(Cell* c, const Region& g, const Record& mine, const Actor& me, uintptr_t a, size_t n) {
    bool write = mine.flags & WRITTEN;
    if (!write && same_access(c->r[0], mine) && !(c->w.flags & ATOMIC)) return;
    if (clash(c->w, mine, me, g.shared)) conflict(g, c->w, mine, me, a, n);
    if (!write) {
        remember(c, mine, me, g.shared);
        return;
    }
    for (Record& r : c->r) if (clash(r, mine, me, g.shared)) conflict(g, r, mine, me, a, n);
    // What came before is ordered with this write, or was reported. Earlier atomics need no place of their own: whoever
    // is ordered after the last one sees them all.
    c->w = mine;
    if (mine.flags & ATOMIC) return;
    c->r[0].pc = c->r[1].pc = 0;
}

static void split(Cell* c) {
    uint32_t i;
    if (split_free().empty()) {
        i = split_used++;
    } else {
        i = split_free().back();
        split_free().pop_back();
    }
    for (int k = 0; k < 4; k++) {
        split_pool[i][k] = *c;
        split_pool[i][k].split = 0;
    }
    c->split = i;
}

// The bytes of one aligned word that an access touches.
static void visit_word(Cell* c, const Region& g, const Record& mine, const Actor& me, uintptr_t word, unsigned bytes) {
    if (bytes == 15 && !c->split) {
        visit(c, g, mine, me, word, 4);
        return;
    }
    if (!c->split) {
        if (!c->w.pc && !c->r[0].pc && bytes == 15) return;
        split(c);
    }
    for (unsigned k = 0; k < 4; k++) if (bytes >> k & 1) visit(&split_pool[c->split][k], g, mine, me, word + k, 1);
    if (bytes == 15 && mine.flags & WRITTEN && !(mine.flags & ATOMIC)) {
        split_free().push_back(c->split);
        *c = Cell{mine, {}, 0};
    }
}

static void visit_range(const Region& g, uintptr_t a, size_t n, int flags, const Actor& me, void* pc) {
    Record mine = record(me, flags, pc);
    uintptr_t end = a + n;
    for (uintptr_t word = a & ~(uintptr_t)3; word < end; word += 4) {
        unsigned bytes = 15;
        if (word < a) bytes &= 15u << (a - word);
        if (word + 4 > end) bytes &= (1u << (end - word)) - 1;
        visit_word(g.cells + (word - g.base) / 4, g, mine, me, word, bytes);
    }
}

// ---------------------------------------------------------------- host memory
// Pageable host memory has no cells; two kinds of ranges are remembered: those an asynchronous copy still writes, and
// those that received bytes which were never written on the device.
struct HostRange { uintptr_t end; uint32_t op; uint32_t pc; };
static std::map<uintptr_t, HostRange>& in_copy() { static auto* m = new std::map<uintptr_t, HostRange>; return *m; }
static std::map<uintptr_t, HostRange>& never_written() {
    static auto* m = new std::map<uintptr_t, HostRange>;
    return *m;
}
static std::atomic<int> host_ranges{0};                // sizes of both, so that the common case is one comparison
static void count_host_ranges() { host_ranges = (int)(in_copy().size() + never_written().size()); }
static std::recursive_mutex host_lock;

template <class F> static void overlapping(std::map<uintptr_t, HostRange>& m, uintptr_t a, size_t n, F use) {
    auto it = m.upper_bound(a);
    if (it != m.begin()) --it;
    while (it != m.end() && it->first < a + n) {
        auto next = std::next(it);
        if (it->second.end > a) use(it);
        it = next;
    }
}

static void cut_out(std::map<uintptr_t, HostRange>& m, uintptr_t a, size_t n) {
    overlapping(m, a, n, [&](std::map<uintptr_t, HostRange>::iterator it) {
        HostRange r = it->second;
        uintptr_t from = it->first;
        m.erase(it);
        if (from < a) m[from] = {a, r.op, r.pc};
        if (r.end > a + n) m[a + n] = r;
    });
    count_host_ranges();
}

void check_host_pending(Op* op, const void* p, size_t n) {
    std::lock_guard<std::recursive_mutex> guard(host_lock);
    cut_out(in_copy(), (uintptr_t)p, n);
    in_copy()[(uintptr_t)p] = {(uintptr_t)p + n, op->id, (uint32_t)(uintptr_t)op->pc};
    count_host_ranges();
}

const int READ = 32;  // beside the flags of a record; without WRITTEN or with it (atomics)
static void host_plain(uintptr_t a, size_t n, int flags, void* pc) {
    bool write = flags & WRITTEN;
    std::lock_guard<std::recursive_mutex> guard(host_lock);
    std::vector<uintptr_t> finished;
    overlapping(in_copy(), a, n, [&](std::map<uintptr_t, HostRange>::iterator it) {
        HostRange r = it->second;
        bool known = running_op ? op_before(r.op, running_op->id) : host_knows(r.op);     // running: a host function
        if (!known) {
            report("missing wait", pc, (void*)(uintptr_t)r.pc, "the host %s memory into which '%s' (%s) still copies",
                   write ? "writes" : "reads", op_by_id(r.op) ? op_by_id(r.op)->name.c_str() : "?",
                   where((void*)(uintptr_t)r.pc).c_str());
        }
        finished.push_back(it->first);
    });
    for (uintptr_t f : finished) in_copy().erase(f);
    if (write) {
        cut_out(never_written(), a, n);
    } else if (flags & READ) {
        overlapping(never_written(), a, n, [&](std::map<uintptr_t, HostRange>::iterator it) {
            HostRange r = it->second;
            report("uninitialised read", pc, (void*)(uintptr_t)r.pc,
                   "the host uses bytes that were never written on the device before %s copied them here",
                   where((void*)(uintptr_t)r.pc).c_str());
        });
    }
    count_host_ranges();
}

// ---------------------------------------------------------------- one access
static const Region* region_of(uintptr_t a) {
    static Region block;
    if (a - arena.base < arena.size) return &arena;
    if (cur) {
        Block* b = worker->block;
        if (a - (uintptr_t)b->shared < SHARED_ARENA) {
            block = {(uintptr_t)b->shared, SHARED_ARENA, b->shared_state, b->shared_cells, true, "shared", 0};
            return &block;
        }
    }
    if (a >= variables_low && a < variables_high)
        for (int i = 0; i < variables_used; i++)
            if (a >= variables[i].first && a - variables[i].base < variables[i].size) return &variables[i];
    return nullptr;
}

static bool innocent(uintptr_t a) {                    // memory of the program itself that kernels may use
    Worker* w = worker;
    if (a >= (uintptr_t)&__executable_start && a < (uintptr_t)&_end) return true;
    const Closure& c = w->block->grid->closure;
    if (a - (uintptr_t)c.data.get() < c.size) return true;
    const std::vector<Thread>& t = w->block->threads;
    if (a >= (uintptr_t)t.data() && a < (uintptr_t)(t.data() + t.size())) return true;
    uintptr_t tls = (uintptr_t)__builtin_thread_pointer();
    return tls - a < 65536 || a - tls < 4096;
}

static int in_library(struct dl_phdr_info* info, size_t, void* address) {
    uintptr_t a = *(uintptr_t*)address;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        uintptr_t from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && a - from < info->dlpi_phdr[i].p_memsz) return 1;
    }
    return 0;
}

static void stray(uintptr_t a, size_t n, bool write, void* pc) {
    Fiber* f = worker->running;
    if (a - (uintptr_t)f->stack < f->size || innocent(a)) return;
    const char* verb = write ? "writes" : "reads";
    if (a < 65536) {
        report("null pointer", pc, nullptr, "the kernel %s %zu bytes at address %p", verb, n, (void*)a);
    } else if (fiber_in_stack((void*)a)) {
        report("local memory", pc, nullptr, "the kernel %s another thread's local memory", verb);
    } else if (!dl_iterate_phdr(in_library, &a)) {
        report("host memory", pc, nullptr,
               "the kernel %s host memory at %p (a pointer that was not allocated by CUDA, or far out of bounds)", verb,
               (void*)a);
    }
}

static void bad_address(const Region& g, uintptr_t a, size_t n, size_t at, bool write, void* pc) {
    const char* verb = write ? "write" : "read";
    if (g.state[at] & FREED) {
        report("use after free", pc, nullptr, "a %s of %zu bytes in memory that was freed", verb, n);
        return;
    }
    size_t back = 0, most = std::min(at, (size_t)1 << 20);
    while (back < most && !(g.state[at - back] & (ALLOCATED | FREED))) back++;
    if (back < most)
        report("out of bounds", pc, nullptr, "a %s of %zu bytes in %s memory, %zu past the end of an allocation", verb,
               n, text_of(g), back - 1);
    else
        report("out of bounds", pc, nullptr, "a %s of %zu bytes in %s memory at %p, outside of every allocation", verb,
               n, text_of(g), (void*)a);
}

// Allocated? initialised? in flight? False if there is no such memory.
static bool check_state(const Region& g, uintptr_t a, size_t n, int flags, bool read, void* pc) {
    uint8_t* s = g.state + (a - g.base);
    bool write = flags & WRITTEN, unset = false, flying = false;
    for (size_t k = 0; k < n; k++) {
        if (!(s[k] & ALLOCATED)) {
            bad_address(g, a, n, (size_t)(s + k - g.state), write, pc);
            return false;
        }
        unset |= !(s[k] & INITIALISED);
        flying |= (s[k] & IN_FLIGHT) != 0;
        if (write) s[k] |= INITIALISED;
    }
    if (flying)
        report("missing wait", pc, nullptr, "%s shared memory that a cp.async still writes (no wait_group before)",
               write ? "a write to" : "a read of");
    else if (read && unset)
        report("uninitialised read", pc, nullptr, "a read of %zu bytes of %s memory that nobody has written", n,
               text_of(g));
    if (write && s[0] & CONSTANT && cur)
        report("constant memory", pc, nullptr, "a kernel writes to a __constant__ variable");
    return true;
}

static void access(uintptr_t a, size_t n, int flags, void* pc) {
    if (quiet) return;
    settle();
    const Region* g = region_of(a);
    if (!g) {
        if (cur) stray(a, n, flags & WRITTEN, pc);
        else if (host_ranges) host_plain(a, n, flags, pc);
        return;
    }
    if (!cur && !running_op && !(g->state[a - g->base] & HOST_TOO)) {
        report("host access", pc, nullptr, "host code %s %s memory directly", flags & WRITTEN ? "writes" : "reads",
               text_of(*g));
        return;
    }
    if (!check_state(*g, a, n, flags, flags & READ, pc)) return;
    Actor me = actor();
    visit_range(*g, a, n, flags & ~READ, me, pc);
    if (counting && me.thread) count_access(pc, me.thread, a, n, g->shared, flags & WRITTEN);
}

static void plain(const void* p, size_t n, bool write, void* pc) {
    access((uintptr_t)p, n, write ? WRITTEN : READ, pc);
}

static void aligned(const void* p, size_t n, bool write, void* pc) {
    if ((uintptr_t)p & (n - 1) && cur && region_of((uintptr_t)p))
        report("misaligned", pc, nullptr, "%s of %zu bytes at address %p", write ? "a write" : "a read", n, p);
    plain(p, n, write, pc);
}

static void through_volatile(const void* p, size_t n, bool write, void* pc) {
    Thread* t = this_thread();
    if (!t || !region_of((uintptr_t)p)) {
        plain(p, n, write, pc);
        return;
    }
    if (!write) note_poll(p, pc);
    else if (!region_of((uintptr_t)p)->shared) volatile_data = true;
    int flags = ATOMIC | VOLATILE | (t->fence_block ? FENCED : 0) | (!write && t->polls > 1 ? POLLED : 0);
    access((uintptr_t)p, n, flags | (write ? WRITTEN : READ), pc);
    if (write) set_flag(t, (uintptr_t)p, true);
    else look_at_flag(t, (uintptr_t)p);
}

void check_atomic(const void* p, size_t n, AtomicKind kind, void* pc) {
    access((uintptr_t)p, n, ATOMIC | READ | (kind == ATOMIC_LOAD ? 0 : WRITTEN) | (kind == ATOMIC_CAS ? SWAP : 0), pc);
    look_at_flag(this_thread(), (uintptr_t)p);
    if (kind != ATOMIC_LOAD) set_flag(this_thread(), (uintptr_t)p, false);
}

void check_touch(const void* p, size_t n, bool write, void* pc) { plain(p, n, write, pc); }

void check_lane_touch(Thread* lane, const void* p, size_t n, bool write, void* pc) {
    ThreadId* me = cur;
    cur = lane;
    plain(p, n, write, pc);
    cur = me;
}

void check_cp_issue(const CpAsync& c) {
    if (c.bytes) plain(c.src, (size_t)c.bytes, false, c.pc);
    plain(c.dst, (size_t)(c.bytes + c.zeros), true, c.pc);
    Block* b = worker->block;
    size_t at = (size_t)((char*)c.dst - b->shared);
    for (int k = 0; k < c.bytes + c.zeros; k++)
        if (b->shared_state[at + (size_t)k] & ALLOCATED) b->shared_state[at + (size_t)k] |= IN_FLIGHT;
    settle();
}

void check_cp_land(const CpAsync& c) {
    settle();
    Block* b = worker->block;
    size_t at = (size_t)((char*)c.dst - b->shared);
    for (int k = 0; k < c.bytes + c.zeros; k++) b->shared_state[at + (size_t)k] &= (uint8_t)~IN_FLIGHT;
    bool was = counting;
    counting = false;                                  // counted at issue
    if (c.bytes) plain(c.src, (size_t)c.bytes, false, c.pc);
    Actor me = actor();
    Region g = *region_of((uintptr_t)c.dst);
    visit_range(g, (uintptr_t)c.dst, (size_t)(c.bytes + c.zeros), WRITTEN, me, c.pc);
    pending().clear();                                 // reported when it was issued
    any_pending = false;
    counting = was;
}

// ---------------------------------------------------------------- blocks and operations
void check_grid_begin(Grid& g) {
    settle();
    now_op = g.op ? g.op->id : 0;
    now_op_issued = g.op ? g.op->host_time : host_time;
    flags_seen().clear();
    volatile_data = false;
    count_launch_begin(g);
}

void check_launch(Grid& g) {
    settle();
    count_launch_end(g);
}

void check_block_begin(Block* b) {
    settle();
    if (!b->shared_state) {
        b->shared_state = reserve<uint8_t>(SHARED_ARENA);
        b->shared_cells = reserve<Cell>(SHARED_ARENA / 4);
    }
    memset(b->shared_state, 0, b->shared_dirty);
    b->shared_dirty = 0;
    b->barrier_clock = 1;
    b->fenced = false;
    b->fences.reset();
    b->acquired.reset();
}

void check_shared_alloc(Block* b, char* p, size_t n) { memset(b->shared_state + (p - b->shared), ALLOCATED, n); }

void check_op_touch(const void* p, size_t n, bool write) {
    const Region* g = region_of((uintptr_t)p);
    if (!g || !running_op) return;
    Region here = *g;
    if (!check_state(here, (uintptr_t)p, n, write ? WRITTEN : 0, !write, running_op->pc)) return;
    visit_range(here, (uintptr_t)p, n, write ? WRITTEN : 0, actor(), running_op->pc);
}

void check_op_copy(void* dst, const void* src, size_t n) {
    const Region *d = region_of((uintptr_t)dst), *s = region_of((uintptr_t)src);
    void* pc = running_op ? running_op->pc : nullptr;
    settle();
    if (s) visit_range(*s, (uintptr_t)src, n, 0, actor(), pc);
    if (d) visit_range(*d, (uintptr_t)dst, n, WRITTEN, actor(), pc);
    std::lock_guard<std::recursive_mutex> guard(host_lock);
    uint8_t* to = d ? d->state + ((uintptr_t)dst - d->base) : nullptr;
    if (!d) cut_out(never_written(), (uintptr_t)dst, n);
    auto mark = [&](size_t from, size_t end, bool set) {                         // initialised or not travels along
        if (to) for (size_t k = from; k < end; k++) to[k] = (uint8_t)(set ? to[k] | INITIALISED : to[k] & ~INITIALISED);
        else if (!set) never_written()[(uintptr_t)dst + from] = {(uintptr_t)dst + end, 0, (uint32_t)(uintptr_t)pc};
    };
    if (s) {
        const uint8_t* from = s->state + ((uintptr_t)src - s->base);
        for (size_t k = 0, e; k < n; k = e) {
            for (e = k + 1; e < n && ((from[e] ^ from[k]) & INITIALISED) == 0;) e++;
            mark(k, e, from[k] & (INITIALISED | HOST_TOO));
        }
    } else {
        mark(0, n, true);
        std::vector<std::pair<uintptr_t, uintptr_t>> holes;
        overlapping(never_written(), (uintptr_t)src, n, [&](std::map<uintptr_t, HostRange>::iterator it) {
            holes.push_back({it->first, it->second.end});
        });
        for (auto& h : holes)
            mark(std::max(h.first, (uintptr_t)src) - (uintptr_t)src,
                 std::min(h.second, (uintptr_t)src + n) - (uintptr_t)src, false);
    }
    count_host_ranges();
}

void check_exit() {
    settle();
    count_print();
}

void compiled_fault(const char* file, int line, const char* name) {
    report_at("uninitialised read", file, line, "the compiler found that '%s' is used before it is given a value",
              name);
}

// ---------------------------------------------------------------- memory functions that user code calls
static void copied(void* d, const void* s, size_t n, void* pc) {
    if (!n) return;
    if (cur || region_of((uintptr_t)d) || region_of((uintptr_t)s)) {
        plain(s, n, false, pc);
        plain(d, n, true, pc);
        return;
    }
    if (!host_ranges) return;
    std::lock_guard<std::recursive_mutex> guard(host_lock);
    std::map<uintptr_t, HostRange> kept;
    kept.swap(never_written());                        // a copy is no use of the value: the marks travel along
    host_plain((uintptr_t)s, n, READ, pc);
    host_plain((uintptr_t)d, n, WRITTEN, pc);
    kept.swap(never_written());
    cut_out(never_written(), (uintptr_t)d, n);
    std::vector<std::pair<uintptr_t, HostRange>> more;
    overlapping(never_written(), (uintptr_t)s, n, [&](std::map<uintptr_t, HostRange>::iterator it) {
        uintptr_t from = std::max(it->first, (uintptr_t)s), end = std::min(it->second.end, (uintptr_t)s + n);
        more.push_back({from - (uintptr_t)s + (uintptr_t)d, {end - (uintptr_t)s + (uintptr_t)d, 0, it->second.pc}});
    });
    for (auto& m : more) never_written()[m.first] = m.second;
    count_host_ranges();
}

// What the C library reads and writes for the program. Reading is no use of the value: a file may hold the padding
// between two tensors.
static void library_reads(const void* p, size_t n, void* pc) { if (n) access((uintptr_t)p, n, 0, pc); }
static void library_writes(void* p, size_t n, void* pc) { if (n) plain(p, n, true, pc); }

static void forget_host(void* p, void* pc) {
    if (!p || !host_ranges) return;
    // giving memory away ends its use, as writing it would
    host_plain((uintptr_t)p, malloc_usable_size(p), WRITTEN, pc);
}

// malloc and new inside a kernel give device memory.
static std::unordered_map<void*, size_t>& kernel_heap() {
    static auto* m = new std::unordered_map<void*, size_t>;
    return *m;
}
static void* kernel_malloc(size_t n) {
    void* p = check_malloc(n, MEMORY_DEVICE);
    if (p) kernel_heap()[p] = n;
    return p;
}

static bool cuda_memory_freed(void* p, void* pc) {
    for (int i = 0; i < variables_used; i++)
        if (p && variables[i].first == (uintptr_t)p)
            report("bad free", pc, nullptr, "free() or delete of memory that cudaHostRegister still pins");
    if ((uintptr_t)p - arena.base >= arena.size) return false;
    auto it = kernel_heap().find(p);
    if (cur && it != kernel_heap().end()) {
        check_free(p, it->second);
        kernel_heap().erase(it);
        return true;
    }
    report("bad free", pc, nullptr, "free() or delete of CUDA memory");
    return true;
}

}
using namespace emu;
#define RET __builtin_return_address(0)

extern "C" {
// The user's own calls, and those that the compiler makes of struct copies.
#define MEMORY_FUNCTIONS(prefix)                                  \
    void* prefix##memcpy(void* d, const void* s, size_t n) {      \
        copied(d, s, n, RET);                                     \
        return memcpy(d, s, n);                                   \
    }                                                             \
    void* prefix##memmove(void* d, const void* s, size_t n) {     \
        copied(d, s, n, RET);                                     \
        return memmove(d, s, n);                                  \
    }                                                             \
    void* prefix##memset(void* d, int v, size_t n) {              \
        if (n) plain(d, n, true, RET);                            \
        return memset(d, v, n);                                   \
    }
MEMORY_FUNCTIONS(emu_) MEMORY_FUNCTIONS(__tsan_)
void* emu_malloc(size_t n) { return cur ? kernel_malloc(n) : malloc(n); }
void* emu__Znwm(size_t n) { return cur ? kernel_malloc(n) : ::operator new(n); }
void* emu__Znam(size_t n) { return cur ? kernel_malloc(n) : ::operator new[](n); }
#define FREE_FUNCTION(name, real, ...)                            \
    void name(void* p, ##__VA_ARGS__) {                           \
        if (cuda_memory_freed(p, RET)) return;                    \
        forget_host(p, RET);                                      \
        real(p);                                                  \
    }
FREE_FUNCTION(emu_free, free) FREE_FUNCTION(emu__ZdlPv, ::operator delete)
FREE_FUNCTION(emu__ZdaPv, ::operator delete[])
FREE_FUNCTION(emu__ZdlPvm, ::operator delete, size_t) FREE_FUNCTION(emu__ZdaPvm, ::operator delete[], size_t)

size_t emu_fread(void* p, size_t size, size_t n, FILE* f) {
    size_t got = fread(p, size, n, f);
    library_writes(p, got * size, RET);
    return got;
}
size_t emu_fwrite(const void* p, size_t size, size_t n, FILE* f) {
    library_reads(p, size * n, RET);
    return fwrite(p, size, n, f);
}
ssize_t emu_read(int fd, void* p, size_t n) {
    ssize_t got = read(fd, p, n);
    library_writes(p, got > 0 ? (size_t)got : 0, RET);
    return got;
}
ssize_t emu_pread(int fd, void* p, size_t n, off_t at) {
    ssize_t got = pread(fd, p, n, at);
    library_writes(p, got > 0 ? (size_t)got : 0, RET);
    return got;
}
ssize_t emu_write(int fd, const void* p, size_t n) {
    library_reads(p, n, RET);
    return write(fd, p, n);
}
ssize_t emu_pwrite(int fd, const void* p, size_t n, off_t at) {
    library_reads(p, n, RET);
    return pwrite(fd, p, n, at);
}
char* emu_fgets(char* s, int n, FILE* f) {
    char* line = fgets(s, n, f);
    if (line) library_writes(s, strlen(s) + 1, RET);
    return line;
}
int emu_memcmp(const void* a, const void* b, size_t n) {
    if (n) plain(a, n, false, RET), plain(b, n, false, RET);
    return memcmp(a, b, n);
}
void emu_qsort(void* p, size_t n, size_t size, int (*compare)(const void*, const void*)) {
    library_reads(p, n * size, RET);
    library_writes(p, n * size, RET);
    qsort(p, n, size, compare);
}
char* emu_strcpy(char* d, const char* s) {
    copied(d, s, strlen(s) + 1, RET);
    return strcpy(d, s);
}
char* emu_strncpy(char* d, const char* s, size_t n) {
    library_reads(s, strnlen(s, n), RET);
    library_writes(d, n, RET);
    return strncpy(d, s, n);
}
int emu_snprintf(char* s, size_t n, const char* format, ...) {
    va_list ap;
    va_start(ap, format);
    int length = vsnprintf(s, n, format, ap);
    va_end(ap);
    if (n && length >= 0) library_writes(s, std::min(n, (size_t)length + 1), RET);
    return length;
}

// The math library stores through pointers, too.
#define TWO_RESULTS(T, suffix)                                    \
    void emu_sincos##suffix(T x, T* s, T* c) {                    \
        plain(s, sizeof(T), true, RET);                           \
        plain(c, sizeof(T), true, RET);                           \
        sincos##suffix(x, s, c);                                  \
    }                                                             \
    T emu_modf##suffix(T x, T* whole) {                           \
        plain(whole, sizeof(T), true, RET);                       \
        return modf##suffix(x, whole);                            \
    }                                                             \
    T emu_frexp##suffix(T x, int* e) {                            \
        plain(e, sizeof(int), true, RET);                         \
        return frexp##suffix(x, e);                               \
    }                                                             \
    T emu_remquo##suffix(T x, T y, int* q) {                      \
        plain(q, sizeof(int), true, RET);                         \
        return remquo##suffix(x, y, q);                           \
    }
TWO_RESULTS(double, ) TWO_RESULTS(float, f)

// ---------------------------------------------------------------- what -fsanitize=thread calls
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read1(void* p) { plain(p, 1, false, RET); }
void __tsan_write1(void* p) { plain(p, 1, true, RET); }
void __tsan_volatile_read1(void* p) { through_volatile(p, 1, false, RET); }
void __tsan_volatile_write1(void* p) { through_volatile(p, 1, true, RET); }
#define ACCESS(N)                                                                    \
    void __tsan_read##N(void* p) { aligned(p, N, false, RET); }                      \
    void __tsan_write##N(void* p) { aligned(p, N, true, RET); }                      \
    void __tsan_unaligned_read##N(void* p) { plain(p, N, false, RET); }              \
    void __tsan_unaligned_write##N(void* p) { plain(p, N, true, RET); }              \
    void __tsan_volatile_read##N(void* p) { through_volatile(p, N, false, RET); }    \
    void __tsan_volatile_write##N(void* p) { through_volatile(p, N, true, RET); }    \
    void __tsan_unaligned_volatile_read##N(void* p) { through_volatile(p, N, false, RET); }  \
    void __tsan_unaligned_volatile_write##N(void* p) { through_volatile(p, N, true, RET); }  \
    void __tsan_read_write##N(void* p) { aligned(p, N, false, RET); aligned(p, N, true, RET); } \
    void __tsan_unaligned_read_write##N(void* p) { plain(p, N, false, RET); plain(p, N, true, RET); }
ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void* p, size_t n) { plain(p, n, false, RET); }
void __tsan_write_range(void* p, size_t n) { plain(p, n, true, RET); }
static void through_atomic(const volatile void* p, size_t n, bool write, void* pc) {
    if (cur) atomic_access((const void*)p, n, write ? ATOMIC_WRITE : ATOMIC_LOAD, pc);
}
#define ATOMIC_OP(N, T, name, builtin)                   \
    T __tsan_atomic##N##_##name(volatile T* p, T v, int) { \
        through_atomic(p, N / 8, true, RET);             \
        return builtin(p, v, __ATOMIC_SEQ_CST);          \
    }
#define ATOMIC_SWAP(N, T, kind)                                                                          \
    int __tsan_atomic##N##_compare_exchange_##kind(volatile T* p, T* e, T v, int, int) {                 \
        through_atomic(p, N / 8, true, RET);                                                             \
        return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);          \
    }
#define ATOMICS(N, T)                                                                                    \
    T __tsan_atomic##N##_load(const volatile T* p, int) {                                                \
        through_atomic(p, N / 8, false, RET);                                                            \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                     \
    }                                                                                                    \
    void __tsan_atomic##N##_store(volatile T* p, T v, int) {                                             \
        through_atomic(p, N / 8, true, RET);                                                             \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                    \
    ATOMIC_OP(N, T, exchange, __atomic_exchange_n)                                                       \
    ATOMIC_OP(N, T, fetch_add, __atomic_fetch_add)                                                       \
    ATOMIC_OP(N, T, fetch_sub, __atomic_fetch_sub)                                                       \
    ATOMIC_OP(N, T, fetch_and, __atomic_fetch_and)                                                       \
    ATOMIC_OP(N, T, fetch_or, __atomic_fetch_or)                                                         \
    ATOMIC_OP(N, T, fetch_xor, __atomic_fetch_xor)                                                       \
    ATOMIC_SWAP(N, T, strong) ATOMIC_SWAP(N, T, weak)                                                    \
    T __tsan_atomic##N##_compare_exchange_val(volatile T* p, T e, T v, int, int) {                       \
        through_atomic(p, N / 8, true, RET);                                                             \
        __atomic_compare_exchange_n(p, &e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
        return e;                                                                                        \
    }
ATOMICS(8, uint8_t) ATOMICS(16, uint16_t) ATOMICS(32, uint32_t) ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

// ---------------------------------------------------------------- what -fsanitize=alignment,bounds calls
struct UbsanPlace { const char* file; uint32_t line, column; };
struct UbsanType { uint16_t kind, info; char name[1]; };
struct UbsanMismatch { UbsanPlace at; UbsanType* type; unsigned char log_alignment, kind; };
struct UbsanBounds { UbsanPlace at; UbsanType *array, *index; };
void __ubsan_handle_type_mismatch_v1(UbsanMismatch* d, uintptr_t p) {
    if (p >= 65536)
        report_at("misaligned", d->at.file, (int)d->at.line,
                  "an access to %s at address %p, which is not a multiple of %d", d->type->name, (void*)p,
                  1 << d->log_alignment);
}
void __ubsan_handle_type_mismatch_v1_abort(UbsanMismatch* d, uintptr_t p) { __ubsan_handle_type_mismatch_v1(d, p); }
void __ubsan_handle_out_of_bounds(UbsanBounds* d, uintptr_t index) {
    report_at("out of bounds", d->at.file, (int)d->at.line, "index %ld of %s", (long)index, d->array->name);
}
void __ubsan_handle_out_of_bounds_abort(UbsanBounds* d, uintptr_t index) { __ubsan_handle_out_of_bounds(d, index); }
}
