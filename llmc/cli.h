// The command line of both trainers: one table of options, from which parsing, --help, the echo at start and what a
// checkpoint keeps are all made. To add an option: a field in Options and a row in option_table, nothing else.
#ifndef LLMC_CLI_H
#define LLMC_CLI_H

#include "check.h"
#include "json.h"
#include "rand.h"
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cjson/cJSON.h>

// ----------------------------------------------------------------------------
// What the trainers read: a field an option, named like it with underscores

#define OPTIONS_MAX 80

typedef struct {
    // model
    const char *model, *init, *config;
    int64_t vocab_size;                     // -1: as the model's config says
    const char* resume;                     // NULL: no; "": the newest checkpoint in --out; else the folder to resume
    // data
    const char *train_data, *val_data, *batch;
    bool force_routing, doc_mask;
    int64_t batch_size, seq_len;            // B, T; with --batch the trainer takes both from the file
    int64_t grad_accum, tokens_per_step;    // -1 until options_resolve: tokens_per_step = B * T * ranks * grad_accum
    // length and optimiser
    int64_t steps, tokens;                  // -1 until options_resolve; tokens as given, else those of all steps
    double lr, min_lr;                      // min_lr: -1 until options_resolve
    const char* schedule;
    int64_t warmup_steps;                   // -1 until options_resolve
    double weight_decay, beta1, beta2, eps, grad_clip; // grad_clip 0: off
    // balance
    double aux_loss_coef;                   // -1: as the model's config says; the trainer sets it
    double z_loss_coef;
    // numbers
    const char* precision;
    bool master;
    int64_t seed;
    // output
    const char *out, *metrics, *trace;
    int64_t log_every, save_every, keep, val_every, val_steps, sample_every;
    bool profile;
    // sampling
    const char* prompt;
    double temperature, top_p;
    int64_t top_k;
    // other modes
    const char* dump;
    int64_t generate;                       // 0: train
    bool eval, dry_run;
    const char* eval_choices;
    double memory;                          // GiB that --dry-run plans for; 0: this machine's
    // speed
    const char *attention, *experts, *optimizer, *loader, *tokenize, *allreduce, *allreduce_dtype, *recompute;
    bool pinned, overlap;
    int64_t threads;                        // 0: as many as OpenMP wants
    bool help;

    int program;                            // PROGRAM_CPU or PROGRAM_GPU
    bool given[OPTIONS_MAX];                // row i of option_table was on the command line, or is inherited
    bool inherited[OPTIONS_MAX];            // it comes from the checkpoint that is resumed
    int64_t done_steps, done_tokens;        // what the run that is resumed had done by then
} Options;

// ----------------------------------------------------------------------------
// The table

enum { PROGRAM_CPU = 1, PROGRAM_GPU = 2, PROGRAM_BOTH = 3 };

typedef enum {
    OPTION_SWITCH,          // bool, no value
    OPTION_FLAG,            // bool, 0 or 1
    OPTION_INT,             // int64_t, limits is an interval; 98304, 100K, 1.5M, 10B, 1e9
    OPTION_DOUBLE,          // double, limits is an interval
    OPTION_STRING,          // const char*
    OPTION_OPTIONAL_STRING, // const char*, "" when the value is left out
    OPTION_CHOICE,          // const char*, limits is "a|b|c"
} OptionKind;

typedef struct {
    const char* group;
    char letter;            // short form, 0: none
    const char* name;
    const char* placeholder;
    OptionKind kind;
    size_t at;              // where in Options
    const char* fallback;   // the default as text; NULL: unset (NULL, false or -1), the help then says what that means
    const char* limits;     // "[0,1)" or "a|b|c"
    int programs;           // who honours it
    const char* help;
} OptionRow;

#define AT(field) offsetof(Options, field)
static const OptionRow option_table[] = {
    {"model", 'm', "model", "NAME", OPTION_STRING, AT(model), NULL, NULL, PROGRAM_BOTH,
        "a preset, freshly initialised: smol-500m, demo or tiny"},
    {"model", 0, "init", "DIR", OPTION_STRING, AT(init), NULL, NULL, PROGRAM_BOTH,
        "a Hugging Face folder: its config.json and weights"},
    {"model", 0, "config", "FILE", OPTION_STRING, AT(config), NULL, NULL, PROGRAM_BOTH,
        "a config.json (or its folder), freshly initialised"},
    {"model", 0, "vocab-size", "N", OPTION_INT, AT(vocab_size), NULL, "[1,16777216]", PROGRAM_BOTH,
        "with --model or --config: tokens of its vocabulary [the config's]"},
    {"model", 'r', "resume", "[DIR]", OPTION_OPTIONAL_STRING, AT(resume), NULL, NULL, PROGRAM_BOTH,
        "go on from this checkpoint, or from the newest one in --out"},

    {"data", 'd', "train-data", "GLOB", OPTION_STRING, AT(train_data), NULL, NULL, PROGRAM_BOTH,
        "token shards to train on; quote the pattern: 'data/train_*.bin'"},
    {"data", 'v', "val-data", "GLOB", OPTION_STRING, AT(val_data), NULL, NULL, PROGRAM_BOTH,
        "token shards to validate on"},
    {"data", 'b', "batch-size", "B", OPTION_INT, AT(batch_size), "8", "[1,1048576]", PROGRAM_BOTH,
        "sequences a microbatch a rank"},
    {"data", 't', "seq-len", "T", OPTION_INT, AT(seq_len), "256", "[1,16777216]", PROGRAM_BOTH,
        "tokens a sequence"},
    {"data", 0, "grad-accum", "N", OPTION_INT, AT(grad_accum), NULL, "[1,1048576]", PROGRAM_BOTH,
        "microbatches a step [1]"},
    {"data", 0, "tokens-per-step", "N", OPTION_INT, AT(tokens_per_step), NULL, "[1,inf)", PROGRAM_BOTH,
        "instead of --grad-accum: a multiple of B x T x ranks"},
    {"data", 0, "doc-mask", NULL, OPTION_SWITCH, AT(doc_mask), NULL, NULL, PROGRAM_BOTH,
        "attention does not cross documents"},
    {"data", 0, "batch", "FILE", OPTION_STRING, AT(batch), NULL, NULL, PROGRAM_BOTH,
        "always this batch: safetensors with tokens and targets [B,T] int32, optional doc_ids; to check or to overfit"},
    {"data", 0, "force-routing", NULL, OPTION_SWITCH, AT(force_routing), NULL, NULL, PROGRAM_BOTH,
        "take each token's experts from the --batch file, too"},

    {"length", 'n', "steps", "N", OPTION_INT, AT(steps), NULL, "[0,inf)", PROGRAM_BOTH,
        "optimizer steps [1000]"},
    {"length", 0, "tokens", "N", OPTION_INT, AT(tokens), NULL, "[1,inf)", PROGRAM_BOTH,
        "instead of --steps: 10B, 500M ... rounded up to whole steps"},

    {"optimiser", 'l', "lr", "RATE", OPTION_DOUBLE, AT(lr), "3e-4", "[0,inf)", PROGRAM_BOTH,
        "peak learning rate"},
    {"optimiser", 0, "min-lr", "RATE", OPTION_DOUBLE, AT(min_lr), NULL, "[0,inf)", PROGRAM_BOTH,
        "where the decay ends [lr / 10]"},
    {"optimiser", 0, "schedule", NULL, OPTION_CHOICE, AT(schedule), "cosine", "constant|cosine|wsd", PROGRAM_BOTH,
        "after the warm-up; wsd: flat, linear over the last fifth"},
    {"optimiser", 0, "warmup-steps", "N", OPTION_INT, AT(warmup_steps), NULL, "[0,inf)", PROGRAM_BOTH,
        "linear warm-up [2% of the steps]"},
    {"optimiser", 0, "weight-decay", "X", OPTION_DOUBLE, AT(weight_decay), "0.1", "[0,inf)", PROGRAM_BOTH,
        "on every matrix, not on norms"},
    {"optimiser", 0, "beta1", "X", OPTION_DOUBLE, AT(beta1), "0.9", "[0,1)", PROGRAM_BOTH, "AdamW, first moment"},
    {"optimiser", 0, "beta2", "X", OPTION_DOUBLE, AT(beta2), "0.95", "[0,1)", PROGRAM_BOTH, "AdamW, second moment"},
    {"optimiser", 0, "eps", "X", OPTION_DOUBLE, AT(eps), "1e-8", "(1e-38,inf)", PROGRAM_BOTH, "AdamW, denominator"},
    {"optimiser", 0, "grad-clip", "X", OPTION_DOUBLE, AT(grad_clip), "1", "[0,inf)", PROGRAM_BOTH,
        "largest gradient norm; 0: no clipping"},

    {"balance", 0, "aux-loss-coef", "X", OPTION_DOUBLE, AT(aux_loss_coef), NULL, "[0,inf)", PROGRAM_BOTH,
        "load-balancing loss [what config.json asks for; a preset's]"},
    {"balance", 0, "z-loss-coef", "X", OPTION_DOUBLE, AT(z_loss_coef), "0", "[0,inf)", PROGRAM_BOTH,
        "router z-loss"},

    {"numbers", 0, "precision", NULL, OPTION_CHOICE, AT(precision), NULL, "fp32|bf16", PROGRAM_BOTH,
        "of matrix products [CPU: fp32, GPU: bf16]"},
    {"numbers", 0, "master", NULL, OPTION_FLAG, AT(master), "1", NULL, PROGRAM_GPU,
        "fp32 master weights; 0: stochastic rounding of bf16 weights"},
    {"numbers", 's', "seed", "N", OPTION_INT, AT(seed), "42", "[0,9007199254740991]", PROGRAM_BOTH,
        "of weights, data order and sampling"},

    {"output", 'o', "out", "DIR", OPTION_STRING, AT(out), NULL, NULL, PROGRAM_BOTH,
        "checkpoints, each a Hugging Face folder; saves the last step"},
    {"output", 0, "log-every", "N", OPTION_INT, AT(log_every), "1", "[1,inf)", PROGRAM_BOTH,
        "steps between printed step lines (--metrics has every step)"},
    {"output", 0, "save-every", "N", OPTION_INT, AT(save_every), "0", "[0,inf)", PROGRAM_BOTH,
        "steps between checkpoints; 0: only the last step"},
    {"output", 0, "keep", "K", OPTION_INT, AT(keep), "0", "[0,1000000]", PROGRAM_BOTH,
        "checkpoints to keep; 0: all"},
    {"output", 0, "metrics", "FILE", OPTION_STRING, AT(metrics), NULL, NULL, PROGRAM_BOTH,
        "one JSON object a step (dev/bench/plot.py draws them)"},
    {"output", 0, "trace", "FILE", OPTION_STRING, AT(trace), NULL, NULL, PROGRAM_BOTH,
        "timeline to open in ui.perfetto.dev or chrome://tracing"},
    {"output", 0, "profile", NULL, OPTION_SWITCH, AT(profile), NULL, NULL, PROGRAM_BOTH,
        "print where the time went, phase by phase, at the end"},
    {"output", 0, "val-every", "N", OPTION_INT, AT(val_every), "100", "[0,inf)", PROGRAM_BOTH,
        "steps between validations; 0: only after the last step"},
    {"output", 0, "val-steps", "N", OPTION_INT, AT(val_steps), "20", "[0,inf)", PROGRAM_BOTH,
        "batches a validation; 0: all of --val-data"},
    {"output", 0, "sample-every", "N", OPTION_INT, AT(sample_every), "0", "[0,inf)", PROGRAM_BOTH,
        "steps between printed samples; 0: none"},

    {"sampling", 'p', "prompt", "TEXT", OPTION_STRING, AT(prompt), NULL, NULL, PROGRAM_BOTH,
        "what samples begin with [the start of a document]"},
    {"sampling", 0, "temperature", "X", OPTION_DOUBLE, AT(temperature), "1", "[0,inf)", PROGRAM_BOTH,
        "0: always the likeliest token"},
    {"sampling", 0, "top-k", "K", OPTION_INT, AT(top_k), "0", "[0,2147483647]", PROGRAM_BOTH,
        "only the K likeliest tokens; 0: off"},
    {"sampling", 0, "top-p", "P", OPTION_DOUBLE, AT(top_p), "1", "(0,1]", PROGRAM_BOTH,
        "only the likeliest that make up this probability; 1: off"},

    {"other modes", 'g', "generate", "N", OPTION_INT, AT(generate), NULL, "[1,2147483647]", PROGRAM_BOTH,
        "print N sampled tokens and exit"},
    {"other modes", 0, "eval", NULL, OPTION_SWITCH, AT(eval), NULL, NULL, PROGRAM_BOTH,
        "print loss, perplexity and bits per byte on --val-data and exit"},
    {"other modes", 0, "eval-choices", "FILE", OPTION_STRING, AT(eval_choices), NULL, NULL, PROGRAM_BOTH,
        "answer multiple-choice questions (prepro/hellaswag.py writes them), print the accuracy and exit"},
    {"other modes", 0, "dump", "FILE", OPTION_STRING, AT(dump), NULL, NULL, PROGRAM_BOTH,
        "write loss, logits, routing and gradients of the first microbatch (safetensors), take no step, exit"},
    {"other modes", 0, "dry-run", NULL, OPTION_SWITCH, AT(dry_run), NULL, NULL, PROGRAM_BOTH,
        "print parameters, FLOPs, memory plan, largest batch, and exit"},
    {"other modes", 0, "memory", "GIB", OPTION_DOUBLE, AT(memory), NULL, "(0,1000000]", PROGRAM_BOTH,
        "memory that --dry-run plans for [this machine's]"},
    {"other modes", 'h', "help", NULL, OPTION_SWITCH, AT(help), NULL, NULL, PROGRAM_BOTH, "print this and exit"},

    {"speed", 0, "attention", NULL, OPTION_CHOICE, AT(attention), "flash", "naive|flash|cudnn", PROGRAM_BOTH,
        "whole matrix of scores, in tiles, or NVIDIA's (GPU)"},
    {"speed", 0, "experts", NULL, OPTION_CHOICE, AT(experts), "grouped", "loop|grouped", PROGRAM_BOTH,
        "one expert after the other, or all at once"},
    {"speed", 0, "optimizer", NULL, OPTION_CHOICE, AT(optimizer), "fused", "simple|fused", PROGRAM_BOTH,
        "a pass a tensor, or one over everything"},
    {"speed", 0, "loader", NULL, OPTION_CHOICE, AT(loader), "prefetch", "inline|prefetch", PROGRAM_BOTH,
        "the next batch when asked for, or while the step runs"},
    {"speed", 0, "tokenize", NULL, OPTION_CHOICE, AT(tokenize), "ahead", "ahead|inline", PROGRAM_BOTH,
        "inline: the data are text files, tokenized on the way"},
    {"speed", 0, "threads", "N", OPTION_INT, AT(threads), NULL, "[1,65536]", PROGRAM_CPU,
        "CPU threads [OMP_NUM_THREADS or all]"},
    {"speed", 0, "pinned", NULL, OPTION_FLAG, AT(pinned), "1", NULL, PROGRAM_GPU, "page-locked host memory"},
    {"speed", 0, "allreduce", NULL, OPTION_CHOICE, AT(allreduce), "last", "every|last", PROGRAM_GPU,
        "average gradients over ranks after every microbatch, or after the last"},
    {"speed", 0, "allreduce-dtype", NULL, OPTION_CHOICE, AT(allreduce_dtype), "bf16", "bf16|fp32", PROGRAM_GPU,
        "what travels between ranks"},
    {"speed", 0, "overlap", NULL, OPTION_FLAG, AT(overlap), "1", NULL, PROGRAM_GPU,
        "average gradients while backward goes on"},
    {"speed", 0, "recompute", NULL, OPTION_CHOICE, AT(recompute), "none", "none|moe", PROGRAM_GPU,
        "moe: compute expert activations twice instead of keeping them"},
};
#undef AT
#define NUM_OPTIONS ((int)(sizeof(option_table) / sizeof(option_table[0])))
static_assert(sizeof(option_table) / sizeof(option_table[0]) <= OPTIONS_MAX, "Options.given is too small");

// a choice that one program refuses, and what to do instead; never a silent fallback
static const struct {
    const char *name, *choice;
    int program;
    const char* instead;
} option_refusals[] = {
    {"precision", "fp32", PROGRAM_GPU,
        "train_moe computes in bf16: leave --precision out (train_moe_cpu has both)"},
    {"attention", "cudnn", PROGRAM_CPU,
        "cuDNN is honoured by train_moe, the GPU trainer: use --attention flash"},
};

// options of which at most one may be given, and why
static const struct { const char* names[5]; const char* why; } option_exclusive[] = {
    {{"model", "init", "config", NULL}, "each says where the model comes from"},
    {{"train-data", "batch", NULL, NULL}, "--batch trains on that batch alone"},
    {{"batch-size", "batch", NULL, NULL}, "B comes from the --batch file"},
    {{"seq-len", "batch", NULL, NULL}, "T comes from the --batch file"},
    {{"grad-accum", "tokens-per-step", NULL, NULL}, "each follows from the other"},
    {{"steps", "tokens", NULL, NULL}, "each follows from the other"},
    {{"generate", "eval", "eval-choices", "dump", "dry-run"}, "each is what the program does before it exits"},
};

// options that would do nothing without one of these others
static const struct { const char* name; const char* needs[2]; } option_needs[] = {
    {"vocab-size", {"model", "config"}}, {"save-every", {"out", NULL}}, {"keep", {"out", NULL}},
    {"val-every", {"val-data", NULL}}, {"val-steps", {"val-data", NULL}}, {"eval", {"val-data", NULL}},
    {"force-routing", {"batch", NULL}}, {"tokenize", {"train-data", "val-data"}},
    {"prompt", {"generate", "sample-every"}}, {"temperature", {"generate", "sample-every"}},
    {"top-k", {"generate", "sample-every"}}, {"top-p", {"generate", "sample-every"}}, {"memory", {"dry-run", NULL}},
};

// what only training writes: whoever asks for it beside another mode would look for it in vain
static const struct { const char *name, *also; } option_written[] = { // also: another option that makes use of it
    {"metrics", "eval-choices"}, {"trace", NULL}, {"profile", NULL}, {"out", "resume"},
};
static const char* const option_modes[] = {"generate", "eval", "eval-choices", "dump"};

static inline const char* program_title(int program) {
    return program == PROGRAM_GPU ? "train_moe" : "train_moe_cpu";
}

static inline int option_find(const char* name) { // row of a name without dashes, -1: there is none
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (strcmp(option_table[i].name, name) == 0) { return i; }
    }
    return -1;
}

// Was the option on the command line, or in the one of the run that is resumed? Asking for one that does not exist is an
// error of the program.
static inline bool options_given(const Options* opt, const char* name) {
    int i = option_find(name);
    if (i < 0) { fatal("program error: options_given(\"%s\"): no such option in option_table (llmc/cli.h)", name); }
    return opt->given[i];
}

// ----------------------------------------------------------------------------
// Values: text -> number, with nothing odd let through (NaN, infinity, hexadecimal, trailing garbage, overflow)

static inline bool option_looks_like_number(const char* s) {
    return s[0] != '\0' && strpbrk(s, " \t\n\r\v\fxXnNiI") == NULL;
}

// 98304, -3, 100K, 1.5M, 10B, 1e9. Returns what is wrong with it, or NULL.
static inline const char* option_parse_int(const char* s, int64_t* value) {
    const char* wrong = "is not a whole number (98304, 100K, 1.5M and 10B are)";
    if (!option_looks_like_number(s)) { return wrong; }
    char* end;
    errno = 0;
    long long whole = strtoll(s, &end, 10);
    if (end != s && *end == '\0') {
        *value = whole;
        return errno == ERANGE ? "does not fit in 64 bits" : NULL;
    }
    double x = strtod(s, &end);
    if (end == s) { return wrong; }
    switch (*end) {
        case 'k': case 'K': x *= 1e3; end++; break;
        case 'm': case 'M': x *= 1e6; end++; break;
        case 'b': case 'B': case 'g': case 'G': x *= 1e9; end++; break;
        case 't': case 'T': x *= 1e12; end++; break;
        default: break;
    }
    if (*end != '\0') { return wrong; }
    if (!(fabs(x) <= 9007199254740992.0)) { return "is too large"; } // 2^53: beyond, a double skips whole numbers
    double nearest = floor(x + 0.5);
    if (!(fabs(x - nearest) < 1e-6)) { return wrong; } // 1.005K is whole but for a rounding error, 1.0005K is not
    *value = (int64_t)nearest;
    return NULL;
}

// Returns what is wrong with it, or NULL.
static inline const char* option_parse_double(const char* s, double* value) {
    const char* wrong = "is not a number";
    if (!option_looks_like_number(s)) { return wrong; }
    char* end;
    double x = strtod(s, &end);
    if (end == s || *end != '\0') { return wrong; }
    if (!(fabs(x) < 1e300)) { return "is too large"; }
    *value = x;
    return NULL;
}

// limits is an interval such as "[0,1)" or "(0,inf)"
static inline bool option_in_interval(const char* limits, double x) {
    char* comma;
    double low = strtod(limits + 1, &comma), high = strtod(comma + 1, NULL);
    bool above = limits[0] == '[' ? x >= low : x > low;
    bool below = limits[strlen(limits) - 1] == ']' ? x <= high : x < high;
    return above && below;
}

static inline void option_describe_interval(const char* limits, char* text, size_t size) {
    const char* comma = strchr(limits, ',');
    int low_length = (int)(comma - limits - 1);
    if (strcmp(comma, ",inf)") == 0) {
        snprintf(text, size, "%s %.*s", limits[0] == '[' ? "at least" : "above", low_length, limits + 1);
    } else {
        snprintf(text, size, "in %s", limits);
    }
}

// is text one of "a|b|c"?
static inline bool option_in_choices(const char* choices, const char* text) {
    size_t n = strcspn(text, "|");
    if (n == 0 || text[n] != '\0') { return false; }
    for (const char* at = choices; at != NULL; at = strchr(at, '|')) {
        if (*at == '|') { at++; }
        if (strncmp(at, text, n) == 0 && (at[n] == '|' || at[n] == '\0')) { return true; }
    }
    return false;
}

// Writes text into the option's field; fatal if it does not fit the row.
static inline void option_store(Options* opt, const OptionRow* row, const char* text) {
    char* field = (char*)opt + row->at;
    char range[80];
    const char *name = row->name, *wrong;
    if (row->kind == OPTION_INT) {
        int64_t value = 0;
        if ((wrong = option_parse_int(text, &value)) != NULL) { fatal("--%s: '%s' %s", name, text, wrong); }
        option_describe_interval(row->limits, range, sizeof(range));
        if (!option_in_interval(row->limits, (double)value)) { fatal("--%s must be %s, not %s", name, range, text); }
        memcpy(field, &value, sizeof(value));
    } else if (row->kind == OPTION_DOUBLE) {
        double value = 0.0;
        if ((wrong = option_parse_double(text, &value)) != NULL) { fatal("--%s: '%s' %s", name, text, wrong); }
        option_describe_interval(row->limits, range, sizeof(range));
        if (!option_in_interval(row->limits, value)) { fatal("--%s must be %s, not %s", name, range, text); }
        memcpy(field, &value, sizeof(value));
    } else if (row->kind == OPTION_SWITCH || row->kind == OPTION_FLAG) {
        if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0) { fatal("--%s must be 0 or 1, not '%s'", name, text); }
        bool value = text[0] == '1';
        memcpy(field, &value, sizeof(value));
    } else {
        if (row->kind == OPTION_CHOICE && !option_in_choices(row->limits, text)) {
            fatal("--%s must be one of %s, not '%s'", name, row->limits, text);
        }
        if (row->kind == OPTION_STRING && text[0] == '\0' && strcmp(name, "prompt") != 0) {
            fatal("--%s: its value is empty", name);
        }
        memcpy(field, &text, sizeof(text));
    }
}

// The value as text, for the echo at start; false: unset.
static inline bool option_text(const Options* opt, const OptionRow* row, char* text, size_t size) {
    const char* field = (const char*)opt + row->at;
    if (row->kind == OPTION_INT) {
        int64_t value;
        memcpy(&value, field, sizeof(value));
        snprintf(text, size, "%lld", (long long)value);
        return option_in_interval(row->limits, (double)value); // the unset values, -1 or 0, lie outside
    }
    if (row->kind == OPTION_DOUBLE) {
        double value;
        memcpy(&value, field, sizeof(value));
        snprintf(text, size, "%.6g", value);
        return option_in_interval(row->limits, value);
    }
    if (row->kind == OPTION_SWITCH || row->kind == OPTION_FLAG) {
        bool value;
        memcpy(&value, field, sizeof(value));
        snprintf(text, size, "%d", value ? 1 : 0);
        return row->kind == OPTION_FLAG || value;
    }
    const char* value;
    memcpy(&value, field, sizeof(value));
    snprintf(text, size, "%s", value == NULL ? "" : value);
    return value != NULL;
}

// ----------------------------------------------------------------------------
// --help

static inline bool option_honoured(const OptionRow* row, int program) { return (row->programs & program) != 0; }

// prints text in a column that begins at `column`, wrapped at 96; `at` is where the cursor stands
static inline void help_wrapped(FILE* file, const char* text, int at, int column) {
    while (*text != '\0') {
        int n = (int)strcspn(text, " ");
        if (at > column && at + 1 + n > 96) {
            fprintf(file, "\n");
            at = 0;
        }
        if (at < column) {
            fprintf(file, "%*s", column - at, "");
            at = column;
        } else if (at > column) {
            fputc(' ', file);
            at++;
        }
        fprintf(file, "%.*s", n, text);
        at += n;
        text += n;
        while (*text == ' ') { text++; }
    }
    fputc('\n', file);
}

static inline void help_row(FILE* file, const OptionRow* row) {
    const char* value = row->placeholder != NULL ? row->placeholder :
                        row->kind == OPTION_CHOICE ? row->limits : row->kind == OPTION_FLAG ? "0|1" : "";
    char left[120], help[400];
    int n = row->letter ? snprintf(left, sizeof(left), "  -%c, --%s %s", row->letter, row->name, value)
                        : snprintf(left, sizeof(left), "      --%s %s", row->name, value);
    // in brackets the default; where it is a rule and not a value, the help text itself ends with it
    if (row->fallback != NULL) { snprintf(help, sizeof(help), "%s [%s]", row->help, row->fallback); }
    else { snprintf(help, sizeof(help), "%s", row->help); }
    const int column = 32;
    fprintf(file, "%s", left);
    if (n >= column - 1) {
        fputc('\n', file);
        n = 0;
    }
    help_wrapped(file, help, n, column);
}

static inline void options_help(FILE* file, int program) {
    const char* title = program_title(program);
    const char* uses[4][2] = {
        {"--model NAME --train-data 'GLOB' [options]", "train from scratch"},
        {"--init DIR --train-data 'GLOB' [options]", "fine-tune a Hugging Face folder"},
        {"--resume --out DIR [options]", "go on where a run stopped"},
        {"--init DIR --generate N --prompt 'TEXT'", "sample"},
    };
    for (int i = 0; i < 4; i++) {
        fprintf(file, "%s %s %-42s  %s\n", i == 0 ? "usage:" : "      ", title, uses[i][0], uses[i][1]);
    }
    fprintf(file, "\nTrains a Qwen3-style mixture-of-experts language model %s.\n"
                  "Defaults are in [brackets]; numbers may be written 98304, 100K, 1.5M or 10B.\n",
            program == PROGRAM_GPU ? "on one or several GPUs" : "on the CPU");
    const char* group = "";
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionRow* row = &option_table[i];
        if (!option_honoured(row, program)) { continue; }
        if (strcmp(group, row->group) != 0) { fprintf(file, "\n%s\n", row->group); }
        group = row->group;
        help_row(file, row);
    }
    char others[600] = "";
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (option_honoured(&option_table[i], program)) { continue; }
        size_t n = strlen(others);
        snprintf(others + n, sizeof(others) - n, " --%s", option_table[i].name);
    }
    fprintf(file, "\nonly in %s\n", program == PROGRAM_CPU ? "train_moe (the GPU trainer)" : "train_moe_cpu");
    help_wrapped(file, others + 1, 0, 6);
}

// ----------------------------------------------------------------------------
// Parsing

// Edits that turn a into b: insert, delete, replace, swap neighbours (optimal string alignment). Names are cut at 39.
static inline int option_distance(const char* a, const char* b) {
    int d[41][41];
    int n = (int)strlen(a), m = (int)strlen(b);
    n = n > 39 ? 39 : n;
    m = m > 39 ? 39 : m;
    for (int i = 0; i <= n; i++) {
        for (int j = 0; j <= m; j++) {
            if (i == 0 || j == 0) { d[i][j] = i + j; continue; }
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best) { best = d[i - 1][j] + 1; }
            if (d[i][j - 1] + 1 < best) { best = d[i][j - 1] + 1; }
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && d[i - 2][j - 2] + 1 < best) { best = d[i - 2][j - 2] + 1; }
            d[i][j] = best;
        }
    }
    return d[n][m];
}

// fatal: no such option, with the nearest one if any is near
static inline void option_unknown(const char* arg, const char* name, int program) {
    int best = -1, best_distance = 1 << 30;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        int distance = option_distance(name, option_table[i].name);
        if (distance < best_distance) { best = i; best_distance = distance; }
    }
    const char* title = program_title(program);
    if (best >= 0 && best_distance <= 1 + (int)strlen(name) / 4) {
        fatal("unknown option '%s': did you mean --%s? (%s --help lists all)", arg, option_table[best].name, title);
    }
    fatal("unknown option '%s' (%s --help lists all)", arg, title);
}

// The row that arg names, fatal if none; *value: the text after "=", or NULL; previous: the row given before, or -1.
static inline int option_identify(const char* arg, const char** value, int previous, int program) {
    char name[64];
    *value = NULL;
    if (arg[0] != '-' || arg[1] == '\0') {
        const char* before = previous < 0 ? "" : option_table[previous].name;
        if (strstr(before, "-data") != NULL) { // the shell has turned the pattern into many arguments
            fatal("unexpected argument '%s': quote the pattern, as in --%s 'data/*.bin', or the shell splits it",
                  arg, before);
        }
        fatal("unexpected argument '%s': options start with -- (%s --help lists them)", arg, program_title(program));
    }
    if (arg[1] != '-') { // short form: one letter, its value is the next argument
        for (int i = 0; arg[2] == '\0' && i < NUM_OPTIONS; i++) {
            if (option_table[i].letter == arg[1]) { return i; }
        }
        option_unknown(arg, arg + 1, program);
    }
    size_t n = strcspn(arg + 2, "=");
    if (arg[2 + n] == '=') { *value = arg + 2 + n + 1; }
    snprintf(name, sizeof(name), "%.*s", (int)(n < sizeof(name) ? n : sizeof(name) - 1), arg + 2);
    int i = option_find(name);
    if (i < 0) { option_unknown(arg, name, program); }
    return i;
}

// may argv[i] be the value of the option before it? -1e-3 may (and is then out of range), --lr may not
static inline bool option_is_value(const char* arg) {
    return arg[0] != '-' || arg[1] == '\0' || (arg[1] >= '0' && arg[1] <= '9') || arg[1] == '.';
}

static inline void options_defaults(Options* opt, int program) {
    memset(opt, 0, sizeof(*opt));
    opt->program = program;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionRow* row = &option_table[i];
        char* field = (char*)opt + row->at;
        const int64_t unset_int = -1;
        const double unset_double = -1.0;
        if (row->fallback != NULL) { option_store(opt, row, row->fallback); }
        else if (row->kind == OPTION_INT) { memcpy(field, &unset_int, sizeof(unset_int)); }
        else if (row->kind == OPTION_DOUBLE) { memcpy(field, &unset_double, sizeof(unset_double)); }
    }
    opt->generate = opt->threads = 0;
    opt->memory = 0.0;
    opt->precision = program == PROGRAM_GPU ? "bf16" : "fp32";
}

// what to do instead of a choice that this program cannot honour; NULL: it can
static inline const char* option_instead(const OptionRow* row, const char* text, int program) {
    for (size_t i = 0; i < sizeof(option_refusals) / sizeof(option_refusals[0]); i++) {
        if (option_refusals[i].program == program && strcmp(option_refusals[i].name, row->name) == 0
                && strcmp(option_refusals[i].choice, text) == 0) {
            return option_refusals[i].instead;
        }
    }
    return NULL;
}

// fatal if this program cannot honour the option or the choice
static inline void option_refuse(const OptionRow* row, const char* text, int program) {
    if (!option_honoured(row, program)) {
        fatal("--%s is honoured by %s alone, not by %s: leave it out", row->name, program_title(PROGRAM_BOTH - program),
              program_title(program));
    }
    const char* instead = option_instead(row, text, program);
    if (instead != NULL) { fatal("--%s %s: %s", row->name, text, instead); }
}

static inline void options_check_exclusive(const Options* opt) {
    for (size_t i = 0; i < sizeof(option_exclusive) / sizeof(option_exclusive[0]); i++) {
        const char* first = NULL;
        for (int j = 0; j < 5 && option_exclusive[i].names[j] != NULL; j++) {
            const char* name = option_exclusive[i].names[j];
            if (!options_given(opt, name)) { continue; }
            if (first != NULL) {
                fatal("--%s and --%s exclude each other: %s", first, name, option_exclusive[i].why);
            }
            first = name;
        }
    }
}

// Are the options sensible together? Fatal if not. options_parse calls it, except with --resume: then what is missing
// may still come from the checkpoint, so it waits for options_resolve.
static inline void options_check(const Options* opt) {
    options_check_exclusive(opt);
    for (size_t i = 0; i < sizeof(option_needs) / sizeof(option_needs[0]); i++) {
        const char *name = option_needs[i].name, *one = option_needs[i].needs[0], *other = option_needs[i].needs[1];
        if (!options_given(opt, name) || opt->inherited[option_find(name)] || options_given(opt, one)) { continue; }
        if (other != NULL && options_given(opt, other)) { continue; }
        fatal("--%s does nothing without --%s%s%s", name, one, other ? " or --" : "", other ? other : "");
    }
    for (size_t i = 0; i < sizeof(option_written) / sizeof(option_written[0]); i++) {
        const char *name = option_written[i].name, *also = option_written[i].also;
        if (!options_given(opt, name) || opt->inherited[option_find(name)] || (also && options_given(opt, also))) { continue; }
        for (size_t j = 0; j < sizeof(option_modes) / sizeof(option_modes[0]); j++) {
            if (!options_given(opt, option_modes[j])) { continue; }
            fatal("--%s does nothing with --%s: leave it out", name, option_modes[j]);
        }
    }
    if (opt->grad_clip > 0 && opt->grad_clip < 1e-38) {
        fatal("--grad-clip %g is 0 in fp32, and 0 would mean no clipping: give 1e-38 or more", opt->grad_clip);
    }
    if (opt->model == NULL && opt->init == NULL && opt->config == NULL && opt->resume == NULL) {
        fatal("which model? Give --model NAME, --init DIR, --config FILE or --resume (%s --help explains)",
              program_title(opt->program));
    }
    bool needs_data = !opt->generate && !opt->eval && !opt->eval_choices && !opt->dry_run;
    if (needs_data && opt->train_data == NULL && opt->batch == NULL) {
        fatal("which data? Give --train-data 'GLOB' or --batch FILE (%s --help explains)", program_title(opt->program));
    }
}

// Fills opt from the command line. Anything wrong is fatal, by the option's name. --help prints and exits.
static inline void options_parse(Options* opt, int argc, char** argv, int program) {
    options_defaults(opt, program);
    int previous = -1;
    for (int at = 1; at < argc; at++) {
        const char* value;
        int i = option_identify(argv[at], &value, previous, program);
        const OptionRow* row = &option_table[i];
        previous = i;
        if (opt->given[i]) { fatal("--%s is given twice: keep one", row->name); }
        if (row->kind == OPTION_SWITCH) {
            if (value != NULL) { fatal("--%s takes no value, but '%s' is given", row->name, value); }
            value = "1";
        } else if (value == NULL && at + 1 < argc && option_is_value(argv[at + 1])) {
            value = argv[++at];
        } else if (value == NULL && row->kind == OPTION_OPTIONAL_STRING) {
            value = "";
        } else if (value == NULL) {
            fatal("--%s needs a value%s", row->name,
                  row->kind == OPTION_STRING ? " (one that begins with a dash is written --option=-value)" : "");
        }
        option_refuse(row, value, program);
        option_store(opt, row, value);
        opt->given[i] = true;
        if (opt->help) { options_help(stdout, program); fflush(stdout); exit(0); }
    }
    options_check_exclusive(opt);
    if (opt->resume == NULL) { options_check(opt); }
    else if (opt->resume[0] == '\0' && opt->out == NULL) {
        fatal("--resume without a folder resumes the newest checkpoint in --out: give --out DIR or --resume DIR");
    }
}

// ----------------------------------------------------------------------------
// Defaults that depend on other options

static inline int64_t options_product(const char* what, int64_t a, int64_t b) {
    if ((double)a * (double)b > 9e15) { fatal("%s is beyond 9e15 tokens: lower one of its factors", what); }
    return a * b;
}

static inline void options_resolve_accumulation(Options* opt, int64_t num_ranks) {
    int64_t micro = options_product("batch-size x seq-len", opt->batch_size, opt->seq_len);
    micro = options_product("batch-size x seq-len x ranks", micro, num_ranks);
    int row = option_find("tokens-per-step");
    bool of_before = opt->inherited[row]; // the run that is resumed keeps its step, unless told otherwise
    bool trains = !opt->generate && !opt->eval && !opt->eval_choices && !opt->dump;
    if (!opt->given[row] || !trains) {
        if (opt->grad_accum < 0) { opt->grad_accum = 1; }
        opt->tokens_per_step = options_product("batch-size x seq-len x ranks x grad-accum", micro, opt->grad_accum);
        return;
    }
    int64_t wanted = opt->tokens_per_step, below = wanted / micro * micro;
    char factors[120], nearest[80];
    snprintf(factors, sizeof(factors), "B x T x ranks = %lld x %lld x %lld = %lld", (long long)opt->batch_size,
             (long long)opt->seq_len, (long long)num_ranks, (long long)micro);
    if (below == 0) { snprintf(nearest, sizeof(nearest), "%lld", (long long)micro); }
    else { snprintf(nearest, sizeof(nearest), "%lld and %lld", (long long)below, (long long)(below + micro)); }
    if (below != wanted) {
        fatal("--tokens-per-step %lld%s is not a multiple of %s: nearest %s %s%s", (long long)wanted,
              of_before ? ", as before --resume," : "", factors, below == 0 ? "is" : "are", nearest,
              below > 0             ? ""
              : opt->batch_size > 1 ? ", or lower --batch-size"
              : num_ranks > 1       ? ", or start fewer ranks"
                                    : ", or lower --seq-len");
    }
    opt->grad_accum = wanted / micro;
}

// What the run will have seen at its end: all of its steps are of one size, but for those before it was resumed.
static inline int64_t options_total_tokens(const Options* opt) {
    int64_t left = opt->steps > opt->done_steps ? opt->steps - opt->done_steps : 0;
    return opt->done_tokens + left * opt->tokens_per_step;
}

// Fills what depends on other options and on the number of ranks: grad_accum and tokens_per_step, steps and tokens,
// warmup_steps, min_lr. After it none of them is -1. Steps and tokens count from the beginning of a run that is resumed,
// of whatever size its steps have been. Fatal on contradictions.
static inline void options_resolve(Options* opt, int num_ranks) {
    options_check(opt);
    options_resolve_accumulation(opt, num_ranks);
    if (options_given(opt, "tokens")) {
        int64_t left = opt->tokens > opt->done_tokens ? opt->tokens - opt->done_tokens : 0;
        opt->steps = opt->done_steps + left / opt->tokens_per_step + (left % opt->tokens_per_step != 0);
    } else if (opt->steps < 0) {
        opt->steps = 1000;
    }
    if ((double)opt->steps * (double)opt->tokens_per_step > 9e18) {
        fatal("--steps %lld are beyond 9e18 tokens", (long long)opt->steps);
    }
    if (!options_given(opt, "tokens")) { opt->tokens = options_total_tokens(opt); }
    if (opt->warmup_steps < 0) { opt->warmup_steps = options_total_tokens(opt) / opt->tokens_per_step / 50; }
    if (opt->min_lr < 0) { opt->min_lr = opt->lr / 10; }
    if (opt->min_lr > opt->lr) { fatal("--min-lr %g is above --lr %g", opt->min_lr, opt->lr); }
}

// ----------------------------------------------------------------------------
// The echo at start and the copy in the checkpoint

// A line a group, wrapped at 100 columns: every option that has a value, defaults included.
static inline void options_echo(const Options* opt, FILE* file) {
    const char* group = "";
    int at = 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionRow* row = &option_table[i];
        char value[300], item[400];
        if (!option_honoured(row, opt->program) || !option_text(opt, row, value, sizeof(value))) { continue; }
        bool bare = row->kind == OPTION_SWITCH || value[0] == '\0';
        int n = snprintf(item, sizeof(item), "%s%s%s", row->name, bare ? "" : " ", bare ? "" : value);
        if (strcmp(group, row->group) != 0) {
            at = fprintf(file, "%s%-12s", group[0] == '\0' ? "" : "\n", row->group) - (group[0] != '\0');
            group = row->group;
        } else if (at + 2 + n > 100) {
            at = fprintf(file, "\n%-12s", "") - 1;
        } else {
            at += fprintf(file, "  ");
        }
        at += fprintf(file, "%s", item);
    }
    fprintf(file, "\n");
}

// {"program": "train_moe_cpu", "given": [names], "batch-size": 8, ...}: what trainer_state.json keeps. The caller owns the result.
static inline cJSON* options_json(const Options* opt) {
    cJSON* json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "program", program_title(opt->program));
    cJSON* given = cJSON_AddArrayToObject(json, "given");
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionRow* row = &option_table[i];
        const char* field = (const char*)opt + row->at;
        if (opt->given[i]) { cJSON_AddItemToArray(given, cJSON_CreateString(row->name)); }
        if (row->kind == OPTION_INT) {
            int64_t value;
            char digits[24]; // cJSON prints 15 of them, a seed may have 16
            memcpy(&value, field, sizeof(value));
            snprintf(digits, sizeof(digits), "%lld", (long long)value);
            cJSON_AddRawToObject(json, row->name, digits);
        } else if (row->kind == OPTION_DOUBLE) {
            double value;
            memcpy(&value, field, sizeof(value));
            json_add_float(json, row->name, value);
        } else if (row->kind == OPTION_SWITCH || row->kind == OPTION_FLAG) {
            bool value;
            memcpy(&value, field, sizeof(value));
            cJSON_AddBoolToObject(json, row->name, value);
        } else {
            const char* value;
            memcpy(&value, field, sizeof(value));
            if (value == NULL) { cJSON_AddNullToObject(json, row->name); }
            else { cJSON_AddStringToObject(json, row->name, value); }
        }
    }
    return json;
}

// is it part of what a run *is*, so that a resumed one keeps it? Where the model comes from is the checkpoint itself;
// files to write and other modes belong to the command at hand, the number of threads to the machine. What is there for
// speed rounds differently and takes other memory.
static inline bool option_belongs_to_run(const OptionRow* row) {
    const char* groups[] = {"data", "length", "optimiser", "balance", "numbers", "sampling", "speed"};
    const char* names[] = {"log-every", "save-every", "keep", "val-every", "val-steps", "sample-every"};
    if (strcmp(row->name, "threads") == 0) { return false; }
    for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i++) {
        if (strcmp(row->group, groups[i]) == 0) { return true; }
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(row->name, names[i]) == 0) { return true; }
    }
    return false;
}

// would taking row from the checkpoint contradict something on the command line (--steps saved, --tokens given)?
static inline bool option_displaced(const bool* on_command_line, const OptionRow* row) {
    for (size_t i = 0; i < sizeof(option_exclusive) / sizeof(option_exclusive[0]); i++) {
        bool member = false, other_given = false;
        for (int j = 0; j < 5 && option_exclusive[i].names[j] != NULL; j++) {
            int k = option_find(option_exclusive[i].names[j]);
            member = member || &option_table[k] == row;
            other_given = other_given || (&option_table[k] != row && on_command_line[k]);
        }
        if (member && other_given) { return true; }
    }
    return false;
}

// Takes an integer option from a checkpoint's options, whether it was given there or followed from others.
static inline void option_take_number(Options* opt, const cJSON* json, const char* name) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(json, name);
    char number[40];
    int i = option_find(name);
    if (!cJSON_IsNumber(item)) { return; }
    snprintf(number, sizeof(number), "%.0f", item->valuedouble);
    option_store(opt, &option_table[i], number);
    opt->given[i] = opt->inherited[i] = true;
}

// A resumed run makes steps of as many tokens as before, with whatever B and number of ranks it has now: a tuned learning
// rate belongs to them. --grad-accum or --tokens-per-step on the command line say otherwise; --batch has its own size.
static inline void options_inherit_step(Options* opt, const cJSON* json) {
    int accum = option_find("grad-accum"), tokens = option_find("tokens-per-step");
    const cJSON* before = cJSON_GetObjectItemCaseSensitive(json, "tokens-per-step");
    bool told = (opt->given[accum] && !opt->inherited[accum]) || (opt->given[tokens] && !opt->inherited[tokens]);
    bool of_a_batch = opt->batch != NULL || cJSON_IsString(cJSON_GetObjectItemCaseSensitive(json, "batch"));
    bool known = cJSON_IsNumber(before) && before->valuedouble >= 1 && before->valuedouble < 9e15;
    if (told) { return; }
    opt->given[accum] = opt->inherited[accum] = opt->given[tokens] = opt->inherited[tokens] = false;
    opt->grad_accum = opt->tokens_per_step = -1;
    if (of_a_batch) { option_take_number(opt, json, "grad-accum"); }
    else if (known && opt->done_steps > 0) { option_take_number(opt, json, "tokens-per-step"); }
}

// --val-steps counts batches; a resumed run validates on as many sequences as before, with whatever B it has now.
static inline void options_inherit_validation(Options* opt, const cJSON* json) {
    const cJSON* steps = cJSON_GetObjectItemCaseSensitive(json, "val-steps");
    const cJSON* B = cJSON_GetObjectItemCaseSensitive(json, "batch-size");
    int i = option_find("val-steps");
    if ((opt->given[i] && !opt->inherited[i]) || !cJSON_IsNumber(steps) || !cJSON_IsNumber(B)) { return; }
    double sequences = steps->valuedouble * B->valuedouble;
    if (sequences >= 0 && sequences < 9e15) { opt->val_steps = (int64_t)ceil(sequences / (double)opt->batch_size); }
}

// For --resume: takes from a checkpoint's options (options_json; NULL is fine) what was given there and is not given
// now, so that `--resume --out DIR` goes on with the same data, length, learning rates and switches. Options of the
// other program are kept for its next turn (but --precision is each program's own); options this version does not know,
// and choices that this program cannot honour, are left alone. json may be freed afterwards: the strings are copied.
static inline void options_inherit(Options* opt, const cJSON* json) {
    const cJSON* given = cJSON_GetObjectItemCaseSensitive(json, "given");
    const cJSON* program = cJSON_GetObjectItemCaseSensitive(json, "program");
    bool same_program = cJSON_IsString(program) && strcmp(program->valuestring, program_title(opt->program)) == 0;
    const cJSON* name;
    static char* strings[OPTIONS_MAX]; // live as long as the program, as argv does
    bool on_command_line[OPTIONS_MAX];
    memcpy(on_command_line, opt->given, sizeof(on_command_line));
    bool looks = opt->generate || opt->eval || opt->eval_choices; // at the model: no --batch file is read
    cJSON_ArrayForEach(name, given) {
        int i = cJSON_IsString(name) ? option_find(name->valuestring) : -1;
        if (i < 0 || on_command_line[i]) { continue; }
        const OptionRow* row = &option_table[i];
        if (!option_belongs_to_run(row)) { continue; }
        if (option_displaced(on_command_line, row)) { continue; }
        if (looks && (strcmp(row->name, "batch") == 0 || strcmp(row->name, "force-routing") == 0)) { continue; }
        bool of_training = strcmp(row->group, "speed") == 0 && strcmp(row->name, "tokenize") != 0;
        if (looks && of_training) { continue; }
        if (strcmp(row->name, "precision") == 0 && !same_program) { continue; } // each trainer has its own
        const cJSON* item = cJSON_GetObjectItemCaseSensitive(json, row->name);
        char number[40];
        const char* text = cJSON_IsBool(item) ? (cJSON_IsTrue(item) ? "1" : "0") : cJSON_GetStringValue(item);
        if (cJSON_IsNumber(item)) {
            snprintf(number, sizeof(number), row->kind == OPTION_INT ? "%.0f" : "%.17g", item->valuedouble);
            text = number;
        }
        if (text == NULL || option_instead(row, text, opt->program) != NULL) { continue; }
        free(strings[i]); // where the name stands there twice
        strings[i] = strdupCheck(text);
        option_store(opt, row, strings[i]);
        opt->given[i] = opt->inherited[i] = true;
    }
    if (looks && cJSON_IsString(cJSON_GetObjectItemCaseSensitive(json, "batch"))) { // the sizes were the file's
        if (!on_command_line[option_find("batch-size")]) { option_take_number(opt, json, "batch-size"); }
        if (!on_command_line[option_find("seq-len")]) { option_take_number(opt, json, "seq-len"); }
    }
    int recompute = option_find("recompute");
    if (opt->inherited[recompute] && strcmp(opt->experts, "loop") == 0) { // which keeps all: what is said now counts
        opt->given[recompute] = opt->inherited[recompute] = false;
        option_store(opt, &option_table[recompute], "none");
    }
    options_inherit_step(opt, json);
    options_inherit_validation(opt, json);
}

// ----------------------------------------------------------------------------
// Several ranks

// may each rank of a run be told something else? What rank 0 does alone, how data are fetched, where files are.
static inline bool option_may_differ(const OptionRow* row) {
    const char* names[] = {"loader", "pinned", "profile", "log-every", "metrics", "trace", "keep", "prompt",
                           "temperature", "top-k", "top-p"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(row->name, names[i]) == 0) { return true; }
    }
    return false;
}

// values[i] = what all ranks of a run must have in common of option i: a hash of its value; of a file's name, which may
// be another on another machine, whether there is one; 0 if each rank may have its own.
static inline void options_agreement(const Options* opt, uint64_t values[OPTIONS_MAX]) {
    memset(values, 0, OPTIONS_MAX * sizeof(values[0]));
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionRow* row = &option_table[i];
        const char* field = (const char*)opt + row->at;
        if (option_may_differ(row)) { continue; }
        if (row->kind == OPTION_INT || row->kind == OPTION_DOUBLE) {
            values[i] = hash_bytes(HASH_BEGIN, field, sizeof(int64_t));
        } else if (row->kind == OPTION_SWITCH || row->kind == OPTION_FLAG) {
            values[i] = hash_bytes(HASH_BEGIN, field, sizeof(bool));
        } else {
            const char* text;
            memcpy(&text, field, sizeof(text));
            values[i] = text == NULL ? 0 : row->kind == OPTION_CHOICE ? hash_string(text) : 1;
        }
    }
}

#endif // LLMC_CLI_H
