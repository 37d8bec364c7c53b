// cross_entropy.c: the loss of a chunk of rows and its gradient, written over the logits:
//     losses (rows) = log(sum of exp(logits[n,:])) - logits[n,targets[n]]
//     logits (rows,V) = d_loss * (softmax(logits[n,:]) - one-hot(targets[n])) where the gradient is wanted
// A row with target < 0 counts nothing: loss and gradient are 0. A vocabulary of 151936 makes the logits the largest
// array of the program (600 KB a row). They must be read and written once, 8 bytes a number; that is the bound once
// the exponentials are cheap.
//
//     make build/dev_cpu/cross_entropy
//
// kernel 1: three passes: the maximum, the sum of expf, the gradient with expf again.
// kernel 2: exp_poly in place of expf: plain C that becomes vectors (exp.c). Same passes.
// kernel 3: two passes: the sum is kept relative to the largest logit so far (online softmax, Milakov and Gimelshein
//           2018), a block of 4096 at a time so that there are still vectors. One read less, of a row that is in L2.
// kernel 4: the trainer's cross_entropy_row: three passes again, but the exponentials stay where the logits were, so
//           that each is computed once; the last pass only scales.
// winner: 4
//
// One core of a Zen 4, 1024 rows of 16384 (M), kernel 1 to 4: 154, 15.3, 15.3, 9.6 ms, that is 9.2 to 0.57 ns a number.
// Online softmax saves a read of what the cache holds anyway, and brings nothing; an exponential less brings a third.
#include "common.h"

enum { NUM_KERNELS = 4 };

// ----------------------------------------------------------------------------
// kernels 1, 2 and 3: a row with a target

void cross_entropy_row_kernel1(float* loss, float* logits, int target, size_t V, float d_loss, bool want_grad) {
    float maximum = -INFINITY;
    for (size_t v = 0; v < V; v++) { maximum = fmaxf(maximum, logits[v]); }
    double sum = 0; // 151936 floats added one by one would lose the loss's fifth digit
    for (size_t v = 0; v < V; v++) { sum += expf(logits[v] - maximum); }
    *loss = (float)log(sum) + maximum - logits[target];
    if (!want_grad) { return; }
    float scale = d_loss / (float)sum;
    for (size_t v = 0; v < V; v++) { logits[v] = scale * expf(logits[v] - maximum); }
    logits[target] -= d_loss;
}

static float block_max(const float* x, size_t n) {
    float maximum = -INFINITY;
    #pragma omp simd reduction(max : maximum)
    for (size_t i = 0; i < n; i++) { maximum = x[i] > maximum ? x[i] : maximum; }
    return maximum;
}

static float block_sum(const float* x, size_t n, float maximum) {
    // of exp(x - maximum)
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) { sum += exp_poly(x[i] - maximum); }
    return sum;
}

static void softmax_write(float* x, size_t n, float maximum, float scale) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) { x[i] = scale * exp_poly(x[i] - maximum); }
}

static size_t block_at(size_t begin, size_t V) { return V - begin < SUM_BLOCK ? V - begin : (size_t)SUM_BLOCK; }

void cross_entropy_row_kernel2(float* loss, float* logits, int target, size_t V, float d_loss, bool want_grad) {
    float maximum = block_max(logits, V);
    double sum = 0;
    for (size_t v = 0; v < V; v += SUM_BLOCK) { sum += block_sum(logits + v, block_at(v, V), maximum); }
    *loss = (float)log(sum) + maximum - logits[target];
    if (!want_grad) { return; }
    softmax_write(logits, V, maximum, (float)(d_loss / sum));
    logits[target] -= d_loss;
}

void cross_entropy_row_kernel3(float* loss, float* logits, int target, size_t V, float d_loss, bool want_grad) {
    float maximum = -INFINITY;
    double sum = 0; // of exp(logits - maximum) so far
    for (size_t v = 0; v < V; v += SUM_BLOCK) {
        float largest = block_max(logits + v, block_at(v, V));
        if (largest > maximum) {
            sum *= exp((double)maximum - largest);
            maximum = largest;
        }
        sum += block_sum(logits + v, block_at(v, V), maximum);
    }
    *loss = (float)log(sum) + maximum - logits[target];
    if (!want_grad) { return; }
    softmax_write(logits, V, maximum, (float)(d_loss / sum));
    logits[target] -= d_loss;
}

// ----------------------------------------------------------------------------
// checks and benchmark

void cross_entropy(int kernel, float* losses, float* logits, const int* targets, size_t rows, size_t V, float d_loss,
                   bool want_grad) {
    // the loop over rows is lm_head_forward's
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < rows; n++) {
        if (kernel == 4 || targets[n] < 0) { // an ignored row is no work: there is one way
            cross_entropy_row(losses + n, logits + n * V, targets[n], V, d_loss, want_grad);
        } else {
            (kernel == 1   ? cross_entropy_row_kernel1
             : kernel == 2 ? cross_entropy_row_kernel2
                           : cross_entropy_row_kernel3)(losses + n, logits + n * V, targets[n], V, d_loss, want_grad);
        }
    }
}

static void reference(double* losses, double* d_logits, const float* logits, const int* targets, size_t rows, size_t V,
                      double d_loss) {
    // the definition, in double
    for (size_t n = 0; n < rows; n++) {
        double sum = 0, maximum = -INFINITY;
        for (size_t v = 0; v < V; v++) { maximum = fmax(maximum, (double)logits[n * V + v]); }
        for (size_t v = 0; v < V; v++) { sum += exp(logits[n * V + v] - maximum); }
        losses[n] = targets[n] < 0 ? 0 : log(sum) + maximum - logits[n * V + targets[n]];
        for (size_t v = 0; v < V; v++) {
            double p = exp(logits[n * V + v] - maximum) / sum;
            d_logits[n * V + v] = targets[n] < 0 ? 0 : d_loss * (p - ((int)v == targets[n] ? 1 : 0));
        }
    }
}

static int* random_targets(size_t rows, size_t V) {
    int* targets = (int*)dev_alloc(rows * sizeof(int));
    for (size_t n = 0; n < rows; n++) { targets[n] = n % 5 == 3 ? -100 : (int)(hash64(n) % V); }
    targets[rows - 1] = (int)V - 1;
    return targets;
}

void check_rows(int kernel, size_t rows, size_t V, float scale, float shift) {
    float* logits = random_floats(rows * V, scale, 1);
    for (size_t i = 0; i < rows * V; i++) { logits[i] += shift; }
    int* targets = random_targets(rows, V);
    double *want_losses = zeros(rows), *want = zeros(rows * V);
    reference(want_losses, want, logits, targets, rows, V, 0.125);
    float *losses = fresh(rows), *kept = copy_of(logits, rows * V);
    cross_entropy(kernel, losses, kept, targets, rows, V, 0.125f, false);
    // of a loss: log's rounding, and that of maximum - logit; of a gradient: exp's 2 ulp and the argument's rounding
    check_near(losses, want_losses, rows, 2e-6, "kernel %d, rows %zu, V %zu, scale %g: loss alone", kernel, rows, V,
               scale);
    if (kernel < 4) { // the trainer's uses the row up
        check_result(memcmp(kept, logits, rows * V * sizeof(float)) == 0, "logits without gradient", "they changed");
    }
    cross_entropy(kernel, losses, logits, targets, rows, V, 0.125f, true);
    check_near(losses, want_losses, rows, 2e-6, "kernel %d, rows %zu, V %zu, scale %g: losses", kernel, rows, V, scale);
    check_near(logits, want, rows * V, 1e-7 * (20 + fabs(scale)), "kernel %d, rows %zu, V %zu, scale %g: d_logits",
               kernel, rows, V, scale);
    free_arrays();
}

void check_all(int kernel) {
    check_rows(kernel, 1, 1, 2, 0); // one choice: loss 0, gradient 0
    check_rows(kernel, 6, 3, 2, 0);
    check_rows(kernel, 5, 257, 8, 0);
    check_rows(kernel, 4, SUM_BLOCK + 1, 4, 0);
    check_rows(kernel, 3, 151936 + 7, 4, 0); // beyond a multiple of any vector
    check_rows(kernel, 4, 1000, 60, 0);      // most exponentials vanish
    check_rows(kernel, 4, 1000, 4, 100);     // exp(logit) would be infinite
    check_rows(kernel, 4, 1000, 4, -200);    // and here 0
}

typedef struct {
    size_t rows, V;
    float *losses, *logits, *from;
    int* targets;
} Work;

static void run(int kernel, const void* work) {
    const Work* w = (const Work*)work;
    cross_entropy(kernel, w->losses, w->logits, w->targets, w->rows, w->V, 1e-3f, true);
}

static void prepare(const void* work) { // the logits anew: a gradient's numbers would be other ones
    const Work* w = (const Work*)work;
    #pragma omp parallel for schedule(static)
    for (size_t n = 0; n < w->rows; n++) { memcpy(w->logits + n * w->V, w->from + n * w->V, w->V * sizeof(float)); }
}

void bench_all(void) {
    for (size_t s = 0; s < NUM_SIZES; s++) {
        size_t N = sizes[s].B * sizes[s].T, rows = N < LOGIT_ROWS ? N : (size_t)LOGIT_ROWS, V = (size_t)sizes[s].vocab;
        Work w = {rows, V, fresh(rows), fresh(rows * V), random_floats(rows * V, 4, 1), random_targets(rows, V)};
        Bench b = {"", 1, 4, 0, 8.0 * rows * V, run, prepare, &w, NULL};
        snprintf(b.what, sizeof(b.what), "%s", sizes[s].name);
        bench(&b);
        free_arrays();
    }
}

int main(int argc, char** argv) { return dev_main(argc, argv, NUM_KERNELS, 0, check_all, bench_all); }
