/*
test_diffv2.cu: every CUDA operation against its C twin, on a GPU or (built with CUDA_ON_CPU) on the CPU.

  test_diffv2cu [--seed N] [--one-process] [--sizes PRESET KV_HEADS B T] [WORDS]
      all cases, or those whose line contains WORDS; it ends with `N passed, N failed`. With --sizes operations at the
      shapes of a model instead, compared on samples (tests/cuda_sizes.h).

One table of cases serves both; each prints its parameters and why it is there. On a GPU the inputs are fresh in every
run; --seed repeats them. A case that ends its process, for example by a failing CHECK, is one failure (isolation.h).
--one-process runs all cases in one process, as debuggers and compute-sanitizer need it; such a case then ends the run.
tests/cuda_engine.h says what a case checks besides the numbers.
*/
// Small enough that a case of few elements takes several rounds, the last of them partial.
#define RMSNORM_BLOCKS 64
#define SQUARES_PARTS 64
#define SQUARES_LEAST 2048
#include "tests/cuda_attention.h"
#include "tests/cuda_collectives.h"
#include "tests/cuda_sizes.h"
#include "tests/isolation.h"
#include "llmc/run/environment.h"

#ifdef USE_NCCL
static void check_collectives(const Case *c) { collectives_of_one_rank((size_t)c->n[0]); }
#endif

// Shapes that are no multiple of a pack (8 in bf16, 4 in fp32), of a warp, of a tile of 64; the smallest; and large
// enough for several blocks.
#define CUDNN_NAMES "B T NQ NKV D DV sets parts room calls"
// clang-format off
static const Case cases[] = {
    // operation                 check                       parameters               values                     shift why
    {"embedding_forward",        check_embedding_forward,    "N V C",                 {5, 11, 16},               0, "packs"},
    {"embedding_forward",        check_embedding_forward,    "N V C",                 {37, 3, 19},               0, "no packs"},
    {"embedding_forward",        check_embedding_forward,    "N V C",                 {9, 11, 16},               1, "addresses off the pack"},
    {"embedding_forward",        check_embedding_forward,    "N V C",                 {3, 5, 2568},              0, "two blocks of columns in a row and a part of one"},
    {"embedding_forward",        check_embedding_forward,    "N V C",                 {2, 3, 300},               1, "the same without packs"},
    {"embedding_forward",        check_embedding_forward,    "N V C",                 {1, 1, 1},                 0, "the smallest"},
    {"embedding_backward",       check_embedding_backward,   "N V C",                 {70, 11, 16},              0, "packs, tokens that repeat"},
    {"embedding_backward",       check_embedding_backward,   "N V C",                 {2500, 70000, 5},          0, "three warps of the sort, tokens of three digits"},
    {"embedding_backward",       check_embedding_backward,   "N V C",                 {1100, 259, 8},            1, "V % 8 = 3, two warps, addresses off the pack"},
    {"embedding_backward",       check_embedding_backward,   "N V C",                 {5130, 300, 8},            0, "more counts than threads that add them up"},
    {"embedding_backward",       check_embedding_backward,   "N V C",                 {200, 1, 2568},            0, "two rounds of columns and a part of one, more rows than threads"},
    {"embedding_backward",       check_embedding_backward,   "N V C",                 {5, 2, 300},               1, "the same without packs"},
    {"embedding_backward",       check_embedding_backward,   "N V C",                 {1, 1, 1},                 0, "the smallest"},
    {"embedding_backward in order", check_embedding_order,   "N V C",                 {1500, 46, 24},            0, "fp32 sums in the order of the rows, more and fewer than a warp"},
    {"embedding_backward in order", check_embedding_order,   "N V C",                 {700, 3, 40},              0, "rows of several warps, two blocks of columns"},
    {"rmsnorm_forward",          check_rmsnorm_forward,      "N C",                   {7, 64},                   0, "packs"},
    {"rmsnorm_forward",          check_rmsnorm_forward,      "N C",                   {130, 19},                 0, "no packs, more rows than a block"},
    {"rmsnorm_forward",          check_rmsnorm_forward,      "N C",                   {3, 1096},                 0, "a row of several packs per lane, not evenly"},
    {"rmsnorm_forward",          check_rmsnorm_forward,      "N C",                   {5, 64},                   1, "addresses off the pack"},
    {"rmsnorm_forward",          check_rmsnorm_forward,      "N C",                   {33, 8},                   0, "heads of width 8: several rows a warp"},
    {"rmsnorm_forward",          check_rmsnorm_forward,      "N C",                   {1, 1},                    0, "the smallest"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {7, 64},                   0, "packs"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {130, 19},                 0, "no packs"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {140, 768},                0, "several warps a row, several rows at once, in turns"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {2100, 8},                 0, "more rows than parts, heads of width 8"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {9, 1096},                 1, "addresses off the pack"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {3, 4104},                 0, "more packs than threads in fp32"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {3, 12304},                0, "more packs than threads"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {65, 12296},               0, "the same, and more rows than parts"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C",                   {1, 1},                    0, "the smallest"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C overwrite",         {9, 72, 1},                0, "dx is written, not added to"},
    {"rmsnorm_backward",         check_rmsnorm_backward,     "N C overwrite",         {5, 19, 1},                1, "likewise, no packs"},
    {"residual_rmsnorm_forward", check_residual_rmsnorm,     "N C",                   {7, 64},                   0, "packs"},
    {"residual_rmsnorm_forward", check_residual_rmsnorm,     "N C",                   {13, 19},                  0, "no packs"},
    {"residual_rmsnorm_forward", check_residual_rmsnorm,     "N C",                   {5, 328},                  1, "addresses off the pack"},
    {"matmul",                   check_matmul,               "N IC OC ldy",           {64, 64, 64, 64},          0, "all aligned"},
    {"matmul",                   check_matmul,               "N IC OC ldy",           {13, 24, 259, 320},        0, "V % 8 = 3, rows padded to 64"},
    {"matmul",                   check_matmul,               "N IC OC ldy",           {1, 40, 7, 64},            0, "one row"},
    {"matmul",                   check_matmul,               "N IC OC ldy",           {9, 5, 3, 3},              0, "nothing aligned"},
#ifdef CUDA_ON_CPU
    {"gemm",                     check_gemm_split,           "K parts",               {256, 4},                  0, "the sum over K may be divided"},
    {"gemm",                     check_gemm_split,           "K parts",               {200, 1},                  0, "a rest of K would be left out"},
    {"gemm",                     check_gemm_split,           "K parts",               {40, 1},                   0, "likewise, all of it"},
#endif
    {"gemm_plain",               check_gemm_plain,           "M N K gap",             {72, 136, 40, 0},          0, "packs, parts of tiles"},
    {"gemm_plain",               check_gemm_plain,           "M N K gap",             {65, 67, 33, 3},           0, "one beyond a tile, odd strides"},
    {"gemm_plain",               check_gemm_plain,           "M N K gap",             {1, 8, 64, 8},             1, "one row, addresses off the pack"},
    {"gemm_plain",               check_gemm_plain,           "M N K gap",             {1, 1, 1, 0},              0, "the smallest"},
    {"buffers",                  check_buffers,              "bytes times",           {1000, 20},                0, "more small uploads than pinned slots"},
    {"buffers",                  check_buffers,              "bytes times",           {3000001, 2},              0, "larger than a slot"},
    {"buffers",                  check_buffers,              "bytes times",           {2, 3},                    0, "tiny"},
#ifdef USE_NCCL
    {"collectives of one rank",  check_collectives,          "elements",              {70003},                  0, "NCCL, its stream and its thread; no multiple of a pack"},
#endif
    {"rope",                     check_rope,                 "B T heads D ldx first", {2, 9, 3, 16, 64, 0},      0, "packs, a row with other things behind the heads"},
    {"rope",                     check_rope,                 "B T heads D ldx first", {2, 33, 2, 10, 23, 0},     0, "D = 10, odd rows"},
    {"rope",                     check_rope,                 "B T heads D ldx first", {1, 3, 2, 128, 256, 7},    0, "generation: positions from 7 on"},
    {"rope",                     check_rope,                 "B T heads D ldx first", {1, 5, 1, 256, 320, 0},    1, "addresses off the pack"},
    {"rope",                     check_rope,                 "B T heads D ldx first", {1, 1, 1, 8, 8, 0},        0, "half of 8: half a pack in bf16"},
    {"rope",                     check_rope,                 "B T heads D ldx first", {2, 5, 3, 40, 132, 0},     0, "half of 40: half packs in bf16"},
    {"rope",                     check_rope,                 "B T heads D ldx first", {1, 5, 3, 40, 130, 0},     0, "the same, rows off the half packs"},
    {"rope",                     check_rope,                 "B T heads D ldx first", {1, 3, 41, 128, 5312, 0},  0, "columns of two blocks and a part of one"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {2, 64, 2, 1, 64, 64},     0, "whole tiles"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {1, 70, 4, 2, 16, 16},     0, "T beyond a tile by 6, GQA"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {2, 33, 3, 3, 10, 10},     0, "D = 10: no packs"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {1, 131, 2, 1, 8, 16},     0, "diff_v1: values of width 2D; three tiles"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {1, 66, 2, 1, 128, 128},   0, "D = 128"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {1, 65, 1, 1, 128, 256},   0, "D = 128, values of width 2D"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {1, 65, 1, 1, 256, 512},   0, "the widest: D = 256, values of width 2D"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {3, 1, 2, 1, 16, 16},      0, "one row"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {2, 17, 4, 1, 72, 72},     1, "addresses off the pack, a piece of 8 columns"},
    {"attention",                check_attention_plain,      "B T NQ NKV D DV",       {1, 5, 2, 2, 1, 3},        0, "the narrowest"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 64, 4, 2, 64, 64, 1, 1, 0, 0},      0, "whole tiles, groups"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {1, 131, 2, 2, 128, 128, 1, 1, 0, 0},   0, "no groups, D = 128, three tiles"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {6, 70, 6, 2, 64, 64, 1, 1, 4, 3},      0, "two sequences at a time, T beyond a tile"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {3, 65, 2, 2, 64, 64, 1, 1, 2, 1},      0, "room for one sequence, whose lse would be off the 16 bytes: all at once"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {3, 64, 2, 1, 64, 64, 1, 1, 2, 3},      0, "room for two of three sequences: one at a time"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 100, 4, 1, 64, 128, 2, 1, 0, 0},    0, "diff_v1: values of width 2D, the second key set"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 100, 4, 2, 64, 128, 2, 2, 0, 0},    0, "the same in halves"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {3, 65, 4, 2, 128, 256, 1, 2, 2, 3},    0, "D = 128, values of width 2D in halves, one sequence at a time"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 68, 12, 6, 64, 64, 1, 1, 4, 4},     0, "three groups of heads at a time of six, though there is room for four"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 68, 8, 2, 64, 128, 2, 2, 1, 4},     0, "one group at a time, values in halves, the second key set"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {1, 65, 6, 6, 64, 64, 1, 1, 1, 1},      0, "groups whose lse would be off the 16 bytes: all at once"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {1, 65, 2, 1, 128, 256, 1, 0, 0, 0},    0, "D = 128, values of width 2D, if cuDNN likes"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 33, 6, 2, 32, 64, 1, 0, 0, 0},      0, "diff_scalar: halves of 32"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 65, 4, 2, 16, 16, 1, 0, 0, 0},      0, "narrow heads"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {1, 131, 2, 1, 8, 16, 2, 0, 0, 0},      0, "the narrowest"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {2, 17, 4, 1, 72, 72, 1, 0, 0, 0},      0, "no power of two"},
    {"attention cuDNN",          check_attention_cudnn,    CUDNN_NAMES,             {3, 33, 3, 3, 12, 12, 1, 0, 0, 0},      0, "a width that it does not take"},
    {"attention documents",      check_attention_documents,  "B T NQ NKV D DV",       {2, 200, 2, 1, 16, 16},    0, "document masks that skip tiles"},
    {"attention documents",      check_attention_documents,  "B T NQ NKV D DV",       {1, 150, 2, 2, 10, 20},    0, "document masks, no packs"},
    {"attention generation",     check_attention_generation, "first T NQ NKV D DV",   {70, 1, 4, 2, 16, 16},     0, "one query after 70 keys"},
    {"attention generation",     check_attention_generation, "first T NQ NKV D DV",   {5, 67, 2, 1, 10, 10},     0, "a prompt that follows another"},
    {"sink",                     check_sink,                 "B T NH D learned",      {2, 9, 3, 16, 1},          0, "packs"},
    {"sink",                     check_sink,                 "B T NH D learned",      {1, 33, 2, 10, 1},         0, "no packs"},
    {"sink",                     check_sink,                 "B T NH D learned",      {2, 70, 2, 96, 1},         0, "D = 96: fewer lanes with several packs each"},
    {"sink",                     check_sink,                 "B T NH D learned",      {1, 300, 1, 256, 1},       1, "several parts, addresses off the pack"},
    {"sink",                     check_sink,                 "B T NH D learned",      {2, 5, 3, 128, 0},         0, "off_by_one"},
    {"sink",                     check_sink,                 "B T NH D learned",      {1, 530, 1, 512, 1},       0, "all parts; two packs per lane and more"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {7, 4, 16, 64, 1, 1},  0, "packs, neighbours"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {5, 6, 128, 67, 6, 1}, 0, "pairs (h, h + NH)"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {33, 3, 10, 3, 1, 0},  0, "no packs, no sigmoid"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {9, 2, 256, 2, 1, 0},  0, "width 256"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {9, 3, 96, 5, 1, 1},   0, "D = 96: fewer lanes with several packs each"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {9, 3, 80, 5, 3, 1},   0, "D = 80: the same, and not evenly"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {3, 2, 520, 2, 1, 1},      0, "two packs per lane and a part of a third"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {5, 2, 75, 3, 1, 0},       0, "the same without packs"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {3, 2, 8, 5, 1, 1},    1, "width 8, addresses off the pack"},
    {"diff_combine",             check_diff_combine,         "N NH D ldl stride sigmoid", {1, 1, 1, 1, 1, 1},    0, "the smallest"},
    {"layer_lambda",             check_layer_lambda,         "D count",               {16, 70},                  0, "DIFF V1's lambda"},
    {"layer_lambda",             check_layer_lambda,         "D count",               {10, 5003},                1, "no packs"},
    {"layer_lambda",             check_layer_lambda,         "D count",               {300, 1},                  0, "more numbers than threads, one row"},
    {"layer_lambda",             check_layer_lambda,         "D count",               {16, 20003},               0, "more rows than threads"},
    {"gate",                     check_gate,                 "N heads D ldg width",   {7, 3, 16, 64, 1},         0, "a gate per head"},
    {"gate",                     check_gate,                 "N heads D ldg width",   {7, 3, 16, 64, 16},        0, "a gate per element"},
    {"gate",                     check_gate,                 "N heads D ldg width",   {13, 3, 10, 37, 10},       0, "no packs"},
    {"gate",                     check_gate,                 "N heads D ldg width",   {5, 2, 128, 259, 128},     0, "gates' rows off the pack"},
    {"gate",                     check_gate,                 "N heads D ldg width",   {3, 2, 520, 2, 1},         0, "two packs per lane and a part of a third"},
    {"gate",                     check_gate,                 "N heads D ldg width",   {3, 2, 520, 1048, 520},    0, "the same, a gate per element"},
    {"gate",                     check_gate,                 "N heads D ldg width",   {33, 5, 256, 5, 1},        1, "addresses off the pack"},
    {"swiglu",                   check_swiglu,               "N F",                   {7, 64},                   0, "packs"},
    {"swiglu",                   check_swiglu,               "N F",                   {13, 43},                  0, "no packs"},
    {"swiglu",                   check_swiglu,               "N F",                   {65, 40},                  1, "addresses off the pack"},
    {"swiglu",                   check_swiglu,               "N F",                   {3, 2568},                 0, "two blocks of columns in a row and a part of one"},
    {"swiglu",                   check_swiglu,               "N F",                   {2, 300},                  1, "the same without packs"},
    {"elements",                 check_elements,             "count",                 {4096},                    0, "whole packs: residual, scale, fill"},
    {"elements",                 check_elements,             "count",                 {4999},                    0, "packs, the last block of them partial, and a rest of 7"},
    {"elements",                 check_elements,             "count",                 {3},                       0, "less than a pack"},
    {"elements",                 check_elements,             "count",                 {515},                     1, "addresses off the pack"},
    {"cross_entropy",            check_cross_entropy,        "N V Vp special",        {5, 256, 256, 0},          0, "whole packs"},
    {"cross_entropy",            check_cross_entropy,        "N V Vp special",        {5, 259, 320, 1},          0, "V % 8 = 3; a sure row, -inf, NaN, +inf"},
    {"cross_entropy",            check_cross_entropy,        "N V Vp special",        {3, 5003, 5056, 0},        0, "a large vocabulary"},
    {"cross_entropy",            check_cross_entropy,        "N V Vp special",        {3, 603, 704, 0},          0, "more packs, and more padding, than threads"},
    {"cross_entropy",            check_cross_entropy,        "N V Vp special",        {4, 3, 3, 1},              0, "tiny V, rows off the pack"},
    {"cross_entropy",            check_cross_entropy,        "N V Vp special",        {2, 1027, 1088, 0},        1, "addresses off the pack"},
    {"cross_entropy",            check_cross_entropy,        "N V Vp special",        {1, 1, 64, 0},             0, "one row, one class"},
    {"adamw_update",             check_adamw,                "count master step",     {4096, 1, 1},              0, "master weights, the first step"},
    {"adamw_update",             check_adamw,                "count master step",     {2603, 1, 7},              0, "packs, the last block of them partial, and a rest of 3"},
    {"adamw_update",             check_adamw,                "count master step",     {515, 1, 100},             1, "addresses off the pack"},
    {"adamw_update",             check_adamw,                "count master step",     {1003, 0, 7},              0, "no master weights"},
    {"sum_of_squares",           check_sum_of_squares,       "count first",           {150011, 0},               0, "all blocks, two rounds and a rest each"},
    {"sum_of_squares",           check_sum_of_squares,       "count first",           {100001, 1},               0, "addresses off the pack, 49 blocks"},
    {"sum_of_squares",           check_sum_of_squares,       "count first",           {3, 0},                    0, "less than a pack"},
    {"lambda_stats, rms_stats",  check_ranges,               "N NH ldl D",            {70, 3, 64, 16},           0, "ordinary"},
    {"lambda_stats, rms_stats",  check_ranges,               "N NH ldl D",            {1, 1, 1, 10},             1, "one row"},
    {"lambda_stats, rms_stats",  check_ranges,               "N NH ldl D",            {1003, 5, 5, 256},         0, "several rows a warp"},
    {"lambda_stats, rms_stats",  check_ranges,               "N NH ldl D",            {3301, 5, 6, 8},           0, "more rows than threads"},
    {"magnitude_stats",          check_magnitudes,           "count",                 {5000},                    0, "even count"},
    {"magnitude_stats",          check_magnitudes,           "count",                 {1},                       1, "one number"},
    {"magnitude_stats",          check_magnitudes,           "count",                 {20001},                   0, "odd count"},
    {"attention_stats",          check_attention_stats,      "B T heads stride sets documents", {2, 40, 4, 0, 1, 0},  0, "one map"},
    {"attention_stats",          check_attention_stats,      "B T heads stride sets documents", {2, 40, 4, 1, 1, 0},  0, "neighbours"},
    {"attention_stats",          check_attention_stats,      "B T heads stride sets documents", {1, 300, 2, 1, 1, 0},      0, "more keys than threads"},
    {"attention_stats",          check_attention_stats,      "B T heads stride sets documents", {1, 200, 2, 2, 1, 1}, 0, "pairs (h, h + NH), documents, more keys than threads"},
    {"attention_stats",          check_attention_stats,      "B T heads stride sets documents", {3, 17, 4, 1, 2, 1},  1, "two key sets"},
    {"attention_stats",          check_attention_stats,      "B T heads stride sets documents", {2, 1, 2, 1, 1, 0},   0, "T = 1: nothing to say"},
};
// clang-format on

static void case_line(char *line, size_t size, const Case *c) {
    size_t used = (size_t)snprintf(line, size, "%s ", c->operation);
    const char *name = c->names;
    for (int i = 0; *name; i++) {
        int length = (int)strcspn(name, " ");
        used += (size_t)snprintf(line + used, size - used, " %.*s=%d", length, name, c->n[i]);
        name += length + (name[length] == ' ');
    }
    if (c->shift) used += (size_t)snprintf(line + used, size - used, " shift=%d", c->shift);
    snprintf(line + used, size - used, "  (%s)", c->why);
}

// The chosen cases, by their places in the table, which the seeds of their inputs follow.
static struct {
    std::vector<const Case *> cases;
    std::vector<size_t> places;
    uint64_t seed;
} chosen;

static void describe_case(int i, char *line, size_t size) { case_line(line, size, chosen.cases[(size_t)i]); }
static void run_case(int i, TestCounts *counts) {
    const Case *c = chosen.cases[(size_t)i];
    char line[512];
    case_line(line, sizeof(line), c);
    double start = now_seconds();
    test_failures = 0;
    test_random.state = chosen.seed + chosen.places[(size_t)i];
    c->check(c);
    printf("%s %s (%.2f s)\n", test_failures ? "FAIL" : "ok  ", line, now_seconds() - start);
    test_failures ? counts->failed++ : counts->passed++;
}

static void choose_cases(const Case *table, size_t size, int count, char **words) {
    char line[512];
    for (int w = 0; w < count; w++) {
        bool fits = false;
        for (size_t i = 0; i < size; i++) {
            case_line(line, sizeof(line), &table[i]);
            fits = fits || test_word_fits(words[w], "", line);
        }
        CHECK(fits, "no case's line contains '%s'", words[w]);
    }
    for (size_t i = 0; i < size; i++) {
        case_line(line, sizeof(line), &table[i]);
        if (test_chosen(count, words, "", line)) chosen.cases.push_back(&table[i]), chosen.places.push_back(i);
    }
}

int main(int argc, char **argv) {
    environment_reexecute(argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
#ifdef CUDA_ON_CPU
    chosen.seed = 1;
#else
    chosen.seed = (uint64_t)time(NULL);
#endif
    bool one_process = false;
    for (; argc > 1 && strncmp(argv[1], "--", 2) == 0; argc--, argv++) {
        if (strcmp(argv[1], "--one-process") == 0) one_process = true;
        else if (strcmp(argv[1], "--seed") == 0 && argc > 2) chosen.seed = strtoull(argv[2], NULL, 10), argc--, argv++;
        else break;
    }
    std::vector<Case> large;
    if (argc > 5 && strcmp(argv[1], "--sizes") == 0) {
        large = sizes_cases(argv[2], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
        argc -= 5, argv += 5;
    }
    if (large.empty()) choose_cases(cases, sizeof(cases) / sizeof(cases[0]), argc - 1, argv + 1);
    else choose_cases(large.data(), large.size(), argc - 1, argv + 1);
    printf("storage %s, --seed %" PRIu64 "\n", sizeof(floatX) == 2 ? "bf16" : "fp32", chosen.seed);
    TestCounts counts = {0, 0, 0};
    const IsolatedCases isolated = {(int)chosen.cases.size(), device_start, run_case, describe_case};
    if (one_process) {
        device_start();
        for (int i = 0; i < isolated.count; i++) run_case(i, &counts);
    } else counts = run_isolated(&isolated);
    return test_end(&counts);
}
