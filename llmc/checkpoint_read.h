// checkpoint_read.h: the other half of checkpoint.h (which includes it): finding the newest complete checkpoint,
// reading its state, opening --out for one process and tidying up after a save that was killed.
#ifndef LLMC_CHECKPOINT_READ_H
#define LLMC_CHECKPOINT_READ_H

#include "checkpoint.h"

// ----------------------------------------------------------------------------
// trainer_state.json

static inline bool checkpoint_read_state_file(TrainerState* state, const char* dir, char* err, size_t err_size) {
    memset(state, 0, sizeof(*state));
    char* path = str_format("%s/trainer_state.json", dir);
    cJSON* json = json_read_file(path, CONFIG_MAX_FILE_BYTES, err, err_size);
    bool ok = json != NULL;
    int64_t format = 0;
    if (ok && !json_integer(cJSON_GetObjectItemCaseSensitive(json, "format"), 1, 1, &format)) {
        ok = fail_with(err, err_size, "%s: \"format\" is not 1; was it written by a newer version?", path);
    }
    uint64_t step = 0;
    const struct { const char* name; uint64_t* value; } fields[] = {
        {"step", &step}, {"tokens", &state->tokens}, {"data_position", &state->data_position},
        {"data_tokens", &state->data_tokens}, {"data_hash", &state->data_hash}, {"sampler_rng", &state->sampler_rng}, {"seed", &state->seed},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]) && ok; i++) {
        if (!json_u64(cJSON_GetObjectItemCaseSensitive(json, fields[i].name), fields[i].value)) {
            ok = fail_with(err, err_size, "%s: \"%s\" is missing or not a whole number", path, fields[i].name);
        }
    }
    const cJSON* master = cJSON_GetObjectItemCaseSensitive(json, "has_master");
    if (ok && !cJSON_IsBool(master)) {
        ok = fail_with(err, err_size, "%s: \"has_master\" must be true or false", path);
    }
    const uint64_t limit = 9000000000000000; // as everywhere: what a double holds exactly
    if (ok && step > limit) { ok = fail_with(err, err_size, "%s: \"step\" is too large", path); }
    if (ok && state->tokens > limit) { ok = fail_with(err, err_size, "%s: \"tokens\" is too large", path); }
    if (ok) {
        state->step = (int64_t)step;
        state->has_master = cJSON_IsTrue(master);
        state->options = cJSON_DetachItemFromObjectCaseSensitive(json, "options");
    }
    cJSON_Delete(json);
    free(path);
    return ok;
}

// Reads dir/trainer_state.json; fatal with the reason if it is missing or damaged. trainer_state_free frees what it
// holds.
static inline void checkpoint_state_read(const char* dir, TrainerState* state) {
    char err[1200];
    if (!checkpoint_read_state_file(state, dir, err, sizeof(err))) { fatal("cannot resume from %s: %s", dir, err); }
}

// ----------------------------------------------------------------------------
// trainer_state.safetensors

static inline const StTensor* checkpoint_find(const SafeTensors* st, const char* prefix, const ParamTensor* p) {
    char name[128];
    snprintf(name, sizeof(name), "%s%s", prefix, p->name);
    return st_find(st, name);
}

// Every parameter of the table is in the file under prefix + name, with its shape.
static inline bool checkpoint_check_tensors(const SafeTensors* st, const ParamTable* table, const char* prefix,
                                            char* err, size_t err_size) {
    for (size_t i = 0; i < table->count; i++) {
        const ParamTensor* p = &table->tensors[i];
        const StTensor* t = checkpoint_find(st, prefix, p);
        if (t == NULL) { return fail_with(err, err_size, "%s: tensor %s%s is missing", st->path, prefix, p->name); }
        bool same = t->ndim == p->ndim;
        for (int d = 0; d < p->ndim && same; d++) { same = t->shape[d] == p->shape[d]; }
        if (!same) {
            return fail_with(err, err_size, "%s: tensor %s%s has another shape than config.json says", st->path, prefix,
                             p->name);
        }
    }
    return true;
}

// The state file holds what it must for this table: m, v, master if announced, and nothing else.
static inline bool checkpoint_check_state(const SafeTensors* st, const ParamTable* table, bool has_master, char* err,
                                          size_t err_size) {
    if (!checkpoint_check_tensors(st, table, "m.", err, err_size) ||
        !checkpoint_check_tensors(st, table, "v.", err, err_size)) {
        return false;
    }
    if (has_master && !checkpoint_check_tensors(st, table, "master.", err, err_size)) { return false; }
    size_t expected = table->count * (has_master ? 3 : 2);
    return st->count == expected ||
           fail_with(err, err_size, "%s has %zu tensors, %zu were expected", st->path, st->count, expected);
}

static inline void checkpoint_load_kind(const SafeTensors* st, const ParamTable* table, const char* what,
                                        ParamStore store, void* ctx) {
    char prefix[16];
    snprintf(prefix, sizeof(prefix), "%s.", what);
    float* buffer = (float*)mallocCheck(HF_CHUNK * sizeof(float));
    bool squares = strcmp(what, "v") == 0;
    for (size_t i = 0; i < table->count; i++) {
        const ParamTensor* p = &table->tensors[i];
        const StTensor* t = checkpoint_find(st, prefix, p);
        if (t->dtype != ST_F32) {
            fatal("%s: tensor %s is %s, must be F32", st->path, t->name, st_dtype_name(t->dtype));
        }
        for (size_t begin = 0; begin < p->numel; begin += HF_CHUNK) {
            size_t n = p->numel - begin < HF_CHUNK ? p->numel - begin : HF_CHUNK;
            st_to_f32_finite(st, t, begin, n, buffer);
            for (size_t k = 0; k < n && squares; k++) { // AdamW takes its root
                if (buffer[k] < 0) { fatal("%s: tensor %s is negative at element %zu", st->path, t->name, begin + k); }
            }
            store(ctx, p, what, begin, n, buffer);
        }
    }
    free(buffer);
}

// Hands AdamW's moments of the checkpoint in dir to store; with_master: also the fp32 master weights. Where the
// checkpoint has none (its weights are F32, or it ran without) the weights serve, which hf_folder_load has stored
// before: so each trainer resumes the other's.
static inline void checkpoint_moments_load(const char* dir, const ParamTable* table, ParamStore store, bool with_master,
                                           void* ctx) {
    SafeTensors st;
    TrainerState state;
    char err[1200];
    checkpoint_state_read(dir, &state);
    char* path = str_format("%s/trainer_state.safetensors", dir);
    if (!st_open(&st, path, err, sizeof(err))) { fatal("cannot resume: %s", err); }
    if (!checkpoint_check_state(&st, table, state.has_master, err, sizeof(err))) { fatal("cannot resume: %s", err); }
    checkpoint_load_kind(&st, table, "m", store, ctx);
    checkpoint_load_kind(&st, table, "v", store, ctx);
    if (with_master && state.has_master) { checkpoint_load_kind(&st, table, "master", store, ctx); }
    st_close(&st);
    trainer_state_free(&state);
    free(path);
}

// ----------------------------------------------------------------------------
// the newest complete checkpoint

// The files are those that were saved. (Without checksums.json that cannot be told, and nothing is said.)
static inline bool checkpoint_check_sums(const char* dir, char* err, size_t err_size) {
    char* path = str_format("%s/" CHECKPOINT_CHECKSUMS, dir);
    bool ok = true;
    cJSON* json = path_exists(path) ? json_read_file(path, CONFIG_MAX_FILE_BYTES, err, err_size) : cJSON_CreateObject();
    for (const cJSON* node = json != NULL ? json->child : NULL; node != NULL && ok; node = node->next) {
        uint64_t saved, hash;
        char* file = str_format("%s/%s", dir, node->string);
        if (strchr(node->string, '/') != NULL) {
            ok = fail_with(err, err_size, "%s: \"%.100s\" is no name of a file in the same folder", path, node->string);
        } else if (!file_hash(file, &hash)) {
            ok = fail_with(err, err_size, "cannot read %s: %s", file, strerror(errno));
        } else if (!json_u64(node, &saved) || hash != saved) {
            ok = fail_with(err, err_size, "%s is not as it was saved, its checksum differs; if it was changed on purpose, "
                           "remove " CHECKPOINT_CHECKSUMS, file);
        }
        free(file);
    }
    ok = ok && json != NULL;
    cJSON_Delete(json);
    free(path);
    return ok;
}

// Opens the parts, compares their lists of tensors with config.json and all files with their checksums. False with a
// reason if anything is off.
static inline bool checkpoint_is_complete(const char* dir, char* err, size_t err_size) {
    MoEConfig config;
    TrainerState state;
    SafeTensors st;
    ParamTable table;
    if (!config_read(&config, dir, err, err_size) || !checkpoint_read_state_file(&state, dir, err, err_size)) {
        return false;
    }
    param_table_build(&table, &config);
    char* path = str_format("%s/model.safetensors", dir);
    bool ok = st_open(&st, path, err, err_size);
    if (ok) {
        ok = checkpoint_check_tensors(&st, &table, "", err, err_size);
        st_close(&st);
    }
    free(path);
    path = str_format("%s/trainer_state.safetensors", dir);
    if (ok && st_open(&st, path, err, err_size)) {
        ok = checkpoint_check_state(&st, &table, state.has_master, err, err_size);
        st_close(&st);
    } else {
        ok = false;
    }
    free(path);
    param_table_free(&table);
    trainer_state_free(&state);
    return ok && checkpoint_check_sums(dir, err, err_size);
}

// A save over an existing step that died between its two renames left the old folder under another name: it gets its
// own back.
static inline void checkpoint_recover(const char* out) {
    size_t count;
    char** names = folder_list(out, "." CHECKPOINT_OLD "step_", &count);
    for (size_t i = 0; i < count; i++) {
        char* old_path = str_format("%s/%s", out, names[i]);
        char* path = str_format("%s/%s", out, names[i] + strlen("." CHECKPOINT_OLD));
        if (!path_exists(path) && rename(old_path, path) == 0) {
            warn("%s was put back after an interrupted save", path);
        }
        free(old_path);
        free(path);
    }
    folder_list_free(names);
}

// The highest step above `step` of which out has a complete checkpoint, or -1. (A damaged one is in nobody's way.)
static inline int64_t checkpoint_complete_after(const char* out, int64_t step) {
    size_t count;
    char** names = checkpoint_list(out, &count);
    int64_t found = -1;
    for (size_t i = 0; i < count && found < 0 && checkpoint_step_of(names[i]) > step; i++) {
        char err[1200];
        char* path = str_format("%s/%s", out, names[i]);
        if (checkpoint_is_complete(path, err, sizeof(err))) { found = checkpoint_step_of(names[i]); }
        free(path);
    }
    folder_list_free(names);
    return found;
}

// The path (malloc'ed) of the newest complete checkpoint in out, or NULL if there is none. A folder that has a
// checkpoint's name but lacks or damages a part, and what a killed save left, is named in a warning and passed over.
static inline char* checkpoint_latest(const char* out) {
    if (!path_is_folder(out)) { return NULL; }
    checkpoint_recover(out);
    size_t count;
    char** unfinished = folder_list(out, "." CHECKPOINT_SAVING, &count);
    for (size_t i = 0; i < count; i++) { warn("%s/%s was left by an interrupted save; ignored", out, unfinished[i]); }
    folder_list_free(unfinished);
    char** names = checkpoint_list(out, &count);
    char* found = NULL;
    for (size_t i = 0; i < count && found == NULL; i++) {
        char err[1200];
        char* path = str_format("%s/%s", out, names[i]);
        if (checkpoint_is_complete(path, err, sizeof(err))) {
            found = path;
        } else {
            warn("%s is not a complete checkpoint (%s); ignored", path, err);
            free(path);
        }
    }
    folder_list_free(names);
    return found;
}

// ----------------------------------------------------------------------------
// --out

static inline void checkpoint_tidy(const char* out, const char* prefix) {
    size_t count;
    char** names = folder_list(out, prefix, &count);
    for (size_t i = 0; i < count; i++) {
        char* path = str_format("%s/%s", out, names[i]);
        bool gone = path_remove(path);
        warn("%s was left by an interrupted save; %s", path, gone ? "removed" : "it cannot be removed");
        free(path);
    }
    folder_list_free(names);
}

// Opens the output folder for this process alone: makes it if need be, makes sure it can be written, locks it until the
// program ends, and tidies up after a save that was killed. Returns the lock's descriptor (close it to give the folder
// back). Fatal if out is a file, cannot be written, or another process has it.
static inline int checkpoint_out_open(const char* out) {
    char text[32];
    folder_make(out);
    char* path = str_format("%s/.lock", out);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) { fatal("cannot write to --out %s: %s", out, strerror(errno)); }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) {
            ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
            text[n > 0 ? n : 0] = '\0';
            fatal("another process (pid %.*s) is using --out %s; choose another folder or wait for it",
                  (int)strcspn(text, "\n"), text, out);
        }
        warn("%s cannot be locked (%s): make sure that no other run saves there", out,
             strerror(errno)); // some network file systems
    }
    int n = snprintf(text, sizeof(text), "%ld\n", (long)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n) {
        fatal("cannot write to --out %s: %s", out, strerror(errno));
    }
    free(path);
    checkpoint_recover(out);
    checkpoint_tidy(out, "." CHECKPOINT_SAVING);
    checkpoint_tidy(out, "." CHECKPOINT_OLD);
    checkpoint_tidy(out, "." CHECKPOINT_REMOVING);
    return fd;
}

#endif
