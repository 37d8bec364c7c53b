// qk_norm_rope: RMSNorm over each head of q and k, then rotary position embedding.
//
//   nvcc -std=c++17 -O3 -arch=native -I. -o build/dev/qk_norm_rope dev/cuda/qk_norm_rope.cu -lcjson -lcublasLt
//   dev/emu/emucc -I. -o build/dev/qk_norm_rope dev/cuda/qk_norm_rope.cu -lcjson    (no GPU: the emulator)
//
// qkv (N,(NH+2*NKV)*HD) holds a token's heads of q, of k, of v; x is one of q or k, w its weight q_norm or k_norm (HD):
// forward:  rstd (N,NH+NKV) = 1 / sqrt(mean of x^2 + eps);  y (HD) = x * rstd * w;  rope (T,HD) has the cosines c of a
//           position, then its sines s:
//           qk (N,(NH+NKV)*HD): y[i] c[i] - y[i+HD/2] s[i]  and  y[i+HD/2] c[i] + y[i] s[i], i < HD/2
// backward: d_qkv (N,(NH+2*NKV)*HD): the gradients of qk become, in place, those of qkv; d_q_norm, d_k_norm (HD) +=
// All bf16 but rstd, rope and the weights' gradients, which are fp32. Reference: cpu::qk_norm_rope_forward,
// qk_norm_rope_backward.
//
//   1  a thread a head; the weights' gradients a thread an element
//   2  a warp a head, a lane pairs (i, i + HD/2) of it; the weights' gradients in NORM_BLOCKS parts that are added up
//   3  8-byte pieces: HD/8 lanes a head, each with 4 elements of the first half and their partners of the second, so
//      that the rotation stays inside a lane; backward computes all gradients in one kernel
// winner: 3
//
// All are bound by bandwidth: forward reads and writes each element of q and k, 4 bytes; backward reads the gradient
// and the element and writes the gradient, 6 bytes. All heads read the same cosines and sines, so from the cache.
#include "common.h"
#include "norm.h"

enum { NUM_KERNELS = 3 };

// ----------------------------------------------------------------------------
// kernel 1

// A thread owns a head of a token, a block 128 heads. Bound by sectors: a warp reads 32 heads at once, 2 bytes of each.
__global__ void qk_norm_rope_forward_kernel1(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm,
                                             const bf16* k_norm, const float* rope, size_t N, size_t T, int NH,
                                             int NKV, int HD, float eps) {
    size_t thread = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    size_t n = thread / (NH + NKV), h = thread % (NH + NKV);
    if (n >= N) { return; }
    const bf16 *x = qkv + (n * (NH + 2 * NKV) + h) * HD, *weight = h < NH ? q_norm : k_norm;
    const float *cosine = rope + n % T * HD, *sine = cosine + HD / 2;
    bf16* out = qk + thread * HD;
    float sum = 0;
    for (int i = 0; i < HD; i++) { sum += __bfloat162float(x[i]) * __bfloat162float(x[i]); }
    float s = 1.0f / sqrtf(sum / HD + eps);
    for (int i = 0; i < HD / 2; i++) {
        float x1 = __bfloat162float(x[i]) * s * __bfloat162float(weight[i]);
        float x2 = __bfloat162float(x[i + HD / 2]) * s * __bfloat162float(weight[i + HD / 2]);
        out[i] = __float2bfloat16(x1 * cosine[i] - x2 * sine[i]);
        out[i + HD / 2] = __float2bfloat16(x2 * cosine[i] + x1 * sine[i]);
    }
    rstd[thread] = s;
}

// One block owns everything, a thread an element of both weights, and looks at all heads. Bound by latency: the rest of
// the GPU has nothing to do. It runs before the gradients of qk are replaced.
__global__ void qk_norm_rope_backward_weight_kernel1(float* d_q_norm, float* d_k_norm, const bf16* d_qkv,
                                                     const bf16* qkv, const float* rstd, const float* rope, size_t N,
                                                     size_t T, int NH, int NKV, int HD) {
    int i = threadIdx.x, half = HD / 2, partner = i < half ? i + half : i - half;
    float d_q = 0, d_k = 0;
    for (size_t n = 0; n < N; n++) {
        float cosine = rope[n % T * HD + i % half], sine = rope[n % T * HD + half + i % half];
        for (int h = 0; h < NH + NKV; h++) {
            size_t head = (n * (NH + 2 * NKV) + h) * HD;
            float d = __bfloat162float(d_qkv[head + i]), d_partner = __bfloat162float(d_qkv[head + partner]);
            float g = i < half ? d * cosine + d_partner * sine : d * cosine - d_partner * sine;
            float d_weight = g * __bfloat162float(qkv[head + i]) * rstd[n * (NH + NKV) + h];
            if (h < NH) { d_q += d_weight; } else { d_k += d_weight; }
        }
    }
    d_q_norm[i] += d_q;
    d_k_norm[i] += d_k;
}

// A thread owns a head of a token, a block 128 heads; bound by sectors as forward.
__global__ void qk_norm_rope_backward_kernel1(bf16* d_qkv, const bf16* qkv, const float* rstd, const bf16* q_norm,
                                              const bf16* k_norm, const float* rope, size_t N, size_t T, int NH,
                                              int NKV, int HD) {
    size_t thread = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    size_t n = thread / (NH + NKV), h = thread % (NH + NKV), half = HD / 2;
    if (n >= N) { return; }
    const bf16 *x = qkv + (n * (NH + 2 * NKV) + h) * HD, *weight = h < NH ? q_norm : k_norm;
    const float *cosine = rope + n % T * HD, *sine = cosine + half;
    bf16* d = d_qkv + (n * (NH + 2 * NKV) + h) * HD;
    float s = rstd[thread], k = 0;
    for (int again = 0; again < 2; again++) { // first the sum k, then the gradients, from the same numbers
        float dot = 0;
        for (size_t i = 0; i < half; i++) {
            float d1 = __bfloat162float(d[i]), d2 = __bfloat162float(d[i + half]);
            float x1 = __bfloat162float(x[i]), x2 = __bfloat162float(x[i + half]);
            float g1 = (d1 * cosine[i] + d2 * sine[i]) * __bfloat162float(weight[i]);
            float g2 = (d2 * cosine[i] - d1 * sine[i]) * __bfloat162float(weight[i + half]);
            dot += g1 * x1 + g2 * x2;
            if (again == 0) { continue; }
            d[i] = __float2bfloat16(s * (g1 - x1 * k));
            d[i + half] = __float2bfloat16(s * (g2 - x2 * k));
        }
        k = dot * s * s / HD;
    }
}

void qk_norm_rope_forward1(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm, const bf16* k_norm,
                           const float* rope, size_t N, size_t T, int NH, int NKV, int HD, float eps,
                           cudaStream_t stream) {
    qk_norm_rope_forward_kernel1<<<ceil_div(N * (NH + NKV), 128), 128, 0, stream>>>(
        qk, rstd, qkv, q_norm, k_norm, rope, N, T, NH, NKV, HD, eps);
    launchCheck("qk_norm_rope_forward_kernel1");
}
void qk_norm_rope_backward1(bf16* d_qkv, float* d_q_norm, float* d_k_norm, const bf16* qkv, const float* rstd,
                            const bf16* q_norm, const bf16* k_norm, const float* rope, size_t N, size_t T, int NH,
                            int NKV, int HD, cudaStream_t stream) {
    qk_norm_rope_backward_weight_kernel1<<<1, HD, 0, stream>>>(d_q_norm, d_k_norm, d_qkv, qkv, rstd, rope, N, T, NH,
                                                               NKV, HD);
    launchCheck("qk_norm_rope_backward_weight_kernel1");
    qk_norm_rope_backward_kernel1<<<ceil_div(N * (NH + NKV), 128), 128, 0, stream>>>(
        d_qkv, qkv, rstd, q_norm, k_norm, rope, N, T, NH, NKV, HD);
    launchCheck("qk_norm_rope_backward_kernel1");
}

// ----------------------------------------------------------------------------
// kernel 2: a warp a head

// A warp owns a head of a token, a lane every 32nd pair of it; a block has 8 heads. Bound by memory, 64 bytes a
// request: at HD = 64 a lane has one pair, so most of its instructions are addresses and sums over the warp.
__global__ void qk_norm_rope_forward_kernel2(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm,
                                             const bf16* k_norm, const float* rope, size_t N, size_t T, int NH,
                                             int NKV, int HD, float eps) {
    size_t head = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    size_t n = head / (NH + NKV), h = head % (NH + NKV);
    int lane = threadIdx.x % 32, half = HD / 2;
    if (n >= N) { return; }
    const bf16 *x = qkv + (n * (NH + 2 * NKV) + h) * HD, *weight = h < NH ? q_norm : k_norm;
    const float *cosine = rope + n % T * HD, *sine = cosine + half;
    bf16* out = qk + head * HD;
    float sum = 0;
    for (int i = lane; i < HD; i += 32) { sum += __bfloat162float(x[i]) * __bfloat162float(x[i]); }
    float s = 1.0f / sqrtf(warp_sum(sum) / HD + eps);
    for (int i = lane; i < half; i += 32) {
        float x1 = __bfloat162float(x[i]) * s * __bfloat162float(weight[i]);
        float x2 = __bfloat162float(x[i + half]) * s * __bfloat162float(weight[i + half]);
        out[i] = __float2bfloat16(x1 * cosine[i] - x2 * sine[i]);
        out[i + half] = __float2bfloat16(x2 * cosine[i] + x1 * sine[i]);
    }
    if (lane == 0) { rstd[head] = s; }
}

// A block owns a range of tokens, a thread an element of both weights. Bound by latency: HD threads, a head at a time.
__global__ void qk_norm_rope_backward_weight_kernel2(float* partials, const bf16* d_qkv, const bf16* qkv,
                                                     const float* rstd, const float* rope, size_t N, size_t T, int NH,
                                                     int NKV, int HD) {
    int i = threadIdx.x, half = HD / 2, partner = i < half ? i + half : i - half;
    size_t begin = N * blockIdx.x / gridDim.x, end = N * (blockIdx.x + 1) / gridDim.x;
    float d_q = 0, d_k = 0;
    for (size_t n = begin; n < end; n++) {
        float cosine = rope[n % T * HD + i % half], sine = rope[n % T * HD + half + i % half];
        for (int h = 0; h < NH + NKV; h++) {
            size_t head = (n * (NH + 2 * NKV) + h) * HD;
            float d = __bfloat162float(d_qkv[head + i]), d_partner = __bfloat162float(d_qkv[head + partner]);
            float g = i < half ? d * cosine + d_partner * sine : d * cosine - d_partner * sine;
            float d_weight = g * __bfloat162float(qkv[head + i]) * rstd[n * (NH + NKV) + h];
            if (h < NH) { d_q += d_weight; } else { d_k += d_weight; }
        }
    }
    partials[blockIdx.x * 2 * HD + i] = d_q;
    partials[blockIdx.x * 2 * HD + HD + i] = d_k;
}

// A warp owns a head of a token, a lane every 32nd pair of it; bound as forward.
__global__ void qk_norm_rope_backward_kernel2(bf16* d_qkv, const bf16* qkv, const float* rstd, const bf16* q_norm,
                                              const bf16* k_norm, const float* rope, size_t N, size_t T, int NH,
                                              int NKV, int HD) {
    size_t head = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    size_t n = head / (NH + NKV), h = head % (NH + NKV);
    int lane = threadIdx.x % 32, half = HD / 2;
    if (n >= N) { return; }
    const bf16 *x = qkv + (n * (NH + 2 * NKV) + h) * HD, *weight = h < NH ? q_norm : k_norm;
    const float *cosine = rope + n % T * HD, *sine = cosine + half;
    bf16* d = d_qkv + (n * (NH + 2 * NKV) + h) * HD;
    float s = rstd[head], k = 0;
    for (int again = 0; again < 2; again++) {
        float dot = 0;
        for (int i = lane; i < half; i += 32) {
            float d1 = __bfloat162float(d[i]), d2 = __bfloat162float(d[i + half]);
            float x1 = __bfloat162float(x[i]), x2 = __bfloat162float(x[i + half]);
            float g1 = (d1 * cosine[i] + d2 * sine[i]) * __bfloat162float(weight[i]);
            float g2 = (d2 * cosine[i] - d1 * sine[i]) * __bfloat162float(weight[i + half]);
            dot += g1 * x1 + g2 * x2;
            if (again == 0) { continue; }
            d[i] = __float2bfloat16(s * (g1 - x1 * k));
            d[i + half] = __float2bfloat16(s * (g2 - x2 * k));
        }
        k = warp_sum(dot) * s * s / HD;
    }
}

void qk_norm_rope_forward2(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm, const bf16* k_norm,
                           const float* rope, size_t N, size_t T, int NH, int NKV, int HD, float eps,
                           cudaStream_t stream) {
    qk_norm_rope_forward_kernel2<<<ceil_div(N * (NH + NKV), 8), 256, 0, stream>>>(
        qk, rstd, qkv, q_norm, k_norm, rope, N, T, NH, NKV, HD, eps);
    launchCheck("qk_norm_rope_forward_kernel2");
}
void qk_norm_rope_backward2(bf16* d_qkv, float* d_q_norm, float* d_k_norm, const bf16* qkv, const float* rstd,
                            const bf16* q_norm, const bf16* k_norm, const float* rope, float* partials, size_t N,
                            size_t T, int NH, int NKV, int HD, cudaStream_t stream) {
    qk_norm_rope_backward_weight_kernel2<<<norm_blocks(N), HD, 0, stream>>>(partials, d_qkv, qkv, rstd, rope, N, T, NH,
                                                                         NKV, HD);
    launchCheck("qk_norm_rope_backward_weight_kernel2");
    norm_weight_reduce(d_q_norm, partials, norm_blocks(N), 2 * HD, HD, stream);
    norm_weight_reduce(d_k_norm, partials + HD, norm_blocks(N), 2 * HD, HD, stream);
    qk_norm_rope_backward_kernel2<<<ceil_div(N * (NH + NKV), 8), 256, 0, stream>>>(
        d_qkv, qkv, rstd, q_norm, k_norm, rope, N, T, NH, NKV, HD);
    launchCheck("qk_norm_rope_backward_kernel2");
}

// ----------------------------------------------------------------------------
// kernel 3, as in train_moe.cu

// qk = rotate(rmsnorm(x)) for each head of q and k, by halves: element i with element i + HD/2
// A block owns a token; `lanes` threads own a head of it at a time, a thread 4 elements of the first half and the 4
// that are rotated with them. Where HD/8 is no power of 2 some lanes have no elements. Bandwidth: 4 bytes an element;
// the token's row of cosines and sines comes from memory once.
__global__ void qk_norm_rope_forward_kernel3(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm,
                                             const bf16* k_norm, const float* rope, size_t T, int NH, int NKV,
                                             int HD, float eps, int lanes) {
    size_t n = blockIdx.x;
    int i = threadIdx.x % lanes * 4, half = HD / 2, groups = blockDim.x / lanes;
    float cosine[4] = {0, 0, 0, 0}, sine[4] = {0, 0, 0, 0};
    if (i < half) {
        load4(cosine, rope + n % T * HD + i);
        load4(sine, rope + n % T * HD + half + i);
    }
    for (int h0 = 0; h0 < NH + NKV; h0 += groups) { // all lanes of a warp stay together for the sums
        int h = h0 + threadIdx.x / lanes;
        bool inside = h < NH + NKV && i < half;
        float x1[4] = {0, 0, 0, 0}, x2[4] = {0, 0, 0, 0}, sum = 0;
        if (inside) {
            const bf16* x = qkv + (n * (NH + 2 * NKV) + h) * HD + i;
            load4(x1, x);
            load4(x2, x + half);
        }
        for (int j = 0; j < 4; j++) { sum += x1[j] * x1[j] + x2[j] * x2[j]; }
        float s = 1.0f / sqrtf(warp_sum(sum, lanes) / HD + eps);
        if (!inside) { continue; }
        const bf16* weight = (h < NH ? q_norm : k_norm) + i;
        float w1[4], w2[4], out1[4], out2[4];
        load4(w1, weight);
        load4(w2, weight + half);
        for (int j = 0; j < 4; j++) {
            float y1 = x1[j] * s * w1[j], y2 = x2[j] * s * w2[j];
            out1[j] = y1 * cosine[j] - y2 * sine[j];
            out2[j] = y2 * cosine[j] + y1 * sine[j];
        }
        bf16* out = qk + (n * (NH + NKV) + h) * HD + i;
        store4(out, out1);
        store4(out + half, out2);
        if (i == 0) { rstd[n * (NH + NKV) + h] = s; }
    }
}

int rope_lanes(int HD) {
    // lanes a head: the power of 2 from HD/8 on
    if (HD % 8 != 0 || HD < 8 || HD > 128) { fatal("qk_norm_rope: HD must be a multiple of 8 up to 128, is %d", HD); }
    int lanes = 1;
    while (lanes < HD / 8) { lanes *= 2; }
    return lanes;
}

void qk_norm_rope_forward(bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm, const bf16* k_norm,
                          const float* rope, size_t N, size_t T, int NH, int NKV, int HD, float eps,
                          cudaStream_t stream) {
    // qk (N,(NH+NKV)*HD) =, rstd (N,NH+NKV) =; qkv (N,(NH+2*NKV)*HD); rope (T,HD): rope_table; token n is at n % T
    int lanes = rope_lanes(HD);
    if (N == 0) { return; }
    size_t wanted = ceil_div((size_t)(NH + NKV) * lanes, 32) * 32, threads = wanted < 256 ? wanted : 256;
    qk_norm_rope_forward_kernel3<<<N, threads, 0, stream>>>(qk, rstd, qkv, q_norm, k_norm, rope, T, NH, NKV, HD, eps,
                                                            lanes);
    launchCheck("qk_norm_rope_forward_kernel3");
}

enum { ROPE_WARPS = 16 };

// In place: the gradients of qk become those of qkv. With g the gradient rotated back, xhat = x * rstd, w the weight:
// d = rstd * (g*w - xhat * mean(g*w*xhat)), and for a block's range of tokens partials (2,HD) = sums of g * xhat, of q
// and of k.
// A block owns a range of the tokens: first their heads of q, then those of k. As above `lanes` threads own a
// head at a time, and always the same elements of it, so that the sums for the weight stay in registers; at the end
// they are added over the lanes of a warp that own the same elements, then over the warps. Bandwidth: 6 bytes an
// element.
__global__ void __launch_bounds__(ROPE_WARPS * 32, 2)
qk_norm_rope_backward_kernel3(bf16* d_qkv, float* partials, const bf16* qkv, const float* rstd, const bf16* q_norm,
                              const bf16* k_norm, const float* rope, size_t N, size_t T, int NH, int NKV, int HD,
                              int lanes) {
    __shared__ float warp_sums[ROPE_WARPS][128];
    size_t begin = N * blockIdx.x / gridDim.x, end = N * (blockIdx.x + 1) / gridDim.x;
    int i = threadIdx.x % lanes * 4, half = HD / 2, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    for (int part = 0; part < 2; part++) {
        int heads = part == 0 ? NH : NKV, first_head = part == 0 ? 0 : NH, all = (int)(end - begin) * heads;
        const bf16* weight = part == 0 ? q_norm : k_norm;
        float w1[4] = {0, 0, 0, 0}, w2[4] = {0, 0, 0, 0}, sum1[4] = {0, 0, 0, 0}, sum2[4] = {0, 0, 0, 0};
        if (i < half) {
            load4(w1, weight + i);
            load4(w2, weight + half + i);
        }
        for (int first = 0; first < all; first += groups) { // all lanes of a warp stay together for the sums
            int at = first + group;
            bool inside = at < all && i < half;
            size_t n = begin + at / heads, h = first_head + at % heads, offset = (n * (NH + 2 * NKV) + h) * HD + i;
            float x1[4] = {0, 0, 0, 0}, x2[4] = {0, 0, 0, 0}, g1[4] = {0, 0, 0, 0}, g2[4] = {0, 0, 0, 0};
            float s = 0, dot = 0;
            if (inside) {
                float d1[4], d2[4], cosine[4], sine[4];
                load4(x1, qkv + offset);
                load4(x2, qkv + offset + half);
                load4(d1, d_qkv + offset);
                load4(d2, d_qkv + offset + half);
                s = rstd[n * (NH + NKV) + h];
                load4(cosine, rope + n % T * HD + i);
                load4(sine, rope + n % T * HD + half + i);
                for (int j = 0; j < 4; j++) {
                    g1[j] = d1[j] * cosine[j] + d2[j] * sine[j];
                    g2[j] = d2[j] * cosine[j] - d1[j] * sine[j];
                    sum1[j] += g1[j] * x1[j] * s;
                    sum2[j] += g2[j] * x2[j] * s;
                    dot += g1[j] * w1[j] * x1[j] + g2[j] * w2[j] * x2[j];
                }
            }
            float k = warp_sum(dot, lanes) * s * s / HD;
            if (!inside) { continue; }
            for (int j = 0; j < 4; j++) {
                g1[j] = s * (g1[j] * w1[j] - x1[j] * k);
                g2[j] = s * (g2[j] * w2[j] - x2[j] * k);
            }
            store4(d_qkv + offset, g1);
            store4(d_qkv + offset + half, g2);
        }
        for (int j = 0; j < 4; j++) {
            for (int offset = lanes; offset < 32; offset *= 2) {
                sum1[j] += __shfl_xor_sync(0xffffffff, sum1[j], offset);
                sum2[j] += __shfl_xor_sync(0xffffffff, sum2[j], offset);
            }
            if (threadIdx.x % 32 < lanes && i < half) {
                warp_sums[threadIdx.x / 32][i + j] = sum1[j];
                warp_sums[threadIdx.x / 32][half + i + j] = sum2[j];
            }
        }
        __syncthreads(); // the sums of all warps are there
        if (threadIdx.x < HD) {
            float total = 0;
            for (int warp = 0; warp < ROPE_WARPS; warp++) { total += warp_sums[warp][threadIdx.x]; }
            partials[(blockIdx.x * 2 + part) * (size_t)HD + threadIdx.x] = total;
        }
        __syncthreads(); // q's sums have been read before k's take their place
    }
}

void qk_norm_rope_backward(bf16* d_qkv, float* d_q_norm, float* d_k_norm, const bf16* qkv, const float* rstd,
                           const bf16* q_norm, const bf16* k_norm, const float* rope, float* partials, size_t N,
                           size_t T, int NH, int NKV, int HD, cudaStream_t stream) {
    // d_qkv (N,(NH+2*NKV)*HD): its q and k parts, the gradient of qk, become those of qkv; the v part stays as it is.
    // d_q_norm, d_k_norm (HD) +=; partials (NORM_BLOCKS,2*HD) scratch
    int lanes = rope_lanes(HD);
    if (N == 0) { return; }
    if ((N / NORM_BLOCKS + 1) * NH > INT_MAX) { fatal("qk_norm_rope_backward: %zu tokens are too many", N); }
    qk_norm_rope_backward_kernel3<<<norm_blocks(N), ROPE_WARPS * 32, 0, stream>>>(
        d_qkv, partials, qkv, rstd, q_norm, k_norm, rope, N, T, NH, NKV, HD, lanes);
    launchCheck("qk_norm_rope_backward_kernel3");
    norm_weight_reduce(d_q_norm, partials, norm_blocks(N), 2 * HD, HD, stream);
    norm_weight_reduce(d_k_norm, partials + HD, norm_blocks(N), 2 * HD, HD, stream);
}

// ----------------------------------------------------------------------------
// checks

const float EPS = 1e-6f;

void forward(int kernel, bf16* qk, float* rstd, const bf16* qkv, const bf16* q_norm, const bf16* k_norm,
             const float* rope, size_t N, size_t T, int NH, int NKV, int HD) {
    if (kernel == 1) { qk_norm_rope_forward1(qk, rstd, qkv, q_norm, k_norm, rope, N, T, NH, NKV, HD, EPS, 0); }
    if (kernel == 2) { qk_norm_rope_forward2(qk, rstd, qkv, q_norm, k_norm, rope, N, T, NH, NKV, HD, EPS, 0); }
    if (kernel == 3) { qk_norm_rope_forward(qk, rstd, qkv, q_norm, k_norm, rope, N, T, NH, NKV, HD, EPS, 0); }
}
void backward(int kernel, bf16* d_qkv, float* d_q_norm, float* d_k_norm, const bf16* qkv, const float* rstd,
              const bf16* q_norm, const bf16* k_norm, const float* rope, float* partials, size_t N, size_t T, int NH,
              int NKV, int HD) {
    if (kernel == 1) {
        qk_norm_rope_backward1(d_qkv, d_q_norm, d_k_norm, qkv, rstd, q_norm, k_norm, rope, N, T, NH, NKV, HD, 0);
    }
    if (kernel == 2) {
        qk_norm_rope_backward2(d_qkv, d_q_norm, d_k_norm, qkv, rstd, q_norm, k_norm, rope, partials, N, T, NH, NKV, HD,
                               0);
    }
    if (kernel == 3) {
        qk_norm_rope_backward(d_qkv, d_q_norm, d_k_norm, qkv, rstd, q_norm, k_norm, rope, partials, N, T, NH, NKV, HD,
                              0);
    }
}

// The CPU keeps q, k and v head-major (B,heads,T,HD): into or out of columns first_head ... of rows of all_heads heads.
void copy_heads(std::vector<float>& rows, std::vector<float>& heads_first, size_t B, size_t T, int heads,
                int first_head, int all_heads, int HD, bool into_rows) {
    #pragma omp parallel for
    for (size_t i = 0; i < B * heads * T; i++) {
        size_t b = i / (heads * T), h = i / T % heads, t = i % T;
        float *head = heads_first.data() + i * HD, *row = rows.data() + ((b * T + t) * all_heads + first_head + h) * HD;
        for (int j = 0; j < HD; j++) { (into_rows ? row[j] : head[j]) = into_rows ? head[j] : row[j]; }
    }
}

void check_forward(int kernel, const char* what, size_t B, size_t T, int NH, int NKV, int HD) {
    size_t N = B * T, in_heads = NH + 2 * NKV, out_heads = NH + NKV;
    std::vector<float> qkv = random_floats(N * in_heads * HD, 2, 1), rope(T * HD);
    std::vector<float> q_norm = random_floats(HD, 1, 2), k_norm = random_floats(HD, 1, 3);
    cpu::rope_table(rope.data(), T, HD, 10000);
    std::vector<float> q(N * NH * HD), k(N * NKV * HD), v(k.size()), want_rstd(N * out_heads);
    cpu::qk_norm_rope_forward(q.data(), k.data(), v.data(), want_rstd.data(), qkv.data(), q_norm.data(), k_norm.data(),
                              rope.data(), B, T, 0, T, NH, NKV, HD, EPS);
    std::vector<float> want(N * out_heads * HD);
    copy_heads(want, q, B, T, NH, 0, out_heads, HD, true);
    copy_heads(want, k, B, T, NKV, NH, out_heads, HD, true);

    Device<bf16> qk(N * out_heads * HD), device_qkv(to_bf16(qkv));
    Device<bf16> device_q_norm(to_bf16(q_norm)), device_k_norm(to_bf16(k_norm));
    Device<float> rstd(N * out_heads), device_rope(rope);
    forward(kernel, qk, rstd, device_qkv, device_q_norm, device_k_norm, device_rope, N, T, NH, NKV, HD);
    check_bf16(what, qk.get(), want);
    check_f32(what, rstd.get(), want_rstd);
}

void check_backward(int kernel, const char* what, size_t B, size_t T, int NH, int NKV, int HD) {
    size_t N = B * T, heads = NH + 2 * NKV;
    std::vector<float> qkv = random_floats(N * heads * HD, 2, 1), d_qkv = random_floats(N * heads * HD, 1, 4);
    std::vector<float> q_norm = random_floats(HD, 1, 2), k_norm = random_floats(HD, 1, 3), rope(T * HD);
    std::vector<float> d_q_norm = random_floats(HD, 1, 5), d_k_norm = random_floats(HD, 1, 6);
    cpu::rope_table(rope.data(), T, HD, 10000);
    std::vector<float> q(N * NH * HD), k(N * NKV * HD), v(k.size()), rstd(N * (NH + NKV));
    cpu::qk_norm_rope_forward(q.data(), k.data(), v.data(), rstd.data(), qkv.data(), q_norm.data(), k_norm.data(),
                              rope.data(), B, T, 0, T, NH, NKV, HD, EPS);
    Device<bf16> device_d_qkv(to_bf16(d_qkv)), device_qkv(to_bf16(qkv));
    Device<bf16> device_q_norm(to_bf16(q_norm)), device_k_norm(to_bf16(k_norm));
    Device<float> device_rstd(rstd), device_rope(rope), partials(NORM_BLOCKS * 2 * HD);
    Device<float> device_d_q_norm(d_q_norm), device_d_k_norm(d_k_norm);
    backward(kernel, device_d_qkv, device_d_q_norm, device_d_k_norm, device_qkv, device_rstd, device_q_norm,
             device_k_norm, device_rope, partials, N, T, NH, NKV, HD);

    copy_heads(d_qkv, q, B, T, NH, 0, heads, HD, false); // q, k, v now hold the gradients of q, k, v
    copy_heads(d_qkv, k, B, T, NKV, NH, heads, HD, false);
    copy_heads(d_qkv, v, B, T, NKV, NH + NKV, heads, HD, false);
    std::vector<float> cpu_partials(64 * 2 * HD), want(d_qkv.size());
    cpu::qk_norm_rope_backward(want.data(), d_q_norm.data(), d_k_norm.data(), q.data(), k.data(), v.data(), qkv.data(),
                               rstd.data(), q_norm.data(), k_norm.data(), rope.data(), cpu_partials.data(), B, T, NH,
                               NKV, HD, 1);
    check_bf16(what, device_d_qkv.get(), want);
    // kernel 1 adds the N heads terms one after another, and each time rounds by up to 2^-24 of the sum so far
    double relative = kernel == 1 ? std::max(1e-5, sqrt((double)(N * NH)) / (1 << 24)) : 1e-5;
    check_f32(what, device_d_q_norm.get(), d_q_norm, relative);
    check_f32(what, device_d_k_norm.get(), d_k_norm, relative);
}

void check_all(int kernel) {
    check_forward(kernel, "one token", 1, 1, 1, 1, 8);
    check_forward(kernel, "eight heads share one", 1, 38, 8, 1, 64);
    check_forward(kernel, "head sizes that are no power of 2", 2, 3, 3, 3, 24);
    check_forward(kernel, "many heads", 1, 5, 40, 8, 40);
    check_forward(kernel, "smol-500m's heads", 2, 9, 16, 16, 64);
    check_forward(kernel, "large heads", 1, 3, 5, 2, 128);
    check_backward(kernel, "one token", 1, 1, 1, 1, 8);
    check_backward(kernel, "head sizes that are no power of 2", 2, 3, 3, 3, 24);
    check_backward(kernel, "several tokens a block", 3, 171, 3, 1, 8);
    check_backward(kernel, "many heads", 1, 5, 40, 8, 40);
    check_backward(kernel, "smol-500m's heads", 2, 9, 16, 16, 64);
    check_backward(kernel, "large heads", 1, 3, 5, 2, 128);
    check_backward(kernel, "eight heads share one", 1, 38, 8, 1, 64);
    if (dev_is_large(kernel)) {
        check_forward(kernel, "smol-500m", 8, 4096, 16, 16, 64);
        check_backward(kernel, "smol-500m", 8, 4096, 16, 16, 64);
    }
}

void bench_all(int kernel) {
    size_t T = 4096, N = 8 * T;
    int NH = 16, NKV = 16, HD = 64;
    std::vector<float> rope(T * HD);
    cpu::rope_table(rope.data(), T, HD, 10000);
    std::vector<bf16> numbers = to_bf16(random_floats(N * (NH + 2 * NKV) * HD, 1, 1));
    Device<bf16> qkv(numbers), d_qkv(numbers), qk(N * (NH + NKV) * HD), weight(to_bf16(random_floats(HD, 1, 2)));
    Device<float> rstd(N * (NH + NKV)), device_rope(rope), partials(NORM_BLOCKS * 2 * HD), d_weight(rope);
    std::string name = " kernel " + std::to_string(kernel) + ", N 32768, NH 16, NKV 16, HD 64";
    double elements = (double)N * (NH + NKV) * HD;
    bench(("qk_norm_rope_forward" + name).c_str(), 4 * elements, 0,
          [&] { forward(kernel, qk, rstd, qkv, weight, weight, device_rope, N, T, NH, NKV, HD); });
    bench(("qk_norm_rope_backward" + name).c_str(), 6 * elements, 0, [&] {
        backward(kernel, d_qkv, d_weight, d_weight + HD, qkv, rstd, weight, weight, device_rope, partials, N, T, NH,
                 NKV, HD);
    });
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
