// Planted faults in device memory: races within and between blocks, fences and flags, bounds, lifetime, initialisation.
#include "cases.h"
#include <cuda_bf16.h>

__global__ void stencil_in_place(float* a, const float* in, int n, bool bad) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > 0 && i < n) a[i] = (bad ? a : in)[i - 1] + 1;                  // bad: stencil_in_place
}
static void stencil_in_place_case(bool bad) {
    stencil_in_place<<<4, 64>>>(zeros<float>(256), zeros<float>(256), 256, bad);
}

__global__ void overlapping_blocks(float* out, bool bad) {
    int i = blockIdx.x * (bad ? blockDim.x - 1 : blockDim.x) + threadIdx.x;
    out[i] = i + blockIdx.x;                                               // bad: overlapping_blocks
}
static void overlapping_blocks_case(bool bad) { overlapping_blocks<<<4, 64>>>(device<float>(256), bad); }

__global__ void plain_sum(float* sum, const float* in, bool bad) {
    float v = in[blockIdx.x * blockDim.x + threadIdx.x];
    if (bad) *sum += v;                                                    // bad: plain_sum
    else atomicAdd(sum, v);
}
static void plain_sum_case(bool bad) { plain_sum<<<2, 32>>>(zeros<float>(1), upload(ramp<float>(64)), bad); }

// The last block to finish adds the partial sums of all: fence, then count. Several ways to get it wrong.
__device__ unsigned finished = 0;
enum Mistake { RIGHT, NO_FENCE, FENCE_BEFORE, BLOCK_FENCE };
__device__ void publish(float* partial, Mistake m) {
    if (m == FENCE_BEFORE) __threadfence();
    partial[blockIdx.x] = blockIdx.x;
    if (m == BLOCK_FENCE) __threadfence_block();
    if (m == RIGHT) __threadfence();
}
__global__ void last_block(float* out, float* partial, Mistake m) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        publish(partial, m);
        unsigned before = atomicInc(&finished, gridDim.x - 1);
        last = before == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x)
        sum += partial[i];    // bad: last_block_no_fence last_block_fence_before last_block_block_fence
    out[threadIdx.x] = sum;
}
static void run_last_block(Mistake m) { last_block<<<8, 32>>>(device<float>(32), device<float>(8), m); }
static void last_block_no_fence_case(bool bad) { run_last_block(bad ? NO_FENCE : RIGHT); }
static void last_block_fence_before_case(bool bad) { run_last_block(bad ? FENCE_BEFORE : RIGHT); }
static void last_block_block_fence_case(bool bad) { run_last_block(bad ? BLOCK_FENCE : RIGHT); }

// The guide's own kernel has `volatile` partial sums, which is no fence.
__global__ void last_block_volatile(float* out, volatile float* partial, unsigned* count, bool bad) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = blockIdx.x;
        if (!bad) __threadfence();
        last = atomicInc(count, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += partial[i];                 // bad: volatile_no_fence
    out[threadIdx.x] = sum;
}
static void volatile_no_fence_case(bool bad) {
    last_block_volatile<<<8, 32>>>(device<float>(32), device<float>(8), zeros<unsigned>(1), bad);
}

// Here every thread stores, and one thread counts: the fence of the one must cover what the others wrote.
template <int STYLE> __global__ void last_block_wide(float* out, float* data, unsigned* count) {
    __shared__ bool last;
    data[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x;
    if (STYLE == 1) __threadfence();                   // each thread for itself, then the barrier
    if (STYLE != 2) __syncthreads();                   // 2: nobody waits for the stores of the others
    if (threadIdx.x == 0) {
        if (STYLE != 1) __threadfence();               // 0: one fence after the barrier covers all
        last = atomicAdd(count, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int b = 0; b < gridDim.x; b++) sum += data[b * blockDim.x + threadIdx.x];   // bad: fence_without_barrier
    out[threadIdx.x] = sum;
}
static void fence_without_barrier_case(bool bad) {
    if (bad) return last_block_wide<2><<<4, 64>>>(device<float>(64), device<float>(256), zeros<unsigned>(1));
    last_block_wide<0><<<4, 64>>>(device<float>(64), device<float>(256), zeros<unsigned>(1));
    last_block_wide<1><<<4, 64>>>(device<float>(64), device<float>(256), zeros<unsigned>(1));
}

__global__ void spin_lock(int* lock, int* value, bool bad) {
    if (threadIdx.x != 0) return;
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    *value += 1;                                                           // bad: spin_lock
    if (!bad) __threadfence();
    atomicExch(lock, 0);
}
static void spin_lock_case(bool bad) { spin_lock<<<16, 32>>>(zeros<int>(1), zeros<int>(1), bad); }

__global__ void lock_between_lanes(int* lock, int* value, bool bad) {
    bool done = false;
    while (!done) {
        if (bad || atomicCAS(lock, 0, 1) == 0) {
            *value += 1;                                                   // bad: lock_between_lanes
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}
static void lock_between_lanes_case(bool bad) { lock_between_lanes<<<2, 64>>>(zeros<int>(1), zeros<int>(1), bad); }

// Each block waits for the one before it (a chained scan): blocks have to run side by side.
__global__ void chained(volatile int* flag, int* sum, const int* in, bool bad) {
    int b = blockIdx.x;
    if (threadIdx.x == 0) {
        int before = 0;
        if (b > 0) {
            while (flag[b - 1] == 0) {}
            __threadfence();
            before = sum[b - 1];                                           // bad: chained
        }
        sum[b] = before + in[b];
        if (!bad) __threadfence();
        flag[b] = 1;
    }
}
static void chained_case(bool bad) { chained<<<20, 32>>>(zeros<int>(20), device<int>(20), upload(ramp<int>(20)), bad); }

__global__ void grid_barrier(unsigned* arrived, float* a, float* b, bool bad) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    a[i] = i;
    if (!bad) {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(arrived, 1);
            while (*(volatile unsigned*)arrived < gridDim.x) {}
            __threadfence();
        }
        __syncthreads();
    }
    b[i] = a[n - 1 - i];                                                   // bad: grid_barrier
}
static void grid_barrier_case(bool bad) {
    grid_barrier<<<6, 64>>>(zeros<unsigned>(1), zeros<float>(384), device<float>(384), bad);
}

__global__ void add(float* out, const float* a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] += a[i];                                             // bad: never_zeroed never_written freed
}
static void never_zeroed_case(bool bad) {
    add<<<1, 64>>>(bad ? device<float>(64) : zeros<float>(64), zeros<float>(64), 64);
}

__global__ void fill(float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i;
}
static void never_written_case(bool bad) {             // the grid misses the tail
    float* a = device<float>(100);
    fill<<<bad ? 100 / 32 : (100 + 31) / 32, 32>>>(a, 100);
    add<<<4, 32>>>(zeros<float>(100), a, 100);
}
static void tail_to_host_case(bool bad) {
    float* a = device<float>(100);
    fill<<<bad ? 3 : 4, 32>>>(a, 100);
    std::vector<float> h = download(a, 100);
    float sum = 0;
    for (float x : h) sum += x;                                            // bad: tail_to_host
    if (sum == 1) printf("never\n");
}
static void short_copy_case(bool bad) {                // n bytes instead of n floats
    std::vector<float> h = ramp<float>(64);
    float* a = device<float>(64);
    cudaMemcpy(a, h.data(), bad ? h.size() : h.size() * sizeof(float), cudaMemcpyHostToDevice);
    add<<<1, 64>>>(zeros<float>(64), a, 64);
}

__global__ void off_by_one(float* out, int n, bool bad) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (bad ? i <= n : i < n) out[i] = i;                                  // bad: off_by_one
}
static void off_by_one_case(bool bad) { off_by_one<<<2, 64>>>(device<float>(100), 100, bad); }

__global__ void before_start(float* out, const float* in, bool bad) {
    int i = threadIdx.x;
    out[i] = (bad || i > 0) ? in[i - 1] : 0;                               // bad: before_start
}
static void before_start_case(bool bad) { before_start<<<1, 64>>>(device<float>(64), zeros<float>(64), bad); }

__global__ void no_guard(float* out, int n, bool bad) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (bad || i < n) out[i] = i;                                          // bad: no_guard
}
static void no_guard_case(bool bad) { no_guard<<<4, 32>>>(device<float>(100), 100, bad); }

__global__ void int_overflow(char* out, int stride, bool bad) {
    size_t at = bad ? (size_t)(int)((unsigned)stride * threadIdx.x) : (size_t)threadIdx.x;
    out[at] = 1;                                                           // bad: int_overflow
}
static void int_overflow_case(bool bad) { int_overflow<<<1, 4>>>(device<char>(64), 1 << 30, bad); }

static void freed_case(bool bad) {
    float *a = zeros<float>(64), *b = zeros<float>(64);
    if (bad) cudaFree(a);
    add<<<1, 64>>>(b, a, 64);
    if (!bad) cudaFree(a);
}

__global__ void vector_load(float4* out, const float* in, int shift) {
    out[threadIdx.x] = *(const float4*)(in + shift + 4 * threadIdx.x);     // bad: vector_load
}
static void vector_load_case(bool bad) { vector_load<<<1, 8>>>(device<float4>(8), zeros<float>(36), bad ? 1 : 4); }

__global__ void pair_load(__nv_bfloat162* out, const __nv_bfloat16* in, int shift) {
    out[threadIdx.x] = *(const __nv_bfloat162*)(in + shift + 2 * threadIdx.x);   // bad: pair_load
}
static void pair_load_case(bool bad) {
    pair_load<<<1, 8>>>(device<__nv_bfloat162>(8), zeros<__nv_bfloat16>(20), bad ? 1 : 2);
}

__global__ void odd_rows(float* out, const __nv_bfloat16* in, int columns) {   // in pairs: rows must be even
    const __nv_bfloat16* row = in + blockIdx.x * columns;
    float sum = 0;
    for (int i = threadIdx.x; i < columns / 2; i += blockDim.x) {
        float2 v = __bfloat1622float2(((const __nv_bfloat162*)row)[i]);    // bad: odd_rows
        sum += v.x + v.y;
    }
    atomicAdd(out, sum);
}
static void odd_rows_case(bool bad) {
    odd_rows<<<4, 32>>>(zeros<float>(1), zeros<__nv_bfloat16>(4 * 66), bad ? 65 : 66);
}

__global__ void vector_tail(float* out, const float* in, int n, bool bad) {
    int i = 4 * threadIdx.x;
    if (bad ? i < n : i + 3 < n) {
        float4 v = *(const float4*)(in + i);                               // bad: vector_tail
        *(float4*)(out + i) = v;
    }
}
static void vector_tail_case(bool bad) { vector_tail<<<1, 32>>>(device<float>(128), zeros<float>(102), 102, bad); }

__global__ void halves(__nv_bfloat16* out, bool bad) {                     // two threads write the halves of one word
    int i = threadIdx.x;
    out[i] = __float2bfloat16(i);
    if (bad && i % 2 == 0) *(__nv_bfloat162*)(out + i) = __floats2bfloat162_rn(i + 1, i + 2);   // bad: halves
}
static void halves_case(bool bad) { halves<<<1, 64>>>(device<__nv_bfloat16>(64), bad); }

static void null_pointer_case(bool bad) { fill<<<1, 32>>>(bad ? nullptr : device<float>(32), 32); }
static void host_pointer_case(bool bad) {
    float* h = (float*)malloc(128);
    fill<<<1, 32>>>(bad ? h : device<float>(32), 32);
    cudaDeviceSynchronize();
    free(h);
}
static void host_reads_device_case(bool bad) {
    float* d = zeros<float>(4);
    float v = bad ? d[1] : download(d, 4)[1];                              // bad: host_reads_device
    if (v != 0) printf("not zero\n");
}

struct Padded { char tag; double value; };
__global__ void padded_copy(Padded* out, bool bad) {   // padding is never initialised, and nobody minds
    Padded p;
    p.tag = 1;
    p.value = 2;
    out[threadIdx.x].tag = p.tag;
    if (!bad) out[threadIdx.x].value = p.value;
    __syncthreads();
    Padded q = out[threadIdx.x];                                           // bad: padded
    out[threadIdx.x].value = q.value + q.tag;
}
static void padded_case(bool bad) { padded_copy<<<1, 32>>>(device<Padded>(32), bad); }

__device__ int device_counter;
__global__ void count_plain(bool bad) {
    if (bad) device_counter += 1;                                          // bad: device_variable
    else atomicAdd(&device_counter, 1);
}
static void device_variable_case(bool bad) { count_plain<<<2, 32>>>(bad); }
static void device_variable_host_case(bool bad) {
    int v = 0;
    if (bad) v = device_counter;                                           // bad: device_variable_host
    else cudaMemcpyFromSymbol(&v, device_counter, sizeof v);
    if (v) printf("not zero\n");
}
__constant__ float weights[16];
__global__ void use_constant(float* out, bool bad) {
    if (bad) *(float*)&weights[threadIdx.x] = 1;                           // bad: constant_written
    out[threadIdx.x] = weights[threadIdx.x];
}
static void constant_written_case(bool bad) {
    std::vector<float> h = ramp<float>(16);
    cudaMemcpyToSymbol(weights, h.data(), sizeof weights);
    use_constant<<<1, 16>>>(device<float>(16), bad);
}

__global__ void ping(float* dst, const float* src, int n) {
    int i = threadIdx.x;
    dst[i] = 0.5f * (src[i] + src[(i + 1) % n]);                           // bad: ping_pong
}
static void ping_pong_case(bool bad) {
    float *a = upload(ramp<float>(64)), *b = zeros<float>(64);
    for (int k = 0; k < 3; k++) {
        ping<<<1, 64>>>(bad ? a : b, a, 64);
        std::swap(a, b);
    }
}

__global__ void uninitialised_local(float* out, const float* in, bool bad) {
    float best[2];
    if (!bad) best[0] = best[1] = 0;
    for (int k = 0; k < 4; k++) best[k % 2] += in[k];
    if (best[0] + best[1] == 10) out[threadIdx.x] = 1;
}
static void uninitialised_local_case(bool bad) {  // not memory, but it starts as a bad pattern: the result is wrong
    float* out = zeros<float>(1);
    uninitialised_local<<<1, 1>>>(out, upload(ramp<float>(4)), bad);
    if (download(out, 1)[0] != 1) exit(1);
}

__device__ float2 pairs[64];
__global__ void clobber(float2* p, bool bad) {         // a thread writes more than it owns
    p[threadIdx.x].x = 1;
    if (bad) *(float4*)(p + (threadIdx.x & ~1)) = make_float4(threadIdx.x, 2, 3, 4);   // bad: clobber
}
static void clobber_case(bool bad) { clobber<<<1, 32>>>(device<float2>(64), bad); }

__device__ int first[16], second[16] = {1};
__global__ void between_variables(int* out, const int* p) { *out = *p + second[0]; }   // bad: between_variables
static void between_variables_case(bool bad) {         // past the end of one variable lies no other
    int* p;
    cudaGetSymbolAddress((void**)&p, first);
    between_variables<<<1, 1>>>(device<int>(1), p + (bad ? 16 : 15));
}

static const Case table[] = {
    {"stencil_in_place", "race", stencil_in_place_case},
    {"overlapping_blocks", "race", overlapping_blocks_case},
    {"plain_sum", "race", plain_sum_case},
    {"last_block_no_fence", "race", last_block_no_fence_case},
    {"last_block_fence_before", "race", last_block_fence_before_case},
    {"last_block_block_fence", "race", last_block_block_fence_case},
    {"volatile_no_fence", "race", volatile_no_fence_case},
    {"fence_without_barrier", "race", fence_without_barrier_case},
    {"spin_lock", "race", spin_lock_case},
    {"lock_between_lanes", "race", lock_between_lanes_case},
    {"chained", "race", chained_case},
    {"grid_barrier", "race", grid_barrier_case},
    {"never_zeroed", "uninitialised", never_zeroed_case},
    {"never_written", "uninitialised", never_written_case},
    {"tail_to_host", "uninitialised", tail_to_host_case},
    {"short_copy", "uninitialised", short_copy_case},
    {"off_by_one", "out", off_by_one_case},
    {"before_start", "out", before_start_case},
    {"no_guard", "out", no_guard_case},
    {"int_overflow", "", int_overflow_case},
    {"freed", "use", freed_case},
    {"vector_load", "misaligned", vector_load_case},
    {"pair_load", "misaligned", pair_load_case},
    {"odd_rows", "misaligned", odd_rows_case},
    {"vector_tail", "out", vector_tail_case},
    {"halves", "race", halves_case},
    {"null_pointer", "null", null_pointer_case},
    {"host_pointer", "host", host_pointer_case},
    {"host_reads_device", "host", host_reads_device_case},
    {"padded", "uninitialised", padded_case},
    {"device_variable", "race", device_variable_case},
    {"device_variable_host", "host", device_variable_host_case},
    {"constant_written", "constant", constant_written_case},
    {"ping_pong", "race", ping_pong_case},
    {"uninitialised_local", "-", uninitialised_local_case},
    {"clobber", "race", clobber_case},
    {"between_variables", "out", between_variables_case},
};
CASES_MAIN(table)
