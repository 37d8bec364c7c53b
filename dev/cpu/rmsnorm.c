// rmsnorm.c: the addition to the residual stream and the norm that follows it (Zhang and Sennrich 2019), and the way
// back:
//     residual (N,C) = inp + branch, or inp itself where there is no branch
//     rstd (N) = 1 / sqrt(mean of residual[n,:]^2 + eps);  out (N,C) = residual * rstd * weight (C)
//     with xhat = residual * rstd and g = d_out * weight:
//     d_residual (N,C) = or += rstd * (g - xhat * mean(g * xhat));  d_weight (C) = sum over n of d_out * xhat
// A few operations a number, so what bounds it is memory: 16 bytes a number forward (inp and branch read, residual and
// out written), 16 backward (d_out and residual read, d_residual read and written).
//
//     make build/dev_cpu/rmsnorm
//
// kernel 1: a pass for each formula over the whole arrays; the weight's gradient column by column, so that no two
//           threads meet. Arrays come from memory each time, and a column's numbers lie C apart.
// kernel 2: row by row, everything about a row while it is in the cache; each thread sums its own d_weight, and they
//           are added up at the end. But the sum of a row is still taken in order, a number each 4 cycles; and how rows
//           are grouped in d_weight depends on the number of threads, so its last bits do.
// kernel 3: the trainer's: row sums in lanes (omp simd reduction); d_weight in 64 blocks of rows, whoever computes
//           them, added in one order: the same bits for any number of threads.
// winner: 3
//
// One core of a Zen 4 at M (2048 x 512), kernel 1 to 3: forward 1.66, 1.55, 0.91 ms, backward 4.96, 1.08, 0.66.
#include "common.h"

enum { NUM_KERNELS = 3 };
static const float eps = 1e-6f;

typedef struct {
    size_t N, C;
    float beta; // of d_residual: 0 writes it, 1 adds to it
    float *residual, *out, *rstd, *inp, *branch, *weight, *d_residual, *d_weight, *d_out, *partials;
} Norm;

// ----------------------------------------------------------------------------
// kernel 1

void rmsnorm_forward_kernel1(const Norm* r) {
    size_t N = r->N, C = r->C;
    const float* x = r->inp;
    if (r->branch) {
        #pragma omp parallel for
        for (size_t i = 0; i < N * C; i++) { r->residual[i] = r->inp[i] + r->branch[i]; }
        x = r->residual;
    }
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        float sum = 0;
        for (size_t c = 0; c < C; c++) { sum += x[n * C + c] * x[n * C + c]; }
        r->rstd[n] = 1 / sqrtf(sum / (float)C + eps);
    }
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) { r->out[n * C + c] = x[n * C + c] * r->rstd[n] * r->weight[c]; }
    }
}

static float dot_in_order(const float* d_out, const float* weight, const float* x, size_t C) {
    float dot = 0;
    for (size_t c = 0; c < C; c++) { dot += d_out[c] * weight[c] * x[c]; }
    return dot;
}

static void d_row(float* d_x, const float* d_out, const float* weight, const float* x, float rstd, float dot, size_t C,
                  float beta) {
    // a row of d_residual, once the dot product over it is known
    float k = dot * rstd * rstd / (float)C;
    for (size_t c = 0; c < C; c++) {
        d_x[c] = rstd * (d_out[c] * weight[c] - x[c] * k) + (beta == 0 ? 0 : d_x[c]);
    }
}

void rmsnorm_backward_kernel1(const Norm* r) {
    size_t N = r->N, C = r->C;
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const float *d_o = r->d_out + n * C, *x = r->residual + n * C;
        d_row(r->d_residual + n * C, d_o, r->weight, x, r->rstd[n], dot_in_order(d_o, r->weight, x, C), C, r->beta);
    }
    #pragma omp parallel for
    for (size_t c = 0; c < C; c++) {
        float sum = 0;
        for (size_t n = 0; n < N; n++) { sum += r->d_out[n * C + c] * r->residual[n * C + c] * r->rstd[n]; }
        r->d_weight[c] = sum;
    }
}

// ----------------------------------------------------------------------------
// kernel 2

void rmsnorm_forward_kernel2(const Norm* r) {
    size_t C = r->C;
    #pragma omp parallel for
    for (size_t n = 0; n < r->N; n++) {
        const float* x = (r->branch ? r->residual : r->inp) + n * C;
        float sum = 0;
        for (size_t i = n * C; i < (n + 1) * C && r->branch; i++) { r->residual[i] = r->inp[i] + r->branch[i]; }
        for (size_t c = 0; c < C; c++) { sum += x[c] * x[c]; }
        r->rstd[n] = 1 / sqrtf(sum / (float)C + eps);
        for (size_t c = 0; c < C; c++) { r->out[n * C + c] = x[c] * r->rstd[n] * r->weight[c]; }
    }
}

void rmsnorm_backward_kernel2(const Norm* r) {
    size_t C = r->C;
    memset(r->d_weight, 0, C * sizeof(float));
    #pragma omp parallel
    {
        float* d_w = (float*)callocCheck(C, sizeof(float));
        #pragma omp for schedule(static)
        for (size_t n = 0; n < r->N; n++) {
            const float *d_o = r->d_out + n * C, *x = r->residual + n * C;
            d_row(r->d_residual + n * C, d_o, r->weight, x, r->rstd[n], dot_in_order(d_o, r->weight, x, C), C, r->beta);
            for (size_t c = 0; c < C; c++) { d_w[c] += d_o[c] * x[c] * r->rstd[n]; }
        }
        #pragma omp critical
        for (size_t c = 0; c < C; c++) { r->d_weight[c] += d_w[c]; }
        free(d_w);
    }
}

// ----------------------------------------------------------------------------
// checks and benchmark

static void forward(int kernel, const void* work) {
    const Norm* r = (const Norm*)work;
    if (kernel == 1) { rmsnorm_forward_kernel1(r); }
    if (kernel == 2) { rmsnorm_forward_kernel2(r); }
    if (kernel == 3) { rmsnorm_forward(r->residual, r->out, r->rstd, r->inp, r->branch, r->weight, r->N, r->C, eps); }
}

static void backward(int kernel, const void* work) {
    const Norm* r = (const Norm*)work;
    if (kernel == 1) { rmsnorm_backward_kernel1(r); }
    if (kernel == 2) { rmsnorm_backward_kernel2(r); }
    if (kernel == 3) {
        rmsnorm_backward(r->d_residual, r->d_weight, r->d_out, r->residual, r->weight, r->rstd, r->partials, r->N, r->C,
                         r->beta, 0);
    }
}

static Norm norm_create(size_t N, size_t C, bool branch, float beta) {
    Norm r = {N, C, beta, fresh(N * C), fresh(N * C), fresh(N), NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    r.inp = random_floats(N * C, 2, 1);
    r.branch = branch ? random_floats(N * C, 1, 2) : NULL;
    r.weight = random_floats(C, 2, 3);
    r.d_residual = beta == 0 ? fresh(N * C) : random_floats(N * C, 1, 4);
    r.d_weight = fresh(C);
    r.d_out = random_floats(N * C, 1, 5);
    r.partials = fresh(NORM_BLOCKS * C);
    return r;
}

void check_shape(int kernel, size_t N, size_t C, bool branch, float beta) {
    Norm r = norm_create(N, C, branch, beta);
    double *x = zeros(N * C), *rstd = zeros(N), *out = zeros(N * C), *d_x = zeros(N * C), *d_w = zeros(C);
    for (size_t n = 0; n < N; n++) { // the definition, in double
        double squares = 0, dot = 0;
        for (size_t i = n * C; i < (n + 1) * C; i++) {
            x[i] = r.inp[i] + (branch ? (double)r.branch[i] : 0);
            squares += x[i] * x[i];
        }
        rstd[n] = 1 / sqrt(squares / (double)C + eps);
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = x[n * C + c] * rstd[n] * r.weight[c];
            dot += (double)r.d_out[n * C + c] * r.weight[c] * x[n * C + c] * rstd[n] / (double)C;
            d_w[c] += r.d_out[n * C + c] * x[n * C + c] * rstd[n];
        }
        for (size_t i = n * C; i < (n + 1) * C; i++) {
            d_x[i] = rstd[n] * ((double)r.d_out[i] * r.weight[i - n * C] - x[i] * rstd[n] * dot) +
                     (beta == 0 ? 0 : (double)r.d_residual[i]);
        }
    }
    forward(kernel, &r);
    if (!branch) { r.residual = r.inp; }
    backward(kernel, &r);
    const double tolerance = 1e-7 * sqrt((double)(N > C ? N : C) + 64); // sums of C, of N numbers in any order
    Result results[5] = {{"residual", r.residual, x, N * C},
                         {"rstd", r.rstd, rstd, N},
                         {"out", r.out, out, N * C},
                         {"d_residual", r.d_residual, d_x, N * C},
                         {"d_weight", r.d_weight, d_w, C}};
    char what[96];
    snprintf(what, sizeof(what), "N %zu, C %zu%s%s", N, C, branch ? ", branch" : "", beta == 0 ? "" : ", adding");
    check_results(results, 5, kernel, tolerance, what);
    free_arrays();
}

void check_all(int kernel) {
    for (int i = 0; i < 4; i++) {
        check_shape(kernel, 1, 8, i & 1, (float)(i / 2)); // one token
        check_shape(kernel, 3, 37, i & 1, (float)(i / 2));
        check_shape(kernel, 65, 130, i & 1, (float)(i / 2)); // one row more than there are blocks
        check_shape(kernel, 200, 896, i & 1, (float)(i / 2));
    }
    for (size_t s = 0; s < NUM_SIZES && dev_benchmarks(); s++) {
        check_shape(kernel, sizes[s].B * sizes[s].T, (size_t)sizes[s].hidden, true, 1);
    }
}

void bench_all(void) {
    for (size_t s = 0; s < NUM_SIZES; s++) {
        Norm r = norm_create(sizes[s].B * sizes[s].T, (size_t)sizes[s].hidden, true, 1);
        double bytes = 16.0 * r.N * r.C;
        Bench b = {"", 1, 3, 0, bytes, forward, NULL, &r, NULL};
        snprintf(b.what, sizeof(b.what), "%s forward", sizes[s].name);
        bench(&b);
        b.run = backward;
        forward(3, &r); // what backward needs, also where kernel 1 alone is timed
        snprintf(b.what, sizeof(b.what), "%s backward", sizes[s].name);
        bench(&b);
        free_arrays();
    }
}

int main(int argc, char** argv) { return dev_main(argc, argv, NUM_KERNELS, 0, check_all, bench_all); }
