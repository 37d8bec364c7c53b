// test_gradients.c: every backward function of train_moe_cpu.c against central differences of its forward, in float64, and the whole
// model against central differences of its loss. Nothing here knows a formula of a gradient.
// Objective of an op: sum of its outputs times fixed random numbers; those numbers are then what its backward gets as d_out.
#define TESTING
#define REAL double
#include "../../train_moe_cpu.c"
#include "testing.h"

static uint64_t rng_state = 1;

static double uniform(double low, double high) { return low + (high - low) * (double)rng_uniform(&rng_state); }

static double* random_array(size_t n, double low, double high) {
    double* x = (double*)mallocCheck(n * sizeof(double));
    for (size_t i = 0; i < n; i++) { x[i] = uniform(low, high); }
    return x;
}

static double* poisoned_array(size_t n) { // what a backward that writes (=) must not depend on
    double* x = (double*)mallocCheck(n * sizeof(double));
    for (size_t i = 0; i < n; i++) { x[i] = NAN; }
    return x;
}

static double dot(const double* a, const double* b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}

// An op under test: runs forward on its buffers and returns the objective.
typedef double (*Objective)(void* op);

static void check_gradient(Objective objective, void* op, double* x, const double* d_x, size_t n, const char* what) {
    // d objective / d x[i] for up to 60 of the n numbers, spread over them. Step 1e-5: truncation about 1e-10, rounding about 1e-11.
    size_t stride = n > 60 ? n / 60 : 1;
    for (size_t i = 0; i < n; i += stride) {
        double keep = x[i], h = 1e-5;
        x[i] = keep + h;
        double up = objective(op);
        x[i] = keep - h;
        double down = objective(op);
        x[i] = keep;
        double numeric = (up - down) / (2 * h);
        if (!(fabs(numeric - d_x[i]) <= 1e-7 * (1 + fabs(numeric)))) {
            test_check(false, __FILE__, __LINE__, "%s[%zu]: central difference %.10g, backward %.10g", what, i, numeric, d_x[i]);
            return;
        }
    }
}

// ----------------------------------------------------------------------------
// one op at a time

typedef struct { double *out, *inp, *weight, *d_out; size_t N, C, OC; } MatmulOp;

static double matmul_objective(void* p) {
    MatmulOp* op = (MatmulOp*)p;
    matmul_forward(op->out, op->inp, op->weight, op->N, op->C, op->OC);
    return dot(op->out, op->d_out, op->N * op->OC);
}

static void matmul_backward_matches_finite_differences(void) {
    MatmulOp op = {NULL, NULL, NULL, NULL, 5, 7, 3};
    op.out = poisoned_array(15); op.inp = random_array(35, -1, 1); op.weight = random_array(21, -1, 1); op.d_out = random_array(15, -1, 1);
    double *d_inp = poisoned_array(35), *d_weight = poisoned_array(21);
    matmul_backward(d_inp, d_weight, op.d_out, op.inp, op.weight, op.N, op.C, op.OC, 0, 0);
    check_gradient(matmul_objective, &op, op.inp, d_inp, 35, "d_inp");
    check_gradient(matmul_objective, &op, op.weight, d_weight, 21, "d_weight");
    free(op.out); free(op.inp); free(op.weight); free(op.d_out); free(d_inp); free(d_weight);
}

typedef struct { double *residual, *out, *rstd, *inp, *branch, *weight, *d_out; size_t N, C; } NormOp;

static double norm_objective(void* p) {
    NormOp* op = (NormOp*)p;
    rmsnorm_forward(op->residual, op->out, op->rstd, op->inp, op->branch, op->weight, op->N, op->C, 1e-3);
    return dot(op->out, op->d_out, op->N * op->C);
}

static void rmsnorm_backward_matches_finite_differences(void) {
    size_t n = 9 * 5;
    NormOp op = {poisoned_array(n), poisoned_array(n), poisoned_array(9), random_array(n, -1, 1), random_array(n, -1, 1), random_array(5, 0.5, 1.5),
                 random_array(n, -1, 1), 9, 5};
    double *d_inp = poisoned_array(n), *d_weight = poisoned_array(5), *partials = poisoned_array(NORM_BLOCKS * 5);
    norm_objective(&op);
    rmsnorm_backward(d_inp, d_weight, op.d_out, op.residual, op.weight, op.rstd, partials, op.N, op.C, 0, 0);
    check_gradient(norm_objective, &op, op.inp, d_inp, n, "d_inp");
    check_gradient(norm_objective, &op, op.branch, d_inp, n, "d_branch");
    check_gradient(norm_objective, &op, op.weight, d_weight, 5, "d_weight");
    double again = d_inp[3];
    rmsnorm_backward(d_inp, d_weight, op.d_out, op.residual, op.weight, op.rstd, partials, op.N, op.C, 1, 1);
    CHECK_NEAR(d_inp[3], 2 * again, 1e-12); // beta = 1 adds
    free(op.residual); free(op.out); free(op.rstd); free(op.inp); free(op.branch); free(op.weight); free(op.d_out);
    free(d_inp); free(d_weight); free(partials);
}

typedef struct { double *q, *k, *v, *rstd, *qkv, *q_norm, *k_norm, *rope, *d_q, *d_k, *d_v; size_t B, T; int NH, NKV, HD; } RopeOp;

static double rope_objective(void* p) {
    RopeOp* op = (RopeOp*)p;
    qk_norm_rope_forward(op->q, op->k, op->v, op->rstd, op->qkv, op->q_norm, op->k_norm, op->rope, op->B, op->T, 0, op->T, op->NH, op->NKV, op->HD, 1e-3);
    size_t per_head = op->B * op->T * op->HD;
    return dot(op->q, op->d_q, per_head * op->NH) + dot(op->k, op->d_k, per_head * op->NKV) + dot(op->v, op->d_v, per_head * op->NKV);
}

static void qk_norm_rope_backward_matches_finite_differences(void) {
    size_t B = 2, T = 5, N = B * T;
    int NH = 6, NKV = 2, HD = 8;
    size_t q_size = N * NH * HD, kv_size = N * NKV * HD, qkv_size = q_size + 2 * kv_size;
    RopeOp op = {poisoned_array(q_size), poisoned_array(kv_size), poisoned_array(kv_size), poisoned_array(N * (NH + NKV)),
                 random_array(qkv_size, -1, 1), random_array(HD, 0.5, 1.5), random_array(HD, 0.5, 1.5), poisoned_array(T * HD),
                 random_array(q_size, -1, 1), random_array(kv_size, -1, 1), random_array(kv_size, -1, 1), B, T, NH, NKV, HD};
    rope_table(op.rope, T, HD, 100);
    double *d_qkv = poisoned_array(qkv_size), *d_qn = poisoned_array(HD), *d_kn = poisoned_array(HD), *partials = poisoned_array(NORM_BLOCKS * 2 * HD);
    rope_objective(&op);
    qk_norm_rope_backward(d_qkv, d_qn, d_kn, op.d_q, op.d_k, op.d_v, op.qkv, op.rstd, op.q_norm, op.k_norm, op.rope, partials, B, T, NH, NKV, HD, 0);
    check_gradient(rope_objective, &op, op.qkv, d_qkv, qkv_size, "d_qkv");
    check_gradient(rope_objective, &op, op.q_norm, d_qn, HD, "d_q_norm");
    check_gradient(rope_objective, &op, op.k_norm, d_kn, HD, "d_k_norm");
    free(op.q); free(op.k); free(op.v); free(op.rstd); free(op.qkv); free(op.q_norm); free(op.k_norm); free(op.rope);
    free(op.d_q); free(op.d_k); free(op.d_v); free(d_qkv); free(d_qn); free(d_kn); free(partials);
}

typedef struct {
    double *out, *lse, *q, *k, *v, *scores, *d_out;
    const int* doc_start;
    AttentionShape shape;
    bool flash;
} AttentionOp;

static double attention_objective(void* p) {
    AttentionOp* op = (AttentionOp*)p;
    if (op->flash) { attention_flash_forward(op->out, op->lse, op->q, op->k, op->v, op->doc_start, op->scores, op->shape); }
    else { attention_naive_forward(op->out, op->lse, op->q, op->k, op->v, op->doc_start, op->scores, op->shape); }
    return dot(op->out, op->d_out, op->shape.B * op->shape.T * op->shape.NH * op->shape.HD);
}

static void check_attention(size_t B, size_t T, int NH, int NKV, int HD, bool documents, bool flash) {
    size_t q_size = B * T * NH * HD, kv_size = B * T * NKV * HD;
    size_t scores = T * T > (size_t)num_threads() * ATTENTION_ROWS * T ? T * T : (size_t)num_threads() * ATTENTION_ROWS * T;
    int* doc_start = (int*)callocCheck(B * T, sizeof(int));
    for (size_t n = 0; n < B * T; n++) { doc_start[n] = (int)(n % T / 5 * 5); } // a document every five positions
    AttentionOp op = {poisoned_array(q_size), poisoned_array(B * T * NH), random_array(q_size, -1, 1), random_array(kv_size, -1, 1),
                      random_array(kv_size, -1, 1), poisoned_array(2 * scores), random_array(q_size, -1, 1),
                      documents ? doc_start : NULL, {B, T, NH, NKV, HD}, flash};
    double *d_q = poisoned_array(q_size), *d_k = poisoned_array(kv_size), *d_v = poisoned_array(kv_size);
    attention_objective(&op);
    if (flash) { attention_flash_backward(d_q, d_k, d_v, op.d_out, op.out, op.lse, op.q, op.k, op.v, op.doc_start, op.scores, op.shape); }
    else { attention_naive_backward(d_q, d_k, d_v, op.d_out, op.out, op.lse, op.q, op.k, op.v, op.doc_start, op.scores, op.shape); }
    check_gradient(attention_objective, &op, op.q, d_q, q_size, "d_q");
    check_gradient(attention_objective, &op, op.k, d_k, kv_size, "d_k");
    check_gradient(attention_objective, &op, op.v, d_v, kv_size, "d_v");
    free(op.out); free(op.lse); free(op.q); free(op.k); free(op.v); free(op.scores); free(op.d_out); free(doc_start);
    free(d_q); free(d_k); free(d_v);
}

static void attention_naive_backward_matches_finite_differences(void) {
    check_attention(2, 9, 6, 2, 8, false, false);
    check_attention(3, 17, 5, 5, 8, true, false);
    check_attention(1, 1, 2, 1, 16, false, false);
}

static void attention_flash_backward_matches_finite_differences(void) {
    check_attention(2, 9, 6, 2, 8, false, true);
    check_attention(1, 1, 2, 1, 16, false, true);
    check_attention(1, 64, 2, 1, 8, true, true);
    check_attention(2, 131, 3, 1, 8, false, true); // more than two tiles, the last one short
    check_attention(1, 131, 2, 2, 8, true, true);
}

typedef struct {
    double *logits, *probs, *lse, *weights, *inp, *router, *d_weights;
    int *indices, *targets;
    const double* expert_share;
    double balance, z; // factors of the two losses
    size_t N, C;
    int E, K;
    bool norm;
} RouterOp;

static double router_objective(void* p) {
    // the choice of experts stays as it is (forced), as it does almost everywhere for small changes
    RouterOp* op = (RouterOp*)p;
    router_forward(op->logits, op->probs, op->lse, op->inp, op->router, op->N, op->C, op->E);
    topk_forward(op->indices, op->weights, op->probs, op->indices, op->N, op->E, op->K, op->norm);
    double sum = dot(op->weights, op->d_weights, op->N * op->K);
    for (size_t n = 0; n < op->N; n++) {
        for (int e = 0; e < op->E; e++) { sum += op->balance * op->expert_share[e] * op->probs[n * op->E + e]; }
        if (op->targets[n] >= 0) { sum += op->z * op->lse[n] * op->lse[n]; }
    }
    return sum;
}

static void check_router(int E, int K, bool norm) {
    size_t N = 7, C = 5;
    double share[8] = {0.9, 0.1, 0.4, 0.2, 0.7, 0.3, 0.6, 0.5};
    int targets[7] = {1, -100, 2, 3, -100, 0, 5};
    RouterOp op = {poisoned_array(N * E), poisoned_array(N * E), poisoned_array(N), poisoned_array(N * K), random_array(N * C, -1, 1),
                   random_array(E * C, -1, 1), random_array(N * K, -1, 1), (int*)callocCheck(N * K, sizeof(int)), targets, share, 0.3, 0.2, N, C, E, K, norm};
    router_forward(op.logits, op.probs, op.lse, op.inp, op.router, N, C, E);
    topk_forward(op.indices, op.weights, op.probs, NULL, N, E, K, norm);
    double *d_logits = poisoned_array(N * E), *d_inp = poisoned_array(N * C), *d_router = poisoned_array(E * C);
    RouterLossScale scale = {op.balance, op.z, share};
    router_objective(&op);
    router_backward(d_logits, op.d_weights, op.probs, op.lse, op.indices, op.weights, targets, scale, N, E, K, norm);
    matmul_backward(d_inp, d_router, d_logits, op.inp, op.router, N, C, E, 0, 0);
    check_gradient(router_objective, &op, op.inp, d_inp, N * C, "d_inp");
    check_gradient(router_objective, &op, op.router, d_router, E * C, "d_router");
    free(op.logits); free(op.probs); free(op.lse); free(op.weights); free(op.inp); free(op.router); free(op.d_weights); free(op.indices);
    free(d_logits); free(d_inp); free(d_router);
}

static void router_backward_matches_finite_differences(void) {
    check_router(8, 2, true);
    check_router(8, 3, false);
    check_router(4, 1, false);
    check_router(5, 5, true);
    check_router(1, 1, true);
}

typedef struct { double *out, *act, *gate_up, *inp, *gate_up_proj, *down_proj, *d_out; size_t N, C, F; } MlpOp;

static double mlp_objective(void* p) {
    MlpOp* op = (MlpOp*)p;
    mlp_forward(op->out, op->act, op->gate_up, op->inp, op->gate_up_proj, op->down_proj, op->N, op->C, op->F);
    return dot(op->out, op->d_out, op->N * op->C);
}

static void mlp_backward_matches_finite_differences(void) {
    size_t N = 4, C = 5, F = 7;
    MlpOp op = {poisoned_array(N * C), poisoned_array(N * F), poisoned_array(N * 2 * F), random_array(N * C, -2, 2), random_array(2 * F * C, -1, 1),
                random_array(C * F, -1, 1), random_array(N * C, -1, 1), N, C, F};
    double *d_inp = poisoned_array(N * C), *d_gu = poisoned_array(N * 2 * F), *d_act = poisoned_array(N * F);
    double *d_gup = poisoned_array(2 * F * C), *d_dp = poisoned_array(C * F);
    mlp_objective(&op);
    mlp_backward(d_inp, d_gup, d_dp, d_gu, d_act, op.d_out, op.inp, op.act, op.gate_up, op.gate_up_proj, op.down_proj, N, C, F, 0);
    check_gradient(mlp_objective, &op, op.inp, d_inp, N * C, "d_inp");
    check_gradient(mlp_objective, &op, op.gate_up_proj, d_gup, 2 * F * C, "d_gate_up_proj");
    check_gradient(mlp_objective, &op, op.down_proj, d_dp, C * F, "d_down_proj");
    free(op.out); free(op.act); free(op.gate_up); free(op.inp); free(op.gate_up_proj); free(op.down_proj); free(op.d_out);
    free(d_inp); free(d_gu); free(d_act); free(d_gup); free(d_dp);
}

typedef struct { double *out, *expert_in, *inp, *weights, *d_out; int *row_slot, *slot_row; size_t N, C; int K; } ReturnOp;

static double return_objective(void* p) { // the way to the experts and back, with experts that do nothing
    ReturnOp* op = (ReturnOp*)p;
    permute_forward(op->expert_in, op->inp, op->row_slot, 0, op->N * op->K, op->K, op->C);
    combine_forward(op->out, op->expert_in, op->weights, op->slot_row, op->N, op->K, op->C);
    return dot(op->out, op->d_out, op->N * op->C);
}

static void permute_and_combine_backward_match_finite_differences(void) {
    size_t N = 6, C = 3;
    int K = 2, E = 5, counts[5], offsets[6], order[5], row_slot[12], slot_row[12];
    int indices[12] = {4, 0, 0, 4, 1, 4, 4, 2, 0, 1, 4, 0}; // expert 3 gets nothing
    route_rows(counts, offsets, order, row_slot, slot_row, indices, N, E, K);
    CHECK(counts[3] == 0 && offsets[3] == offsets[4] && order[0] == 4 && order[4] == 3);
    ReturnOp op = {poisoned_array(N * C), poisoned_array(N * K * C), random_array(N * C, -1, 1), random_array(N * K, 0, 1), random_array(N * C, -1, 1),
                   row_slot, slot_row, N, C, K};
    double *d_inp = poisoned_array(N * C), *d_rows = poisoned_array(N * K * C), *d_weights = poisoned_array(N * K);
    return_objective(&op);
    combine_backward(d_rows, d_weights, op.d_out, op.expert_in, op.weights, row_slot, 0, N * K, K, C);
    permute_backward(d_inp, d_rows, slot_row, N, K, C);
    check_gradient(return_objective, &op, op.inp, d_inp, N * C, "d_inp");
    check_gradient(return_objective, &op, op.weights, d_weights, N * K, "d_router_weights");
    free(op.out); free(op.expert_in); free(op.inp); free(op.weights); free(op.d_out); free(d_inp); free(d_rows); free(d_weights);
}

typedef struct { double *logits, *losses, *inp, *lm_head; int* targets; size_t N, C, V; bool want_grad; } HeadOp;

static double head_objective(void* p) {
    HeadOp* op = (HeadOp*)p;
    lm_head_forward(op->logits, op->losses, op->inp, op->lm_head, op->targets, op->N, op->C, op->V, 0.25, op->want_grad, NULL);
    double sum = 0;
    for (size_t n = 0; n < op->N; n++) { sum += 0.25 * op->losses[n]; }
    return sum;
}

static void cross_entropy_gradient_matches_finite_differences(void) {
    size_t N = 5, C = 4, V = 9;
    int targets[5] = {8, -100, 0, 3, 3};
    HeadOp op = {poisoned_array(N * V), poisoned_array(N), random_array(N * C, -1, 1), random_array(V * C, -1, 1), targets, N, C, V, true};
    double *d_inp = poisoned_array(N * C), *d_head = poisoned_array(V * C);
    head_objective(&op);
    matmul_backward(d_inp, d_head, op.logits, op.inp, op.lm_head, N, C, V, 0, 0);
    op.want_grad = false;
    check_gradient(head_objective, &op, op.inp, d_inp, N * C, "d_inp");
    check_gradient(head_objective, &op, op.lm_head, d_head, V * C, "d_lm_head");
    CHECK(op.losses[1] == 0);
    free(op.logits); free(op.losses); free(op.inp); free(op.lm_head); free(d_inp); free(d_head);
}

typedef struct { double *out, *weight, *d_out; int* tokens; size_t N, C; } EmbeddingOp;

static double embedding_objective(void* p) {
    EmbeddingOp* op = (EmbeddingOp*)p;
    embedding_forward(op->out, op->tokens, op->weight, op->N, op->C);
    return dot(op->out, op->d_out, op->N * op->C);
}

static void embedding_backward_matches_finite_differences(void) {
    int tokens[6] = {3, 0, 3, 3, 6, 0};
    EmbeddingOp op = {poisoned_array(24), random_array(28, -1, 1), random_array(24, -1, 1), tokens, 6, 4};
    double* d_weight = poisoned_array(28);
    embedding_backward(d_weight, op.d_out, tokens, 6, 4, 7, -1, 0);
    check_gradient(embedding_objective, &op, op.weight, d_weight, 28, "d_embed_tokens");
    embedding_backward(d_weight, op.d_out, tokens, 6, 4, 7, 3, 0); // the padding token's row stays as it is
    for (int c = 0; c < 4; c++) { CHECK(d_weight[3 * 4 + c] == 0 && d_weight[6 * 4 + c] == op.d_out[4 * 4 + c]); }
    free(op.out); free(op.weight); free(op.d_out); free(d_weight);
}

// ----------------------------------------------------------------------------
// the whole model: d loss / d every tensor

typedef struct { Model* model; Microbatch* mb; } ModelOp;

static double model_objective(void* p) {
    ModelOp* op = (ModelOp*)p;
    model_forward(op->model, op->mb);
    return model_loss(op->model, op->mb, false, 0, NULL).loss;
}

static MoEConfig small_config(void) {
    MoEConfig c;
    config_preset(&c, "tiny");
    c.vocab_size = 13; c.hidden_size = 10; c.num_hidden_layers = 2; c.num_attention_heads = 4; c.num_key_value_heads = 2; c.head_dim = 8;
    c.num_experts = 5; c.num_experts_per_tok = 2; c.moe_intermediate_size = 6; c.intermediate_size = 7; c.rms_norm_eps = 1e-4;
    c.tie_word_embeddings = false; c.bos_token_id = c.eos_token_id = -1;
    return c;
}

// Experts are forced to what the router chose at first: a central difference must not step over a change of choice.
static int** freeze_routing(Model* model, const Microbatch* mb) {
    const MoEConfig* c = &model->config;
    size_t slots = model->B * model->T * c->num_experts_per_tok;
    int** forced = (int**)callocCheck(c->num_hidden_layers, sizeof(int*));
    model_forward(model, mb);
    for (int l = 0; l < c->num_hidden_layers; l++) {
        if (!config_layer_is_moe(c, l)) { continue; }
        forced[l] = (int*)mallocCheck(slots * sizeof(int));
        memcpy(forced[l], model->acts.layers[l].router_indices, slots * sizeof(int));
    }
    return forced;
}

static void check_model(MoEConfig c, size_t B, size_t T, const int* doc_start, bool ignore_some, int only_expert) {
    // only_expert >= 0: every token goes there (needs top-1), all other experts get none
    char err[256];
    if (!CHECK(config_check(&c, err, sizeof(err)))) { return; }
    Switches switches = {ATTENTION_FLASH, EXPERTS_GROUPED, true, 0.05, 0.02, false};
    Model model;
    model_create(&model, &c, switches, B, T, true);
    for (size_t i = 0; i < model.table.num_parameters; i++) { model.params[i] = uniform(-0.6, 0.6); }
    int *tokens = (int*)mallocCheck(B * T * sizeof(int)), *targets = (int*)mallocCheck(B * T * sizeof(int));
    double counted = 0;
    for (size_t n = 0; n < B * T; n++) {
        tokens[n] = (int)(rng_next(&rng_state) % c.vocab_size);
        targets[n] = ignore_some && n % 3 == 1 ? -100 : (int)(rng_next(&rng_state) % c.vocab_size);
        counted += targets[n] >= 0;
    }
    Microbatch mb = {tokens, targets, doc_start, NULL, counted, 1};
    mb.forced_indices = freeze_routing(&model, &mb);
    for (int l = 0; only_expert >= 0 && l < c.num_hidden_layers; l++) {
        for (size_t i = 0; mb.forced_indices[l] && i < B * T; i++) { mb.forced_indices[l][i] = only_expert; }
    }
    for (size_t i = 0; i < model.table.num_parameters; i++) { model.grads[i] = NAN; }
    model_forward_backward(&model, &mb, true);
    ModelOp op = {&model, &mb};
    for (size_t i = 0; i < model.table.count; i++) {
        const ParamTensor* t = &model.table.tensors[i];
        bool unused = only_expert >= 0 && t->expert >= 0 && t->expert != only_expert;
        for (size_t j = 0; unused && j < t->numel; j++) { CHECK(model.grads[t->offset + j] == 0); }
        check_gradient(model_objective, &op, model.params + t->offset, model.grads + t->offset, t->numel, t->name);
    }
    for (int l = 0; l < c.num_hidden_layers; l++) { free(mb.forced_indices[l]); }
    free(mb.forced_indices);
    free(tokens);
    free(targets);
    model_free(&model);
}

static void model_backward_matches_finite_differences(void) { check_model(small_config(), 2, 7, NULL, false, -1); }

static void model_backward_with_ignored_targets_and_documents(void) {
    int doc_start[14] = {0, 0, 0, 3, 3, 3, 6, 0, 1, 2, 2, 2, 2, 2};
    check_model(small_config(), 2, 7, doc_start, true, -1);
}

static void model_backward_tied_without_renormalisation(void) {
    MoEConfig c = small_config();
    c.tie_word_embeddings = true;
    c.norm_topk_prob = false;
    c.num_experts_per_tok = 3;
    check_model(c, 2, 5, NULL, true, -1);
}

static void model_backward_with_dense_layers(void) {
    MoEConfig c = small_config();
    c.num_hidden_layers = 3;
    c.decoder_sparse_step = 2;
    check_model(c, 1, 6, NULL, false, -1);
    c.decoder_sparse_step = 1;
    c.num_mlp_only_layers = 1;
    c.mlp_only_layers[0] = 2;
    check_model(c, 1, 6, NULL, false, -1);
}

static void model_backward_with_all_tokens_on_one_expert(void) {
    MoEConfig c = small_config();
    c.num_experts_per_tok = 1;
    c.norm_topk_prob = false;
    check_model(c, 2, 5, NULL, false, 3);
}

static void model_backward_at_batch_one_and_length_one(void) {
    check_model(small_config(), 1, 9, NULL, false, -1);
    check_model(small_config(), 3, 1, NULL, false, -1);
    check_model(small_config(), 1, 1, NULL, false, -1);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    RUN(matmul_backward_matches_finite_differences);
    RUN(rmsnorm_backward_matches_finite_differences);
    RUN(qk_norm_rope_backward_matches_finite_differences);
    RUN(attention_naive_backward_matches_finite_differences);
    RUN(attention_flash_backward_matches_finite_differences);
    RUN(router_backward_matches_finite_differences);
    RUN(mlp_backward_matches_finite_differences);
    RUN(permute_and_combine_backward_match_finite_differences);
    RUN(cross_entropy_gradient_matches_finite_differences);
    RUN(embedding_backward_matches_finite_differences);
    RUN(model_backward_matches_finite_differences);
    RUN(model_backward_with_ignored_targets_and_documents);
    RUN(model_backward_tied_without_renormalisation);
    RUN(model_backward_with_dense_layers);
    RUN(model_backward_with_all_tokens_on_one_expert);
    RUN(model_backward_at_batch_one_and_length_one);
    return test_summary();
}
