// matmul.h: gemm of train_moe.cu, for the files here that need a product. Include common.h before it; call
// matmul_open() before the first product and matmul_close() after the last; link with -lcublasLt.
#ifndef DEV_CUDA_MATMUL_H
#define DEV_CUDA_MATMUL_H

#include <cublasLt.h>
#include "../../llmc/cublas_check.h"

// ----------------------------------------------------------------------------
// matmul: the gateway. All dense products of this program pass through gemm, that is, through cuBLASLt.

typedef struct {
    size_t M, N, K, lda, ldb, ldc;
    size_t kind; // trans_a, trans_b and the type of c: a bit each
} MatmulShape;

typedef struct { // what cuBLASLt wants to know about a product of one shape, made the first time it is needed
    MatmulShape shape; // all 0: free
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
} MatmulPlan;

#define MATMUL_WORKSPACE ((size_t)32 << 20)
#define MATMUL_PLANS 4096 // a model has about 20 shapes; only --experts loop makes many: one for each number of rows
#define MATMUL_PROBES 8   // a shape's plan lies in one of so many places from its hash on; when all are taken the first
                          // is given up

static struct {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    void* workspace; // of the one stream that computes; products of two streams must not share it
    size_t workspace_bytes;
    MatmulPlan* plans; // (MATMUL_PLANS + MATMUL_PROBES)
} matmul;

void matmul_open(void) {
    matmul.workspace_bytes = MATMUL_WORKSPACE;
    matmul.plans = (MatmulPlan*)callocCheck(MATMUL_PLANS + MATMUL_PROBES, sizeof(MatmulPlan));
    cudaCheck(cudaMalloc(&matmul.workspace, matmul.workspace_bytes));
    cublasCheck(cublasLtCreate(&matmul.handle));
    cublasCheck(cublasLtMatmulPreferenceCreate(&matmul.preference));
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(matmul.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &matmul.workspace_bytes, sizeof(matmul.workspace_bytes)));
    // A long K may be split over blocks. Their parts are added in fp32, in a second pass with one order: the same bits
    // on every run.
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(matmul.preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                     &reductions, sizeof(reductions)));
    // Unless told otherwise cuBLASLt counts on 256 bytes; an expert's rows begin at any multiple of 16.
    uint32_t alignment = 16;
    cublasLtMatmulPreferenceAttributes_t of[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++) {
        cublasCheck(cublasLtMatmulPreferenceSetAttribute(matmul.preference, of[i], &alignment, sizeof(alignment)));
    }
}

void matmul_plan_free(MatmulPlan* plan) {
    if (plan->desc == NULL) { return; }
    cublasCheck(cublasLtMatmulDescDestroy(plan->desc));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->a));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->b));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->c));
    memset(plan, 0, sizeof(*plan));
}

void matmul_close(void) {
    for (size_t i = 0; i < MATMUL_PLANS + MATMUL_PROBES; i++) { matmul_plan_free(matmul.plans + i); }
    cublasCheck(cublasLtMatmulPreferenceDestroy(matmul.preference));
    cublasCheck(cublasLtDestroy(matmul.handle));
    cudaCheck(cudaFree(matmul.workspace));
    free(matmul.plans);
    memset(&matmul, 0, sizeof(matmul));
}

void matmul_plan_make(MatmulPlan* plan, MatmulShape s) {
    // cuBLASLt is column-major: it sees each of our matrices transposed, and c^T = op(b)^T op(a)^T. So b comes first.
    bool trans_a = s.kind & 1, trans_b = s.kind & 2;
    cublasOperation_t first = trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cudaDataType_t c_type = s.kind & 4 ? CUDA_R_32F : CUDA_R_16BF;
    matmul_plan_free(plan);
    plan->shape = s;
    cublasCheck(cublasLtMatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasCheck(cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof(first)));
    cublasCheck(cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof(second)));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan->b, CUDA_R_16BF, trans_b ? s.K : s.N, trans_b ? s.N : s.K,
                                           (int64_t)s.ldb));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan->a, CUDA_R_16BF, trans_a ? s.M : s.K, trans_a ? s.K : s.M,
                                           (int64_t)s.lda));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan->c, c_type, s.N, s.M, (int64_t)s.ldc));
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    cublasCheck(cublasLtMatmulAlgoGetHeuristic(matmul.handle, plan->desc, plan->b, plan->a, plan->c, plan->c,
                                               matmul.preference, 1, &best, &found));
    if (found == 0 || best.state != CUBLAS_STATUS_SUCCESS) {
        fatal("gemm: cuBLASLt knows no algorithm for M %zu, N %zu, K %zu (lda %zu, ldb %zu, ldc %zu, kind %zu); a "
              "newer CUDA may", s.M, s.N, s.K, s.lda, s.ldb, s.ldc, s.kind);
    }
    plan->algo = best.algo;
}

const MatmulPlan* matmul_plan(MatmulShape s) {
    // the plan for a shape, from the table or new
    const size_t words[7] = {s.M, s.N, s.K, s.lda, s.ldb, s.ldc, s.kind};
    uint64_t hash = 0;
    for (int i = 0; i < 7; i++) { hash = hash64(hash + words[i] + RAND_GOLDEN); }
    MatmulPlan *home = matmul.plans + hash % MATMUL_PLANS, *free_place = NULL;
    for (MatmulPlan* plan = home; plan < home + MATMUL_PROBES; plan++) {
        if (memcmp(&plan->shape, &s, sizeof(s)) == 0) { return plan; }
        if (plan->desc == NULL && free_place == NULL) { free_place = plan; }
    }
    MatmulPlan* plan = free_place != NULL ? free_place : home;
    matmul_plan_make(plan, s);
    return plan;
}

void gemm(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const bf16* a, size_t lda, const bf16* b,
          size_t ldb, float beta, void* c, cudaDataType_t c_type, size_t ldc, cudaStream_t stream) {
    // c (M,N) = op(a) (M,K) op(b) (K,N) + beta * c, row-major, ld* is the length of a row in memory, sums in fp32. c is
    // bf16 (activations) or float (gradients of weights, beta 1); beta 0 does not read it.
    if (M == 0 || N == 0) { return; }
    size_t c_bytes = c_type == CUDA_R_32F ? sizeof(float) : sizeof(bf16);
    if (c_type != CUDA_R_32F && c_type != CUDA_R_16BF) {
        fatal("gemm: c must be float or bf16, is type %d", (int)c_type);
    }
    if (K == 0) { // an expert without tokens: libraries disagree about what is left in c then, so that is settled here
        if (beta != 0 && beta != 1) { fatal("gemm: with K = 0 beta must be 0 or 1, is %g", beta); }
        if (beta == 0) { cudaCheck(cudaMemset2DAsync(c, ldc * c_bytes, 0, N * c_bytes, M, stream)); }
        return;
    }
    if (lda % 8 != 0 || ldb % 8 != 0 || ldc % 8 != 0) {
        fatal("gemm: lda, ldb and ldc must be multiples of 8, are %zu, %zu, %zu", lda, ldb, ldc);
    }
    if (lda < (trans_a ? M : K) || ldb < (trans_b ? K : N) || ldc < N) {
        fatal("gemm: a row is longer than its ld: M %zu, N %zu, K %zu, lda %zu, ldb %zu, ldc %zu", M, N, K, lda, ldb,
              ldc);
    }
    if (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 != 0) {
        fatal("gemm: a, b and c must be 16-byte aligned, are at %p, %p, %p", (const void*)a, (const void*)b, c);
    }
    MatmulShape shape;
    memset(&shape, 0, sizeof(shape));
    shape.M = M, shape.N = N, shape.K = K, shape.lda = lda, shape.ldb = ldb, shape.ldc = ldc;
    shape.kind = (size_t)trans_a + 2 * (size_t)trans_b + 4 * (size_t)(c_type == CUDA_R_32F);
    const MatmulPlan* plan = matmul_plan(shape);
    float alpha = 1;
    cuda_launches++;
    cublasCheck(cublasLtMatmul(matmul.handle, plan->desc, &alpha, b, plan->b, a, plan->a, &beta, c, plan->c, c,
                               plan->c, &plan->algo, matmul.workspace, matmul.workspace_bytes, stream));
}

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

#endif
