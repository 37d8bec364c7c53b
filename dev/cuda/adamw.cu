// adamw.cu: one step of AdamW (Loshchilov and Hutter 2019) on all parameters, with the gradients clipped to a global
// norm (grad_norm.cu) that is read on the device:
//     g = grads * min(1, grad_clip / (norm + 1e-6));  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//     p = (1 - lr weight_decay) p - lr (m/correction1) / (sqrt(v/correction2) + eps)
// All arrays are (count), one number a parameter: params in bf16, the others in fp32; norm is (1).
// p is the fp32 master copy, params its rounding to bf16. Without master p is the bf16 parameter itself, and rounding
// is stochastic: an update smaller than half a bf16 step moves the parameter as often as it should instead of never.
// A norm that is not finite: nothing is written. Reference: cpu::adamw_range of train_moe_cpu.c.
// 30 bytes of memory traffic an element (master, m, v 8 each, grads 4, params 2) and few operations: bound by memory.
//
//     nvcc -O3 -std=c++17 -I. -o build/dev/adamw dev/cuda/adamw.cu -lcjson -lcublasLt
//
// kernel 1: the textbook way: a launch a formula and a range of parameters, so grads, m and v are read twice.
// kernel 2: one launch, everything about an element in registers, 16 bytes an access; each thread finds the range of
//           its elements (does it decay?) in a table.
//
// winner: 2 (kernel 1 is the trainer's --optimizer simple)
#include "common.h"

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2; // 1 - beta^t
    float grad_clip;                // largest norm of the gradients; 0: any
    uint64_t rounding_key;          // for stochastic rounding: another one each step
} AdamW;

// ----------------------------------------------------------------------------
// the formulas

// what the gradients are multiplied with, as torch.nn.utils.clip_grad_norm_
__device__ inline float clip_scale(float norm, float grad_clip) {
    return grad_clip > 0 ? fminf(1.0f, grad_clip / (norm + 1e-6f)) : 1.0f;
}

__device__ inline float adamw_update(float p, float m, float v, AdamW a, bool decays) {
    float keep = decays ? 1 - a.lr * a.weight_decay : 1.0f;
    return keep * p - a.lr / a.correction1 * m / (sqrtf(v) * (1 / sqrtf(a.correction2)) + a.eps);
}

// 64 random bits, a pure function of key and index: the finaliser of splitmix64, as hash64 of llmc/rand.h
__device__ inline uint64_t random_bits(uint64_t key, uint64_t index) {
    uint64_t x = key + (index + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Rounds x to one of its two neighbours in bf16, up with the probability that makes the mean x: a number of 16 random
// bits is added below the last bit that stays. One hash serves 4 elements; which bits an element gets depends on its
// index in the arena and on nothing else. The result, as a float, is exactly a bf16.
__device__ inline float round_stochastic(float x, uint64_t random, size_t element) {
    if (!isfinite(x)) { return x; }
    uint32_t bits = __float_as_uint(x) + (uint32_t)(random >> (16 * (element % 4)) & 0xffff);
    return __uint_as_float(bits & 0xffff0000u);
}

// ----------------------------------------------------------------------------
// kernel 1: a block owns 256 elements of a range, a thread one. All three are bound by memory.

// 12 bytes an element: m and grads are read, m is written
__global__ void adamw_m_kernel1(float* m, const float* grads, const float* norm, size_t begin, size_t end, AdamW a) {
    size_t i = begin + (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= end || !isfinite(*norm)) { return; }
    m[i] = a.beta1 * m[i] + (1 - a.beta1) * (grads[i] * clip_scale(*norm, a.grad_clip));
}

// 12 bytes an element, for grads once more
__global__ void adamw_v_kernel1(float* v, const float* grads, const float* norm, size_t begin, size_t end, AdamW a) {
    size_t i = begin + (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= end || !isfinite(*norm)) { return; }
    float g = grads[i] * clip_scale(*norm, a.grad_clip);
    v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
}

// 18 bytes an element: m and v once more, master read and written, params written
__global__ void adamw_params_kernel1(bf16* params, float* master, const float* m, const float* v, const float* norm,
                                     size_t begin, size_t end, int decays, AdamW a) {
    size_t i = begin + (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= end || !isfinite(*norm)) { return; }
    float p = master != NULL ? master[i] : __bfloat162float(params[i]);
    p = adamw_update(p, m[i], v[i], a, decays);
    if (master != NULL) {
        master[i] = p;
    } else {
        p = round_stochastic(p, random_bits(a.rounding_key, i / 4), i);
    }
    params[i] = __float2bfloat16(p);
}

void adamw_simple(bf16* params, float* master, const float* grads, float* m, float* v, const float* norm,
                  const ParamRange* host_ranges, int num_ranges, size_t count, AdamW a, cudaStream_t stream) {
    // as adamw_fused, but host_ranges lies on the host
    for (int r = 0; r < num_ranges; r++) {
        size_t begin = host_ranges[r].begin, end = host_ranges[r].end;
        if (begin > end || end > count) {
            fatal("adamw_simple: a range of the %zu parameters must lie in them, is %zu .. %zu", count, begin, end);
        }
        if (begin == end) { continue; }
        unsigned blocks = (unsigned)ceil_div(end - begin, 256);
        adamw_m_kernel1<<<blocks, 256, 0, stream>>>(m, grads, norm, begin, end, a);
        launchCheck("adamw_m_kernel1");
        adamw_v_kernel1<<<blocks, 256, 0, stream>>>(v, grads, norm, begin, end, a);
        launchCheck("adamw_v_kernel1");
        adamw_params_kernel1<<<blocks, 256, 0, stream>>>(params, master, m, v, norm, begin, end, host_ranges[r].decays,
                                                         a);
        launchCheck("adamw_params_kernel1");
    }
}

// ----------------------------------------------------------------------------
// kernel 2

// the range that holds element i, or -1: the last one that begins at or before i, if it reaches that far
__device__ inline int find_range(const ParamRange* ranges, int num_ranges, size_t i) {
    int low = 0, high = num_ranges; // ranges before low begin at or before i, those from high on after it
    while (low < high) {
        int middle = (low + high) / 2;
        if (ranges[middle].begin <= i) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > 0 && i < ranges[low - 1].end ? low - 1 : -1;
}

// A thread owns 4 neighbouring elements, 16 bytes of each fp32 array, so that a warp reads and writes whole lines;
// ranges begin at multiples of 8, so they are of one range. (Behind its end may lie padding, whose parameters,
// gradients and moments are 0: the formulas keep them 0.) Bound by memory: each array is read and written once.
__global__ void __launch_bounds__(256) adamw_fused_kernel2(bf16* params, float* master, const float* grads, float* m,
                                                           float* v, const float* norm, const ParamRange* ranges,
                                                           int num_ranges, size_t count, AdamW a) {
    size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (first >= count || !isfinite(*norm)) { return; }
    int range = find_range(ranges, num_ranges, first);
    if (range < 0) { return; }
    bool decays = ranges[range].decays;
    float scale = clip_scale(*norm, a.grad_clip);
    uint64_t random = random_bits(a.rounding_key, first / 4);
    float p[4], g[4], m4[4], v4[4];
    load4(g, grads + first);
    load4(m4, m + first);
    load4(v4, v + first);
    if (master != NULL) {
        load4(p, master + first);
    } else {
        load4(p, params + first);
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        float gi = g[i] * scale;
        m4[i] = a.beta1 * m4[i] + (1 - a.beta1) * gi;
        v4[i] = a.beta2 * v4[i] + (1 - a.beta2) * gi * gi;
        p[i] = adamw_update(p[i], m4[i], v4[i], a, decays);
        if (master == NULL) { p[i] = round_stochastic(p[i], random, first + i); }
    }
    store4(m + first, m4);
    store4(v + first, v4);
    if (master != NULL) { store4(master + first, p); }
    store4(params + first, p);
}

void adamw_fused(bf16* params, float* master, const float* grads, float* m, float* v, const float* norm,
                 const ParamRange* ranges, int num_ranges, size_t count, AdamW a, cudaStream_t stream) {
    // One step on all parameters (count, a multiple of 8): master, m, v = their new values, params = master in bf16;
    // master NULL: params = stochastic rounding of what becomes of them. grads and norm (1) are read. ranges
    // (num_ranges) ascend from multiples of 8 and lie on the device; what is in none of them stays.
    if (count == 0 || num_ranges == 0) { return; }
    uintptr_t places = (uintptr_t)params | (uintptr_t)master | (uintptr_t)grads | (uintptr_t)m | (uintptr_t)v;
    if (count % 8 != 0 || places % 16 != 0) {
        fatal("adamw_fused: all arrays must be 16-byte aligned, the count (%zu) a multiple of 8", count);
    }
    adamw_fused_kernel2<<<(unsigned)ceil_div(count, 256 * 4), 256, 0, stream>>>(params, master, grads, m, v, norm,
                                                                                ranges, num_ranges, count, a);
    launchCheck("adamw_fused_kernel2");
}

// ----------------------------------------------------------------------------
// checks and benchmark

void run(int kernel, bf16* params, float* master, const float* grads, float* m, float* v, const float* norm,
         const std::vector<ParamRange>& host_ranges, const ParamRange* ranges, size_t count, AdamW a) {
    int num_ranges = (int)host_ranges.size();
    if (kernel == 1) {
        adamw_simple(params, master, grads, m, v, norm, host_ranges.data(), num_ranges, count, a, 0);
    } else {
        adamw_fused(params, master, grads, m, v, norm, ranges, num_ranges, count, a, 0);
    }
}

AdamW some_settings(void) {
    AdamW a;
    a.lr = 0.01f, a.beta1 = 0.9f, a.beta2 = 0.95f, a.eps = 1e-8f, a.weight_decay = 0.1f, a.correction1 = 0.271f;
    a.correction2 = 0.142625f, a.grad_clip = 1, a.rounding_key = 12345;
    return a;
}

std::vector<float> absolute(std::vector<float> x) {
    #pragma omp parallel for
    for (size_t i = 0; i < x.size(); i++) { x[i] = fabsf(x[i]); }
    return x;
}

// the arrays of a test, on the host for the CPU's step and on the device
struct State {
    size_t count;
    std::vector<ParamRange> host_ranges;
    std::vector<float> p, grads, m, v;
    Device<ParamRange> ranges;
    Device<bf16> params;
    Device<float> master, d_grads, d_m, d_v, norm;
    State(size_t n, std::vector<ParamRange> r, float norm_value)
        : count(n), host_ranges(r), p(random_floats(n, 1, 1)), grads(random_floats(n, 1, 2)),
          m(random_floats(n, 0.1f, 3)), v(absolute(random_floats(n, 0.1f, 4))), ranges(r), params(to_bf16(p)),
          master(p), d_grads(grads), d_m(m), d_v(v), norm(std::vector<float>{norm_value}) {}

    void step(int kernel, bool with_master, AdamW a) {
        run(kernel, params, with_master ? master.data : NULL, d_grads, d_m, d_v, norm, host_ranges, ranges, count, a);
    }
    void step_on_cpu(AdamW a) {
        cpu::AdamW c;
        c.lr = a.lr, c.beta1 = a.beta1, c.beta2 = a.beta2, c.eps = a.eps, c.weight_decay = a.weight_decay;
        c.correction1 = a.correction1, c.correction2 = a.correction2;
        double clip = a.grad_clip / (norm.get()[0] + 1e-6);
        c.grad_scale = a.grad_clip > 0 && clip < 1 ? (float)clip : 1;
        for (ParamRange r : host_ranges) {
            const size_t piece = 1 << 16;
            #pragma omp parallel for
            for (size_t begin = r.begin; begin < r.end; begin += piece) {
                cpu::adamw_range(p.data(), grads.data(), m.data(), v.data(), begin, std::min(begin + piece, r.end), c,
                                 r.decays);
            }
        }
    }
};

void steps_match_cpu(int kernel, size_t count, std::vector<ParamRange> ranges, float norm, float grad_clip,
                     int steps = 3) {
    State s(count, ranges, norm);
    AdamW a = some_settings();
    a.grad_clip = grad_clip;
    for (int step = 0; step < steps; step++) {
        s.step(kernel, true, a);
        s.step_on_cpu(a);
    }
    check_f32("m", s.d_m.get(), s.m, 1e-6);
    check_f32("v", s.d_v.get(), s.v, 1e-6);
    check_f32("master", s.master.get(), s.p, 1e-6);
    check_equal("params are the master copy, rounded", s.params.get(), to_bf16(s.master.get()));
}

void norm_that_is_not_finite_writes_nothing(int kernel) {
    for (float norm : {NAN, INFINITY}) {
        for (bool with_master : {true, false}) {
            State s(640, {{0, 640, 1}}, norm);
            s.step(kernel, with_master, some_settings());
            check_equal("params, norm not finite", s.params.get(), to_bf16(s.p));
            check_equal("master, norm not finite", s.master.get(), s.p);
            check_equal("m, norm not finite", s.d_m.get(), s.m);
            check_equal("v, norm not finite", s.d_v.get(), s.v);
        }
    }
}

void padding_stays_zero(int kernel) {
    State s(24, {{0, 21, 1}}, 1); // the elements from 21 on are padding
    for (std::vector<float>* x : {&s.p, &s.grads, &s.m, &s.v}) { std::fill(x->begin() + 21, x->end(), 0.0f); }
    s.master.set(s.p), s.d_grads.set(s.grads), s.d_m.set(s.m), s.d_v.set(s.v), s.params.set(to_bf16(s.p));
    s.step(kernel, true, some_settings());
    s.step(kernel, false, some_settings());
    std::vector<float> tail = to_float(s.params.get());
    check_equal("padding", std::vector<float>(tail.begin() + 21, tail.end()), std::vector<float>(3, 0.0f));
}

// Weights of 1 that decay to 0.999: the neighbours in bf16 are 1 - 1/256 and 1. The mean of many must be 0.999, each
// within 4 standard deviations of chance, and elements must not follow their neighbours.
void rounding_is_unbiased(int kernel) {
    const size_t n = 65536;
    State s(n, {{0, n, 1}}, 1);
    AdamW a = some_settings();
    for (std::vector<float>* x : {&s.grads, &s.m, &s.v}) { std::fill(x->begin(), x->end(), 0.0f); }
    s.d_grads.set(s.grads), s.d_m.set(s.m), s.d_v.set(s.v), s.params.set(to_bf16(std::vector<float>(n, 1.0f)));
    s.step(kernel, false, a);
    std::vector<float> p = to_float(s.params.get());
    const double step = 1.0 / 256, share = (0.999 - (1 - step)) / step, sigma = sqrt(share * (1 - share));
    double mean = 0, products[5] = {};
    bool neighbours = true;
    for (size_t i = 0; i < n; i++) {
        neighbours &= p[i] == 1.0f || p[i] == 1.0f - (float)step;
        mean += p[i] / (double)n;
        for (size_t lag = 1; lag < 5; lag++) { products[lag] += (p[i] - 0.999) * (p[(i + lag) % n] - 0.999); }
    }
    check_result(neighbours, "rounding", "not to a neighbour");
    check_result(fabs(mean - 0.999) <= 4 * step * sigma / sqrt((double)n), "rounding", "the mean is off");
    for (size_t lag = 1; lag < 5; lag++) {
        double correlation = products[lag] / (double)n / (step * sigma * step * sigma);
        check_result(fabs(correlation) <= 4 / sqrt((double)n), "rounding", "elements follow their neighbours");
    }
    std::vector<bf16> before = s.params.get();
    a.rounding_key++;
    s.params.set(to_bf16(std::vector<float>(n, 1.0f)));
    s.step(kernel, false, a);
    std::vector<float> other = to_float(s.params.get());
    double agree = 0;
    for (size_t i = 0; i < n; i++) { agree += (double)(other[i] == p[i]) / (double)n; }
    check_result(fabs(agree - (share * share + (1 - share) * (1 - share))) < 0.02, "rounding", "keys do not matter");
}

// the bits an element gets depend on its index, not on the launch
void rounding_ignores_the_launch(int kernel) {
    std::vector<bf16> want;
    for (std::vector<ParamRange> ranges : {std::vector<ParamRange>{{0, 4000, 1}},
                                           std::vector<ParamRange>{{0, 808, 1}, {808, 2504, 1}, {2504, 4000, 1}}}) {
        State s(4000, ranges, 1);
        for (int step = 0; step < 3; step++) { s.step(kernel, false, some_settings()); }
        if (want.empty()) { want = s.params.get(); }
        check_equal("rounding, other ranges", s.params.get(), want);
    }
}

// The parameters of smol-500m as they lie in the arena.
std::vector<ParamRange> smol_500m_ranges(int layers, bool tied) {
    MoEConfig config;
    ParamTable table;
    config_preset(&config, "smol-500m");
    config.num_hidden_layers = layers;
    config.tie_word_embeddings = tied;
    param_table_build(&table, &config);
    std::vector<ParamRange> ranges(table.count);
    ranges.resize(param_ranges(ranges.data(), &table));
    param_table_free(&table);
    return ranges;
}

// The embedding, which is the largest tensor, a layer and the last norm. The other layers are the same again, and all
// of them with the reference beside them would take 20 GB.
void smol_500m_matches_cpu(int kernel) {
    std::vector<ParamRange> ranges = smol_500m_ranges(1, true);
    steps_match_cpu(kernel, ranges.back().end, ranges, 2, 1, 1);
}

void check_all(int kernel) {
    steps_match_cpu(kernel, 8, {{0, 8, 1}}, 0.5f, 1);
    steps_match_cpu(kernel, 8000, {{0, 8000, 0}}, 3, 1);
    steps_match_cpu(kernel, 8000, {{0, 16, 1}, {16, 24, 0}, {24, 4096, 1}, {4800, 8000, 0}}, 1, 1); // with a gap
    steps_match_cpu(kernel, 5000, {{2000, 2008, 1}, {3000, 5000, 0}}, 1e30f, 1);
    steps_match_cpu(kernel, 5000, {{0, 5000, 1}}, 100, 0); // no clipping
    norm_that_is_not_finite_writes_nothing(kernel);
    padding_stays_zero(kernel);
    rounding_is_unbiased(kernel);
    rounding_ignores_the_launch(kernel);
    if (dev_is_large(kernel)) { smol_500m_matches_cpu(kernel); }
}

// all of smol-500m, or as many of its layers as there is memory for: 18 bytes a parameter
void bench_all(int kernel) {
    size_t available, total;
    cudaCheck(cudaMemGetInfo(&available, &total));
    int layers = 12;
    std::vector<ParamRange> host_ranges = smol_500m_ranges(layers, false);
    while (layers > 0 && 18 * host_ranges.back().end > available / 10 * 9) {
        host_ranges = smol_500m_ranges(--layers, false);
    }
    const size_t count = host_ranges.back().end;
    Device<ParamRange> ranges(host_ranges);
    Device<bf16> params(count);
    Device<float> master(count), grads(count), m(count), v(count), norm(std::vector<float>{1.0f});
    fill_random(params, 1, 1);
    fill_random(master, 1, 1);
    fill_random(grads, 1, 2);
    fill_random(m, 0.1f, 3);
    cudaCheck(cudaMemset(v, 0, count * sizeof(float))); // its square root must exist; it fills in the first steps
    AdamW a = some_settings();
    for (bool with_master : {true, false}) {
        char name[96];
        snprintf(name, sizeof(name), "adamw %d %s %.0fM parameters, %d layers", kernel,
                 with_master ? "master" : "stochastic", (double)count / 1e6, layers);
        bench(name, (with_master ? 30.0 : 24.0) * (double)count, 0, [&] {
            run(kernel, params, with_master ? master.data : NULL, grads, m, v, norm, host_ranges, ranges, count, a);
        });
    }
}

int main(int argc, char** argv) {
    const int num_kernels = 2;
    dev_open(argc, argv, num_kernels);
    for (int kernel = 1; kernel <= num_kernels; kernel++) {
        if (!dev_runs(kernel)) { continue; }
        check_all(kernel);
        if (dev_times(kernel)) { bench_all(kernel); }
    }
    return dev_close();
}
