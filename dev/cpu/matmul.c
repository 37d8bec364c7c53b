// matmul.c: the product behind everything that is dense: c (M,N) = op(a) (M,K) op(b) (K,N) + beta * c, row-major; op
// transposes or not, ld* is the length of a row in memory. A linear layer needs three of the four forms:
//     NT  out (N,OC) = inp (N,C) weight (OC,C)^T        rows of both lie along the sum
//     NN  d_inp (N,C) = d_out (N,OC) weight (OC,C)      one lies along the sum, one across
//     TN  d_weight (OC,C) = d_out (N,OC)^T inp (N,C)    both lie across
// Five sixths of a training step are in here. 2MNK operations on MK + KN + MN numbers: bound by arithmetic, if each
// number that was fetched is used often enough.
//
//     make build/dev_cpu/matmul
//
// kernel 1: three loops, a sum at a time. Each multiply-add waits for the one before (4 cycles), on one lane of 16.
// kernel 2: the trainer's gemm_naive, which runs where no library was found: the inner loop goes over neighbours in
//           memory and is cut into vectors. Now the loads are too many: one or two for each multiply-add.
// kernel 3: tiles: 8 x 16 sums stay in registers while K goes by, so that 8 + 16 loads do for 128 multiply-adds; blocks
//           of a and b are copied (packed) into the order in which they are read, so that any op reads alike.
// kernel 4: the trainer's gemm: a library (oneDNN or a BLAS), whose kernels are written for the processor that is here.
// kernel 5: the same with operands in bf16 (--precision bf16): half the bytes, two products a lane; sums are fp32.
// winner: 4 (5 with --precision bf16)
//
// One core of a Zen 4 (AVX-512), GFLOP/s as NT, NN, TN at M's qkv product, kernel 2: 34, 39, 28; kernel 3: 73, 67, 66;
// kernel 4: 109, 111, 111; kernel 5: 213, 216, 209. Kernel 1, at one expert's: 2.6, 0.9, 0.5.
#include "common.h"

enum { NUM_KERNELS = 5, BF16 = 5 };

// ----------------------------------------------------------------------------
// kernel 1

void gemm_kernel1(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const float* a, size_t lda, const float* b,
                  size_t ldb, float beta, float* c, size_t ldc) {
    #pragma omp parallel for
    for (size_t i = 0; i < M; i++) {
        for (size_t j = 0; j < N; j++) {
            float sum = 0;
            for (size_t k = 0; k < K; k++) {
                sum += (trans_a ? a[k * lda + i] : a[i * lda + k]) * (trans_b ? b[j * ldb + k] : b[k * ldb + j]);
            }
            c[i * ldc + j] = sum + (beta == 0 ? 0 : beta * c[i * ldc + j]);
        }
    }
}

// ----------------------------------------------------------------------------
// kernel 3

enum { TILE_ROWS = 8, TILE_COLS = 16, BLOCK = 256 }; // a task owns a block of c, BLOCK x BLOCK; so do its steps along K

static void pack(float* out, const float* x, size_t rows, size_t K, size_t row_step, size_t k_step, size_t group) {
    // out [rows/group][K][group] = x[row,k], the last group filled up with zeros. Memory is read along its rows.
    for (size_t first = 0; first < rows; first += group, out += K * group) {
        size_t count = rows - first < group ? rows - first : group;
        memset(out, 0, K * group * sizeof(float));
        const float* from = x + first * row_step;
        if (k_step == 1) {
            for (size_t i = 0; i < count; i++) {
                for (size_t k = 0; k < K; k++) { out[k * group + i] = from[i * row_step + k]; }
            }
        } else {
            for (size_t k = 0; k < K; k++) { memcpy(out + k * group, from + k * k_step, count * sizeof(float)); }
        }
    }
}

static inline void tile_product(float* c, size_t ldc, size_t rows, size_t cols, const float* a, const float* b,
                                size_t K, float beta) {
    // c (rows,cols) = a [K][TILE_ROWS]^T b [K][TILE_COLS] + beta * c. The bounds of the loops are constants, so that
    // the compiler gives each sum a place in a register.
    float sums[TILE_ROWS][TILE_COLS] = {{0}};
    for (size_t k = 0; k < K; k++) {
        for (int i = 0; i < TILE_ROWS; i++) {
            #pragma omp simd
            for (int j = 0; j < TILE_COLS; j++) { sums[i][j] += a[k * TILE_ROWS + i] * b[k * TILE_COLS + j]; }
        }
    }
    for (size_t i = 0; i < rows; i++) {
        float* c_i = c + i * ldc;
        for (size_t j = 0; j < cols; j++) { c_i[j] = sums[i][j] + (beta == 0 ? 0 : beta * c_i[j]); }
    }
}

static size_t at_most(size_t n, size_t most) { return n < most ? n : most; }

static void block_product(float* c, size_t ldc, size_t rows, size_t cols, const float* a, const float* b, size_t K,
                          float beta) {
    // of two packed blocks: a panel of b (16 KB) stays in L1 while all rows of a pass by
    for (size_t j = 0; j < cols; j += TILE_COLS) {
        for (size_t i = 0; i < rows; i += TILE_ROWS) {
            tile_product(c + i * ldc + j, ldc, at_most(rows - i, TILE_ROWS), at_most(cols - j, TILE_COLS), a + i * K,
                         b + j * K, K, beta);
        }
    }
}

void gemm_kernel3(bool trans_a, bool trans_b, size_t M, size_t N, size_t K, const float* a, size_t lda, const float* b,
                  size_t ldb, float beta, float* c, size_t ldc) {
    size_t row_step_a = trans_a ? 1 : lda, k_step_a = trans_a ? lda : 1;
    size_t row_step_b = trans_b ? ldb : 1, k_step_b = trans_b ? 1 : ldb; // a "row" of b is a column of op(b)
    size_t blocks_across = (N + BLOCK - 1) / BLOCK, blocks = (M + BLOCK - 1) / BLOCK * blocks_across;
    #pragma omp parallel for schedule(dynamic)
    for (size_t block = 0; block < blocks; block++) {
        size_t i = block / blocks_across * BLOCK, j = block % blocks_across * BLOCK;
        size_t rows = at_most(M - i, BLOCK), cols = at_most(N - j, BLOCK);
        float* packed = (float*)arena_alloc(2 * BLOCK * BLOCK * sizeof(float));
        float *packed_a = packed, *packed_b = packed + BLOCK * BLOCK;
        for (size_t k = 0; k == 0 || k < K; k += BLOCK) { // once even for K = 0: c = beta * c
            size_t depth = at_most(K - k, BLOCK);
            pack(packed_a, a + i * row_step_a + k * k_step_a, rows, depth, row_step_a, k_step_a, TILE_ROWS);
            pack(packed_b, b + j * row_step_b + k * k_step_b, cols, depth, row_step_b, k_step_b, TILE_COLS);
            block_product(c + i * ldc + j, ldc, rows, cols, packed_a, packed_b, depth, k == 0 ? beta : 1);
        }
        free(packed);
    }
}

// ----------------------------------------------------------------------------
// checks and benchmark

typedef struct {
    bool trans_a, trans_b;
    size_t M, N, K;
} Form;

static const char* form_name(Form f) { return f.trans_a ? (f.trans_b ? "TT" : "TN") : (f.trans_b ? "NT" : "NN"); }

typedef struct {
    Form form;
    size_t lda, ldb, ldc;
    float *a, *b, *c;
} Product;

static Product product_create(Form f, size_t pad, bool bf16) {
    // operands with rows that are `pad` longer than they need be
    Product p = {f, (f.trans_a ? f.M : f.K) + pad, (f.trans_b ? f.K : f.N) + pad, f.N + pad, NULL, NULL, NULL};
    size_t size_a = (f.trans_a ? f.K : f.M) * p.lda, size_b = (f.trans_b ? f.N : f.K) * p.ldb;
    p.a = random_floats(size_a, 1, 1);
    p.b = random_floats(size_b, 1, 2);
    p.c = random_floats(f.M * p.ldc, 1, 3);
    if (bf16) {
        in_bf16(p.a, size_a);
        in_bf16(p.b, size_b);
    }
    return p;
}

static void multiply(int kernel, const Product* p, float beta, float* c) {
    const Form* f = &p->form;
    (kernel == 1   ? gemm_kernel1
     : kernel == 2 ? gemm_naive
     : kernel == 3 ? gemm_kernel3
                   : gemm)(f->trans_a, f->trans_b, f->M, f->N, f->K, p->a, p->lda, p->b, p->ldb, beta, c, p->ldc);
}

static double product_element(const Product* p, size_t i, size_t j, float beta) {
    // the definition, in double
    const Form* f = &p->form;
    double sum = beta == 0 ? 0 : beta * (double)p->c[i * p->ldc + j];
    for (size_t k = 0; k < f->K; k++) {
        sum += (double)(f->trans_a ? p->a[k * p->lda + i] : p->a[i * p->lda + k]) *
               (f->trans_b ? p->b[j * p->ldb + k] : p->b[k * p->ldb + j]);
    }
    return sum;
}

void check_form(int kernel, Form f, size_t pad, float beta, size_t step) {
    // every `step`-th element; what lies behind a row's end must stay
    Product p = product_create(f, pad, kernel == BF16);
    float* c = copy_of(p.c, f.M * p.ldc);
    if (beta == 0) {
        for (size_t i = 0; i < f.M * p.ldc; i++) { c[i] = i % p.ldc < f.N ? NAN : c[i]; } // beta 0 does not read
    }
    multiply(kernel, &p, beta, c);
    size_t count = 0, most = f.M * p.ldc / step + 1;
    float* got = fresh(most);
    double* want = zeros(most);
    for (size_t at = 0; at < f.M * p.ldc; at += step, count++) {
        size_t i = at / p.ldc, j = at % p.ldc;
        got[count] = c[at];
        want[count] = j < f.N ? product_element(&p, i, j, beta) : p.c[at];
    }
    // fp32 sums of K products, in any order: their errors grow like sqrt(K)
    check_near(got, want, count, 6e-8 * sqrt((double)f.K + 16), "kernel %d, %s, M %zu N %zu K %zu, rows + %zu, beta %g",
               kernel, form_name(f), f.M, f.N, f.K, pad, beta);
    free_arrays();
}

void check_sizes(int kernel, size_t M, size_t N, size_t K, size_t pad) {
    for (int form = 0; form < 4; form++) {
        for (int beta = 0; beta < 2; beta++) {
            check_form(kernel, (Form){form & 1, form & 2, M, N, K}, pad, (float)beta, 1);
        }
    }
}

// what a size's layers ask for; an expert's rows are those of a balanced router
static int forms_of(const BenchSize* s, Form forms[9], const char* names[3]) {
    size_t N = s->B * s->T, C = (size_t)s->hidden, A = 64 * (size_t)s->heads, F = (size_t)s->ffn;
    size_t in[3] = {C, C, C}, out[3] = {3 * A, 2 * F, (size_t)s->vocab};
    size_t rows[3] = {N, 2 * N / (size_t)s->experts, at_most(N, LOGIT_ROWS)};
    const char* of[3] = {"qkv", "expert", "lm_head"};
    for (int i = 0; i < 3; i++) {
        names[i] = of[i];
        forms[3 * i] = (Form){false, true, rows[i], out[i], in[i]};
        forms[3 * i + 1] = (Form){false, false, rows[i], in[i], out[i]};
        forms[3 * i + 2] = (Form){true, false, out[i], in[i], rows[i]};
    }
    return 9;
}

// not what would take seconds
static int first_kernel(double flops) { return flops < 5e8 ? 1 : flops < 5e9 ? 2 : flops < 5e10 ? 3 : 4; }

void check_all(int kernel) {
    check_sizes(kernel, 1, 1, 1, 0);
    check_sizes(kernel, 3, 5, 7, 1);
    check_sizes(kernel, 1, 67, 130, 0); // one token
    check_sizes(kernel, 65, 33, 129, 2);
    check_sizes(kernel, 9, 31, 257, 0); // one more than a block of K
    check_sizes(kernel, 257, 258, 3, 0);
    check_sizes(kernel, 0, 8, 8, 0); // an expert without tokens: no rows
    check_sizes(kernel, 8, 8, 0, 0); // and for its weights' gradient nothing to sum
    for (size_t s = 0; s < NUM_SIZES && dev_benchmarks(); s++) {
        Form forms[9];
        const char* names[3];
        int count = forms_of(&sizes[s], forms, names);
        for (int i = 0; i < count; i++) {
            Form f = forms[i];
            if (kernel >= first_kernel(2.0 * f.M * f.N * f.K)) { check_form(kernel, f, 0, 0, f.M * f.N / 500 | 1); }
        }
    }
}

static void run(int kernel, const void* work) {
    const Product* p = (const Product*)work;
    multiply(kernel, p, 0, p->c);
}

void bench_all(void) {
    for (size_t s = 0; s < NUM_SIZES; s++) {
        Form forms[9];
        const char* names[3];
        int count = forms_of(&sizes[s], forms, names);
        for (int i = 0; i < count; i++) {
            Form f = forms[i];
            double flops = 2.0 * f.M * f.N * f.K;
            Bench b = {"", first_kernel(flops), 4, flops, 0, run, NULL, NULL, NULL};
            Product p = product_create(f, 0, false), q = product_create(f, 0, dev_runs(BF16));
            b.work = &p;
            b.work_bf16 = &q;
            snprintf(b.what, sizeof(b.what), "%s %s %s", sizes[s].name, names[i / 3], form_name(f));
            bench(&b);
            free_arrays();
        }
    }
}

int main(int argc, char** argv) { return dev_main(argc, argv, NUM_KERNELS, BF16, check_all, bench_all); }
