/*
attention_backward.cu: the gradients of attention_forward.cu. With P the probabilities and delta = rowsum(d_out * out):
d_v = P^T d_out, d_p = d_out v^T, d_scores = P * (d_p - delta) / sqrt(HD), d_q = d_scores k, d_k = d_scores^T q.

  nvcc -O3 -std=c++17 -I. -o build/dev/attention_backward dev/cuda/attention_backward.cu -lcjson -lcublasLt
  build/dev/attention_backward        checks all kernels, then times them
  build/dev/attention_backward 3      kernel 3 only
  make build/dev/attention_backward USE_CUDNN=1      with NVIDIA's library beside them

kernel 1: as the formulas say: one head's (T,T) scores and their gradients in memory, five matrix products. The
          trainer's --attention naive.
kernel 2: nothing (T,T) in memory: P comes again from the scores and the forward's log-sum-exp. A warp a query for d_q,
          a warp a key for d_k and d_v, so that each sum has one owner and no atomics are needed.
kernel 3: the same two loops in tiles on the tensor cores. That is seven products where five would do, 1.4 times the
          work, but nothing passes between blocks or even warps: P and d_scores never leave the registers of the warp
          that made them.
*/
// winner: 3
#include "attention.h"

// ----------------------------------------------------------------------------
// delta, for all kernels

// delta (B,NH,T) = rowsum(d_out * out). One warp a row (b,t,h), two columns a lane. Bound by bandwidth.
__global__ void attention_delta_kernel1(float* delta, const bf16* d_out, const bf16* out, AttentionShape s) {
    size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= s.B * s.T * s.NH) { return; }
    int lane = threadIdx.x % 32;
    float sum = 0;
    for (int c = 2 * lane; c < s.HD; c += 64) {
        float2 d = __bfloat1622float2(*(const __nv_bfloat162*)(d_out + row * s.HD + c));
        float2 o = __bfloat1622float2(*(const __nv_bfloat162*)(out + row * s.HD + c));
        sum += d.x * o.x + d.y * o.y;
    }
    sum = warp_sum(sum);
    size_t n = row / s.NH, h = row % s.NH;
    if (lane == 0) { delta[(n / s.T * s.NH + h) * s.T + n % s.T] = sum; }
}

void attention_delta(float* delta, const bf16* d_out, const bf16* out, AttentionShape s, cudaStream_t stream) {
    size_t blocks = ceil_div(s.B * s.T * s.NH, 4);
    if (blocks > INT_MAX) {
        fatal("attention_delta: B*T*NH must be below 2^33, B, T and NH are %zu, %zu, %d", s.B, s.T, s.NH);
    }
    attention_delta_kernel1<<<(unsigned)blocks, 128, 0, stream>>>(delta, d_out, out, s);
    launchCheck("attention_delta_kernel1");
}

// ----------------------------------------------------------------------------
// kernel 1

// One warp a row of scores and d_probs (T,T) of a head: probs and d_scores (T,T) in bf16, zero where the mask is. Bound
// by bandwidth.
__global__ void attention_softmax_backward_kernel1(bf16* probs, bf16* d_scores, const float* scores,
                                                   const float* d_probs, const float* lse, const float* delta,
                                                   const int* doc_start, int T, int ld, float scale) {
    int t = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) { return; }
    int begin = doc_start[t];
    for (int j = lane; j < T; j += 32) {
        size_t i = (size_t)t * ld + j;
        float p = 0, d = 0;
        if (begin <= j && j <= t) {
            p = expf(scores[i] * scale - lse[t]);
            d = p * (d_probs[i] - delta[t]) * scale;
        }
        if (begin == t) { // one key to see is no choice: exactly zero, which AdamW would tell from a rounding error
            p = j == t ? 1.0f : 0.0f;
            d = 0;
        }
        probs[i] = __float2bfloat16(p);
        d_scores[i] = __float2bfloat16(d);
    }
}

// d_k, d_v of a key/value head = sums (2,T,HD) over its query heads, rounded once. A block a row, a thread a column.
// Bound by bandwidth.
__global__ void attention_round_kernel1(bf16* d_k, bf16* d_v, const float* sums, size_t ld) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, to = blockIdx.x * ld + threadIdx.x;
    d_k[to] = __float2bfloat16(sums[i]);
    d_v[to] = __float2bfloat16(sums[(size_t)gridDim.x * blockDim.x + i]);
}

void attention_naive_backward(bf16* d_q, bf16* d_k, bf16* d_v, float* delta, const bf16* d_out, const bf16* out,
                              const float* lse, const bf16* q, const bf16* k, const bf16* v, const int* doc_start,
                              const int* doc_end, AttentionShape s, void* scores, cudaStream_t stream) {
    // d_q, d_k, d_v (=) with ld_d from row to row; delta (B,NH,T) scratch; scores: attention_naive_bytes(T, HD), one
    // head's at a time
    (void)doc_end; // one softmax a row asks only where its document starts
    attention_check("attention_naive_backward", s);
    if (s.B == 0 || s.T == 0 || s.NH == 0) { return; }
    attention_delta(delta, d_out, out, s, stream);
    size_t T = s.T, HD = s.HD, A = s.NH * HD, ld = attention_naive_ld(T), group = s.NH / s.NKV;
    float scale = 1 / sqrtf((float)HD), *raw = (float*)scores, *d_probs = raw + T * ld, *sums = d_probs + T * ld;
    bf16 *probs = (bf16*)(sums + 2 * T * HD), *d_scores = probs + T * ld;
    for (size_t bh = 0; bh < s.B * s.NH; bh++) {
        size_t b = bh / s.NH, h = bh % s.NH, kv = h / group;
        const bf16 *q_h = q + b * T * s.ld_qk + h * HD, *k_h = k + b * T * s.ld_qk + kv * HD,
                   *v_h = v + b * T * s.ld_v + kv * HD;
        const bf16* d_out_h = d_out + b * T * A + h * HD;
        bf16 *d_q_h = d_q + b * T * s.ld_d + h * HD, *d_k_h = d_k + b * T * s.ld_d + kv * HD,
             *d_v_h = d_v + b * T * s.ld_d + kv * HD;
        gemm(false, true, T, T, HD, q_h, s.ld_qk, k_h, s.ld_qk, 0, raw, CUDA_R_32F, ld, stream);
        gemm(false, true, T, T, HD, d_out_h, A, v_h, s.ld_v, 0, d_probs, CUDA_R_32F, ld, stream);
        attention_softmax_backward_kernel1<<<(unsigned)ceil_div(T, 8), 256, 0, stream>>>(
            probs, d_scores, raw, d_probs, lse + bh * T, delta + bh * T, doc_start + b * T, (int)T, (int)ld, scale);
        launchCheck("attention_softmax_backward_kernel1");
        float beta = h % group == 0 ? 0 : 1; // the heads of a group add up in their key/value head
        gemm(true, false, T, HD, T, probs, ld, d_out_h, A, beta, sums + T * HD, CUDA_R_32F, HD, stream);
        gemm(true, false, T, HD, T, d_scores, ld, q_h, s.ld_qk, beta, sums, CUDA_R_32F, HD, stream);
        gemm(false, false, T, HD, T, d_scores, ld, k_h, s.ld_qk, 0, d_q_h, CUDA_R_16BF, s.ld_d, stream);
        if ((h + 1) % group != 0) { continue; }
        attention_round_kernel1<<<(unsigned)T, s.HD, 0, stream>>>(d_k_h, d_v_h, sums, s.ld_d);
        launchCheck("attention_round_kernel1");
    }
}

// ----------------------------------------------------------------------------
// kernel 2

// p and d_score of one query and key, the same for all lanes; x and d_x hold columns lane, lane+32, ... of q and d_out
__device__ inline void score_backward(float* p, float* d_score, const float (&x)[4], const float (&d_x)[4],
                                      const bf16* k_j, const bf16* v_j, float lse, float delta, float scale,
                                      bool one_key, int HD) {
    float score = 0, d_p = 0;
    for (int i = 0; i < 4; i++) {
        int c = threadIdx.x % 32 + 32 * i;
        if (c >= HD) { continue; }
        score += x[i] * __bfloat162float(k_j[c]);
        d_p += d_x[i] * __bfloat162float(v_j[c]);
    }
    *p = expf(warp_sum(score) * scale - lse);
    d_p = warp_sum(d_p);
    *d_score = one_key ? 0.0f : *p * (d_p - delta) * scale; // one key to see is no choice
}

// d_q: one warp a query of one head. Bound by latency, as forward kernel 2.
__global__ void attention_backward_dq_kernel2(bf16* d_q, const bf16* d_out, const float* lse, const float* delta,
                                              const bf16* q, const bf16* k, const bf16* v, const int* doc_start,
                                              AttentionShape s) {
    int t = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= (int)s.T) { return; }
    size_t h = blockIdx.y, b = blockIdx.z, kv = h / (s.NH / s.NKV), row = b * s.T + t, stat = (b * s.NH + h) * s.T + t;
    float scale = 1 / sqrtf((float)s.HD), q_t[4], d_out_t[4], acc[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; i++) {
        int c = lane + 32 * i;
        q_t[i] = c < s.HD ? __bfloat162float(q[row * s.ld_qk + h * s.HD + c]) : 0.0f;
        d_out_t[i] = c < s.HD ? __bfloat162float(d_out[(row * s.NH + h) * s.HD + c]) : 0.0f;
    }
    for (int j = doc_start[row]; j <= t; j++) {
        const bf16 *k_j = k + (b * s.T + j) * s.ld_qk + kv * s.HD, *v_j = v + (b * s.T + j) * s.ld_v + kv * s.HD;
        float p, d_score;
        score_backward(&p, &d_score, q_t, d_out_t, k_j, v_j, lse[stat], delta[stat], scale, doc_start[row] == t, s.HD);
        for (int i = 0; i < 4; i++) {
            int c = lane + 32 * i;
            if (c < s.HD) { acc[i] += d_score * __bfloat162float(k_j[c]); }
        }
    }
    for (int i = 0; i < 4; i++) {
        int c = lane + 32 * i;
        if (c < s.HD) { d_q[row * s.ld_d + h * s.HD + c] = __float2bfloat16(acc[i]); }
    }
}

// d_k, d_v: one warp a key of one key/value head; over the query heads of the group, then over the queries that see the
// key
__global__ void attention_backward_dkdv_kernel2(bf16* d_k, bf16* d_v, const bf16* d_out, const float* lse,
                                                const float* delta, const bf16* q, const bf16* k, const bf16* v,
                                                const int* doc_start, const int* doc_end, AttentionShape s) {
    int j = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (j >= (int)s.T) { return; }
    size_t kv = blockIdx.y, b = blockIdx.z, row = b * s.T + j, group = s.NH / s.NKV;
    const bf16 *k_j = k + row * s.ld_qk + kv * s.HD, *v_j = v + row * s.ld_v + kv * s.HD;
    float scale = 1 / sqrtf((float)s.HD), acc_k[4] = {0, 0, 0, 0}, acc_v[4] = {0, 0, 0, 0};
    for (size_t h = kv * group; h < (kv + 1) * group; h++) {
        for (int t = j; t < doc_end[row]; t++) {
            size_t query = b * s.T + t, stat = (b * s.NH + h) * s.T + t;
            float q_t[4], d_out_t[4], p, d_score;
            for (int i = 0; i < 4; i++) {
                int c = lane + 32 * i;
                q_t[i] = c < s.HD ? __bfloat162float(q[query * s.ld_qk + h * s.HD + c]) : 0.0f;
                d_out_t[i] = c < s.HD ? __bfloat162float(d_out[(query * s.NH + h) * s.HD + c]) : 0.0f;
            }
            score_backward(&p, &d_score, q_t, d_out_t, k_j, v_j, lse[stat], delta[stat], scale, doc_start[query] == t,
                           s.HD);
            for (int i = 0; i < 4; i++) {
                acc_k[i] += d_score * q_t[i];
                acc_v[i] += p * d_out_t[i];
            }
        }
    }
    for (int i = 0; i < 4; i++) {
        int c = lane + 32 * i;
        if (c >= s.HD) { continue; }
        d_k[row * s.ld_d + kv * s.HD + c] = __float2bfloat16(acc_k[i]);
        d_v[row * s.ld_d + kv * s.HD + c] = __float2bfloat16(acc_v[i]);
    }
}

// ----------------------------------------------------------------------------
// kernel 3

// A block owns Bc keys of one key/value head, a warp 16 of them with their rows of d_k and d_v in registers. It goes
// over the query heads of the group and, for each, over the queries Br at a time from the diagonal to the last
// document's end. Everything is computed transposed, keys are the rows, so that P^T and d_scores^T are ready as left
// factors. Sums run over 16 queries at a time in ascending order whatever Br and CHUNK are. CHUNK queries are taken at
// once: that sets the number of registers. Up to D 64 keys and values are kept as A operands in registers (they pass
// through the room of the queries); at D 128 they stay in shared memory. Bound by the tensor cores; about 4
// instructions go to an mma.
template <int D, int Bc, int Br, int CHUNK, int MIN_BLOCKS>
__global__ void __launch_bounds__(Bc * 2, MIN_BLOCKS)
attention_backward_dkdv_kernel3(bf16* d_k, bf16* d_v, const bf16* d_out, const float* lse, const float* delta,
                                const bf16* q, const bf16* k, const bf16* v, const int* doc_start, const int* doc_end,
                                AttentionShape s) {
    constexpr int THREADS = Bc * 2;
    constexpr bool KEPT = D <= 64;
    static_assert(THREADS >= Br && (!KEPT || Bc <= 2 * Br),
                  "a thread a query's statistics; room for keys to pass through");
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    bf16* q_tiles = (bf16*)shared_bytes + (KEPT ? 0 : 2 * Bc * D); // (2,Br,D)
    bf16* d_out_tiles = q_tiles + 2 * Br * D;                      // (2,Br,D)
    float* lse_log2 = (float*)(d_out_tiles + 2 * Br * D);          // (2,Br) lse * log2(e)
    float* deltas = lse_log2 + 2 * Br;                             // (2,Br)
    bf16* k_tile = (bf16*)shared_bytes;                            // (Bc,D), for good or until fragments are loaded
    bf16* v_tile = KEPT ? d_out_tiles : k_tile + Bc * D;           // (Bc,D)
    int T = (int)s.T, HD = s.HD, ld_qk = (int)s.ld_qk, ld_out = s.NH * HD, lane = threadIdx.x % 32;
    int j0 = blockIdx.x * Bc; // blocks with most queries, those of the first keys, start first
    int warp_row = threadIdx.x / 32 * 16, warp_j0 = j0 + warp_row;
    int kv = blockIdx.y, group = s.NH / s.NKV;
    size_t b = blockIdx.z;
    const bf16* q_b = q + b * T * ld_qk;
    const bf16* d_out_b = d_out + b * T * ld_out;
    doc_start += b * T;
    // doc_end never falls: no query after the last key's document sees any of the keys
    int first_tile = j0 / Br, num_tiles = (doc_end[b * T + min(j0 + Bc, T) - 1] - 1) / Br - first_tile + 1;
    int num_steps = num_tiles * group;

    copy_tile<Bc, D, THREADS>(k_tile, k + b * T * ld_qk + kv * HD, j0, T, ld_qk, HD);
    copy_tile<Bc, D, THREADS>(v_tile, v + b * T * s.ld_v + kv * HD, j0, T, (int)s.ld_v, HD);
    cpa_commit();
    uint32_t k_fragments[KEPT ? D / 16 : 1][4], v_fragments[KEPT ? D / 16 : 1][4];
    if constexpr (KEPT) {
        cpa_wait<0>();
        __syncthreads(); // the copies of all threads are there
        load_fragments<D>(k_fragments, k_tile + warp_row * D);
        load_fragments<D>(v_fragments, v_tile + warp_row * D);
        __syncthreads(); // all warps have their keys and values; queries may overwrite them
    }

    // step i has tile first_tile + i % num_tiles of query head kv * group + i / num_tiles
    auto copy_queries = [&](int step, int buffer) {
        int h = kv * group + step / num_tiles, i0 = (first_tile + step % num_tiles) * Br;
        copy_tile<Br, D, THREADS>(q_tiles + buffer * Br * D, q_b + h * HD, i0, T, ld_qk, HD);
        copy_tile<Br, D, THREADS>(d_out_tiles + buffer * Br * D, d_out_b + h * HD, i0, T, ld_out, HD);
    };
    auto statistic = [&](int step, const float* x) { // this thread's of the tile; T may be odd: no cp.async for these
        int h = kv * group + step / num_tiles, i = (first_tile + step % num_tiles) * Br + threadIdx.x;
        return threadIdx.x < Br && i < T ? x[(b * s.NH + h) * T + i] : 0.0f;
    };
    copy_queries(0, 0);
    cpa_commit();
    if (threadIdx.x < Br) {
        lse_log2[threadIdx.x] = statistic(0, lse) * (float)M_LOG2E;
        deltas[threadIdx.x] = statistic(0, delta);
    }

    float acc_k[D / 8][4] = {}, acc_v[D / 8][4] = {};
    float scale = 1 / sqrtf((float)HD), scale_log2 = scale * (float)M_LOG2E;
    for (int step = 0; step < num_steps; step++) {
        int buffer = step % 2, i0 = (first_tile + step % num_tiles) * Br;
        bool more = step + 1 < num_steps;
        float next_lse = 0, next_delta = 0;
        if (more) {
            copy_queries(step + 1, buffer ^ 1);
            next_lse = statistic(step + 1, lse);
            next_delta = statistic(step + 1, delta);
        }
        cpa_commit();
        cpa_wait<1>();
        __syncthreads(); // this step's tiles and statistics are there, whoever brought them
        auto use_tile = [&](auto masked) { // compiled twice, so that only tiles at an edge pay for the mask
            #pragma unroll 1
            for (int c = 0; c < Br; c += CHUNK) {
                if (i0 + c + CHUNK - 1 < warp_j0) { continue; } // these queries come before all keys of the warp
                const bf16 *q_rows = q_tiles + (buffer * Br + c) * D, *d_out_rows = d_out_tiles + (buffer * Br + c) * D;
                float p[CHUNK / 8][4] = {}, d_p[CHUNK / 8][4] = {};
                multiply_abt<D, CHUNK, KEPT>(p, k_fragments, k_tile + warp_row * D, q_rows);
                multiply_abt<D, CHUNK, KEPT>(d_p, v_fragments, v_tile + warp_row * D, d_out_rows);
                #pragma unroll
                for (int n = 0; n < CHUNK / 8; n++) {
                    int column = c + n * 8 + lane % 4 * 2; // of this lane's two queries
                    float2 l = *(const float2*)(lse_log2 + buffer * Br + column);
                    float2 d = *(const float2*)(deltas + buffer * Br + column);
                    #pragma unroll
                    for (int e = 0; e < 4; e++) {
                        p[n][e] = exp2_approx(p[n][e] * scale_log2 - (e % 2 == 0 ? l.x : l.y));
                        d_p[n][e] -= e % 2 == 0 ? d.x : d.y;
                    }
                    if constexpr (decltype(masked)::value) {
                        #pragma unroll
                        for (int e = 0; e < 4; e++) {
                            int query = i0 + column + e % 2, key = warp_j0 + lane / 4 + e / 2 * 8;
                            int start = doc_start[min(query, T - 1)];
                            if (key > query || key < start) { p[n][e] = 0; }
                            if (start == query) { d_p[n][e] = 0; } // one key to see is no choice: exactly zero
                        }
                    }
                    #pragma unroll
                    for (int e = 0; e < 4; e++) { d_p[n][e] *= p[n][e]; } // d_scores, but for the factor 1/sqrt(HD)
                }
                multiply_ab<D, CHUNK>(acc_v, p, d_out_rows);
                multiply_ab<D, CHUNK>(acc_k, d_p, q_rows);
            }
        };
        bool edge = i0 < j0 + Bc - 1 || doc_start[min(i0 + Br, T) - 1] > j0;
        edge ? use_tile(std::true_type{}) : use_tile(std::false_type{});
        if (more && threadIdx.x < Br) {
            lse_log2[(buffer ^ 1) * Br + threadIdx.x] = next_lse * (float)M_LOG2E;
            deltas[(buffer ^ 1) * Br + threadIdx.x] = next_delta;
        }
        __syncthreads(); // all warps have used the tiles that the next round overwrites
    }
    store_rows<D>(d_k + b * T * s.ld_d + kv * HD, acc_k, scale, scale, warp_j0, T, (int)s.ld_d, HD);
    store_rows<D>(d_v + b * T * s.ld_d + kv * HD, acc_v, 1, 1, warp_j0, T, (int)s.ld_d, HD);
}

// The mirror image: a block owns Br queries of one head, a warp 16 of them, with q and d_out as A operands and d_q in
// registers. It goes over the keys Bc at a time from the first document's start up to the diagonal, CHUNK keys at once.
// Bound by the tensor cores, too.
template <int D, int Br, int Bc, int CHUNK, int MIN_BLOCKS>
__global__ void __launch_bounds__(Br * 2, MIN_BLOCKS)
attention_backward_dq_kernel3(bf16* d_q, const bf16* d_out, const float* lse, const float* delta, const bf16* q,
                              const bf16* k, const bf16* v, const int* doc_start, AttentionShape s) {
    constexpr int THREADS = Br * 2;
    static_assert(Br <= 2 * Bc, "queries pass through the room of the keys");
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    bf16 *k_tiles = (bf16*)shared_bytes, *v_tiles = k_tiles + 2 * Bc * D; // (2,Bc,D) each
    int T = (int)s.T, HD = s.HD, ld_qk = (int)s.ld_qk, ld_v = (int)s.ld_v, ld_out = s.NH * HD, lane = threadIdx.x % 32;
    int i0 = (gridDim.x - 1 - blockIdx.x) * Br; // blocks with most keys start first
    int h = blockIdx.y, kv = h / (s.NH / s.NKV), warp_row = threadIdx.x / 32 * 16, warp_i0 = i0 + warp_row;
    size_t b = blockIdx.z;
    const bf16* k_h = k + b * T * ld_qk + kv * HD;
    const bf16* v_h = v + b * T * ld_v + kv * HD;
    doc_start += b * T;
    int last_row = min(i0 + Br, T) - 1, latest_start = doc_start[last_row];
    int first_tile = doc_start[i0] / Bc, last_tile = last_row / Bc;

    uint32_t q_fragments[D / 16][4], d_out_fragments[D / 16][4];
    copy_tile<Br, D, THREADS>(k_tiles, q + b * T * ld_qk + h * HD, i0, T, ld_qk, HD);
    copy_tile<Br, D, THREADS>(v_tiles, d_out + b * T * ld_out + h * HD, i0, T, ld_out, HD);
    cpa_commit();
    cpa_wait<0>();
    __syncthreads(); // the copies of all threads are there
    load_fragments<D>(q_fragments, k_tiles + warp_row * D);
    load_fragments<D>(d_out_fragments, v_tiles + warp_row * D);
    __syncthreads(); // all warps have their queries; keys may overwrite them
    copy_tile<Bc, D, THREADS>(k_tiles, k_h, first_tile * Bc, T, ld_qk, HD);
    copy_tile<Bc, D, THREADS>(v_tiles, v_h, first_tile * Bc, T, ld_v, HD);
    cpa_commit();

    // this lane's two rows, lane/4 and lane/4 + 8 of the warp's
    float acc[D / 8][4] = {}, row_lse_log2[2], row_delta[2];
    int row_start[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp_i0 + lane / 4 + half * 8;
        size_t i = ((size_t)b * s.NH + h) * T + row;
        row_lse_log2[half] = row < T ? lse[i] * (float)M_LOG2E : 0.0f;
        row_delta[half] = row < T ? delta[i] : 0.0f;
        row_start[half] = row < T ? doc_start[row] : 0;
    }
    float scale = 1 / sqrtf((float)HD), scale_log2 = scale * (float)M_LOG2E;
    for (int tile = first_tile; tile <= last_tile; tile++) {
        int buffer = (tile - first_tile) % 2, j0 = tile * Bc;
        if (tile < last_tile) {
            copy_tile<Bc, D, THREADS>(k_tiles + (buffer ^ 1) * Bc * D, k_h, (tile + 1) * Bc, T, ld_qk, HD);
            copy_tile<Bc, D, THREADS>(v_tiles + (buffer ^ 1) * Bc * D, v_h, (tile + 1) * Bc, T, ld_v, HD);
        }
        cpa_commit();
        cpa_wait<1>();
        __syncthreads(); // this tile's copies of all threads are there
        auto use_tile = [&](auto masked) { // compiled twice, so that only tiles at an edge pay for the mask
            #pragma unroll 1
            for (int c = 0; c < Bc; c += CHUNK) {
                if (j0 + c > warp_i0 + 15) { break; } // these keys come after all rows of the warp
                const bf16 *k_rows = k_tiles + (buffer * Bc + c) * D, *v_rows = v_tiles + (buffer * Bc + c) * D;
                float p[CHUNK / 8][4] = {}, d_p[CHUNK / 8][4] = {};
                multiply_abt<D, CHUNK, true>(p, q_fragments, NULL, k_rows);
                multiply_abt<D, CHUNK, true>(d_p, d_out_fragments, NULL, v_rows);
                #pragma unroll
                for (int n = 0; n < CHUNK / 8; n++) {
                    #pragma unroll
                    for (int e = 0; e < 4; e++) {
                        p[n][e] = exp2_approx(p[n][e] * scale_log2 - row_lse_log2[e / 2]);
                        if constexpr (decltype(masked)::value) {
                            int key = j0 + c + n * 8 + lane % 4 * 2 + e % 2, row = warp_i0 + lane / 4 + e / 2 * 8;
                            // nothing from keys that the row does not see, nor from one that is all it sees
                            if (key > row || key < row_start[e / 2] || row_start[e / 2] == row) { p[n][e] = 0; }
                        }
                        d_p[n][e] = p[n][e] * (d_p[n][e] - row_delta[e / 2]);
                    }
                }
                multiply_ab<D, CHUNK>(acc, d_p, k_rows);
            }
        };
        bool edge = j0 + Bc - 1 > warp_i0 || j0 < latest_start;
        edge ? use_tile(std::true_type{}) : use_tile(std::false_type{});
        __syncthreads(); // all warps have used the tiles that the next round overwrites
    }
    store_rows<D>(d_q + b * T * s.ld_d + h * HD, acc, scale, scale, warp_i0, T, (int)s.ld_d, HD);
}

void attention_flash_backward(bf16* d_q, bf16* d_k, bf16* d_v, float* delta, const bf16* d_out, const bf16* out,
                              const float* lse, const bf16* q, const bf16* k, const bf16* v, const int* doc_start,
                              const int* doc_end, AttentionShape s, cudaStream_t stream) {
    // d_q (N,NH,HD), d_k, d_v (N,NKV,HD) (=) with ld_d from row to row; delta (B,NH,T) scratch; the rest as
    // attention_flash_forward
    attention_check("attention_flash_backward", s);
    if (s.B == 0 || s.T == 0 || s.NH == 0) { return; }
    if (((uintptr_t)q | (uintptr_t)k | (uintptr_t)v | (uintptr_t)d_out) % 16 != 0) {
        fatal("attention_flash_backward: q, k, v and d_out must be 16-byte aligned");
    }
    attention_delta(delta, d_out, out, s, stream);
    attention_dispatch(s.HD, [&](auto padded) {
        // keys or queries of a block, and how many of the other kind it has in shared memory at a time
        constexpr int D = decltype(padded)::value, keys = D <= 64 ? 64 : 128, queries = 64, tile = D <= 64 ? 64 : 32;
        constexpr int MIN_BLOCKS = D <= 32 ? 3 : D <= 64 ? 2 : 1; // on an SM; of dq one more
        auto dkdv = attention_backward_dkdv_kernel3<D, keys, tile, D <= 64 ? 32 : 16, MIN_BLOCKS>;
        size_t dq_bytes = 4 * tile * D * sizeof(bf16), dkdv_bytes = dq_bytes + 4 * tile * sizeof(float);
        if (D > 64) { // its keys and values stay in shared memory: 96.5 KiB
            dkdv_bytes += 2 * keys * D * sizeof(bf16);
            cudaCheck(cudaFuncSetAttribute(dkdv, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)dkdv_bytes));
        }
        dkdv<<<dim3(ceil_div(s.T, keys), s.NKV, s.B), keys * 2, dkdv_bytes, stream>>>(d_k, d_v, d_out, lse, delta, q, k,
                                                                                      v, doc_start, doc_end, s);
        launchCheck("attention_backward_dkdv_kernel3");
        dim3 dq_grid(ceil_div(s.T, queries), s.NH, s.B);
        attention_backward_dq_kernel3<D, queries, tile, 32, MIN_BLOCKS + 1>
            <<<dq_grid, queries * 2, dq_bytes, stream>>>(d_q, d_out, lse, delta, q, k, v, doc_start, s);
        launchCheck("attention_backward_dq_kernel3");
    });
}

// ----------------------------------------------------------------------------
// checks

#define NUM_KERNELS 3

void backward(int kernel, bf16* d_q, bf16* d_k, bf16* d_v, float* delta, const bf16* d_out, const bf16* out,
              const float* lse, const bf16* q, const bf16* k, const bf16* v, const int* doc_start, const int* doc_end,
              AttentionShape s, void* scores) {
    if (kernel == CUDNN) {
        attention_cudnn_backward(d_q, d_k, d_v, d_out, out, lse, q, k, v, s, 0);
    } else if (kernel == 1) {
        attention_naive_backward(d_q, d_k, d_v, delta, d_out, out, lse, q, k, v, doc_start, doc_end, s, scores, 0);
    } else if (kernel == 2) {
        attention_delta(delta, d_out, out, s, 0);
        dim3 queries((unsigned)ceil_div(s.T, 4), s.NH, (unsigned)s.B),
            keys((unsigned)ceil_div(s.T, 4), s.NKV, (unsigned)s.B);
        attention_backward_dq_kernel2<<<queries, 128>>>(d_q, d_out, lse, delta, q, k, v, doc_start, s);
        launchCheck("attention_backward_dq_kernel2");
        attention_backward_dkdv_kernel2<<<keys, 128>>>(d_k, d_v, d_out, lse, delta, q, k, v, doc_start, doc_end, s);
        launchCheck("attention_backward_dkdv_kernel2");
    } else {
        attention_flash_backward(d_q, d_k, d_v, delta, d_out, out, lse, q, k, v, doc_start, doc_end, s, 0);
    }
}

// kernel 3 with smaller tiles: the order of its sums does not depend on them, so nor does a bit of the result
void other_tiles(bf16* d_q, bf16* d_k, bf16* d_v, float* delta, const bf16* d_out, const float* lse, const bf16* q,
                 const bf16* k, const bf16* v, const int* doc_start, const int* doc_end, AttentionShape s) {
    attention_dispatch(s.HD, [&](auto padded) {
        constexpr int D = std::max(32, (int)decltype(padded)::value), Br = D <= 64 ? 32 : 64;
        auto dkdv = attention_backward_dkdv_kernel3<D, 64, Br, 16, 1>;
        size_t bytes = (4 * Br + (D <= 64 ? 0 : 2 * 64)) * D * sizeof(bf16) + 4 * Br * sizeof(float);
        cudaCheck(cudaFuncSetAttribute(dkdv, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        dkdv<<<dim3(ceil_div(s.T, 64), s.NKV, s.B), 128, bytes>>>(d_k, d_v, d_out, lse, delta, q, k, v, doc_start,
                                                                  doc_end, s);
        launchCheck("attention_backward_dkdv_kernel3");
        auto dq = attention_backward_dq_kernel3<D, 64, 32, 16, 1>;
        dq<<<dim3(ceil_div(s.T, 64), s.NH, s.B), 128, 4 * 32 * D * sizeof(bf16)>>>(d_q, d_out, lse, delta, q, k, v,
                                                                                   doc_start, s);
        launchCheck("attention_backward_dq_kernel3");
    });
}

void check_backward(int kernel, const Reference& r) {
    const AttentionCase& c = r.c;
    const AttentionShape& s = r.s;
    size_t N = s.B * s.T, A = (size_t)s.NH * s.HD;
    Device<bf16> qk(to_bf16(r.qk)), qkv(to_bf16(r.qkv)), d_out(to_bf16(r.d_out)), out(to_bf16(r.out)),
        d_qkv(N * s.ld_d);
    Device<float> lse(r.lse), delta(N * s.NH);
    Device<int> doc_start(r.doc_start), doc_end(make_doc_end(r.doc_start, s.T));
    Device<char> scores(attention_naive_bytes(s.T, s.HD));
    backward(kernel, d_qkv, d_qkv + A, d_qkv + s.ld_qk, delta, d_out, out, lse, qk, qk + A, qkv + s.ld_qk, doc_start,
             doc_end, s, scores);
    std::vector<bf16> got_bf16 = d_qkv.get();
    std::vector<float> got = to_float(got_bf16);
    std::vector<float> lone; // d_q of rows that see one key
    for (size_t n = 0; n < N; n++) {
        if (r.doc_start[n] != (int)(n % s.T)) { continue; }
        if (kernel == CUDNN) { std::fill_n(&got[n * s.ld_d], A, 0.0f); } // it leaves a rounding error, not zero
        lone.insert(lone.end(), &got[n * s.ld_d], &got[n * s.ld_d] + A);
    }
    auto check = [&](const char* what, size_t column, int heads, const std::vector<float>& want,
                     const std::vector<double>& spread) {
        double slack = kernel == 2 ? FP32_FACTORS : BF16_FACTORS;
        check_bf16(name_of(kernel, c, what).c_str(), head_major(got, c, s.ld_d, column, heads), want, spread, 1, slack);
    };
    check("d_q", 0, s.NH, r.d_q, r.d_q_spread);
    check("d_k", A, s.NKV, r.d_k, r.d_k_spread);
    check("d_v", s.ld_qk, s.NKV, r.d_v, r.d_v_spread);
    std::vector<float> zeros(lone.size(), 0.0f);
    check_bf16(name_of(kernel, c, "d_q of rows that see one key, exactly").c_str(), lone, zeros);
    if (kernel != NUM_KERNELS) { return; }
    Device<bf16> again(N * s.ld_d);
    other_tiles(again, again + A, again + s.ld_qk, delta, d_out, lse, qk, qk + A, qkv + s.ld_qk, doc_start, doc_end, s);
    check_equal(name_of(kernel, c, "other tiles").c_str(), again.get(), got_bf16);
    if (!dev_is_large(kernel)) { return; }
    backward(kernel, again, again + A, again + s.ld_qk, delta, d_out, out, lse, qk, qk + A, qkv + s.ld_qk, doc_start,
             doc_end, s, scores);
    check_equal(name_of(kernel, c, "the same bits again").c_str(), again.get(), got_bf16);
}

void check_all() {
    auto check_case = [](const AttentionCase& c, float amplitude, bool is_long) { // one reference for all kernels
        Reference r(c, amplitude);
        r.backward();
        r.backward_spread();
        for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
            if (dev_runs(kernel) && (!is_long || dev_is_large(kernel))) { check_backward(kernel, r); }
        }
        if (cudnn_runs(c) && (!is_long || dev_is_large(CUDNN))) { check_backward(CUDNN, r); }
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
    Device<bf16> qk(to_bf16(random_floats(N * s.ld_qk, 1.7f, 1))), qkv(to_bf16(random_floats(N * s.ld_v, 1.7f, 2)));
    Device<bf16> d_out(to_bf16(random_floats(N * A, 1, 3))), out(to_bf16(random_floats(N * A, 1, 4))),
        d_qkv(N * s.ld_d);
    Device<float> lse(std::vector<float>(N * s.NH, 8.0f)), delta(N * s.NH);
    Device<int> doc_start(std::vector<int>(N, 0)), doc_end(std::vector<int>(N, (int)s.T));
    Device<char> scores(attention_naive_bytes(s.T, s.HD));
    // five (T,T) products of which half is masked, as the literature counts them whatever is computed again; six
    // tensors are read or written once, out and d_out twice
    double flops = 5.0 * N * s.NH * s.T * s.HD, bytes = 10.0 * N * A * sizeof(bf16);
    bench_attention("attention_backward", kernel, bytes, flops, [&] {
        backward(kernel, d_qkv, d_qkv + A, d_qkv + s.ld_qk, delta, d_out, out, lse, qk, qk + A, qkv + s.ld_qk,
                 doc_start, doc_end, s, scores);
    });
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
