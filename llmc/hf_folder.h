// hf_folder.h: reads the weights of a Hugging Face folder: one file or shards with an index, experts apart or fused.
// Nothing is guessed: a tensor that is missing, unexpected, doubled, misshapen or not finite ends the program by name.
#ifndef LLMC_HF_FOLDER_H
#define LLMC_HF_FOLDER_H

#include "config.h"
#include "folder.h"
#include "safetensors.h"

#define HF_CHUNK ((size_t)65536) // floats converted at a time

// ----------------------------------------------------------------------------
// the files of a folder

typedef struct {
    SafeTensors* files;
    size_t count;
} HfFiles;

static inline void hf_open_file(HfFiles* f, const char* path) {
    char err[1200];
    f->files = (SafeTensors*)reallocCheck(f->files, (f->count + 1) * sizeof(SafeTensors));
    if (!st_open(&f->files[f->count], path, err, sizeof(err))) { fatal("%s", err); }
    f->count++;
}

static inline void hf_close_files(HfFiles* f) {
    for (size_t i = 0; i < f->count; i++) { st_close(&f->files[i]); }
    free(f->files);
    memset(f, 0, sizeof(*f));
}

// by shard, then by name
static inline int hf_compare_mapped(const void* a, const void* b) {
    const cJSON *x = *(const cJSON* const*)a, *y = *(const cJSON* const*)b;
    int order = strcmp(x->valuestring, y->valuestring);
    return order != 0 ? order : strcmp(x->string, y->string);
}

// Opens every shard the index names and checks that index and shards agree on what lies where. Both lists are sorted by
// name, so one walk along them finds what is in one of them only.
static inline void hf_open_shards(HfFiles* f, const char* dir, const char* index_path) {
    char err[1200];
    cJSON* index = json_read_file(index_path, (size_t)ST_MAX_HEADER, err, sizeof(err));
    if (index == NULL) { fatal("%s", err); }
    const cJSON* map = cJSON_GetObjectItemCaseSensitive(index, "weight_map");
    if (!cJSON_IsObject(map)) { fatal("%s: there is no \"weight_map\" object", index_path); }
    size_t count = (size_t)cJSON_GetArraySize(map), n = 0;
    const cJSON** mapped = (const cJSON**)mallocCheck(count * sizeof(cJSON*));
    for (const cJSON* node = map->child; node != NULL; node = node->next) {
        bool plain = cJSON_IsString(node) && node->valuestring[0] != '\0' && strchr(node->valuestring, '/') == NULL;
        if (!plain) { fatal("%s: \"%s\" must name a file in the same folder", index_path, node->string); }
        mapped[n++] = node;
    }
    qsort((void*)mapped, count, sizeof(cJSON*), hf_compare_mapped);
    const char *extra = NULL, *extra_path = NULL; // a tensor that is in a shard, but not in the index
    for (size_t i = 0; i < count;) {
        const char* shard = mapped[i]->valuestring;
        char* path = str_format("%s/%s", dir, shard);
        hf_open_file(f, path);
        free(path);
        const SafeTensors* file = &f->files[f->count - 1];
        size_t k = 0;
        for (; i < count && strcmp(mapped[i]->valuestring, shard) == 0; i++) {
            for (; k < file->count && strcmp(file->tensors[k].name, mapped[i]->string) < 0; k++) {
                extra = file->tensors[k].name;
                extra_path = file->path;
            }
            if (k == file->count || strcmp(file->tensors[k].name, mapped[i]->string) != 0) {
                fatal("%s says that tensor %s is in %s, but it is not", index_path, mapped[i]->string, shard);
            }
            k++;
        }
        if (k < file->count) {
            extra = file->tensors[k].name;
            extra_path = file->path;
        }
    }
    if (extra != NULL) { fatal("%s: tensor %s is not what the index %s says", extra_path, extra, index_path); }
    free((void*)mapped);
    cJSON_Delete(index);
}

static inline void hf_open_folder(HfFiles* f, const char* dir) {
    memset(f, 0, sizeof(*f));
    char* single = str_format("%s/model.safetensors", dir);
    char* index = str_format("%s/model.safetensors.index.json", dir);
    if (!path_is_folder(dir)) { fatal("%s is not a folder; a Hugging Face model folder is needed", dir); }
    if (path_exists(single)) {
        hf_open_file(f, single);
    } else if (path_exists(index)) {
        hf_open_shards(f, dir, index);
    } else {
        fatal("%s has neither model.safetensors nor model.safetensors.index.json (other weight formats are not read)",
              dir);
    }
    free(single);
    free(index);
}

// ----------------------------------------------------------------------------
// which piece of which tensor becomes which parameter

typedef struct {
    const SafeTensors* file;
    const StTensor* tensor; // NULL: not found yet
    size_t begin;           // first element of the parameter inside the tensor
} HfPiece;

typedef struct {
    const char* dir;
    const MoEConfig* config;
    const ParamTable* table;
    HfPiece* pieces; // one a parameter, in the table's order
    HfPiece head;    // an lm_head in the file of a tied model
} HfPlan;

static inline void hf_check_tensor(const SafeTensors* file, const StTensor* t, int ndim, const size_t* shape) {
    char got[200], want[200];
    bool same = t->ndim == ndim;
    for (int i = 0; i < ndim && same; i++) { same = t->shape[i] == shape[i]; }
    if (!same) {
        fatal("%s: tensor %s has shape %s, the config asks for %s", file->path, t->name,
              st_shape_text(got, sizeof(got), t->ndim, t->shape), st_shape_text(want, sizeof(want), ndim, shape));
    }
    if (t->dtype != ST_F32 && t->dtype != ST_BF16 && t->dtype != ST_F16) {
        fatal("%s: tensor %s has dtype %s; weights must be F32, BF16 or F16", file->path, t->name,
              st_dtype_name(t->dtype));
    }
}

static inline void hf_assign(HfPlan* plan, const SafeTensors* file, const StTensor* t, const ParamTensor* p,
                             size_t begin) {
    HfPiece* piece = &plan->pieces[p - plan->table->tensors];
    if (piece->tensor != NULL) { fatal("%s: tensor %s gives %s a second time", file->path, t->name, p->name); }
    piece->file = file;
    piece->tensor = t;
    piece->begin = begin;
}

// transformers 5 may store a layer's experts as experts.gate_up_proj [E, 2F, C] (gate rows, then up rows) and
// experts.down_proj [E, C, F]. True if t is one of those; its parts are then assigned.
static inline bool hf_assign_fused(HfPlan* plan, const SafeTensors* file, const StTensor* t) {
    int layer = -1;
    char kind[16], name[64];
    if (sscanf(t->name, "model.layers.%4d.mlp.experts.%15[a-z_]", &layer, kind) != 2) { return false; }
    snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.%s", layer, kind);
    if (strcmp(name, t->name) != 0) { return false; } // sscanf is more generous than we are
    bool gate_up = strcmp(kind, "gate_up_proj") == 0, down = strcmp(kind, "down_proj") == 0;
    bool exists = layer >= 0 && layer < plan->config->num_hidden_layers && config_layer_is_moe(plan->config, layer);
    if (!exists || (!gate_up && !down)) { return false; }
    size_t E = (size_t)plan->config->num_experts, F = (size_t)plan->config->moe_intermediate_size;
    size_t C = (size_t)plan->config->hidden_size;
    size_t shape[3] = {E, gate_up ? 2 * F : C, gate_up ? C : F};
    hf_check_tensor(file, t, 3, shape);
    for (int e = 0; e < plan->config->num_experts; e++) {
        size_t begin = (size_t)e * shape[1] * shape[2];
        const char* first = gate_up ? "gate_proj" : "down_proj";
        hf_assign(plan, file, t, param_find(plan->table, "model.layers.%d.mlp.experts.%d.%s.weight", layer, e, first),
                  begin);
        if (!gate_up) { continue; }
        const ParamTensor* up = param_find(plan->table, "model.layers.%d.mlp.experts.%d.up_proj.weight", layer, e);
        hf_assign(plan, file, t, up, begin + F * C);
    }
    return true;
}

static inline void hf_plan_tensor(HfPlan* plan, const SafeTensors* file, const StTensor* t) {
    const ParamTensor* p = param_lookup(plan->table, t->name);
    if (p != NULL) {
        hf_check_tensor(file, t, p->ndim, p->shape);
        hf_assign(plan, file, t, p, 0);
    } else if (strcmp(t->name, "lm_head.weight") == 0) { // not in the table: the config ties it to the embedding
        const ParamTensor* embed = param_find(plan->table, "model.embed_tokens.weight");
        hf_check_tensor(file, t, embed->ndim, embed->shape);
        plan->head.file = file;
        plan->head.tensor = t;
    } else if (!hf_assign_fused(plan, file, t)) {
        fatal("%s: tensor %s does not belong to the model that config.json describes", file->path, t->name);
    }
}

static inline void hf_check_complete(const HfPlan* plan) {
    size_t missing = 0;
    const char* first = NULL;
    for (size_t i = plan->table->count; i-- > 0;) {
        if (plan->pieces[i].tensor == NULL) { missing++; first = plan->table->tensors[i].name; }
    }
    if (missing == 0) { return; }
    bool head = missing == 1 && strcmp(first, "lm_head.weight") == 0;
    fatal("%s: tensor %s is missing%s (%zu of %zu are)", plan->dir, first,
          head ? "; is \"tie_word_embeddings\": true meant in config.json?" : "", missing, plan->table->count);
}

// ----------------------------------------------------------------------------
// the numbers

// Infinity or NaN, judged by the bits (all of the exponent set), so that no fast-math option can remove the check.
static inline uint32_t st_not_finite(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (bits & 0x7F800000u) == 0x7F800000u;
}

// Elements begin .. begin+count-1 of a tensor as floats, all of them finite, or fatal.
static inline void st_to_f32_finite(const SafeTensors* file, const StTensor* t, size_t begin, size_t count,
                                    float* out) {
    st_to_f32(t, begin, count, out);
    uint32_t bad = 0;
    for (size_t i = 0; i < count; i++) { bad |= st_not_finite(out[i]); }
    for (size_t i = 0; i < count && bad; i++) {
        if (st_not_finite(out[i])) {
            fatal("%s: tensor %s has the value %g at element %zu", file->path, t->name, out[i], begin + i);
        }
    }
}

static inline void hf_load_piece(const HfPiece* piece, const ParamTensor* p, ParamStore store, void* ctx,
                                 float* buffer) {
    for (size_t begin = 0; begin < p->numel; begin += HF_CHUNK) {
        size_t n = p->numel - begin < HF_CHUNK ? p->numel - begin : HF_CHUNK;
        st_to_f32_finite(piece->file, piece->tensor, piece->begin + begin, n, buffer);
        store(ctx, p, "weight", begin, n, buffer);
    }
}

// A tied model has one matrix for embedding and head. A file may repeat it, but a head of its own contradicts the
// config.
static inline void hf_check_tied_head(const HfPlan* plan, float* buffer) {
    if (plan->head.tensor == NULL) { return; }
    const ParamTensor* p = param_find(plan->table, "model.embed_tokens.weight");
    const HfPiece* embed = &plan->pieces[p - plan->table->tensors];
    float* other = (float*)mallocCheck(HF_CHUNK * sizeof(float));
    for (size_t begin = 0; begin < p->numel; begin += HF_CHUNK) {
        size_t n = p->numel - begin < HF_CHUNK ? p->numel - begin : HF_CHUNK;
        st_to_f32_finite(embed->file, embed->tensor, begin, n, buffer);
        st_to_f32_finite(plan->head.file, plan->head.tensor, begin, n, other);
        if (memcmp(buffer, other, n * sizeof(float)) != 0) {
            fatal("%s: lm_head.weight differs from the embedding, but \"tie_word_embeddings\" is true in config.json",
                  plan->dir);
        }
    }
    free(other);
}

// Loads every parameter of the table from a Hugging Face folder and hands it to store in pieces, converted to float
// from F32, BF16 or F16. Takes model.safetensors, or shards by model.safetensors.index.json; experts one by one or
// fused.
static inline void hf_folder_load(const char* dir, const MoEConfig* config, const ParamTable* table, ParamStore store,
                                  void* ctx) {
    HfFiles files;
    HfPlan plan;
    memset(&plan, 0, sizeof(plan));
    plan.dir = dir;
    plan.config = config;
    plan.table = table;
    plan.pieces = (HfPiece*)callocCheck(table->count, sizeof(HfPiece));
    hf_open_folder(&files, dir);
    for (size_t i = 0; i < files.count; i++) {
        for (size_t j = 0; j < files.files[i].count; j++) {
            hf_plan_tensor(&plan, &files.files[i], &files.files[i].tensors[j]);
        }
    }
    hf_check_complete(&plan); // names and shapes first: a wrong folder is refused before anything is read
    float* buffer = (float*)mallocCheck(HF_CHUNK * sizeof(float));
    hf_check_tied_head(&plan, buffer);
    for (size_t i = 0; i < table->count; i++) {
        hf_load_piece(&plan.pieces[i], &table->tensors[i], store, ctx, buffer);
    }
    free(buffer);
    free(plan.pieces);
    hf_close_files(&files);
}

#endif
