/*
all_ops.h: the definitions of the operations that ops.h declares, except those of experts (llmc/experts/operations.h):
the CUDA twins with DEVICE_OPS, otherwise the C twins.
With RECORDED_OPS the program has its own, which record (dev/predict/recorded_operations.h).
*/
#ifndef LLMC_ALL_OPS_H
#define LLMC_ALL_OPS_H
#include "ops.h"
#include "traffic.h"
#ifdef DEVICE_OPS
#include "all_ops.cuh"
#elif !defined RECORDED_OPS
#include "runtime.h"
#include "vecmath.h"
#include "absmax.h"
#include "fp8.h"
#include "embedding.h"
#include "rmsnorm.h"
#include "matmul.h"
#include "linear.h"
#include "head_norm.h"
#include "rope.h"
#include "attention.h"
#include "attention_backward.h"
#include "cache.h"
#include "sink.h"
#include "diff_combine.h"
#include "diff_attention.h"
#include "attention_sparse_backward.h"
#include "layer_lambda.h"
#include "gate.h"
#include "scale.h"
#include "accumulate.h"
#include "swiglu.h"
#include "cross_entropy.h"
#include "adamw.h"
#include "muon.h"
#include "sum_of_squares.h"
#include "stats.h"
#endif
#endif
