// cuBLAS and cuBLASLt as far as this project calls them: column-major products in fp32 or bf16 with fp32 accumulation,
// strict about leading dimensions, types and attributes, in the order of the handle's stream. Every product unpacks to
// fp32, calls the host's BLAS and rounds once.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <math.h>
#include <string.h>
#include "internal.h"
#if __has_include(<cblas.h>)
#include <cblas.h>
extern "C" void openblas_set_num_threads(int) __attribute__((weak));
#define HAVE_CBLAS 1
#endif
#define MAY_FAIL if (failing(__func__)) return CUBLAS_STATUS_EXECUTION_FAILED

namespace emu {

static size_t size_of(cudaDataType t) { return t == CUDA_R_32F ? 4 : t == CUDA_R_16BF || t == CUDA_R_16F ? 2 : 0; }

static float load(const void* p, size_t i, cudaDataType t) {
    if (t == CUDA_R_32F) return ((const float*)p)[i];
    return t == CUDA_R_16BF ? __bfloat162float(((const __nv_bfloat16*)p)[i]) : __half2float(((const __half*)p)[i]);
}

static void store(void* p, size_t i, cudaDataType t, float v) {
    if (t == CUDA_R_32F) ((float*)p)[i] = v;
    else if (t == CUDA_R_16BF) ((__nv_bfloat16*)p)[i] = __float2bfloat16(v);
    else ((__half*)p)[i] = __float2half(v);
}

struct Matrix {                  // column-major; element (r, c) lies at r + c * ld
    void* p;
    cudaDataType type;
    size_t rows, cols, ld;
    long long stride;            // between the matrices of a batch, in elements
    Matrix of(int i) const {
        Matrix m = *this;
        m.p = (char*)p + (long long)size_of(type) * stride * i;
        return m;
    }
    size_t bytes() const { return rows && cols ? ((cols - 1) * ld + rows) * size_of(type) : 0; }
};
struct Epilogue { int kind; const void* bias; cudaDataType bias_type; Matrix aux; };
struct Product { bool ta, tb; float alpha, beta; Matrix a, b, c, d; int batch; Epilogue epilogue; };

// ---------------------------------------------------------------- the product itself
static void touch(const Matrix& m, bool write) {
    for (size_t c = 0; c < m.cols; c++)
        check_op_touch((char*)m.p + c * m.ld * size_of(m.type), m.rows * size_of(m.type), write);
}

static std::vector<float> unpack(const Matrix& m) {
    std::vector<float> v(m.rows * m.cols);
    for (size_t c = 0; c < m.cols; c++)
        for (size_t r = 0; r < m.rows; r++) v[r + c * m.rows] = load(m.p, r + c * m.ld, m.type);
    return v;
}

static void multiply(const Product& x, size_t m, size_t n, size_t k, const std::vector<float>& a,
                     const std::vector<float>& b, std::vector<float>& c) {
#ifdef HAVE_CBLAS
    if (openblas_set_num_threads) openblas_set_num_threads(1);  // one order of additions, and no fight for the cores
    cblas_sgemm(CblasColMajor, x.ta ? CblasTrans : CblasNoTrans, x.tb ? CblasTrans : CblasNoTrans, (int)m, (int)n,
                (int)k, x.alpha, a.data(), (int)std::max<size_t>(1, x.a.rows), b.data(),
                (int)std::max<size_t>(1, x.b.rows), x.beta, c.data(), (int)std::max<size_t>(1, m));
#else
    for (size_t j = 0; j < n; j++) for (size_t i = 0; i < m; i++) {
        float sum = 0;
        for (size_t l = 0; l < k; l++) sum += a[x.ta ? l + i * k : i + l * m] * b[x.tb ? j + l * n : l + j * k];
        c[i + j * m] = x.alpha * sum + (x.beta != 0 ? x.beta * c[i + j * m] : 0);
    }
#endif
}

static float gelu(float v) { return 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))); }
static float gelu_slope(float v) {
    float t = tanhf(0.7978845608f * (v + 0.044715f * v * v * v));
    return 0.5f * (1 + t) + 0.5f * v * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * v * v);
}

static void finish(const Product& x, const Matrix& d, const Matrix& aux, const std::vector<float>& c) {
    int kind = x.epilogue.kind;
    bool bias = kind == CUBLASLT_EPILOGUE_BIAS || kind == CUBLASLT_EPILOGUE_GELU_BIAS ||
                kind == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || kind == CUBLASLT_EPILOGUE_RELU_BIAS;
    for (size_t j = 0; j < d.cols; j++) for (size_t i = 0; i < d.rows; i++) {
        float v = c[i + j * d.rows];
        if (bias) v += load(x.epilogue.bias, i, x.epilogue.bias_type);
        if (kind == CUBLASLT_EPILOGUE_GELU_AUX || kind == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
            store(aux.p, i + j * aux.ld, aux.type, v);
        if (kind == CUBLASLT_EPILOGUE_DGELU) v *= gelu_slope(load(aux.p, i + j * aux.ld, aux.type));
        else if (kind == CUBLASLT_EPILOGUE_RELU || kind == CUBLASLT_EPILOGUE_RELU_BIAS) v = fmaxf(v, 0);
        else if (kind != CUBLASLT_EPILOGUE_DEFAULT && kind != CUBLASLT_EPILOGUE_BIAS) v = gelu(v);
        store(d.p, i + j * d.ld, d.type, v);
    }
}

static void run(const Product& x) {
    size_t m = x.d.rows, n = x.d.cols, k = x.ta ? x.a.rows : x.a.cols;
    if (!m || !n) return;
    for (int i = 0; i < x.batch; i++) {
        Matrix a = x.a.of(i), b = x.b.of(i), c = x.c.of(i), d = x.d.of(i), aux = x.epilogue.aux;
        touch(a, false);
        touch(b, false);
        std::vector<float> out(m * n);
        if (x.beta != 0) {                             // else C is not read, and may be uninitialised
            touch(c, false);
            out = unpack(c);
        }
        if (x.epilogue.bias) check_op_touch(x.epilogue.bias, m * size_of(x.epilogue.bias_type), false);
        if (aux.p) {
            aux = aux.of(i);
            touch(aux, x.epilogue.kind != CUBLASLT_EPILOGUE_DGELU);
        }
        multiply(x, m, n, k, unpack(a), unpack(b), out);
        touch(d, true);
        finish(x, d, aux, out);
    }
}

// ---------------------------------------------------------------- strictness
static cublasStatus_t wrong(const char* call, void* pc, const char* text) {
    report("cuBLAS", pc, nullptr, "%s: %s", call, text);
    return CUBLAS_STATUS_INVALID_VALUE;
}

static cublasStatus_t check(const char* call, void* pc, const Product& x) {
    struct Named { const Matrix* m; const char* name; } all[] = {{&x.a, "A"}, {&x.b, "B"}, {&x.c, "C"}, {&x.d, "D"}};
    char text[200];
    for (auto& y : all) {
        if (y.m == &x.c && x.beta == 0) continue;
        if (!size_of(y.m->type)) return wrong(call, pc, "a data type other than fp32, bf16 and fp16 is not emulated");
        if (y.m->ld < std::max<size_t>(1, y.m->rows)) {
            snprintf(text, sizeof text, "the leading dimension of %s is %zu, its columns have %zu elements", y.name,
                     y.m->ld, y.m->rows);
            return wrong(call, pc, text);
        }
        size_t left, need = y.m->bytes();
        if (!need) continue;
        if (!y.m->p) {
            snprintf(text, sizeof text, "%s is a null pointer", y.name);
            return wrong(call, pc, text);
        }
        for (int i = 0; i < x.batch; i += std::max(1, x.batch - 1)) {
            if (valid_device_range(y.m->of(i).p, need, &left)) continue;
            snprintf(text, sizeof text, "%s needs %zu bytes, only %zu of its memory are on the device", y.name, need,
                     left);
            return wrong(call, pc, text);
        }
        if (y.m == &x.d && x.batch > 1 && y.m->stride == 0)
            return wrong(call, pc, "the results of a batch are written over each other (stride 0)");
    }
    if (x.a.type != x.b.type) return wrong(call, pc, "A and B have different data types");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t issue(const char* call, void* pc, const Product& x, cudaStream_t stream) {
    cublasStatus_t s = check(call, pc, x);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    return enqueue(stream, call, pc, [x] { run(x); }) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

struct Handle { unsigned magic; cudaStream_t stream; };
const unsigned ALIVE = 0xb1a5b1a5u;
static Handle* handle(cublasHandle_t h, const char* call, void* pc) {
    auto* x = (Handle*)h;
    if (x && x->magic == ALIVE) return x;
    report("cuBLAS", pc, nullptr, "%s: the handle was never created, or was destroyed", call);
    return nullptr;
}
static Handle* new_handle() { return new Handle{ALIVE, nullptr}; }
static cublasStatus_t destroy_handle(cublasHandle_t h, const char* call, void* pc) {
    Handle* x = handle(h, call, pc);
    if (!x) return CUBLAS_STATUS_NOT_INITIALIZED;
    x->magic = 0;
    bury(x);
    return CUBLAS_STATUS_SUCCESS;
}

static Matrix matrix(const void* p, cudaDataType t, bool transposed, int rows, int cols, int ld, long long stride) {
    return {
        (void*)p, t, (size_t)(transposed ? cols : rows), (size_t)(transposed ? rows : cols), (size_t)(ld < 0 ? 0 : ld),
        stride};
}

static bool known_compute(cublasComputeType_t c) {
    return c == CUBLAS_COMPUTE_32F || c == CUBLAS_COMPUTE_32F_PEDANTIC || c == CUBLAS_COMPUTE_32F_FAST_TF32 ||
           c == CUBLAS_COMPUTE_32F_FAST_16BF || c == CUBLAS_COMPUTE_32F_FAST_16F;
}

struct Gemm { cublasOperation_t ta, tb; int m, n, k; const void *alpha, *beta; };
static cublasStatus_t gemm(const char* call, void* pc, cublasHandle_t h, const Gemm& g, Matrix a, Matrix b, Matrix c,
                           int batch, cublasComputeType_t compute) {
    Handle* x = handle(h, call, pc);
    if (!x) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (g.m < 0 || g.n < 0 || g.k < 0 || batch < 0) return wrong(call, pc, "a negative size");
    if (!g.alpha || !g.beta) return wrong(call, pc, "alpha or beta is a null pointer");
    if (!known_compute(compute)) return wrong(call, pc, "a compute type other than 32F is not emulated");
    Product p{g.ta != CUBLAS_OP_N,
              g.tb != CUBLAS_OP_N,
              *(const float*)g.alpha,
              *(const float*)g.beta,
              a,
              b,
              c,
              c,
              batch,
              {CUBLASLT_EPILOGUE_DEFAULT, nullptr, CUDA_R_32F, {}}};
    return issue(call, pc, p, x->stream);
}

// ---------------------------------------------------------------- cuBLASLt objects
const cudaDataType LIKE_D = (cudaDataType)-1;
struct LtDesc {
    unsigned magic = ALIVE;
    int32_t ta = CUBLAS_OP_N, tb = CUBLAS_OP_N;
    Epilogue epilogue = {CUBLASLT_EPILOGUE_DEFAULT, nullptr, LIKE_D, {}};
    int64_t aux_ld = 0, aux_stride = 0;
    cudaDataType aux_type = LIKE_D;
};
struct LtLayout {
    unsigned magic;
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
    int32_t batch;
    int64_t stride;
};
struct LtPreference { unsigned magic; uint64_t workspace; };

// Copies one attribute in or out; its size must be the one the header documents.
static cublasStatus_t attribute(const char* call, void* pc, void* field, size_t size, const void* value, size_t given) {
    if (!value) return wrong(call, pc, "the attribute's buffer is a null pointer");
    char text[100];
    snprintf(text, sizeof text, "the attribute has %zu bytes, %zu were given", size, given);
    if (size != given) return wrong(call, pc, text);
    memcpy(field, value, size);
    return CUBLAS_STATUS_SUCCESS;
}
template <class T> static bool alive(T* x, const char* call, void* pc) {
    if (x && x->magic == ALIVE) return true;
    report("cuBLAS", pc, nullptr, "%s: a descriptor was never created, or was destroyed", call);
    return false;
}

static Matrix lt_matrix(const void* p, const LtLayout& l) {
    return {(void*)p, l.type, l.rows, l.cols, (size_t)(l.ld < 0 ? 0 : l.ld), l.stride};
}

static const char* lt_shapes(const LtDesc& d, const LtLayout& a, const LtLayout& b, const LtLayout& c,
                             const LtLayout& o) {
    uint64_t m = d.ta ? a.cols : a.rows, k = d.ta ? a.rows : a.cols, kb = d.tb ? b.cols : b.rows,
             n = d.tb ? b.rows : b.cols;
    if (k != kb) return "the inner dimensions of A and B differ";
    if (o.rows != m || o.cols != n || c.rows != m || c.cols != n)
        return "C or D does not have the shape of the product";
    if (a.batch != b.batch || a.batch != c.batch || a.batch != o.batch) return "the batch counts differ";
    return nullptr;
}

static bool known_epilogue(int e) {
    for (int k : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU,
                  CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                  CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_DGELU})
        if (e == k) return true;
    return false;
}

}
using namespace emu;

extern "C" {
// ---------------------------------------------------------------- cuBLAS
cublasStatus_t cublasCreate_v2(cublasHandle_t* h) {
    MAY_FAIL;
    *h = (cublasHandle_t)new_handle();
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
    MAY_FAIL;
    return destroy_handle(h, "cublasDestroy", PC);
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
    MAY_FAIL;
    Handle* x = handle(h, "cublasSetStream", PC);
    if (!x) return CUBLAS_STATUS_NOT_INITIALIZED;
    x->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t h, cudaStream_t* s) {
    MAY_FAIL;
    Handle* x = handle(h, "cublasGetStream", PC);
    if (!x) return CUBLAS_STATUS_NOT_INITIALIZED;
    *s = x->stream;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t) {
    MAY_FAIL;
    return handle(h, "cublasSetMathMode", PC) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void*, size_t) {
    MAY_FAIL;
    return handle(h, "cublasSetWorkspace", PC) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* v) {
    MAY_FAIL;
    *v = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}
const char* cublasGetStatusName(cublasStatus_t s) {
    switch (s) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}
const char* cublasGetStatusString(cublasStatus_t s) { return cublasGetStatusName(s); }

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                          int k, const void* alpha, const void* A, cudaDataType At, int lda,
                                          long long sa, const void* B, cudaDataType Bt, int ldb, long long sb,
                                          const void* beta, void* C, cudaDataType Ct, int ldc, long long sc, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t) {
    MAY_FAIL;
    return gemm("cublasGemmStridedBatchedEx", PC, h, {ta, tb, m, n, k, alpha, beta}, matrix(A, At, ta, m, k, lda, sa),
                matrix(B, Bt, tb, k, n, ldb, sb), matrix(C, Ct, false, m, n, ldc, sc), batch, compute);
}
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void* alpha, const void* A, cudaDataType At, int lda, const void* B, cudaDataType Bt,
                            int ldb, const void* beta, void* C, cudaDataType Ct, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t) {
    MAY_FAIL;
    return gemm("cublasGemmEx", PC, h, {ta, tb, m, n, k, alpha, beta}, matrix(A, At, ta, m, k, lda, 0),
                matrix(B, Bt, tb, k, n, ldb, 0), matrix(C, Ct, false, m, n, ldc, 0), 1, compute);
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                              const float* alpha, const float* A, int lda, const float* B, int ldb, const float* beta,
                              float* C, int ldc) {
    MAY_FAIL;
    return gemm("cublasSgemm", PC, h, {ta, tb, m, n, k, alpha, beta}, matrix(A, CUDA_R_32F, ta, m, k, lda, 0),
                matrix(B, CUDA_R_32F, tb, k, n, ldb, 0), matrix(C, CUDA_R_32F, false, m, n, ldc, 0), 1,
                CUBLAS_COMPUTE_32F);
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                         int k, const float* alpha, const float* A, int lda, long long sa,
                                         const float* B, int ldb, long long sb, const float* beta, float* C, int ldc,
                                         long long sc, int batch) {
    MAY_FAIL;
    return gemm("cublasSgemmStridedBatched", PC, h, {ta, tb, m, n, k, alpha, beta},
                matrix(A, CUDA_R_32F, ta, m, k, lda, sa), matrix(B, CUDA_R_32F, tb, k, n, ldb, sb),
                matrix(C, CUDA_R_32F, false, m, n, ldc, sc), batch, CUBLAS_COMPUTE_32F);
}
cublasStatus_t cublasSgemv_v2(cublasHandle_t h, cublasOperation_t ta, int m, int n, const float* alpha, const float* A,
                              int lda, const float* x, int incx, const float* beta, float* y, int incy) {
    MAY_FAIL;
    if (incx != 1 || incy != 1) return wrong("cublasSgemv", PC, "increments other than 1 are not emulated");
    int rows = ta ? n : m, k = ta ? m : n;
    return gemm("cublasSgemv", PC, h, {ta, CUBLAS_OP_N, rows, 1, k, alpha, beta},
                matrix(A, CUDA_R_32F, false, m, n, lda, 0), matrix(x, CUDA_R_32F, false, k, 1, k, 0),
                matrix(y, CUDA_R_32F, false, rows, 1, rows, 0), 1, CUBLAS_COMPUTE_32F);
}

// ---------------------------------------------------------------- cuBLASLt
cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) {
    MAY_FAIL;
    *h = (cublasLtHandle_t) new_handle();
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
    MAY_FAIL;
    return destroy_handle((cublasHandle_t)h, "cublasLtDestroy", PC);
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute, cudaDataType scale) {
    MAY_FAIL;
    if (!known_compute(compute) || scale != CUDA_R_32F)
        return wrong("cublasLtMatmulDescCreate", PC, "only 32F compute and scale types are emulated");
    *d = (cublasLtMatmulDesc_t) new LtDesc;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    MAY_FAIL;
    if (!alive((LtDesc*)d, "cublasLtMatmulDescDestroy", PC)) return CUBLAS_STATUS_INVALID_VALUE;
    ((LtDesc*)d)->magic = 0;
    bury(d);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t h, cublasLtMatmulDescAttributes_t a, const void* v,
                                              size_t n) {
    MAY_FAIL;
    const char* call = "cublasLtMatmulDescSetAttribute";
    auto* d = (LtDesc*)h;
    if (!alive(d, call, PC)) return CUBLAS_STATUS_INVALID_VALUE;
    switch (a) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return attribute(call, PC, &d->ta, 4, v, n);
        case CUBLASLT_MATMUL_DESC_TRANSB: return attribute(call, PC, &d->tb, 4, v, n);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return attribute(call, PC, &d->epilogue.kind, 4, v, n);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return attribute(call, PC, &d->epilogue.bias, 8, v, n);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return attribute(call, PC, &d->epilogue.bias_type, 4, v, n);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return attribute(call, PC, &d->epilogue.aux.p, 8, v, n);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return attribute(call, PC, &d->aux_ld, 8, v, n);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return attribute(call, PC, &d->aux_stride, 8, v, n);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return attribute(call, PC, &d->aux_type, 4, v, n);
        default: return wrong(call, PC, "this attribute is not emulated");
    }
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    MAY_FAIL;
    *l = (cublasLtMatrixLayout_t) new LtLayout{ALIVE, type, rows, cols, ld, 1, 0};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    MAY_FAIL;
    if (!alive((LtLayout*)l, "cublasLtMatrixLayoutDestroy", PC)) return CUBLAS_STATUS_INVALID_VALUE;
    ((LtLayout*)l)->magic = 0;
    bury(l);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t h, cublasLtMatrixLayoutAttribute_t a,
                                                const void* v, size_t n) {
    MAY_FAIL;
    const char* call = "cublasLtMatrixLayoutSetAttribute";
    auto* l = (LtLayout*)h;
    if (!alive(l, call, PC)) return CUBLAS_STATUS_INVALID_VALUE;
    switch (a) {
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return attribute(call, PC, &l->batch, 4, v, n);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return attribute(call, PC, &l->stride, 8, v, n);
        case CUBLASLT_MATRIX_LAYOUT_LD: return attribute(call, PC, &l->ld, 8, v, n);
        case CUBLASLT_MATRIX_LAYOUT_ROWS: return attribute(call, PC, &l->rows, 8, v, n);
        case CUBLASLT_MATRIX_LAYOUT_COLS: return attribute(call, PC, &l->cols, 8, v, n);
        case CUBLASLT_MATRIX_LAYOUT_TYPE: return attribute(call, PC, &l->type, 4, v, n);
        default: return wrong(call, PC, "this attribute is not emulated");
    }
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    MAY_FAIL;
    *p = (cublasLtMatmulPreference_t) new LtPreference{ALIVE, 0};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    MAY_FAIL;
    if (!alive((LtPreference*)p, "cublasLtMatmulPreferenceDestroy", PC)) return CUBLAS_STATUS_INVALID_VALUE;
    ((LtPreference*)p)->magic = 0;
    bury(p);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t a, const void* v, size_t n) {
    MAY_FAIL;
    const char* call = "cublasLtMatmulPreferenceSetAttribute";
    if (!alive((LtPreference*)p, call, PC)) return CUBLAS_STATUS_INVALID_VALUE;
    if (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return attribute(call, PC, &((LtPreference*)p)->workspace, 8, v, n);
    return v ? CUBLAS_STATUS_SUCCESS : wrong(call, PC, "the attribute's buffer is a null pointer");
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t o, cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
    MAY_FAIL;
    const char* call = "cublasLtMatmulAlgoGetHeuristic";
    if (!alive((LtDesc*)d, call, PC) || !alive((LtLayout*)a, call, PC) || !alive((LtLayout*)b, call, PC) ||
        !alive((LtLayout*)c, call, PC) || !alive((LtLayout*)o, call, PC))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (wanted < 1 || !results || !found) return wrong(call, PC, "no room for a result");
    memset(results, 0, sizeof *results);
    results->state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t hd, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t ha, const void* B, cublasLtMatrixLayout_t hb, const void* beta,
                              const void* C, cublasLtMatrixLayout_t hc, void* D, cublasLtMatrixLayout_t ho,
                              const cublasLtMatmulAlgo_t*, void* workspace, size_t workspace_size,
                              cudaStream_t stream) {
    MAY_FAIL;
    const char* call = "cublasLtMatmul";
    auto *d = (LtDesc*)hd;
    auto *a = (LtLayout*)ha, *b = (LtLayout*)hb, *c = (LtLayout*)hc, *o = (LtLayout*)ho;
    if (!handle((cublasHandle_t)h, call, PC)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!alive(d, call, PC) || !alive(a, call, PC) || !alive(b, call, PC) || !alive(c, call, PC) || !alive(o, call, PC))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!alpha || !beta) return wrong(call, PC, "alpha or beta is a null pointer");
    if (const char* text = lt_shapes(*d, *a, *b, *c, *o)) return wrong(call, PC, text);
    if (!known_epilogue(d->epilogue.kind)) return wrong(call, PC, "this epilogue is not emulated");
    size_t left;
    if (workspace_size && !valid_device_range(workspace, workspace_size, &left))
        return wrong(call, PC, "the workspace is smaller than its size says");
    Product p{d->ta != CUBLAS_OP_N, d->tb != CUBLAS_OP_N, *(const float*)alpha,
              *(const float*)beta,  lt_matrix(A, *a),     lt_matrix(B, *b),
              lt_matrix(C, *c),     lt_matrix(D, *o),     a->batch,
              d->epilogue};
    if (p.epilogue.bias_type == LIKE_D) p.epilogue.bias_type = o->type;
    if (p.epilogue.aux.p)
        p.epilogue.aux = {p.epilogue.aux.p, d->aux_type == LIKE_D ? o->type : d->aux_type, o->rows, o->cols,
                          (size_t)d->aux_ld, d->aux_stride};
    return issue(call, PC, p, stream);
}
}
