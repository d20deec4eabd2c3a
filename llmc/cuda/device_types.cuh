/*
device_types.cuh: the storage types of the CUDA build, chosen by its precision.

  PRECISION_BF16   floatX is bf16: parameters and activations; gradients, moments, master weights, statistics fp32
  PRECISION_FP32   everything fp32, for tight comparison with the CPU
*/
#pragma once
#include <cuda_runtime.h>
#include <cuda_bf16.h>

#if defined(PRECISION_BF16) == defined(PRECISION_FP32)
#error "define one of PRECISION_BF16 and PRECISION_FP32"
#endif

#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#else
typedef float floatX;
#endif
typedef float grad_t;
typedef float real;
