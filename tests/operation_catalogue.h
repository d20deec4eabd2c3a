/*
operation_catalogue.h: every operation, described once: shapes and rounding errors (setup), definition in double, call,
bytes, FLOPs and workspace. operation_table.h has the cases of each, with their reasons, and operation_sizes.h the
shapes of each in a step of a model. What uses them:

  operation_engine.h     C against the definition and against finite differences of it, with several numbers of threads
  cuda_engine.h          CUDA against C in double, with several orders of threads and the exact workspace
  dev/bench              the time of both, beside the bytes and FLOPs

To add an operation, add a name to OpKindName, an entry here, its cases with a reason each, and its shapes in a model.

There is no include guard, here and in the parts: a CUDA program includes this file once for its operations, and within
namespace twin for the C operations.
*/
#include "operation.h"

#include "operation_rows.h"

#include "operation_attention.h"

#include "operation_update.h"

#include "operation_experts.h"

#define FORWARD(name) name##_setup, name##_reference, name##_call, NULL
#define BOTH_WAYS(name) name##_setup, name##_reference, name##_call, name##_call_backward
static const OpKind op_kinds[OP_KIND_COUNT] = {
    {"embedding", "N V C", BOTH_WAYS(embedding), embedding_cost},
    {"rmsnorm", "N C 1/scale add", BOTH_WAYS(rmsnorm), rmsnorm_cost},
    {"matmul", "N IC OC ldy add", BOTH_WAYS(matmul), matmul_cost},
    {"linear in fp8", "N IC OC ld special", linear_fp8_setup, NULL, linear_fp8_call, linear_fp8_call_backward,
     linear_fp8_cost},
    {"rope", "B T heads D ldx first", BOTH_WAYS(rope), rope_cost},
    {"attention", "B T NQ NKV D DV maps padding add_dv=1,documents=2 first no_lse window", BOTH_WAYS(attention),
     attention_cost},
    {"attention of two sets", "B T NQ NKV D DV maps padding window", BOTH_WAYS(attention_sets), attention_cost},
    {"attention with sinks", "B T NQ NKV D DV learned padding", BOTH_WAYS(sinks), attention_cost},
    {"diff_combine", "N NH D ldl signals noise factor", BOTH_WAYS(diff_combine), diff_combine_cost},
    {"diff_attention", "B T groups NKV D DV signals padding factor documents window", BOTH_WAYS(diff_attention),
     diff_attention_cost},
    {"lambda_exp", "D count layer", BOTH_WAYS(lambda_exp), layer_lambda_cost},
    {"lambda_learned", "count", BOTH_WAYS(lambda_learned), layer_lambda_cost},
    {"fill", "count 8*value", FORWARD(fill), layer_lambda_cost},
    {"scale_inplace", "count 10*factor", BOTH_WAYS(scale), scale_cost},
    {"accumulate", "count add", FORWARD(accumulate), accumulate_cost},
    {"cache_store", "B T capacity width ld first,NULL=-1", FORWARD(cache_store), cache_store_cost},
    {"cache_load", "first count capacity width", FORWARD(cache_load), cache_load_cost},
    {"attention_decode", "B NQ NKV D DV maps padding capacity first no_lse all", FORWARD(decode), decode_cost},
    {"gate", "N heads D ldg width", BOTH_WAYS(gate), gate_cost},
    {"head_norm", "N heads D ld ldk,NULL=0 1/scale", BOTH_WAYS(head_norm), head_norm_cost},
    {"swiglu", "N F scale", BOTH_WAYS(swiglu), swiglu_cost},
    {"cross_entropy", "N V Vp special z", BOTH_WAYS(cross_entropy), cross_entropy_cost},
    {"residual_rmsnorm", "N C", FORWARD(residual_rmsnorm), residual_rmsnorm_cost},
    {"sink", "B T NH D learned", BOTH_WAYS(sink), sink_cost},
    {"adamw_update", "rows width master step numbers", FORWARD(adamw), adamw_cost},
    {"muon_direction", "count", FORWARD(muon_direction), muon_direction_cost},
    {"muon_orthogonalize", "rows columns normuon", FORWARD(muon_orthogonalize), muon_orthogonalize_cost},
    {"muon_update", "count master", FORWARD(muon_update), muon_update_cost},
    {"sum_of_squares", "count", FORWARD(sum_of_squares), sum_of_squares_cost},
    {"router", "N C E K losses bias add", BOTH_WAYS(router), router_cost},
    {"router_totals", "N C E K", FORWARD(router_totals), router_totals_cost},
    {"router_balance", "E begin master", FORWARD(router_balance), router_balance_cost},
    {"expert_group", "N C E K F skew", FORWARD(expert_group), expert_group_cost},
    {"expert_gather", "N C E K F skew add", BOTH_WAYS(expert_gather), expert_gather_cost},
    {"expert_swiglu", "N C E K F skew", BOTH_WAYS(expert_swiglu), expert_swiglu_cost},
    {"expert_linear", "N IC E K OC/2 skew add", BOTH_WAYS(expert_linear), expert_linear_cost},
    {"expert_linear in fp8", "N IC E K OC skew", expert_linear_fp8_setup, NULL, expert_linear_call,
     expert_linear_call_backward, expert_linear_cost},
};
#undef FORWARD
#undef BOTH_WAYS

// The layout of a case; data and ref are NULL.
static inline void op_describe(OpCase *c, OpKindName kind, const int *d) {
    memset(c, 0, sizeof(*c));
    c->kind = kind;
    c->d = d;
    c->length = 1;
    for (int i = 0; i < OP_TENSORS; i++) c->x[i].spread = c->dx[i].spread = c->y[i].spread = 1;
    op_kinds[kind].setup(c);
    c->no_backward = c->no_backward || !op_kinds[kind].call_backward;
    for (int i = 0; i < OP_TENSORS; i++) {
        memcpy(c->dx[i].view, c->x[i].view, sizeof(c->x[i].view));
        c->dx[i].views = c->x[i].constant ? 0 : c->x[i].views;
        c->dx[i].count = c->x[i].count;
    }
}
static inline OpCost op_cost_of(const OpCase *c, bool backward) {
    return op_kinds[c->kind].cost ? op_kinds[c->kind].cost(c, backward) : op_cost(0, 0, 0);
}
// What a layer in FP8 reads besides its operands: their largest magnitudes, and the rounded weights.
static inline void op_prepare_fp8(const OpCase *c, bool backward) {
    const OpView *x = c->x[0].view, *y = c->y[0].view;
    absmax_update(OP_OPERAND_X, x->rows, x->width, x->ld);
    if (backward) absmax_update(OP_OPERAND_DY, y->rows, y->width, y->ld);
    if (c->kind == OP_LINEAR_FP8) {
        const Linear w = op_linear(c);
        linear_copy_weight(&w);
    } else {
        const ExpertLinear w = op_expert_linear(c);
        expert_linear_copy_weights(&w);
    }
}
static inline void op_call(const OpCase *c, bool backward) {
    (backward ? op_kinds[c->kind].call_backward : op_kinds[c->kind].call)(c);
}
// Its name as in ops.h and in the tables of the benchmarks: NAME_forward and NAME_backward, if there are two.
static inline void op_call_name(char *name, size_t size, const OpCase *c, bool backward) {
    const OpKind *kind = &op_kinds[c->kind];
    const char *base = kind->name, *end = "";
    if (c->kind == OP_EXPERT_GATHER) base = backward ? "expert_combine" : base;
    else if (c->dloss != 0) end = backward ? "" : " of an evaluation"; // one function computes both
    else if (c->kind == OP_RESIDUAL_RMSNORM || (kind->call_backward && c->kind != OP_SCALE))
        end = backward ? "_backward" : "_forward";
    const int word = (int)strcspn(base, " ");
    snprintf(name, size, "%.*s%s%s", word, base, end, base + word);
}
