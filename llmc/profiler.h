// Where the time of a step goes: named phases, `other` = wall - sum, a table at the end, and a timeline for Perfetto.
// Always on: a phase switch is one clock_gettime and one addition. Nothing is allocated after profiler_init.
#ifndef LLMC_PROFILER_H
#define LLMC_PROFILER_H

#include "check.h"
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// The words are the sections of the trainers, the function prefixes and the files of dev/cuda.
enum Phase {
    PHASE_DATA, PHASE_EMBEDDING, PHASE_ATTENTION, PHASE_QKV_O, PHASE_ROUTER, PHASE_PERMUTE, PHASE_EXPERTS,
    PHASE_LM_HEAD, PHASE_NORMS, PHASE_GRAD_NORM, PHASE_OPTIMIZER, PHASE_ALLREDUCE, PHASE_CHECKPOINT, PHASE_EVAL,
    NUM_PHASES,
    PHASE_OTHER = NUM_PHASES // what no call has named
};

static inline const char* phase_name(int phase) {
    static const char* const names[NUM_PHASES + 1] = {
        "data", "embedding", "attention", "qkv_o", "router", "permute", "experts",
        "lm_head", "norms", "grad_norm", "optimizer", "allreduce", "checkpoint", "eval", "other"
    };
    return phase >= 0 && phase <= NUM_PHASES ? names[phase] : "?";
}

#define TRACE_MAX_DEPTH 16         // spans within spans
#define TRACE_BUFFER_EVENTS 16384  // kept in memory between two writes
#define TRACE_BUFFER_BYTES 65536   // of text, a write
#define TRACE_EVENT_BYTES 400      // no event's text is longer
#define TRACE_LIMIT 100000000      // bytes of the file: Chrome's viewer gets slow above

// the rows of the timeline; a rank is a process
enum { TRACK_HOST, TRACK_COMPUTE, TRACK_ALLREDUCE, TRACK_LOADER, NUM_TRACKS };

static inline double profiler_clock_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

typedef struct {
    char name[40];
    int layer;                // -1: none
    int track;                // a row of the timeline
    int depth;                // how many boxes contain it: of two that start together the outer one comes first
    double start_us, end_us;  // profiler_clock_us
} TraceEvent;

typedef struct {
    int layer;                // -1: none
    double start_us, end_us;
} TraceLayer;

typedef struct {
    int fd;                   // -1: no --trace, or it failed
    char* path;
    int rank;
    double origin_us;         // profiler_clock_us where the timeline begins
    char* run;                // JSON: what was run, on what (profiler_describe); NULL: not told
    int64_t tail, limit;      // bytes before the closing brackets, and how many there may be
    int64_t full_at;          // the step at which the limit stopped it, -1: not yet
    bool empty;
    TraceEvent* events;       // [TRACE_BUFFER_EVENTS]
    size_t num_events;
    char* text;               // [room]
    size_t length, room;
} Trace;

typedef struct {
    // the last step's result
    int64_t step;
    double step_ms, phase_ms[NUM_PHASES + 1];
    // the step under way
    bool in_step;
    int phase, layer;
    int held;                 // the phase that all time is counted for, -1: each its own
    double step_start_us, phase_start_us;
    // over all steps but the first, which pays for first touches of memory; the last column is the step
    int64_t num_steps;
    double first_ms, sum_ms[NUM_PHASES + 2], min_ms[NUM_PHASES + 2], max_ms[NUM_PHASES + 2];
    // the timeline
    TraceEvent spans[TRACE_MAX_DEPTH];
    int depth;
    TraceLayer layers[NUM_TRACKS]; // boxes that still grow: neighbouring phases of one layer
    Trace trace;
} Profiler;

// ----------------------------------------------------------------------------
// The timeline's file: JSON in Chrome's Trace Event Format. It ends with its closing brackets after every step and the
// next events are written over them, so a run that is killed leaves a file that opens.

static inline bool trace_pwrite(Trace* t, const char* text, size_t n, int64_t offset) {
    while (n > 0) {
        ssize_t written = pwrite(t->fd, text, n, (off_t)offset);
        if (written <= 0) {
            if (written < 0 && errno == EINTR) { continue; }
            return false;
        }
        text += written;
        offset += written;
        n -= (size_t)written;
    }
    return true;
}

PRINTF_LIKE(2, 3)
static inline void trace_printf(Trace* t, const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    size_t room = t->room - t->length;
    int n = vsnprintf(t->text + t->length, room, fmt, args);
    va_end(args);
    t->length += n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
}

// a JSON string; what a span's name may contain that JSON may not is escaped, bytes beyond ASCII become '?'
static inline void trace_string(Trace* t, const char* s) {
    trace_printf(t, "\"");
    for (; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\' || c < 32) { trace_printf(t, "\\u%04x", c); }
        else { trace_printf(t, "%c", c < 127 ? c : '?'); }
    }
    trace_printf(t, "\"");
}

// clock_us: where this rank's times begin, so that those of several ranks of a machine can be laid side by side
static inline void trace_brackets(Trace* t) {
    trace_printf(t, "\n],\"displayTimeUnit\":\"ms\",\"otherData\":{\"program\":");
    trace_string(t, program_name);
    trace_printf(t, ",\"rank\":%d,\"clock_us\":%.3f", t->rank, t->origin_us);
    if (t->run != NULL) { trace_printf(t, ",\"run\":%s", t->run); }
    if (t->full_at >= 0) {
        trace_printf(t, ",\"note\":\"stopped at step %lld, where the file reached its limit of %lld bytes\"",
                     (long long)t->full_at, (long long)t->limit);
    }
    trace_printf(t, "}}\n");
}

// A full disk ends the timeline, not the training: its old brackets go back to where they were.
static inline void trace_failed(Trace* t, int64_t good_tail) {
    warn("writing the trace %s failed: %s; training goes on without it", t->path, strerror(errno));
    t->length = 0;
    trace_brackets(t);
    bool whole = trace_pwrite(t, t->text, t->length, good_tail);
    if (whole && ftruncate(t->fd, (off_t)(good_tail + (int64_t)t->length)) != 0) { whole = false; }
    close(t->fd);
    t->fd = -1;
}

// Writes the text gathered so far; `last`: and the brackets after it.
static inline bool trace_write_text(Trace* t, bool last) {
    size_t n = t->length;
    if (last) { trace_brackets(t); }
    if (!trace_pwrite(t, t->text, t->length, t->tail)) { return false; }
    t->tail += (int64_t)n;
    t->length = 0;
    return true;
}

// by start; where two start together the outer one first, as viewers want it
static inline int trace_event_order(const void* left, const void* right) {
    const TraceEvent *a = (const TraceEvent*)left, *b = (const TraceEvent*)right;
    if (a->start_us != b->start_us) { return a->start_us < b->start_us ? -1 : 1; }
    return (a->depth > b->depth) - (a->depth < b->depth);
}

static inline void trace_event_text(Trace* t, const TraceEvent* e) {
    trace_printf(t, "%s{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"name\":", t->empty ? "" : ",\n",
                 t->rank, e->track, e->start_us - t->origin_us, e->end_us - e->start_us);
    trace_string(t, e->name);
    if (e->layer >= 0) { trace_printf(t, ",\"args\":{\"layer\":%d}", e->layer); }
    trace_printf(t, "}");
    t->empty = false;
}

// Writes the events gathered so far. Near the limit none of them, so that the timeline stops between two steps.
static inline void trace_flush(Trace* t, int64_t step) {
    size_t n = t->num_events;
    t->num_events = 0;
    if (t->fd < 0 || t->full_at >= 0) { return; }
    int64_t run_bytes = (int64_t)t->room - TRACE_BUFFER_BYTES;
    if (t->tail + run_bytes + (int64_t)(n + 2) * TRACE_EVENT_BYTES / 2 > t->limit) { // an event takes 100 to 200 bytes
        t->full_at = step;
        n = 0;
        warn("the trace %s stops at step %lld: its limit of %lld bytes is reached", t->path, (long long)step,
             (long long)t->limit);
    }
    qsort(t->events, n, sizeof(TraceEvent), trace_event_order);
    int64_t good_tail = t->tail;
    bool good = true;
    for (size_t i = 0; i < n && good; i++) {
        trace_event_text(t, &t->events[i]);
        if (t->length > TRACE_BUFFER_BYTES - 2 * TRACE_EVENT_BYTES) { good = trace_write_text(t, false); }
    }
    if (!good || !trace_write_text(t, true)) { trace_failed(t, good_tail); }
}

// trace.json; of rank 1 trace.rank1.json
static inline char* trace_path_of_rank(const char* path, int rank) {
    const char* dot = strrchr(path, '.');
    size_t stem = dot != NULL && strcmp(dot, ".json") == 0 ? (size_t)(dot - path) : strlen(path), room = strlen(path) + 24;
    char* result = (char*)mallocCheck(room);
    if (rank == 0) { snprintf(result, room, "%s", path); }
    else { snprintf(result, room, "%.*s.rank%d%s", (int)stem, path, rank, path + stem); }
    return result;
}

static inline void trace_name(Trace* t, int track, const char* kind, const char* name) {
    trace_printf(t, "%s{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":", t->empty ? "" : ",\n",
                 t->rank, track, kind);
    trace_string(t, name);
    trace_printf(t, "}}");
    t->empty = false;
}

static inline void trace_open(Trace* t, const char* path, int rank) {
    memset(t, 0, sizeof(*t));
    t->fd = -1;
    t->full_at = -1;
    t->limit = TRACE_LIMIT;
    t->rank = rank;
    t->origin_us = profiler_clock_us();
    if (path == NULL) { return; }
    t->path = trace_path_of_rank(path, rank);
    t->fd = open(t->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (t->fd < 0) { fatal("--trace: cannot create %s: %s", t->path, strerror(errno)); }
    if (lseek(t->fd, 0, SEEK_SET) < 0) { fatal("--trace: %s is no regular file: %s", t->path, strerror(errno)); }
    t->events = (TraceEvent*)callocCheck(TRACE_BUFFER_EVENTS, sizeof(TraceEvent));
    t->room = TRACE_BUFFER_BYTES;
    t->text = (char*)callocCheck(t->room, 1);
    trace_printf(t, "{\"traceEvents\":[\n");
    t->empty = true;
    char process[32];
    snprintf(process, sizeof(process), "rank %d", rank);
    trace_name(t, TRACK_HOST, "process_name", process);
    trace_name(t, TRACK_HOST, "thread_name", "host");
    if (!trace_write_text(t, true)) { fatal("--trace: cannot write %s: %s", t->path, strerror(errno)); }
}

// ----------------------------------------------------------------------------
// Phases and spans. Every function takes NULL for "no profiler", so tests call forward without one.

// Starts measuring. trace_path: the timeline's file, or NULL; fatal if it cannot be created. Each rank has a file of its
// own: trace.json, trace.rank1.json ...
static inline void profiler_init_rank(Profiler* p, const char* trace_path, int rank) {
    memset(p, 0, sizeof(*p));
    p->phase = PHASE_OTHER;
    p->layer = p->held = -1;
    for (int i = 0; i < NUM_PHASES + 2; i++) { p->min_ms[i] = INFINITY; }
    for (int i = 0; i < NUM_TRACKS; i++) { p->layers[i].layer = -1; }
    trace_open(&p->trace, trace_path, rank);
}

static inline void profiler_init(Profiler* p, const char* trace_path) { profiler_init_rank(p, trace_path, 0); }

// Names a row of the timeline: TRACK_HOST is "host" already, a GPU trainer has one a stream.
static inline void profiler_track_name(Profiler* p, int track, const char* name) {
    if (p == NULL || p->trace.fd < 0) { return; }
    int64_t good_tail = p->trace.tail;
    trace_name(&p->trace, track, "thread_name", name);
    if (!trace_write_text(&p->trace, true)) { trace_failed(&p->trace, good_tail); }
}

// Puts into the file what was run and on what, a JSON object (run_describe): dev/bench/timemap.py reads it.
static inline void profiler_describe(Profiler* p, const char* json) {
    if (p == NULL || p->trace.fd < 0) { return; }
    Trace* t = &p->trace;
    t->run = strdupCheck(json);
    t->room += strlen(json);
    t->text = (char*)reallocCheck(t->text, t->room);
    if (!trace_write_text(t, true)) {
        free(t->run);
        t->run = NULL;
        trace_failed(t, t->tail);
    }
}

static inline void profiler_draw(Profiler* p, const char* name, int layer, double start_us, double end_us, int track,
                                 int depth) {
    Trace* t = &p->trace;
    if (t->fd < 0 || t->full_at >= 0) { return; }
    if (t->num_events == TRACE_BUFFER_EVENTS) { trace_flush(t, p->step); }
    TraceEvent* e = &t->events[t->num_events++];
    snprintf(e->name, sizeof(e->name), "%s", name);
    e->layer = layer;
    e->track = track;
    e->depth = depth;
    e->start_us = start_us;
    e->end_us = end_us;
}

// The box around the phases of one layer: it grows while they follow each other, and is drawn when the next phase is of
// another layer, or another box begins or ends.
static inline void profiler_layer(Profiler* p, int track, int layer, double start_us, double end_us) {
    const double gap_us = 0.5; // resolved times of neighbouring events are rounded
    TraceLayer* box = &p->layers[track];
    if (box->layer >= 0 && (layer != box->layer || start_us > box->end_us + gap_us)) {
        char name[24];
        snprintf(name, sizeof(name), "layer %d", box->layer);
        profiler_draw(p, name, box->layer, box->start_us, box->end_us, track, TRACE_MAX_DEPTH);
        box->layer = -1;
    }
    if (layer < 0) { return; }
    if (box->layer < 0) {
        box->layer = layer;
        box->start_us = start_us;
    }
    box->end_us = end_us;
}

// Draws a finished interval of other work (the loader's, the network's) that no phase counts.
static inline void profiler_interval(Profiler* p, const char* name, double start_us, double end_us, int track) {
    if (p == NULL || !p->in_step || end_us <= p->trace.origin_us) { return; }
    profiler_draw(p, name, -1, fmax(start_us, p->trace.origin_us), end_us, track, 0);
}

// Counts a finished interval (profiler_clock_us's clock) for its phase and draws it. profiler_phase comes here; a GPU
// trainer calls it after the step with the resolved times of its events, on TRACK_COMPUTE, before profiler_step_end.
static inline void profiler_add(Profiler* p, int phase, int layer, double start_us, double end_us, int track) {
    if (p == NULL || !p->in_step) { return; }
    p->phase_ms[p->held >= 0 ? p->held : phase] += (end_us - start_us) * 1e-3;
    if (p->trace.fd < 0) { return; }
    if (phase == PHASE_OTHER) { return; }
    bool sliver = end_us - start_us < 1.0; // not drawn: a viewer chokes on those between a box's edge and what is in it
    if (!sliver || p->layers[track].layer == layer) { profiler_layer(p, track, layer, start_us, end_us); }
    if (!sliver) {
        profiler_draw(p, phase_name(phase), layer, start_us, end_us, track, TRACE_MAX_DEPTH + 1);
    }
}

// the interval under way ends now, and the same phase begins another
static inline double profiler_cut(Profiler* p) {
    double now_us = profiler_clock_us();
    profiler_add(p, p->phase, p->layer, p->phase_start_us, now_us, 0);
    p->phase_start_us = now_us;
    return now_us;
}

// From here on the time belongs to `phase`, for the timeline also to `layer` (-1: none). PHASE_OTHER ends the naming.
static inline void profiler_phase(Profiler* p, enum Phase phase, int layer) {
    if (p == NULL || !p->in_step || ((int)phase == p->phase && layer == p->layer)) { return; }
    profiler_cut(p);
    p->phase = (int)phase;
    p->layer = layer;
}

// A named box around the phases in the timeline: "forward", "microbatch %d". Boxes nest, at most TRACE_MAX_DEPTH deep
// (deeper ones are not drawn). A box's beginning cuts the phase under way, so that none sticks out of it, and its end
// ends it: what comes next is PHASE_OTHER until a phase is named.
PRINTF_LIKE(2, 3)
static inline void profiler_span_begin(Profiler* p, const char* fmt, ...) {
    if (p == NULL || !p->in_step) { return; }
    int depth = p->depth++;
    if (p->trace.fd < 0 || depth >= TRACE_MAX_DEPTH) { return; }
    va_list args;
    va_start(args, fmt);
    vsnprintf(p->spans[depth].name, sizeof(p->spans[depth].name), fmt, args);
    va_end(args);
    p->spans[depth].start_us = profiler_cut(p);
    profiler_layer(p, TRACK_HOST, -1, 0.0, 0.0);
}

static inline void profiler_span_end(Profiler* p) {
    if (p == NULL || !p->in_step) { return; }
    if (p->depth == 0) { fatal("program error: profiler_span_end without profiler_span_begin"); }
    double now_us = profiler_cut(p);
    profiler_layer(p, TRACK_HOST, -1, 0.0, 0.0);
    int depth = --p->depth;
    if (depth < TRACE_MAX_DEPTH) {
        profiler_draw(p, p->spans[depth].name, -1, p->spans[depth].start_us, now_us, 0, depth);
    }
    p->phase = PHASE_OTHER;
    p->layer = -1;
}

// Until profiler_release all time is counted for `phase`, whatever phases forward names: validation is PHASE_EVAL
// although it runs the same forward. The timeline shows those phases, in a box of this name. Holds do not nest.
static inline void profiler_hold(Profiler* p, enum Phase phase) {
    if (p == NULL || !p->in_step) { return; }
    profiler_span_begin(p, "%s", phase_name((int)phase));
    profiler_cut(p);
    p->held = (int)phase;
    p->phase = PHASE_OTHER;
    p->layer = -1;
}

static inline void profiler_release(Profiler* p) {
    if (p == NULL || !p->in_step) { return; }
    profiler_span_end(p);
    p->held = -1;
}

// ----------------------------------------------------------------------------
// steps

// Begins the step's wall clock; nothing is named yet.
static inline void profiler_step_begin(Profiler* p, int64_t step) {
    if (p == NULL) { return; }
    p->step = step;
    p->in_step = true;
    p->phase = PHASE_OTHER;
    p->layer = p->held = -1;
    p->depth = 0;
    for (int i = 0; i <= NUM_PHASES; i++) { p->phase_ms[i] = 0.0; }
    p->step_start_us = p->phase_start_us = profiler_clock_us();
    profiler_span_begin(p, "step %lld", (long long)step);
}

// Ends it: step_ms and phase_ms hold this step, phase_ms[PHASE_OTHER] = step_ms - the sum of the named ones. What the
// timeline costs in writing comes after the clock has stopped.
static inline void profiler_step_end(Profiler* p) {
    if (p == NULL || !p->in_step) { return; }
    while (p->depth > 0) { profiler_span_end(p); }
    double now_us = profiler_cut(p), named_ms = 0.0;
    p->in_step = false;
    for (int i = 0; i < NUM_TRACKS; i++) { profiler_layer(p, i, -1, 0.0, 0.0); }
    p->step_ms = (now_us - p->step_start_us) * 1e-3;
    for (int i = 0; i < NUM_PHASES; i++) { named_ms += p->phase_ms[i]; }
    p->phase_ms[PHASE_OTHER] = p->step_ms - named_ms;
    if (p->num_steps++ == 0) { p->first_ms = p->step_ms; }
    else {
        for (int i = 0; i < NUM_PHASES + 2; i++) {
            double ms = i <= NUM_PHASES ? p->phase_ms[i] : p->step_ms;
            p->sum_ms[i] += ms;
            if (ms < p->min_ms[i]) { p->min_ms[i] = ms; }
            if (ms > p->max_ms[i]) { p->max_ms[i] = ms; }
        }
    }
    trace_flush(&p->trace, p->step);
}

static inline void profiler_table_row(FILE* file, const char* name, double mean, double share, double low,
                                      double high) {
    char bar[128] = "";
    for (int i = 0; i < (int)(share * 30.0 + 0.5) && i < 30; i++) { strcat(bar, "\xe2\x96\x87"); } // U+2587, a block
    fprintf(file, "  %-12s %11.3f %7.1f%% %11.3f %11.3f  %s\n", name, mean, 100.0 * share, low, high, bar);
}

// The mean of all steps but the first: a row a phase that took time, the largest first, then `other` and the step.
static inline void profiler_table(const Profiler* p, FILE* file) {
    int64_t n = p->num_steps - 1;
    if (n < 1) {
        fprintf(file, "profile: needs two steps or more, the first pays for first touches of memory\n");
        return;
    }
    double step_ms = p->sum_ms[NUM_PHASES + 1] / (double)n;
    fprintf(file, "profile: mean of %lld step%s; the first, %.1f ms, is left out\n", (long long)n, n == 1 ? "" : "s",
            p->first_ms);
    fprintf(file, "  %-12s %11s %8s %11s %11s\n", "phase", "ms a step", "share", "min", "max");
    bool printed[NUM_PHASES] = {false};
    while (true) {
        int next = -1;
        for (int i = 0; i < NUM_PHASES; i++) {
            if (!printed[i] && p->sum_ms[i] > 0.0 && (next < 0 || p->sum_ms[i] > p->sum_ms[next])) { next = i; }
        }
        if (next < 0) { break; }
        printed[next] = true;
        double mean = p->sum_ms[next] / (double)n;
        profiler_table_row(file, phase_name(next), mean, mean / step_ms, p->min_ms[next], p->max_ms[next]);
    }
    double other = p->sum_ms[PHASE_OTHER] / (double)n;
    profiler_table_row(file, "other", other, other / step_ms, p->min_ms[PHASE_OTHER], p->max_ms[PHASE_OTHER]);
    fprintf(file, "  %-12s %11.3f %7.1f%% %11.3f %11.3f\n", "step", step_ms, 100.0, p->min_ms[NUM_PHASES + 1],
            p->max_ms[NUM_PHASES + 1]);
}

// Writes what is left of the timeline and frees everything; safe to call twice.
static inline void profiler_close(Profiler* p) {
    if (p == NULL) { return; }
    profiler_step_end(p); // does nothing unless a step is under way
    if (p->trace.fd >= 0) { close(p->trace.fd); }
    free(p->trace.events);
    free(p->trace.text);
    free(p->trace.path);
    free(p->trace.run);
    p->trace.events = NULL;
    p->trace.text = p->trace.path = p->trace.run = NULL;
    p->trace.fd = -1;
}

// ----------------------------------------------------------------------------
// what the time is compared with

// Floating-point operations that training one token takes: 6 for each weight its matrix products meet (2 forward, 4
// backward), and for attention 12 * layers * heads * head_dim * T / 2, where 2 stands for the causal half. Recomputed
// work does not count. (PaLM, arXiv 2204.02311, appendix B, but with the causal half.)
static inline double model_flops_per_token(size_t num_matmul_active, int layers, int heads, int head_dim, size_t T) {
    return 6.0 * (double)num_matmul_active + 6.0 * (double)layers * (double)heads * (double)head_dim * (double)T;
}

#endif // LLMC_PROFILER_H
