// run.h: from the command line to a run that is ready: which model, which data, which tokenizer, what to resume. The
// same for every trainer; all that can be wrong with files or options is found here, before memory is allocated or a
// step is made.
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include "batch_file.h"
#include "bits_per_byte.h"
#include "checkpoint.h"
#include "choices.h"
#include "cli.h"
#include "config_json.h"
#include "dataloader.h"
#include "schedule.h"
#include "text.h"

typedef struct {
    Options opt;
    int num_ranks;
    MoEConfig config;
    ParamTable table;
    Tokenizer tokenizer;
    char* tokenizer_path;     // the tokenizer.json that was found, or NULL
    bool has_tokenizer, has_train, has_val, has_batch, has_choices, samples, trains, needs_gradients;
    int eot;                  // the token that opens a document, -1: unknown
    DataLoader train, val;    // --train-data, --val-data
    uint64_t data_hash, val_hash; // fingerprints of --train-data and --val-data
    BatchFile batch;          // --batch
    Choices choices;          // --eval-choices
    Prompt prompt;            // if the run samples
    char* resume;             // the checkpoint folder to go on from, or NULL
    TrainerState state;       // what it says
    int out_lock;             // descriptor that keeps --out for this process
    void* (*allocate)(size_t bytes); // set between run_open_model and run_open_files: where batches live. NULL: malloc
    void (*release)(void* p);
} Run;

// The model is the checkpoint's. A command that is used again with --resume may name it as before, but no other.
static inline void run_check_same_model(Run* run) {
    const char* names[] = {"model", "init", "config"};
    const char** now[] = {&run->opt.model, &run->opt.init, &run->opt.config};
    for (int i = 0; i < 3; i++) {
        const char* then = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(run->state.options, names[i]));
        if (*now[i] == NULL) {
            *now[i] = then; // for the next checkpoint to know
        } else if (then == NULL || strcmp(then, *now[i]) != 0) {
            fatal("--resume goes on with the model of %s, which was not made with --%s %s: leave that out", run->resume, names[i], *now[i]);
        }
    }
}

// The checkpoint to resume, and what its run was started with and this command does not say anew.
static inline void run_find_checkpoint(Run* run) {
    Options* opt = &run->opt;
    const char* where = opt->resume[0] != '\0' ? opt->resume : opt->out;
    char* state = str_format("%s/trainer_state.json", where);
    bool named = path_exists(state); // a checkpoint, not a folder of checkpoints
    char err[1200];
    if (named && !checkpoint_is_complete(where, err, sizeof(err))) { fatal("--resume: %s", err); }
    run->resume = named ? strdupCheck(where) : checkpoint_latest(where);
    free(state);
    if (run->resume == NULL) { fatal("--resume: there is no complete checkpoint in %s", where); }
    checkpoint_state_read(run->resume, &run->state);
    run_check_same_model(run);
    opt->done_steps = run->state.step;
    opt->done_tokens = (int64_t)run->state.tokens;
    options_inherit(opt, run->state.options);
    int seed = option_find("seed");
    if (!opt->given[seed] || opt->inherited[seed]) { opt->seed = (int64_t)run->state.seed; }
}

// The model's sizes: a checkpoint's, a Hugging Face folder's, a file's or a preset's; then all options that depend on
// them.
static inline void run_read_config(Run* run, int num_ranks) {
    Options* opt = &run->opt;
    char err[512];
    const char* path = run->resume != NULL ? run->resume : opt->init != NULL ? opt->init : opt->config;
    if (path == opt->init && path != NULL && !path_is_folder(path)) {
        fatal("--init %s is not a folder: name the one that has config.json and model.safetensors", path);
    }
    if (path != NULL && !config_read(&run->config, path, err, sizeof(err))) { fatal("%s", err); }
    if (path == NULL && !config_preset(&run->config, opt->model)) {
        fatal("--model %s: there is no such preset; there are %s", opt->model, config_preset_names());
    }
    if (opt->vocab_size > 0) { config_set_vocab_size(&run->config, (int)opt->vocab_size); }
    if (!config_check(&run->config, err, sizeof(err))) { fatal("%s", err); }
    if (opt->aux_loss_coef < 0) { // where a config.json does not ask for the balance loss it is off, in a preset it is on
        bool on = path == NULL || run->config.output_router_logits;
        opt->aux_loss_coef = on ? run->config.router_aux_loss_coef : 0;
        opt->given[option_find("aux-loss-coef")] = true; // a resumed run keeps it
    }
    if (opt->batch != NULL) {
        size_t B, T;
        batch_file_size(opt->batch, &B, &T);
        opt->batch_size = (int64_t)B;
        opt->seq_len = (int64_t)T;
    }
    options_resolve(opt, num_ranks);
    if (run->resume == NULL || opt->generate || opt->eval || opt->eval_choices || opt->dump) { return; }
    const cJSON* before = cJSON_GetObjectItemCaseSensitive(run->state.options, "tokens-per-step");
    if (cJSON_IsNumber(before) && before->valuedouble != (double)opt->tokens_per_step) {
        printf("resume      a step is %lld tokens from now on, it was %.0f until now\n", (long long)opt->tokens_per_step,
               before->valuedouble);
    }
    const char* metrics = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(run->state.options, "metrics"));
    if (metrics != NULL && opt->metrics == NULL) {
        printf("resume      metrics are not written: until now they were, and --metrics %s goes on with them\n", metrics);
    }
    if (!opt->dry_run && run->state.step >= opt->steps) {
        bool counts_tokens = options_given(opt, "tokens");
        fatal("%s has done %lld steps (%lld tokens) already, and --%s is %lld: raise it to go on", run->resume,
              (long long)run->state.step, (long long)run->state.tokens, counts_tokens ? "tokens" : "steps",
              (long long)(counts_tokens ? opt->tokens : opt->steps));
    }
}

// tokenizer.json in the folder `path`, or in the folder of the file or pattern `path`; NULL: it is not there.
static inline char* tokenizer_beside(const char* path) {
    if (path == NULL) { return NULL; }
    char* in = str_format("%s/tokenizer.json", path);
    if (path_exists(in)) { return in; }
    free(in);
    const char* slash = strrchr(path, '/');
    char* beside = slash != NULL ? str_format("%.*s/tokenizer.json", (int)(slash - path), path) : strdupCheck("tokenizer.json");
    if (path_exists(beside)) { return beside; }
    free(beside);
    return NULL;
}

// Is it a whole tokenizer.json, but none of byte-level BPE (Unigram, WordPiece, BPE of characters)?
static inline bool tokenizer_is_of_another_kind(const char* path) {
    char err[512];
    cJSON* root = json_read_file(path, TOKENIZER_MAX_FILE, err, sizeof(err));
    const cJSON* model = cJSON_GetObjectItemCaseSensitive(root, "model");
    const char* type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(model, "type"));
    bool other = type != NULL && (strcmp(type, "BPE") != 0 || cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(model, "byte_fallback")));
    cJSON_Delete(root);
    return other;
}

// The tokenizer lies with the model, or else with the data; text is taken byte by byte where neither has one. Shards can
// be trained on whatever made their tokens, so one that is not understood here only goes along into the checkpoints.
static inline void run_find_tokenizer(Run* run) {
    const char* places[] = {run->resume, run->opt.init, run->opt.train_data, run->opt.val_data};
    char err[512];
    for (int i = 0; i < 4 && run->tokenizer_path == NULL; i++) { run->tokenizer_path = tokenizer_beside(places[i]); }
    run->has_tokenizer = run->tokenizer_path != NULL || strcmp(run->opt.tokenize, "inline") == 0;
    if (run->tokenizer_path == NULL) { tokenizer_bytes(&run->tokenizer); }
    else if (!tokenizer_read(&run->tokenizer, run->tokenizer_path, err, sizeof(err))) {
        bool needed = strcmp(run->opt.tokenize, "inline") == 0 || run->opt.prompt != NULL;
        if (needed || !tokenizer_is_of_another_kind(run->tokenizer_path)) { fatal("%s", err); }
        printf("tokenizer   %s is not byte-level BPE: samples are numbers of tokens\n", run->tokenizer_path);
        run->has_tokenizer = false;
    }
    run->eot = run->config.eos_token_id;
    if (run->eot < 0 && run->has_tokenizer) { run->eot = tokenizer_eot_id(&run->tokenizer); }
    if (run->eot >= run->config.vocab_size) { run->eot = -1; }
}

static inline void run_open_data(Run* run, DataLoader* loader, const char* option, const char* pattern, int rank, int num_ranks) {
    DataLoaderOptions o;
    memset(&o, 0, sizeof(o));
    o.pattern = pattern;
    o.text = strcmp(run->opt.tokenize, "inline") == 0;
    o.tokenizer = run->has_tokenizer ? &run->tokenizer : NULL;
    o.B = (size_t)run->opt.batch_size;
    o.T = (size_t)run->opt.seq_len;
    o.rank = rank;
    o.num_ranks = num_ranks;
    o.seed = (uint64_t)run->opt.seed;
    o.shuffle = loader == &run->train;
    o.one_pass = loader == &run->val;
    o.prefetch = strcmp(run->opt.loader, "prefetch") == 0;
    o.vocab_size = run->config.vocab_size;
    o.eot_id = run->eot;
    o.one_document = !run->opt.doc_mask;
    o.sort_tokens = run->opt.program == PROGRAM_GPU; // for embedding_backward; the CPU's needs no order
    o.allocate = run->allocate;
    o.release = run->release;
    dataloader_open(loader, &o);
    if (run->eot < 0) { run->eot = dataloader_eot_id(loader); }
    if (run->opt.doc_mask && dataloader_eot_id(loader) < 0) {
        fatal("--doc-mask: neither --%s nor the model's eos_token_id says which token opens a document", option);
    }
    printf("%-11s %s: %llu tokens, %llu sequences of %lld\n", option, pattern,
           (unsigned long long)dataloader_total_tokens(loader), (unsigned long long)dataloader_num_sequences(loader),
           (long long)run->opt.seq_len);
}

// All tokens are of one tokenizer, as far as files say which: the headers of shards, the tokenizer.json beside them or
// beside the model. (Sizes and ends of text are compared; a model's vocabulary may be larger.)
static inline void run_check_tokenizers(const Run* run) {
    const DataLoader *a = run->has_train ? &run->train : NULL, *b = run->has_val ? &run->val : NULL;
    if (a != NULL && b != NULL && a->vocab_size > 0 && b->vocab_size > 0 &&
        (a->vocab_size != b->vocab_size || a->eot_id != b->eot_id)) {
        fatal("--train-data was made with a tokenizer of %d tokens (end of text %d), --val-data with one of %d (%d): they have to be "
              "the same", a->vocab_size, a->eot_id, b->vocab_size, b->eot_id);
    }
    const DataLoader* data = a != NULL ? a : b;
    int size = data != NULL ? data->vocab_size : run->has_choices ? run->choices.vocab_size : 0;
    if (size > 0 && run->has_tokenizer && run->tokenizer_path != NULL && size != tokenizer_vocab_size(&run->tokenizer)) {
        fatal("%s was made with a tokenizer of %d tokens, but %s has %d: make it anew with that one (--tokenizer of prepro)",
              data != NULL ? data->opt.pattern : run->opt.eval_choices, size, run->tokenizer_path, tokenizer_vocab_size(&run->tokenizer));
    }
}

// A fresh model's documents end as those of its data do, whatever its config.json says.
static inline void run_adopt_eot(Run* run) {
    int eot = dataloader_eot_id(&run->train);
    if (run->opt.init != NULL || run->resume != NULL || eot < 0 || eot == run->config.eos_token_id) { return; }
    printf("model       eos_token_id is %d, as in --train-data (the config says %d)\n", eot, run->config.eos_token_id);
    run->config.eos_token_id = run->config.bos_token_id = run->eot = eot;
}

// A resumed run goes on with the data it had: at the very sequence where it stopped.
static inline void run_seek_data(Run* run) {
    uint64_t now = dataloader_total_tokens(&run->train), then = run->state.data_tokens;
    if (then != 0 && now != then) {
        fatal("--resume: the checkpoint was trained on %llu tokens of data, --train-data has %llu: its place in other data "
              "means nothing (start anew with --init %s)", (unsigned long long)then, (unsigned long long)now, run->resume);
    }
    const cJSON* T = cJSON_GetObjectItemCaseSensitive(run->state.options, "seq-len");
    if (then != 0 && cJSON_IsNumber(T) && T->valuedouble != (double)run->opt.seq_len) {
        fatal("--resume: the checkpoint's place in the data counts sequences of %.0f tokens, --seq-len is %lld (start anew with "
              "--init %s)", T->valuedouble, (long long)run->opt.seq_len, run->resume);
    }
    if (then != 0 && run->state.seed != (uint64_t)run->opt.seed) {
        fatal("--resume: the checkpoint's place is in the order of --seed %llu, not of %lld (start anew with --init %s)",
              (unsigned long long)run->state.seed, (long long)run->opt.seed, run->resume);
    }
    if (then != 0 && run->data_hash != run->state.data_hash) {
        fatal("--resume: --train-data has as many tokens as what the checkpoint was trained on, but it is other data: its "
              "place in it means nothing (start anew with --init %s)", run->resume);
    }
    dataloader_seek(&run->train, run->state.data_position);
}

// Takes --out for this process alone, and makes sure that nothing saved there is in the way of what this run will save.
static inline void run_open_out(Run* run) {
    const char* out = run->opt.out;
    run->out_lock = checkpoint_out_open(out);
    int64_t newest = checkpoint_newest_step(out);
    if (run->resume != NULL) { newest = checkpoint_complete_after(out, run->state.step); }
    if (newest >= 0) {
        fatal("--out %s holds checkpoints up to step %lld already, and this run starts at step %lld: go on from there with "
              "--resume, or choose another folder", out, (long long)newest, (long long)run->state.step);
    }
    checkpoint_space_check(out, &run->table, run->opt.program == PROGRAM_CPU ? ST_F32 : ST_BF16,
                           run->opt.program == PROGRAM_GPU && run->opt.master);
}

// What the options ask for, those that a resumed run inherits among them.
static inline void run_find_purpose(Run* run) {
    const Options* opt = &run->opt;
    bool evaluates = opt->eval || opt->eval_choices != NULL;
    run->trains = !evaluates && !opt->generate && opt->dump == NULL;
    run->needs_gradients = run->trains || opt->dump != NULL;
    run->samples = opt->generate > 0 || (run->trains && opt->sample_every > 0);
    run->has_batch = opt->batch != NULL && !evaluates && !opt->generate;
    run->has_train = opt->train_data != NULL && !run->has_batch && !evaluates && !opt->generate;
    run->has_val = opt->val_data != NULL && !opt->generate && opt->dump == NULL && opt->eval_choices == NULL;
    run->has_choices = opt->eval_choices != NULL;
}

// The first half: options, which checkpoint, the model's sizes and parameters. Touches neither data nor output; --dry-run
// needs no more.
static inline void run_open_model(Run* run, int argc, char** argv, int program, int num_ranks) {
    Options* opt = &run->opt;
    memset(run, 0, sizeof(*run));
    run->out_lock = -1;
    run->num_ranks = num_ranks;
    options_parse(opt, argc, argv, program);
    if (opt->resume != NULL) { run_find_checkpoint(run); }
    run_find_purpose(run);
    run_read_config(run, num_ranks);
    param_table_build(&run->table, &run->config);
}

// The second half: tokenizer, data, prompt, --out. Prints what it found.
static inline void run_open_files(Run* run, int rank, int num_ranks) {
    Options* opt = &run->opt;
    run_find_tokenizer(run);
    if (run->has_batch) { batch_file_read(&run->batch, opt->batch, &run->config, opt->doc_mask, opt->force_routing); }
    if (run->has_train) {
        run_open_data(run, &run->train, "train-data", opt->train_data, rank, num_ranks);
        run->data_hash = dataloader_fingerprint(&run->train);
        run_adopt_eot(run);
    }
    if (run->has_val) {
        run_open_data(run, &run->val, "val-data", opt->val_data, rank, num_ranks);
        run->val_hash = dataloader_fingerprint(&run->val);
    }
    if (run->has_choices) {
        choices_open(&run->choices, opt->eval_choices, (size_t)opt->seq_len, run->config.vocab_size);
    }
    run_check_tokenizers(run);
    if (run->has_train && run->resume != NULL) { run_seek_data(run); }
    if (run->samples) {
        run->prompt = prompt_read(opt->prompt, run->has_tokenizer ? &run->tokenizer : NULL, run->eot, &run->config);
        if (run->prompt.count >= (size_t)opt->seq_len) {
            fatal("--prompt has %zu tokens, but the context (--seq-len) is %lld: shorten it or raise --seq-len",
                  run->prompt.count, (long long)opt->seq_len);
        }
    }
    if (opt->out != NULL && run->trains && rank == 0) { run_open_out(run); }
}

// The rate of the step that follows `tokens` tokens. The schedule runs over the tokens, counted in steps of today's size:
// so it goes on where it was if a resumed run makes larger or smaller ones.
static inline double schedule_rate(const Options* opt, uint64_t tokens) {
    int64_t steps = options_total_tokens(opt) / opt->tokens_per_step, step = (int64_t)tokens / opt->tokens_per_step;
    return learning_rate(opt->schedule, step, opt->warmup_steps, steps, opt->lr, opt->min_lr);
}

// For a checkpoint: the place in the data. A run on a --batch file keeps the one of the run that it goes on from.
static inline void run_data_place(const Run* run, TrainerState* state) {
    const TrainerState* before = &run->state;
    state->data_position = run->has_train ? dataloader_position(&run->train) : before->data_position;
    state->data_tokens = run->has_train ? dataloader_total_tokens(&run->train) : before->data_tokens;
    state->data_hash = run->has_train ? run->data_hash : before->data_hash;
}

// After each save: the tokenizer's files are those of the newest checkpoint now. Where they came from may be an older
// one, which --keep has just removed.
static inline void run_saved(Run* run, int64_t step) {
    if (run->tokenizer_path == NULL) { return; }
    free(run->tokenizer_path);
    run->tokenizer_path = str_format("%s/step_%08lld/tokenizer.json", run->opt.out, (long long)step);
}

// How many sequences of --val-data a validation takes, from the first on, whatever B and the number of ranks are: the
// --val-steps batches of B, or all (--val-steps 0; --eval, if not told otherwise).
static inline uint64_t run_val_sequences(const Run* run) {
    const Options* opt = &run->opt;
    uint64_t all = dataloader_num_sequences(&run->val), steps = (uint64_t)opt->val_steps, B = (uint64_t)opt->batch_size;
    int row = option_find("val-steps");
    bool takes_all = steps == 0 || (opt->eval && (!opt->given[row] || opt->inherited[row]));
    return takes_all || steps > all / B ? all : steps * B;
}

// What --eval says of a mean loss.
static inline void run_print_evaluation(Run* run, double loss) {
    const Options* opt = &run->opt;
    uint64_t sequences = run_val_sequences(run);
    double bits = bits_per_byte(&run->val, run->has_tokenizer ? &run->tokenizer : NULL, loss, sequences);
    char per_byte[60] = "";
    if (isfinite(bits)) { snprintf(per_byte, sizeof(per_byte), ", %.4f bits per byte", bits); }
    printf("validation loss %.6f (perplexity %.4f%s) over %llu sequences of %lld tokens\n", loss, exp(loss), per_byte,
           (unsigned long long)sequences, (long long)opt->seq_len);
}

static inline void run_close(Run* run) {
    if (run->has_train) { dataloader_close(&run->train); }
    if (run->has_val) { dataloader_close(&run->val); }
    if (run->has_batch) { batch_file_free(&run->batch, &run->config); }
    if (run->has_choices) { choices_close(&run->choices); }
    if (run->out_lock >= 0) { close(run->out_lock); }
    tokenizer_free(&run->tokenizer);
    param_table_free(&run->table);
    trainer_state_free(&run->state);
    free(run->prompt.tokens);
    free(run->tokenizer_path);
    free(run->resume);
}

#endif
