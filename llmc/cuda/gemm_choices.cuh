/*
gemm_choices.cuh: which of the library's algorithms computes each product (--tune-gemm), as JSON for run.json and
trainer_state.json:

  {"made_for": TEXT, "products": {
    "stored T x stored N += fp32, 20 x 43 x 39, rows 20 43 43, align 256 256 256": 3, ...}}

  made_for   device, library with its version, and storage type: choices are valid for one of each
  products   types of A and B and whether they are transposed (T), what the product does to C, C's type, M x N x K, row
             strides, and alignment of the addresses in bytes; the number is the place of the algorithm among the
             library's, whose order is the same for the same library and device; 0 is its first choice
*/
#pragma once
#include "../base/json.h"
#include "device.cuh"
#include "gemm_shape.cuh"
#ifdef CUDA_ON_CPU
#include <cuda_on_cpu/gemm.h>
#else
#include "gemm_cublaslt.cuh"
#endif

static struct {
    bool measuring;
    cJSON *json; // NULL without --tune-gemm
} gemm_choices;

static inline void gemm_choices_free(void) {
    cJSON_Delete(gemm_choices.json);
    memset(&gemm_choices, 0, sizeof(gemm_choices));
}

typedef struct {
    char text[400];
} GemmText;

static inline GemmText gemm_made_for(void) {
    GemmText out;
    cudaDeviceProp device_is = device_properties();
    FORMAT(out.text, "%.250s, %d multiprocessors; %s; %s", device_is.name, device_is.multiProcessorCount,
           gemm_library(), sizeof(floatX) == 2 ? "bf16" : "fp32");
    return out;
}

static inline GemmText gemm_product_name(const GemmProblem *p) {
    static const char *const types[OPERAND_TYPES] = {"stored", "e4m3", "e5m2"};
    const GemmShape *s = &p->shape;
    GemmText out;
    FORMAT(out.text, "%s %c x %s %c %s %s, %d x %d x %d, rows %d %d %d, align %u %u %u%s", types[p->types[0]],
           s->transpose_a ? 'T' : 'N', types[p->types[1]], s->transpose_b ? 'T' : 'N', s->add ? "+=" : "=",
           s->fp32_out ? "fp32" : "stored", s->M, s->N, s->K, s->lda, s->ldb, s->ldc, p->alignment[0], p->alignment[1],
           p->alignment[2], p->fast_sums ? ", fast accumulation" : "");
    return out;
}

static inline cJSON *gemm_chosen_products(void) {
    return cJSON_GetObjectItemCaseSensitive(gemm_choices.json, "products");
}

// Begins with a copy of choices, or with none if they are NULL or not for this device, library and storage type.
// Returns whether they are.
static inline bool gemm_choices_begin(const cJSON *choices) {
    GemmText here = gemm_made_for();
    const char *made_for = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(choices, "made_for"));
    bool valid = made_for && strcmp(made_for, here.text) == 0 &&
                 cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(choices, "products"));
    gemm_choices_free();
    gemm_choices.json = valid ? cJSON_Duplicate(choices, true) : cJSON_CreateObject();
    CHECK(gemm_choices.json && (valid || (cJSON_AddStringToObject(gemm_choices.json, "made_for", here.text) &&
                                          cJSON_AddObjectToObject(gemm_choices.json, "products"))),
          "out of memory for the choices of --tune-gemm");
    return valid;
}

// The place of the chosen algorithm among `count`; -1: there is no choice.
static inline int gemm_chosen(const GemmProblem *problem, int count) {
    uint64_t place = 0;
    if (!gemm_choices.json) return -1;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(gemm_chosen_products(), gemm_product_name(problem).text);
    return json_size(item, &place) && place < (uint64_t)count ? (int)place : -1;
}

static inline void gemm_choose_place(const GemmProblem *problem, int place) {
    GemmText name = gemm_product_name(problem);
    cJSON_DeleteItemFromObjectCaseSensitive(gemm_chosen_products(), name.text); // one that is out of range
    CHECK(cJSON_AddNumberToObject(gemm_chosen_products(), name.text, place),
          "out of memory for the choices of --tune-gemm");
}
