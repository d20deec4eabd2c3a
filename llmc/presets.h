/*
presets.h: named model shapes. A preset gives what no flag gives; it says nothing of the attention
variant, whose parameters follow from the shape (model_config.h).

  tiny, small   a vocabulary of bytes, heads and MLP in the proportions of the larger ones; tiny is for a CPU
  124m, 350m    the depth, width, head dimension, context and vocabulary of the GPT-2 sizes of these names,
                with grouped keys and values and a SwiGLU MLP of about 8/3 of the width; the names are
                GPT-2's, the parameter counts are below
  the others    the Transformers that the Differential Transformer paper (arXiv 2410.05258) compares with:
                the larger of its two head counts, as many key/value heads, vocabulary 100,288, sequences
                of 2048 tokens as in its scaling runs, tied embeddings (with which its sizes come out). Its
                MLP is 8/3 of the width; where that is no multiple of 64 (1.4b, 2.8b, 6.8b, 13.1b) it is
                rounded up to one here, for the sake of tensor cores. 3b has the paper's 8192.

NKV divides NH/2 wherever a comparison with 1.5 NH heads is meant (all but the paper's own shapes).
*/
#ifndef LLMC_PRESETS_H
#define LLMC_PRESETS_H
#include "common.h"

typedef struct {
    const char *name;
    int L, C, NH, NKV, D, F, T, V;
    bool tied;
} Preset;

// clang-format off
static const Preset presets[] = {
    // name   L   C     NH  NKV D    F      T     V       tied     parameters (baseline)
    {"tiny",   4,  128,  4,  2,  32,  352,   256,  256,    true},  //        771,200
    {"small",  8,  256,  4,  2,  64,  704,   256,  256,    true},  //      5,968,128
    {"124m",   12, 768,  12, 6,  64,  2048,  1024, 50257,  true},  //    116,473,344
    {"350m",   24, 1024, 16, 8,  64,  2752,  1024, 50257,  true},  //    329,910,272
    {"830m",   24, 1536, 16, 16, 96,  4096,  2048, 100288, true},  //    833,594,880
    {"1.4b",   24, 2048, 16, 16, 128, 5504,  2048, 100288, true},  //  1,419,741,184
    {"2.8b",   32, 2560, 20, 20, 128, 6848,  2048, 100288, true},  //  2,778,728,960
    {"3b",     28, 3072, 24, 24, 128, 8192,  2048, 100288, true},  //  3,479,153,664
    {"6.8b",   32, 4096, 32, 32, 128, 10944, 2048, 100288, true},  //  6,861,885,440
    {"13.1b",  40, 5120, 40, 40, 128, 13696, 2048, 100288, true},  // 13,123,015,680
};
// clang-format on
enum { PRESET_COUNT = sizeof(presets) / sizeof(presets[0]) };
#endif
