// checkpoint.h: saving and resuming. A checkpoint is a Hugging Face folder, OUT/step_00000100, plus optimizer state.
// Written under a temporary name, synced, then renamed: a folder that has its name is complete, whatever happened.
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "config.h"
#include "folder.h"
#include "hf_folder.h"
#include "safetensors.h"
#include "tokenizer.h"
#include <sys/file.h>
#include <sys/statvfs.h>

#define CHECKPOINT_SAVING "saving_"     // .saving_step_N:   is being written
#define CHECKPOINT_OLD "replaced_"      // .replaced_step_N: the former step_N while its successor takes its place
#define CHECKPOINT_REMOVING "removing_" // .removing_step_N: pruned, half of it may be gone
#define CHECKPOINT_BYTE_TOKENIZER "bytes"
#define CHECKPOINT_CHECKSUMS "checksums.json"

typedef struct {
    int64_t step;           // optimizer steps done
    uint64_t tokens;        // trained on so far
    uint64_t data_position; // dataloader_position: sequences consumed by all ranks
    uint64_t data_tokens;   // in the training data when saved (0: not known); another number on resume: other data
    uint64_t data_hash;     // dataloader_fingerprint: data of the same length may be other data, too
    uint64_t sampler_rng, seed;
    bool has_master;        // fp32 master weights lie in trainer_state.safetensors
    cJSON* options;         // the options the run was started with, echoed; may be NULL. Freed by trainer_state_free
} TrainerState;

static inline void trainer_state_free(TrainerState* state) {
    cJSON_Delete(state->options);
    memset(state, 0, sizeof(*state));
}

// ----------------------------------------------------------------------------
// the parts of a checkpoint folder, written

// One table's worth of tensors named prefix + HF name, fetched and written in pieces.
static inline void checkpoint_declare(StWriter* w, const ParamTable* table, const char* prefix, StDtype dtype) {
    char name[128];
    for (size_t i = 0; i < table->count; i++) {
        const ParamTensor* t = &table->tensors[i];
        snprintf(name, sizeof(name), "%s%s", prefix, t->name);
        st_writer_declare(w, name, dtype, t->ndim, t->shape);
    }
}

static inline void checkpoint_write(StWriter* w, const ParamTable* table, const char* what, ParamFetch fetch,
                                    void* ctx) {
    const size_t chunk = (size_t)1 << 20;
    float* buffer = (float*)mallocCheck(chunk * sizeof(float));
    for (size_t i = 0; i < table->count; i++) {
        const ParamTensor* t = &table->tensors[i];
        for (size_t begin = 0; begin < t->numel; begin += chunk) {
            size_t n = t->numel - begin < chunk ? t->numel - begin : chunk;
            fetch(ctx, t, what, begin, n, buffer);
            for (size_t k = 0; k < n; k++) { // a resume would refuse it, and the good ones before it may be pruned
                if (!st_not_finite(buffer[k])) { continue; }
                fatal("%s: the %s of %s is %g at element %zu, so this checkpoint is not saved; a lower --lr may help",
                      w->path, what, t->name, buffer[k], begin + k);
            }
            st_writer_f32(w, buffer, n);
        }
    }
    free(buffer);
}

static inline void checkpoint_write_tensors(const char* dir, const ParamTable* table, StDtype weights_dtype,
                                            bool with_master, ParamFetch fetch, void* ctx) {
    StWriter w;
    char* path = str_format("%s/model.safetensors", dir);
    st_writer_open(&w, path);
    checkpoint_declare(&w, table, "", weights_dtype);
    st_writer_header(&w);
    checkpoint_write(&w, table, "weight", fetch, ctx);
    st_writer_close(&w);
    free(path);
    path = str_format("%s/trainer_state.safetensors", dir);
    st_writer_open(&w, path);
    checkpoint_declare(&w, table, "m.", ST_F32);
    checkpoint_declare(&w, table, "v.", ST_F32);
    if (with_master) { checkpoint_declare(&w, table, "master.", ST_F32); }
    st_writer_header(&w);
    checkpoint_write(&w, table, "m", fetch, ctx);
    checkpoint_write(&w, table, "v", fetch, ctx);
    if (with_master) { checkpoint_write(&w, table, "master", fetch, ctx); }
    st_writer_close(&w);
    free(path);
}

static inline void checkpoint_write_state(const char* dir, const TrainerState* state, bool with_master) {
    cJSON* json = cJSON_CreateObject();
    cJSON_AddNumberToObject(json, "format", 1);
    json_add_u64(json, "step", (uint64_t)state->step);
    json_add_u64(json, "tokens", state->tokens);
    json_add_u64(json, "data_position", state->data_position);
    json_add_u64(json, "data_tokens", state->data_tokens);
    json_add_u64(json, "data_hash", state->data_hash);
    json_add_u64(json, "sampler_rng", state->sampler_rng);
    json_add_u64(json, "seed", state->seed);
    cJSON_AddBoolToObject(json, "has_master", with_master);
    if (state->options != NULL) { cJSON_AddItemToObject(json, "options", cJSON_Duplicate(state->options, true)); }
    char* path = str_format("%s/trainer_state.json", dir);
    json_write_file(json, path);
    free(path);
    cJSON_Delete(json);
}

// What model.generate() starts and stops with; padding with the end token spares users a warning.
static inline void checkpoint_write_generation(const char* dir, const MoEConfig* config) {
    cJSON* json = cJSON_CreateObject();
    if (config->bos_token_id >= 0) { cJSON_AddNumberToObject(json, "bos_token_id", config->bos_token_id); }
    if (config->eos_token_id >= 0) { cJSON_AddNumberToObject(json, "eos_token_id", config->eos_token_id); }
    if (config->eos_token_id >= 0) { cJSON_AddNumberToObject(json, "pad_token_id", config->eos_token_id); }
    cJSON_AddBoolToObject(json, "_from_model_config", true);
    char* path = str_format("%s/generation_config.json", dir);
    json_write_file(json, path);
    free(path);
    cJSON_Delete(json);
}

// Copies tokenizer.json and the files that belong to it from the folder it lies in, as far as they are there.
static inline void checkpoint_write_tokenizer(const char* dir, const char* tokenizer_json) {
    static const char* const companions[] = {
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
        "chat_template.jinja"};
    if (strcmp(tokenizer_json, CHECKPOINT_BYTE_TOKENIZER) == 0) { tokenizer_bytes_write(dir); return; }
    const char* slash = strrchr(tokenizer_json, '/');
    int folder = slash != NULL ? (int)(slash - tokenizer_json) : 0;
    char* to = str_format("%s/tokenizer.json", dir);
    file_copy(tokenizer_json, to);
    free(to);
    for (size_t i = 0; i < sizeof(companions) / sizeof(companions[0]); i++) {
        char* from =
            slash != NULL ? str_format("%.*s/%s", folder, tokenizer_json, companions[i]) : strdupCheck(companions[i]);
        to = str_format("%s/%s", dir, companions[i]);
        if (path_exists(from)) { file_copy(from, to); }
        free(from);
        free(to);
    }
}

// hash_bytes of a file, and of its length. False, with errno, if it cannot be read or is no regular file.
static inline bool file_hash(const char* path, uint64_t* hash) {
    const size_t chunk = (size_t)1 << 20;
    struct stat st;
    int fd = open_to_read(path);
    bool regular = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    FILE* fp = regular ? fdopen(fd, "rb") : NULL;
    if (fp == NULL) {
        if (fd >= 0) { close(fd); errno = EINVAL; }
        return false;
    }
    unsigned char* buffer = (unsigned char*)mallocCheck(chunk);
    uint64_t h = HASH_BEGIN, size = 0;
    size_t n;
    while ((n = fread(buffer, 1, chunk, fp)) > 0) { // chunk is a multiple of 8
        size += n;
        h = hash_bytes(h, buffer, n);
    }
    bool ok = !ferror(fp);
    free(buffer);
    fclose(fp);
    *hash = (h ^ size) * 0x100000001B3u;
    return ok;
}

// Lists the hash of every file written so far, so that damage on the disk is found out before a run goes on from it.
static inline void checkpoint_write_checksums(const char* dir) {
    size_t count;
    char** names = folder_list(dir, "", &count);
    cJSON* json = cJSON_CreateObject();
    for (size_t i = 0; i < count; i++) {
        uint64_t hash;
        char* path = str_format("%s/%s", dir, names[i]);
        if (!file_hash(path, &hash)) { fatal("cannot read %s back: %s", path, strerror(errno)); }
        json_add_u64(json, names[i], hash);
        free(path);
    }
    char* path = str_format("%s/" CHECKPOINT_CHECKSUMS, dir);
    json_write_file(json, path);
    free(path);
    cJSON_Delete(json);
    folder_list_free(names);
}

// ----------------------------------------------------------------------------
// names and order

// The step of a folder called exactly as checkpoint_save calls it ("step_00000100"), or -1.
static inline int64_t checkpoint_step_of(const char* name) {
    if (strncmp(name, "step_", 5) != 0) { return -1; }
    size_t digits = strspn(name + 5, "0123456789");
    if (digits < 8 || digits > 18 || name[5 + digits] != '\0' || (digits > 8 && name[5] == '0')) { return -1; }
    return (int64_t)strtoll(name + 5, NULL, 10);
}

static inline int checkpoint_compare_newest(const void* a, const void* b) {
    int64_t x = checkpoint_step_of(*(const char* const*)a), y = checkpoint_step_of(*(const char* const*)b);
    return x > y ? -1 : x < y;
}

// All step folders in out, newest first. Freed by folder_list_free.
static inline char** checkpoint_list(const char* out, size_t* count) {
    size_t all, n = 0;
    char** names = folder_list(out, "step_", &all);
    for (size_t i = 0; i < all; i++) {
        if (checkpoint_step_of(names[i]) >= 0) { names[n++] = names[i]; } else { free(names[i]); }
    }
    names[n] = NULL;
    qsort(names, n, sizeof(char*), checkpoint_compare_newest);
    *count = n;
    return names;
}

// The highest step saved in out, or -1: a run that does not resume must not mix its checkpoints with an older run's.
static inline int64_t checkpoint_newest_step(const char* out) {
    if (!path_is_folder(out)) { return -1; }
    size_t count;
    char** names = checkpoint_list(out, &count);
    int64_t step = count > 0 ? checkpoint_step_of(names[0]) : -1;
    folder_list_free(names);
    return step;
}

// ----------------------------------------------------------------------------
// saving

static char* checkpoint_unfinished = NULL;           // the temporary folder while it is written
static void (*checkpoint_outer_hook)(void) = NULL;   // the program's own fatal_hook meanwhile

// A failed save gives its space back at once: on a full disk nothing else could be written otherwise.
static inline void checkpoint_abandon(void) {
    if (checkpoint_unfinished != NULL) { path_remove(checkpoint_unfinished); }
    if (checkpoint_outer_hook != NULL) { checkpoint_outer_hook(); }
}

// Gives a complete, synced folder its name. If the name is taken, the old folder steps aside first; should the program
// die between the two renames, checkpoint_recover puts it back.
static inline void checkpoint_publish(const char* out, const char* temporary, const char* name) {
    char* final_path = str_format("%s/%s", out, name);
    char* old_path = str_format("%s/." CHECKPOINT_OLD "%s", out, name);
    if (path_exists(final_path)) {
        path_remove(old_path);
        if (rename(final_path, old_path) != 0) { fatal("cannot move %s aside: %s", final_path, strerror(errno)); }
    }
    if (rename(temporary, final_path) != 0) {
        int reason = errno;
        if (path_exists(old_path)) { rename(old_path, final_path); }
        fatal("cannot give %s its name %s: %s", temporary, final_path, strerror(reason));
    }
    path_sync(out);
    path_remove(old_path);
    free(final_path);
    free(old_path);
}

// Removes all but the `keep` newest checkpoints, never `newest`, which was just written. Renamed first, so that a half
// removed folder does not look like a checkpoint.
static inline void checkpoint_prune(const char* out, const char* newest, int keep) {
    size_t count;
    char** names = checkpoint_list(out, &count);
    int kept = 1;
    for (size_t i = 0; i < count; i++) {
        if (strcmp(names[i], newest) == 0 || ++kept <= keep) { continue; }
        char* path = str_format("%s/%s", out, names[i]);
        char* removing = str_format("%s/." CHECKPOINT_REMOVING "%s", out, names[i]);
        path_remove(removing);
        if (rename(path, removing) != 0 || !path_remove(removing)) {
            warn("cannot remove the old checkpoint %s: %s", path, strerror(errno));
        }
        free(path);
        free(removing);
    }
    folder_list_free(names);
}

// Writes OUT/step_N/ (N = state->step): config.json, generation_config.json and model.safetensors for Hugging Face, its
// weights in weights_dtype (ST_F32 or ST_BF16); trainer_state.safetensors with m.*, v.* and, with_master, master.* in
// F32; trainer_state.json; checksums.json; tokenizer files: tokenizer_json is a path whose file and neighbours are
// copied, CHECKPOINT_BYTE_TOKENIZER, or NULL for none. fetch is asked for every value. Then removes all but the `keep`
// newest checkpoints (0: keeps all). On return everything is on the disk. Any failure is fatal and leaves the
// checkpoints that were there as they were.
static inline void checkpoint_save(const char* out, const MoEConfig* config, const ParamTable* table,
                                   const TrainerState* state, StDtype weights_dtype, bool with_master, ParamFetch fetch,
                                   void* ctx, const char* tokenizer_json, int keep) {
    char name[40];
    snprintf(name, sizeof(name), "step_%08lld", (long long)state->step);
    char* dir = str_format("%s/." CHECKPOINT_SAVING "%s", out, name);
    checkpoint_unfinished = dir;
    checkpoint_outer_hook = fatal_hook;
    fatal_hook = checkpoint_abandon;
    path_remove(dir);
    if (mkdir(dir, 0777) != 0) { fatal("cannot make the folder %s: %s", dir, strerror(errno)); }
    char* path = str_format("%s/config.json", dir);
    config_write(config, path, weights_dtype == ST_BF16 ? "bfloat16" : "float32");
    checkpoint_write_generation(dir, config);
    if (tokenizer_json != NULL) { checkpoint_write_tokenizer(dir, tokenizer_json); }
    checkpoint_write_state(dir, state, with_master);
    checkpoint_write_tensors(dir, table, weights_dtype, with_master, fetch, ctx);
    checkpoint_write_checksums(dir);
    folder_sync(dir);
    checkpoint_publish(out, dir, name);
    fatal_hook = checkpoint_outer_hook;
    checkpoint_unfinished = NULL;
    if (keep > 0) { checkpoint_prune(out, name, keep); }
    free(path);
    free(dir);
}

// Bytes one checkpoint takes (tensors; the rest is small).
static inline size_t checkpoint_bytes(const ParamTable* table, StDtype weights_dtype, bool with_master) {
    return mul_check(table->num_parameters, st_dtype_size(weights_dtype) + 8 + (with_master ? 4 : 0)) +
           ((size_t)1 << 20);
}

// Before training: fatal if the disk of out could not take even one checkpoint.
static inline void checkpoint_space_check(const char* out, const ParamTable* table, StDtype weights_dtype,
                                          bool with_master) {
    struct statvfs fs;
    if (statvfs(out, &fs) != 0) { return; } // then the first save will tell
    double available = (double)fs.f_bavail * (double)fs.f_frsize;
    double needed = (double)checkpoint_bytes(table, weights_dtype, with_master);
    if (available < needed) {
        fatal("--out %s has %.3f GB free, a checkpoint takes %.3f GB; free some space or choose another folder", out,
              available / 1e9, needed / 1e9);
    }
}

#include "checkpoint_read.h" // checkpoint_latest, checkpoint_out_open, checkpoint_state_read, checkpoint_moments_load

#endif
