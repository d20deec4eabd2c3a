# CUDA programs compiled for the CPU: make build/oncpu/NAME builds NAME.cu, or dev/emulator/NAME.cu, with g++.
# make oncpu runs the tests of the layer.
# Variables besides those of the Makefile: CUDA (where its headers are), PRECISION (bf16 or fp32), UCONTEXT=yes (fibers
# by swapcontext, as on CPUs other than x86-64).

CUDA_HEADERS = $(or $(CUDA),/usr/local/cuda)/include
ONCPU_NCCL = $(if $(wildcard $(CUDA_HEADERS)/nccl.h /usr/include/nccl.h),-DUSE_NCCL)
ONCPU = $(BUILD)/oncpu
ONCPU_PRECISION_bf16 = -DPRECISION_BF16
ONCPU_PRECISION_fp32 = -DPRECISION_FP32
ONCPU_PRECISION = $(or $(ONCPU_PRECISION_$(PRECISION)),$(error PRECISION is '$(PRECISION)': bf16 or fp32 is expected))
# kernels access memory as other types (16-byte vectors), which nvcc allows
ONCPU_CFLAGS = -O2 $(ARCH) -g1 -fno-math-errno -fno-trapping-math -ffp-contract=fast
ifdef SANITIZE
  ONCPU_CFLAGS = $(CFLAGS) -fno-math-errno
endif
ifneq ($(findstring thread,$(SANITIZE)),) # the layer annotates itself for ThreadSanitizer, and is not instrumented
  ONCPU_CFLAGS += -DCUDA_ON_CPU_TSAN
  ONCPU_LAYER_FLAGS = -fno-sanitize=thread
endif
ifdef UCONTEXT
  ONCPU_CFLAGS += -DCUDA_ON_CPU_UCONTEXT
endif
ONCPU_FLAGS = -std=c++17 $(CPPFLAGS) $(ONCPU_CFLAGS) -fno-strict-aliasing -Wno-psabi $(COMMON) -DCUDA_ON_CPU -Idev \
  -DDEVICE_OPS -DUSE_CUDNN $(ONCPU_NCCL) $(ONCPU_PRECISION) -isystem $(CUDA_HEADERS)
ONCPU_LAYER = $(patsubst dev/emulator/%.cpp,$(ONCPU)/%.o,$(wildcard dev/emulator/*.cpp))

ifneq ($(filter oncpu $(ONCPU)/% $(BUILD)/ptx/%,$(MAKECMDGOALS)),)
  $(call stamp,$(ONCPU)/flags,$(COMPILERS) $(SEARCHED) $(ONCPU_FLAGS) $(ONCPU_LAYER_FLAGS) $(LDFLAGS) $(LDLIBS))
endif

$(ONCPU)/%: $(ONCPU)/%.cu.o $(ONCPU_LAYER) $(BUILD)/revision.o
	$(CXX) $(ONCPU_CFLAGS) -fopenmp $(LDFLAGS) -o $@ $^ $(LDLIBS)
# its kernels are compiled once, in test_trainer; dev/emulator/ptx links the object of test_diffv2.cu
$(ONCPU)/test_diffv2: $(ONCPU)/test_trainer
	printf '#!/bin/sh\nexec "$${0%%/*}/test_trainer" --operations "$$@"\n' >$@
	chmod +x $@
# for the tests of several ranks: a trainer without NCCL and MPI
$(ONCPU)/single_diffv2.cu.o: train_diffv2.cu $(ONCPU)/flags
	$(CACHED) $(CXX) $(ONCPU_FLAGS) -UUSE_NCCL -UUSE_MPI -O0 -x c++ -c -o $@ $<
$(ONCPU)/%.cu.o: %.cu $(ONCPU)/flags
	$(CACHED) $(CXX) $(ONCPU_FLAGS) -x c++ -c -o $@ $<
$(ONCPU)/bench_cuda.cu.o: dev/bench/bench_cuda.cu $(ONCPU)/flags
	$(CACHED) $(CXX) $(ONCPU_FLAGS) -O1 -x c++ -c -o $@ $<
$(ONCPU)/%.o: dev/emulator/%.cpp $(ONCPU)/flags
	$(CACHED) $(CXX) $(ONCPU_FLAGS) $(ONCPU_LAYER_FLAGS) -c -o $@ $<
.PHONY: oncpu
oncpu: $(ONCPU)/planted_bugs
	$(ONCPU)/planted_bugs
.PRECIOUS: $(ONCPU)/%.cu.o $(ONCPU)/%.o

-include $(wildcard $(ONCPU)/*.d)
