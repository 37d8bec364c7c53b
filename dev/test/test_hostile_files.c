// test_hostile_files.c: what fuzzing (test_fuzz.py), or reading with its eyes, found in the readers of files from
// strangers: the right behaviour, stated. Memory and time stay within what the file's own size and the options ask for.
#include "testing.h"
#include "../../llmc/checkpoint.h"
#include "../../llmc/choices.h"
#include "../../llmc/cli.h"
#include <sys/mman.h>
#include <sys/stat.h>

static char* file_path(const char* name) { return str_format("%s/%s", test_folder(), name); }

// A text that grows: pieces are put behind it.
static ByteBuffer made;
PRINTF_LIKE(1, 2)
static void put(const char* fmt, ...) {
    char piece[300];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(piece, sizeof(piece), fmt, args);
    va_end(args);
    byte_buffer_add(&made, piece, (size_t)n);
}

static char* put_file(const char* name) { // writes it, and begins anew
    char* path = file_path(name);
    test_write_file(path, made.bytes, made.count);
    byte_buffer_free(&made);
    return path;
}

// ----------------------------------------------------------------------------
// JSON

static void json_of_too_many_values_is_refused_before_it_is_parsed(void) {
    char err[300] = "";
    put("{\"a\":[0");
    for (size_t i = 0; i < JSON_MAX_VALUES; i++) { byte_buffer_add(&made, ",0", 2); } // 17 MB, a gigabyte once parsed
    put("]}");
    CHECK(json_parse(made.bytes, made.count, "here", err, sizeof(err)) == NULL);
    CHECK_CONTAINS(err, "here: the JSON has more than 8388608 values");
    byte_buffer_free(&made);
}

static void json_whose_strings_would_be_cut_is_refused(void) { // by cJSON, at a zero byte
    const char* texts[] = {"{\"a\\u0000b\": 1}", "{\"a\": \"\\\\\\u0000\"}", "{\"a\": \"\\u0000\"}", "{\"a\\\\u0000\": \"\\u0001\"}"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        char err[300] = "";
        cJSON* tree = json_parse(texts[i], strlen(texts[i]), "here", err, sizeof(err));
        CHECK((tree != NULL) == (i == 3)); // a backslash, and then the letters u0000
        if (i < 3) { CHECK_CONTAINS(err, "here: the JSON contains a zero byte"); }
        cJSON_Delete(tree);
    }
}

static void json_is_not_read_beyond_its_end(void) { // as cJSON before 1.7.18 does: CVE-2023-53154
    const char* texts[] = {"{\"1\":1,", "{\"a\":[1,", "{\"a\":\"\\u12", "{\"a\"", "{", "{\"a\":tru", "{\"a\":1}", "{\"a\":\"\\"};
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char* map = (char*)mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!CHECK(map != MAP_FAILED && mprotect(map + page, page, PROT_NONE) == 0)) { return; }
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        char err[300] = "";
        size_t n = strlen(texts[i]);
        memcpy(map + page - n, texts[i], n);
        cJSON* tree = json_parse(map + page - n, n, "here", err, sizeof(err));
        CHECK((tree != NULL) == (i == 6));
        cJSON_Delete(tree);
    }
    munmap(map, 2 * page);
}

// ----------------------------------------------------------------------------
// config.json

static void a_config_of_a_million_experts_is_refused_before_they_are_listed(void) {
    MoEConfig config;
    char err[300] = "";
    config_preset(&config, "tiny");
    config.num_hidden_layers = 1024;
    config.num_experts = 1024;
    CHECK(!config_check(&config, err, sizeof(err)));
    CHECK_CONTAINS(err, "the sizes are too large");
    config.num_experts = 256;
    CHECK(config_check(&config, err, sizeof(err)));
}

// ----------------------------------------------------------------------------
// model.safetensors.index.json

static void make_tensors(const char* name, const char* prefix, int count) {
    ByteBuffer header = {NULL, 0, 0};
    for (int i = 0; i < count; i++) { put("%c\"%s%06d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}", i ? ',' : '{', prefix, i, i, i + 1); }
    put("}");
    header = made;
    memset(&made, 0, sizeof(made));
    uint64_t n = header.count;
    byte_buffer_add(&made, (const char*)&n, 8);
    byte_buffer_add(&made, header.bytes, header.count);
    memset(byte_buffer_reserve(&made, (size_t)count), 0, (size_t)count);
    made.count += (size_t)count;
    byte_buffer_free(&header);
    free(put_file(name));
}

static void load_folder(const char* dir) {
    HfFiles files;
    hf_open_folder(&files, dir);
    hf_close_files(&files);
}

// Once for each name a walk along all names: 60,000 took a minute, the million that fits a night.
static void an_index_takes_no_longer_than_sorting_it(void) {
    char* dir = file_path("many");
    int count = 60000;
    CHECK(mkdir(dir, 0777) == 0);
    make_tensors("many/a.safetensors", "t", count + 1);
    make_tensors("many/b.safetensors", "u", 1);
    put("{\"weight_map\":{");
    for (int i = 0; i < count; i++) { put("\"t%06d\":\"a.safetensors\",", i); }
    put("\"u000000\":\"b.safetensors\"}}");
    free(put_file("many/model.safetensors.index.json"));
    double begin = dataloader_clock_ms();
    EXPECT_FATAL(load_folder(dir), "a.safetensors: tensor t060000 is not what the index");
    double ms = dataloader_clock_ms() - begin;
    test_check(ms < 15000, __FILE__, __LINE__, "it took %.0f ms", ms);
    free(dir);
}

// ----------------------------------------------------------------------------
// checkpoints

static void checksums_are_of_files_in_their_folder(void) {
    char* dir = file_path("sums");
    char err[600];
    CHECK(mkdir(dir, 0777) == 0);
    const char* names[] = {"../sums/" CHECKPOINT_CHECKSUMS, "/../../../../../../../../dev/zero", "pipe", "."}; // two of these never end
    const char* reasons[] = {"no name of a file", "no name of a file", "cannot read", "cannot read"};
    char* pipe_path = file_path("sums/pipe");
    CHECK(mkfifo(pipe_path, 0666) == 0);
    for (int i = 0; i < 4; i++) {
        put("{\"%s\":\"1\"}", names[i]);
        free(put_file("sums/" CHECKPOINT_CHECKSUMS));
        CHECK(!checkpoint_check_sums(dir, err, sizeof(err)));
        CHECK_CONTAINS(err, reasons[i]);
    }
    free(pipe_path);
    free(dir);
}

static void a_number_where_a_checkpoints_options_have_a_text_becomes_that_text(void) {
    Options opt;
    options_defaults(&opt, PROGRAM_CPU);
    const char* text = "{\"given\": [\"train-data\", \"train-data\", \"prompt\"], \"train-data\": 12.5, \"prompt\": true}";
    cJSON* json = cJSON_Parse(text);
    options_inherit(&opt, json);
    cJSON_Delete(json);
    CHECK(strcmp(opt.train_data, "12.5") == 0); // it was a pointer to a buffer that is gone
    CHECK(strcmp(opt.prompt, "1") == 0);
}

// ----------------------------------------------------------------------------
// shards

static void open_shard(const char* path) {
    DataLoaderOptions opt;
    DataLoader l;
    memset(&opt, 0, sizeof(opt));
    opt.pattern = path;
    opt.B = opt.T = 1;
    opt.num_ranks = 1;
    dataloader_open(&l, &opt);
}

static void a_shards_end_of_text_may_be_the_least_number_there_is(void) { // whoever takes 1 from it overflows
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC_32, 7, 4, 257, INT_MIN};
    byte_buffer_add(&made, (const char*)header, sizeof(header));
    byte_buffer_add(&made, (const char*)header, 4 * sizeof(int32_t));
    char* path = put_file("least.bin");
    EXPECT_FATAL(open_shard(path), "its header is damaged (vocab_size 257, end-of-text id + 1: -2147483648)");
    free(path);
}

// ----------------------------------------------------------------------------
// --eval-choices

static void put_choices_header(int questions) {
    put("{\"format\":\"choices\",\"vocab_size\":257,\"eot_id\":256,\"questions\":%d}\n", questions);
}

static void a_context_is_held_once_for_all_its_choices(void) {
    Choices c;
    size_t length = 100000; // once a choice it would be 400 MB
    put_choices_header(1);
    put("{\"context\":[1");
    for (size_t i = 1; i < length; i++) { byte_buffer_add(&made, ",1", 2); }
    put("],\"choices\":[[1]");
    for (int k = 1; k < CHOICES_MAX; k++) { put(",[%d]", k % 256); }
    put("],\"bytes\":[1");
    for (int k = 1; k < CHOICES_MAX; k++) { put(",1"); }
    put("],\"label\":0}\n");
    char* path = put_file("choices.jsonl");
    choices_open(&c, path, length + 1, 257);
    CHECK(c.num_rows == CHOICES_MAX && c.rows[999].length == length + 2 && c.num_cut == 0);
    CHECK(c.tokens.count == 1 + length + CHOICES_MAX);
    CHECK(choices_token(&c, &c.rows[999], 0) == 256 && choices_token(&c, &c.rows[999], length) == 1);
    CHECK(choices_token(&c, &c.rows[999], length + 1) == 999 % 256);
    choices_close(&c);
    free(path);
}

static void the_bytes_of_a_choice_can_be_divided_by(void) {
    const char* bad[] = {"1e999", "1e-320", "0", "-1", "null"};
    Choices c;
    for (int i = 0; i < 5; i++) {
        put_choices_header(1);
        put("{\"context\":[],\"choices\":[[1],[2]],\"bytes\":[1,%s],\"label\":0}\n", bad[i]);
        char* path = put_file("bytes.jsonl");
        EXPECT_FATAL(choices_open(&c, path, 8, 257), "line 2: \"bytes\" must be");
        free(path);
    }
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    program_name = "moe";
    RUN(json_of_too_many_values_is_refused_before_it_is_parsed);
    RUN(json_whose_strings_would_be_cut_is_refused);
    RUN(json_is_not_read_beyond_its_end);
    RUN(a_config_of_a_million_experts_is_refused_before_they_are_listed);
    RUN(an_index_takes_no_longer_than_sorting_it);
    RUN(checksums_are_of_files_in_their_folder);
    RUN(a_number_where_a_checkpoints_options_have_a_text_becomes_that_text);
    RUN(a_shards_end_of_text_may_be_the_least_number_there_is);
    RUN(a_context_is_held_once_for_all_its_choices);
    RUN(the_bytes_of_a_choice_can_be_divided_by);
    return test_summary();
}
