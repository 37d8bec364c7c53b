// router: which K of E experts a token goes to, and with what weights; its backward; the statistics of two losses.
//
//   nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/router dev/cuda/router.cu -lcjson -lcublasLt
//   dev/emu/emucc -I. -o build/dev/router dev/cuda/router.cu -lcjson                (no GPU: the emulator)
//
// router_logits (N,E) = inp (N,C) router (E,C)^T; router_probs (N,E) = softmax over all E; the K most probable are
// chosen, ties go to the lower index; router_weights (N,K) = their probabilities, divided by their sum where
// norm_topk_prob says so.
//
// forward          1  the CPU's loops, a kernel for each: a thread a logit, a thread a softmax, a thread a choice
//                  2  one kernel: a warp a token, 16 bytes a lane; then four lanes choose for a token
//                  3  the products on tensor cores, 16 tokens a warp: a row of the router is read for all 16 at once
// weight gradient  1  a thread an element, over all tokens
//                  2  the tokens are split over blocks, a thread keeps 16 experts x 4 columns; the splits are added
// the rest         1  four lanes (backward) own a token, a block (statistics) an expert
// winner: 3 (forward), 2 (weight gradient), 1 (the rest)
//
// Reference: cpu::router_forward, topk_forward, router_backward, router_stats_add, load_balancing_loss.
#include "common.h"
#include "norm.h" // norm_weight_reduce

const int NUM_KERNELS = 3;

// ----------------------------------------------------------------------------
// first rungs

// A thread owns a logit. Bound by latency: the 32 lanes of a warp walk through 32 rows at once, 2 bytes at a time.
__global__ void router_logits_kernel1(float* router_logits, const bf16* inp, const bf16* router, size_t N, size_t C,
                                      int E) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N * E) { return; }
    const bf16 *x = inp + i / E * C, *w = router + i % E * C;
    float sum = 0;
    for (size_t c = 0; c < C; c++) { sum += __bfloat162float(x[c]) * __bfloat162float(w[c]); }
    router_logits[i] = sum;
}

// A thread owns a token, a block 128. Bound by sectors: lanes are E floats apart.
__global__ void router_softmax_kernel1(float* router_probs, float* router_lse, const float* router_logits, size_t N,
                                       int E) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const float* logits = router_logits + n * E;
    float* probs = router_probs + n * E;
    float maximum = -INFINITY, sum = 0;
    for (int e = 0; e < E; e++) { maximum = fmaxf(maximum, logits[e]); }
    for (int e = 0; e < E; e++) { sum += probs[e] = expf(logits[e] - maximum); }
    for (int e = 0; e < E; e++) { probs[e] /= sum; }
    router_lse[n] = maximum + logf(sum);
}

// A thread owns a token, a block 128: the loops of cpu::topk_forward. Bound by latency: K times E loads, one after the
// other.
__global__ void router_topk_kernel1(int* router_indices, float* router_weights, const float* router_probs,
                                    const int* forced, size_t N, int E, int K, bool norm_topk_prob) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const float* probs = router_probs + n * E;
    int* chosen = router_indices + n * K;
    float sum = 0;
    for (int k = 0; k < K; k++) {
        int best = forced != NULL ? forced[n * K + k] : -1;
        for (int e = 0; e < E && forced == NULL; e++) {
            bool taken = false;
            for (int j = 0; j < k; j++) { taken |= chosen[j] == e; }
            if (!taken && (best < 0 || probs[e] > probs[best])) { best = e; }
        }
        chosen[k] = best;
        router_weights[n * K + k] = probs[best];
        sum += probs[best];
    }
    for (int k = 0; k < K && norm_topk_prob; k++) { router_weights[n * K + k] /= sum; }
}

// A thread owns an element of d_router, over all tokens: neighbouring lanes have neighbouring columns, so reads are
// whole lines, but inp is read E times and only E*C threads share the work.
__global__ void router_backward_weight_kernel1(float* d_router, const float* d_router_logits, const bf16* inp, size_t N,
                                               size_t C, int E) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= E * C) { return; }
    size_t e = i / C, c = i % C;
    float sum = 0;
    for (size_t n = 0; n < N; n++) { sum += d_router_logits[n * E + e] * __bfloat162float(inp[n * C + c]); }
    d_router[i] += sum;
}

// ---- train_moe.cu has from here
const int ROUTER_MAX_EXPERTS = 1024;
const int ROUTER_TILES = 16; // tiles of 8 experts whose logits a warp keeps in registers at once
const int ROUTER_AHEAD = 2;  // steps of 32 columns that are loaded before the first is used

// elements from a staged row of the router to the next: 64 bytes more than a multiple of 128, so that the two rows
// which eight lanes read together lie in different banks
__host__ __device__ inline size_t router_staged_stride(size_t C) { return (C + 31) / 64 * 64 + 32; }

// logits (N,E) = of the 16 tokens from first_token on, by one warp: mma of 16 tokens x 8 experts x 16 columns. The sum
// runs over the columns in any order that both operands share, so a lane takes the 8 columns that one 16-byte load
// brings: lane 4r+q holds columns 8q..8q+7 of each 32 for tokens r and r+8 and for expert r of a tile, which is its
// part of two mma. Nothing needs to be rearranged.
__device__ inline void router_logits_of_warp(float* logits, const bf16* inp, const bf16* router, size_t router_stride,
                                             size_t first_token, size_t N, size_t C, int E) {
    int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    size_t n0 = first_token + row, n1 = n0 + 8;
    uint4 zero = make_uint4(0, 0, 0, 0);
    for (int first_expert = 0; first_expert < E; first_expert += 8 * ROUTER_TILES) {
        float sums[ROUTER_TILES][4] = {};
        for (size_t first_column = 8 * quad; first_column < C + 8 * quad; first_column += 32 * ROUTER_AHEAD) {
            uint4 x0[ROUTER_AHEAD], x1[ROUTER_AHEAD];
            #pragma unroll
            for (int i = 0; i < ROUTER_AHEAD; i++) {
                size_t c = first_column + 32 * i;
                x0[i] = c < C && n0 < N ? load16(inp + n0 * C + c) : zero;
                x1[i] = c < C && n1 < N ? load16(inp + n1 * C + c) : zero;
            }
            #pragma unroll
            for (int i = 0; i < ROUTER_AHEAD; i++) {
                size_t c = first_column + 32 * i;
                uint32_t a_low[4] = {x0[i].x, x1[i].x, x0[i].y, x1[i].y};
                uint32_t a_high[4] = {x0[i].z, x1[i].z, x0[i].w, x1[i].w};
                #pragma unroll
                for (int tile = 0; tile < ROUTER_TILES; tile++) {
                    if (first_expert + 8 * tile >= E) { break; }
                    int e = first_expert + 8 * tile + row;
                    uint4 w = c < C && e < E ? load16(router + e * router_stride + c) : zero;
                    uint32_t b_low[2] = {w.x, w.y}, b_high[2] = {w.z, w.w};
                    mma16816(sums[tile], a_low, b_low);
                    mma16816(sums[tile], a_high, b_high);
                }
            }
        }
        #pragma unroll
        for (int tile = 0; tile < ROUTER_TILES; tile++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) { // element i of a tile: token r + 8 (i/2), expert 2q + i%2
                size_t n = i < 2 ? n0 : n1;
                int e = first_expert + 8 * tile + 2 * quad + i % 2;
                if (n < N && e < E) { logits[n * E + e] = sums[tile][i]; }
            }
        }
    }
}

// Softmax and choice for token n by four lanes, n the same for them: lane q owns experts q, q+4, ... router_probs holds
// the logits on entry, the probabilities on return; router_logits (or NULL) gets a copy of the logits.
__device__ inline void router_choose(float* router_logits, float* router_probs, float* router_lse, int* router_indices,
                                     float* router_weights, const int* forced, size_t n, size_t N, int E, int K,
                                     bool norm_topk_prob) {
    int quad = threadIdx.x % 4;
    bool inside = n < N;
    int experts = inside ? E : 0; // a token past the last one has no experts, but its lanes take part in the shuffles
    float* probs = router_probs + n * E;
    float maximum = -INFINITY, sum = 0;
    for (int e = quad; e < experts; e += 4) {
        if (router_logits != NULL) { router_logits[n * E + e] = probs[e]; }
        maximum = fmaxf(maximum, probs[e]);
    }
    maximum = warp_max(maximum, 4);
    for (int e = quad; e < experts; e += 4) {
        float p = expf(probs[e] - maximum);
        probs[e] = p;
        sum += p;
    }
    sum = warp_sum(sum, 4);
    float inverse = 1 / sum;
    for (int e = quad; e < experts; e += 4) { probs[e] *= inverse; }
    __syncwarp(); // the first lane reads the chosen probabilities, which all four have written
    // Each round takes the largest key below the last one. A key has a probability's bits (it is not negative, so their
    // order is its own), then the expert's number inverted: ties go to the lower index. A NaN counts as 0 (fmaxf
    // returns the other), so there are always E different keys.
    unsigned long long key = ~0ull;
    float chosen_sum = 0;
    for (int k = 0; k < K; k++) {
        unsigned long long last = key;
        key = 0;
        for (int e = quad; e < experts && forced == NULL; e += 4) {
            unsigned long long next = (unsigned long long)__float_as_uint(fmaxf(probs[e], 0)) << 32 | ~(unsigned)e;
            if (next < last && next > key) { key = next; }
        }
        key = warp_max(key, 4);
        if (inside && quad == 0) {
            int e = forced != NULL ? forced[n * K + k] : (int)~(unsigned)key;
            router_indices[n * K + k] = e;
            router_weights[n * K + k] = probs[e];
            chosen_sum += probs[e];
        }
    }
    if (inside && quad == 0) {
        router_lse[n] = maximum + logf(sum);
        for (int k = 0; k < K && norm_topk_prob; k++) { router_weights[n * K + k] /= chosen_sum; }
    }
}

// A block owns 64 tokens, each of its 4 warps 16. Bound by the bandwidth of reading inp once: the router's rows are
// read for 16 tokens at a time, from shared memory where they fit (29 KiB for 16 experts of 896), else through L1;
// softmax and choice are a few dozen instructions on logits that are still in L1, for four lanes a token, eight tokens
// at once.
__global__ void __launch_bounds__(128)
router_forward_kernel3(float* router_logits, float* router_probs, float* router_lse, int* router_indices,
                       float* router_weights, const int* forced, const bf16* inp, const bf16* router, size_t N,
                       size_t C, int E, int K, bool norm_topk_prob, bool staged) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bf16* rows = router;
    size_t stride = C;
    if (staged) {
        stride = router_staged_stride(C);
        for (int e = warp; e < E; e += 4) {
            for (size_t c = 8 * lane; c < C; c += 256) {
                cpa16((bf16*)shared_bytes + e * stride + c, router + e * C + c);
            }
        }
        cpa_commit();
        cpa_wait<0>();
        __syncthreads(); // the rows that the other warps copied are there
        rows = (const bf16*)shared_bytes;
    }
    size_t first = ((size_t)blockIdx.x * 4 + warp) * 16;
    router_logits_of_warp(router_probs, inp, rows, stride, first, N, C, E);
    __syncwarp(); // a token's logits were written by the lanes that had them in their tiles
    for (int half = 0; half < 2; half++) {
        router_choose(router_logits, router_probs, router_lse, router_indices, router_weights, forced,
                      first + 8 * half + lane / 4, N, E, K, norm_topk_prob);
    }
}

void router_check(const char* op, size_t C, int E, int K) {
    if (E < 1 || E > ROUTER_MAX_EXPERTS) { fatal("%s: experts must be 1 to %d, is %d", op, ROUTER_MAX_EXPERTS, E); }
    if (K < 1 || K > E) { fatal("%s: experts per token must be 1 to %d, is %d", op, E, K); }
    if (C % 8 != 0) { fatal("%s: C must be a multiple of 8, is %zu", op, C); }
}

void router_forward(float* router_logits, float* router_probs, float* router_lse, int* router_indices,
                    float* router_weights, const int* forced, const bf16* inp, const bf16* router, size_t N, size_t C,
                    int E, int K, bool norm_topk_prob, cudaStream_t stream) {
    // router_logits (N,E) = (NULL: not wanted), router_probs (N,E) =, router_lse (N) =, router_indices (N,K) = the K
    // most probable, ties to the lower index, or forced (N,K); router_weights (N,K) =, of inp (N,C) and router (E,C)
    router_check("router_forward", C, E, K);
    if (N == 0) { return; }
    size_t bytes = E * router_staged_stride(C) * sizeof(bf16);
    bool staged = bytes <= 48 * 1024;
    router_forward_kernel3<<<ceil_div(N, 64), 128, staged ? bytes : 0, stream>>>(
        router_logits, router_probs, router_lse, router_indices, router_weights, forced, inp, router, N, C, E, K,
        norm_topk_prob, staged);
    launchCheck("router_forward_kernel3");
}

// What a layer adds to the statistics. A block owns an expert, the last block the z-loss; a thread adds every 1024th
// token in double. Bound by latency: an expert's probabilities lie E floats apart, so that a block takes 4 of each 32
// bytes it reads, some 20 MB of L2's traffic for 32768 tokens and 16 experts, but they were written just before.
__global__ void __launch_bounds__(1024)
router_stats_kernel1(double* prob_sum, double* entropy, double* z_sum, const float* router_probs,
                     const float* router_lse, const int* targets, size_t N, int E) {
    __shared__ double warp_sums[32];
    int e = blockIdx.x;
    double sum = 0, entropy_sum = 0;
    for (size_t n = threadIdx.x; n < N; n += 1024) {
        if (e < E) {
            float p = router_probs[n * E + e];
            sum += p;
            if (p != 0) { entropy_sum -= p * logf(p); } // a NaN goes on
        } else if (targets[n] >= 0) {
            sum += router_lse[n] * router_lse[n];
        }
    }
    sum = block_sum(sum, warp_sums);
    entropy_sum = block_sum(entropy_sum, warp_sums);
    if (threadIdx.x > 0) { return; }
    if (e == E) {
        *z_sum += sum;
    } else {
        prob_sum[e] += sum;
        entropy[e] += entropy_sum;
    }
}

void router_stats_add(double* prob_sum, double* entropy, double* z_sum, const float* router_probs,
                      const float* router_lse, const int* targets, size_t N, int E, cudaStream_t stream) {
    // of a layer's tokens: prob_sum (E) += router_probs (N,E), entropy (E) += -p ln p of them, for the log;
    // z_sum (1) += router_lse (N) squared where the target counts
    if (N == 0) { return; }
    router_stats_kernel1<<<E + 1, 1024, 0, stream>>>(prob_sum, entropy, z_sum, router_probs, router_lse, targets, N, E);
    launchCheck("router_stats_kernel1");
}

// One block owns everything, a thread each 256th expert: f_e = its slots over rows, P_e = prob_sum over rows. Too
// small to be bound by anything but its launch.
__global__ void __launch_bounds__(256)
load_balancing_loss_kernel1(float* expert_share, double* aux_loss, double* load, const double* prob_sum,
                            const int* tokens_per_expert, double share, double rows, int L, int E) {
    __shared__ double warp_sums[32];
    double sum = 0;
    for (int e = threadIdx.x; e < E; e += 256) {
        double slots = 0;
        for (size_t i = e; i < (size_t)L * E; i += E) {
            load[i] += tokens_per_expert[i];
            slots += tokens_per_expert[i];
        }
        expert_share[e] = (float)(slots / rows);
        sum += slots / rows * (prob_sum[e] / rows);
    }
    sum = block_sum(sum, warp_sums);
    if (threadIdx.x == 0) { *aux_loss += share * E * sum; }
}

void load_balancing_loss(float* expert_share, double* aux_loss, double* load, const double* prob_sum,
                         const int* tokens_per_expert, double share, size_t rows, int L, int E, cudaStream_t stream) {
    // of a microbatch: expert_share (E) = f_e, the slots of expert e in all layers over rows = MoE layers * N;
    // aux_loss (1) += share * E * sum over e of f_e P_e; load (L,E) += tokens_per_expert (L,E), 0 in dense layers
    double any_rows = rows > 0 ? (double)rows : 1; // without an MoE layer all sums are 0
    load_balancing_loss_kernel1<<<1, 256, 0, stream>>>(expert_share, aux_loss, load, prob_sum, tokens_per_expert, share,
                                                       any_rows, L, E);
    launchCheck("load_balancing_loss_kernel1");
}

// d_router_weights of one slot: the parts that the experts' backward left for its row, in order
__device__ inline float router_weight_gradient(const float* partials, int num_partials, size_t R, int row) {
    float sum = 0;
    for (int i = 0; i < num_partials; i++) { sum += partials[i * R + row]; }
    return sum;
}

// Four lanes own a token: lane q experts q, q+4, ... Every lane goes through all K slots, so that the sum over them
// needs no exchange, and adds what concerns its own experts. Bound by latency: some 10 MB for 32768 tokens and 16
// experts.
__global__ void __launch_bounds__(128)
router_backward_kernel1(float* d_router_logits, const float* partials, int num_partials, const int* slot_row,
                        const float* router_probs, const float* router_lse, const int* router_indices,
                        const float* router_weights, const int* targets, const float* expert_share,
                        float load_balancing_scale, float z_scale, size_t N, int E, int K, bool norm_topk_prob) {
    size_t n = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 4, R = N * K;
    int quad = threadIdx.x % 4;
    int experts = n < N ? E : 0, slots = n < N ? K : 0; // past the last token: nothing, but part of the shuffles
    const float *probs = router_probs + n * E, *weights = router_weights + n * K;
    const int *chosen = router_indices + n * K, *rows = slot_row + n * K;
    float* d_p = d_router_logits + n * E; // the gradient of the probabilities until the last loop
    for (int e = quad; e < experts; e += 4) { d_p[e] = load_balancing_scale * expert_share[e]; }
    float dot = 0, sum = 0;
    for (int k = 0; k < slots; k++) {
        dot += router_weight_gradient(partials, num_partials, R, rows[k]) * weights[k];
        sum += probs[chosen[k]];
    }
    for (int k = 0; k < slots; k++) {
        if (chosen[k] % 4 != quad) { continue; }
        float d_w = router_weight_gradient(partials, num_partials, R, rows[k]);
        d_p[chosen[k]] += norm_topk_prob ? (d_w - dot) / sum : d_w; // K = 1: the weight is 1, so this is exactly 0
    }
    float mean = 0;
    for (int e = quad; e < experts; e += 4) { mean += d_p[e] * probs[e]; }
    mean = warp_sum(mean, 4);
    float d_lse = n < N && targets[n] >= 0 ? 2 * z_scale * router_lse[n] : 0;
    for (int e = quad; e < experts; e += 4) { d_p[e] = probs[e] * (d_p[e] - mean + d_lse); }
}

void router_backward(float* d_router_logits, const float* partials, int num_partials, const int* slot_row,
                     const float* router_probs, const float* router_lse, const int* router_indices,
                     const float* router_weights, const int* targets, const float* expert_share,
                     float load_balancing_scale, float z_scale, size_t N, int E, int K, bool norm_topk_prob,
                     cudaStream_t stream) {
    // d_router_logits (N,E) = through renormalisation and softmax, with the balance loss (on all probabilities) and the
    // z-loss (on tokens with a counted target). The gradient of the weight of a slot is the sum of
    // partials[i, slot_row[slot]] over i < num_partials; partials is (num_partials, R).
    router_check("router_backward", 0, E, K);
    if (N == 0) { return; }
    router_backward_kernel1<<<ceil_div(N, 32), 128, 0, stream>>>(
        d_router_logits, partials, num_partials, slot_row, router_probs, router_lse, router_indices, router_weights,
        targets, expert_share, load_balancing_scale, z_scale, N, E, K, norm_topk_prob);
    launchCheck("router_backward_kernel1");
}

const int ROUTER_COLUMNS = 128, ROUTER_EXPERTS = 16, ROUTER_TOKENS = 64; // of a block of the weight gradient, a step

// A block owns 16 experts x 128 columns of one split of the tokens; a lane 4 columns, a warp each fourth token. 64 sums
// a thread make 64 multiply-adds of 8 bytes of inp and four 16-byte reads of shared memory, so that reading inp (once
// for each 16 experts) is the bound.
__global__ void __launch_bounds__(128)
router_backward_weight_kernel2(float* partials, const float* d_router_logits, const bf16* inp, size_t N, size_t C,
                               int E, size_t tokens_per_split) {
    __shared__ float d_logits[ROUTER_TOKENS][ROUTER_EXPERTS];
    __shared__ float totals[ROUTER_EXPERTS][ROUTER_COLUMNS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_expert = blockIdx.y * ROUTER_EXPERTS;
    size_t c = (size_t)blockIdx.x * ROUTER_COLUMNS + 4 * lane, begin = blockIdx.z * tokens_per_split;
    size_t end = begin + tokens_per_split < N ? begin + tokens_per_split : N;
    float sums[ROUTER_EXPERTS][4] = {};
    for (size_t first = begin; first < end; first += ROUTER_TOKENS) {
        __syncthreads(); // all have used the gradients of the step before
        for (int i = threadIdx.x; i < ROUTER_TOKENS * ROUTER_EXPERTS; i += 128) {
            size_t n = first + i / ROUTER_EXPERTS;
            int e = first_expert + i % ROUTER_EXPERTS;
            d_logits[i / ROUTER_EXPERTS][i % ROUTER_EXPERTS] = n < end && e < E ? d_router_logits[n * E + e] : 0;
        }
        __syncthreads(); // the gradients of this step are there
        #pragma unroll 4
        for (int i = warp; i < ROUTER_TOKENS; i += 4) {
            float x[4] = {};
            if (first + i < end && c < C) { load4(x, inp + (first + i) * C + c); }
            #pragma unroll
            for (int e = 0; e < ROUTER_EXPERTS; e++) {
                #pragma unroll
                for (int j = 0; j < 4; j++) { sums[e][j] += d_logits[i][e] * x[j]; }
            }
        }
    }
    for (int turn = 0; turn < 4; turn++) { // the warps add their sums one after the other
        #pragma unroll
        for (int i = 0; i < ROUTER_EXPERTS * 4 && turn == warp; i++) {
            float* total = &totals[i / 4][4 * lane + i % 4];
            *total = turn == 0 ? sums[i / 4][i % 4] : *total + sums[i / 4][i % 4];
        }
        __syncthreads(); // the sums up to this warp's are there
    }
    for (int i = threadIdx.x; i < ROUTER_EXPERTS * ROUTER_COLUMNS; i += 128) {
        size_t e = first_expert + i / ROUTER_COLUMNS, column = (size_t)blockIdx.x * ROUTER_COLUMNS + i % ROUTER_COLUMNS;
        if (e < (size_t)E && column < C) {
            partials[(blockIdx.z * (size_t)E + e) * C + column] = totals[i / ROUTER_COLUMNS][i % ROUTER_COLUMNS];
        }
    }
}

// into how many splits the tokens go at most: about 1024 blocks fill a GPU, more only add partial sums
size_t router_splits(size_t C, int E) {
    size_t tiles = ceil_div(C, ROUTER_COLUMNS) * ceil_div(E, ROUTER_EXPERTS), splits = ceil_div(1024, tiles);
    return splits < 128 ? splits : 128;
}

size_t router_partials_floats(size_t C, int E) { return router_splits(C, E) * E * C; }

void router_backward_weight(float* d_router, const float* d_router_logits, const bf16* inp, float* partials, size_t N,
                            size_t C, int E, cudaStream_t stream) {
    // d_router (E,C) += d_router_logits (N,E)^T inp (N,C); partials (router_partials_floats(C,E)) is scratch
    router_check("router_backward_weight", C, E, 1);
    if (N == 0 || C == 0) { return; }
    size_t tokens_per_split = ceil_div(ceil_div(N, router_splits(C, E)), ROUTER_TOKENS) * ROUTER_TOKENS;
    int splits = (int)ceil_div(N, tokens_per_split);
    dim3 grid(ceil_div(C, ROUTER_COLUMNS), ceil_div(E, ROUTER_EXPERTS), splits);
    router_backward_weight_kernel2<<<grid, 128, 0, stream>>>(partials, d_router_logits, inp, N, C, E, tokens_per_split);
    launchCheck("router_backward_weight_kernel2");
    norm_weight_reduce(d_router, partials, splits, E * C, E * C, stream); // adds the splits, as a norm's blocks
}

// ---- train_moe.cu has up to here

// ----------------------------------------------------------------------------
// second rung: one kernel. A warp owns 8 tokens, one after the other: a lane reads 16 bytes of the token's row and of
// each expert's, the logit is the sum over the warp. Then four lanes choose for each of the 8 tokens, as in kernel 3.
// The router's rows come through L1 for every token, which is E times the reads of inp: that is what kernel 3 takes
// away.
__global__ void __launch_bounds__(128)
router_forward_kernel2(float* router_logits, float* router_probs, float* router_lse, int* router_indices,
                       float* router_weights, const int* forced, const bf16* inp, const bf16* router, size_t N,
                       size_t C, int E, int K, bool norm_topk_prob) {
    int lane = threadIdx.x % 32;
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32 * 8;
    for (size_t n = first; n < first + 8 && n < N; n++) {
        for (int e = 0; e < E; e++) {
            float sum = 0;
            for (size_t c = 8 * lane; c < C; c += 256) {
                float x[8], w[8];
                load8(x, inp + n * C + c);
                load8(w, router + e * C + c);
                #pragma unroll
                for (int i = 0; i < 8; i++) { sum += x[i] * w[i]; }
            }
            sum = warp_sum(sum);
            if (lane == 0) { router_probs[n * E + e] = sum; }
        }
    }
    __syncwarp(); // the logits, written by the first lane
    router_choose(router_logits, router_probs, router_lse, router_indices, router_weights, forced, first + lane / 4, N,
                  E, K, norm_topk_prob);
}

// ----------------------------------------------------------------------------
// launchers of all rungs

void run_forward(int kernel, float* router_logits, float* router_probs, float* router_lse, int* router_indices,
                 float* router_weights, const int* forced, const bf16* inp, const bf16* router, size_t N, size_t C,
                 int E, int K, bool norm_topk_prob) {
    if (kernel == 3) {
        router_forward(router_logits, router_probs, router_lse, router_indices, router_weights, forced, inp, router, N,
                       C, E, K, norm_topk_prob, 0);
    } else if (kernel == 2) {
        router_forward_kernel2<<<ceil_div(N, 32), 128>>>(router_logits, router_probs, router_lse, router_indices,
                                                         router_weights, forced, inp, router, N, C, E, K,
                                                         norm_topk_prob);
        launchCheck("router_forward_kernel2");
    } else {
        float* logits = router_logits != NULL ? router_logits : router_probs; // the softmax may be in place
        router_logits_kernel1<<<ceil_div(N * E, 256), 256>>>(logits, inp, router, N, C, E);
        launchCheck("router_logits_kernel1");
        router_softmax_kernel1<<<ceil_div(N, 128), 128>>>(router_probs, router_lse, logits, N, E);
        launchCheck("router_softmax_kernel1");
        router_topk_kernel1<<<ceil_div(N, 128), 128>>>(router_indices, router_weights, router_probs, forced, N, E, K,
                                                       norm_topk_prob);
        launchCheck("router_topk_kernel1");
    }
}

void run_backward_weight(int kernel, float* d_router, const float* d_router_logits, const bf16* inp, float* partials,
                         size_t N, size_t C, int E) {
    if (kernel >= 2) { return router_backward_weight(d_router, d_router_logits, inp, partials, N, C, E, 0); }
    router_backward_weight_kernel1<<<ceil_div(E * C, 256), 256>>>(d_router, d_router_logits, inp, N, C, E);
    launchCheck("router_backward_weight_kernel1");
}

// ----------------------------------------------------------------------------
// checks

struct Forward { // device outputs of one shape
    Device<float> logits, probs, lse, weights;
    Device<int> indices;
    Forward(size_t N, int E, int K) : logits(N * E), probs(N * E), lse(N), weights(N * K), indices(N * K) {}
};

void forward_matches_cpu(int kernel, size_t N, size_t C, int E, int K, bool norm_topk_prob, bool forced) {
    char what[128];
    snprintf(what, sizeof(what), "router_forward %d N %zu C %zu E %d K %d norm %d forced %d", kernel, N, C, E, K,
             norm_topk_prob, forced);
    std::vector<float> inp = random_floats(N * C, 2, 1), router = random_floats(E * C, 0.2f, 2);
    std::vector<int> given(N * K);
    for (size_t i = 0; i < N * K; i++) { given[i] = (int)((i / K * 7 + i % K) % E); }
    Device<bf16> d_inp(to_bf16(inp)), d_router(to_bf16(router));
    Device<int> d_given(given);
    Forward out(N, E, K);
    run_forward(kernel, out.logits, out.probs, out.lse, out.indices, out.weights, forced ? (int*)d_given : NULL, d_inp,
                d_router, N, C, E, K, norm_topk_prob);
    std::vector<float> logits(N * E), probs(N * E), lse(N), weights(N * K);
    std::vector<int> indices(N * K);
    cpu::router_forward(logits.data(), probs.data(), lse.data(), inp.data(), router.data(), N, C, E);
    cpu::topk_forward(indices.data(), weights.data(), probs.data(), forced ? given.data() : NULL, N, E, K,
                      norm_topk_prob);
    check_f32(what, out.logits.get(), logits);
    check_f32(what, out.probs.get(), probs);
    check_f32(what, out.lse.get(), lse);
    std::vector<int> chosen = out.indices.get();
    if (forced) { check_equal(what, chosen, indices); }
    std::vector<float> chosen_probs(N * K, NAN), want_probs(N * K); // of two that are equal up to rounding either will do
    for (size_t i = 0; i < N * K; i++) {
        const float* p = probs.data() + i / K * E;
        if (chosen[i] >= 0 && chosen[i] < E) { chosen_probs[i] = p[chosen[i]]; }
        want_probs[i] = p[indices[i]];
    }
    check_f32(what, chosen_probs, want_probs);
    check_f32(what, out.weights.get(), weights);
    Forward again(N, E, K); // without router_logits: the same bits
    run_forward(kernel, NULL, again.probs, again.lse, again.indices, again.weights, forced ? (int*)d_given : NULL,
                d_inp, d_router, N, C, E, K, norm_topk_prob);
    check_equal(what, again.probs.get(), out.probs.get());
    check_equal(what, again.weights.get(), out.weights.get());
}

void ties_go_to_the_lower_index(int kernel, size_t N, size_t C, int E, int K) {
    // inputs 0 or 1, router rows -1, 0 or 1: every logit is exact in any order of summation, and many are equal
    std::vector<float> inp = random_floats(N * C, 1, 3), router = random_floats(E * C, 1.5f, 4);
    for (float& x : inp) { x = x > 0; }
    for (float& w : router) { w = (float)(int)w; }
    Device<bf16> d_inp(to_bf16(inp)), d_router(to_bf16(router));
    Forward out(N, E, K);
    run_forward(kernel, out.logits, out.probs, out.lse, out.indices, out.weights, NULL, d_inp, d_router, N, C, E, K,
                true);
    std::vector<float> logits(N * E), probs(N * E), lse(N), weights(N * K);
    std::vector<int> indices(N * K);
    cpu::router_forward(logits.data(), probs.data(), lse.data(), inp.data(), router.data(), N, C, E);
    cpu::topk_forward(indices.data(), weights.data(), probs.data(), NULL, N, E, K, true);
    check_f32("ties: logits", out.logits.get(), logits, 0); // 0 or -0
    check_equal("ties: choice", out.indices.get(), indices);
}

void nan_chooses_different_experts(int kernel, size_t N, size_t C, int E, int K) {
    // one NaN in the inputs of every second token, infinities in others: K different experts as on the CPU, nothing
    // hangs
    std::vector<float> inp = random_floats(N * C, 2, 5), router = random_floats(E * C, 0.2f, 6);
    for (size_t n = 0; n < N; n += 2) { inp[n * C + n % C] = n % 4 == 0 ? NAN : INFINITY; }
    Device<bf16> d_inp(to_bf16(inp)), d_router(to_bf16(router));
    Forward out(N, E, K);
    run_forward(kernel, NULL, out.probs, out.lse, out.indices, out.weights, NULL, d_inp, d_router, N, C, E, K, true);
    std::vector<float> logits(N * E), probs(N * E), lse(N), weights(N * K);
    std::vector<int> indices(N * K);
    cpu::router_forward(logits.data(), probs.data(), lse.data(), inp.data(), router.data(), N, C, E);
    cpu::topk_forward(indices.data(), weights.data(), probs.data(), NULL, N, E, K, true);
    check_equal("NaN: choice", out.indices.get(), indices);
    std::vector<float> got = out.weights.get();
    check_result(std::isnan(got[0]) && std::isfinite(got[K]), "NaN: weights",
                 "a NaN must show in the weights of its token only");
}

// A layer's routing from random probabilities, as the forward pass leaves it, and random gradients
struct Layer {
    size_t N;
    int E, K, P; // P partial sums of each weight's gradient
    std::vector<float> probs, lse, weights, partials, d_weights, expert_share;
    std::vector<int> indices, targets, tokens, offsets, order, row_slot, slot_row;
    Layer(size_t N, int E, int K, int P, bool norm_topk_prob)
        : N(N), E(E), K(K), P(P), probs(random_floats(N * E, 3, 7)), lse(N), weights(N * K),
          partials(random_floats(P * N * K, 1, 8)), d_weights(N * K), expert_share(E), indices(N * K), targets(N),
          tokens(E), offsets(E + 1), order(E), row_slot(N * K), slot_row(N * K) {
        for (size_t n = 0; n < N; n++) {
            cpu::softmax_row(probs.data() + n * E, lse.data() + n, 0, 0, E, E, 1);
            targets[n] = n % 3 == 1 ? -100 : (int)n;
        }
        cpu::topk_forward(indices.data(), weights.data(), probs.data(), NULL, N, E, K, norm_topk_prob);
        cpu::route_rows(tokens.data(), offsets.data(), order.data(), row_slot.data(), slot_row.data(), indices.data(),
                        N, E, K);
        for (size_t slot = 0; slot < N * K; slot++) {
            for (int i = 0; i < P; i++) { d_weights[slot] += partials[i * N * K + slot_row[slot]]; }
        }
        for (int e = 0; e < E; e++) { expert_share[e] = (float)tokens[e] / N; }
    }
};

void backward_matches_cpu(size_t N, int E, int K, int P, bool norm_topk_prob, float balance, float z) {
    char what[128];
    snprintf(what, sizeof(what), "router_backward N %zu E %d K %d P %d norm %d balance %g z %g", N, E, K, P,
             norm_topk_prob, balance, z);
    Layer l(N, E, K, P, norm_topk_prob);
    Device<float> d_logits(N * E), partials(l.partials), probs(l.probs), lse(l.lse), weights(l.weights),
        share(l.expert_share);
    Device<int> slot_row(l.slot_row), indices(l.indices), targets(l.targets);
    router_backward(d_logits, partials, P, slot_row, probs, lse, indices, weights, targets, share, balance, z, N, E, K,
                    norm_topk_prob, 0);
    std::vector<double> share_double(l.expert_share.begin(), l.expert_share.end());
    cpu::RouterLossScale scale = {balance, z, share_double.data()};
    std::vector<float> want(N * E);
    cpu::router_backward(want.data(), l.d_weights.data(), l.probs.data(), l.lse.data(), l.indices.data(),
                         l.weights.data(), l.targets.data(), scale, N, E, K, norm_topk_prob);
    check_f32(what, d_logits.get(), want);
    if (K == 1 && norm_topk_prob && balance == 0 && z == 0) { // the only weight is always 1
        std::vector<float> got = d_logits.get();
        for (float& x : got) { x = fabsf(x); } // 0 and -0
        check_equal("router_backward of one renormalised expert is 0", got, std::vector<float>(N * E, 0.0f));
    }
}

void stats_match_cpu(size_t N, int E, int K) {
    // two MoE layers around a dense one, then the same microbatch again with another share: what a step adds up
    char what[128];
    snprintf(what, sizeof(what), "router_stats_add and load_balancing_loss N %zu E %d K %d", N, E, K);
    const int L = 3, microbatches = 2;
    const double shares[microbatches] = {0.5, 0.25};
    std::vector<double> count(E), cpu_prob_sum(E), share(E), start(L * E, 0.5);
    std::vector<int> counted(L * E, 0);
    Device<double> aux_loss(std::vector<double>(1, 0.5)), z_sum(std::vector<double>(1, 0.0)), load(start);
    Device<double> prob_sum(E), entropy(std::vector<double>(L * E, 0.0));
    Device<float> expert_share(E);
    double cpu_entropy = 0, cpu_aux_loss = 0.5, cpu_z_sum = 0;
    for (int microbatch = 0; microbatch < microbatches; microbatch++) {
        std::fill(count.begin(), count.end(), 0.0);
        std::fill(cpu_prob_sum.begin(), cpu_prob_sum.end(), 0.0);
        cpu::RouterStats cpu_stats = {count.data(), cpu_prob_sum.data(), 0, 0};
        prob_sum.set(std::vector<double>(E, 0.0));
        for (int layer = 0; layer < L; layer += 2) {
            Layer l(N, E, K, 1, layer == 0);
            for (float& x : l.lse) { x += layer; }
            for (int e = 0; e < E; e++) { counted[layer * E + e] = l.tokens[e]; }
            Device<float> probs(l.probs), lse(l.lse);
            Device<int> targets(l.targets);
            router_stats_add(prob_sum, entropy + layer * E, z_sum, probs, lse, targets, N, E, 0);
            std::vector<float> logits(l.probs); // with the probabilities as they are, whatever their lse is
            std::vector<float> zero_lse(N, 0.0f);
            for (float& x : logits) { x = x > 0 ? logf(x) : 0.0f; }
            cpu_entropy += cpu::router_entropy(logits.data(), l.probs.data(), zero_lse.data(), N, E);
            cpu::router_stats_add(&cpu_stats, l.probs.data(), l.lse.data(), l.tokens.data(), l.targets.data(), N, E);
        }
        Device<int> tokens(counted);
        load_balancing_loss(expert_share, aux_loss, load, prob_sum, tokens, shares[microbatch], 2 * N, L, E, 0);
        cpu_aux_loss += shares[microbatch] * cpu::load_balancing_loss(&cpu_stats, share.data(), E);
        cpu_z_sum += cpu_stats.z_sum;
        for (int i = 0; i < L * E; i++) { start[i] += counted[i]; }
        std::vector<double> got = prob_sum.get();
        check_f32(what, std::vector<float>(got.begin(), got.end()),
                  std::vector<float>(cpu_prob_sum.begin(), cpu_prob_sum.end()), 1e-6);
        check_f32(what, expert_share.get(), std::vector<float>(share.begin(), share.end()), 1e-6);
    }
    check_equal("the experts' load", load.get(), start);
    check_f32(what, {(float)aux_loss.get()[0], (float)z_sum.get()[0]}, {(float)cpu_aux_loss, (float)cpu_z_sum}, 1e-6);
    double sum = 0;
    for (double x : entropy.get()) { sum += x; }
    check_f32("the router's entropy", {(float)sum}, {(float)cpu_entropy}, 1e-5);
}

void without_moe_layers_the_loss_is_0(int E) {
    Device<double> aux_loss(std::vector<double>(1, 0.0)), load(std::vector<double>(E, 0.0));
    Device<double> prob_sum(std::vector<double>(E, 0.0));
    Device<int> tokens(std::vector<int>(E, 0));
    Device<float> expert_share(E);
    load_balancing_loss(expert_share, aux_loss, load, prob_sum, tokens, 1, 0, 1, E, 0);
    check_equal("the loss without MoE layers", aux_loss.get(), {0.0});
    check_equal("the shares without MoE layers", expert_share.get(), std::vector<float>(E, 0.0f));
}

void weight_gradient_matches_cpu(int kernel, size_t N, size_t C, int E) {
    char what[128];
    snprintf(what, sizeof(what), "router_backward_weight %d N %zu C %zu E %d", kernel, N, C, E);
    std::vector<float> d_logits = random_floats(N * E, 1, 9), inp = random_floats(N * C, 2, 10);
    std::vector<float> before = random_floats(E * C, 1, 11), want = before;
    Device<float> d_router(before), d_out(d_logits), partials(router_partials_floats(C, E));
    Device<bf16> d_inp(to_bf16(inp));
    run_backward_weight(kernel, d_router, d_out, d_inp, partials, N, C, E);
    const size_t part = 32; // columns of which a thread keeps the sums while it goes down the rows
    #pragma omp parallel for
    for (size_t begin = 0; begin < C; begin += part) {
        size_t columns = std::min(part, C - begin);
        std::vector<double> sums(E * part, 0.0);
        for (size_t n = 0; n < N; n++) {
            for (int e = 0; e < E; e++) {
                double d = d_logits[n * E + e];
                for (size_t c = 0; c < columns; c++) { sums[e * part + c] += d * inp[n * C + begin + c]; }
            }
        }
        for (int e = 0; e < E; e++) {
            for (size_t c = 0; c < columns; c++) {
                size_t i = e * C + begin + c;
                want[i] = (float)(before[i] + sums[e * part + c]);
            }
        }
    }
    check_f32(what, d_router.get(), want);
}

void check_forward(int kernel) {
    const size_t shapes[][4] = {{1, 8, 1, 1},     {17, 48, 3, 2}, {65, 72, 6, 6},  {10, 896, 16, 2}, {40, 48, 33, 33},
                                {33, 72, 128, 8}, {64, 8, 16, 4}, {3, 8, 1024, 3}, {5, 1000, 16, 1}, {2, 1608, 20, 2}};
    for (const size_t* s : shapes) {
        for (int mode = 0; mode < 2; mode++) {
            forward_matches_cpu(kernel, s[0], s[1], (int)s[2], (int)s[3], mode == 0, mode == 1 && s[2] != 1024);
        }
    }
    forward_matches_cpu(kernel, 20, 48, 16, 4, false, false);
    ties_go_to_the_lower_index(kernel, 50, 16, 16, 5);
    ties_go_to_the_lower_index(kernel, 9, 8, 130, 130);
    nan_chooses_different_experts(kernel, 20, 48, 16, 4);
    nan_chooses_different_experts(kernel, 5, 8, 33, 33);
}

void check_backward(int kernel) {
    without_moe_layers_the_loss_is_0(6);
    const size_t shapes[][4] = {{1, 1, 1, 1},    {17, 3, 2, 2},   {50, 6, 6, 1},
                                {100, 16, 2, 8}, {33, 33, 33, 3}, {40, 128, 8, 4}};
    for (const size_t* s : shapes) {
        for (int mode = 0; mode < 4; mode++) {
            float balance = mode & 1 ? 0.01f : 0, z = mode & 2 ? 0.001f : 0;
            backward_matches_cpu(s[0], (int)s[1], (int)s[2], (int)s[3], mode != 1, balance, z);
            backward_matches_cpu(s[0], (int)s[1], 1, (int)s[3], mode != 1, balance, z);
        }
        stats_match_cpu(s[0], (int)s[1], (int)s[2]);
    }
    stats_match_cpu(3000, 6, 2);
    const size_t weights[][3] = {{1, 8, 1}, {17, 48, 3}, {200, 72, 6}, {70, 896, 16}, {130, 136, 33},
                                 {8300, 8, 3}}; // the last: more than one step a split
    for (const size_t* s : weights) { weight_gradient_matches_cpu(kernel, s[0], s[1], (int)s[2]); }
}

void check_all(int kernel) {
    check_forward(kernel);
    check_backward(kernel);
    const size_t N = smol_500m_tokens(kernel);
    forward_matches_cpu(kernel, N, 896, 16, 2, true, false);
    backward_matches_cpu(N, 16, 2, 8, true, 0.001f, 0.001f);
    stats_match_cpu(N, 16, 2);
    weight_gradient_matches_cpu(kernel, N, 896, 16);
}

void bench_all(int kernel) {
    const size_t N = 8 * 4096, C = 896;
    const int E = 16, K = 2, P = 8;
    Layer l(N, E, K, P, true);
    Device<bf16> inp(to_bf16(random_floats(N * C, 2, 1))), router(to_bf16(random_floats(E * C, 0.2f, 2)));
    Forward out(N, E, K);
    double flops = 2.0 * N * C * E, bytes = 2.0 * N * C + 4.0 * N * (E + 2 * K + 1);
    bench("router_forward", kernel, bytes, flops, [&] {
        run_forward(kernel, NULL, out.probs, out.lse, out.indices, out.weights, NULL, inp, router, N, C, E, K, true);
    });
    Device<float> d_logits(N * E), partials(l.partials), share(l.expert_share),
        d_router(std::vector<float>(E * C, 0.0f)), weight_partials(router_partials_floats(C, E));
    Device<int> slot_row(l.slot_row), targets(l.targets);
    Device<double> prob_sum(std::vector<double>(E, 0.0)), entropy(std::vector<double>(E, 0.0));
    Device<double> z_sum(std::vector<double>(1, 0.0));
    bench("router_backward_weight", kernel, 2.0 * N * C + 4.0 * N * E, flops,
          [&] { run_backward_weight(kernel, d_router, d_logits, inp, weight_partials, N, C, E); });
    if (kernel != 1) { return; } // the rest has one version
    bench("router_backward", 4.0 * N * (2 * E + K * (P + 3) + 2), 0, [&] {
        router_backward(d_logits, partials, P, slot_row, out.probs, out.lse, out.indices, out.weights, targets, share,
                        0.01f, 0.001f, N, E, K, true, 0);
    });
    bench("router_stats_add", 4.0 * N * (E + 2), 0,
          [&] { router_stats_add(prob_sum, entropy, z_sum, out.probs, out.lse, targets, N, E, 0); });
}

int main(int argc, char** argv) {
    dev_open(argc, argv, NUM_KERNELS);
    for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    return dev_close();
}
