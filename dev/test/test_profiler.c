// The profiler: the named phases and `other` make up the step, validation does not leak into forward's phases, and the
// timeline is valid JSON with well-nested boxes at every moment, also when the disk or its limit is full.
#include "testing.h"
#include "../../llmc/profiler.h"
#include <cjson/cJSON.h>
#include <sys/resource.h>

static Profiler prof;

static void spin(double us) {
    double end = profiler_clock_us() + us;
    while (profiler_clock_us() < end) { }
}

static const char* trace_path(void) {
    static char path[600];
    snprintf(path, sizeof(path), "%s/trace.json", test_folder());
    return path;
}

// The trace as JSON, which must be nothing but one valid document; the caller frees it.
static cJSON* trace_read(void) {
    FILE* file = fopenCheck(trace_path(), "r");
    fseek(file, 0, SEEK_END);
    size_t n = (size_t)ftell(file);
    rewind(file);
    char* text = (char*)mallocCheck(n + 1);
    CHECK(fread(text, 1, n, file) == n);
    text[n] = '\0';
    fclose(file);
    cJSON* json = cJSON_ParseWithOpts(text, NULL, 1);
    free(text);
    CHECK(json != NULL);
    return json;
}

static cJSON* events_of(cJSON* json) { return cJSON_GetObjectItem(json, "traceEvents"); }
static double number_of(const cJSON* event, const char* name) { return cJSON_GetObjectItem(event, name)->valuedouble; }
static const char* name_of(const cJSON* event) { return cJSON_GetObjectItem(event, "name")->valuestring; }

static int count_named(cJSON* json, const char* name) {
    int n = 0;
    cJSON* event;
    cJSON_ArrayForEach(event, events_of(json)) { n += strcmp(name_of(event), name) == 0; }
    return n;
}

// every event of a track lies inside the box that is open when it starts
static void check_nesting_of(cJSON* json, int track) {
    double ends[64];
    int depth = 0;
    double last_ts = -INFINITY;
    cJSON* event;
    cJSON_ArrayForEach(event, events_of(json)) {
        if (strcmp(cJSON_GetObjectItem(event, "ph")->valuestring, "X") != 0) { continue; }
        if (number_of(event, "tid") != track) { continue; }
        double ts = number_of(event, "ts"), end = ts + number_of(event, "dur");
        const double rounding = 0.002; // three decimals of a microsecond
        CHECK(ts >= last_ts - rounding && end >= ts);
        while (depth > 0 && ends[depth - 1] <= ts + rounding) { depth--; }
        bool inside = depth == 0 || end <= ends[depth - 1] + rounding;
        test_check(inside, __FILE__, __LINE__, "%s sticks out of its box", name_of(event));
        if (CHECK(depth < 64)) { ends[depth++] = end; }
        last_ts = ts;
    }
}

static void check_nesting(cJSON* json) {
    for (int track = 0; track < NUM_TRACKS; track++) { check_nesting_of(json, track); }
}

// a step of two microbatches through three layers, as a trainer writes it
static void one_step(int64_t step) {
    profiler_step_begin(&prof, step);
    profiler_phase(&prof, PHASE_DATA, -1);
    spin(100);
    for (int m = 0; m < 2; m++) {
        profiler_span_begin(&prof, "microbatch %d", m);
        profiler_span_begin(&prof, "forward");
        for (int l = 0; l < 3; l++) {
            profiler_phase(&prof, PHASE_ATTENTION, l);
            spin(50);
            profiler_phase(&prof, PHASE_EXPERTS, l);
            spin(100);
        }
        profiler_span_end(&prof);
        profiler_span_end(&prof);
    }
    profiler_phase(&prof, PHASE_OTHER, -1);
    spin(200);
    profiler_step_end(&prof);
}

static void phases_and_other_make_up_the_step(void) {
    profiler_init(&prof, NULL);
    one_step(1);
    double sum = 0.0;
    for (int i = 0; i <= NUM_PHASES; i++) {
        CHECK(prof.phase_ms[i] >= 0.0);
        sum += prof.phase_ms[i];
    }
    CHECK_NEAR(sum, prof.step_ms, 1e-9);
    CHECK(prof.phase_ms[PHASE_DATA] >= 0.1 && prof.phase_ms[PHASE_ATTENTION] >= 0.3);
    CHECK(prof.phase_ms[PHASE_EXPERTS] >= 0.6);
    CHECK(prof.phase_ms[PHASE_OTHER] >= 0.2 && prof.phase_ms[PHASE_ROUTER] == 0.0);
    one_step(2);
    CHECK(prof.step == 2 && prof.phase_ms[PHASE_EXPERTS] <= prof.step_ms); // each step begins at zero
    profiler_close(&prof);
}

static void a_held_phase_takes_all_time(void) {
    profiler_init(&prof, trace_path());
    profiler_step_begin(&prof, 1);
    profiler_phase(&prof, PHASE_EXPERTS, 0);
    spin(100);
    profiler_hold(&prof, PHASE_EVAL);
    profiler_phase(&prof, PHASE_ATTENTION, 0);
    spin(300);
    profiler_phase(&prof, PHASE_EXPERTS, 0);
    spin(300);
    profiler_release(&prof);
    spin(100);
    profiler_step_end(&prof);
    CHECK(prof.phase_ms[PHASE_ATTENTION] == 0.0);
    CHECK(prof.phase_ms[PHASE_EVAL] >= 0.6);
    CHECK(prof.phase_ms[PHASE_EXPERTS] >= 0.1 && prof.phase_ms[PHASE_OTHER] >= 0.1);
    profiler_close(&prof);
    cJSON* json = trace_read();
    CHECK(count_named(json, "eval") == 1 && count_named(json, "attention") == 1); // a box, and what ran in it
    check_nesting(json);
    cJSON_Delete(json);
}

static void no_profiler_and_no_step_do_nothing(void) {
    profiler_phase(NULL, PHASE_DATA, -1);
    profiler_span_begin(NULL, "x");
    profiler_span_end(NULL);
    profiler_hold(NULL, PHASE_EVAL);
    profiler_release(NULL);
    profiler_step_begin(NULL, 1);
    profiler_step_end(NULL);
    profiler_close(NULL);
    profiler_init(&prof, NULL);
    profiler_phase(&prof, PHASE_DATA, -1); // a forward outside of a step: dump, generation
    profiler_span_begin(&prof, "x");
    profiler_span_end(&prof);
    profiler_step_end(&prof);
    CHECK(prof.num_steps == 0 && prof.step_ms == 0.0);
    profiler_close(&prof);
    profiler_close(&prof);
}

static void resolved_intervals_of_another_clock_are_counted(void) {
    profiler_init(&prof, trace_path());
    profiler_track_name(&prof, 1, "compute \"stream\"");
    profiler_step_begin(&prof, 1);
    double now_us = profiler_clock_us();
    profiler_add(&prof, PHASE_EXPERTS, 2, now_us, now_us + 1000.0, 1);
    profiler_add(&prof, PHASE_ALLREDUCE, -1, now_us + 500.0, now_us + 700.0, 2);
    profiler_step_end(&prof);
    CHECK_NEAR(prof.phase_ms[PHASE_EXPERTS], 1.0, 1e-6);
    CHECK_NEAR(prof.phase_ms[PHASE_ALLREDUCE], 0.2, 1e-6);
    profiler_close(&prof);
    cJSON* json = trace_read();
    CHECK(count_named(json, "thread_name") == 2 && count_named(json, "allreduce") == 1); // host, compute "stream"
    CHECK(count_named(json, "layer 2") == 1);
    cJSON_Delete(json);
}

static void layers_are_boxes_on_every_track(void) {
    profiler_init(&prof, trace_path());
    profiler_step_begin(&prof, 1);
    double at_us = profiler_clock_us();
    // a stream: embedding, two phases of layer 0, one of layer 1, a pause, layer 1 again
    profiler_add(&prof, PHASE_EMBEDDING, -1, at_us, at_us + 10, TRACK_COMPUTE);
    profiler_add(&prof, PHASE_NORMS, 0, at_us + 10, at_us + 20, TRACK_COMPUTE);
    profiler_add(&prof, PHASE_ROUTER, 0, at_us + 20, at_us + 20.7, TRACK_COMPUTE); // too short to be drawn
    profiler_add(&prof, PHASE_EXPERTS, 0, at_us + 20.7, at_us + 50, TRACK_COMPUTE);
    profiler_add(&prof, PHASE_EXPERTS, 1, at_us + 50, at_us + 70, TRACK_COMPUTE);
    profiler_add(&prof, PHASE_EXPERTS, 1, at_us + 90, at_us + 95, TRACK_COMPUTE);
    // the host: a box ends the layer's, and so does a hold
    profiler_phase(&prof, PHASE_EXPERTS, 4);
    spin(20);
    profiler_span_begin(&prof, "forward");
    profiler_phase(&prof, PHASE_EXPERTS, 4);
    spin(20);
    profiler_span_end(&prof);
    profiler_hold(&prof, PHASE_EVAL);
    profiler_phase(&prof, PHASE_EXPERTS, 4);
    spin(20);
    profiler_release(&prof);
    profiler_interval(&prof, "fill batch", at_us - 1e9, at_us + 500.0, TRACK_LOADER); // began before the timeline does
    profiler_interval(&prof, "fill batch", at_us - 1e9, at_us - 1e8, TRACK_LOADER);
    profiler_step_end(&prof);
    profiler_interval(&prof, "fill batch", at_us, at_us + 1.0, TRACK_LOADER); // outside of a step: nothing
    CHECK(prof.phase_ms[PHASE_DATA] == 0.0); // an interval of other work is drawn, not counted
    profiler_close(&prof);
    cJSON* json = trace_read();
    CHECK(count_named(json, "layer 0") == 1 && count_named(json, "layer 1") == 2 && count_named(json, "layer 4") == 3);
    CHECK(count_named(json, "fill batch") == 1);
    cJSON* event;
    cJSON_ArrayForEach(event, events_of(json)) {
        if (strcmp(name_of(event), "layer 0") == 0) { CHECK_NEAR(number_of(event, "dur"), 40.0, 0.002); }
        if (strcmp(name_of(event), "fill batch") == 0) { CHECK(number_of(event, "ts") == 0.0); }
    }
    check_nesting(json);
    cJSON_Delete(json);
}

static void ranks_have_files_of_their_own_that_say_what_was_run(void) {
    char path[700];
    snprintf(path, sizeof(path), "%s/deep.er/trace", test_folder());
    char* name = trace_path_of_rank(path, 3);
    CHECK(strcmp(name + strlen(path), ".rank3") == 0); // no .json at its end
    free(name);
    double before_us = profiler_clock_us();
    profiler_init_rank(&prof, trace_path(), 2);
    snprintf(path, sizeof(path), "%s/trace.rank2.json", test_folder());
    CHECK(strcmp(prof.trace.path, path) == 0);
    char run[30000]; // longer than what is usually written at once
    memset(run, 'x', sizeof(run));
    memcpy(run, "{\"model\":\"", 10);
    snprintf(run + sizeof(run) - 3, 3, "\"}");
    profiler_describe(&prof, run);
    for (int step = 1; step <= 3; step++) { one_step(step); }
    profiler_close(&prof);
    CHECK(rename(path, trace_path()) == 0);
    cJSON* json = trace_read();
    const cJSON* about = cJSON_GetObjectItem(json, "otherData");
    CHECK(number_of(about, "rank") == 2 && number_of(about, "clock_us") >= before_us - 0.001);
    CHECK(strlen(cJSON_GetObjectItem(cJSON_GetObjectItem(about, "run"), "model")->valuestring) == sizeof(run) - 13);
    cJSON* event;
    cJSON_ArrayForEach(event, events_of(json)) { CHECK(number_of(event, "pid") == 2); }
    CHECK(count_named(json, "process_name") == 1);
    check_nesting(json);
    cJSON_Delete(json);
}

static void switching_a_phase_costs_less_than_a_microsecond(void) {
    profiler_init(&prof, NULL);
    profiler_step_begin(&prof, 1);
    double best_us = INFINITY; // of many tries, since other programs may run in between
    for (int try_ = 0; try_ < 50; try_++) {
        double start_us = profiler_clock_us();
        for (int i = 0; i < 2000; i++) { profiler_phase(&prof, (enum Phase)(i % NUM_PHASES), i % 7); }
        best_us = fmin(best_us, (profiler_clock_us() - start_us) / 2000.0);
    }
    profiler_step_end(&prof);
    test_check(best_us < 1.0, __FILE__, __LINE__, "a switch takes %.3f us", best_us); // 0.03 without sanitizers
    profiler_close(&prof);
}

static void the_table_is_sorted_and_adds_up(void) {
    char* text = NULL;
    size_t size = 0;
    profiler_init(&prof, NULL);
    for (int step = 1; step <= 3; step++) {
        profiler_step_begin(&prof, step);
        double now_us = profiler_clock_us();
        profiler_add(&prof, PHASE_ATTENTION, 0, now_us, now_us + 1000.0 * step, 0);
        profiler_add(&prof, PHASE_EXPERTS, 0, now_us, now_us + 10000.0, 0);
        profiler_step_end(&prof);
    }
    FILE* file = open_memstream(&text, &size);
    profiler_table(&prof, file);
    fclose(file);
    CHECK_CONTAINS(text, "mean of 2 steps; the first, ");
    CHECK_CONTAINS(text, "attention          2.500"); // of 2 and 3 ms: the first step's 1 is left out
    char *experts = strstr(text, "experts"), *attention = strstr(text, "attention"), *other = strstr(text, "other");
    CHECK(experts != NULL && attention != NULL && other != NULL && experts < attention && attention < other);
    CHECK(strstr(text, "router") == NULL); // took no time
    free(text);
    double sum = 0.0;
    for (int i = 0; i <= NUM_PHASES; i++) { sum += prof.sum_ms[i]; }
    CHECK_NEAR(sum, prof.sum_ms[NUM_PHASES + 1], 1e-9);
    profiler_close(&prof);
}

// ----------------------------------------------------------------------------

static void the_trace_is_valid_json_with_nested_boxes(void) {
    profiler_init(&prof, trace_path());
    for (int step = 1; step <= 3; step++) { one_step(step); }
    profiler_close(&prof);
    cJSON* json = trace_read();
    CHECK(count_named(json, "step 2") == 1 && count_named(json, "microbatch 1") == 3);
    CHECK(count_named(json, "forward") == 6);
    CHECK(count_named(json, "attention") == 3 * 2 * 3 && count_named(json, "data") >= 3);
    CHECK(count_named(json, "layer 2") == 6); // around its attention and its experts
    check_nesting(json);
    cJSON* event;
    cJSON_ArrayForEach(event, events_of(json)) {
        if (strcmp(name_of(event), "experts") != 0) { continue; }
        double layer = number_of(cJSON_GetObjectItem(event, "args"), "layer");
        CHECK(layer >= 0.0 && layer < 3.0 && number_of(event, "dur") >= 100.0);
    }
    cJSON_Delete(json);
}

static void the_trace_is_valid_after_every_step_and_when_killed(void) {
    profiler_init(&prof, trace_path());
    cJSON_Delete(trace_read()); // no event yet
    for (int step = 1; step <= 3; step++) {
        one_step(step);
        cJSON* json = trace_read();
        CHECK(cJSON_GetArraySize(events_of(json)) > 10 * step);
        cJSON_Delete(json);
    }
    profiler_close(&prof);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        profiler_init(&prof, trace_path());
        one_step(1);
        profiler_step_begin(&prof, 2);
        profiler_phase(&prof, PHASE_EXPERTS, 0);
        raise(SIGKILL);
    }
    waitpid(child, NULL, 0);
    cJSON* json = trace_read();
    CHECK(count_named(json, "step 1") == 1);
    cJSON_Delete(json);
}

static void closing_inside_a_step_closes_its_boxes(void) {
    profiler_init(&prof, trace_path());
    profiler_step_begin(&prof, 1);
    profiler_span_begin(&prof, "forward");
    profiler_phase(&prof, PHASE_EXPERTS, 0);
    spin(20);
    profiler_close(&prof);
    cJSON* json = trace_read();
    CHECK(count_named(json, "forward") == 1 && count_named(json, "experts") == 1 && count_named(json, "step 1") == 1);
    check_nesting(json);
    cJSON_Delete(json);
}

static void a_full_buffer_and_deep_boxes_lose_nothing_they_need_not(void) {
    profiler_init(&prof, trace_path());
    profiler_step_begin(&prof, 1);
    for (int i = 0; i < TRACE_MAX_DEPTH + 5; i++) { profiler_span_begin(&prof, "deep %d", i); }
    double now_us = profiler_clock_us();
    int n = TRACE_BUFFER_EVENTS + 100;
    for (int i = 0; i < n; i++) { profiler_add(&prof, PHASE_ROUTER, i, now_us + 2 * i, now_us + 2 * i + 2, 1); }
    for (int i = 0; i < TRACE_MAX_DEPTH + 5; i++) { profiler_span_end(&prof); }
    profiler_step_end(&prof);
    profiler_close(&prof);
    cJSON* json = trace_read();
    CHECK(count_named(json, "router") == n);
    CHECK(count_named(json, "deep 14") == 1 && count_named(json, "deep 15") == 0); // the step is a box, too
    cJSON_Delete(json);
}

// sends this process's stderr into a file while it lives
static int stderr_to_file(const char* name) {
    char path[700];
    snprintf(path, sizeof(path), "%s/%s", test_folder(), name);
    fflush(stderr);
    int saved = dup(2), fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(fd, 2);
    close(fd);
    return saved;
}

static void stderr_restore(int saved, char* text, size_t size) {
    ssize_t n = pread(2, text, size - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    dup2(saved, 2);
    close(saved);
}

static void the_limit_ends_the_trace_with_a_note_and_one_warning(void) {
    char text[2000];
    int saved = stderr_to_file("limit.txt");
    profiler_init(&prof, trace_path());
    prof.trace.limit = 20000;
    for (int step = 1; step <= 25; step++) { one_step(step); }
    int64_t full_at = prof.trace.full_at;
    profiler_close(&prof);
    stderr_restore(saved, text, sizeof(text));
    test_check(full_at > 1 && full_at < 25, __FILE__, __LINE__, "stopped at step %lld", (long long)full_at);
    CHECK_CONTAINS(text, "its limit of 20000 bytes is reached");
    CHECK(strchr(text, '\n') == text + strlen(text) - 1);
    struct stat info;
    CHECK(stat(trace_path(), &info) == 0 && info.st_size <= 20000);
    cJSON* json = trace_read();
    CHECK_CONTAINS(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "otherData"), "note")->valuestring, "stopped at step");
    check_nesting(json);
    cJSON_Delete(json);
}

static void a_full_disk_ends_the_trace_but_leaves_it_valid(void) {
    char text[2000];
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 9000; // stands in for the disk: writing beyond it fails
    signal(SIGXFSZ, SIG_IGN);
    int saved = stderr_to_file("full.txt");
    profiler_init(&prof, trace_path());
    setrlimit(RLIMIT_FSIZE, &small);
    for (int step = 1; step <= 8; step++) { one_step(step); }
    setrlimit(RLIMIT_FSIZE, &before);
    profiler_close(&prof);
    stderr_restore(saved, text, sizeof(text));
    CHECK_CONTAINS(text, "trace.json failed: File too large; training goes on without it");
    CHECK(strchr(text, '\n') == text + strlen(text) - 1);
    CHECK(prof.num_steps == 8);
    cJSON* json = trace_read();
    CHECK(count_named(json, "step 1") == 1);
    cJSON_Delete(json);
}

static void a_trace_that_cannot_be_written_is_refused_at_start(void) {
    EXPECT_FATAL(profiler_init(&prof, "/nonexistent/trace.json"), "--trace: cannot create /nonexistent/trace.json");
    EXPECT_FATAL(profiler_init(&prof, test_folder()), "--trace: cannot create");
    EXPECT_FATAL(profiler_init(&prof, "/dev/full"), "--trace: cannot write /dev/full: No space left");
}

static void boxes_that_do_not_match_are_an_error_of_the_program(void) {
    profiler_init(&prof, NULL);
    profiler_step_begin(&prof, 1);
    profiler_span_end(&prof); // the step's own
    EXPECT_FATAL(profiler_span_end(&prof), "profiler_span_end without profiler_span_begin");
    profiler_close(&prof);
}

static void every_phase_has_the_name_of_the_design(void) {
    const char* names[] = {"data", "embedding", "attention", "qkv_o", "router", "permute", "experts", "lm_head",
                           "norms", "grad_norm", "optimizer", "allreduce", "checkpoint", "eval", "other"};
    CHECK(sizeof(names) / sizeof(names[0]) == NUM_PHASES + 1);
    for (int i = 0; i <= NUM_PHASES; i++) { CHECK(strcmp(phase_name(i), names[i]) == 0); }
}

static void smol_500m_takes_1582_megaflop_a_token(void) {
    size_t qkvo = 12 * 4 * 896 * 1024, router = 12 * 896 * 16, experts = 12 * 2 * 3 * 896 * 512;
    size_t lm_head = (size_t)896 * 151936;
    double flops = model_flops_per_token(qkvo + router + experts + lm_head, 12, 16, 64, 4096);
    CHECK_NEAR(flops * 1e-9, 1.582, 0.0005); // design.md, section 4
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(every_phase_has_the_name_of_the_design);
    RUN(phases_and_other_make_up_the_step);
    RUN(a_held_phase_takes_all_time);
    RUN(no_profiler_and_no_step_do_nothing);
    RUN(resolved_intervals_of_another_clock_are_counted);
    RUN(layers_are_boxes_on_every_track);
    RUN(ranks_have_files_of_their_own_that_say_what_was_run);
    RUN(switching_a_phase_costs_less_than_a_microsecond);
    RUN(the_table_is_sorted_and_adds_up);
    RUN(the_trace_is_valid_json_with_nested_boxes);
    RUN(the_trace_is_valid_after_every_step_and_when_killed);
    RUN(closing_inside_a_step_closes_its_boxes);
    RUN(a_full_buffer_and_deep_boxes_lose_nothing_they_need_not);
    RUN(the_limit_ends_the_trace_with_a_note_and_one_warning);
    RUN(a_full_disk_ends_the_trace_but_leaves_it_valid);
    RUN(a_trace_that_cannot_be_written_is_refused_at_start);
    RUN(boxes_that_do_not_match_are_an_error_of_the_program);
    RUN(smol_500m_takes_1582_megaflop_a_token);
    return test_summary();
}
