// cuBLAS and cuBLASLt against plain loops, and their strictness: `blas` checks values, `blas NAME` makes one mistake.
#include "cases.h"
#include <cmath>
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
typedef __nv_bfloat16 bf16;

static int failed;
static void expect(const char* what, double got, double want, double tolerance) {
    if (fabs(got - want) <= tolerance) return;
    printf("%s: %g, expected %g\n", what, got, want);
    failed = 1;
}
static float value(size_t i) { return (float)((i * 37 + 11) % 101) / 50 - 1; }
template <class T> static std::vector<T> fill(size_t n, size_t shift) {
    std::vector<T> v(n);
    for (size_t i = 0; i < n; i++) v[i] = (T)value(i + shift);
    return v;
}
static const int M = 5, N = 7, K = 9;

// one product, both transpositions, leading dimensions larger than needed, a batch of two
template <class T> static void gemm(cublasHandle_t h, bool ta, bool tb, float beta, cudaDataType type) {
    int lda = (ta ? K : M) + 2, ldb = (tb ? N : K) + 1, ldc = M + 3;
    long long sa = lda * (ta ? M : K), sb = ldb * (tb ? K : N), sc = ldc * N;
    auto a = fill<T>(sa * 2, 0), b = fill<T>(sb * 2, 5), c = fill<T>(sc * 2, 9);
    T *da = upload(a), *db = upload(b), *dc = upload(c);
    float alpha = 0.5f;
    cublasStatus_t s = cublasGemmStridedBatchedEx(h, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, M,
                                                  N, K, &alpha, da, type, lda, sa, db, type, ldb, sb, &beta, dc, type,
                                                  ldc, sc, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (s != CUBLAS_STATUS_SUCCESS) failed = 1;
    auto r = download(dc, sc * 2);
    for (int z = 0; z < 2; z++) for (int i = 0; i < M; i++) for (int j = 0; j < N; j++) {
        double sum = 0;
        for (int k = 0; k < K; k++)
            sum += (double)(float)a[z * sa + (ta ? k + i * lda : i + k * lda)] *
                   (double)(float)b[z * sb + (tb ? j + k * ldb : k + j * ldb)];
        double want = alpha * sum + beta * (double)(float)c[z * sc + i + j * ldc];
        expect("gemm", (float)r[z * sc + i + j * ldc], want, sizeof(T) == 2 ? fabs(want) / 200 + 1e-3 : 1e-5);
    }
}

// D = A^T B + beta D with an output of fp32 or bf16, in place: how gradients are added up over micro-batches
template <class T> static void lt_accumulate(cublasLtHandle_t h, cudaDataType type, float beta, cudaStream_t stream) {
    cublasLtMatmulDesc_t d;
    cublasLtMatrixLayout_t la, lb, lc;
    cublasLtMatmulPreference_t p;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    size_t workspace = 1024;
    auto a = fill<bf16>(K * M, 0), b = fill<bf16>(K * N, 3);
    auto c = fill<T>(M * N, 6);
    bf16 *da = upload(a), *db = upload(b);
    T* dc = upload(c);
    void* space = device<char>(workspace);
    float alpha = 0.5f;
    cublasOperation_t t = CUBLAS_OP_T;
    cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t);
    cublasLtMatrixLayoutCreate(&la, CUDA_R_16BF, K, M, K);
    cublasLtMatrixLayoutCreate(&lb, CUDA_R_16BF, K, N, K);
    cublasLtMatrixLayoutCreate(&lc, type, M, N, M);
    cublasLtMatmulPreferenceCreate(&p);
    cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    cublasLtMatmulAlgoGetHeuristic(h, d, la, lb, lc, lc, p, 1, &found, &count);
    if (count != 1 || found.state != CUBLAS_STATUS_SUCCESS) failed = 1;
    cudaDeviceSynchronize();
    if (cublasLtMatmul(h, d, &alpha, da, la, db, lb, &beta, dc, lc, dc, lc, &found.algo, space, workspace, stream) !=
        CUBLAS_STATUS_SUCCESS)
        failed = 1;
    cudaStreamSynchronize(stream);
    auto r = download(dc, M * N);
    for (int i = 0; i < M; i++) for (int j = 0; j < N; j++) {
        double sum = 0;
        for (int k = 0; k < K; k++) sum += (double)(float)a[k + i * K] * (double)(float)b[k + j * K];
        double want = alpha * sum + beta * (double)(float)c[i + j * M];
        expect("accumulate", (float)r[i + j * M], want, sizeof(T) == 2 ? fabs(want) / 256 + 1e-6 : 1e-5);
    }
    cublasLtMatmulPreferenceDestroy(p);
    cublasLtMatmulDescDestroy(d);
    for (auto l : {la, lb, lc}) cublasLtMatrixLayoutDestroy(l);
}

static void lt_product(cublasLtHandle_t h, const char* mistake) {
    cublasLtMatmulDesc_t d;
    cublasLtMatrixLayout_t la, lb, lc;
    auto a = fill<bf16>(K * M, 0), b = fill<bf16>(K * N, 3);
    auto bias = fill<bf16>(M, 1);
    bf16 *da = upload(a), *db = upload(b), *dbias = upload(bias);
    float *dc = device<float>(M * N), alpha = 1, beta = 0;
    cublasOperation_t t = CUBLAS_OP_T;
    cublasLtEpilogue_t e = CUBLASLT_EPILOGUE_BIAS;
    cudaDataType bt = CUDA_R_16BF;
    cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSA, &t, !strcmp(mistake, "lt_size") ? 1 : sizeof t);
    cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_EPILOGUE, !strcmp(mistake, "lt_null") ? nullptr : &e,
                                   sizeof e);
    cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &dbias, sizeof dbias);
    cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bt, sizeof bt);
    cublasLtMatrixLayoutCreate(&la, CUDA_R_16BF, K, M, K);
    cublasLtMatrixLayoutCreate(&lb, CUDA_R_16BF, !strcmp(mistake, "lt_shape") ? K + 1 : K, N,
                               K + !strcmp(mistake, "lt_shape"));
    cublasLtMatrixLayoutCreate(&lc, CUDA_R_32F, M, N, M);
    cublasStatus_t s = cublasLtMatmul(h, d, &alpha, da, la, db, lb, &beta, dc, lc, dc, lc, nullptr, nullptr, 0, 0);
    if (s != CUBLAS_STATUS_SUCCESS) return;
    auto r = download(dc, M * N);
    for (int i = 0; i < M; i++) for (int j = 0; j < N; j++) {
        double sum = (double)(float)bias[i];
        for (int k = 0; k < K; k++) sum += (double)(float)a[k + i * K] * (double)(float)b[k + j * K];
        expect("cublasLtMatmul", r[i + j * M], sum, 1e-4);
    }
    cublasLtMatmulDescDestroy(d);
    cublasLtMatrixLayoutDestroy(la);
    cublasLtMatrixLayoutDestroy(lb);
    cublasLtMatrixLayoutDestroy(lc);
}

int main(int argc, char** argv) {
    const char* mistake = argc > 1 ? argv[1] : "";
    cublasHandle_t h;
    cublasLtHandle_t lt;
    cudaStream_t s;
    cudaStreamCreate(&s);
    cublasCreate(&h);
    cublasLtCreate(&lt);
    float one = 1, zero = 0, *x = zeros<float>(64), *y = device<float>(64);
    if (!strcmp(mistake, "ld")) cublasSgemm(h, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, x, 3, x, 4, &zero, y, 4);
    else if (!strcmp(mistake, "null"))
        cublasSgemm(h, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, nullptr, 4, x, 4, &zero, y, 4);
    else if (!strcmp(mistake, "bounds"))
        cublasSgemm(h, CUBLAS_OP_N, CUBLAS_OP_N, 9, 9, 4, &one, x, 9, x, 4, &zero, y, 9);
    else if (!strcmp(mistake, "beta_uninitialised"))
        cublasSgemm(h, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, x, 4, x, 4, &one, y, 4);
    else if (!strcmp(mistake, "stream")) {  // the product runs on another stream than the copy of its operand
        cublasSetStream(h, s);
        cudaStream_t t;
        cudaStreamCreate(&t);
        cudaDeviceSynchronize();
        cudaMemsetAsync(x, 1, 256, t);
        cublasSgemm(h, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, x, 4, x, 4, &zero, y, 4);
    } else if (!strncmp(mistake, "lt_", 3)) {
        lt_product(lt, mistake);
    } else {
        cublasSetStream(h, s);
        cudaDeviceSynchronize();
        for (int t = 0; t < 4; t++) {
            gemm<float>(h, t & 1, t & 2, 0, CUDA_R_32F);
            gemm<float>(h, t & 1, t & 2, 0.25f, CUDA_R_32F);
            gemm<bf16>(h, t & 1, t & 2, 0.25f, CUDA_R_16BF);
        }
        lt_product(lt, "");
        for (float beta : {0.0f, 1.0f}) {
            lt_accumulate<float>(lt, CUDA_R_32F, beta, s);
            lt_accumulate<bf16>(lt, CUDA_R_16BF, beta, s);
        }
    }
    cudaDeviceSynchronize();
    cublasDestroy(h);
    cublasLtDestroy(lt);
    return failed;
}
