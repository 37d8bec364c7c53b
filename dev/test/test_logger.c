// The logger: the step line as design.md prints it, metrics.jsonl with exactly its fields, whole lines only, continued
// without doubles after a resume, and a full disk that costs lines but not the run.
#include "testing.h"
#include "../../llmc/logger.h"
#include <cjson/cJSON.h>
#include <sys/resource.h>

static double phases[NUM_PHASES + 1];
static double loads[3] = {1.5, NAN, 2.25};
static int dead[3] = {0, 0, 3};
static double entropy[3] = {1.386294, NAN, 0.25};

static const char* metrics_path(void) {
    static char path[600];
    snprintf(path, sizeof(path), "%s/metrics.jsonl", test_folder());
    return path;
}

static StepMetrics step_of(int64_t step, int64_t steps) {
    StepMetrics m;
    step_metrics_init(&m);
    phases[PHASE_DATA] = 0.3702;
    phases[PHASE_OTHER] = 0.9872;
    phases[PHASE_EXPERTS] = 122.0426;
    m.step = step;
    m.steps = steps;
    m.tokens = (uint64_t)step * 98304;
    m.loss = 5.1234;
    m.ce_loss = 5.1;
    m.grad_norm = 1.234;
    m.lr = 3e-4;
    m.step_ms = 123.4;
    m.tokens_per_s = 33123.0;
    m.phase_ms = phases;
    m.expert_load = loads;
    m.dead_experts = dead;
    m.router_entropy = entropy;
    m.num_layers = 3;
    m.mem = 123456789;
    return m;
}

// sends this process's stdout or stderr into a file of the test's folder while it lives
static int redirect(int fd, const char* name) {
    char path[700];
    snprintf(path, sizeof(path), "%s/%s", test_folder(), name);
    fflush(NULL);
    int saved = dup(fd), file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(file, fd);
    close(file);
    return saved;
}

static void restore(int fd, int saved, char* text, size_t size) {
    fflush(NULL);
    ssize_t n = pread(fd, text, size - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    dup2(saved, fd);
    close(saved);
}

// Logs steps first..last; what it prints on stdout is put into printed[20000].
static char printed[20000];
static void log_steps(int64_t resumed, int64_t first, int64_t last) {
    Logger logger;
    int saved = redirect(1, "stdout.txt");
    logger_open(&logger, metrics_path(), resumed, 3);
    for (int64_t step = first; step <= last; step++) {
        StepMetrics m = step_of(step, last);
        logger_step(&logger, &m, true);
    }
    logger_close(&logger);
    logger_close(&logger); // twice is fine
    restore(1, saved, printed, sizeof(printed));
}

// The lines of metrics.jsonl as JSON, each of which must be valid; returns how many.
static int read_lines(cJSON** lines, int max) {
    FILE* file = fopenCheck(metrics_path(), "r");
    char* line = NULL;
    size_t capacity = 0;
    int n = 0;
    while (n < max && getline(&line, &capacity, file) > 0) {
        CHECK(line[strlen(line) - 1] == '\n');
        lines[n] = cJSON_Parse(line);
        if (!CHECK(lines[n] != NULL)) { break; }
        n++;
    }
    free(line);
    fclose(file);
    return n;
}

static void free_lines(cJSON** lines, int n) {
    for (int i = 0; i < n; i++) { cJSON_Delete(lines[i]); }
}

static double number(const cJSON* json, const char* name) {
    const cJSON* item = cJSON_GetObjectItem(json, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

// ----------------------------------------------------------------------------

static void the_step_line_is_that_of_the_design(void) {
    char line[400];
    StepMetrics m = step_of(12, 1000);
    m.mfu = 0.412;
    format_step_line(line, sizeof(line), &m, 3 * 3600 + 12 * 60);
    const char* expected = "step 12/1000 | loss 5.1234 | norm 1.23 | lr 3.0e-04 | 123.4 ms | 33.1k tok/s | mfu 41.2% | "
                           "data 0.3% other 0.8% | eta 3h12m";
    test_check(strcmp(line, expected) == 0, __FILE__, __LINE__, "%s", line);
    m.val_loss = 4.5;
    m.mfu = NAN;
    m.gemm_share = 0.805;
    format_step_line(line, sizeof(line), &m, 5.0);
    CHECK_CONTAINS(line, "| loss 5.1234 | val 4.5000 | norm");
    CHECK_CONTAINS(line, "tok/s | gemm 80.5% | data");
    m.gemm_share = NAN;
    format_step_line(line, sizeof(line), &m, 5.0);
    CHECK_CONTAINS(line, "| mfu n/a |"); // never a wrong percentage
    m.mfu = 0.4;
    m.gemm_share = 0.5;
    format_step_line(line, sizeof(line), &m, 5.0);
    CHECK_CONTAINS(line, "| mfu 40.0% | gemm 50.0% |");
}

static void durations_and_rates_are_short(void) {
    const struct { double seconds; const char* text; } durations[] = {
        {0, "0s"}, {59.4, "59s"}, {59.6, "1m00s"}, {80, "1m20s"}, {3599.6, "1h00m"}, {11520, "3h12m"},
        {183600, "2d03h"}, {-1, "n/a"}, {NAN, "n/a"}, {INFINITY, "n/a"},
    };
    char text[32];
    for (size_t i = 0; i < sizeof(durations) / sizeof(durations[0]); i++) {
        format_duration(text, sizeof(text), durations[i].seconds);
        test_check(strcmp(text, durations[i].text) == 0, __FILE__, __LINE__, "%g s: %s", durations[i].seconds, text);
    }
    const struct { double rate; const char* text; } rates[] = {
        {0, "0"}, {890, "890"}, {999.4, "999"}, {999.6, "1.0k"}, {33123, "33.1k"}, {999949, "999.9k"},
        {999951, "1.00M"}, {1234567, "1.23M"}, {NAN, "n/a"}, {INFINITY, "n/a"},
    };
    for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
        format_rate(text, sizeof(text), rates[i].rate);
        test_check(strcmp(text, rates[i].text) == 0, __FILE__, __LINE__, "%g tok/s: %s", rates[i].rate, text);
    }
}

static void a_file_gets_plain_lines_and_no_bar(void) {
    log_steps(0, 1, 3);
    CHECK(strchr(printed, '\r') == NULL && strchr(printed, '\033') == NULL);
    CHECK(strncmp(printed, "step 1/3 | ", 11) == 0);
    CHECK_CONTAINS(printed, "\nstep 3/3 | ");
    CHECK_CONTAINS(printed, "eta 0s\n");
}

static void metrics_have_exactly_the_fields_of_the_design(void) {
    log_steps(0, 1, 2);
    cJSON* lines[5];
    int n = read_lines(lines, 5);
    if (!CHECK(n == 2)) { return; }
    const cJSON* m = lines[1];
    CHECK(number(m, "step") == 2 && number(m, "tokens") == 196608 && number(m, "loss") == 5.1234);
    CHECK(number(m, "ce_loss") == 5.1 && number(m, "grad_norm") == 1.234 && number(m, "lr") == 3e-4);
    CHECK(number(m, "step_ms") == 123.4 && number(m, "tokens_per_s") == 33123 && number(m, "mem") == 123456789);
    CHECK(cJSON_IsNull(cJSON_GetObjectItem(m, "mfu"))); // not known, but there
    CHECK(!cJSON_HasObjectItem(m, "aux_loss") && !cJSON_HasObjectItem(m, "val_loss"));
    const cJSON* phase = cJSON_GetObjectItem(m, "phases");
    CHECK(cJSON_GetArraySize(phase) == NUM_PHASES + 1);
    CHECK_NEAR(number(phase, "experts"), 122.0426, 1e-4);
    CHECK_NEAR(number(phase, "other"), 0.9872, 1e-6);
    const cJSON* load = cJSON_GetObjectItem(m, "expert_load"); // whether or not there is a balance loss
    CHECK(cJSON_GetArraySize(load) == 3 && cJSON_GetArrayItem(load, 2)->valuedouble == 2.25);
    CHECK(cJSON_IsNull(cJSON_GetArrayItem(load, 1))); // a dense layer
    CHECK(cJSON_GetArrayItem(cJSON_GetObjectItem(m, "dead_experts"), 2)->valuedouble == 3);
    const cJSON* nats = cJSON_GetObjectItem(m, "router_entropy");
    CHECK(cJSON_GetArraySize(nats) == 3 && cJSON_IsNull(cJSON_GetArrayItem(nats, 1)));
    CHECK_NEAR(cJSON_GetArrayItem(nats, 0)->valuedouble, 1.3863, 1e-4);
    free_lines(lines, n);
}

static void optional_losses_appear_when_there_are_some(void) {
    Logger logger;
    int saved = redirect(1, "stdout.txt");
    logger_open(&logger, metrics_path(), 0, 0);
    StepMetrics m = step_of(1, 1);
    m.aux_loss = 0.02;
    m.val_loss = 4.0;
    m.loss = NAN;
    m.grad_norm = INFINITY;
    m.phase_ms = m.expert_load = m.router_entropy = NULL;
    m.dead_experts = NULL;
    logger_step(&logger, &m, true);
    logger_close(&logger);
    restore(1, saved, printed, sizeof(printed));
    CHECK_CONTAINS(printed, "loss nan | val 4.0000 | norm inf");
    cJSON* lines[2];
    int n = read_lines(lines, 2);
    if (!CHECK(n == 1)) { return; }
    CHECK(number(lines[0], "aux_loss") == 0.02 && number(lines[0], "val_loss") == 4.0);
    CHECK(cJSON_IsNull(cJSON_GetObjectItem(lines[0], "loss")));
    CHECK(cJSON_IsNull(cJSON_GetObjectItem(lines[0], "grad_norm")));
    CHECK(!cJSON_HasObjectItem(lines[0], "phases") && !cJSON_HasObjectItem(lines[0], "expert_load"));
    free_lines(lines, n);
}

static void a_float_survives_being_written(void) {
    Logger logger;
    int saved = redirect(1, "stdout.txt");
    logger_open(&logger, metrics_path(), 0, 0);
    float value = 1.23456789f;
    StepMetrics m = step_of(1, 1);
    m.loss = (double)value;
    m.num_layers = 0;
    logger_step(&logger, &m, true);
    logger_close(&logger);
    restore(1, saved, printed, sizeof(printed));
    cJSON* lines[2];
    int n = read_lines(lines, 2);
    CHECK(n == 1 && (float)number(lines[0], "loss") == value);
    free_lines(lines, n);
}

static void many_layers_fit_in_a_line(void) {
    enum { L = 1024 };
    static double load[L];
    static int none[L];
    for (int l = 0; l < L; l++) { load[l] = 123.45678; none[l] = 2147483647; }
    Logger logger;
    int saved = redirect(1, "stdout.txt");
    logger_open(&logger, metrics_path(), 0, L);
    StepMetrics m = step_of(1, 1);
    m.expert_load = m.router_entropy = load;
    m.dead_experts = none;
    m.num_layers = L;
    for (int i = 0; i <= NUM_PHASES; i++) { phases[i] = 1.23456e-105; }
    logger_step(&logger, &m, true);
    logger_close(&logger);
    restore(1, saved, printed, sizeof(printed));
    memset(phases, 0, sizeof(phases));
    cJSON* lines[2];
    int n = read_lines(lines, 2);
    if (CHECK(n == 1)) { CHECK(cJSON_GetArraySize(cJSON_GetObjectItem(lines[0], "dead_experts")) == L); }
    free_lines(lines, n);
}

// ----------------------------------------------------------------------------

static void expect_steps_1_to(int last) {
    cJSON* lines[40];
    int n = read_lines(lines, 40);
    test_check(n == last, __FILE__, __LINE__, "%d lines, not %d", n, last);
    for (int i = 0; i < n; i++) { CHECK(number(lines[i], "step") == i + 1); }
    free_lines(lines, n);
}

static void a_resumed_run_cuts_later_lines_and_goes_on(void) {
    log_steps(0, 1, 10);
    expect_steps_1_to(10);
    log_steps(6, 7, 12); // the checkpoint was of step 6; 7..10 are run again
    expect_steps_1_to(12);
    log_steps(12, 13, 13);
    expect_steps_1_to(13);
    log_steps(20, 21, 20); // nothing to cut, nothing to add
    expect_steps_1_to(13);
}

static void half_a_line_of_a_killed_run_is_cut(void) {
    log_steps(0, 1, 5);
    FILE* file = fopenCheck(metrics_path(), "a");
    fprintf(file, "{\"step\":6,\"tokens\":12");
    fclose(file);
    log_steps(5, 6, 8);
    expect_steps_1_to(8);
    test_write_file(metrics_path(), "{\"st", 4); // killed in its very first line
    log_steps(0, 1, 2);
    expect_steps_1_to(2);
}

static void a_fresh_run_replaces_old_metrics_but_no_other_file(void) {
    log_steps(0, 1, 9);
    log_steps(0, 1, 2);
    expect_steps_1_to(2);
    Logger logger;
    test_write_file(metrics_path(), "int main(void)\n", 15);
    EXPECT_FATAL(logger_open(&logger, metrics_path(), 0, 1), "is not empty and no metrics file");
    EXPECT_FATAL(logger_open(&logger, metrics_path(), 5, 1), "is not empty and no metrics file");
    char text[20];
    FILE* file = fopenCheck(metrics_path(), "r");
    CHECK(fread(text, 1, 15, file) == 15 && memcmp(text, "int main(void)\n", 15) == 0);
    fclose(file);
    remove(metrics_path());
}

static void metrics_that_cannot_be_opened_are_refused_at_start(void) {
    Logger logger;
    EXPECT_FATAL(logger_open(&logger, "/nonexistent/m.jsonl", 0, 1), "--metrics: cannot open /nonexistent/m.jsonl");
    EXPECT_FATAL(logger_open(&logger, test_folder(), 0, 1), "--metrics: cannot open");
}

static void a_full_disk_is_reported_once_and_training_goes_on(void) {
    char warnings[4000];
    int saved_err = redirect(2, "stderr.txt"), saved_out = redirect(1, "stdout.txt");
    Logger logger;
    logger_open(&logger, "/dev/full", 0, 3);
    for (int64_t step = 1; step <= 5; step++) {
        StepMetrics m = step_of(step, 5);
        logger_step(&logger, &m, true);
    }
    logger_close(&logger);
    restore(1, saved_out, printed, sizeof(printed));
    restore(2, saved_err, warnings, sizeof(warnings));
    CHECK_CONTAINS(warnings, "writing the metrics /dev/full failed: No space left on device; training goes on");
    CHECK(strchr(warnings, '\n') == warnings + strlen(warnings) - 1); // one line
    CHECK_CONTAINS(printed, "step 5/5");
}

static void room_on_the_disk_is_used_again_without_half_lines(void) {
    char warnings[4000];
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 1200; // stands in for the disk: two lines of about 500 bytes fit
    signal(SIGXFSZ, SIG_IGN);
    int saved_err = redirect(2, "stderr.txt"), saved_out = redirect(1, "stdout.txt");
    Logger logger;
    logger_open(&logger, metrics_path(), 0, 3);
    StepMetrics m = step_of(1, 8);
    for (m.step = 1; m.step <= 8; m.step++) {
        logger_clear(&logger);
        setrlimit(RLIMIT_FSIZE, m.step < 7 ? &small : &before);
        metrics_line(&logger, &m);
        metrics_append(&logger);
    }
    setrlimit(RLIMIT_FSIZE, &before);
    logger_close(&logger);
    restore(1, saved_out, printed, sizeof(printed));
    restore(2, saved_err, warnings, sizeof(warnings));
    CHECK_CONTAINS(warnings, "File too large");
    CHECK(strchr(warnings, '\n') == warnings + strlen(warnings) - 1);
    cJSON* lines[10];
    int n = read_lines(lines, 10);
    if (CHECK(n == 4)) { CHECK(number(lines[1], "step") == 2 && number(lines[2], "step") == 7); }
    free_lines(lines, n);
}

// layer 1 is dense; expert 2 of layer 0 gets its last token in step 5, expert 0 of layer 2 one in every step but those
// from 20 to 28, expert 3 of layer 2 none ever
static void dead_experts_are_named_once_and_at_the_end(void) {
    int saved = redirect(1, "stdout.txt");
    Logger logger;
    logger_open(&logger, NULL, 0, 3);
    for (int64_t step = 1; step <= 40; step++) {
        double tokens[12] = {5, 5, step <= 5 ? 1 : 0, 5, 0, 0, 0, 0, step < 20 || step > 28 ? 1 : 0, 5, 5, 0};
        StepMetrics m = step_of(step, 40);
        logger_step(&logger, &m, false);
        logger_experts(&logger, &m, tokens, 4);
    }
    logger_close(&logger);
    restore(1, saved, printed, sizeof(printed));
    const char* expected = "step 10: no token for 10 steps: 1 expert: layer 2: 3\n"
                           "step 15: no token for 10 steps: 1 expert: layer 0: 2\n"
                           "dead experts at the end: 2: layer 0: 2 | layer 2: 3\n";
    test_check(strcmp(printed, expected) == 0, __FILE__, __LINE__, "%s", printed);
}

static void a_thousand_dead_experts_are_one_line(void) {
    enum { E = 1000 };
    static double tokens[3 * E];
    int saved = redirect(1, "stdout.txt");
    Logger logger;
    logger_open(&logger, NULL, 0, 3);
    for (int64_t step = 1; step <= 12; step++) {
        StepMetrics m = step_of(step, 12);
        logger_experts(&logger, &m, tokens, E);
    }
    logger_close(&logger);
    restore(1, saved, printed, sizeof(printed));
    CHECK_CONTAINS(printed, "step 10: no token for 10 steps: 2000 experts: layer 0: 0 1 2 ");
    CHECK_CONTAINS(printed, " ...\ndead experts at the end: 2000: layer 0: 0 1");
    CHECK(strlen(printed) < 1000);
}

static void eta_follows_the_clock_not_the_first_step(void) {
    Logger logger;
    logger_open(&logger, NULL, 0, 0);
    StepMetrics m = step_of(1, 101);
    m.step_ms = 1000.0;
    CHECK_NEAR(logger_eta(&logger, &m), 100.0, 1e-9); // all it knows yet
    logger.start_us -= 2e6;                           // as if 2 s had passed since
    m.step = 11;
    CHECK_NEAR(logger_eta(&logger, &m), 90 * 0.2, 0.1 + 90 * 0.02);
    logger_close(&logger);
}

// on a terminal: the bar comes back after every line but the last, and is taken away before anything is printed
static void the_bar_never_shares_a_line_with_text(void) {
    int saved = redirect(1, "stdout.txt");
    Logger logger;
    logger_open(&logger, NULL, 0, 0);
    logger.terminal = true;
    for (int64_t step = 1; step <= 4; step++) {
        StepMetrics m = step_of(step, 4);
        logger_step(&logger, &m, true);
        if (step == 2) { logger_print(&logger, "sample: %s\n", "once upon a time"); }
    }
    logger_close(&logger);
    restore(1, saved, printed, sizeof(printed));
    CHECK_CONTAINS(printed, "eta ");
    CHECK_CONTAINS(printed, "\r\033[Ksample: once upon a time\n");
    CHECK_CONTAINS(printed, "sample: once upon a time\nstep 3/4");
    CHECK_CONTAINS(printed, "\r\033[Kstep 4/4");
    CHECK(printed[strlen(printed) - 1] == '\n');
    CHECK_CONTAINS(printed, "]  25%");
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(the_step_line_is_that_of_the_design);
    RUN(durations_and_rates_are_short);
    RUN(a_file_gets_plain_lines_and_no_bar);
    RUN(metrics_have_exactly_the_fields_of_the_design);
    RUN(optional_losses_appear_when_there_are_some);
    RUN(a_float_survives_being_written);
    RUN(many_layers_fit_in_a_line);
    RUN(a_resumed_run_cuts_later_lines_and_goes_on);
    RUN(half_a_line_of_a_killed_run_is_cut);
    RUN(a_fresh_run_replaces_old_metrics_but_no_other_file);
    RUN(metrics_that_cannot_be_opened_are_refused_at_start);
    RUN(a_full_disk_is_reported_once_and_training_goes_on);
    RUN(room_on_the_disk_is_used_again_without_half_lines);
    RUN(dead_experts_are_named_once_and_at_the_end);
    RUN(a_thousand_dead_experts_are_one_line);
    RUN(eta_follows_the_clock_not_the_first_step);
    RUN(the_bar_never_shares_a_line_with_text);
    return test_summary();
}
