// Every function of llmc/ptx.cuh once, to be compiled by nvcc: the assembly must be right for each architecture.
#include "llmc/ptx.cuh"

__global__ void every_instruction(float* out, const void* in) {
    extern __shared__ __align__(16) unsigned char s[];
    uint32_t a[4], b[2], c[1];
    float d[4] = {};
    cpa16(s + threadIdx.x * 16, in);
    cpa8(s, in, threadIdx.x < 3);
    cpa4(s, in, true);
    cpa_commit();
    cpa_wait<0>();
    cpa_wait_all();
    __syncthreads();
    ldsm1(c, s);
    ldsm1t(c, s);
    ldsm2(b, s);
    ldsm2t(b, s);
    ldsm4(a, s);
    ldsm4t(a, s);
    mma16816(d, a, b);
    store16(out + 4, load16(in));
    out[0] = exp2_approx(d[0]) + c[0];
}
