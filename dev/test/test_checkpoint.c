// test_checkpoint.c: what is saved comes back bit for bit; kill -9, a full disk or a second process never cost a
// checkpoint. Run from the repository's root.
#include "testing.h"
#include "../../llmc/checkpoint.h"
#include "../../llmc/rand.h"
#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>
#endif
#include <sys/resource.h>
#include <time.h>

// ----------------------------------------------------------------------------
// a trainer that only has numbers: each is a function of step, kind, tensor and index, so that any mix-up shows

typedef struct {
    MoEConfig config;
    ParamTable table;
    int64_t step;
    float *weight, *m, *v, *master; // arenas that the store functions fill
} Fake;

static Fake fake; // one is enough, and EXPECT_FATAL's children get it by fork

static float number(int64_t step, const char* what, size_t index) {
    uint64_t h = hash64(hash_string(what) + (uint64_t)step * 1000003u + index);
    float value = (float)(h >> 40) * 0x1p-24f + 0x1p-30f;
    return what[0] == 'v' || (h & 1) ? value : -value;
}

static void fetch(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count, float* values) {
    const Fake* f = (const Fake*)ctx;
    for (size_t i = 0; i < count; i++) { values[i] = number(f->step, what, t->offset + begin + i); }
}

static void store(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count, const float* values) {
    Fake* f = (Fake*)ctx; // as the GPU trainer: a weight is its master's first value
    float* arenas[] = {f->weight, f->m, f->v, f->master};
    const char* names[] = {"weight", "m", "v", "master"};
    for (int i = 0; i < 4; i++) {
        bool here = strcmp(what, names[i]) == 0 || (i == 3 && strcmp(what, "weight") == 0);
        if (here) { memcpy(arenas[i] + t->offset + begin, values, count * sizeof(float)); }
    }
}

static void fake_open(void) {
    config_preset(&fake.config, "tiny");
    param_table_build(&fake.table, &fake.config);
    size_t n = fake.table.num_parameters;
    fake.weight = (float*)callocCheck(n, sizeof(float));
    fake.m = (float*)callocCheck(n, sizeof(float));
    fake.v = (float*)callocCheck(n, sizeof(float));
    fake.master = (float*)callocCheck(n, sizeof(float));
}

static void fake_close(void) {
    param_table_free(&fake.table);
    free(fake.weight);
    free(fake.m);
    free(fake.v);
    free(fake.master);
}

static void save_as(const char* out, int64_t step, StDtype dtype, bool with_master, const char* tokenizer, int keep) {
    TrainerState state;
    memset(&state, 0, sizeof(state));
    state.step = fake.step = step;
    state.tokens = (uint64_t)step * 1000;
    state.data_position = (uint64_t)step * 7;
    state.seed = UINT64_MAX;
    state.sampler_rng = (uint64_t)1 << 63;
    state.data_tokens = 9007199254740991u; // 2^53 - 1, which cJSON's own printing would round
    state.options = cJSON_Parse("{\"lr\": 3e-4, \"train_data\": \"a b*.bin\"}");
    checkpoint_save(out, &fake.config, &fake.table, &state, dtype, with_master, fetch, &fake, tokenizer, keep);
    cJSON_Delete(state.options);
}

static void save(const char* out, int64_t step, int keep) {
    save_as(out, step, ST_F32, false, CHECKPOINT_BYTE_TOKENIZER, keep);
}

static bool all_are(const float* arena, int64_t step, const char* what, StDtype dtype) {
    for (size_t i = 0; i < fake.table.num_parameters; i++) {
        float want = number(step, what, i);
        if (dtype == ST_BF16) { want = bf16_to_f32(f32_to_bf16(want)); }
        if (memcmp(&arena[i], &want, sizeof(float)) != 0) { return false; }
    }
    return true;
}

// Loads everything from dir and compares it with what step's numbers are.
static bool holds_step(const char* dir, int64_t step) {
    TrainerState state;
    checkpoint_state_read(dir, &state);
    bool ok = state.step == step && state.tokens == (uint64_t)step * 1000;
    trainer_state_free(&state);
    hf_folder_load(dir, &fake.config, &fake.table, store, &fake);
    checkpoint_moments_load(dir, &fake.table, store, false, &fake);
    return ok && all_are(fake.weight, step, "weight", ST_F32) && all_are(fake.m, step, "m", ST_F32) &&
           all_are(fake.v, step, "v", ST_F32);
}

static char* out_folder(const char* name) {
    char* out = str_format("%s/%s", test_folder(), name);
    test_remove_tree(out);
    folder_make(out);
    return out;
}

// Names in out joined by spaces, dot files too
static char* listing(const char* out) {
    size_t count;
    char** names = folder_list(out, "", &count);
    char* text = strdupCheck("");
    for (size_t i = 0; i < count; i++) {
        char* longer = str_format("%s%s%s", text, i > 0 ? " " : "", names[i]);
        free(text);
        text = longer;
    }
    folder_list_free(names);
    return text;
}

static void check_listing(const char* out, const char* expected, int line) {
    char* got = listing(out);
    test_check(strcmp(got, expected) == 0, __FILE__, line, "\"%s\" is there, not \"%s\"", got, expected);
    free(got);
}

static void check_latest(const char* out, int64_t step, int line) {
    char* path = checkpoint_latest(out);
    if (test_check(path != NULL, __FILE__, line, "no complete checkpoint in %s", out)) {
        test_check(holds_step(path, step), __FILE__, line, "%s does not hold step %lld", path, (long long)step);
    }
    free(path);
}

#define CHECK_LISTING(out, expected) check_listing(out, expected, __LINE__)
#define CHECK_LATEST(out, step) check_latest(out, step, __LINE__)

// Warnings are expected in some tests: they go to a file, whose text warnings_end returns.
static int stderr_copy = -1;

static void warnings_begin(void) {
    char* path = str_format("%s/warnings", test_folder());
    fflush(stderr);
    stderr_copy = dup(2);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0 || dup2(fd, 2) < 0) { fatal("cannot write %s", path); }
    close(fd);
    free(path);
}

static const char* warnings_end(void) {
    static char text[65536];
    char* path = str_format("%s/warnings", test_folder());
    fflush(stderr);
    dup2(stderr_copy, 2);
    close(stderr_copy);
    FILE* fp = fopenCheck(path, "rb");
    text[fread(text, 1, sizeof(text) - 1, fp)] = '\0';
    fclose(fp);
    free(path);
    return text;
}

// ----------------------------------------------------------------------------
// there and back

static void saved_state_comes_back_bit_for_bit(void) {
    char* out = out_folder("bits with spaces");
    save(out, 100, 0);
    CHECK_LISTING(out, "step_00000100");
    CHECK_LATEST(out, 100);
    char* dir = str_format("%s/step_00000100", out);
    CHECK_LISTING(dir, "checksums.json config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json "
                       "trainer_state.json trainer_state.safetensors");
    TrainerState s;
    checkpoint_state_read(dir, &s);
    CHECK(s.step == 100 && s.tokens == 100000 && s.data_position == 700 && s.data_tokens == 9007199254740991u);
    CHECK(s.seed == UINT64_MAX && s.sampler_rng == (uint64_t)1 << 63 && !s.has_master);
    CHECK(strcmp(cJSON_GetObjectItem(s.options, "train_data")->valuestring, "a b*.bin") == 0);
    trainer_state_free(&s);
    free(dir);
    free(out);
}

static void master_weights_come_back_bit_for_bit(void) { // known-faults C2: a bf16 folder of the GPU, resumed anywhere
    char* out = out_folder("master");
    save_as(out, 3, ST_BF16, true, NULL, 0);
    char* dir = checkpoint_latest(out);
    if (!CHECK(dir != NULL)) { return; }
    hf_folder_load(dir, &fake.config, &fake.table, store, &fake);
    checkpoint_moments_load(dir, &fake.table, store, true, &fake);
    CHECK(all_are(fake.weight, 3, "weight", ST_BF16));
    CHECK(all_are(fake.master, 3, "master", ST_F32));
    CHECK(all_are(fake.m, 3, "m", ST_F32) && all_are(fake.v, 3, "v", ST_F32));
    free(dir);
    free(out);
}

static void float_weights_serve_as_master_weights(void) { // a folder of the CPU, resumed by the GPU
    char* out = out_folder("nomaster");
    save(out, 4, 0);
    char* dir = checkpoint_latest(out);
    hf_folder_load(dir, &fake.config, &fake.table, store, &fake);
    checkpoint_moments_load(dir, &fake.table, store, true, &fake);
    CHECK(all_are(fake.master, 4, "weight", ST_F32));
    free(dir);
    free(out);
}

static void tokenizer_files_are_copied_along(void) { // known-faults C15
    char* out = out_folder("tokenizer");
    save(out, 1, 0);
    char* from = str_format("%s/step_00000001/tokenizer.json", out);
    save_as(out, 2, ST_F32, false, from, 0);
    char* to = str_format("%s/step_00000002/tokenizer_config.json", out);
    CHECK(path_exists(to));
    EXPECT_FATAL(save_as(out, 3, ST_F32, false, "/nowhere/tokenizer.json", 0), "/nowhere/tokenizer.json");
    CHECK_LISTING(out, "step_00000001 step_00000002");
    free(from);
    free(to);
    free(out);
}

// ----------------------------------------------------------------------------
// keep

static void keep_leaves_exactly_the_newest(void) { // known-faults U7
    char* out = out_folder("keep");
    for (int64_t step = 10; step <= 50; step += 10) { save(out, step, 2); }
    CHECK_LISTING(out, "step_00000040 step_00000050");
    save(out, 60, 0); // 0 keeps all
    CHECK_LISTING(out, "step_00000040 step_00000050 step_00000060");
    save(out, 70, 1);
    CHECK_LISTING(out, "step_00000070");
    save(out, 5, 1); // the one just written is never removed, whatever its number
    CHECK_LISTING(out, "step_00000005");
    CHECK(checkpoint_newest_step(out) == 5);
    free(out);
}

static void keep_touches_nothing_of_another_name(void) {
    char* out = out_folder("foreign");
    static const char* const names[] = {"step_1", "step_00000001.bak", "step_0000000x", "my_step_00000001", "step_",
                                        "notes"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char* path = str_format("%s/%s", out, names[i]);
        folder_make(path);
        free(path);
    }
    save(out, 7, 1);
    save(out, 8, 1);
    CHECK_LISTING(out, "my_step_00000001 notes step_ step_00000001.bak step_00000008 step_0000000x step_1");
    CHECK_LATEST(out, 8);
    free(out);
}

static void a_step_saved_twice_is_replaced(void) {
    char* out = out_folder("twice");
    save_as(out, 9, ST_BF16, true, NULL, 3);
    save(out, 9, 3);
    CHECK_LISTING(out, "step_00000009");
    CHECK_LATEST(out, 9);
    free(out);
}

// ----------------------------------------------------------------------------
// half checkpoints

static void damage(const char* out, const char* file, off_t size) { // size -1: remove
    char* path = str_format("%s/%s", out, file);
    if (size < 0) { CHECK(remove(path) == 0); }
    else { CHECK(truncate(path, size) == 0); }
    free(path);
}

static void half_checkpoints_are_named_and_passed_over(void) { // known-faults C1
    char* out = out_folder("half");
    for (int64_t step = 1; step <= 6; step++) { save(out, step, 0); }
    char* empty = str_format("%s/step_00000007", out);
    folder_make(empty);
    damage(out, "step_00000006/model.safetensors", 5000);
    damage(out, "step_00000005/trainer_state.safetensors", -1);
    damage(out, "step_00000004/trainer_state.json", 20);
    damage(out, "step_00000003/config.json", -1);
    warnings_begin();
    CHECK_LATEST(out, 2);
    const char* text = warnings_end();
    CHECK_CONTAINS(text, "step_00000007 is not a complete checkpoint");
    CHECK_CONTAINS(text, "step_00000006 is not a complete checkpoint");
    CHECK_CONTAINS(text, "step_00000005 is not a complete checkpoint");
    CHECK_CONTAINS(text, "step_00000004 is not a complete checkpoint");
    CHECK_CONTAINS(text, "step_00000003 is not a complete checkpoint");
    char* none = str_format("%s/none", out);
    CHECK(checkpoint_latest(none) == NULL && checkpoint_latest("/dev/null") == NULL &&
          checkpoint_latest(empty) == NULL);
    free(none);
    free(empty);
    free(out);
}

static void rename_in(const char* out, const char* from, const char* to) {
    char* a = str_format("%s/%s", out, from);
    char* b = str_format("%s/%s", out, to);
    CHECK(rename(a, b) == 0);
    free(a);
    free(b);
}

static void leftovers_of_a_killed_save_are_tidied(void) {
    char* out = out_folder("leftovers");
    for (int64_t step = 1; step <= 4; step++) { save(out, step, 0); }
    rename_in(out, "step_00000004", ".saving_step_00000004");     // complete or not: it never got its name
    rename_in(out, "step_00000003", ".replaced_step_00000003");   // killed between the two renames of a second save
    rename_in(out, "step_00000001", ".removing_step_00000001");
    warnings_begin();
    CHECK_LATEST(out, 3);
    CHECK_CONTAINS(warnings_end(), ".saving_step_00000004");
    rename_in(out, "step_00000003", ".replaced_step_00000003");
    warnings_begin();
    int fd = checkpoint_out_open(out);
    CHECK_CONTAINS(warnings_end(), "step_00000003 was put back");
    CHECK_LISTING(out, ".lock step_00000002 step_00000003");
    CHECK_LATEST(out, 3);
    close(fd);
    free(out);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void save_until_killed(const char* out, int64_t step, bool same_step, int keep) {
    warnings_begin();
    checkpoint_out_open(out);
    for (;; step += same_step ? 0 : 1) { save(out, step, keep); }
}

static void kill_at_any_moment_leaves_a_complete_checkpoint(void) { // known-faults C1: kill -9, 60 random moments
    char* out = out_folder("killed");
    double start = seconds();
    save(out, 1, 0);
    double duration = seconds() - start; // of one save
    uint64_t rng = 77;
    int64_t last = 1;
    int interrupted = 0;
    for (int round = 0; round < 60 && test_ok; round++) {
        bool same_step = round % 3 == 2;
        pid_t pid = fork();
        if (pid == 0) { save_until_killed(out, last + (same_step ? 0 : 1), same_step, 1 + round % 2); }
        usleep((useconds_t)(1e6 * duration * 3 * rng_uniform(&rng)));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        warnings_begin();
        char* path = checkpoint_latest(out);
        interrupted += strstr(warnings_end(), "interrupted save") != NULL;
        if (!CHECK(path != NULL)) { break; }
        int64_t step = checkpoint_step_of(strrchr(path, '/') + 1);
        CHECK(step >= last && holds_step(path, step));
        last = step;
        free(path);
    }
    CHECK(interrupted >= 10); // else the test would have proved little
    free(out);
}

// ----------------------------------------------------------------------------
// no room

static void limit_file_size(size_t bytes) {
    struct rlimit limit = {bytes, bytes};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
}

static void a_failed_write_leaves_the_last_checkpoint_and_no_rubbish(void) {
    char* out = out_folder("limited");
    save(out, 1, 1);
    // the limits hit the JSON files, the weights, the moments
    EXPECT_FATAL((limit_file_size(100), save(out, 2, 1)), ".saving_step_00000002");
    EXPECT_FATAL((limit_file_size(300000), save(out, 2, 1)), "model.safetensors");
    EXPECT_FATAL((limit_file_size(700000), save(out, 1, 1)), "trainer_state.safetensors");
    CHECK_LISTING(out, "step_00000001");
    CHECK_LATEST(out, 1);
    free(out);
}

// In a file system of its own with 2 MB: one checkpoint of 1.3 MB fits, a second does not.
static void a_full_disk_leaves_the_last_checkpoint(void) { // known-faults C1
#ifdef __linux__
    char* out = out_folder("small");
    pid_t pid = fork();
    if (pid == 0) {
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
            mount("tmpfs", out, "tmpfs", 0, "size=2m") != 0) {
            _exit(0); // not allowed here; a_failed_write_... covers the program's side
        }
        save(out, 1, 1);
        EXPECT_FATAL(save(out, 2, 1), "No space left");
        EXPECT_FATAL(checkpoint_space_check(out, &fake.table, ST_F32, false), "a checkpoint takes");
        CHECK_LISTING(out, "step_00000001");
        CHECK_LATEST(out, 1);
        if (!test_ok) { fprintf(stderr, "%s\n", test_reason); }
        _exit(test_ok ? 0 : 1);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    free(out);
#endif
}

static void too_little_room_is_told_before_training(void) {
    char* out = out_folder("room");
    checkpoint_space_check(out, &fake.table, ST_F32, true);
    ParamTable huge = fake.table;
    huge.num_parameters = (size_t)1 << 55;
    EXPECT_FATAL(checkpoint_space_check(out, &huge, ST_BF16, true), "GB free, a checkpoint takes");
    free(out);
}

// ----------------------------------------------------------------------------
// --out

static void two_processes_cannot_share_out(void) {
    char* out = out_folder("shared");
    int fd = checkpoint_out_open(out);
    char* expected = str_format("another process (pid %ld) is using --out", (long)getpid());
    EXPECT_FATAL(checkpoint_out_open(out), expected);
    close(fd);
    fd = checkpoint_out_open(out); // given back, free again
    close(fd);
    free(expected);
    free(out);
}

static void the_lock_of_a_killed_process_does_not_last(void) {
    char* out = out_folder("dead");
    pid_t pid = fork();
    if (pid == 0) { checkpoint_out_open(out); kill(getpid(), SIGKILL); }
    waitpid(pid, NULL, 0);
    close(checkpoint_out_open(out));
    free(out);
}

static void a_bad_out_is_refused_before_training(void) { // known-faults U1
    char* deep = str_format("%s/a/new folder/deep", test_folder());
    close(checkpoint_out_open(deep));
    CHECK(path_is_folder(deep));
    char* file = str_format("%s/file", test_folder());
    test_write_file(file, "x", 1);
    char* below = str_format("%s/below", file);
    char name[5001];
    memset(name, 'x', 5000);
    name[5000] = '\0';
    EXPECT_FATAL(checkpoint_out_open(file), "is a file, not a folder");
    EXPECT_FATAL(checkpoint_out_open(below), "Not a directory");
    EXPECT_FATAL(checkpoint_out_open(name), "File name too long");
    EXPECT_FATAL(checkpoint_out_open(""), "empty");
    EXPECT_FATAL(checkpoint_out_open("/proc/moe"), "/proc/moe");      // cannot be made
    EXPECT_FATAL(checkpoint_out_open("/proc"), "cannot write to --out /proc"); // is there, takes no files
    free(deep);
    free(file);
    free(below);
}

// ----------------------------------------------------------------------------
// states that do not belong

static void spoil(const char* file, const char* text) {
    test_write_file(file, text, strlen(text));
}

static void fetch_negative(void* ctx, const ParamTensor* t, const char* what, size_t begin, size_t count,
                           float* values) {
    (void)ctx;
    (void)what;
    for (size_t i = 0; i < count; i++) { values[i] = t->offset + begin + i == 12345 ? -1.0f : 1.0f; }
}

static void a_state_that_does_not_fit_is_refused(void) {
    char* out = out_folder("unfit");
    save(out, 1, 0);
    char* dir = str_format("%s/step_00000001", out);
    char* json = str_format("%s/trainer_state.json", dir);
    MoEConfig other;
    ParamTable table;
    config_preset(&other, "tiny");
    other.num_experts = 5;
    param_table_build(&table, &other);
    EXPECT_FATAL(checkpoint_moments_load(dir, &table, store, false, &fake), "model.layers.0.mlp.gate.weight");
    param_table_free(&table);
    TrainerState s;
    spoil(json, "{\"format\": 2}");
    EXPECT_FATAL(checkpoint_state_read(dir, &s), "newer version");
    spoil(json, "{\"format\": 1, \"step\": 1.5}");
    EXPECT_FATAL(checkpoint_state_read(dir, &s), "\"step\" is missing or not a whole number");
    spoil(json, "{\"format\": 1, \"step\": \"18446744073709551616\"}");
    EXPECT_FATAL(checkpoint_state_read(dir, &s), "\"step\"");
    EXPECT_FATAL(checkpoint_state_read("/nowhere", &s), "/nowhere");
    memset(&s, 0, sizeof(s));
    s.step = 2;
    checkpoint_save(out, &fake.config, &fake.table, &s, ST_F32, false, fetch_negative, NULL, NULL, 0);
    free(dir);
    dir = str_format("%s/step_00000002", out);
    EXPECT_FATAL(checkpoint_moments_load(dir, &fake.table, store, false, &fake), "is negative at element");
    free(json);
    free(dir);
    free(out);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    fake_open();
    RUN(saved_state_comes_back_bit_for_bit);
    RUN(master_weights_come_back_bit_for_bit);
    RUN(float_weights_serve_as_master_weights);
    RUN(tokenizer_files_are_copied_along);
    RUN(keep_leaves_exactly_the_newest);
    RUN(keep_touches_nothing_of_another_name);
    RUN(a_step_saved_twice_is_replaced);
    RUN(half_checkpoints_are_named_and_passed_over);
    RUN(leftovers_of_a_killed_save_are_tidied);
    RUN(kill_at_any_moment_leaves_a_complete_checkpoint);
    RUN(a_failed_write_leaves_the_last_checkpoint_and_no_rubbish);
    RUN(a_full_disk_leaves_the_last_checkpoint);
    RUN(too_little_room_is_told_before_training);
    RUN(two_processes_cannot_share_out);
    RUN(the_lock_of_a_killed_process_does_not_last);
    RUN(a_bad_out_is_refused_before_training);
    RUN(a_state_that_does_not_fit_is_refused);
    fake_close();
    return test_summary();
}
