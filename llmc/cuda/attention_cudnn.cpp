/*
attention_cudnn.cpp: scaled dot-product attention by cuDNN's graph interface, through its C++ frontend (headers only).
A description becomes a graph of one node, the graph a plan, once for each shape; running a plan is one call.

  shapes    those of attention_cudnn.h, told to cuDNN as (B, heads, T, width) with strides: nothing is copied or padded
  numerics  bf16 products, fp32 sums and softmax; P and dS are rounded to bf16 before they are multiplied, and with
            grouped heads so is each query head's part of dK and dV before the parts are added
  stats     cuDNN's "stats" are our lse: (B, NQ, T, 1) fp32, natural logarithm, after the scale
  backward  exp(scale q.k - stats) (dO V^T - rowsum(dO O)) is computed from the O and the stats that it is given, so the
            out and lse of a softmax with a sink (sink.h) give the right gradients without a sink in the graph
  determinism  the fast backward adds dQ by atomics. The deterministic one keeps dS of all heads (but on 10.x): B NQ T^2
            bf16 of workspace, T rounded up to tiles; the caller bounds it by sequences and heads per call. On 9.x with
            cuDNN 9.25 and frontend 1.32 another one adds dQ in order: linear memory, slower, other bits. The frontend
            reads which of them from a variable of the environment, set here for each plan as CudnnAttention.linear says
  limits    bf16, from compute capability 8.0. Widths multiples of 8: backward to 128, on 9.x to 256 (10.x: 192 with
            values of 128, or 256, by cuDNN 9.11 and 9.23); values of a width of their own where the plan for it exists.
            All strides and addresses multiples of 16 bytes. T need not be a multiple of anything; T = 1 has no
            backward. Deterministic on 10.x from cuDNN 9.18.
  bugs      9.8.0, 9.10.0 and 9.10.1 are refused (cudnn_version_usable). Frontends below 1.16 do not compile: 1.13 to
            1.14.1 give NaN where T % 128 != 0. A backward on 9.x that gives NaN where T % 128 = 64 and lse < -88.7 is
            found by running it (attention_plans.cuh)
  source    docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html (support matrix), and the
            frontend's node/sdpa_support_surface.h and node/scaled_dot_product_flash_attention.h
*/
#ifndef USE_CUDNN
#define USE_CUDNN
#endif
#include "attention_cudnn.h"

#include <cudnn_frontend.h>

#include <cassert>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <unordered_map>

// 1.13 to 1.14.1 let the backward read beyond sequences whose length is no multiple of 128: NaN
#if CUDNN_FRONTEND_VERSION < 11600
#error "cudnn-frontend 1.16 or newer is needed: scripts/install_deps.sh --with-cuda-python installs it"
#endif

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using Attributes = fe::graph::Tensor_attributes;
using TensorPointer = std::shared_ptr<Attributes>;

enum { UID_Q = 1, UID_K, UID_V, UID_OUT, UID_STATS, UID_DOUT, UID_DQ, UID_DK, UID_DV };

struct CudnnPlan {
    Graph graph;
    bool backward = false;
    std::unordered_map<int64_t, void *> pointers; // filled anew by each run
};

static cudnnHandle_t handle;

// ---------------------------------------------------------------------------------------------------
// Reasons

// One line of what may be many: the message's first, and the first reason among the others.
static void explain(char *why, size_t size, const char *what, const char *message) {
    int first = (int)strcspn(message, "\n");
    const char *reason = strstr(message + first, "Reason: ");
    while (first > 0 && message[first - 1] == '_') first--; // the name of an operation without one
    snprintf(why, size, "%s%s%.*s%s%.*s", what, first ? ": " : "", first, message, reason ? "; " : "",
             reason ? (int)strcspn(reason, "\n") : 0, reason ? reason : "");
}

static bool good(fe::error_t status, const char *what, char *why, size_t size) {
    if (status.is_good()) return true;
    explain(why, size, what, status.get_message().c_str());
    return false;
}

static bool good(cudnnStatus_t status, const char *what, char *why, size_t size) {
    if (status == CUDNN_STATUS_SUCCESS) return true;
    explain(why, size, what, cudnnGetErrorString(status));
    return false;
}

// The frontend reports by status; what it is built on may throw.
template <typename Action> static bool guarded(const Action &action, char *why, size_t size) {
    try {
        return action();
    } catch (const std::exception &e) {
        explain(why, size, "cuDNN's frontend threw", e.what());
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------
// Descriptions

static Attributes described(const char *name, int uid, const CudnnAttention &a, int heads, int width, CudnnStrides s) {
    return Attributes()
        .set_name(name)
        .set_uid(uid)
        .set_dim({a.B, heads, a.T, width})
        .set_stride({(int64_t)a.T * s.row, s.head, s.row, 1});
}

// An output: the graph has made it, this says where it goes.
static void place(const TensorPointer &t, const char *name, int uid, const CudnnAttention &a, int heads, int width,
                  CudnnStrides s) {
    t->set_output(true);
    t->set_name(name);
    t->set_uid(uid);
    t->set_dim({a.B, heads, a.T, width});
    t->set_stride({(int64_t)a.T * s.row, s.head, s.row, 1});
}

static void place_stats(Attributes &stats, const CudnnAttention &a) {
    stats.set_name("stats")
        .set_uid(UID_STATS)
        .set_dim({a.B, a.NQ, a.T, 1})
        .set_stride({(int64_t)a.NQ * a.T, a.T, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}

static void describe_forward(Graph &graph, const CudnnAttention &a, const TensorPointer &q, const TensorPointer &k,
                             const TensorPointer &v) {
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(true)
                       .set_attn_scale(a.scale)
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                       .set_diagonal_band_right_bound(0);
    auto [out, stats] = graph.sdpa(q, k, v, options);
    place(out, "out", UID_OUT, a, a.NQ, a.DV, a.out);
    place_stats(stats->set_output(true), a);
}

static void describe_backward(Graph &graph, const CudnnAttention &a, const TensorPointer &q, const TensorPointer &k,
                              const TensorPointer &v) {
    auto out = graph.tensor(described("out", UID_OUT, a, a.NQ, a.DV, a.out));
    auto dout = graph.tensor(described("dout", UID_DOUT, a, a.NQ, a.DV, a.out));
    Attributes given;
    place_stats(given, a);
    auto stats = graph.tensor(given);
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention backward")
                       .set_attn_scale(a.scale)
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                       .set_diagonal_band_right_bound(0)
                       .set_deterministic_algorithm(a.deterministic != 0);
    auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, stats, options);
    place(dq, "dq", UID_DQ, a, a.NQ, a.D, a.dq);
    place(dk, "dk", UID_DK, a, a.NKV, a.D, a.dk);
    place(dv, "dv", UID_DV, a, a.NKV, a.DV, a.dv);
}

static void describe(Graph &graph, const CudnnAttention &a) {
    setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", a.linear ? "0" : "-1", 1); // bytes of dS; -1: any number
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    auto q = graph.tensor(described("q", UID_Q, a, a.NQ, a.D, a.q));
    auto k = graph.tensor(described("k", UID_K, a, a.NKV, a.D, a.k));
    auto v = graph.tensor(described("v", UID_V, a, a.NKV, a.DV, a.v));
    if (a.backward) describe_backward(graph, a, q, k, v);
    else describe_forward(graph, a, q, k, v);
}

// ---------------------------------------------------------------------------------------------------
// The interface

extern "C" bool cudnn_attention_open(char *why, size_t size) {
    if (handle) return true;
    if (!cudnn_version_usable(cudnnGetVersion(), why, size)) return false;
    return guarded([&] { return good(cudnnCreate(&handle), "cuDNN does not start", why, size); }, why, size);
}

extern "C" void cudnn_attention_close(void) {
    if (handle) cudnnDestroy(handle); // at the end of the program: nothing is left that could be done
    handle = nullptr;
}

extern "C" const char *cudnn_attention_version(void) {
    static char text[64];
    size_t version = cudnnGetVersion(); // 91900: 9.19.0
    snprintf(text, sizeof(text), "cuDNN %zu.%zu.%zu, frontend %d.%d.%d", version / 10000, version / 100 % 100,
             version % 100, CUDNN_FRONTEND_VERSION / 10000, CUDNN_FRONTEND_VERSION / 100 % 100,
             CUDNN_FRONTEND_VERSION % 100);
    return text;
}

extern "C" int cudnn_attention_capability(void) {
    int device = 0, major = 0, minor = 0;
    bool known = cudaGetDevice(&device) == cudaSuccess &&
                 cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                 cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    return known ? 10 * major + minor : 0;
}

// The frontend that has it is 1.32.
static bool linear_exists(const CudnnAttention &a, int capability, char *why, size_t size) {
    return cudnn_linear_exists(&a, capability, CUDNN_FRONTEND_VERSION < 13200 ? 0 : cudnnGetVersion(), why, size);
}

extern "C" bool cudnn_attention_valid(const CudnnAttention *a, int capability, char *why, size_t size) {
    auto check = [&] {
        Graph graph;
        graph.set_sm_version(capability);
        describe(graph, *a);
        return good(graph.validate(), "not a graph", why, size);
    };
    return guarded(check, why, size);
}

static bool build(CudnnPlan *plan, const CudnnAttention &a, size_t *workspace_bytes, char *why, size_t size) {
    Graph &graph = plan->graph;
    int64_t bytes = 0;
    plan->backward = a.backward != 0;
    describe(graph, a);
    bool built = good(graph.validate(), "not a graph", why, size) &&
                 good(graph.build_operation_graph(handle), "no operation graph", why, size) &&
                 good(graph.create_execution_plans({fe::HeurMode_t::A}), "no plan", why, size) &&
                 good(graph.check_support(), "not supported", why, size) &&
                 good(graph.build_plans(), "the plan was not built", why, size) &&
                 good(graph.get_workspace_size(bytes), "no workspace size", why, size);
    if (built && bytes < 0) {
        explain(why, size, "the plan's workspace size is negative", "");
        return false;
    }
    *workspace_bytes = (size_t)bytes;
    return built;
}

extern "C" CudnnPlan *cudnn_attention_plan(const CudnnAttention *a, size_t *workspace_bytes, char *why, size_t size) {
    std::unique_ptr<CudnnPlan> plan;
    *workspace_bytes = 0;
    auto make = [&] {
        if (!linear_exists(*a, cudnn_attention_capability(), why, size)) return false;
        plan = std::make_unique<CudnnPlan>();
        return build(plan.get(), *a, workspace_bytes, why, size);
    };
    assert(handle);
    if (!guarded(make, why, size)) return nullptr;
    return plan.release();
}

extern "C" void cudnn_attention_free(CudnnPlan *plan) { delete plan; }

extern "C" bool cudnn_attention_run(CudnnPlan *plan, const CudnnTensors *t, void *workspace, void *stream, char *why,
                                    size_t size) {
    auto run = [&] {
        auto &at = plan->pointers;
        at[UID_Q] = const_cast<void *>(t->q);
        at[UID_K] = const_cast<void *>(t->k);
        at[UID_V] = const_cast<void *>(t->v);
        at[UID_OUT] = t->out;
        at[UID_STATS] = t->lse;
        if (plan->backward) {
            at[UID_DOUT] = const_cast<void *>(t->dout);
            at[UID_DQ] = t->dq;
            at[UID_DK] = t->dk;
            at[UID_DV] = t->dv;
        }
        return good(cudnnSetStream(handle, (cudaStream_t)stream), "cuDNN does not take the stream", why, size) &&
               good(plan->graph.execute(handle, at, workspace), "cuDNN does not run", why, size);
    };
    return guarded(run, why, size);
}
