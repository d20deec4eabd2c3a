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
#include "linear/fp8.h"
#include "rows/embedding.h"
#include "rows/rmsnorm.h"
#include "linear/matmul.h"
#include "linear/linear.h"
#include "rows/head_norm.h"
#include "attention/rope.h"
#include "attention/attention.h"
#include "attention/attention_backward.h"
#include "attention/cache.h"
#include "gates/sink.h"
#include "attention/diff_combine.h"
#include "attention/diff_attention.h"
#include "attention/attention_sparse_backward.h"
#include "gates/layer_lambda.h"
#include "gates/gate.h"
#include "rows/scale.h"
#include "rows/accumulate.h"
#include "gates/swiglu.h"
#include "rows/cross_entropy.h"
#include "optimizer/adamw.h"
#include "optimizer/muon.h"
#include "measure/sum_of_squares.h"
#include "measure/stats.h"
#endif
#endif
