// cudnn_frontend.h: what llmc/cudnn_attention.cpp needs of NVIDIA's header of this name, and nothing behind it. Every call fails when the
// emulator is told so (EMU_FAIL=cudnnCreate:1), and EMU_CUDNN is the version. Only to see what is said then: it computes nothing.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace emu { bool failing(const char* function); }

typedef enum { CUDNN_STATUS_SUCCESS, CUDNN_STATUS_NOT_SUPPORTED } cudnnStatus_t;
typedef void* cudnnHandle_t;
static cudnnStatus_t cudnn_status(const char* function) {
    return emu::failing(function) ? CUDNN_STATUS_NOT_SUPPORTED : CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t cudnnCreate(cudnnHandle_t*) { return cudnn_status("cudnnCreate"); }
static cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t) { return cudnn_status("cudnnSetStream"); }
static const char* cudnnGetErrorString(cudnnStatus_t) { return "CUDNN_STATUS_NOT_SUPPORTED"; }
static size_t cudnnGetVersion() { return getenv("EMU_CUDNN") ? (size_t)atoi(getenv("EMU_CUDNN")) : 91000; }

namespace cudnn_frontend {
enum class DataType_t { BFLOAT16, FLOAT };
enum class HeurMode_t { A };
struct error_t {
    bool bad;
    bool is_bad() const { return bad; }
    std::string get_message() const { return "No execution plans support the graph."; }
};
namespace graph {
struct Tensor_attributes {
    int64_t uid = 0;
    std::vector<int64_t> dim, stride;
    DataType_t type = DataType_t::FLOAT;
    Tensor_attributes& set_uid(int64_t x) { uid = x; return *this; }
    Tensor_attributes& set_dim(std::vector<int64_t> x) { dim = x; return *this; }
    Tensor_attributes& set_stride(std::vector<int64_t> x) { stride = x; return *this; }
    Tensor_attributes& set_data_type(DataType_t x) { type = x; return *this; }
    Tensor_attributes& set_output(bool) { return *this; }
    int64_t get_uid() const { return uid; }
    std::vector<int64_t> get_dim() const { return dim; }
    std::vector<int64_t> get_stride() const { return stride; }
    DataType_t get_data_type() const { return type; }
};
struct SDPA_attributes {
    SDPA_attributes& set_name(const char*) { return *this; }
    SDPA_attributes& set_generate_stats(bool) { return *this; }
    SDPA_attributes& set_causal_mask(bool) { return *this; }
    SDPA_attributes& set_attn_scale(float) { return *this; }
    SDPA_attributes& set_deterministic_algorithm(bool) { return *this; }
};
typedef SDPA_attributes SDPA_backward_attributes;
struct Graph {
    typedef std::shared_ptr<Tensor_attributes> Tensor;
    Graph& set_io_data_type(DataType_t) { return *this; }
    Graph& set_intermediate_data_type(DataType_t) { return *this; }
    Graph& set_compute_data_type(DataType_t) { return *this; }
    Tensor tensor(const Tensor_attributes& t) { return std::make_shared<Tensor_attributes>(t); }
    struct Two { Tensor out, lse; };
    struct Three { Tensor d_q, d_k, d_v; };
    Two sdpa(Tensor, Tensor, Tensor, SDPA_attributes) { return {tensor({}), tensor({})}; }
    Three sdpa_backward(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, SDPA_attributes) { return {tensor({}), tensor({}), tensor({})}; }
    error_t build(cudnnHandle_t, std::vector<HeurMode_t>) { return {emu::failing("build")}; }
    error_t get_workspace_size(int64_t& bytes) { return bytes = 1024, error_t{emu::failing("get_workspace_size")}; }
    error_t execute(cudnnHandle_t, std::unordered_map<int64_t, void*>&, void*) { return {emu::failing("execute")}; }
};
} // namespace graph
} // namespace cudnn_frontend
