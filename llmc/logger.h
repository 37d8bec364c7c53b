// What a run says: one line a step for people (and a progress bar on a terminal), one JSON object a step for programs.
// A disk that fills up costs the metrics, never the training.
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include "check.h"
#include "profiler.h"
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

// One optimizer step. NAN in a double or NULL in a pointer: there is none, and it is left out.
typedef struct {
    int64_t step, steps;        // step 1 is the first; steps: how many the run has
    uint64_t tokens;            // trained on so far, this step included
    double loss;                // what is differentiated: ce_loss + the balance terms
    double ce_loss, aux_loss;   // aux_loss NAN: no balance loss
    double val_loss;            // cross-entropy; NAN: no validation at this step
    double grad_norm, lr;
    double step_ms, tokens_per_s;
    double mfu;                 // share of the card's nominal peak, 0..1; NAN: the peak is not known
    double gemm_share;          // share of the GEMM rate measured on this machine, 0..1; NAN: not measured
    const double* phase_ms;     // [NUM_PHASES + 1], profiler.h
    double* expert_load;        // [num_layers] tokens of the busiest expert / mean over experts; NAN: a dense layer
    int* dead_experts;          // [num_layers] experts that got no token
    double* router_entropy;     // [num_layers] of the router's probabilities, mean over the tokens, in nats: ln E, it has no
                                // preference, 0, it is certain; NAN: a dense layer
    int num_layers;
    uint64_t mem;               // bytes in use
} StepMetrics;

// nothing known yet
static inline void step_metrics_init(StepMetrics* m) {
    memset(m, 0, sizeof(*m));
    m->loss = m->ce_loss = m->aux_loss = m->val_loss = m->mfu = m->gemm_share = NAN;
}

// the same, with room for what is known of each layer
static inline void step_metrics_create(StepMetrics* m, int num_layers) {
    step_metrics_init(m);
    m->num_layers = num_layers;
    m->expert_load = (double*)callocCheck((size_t)num_layers, sizeof(double));
    m->dead_experts = (int*)callocCheck((size_t)num_layers, sizeof(int));
    m->router_entropy = (double*)callocCheck((size_t)num_layers, sizeof(double));
}

static inline void step_metrics_free(StepMetrics* m) {
    free(m->expert_load);
    free(m->dead_experts);
    free(m->router_entropy);
}

typedef struct {
    const char* path;           // of metrics.jsonl, NULL: none
    int fd;
    bool regular, failed;       // failed: has been reported
    bool cut;                   // an earlier run's later lines are gone; not before there is a line to put in their place
    int64_t tail;               // bytes of whole lines
    char* text;
    size_t length, capacity;
    bool terminal, bar_shown;
    double start_us;            // when the first step of this process had been done
    int64_t start_step;
    int* idle;                  // [num_layers * num_experts] steps since an expert's last token; NULL: nobody counts
    int num_layers, num_experts;
} Logger;

enum { DEAD_AFTER = 10 }; // steps without a token make an expert a dead one

// How layer l used its E experts over the step. tokens (E): slots of each, K a token; NULL: a dense layer. entropy: of the
// router, summed over the tokens.
static inline void step_metrics_router(StepMetrics* m, int l, const double* tokens, int E, int K, double entropy) {
    double most = 0, sum = 0;
    m->dead_experts[l] = 0;
    for (int e = 0; e < E && tokens != NULL; e++) {
        most = tokens[e] > most ? tokens[e] : most;
        sum += tokens[e];
        m->dead_experts[l] += tokens[e] == 0;
    }
    m->expert_load[l] = tokens != NULL ? most * E / sum : NAN;
    m->router_entropy[l] = tokens != NULL ? entropy * K / sum : NAN;
}

// ----------------------------------------------------------------------------
// numbers for people

// 45s, 1m20s, 3h12m, 2d03h; n/a where it is not known
static inline void format_duration(char* text, size_t size, double seconds) {
    if (!(seconds >= 0.0 && seconds < 1e9)) { snprintf(text, size, "n/a"); return; }
    long long s = (long long)(seconds + 0.5);
    if (s < 60) { snprintf(text, size, "%llds", s); }
    else if (s < 3600) { snprintf(text, size, "%lldm%02llds", s / 60, s % 60); }
    else if (s < 86400) { snprintf(text, size, "%lldh%02lldm", s / 3600, s / 60 % 60); }
    else { snprintf(text, size, "%lldd%02lldh", s / 86400, s / 3600 % 24); }
}

// 890, 33.1k, 1.23M
static inline void format_rate(char* text, size_t size, double rate) {
    if (!(rate >= 0.0 && rate < 1e15)) { snprintf(text, size, "n/a"); }
    else if (rate < 999.5) { snprintf(text, size, "%.0f", rate); }
    else if (rate < 999950.0) { snprintf(text, size, "%.1fk", rate / 1e3); }
    else { snprintf(text, size, "%.2fM", rate / 1e6); }
}

// step 12/1000 | loss 5.1234 | norm 1.23 | lr 3.0e-04 | 123.4 ms | 33.1k tok/s | mfu 41.2% | data 0.3% other 0.8% |
// eta 3h12m, all in one line
static inline void format_step_line(char* text, size_t size, const StepMetrics* m, double eta_seconds) {
    char rate[32], eta[32], val[40] = "", mfu[80] = "";
    format_rate(rate, sizeof(rate), m->tokens_per_s);
    format_duration(eta, sizeof(eta), eta_seconds);
    if (isfinite(m->val_loss)) { snprintf(val, sizeof(val), " | val %.4f", m->val_loss); }
    if (isfinite(m->mfu)) { snprintf(mfu, sizeof(mfu), " | mfu %.1f%%", 100.0 * m->mfu); }
    if (isfinite(m->gemm_share)) {
        size_t n = strlen(mfu);
        snprintf(mfu + n, sizeof(mfu) - n, " | gemm %.1f%%", 100.0 * m->gemm_share);
    }
    if (mfu[0] == '\0') { snprintf(mfu, sizeof(mfu), " | mfu n/a"); }
    double data = m->phase_ms != NULL ? 100.0 * m->phase_ms[PHASE_DATA] / m->step_ms : 0.0;
    double other = m->phase_ms != NULL ? 100.0 * m->phase_ms[PHASE_OTHER] / m->step_ms : 0.0;
    snprintf(text, size, "step %lld/%lld | loss %.4f%s | norm %.3g | lr %.1e | %.1f ms | %s tok/s%s | "
             "data %.1f%% other %.1f%% | eta %s", (long long)m->step, (long long)m->steps, m->loss, val, m->grad_norm,
             m->lr, m->step_ms, rate, mfu, data, other, eta);
}

// ----------------------------------------------------------------------------
// metrics.jsonl

PRINTF_LIKE(2, 3)
static inline void metrics_printf(Logger* log, const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    size_t room = log->capacity - log->length;
    int n = vsnprintf(log->text + log->length, room, fmt, args);
    va_end(args);
    log->length += n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
}

// 9 digits say a float exactly; NaN and infinity, which JSON does not have, are null
static inline void metrics_number(Logger* log, const char* name, double value) {
    if (isfinite(value)) { metrics_printf(log, ",\"%s\":%.9g", name, value); }
    else { metrics_printf(log, ",\"%s\":null", name); }
}

static inline void metrics_line(Logger* log, const StepMetrics* m) {
    log->length = 0;
    metrics_printf(log, "{\"step\":%lld,\"tokens\":%llu", (long long)m->step, (unsigned long long)m->tokens);
    metrics_number(log, "loss", m->loss);
    metrics_number(log, "ce_loss", m->ce_loss);
    if (isfinite(m->aux_loss)) { metrics_number(log, "aux_loss", m->aux_loss); }
    if (isfinite(m->val_loss)) { metrics_number(log, "val_loss", m->val_loss); }
    metrics_number(log, "grad_norm", m->grad_norm);
    metrics_number(log, "lr", m->lr);
    metrics_number(log, "step_ms", m->step_ms);
    metrics_number(log, "tokens_per_s", m->tokens_per_s);
    metrics_number(log, "mfu", m->mfu);
    if (isfinite(m->gemm_share)) { metrics_number(log, "gemm_share", m->gemm_share); }
    if (m->phase_ms != NULL) {
        metrics_printf(log, ",\"phases\":{");
        for (int i = 0; i <= NUM_PHASES; i++) {
            metrics_printf(log, "%s\"%s\":%.7g", i > 0 ? "," : "", phase_name(i), m->phase_ms[i]);
        }
        metrics_printf(log, "}");
    }
    for (int l = 0; m->expert_load != NULL && l < m->num_layers; l++) {
        const char* before = l > 0 ? "," : ",\"expert_load\":[";
        if (isfinite(m->expert_load[l])) { metrics_printf(log, "%s%.5g", before, m->expert_load[l]); }
        else { metrics_printf(log, "%snull", before); }
    }
    if (m->expert_load != NULL && m->num_layers > 0) { metrics_printf(log, "]"); }
    for (int l = 0; m->dead_experts != NULL && l < m->num_layers; l++) {
        metrics_printf(log, "%s%d", l > 0 ? "," : ",\"dead_experts\":[", m->dead_experts[l]);
    }
    if (m->dead_experts != NULL && m->num_layers > 0) { metrics_printf(log, "]"); }
    for (int l = 0; m->router_entropy != NULL && l < m->num_layers; l++) {
        const char* before = l > 0 ? "," : ",\"router_entropy\":[";
        if (isfinite(m->router_entropy[l])) { metrics_printf(log, "%s%.5g", before, m->router_entropy[l]); }
        else { metrics_printf(log, "%snull", before); }
    }
    if (m->router_entropy != NULL && m->num_layers > 0) { metrics_printf(log, "]"); }
    metrics_printf(log, ",\"mem\":%llu}\n", (unsigned long long)m->mem);
}

// Appends the line, or leaves the file as it was: half a line never stays. The first failure is reported, the next step
// tries again (someone may have made room).
static inline void metrics_append(Logger* log) {
    size_t done = 0;
    if (log->regular && !log->cut) { log->cut = ftruncate(log->fd, (off_t)log->tail) == 0; }
    while (done < log->length && (log->cut || !log->regular)) {
        ssize_t n = write(log->fd, log->text + done, log->length - done);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) { break; }
        done += (size_t)n;
    }
    if (done == log->length) { log->tail += (int64_t)done; return; }
    if (!log->failed) {
        warn("writing the metrics %s failed: %s; training goes on without these lines", log->path, strerror(errno));
    }
    log->failed = true;
    if (log->regular && ftruncate(log->fd, (off_t)log->tail) == 0) { lseek(log->fd, (off_t)log->tail, SEEK_SET); }
}

// The step that a line of metrics.jsonl is about; -1: it is no such line, or only the beginning of one.
static inline int64_t metrics_step_of(const char* line, size_t n) {
    const char* start = "{\"step\":";
    size_t head = strlen(start);
    bool whole = n > head + 2 && strncmp(line, start, head) == 0 && line[n - 2] == '}' && line[n - 1] == '\n';
    return whole ? strtoll(line + head, NULL, 10) : -1;
}

// How many bytes of an earlier run's lines stay: those of steps up to `step`, the later ones will be run again.
static inline int64_t metrics_bytes_until(const char* path, int64_t step) {
    FILE* file = fopenCheck(path, "r");
    char* line = NULL;
    size_t capacity = 0;
    ssize_t n;
    int64_t kept = 0;
    while ((n = getline(&line, &capacity, file)) > 0) {
        int64_t at = metrics_step_of(line, (size_t)n);
        bool foreign = at < 0 && kept == 0 && strncmp(line, "{\"step\":", n < 8 ? (size_t)n : 8) != 0;
        if (foreign) { fatal("--metrics: %s is not empty and no metrics file: remove it or name another", path); }
        if (at < 0 || at > step) { break; }
        kept += n;
    }
    free(line);
    fclose(file);
    return kept;
}

static inline void metrics_open(Logger* log, const char* path, int64_t resumed_step, int num_layers) {
    struct stat info;
    log->path = path;
    log->fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (log->fd < 0 || fstat(log->fd, &info) != 0) { fatal("--metrics: cannot open %s: %s", path, strerror(errno)); }
    log->regular = S_ISREG(info.st_mode);
    if (log->regular) {
        log->tail = metrics_bytes_until(path, resumed_step);
        if (lseek(log->fd, (off_t)log->tail, SEEK_SET) < 0) {
            fatal("--metrics: cannot continue %s: %s", path, strerror(errno));
        }
    }
    log->capacity = 4096 + 64 * (size_t)num_layers; // no line is longer
    log->text = (char*)mallocCheck(log->capacity);
}

// ----------------------------------------------------------------------------
// the terminal

// Takes the progress bar away so that something else can be printed; the next step line brings it back.
static inline void logger_clear(Logger* log) {
    if (log->bar_shown) { printf("\r\033[K"); }
    log->bar_shown = false;
}

// Prints text that is no step line (a sample, a note), with the bar out of its way.
PRINTF_LIKE(2, 3)
static inline void logger_print(Logger* log, const char* fmt, ...) {
    logger_clear(log);
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    fflush(stdout);
}

// [########----------]  42%  eta 1m20s, as wide as the terminal allows; it grows by eighths of a character
static inline void logger_bar(Logger* log, int64_t step, int64_t steps, double eta_seconds) {
    static const char* const eighths[8] = { // UTF-8 of U+258F ... U+2589
        "", "\xe2\x96\x8f", "\xe2\x96\x8e", "\xe2\x96\x8d",
        "\xe2\x96\x8c", "\xe2\x96\x8b", "\xe2\x96\x8a", "\xe2\x96\x89"
    };
    struct winsize window;
    int columns = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 ? window.ws_col : 80;
    int width = columns - 28 < 10 ? 10 : columns - 28 > 60 ? 60 : columns - 28;
    double done = steps > 0 ? (double)step / (double)steps : 1.0;
    int filled = (int)(done * width * 8 + 0.5);
    char eta[32];
    format_duration(eta, sizeof(eta), eta_seconds);
    printf("\r\033[K[");
    for (int i = 0; i < filled / 8; i++) { fputs("\xe2\x96\x88", stdout); }
    fputs(eighths[filled % 8], stdout);
    for (int i = (filled + 7) / 8; i < width; i++) { fputc(' ', stdout); }
    printf("] %3.0f%%  eta %s", 100.0 * done, eta);
    log->bar_shown = true;
}

// ----------------------------------------------------------------------------
// a run

// metrics_path: where metrics.jsonl goes, or NULL. resumed_step: the checkpoint's, 0 for a fresh run: lines of later
// steps are cut from the file, the others stay. Fatal if the file cannot be written or holds something else.
static inline void logger_open(Logger* log, const char* metrics_path, int64_t resumed_step, int num_layers) {
    memset(log, 0, sizeof(*log));
    log->fd = -1;
    log->start_step = -1;
    // stderr as well: mpirun gives its first rank a terminal as stdout even where its own output goes to a file
    log->terminal = isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) && getenv("NO_PROGRESS") == NULL;
    if (metrics_path != NULL) { metrics_open(log, metrics_path, resumed_step, num_layers); }
}

// Seconds until the run ends, from the wall clock since the first step of this process was done (so that validation and
// checkpoints count, and the slow first step does not); for that first step itself, its own time.
static inline double logger_eta(Logger* log, const StepMetrics* m) {
    double now_us = profiler_clock_us();
    double left = (double)(m->steps - m->step);
    if (log->start_step < 0) {
        log->start_step = m->step;
        log->start_us = now_us;
        return left * m->step_ms * 1e-3;
    }
    return left * (now_us - log->start_us) * 1e-6 / (double)(m->step - log->start_step);
}

// Logs one finished step: in metrics.jsonl, and on stdout if it is to be shown (on a terminal the bar moves at every
// step).
static inline void logger_step(Logger* log, const StepMetrics* m, bool shown) {
    char line[400];
    double eta_seconds = logger_eta(log, m);
    format_step_line(line, sizeof(line), m, eta_seconds);
    if (shown || log->terminal) { logger_clear(log); }
    if (shown) { puts(line); }
    if (log->terminal && m->step < m->steps) { logger_bar(log, m->step, m->steps, eta_seconds); }
    fflush(stdout);
    if (log->fd >= 0) {
        metrics_line(log, m);
        metrics_append(log);
    }
}

// "layer 2: 3 7 11 | layer 5: 0": the experts that have had no token for `steps` steps, or longer. Returns how many.
static inline int dead_experts_text(const Logger* log, char* text, size_t size, int steps, bool or_longer) {
    int found = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int l = 0; l < log->num_layers; l++) {
        int in_layer = 0;
        for (int e = 0; e < log->num_experts; e++) {
            int idle = log->idle[(size_t)l * (size_t)log->num_experts + (size_t)e];
            if (idle < steps || (idle > steps && !or_longer)) { continue; }
            found++;
            char layer[32] = "";
            if (in_layer++ == 0) { snprintf(layer, sizeof(layer), "%slayer %d:", used > 0 ? " | " : "", l); }
            if (used + 40 < size) { used += (size_t)snprintf(text + used, size - used, "%s %d", layer, e); }
            else { snprintf(text + used, size - used, " ..."); } // that many are named no more
        }
    }
    return found;
}

// Follows which experts get no token, and names those of which it is the DEAD_AFTERth step in a row. tokens: of this step,
// [num_layers * num_experts]; m->expert_load says which layers are dense.
static inline void logger_experts(Logger* log, const StepMetrics* m, const double* tokens, int num_experts) {
    char text[400];
    if (log->idle == NULL) {
        log->num_layers = m->num_layers;
        log->num_experts = num_experts;
        log->idle = (int*)callocCheck((size_t)m->num_layers * (size_t)num_experts, sizeof(int));
    }
    for (int i = 0; i < log->num_layers * num_experts; i++) {
        bool idle = isfinite(m->expert_load[i / num_experts]) && tokens[i] == 0.0;
        log->idle[i] = idle ? log->idle[i] + 1 : 0;
    }
    int dead = dead_experts_text(log, text, sizeof(text), DEAD_AFTER, false);
    if (dead > 0) {
        logger_print(log, "step %lld: no token for %d steps: %d expert%s: %s\n", (long long)m->step, DEAD_AFTER, dead,
                     dead == 1 ? "" : "s", text);
    }
}

// Takes the bar away and closes the file; safe to call twice. Dead experts are named once more.
static inline void logger_close(Logger* log) {
    logger_clear(log);
    char text[400];
    int dead = log->idle != NULL ? dead_experts_text(log, text, sizeof(text), DEAD_AFTER, true) : 0;
    if (dead > 0) { printf("dead experts at the end: %d: %s\n", dead, text); }
    free(log->idle);
    log->idle = NULL;
    fflush(stdout);
    if (log->fd >= 0 && close(log->fd) != 0 && !log->failed) {
        warn("writing the metrics %s failed: %s", log->path, strerror(errno));
    }
    log->fd = -1;
    free(log->text);
    log->text = NULL;
}

#endif // LLMC_LOGGER_H
