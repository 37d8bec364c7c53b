// What the emulator's parts share with each other: threads, warps, blocks and workers; options; reports; the checker's
// and the runtime's entry points. User code never sees this file.
#ifndef EMU_INTERNAL_H
#define EMU_INTERNAL_H
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>
#include "emu.h"
#include "fiber.h"
#undef threadIdx
#undef __syncthreads
extern "C" void* _Unwind_FindEnclosingFunction(void* pc);
#define PC __builtin_return_address(0)                    // the line of the user's program that called

namespace emu {

// The linker names the ends of the sections into which translate.py puts device variables and uses of shared ones.
#define EMU_SECTION(type, name) \
    extern "C" type __start_##name[] __attribute__((weak)), __stop_##name[] __attribute__((weak))
EMU_SECTION(char, emu_device);
EMU_SECTION(char, emu_constant);
EMU_SECTION(char, emu_managed);
EMU_SECTION(const SharedUse, emu_shared_uses);

// ---------------------------------------------------------------- options, all from the environment
enum Order { ORDER_FORWARD, ORDER_REVERSE, ORDER_RANDOM };
struct Options {
    Order order;                 // EMU_ORDER=forward|reverse|random:SEED
    unsigned seed;
    size_t stack;                // EMU_STACK, KiB a thread
    int workers;                 // EMU_WORKERS: operating-system threads, 0 = all cores
    bool lazy_streams;           // EMU_LAZY_STREAM=1|0|random:SEED: default 0, in the checker 1
    unsigned stream_seed;        // 0: as late as possible
    bool poison;                 // EMU_POISON=0: memory starts as zeros instead of 0xff
    int sm;                      // EMU_SM=80|89|90|100|120
    int devices;                 // EMU_DEVICES
    double memory_gib;           // EMU_MEM, of each device
    double watchdog;             // EMU_WATCHDOG, seconds without progress; 0 = never
    bool count;                  // EMU_COUNT=1 with --check: memory counters
};
const Options& options();
struct Limits { size_t smem_block, smem_optin, smem_sm; int regs_sm, threads_sm, blocks_sm, multiprocessors; };
const Limits& limits();          // of the architecture asked for

inline double seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---------------------------------------------------------------- reports: anything reported makes the program exit 1
extern std::atomic<long> report_count;
// One fault, printed once for each pair of lines. `pc` (and `other_pc`, or null) are code addresses; the text follows.
void report(const char* kind, void* pc, void* other_pc, const char* format, ...) __attribute__((format(printf, 4, 5)));
// The same where file and line are known.
void report_at(const char* kind, const char* file, int line, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
std::string where(const void* pc);                    // "file.cu:12"
std::string who();                                    // "kernel k, block (0,0,0), thread (5,0,0)"
std::string thread_name(int linear, dim3 block);      // "(5,0,0)"
std::string block_name(long linear, dim3 grid);
[[noreturn]] void fatal(const char* format, ...)
    __attribute__((format(printf, 1, 2)));    // the emulator cannot go on: exit code 1
void watch_thread();  // this thread runs kernels: the watchdog and the fault handler know it

// ---------------------------------------------------------------- threads, warps, blocks
struct Snapshot;                                       // checker: what a thread knew at a fence
struct Acquired;                                       // checker: what it learnt through flags
struct Block;
struct Thread : ThreadId {
    Fiber* fiber;                // null until it first waits: threads that never wait share one fiber
    bool done;
    const char *wait_what, *wait_file;
    int wait_line;
    std::vector<CpAsync> copies; // cp.async in flight
    int copy_group;
    const void* polled;          // the address of the last atomic or volatile access, and how often in a row
    void* polled_pc;
    int polls, polls_of_any;
    // checker
    uint32_t clock;              // advances at every fence, __syncwarp and barrier
    uint32_t fence_clock;        // accesses up to here were followed by a device-wide fence
    std::shared_ptr<Snapshot> fence_device, fence_block;
    std::shared_ptr<Acquired> acquired;
};
struct Slot { unsigned mask, arrived; const char *what, *file; int line; void* arg[32]; Done done; };
struct Warp {
    Slot slot[32];               // operations in progress: a lane waits in at most one
    unsigned busy;               // bit i: slot[i] is in use
    unsigned alive;
    unsigned asking;             // lanes in __activemask
    unsigned answer[32];
    bool synced;                 // checker: `known` is in use
    uint32_t known[32][32];      // checker: known[i][j] = lane i has seen what lane j did up to this clock
};
struct Cell;
const size_t SHARED_ARENA = 1 << 20;
struct Grid;
struct Block {
    uint3 index;
    long linear;
    Grid* grid;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    unsigned ready;              // warps with ready lanes
    unsigned lanes[32];          // ready lanes of each warp
    unsigned polling[32];        // lanes that wait for another thread's store
    unsigned asking;             // warps with lanes in __activemask
    int warp;                    // the warp that runs: left only when all its lanes wait
    int alive, arrived;
    int site;                    // of the barrier the first thread arrived at
    Thread *first_arrived, *mismatch;
    BarrierKind kind;
    int accumulated, result;
    int poll_rounds;
    bool any_polling, finished;
    uint32_t random;
    // shared memory
    char* shared;
    size_t shared_used, static_bytes, shared_dirty;     // dirty: what the checker has to forget
    char* dynamic;
    std::vector<std::pair<int, char*>> variables;      // SharedVar id -> its place in this block
    // checker
    uint32_t barrier_clock;      // all that happened before is known to every thread
    bool fenced;                 // some thread fenced since the last barrier
    std::shared_ptr<std::vector<uint32_t>> fences;     // fence clocks of all threads at the last barrier
    std::shared_ptr<Acquired> acquired;
    uint8_t* shared_state;
    Cell* shared_cells;
};
struct Op;
struct Grid {                    // one launch that is being executed
    Config config;
    Closure closure;
    long blocks, serial;
    size_t dynamic_limit;        // what cudaFuncSetAttribute allows
    std::atomic<long> next;
    std::atomic<cudaError_t> failed;                   // cudaSuccess: it goes on
    Op* op;
};
struct Worker {
    Fiber main;
    Fiber *running, *pool;
    Block* block;
    const Slot* finishing;       // the warp operation that is being computed
    Thread* start;               // the thread a fresh fiber begins with
    std::vector<Block*> idle;
    Fiber* probe;
    const Closure* probe_closure;
    Kernel* probe_result;
    bool probing;
    std::atomic<long> progress;  // the watchdog looks at it
    std::atomic<Grid*> grid;
};
extern __thread Worker* worker;
inline Thread* this_thread() { return (Thread*)cur; }

void run_grid(Grid& g);          // returns when every block has finished
Kernel* probe_kernel(const Closure& c);  // which kernel the closure calls (it runs up to its first statement)
char* shared_alloc(Block* b, size_t n, size_t align, const char* name);

// ---------------------------------------------------------------- the checker (check.cpp; nocheck.cpp does nothing)
extern const bool checking;
enum MemoryKind { MEMORY_DEVICE, MEMORY_PINNED, MEMORY_MANAGED };
void* check_malloc(size_t n, MemoryKind kind);         // from the arena with shadow; null when it is used up
void check_free(void* p, size_t n);
void check_register(void* p, size_t n);                // cudaHostRegister: host memory with shadow from now on
void check_unregister(void* p);
void check_grid_begin(Grid& g);
void check_block_begin(Block* b);
void check_shared_alloc(Block* b, char* p, size_t n);
void check_barrier(Block* b);
void check_syncwarp(Block* b, int warp, unsigned mask);
void check_fence(bool device_wide);
void check_atomic(const void* p, size_t n, AtomicKind kind, void* pc);
void check_touch(const void* p, size_t n, bool write, void* pc);    // by the current thread
void check_cp_issue(const CpAsync& c);
void check_cp_land(const CpAsync& c);
void check_lane_touch(Thread* lane, const void* p, size_t n, bool write, void* pc);
void check_launch(Grid& g);                            // counters: a launch ended
void count_mma();
// Work that is not a kernel: copies, cuBLAS, NCCL. Names the operation that runs now and its accesses.
void check_op_touch(const void* p, size_t n, bool write);
void check_op_copy(void* dst, const void* src, size_t n);          // initialised or not travels along
// Host memory that an unfinished operation still uses.
void check_host_pending(Op* op, const void* p, size_t n);
void check_settle();                                   // two stores of the same value are no conflict: were they?
void check_exit();
void note_poll(const void* p, void* pc);  // an atomic or volatile access; lets others run when it looks like waiting
// counters (count.cpp)
extern bool counting;
void count_access(const void* pc, const Thread* t, uintptr_t address, size_t n, bool shared, bool write);
void count_launch_begin(Grid& g);
void count_launch_end(Grid& g);
void count_print();
bool count_wished(); // EMU_COUNT does not forbid it (report.cpp)
FILE* count_open();  // $EMU_COUNT_OUT, or standard error

// ---------------------------------------------------------------- operations and streams (stream.cpp)
struct Stream;
struct Op {
    uint32_t id;
    Stream* stream;
    uint32_t index;              // in its stream
    std::vector<uint32_t> clock; // happened-before: clock[s] = operations of stream s known to be finished
    uint32_t host_time;          // when it was issued
    std::string name;
    void* pc;                    // the call in user code
    std::function<void()> run;
    std::function<bool()> ready; // false: it would have to wait for other processes; null: it never does
    std::vector<std::shared_ptr<Op>> needs;
    bool done, skip_at_exit;
    double finished;             // at what time
};
using OpRef = std::shared_ptr<Op>;
// Issues work on a stream; it runs now, or as late as possible with lazy streams. Null: no stream of that handle.
OpRef enqueue(cudaStream_t s, const char* name, void* pc, std::function<void()> run,
              std::function<bool()> ready = nullptr);
void wait_for(const OpRef& op);                        // the host waits for it
bool host_knows(uint32_t op_id);
bool op_before(uint32_t a, uint32_t b);
const Op* op_by_id(uint32_t id);
extern uint32_t host_time;
extern __thread Op* running_op;
void drain_for_exit();
cudaError_t synchronize(const char* call, void* pc);   // the host waits for everything
// What is wrong with so much static and dynamic shared memory, if cudaFuncSetAttribute allows `limit`; "" if nothing.
std::string shared_excess(size_t fixed, size_t dynamic, size_t limit);
bool valid_device_range(const void* p, size_t n, size_t* left);

// What a program has destroyed stays allocated, so that a later use is recognised, and so do the workers of threads
// that have ended; held here, it is no leak to ASan.
inline void bury(void* p) {
    static std::mutex mutex;
    static std::vector<void*>* graveyard = new std::vector<void*>;
    std::lock_guard<std::mutex> guard(mutex);
    graveyard->push_back(p);
}

}
#endif
