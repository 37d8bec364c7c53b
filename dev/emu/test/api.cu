// The runtime's behaviour seen from the host: `api NAME` runs one test; run.py sets the environment.
#include "cases.h"
#include <thread>
#include <vector>
#include <nvtx3/nvToolsExt.h>

static int failed;
#define EXPECT(condition)                                         \
    do {                                                          \
        if (!(condition)) {                                       \
            printf("line %d: %s\n", __LINE__, #condition);        \
            failed = 1;                                           \
        }                                                         \
    } while (0)

__global__ void set(int* p, int v) { p[threadIdx.x] = v; }
__global__ void bounded_order(int* out, int* turn) { out[atomicAdd(turn, 1)] = blockIdx.x * 100 + threadIdx.x; }

// EMU_FAIL=cudaMalloc:2,cudaMemcpy:1,cudaStreamCreate:1
static void fail_on_request() {
    void *a, *b, *c;
    int h = 0;
    cudaStream_t s;
    EXPECT(cudaMalloc(&a, 4) == cudaSuccess);
    EXPECT(cudaMalloc(&b, 4) == cudaErrorMemoryAllocation && b == nullptr || b != a);
    EXPECT(cudaGetLastError() == cudaErrorMemoryAllocation);
    EXPECT(cudaMalloc(&c, 4) == cudaSuccess);
    EXPECT(cudaMemcpy(a, &h, 4, cudaMemcpyHostToDevice) != cudaSuccess);
    EXPECT(cudaMemcpy(a, &h, 4, cudaMemcpyHostToDevice) == cudaSuccess);
    EXPECT(cudaStreamCreate(&s) != cudaSuccess);
    EXPECT(cudaStreamCreate(&s) == cudaSuccess);
}
// EMU_FAIL=NAME:1 of every function that is a template; run.py compares with the names in emu_host.h
__device__ int symbol;
static void fail_templates() {
    void* p;
    size_t n;
    int v = 0, w;
    cudaFuncAttributes a;
    void* args[] = {&p, &v};
    EXPECT(cudaFuncSetAttribute(set, cudaFuncAttributeMaxDynamicSharedMemorySize, 0) != cudaSuccess);
    EXPECT(cudaFuncSetCacheConfig(set, cudaFuncCachePreferL1) != cudaSuccess);
    EXPECT(cudaFuncGetAttributes(&a, set) != cudaSuccess);
    EXPECT(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&v, set, 32, 0) != cudaSuccess);
    EXPECT(cudaOccupancyMaxPotentialBlockSize(&v, &w, set) != cudaSuccess);
    EXPECT(cudaMemcpyToSymbol(symbol, &v, 4) != cudaSuccess);
    EXPECT(cudaMemcpyFromSymbol(&v, symbol, 4) != cudaSuccess);
    EXPECT(cudaMemcpyToSymbolAsync(symbol, &v, 4, 0, cudaMemcpyHostToDevice) != cudaSuccess);
    EXPECT(cudaMemcpyFromSymbolAsync(&v, symbol, 4, 0, cudaMemcpyDeviceToHost) != cudaSuccess);
    EXPECT(cudaGetSymbolAddress(&p, symbol) != cudaSuccess);
    EXPECT(cudaGetSymbolSize(&n, symbol) != cudaSuccess);
    EXPECT(cudaLaunchCooperativeKernel(set, dim3(1), dim3(32), args, 0, 0) != cudaSuccess);
    cudaLaunchConfig_t c = {};
    EXPECT(cudaLaunchKernelExC(&c, set, args) != cudaSuccess);
    EXPECT(cudaLaunchKernel(set, dim3(1), dim3(32), args, 0, 0) != cudaSuccess);
    cudaGetLastError();
    set<<<1, 32>>>(nullptr, 0);                        // EMU_FAIL=cudaLaunchKernel:2
    EXPECT(cudaGetLastError() == cudaErrorLaunchOutOfResources);
}
// EMU_MEM=0.001
static void memory_limit() {
    size_t left, total;
    EXPECT(cudaMemGetInfo(&left, &total) == cudaSuccess && left == total && total < 1100000);
    void *a, *b;
    EXPECT(cudaMalloc(&a, 600000) == cudaSuccess && cudaMalloc(&b, 600000) == cudaErrorMemoryAllocation);
    cudaMemGetInfo(&left, &total);
    EXPECT(total - left == 600000);
    cudaFree(a);
    EXPECT(cudaMalloc(&b, 600000) == cudaSuccess);
}
// EMU_LAZY_STREAM=1: nothing runs before somebody waits, and waiting for one stream does not run the other
static void lazy_streams() {
    cudaStream_t s, t;
    cudaEvent_t e;
    int *h, *d = device<int>(32), *x = device<int>(32);
    cudaStreamCreate(&s);
    cudaStreamCreate(&t);
    cudaEventCreate(&e);
    cudaMallocHost(&h, 128);
    memset(h, 0, 128);
    set<<<1, 32, 0, s>>>(d, 5);
    cudaMemcpyAsync(h, d, 128, cudaMemcpyDeviceToHost, s);
    cudaEventRecord(e, s);
    set<<<1, 32, 0, s>>>(h, 6);
    set<<<1, 32, 0, t>>>(x, 7);
    cudaStreamSynchronize(t);
    EXPECT(h[0] == 0);
    cudaEventSynchronize(e);
    EXPECT(h[0] == 5);                                 // what was issued after the event has not run
    cudaStreamSynchronize(s);
    EXPECT(h[0] == 6);
}
// EMU_LAZY_STREAM=1: a queue of a thousand is full, and the host waits until there is room
static void full_queue() {
    static int ran;
    cudaStream_t s;
    cudaStreamCreate(&s);
    for (int i = 0; i < 1000; i++) cudaLaunchHostFunc(s, [](void*) { ran++; }, nullptr);
    EXPECT(ran == 0);
    for (int i = 0; i < 1000; i++) cudaLaunchHostFunc(s, [](void*) { ran++; }, nullptr);
    EXPECT(ran >= 900 && ran <= 1000);
    cudaStreamSynchronize(s);
    EXPECT(ran == 2000);
}
// EMU_LAZY_STREAM=1: from host to host both forms wait
static void copies_between_hosts() {
    for (cudaMemcpyKind kind : {cudaMemcpyHostToHost, cudaMemcpyDefault}) {
        for (bool async : {false, true}) {
            int from[64], *to;
            cudaMallocHost(&to, sizeof(from));
            for (int i = 0; i < 64; i++) from[i] = i + 1, to[i] = 0;
            if (async) cudaMemcpyAsync(to, from, sizeof(from), kind);
            else cudaMemcpy(to, from, sizeof(from), kind);
            EXPECT(memcmp(to, from, sizeof(from)) == 0);
            cudaFreeHost(to);
        }
    }
}
// EMU_LAZY_STREAM=random:SEED: each stream keeps its order, now one goes on and now the other, neither as issued nor all at the end
static void random_streams() {
    static std::vector<size_t> ran;
    const size_t n = 400;
    cudaStream_t streams[2];
    for (auto& s : streams) cudaStreamCreate(&s);
    for (size_t i = 0; i < n; i++) {
        cudaLaunchHostFunc(streams[i % 2], [](void* number) { ran.push_back((size_t)number); }, (void*)i);
    }
    size_t early = ran.size(), changes = 0, after[2] = {0, 0};
    cudaDeviceSynchronize();
    EXPECT(ran.size() == n && early > n / 10 && early < n);
    for (size_t i = 0; i < n; i++) {
        size_t s = ran[i] % 2;
        EXPECT(ran[i] == 2 * after[s] + s);
        after[s]++;
        changes += i > 0 && s != ran[i - 1] % 2;
    }
    EXPECT(changes > 2 && changes < n / 2);
}
static void graphs() {
    cudaStream_t s;
    cudaGraph_t g;
    cudaGraphExec_t ge;
    size_t nodes;
    int* d = zeros<int>(32);
    cudaStreamCreate(&s);
    EXPECT(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal) == cudaSuccess);
    for (int i = 0; i < 3; i++) set<<<1, 32, 0, s>>>(d, 10 + i);
    EXPECT(cudaStreamEndCapture(s, &g) == cudaSuccess);
    EXPECT(download(d, 32)[0] == 0);                   // recorded, not run
    EXPECT(cudaGraphGetNodes(g, nullptr, &nodes) == cudaSuccess && nodes == 3);
    EXPECT(cudaGraphInstantiate(&ge, g, 0) == cudaSuccess);
    EXPECT(cudaGraphLaunch(ge, s) == cudaSuccess);
    cudaStreamSynchronize(s);
    EXPECT(download(d, 32)[0] == 12);
    cudaGraphExecDestroy(ge);
    cudaGraphDestroy(g);
}
static void elapsed() {
    cudaEvent_t a, b;
    float ms = -1;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    cudaEventRecord(a);
    set<<<1, 32>>>(device<int>(32), 1);
    cudaEventRecord(b);
    cudaEventSynchronize(b);
    EXPECT(cudaEventElapsedTime(&ms, a, b) == cudaSuccess && ms >= 0 && ms < 10000);
}
static void copies_2d() {
    float h[4][6], back[4][3], *d;
    size_t pitch;
    for (int i = 0; i < 24; i++) h[i / 6][i % 6] = i;
    cudaMallocPitch((void**)&d, &pitch, 3 * sizeof(float), 4);
    cudaMemcpy2D(d, pitch, &h[0][1], sizeof h[0], 3 * sizeof(float), 4, cudaMemcpyHostToDevice);
    cudaMemcpy2D(back, sizeof back[0], d, pitch, 3 * sizeof(float), 4, cudaMemcpyDeviceToHost);
    for (int y = 0; y < 4; y++) for (int x = 0; x < 3; x++) EXPECT(back[y][x] == y * 6 + x + 1);
}
static void copies_2d_async() {                        // a column of a matrix in registered memory, over lazy streams
    cudaStream_t s;
    cudaStreamCreate(&s);
    float *h = (float*)malloc(24 * sizeof(float)), *back = (float*)calloc(4, sizeof(float)), *d = device<float>(4);
    for (int i = 0; i < 24; i++) h[i] = i;
    EXPECT(cudaHostRegister(h, 24 * sizeof(float), cudaHostRegisterDefault) == cudaSuccess);
    EXPECT(cudaHostRegister(h, 24 * sizeof(float), cudaHostRegisterDefault) == cudaErrorHostMemoryAlreadyRegistered);
    EXPECT(cudaHostRegister(back, 4 * sizeof(float), cudaHostRegisterDefault) == cudaSuccess);
    EXPECT(cudaGetLastError() == cudaErrorHostMemoryAlreadyRegistered);
    EXPECT(cudaMemcpy2DAsync(d, 4, h + 2, 6 * 4, 4, 4, cudaMemcpyHostToDevice, s) == cudaSuccess);
    EXPECT(cudaMemcpyAsync(back, d, 16, cudaMemcpyDeviceToHost, s) == cudaSuccess);
    EXPECT(back[3] == 0);
    cudaStreamSynchronize(s);
    for (int y = 0; y < 4; y++) EXPECT(back[y] == y * 6 + 2);
    EXPECT(cudaMemset2DAsync(d, 8, 0, 4, 2, s) == cudaSuccess);
    EXPECT(cudaMemcpy2DAsync(h, 8, d, 4, 4, 3, cudaMemcpyDeviceToHost, s) == cudaSuccess);
    cudaStreamSynchronize(s);
    EXPECT(h[0] == 0 && h[1] == 1 && h[2] == 8 && h[3] == 3 && h[4] == 0 && h[5] == 5);
    EXPECT(cudaHostUnregister(h) == cudaSuccess && cudaHostUnregister(back) == cudaSuccess);
}
static void ranges() {                                 // NVTX does nothing here, but must compile and run
    nvtxEventAttributes_t a = {};
    a.version = NVTX_VERSION;
    a.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    a.messageType = NVTX_MESSAGE_TYPE_ASCII;
    a.message.ascii = "step";
    nvtxRangePushEx(&a);
    nvtxRangePushA("forward");
    set<<<1, 32>>>(device<int>(32), 1);
    nvtxRangePop();
    nvtxRangePop();
    nvtxRangeEnd(nvtxRangeStartA("backward"));
    nvtxMarkA("saved");
}
// EMU_ORDER: prints the order in which the threads ran
static void order() {
    int* out = device<int>(8);
    bounded_order<<<2, 4>>>(out, zeros<int>(1));
    for (int v : download(out, 8)) printf("%d ", v);
    printf("\n");
}
static void attributes() {
    int value;
    cudaFuncAttributes a;
    EXPECT(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) == cudaSuccess &&
           value >= 99 << 10);
    EXPECT(cudaFuncSetAttribute(set, cudaFuncAttributeMaxDynamicSharedMemorySize, 400 << 10) == cudaErrorInvalidValue);
    cudaGetLastError();
    EXPECT(cudaFuncSetAttribute(set, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10) == cudaSuccess);
    EXPECT(cudaFuncGetAttributes(&a, set) == cudaSuccess && a.maxDynamicSharedSizeBytes == 60 << 10);
    EXPECT(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, set, 256, 0) == cudaSuccess && value >= 6);
    cudaPointerAttributes p;
    EXPECT(cudaPointerGetAttributes(&p, device<int>(4)) == cudaSuccess && p.type == cudaMemoryTypeDevice);
}
static void launch_array() {                           // cudaLaunchKernel with an array of arguments
    int *d = device<int>(32), v = 9;
    void* args[] = {&d, &v};
    EXPECT(cudaLaunchKernel(set, dim3(1), dim3(32), args, 0, 0) == cudaSuccess);
    EXPECT(download(d, 32)[31] == 9);
}
static void launch_config() {
    int *d = device<int>(32), v = 9;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(1);
    c.blockDim = dim3(32);
    EXPECT(cudaLaunchKernelEx(&c, set, d, 8) == cudaSuccess);
    EXPECT(download(d, 32)[31] == 8);
    void* args[] = {&d, &v};
    EXPECT(cudaLaunchKernelExC(&c, (const void*)set, args) == cudaSuccess);
    EXPECT(download(d, 32)[31] == 9);
}
static void launch_cluster() {
    cudaLaunchAttribute a = {};
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = 2;
    a.val.clusterDim.y = a.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(2);
    c.blockDim = dim3(32);
    c.attrs = &a;
    c.numAttrs = 1;
    cudaLaunchKernelEx(&c, set, device<int>(32), 8);
}
static void pools() {
    cudaMemPool_t pool;
    uint64_t most = UINT64_MAX, now = 0;
    EXPECT(cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess);
    EXPECT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &most) == cudaSuccess);
    EXPECT(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &now) == cudaSuccess && now == most);
    EXPECT(cudaMemPoolTrimTo(pool, 0) == cudaSuccess);
    EXPECT(cudaDeviceGetDefaultMemPool(&pool, 77) == cudaErrorInvalidDevice);
}
static void host_threads() {
    for (int i = 0; i < 3; i++)
        std::thread([i] {
            set<<<1, 32>>>(device<int>(32), i);
            cudaDeviceSynchronize();
        }).join();
}
__global__ void endless(int* p) {
    for (volatile int i = 0; threadIdx.x < 32 || i < 10; i = i + 1) if (i < 0) p[0] = 1;
}
static void watchdog() { endless<<<1, 1>>>(device<int>(1)); }
__global__ void overflow(int* p, int n) {
    volatile char local[1 << 20];
    for (int i = 0; i < n; i += 4096) local[i] = 1;
    p[0] = local[0];
}
static void stack_overflow() { overflow<<<1, 1>>>(device<int>(1), 1 << 20); }
__global__ void trapping(int n) { if (threadIdx.x == n) __trap(); }
static void trap() { trapping<<<1, 32>>>(3); }

static const struct { const char* name; void (*run)();
} table[] = {
    {"fail_on_request", fail_on_request},
    {"fail_templates", fail_templates},
    {"memory_limit", memory_limit},
    {"lazy_streams", lazy_streams},
    {"full_queue", full_queue},
    {"copies_between_hosts", copies_between_hosts},
    {"random_streams", random_streams},
    {"graphs", graphs},
    {"elapsed", elapsed},
    {"copies_2d", copies_2d},
    {"copies_2d_async", copies_2d_async},
    {"ranges", ranges},
    {"order", order},
    {"attributes", attributes},
    {"launch_array", launch_array},
    {"launch_config", launch_config},
    {"launch_cluster", launch_cluster},
    {"pools", pools},
    {"host_threads", host_threads},
    {"watchdog", watchdog},
    {"stack_overflow", stack_overflow},
    {"trap", trap},
};
int main(int argc, char** argv) {
    for (auto& t : table) {
        if (argc < 2 || strcmp(argv[1], t.name)) continue;
        t.run();
        cudaDeviceSynchronize();
        return failed;
    }
    return 2;
}
