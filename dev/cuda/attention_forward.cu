/*
attention_forward.cu: softmax(q k^T / sqrt(HD)) v, causal, within documents; groups of query heads share keys (GQA).

  nvcc -O3 -std=c++17 -I. -o build/dev/attention_forward dev/cuda/attention_forward.cu -lcjson -lcublasLt
  build/dev/attention_forward        checks all kernels, then times them
  build/dev/attention_forward 4      kernel 4 only
  make build/dev/attention_forward USE_CUDNN=1      with NVIDIA's library beside them

kernel 1: as the formula says: one head's (T,T) scores to memory, a softmax over each row, two matrix products. The
          trainer's --attention naive.
kernel 2: no scores in memory: a warp has one query and goes over the keys with a running maximum (online softmax).
kernel 3: keys and values come 32 at a time into shared memory, once for 32 queries; a lane has a key for the scores and
          a column for the output, so sums over lanes are needed once in 32 keys.
kernel 4: both products on the tensor cores; a warp has 16 queries, and scores go from one product to the other in
          registers; the next tile is copied while this one is used; tiles that are masked as a whole are never touched.
*/
// winner: 4
#include "attention.h"

// ----------------------------------------------------------------------------
// kernel 1

// One warp a row of scores (T,T) of a head: probs (T,T) in bf16 = softmax over keys doc_start[t] .. t, zero elsewhere.
// Bound by bandwidth: a row is read three times, the second and third time from the cache.
__global__ void attention_softmax_kernel1(bf16* probs, float* lse, const float* scores, const int* doc_start, int T,
                                          int ld, float scale) {
    int t = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) { return; }
    const float* row = scores + (size_t)t * ld;
    int begin = doc_start[t];
    float maximum = -INFINITY, sum = 0;
    for (int j = begin + lane; j <= t; j += 32) { maximum = fmaxf(maximum, row[j]); }
    maximum = warp_max(maximum);
    for (int j = begin + lane; j <= t; j += 32) { sum += expf((row[j] - maximum) * scale); }
    sum = warp_sum(sum);
    for (int j = lane; j < T; j += 32) {
        bool seen = begin <= j && j <= t;
        probs[(size_t)t * ld + j] = __float2bfloat16(seen ? expf((row[j] - maximum) * scale) / sum : 0.0f);
    }
    if (lane == 0) { lse[t] = maximum * scale + logf(sum); }
}

void attention_naive_forward(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const int* doc_start,
                             AttentionShape s, void* scores, cudaStream_t stream) {
    // out (N,A) =, lse (B,NH,T) =; scores: attention_naive_bytes(T, HD), one head's at a time
    attention_check("attention_naive_forward", s);
    size_t T = s.T, HD = s.HD, A = s.NH * HD, ld = attention_naive_ld(T);
    float scale = 1 / sqrtf((float)HD), *raw = (float*)scores;
    bf16* probs = (bf16*)(raw + T * ld);
    for (size_t bh = 0; bh < s.B * s.NH && T > 0; bh++) {
        size_t b = bh / s.NH, h = bh % s.NH, kv = h / (s.NH / s.NKV);
        const bf16 *q_h = q + b * T * s.ld_qk + h * HD, *k_h = k + b * T * s.ld_qk + kv * HD,
                   *v_h = v + b * T * s.ld_v + kv * HD;
        gemm(false, true, T, T, HD, q_h, s.ld_qk, k_h, s.ld_qk, 0, raw, CUDA_R_32F, ld, stream);
        attention_softmax_kernel1<<<(unsigned)ceil_div(T, 8), 256, 0, stream>>>(
            probs, lse + bh * T, raw, doc_start + b * T, (int)T, (int)ld, scale);
        launchCheck("attention_softmax_kernel1");
        gemm(false, false, T, HD, T, probs, ld, v_h, s.ld_v, 0, out + b * T * A + h * HD, CUDA_R_16BF, A, stream);
    }
}

// ----------------------------------------------------------------------------
// kernel 2

// One warp a query of one head; lane l owns columns l, l+32, l+64, l+96 of q and of the output. Bound by latency: each
// key costs a sum over the lanes before the next one can begin.
__global__ void attention_forward_kernel2(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                                          const int* doc_start, AttentionShape s) {
    int t = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= (int)s.T) { return; }
    size_t h = blockIdx.y, b = blockIdx.z, kv = h / (s.NH / s.NKV), row = b * s.T + t;
    float scale = 1 / sqrtf((float)s.HD), q_t[4], acc[4] = {0, 0, 0, 0}, maximum = -INFINITY, sum = 0;
    for (int i = 0; i < 4; i++) {
        int c = lane + 32 * i;
        q_t[i] = c < s.HD ? __bfloat162float(q[row * s.ld_qk + h * s.HD + c]) : 0.0f;
    }
    for (int j = doc_start[row]; j <= t; j++) {
        const bf16 *k_j = k + (b * s.T + j) * s.ld_qk + kv * s.HD, *v_j = v + (b * s.T + j) * s.ld_v + kv * s.HD;
        float score = 0;
        for (int i = 0; i < 4; i++) {
            int c = lane + 32 * i;
            if (c < s.HD) { score += q_t[i] * __bfloat162float(k_j[c]); }
        }
        score = warp_sum(score) * scale;
        float larger = fmaxf(maximum, score), rescale = expf(maximum - larger), p = expf(score - larger);
        maximum = larger;
        sum = sum * rescale + p;
        for (int i = 0; i < 4; i++) {
            int c = lane + 32 * i;
            if (c < s.HD) { acc[i] = acc[i] * rescale + p * __bfloat162float(v_j[c]); }
        }
    }
    for (int i = 0; i < 4; i++) {
        int c = lane + 32 * i;
        if (c < s.HD) { out[(row * s.NH + h) * s.HD + c] = __float2bfloat16(acc[i] / sum); }
    }
    if (lane == 0) { lse[(b * s.NH + h) * s.T + t] = maximum + logf(sum); }
}

// ----------------------------------------------------------------------------
// kernel 3

// A block owns 32 queries of one head, a warp 4 of them, and goes up over the keys 32 at a time. Bound by shared
// memory: a number read from there serves one multiplication (keys) or four (values).
__global__ void attention_forward_kernel3(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                                          const int* doc_start, AttentionShape s) {
    __shared__ bf16 q_tile[32][128];
    __shared__ float k_tile[32][129], v_tile[32][129]; // 129: a column of 32 keys lies in 32 banks
    int T = (int)s.T, HD = s.HD, i0 = blockIdx.x * 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    size_t h = blockIdx.y, b = blockIdx.z, kv = h / (s.NH / s.NKV);
    float scale = 1 / sqrtf((float)HD), acc[4][4] = {}, maximum[4], sum[4];
    #pragma unroll
    for (int r = 0; r < 4; r++) {
        maximum[r] = -INFINITY;
        sum[r] = 0;
    }
    for (int i = threadIdx.x; i < 32 * HD; i += blockDim.x) {
        int t = i0 + i / HD;
        q_tile[i / HD][i % HD] = t < T ? q[(b * T + t) * s.ld_qk + h * HD + i % HD] : __float2bfloat16(0.0f);
    }
    for (int j0 = doc_start[b * T + i0] / 32 * 32; j0 < i0 + 32; j0 += 32) {
        __syncthreads(); // all have finished with the tile before
        for (int i = threadIdx.x; i < 32 * HD; i += blockDim.x) {
            int j = j0 + i / HD, c = i % HD;
            k_tile[i / HD][c] = j < T ? __bfloat162float(k[(b * T + j) * s.ld_qk + kv * HD + c]) : 0.0f;
            v_tile[i / HD][c] = j < T ? __bfloat162float(v[(b * T + j) * s.ld_v + kv * HD + c]) : 0.0f;
        }
        __syncthreads(); // the tiles are complete
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            int t = i0 + warp * 4 + r, j = j0 + lane;
            bool seen = t < T && doc_start[b * T + t] <= j && j <= t;
            float score = 0;
            for (int c = 0; c < HD; c++) { score += __bfloat162float(q_tile[warp * 4 + r][c]) * k_tile[lane][c]; }
            score = seen ? score * scale : -INFINITY;
            float larger = fmaxf(maximum[r], warp_max(score));
            if (larger == -INFINITY) { continue; } // nothing seen so far; the same for all lanes
            float rescale = expf(maximum[r] - larger), p = expf(score - larger);
            maximum[r] = larger;
            sum[r] = sum[r] * rescale + warp_sum(p);
            for (int i = 0; i < 4; i++) { acc[r][i] *= rescale; }
            for (int key = 0; key < 32; key++) {
                float p_key = __shfl_sync(0xffffffff, p, key);
                for (int i = 0; i < 4; i++) {
                    if (lane + 32 * i < HD) { acc[r][i] += p_key * v_tile[key][lane + 32 * i]; }
                }
            }
        }
    }
    #pragma unroll
    for (int r = 0; r < 4; r++) {
        int t = i0 + warp * 4 + r;
        if (t >= T) { continue; }
        for (int i = 0; i < 4; i++) {
            int c = lane + 32 * i;
            if (c < HD) { out[((b * T + t) * s.NH + h) * HD + c] = __float2bfloat16(acc[r][i] / sum[r]); }
        }
        if (lane == 0) { lse[(b * s.NH + h) * T + t] = maximum[r] + logf(sum[r]); }
    }
}

// ----------------------------------------------------------------------------
// kernel 4

// A block owns Br queries of one head, a warp 16 of them, kept in registers as A operands with their 16 rows of the
// output. It goes over the keys Bc at a time from the diagonal DOWN to the first document's start: the first tile that
// a row meets holds its own key, so its running maximum is finite from then on. Two tiles of keys and values are in
// shared memory: one is used, one is on its way. Bound by the tensor cores; about 7 instructions go to an mma, most of
// them for the softmax.
template <int D, int Br, int Bc, int MIN_BLOCKS>
__global__ void __launch_bounds__(Br * 2, MIN_BLOCKS)
attention_forward_kernel4(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const int* doc_start,
                          AttentionShape s) {
    constexpr int THREADS = Br * 2;
    static_assert(Bc % 16 == 0 && Br <= 4 * Bc,
                  "a warp's diagonal in one tile; queries pass through the room of the tiles");
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    bf16 *k_tiles = (bf16*)shared_bytes, *v_tiles = k_tiles + 2 * Bc * D; // (2,Bc,D) each
    int T = (int)s.T, HD = s.HD, ld_qk = (int)s.ld_qk, ld_v = (int)s.ld_v, lane = threadIdx.x % 32;
    int i0 = (gridDim.x - 1 - blockIdx.x) * Br; // blocks with most keys start first
    int h = blockIdx.y, kv = h / (s.NH / s.NKV), warp_i0 = i0 + threadIdx.x / 32 * 16;
    size_t b = blockIdx.z;
    const bf16* q_h = q + b * T * ld_qk + h * HD;
    const bf16* k_h = k + b * T * ld_qk + kv * HD;
    const bf16* v_h = v + b * T * ld_v + kv * HD;
    doc_start += b * T;
    int last_row = min(i0 + Br, T) - 1, latest_start = doc_start[last_row];
    int first_tile = doc_start[i0] / Bc, last_tile = last_row / Bc; // doc_start never falls: no row sees a key before

    uint32_t q_fragments[D / 16][4];
    copy_tile<Br, D, THREADS>(k_tiles, q_h, i0, T, ld_qk, HD);
    cpa_commit();
    cpa_wait<0>();
    __syncthreads(); // the copies of all threads are there
    load_fragments<D>(q_fragments, k_tiles + threadIdx.x / 32 * 16 * D);
    __syncthreads(); // all warps have their queries; keys may overwrite them
    copy_tile<Bc, D, THREADS>(k_tiles, k_h, last_tile * Bc, T, ld_qk, HD);
    copy_tile<Bc, D, THREADS>(v_tiles, v_h, last_tile * Bc, T, ld_v, HD);
    cpa_commit();

    // this lane's two rows, lane/4 and lane/4 + 8 of the warp's
    float acc[D / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0, 0};
    int row_start[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp_i0 + lane / 4 + half * 8;
        row_start[half] = row < T ? doc_start[row] : 0;
    }
    float scale = 1 / sqrtf((float)HD), scale_log2 = scale * (float)M_LOG2E; // exp(x) = exp2(x log2(e))
    int buffer = 0;
    for (int tile = last_tile; tile >= first_tile; tile--, buffer ^= 1) {
        if (tile > first_tile) {
            copy_tile<Bc, D, THREADS>(k_tiles + (buffer ^ 1) * Bc * D, k_h, (tile - 1) * Bc, T, ld_qk, HD);
            copy_tile<Bc, D, THREADS>(v_tiles + (buffer ^ 1) * Bc * D, v_h, (tile - 1) * Bc, T, ld_v, HD);
        }
        cpa_commit();
        cpa_wait<1>();
        __syncthreads(); // this tile's copies of all threads are there
        int j0 = tile * Bc;
        auto use_tile = [&](auto masked) { // compiled twice, so that only tiles at an edge pay for the mask
            float p[Bc / 8][4] = {};
            multiply_abt<D, Bc, true>(p, q_fragments, NULL, k_tiles + buffer * Bc * D);
            if constexpr (decltype(masked)::value) {
                #pragma unroll
                for (int n = 0; n < Bc / 8; n++) {
                    #pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int key = j0 + n * 8 + lane % 4 * 2 + e % 2, row = warp_i0 + lane / 4 + e / 2 * 8;
                        if (key > row || key < row_start[e / 2]) { p[n][e] = -INFINITY; }
                    }
                }
            }
            #pragma unroll
            for (int half = 0; half < 2; half++) { // the four lanes of a row have different columns
                float larger = row_max[half];
                #pragma unroll
                for (int n = 0; n < Bc / 8; n++) { larger = fmaxf(larger, fmaxf(p[n][2 * half], p[n][2 * half + 1])); }
                larger = warp_max(larger, 4);
                float base = larger * scale_log2, rescale = exp2_approx(row_max[half] * scale_log2 - base), sum = 0;
                row_max[half] = larger;
                #pragma unroll
                for (int n = 0; n < Bc / 8; n++) {
                    p[n][2 * half] = exp2_approx(p[n][2 * half] * scale_log2 - base);
                    p[n][2 * half + 1] = exp2_approx(p[n][2 * half + 1] * scale_log2 - base);
                    sum += p[n][2 * half] + p[n][2 * half + 1];
                }
                row_sum[half] = row_sum[half] * rescale + sum;
                #pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    acc[n][2 * half] *= rescale;
                    acc[n][2 * half + 1] *= rescale;
                }
            }
            multiply_ab<D, Bc>(acc, p, v_tiles + buffer * Bc * D);
        };
        if (j0 <= warp_i0 + 15) { // otherwise these keys come after all rows of the warp
            bool edge = j0 + Bc - 1 > warp_i0 || j0 < latest_start;
            edge ? use_tile(std::true_type{}) : use_tile(std::false_type{});
        }
        __syncthreads(); // all warps have used the tile that the next round overwrites
    }

    #pragma unroll
    for (int half = 0; half < 2; half++) {
        row_sum[half] = warp_sum(row_sum[half], 4);
        int row = warp_i0 + lane / 4 + half * 8;
        if (lane % 4 == 0 && row < T) { lse[(b * s.NH + h) * T + row] = row_max[half] * scale + logf(row_sum[half]); }
    }
    store_rows<D>(out + (b * T * s.NH + h) * HD, acc, 1 / row_sum[0], 1 / row_sum[1], warp_i0, T, s.NH * HD, HD);
}

void attention_flash_forward(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const int* doc_start,
                             AttentionShape s, cudaStream_t stream) {
    // out (N,A) =, lse (B,NH,T) =; q (N,NH,HD) and k (N,NKV,HD) with ld_qk from row to row, v (N,NKV,HD) with ld_v
    attention_check("attention_flash_forward", s);
    if (s.B == 0 || s.T == 0 || s.NH == 0) { return; }
    if (((uintptr_t)q | (uintptr_t)k | (uintptr_t)v) % 16 != 0) {
        fatal("attention_flash_forward: q, k and v must be 16-byte aligned");
    }
    attention_dispatch(s.HD, [&](auto padded) {
        constexpr int D = decltype(padded)::value, Br = 64, Bc = D <= 64 ? 64 : 32;
        constexpr int MIN_BLOCKS = D <= 16 ? 4 : D <= 64 ? 3 : 2;
        dim3 grid(ceil_div(s.T, Br), s.NH, s.B);
        size_t bytes = 4 * Bc * D * sizeof(bf16); // at most 32 KiB
        attention_forward_kernel4<D, Br, Bc, MIN_BLOCKS>
            <<<grid, Br * 2, bytes, stream>>>(out, lse, q, k, v, doc_start, s);
        launchCheck("attention_forward_kernel4");
    });
}

// ----------------------------------------------------------------------------
// checks

#define NUM_KERNELS 4

void forward(int kernel, bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const int* doc_start,
             AttentionShape s, void* scores) {
    switch (kernel) {
        case CUDNN:
            return attention_cudnn_forward(out, lse, q, k, v, s, 0);
        case 1:
            return attention_naive_forward(out, lse, q, k, v, doc_start, s, scores, 0);
        case 2:
            attention_forward_kernel2<<<dim3((unsigned)ceil_div(s.T, 4), s.NH, (unsigned)s.B), 128>>>(out, lse, q, k, v,
                                                                                                      doc_start, s);
            return launchCheck("attention_forward_kernel2");
        case 3:
            attention_forward_kernel3<<<dim3((unsigned)ceil_div(s.T, 32), s.NH, (unsigned)s.B), 256>>>(out, lse, q, k,
                                                                                                       v, doc_start, s);
            return launchCheck("attention_forward_kernel3");
        default:
            return attention_flash_forward(out, lse, q, k, v, doc_start, s, 0);
    }
}

void check_forward(int kernel, const Reference& r) {
    const AttentionCase& c = r.c;
    const AttentionShape& s = r.s;
    size_t N = s.B * s.T, A = (size_t)s.NH * s.HD;
    Device<bf16> qk(to_bf16(r.qk)), qkv(to_bf16(r.qkv)), out(N * A);
    Device<float> lse(N * s.NH);
    Device<int> doc_start(r.doc_start);
    Device<char> scores(attention_naive_bytes(s.T, s.HD));
    forward(kernel, out, lse, qk, qk + A, qkv + s.ld_qk, doc_start, s, scores);
    double slack = kernel == 2 || kernel == 3 ? FP32_FACTORS : BF16_FACTORS;
    check_bf16(name_of(kernel, c, "out").c_str(), to_float(out.get()), r.out, r.out_spread, 1, slack);
    check_f32(name_of(kernel, c, "lse").c_str(), lse.get(), r.lse, 1e-5);
    if (!dev_is_large(kernel)) { return; }
    Device<bf16> again(N * A);
    forward(kernel, again, lse, qk, qk + A, qkv + s.ld_qk, doc_start, s, scores);
    check_equal(name_of(kernel, c, "the same bits again").c_str(), again.get(), out.get());
}

void check_all() {
    auto check_case = [](const AttentionCase& c, float amplitude, bool is_long) { // one reference for all kernels
        Reference r(c, amplitude);
        r.forward_spread();
        for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
            if (dev_runs(kernel) && (!is_long || dev_is_large(kernel))) { check_forward(kernel, r); }
        }
        if (cudnn_runs(c) && (!is_long || dev_is_large(CUDNN))) { check_forward(CUDNN, r); }
    };
    for (const AttentionCase& c : attention_cases) { check_case(c, 1.7f, false); }
    check_case({1, 65, 2, 1, 64, RANDOM}, 12.0f, false); // scores of some hundreds: rows nearly one-hot
    for (const AttentionCase& c : long_cases) {
        if (dev_long || dev_benchmarks()) { check_case(c, 1.7f, true); }
    }
}

void bench_all(int kernel) {
    AttentionCase c = {8, 4096, 16, 16, 64, WHOLE};
    AttentionShape s = shape_of(c);
    size_t N = s.B * s.T, A = (size_t)s.NH * s.HD;
    Device<bf16> qk(to_bf16(random_floats(N * s.ld_qk, 1.7f, 1))), qkv(to_bf16(random_floats(N * s.ld_v, 1.7f, 2))),
        out(N * A);
    Device<float> lse(N * s.NH);
    Device<int> doc_start(std::vector<int>(N, 0));
    Device<char> scores(attention_naive_bytes(s.T, s.HD));
    // half of the two (T,T) products is masked; q, k, v are read and out is written once
    double flops = 2.0 * N * s.NH * s.T * s.HD, bytes = 4.0 * N * A * sizeof(bf16);
    bench_attention("attention_forward", kernel, bytes, flops,
                    [&] { forward(kernel, out, lse, qk, qk + A, qkv + s.ld_qk, doc_start, s, scores); });
}

int main(int argc, char** argv) {
    dev_open(argc, argv, NUM_KERNELS);
    gemm_open();
    check_all();
    for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    if (dev_times(CUDNN)) { bench_all(CUDNN); }
    gemm_close();
    return dev_close();
}
