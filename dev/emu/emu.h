// What a .cu file sees of the emulator: emucc includes this before every file. NVIDIA's own headers give the types and
// declarations; here are the qualifiers, the thread variables, warp and atomic operations and the device math.
#pragma once
#include <assert.h>                                    // math.h, not cmath: abs(float) and isnan stand without std::
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <memory>
#include <tuple>
#include <type_traits>
#define EMU 1
#include <driver_types.h>
// Declared before NVIDIA's cudaLaunchKernelEx, which calls it by its qualified name (translate.py drops its cast).
template <class... A>
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, void (*k)(A...), void** args,
                                const char* f = __builtin_FILE(), int l = __builtin_LINE());
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Words for translate.py, which sees the text after the preprocessor.
#undef __shared__
#undef __global__
#undef __device__
#undef __constant__
#undef __managed__
#undef __host__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#define __shared__ __emu_shared__
#define __global__ __emu_global__
#define __device__ __emu_device__
#define __constant__ __emu_constant__
#define __managed__ __emu_managed__
#define __host__
#define __launch_bounds__ __emu_launch_bounds__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#undef NULL
#define NULL nullptr
#define EMU_AT const char *f = __builtin_FILE(), int l = __builtin_LINE()
// A function of the emulator that user code calls: never instrumented, never inlined, so that the checker finds the
// user's line as its return address.
#define EMU_HOOK __attribute__((noinline, no_sanitize("thread")))
#define EMU_PC __builtin_return_address(0)

namespace emu {

struct Fiber;
struct CpAsync { void* dst; const void* src; int bytes, zeros, group; void* pc; };
struct Thread;                                         // the scheduler's part: internal.h
struct ThreadId { uint3 tid; int lane, warp, linear; };
extern __thread ThreadId* cur;                         // the CUDA thread that runs now; null in host code

// ---- errors
// Does EMU_FAIL=cudaMalloc:7 ask for this call to fail? (dev/test/trace_calls.cpp listens here.)
bool failing(const char* function);
cudaError_t set_error(cudaError_t e);                  // also remembers it for cudaGetLastError
cudaError_t error_so_far();
void count_kernels();            // from here on, unless EMU_COUNT=0: what count_table prints, a row a kernel
void count_table(FILE* f);
// The first line of every function of the runtime API.
#define EMU_MAY_FAIL(error) if (emu::failing(__func__)) return emu::set_error(error)

// ---- kernels and launches
struct Kernel {  // one instance of a kernel: translate.py puts a static one into each
    int max_threads;                                   // __launch_bounds__, 0 if none
    const void* address;                               // the function, found on first entry
};
extern __thread Kernel* entered;
void enter_first(Kernel& k, void* pc);  // first thread of a launch: attributes and bounds are checked there
EMU_HOOK inline void enter(Kernel& k) { if (entered != &k) enter_first(k, EMU_PC); }

struct Closure { void (*call)(void*); std::shared_ptr<void> data; size_t size; };
struct Config { dim3 grid, block; size_t smem; cudaStream_t stream; const char *name, *file; int line; };
void launch(const Config& c, Closure closure);
void check_attributes(const cudaLaunchConfig_t& c);
struct Launch {
    Config c;
    Launch(const char* name, dim3 grid, dim3 block, size_t smem = 0, cudaStream_t stream = nullptr, EMU_AT)
        : c{grid, block, smem, stream, name, f, l} {}
    template <class F, class... A> struct Pack { F f; std::tuple<A...> args; };
    template <class F, class... A>
    void go(F f, A... args) {    // arguments are copied when the launch is issued, as CUDA does
        using P = Pack<F, A...>;
        launch(c, {[](void* p) { auto* q = (P*)p; std::apply(q->f, q->args); },
                   std::make_shared<P>(P{f, std::tuple<A...>(args...)}), sizeof(P)});
    }
};

// ---- shared memory
struct SharedVar { const char* name; size_t size, align; int id; };
struct SharedUse { const void* code; const SharedVar* var; };   // translate.py notes one at each declaration
void* shared_var(SharedVar& v);                        // this block's copy
void* dynamic_smem(size_t align);

// ---- barriers, warp operations
enum BarrierKind { BARRIER_PLAIN, BARRIER_COUNT, BARRIER_AND, BARRIER_OR };
int barrier(int site, BarrierKind kind, int predicate, EMU_AT);
// Lanes leave a pointer to their operands; the last one of `mask` to arrive calls `done` for all. They must agree in
// `what` and `done`: an xor shuffle does not meet an indexed one.
using Done = void (*)(void** lane_args, unsigned arrived);
void warp_op(unsigned mask, const char* what, void* arg, Done done, const char* f, int l);
void syncwarp(unsigned mask, const char* f, int l);
unsigned activemask(const char* f, int l);
void fence(bool device_wide);
enum AtomicKind { ATOMIC_LOAD, ATOMIC_WRITE, ATOMIC_CAS };
void atomic_access(const void* p, size_t n, AtomicKind kind,
                   void* pc);                          // the checker's and the spin detector's view of an atomic
extern __thread bool quiet;                            // the checker looks away
void poll();                                           // the thread waits for another one: let others run
[[noreturn]] void trap(const char* f, int l);
// ---- tensor-core instructions and asynchronous copies (llmc/ptx.cuh calls these)
struct MmaArg { float* d; const uint32_t* a; const uint32_t* b; const float* c; };
void mma_done(void** args, unsigned arrived);
struct LdmArg { uint32_t* r; const void* p; int n; bool trans; void* pc = nullptr; };
void ldm_done(void** args, unsigned arrived);
void ldmatrix(uint32_t* r, const void* p, int n, bool trans, const char* f, int l);
void cp_async(void* dst, const void* src, int bytes, int zeros = 0);
void cp_commit();
void cp_wait(int groups_in_flight);                    // < 0: all, committed or not
void access16(const void* p, bool write, void* pc);    // a 16-byte access as one

// ---- host <-> __device__ variables
cudaError_t symbol_copy(const char* call, const void* symbol, size_t symbol_size, size_t offset, const void* src,
                        void* dst, size_t n, cudaMemcpyKind kind, cudaStream_t stream, bool async, void* pc);
template <class T> struct ShuffleArg { T v, r; int src; unsigned down, mask; };
void copy_bits(void* to, const void* from, size_t n);      // memcpy that the checker does not see
void absent_lane(const char* what, int lane, int src, unsigned mask);
// A tree sum over the first 8 lanes, say, by __shfl_down_sync(0xff, v, 4) and so on: its upper lanes read absent ones,
// but nobody uses what they get. A mask that names lanes which have gone elsewhere is no such tree.
unsigned lanes_of_warp();                              // those the block has, exited or not
inline bool unused_half(unsigned lanes, unsigned down, unsigned mask) {
    if (lanes != (mask & lanes_of_warp())) return false;
    bool first_lanes = (lanes & (lanes + 1)) == 0;
    unsigned n = (unsigned)__builtin_popcount(lanes);
    return down && first_lanes && (n & (n - 1)) == 0 && down <= n / 2;
}
template <class T> __attribute__((no_sanitize("thread"))) void shuffle_done(void** args, unsigned arrived) {
    for (int l = 0; l < 32; l++) {
        if (!(arrived >> l & 1)) continue;
        auto* x = (ShuffleArg<T>*)args[l];
        if (arrived >> x->src & 1) {
            copy_bits(&x->r, &((ShuffleArg<T>*)args[x->src])->v, sizeof(T));
        } else {                                       // the value is undefined in CUDA: poison
            if (!unused_half(arrived, x->down, x->mask)) absent_lane("shuffle", l, x->src, arrived);
            __builtin_memset((void*)&x->r, 0xff, sizeof(T));
        }
    }
}
template <class T> inline __attribute__((no_sanitize("thread"))) T shuffle(unsigned mask, T v, int src, const char* f,
                                                                           int l, const char* mode, unsigned down = 0) {
    ShuffleArg<T> x;
    x.v = v;
    x.src = src & 31;
    x.down = down;
    x.mask = mask;
    warp_op(mask, mode, &x, shuffle_done<T>, f, l);
    return x.r;
}
// Reductions and votes over 64-bit values; match compares them.
enum RedOp { RED_ADD, RED_MIN, RED_MAX, RED_AND, RED_OR, RED_XOR, RED_BALLOT, RED_MATCH_ANY, RED_MATCH_ALL };
int64_t reduce(unsigned mask, int64_t v, RedOp op, const char* f, int l);

// ---- atomics: compare-and-swap on raw bits, so that any type of 2, 4 or 8 bytes works
template <size_t N> struct Bits;
template <> struct Bits<2> { using type = uint16_t; };
template <> struct Bits<4> { using type = uint32_t; };
template <> struct Bits<8> { using type = uint64_t; };
template <AtomicKind K = ATOMIC_WRITE, class T, class F>
inline __attribute__((no_sanitize("thread"))) T atomic_update(T* p, F op, void* pc) {
    using U = typename Bits<sizeof(T)>::type;
    atomic_access(p, sizeof(T), K, pc);
    quiet = true;                                      // the arithmetic in between is part of the atomic
    U before = __atomic_load_n((U*)p, __ATOMIC_RELAXED), after;
    T old;
    do {
        __builtin_memcpy((void*)&old, &before, sizeof(T));
        T v = op(old);
        __builtin_memcpy(&after, (const void*)&v, sizeof(T));
    } while (!__atomic_compare_exchange_n((U*)p, &before, after, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    quiet = false;
    return old;
}
template <class T> using Same = std::common_type_t<T>;  // not deduced: atomicAdd(unsigned*, 1) works
}

// ---- built-in variables
#define threadIdx (::emu::cur->tid)
extern __thread uint3 blockIdx;  // variables, not macros: host code often has names like gridDim of its own
extern __thread dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- barriers and fences; __COUNTER__ gives every call site a number of its own
#define __syncthreads() ((void)::emu::barrier(__COUNTER__, ::emu::BARRIER_PLAIN, 0))
#define __syncthreads_count(p) (::emu::barrier(__COUNTER__, ::emu::BARRIER_COUNT, (p) != 0))
#define __syncthreads_and(p) (::emu::barrier(__COUNTER__, ::emu::BARRIER_AND, (p) != 0))
#define __syncthreads_or(p) (::emu::barrier(__COUNTER__, ::emu::BARRIER_OR, (p) != 0))
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_AT) { emu::syncwarp(mask, f, l); }
inline void __threadfence() { emu::fence(true); }
inline void __threadfence_system() { emu::fence(true); }
inline void __threadfence_block() { emu::fence(false); }
inline void __nanosleep(unsigned) { emu::poll(); }
inline void __trap(EMU_AT) { emu::trap(f, l); }
inline void __brkpt() {}
inline long long clock64() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// ---- warp operations
template <class T> T __shfl_sync(unsigned m, T v, int src, int w = 32, EMU_AT) {
    int n = emu::cur->lane;
    return emu::shuffle(m, v, (n & ~(w - 1)) | (src & (w - 1)), f, l, "__shfl_sync");
}
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, EMU_AT) {
    int n = emu::cur->lane, s = n ^ x;
    return emu::shuffle(m, v, s < (n & ~(w - 1)) + w ? s : n, f, l, "__shfl_xor_sync");
}
template <class T> T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32, EMU_AT) {
    int n = emu::cur->lane;
    return emu::shuffle(m, v, (n & (w - 1)) + (int)d < w ? n + (int)d : n, f, l, "__shfl_down_sync", d);
}
template <class T> T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32, EMU_AT) {
    int n = emu::cur->lane;
    return emu::shuffle(m, v, (n & (w - 1)) >= (int)d ? n - (int)d : n, f, l, "__shfl_up_sync");
}
inline unsigned __ballot_sync(unsigned m, int p, EMU_AT) {
    return (unsigned)emu::reduce(m, p != 0, emu::RED_BALLOT, f, l);
}
inline int __any_sync(unsigned m, int p, EMU_AT) { return emu::reduce(m, p != 0, emu::RED_OR, f, l) != 0; }
inline int __all_sync(unsigned m, int p, EMU_AT) { return emu::reduce(m, p != 0, emu::RED_AND, f, l) != 0; }
template <class T> T __reduce_add_sync(unsigned m, T v, EMU_AT) { return (T)emu::reduce(m, v, emu::RED_ADD, f, l); }
template <class T> T __reduce_min_sync(unsigned m, T v, EMU_AT) { return (T)emu::reduce(m, v, emu::RED_MIN, f, l); }
template <class T> T __reduce_max_sync(unsigned m, T v, EMU_AT) { return (T)emu::reduce(m, v, emu::RED_MAX, f, l); }
template <class T> T __reduce_and_sync(unsigned m, T v, EMU_AT) { return (T)emu::reduce(m, v, emu::RED_AND, f, l); }
template <class T> T __reduce_or_sync(unsigned m, T v, EMU_AT) { return (T)emu::reduce(m, v, emu::RED_OR, f, l); }
template <class T> T __reduce_xor_sync(unsigned m, T v, EMU_AT) { return (T)emu::reduce(m, v, emu::RED_XOR, f, l); }
namespace emu {
template <class T> inline int64_t match_bits(T v) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "match compares 4 or 8 bytes");
    int64_t b = 0;
    __builtin_memcpy(&b, &v, sizeof(T));
    return b;
}
}
template <class T> unsigned __match_any_sync(unsigned m, T v, EMU_AT) {
    return (unsigned)emu::reduce(m, emu::match_bits(v), emu::RED_MATCH_ANY, f, l);
}
template <class T> unsigned __match_all_sync(unsigned m, T v, int* all, EMU_AT) {
    unsigned r = (unsigned)emu::reduce(m, emu::match_bits(v), emu::RED_MATCH_ALL, f, l);
    *all = r != 0;
    return r;
}
inline unsigned __activemask(EMU_AT) { return emu::activemask(f, l); }

// ---- atomics, and the loads and stores with a cache hint
#define EMU_ATOMIC_NAMED(name, expression)                                                                             \
    template <class T> EMU_HOOK T name(T* p, emu::Same<T> v) {                                                         \
        return emu::atomic_update(p, [v](T o) -> T { return (T)(expression); }, EMU_PC);                               \
    }
#define EMU_ATOMIC(name, expression) /* the three scopes */                                                            \
    EMU_ATOMIC_NAMED(name, expression) EMU_ATOMIC_NAMED(name##_block, expression)                                      \
    EMU_ATOMIC_NAMED(name##_system, expression)
EMU_ATOMIC(atomicAdd, o + v)
EMU_ATOMIC(atomicSub, o - v)
EMU_ATOMIC(atomicMax, o > v ? o : v)
EMU_ATOMIC(atomicMin, o < v ? o : v)
EMU_ATOMIC(atomicExch, ((void)o, v))
EMU_ATOMIC(atomicAnd, o & v)
EMU_ATOMIC(atomicOr, o | v)
EMU_ATOMIC(atomicXor, o ^ v)
EMU_ATOMIC(atomicInc, o >= v ? 0u : o + 1)
EMU_ATOMIC(atomicDec, o == 0 || o > v ? v : o - 1)
#define EMU_CAS(name)                                                                                                  \
    template <class T> EMU_HOOK T name(T* p, emu::Same<T> c, emu::Same<T> v) {                                         \
        return emu::atomic_update<emu::ATOMIC_CAS>(p, [c, v](T o) { return o == c ? v : o; }, EMU_PC);                 \
    }
EMU_CAS(atomicCAS) EMU_CAS(atomicCAS_block) EMU_CAS(atomicCAS_system)
#define EMU_LOAD(name) template <class T> inline T name(const T* p) { return *p; }
EMU_LOAD(__ldg) EMU_LOAD(__ldcs) EMU_LOAD(__ldcg) EMU_LOAD(__ldca) EMU_LOAD(__ldlu) EMU_LOAD(__ldcv)
#define EMU_STORE(name) template <class T> inline void name(T* p, emu::Same<T> v) { *p = v; }
EMU_STORE(__stcs) EMU_STORE(__stcg) EMU_STORE(__stwb) EMU_STORE(__stwt)
inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }

#include "emu_math.h"
#include "emu_host.h"

#ifdef EMU_CHECK
// The compiler would expand memcpy and memset of a constant size without telling the checker; as in the C library's
// fortified headers, calls go through these. Small powers of two become ordinary, watched accesses.
extern "C" {
void* emu_memcpy(void* d, const void* s, size_t n);
void* emu_memmove(void* d, const void* s, size_t n);
void* emu_memset(void* d, int v, size_t n);
int emu_memcmp(const void* a, const void* b, size_t n);
#define EMU_FORTIFY extern inline __attribute__((gnu_inline, always_inline, artificial))
EMU_FORTIFY void* memcpy(void* __restrict d, const void* __restrict s, size_t n) noexcept {
    if (__builtin_constant_p(n) && (n == 1 || n == 2 || n == 4 || n == 8 || n == 16)) return __builtin_memcpy(d, s, n);
    return emu_memcpy(d, s, n);
}
EMU_FORTIFY void* memmove(void* d, const void* s, size_t n) noexcept { return emu_memmove(d, s, n); }
EMU_FORTIFY void* memset(void* d, int v, size_t n) noexcept { return emu_memset(d, v, n); }
EMU_FORTIFY int memcmp(const void* a, const void* b, size_t n) noexcept { return emu_memcmp(a, b, n); }
}
#endif
