// cp.async under the names of CUDA's pipeline primitives.
#pragma once
inline void __pipeline_memcpy_async(void* dst, const void* src, size_t bytes, size_t zeros = 0) {
    emu::cp_async(dst, src, (int)(bytes - zeros), (int)zeros);
}
inline void __pipeline_commit() { emu::cp_commit(); }
inline void __pipeline_wait_prior(size_t groups) { emu::cp_wait((int)groups); }
