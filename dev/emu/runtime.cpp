// The runtime API: device memory, copies, launches, and what the device says of itself.
// Memory starts as 0xff (NaN in every float format, -1 in every integer), so that what was never written shows.
#include <malloc.h>
#include <string.h>
#include <map>
#include <set>
#include "internal.h"
#define MAY_FAIL EMU_MAY_FAIL(cudaErrorUnknown)

namespace emu {

// ---------------------------------------------------------------- what is allocated
struct Allocation { size_t size; MemoryKind kind; int device; bool freed; };
static std::map<char*, Allocation>& allocations() { static auto* m = new std::map<char*, Allocation>; return *m; }
static std::mutex memory_lock;
static int current_device;
static size_t used_bytes[64];

// Pageable memory that cudaHostRegister has pinned.
static std::map<char*, size_t>& registered() { static auto* m = new std::map<char*, size_t>; return *m; }

enum PointerKind { POINTER_HOST, POINTER_DEVICE, POINTER_PINNED, POINTER_MANAGED, POINTER_FREED };
struct Place { PointerKind kind; size_t left; };        // left: bytes to the end of its allocation

static size_t left_within(const void* p, char* from, char* to) {
    return from && (char*)p >= from && (char*)p < to ? (size_t)(to - (char*)p) : 0;
}

static Place locate(const void* p) {
    if (size_t n = left_within(p, __start_emu_device, __stop_emu_device)) return {POINTER_DEVICE, n};
    if (size_t n = left_within(p, __start_emu_constant, __stop_emu_constant)) return {POINTER_DEVICE, n};
    if (size_t n = left_within(p, __start_emu_managed, __stop_emu_managed)) return {POINTER_MANAGED, n};
    std::lock_guard<std::mutex> guard(memory_lock);
    auto pinned = registered().upper_bound((char*)p);
    if (pinned != registered().begin() && (--pinned, (char*)p < pinned->first + pinned->second))
        return {POINTER_PINNED, (size_t)(pinned->first + pinned->second - (char*)p)};
    auto it = allocations().upper_bound((char*)p);
    if (it == allocations().begin()) return {POINTER_HOST, 0};
    --it;
    const Allocation& a = it->second;
    size_t offset = (size_t)((char*)p - it->first);
    if (offset > a.size || (offset == a.size && (a.freed || !a.size))) return {POINTER_HOST, 0};
    return {a.freed                   ? POINTER_FREED
            : a.kind == MEMORY_DEVICE ? POINTER_DEVICE
            : a.kind == MEMORY_PINNED ? POINTER_PINNED
                                      : POINTER_MANAGED,
            a.size - offset};
}

bool valid_device_range(const void* p, size_t n, size_t* left) {
    Place x = locate(p);
    *left = x.left;
    return n == 0 || (x.kind != POINTER_HOST && x.kind != POINTER_FREED && n <= x.left);
}

static cudaError_t allocate(void** out, size_t n, MemoryKind kind, void* pc) {
    *out = nullptr;
    check_touch(out, sizeof *out, true, pc);           // it may lie in managed memory
    size_t limit = (size_t)(options().memory_gib * (double)(1ull << 30));
    if (kind == MEMORY_DEVICE && (n > limit || used_bytes[current_device] + n > limit))
        return set_error(cudaErrorMemoryAllocation);
    void* p = nullptr;
    if (checking) p = check_malloc(n, kind);
    else if (posix_memalign(&p, 256, n ? n : 1)) p = nullptr;
    if (!p) return set_error(cudaErrorMemoryAllocation);
    memset(p, options().poison ? 0xff : 0, n);
    std::lock_guard<std::mutex> guard(memory_lock);
    allocations()[(char*)p] = {n, kind, current_device, false};
    if (kind == MEMORY_DEVICE) used_bytes[current_device] += n;
    *out = p;
    return cudaSuccess;
}

static cudaError_t release(void* p, bool host, const char* name, void* pc) {
    if (!p) return cudaSuccess;
    synchronize(name, pc);                             // as the hardware does: memory in use is not taken away
    std::lock_guard<std::mutex> guard(memory_lock);
    auto it = allocations().find((char*)p);
    const char* wrong =
        it == allocations().end() ? "this address was not allocated by CUDA, or is not the start of an allocation"
        : it->second.freed        ? "it was freed before"
        : (it->second.kind == MEMORY_PINNED) != host ? "it was allocated by another function (cudaFree is for device "
                                                       "and managed memory, cudaFreeHost for pinned)"
                                                     : nullptr;
    if (wrong) {
        report(it != allocations().end() && it->second.freed ? "double free" : "bad free", pc, nullptr, "%s(%p): %s",
               name, p, wrong);
        return set_error(cudaErrorInvalidValue);
    }
    Allocation& a = it->second;
    if (a.kind == MEMORY_DEVICE) used_bytes[a.device] -= a.size;
    if (checking) {
        a.freed = true;                                // remembered: addresses are not used again
        check_free(p, a.size);
    } else {
        free(p);
        allocations().erase(it);
    }
    return cudaSuccess;
}

// ---------------------------------------------------------------- copies
struct Side { const void* p; bool device; const char* name; };

// One side of a copy: does the pointer fit the direction, and are n bytes there?
static bool check_side(const char* call, const Side& s, size_t n, void* pc) {
    Place x = locate(s.p);
    if (x.kind == POINTER_FREED) {
        report("use after free", pc, nullptr, "%s: the %s was freed", call, s.name);
    } else if (s.device && x.kind == POINTER_HOST) {
        report("wrong pointer", pc, nullptr, "%s: the %s (%p) is not device memory", call, s.name, s.p);
    } else if (!s.device && x.kind == POINTER_DEVICE) {
        report("wrong pointer", pc, nullptr, "%s: the %s (%p) is device memory, the direction says host", call, s.name,
               s.p);
    } else if (x.kind != POINTER_HOST && n > x.left) {
        report("out of bounds", pc, nullptr, "%s of %zu bytes, but only %zu are left of the %s's allocation", call, n,
               x.left, s.name);
    } else {
        return true;
    }
    set_error(cudaErrorInvalidValue);
    return false;
}

static cudaMemcpyKind infer(cudaMemcpyKind kind, const void* dst, const void* src) {
    if (kind != cudaMemcpyDefault) return kind;
    auto of_the_host = [](PointerKind k) { return k == POINTER_HOST || k == POINTER_PINNED; };
    bool d = !of_the_host(locate(dst).kind), s = !of_the_host(locate(src).kind);
    return d ? (s ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
             : (s ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
}

struct Rows { void* dst; size_t dpitch; const void* src; size_t spitch, width, height; };

static void copy_rows(const Rows& r) {
    for (size_t y = 0; y < r.height; y++) {
        char* d = (char*)r.dst + y * r.dpitch;
        const char* s = (const char*)r.src + y * r.spitch;
        check_op_copy(d, s, r.width);
        memmove(d, s, r.width);
    }
}

static void note_pending(Op* op, const Rows& r) {      // the padding beside the rows stays free for the host
    if (r.dpitch == r.width) return check_host_pending(op, r.dst, r.width * r.height);
    for (size_t y = 0; y < r.height; y++) check_host_pending(op, (char*)r.dst + y * r.dpitch, r.width);
}

static cudaError_t copy(const char* call, Rows r, cudaMemcpyKind kind, cudaStream_t stream, bool async, void* pc) {
    if (!r.width || !r.height) return cudaSuccess;
    kind = infer(kind, r.dst, r.src);
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (r.dpitch < r.width || r.spitch < r.width) {
        if (r.height > 1) {
            report("wrong pitch", pc, nullptr, "%s: a pitch is smaller than the width of %zu bytes", call, r.width);
            return set_error(cudaErrorInvalidPitchValue);
        }
    }
    size_t dbytes = (r.height - 1) * r.dpitch + r.width, sbytes = (r.height - 1) * r.spitch + r.width;
    if (!check_side(call, {r.dst, to_device, "destination"}, dbytes, pc) ||
        !check_side(call, {r.src, from_device, "source"}, sbytes, pc))
        return cudaErrorInvalidValue;
    PointerKind to = locate(r.dst).kind;
    bool pageable_dst = to == POINTER_HOST, pageable_src = locate(r.src).kind == POINTER_HOST;
    std::shared_ptr<std::vector<char>> staged;
    bool staging = async ? !pageable_dst : to == POINTER_DEVICE || to == POINTER_MANAGED;
    if (pageable_src && staging) {                     // CUDA has staged pageable memory before the call returns,
        if (!async) wait_for(enqueue(stream, call, pc, nullptr)); // which is all that cudaMemcpy waits for then:
        staged = std::make_shared<std::vector<char>>((const char*)r.src, (const char*)r.src + sbytes);
        r.src = staged->data();                        // the transfer may still be under way on the null stream
    }
    OpRef op = enqueue(stream, call, pc, [r, staged] { copy_rows(r); });
    if (!op) return cudaErrorInvalidResourceHandle;
    op->skip_at_exit = pageable_dst;
    if (kind == cudaMemcpyHostToHost || (!async && kind != cudaMemcpyDeviceToDevice && !staged)) wait_for(op);
    else if (pageable_dst) note_pending(op.get(), r);
    return cudaSuccess;
}

static cudaError_t fill(const char* call, void* p, size_t pitch, int value, size_t width, size_t height,
                        cudaStream_t stream, void* pc) {
    if (!width || !height) return cudaSuccess;
    if (!check_side(call, {p, true, "destination"}, (height - 1) * pitch + width, pc)) return cudaErrorInvalidValue;
    OpRef op = enqueue(stream, call, pc, [=] {
        for (size_t y = 0; y < height; y++) {
            check_op_touch((char*)p + y * pitch, width, true);
            memset((char*)p + y * pitch, value, width);
        }
    });
    return op ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t symbol_copy(const char* call, const void* symbol, size_t symbol_size, size_t offset, const void* src,
                        void* dst, size_t n, cudaMemcpyKind kind, cudaStream_t stream, bool async, void* pc) {
    if (locate(symbol).kind == POINTER_HOST) {
        report("wrong pointer", pc, nullptr, "%s: the symbol is not a __device__ or __constant__ variable", call);
        return set_error(cudaErrorInvalidSymbol);
    }
    if (offset + n > symbol_size) {
        report("out of bounds", pc, nullptr, "%s of %zu bytes at offset %zu into a symbol of %zu bytes", call, n,
               offset, symbol_size);
        return set_error(cudaErrorInvalidValue);
    }
    char* at = (char*)symbol + offset;
    return copy(call, {src ? at : dst, n, src ? src : at, n, n, 1}, kind, stream, async, pc);
}

// ---------------------------------------------------------------- launches
static std::map<const void*, int>& smem_attributes() { static auto* m = new std::map<const void*, int>; return *m; }
static std::map<const void*, const Kernel*>& known_kernels() {
    static auto* m = new std::map<const void*, const Kernel*>;
    return *m;
}

static size_t function_smem_limit(const void* function) {
    auto it = smem_attributes().find(function);
    return it == smem_attributes().end() ? limits().smem_block : (size_t)it->second;
}

// The static shared memory of a function and of what the compiler inlined into it.
static size_t static_shared(const void* function) {
    static std::map<const void*, size_t> known;
    if (known.count(function)) return known[function];
    std::set<const SharedVar*> used;
    for (const SharedUse* u = __start_emu_shared_uses; u < __stop_emu_shared_uses; u++)
        if (_Unwind_FindEnclosingFunction((void*)u->code) == function) used.insert(u->var);
    size_t n = 0;
    for (const SharedVar* v : used) n = (n + v->align - 1) / v->align * v->align + v->size;
    return known[function] = n;
}

static std::string text(const char* format, size_t a, size_t b, size_t c = 0) {
    char s[200];
    snprintf(s, sizeof s, format, a, b, c);
    return s;
}

std::string shared_excess(size_t fixed, size_t dynamic, size_t limit) {
    const Limits& l = limits();
    if (dynamic > l.smem_optin)
        return text("%zu bytes of dynamic shared memory, this architecture has at most %zu a block", dynamic,
                    l.smem_optin);
    if (dynamic > limit)
        return text("%zu bytes of dynamic shared memory, but cudaFuncSetAttribute allowed this kernel no more than %zu",
                    dynamic, limit);
    size_t most = limit > l.smem_block ? l.smem_optin : l.smem_block;
    if (fixed > l.smem_block || fixed + dynamic > most)
        return text("%zu bytes of static and %zu of dynamic shared memory are more than the %zu a block may have",
                    fixed, dynamic, fixed > l.smem_block ? l.smem_block : most);
    return "";
}

static std::string illegal_config(const Config& c, const Kernel* k) {
    size_t threads = (size_t)c.block.x * c.block.y * c.block.z;
    if (!c.grid.x || !c.grid.y || !c.grid.z || !threads) return "the grid or the block is empty";
    if (threads > 1024) return text("%zu threads in a block, %zu is the most", threads, 1024);
    if (c.block.z > 64) return text("block.z is %zu, %zu is the most", c.block.z, 64);
    if (c.grid.x > 0x7fffffffu) return text("grid.x is %zu, %zu is the most", c.grid.x, 0x7fffffff);
    if (c.grid.y > 65535 || c.grid.z > 65535)
        return text("grid is (.,%zu,%zu), 65535 is the most for y and z", c.grid.y, c.grid.z);
    if (k && k->max_threads && threads > (size_t)k->max_threads)
        return text("%zu threads in a block, but __launch_bounds__ promises at most %zu", threads,
                    (size_t)k->max_threads);
    return k ? shared_excess(static_shared(k->address), c.smem, function_smem_limit(k->address))
             : shared_excess(0, c.smem, limits().smem_block);
}

void launch(const Config& c, Closure closure) {
    static std::atomic<long> serial{0};
    if (cur) fatal("%s:%d: a kernel launches a kernel, which is not emulated", c.file, c.line);
    if (failing("cudaLaunchKernel")) {
        set_error(cudaErrorLaunchOutOfResources);
        return;
    }
    const Kernel* k = probe_kernel(closure);
    if (k) known_kernels()[k->address] = k;
    std::string wrong = illegal_config(c, k);
    if (!wrong.empty()) {
        report_at("launch limits", c.file, c.line, "kernel %s: %s", c.name, wrong.c_str());
        set_error(cudaErrorInvalidConfiguration);
        return;
    }
    size_t limit = k ? function_smem_limit(k->address) : limits().smem_block;
    enqueue(c.stream, c.name, nullptr, [c, closure, limit] {
        Grid g{};
        g.config = c;
        g.closure = closure;
        g.blocks = (long)c.grid.x * c.grid.y * c.grid.z;
        g.serial = serial++;
        g.dynamic_limit = limit;
        g.op = running_op;
        run_grid(g);
    });
}

void check_attributes(const cudaLaunchConfig_t& c) {
    for (unsigned i = 0; i < c.numAttrs; i++) {
        const auto& d = c.attrs[i].val.clusterDim;
        if (c.attrs[i].id == cudaLaunchAttributeClusterDimension && d.x * d.y * d.z > 1)
            fatal("clusters of blocks are not emulated");
    }
}

static int attribute(cudaDeviceAttr a) {
    const Limits& l = limits();
    switch (a) {
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return 0x7fffffff;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return (int)l.smem_block;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)l.smem_optin;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (int)l.smem_sm;
        case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
        case cudaDevAttrTotalConstantMemory: return 65536;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return l.regs_sm;
        case cudaDevAttrMultiProcessorCount: return l.multiprocessors;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return l.threads_sm;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return l.blocks_sm;
        case cudaDevAttrComputeCapabilityMajor: return options().sm / 10;
        case cudaDevAttrComputeCapabilityMinor: return options().sm % 10;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrManagedMemory:
        case cudaDevAttrConcurrentManagedAccess: return 1;
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrCanMapHostMemory:
        case cudaDevAttrMemoryPoolsSupported: return 1;
        case cudaDevAttrAsyncEngineCount: return 2;
        case cudaDevAttrL2CacheSize: return 50 << 20;
        case cudaDevAttrClockRate: return 1980000;
        case cudaDevAttrMemoryClockRate: return 2619000;
        case cudaDevAttrGlobalMemoryBusWidth: return 5120;
        default: return 0;
    }
}

static const struct { cudaError_t code; const char *name, *text;
} error_table[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};
}
using namespace emu;

extern "C" {
// ---------------------------------------------------------------- memory
cudaError_t cudaMalloc(void** p, size_t n) {
    EMU_MAY_FAIL(cudaErrorMemoryAllocation);
    return allocate(p, n, MEMORY_DEVICE, PC);
}
cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) {
    EMU_MAY_FAIL(cudaErrorMemoryAllocation);
    return allocate(p, n, MEMORY_MANAGED, PC);
}
cudaError_t cudaMallocHost(void** p, size_t n) {
    EMU_MAY_FAIL(cudaErrorMemoryAllocation);
    return allocate(p, n, MEMORY_PINNED, PC);
}
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
    EMU_MAY_FAIL(cudaErrorMemoryAllocation);
    return allocate(p, n, MEMORY_PINNED, PC);
}
cudaError_t cudaMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
    EMU_MAY_FAIL(cudaErrorMemoryAllocation);
    *pitch = (width + 511) / 512 * 512;
    return allocate(p, *pitch * height, MEMORY_DEVICE, PC);
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) {
    EMU_MAY_FAIL(cudaErrorMemoryAllocation);
    return allocate(p, n, MEMORY_DEVICE, PC);
}
// One pool for each device, in name only: freed memory is always given back at once.
static uint64_t release_threshold[64];
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
    MAY_FAIL;
    if (device < 0 || device >= options().devices) return set_error(cudaErrorInvalidDevice);
    *pool = (cudaMemPool_t)&release_threshold[device];
    return cudaSuccess;
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
    MAY_FAIL;
    return cudaDeviceGetDefaultMemPool(pool, device);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr a, void* value) {
    MAY_FAIL;
    if (a == cudaMemPoolAttrReleaseThreshold) *(uint64_t*)pool = *(uint64_t*)value;
    return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr a, void* value) {
    MAY_FAIL;
    if (a != cudaMemPoolAttrReleaseThreshold) return set_error(cudaErrorNotSupported);
    *(uint64_t*)value = *(uint64_t*)pool;
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaFree(void* p) {
    MAY_FAIL;
    return release(p, false, "cudaFree", PC);
}
cudaError_t cudaFreeHost(void* p) {
    MAY_FAIL;
    return release(p, true, "cudaFreeHost", PC);
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t s) {
    MAY_FAIL;
    void* pc = PC;
    return enqueue(s, "cudaFreeAsync", pc, [p, pc] {
        std::lock_guard<std::mutex> guard(memory_lock);
        auto it = allocations().find((char*)p);
        if (it == allocations().end() || it->second.freed) {
            report("bad free", pc, nullptr, "cudaFreeAsync(%p): not an allocation, or freed before", p);
            return;
        }
        check_op_touch(p, it->second.size, true);
        it->second.freed = true;
        used_bytes[it->second.device] -= it->second.size;
        check_free(p, it->second.size);
    }) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
    MAY_FAIL;
    if (!p || !n) return set_error(cudaErrorInvalidValue);
    if (locate(p).kind != POINTER_HOST) return set_error(cudaErrorHostMemoryAlreadyRegistered);
    std::lock_guard<std::mutex> guard(memory_lock);
    registered()[(char*)p] = n;
    check_register(p, n);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
    MAY_FAIL;
    synchronize("cudaHostUnregister", PC);
    std::lock_guard<std::mutex> guard(memory_lock);
    check_unregister(p);
    if (registered().erase((char*)p)) return cudaSuccess;
    report("bad free", PC, nullptr, "cudaHostUnregister of memory that is not registered");
    return set_error(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
    MAY_FAIL;
    *p = (void*)symbol;
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) {
    MAY_FAIL;
    *d = h;
    return locate(h).kind == POINTER_PINNED ? cudaSuccess : set_error(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    MAY_FAIL;
    *total = (size_t)(options().memory_gib * (double)(1ull << 30));
    *available = *total - used_bytes[current_device];
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    MAY_FAIL;
    memset(a, 0, sizeof *a);
    switch (locate(p).kind) {
        case POINTER_DEVICE: a->type = cudaMemoryTypeDevice; break;
        case POINTER_PINNED: a->type = cudaMemoryTypeHost; break;
        case POINTER_MANAGED: a->type = cudaMemoryTypeManaged; break;
        default: a->type = cudaMemoryTypeUnregistered;
    }
    if (a->type != cudaMemoryTypeUnregistered) a->devicePointer = (void*)p;
    if (a->type != cudaMemoryTypeDevice) a->hostPointer = (void*)p;
    return cudaSuccess;
}
cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) {
    MAY_FAIL;
    return cudaSuccess;
}
cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) { MAY_FAIL; return cudaSuccess; }

// ---------------------------------------------------------------- copies
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) {
    MAY_FAIL;
    return copy("cudaMemcpy", {d, n, s, n, n, 1}, k, nullptr, false, PC);
}
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st) {
    MAY_FAIL;
    return copy("cudaMemcpyAsync", {d, n, s, n, n, 1}, k, st, true, PC);
}
cudaError_t cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k) {
    MAY_FAIL;
    return copy("cudaMemcpy2D", {d, dp, s, sp, w, h}, k, nullptr, false, PC);
}
cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k,
                              cudaStream_t st) {
    MAY_FAIL;
    return copy("cudaMemcpy2DAsync", {d, dp, s, sp, w, h}, k, st, true, PC);
}
cudaError_t cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) {
    MAY_FAIL;
    return copy("cudaMemcpyPeer", {d, n, s, n, n, 1}, cudaMemcpyDeviceToDevice, nullptr, false, PC);
}
cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
    MAY_FAIL;
    return copy("cudaMemcpyPeerAsync", {d, n, s, n, n, 1}, cudaMemcpyDeviceToDevice, st, true, PC);
}
cudaError_t cudaMemset(void* p, int v, size_t n) {
    MAY_FAIL;
    return fill("cudaMemset", p, n, v, n, 1, nullptr, PC);
}
cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) {
    MAY_FAIL;
    return fill("cudaMemsetAsync", p, n, v, n, 1, s, PC);
}
cudaError_t cudaMemset2D(void* p, size_t pitch, int v, size_t w, size_t h) {
    MAY_FAIL;
    return fill("cudaMemset2D", p, pitch, v, w, h, nullptr, PC);
}
cudaError_t cudaMemset2DAsync(void* p, size_t pitch, int v, size_t w, size_t h, cudaStream_t s) {
    MAY_FAIL;
    return fill("cudaMemset2DAsync", p, pitch, v, w, h, s, PC);
}

// ---------------------------------------------------------------- functions
cudaError_t cudaFuncSetAttribute(const void* f, cudaFuncAttribute a, int value) {
    MAY_FAIL;
    if (a != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > limits().smem_optin) return set_error(cudaErrorInvalidValue);
    smem_attributes()[f] = value;
    return cudaSuccess;
}
cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* f) {
    MAY_FAIL;
    memset(a, 0, sizeof *a);
    auto it = known_kernels().find(f);
    a->maxThreadsPerBlock = it != known_kernels().end() && it->second->max_threads ? it->second->max_threads : 1024;
    a->maxDynamicSharedSizeBytes = (int)function_smem_limit(f);
    a->sharedSizeBytes = static_shared(f);
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = options().sm;
    return cudaSuccess;
}
static cudaError_t active_blocks(int* n, int threads, size_t smem) {
    if (threads <= 0 || threads > 1024) return set_error(cudaErrorInvalidValue);
    int by_threads = limits().threads_sm / threads, by_smem = (int)(limits().smem_sm / (smem + 1024));
    *n = by_threads < by_smem ? by_threads : by_smem;
    if (*n > limits().blocks_sm) *n = limits().blocks_sm;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int threads, size_t smem) {
    MAY_FAIL;
    return active_blocks(n, threads, smem);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int threads, size_t smem,
                                                                   unsigned) {
    MAY_FAIL;
    return active_blocks(n, threads, smem);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    MAY_FAIL;
    fatal("cudaLaunchKernel with an untyped function pointer: pass the kernel itself, or use <<<...>>>");
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
    MAY_FAIL;
    fatal("cudaLaunchKernelExC with an untyped function pointer: pass the kernel itself, or use cudaLaunchKernelEx");
}

// ---------------------------------------------------------------- devices
cudaError_t cudaGetDeviceCount(int* n) {
    MAY_FAIL;
    *n = options().devices;
    return *n ? cudaSuccess : set_error(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int d) {
    MAY_FAIL;
    if (!options().devices) return set_error(cudaErrorNoDevice);
    if (d < 0 || d >= options().devices) return set_error(cudaErrorInvalidDevice);
    current_device = d;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* d) {
    MAY_FAIL;
    *d = current_device;
    return cudaSuccess;
}
cudaError_t cudaDeviceReset(void) {
    MAY_FAIL;
    return synchronize("cudaDeviceReset", PC);
}
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaDeviceGetLimit(size_t* n, cudaLimit limit) {
    MAY_FAIL;
    *n = limit == cudaLimitStackSize ? 1024 : limit == cudaLimitPrintfFifoSize ? 1 << 20 : 8 << 20;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceFlags(unsigned* flags) {
    MAY_FAIL;
    *flags = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetCacheConfig(cudaFuncCache* c) {
    MAY_FAIL;
    *c = cudaFuncCachePreferNone;
    return cudaSuccess;
}
cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    MAY_FAIL;
    *can = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) {
    MAY_FAIL;
    *v = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
    MAY_FAIL;
    *v = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
    MAY_FAIL;
    *v = attribute(a);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int device) {
    MAY_FAIL;
    snprintf(text, (size_t)n, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    MAY_FAIL;
    if (device < 0 || device >= options().devices) return set_error(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "emulated GPU (sm_%d)", options().sm);
    p->totalGlobalMem = (size_t)(options().memory_gib * (double)(1ull << 30));
    p->sharedMemPerBlock = limits().smem_block;
    p->sharedMemPerBlockOptin = limits().smem_optin;
    p->sharedMemPerMultiprocessor = limits().smem_sm;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = limits().regs_sm;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = options().sm / 10;
    p->minor = options().sm % 10;
    p->multiProcessorCount = limits().multiprocessors;
    p->maxThreadsPerMultiProcessor = limits().threads_sm;
    p->maxBlocksPerMultiProcessor = limits().blocks_sm;
    p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = p->concurrentManagedAccess =
        1;
    p->asyncEngineCount = 2;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 50 << 20;
    p->pciBusID = device + 1;
    return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t e) {
    for (auto& x : error_table) if (x.code == e) return x.name;
    return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t e) {
    for (auto& x : error_table) if (x.code == e) return x.text;
    return "unrecognized error code";
}
cudaError_t cudaProfilerStart(void) { MAY_FAIL; return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { MAY_FAIL; return cudaSuccess; }
}
