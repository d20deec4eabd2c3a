/*
train_diffv2.cu: the trainer on a GPU. It is train_diffv2.c with the CUDA twins of its operations
(NAME.cuh in llmc/ops), which llmc/experts/all_operations.h includes for DEVICE_OPS; model, backward, update and run are
the same lines that the CPU build tests.

  precision   PRECISION_BF16 (default): parameters and activations bf16; gradients, moments, master weights and
              statistics fp32. PRECISION_FP32: everything fp32, for comparison with the CPU
  memory      one cudaMalloc per buffer of the model, before the first step (llmc/cuda/device.cuh)
  order       all operations run on one stream and collectives on a second; in a step the host waits only where it reads
              the loss and the norm
  products    cuBLASLt, behind llmc/cuda/gemm.cuh
  ranks       one process per GPU, which NCCL connects (llmc/comm/comm_nccl.cuh); a build without USE_NCCL runs
              one process
*/
#ifndef DEVICE_OPS
#define DEVICE_OPS
#endif
#if !defined(PRECISION_FP32) && !defined(PRECISION_BF16)
#define PRECISION_BF16
#endif
#include "train_diffv2.c"
