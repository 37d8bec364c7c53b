// Planted faults: divergent barriers, warp operations, launch limits, cp.async and ldmatrix.
#include "cases.h"
#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include "llmc/ptx.cuh"

// ---------------------------------------------------------------- barriers
__global__ void two_barriers(int* out, bool bad) {
    if (bad && threadIdx.x < 32) {
        out[threadIdx.x] = 1;
        __syncthreads();                                                   // bad: two_barriers
    } else {
        out[threadIdx.x] = 2;
        __syncthreads();
    }
}
static void two_barriers_case(bool bad) { two_barriers<<<1, 64>>>(device<int>(64), bad); }

__global__ void uneven_loop(int* out, bool bad) {
    int rounds = bad ? 1 + threadIdx.x / 32 : 2;
    for (int i = 0; i < rounds; i++) __syncthreads();                      // bad: uneven_loop
    out[threadIdx.x] = rounds;
    __syncthreads();
}
static void uneven_loop_case(bool bad) { uneven_loop<<<1, 64>>>(device<int>(64), bad); }

__global__ void barrier_in_branch(int* out, bool bad) {
    if (!bad || threadIdx.x < 16) __syncthreads();                         // bad: barrier_in_branch
    __syncwarp();
    out[threadIdx.x] = 1;
}
static void barrier_in_branch_case(bool bad) { barrier_in_branch<<<1, 32>>>(device<int>(32), bad); }

// ---------------------------------------------------------------- warp operations
__global__ void shuffle_in_branch(float* out, bool bad) {
    float v = threadIdx.x;
    if (!bad || threadIdx.x < 16) v += __shfl_down_sync(0xffffffff, v, 8); // bad: shuffle_in_branch
    __syncthreads();
    out[threadIdx.x] = v;
}
static void shuffle_in_branch_case(bool bad) { shuffle_in_branch<<<1, 32>>>(device<float>(32), bad); }

__global__ void tree_in_branch(float* out, bool bad) {   // the other lanes do not come, whatever they do afterwards
    float v = threadIdx.x;
    if (bad ? threadIdx.x < 8 : threadIdx.x < 32) {
        for (int o = 4; o > 0; o /= 2) v += __shfl_down_sync(0xffffffff, v, o);   // bad: tree_in_branch
        if (threadIdx.x == 0) *out = v;
    }
}
static void tree_in_branch_case(bool bad) { tree_in_branch<<<1, 64>>>(device<float>(1), bad); }

__device__ float warp_sum(float v) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_down_sync(0xffffffff, v, o);   // bad: sum_in_loop
    return v;
}
__global__ void sum_in_loop(float* out, int n, bool bad) {     // lanes leave the loop at different times
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += 32) {
        sum += i;
        if (bad) sum = warp_sum(sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}
static void sum_in_loop_case(bool bad) { sum_in_loop<<<1, 32>>>(device<float>(1), 70, bad); }

__global__ void outside_mask(float* out, bool bad) {
    float v = threadIdx.x;
    if (threadIdx.x < 16) v += __shfl_xor_sync(bad ? 0xff : 0xffff, v, 1); // bad: outside_mask
    out[threadIdx.x] = v;
}
static void outside_mask_case(bool bad) { outside_mask<<<1, 32>>>(device<float>(32), bad); }

__global__ void partial_warp(float* out, int n) {
    float v = threadIdx.x;
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o); // bad: partial_warp
    if (threadIdx.x < n) out[threadIdx.x] = v;
}
static void partial_warp_case(bool bad) { partial_warp<<<1, bad ? 48 : 64>>>(device<float>(64), 64); }

// The sums of 8 warps, added by the first 8 lanes: legal with 8 or 16.
__global__ void few_lanes(float* out, int lanes) {
    float v = threadIdx.x;
    if (threadIdx.x < lanes) {
        for (int o = 4; o > 0; o /= 2) v += __shfl_down_sync((1u << lanes) - 1, v, o);   // bad: few_lanes
        if (threadIdx.x == 0) *out = v;
    }
}
static void few_lanes_case(bool bad) { few_lanes<<<1, 32>>>(device<float>(1), bad ? 6 : 8); }

__global__ void exited_lanes(float* out, bool bad) {
    int n = bad ? 20 : 32;
    if (threadIdx.x >= n) return;
    float v = threadIdx.x;
    v += __shfl_sync(0xffffffff, v, 31 - threadIdx.x);                     // bad: exited_lanes
    out[threadIdx.x] = v;
}
static void exited_lanes_case(bool bad) { exited_lanes<<<1, 32>>>(device<float>(32), bad); }

__global__ void different_masks(float* out, bool bad) {
    float v = threadIdx.x;
    unsigned mask = bad && threadIdx.x == 3 ? 0x0000000f : 0xffffffff;
    v = __shfl_sync(mask, v, 0);                                           // bad: different_masks
    out[threadIdx.x] = v;
}
static void different_masks_case(bool bad) { different_masks<<<1, 32>>>(device<float>(32), bad); }

__global__ void part_and_whole(int* out, bool bad) {    // quads come to the warp's operation one after the other
    int v = threadIdx.x;
    unsigned quad = 0xfu << (v & ~3);
    if (!bad || v != 5) v = __shfl_xor_sync(quad, v, 1);
    v += (int)__ballot_sync(0xffffffff, v & 1);                            // bad: part_and_whole
    if (bad && threadIdx.x == 5) v = __shfl_xor_sync(quad, v, 1);          // bad: part_and_whole
    out[threadIdx.x] = v;
}
static void part_and_whole_case(bool bad) { part_and_whole<<<1, 32>>>(device<int>(32), bad); }

__global__ void different_operations(int* out, bool bad) {
    int v;
    if (bad && threadIdx.x % 2) v = __any_sync(0xffffffff, 1);             // bad: different_operations
    else v = __ballot_sync(0xffffffff, 1);
    out[threadIdx.x] = v;
}
static void different_operations_case(bool bad) { different_operations<<<1, 32>>>(device<int>(32), bad); }

__global__ void same_shuffle_two_places(float* out, bool bad) {  // legal: the same operation from two branches
    float v = threadIdx.x;
    if (threadIdx.x % 2) v += __shfl_sync(0xffffffff, v, 0);
    else if (bad) __syncwarp();                                            // bad: same_shuffle_two_places
    else v -= __shfl_sync(0xffffffff, v, 1);
    out[threadIdx.x] = v;
}
static void same_shuffle_two_places_case(bool bad) { same_shuffle_two_places<<<1, 32>>>(device<float>(32), bad); }

__global__ void different_shuffles(float* out, bool bad) {
    float v = threadIdx.x;
    if (bad && threadIdx.x >= 16) v = __shfl_sync(0xffffffff, v, 0);       // bad: different_shuffles
    else v = __shfl_xor_sync(0xffffffff, v, 1);
    out[threadIdx.x] = v;
}
static void different_shuffles_case(bool bad) { different_shuffles<<<1, 32>>>(device<float>(32), bad); }

__global__ void syncwarp_missing_lane(float* out, bool bad) {
    if (bad && threadIdx.x == 5) {
        __syncthreads();
    } else {
        __syncwarp();                                                      // bad: syncwarp_missing_lane
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}
static void syncwarp_missing_lane_case(bool bad) { if (bad) syncwarp_missing_lane<<<1, 32>>>(device<float>(32), bad); }

__global__ void active_lanes(int* out, bool bad) {     // warp-aggregated counting in a branch
    if (threadIdx.x % 3 == 0) {
        unsigned m = bad ? 0xffffffffu : __activemask();
        int leader = __ffs(m) - 1, base = 0;
        if (threadIdx.x == leader) base = atomicAdd(out, __popc(m));
        base = __shfl_sync(m, base, leader);                               // bad: active_lanes
        out[1 + base + __popc(m & ((1u << threadIdx.x) - 1))] = threadIdx.x;
    }
    __syncthreads();
}
static void active_lanes_case(bool bad) { active_lanes<<<1, 32>>>(zeros<int>(64), bad); }

__global__ void endless(volatile int* flag, bool bad) {
    if (threadIdx.x == 40 && !bad) *flag = 1;
    while (*flag == 0) {}                                                  // bad: endless
}
static void endless_case(bool bad) { endless<<<1, 64>>>(zeros<int>(1), bad); }

// ---------------------------------------------------------------- launches
__global__ void nothing(int* p) { if (p && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) *p = 1; }
static void block_too_large_case(bool bad) { nothing<<<1, bad ? 1025 : 1024>>>(nullptr); }     // bad: block_too_large
static void grid_y_case(bool bad) { nothing<<<dim3(1, bad ? 65536 : 65535), 1>>>(nullptr); }   // bad: grid_y
static void empty_grid_case(bool bad) { nothing<<<bad ? 0 : 1, 32>>>(nullptr); }               // bad: empty_grid
static void block_z_case(bool bad) { nothing<<<1, dim3(1, 1, bad ? 65 : 64)>>>(nullptr); }     // bad: block_z
__global__ void __launch_bounds__(128) bounded(int* p) { if (p) *p = 1; }
static void launch_bounds_case(bool bad) { bounded<<<1, bad ? 160 : 128>>>(nullptr); }         // bad: launch_bounds
template <int N> __global__ void __launch_bounds__(N * 32, 2) bounded_template(int* p) { if (p) *p = N; }
static void launch_bounds_template_case(bool bad) {
    bounded_template<4><<<1, 128>>>(nullptr);
    if (bad) bounded_template<2><<<1, 128>>>(nullptr);                     // bad: launch_bounds_template
}
template <int N> __global__ void large(float* out) {
    extern __shared__ float s[];
    s[threadIdx.x + 15000] = N;
    out[threadIdx.x] = s[threadIdx.x + 15000];
}
static void smem_attribute_case(bool bad) {
    if (!bad) cudaFuncSetAttribute(large<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    large<1><<<1, 32, 65536>>>(device<float>(32));                         // bad: smem_attribute
}
static void smem_instance_case(bool bad) {             // the attribute belongs to one template instance
    cudaFuncSetAttribute(large<2>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    if (bad) large<3><<<1, 32, 65536>>>(device<float>(32));                // bad: smem_instance
    else large<2><<<1, 32, 65536>>>(device<float>(32));
}
static void smem_architecture_case(bool bad) {
    size_t n = bad ? 300 << 10 : 96 << 10;
    cudaFuncSetAttribute(large<4>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n);
    large<4><<<1, 32, n>>>(device<float>(32));                             // bad: smem_architecture
}
__global__ void static_and_dynamic(float* out) {
    __shared__ float fixed[8192];
    extern __shared__ float more[];
    fixed[threadIdx.x] = 1;
    more[threadIdx.x] = 2;
    out[threadIdx.x] = fixed[threadIdx.x] + more[threadIdx.x];
}
static void static_and_dynamic_case(bool bad) {
    static_and_dynamic<<<1, 32, bad ? 32768 : 16384>>>(device<float>(32));   // bad: static_and_dynamic
}

__global__ void static_in_branch(float* out, bool never) {   // counted whether or not a thread comes there
    if (never) {
        __shared__ float fixed[8192];
        fixed[threadIdx.x] = 1;
        out[threadIdx.x] = fixed[31 - threadIdx.x];
    }
}
static void static_in_branch_case(bool bad) {
    static_in_branch<<<1, 32, bad ? 32768 : 16384>>>(device<float>(32), false);   // bad: static_in_branch
    if (bad != (cudaGetLastError() == cudaErrorInvalidConfiguration)) exit(2);
}
__global__ void asserting(const int* in) { assert(in[threadIdx.x] < 40); }        // bad: device_assert
static void device_assert_case(bool bad) {
    asserting<<<1, bad ? 64 : 32>>>(upload(ramp<int>(64)));
    if (bad != (cudaDeviceSynchronize() == cudaErrorAssert)) exit(2);
}

// ---------------------------------------------------------------- tensor-core loads and asynchronous copies
__global__ void async_wait(float* out, const float* in, bool bad) {
    __shared__ __align__(16) float s[128];
    cpa16(s + 4 * threadIdx.x, in + 4 * threadIdx.x);
    cpa_commit();
    if (!bad) cpa_wait<0>();
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];                                     // bad: async_wait
}
static void async_wait_case(bool bad) { async_wait<<<1, 32>>>(device<float>(32), zeros<float>(128), bad); }

__global__ void async_barrier(float* out, const float* in, bool bad) {
    __shared__ __align__(16) float s[128];
    cpa16(s + 4 * threadIdx.x, in + 4 * threadIdx.x);
    cpa_commit();
    cpa_wait<0>();
    if (!bad) __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];                                     // bad: async_barrier
}
static void async_barrier_case(bool bad) { async_barrier<<<1, 32>>>(device<float>(32), zeros<float>(128), bad); }

__global__ void async_groups(float* out, const float* in, int bad) {  // two stages; the wait leaves one group too many
    __shared__ __align__(16) float s[2][32];
    float sum = 0;
    cpa4(&s[0][threadIdx.x], in + threadIdx.x);
    cpa_commit();
    for (int t = 0; t < 4; t++) {
        cpa4(&s[(t + 1) & 1][threadIdx.x], in + (t + 1) * 32 + threadIdx.x, t < 3);
        cpa_commit();
        if (bad) cpa_wait<2>();
        else cpa_wait<1>();
        __syncthreads();
        sum += s[t & 1][31 - threadIdx.x];                                 // bad: async_groups
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}
static void async_groups_case(bool bad) { async_groups<<<1, 32>>>(device<float>(32), zeros<float>(128), bad); }

__global__ void async_overwrites(float* out, const float* in, bool bad) {  // refilled while others still read
    __shared__ __align__(16) float s[64];
    float sum = 0;
    for (int t = 0; t < 3; t++) {
        cpa4(s + threadIdx.x, in + t * 64 + threadIdx.x);                  // bad: async_overwrites
        cpa_commit();
        cpa_wait<0>();
        __syncthreads();
        sum += s[63 - threadIdx.x];
        if (!bad) __syncthreads();
    }
    out[threadIdx.x] = sum;
}
static void async_overwrites_case(bool bad) { async_overwrites<<<1, 64>>>(device<float>(64), zeros<float>(192), bad); }

template <int STAGES> __global__ void async_stages(float* out, const float* in) {  // one barrier a step: two in flight
    __shared__ __align__(16) float s[STAGES][64];      // need three buffers
    float sum = 0;
    auto load = [&](int t) {
        if (t < 8) cpa4(&s[t % STAGES][threadIdx.x], in + t * 64 + threadIdx.x);   // bad: async_stages
        cpa_commit();
    };
    load(0);
    load(1);
    for (int t = 0; t < 8; t++) {
        cpa_wait<1>();
        __syncthreads();
        load(t + 2);
        sum += s[t % STAGES][63 - threadIdx.x];                            // bad: async_stages
    }
    out[threadIdx.x] = sum;
}
static void async_stages_case(bool bad) {
    if (bad) async_stages<2><<<1, 64>>>(device<float>(64), zeros<float>(512));
    else async_stages<3><<<1, 64>>>(device<float>(64), zeros<float>(512));
}

__global__ void async_alignment(float* out, const float* in, int shift) {
    __shared__ __align__(16) float s[128];
    cpa16(s + 4 * threadIdx.x, in + shift + 4 * threadIdx.x);              // bad: async_alignment
    cpa_commit();
    cpa_wait_all();
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
static void async_alignment_case(bool bad) {
    async_alignment<<<1, 32>>>(device<float>(32), zeros<float>(132), bad ? 2 : 0);
}

__global__ void async_bounds(float* out, const float* in, int n, bool bad) {
    __shared__ __align__(16) float s[128];
    int i = 4 * threadIdx.x;
    cpa16(s + i, in + (i < n ? i : bad ? i : 0), bad || i < n);            // bad: async_bounds
    cpa_commit();
    cpa_wait_all();
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
static void async_bounds_case(bool bad) { async_bounds<<<1, 32>>>(device<float>(32), zeros<float>(100), 100, bad); }

__global__ void async_primitives(float* out, const float* in, bool bad) {  // the user's line, not the header's
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = 1;
    __syncthreads();
    float v = s[63 - t];
    if (!bad) __syncthreads();
    __pipeline_memcpy_async(&s[t], in + t, sizeof(float));                 // bad: async_primitives
    __pipeline_commit();
    __pipeline_wait_prior(0);
    out[t] = s[t] + v;
}
static void async_primitives_case(bool bad) {
    async_primitives<<<1, 64>>>(device<float>(64), zeros<float>(64), bad);
}

__global__ void matrix_rows(uint32_t* out, int shift) {
    __shared__ __align__(16) __nv_bfloat16 s[16 * 24];
    for (int i = threadIdx.x; i < 16 * 24; i += 32) s[i] = __float2bfloat16(i);
    __syncwarp();
    uint32_t r[4];
    ldsm4(r, s + (threadIdx.x % 16) * 24 + threadIdx.x / 16 * 8 - shift * (threadIdx.x % 16));   // bad: matrix_rows
    out[threadIdx.x] = r[0] + r[1] + r[2] + r[3];
}
static void matrix_rows_case(bool bad) { matrix_rows<<<1, 32>>>(device<uint32_t>(32), bad ? 4 : 0); }

__global__ void matrix_race(uint32_t* out, bool bad) {
    __shared__ __align__(16) __nv_bfloat16 s[64];
    for (int i = threadIdx.x; i < 64; i += 32) s[i] = __float2bfloat16(i);
    if (!bad) __syncwarp();
    uint32_t r[1];
    ldsm1t(r, s + threadIdx.x % 8 * 8);                                    // bad: matrix_race
    out[threadIdx.x] = r[0];
}
static void matrix_race_case(bool bad) { matrix_race<<<1, 32>>>(device<uint32_t>(32), bad); }

__global__ void mma_in_branch(float* out, bool bad) {
    float d[4] = {};
    uint32_t a[4] = {}, b[2] = {};
    if (!bad || threadIdx.x < 16) mma16816(d, a, b);                       // bad: mma_in_branch
    out[threadIdx.x] = d[0];
}
static void mma_in_branch_case(bool bad) { mma_in_branch<<<1, 32>>>(device<float>(32), bad); }

static const Case table[] = {
    {"two_barriers", "divergent", two_barriers_case},
    {"uneven_loop", "divergent", uneven_loop_case},
    {"barrier_in_branch", "deadlock", barrier_in_branch_case},
    {"shuffle_in_branch", "deadlock", shuffle_in_branch_case},
    {"tree_in_branch", "absent", tree_in_branch_case},
    {"sum_in_loop", "absent", sum_in_loop_case},
    {"outside_mask", "lane", outside_mask_case},
    {"partial_warp", "absent", partial_warp_case},
    {"few_lanes", "absent", few_lanes_case},
    {"exited_lanes", "absent", exited_lanes_case},
    {"different_masks", "divergent", different_masks_case},
    {"part_and_whole", "divergent", part_and_whole_case},
    {"different_operations", "divergent", different_operations_case},
    {"different_shuffles", "divergent", different_shuffles_case},
    {"same_shuffle_two_places", "divergent", same_shuffle_two_places_case},
    {"syncwarp_missing_lane", "deadlock", syncwarp_missing_lane_case},
    {"active_lanes", "deadlock", active_lanes_case},
    {"endless", "endless", endless_case},
    {"block_too_large", "launch", block_too_large_case},
    {"grid_y", "launch", grid_y_case},
    {"empty_grid", "launch", empty_grid_case},
    {"block_z", "launch", block_z_case},
    {"launch_bounds", "launch", launch_bounds_case},
    {"launch_bounds_template", "launch", launch_bounds_template_case},
    {"smem_attribute", "launch", smem_attribute_case},
    {"smem_instance", "launch", smem_instance_case},
    {"smem_architecture", "launch", smem_architecture_case},
    {"static_and_dynamic", "launch", static_and_dynamic_case},
    {"static_in_branch", "launch", static_in_branch_case},
    {"device_assert", "assert", device_assert_case},
    {"async_wait", "missing", async_wait_case},
    {"async_barrier", "race", async_barrier_case},
    {"async_groups", "missing", async_groups_case},
    {"async_overwrites", "race", async_overwrites_case},
    {"async_stages", "", async_stages_case},
    {"async_alignment", "misaligned", async_alignment_case},
    {"async_bounds", "out", async_bounds_case},
    {"async_primitives", "race", async_primitives_case},
    {"matrix_rows", "misaligned", matrix_rows_case},
    {"matrix_race", "race", matrix_race_case},
    {"mma_in_branch", "absent", mma_in_branch_case},
};
CASES_MAIN(table)
