// turns.h: what bench_cpu.c and the lessons of dev/cpu measure with: the sizes, this machine's matrix product as the
// yardstick, medians, and how much of the machine others used meanwhile. Include it after train_moe_cpu.c.
#ifndef DEV_BENCH_TURNS_H
#define DEV_BENCH_TURNS_H

typedef struct {
    const char* name;
    int hidden, layers, heads, experts, ffn, vocab;
    size_t B, T;
} BenchSize;

static const BenchSize sizes[] = {
    {"S", 256, 4, 4, 8, 256, 4096, 4, 256},
    {"M", 512, 6, 8, 16, 512, 16384, 4, 512},
    {"SEED1", 896, 12, 16, 16, 512, 151936, 1, 512}, // smol-500m
};
enum { NUM_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static inline MoEConfig bench_config(const BenchSize* size) {
    MoEConfig c;
    config_preset(&c, "smol-500m");
    c.hidden_size = size->hidden;
    c.num_hidden_layers = size->layers;
    c.num_attention_heads = c.num_key_value_heads = size->heads;
    c.num_experts = size->experts;
    c.moe_intermediate_size = size->ffn;
    c.vocab_size = size->vocab;
    c.eos_token_id = c.bos_token_id = -1;
    return c;
}

static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static double median(double* x, int n) {
    // x is sorted on the way
    qsort(x, (size_t)n, sizeof(double), compare_doubles);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

static inline double product_rate(bool bf16, double (*clock_us)(void)) {
    // FLOP/s of one 1536^3 product, all threads
    enum { SIZE = 1536 };
    static real* memory = NULL;
    if (!memory) {
        memory = (real*)arena_alloc(3 * SIZE * SIZE * sizeof(real));
        for (size_t i = 0; i < 3 * SIZE * SIZE; i++) { memory[i] = (real)(i % 7) - 3; }
        if (bf16_product_missing() == NULL) { bf16_copy_add(memory, 2 * SIZE * SIZE, false); }
        to_bf16_all(memory, 2 * SIZE * SIZE);
    }
    double begin = clock_us();
    (bf16 ? gemm : gemm_fp32)(false, true, SIZE, SIZE, SIZE, memory, SIZE, memory + SIZE * SIZE, SIZE, 0,
                              memory + 2 * SIZE * SIZE, SIZE);
    return 2.0 * SIZE * SIZE * SIZE / (clock_us() - begin) * 1e6;
}

static double cpu_seconds_of_all(void) {
    // processor time that this machine has spent on anything, from /proc/stat (user, nice, system, irq, softirq, steal)
    unsigned long long t[8] = {0};
    FILE* fp = fopen("/proc/stat", "r");
    if (!fp) { return NAN; }
    int n = fscanf(fp, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6],
                   &t[7]);
    fclose(fp);
    return n == 8 ? (double)(t[0] + t[1] + t[2] + t[5] + t[6] + t[7]) / (double)sysconf(_SC_CLK_TCK) : NAN;
}

static double cpu_seconds_of_mine(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// cores that others used on average since a moment
typedef struct {
    double all, mine, us;
} Neighbours;
static inline Neighbours neighbours_begin(void) {
    return (Neighbours){cpu_seconds_of_all(), cpu_seconds_of_mine(), profiler_clock_us()};
}
static inline double neighbours_cores(Neighbours n) {
    double others = cpu_seconds_of_all() - n.all - (cpu_seconds_of_mine() - n.mine);
    return (others < 0 ? 0 : others) / ((profiler_clock_us() - n.us) * 1e-6); // the system counts in hundredths
}

#endif
