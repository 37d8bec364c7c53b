// attention.h: what attention_forward.cu and attention_backward.cu share: tiles in shared memory and their products on the
// tensor cores (all of it as in train_moe.cu), and for the tests: inputs and the CPU reference. gemm is llmc/gemm.h's.
#ifndef DEV_CUDA_ATTENTION_H
#define DEV_CUDA_ATTENTION_H

#include <string>
#include <type_traits>
#include "common.h"
#include "../../llmc/cudnn_attention.h"
#include "../../llmc/gemm.h"

typedef struct {
    size_t B, T;
    int NH, NKV, HD;
    size_t ld_qk, ld_v, ld_d; // elements from a token's row to the next one's: of q and k, of v, of d_q, d_k and d_v
} AttentionShape;

// ----------------------------------------------------------------------------
// Tiles in shared memory: rows of D numbers, where D is HD rounded up to 16, 32, 64 or 128 and what lies past HD or
// past the sequence is zero. A warp owns 16 rows of a result. One m16n8k16 accumulator holds, for lane l, row l/4
// (elements 0, 1) and row l/4 + 8 (elements 2, 3) at columns 2*(l%4) and the next: packed to bf16 that is just the
// layout of an A operand, so scores become the left factor of the next product without leaving their registers
// (FlashAttention-2, Dao 2023).

// Offset in elements of a place in a tile. The 16-byte pieces of a row are permuted by an exclusive or with its number:
// 8 rows at one column, which ldmatrix reads at once, then lie in 32 different banks.
template <int D>
__device__ inline int tile_offset(int row, int column) {
    constexpr int PIECES = D < 64 ? D / 8 : 8; // that share the 32 banks with their neighbours of the row
    constexpr int ROWS = D < 64 ? 64 / D : 1;  // that fit into 128 bytes, once round the banks
    return row * D + ((column / 8) ^ (row / ROWS % PIECES)) * 8 + column % 8;
}

// tile (ROWS,D) = rows first.. of a head (T,HD) with ld elements from row to row; zeros outside. Asynchronous: commit,
// wait, barrier are the caller's. A thread keeps its column and goes down STEP rows at a time, so it has one address
// and one swizzle.
template <int ROWS, int D, int THREADS>
__device__ inline void copy_tile(bf16* tile, const bf16* head, int first, int T, int ld, int HD) {
    constexpr int PIECES = D / 8, STEP = THREADS / PIECES;
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "whole passes of whole swizzle periods");
    int row = threadIdx.x / PIECES, column = threadIdx.x % PIECES * 8;
    bf16* to = tile + tile_offset<D>(row, column);
    const bf16* from = head + (size_t)(first + row) * ld + column;
    #pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        cpa16(to + i * D, from + (size_t)i * ld, column < HD && first + row + i < T);
    }
}

// Where a lane reads its row for ldmatrix.x4, as an offset from the first of 16 tile rows. Columns advance by exclusive
// or with k*16 (the swizzle is one itself), rows by adding n*16*D. Rows first: A operands, and B operands by the
// transposing load (tile rows are summed over). Columns first: B operands by the plain load (tile rows are columns of
// the result).
template <int D>
__device__ inline int lane_rows_first() {
    int lane = threadIdx.x % 32;
    return tile_offset<D>(lane % 16, lane / 16 * 8);
}
template <int D>
__device__ inline int lane_columns_first() {
    int lane = threadIdx.x % 32;
    return tile_offset<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
}

// the A operands of 16 rows of a tile
template <int D>
__device__ inline void load_fragments(uint32_t (&fragments)[D / 16][4], const bf16* rows) {
    #pragma unroll
    for (int k = 0; k < D / 16; k++) { ldsm4(fragments[k], rows + (lane_rows_first<D>() ^ k * 16)); }
}

// acc (16,COLUMNS) += A B^T, summed over D; A (16,D) as fragments if KEPT, otherwise read from the tile rows a; B
// (COLUMNS,D) at b
template <int D, int COLUMNS, bool KEPT>
__device__ inline void multiply_abt(float (&acc)[COLUMNS / 8][4], const uint32_t (&fragments)[KEPT ? D / 16 : 1][4],
                                    const bf16* a, const bf16* b) {
    int a_lane = lane_rows_first<D>(), b_lane = lane_columns_first<D>();
    #pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a_k[4];
        if constexpr (KEPT) {
            memcpy(a_k, fragments[k], sizeof(a_k));
        } else {
            ldsm4(a_k, a + (a_lane ^ k * 16));
        }
        #pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            uint32_t b_kn[4];
            ldsm4(b_kn, b + n * 16 * D + (b_lane ^ k * 16));
            mma16816(acc[2 * n], a_k, {b_kn[0], b_kn[1]});
            mma16816(acc[2 * n + 1], a_k, {b_kn[2], b_kn[3]});
        }
    }
}

// acc (16,D) += bf16(P) B, summed over ROWS, 16 at a time in ascending order; P (16,ROWS) as accumulators, B (ROWS,D)
// at b
template <int D, int ROWS>
__device__ inline void multiply_ab(float (&acc)[D / 8][4], const float (&p)[ROWS / 8][4], const bf16* b) {
    int b_lane = lane_rows_first<D>();
    #pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        uint32_t a_k[4] = {pack2(p[2 * k][0], p[2 * k][1]), pack2(p[2 * k][2], p[2 * k][3]),
                           pack2(p[2 * k + 1][0], p[2 * k + 1][1]), pack2(p[2 * k + 1][2], p[2 * k + 1][3])};
        #pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b_kn[4];
            ldsm4t(b_kn, b + k * 16 * D + (b_lane ^ n * 16));
            mma16816(acc[2 * n], a_k, {b_kn[0], b_kn[1]});
            mma16816(acc[2 * n + 1], a_k, {b_kn[2], b_kn[3]});
        }
    }
}

// rows first.. of a head (T,HD) = acc times a factor for the upper and one for the lower 8 of a warp's 16 rows
template <int D>
__device__ inline void store_rows(bf16* head, const float (&acc)[D / 8][4], float upper, float lower, int first, int T,
                                  int ld, int HD) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + half * 8;
        if (row >= T) { continue; }
        bf16* to = head + (size_t)row * ld + lane % 4 * 2;
        float factor = half == 0 ? upper : lower;
        #pragma unroll
        for (int n = 0; n < D / 8; n++) {
            if (n * 8 < HD) {
                *(uint32_t*)(to + n * 8) = pack2(acc[n][2 * half] * factor, acc[n][2 * half + 1] * factor);
            }
        }
    }
}

void attention_check(const char* op, AttentionShape s) {
    // what all kernels of attention ask of a shape
    if (s.HD < 8 || s.HD > 128 || s.HD % 8 != 0) {
        fatal("%s: head_dim must be a multiple of 8 from 8 to 128, is %d", op, s.HD);
    }
    if (s.NKV < 1 || s.NH % s.NKV != 0) {
        fatal("%s: the query heads must be a multiple of the key/value heads, are %d and %d", op, s.NH, s.NKV);
    }
    if (s.B > 65535 || s.NH > 65535 || s.T > INT_MAX - 128) {
        fatal("%s: B, NH and T must be at most 65535, 65535 and 2^31-129, are %zu, %d, %zu", op, s.B, s.NH, s.T);
    }
    if ((s.ld_qk | s.ld_v | s.ld_d) % 8 != 0 || s.ld_qk > INT_MAX || s.ld_v > INT_MAX || s.ld_d > INT_MAX) {
        fatal("%s: row strides must be multiples of 8 below 2^31, are %zu, %zu, %zu", op, s.ld_qk, s.ld_v, s.ld_d);
    }
}

size_t attention_naive_ld(size_t T) { return ceil_div(T, 8) * 8; } // rows of scores start at multiples of 16 bytes

size_t attention_naive_bytes(size_t T, size_t HD) {
    // of one head: scores and their gradients (T,T) in fp32, and both again in bf16; sums of d_k and d_v (T,HD) in fp32
    return T * attention_naive_ld(T) * 2 * (sizeof(float) + sizeof(bf16)) + 2 * T * HD * sizeof(float);
}

// launch(D) where D is HD rounded up to what the kernels are compiled for, as a type: D's value is a constant
template <class Launch> void attention_dispatch(int HD, Launch launch) {
    HD <= 16   ? launch(std::integral_constant<int, 16>{})
    : HD <= 32 ? launch(std::integral_constant<int, 32>{})
    : HD <= 64 ? launch(std::integral_constant<int, 64>{})
               : launch(std::integral_constant<int, 128>{});
}

// ----------------------------------------------------------------------------
// tests

enum Documents { WHOLE, RANDOM, HALVES, SINGLE_TOKENS }; // how a sequence is cut into documents
typedef struct {
    size_t B, T;
    int NH, NKV, HD;
    enum Documents documents;
} AttentionCase;

static const AttentionCase attention_cases[] = {
    {2, 1, 4, 1, 8, WHOLE},           {2, 17, 5, 5, 8, RANDOM},          {2, 17, 4, 1, 24, WHOLE},
    {1, 63, 8, 1, 64, RANDOM},        {1, 65, 4, 4, 128, RANDOM},        {2, 65, 4, 1, 16, HALVES},
    {1, 130, 8, 1, 40, RANDOM},       {1, 200, 2, 2, 64, WHOLE},         {1, 200, 4, 1, 64, HALVES},
    {1, 200, 2, 1, 24, RANDOM},       {1, 129, 3, 1, 120, HALVES},       {1, 200, 2, 1, 128, WHOLE},
    {1, 40, 2, 1, 32, SINGLE_TOKENS}, {1, 70, 2, 2, 128, SINGLE_TOKENS}, {1, 33, 16, 16, 64, WHOLE}, // smol-500m's
};
#ifdef EMU
#define LONG_HEADS 2 // all 16 would take the emulator more than an hour
#else
#define LONG_HEADS 16
#endif
static const AttentionCase long_cases[] = { // the second one has the sizes of smol-500m
    {1, 2100, 2, 1, 64, HALVES}, {1, 4096, LONG_HEADS, LONG_HEADS, 64, WHOLE}};

// NVIDIA's library, where a kernel's number is asked for
#define CUDNN 0
#ifdef USE_CUDNN
#define WITH_CUDNN true
#else
#define WITH_CUDNN false
#endif
// it knows no documents, and short sequences are not what it is for
inline bool cudnn_runs(const AttentionCase& c) {
    return WITH_CUDNN && dev_only == 0 && c.documents == WHOLE && c.T >= 200;
}

// q, k, v and their gradients where the trainer has them: q and k beside each other, v behind the q and k of the packed
// projection
inline AttentionShape shape_of(const AttentionCase& c) {
    size_t qk = (size_t)(c.NH + c.NKV) * c.HD, qkv = qk + (size_t)c.NKV * c.HD;
    return {c.B, c.T, c.NH, c.NKV, c.HD, qk, qkv, qkv};
}

inline std::string name_of(int kernel, const AttentionCase& c, const char* what) {
    char name[128];
    snprintf(name, sizeof(name), "B %zu T %zu heads %d:%d HD %d, %s", c.B, c.T, c.NH, c.NKV, c.HD, what);
    return (kernel == CUDNN ? "cuDNN, " : "kernel " + std::to_string(kernel) + ", ") + name;
}

inline std::vector<int> make_doc_start(const AttentionCase& c) {
    std::vector<int> start(c.B * c.T);
    for (size_t b = 0; b < c.B; b++) {
        int first = 0;
        for (size_t t = 0; t < c.T; t++) {
            bool cut = (c.documents == RANDOM && hash64(b * c.T + t) % 23 == 0) ||
                       (c.documents == HALVES && t == c.T / 2 + 5 * b) || c.documents == SINGLE_TOKENS;
            if (cut) { first = (int)t; }
            start[b * c.T + t] = first;
        }
    }
    return start;
}

template <class Launch>
void bench_attention(const char* op, int kernel, double bytes, double flops, Launch launch) {
    if (kernel == CUDNN && !WITH_CUDNN) {
        printf("cuDNN is not in this program: make deps-cudnn, then make build/dev/%s USE_CUDNN=1\n", op);
    } else if (kernel == CUDNN) {
        bench_library((std::string(op) + " cuDNN").c_str(), bytes, flops, launch);
    } else {
        bench(op, kernel, bytes, flops, launch);
    }
}

// (B,heads,T,HD), the CPU's layout, from rows of ld numbers a token of which the heads begin at `column`
inline std::vector<float> head_major(const std::vector<float>& rows, const AttentionCase& c, size_t ld, size_t column,
                                     int heads) {
    std::vector<float> x(c.B * heads * c.T * c.HD);
    #pragma omp parallel for
    for (size_t i = 0; i < c.B * heads * c.T; i++) {
        size_t b = i / (heads * c.T), h = i / c.T % heads, t = i % c.T;
        std::copy_n(&rows[(b * c.T + t) * ld + column + h * c.HD], c.HD, &x[i * c.HD]);
    }
    return x;
}

// Tolerances are an ulp and so much of the spread of an element (Reference). 2^-8 of it is what fp32 sums get. P and
// d_scores as factors on the tensor cores are bf16: each is rounded, by up to 2^-8 of its term and in the rms 0.42
// times that, and the errors of a sum's terms add up as their squares do. 2^-8 is then 2.4 standard deviations, more
// than one element in 1000 is beyond it and of the four millions of smol-500m's one at 2.1 * 2^-8. So: six of them.
#define FP32_FACTORS (1.0 / 256)
#define BF16_FACTORS (6 * 0.42 / 256)

// where documents end, as the loader has it
inline std::vector<int> make_doc_end(const std::vector<int>& doc_start, size_t T) {
    std::vector<int> end(doc_start.size());
    doc_ends(end.data(), doc_start.data(), end.size(), T);
    return end;
}

// inputs of a case and what the CPU makes of them
struct Reference {
    AttentionCase c;
    cpu::AttentionShape shape;
    AttentionShape s;
    std::vector<float> qk, qkv, d_out; // as on the device, token by token
    std::vector<float> q, k, v;        // head by head
    std::vector<int> doc_start;
    std::vector<float> out, lse, d_q, d_k, d_v;
    std::vector<double> out_spread, d_q_spread, d_k_spread, d_v_spread; // what their tolerances are measured in

    explicit Reference(const AttentionCase& a, float amplitude = 1.7f)
        : c(a), shape{c.B, c.T, c.NH, c.NKV, c.HD}, s(shape_of(c)), doc_start(make_doc_start(c)) {
        size_t N = c.B * c.T, A = (size_t)c.NH * c.HD;
        qk = random_floats(N * s.ld_qk, amplitude, c.T + c.HD);
        qkv = random_floats(N * s.ld_v, amplitude, c.T + c.HD + 1);
        d_out = random_floats(N * A, 1, c.T + c.HD + 2);
        q = head_major(qk, c, s.ld_qk, 0, c.NH);
        k = head_major(qk, c, s.ld_qk, A, c.NKV);
        v = head_major(qkv, c, s.ld_v, s.ld_qk, c.NKV);
        out.resize(N * A);
        lse.resize(N * c.NH);
        std::vector<float> scores(c.T * c.T);
        cpu::attention_naive_forward(out.data(), lse.data(), q.data(), k.data(), v.data(), doc_start.data(),
                                     scores.data(), shape);
    }
    void backward() {
        // from the rounded output, as the device has it
        for (float& x : out) { x = bf16_to_f32(f32_to_bf16(x)); }
        std::vector<float> scores(2 * s.T * s.T);
        d_q.resize(q.size());
        d_k.resize(k.size());
        d_v.resize(v.size());
        cpu::attention_naive_backward(d_q.data(), d_k.data(), d_v.data(), d_out.data(), out.data(), lse.data(),
                                      q.data(), k.data(), v.data(), doc_start.data(), scores.data(), shape);
    }

    // Each result is a sum, and its spread is the root of the sum of the squares of its terms.
    void forward_spread() { // out = sum over the keys of p v
        out_spread.assign(out.size(), 0);
        each_pair([&](size_t, size_t k_row, size_t out_row, double p, bool) {
            add_squares(&out_spread[out_row], &v[k_row], p * p);
        });
        roots(out_spread);
    }
    void backward_spread() { // d_v = sum of p d_out, d_k = sum of d_score q, d_q = sum of d_score k
        d_q_spread.assign(q.size(), 0);
        d_k_spread.assign(k.size(), 0);
        d_v_spread.assign(v.size(), 0);
        double scale = 1 / sqrt((double)s.HD);
        each_pair([&](size_t q_row, size_t k_row, size_t out_row, double p, bool one_key) {
            Dot d_p = dot(&d_out[out_row], &v[k_row]), delta = dot(&d_out[out_row], &out[out_row]);
            // d_p and delta may cancel to less than what their sums were rounded by: HD times by 2^-24 of what had come
            // together. Times 2^16, as it is to count 2^-8 of a spread.
            double rounded = ldexp(s.HD * (d_p.squares + delta.squares), -32);
            double d_score = p * scale, squares = (d_p.sum - delta.sum) * (d_p.sum - delta.sum) + rounded;
            squares = one_key ? 0 : d_score * d_score * squares;
            add_squares(&d_v_spread[k_row], &d_out[out_row], p * p);
            add_squares(&d_k_spread[k_row], &q[q_row], squares);
            add_squares(&d_q_spread[q_row], &k[k_row], squares);
        });
        roots(d_q_spread);
        roots(d_k_spread);
        roots(d_v_spread);
    }

private:
    struct Dot {
        double sum, squares; // of products, and of their squares
    };
    Dot dot(const float* x, const float* y) const {
        double sum = 0, squares = 0;
        #pragma omp simd reduction(+ : sum, squares)
        for (int c = 0; c < s.HD; c++) {
            double product = (double)x[c] * y[c];
            sum += product;
            squares += product * product;
        }
        return {sum, squares};
    }
    void add_squares(double* sums, const float* x, double factor_squared) const {
        #pragma omp simd
        for (int c = 0; c < s.HD; c++) { sums[c] += factor_squared * x[c] * x[c]; }
    }
    static void roots(std::vector<double>& x) {
        #pragma omp parallel for
        for (size_t i = 0; i < x.size(); i++) { x[i] = sqrt(x[i]); }
    }
    // use(q_row, k_row, out_row, p, one_key) for each query and each key that it sees: where the rows of q and d_q, of
    // k, v, d_k and d_v, of out and d_out begin, the key's probability, and whether there is no other key
    template <class Use> void each_pair(Use use) const {
        size_t T = s.T, HD = s.HD, NH = s.NH, NKV = s.NKV, group = NH / NKV;
        double scale = 1 / sqrt((double)HD);
        #pragma omp parallel for schedule(dynamic)
        for (size_t head = 0; head < s.B * NKV; head++) { // a thread owns the sums of a group of query heads
            for (size_t i = 0; i < group * T; i++) {
                size_t b = head / NKV, h = head % NKV * group + i / T, t = i % T, begin = doc_start[b * T + t];
                size_t row = (b * NH + h) * T + t;
                for (size_t j = begin; j <= t; j++) {
                    size_t k_row = (head * T + j) * HD;
                    double p = exp(dot(&q[row * HD], &k[k_row]).sum * scale - lse[row]);
                    use(row * HD, k_row, ((b * T + t) * NH + h) * HD, p, begin == t);
                }
            }
        }
    }
};
#endif
