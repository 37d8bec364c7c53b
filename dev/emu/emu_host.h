// The runtime API's C++ overloads, which cuda_runtime.h defines for nvcc only.
#pragma once
template <class F> inline cudaError_t cudaFuncSetAttribute(F* f, cudaFuncAttribute a, int v) {
    return ::cudaFuncSetAttribute((const void*)f, a, v);
}
template <class F> inline cudaError_t cudaFuncSetCacheConfig(F* f, cudaFuncCache c) {
    return ::cudaFuncSetCacheConfig((const void*)f, c);
}
template <class F> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, F* f) {
    return ::cudaFuncGetAttributes(a, (const void*)f);
}
template <class F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, F* f, int threads, size_t smem) {
    return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, (const void*)f, threads, smem);
}
template <class F>
inline cudaError_t cudaOccupancyMaxPotentialBlockSize(int* grid, int* block, F*, size_t = 0, int limit = 0) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    *block = limit ? limit : 256;
    *grid = 132 * 4;
    return cudaSuccess;
}
template <class T> EMU_HOOK cudaError_t cudaMemcpyToSymbol(const T& v, const void* src, size_t n, size_t offset = 0,
                                                           cudaMemcpyKind k = cudaMemcpyHostToDevice) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    return emu::symbol_copy(__func__, &v, sizeof(T), offset, src, nullptr, n, k, nullptr, false, EMU_PC);
}
template <class T> EMU_HOOK cudaError_t cudaMemcpyFromSymbol(void* dst, const T& v, size_t n, size_t offset = 0,
                                                             cudaMemcpyKind k = cudaMemcpyDeviceToHost) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    return emu::symbol_copy(__func__, &v, sizeof(T), offset, nullptr, dst, n, k, nullptr, false, EMU_PC);
}
template <class T> EMU_HOOK cudaError_t cudaMemcpyToSymbolAsync(const T& v, const void* src, size_t n, size_t offset,
                                                                cudaMemcpyKind k, cudaStream_t s = nullptr) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    return emu::symbol_copy(__func__, &v, sizeof(T), offset, src, nullptr, n, k, s, true, EMU_PC);
}
template <class T> EMU_HOOK cudaError_t cudaMemcpyFromSymbolAsync(void* dst, const T& v, size_t n, size_t offset,
                                                                  cudaMemcpyKind k, cudaStream_t s = nullptr) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    return emu::symbol_copy(__func__, &v, sizeof(T), offset, nullptr, dst, n, k, s, true, EMU_PC);
}
template <class T> inline cudaError_t cudaGetSymbolAddress(void** p, const T& v) {
    return ::cudaGetSymbolAddress(p, (const void*)&v);
}
template <class T> inline cudaError_t cudaGetSymbolSize(size_t* n, const T&) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    *n = sizeof(T);
    return cudaSuccess;
}
namespace emu {
template <class... A, size_t... I>
inline void launch_array(Launch l, void (*k)(A...), void** args, std::index_sequence<I...>) {
    (void)args;
    l.go([k](auto... a) { k(a...); }, *(std::decay_t<A>*)args[I]...);
}
}
template <class... A> inline cudaError_t cudaLaunchKernel(void (*k)(A...), dim3 grid, dim3 block, void** args,
                                                          size_t smem = 0, cudaStream_t s = nullptr, EMU_AT) {
    emu::launch_array(emu::Launch("cudaLaunchKernel", grid, block, smem, s, f, l), k, args,
                      std::index_sequence_for<A...>());
    return emu::error_so_far();
}
// Called by cudaLaunchKernelEx of NVIDIA's header. Of the attributes, only clusters would change what a kernel does.
template <class... A>
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, void (*k)(A...), void** args, const char* f,
                                       int l) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    emu::check_attributes(*c);
    return cudaLaunchKernel(k, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream, f, l);
}
template <class... A>
inline cudaError_t cudaLaunchCooperativeKernel(void (*k)(A...), dim3 grid, dim3 block, void** args, size_t smem = 0,
                                               cudaStream_t s = nullptr, EMU_AT) {
    EMU_MAY_FAIL(cudaErrorUnknown);
    return cudaLaunchKernel(k, grid, block, args, smem, s, f, l);
}
