// cublas_check.h: the result of every cuBLASLt call is looked at. Prints call, status, place and what to try; exit code
// 1. Own names instead of cublasGetStatusName, so that a program which calls only cuBLASLt links nothing else.
#ifndef LLMC_CUBLAS_CHECK_H
#define LLMC_CUBLAS_CHECK_H

#include "check.h"
#include <cublasLt.h>

static inline const char* cublas_status(cublasStatus_t status) { // its name, then what to try
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "CUBLAS_STATUS_NOT_INITIALIZED; the driver may be older than this CUDA, or the GPU's memory full: "
                   "see nvidia-smi";
        case CUBLAS_STATUS_ALLOC_FAILED:
            return "CUBLAS_STATUS_ALLOC_FAILED; a smaller --batch-size, --seq-len or --recompute moe lowers what is "
                   "needed";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE; a bug of this program: please report it";
        case CUBLAS_STATUS_ARCH_MISMATCH:
            return "CUBLAS_STATUS_ARCH_MISMATCH; bf16 products need a GPU of compute capability 8.0 or newer";
        case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
        case CUBLAS_STATUS_EXECUTION_FAILED:
            return "CUBLAS_STATUS_EXECUTION_FAILED; an earlier kernel may have failed: run with "
                   "CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer";
        case CUBLAS_STATUS_INTERNAL_ERROR:
            return "CUBLAS_STATUS_INTERNAL_ERROR; do driver and cuBLAS belong together (nvidia-smi, nvcc --version)?";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED; a newer cuBLAS may know this product";
        case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
        default: return "an unknown status";
    }
}

static inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    fatal("%s failed (%s:%d): status %d, %s", call, file, line, (int)status, cublas_status(status));
}
#define cublasCheck(call) cublas_check((call), #call, __FILE__, __LINE__)

#endif
