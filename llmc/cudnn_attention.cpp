// cudnn_attention.cpp: causal attention by cuDNN, through NVIDIA's cudnn_frontend headers.
// This is the one part of the trainer that has only been compiled, never run: no machine of this project has had cuDNN
// and a GPU together, and the emulator has no cuDNN. --attention flash, ours, is the default and is tested.
//
// cuDNN is given a graph (here one node: scaled-dot-product attention) and finds a plan that computes it; that takes
// a good part of a second, so plans are kept, one a shape and direction.
#ifndef USE_CUDNN
#define USE_CUDNN
#endif
#include "cudnn_attention.h"
#include "cuda_check.h"
#include <cudnn_frontend.h>
#include <memory>
#include <unordered_map>
#include <vector>

namespace fe = cudnn_frontend;
typedef std::shared_ptr<fe::graph::Tensor_attributes> Tensor;

static void cudnn_status_check(cudnnStatus_t status, const char* call) {
    if (status != CUDNN_STATUS_SUCCESS) {
        fatal("%s failed: %s (cuDNN %zu); --attention flash needs no cuDNN", call, cudnnGetErrorString(status),
              cudnnGetVersion());
    }
}
static void frontend_check(fe::error_t status, const char* what, const CudnnAttentionShape* s) {
    if (status.is_bad()) {
        fatal("cuDNN %zu: %s of attention with B %zu, T %zu, %d/%d heads of %d failed: %s; --attention flash needs no "
              "cuDNN", cudnnGetVersion(), what, s->B, s->T, s->NH, s->NKV, s->HD, status.get_message().c_str());
    }
}

enum { Q = 1, K, V, OUT, LSE, D_OUT, D_Q, D_K, D_V }; // names of the tensors in a graph

struct Plan {
    CudnnAttentionShape shape;
    bool backward;
    fe::graph::Graph graph;
};

static cudnnHandle_t handle() {
    static cudnnHandle_t h = nullptr;
    if (h == nullptr) { cudnn_status_check(cudnnCreate(&h), "cudnnCreate"); }
    return h;
}

// (B, heads, T, HD) as it lies in memory: tokens `ld` elements apart, the heads of a token side by side
static fe::graph::Tensor_attributes matrix(int name, const CudnnAttentionShape& s, int heads, size_t ld) {
    return fe::graph::Tensor_attributes()
        .set_uid(name)
        .set_dim({(int64_t)s.B, heads, (int64_t)s.T, s.HD})
        .set_stride({(int64_t)(s.T * ld), s.HD, (int64_t)ld, 1})
        .set_data_type(fe::DataType_t::BFLOAT16);
}
static fe::graph::Tensor_attributes row_numbers(int name, const CudnnAttentionShape& s) { // lse (B, NH, T, 1)
    return fe::graph::Tensor_attributes()
        .set_uid(name)
        .set_dim({(int64_t)s.B, s.NH, (int64_t)s.T, 1})
        .set_stride({(int64_t)s.NH * (int64_t)s.T, (int64_t)s.T, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}
static void make_output(const Tensor& t, const fe::graph::Tensor_attributes& like) {
    t->set_output(true).set_uid(like.get_uid()).set_dim(like.get_dim()).set_stride(like.get_stride());
    t->set_data_type(like.get_data_type());
}

static void add_forward(fe::graph::Graph* g, const CudnnAttentionShape& s) {
    size_t ld_out = (size_t)s.NH * (size_t)s.HD;
    auto attention = fe::graph::SDPA_attributes()
                         .set_name("attention_forward")
                         .set_generate_stats(true) // lse
                         .set_causal_mask(true)
                         .set_attn_scale(1.0f / sqrtf((float)s.HD));
    auto [out, lse] = g->sdpa(g->tensor(matrix(Q, s, s.NH, s.ld_qk)), g->tensor(matrix(K, s, s.NKV, s.ld_qk)),
                              g->tensor(matrix(V, s, s.NKV, s.ld_v)), attention);
    make_output(out, matrix(OUT, s, s.NH, ld_out));
    make_output(lse, row_numbers(LSE, s));
}

// Deterministic: the same bits on every run, as everything here. For that cuDNN may take B*NH*T*T bf16 of workspace, which
// memory_plan of train_moe.cu counts.
static void add_backward(fe::graph::Graph* g, const CudnnAttentionShape& s) {
    size_t ld_out = (size_t)s.NH * (size_t)s.HD;
    auto attention = fe::graph::SDPA_backward_attributes()
                         .set_name("attention_backward")
                         .set_causal_mask(true)
                         .set_attn_scale(1.0f / sqrtf((float)s.HD))
                         .set_deterministic_algorithm(true);
    auto [d_q, d_k, d_v] = g->sdpa_backward(
        g->tensor(matrix(Q, s, s.NH, s.ld_qk)), g->tensor(matrix(K, s, s.NKV, s.ld_qk)),
        g->tensor(matrix(V, s, s.NKV, s.ld_v)), g->tensor(matrix(OUT, s, s.NH, ld_out)),
        g->tensor(matrix(D_OUT, s, s.NH, ld_out)), g->tensor(row_numbers(LSE, s)), attention);
    make_output(d_q, matrix(D_Q, s, s.NH, s.ld_d));
    make_output(d_k, matrix(D_K, s, s.NKV, s.ld_d));
    make_output(d_v, matrix(D_V, s, s.NKV, s.ld_d));
}

static bool same_shape(const CudnnAttentionShape& a, const CudnnAttentionShape& b) {
    return a.B == b.B && a.T == b.T && a.NH == b.NH && a.NKV == b.NKV && a.HD == b.HD && a.ld_qk == b.ld_qk &&
           a.ld_v == b.ld_v && a.ld_d == b.ld_d;
}

static Plan* find_plan(const CudnnAttentionShape* s, bool backward) {
    static std::vector<std::unique_ptr<Plan>> plans;
    for (auto& p : plans) {
        if (p->backward == backward && same_shape(p->shape, *s)) { return p.get(); }
    }
    std::unique_ptr<Plan> p(new Plan);
    p->shape = *s;
    p->backward = backward;
    p->graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (backward) { add_backward(&p->graph, *s); }
    else { add_forward(&p->graph, *s); }
    fe::error_t status = p->graph.build(handle(), {fe::HeurMode_t::A});
    frontend_check(status, backward ? "the backward plan" : "the forward plan", s);
    plans.push_back(std::move(p));
    return plans.back().get();
}

static void execute(Plan* p, std::unordered_map<int64_t, void*>& tensors, cudaStream_t stream) {
    static void* workspace = nullptr; // the largest so far; all calls are on one stream, one after the other
    static size_t workspace_bytes = 0;
    int64_t needed = 0;
    frontend_check(p->graph.get_workspace_size(needed), "the workspace", &p->shape);
    if ((size_t)needed > workspace_bytes) {
        cudaCheck(cudaStreamSynchronize(stream)); // an earlier call may use what is freed here
        cudaCheck(cudaFree(workspace));
        cudaCheck(cudaMalloc(&workspace, (size_t)needed));
        workspace_bytes = (size_t)needed;
    }
    cudnn_status_check(cudnnSetStream(handle(), stream), "cudnnSetStream");
    fe::error_t status = p->graph.execute(handle(), tensors, workspace);
    frontend_check(status, p->backward ? "the backward" : "the forward", &p->shape);
}

void cudnn_attention_forward(void* out, float* lse, const void* q, const void* k, const void* v,
                             const CudnnAttentionShape* s, cudaStream_t stream) {
    if (s->B == 0 || s->T == 0) { return; }
    std::unordered_map<int64_t, void*> tensors = {
        {Q, (void*)q}, {K, (void*)k}, {V, (void*)v}, {OUT, out}, {LSE, lse}};
    execute(find_plan(s, false), tensors, stream);
}

void cudnn_attention_backward(void* d_q, void* d_k, void* d_v, const void* d_out, const void* out, const float* lse,
                              const void* q, const void* k, const void* v, const CudnnAttentionShape* s,
                              cudaStream_t stream) {
    if (s->B == 0 || s->T == 0) { return; }
    std::unordered_map<int64_t, void*> tensors = {
        {Q, (void*)q}, {K, (void*)k}, {V, (void*)v}, {OUT, (void*)out}, {LSE, (void*)lse}, {D_OUT, (void*)d_out},
        {D_Q, d_q}, {D_K, d_k}, {D_V, d_v}};
    execute(find_plan(s, true), tensors, stream);
}

void attention_cudnn_check(bool doc_mask, int head_dim) {
    if (doc_mask) {
        fatal("--attention cudnn knows no document mask: use --attention flash with it, or leave --doc-mask out");
    }
    if (head_dim % 8 != 0 || head_dim > 128) {
        fatal("--attention cudnn needs a head_dim that is a multiple of 8 and at most 128, it is %d: use --attention "
              "flash", head_dim);
    }
    if (cudnnGetVersion() < 90000) {
        fatal("--attention cudnn needs cuDNN 9, this is %zu: make deps-cudnn brings it, or use --attention flash",
              cudnnGetVersion());
    }
}
