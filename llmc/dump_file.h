// dump_file.h: what --dump writes: every quantity of dev/test/goldens/README.md under its name there, so that one
// program compares either trainer with Hugging Face.
#ifndef LLMC_DUMP_FILE_H
#define LLMC_DUMP_FILE_H

#include "config.h"
#include "safetensors.h"

typedef struct {
    const MoEConfig* config;
    const ParamTable* table;
    size_t B, T;
    float loss, ce_loss, aux_loss, grad_norm; // grad_norm before clipping
    const float* logits;                      // (B, T, V)
    void* ctx;                                // handed to the two functions, which fill what they are given:
    void (*routing)(void* ctx, int layer, float* logits, int* indices, float* weights); // (N,E), (N,K), (N,K)
    ParamFetch fetch;                         // "grad" of every tensor
} Dump;

static inline void dump_declare(StWriter* out, const Dump* d) {
    const MoEConfig* c = d->config;
    size_t N = d->B * d->T, E = (size_t)c->num_experts, K = (size_t)c->num_experts_per_tok;
    size_t one[] = {1}, logits[] = {d->B, d->T, (size_t)c->vocab_size}, router[] = {N, E}, topk[] = {N, K};
    const char* scalars[] = {"loss", "ce_loss", "aux_loss", "grad_norm"};
    char name[192];
    for (int i = 0; i < 4; i++) { st_writer_declare(out, scalars[i], ST_F32, 1, one); }
    st_writer_declare(out, "logits", ST_F32, 3, logits);
    for (int l = 0; l < c->num_hidden_layers; l++) {
        if (!config_layer_is_moe(c, l)) { continue; }
        snprintf(name, sizeof(name), "router.layers.%d.logits", l);
        st_writer_declare(out, name, ST_F32, 2, router);
        snprintf(name, sizeof(name), "router.layers.%d.topk_index", l);
        st_writer_declare(out, name, ST_I32, 2, topk);
        snprintf(name, sizeof(name), "router.layers.%d.topk_weight", l);
        st_writer_declare(out, name, ST_F32, 2, topk);
    }
    for (size_t i = 0; i < d->table->count; i++) {
        const ParamTensor* t = &d->table->tensors[i];
        snprintf(name, sizeof(name), "grad.%s", t->name);
        st_writer_declare(out, name, ST_F32, t->ndim, t->shape);
    }
}

static inline void dump_file_write(const char* path, const Dump* d) {
    const MoEConfig* c = d->config;
    size_t N = d->B * d->T, E = (size_t)c->num_experts, K = (size_t)c->num_experts_per_tok, largest = 0;
    const float scalars[] = {d->loss, d->ce_loss, d->aux_loss, d->grad_norm};
    for (size_t i = 0; i < d->table->count; i++) {
        largest = d->table->tensors[i].numel > largest ? d->table->tensors[i].numel : largest;
    }
    float* router_logits = (float*)mallocCheck(mul_check(N, E) * sizeof(float));
    int* indices = (int*)mallocCheck(N * K * sizeof(int));
    float* weights = (float*)mallocCheck(N * K * sizeof(float));
    float* values = (float*)mallocCheck(largest * sizeof(float));
    StWriter out;
    st_writer_open(&out, path);
    dump_declare(&out, d);
    st_writer_header(&out);
    for (int i = 0; i < 4; i++) { st_writer_data(&out, &scalars[i], sizeof(float)); }
    st_writer_data(&out, d->logits, N * (size_t)c->vocab_size * sizeof(float));
    for (int l = 0; l < c->num_hidden_layers; l++) {
        if (!config_layer_is_moe(c, l)) { continue; }
        d->routing(d->ctx, l, router_logits, indices, weights);
        st_writer_data(&out, router_logits, N * E * sizeof(float));
        st_writer_data(&out, indices, N * K * sizeof(int));
        st_writer_data(&out, weights, N * K * sizeof(float));
    }
    for (size_t i = 0; i < d->table->count; i++) {
        d->fetch(d->ctx, &d->table->tensors[i], "grad", 0, d->table->tensors[i].numel, values);
        st_writer_data(&out, values, d->table->tensors[i].numel * sizeof(float));
    }
    st_writer_close(&out);
    free(router_logits);
    free(indices);
    free(weights);
    free(values);
}

#endif
