// experts.c: the experts of an MoE layer, once the router has chosen: each is a small SwiGLU MLP (Shazeer 2020), and
// each token goes to K of E.
//     forward:  for token n and its k-th expert e: x = inp[n,:];  act = silu(gate_proj[e] x) * (up_proj[e] x);
//               out[n,:] = sum over k of router_weights[n,k] * down_proj[e] act
//     backward: of d_out (N,C): d_inp (N,C), d_router_weights (N,K), and the weights' gradients, which are written
// gate_up_proj (E,2F,C) has gate and up, down_proj is (E,C,F). Slots are sorted by expert into R = N*K rows
// (route_rows), no token is dropped: an expert may have none or all of them. 6RCF operations forward, 12RCF backward:
// bound by arithmetic, if an expert's weights are read once for all of its rows.
//
//     make build/dev_cpu/experts
//
// kernel 1: row by row: the trainer's functions for an expert, with one row each. Products of a matrix and a vector, so
//           the weights come from memory (or L3) for each row: 6CF numbers for 6CF operations.
// kernel 2: the trainer's --experts loop: expert by expert, all of its rows at once; each product on all threads,
//           which wait for each other at its end: often, where an expert has few rows.
// kernel 3: the trainer's --experts grouped: an expert a thread, the one with most rows first; each product is one
//           thread's, as are gather and SwiGLU, while the rows are in its cache. (Where one expert has more than a
//           thread's fair share of the rows, the trainer takes kernel 2's way.)
// kernel 4: the same in bf16 (--precision bf16): who writes an operand rounds it.
// winner: 3 (4 with --precision bf16)
//
// Two cores of a Zen 4 at M, kernel 1 to 4: forward 100, 42, 34, 18 ms, backward 402, 69, 66, 36. On one thread 2 and 3
// are the same products. On two, 2 waits after each product, 3 at the end: most where an expert has few rows (64 at
// SEED1: 26 ms for 18).
#include "common.h"

enum { NUM_KERNELS = 4, BF16 = 4 };

typedef struct {
    size_t N, C, F;
    int E, K;
    LayerActs a;
    Acts acts;
    LayerParams w, d_w;
    float *out, *d_inp;
} Experts;

// ----------------------------------------------------------------------------
// kernel 1

static int expert_of_row(const LayerActs* a, size_t row) { return a->router_indices[a->row_slot[row]]; }

void experts_forward_kernel1(Experts* x) {
    LayerActs* a = &x->a;
    size_t C = x->C, F = x->F;
    #pragma omp parallel for
    for (size_t row = 0; row < x->N * x->K; row++) {
        int e = expert_of_row(a, row);
        permute_forward(a->expert_in, a->mlp_norm, a->row_slot, row, row + 1, x->K, C);
        mlp_forward(a->expert_out + row * C, a->expert_act + row * F, a->gate_up + row * 2 * F, a->expert_in + row * C,
                    x->w.gate_up_proj + e * 2 * F * C, x->w.down_proj + e * C * F, 1, C, F);
    }
}

void experts_backward_kernel1(Experts* x) {
    // one row after another: two rows of an expert add to the same weight gradients
    LayerActs* a = &x->a;
    Acts* acts = &x->acts;
    size_t C = x->C, F = x->F;
    zero_real(x->d_w.gate_up_proj, x->E * 2 * F * C);
    zero_real(x->d_w.down_proj, x->E * C * F);
    for (size_t row = 0; row < x->N * x->K; row++) {
        int e = expert_of_row(a, row);
        combine_backward(acts->d_expert_out, acts->d_router_weights, acts->d_residual, a->expert_out, a->router_weights,
                         a->row_slot, row, row + 1, x->K, C);
        mlp_backward(acts->d_expert_in + row * C, x->d_w.gate_up_proj + e * 2 * F * C, x->d_w.down_proj + e * C * F,
                     acts->d_gate_up + row * 2 * F, acts->d_expert_act + row * F, acts->d_expert_out + row * C,
                     a->expert_in + row * C, a->expert_act + row * F, a->gate_up + row * 2 * F,
                     x->w.gate_up_proj + e * 2 * F * C, x->w.down_proj + e * C * F, 1, C, F, 1);
    }
}

// ----------------------------------------------------------------------------
// checks and benchmark

static void forward(int kernel, const void* work) {
    Experts* x = (Experts*)work;
    LayerActs* a = &x->a;
    if (kernel == 1) {
        experts_forward_kernel1(x);
    } else {
        experts_forward(a, &x->w, kernel == 2 ? EXPERTS_LOOP : EXPERTS_GROUPED, x->E, x->K, x->C, x->F);
    }
    combine_forward(x->out, a->expert_out, a->router_weights, a->slot_row, x->N, x->K, x->C);
}

static void backward(int kernel, const void* work) {
    Experts* x = (Experts*)work;
    if (kernel == 1) {
        experts_backward_kernel1(x);
    } else {
        experts_backward(&x->acts, &x->d_w, &x->a, &x->w, kernel == 2 ? EXPERTS_LOOP : EXPERTS_GROUPED, x->E, x->K,
                         x->C, x->F, 0);
    }
    permute_backward(x->d_inp, x->acts.d_expert_in, x->a.slot_row, x->N, x->K, x->C);
}

enum Load { EVEN, NONE, ALL }; // a random choice; one where expert 0 gets nobody; one where it gets everybody

static void choose_experts(int* indices, size_t N, int E, int K, enum Load load) {
    // K different experts a token
    for (size_t n = 0; n < N; n++) {
        int first = load == NONE ? 1 : 0, choices = E - first;
        int start = load == ALL ? 0 : (int)(hash64(n) % (uint64_t)choices);
        int step = 1 + (int)(hash64(n + 12345) % (uint64_t)(choices > 2 ? choices - 1 : 1));
        while (choices % step == 0 && step > 1) { step--; } // K steps must not come back
        for (int k = 0; k < K; k++) { indices[n * K + k] = first + (start + k * step) % choices; }
    }
}

static Experts experts_create(size_t N, size_t C, size_t F, int E, int K, enum Load load, bool bf16) {
    size_t R = N * K, gate_up = E * 2 * F * C, down = E * C * F;
    size_t room = R + 1; // an expert without rows at the end still has a place
    Experts x;
    memset(&x, 0, sizeof(x));
    x.N = N; x.C = C; x.F = F; x.E = E; x.K = K;
    x.w.gate_up_proj = random_floats(gate_up, 2 / sqrtf((float)C), 1);
    x.w.down_proj = random_floats(down, 2 / sqrtf((float)F), 2);
    x.d_w.gate_up_proj = fresh(gate_up);
    x.d_w.down_proj = fresh(down);
    x.out = fresh(N * C);
    x.d_inp = fresh(N * C);
    LayerActs* a = &x.a;
    a->mlp_norm = random_floats(N * C, 2, 3);
    a->router_weights = random_floats(R, 1, 4);
    int* ints = (int*)dev_alloc((3 * R + 3 * (size_t)E + 1) * sizeof(int));
    a->router_indices = ints; a->row_slot = ints + R; a->slot_row = ints + 2 * R; a->tokens_per_expert = ints + 3 * R;
    a->expert_offsets = a->tokens_per_expert + E; a->expert_order = a->expert_offsets + E + 1;
    a->expert_in = fresh(room * C); a->expert_out = fresh(room * C);
    a->gate_up = fresh(room * 2 * F); a->expert_act = fresh(room * F);
    x.acts.d_residual = random_floats(N * C, 1, 5);
    x.acts.d_expert_out = fresh(room * C); x.acts.d_expert_in = fresh(room * C); x.acts.d_router_weights = fresh(R);
    x.acts.d_gate_up = fresh(room * 2 * F); x.acts.d_expert_act = fresh(room * F);
    choose_experts(a->router_indices, N, E, K, load);
    route_rows(a->tokens_per_expert, a->expert_offsets, a->expert_order, a->row_slot, a->slot_row, a->router_indices, N,
               E, K);
    if (bf16) { // what goes into products
        in_bf16(x.w.gate_up_proj, gate_up);
        in_bf16(x.w.down_proj, down);
        in_bf16(a->mlp_norm, N * C);
        in_bf16(a->expert_in, room * C);
        in_bf16(a->expert_act, room * F);
        in_bf16(x.acts.d_expert_out, room * C);
        in_bf16(x.acts.d_gate_up, room * 2 * F);
    }
    return x;
}

typedef struct {
    double *out, *d_inp, *d_router_weights, *d_gate_up_proj, *d_down_proj;
} Reference;

static void reference_slot(const Experts* x, Reference* r, size_t slot) {
    // a token at one of its experts, forward and backward, in double
    size_t C = x->C, F = x->F, n = slot / x->K, e = (size_t)x->a.router_indices[slot];
    const float *inp = x->a.mlp_norm + n * C, *d_out = x->acts.d_residual + n * C;
    const float *gate_proj = x->w.gate_up_proj + e * 2 * F * C, *up_proj = gate_proj + F * C;
    const float* down_proj = x->w.down_proj + e * C * F;
    double* d_gate_up_proj = r->d_gate_up_proj + e * 2 * F * C;
    double weight = x->a.router_weights[slot];
    for (size_t f = 0; f < F; f++) {
        double gate = 0, up = 0, d_act = 0, through = 0; // through: this f's part of d_out . expert_out
        for (size_t c = 0; c < C; c++) {
            gate += (double)gate_proj[f * C + c] * inp[c];
            up += (double)up_proj[f * C + c] * inp[c];
        }
        double s = 1 / (1 + exp(-gate)), act = gate * s * up;
        for (size_t c = 0; c < C; c++) {
            r->out[n * C + c] += weight * down_proj[c * F + f] * act;
            through += d_out[c] * (down_proj[c * F + f] * act);
            d_act += weight * d_out[c] * down_proj[c * F + f];
            r->d_down_proj[e * C * F + c * F + f] += weight * d_out[c] * act;
        }
        double d_gate = d_act * up * (s + gate * s * (1 - s)), d_up = d_act * gate * s;
        for (size_t c = 0; c < C; c++) {
            d_gate_up_proj[f * C + c] += d_gate * inp[c];
            d_gate_up_proj[(F + f) * C + c] += d_up * inp[c];
            r->d_inp[n * C + c] += d_gate * gate_proj[f * C + c] + d_up * up_proj[f * C + c];
        }
        r->d_router_weights[slot] += through;
    }
}

void check_shape(int kernel, size_t N, size_t C, size_t F, int E, int K, enum Load load) {
    Experts x = experts_create(N, C, F, E, K, load, kernel == BF16);
    size_t gate_up = E * 2 * F * C, down = E * C * F, R = N * K;
    Reference r = {zeros(N * C), zeros(N * C), zeros(R), zeros(gate_up), zeros(down)};
    for (size_t slot = 0; slot < R; slot++) { reference_slot(&x, &r, slot); }
    forward(kernel, &x);
    backward(kernel, &x);
    Result results[5] = {{"out", x.out, r.out, N * C},
                         {"d_inp", x.d_inp, r.d_inp, N * C},
                         {"d_router_weights", x.acts.d_router_weights, r.d_router_weights, R},
                         {"d_gate_up_proj", x.d_w.gate_up_proj, r.d_gate_up_proj, gate_up},
                         {"d_down_proj", x.d_w.down_proj, r.d_down_proj, down}};
    // sums of up to 2 max(C, F, N) products in any order, two one after the other
    size_t most = C > F ? C : F;
    double tolerance = 2e-7 * sqrt(2.0 * (double)(most > N ? most : N) + 64);
    char what[96];
    snprintf(what, sizeof(what), "N %zu C %zu F %zu E %d K %d%s", N, C, F, E, K,
             load == EVEN ? "" : load == NONE ? ", nobody to expert 0" : ", all to expert 0");
    check_results(results, 5, kernel, tolerance, what);
    free_arrays();
}

void check_all(int kernel) {
    check_shape(kernel, 1, 8, 8, 2, 1, EVEN); // one token: an expert without
    check_shape(kernel, 5, 24, 40, 4, 2, NONE);
    check_shape(kernel, 9, 17, 13, 3, 2, ALL); // sizes off every vector
    check_shape(kernel, 33, 48, 24, 8, 8, EVEN); // everybody everywhere
    check_shape(kernel, 130, 64, 48, 16, 2, EVEN);
    check_shape(kernel, 64, 40, 32, 1, 1, ALL); // a dense layer in disguise
    if (!dev_benchmarks()) { return; }
    check_shape(kernel, 256, 256, 256, 8, 2, EVEN); // S, M, SEED1 with few tokens: the reference is loops
    check_shape(kernel, 64, 512, 512, 16, 2, EVEN);
    check_shape(kernel, 32, 896, 512, 16, 2, EVEN);
}

void bench_all(void) {
    for (size_t s = 0; s < NUM_SIZES; s++) {
        size_t N = sizes[s].B * sizes[s].T, C = (size_t)sizes[s].hidden, F = (size_t)sizes[s].ffn;
        Experts x = experts_create(N, C, F, sizes[s].experts, 2, EVEN, false);
        Experts x_bf16 = experts_create(N, C, F, sizes[s].experts, 2, EVEN, dev_runs(BF16));
        Bench b = {"", 1, 3, 6.0 * 2 * N * C * F, 0, forward, NULL, &x, &x_bf16};
        snprintf(b.what, sizeof(b.what), "%s forward", sizes[s].name);
        bench(&b);
        forward(3, &x); // what backward needs, whichever kernel is timed
        forward(3, &x_bf16);
        b.run = backward;
        b.flops *= 2;
        snprintf(b.what, sizeof(b.what), "%s backward", sizes[s].name);
        bench(&b);
        free_arrays();
    }
}

int main(int argc, char** argv) { return dev_main(argc, argv, NUM_KERNELS, BF16, check_all, bench_all); }
