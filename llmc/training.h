// training.h: what every trainer has around its steps: what it saves and prints, when something is due.
#ifndef LLMC_TRAINING_H
#define LLMC_TRAINING_H

#include "dry_run.h"
#include "generate.h"
#include "logger.h"
#include "run.h"
#include "signals.h"

// Is it time after `step`, for what is done every `every` steps (0: never) and at the end?
static inline bool is_due(int64_t every, int64_t step, bool done) { return done || (every > 0 && step % every == 0); }

// The model, the machine in words, where the run saves and what it goes on from.
static inline void run_print_setup(const Run* run, const char* machine) {
    const MoEConfig* c = &run->config;
    options_echo(&run->opt, stdout);
    printf("model      %d layers, hidden %d, %d/%d heads x %d, %d experts top-%d x %d, vocab %d: %.2fM parameters, "
           "%.2fM active\n", c->num_hidden_layers, c->hidden_size, c->num_attention_heads, c->num_key_value_heads,
           c->head_dim, c->num_experts, c->num_experts_per_tok, c->moe_intermediate_size, c->vocab_size,
           (double)run->table.num_parameters / 1e6, (double)run->table.num_active / 1e6);
    printf("machine    %s\n", machine);
    if (run->opt.out == NULL) { printf("output     nothing will be saved: --out DIR keeps the model\n"); }
    if (run->resume != NULL) {
        printf("resumed    %s: step %lld, %llu tokens\n", run->resume, (long long)run->state.step,
               (unsigned long long)run->state.tokens);
    }
    fflush(stdout);
}

// OUT/step_00000100: a Hugging Face folder that also holds what a resume needs. fetch gets the numbers of every tensor.
static inline void run_save(const Run* run, int64_t step, uint64_t tokens, StDtype weights_dtype, bool with_master,
                            ParamFetch fetch, void* ctx) {
    TrainerState state;
    memset(&state, 0, sizeof(state));
    state.step = step;
    state.tokens = tokens;
    run_data_place(run, &state);
    state.seed = (uint64_t)run->opt.seed;
    state.options = options_json(&run->opt);
    const char* tokenizer = run->tokenizer_path != NULL ? run->tokenizer_path : run->has_tokenizer ? CHECKPOINT_BYTE_TOKENIZER : NULL;
    checkpoint_save(run->opt.out, &run->config, &run->table, &state, weights_dtype, with_master, fetch, ctx, tokenizer,
                    (int)run->opt.keep);
    trainer_state_free(&state);
}

// `count` tokens to stdout; see generate_text.
static inline void run_sample(const Run* run, DecodeToken decode, void* decoder, size_t context, uint64_t rng, int64_t count,
                              bool one_document) {
    TextOut out;
    memset(&out, 0, sizeof(out));
    out.tokenizer = run->has_tokenizer ? &run->tokenizer : NULL;
    out.file = stdout;
    generate_text(decode, decoder, context, run->config.vocab_size, &run->prompt, &out, &run->opt, rng, count, one_document);
}

// Ends the run before the update of a step whose loss or gradient norm is not finite.
static inline void run_stop_if_not_finite(const Run* run, Logger* logger, Profiler* profiler, int64_t step, double loss,
                                          double grad_norm) {
    if (isfinite(loss) && isfinite(grad_norm)) { return; }
    const char* out = run->opt.out;
    logger_clear(logger);
    profiler_close(profiler);
    fatal("step %lld: loss %g, gradient norm %g: not finite, so the run stops before this update%s%s; a lower --lr or "
          "--grad-clip may help, or look at the data", (long long)step, loss, grad_norm,
          out != NULL ? "; checkpoints are untouched in " : "", out != NULL ? out : "");
}

// What follows from the time of a step. Peaks in FLOP/s of all ranks together; NAN: not known.
static inline void run_step_rates(const Run* run, StepMetrics* m, double nominal_peak, double gemm_peak) {
    double tokens = (double)run->opt.tokens_per_step, flops = run_flops_per_token(run) * tokens;
    m->steps = run->opt.steps;
    m->tokens_per_s = tokens / m->step_ms * 1e3;
    m->mfu = flops / m->step_ms * 1e3 / nominal_peak;
    m->gemm_share = flops / m->step_ms * 1e3 / gemm_peak;
}

static inline void run_print_interrupted(const Run* run, int64_t step) {
    const char* out = run->opt.out;
    printf("interrupted after step %lld%s%s\n", (long long)step, out != NULL ? ", saved in " : "", out != NULL ? out : "");
}

// Opens what a run writes beside its checkpoints: --metrics (rank 0's) and --trace (each rank has a file of its own; the
// clock runs without one, too), which says what was run on what. machine and peaks as in run_describe.
static inline void run_open_logs(const Run* run, Logger* logger, Profiler* profiler, int64_t step, int rank, int num_ranks,
                                 const char* machine, double measured_peak, double nominal_peak) {
    logger_open(logger, rank == 0 ? run->opt.metrics : NULL, step, run->config.num_hidden_layers);
    profiler_init_rank(profiler, run->opt.trace, rank);
    if (run->opt.program == PROGRAM_GPU) { profiler_track_name(profiler, TRACK_COMPUTE, "compute stream"); }
    if (num_ranks > 1) { profiler_track_name(profiler, TRACK_ALLREDUCE, "all-reduce stream"); }
    profiler_track_name(profiler, TRACK_LOADER, "data loader");
    char* about = run_describe(run, num_ranks, machine, measured_peak, nominal_peak);
    profiler_describe(profiler, about);
    free(about);
}

#endif
