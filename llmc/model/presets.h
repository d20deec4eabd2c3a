/*
presets.h: named model shapes, each with a learning rate and a batch. Options override the numbers of a preset. A preset
does not select the attention variant, whose parameters follow from the shape (model_config.h).

  tiny, small   byte vocabulary, heads and MLP in the proportions of the larger presets; tiny is for a CPU
  124m, 350m    depth, width, head dimension, context and vocabulary of the GPT-2 models of these names, with grouped
                keys and values and a SwiGLU MLP of about 8/3 of the width; the parameter counts are below
  the others    the Transformer baselines of the Differential Transformer paper (arXiv 2410.05258): the larger of its
                two head counts, as many key/value heads, vocabulary 100,288, sequences of 2048 tokens as in its
                scaling runs, tied embeddings (which reproduce its sizes). Its MLP width is 8/3 of the hidden size;
                here it is rounded up to a multiple of 64 for tensor cores (1.4b, 2.8b, 6.8b, 13.1b). 3b has the
                paper's 8192.

  NAME-1.5h, NAME-2h   NAME with 1.5 NH and 2 NH heads: further baselines for comparisons with DIFF V2. The first has
                the attention parameters of diff_v2 with NH heads, except lambda_proj; the second has its query heads
                and hence its attention kernel.

The three baselines and diff_v2 have the same number of key/value heads (hence the same cache size), which must divide
NH/2. It does not in the paper's shapes; there, compare at NKV = NH/2 by adding an option to NAME:
  --preset 1.4b --kv-heads 8 --attention diff_v2    --preset 1.4b-1.5h --attention baseline
  --preset 1.4b --kv-heads 8 --attention baseline   --preset 1.4b-2h --attention baseline
*/
#pragma once
#include "model_config.h"
#include <string.h>

typedef struct {
    const char *name;
    double lr;         // default of --lr
    int64_t tokens;    // tokens of an update, if neither --batch-size nor --total-batch is given
    ModelConfig model; // without an attention variant
} Preset;

// clang-format off
#define MODEL(L, C, NH, NKV, D, F, T, V, tied, E, K, FE)                                                              \
    {NULL, V, C, L, NH, NKV, D, F, T, E, K, FE, 0, 0, 10000, 1e-5, tied, 0, 0, false, false, 0, 0, false, 0, 0, 0}
// a shape, and the same shape with more heads and `more_kv` key/value heads
#define SHAPES(name, lr, tokens, L, C, NH, NKV, more_kv, D, F, T, V)                          \
    {name,         lr, tokens, MODEL(L, C, NH,         NKV,     D, F, T, V, true, 0, 0, 0)},  \
    {name "-1.5h", lr, tokens, MODEL(L, C, NH * 3 / 2, more_kv, D, F, T, V, true, 0, 0, 0)},  \
    {name "-2h",   lr, tokens, MODEL(L, C, NH * 2,     more_kv, D, F, T, V, true, 0, 0, 0)}
// the same shape with E experts of width FE; a token passes K of them
#define EXPERTS(name, lr, tokens, L, C, NH, NKV, D, F, T, V, tied, E, K, FE)                  \
    {name,         lr, tokens, MODEL(L, C, NH,         NKV, D, F, T, V, tied, E, K, FE)},     \
    {name "-1.5h", lr, tokens, MODEL(L, C, NH * 3 / 2, NKV, D, F, T, V, tied, E, K, FE)},     \
    {name "-2h",   lr, tokens, MODEL(L, C, NH * 2,     NKV, D, F, T, V, tied, E, K, FE)}
static const Preset presets[] = {
    //     name     lr      tokens   L   C     NH  NKV  more  D    F      T     V          // parameters of a baseline
    SHAPES("tiny",  4e-3,   1024,    4,  128,  4,  2,   2,    32,  352,   256,  256),        //        771,200
    SHAPES("small", 1e-3,   2048,    8,  256,  4,  2,   2,    64,  704,   256,  256),        //      5,968,128
    SHAPES("124m",  6e-4,   524288,  12, 768,  12, 6,   6,    64,  2048,  1024, 50257),      //    116,473,344
    SHAPES("350m",  3e-4,   524288,  24, 1024, 16, 8,   8,    64,  2752,  1024, 50257),      //    329,910,272
    SHAPES("830m",  1.5e-3, 262144,  24, 1536, 16, 16,  8,    96,  4096,  2048, 100288),     //    833,594,880
    SHAPES("1.4b",  1.5e-3, 262144,  24, 2048, 16, 16,  8,    128, 5504,  2048, 100288),     //  1,419,741,184
    SHAPES("2.8b",  1.5e-3, 262144,  32, 2560, 20, 20,  10,   128, 6848,  2048, 100288),     //  2,778,728,960
    SHAPES("3b",    3.2e-4, 4194304, 28, 3072, 24, 24,  12,   128, 8192,  2048, 100288),     //  3,479,153,664
    SHAPES("6.8b",  7.5e-4, 262144,  32, 4096, 32, 32,  16,   128, 10944, 2048, 100288),     //  6,861,885,440
    SHAPES("13.1b", 7.5e-4, 262144,  40, 5120, 40, 40,  20,   128, 13696, 2048, 100288),     // 13,123,015,680
    //      name         lr      tokens   L   C     NH  NKV  D    F     T     V       tied   E    K  FE
    EXPERTS("moe-tiny",   2e-3,   1024,    4,  128,  4,  2,   32,  352,  256,  256,    true,  8,   2, 176),
    EXPERTS("moe-small",  1e-3,   2048,    8,  256,  4,  2,   64,  704,  256,  256,    true,  16,  4, 176),
    EXPERTS("30b-a3b",    6e-4,   4194304, 48, 2048, 32, 4,   128, 6144, 4096, 151936, false, 128, 8, 768),
};
#undef MODEL
#undef SHAPES
#undef EXPERTS
// clang-format on
enum { PRESET_COUNT = sizeof(presets) / sizeof(presets[0]) };

// Whether a name is NAME-1.5h or NAME-2h, which lists leave out.
static inline bool preset_has_more_heads(const char *name) {
    const char *end = strrchr(name, '-');
    return end && (strcmp(end, "-1.5h") == 0 || strcmp(end, "-2h") == 0);
}
