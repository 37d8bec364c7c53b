/*
train_moe_cpu.c: a Qwen3-style mixture-of-experts language model, trained on a CPU, in one file of C.

This file is the definition: it is checked against Hugging Face's Qwen3MoeForCausalLM (dev/test/goldens), and whatever
runs on a GPU is to be checked against it. It is also meant to be fast: the matrix products go to a BLAS, the rest are
plain loops that the compiler vectorises, with one OpenMP pragma an operation.
It is not a framework: there is no graph and no autograd. Forward is written down, and backward beside it, by hand.

Letters.  B T     batch, sequence length; N = B*T tokens, token n is position n%T of row n/T
          C L V   hidden size, layers, vocabulary
          NH NKV HD   query heads, key/value heads, head size;  A = NH*HD, KV = NKV*HD, QKV = A + 2*KV
          E K F   experts, experts per token, expert hidden size;  R = N*K rows after routing
          A slot is a pair (n,k); a row is the place of a slot in the buffers that are sorted by expert.

Gradients. d_x is the gradient of the loss with respect to x. An op says for each output whether it writes (=) or
adds (+=). Weight gradients are written by the first microbatch of a step and added to by the others, so no pass over
the gradients is spent on zeroing them: `beta` is 0 or 1 with BLAS' meaning, out = new + beta * out.

Valid as C11 and as C++17 (so that a CUDA test can include it in a namespace). -DREAL=double turns every number into a
double, for finite differences. main is at the end, under #ifndef TESTING.
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
#include <sys/mman.h>
#include <tgmath.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(USE_DNNL)
#include <oneapi/dnnl/dnnl.h>
#elif defined(USE_CBLAS)
#include <cblas.h>
#elif defined(USE_ACCELERATE)
#include <Accelerate/Accelerate.h>
#endif
#include "llmc/check.h"
#include "llmc/config.h"
#include "llmc/dnnl_bf16.h"
#include "llmc/dump_file.h"
#include "llmc/launcher.h"
#include "llmc/logger.h"
#include "llmc/profiler.h"
#include "llmc/rand.h"
#include "llmc/run.h" // options, data, tokenizer, checkpoints
#include "llmc/schedule.h"
#include "llmc/training.h" // saving, samples, what is printed

#ifndef REAL
#define REAL float
#endif
typedef REAL real;

// ----------------------------------------------------------------------------
// Tensors: the parameters. One arena holds all of them, laid out by the table in llmc/config.h; gradients and the two
// AdamW moments are arenas of the same shape. Weights are [out, in]: y = x W^T.

typedef struct {
    real* input_layernorm;          // (C)
    real* qkv_proj;                 // (QKV, C): q_proj (A, C), k_proj (KV, C) and v_proj (KV, C) are neighbours
    real* q_norm;                   // (HD)
    real* k_norm;                   // (HD)
    real* o_proj;                   // (C, A)
    real* post_attention_layernorm; // (C)
    real* router;                   // (E, C); NULL in a dense layer
    real* gate_up_proj;             // (E, 2F, C): of each expert gate_proj (F, C), then up_proj (F, C); dense: (2F, C)
    real* down_proj;                // (E, C, F); dense: (C, F)
} LayerParams;

typedef struct {
    real* embed_tokens;  // (V, C)
    LayerParams* layers; // L of them
    real* norm;          // (C)
    real* lm_head;       // (V, C); the same pointer as embed_tokens where the two are tied
} Params;

void params_point(Params* p, real* arena, const ParamTable* table, const MoEConfig* config) {
    // gives each name of the model its place in the arena; p->layers must have room for L layers
    p->embed_tokens = arena + param_find(table, "model.embed_tokens.weight")->offset;
    p->norm = arena + param_find(table, "model.norm.weight")->offset;
    p->lm_head = config->tie_word_embeddings ? p->embed_tokens : arena + param_find(table, "lm_head.weight")->offset;
    for (int l = 0; l < config->num_hidden_layers; l++) {
        LayerParams* w = &p->layers[l];
        w->input_layernorm = arena + param_find(table, "model.layers.%d.input_layernorm.weight", l)->offset;
        w->qkv_proj = arena + param_find(table, "model.layers.%d.self_attn.q_proj.weight", l)->offset;
        w->q_norm = arena + param_find(table, "model.layers.%d.self_attn.q_norm.weight", l)->offset;
        w->k_norm = arena + param_find(table, "model.layers.%d.self_attn.k_norm.weight", l)->offset;
        w->o_proj = arena + param_find(table, "model.layers.%d.self_attn.o_proj.weight", l)->offset;
        w->post_attention_layernorm =
            arena + param_find(table, "model.layers.%d.post_attention_layernorm.weight", l)->offset;
        bool moe = config_layer_is_moe(config, l);
        const char* gate =
            moe ? "model.layers.%d.mlp.experts.0.gate_proj.weight" : "model.layers.%d.mlp.gate_proj.weight";
        const char* down =
            moe ? "model.layers.%d.mlp.experts.0.down_proj.weight" : "model.layers.%d.mlp.down_proj.weight";
        w->router = moe ? arena + param_find(table, "model.layers.%d.mlp.gate.weight", l)->offset : NULL;
        w->gate_up_proj = arena + param_find(table, gate, l)->offset;
        w->down_proj = arena + param_find(table, down, l)->offset;
    }
}

// ----------------------------------------------------------------------------
// Tensors: the activations that forward keeps for backward, and backward's own buffers

typedef struct {
    real* residual_attn; // (N, C) the residual stream that enters the layer
    real* attn_norm;     // (N, C) its RMSNorm
    real* attn_rstd;     // (N)    1 / sqrt(mean(x^2) + eps)
    real* qkv;           // (N, QKV) projections, before norm and RoPE
    real* qk_rstd;       // (N, NH+NKV)
    real* q;             // (B, NH, T, HD) normalised and rotated. Head-major: a head's rows lie close together, and
    real* k;             // (B, NKV, T, HD) the BLAS calls of attention run a third faster than on (N, QKV) rows
    real* v;             // (B, NKV, T, HD)
    real* lse;           // (B, NH, T) log-sum-exp of each row of scores: all that backward needs to redo the softmax
    real* attn;          // (N, A) attention output, before o_proj
    real* residual_mlp;  // (N, C) residual stream between attention and MLP
    real* mlp_norm;      // (N, C)
    real* mlp_rstd;      // (N)
    // MoE layers only
    real* router_logits;    // (N, E)
    real* router_probs;     // (N, E) softmax over all experts
    real* router_lse;       // (N)    log-sum-exp of the router logits, for the z-loss
    int* router_indices;    // (N, K) chosen experts, the most probable first
    real* router_weights;   // (N, K) what multiplies their outputs
    int* tokens_per_expert; // (E)
    int* expert_offsets;    // (E+1) expert e owns rows expert_offsets[e] .. expert_offsets[e+1]
    int* expert_order;      // (E)   experts by falling number of rows: work is dealt out largest first
    int* row_slot;          // (R)   row -> slot n*K+k
    int* slot_row;          // (N, K) slot -> row
    real* expert_in;        // (R, C) mlp_norm's rows sorted by expert
    real* expert_out;       // (R, C)
    // dense layers have F = intermediate_size and R = N
    real* gate_up;    // (R, 2F)
    real* expert_act; // (R, F) silu(gate) * up
} LayerActs;

typedef struct {
    LayerActs* layers;    // L of them
    real* branch;         // (N, C) what the current half-layer adds to the residual stream
    real* residual_final; // (N, C)
    real* final_norm;     // (N, C)
    real* final_rstd;     // (N)
    real* losses;         // (N) cross-entropy of each token, 0 where the target is ignored
    real* logits;         // (logit_rows, V) one chunk of rows; becomes d_logits in place
    size_t logit_rows;
    real* attn_scores; // flash: 2 x (64, T) a thread; naive: 2 x (T, T), one head at a time
    // backward
    real* d_residual;       // (N, C) gradient of the residual stream
    real* d_norm;           // (N, C) gradient of a norm's output
    real* d_attn;           // (N, A)
    real* d_qkv;            // (N, QKV)
    real* d_q;              // (B, NH, T, HD)
    real* d_k;              // (B, NKV, T, HD)
    real* d_v;              // (B, NKV, T, HD)
    real* d_expert_out;     // (R, C)
    real* d_expert_act;     // (R, F)
    real* d_gate_up;        // (R, 2F)
    real* d_expert_in;      // (R, C)
    real* d_router_weights; // (N, K)
    real* d_router_logits;  // (N, E)
    real* norm_partials;    // (NORM_BLOCKS, C or 2*HD) partial sums of a norm's weight gradient
} Acts;

typedef struct {
    char* base;  // NULL while measuring
    size_t used; // bytes, a multiple of 64
} Arena;

void* arena_take(Arena* a, size_t count, size_t size) {
    // the next count*size bytes, 64-byte aligned; with base NULL it only counts them, so that the code which lays out
    // memory is also the code which says how much there will be
    void* p = a->base ? a->base + a->used : NULL;
    a->used += (mul_check(count, size) + 63) / 64 * 64;
    return p;
}
real* take(Arena* a, size_t count) { return (real*)arena_take(a, count, sizeof(real)); }
int* take_int(Arena* a, size_t count) { return (int*)arena_take(a, count, sizeof(int)); }

void* arena_alloc(size_t bytes) {
    // untouched pages: whoever writes a page first owns it
    void* p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 64) != 0) {
        fatal("cannot allocate %.2f GiB of memory: try a smaller --batch-size or --seq-len; --dry-run prints the plan",
              (double)bytes / (1 << 30));
    }
    return p;
}

void arena_touch(void* arena, size_t bytes) {
    // gives every page its memory now, many of them to a call of the system: met one by one, each would be a page fault
    // in the first step. The threads take turns, so that each tensor lies on all nodes of the machine.
#ifdef MADV_POPULATE_WRITE
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), chunk = 1024 * page;
    char* begin = (char*)arena + (page - (uintptr_t)arena % page) % page; // the ends are left to their use
    size_t chunks = bytes > page ? (bytes - page) / chunk : 0;
    #pragma omp parallel for schedule(static, 1)
    for (size_t i = 0; i < chunks; i++) { madvise(begin + i * chunk, chunk, MADV_POPULATE_WRITE); } // may fail
#else
    (void)arena, (void)bytes;
#endif
}

enum AttentionKind { ATTENTION_NAIVE, ATTENTION_FLASH };
enum ExpertsKind { EXPERTS_LOOP, EXPERTS_GROUPED };
enum { ATTENTION_ROWS = 64, NORM_BLOCKS = 64, LOGIT_ROWS = 1024, SUM_BLOCK = 4096 };

int num_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
int thread_num(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

void layer_acts_layout(LayerActs* a, Arena* mem, const MoEConfig* c, int l, size_t B, size_t T) {
    size_t N = B * T, C = c->hidden_size, NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    size_t A = NH * HD, KV = NKV * HD, E = c->num_experts, K = c->num_experts_per_tok, F = config_layer_ffn_size(c, l);
    bool moe = config_layer_is_moe(c, l);
    size_t R = moe ? N * K : N;
    a->residual_attn = take(mem, N * C);
    a->attn_norm = take(mem, N * C);
    a->attn_rstd = take(mem, N);
    a->qkv = take(mem, N * (A + 2 * KV));
    a->qk_rstd = take(mem, N * (NH + NKV));
    a->q = take(mem, N * A);
    a->k = take(mem, N * KV);
    a->v = take(mem, N * KV);
    a->lse = take(mem, N * NH);
    a->attn = take(mem, N * A);
    a->residual_mlp = take(mem, N * C);
    a->mlp_norm = take(mem, N * C);
    a->mlp_rstd = take(mem, N);
    a->gate_up = take(mem, R * 2 * F);
    a->expert_act = take(mem, R * F);
    if (!moe) { return; }
    a->router_logits = take(mem, N * E);
    a->router_probs = take(mem, N * E);
    a->router_lse = take(mem, N);
    a->router_indices = take_int(mem, N * K);
    a->router_weights = take(mem, N * K);
    a->tokens_per_expert = take_int(mem, E);
    a->expert_offsets = take_int(mem, E + 1);
    a->expert_order = take_int(mem, E);
    a->row_slot = take_int(mem, R);
    a->slot_row = take_int(mem, R);
    a->expert_in = take(mem, R * C);
    a->expert_out = take(mem, R * C);
}

void acts_layout(Acts* a, Arena* mem, const MoEConfig* c, size_t B, size_t T, enum AttentionKind attention) {
    // the activations of one microbatch; a->layers must have room for L layers
    size_t N = B * T, C = c->hidden_size;
    for (int l = 0; l < c->num_hidden_layers; l++) { layer_acts_layout(&a->layers[l], mem, c, l, B, T); }
    a->branch = take(mem, N * C);
    a->residual_final = take(mem, N * C);
    a->final_norm = take(mem, N * C);
    a->final_rstd = take(mem, N);
    a->losses = take(mem, N);
    size_t scores = attention == ATTENTION_NAIVE ? T * T : (size_t)num_threads() * ATTENTION_ROWS * T;
    a->attn_scores = take(mem, 2 * scores);
}

void logits_layout(Acts* a, Arena* mem, const MoEConfig* c, size_t B, size_t T) {
    a->logit_rows = B * T < LOGIT_ROWS ? B * T : (size_t)LOGIT_ROWS;
    a->logits = take(mem, a->logit_rows * c->vocab_size);
}

void backward_layout(Acts* a, Arena* mem, const MoEConfig* c, size_t B, size_t T) {
    // backward's buffers: one layer's worth, used again by each layer
    size_t N = B * T, C = c->hidden_size, NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    size_t A = NH * HD, KV = NKV * HD, E = c->num_experts, K = c->num_experts_per_tok, R = N * K;
    size_t act = 0; // widest R*F of all layers
    for (int l = 0; l < c->num_hidden_layers; l++) {
        size_t rows = config_layer_is_moe(c, l) ? R : N;
        act = rows * config_layer_ffn_size(c, l) > act ? rows * config_layer_ffn_size(c, l) : act;
    }
    a->d_residual = take(mem, N * C);
    a->d_norm = take(mem, N * C);
    a->d_attn = take(mem, N * A);
    a->d_qkv = take(mem, N * (A + 2 * KV));
    a->d_q = take(mem, N * A);
    a->d_k = take(mem, N * KV);
    a->d_v = take(mem, N * KV);
    a->d_expert_out = take(mem, R * C);
    a->d_expert_act = take(mem, act);
    a->d_gate_up = take(mem, 2 * act);
    a->d_expert_in = take(mem, R * C);
    a->d_router_weights = take(mem, N * K);
    a->d_router_logits = take(mem, N * E);
    a->norm_partials = take(mem, NORM_BLOCKS * (C > 2 * HD ? C : 2 * HD));
}

// ----------------------------------------------------------------------------
// exp. glibc's expf is only vectorised under -ffast-math, which would also let the compiler assume that there are no
// NaNs. This one is plain C that any compiler vectorises, and a NaN stays a NaN.

static inline float exp_poly(float x) {
    // e^x for x in [-87, 88], clamped outside, relative error below 2e-7: x = n ln2 + f with |f| <= ln2/2 in two parts
    // (Cody and Waite), e^f by its Taylor polynomial of degree 7, times 2^n put into the exponent bits
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    union {
        float f;
        uint32_t u;
    } t, two_n;
    const float shift = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, which then lies in the low bits
    t.f = x * 1.44269504f + shift;
    float n = t.f - shift;
    float f = x - n * 0.693145752f;
    f = f - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    two_n.u = (t.u << 23) + (127u << 23); // only the low bits of t.u survive the shift
    return p * two_n.f;
}

static inline real exp_real(real x) { return sizeof(real) == sizeof(float) ? (real)exp_poly((float)x) : (real)exp(x); }

// ----------------------------------------------------------------------------
// bf16 (--precision bf16): products then read bfloat16, half the bytes at twice the rate, and sum in fp32. All else stays
// fp32: weights, gradients, moments, sums, norms, softmax, the router. Each arena whose numbers go into products has a copy
// in bf16, the same number at the same place. Who writes such numbers also calls to_bf16, which rounds them into the copy
// while they are in the cache: an activation once for forward and backward, a weight once a step. In fp32 there are no
// copies, and to_bf16 does nothing.

typedef struct {
    const real* arena;
    size_t count;
    uint16_t* copy;
    size_t spread; // number i of the arena is number i*spread of the copy
} Bf16Copy;
Bf16Copy bf16_copies[16];
int num_bf16_copies = 0;

void bf16_copy_add(real* arena, size_t count, bool in_place) {
    // in_place: for rows that nobody reads in fp32 any more, each rounded into its own front half; else the copy's pages
    // cost nothing until they are written
    if (num_bf16_copies == 16) { fatal("more than 16 arenas have copies in bf16"); }
    Bf16Copy* c = &bf16_copies[num_bf16_copies++];
    c->arena = arena;
    c->count = count;
    c->copy = (uint16_t*)(in_place ? (void*)arena : arena_alloc(mul_check(count, sizeof(uint16_t))));
    c->spread = in_place ? 2 : 1;
}

void bf16_copy_remove(const real* arena) {
    for (int i = num_bf16_copies - 1; i >= 0; i--) {
        if (bf16_copies[i].arena != arena) { continue; }
        if (bf16_copies[i].spread == 1) { free(bf16_copies[i].copy); }
        bf16_copies[i] = bf16_copies[--num_bf16_copies];
    }
}

uint16_t* bf16_of(const real* x, size_t* spread) {
    // where the copy has what lies at x; NULL: x has no copy
    for (int i = 0; i < num_bf16_copies; i++) {
        const Bf16Copy* c = &bf16_copies[i];
        size_t at = ((uintptr_t)x - (uintptr_t)c->arena) / sizeof(real); // huge if x lies before the arena
        if (at >= c->count) { continue; }
        *spread = c->spread;
        return c->copy + at * c->spread;
    }
    return NULL;
}

void to_bf16(const real* x, size_t count) {
    // rounds count numbers into x's copy
    enum { BLOCK = 1024 };
    uint16_t block[BLOCK];
    size_t spread = 1;
    uint16_t* copy = bf16_of(x, &spread);
    for (size_t begin = 0; copy && begin < count; begin += BLOCK) {
        size_t n = count - begin < BLOCK ? count - begin : (size_t)BLOCK;
        uint16_t* out = spread == 1 ? copy + begin : block; // what overwrites itself takes a detour
        #pragma omp simd
        for (size_t i = 0; i < n; i++) { out[i] = f32_to_bf16((float)x[begin + i]); }
        if (out == block) { memcpy(copy + begin, block, n * sizeof(uint16_t)); }
    }
}

void to_bf16_all(const real* x, size_t count) {
    // the same on all threads, for what is not written in a loop that could do it
    size_t blocks = num_bf16_copies == 0 ? 0 : (count + SUM_BLOCK - 1) / SUM_BLOCK;
    #pragma omp parallel for schedule(static)
    for (size_t b = 0; b < blocks; b++) {
        size_t begin = b * SUM_BLOCK;
        to_bf16(x + begin, count - begin < SUM_BLOCK ? count - begin : (size_t)SUM_BLOCK);
    }
}

void copy_operand(real* out, const real* x, size_t count) {
    // out = x, where out will only be read by products: in bf16 there is then no need for more than the copy
    size_t spread;
    uint16_t* out_bf16 = bf16_of(out, &spread);
    if (out_bf16) { memcpy(out_bf16, bf16_of(x, &spread), count * sizeof(uint16_t)); }
    else { memcpy(out, x, count * sizeof(real)); }
}

// ----------------------------------------------------------------------------
// matmul: the gateway. All products of this program pass through gemm, or through gemm_fp32 where it must be fp32.

void gemm_naive(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const real* a, size_t lda, const real* b,
                size_t ldb, real beta, real* c, size_t ldc) {
    // the meaning of gemm: c (M,N) = op(a) (M,K) op(b) (K,N) + beta * c, row-major, ld* is the length of a row in
    // memory
    #pragma omp parallel for
    for (size_t i = 0; i < M; i++) {
        real* c_i = c + i * ldc;
        for (size_t j = 0; j < N; j++) { c_i[j] = beta == 0 ? 0 : beta * c_i[j]; } // beta 0 may meet uninitialised NaNs
        if (trans_b) { // rows of b are columns of op(b): dot products
            for (size_t j = 0; j < N; j++) {
                const real *a_i = a + (trans_a ? i : i * lda), *b_j = b + j * ldb;
                real sum = 0;
                if (trans_a) {
                    for (size_t k = 0; k < K; k++) { sum += a_i[k * lda] * b_j[k]; }
                } else {
                    #pragma omp simd reduction(+ : sum)
                    for (size_t k = 0; k < K; k++) { sum += a_i[k] * b_j[k]; }
                }
                c_i[j] += sum;
            }
        } else {
            for (size_t k = 0; k < K; k++) {
                const real* b_k = b + k * ldb;
                real a_ik = trans_a ? a[k * lda + i] : a[i * lda + k];
                #pragma omp simd
                for (size_t j = 0; j < N; j++) { c_i[j] += a_ik * b_k[j]; }
            }
        }
    }
}

void gemm_fp32(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const real* a, size_t lda, const real* b,
               size_t ldb, real beta, real* c, size_t ldc) {
    // c (M,N) = op(a) (M,K) op(b) (K,N) + beta * c. Called from one thread it uses all of them; called inside a
    // parallel region it runs on the caller's alone. An expert without tokens gives M = 0 or K = 0: libraries disagree
    // about what is left in c then, so that is settled here.
    if (M == 0 || N == 0) { return; }
#if defined(USE_DNNL)
    if (sizeof(real) == sizeof(float) && K > 0) {
        dnnl_status_t status = dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', (dnnl_dim_t)M, (dnnl_dim_t)N,
                                          (dnnl_dim_t)K, 1.0f, (const float*)a, (dnnl_dim_t)lda, (const float*)b,
                                          (dnnl_dim_t)ldb, (float)beta, (float*)c, (dnnl_dim_t)ldc);
        if (status != dnnl_success) { fatal("dnnl_sgemm failed with status %d (out of memory?)", (int)status); }
        return;
    }
#elif defined(USE_CBLAS) || defined(USE_ACCELERATE)
    const size_t most = INT_MAX; // CBLAS counts in int
    if (sizeof(real) == sizeof(float) && K > 0 && M <= most && N <= most && K <= most && lda <= most && ldb <= most &&
        ldc <= most) {
        cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, (int)M,
                    (int)N, (int)K, 1.0f, (const float*)a, (int)lda, (const float*)b, (int)ldb, (float)beta, (float*)c,
                    (int)ldc);
        return;
    }
#endif
    gemm_naive(trans_a, trans_b, M, N, K, a, lda, b, ldb, beta, c, ldc);
}

void gemm(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const real* a, size_t lda, const real* b,
          size_t ldb, real beta, real* c, size_t ldc) {
    // the same with the operands' copies in bf16, where they have them; beta is then 0 or 1
    size_t spread_a = 1, spread_b = 1;
    const uint16_t *a_bf16 = bf16_of(a, &spread_a), *b_bf16 = bf16_of(b, &spread_b);
    if ((a_bf16 == NULL) != (b_bf16 == NULL)) { fatal("a product of which only one operand has a copy in bf16"); }
    if (!a_bf16 || M == 0 || N == 0 || K == 0) {
        gemm_fp32(trans_a, trans_b, M, N, K, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    bf16_product(trans_a, trans_b, M, N, K, a_bf16, lda * spread_a, b_bf16, ldb * spread_b, beta != 0, (float*)c, ldc);
}

const char* gemm_library(bool bf16) {
    if (bf16) { return "oneDNN, bf16 summed in fp32"; }
#if defined(USE_DNNL)
    return "oneDNN sgemm";
#elif defined(USE_CBLAS)
    return "CBLAS sgemm";
#elif defined(USE_ACCELERATE)
    return "Accelerate sgemm";
#else
    return "own loop (no BLAS was found when this was built)";
#endif
}

void matmul_forward(real* out, const real* inp, const real* weight, size_t N, size_t C, size_t OC) {
    // out (N,OC) = inp (N,C) weight^T, weight is (OC,C)
    gemm(false, true, N, OC, C, inp, C, weight, C, 0, out, OC);
}

void matmul_backward(real* d_inp, real* d_weight, const real* d_out, const real* inp, const real* weight, size_t N,
                     size_t C, size_t OC, real beta_inp, real beta_weight) {
    // d_inp (N,C) = d_out (N,OC) weight + beta_inp * d_inp;  d_weight (OC,C) = d_out^T inp + beta_weight * d_weight
    gemm(false, false, N, C, OC, d_out, OC, weight, C, beta_inp, d_inp, C);
    gemm(true, false, OC, C, N, d_out, OC, inp, C, beta_weight, d_weight, C);
}

// ----------------------------------------------------------------------------
// embedding

void embedding_forward(real* out, const int* tokens, const real* embed_tokens, size_t N, size_t C) {
    // out[n,:] = embed_tokens[tokens[n],:]
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) { memcpy(out + n * C, embed_tokens + (size_t)tokens[n] * C, C * sizeof(real)); }
}

void embedding_backward(real* d_embed_tokens, const real* d_out, const int* tokens, size_t N, size_t C, size_t V,
                        int pad_token, real beta) {
    // d_embed_tokens[tokens[n],:] += d_out[n,:] except for pad_token (-1: none), after d_embed_tokens *= beta (0 or 1).
    // A thread owns a range of the vocabulary and looks at every token, so that no two threads write one row and each
    // row is summed in the order of n.
    #pragma omp parallel
    {
        size_t threads = 1;
#ifdef _OPENMP
        threads = (size_t)omp_get_num_threads();
#endif
        size_t begin = V * (size_t)thread_num() / threads, end = V * ((size_t)thread_num() + 1) / threads;
        if (beta == 0) { memset(d_embed_tokens + begin * C, 0, (end - begin) * C * sizeof(real)); }
        for (size_t n = 0; n < N; n++) {
            size_t token = (size_t)tokens[n];
            if (token < begin || token >= end || tokens[n] == pad_token) { continue; }
            real* row = d_embed_tokens + token * C;
            for (size_t c = 0; c < C; c++) { row[c] += d_out[n * C + c]; }
        }
    }
}

// ----------------------------------------------------------------------------
// rmsnorm (Zhang and Sennrich 2019), with the addition to the residual stream that always comes before it

void rmsnorm_forward(real* residual, real* out, real* rstd, const real* inp, const real* branch, const real* weight,
                     size_t N, size_t C, real eps) {
    // residual = inp + branch; rstd[n] = 1 / sqrt(mean over c of residual[n,c]^2 + eps); out = residual * rstd * weight
    // residual, out, inp, branch are (N,C). branch NULL: residual is inp already, and is not written.
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const real* x = inp + n * C;
        if (branch) {
            real* res = residual + n * C;
            const real* br = branch + n * C;
            for (size_t c = 0; c < C; c++) { res[c] = x[c] + br[c]; }
            x = res;
        }
        real sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++) { sum += x[c] * x[c]; }
        real s = 1 / sqrt(sum / (real)C + eps);
        real* o = out + n * C;
        for (size_t c = 0; c < C; c++) { o[c] = x[c] * s * weight[c]; }
        to_bf16(o, C);
        rstd[n] = s;
    }
}

void norm_weight_reduce(real* d_weight, const real* partials, size_t stride, size_t C, real beta) {
    // d_weight[c] = sum over blocks of partials[block,c] + beta * d_weight[c]. The rows are cut into NORM_BLOCKS blocks
    // however many threads there are, so the sum has one order and the gradient one value.
    for (size_t c = 0; c < C; c++) {
        real sum = 0;
        for (size_t b = 0; b < NORM_BLOCKS; b++) { sum += partials[b * stride + c]; }
        d_weight[c] = sum + (beta == 0 ? 0 : beta * d_weight[c]);
    }
}

void rmsnorm_backward(real* d_residual, real* d_weight, const real* d_out, const real* residual, const real* weight,
                      const real* rstd, real* partials, size_t N, size_t C, real beta_residual, real beta_weight) {
    // with xhat = residual * rstd and g = d_out * weight: d_residual = rstd * (g - xhat * mean(g * xhat)) +
    // beta_residual * d_residual; d_weight = sum over n of d_out * xhat + beta ...
    #pragma omp parallel for
    for (int block = 0; block < NORM_BLOCKS; block++) {
        real* d_w = partials + (size_t)block * C;
        memset(d_w, 0, C * sizeof(real));
        for (size_t n = N * block / NORM_BLOCKS; n < N * (block + 1) / NORM_BLOCKS; n++) {
            const real* x = residual + n * C;
            const real* d_o = d_out + n * C;
            real s = rstd[n], dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (size_t c = 0; c < C; c++) { dot += d_o[c] * weight[c] * x[c]; }
            real k = dot * s * s / (real)C;
            real* d_x = d_residual + n * C;
            if (beta_residual == 0) {
                for (size_t c = 0; c < C; c++) { d_x[c] = s * (d_o[c] * weight[c] - x[c] * k); }
            } else {
                for (size_t c = 0; c < C; c++) { d_x[c] += s * (d_o[c] * weight[c] - x[c] * k); }
            }
            to_bf16(d_x, C);
            for (size_t c = 0; c < C; c++) { d_w[c] += d_o[c] * x[c] * s; }
        }
    }
    norm_weight_reduce(d_weight, partials, C, C, beta_weight);
}

// ----------------------------------------------------------------------------
// qk_norm_rope: RMSNorm over each head of q and k, then rotary position embedding (Su et al. 2021), and the change of
// layout from token-major to head-major

void rope_table(real* table, size_t T, int HD, double theta) {
    // table (T, HD) = cos of HD/2 angles, then sin of HD/2 angles; angle = position * theta^(-2i/HD). Frequencies and
    // angles are rounded to float on the way, as Hugging Face does: at position 4000 an fp32 angle is off by 1e-4, and
    // matching the published weights means being off by the same.
    for (size_t t = 0; t < T; t++) {
        for (int i = 0; i < HD / 2; i++) {
            float inv_freq = 1.0f / (float)pow(theta, (double)((float)(2 * i) / (float)HD));
            float angle = (float)t * inv_freq;
            table[t * HD + i] = (real)cos((double)angle);
            table[t * HD + HD / 2 + i] = (real)sin((double)angle);
        }
    }
}

real head_norm_rope(real* out, const real* x, const real* weight, const real* cos_sin, int HD, real eps) {
    // one head of one token: out = rotate(rmsnorm(x)), halves (not pairs); returns rstd
    real sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int i = 0; i < HD; i++) { sum += x[i] * x[i]; }
    real s = 1 / sqrt(sum / (real)HD + eps);
    int half = HD / 2;
    const real *cosine = cos_sin, *sine = cos_sin + half;
    for (int i = 0; i < half; i++) {
        real x1 = x[i] * s * weight[i], x2 = x[i + half] * s * weight[i + half];
        out[i] = x1 * cosine[i] - x2 * sine[i];
        out[i + half] = x2 * cosine[i] + x1 * sine[i];
    }
    to_bf16(out, HD);
    return s;
}

void qk_norm_rope_forward(real* q, real* k, real* v, real* rstd, const real* qkv, const real* q_norm,
                          const real* k_norm, const real* rope, size_t B, size_t T, size_t first, size_t cache, int NH,
                          int NKV, int HD, real eps) {
    // q (B,NH,T,HD) = rope(norm(q part of qkv)), k the same, v copied; rstd (N,NH+NKV); qkv (N,QKV); rope: see
    // rope_table. Training has first = 0 and cache = T. While generating, row 0 of qkv is position `first`, and k and v
    // are caches of `cache` positions a head.
    size_t heads = (size_t)NH + 2 * NKV;
    #pragma omp parallel for
    for (size_t n = 0; n < B * T; n++) {
        size_t b = n / T, t = n % T;
        const real* x = qkv + n * heads * HD;
        const real* cos_sin = rope + (first + t) * HD;
        real* s = rstd + n * (NH + NKV);
        for (int h = 0; h < NH; h++) {
            s[h] = head_norm_rope(q + ((b * NH + h) * T + t) * HD, x + h * HD, q_norm, cos_sin, HD, eps);
        }
        for (int h = 0; h < NKV; h++) {
            size_t out = ((b * NKV + h) * cache + first + t) * HD;
            s[NH + h] = head_norm_rope(k + out, x + (NH + h) * HD, k_norm, cos_sin, HD, eps);
            memcpy(v + out, x + (NH + NKV + h) * HD, HD * sizeof(real));
            to_bf16(v + out, HD);
        }
    }
}

void head_norm_rope_backward(real* d_x, real* d_weight, const real* d_out, const real* x, const real* weight,
                             const real* cos_sin, real s, int HD) {
    // one head of one token: turns d_out back (the inverse rotation), then RMSNorm's backward. d_x =, d_weight +=
    int half = HD / 2;
    const real *cosine = cos_sin, *sine = cos_sin + half;
    real dot = 0;
    #pragma omp simd reduction(+ : dot)
    for (int i = 0; i < half; i++) {
        real g1 = d_out[i] * cosine[i] + d_out[i + half] * sine[i];
        real g2 = d_out[i + half] * cosine[i] - d_out[i] * sine[i];
        d_weight[i] += g1 * x[i] * s;
        d_weight[i + half] += g2 * x[i + half] * s;
        d_x[i] = g1 * weight[i];
        d_x[i + half] = g2 * weight[i + half];
        dot += d_x[i] * x[i] + d_x[i + half] * x[i + half];
    }
    real k = dot * s * s / (real)HD;
    for (int i = 0; i < HD; i++) { d_x[i] = s * (d_x[i] - x[i] * k); }
}

void qk_norm_rope_backward(real* d_qkv, real* d_q_norm, real* d_k_norm, const real* d_q, const real* d_k,
                           const real* d_v, const real* qkv, const real* rstd, const real* q_norm, const real* k_norm,
                           const real* rope, real* partials, size_t B, size_t T, int NH, int NKV, int HD,
                           real beta_weight) {
    // d_qkv (N,QKV) =;  d_q_norm, d_k_norm (HD) = sum over tokens and heads + beta_weight * themselves
    size_t heads = (size_t)NH + 2 * NKV, N = B * T;
    #pragma omp parallel for
    for (int block = 0; block < NORM_BLOCKS; block++) {
        real* d_w = partials + (size_t)block * 2 * HD;
        memset(d_w, 0, 2 * HD * sizeof(real));
        for (size_t n = N * block / NORM_BLOCKS; n < N * (block + 1) / NORM_BLOCKS; n++) {
            size_t b = n / T, t = n % T;
            const real* x = qkv + n * heads * HD;
            real* d_x = d_qkv + n * heads * HD;
            const real* cos_sin = rope + t * HD;
            const real* s = rstd + n * (NH + NKV);
            for (int h = 0; h < NH; h++) {
                head_norm_rope_backward(d_x + h * HD, d_w, d_q + ((b * NH + h) * T + t) * HD, x + h * HD, q_norm,
                                        cos_sin, s[h], HD);
            }
            for (int h = 0; h < NKV; h++) {
                size_t in = ((b * NKV + h) * T + t) * HD;
                head_norm_rope_backward(d_x + (NH + h) * HD, d_w + HD, d_k + in, x + (NH + h) * HD, k_norm, cos_sin,
                                        s[NH + h], HD);
                memcpy(d_x + (NH + NKV + h) * HD, d_v + in, HD * sizeof(real));
            }
            to_bf16(d_x, heads * HD);
        }
    }
    norm_weight_reduce(d_q_norm, partials, 2 * HD, HD, beta_weight);
    norm_weight_reduce(d_k_norm, partials + HD, 2 * HD, HD, beta_weight);
}

// ----------------------------------------------------------------------------
// attention: softmax(q k^T / sqrt(HD)) v, causal, and within a document where doc_start says so: position t sees
// positions doc_start[t] .. t of its row. NH/NKV query heads share a key/value head (GQA, Ainslie et al. 2023).
// The naive version materialises one head's T x T scores. The flash version (FlashAttention-2, Dao 2023) takes 64 rows
// of queries at a time, never touches a tile that is masked as a whole, and keeps only the log-sum-exp of each row.

void softmax_row(real* row, real* lse, size_t first, size_t begin, size_t end, size_t stop, real scale) {
    // row[j - first] for keys j: softmax(scale * row) over begin <= j < end, 0 elsewhere in first <= j < stop; lse (1)
    // =
    real maximum = -INFINITY, sum = 0;
    row -= first;
    #pragma omp simd reduction(max : maximum)
    for (size_t j = begin; j < end; j++) { maximum = row[j] > maximum ? row[j] : maximum; }
    #pragma omp simd reduction(+ : sum)
    for (size_t j = begin; j < end; j++) {
        row[j] = exp_real((row[j] - maximum) * scale);
        sum += row[j];
    }
    real inverse = 1 / sum;
    #pragma omp simd
    for (size_t j = begin; j < end; j++) { row[j] *= inverse; }
    for (size_t j = first; j < begin; j++) { row[j] = 0; }
    for (size_t j = end; j < stop; j++) { row[j] = 0; }
    to_bf16(row + first, stop - first);
    *lse = maximum * scale + log(sum);
}

typedef struct {
    size_t B, T;
    int NH, NKV, HD;
} AttentionShape;

const real* head_rows(const real* x, const AttentionShape* s, int num_heads, size_t b, int h) {
    return x + (b * num_heads + h) * s->T * s->HD; // the (T, HD) rows of one head in a (B, num_heads, T, HD) tensor
}

void attention_naive_forward(real* out, real* lse, const real* q, const real* k, const real* v, const int* doc_start,
                             real* scores, AttentionShape s) {
    // out (N,A) =, lse (B,NH,T) =; q (B,NH,T,HD), k and v (B,NKV,T,HD), doc_start (B,T) or NULL, scores (T,T)
    size_t T = s.T, HD = s.HD, A = (size_t)s.NH * HD;
    real scale = 1 / sqrt((real)HD);
    for (size_t b = 0; b < s.B; b++) {
        for (int h = 0; h < s.NH; h++) {
            const real* k_h = head_rows(k, &s, s.NKV, b, h / (s.NH / s.NKV));
            const real* v_h = head_rows(v, &s, s.NKV, b, h / (s.NH / s.NKV));
            gemm(false, true, T, T, HD, head_rows(q, &s, s.NH, b, h), HD, k_h, HD, 0, scores, T);
            #pragma omp parallel for
            for (size_t t = 0; t < T; t++) {
                size_t begin = doc_start ? (size_t)doc_start[b * T + t] : 0;
                softmax_row(scores + t * T, lse + (b * s.NH + h) * T + t, 0, begin, t + 1, T, scale);
            }
            gemm(false, false, T, HD, T, scores, T, v_h, HD, 0, out + b * T * A + h * HD, A);
        }
    }
}

void attention_flash_forward(real* out, real* lse, const real* q, const real* k, const real* v, const int* doc_start,
                             real* scores, AttentionShape s) {
    // the same, 64 query rows [i0,i1) at a time against keys [j0,i1); scores holds (64, T) a thread
    size_t T = s.T, HD = s.HD, A = (size_t)s.NH * HD, blocks = (T + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    real scale = 1 / sqrt((real)HD);
    #pragma omp parallel for schedule(dynamic)
    for (size_t task = 0; task < s.B * s.NH * blocks; task++) {
        size_t b = task / (s.NH * blocks), h = task / blocks % s.NH, block = blocks - 1 - task % blocks;
        size_t i0 = block * ATTENTION_ROWS, i1 = i0 + ATTENTION_ROWS < T ? i0 + ATTENTION_ROWS : T;
        size_t j0 = doc_start ? (size_t)doc_start[b * T + i0] : 0, keys = i1 - j0;
        const real* k_h = head_rows(k, &s, s.NKV, b, (int)h / (s.NH / s.NKV));
        const real* v_h = head_rows(v, &s, s.NKV, b, (int)h / (s.NH / s.NKV));
        real* p = scores + (size_t)thread_num() * ATTENTION_ROWS * T;
        gemm(false, true, i1 - i0, keys, HD, head_rows(q, &s, s.NH, b, (int)h) + i0 * HD, HD, k_h + j0 * HD, HD, 0, p,
             keys);
        for (size_t i = i0; i < i1; i++) {
            size_t begin = doc_start ? (size_t)doc_start[b * T + i] : 0;
            softmax_row(p + (i - i0) * keys, lse + (b * s.NH + h) * T + i, j0, begin, i + 1, i1, scale);
        }
        gemm(false, false, i1 - i0, HD, keys, p, keys, v_h + j0 * HD, HD, 0, out + (b * T + i0) * A + h * HD, A);
    }
}

void softmax_row_backward(real* p, real* d_p, const real* d_out, const real* out, real lse, size_t first, size_t begin,
                          size_t end, size_t stop, real scale, size_t HD) {
    // p: raw scores in, probabilities out; d_p: gradient of the probabilities in, gradient of the raw scores out;
    // d_out, out (HD): this row of attention's output. Keys as in softmax_row.
    real delta = 0; // rowsum(dO * O) = sum over j of P_j dP_j, without a pass over the keys
    #pragma omp simd reduction(+ : delta)
    for (size_t i = 0; i < HD; i++) { delta += d_out[i] * out[i]; }
    p -= first;
    d_p -= first;
    #pragma omp simd
    for (size_t j = begin; j < end; j++) {
        p[j] = exp_real(p[j] * scale - lse);
        d_p[j] = p[j] * (d_p[j] - delta) * scale;
    }
    if (end - begin == 1) { // one key to see is no choice: exactly zero, which AdamW would tell from a rounding error
        p[begin] = 1;
        d_p[begin] = 0;
    }
    for (size_t j = first; j < begin; j++) { p[j] = d_p[j] = 0; }
    for (size_t j = end; j < stop; j++) { p[j] = d_p[j] = 0; }
    to_bf16(p + first, stop - first);
    to_bf16(d_p + first, stop - first);
}

void attention_naive_backward(real* d_q, real* d_k, real* d_v, const real* d_out, const real* out, const real* lse,
                              const real* q, const real* k, const real* v, const int* doc_start, real* scores,
                              AttentionShape s) {
    // d_q, d_k, d_v (=) have the shapes of q, k, v; scores holds P and dP, (T,T) each
    size_t T = s.T, HD = s.HD, A = (size_t)s.NH * HD;
    int group = s.NH / s.NKV;
    real scale = 1 / sqrt((real)HD), *p = scores, *d_p = scores + T * T;
    for (size_t b = 0; b < s.B; b++) {
        for (int h = 0; h < s.NH; h++) {
            const real *q_h = head_rows(q, &s, s.NH, b, h), *k_h = head_rows(k, &s, s.NKV, b, h / group);
            const real *v_h = head_rows(v, &s, s.NKV, b, h / group), *d_out_h = d_out + b * T * A + h * HD;
            gemm(false, true, T, T, HD, q_h, HD, k_h, HD, 0, p, T);
            gemm(false, true, T, T, HD, d_out_h, A, v_h, HD, 0, d_p, T);
            #pragma omp parallel for
            for (size_t t = 0; t < T; t++) {
                size_t begin = doc_start ? (size_t)doc_start[b * T + t] : 0, row = (b * T + t) * A + h * HD;
                softmax_row_backward(p + t * T, d_p + t * T, d_out + row, out + row, lse[(b * s.NH + h) * T + t], 0,
                                     begin, t + 1, T, scale, HD);
            }
            real beta = h % group == 0 ? 0 : 1; // the heads of a group add up in their key/value head
            gemm(true, false, T, HD, T, p, T, d_out_h, A, beta, (real*)head_rows(d_v, &s, s.NKV, b, h / group), HD);
            gemm(true, false, T, HD, T, d_p, T, q_h, HD, beta, (real*)head_rows(d_k, &s, s.NKV, b, h / group), HD);
            gemm(false, false, T, HD, T, d_p, T, k_h, HD, 0, (real*)head_rows(d_q, &s, s.NH, b, h), HD);
        }
    }
}

void attention_flash_backward(real* d_q, real* d_k, real* d_v, const real* d_out, const real* out, const real* lse,
                              const real* q, const real* k, const real* v, const int* doc_start, real* scores,
                              AttentionShape s) {
    // the same, 64 query rows at a time; one task owns a key/value head and with it all sums into d_k and d_v
    size_t T = s.T, HD = s.HD, A = (size_t)s.NH * HD;
    int group = s.NH / s.NKV;
    real scale = 1 / sqrt((real)HD);
    #pragma omp parallel for schedule(dynamic)
    for (size_t task = 0; task < s.B * s.NKV; task++) {
        size_t b = task / s.NKV;
        int kv = (int)(task % s.NKV);
        real* p = scores + (size_t)thread_num() * 2 * ATTENTION_ROWS * T;
        real* d_p = p + ATTENTION_ROWS * T;
        const real *k_h = head_rows(k, &s, s.NKV, b, kv), *v_h = head_rows(v, &s, s.NKV, b, kv);
        real *d_k_h = (real*)head_rows(d_k, &s, s.NKV, b, kv), *d_v_h = (real*)head_rows(d_v, &s, s.NKV, b, kv);
        memset(d_k_h, 0, T * HD * sizeof(real));
        memset(d_v_h, 0, T * HD * sizeof(real));
        for (int h = kv * group; h < (kv + 1) * group; h++) {
            const real* q_h = head_rows(q, &s, s.NH, b, h);
            real* d_q_h = (real*)head_rows(d_q, &s, s.NH, b, h);
            for (size_t i0 = 0; i0 < T; i0 += ATTENTION_ROWS) {
                size_t i1 = i0 + ATTENTION_ROWS < T ? i0 + ATTENTION_ROWS : T, rows = i1 - i0;
                size_t j0 = doc_start ? (size_t)doc_start[b * T + i0] : 0, keys = i1 - j0;
                const real* d_out_i = d_out + (b * T + i0) * A + h * HD;
                gemm(false, true, rows, keys, HD, q_h + i0 * HD, HD, k_h + j0 * HD, HD, 0, p, keys);
                gemm(false, true, rows, keys, HD, d_out_i, A, v_h + j0 * HD, HD, 0, d_p, keys);
                for (size_t i = i0; i < i1; i++) {
                    size_t begin = doc_start ? (size_t)doc_start[b * T + i] : 0, row = (b * T + i) * A + h * HD,
                           at = (i - i0) * keys;
                    softmax_row_backward(p + at, d_p + at, d_out + row, out + row, lse[(b * s.NH + h) * T + i], j0,
                                         begin, i + 1, i1, scale, HD);
                }
                gemm(true, false, keys, HD, rows, p, keys, d_out_i, A, 1, d_v_h + j0 * HD, HD);
                gemm(true, false, keys, HD, rows, d_p, keys, q_h + i0 * HD, HD, 1, d_k_h + j0 * HD, HD);
                gemm(false, false, rows, HD, keys, d_p, keys, k_h + j0 * HD, HD, 0, d_q_h + i0 * HD, HD);
            }
        }
    }
}

void attention_decode(real* out, const real* q, const real* k, const real* v, real* scores, size_t position,
                      AttentionShape s) {
    // one new token at `position` against the cache: out (A) =, q (A), k and v (NKV,T,HD) with rows 0..position filled
    int group = s.NH / s.NKV;
    real scale = 1 / sqrt((real)s.HD), lse;
    for (int h = 0; h < s.NH; h++) {
        gemm(false, true, 1, position + 1, s.HD, q + h * s.HD, s.HD, head_rows(k, &s, s.NKV, 0, h / group), s.HD, 0,
             scores, position + 1);
        softmax_row(scores, &lse, 0, 0, position + 1, position + 1, scale);
        gemm(false, false, 1, s.HD, position + 1, scores, position + 1, head_rows(v, &s, s.NKV, 0, h / group), s.HD, 0,
             out + h * s.HD, s.HD);
    }
    to_bf16(out, (size_t)s.NH * s.HD);
}

// ----------------------------------------------------------------------------
// router: which K of E experts a token goes to, and with what weights (Shazeer et al. 2017; softmax before top-k and
// the optional renormalisation as in Qwen3-MoE). Two losses keep the load even: the load-balancing loss of the Switch
// Transformer (Fedus et al. 2021) exactly as Hugging Face's load_balancing_loss_func pools it, and the z-loss of ST-MoE
// (Zoph et al. 2022), which keeps router logits small.

void router_forward(real* router_logits, real* router_probs, real* router_lse, const real* inp, const real* router,
                    size_t N, size_t C, int E) {
    // router_logits (N,E) = inp router^T, in fp32; router_probs (N,E) = softmax; router_lse (N) = log sum exp
    gemm_fp32(false, true, N, E, C, inp, C, router, C, 0, router_logits, E);
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        memcpy(router_probs + n * E, router_logits + n * E, E * sizeof(real));
        softmax_row(router_probs + n * E, router_lse + n, 0, 0, E, E, 1);
    }
}

void topk_forward(int* router_indices, real* router_weights, const real* router_probs, const int* forced, size_t N,
                  int E, int K, bool norm_topk_prob) {
    // router_indices (N,K) = the K most probable experts, ties to the lower index (or `forced` (N,K) where not NULL);
    // router_weights (N,K) = their probabilities, divided by their sum if norm_topk_prob
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const real* probs = router_probs + n * E;
        int* chosen = router_indices + n * K;
        real sum = 0;
        for (int k = 0; k < K; k++) {
            int best = forced ? forced[n * K + k] : -1;
            for (int e = 0; e < E && !forced; e++) {
                bool taken = false;
                for (int j = 0; j < k; j++) { taken |= chosen[j] == e; }
                if (!taken && (best < 0 || probs[e] > probs[best])) {
                    best = e;
                } // always K different experts, even for NaNs
            }
            chosen[k] = best;
            router_weights[n * K + k] = probs[best];
            sum += probs[best];
        }
        for (int k = 0; k < K && norm_topk_prob; k++) { router_weights[n * K + k] /= sum; }
    }
}

typedef struct {
    double load_balancing_scale; // coefficient * E / rows pooled over layers, times this microbatch's share of the step
    double z_scale;              // coefficient / counted targets of the step
    const double* expert_share;  // (E) f_e of load_balancing_loss
} RouterLossScale;

void router_backward(real* d_router_logits, const real* d_router_weights, const real* router_probs,
                     const real* router_lse, const int* router_indices, const real* router_weights, const int* targets,
                     RouterLossScale scale, size_t N, int E, int K, bool norm_topk_prob) {
    // d_router_logits (N,E) =, from d_router_weights (N,K) through renormalisation and softmax; the choice of experts
    // has no gradient. The balance loss acts on all probabilities, the z-loss on the logits of tokens with a counted
    // target.
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const real *probs = router_probs + n * E, *d_w = d_router_weights + n * K, *w = router_weights + n * K;
        const int* chosen = router_indices + n * K;
        real* d_p = d_router_logits + n * E;
        for (int e = 0; e < E; e++) { d_p[e] = (real)(scale.load_balancing_scale * scale.expert_share[e]); }
        real dot = 0, sum = 0;
        for (int k = 0; k < K; k++) {
            dot += d_w[k] * w[k];
            sum += probs[chosen[k]];
        }
        for (int k = 0; k < K; k++) { d_p[chosen[k]] += norm_topk_prob ? (d_w[k] - dot) / sum : d_w[k]; }
        dot = 0;
        for (int e = 0; e < E; e++) { dot += d_p[e] * probs[e]; }
        real d_lse = targets[n] < 0 ? 0 : (real)(2 * scale.z_scale) * router_lse[n];
        for (int e = 0; e < E; e++) { d_p[e] = probs[e] * (d_p[e] - dot + d_lse); }
    }
}

// What the two losses need from a forward pass, summed over its MoE layers: O(E), whatever the number of tokens.
typedef struct {
    double* expert_count; // (E) slots that chose expert e
    double* prob_sum;     // (E) sum of its full softmax probability
    double z_sum;         // sum over layers and counted tokens of router_lse^2
    double rows;          // MoE layers * N
} RouterStats;

void router_stats_add(RouterStats* stats, const real* router_probs, const real* router_lse,
                      const int* tokens_per_expert, const int* targets, size_t N, int E) {
    for (int e = 0; e < E; e++) { stats->expert_count[e] += tokens_per_expert[e]; }
    for (size_t n = 0; n < N; n++) {
        for (int e = 0; e < E; e++) { stats->prob_sum[e] += router_probs[n * E + e]; }
        if (targets[n] >= 0) { stats->z_sum += (double)router_lse[n] * router_lse[n]; }
    }
    stats->rows += (double)N;
}

double router_entropy(const real* router_logits, const real* router_probs, const real* router_lse, size_t N, int E) {
    // sum over the tokens of -sum_e p_e ln p_e, in nats: ln E a token where the router has no preference, 0 where it is
    // certain. ln p_e = logit_e - lse, so no logarithm is taken.
    double sum = 0;
    for (size_t n = 0; n < N; n++) {
        double mean = 0; // of the logits, by probability
        for (int e = 0; e < E; e++) { mean += (double)router_probs[n * E + e] * router_logits[n * E + e]; }
        sum += router_lse[n] - mean;
    }
    return sum;
}

double load_balancing_loss(const RouterStats* stats, double* expert_share, int E) {
    // E * sum over e of f_e P_e, both pooled over all MoE layers; expert_share (E) = f_e (sums to K); perfect balance
    // gives K
    double loss = 0;
    for (int e = 0; e < E; e++) {
        expert_share[e] = stats->rows > 0 ? stats->expert_count[e] / stats->rows : 0;
        loss += stats->rows > 0 ? expert_share[e] * stats->prob_sum[e] / stats->rows : 0;
    }
    return E * loss;
}

// ----------------------------------------------------------------------------
// permute and combine: to the experts and back. Rows are sorted by expert, so that an expert is one matrix product;
// no token is dropped and no expert has a capacity (dropless, MegaBlocks: Gale et al. 2022).

void route_rows(int* tokens_per_expert, int* expert_offsets, int* expert_order, int* row_slot, int* slot_row,
                const int* router_indices, size_t N, int E, int K) {
    // a counting sort of the slots by expert, stable: an expert's rows keep the order of their tokens
    memset(tokens_per_expert, 0, E * sizeof(int));
    for (size_t slot = 0; slot < N * K; slot++) { tokens_per_expert[router_indices[slot]]++; }
    expert_offsets[0] = 0;
    for (int e = 0; e < E; e++) { expert_offsets[e + 1] = expert_offsets[e] + tokens_per_expert[e]; }
    for (int e = 0; e < E; e++) { expert_order[e] = expert_offsets[e]; } // for the moment: next free row of each expert
    for (size_t slot = 0; slot < N * K; slot++) {
        int row = expert_order[router_indices[slot]]++;
        row_slot[row] = (int)slot;
        slot_row[slot] = row;
    }
    for (int e = 0; e < E; e++) { // insertion sort, largest first
        int i = e;
        for (; i > 0 && tokens_per_expert[expert_order[i - 1]] < tokens_per_expert[e]; i--) {
            expert_order[i] = expert_order[i - 1];
        }
        expert_order[i] = e;
    }
}

void permute_forward(real* expert_in, const real* inp, const int* row_slot, size_t begin, size_t end, int K, size_t C) {
    // expert_in[row,:] = inp[token of row,:] for rows begin..end
    #pragma omp parallel for
    for (size_t row = begin; row < end; row++) {
        copy_operand(expert_in + row * C, inp + (size_t)(row_slot[row] / K) * C, C);
    }
}

void combine_forward(real* out, const real* expert_out, const real* router_weights, const int* slot_row, size_t N,
                     int K, size_t C) {
    // the weighted way back: out[n,:] = sum over k of router_weights[n,k] * expert_out[slot_row[n,k],:]
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        real* out_n = out + n * C;
        memset(out_n, 0, C * sizeof(real));
        for (int k = 0; k < K; k++) { // k ascends, so the sum has one order and the result one value
            const real* row = expert_out + (size_t)slot_row[n * K + k] * C;
            real w = router_weights[n * K + k];
            for (size_t c = 0; c < C; c++) { out_n[c] += w * row[c]; }
        }
    }
}

void combine_backward(real* d_expert_out, real* d_router_weights, const real* d_out, const real* expert_out,
                      const real* router_weights, const int* row_slot, size_t begin, size_t end, int K, size_t C) {
    // rows begin..end: d_expert_out[row,:] = weight of its slot * d_out[its token,:]; d_router_weights[slot] = d_out .
    // expert_out
    #pragma omp parallel for
    for (size_t row = begin; row < end; row++) {
        size_t slot = (size_t)row_slot[row];
        const real *d_out_n = d_out + slot / K * C, *expert_out_r = expert_out + row * C;
        real *d_row = d_expert_out + row * C, w = router_weights[slot], dot = 0;
        #pragma omp simd reduction(+ : dot)
        for (size_t c = 0; c < C; c++) { dot += d_out_n[c] * expert_out_r[c]; }
        for (size_t c = 0; c < C; c++) { d_row[c] = w * d_out_n[c]; }
        to_bf16(d_row, C);
        d_router_weights[slot] = dot;
    }
}

void permute_backward(real* d_inp, const real* d_expert_in, const int* slot_row, size_t N, int K, size_t C) {
    // d_inp[n,:] = sum over k of d_expert_in[slot_row[n,k],:]
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        real* d_n = d_inp + n * C;
        memcpy(d_n, d_expert_in + (size_t)slot_row[n * K] * C, C * sizeof(real));
        for (int k = 1; k < K; k++) {
            const real* row = d_expert_in + (size_t)slot_row[n * K + k] * C;
            for (size_t c = 0; c < C; c++) { d_n[c] += row[c]; }
        }
    }
}

// ----------------------------------------------------------------------------
// experts: each a SwiGLU MLP (Shazeer 2020), down(silu(gate(x)) * up(x)). A dense layer is one of them for all tokens.

void swiglu_forward(real* act, const real* gate_up, size_t N, size_t F) {
    // act (N,F) = silu(gate) * up; gate_up (N,2F) holds gate, then up
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const real *gate = gate_up + n * 2 * F, *up = gate + F;
        real* a = act + n * F;
        #pragma omp simd
        for (size_t f = 0; f < F; f++) { a[f] = gate[f] / (1 + exp_real(-gate[f])) * up[f]; }
        to_bf16(a, F);
    }
}

void swiglu_backward(real* d_gate_up, const real* d_act, const real* gate_up, size_t N, size_t F) {
    // d_gate_up (N,2F) =; silu'(g) = s + g s (1-s) with s = sigmoid(g)
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const real *gate = gate_up + n * 2 * F, *up = gate + F, *d_a = d_act + n * F;
        real *d_gate = d_gate_up + n * 2 * F, *d_up = d_gate + F;
        #pragma omp simd
        for (size_t f = 0; f < F; f++) {
            real s = 1 / (1 + exp_real(-gate[f]));
            d_gate[f] = d_a[f] * up[f] * (s + gate[f] * s * (1 - s));
            d_up[f] = d_a[f] * gate[f] * s;
        }
        to_bf16(d_gate, 2 * F);
    }
}

void mlp_forward(real* out, real* act, real* gate_up, const real* inp, const real* gate_up_proj, const real* down_proj,
                 size_t N, size_t C, size_t F) {
    // out (N,C) = swiglu(inp gate_up_proj^T) down_proj^T; gate_up (N,2F) and act (N,F) are kept
    matmul_forward(gate_up, inp, gate_up_proj, N, C, 2 * F);
    swiglu_forward(act, gate_up, N, F);
    matmul_forward(out, act, down_proj, N, F, C);
}

void mlp_backward(real* d_inp, real* d_gate_up_proj, real* d_down_proj, real* d_gate_up, real* d_act, const real* d_out,
                  const real* inp, const real* act, const real* gate_up, const real* gate_up_proj,
                  const real* down_proj, size_t N, size_t C, size_t F, real beta_weight) {
    // d_inp (N,C), d_gate_up (N,2F), d_act (N,F) are written; the weight gradients are added to beta_weight *
    // themselves
    matmul_backward(d_act, d_down_proj, d_out, act, down_proj, N, F, C, 0, beta_weight);
    swiglu_backward(d_gate_up, d_act, gate_up, N, F);
    matmul_backward(d_inp, d_gate_up_proj, d_gate_up, inp, gate_up_proj, N, C, 2 * F, 0, beta_weight);
}

void expert_forward(LayerActs* a, const LayerParams* w, int e, int K, size_t C, size_t F) {
    // expert e on its rows: gather, gate and up, SwiGLU, down
    size_t begin = a->expert_offsets[e], end = a->expert_offsets[e + 1];
    permute_forward(a->expert_in, a->mlp_norm, a->row_slot, begin, end, K, C);
    mlp_forward(a->expert_out + begin * C, a->expert_act + begin * F, a->gate_up + begin * 2 * F,
                a->expert_in + begin * C, w->gate_up_proj + e * 2 * F * C, w->down_proj + e * C * F, end - begin, C, F);
}

void expert_backward(Acts* acts, LayerParams* d_w, const LayerActs* a, const LayerParams* w, int e, int K, size_t C,
                     size_t F, real beta_weight) {
    size_t begin = a->expert_offsets[e], end = a->expert_offsets[e + 1];
    combine_backward(acts->d_expert_out, acts->d_router_weights, acts->d_residual, a->expert_out, a->router_weights,
                     a->row_slot, begin, end, K, C);
    mlp_backward(acts->d_expert_in + begin * C, d_w->gate_up_proj + e * 2 * F * C, d_w->down_proj + e * C * F,
                 acts->d_gate_up + begin * 2 * F, acts->d_expert_act + begin * F, acts->d_expert_out + begin * C,
                 a->expert_in + begin * C, a->expert_act + begin * F, a->gate_up + begin * 2 * F,
                 w->gate_up_proj + e * 2 * F * C, w->down_proj + e * C * F, end - begin, C, F, beta_weight);
}

bool experts_in_parallel(const LayerActs* a, int E, enum ExpertsKind kind) {
    // grouped: an expert a thread, each GEMM on one core, gather and SwiGLU while its rows are in cache. That is the
    // faster way unless one expert has more than a thread's fair share of the rows; then, and under `loop`, experts go
    // one after another, each GEMM on all threads.
    return kind == EXPERTS_GROUPED &&
           (size_t)a->tokens_per_expert[a->expert_order[0]] * num_threads() <= (size_t)a->expert_offsets[E];
}

void experts_forward(LayerActs* a, const LayerParams* w, enum ExpertsKind kind, int E, int K, size_t C, size_t F) {
    if (!experts_in_parallel(a, E, kind)) {
        for (int e = 0; e < E; e++) { expert_forward(a, w, e, K, C, F); }
        return;
    }
    #pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < E; i++) { expert_forward(a, w, a->expert_order[i], K, C, F); }
}

void experts_backward(Acts* acts, LayerParams* d_w, const LayerActs* a, const LayerParams* w, enum ExpertsKind kind,
                      int E, int K, size_t C, size_t F, real beta_weight) {
    if (!experts_in_parallel(a, E, kind)) {
        for (int e = 0; e < E; e++) { expert_backward(acts, d_w, a, w, e, K, C, F, beta_weight); }
        return;
    }
    #pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < E; i++) { expert_backward(acts, d_w, a, w, a->expert_order[i], K, C, F, beta_weight); }
}

// ----------------------------------------------------------------------------
// lm_head with its loss, in chunks of rows: the (N, V) logits never exist as a whole, and their gradient overwrites
// them

void cross_entropy_row(real* loss, real* logits, int target, size_t V, real d_loss, bool want_grad) {
    // one row: loss (1) = -log softmax(logits)[target], 0 if target < 0; want_grad: logits = d_loss * (softmax -
    // one-hot)
    if (target < 0) {
        *loss = 0;
        if (want_grad) { memset(logits, 0, V * sizeof(real)); } // zero in bf16, too
        return;
    }
    real maximum = -INFINITY, target_logit = logits[target];
    #pragma omp simd reduction(max : maximum)
    for (size_t v = 0; v < V; v++) { maximum = logits[v] > maximum ? logits[v] : maximum; }
    double sum = 0; // of partial sums: 151936 floats added one by one would lose the loss's fifth digit
    for (size_t begin = 0; begin < V; begin += SUM_BLOCK) {
        size_t end = begin + SUM_BLOCK < V ? begin + SUM_BLOCK : V;
        real partial = 0;
        #pragma omp simd reduction(+ : partial)
        for (size_t v = begin; v < end; v++) {
            logits[v] = exp_real(logits[v] - maximum);
            partial += logits[v];
        }
        sum += partial;
    }
    *loss = (real)log(sum) + maximum - target_logit;
    if (!want_grad) { return; }
    real scale = (real)(d_loss / sum);
    #pragma omp simd
    for (size_t v = 0; v < V; v++) { logits[v] *= scale; }
    logits[target] -= d_loss;
    to_bf16(logits, V); // in place: from here on the row can only be read by products
}

void lm_head_forward(real* logits, real* losses, const real* inp, const real* lm_head, const int* targets, size_t rows,
                     size_t C, size_t V, real d_loss, bool want_grad, real* logits_copy) {
    // a chunk: losses (rows) =; logits (rows,V) = d_logits if want_grad; logits_copy (rows,V) = the logits, where not
    // NULL
    matmul_forward(logits, inp, lm_head, rows, C, V);
    if (logits_copy) { memcpy(logits_copy, logits, rows * V * sizeof(real)); }
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < rows; n++) {
        cross_entropy_row(losses + n, logits + n * V, targets[n], V, d_loss, want_grad);
    }
}

// ----------------------------------------------------------------------------
// grad norm and AdamW (Loshchilov and Hutter 2019)

double grad_norm_forward(const real* grads, double* partials, size_t count) {
    // global L2 norm; partials holds a double for every SUM_BLOCK numbers, summed in order: one value for any thread
    // count
    size_t blocks = (count + SUM_BLOCK - 1) / SUM_BLOCK;
    #pragma omp parallel for schedule(static)
    for (size_t b = 0; b < blocks; b++) {
        size_t begin = b * SUM_BLOCK, end = begin + SUM_BLOCK < count ? begin + SUM_BLOCK : count;
        double sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = begin; i < end; i++) { sum += (double)grads[i] * grads[i]; }
        partials[b] = sum;
    }
    double sum = 0;
    for (size_t b = 0; b < blocks; b++) { sum += partials[b]; }
    return sqrt(sum);
}

typedef struct {
    real lr, beta1, beta2, eps, weight_decay;
    real correction1, correction2; // 1 - beta^t
    real grad_scale;               // clipping
} AdamW;

void adamw_range(real* params, const real* grads, real* m, real* v, size_t begin, size_t end, AdamW a, bool decays) {
    // m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p = (1 - lr wd) p - lr (m/c1) / (sqrt(v/c2) + eps)
    real keep = decays ? 1 - a.lr * a.weight_decay : 1, step = a.lr / a.correction1, inv_c2 = 1 / sqrt(a.correction2);
    for (size_t i0 = begin; i0 < end; i0 += SUM_BLOCK) {
        size_t i1 = i0 + SUM_BLOCK < end ? i0 + SUM_BLOCK : end;
        #pragma omp simd
        for (size_t i = i0; i < i1; i++) {
            real g = grads[i] * a.grad_scale;
            real mi = a.beta1 * m[i] + (1 - a.beta1) * g;
            real vi = a.beta2 * v[i] + (1 - a.beta2) * g * g;
            m[i] = mi;
            v[i] = vi;
            params[i] = keep * params[i] - step * mi / (sqrt(vi) * inv_c2 + a.eps);
        }
        to_bf16(params + i0, i1 - i0);
    }
}

void adamw_fused(real* params, const real* grads, real* m, real* v, const ParamTable* table, AdamW a) {
    // all tensors in one sweep: each thread updates one contiguous range of the arena, whichever tensors lie in it
    #pragma omp parallel
    {
        size_t threads = 1, total = table->num_parameters;
#ifdef _OPENMP
        threads = (size_t)omp_get_num_threads();
#endif
        size_t begin = total * (size_t)thread_num() / threads, end = total * ((size_t)thread_num() + 1) / threads;
        for (size_t i = 0; i < table->count; i++) {
            const ParamTensor* t = &table->tensors[i];
            size_t from = t->offset > begin ? t->offset : begin,
                   to = t->offset + t->numel < end ? t->offset + t->numel : end;
            if (from < to) { adamw_range(params, grads, m, v, from, to, a, t->decays); }
        }
    }
}

void adamw_simple(real* params, const real* grads, real* m, real* v, const ParamTable* table, AdamW a) {
    // the textbook way, a pass a formula and a tensor: what the fused sweep is compared with on the ladder
    for (size_t i = 0; i < table->count; i++) {
        const ParamTensor* t = &table->tensors[i];
        size_t begin = t->offset, end = t->offset + t->numel;
        #pragma omp parallel for
        for (size_t j = begin; j < end; j++) { m[j] = a.beta1 * m[j] + (1 - a.beta1) * (grads[j] * a.grad_scale); }
        #pragma omp parallel for
        for (size_t j = begin; j < end; j++) {
            real g = grads[j] * a.grad_scale;
            v[j] = a.beta2 * v[j] + (1 - a.beta2) * g * g;
        }
        real keep = t->decays ? 1 - a.lr * a.weight_decay : 1;
        #pragma omp parallel for
        for (size_t j = begin; j < end; j++) { params[j] *= keep; }
        #pragma omp parallel for
        for (size_t j = begin; j < end; j++) {
            params[j] -= a.lr / a.correction1 * m[j] / (sqrt(v[j]) * (1 / sqrt(a.correction2)) + a.eps);
        }
        to_bf16_all(params + begin, t->numel);
    }
}

// ----------------------------------------------------------------------------
// the model: memory, initialisation

typedef struct {
    enum AttentionKind attention;
    enum ExpertsKind experts;
    bool fused_optimizer;
    double aux_loss_coef, z_loss_coef;
    bool bf16;
} Switches;

typedef struct {
    MoEConfig config;
    ParamTable table;
    Switches switches;
    size_t B, T;
    // four arenas of table.num_parameters numbers each, in the order of the table
    real *params, *grads, *m, *v;
    Params w, d_w;
    Acts acts;
    real* rope;           // (T, HD)
    double* norm_sums;    // scratch of grad_norm_forward
    RouterStats stats;    // of the last forward
    double* expert_share; // (E) f_e of the last forward
    double* expert_load;  // (L, E) slots since the start of the step, for the log
    double* entropy_sum;  // (L) router_entropy of the tokens since the start of the step, for the log
    Profiler* profiler;   // NULL: nobody watches
} Model;

// Where the memory goes; --dry-run prints it and model_create allocates just this.
typedef struct {
    size_t weights, gradients, moments, activations, backward, logits, bf16, sampling, other;
} MemoryPlan;

size_t embedding_numbers(const MoEConfig* c, const ParamTable* table) {
    // how many weights come before the first that is in a product
    return c->tie_word_embeddings ? 0 : param_find(table, "model.layers.0.input_layernorm.weight")->offset;
}

MemoryPlan memory_plan(Acts* acts, const MoEConfig* c, const ParamTable* table, const Switches* s, size_t B, size_t T,
                       bool training) {
    // bytes a family; acts is laid out at NULL on the way (acts->layers must have room)
    MemoryPlan p;
    memset(&p, 0, sizeof(p));
    Arena mem = {NULL, 0};
    p.weights = table->num_parameters * sizeof(real);
    p.gradients = training ? p.weights : 0;
    p.moments = training ? 2 * p.weights : 0;
    acts_layout(acts, &mem, c, B, T, s->attention);
    p.activations = mem.used;
    if (training) { backward_layout(acts, &mem, c, B, T); }
    p.backward = mem.used - p.activations;
    logits_layout(acts, &mem, c, B, T);
    p.logits = mem.used - p.activations - p.backward;
    size_t copied = p.weights - embedding_numbers(c, table) * sizeof(real) + p.activations + p.backward;
    p.bf16 = s->bf16 ? copied / 2 : 0; // half of it is only reserved: much of the activations goes into no product
    p.other = T * c->head_dim * sizeof(real) + (training ? table->num_parameters / SUM_BLOCK * sizeof(double) : 0);
    return p;
}

void model_create(Model* model, const MoEConfig* config, Switches switches, size_t B, size_t T, bool training) {
    // allocates everything the model will ever need; nothing is allocated in a step
    memset(model, 0, sizeof(*model));
    model->config = *config;
    model->switches = switches;
    model->B = B;
    model->T = T;
    size_t L = config->num_hidden_layers, E = config->num_experts;
    ParamTable* table = &model->table;
    param_table_build(table, config);
    model->w.layers = (LayerParams*)callocCheck(L, sizeof(LayerParams));
    model->d_w.layers = (LayerParams*)callocCheck(L, sizeof(LayerParams));
    model->acts.layers = (LayerActs*)callocCheck(L, sizeof(LayerActs));
    model->params = (real*)arena_alloc(mul_check(table->num_parameters, sizeof(real)));
    params_point(&model->w, model->params, table, config);
    if (training) {
        model->grads = (real*)arena_alloc(table->num_parameters * sizeof(real));
        model->m = (real*)arena_alloc(table->num_parameters * sizeof(real));
        model->v = (real*)arena_alloc(table->num_parameters * sizeof(real));
        params_point(&model->d_w, model->grads, table, config);
        model->norm_sums = (double*)callocCheck(table->num_parameters / SUM_BLOCK + 1, sizeof(double));
    }
    MemoryPlan plan = memory_plan(&model->acts, config, table, &switches, B, T, training);
    Arena mem = {(char*)arena_alloc(plan.activations + plan.logits + plan.backward), 0};
    if (training) { // only then is all of it used: generation has activations of its own
        real* arenas[] = {model->params, model->grads, model->m, model->v};
        for (int i = 0; i < 4; i++) { arena_touch(arenas[i], table->num_parameters * sizeof(real)); }
        arena_touch(mem.base, plan.activations + plan.logits + plan.backward);
    }
    acts_layout(&model->acts, &mem, config, B, T, switches.attention);
    if (training) { backward_layout(&model->acts, &mem, config, B, T); }
    size_t before_logits = mem.used / sizeof(real);
    logits_layout(&model->acts, &mem, config, B, T);
    if (switches.bf16) {
        size_t first = embedding_numbers(config, table);
        bf16_copy_add((real*)mem.base, before_logits, false);
        bf16_copy_add(model->params + first, table->num_parameters - first, false);
        bf16_copy_add(model->acts.logits, model->acts.logit_rows * config->vocab_size, true);
    }
    model->rope = (real*)mallocCheck(T * config->head_dim * sizeof(real));
    rope_table(model->rope, T, config->head_dim, config->rope_theta);
    model->stats.expert_count = (double*)callocCheck(E, sizeof(double));
    model->stats.prob_sum = (double*)callocCheck(E, sizeof(double));
    model->expert_share = (double*)callocCheck(E, sizeof(double));
    model->expert_load = (double*)callocCheck(L * E, sizeof(double));
    model->entropy_sum = (double*)callocCheck(L, sizeof(double));
}

void model_free(Model* model) {
    // the activations are one allocation, and the first layer's first tensor is where it begins
    bf16_copy_remove(model->acts.logits);
    bf16_copy_remove(model->acts.layers[0].residual_attn);
    bf16_copy_remove(model->params + embedding_numbers(&model->config, &model->table));
    free(model->acts.layers[0].residual_attn);
    free(model->acts.layers);
    free(model->w.layers);
    free(model->d_w.layers);
    free(model->params);
    free(model->grads);
    free(model->m);
    free(model->v);
    free(model->norm_sums);
    free(model->rope);
    free(model->stats.expert_count);
    free(model->stats.prob_sum);
    free(model->expert_share);
    free(model->expert_load);
    free(model->entropy_sum);
    param_table_free(&model->table);
}

void tensor_init(real* out, uint64_t seed, const ParamTensor* t) {
    // norms are 1, matrices normal(0, init_std); a number depends on seed, name and index alone, so any split gives the
    // same
    enum { CHUNK = 4096 };
    size_t chunks = (t->numel + CHUNK - 1) / CHUNK;
    #pragma omp parallel for schedule(static)
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        size_t begin = chunk * CHUNK, count = t->numel - begin < CHUNK ? t->numel - begin : (size_t)CHUNK;
        float values[CHUNK];
        if (t->init_std == 0) {
            for (size_t i = 0; i < count; i++) { values[i] = 1; }
        } else {
            normal_fill(values, seed, t->name, begin, count, t->init_std);
        }
        for (size_t i = 0; i < count; i++) { out[begin + i] = (real)values[i]; }
    }
}

void zero_real(real* out, size_t count) {
    // in parallel: as with every array of this size, a thread should meet its pages first
    size_t chunks = (count + SUM_BLOCK - 1) / SUM_BLOCK;
    #pragma omp parallel for schedule(static)
    for (size_t b = 0; b < chunks; b++) {
        size_t begin = b * SUM_BLOCK, n = count - begin < SUM_BLOCK ? count - begin : (size_t)SUM_BLOCK;
        memset(out + begin, 0, n * sizeof(real));
    }
}

void to_bf16_weights(Model* model) {
    // after the weights have come from elsewhere than from an update
    size_t first = embedding_numbers(&model->config, &model->table);
    to_bf16_all(model->params + first, model->table.num_parameters - first);
}

void model_init(Model* model, uint64_t seed) {
    for (size_t i = 0; i < model->table.count; i++) {
        tensor_init(model->params + model->table.tensors[i].offset, seed, &model->table.tensors[i]);
    }
    to_bf16_weights(model);
}

void optimizer_init(Model* model) {
    zero_real(model->m, model->table.num_parameters);
    zero_real(model->v, model->table.num_parameters);
}

// ----------------------------------------------------------------------------
// the model: forward, loss, backward, update

// One microbatch and what the whole optimizer step needs to know to give it its due weight.
typedef struct {
    const int *tokens, *targets; // (B, T); a negative target is not counted
    const int* doc_start;        // (B, T) or NULL: attention's first position of each token
    int** forced_indices;        // (L) of (N, K), NULL in dense layers; NULL: the router chooses
    double counted;              // targets counted in the whole step: all microbatches, all ranks
    double share;                // this microbatch's share of the step's tokens, for the balance loss
} Microbatch;

typedef struct {
    double loss, ce_loss, aux_loss, z_loss;
} Losses;

void phase(Model* model, enum Phase p, int layer) {
    // from here on the time belongs to this phase of this layer
    profiler_phase(model->profiler, p, layer); // NULL: nobody watches
}

void attention_forward(Model* model, LayerActs* a, const int* doc_start, size_t B, size_t T) {
    const MoEConfig* c = &model->config;
    AttentionShape shape = {B, T, c->num_attention_heads, c->num_key_value_heads, c->head_dim};
    if (model->switches.attention == ATTENTION_NAIVE) {
        attention_naive_forward(a->attn, a->lse, a->q, a->k, a->v, doc_start, model->acts.attn_scores, shape);
    } else {
        attention_flash_forward(a->attn, a->lse, a->q, a->k, a->v, doc_start, model->acts.attn_scores, shape);
    }
    to_bf16_all(a->attn, B * T * shape.NH * shape.HD);
}

void attention_backward(Model* model, LayerActs* a, const int* doc_start, size_t B, size_t T) {
    const MoEConfig* c = &model->config;
    Acts* acts = &model->acts;
    AttentionShape shape = {B, T, c->num_attention_heads, c->num_key_value_heads, c->head_dim};
    to_bf16_all(acts->d_attn, B * T * shape.NH * shape.HD);
    if (model->switches.attention == ATTENTION_NAIVE) {
        attention_naive_backward(acts->d_q, acts->d_k, acts->d_v, acts->d_attn, a->attn, a->lse, a->q, a->k, a->v,
                                 doc_start, acts->attn_scores, shape);
    } else {
        attention_flash_backward(acts->d_q, acts->d_k, acts->d_v, acts->d_attn, a->attn, a->lse, a->q, a->k, a->v,
                                 doc_start, acts->attn_scores, shape);
    }
}

void moe_forward(Model* model, Acts* acts, int l, const int* forced, size_t N) {
    // acts->branch (N,C) = the layer's MLP of a->mlp_norm: a mixture of experts, or one dense SwiGLU
    const MoEConfig* c = &model->config;
    LayerActs* a = &acts->layers[l];
    const LayerParams* w = &model->w.layers[l];
    size_t C = c->hidden_size, F = config_layer_ffn_size(c, l);
    int E = c->num_experts, K = c->num_experts_per_tok;
    if (!w->router) {
        phase(model, PHASE_EXPERTS, l);
        mlp_forward(acts->branch, a->expert_act, a->gate_up, a->mlp_norm, w->gate_up_proj, w->down_proj, N, C, F);
        return;
    }
    phase(model, PHASE_ROUTER, l);
    router_forward(a->router_logits, a->router_probs, a->router_lse, a->mlp_norm, w->router, N, C, E);
    topk_forward(a->router_indices, a->router_weights, a->router_probs, forced, N, E, K, c->norm_topk_prob);
    phase(model, PHASE_PERMUTE, l);
    route_rows(a->tokens_per_expert, a->expert_offsets, a->expert_order, a->row_slot, a->slot_row, a->router_indices, N,
               E, K);
    phase(model, PHASE_EXPERTS, l);
    experts_forward(a, w, model->switches.experts, E, K, C, F);
    phase(model, PHASE_PERMUTE, l);
    combine_forward(acts->branch, a->expert_out, a->router_weights, a->slot_row, N, K, C);
}

void model_forward(Model* model, const Microbatch* mb) {
    // tokens -> acts.final_norm (N,C), and the router's statistics
    const MoEConfig* c = &model->config;
    Acts* acts = &model->acts;
    size_t B = model->B, T = model->T, N = B * T, C = c->hidden_size;
    int L = c->num_hidden_layers, NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim,
        E = c->num_experts;
    size_t A = (size_t)NH * HD, QKV = A + 2 * (size_t)NKV * HD;
    real eps = (real)c->rms_norm_eps;
    memset(model->stats.expert_count, 0, E * sizeof(double));
    memset(model->stats.prob_sum, 0, E * sizeof(double));
    model->stats.z_sum = model->stats.rows = 0;

    phase(model, PHASE_EMBEDDING, -1);
    embedding_forward(acts->layers[0].residual_attn, mb->tokens, model->w.embed_tokens, N, C);
    const real* residual = acts->layers[0].residual_attn;
    for (int l = 0; l < L; l++) {
        LayerActs* a = &acts->layers[l];
        const LayerParams* w = &model->w.layers[l];
        phase(model, PHASE_NORMS, l);
        rmsnorm_forward(a->residual_attn, a->attn_norm, a->attn_rstd, residual, l > 0 ? acts->branch : NULL,
                        w->input_layernorm, N, C, eps);
        phase(model, PHASE_QKV_O, l);
        matmul_forward(a->qkv, a->attn_norm, w->qkv_proj, N, C, QKV);
        phase(model, PHASE_NORMS, l);
        qk_norm_rope_forward(a->q, a->k, a->v, a->qk_rstd, a->qkv, w->q_norm, w->k_norm, model->rope, B, T, 0, T, NH,
                             NKV, HD, eps);
        phase(model, PHASE_ATTENTION, l);
        attention_forward(model, a, mb->doc_start, B, T);
        phase(model, PHASE_QKV_O, l);
        matmul_forward(acts->branch, a->attn, w->o_proj, N, A, C);
        phase(model, PHASE_NORMS, l);
        rmsnorm_forward(a->residual_mlp, a->mlp_norm, a->mlp_rstd, a->residual_attn, acts->branch,
                        w->post_attention_layernorm, N, C, eps);
        moe_forward(model, acts, l, mb->forced_indices ? mb->forced_indices[l] : NULL, N);
        if (w->router) {
            phase(model, PHASE_ROUTER, l);
            router_stats_add(&model->stats, a->router_probs, a->router_lse, a->tokens_per_expert, mb->targets, N, E);
        }
        residual = a->residual_mlp;
    }
    phase(model, PHASE_NORMS, -1);
    rmsnorm_forward(acts->residual_final, acts->final_norm, acts->final_rstd, residual, acts->branch, model->w.norm, N,
                    C, eps);
}

Losses model_loss(Model* model, const Microbatch* mb, bool backward, real beta_weight, real* logits_copy) {
    // The loss of what model_forward left behind: this microbatch's contribution to the step's. With `backward` it also
    // begins the backward pass, because a chunk of logits must be used up before the next one: acts.d_norm (N,C) =
    // gradient of final_norm, d lm_head = ... + beta_weight * itself. logits_copy (N,V) receives the logits where not
    // NULL.
    const MoEConfig* c = &model->config;
    Acts* acts = &model->acts;
    size_t N = model->B * model->T, C = c->hidden_size, V = c->vocab_size;
    phase(model, PHASE_LM_HEAD, -1);
    for (size_t n = 0; n < N; n += acts->logit_rows) {
        size_t rows = N - n < acts->logit_rows ? N - n : acts->logit_rows;
        lm_head_forward(acts->logits, acts->losses + n, acts->final_norm + n * C, model->w.lm_head, mb->targets + n,
                        rows, C, V, (real)(1 / mb->counted), backward, logits_copy ? logits_copy + n * V : NULL);
        if (backward) {
            matmul_backward(acts->d_norm + n * C, model->d_w.lm_head, acts->logits, acts->final_norm + n * C,
                            model->w.lm_head, rows, C, V, 0, n == 0 ? beta_weight : 1);
        }
    }
    Losses losses = {0, 0, 0, 0};
    for (size_t n = 0; n < N; n++) { losses.ce_loss += acts->losses[n]; }
    losses.ce_loss /= mb->counted;
    losses.aux_loss = mb->share * load_balancing_loss(&model->stats, model->expert_share, c->num_experts);
    losses.z_loss = model->stats.z_sum / mb->counted;
    losses.loss = losses.ce_loss;
    if (model->switches.aux_loss_coef != 0) { losses.loss += model->switches.aux_loss_coef * losses.aux_loss; }
    if (model->switches.z_loss_coef != 0) { losses.loss += model->switches.z_loss_coef * losses.z_loss; }
    phase(model, PHASE_OTHER, -1);
    return losses;
}

void moe_backward(Model* model, int l, const Microbatch* mb, real beta_weight) {
    // from acts.d_residual, the gradient of the layer's output, to acts.d_norm (N,C) =, the gradient of a->mlp_norm
    const MoEConfig* c = &model->config;
    Acts* acts = &model->acts;
    LayerActs* a = &acts->layers[l];
    const LayerParams* w = &model->w.layers[l];
    LayerParams* d_w = &model->d_w.layers[l];
    size_t N = model->B * model->T, C = c->hidden_size, F = config_layer_ffn_size(c, l);
    int E = c->num_experts, K = c->num_experts_per_tok;
    phase(model, PHASE_EXPERTS, l);
    if (!w->router) {
        mlp_backward(acts->d_norm, d_w->gate_up_proj, d_w->down_proj, acts->d_gate_up, acts->d_expert_act,
                     acts->d_residual, a->mlp_norm, a->expert_act, a->gate_up, w->gate_up_proj, w->down_proj, N, C, F,
                     beta_weight);
        return;
    }
    experts_backward(acts, d_w, a, w, model->switches.experts, E, K, C, F, beta_weight);
    phase(model, PHASE_PERMUTE, l);
    permute_backward(acts->d_norm, acts->d_expert_in, a->slot_row, N, K, C);
    phase(model, PHASE_ROUTER, l);
    RouterLossScale scale;
    scale.load_balancing_scale = model->switches.aux_loss_coef * mb->share * E / model->stats.rows;
    scale.z_scale = model->switches.z_loss_coef / mb->counted;
    scale.expert_share = model->expert_share;
    router_backward(acts->d_router_logits, acts->d_router_weights, a->router_probs, a->router_lse, a->router_indices,
                    a->router_weights, mb->targets, scale, N, E, K, c->norm_topk_prob);
    gemm_fp32(false, false, N, C, E, acts->d_router_logits, E, w->router, C, 1, acts->d_norm, C);
    gemm_fp32(true, false, E, C, N, acts->d_router_logits, E, a->mlp_norm, C, beta_weight, d_w->router, C);
}

void model_backward(Model* model, const Microbatch* mb, real beta_weight) {
    // the rest of the backward pass after model_loss(..., backward = true): every weight gradient = ... + beta_weight *
    // itself
    const MoEConfig* c = &model->config;
    Acts* acts = &model->acts;
    size_t B = model->B, T = model->T, N = B * T, C = c->hidden_size, V = c->vocab_size;
    int L = c->num_hidden_layers, NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    size_t A = (size_t)NH * HD, QKV = A + 2 * (size_t)NKV * HD;
    phase(model, PHASE_NORMS, -1);
    rmsnorm_backward(acts->d_residual, model->d_w.norm, acts->d_norm, acts->residual_final, model->w.norm,
                     acts->final_rstd, acts->norm_partials, N, C, 0, beta_weight);
    for (int l = L - 1; l >= 0; l--) {
        LayerActs* a = &acts->layers[l];
        const LayerParams* w = &model->w.layers[l];
        LayerParams* d_w = &model->d_w.layers[l];
        moe_backward(model, l, mb, beta_weight);
        phase(model, PHASE_NORMS, l);
        rmsnorm_backward(acts->d_residual, d_w->post_attention_layernorm, acts->d_norm, a->residual_mlp,
                         w->post_attention_layernorm, a->mlp_rstd, acts->norm_partials, N, C, 1, beta_weight);
        phase(model, PHASE_QKV_O, l);
        matmul_backward(acts->d_attn, d_w->o_proj, acts->d_residual, a->attn, w->o_proj, N, A, C, 0, beta_weight);
        phase(model, PHASE_ATTENTION, l);
        attention_backward(model, a, mb->doc_start, B, T);
        phase(model, PHASE_NORMS, l);
        qk_norm_rope_backward(acts->d_qkv, d_w->q_norm, d_w->k_norm, acts->d_q, acts->d_k, acts->d_v, a->qkv,
                              a->qk_rstd, w->q_norm, w->k_norm, model->rope, acts->norm_partials, B, T, NH, NKV, HD,
                              beta_weight);
        phase(model, PHASE_QKV_O, l);
        matmul_backward(acts->d_norm, d_w->qkv_proj, acts->d_qkv, a->attn_norm, w->qkv_proj, N, C, QKV, 0, beta_weight);
        phase(model, PHASE_NORMS, l);
        rmsnorm_backward(acts->d_residual, d_w->input_layernorm, acts->d_norm, a->residual_attn, w->input_layernorm,
                         a->attn_rstd, acts->norm_partials, N, C, 1, beta_weight);
    }
    phase(model, PHASE_EMBEDDING, -1);
    bool tied = model->d_w.embed_tokens == model->d_w.lm_head; // then model_loss has written the other half already
    embedding_backward(model->d_w.embed_tokens, acts->d_residual, mb->tokens, N, C, V, c->pad_token_id,
                       tied ? 1 : beta_weight);
    phase(model, PHASE_OTHER, -1);
}

Losses model_forward_backward(Model* model, const Microbatch* mb, bool first) {
    // a microbatch: gradients are written by the first of a step, added to by the others
    real beta_weight = first ? 0 : 1;
    profiler_span_begin(model->profiler, "forward");
    model_forward(model, mb);
    profiler_span_end(model->profiler);
    profiler_span_begin(model->profiler, "backward");
    Losses losses = model_loss(model, mb, true, beta_weight, NULL);
    model_backward(model, mb, beta_weight);
    profiler_span_end(model->profiler);
    return losses;
}

double model_grad_norm(Model* model) {
    phase(model, PHASE_GRAD_NORM, -1);
    double norm = grad_norm_forward(model->grads, model->norm_sums, model->table.num_parameters);
    phase(model, PHASE_OTHER, -1);
    return norm;
}

void model_update(Model* model, int64_t step, double lr, double grad_norm, const Options* opt) {
    // one AdamW step; `step` counts from 1. Clipping as torch.nn.utils.clip_grad_norm_: times min(1, clip / (norm +
    // 1e-6))
    phase(model, PHASE_OPTIMIZER, -1);
    AdamW a;
    a.lr = (real)lr;
    a.beta1 = (real)opt->beta1;
    a.beta2 = (real)opt->beta2;
    a.eps = (real)opt->eps;
    a.weight_decay = (real)opt->weight_decay;
    a.correction1 = (real)(1 - pow(opt->beta1, (double)step));
    a.correction2 = (real)(1 - pow(opt->beta2, (double)step));
    double clip = opt->grad_clip / (grad_norm + 1e-6);
    a.grad_scale = opt->grad_clip > 0 && clip < 1 ? (real)clip : 1;
    if (model->switches.fused_optimizer) {
        adamw_fused(model->params, model->grads, model->m, model->v, &model->table, a);
    } else {
        adamw_simple(model->params, model->grads, model->m, model->v, &model->table, a);
    }
    phase(model, PHASE_OTHER, -1);
}

Losses model_evaluate(Model* model, const Microbatch* mb) {
    // forward only; touches neither gradients nor the load that the log shows
    model_forward(model, mb);
    return model_loss(model, mb, false, 0, NULL);
}

// ----------------------------------------------------------------------------
// generation: one token at a time, with a cache of keys and values, through the same ops as training

typedef struct {
    Model* model;
    Acts acts;                 // of one token
    char* memory;
    real **k_cache, **v_cache; // (L) of (NKV, context, HD)
    size_t context, position;  // how many positions there are, how many are filled
    float* logits;             // (V) of the last token fed
} Decoder;

size_t decoder_layout(Decoder* d, const MoEConfig* c) {
    // what lies in d->memory (NULL: only to measure); returns its bytes
    Arena mem = {d->memory, 0};
    size_t cache = c->num_key_value_heads * d->context * c->head_dim;
    acts_layout(&d->acts, &mem, c, 1, 1, ATTENTION_NAIVE);
    logits_layout(&d->acts, &mem, c, 1, 1);
    d->acts.attn_scores = take(&mem, d->context);
    for (int l = 0; l < c->num_hidden_layers; l++) {
        d->k_cache[l] = take(&mem, cache);
        d->v_cache[l] = take(&mem, cache);
    }
    return mem.used;
}

size_t decoder_plan(Decoder* d, const MoEConfig* c, size_t context) {
    // all but d->memory; returns how many bytes that takes
    size_t L = c->num_hidden_layers;
    memset(d, 0, sizeof(*d));
    d->context = context;
    d->acts.layers = (LayerActs*)callocCheck(L, sizeof(LayerActs));
    d->k_cache = (real**)callocCheck(L, sizeof(real*));
    d->v_cache = (real**)callocCheck(L, sizeof(real*));
    d->logits = (float*)mallocCheck(c->vocab_size * sizeof(float));
    return decoder_layout(d, c);
}

void decoder_create(Decoder* d, Model* model) {
    // the context is the model's T: a model is not asked for positions that it has not been trained on
    size_t bytes = decoder_plan(d, &model->config, model->T);
    d->model = model;
    d->memory = (char*)arena_alloc(bytes);
    decoder_layout(d, &model->config);
    if (model->switches.bf16) { bf16_copy_add((real*)d->memory, bytes / sizeof(real), false); }
}

void decoder_free(Decoder* d) {
    if (d->memory) { bf16_copy_remove((real*)d->memory); }
    free(d->memory);
    free(d->acts.layers);
    free(d->k_cache);
    free(d->v_cache);
    free(d->logits);
}

void decode_token(Model* model, Decoder* d, int token, bool want_logits) {
    // feeds one token at d->position: d->logits (V), if wanted, are for the one that follows. The same steps as
    // model_forward, N = 1.
    const MoEConfig* c = &model->config;
    Acts* acts = &d->acts;
    size_t C = c->hidden_size, V = c->vocab_size;
    int NH = c->num_attention_heads, NKV = c->num_key_value_heads, HD = c->head_dim;
    size_t A = (size_t)NH * HD, QKV = A + 2 * (size_t)NKV * HD;
    real eps = (real)c->rms_norm_eps;
    AttentionShape shape = {1, d->context, NH, NKV, HD};
    embedding_forward(acts->layers[0].residual_attn, &token, model->w.embed_tokens, 1, C);
    const real* residual = acts->layers[0].residual_attn;
    for (int l = 0; l < c->num_hidden_layers; l++) {
        LayerActs* a = &acts->layers[l];
        const LayerParams* w = &model->w.layers[l];
        rmsnorm_forward(a->residual_attn, a->attn_norm, a->attn_rstd, residual, l > 0 ? acts->branch : NULL,
                        w->input_layernorm, 1, C, eps);
        matmul_forward(a->qkv, a->attn_norm, w->qkv_proj, 1, C, QKV);
        qk_norm_rope_forward(a->q, d->k_cache[l], d->v_cache[l], a->qk_rstd, a->qkv, w->q_norm, w->k_norm, model->rope,
                             1, 1, d->position, d->context, NH, NKV, HD, eps);
        attention_decode(a->attn, a->q, d->k_cache[l], d->v_cache[l], acts->attn_scores, d->position, shape);
        matmul_forward(acts->branch, a->attn, w->o_proj, 1, A, C);
        rmsnorm_forward(a->residual_mlp, a->mlp_norm, a->mlp_rstd, a->residual_attn, acts->branch,
                        w->post_attention_layernorm, 1, C, eps);
        moe_forward(model, acts, l, NULL, 1);
        residual = a->residual_mlp;
    }
    rmsnorm_forward(acts->residual_final, acts->final_norm, acts->final_rstd, residual, acts->branch, model->w.norm, 1,
                    C, eps);
    d->position++;
    if (!want_logits) { return; }
    matmul_forward(acts->logits, acts->final_norm, model->w.lm_head, 1, C, V);
    for (size_t v = 0; v < V; v++) { d->logits[v] = (float)acts->logits[v]; }
}

const float* decode(void* decoder, int token, size_t position, bool want_logits) {
    // what generate_text calls
    Decoder* d = (Decoder*)decoder;
    d->position = position;
    decode_token(d->model, d, token, want_logits);
    return d->logits;
}

// ----------------------------------------------------------------------------
// checkpoints: how the arenas reach the files of llmc/checkpoint.h and back

real* arena_of(const Model* model, const char* what) { // what is "weight" or "master", the same here, "grad", "m", "v"
    return strcmp(what, "grad") == 0 ? model->grads
           : strcmp(what, "m") == 0  ? model->m
           : strcmp(what, "v") == 0  ? model->v
                                     : model->params;
}

void store_numbers(void* model, const ParamTensor* t, const char* what, size_t begin, size_t count,
                   const float* values) {
    real* to = arena_of((Model*)model, what) + t->offset + begin;
    for (size_t i = 0; i < count; i++) { to[i] = (real)values[i]; }
}

void fetch_numbers(void* model, const ParamTensor* t, const char* what, size_t begin, size_t count, float* values) {
    const real* from = arena_of((Model*)model, what) + t->offset + begin;
    for (size_t i = 0; i < count; i++) { values[i] = (float)from[i]; }
}

// ----------------------------------------------------------------------------
// the trainer: what main puts together from the options

typedef struct {
    Run run; // options, data, tokenizer, checkpoint: llmc/run.h
    Model model;
    Decoder decoder;  // allocated where something will be sampled
    int64_t step;     // optimizer steps done
    uint64_t tokens;  // trained on so far
    double gemm_peak; // FLOP/s of a matrix product on this machine
    Profiler profiler;
    Logger logger;
} Trainer;

#ifndef TESTING

Switches trainer_switches(const Options* opt) {
    Switches s;
    s.attention = strcmp(opt->attention, "naive") == 0 ? ATTENTION_NAIVE : ATTENTION_FLASH;
    s.experts = strcmp(opt->experts, "loop") == 0 ? EXPERTS_LOOP : EXPERTS_GROUPED;
    s.fused_optimizer = strcmp(opt->optimizer, "fused") == 0;
    s.aux_loss_coef = opt->aux_loss_coef;
    s.z_loss_coef = opt->z_loss_coef;
    s.bf16 = strcmp(opt->precision, "bf16") == 0;
    return s;
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
    if (model->m && !run->resume) { optimizer_init(model); }
    if (model->m && run->resume) {
        checkpoint_moments_load(run->resume, &model->table, store_numbers, true, model);
    }
    to_bf16_weights(model);
    t->step = run->state.step;
    t->tokens = run->state.tokens;
}

void trainer_save(Trainer* t) {
    profiler_phase(&t->profiler, PHASE_CHECKPOINT, -1);
    run_save(&t->run, t->step, t->tokens, ST_F32, false, fetch_numbers, &t->model);
    run_saved(&t->run, t->step);
    profiler_phase(&t->profiler, PHASE_OTHER, -1);
}

// ----------------------------------------------------------------------------
// step, evaluate, sample

void trainer_microbatch(Trainer* t, Microbatch* mb) {
    // the next microbatch, with the weight it has in its step
    profiler_phase(&t->profiler, PHASE_DATA, -1);
    memset(mb, 0, sizeof(*mb));
    double microbatches = (double)t->run.opt.grad_accum;
    mb->share = 1 / microbatches;
    if (t->run.has_batch) {
        mb->tokens = t->run.batch.tokens;
        mb->targets = t->run.batch.targets;
        mb->doc_start = t->run.batch.doc_start;
        mb->forced_indices = t->run.batch.forced_indices;
        mb->counted = t->run.batch.counted * microbatches;
    } else {
        const Batch* batch = dataloader_next(&t->run.train);
        profiler_interval(&t->profiler, "prepare batch", 1e3 * batch->fill_ms[0], 1e3 * batch->fill_ms[1], TRACK_LOADER);
        mb->tokens = batch->tokens;
        mb->targets = batch->targets;
        mb->doc_start = t->run.opt.doc_mask ? batch->doc_start : NULL;
        mb->counted =
            (double)t->run.opt.batch_size * t->run.opt.seq_len * microbatches; // shards have no ignored targets
    }
    profiler_phase(&t->profiler, PHASE_OTHER, -1);
}

void router_log_add(Model* model) {
    // what the last forward's router did, for the log
    const MoEConfig* c = &model->config;
    int L = c->num_hidden_layers, E = c->num_experts;
    phase(model, PHASE_ROUTER, -1);
    #pragma omp parallel for schedule(static)
    for (int l = 0; l < L; l++) {
        if (!model->w.layers[l].router) { continue; }
        const LayerActs* a = &model->acts.layers[l];
        for (int e = 0; e < E; e++) { model->expert_load[(size_t)l * E + e] += a->tokens_per_expert[e]; }
        model->entropy_sum[l] +=
            router_entropy(a->router_logits, a->router_probs, a->router_lse, model->B * model->T, E);
    }
    phase(model, PHASE_OTHER, -1);
}

void router_log_summary(const Model* model, StepMetrics* m) {
    const MoEConfig* c = &model->config;
    for (int l = 0; l < c->num_hidden_layers; l++) {
        const double* load = model->w.layers[l].router ? model->expert_load + (size_t)l * c->num_experts : NULL;
        step_metrics_router(m, l, load, c->num_experts, c->num_experts_per_tok, model->entropy_sum[l]);
    }
}

void router_log_clear(Model* model) {
    size_t L = model->config.num_hidden_layers;
    memset(model->expert_load, 0, L * model->config.num_experts * sizeof(double));
    memset(model->entropy_sum, 0, L * sizeof(double));
}

void trainer_step(Trainer* t, StepMetrics* metrics) {
    // one optimizer step: all its microbatches, then norm, clipping, AdamW. A loss or norm that is not finite ends the
    // run before the update: the weights, and what is saved of them, are still good.
    Losses sum = {0, 0, 0, 0};
    for (int64_t i = 0; i < t->run.opt.grad_accum; i++) {
        profiler_span_begin(&t->profiler, "microbatch %lld", (long long)i);
        Microbatch mb;
        trainer_microbatch(t, &mb);
        Losses losses = model_forward_backward(&t->model, &mb, i == 0);
        router_log_add(&t->model);
        sum.loss += losses.loss;
        sum.ce_loss += losses.ce_loss;
        sum.aux_loss += losses.aux_loss;
        profiler_span_end(&t->profiler);
    }
    double norm = model_grad_norm(&t->model);
    run_stop_if_not_finite(&t->run, &t->logger, &t->profiler, t->step + 1, sum.loss, norm);
    double lr = schedule_rate(&t->run.opt, t->tokens);
    model_update(&t->model, t->step + 1, lr, norm, &t->run.opt);
    t->step++;
    t->tokens += (uint64_t)t->run.opt.tokens_per_step;
    metrics->loss = sum.loss;
    metrics->ce_loss = sum.ce_loss;
    metrics->aux_loss = t->run.opt.aux_loss_coef != 0 ? sum.aux_loss : NAN;
    metrics->grad_norm = norm;
    metrics->lr = lr;
}

double trainer_evaluate(Trainer* t) {
    // mean cross-entropy over the first --val-steps batches of --val-data, or over all of it
    profiler_hold(&t->profiler, PHASE_EVAL);
    uint64_t sequences = run_val_sequences(&t->run);
    double tokens = (double)sequences * (double)t->run.opt.seq_len;
    dataloader_seek(&t->run.val, 0);
    double sum = 0;
    for (uint64_t i = 0; i < sequences; i += (uint64_t)t->run.opt.batch_size) {
        const Batch* batch = dataloader_next(&t->run.val);
        Microbatch mb = {batch->tokens,
                         batch->targets,
                         t->run.opt.doc_mask ? batch->doc_start : NULL,
                         NULL,
                         tokens,
                         1};
        sum += model_evaluate(&t->model, &mb).ce_loss;
    }
    profiler_release(&t->profiler);
    return sum;
}

void trainer_show_sample(Trainer* t) {
    // one document in the midst of training; its random numbers come from the step, so it does not disturb anything
    profiler_hold(&t->profiler, PHASE_EVAL);
    logger_print(&t->logger, "sample after step %lld:\n", (long long)t->step);
    uint64_t rng = hash64((uint64_t)t->run.opt.seed ^ hash64((uint64_t)t->step));
    run_sample(&t->run, decode, &t->decoder, t->decoder.context, rng, (int64_t)t->decoder.context, true);
    profiler_release(&t->profiler);
}

// ----------------------------------------------------------------------------
// measuring and planning

double measure_gemm_peak(bool bf16) {
    // FLOP/s of a square product on all threads: what a step is compared with. The best of as many as fit into 60 ms.
    enum { SIZE = 1024 };
    real* memory = (real*)arena_alloc(3 * SIZE * SIZE * sizeof(real));
    for (size_t i = 0; i < 2 * SIZE * SIZE; i++) { memory[i] = (real)(i % 7) - 3; }
    if (bf16) { bf16_copy_add(memory, 2 * SIZE * SIZE, false); }
    to_bf16_all(memory, 2 * SIZE * SIZE);
    double start = profiler_clock_us(), best = INFINITY;
    for (int i = 0; i < 8 && (i < 2 || profiler_clock_us() - start < 60e3); i++) {
        double begin = profiler_clock_us();
        gemm(false, true, SIZE, SIZE, SIZE, memory, SIZE, memory + SIZE * SIZE, SIZE, 0, memory + 2 * SIZE * SIZE,
             SIZE);
        double us = profiler_clock_us() - begin;
        best = us < best ? us : best;
    }
    bf16_copy_remove(memory);
    free(memory);
    return 2.0 * SIZE * SIZE * SIZE / best * 1e6;
}

uint64_t resident_bytes(void) {
    // memory this process has in RAM; 0 where the system does not say
    unsigned long long pages = 0, resident = 0;
    FILE* fp = fopen("/proc/self/statm", "r");
    if (!fp) { return 0; }
    if (fscanf(fp, "%llu %llu", &pages, &resident) != 2) { resident = 0; }
    fclose(fp);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

void run_memory_plan(MemoryRow* rows, const Run* run, size_t B) {
    // what training with these options takes, by families
    Switches s = trainer_switches(&run->opt);
    Acts acts;
    memset(&acts, 0, sizeof(acts));
    acts.layers = (LayerActs*)callocCheck(run->config.num_hidden_layers, sizeof(LayerActs));
    MemoryPlan p = memory_plan(&acts, &run->config, &run->table, &s, B, (size_t)run->opt.seq_len, true);
    free(acts.layers);
    if (run->opt.sample_every > 0) {
        Decoder d;
        p.sampling = decoder_plan(&d, &run->config, (size_t)run->opt.seq_len) * (s.bf16 ? 3 : 2) / 2;
        decoder_free(&d);
    }
    const MemoryRow plan[] = {{"weights", p.weights},        {"gradients", p.gradients},     {"AdamW moments", p.moments},
                              {"activations", p.activations}, {"logits", p.logits},          {"backward buffers", p.backward},
                              {"copies in bf16", p.bf16},    {"sampling", p.sampling},       {"other", p.other},
                              {NULL, 0}};
    memcpy(rows, plan, sizeof(plan));
}

double machine_memory(void) { return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE); }

void require_memory(const Run* run) {
    // the system hands out more memory than it has, and kills who then uses it: better a word before the first step
    double needed = (double)planned_bytes(run_memory_plan, run, (size_t)run->opt.batch_size);
    if (needed <= machine_memory()) { return; }
    size_t B = largest_batch(run_memory_plan, run, machine_memory());
    char advice[80] = "not even --batch-size 1 fits, try a smaller --seq-len or model";
    if (B > 0) { snprintf(advice, sizeof(advice), "at most --batch-size %zu fits at this --seq-len", B); }
    fatal("this run needs %.1f GiB of memory, the machine has %.1f: %s (--dry-run prints the plan)", needed / (1 << 30),
          machine_memory() / (1 << 30), advice);
}

void dry_run(const Run* run) {
    // what training with these options would take, without taking it
    char machine[40];
    snprintf(machine, sizeof(machine), "%d threads", num_threads());
    dry_run_print(run_memory_plan, run, machine, machine_memory());
}

void dump_routing(void* ctx, int layer, float* logits, int* indices, float* weights) {
    const Model* model = (const Model*)ctx;
    const LayerActs* a = &model->acts.layers[layer];
    size_t N = model->B * model->T, E = model->config.num_experts, K = model->config.num_experts_per_tok;
    for (size_t i = 0; i < N * E; i++) { logits[i] = (float)a->router_logits[i]; }
    for (size_t i = 0; i < N * K; i++) { weights[i] = (float)a->router_weights[i]; }
    memcpy(indices, a->router_indices, N * K * sizeof(int));
}

int dump(Trainer* t) {
    // one forward and backward of the first microbatch, no step: every quantity of dev/test/goldens/README.md
    Model* model = &t->model;
    Microbatch mb;
    trainer_microbatch(t, &mb);
    mb.counted /= (double)t->run.opt.grad_accum; // of this microbatch alone
    mb.share = 1;
    real* logits = (real*)arena_alloc(mul_check(mul_check(model->B * model->T, model->config.vocab_size), sizeof(real)));
    model_forward(model, &mb);
    Losses losses = model_loss(model, &mb, true, 0, logits);
    model_backward(model, &mb, 0);
    double norm = model_grad_norm(model);
    Dump d = {&model->config,         &model->table,           model->B,    model->T,       (float)losses.loss,
              (float)losses.ce_loss,  (float)losses.aux_loss,  (float)norm, (float*)logits, model,
              dump_routing,           fetch_numbers};
    dump_file_write(t->run.opt.dump, &d);
    free(logits);
    printf("loss %.6f | ce_loss %.6f | aux_loss %.6f | grad_norm %.6f -> %s\n", losses.loss, losses.ce_loss,
           losses.aux_loss, norm, t->run.opt.dump);
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
    // --eval-choices: the loss of every choice of every question, several of them to a sequence, each a document
    Model* model = &t->model;
    Choices* choices = &t->run.choices;
    size_t N = model->B * model->T;
    int* tokens = (int*)mallocCheck(3 * N * sizeof(int));
    int *targets = tokens + N, *doc_start = tokens + 2 * N;
    for (size_t i = 0; i < choices_num_batches(choices, model->B); i++) {
        choices_batch(choices, i, model->B, tokens, targets, doc_start);
        Microbatch mb = {tokens, targets, doc_start, NULL, 1, 1};
        model_evaluate(model, &mb);
        choices_collect(choices, i, model->B, (const float*)model->acts.losses);
    }
    free(tokens);
    return choices_report(choices, t->run.opt.metrics);
}

int sample(Trainer* t) {
    // --generate
    uint64_t rng = hash64((uint64_t)t->run.opt.seed);
    run_sample(&t->run, decode, &t->decoder, t->decoder.context, rng, t->run.opt.generate, false);
    return 0;
}

int train(Trainer* t) {
    // the loop: steps, and what is due after some of them; returns the exit code
    const Options* opt = &t->run.opt;
    StepMetrics metrics;
    step_metrics_create(&metrics, t->run.config.num_hidden_layers);
    signals_begin_loop();
    if (opt->steps == 0 && opt->out) { trainer_save(t); } // no training: what was loaded, as a checkpoint
    bool stop = false; // looked at once a step: after a Ctrl-C in validation or a save there is a last step, and it is saved
    while (t->step < opt->steps && !stop) {
        profiler_step_begin(&t->profiler, t->step + 1);
        double begin = profiler_clock_us();
        trainer_step(t, &metrics);
        metrics.step_ms = (profiler_clock_us() - begin) / 1e3; // of training alone: what follows has phases of its own
        stop = interrupted();
        bool done = t->step == opt->steps;
        if (opt->out && (stop || is_due(opt->save_every, t->step, done))) { trainer_save(t); }
        bool validate = t->run.has_val && is_due(opt->val_every, t->step, done);
        metrics.val_loss = validate ? trainer_evaluate(t) : NAN;
        if (validate) {
            profiler_hold(&t->profiler, PHASE_EVAL);
            double peak = measure_gemm_peak(t->model.switches.bf16); // the first measurement may have met a busy machine
            profiler_release(&t->profiler);
            t->gemm_peak = peak > t->gemm_peak ? peak : t->gemm_peak;
        }
        if (opt->sample_every > 0 && is_due(opt->sample_every, t->step, done)) { trainer_show_sample(t); }
        profiler_step_end(&t->profiler);

        router_log_summary(&t->model, &metrics);
        run_step_rates(&t->run, &metrics, NAN, t->gemm_peak); // a CPU has no nominal peak that is worth a table
        metrics.step = t->step;
        metrics.tokens = t->tokens;
        metrics.phase_ms = t->profiler.phase_ms;
        metrics.mem = resident_bytes();
        bool shown = stop || t->step == 1 || is_due(opt->log_every, t->step, done) || validate;
        logger_step(&t->logger, &metrics, shown);
        logger_experts(&t->logger, &metrics, t->model.expert_load, t->run.config.num_experts);
        router_log_clear(&t->model);
    }
    step_metrics_free(&metrics);
    logger_close(&t->logger);
    if (opt->profile) { profiler_table(&t->profiler, stdout); }
    if (stop) { run_print_interrupted(&t->run, t->step); }
    return stop ? 130 : 0;
}

void open_logs(Trainer* t) {
    // what was run on what, on stdout and for the trace; --metrics
    char machine[80], peak[160];
    snprintf(machine, sizeof(machine), "%d thread%s, matrix products by %s", num_threads(),
             num_threads() == 1 ? "" : "s", gemm_library(t->model.switches.bf16));
    snprintf(peak, sizeof(peak), "%s, %.1f GFLOP/s", machine, t->gemm_peak / 1e9);
    run_print_setup(&t->run, peak);
    run_open_logs(&t->run, &t->logger, &t->profiler, t->step, 0, 1, machine, t->gemm_peak, NAN);
}

void share_the_machine(char** argv) {
    // GNU's OpenMP threads spin for milliseconds where they wait for each other. If anything else runs on the machine,
    // the one that is waited for is then not running: one busy neighbour on two cores made a step three times as long
    // as it need be (dev/RESULTS.md). The library reads its settings before main, so the program starts itself again
    // with a short spin.
#if defined(_OPENMP) && defined(__linux__)
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) { return; } // the user knows better
    setenv("GOMP_SPINCOUNT", "3000", 1);
    execv("/proc/self/exe", argv); // returns only if it fails, and then all is as it was
#else
    (void)argv;
#endif
}

int main(int argc, char** argv) {
    program_name = "train_moe_cpu";
    share_the_machine(argv);
    streams_open();
    signals_open();
    launcher_refuse_ranks("trains in one, with --threads: start it without mpirun");
    Trainer* t = (Trainer*)callocCheck(1, sizeof(Trainer));
    Run* run = &t->run;
    run_open_model(run, argc, argv, PROGRAM_CPU, 1);
    const Options* opt = &run->opt;
    if (trainer_switches(opt).bf16 && bf16_product_missing()) { fatal("--precision bf16: %s", bf16_product_missing()); }
    if (!opt->dry_run) { run_open_files(run, 0, 1); }
#ifdef _OPENMP
    if (opt->threads > 0) { omp_set_num_threads((int)opt->threads); }
#else
    if (opt->threads > 1) { fatal("--threads %lld: this program was built without OpenMP", (long long)opt->threads); }
#endif
    if (opt->dry_run) {
        dry_run(run);
        run_close(run);
        free(t);
        return 0;
    }
    if (run->needs_gradients) { require_memory(run); }
    model_create(&t->model, &run->config, trainer_switches(opt), (size_t)opt->batch_size, (size_t)opt->seq_len,
                 run->needs_gradients);
    if (run->samples) { decoder_create(&t->decoder, &t->model); }
    trainer_load(t);
    if (run->trains) {
        t->gemm_peak = measure_gemm_peak(t->model.switches.bf16);
        open_logs(t);
        t->model.profiler = &t->profiler;
    }
    int code = opt->dump           ? dump(t)
               : opt->eval         ? evaluate(t)
               : opt->eval_choices ? evaluate_choices(t)
               : opt->generate     ? sample(t)
                                   : train(t);
    if (!run->trains) { stdout_check(); }
    profiler_close(&t->profiler);
    if (run->samples) { decoder_free(&t->decoder); }
    model_free(&t->model);
    run_close(run);
    free(t);
    return code;
}
#endif // TESTING
