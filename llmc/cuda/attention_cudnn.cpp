/*
attention_cudnn.cpp: scaled dot-product attention by cuDNN's graph interface, through its C++ frontend (headers only).
A description becomes a graph of one node, and the graph a plan, once per shape; running a plan is one call.

  shapes    see attention_cudnn.h; they are passed to cuDNN as (B, heads, T, width) with strides: nothing is copied or
            padded
  numerics  bf16 products, fp32 sums and softmax. P and dS are rounded to bf16 before they are multiplied; with grouped
            heads each query head's part of dK and dV is also rounded before the parts are added.
  stats     cuDNN's "stats" are our lse: (B, NQ, T, 1) fp32, natural logarithm, after the scale
  backward  exp(scale q.k - stats) (dO V^T - rowsum(dO O)) is computed from the given O and stats, so the out and lse of
            a softmax with a sink (sink.h) give the correct gradients without a sink in the graph
  determinism  The fast backward adds dQ by atomics. The deterministic one stores dS of all heads (except on 10.x):
            B NQ T^2 bf16 of workspace, T rounded up to tiles; the caller limits the sequences and heads per call. An
            environment variable, which is set here, keeps the frontend from choosing a third backward of cuDNN 9.25.
  limits    bf16, compute capability 8.0 or higher. Widths are multiples of 8: backward to 128, on 9.x to 256 (10.x: 192
            with values of 128, or 256, by cuDNN 9.11 and 9.23); values of a different width if a plan for it exists.
            All strides and addresses are multiples of 16 bytes. T is arbitrary; T = 1 has no backward. The
            deterministic backward on 10.x requires cuDNN 9.18.
  bugs      9.8.0, 9.10.0 and 9.10.1 are refused (cudnn_version_usable). Frontends below 1.16 do not compile: 1.13 to
            1.14.1 give NaN if T % 128 != 0. A backward on 9.x that gives NaN if T % 128 = 64 and lse < -88.7 is found
            by a test run (attention_plans.cuh).
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

// In 1.13 to 1.14.1 the backward reads beyond sequences whose length is not a multiple of 128, which gives NaN.
#if CUDNN_FRONTEND_VERSION < 11600
#error "cudnn-frontend 1.16 or newer is required: scripts/install_deps.sh --with-cuda-python installs it"
#endif

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using Attributes = fe::graph::Tensor_attributes;
using TensorPointer = std::shared_ptr<Attributes>;

enum { UID_Q = 1, UID_K, UID_V, UID_OUT, UID_STATS, UID_DOUT, UID_DQ, UID_DK, UID_DV };
enum { UID_LENGTHS_Q = 20, UID_LENGTHS_KV, UID_OFFSETS }; // UID_OFFSETS and the following: one per CudnnTable

struct CudnnPlan {
    Graph graph;
    bool backward = false;
    int documents = 0;                            // B, if the sequences are documents
    std::unordered_map<int64_t, void *> pointers; // set by each run
};

static cudnnHandle_t handle;

// ---------------------------------------------------------------------------------------------------
// Reasons

// Makes one line from a message of several lines: its first line and the first reason in the other lines.
static void explain(char *why, size_t size, const char *what, const char *message) {
    int first = (int)strcspn(message, "\n");
    const char *reason = strstr(message + first, "Reason: ");
    while (first > 0 && message[first - 1] == '_') first--; // the placeholder of an operation without a name
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

// The frontend reports errors by status; the code below it may throw.
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

// The tensors of a graph.
struct Description {
    Graph &graph;
    const CudnnAttention &a;
    TensorPointer lengths[2], offsets[CUDNN_OFFSETS];

    Description(Graph &to, const CudnnAttention &of) : graph(to), a(of) {
        if (!a.documents) return;
        for (int i = 0; i < 2; i++) lengths[i] = integers("lengths", UID_LENGTHS_Q + i, a.B, fe::DataType_t::INT32);
        for (int i = 0; i < (a.backward ? CUDNN_OFFSETS : CUDNN_DQ); i++)
            offsets[i] = integers("offsets", UID_OFFSETS + i, a.B + 1, fe::DataType_t::INT64);
    }
    TensorPointer integers(const char *name, int uid, int count, fe::DataType_t type) {
        return graph.tensor(Attributes()
                                .set_name(name)
                                .set_uid(uid)
                                .set_dim({count, 1, 1, 1})
                                .set_stride({1, 1, 1, 1})
                                .set_data_type(type));
    }
    void place(Attributes &t, const char *name, int uid, CudnnTable table, int heads, int width, CudnnStrides s) {
        t.set_name(name).set_uid(uid).set_dim({a.B, heads, a.T, width});
        t.set_stride({(int64_t)a.T * s.row, s.head, s.row, 1});
        if (a.documents) t.set_ragged_offset(offsets[table]);
    }
    TensorPointer input(const char *name, int uid, CudnnTable table, int heads, int width, CudnnStrides s) {
        Attributes t;
        place(t, name, uid, table, heads, width, s);
        return graph.tensor(t);
    }
    // Describes an output, which the graph has created.
    void output(const TensorPointer &t, const char *name, int uid, CudnnTable table, int heads, int width,
                CudnnStrides s) {
        t->set_output(true);
        place(*t, name, uid, table, heads, width, s);
    }
    void place_stats(Attributes &t) {
        place(t, "stats", UID_STATS, CUDNN_LSE, a.NQ, 1, CudnnStrides{1, a.T});
        t.set_stride({(int64_t)a.NQ * a.T, a.T, 1, 1}).set_data_type(fe::DataType_t::FLOAT);
    }
    // A left bound of W keeps the keys with key + W > row.
    template <typename Options> void mask(Options &options) {
        options.set_attn_scale(a.scale)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        if (a.window) options.set_diagonal_band_left_bound(a.window);
        if (a.documents) options.set_padding_mask(true).set_seq_len_q(lengths[0]).set_seq_len_kv(lengths[1]);
    }
    void forward(const TensorPointer &q, const TensorPointer &k, const TensorPointer &v) {
        fe::graph::SDPA_attributes options;
        options.set_name("attention").set_generate_stats(true);
        mask(options);
        auto [out, stats] = graph.sdpa(q, k, v, options);
        output(out, "out", UID_OUT, CUDNN_OUT, a.NQ, a.DV, a.out);
        place_stats(stats->set_output(true));
    }
    void backward(const TensorPointer &q, const TensorPointer &k, const TensorPointer &v) {
        auto out = input("out", UID_OUT, CUDNN_OUT, a.NQ, a.DV, a.out);
        auto dout = input("dout", UID_DOUT, CUDNN_OUT, a.NQ, a.DV, a.out);
        Attributes given;
        place_stats(given);
        auto stats = graph.tensor(given);
        fe::graph::SDPA_backward_attributes options;
        options.set_name("attention backward").set_deterministic_algorithm(a.deterministic != 0);
        mask(options);
        auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, stats, options);
        output(dq, "dq", UID_DQ, CUDNN_DQ, a.NQ, a.D, a.dq);
        output(dk, "dk", UID_DK, CUDNN_DK, a.NKV, a.D, a.dk);
        output(dv, "dv", UID_DV, CUDNN_DV, a.NKV, a.DV, a.dv);
    }
};

static void describe(Graph &graph, const CudnnAttention &a) {
    setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "-1", 1); // bytes of dS; -1: unlimited
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    Description d(graph, a);
    auto q = d.input("q", UID_Q, CUDNN_Q, a.NQ, a.D, a.q);
    auto k = d.input("k", UID_K, CUDNN_K, a.NKV, a.D, a.k);
    auto v = d.input("v", UID_V, CUDNN_V, a.NKV, a.DV, a.v);
    if (a.backward) d.backward(q, k, v);
    else d.forward(q, k, v);
}

// ---------------------------------------------------------------------------------------------------
// The interface

extern "C" bool cudnn_attention_open(char *why, size_t size) {
    if (handle) return true;
    if (!cudnn_version_usable(cudnnGetVersion(), why, size)) return false;
    return guarded([&] { return good(cudnnCreate(&handle), "cuDNN does not start", why, size); }, why, size);
}

extern "C" void cudnn_attention_close(void) {
    if (handle) cudnnDestroy(handle); // at the end of the program: an error has no consequence
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

static bool build(CudnnPlan *plan, const CudnnAttention &a, size_t *workspace_bytes, char *why, size_t size) {
    Graph &graph = plan->graph;
    int64_t bytes = 0;
    plan->backward = a.backward != 0;
    plan->documents = a.documents ? a.B : 0;
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
        if (plan->documents) {
            int64_t *offsets = (int64_t *)const_cast<void *>(t->offsets);
            at[UID_LENGTHS_Q] = at[UID_LENGTHS_KV] = const_cast<void *>(t->lengths);
            for (int i = 0; i < (plan->backward ? CUDNN_OFFSETS : CUDNN_DQ); i++)
                at[UID_OFFSETS + i] = offsets + (size_t)i * cudnn_table_stride(plan->documents);
        }
        return good(cudnnSetStream(handle, (cudaStream_t)stream), "cuDNN does not take the stream", why, size) &&
               good(plan->graph.execute(handle, at, workspace), "cuDNN does not run", why, size);
    };
    return guarded(run, why, size);
}
