// gpu_clock.h: when a stream reached what. The host only launches, so its clock says little; an event in the stream at
// each change of phase does, and is read when the step is over. NVTX names the same phases for Nsight Systems.
#ifndef LLMC_GPU_CLOCK_H
#define LLMC_GPU_CLOCK_H

#include "cuda_check.h"
#include "profiler.h"
#include <nvtx3/nvToolsExt.h>

typedef struct {
    cudaEvent_t event;
    int phase, layer; // what begins here
} GpuMark;

typedef struct {
    char name[24];
    size_t begin, end; // marks
    int depth;
} GpuSpan;

enum { CLOCK_SPANS = 8 };

typedef struct {
    Profiler* profiler;
    bool running;          // within a step
    double start_us;       // the host's clock at mark 0, when the stream was idle
    GpuMark* marks;        // of the step
    size_t num_marks, room;
    GpuSpan* spans;        // boxes around phases in the timeline; finished and open ones
    size_t num_spans, spans_room;
    size_t open[CLOCK_SPANS];
    int depth;
    cudaEvent_t* buckets;  // two events an all-reduce: when its gradients were ready, when it was done
    size_t num_buckets, buckets_room;
    long launches, waits;  // of kernels, for the host: in the step that is under way a count at its start
} GpuClock;

static inline size_t gpu_clock_record(GpuClock* clock, int phase, int layer, cudaStream_t stream) {
    // a mark in the stream; returns its number
    if (clock->num_marks == clock->room) {
        size_t room = clock->room ? 2 * clock->room : 1024;
        clock->marks = (GpuMark*)reallocCheck(clock->marks, room * sizeof(GpuMark));
        for (size_t i = clock->room; i < room; i++) { cudaCheck(cudaEventCreate(&clock->marks[i].event)); }
        clock->room = room;
    }
    GpuMark* mark = &clock->marks[clock->num_marks];
    mark->phase = phase;
    mark->layer = layer;
    cudaCheck(cudaEventRecord(mark->event, stream));
    if (clock->num_marks > 0) { nvtxRangePop(); }
    nvtxRangePushA(phase_name(phase));
    return clock->num_marks++;
}

static inline void gpu_clock_mark(GpuClock* clock, int phase, int layer, cudaStream_t stream) {
    // from here on the stream's time belongs to `phase` of `layer`
    if (!clock || !clock->running) { return; }
    const GpuMark* last = &clock->marks[clock->num_marks - 1];
    if (last->phase != phase || last->layer != layer) { gpu_clock_record(clock, phase, layer, stream); }
}

static inline size_t gpu_clock_cut(GpuClock* clock, cudaStream_t stream) {
    // a mark that only divides a phase in two: the boundary of a box
    GpuMark last = clock->marks[clock->num_marks - 1];
    return gpu_clock_record(clock, last.phase, last.layer, stream);
}

static inline void gpu_clock_span_begin(GpuClock* clock, const char* name, cudaStream_t stream) {
    if (!clock || !clock->running || clock->depth == CLOCK_SPANS) { return; }
    if (clock->num_spans == clock->spans_room) {
        clock->spans_room = clock->spans_room ? 2 * clock->spans_room : 64;
        clock->spans = (GpuSpan*)reallocCheck(clock->spans, clock->spans_room * sizeof(GpuSpan));
    }
    GpuSpan* span = &clock->spans[clock->num_spans];
    snprintf(span->name, sizeof(span->name), "%.23s", name);
    span->begin = gpu_clock_cut(clock, stream);
    span->depth = clock->depth;
    clock->open[clock->depth++] = clock->num_spans++;
}

static inline void gpu_clock_span_end(GpuClock* clock, cudaStream_t stream) {
    if (!clock || !clock->running || clock->depth == 0) { return; }
    clock->spans[clock->open[--clock->depth]].end = gpu_clock_cut(clock, stream);
}

static inline void gpu_clock_bucket(GpuClock* clock, cudaStream_t stream) {
    // called on the compute stream before, and on the all-reduce's stream after a bucket
    if (!clock || !clock->running) { return; }
    if (clock->num_buckets == clock->buckets_room) {
        size_t room = clock->buckets_room ? 2 * clock->buckets_room : 64;
        clock->buckets = (cudaEvent_t*)reallocCheck(clock->buckets, room * sizeof(cudaEvent_t));
        for (size_t i = clock->buckets_room; i < room; i++) { cudaCheck(cudaEventCreate(&clock->buckets[i])); }
        clock->buckets_room = room;
    }
    cudaCheck(cudaEventRecord(clock->buckets[clock->num_buckets++], stream));
}

static inline void gpu_clock_begin(GpuClock* clock, cudaStream_t stream) {
    // the stream is idle, so the host's clock and the first event are the same moment
    clock->running = true;
    clock->num_marks = clock->num_spans = clock->num_buckets = 0;
    clock->depth = 0;
    clock->launches = cuda_launches;
    clock->waits = cuda_waits;
    clock->start_us = profiler_clock_us();
    gpu_clock_record(clock, PHASE_OTHER, -1, stream);
}

static inline double gpu_clock_us(const GpuClock* clock, cudaEvent_t event) {
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, clock->marks[0].event, event));
    return clock->start_us + 1e3 * ms;
}

static inline void gpu_clock_end(GpuClock* clock) {
    // the stream has done everything: hands the profiler the times of the step's phases, boxes and all-reduces
    clock->running = false;
    clock->launches = cuda_launches - clock->launches;
    clock->waits = cuda_waits - clock->waits;
    nvtxRangePop();
    double* us = (double*)mallocCheck(clock->num_marks * sizeof(double));
    for (size_t i = 0; i < clock->num_marks; i++) { us[i] = gpu_clock_us(clock, clock->marks[i].event); }
    for (size_t i = 0; i + 1 < clock->num_marks; i++) {
        profiler_add(clock->profiler, clock->marks[i].phase, clock->marks[i].layer, us[i], us[i + 1], TRACK_COMPUTE);
    }
    for (size_t i = 0; i < clock->num_spans; i++) {
        const GpuSpan* span = &clock->spans[i];
        profiler_draw(clock->profiler, span->name, -1, us[span->begin], us[span->end], TRACK_COMPUTE, span->depth);
    }
    double done_us = 0; // buckets follow each other on their stream
    for (size_t i = 0; i + 1 < clock->num_buckets; i += 2) {
        double ready_us = gpu_clock_us(clock, clock->buckets[i]);
        double start_us = ready_us > done_us ? ready_us : done_us;
        done_us = gpu_clock_us(clock, clock->buckets[i + 1]);
        profiler_draw(clock->profiler, phase_name(PHASE_ALLREDUCE), -1, start_us, done_us, TRACK_ALLREDUCE, 0);
    }
    free(us);
}

static inline void gpu_clock_free(GpuClock* clock) {
    for (size_t i = 0; i < clock->room; i++) { cudaCheck(cudaEventDestroy(clock->marks[i].event)); }
    for (size_t i = 0; i < clock->buckets_room; i++) { cudaCheck(cudaEventDestroy(clock->buckets[i])); }
    free(clock->marks);
    free(clock->spans);
    free(clock->buckets);
}

#endif
