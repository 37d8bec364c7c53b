// Cooperative groups and the pipeline primitives (dev/emu/include) against plain loops. Prints the line of what fails.
#include "cases.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda_pipeline.h>
namespace cg = cooperative_groups;

static int failures;
#define CHECK(condition) if (!(condition)) { printf("line %d: %s\n", __LINE__, #condition); failures++; }

// ---------------------------------------------------------------- blocks and grids
__global__ void blocks(unsigned* out) {
    cg::thread_block b = cg::this_thread_block();
    unsigned* o = out + (blockIdx.x * b.size() + b.thread_rank()) * 4;
    o[0] = b.thread_index().x + 10 * b.thread_index().y + 100 * b.thread_index().z;
    o[1] = b.group_index().x;
    o[2] = b.num_threads() + b.dim_threads().x * 1000 + b.group_dim().y * 10000;
    b.sync();
    cg::sync(b);
    o[3] = out[(blockIdx.x * b.size() + (b.thread_rank() + 1) % b.size()) * 4];
}
static void test_blocks() {
    unsigned* d = device<unsigned>(2 * 12 * 4);
    blocks<<<2, dim3(3, 2, 2)>>>(d);
    auto r = download(d, 2 * 12 * 4);
    for (unsigned i = 0; i < 24; i++) {
        unsigned t = i % 12, place = t % 3 + 10 * (t / 3 % 2) + 100 * (t / 6), n = (t + 1) % 12;
        CHECK(r[4 * i] == place && r[4 * i + 1] == i / 12 && r[4 * i + 2] == 12 + 3000 + 20000);
        CHECK(r[4 * i + 3] == n % 3 + 10 * (n / 3 % 2) + 100 * (n / 6));
    }
}
__global__ void grid(int* data, int n) {               // each round needs the one before, of all blocks
    cg::grid_group g = cg::this_grid();
    int i = (int)g.thread_rank();
    for (int round = 1; round <= 3; round++) {
        int v = data[(round - 1) * n + (i + 1) % n];
        data[round * n + i] = v + (g.is_valid() && g.size() == (unsigned)n && g.num_threads() == (unsigned)n);
        g.sync();
    }
}
static void test_grid() {
    int n = 4 * 48, *d = zeros<int>(4 * n);
    void* args[] = {&d, &n};
    CHECK(cudaLaunchCooperativeKernel(grid, dim3(2, 2), dim3(48), args, 0, 0) == cudaSuccess);
    auto r = download(d, 4 * n);
    for (int i = 0; i < n; i++) CHECK(r[3 * n + i] == 3);
}

// ---------------------------------------------------------------- tiles of every size
template <unsigned N> __global__ void tiles(int* out) {
    auto t = cg::tiled_partition<N>(cg::this_thread_block());
    int i = (int)threadIdx.x, r = (int)t.thread_rank(), all = 0, *o = out + i * 16;
    o[0] = r + 100 * (int)t.meta_group_rank() + 10000 * (int)t.meta_group_size();
    o[1] = t.shfl(i, N - 1);
    o[2] = t.shfl_up(i, 1);
    o[3] = t.shfl_down(i, 1);
    o[4] = t.shfl_xor(i, N / 2);
    o[5] = (int)t.ballot(i % 3 == 0);
    o[6] = t.any(i == 5) + 2 * t.all(i > 2);
    o[7] = (int)t.match_any(i % 2);
    o[8] = (int)t.match_all(i / (int)N, all) + all;
    o[9] = cg::reduce(t, i, cg::plus<int>());
    o[10] = cg::reduce(t, i, cg::greater<int>()) * 1000 + cg::reduce(t, i, cg::less<int>());
    o[11] = cg::reduce(t, 1 << r, cg::bit_or<int>()) ^ cg::reduce(t, i, cg::bit_xor<int>());
    o[12] = cg::inclusive_scan(t, i, cg::plus<int>());
    o[13] = cg::exclusive_scan(t, i);
    o[14] = (int)(t.size() + t.num_threads());
    t.sync();
    o[15] = cg::reduce(t, i | 64, cg::bit_and<int>());
}
template <unsigned N> static void test_tiles() {
    int* d = device<int>(64 * 16);
    tiles<N><<<1, 64>>>(d);
    auto all = download(d, 64 * 16);
    for (int i = 0; i < 64; i++) {
        int n = (int)N, *o = &all[i * 16], base = i / n * n, r = i - base;
        int ballot = 0, any = 0, every = 1, same = 0, sum = 0, bits = 0, x = 0, before = 0, common = ~0;
        for (int k = 0; k < n; k++) {
            int v = base + k;
            ballot |= (v % 3 == 0) << k;
            any |= v == 5;
            every &= v > 2;
            same |= (v % 2 == i % 2) << k;
            sum += v;
            bits |= 1 << k;
            x ^= v;
            common &= v | 64;
            if (v < i) before += v;
        }
        CHECK(o[0] == r + 100 * (i / n) + 10000 * (64 / n) && o[1] == base + n - 1);
        CHECK(o[2] == (r ? i - 1 : i) && o[3] == (r < n - 1 ? i + 1 : i) && o[4] == (i ^ (n / 2)));
        CHECK(o[5] == ballot && o[6] == any + 2 * every && o[7] == same && o[8] == bits + 1);
        CHECK(o[9] == sum && o[10] == (base + n - 1) * 1000 + base && o[11] == (bits ^ x) && o[15] == common);
        CHECK(o[12] == before + i && o[13] == before && o[14] == 2 * n);
    }
}

// ---------------------------------------------------------------- lanes that happen to be together, and any group
__global__ void together(int* out, int* counter) {
    int i = (int)threadIdx.x, *o = out + i * 10;
    if (i % 3 != 0) return;                            // 11 lanes stay
    cg::coalesced_group g = cg::coalesced_threads();
    int r = (int)g.thread_rank();
    o[0] = r + 100 * (int)g.size() + 10000 * (int)g.num_threads();
    o[1] = g.shfl(i, 2);
    o[2] = g.shfl_up(i, 1) + 100 * g.shfl_down(i, 1);
    o[3] = g.shfl_xor(i, 1);
    o[4] = (int)g.ballot(r % 2) + (int)g.match_any(r / 4) * 4096;
    o[5] = g.any(r == 7) + 2 * g.all(r < 7);
    o[6] = cg::reduce(g, i, cg::plus<int>());
    o[7] = cg::inclusive_scan(g, i);
    g.sync();
    int base = 0;                                      // one atomic for all of them
    if (r == 0) base = atomicAdd(counter, (int)g.size());
    o[8] = g.shfl(base, 0) + r;
    cg::thread_group any = g;
    any.sync();
    o[9] = (int)(any.size() + any.num_threads() + any.thread_rank());
}
static void test_together() {
    int *d = zeros<int>(320), *counter = zeros<int>(1);
    together<<<1, 32>>>(d, counter);
    auto all = download(d, 320);
    for (int r = 0, before = 0; r < 11; r++) {
        int i = 3 * r, *o = &all[i * 10], next = (r ^ 1) < 11 ? (r ^ 1) : r, quad = 0;
        before += i;
        for (int k = 0; k < 11; k++) quad |= (k / 4 == r / 4) << k;
        CHECK(o[0] == r + 1100 + 110000 && o[1] == 6 && o[3] == 3 * next);
        CHECK(o[2] == (r ? i - 3 : i) + 100 * (r < 10 ? i + 3 : i));
        CHECK(o[4] == 0x2aa + quad * 4096 && o[5] == 1 && o[6] == 165 && o[7] == before && o[8] == r && o[9] == 22 + r);
    }
    CHECK(download(counter, 1)[0] == 11);
}
__global__ void labels(int* out) {                     // sums of the lanes with equal labels
    int i = (int)threadIdx.x;
    auto warp = cg::tiled_partition<32>(cg::this_thread_block());
    auto same = cg::labeled_partition(warp, i % 5);
    out[i] = cg::reduce(same, i, cg::plus<int>());
    auto half = cg::binary_partition(same, i < 16);
    out[32 + i] = cg::reduce(half, 1, cg::plus<int>());
}
static void test_labels() {
    int* d = device<int>(64);
    labels<<<1, 32>>>(d);
    auto r = download(d, 64);
    for (int i = 0; i < 32; i++) {
        int sum = 0, n = 0;
        for (int k = i % 5; k < 32; k += 5) {
            sum += k;
            n += (k < 16) == (i < 16);
        }
        CHECK(r[i] == sum && r[32 + i] == n);
    }
}
__device__ int sum_of(cg::thread_group g, int* s, int v) {     // the guide's reduction over any group
    unsigned r = g.thread_rank();
    for (unsigned i = g.size() / 2; i > 0; i /= 2) {
        s[r] = v;
        g.sync();
        if (r < i) v += s[r + i];
        g.sync();
    }
    return v;
}
__global__ void any_group(int* out) {
    __shared__ int s[64];
    cg::thread_block b = cg::this_thread_block();
    int whole = sum_of(b, s, 1);
    cg::thread_group part = cg::tiled_partition(cg::thread_group(b), 8);
    int eight = sum_of(part, s + b.thread_rank() / 8 * 8, 1);
    int four = sum_of(cg::tiled_partition<4>(b), s + b.thread_rank() / 4 * 4, 1);
    if (b.thread_rank() == 0) *out = whole * 10000 + eight * 100 + four;
}
static void test_any_group() {
    int* d = device<int>(1);
    any_group<<<1, 64>>>(d);
    CHECK(download(d, 1)[0] == 640804);
}

// ---------------------------------------------------------------- pipeline primitives: two stages in flight
__global__ void pipeline(float* out, const float* in, int stages) {
    __shared__ __align__(16) float s[2][128];
    float sum = 0;
    int i = (int)threadIdx.x;
    __pipeline_memcpy_async(&s[0][4 * i], in + 4 * i, 16);
    __pipeline_commit();
    for (int t = 0; t < stages; t++) {
        size_t zeros = t + 1 < stages ? 0 : 16;
        __pipeline_memcpy_async(&s[(t + 1) % 2][4 * i], in + (zeros ? 0 : (t + 1) * 128 + 4 * i), 16, zeros);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        sum += s[t % 2][127 - 4 * i];
        __syncthreads();
    }
    __pipeline_wait_prior(0);
    out[i] = sum + s[stages % 2][4 * i];               // the last stage was filled with zeros
}
static void test_pipeline() {
    float *in = upload(ramp<float>(512)), *out = device<float>(32);
    pipeline<<<1, 32>>>(out, in, 4);
    auto r = download(out, 32);
    for (int i = 0; i < 32; i++) CHECK(r[i] == 4 * (128 - 4 * i) + 128 * 6);
}

int main() {
    test_blocks();
    test_grid();
    test_tiles<1>();
    test_tiles<2>();
    test_tiles<4>();
    test_tiles<8>();
    test_tiles<16>();
    test_tiles<32>();
    test_together();
    test_labels();
    test_any_group();
    test_pipeline();
    printf("%d failures\n", failures);
    return failures != 0;
}
