// Planted faults on the host's side: streams, events, waits, copies, frees. Streams are lazy under the checker.
#include "cases.h"

__global__ void set(int* p, int n, int v) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = v;  // bad: registered_kernel two_writers blocking_streams nonblocking
}
__global__ void copy(int* to, const int* from, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];  // bad: no_event event_too_early event_never event_other memset_other_stream pageable_upload
}
struct Streams {
    cudaStream_t a, b;
    Streams(unsigned flags = cudaStreamDefault) {
        cudaStreamCreateWithFlags(&a, flags);
        cudaStreamCreateWithFlags(&b, flags);
    }
    ~Streams() { cudaStreamDestroy(a); cudaStreamDestroy(b); }
};

static void managed_no_sync_case(bool bad) {
    int* m;
    cudaMallocManaged(&m, 64 * sizeof(int));
    set<<<1, 64>>>(m, 64, 5);
    if (!bad) cudaDeviceSynchronize();
    if (m[3] != 5) printf("old value\n");                                  // bad: managed_no_sync
    cudaDeviceSynchronize();
    cudaFree(m);
}
static void pinned_no_sync_case(bool bad) {
    Streams s;
    int* h;
    cudaMallocHost(&h, 64 * sizeof(int));
    set<<<1, 64, 0, s.a>>>(h, 64, 5);
    if (!bad) cudaStreamSynchronize(s.a);
    if (h[3] != 5) printf("old value\n");                                  // bad: pinned_no_sync
    cudaStreamSynchronize(s.a);
    cudaFreeHost(h);
}
static void async_copy_case(bool bad) {
    Streams s;
    int *d = device<int>(64), *h;
    cudaMallocHost(&h, 64 * sizeof(int));
    memset(h, 0, 64 * sizeof(int));
    set<<<1, 64, 0, s.a>>>(d, 64, 5);
    cudaMemcpyAsync(h, d, 64 * sizeof(int), cudaMemcpyDeviceToHost, s.a);
    if (!bad) cudaStreamSynchronize(s.a);
    if (h[3] != 5) printf("old value\n");                                  // bad: async_copy
    cudaStreamSynchronize(s.a);
    cudaFreeHost(h);
}
static void async_copy_pageable_case(bool bad) {
    Streams s;
    int *d = device<int>(64), h[64] = {};
    set<<<1, 64, 0, s.a>>>(d, 64, 5);
    cudaMemcpyAsync(h, d, sizeof h, cudaMemcpyDeviceToHost, s.a);
    if (!bad) cudaStreamSynchronize(s.a);
    int sum = 0;
    for (int i = 0; i < 64; i++) sum += h[i];                              // bad: async_copy_pageable
    if (sum != 320) printf("old value\n");
    cudaStreamSynchronize(s.a);
}
static void pageable_upload_case(bool bad) {           // cudaMemcpy may return while the transfer is under way
    Streams s(cudaStreamNonBlocking);
    int *d = upload(ramp<int>(64)), *e = device<int>(64);
    if (!bad) cudaStreamSynchronize(0);
    copy<<<1, 64, 0, s.a>>>(e, d, 64);
    cudaStreamSynchronize(s.a);
    if (download(e, 64)[3] != 4) printf("old value\n");
}
static void wrong_stream_waited_case(bool bad) {
    Streams s;
    int *d = device<int>(64), *h;
    cudaMallocHost(&h, 64 * sizeof(int));
    memset(h, 0, 64 * sizeof(int));
    set<<<1, 64, 0, s.a>>>(d, 64, 5);
    cudaMemcpyAsync(h, d, 64 * sizeof(int), cudaMemcpyDeviceToHost, s.a);
    cudaStreamSynchronize(bad ? s.b : s.a);
    if (h[3] != 5) printf("old value\n");                                  // bad: wrong_stream_waited
    cudaStreamSynchronize(s.a);
}
static void source_overwritten_case(bool bad) {
    Streams s;
    int *d = device<int>(64), *h;
    cudaMallocHost(&h, 64 * sizeof(int));
    for (int i = 0; i < 64; i++) h[i] = i;
    cudaMemcpyAsync(d, h, 64 * sizeof(int), cudaMemcpyHostToDevice, s.a);
    if (!bad) cudaStreamSynchronize(s.a);
    h[7] = -1;                                                             // bad: source_overwritten
    cudaStreamSynchronize(s.a);
}

static void registered_case(bool bad) {                // malloc'ed memory, pinned afterwards
    Streams s;
    int *d = device<int>(64), *h = (int*)malloc(64 * sizeof(int));
    for (int i = 0; i < 64; i++) h[i] = i;
    cudaHostRegister(h, 64 * sizeof(int), cudaHostRegisterDefault);
    cudaMemcpyAsync(d, h, 64 * sizeof(int), cudaMemcpyHostToDevice, s.a);
    if (!bad) cudaStreamSynchronize(s.a);
    h[7] = -1;                                                             // bad: registered
    cudaStreamSynchronize(s.a);
    cudaHostUnregister(h);
    h[7] = 0;
    free(h);
}
static void registered_kernel_case(bool bad) {
    int *h = (int*)malloc(64 * sizeof(int)), *p;
    memset(h, 0, 64 * sizeof(int));
    cudaHostRegister(h, 64 * sizeof(int), cudaHostRegisterMapped);
    cudaHostGetDevicePointer((void**)&p, h, 0);
    set<<<1, 96>>>(p, bad ? 65 : 64, 5);
    cudaDeviceSynchronize();
    if (h[3] != 5) exit(1);
    cudaHostUnregister(h);
    free(h);
}
static void registered_free_case(bool bad) {
    int* h = (int*)malloc(64 * sizeof(int));
    cudaHostRegister(h, 64 * sizeof(int), cudaHostRegisterDefault);
    if (!bad) cudaHostUnregister(h);
    free(h);                                                               // bad: registered_free
}

// The C library reads and writes for the program. What it fills in unseen (sscanf) may be copied all the same.
static void library_fills_case(bool bad) {
    Streams s;
    int v = 42, *h, *d = device<int>(2), *e = device<int>(2);
    FILE* f = tmpfile();
    for (int i = 0; i < 2; i++) fwrite(&v, sizeof v, 1, f);
    rewind(f);
    cudaMallocHost(&h, 2 * sizeof(int));
    if (fread(h, sizeof(int), 1, f) != 1 || sscanf("42", "%d", h + 1) != 1) exit(1);
    cudaMemcpyAsync(d, h, 2 * sizeof(int), cudaMemcpyHostToDevice, s.a);
    copy<<<1, 2, 0, s.a>>>(e, d, 2);
    if (!bad) cudaStreamSynchronize(s.a);
    if (fread(h, sizeof(int), 1, f) != 1) exit(1);                         // bad: library_fills
    cudaStreamSynchronize(s.a);
    fclose(f);
    std::vector<int> r = download(e, 2);
    if (r[0] != 42 || r[1] != 42) exit(1);
}
static void in_flight(bool wait, void (*use)(int* h)) {
    Streams s;
    int *d = zeros<int>(16), h[16] = {};
    cudaDeviceSynchronize();
    cudaMemcpyAsync(h, d, sizeof h, cudaMemcpyDeviceToHost, s.a);
    if (wait) cudaStreamSynchronize(s.a);
    use(h);
    cudaStreamSynchronize(s.a);
}
static void library_writes_case(bool bad) {
    in_flight(!bad, [](int* h) {
        FILE* f = tmpfile();
        fwrite(h, sizeof(int), 16, f);                                     // bad: library_writes
        fclose(f);
    });
}
static void library_compares_case(bool bad) {
    in_flight(!bad, [](int* h) {
        int none[2] = {};
        if (memcmp(h, none, sizeof none)) printf("old value\n");           // bad: library_compares
    });
}
static void library_sorts_case(bool bad) {
    in_flight(!bad, [](int* h) {
        auto less = [](const void* a, const void* b) { return *(const int*)a - *(const int*)b; };
        qsort(h, 16, sizeof(int), less);                                   // bad: library_sorts
    });
}
static void library_prints_case(bool bad) {
    in_flight(!bad, [](int* h) { snprintf((char*)h, 8, "%d", 12345678); });    // bad: library_prints
}
static void padding_case(bool bad) {                   // beside the rows of a 2D copy the host may write
    Streams s;
    int *d = zeros<int>(4), h[2][4] = {};
    cudaDeviceSynchronize();
    cudaMemcpy2DAsync(h, 16, d, 8, 8, 2, cudaMemcpyDeviceToHost, s.a);
    h[0][3] = h[1][bad ? 1 : 2] = 1;                                       // bad: padding
    cudaStreamSynchronize(s.a);
}
static void at_exit_case(bool bad) {                   // what still runs when the program ends is reported, too
    int *d = zeros<int>(16), *h, sum = 0;
    cudaMallocHost(&h, 16 * sizeof(int));
    cudaMemcpyAsync(h, d, 16 * sizeof(int), cudaMemcpyDeviceToHost);       // bad: at_exit
    if (!bad) cudaDeviceSynchronize();
    for (int i = 0; i < 16; i++) sum += h[i];          // reports before the end, and then one at the end
    if (sum) printf("old value\n");
    exit(0);
}

struct List { int n, *values; };                       // the API writes into managed memory, too
__global__ void increment(List* l) {
    int i = threadIdx.x;
    if (i < l->n) l->values[i] += 1;                                       // bad: managed_struct
}
static void managed_struct_case(bool bad) {
    List* l;
    cudaMallocManaged(&l, sizeof(List));
    l->n = 20;
    if (bad) l->values = new int[20];                  // the struct is managed, what it points to is not
    else cudaMallocManaged(&l->values, 20 * sizeof(int));
    for (int i = 0; i < 20; i++) l->values[i] = i;
    increment<<<1, 32>>>(l);
    cudaDeviceSynchronize();
    if (l->values[19] != 20) exit(1);
    if (bad) delete[] l->values;
    else cudaFree(l->values);
    cudaFree(l);
}

enum EventUse { EVENT_RIGHT, EVENT_MISSING, EVENT_TOO_EARLY, EVENT_NEVER_RECORDED, EVENT_OTHER };
static void produce_consume(EventUse use) {
    Streams s;
    cudaEvent_t e, other;
    cudaEventCreate(&e);
    cudaEventCreate(&other);
    int *x = device<int>(64), *y = device<int>(64);
    cudaMemset(x, 0, 256);
    cudaDeviceSynchronize();
    if (use == EVENT_TOO_EARLY) cudaEventRecord(e, s.a);
    if (use == EVENT_NEVER_RECORDED) cudaStreamWaitEvent(s.b, e, 0);
    set<<<1, 64, 0, s.a>>>(x, 64, 5);
    if (use != EVENT_TOO_EARLY) cudaEventRecord(e, s.a);
    cudaEventRecord(other, s.b);
    if (use != EVENT_MISSING && use != EVENT_NEVER_RECORDED)
        cudaStreamWaitEvent(s.b, use == EVENT_OTHER ? other : e, 0);
    copy<<<1, 64, 0, s.b>>>(y, x, 64);
    cudaDeviceSynchronize();
    cudaEventDestroy(e);
    cudaEventDestroy(other);
}
static void no_event_case(bool bad) { produce_consume(bad ? EVENT_MISSING : EVENT_RIGHT); }
static void event_too_early_case(bool bad) { produce_consume(bad ? EVENT_TOO_EARLY : EVENT_RIGHT); }
static void event_never_case(bool bad) { produce_consume(bad ? EVENT_NEVER_RECORDED : EVENT_RIGHT); }
static void event_other_case(bool bad) { produce_consume(bad ? EVENT_OTHER : EVENT_RIGHT); }

// Waiting for an event does not wait for what was issued after it.
static void event_waits_for_its_part_case(bool bad) {
    Streams s;
    cudaEvent_t e;
    cudaEventCreate(&e);
    int* m;
    cudaMallocManaged(&m, 2 * 64 * sizeof(int));
    set<<<1, 64, 0, s.a>>>(m, 64, 5);
    if (!bad) set<<<1, 64, 0, s.a>>>(m + 64, 64, 6);
    cudaEventRecord(e, s.a);
    if (bad) set<<<1, 64, 0, s.a>>>(m + 64, 64, 6);
    cudaEventSynchronize(e);
    if (m[0] != 5 || m[64] != 6) printf("old value\n");                    // bad: event_waits_for_its_part
    cudaStreamSynchronize(s.a);
    cudaEventDestroy(e);
}
static void two_writers_case(bool bad) {
    Streams s;
    int* x = device<int>(64);
    set<<<1, 64, 0, s.a>>>(x, 64, 1);
    set<<<1, 64, 0, bad ? s.b : s.a>>>(x, 64, 2);
    cudaDeviceSynchronize();
}
static void memset_other_stream_case(bool bad) {
    Streams s;
    int *x = device<int>(64), *y = device<int>(64);
    cudaMemset(x, 0, 256);
    cudaDeviceSynchronize();
    cudaMemsetAsync(x, 1, 256, s.a);
    copy<<<1, 64, 0, bad ? s.b : s.a>>>(y, x, 64);
    cudaDeviceSynchronize();
}
static void blocking_streams_case(bool bad) {          // the legacy null stream orders against blocking streams
    Streams s;
    int* x = device<int>(64);
    set<<<1, 64, 0, s.a>>>(x, 64, 1);
    set<<<1, 64>>>(x, 64, 2);
    set<<<1, 64, 0, s.b>>>(x, 64, 3);
    if (bad) set<<<1, 64, 0, s.a>>>(x, 64, 4);
    cudaDeviceSynchronize();
}
static void nonblocking_case(bool bad) {               // ... but not against these
    Streams s(bad ? cudaStreamNonBlocking : cudaStreamDefault);
    int* x = device<int>(64);
    set<<<1, 64, 0, s.a>>>(x, 64, 1);
    set<<<1, 64>>>(x, 64, 2);
    cudaDeviceSynchronize();
}
static void poll_stream_case(bool bad) {               // polling is waiting, too
    Streams s;
    int* m;
    cudaMallocManaged(&m, 64 * sizeof(int));
    set<<<1, 64, 0, s.a>>>(m, 64, 5);
    if (!bad) while (cudaStreamQuery(s.a) == cudaErrorNotReady) {}
    else cudaStreamQuery(s.a);
    if (m[3] != 5) printf("old value\n");                                  // bad: poll_stream
    cudaStreamSynchronize(s.a);
}
static void host_writes_early_case(bool bad) {         // the host prepares the next batch while the kernel still reads
    int *m, *d = device<int>(64);
    cudaMallocManaged(&m, 64 * sizeof(int));
    for (int i = 0; i < 64; i++) m[i] = i;
    copy<<<1, 64>>>(d, m, 64);
    if (!bad) cudaDeviceSynchronize();
    for (int i = 0; i < 64; i++) m[i] = -i;                                // bad: host_writes_early
    cudaDeviceSynchronize();
}

static void double_free_case(bool bad) {
    int* x = device<int>(64);
    cudaFree(x);
    if (bad) cudaFree(x);                                                  // bad: double_free
}
static void foreign_free_case(bool bad) {
    int* h = (int*)malloc(64);
    int* x = device<int>(4);
    cudaFree(bad ? h : x);                                                 // bad: foreign_free
    free(h);
}
static void inner_free_case(bool bad) {
    int* x = device<int>(64);
    cudaFree(bad ? x + 4 : x);                                             // bad: inner_free
}
static void free_device_case(bool bad) {
    int* x = device<int>(64);
    if (bad) free(x);                                                      // bad: free_device
    else cudaFree(x);
}
static void free_pinned_case(bool bad) {
    int* h;
    cudaMallocHost(&h, 64);
    if (bad) cudaFree(h);                                                  // bad: free_pinned
    else cudaFreeHost(h);
}
static void wrong_direction_case(bool bad) {
    int h[8] = {}, *d = device<int>(8);
    cudaMemcpy(d, h, sizeof h, bad ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice);   // bad: wrong_direction
}
static void swapped_pointers_case(bool bad) {
    int h[8] = {}, *d = zeros<int>(8);
    if (bad) cudaMemcpy(d, h, sizeof h, cudaMemcpyDeviceToHost);           // bad: swapped_pointers
    else cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost);
}
static void copy_too_long_case(bool bad) {
    std::vector<int> h(100);
    int* d = device<int>(64);
    cudaMemcpy(d, h.data(), (bad ? 100 : 64) * sizeof(int), cudaMemcpyHostToDevice);     // bad: copy_too_long
}
static void memset_too_long_case(bool bad) {
    int* d = device<int>(64);
    cudaMemset(d, 0, (bad ? 65 : 64) * sizeof(int));                       // bad: memset_too_long
}
static void copy_after_free_case(bool bad) {
    int h[8], *d = zeros<int>(8);
    if (bad) cudaFree(d);
    cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost);                    // bad: copy_after_free
}
static void dead_stream_case(bool bad) {
    cudaStream_t s;
    cudaStreamCreate(&s);
    if (bad) cudaStreamDestroy(s);
    cudaMemsetAsync(device<int>(8), 0, 32, s);                             // bad: dead_stream
    if (!bad) cudaStreamDestroy(s);
}
static void dead_event_case(bool bad) {
    cudaEvent_t e;
    cudaEventCreate(&e);
    if (bad) cudaEventDestroy(e);
    cudaEventRecord(e);                                                    // bad: dead_event
    if (!bad) cudaEventDestroy(e);
}
static void elapsed_no_wait_case(bool bad) {
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    float ms;
    cudaEventRecord(a);
    set<<<1, 64>>>(device<int>(64), 64, 5);
    cudaEventRecord(b);
    if (!bad) cudaEventSynchronize(b);
    cudaEventElapsedTime(&ms, a, b);                                       // bad: elapsed_no_wait
}
static void graph_case(bool bad) {                     // two streams captured; the second must come back
    Streams s;
    cudaEvent_t e, f;
    cudaEventCreate(&e);
    cudaEventCreate(&f);
    int *x = device<int>(64), *y = device<int>(64);
    cudaGraph_t g;
    cudaGraphExec_t ge;
    cudaStreamBeginCapture(s.a, cudaStreamCaptureModeGlobal);
    set<<<1, 64, 0, s.a>>>(x, 64, 5);
    cudaEventRecord(e, s.a);
    cudaStreamWaitEvent(s.b, e, 0);
    copy<<<1, 64, 0, s.b>>>(y, x, 64);
    cudaEventRecord(f, s.b);
    if (!bad) cudaStreamWaitEvent(s.a, f, 0);
    cudaStreamEndCapture(s.a, &g);                                         // bad: graph
    cudaGraphInstantiate(&ge, g, 0);
    for (int i = 0; i < 3; i++) cudaGraphLaunch(ge, s.a);
    cudaStreamSynchronize(s.a);
    if (download(y, 64)[9] != 5) exit(1);
}
static void sync_in_capture_case(bool bad) {
    Streams s;
    cudaGraph_t g;
    cudaStreamBeginCapture(s.a, cudaStreamCaptureModeGlobal);
    set<<<1, 64, 0, s.a>>>(device<int>(64), 64, 5);
    if (bad) cudaStreamSynchronize(s.a);                                   // bad: sync_in_capture
    cudaStreamEndCapture(s.a, &g);
}

static const Case table[] = {
    {"managed_no_sync", "missing", managed_no_sync_case},
    {"pinned_no_sync", "missing", pinned_no_sync_case},
    {"async_copy", "missing", async_copy_case},
    {"async_copy_pageable", "missing", async_copy_pageable_case},
    {"pageable_upload", "missing", pageable_upload_case},
    {"wrong_stream_waited", "missing", wrong_stream_waited_case},
    {"source_overwritten", "missing", source_overwritten_case},
    {"registered", "missing", registered_case},
    {"registered_kernel", "", registered_kernel_case},
    {"registered_free", "bad", registered_free_case},
    {"library_fills", "missing", library_fills_case},
    {"library_writes", "missing", library_writes_case},
    {"library_compares", "missing", library_compares_case},
    {"library_sorts", "missing", library_sorts_case},
    {"library_prints", "missing", library_prints_case},
    {"padding", "missing", padding_case},
    {"at_exit", "missing", at_exit_case},
    {"managed_struct", "host", managed_struct_case},
    {"no_event", "missing", no_event_case},
    {"event_too_early", "missing", event_too_early_case},
    {"event_never", "missing", event_never_case},
    {"event_other", "missing", event_other_case},
    {"event_waits_for_its_part", "missing", event_waits_for_its_part_case},
    {"two_writers", "missing", two_writers_case},
    {"memset_other_stream", "missing", memset_other_stream_case},
    {"blocking_streams", "missing", blocking_streams_case},
    {"nonblocking", "missing", nonblocking_case},
    {"poll_stream", "missing", poll_stream_case},
    {"host_writes_early", "missing", host_writes_early_case},
    {"double_free", "double", double_free_case},
    {"foreign_free", "bad", foreign_free_case},
    {"inner_free", "bad", inner_free_case},
    {"free_device", "bad", free_device_case},
    {"free_pinned", "bad", free_pinned_case},
    {"wrong_direction", "wrong", wrong_direction_case},
    {"swapped_pointers", "wrong", swapped_pointers_case},
    {"copy_too_long", "out", copy_too_long_case},
    {"memset_too_long", "out", memset_too_long_case},
    {"copy_after_free", "use", copy_after_free_case},
    {"dead_stream", "bad", dead_stream_case},
    {"dead_event", "bad", dead_event_case},
    {"elapsed_no_wait", "missing", elapsed_no_wait_case},
    {"graph", "stream", graph_case},
    {"sync_in_capture", "stream", sync_in_capture_case},
};
CASES_MAIN(table)
