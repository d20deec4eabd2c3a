/*
mlp_kinds.h: the sizes of a layer's MLP: one that every token passes, experts among which a router selects for each
token, or both.

  The MLP that every token passes has the tensors mlp.*: in a dense layer it has the width F, in a layer with experts
  its width is the sum of the shared experts' widths. Experts have the tensors block_sparse_moe.*, as in Mixtral.
  source   Fedus, Zoph, Shazeer 2021, "Switch Transformers" (arXiv 2101.03961); Jiang et al. 2024, "Mixtral of Experts"
           (arXiv 2401.04088); Dai et al. 2024, "DeepSeekMoE" (arXiv 2401.06066), shared experts
*/
#pragma once

typedef struct {
    int width;                         // width of the MLP that every token passes; 0: there is none
    int experts, active, expert_width; // experts of the layer, experts that a token passes, width of an expert
} MlpDims;
