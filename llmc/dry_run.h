// dry_run.h: what a run takes, without taking it: parameters, FLOPs, and the largest batch that fits; and all that can be
// said of a run in one JSON object, for its trace.
#ifndef LLMC_DRY_RUN_H
#define LLMC_DRY_RUN_H

#include "profiler.h"
#include "run.h"
#include "signals.h"

// Floating-point operations that this run spends on a token, forward and backward.
static inline double run_flops_per_token(const Run* run) {
    const MoEConfig* c = &run->config;
    return model_flops_per_token(run->table.num_matmul_active, c->num_hidden_layers, c->num_attention_heads, c->head_dim,
                                 (size_t)run->opt.seq_len);
}

// What was run and on what, for profiler_describe: dev/bench/timemap.py computes from it what each phase could take.
// machine: words for a reader; FLOP/s of one rank: measured in a matrix product, and by the card's data sheet; NAN: not
// known. The caller owns the text.
static inline char* run_describe(const Run* run, int num_ranks, const char* machine, double measured_peak,
                                 double nominal_peak) {
    cJSON* json = cJSON_CreateObject();
    bool gpu = run->opt.program == PROGRAM_GPU;
    cJSON_AddNumberToObject(json, "ranks", num_ranks);
    cJSON_AddStringToObject(json, "machine", machine);
    cJSON_AddNumberToObject(json, "measured_peak", measured_peak); // NaN becomes null
    cJSON_AddNumberToObject(json, "nominal_peak", nominal_peak);
    cJSON_AddNumberToObject(json, "parameters", (double)run->table.num_parameters);
    cJSON_AddNumberToObject(json, "flops_per_token", run_flops_per_token(run));
    cJSON_AddItemToObject(json, "model", config_to_json(&run->config, gpu ? "bfloat16" : "float32"));
    cJSON_AddItemToObject(json, "options", options_json(&run->opt));
    char* text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    if (text == NULL) { fatal("out of memory"); }
    return text;
}

static inline void dry_run_counts(const Run* run) {
    const Options* opt = &run->opt;
    double flops = run_flops_per_token(run);
    printf("parameters   %zu total, %zu active a token, %zu of them in matrix products\n", run->table.num_parameters,
           run->table.num_active, run->table.num_matmul_active);
    printf("FLOP         %.4g a token (forward and backward, T = %lld), %.4g a step of %lld tokens, %.4g for all %lld "
           "steps\n", flops, (long long)opt->seq_len, flops * (double)opt->tokens_per_step,
           (long long)opt->tokens_per_step, flops * (double)options_total_tokens(opt), (long long)opt->steps);
}

// A memory plan: families of arrays, at most so many, ended by one with name NULL.
typedef struct { const char* name; size_t bytes; } MemoryRow;
enum { MEMORY_ROWS = 16, MOST_SEQUENCES = 65535 };

// Fills in what this run takes with B sequences a microbatch; grows with B.
typedef void (*MemoryPlanner)(MemoryRow* rows, const Run* run, size_t B);

static inline size_t planned_bytes(MemoryPlanner plan, const Run* run, size_t B) {
    MemoryRow rows[MEMORY_ROWS];
    size_t total = 0;
    plan(rows, run, B);
    for (const MemoryRow* row = rows; row->name != NULL; row++) { total += row->bytes; }
    return total;
}

// In MiB. machine: what it is the memory of, in words.
static inline void memory_plan_print(FILE* file, MemoryPlanner plan, const Run* run, size_t B, const char* machine) {
    MemoryRow rows[MEMORY_ROWS];
    plan(rows, run, B);
    fprintf(file, "memory       B = %zu, T = %lld, %s, MiB\n", B, (long long)run->opt.seq_len, machine);
    for (const MemoryRow* row = rows; row->name != NULL; row++) {
        fprintf(file, "  %-18s %12.1f\n", row->name, (double)row->bytes / (1 << 20));
    }
    fprintf(file, "  %-18s %12.1f\n", "total", (double)planned_bytes(plan, run, B) / (1 << 20));
}

// The largest B that fits into so many bytes, 0: none does. Doubles, then halves the interval.
static inline size_t largest_batch(MemoryPlanner plan, const Run* run, double memory) {
    size_t low = 0, high = 1;
    while (high <= MOST_SEQUENCES && (double)planned_bytes(plan, run, high) <= memory) {
        low = high;
        high *= 2;
    }
    if (high > MOST_SEQUENCES) { high = MOST_SEQUENCES + 1; }
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if ((double)planned_bytes(plan, run, middle) <= memory) { low = middle; } else { high = middle; }
    }
    return low;
}

static inline void largest_batch_print(MemoryPlanner plan, const Run* run, double memory) {
    size_t B = largest_batch(plan, run, memory);
    double gib = memory / (1 << 30);
    if (B > 0) {
        printf("largest batch in %.1f GiB at T = %lld: --batch-size %zu\n", gib, (long long)run->opt.seq_len, B);
    } else {
        printf("not even --batch-size 1 fits into %.1f GiB at T = %lld: try a smaller --seq-len or model\n", gib,
               (long long)run->opt.seq_len);
    }
}

// --dry-run: all of the above. The largest batch is that for --memory GiB where given, else for the `memory` bytes that
// the machine has, else (0: not known) for some cards that people have.
static inline void dry_run_print(MemoryPlanner plan, const Run* run, const char* machine, double memory) {
    const double gib = 1 << 30, cards[] = {24, 32, 48, 80, 96, 141};
    dry_run_counts(run);
    memory_plan_print(stdout, plan, run, (size_t)run->opt.batch_size, machine);
    if (run->opt.memory > 0) { memory = run->opt.memory * gib; }
    if (memory > 0) { largest_batch_print(plan, run, memory); }
    for (int i = 0; i < 6 && memory == 0; i++) { largest_batch_print(plan, run, cards[i] * gib); }
    stdout_check();
}

#endif
