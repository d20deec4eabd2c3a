/*
mlp_kinds.h: the table of the kinds of MLP that a layer may have. A trait is a number that becomes a loop bound or a
size, as for attention variants.

  routed   1: a router sends each token to some of the layer's experts, and shared experts, if there are any, take every
           token; 0: one MLP takes every token

  The MLP that every token passes has the tensors mlp.*: in a dense layer it has the width F, in a layer with experts
  it is that of the shared experts side by side. Experts have the tensors block_sparse_moe.*, as in Mixtral.
  source   Fedus, Zoph, Shazeer 2021, "Switch Transformers" (arXiv 2101.03961); Jiang et al. 2024, "Mixtral of Experts"
           (arXiv 2401.04088); Dai et al. 2024, "DeepSeekMoE" (arXiv 2401.06066), shared experts
*/
#pragma once

typedef struct {
    const char *name;
    int routed;
} MlpKind;

typedef enum { MLP_DENSE, MLP_EXPERTS } MlpKindName;
static const MlpKind mlp_kinds[] = {
    {"dense", 0},
    {"experts", 1},
};

typedef struct {
    const MlpKind *kind;
    int width;                         // of the MLP that every token passes; 0: there is none
    int experts, active, expert_width; // experts of the layer, those that a token passes, width of one
} MlpDims;
