/*
operation_sizes.h: the shapes of the operations in a step of a model, for dev/bench and operation_traffic.h.
*/
#pragma once
#include "operation.h"

// A model and a micro-batch. The fused rows [q | k | v | lambda] have the row stride ld.
typedef struct {
    int B, T, L, C, F, NH, NKV, D, V, Vw, Vp; // Vw: rows of the LM head that are computed
    int NQ, QD, rotated, width, ld;           // query heads, their width, the heads that rope rotates, a fused row
    int E, K, FE;                             // experts, 0: none
    int logit_rows, update_rows;              // rows of logits at a time; of width C that one update changes
} OpModel;

typedef struct {
    OpKindName kind;
    const char *what; // which of several shapes; empty: the only one
    int d[OP_DIMS];
    double calls[2]; // in a step: forward, backward; 0: in no step of diff_v2; -1: it is that of another row
} OpSize;
enum { OP_SIZES = 36 };
#ifdef DEVICE_OPS
enum { OP_MASTER = sizeof(floatX) == 2 }; // whether the update has master weights
#else
enum { OP_MASTER = 0 };
#endif

static int op_sizes(OpSize *list, const OpModel *m) {
    const int N = m->B * m->T, NH = m->NH, D = m->D, rows = min_int(N, m->logit_rows), gates = NH * D,
              ldg = (int)round_up((size_t)NH, 64), block = NH % 4 ? 1 : 4;
    const double L = m->L, chunks = (double)N / rows;
    const OpSize all[] = {
        {OP_RMSNORM, "", {N, m->C, 1, 1}, {1, 2 * L + 1}},
        {OP_RESIDUAL_RMSNORM, "", {N, m->C}, {2 * L, 0}},
        {OP_SCALE, "", {N * m->C, -10}, {0, -1}},
        {OP_SWIGLU, "", {N, m->F, 1}, {L, L}},
        {OP_EMBEDDING, "", {N, m->V, m->C}, {1, 1}},
        {OP_CROSS_ENTROPY, "", {rows, m->V, m->Vp}, {0, chunks}},
        {OP_ADAMW, "", {m->update_rows, m->C, OP_MASTER, 100, 0}, {1, 0}},
        {OP_MUON_DIRECTION, "", {m->update_rows * m->C}, {0, 0}},
        {OP_MUON_UPDATE, "", {m->update_rows * m->C, OP_MASTER}, {0, 0}},
        {OP_SUM_OF_SQUARES, "", {m->update_rows * m->C}, {1, 0}},
        {OP_ROPE, "", {m->B, m->T, m->rotated, m->QD, m->ld, 0}, {L, L}},
        {OP_DIFF_COMBINE, "", {N, NH, D, m->ld, 1, 1, S_SIGMOID}, {L, L}},
        {OP_DIFF_COMBINE, "shared", {N, NH, D, m->ld, block, 1, S_SIGMOID}, {0, 0}},
        {OP_HEAD_NORM, "query heads", {N, m->NQ, m->QD, m->ld, m->NQ * m->QD, 1}, {0, 0}},
        {OP_SINK, "", {m->B, m->T, NH, D, 1}, {0, 0}},
        {OP_GATE, "per head", {N, NH, D, ldg, 1}, {0, 0}},
        {OP_GATE, "per element", {N, NH, D, gates, D}, {0, 0}},
        {OP_MATMUL, "q, k, v, lambda", {N, m->C, m->width, m->ld, 1}, {L, L}},
        {OP_MATMUL, "o_proj", {N, NH * D, m->C, m->C, 1}, {L, L}},
        {OP_MATMUL, "gate, up", {N, m->C, 2 * m->F, 2 * m->F, 1}, {L, L}},
        {OP_MATMUL, "down", {N, m->F, m->C, m->C, 1}, {L, L}},
        {OP_MATMUL, "head", {rows, m->C, m->Vw, m->Vp, 1}, {chunks, chunks}},
        {OP_ROUTER, "", {N, m->C, m->E, m->K, 1, 0, 1}, {0, 0}},
        {OP_ROUTER, "bias", {N, m->C, m->E, m->K, 1, 1, 1}, {0, -1}},
        {OP_ROUTER_TOTALS, "", {N, m->C, m->E, m->K}, {0, 0}},
        {OP_ROUTER_BALANCE, "", {m->E, 0, OP_MASTER}, {0, 0}},
        {OP_EXPERT_GROUP, "", {N, m->C, m->E, m->K, m->FE}, {0, 0}},
        {OP_EXPERT_GATHER, "", {N, m->C, m->E, m->K, m->FE}, {0, 0}},
        {OP_EXPERT_GATHER, "adds", {N, m->C, m->E, m->K, m->FE, 0, 1}, {-1, 0}},
        {OP_EXPERT_SWIGLU, "", {N, m->C, m->E, m->K, m->FE}, {0, 0}},
        {OP_EXPERT_LINEAR, "gate, up", {N, m->C, m->E, m->K, m->FE, 0, 1}, {0, 0}},
        {OP_EXPERT_LINEAR, "down", {N, m->FE, m->E, m->K, m->C / 2, 0, 1}, {0, 0}},
    };
    const int EXPERTS = 10, count = (int)(sizeof(all) / sizeof(all[0])) - (m->E ? 0 : EXPERTS);
    assert(count <= OP_SIZES && all[sizeof(all) / sizeof(all[0]) - (size_t)EXPERTS].kind == OP_ROUTER);
    memcpy(list, all, (size_t)count * sizeof(all[0]));
    return count;
}
