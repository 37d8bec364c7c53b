// test_bf16.c: --precision bf16. Products are those of the rounded operands, everything else is what it is in fp32, and no copy in
// bf16 is ever older than the numbers it is of: all copies are poisoned at the start.
#define TESTING
#include "../../train_moe_cpu.c"
#include "testing.h"

static uint64_t rng = 11;
static real uniform(void) { return (real)(2 * rng_uniform(&rng) - 1); }

static real* random_reals(size_t n) {
    real* x = (real*)mallocCheck(n * sizeof(real));
    for (size_t i = 0; i < n; i++) { x[i] = uniform(); }
    return x;
}

static MoEConfig test_config(void) { // a dense layer in the middle, GQA, sizes off every vector width
    MoEConfig c;
    config_preset(&c, "tiny");
    c.vocab_size = 97; c.hidden_size = 40; c.num_hidden_layers = 3; c.num_attention_heads = 6; c.num_key_value_heads = 2; c.head_dim = 8;
    c.num_experts = 7; c.num_experts_per_tok = 3; c.moe_intermediate_size = 24; c.intermediate_size = 50; c.tie_word_embeddings = false;
    c.num_mlp_only_layers = 1; c.mlp_only_layers[0] = 1; c.initializer_range = 0.2; c.bos_token_id = c.eos_token_id = -1;
    return c;
}

static void poisoned_model(Model* m, const MoEConfig* c, Switches s, size_t B, size_t T) {
    int before = num_bf16_copies;
    model_create(m, c, s, B, T, true);
    for (int i = before; i < num_bf16_copies; i++) {
        if (bf16_copies[i].spread == 1) { memset(bf16_copies[i].copy, 0xff, bf16_copies[i].count * sizeof(uint16_t)); }
    }
    model_init(m, 3);
    optimizer_init(m);
}

static double relative_l2(const real* a, const real* b, size_t n) {
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(diff / norm);
}

static Switches switches_for(bool bf16) {
    Switches s = {ATTENTION_FLASH, EXPERTS_GROUPED, true, 0.05, 0.01, bf16};
    return s;
}

enum { B = 2, T = 70, N = B * T };

// Random tokens, every seventh not predicted; the router is told where to send them, because rounding would change its mind.
typedef struct { int tokens[N], targets[N], indices[N * 3], doc_start[N]; int* forced[3]; } Data;

static Microbatch microbatch(Data* d, uint64_t seed, int V, int E) {
    for (int n = 0; n < N; n++) {
        d->tokens[n] = (int)(rng_next(&seed) % (uint64_t)V);
        d->targets[n] = n % 7 == 3 ? -100 : (int)(rng_next(&seed) % (uint64_t)V);
        d->doc_start[n] = n % T < 21 ? 0 : 21;
        for (int k = 0; k < 3; k++) { d->indices[n * 3 + k] = (n + k * 2) % E; }
    }
    for (int l = 0; l < 3; l++) { d->forced[l] = l == 1 ? NULL : d->indices; }
    Microbatch mb = {d->tokens, d->targets, d->doc_start, d->forced, N * 6 / 7, 1};
    return mb;
}

// ----------------------------------------------------------------------------
// rounding and products

static double bf16_value(uint16_t x) { return (double)bf16_to_f32(x); }

static void rounding_is_to_the_nearest_even_also_in_place(void) {
    float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, 3.3e38f, 1e-40f, 1.00390625f, 1.01171875f, -1.00390625f};
    size_t n = 3000, specials = sizeof(special) / sizeof(special[0]);
    real *x = random_reals(n), *same = random_reals(n);
    for (size_t i = 0; i < n; i++) { same[i] = x[i] = i < specials ? special[i] : x[i] * (real)pow(10, (double)(i % 40) - 20); }
    bf16_copy_add(x, n, false);
    bf16_copy_add(same, n, true);
    to_bf16_all(x, n);
    to_bf16(same, n);
    size_t spread;
    const uint16_t* got = bf16_of(x, &spread);
    CHECK(spread == 1 && bf16_of(x + 5, &spread) == got + 5 && bf16_of(x + n, &spread) == NULL && bf16_of(x - 1, &spread) == NULL);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof(bits));
        uint16_t low = (uint16_t)(bits >> 16), high = (uint16_t)(low + 1); // its neighbours, towards zero and away from it
        if (!isinf(x[i])) {
            double below = fabs((double)x[i] - bf16_value(low)), above = fabs(bf16_value(high) - (double)x[i]);
            if ((low & 0x7fff) == 0x7f7f) { above = below < ldexp(1, 119) ? INFINITY : 0; } // above the largest lies infinity
            low = below < above || (below == above && low % 2 == 0) ? low : high;
        }
        if (!CHECK(got[i] == low)) { break; }
    }
    CHECK(memcmp(got, same, n * sizeof(uint16_t)) == 0 && bf16_of(same, &spread) == (uint16_t*)same && spread == 2);
    bf16_copy_remove(x);
    bf16_copy_remove(same);
    CHECK(isnan(bf16_value(f32_to_bf16((float)NAN))));
    for (uint32_t bits = 0x7f800001u; bits > 0; bits = bits < 0x7fffffffu ? bits + 0x7ffu : bits == 0xffffffffu ? 0 : 0xffffffffu) {
        float nan;
        memcpy(&nan, &bits, sizeof(nan));
        CHECK(!isnan(nan) || isnan(bf16_value(f32_to_bf16(nan)))); // whatever its bits
    }
    free(x); free(same);
}

static void check_product(size_t M, size_t N_, size_t K, int mode, bool in_place, bool in_parallel) {
    // mode: bits for trans_a, trans_b, beta
    bool ta = mode & 1, tb = mode & 2;
    real beta = mode & 4 ? 1 : 0;
    size_t lda = (ta ? M : K) + M % 3, ldb = (tb ? K : N_) + N_ % 2, ldc = N_ + K % 2;
    size_t size_a = lda * (ta ? K : M), size_b = ldb * (tb ? N_ : K), size_c = ldc * M;
    real *a = random_reals(size_a), *b = random_reals(size_b), *c = random_reals(size_c), *want = random_reals(size_c);
    real *ra = random_reals(size_a), *rb = random_reals(size_b);
    for (size_t i = 0; i < size_a; i++) { ra[i] = bf16_to_f32(f32_to_bf16(a[i])); }
    for (size_t i = 0; i < size_b; i++) { rb[i] = bf16_to_f32(f32_to_bf16(b[i])); }
    for (size_t i = 0; i < size_c; i++) { c[i] = want[i] = beta == 0 ? (real)NAN : want[i]; }
    gemm_naive(ta, tb, M, N_, K, ra, lda, rb, ldb, beta, want, ldc);
    bf16_copy_add(a, size_a, in_place);
    bf16_copy_add(b, size_b, false);
    for (size_t i = 0; i < (ta ? K : M); i++) { to_bf16(a + i * lda, lda); } // row by row, as in_place has to be
    to_bf16_all(b, size_b);
    if (in_parallel) {
        #pragma omp parallel
        if (thread_num() == num_threads() - 1) { gemm(ta, tb, M, N_, K, a, lda, b, ldb, beta, c, ldc); }
    } else {
        gemm(ta, tb, M, N_, K, a, lda, b, ldb, beta, c, ldc);
    }
    for (size_t i = 0; i < M; i++) {
        for (size_t j = 0; j < N_; j++) { CHECK_NEAR(c[i * ldc + j], want[i * ldc + j], 1e-6 * (1 + sqrt((double)K))); }
    }
    bf16_copy_remove(a);
    bf16_copy_remove(b);
    free(a); free(b); free(c); free(want); free(ra); free(rb);
}

static void products_are_those_of_the_rounded_operands(void) {
    size_t sizes[][3] = {{1, 1, 1}, {1, 97, 40}, {64, 64, 64}, {33, 70, 257}, {130, 5, 16}, {3, 128, 1}, {200, 300, 100}};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (int mode = 0; mode < 8; mode++) {
            for (int how = 0; how < 4; how++) { check_product(sizes[s][0], sizes[s][1], sizes[s][2], mode, how & 1, how & 2); }
        }
    }
    real a[1] = {1}, b[1] = {1}, c[6] = {1, 2, 3, 4, 5, 6};
    bf16_copy_add(a, 1, false);
    bf16_copy_add(b, 1, false);
    gemm(true, false, 2, 3, 0, a, 2, b, 3, 1, c, 3); // an expert without tokens
    CHECK(c[0] == 1 && c[5] == 6);
    gemm(true, false, 2, 3, 0, a, 2, b, 3, 0, c, 3);
    CHECK(c[0] == 0 && c[5] == 0);
    bf16_copy_remove(a);
    bf16_copy_remove(b);
}

static void half_rounded_product(void) {
    real a[4] = {1, 2, 3, 4}, b[4] = {1, 2, 3, 4}, c[4];
    bf16_copy_add(a, 4, false);
    gemm(false, false, 2, 2, 2, a, 2, b, 2, 0, c, 2);
}

static void a_product_of_a_rounded_and_another_operand_is_refused(void) {
    EXPECT_FATAL(half_rounded_product(), "only one operand has a copy in bf16");
}

// ----------------------------------------------------------------------------
// the model

static void check_steps(Switches s, double at_least, double at_most) {
    // three steps on other data each, from the same weights: losses and gradients against fp32
    MoEConfig c = test_config();
    Data data;
    Model fp32, bf16;
    Options opt;
    options_defaults(&opt, PROGRAM_CPU);
    s.bf16 = false;
    poisoned_model(&fp32, &c, s, B, T);
    s.bf16 = true;
    poisoned_model(&bf16, &c, s, B, T);
    for (int step = 1; step <= 3; step++) {
        Microbatch mb = microbatch(&data, (uint64_t)step, c.vocab_size, c.num_experts);
        double a = model_forward_backward(&fp32, &mb, true).loss, b = model_forward_backward(&bf16, &mb, true).loss;
        CHECK_NEAR(a, b, 1e-2);
        double off = relative_l2(bf16.grads, fp32.grads, fp32.table.num_parameters);
        CHECK(off >= at_least);
        CHECK(off <= at_most);
        for (size_t i = 0; i < fp32.table.count; i++) {
            const ParamTensor* t = &fp32.table.tensors[i];
            double of_tensor = relative_l2(bf16.grads + t->offset, fp32.grads + t->offset, t->numel);
            if (!test_check(of_tensor <= 0.15, __FILE__, __LINE__, "step %d, gradient of %s: off by %g", step, t->name, of_tensor)) { break; }
        }
        for (int i = 0; i < 2; i++) {
            Model* m = i == 0 ? &fp32 : &bf16;
            model_update(m, step, 1e-2, model_grad_norm(m), &opt);
        }
        memcpy(bf16.params, fp32.params, fp32.table.num_parameters * sizeof(real)); // small differences would grow
        to_bf16_weights(&bf16);
    }
    model_free(&fp32); model_free(&bf16);
}

static void steps_are_those_of_fp32_up_to_rounding(void) { check_steps(switches_for(true), 1e-3, 3e-2); }

static void the_plain_switches_round_the_same_numbers(void) {
    Switches s = {ATTENTION_NAIVE, EXPERTS_LOOP, false, 0.05, 0.01, true};
    check_steps(s, 1e-3, 3e-2);
}

static void the_router_is_fp32(void) {
    MoEConfig c = test_config();
    Data data;
    Model m;
    poisoned_model(&m, &c, switches_for(true), B, T);
    Microbatch mb = microbatch(&data, 1, c.vocab_size, c.num_experts);
    model_forward_backward(&m, &mb, true);
    const LayerActs* a = &m.acts.layers[0]; // the layer that backward comes to last: its gradients are still there
    size_t C = (size_t)c.hidden_size, E = (size_t)c.num_experts;
    for (size_t e = 0; e < E; e++) {
        for (size_t n = 0; n < N; n++) {
            double sum = 0;
            for (size_t i = 0; i < C; i++) { sum += (double)a->mlp_norm[n * C + i] * m.w.layers[0].router[e * C + i]; }
            CHECK_NEAR(a->router_logits[n * E + e], sum, 1e-5);
        }
        for (size_t i = 0; i < C; i++) {
            double sum = 0, size = 0;
            for (size_t n = 0; n < N; n++) {
                double term = (double)m.acts.d_router_logits[n * E + e] * a->mlp_norm[n * C + i];
                sum += term;
                size += fabs(term);
            }
            CHECK_NEAR(m.d_w.layers[0].router[e * C + i], sum, 1e-5 * size);
        }
    }
    model_free(&m);
}

static void check_copies_of_weights(const Model* m) {
    // every weight that is in a product has a fresh copy, the embedding has none, and the weights themselves are not rounded
    size_t fine = 0, spread = 0;
    for (size_t i = 0; i < m->table.num_parameters; i++) {
        const uint16_t* copy = bf16_of(m->params + i, &spread);
        bool embedding = i < (size_t)m->config.vocab_size * (size_t)m->config.hidden_size && !m->config.tie_word_embeddings;
        if (!CHECK(embedding ? copy == NULL : copy != NULL && *copy == f32_to_bf16(m->params[i]))) { return; }
        fine += m->params[i] != bf16_to_f32(f32_to_bf16(m->params[i]));
    }
    CHECK(fine > m->table.num_parameters * 9 / 10);
}

static void copies_of_weights_follow_every_update(void) {
    for (int variant = 0; variant < 4; variant++) {
        MoEConfig c = test_config();
        c.tie_word_embeddings = variant & 1;
        Data data;
        Model m;
        Options opt;
        options_defaults(&opt, PROGRAM_CPU);
        Switches s = switches_for(true);
        s.fused_optimizer = variant & 2;
        poisoned_model(&m, &c, s, B, T);
        check_copies_of_weights(&m);
        for (int step = 1; step <= 2; step++) {
            Microbatch mb = microbatch(&data, (uint64_t)step, c.vocab_size, c.num_experts);
            model_forward_backward(&m, &mb, true);
            model_update(&m, step, 1e-2, model_grad_norm(&m), &opt);
            check_copies_of_weights(&m);
        }
        model_free(&m);
    }
}

static void an_expert_without_tokens_has_a_gradient_of_zero(void) {
    MoEConfig c = test_config();
    Data data;
    Model m;
    poisoned_model(&m, &c, switches_for(true), B, T);
    memset(m.grads, 0xff, m.table.num_parameters * sizeof(real));
    Microbatch mb = microbatch(&data, 1, c.vocab_size, c.num_experts);
    for (int i = 0; i < N * 3; i++) { data.indices[i] = i % 3; }
    model_forward_backward(&m, &mb, true);
    for (size_t i = 0; i < m.table.count; i++) {
        const ParamTensor* t = &m.table.tensors[i];
        for (size_t j = 0; t->expert >= 3 && j < t->numel; j++) { CHECK(m.grads[t->offset + j] == 0); }
    }
    CHECK(isfinite(model_grad_norm(&m)));
    model_free(&m);
}

static void a_step_has_the_same_bits_twice_and_microbatches_add_up(void) {
    MoEConfig c = test_config();
    Data data;
    Model one, two;
    poisoned_model(&one, &c, switches_for(true), B, T);
    poisoned_model(&two, &c, switches_for(true), B, T);
    size_t n = one.table.num_parameters;
    Microbatch mb = microbatch(&data, 1, c.vocab_size, c.num_experts);
    CHECK(model_forward_backward(&one, &mb, true).loss == model_forward_backward(&two, &mb, true).loss);
    CHECK(memcmp(one.grads, two.grads, n * sizeof(real)) == 0);
    model_forward_backward(&two, &mb, false); // once more, added
    for (size_t i = 0; i < n; i++) { one.grads[i] *= 2; }
    CHECK_NEAR(relative_l2(two.grads, one.grads, n), 0, 1e-6);
    model_free(&one); model_free(&two);
}

static void a_model_in_fp32_does_not_notice_one_in_bf16(void) {
    MoEConfig c = test_config();
    Data data;
    Model alone, fp32, bf16;
    Microbatch mb = microbatch(&data, 1, c.vocab_size, c.num_experts);
    CHECK(num_bf16_copies == 0);
    poisoned_model(&alone, &c, switches_for(false), B, T);
    CHECK(num_bf16_copies == 0);
    model_forward_backward(&alone, &mb, true);
    poisoned_model(&bf16, &c, switches_for(true), B, T);
    poisoned_model(&fp32, &c, switches_for(false), B, T);
    model_forward_backward(&bf16, &mb, true);
    model_forward_backward(&fp32, &mb, true);
    CHECK(memcmp(alone.grads, fp32.grads, alone.table.num_parameters * sizeof(real)) == 0);
    model_free(&alone); model_free(&bf16); model_free(&fp32);
    CHECK(num_bf16_copies == 0);
}

static void decoding_with_a_cache_equals_forward(void) {
    MoEConfig c = test_config();
    size_t V = (size_t)c.vocab_size;
    Data data;
    Model m;
    Decoder decoder;
    poisoned_model(&m, &c, switches_for(true), 1, T);
    decoder_create(&decoder, &m);
    Microbatch mb = microbatch(&data, 1, c.vocab_size, c.num_experts);
    mb.doc_start = NULL;
    mb.forced_indices = NULL;
    real *logits = random_reals(T * V), *decoded = random_reals(T * V);
    model_forward(&m, &mb);
    model_loss(&m, &mb, false, 0, logits);
    for (size_t t = 0; t < T; t++) {
        decode_token(&m, &decoder, data.tokens[t], true);
        for (size_t v = 0; v < V; v++) { decoded[t * V + v] = decoder.logits[v]; }
    }
    double off = relative_l2(decoded, logits, T * V);
    CHECK_NEAR(off, 0, 1e-2); // rounding of numbers that differ in their last bits
    free(logits); free(decoded);
    decoder_free(&decoder);
    model_free(&m);
    CHECK(num_bf16_copies == 0);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(a_product_of_a_rounded_and_another_operand_is_refused);
    RUN(rounding_is_to_the_nearest_even_also_in_place);
    if (bf16_product_missing()) {
        printf("     the rest is left out: %s\n", bf16_product_missing());
        return test_summary();
    }
    RUN(products_are_those_of_the_rounded_operands);
    RUN(steps_are_those_of_fp32_up_to_rounding);
    RUN(the_plain_switches_round_the_same_numbers);
    RUN(the_router_is_fp32);
    RUN(copies_of_weights_follow_every_update);
    RUN(an_expert_without_tokens_has_a_gradient_of_zero);
    RUN(a_step_has_the_same_bits_twice_and_microbatches_add_up);
    RUN(a_model_in_fp32_does_not_notice_one_in_bf16);
    RUN(decoding_with_a_cache_equals_forward);
    return test_summary();
}
