// test_hf_folder.c: hf_folder_load reads every form of folder that transformers writes, and refuses wrong ones by name.
// Run from the repository's root.
#include "testing.h"
#include "../../llmc/hf_folder.h"

#define FORMATS "dev/test/goldens/formats/"

// ----------------------------------------------------------------------------
// a model in memory

typedef struct { MoEConfig config; ParamTable table; float* weights; } Model;

static void store_weights(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count,
                          const float* values) {
    CHECK(strcmp(what, "weight") == 0);
    memcpy((float*)ctx + t->offset + begin, values, count * sizeof(float));
}

static void model_read(Model* m, const char* dir) {
    char err[1200];
    if (!config_read(&m->config, dir, err, sizeof(err))) { fatal("%s", err); }
    param_table_build(&m->table, &m->config);
    m->weights = (float*)callocCheck(m->table.num_parameters, sizeof(float));
    hf_folder_load(dir, &m->config, &m->table, store_weights, m->weights);
}

static void model_free(Model* m) {
    param_table_free(&m->table);
    free(m->weights);
}

static void read_and_leave(const char* dir) { // for EXPECT_FATAL
    Model m;
    model_read(&m, dir);
}

// ----------------------------------------------------------------------------
// right folders

static void every_parameter_gets_the_tensor_of_its_name(void) {
    static const char* const names[] = {"mha_top2", "tied", "aux", "odd", "mixed", "docs", "wide"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        Model m;
        SafeTensors st;
        char err[1200];
        char* dir = str_format("dev/test/goldens/%s", names[i]);
        char* path = str_format("%s/model.safetensors", dir);
        model_read(&m, dir);
        CHECK(st_open(&st, path, err, sizeof(err)));
        CHECK(st.count == m.table.count);
        for (size_t t = 0; t < m.table.count; t++) {
            const ParamTensor* p = &m.table.tensors[t];
            CHECK(memcmp(m.weights + p->offset, st_find(&st, p->name)->data, p->numel * sizeof(float)) == 0);
        }
        st_close(&st);
        model_free(&m);
        free(path);
        free(dir);
    }
}

static void fused_sharded_and_renamed_folders_give_the_same_weights(void) { // known-faults C8
    static const char* const names[] = {"fused", "sharded", "hub_spelling"};
    Model reference;
    model_read(&reference, FORMATS "per_expert");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        Model m;
        char* dir = str_format(FORMATS "%s", names[i]);
        model_read(&m, dir);
        bool same = m.table.num_parameters == reference.table.num_parameters &&
                    memcmp(m.weights, reference.weights, m.table.num_parameters * sizeof(float)) == 0;
        test_check(same, __FILE__, __LINE__, "%s differs from per_expert", names[i]);
        model_free(&m);
        free(dir);
    }
    model_free(&reference);
}

static void half_precision_folders_are_the_rounded_weights(void) { // known-faults C11
    Model reference, bf16, fp16;
    model_read(&reference, FORMATS "per_expert");
    model_read(&bf16, FORMATS "bf16");
    model_read(&fp16, FORMATS "fp16");
    for (size_t i = 0; i < reference.table.num_parameters; i++) {
        float w = reference.weights[i];
        CHECK(bf16.weights[i] == bf16_to_f32(f32_to_bf16(w)));
        CHECK_NEAR(fp16.weights[i], w, fabsf(w) * ldexpf(1, -11) + ldexpf(1, -25)); // half a unit of its 11 bits
    }
    model_free(&reference);
    model_free(&bf16);
    model_free(&fp16);
}

// ----------------------------------------------------------------------------
// wrong folders: a small model written with one fault

typedef struct {
    const char* name;       // of the tensor that is wrong
    bool missing, transposed, not_a_float;
    float value;            // of its element 5, if not 0
    const char* extra;      // one more tensor of that name ...
    int extra_ndim;
    size_t extra_shape[3];
    bool extra_is_embedding; // ... with the embedding's values (else zeros)
    bool tied;
} Fault;

static float value_of(size_t i) { return (float)(i % 1000) * 1e-3f - 0.5f; }

static void declare_tensor(StWriter* w, const ParamTensor* p, const Fault* f) {
    bool hit = f->name != NULL && strcmp(f->name, p->name) == 0;
    size_t shape[2] = {p->shape[0], p->shape[1]};
    if (hit && f->missing) { return; }
    if (hit && f->transposed) { shape[0] = p->shape[1]; shape[1] = p->shape[0]; }
    st_writer_declare(w, p->name, hit && f->not_a_float ? ST_I32 : ST_F32, p->ndim, shape);
}

static void write_tensor(StWriter* w, const ParamTensor* p, const Fault* f, size_t offset) {
    bool hit = f->name != NULL && strcmp(f->name, p->name) == 0;
    if (hit && f->missing) { return; }
    float* values = (float*)mallocCheck(p->numel * sizeof(float));
    for (size_t i = 0; i < p->numel; i++) { values[i] = value_of(offset + i); }
    if (hit && f->value != 0) { values[5] = f->value; }
    st_writer_data(w, values, p->numel * sizeof(float));
    free(values);
}

// Writes OUT/faulty: config.json and model.safetensors of a tiny model. Returns the path.
static char* write_folder(const Fault* f) {
    MoEConfig config;
    ParamTable table;
    StWriter w;
    char* dir = str_format("%s/faulty", test_folder());
    char* config_path = str_format("%s/config.json", dir);
    char* path = str_format("%s/model.safetensors", dir);
    folder_make(dir);
    config_preset(&config, "tiny");
    config.tie_word_embeddings = f->tied;
    config_write(&config, config_path, "float32");
    param_table_build(&table, &config);
    st_writer_open(&w, path);
    for (size_t i = 0; i < table.count; i++) { declare_tensor(&w, &table.tensors[i], f); }
    if (f->extra != NULL) { st_writer_declare(&w, f->extra, ST_F32, f->extra_ndim, f->extra_shape); }
    st_writer_header(&w);
    for (size_t i = 0; i < table.count; i++) { write_tensor(&w, &table.tensors[i], f, table.tensors[i].offset); }
    if (f->extra != NULL) {
        size_t n = 1;
        for (int d = 0; d < f->extra_ndim; d++) { n *= f->extra_shape[d]; }
        for (size_t i = 0; i < n; i++) {
            float value = f->extra_is_embedding ? value_of(i) : 0; // the embedding is the first tensor, at offset 0
            st_writer_f32(&w, &value, 1);
        }
    }
    st_writer_close(&w);
    param_table_free(&table);
    free(config_path);
    free(path);
    return dir;
}

static void refused(const Fault* f, const char* reason) {
    char* dir = write_folder(f);
    EXPECT_FATAL(read_and_leave(dir), reason);
    free(dir);
}

static void accepted(const Fault* f) {
    char* dir = write_folder(f);
    Model m;
    model_read(&m, dir);
    CHECK(m.weights[7] == value_of(7));
    model_free(&m);
    free(dir);
}

static Fault no_fault(void) {
    Fault f;
    memset(&f, 0, sizeof(f));
    return f;
}

static void missing_tensors_are_named(void) { // known-faults C9
    Fault f = no_fault();
    accepted(&f);
    f.missing = true;
    f.name = "model.layers.1.mlp.experts.2.up_proj.weight";
    refused(&f, "model.layers.1.mlp.experts.2.up_proj.weight is missing");
    f.name = "model.norm.weight";
    refused(&f, "model.norm.weight is missing");
    f.name = "lm_head.weight";
    refused(&f, "lm_head.weight is missing; is \"tie_word_embeddings\"");
}

static void a_tied_model_accepts_only_an_equal_head(void) { // known-faults C9
    Fault f = no_fault();
    f.tied = true;
    accepted(&f);
    f.extra = "lm_head.weight";
    f.extra_ndim = 2;
    f.extra_shape[0] = 257;
    f.extra_shape[1] = 64;
    refused(&f, "lm_head.weight differs from the embedding");
    f.extra_is_embedding = true;
    accepted(&f);
    f.extra_shape[0] = 256;
    refused(&f, "lm_head.weight has shape [256, 64]");
}

static void unexpected_tensors_are_named(void) {
    static const char* const names[] = {"model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias",
                                        "lm_head.bias", "embed_tokens.weight",
                                        "model.layers.0.mlp.experts.4.up_proj.weight",
                                        "model.layers.0.mlp.shared_expert.up_proj.weight",
                                        "model.layers.0.mlp.gate_proj.weight",
                                        "model.layers.7.mlp.experts.down_proj",
                                        "model.layers. 0.mlp.experts.down_proj"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        Fault f = no_fault();
        f.extra = names[i];
        f.extra_ndim = 1;
        f.extra_shape[0] = 64;
        refused(&f, names[i]);
    }
}

static void wrong_shapes_are_named_with_both_shapes(void) {
    Fault f = no_fault();
    f.transposed = true;
    f.name = "model.layers.0.mlp.experts.0.down_proj.weight";
    refused(&f, "model.layers.0.mlp.experts.0.down_proj.weight has shape [32, 64], the config asks for [64, 32]");
    f = no_fault();
    f.extra = "model.layers.0.mlp.experts.gate_up_proj"; // fused, but only one half
    f.extra_ndim = 3;
    f.extra_shape[0] = 4;
    f.extra_shape[1] = 32;
    f.extra_shape[2] = 64;
    refused(&f, "has shape [4, 32, 64], the config asks for [4, 64, 64]");
    f.extra_shape[1] = 64; // right, but the experts are there one by one already
    refused(&f, "a second time");
}

static void values_that_are_not_finite_are_named(void) {
    Fault f = no_fault();
    f.name = "model.layers.1.self_attn.o_proj.weight";
    f.value = NAN;
    refused(&f, "model.layers.1.self_attn.o_proj.weight has the value nan at element 5");
    f.value = -INFINITY;
    refused(&f, "model.layers.1.self_attn.o_proj.weight has the value -inf at element 5");
    f.value = 3e38f; // large but a number
    accepted(&f);
}

static void types_that_are_not_weights_are_named(void) {
    Fault f = no_fault();
    f.name = "model.layers.0.mlp.gate.weight";
    f.not_a_float = true;
    refused(&f, "model.layers.0.mlp.gate.weight has dtype I32");
}

static void a_folder_without_weights_says_what_it_lacks(void) {
    Fault f = no_fault();
    char* dir = write_folder(&f);
    char* path = str_format("%s/model.safetensors", dir);
    Model m;
    model_read(&m, dir);
    if (truncate(path, 1000000 / 4) != 0) { CHECK(false); }
    EXPECT_FATAL(read_and_leave(dir), "cut off");
    remove(path);
    EXPECT_FATAL(read_and_leave(dir), "neither model.safetensors nor model.safetensors.index.json");
    EXPECT_FATAL(hf_folder_load("/dev/null", &m.config, &m.table, store_weights, m.weights), "not a folder");
    EXPECT_FATAL(hf_folder_load("/nowhere", &m.config, &m.table, store_weights, m.weights), "not a folder");
    model_free(&m);
    free(path);
    free(dir);
}

// ----------------------------------------------------------------------------
// an index that does not fit its shards

static void copy_folder(const char* from, const char* to) {
    size_t count;
    char** names = folder_list(from, "", &count);
    folder_make(to);
    for (size_t i = 0; i < count; i++) {
        char* a = str_format("%s/%s", from, names[i]);
        char* b = str_format("%s/%s", to, names[i]);
        file_copy(a, b);
        free(a);
        free(b);
    }
    folder_list_free(names);
}

// The sharded golden with one entry of its index replaced (NULL: removed).
static void index_refused(const char* tensor, const char* shard, const char* reason) {
    char err[1200];
    char* dir = str_format("%s/sharded", test_folder());
    copy_folder(FORMATS "sharded", dir);
    char* path = str_format("%s/model.safetensors.index.json", dir);
    cJSON* index = json_read_file(path, 1 << 20, err, sizeof(err));
    cJSON* map = cJSON_GetObjectItemCaseSensitive(index, "weight_map");
    cJSON_DeleteItemFromObjectCaseSensitive(map, tensor);
    if (shard != NULL) { cJSON_AddStringToObject(map, tensor, shard); }
    json_write_file(index, path);
    cJSON_Delete(index);
    EXPECT_FATAL(read_and_leave(dir), reason);
    free(path);
    free(dir);
}

static void an_index_that_lies_is_refused(void) {
    index_refused("lm_head.weight", NULL, "tensor lm_head.weight is not what the index");
    index_refused("lm_head.weight", "model-00004-of-00004.safetensors",
                  "says that tensor lm_head.weight is in model-00004");
    index_refused("lm_head.weight", "model-00009-of-00004.safetensors", "cannot open");
    index_refused("lm_head.weight", "../sharded/model-00001-of-00004.safetensors",
                  "\"lm_head.weight\" must name a file");
    index_refused("lm_head.weight", "", "\"lm_head.weight\" must name a file");
    index_refused("model.extra.weight", "model-00001-of-00004.safetensors", "model.extra.weight");
}

static void broken_index_files_are_refused(void) {
    char* dir = str_format("%s/index", test_folder());
    copy_folder(FORMATS "sharded", dir);
    char* path = str_format("%s/model.safetensors.index.json", dir);
    test_write_file(path, "{}", 2);
    EXPECT_FATAL(read_and_leave(dir), "weight_map");
    test_write_file(path, "{\"weight_map\": {}}", 18);
    EXPECT_FATAL(read_and_leave(dir), "is missing");
    test_write_file(path, "{\"weight_map\": ", 15);
    EXPECT_FATAL(read_and_leave(dir), "not valid JSON");
    free(path);
    free(dir);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(every_parameter_gets_the_tensor_of_its_name);
    RUN(fused_sharded_and_renamed_folders_give_the_same_weights);
    RUN(half_precision_folders_are_the_rounded_weights);
    RUN(missing_tensors_are_named);
    RUN(a_tied_model_accepts_only_an_equal_head);
    RUN(unexpected_tensors_are_named);
    RUN(wrong_shapes_are_named_with_both_shapes);
    RUN(values_that_are_not_finite_are_named);
    RUN(types_that_are_not_weights_are_named);
    RUN(a_folder_without_weights_says_what_it_lacks);
    RUN(an_index_that_lies_is_refused);
    RUN(broken_index_files_are_refused);
    return test_summary();
}
