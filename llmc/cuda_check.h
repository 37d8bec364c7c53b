// cuda_check.h: the result of every CUDA call is looked at. Prints call, reason, place and what to try; exit code 1.
#ifndef LLMC_CUDA_CHECK_H
#define LLMC_CUDA_CHECK_H

#include "check.h"
#include <cuda_runtime.h>

static void (*out_of_memory_hook)(void) = NULL; // a program that has a memory plan prints it here
static long cuda_launches = 0, cuda_waits = 0;  // of kernels, and of the host for a stream: what --profile counts

static inline const char* cuda_advice(cudaError_t status) {
    switch (status) {
        case cudaErrorNoDevice:
            return "; this machine has no CUDA device: train_moe_cpu trains on the CPU, `make train_moe_emu` builds this "
                   "program for the emulator";
        case cudaErrorInsufficientDriver:
            return "; the driver is older than this CUDA: update the driver, or use train_moe_cpu or `make train_moe_emu`";
        case cudaErrorNoKernelImageForDevice:
            return "; this program was built for another architecture: build it on this machine (make clean; make train_moe), "
                   "or name the architecture (make train_moe GPU_ARCH=sm_90)";
        case cudaErrorMemoryAllocation:
            return "; a smaller --batch-size, --seq-len or --recompute moe lowers what is needed (--dry-run prints the plan)";
        default: return "";
    }
}

static inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
    if (status == cudaSuccess) { return; }
    fatal_wait();
    if (status == cudaErrorMemoryAllocation && out_of_memory_hook != NULL) { out_of_memory_hook(); }
    fatal("%s failed: %s (%s:%d)%s", call, cudaGetErrorString(status), file, line, cuda_advice(status));
}
#define cudaCheck(call) cuda_check((call), #call, __FILE__, __LINE__)

// After each launch: a configuration that the device refuses shows here, a fault inside the kernel at the next wait.
#define launchCheck(kernel) (cuda_launches++, cuda_check(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__))

// The host waits until the stream has done everything.
#define streamWait(stream) \
    (cuda_waits++, cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize(" #stream ")", __FILE__, __LINE__))

#endif
