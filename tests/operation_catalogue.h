/*
operation_catalogue.h: every operation, described once: shapes and rounding errors (setup), definition in double, call,
bytes, FLOPs and workspace. operation_table.h has the cases of each, with their reasons, and operation_sizes.h the
shapes of each in a step of a model. What uses them:

  operation_engine.h     C against the definition and against finite differences of it, with several numbers of threads
  cuda_engine.h          CUDA against C in double, with several orders of threads and the exact workspace
  cuda_sizes.h           CUDA against C on samples, at the shapes of a model
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

static const OpKind op_kinds[OP_KIND_COUNT] = {
    {"embedding", "N V C", embedding_setup, embedding_reference, embedding_call, embedding_call_backward,
     embedding_cost},
    {"rmsnorm", "N C 1/scale add", rmsnorm_setup, rmsnorm_reference, rmsnorm_call, rmsnorm_call_backward, rmsnorm_cost},
    {"matmul", "N IC OC ldy add", matmul_setup, matmul_reference, matmul_call, matmul_call_backward, matmul_cost},
    {"linear in fp8", "N IC OC ld special", linear_fp8_setup, NULL, linear_fp8_call, linear_fp8_call_backward,
     linear_fp8_cost},
    {"rope", "B T heads D ldx first", rope_setup, rope_reference, rope_call, rope_call_backward, rope_cost},
    {"attention", "B T NQ NKV D DV maps padding add_dv=1,documents=2 first no_lse window", attention_setup,
     attention_reference, attention_call, attention_call_backward, attention_cost},
    {"attention of two sets", "B T NQ NKV D DV maps padding window", attention_sets_setup, attention_sets_reference,
     attention_sets_call, attention_sets_call_backward, attention_cost},
    {"attention with sinks", "B T NQ NKV D DV learned padding", sinks_setup, sinks_reference, sinks_call,
     sinks_call_backward, attention_cost},
    {"diff_combine", "N NH D ldl signals noise factor", diff_combine_setup, diff_combine_reference, diff_combine_call,
     diff_combine_call_backward, diff_combine_cost},
    {"diff_attention", "B T groups NKV D DV signals padding factor add_dv=1,documents=2 window", diff_attention_setup,
     diff_attention_reference, diff_attention_call, diff_attention_call_backward, diff_attention_cost},
    {"lambda_exp", "D count layer", lambda_exp_setup, lambda_exp_reference, lambda_exp_call, lambda_exp_call_backward,
     layer_lambda_cost},
    {"lambda_learned", "numbers N NH", lambda_learned_setup, lambda_learned_reference, lambda_learned_call,
     lambda_learned_call_backward, layer_lambda_cost},
    {"fill", "count 8*value", fill_setup, fill_reference, fill_call, NULL, layer_lambda_cost},
    {"scale_inplace", "count 10*factor", scale_setup, scale_reference, scale_call, scale_call_backward, scale_cost},
    {"accumulate", "count add", accumulate_setup, accumulate_reference, accumulate_call, NULL, accumulate_cost},
    {"cache_store", "B T capacity width ld first,NULL=-1", cache_store_setup, cache_store_reference, cache_store_call,
     NULL, cache_store_cost},
    {"cache_load", "first count capacity width", cache_load_setup, cache_load_reference, cache_load_call, NULL,
     cache_load_cost},
    {"attention_decode", "B NQ NKV D DV maps padding capacity first no_lse all", decode_setup, decode_reference,
     decode_call, NULL, decode_cost},
    {"quantize_inplace", "N columns ld bits whole", quantize_setup, quantize_reference, quantize_call, NULL,
     quantize_cost},
    {"attention_quantized", "B T NQ NKV D DV maps padding documents bits window", attention_quantized_setup,
     attention_quantized_reference, attention_quantized_call, NULL, NULL},
    {"gate", "N heads D ldg width", gate_setup, gate_reference, gate_call, gate_call_backward, gate_cost},
    {"exclusive", "N heads NKV D ldv", exclusive_setup, exclusive_reference, exclusive_call, exclusive_call_backward,
     exclusive_cost},
    {"head_norm", "N heads D ld ldk,NULL=0 1/scale", head_norm_setup, head_norm_reference, head_norm_call,
     head_norm_call_backward, head_norm_cost},
    {"swiglu", "N F scale", swiglu_setup, swiglu_reference, swiglu_call, swiglu_call_backward, swiglu_cost},
    {"cross_entropy", "N V Vp special z masked", cross_entropy_setup, cross_entropy_reference, cross_entropy_call,
     cross_entropy_call_backward, cross_entropy_cost},
    {"residual_rmsnorm", "N C", residual_rmsnorm_setup, residual_rmsnorm_reference, residual_rmsnorm_call, NULL,
     residual_rmsnorm_cost},
    {"sink", "B T NH D learned", sink_setup, sink_reference, sink_call, sink_call_backward, sink_cost},
    {"adamw_update", "rows width master step numbers", adamw_setup, adamw_reference, adamw_call, NULL, adamw_cost},
    {"muon_direction", "count", muon_direction_setup, muon_direction_reference, muon_direction_call, NULL,
     muon_direction_cost},
    {"muon_orthogonalize", "slices rows columns layout normuon", muon_orthogonalize_setup, muon_orthogonalize_reference,
     muon_orthogonalize_call, NULL, muon_orthogonalize_cost},
    {"muon_update", "count master", muon_update_setup, muon_update_reference, muon_update_call, NULL, muon_update_cost},
    {"sum_of_squares", "count", sum_of_squares_setup, sum_of_squares_reference, sum_of_squares_call, NULL,
     sum_of_squares_cost},
    {"router", "N C E K losses bias add", router_setup, router_reference, router_call, router_call_backward,
     router_cost},
    {"router_totals", "N C E K", router_totals_setup, router_totals_reference, router_totals_call, NULL,
     router_totals_cost},
    {"router_balance", "E begin master", router_balance_setup, router_balance_reference, router_balance_call, NULL,
     router_balance_cost},
    {"expert_group", "N C E K F skew", expert_group_setup, expert_group_reference, expert_group_call, NULL,
     expert_group_cost},
    {"expert_gather", "N C E K F skew add", expert_gather_setup, expert_gather_reference, expert_gather_call,
     expert_gather_call_backward, expert_gather_cost},
    {"expert_swiglu", "N C E K F skew", expert_swiglu_setup, expert_swiglu_reference, expert_swiglu_call,
     expert_swiglu_call_backward, expert_swiglu_cost},
    {"expert_linear", "N IC E K OC/2 skew add", expert_linear_setup, expert_linear_reference, expert_linear_call,
     expert_linear_call_backward, expert_linear_cost},
    {"expert_linear in fp8", "N IC E K OC skew", expert_linear_fp8_setup, NULL, expert_linear_call,
     expert_linear_call_backward, expert_linear_cost},
};

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
    absmax_update(c->operand_max[0], OP_X(0), x->rows, x->width, x->ld);
    if (backward) absmax_update(c->operand_max[1], OP_DY, y->rows, y->width, y->ld);
    if (c->kind == OP_LINEAR_FP8) linear_copy_weight(op_linear(c));
    else expert_linear_copy_weights(op_expert_linear(c));
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
