/*
train_moe.cu: a Qwen3-style mixture-of-experts language model, trained on NVIDIA GPUs, in one file of CUDA C.

It computes what train_moe_cpu.c computes, in the same order under the same names, so the two can be read side by side:
there an op is a loop, here it is a kernel and the launcher that starts it. Every kernel this program runs stands in
this file, forward beside backward, in the order of the network; only plain matrix products (cuBLASLt), the all-reduce
(NCCL) and, if asked for, cuDNN's attention come from libraries. dev/cuda has the history of each kernel, from the
obvious port to the one used here, with its check against the CPU and its benchmark.
The same file builds for the CPU (dev/emu, `make train_moe_emu`): that is how it is tested where there is no GPU. No GPU
has run it yet: what is said of a kernel's speed and of what bounds it is worked out from counts, not measured.

Letters.  B T     batch, sequence length; N = B*T tokens, token n is position n%T of row n/T
          C L V   hidden size, layers, vocabulary
          NH NKV HD   query heads, key/value heads, head size;  A = NH*HD, KV = NKV*HD, QKV = A + 2*KV
          E K F   experts, experts per token, expert hidden size;  R = N*K rows after routing
          A slot is a pair (n,k); a row is the place of a slot in the buffers that are sorted by expert.

Padding.  Kernels read 16 bytes at a time, so on the device C, F and V are rounded up to a multiple of 8 and the rest of
          a row is zeros. That is exact: weights, activations and gradients of the padding are zero and stay so. Where
          the true size matters it stands beside: hidden_size in the mean of a norm, vocab_size in a softmax. Files and
          dumps are not padded.

Numbers.  Weights and activations are bf16, sums are fp32: inside every product, in softmax, norms, router, losses, and
          in the gradients of the weights. AdamW updates fp32 master weights and rounds them to bf16 (--master 0: no
          masters, the update is rounded stochastically).

Gradients. d_x is the gradient of the loss with respect to x. An op says for each output whether it writes (=) or
          adds (+=). Gradients of weights are always added to; the arena is cleared once a step.

Order.    Every sum has one order, whatever the number of blocks or the moment they run: no atomics on floats. The same
          seed gives the same bits. Nothing inside a microbatch waits for the host: the number of tokens an expert gets
          is only ever known to the GPU.

Reading.  Down to main, which is at the end under #ifndef TESTING, or from there upwards. A kernel's number, as in
          rmsnorm_forward_kernel4, is its place in the history told in dev/cuda/rmsnorm.cu.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include "llmc/check.h"
#include "llmc/config.h"
#include "llmc/cuda_check.h"
#include "llmc/cudnn_attention.h"
#include "llmc/dump_file.h"
#include "llmc/gemm.h" // cuBLASLt
#include "llmc/gpu_clock.h"
#include "llmc/logger.h"
#include "llmc/multi_gpu.h" // MPI and NCCL
#include "llmc/profiler.h"
#include "llmc/ptx.cuh" // mma, ldmatrix, cp.async; load8, store4 and the like: several bf16 as floats
#include "llmc/rand.h"
#include "llmc/run.h" // options, data, tokenizer, checkpoints
#include "llmc/schedule.h"
#include "llmc/training.h" // saving, samples, what is printed

// ----------------------------------------------------------------------------
// Tensors: the parameters. One arena holds all of them, laid out by the table in llmc/config.h for the padded sizes;
// the gradients, the master weights and the two AdamW moments are fp32 arenas of the same shape. Weights are
// [out, in]: y = x W^T. The order in the arena is the network's, so backward completes it from the end to the front.

template <class T> struct LayerParams {
    T* input_layernorm;          // (C)
    T* qkv_proj;                 // (QKV, C): q_proj (A, C), k_proj (KV, C) and v_proj (KV, C) are neighbours
    T* q_norm;                   // (HD)
    T* k_norm;                   // (HD)
    T* o_proj;                   // (C, A)
    T* post_attention_layernorm; // (C)
    T* router;                   // (E, C); NULL in a dense layer
    T* gate_up_proj;             // (E, 2F, C): of each expert gate_proj (F, C), then up_proj (F, C); dense: (2F, C)
    T* down_proj;                // (E, C, F); dense: (C, F)
};

template <class T> struct Params {
    T* embed_tokens;        // (V, C)
    LayerParams<T>* layers; // L of them
    T* norm;                // (C)
    T* lm_head;             // (V, C); the same pointer as embed_tokens where the two are tied
};

template <class T> void params_point(Params<T>* p, T* arena, const ParamTable* padded, const MoEConfig* config) {
    // gives each name of the model its place in the arena; p->layers must have room for L layers
    auto at = [&](const char* name, int l) { return arena + param_find(padded, name, l)->offset; };
    p->embed_tokens = at("model.embed_tokens.weight", -1);
    p->norm = at("model.norm.weight", -1);
    p->lm_head = config->tie_word_embeddings ? p->embed_tokens : at("lm_head.weight", -1);
    for (int l = 0; l < config->num_hidden_layers; l++) {
        LayerParams<T>* w = &p->layers[l];
        bool moe = config_layer_is_moe(config, l);
        w->input_layernorm = at("model.layers.%d.input_layernorm.weight", l);
        w->qkv_proj = at("model.layers.%d.self_attn.q_proj.weight", l);
        w->q_norm = at("model.layers.%d.self_attn.q_norm.weight", l);
        w->k_norm = at("model.layers.%d.self_attn.k_norm.weight", l);
        w->o_proj = at("model.layers.%d.self_attn.o_proj.weight", l);
        w->post_attention_layernorm = at("model.layers.%d.post_attention_layernorm.weight", l);
        w->router = moe ? at("model.layers.%d.mlp.gate.weight", l) : NULL;
        w->gate_up_proj = at(moe ? "model.layers.%d.mlp.experts.0.gate_proj.weight"
                             : "model.layers.%d.mlp.gate_proj.weight", l);
        w->down_proj = at(moe ? "model.layers.%d.mlp.experts.0.down_proj.weight"
                          : "model.layers.%d.mlp.down_proj.weight", l);
    }
}

size_t pad8(size_t n) { return (n + 7) / 8 * 8; }

MoEConfig config_padded(const MoEConfig* c) {
    // the sizes that rows have on the device; head_dim is a multiple of 8 in every model
    MoEConfig p = *c;
    p.vocab_size = (int)pad8(c->vocab_size);
    p.hidden_size = (int)pad8(c->hidden_size);
    p.moe_intermediate_size = (int)pad8(c->moe_intermediate_size);
    p.intermediate_size = (int)pad8(c->intermediate_size);
    return p;
}

// ----------------------------------------------------------------------------
// Tensors: the activations that forward keeps for backward, and backward's own buffers. C, F and V are padded here.

const int TILE_ROWS = 128; // of a tile of the experts' products

typedef struct {              // where the tokens of one MoE layer go
    int* tokens_per_expert;   // (E)
    int* expert_offsets;      // (E+1) expert e owns rows expert_offsets[e] .. expert_offsets[e+1]
    int* row_slot;            // (R)   row -> slot n*K+k
    int* slot_row;            // (N, K) slot -> row
    int* row_token;           // (R)   row -> token n
    int4* tile_list;          // (R/TILE_ROWS + E) {expert, first row, end row, 0}; {-1,0,0,0} past the last
} Routing;

typedef struct {
    bf16* residual_attn; // (N, C) the residual stream that enters the layer
    bf16* attn_norm;     // (N, C) its RMSNorm
    float* attn_rstd;    // (N)    1 / sqrt(mean(x^2) + eps)
    bf16* qkv;           // (N, QKV) projections, before norm and RoPE; v is used as it is
    bf16* qk;            // (N, A + KV) q and k, normalised and rotated
    float* qk_rstd;      // (N, NH+NKV)
    float* lse;          // (B, NH, T) log-sum-exp of each row of scores: all that backward needs to redo the softmax
    bf16* attn;          // (N, A) attention output, before o_proj
    bf16* residual_mlp;  // (N, C) residual stream between attention and MLP
    bf16* mlp_norm;      // (N, C)
    float* mlp_rstd;     // (N)
    // MoE layers only
    float* router_logits;  // (N, E) kept for --dump only, else NULL
    float* router_probs;   // (N, E) softmax over all experts
    float* router_lse;     // (N)    log-sum-exp of the router logits, for the z-loss
    int* router_indices;   // (N, K) chosen experts, the most probable first
    float* router_weights; // (N, K) what multiplies their outputs
    Routing routing;
    // dense layers have F = intermediate_size and R = N
    bf16* gate_up;    // (R, 2F); with --recompute moe all MoE layers share one
    bf16* expert_act; // (R, F) silu(gate) * up; kept by dense layers and --experts loop, else one for all
    bf16* expert_in;  // (R, C) mlp_norm's rows sorted by expert; --experts loop only
    bf16* expert_out; // (R, C) kept by --experts loop, else one for all
} LayerActs;

typedef struct {
    LayerActs* layers;      // L of them
    int* tokens_per_expert; // (L, E) of all layers together; each layer's Routing points into it
    bf16* branch;           // (N, C) what the current half-layer adds to the residual stream
    bf16* residual_final;   // (N, C)
    bf16* final_norm;       // (N, C)
    float* final_rstd;      // (N)
    float* losses;          // (N) cross-entropy of each token, 0 where the target is ignored
    bf16* logits;           // (logit_rows, V) one chunk of rows; becomes d_logits in place
    size_t logit_rows;
    void* attn_scores;      // --attention naive: one head's T x T
    int* route_chunks;      // scratch of route_rows
    // backward
    bf16* d_residual;       // (N, C) gradient of the residual stream
    bf16* d_norm;           // (N, C) gradient of a norm's output
    bf16* d_attn;           // (N, A)
    bf16* d_qkv;            // (N, QKV)
    float* attn_delta;      // (B, NH, T)
    bf16* d_expert_in;      // (R, C)
    bf16* d_expert_out;     // (R, C)  --experts loop
    bf16* d_act;            // (R, F)  dense layers and --experts loop
    bf16* d_gate_up;        // (R, 2F) dense layers and --experts loop; grouped writes it over gate_up
    float* router_partials; // (P, R)  pieces of the router weights' gradient
    float* d_router_logits; // (N, E)
    float* d_router_partials; // scratch of router_backward_weight
    float* norm_partials;   // (NORM_BLOCKS, C or 2*HD) partial sums of a norm's weight gradient
} Acts;

typedef struct {
    char* base;  // NULL while measuring
    size_t used; // bytes, a multiple of 256
} Arena;

void* arena_take(Arena* a, size_t count, size_t size) {
    // the next count*size bytes, 256-byte aligned; with base NULL it only counts them, so that the code which lays out
    // memory is also the code which says how much there will be
    void* p = a->base ? a->base + a->used : NULL;
    a->used += (mul_check(count, size) + 255) / 256 * 256;
    return p;
}
bf16* take_bf16(Arena* a, size_t count) { return (bf16*)arena_take(a, count, sizeof(bf16)); }
float* take(Arena* a, size_t count) { return (float*)arena_take(a, count, sizeof(float)); }
int* take_int(Arena* a, size_t count) { return (int*)arena_take(a, count, sizeof(int)); }

enum AttentionKind { ATTENTION_NAIVE, ATTENTION_FLASH, ATTENTION_CUDNN };
enum ExpertsKind { EXPERTS_LOOP, EXPERTS_GROUPED };
enum { LOGIT_ROWS = 4096 }; // fewer and the lm_head's weights are read too often, more and the logits take gigabytes

// ----------------------------------------------------------------------------
// device helpers

__host__ __device__ inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// sum and maximum over a warp, or each group of `lanes` neighbours in it, a power of 2; every lane gets its group's
template <class T> __device__ inline T warp_sum(T x, int lanes = 32) {
    for (int offset = 1; offset < lanes; offset *= 2) { x += __shfl_xor_sync(0xffffffff, x, offset); }
    return x;
}
template <class T> __device__ inline T warp_max(T x, int lanes = 32) {
    for (int offset = 1; offset < lanes; offset *= 2) { x = max(x, __shfl_xor_sync(0xffffffff, x, offset)); }
    return x;
}

// sum over a block of whole warps, at most 1024 threads; every thread gets it. warp_sums: 32 numbers of shared memory
template <class T> __device__ inline T block_sum(T x, T* warp_sums) {
    x = warp_sum(x);
    __syncthreads(); // all have read what an earlier call left in warp_sums
    if (threadIdx.x % 32 == 0) { warp_sums[threadIdx.x / 32] = x; }
    __syncthreads(); // the sums of all warps are there
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? warp_sums[threadIdx.x % 32] : T(0));
}

// Tensor cores, in short. One instruction of a whole warp, mma16816, adds the product of A (16 x 16) and B (16 x 8),
// both bf16, to C (16 x 8) in fp32. The matrices lie spread over the registers of the 32 lanes; with g = lane / 4 and
// t = lane % 4 a lane holds
//     A   4 registers of two bf16: row g and row g+8 of columns 2t, 2t+1, then the same rows of columns 2t+8, 2t+9
//     B   2 registers of two bf16: rows 2t, 2t+1 of column g, then rows 2t+8, 2t+9
//     C   4 floats: row g of columns 2t, 2t+1, then row g+8
// Two neighbouring C, rounded in pairs, are therefore an A: one product feeds the next without leaving the registers.
// ldsm4 (ldmatrix) fetches four 8 x 8 matrices from shared memory in that form, lane l giving the address of row l % 8
// of matrix l / 8; ldsm4t turns them on the way. cpa16 (cp.async) copies 16 bytes from global to shared memory in the
// background: cpa_commit closes a group of copies, cpa_wait<n> waits until at most n groups are still on their way.
// Groups may be empty, so a loop can close one in every round, also when there is nothing left to copy.

// ----------------------------------------------------------------------------
// matmul. All dense products of this program are gemm's (llmc/gemm.h), that is, cuBLASLt's:
//     gemm(trans_a, trans_b, M, N, K, a, lda, b, ldb, beta, c, type of c, ldc, stream)
// is c (M,N) = op(a) (M,K) op(b) (K,N) + beta * c. Row-major, ld* is the length of a row in memory, sums are fp32.

void matmul_forward(bf16* out, const bf16* inp, const bf16* weight, size_t N, size_t C, size_t OC,
                    cudaStream_t stream) {
    // out (N,OC) = inp (N,C) weight^T, weight is (OC,C)
    gemm(false, true, N, OC, C, inp, C, weight, C, 0, out, CUDA_R_16BF, OC, stream);
}

void matmul_backward(bf16* d_inp, float* d_weight, const bf16* d_out, const bf16* inp, const bf16* weight, size_t N,
                     size_t C, size_t OC, cudaStream_t stream) {
    // d_inp (N,C) = d_out (N,OC) weight;  d_weight (OC,C) += d_out^T inp
    gemm(false, false, N, C, OC, d_out, OC, weight, C, 0, d_inp, CUDA_R_16BF, C, stream);
    gemm(true, false, OC, C, N, d_out, OC, inp, C, 1, d_weight, CUDA_R_32F, C, stream);
}

// ----------------------------------------------------------------------------
// embedding

// out[n,:] = embed_tokens[tokens[n],:]
// A warp owns a row, a lane the 16-byte pieces lane, lane + 32, ... of it. Bandwidth: 4*C bytes a token.
__global__ void embedding_forward_kernel3(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, int C) {
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (n >= N) { return; }
    const bf16* row = embed_tokens + (size_t)tokens[n] * C;
    for (int c = threadIdx.x % 32 * 8; c < C; c += 32 * 8) { store16(out + n * C + c, load16(row + c)); }
}

void embedding_forward(bf16* out, const int* tokens, const bf16* embed_tokens, size_t N, size_t C,
                       cudaStream_t stream) {
    // out (N,C) =
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("embedding_forward: C must be a multiple of 8, is %zu", C); }
    const int warps = 8;
    embedding_forward_kernel3<<<ceil_div(N, warps), warps * 32, 0, stream>>>(out, tokens, embed_tokens, N, (int)C);
    launchCheck("embedding_forward_kernel3");
}

// Several tokens of a batch may be the same, and then their gradients belong to one row. The loader has sorted the
// positions by token (token_order), so equal tokens are neighbours, a *run*, and each run has one owner, which adds in
// a fixed order: d_embed_tokens[token,:] += its rows of d_out.
// A warp owns a sorted position and 128 columns, 4 a lane. If a run begins there, it adds the run's rows in order: the
// lanes look at the next 32 positions together, and 8 rows are on their way at once (without the launch bounds there
// are no registers for so many); else it goes home. Bandwidth: 2*C bytes a token, 8*C a different token. The longest
// run ends last: a comma may be a twentieth of 32,768 tokens, 1,600 rows or 200 times the wait for memory. That is 0.1
// to 0.2 ms where a microbatch takes 200, an estimate that no GPU has confirmed.
__global__ void __launch_bounds__(256, 4)
embedding_backward_kernel3(float* d_embed_tokens, const bf16* d_out, const int* tokens, const int* token_order,
                           size_t N, int C, int pad_token) {
    size_t i = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (i >= N) { return; }
    int lane = threadIdx.x % 32, c = blockIdx.y * 128 + lane * 4, token = tokens[token_order[i]];
    if (token == pad_token || (i > 0 && tokens[token_order[i - 1]] == token)) { return; }
    float sum[4] = {0, 0, 0, 0}, *row = d_embed_tokens + (size_t)token * C + c;
    if (c < C) { load4(sum, row); }
    for (int length = 32; length == 32; i += 32) { // a shorter piece is the run's last
        int n = i + lane < N ? token_order[i + lane] : -1;
        length = __popc(__ballot_sync(0xffffffff, n >= 0 && tokens[n] == token));
        for (int j = 0; j < length; j += 8) {
            float x[8][4] = {};
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const bf16* from = d_out + (size_t)__shfl_sync(0xffffffff, n, j + k) * C + c;
                if (j + k < length && c < C) { load4(x[k], from); }
            }
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                for (int q = 0; q < 4; q++) { sum[q] += x[k][q]; }
            }
        }
    }
    if (c < C) { store4(row, sum); }
}

void embedding_backward(float* d_embed_tokens, const bf16* d_out, const int* tokens, const int* token_order, size_t N,
                        size_t C, int pad_token, cudaStream_t stream) {
    // d_embed_tokens[tokens[n],:] += d_out[n,:] except for pad_token (-1: none). token_order (N): see sort_tokens in
    // llmc/dataloader.h
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("embedding_backward: C must be a multiple of 8, is %zu", C); }
    const int warps = 8;
    dim3 grid(ceil_div(N, warps), ceil_div(C, 128));
    embedding_backward_kernel3<<<grid, warps * 32, 0, stream>>>(d_embed_tokens, d_out, tokens, token_order, N, (int)C,
                                                                pad_token);
    launchCheck("embedding_backward_kernel3");
}

// ----------------------------------------------------------------------------
// rmsnorm (Zhang and Sennrich 2019), with the addition to the residual stream that always comes before it

// residual = bf16(inp + branch); rstd = 1 / sqrt(mean of residual^2 + eps); out = residual * rstd * weight
// A warp owns a row, a lane the 16-byte pieces lane, lane + 32, ... of it. The pieces wait in shared memory until the
// sum is known; each lane reads back its own, so no barrier is needed. Where not one row fits in (keep false), they are
// read again from where they came. Bandwidth: 8 bytes an element.
__global__ void rmsnorm_forward_kernel4(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch,
                                        const bf16* weight, size_t N, int C, int hidden_size, float eps, bool keep) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + warp;
    if (n >= N) { return; }
    bf16* row = (bf16*)shared_bytes + (size_t)warp * C;
    float sum = 0;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float x[8];
        load8(x, inp + n * C + c);
        if (branch != NULL) {
            float b[8];
            load8(b, branch + n * C + c);
            for (int i = 0; i < 8; i++) { x[i] = round_bf16(x[i] + b[i]); }
            store8(residual + n * C + c, x);
        }
        if (keep) { store8(row + c, x); }
        for (int i = 0; i < 8; i++) { sum += x[i] * x[i]; }
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / hidden_size + eps);
    const bf16* again = keep ? row : (branch != NULL ? residual : inp) + n * C;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float x[8], w[8];
        load8(x, again + c);
        load8(w, weight + c);
        for (int i = 0; i < 8; i++) { x[i] = x[i] * s * w[i]; }
        store8(out + n * C + c, x);
    }
    if (lane == 0) { rstd[n] = s; }
}

void rmsnorm_forward(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch, const bf16* weight,
                     size_t N, size_t C, int hidden_size, float eps, cudaStream_t stream) {
    // residual, out (N,C) =, rstd (N) =. branch NULL: inp is the residual stream already, and residual is not written.
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("rmsnorm_forward: C must be a multiple of 8, is %zu", C); }
    size_t row_bytes = C * sizeof(bf16), most = 48 * 1024;
    bool keep = row_bytes <= most;
    size_t warps = keep && most / row_bytes < 8 ? most / row_bytes : 8;
    rmsnorm_forward_kernel4<<<ceil_div(N, warps), warps * 32, keep ? warps * row_bytes : 0, stream>>>(
        residual, out, rstd, inp, branch, weight, N, (int)C, hidden_size, eps, keep);
    launchCheck("rmsnorm_forward_kernel4");
}

// The gradient of a norm's weight is a sum over all tokens. The tokens are cut into ranges whose number depends on
// nothing but N, a block sums a range into its row of partials, and the rows are added in one order: one result on
// every card.
enum { NORM_BLOCKS = 256 }; // at most; and a block has 16 warps, each of which should find a row

unsigned norm_blocks(size_t N) { return (unsigned)(N < 16 * NORM_BLOCKS ? ceil_div(N, 16) : (size_t)NORM_BLOCKS); }

// d_weight[c] += sum over blocks of partials[block * stride + c]
// A block owns 32 columns. 8 warps take every eighth row, so that 32 loads follow each other and not 256; a row's 32
// columns are one 128-byte line. Bound by latency: at most 256 rows.
__global__ void norm_weight_reduce_kernel1(float* d_weight, const float* partials, int blocks, size_t stride, int C) {
    __shared__ float sums[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0;
    if (c < C) {
        #pragma unroll 8
        for (int block = warp; block < blocks; block += 8) { sum += partials[block * stride + c]; }
    }
    sums[warp][lane] = sum;
    __syncthreads(); // the sums of all warps are there
    if (warp > 0 || c >= C) { return; }
    float total = 0;
    for (int i = 0; i < 8; i++) { total += sums[i][lane]; }
    d_weight[c] += total;
}

void norm_weight_reduce(float* d_weight, const float* partials, unsigned blocks, size_t stride, size_t C,
                        cudaStream_t stream) {
    // d_weight (C) += the sums over the rows of partials (blocks, stride)
    norm_weight_reduce_kernel1<<<ceil_div(C, 32), 256, 0, stream>>>(d_weight, partials, (int)blocks, stride, (int)C);
    launchCheck("norm_weight_reduce_kernel1");
}

// With xhat = residual * rstd and g = d_out * weight: d_residual = rstd * (g - xhat * mean(g * xhat)), and for a
// block's range of rows partials = sum of d_out * xhat.
// A block owns a range of the rows and takes as many at a time as it has warps. First a warp owns a row and
// writes its d_residual; then a thread owns 2 columns, and adds up those rows, which by now are in the L1 cache. The
// two halves need nothing of each other but the cache, so there is no barrier. Bandwidth: 6 bytes an element, 8 with
// accumulate. Two blocks a multiprocessor, so that a large card runs all of them at once.
__global__ void __launch_bounds__(512, 2)
rmsnorm_backward_kernel4(bf16* d_residual, float* partials, const bf16* d_out, const bf16* residual, const bf16* weight,
                         const float* rstd, size_t N, int C, int hidden_size, bool accumulate) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    size_t begin = N * blockIdx.x / gridDim.x, end = N * (blockIdx.x + 1) / gridDim.x;
    float* partial = partials + blockIdx.x * (size_t)C;
    for (int c = threadIdx.x * 2; c < C; c += blockDim.x * 2) { partial[c] = partial[c + 1] = 0; }
    for (size_t first = begin; first < end; first += warps) {
        size_t n = first + warp, last = first + warps < end ? first + warps : end;
        if (n < last) {
            float s = rstd[n], dot = 0;
            for (int c = lane * 8; c < C; c += 32 * 8) {
                float d_o[8], x[8], w[8];
                load8(d_o, d_out + n * C + c);
                load8(x, residual + n * C + c);
                load8(w, weight + c);
                for (int i = 0; i < 8; i++) { dot += d_o[i] * w[i] * x[i]; }
            }
            float k = warp_sum(dot) * s * s / hidden_size;
            for (int c = lane * 8; c < C; c += 32 * 8) {
                float d_o[8], x[8], w[8], d_x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
                load8(d_o, d_out + n * C + c);
                load8(x, residual + n * C + c);
                load8(w, weight + c);
                if (accumulate) { load8(d_x, d_residual + n * C + c); }
                for (int i = 0; i < 8; i++) { d_x[i] += s * (d_o[i] * w[i] - x[i] * k); }
                store8(d_residual + n * C + c, d_x);
            }
        }
        for (int c = threadIdx.x * 2; c < C; c += blockDim.x * 2) {
            float sum0 = partial[c], sum1 = partial[c + 1];
            #pragma unroll 8
            for (size_t m = first; m < last; m++) {
                float2 d_o = __bfloat1622float2(*(const __nv_bfloat162*)(d_out + m * C + c));
                float2 x = __bfloat1622float2(*(const __nv_bfloat162*)(residual + m * C + c));
                float s = rstd[m];
                sum0 += d_o.x * x.x * s;
                sum1 += d_o.y * x.y * s;
            }
            partial[c] = sum0;
            partial[c + 1] = sum1;
        }
    }
}

void rmsnorm_backward(bf16* d_residual, float* d_weight, const bf16* d_out, const bf16* residual, const bf16* weight,
                      const float* rstd, float* partials, size_t N, size_t C, int hidden_size, bool accumulate,
                      cudaStream_t stream) {
    // d_residual (N,C) = or, with accumulate, +=; d_weight (C) +=; partials (NORM_BLOCKS,C) scratch
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("rmsnorm_backward: C must be a multiple of 8, is %zu", C); }
    rmsnorm_backward_kernel4<<<norm_blocks(N), 512, 0, stream>>>(d_residual, partials, d_out, residual, weight, rstd, N,
                                                                 (int)C, hidden_size, accumulate);
    launchCheck("rmsnorm_backward_kernel4");
    norm_weight_reduce(d_weight, partials, norm_blocks(N), C, C, stream);
}

// ----------------------------------------------------------------------------
// qk_norm_rope: RMSNorm over each head of q and k, then rotary position embedding (Su et al. 2021)

// qk = rotate(rmsnorm(x)) for each head of q and k, by halves: element i with element i + HD/2
// A block owns a token; `lanes` threads own a head of it at a time, a thread 4 elements of the first half and the 4
// that are rotated with them. Where HD/8 is no power of 2 some lanes have no elements. Bandwidth: 4 bytes an element;
// the token's row of cosines and sines comes from memory once.
__global__ void qk_norm_rope_forward_kernel3(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm,
                                             const bf16* k_norm, const float* rope, size_t T, int NH, int NKV,
                                             int HD, float eps, int lanes) {
    size_t n = blockIdx.x;
    int i = threadIdx.x % lanes * 4, half = HD / 2, groups = blockDim.x / lanes;
    float cosine[4] = {0, 0, 0, 0}, sine[4] = {0, 0, 0, 0};
    if (i < half) {
        load4(cosine, rope + n % T * HD + i);
        load4(sine, rope + n % T * HD + half + i);
    }
    for (int h0 = 0; h0 < NH + NKV; h0 += groups) { // all lanes of a warp stay together for the sums
        int h = h0 + threadIdx.x / lanes;
        bool inside = h < NH + NKV && i < half;
        float x1[4] = {0, 0, 0, 0}, x2[4] = {0, 0, 0, 0}, sum = 0;
        if (inside) {
            const bf16* x = qkv + (n * (NH + 2 * NKV) + h) * HD + i;
            load4(x1, x);
            load4(x2, x + half);
        }
        for (int j = 0; j < 4; j++) { sum += x1[j] * x1[j] + x2[j] * x2[j]; }
        float s = 1.0f / sqrtf(warp_sum(sum, lanes) / HD + eps);
        if (!inside) { continue; }
        const bf16* weight = (h < NH ? q_norm : k_norm) + i;
        float w1[4], w2[4], out1[4], out2[4];
        load4(w1, weight);
        load4(w2, weight + half);
        for (int j = 0; j < 4; j++) {
            float y1 = x1[j] * s * w1[j], y2 = x2[j] * s * w2[j];
            out1[j] = y1 * cosine[j] - y2 * sine[j];
            out2[j] = y2 * cosine[j] + y1 * sine[j];
        }
        bf16* out = qk + (n * (NH + NKV) + h) * HD + i;
        store4(out, out1);
        store4(out + half, out2);
        if (i == 0) { rstd[n * (NH + NKV) + h] = s; }
    }
}

int rope_lanes(int HD) {
    // lanes a head: the power of 2 from HD/8 on
    if (HD % 8 != 0 || HD < 8 || HD > 128) { fatal("qk_norm_rope: HD must be a multiple of 8 up to 128, is %d", HD); }
    int lanes = 1;
    while (lanes < HD / 8) { lanes *= 2; }
    return lanes;
}

void qk_norm_rope_forward(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm, const bf16* k_norm,
                          const float* rope, size_t N, size_t T, int NH, int NKV, int HD, float eps,
                          cudaStream_t stream) {
    // qk (N,(NH+NKV)*HD) =, rstd (N,NH+NKV) =; qkv (N,(NH+2*NKV)*HD); rope (T,HD): rope_table; token n is at n % T
    int lanes = rope_lanes(HD);
    if (N == 0) { return; }
    size_t wanted = ceil_div((size_t)(NH + NKV) * lanes, 32) * 32, threads = wanted < 256 ? wanted : 256;
    qk_norm_rope_forward_kernel3<<<N, threads, 0, stream>>>(qk, rstd, qkv, q_norm, k_norm, rope, T, NH, NKV, HD, eps,
                                                            lanes);
    launchCheck("qk_norm_rope_forward_kernel3");
}

enum { ROPE_WARPS = 16 };

// In place: the gradients of qk become those of qkv. With g the gradient rotated back, xhat = x * rstd, w the weight:
// d = rstd * (g*w - xhat * mean(g*w*xhat)), and for a block's range of tokens partials (2,HD) = sums of g * xhat, of q
// and of k.
// A block owns a range of the tokens: first their heads of q, then those of k. As above `lanes` threads own a
// head at a time, and always the same elements of it, so that the sums for the weight stay in registers; at the end
// they are added over the lanes of a warp that own the same elements, then over the warps. Bandwidth: 6 bytes an
// element.
__global__ void __launch_bounds__(ROPE_WARPS * 32, 2)
qk_norm_rope_backward_kernel3(bf16* d_qkv, float* partials, const bf16* qkv, const float* rstd, const bf16* q_norm,
                              const bf16* k_norm, const float* rope, size_t N, size_t T, int NH, int NKV, int HD,
                              int lanes) {
    __shared__ float warp_sums[ROPE_WARPS][128];
    size_t begin = N * blockIdx.x / gridDim.x, end = N * (blockIdx.x + 1) / gridDim.x;
    int i = threadIdx.x % lanes * 4, half = HD / 2, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    for (int part = 0; part < 2; part++) {
        int heads = part == 0 ? NH : NKV, first_head = part == 0 ? 0 : NH, all = (int)(end - begin) * heads;
        const bf16* weight = part == 0 ? q_norm : k_norm;
        float w1[4] = {0, 0, 0, 0}, w2[4] = {0, 0, 0, 0}, sum1[4] = {0, 0, 0, 0}, sum2[4] = {0, 0, 0, 0};
        if (i < half) {
            load4(w1, weight + i);
            load4(w2, weight + half + i);
        }
        for (int first = 0; first < all; first += groups) { // all lanes of a warp stay together for the sums
            int at = first + group;
            bool inside = at < all && i < half;
            size_t n = begin + at / heads, h = first_head + at % heads, offset = (n * (NH + 2 * NKV) + h) * HD + i;
            float x1[4] = {0, 0, 0, 0}, x2[4] = {0, 0, 0, 0}, g1[4] = {0, 0, 0, 0}, g2[4] = {0, 0, 0, 0};
            float s = 0, dot = 0;
            if (inside) {
                float d1[4], d2[4], cosine[4], sine[4];
                load4(x1, qkv + offset);
                load4(x2, qkv + offset + half);
                load4(d1, d_qkv + offset);
                load4(d2, d_qkv + offset + half);
                s = rstd[n * (NH + NKV) + h];
                load4(cosine, rope + n % T * HD + i);
                load4(sine, rope + n % T * HD + half + i);
                for (int j = 0; j < 4; j++) {
                    g1[j] = d1[j] * cosine[j] + d2[j] * sine[j];
                    g2[j] = d2[j] * cosine[j] - d1[j] * sine[j];
                    sum1[j] += g1[j] * x1[j] * s;
                    sum2[j] += g2[j] * x2[j] * s;
                    dot += g1[j] * w1[j] * x1[j] + g2[j] * w2[j] * x2[j];
                }
            }
            float k = warp_sum(dot, lanes) * s * s / HD;
            if (!inside) { continue; }
            for (int j = 0; j < 4; j++) {
                g1[j] = s * (g1[j] * w1[j] - x1[j] * k);
                g2[j] = s * (g2[j] * w2[j] - x2[j] * k);
            }
            store4(d_qkv + offset, g1);
            store4(d_qkv + offset + half, g2);
        }
        for (int j = 0; j < 4; j++) {
            for (int offset = lanes; offset < 32; offset *= 2) {
                sum1[j] += __shfl_xor_sync(0xffffffff, sum1[j], offset);
                sum2[j] += __shfl_xor_sync(0xffffffff, sum2[j], offset);
            }
            if (threadIdx.x % 32 < lanes && i < half) {
                warp_sums[threadIdx.x / 32][i + j] = sum1[j];
                warp_sums[threadIdx.x / 32][half + i + j] = sum2[j];
            }
        }
        __syncthreads(); // the sums of all warps are there
        if (threadIdx.x < HD) {
            float total = 0;
            for (int warp = 0; warp < ROPE_WARPS; warp++) { total += warp_sums[warp][threadIdx.x]; }
            partials[(blockIdx.x * 2 + part) * (size_t)HD + threadIdx.x] = total;
        }
        __syncthreads(); // q's sums have been read before k's take their place
    }
}

void qk_norm_rope_backward(bf16* d_qkv, float* d_q_norm, float* d_k_norm, const bf16* qkv, const float* rstd,
                           const bf16* q_norm, const bf16* k_norm, const float* rope, float* partials, size_t N,
                           size_t T, int NH, int NKV, int HD, cudaStream_t stream) {
    // d_qkv (N,(NH+2*NKV)*HD): its q and k parts, the gradient of qk, become those of qkv; the v part stays as it is.
    // d_q_norm, d_k_norm (HD) +=; partials (NORM_BLOCKS,2*HD) scratch
    int lanes = rope_lanes(HD);
    if (N == 0) { return; }
    if ((N / NORM_BLOCKS + 1) * NH > INT_MAX) { fatal("qk_norm_rope_backward: %zu tokens are too many", N); }
    qk_norm_rope_backward_kernel3<<<norm_blocks(N), ROPE_WARPS * 32, 0, stream>>>(
        d_qkv, partials, qkv, rstd, q_norm, k_norm, rope, N, T, NH, NKV, HD, lanes);
    launchCheck("qk_norm_rope_backward_kernel3");
    norm_weight_reduce(d_q_norm, partials, norm_blocks(N), 2 * HD, HD, stream);
    norm_weight_reduce(d_k_norm, partials + HD, norm_blocks(N), 2 * HD, HD, stream);
}

// ----------------------------------------------------------------------------
// attention: softmax(q k^T / sqrt(HD)) v, causal, and within a document: position t sees positions doc_start[t] .. t of
// its row. NH/NKV query heads share a key/value head (GQA, Ainslie et al. 2023). The naive version materialises one
// head's T x T scores. The flash version (FlashAttention-2, Dao 2023) keeps tiles of them in registers, never touches a
// tile that is masked as a whole, and saves only the log-sum-exp of each row; its backward computes them again, twice:
// once for d_k and d_v, where a block owns keys, once for d_q, where it owns queries. So each sum has one owner.

typedef struct {
    size_t B, T;
    int NH, NKV, HD;
    size_t ld_qk, ld_v, ld_d; // elements from a token's row to the next one's: of q and k, of v, of d_q, d_k and d_v
} AttentionShape;

void attention_check(const char* op, AttentionShape s) {
    // what all kernels of attention ask of a shape
    if (s.HD < 8 || s.HD > 128 || s.HD % 8 != 0) {
        fatal("%s: head_dim must be a multiple of 8 from 8 to 128, is %d", op, s.HD);
    }
    if (s.NKV < 1 || s.NH % s.NKV != 0) {
        fatal("%s: the query heads must be a multiple of the key/value heads, are %d and %d", op, s.NH, s.NKV);
    }
    if (s.B > 65535 || s.NH > 65535 || s.T > INT_MAX - 128) {
        fatal("%s: B, NH and T must be at most 65535, 65535 and 2^31-129, are %zu, %d, %zu", op, s.B, s.NH, s.T);
    }
    if ((s.ld_qk | s.ld_v | s.ld_d) % 8 != 0 || s.ld_qk > INT_MAX || s.ld_v > INT_MAX || s.ld_d > INT_MAX) {
        fatal("%s: row strides must be multiples of 8 below 2^31, are %zu, %zu, %zu", op, s.ld_qk, s.ld_v, s.ld_d);
    }
}

size_t attention_naive_ld(size_t T) { return ceil_div(T, 8) * 8; } // rows of scores start at multiples of 16 bytes

size_t attention_naive_bytes(size_t T, size_t HD) {
    // of one head: scores and their gradients (T,T) in fp32, and both again in bf16; sums of d_k and d_v (T,HD) in fp32
    return T * attention_naive_ld(T) * 2 * (sizeof(float) + sizeof(bf16)) + 2 * T * HD * sizeof(float);
}

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

// Tiles in shared memory: rows of D numbers, where D is HD rounded up to 16, 32, 64 or 128 and what lies past HD or
// past the sequence is zero. A warp owns 16 rows of a result. One m16n8k16 accumulator holds, for lane l, row l/4
// (elements 0, 1) and row l/4 + 8 (elements 2, 3) at columns 2*(l%4) and the next: packed to bf16 that is just the
// layout of an A operand, so scores become the left factor of the next product without leaving their registers
// (FlashAttention-2, Dao 2023).

// Offset in elements of a place in a tile. The 16-byte pieces of a row are permuted by an exclusive or with its number:
// 8 rows at one column, which ldmatrix reads at once, then lie in 32 different banks.
template <int D>
__device__ inline int tile_offset(int row, int column) {
    constexpr int PIECES = D < 64 ? D / 8 : 8; // that share the 32 banks with their neighbours of the row
    constexpr int ROWS = D < 64 ? 64 / D : 1;  // that fit into 128 bytes, once round the banks
    return row * D + ((column / 8) ^ (row / ROWS % PIECES)) * 8 + column % 8;
}

// tile (ROWS,D) = rows first.. of a head (T,HD) with ld elements from row to row; zeros outside. Asynchronous: commit,
// wait, barrier are the caller's. A thread keeps its column and goes down STEP rows at a time, so it has one address
// and one swizzle.
template <int ROWS, int D, int THREADS>
__device__ inline void copy_tile(bf16* tile, const bf16* head, int first, int T, int ld, int HD) {
    constexpr int PIECES = D / 8, STEP = THREADS / PIECES;
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "whole passes of whole swizzle periods");
    int row = threadIdx.x / PIECES, column = threadIdx.x % PIECES * 8;
    bf16* to = tile + tile_offset<D>(row, column);
    const bf16* from = head + (size_t)(first + row) * ld + column;
    #pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        cpa16(to + i * D, from + (size_t)i * ld, column < HD && first + row + i < T);
    }
}

// Where a lane reads its row for ldmatrix.x4, as an offset from the first of 16 tile rows. Columns advance by exclusive
// or with k*16 (the swizzle is one itself), rows by adding n*16*D. Rows first: A operands, and B operands by the
// transposing load (tile rows are summed over). Columns first: B operands by the plain load (tile rows are columns of
// the result).
template <int D>
__device__ inline int lane_rows_first() {
    int lane = threadIdx.x % 32;
    return tile_offset<D>(lane % 16, lane / 16 * 8);
}
template <int D>
__device__ inline int lane_columns_first() {
    int lane = threadIdx.x % 32;
    return tile_offset<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
}

// the A operands of 16 rows of a tile
template <int D>
__device__ inline void load_fragments(uint32_t (&fragments)[D / 16][4], const bf16* rows) {
    #pragma unroll
    for (int k = 0; k < D / 16; k++) { ldsm4(fragments[k], rows + (lane_rows_first<D>() ^ k * 16)); }
}

// acc (16,COLUMNS) += A B^T, summed over D; A (16,D) as fragments if KEPT, otherwise read from the tile rows a; B
// (COLUMNS,D) at b
template <int D, int COLUMNS, bool KEPT>
__device__ inline void multiply_abt(float (&acc)[COLUMNS / 8][4], const uint32_t (&fragments)[KEPT ? D / 16 : 1][4],
                                    const bf16* a, const bf16* b) {
    int a_lane = lane_rows_first<D>(), b_lane = lane_columns_first<D>();
    #pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a_k[4];
        if constexpr (KEPT) {
            memcpy(a_k, fragments[k], sizeof(a_k));
        } else {
            ldsm4(a_k, a + (a_lane ^ k * 16));
        }
        #pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            uint32_t b_kn[4];
            ldsm4(b_kn, b + n * 16 * D + (b_lane ^ k * 16));
            mma16816(acc[2 * n], a_k, {b_kn[0], b_kn[1]});
            mma16816(acc[2 * n + 1], a_k, {b_kn[2], b_kn[3]});
        }
    }
}

// acc (16,D) += bf16(P) B, summed over ROWS, 16 at a time in ascending order; P (16,ROWS) as accumulators, B (ROWS,D)
// at b
template <int D, int ROWS>
__device__ inline void multiply_ab(float (&acc)[D / 8][4], const float (&p)[ROWS / 8][4], const bf16* b) {
    int b_lane = lane_rows_first<D>();
    #pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        uint32_t a_k[4] = {pack2(p[2 * k][0], p[2 * k][1]), pack2(p[2 * k][2], p[2 * k][3]),
                           pack2(p[2 * k + 1][0], p[2 * k + 1][1]), pack2(p[2 * k + 1][2], p[2 * k + 1][3])};
        #pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b_kn[4];
            ldsm4t(b_kn, b + k * 16 * D + (b_lane ^ n * 16));
            mma16816(acc[2 * n], a_k, {b_kn[0], b_kn[1]});
            mma16816(acc[2 * n + 1], a_k, {b_kn[2], b_kn[3]});
        }
    }
}

// rows first.. of a head (T,HD) = acc times a factor for the upper and one for the lower 8 of a warp's 16 rows
template <int D>
__device__ inline void store_rows(bf16* head, const float (&acc)[D / 8][4], float upper, float lower, int first, int T,
                                  int ld, int HD) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + half * 8;
        if (row >= T) { continue; }
        bf16* to = head + (size_t)row * ld + lane % 4 * 2;
        float factor = half == 0 ? upper : lower;
        #pragma unroll
        for (int n = 0; n < D / 8; n++) {
            if (n * 8 < HD) {
                *(uint32_t*)(to + n * 8) = pack2(acc[n][2 * half] * factor, acc[n][2 * half + 1] * factor);
            }
        }
    }
}

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

// launch(D) where D is HD rounded up to what the kernels are compiled for, as a type: D's value is a constant
template <class Launch> void attention_dispatch(int HD, Launch launch) {
    HD <= 16   ? launch(std::integral_constant<int, 16>{})
    : HD <= 32 ? launch(std::integral_constant<int, 32>{})
    : HD <= 64 ? launch(std::integral_constant<int, 64>{})
               : launch(std::integral_constant<int, 128>{});
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
// router: which K of E experts a token goes to, and with what weights (Shazeer et al. 2017; softmax before top-k and
// the optional renormalisation as in Qwen3-MoE). Two losses keep the load even: the load-balancing loss of the Switch
// Transformer (Fedus et al. 2021) exactly as Hugging Face's load_balancing_loss_func pools it, and the z-loss of ST-MoE
// (Zoph et al. 2022), which keeps router logits small. Logits, softmax and their gradients are fp32.

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

// ----------------------------------------------------------------------------
// permute and combine: to the experts and back. Rows are sorted by expert, so that an expert is one matrix product;
// no token is dropped and no expert has a capacity (dropless, MegaBlocks: Gale et al. 2022). Nothing is scattered: each
// output has one owner that gathers what belongs to it, in one order.

const int ROUTE_WARPS = 8, ROUTE_CHUNK_SLOTS = 2048; // of a block; each warp has an eighth of the chunk's slots

// x[0..count) = its exclusive prefix sum, by one warp, 32 at a time; every lane gets the total
__device__ inline int route_scan_in_place(int* x, int count) {
    int lane = threadIdx.x % 32, total = 0;
    for (int first = 0; first < count; first += 32) {
        int i = first + lane, value = i < count ? x[i] : 0, sum = value;
        for (int distance = 1; distance < 32; distance *= 2) {
            int before = __shfl_up_sync(0xffffffff, sum, distance);
            if (lane >= distance) { sum += before; }
        }
        if (i < count) { x[i] = total + sum - value; }
        total += __shfl_sync(0xffffffff, sum, 31);
    }
    return total;
}

// Rows for the slots begin..end, by one warp: next (E) is the row of its next slot of each expert. Of the lanes with
// the same expert the first moves the row on for all.
__device__ inline void route_place_warp(Routing r, int* next, const int* router_indices, int begin, int end, int K) {
    int lane = threadIdx.x % 32;
    for (int first = begin; first < end; first += 32) {
        int slot = first + lane, e = slot < end ? router_indices[slot] : -1;
        unsigned peers = __match_any_sync(0xffffffff, e);
        int row = e >= 0 ? next[e] + __popc(peers & ((1u << lane) - 1)) : 0;
        __syncwarp(); // all have read before the first of them moves the row on
        if (e >= 0 && lane == __ffs(peers) - 1) { next[e] += __popc(peers); }
        if (e >= 0) {
            r.row_slot[row] = slot;
            r.slot_row[slot] = row;
            r.row_token[row] = slot / K;
        }
        __syncwarp(); // and it has done so before they read again
    }
}

// A block owns a chunk of the slots and counts them; integer additions give one result in any order.
// chunk_counts (E, chunks) =. Bound by latency: 4 bytes a slot.
__global__ void __launch_bounds__(32 * ROUTE_WARPS)
route_count_kernel3(int* chunk_counts, const int* router_indices, int slots, int E) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int* counts = (int*)shared_bytes; // (E)
    for (int e = threadIdx.x; e < E; e += blockDim.x) { counts[e] = 0; }
    __syncthreads(); // the counters are zero
    int begin = blockIdx.x * ROUTE_CHUNK_SLOTS, end = min(begin + ROUTE_CHUNK_SLOTS, slots);
    for (int slot = begin + threadIdx.x; slot < end; slot += blockDim.x) {
        atomicAdd(&counts[router_indices[slot]], 1);
    }
    __syncthreads(); // all slots are counted
    for (int e = threadIdx.x; e < E; e += blockDim.x) { chunk_counts[(size_t)e * gridDim.x + blockIdx.x] = counts[e]; }
}

// One block owns everything, a warp each 32nd expert: chunk_counts (E, chunks) becomes the number of the expert's slots
// in the chunks before; their totals give tokens_per_expert, expert_offsets and the tile list. Bound by latency: E/32
// scans.
__global__ void __launch_bounds__(1024) route_scan_kernel3(Routing r, int* chunk_counts, int chunks, int tiles, int E) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int *first_row = (int*)shared_bytes, *first_tile = first_row + E + 1; // (E+1) each: counts, then their sums
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int e = warp; e < E; e += 32) {
        int total = route_scan_in_place(chunk_counts + (size_t)e * chunks, chunks);
        if (lane == 0) {
            r.tokens_per_expert[e] = total;
            first_row[e] = total;
            first_tile[e] = (int)ceil_div(total, TILE_ROWS);
        }
    }
    __syncthreads(); // the counts of all experts are there
    if (warp < 2) {  // the first warp sums the rows, the second the tiles
        int* counts = warp == 0 ? first_row : first_tile;
        int total = route_scan_in_place(counts, E);
        if (lane == 0) { counts[E] = total; }
    }
    __syncthreads(); // all sums are there
    for (int e = threadIdx.x; e <= E; e += blockDim.x) { r.expert_offsets[e] = first_row[e]; }
    for (int e = warp; e < E; e += 32) {
        for (int tile = first_tile[e] + lane; tile < first_tile[e + 1]; tile += 32) {
            int row = first_row[e] + (tile - first_tile[e]) * TILE_ROWS;
            r.tile_list[tile] = make_int4(e, row, min(row + TILE_ROWS, first_row[e + 1]), 0);
        }
    }
    for (int tile = first_tile[E] + threadIdx.x; tile < tiles; tile += blockDim.x) {
        r.tile_list[tile] = make_int4(-1, 0, 0, 0);
    }
}

// A block owns the chunk that it owned in route_count_kernel3, each warp an eighth of it, in the order of the slots: so
// the sort is stable. chunk_counts (E, chunks) as the scan left it. Bound by latency: 32 slots at a time.
__global__ void __launch_bounds__(32 * ROUTE_WARPS)
route_place_kernel3(Routing r, const int* chunk_counts, const int* router_indices, int slots, int E, int K) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int* next = (int*)shared_bytes; // (ROUTE_WARPS, E): a warp's counts, then the rows of its next slots
    int warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < ROUTE_WARPS * E; i += blockDim.x) { next[i] = 0; }
    __syncthreads(); // the counters are zero
    int share = ROUTE_CHUNK_SLOTS / ROUTE_WARPS, begin = blockIdx.x * ROUTE_CHUNK_SLOTS + warp * share;
    int end = min(begin + share, slots);
    for (int slot = begin + threadIdx.x % 32; slot < end; slot += 32) {
        atomicAdd(&next[warp * E + router_indices[slot]], 1);
    }
    __syncthreads(); // the counts of all warps are there
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int row = r.expert_offsets[e] + chunk_counts[(size_t)e * gridDim.x + blockIdx.x];
        for (int w = 0; w < ROUTE_WARPS; w++) {
            int count = next[w * E + e];
            next[w * E + e] = row;
            row += count;
        }
    }
    __syncthreads(); // the first rows of all warps are there
    route_place_warp(r, next + warp * E, router_indices, begin, end, K);
}

size_t route_chunk_ints(size_t slots, int E) { return ceil_div(slots, ROUTE_CHUNK_SLOTS) * E; }

void route_rows(Routing r, int* chunk_counts, const int* router_indices, size_t N, int E, int K, cudaStream_t stream) {
    // everything in r (=) from router_indices (N,K); chunk_counts (route_chunk_ints(N*K, E)) is scratch. No token is
    // dropped and the host learns nothing: whoever needs the counts reads them on the device.
    size_t slots = N * K;
    if (E < 1 || E > ROUTER_MAX_EXPERTS) { fatal("route_rows: experts must be 1 to %d, is %d", ROUTER_MAX_EXPERTS, E); }
    if (slots > INT_MAX / 2) { fatal("route_rows: tokens * experts per token must be at most 2^30, is %zu", slots); }
    int chunks = (int)ceil_div(slots, ROUTE_CHUNK_SLOTS), tiles = (int)(slots / TILE_ROWS + E);
    if (slots > 0) {
        route_count_kernel3<<<chunks, 32 * ROUTE_WARPS, E * sizeof(int), stream>>>(chunk_counts, router_indices,
                                                                                   (int)slots, E);
        launchCheck("route_count_kernel3");
    }
    route_scan_kernel3<<<1, 1024, 2 * (E + 1) * sizeof(int), stream>>>(r, chunk_counts, chunks, tiles, E);
    launchCheck("route_scan_kernel3");
    if (slots > 0) {
        route_place_kernel3<<<chunks, 32 * ROUTE_WARPS, ROUTE_WARPS * E * sizeof(int), stream>>>(
            r, chunk_counts, router_indices, (int)slots, E, K);
        launchCheck("route_place_kernel3");
    }
}

// A warp owns a row, 16 bytes a lane. Bound by bandwidth: R*C read, most of it once from memory and K-1 times from L2,
// and R*C written.
__global__ void __launch_bounds__(256)
permute_forward_kernel2(bf16* expert_in, const bf16* inp, const int* row_token, size_t R, size_t C) {
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= R) { return; }
    const bf16* token = inp + row_token[row] * C;
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) { store16(expert_in + row * C + c, load16(token + c)); }
}

void permute_forward(bf16* expert_in, const bf16* inp, const int* row_token, size_t R, size_t C, cudaStream_t stream) {
    // expert_in (R,C)[row,:] = inp (N,C)[row_token[row],:]
    if (C % 8 != 0) { fatal("permute_forward: C must be a multiple of 8, is %zu", C); }
    if (R == 0) { return; }
    permute_forward_kernel2<<<ceil_div(R, 8), 256, 0, stream>>>(expert_in, inp, row_token, R, C);
    launchCheck("permute_forward_kernel2");
}

const int PERMUTE_TOKENS = 4; // of a warp of permute_backward_kernel2

// A warp owns four tokens, a lane 8 columns of them at a time, so that a row of the router that comes from L1 serves
// four tokens, and four rows of d_expert_in are on their way at once. Bound by bandwidth: R*C read, N*C written.
__global__ void __launch_bounds__(128)
permute_backward_kernel2(bf16* d_inp, const bf16* d_expert_in, const int* slot_row, const float* d_router_logits,
                         const bf16* router, size_t N, int K, size_t C, int E) {
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32 * PERMUTE_TOKENS;
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) {
        float sums[PERMUTE_TOKENS][8] = {};
        for (int k = 0; k < K; k++) { // k and then e ascend, so the sum has one order and the result one value
            float rows[PERMUTE_TOKENS][8] = {};
            #pragma unroll
            for (int t = 0; t < PERMUTE_TOKENS; t++) {
                if (first + t < N) { load8(rows[t], d_expert_in + slot_row[(first + t) * K + k] * C + c); }
            }
            #pragma unroll
            for (int t = 0; t < PERMUTE_TOKENS; t++) {
                #pragma unroll
                for (int i = 0; i < 8; i++) { sums[t][i] += rows[t][i]; }
            }
        }
        for (int e = 0; e < E; e++) {
            float w[8];
            load8(w, router + e * C + c);
            #pragma unroll
            for (int t = 0; t < PERMUTE_TOKENS; t++) {
                float d_logit = first + t < N ? d_router_logits[(first + t) * E + e] : 0;
                #pragma unroll
                for (int i = 0; i < 8; i++) { sums[t][i] += d_logit * w[i]; }
            }
        }
        #pragma unroll
        for (int t = 0; t < PERMUTE_TOKENS; t++) {
            if (first + t < N) { store8(d_inp + (first + t) * C + c, sums[t]); }
        }
    }
}

void permute_backward(bf16* d_inp, const bf16* d_expert_in, const int* slot_row, const float* d_router_logits,
                      const bf16* router, size_t N, int K, size_t C, int E, cudaStream_t stream) {
    // d_inp (N,C)[n,:] = sum over k of d_expert_in (R,C)[slot_row[n,k],:] + sum over e of d_router_logits (N,E)[n,e]
    // router (E,C)[e,:]: all that reaches the router's and the experts' common input
    if (C % 8 != 0) { fatal("permute_backward: C must be a multiple of 8, is %zu", C); }
    if (N == 0) { return; }
    permute_backward_kernel2<<<ceil_div(N, 4 * PERMUTE_TOKENS), 128, 0, stream>>>(d_inp, d_expert_in, slot_row,
                                                                                  d_router_logits, router, N, K, C, E);
    launchCheck("permute_backward_kernel2");
}

// A warp owns a token, 16 bytes a lane. Bound by bandwidth: R*C read, N*C written.
__global__ void __launch_bounds__(256)
combine_forward_kernel2(bf16* out, const bf16* expert_out, const float* router_weights, const int* slot_row,
                        size_t N, int K, size_t C) {
    size_t n = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (n >= N) { return; }
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) {
        float sum[8] = {};
        for (int k = 0; k < K; k++) { // k ascends, so the sum has one order and the result one value
            float row[8], w = router_weights[n * K + k];
            load8(row, expert_out + slot_row[n * K + k] * C + c);
            #pragma unroll
            for (int i = 0; i < 8; i++) { sum[i] += w * row[i]; }
        }
        store8(out + n * C + c, sum);
    }
}

void combine_forward(bf16* out, const bf16* expert_out, const float* router_weights, const int* slot_row, size_t N,
                     int K, size_t C, cudaStream_t stream) {
    // out (N,C)[n,:] = sum over k of router_weights (N,K)[n,k] * expert_out (R,C)[slot_row[n,k],:]
    if (C % 8 != 0) { fatal("combine_forward: C must be a multiple of 8, is %zu", C); }
    if (N == 0) { return; }
    combine_forward_kernel2<<<ceil_div(N, 8), 256, 0, stream>>>(out, expert_out, router_weights, slot_row, N, K, C);
    launchCheck("combine_forward_kernel2");
}

// A warp owns a row, 16 bytes a lane; the dot product is a sum over the warp. Bound by bandwidth: 2*R*C read, R*C
// written.
__global__ void __launch_bounds__(256)
combine_backward_kernel2(bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out, const bf16* expert_out,
                         const float* router_weights, const int* row_slot, size_t R, int K, size_t C) {
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= R) { return; } // the whole warp: nobody is missing from the sum below
    size_t slot = row_slot[row];
    float w = router_weights[slot], dot = 0;
    for (size_t c = 8 * (threadIdx.x % 32); c < C; c += 256) {
        float d[8], x[8];
        load8(d, d_out + slot / K * C + c);
        load8(x, expert_out + row * C + c);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            dot += d[i] * x[i];
            d[i] *= w;
        }
        store8(d_expert_out + row * C + c, d);
    }
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) { d_router_weight_rows[row] = dot; }
}

void combine_backward(bf16* d_expert_out, float* d_router_weight_rows, const bf16* d_out, const bf16* expert_out,
                      const float* router_weights, const int* row_slot, size_t R, int K, size_t C,
                      cudaStream_t stream) {
    // d_expert_out (R,C)[row,:] = weight of its slot * d_out (N,C)[its token,:]; d_router_weight_rows (R)[row] =
    // d_out[its token,:] . expert_out (R,C)[row,:]
    if (C % 8 != 0) { fatal("combine_backward: C must be a multiple of 8, is %zu", C); }
    if (R == 0) { return; }
    combine_backward_kernel2<<<ceil_div(R, 8), 256, 0, stream>>>(d_expert_out, d_router_weight_rows, d_out, expert_out,
                                                                 router_weights, row_slot, R, K, C);
    launchCheck("combine_backward_kernel2");
}

// ----------------------------------------------------------------------------
// experts: each a SwiGLU MLP (Shazeer 2020), down(silu(gate(x)) * up(x)). A dense layer is one of them for all tokens.

// The only sigmoid of this program: backward computes act again from gate and up and must find the same bits.
// (Fast division and exponential, each within 2 ulp of fp32; exp(-x) = inf gives 0.)
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ inline void swiglu8(float (&act)[8], const float (&gate)[8], const float (&up)[8]) {
    #pragma unroll
    for (int q = 0; q < 8; q++) { act[q] = gate[q] * sigmoid(gate[q]) * up[q]; }
}

// silu'(x) = s + x s (1 - s) with s = sigmoid(x). d_gate may be gate, d_up may be up.
__device__ inline void swiglu8_backward(float (&d_gate)[8], float (&d_up)[8], const float (&d_act)[8],
                                        const float (&gate)[8], const float (&up)[8]) {
    #pragma unroll
    for (int q = 0; q < 8; q++) {
        float g = gate[q], u = up[q], s = sigmoid(g);
        d_gate[q] = d_act[q] * u * (s * (1 + g * (1 - s)));
        d_up[q] = d_act[q] * (g * s);
    }
}

// a thread for 8 columns, whole warps, at most 128 threads: small blocks fill an SM as well as large ones here
dim3 swiglu_block(size_t F) { return dim3(F / 8 > 96 ? 128 : (unsigned)ceil_div(F / 8, 32) * 32); }

dim3 swiglu_grid(size_t N, size_t F) {
    if (F % 8 != 0) { fatal("swiglu: intermediate size must be padded to a multiple of 8, is %zu", F); }
    if (N > INT_MAX || F > INT_MAX / 4) { fatal("swiglu: %zu rows of %zu are more than it can count", N, F); }
    return dim3((unsigned)N, (unsigned)ceil_div(F / 8, swiglu_block(F).x));
}

// A block owns a row, or threads * 8 columns of it; a thread owns 8 neighbouring columns: two 16-byte loads and a
// 16-byte store, and no division to find its row. Bound by bandwidth: 6 bytes an element, some 20 instructions.
__global__ void swiglu_forward_kernel2(bf16* act, const bf16* gate_up, int F) {
    int f = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (f >= F) { return; }
    const bf16* row = gate_up + (size_t)blockIdx.x * 2 * F;
    float gate[8], up[8], out[8];
    load8(gate, row + f);
    load8(up, row + F + f);
    swiglu8(out, gate, up);
    store8(act + (size_t)blockIdx.x * F + f, out);
}

void swiglu_forward(bf16* act, const bf16* gate_up, size_t N, size_t F, cudaStream_t stream) {
    // act (N,F) = silu(gate) * up; gate_up (N,2F) holds gate, then up
    if (N == 0 || F == 0) { return; }
    swiglu_forward_kernel2<<<swiglu_grid(N, F), swiglu_block(F), 0, stream>>>(act, gate_up, (int)F);
    launchCheck("swiglu_forward_kernel2");
}

// As above, bound by bandwidth: 10 bytes an element. Each thread has read its 8 gates and ups before it overwrites
// them, if it does.
__global__ void swiglu_backward_kernel2(bf16* d_gate_up, const bf16* d_act, const bf16* gate_up, int F) {
    int f = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (f >= F) { return; }
    const bf16* row = gate_up + (size_t)blockIdx.x * 2 * F;
    bf16* d_row = d_gate_up + (size_t)blockIdx.x * 2 * F;
    float gate[8], up[8], d[8];
    load8(gate, row + f);
    load8(up, row + F + f);
    load8(d, d_act + (size_t)blockIdx.x * F + f);
    swiglu8_backward(gate, up, d, gate, up);
    store8(d_row + f, gate);
    store8(d_row + F + f, up);
}

void swiglu_backward(bf16* d_gate_up, const bf16* d_act, const bf16* gate_up, size_t N, size_t F, cudaStream_t stream) {
    // d_gate_up (N,2F) =; it may be gate_up itself
    if (N == 0 || F == 0) { return; }
    swiglu_backward_kernel2<<<swiglu_grid(N, F), swiglu_block(F), 0, stream>>>(d_gate_up, d_act, gate_up, (int)F);
    launchCheck("swiglu_backward_kernel2");
}

void mlp_forward(bf16* out, bf16* act, bf16* gate_up, const bf16* inp, const bf16* gate_up_proj, const bf16* down_proj,
                 size_t N, size_t C, size_t F, cudaStream_t stream) {
    // out (N,C) = swiglu(inp gate_up_proj^T) down_proj^T; gate_up (N,2F) and act (N,F) are kept
    matmul_forward(gate_up, inp, gate_up_proj, N, C, 2 * F, stream);
    swiglu_forward(act, gate_up, N, F, stream);
    matmul_forward(out, act, down_proj, N, F, C, stream);
}

void mlp_backward(bf16* d_inp, float* d_gate_up_proj, float* d_down_proj, bf16* d_gate_up, bf16* d_act,
                  const bf16* d_out, const bf16* inp, const bf16* act, const bf16* gate_up, const bf16* gate_up_proj,
                  const bf16* down_proj, size_t N, size_t C, size_t F, cudaStream_t stream) {
    // d_inp (N,C), d_gate_up (N,2F), d_act (N,F) =; d_gate_up_proj, d_down_proj +=. d_gate_up may be gate_up itself
    matmul_backward(d_act, d_down_proj, d_out, act, down_proj, N, F, C, stream);
    swiglu_backward(d_gate_up, d_act, gate_up, N, F, stream);
    matmul_backward(d_inp, d_gate_up_proj, d_gate_up, inp, gate_up_proj, N, C, 2 * F, stream);
}

// The tile core. A block of 4 warps computes a tile of 128 x COLS (COLS is 128 or 64) of a product of two bf16
// matrices, in fp32 on the tensor cores. The sum is walked in steps of 32; for each step shared memory takes 128 x 32
// of the left operand and 32 x COLS of the right one. There is room for three steps, one in use and two on their way:
//
//     bytes         left operand       right operand      (COLS = 128; 48 KiB in all, two blocks fit an SM)
//     stage 0       0     .. 8191      8192  .. 16383
//     stage 1       16384 ..           24576 ..
//     stage 2       32768 ..           40960 .. 49151
//
// The warps stand 2 x 2, each owns 64 x COLS/2. With tiles that large a step needs 16 loads of fragments for 64 mma;
// with eight warps of 64 x 32 it is half as many again, and shared memory becomes the limit.
//
// Where an operand comes from differs from product to product, and that is all that differs before the epilogue:
//     AlongK   the sum runs along rows of memory: inp and weight in inp weight^T, d_out in d_out weight
//     AcrossK  the sum runs across them:          weight in d_out weight, both in d_out^T inp
// What lies beyond an edge is copied as zeros (cpa16 reads nothing then), in both operands: 0 times whatever was there
// could be NaN.

const int TILE_STEP = 32, TILE_STAGES = 3, TILE_THREADS = 128;

// Tile row r of the operand is a row of memory, from wherever the kernel says: a gather costs nothing here.
//
// In shared memory a row is 64 bytes, four chunks of 16. ldmatrix reads one chunk of 8 rows at a time, and these must
// lie in different banks (128 bytes, two rows): chunk c of row r is kept at place c ^ (r / 2 % 4).
//     place      0 1 2 3
//     row 0, 1   0 1 2 3
//     row 2, 3   1 0 3 2
//     row 4, 5   2 3 0 1
//     row 6, 7   3 2 1 0
template <int ROWS> struct AlongK {
    static constexpr int COPIES = ROWS * 4 / TILE_THREADS; // chunks that a thread copies a step
    const bf16* row[COPIES]; // beginnings of its tile rows t / 4 + 32 i
    unsigned inside;         // bit i: row[i] exists
    int length;              // of the sum

    // row_of(r): where tile row r begins, NULL if there is none. matrix: any valid address
    template <class RowOf> __device__ AlongK(const bf16* matrix, int length, RowOf row_of) : inside(0), length(length) {
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const bf16* p = row_of((int)threadIdx.x / 4 + 32 * i);
            row[i] = p != NULL ? p : matrix;
            inside |= (unsigned)(p != NULL) << i;
        }
    }

    static __device__ bf16* place(bf16* tile, int r, int chunk) {
        return tile + r * TILE_STEP + (chunk ^ (r >> 1 & 3)) * 8;
    }

    __device__ void load(bf16* tile, int k0) {
        int chunk = threadIdx.x % 4, k = k0 + chunk * 8;
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            cpa16(place(tile, (int)threadIdx.x / 4 + 32 * i, chunk), row[i] + k, (inside >> i & 1) && k < length);
        }
    }

    // as left operand: rows m .. m+15, k .. k+15;  as right operand: columns n .. n+15, two n8 tiles
    static __device__ void left(uint32_t (&a)[4], bf16* tile, int m, int k) {
        int lane = threadIdx.x % 32;
        ldsm4(a, place(tile, m + lane % 16, k / 8 + lane / 16));
    }
    static __device__ void right(uint32_t (&b)[4], bf16* tile, int n, int k) {
        int lane = threadIdx.x % 32;
        ldsm4(b, place(tile, n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2));
    }
};

// Row k of the sum is row k of memory, or with GATHER row row_token[k]; the tile takes COLS neighbouring columns of it.
//
// In shared memory it stays that way round, 32 rows of COLS; ldmatrix transposes on the way to the registers. Chunk c
// of row k is kept at place c ^ (k % 8).
template <int COLS, bool GATHER> struct AcrossK {
    static constexpr int CHUNKS = COLS / 8;            // of a row
    static constexpr int ROWS = TILE_THREADS / CHUNKS; // that the block copies at a time
    static constexpr int COPIES = TILE_STEP / ROWS;    // chunks that a thread copies a step: rows t / CHUNKS + ROWS i
    const bf16* column; // this thread's first
    bool inside;        // it exists
    size_t stride;      // from a row to the next
    int length;         // of the sum
    const int* row_token;
    int token[COPIES]; // of the rows to copy next: looked up a step ahead, or each step would wait for memory twice

    // matrix with `columns` columns; the tile begins at column `first`
    __device__ AcrossK(const bf16* matrix, int columns, int first, int length, const int* row_token)
        : stride(columns), length(length), row_token(row_token) {
        int c = first + (int)threadIdx.x % CHUNKS * 8;
        inside = c < columns;
        column = matrix + (inside ? c : 0);
        if (GATHER) { look_up(0); }
    }

    __device__ void look_up(int k0) {
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int k = k0 + (int)threadIdx.x / CHUNKS + ROWS * i;
            token[i] = k < length ? row_token[k] : 0;
        }
    }

    static __device__ bf16* place(bf16* tile, int k, int chunk) { return tile + k * COLS + (chunk ^ (k & 7)) * 8; }

    __device__ void load(bf16* tile, int k0) {
        int r = (int)threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        #pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int k = k0 + r + ROWS * i;
            const bf16* from = column + (size_t)(GATHER ? token[i] : k) * stride;
            cpa16(place(tile, r + ROWS * i, chunk), from, inside && k < length);
        }
        if (GATHER) { look_up(k0 + TILE_STEP); }
    }

    static __device__ void left(uint32_t (&a)[4], bf16* tile, int m, int k) {
        int lane = threadIdx.x % 32;
        ldsm4t(a, place(tile, k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2));
    }
    static __device__ void right(uint32_t (&b)[4], bf16* tile, int n, int k) {
        int lane = threadIdx.x % 32;
        ldsm4t(b, place(tile, k + lane % 16, n / 8 + lane / 16));
    }
};

size_t tile_shared_bytes(int cols) { return sizeof(bf16) * TILE_STAGES * TILE_STEP * (TILE_ROWS + cols); }

// This thread's place in the tile: acc[i][j][2 h + q] of matmul_tile is element
//     row tile_row(2 i + h), column tile_column<COLS>() + 8 j + 2 (threadIdx.x % 4) + q
__device__ inline int tile_row(int part) {
    return threadIdx.x / 32 % 2 * 64 + part * 8 + threadIdx.x % 32 / 4;
}
template <int COLS> __device__ inline int tile_column() { return threadIdx.x / 64 * (COLS / 2); }

// acc += left operand times right operand, sum of `length` products each. One barrier a step.
template <int COLS, class Left, class Right>
__device__ inline void matmul_tile(float (&acc)[4][COLS / 16][4], Left& left, Right& right, int length) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    constexpr int LEFT_SIZE = TILE_ROWS * TILE_STEP, STAGE_SIZE = LEFT_SIZE + COLS * TILE_STEP;
    int warp_row = threadIdx.x / 32 % 2 * 64, warp_column = tile_column<COLS>();
    int steps = (length + TILE_STEP - 1) / TILE_STEP;
    auto stage_of = [&](int step) { return (bf16*)shared_bytes + step % TILE_STAGES * STAGE_SIZE; };
    auto load_step = [&](int step) {
        if (step < steps) {
            left.load(stage_of(step), step * TILE_STEP);
            right.load(stage_of(step) + LEFT_SIZE, step * TILE_STEP);
        }
        cpa_commit(); // an empty group too: cpa_wait counts them
    };
    for (int step = 0; step < TILE_STAGES - 1; step++) { load_step(step); }
    for (int step = 0; step < steps; step++) {
        cpa_wait<TILE_STAGES - 2>();
        __syncthreads(); // this step has landed for all threads; all are done with the one before: its stage is free
        load_step(step + TILE_STAGES - 1);
        bf16 *left_tile = stage_of(step), *right_tile = left_tile + LEFT_SIZE;
        #pragma unroll
        for (int k = 0; k < TILE_STEP; k += 16) {
            uint32_t a[4][4];
            #pragma unroll
            for (int i = 0; i < 4; i++) { Left::left(a[i], left_tile, warp_row + i * 16, k); }
            #pragma unroll
            for (int j = 0; j < COLS / 16; j += 2) {
                uint32_t b[4];
                Right::right(b, right_tile, warp_column + j * 8, k);
                uint32_t b_first[2] = {b[0], b[1]}, b_second[2] = {b[2], b[3]};
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    mma16816(acc[i][j], a[i], b_first);
                    mma16816(acc[i][j + 1], a[i], b_second);
                }
            }
        }
    }
}

// 8 of a thread's accumulators: of the n8 tiles j .. j+3 the two of each that lie in row tile_row(part)
template <int TILES>
__device__ inline void tile_take8(float (&v)[8], const float (&acc)[4][TILES][4], int part, int j) {
    #pragma unroll
    for (int q = 0; q < 8; q++) { v[q] = acc[part / 2][j + q / 2][part % 2 * 2 + q % 2]; }
}

// The epilogues want to store 16 bytes, 8 neighbouring columns, but mma leaves a thread two columns of each n8 tile:
//     column of the 32     0 1   2 3   4 5   6 7 | 8 9  10 11 12 13 14 15 | ...
//     lane of the quad      0     1     2     3  |  0     1     2     3   | ...
// Two ways out. Where tile columns are rows of memory (AlongK), which row goes where is ours to choose: tile column n
// takes column tile_column_order(n) of its 32, and lane t ends up with columns 8 t .. 8 t + 7 in its four n8 tiles.
__device__ inline int tile_column_order(int n) { return n % 8 / 2 * 8 + n / 8 % 4 * 2 + n % 2; }

// Where they are columns of memory (AcrossK), the four lanes of a quad exchange: v holds four pairs, pair j of lane t
// becomes pair t of lane j. Two rounds, with the neighbour lane and with the one after it.
__device__ inline void quad_transpose(float (&v)[8]) {
    #pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        bool upper = (threadIdx.x & bit) != 0;
        #pragma unroll
        for (int low = 0; low < 8; low++) { // element low / 2 is a pair without the bit, high the one with it
            int high = low + 2 * bit;
            if ((low / 2 & bit) != 0) { continue; }
            float got = __shfl_xor_sync(0xffffffff, upper ? v[low] : v[high], bit);
            if (upper) {
                v[low] = got;
            } else {
                v[high] = got;
            }
        }
    }
}

// The products of all experts. Each is a group of products that differ in their number of rows, which only the GPU
// knows: a list of tiles, 128 rows of one expert each, says which block does what (grouped GEMM without capacity or
// dropped tokens: MegaBlocks, Gale et al. 2022; rows found by token inside it: ScatterMoE, Tan et al. 2024). x is the
// fastest coordinate of the grid: blocks that share a tile's rows run at the same time, and the rows come from memory
// once. All are bound by the tensor cores, on Hopper by the issue slots of mma.sync.

dim3 experts_grid(size_t columns, int block_columns, size_t R, size_t C, size_t F, int E) {
    // Tiles of rows in y: R/128 + E are enough for any routing, since each expert adds at most one that is not full;
    // the blocks that are not needed find -1 in tile_list. So the host need not know how the tokens were routed.
    size_t tiles = R / TILE_ROWS + (size_t)E;
    if (C % 8 != 0) { fatal("experts: hidden_size must be padded to a multiple of 8, is %zu", C); }
    if (F % 8 != 0) { fatal("experts: moe_intermediate_size must be padded to a multiple of 8, is %zu", F); }
    if (C > INT_MAX / 4 || F > INT_MAX / 4 || R > INT_MAX) { fatal("experts: (%zu, %zu, %zu) is too large", R, C, F); }
    if (tiles > 65535) { fatal("experts: %zu rows for %d experts are %zu tiles, at most 65535 fit", R, E, tiles); }
    return dim3((unsigned)ceil_div(columns, block_columns), (unsigned)tiles);
}

// gate_up (R,2F) = rows row_token of inp (N,C) times gate_up_proj[e]^T; expert_act (R,F) = silu(gate) * up. A block
// owns 128 rows x 64 gate columns and the 64 up columns that belong to them: of the 64 tile columns of a warp the first
// 32 are rows of the gate matrix and the next 32 the same rows of the up matrix, so each thread holds both halves of
// its products.
__global__ void __launch_bounds__(TILE_THREADS)
experts_gate_up_forward_kernel5(bf16* gate_up, bf16* expert_act, const bf16* inp, const bf16* gate_up_proj,
                                const int* row_token, const int4* tile_list, int C, int F) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, f0 = blockIdx.x * 64;
    const bf16* w = gate_up_proj + (size_t)tile.x * 2 * F * C;
    AlongK<128> left(inp, C, [&](int r) { return row0 + r < end ? inp + (size_t)row_token[row0 + r] * C : NULL; });
    AlongK<128> right(w, C, [&](int n) {
        int f = f0 + n / 64 * 32 + tile_column_order(n % 32), is_up = n / 32 % 2;
        return f < F ? w + (size_t)(is_up * F + f) * C : NULL;
    });
    float acc[4][8][4] = {};
    matmul_tile<128>(acc, left, right, C);
    int f = f0 + (int)threadIdx.x / 64 * 32 + (int)threadIdx.x % 4 * 8;
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int r = row0 + tile_row(part);
        float gate[8], up[8], act[8];
        tile_take8(gate, acc, part, 0);
        tile_take8(up, acc, part, 4);
        #pragma unroll
        for (int q = 0; q < 8; q++) { // act is made of what backward will find in memory
            gate[q] = round_bf16(gate[q]);
            up[q] = round_bf16(up[q]);
        }
        swiglu8(act, gate, up);
        if (r < end && f < F) {
            store8(gate_up + (size_t)r * 2 * F + f, gate);
            store8(gate_up + (size_t)r * 2 * F + F + f, up);
            store8(expert_act + (size_t)r * F + f, act);
        }
    }
}

void experts_gate_up(bf16* gate_up, bf16* expert_act, const bf16* inp, const bf16* gate_up_proj, Routing r, size_t R,
                     size_t C, size_t F, int E, cudaStream_t stream) {
    // gate_up (R,2F) = rows of inp (N,C) times gate_up_proj[e]^T, expert_act (R,F) = swiglu of it
    if (R == 0) { return; }
    experts_gate_up_forward_kernel5<<<experts_grid(F, 64, R, C, F, E), TILE_THREADS, tile_shared_bytes(128), stream>>>(
        gate_up, expert_act, inp, gate_up_proj, r.row_token, r.tile_list, (int)C, (int)F);
    launchCheck("experts_gate_up_forward_kernel5");
}

// out (R,OC) = inp (R,C) weight[e]^T with weight[e] (OC,C), or, if not TRANSPOSED, inp weight[e] with weight[e] (C,OC):
// forward, and the gradient of inp from that of out. A block owns 128 rows x 128 columns, a thread 8 x 16 of them, and
// stores 8 neighbours at a time, 16 bytes. TRANSPOSED: tile columns are rows of weight, taken in the order that gives a
// thread its neighbours. Otherwise they are columns, whose order is given, and the lanes of a quad exchange.
template <bool TRANSPOSED>
__global__ void __launch_bounds__(TILE_THREADS)
grouped_matmul_kernel3(bf16* out, const bf16* inp, const bf16* weight, const int4* tile_list, int C, int OC) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, o0 = blockIdx.x * 128;
    const bf16* w = weight + (size_t)tile.x * OC * C;
    AlongK<128> left(inp, C, [&](int r) { return row0 + r < end ? inp + (size_t)(row0 + r) * C : NULL; });
    float acc[4][8][4] = {};
    if constexpr (TRANSPOSED) {
        AlongK<128> right(w, C, [&](int n) {
            int o = o0 + n / 32 * 32 + tile_column_order(n % 32);
            return o < OC ? w + (size_t)o * C : NULL;
        });
        matmul_tile<128>(acc, left, right, C);
    } else {
        AcrossK<128, false> right(w, OC, o0, C, NULL);
        matmul_tile<128>(acc, left, right, C);
    }
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int r = row0 + tile_row(part);
        #pragma unroll
        for (int j = 0; j < 8; j += 4) {
            int o = o0 + tile_column<128>() + j * 8 + threadIdx.x % 4 * 8;
            float v[8];
            tile_take8(v, acc, part, j);
            if constexpr (!TRANSPOSED) { quad_transpose(v); }
            if (r < end && o < OC) { store8(out + (size_t)r * OC + o, v); }
        }
    }
}

template <bool TRANSPOSED>
void grouped_matmul(bf16* out, const bf16* inp, const bf16* weight, Routing r, size_t R, size_t C, size_t OC, int E,
                    cudaStream_t stream) {
    // out (R,OC) = inp (R,C) weight[e]^T, weight (E,OC,C); if not TRANSPOSED inp weight[e], weight (E,C,OC)
    grouped_matmul_kernel3<TRANSPOSED><<<experts_grid(OC, 128, R, C, OC, E), TILE_THREADS, tile_shared_bytes(128),
                                         stream>>>(out, inp, weight, r.tile_list, (int)C, (int)OC);
    launchCheck("grouped_matmul_kernel3");
}

void experts_forward(bf16* expert_out, bf16* gate_up, bf16* expert_act, const bf16* inp, const bf16* gate_up_proj,
                     const bf16* down_proj, Routing r, size_t R, size_t C, size_t F, int E, cudaStream_t stream) {
    // expert_out (R,C) = of each row its expert's MLP, not yet weighted. inp (N,C) is read by token: no expert_in.
    // Backward needs gate_up (R,2F) only
    if (R == 0) { return; }
    experts_gate_up(gate_up, expert_act, inp, gate_up_proj, r, R, C, F, E, stream);
    grouped_matmul<true>(expert_out, expert_act, down_proj, r, R, F, C, E, stream);
}

// The backward of down_proj, SwiGLU and the router's weight in one. With d = rows row_token of d_out (N,C) times
// down_proj[e] and w the row's router weight, expert_out = expert_act down_proj^T gives
//     gradient of w      d_out . expert_out = d . expert_act, so expert_out need not be kept; router_partials[i] (R)
//                        has the part of columns 64 i .. 64 i + 63, for router_backward to add in order
//     gradient of act    w d, and through SwiGLU the gradients of gate and up, written over gate_up (R,2F)
//     expert_act (R,F)   = w act: what the gradient of down_proj multiplies with d_out's rows
// act is computed again, bit by bit, from gate and up. A block owns 128 rows x 128 columns of d. A thread reads 16
// bytes of gate_up and writes the same 16 bytes: nobody else needs them.
__global__ void __launch_bounds__(TILE_THREADS)
experts_down_backward_kernel5(bf16* gate_up, bf16* expert_act, float* router_partials, const bf16* d_out,
                              const bf16* down_proj, const float* router_weights, const int* row_slot,
                              const int* row_token, const int4* tile_list, size_t R, int C, int F) {
    int4 tile = tile_list[blockIdx.y];
    if (tile.x < 0) { return; } // past the last tile
    int row0 = tile.y, end = tile.z, f0 = blockIdx.x * 128;
    AlongK<128> left(d_out, C, [&](int r) { return row0 + r < end ? d_out + (size_t)row_token[row0 + r] * C : NULL; });
    AcrossK<128, false> right(down_proj + (size_t)tile.x * C * F, F, f0, C, NULL);
    float acc[4][8][4] = {};
    matmul_tile<128>(acc, left, right, C);
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int r = row0 + tile_row(part);
        float w = r < end ? router_weights[row_slot[r]] : 0, dot = 0;
        #pragma unroll
        for (int j = 0; j < 8; j += 4) {
            int f = f0 + tile_column<128>() + j * 8 + (int)threadIdx.x % 4 * 8;
            float d[8], gate[8], up[8], act[8];
            tile_take8(d, acc, part, j);
            quad_transpose(d);
            if (r < end && f < F) {
                bf16* gate_up_rf = gate_up + (size_t)r * 2 * F + f;
                load8(gate, gate_up_rf);
                load8(up, gate_up_rf + F);
                swiglu8(act, gate, up);
                #pragma unroll
                for (int q = 0; q < 8; q++) {
                    act[q] = round_bf16(act[q]);
                    dot += d[q] * act[q];
                    act[q] *= w;
                    d[q] *= w;
                }
                swiglu8_backward(gate, up, d, gate, up);
                store8(gate_up_rf, gate);
                store8(gate_up_rf + F, up);
                store8(expert_act + (size_t)r * F + f, act);
            }
        }
        dot = warp_sum(dot, 4); // over the four lanes that share the row
        if (threadIdx.x % 4 == 0 && r < end) {
            router_partials[(blockIdx.x * 2 + threadIdx.x / 64) * R + r] = dot;
        }
    }
}

int experts_num_partials(size_t F) {
    // pieces of each router weight's gradient: one for 64 columns of expert_act, an even number
    return (int)(2 * ceil_div(F, 128));
}

// d_weight[e] (OC,C) += d_out^T inp over the rows of expert e. With GATHER_OUT, GATHER_INP that operand has a row for
// each token and is read by row_token, else it has a row for each routed row. A block owns 128 x COLS (64 where 128
// would leave too few blocks to fill the card) and sums all rows of e in one order; no other block touches its part.
// Four lanes write 8 bytes each: a sector.
template <int COLS, bool GATHER_OUT, bool GATHER_INP>
__global__ void __launch_bounds__(TILE_THREADS)
grouped_matmul_backward_weight_kernel4(float* d_weight, const bf16* d_out, const bf16* inp, const int* row_token,
                                       const int* expert_offsets, int C, int OC) {
    int e = blockIdx.z, row0 = expert_offsets[e], rows = expert_offsets[e + 1] - row0;
    int o0 = blockIdx.y * TILE_ROWS, c0 = blockIdx.x * COLS;
    if (rows == 0) { return; } // nothing to add
    AcrossK<TILE_ROWS, GATHER_OUT> left(GATHER_OUT ? d_out : d_out + (size_t)row0 * OC, OC, o0, rows, row_token + row0);
    AcrossK<COLS, GATHER_INP> right(GATHER_INP ? inp : inp + (size_t)row0 * C, C, c0, rows, row_token + row0);
    float acc[4][COLS / 16][4] = {};
    matmul_tile<COLS>(acc, left, right, rows);
    #pragma unroll
    for (int part = 0; part < 8; part++) {
        int o = o0 + tile_row(part);
        #pragma unroll
        for (int j = 0; j < COLS / 16; j++) {
            int c = c0 + tile_column<COLS>() + j * 8 + threadIdx.x % 4 * 2;
            if (o >= OC || c >= C) { continue; }
            float2* p = (float2*)(d_weight + ((size_t)e * OC + o) * C + c);
            float2 sum = *p;
            *p = make_float2(sum.x + acc[part / 2][j][part % 2 * 2], sum.y + acc[part / 2][j][part % 2 * 2 + 1]);
        }
    }
}

template <int COLS, bool GATHER_OUT, bool GATHER_INP>
void grouped_matmul_backward_weight(float* d_weight, const bf16* d_out, const bf16* inp, Routing r, size_t C, size_t OC,
                                    int E, cudaStream_t stream) {
    // d_weight[e] (OC,C) += d_out^T inp over the rows of e. A block for each tile and expert
    if (E > 65535 || ceil_div(OC, TILE_ROWS) > 65535) { fatal("experts: %d experts of %zu rows are too many", E, OC); }
    dim3 grid((unsigned)ceil_div(C, COLS), (unsigned)ceil_div(OC, TILE_ROWS), (unsigned)E);
    grouped_matmul_backward_weight_kernel4<COLS, GATHER_OUT, GATHER_INP>
        <<<grid, TILE_THREADS, tile_shared_bytes(COLS), stream>>>(d_weight, d_out, inp, r.row_token, r.expert_offsets,
                                                                  (int)C, (int)OC);
    launchCheck("grouped_matmul_backward_weight_kernel4");
}

void experts_backward(bf16* d_expert_in, float* d_gate_up_proj, float* d_down_proj, float* router_partials,
                      bf16* gate_up, bf16* expert_act, const bf16* d_out, const bf16* inp, const bf16* gate_up_proj,
                      const bf16* down_proj, const float* router_weights, Routing r, size_t R, size_t C, size_t F,
                      int E, cudaStream_t stream) {
    // d_expert_in (R,C) =, d_gate_up_proj, d_down_proj +=, router_partials (experts_num_partials(F), R) =. d_out (N,C)
    // is the gradient of the combined output. gate_up comes in as forward left it and goes out as its gradient;
    // expert_act is scratch
    if (R == 0) { return; }
    experts_down_backward_kernel5<<<experts_grid(F, 128, R, C, F, E), TILE_THREADS, tile_shared_bytes(128), stream>>>(
        gate_up, expert_act, router_partials, d_out, down_proj, router_weights, r.row_slot, r.row_token, r.tile_list, R,
        (int)C, (int)F);
    launchCheck("experts_down_backward_kernel5");
    const bf16 *d_gate_up = gate_up, *weighted_act = expert_act; // what these two hold from here on
    grouped_matmul_backward_weight<64, true, false>(d_down_proj, d_out, weighted_act, r, F, C, E, stream);
    grouped_matmul_backward_weight<128, false, true>(d_gate_up_proj, d_gate_up, inp, r, C, 2 * F, E, stream);
    grouped_matmul<false>(d_expert_in, d_gate_up, gate_up_proj, r, R, 2 * F, C, E, stream);
}

void experts_loop_forward(bf16* expert_out, bf16* gate_up, bf16* expert_act, bf16* expert_in, int* host_offsets,
                          const bf16* inp, const bf16* gate_up_proj, const bf16* down_proj, Routing r, size_t R,
                          size_t C, size_t F, int E, cudaStream_t stream) {
    // --experts loop: one expert after another, each a dense MLP. The host must know where each one's rows begin:
    // host_offsets (E+1), pinned, is copied from the device, and the device idles while it waits
    if (R == 0) { return; }
    cudaCheck(cudaMemcpyAsync(host_offsets, r.expert_offsets, (E + 1) * sizeof(int), cudaMemcpyDeviceToHost, stream));
    streamWait(stream);
    permute_forward(expert_in, inp, r.row_token, R, C, stream);
    for (size_t e = 0; e < (size_t)E; e++) {
        size_t begin = (size_t)host_offsets[e], rows = (size_t)host_offsets[e + 1] - begin;
        mlp_forward(expert_out + begin * C, expert_act + begin * F, gate_up + begin * 2 * F, expert_in + begin * C,
                    gate_up_proj + e * 2 * F * C, down_proj + e * C * F, rows, C, F, stream);
    }
}

void experts_loop_backward(bf16* d_expert_in, float* d_gate_up_proj, float* d_down_proj, float* d_router_weight_rows,
                           bf16* d_expert_out, bf16* d_gate_up, bf16* d_act, const bf16* d_out, const bf16* expert_in,
                           const bf16* expert_out, const bf16* expert_act, const bf16* gate_up,
                           const bf16* gate_up_proj, const bf16* down_proj, const float* router_weights,
                           const int* host_offsets, Routing r, size_t R, int K, size_t C, size_t F, int E,
                           cudaStream_t stream) {
    // d_expert_in (R,C), d_router_weight_rows (R) and the scratch d_expert_out (R,C), d_gate_up (R,2F), d_act (R,F) =;
    // d_gate_up_proj, d_down_proj +=. host_offsets as forward left it
    if (R == 0) { return; }
    combine_backward(d_expert_out, d_router_weight_rows, d_out, expert_out, router_weights, r.row_slot, R, K, C,
                     stream);
    for (size_t e = 0; e < (size_t)E; e++) {
        size_t begin = (size_t)host_offsets[e], rows = (size_t)host_offsets[e + 1] - begin;
        mlp_backward(d_expert_in + begin * C, d_gate_up_proj + e * 2 * F * C, d_down_proj + e * C * F,
                     d_gate_up + begin * 2 * F, d_act + begin * F, d_expert_out + begin * C, expert_in + begin * C,
                     expert_act + begin * F, gate_up + begin * 2 * F, gate_up_proj + e * 2 * F * C,
                     down_proj + e * C * F, rows, C, F, stream);
    }
}

// ----------------------------------------------------------------------------
// lm_head with its loss, in chunks of rows: the (N, V) logits never exist as a whole, and their gradient overwrites
// them. The products are matmul's; this is the loss: softmax and cross-entropy.

// maximum over a block of whole warps, at most 1024 threads; every thread gets it. warp_maxima: 32 floats of shared
// memory
__device__ inline float block_max(float x, float* warp_maxima) {
    x = warp_max(x);
    __syncthreads(); // all have read what an earlier call left in warp_maxima
    if (threadIdx.x % 32 == 0) { warp_maxima[threadIdx.x / 32] = x; }
    __syncthreads(); // the maxima of all warps are there
    return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? warp_maxima[threadIdx.x % 32] : -INFINITY);
}

// the 8 logits from column v on; padding becomes -inf, which no sum or maximum notices
__device__ inline void load_logits(float (&x)[8], const bf16* row, size_t v, size_t vocab_size) {
    load8(x, row + v);
    if (v + 8 <= vocab_size) { return; }
    #pragma unroll
    for (int i = 0; i < 8; i++) { x[i] = v + i < vocab_size ? x[i] : -INFINITY; }
}

// A block owns a row, a thread every 1024th group of 8 logits: 19 of them at V = 151936. Bound by memory: the row is
// read once from memory, once (mostly) from L2, and written once. Blocks as large as they get, so that the rows being
// worked on are few enough for L2 to hold (one or two an SM, 300 KB each). The 151936 terms of the sum are added as
// sums of 152 in a thread, then as a tree over the block, which keeps six digits in fp32.
// Powers of two are what the hardware has: e^(x - max) = 2^(x log2e - max_log2e). max_log2e is rounded, but it is the
// same number wherever it is subtracted, in the loss too, so that its rounding cancels.
__global__ void __launch_bounds__(1024) cross_entropy_kernel3(float* losses, bf16* logits, const int* targets, size_t V,
                                                              int vocab_size, float d_loss, bool want_grad) {
    __shared__ float scratch[32];
    const float log2e = 1.44269504f;
    size_t n = blockIdx.x, step = 8 * (size_t)blockDim.x, first = 8 * (size_t)threadIdx.x;
    int target = targets[n];
    bf16* row = logits + n * V;
    if (target < 0) { // the whole block
        if (threadIdx.x == 0) { losses[n] = 0; }
        if (!want_grad) { return; }
        for (size_t v = first; v < V; v += step) { store16(row + v, make_uint4(0, 0, 0, 0)); }
        return;
    }
    float target_logit = __bfloat162float(row[target]); // now, because it is overwritten below

    float x[8], max_log2e = -1e30f, sum = 0; // of the x so far; a NaN passes into sum
    for (size_t v = first; v < V; v += step) {
        load_logits(x, row, v, (size_t)vocab_size);
        float largest = x[0];
        #pragma unroll
        for (int i = 1; i < 8; i++) { largest = fmaxf(largest, x[i]); }
        float before = max_log2e;
        max_log2e = fmaxf(before, largest * log2e);
        sum *= exp2_approx(before - max_log2e);
        #pragma unroll
        for (int i = 0; i < 8; i++) { sum += exp2_approx(fmaf(x[i], log2e, -max_log2e)); }
    }
    float row_max = block_max(max_log2e, scratch);
    float row_sum = block_sum(sum * exp2_approx(max_log2e - row_max), scratch); // its barriers: row[target] was read
    if (threadIdx.x == 0) { losses[n] = logf(row_sum) - fmaf(target_logit, log2e, -row_max) / log2e; }
    if (!want_grad) { return; }

    float scale = d_loss / row_sum;
    size_t groups = first < V ? ceil_div(V - first, step) : 0;
    for (size_t group = groups; group-- > 0;) {
        size_t v = first + group * step;
        load_logits(x, row, v, (size_t)vocab_size);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            float p = exp2_approx(fmaf(x[i], log2e, -row_max));
            x[i] = scale * p - (v + i == (size_t)target ? d_loss : 0.0f);
        }
        store8(row + v, x);
    }
}

void cross_entropy(float* losses, bf16* logits, const int* targets, size_t rows, size_t V, int vocab_size, float d_loss,
                   bool want_grad, cudaStream_t stream) {
    // losses (rows) = -log softmax(logits[n,:])[targets[n]], 0 if targets[n] < 0; want_grad: logits (rows,V) =
    // d_loss * (softmax - one-hot); else they stay. V is padded: the columns from vocab_size on count nothing.
    if (rows == 0) { return; }
    if (V % 8 != 0 || vocab_size < 1 || (size_t)vocab_size > V || (uintptr_t)logits % 16 != 0) {
        fatal("cross_entropy: rows of %zu at %p must be whole groups of 16 bytes and hold vocab_size %d >= 1", V,
              (void*)logits, vocab_size);
    }
    size_t threads = V / 8 < 1024 ? 32 * ceil_div(V / 8, 32) : 1024; // 8 logits a thread at least
    cross_entropy_kernel3<<<(unsigned)rows, (unsigned)threads, 0, stream>>>(losses, logits, targets, V, vocab_size,
                                                                            d_loss, want_grad);
    launchCheck("cross_entropy_kernel3");
}

// One block, one order: a thread adds every 1024th loss. Bound by latency, once a microbatch.
__global__ void __launch_bounds__(1024) losses_add_kernel1(double* sum, const float* losses, size_t N) {
    __shared__ double warp_sums[32];
    double x = 0;
    for (size_t n = threadIdx.x; n < N; n += 1024) { x += losses[n]; }
    x = block_sum(x, warp_sums);
    if (threadIdx.x == 0) { *sum += x; }
}

void losses_add(double* sum, const float* losses, size_t N, cudaStream_t stream) {
    // sum (1) += sum of losses (N)
    if (N == 0) { return; }
    losses_add_kernel1<<<1, 1024, 0, stream>>>(sum, losses, N);
    launchCheck("losses_add_kernel1");
}

// ----------------------------------------------------------------------------
// grad norm and AdamW (Loshchilov and Hutter 2019), without the host: AdamW reads the norm on the device. Where it is
// not finite nothing is written; the host finds out later and stops.

// A block owns every gridDim-th piece of 512 * 4 numbers, a thread 4 neighbours of each: partials (gridDim) = the
// block's sum of squares. Bound by memory: each gradient is read once. (Where doubles are slow, at 1/64 of the floats'
// rate, their arithmetic takes about as long as the reading, beside it.)
__global__ void __launch_bounds__(512) grad_norm_kernel2(double* partials, const float* grads, size_t count) {
    __shared__ double warp_sums[32];
    double sum = 0;
    size_t step = (size_t)gridDim.x * 512 * 4;
    for (size_t i = ((size_t)blockIdx.x * 512 + threadIdx.x) * 4; i < count; i += step) {
        uint4 bits = load16(grads + i);
        double a = __uint_as_float(bits.x), b = __uint_as_float(bits.y);
        double c = __uint_as_float(bits.z), d = __uint_as_float(bits.w);
        sum += (a * a + b * b) + (c * c + d * d);
    }
    sum = block_sum(sum, warp_sums);
    if (threadIdx.x == 0) { partials[blockIdx.x] = sum; }
}

// one block adds the partial sums: bound by latency
__global__ void __launch_bounds__(512) grad_norm_sum_kernel2(float* norm, const double* partials, size_t num_partials) {
    __shared__ double warp_sums[32];
    double sum = 0;
    for (size_t i = threadIdx.x; i < num_partials; i += 512) { sum += partials[i]; }
    sum = block_sum(sum, warp_sums);
    if (threadIdx.x == 0) { *norm = (float)sqrt(sum); }
}

size_t grad_norm_doubles(size_t count) { // length of partials, = blocks: enough for any GPU, the same on each
    size_t pieces = ceil_div(count, 512 * 4);
    return pieces < 1024 ? pieces : 1024;
}

void grad_norm(float* norm, double* partials, const float* grads, size_t count, cudaStream_t stream) {
    // norm (1) = sqrt(sum of squares of grads (count)); partials (grad_norm_doubles(count)) is scratch
    if (count % 4 != 0 || (uintptr_t)grads % 16 != 0) {
        fatal("grad_norm: grads must be 16-byte aligned and a multiple of 4 numbers, are %zu at %p", count, grads);
    }
    size_t blocks = grad_norm_doubles(count);
    if (blocks > 0) {
        grad_norm_kernel2<<<(unsigned)blocks, 512, 0, stream>>>(partials, grads, count);
        launchCheck("grad_norm_kernel2");
    }
    grad_norm_sum_kernel2<<<1, 512, 0, stream>>>(norm, partials, blocks);
    launchCheck("grad_norm_sum_kernel2");
}

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2; // 1 - beta^t
    float grad_clip;                // largest norm of the gradients; 0: any
    uint64_t rounding_key;          // for stochastic rounding: another one each step
} AdamW;

// what the gradients are multiplied with, as torch.nn.utils.clip_grad_norm_
__device__ inline float clip_scale(float norm, float grad_clip) {
    return grad_clip > 0 ? fminf(1.0f, grad_clip / (norm + 1e-6f)) : 1.0f;
}

__device__ inline float adamw_update(float p, float m, float v, AdamW a, bool decays) {
    float keep = decays ? 1 - a.lr * a.weight_decay : 1.0f;
    return keep * p - a.lr / a.correction1 * m / (sqrtf(v) * (1 / sqrtf(a.correction2)) + a.eps);
}

// 64 random bits, a pure function of key and index: the finaliser of splitmix64, as hash64 of llmc/rand.h
__device__ inline uint64_t random_bits(uint64_t key, uint64_t index) {
    uint64_t x = key + (index + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Rounds x to one of its two neighbours in bf16, up with the probability that makes the mean x: a number of 16 random
// bits is added below the last bit that stays. One hash serves 4 elements; which bits an element gets depends on its
// index in the arena and on nothing else. The result, as a float, is exactly a bf16.
__device__ inline float round_stochastic(float x, uint64_t random, size_t element) {
    if (!isfinite(x)) { return x; }
    uint32_t bits = __float_as_uint(x) + (uint32_t)(random >> (16 * (element % 4)) & 0xffff);
    return __uint_as_float(bits & 0xffff0000u);
}

// --optimizer simple: the textbook way, a launch a formula and a range; a thread owns an element, a block 256. Bound by
// memory: grads, m and v are read twice.

__global__ void adamw_m_kernel1(float* m, const float* grads, const float* norm, size_t begin, size_t end, AdamW a) {
    size_t i = begin + (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= end || !isfinite(*norm)) { return; }
    m[i] = a.beta1 * m[i] + (1 - a.beta1) * (grads[i] * clip_scale(*norm, a.grad_clip));
}

__global__ void adamw_v_kernel1(float* v, const float* grads, const float* norm, size_t begin, size_t end, AdamW a) {
    size_t i = begin + (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= end || !isfinite(*norm)) { return; }
    float g = grads[i] * clip_scale(*norm, a.grad_clip);
    v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
}

__global__ void adamw_params_kernel1(bf16* params, float* master, const float* m, const float* v, const float* norm,
                                     size_t begin, size_t end, int decays, AdamW a) {
    size_t i = begin + (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= end || !isfinite(*norm)) { return; }
    float p = master != NULL ? master[i] : __bfloat162float(params[i]);
    p = adamw_update(p, m[i], v[i], a, decays);
    if (master != NULL) {
        master[i] = p;
    } else {
        p = round_stochastic(p, random_bits(a.rounding_key, i / 4), i);
    }
    params[i] = __float2bfloat16(p);
}

void adamw_simple(bf16* params, float* master, const float* grads, float* m, float* v, const float* norm,
                  const ParamRange* host_ranges, int num_ranges, size_t count, AdamW a, cudaStream_t stream) {
    // as adamw_fused, but host_ranges (ParamRange: llmc/config.h) lies on the host
    for (int r = 0; r < num_ranges; r++) {
        size_t begin = host_ranges[r].begin, end = host_ranges[r].end;
        if (begin > end || end > count) {
            fatal("adamw_simple: a range of the %zu parameters must lie in them, is %zu .. %zu", count, begin, end);
        }
        if (begin == end) { continue; }
        unsigned blocks = (unsigned)ceil_div(end - begin, 256);
        adamw_m_kernel1<<<blocks, 256, 0, stream>>>(m, grads, norm, begin, end, a);
        launchCheck("adamw_m_kernel1");
        adamw_v_kernel1<<<blocks, 256, 0, stream>>>(v, grads, norm, begin, end, a);
        launchCheck("adamw_v_kernel1");
        adamw_params_kernel1<<<blocks, 256, 0, stream>>>(params, master, m, v, norm, begin, end, host_ranges[r].decays,
                                                         a);
        launchCheck("adamw_params_kernel1");
    }
}

// the default: one launch

// the range that holds element i, or -1: the last one that begins at or before i, if it reaches that far
__device__ inline int find_range(const ParamRange* ranges, int num_ranges, size_t i) {
    int low = 0, high = num_ranges; // ranges before low begin at or before i, those from high on after it
    while (low < high) {
        int middle = (low + high) / 2;
        if (ranges[middle].begin <= i) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > 0 && i < ranges[low - 1].end ? low - 1 : -1;
}

// A thread owns 4 neighbouring elements, 16 bytes of each fp32 array, so that a warp reads and writes whole lines;
// ranges begin at multiples of 8, so they are of one range. (Behind its end may lie padding, whose parameters,
// gradients and moments are 0: the formulas keep them 0.) Bound by memory: each array is read and written once.
__global__ void __launch_bounds__(256) adamw_fused_kernel2(bf16* params, float* master, const float* grads, float* m,
                                                           float* v, const float* norm, const ParamRange* ranges,
                                                           int num_ranges, size_t count, AdamW a) {
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (first >= count || !isfinite(*norm)) { return; }
    int range = find_range(ranges, num_ranges, first);
    if (range < 0) { return; }
    bool decays = ranges[range].decays;
    float scale = clip_scale(*norm, a.grad_clip);
    uint64_t random = random_bits(a.rounding_key, first / 4);
    float p[4], g[4], m4[4], v4[4];
    load4(g, grads + first);
    load4(m4, m + first);
    load4(v4, v + first);
    if (master != NULL) {
        load4(p, master + first);
    } else {
        load4(p, params + first);
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        float gi = g[i] * scale;
        m4[i] = a.beta1 * m4[i] + (1 - a.beta1) * gi;
        v4[i] = a.beta2 * v4[i] + (1 - a.beta2) * gi * gi;
        p[i] = adamw_update(p[i], m4[i], v4[i], a, decays);
        if (master == NULL) { p[i] = round_stochastic(p[i], random, first + i); }
    }
    store4(m + first, m4);
    store4(v + first, v4);
    if (master != NULL) { store4(master + first, p); }
    store4(params + first, p);
}

void adamw_fused(bf16* params, float* master, const float* grads, float* m, float* v, const float* norm,
                 const ParamRange* ranges, int num_ranges, size_t count, AdamW a, cudaStream_t stream) {
    // One step on all parameters (count, a multiple of 8): master, m, v = their new values, params = master in bf16;
    // master NULL: params = stochastic rounding of what becomes of them. grads and norm (1) are read. ranges
    // (num_ranges) ascend from multiples of 8 and lie on the device; what is in none of them stays.
    if (count == 0 || num_ranges == 0) { return; }
    uintptr_t places = (uintptr_t)params | (uintptr_t)master | (uintptr_t)grads | (uintptr_t)m | (uintptr_t)v;
    if (count % 8 != 0 || places % 16 != 0) {
        fatal("adamw_fused: all arrays must be 16-byte aligned, the count (%zu) a multiple of 8", count);
    }
    adamw_fused_kernel2<<<(unsigned)ceil_div(count, 256 * 4), 256, 0, stream>>>(params, master, grads, m, v, norm,
                                                                                ranges, num_ranges, count, a);
    launchCheck("adamw_fused_kernel2");
}

// ----------------------------------------------------------------------------
// the model: memory, initialisation

typedef struct {
    enum AttentionKind attention;
    enum ExpertsKind experts;
    bool fused_optimizer, master, recompute_moe, overlap;
    bool keep_router_logits; // for --dump
    double aux_loss_coef, z_loss_coef;
} Switches;

size_t widest_ffn(const MoEConfig* c, size_t N, bool moe_layers) {
    // rows * F of the widest dense layer; with moe_layers also of the MoE layers
    size_t widest = 0;
    for (int l = 0; l < c->num_hidden_layers; l++) {
        bool moe = config_layer_is_moe(c, l);
        size_t rows = moe ? N * c->num_experts_per_tok : N;
        if (moe && !moe_layers) { continue; }
        widest = rows * config_layer_ffn_size(c, l) > widest ? rows * config_layer_ffn_size(c, l) : widest;
    }
    return widest;
}

void routing_layout(Routing* r, Arena* mem, size_t N, int E, int K) {
    size_t R = N * K;
    r->expert_offsets = take_int(mem, E + 1);
    r->row_slot = take_int(mem, R);
    r->slot_row = take_int(mem, R);
    r->row_token = take_int(mem, R);
    r->tile_list = (int4*)arena_take(mem, R / TILE_ROWS + E, sizeof(int4));
}

void layer_acts_layout(LayerActs* a, Arena* mem, const MoEConfig* c, const Switches* s, int l, size_t B, size_t T) {
    // what layer l keeps for its backward; c has the padded sizes
    size_t N = B * T, C = c->hidden_size, NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    size_t A = NH * HD, KV = NKV * HD, E = c->num_experts, K = c->num_experts_per_tok, F = config_layer_ffn_size(c, l);
    bool moe = config_layer_is_moe(c, l), loop = s->experts == EXPERTS_LOOP;
    size_t R = moe ? N * K : N;
    a->residual_attn = take_bf16(mem, N * C);
    a->attn_norm = take_bf16(mem, N * C);
    a->attn_rstd = take(mem, N);
    a->qkv = take_bf16(mem, N * (A + 2 * KV));
    a->qk = take_bf16(mem, N * (A + KV));
    a->qk_rstd = take(mem, N * (NH + NKV));
    a->lse = take(mem, N * NH);
    a->attn = take_bf16(mem, N * A);
    a->residual_mlp = take_bf16(mem, N * C);
    a->mlp_norm = take_bf16(mem, N * C);
    a->mlp_rstd = take(mem, N);
    if (!moe || !s->recompute_moe) { a->gate_up = take_bf16(mem, R * 2 * F); }
    if (!moe || loop) { a->expert_act = take_bf16(mem, R * F); }
    if (!moe) { return; }
    if (s->keep_router_logits) { a->router_logits = take(mem, N * E); }
    a->router_probs = take(mem, N * E);
    a->router_lse = take(mem, N);
    a->router_indices = take_int(mem, N * K);
    a->router_weights = take(mem, N * K);
    routing_layout(&a->routing, mem, N, (int)E, (int)K);
    if (loop) {
        a->expert_in = take_bf16(mem, R * C);
        a->expert_out = take_bf16(mem, R * C);
    }
}

void acts_layout(Acts* a, Arena* mem, const MoEConfig* c, const Switches* s, size_t B, size_t T) {
    // the activations of one microbatch; a->layers must have room for L layers
    size_t N = B * T, C = c->hidden_size, E = c->num_experts, R = N * c->num_experts_per_tok;
    size_t F = c->moe_intermediate_size;
    a->tokens_per_expert = take_int(mem, c->num_hidden_layers * E);
    for (int l = 0; l < c->num_hidden_layers; l++) {
        layer_acts_layout(&a->layers[l], mem, c, s, l, B, T);
        a->layers[l].routing.tokens_per_expert = a->tokens_per_expert ? a->tokens_per_expert + l * E : NULL;
    }
    bf16* gate_up = s->recompute_moe ? take_bf16(mem, R * 2 * F) : NULL;
    bool loop = s->experts == EXPERTS_LOOP;
    bf16* expert_act = loop ? NULL : take_bf16(mem, R * F);
    bf16* expert_out = loop ? NULL : take_bf16(mem, R * C);
    for (int l = 0; l < c->num_hidden_layers; l++) { // what no layer has to keep is shared by all
        if (!config_layer_is_moe(c, l)) { continue; }
        if (s->recompute_moe) { a->layers[l].gate_up = gate_up; }
        if (!loop) { a->layers[l].expert_act = expert_act; }
        if (!loop) { a->layers[l].expert_out = expert_out; }
    }
    a->branch = take_bf16(mem, N * C);
    a->residual_final = take_bf16(mem, N * C);
    a->final_norm = take_bf16(mem, N * C);
    a->final_rstd = take(mem, N);
    a->losses = take(mem, N);
    a->attn_scores = arena_take(mem, s->attention == ATTENTION_NAIVE ? attention_naive_bytes(T, c->head_dim) : 0, 1);
    a->route_chunks = take_int(mem, route_chunk_ints(R, (int)E));
}

void logits_layout(Acts* a, Arena* mem, const MoEConfig* c, size_t B, size_t T) {
    a->logit_rows = B * T < LOGIT_ROWS ? B * T : (size_t)LOGIT_ROWS;
    a->logits = take_bf16(mem, a->logit_rows * c->vocab_size);
}

void backward_layout(Acts* a, Arena* mem, const MoEConfig* c, const Switches* s, size_t B, size_t T) {
    // backward's buffers: one layer's worth, used again by each layer
    size_t N = B * T, C = c->hidden_size, NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    size_t A = NH * HD, KV = NKV * HD, E = c->num_experts, K = c->num_experts_per_tok, R = N * K;
    bool loop = s->experts == EXPERTS_LOOP;
    size_t act = widest_ffn(c, N, loop);
    a->d_residual = take_bf16(mem, N * C);
    a->d_norm = take_bf16(mem, N * C);
    a->d_attn = take_bf16(mem, N * A);
    a->d_qkv = take_bf16(mem, N * (A + 2 * KV));
    a->attn_delta = take(mem, N * NH);
    a->d_expert_in = take_bf16(mem, R * C);
    a->d_expert_out = take_bf16(mem, loop ? R * C : 0);
    a->d_act = take_bf16(mem, act);
    a->d_gate_up = take_bf16(mem, 2 * act);
    a->router_partials = take(mem, (size_t)(loop ? 1 : experts_num_partials(c->moe_intermediate_size)) * R);
    a->d_router_logits = take(mem, N * E);
    a->d_router_partials = take(mem, router_partials_floats(C, (int)E));
    a->norm_partials = take(mem, NORM_BLOCKS * (C > 2 * HD ? C : 2 * HD));
}

// The step's sums on the device, read once a step: three losses, the tokens of every expert of every layer (L,E), then
// its part of the router's entropy (L,E).
enum { SUM_CE, SUM_AUX, SUM_Z, SUM_LOAD };

typedef struct {
    MoEConfig config;    // the true sizes
    MoEConfig padded;    // the sizes of rows on the device
    ParamTable table;    // the tensors as files have them
    ParamTable places;   // the same tensors in the same order as they lie in the arenas below, rows padded
    Switches switches;
    size_t B, T;
    cudaStream_t stream;
    // arenas of places.num_parameters numbers each
    bf16* params;
    float *master, *grads, *m, *v; // master NULL: --master 0
    Params<bf16> w;
    Params<float> d_w;
    char* acts_memory;
    Acts acts;
    float* rope;             // (T, HD) as rope_table
    double* norm_sums;       // scratch of grad_norm
    float* grad_norm;        // (1)
    ParamRange* ranges;      // which parts of the arenas decay; on the device, for the fused optimizer
    ParamRange* host_ranges; // the same on the host
    int num_ranges;
    double* prob_sum;        // (E) the router's probabilities, summed over the last forward's tokens and layers
    float* expert_share;     // (E) f_e of the last forward
    double* step_sums;       // (SUM_LOAD + 2*L*E) since the start of the step
    double* host_sums;       // the same, pinned, after the step; then the gradient norm
    int* host_offsets;       // (L, E+1) pinned; --experts loop only
    int moe_layers;
    GpuClock* clock;         // NULL: nobody watches
} Model;

size_t step_sums_count(const Model* model) {
    return SUM_LOAD + 2 * (size_t)model->config.num_hidden_layers * model->config.num_experts;
}

size_t model_other_bytes(const MoEConfig* c, const ParamTable* places, size_t B, size_t T, bool training) {
    // tables, sums, the batch and cuBLAS's workspace
    size_t E = c->num_experts, bytes = T * c->head_dim * sizeof(float) + 5 * B * T * sizeof(int) + GEMM_WORKSPACE;
    bytes += (2 * E + 8 + 2 * c->num_hidden_layers * E) * sizeof(double);
    return bytes + (training ? grad_norm_doubles(places->num_parameters) * sizeof(double) : 0);
}

void rope_table(float* table, size_t T, int HD, double theta) {
    // table (T, HD) = cos of HD/2 angles, then sin of HD/2 angles; angle = position * theta^(-2i/HD). Frequencies and
    // angles are rounded to float on the way, as Hugging Face does.
    for (size_t t = 0; t < T; t++) {
        for (int i = 0; i < HD / 2; i++) {
            float inv_freq = 1.0f / (float)pow(theta, (double)((float)(2 * i) / (float)HD));
            float angle = (float)t * inv_freq;
            table[t * HD + i] = (float)cos((double)angle);
            table[t * HD + HD / 2 + i] = (float)sin((double)angle);
        }
    }
}

void model_create_acts(Model* model, bool training) {
    const MoEConfig* c = &model->padded;
    Arena mem = {NULL, 0};
    for (int turn = 0; turn < 2; turn++) { // the first only counts
        if (turn == 1) { mem.base = model->acts_memory = (char*)device_alloc(mem.used); }
        mem.used = 0;
        acts_layout(&model->acts, &mem, c, &model->switches, model->B, model->T);
        logits_layout(&model->acts, &mem, c, model->B, model->T);
        if (training) { backward_layout(&model->acts, &mem, c, &model->switches, model->B, model->T); }
    }
    // a dense layer has no tokens to count
    cudaCheck(cudaMemset(model->acts.tokens_per_expert, 0, c->num_hidden_layers * c->num_experts * sizeof(int)));
}

void model_create_training(Model* model) {
    size_t count = model->places.num_parameters;
    if (model->switches.master) { model->master = device_zeros(count); }
    model->grads = device_zeros(count);
    model->m = device_zeros(count);
    model->v = device_zeros(count);
    params_point(&model->d_w, model->grads, &model->places, &model->config);
    model->norm_sums = (double*)device_alloc(grad_norm_doubles(count) * sizeof(double));
    model->host_ranges = (ParamRange*)callocCheck(model->places.count, sizeof(ParamRange));
    model->num_ranges = param_ranges(model->host_ranges, &model->places);
    size_t bytes = model->num_ranges * sizeof(ParamRange);
    model->ranges = (ParamRange*)device_alloc(bytes);
    cudaCheck(cudaMemcpy(model->ranges, model->host_ranges, bytes, cudaMemcpyHostToDevice));
}

void model_create(Model* model, const MoEConfig* config, Switches switches, size_t B, size_t T, bool training) {
    // allocates everything the model will ever need; nothing is allocated in a step
    memset(model, 0, sizeof(*model));
    model->config = *config;
    model->padded = config_padded(config);
    model->switches = switches;
    model->B = B;
    model->T = T;
    size_t L = config->num_hidden_layers, E = config->num_experts;
    param_table_build(&model->table, config);
    param_table_build(&model->places, &model->padded);
    model->w.layers = (LayerParams<bf16>*)callocCheck(L, sizeof(LayerParams<bf16>));
    model->d_w.layers = (LayerParams<float>*)callocCheck(L, sizeof(LayerParams<float>));
    model->acts.layers = (LayerActs*)callocCheck(L, sizeof(LayerActs));
    for (size_t l = 0; l < L; l++) { model->moe_layers += config_layer_is_moe(config, (int)l); }
    cudaCheck(cudaStreamCreateWithFlags(&model->stream, cudaStreamNonBlocking));
    model->params = (bf16*)device_alloc(mul_check(model->places.num_parameters, sizeof(bf16)));
    cudaCheck(cudaMemset(model->params, 0, model->places.num_parameters * sizeof(bf16)));
    params_point(&model->w, model->params, &model->places, config);
    if (training) { model_create_training(model); }
    model_create_acts(model, training);
    float* rope = (float*)mallocCheck(T * config->head_dim * sizeof(float));
    rope_table(rope, T, config->head_dim, config->rope_theta);
    model->rope = (float*)device_alloc(T * config->head_dim * sizeof(float));
    cudaCheck(cudaMemcpy(model->rope, rope, T * config->head_dim * sizeof(float), cudaMemcpyHostToDevice));
    free(rope);
    model->grad_norm = (float*)device_alloc(sizeof(float));
    model->prob_sum = (double*)device_alloc(E * sizeof(double));
    model->expert_share = (float*)device_alloc(E * sizeof(float));
    model->step_sums = (double*)device_alloc(step_sums_count(model) * sizeof(double));
    cudaCheck(cudaMallocHost((void**)&model->host_sums, (step_sums_count(model) + 1) * sizeof(double)));
    if (switches.experts == EXPERTS_LOOP) {
        cudaCheck(cudaMallocHost((void**)&model->host_offsets, L * (E + 1) * sizeof(int)));
    }
    gemm_open();
    cudaCheck(cudaDeviceSynchronize()); // the clearing above is on another stream
}

void model_free(Model* model) {
    void* device[] = {model->params,    model->master, model->grads, model->m,         model->v,
                      model->norm_sums, model->ranges, model->rope,  model->grad_norm, model->prob_sum,
                      model->expert_share, model->step_sums, model->acts_memory};
    gemm_close();
    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++) { cudaCheck(cudaFree(device[i])); }
    cudaCheck(cudaFreeHost(model->host_sums));
    if (model->host_offsets) { cudaCheck(cudaFreeHost(model->host_offsets)); }
    cudaCheck(cudaStreamDestroy(model->stream));
    free(model->host_ranges);
    free(model->acts.layers);
    free(model->w.layers);
    free(model->d_w.layers);
    param_table_free(&model->table);
    param_table_free(&model->places);
}

// ----------------------------------------------------------------------------
// the model: forward, loss, backward, update

// One microbatch, on the device, and what the whole optimizer step needs to know to give it its due weight: a token's
// loss enters the gradient times grad_scale / counted, the balance loss times share * grad_scale.
typedef struct {
    const int *tokens, *targets; // (B, T); a negative target is not counted
    const int *doc_start, *doc_end; // (B, T) first and one past last position of each token's document in its row
    const int* token_order;      // (N) positions sorted by token, for the embedding's backward
    int** forced_indices;        // (L) of (N, K), NULL in dense layers; NULL: the router chooses
    double counted;              // targets counted in the whole step: all microbatches, all ranks
    double share;                // this microbatch's share of the step's tokens, for the balance loss
    double grad_scale;           // the number of ranks: gradients are averaged over them afterwards, losses are added
} Microbatch;

void phase(Model* model, enum Phase p, int layer) {
    // from here on the stream's time belongs to this phase of this layer
    gpu_clock_mark(model->clock, p, layer, model->stream); // NULL: nobody watches
}

AttentionShape attention_shape(const MoEConfig* c, size_t B, size_t T) {
    int NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    size_t qk = (size_t)(NH + NKV) * HD, qkv = (size_t)(NH + 2 * NKV) * HD;
    AttentionShape s = {B, T, NH, NKV, HD, qk, qkv, qkv};
    return s;
}

void attention_forward(Model* model, LayerActs* a, const Microbatch* mb) {
    // a->attn (N,A) = attention of a->qk and the v part of a->qkv
    AttentionShape s = attention_shape(&model->config, model->B, model->T);
    const bf16 *q = a->qk, *k = a->qk + s.NH * s.HD, *v = a->qkv + (s.NH + s.NKV) * s.HD;
    if (model->switches.attention == ATTENTION_NAIVE) {
        attention_naive_forward(a->attn, a->lse, q, k, v, mb->doc_start, s, model->acts.attn_scores, model->stream);
    } else if (model->switches.attention == ATTENTION_FLASH) {
        attention_flash_forward(a->attn, a->lse, q, k, v, mb->doc_start, s, model->stream);
    } else {
        attention_cudnn_forward(a->attn, a->lse, q, k, v, s, model->stream);
    }
}

void attention_backward(Model* model, LayerActs* a, const Microbatch* mb) {
    // acts.d_qkv (N,QKV) = gradient of q, k, v
    Acts* acts = &model->acts;
    AttentionShape s = attention_shape(&model->config, model->B, model->T);
    const bf16 *q = a->qk, *k = a->qk + s.NH * s.HD, *v = a->qkv + (s.NH + s.NKV) * s.HD;
    bf16 *d_q = acts->d_qkv, *d_k = d_q + s.NH * s.HD, *d_v = d_k + s.NKV * s.HD;
    if (model->switches.attention == ATTENTION_NAIVE) {
        attention_naive_backward(d_q, d_k, d_v, acts->attn_delta, acts->d_attn, a->attn, a->lse, q, k, v,
                                 mb->doc_start, mb->doc_end, s, acts->attn_scores, model->stream);
    } else if (model->switches.attention == ATTENTION_FLASH) {
        attention_flash_backward(d_q, d_k, d_v, acts->attn_delta, acts->d_attn, a->attn, a->lse, q, k, v,
                                 mb->doc_start, mb->doc_end, s, model->stream);
    } else {
        attention_cudnn_backward(d_q, d_k, d_v, acts->d_attn, a->attn, a->lse, q, k, v, s, model->stream);
    }
}

void moe_forward(Model* model, Acts* acts, int l, const int* forced, size_t N) {
    // acts->branch (N,C) = the layer's MLP of a->mlp_norm: a mixture of experts, or one dense SwiGLU
    const MoEConfig* c = &model->padded;
    LayerActs* a = &acts->layers[l];
    const LayerParams<bf16>* w = &model->w.layers[l];
    size_t C = c->hidden_size, F = config_layer_ffn_size(c, l);
    int E = c->num_experts, K = c->num_experts_per_tok;
    size_t R = N * K;
    if (!w->router) {
        phase(model, PHASE_EXPERTS, l);
        mlp_forward(acts->branch, a->expert_act, a->gate_up, a->mlp_norm, w->gate_up_proj, w->down_proj, N, C, F,
                    model->stream);
        return;
    }
    phase(model, PHASE_ROUTER, l);
    router_forward(a->router_logits, a->router_probs, a->router_lse, a->router_indices, a->router_weights, forced,
                   a->mlp_norm, w->router, N, C, E, K, c->norm_topk_prob, model->stream);
    phase(model, PHASE_PERMUTE, l);
    route_rows(a->routing, acts->route_chunks, a->router_indices, N, E, K, model->stream);
    phase(model, PHASE_EXPERTS, l);
    if (model->switches.experts == EXPERTS_LOOP) {
        experts_loop_forward(a->expert_out, a->gate_up, a->expert_act, a->expert_in, model->host_offsets + l * (E + 1),
                             a->mlp_norm, w->gate_up_proj, w->down_proj, a->routing, R, C, F, E, model->stream);
    } else {
        experts_forward(a->expert_out, a->gate_up, a->expert_act, a->mlp_norm, w->gate_up_proj, w->down_proj,
                        a->routing, R, C, F, E, model->stream);
    }
    phase(model, PHASE_PERMUTE, l);
    combine_forward(acts->branch, a->expert_out, a->router_weights, a->routing.slot_row, N, K, C, model->stream);
}

void model_forward(Model* model, const Microbatch* mb) {
    // tokens -> acts.final_norm (N,C); the router's statistics: prob_sum =, entropy and z_sum in step_sums +=
    const MoEConfig* c = &model->padded;
    Acts* acts = &model->acts;
    cudaStream_t stream = model->stream;
    size_t T = model->T, N = model->B * T, C = c->hidden_size;
    int L = c->num_hidden_layers, NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    int E = c->num_experts, hidden_size = model->config.hidden_size;
    size_t A = (size_t)NH * HD, QKV = A + 2 * (size_t)NKV * HD;
    float eps = (float)c->rms_norm_eps;

    phase(model, PHASE_ROUTER, -1);
    cudaCheck(cudaMemsetAsync(model->prob_sum, 0, E * sizeof(double), stream));
    phase(model, PHASE_EMBEDDING, -1);
    embedding_forward(acts->layers[0].residual_attn, mb->tokens, model->w.embed_tokens, N, C, stream);
    const bf16* residual = acts->layers[0].residual_attn;
    for (int l = 0; l < L; l++) {
        LayerActs* a = &acts->layers[l];
        const LayerParams<bf16>* w = &model->w.layers[l];
        phase(model, PHASE_NORMS, l);
        rmsnorm_forward(a->residual_attn, a->attn_norm, a->attn_rstd, residual, l > 0 ? acts->branch : NULL,
                        w->input_layernorm, N, C, hidden_size, eps, stream);
        phase(model, PHASE_QKV_O, l);
        matmul_forward(a->qkv, a->attn_norm, w->qkv_proj, N, C, QKV, stream);
        phase(model, PHASE_NORMS, l);
        qk_norm_rope_forward(a->qk, a->qk_rstd, a->qkv, w->q_norm, w->k_norm, model->rope, N, T, NH, NKV, HD, eps,
                             stream);
        phase(model, PHASE_ATTENTION, l);
        attention_forward(model, a, mb);
        phase(model, PHASE_QKV_O, l);
        matmul_forward(acts->branch, a->attn, w->o_proj, N, A, C, stream);
        phase(model, PHASE_NORMS, l);
        rmsnorm_forward(a->residual_mlp, a->mlp_norm, a->mlp_rstd, a->residual_attn, acts->branch,
                        w->post_attention_layernorm, N, C, hidden_size, eps, stream);
        moe_forward(model, acts, l, mb->forced_indices ? mb->forced_indices[l] : NULL, N);
        if (w->router) {
            phase(model, PHASE_ROUTER, l);
            router_stats_add(model->prob_sum, model->step_sums + SUM_LOAD + ((size_t)L + l) * E,
                             model->step_sums + SUM_Z, a->router_probs, a->router_lse, mb->targets, N, E, stream);
        }
        residual = a->residual_mlp;
    }
    phase(model, PHASE_NORMS, -1);
    rmsnorm_forward(acts->residual_final, acts->final_norm, acts->final_rstd, residual, acts->branch, model->w.norm, N,
                    C, hidden_size, eps, stream);
}

void logits_fetch(float* out, const bf16* logits, size_t rows, size_t V, size_t vocab_size, cudaStream_t stream) {
    // out (rows, vocab_size), on the host, = logits (rows, V); waits for them. For --dump and sampling only.
    uint16_t* chunk = (uint16_t*)mallocCheck(rows * V * sizeof(uint16_t));
    cudaCheck(cudaMemcpyAsync(chunk, logits, rows * V * sizeof(bf16), cudaMemcpyDeviceToHost, stream));
    streamWait(stream);
    for (size_t n = 0; n < rows; n++) {
        for (size_t v = 0; v < vocab_size; v++) { out[n * vocab_size + v] = bf16_to_f32(chunk[n * V + v]); }
    }
    free(chunk);
}

void model_loss(Model* model, const Microbatch* mb, bool backward, float* logits_copy) {
    // The loss of what model_forward left behind, added to step_sums. With `backward` it also begins the backward pass,
    // because a chunk of logits must be used up before the next one: acts.d_norm (N,C) = gradient of final_norm,
    // d lm_head +=. logits_copy (N, vocab_size), on the host, receives the logits where not NULL.
    const MoEConfig* c = &model->padded;
    Acts* acts = &model->acts;
    cudaStream_t stream = model->stream;
    size_t N = model->B * model->T, C = c->hidden_size, V = c->vocab_size;
    int E = c->num_experts, vocab_size = model->config.vocab_size;
    phase(model, PHASE_LM_HEAD, -1);
    for (size_t n = 0; n < N; n += acts->logit_rows) {
        size_t rows = N - n < acts->logit_rows ? N - n : acts->logit_rows;
        const bf16* inp = acts->final_norm + n * C;
        matmul_forward(acts->logits, inp, model->w.lm_head, rows, C, V, stream);
        if (logits_copy) { logits_fetch(logits_copy + n * vocab_size, acts->logits, rows, V, vocab_size, stream); }
        cross_entropy(acts->losses + n, acts->logits, mb->targets + n, rows, V, vocab_size,
                      (float)(mb->grad_scale / mb->counted), backward, stream);
        if (backward) {
            matmul_backward(acts->d_norm + n * C, model->d_w.lm_head, acts->logits, inp, model->w.lm_head, rows, C, V,
                            stream);
        }
    }
    losses_add(model->step_sums + SUM_CE, acts->losses, N, stream);
    phase(model, PHASE_ROUTER, -1);
    load_balancing_loss(model->expert_share, model->step_sums + SUM_AUX, model->step_sums + SUM_LOAD, model->prob_sum,
                        acts->tokens_per_expert, mb->share, model->moe_layers * N, c->num_hidden_layers, E, stream);
    phase(model, PHASE_OTHER, -1);
}

void moe_backward(Model* model, int l, const Microbatch* mb) {
    // from acts.d_residual, the gradient of the layer's output, to acts.d_norm (N,C) =, the gradient of a->mlp_norm
    const MoEConfig* c = &model->padded;
    Acts* acts = &model->acts;
    LayerActs* a = &acts->layers[l];
    const LayerParams<bf16>* w = &model->w.layers[l];
    LayerParams<float>* d_w = &model->d_w.layers[l];
    cudaStream_t stream = model->stream;
    size_t N = model->B * model->T, C = c->hidden_size, F = config_layer_ffn_size(c, l);
    int E = c->num_experts, K = c->num_experts_per_tok;
    size_t R = N * K;
    phase(model, PHASE_EXPERTS, l);
    if (!w->router) {
        mlp_backward(acts->d_norm, d_w->gate_up_proj, d_w->down_proj, acts->d_gate_up, acts->d_act, acts->d_residual,
                     a->mlp_norm, a->expert_act, a->gate_up, w->gate_up_proj, w->down_proj, N, C, F, stream);
        return;
    }
    int num_partials = 1;
    if (model->switches.experts == EXPERTS_LOOP) {
        experts_loop_backward(acts->d_expert_in, d_w->gate_up_proj, d_w->down_proj, acts->router_partials,
                              acts->d_expert_out, acts->d_gate_up, acts->d_act, acts->d_residual, a->expert_in,
                              a->expert_out, a->expert_act, a->gate_up, w->gate_up_proj, w->down_proj,
                              a->router_weights, model->host_offsets + l * (E + 1), a->routing, R, K, C, F, E, stream);
    } else {
        if (model->switches.recompute_moe) {
            experts_gate_up(a->gate_up, a->expert_act, a->mlp_norm, w->gate_up_proj, a->routing, R, C, F, E, stream);
        }
        num_partials = experts_num_partials(F);
        experts_backward(acts->d_expert_in, d_w->gate_up_proj, d_w->down_proj, acts->router_partials, a->gate_up,
                         a->expert_act, acts->d_residual, a->mlp_norm, w->gate_up_proj, w->down_proj,
                         a->router_weights, a->routing, R, C, F, E, stream);
    }
    phase(model, PHASE_ROUTER, l);
    float load_balancing_scale = (float)(model->switches.aux_loss_coef * mb->share * mb->grad_scale * E /
                                         ((double)model->moe_layers * (double)N));
    float z_scale = (float)(model->switches.z_loss_coef * mb->grad_scale / mb->counted);
    router_backward(acts->d_router_logits, acts->router_partials, num_partials, a->routing.slot_row, a->router_probs,
                    a->router_lse, a->router_indices, a->router_weights, mb->targets, model->expert_share,
                    load_balancing_scale, z_scale, N, E, K, c->norm_topk_prob, stream);
    router_backward_weight(d_w->router, acts->d_router_logits, a->mlp_norm, acts->d_router_partials, N, C, E, stream);
    phase(model, PHASE_PERMUTE, l);
    permute_backward(acts->d_norm, acts->d_expert_in, a->routing.slot_row, acts->d_router_logits, w->router, N, K, C, E,
                     stream);
}

void layer_backward(Model* model, int l, const Microbatch* mb) {
    // acts.d_residual: from the gradient of layer l's output to that of its input; the layer's weight gradients +=
    const MoEConfig* c = &model->padded;
    Acts* acts = &model->acts;
    LayerActs* a = &acts->layers[l];
    const LayerParams<bf16>* w = &model->w.layers[l];
    LayerParams<float>* d_w = &model->d_w.layers[l];
    cudaStream_t stream = model->stream;
    size_t T = model->T, N = model->B * T, C = c->hidden_size;
    int NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    int hidden_size = model->config.hidden_size;
    size_t A = (size_t)NH * HD, QKV = A + 2 * (size_t)NKV * HD;
    moe_backward(model, l, mb);
    phase(model, PHASE_NORMS, l);
    rmsnorm_backward(acts->d_residual, d_w->post_attention_layernorm, acts->d_norm, a->residual_mlp,
                     w->post_attention_layernorm, a->mlp_rstd, acts->norm_partials, N, C, hidden_size, true, stream);
    phase(model, PHASE_QKV_O, l);
    matmul_backward(acts->d_attn, d_w->o_proj, acts->d_residual, a->attn, w->o_proj, N, A, C, stream);
    phase(model, PHASE_ATTENTION, l);
    attention_backward(model, a, mb);
    phase(model, PHASE_NORMS, l);
    qk_norm_rope_backward(acts->d_qkv, d_w->q_norm, d_w->k_norm, a->qkv, a->qk_rstd, w->q_norm, w->k_norm, model->rope,
                          acts->norm_partials, N, T, NH, NKV, HD, stream);
    phase(model, PHASE_QKV_O, l);
    matmul_backward(acts->d_norm, d_w->qkv_proj, acts->d_qkv, a->attn_norm, w->qkv_proj, N, C, QKV, stream);
    phase(model, PHASE_NORMS, l);
    rmsnorm_backward(acts->d_residual, d_w->input_layernorm, acts->d_norm, a->residual_attn, w->input_layernorm,
                     a->attn_rstd, acts->norm_partials, N, C, hidden_size, true, stream);
}

// under multi-GPU, below: the gradients of a bucket begin to be averaged; compute waits until all that have begun are
void all_reduce_wait(MultiGpu* g, cudaStream_t compute);
void all_reduce_bucket(MultiGpu* g, float* grads, size_t count, cudaStream_t compute, bool overlap);

void model_reduce(Model* model, MultiGpu* gpus, size_t* sent, const char* name, int layer) {
    // starts averaging over the ranks the gradients from tensor `name` up to those sent before, which begin at *sent in
    // the arena; backward is done with them
    size_t begin = param_find(&model->places, name, layer)->offset;
    gpu_clock_bucket(model->clock, model->stream);
    all_reduce_bucket(gpus, model->grads + begin, *sent - begin, model->stream, model->switches.overlap);
    gpu_clock_bucket(model->clock, gpus->stream);
    *sent = begin;
}

void model_backward(Model* model, const Microbatch* mb, MultiGpu* gpus) {
    // The rest of the backward pass after model_loss(..., backward = true): every weight gradient +=. gpus not NULL:
    // after this microbatch they are averaged over the ranks, each part as soon as backward has left it, so that the
    // transfer of one layer goes on while the layers before it are computed.
    const MoEConfig* c = &model->padded;
    Acts* acts = &model->acts;
    cudaStream_t stream = model->stream;
    size_t N = model->B * model->T, C = c->hidden_size, sent = model->places.num_parameters;
    phase(model, PHASE_NORMS, -1);
    rmsnorm_backward(acts->d_residual, model->d_w.norm, acts->d_norm, acts->residual_final, model->w.norm,
                     acts->final_rstd, acts->norm_partials, N, C, model->config.hidden_size, false, stream);
    if (gpus) { model_reduce(model, gpus, &sent, "model.norm.weight", -1); } // and the lm_head behind it
    for (int l = c->num_hidden_layers - 1; l >= 0; l--) {
        layer_backward(model, l, mb);
        if (gpus) { model_reduce(model, gpus, &sent, "model.layers.%d.input_layernorm.weight", l); }
    }
    phase(model, PHASE_EMBEDDING, -1);
    embedding_backward(model->d_w.embed_tokens, acts->d_residual, mb->tokens, mb->token_order, N, C, c->pad_token_id,
                       stream);
    if (gpus) {
        model_reduce(model, gpus, &sent, "model.embed_tokens.weight", -1);
        phase(model, PHASE_ALLREDUCE, -1);
        all_reduce_wait(gpus, stream);
    }
    phase(model, PHASE_OTHER, -1);
}

void model_forward_backward(Model* model, const Microbatch* mb, MultiGpu* gpus) {
    // a microbatch; gpus as in model_backward
    gpu_clock_span_begin(model->clock, "forward", model->stream);
    model_forward(model, mb);
    gpu_clock_span_end(model->clock, model->stream);
    gpu_clock_span_begin(model->clock, "backward", model->stream);
    model_loss(model, mb, true, NULL);
    model_backward(model, mb, gpus);
    gpu_clock_span_end(model->clock, model->stream);
}

void model_sums_begin(Model* model) {
    // clears what forward passes add to
    cudaCheck(cudaMemsetAsync(model->step_sums, 0, step_sums_count(model) * sizeof(double), model->stream));
}

void model_step_begin(Model* model) {
    // clears the gradients and the step's sums
    phase(model, PHASE_OPTIMIZER, -1);
    cudaCheck(cudaMemsetAsync(model->grads, 0, model->places.num_parameters * sizeof(float), model->stream));
    model_sums_begin(model);
}

void model_grad_norm(Model* model) {
    // model->grad_norm (1) =; the host learns it after the step
    phase(model, PHASE_GRAD_NORM, -1);
    grad_norm(model->grad_norm, model->norm_sums, model->grads, model->places.num_parameters, model->stream);
    phase(model, PHASE_OTHER, -1);
}

void model_update(Model* model, int64_t step, double lr, const Options* opt) {
    // One AdamW step; `step` counts from 1. Clipping as torch.nn.utils.clip_grad_norm_: times min(1, clip / (norm +
    // 1e-6)), on the device; a norm that is not finite changes nothing.
    phase(model, PHASE_OPTIMIZER, -1);
    uint64_t rounding_key = hash64(hash64((uint64_t)opt->seed) ^ (uint64_t)step);
    AdamW a = {(float)lr, (float)opt->beta1, (float)opt->beta2, (float)opt->eps, (float)opt->weight_decay,
               (float)(1 - pow(opt->beta1, (double)step)), (float)(1 - pow(opt->beta2, (double)step)),
               (float)opt->grad_clip, rounding_key};
    if (model->switches.fused_optimizer) {
        adamw_fused(model->params, model->master, model->grads, model->m, model->v, model->grad_norm, model->ranges,
                    model->num_ranges, model->places.num_parameters, a, model->stream);
    } else {
        adamw_simple(model->params, model->master, model->grads, model->m, model->v, model->grad_norm,
                     model->host_ranges, model->num_ranges, model->places.num_parameters, a, model->stream);
    }
    phase(model, PHASE_OTHER, -1);
}

// ----------------------------------------------------------------------------
// multi-GPU: one process a GPU, started by mpirun. Every rank holds the whole model and trains on its own sequences;
// the gradients are averaged over the ranks, so that all make the same update and stay equal bit for bit.
//
// MPI starts the ranks, hands NCCL's id round and carries what lies in host memory (llmc/multi_gpu.h); NCCL carries the
// gradients, on a stream of its own, bucket after bucket while backward still computes the next one. Every rank issues
// the same collectives in the same order, whatever its routing did: an expert without tokens has a gradient, too, of
// zeros. With one rank, the only one that a build with NO_MPI=1 or NO_NCCL=1 knows, nothing here touches MPI or NCCL.

// The fp32 gradients travel as bf16, half the bytes, and are converted back. The average is a sum of parts that are
// divided here, in fp32: NCCL's own average multiplies by a 1/R in bf16, 0.2% too much with 3 ranks. Bandwidth bound; a
// thread owns 4 neighbours, 16 bytes of fp32, so that a warp reads and writes whole lines.
template <class Out, class Inp>
__global__ void all_reduce_convert_kernel2(Out* out, const Inp* inp, float factor, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) { return; } // n is a multiple of 8
    float x[4];
    load4(x, inp + i);
    for (int j = 0; j < 4; j++) { x[j] *= factor; }
    store4(out + i, x);
}

// compute waits until all collectives issued so far are done
void all_reduce_wait(MultiGpu* g, cudaStream_t compute) {
    if (g->num_ranks == 1) { return; }
    cudaCheck(cudaStreamWaitEvent(compute, g->ended[(g->issued - 1) % MOST_COLLECTIVES], 0));
}

// Around a collective: its stream waits for what compute has been given so far, and two events tell the host whether
// the GPU is in it, where it stays if another rank never comes.
void all_reduce_begin(MultiGpu* g, cudaStream_t compute) {
    unsigned slot = g->issued % MOST_COLLECTIVES;
    if (g->issued - g->oldest == MOST_COLLECTIVES) { multi_gpu_wait(g, g->ended[slot]); } // which moves oldest on
    cudaCheck(cudaEventRecord(g->ready, compute));
    cudaCheck(cudaStreamWaitEvent(g->stream, g->ready, 0));
    cudaCheck(cudaEventRecord(g->begun[slot], g->stream));
}

void all_reduce_end(MultiGpu* g) {
    cudaCheck(cudaEventRecord(g->ended[g->issued % MOST_COLLECTIVES], g->stream));
    g->issued++;
}

// grads[0..count) = their average over all ranks, once compute has written them. If `overlap`, compute goes on
// meanwhile, else the host waits: launches behind a collective that some rank never joins would fill CUDA's queue,
// which holds about a thousand, until the host stands still in one, where nobody looks at the clock. The buckets use
// one stream, so one staging buffer is enough: the next is converted when the last is back.
void all_reduce_bucket(MultiGpu* g, float* grads, size_t count, cudaStream_t compute, bool overlap) {
    if (g->num_ranks == 1 || count == 0) { return; }
    all_reduce_begin(g, compute);
    if (g->bf16_gradients) {
        if (count % 8 != 0 || (uintptr_t)grads % 16 != 0) {
            fatal("all_reduce_bucket: count must be a multiple of 8 and grads 16-byte aligned, they are %zu and %p",
                  count, (void*)grads);
        }
        unsigned blocks = (unsigned)ceil_div(count / 4, 256);
        float share = 1.0f / (float)g->num_ranks;
        all_reduce_convert_kernel2<bf16, float><<<blocks, 256, 0, g->stream>>>(g->staging, grads, share, count);
        launchCheck("all_reduce_convert_kernel2");
        ncclCheck(ncclAllReduce(g->staging, g->staging, count, ncclBfloat16, ncclSum, g->comm, g->stream));
        all_reduce_convert_kernel2<float, bf16><<<blocks, 256, 0, g->stream>>>(grads, g->staging, 1, count);
        launchCheck("all_reduce_convert_kernel2");
    } else {
        ncclCheck(ncclAllReduce(grads, grads, count, ncclFloat32, ncclAvg, g->comm, g->stream));
    }
    all_reduce_end(g);
    if (!overlap) { multi_gpu_wait_for_collectives(g); }
}

// a few numbers on the device, such as the loss and how many targets it is of: sums[0..n) = their sum over all ranks
void all_reduce_sums(MultiGpu* g, double* sums, size_t n, cudaStream_t compute) {
    if (g->num_ranks == 1 || n == 0) { return; }
    all_reduce_begin(g, compute);
    ncclCheck(ncclAllReduce(sums, sums, n, ncclFloat64, ncclSum, g->comm, g->stream));
    all_reduce_end(g);
    all_reduce_wait(g, compute);
}

// ----------------------------------------------------------------------------
// generation, as in llm.c without a cache of keys and values: for each new token the whole context goes through
// model_forward, the kernels that train (attention is always the flash version). A context is one small microbatch.

typedef struct {
    Model* model;
    size_t context; // the most positions
    int* tokens;    // (2, context) on the device: tokens, and where each one's document begins: at 0
    int* fed;       // the same on the host
    float* logits;  // (vocab_size) of the last token fed, on the host
} Decoder;

void decoder_create(Decoder* d, Model* model) {
    // the context is the model's T: a model is not asked for positions that it has not been trained on
    d->model = model;
    d->context = model->T;
    d->tokens = (int*)device_alloc(2 * d->context * sizeof(int));
    cudaCheck(cudaMemset(d->tokens, 0, 2 * d->context * sizeof(int)));
    d->fed = (int*)callocCheck(d->context, sizeof(int));
    d->logits = (float*)mallocCheck(model->config.vocab_size * sizeof(float));
    model_sums_begin(model); // nobody reads them
}

void decoder_free(Decoder* d) {
    if (d->tokens) { cudaCheck(cudaFree(d->tokens)); }
    free(d->fed);
    free(d->logits);
}

const float* decode(void* decoder, int token, size_t position, bool want_logits) {
    // what generate_text calls
    Decoder* d = (Decoder*)decoder;
    Model one = *d->model; // its weights and buffers, for one sequence
    size_t C = one.padded.hidden_size, V = one.padded.vocab_size, T = ceil_div(position + 1, 64) * 64;
    d->fed[position] = token;
    if (!want_logits) { return NULL; }
    cudaCheck(cudaMemcpyAsync(d->tokens, d->fed, d->context * sizeof(int), cudaMemcpyHostToDevice, one.stream));
    one.switches.attention = ATTENTION_FLASH; // which has nothing to prepare for each length
    one.B = 1;
    one.T = T < d->context ? T : d->context; // a plan of cuBLASLt serves 64 lengths; later positions are not seen
    Microbatch mb;
    memset(&mb, 0, sizeof(mb));
    mb.tokens = mb.targets = d->tokens; // nobody asks for the loss
    mb.doc_start = d->tokens + d->context;
    model_forward(&one, &mb);
    matmul_forward(one.acts.logits, one.acts.final_norm + position * C, one.w.lm_head, 1, C, V, one.stream);
    logits_fetch(d->logits, one.acts.logits, 1, V, one.config.vocab_size, one.stream);
    return d->logits;
}

// ----------------------------------------------------------------------------
// checkpoints: how the arenas reach the files of llmc/checkpoint.h and back. Files have true sizes, the arenas padded
// ones, so a tensor whose rows are padded is copied row by row.

void copy_numbers(const Model* model, void* arena, size_t size, const ParamTensor* t, size_t begin, size_t count,
                  void* host, enum cudaMemcpyKind kind) {
    // elements begin .. begin + count of tensor t, between an arena of numbers of `size` bytes and the host
    const ParamTensor* place = param_lookup(&model->places, t->name);
    size_t columns = t->shape[1], padded = place->shape[1];
    for (size_t i = 0, run; i < count; i += run) {
        size_t row = (begin + i) / columns, column = (begin + i) % columns, left = columns - column;
        run = columns == padded || count - i < left ? count - i : left;
        char *there = (char*)arena + (place->offset + row * padded + column) * size, *here = (char*)host + i * size;
        bool to_device = kind == cudaMemcpyHostToDevice;
        cudaCheck(cudaMemcpy(to_device ? there : here, to_device ? here : there, run * size, kind));
    }
}

float* arena_of(const Model* model, const char* what) { // NULL: the weights in bf16
    return strcmp(what, "grad") == 0     ? model->grads
           : strcmp(what, "m") == 0      ? model->m
           : strcmp(what, "v") == 0      ? model->v
           : strcmp(what, "master") == 0 ? model->master
                                         : NULL;
}

void store_numbers(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count, const float* values) {
    // what is "weight", which a master is made of, too, "m", "v" or "master"
    Model* model = (Model*)ctx;
    bool weight = strcmp(what, "weight") == 0;
    float* arena = arena_of(model, weight ? "master" : what);
    if (arena) { copy_numbers(model, arena, sizeof(float), t, begin, count, (void*)values, cudaMemcpyHostToDevice); }
    if (!weight) { return; }
    uint16_t* rounded = (uint16_t*)mallocCheck(count * sizeof(uint16_t));
    for (size_t i = 0; i < count; i++) { rounded[i] = f32_to_bf16(values[i]); }
    copy_numbers(model, model->params, sizeof(bf16), t, begin, count, rounded, cudaMemcpyHostToDevice);
    free(rounded);
}

void fetch_numbers(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count, float* values) {
    // what is "weight", "grad", "m", "v" or "master"
    Model* model = (Model*)ctx;
    float* arena = arena_of(model, what);
    if (arena) {
        copy_numbers(model, arena, sizeof(float), t, begin, count, values, cudaMemcpyDeviceToHost);
        return;
    }
    uint16_t* rounded = (uint16_t*)mallocCheck(count * sizeof(uint16_t));
    copy_numbers(model, model->params, sizeof(bf16), t, begin, count, rounded, cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < count; i++) { values[i] = bf16_to_f32(rounded[i]); }
    free(rounded);
}

void model_init(Model* model, uint64_t seed) {
    // fresh weights: norms are 1, matrices normal(0, init_std). A number depends on seed, name and index alone, so this
    // is what train_moe_cpu starts from, too.
    enum { CHUNK = 1 << 20 };
    float* values = (float*)mallocCheck(CHUNK * sizeof(float));
    for (size_t i = 0; i < model->table.count; i++) {
        const ParamTensor* t = &model->table.tensors[i];
        for (size_t begin = 0; begin < t->numel; begin += CHUNK) {
            size_t count = t->numel - begin < CHUNK ? t->numel - begin : (size_t)CHUNK;
            if (t->init_std == 0) {
                for (size_t j = 0; j < count; j++) { values[j] = 1; }
            } else {
                normal_fill(values, seed, t->name, begin, count, t->init_std);
            }
            store_numbers(model, t, "weight", begin, count, values);
        }
    }
    free(values);
}

// ----------------------------------------------------------------------------
// the trainer: what main puts together from the options

typedef struct {
    Run run;          // options, data, tokenizer, checkpoint: llmc/run.h
    Model model;
    MultiGpu gpus;
    Decoder decoder;  // allocated where something will be sampled
    GpuClock clock;
    int64_t step;     // optimizer steps done
    uint64_t tokens;  // trained on so far
    int* batch;       // (5, N) on the device: tokens, targets, doc_start, doc_end, token_order of this microbatch
    int** forced_indices; // --force-routing: (L) of (N, K) on the device
    cudaEvent_t batch_copied, step_done;
    bool batch_on_its_way;
    double gemm_peak;    // FLOP/s of a large matrix product, measured on this GPU; NAN: not measured
    double nominal_peak; // what the data sheet promises; NAN: not known
    Profiler profiler;
    Logger logger;
} Trainer;

#ifndef TESTING

Switches trainer_switches(const Options* opt) {
    Switches s;
    s.attention = strcmp(opt->attention, "naive") == 0   ? ATTENTION_NAIVE
                  : strcmp(opt->attention, "cudnn") == 0 ? ATTENTION_CUDNN
                                                         : ATTENTION_FLASH;
    s.experts = strcmp(opt->experts, "loop") == 0 ? EXPERTS_LOOP : EXPERTS_GROUPED;
    s.fused_optimizer = strcmp(opt->optimizer, "fused") == 0;
    s.master = opt->master;
    s.recompute_moe = strcmp(opt->recompute, "moe") == 0;
    s.overlap = opt->overlap;
    s.keep_router_logits = opt->dump != NULL;
    s.aux_loss_coef = opt->aux_loss_coef;
    s.z_loss_coef = opt->z_loss_coef;
    return s;
}

void check_switches(const Options* opt, const MoEConfig* c) {
    // what the program cannot honour, found before anything is allocated
    const int GRID_MOST = 65535;
    if (strcmp(opt->recompute, "moe") == 0 && strcmp(opt->experts, "loop") == 0) {
        fatal("--recompute moe: the expert loop keeps what it has computed; use --experts grouped or --recompute none");
    }
    // blocks of a grid are counted to 65535 in y and z; kernels have a sequence, a head or 128 rows of an expert there
    double tiles = (double)opt->batch_size * opt->seq_len * c->num_experts_per_tok / TILE_ROWS + c->num_experts;
    const struct { const char* what; double value, most; const char* advice; } limits[] = {
        {"--batch-size", (double)opt->batch_size, GRID_MOST, "use --grad-accum"},
        {"--batch-size x --seq-len: tiles of experts' rows", tiles, GRID_MOST, "lower either, or use --grad-accum"},
        {"num_attention_heads", (double)c->num_attention_heads, GRID_MOST, "train_moe_cpu takes more"},
        {"num_experts", (double)c->num_experts, ROUTER_MAX_EXPERTS, "train_moe_cpu takes more"}};
    for (const auto& l : limits) {
        if (l.value <= l.most) { continue; }
        fatal("%s: train_moe takes at most %.0f, not %.0f: %s", l.what, l.most, l.value, l.advice);
    }
    bool documents = opt->doc_mask || opt->eval_choices;
    if (strcmp(opt->attention, "cudnn") == 0) { attention_cudnn_check(documents, c->head_dim); }
}

uint64_t weights_hash(const Model* model) {
    // of the weights in bf16, to see whether all ranks have the same
    const size_t chunk = (size_t)1 << 23;
    bf16* host = (bf16*)mallocCheck(chunk * sizeof(bf16));
    uint64_t hash = HASH_BEGIN;
    for (size_t i = 0; i < model->places.num_parameters; i += chunk) {
        size_t left = model->places.num_parameters - i, bytes = (left < chunk ? left : chunk) * sizeof(bf16);
        cudaCheck(cudaMemcpy(host, model->params + i, bytes, cudaMemcpyDeviceToHost));
        hash = hash_bytes(hash, host, bytes);
    }
    free(host);
    return hash;
}

void trainer_load(Trainer* t) {
    // weights from the checkpoint, from a Hugging Face folder, or fresh; AdamW's moments where there is training
    Model* model = &t->model;
    const Run* run = &t->run;
    const char* folder = run->resume ? run->resume : run->opt.init;
    if (folder) {
        hf_folder_load(folder, &run->config, &model->table, store_numbers, model);
    } else {
        model_init(model, (uint64_t)run->opt.seed);
    }
    if (model->m && run->resume) {
        checkpoint_moments_load(run->resume, &model->table, store_numbers, model->master != NULL, model);
    }
    cudaCheck(cudaDeviceSynchronize()); // cudaMemcpy may return before a transfer is done, the stream is another
    t->step = run->state.step;
    t->tokens = run->state.tokens;
    uint64_t weights = t->gpus.num_ranks > 1 ? weights_hash(model) : 0;
    multi_gpu_check_loaded(&t->gpus, weights, run->data_hash, run->val_hash);
}

void trainer_save(Trainer* t) {
    // rank 0 writes, the others wait
    profiler_phase(&t->profiler, PHASE_CHECKPOINT, -1);
    if (t->gpus.rank == 0) {
        run_save(&t->run, t->step, t->tokens, ST_BF16, t->model.switches.master, fetch_numbers, &t->model);
    }
    multi_gpu_barrier(&t->gpus);
    run_saved(&t->run, t->step);
    profiler_phase(&t->profiler, PHASE_OTHER, -1);
}

// ----------------------------------------------------------------------------
// step, evaluate, sample

void trainer_upload(Trainer* t, const int* batch) {
    // batch (5, N) on the host starts on its way to the device
    size_t bytes = 5 * t->model.B * t->model.T * sizeof(int);
    cudaCheck(cudaMemcpyAsync(t->batch, batch, bytes, cudaMemcpyHostToDevice, t->model.stream));
    cudaCheck(cudaEventRecord(t->batch_copied, t->model.stream));
    t->batch_on_its_way = true;
}

void trainer_upload_wait(Trainer* t) {
    // The loader may only have its buffer back when it has been read. That is when the GPU began the microbatch before:
    // the host stays at most one microbatch ahead, and the GPU never waits for it.
    if (t->batch_on_its_way) { multi_gpu_wait(&t->gpus, t->batch_copied); }
    t->batch_on_its_way = false;
}

void trainer_batch_file(Trainer* t) {
    // --batch: always the same tokens, so they are brought to the device once. Where ranks have files of their own,
    // counted becomes the mean over the ranks.
    BatchFile* file = &t->run.batch;
    multi_gpu_sum(&t->gpus, &file->counted, 1);
    file->counted /= t->gpus.num_ranks;
    const MoEConfig* c = &t->run.config;
    size_t N = t->model.B * t->model.T;
    cudaCheck(cudaMemcpy(t->batch, file->all, 5 * N * sizeof(int), cudaMemcpyHostToDevice));
    if (!file->forced_indices) { return; }
    size_t bytes = N * c->num_experts_per_tok * sizeof(int);
    t->forced_indices = (int**)callocCheck(c->num_hidden_layers, sizeof(int*));
    for (int l = 0; l < c->num_hidden_layers; l++) {
        if (!file->forced_indices[l]) { continue; }
        t->forced_indices[l] = (int*)device_alloc(bytes);
        cudaCheck(cudaMemcpy(t->forced_indices[l], file->forced_indices[l], bytes, cudaMemcpyHostToDevice));
    }
}

void trainer_batch_on_device(const Trainer* t, Microbatch* mb) {
    const int** arrays[] = {&mb->tokens, &mb->targets, &mb->doc_start, &mb->doc_end, &mb->token_order};
    for (size_t i = 0; i < 5; i++) { *arrays[i] = t->batch + i * t->model.B * t->model.T; }
}

void trainer_microbatch(Trainer* t, Microbatch* mb) {
    // the next microbatch, with the weight it has in its step
    phase(&t->model, PHASE_DATA, -1);
    memset(mb, 0, sizeof(*mb));
    const Options* opt = &t->run.opt;
    double microbatches = (double)opt->grad_accum * t->gpus.num_ranks; // of all ranks
    mb->share = 1 / microbatches;
    mb->grad_scale = t->gpus.num_ranks;
    if (t->run.has_batch) {
        trainer_batch_on_device(t, mb);
        mb->forced_indices = t->forced_indices;
        mb->counted = t->run.batch.counted * microbatches;
    } else {
        trainer_upload_wait(t);
        const Batch* batch = dataloader_next(&t->run.train);
        profiler_interval(&t->profiler, "prepare batch", 1e3 * batch->fill_ms[0], 1e3 * batch->fill_ms[1],
                          TRACK_LOADER);
        trainer_upload(t, batch->all);
        trainer_batch_on_device(t, mb);
        mb->counted = (double)opt->batch_size * opt->seq_len * microbatches; // shards have no ignored targets
    }
    phase(&t->model, PHASE_OTHER, -1);
}

void trainer_read_sums(Trainer* t) {
    // model.host_sums = step_sums, then the gradient norm; the one moment of a step when the host waits until the
    // device has nothing left to do (but for --experts loop, --overlap 0, --allreduce every, --optimizer simple)
    Model* model = &t->model;
    size_t count = step_sums_count(model);
    cudaCheck(cudaMemcpyAsync(model->host_sums, model->step_sums, count * sizeof(double), cudaMemcpyDeviceToHost,
                              model->stream));
    cudaCheck(cudaMemcpyAsync(model->host_sums + count, model->grad_norm, sizeof(float), cudaMemcpyDeviceToHost,
                              model->stream));
    cudaCheck(cudaEventRecord(t->step_done, model->stream));
    multi_gpu_wait(&t->gpus, t->step_done);
    cudaCheck(cudaGetLastError());
}

void trainer_losses(const Trainer* t, double counted, StepMetrics* metrics) {
    // from host_sums
    const Model* model = &t->model;
    const double* sums = model->host_sums;
    float norm;
    memcpy(&norm, sums + step_sums_count(model), sizeof(norm));
    metrics->grad_norm = norm;
    metrics->ce_loss = sums[SUM_CE] / counted;
    metrics->aux_loss = sums[SUM_AUX];
    metrics->loss = metrics->ce_loss;
    if (model->switches.aux_loss_coef != 0) { metrics->loss += model->switches.aux_loss_coef * metrics->aux_loss; }
    if (model->switches.z_loss_coef != 0) { metrics->loss += model->switches.z_loss_coef * sums[SUM_Z] / counted; }
}

void trainer_step(Trainer* t, StepMetrics* metrics) {
    // One optimizer step: all its microbatches, then norm, clipping, AdamW. A loss or norm that is not finite ends the
    // run at this step, on all ranks: the update has done nothing, and what is saved is still good.
    Model* model = &t->model;
    const Options* opt = &t->run.opt;
    bool every = strcmp(opt->allreduce, "every") == 0;
    double counted = 0;
    gpu_clock_begin(&t->clock, model->stream);
    model_step_begin(model);
    for (int64_t i = 0; i < opt->grad_accum; i++) {
        char name[40];
        snprintf(name, sizeof(name), "microbatch %lld", (long long)i);
        gpu_clock_span_begin(model->clock, name, model->stream);
        Microbatch mb;
        trainer_microbatch(t, &mb);
        counted = mb.counted;
        bool reduce = t->gpus.num_ranks > 1 && (every || i + 1 == opt->grad_accum);
        model_forward_backward(model, &mb, reduce ? &t->gpus : NULL);
        gpu_clock_span_end(model->clock, model->stream);
        // the next microbatch's launches would stand behind the averages, and the expert loop waits for the stream
        if (reduce && i + 1 < opt->grad_accum) { multi_gpu_wait_for_collectives(&t->gpus); }
    }
    phase(model, PHASE_ALLREDUCE, -1);
    all_reduce_sums(&t->gpus, model->step_sums, step_sums_count(model), model->stream);
    if (!model->switches.fused_optimizer) { multi_gpu_wait_for_collectives(&t->gpus); } // as all_reduce_bucket
    model_grad_norm(model);
    double lr = schedule_rate(opt, t->tokens);
    model_update(model, t->step + 1, lr, opt);
    trainer_read_sums(t);
    gpu_clock_end(&t->clock);
    trainer_losses(t, counted, metrics);
    if (!isfinite(metrics->loss) || !isfinite(metrics->grad_norm)) { multi_gpu_let_rank0_speak(&t->gpus, 100); }
    run_stop_if_not_finite(&t->run, &t->logger, &t->profiler, t->step + 1, metrics->loss, metrics->grad_norm);
    if (opt->aux_loss_coef == 0) { metrics->aux_loss = NAN; }
    metrics->lr = lr;
    t->step++;
    t->tokens += (uint64_t)opt->tokens_per_step;
}

double trainer_evaluate(Trainer* t) {
    // mean cross-entropy over the first --val-steps batches of --val-data, or over all of it; the ranks take turns
    profiler_hold(&t->profiler, PHASE_EVAL);
    Model* model = &t->model;
    const Options* opt = &t->run.opt;
    uint64_t B = opt->batch_size, sequences = run_val_sequences(&t->run);
    double tokens = (double)sequences * (double)opt->seq_len;
    trainer_upload_wait(t);
    model_sums_begin(model);
    dataloader_seek(&t->run.val, 0);
    for (uint64_t i = t->gpus.rank * B; i < sequences; i += t->gpus.num_ranks * B) {
        Microbatch mb;
        memset(&mb, 0, sizeof(mb));
        trainer_upload_wait(t);
        trainer_upload(t, dataloader_next(&t->run.val)->all);
        trainer_batch_on_device(t, &mb);
        mb.counted = tokens;
        mb.share = mb.grad_scale = 1;
        model_forward(model, &mb);
        model_loss(model, &mb, false, NULL);
    }
    all_reduce_sums(&t->gpus, model->step_sums, step_sums_count(model), model->stream);
    trainer_read_sums(t);
    t->batch_on_its_way = false;
    profiler_release(&t->profiler);
    return model->host_sums[SUM_CE] / tokens;
}

void trainer_sample(Trainer* t, uint64_t rng, int64_t count, bool one_document) {
    // rank 0 samples, the others wait
    if (t->gpus.rank == 0) {
        run_sample(&t->run, decode, &t->decoder, t->decoder.context, rng, count, one_document);
    }
    multi_gpu_barrier(&t->gpus);
}

void trainer_show_sample(Trainer* t) {
    // one document in the midst of training; its random numbers come from the step, so it does not disturb anything
    profiler_hold(&t->profiler, PHASE_EVAL);
    logger_print(&t->logger, "sample after step %lld:\n", (long long)t->step);
    uint64_t rng = hash64((uint64_t)t->run.opt.seed ^ hash64((uint64_t)t->step));
    trainer_sample(t, rng, (int64_t)t->decoder.context, true);
    profiler_release(&t->profiler);
}

void router_log_summary(const Model* model, StepMetrics* m) {
    // from host_sums
    const MoEConfig* c = &model->config;
    int L = c->num_hidden_layers, E = c->num_experts;
    for (int l = 0; l < L; l++) {
        const double *load = model->host_sums + SUM_LOAD + (size_t)l * E, *entropies = load + (size_t)L * E;
        double entropy = 0;
        for (int e = 0; e < E; e++) { entropy += entropies[e]; }
        step_metrics_router(m, l, model->w.layers[l].router ? load : NULL, E, c->num_experts_per_tok, entropy);
    }
}

// ----------------------------------------------------------------------------
// measuring and planning

size_t largest_bucket(const ParamTable* places, int L) {
    // elements of the largest part of the gradients that is averaged at once: the head, a layer, or the embedding
    size_t end = places->num_parameters, largest = 0;
    for (int l = L; l >= -1; l--) {
        const ParamTensor* t = l == L  ? param_find(places, "model.norm.weight")
                               : l < 0 ? param_find(places, "model.embed_tokens.weight")
                                       : param_find(places, "model.layers.%d.input_layernorm.weight", l);
        largest = end - t->offset > largest ? end - t->offset : largest;
        end = t->offset;
    }
    return largest;
}

size_t run_batch_size(const Run* run) { return run->opt.generate ? 1 : (size_t)run->opt.batch_size; }

void memory_plan(MemoryRow* rows, const Run* run, size_t B) {
    // what this run takes on one GPU, by families: what model_create allocates
    Switches s = trainer_switches(&run->opt);
    MoEConfig padded = config_padded(&run->config);
    ParamTable places;
    Acts acts;
    Arena mem = {NULL, 0};
    size_t T = (size_t)run->opt.seq_len;
    bool training = run->needs_gradients;
    param_table_build(&places, &padded);
    memset(&acts, 0, sizeof(acts));
    acts.layers = (LayerActs*)callocCheck(padded.num_hidden_layers, sizeof(LayerActs));
    acts_layout(&acts, &mem, &padded, &s, B, T);
    size_t activations = mem.used;
    logits_layout(&acts, &mem, &padded, B, T);
    size_t logits = mem.used - activations;
    if (training) { backward_layout(&acts, &mem, &padded, &s, B, T); }
    size_t count = places.num_parameters, fp32 = training ? count * sizeof(float) : 0;
    size_t other = model_other_bytes(&padded, &places, B, T, training);
    if (run->trains && run->num_ranks > 1 && strcmp(run->opt.allreduce_dtype, "bf16") == 0) { // gradients on their way
        other += largest_bucket(&places, padded.num_hidden_layers) * sizeof(bf16);
    }
    if (training && s.attention == ATTENTION_CUDNN) { // its deterministic backward keeps the gradients of all scores
        other += mul_check(mul_check(B * padded.num_attention_heads, T), T * sizeof(bf16));
    }
    const MemoryRow plan[] = {
        {"weights", count * sizeof(bf16)}, {"master weights", s.master ? fp32 : 0}, {"gradients", fp32},
        {"AdamW moments", 2 * fp32}, {"activations", activations}, {"logits", logits},
        {"backward buffers", mem.used - activations - logits}, {"other", other},
        {"CUDA, about", (size_t)614 << 20}, {NULL, 0}}; // its context, its libraries' kernels, NCCL's buffers
    memcpy(rows, plan, sizeof(plan));
    free(acts.layers);
    param_table_free(&places);
}

void dry_run(const Run* run) {
    // what this run would take, without taking it; needs no GPU
    size_t free_bytes, total;
    if (cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) { total = 0; }
    dry_run_print(memory_plan, run, "one GPU", (double)total);
}

const Run* planned_run; // whose plan is printed where memory runs out

void print_plan_out_of_memory(void) {
    memory_plan_print(stderr, memory_plan, planned_run, run_batch_size(planned_run), "one GPU");
}

void dump_routing(void* ctx, int layer, float* logits, int* indices, float* weights) {
    const Model* model = (const Model*)ctx;
    const LayerActs* a = &model->acts.layers[layer];
    size_t N = model->B * model->T, E = model->config.num_experts, K = model->config.num_experts_per_tok;
    cudaCheck(cudaMemcpy(logits, a->router_logits, N * E * sizeof(float), cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(indices, a->router_indices, N * K * sizeof(int), cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(weights, a->router_weights, N * K * sizeof(float), cudaMemcpyDeviceToHost));
}

int dump(Trainer* t) {
    // one forward and backward of the first microbatch, no step
    Model* model = &t->model;
    Microbatch mb;
    trainer_microbatch(t, &mb);
    mb.counted *= mb.share; // of this microbatch alone
    mb.share = mb.grad_scale = 1;
    float* logits = (float*)mallocCheck(mul_check(mul_check(model->B * model->T, model->config.vocab_size),
                                                  sizeof(float)));
    StepMetrics metrics;
    step_metrics_init(&metrics);
    model_step_begin(model);
    model_forward(model, &mb);
    model_loss(model, &mb, true, logits);
    model_backward(model, &mb, NULL);
    model_grad_norm(model);
    trainer_read_sums(t);
    trainer_losses(t, mb.counted, &metrics);
    Dump d = {&model->config,       &model->table,           model->B,                 model->T,
              (float)metrics.loss,  (float)metrics.ce_loss,  (float)metrics.aux_loss,  (float)metrics.grad_norm,
              logits,               model,                   dump_routing,             fetch_numbers};
    if (t->gpus.rank == 0) { dump_file_write(t->run.opt.dump, &d); }
    free(logits);
    printf("loss %.6f | ce_loss %.6f | aux_loss %.6f | grad_norm %.6f -> %s\n", metrics.loss, metrics.ce_loss,
           metrics.aux_loss, metrics.grad_norm, t->run.opt.dump);
    return 0;
}

// ----------------------------------------------------------------------------
// the loop, and main

int evaluate(Trainer* t) {
    // --eval
    double loss = trainer_evaluate(t);
    run_print_evaluation(&t->run, loss);
    return isfinite(loss) ? 0 : 1;
}

int evaluate_choices(Trainer* t) {
    // --eval-choices: the loss of every choice of every question, several of them to a sequence, each a document; the
    // ranks take turns
    Model* model = &t->model;
    Choices* choices = &t->run.choices;
    size_t N = model->B * model->T;
    int* batch = (int*)callocCheck(5 * N, sizeof(int)); // a forward pass needs no ends, no order of tokens
    float* losses = (float*)mallocCheck(N * sizeof(float));
    model_sums_begin(model); // nobody reads them
    for (size_t i = t->gpus.rank; i < choices_num_batches(choices, model->B); i += t->gpus.num_ranks) {
        Microbatch mb;
        memset(&mb, 0, sizeof(mb));
        mb.counted = mb.share = mb.grad_scale = 1;
        choices_batch(choices, i, model->B, batch, batch + N, batch + 2 * N);
        trainer_upload(t, batch);
        trainer_batch_on_device(t, &mb);
        model_forward(model, &mb);
        model_loss(model, &mb, false, NULL);
        cudaCheck(cudaMemcpyAsync(losses, model->acts.losses, N * sizeof(float), cudaMemcpyDeviceToHost,
                                  model->stream));
        streamWait(model->stream);
        choices_collect(choices, i, model->B, losses);
    }
    multi_gpu_sum(&t->gpus, choices->nats, choices->num_rows);
    free(losses);
    free(batch);
    return choices_report(choices, t->gpus.rank == 0 ? t->run.opt.metrics : NULL);
}

int sample(Trainer* t) {
    // --generate
    trainer_sample(t, hash64((uint64_t)t->run.opt.seed), t->run.opt.generate, false);
    return 0;
}

int train(Trainer* t) {
    // the loop: steps, and what is due after some of them; returns the exit code
    const Options* opt = &t->run.opt;
    double ranks = t->gpus.num_ranks;
    StepMetrics metrics;
    step_metrics_create(&metrics, t->run.config.num_hidden_layers);
    signals_begin_loop();
    if (opt->steps == 0 && opt->out) { trainer_save(t); } // no training: what was loaded, as a checkpoint
    bool stop = false; // looked at once a step: after a Ctrl-C there is a last step, and it is saved
    while (t->step < opt->steps && !stop) {
        profiler_step_begin(&t->profiler, t->step + 1);
        double begin = profiler_clock_us();
        trainer_step(t, &metrics);
        metrics.step_ms = (profiler_clock_us() - begin) / 1e3; // of training alone: what follows has phases of its own
        metrics.step = t->step;
        router_log_summary(&t->model, &metrics);
        if (t->gpus.rank == 0) { // now: a validation will overwrite host_sums
            logger_experts(&t->logger, &metrics, t->model.host_sums + SUM_LOAD, t->run.config.num_experts);
        }
        stop = multi_gpu_stop_flag(&t->gpus, interrupted());
        bool done = t->step == opt->steps;
        if (opt->out && (stop || is_due(opt->save_every, t->step, done))) { trainer_save(t); }
        bool validate = t->run.has_val && is_due(opt->val_every, t->step, done);
        metrics.val_loss = validate ? trainer_evaluate(t) : NAN;
        if (opt->sample_every > 0 && is_due(opt->sample_every, t->step, done)) { trainer_show_sample(t); }
        profiler_step_end(&t->profiler);

        run_step_rates(&t->run, &metrics, t->nominal_peak * ranks, t->gemm_peak * ranks);
        metrics.tokens = t->tokens;
        metrics.phase_ms = t->profiler.phase_ms;
        metrics.mem = device_bytes_used();
        bool shown = stop || t->step == 1 || is_due(opt->log_every, t->step, done) || validate;
        if (t->gpus.rank == 0) { logger_step(&t->logger, &metrics, shown); }
    }
    step_metrics_free(&metrics);
    logger_close(&t->logger);
    if (opt->profile) {
        double microbatches = (double)opt->grad_accum; // of the last step
        profiler_table(&t->profiler, stdout);
        printf("a microbatch: %.1f kernel launches and matrix products, the host waited %.1f times within it\n",
               (double)t->clock.launches / microbatches, (double)t->clock.waits / microbatches);
    }
    if (stop) { run_print_interrupted(&t->run, t->step); }
    return stop ? 130 : 0;
}

void trainer_open(Trainer* t) {
    // everything on the device
    const Run* run = &t->run;
    const Options* opt = &run->opt;
    // NCCL takes its buffers, and the peak is measured, while the card is empty: what does not fit is the model, then
    MoEConfig padded = config_padded(&run->config);
    ParamTable places;
    param_table_build(&places, &padded);
    size_t bucket = run->trains ? largest_bucket(&places, run->config.num_hidden_layers) : 8; // --eval adds up losses
    param_table_free(&places);
    multi_gpu_connect(&t->gpus, all_reduce_bucket, bucket, run->trains && strcmp(opt->allreduce_dtype, "bf16") == 0);
    t->gemm_peak = run->trains && !device_is_emulated(&t->gpus.properties) ? gemm_peak() : NAN;
    model_create(&t->model, &run->config, trainer_switches(opt), run_batch_size(run), (size_t)opt->seq_len,
                 run->needs_gradients);
    if (run->samples) { decoder_create(&t->decoder, &t->model); }
    t->batch = (int*)device_alloc(5 * t->model.B * t->model.T * sizeof(int));
    cudaCheck(cudaEventCreateWithFlags(&t->batch_copied, cudaEventDisableTiming));
    cudaCheck(cudaEventCreateWithFlags(&t->step_done, cudaEventDisableTiming));
    if (run->has_batch) { trainer_batch_file(t); }
    trainer_load(t);
    if (run->trains) {
        t->nominal_peak = nominal_bf16_peak(t->gpus.properties.name);
        char machine[400];
        multi_gpu_describe(&t->gpus, machine, sizeof(machine), t->nominal_peak, t->gemm_peak);
        run_print_setup(run, machine);
        run_open_logs(run, &t->logger, &t->profiler, t->step, t->gpus.rank, t->gpus.num_ranks, t->gpus.properties.name,
                      t->gemm_peak, t->nominal_peak);
        t->clock.profiler = &t->profiler;
        t->model.clock = &t->clock;
    }
}

void trainer_close(Trainer* t) {
    profiler_close(&t->profiler);
    gpu_clock_free(&t->clock);
    if (t->run.samples) { decoder_free(&t->decoder); }
    for (int l = 0; t->forced_indices && l < t->run.config.num_hidden_layers; l++) {
        cudaCheck(cudaFree(t->forced_indices[l]));
    }
    free(t->forced_indices);
    cudaCheck(cudaFree(t->batch));
    cudaCheck(cudaEventDestroy(t->batch_copied));
    cudaCheck(cudaEventDestroy(t->step_done));
    model_free(&t->model);
    run_close(&t->run);
    multi_gpu_close(&t->gpus);
}

int main(int argc, char** argv) {
    const char* slash = strrchr(argv[0], '/');
    program_name = slash ? slash + 1 : argv[0];
    streams_open();
    signals_open();
    Trainer* t = (Trainer*)callocCheck(1, sizeof(Trainer));
    Run* run = &t->run;
    const Options* opt = &run->opt;
    multi_gpu_open(&t->gpus, &argc, &argv);
    multi_gpu_first(&t->gpus); // rank 0 goes first, so that a mistake is reported once
    run_open_model(run, argc, argv, PROGRAM_GPU, t->gpus.num_ranks);
    check_switches(opt, &run->config);
    if (opt->dry_run) {
        if (t->gpus.rank == 0) { dry_run(run); }
        run_close(run);
        return 0;
    }
    multi_gpu_device(&t->gpus, all_reduce_convert_kernel2<bf16, float>);
    planned_run = run;
    out_of_memory_hook = print_plan_out_of_memory;
    run->allocate = opt->pinned ? pinned_alloc : NULL;
    run->release = opt->pinned ? pinned_free : NULL;
    run_open_files(run, t->gpus.rank, t->gpus.num_ranks);
    multi_gpu_rest(&t->gpus);
    multi_gpu_check_run(&t->gpus, opt, &run->config);
    trainer_open(t);
    int code = opt->dump           ? dump(t)
               : opt->eval         ? evaluate(t)
               : opt->eval_choices ? evaluate_choices(t)
               : opt->generate     ? sample(t)
                                   : train(t);
    if (!run->trains) { stdout_check(); }
    trainer_close(t);
    free(t);
    return code;
}
#endif // TESTING

