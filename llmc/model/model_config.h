/*
model_config.h: the architecture of a model, its derived dimensions, and its problems.
*/
#pragma once
#include "../base/common.h"
#include "../ops/ops.h"
#include "../experts/routing.h"
#include "../experts/mlp_kinds.h"
#include "variants.h"

// How initial values and the update depend on the shape; parametrization.h has the rules.
typedef enum { PARAMETRIZATION_STANDARD, PARAMETRIZATION_COMPLETEP, PARAMETRIZATION_COUNT } Parametrization;
static const char *const parametrization_names[] = {"standard", "completep"};

typedef struct {
    const AttentionVariant *attention;
    int V, C, L, NH, NKV, D, F;
    int T;                    // max_position_embeddings
    int E, K, FE;             // experts of a layer, experts that a token passes, width of an expert; E = 0: no experts
    int shared, dense_layers; // experts that every token passes; first layers without experts
    double rope_theta, rms_norm_eps;
    bool tied;           // the LM head is the embedding
    int window;          // in layers with a window, position t attends to t-window+1 .. t; 0: no windows
    int full_every;      // every full_every-th layer has no window; 0: all layers have it
    bool yoco;           // the upper half of the layers attends to the keys and values of one layer (arXiv 2405.05254)
    bool qk_norm;        // RMSNorm of each query and key head, before the rotation
    int sparse_blocks;   // blocks of keys that a query selects (llmc/ops/attention/sparse.h); 0: it attends to all
    int sparse_size;     // positions of a block
    bool router_bias;    // routers add a bias per expert to the probabilities that they select by
    int parametrization; // a Parametrization
    int base_width, base_depth; // C and L that the learning rate was tuned at; 0: the model's C and L
} ModelConfig;

// Whether layer l belongs to the upper half of YOCO, whose layers have no k_proj and v_proj.
static inline bool layer_cross(const ModelConfig *c, int l) { return c->yoco && l >= c->L / 2; }
// The layer before which the keys and values of YOCO's upper half are computed; -1: none.
static inline int yoco_layer(const ModelConfig *c) { return c->yoco ? c->L / 2 : -1; }
// The window of layer l; 0: it attends to all earlier positions.
static inline int layer_window(const ModelConfig *c, int l) {
    bool full = layer_cross(c, l) || (c->full_every && (l + 1) % c->full_every == 0);
    return full ? 0 : c->window;
}
// The number of blocks of keys that a query of layer l selects; 0: it attends to all keys in the window.
static inline int layer_sparse(const ModelConfig *c, int l) {
    return c->full_every && (l + 1) % c->full_every == 0 ? 0 : c->sparse_blocks;
}

// The MLP of layer l.
static inline MlpDims mlp_dims(const ModelConfig *c, int l) {
    bool routed = c->E > 0 && l >= c->dense_layers;
    MlpDims d = {routed ? c->shared * c->FE : c->F, routed ? c->E : 0, routed ? c->K : 0, c->FE};
    return d;
}
// The number of layers with experts.
static inline int expert_layers(const ModelConfig *c) { return c->E > 0 ? c->L - c->dense_layers : 0; }

// The fastest bf16 kernels of cuBLAS require row widths that are multiples of 16 bytes, 8 elements (cuBLAS
// documentation, "Tensor Core Usage"). Products of arbitrary output width (q, k, v, lambda; the logits) therefore
// compute up to 7 more columns, whose weights and gradients are zero.
enum { MATRIX_ROWS = 8 };

// Dimensions of the attention of a configuration; variants.h has the equations.
typedef struct {
    int OH, DV, NQ, QD, NK, NV;
    HeadGroups groups;                                  // groups of the NQ query heads
    int q_rows, k_rows, v_rows, lambda_rows, gate_rows; // rows of the fused input matrix, in this order
    int k_at, v_at, lambda_at, gate_at;                 // first row of each; q is at 0
    int fused_rows;                                     // their sum
    int gate_width;                                     // gates per output head; 0: none
    int norm_width;  // elements of the attention output that are normalized together; 0: no norm
    int norm_count;  // norms per row: NH*D / norm_width; 0: no norm
    int rope_heads;  // heads at the start of a fused row that are rotated: q, k
    int kv_rows;     // rows of k and v together: of YOCO's shared matrix, and elements of a position in a cache
    int kv_ld;       // row stride of their activation: kv_rows rounded up to 64
    int fused_ld;    // row stride of the fused activation: fused_rows rounded up to 64
    int fused_width; // columns that products write and read: fused_rows rounded up to MATRIX_ROWS
    int lambda_ld;   // row stride of lambda: columns of the fused rows, or rows of its own
} AttentionDims;

// cross: the dimensions of a layer of layer_cross: its fused rows are [q | lambda | gate], and NK, NV and kv_* describe
// the shared keys and values.
static inline AttentionDims attention_dims(const ModelConfig *c, bool cross) {
    const AttentionVariant *a = c->attention;
    AttentionDims d;
    d.OH = c->NH / a->merge;
    d.DV = c->D * a->merge;
    d.groups.signals = a->noise == NOISE_LAST ? d.OH : a->signals;
    d.groups.noise = a->signals ? d.groups.signals / a->signals : 0;
    d.NQ = d.OH + (a->signals ? d.OH / a->signals : 0);
    d.QD = c->D / a->split;
    d.NV = c->NKV / a->merge;
    d.NK = a->key_sets * d.NV;
    d.q_rows = d.NQ * d.QD;
    d.kv_rows = d.NK * d.QD + d.NV * d.DV;
    d.kv_ld = (int)round_up(d.kv_rows, 64);
    d.k_rows = cross ? 0 : d.NK * d.QD;
    d.v_rows = cross ? 0 : d.NV * d.DV;
    d.rope_heads = d.NQ + (cross ? 0 : d.NK);
    d.lambda_rows = a->lambda == LAMBDA_INPUT ? c->NH : 0;
    d.gate_width = a->gate == GATE_HEAD ? 1 : a->gate == GATE_ELEM ? d.DV : 0;
    d.norm_width = a->norm == NORM_ALL ? d.OH * d.DV : a->norm == NORM_HEAD ? d.DV : 0;
    d.norm_count = d.norm_width ? d.OH * d.DV / d.norm_width : 0;
    d.gate_rows = d.OH * d.gate_width;
    d.k_at = d.q_rows;
    d.v_at = d.k_at + d.k_rows;
    d.lambda_at = d.v_at + d.v_rows;
    d.gate_at = d.lambda_at + d.lambda_rows;
    d.fused_rows = d.gate_at + d.gate_rows;
    d.fused_ld = (int)round_up(d.fused_rows, 64);
    d.fused_width = (int)round_up(d.fused_rows, MATRIX_ROWS);
    d.lambda_ld = d.lambda_rows ? d.fused_ld : d.OH;
    return d;
}

// Writes the problems of an architecture to `out`, one line each, at most `limit`; returns their number. V, C, L, F, T,
// NH and NKV are at least 1, as the ranges of options and config_int require.
typedef char Problem[256];
static inline int model_config_problems(const ModelConfig *c, Problem *out, int limit) {
    int n = 0;
#define PROBLEM(cond, ...) \
    if ((cond) && n < limit) FORMAT(out[n++], __VA_ARGS__)
    PROBLEM(c->D < 8 || c->D > 256 || c->D % 2, "head dimension must be even and from 8 to 256, not %d", c->D);
    PROBLEM(!(c->rope_theta > 0 && isfinite(c->rope_theta)), "rope theta must be positive, not %g", c->rope_theta);
    PROBLEM(!(c->rms_norm_eps >= 0 && c->rms_norm_eps < 1), "rms_norm_eps must be in [0, 1), not %g", c->rms_norm_eps);
    PROBLEM(c->NH % c->NKV, "%d heads are not a multiple of %d key/value heads", c->NH, c->NKV);
    PROBLEM(c->NH % c->attention->merge || c->NKV % c->attention->merge,
            "%s needs heads and key/value heads in multiples of %d, not %d and %d", c->attention->name,
            c->attention->merge, c->NH, c->NKV);
    PROBLEM(c->attention->signals > 1 && c->NH / c->NKV % c->attention->signals,
            "%s needs a multiple of %d heads for each key/value head, not %d heads for %d", c->attention->name,
            c->attention->signals, c->NH, c->NKV);
    PROBLEM(c->attention->noise == NOISE_LAST && c->NKV == 1,
            "%s pairs heads of different key/value groups: with 1 key/value head there are none", c->attention->name);
    PROBLEM(c->attention->split > 1 && c->D % (2 * c->attention->split),
            "%s needs a head dimension that is a multiple of %d, not %d", c->attention->name, 2 * c->attention->split,
            c->D);
    if (c->E > 0) {
        PROBLEM(c->K < 1 || c->K > c->E, "a token must have from 1 to %d active experts, the number of experts, not %d",
                c->E, c->K);
        PROBLEM(c->K > MAX_EXPERTS_ACTIVE, "a token must have at most %d active experts, not %d",
                (int)MAX_EXPERTS_ACTIVE, c->K);
        PROBLEM(c->FE < 1, "--expert-ffn must be at least 1, not %d", c->FE);
        PROBLEM(c->dense_layers >= c->L, "dense layers: %d leave no layer with experts, of %d layers", c->dense_layers,
                c->L);
        PROBLEM((int64_t)c->shared * c->FE > 1 << 24, "%d shared experts of width %d are too wide", c->shared, c->FE);
    }
    PROBLEM((int64_t)c->L * c->E > 1 << 20, "%d layers of %d experts are more experts than this program supports", c->L,
            c->E);
    PROBLEM(c->E > MAX_EXPERTS, "there must be at most %d experts, not %d", (int)MAX_EXPERTS, c->E);
    PROBLEM(c->E == 0 && (c->K || c->FE || c->shared || c->dense_layers),
            "--experts-active, --expert-ffn, --shared-experts and --dense-layers require --experts E");
    PROBLEM(c->router_bias && c->E == 0, "--router-bias requires --experts E");
    PROBLEM(c->full_every && !c->window && !c->sparse_blocks,
            "--full-every %d requires --window W or --sparse-blocks K", c->full_every);
    PROBLEM(c->full_every == 1, "--full-every 1 leaves all layers full; use 2 or more, or leave it out");
    PROBLEM(c->full_every > c->L, "--full-every %d is more than the %d layers; leave it out", c->full_every, c->L);
    PROBLEM(c->yoco && !c->window, "YOCO requires a window for the lower half of the layers");
    PROBLEM(c->yoco && c->full_every,
            "--yoco and --full-every are mutually exclusive: each layer of the lower half has a window");
    PROBLEM(c->yoco && c->L % 2, "YOCO requires an even number of layers, not %d", c->L);
    if (c->sparse_blocks) {
        int size = c->sparse_size, blocks = size > 0 ? c->T / size : 0;
        PROBLEM(size < 1 || c->T % size, "a sparse block size of %d does not divide the sequence length, %d", size,
                c->T);
        PROBLEM(size > 0 && c->T % size == 0 && c->sparse_blocks > blocks,
                "%d sparse blocks are more than the %d blocks of %d positions", c->sparse_blocks, blocks, c->T);
        PROBLEM(c->window && c->window < size, "a window of %d is shorter than a sparse block, %d", c->window, size);
    }
    bool based = c->base_width || c->base_depth;
    PROBLEM(c->parametrization == PARAMETRIZATION_COMPLETEP && !based,
            "completep requires a base width or a base depth: the shape at which the learning rate was tuned");
    PROBLEM(c->parametrization == PARAMETRIZATION_STANDARD && based,
            "a base width or base depth requires the parametrization completep, not standard");
    // the size of one row is an int; larger sizes are size_t
    PROBLEM((int64_t)c->NH * c->D > 1 << 24 || c->C > 1 << 24 || c->F > 1 << 24 || c->FE > 1 << 24 || c->V > 1 << 28 ||
                c->L > 1 << 16 || c->T > 1 << 24 || c->window > 1 << 24,
            "a dimension is too large for this program");
#undef PROBLEM
    return n;
}
