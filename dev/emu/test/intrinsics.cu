// Every emulated intrinsic against a plain loop or a formula, bf16 rounding over all bit patterns, mma and ldmatrix
// against float64. Prints the name of what fails.
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include "llmc/ptx.cuh"

static int failures;
#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            printf("line %d: %s\n", __LINE__, #condition);                     \
            failures++;                                                        \
        }                                                                      \
    } while (0)

template <class T> static std::vector<T> get(const T* d, size_t n) {
    std::vector<T> v(n);
    cudaMemcpy(v.data(), d, n * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
}
template <class T> static T* room(size_t n) {
    T* p;
    cudaMalloc(&p, n * sizeof(T));
    return p;
}

// ---------------------------------------------------------------- warp operations, every width and distance
__global__ void shuffles(int* out, int width, int d) {
    int v = 100 + threadIdx.x, l = threadIdx.x;
    out[0 * 32 + l] = __shfl_sync(~0u, v, d, width);
    out[1 * 32 + l] = __shfl_up_sync(~0u, v, d, width);
    out[2 * 32 + l] = __shfl_down_sync(~0u, v, d, width);
    out[3 * 32 + l] = __shfl_xor_sync(~0u, v, d, width);
}
static void test_shuffles() {
    int* d = room<int>(128);
    for (int width : {1, 2, 4, 8, 16, 32}) for (int k = 0; k < 32; k++) {
        shuffles<<<1, 32>>>(d, width, k);
        auto r = get(d, 128);
        for (int l = 0; l < 32; l++) {
            int base = l / width * width, in = l % width;
            CHECK(r[l] == 100 + base + k % width);
            CHECK(r[32 + l] == 100 + (in >= k ? l - k : l));
            CHECK(r[64 + l] == 100 + (in + k < width ? l + k : l));
            CHECK(r[96 + l] == 100 + ((l ^ k) < base + width ? (l ^ k) : l));
        }
    }
}

__global__ void shuffle_types(double* d, long long* i, __nv_bfloat162* b) {
    d[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x * 1.5, 1);
    i[threadIdx.x] = __shfl_sync(~0u, (1ll << 40) + threadIdx.x, 7);
    b[threadIdx.x] = __shfl_down_sync(~0u, __floats2bfloat162_rn(threadIdx.x, 2), 1);
}
static void test_shuffle_types() {
    auto *d = room<double>(32);
    auto* i = room<long long>(32);
    auto* b = room<__nv_bfloat162>(32);
    shuffle_types<<<1, 32>>>(d, i, b);
    CHECK(get(d, 32)[4] == 7.5);
    CHECK(get(i, 32)[31] == (1ll << 40) + 7);
    CHECK(__bfloat162float(get(b, 32)[3].x) == 4 && __bfloat162float(get(b, 32)[3].y) == 2);
}

__global__ void votes(unsigned* out, const int* in) {
    int l = threadIdx.x, v = in[l];
    unsigned* o = out + l * 12;
    o[0] = __ballot_sync(~0u, v > 5);
    o[1] = __any_sync(~0u, v > 30);
    o[2] = __all_sync(~0u, v >= 0);
    o[3] = __reduce_add_sync(~0u, v);
    o[4] = __reduce_min_sync(~0u, v - 20);
    o[5] = __reduce_max_sync(~0u, (unsigned)v);
    o[6] = __reduce_and_sync(~0u, (unsigned)v | 64);
    o[7] = __reduce_or_sync(~0u, (unsigned)v);
    o[8] = __reduce_xor_sync(~0u, (unsigned)v);
    o[9] = __match_any_sync(~0u, v % 5);
    int all;
    o[10] = __match_all_sync(~0u, v % 5, &all) + all;
    o[11] = l < 8 ? __ballot_sync(0xff, v & 1) : 0;
}
static void test_votes() {
    std::vector<int> in(32);
    for (int i = 0; i < 32; i++) in[i] = (i * 7 + 3) % 29;
    int *d = room<int>(32), sum = 0, least = INT_MAX;
    unsigned *o = room<unsigned>(32 * 12), ballot = 0, most = 0, band = ~0u, bor = 0, bxor = 0;
    cudaMemcpy(d, in.data(), 128, cudaMemcpyHostToDevice);
    votes<<<1, 32>>>(o, d);
    for (int i = 0; i < 32; i++) {
        ballot |= (unsigned)(in[i] > 5) << i;
        sum += in[i];
        least = std::min(least, in[i] - 20);
        most = std::max(most, (unsigned)in[i]);
        band &= (unsigned)in[i] | 64;
        bor |= (unsigned)in[i];
        bxor ^= (unsigned)in[i];
    }
    auto r = get(o, 32 * 12);
    for (int l = 0; l < 32; l++) {
        unsigned peers = 0;
        for (int k = 0; k < 32; k++) peers |= (unsigned)(in[k] % 5 == in[l] % 5) << k;
        unsigned* x = &r[l * 12];
        CHECK(x[0] == ballot && x[1] == 0 && x[2] == 1 && (int)x[3] == sum && (int)x[4] == least && x[5] == most);
        CHECK(x[6] == band && x[7] == bor && x[8] == bxor && x[9] == peers && x[10] == 0);
    }
}

__global__ void block_votes(int* out, int n) {
    int p = threadIdx.x < n;
    out[threadIdx.x] = __syncthreads_count(p) * 4 + __syncthreads_and(p) * 2 + __syncthreads_or(p);
}
static void test_block_votes() {
    int* d = room<int>(96);
    for (int n : {0, 1, 50, 96}) {
        block_votes<<<1, 96>>>(d, n);
        for (int v : get(d, 96)) CHECK(v == n * 4 + (n == 96) * 2 + (n > 0));
    }
}

// ---------------------------------------------------------------- atomics
template <class T> __global__ void atomics(T* p) {
    atomicAdd(p + 0, 3);
    atomicSub(p + 1, 2);
    atomicMax(p + 2, (T)threadIdx.x);
    atomicMin(p + 3, (T)threadIdx.x);
    atomicExch(p + 4, 9);
    T old = p[5];
    for (T seen; (seen = atomicCAS(p + 5, old, old * 2)) != old;) old = seen;
}
template <class T> static void test_atomics() {
    T* p = room<T>(8);
    std::vector<T> init(8, 1);
    cudaMemcpy(p, init.data(), 8 * sizeof(T), cudaMemcpyHostToDevice);
    atomics<<<2, 8>>>(p);
    auto r = get(p, 8);
    CHECK(r[0] == (T)(1 + 3 * 16) && r[1] == (T)(1 - 2 * 16) && r[2] == (T)7 && r[3] == (T)0 && r[4] == (T)9 &&
          r[5] == (T)65536);
}
__global__ void bit_atomics(unsigned* p, float* f, double* d, __nv_bfloat16* b, __nv_bfloat162* b2) {
    atomicAnd(p, ~(1u << threadIdx.x));
    atomicOr(p + 1, 1u << threadIdx.x);
    atomicXor(p + 2, 3u);
    atomicInc(p + 3, 4);
    atomicDec(p + 4, 4);
    atomicAdd(f, 0.5f);
    atomicAdd(d, 0.25);
    atomicAdd(b, __float2bfloat16(1.0f));
    atomicAdd(b2, __floats2bfloat162_rn(1, 2));
}
static void test_bit_atomics() {
    unsigned* p = room<unsigned>(8);
    char* rest = room<char>(64);
    cudaMemset(p, 0, 32);
    cudaMemset(p, 0xff, 4);
    cudaMemset(rest, 0, 64);
    bit_atomics<<<1, 7>>>(p, (float*)rest, (double*)(rest + 8), (__nv_bfloat16*)(rest + 16),
                          (__nv_bfloat162*)(rest + 20));
    auto r = get(p, 5);
    CHECK(r[0] == ~0x7fu && r[1] == 0x7f && r[2] == 3 && r[3] == 2 && r[4] == 3);
    CHECK(get((float*)rest, 1)[0] == 3.5f && get((double*)(rest + 8), 1)[0] == 1.75);
    CHECK(__bfloat162float(get((__nv_bfloat16*)(rest + 16), 1)[0]) == 7);
    CHECK(__bfloat162float(get((__nv_bfloat162*)(rest + 20), 1)[0].y) == 14);
}

// ---------------------------------------------------------------- integers, bits, conversions
static void test_integers() {
    CHECK(__popc(0xf0f0u) == 8 && __popcll(~0ull) == 64 && __clz(0) == 32 && __clz(1) == 31 && __clzll(1) == 63 &&
          __ffs(0) == 0 && __ffs(8) == 4);
    CHECK(__brev(1u) == 0x80000000u && __brevll(1ull) == 1ull << 63 &&
          __byte_perm(0x33221100u, 0x77665544u, 0x7531u) == 0x77553311u);
    CHECK(__funnelshift_l(0x80000000u, 1u, 1) == 3u && __funnelshift_r(2u, 1u, 1) == 0x80000001u);
    CHECK(__mulhi(1 << 30, 8) == 2 && __umulhi(~0u, ~0u) == 0xfffffffeu && __umul64hi(~0ull, 2) == 1 &&
          __mul24(-2, 3) == -6 && __sad(3, 7, 1) == 5);
    CHECK(__dp4a(0x01020304, 0x01010101, 5) == 15 && __hadd(3, 6) == 4);
    CHECK(__dp4a(0xff000000u, 0xff000000u, 1u) == 65026 && __vsadu4(0x01ff0305u, 0x03000307u) == 259);
    CHECK(__vadd4(0x01ff7f80u, 0x01010180u) == 0x02008000u && __vsub2(0x00010000u, 0x00020001u) == 0xffffffffu);
    CHECK(__vmaxs4(0xff017f80u, 0x00000000u) == 0x00017f00u && __vminu2(0xffff0001u, 0x00020003u) == 0x00020001u);
    CHECK(__vcmpeq4(0x01020304u, 0x01000300u) == 0xff00ff00u && __vcmpgts2(0xffff0002u, 0x00000001u) == 0x0000ffffu);
    CHECK(__vavgu4(0x01ff0300u, 0x02ff0000u) == 0x02ff0200u && __vabsdiffs2(0x8000ffffu, 0x7fff0001u) == 0xffff0002u);
    for (float x : {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 3e9f, -3e9f, 7.25f}) {
        CHECK(__float2int_rz(x) == (x >= 2147483648.0f ? INT_MAX : x <= -2147483648.0f ? INT_MIN : (int)x));
        if (fabsf(x) < 1e9f)
            CHECK(__float2int_rn(x) == (int)nearbyintf(x) && __float2int_ru(x) == (int)ceilf(x) &&
                  __float2int_rd(x) == (int)floorf(x));
    }
    CHECK(__float2int_rn(NAN) == 0 && __float2uint_rz(-1.0f) == 0 && __int_as_float(__float_as_int(-1.5f)) == -1.5f);
    CHECK(max(1, 2u) == 2u && min(1.0f, 2.0) == 1.0 && max(NAN, 1.0f) == 1.0f && __saturatef(NAN) == 0 &&
          __saturatef(3) == 1);
    CHECK(rsqrtf(4.0f) == 0.5f && __fdividef(1, 4) == 0.25f && __frcp_rn(8) == 0.125f &&
          fabsf(__expf(1) - 2.7182818f) < 1e-6f);
    CHECK(exp2_approx(3) == 8 && exp2_approx(-200) == 0 && exp2_approx(-INFINITY) == 0 && std::isnan(exp2_approx(NAN)));
}

// all 2^16 patterns widen exactly; all floats between two of them round to nearest, ties to even
static void test_bf16() {
    for (uint32_t h = 0; h < 65536; h++) {
        uint32_t bits = h << 16;
        float f, back;
        memcpy(&f, &bits, 4);
        uint16_t half = (uint16_t)h;
        __nv_bfloat16 b;
        memcpy((void*)&b, &half, 2);
        back = __bfloat162float(b);
        CHECK(std::isnan(f) ? std::isnan(back) : memcmp(&f, &back, 4) == 0);
        if (std::isnan(f)) continue;
        uint16_t again;
        __nv_bfloat16 r = __float2bfloat16_rn(f);
        memcpy(&again, (const void*)&r, 2);
        CHECK(again == half);
        for (uint32_t low : {1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            uint32_t wide = bits | low, want = (wide + 0x7fff + (h & 1)) >> 16;
            memcpy(&f, &wide, 4);
            if (std::isnan(f)) continue;
            r = __float2bfloat16_rn(f);
            memcpy(&again, (const void*)&r, 2);
            CHECK(again == (uint16_t)want);
        }
    }
    __nv_bfloat162 a = __floats2bfloat162_rn(1.5f, -2), b = __floats2bfloat162_rn(3, 0.5f), c = __hfma2(a, b, a);
    CHECK(__bfloat162float(c.x) == 6 && __bfloat162float(c.y) == -3);
    CHECK(__bfloat162float(hexp(__float2bfloat16(0.0f))) == 1 && __half2float(hsqrt(__float2half(16.0f))) == 4);
}

// ---------------------------------------------------------------- tensor cores
__global__ void multiply(float* d, const __nv_bfloat16* a /* 16x16 */, const __nv_bfloat16* b /* 16x8 */,
                         const float* c, int trans) {
    __shared__ __align__(16) __nv_bfloat16 sa[16 * 16], sb[16 * 8], sat[16 * 16], sbt[8 * 16];
    int l = threadIdx.x;
    for (int i = l; i < 256; i += 32) {
        sa[i] = a[i];
        sat[i % 16 * 16 + i / 16] = a[i];
    }
    for (int i = l; i < 128; i += 32) {
        sb[i] = b[i];
        sbt[i % 8 * 16 + i / 8] = b[i];
    }
    __syncwarp();
    uint32_t fa[4], fb[2];
    if (trans) {
        ldsm4t(fa, sat + (l % 8 + l / 16 * 8) * 16 + (l / 8 % 2) * 8);
        ldsm2t(fb, sb + l % 16 * 8);
    } else {
        ldsm4(fa, sa + l % 16 * 16 + l / 16 * 8);
        ldsm2(fb, sbt + l % 8 * 16 + (l / 8 % 2) * 8);
    }
    int g = l / 4, t = l % 4 * 2;
    float acc[4] = {c[g * 8 + t], c[g * 8 + t + 1], c[(g + 8) * 8 + t], c[(g + 8) * 8 + t + 1]};
    mma16816(acc, fa, fb);
    d[g * 8 + t] = acc[0];
    d[g * 8 + t + 1] = acc[1];
    d[(g + 8) * 8 + t] = acc[2];
    d[(g + 8) * 8 + t + 1] = acc[3];
}
static void test_mma() {
    srand(7);
    for (int round = 0; round < 20; round++) {
        std::vector<__nv_bfloat16> a(256), b(128);
        std::vector<float> c(128);
        for (auto& x : a) x = __float2bfloat16(rand() / (float)RAND_MAX - 0.5f);
        for (auto& x : b) x = __float2bfloat16(rand() / (float)RAND_MAX - 0.5f);
        for (auto& x : c) x = rand() / (float)RAND_MAX;
        auto *da = room<__nv_bfloat16>(256), *db = room<__nv_bfloat16>(128);
        float *dc = room<float>(128), *dd = room<float>(128);
        cudaMemcpy(da, a.data(), 512, cudaMemcpyHostToDevice);
        cudaMemcpy(db, b.data(), 256, cudaMemcpyHostToDevice);
        cudaMemcpy(dc, c.data(), 512, cudaMemcpyHostToDevice);
        multiply<<<1, 32>>>(dd, da, db, dc, round % 2);
        auto d = get(dd, 128);
        for (int i = 0; i < 16; i++) for (int j = 0; j < 8; j++) {
            double want = c[i * 8 + j];
            for (int k = 0; k < 16; k++)
                want += (double)__bfloat162float(a[i * 16 + k]) * (double)__bfloat162float(b[k * 8 + j]);
            CHECK(fabs(d[i * 8 + j] - want) < 16 * 6e-8 * 4);     // 16 roundings of sums below 4
        }
    }
}

__global__ void async_copies(float* out, const float* in, int n) {
    __shared__ __align__(16) float s[3 * 128];
    int i = threadIdx.x;
    cpa16(s + 4 * i, in + 4 * i, 4 * i < n);
    cpa_commit();
    cpa8(s + 128 + 2 * i, in + 2 * i, 2 * i < n);
    cpa_commit();
    cpa4(s + 256 + i, in + i, i < n);
    cpa_commit();
    cpa_wait<1>();
    float first = s[4 * i], second = s[128 + 2 * i];
    cpa_wait<0>();
    out[i] = first;
    out[32 + i] = second;
    out[64 + i] = s[256 + i];
}
static void test_async_copies() {
    float h[128], *in = room<float>(128), *out = room<float>(96);
    for (int i = 0; i < 128; i++) h[i] = i + 1;
    cudaMemcpy(in, h, sizeof h, cudaMemcpyHostToDevice);
    async_copies<<<1, 32>>>(out, in, 40);
    auto r = get(out, 96);
    for (int i = 0; i < 32; i++) {
        CHECK(r[i] == (4 * i < 40 ? 4 * i + 1 : 0));
        CHECK(r[32 + i] == (2 * i < 40 ? 2 * i + 1 : 0));
        CHECK(r[64 + i] == i + 1);
    }
}

// ---------------------------------------------------------------- variables, launches
__device__ float table[4];
__constant__ int limits_[3] = {5, 6, 7};
__managed__ int shared_by_both = 3;
struct Argument { int a[3]; double b; };
__global__ void arguments(double* out, Argument x, size_t n, const char* text, bool flag) {
    out[0] = x.a[2] + x.b;
    out[1] = (double)n;
    out[2] = text ? 1 : flag + limits_[1];
    out[3] = table[2] + shared_by_both;
    shared_by_both = 8;
}
static void test_arguments() {
    double* d = room<double>(4);
    float h[4] = {1, 2, 3, 4};
    cudaMemcpyToSymbol(table, h, sizeof h);
    Argument x = {{1, 2, 3}, 0.5};
    arguments<<<dim3(1), 1, 0, 0>>>(d, x, 7, NULL, true);
    x.b = 9;
    auto r = get(d, 4);
    CHECK(r[0] == 3.5 && r[1] == 7 && r[2] == 7 && r[3] == 6);
    CHECK(shared_by_both == 8);
    void* p;
    cudaGetSymbolAddress(&p, table);
    CHECK(p == (void*)&table);
}

extern __shared__ float file_scope[];
__shared__ int file_scope_fixed[8];
__global__ void file_scope_shared(float* out) {
    file_scope[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 8) file_scope_fixed[threadIdx.x] = 2;
    __syncthreads();
    out[threadIdx.x] = file_scope[31 - threadIdx.x] + file_scope_fixed[threadIdx.x % 8];
}
static void test_file_scope() {
    float* d = room<float>(32);
    file_scope_shared<<<1, 32, 128>>>(d);
    CHECK(get(d, 32)[0] == 33);
}

static void test_device() {
    cudaDeviceProp p;
    CHECK(cudaGetDeviceProperties(&p, 0) == cudaSuccess && p.warpSize == 32);
    const char* sm = getenv("EMU_SM");
    int want = sm ? atoi(sm) : 90;
    CHECK(p.major * 10 + p.minor == want);
    CHECK(p.sharedMemPerBlockOptin == (size_t)(want == 120 ? 99 << 10 : want == 80 ? 163 << 10 : 227 << 10));
    CHECK(cudaGetDeviceProperties(&p, 99) == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice && cudaGetLastError() == cudaSuccess);
    int n;
    CHECK(cudaGetDeviceCount(&n) == cudaSuccess && n == (getenv("EMU_DEVICES") ? atoi(getenv("EMU_DEVICES")) : 1));
    CHECK(!strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation"));
    void* q;
    CHECK(cudaMalloc(&q, (size_t)1 << 50) == cudaErrorMemoryAllocation);
    cudaGetLastError();
}

int main() {
    test_shuffles();
    test_shuffle_types();
    test_votes();
    test_block_votes();
    test_atomics<int>();
    test_atomics<unsigned>();
    test_atomics<unsigned long long>();
    test_atomics<float>();
    test_atomics<double>();
    test_bit_atomics();
    test_integers();
    test_bf16();
    test_mma();
    test_async_copies();
    test_arguments();
    test_file_scope();
    test_device();
    printf("%d failures\n", failures);
    return failures != 0;
}
