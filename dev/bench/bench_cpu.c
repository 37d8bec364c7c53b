// bench_cpu.c (`make bench-cpu`): how fast is a training step of train_moe_cpu.c, as a share of what this machine's matrix product allows?
// A step and a square sgemm take turns in one run, so that both meet the same noise; medians are compared.
//   build/bench_cpu [S] [M] [SEED1] [steps]      the sizes are those of the table below
#define TESTING
#include "../../train_moe_cpu.c"

typedef struct { const char* name; int hidden, layers, heads, experts, ffn, vocab; size_t B, T; } BenchSize;

static const BenchSize sizes[] = {
    {"S", 256, 4, 4, 8, 256, 4096, 4, 256},
    {"M", 512, 6, 8, 16, 512, 16384, 4, 512},
    {"SEED1", 896, 12, 16, 16, 512, 151936, 1, 512}, // smol-500m
};

static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static double median(double* x, int n) {
    qsort(x, (size_t)n, sizeof(double), compare_doubles);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

static double sgemm_rate(void) {
    // FLOP/s of one 1536^3 product, all threads
    enum { SIZE = 1536 };
    static real* memory = NULL;
    if (!memory) {
        memory = (real*)arena_alloc(3 * SIZE * SIZE * sizeof(real));
        for (size_t i = 0; i < 3 * SIZE * SIZE; i++) { memory[i] = (real)(i % 7) - 3; }
    }
    double begin = profiler_clock_us();
    gemm(false, true, SIZE, SIZE, SIZE, memory, SIZE, memory + SIZE * SIZE, SIZE, 0, memory + 2 * SIZE * SIZE, SIZE);
    return 2.0 * SIZE * SIZE * SIZE / (profiler_clock_us() - begin) * 1e6;
}

static double cpu_seconds_of_all(void) {
    // processor time that this machine has spent on anything, from /proc/stat (user, nice, system, irq, softirq, steal)
    unsigned long long t[8] = {0};
    FILE* fp = fopen("/proc/stat", "r");
    if (!fp) { return NAN; }
    int n = fscanf(fp, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
    fclose(fp);
    return n == 8 ? (double)(t[0] + t[1] + t[2] + t[5] + t[6] + t[7]) / (double)sysconf(_SC_CLK_TCK) : NAN;
}

static double cpu_seconds_of_mine(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void bench(const BenchSize* size, int steps) {
    MoEConfig c;
    config_preset(&c, "smol-500m");
    c.hidden_size = size->hidden; c.num_hidden_layers = size->layers; c.num_attention_heads = c.num_key_value_heads = size->heads;
    c.num_experts = size->experts; c.moe_intermediate_size = size->ffn; c.vocab_size = size->vocab; c.eos_token_id = c.bos_token_id = -1;
    Switches switches = {ATTENTION_FLASH, EXPERTS_GROUPED, true, 0, 0};
    Options opt;
    options_defaults(&opt, PROGRAM_CPU);
    Model m;
    Profiler profiler;
    profiler_init(&profiler, NULL);
    model_create(&m, &c, switches, size->B, size->T, true);
    model_init(&m, 1);
    optimizer_init(&m);
    m.profiler = &profiler;
    size_t N = size->B * size->T;
    int* tokens = (int*)mallocCheck((N + 1) * sizeof(int));
    for (size_t i = 0; i <= N; i++) { tokens[i] = (int)(hash64(i) % (uint64_t)c.vocab_size); }
    Microbatch mb = {tokens, tokens + 1, NULL, NULL, (double)N, 1};
    double flop = (double)N * model_flops_per_token(m.table.num_matmul_active, c.num_hidden_layers, c.num_attention_heads, c.head_dim, size->T);
    double *step_ms = (double*)mallocCheck((size_t)steps * sizeof(double)), *rate = (double*)mallocCheck((size_t)steps * sizeof(double));
    double all = 0, mine = 0, start = 0;
    for (int i = -1; i < steps; i++) { // step -1 warms up: first touches of memory, code that the library generates
        if (i == 0) { all = cpu_seconds_of_all(); mine = cpu_seconds_of_mine(); start = profiler_clock_us(); }
        double r = sgemm_rate();
        profiler_step_begin(&profiler, i + 2);
        model_forward_backward(&m, &mb, true);
        model_update(&m, i + 2, 1e-4, model_grad_norm(&m), &opt);
        profiler_step_end(&profiler);
        if (i >= 0) { rate[i] = r; step_ms[i] = profiler.step_ms; }
    }
    double others = (cpu_seconds_of_all() - all - (cpu_seconds_of_mine() - mine)) / ((profiler_clock_us() - start) * 1e-6);
    double ms = median(step_ms, steps), sgemm = median(rate, steps);
    printf("%-6s %7.1fM parameters, B=%zu T=%zu: %.1f ms a step (%.1f .. %.1f), %.0f tokens/s, %.1f GFLOP/s = %.1f%% of sgemm's %.1f GFLOP/s; "
           "others used %.2f cores\n", size->name, (double)m.table.num_parameters / 1e6, size->B, size->T, ms, step_ms[0], step_ms[steps - 1],
           (double)N / ms * 1e3, flop / ms / 1e6, 100 * flop / ms * 1e3 / sgemm, sgemm / 1e9, others);
    profiler_table(&profiler, stdout);
    free(step_ms); free(rate); free(tokens);
    model_free(&m);
}

int main(int argc, char** argv) {
    program_name = "bench_cpu";
    int steps = 10, named = 0;
    for (int i = 1; i < argc; i++) { if (atoi(argv[i]) > 0) { steps = atoi(argv[i]); } else { named++; } }
    printf("%d threads, matrix products by %s\n", num_threads(), gemm_library());
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        bool wanted = named == 0 && s < 2; // SEED1 takes 9 GiB, so it is asked for by name
        for (int i = 1; i < argc; i++) { wanted = wanted || strcmp(argv[i], sizes[s].name) == 0; }
        if (wanted) { bench(&sizes[s], steps); }
    }
    return 0;
}
