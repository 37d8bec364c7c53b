// config_json.h: MoEConfig <-> Hugging Face's config.json in both spellings (part of config.h, which includes it).
// A field that changes the maths in a way this project does not implement is refused by name.
#ifndef LLMC_CONFIG_JSON_H
#define LLMC_CONFIG_JSON_H

#include "config.h"

// ----------------------------------------------------------------------------
// the fields

typedef enum { FIELD_INT, FIELD_TOKEN, FIELD_FLOAT, FIELD_BOOL } FieldKind;

// A row a field that is stored as it stands. `fallback` is what Qwen3MoeConfig assumes when the field is missing; NULL:
// it must be there, because a model read with a guessed size or base would be nonsense.
typedef struct { const char* name; FieldKind kind; size_t offset; const char* fallback; } ConfigField;
#define CONFIG_FIELD(kind, name, fallback) {#name, kind, offsetof(MoEConfig, name), fallback}
static const ConfigField config_fields[] = {
    CONFIG_FIELD(FIELD_INT,   vocab_size, NULL),
    CONFIG_FIELD(FIELD_INT,   hidden_size, NULL),
    CONFIG_FIELD(FIELD_INT,   num_hidden_layers, NULL),
    CONFIG_FIELD(FIELD_INT,   num_attention_heads, NULL),
    CONFIG_FIELD(FIELD_INT,   num_experts_per_tok, NULL),
    CONFIG_FIELD(FIELD_INT,   moe_intermediate_size, NULL),
    CONFIG_FIELD(FIELD_INT,   intermediate_size, "6144"),
    CONFIG_FIELD(FIELD_INT,   max_position_embeddings, "32768"),
    CONFIG_FIELD(FIELD_INT,   decoder_sparse_step, "1"),
    CONFIG_FIELD(FIELD_TOKEN, bos_token_id, "-1"),
    CONFIG_FIELD(FIELD_TOKEN, eos_token_id, "-1"),
    CONFIG_FIELD(FIELD_TOKEN, pad_token_id, "-1"),
    CONFIG_FIELD(FIELD_BOOL,  norm_topk_prob, "0"),
    CONFIG_FIELD(FIELD_BOOL,  tie_word_embeddings, "0"),
    CONFIG_FIELD(FIELD_BOOL,  output_router_logits, "0"),
    CONFIG_FIELD(FIELD_FLOAT, rms_norm_eps, "1e-6"),
    CONFIG_FIELD(FIELD_FLOAT, initializer_range, "0.02"),
    CONFIG_FIELD(FIELD_FLOAT, router_aux_loss_coef, "0.001"),
};
#define NUM_CONFIG_FIELDS (sizeof(config_fields) / sizeof(config_fields[0]))

// Read by functions of their own below.
static const char* const config_special_fields[] = {
    "model_type", "architectures", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts",
    "mlp_only_layers", "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "dtype", "torch_dtype",
    "hidden_act", "sliding_window", "use_sliding_window", "layer_types", NULL};

// They change nothing that is computed here.
static const char* const config_harmless_fields[] = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "_experts_implementation", "_commit_hash", "transformers_version", "transformers.js_config", "use_cache",
    "max_window_layers", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "return_dict",
    "use_return_dict", "output_attentions", "output_hidden_states", "task_specific_params", "finetuning_task",
    "pretraining_tp", "sep_token_id", "tokenizer_class", "unsloth_fixed", "unsloth_version", NULL};

static inline bool config_name_in(const char* name, const char* const* list) {
    for (size_t i = 0; list[i] != NULL; i++) {
        if (strcmp(name, list[i]) == 0) { return true; }
    }
    return false;
}

static inline const cJSON* config_get(const cJSON* object, const char* name) {
    const cJSON* node = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNull(node) ? NULL : node; // null and absent mean the same in all these files
}

// ----------------------------------------------------------------------------
// reading, a function a topic; err gets "field ... is ..." without the path

static inline bool config_read_field(MoEConfig* config, const cJSON* json, const ConfigField* field, char* err,
                                     size_t err_size) {
    char* slot = (char*)config + field->offset;
    const cJSON* node = config_get(json, field->name);
    int64_t whole = 0;
    if (node == NULL && field->fallback == NULL) {
        return fail_with(err, err_size, "the field \"%s\" is missing", field->name);
    }
    if (field->kind == FIELD_TOKEN && cJSON_IsArray(node)) { node = node->child; } // of several end tokens the first
    if (field->kind == FIELD_BOOL) {
        if (node != NULL && !cJSON_IsBool(node)) {
            return fail_with(err, err_size, "the field \"%s\" must be true or false", field->name);
        }
        *(bool*)slot = node != NULL ? cJSON_IsTrue(node) : field->fallback[0] == '1';
    } else if (field->kind == FIELD_FLOAT) {
        if (node != NULL && !cJSON_IsNumber(node)) {
            return fail_with(err, err_size, "the field \"%s\" must be a number", field->name);
        }
        *(double*)slot = node != NULL ? node->valuedouble : strtod(field->fallback, NULL);
    } else {
        if (node != NULL && !json_integer(node, INT_MIN, INT_MAX, &whole)) {
            return fail_with(err, err_size, "the field \"%s\" must be a whole number that fits in 32 bits",
                             field->name);
        }
        if (node != NULL && field->kind == FIELD_TOKEN && whole < 0) {
            return fail_with(err, err_size, "the field \"%s\" is negative", field->name);
        }
        *(int*)slot = node != NULL ? (int)whole : atoi(field->fallback);
    }
    return true;
}

static inline bool config_read_kind(const cJSON* json, char* err, size_t err_size) {
    const cJSON* type = config_get(json, "model_type");
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "qwen3_moe") != 0) {
        return fail_with(err, err_size, "\"model_type\" is \"%.100s\", only \"qwen3_moe\" is implemented",
                         cJSON_IsString(type) ? type->valuestring : "");
    }
    const cJSON* names = config_get(json, "architectures");
    bool known = names == NULL || (cJSON_IsArray(names) && names->child == NULL);
    for (const cJSON* name = names != NULL ? names->child : NULL; name != NULL; name = name->next) {
        known = known || (cJSON_IsString(name) && strcmp(name->valuestring, "Qwen3MoeForCausalLM") == 0);
    }
    return known ||
           fail_with(err, err_size, "\"architectures\" does not name Qwen3MoeForCausalLM, the one implemented here");
}

// num_experts and num_local_experts are two names of one number, as dtype and torch_dtype are.
static inline bool config_read_experts(MoEConfig* config, const cJSON* json, char* err, size_t err_size) {
    const char* names[2] = {"num_experts", "num_local_experts"};
    int64_t found[2] = {-1, -1};
    for (int i = 0; i < 2; i++) {
        const cJSON* node = config_get(json, names[i]);
        if (node != NULL && !json_integer(node, 1, INT_MAX, &found[i])) {
            return fail_with(err, err_size, "the field \"%s\" must be a whole number of at least 1", names[i]);
        }
    }
    if (found[0] < 0 && found[1] < 0) {
        return fail_with(err, err_size, "the field \"num_experts\" (or \"num_local_experts\") is missing");
    }
    if (found[0] >= 0 && found[1] >= 0 && found[0] != found[1]) {
        return fail_with(err, err_size,
                         "\"num_experts\" is %lld but \"num_local_experts\" is %lld: remove the wrong one",
                         (long long)found[0], (long long)found[1]);
    }
    config->num_experts = (int)(found[0] >= 0 ? found[0] : found[1]);
    return true;
}

static inline bool config_read_heads(MoEConfig* config, const cJSON* json, char* err, size_t err_size) {
    int64_t value;
    const cJSON* kv = cJSON_GetObjectItemCaseSensitive(json, "num_key_value_heads");
    if (kv == NULL) { return fail_with(err, err_size, "the field \"num_key_value_heads\" is missing"); }
    value = config->num_attention_heads; // null: as many as query heads
    if (!cJSON_IsNull(kv) && !json_integer(kv, 1, INT_MAX, &value)) {
        return fail_with(err, err_size, "the field \"num_key_value_heads\" must be a whole number of at least 1");
    }
    config->num_key_value_heads = (int)value;
    const cJSON* head_dim = config_get(json, "head_dim");
    if (head_dim != NULL) {
        if (!json_integer(head_dim, 1, INT_MAX, &value)) {
            return fail_with(err, err_size, "the field \"head_dim\" must be a whole number of at least 1");
        }
    } else { // Qwen3MoeAttention then takes hidden_size / num_attention_heads
        if (config->num_attention_heads < 1 || config->hidden_size % config->num_attention_heads != 0) {
            return fail_with(err, err_size, "the field \"head_dim\" is missing, %d heads do not divide hidden_size %d",
                             config->num_attention_heads, config->hidden_size);
        }
        value = config->hidden_size / config->num_attention_heads;
    }
    config->head_dim = (int)value;
    return true;
}

static inline bool config_read_dense_layers(MoEConfig* config, const cJSON* json, char* err, size_t err_size) {
    const cJSON* list = config_get(json, "mlp_only_layers");
    config->num_mlp_only_layers = 0;
    if (list == NULL) { return true; }
    if (!cJSON_IsArray(list)) {
        return fail_with(err, err_size, "the field \"mlp_only_layers\" must be a list of layer numbers");
    }
    for (const cJSON* node = list->child; node != NULL; node = node->next) {
        int64_t layer;
        if (!json_integer(node, INT_MIN, INT_MAX, &layer)) {
            return fail_with(err, err_size, "the field \"mlp_only_layers\" must be a list of layer numbers");
        }
        if (config->num_mlp_only_layers == CONFIG_MAX_LAYERS) {
            return fail_with(err, err_size, "the field \"mlp_only_layers\" has more than %d entries",
                             CONFIG_MAX_LAYERS);
        }
        config->mlp_only_layers[config->num_mlp_only_layers++] = (int)layer;
    }
    return true;
}

// One of {rope_theta, rope_parameters.rope_theta, rope_scaling.rope_theta}: takes it over, or finds that it disagrees.
static inline bool config_take_theta(MoEConfig* config, const cJSON* node, const char* name, char* err,
                                     size_t err_size) {
    if (node == NULL) { return true; }
    if (!cJSON_IsNumber(node)) { return fail_with(err, err_size, "the field \"%s\" must be a number", name); }
    if (config->rope_theta != 0 && config->rope_theta != node->valuedouble) {
        return fail_with(err, err_size, "\"%s\" is %g but another \"rope_theta\" says %g: remove the wrong one", name,
                         node->valuedouble, config->rope_theta);
    }
    config->rope_theta = node->valuedouble;
    return true;
}

// transformers 5 writes rope_parameters, 4 wrote rope_scaling; here only the unscaled kind is implemented.
static inline bool config_read_rope_object(MoEConfig* config, const cJSON* json, const char* name, char* err,
                                           size_t err_size) {
    char full[160];
    const cJSON* rope = config_get(json, name);
    if (rope == NULL) { return true; }
    if (!cJSON_IsObject(rope)) { return fail_with(err, err_size, "the field \"%s\" must be an object or null", name); }
    for (const cJSON* node = rope->child; node != NULL; node = node->next) {
        snprintf(full, sizeof(full), "%s.%.100s", name, node->string);
        bool is_type = strcmp(node->string, "rope_type") == 0 || strcmp(node->string, "type") == 0;
        if (cJSON_IsNull(node)) {
            continue;
        } else if (is_type) {
            if (!cJSON_IsString(node) || strcmp(node->valuestring, "default") != 0) {
                return fail_with(err, err_size,
                                 "\"%s\" is \"%.100s\": RoPE scaling is not implemented, only \"default\"", full,
                                 cJSON_IsString(node) ? node->valuestring : "?");
            }
        } else if (strcmp(node->string, "rope_theta") == 0) {
            if (!config_take_theta(config, node, full, err, err_size)) { return false; }
        } else if (strcmp(node->string, "partial_rotary_factor") != 0 || !cJSON_IsNumber(node) ||
                   node->valuedouble != 1.0) {
            return fail_with(err, err_size, "the field \"%s\" is not implemented", full);
        }
    }
    return true;
}

static inline bool config_read_rope(MoEConfig* config, const cJSON* json, char* err, size_t err_size) {
    config->rope_theta = 0;
    if (!config_take_theta(config, config_get(json, "rope_theta"), "rope_theta", err, err_size)) { return false; }
    if (!config_read_rope_object(config, json, "rope_parameters", err, err_size)) { return false; }
    if (!config_read_rope_object(config, json, "rope_scaling", err, err_size)) { return false; }
    const cJSON* partial = config_get(json, "partial_rotary_factor");
    if (partial != NULL && (!cJSON_IsNumber(partial) || partial->valuedouble != 1.0)) {
        return fail_with(err, err_size, "the field \"partial_rotary_factor\" is not implemented (only 1.0)");
    }
    if (config->rope_theta == 0) { // a silent default of 10000 gives word salad, so there is none
        return fail_with(err, err_size, "\"rope_theta\" is missing (at the top or in \"rope_parameters\") or 0");
    }
    return true;
}

static inline bool config_read_switches(const cJSON* json, char* err, size_t err_size) {
    const cJSON* act = config_get(json, "hidden_act");
    if (act != NULL &&
        (!cJSON_IsString(act) || (strcmp(act->valuestring, "silu") != 0 && strcmp(act->valuestring, "swish") != 0))) {
        return fail_with(err, err_size, "\"hidden_act\" is \"%.100s\", only \"silu\" is implemented",
                         cJSON_IsString(act) ? act->valuestring : "?");
    }
    const cJSON* sliding = config_get(json, "use_sliding_window");
    if (sliding != NULL && !cJSON_IsBool(sliding)) {
        return fail_with(err, err_size, "the field \"use_sliding_window\" must be true or false");
    }
    if (cJSON_IsTrue(sliding) && config_get(json, "sliding_window") != NULL) {
        return fail_with(err, err_size, "\"use_sliding_window\" is true: sliding window attention is not implemented");
    }
    const cJSON* types = config_get(json, "layer_types");
    if (types != NULL && !cJSON_IsArray(types)) {
        return fail_with(err, err_size, "the field \"layer_types\" must be a list");
    }
    for (const cJSON* type = types != NULL ? types->child : NULL; type != NULL; type = type->next) {
        if (!cJSON_IsString(type) || strcmp(type->valuestring, "full_attention") != 0) {
            return fail_with(err, err_size, "\"layer_types\" has \"%.100s\", only \"full_attention\" is implemented",
                             cJSON_IsString(type) ? type->valuestring : "?");
        }
    }
    const char* never[] = {"attention_bias", "attention_dropout"}; // false, 0, or not there
    for (size_t i = 0; i < sizeof(never) / sizeof(never[0]); i++) {
        const cJSON* field = config_get(json, never[i]);
        if (field != NULL && !cJSON_IsFalse(field) && !(cJSON_IsNumber(field) && field->valuedouble == 0)) {
            return fail_with(err, err_size, "the field \"%s\" is not implemented (only %s)", never[i], i == 0 ? "false" : "0");
        }
    }
    const cJSON* dtype = config_get(json, "dtype");
    const cJSON* old_dtype = config_get(json, "torch_dtype");
    if (dtype != NULL && old_dtype != NULL && !cJSON_Compare(dtype, old_dtype, true)) {
        return fail_with(err, err_size, "\"dtype\" and \"torch_dtype\" differ: remove the wrong one");
    }
    return true;
}

// Every name in the file is one we know, or is switched off. What is unknown and on may change the model, so it is not
// ignored.
static inline bool config_read_unknown(const cJSON* json, char* err, size_t err_size) {
    for (const cJSON* node = json->child; node != NULL; node = node->next) {
        bool known =
            config_name_in(node->string, config_special_fields) || config_name_in(node->string, config_harmless_fields);
        for (size_t i = 0; i < NUM_CONFIG_FIELDS && !known; i++) {
            known = strcmp(node->string, config_fields[i].name) == 0;
        }
        bool zero = cJSON_IsNumber(node) && node->valuedouble == 0;
        bool empty = (cJSON_IsArray(node) || cJSON_IsObject(node)) && node->child == NULL;
        if (!known && !zero && !empty && !cJSON_IsNull(node) && !cJSON_IsFalse(node)) {
            return fail_with(err, err_size, "the field \"%.100s\" is not known and may change the model; %s",
                             node->string, "remove it if it does not");
        }
    }
    return true;
}

static inline bool config_from_json(MoEConfig* config, const cJSON* json, char* err, size_t err_size) {
    memset(config, 0, sizeof(*config));
    if (!config_read_kind(json, err, err_size)) { return false; }
    for (size_t i = 0; i < NUM_CONFIG_FIELDS; i++) {
        if (!config_read_field(config, json, &config_fields[i], err, err_size)) { return false; }
    }
    return config_read_experts(config, json, err, err_size) && config_read_heads(config, json, err, err_size) &&
           config_read_dense_layers(config, json, err, err_size) && config_read_rope(config, json, err, err_size) &&
           config_read_switches(json, err, err_size) && config_read_unknown(json, err, err_size) &&
           config_check(config, err, err_size);
}

// Reads a Hugging Face config.json; `path` is the file or the folder it lies in. False and one line in err (path,
// field, reason) if the file cannot be read, contradicts itself, or asks for something that is not implemented. What is
// read has passed config_check.
static inline bool config_read(MoEConfig* config, const char* path, char* err, size_t err_size) {
    struct stat st;
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    char* file = folder ? str_format("%s/config.json", path) : strdupCheck(path);
    char reason[1024];
    cJSON* json = json_read_file(file, CONFIG_MAX_FILE_BYTES, err, err_size);
    bool ok = json != NULL;
    if (ok && !config_from_json(config, json, reason, sizeof(reason))) {
        ok = fail_with(err, err_size, "%s: %s", file, reason);
    }
    cJSON_Delete(json);
    free(file);
    return ok;
}

// ----------------------------------------------------------------------------
// writing

// config.json so that transformers 4 and 5 both open it: renamed fields are there under both names. dtype is "float32"
// or "bfloat16", the type of the weights beside it. The caller owns the result.
static inline cJSON* config_to_json(const MoEConfig* config, const char* dtype) {
    cJSON* json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "model_type", "qwen3_moe");
    cJSON_AddItemToArray(cJSON_AddArrayToObject(json, "architectures"), cJSON_CreateString("Qwen3MoeForCausalLM"));
    for (size_t i = 0; i < NUM_CONFIG_FIELDS; i++) {
        const ConfigField* field = &config_fields[i];
        const char* slot = (const char*)config + field->offset;
        int whole = field->kind == FIELD_INT || field->kind == FIELD_TOKEN ? *(const int*)slot : 0;
        switch (field->kind) {
            case FIELD_BOOL:  cJSON_AddBoolToObject(json, field->name, *(const bool*)slot); break;
            case FIELD_FLOAT: json_add_float(json, field->name, *(const double*)slot); break;
            case FIELD_INT:   cJSON_AddNumberToObject(json, field->name, whole); break;
            case FIELD_TOKEN:
                cJSON_AddItemToObject(json, field->name, whole < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(whole));
                break;
        }
    }
    cJSON_AddNumberToObject(json, "num_key_value_heads", config->num_key_value_heads);
    cJSON_AddNumberToObject(json, "head_dim", config->head_dim);
    cJSON_AddNumberToObject(json, "num_experts", config->num_experts);
    cJSON_AddNumberToObject(json, "num_local_experts", config->num_experts);
    cJSON_AddItemToObject(json, "mlp_only_layers",
                          cJSON_CreateIntArray(config->mlp_only_layers, config->num_mlp_only_layers));
    json_add_float(json, "rope_theta", config->rope_theta);
    cJSON_AddNullToObject(json, "rope_scaling");
    cJSON* rope = cJSON_AddObjectToObject(json, "rope_parameters");
    json_add_float(rope, "rope_theta", config->rope_theta);
    cJSON_AddStringToObject(rope, "rope_type", "default");
    cJSON_AddStringToObject(json, "hidden_act", "silu");
    cJSON_AddBoolToObject(json, "attention_bias", false);
    json_add_float(json, "attention_dropout", 0.0);
    cJSON_AddBoolToObject(json, "use_sliding_window", false);
    cJSON_AddNullToObject(json, "sliding_window");
    cJSON_AddBoolToObject(json, "use_cache", true);
    cJSON_AddStringToObject(json, "dtype", dtype);
    cJSON_AddStringToObject(json, "torch_dtype", dtype);
    return json;
}

// Writes config.json to path (a file). Fatal if that fails.
static inline void config_write(const MoEConfig* config, const char* path, const char* dtype) {
    cJSON* json = config_to_json(config, dtype);
    json_write_file(json, path);
    cJSON_Delete(json);
}

#endif
