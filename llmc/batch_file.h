// batch_file.h: one batch from a safetensors file (--batch), to overfit on, or to check a trainer against somebody
// else's numbers: tokens and targets, where wanted also the documents and the experts of each token.
#ifndef LLMC_BATCH_FILE_H
#define LLMC_BATCH_FILE_H

#include "config.h"
#include "dataloader.h"
#include "safetensors.h"

typedef struct {
    size_t B, T;
    int* all;              // (5,B,T) as a Batch of dataloader.h: the three below, doc_end and token_order
    int *tokens, *targets; // (B,T); target -100: not counted
    int* doc_start;        // (B,T) first position of the token's document in its row; 0 without --doc-mask
    int** forced_indices;  // (L) of (B*T, K) experts, NULL in dense layers; NULL without --force-routing
    double counted;        // targets that are counted
} BatchFile;

static inline void batch_open(SafeTensors* file, const char* path) {
    char err[512];
    if (!st_open(file, path, err, sizeof(err))) { fatal("--batch: %s", err); }
}

// A [rows, cols] I32 tensor of the file (rows 0: any two dimensions).
static inline const StTensor* batch_tensor(const SafeTensors* file, const char* name, size_t rows, size_t cols) {
    const StTensor* t = st_find(file, name);
    if (t == NULL) { fatal("--batch: %s has no tensor '%s'", file->path, name); }
    if (t->dtype != ST_I32 || t->ndim != 2 || t->numel == 0) {
        fatal("--batch: %s: '%s' must be I32 with 2 dimensions and not empty, it is %s with %d and %zu numbers",
              file->path, name, st_dtype_name(t->dtype), t->ndim, t->numel);
    }
    if (rows > 0 && (t->shape[0] != rows || t->shape[1] != cols)) {
        fatal("--batch: %s: '%s' has shape [%zu, %zu], but [%zu, %zu] is needed", file->path, name, t->shape[0],
              t->shape[1], rows, cols);
    }
    return t;
}

// B and T of the file's batch, for whoever needs them before the model is known.
static inline void batch_file_size(const char* path, size_t* B, size_t* T) {
    SafeTensors file;
    batch_open(&file, path);
    const StTensor* tokens = batch_tensor(&file, "tokens", 0, 0);
    *B = tokens->shape[0];
    *T = tokens->shape[1];
    st_close(&file);
}

static inline void batch_check_tokens(const BatchFile* b, const char* path, int vocab_size) {
    for (size_t n = 0; n < b->B * b->T; n++) {
        int token = b->tokens[n], target = b->targets[n];
        if (token < 0 || token >= vocab_size) {
            fatal("--batch: %s: token %d at row %zu, position %zu is outside the model's vocabulary of %d", path, token,
                  n / b->T, n % b->T, vocab_size);
        }
        if (target != -100 && (target < 0 || target >= vocab_size)) {
            fatal("--batch: %s: target %d at row %zu, position %zu is neither -100 nor inside the vocabulary of %d", path,
                  target, n / b->T, n % b->T, vocab_size);
        }
    }
}

// doc_ids [B,T], which never fall within a row -> where each token's document begins
static inline void batch_read_documents(BatchFile* b, const SafeTensors* file) {
    int* doc_ids = b->all + 3 * b->B * b->T; // the place of doc_end, which comes later
    st_to_i32(batch_tensor(file, "doc_ids", b->B, b->T), 0, b->B * b->T, doc_ids);
    for (size_t n = 0; n < b->B * b->T; n++) {
        size_t t = n % b->T;
        if (t > 0 && doc_ids[n] < doc_ids[n - 1]) {
            fatal("--batch: %s: doc_ids fall at row %zu, position %zu: they must not", file->path, n / b->T, t);
        }
        bool same = t > 0 && doc_ids[n] == doc_ids[n - 1];
        b->doc_start[n] = same ? b->doc_start[n - 1] : (int)t;
    }
}

static inline void batch_read_routing(BatchFile* b, const SafeTensors* file, const MoEConfig* config) {
    size_t K = (size_t)config->num_experts_per_tok, slots = b->B * b->T * K;
    int E = config->num_experts;
    b->forced_indices = (int**)callocCheck((size_t)config->num_hidden_layers, sizeof(int*));
    for (int l = 0; l < config->num_hidden_layers; l++) {
        if (!config_layer_is_moe(config, l)) { continue; }
        char name[64];
        snprintf(name, sizeof(name), "router.layers.%d.topk_index", l);
        int* index = b->forced_indices[l] = (int*)mallocCheck(slots * sizeof(int));
        st_to_i32(batch_tensor(file, name, b->B * b->T, K), 0, slots, index);
        for (size_t i = 0; i < slots; i++) {
            bool twice = false;
            for (size_t j = i / K * K; j < i; j++) { twice = twice || index[j] == index[i]; }
            if (index[i] < 0 || index[i] >= E || twice) {
                fatal("--batch: %s: '%s' gives token %zu expert %d: it must be one of 0..%d, each once", file->path, name,
                      i / K, index[i], E - 1);
            }
        }
    }
}

// Reads and checks the whole batch; fatal by name and position.
static inline void batch_file_read(BatchFile* b, const char* path, const MoEConfig* config, bool doc_mask,
                                   bool force_routing) {
    SafeTensors file;
    memset(b, 0, sizeof(*b));
    batch_file_size(path, &b->B, &b->T);
    batch_open(&file, path);
    size_t N = b->B * b->T;
    b->all = (int*)callocCheck(5 * N, sizeof(int));
    b->tokens = b->all;
    b->targets = b->all + N;
    b->doc_start = b->all + 2 * N;
    st_to_i32(batch_tensor(&file, "tokens", b->B, b->T), 0, N, b->tokens);
    st_to_i32(batch_tensor(&file, "targets", b->B, b->T), 0, N, b->targets);
    batch_check_tokens(b, path, config->vocab_size);
    for (size_t n = 0; n < N; n++) { b->counted += b->targets[n] >= 0; }
    if (b->counted == 0) { fatal("--batch: %s: every target is -100, so there is no loss", path); }
    if (doc_mask) { batch_read_documents(b, &file); }
    int* scratch = (int*)mallocCheck((size_t)config->vocab_size * sizeof(int));
    batch_complete(b->all, N, b->T, config->vocab_size, scratch);
    free(scratch);
    if (force_routing) { batch_read_routing(b, &file, config); }
    st_close(&file);
}

static inline void batch_file_free(BatchFile* b, const MoEConfig* config) {
    for (int l = 0; b->forced_indices != NULL && l < config->num_hidden_layers; l++) { free(b->forced_indices[l]); }
    free(b->forced_indices);
    free(b->all);
    memset(b, 0, sizeof(*b));
}

#endif
