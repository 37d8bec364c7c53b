// fuzz.c: files from strangers against the readers of llmc/, by libFuzzer. test_fuzz.py builds and runs it:
//     FUZZ=tokenizer build/test/fuzz [libFuzzer's options] FOLDERS    grows what is in the first folder
//     FUZZ=tokenizer build/test/fuzz FILE                             one input again
#include "fuzz.h"
#include "../../../llmc/batch_file.h"
#include "../../../llmc/checkpoint.h"
#include "../../../llmc/choices.h"
#include "../../../llmc/cli.h"

// A piece of a folder's path that lives until the next call.
static const char* in(const char* folder, const char* name) {
    static char path[512];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

// What a reader says that does not end by fatal().
static void refused(const char* err) {
    fuzz_check(err[0] != '\0');
    fprintf(stderr, "%s: error: %s\n", program_name, err);
}

// ----------------------------------------------------------------------------
// model.safetensors

static void read_safetensors(const char* folder) {
    SafeTensors st;
    char err[1200] = "";
    if (!st_open(&st, in(folder, "model.safetensors"), err, sizeof(err))) { refused(err); return; }
    for (size_t i = 0; i < st.count; i++) {
        const StTensor* t = &st.tensors[i];
        float values[64];
        int32_t whole[64];
        size_t n = t->numel < 64 ? t->numel : 64;
        fuzz_check(st_find(&st, t->name) == t);
        fuzz_check(t->data >= (unsigned char*)st.map && t->nbytes <= (size_t)((unsigned char*)st.map + st.map_size - t->data));
        if (t->dtype == ST_F32 || t->dtype == ST_BF16 || t->dtype == ST_F16) { st_to_f32(t, t->numel - n, n, values); }
        if (t->dtype == ST_I32) { st_to_i32(t, t->numel - n, n, whole); }
    }
    st_close(&st);
}

// ----------------------------------------------------------------------------
// config.json

static void read_config(const char* folder) {
    MoEConfig config, again;
    ParamTable table;
    char err[1200] = "";
    if (!config_read(&config, folder, err, sizeof(err))) { refused(err); return; }
    fuzz_check(config_check(&config, err, sizeof(err)));
    cJSON* json = config_to_json(&config, "float32"); // what was understood can be written, and is understood again
    char* text = cJSON_PrintUnformatted(json);
    cJSON* parsed = json_parse(text, strlen(text), "config", err, sizeof(err));
    fuzz_check(parsed != NULL && config_from_json(&again, parsed, err, sizeof(err)));
    fuzz_check(memcmp(&config, &again, sizeof(config)) == 0);
    cJSON_Delete(parsed);
    cJSON_Delete(json);
    cJSON_free(text);
    param_table_build(&table, &config);
    fuzz_check((double)table.num_parameters <= 1.01 * config_estimate_parameters(&config));
    param_table_free(&table);
}

// ----------------------------------------------------------------------------
// model.safetensors.index.json and its shards

static size_t stored;
static void store(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count, const float* values) {
    (void)ctx, (void)what;
    fuzz_check(begin <= t->numel && count <= t->numel - begin);
    fuzz_check(values[0] == values[0] && values[count - 1] == values[count - 1]);
    stored += count;
}

static void read_index(const char* folder) {
    MoEConfig config;
    ParamTable table;
    char err[1200];
    if (!config_read(&config, folder, err, sizeof(err))) { refused(err); return; }
    param_table_build(&table, &config);
    stored = 0;
    hf_folder_load(folder, &config, &table, store, NULL);
    fuzz_check(stored == table.num_parameters);
    param_table_free(&table);
}

// ----------------------------------------------------------------------------
// a shard, or text

static void read_batches(const char* pattern, size_t T, int vocab_size, bool text) {
    DataLoaderOptions opt;
    DataLoader l;
    memset(&opt, 0, sizeof(opt));
    opt.pattern = pattern;
    opt.text = text;
    opt.B = 2;
    opt.T = T;
    opt.num_ranks = 1;
    opt.seed = 1;
    opt.shuffle = true;
    opt.vocab_size = vocab_size;
    opt.eot_id = -1;
    opt.sort_tokens = vocab_size > 0;
    dataloader_open(&l, &opt);
    dataloader_fingerprint(&l);
    for (int i = 0; i < 3; i++) {
        const Batch* b = dataloader_next(&l);
        for (size_t n = 0; n < 2 * T; n++) {
            fuzz_check(b->tokens[n] >= 0 && b->targets[n] >= 0);
            fuzz_check(vocab_size == 0 || (b->tokens[n] < vocab_size && b->targets[n] < vocab_size));
            fuzz_check(b->doc_start[n] >= 0 && (size_t)b->doc_start[n] <= n % T);
        }
    }
    dataloader_close(&l);
}

static void read_shard(const char* folder) {
    char pattern[512];
    snprintf(pattern, sizeof(pattern), "%s/*.bin", folder);
    struct stat st;
    int variant = stat(in(folder, "train_000.bin"), &st) == 0 ? (int)(st.st_size / 4 % 3) : 0;
    read_batches(pattern, variant == 0 ? 1 : 7, variant == 1 ? 0 : 300, false);
}

static void read_text(const char* folder) { read_batches(in(folder, "text.txt"), 5, 300, true); }

// ----------------------------------------------------------------------------
// tokenizer.json, and a text

static void read_tokenizer(const char* folder) {
    Tokenizer t;
    TokenList list;
    char err[1200] = "";
    if (!tokenizer_read(&t, in(folder, "tokenizer.json"), err, sizeof(err))) { refused(err); return; }
    size_t size;
    const char* path = in(folder, "text.txt");
    char* text = path_exists(path) ? (char*)map_file(path, &size) : (char*)callocCheck(1, size = 0);
    memset(&list, 0, sizeof(list));
    if (!tokenizer_encode(&t, text, size, &list, err, sizeof(err))) { refused(err); }
    Utf8Stream stream;
    memset(&stream, 0, sizeof(stream));
    for (size_t i = 0; i < list.count; i++) {
        char bytes[TOKENIZER_MAX_BYTES], shown[UTF8_STREAM_ROOM(TOKENIZER_MAX_BYTES)];
        fuzz_check(list.ids[i] >= 0 && list.ids[i] < t.vocab_size);
        size_t n = tokenizer_decode(&t, list.ids[i], bytes);
        n = utf8_stream_push(&stream, bytes, n, shown);
        fuzz_check(utf8_first_invalid(shown, n) == n);
    }
    token_list_free(&list);
    free(text);
    tokenizer_free(&t);
}

// ----------------------------------------------------------------------------
// a checkpoint: all that --resume reads

static void read_options(const TrainerState* state) {
    Options opt;
    options_defaults(&opt, PROGRAM_CPU);
    fuzz_running = false; // it keeps the strings from one call to the next
    options_inherit(&opt, state->options);
    fuzz_running = true;
    opt.model = "tiny";
    opt.given[option_find("model")] = true;
    options_resolve(&opt, 1);
    options_echo(&opt, stdout);
    cJSON_Delete(options_json(&opt));
}

static void read_state(const char* folder) {
    TrainerState state;
    MoEConfig config;
    ParamTable table;
    char err[1200] = "", out[512];
    snprintf(out, sizeof(out), "%s", folder);
    *strrchr(out, '/') = '\0';
    char* found = checkpoint_latest(out);
    checkpoint_state_read(folder, &state);
    fuzz_check(state.step >= 0);
    bool ok = config_read(&config, folder, err, sizeof(err));
    fuzz_check(ok || found == NULL);
    if (ok) {
        param_table_build(&table, &config);
        checkpoint_moments_load(folder, &table, store, true, NULL);
        hf_folder_load(folder, &config, &table, store, NULL);
        param_table_free(&table);
    }
    read_options(&state);
    trainer_state_free(&state);
    free(found);
}

// ----------------------------------------------------------------------------
// --batch and --eval-choices

static void read_batch(const char* folder) {
    MoEConfig config;
    BatchFile b;
    config_preset(&config, "tiny");
    config.mlp_only_layers[config.num_mlp_only_layers++] = 1;
    batch_file_read(&b, in(folder, "batch.safetensors"), &config, true, true);
    for (size_t n = 0; n < b.B * b.T; n++) {
        fuzz_check(b.tokens[n] >= 0 && b.tokens[n] < config.vocab_size && b.targets[n] < config.vocab_size);
        fuzz_check(b.doc_start[n] >= 0 && (size_t)b.doc_start[n] <= n % b.T);
    }
    batch_file_free(&b, &config);
}

static void read_choices(const char* folder) {
    enum { B = 2, T = 24 };
    static float losses[B * T];
    int tokens[B * T], targets[B * T], doc_start[B * T];
    Choices c;
    choices_open(&c, in(folder, "choices.jsonl"), T, 300);
    for (size_t i = 0; i < choices_num_batches(&c, B); i++) {
        choices_batch(&c, i, B, tokens, targets, doc_start);
        for (size_t n = 0; n < B * T; n++) {
            fuzz_check(tokens[n] >= 0 && tokens[n] < 300 && targets[n] < 300 && (size_t)doc_start[n] <= n % T);
            losses[n] = targets[n] >= 0 ? 1.5f : 0.0f;
        }
        choices_collect(&c, i, B, losses);
    }
    for (size_t r = 0; r < c.num_rows; r++) {
        fuzz_check(c.nats[r] > 0 && isfinite(c.nats[r] / c.rows[r].bytes) && c.nats[r] / c.rows[r].bytes > 0);
    }
    choices_report(&c, NULL);
    choices_close(&c);
}

// ----------------------------------------------------------------------------

static const FuzzTarget fuzz_targets[] = {
    {"safetensors", read_safetensors, {"model.safetensors"}},
    {"config", read_config, {"config.json"}},
    {"index", read_index, {"config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"}},
    {"shard", read_shard, {"train_000.bin", "train_001.bin"}},
    {"text", read_text, {"text.txt"}},
    {"tokenizer", read_tokenizer, {"tokenizer.json", "text.txt"}},
    {"state", read_state, {"config.json", "trainer_state.json", "checksums.json", "model.safetensors", "trainer_state.safetensors"}},
    {"batch", read_batch, {"batch.safetensors"}},
    {"choices", read_choices, {"choices.jsonl"}},
};

static char fuzz_base[200];
static void fuzz_remove_folder(void) { path_remove(fuzz_base); }

int LLVMFuzzerInitialize(int* argc, char*** argv) {
    (void)argc; (void)argv;
    fuzz_stderr = dup(2);
    const char* name = getenv("FUZZ");
    for (size_t i = 0; i < sizeof(fuzz_targets) / sizeof(fuzz_targets[0]); i++) {
        if (name != NULL && strcmp(name, fuzz_targets[i].name) == 0) { fuzz_target = &fuzz_targets[i]; }
    }
    if (fuzz_target == NULL) { fatal("FUZZ= names the target: one of those at the end of dev/test/fuzz/fuzz.c"); }
    const char* base = getenv("TMPDIR");
    snprintf(fuzz_base, sizeof(fuzz_base), "%s/moe-fuzz-XXXXXX", base != NULL ? base : "/tmp");
    if (mkdtemp(fuzz_base) == NULL) { fatal("cannot make a folder %s: %s", fuzz_base, strerror(errno)); }
    snprintf(fuzz_folder, sizeof(fuzz_folder), "%s/step_00000002", fuzz_base);
    folder_make(fuzz_folder);
    atexit(fuzz_remove_folder);
    fuzz_load_seeds();
    __sanitizer_install_malloc_and_free_hooks(fuzz_took, fuzz_gave);
    printf(" \b"); // stdout has its buffer before a reader is the first to write
    return 0;
}
