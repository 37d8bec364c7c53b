// PTX instructions as small functions: the only inline assembly of the project, each beside its emulated twin
// (dev/emu). All pointers are generic; conversion to shared-memory addresses happens inside, so that the emulator sees
// real ones. At the end loads and stores of 4 and 8 bf16 as floats.
#ifndef LLMC_PTX_CUH
#define LLMC_PTX_CUH
#include <stdint.h>
#include <string.h>
#include <cuda_bf16.h>

#ifndef EMU
// ---------------------------------------------------------------- on a GPU
// the 32-bit address of a generic pointer into shared memory
__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// d (16x8) += a (16x16, rows) b (16x8, columns), bf16 in, fp32 accumulation; every lane of the warp takes part
__device__ inline void mma16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ldmatrix: one, two or four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8,
// 16-byte aligned. With t: transposed on the way.
__device__ inline void ldsm1(uint32_t (&r)[1], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ inline void ldsm1t(uint32_t (&r)[1], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ inline void ldsm2(uint32_t (&r)[2], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ inline void ldsm2t(uint32_t (&r)[2], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ inline void ldsm4(uint32_t (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
__device__ inline void ldsm4t(uint32_t (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

// cp.async: global -> shared without registers. Where inside is false zeros are written and src is not read (but keep
// it a valid address). The data are there for this thread after commit and wait, for others after a barrier as well.
__device__ inline void cpa16(void* dst, const void* src, bool inside = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
__device__ inline void cpa8(void* dst, const void* src, bool inside = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(inside ? 8 : 0)
                 : "memory");
}
__device__ inline void cpa4(void* dst, const void* src, bool inside = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(inside ? 4 : 0)
                 : "memory");
}
__device__ inline void cpa_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// waits until at most N of this thread's committed groups are in flight
template <int N> __device__ inline void cpa_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ inline void cpa_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 2^x to about 2 ulp, subnormals flushed to zero
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes at once, 16-byte aligned
__device__ inline uint4 load16(const void* p) { return *(const uint4*)p; }
__device__ inline void store16(void* p, uint4 v) { *(uint4*)p = v; }

#else
// ---------------------------------------------------------------- in the emulator
inline uint32_t shared_address(const void* p) { return (uint32_t)(uintptr_t)p; }
inline void mma16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_AT) {
    emu::MmaArg x{d, a, b, d};
    emu::warp_op(0xffffffffu, "mma", &x, emu::mma_done, f, l);
}
inline void ldsm1(uint32_t (&r)[1], const void* p, EMU_AT) { emu::ldmatrix(r, p, 1, false, f, l); }
inline void ldsm1t(uint32_t (&r)[1], const void* p, EMU_AT) { emu::ldmatrix(r, p, 1, true, f, l); }
inline void ldsm2(uint32_t (&r)[2], const void* p, EMU_AT) { emu::ldmatrix(r, p, 2, false, f, l); }
inline void ldsm2t(uint32_t (&r)[2], const void* p, EMU_AT) { emu::ldmatrix(r, p, 2, true, f, l); }
inline void ldsm4(uint32_t (&r)[4], const void* p, EMU_AT) { emu::ldmatrix(r, p, 4, false, f, l); }
inline void ldsm4t(uint32_t (&r)[4], const void* p, EMU_AT) { emu::ldmatrix(r, p, 4, true, f, l); }
inline void cpa16(void* dst, const void* src, bool inside = true) {
    emu::cp_async(dst, src, inside ? 16 : 0, inside ? 0 : 16);
}
inline void cpa8(void* dst, const void* src, bool inside = true) {
    emu::cp_async(dst, src, inside ? 8 : 0, inside ? 0 : 8);
}
inline void cpa4(void* dst, const void* src, bool inside = true) {
    emu::cp_async(dst, src, inside ? 4 : 0, inside ? 0 : 4);
}
inline void cpa_commit() { emu::cp_commit(); }
template <int N> inline void cpa_wait() { emu::cp_wait(N); }
inline void cpa_wait_all() { emu::cp_wait(-1); }
inline float exp2_approx(float x) {
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}
__attribute__((noinline, no_sanitize("thread"))) inline uint4 load16(const void* p) {
    emu::access16(p, false, __builtin_return_address(0));
    return *(const uint4*)p;
}
__attribute__((noinline, no_sanitize("thread"))) inline void store16(void* p, uint4 v) {
    emu::access16(p, true, __builtin_return_address(0));
    *(uint4*)p = v;
}
#endif

// ---------------------------------------------------------------- bf16, several at a time
typedef __nv_bfloat16 bf16;

__device__ inline float round_bf16(float x) { return __bfloat162float(__float2bfloat16(x)); }

// two floats as a pair of bf16, the first in the lower half: a register of an mma operand, four bytes of memory
__device__ inline uint32_t pack2(float a, float b) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// 8 bf16 as floats, 16-byte aligned
__device__ inline void load8(float (&x)[8], const bf16* p) {
    uint4 bits = load16(p);
    uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ inline void store8(bf16* p, const float (&x)[8]) {
    store16(p, make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7])));
}

// 4 bf16 as floats, 8-byte aligned, and 4 floats, 16-byte aligned
__device__ inline void load4(float (&x)[4], const bf16* p) {
    uint2 bits = *(const uint2*)p;
    x[0] = __uint_as_float(bits.x << 16);
    x[1] = __uint_as_float(bits.x & 0xffff0000u);
    x[2] = __uint_as_float(bits.y << 16);
    x[3] = __uint_as_float(bits.y & 0xffff0000u);
}
__device__ inline void load4(float (&x)[4], const float* p) {
    float4 y = *(const float4*)p;
    x[0] = y.x;
    x[1] = y.y;
    x[2] = y.z;
    x[3] = y.w;
}
__device__ inline void store4(bf16* p, const float (&x)[4]) {
    *(uint2*)p = make_uint2(pack2(x[0], x[1]), pack2(x[2], x[3]));
}
__device__ inline void store4(float* p, const float (&x)[4]) { *(float4*)p = make_float4(x[0], x[1], x[2], x[3]); }

#endif
