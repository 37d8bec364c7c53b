// Planted faults in shared memory: races, bounds, alignment, uninitialised reads.
#include "cases.h"

__global__ void missing_barrier(float* out, bool bad) {
    __shared__ float s[128];
    s[threadIdx.x] = threadIdx.x;
    if (!bad) __syncthreads();
    out[threadIdx.x] = s[127 - threadIdx.x];                               // bad: missing_barrier
}
static void missing_barrier_case(bool bad) { missing_barrier<<<1, 128>>>(device<float>(128), bad); }

__global__ void reuse_tile(float* out, const float* in, bool bad) {
    __shared__ float tile[64];
    float sum = 0;
    for (int t = 0; t < 4; t++) {
        tile[threadIdx.x] = in[t * 64 + threadIdx.x];                      // bad: reuse_tile
        __syncthreads();
        for (int i = 0; i < 64; i++) sum += tile[i];
        if (!bad) __syncthreads();
    }
    out[threadIdx.x] = sum;
}
static void reuse_tile_case(bool bad) { reuse_tile<<<1, 64>>>(device<float>(64), upload(ramp<float>(256)), bad); }

__global__ void reduction(float* out, const float* in, bool bad) {
    __shared__ float s[256];
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    for (int o = 128; o > 0; o /= 2) {
        if (threadIdx.x < o) s[threadIdx.x] += s[threadIdx.x + o];         // bad: reduction
        if (!bad || o > 64) __syncthreads();
    }
    if (threadIdx.x == 0) *out = s[0];
}
static void reduction_case(bool bad) { reduction<<<1, 256>>>(device<float>(1), upload(ramp<float>(256)), bad); }

__global__ void warp_tail(float* out, const float* in, bool bad) {
    __shared__ float s[64];
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int o = 32; o > 0; o /= 2) {
            float v = s[threadIdx.x + o];                                  // bad: warp_tail
            if (!bad) __syncwarp();
            if (threadIdx.x < o) s[threadIdx.x] += v;
            if (!bad) __syncwarp();
        }
        if (threadIdx.x == 0) *out = s[0];
    }
}
static void warp_tail_case(bool bad) { warp_tail<<<1, 64>>>(device<float>(1), upload(ramp<float>(64)), bad); }

__global__ void volatile_tail(float* out, const float* in, bool bad) {
    __shared__ volatile float s[64];
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int o = 32; o > 0; o /= 2) {
            float v = s[threadIdx.x] + s[threadIdx.x + (threadIdx.x < o ? o : 0)];   // bad: volatile_tail
            if (!bad) __syncwarp();
            s[threadIdx.x] = v;
            if (!bad) __syncwarp();
        }
        if (threadIdx.x == 0) *out = s[0];
    }
}
static void volatile_tail_case(bool bad) { volatile_tail<<<1, 64>>>(device<float>(1), upload(ramp<float>(64)), bad); }

__device__ float block_sum(float v, float* s, bool bad) {
    s[threadIdx.x] = v;                                                    // bad: reduction_in_loop
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < blockDim.x; i++) sum += s[i];
    if (!bad) __syncthreads();
    return sum;
}
__global__ void reduction_in_loop(float* out, bool bad) {
    __shared__ float s[64];
    float total = 0;
    for (int r = 0; r < 3; r++) total += block_sum(r + threadIdx.x, s, bad);
    out[threadIdx.x] = total;
}
static void reduction_in_loop_case(bool bad) { reduction_in_loop<<<1, 64>>>(device<float>(64), bad); }

__global__ void double_buffer(float* out, const float* in, bool bad) {  // one barrier a step is enough with two buffers
    __shared__ float s[2][64];
    float sum = 0;
    for (int t = 0; t < 6; t++) {
        int b = bad ? 0 : t & 1;
        s[b][threadIdx.x] = in[t * 64 + threadIdx.x];                      // bad: double_buffer
        __syncthreads();
        sum += s[b][63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}
static void double_buffer_case(bool bad) { double_buffer<<<1, 64>>>(device<float>(64), upload(ramp<float>(384)), bad); }

__global__ void bytes(unsigned char* out, bool bad) {                      // bytes beside each other are no race
    __shared__ unsigned char s[128];
    s[bad ? threadIdx.x / 2 : threadIdx.x] = threadIdx.x;                  // bad: bytes
    __syncthreads();
    out[threadIdx.x] = s[bad ? threadIdx.x / 2 : threadIdx.x];
}
static void bytes_case(bool bad) { bytes<<<1, 128>>>(device<unsigned char>(128), bad); }

__global__ void equal_values(int* out, const float* in, bool bad) {        // many threads may store the same value
    __shared__ int found;
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    if (in[threadIdx.x] > 10) found = bad ? threadIdx.x : 1;               // bad: equal_values
    __syncthreads();
    if (threadIdx.x == 0) *out = found;
}
static void equal_values_case(bool bad) { equal_values<<<1, 64>>>(device<int>(1), upload(ramp<float>(64)), bad); }

__global__ void histogram(int* out, const int* in, bool bad) {
    __shared__ int bins[16];
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    if (bad) bins[in[threadIdx.x] % 16]++;                                 // bad: histogram
    else atomicAdd(&bins[in[threadIdx.x] % 16], 1);
    __syncthreads();
    if (threadIdx.x < 16) out[threadIdx.x] = bins[threadIdx.x];
}
static void histogram_case(bool bad) { histogram<<<1, 128>>>(device<int>(16), upload(ramp<int>(128)), bad); }

__global__ void atomic_then_read(int* out, bool bad) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    if (!bad) __syncthreads();
    out[threadIdx.x] = count;                                              // bad: atomic_then_read
}
static void atomic_then_read_case(bool bad) { atomic_then_read<<<1, 64>>>(device<int>(64), bad); }

__global__ void halo(float* out, const float* in, bool bad) {
    __shared__ float s[66];
    int i = threadIdx.x;
    s[i + 1] = in[i];
    if (i == 0) s[0] = 0;
    if (i == 63 && !bad) s[65] = 0;
    __syncthreads();
    out[i] = s[i] + s[i + 1] + s[i + 2];                                   // bad: halo
}
static void halo_case(bool bad) { halo<<<1, 64>>>(device<float>(64), upload(ramp<float>(64)), bad); }

__global__ void past_end(float* out, bool bad) {
    __shared__ float s[64];
    s[threadIdx.x] = 1;
    __syncthreads();
    int i = threadIdx.x + 1;
    out[threadIdx.x] = bad || i < 64 ? s[i] : 0;                           // bad: past_end
}
static void past_end_case(bool bad) { past_end<<<1, 64>>>(device<float>(64), bad); }

__global__ void dynamic_too_small(float* out) {
    extern __shared__ float dyn[];
    dyn[threadIdx.x] = threadIdx.x;                                        // bad: dynamic_too_small
    __syncthreads();
    out[threadIdx.x] = dyn[blockDim.x - 1 - threadIdx.x];
}
static void dynamic_too_small_case(bool bad) { dynamic_too_small<<<1, 64, bad ? 64 : 256>>>(device<float>(64)); }
static void dynamic_forgotten_case(bool bad) {
    if (bad) dynamic_too_small<<<1, 64>>>(device<float>(64));
    else dynamic_too_small<<<1, 64, 64 * sizeof(float)>>>(device<float>(64));
}

__global__ void next_row(float* out, bool bad) {                           // inside the array, but in the wrong row
    __shared__ float tile[8][8];
    int x = threadIdx.x, y = threadIdx.y;
    tile[y][x] = x + y;
    __syncthreads();
    int c = x + 1;
    out[y * 8 + x] = bad || c < 8 ? tile[y][c] : 0;                        // bad: next_row
}
static void next_row_case(bool bad) { next_row<<<1, dim3(8, 8)>>>(device<float>(64), bad); }

__global__ void vector_alignment(float4* out, bool bad) {
    __shared__ __align__(16) float s[72];
    for (int i = threadIdx.x; i < 72; i += blockDim.x) s[i] = i;
    __syncthreads();
    out[threadIdx.x] = *(float4*)(s + threadIdx.x * 4 + (bad ? 1 : 0));    // bad: vector_alignment
}
static void vector_alignment_case(bool bad) { vector_alignment<<<1, 16>>>(device<float4>(16), bad); }

template <bool BAD> __global__ void declared_alignment(float4* out) {      // int or float arrays are 4-aligned, no more
    if (BAD) {
        __shared__ float weak[64];
        for (int i = threadIdx.x; i < 64; i += blockDim.x) weak[i] = i;
        __syncthreads();
        out[threadIdx.x] = ((float4*)weak)[threadIdx.x];                   // bad: declared_alignment
    } else {
        __shared__ float4 strong[16];
        strong[threadIdx.x] = make_float4(threadIdx.x, 0, 0, 0);
        __syncthreads();
        out[threadIdx.x] = strong[15 - threadIdx.x];
    }
}
static void declared_alignment_case(bool bad) {
    if (bad) declared_alignment<true><<<1, 16>>>(device<float4>(16));
    else declared_alignment<false><<<1, 16>>>(device<float4>(16));
}

__global__ void transpose(float* out, const float* in, bool bad) {
    __shared__ float tile[16][17];
    tile[threadIdx.y][threadIdx.x] = in[threadIdx.y * 16 + threadIdx.x];
    if (!bad) __syncthreads();
    out[threadIdx.y * 16 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];  // bad: transpose
}
static void transpose_case(bool bad) {
    transpose<<<1, dim3(16, 16)>>>(device<float>(256), upload(ramp<float>(256)), bad);
}

__global__ void scan_in_place(float* out, const float* in, bool bad) {
    __shared__ float s[64];
    int i = threadIdx.x;
    s[i] = in[i];
    __syncthreads();
    for (int o = 1; o < 64; o *= 2) {
        float v = i >= o ? s[i - o] : 0;
        if (!bad) __syncthreads();
        s[i] += v;                                                         // bad: scan_in_place
        __syncthreads();
    }
    out[i] = s[i];
}
static void scan_in_place_case(bool bad) { scan_in_place<<<1, 64>>>(device<float>(64), upload(ramp<float>(64)), bad); }

__global__ void broadcast(float* out, const float* in, bool bad) {
    __shared__ float scale;
    if (threadIdx.x == 33) scale = in[0];
    if (!bad) __syncthreads();
    out[threadIdx.x] = scale;                                              // bad: broadcast
}
static void broadcast_case(bool bad) { broadcast<<<1, 64>>>(device<float>(64), upload(ramp<float>(1)), bad); }

__global__ void overlapping_parts(float* out, int n, bool bad) {           // two arrays in one dynamic block
    extern __shared__ char raw[];
    float* a = (float*)raw;
    float* b = (float*)(raw + (bad ? n : n * sizeof(float)));
    a[threadIdx.x] = 1;
    b[threadIdx.x] = 2;                                                    // bad: overlapping_parts
    __syncthreads();
    out[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}
static void overlapping_parts_case(bool bad) { overlapping_parts<<<1, 64, 512>>>(device<float>(64), 64, bad); }

__global__ void half_syncwarp(float* out, bool bad) {
    __shared__ float s[32];
    int l = threadIdx.x;
    s[l] = l;
    if (bad) __syncwarp(l < 16 ? 0x0000ffffu : 0xffff0000u);
    else __syncwarp();
    out[l] = s[31 - l];                                                    // bad: half_syncwarp
}
static void half_syncwarp_case(bool bad) { half_syncwarp<<<1, 32>>>(device<float>(32), bad); }

__global__ void syncwarp_for_block(float* out, bool bad) {                 // __syncwarp orders one warp only
    __shared__ float s[64];
    s[threadIdx.x] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = s[threadIdx.x ^ (bad ? 32 : 1)];                    // bad: syncwarp_for_block
}
static void syncwarp_for_block_case(bool bad) { syncwarp_for_block<<<1, 64>>>(device<float>(64), bad); }

__global__ void shuffle_is_no_barrier(float* out, bool bad) {
    __shared__ float s[32];
    int l = threadIdx.x;
    s[l] = l;
    float v = __shfl_sync(0xffffffff, (float)l, 0);
    if (!bad) __syncwarp();
    out[l] = v + s[31 - l];                                                // bad: shuffle_is_no_barrier
}
static void shuffle_is_no_barrier_case(bool bad) { shuffle_is_no_barrier<<<1, 32>>>(device<float>(32), bad); }

__global__ void flag_in_block(float* out, bool bad) {                      // a producer warp and a consumer warp
    __shared__ float data;
    __shared__ volatile int ready;
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x == 32) {
        data = 7;
        if (!bad) __threadfence_block();
        ready = 1;
    }
    if (threadIdx.x == 0) {
        while (!ready) {}
        __threadfence_block();
        *out = data;                                                       // bad: flag_in_block
    }
}
static void flag_in_block_case(bool bad) { flag_in_block<<<1, 64>>>(device<float>(1), bad); }

__global__ void write_after_read(float* out, bool bad) {                   // everyone reads, then one overwrites
    __shared__ float mean;
    if (threadIdx.x == 0) mean = 3;
    __syncthreads();
    float m = mean;
    if (!bad) __syncthreads();
    if (threadIdx.x == 0) mean = m * m;                                    // bad: write_after_read
    __syncthreads();
    out[threadIdx.x] = m + mean;
}
static void write_after_read_case(bool bad) { write_after_read<<<1, 96>>>(device<float>(96), bad); }

__global__ void conditional_barrier(float* out, int n) {                   // threads that have exited do not count
    __shared__ float s[64];
    s[threadIdx.x] = threadIdx.x;
    if (threadIdx.x >= n) return;
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x];
}
static void conditional_barrier_case(bool bad) {
    if (bad) missing_barrier<<<1, 128>>>(device<float>(128), true);
    else conditional_barrier<<<1, 64>>>(device<float>(64), 40);
}

__global__ void library_results(float* out, bool bad) {                    // libm stores through pointers, too
    __shared__ float s[4], f[2];
    __shared__ double d[2];
    __shared__ int e[2];
    if (threadIdx.x == 0) {
        float x = blockDim.x + 0.5f;
        sincosf(x, &s[0], &s[1]);
        s[2] = modff(x, &s[3]);
        f[0] = frexpf(x, &e[0]);
        f[1] = remquof(x, 3.0f, &e[1]);
        sincos((double)x, &d[0], &d[1]);
    }
    if (!bad) __syncthreads();
    float sum = s[0] + s[1] + s[2] + s[3] + f[0] + f[1] + e[0] + e[1];     // bad: library_results
    out[threadIdx.x] = sum + (float)(d[0] + d[1]);
}
static void library_results_case(bool bad) { library_results<<<1, 64>>>(device<float>(64), bad); }

static const Case table[] = {
    {"missing_barrier", "race", missing_barrier_case},
    {"reuse_tile", "race", reuse_tile_case},
    {"reduction", "race", reduction_case},
    {"warp_tail", "race", warp_tail_case},
    {"volatile_tail", "race", volatile_tail_case},
    {"reduction_in_loop", "race", reduction_in_loop_case},
    {"double_buffer", "race", double_buffer_case},
    {"bytes", "race", bytes_case},
    {"equal_values", "race", equal_values_case},
    {"histogram", "race", histogram_case},
    {"atomic_then_read", "race", atomic_then_read_case},
    {"halo", "uninitialised", halo_case},
    {"past_end", "out", past_end_case},
    {"dynamic_too_small", "out", dynamic_too_small_case},
    {"dynamic_forgotten", "out", dynamic_forgotten_case},
    {"next_row", "out", next_row_case},
    {"vector_alignment", "misaligned", vector_alignment_case},
    {"declared_alignment", "misaligned", declared_alignment_case},
    {"transpose", "race", transpose_case},
    {"scan_in_place", "race", scan_in_place_case},
    {"broadcast", "race", broadcast_case},
    {"overlapping_parts", "race", overlapping_parts_case},
    {"half_syncwarp", "race", half_syncwarp_case},
    {"syncwarp_for_block", "race", syncwarp_for_block_case},
    {"shuffle_is_no_barrier", "race", shuffle_is_no_barrier_case},
    {"flag_in_block", "race", flag_in_block_case},
    {"write_after_read", "race", write_after_read_case},
    {"library_results", "race", library_results_case},
    {"conditional_barrier", "race", conditional_barrier_case},
};
CASES_MAIN(table)
