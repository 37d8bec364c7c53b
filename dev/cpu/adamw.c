// adamw.c: one step of AdamW (Loshchilov and Hutter 2019) on all parameters:
//     g = grads * grad_scale (clipping);  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//     p = (1 - lr weight_decay) p - lr (m/correction1) / (sqrt(v/correction2) + eps), without decay for the norms
// All arrays are (num_parameters). A dozen operations on 28 bytes (params, m, v read and written, grads read): bound by
// memory, whatever the processor.
//
//     make build/dev_cpu/adamw
//
// kernel 1: the trainer's --optimizer simple: a pass a formula and a tensor; 44 bytes a number.
// kernel 2: one pass, everything about a number in registers; blocks of 4096 go to the threads in turns. 28 bytes; but
//           a thread that skips every other block begins a new stream in each of four arrays 16 KB further on, again
//           and again, and what the hardware has fetched ahead is its neighbour's.
// kernel 3: the trainer's adamw_fused: each thread sweeps one contiguous range, over the borders of tensors.
// kernel 4: the same with the copy in bf16 that products read (--precision bf16), rounded while the block is in L1: 30
//           bytes. (A pass of its own would read 4 more.)
// winner: 3 (4 with --precision bf16)
//
// Two cores of a Zen 4, the 99M parameters of M, kernel 1 to 4: 80, 61, 58, 65 ms; the 9M of S: 8.7, 6.4, 5.8, 7.2. With
// other work on the machine (load 10) kernel 2 took twice as long as 3, at S four times: its threads also wait for each
// other after each tensor, those of 3 only once.
#include "common.h"

enum { NUM_KERNELS = 4, BF16 = 4 };

void adamw_kernel2(float* params, const float* grads, float* m, float* v, const ParamTable* table, AdamW a) {
    for (size_t i = 0; i < table->count; i++) {
        const ParamTensor* t = &table->tensors[i];
        size_t blocks = (t->numel + SUM_BLOCK - 1) / SUM_BLOCK, end = t->offset + t->numel;
        #pragma omp parallel for schedule(static, 1)
        for (size_t b = 0; b < blocks; b++) {
            size_t begin = t->offset + b * SUM_BLOCK;
            adamw_range(params, grads, m, v, begin, end - begin < SUM_BLOCK ? end : begin + SUM_BLOCK, a, t->decays);
        }
    }
}

// ----------------------------------------------------------------------------
// checks and benchmark

typedef struct {
    ParamTable table;
    AdamW a;
    float *params, *grads, *m, *v;
} Work;

static void run(int kernel, const void* work) {
    const Work* w = (const Work*)work;
    (kernel == 1   ? adamw_simple
     : kernel == 2 ? adamw_kernel2
                   : adamw_fused)(w->params, w->grads, w->m, w->v, &w->table, w->a);
}

static Work work_create(const MoEConfig* config, int step) {
    Work w;
    param_table_build(&w.table, config);
    size_t n = w.table.num_parameters;
    w.a = (AdamW){1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1 - powf(0.9f, (float)step), 1 - powf(0.95f, (float)step), 0.5f};
    w.params = random_floats(n, 1, 1);
    w.grads = random_floats(n, 1e-2f, 2);
    w.m = step == 1 ? random_floats(n, 0, 3) : random_floats(n, 1e-2f, 3);
    w.v = step == 1 ? random_floats(n, 0, 4) : random_floats(n, 1e-2f, 4);
    for (size_t i = 0; i < n; i++) { w.v[i] *= w.v[i]; } // never negative
    for (size_t i = 0; i < n; i += 3) { w.grads[i] = 0; } // as of a token that did not occur
    return w;
}

void check_step(int kernel, const MoEConfig* config, const char* model, int step) {
    Work w = work_create(config, step);
    size_t n = w.table.num_parameters;
    double *params = zeros(n), *m = zeros(n), *v = zeros(n);
    for (size_t t = 0; t < w.table.count; t++) { // the formulas, in double
        const ParamTensor* tensor = &w.table.tensors[t];
        for (size_t i = tensor->offset; i < tensor->offset + tensor->numel; i++) {
            double g = (double)w.grads[i] * w.a.grad_scale, decay = tensor->decays ? w.a.weight_decay : 0;
            m[i] = w.a.beta1 * (double)w.m[i] + (1 - (double)w.a.beta1) * g;
            v[i] = w.a.beta2 * (double)w.v[i] + (1 - (double)w.a.beta2) * g * g;
            params[i] = (1 - w.a.lr * decay) * w.params[i] -
                        w.a.lr * (m[i] / w.a.correction1) / (sqrt(v[i] / w.a.correction2) + (double)w.a.eps);
        }
    }
    if (kernel == BF16) { in_bf16(w.params, n); }
    run(kernel, &w);
    check_near(w.m, m, n, 1e-6, "kernel %d, %s, step %d: m", kernel, model, step);
    check_near(w.v, v, n, 2e-6, "kernel %d, %s, step %d: v", kernel, model, step); // 1 - beta2 has lost four bits
    check_near(w.params, params, n, 1e-6, "kernel %d, %s, step %d: params", kernel, model, step);
    if (kernel == BF16) {
        size_t spread = 1, wrong = 0;
        const uint16_t* copy = bf16_of(w.params, &spread);
        for (size_t i = 0; i < n; i++) { wrong += copy[i] != f32_to_bf16(w.params[i]); }
        check_result(wrong == 0, "the copy in bf16", "it is not the rounded weights");
    }
    param_table_free(&w.table);
    free_arrays();
}

void check_all(int kernel) {
    MoEConfig config;
    config_preset(&config, "tiny");
    check_step(kernel, &config, "tiny", 1); // m and v are 0, and stay so where the gradient is
    check_step(kernel, &config, "tiny", 7);
    config.hidden_size = 40; // tensors that end off every vector and block
    config.vocab_size = 263;
    config.moe_intermediate_size = 24;
    check_step(kernel, &config, "tiny with odd sizes", 3);
    if (!dev_benchmarks()) { return; }
    config = bench_config(&sizes[0]);
    check_step(kernel, &config, "S", 1);
}

void bench_all(void) {
    for (size_t s = 0; s < 2; s++) { // SEED1 would take 9 GiB to show the same
        MoEConfig config = bench_config(&sizes[s]);
        Work w = work_create(&config, 7);
        double numbers = (double)w.table.num_parameters;
        Work w_bf16 = w;
        if (dev_runs(BF16)) {
            w_bf16.params = copy_of(w.params, w.table.num_parameters);
            in_bf16(w_bf16.params, w.table.num_parameters);
        }
        Bench b = {"", 1, 3, 0, 28 * numbers, run, NULL, &w, &w_bf16};
        snprintf(b.what, sizeof(b.what), "%s, %.0fM parameters", sizes[s].name, numbers / 1e6);
        bench(&b);
        param_table_free(&w.table);
        free_arrays();
    }
}

int main(int argc, char** argv) { return dev_main(argc, argv, NUM_KERNELS, BF16, check_all, bench_all); }
