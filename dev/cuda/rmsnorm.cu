// rmsnorm: the addition to the residual stream and the norm that follows it, in one pass; and the way back.
//
//   nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/rmsnorm dev/cuda/rmsnorm.cu -lcjson -lcublasLt
//   dev/emu/emucc -I. -o build/dev/rmsnorm dev/cuda/rmsnorm.cu -lcjson              (no GPU: the emulator)
//
// forward:  residual (N,C) = inp (N,C) + branch (N,C), or inp itself where there is no branch;
//           rstd (N) = 1 / sqrt(mean of residual[n,:]^2 + eps);  out (N,C) = residual * rstd * weight (C)
// backward: with g (N,C) = d_out * weight: d_residual (N,C) = or += rstd * (g - residual * rstd^2 * mean(g * residual))
//           d_weight (C) += sum over n of d_out * residual * rstd
// All bf16 but rstd and d_weight, which are fp32. Reference: cpu::rmsnorm_forward, rmsnorm_backward.
//
//   1  a thread a row; the weight's gradient a thread a column
//   2  a warp a row, so that lanes read neighbours; the weight's gradient in NORM_BLOCKS parts that are added up
//   3  16 bytes a lane
//   4  forward keeps the row in shared memory until its norm is known; backward computes both gradients in one kernel,
//      so that the second reads from the cache what the first has read from memory
// winner: 4
//
// All kernels are bound by bandwidth. Forward must read inp and branch and write residual and out, 8 bytes an element;
// backward reads d_out, residual and d_residual and writes d_residual, 8 bytes as well.
#include "common.h"
#include "norm.h"

enum { NUM_KERNELS = 4 };

// ----------------------------------------------------------------------------
// kernel 1

// A thread owns a row, a block 128 of them: the loops of the CPU. Bound by latency and sectors: 32 lanes read 32 rows
// at once, 2 bytes of each 32-byte sector, and walk all C columns twice.
__global__ void rmsnorm_forward_kernel1(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch,
                                        const bf16* weight, size_t N, int C, int hidden_size, float eps) {
    size_t n = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const bf16* x = inp + n * C;
    if (branch != NULL) {
        for (size_t i = n * C; i < (n + 1) * C; i++) {
            residual[i] = __float2bfloat16(__bfloat162float(inp[i]) + __bfloat162float(branch[i]));
        }
        x = residual + n * C;
    }
    float sum = 0;
    for (int c = 0; c < C; c++) { sum += __bfloat162float(x[c]) * __bfloat162float(x[c]); }
    float s = 1.0f / sqrtf(sum / hidden_size + eps);
    for (int c = 0; c < C; c++) {
        out[n * C + c] = __float2bfloat16(__bfloat162float(x[c]) * s * __bfloat162float(weight[c]));
    }
    rstd[n] = s;
}

// A thread owns a row of d_residual, a block 128 of them; bound as above.
__global__ void rmsnorm_backward_kernel1(bf16* d_residual, const bf16* d_out, const bf16* residual, const bf16* weight,
                                         const float* rstd, size_t N, int C, int hidden_size, bool accumulate) {
    size_t n = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const bf16 *d_o = d_out + n * C, *x = residual + n * C;
    float s = rstd[n], dot = 0;
    for (int c = 0; c < C; c++) {
        dot += __bfloat162float(d_o[c]) * __bfloat162float(weight[c]) * __bfloat162float(x[c]);
    }
    float k = dot * s * s / hidden_size;
    for (int c = 0; c < C; c++) {
        float d = s * (__bfloat162float(d_o[c]) * __bfloat162float(weight[c]) - __bfloat162float(x[c]) * k);
        if (accumulate) { d += __bfloat162float(d_residual[n * C + c]); }
        d_residual[n * C + c] = __float2bfloat16(d);
    }
}

// A thread owns a column and adds up all N rows; a warp's lanes read neighbours. Bound by latency: at C = 896 there are
// 7 blocks of 128 for the whole GPU.
__global__ void rmsnorm_backward_weight_kernel1(float* d_weight, const bf16* d_out, const bf16* residual,
                                                const float* rstd, size_t N, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) { return; }
    float sum = 0;
    for (size_t n = 0; n < N; n++) {
        sum += __bfloat162float(d_out[n * C + c]) * __bfloat162float(residual[n * C + c]) * rstd[n];
    }
    d_weight[c] += sum;
}

void rmsnorm_forward1(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch, const bf16* weight,
                      size_t N, size_t C, int hidden_size, float eps, cudaStream_t stream) {
    rmsnorm_forward_kernel1<<<ceil_div(N, 128), 128, 0, stream>>>(residual, out, rstd, inp, branch, weight, N, (int)C,
                                                                  hidden_size, eps);
    launchCheck("rmsnorm_forward_kernel1");
}
void rmsnorm_backward1(bf16* d_residual, float* d_weight, const bf16* d_out, const bf16* residual, const bf16* weight,
                       const float* rstd, size_t N, size_t C, int hidden_size, bool accumulate, cudaStream_t stream) {
    rmsnorm_backward_kernel1<<<ceil_div(N, 128), 128, 0, stream>>>(d_residual, d_out, residual, weight, rstd, N, (int)C,
                                                                   hidden_size, accumulate);
    launchCheck("rmsnorm_backward_kernel1");
    rmsnorm_backward_weight_kernel1<<<ceil_div(C, 128), 128, 0, stream>>>(d_weight, d_out, residual, rstd, N, (int)C);
    launchCheck("rmsnorm_backward_weight_kernel1");
}

// ----------------------------------------------------------------------------
// kernel 2: a warp a row

// A warp owns a row, a lane every 32nd column; a block has 8 rows. Bound by memory: 64 bytes a request, and the second
// pass over the row comes from the cache.
__global__ void rmsnorm_forward_kernel2(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch,
                                        const bf16* weight, size_t N, int C, int hidden_size, float eps) {
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (n >= N) { return; }
    int lane = threadIdx.x % 32;
    float sum = 0;
    for (int c = lane; c < C; c += 32) {
        float x = __bfloat162float(inp[n * C + c]);
        if (branch != NULL) {
            x = round_bf16(x + __bfloat162float(branch[n * C + c]));
            residual[n * C + c] = __float2bfloat16(x);
        }
        sum += x * x;
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / hidden_size + eps);
    const bf16* row = (branch != NULL ? residual : inp) + n * C; // a lane reads what it has written itself
    for (int c = lane; c < C; c += 32) {
        out[n * C + c] = __float2bfloat16(__bfloat162float(row[c]) * s * __bfloat162float(weight[c]));
    }
    if (lane == 0) { rstd[n] = s; }
}

// A warp owns a row of d_residual, a lane every 32nd column; bound as above.
__global__ void rmsnorm_backward_kernel2(bf16* d_residual, const bf16* d_out, const bf16* residual, const bf16* weight,
                                         const float* rstd, size_t N, int C, int hidden_size, bool accumulate) {
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (n >= N) { return; }
    int lane = threadIdx.x % 32;
    const bf16 *d_o = d_out + n * C, *x = residual + n * C;
    float s = rstd[n], dot = 0;
    for (int c = lane; c < C; c += 32) {
        dot += __bfloat162float(d_o[c]) * __bfloat162float(weight[c]) * __bfloat162float(x[c]);
    }
    float k = warp_sum(dot) * s * s / hidden_size;
    for (int c = lane; c < C; c += 32) {
        float d = s * (__bfloat162float(d_o[c]) * __bfloat162float(weight[c]) - __bfloat162float(x[c]) * k);
        if (accumulate) { d += __bfloat162float(d_residual[n * C + c]); }
        d_residual[n * C + c] = __float2bfloat16(d);
    }
}

// A block owns a range of rows, a thread every 512th column of them. Bound by memory: both arrays are read again.
__global__ void rmsnorm_backward_weight_kernel2(float* partials, const bf16* d_out, const bf16* residual,
                                                const float* rstd, size_t N, int C) {
    size_t begin = N * blockIdx.x / gridDim.x, end = N * (blockIdx.x + 1) / gridDim.x;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0;
        for (size_t n = begin; n < end; n++) {
            sum += __bfloat162float(d_out[n * C + c]) * __bfloat162float(residual[n * C + c]) * rstd[n];
        }
        partials[blockIdx.x * (size_t)C + c] = sum;
    }
}

void rmsnorm_forward2(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch, const bf16* weight,
                      size_t N, size_t C, int hidden_size, float eps, cudaStream_t stream) {
    rmsnorm_forward_kernel2<<<ceil_div(N, 8), 256, 0, stream>>>(residual, out, rstd, inp, branch, weight, N, (int)C,
                                                                hidden_size, eps);
    launchCheck("rmsnorm_forward_kernel2");
}
void rmsnorm_backward2(bf16* d_residual, float* d_weight, const bf16* d_out, const bf16* residual, const bf16* weight,
                       const float* rstd, float* partials, size_t N, size_t C, int hidden_size, bool accumulate,
                       cudaStream_t stream) {
    rmsnorm_backward_kernel2<<<ceil_div(N, 8), 256, 0, stream>>>(d_residual, d_out, residual, weight, rstd, N, (int)C,
                                                                 hidden_size, accumulate);
    launchCheck("rmsnorm_backward_kernel2");
    rmsnorm_backward_weight_kernel2<<<norm_blocks(N), 512, 0, stream>>>(partials, d_out, residual, rstd, N, (int)C);
    launchCheck("rmsnorm_backward_weight_kernel2");
    norm_weight_reduce(d_weight, partials, norm_blocks(N), C, C, stream);
}

// ----------------------------------------------------------------------------
// kernel 3: 16 bytes a lane

// A warp owns a row, a lane 8 neighbours of every 256 columns; a block has 8 rows. Bound by memory, now in requests of
// 512 bytes a warp.
__global__ void rmsnorm_forward_kernel3(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch,
                                        const bf16* weight, size_t N, int C, int hidden_size, float eps) {
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (n >= N) { return; }
    int lane = threadIdx.x % 32;
    float sum = 0;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float x[8];
        load8(x, inp + n * C + c);
        if (branch != NULL) {
            float b[8];
            load8(b, branch + n * C + c);
            for (int i = 0; i < 8; i++) { x[i] = round_bf16(x[i] + b[i]); }
            store8(residual + n * C + c, x);
        }
        for (int i = 0; i < 8; i++) { sum += x[i] * x[i]; }
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / hidden_size + eps);
    const bf16* row = (branch != NULL ? residual : inp) + n * C;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float x[8], w[8];
        load8(x, row + c);
        load8(w, weight + c);
        for (int i = 0; i < 8; i++) { x[i] = x[i] * s * w[i]; }
        store8(out + n * C + c, x);
    }
    if (lane == 0) { rstd[n] = s; }
}

// A warp owns a row of d_residual, a lane 8 neighbours of every 256 columns; bound as above.
__global__ void rmsnorm_backward_kernel3(bf16* d_residual, const bf16* d_out, const bf16* residual, const bf16* weight,
                                         const float* rstd, size_t N, int C, int hidden_size, bool accumulate) {
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (n >= N) { return; }
    int lane = threadIdx.x % 32;
    float s = rstd[n], dot = 0;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float d_o[8], x[8], w[8];
        load8(d_o, d_out + n * C + c);
        load8(x, residual + n * C + c);
        load8(w, weight + c);
        for (int i = 0; i < 8; i++) { dot += d_o[i] * w[i] * x[i]; }
    }
    float k = warp_sum(dot) * s * s / hidden_size;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float d_o[8], x[8], w[8], d_x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        load8(d_o, d_out + n * C + c);
        load8(x, residual + n * C + c);
        load8(w, weight + c);
        if (accumulate) { load8(d_x, d_residual + n * C + c); }
        for (int i = 0; i < 8; i++) { d_x[i] += s * (d_o[i] * w[i] - x[i] * k); }
        store8(d_residual + n * C + c, d_x);
    }
}

// A block owns a range of rows, a thread 8 columns of it. Bound by memory: both arrays are read again.
__global__ void rmsnorm_backward_weight_kernel3(float* partials, const bf16* d_out, const bf16* residual,
                                                const float* rstd, size_t N, int C) {
    size_t begin = N * blockIdx.x / gridDim.x, end = N * (blockIdx.x + 1) / gridDim.x;
    for (int c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (size_t n = begin; n < end; n++) {
            float d_o[8], x[8];
            load8(d_o, d_out + n * C + c);
            load8(x, residual + n * C + c);
            for (int i = 0; i < 8; i++) { sum[i] += d_o[i] * x[i] * rstd[n]; }
        }
        for (int i = 0; i < 8; i++) { partials[blockIdx.x * (size_t)C + c + i] = sum[i]; }
    }
}

void rmsnorm_forward3(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch, const bf16* weight,
                      size_t N, size_t C, int hidden_size, float eps, cudaStream_t stream) {
    rmsnorm_forward_kernel3<<<ceil_div(N, 8), 256, 0, stream>>>(residual, out, rstd, inp, branch, weight, N, (int)C,
                                                                hidden_size, eps);
    launchCheck("rmsnorm_forward_kernel3");
}
void rmsnorm_backward3(bf16* d_residual, float* d_weight, const bf16* d_out, const bf16* residual, const bf16* weight,
                       const float* rstd, float* partials, size_t N, size_t C, int hidden_size, bool accumulate,
                       cudaStream_t stream) {
    rmsnorm_backward_kernel3<<<ceil_div(N, 8), 256, 0, stream>>>(d_residual, d_out, residual, weight, rstd, N, (int)C,
                                                                 hidden_size, accumulate);
    launchCheck("rmsnorm_backward_kernel3");
    rmsnorm_backward_weight_kernel3<<<norm_blocks(N), 128, 0, stream>>>(partials, d_out, residual, rstd, N, (int)C);
    launchCheck("rmsnorm_backward_weight_kernel3");
    norm_weight_reduce(d_weight, partials, norm_blocks(N), C, C, stream);
}

// ----------------------------------------------------------------------------
// kernel 4, as in train_moe.cu

// residual = bf16(inp + branch); rstd = 1 / sqrt(mean of residual^2 + eps); out = residual * rstd * weight
// A warp owns a row, a lane the 16-byte pieces lane, lane + 32, ... of it. The pieces wait in shared memory until the
// sum is known; each lane reads back its own, so no barrier is needed. Where not one row fits in (keep false), they are
// read again from where they came. Bandwidth: 8 bytes an element.
__global__ void rmsnorm_forward_kernel4(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch,
                                        const bf16* weight, size_t N, int C, int hidden_size, float eps, bool keep) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t n = blockIdx.x * (size_t)(blockDim.x / 32) + warp;
    if (n >= N) { return; }
    bf16* row = (bf16*)shared_bytes + (size_t)warp * C;
    float sum = 0;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float x[8];
        load8(x, inp + n * C + c);
        if (branch != NULL) {
            float b[8];
            load8(b, branch + n * C + c);
            for (int i = 0; i < 8; i++) { x[i] = round_bf16(x[i] + b[i]); }
            store8(residual + n * C + c, x);
        }
        if (keep) { store8(row + c, x); }
        for (int i = 0; i < 8; i++) { sum += x[i] * x[i]; }
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / hidden_size + eps);
    const bf16* again = keep ? row : (branch != NULL ? residual : inp) + n * C;
    for (int c = lane * 8; c < C; c += 32 * 8) {
        float x[8], w[8];
        load8(x, again + c);
        load8(w, weight + c);
        for (int i = 0; i < 8; i++) { x[i] = x[i] * s * w[i]; }
        store8(out + n * C + c, x);
    }
    if (lane == 0) { rstd[n] = s; }
}

void rmsnorm_forward(bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch, const bf16* weight,
                     size_t N, size_t C, int hidden_size, float eps, cudaStream_t stream) {
    // residual, out (N,C) =, rstd (N) =. branch NULL: inp is the residual stream already, and residual is not written.
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("rmsnorm_forward: C must be a multiple of 8, is %zu", C); }
    size_t row_bytes = C * sizeof(bf16), most = 48 * 1024;
    bool keep = row_bytes <= most;
    size_t warps = keep && most / row_bytes < 8 ? most / row_bytes : 8;
    rmsnorm_forward_kernel4<<<ceil_div(N, warps), warps * 32, keep ? warps * row_bytes : 0, stream>>>(
        residual, out, rstd, inp, branch, weight, N, (int)C, hidden_size, eps, keep);
    launchCheck("rmsnorm_forward_kernel4");
}

// With xhat = residual * rstd and g = d_out * weight: d_residual = rstd * (g - xhat * mean(g * xhat)), and for a
// block's range of rows partials = sum of d_out * xhat.
// A block owns a range of the rows and takes as many at a time as it has warps. First a warp owns a row and
// writes its d_residual; then a thread owns 2 columns, and adds up those rows, which by now are in the L1 cache. The
// two halves need nothing of each other but the cache, so there is no barrier. Bandwidth: 6 bytes an element, 8 with
// accumulate. Two blocks a multiprocessor, so that a large card runs all of them at once.
__global__ void __launch_bounds__(512, 2)
rmsnorm_backward_kernel4(bf16* d_residual, float* partials, const bf16* d_out, const bf16* residual, const bf16* weight,
                         const float* rstd, size_t N, int C, int hidden_size, bool accumulate) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    size_t begin = N * blockIdx.x / gridDim.x, end = N * (blockIdx.x + 1) / gridDim.x;
    float* partial = partials + blockIdx.x * (size_t)C;
    for (int c = threadIdx.x * 2; c < C; c += blockDim.x * 2) { partial[c] = partial[c + 1] = 0; }
    for (size_t first = begin; first < end; first += warps) {
        size_t n = first + warp, last = first + warps < end ? first + warps : end;
        if (n < last) {
            float s = rstd[n], dot = 0;
            for (int c = lane * 8; c < C; c += 32 * 8) {
                float d_o[8], x[8], w[8];
                load8(d_o, d_out + n * C + c);
                load8(x, residual + n * C + c);
                load8(w, weight + c);
                for (int i = 0; i < 8; i++) { dot += d_o[i] * w[i] * x[i]; }
            }
            float k = warp_sum(dot) * s * s / hidden_size;
            for (int c = lane * 8; c < C; c += 32 * 8) {
                float d_o[8], x[8], w[8], d_x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
                load8(d_o, d_out + n * C + c);
                load8(x, residual + n * C + c);
                load8(w, weight + c);
                if (accumulate) { load8(d_x, d_residual + n * C + c); }
                for (int i = 0; i < 8; i++) { d_x[i] += s * (d_o[i] * w[i] - x[i] * k); }
                store8(d_residual + n * C + c, d_x);
            }
        }
        for (int c = threadIdx.x * 2; c < C; c += blockDim.x * 2) {
            float sum0 = partial[c], sum1 = partial[c + 1];
            #pragma unroll 8
            for (size_t m = first; m < last; m++) {
                float2 d_o = __bfloat1622float2(*(const __nv_bfloat162*)(d_out + m * C + c));
                float2 x = __bfloat1622float2(*(const __nv_bfloat162*)(residual + m * C + c));
                float s = rstd[m];
                sum0 += d_o.x * x.x * s;
                sum1 += d_o.y * x.y * s;
            }
            partial[c] = sum0;
            partial[c + 1] = sum1;
        }
    }
}

void rmsnorm_backward(bf16* d_residual, float* d_weight, const bf16* d_out, const bf16* residual, const bf16* weight,
                      const float* rstd, float* partials, size_t N, size_t C, int hidden_size, bool accumulate,
                      cudaStream_t stream) {
    // d_residual (N,C) = or, with accumulate, +=; d_weight (C) +=; partials (NORM_BLOCKS,C) scratch
    if (N * C == 0) { return; }
    if (C % 8 != 0) { fatal("rmsnorm_backward: C must be a multiple of 8, is %zu", C); }
    rmsnorm_backward_kernel4<<<norm_blocks(N), 512, 0, stream>>>(d_residual, partials, d_out, residual, weight, rstd, N,
                                                                 (int)C, hidden_size, accumulate);
    launchCheck("rmsnorm_backward_kernel4");
    norm_weight_reduce(d_weight, partials, norm_blocks(N), C, C, stream);
}

// ----------------------------------------------------------------------------
// checks

void forward(int kernel, bf16* residual, bf16* out, float* rstd, const bf16* inp, const bf16* branch,
             const bf16* weight, size_t N, size_t C, int hidden_size) {
    const float eps = 1e-6f;
    if (kernel == 1) { rmsnorm_forward1(residual, out, rstd, inp, branch, weight, N, C, hidden_size, eps, 0); }
    if (kernel == 2) { rmsnorm_forward2(residual, out, rstd, inp, branch, weight, N, C, hidden_size, eps, 0); }
    if (kernel == 3) { rmsnorm_forward3(residual, out, rstd, inp, branch, weight, N, C, hidden_size, eps, 0); }
    if (kernel == 4) { rmsnorm_forward(residual, out, rstd, inp, branch, weight, N, C, hidden_size, eps, 0); }
}
void backward(int kernel, bf16* d_residual, float* d_weight, const bf16* d_out, const bf16* residual,
              const bf16* weight, const float* rstd, float* partials, size_t N, size_t C, int hidden_size, bool acc) {
    if (kernel == 1) {
        rmsnorm_backward1(d_residual, d_weight, d_out, residual, weight, rstd, N, C, hidden_size, acc, 0);
    }
    if (kernel == 2) {
        rmsnorm_backward2(d_residual, d_weight, d_out, residual, weight, rstd, partials, N, C, hidden_size, acc, 0);
    }
    if (kernel == 3) {
        rmsnorm_backward3(d_residual, d_weight, d_out, residual, weight, rstd, partials, N, C, hidden_size, acc, 0);
    }
    if (kernel == 4) {
        rmsnorm_backward(d_residual, d_weight, d_out, residual, weight, rstd, partials, N, C, hidden_size, acc, 0);
    }
}

// rows of hidden_size numbers -> rows of C with zeros behind, and back
std::vector<float> pad(const std::vector<float>& x, size_t hidden_size, size_t C) {
    std::vector<float> y(x.size() / hidden_size * C);
    for (size_t i = 0; i < x.size(); i++) { y[i / hidden_size * C + i % hidden_size] = x[i]; }
    return y;
}

void check(int kernel, const char* what, size_t N, size_t hidden_size, bool branch, bool accumulate) {
    size_t C = ceil_div(hidden_size, 8) * 8;
    std::vector<float> inp = random_floats(N * hidden_size, 1, 1), add = random_floats(N * hidden_size, 0.5, 2);
    std::vector<float> weight = random_floats(hidden_size, 1, 3), sum(inp);
    for (size_t i = 0; branch && i < sum.size(); i++) { sum[i] = bf16_to_f32(f32_to_bf16(inp[i] + add[i])); }
    std::vector<float> want_out(N * hidden_size), want_rstd(N);
    cpu::rmsnorm_forward(NULL, want_out.data(), want_rstd.data(), sum.data(), NULL, weight.data(), N, hidden_size,
                         1e-6f);
    Device<bf16> residual(N * C), out(N * C);
    Device<bf16> device_inp(to_bf16(pad(inp, hidden_size, C))), device_add(to_bf16(pad(add, hidden_size, C)));
    Device<bf16> device_weight(to_bf16(pad(weight, hidden_size, C)));
    Device<float> rstd(N);
    forward(kernel, residual, out, rstd, device_inp, branch ? device_add.data : NULL, device_weight, N, C, hidden_size);
    if (branch) { check_equal(what, residual.get(), to_bf16(pad(sum, hidden_size, C))); }
    check_bf16(what, out.get(), pad(want_out, hidden_size, C));
    check_f32(what, rstd.get(), want_rstd);

    std::vector<float> d_out = random_floats(N * hidden_size, 1, 4), d_weight = random_floats(hidden_size, 1, 5);
    std::vector<float> d_residual = random_floats(N * hidden_size, 1, 6), partials(64 * hidden_size);
    Device<bf16> device_sum(to_bf16(pad(sum, hidden_size, C))), device_d_out(to_bf16(pad(d_out, hidden_size, C)));
    Device<bf16> device_d_residual(N * C);
    if (accumulate) { device_d_residual.set(to_bf16(pad(d_residual, hidden_size, C))); } // else it holds NaNs
    Device<float> device_d_weight(pad(d_weight, hidden_size, C)), device_rstd(want_rstd);
    Device<float> device_partials(NORM_BLOCKS * C);
    backward(kernel, device_d_residual, device_d_weight, device_d_out, device_sum, device_weight, device_rstd,
             device_partials, N, C, hidden_size, accumulate);
    cpu::rmsnorm_backward(d_residual.data(), d_weight.data(), d_out.data(), sum.data(), weight.data(), want_rstd.data(),
                          partials.data(), N, hidden_size, accumulate, 1);
    check_bf16(what, device_d_residual.get(), pad(d_residual, hidden_size, C));
    check_f32(what, device_d_weight.get(), pad(d_weight, hidden_size, C));
}

void check_all(int kernel) {
    check(kernel, "one short row", 1, 8, false, false);
    check(kernel, "one padded row", 1, 3, true, true);
    check(kernel, "row of one number", 5, 1, true, false);
    check(kernel, "off every width", 37, 271, true, true);
    check(kernel, "no branch", 37, 271, false, false);
    check(kernel, "several rows a block", 999, 72, true, false);
    check(kernel, "wide", 3, 5000, true, true);
    if (kernel == NUM_KERNELS) {
        check(kernel, "wider than shared memory", 2, 24700, true, false);
        check(kernel, "wider than shared memory, no branch", 2, 24700, false, true);
    }
    check(kernel, "smol-500m", smol_500m_tokens(kernel), 896, true, true);
}

void bench_all(int kernel) {
    size_t N = 8 * 4096, C = 896;
    std::vector<bf16> numbers = to_bf16(random_floats(N * C, 1, 1));
    Device<bf16> inp(numbers), branch(numbers), residual(N * C), out(N * C), weight(to_bf16(random_floats(C, 1, 2)));
    Device<bf16> d_residual(numbers);
    Device<float> rstd(N), d_weight(random_floats(C, 1, 3)), partials(NORM_BLOCKS * C);
    std::string name = " kernel " + std::to_string(kernel) + ", N 32768, C 896";
    double bytes = 8.0 * N * C + 4.0 * N;
    bench(("rmsnorm_forward" + name).c_str(), bytes, 0,
          [&] { forward(kernel, residual, out, rstd, inp, branch, weight, N, C, C); });
    bench(("rmsnorm_backward" + name).c_str(), bytes, 0,
          [&] { backward(kernel, d_residual, d_weight, out, residual, weight, rstd, partials, N, C, C, true); });
}

int main(int argc, char** argv) {
    dev_open(argc, argv, NUM_KERNELS);
    for (int kernel = 1; kernel <= NUM_KERNELS; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    return dev_close();
}
