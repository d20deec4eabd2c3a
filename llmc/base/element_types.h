/*
element_types.h: the types of a tensor's elements.

  floatX   storage of parameters and activations
  grad_t   storage of gradients
  real     statistics, moments, arithmetic

  on CPUs     all three are `float`, or `double` with -DREAL=double
  CUDA        PRECISION_BF16: floatX is bf16, the others fp32. PRECISION_FP32: all fp32, for tight comparison with CPUs
  predictions the types of the bf16 program; no operation reads the elements (RECORDED_OPS)
*/
#ifndef LLMC_ELEMENT_TYPES_H
#define LLMC_ELEMENT_TYPES_H
#include "common.h"

#ifdef DEVICE_OPS
#include <cuda_bf16.h>
#if defined(PRECISION_BF16) == defined(PRECISION_FP32)
#error "define one of PRECISION_BF16 and PRECISION_FP32"
#endif
#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#else
typedef float floatX;
#endif
typedef float real, grad_t;
#elif defined RECORDED_OPS
typedef uint16_t floatX;
typedef float real, grad_t;
#else
#ifndef REAL
#define REAL float
#endif
typedef REAL floatX, real, grad_t;
#endif
#endif
