// gemm.h: products of bf16 matrices through cuBLASLt, row-major: c = op(a) op(b) + beta * c, sums in fp32.
// gemm_open() before the first product, gemm_close() after the last; link with -lcublasLt.
#ifndef LLMC_GEMM_H
#define LLMC_GEMM_H

#include "check.h"
#include "cublas_check.h"
#include "cuda_check.h"
#include "rand.h"
#include <cuda_bf16.h>
#include <math.h>

typedef struct {
    size_t M, N, K, lda, ldb, ldc, trans_a, trans_b, c_type;
} GemmShape;

typedef struct { // what cuBLASLt wants to know about a product of one shape, made the first time it is needed
    GemmShape shape; // all 0: free
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
} GemmPlan;

// A shape's hash is its plan's place; another shape's plan there gives way. A model that trains has about 20 shapes,
// which hardly ever meet in so many places; --experts loop makes many more: one for each number of rows.
#define GEMM_PLANS 65536
#define GEMM_WORKSPACE ((size_t)32 << 20)

static struct {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    void* workspace; // of the one stream that computes; products of two streams must not share it
    GemmPlan* plans; // (GEMM_PLANS)
} cublaslt;

static inline void gemm_prefer(cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes) {
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(cublaslt.preference, attribute, value, bytes));
}

static inline void gemm_open(void) {
    size_t workspace = GEMM_WORKSPACE;
    // A long K may be split over blocks. Their parts are added in fp32, in a second pass with one order: the same bits
    // on every run.
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint32_t alignment = 16; // cuBLASLt would count on 256 bytes; an expert's rows begin at any multiple of 16
    cublaslt.plans = (GemmPlan*)callocCheck(GEMM_PLANS, sizeof(GemmPlan));
    cudaCheck(cudaMalloc(&cublaslt.workspace, GEMM_WORKSPACE));
    cublasCheck(cublasLtCreate(&cublaslt.handle));
    cublasCheck(cublasLtMatmulPreferenceCreate(&cublaslt.preference));
    gemm_prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
    gemm_prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof(reductions));
    gemm_prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, sizeof(alignment));
    gemm_prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment, sizeof(alignment));
    gemm_prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment, sizeof(alignment));
    gemm_prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment, sizeof(alignment));
}

static inline void gemm_plan_free(GemmPlan* plan) {
    if (plan->desc == NULL) { return; }
    cublasCheck(cublasLtMatmulDescDestroy(plan->desc));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->a));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->b));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->c));
    memset(plan, 0, sizeof(*plan));
}

static inline void gemm_close(void) {
    for (size_t i = 0; i < GEMM_PLANS; i++) { gemm_plan_free(&cublaslt.plans[i]); }
    cublasCheck(cublasLtMatmulPreferenceDestroy(cublaslt.preference));
    cublasCheck(cublasLtDestroy(cublaslt.handle));
    cudaCheck(cudaFree(cublaslt.workspace));
    free(cublaslt.plans);
    memset(&cublaslt, 0, sizeof(cublaslt));
}

// cuBLASLt is column-major: it sees each of our matrices transposed, and c^T = op(b)^T op(a)^T. So b comes first.
static inline void gemm_plan_make(GemmPlan* plan, const GemmShape* s) {
    cublasOperation_t op_a = s->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = s->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    plan->shape = *s;
    cublasCheck(cublasLtMatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasCheck(cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof(op_b)));
    cublasCheck(cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof(op_a)));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan->a, CUDA_R_16BF, s->trans_a ? s->M : s->K, s->trans_a ? s->K : s->M,
                                           (int64_t)s->lda));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan->b, CUDA_R_16BF, s->trans_b ? s->K : s->N, s->trans_b ? s->N : s->K,
                                           (int64_t)s->ldb));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan->c, (cudaDataType_t)s->c_type, s->N, s->M, (int64_t)s->ldc));
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    cublasCheck(cublasLtMatmulAlgoGetHeuristic(cublaslt.handle, plan->desc, plan->b, plan->a, plan->c, plan->c,
                                               cublaslt.preference, 1, &best, &found));
    if (found == 0 || best.state != CUBLAS_STATUS_SUCCESS) {
        fatal("gemm: cuBLASLt knows no algorithm for M %zu, N %zu, K %zu (lda %zu, ldb %zu, ldc %zu, transposed: %zu, "
              "%zu, type %zu); a newer CUDA may", s->M, s->N, s->K, s->lda, s->ldb, s->ldc, s->trans_a, s->trans_b,
              s->c_type);
    }
    plan->algo = best.algo;
}

static inline const GemmPlan* gemm_plan(const GemmShape* s) {
    const size_t* words = (const size_t*)s;
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof(*s) / sizeof(size_t); i++) { hash = hash64(hash + words[i] + RAND_GOLDEN); }
    GemmPlan* plan = &cublaslt.plans[hash % GEMM_PLANS];
    if (memcmp(&plan->shape, s, sizeof(*s)) != 0) {
        gemm_plan_free(plan);
        gemm_plan_make(plan, s);
    }
    return plan;
}

// c (M,N) = op(a) (M,K) op(b) (K,N) + beta * c; ld* is the length of a row in memory. c is bf16 (activations) or float
// (gradients of weights, beta 1); beta 0 does not read it.
static inline void gemm(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const __nv_bfloat16* a, size_t lda,
                        const __nv_bfloat16* b, size_t ldb, float beta, void* c, cudaDataType_t c_type, size_t ldc,
                        cudaStream_t stream) {
    if (M == 0 || N == 0) { return; }
    size_t c_bytes = c_type == CUDA_R_32F ? sizeof(float) : sizeof(__nv_bfloat16);
    if (c_type != CUDA_R_32F && c_type != CUDA_R_16BF) {
        fatal("gemm: c must be float or bf16, is type %d", (int)c_type);
    }
    if (K == 0) { // an expert without tokens: libraries disagree about what is left in c then, so that is settled here
        if (beta != 0 && beta != 1) { fatal("gemm: with K = 0 beta must be 0 or 1, is %g", beta); }
        if (beta == 0) { cudaCheck(cudaMemset2DAsync(c, ldc * c_bytes, 0, N * c_bytes, M, stream)); }
        return;
    }
    if (lda % 8 != 0 || ldb % 8 != 0 || ldc % 8 != 0 || lda < (trans_a ? M : K) || ldb < (trans_b ? K : N) || ldc < N) {
        fatal("gemm: lda, ldb and ldc must be multiples of 8 and no shorter than a row, are %zu, %zu, %zu with M %zu, "
              "N %zu, K %zu", lda, ldb, ldc, M, N, K);
    }
    if (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 != 0) {
        fatal("gemm: a, b and c must be 16-byte aligned, are at %p, %p, %p", (const void*)a, (const void*)b, c);
    }
    GemmShape shape = {M, N, K, lda, ldb, ldc, trans_a, trans_b, (size_t)c_type};
    const GemmPlan* plan = gemm_plan(&shape);
    float alpha = 1;
    cuda_launches++;
    cublasCheck(cublasLtMatmul(cublaslt.handle, plan->desc, &alpha, b, plan->b, a, plan->a, &beta, c, plan->c, c,
                               plan->c, &plan->algo, cublaslt.workspace, GEMM_WORKSPACE, stream));
}

// FLOP/s of a large square product, as a measure of this GPU: the best of as many as fit into 100 ms. Opens and closes
// cuBLASLt where nobody has opened it.
static inline double gemm_peak(void) {
    const size_t n = 8192, count = n * n;
    bool opened = cublaslt.handle != NULL;
    __nv_bfloat16 *host = (__nv_bfloat16*)mallocCheck(2 * count * sizeof(__nv_bfloat16)), *a, *b, *c;
    for (size_t i = 0; i < 2 * count; i++) { // random: products of zeros take less power and run faster
        host[i] = __float2bfloat16((float)(i * RAND_GOLDEN >> 40 & 2047) / 1024 - 1);
    }
    cudaCheck(cudaMalloc((void**)&a, 3 * count * sizeof(__nv_bfloat16)));
    cudaCheck(cudaMemcpy(a, host, 2 * count * sizeof(__nv_bfloat16), cudaMemcpyHostToDevice));
    free(host);
    b = a + count;
    c = b + count;
    if (!opened) { gemm_open(); }
    cudaEvent_t begin, end;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    float best = INFINITY;
    for (float ms, sum = 0; sum < 100; sum += ms) {
        cudaCheck(cudaEventRecord(begin, 0));
        gemm(false, true, n, n, n, a, n, b, n, 0, c, CUDA_R_16BF, n, 0);
        cudaCheck(cudaEventRecord(end, 0));
        cudaCheck(cudaEventSynchronize(end));
        cudaCheck(cudaEventElapsedTime(&ms, begin, end));
        best = fminf(best, ms);
    }
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    if (!opened) { gemm_close(); }
    cudaCheck(cudaFree(a));
    return 2.0 * (double)count * (double)n / best * 1e3;
}

#endif
