/*
all_ops.cuh: the CUDA twins of all operations that ops.h declares.
*/
#ifndef LLMC_ALL_OPS_CUH
#define LLMC_ALL_OPS_CUH
#include "embedding.cuh"
#include "rmsnorm.cuh"
#include "matmul.cuh"
#include "linear.cuh"
#include "head_norm.cuh"
#include "rope.cuh"
#include "attention.cuh"
#include "cache.cuh"
#include "attention_decode.cuh"
#include "sink.cuh"
#include "diff_combine.cuh"
#include "diff_attention.cuh"
#include "layer_lambda.cuh"
#include "exclusive.cuh"
#include "gate.cuh"
#include "scale.cuh"
#include "accumulate.cuh"
#include "quantize.cuh"
#include "swiglu.cuh"
#include "router.cuh"
#include "experts.cuh"
#include "cross_entropy.cuh"
#include "adamw.cuh"
#include "sum_of_squares.cuh"
#include "stats.cuh"
#include "attention_stats.cuh"
#include "update_stats.cuh"
#include "runtime.cuh"
#endif
