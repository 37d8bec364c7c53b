// cuda_device.h: is there a GPU here, and can it run this very program? Each way in which it cannot has its own message
// and names what to do instead. And its memory.
#ifndef LLMC_CUDA_DEVICE_H
#define LLMC_CUDA_DEVICE_H

#include "check.h"
#include "cuda_check.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

// The number of GPUs, at least 1.
static inline int cuda_count_devices(void) {
    const char* instead = "train_moe_cpu trains on the CPU, `make train_moe_emu` builds this program for an emulator";
    int count = 0, driver = 0, runtime = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (cudaDriverGetVersion(&driver) != cudaSuccess) { driver = 0; } // 0: no driver is installed
    if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) { runtime = CUDART_VERSION; }
    if (driver == 0) {
        fatal("no GPU: NVIDIA's driver is not installed here (in a container: docker run --gpus all); %s", instead);
    }
    if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
        fatal("no GPU: the driver finds none (does nvidia-smi list one? is CUDA_VISIBLE_DEVICES set?); %s", instead);
    }
    if (status == cudaErrorInsufficientDriver) {
        fatal("the NVIDIA driver is too old: it knows CUDA up to %d.%d, this program was built with %d.%d. Update the "
              "driver, or build with a toolkit that is no newer; %s", driver / 1000, driver % 100 / 10, runtime / 1000,
              runtime % 100 / 10, instead);
    }
    if (status != cudaSuccess) { fatal("no GPU can be used: %s; %s", cudaGetErrorString(status), instead); }
    return count;
}

// Makes `device` this process's GPU, the only place that does. kernel: any kernel of the program; that the driver can
// load it shows that the program was built for this GPU.
template <class Kernel> inline cudaDeviceProp cuda_use_device(int device, Kernel kernel) {
    cudaDeviceProp p;
    cudaFuncAttributes attributes;
    cudaCheck(cudaSetDevice(device));
    cudaCheck(cudaGetDeviceProperties(&p, device));
    if (p.major < 8) {
        fatal("the GPU (%s) has compute capability %d.%d, and bf16 on tensor cores needs 8.0 (Ampere) or newer: use "
              "train_moe_cpu, or `make train_moe_emu`, this program in an emulator", p.name, p.major, p.minor);
    }
    cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
        status == cudaErrorUnsupportedPtxVersion) {
        fatal("this program was not built for %s (sm_%d%d): %s. Build it on this machine (make clean; make train_moe), "
              "or with make train_moe GPU_ARCH=sm_%d%d; train_moe_cpu and `make train_moe_emu` need no GPU", p.name,
              p.major, p.minor, cudaGetErrorString(status), p.major, p.minor);
    }
    cuda_check(status, "cudaFuncGetAttributes", __FILE__, __LINE__);
    return p;
}

static inline bool device_is_emulated(const cudaDeviceProp* p) { return strncmp(p->name, "emulated", 8) == 0; }

static inline uint64_t device_bytes_used(void) {
    size_t free_bytes, total;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    return total - free_bytes;
}

static inline void* device_alloc(size_t bytes) {
    void* p;
    cudaCheck(cudaMalloc(&p, bytes > 0 ? bytes : 1));
    return p;
}

static inline float* device_zeros(size_t count) {
    float* p = (float*)device_alloc(count * sizeof(float));
    cudaCheck(cudaMemset(p, 0, count * sizeof(float)));
    return p;
}

// Host memory that the GPU copies from by itself, while the host goes on.
static inline void* pinned_alloc(size_t bytes) {
    void* p;
    cudaCheck(cudaMallocHost(&p, bytes));
    return p;
}
static inline void pinned_free(void* p) { cudaCheck(cudaFreeHost(p)); }

// dense bf16 FLOP/s with fp32 accumulation, by NVIDIA's data sheets; NAN: not in this table. (Data sheets like to
// print the figure for sparse matrices, which is twice as large.) The first row that fits counts.
static inline double nominal_bf16_peak(const char* gpu) {
    const struct {
        const char* name;
        double tflops;
    } cards[] = {{"RTX PRO 6000 Blackwell Max-Q", 438.9}, {"RTX PRO 6000", 503.8}, {"RTX 5090", 209.5},
                 {"RTX 4090", 165.2},                     {"RTX 3090", 71.0},      {"RTX 6000 Ada", 364.2},
                 {"RTX A6000", 154.8},                    {"L40S", 362.0},         {"L40", 181.1},
                 {"L4", 121.0},                           {"H100 NVL", 835.0},     {"A10G", 70.0},
                 {"B200", 2250.0},                        {"H200", 989.4},         {"H100 PCIe", 756.0},
                 {"H100", 989.4},                         {"A100", 312.0},         {"A10", 125.0}};
    for (size_t i = 0; i < sizeof(cards) / sizeof(cards[0]); i++) {
        if (strstr(gpu, cards[i].name)) { return cards[i].tflops * 1e12; }
    }
    return NAN;
}

#endif
