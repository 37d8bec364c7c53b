// config.h: the model's sizes (MoEConfig <-> Hugging Face's config.json, presets) and the table of its parameters.
// Who has to know which tensors there are, how large, in which order, asks the table; nothing has a number of its own.
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include "check.h"
#include "json.h"
#include <limits.h>

#define CONFIG_MAX_LAYERS 1024
#define CONFIG_MAX_EXPERTS 65536
#define CONFIG_MAX_ALL_EXPERTS 262144 // of all layers; a name, sizes and a place are kept for each: 150 MB
#define CONFIG_MAX_FILE_BYTES ((size_t)16 << 20)

// The fields have Hugging Face's names. In shapes they are letters: V vocab_size, C hidden_size, L num_hidden_layers,
// NH NKV HD heads, kv heads, head_dim; E num_experts, K num_experts_per_tok, F moe_intermediate_size.
typedef struct {
    int vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim;
    int num_experts, num_experts_per_tok, moe_intermediate_size;
    int intermediate_size;                   // of the dense layers, if there are any
    int max_position_embeddings;             // what it was trained for; computes nothing here
    int decoder_sparse_step;                 // layer l may be MoE only if (l + 1) % decoder_sparse_step == 0 ...
    int num_mlp_only_layers;                 // ... and l is not in mlp_only_layers
    int mlp_only_layers[CONFIG_MAX_LAYERS];
    int bos_token_id, eos_token_id;          // -1: null
    int pad_token_id;                        // -1: null; its row of the embedding gets no gradient (padding_idx of torch)
    bool norm_topk_prob, tie_word_embeddings, output_router_logits;
    double rope_theta, rms_norm_eps, initializer_range, router_aux_loss_coef;
} MoEConfig;

// Layer l has experts (else one dense SwiGLU of intermediate_size): the rule of Qwen3MoeDecoderLayer.
static inline bool config_layer_is_moe(const MoEConfig* config, int layer) {
    for (int i = 0; i < config->num_mlp_only_layers; i++) {
        if (config->mlp_only_layers[i] == layer) { return false; }
    }
    return (layer + 1) % config->decoder_sparse_step == 0;
}

static inline int config_layer_ffn_size(const MoEConfig* config, int layer) { // F: of an expert, or of a dense layer
    return config_layer_is_moe(config, layer) ? config->moe_intermediate_size : config->intermediate_size;
}

// ----------------------------------------------------------------------------
// presets

static inline const char* config_preset_names(void) { return "smol-500m, demo, tiny"; }

// Fills config with the preset of that name; false if there is none (config_preset_names() lists them).
static inline bool config_preset(MoEConfig* config, const char* name) {
    MoEConfig c;
    memset(&c, 0, sizeof(c));
    c.decoder_sparse_step = 1;
    c.pad_token_id = -1;
    c.norm_topk_prob = true;
    c.output_router_logits = false; // true makes generate() of transformers 4.57 fail; the balance loss is on all the same (run.h)
    c.initializer_range = 0.02;
    c.rms_norm_eps = 1e-6;
    if (strcmp(name, "smol-500m") == 0) {
        c.vocab_size = 151936; c.hidden_size = 896; c.num_hidden_layers = 12;
        c.num_attention_heads = 16; c.num_key_value_heads = 16; c.head_dim = 64;
        c.num_experts = 16; c.num_experts_per_tok = 2; c.moe_intermediate_size = 512; c.intermediate_size = 2432;
        c.max_position_embeddings = 4096; c.rope_theta = 1e7; c.router_aux_loss_coef = 0.001;
        c.bos_token_id = c.eos_token_id = 151643; // <|endoftext|> opens a document and is the empty prompt
    } else if (strcmp(name, "demo") == 0) {
        c.vocab_size = 257; c.hidden_size = 128; c.num_hidden_layers = 4;
        c.num_attention_heads = 4; c.num_key_value_heads = 4; c.head_dim = 32;
        c.num_experts = 8; c.num_experts_per_tok = 2; c.moe_intermediate_size = 128; c.intermediate_size = 384;
        c.max_position_embeddings = 1024; c.rope_theta = 1e4; c.router_aux_loss_coef = 0.001;
        c.bos_token_id = c.eos_token_id = 256;
        c.initializer_range = 0.05; // a narrow model learns sooner from somewhat larger weights than the usual 0.02
    } else if (strcmp(name, "tiny") == 0) {
        c.vocab_size = 257; c.hidden_size = 64; c.num_hidden_layers = 2;
        c.num_attention_heads = 4; c.num_key_value_heads = 2; c.head_dim = 16;
        c.num_experts = 4; c.num_experts_per_tok = 2; c.moe_intermediate_size = 32; c.intermediate_size = 96;
        c.max_position_embeddings = 1024; c.rope_theta = 1e4; c.router_aux_loss_coef = 0.01;
        c.bos_token_id = c.eos_token_id = 256;
    } else {
        return false;
    }
    *config = c;
    return true;
}

// The same model with another vocabulary. Special tokens that it has not are none then: run.h takes the data's.
static inline void config_set_vocab_size(MoEConfig* config, int vocab_size) {
    config->vocab_size = vocab_size;
    if (config->bos_token_id >= vocab_size) { config->bos_token_id = -1; }
    if (config->eos_token_id >= vocab_size) { config->eos_token_id = -1; }
    if (config->pad_token_id >= vocab_size) { config->pad_token_id = -1; }
}

// ----------------------------------------------------------------------------
// checks that need no file

static inline bool config_check_layers(const MoEConfig* c, char* err, size_t err_size) {
    if (c->num_hidden_layers > CONFIG_MAX_LAYERS) {
        return fail_with(err, err_size, "num_hidden_layers is %d, more than the %d supported", c->num_hidden_layers,
                         CONFIG_MAX_LAYERS);
    }
    if (c->num_mlp_only_layers < 0 || c->num_mlp_only_layers > CONFIG_MAX_LAYERS) {
        return fail_with(err, err_size, "mlp_only_layers has %d entries, more than the %d supported",
                         c->num_mlp_only_layers, CONFIG_MAX_LAYERS);
    }
    for (int i = 0; i < c->num_mlp_only_layers; i++) {
        if (c->mlp_only_layers[i] < 0 || c->mlp_only_layers[i] >= c->num_hidden_layers) {
            return fail_with(err, err_size, "mlp_only_layers names layer %d, but there are only %d layers (0 to %d)",
                             c->mlp_only_layers[i], c->num_hidden_layers, c->num_hidden_layers - 1);
        }
    }
    return true;
}

static inline bool config_check_floats(const MoEConfig* c, char* err, size_t err_size) {
    // written so that NaN fails, too
    if (!(c->rope_theta > 0 && c->rope_theta < 1e30)) {
        return fail_with(err, err_size, "rope_theta is %g, must be above 0 and below 1e30", c->rope_theta);
    }
    if (!(c->rms_norm_eps > 0 && c->rms_norm_eps < 1)) {
        return fail_with(err, err_size, "rms_norm_eps is %g, must be above 0 and below 1", c->rms_norm_eps);
    }
    if (!(c->initializer_range > 0 && c->initializer_range < 1e3)) {
        return fail_with(err, err_size, "initializer_range is %g, must be above 0 and below 1000", c->initializer_range);
    }
    if (!(c->router_aux_loss_coef >= 0 && c->router_aux_loss_coef < 1e6)) {
        return fail_with(err, err_size, "router_aux_loss_coef is %g, must be 0 or more and below 1e6",
                         c->router_aux_loss_coef);
    }
    return true;
}

static inline bool config_check_tokens(const MoEConfig* c, char* err, size_t err_size) {
    const char* names[3] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    int ids[3] = {c->bos_token_id, c->eos_token_id, c->pad_token_id};
    for (int i = 0; i < 3; i++) {
        if (ids[i] < -1 || ids[i] >= c->vocab_size) {
            return fail_with(err, err_size, "%s is %d, outside the vocabulary of %d tokens (null means none)", names[i],
                             ids[i], c->vocab_size);
        }
    }
    return true;
}

// Parameters of the whole model as a double, to refuse what could not even be counted before anything is allocated.
static inline double config_estimate_parameters(const MoEConfig* c) {
    double C = c->hidden_size, heads = (double)c->num_attention_heads + c->num_key_value_heads;
    double mlp = fmax((double)c->num_experts * c->moe_intermediate_size, (double)c->intermediate_size);
    double layer = 2 * C * heads * c->head_dim + 3 * C * mlp + (double)c->num_experts * C + 2 * C + 2.0 * c->head_dim;
    return c->num_hidden_layers * layer + 2.0 * c->vocab_size * C + C;
}

// True if the model can be built: ranges, divisibility, no size overflows. Else false and one line in err that names
// the field.
static inline bool config_check(const MoEConfig* c, char* err, size_t err_size) {
    const struct { const char* name; int value; } positive[] = {
        {"vocab_size", c->vocab_size}, {"hidden_size", c->hidden_size}, {"num_hidden_layers", c->num_hidden_layers},
        {"num_attention_heads", c->num_attention_heads}, {"num_key_value_heads", c->num_key_value_heads},
        {"head_dim", c->head_dim}, {"num_experts", c->num_experts}, {"num_experts_per_tok", c->num_experts_per_tok},
        {"moe_intermediate_size", c->moe_intermediate_size}, {"intermediate_size", c->intermediate_size},
        {"max_position_embeddings", c->max_position_embeddings}, {"decoder_sparse_step", c->decoder_sparse_step},
    };
    for (size_t i = 0; i < sizeof(positive) / sizeof(positive[0]); i++) {
        if (positive[i].value < 1) {
            return fail_with(err, err_size, "%s is %d, must be at least 1", positive[i].name, positive[i].value);
        }
    }
    if (!config_check_layers(c, err, err_size) || !config_check_floats(c, err, err_size) ||
        !config_check_tokens(c, err, err_size)) {
        return false;
    }
    if (c->num_attention_heads % c->num_key_value_heads != 0) {
        return fail_with(err, err_size, "num_attention_heads (%d) must be a multiple of num_key_value_heads (%d)",
                         c->num_attention_heads, c->num_key_value_heads);
    }
    if (c->head_dim % 8 != 0 || c->head_dim > 128) {
        return fail_with(err, err_size, "head_dim is %d, must be a multiple of 8 up to 128", c->head_dim);
    }
    if (c->num_experts > CONFIG_MAX_EXPERTS) {
        return fail_with(err, err_size, "num_experts is %d, more than the %d supported", c->num_experts,
                         CONFIG_MAX_EXPERTS);
    }
    if (c->num_experts_per_tok > c->num_experts) {
        return fail_with(err, err_size, "num_experts_per_tok (%d) is larger than num_experts (%d)",
                         c->num_experts_per_tok, c->num_experts);
    }
    // BLAS takes heads * head_dim and 2F as int; beyond 1e15 parameters byte counts would not be exact
    if ((int64_t)c->num_attention_heads * c->head_dim > INT_MAX / 4 || c->moe_intermediate_size > INT_MAX / 4 ||
        c->intermediate_size > INT_MAX / 4 || c->hidden_size > INT_MAX / 4 || c->vocab_size > INT_MAX / 4 ||
        (int64_t)c->num_hidden_layers * c->num_experts > CONFIG_MAX_ALL_EXPERTS || config_estimate_parameters(c) > 1e15) {
        return fail_with(err, err_size, "the sizes are too large: about %.3g parameters in %lld experts",
                         config_estimate_parameters(c), (long long)c->num_hidden_layers * c->num_experts);
    }
    return true;
}

// ----------------------------------------------------------------------------
// the parameter table

typedef struct {
    char name[112];       // as in the checkpoint: "model.layers.0.mlp.experts.3.up_proj.weight"
    int layer, expert;    // -1: not in a layer, not an expert's
    int ndim;
    size_t shape[2];      // [out, in] for matrices, [n] for norms
    size_t numel;
    size_t offset;        // of the first element in the arena that holds all parameters, in elements
    bool decays;          // weight decay: every matrix yes, norms no
    float init_std;       // of the normal distribution it starts from; 0: starts as ones
} ParamTensor;

typedef struct {
    ParamTensor* tensors;        // in arena order
    size_t count;
    size_t num_parameters;       // all
    size_t num_active;           // used by one token: K of E experts, the rest whole
    size_t num_matmul_active;    // of those, the ones in matrix products: router and lm_head (tied or not) count,
                                 // the embedding's lookup and the norms do not
    const ParamTensor** by_name; // the same tensors sorted by name, for lookups
} ParamTable;

typedef enum { DIM_NONE, DIM_V, DIM_C, DIM_Q, DIM_KV, DIM_HD, DIM_E, DIM_F, DIM_DENSE } ParamDim;
typedef enum { PARAM_FIRST, PARAM_LAYER, PARAM_MOE, PARAM_EXPERT, PARAM_DENSE, PARAM_LAST, PARAM_HEAD } ParamScope;
typedef struct { const char* name; ParamScope scope; ParamDim rows, cols; int expert_group; } ParamSpec;

// One row a family of tensors; {l} and {e} stand for layer and expert. The order is the order in memory, chosen so that
// q|k|v are one matrix [NH*HD + 2*NKV*HD, C], an expert's gate|up one [2F, C], all experts one [E, 2F, C] and one
// [E, C, F]: rows of one expert_group alternate expert by expert.
static const ParamSpec param_specs[] = {
    {"model.embed_tokens.weight",                        PARAM_FIRST,  DIM_V,     DIM_C,     0},
    {"model.layers.{l}.input_layernorm.weight",          PARAM_LAYER,  DIM_C,     DIM_NONE,  0},
    {"model.layers.{l}.self_attn.q_proj.weight",         PARAM_LAYER,  DIM_Q,     DIM_C,     0},
    {"model.layers.{l}.self_attn.k_proj.weight",         PARAM_LAYER,  DIM_KV,    DIM_C,     0},
    {"model.layers.{l}.self_attn.v_proj.weight",         PARAM_LAYER,  DIM_KV,    DIM_C,     0},
    {"model.layers.{l}.self_attn.q_norm.weight",         PARAM_LAYER,  DIM_HD,    DIM_NONE,  0},
    {"model.layers.{l}.self_attn.k_norm.weight",         PARAM_LAYER,  DIM_HD,    DIM_NONE,  0},
    {"model.layers.{l}.self_attn.o_proj.weight",         PARAM_LAYER,  DIM_C,     DIM_Q,     0},
    {"model.layers.{l}.post_attention_layernorm.weight", PARAM_LAYER,  DIM_C,     DIM_NONE,  0},
    {"model.layers.{l}.mlp.gate.weight",                 PARAM_MOE,    DIM_E,     DIM_C,     0},
    {"model.layers.{l}.mlp.experts.{e}.gate_proj.weight",   PARAM_EXPERT, DIM_F,     DIM_C,     1},
    {"model.layers.{l}.mlp.experts.{e}.up_proj.weight",  PARAM_EXPERT, DIM_F,     DIM_C,     1},
    {"model.layers.{l}.mlp.experts.{e}.down_proj.weight",   PARAM_EXPERT, DIM_C,     DIM_F,     2},
    {"model.layers.{l}.mlp.gate_proj.weight",            PARAM_DENSE,  DIM_DENSE, DIM_C,     0},
    {"model.layers.{l}.mlp.up_proj.weight",              PARAM_DENSE,  DIM_DENSE, DIM_C,     0},
    {"model.layers.{l}.mlp.down_proj.weight",            PARAM_DENSE,  DIM_C,     DIM_DENSE, 0},
    {"model.norm.weight",                                PARAM_LAST,   DIM_C,     DIM_NONE,  0},
    {"lm_head.weight",                                   PARAM_HEAD,   DIM_V,     DIM_C,     0}, // not when tied
};
#define NUM_PARAM_SPECS (sizeof(param_specs) / sizeof(param_specs[0]))

static inline size_t param_dim(const MoEConfig* c, ParamDim dim) {
    switch (dim) {
        case DIM_V:     return (size_t)c->vocab_size;
        case DIM_C:     return (size_t)c->hidden_size;
        case DIM_Q:     return (size_t)c->num_attention_heads * (size_t)c->head_dim;
        case DIM_KV:    return (size_t)c->num_key_value_heads * (size_t)c->head_dim;
        case DIM_HD:    return (size_t)c->head_dim;
        case DIM_E:     return (size_t)c->num_experts;
        case DIM_F:     return (size_t)c->moe_intermediate_size;
        case DIM_DENSE: return (size_t)c->intermediate_size;
        case DIM_NONE:  break;
    }
    return 1;
}

// "model.layers.{l}.x" -> "model.layers.7.x"
static inline void param_name(char* out, size_t size, const char* pattern, int layer, int expert) {
    size_t n = 0;
    for (const char* p = pattern; *p != '\0' && n + 12 < size; p++) {
        if (p[0] == '{') {
            n += (size_t)snprintf(out + n, size - n, "%d", p[1] == 'l' ? layer : expert);
            p += 2;
        } else {
            out[n++] = *p;
        }
    }
    out[n] = '\0';
}

static inline void param_append(ParamTable* table, size_t* capacity, const MoEConfig* c, const ParamSpec* spec,
                                int layer, int expert) {
    if (table->count == *capacity) {
        *capacity = *capacity == 0 ? 256 : 2 * *capacity;
        table->tensors = (ParamTensor*)reallocCheck(table->tensors, mul_check(*capacity, sizeof(ParamTensor)));
    }
    ParamTensor* t = &table->tensors[table->count++];
    memset(t, 0, sizeof(*t));
    param_name(t->name, sizeof(t->name), spec->name, layer, expert);
    t->layer = layer;
    t->expert = expert;
    t->ndim = spec->cols == DIM_NONE ? 1 : 2;
    t->shape[0] = param_dim(c, spec->rows);
    t->shape[1] = param_dim(c, spec->cols);
    t->numel = mul_check(t->shape[0], t->shape[1]);
    t->offset = table->num_parameters;
    t->decays = t->ndim == 2;
    t->init_std = t->ndim == 2 ? (float)c->initializer_range : 0.0f;
    table->num_parameters += t->numel;
    bool active = expert < c->num_experts_per_tok;
    bool in_matmul = t->ndim == 2 && (spec->scope != PARAM_FIRST || c->tie_word_embeddings);
    table->num_active += active ? t->numel : 0;
    table->num_matmul_active += active && in_matmul ? t->numel : 0;
}

static inline void param_append_layer(ParamTable* table, size_t* capacity, const MoEConfig* c, int layer) {
    bool moe = config_layer_is_moe(c, layer);
    for (size_t i = 0; i < NUM_PARAM_SPECS; i++) {
        const ParamSpec* spec = &param_specs[i];
        if (spec->scope == PARAM_LAYER || (spec->scope == PARAM_MOE && moe) || (spec->scope == PARAM_DENSE && !moe)) {
            param_append(table, capacity, c, spec, layer, -1);
        }
        bool opens_group = spec->scope == PARAM_EXPERT && param_specs[i - 1].expert_group != spec->expert_group;
        for (int e = 0; moe && opens_group && e < c->num_experts; e++) {
            for (size_t j = i; j < NUM_PARAM_SPECS && param_specs[j].expert_group == spec->expert_group; j++) {
                param_append(table, capacity, c, &param_specs[j], layer, e);
            }
        }
    }
}

static inline int param_compare_names(const void* a, const void* b) {
    return strcmp((*(const ParamTensor* const*)a)->name, (*(const ParamTensor* const*)b)->name);
}

// Lists every tensor of the model with its place in an unpadded arena of num_parameters elements. The config has passed
// config_check.
static inline void param_table_build(ParamTable* table, const MoEConfig* c) {
    memset(table, 0, sizeof(*table));
    size_t capacity = 0;
    for (size_t i = 0; i < NUM_PARAM_SPECS; i++) {
        if (param_specs[i].scope == PARAM_FIRST) { param_append(table, &capacity, c, &param_specs[i], -1, -1); }
    }
    for (int layer = 0; layer < c->num_hidden_layers; layer++) { param_append_layer(table, &capacity, c, layer); }
    for (size_t i = 0; i < NUM_PARAM_SPECS; i++) {
        bool head = param_specs[i].scope == PARAM_HEAD && !c->tie_word_embeddings;
        if (param_specs[i].scope == PARAM_LAST || head) { param_append(table, &capacity, c, &param_specs[i], -1, -1); }
    }
    table->by_name = (const ParamTensor**)mallocCheck(mul_check(table->count, sizeof(ParamTensor*)));
    for (size_t i = 0; i < table->count; i++) { table->by_name[i] = &table->tensors[i]; }
    qsort(table->by_name, table->count, sizeof(ParamTensor*), param_compare_names);
}

static inline void param_table_free(ParamTable* table) {
    free(table->tensors);
    free((void*)table->by_name);
    memset(table, 0, sizeof(*table));
}

// The tensor of that Hugging Face name, or NULL.
static inline const ParamTensor* param_lookup(const ParamTable* table, const char* name) {
    size_t lo = 0, hi = table->count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int order = strcmp(table->by_name[mid]->name, name);
        if (order == 0) { return table->by_name[mid]; }
        if (order < 0) { lo = mid + 1; } else { hi = mid; }
    }
    return NULL;
}

// The tensor whose name fmt spells; a name that does not exist is a mistake in the program, hence fatal.
PRINTF_LIKE(2, 3)
static inline const ParamTensor* param_find(const ParamTable* table, const char* fmt, ...) {
    char name[128];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof(name), fmt, args);
    va_end(args);
    const ParamTensor* t = param_lookup(table, name);
    if (t == NULL) { fatal("the parameter table has no tensor %s", name); }
    return t;
}

// Parameters begin .. end of the arena, which all decay or all do not.
typedef struct { size_t begin, end; int decays; } ParamRange;

// Writes the table's ranges, in ascending order and neighbours of one kind as one, into ranges, which has room for
// table->count of them; returns how many there are.
static inline int param_ranges(ParamRange* ranges, const ParamTable* table) {
    int count = 0;
    for (size_t i = 0; i < table->count; i++) {
        const ParamTensor* t = &table->tensors[i];
        if (count == 0 || ranges[count - 1].decays != t->decays) {
            ParamRange range = {t->offset, t->offset, t->decays};
            ranges[count++] = range;
        }
        ranges[count - 1].end = t->offset + t->numel;
    }
    return count;
}

// How a tensor's elements begin .. begin+count-1 get to a trainer and from it: `what` is "weight", or of its weight the
// "m", "v", "master" or, only to be fetched, "grad".
typedef void (*ParamStore)(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count,
                           const float* values);
typedef void (*ParamFetch)(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count,
                           float* values);

#include "config_json.h" // config_read and config_write: MoEConfig <-> Hugging Face's config.json

#endif
