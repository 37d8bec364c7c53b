// What published kernels use of CUDA C++ beyond the textbook: it has to compile and to give the right values.
#include <cassert>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>
#include <math_constants.h>

static int failures;
#define CHECK(condition) if (!(condition)) { printf("line %d: %s\n", __LINE__, #condition); failures++; }

// ---- kernels in namespaces, from classes, as template arguments, of lambdas; shared memory behind a conversion
namespace ns {
struct Sum { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; } };
template <class T, class F> static __global__ void map2(T* o, const T* a, F f, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) o[i] = f(a[i], a[i]);
}
class Runner {
  public:
    static void run(float* p, int n) {
        map2<<<dim3(1), dim3(32)>>>(p, p, Sum(), n);
        map2<float><<<1, 32>>>(p, p, [] __device__ (float a, float b) { return a * b; }, n);
    }
};
}
template <typename T> struct SharedMemory {
    __device__ inline operator T*() { extern __shared__ int raw[]; return (T*)raw; }
};
template <typename T> __global__ void mirror(T* o) {
    T* s = SharedMemory<T>();
    s[threadIdx.x] = threadIdx.x;
    __syncthreads();
    o[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
__global__ void fill(float* o, int n) { o[threadIdx.x] = n + blockIdx.x * 0; }
template <void (*F)(float*, int)> static void launch(float* p) { F<<<1, 32>>>(p, 3); }

// ---- halves, bytes and mathematics without std::
__global__ void halves(__half* o, const __half* a, __nv_fp8_e4m3* small) {
    int i = threadIdx.x;
    __half2 v = __hadd2(__halves2half2(a[i], a[i]), __float2half2_rn(1.0f));
    float2 f = __half22float2(__hfma2(v, v, v));
    o[i] = __float2half(f.x) + a[i] * __float2half_rn(2.0f) - __hmax(a[i], __float2half(0.0f));
    if (__hgt(a[i], __float2half(100.0f)) || __hisnan(a[i])) o[i] = __hneg(a[i]);
    atomicAdd(&o[32], __shfl_xor_sync(0xffffffff, a[i], 1));
    small[i] = __nv_fp8_e4m3(f.y);
}
__global__ void mathematics(float* o) {
    float s, c, x = threadIdx.x * 0.25f;
    sincosf(x, &s, &c);
    o[threadIdx.x] = s * s + c * c + abs(-0.5f) + isnan(CUDART_NAN_F) + isinf(CUDART_INF_F) + signbit(-x - 1) +
                     umin(3u, 2u) + max((size_t)3, (size_t)1) + norm3df(1, 2, 2) + fdividef(1, 4) + abs(-2);
}

// ---- variables, structs, unions, device heap, votes of small types
__device__ __constant__ float table[4] = {1, 2, 3, 4};
static __device__ __managed__ int managed_counter;
__device__ static const int lookup[3] = {1, 2, 3};
__device__ double (*operation)(double, double);
__device__ double product(double a, double b) { return a * b; }
struct alignas(16) Vec { float v[4]; };
__global__ void mixed(int* o, const Vec* in) {
    __shared__ Vec vectors[4];
    __shared__ union { int i[32]; float f[32]; } both;
    int t = threadIdx.x;
    both.i[t] = t;
    if (t < 4) vectors[t] = in[t];
    int any = __syncthreads_or(t == 3);
    bool b = __shfl_sync(0xffffffff, t == 2, 2);
    short up = __shfl_down_sync(~0u, (short)t, 1);
    int* heap = (int*)malloc(2 * sizeof(int));
    heap[1] = t;
    if (t == 0) {
        managed_counter = 3;
        operation = product;
        printf("hello from %s\n", "a kernel");
    }
    __syncthreads();
    int4 q = make_int4(1, 2, 3, 4);
    uint2 z = {1u, 2u};
    o[t] = any + b + up + heap[1] + lookup[1] + (int)table[2] + both.i[31 - t] + (int)vectors[t & 3].v[1] + q.w + z.y +
           (int)operation(3, 4);
    assert(o[t] > 0);
    free(heap);
}

template <class T> static T at(const T* p, int i) {
    T v;
    cudaMemcpy(&v, p + i, sizeof v, cudaMemcpyDeviceToHost);
    return v;
}
int main() {
    float* p;
    int *o, grid, block;
    __half* h;
    Vec* v;
    cudaMalloc(&p, 4096);
    cudaMalloc((void**)&h, 4096);
    cudaMalloc(&o, 4096);
    cudaMalloc(&v, 256);
    cudaMemset(p, 0, 4096);
    cudaMemset(h, 0, 4096);
    cudaMemset(v, 0, 256);
    launch<fill>(p);
    ns::Runner::run(p, 32);
    CHECK(at(p, 31) == 36);
    mirror<float><<<1, 32, 128>>>(p);
    mirror<double><<<1, 32, 256>>>((double*)p);
    CHECK(at((double*)p, 3) == 28);
    halves<<<1, 32>>>(h, h + 64, (__nv_fp8_e4m3*)(h + 512));
    CHECK(__half2float(at(h, 5)) == 2 && float(at((__nv_fp8_e4m3*)(h + 512), 5)) == 2);
    mathematics<<<1, 32>>>(p);
    CHECK(fabsf(at(p, 7) - (1 + 0.5f + 1 + 1 + 1 + 2 + 3 + 3 + 0.25f + 2)) < 1e-5f);
    mixed<<<1, 32>>>(o, v);
    CHECK(at(o, 4) == 1 + 1 + 5 + 4 + 2 + 3 + 27 + 0 + 4 + 2 + 12 && managed_counter == 3);
    auto kernel = fill;
    dim3 g = {2, 1, 1}, b(16);
    kernel<<<g, b, 0, cudaStreamPerThread>>>(p, 3);
    CHECK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, fill, 0, 0) == cudaSuccess && block > 0);
    CHECK(cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
    cudaFree(p);
    printf("%d failures\n", failures);
    return failures != 0;
}
