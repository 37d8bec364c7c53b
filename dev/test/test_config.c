// test_config.c: config.h against Hugging Face's files, its parameter table against independent counts, bad configs.
// Run from the repository's root.
#include "testing.h"
#include "../../llmc/config.h"

static const char* hub_text =
    "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"attention_bias\": false, \"attention_dropout\": 0.0,"
    " \"bos_token_id\": 1, \"decoder_sparse_step\": 1, \"eos_token_id\": 2, \"head_dim\": 16, \"hidden_act\": \"silu\","
    " \"hidden_size\": 48, \"initializer_range\": 0.02, \"intermediate_size\": 96, \"max_position_embeddings\": 4096,"
    " \"max_window_layers\": 2, \"mlp_only_layers\": [], \"model_type\": \"qwen3_moe\", \"moe_intermediate_size\": 24,"
    " \"norm_topk_prob\": true, \"num_attention_heads\": 4, \"num_experts\": 8, \"num_experts_per_tok\": 2,"
    " \"num_hidden_layers\": 3, \"num_key_value_heads\": 2, \"output_router_logits\": false, \"rms_norm_eps\": 1e-06,"
    " \"rope_scaling\": null, \"rope_theta\": 1000000.0, \"router_aux_loss_coef\": 0.001, \"sliding_window\": null,"
    " \"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\", \"transformers_version\": \"4.51.0\","
    " \"use_cache\": true, \"use_sliding_window\": false, \"vocab_size\": 100}";

// ----------------------------------------------------------------------------
// one changed field at a time

static bool read_text(MoEConfig* config, const char* text, char* err, size_t err_size) {
    char* path = str_format("%s/config.json", test_folder());
    test_write_file(path, text, strlen(text));
    bool ok = config_read(config, test_folder(), err, err_size);
    free(path);
    return ok;
}

// hub_text with `name` set to the JSON text `value` (NULL: removed)
static bool read_changed(MoEConfig* config, const char* name, const char* value, char* err, size_t err_size) {
    cJSON* json = cJSON_Parse(hub_text);
    cJSON_DeleteItemFromObjectCaseSensitive(json, name);
    if (value != NULL) { cJSON_AddRawToObject(json, name, value); }
    char* text = cJSON_Print(json);
    bool ok = read_text(config, text, err, err_size);
    cJSON_free(text);
    cJSON_Delete(json);
    return ok;
}

static void refused(const char* name, const char* value, const char* reason, int line) {
    MoEConfig config;
    char err[1200] = "";
    bool ok = read_changed(&config, name, value, err, sizeof(err));
    test_check(!ok, __FILE__, line, "%s = %s is accepted", name, value != NULL ? value : "(missing)");
    test_contains(err, reason, __FILE__, line);
    test_contains(err, "config.json", __FILE__, line);
}

static void accepted(MoEConfig* config, const char* name, const char* value, int line) {
    char err[1200] = "";
    bool ok = read_changed(config, name, value, err, sizeof(err));
    test_check(ok, __FILE__, line, "%s = %s: %s", name, value != NULL ? value : "(missing)", err);
}

#define REFUSED(name, value, reason) refused(name, value, reason, __LINE__)
#define ACCEPTED(config, name, value) accepted(config, name, value, __LINE__)

// ----------------------------------------------------------------------------
// reading and writing

static void every_golden_config_reads(void) {
    static const char* const names[] = {"mha_top2", "tied", "aux", "odd", "mixed", "docs", "wide", "formats/per_expert",
                                        "formats/fused", "formats/sharded", "formats/bf16", "formats/fp16",
                                        "formats/hub_spelling"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        MoEConfig config;
        char err[1200] = "";
        char* dir = str_format("dev/test/goldens/%s", names[i]);
        test_check(config_read(&config, dir, err, sizeof(err)), __FILE__, __LINE__, "%s: %s", names[i], err);
        free(dir);
    }
}

static void both_spellings_give_the_same_config(void) {
    MoEConfig a, b;
    char err[1200] = "";
    CHECK(config_read(&a, "dev/test/goldens/formats/per_expert", err, sizeof(err)));
    CHECK(config_read(&b, "dev/test/goldens/formats/hub_spelling/config.json", err, sizeof(err)));
    CHECK(memcmp(&a, &b, sizeof(a)) == 0);
    CHECK(a.num_experts == 4 && a.num_experts_per_tok == 2 && a.rope_theta == 50000 && a.rms_norm_eps == 1e-5);
    CHECK(a.num_mlp_only_layers == 1 && a.mlp_only_layers[0] == 1 && a.bos_token_id == -1 && a.vocab_size == 43);
    CHECK(config_layer_is_moe(&a, 0) && !config_layer_is_moe(&a, 1) && config_layer_is_moe(&a, 2));
}

static void written_configs_read_back_equal(void) {
    static const char* const presets[] = {"smol-500m", "demo", "tiny"};
    char err[1200] = "";
    char* path = str_format("%s/written.json", test_folder());
    for (int i = 0; i < 4; i++) {
        MoEConfig a, b;
        if (i < 3) { CHECK(config_preset(&a, presets[i])); }
        else { CHECK(config_read(&a, "dev/test/goldens/mixed", err, sizeof(err))); }
        a.rms_norm_eps = 1.0 / 3 * 1e-5; // needs all 17 digits
        CHECK(config_check(&a, err, sizeof(err)));
        config_write(&a, path, "float32");
        test_check(config_read(&b, path, err, sizeof(err)), __FILE__, __LINE__, "%s", err);
        CHECK(memcmp(&a, &b, sizeof(a)) == 0);
    }
    MoEConfig c;
    CHECK(!config_preset(&c, "smol"));
    free(path);
}

static void floats_are_written_as_floats(void) { // transformers 5 checks types: 10000000 is not a float there
    MoEConfig config;
    config_preset(&config, "demo");
    config.router_aux_loss_coef = 0;
    char* path = str_format("%s/written.json", test_folder());
    config_write(&config, path, "bfloat16");
    char text[4096] = "";
    FILE* fp = fopenCheck(path, "rb");
    CHECK(fread(text, 1, sizeof(text) - 1, fp) > 0);
    fclose(fp);
    CHECK_CONTAINS(text, "\"rope_theta\":\t10000.0");
    CHECK_CONTAINS(text, "\"router_aux_loss_coef\":\t0.0");
    CHECK_CONTAINS(text, "\"dtype\":\t\"bfloat16\"");
    free(path);
}

static void rope_theta_is_found_at_either_place(void) { // known-faults C10
    MoEConfig c;
    ACCEPTED(&c, "rope_theta", "5000.0");
    CHECK(c.rope_theta == 5000);
    ACCEPTED(&c, "rope_parameters", "{\"rope_theta\": 1e6, \"rope_type\": \"default\"}");
    CHECK(c.rope_theta == 1e6);
    ACCEPTED(&c, "rope_scaling", "{\"type\": \"default\"}");
    REFUSED("rope_parameters", "{\"rope_theta\": 10000.0, \"rope_type\": \"default\"}", "rope_parameters.rope_theta");
    REFUSED("rope_theta", NULL, "rope_theta");
    REFUSED("rope_theta", "null", "rope_theta");
    REFUSED("rope_theta", "\"1e6\"", "rope_theta");
    REFUSED("rope_theta", "-1", "rope_theta");
    REFUSED("rope_theta", "1e999", "rope_theta");
    REFUSED("rope_parameters", "{\"rope_theta\": 1e6, \"rope_type\": \"yarn\", \"factor\": 4.0}",
            "rope_parameters.rope_type");
    REFUSED("rope_parameters", "{\"full_attention\": {\"rope_theta\": 1e6}}", "rope_parameters.full_attention");
    REFUSED("rope_scaling", "{\"type\": \"linear\", \"factor\": 2.0}", "rope_scaling.type");
    REFUSED("rope_scaling", "{\"rope_type\": \"default\", \"factor\": 2.0}", "rope_scaling.factor");
    REFUSED("rope_scaling", "2.0", "rope_scaling");
    REFUSED("partial_rotary_factor", "0.5", "partial_rotary_factor");
}

static void what_is_not_implemented_is_refused_by_name(void) {
    REFUSED("attention_bias", "true", "\"attention_bias\" is not implemented (only false)");
    REFUSED("attention_dropout", "0.1", "\"attention_dropout\" is not implemented (only 0)");
    REFUSED("hidden_act", "\"gelu\"", "hidden_act");
    REFUSED("hidden_act", "3", "hidden_act");
}

static void a_sliding_window_in_use_is_refused(void) {
    cJSON* json = cJSON_Parse(hub_text);
    cJSON_ReplaceItemInObjectCaseSensitive(json, "use_sliding_window", cJSON_CreateTrue());
    cJSON_ReplaceItemInObjectCaseSensitive(json, "sliding_window", cJSON_CreateNumber(4096));
    char* text = cJSON_Print(json);
    char err[1200] = "";
    MoEConfig c;
    CHECK(!read_text(&c, text, err, sizeof(err)));
    CHECK_CONTAINS(err, "use_sliding_window");
    cJSON_free(text);
    cJSON_Delete(json);
    ACCEPTED(&c, "sliding_window", "4096"); // not in use, as transformers 4 writes it
    REFUSED("layer_types", "[\"full_attention\", \"sliding_attention\", \"full_attention\"]", "layer_types");
    ACCEPTED(&c, "layer_types", "[\"full_attention\", \"full_attention\", \"full_attention\"]");
}

static void another_architecture_is_refused(void) {
    REFUSED("model_type", "\"qwen2_moe\"", "model_type");
    REFUSED("model_type", "\"qwen3\"", "model_type");
    REFUSED("model_type", NULL, "model_type");
    REFUSED("architectures", "[\"Qwen2MoeForCausalLM\"]", "architectures");
    REFUSED("architectures", "\"Qwen3MoeForCausalLM\"", "architectures");
    REFUSED("quantization_config", "{\"quant_method\": \"fp8\"}", "quantization_config");
    REFUSED("shared_expert_intermediate_size", "512", "shared_expert_intermediate_size");
    REFUSED("routed_scaling_factor", "2.5", "routed_scaling_factor");
    REFUSED("auto_map", "{\"AutoModel\": \"model.Mine\"}", "auto_map");
    REFUSED("text_config", "{\"hidden_size\": 3}", "text_config");
    REFUSED("my_own_field", "\"on\"", "my_own_field");
}

static void harmless_fields_are_accepted(void) {
    MoEConfig c;
    ACCEPTED(&c, "_name_or_path", "\"some/where\"");
    ACCEPTED(&c, "use_cache", "false");
    ACCEPTED(&c, "my_own_field", "false");
    ACCEPTED(&c, "quantization_config", "null");
    ACCEPTED(&c, "num_shared_experts", "0");
    ACCEPTED(&c, "torch_dtype", NULL);
    ACCEPTED(&c, "architectures", NULL);
    ACCEPTED(&c, "eos_token_id", "[5, 6]");
    CHECK(c.eos_token_id == 5);
}

// ----------------------------------------------------------------------------
// values

static void missing_sizes_are_refused_by_name(void) {
    static const char* const names[] = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                                        "num_key_value_heads", "num_experts", "num_experts_per_tok",
                                        "moe_intermediate_size"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) { REFUSED(names[i], NULL, names[i]); }
}

static void missing_fields_have_hugging_faces_defaults(void) {
    MoEConfig c;
    ACCEPTED(&c, "norm_topk_prob", NULL);
    CHECK(!c.norm_topk_prob);
    ACCEPTED(&c, "tie_word_embeddings", NULL);
    CHECK(!c.tie_word_embeddings);
    ACCEPTED(&c, "rms_norm_eps", NULL);
    CHECK(c.rms_norm_eps == 1e-6);
    ACCEPTED(&c, "router_aux_loss_coef", NULL);
    CHECK(c.router_aux_loss_coef == 0.001);
    ACCEPTED(&c, "num_key_value_heads", "null");
    CHECK(c.num_key_value_heads == 4);
    REFUSED("head_dim", NULL, "head_dim is 12"); // 48 / 4, not a multiple of 8
    ACCEPTED(&c, "eos_token_id", "null");
    CHECK(c.eos_token_id == -1);
}

static void wrong_types_and_ranges_are_refused_by_name(void) {
    static const char* const sizes[] = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                                        "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok",
                                        "moe_intermediate_size", "intermediate_size", "decoder_sparse_step"};
    static const char* const values[] = {"0", "-1", "1.5", "\"8\"", "true", "[8]", "{}", "1e300", "4294967304"};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (size_t j = 0; j < sizeof(values) / sizeof(values[0]); j++) { REFUSED(sizes[i], values[j], sizes[i]); }
    }
    REFUSED("norm_topk_prob", "1", "norm_topk_prob");
    REFUSED("tie_word_embeddings", "\"false\"", "tie_word_embeddings");
    REFUSED("rms_norm_eps", "0", "rms_norm_eps");
    REFUSED("rms_norm_eps", "\"1e-6\"", "rms_norm_eps");
    REFUSED("initializer_range", "-0.02", "initializer_range");
    REFUSED("router_aux_loss_coef", "-1", "router_aux_loss_coef");
    REFUSED("mlp_only_layers", "[3]", "mlp_only_layers");
    REFUSED("mlp_only_layers", "[-1]", "mlp_only_layers");
    REFUSED("mlp_only_layers", "1", "mlp_only_layers");
    REFUSED("mlp_only_layers", "[\"a\"]", "mlp_only_layers");
    REFUSED("eos_token_id", "100", "eos_token_id");
    REFUSED("bos_token_id", "-1", "bos_token_id");
}

static void contradictions_are_refused_by_name(void) {
    MoEConfig c;
    ACCEPTED(&c, "num_local_experts", "8");
    REFUSED("num_local_experts", "16", "num_local_experts");
    REFUSED("dtype", "\"float32\"", "torch_dtype");
    ACCEPTED(&c, "dtype", "\"bfloat16\"");
    REFUSED("num_experts_per_tok", "9", "num_experts_per_tok");
    REFUSED("num_key_value_heads", "3", "num_key_value_heads");
    REFUSED("head_dim", "12", "head_dim");
    REFUSED("head_dim", "136", "head_dim");
    REFUSED("num_hidden_layers", "1025", "num_hidden_layers");
    REFUSED("vocab_size", "2000000000", "too large");
}

static void broken_files_are_refused_with_their_path(void) {
    static const char* const texts[] = {
        "", "{", "[]", "3", "{\"a\": 1} x", "\xff\xfe{}", "{\"vocab_size\": NaN}", "{\"a\": \"\xc3\"}"};
    MoEConfig c;
    char err[1200];
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        err[0] = '\0';
        CHECK(!read_text(&c, texts[i], err, sizeof(err)));
        CHECK_CONTAINS(err, "config.json");
    }
    CHECK(!read_text(&c, "{\"vocab_size\": 1, \"vocab_size\": 2}", err, sizeof(err)));
    CHECK_CONTAINS(err, "\"vocab_size\" stands there twice");
    CHECK(!config_read(&c, "/nowhere/at/all", err, sizeof(err)));
    CHECK_CONTAINS(err, "/nowhere/at/all");
    CHECK(!config_read(&c, "/dev/null", err, sizeof(err)));
}

static void layers_are_dense_by_sparse_step_and_by_list(void) { // (l + 1) % step == 0, as Qwen3MoeDecoderLayer
    MoEConfig c;
    ACCEPTED(&c, "decoder_sparse_step", "2");
    CHECK(!config_layer_is_moe(&c, 0) && config_layer_is_moe(&c, 1) && !config_layer_is_moe(&c, 2));
    ACCEPTED(&c, "decoder_sparse_step", "3");
    CHECK(!config_layer_is_moe(&c, 0) && !config_layer_is_moe(&c, 1) && config_layer_is_moe(&c, 2));
    ACCEPTED(&c, "mlp_only_layers", "[0, 2]");
    CHECK(!config_layer_is_moe(&c, 0) && config_layer_is_moe(&c, 1) && !config_layer_is_moe(&c, 2));
}

// ----------------------------------------------------------------------------
// the parameter table

static void the_table_lies_as_the_trainer_computes(void) {
    MoEConfig c;
    char err[1200];
    CHECK(config_read(&c, "dev/test/goldens/mixed", err, sizeof(err)));
    ParamTable t;
    param_table_build(&t, &c);
    size_t at = 0, C = (size_t)c.hidden_size, F = (size_t)c.moe_intermediate_size, HD = (size_t)c.head_dim;
    size_t A = (size_t)c.num_attention_heads * HD, KV = (size_t)c.num_key_value_heads * HD, E = (size_t)c.num_experts;
    for (size_t i = 0; i < t.count; i++) { // no gap, no overlap
        CHECK(t.tensors[i].offset == at);
        CHECK(param_find(&t, "%s", t.tensors[i].name) == &t.tensors[i]);
        CHECK(t.tensors[i].decays == (t.tensors[i].ndim == 2) && (t.tensors[i].init_std > 0) == t.tensors[i].decays);
        at += t.tensors[i].numel;
    }
    CHECK(at == t.num_parameters);
    int dense = 0;
    for (int l = 0; l < c.num_hidden_layers; l++) {
        size_t q = param_find(&t, "model.layers.%d.self_attn.q_proj.weight", l)->offset;
        CHECK(param_find(&t, "model.layers.%d.self_attn.k_proj.weight", l)->offset == q + A * C);
        CHECK(param_find(&t, "model.layers.%d.self_attn.v_proj.weight", l)->offset == q + (A + KV) * C);
        if (!config_layer_is_moe(&c, l)) {
            dense++;
            CHECK(param_lookup(&t, "model.layers.0.mlp.gate.weight") == NULL || l != 0);
            CHECK(param_find(&t, "model.layers.%d.mlp.up_proj.weight", l)->shape[0] == (size_t)c.intermediate_size);
            continue;
        }
        size_t g = param_find(&t, "model.layers.%d.mlp.experts.0.gate_proj.weight", l)->offset;
        for (size_t e = 0; e < E; e++) {
            const ParamTensor* up = param_find(&t, "model.layers.%d.mlp.experts.%zu.up_proj.weight", l, e);
            CHECK(up->offset == g + (2 * e + 1) * F * C && up->expert == (int)e && up->layer == l);
            CHECK(param_find(&t, "model.layers.%d.mlp.experts.%zu.down_proj.weight", l, e)->offset ==
                  g + (2 * E + e) * F * C);
        }
    }
    CHECK(dense > 0);
    EXPECT_FATAL(param_find(&t, "model.layers.%d.nothing", 3), "model.layers.3.nothing");
    param_table_free(&t);
}

static void presets_have_the_published_sizes(void) {
    MoEConfig c;
    ParamTable t;
    CHECK(config_preset(&c, "smol-500m"));
    param_table_build(&t, &c);
    size_t V = 151936, C = 896, layer = 4 * 1024 * C + 16 * C + 2 * C + 2 * 64, expert = 3 * 512 * C;
    CHECK(t.num_parameters == 2 * V * C + C + 12 * (layer + 16 * expert));
    CHECK(t.num_parameters / 1000000 == 580 && t.num_active / 1000000 == 349);
    CHECK(t.num_active == 2 * V * C + C + 12 * (layer + 2 * expert));
    CHECK(t.num_matmul_active == V * C + 12 * (4 * 1024 * C + 16 * C + 2 * expert));
    // a token at T = 4096: 6 FLOP a matmul parameter and the causal half of attention, 6 * T * heads * head_dim a layer
    double flop = 6.0 * (double)t.num_matmul_active + 12 * 6.0 * 4096 * 1024;
    CHECK_NEAR(flop / 1e9, 1.582, 0.001);
    param_table_free(&t);
}

static void a_tied_head_counts_once(void) {
    MoEConfig c;
    ParamTable tied, untied;
    CHECK(config_preset(&c, "tiny"));
    param_table_build(&untied, &c);
    c.tie_word_embeddings = true;
    param_table_build(&tied, &c);
    CHECK(param_lookup(&tied, "lm_head.weight") == NULL);
    CHECK(tied.num_parameters + 257 * 64 == untied.num_parameters);
    CHECK(tied.num_matmul_active == untied.num_matmul_active);
    param_table_free(&tied);
    param_table_free(&untied);
}

static void a_30b_model_is_counted_in_64_bits(void) { // known-faults N3: the published Qwen3-30B-A3B
    MoEConfig c;
    ParamTable t;
    CHECK(config_preset(&c, "tiny"));
    c.vocab_size = 151936; c.hidden_size = 2048; c.num_hidden_layers = 48; c.num_attention_heads = 32;
    c.num_key_value_heads = 4;
    c.head_dim = 128;
    c.num_experts = 128;
    c.num_experts_per_tok = 8;
    c.moe_intermediate_size = 768;
    param_table_build(&t, &c);
    CHECK(t.num_parameters == (size_t)30532122624u);
    CHECK(t.count == 48 * (9 + 3 * 128) + 3);
    param_table_free(&t);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(every_golden_config_reads);
    RUN(both_spellings_give_the_same_config);
    RUN(written_configs_read_back_equal);
    RUN(floats_are_written_as_floats);
    RUN(rope_theta_is_found_at_either_place);
    RUN(what_is_not_implemented_is_refused_by_name);
    RUN(a_sliding_window_in_use_is_refused);
    RUN(another_architecture_is_refused);
    RUN(harmless_fields_are_accepted);
    RUN(missing_sizes_are_refused_by_name);
    RUN(missing_fields_have_hugging_faces_defaults);
    RUN(wrong_types_and_ranges_are_refused_by_name);
    RUN(contradictions_are_refused_by_name);
    RUN(broken_files_are_refused_with_their_path);
    RUN(layers_are_dense_by_sparse_step_and_by_list);
    RUN(the_table_lies_as_the_trainer_computes);
    RUN(presets_have_the_published_sizes);
    RUN(a_tied_head_counts_once);
    RUN(a_30b_model_is_counted_in_64_bits);
    return test_summary();
}
