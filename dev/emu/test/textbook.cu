// Textbook kernels as a newcomer types them, with nothing adapted to the emulator. Each checks its own result.
#include <stdio.h>
#include <stdlib.h>
#include <math.h>
#include <cuda_runtime.h>

#define TILE 16
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t err = call;                                                                                        \
        if (err != cudaSuccess) {                                                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(err));                               \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

__global__ void vecAdd(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

__global__ void matmulTiled(const float *A, const float *B, float *C, int N) {
    __shared__ float As[TILE][TILE];
    __shared__ float Bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y;
    int col = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int t = 0; t < (N + TILE - 1) / TILE; ++t) {
        As[threadIdx.y][threadIdx.x] =
            (row < N && t * TILE + threadIdx.x < N) ? A[row * N + t * TILE + threadIdx.x] : 0.0f;
        Bs[threadIdx.y][threadIdx.x] =
            (t * TILE + threadIdx.y < N && col < N) ? B[(t * TILE + threadIdx.y) * N + col] : 0.0f;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += As[threadIdx.y][k] * Bs[k][threadIdx.x];
        __syncthreads();
    }
    if (row < N && col < N) C[row * N + col] = sum;
}

template <unsigned int blockSize>
__global__ void reduce(const float *g_in, float *g_out, unsigned int n) {
    extern __shared__ float sdata[];
    unsigned int tid = threadIdx.x;
    unsigned int i = blockIdx.x * (blockSize * 2) + tid;
    unsigned int gridSize = blockSize * 2 * gridDim.x;
    float mySum = 0;
    while (i < n) {
        mySum += g_in[i];
        if (i + blockSize < n) mySum += g_in[i + blockSize];
        i += gridSize;
    }
    sdata[tid] = mySum;
    __syncthreads();
    if (blockSize >= 256) { if (tid < 128) sdata[tid] = mySum = mySum + sdata[tid + 128]; __syncthreads(); }
    if (blockSize >= 128) { if (tid < 64) sdata[tid] = mySum = mySum + sdata[tid + 64]; __syncthreads(); }
    if (tid < 32) {
        mySum += sdata[tid + 32];
        for (int offset = 16; offset > 0; offset >>= 1) mySum += __shfl_down_sync(0xffffffff, mySum, offset);
    }
    if (tid == 0) g_out[blockIdx.x] = mySum;
}

__inline__ __device__ float warpReduceMax(float v) {
    for (int o = warpSize / 2; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, o));
    return v;
}
__inline__ __device__ float warpReduceSum(float v) {
    for (int o = warpSize / 2; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
    return v;
}
__global__ void softmax(const float *in, float *out, int cols) {
    __shared__ float shared[32];
    int row = blockIdx.x, lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize, warps = blockDim.x / warpSize;
    float m = -INFINITY;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) m = fmaxf(m, in[row * cols + c]);
    m = warpReduceMax(m);
    if (lane == 0) shared[warp] = m;
    __syncthreads();
    m = shared[0];
    for (int w = 1; w < warps; w++) m = fmaxf(m, shared[w]);
    __syncthreads();
    float s = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) s += expf(in[row * cols + c] - m);
    s = warpReduceSum(s);
    if (lane == 0) shared[warp] = s;
    __syncthreads();
    s = 0;
    for (int w = 0; w < warps; w++) s += shared[w];
    for (int c = threadIdx.x; c < cols; c += blockDim.x) out[row * cols + c] = expf(in[row * cols + c] - m) / s;
}

const int TILE_DIM = 32, BLOCK_ROWS = 8;
__global__ void transposeCoalesced(float *odata, const float *idata, int width, int height) {
    __shared__ float tile[TILE_DIM][TILE_DIM + 1];
    int x = blockIdx.x * TILE_DIM + threadIdx.x;
    int y = blockIdx.y * TILE_DIM + threadIdx.y;
    for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS)
        if (x < width && y + j < height) tile[threadIdx.y + j][threadIdx.x] = idata[(y + j) * width + x];
    __syncthreads();
    x = blockIdx.y * TILE_DIM + threadIdx.x;
    y = blockIdx.x * TILE_DIM + threadIdx.y;
    for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS)
        if (x < height && y + j < width) odata[(y + j) * height + x] = tile[threadIdx.x][threadIdx.y + j];
}

__global__ void histogram256(unsigned int *bins, const unsigned char *data, int n) {
    __shared__ unsigned int local[256];
    for (int b = threadIdx.x; b < 256; b += blockDim.x) local[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[data[i]], 1);
    __syncthreads();
    for (int b = threadIdx.x; b < 256; b += blockDim.x) atomicAdd(&bins[b], local[b]);
}

__global__ void prescan(float *g_odata, const float *g_idata, int n) {          // Blelloch, work-efficient
    extern __shared__ float temp[];
    int thid = threadIdx.x, offset = 1;
    temp[2 * thid] = g_idata[2 * thid];
    temp[2 * thid + 1] = g_idata[2 * thid + 1];
    for (int d = n >> 1; d > 0; d >>= 1) {
        __syncthreads();
        if (thid < d) {
            int ai = offset * (2 * thid + 1) - 1, bi = offset * (2 * thid + 2) - 1;
            temp[bi] += temp[ai];
        }
        offset *= 2;
    }
    if (thid == 0) temp[n - 1] = 0;
    for (int d = 1; d < n; d *= 2) {
        offset >>= 1;
        __syncthreads();
        if (thid < d) {
            int ai = offset * (2 * thid + 1) - 1, bi = offset * (2 * thid + 2) - 1;
            float t = temp[ai];
            temp[ai] = temp[bi];
            temp[bi] += t;
        }
    }
    __syncthreads();
    g_odata[2 * thid] = temp[2 * thid];
    g_odata[2 * thid + 1] = temp[2 * thid + 1];
}

__constant__ float d_filter[5];
__global__ void convolve(const float *in, float *out, int n) {
    __shared__ float s[128 + 4];
    int i = blockIdx.x * blockDim.x + threadIdx.x, l = threadIdx.x + 2;
    s[l] = i < n ? in[i] : 0;
    if (threadIdx.x < 2) {
        s[l - 2] = i >= 2 ? in[i - 2] : 0;
        s[l + blockDim.x] = i + blockDim.x < n ? in[i + blockDim.x] : 0;
    }
    __syncthreads();
    if (i < n) {
        float r = 0;
        for (int k = -2; k <= 2; k++) r += s[l + k] * d_filter[k + 2];
        out[i] = r;
    }
}

__device__ double atomicAddDouble(double *address, double val) {                // the programming guide's example
    unsigned long long int *address_as_ull = (unsigned long long int *)address;
    unsigned long long int old = *address_as_ull, assumed;
    do {
        assumed = old;
        old = atomicCAS(address_as_ull, assumed, __double_as_longlong(val + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
__global__ void dot(const float *a, const float *b, double *result, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAddDouble(result, (double)a[i] * b[i]);
}

__device__ unsigned int count = 0;
__shared__ bool isLastBlockDone;
__global__ void sumGuide(const float *array, unsigned int N, volatile float *result) {   // the guide's fence example
    float partialSum = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < N; i += gridDim.x * blockDim.x) partialSum += array[i];
    for (int o = 16; o > 0; o /= 2) partialSum += __shfl_down_sync(0xffffffff, partialSum, o);
    if (threadIdx.x == 0) {
        result[blockIdx.x] = partialSum;
        __threadfence();
        unsigned int value = atomicInc(&count, gridDim.x);
        isLastBlockDone = (value == (gridDim.x - 1));
    }
    __syncthreads();
    if (isLastBlockDone) {
        float totalSum = 0;
        for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) totalSum += result[i];
        for (int o = 16; o > 0; o /= 2) totalSum += __shfl_down_sync(0xffffffff, totalSum, o);
        if (threadIdx.x == 0) {
            result[0] = totalSum;
            count = 0;
        }
    }
}

static int bad(const char *name, double got, double want, double tol) {
    if (fabs(got - want) <= tol) return 0;
    printf("%s: %g, expected %g\n", name, got, want);
    return 1;
}

int main() {
    int errors = 0;
    const int n = 1000, N = 50;
    float *a, *b, *c, *h = (float *)malloc(N * N * sizeof(float)), *r = (float *)malloc(N * N * sizeof(float));
    size_t bytes = N * N * sizeof(float);
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaMalloc(&b, bytes));
    CHECK(cudaMalloc(&c, bytes));
    for (int i = 0; i < N * N; i++) h[i] = (i % 17) * 0.25f;
    CHECK(cudaMemcpy(a, h, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(b, h, bytes, cudaMemcpyHostToDevice));

    vecAdd<<<(n + 255) / 256, 256>>>(a, b, c, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(r, c, n * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) errors += bad("vecAdd", r[i], 2 * h[i], 0);

    dim3 threads(TILE, TILE), blocks((N + TILE - 1) / TILE, (N + TILE - 1) / TILE);
    matmulTiled<<<blocks, threads>>>(a, b, c, N);
    CHECK(cudaMemcpy(r, c, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++) for (int j = 0; j < N; j++) {
        double s = 0;
        for (int k = 0; k < N; k++) s += (double)h[i * N + k] * h[k * N + j];
        errors += bad("matmulTiled", r[i * N + j], s, 1e-3);
    }

    double total = 0;
    for (int i = 0; i < n; i++) total += h[i];
    reduce<256><<<2, 256, 256 * sizeof(float)>>>(a, c, n);
    CHECK(cudaMemcpy(r, c, 2 * sizeof(float), cudaMemcpyDeviceToHost));
    errors += bad("reduce", r[0] + r[1], total, 1e-2);

    softmax<<<N, 64>>>(a, c, N);
    CHECK(cudaMemcpy(r, c, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++) {
        double s = 0;
        for (int j = 0; j < N; j++) s += r[i * N + j];
        errors += bad("softmax", s, 1, 1e-5);
    }

    transposeCoalesced<<<dim3(2, 2), dim3(TILE_DIM, BLOCK_ROWS)>>>(c, a, N, N);
    CHECK(cudaMemcpy(r, c, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++) for (int j = 0; j < N; j++) errors += bad("transpose", r[j * N + i], h[i * N + j], 0);

    unsigned int *bins, hb[256];
    unsigned char *data, hd[1000];
    for (int i = 0; i < 1000; i++) hd[i] = i * 7;
    CHECK(cudaMalloc((void **)&bins, sizeof hb));
    CHECK(cudaMalloc((void **)&data, sizeof hd));
    CHECK(cudaMemset(bins, 0, sizeof hb));
    CHECK(cudaMemcpy(data, hd, sizeof hd, cudaMemcpyHostToDevice));
    histogram256<<<3, 128>>>(bins, data, 1000);
    CHECK(cudaMemcpy(hb, bins, sizeof hb, cudaMemcpyDeviceToHost));
    for (int k = 0; k < 256; k++) {
        int want = 0;
        for (int i = 0; i < 1000; i++) want += hd[i] == k;
        errors += bad("histogram", hb[k], want, 0);
    }

    prescan<<<1, 256, 512 * sizeof(float)>>>(c, a, 512);
    CHECK(cudaMemcpy(r, c, 512 * sizeof(float), cudaMemcpyDeviceToHost));
    double run = 0;
    for (int i = 0; i < 512; i++) {
        errors += bad("scan", r[i], run, 1e-2);
        run += h[i];
    }

    float filter[5] = {1, 2, 3, 2, 1};
    CHECK(cudaMemcpyToSymbol(d_filter, filter, sizeof filter));
    convolve<<<(n + 127) / 128, 128>>>(a, c, n);
    CHECK(cudaMemcpy(r, c, n * sizeof(float), cudaMemcpyDeviceToHost));
    errors += bad("convolve", r[500], h[498] + 2 * h[499] + 3 * h[500] + 2 * h[501] + h[502], 1e-4);

    double *d, hdot, want = 0;
    CHECK(cudaMalloc(&d, sizeof(double)));
    CHECK(cudaMemset(d, 0, sizeof(double)));
    dot<<<4, 256>>>(a, b, d, n);
    CHECK(cudaMemcpy(&hdot, d, sizeof(double), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) want += (double)h[i] * h[i];
    errors += bad("dot", hdot, want, 1e-6);

    sumGuide<<<8, 32>>>(a, n, c);
    CHECK(cudaMemcpy(r, c, sizeof(float), cudaMemcpyDeviceToHost));
    errors += bad("sumGuide", r[0], total, 1e-2);

    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    CHECK(cudaFree(c));
    CHECK(cudaFree(bins));
    CHECK(cudaFree(data));
    CHECK(cudaFree(d));
    free(h); free(r);
    printf("%d errors\n", errors);
    return errors != 0;
}
