/*
prediction_types.h: the predicted time of a training step: by class of work, by what limits the speed, and by operation.
predict_diffv2.c computes it.
*/
#pragma once
#include "assumptions.h"
#include "../../llmc/model/plan.h"
#include "../../llmc/options/options_table.h"

// What limits the speed of an operation.
typedef enum { BOUND_PRODUCTS, BOUND_ATTENTION, BOUND_MEMORY, BOUND_LAUNCHES, BOUND_COMMUNICATION, BOUNDS } Bound;
static const char *const bound_names[BOUNDS] = {"matrix products", "attention", "memory bandwidth", "kernel launches",
                                                "communication"};

// Classes of work: constant, name in the report and in the JSON, limit of an operation that outlasts its launches.
// clang-format off
#define PREDICTION_CLASS_TABLE(CLASS)                                            \
    CLASS(CLASS_BLOCK_GEMMS, "block GEMMs", BOUND_PRODUCTS)                      \
    CLASS(CLASS_EXPERT_GEMMS, "expert GEMMs", BOUND_PRODUCTS)                    \
    CLASS(CLASS_ROUTER, "router and grouping", BOUND_MEMORY)                     \
    CLASS(CLASS_EXPERT_ROWS, "rows of experts", BOUND_MEMORY)                    \
    CLASS(CLASS_FP8, "FP8 copies and maxima", BOUND_MEMORY)                      \
    CLASS(CLASS_LM_HEAD, "LM head", BOUND_PRODUCTS)                              \
    CLASS(CLASS_ATTENTION_FORWARD, "attention forward", BOUND_ATTENTION)         \
    CLASS(CLASS_ATTENTION_BACKWARD, "attention backward", BOUND_ATTENTION)       \
    CLASS(CLASS_SWIGLU, "swiglu", BOUND_MEMORY)                                  \
    CLASS(CLASS_NORMS, "norms", BOUND_MEMORY)                                    \
    CLASS(CLASS_ROPE, "rope", BOUND_MEMORY)                                      \
    CLASS(CLASS_COMBINE, "combine and gates", BOUND_MEMORY)                      \
    CLASS(CLASS_YOCO, "sums of YOCO's gradients", BOUND_MEMORY)                  \
    CLASS(CLASS_CROSS_ENTROPY, "cross-entropy", BOUND_MEMORY)                    \
    CLASS(CLASS_EMBEDDING, "embedding", BOUND_MEMORY)                            \
    CLASS(CLASS_UPDATE, "optimizer", BOUND_MEMORY)                               \
    CLASS(CLASS_MUON, "Newton-Schulz", BOUND_PRODUCTS)                           \
    CLASS(CLASS_COMMUNICATION, "communication, exposed", BOUND_COMMUNICATION)
#define CLASS_CONSTANT(constant, name, bound) constant,
#define CLASS_ROW(constant, name, bound) {name, bound},
typedef enum { PREDICTION_CLASS_TABLE(CLASS_CONSTANT) PREDICTION_CLASSES } PredictionClass;
static const struct { const char *name; Bound bound; } prediction_classes[] = {PREDICTION_CLASS_TABLE(CLASS_ROW)};
#undef CLASS_CONSTANT
#undef CLASS_ROW
// clang-format on

typedef struct {
    const char *name; // of the function
    PredictionClass kind;
    double calls, flops, bytes, ms; // totals of a step
} PredictedOp;

enum { PREDICTED_OPS = 60 };
typedef struct {
    const ModelPlan *plan;
    const Options *options;
    const DevicePeak *device; // --device
    double assumed[ASSUMPTION_COUNT];
    double micro_steps;
    int op_count;
    PredictedOp ops[PREDICTED_OPS];
    double class_ms[PREDICTION_CLASSES];
    double bound_ms[BOUNDS];
    double reduce_ms, gather_ms;          // collectives of a step
    double link_hops_ms, network_hops_ms; // their latency within and between machines
    double sent_bytes;                    // of a rank
    double agree_ms;                      // loss and norm, before the update; the device waits
    double exposed_ms;                    // communication that computation does not hide
    double step_ms;
} Prediction;

// Milliseconds to read and write so many bytes of device memory.
static inline double memory_ms(const Prediction *p, double bytes) {
    return 1e-6 * bytes / (p->assumed[ASSUME_MEMORY] * p->device->memory_gbs);
}
