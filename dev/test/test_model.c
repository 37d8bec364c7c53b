// test_model.c: what must be equal is equal. The same gradient however the work is split, whichever switch is on; poisoned memory
// leaves no trace; the corner cases of the ops (empty and overfull experts, ties, NaNs, sizes beyond 2^31).
#define TESTING
#include "../../train_moe_cpu.c"
#include "testing.h"
#include <sys/mman.h>

static MoEConfig test_config(void) {
    MoEConfig c;
    config_preset(&c, "tiny");
    c.vocab_size = 97; c.hidden_size = 40; c.num_hidden_layers = 3; c.num_attention_heads = 6; c.num_key_value_heads = 2; c.head_dim = 8;
    c.num_experts = 7; c.num_experts_per_tok = 3; c.moe_intermediate_size = 24; c.intermediate_size = 50; c.tie_word_embeddings = false;
    c.num_mlp_only_layers = 1; c.mlp_only_layers[0] = 1; c.initializer_range = 0.2; c.bos_token_id = c.eos_token_id = -1;
    return c;
}

static Switches default_switches(void) {
    Switches s = {ATTENTION_FLASH, EXPERTS_GROUPED, true, 0.05, 0.01, false};
    return s;
}

// Tokens and targets of B rows, every fourth target of the first row ignored and all but five of the second.
typedef struct { int *tokens, *targets; double counted; } Data;

static Data test_data(size_t B, size_t T, int V) {
    Data d = {(int*)mallocCheck(B * T * sizeof(int)), (int*)mallocCheck(B * T * sizeof(int)), 0};
    uint64_t rng = 7;
    for (size_t n = 0; n < B * T; n++) {
        d.tokens[n] = (int)(rng_next(&rng) % (uint64_t)V);
        d.targets[n] = (int)(rng_next(&rng) % (uint64_t)V);
        if ((n / T == 0 && n % 4 == 1) || (n / T == 1 && n % T >= 5)) { d.targets[n] = -100; }
        d.counted += d.targets[n] >= 0;
    }
    return d;
}

static void data_free(Data* d) { free(d->tokens); free(d->targets); }

static Microbatch rows_of(const Data* d, size_t T, size_t first, size_t rows, size_t all) {
    Microbatch mb = {d->tokens + first * T, d->targets + first * T, NULL, NULL, d->counted, (double)rows / (double)all};
    return mb;
}

// A model with poison in all memory that a step must write before it reads.
static void poisoned_model(Model* m, const MoEConfig* c, Switches s, size_t B, size_t T) {
    model_create(m, c, s, B, T, true);
    model_init(m, 3);
    optimizer_init(m);
    Acts probe = {0};
    probe.layers = (LayerActs*)callocCheck((size_t)c->num_hidden_layers, sizeof(LayerActs));
    MemoryPlan plan = memory_plan(&probe, c, &m->table, &s, B, T, true);
    free(probe.layers);
    memset(m->acts.layers[0].residual_attn, 0xff, plan.activations + plan.logits + plan.backward);
    memset(m->grads, 0xff, plan.gradients);
}

static double relative_l2(const real* a, const real* b, size_t n) {
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(diff / norm);
}

// loss and gradients of B rows of T, in microbatches of `rows` rows
static double gradients_in_pieces(real* grads, const MoEConfig* c, Switches s, const Data* d, size_t B, size_t T, size_t rows) {
    Model m;
    poisoned_model(&m, c, s, rows, T);
    double loss = 0;
    for (size_t first = 0; first < B; first += rows) {
        Microbatch mb = rows_of(d, T, first, rows, B);
        loss += model_forward_backward(&m, &mb, first == 0).loss;
    }
    memcpy(grads, m.grads, m.table.num_parameters * sizeof(real));
    model_free(&m);
    return loss;
}

// the same loss and gradients with other switches, up to rounding
static void check_switches(Switches other, double tolerance) {
    MoEConfig c = test_config();
    ParamTable table;
    param_table_build(&table, &c);
    Data d = test_data(3, 70, c.vocab_size);
    real *one = (real*)mallocCheck(table.num_parameters * sizeof(real)), *two = (real*)mallocCheck(table.num_parameters * sizeof(real));
    double loss_one = gradients_in_pieces(one, &c, default_switches(), &d, 3, 70, 3);
    double loss_two = gradients_in_pieces(two, &c, other, &d, 3, 70, 3);
    CHECK_NEAR(loss_one, loss_two, tolerance * fabs(loss_one));
    CHECK_NEAR(relative_l2(two, one, table.num_parameters), 0, tolerance);
    free(one); free(two);
    data_free(&d);
    param_table_free(&table);
}

// ----------------------------------------------------------------------------
// splits

static void accumulation_splits_give_one_gradient(void) {
    // unequal numbers of ignored targets; without the balance loss, which is not linear in the batch
    MoEConfig c = test_config();
    ParamTable table;
    param_table_build(&table, &c);
    Switches s = default_switches();
    s.aux_loss_coef = 0;
    Data d = test_data(4, 33, c.vocab_size);
    size_t n = table.num_parameters;
    real *whole = (real*)mallocCheck(n * sizeof(real)), *split = (real*)mallocCheck(n * sizeof(real));
    double loss = gradients_in_pieces(whole, &c, s, &d, 4, 33, 4);
    for (size_t rows = 1; rows <= 2; rows++) {
        CHECK_NEAR(gradients_in_pieces(split, &c, s, &d, 4, 33, rows), loss, 1e-6 * loss);
        CHECK_NEAR(relative_l2(split, whole, n), 0, 2e-6);
    }
    free(whole); free(split);
    data_free(&d);
    param_table_free(&table);
}

static void documents_are_as_separate_rows(void) {
    // two documents of 20 and 45 tokens in one row, against a batch of the two padded rows
    MoEConfig c = test_config();
    Switches s = default_switches();
    s.aux_loss_coef = 0; // counts padding, too
    size_t T = 65, first = 20, n;
    Data d = test_data(1, T, c.vocab_size);
    Data rows = test_data(2, 45, c.vocab_size);
    int doc_start[65];
    rows.counted = d.counted;
    for (size_t t = 0; t < T; t++) { doc_start[t] = t < first ? 0 : (int)first; }
    for (size_t t = 0; t < 45; t++) {
        rows.tokens[t] = d.tokens[t < first ? t : 0];
        rows.targets[t] = t < first ? d.targets[t] : -100;
        rows.tokens[45 + t] = d.tokens[first + t];
        rows.targets[45 + t] = d.targets[first + t];
    }
    Model packed, apart;
    poisoned_model(&packed, &c, s, 1, T);
    poisoned_model(&apart, &c, s, 2, 45);
    Microbatch mb = rows_of(&d, T, 0, 1, 1), mb_apart = rows_of(&rows, 45, 0, 2, 2);
    mb.doc_start = doc_start;
    n = packed.table.num_parameters;
    double loss = model_forward_backward(&packed, &mb, true).loss;
    CHECK_NEAR(model_forward_backward(&apart, &mb_apart, true).loss, loss, 1e-6 * loss);
    CHECK_NEAR(relative_l2(apart.grads, packed.grads, n), 0, 5e-6);
    model_free(&packed); model_free(&apart);
    data_free(&d); data_free(&rows);
}

static void tokens_of_another_document_change_no_bit(void) {
    MoEConfig c = test_config();
    size_t T = 30, N = 30, V = (size_t)c.vocab_size;
    Data d = test_data(1, T, c.vocab_size);
    int doc_start[30];
    for (size_t t = 0; t < T; t++) { doc_start[t] = t < 12 ? 0 : 12; }
    Model m;
    poisoned_model(&m, &c, default_switches(), 1, T);
    real *before = (real*)mallocCheck(N * V * sizeof(real)), *after = (real*)mallocCheck(N * V * sizeof(real));
    for (int masked = 0; masked < 2; masked++) {
        Microbatch mb = rows_of(&d, T, 0, 1, 1);
        mb.doc_start = masked ? doc_start : NULL;
        model_forward(&m, &mb);
        model_loss(&m, &mb, false, 0, before);
        d.tokens[4] = (d.tokens[4] + 1) % c.vocab_size;
        model_forward(&m, &mb);
        model_loss(&m, &mb, false, 0, after);
        bool same = memcmp(before + 12 * V, after + 12 * V, 18 * V * sizeof(real)) == 0;
        CHECK(same == (masked == 1));
    }
    free(before); free(after);
    model_free(&m);
    data_free(&d);
}

// ----------------------------------------------------------------------------
// switches

static void flash_attention_equals_naive(void) {
    Switches s = default_switches();
    s.attention = ATTENTION_NAIVE;
    check_switches(s, 2e-6);
}

static void grouped_experts_equal_the_loop(void) {
    Switches s = default_switches();
    s.experts = EXPERTS_LOOP;
    check_switches(s, 2e-6);
}

static void an_overfull_expert_takes_the_other_path_to_the_same_result(void) {
    // force everything onto experts 0..2: more than a thread's share each, so grouped falls back to one after another
    MoEConfig c = test_config();
    Data d = test_data(2, 20, c.vocab_size);
    int* forced[3];
    for (int l = 0; l < 3; l++) {
        forced[l] = (int*)mallocCheck(40 * 3 * sizeof(int));
        for (int i = 0; i < 120; i++) { forced[l][i] = i % 3; }
    }
    Model one, two;
    Switches s = default_switches();
    poisoned_model(&one, &c, s, 2, 20);
    s.experts = EXPERTS_LOOP;
    poisoned_model(&two, &c, s, 2, 20);
    Microbatch mb = rows_of(&d, 20, 0, 2, 2);
    mb.forced_indices = forced;
    double loss = model_forward_backward(&one, &mb, true).loss;
    CHECK_NEAR(model_forward_backward(&two, &mb, true).loss, loss, 1e-6 * loss);
    CHECK_NEAR(relative_l2(two.grads, one.grads, one.table.num_parameters), 0, 2e-6);
    for (size_t i = 0; i < one.table.count; i++) { // an expert without tokens: exactly zero, though its memory was poisoned
        const ParamTensor* t = &one.table.tensors[i];
        for (size_t j = 0; t->expert >= 3 && j < t->numel; j++) { CHECK(one.grads[t->offset + j] == 0); }
    }
    for (int l = 0; l < 3; l++) { free(forced[l]); }
    model_free(&one); model_free(&two);
    data_free(&d);
}

static void fused_optimizer_equals_the_simple_one(void) {
    MoEConfig c = test_config();
    Data d = test_data(2, 20, c.vocab_size);
    Options opt;
    options_defaults(&opt, PROGRAM_CPU);
    Model models[2];
    for (int i = 0; i < 2; i++) {
        Switches s = default_switches();
        s.fused_optimizer = i == 0;
        poisoned_model(&models[i], &c, s, 2, 20);
        Microbatch mb = rows_of(&d, 20, 0, 2, 2);
        for (int step = 1; step <= 5; step++) {
            model_forward_backward(&models[i], &mb, true);
            model_update(&models[i], step, 1e-3, model_grad_norm(&models[i]), &opt);
        }
    }
    CHECK_NEAR(relative_l2(models[0].params, models[1].params, models[0].table.num_parameters), 0, 1e-6);
    for (int i = 0; i < 2; i++) { model_free(&models[i]); }
    data_free(&d);
}

static void decoding_with_a_cache_equals_forward(void) {
    MoEConfig c = test_config();
    size_t T = 23, V = (size_t)c.vocab_size;
    Data d = test_data(1, T, c.vocab_size);
    Model m;
    Decoder decoder;
    poisoned_model(&m, &c, default_switches(), 1, T);
    decoder_create(&decoder, &m);
    real* logits = (real*)mallocCheck(T * V * sizeof(real));
    Microbatch mb = rows_of(&d, T, 0, 1, 1);
    model_forward(&m, &mb);
    model_loss(&m, &mb, false, 0, logits);
    for (size_t t = 0; t < T; t++) {
        decode_token(&m, &decoder, d.tokens[t], true);
        for (size_t v = 0; v < V; v++) { CHECK_NEAR(decoder.logits[v], logits[t * V + v], 2e-5); }
    }
    free(logits);
    decoder_free(&decoder);
    model_free(&m);
    data_free(&d);
}

// ----------------------------------------------------------------------------
// determinism

static void same_seed_gives_the_same_bits_for_any_number_of_threads(void) {
    // initial weights on any number of threads; a whole step on the same number
    MoEConfig c = test_config();
    Data d = test_data(2, 40, c.vocab_size);
    Microbatch mb = rows_of(&d, 40, 0, 2, 2);
    Model models[3];
    for (int i = 0; i < 3; i++) {
#ifdef _OPENMP
        int threads = num_threads();
        if (i == 2) { omp_set_num_threads(threads == 1 ? 2 : 1); }
#endif
        poisoned_model(&models[i], &c, default_switches(), 2, 40);
#ifdef _OPENMP
        omp_set_num_threads(threads);
#endif
    }
    size_t bytes = models[0].table.num_parameters * sizeof(real);
    CHECK(memcmp(models[0].params, models[2].params, bytes) == 0);
    double loss = model_forward_backward(&models[0], &mb, true).loss;
    CHECK(model_forward_backward(&models[1], &mb, true).loss == loss);
    CHECK(memcmp(models[0].grads, models[1].grads, bytes) == 0);
    CHECK(model_grad_norm(&models[0]) == model_grad_norm(&models[1]));
    for (int i = 0; i < 3; i++) { model_free(&models[i]); }
    data_free(&d);
}

static void validation_before_a_step_changes_nothing(void) {
    MoEConfig c = test_config();
    Data d = test_data(2, 40, c.vocab_size);
    Microbatch mb = rows_of(&d, 40, 0, 2, 2);
    Model plain, validated;
    poisoned_model(&plain, &c, default_switches(), 2, 40);
    poisoned_model(&validated, &c, default_switches(), 2, 40);
    model_evaluate(&validated, &mb);
    Losses a = model_forward_backward(&plain, &mb, true), b = model_forward_backward(&validated, &mb, true);
    CHECK(a.loss == b.loss && a.aux_loss == b.aux_loss);
    CHECK(memcmp(plain.grads, validated.grads, plain.table.num_parameters * sizeof(real)) == 0);
    model_free(&plain); model_free(&validated);
    data_free(&d);
}

static void a_step_has_the_same_loss_for_the_same_rows_at_any_batch_size(void) {
    MoEConfig c = test_config();
    size_t sizes[] = {1, 2, 3, 5, 8, 12, 16, 17}, T = 17, V = (size_t)c.vocab_size;
    Data d = test_data(17, T, c.vocab_size);
    real* first = (real*)mallocCheck(T * V * sizeof(real));
    real* logits = (real*)mallocCheck(17 * T * V * sizeof(real));
    for (int i = 0; i < 8; i++) {
        Model m;
        poisoned_model(&m, &c, default_switches(), sizes[i], T);
        Microbatch mb = rows_of(&d, T, 0, sizes[i], sizes[i]);
        model_forward(&m, &mb);
        model_loss(&m, &mb, false, 0, logits);
        if (i == 0) { memcpy(first, logits, T * V * sizeof(real)); }
        CHECK_NEAR(relative_l2(logits, first, T * V), 0, 2e-6);
        model_free(&m);
    }
    free(first); free(logits);
    data_free(&d);
}

// ----------------------------------------------------------------------------
// ops at their edges

static void gemm_equals_its_definition(void) {
    // all transposes, odd sizes, beta 0 over NaNs, beta 1, and K = 0, which must clear (beta 0) or keep (beta 1)
    size_t sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {17, 1, 33}, {1, 31, 2}, {64, 9, 65}, {5, 6, 0}};
    uint64_t rng = 5;
    for (int shape = 0; shape < 6; shape++) {
        size_t M = sizes[shape][0], N = sizes[shape][1], K = sizes[shape][2];
        real *a = (real*)mallocCheck((M * K + 1) * sizeof(real)), *b = (real*)mallocCheck((K * N + 1) * sizeof(real));
        real *c = (real*)mallocCheck(M * N * sizeof(real)), *expected = (real*)mallocCheck(M * N * sizeof(real));
        for (size_t i = 0; i < M * K; i++) { a[i] = rng_uniform(&rng) - 0.5f; }
        for (size_t i = 0; i < K * N; i++) { b[i] = rng_uniform(&rng) - 0.5f; }
        for (int mode = 0; mode < 8; mode++) {
            bool ta = mode & 1, tb = mode & 2;
            real beta = mode & 4 ? 1 : 0;
            for (size_t i = 0; i < M * N; i++) { c[i] = expected[i] = beta == 0 ? (real)NAN : 2; }
            gemm(ta, tb, M, N, K, a, ta ? M : K, b, tb ? K : N, beta, c, N);
            gemm_naive(ta, tb, M, N, K, a, ta ? M : K, b, tb ? K : N, beta, expected, N);
            for (size_t i = 0; i < M * N; i++) { CHECK_NEAR(c[i], expected[i], 1e-5); }
        }
        free(a); free(b); free(c); free(expected);
    }
}

static void exp_is_accurate_and_passes_nans_on(void) {
    double worst = 0;
    for (float x = -86.9f; x < 88; x += 0.00137f) {
        double e = fabs(exp_poly(x) / exp((double)x) - 1);
        worst = e > worst ? e : worst;
    }
    CHECK_NEAR(worst, 0, 2e-7);
    CHECK(exp_poly(0) == 1);
    CHECK(isnan(exp_poly(NAN)));
    CHECK(exp_poly(-INFINITY) < 1e-37 && exp_poly(-200) >= 0 && exp_poly(INFINITY) > 1e38);
}

static void cross_entropy_is_right_for_any_vocabulary_size_every_time(void) {
    size_t sizes[] = {1, 7, 8, 9, 255, 257, 512, 50257, 151936};
    uint64_t rng = 11;
    for (int s = 0; s < 9; s++) {
        size_t V = sizes[s];
        real *logits = (real*)mallocCheck(V * sizeof(real)), *work = (real*)mallocCheck(V * sizeof(real)), loss, again;
        for (size_t v = 0; v < V; v++) { logits[v] = 20 * rng_uniform(&rng) - 10; }
        int target = (int)(V - 1);
        double sum = 0;
        for (size_t v = 0; v < V; v++) { sum += exp((double)logits[v]); }
        memcpy(work, logits, V * sizeof(real));
        cross_entropy_row(&loss, work, target, V, 1, true);
        CHECK_NEAR(loss, log(sum) - logits[target], 1e-5);
        CHECK_NEAR(work[target], exp((double)logits[target]) / sum - 1, 1e-5);
        for (int i = 0; i < (V < 1000 ? 1000 : 3); i++) {
            memcpy(work, logits, V * sizeof(real));
            cross_entropy_row(&again, work, target, V, 1, true);
            CHECK(again == loss);
        }
        free(logits); free(work);
    }
}

static void large_logits_do_not_overflow_and_nan_stays_nan(void) {
    real logits[4] = {3000, -3000, 2999, 0}, loss;
    cross_entropy_row(&loss, logits, 2, 4, 1, true);
    CHECK_NEAR(loss, 1 + log(1 + exp(-1.0)), 1e-3); // exact up to float's spacing at 3000
    real broken[3] = {1, NAN, 2};
    cross_entropy_row(&loss, broken, 0, 3, 1, true);
    CHECK(isnan(loss) && isnan(broken[2]));
}

static void ties_go_to_the_lower_expert_and_nans_choose_valid_ones(void) {
    real probs[3][5] = {{0.2f, 0.3f, 0.3f, 0.1f, 0.1f}, {0.2f, 0.2f, 0.2f, 0.2f, 0.2f}, {NAN, NAN, NAN, NAN, NAN}}, weights[3 * 3];
    int indices[9];
    topk_forward(indices, weights, &probs[0][0], NULL, 3, 5, 3, true);
    CHECK(indices[0] == 1 && indices[1] == 2 && indices[2] == 0);
    CHECK(indices[3] == 0 && indices[4] == 1 && indices[5] == 2);
    CHECK(indices[6] != indices[7] && indices[7] != indices[8] && indices[6] != indices[8]);
    for (int i = 6; i < 9; i++) { CHECK(indices[i] >= 0 && indices[i] < 5 && isnan(weights[i])); }
    CHECK_NEAR(weights[0] + weights[1] + weights[2], 1, 1e-6);
}

static void rows_are_sorted_by_expert_and_keep_their_order(void) {
    // counts 5, 130, 0, 121: every row belongs to its expert's range, slots ascend inside it
    int indices[256], counts[4], offsets[5], order[4], row_slot[256], slot_row[256];
    for (int i = 0; i < 256; i++) { indices[i] = i < 121 ? 3 : i < 251 ? 1 : 0; }
    for (int i = 0; i < 128; i++) { int j = (i * 37) % 256, keep = indices[i]; indices[i] = indices[j]; indices[j] = keep; }
    route_rows(counts, offsets, order, row_slot, slot_row, indices, 256, 4, 1);
    CHECK(counts[0] == 5 && counts[1] == 130 && counts[2] == 0 && counts[3] == 121 && offsets[4] == 256);
    CHECK(order[0] == 1 && order[1] == 3 && order[2] == 0 && order[3] == 2);
    for (int e = 0; e < 4; e++) {
        for (int row = offsets[e]; row < offsets[e + 1]; row++) {
            CHECK(indices[row_slot[row]] == e && slot_row[row_slot[row]] == row);
            CHECK(row == offsets[e] || row_slot[row] > row_slot[row - 1]);
        }
    }
}

static void expert_counts_sum_to_all_slots(void) {
    MoEConfig c = test_config();
    Data d = test_data(2, 40, c.vocab_size);
    Model m;
    poisoned_model(&m, &c, default_switches(), 2, 40);
    Microbatch mb = rows_of(&d, 40, 0, 2, 2);
    model_forward_backward(&m, &mb, true);
    double slots = 0;
    for (int e = 0; e < c.num_experts; e++) { slots += m.stats.expert_count[e]; }
    CHECK(slots == 2.0 * 40 * c.num_experts_per_tok * 2 && m.stats.rows == 2.0 * 2 * 40); // two MoE layers, one dense
    CHECK(m.stats.z_sum > 0 && isfinite(m.stats.z_sum));
    model_free(&m);
    data_free(&d);
}

static void offsets_beyond_2_to_31_elements_reach_the_right_row(void) {
    // only the rows at the far end of a (R,C) buffer of 2.6e9 numbers are touched; the rest is never backed by memory
    size_t C = 1024, R = 2600000, bytes = R * C * sizeof(real);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    real* rows = (real*)mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    real* inp = (real*)mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (!CHECK(rows != MAP_FAILED && inp != MAP_FAILED)) { return; }
    int *row_slot = (int*)mallocCheck(R * sizeof(int)), *slot_row = (int*)mallocCheck(R * sizeof(int));
    for (size_t i = 0; i < R; i++) { row_slot[i] = slot_row[i] = (int)i; }
    for (size_t c = 0; c < C; c++) { inp[(R - 1) * C + c] = (real)c; }
    permute_forward(rows, inp, row_slot, R - 2, R, 1, C);
    CHECK(rows[(R - 1) * C + 77] == 77 && rows[(R - 2) * C + 77] == 0);
    real weight = 2, out[1024], d_weight = 0;
    combine_forward(out, rows, &weight, slot_row + R - 1, 1, 1, C);
    CHECK(out[77] == 154);
    real* weights = (real*)mmap(NULL, R * sizeof(real), PROT_READ | PROT_WRITE, flags, -1, 0);
    weights[R - 1] = 3;
    combine_backward(rows, weights, inp, rows, weights, row_slot, R - 1, R, 1, C); // d_router_weights over weights, rows in place
    d_weight = weights[R - 1];
    CHECK(rows[(R - 1) * C + 77] == 3 * 77 && d_weight > 3e8);
    munmap(rows, bytes); munmap(inp, bytes); munmap(weights, R * sizeof(real));
    free(row_slot); free(slot_row);
}

static void adamw_matches_a_scalar_loop_on_any_length(void) {
    // also: what is small beside the weight still moves it (fp32 weights are their own master copy)
    size_t lengths[] = {1, 31, 32, 33, 127, 129};
    for (int k = 0; k < 6; k++) {
        size_t n = lengths[k];
        real p[129], g[129], m[129], v[129];
        double ep[129], em[129], ev[129];
        uint64_t rng = 3;
        for (size_t i = 0; i < n; i++) {
            ep[i] = p[i] = rng_uniform(&rng);
            em[i] = m[i] = 0; ev[i] = v[i] = 0;
        }
        for (int step = 1; step <= 3; step++) {
            for (size_t i = 0; i < n; i++) { g[i] = rng_uniform(&rng) - 0.5f; }
            AdamW a = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, (real)(1 - pow(0.9, step)), (real)(1 - pow(0.95, step)), 0.5f};
            adamw_range(p, g, m, v, 0, n, a, true);
            for (size_t i = 0; i < n; i++) {
                double grad = 0.5 * g[i];
                em[i] = 0.9 * em[i] + 0.1 * grad;
                ev[i] = 0.95 * ev[i] + 0.05 * grad * grad;
                ep[i] -= 1e-2 * 0.1 * ep[i];
                ep[i] -= 1e-2 * (em[i] / (1 - pow(0.9, step))) / (sqrt(ev[i] / (1 - pow(0.95, step))) + 1e-8);
                CHECK_NEAR(p[i], ep[i], 2e-6);
            }
        }
    }
    real p = 1, g = 1, m = 0, v = 0;
    for (int step = 1; step <= 100; step++) {
        AdamW a = {6e-4f, 0.9f, 0.95f, 1e-8f, 0, (real)(1 - pow(0.9, step)), (real)(1 - pow(0.95, step)), 1};
        adamw_range(&p, &g, &m, &v, 0, 1, a, false);
    }
    CHECK_NEAR(p, 0.94, 0.003);
}

static void grad_norm_equals_a_scalar_sum_for_any_number_of_layers(void) {
    MoEConfig c = test_config();
    for (int layers = 1; layers <= 64; layers *= 4) {
        c.num_hidden_layers = layers;
        Model m;
        model_create(&m, &c, default_switches(), 1, 4, true);
        double sum = 0;
        uint64_t rng = 9;
        for (size_t i = 0; i < m.table.num_parameters; i++) {
            m.grads[i] = rng_uniform(&rng) - 0.5f;
            sum += (double)m.grads[i] * m.grads[i];
        }
        CHECK_NEAR(model_grad_norm(&m) / sqrt(sum), 1, 1e-9);
        model_free(&m);
    }
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(accumulation_splits_give_one_gradient);
    RUN(documents_are_as_separate_rows);
    RUN(tokens_of_another_document_change_no_bit);
    RUN(flash_attention_equals_naive);
    RUN(grouped_experts_equal_the_loop);
    RUN(an_overfull_expert_takes_the_other_path_to_the_same_result);
    RUN(fused_optimizer_equals_the_simple_one);
    RUN(decoding_with_a_cache_equals_forward);
    RUN(same_seed_gives_the_same_bits_for_any_number_of_threads);
    RUN(validation_before_a_step_changes_nothing);
    RUN(a_step_has_the_same_loss_for_the_same_rows_at_any_batch_size);
    RUN(gemm_equals_its_definition);
    RUN(exp_is_accurate_and_passes_nans_on);
    RUN(cross_entropy_is_right_for_any_vocabulary_size_every_time);
    RUN(large_logits_do_not_overflow_and_nan_stays_nan);
    RUN(ties_go_to_the_lower_expert_and_nans_choose_valid_ones);
    RUN(rows_are_sorted_by_expert_and_keep_their_order);
    RUN(expert_counts_sum_to_all_slots);
    RUN(offsets_beyond_2_to_31_elements_reach_the_right_row);
    RUN(adamw_matches_a_scalar_loop_on_any_length);
    RUN(grad_norm_equals_a_scalar_sum_for_any_number_of_layers);
    return test_summary();
}
