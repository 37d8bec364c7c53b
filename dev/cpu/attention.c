// attention.c: softmax(q k^T / sqrt(HD)) v, causal, and within a document where doc_start says so: position t sees
// positions doc_start[t] .. t of its row. NH/NKV query heads share a key/value head (GQA, Ainslie et al. 2023).
//     forward:  out (N,A), lse (B,NH,T) = log-sum-exp of each row of scores;  q (B,NH,T,HD), k and v (B,NKV,T,HD)
//     backward: d_q, d_k, d_v of d_out (N,A), with P recomputed from lse
// 2 products forward (QK^T, PV) and 5 backward (QK^T again, dO V^T, P^T dO, dS^T Q, dS K), T x T x HD each, of which
// the mask needs half. Bound by arithmetic; GFLOP/s count that half, and 2 + 4 products (not the one done again).
//
//     make build/dev_cpu/attention
//
// kernel 1: the formulas as loops: a head's T x T scores are written down, their softmax, the sums.
// kernel 2: nothing is written down: the softmax is kept relative to the largest score so far, and the sum of values
//           with it (online softmax, Milakov and Gimelshein 2018); backward goes over the keys once, with delta =
//           rowsum(dO O) in place of rowsum(P dP) (Dao 2022). The memory is O(T); the arithmetic, and so the time, is
//           what it was.
// kernel 3: the trainer's --attention naive: each sum over a whole head is one matrix product (matmul.c), exp is
//           exp_poly (exp.c). Half of all products are masked away afterwards, and T x T scores go through memory.
// kernel 4: the trainer's --attention flash: 64 rows of queries at a time against the keys they can see
//           (FlashAttention-2, Dao 2023): masked blocks are never computed, scores stay in L2, and forward each block,
//           backward each key/value head is a task of its own.
// kernel 5: the same in bf16 (--precision bf16): P and dS are rounded for the products that read them.
// winner: 4 (5 with --precision bf16)
//
// One core of a Zen 4 at M, kernel 1 to 5: forward 188, 189, 28, 20, 14 ms, backward 357, 345, 66, 40, 29. What brings
// most is that loops become products; blocks then halve the work, but their products are small: half of GEMM's rate.
#include "common.h"

enum { NUM_KERNELS = 5, BF16 = 5, MOST_HD = 128 };

typedef struct {
    AttentionShape s;
    float *q, *k, *v, *out, *lse, *d_out, *d_q, *d_k, *d_v, *scores;
    int* doc_start; // (B,T), or NULL
} Attention;

static size_t first_key(const Attention* a, size_t b, size_t t) {
    return a->doc_start ? (size_t)a->doc_start[b * a->s.T + t] : 0;
}
static float* key_head(const Attention* a, float* x, size_t b, size_t h) { // of query head h
    return (float*)head_rows(x, &a->s, a->s.NKV, b, (int)h / (a->s.NH / a->s.NKV));
}
static float* query_head(const Attention* a, float* x, size_t b, size_t h) {
    return (float*)head_rows(x, &a->s, a->s.NH, b, (int)h);
}
static float* token_head(const Attention* a, float* x, size_t b, size_t t, size_t h) { // in out, d_out (N,A)
    return x + ((b * a->s.T + t) * a->s.NH + h) * a->s.HD;
}

static float dot(const float* x, const float* y, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) { sum += x[i] * y[i]; }
    return sum;
}
static void add_scaled(float* out, float factor, const float* x, int n) {
    for (int i = 0; i < n; i++) { out[i] += factor * x[i]; }
}

// ----------------------------------------------------------------------------
// kernel 1

void attention_forward_kernel1(const Attention* a, size_t b, size_t h, float* p) {
    // one head; p (T,T)
    int HD = a->s.HD;
    size_t T = a->s.T;
    const float *q = query_head(a, a->q, b, h), *k = key_head(a, a->k, b, h), *v = key_head(a, a->v, b, h);
    float scale = 1 / sqrtf((float)HD);
    for (size_t t = 0; t < T; t++) {
        for (size_t j = first_key(a, b, t); j <= t; j++) { p[t * T + j] = dot(q + t * HD, k + j * HD, HD) * scale; }
    }
    for (size_t t = 0; t < T; t++) {
        float maximum = -INFINITY, sum = 0;
        for (size_t j = first_key(a, b, t); j <= t; j++) { maximum = fmaxf(maximum, p[t * T + j]); }
        for (size_t j = first_key(a, b, t); j <= t; j++) { sum += expf(p[t * T + j] - maximum); }
        float lse = a->lse[(b * a->s.NH + h) * T + t] = maximum + logf(sum);
        for (size_t j = first_key(a, b, t); j <= t; j++) { p[t * T + j] = expf(p[t * T + j] - lse); }
    }
    for (size_t t = 0; t < T; t++) {
        float* out = token_head(a, a->out, b, t, h);
        memset(out, 0, HD * sizeof(float));
        for (size_t j = first_key(a, b, t); j <= t; j++) { add_scaled(out, p[t * T + j], v + j * HD, HD); }
    }
}

void attention_backward_kernel1(const Attention* a, size_t b, size_t h, float* p) {
    // one head, adding to d_k and d_v; p (2,T,T): P, then dP, which becomes dS
    int HD = a->s.HD;
    size_t T = a->s.T;
    float *q = query_head(a, a->q, b, h), *k = key_head(a, a->k, b, h), *v = key_head(a, a->v, b, h), *d_s = p + T * T;
    float *d_q = query_head(a, a->d_q, b, h), *d_k = key_head(a, a->d_k, b, h), *d_v = key_head(a, a->d_v, b, h);
    float scale = 1 / sqrtf((float)HD);
    memset(d_q, 0, T * HD * sizeof(float));
    for (size_t t = 0; t < T; t++) {
        float lse = a->lse[(b * a->s.NH + h) * T + t];
        for (size_t j = first_key(a, b, t); j <= t; j++) {
            p[t * T + j] = expf(dot(q + t * HD, k + j * HD, HD) * scale - lse);
            d_s[t * T + j] = dot(token_head(a, a->d_out, b, t, h), v + j * HD, HD);
        }
    }
    for (size_t t = 0; t < T; t++) {
        float delta = 0;
        float *p_t = p + t * T, *d_s_t = d_s + t * T;
        for (size_t j = first_key(a, b, t); j <= t; j++) { delta += p_t[j] * d_s_t[j]; }
        for (size_t j = first_key(a, b, t); j <= t; j++) { d_s_t[j] = p_t[j] * (d_s_t[j] - delta) * scale; }
    }
    for (size_t t = 0; t < T; t++) {
        for (size_t j = first_key(a, b, t); j <= t; j++) {
            add_scaled(d_v + j * HD, p[t * T + j], token_head(a, a->d_out, b, t, h), HD);
            add_scaled(d_k + j * HD, d_s[t * T + j], q + t * HD, HD);
            add_scaled(d_q + t * HD, d_s[t * T + j], k + j * HD, HD);
        }
    }
}

// ----------------------------------------------------------------------------
// kernel 2

void attention_forward_kernel2(const Attention* a, size_t b, size_t h) {
    int HD = a->s.HD;
    size_t T = a->s.T;
    const float *q = query_head(a, a->q, b, h), *k = key_head(a, a->k, b, h), *v = key_head(a, a->v, b, h);
    float scale = 1 / sqrtf((float)HD);
    for (size_t t = 0; t < T; t++) {
        float row_max = -INFINITY, row_sum = 0, acc[MOST_HD] = {0};
        for (size_t j = first_key(a, b, t); j <= t; j++) {
            float score = dot(q + t * HD, k + j * HD, HD) * scale;
            if (score > row_max) { // all so far was relative to another one
                float shrink = expf(row_max - score);
                row_sum *= shrink;
                for (int i = 0; i < HD; i++) { acc[i] *= shrink; }
                row_max = score;
            }
            float p = expf(score - row_max);
            row_sum += p;
            add_scaled(acc, p, v + j * HD, HD);
        }
        float* out = token_head(a, a->out, b, t, h);
        for (int i = 0; i < HD; i++) { out[i] = acc[i] / row_sum; }
        a->lse[(b * a->s.NH + h) * T + t] = row_max + logf(row_sum);
    }
}

void attention_backward_kernel2(const Attention* a, size_t b, size_t h) {
    int HD = a->s.HD;
    size_t T = a->s.T;
    float *q = query_head(a, a->q, b, h), *k = key_head(a, a->k, b, h), *v = key_head(a, a->v, b, h);
    float *d_q = query_head(a, a->d_q, b, h), *d_k = key_head(a, a->d_k, b, h), *d_v = key_head(a, a->d_v, b, h);
    float scale = 1 / sqrtf((float)HD);
    memset(d_q, 0, T * HD * sizeof(float));
    for (size_t t = 0; t < T; t++) {
        const float *d_out = token_head(a, a->d_out, b, t, h), *q_t = q + t * HD;
        float delta = dot(d_out, token_head(a, a->out, b, t, h), HD), lse = a->lse[(b * a->s.NH + h) * T + t];
        for (size_t j = first_key(a, b, t); j <= t; j++) {
            float p = expf(dot(q_t, k + j * HD, HD) * scale - lse);
            float d_s = p * (dot(d_out, v + j * HD, HD) - delta) * scale;
            add_scaled(d_v + j * HD, p, d_out, HD);
            add_scaled(d_k + j * HD, d_s, q_t, HD);
            add_scaled(d_q + t * HD, d_s, k + j * HD, HD);
        }
    }
}

// ----------------------------------------------------------------------------
// checks and benchmark

static void forward(int kernel, const void* work) {
    const Attention* a = (const Attention*)work;
    size_t heads = a->s.B * a->s.NH, T = a->s.T;
    if (kernel == 3) { attention_naive_forward(a->out, a->lse, a->q, a->k, a->v, a->doc_start, a->scores, a->s); }
    if (kernel >= 4) { attention_flash_forward(a->out, a->lse, a->q, a->k, a->v, a->doc_start, a->scores, a->s); }
    if (kernel >= 3) { return; }
    #pragma omp parallel for
    for (size_t i = 0; i < heads; i++) {
        size_t b = i / a->s.NH, h = i % a->s.NH;
        if (kernel == 1) { attention_forward_kernel1(a, b, h, a->scores + (size_t)thread_num() * 2 * T * T); }
        if (kernel == 2) { attention_forward_kernel2(a, b, h); }
    }
}

static void backward(int kernel, const void* work) {
    const Attention* a = (const Attention*)work;
    size_t T = a->s.T, numbers = T * a->s.HD, group = a->s.NH / a->s.NKV;
    if (kernel >= 3) {
        (kernel == 3 ? attention_naive_backward : attention_flash_backward)(
            a->d_q, a->d_k, a->d_v, a->d_out, a->out, a->lse, a->q, a->k, a->v, a->doc_start, a->scores, a->s);
        return;
    }
    #pragma omp parallel for
    for (size_t kv = 0; kv < a->s.B * a->s.NKV; kv++) { // the heads of a group add up in their key/value head
        memset(a->d_k + kv * numbers, 0, numbers * sizeof(float));
        memset(a->d_v + kv * numbers, 0, numbers * sizeof(float));
        for (size_t h = kv % a->s.NKV * group; h < (kv % a->s.NKV + 1) * group; h++) {
            size_t b = kv / a->s.NKV;
            if (kernel == 1) { attention_backward_kernel1(a, b, h, a->scores + (size_t)thread_num() * 2 * T * T); }
            if (kernel == 2) { attention_backward_kernel2(a, b, h); }
        }
    }
}

static Attention attention_create(AttentionShape s, bool documents, bool bf16) {
    size_t T = s.T, queries = s.B * s.NH * T * s.HD, keys = s.B * s.NKV * T * s.HD, threads = (size_t)num_threads();
    size_t scores = 2 * threads * T * (T > ATTENTION_ROWS ? T : (size_t)ATTENTION_ROWS);
    Attention a = {s, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    a.q = random_floats(queries, 2, 1);
    a.k = random_floats(keys, 2, 2);
    a.v = random_floats(keys, 1, 3);
    a.d_out = random_floats(queries, 1, 4);
    a.out = fresh(queries); a.lse = fresh(s.B * s.NH * T); a.scores = fresh(scores);
    a.d_q = fresh(queries); a.d_k = fresh(keys); a.d_v = fresh(keys);
    if (documents) {
        a.doc_start = (int*)dev_alloc(s.B * T * sizeof(int));
        for (size_t i = 0; i < s.B * T; i++) { // lengths of all kinds, a new one about every seventh token
            a.doc_start[i] = i % T > 0 && hash64(i) % 7 > 0 ? a.doc_start[i - 1] : (int)(i % T);
        }
    }
    if (bf16) {
        in_bf16(a.q, queries);
        in_bf16(a.k, keys);
        in_bf16(a.v, keys);
        in_bf16(a.d_out, queries);
        in_bf16(a.scores, scores);
    }
    return a;
}

typedef struct {
    double *out, *lse, *d_q, *d_k, *d_v;
} Reference;

static void reference_row(const Attention* a, Reference* r, size_t b, size_t h, size_t t) {
    // one query, forward and backward, in double
    size_t HD = (size_t)a->s.HD, T = a->s.T, first = first_key(a, b, t), at_q = ((b * a->s.NH + h) * T + t) * HD;
    size_t at_k = (size_t)(key_head(a, a->k, b, h) - a->k), at_out = (size_t)(token_head(a, a->out, b, t, h) - a->out);
    double *p = (double*)callocCheck(2 * T, sizeof(double)), *d_p = p + T;
    double scale = 1 / sqrt((double)HD), sum = 0, delta = 0;
    for (size_t j = first; j <= t; j++) {
        for (size_t i = 0; i < HD; i++) { p[j] += (double)a->q[at_q + i] * a->k[at_k + j * HD + i] * scale; }
        sum += exp(p[j]); // scores of these inputs are far from overflow in double
    }
    r->lse[(b * a->s.NH + h) * T + t] = log(sum);
    for (size_t j = first; j <= t; j++) {
        p[j] = exp(p[j]) / sum;
        for (size_t i = 0; i < HD; i++) {
            r->out[at_out + i] += p[j] * a->v[at_k + j * HD + i];
            d_p[j] += (double)a->d_out[at_out + i] * a->v[at_k + j * HD + i];
        }
        delta += p[j] * d_p[j];
    }
    for (size_t j = first; j <= t; j++) {
        double d_s = p[j] * (d_p[j] - delta) * scale;
        for (size_t i = 0; i < HD; i++) {
            r->d_v[at_k + j * HD + i] += p[j] * a->d_out[at_out + i];
            r->d_k[at_k + j * HD + i] += d_s * a->q[at_q + i];
            r->d_q[at_q + i] += d_s * a->k[at_k + j * HD + i];
        }
    }
    free(p);
}

void check_shape(int kernel, AttentionShape s, bool documents) {
    Attention a = attention_create(s, documents, kernel == BF16);
    size_t queries = s.B * s.NH * s.T * s.HD, keys = s.B * s.NKV * s.T * s.HD, rows = s.B * s.NH * s.T;
    Reference r = {zeros(queries), zeros(rows), zeros(queries), zeros(keys), zeros(keys)};
    for (size_t i = 0; i < rows; i++) { reference_row(&a, &r, i / s.T / s.NH, i / s.T % s.NH, i % s.T); }
    forward(kernel, &a);
    backward(kernel, &a);
    Result results[5] = {{"lse", a.lse, r.lse, rows},
                         {"out", a.out, r.out, queries},
                         {"d_v", a.d_v, r.d_v, keys},
                         {"d_q", a.d_q, r.d_q, queries},
                         {"d_k", a.d_k, r.d_k, keys}};
    // one key to see is no choice: then d_q and d_k are 0, the trainer says so exactly, kernels 1 and 2 say about 1e-8
    int count = s.T == 1 && kernel < 3 ? 3 : 5;
    char what[96];
    snprintf(what, sizeof(what), "B %zu T %zu NH %d NKV %d HD %d%s", s.B, s.T, s.NH, s.NKV, s.HD,
             documents ? " documents" : "");
    check_results(results, count, kernel, 1e-5, what); // exp's 2 ulp and the rounding of its argument, which may be 20
    free_arrays();
}

static AttentionShape shape_of(const BenchSize* s) { return (AttentionShape){s->B, s->T, s->heads, s->heads, 64}; }

void check_all(int kernel) {
    for (int documents = 0; documents < 2; documents++) {
        check_shape(kernel, (AttentionShape){1, 1, 1, 1, 8}, documents); // one token
        check_shape(kernel, (AttentionShape){3, 2, 2, 1, 24}, documents);
        check_shape(kernel, (AttentionShape){2, 63, 8, 1, 16}, documents); // a row less than a block; a head for all
        check_shape(kernel, (AttentionShape){1, 64, 4, 4, 64}, documents);
        check_shape(kernel, (AttentionShape){2, 65, 4, 2, 40}, documents); // one more
        check_shape(kernel, (AttentionShape){1, 200, 2, 2, 128}, documents);
    }
    for (size_t s = 0; s < NUM_SIZES && dev_benchmarks(); s++) { check_shape(kernel, shape_of(&sizes[s]), false); }
}

void bench_all(void) {
    for (size_t s = 0; s < NUM_SIZES; s++) {
        AttentionShape shape = shape_of(&sizes[s]);
        Attention a = attention_create(shape, false, false), a_bf16 = attention_create(shape, false, dev_runs(BF16));
        double product = 2.0 * shape.B * shape.NH * shape.T * (shape.T + 1) / 2 * shape.HD;
        Bench b = {"", 1, 4, 2 * product, 0, forward, NULL, &a, &a_bf16};
        snprintf(b.what, sizeof(b.what), "%s forward", sizes[s].name);
        bench(&b);
        forward(4, &a); // what backward needs, whichever kernel is timed
        forward(4, &a_bf16);
        b.run = backward;
        b.flops = 4 * product;
        snprintf(b.what, sizeof(b.what), "%s backward", sizes[s].name);
        bench(&b);
        free_arrays();
    }
}

int main(int argc, char** argv) { return dev_main(argc, argv, NUM_KERNELS, BF16, check_all, bench_all); }
