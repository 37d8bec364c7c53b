// Device math under its CUDA names: single-precision intrinsics, bit tricks, and what cuda_bf16.h leaves to nvcc.
// Results are those of the host's libm: compare with a GPU by tolerance, never bitwise.
#pragma once

// ---- fast and rounded single precision
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }   // NaN becomes 0, as on the GPU
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmaf_ieee_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float norm3df(float a, float b, float c) { return sqrtf(a * a + b * b + c * c); }
inline float rnorm3df(float a, float b, float c) { return 1.0f / norm3df(a, b, c); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
inline float sinpif(float x) { return (float)sin(3.14159265358979323846 * (double)x); }
inline float cospif(float x) { return (float)cos(3.14159265358979323846 * (double)x); }
inline void sincospif(float x, float* s, float* c) { *s = sinpif(x); *c = cospif(x); }

// ---- raw bits
namespace emu {
template <class To, class From> inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To r;
    __builtin_memcpy(&r, &x, sizeof r);
    return r;
}
}
inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bits<double>(x); }
inline int __double2hiint(double x) { return (int)(emu::bits<long long>(x) >> 32); }
inline int __double2loint(double x) { return (int)emu::bits<long long>(x); }
inline double __hiloint2double(int hi, int lo) {
    return emu::bits<double>((long long)((uint64_t)(unsigned)hi << 32 | (unsigned)lo));
}

// ---- conversions: CUDA saturates where C++ is undefined, and NaN becomes 0
namespace emu {
template <class I> inline I saturate(double x) {
    if (x != x) return 0;
    if (x <= (double)std::numeric_limits<I>::min()) return std::numeric_limits<I>::min();
    if (x >= (double)std::numeric_limits<I>::max()) return std::numeric_limits<I>::max();
    return (I)x;
}
}
#define EMU_TO_INT(suffix, round)                                                                \
    inline int __float2int_##suffix(float x) { return emu::saturate<int>(round((double)x)); }    \
    inline unsigned __float2uint_##suffix(float x) { return emu::saturate<unsigned>(round((double)x)); } \
    inline long long __float2ll_##suffix(float x) { return emu::saturate<long long>(round((double)x)); } \
    inline int __double2int_##suffix(double x) { return emu::saturate<int>(round(x)); }
EMU_TO_INT(rn, nearbyint) EMU_TO_INT(rz, trunc) EMU_TO_INT(ru, ceil) EMU_TO_INT(rd, floor)
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline double __int2double_rn(int x) { return x; }

// ---- integers
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
inline unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    uint64_t all = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned sel = s >> (4 * i) & 15, byte = (unsigned)(all >> (8 * (sel & 7))) & 0xff;
        if (sel & 8) byte = byte & 0x80 ? 0xff : 0;    // replicate the sign
        r |= byte << (8 * i);
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    n &= 31;
    return n ? hi << n | lo >> (32 - n) : hi;
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    n &= 31;
    return n ? lo >> n | hi << (32 - n) : lo;
}
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __mul24(int a, int b) {
    return (int)((int64_t)((int)((unsigned)a << 8) >> 8) * ((int)((unsigned)b << 8) >> 8));
}
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline unsigned __sad(int a, int b, unsigned c) { return c + (unsigned)(a > b ? a - b : b - a); }
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
inline int __hadd(int a, int b) { return (int)(((int64_t)a + b) >> 1); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> (8 * i)) * (signed char)(b >> (8 * i));
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++) c += (a >> (8 * i) & 0xff) * (b >> (8 * i) & 0xff);
    return c;
}
// Four bytes or two halves of a word at once.
namespace emu {
template <class T, class F> inline unsigned each_part(unsigned a, unsigned b, F op) {
    constexpr unsigned BITS = 8 * sizeof(T);
    unsigned r = 0;
    for (unsigned i = 0; i < 32; i += BITS)
        r |= ((unsigned)op((int)(T)(a >> i), (int)(T)(b >> i)) & ((1u << BITS) - 1)) << i;
    return r;
}
}
#define EMU_PARTS(name, S, T4, T2, expression)                                                                        \
    inline unsigned __v##name##S##4(unsigned a, unsigned b) {                                                          \
        return emu::each_part<T4>(a, b, [](int x, int y) { return expression; });                                      \
    }                                                                                                                  \
    inline unsigned __v##name##S##2(unsigned a, unsigned b) {                                                          \
        return emu::each_part<T2>(a, b, [](int x, int y) { return expression; });                                      \
    }
#define EMU_PARTS_BOTH(name, expression) /* signed and unsigned */                                                     \
    EMU_PARTS(name, s, int8_t, int16_t, expression) EMU_PARTS(name, u, uint8_t, uint16_t, expression)
EMU_PARTS(add, , uint8_t, uint16_t, x + y) EMU_PARTS(sub, , uint8_t, uint16_t, x - y)
EMU_PARTS_BOTH(max, x > y ? x : y) EMU_PARTS_BOTH(min, x < y ? x : y)
EMU_PARTS_BOTH(absdiff, x > y ? x - y : y - x) EMU_PARTS(avg, u, uint8_t, uint16_t, (x + y + 1) / 2)
EMU_PARTS(hadd, u, uint8_t, uint16_t, (x + y) / 2)
EMU_PARTS(cmpeq, , uint8_t, uint16_t, -(x == y)) EMU_PARTS(cmpne, , uint8_t, uint16_t, -(x != y))
EMU_PARTS(seteq, , uint8_t, uint16_t, x == y) EMU_PARTS(setne, , uint8_t, uint16_t, x != y)
EMU_PARTS_BOTH(cmpgt, -(x > y)) EMU_PARTS_BOTH(cmpge, -(x >= y)) EMU_PARTS_BOTH(cmplt, -(x < y))
EMU_PARTS_BOTH(cmple, -(x <= y))
inline unsigned __vsadu4(unsigned a, unsigned b) { return __dp4a(__vabsdiffu4(a, b), 0x01010101u, 0u); }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a > (C)b ? (C)a : (C)b;
}
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)a : (C)b;
}
inline unsigned umin(unsigned a, unsigned b) { return min(a, b); }
inline unsigned umax(unsigned a, unsigned b) { return max(a, b); }
inline long long llmin(long long a, long long b) { return min(a, b); }
inline long long llmax(long long a, long long b) { return max(a, b); }
inline unsigned long long ullmin(unsigned long long a, unsigned long long b) { return min(a, b); }
inline unsigned long long ullmax(unsigned long long a, unsigned long long b) { return max(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }           // the GPU's max drops a NaN
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }

// ---- bf16 and fp16: what their headers define for nvcc only. Computed in fp32 and rounded once.
#define EMU_HALF_UNARY(H, H2, to, from, name, expression)                                                     \
    inline H h##name(H a) { float x = to(a); return from(expression); }                                       \
    inline H2 h2##name(H2 a) { return H2(h##name(a.x), h##name(a.y)); }
#define EMU_HALF_TYPE(H, H2, to, from)                                                                        \
    EMU_HALF_UNARY(H, H2, to, from, exp, expf(x)) EMU_HALF_UNARY(H, H2, to, from, exp2, exp2f(x))             \
    EMU_HALF_UNARY(H, H2, to, from, log, logf(x)) EMU_HALF_UNARY(H, H2, to, from, log2, log2f(x))             \
    EMU_HALF_UNARY(H, H2, to, from, sqrt, sqrtf(x)) EMU_HALF_UNARY(H, H2, to, from, rsqrt, 1.0f / sqrtf(x))   \
    EMU_HALF_UNARY(H, H2, to, from, rcp, 1.0f / x) EMU_HALF_UNARY(H, H2, to, from, sin, sinf(x))              \
    EMU_HALF_UNARY(H, H2, to, from, cos, cosf(x)) EMU_HALF_UNARY(H, H2, to, from, tanh, tanhf(x))             \
    EMU_HALF_UNARY(H, H2, to, from, floor, floorf(x)) EMU_HALF_UNARY(H, H2, to, from, ceil, ceilf(x))         \
    EMU_HALF_UNARY(H, H2, to, from, rint, rintf(x)) EMU_HALF_UNARY(H, H2, to, from, trunc, truncf(x))         \
    inline H __hfma(H a, H b, H c) { return from(fmaf(to(a), to(b), to(c))); }                                \
    inline H __hfma_relu(H a, H b, H c) { return from(fmaxf(fmaf(to(a), to(b), to(c)), 0.0f)); }              \
    inline H2 __hfma2(H2 a, H2 b, H2 c) { return H2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }
EMU_HALF_TYPE(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __float2bfloat16_rn)
EMU_HALF_TYPE(__half, __half2, __half2float, __float2half_rn)
