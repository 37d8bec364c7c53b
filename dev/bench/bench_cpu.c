// bench_cpu.c (part of `make bench-cpu`): how fast is a training step of train_moe_cpu.c, as a share of what this machine's matrix
// product allows? A step and a square product take turns in one run, so that both meet the same noise; medians are compared.
//   build/bench_cpu [S] [M] [SEED1] [fp32] [bf16] [steps]      the sizes are those of the table below
//   build/bench_cpu turn SIZE PRECISION STEPS       for compare_cpu.py: one step to warm up, then STEPS; a line each, milliseconds
#define TESTING
#include "../../train_moe_cpu.c"
#include "turns.h"

// a model of that size, its batch, and a step of both
typedef struct { Model model; Options opt; Profiler profiler; Microbatch mb; int *tokens, steps; } Bench;

static void bench_create(Bench* b, const BenchSize* size, bool bf16) {
    MoEConfig c = bench_config(size);
    Switches switches = {ATTENTION_FLASH, EXPERTS_GROUPED, true, 0, 0, bf16};
    memset(b, 0, sizeof(*b));
    options_defaults(&b->opt, PROGRAM_CPU);
    profiler_init(&b->profiler, NULL);
    model_create(&b->model, &c, switches, size->B, size->T, true);
    model_init(&b->model, 1);
    optimizer_init(&b->model);
    b->model.profiler = &b->profiler;
    size_t N = size->B * size->T;
    b->tokens = (int*)mallocCheck((N + 1) * sizeof(int));
    for (size_t i = 0; i <= N; i++) { b->tokens[i] = (int)(hash64(i) % (uint64_t)c.vocab_size); }
    b->mb = (Microbatch){b->tokens, b->tokens + 1, NULL, NULL, (double)N, 1};
}

static double bench_step(Bench* b) {
    profiler_step_begin(&b->profiler, ++b->steps);
    model_forward_backward(&b->model, &b->mb, true);
    model_update(&b->model, b->steps, 1e-4, model_grad_norm(&b->model), &b->opt);
    profiler_step_end(&b->profiler);
    return b->profiler.step_ms;
}

static void bench_free(Bench* b) {
    free(b->tokens);
    model_free(&b->model);
}

static void bench(const BenchSize* size, bool bf16, int steps) {
    Bench b;
    bench_create(&b, size, bf16);
    size_t N = size->B * size->T;
    const MoEConfig* c = &b.model.config;
    const ParamTable* table = &b.model.table;
    double flop = (double)N * model_flops_per_token(table->num_matmul_active, c->num_hidden_layers, c->num_attention_heads, c->head_dim, size->T);
    double *step_ms = (double*)mallocCheck((size_t)steps * sizeof(double)), *rate = (double*)mallocCheck((size_t)steps * sizeof(double));
    Neighbours neighbours = neighbours_begin();
    for (int i = -1; i < steps; i++) { // step -1 warms up: first touches of memory, code that the library generates
        if (i == 0) { neighbours = neighbours_begin(); }
        double r = product_rate(bf16, profiler_clock_us), ms = bench_step(&b);
        if (i >= 0) { rate[i] = r; step_ms[i] = ms; }
    }
    double others = neighbours_cores(neighbours);
    double ms = median(step_ms, steps), product = median(rate, steps);
    printf("%-6s %s %7.1fM parameters, B=%zu T=%zu: %.1f ms a step (%.1f .. %.1f), %.0f tokens/s, %.1f GFLOP/s = %.1f%% of a product's %.1f GFLOP/s; "
           "others used %.2f cores\n", size->name, bf16 ? "bf16" : "fp32", (double)table->num_parameters / 1e6, size->B, size->T, ms, step_ms[0],
           step_ms[steps - 1], (double)N / ms * 1e3, flop / ms / 1e6, 100 * flop / ms * 1e3 / product, product / 1e9, others);
    profiler_table(&b.profiler, stdout);
    free(step_ms); free(rate);
    bench_free(&b);
}

static int turn(const BenchSize* size, bool bf16, int steps) {
    Bench b;
    if (bf16 && bf16_product_missing()) { fatal("%s", bf16_product_missing()); }
    bench_create(&b, size, bf16);
    for (int i = -1; i < steps; i++) {
        printf("%.3f\n", bench_step(&b));
        fflush(stdout);
    }
    bench_free(&b);
    return 0;
}

static const BenchSize* size_named(const char* name) {
    for (size_t s = 0; s < NUM_SIZES; s++) {
        if (strcmp(name, sizes[s].name) == 0) { return &sizes[s]; }
    }
    return NULL;
}

int main(int argc, char** argv) {
    program_name = "bench_cpu";
    if (argc == 5 && strcmp(argv[1], "turn") == 0 && size_named(argv[2])) {
        return turn(size_named(argv[2]), strcmp(argv[3], "bf16") == 0, atoi(argv[4]));
    }
    int steps = 10;
    bool named[NUM_SIZES] = {false}, any = false, fp32 = false, bf16 = false;
    for (int i = 1; i < argc; i++) {
        const BenchSize* size = size_named(argv[i]);
        if (size) { named[size - sizes] = any = true; }
        fp32 |= strcmp(argv[i], "fp32") == 0;
        bf16 |= strcmp(argv[i], "bf16") == 0;
        if (atoi(argv[i]) > 0) { steps = atoi(argv[i]); }
    }
    if (!fp32 && !bf16) {
        fp32 = true;
        bf16 = bf16_product_missing() == NULL;
    }
    printf("%d threads, matrix products by %s\n", num_threads(), gemm_library(false));
    for (size_t s = 0; s < NUM_SIZES; s++) {
        if (any ? !named[s] : s == 2) { continue; } // SEED1 takes 10 GiB, so it is asked for by name
        if (fp32) { bench(&sizes[s], false, steps); }
        if (bf16) { bench(&sizes[s], true, steps); }
    }
    return 0;
}
