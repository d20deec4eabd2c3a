# make train_diffv2        the trainer                 make test     scripts/test.sh
# make text_to_shards      text files to token shards  make format   formats all sources (dev/format/format.sh)
# make bench ARGS=...      speed against the machine's limits (dev/bench/bench.c)
# make train_diffv2cu      the trainer for GPUs: CUDA 13   make test_diffv2cu   its operations against their C twins
# make all-archs           both compiled for every architecture that is meant to work
# Variables: CC, CXX, OPT (-O3), ARCH (-march=native), BUILD (build), REAL (float), SANITIZE (e.g. address,undefined),
#            STRICT (yes: a warning is an error; no: for compilers that warn of more than those that this was written with),
#            ONEDNN (yes where its header is found; no: matrix products by OpenBLAS alone),
#            MPI (yes where OpenMPI is found; no: a program for one process),
#            PRECISION (bf16 or fp32), ARCHS (e.g. "80 90"; that of the installed GPUs, else all),
#            CUDA, CUDNN, CUDNN_FRONTEND, NVRTC, NCCL (where each is installed, if not where scripts/find_cuda.sh looks; "no"
#            for all but CUDA: build without it),
#            DEPS (a directory with include/ and lib/, searched first: for machines whose package manager has not the libraries)

CC ?= gcc
CXX ?= g++
ARCH ?= -march=native
BUILD ?= build
PRECISION ?= bf16
CUDA_BUILD = $(BUILD)/cuda_$(PRECISION)
STRICT ?= yes
WARN = -Wall -Wextra -Wshadow $(if $(filter yes,$(STRICT)),-Werror)
ifneq ($(findstring clang,$(shell $(CC) --version 2>/dev/null)),)
  WARN += -Wno-pass-failed # a loop that clang does not vectorise is slower, not wrong
endif
REVISION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
# A library: in DEPS, or as pkg-config says, or simply where the compiler finds it. What is missing is said all at once.
in_deps = $(and $(DEPS),$(wildcard $(DEPS)/include/$(2)),$(firstword $(wildcard $(DEPS)/lib/lib$(1).so $(DEPS)/lib/lib$(1).so.* $(DEPS)/lib/lib$(1).a)))
define find_library # pkg-config's name, library, header, in words
  ifneq ($(call in_deps,$(2),$(3)),)
    PACKAGE_CFLAGS += -isystem $(DEPS)/include
    PACKAGE_LIBS += $(call in_deps,$(2),$(3)) -Wl,-rpath,$(abspath $(DEPS)/lib)
  else ifeq ($(shell pkg-config --exists $(1) 2>/dev/null && echo yes),yes)
    PACKAGE_CFLAGS += $(shell pkg-config --cflags $(1))
    PACKAGE_LIBS += $(shell pkg-config --libs $(1))
  else ifeq ($(shell echo '\#include <$(3)>' | $(CC) -E -x c - >/dev/null 2>&1 && echo yes),yes)
    PACKAGE_LIBS += -l$(2)
  else
    MISSING += $(4)
  endif
endef
ifeq ($(filter clean format test,$(MAKECMDGOALS)),)
  $(eval $(call find_library,openblas,openblas,cblas.h,OpenBLAS))
  $(eval $(call find_library,libcjson,cjson,cjson/cJSON.h,cJSON))
  $(eval $(call find_library,libxxhash,xxhash,xxhash.h,xxHash))
  ifneq ($(MISSING),)
    $(error missing: $(MISSING); scripts/install_deps.sh installs them, or say DEPS=DIRECTORY, whose include/ and lib/ have them)
  endif
endif

ONEDNN ?= $(shell echo '\#include <dnnl.h>' | $(CC) -E -x c - >/dev/null 2>&1 && echo yes || echo no)
ifeq ($(ONEDNN),yes)
  PACKAGE_CFLAGS += -DONEDNN
  PACKAGE_LIBS += -ldnnl
endif

# OpenMPI, by pkg-config or its compiler wrapper, for runs of many ranks; without it the program is for one process
MPI_CFLAGS := $(shell pkg-config --cflags ompi-c 2>/dev/null || mpicc --showme:compile 2>/dev/null)
MPI ?= $(if $(MPI_CFLAGS),yes,no)
ifeq ($(MPI),yes)
  PACKAGE_CFLAGS += -DUSE_MPI $(patsubst -I%,-isystem %,$(MPI_CFLAGS))
  PACKAGE_LIBS += $(shell pkg-config --libs ompi-c 2>/dev/null || mpicc --showme:link)
endif

# AVX-512 where the CPU has it; GCC would stop at half its width
WIDE := $(shell echo | $(CC) -mprefer-vector-width=512 -E -x c - >/dev/null 2>&1 && echo -mprefer-vector-width=512)
OPT ?= -O3
OPTIMIZE = $(OPT) $(ARCH) $(WIDE) -fno-math-errno -fno-trapping-math -ffp-contract=fast
CPPFLAGS += $(PACKAGE_CFLAGS)
CFLAGS ?= $(OPTIMIZE) -g
COMMON = $(WARN) -fopenmp -MD -MP # system headers too: a library may be replaced by another version
ifdef SANITIZE
  CFLAGS = -O1 -g $(ARCH) -fno-omit-frame-pointer -fsanitize=$(SANITIZE) -fno-sanitize-recover=all
endif
ifdef REAL
  CPPFLAGS += -DREAL=$(REAL)
endif
LDLIBS = $(PACKAGE_LIBS) -lpthread -lm

# A stamp is a file that says how objects are compiled and linked. They depend on it, and it is written only if it changes.
# The compilers are in it by their macros, which tell their version and what -march=native is on this machine.
same = $(and $(findstring x$(1)x,x$(2)x),$(findstring x$(2)x,x$(1)x))
stamp = $(if $(call same,$(file <$(1)),$(2)),,$(shell mkdir -p $(dir $(1)))$(file >$(1),$(2)))
ifeq ($(filter clean format test,$(MAKECMDGOALS)),)
  COMPILERS := $(CC) $(CXX) $(shell for compiler in '$(CC)' '$(CXX)'; do echo | $$compiler $(ARCH) -dM -E -x c - 2>/dev/null | cksum; done)
  SEARCHED := $(CPATH) $(C_INCLUDE_PATH) $(CPLUS_INCLUDE_PATH) $(LIBRARY_PATH)
  $(call stamp,$(BUILD)/flags,$(COMPILERS) $(SEARCHED) $(CPPFLAGS) $(CFLAGS) $(COMMON) $(LDFLAGS) $(LDLIBS))
  $(call stamp,$(BUILD)/revision.c,const char program_revision[] = "$(REVISION)";)
endif

.PHONY: all test bench format clean all-archs train_diffv2 text_to_shards train_diffv2cu test_diffv2cu
all: train_diffv2 text_to_shards

# phony, since another BUILD or PRECISION may have made the copy; -f, since it may be running
copy = cmp -s $< $@ || cp -f $< $@
train_diffv2: $(BUILD)/train_diffv2
	@$(copy)
text_to_shards: $(BUILD)/text_to_shards
	@$(copy)

# An object of its own, so that a commit recompiles nothing else.
$(BUILD)/revision.o $(CUDA_BUILD)/revision.o: %/revision.o: $(BUILD)/revision.c %/flags
	$(CC) -std=c11 $(WARN) -fPIE -c -o $@ $<

LINK = $(CFLAGS) -fopenmp $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/train_diffv2: $(BUILD)/train_diffv2.o $(BUILD)/revision.o
	$(CC) $(LINK)
$(BUILD)/test_diffv2: $(BUILD)/test_diffv2.o $(BUILD)/revision.o
	$(CC) $(LINK)
$(BUILD)/text_to_shards: $(BUILD)/text_to_shards.o
	$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $<
# the same trainer compiled as C++: what the CUDA build will include
$(BUILD)/train_diffv2_cpp: $(BUILD)/train_diffv2_cpp.o $(BUILD)/revision.o
	$(CXX) $(LINK)

$(BUILD)/train_diffv2_cpp.o: train_diffv2.c $(BUILD)/flags
	$(CXX) -std=c++17 -x c++ $(CPPFLAGS) $(CFLAGS) $(COMMON) -c -o $@ $<
$(BUILD)/%.o: %.c $(BUILD)/flags
	$(CC) -std=c11 $(CPPFLAGS) $(CFLAGS) $(COMMON) -c -o $@ $<
$(BUILD)/%.o: data/%.c $(BUILD)/flags
	$(CC) -std=c11 $(CPPFLAGS) $(CFLAGS) $(COMMON) -c -o $@ $<

$(BUILD)/bench: $(BUILD)/bench.o $(BUILD)/revision.o
	$(CC) $(LINK)
# the tokenizer as a filter, for data/test_tokenizer.py
$(BUILD)/encode_text: $(BUILD)/encode_text.o
	$(CC) $(LINK)
$(BUILD)/bench.o: dev/bench/bench.c $(BUILD)/flags
	$(CC) -std=c11 $(CPPFLAGS) $(CFLAGS) $(COMMON) -c -o $@ $<
$(BUILD)/encode_text.o: tests/encode_text.c $(BUILD)/flags
	$(CC) -std=c11 $(CPPFLAGS) $(CFLAGS) $(COMMON) -c -o $@ $<

# for the tests of many ranks: a trainer with planned faults, and one that knows no other ranks
$(BUILD)/faulty_diffv2: $(BUILD)/faulty_diffv2.o $(BUILD)/revision.o
	$(CC) $(LINK)
# what they are for needs no speed, and compiles in half the time without it
$(BUILD)/faulty_diffv2.o: tests/faulty_diffv2.c $(BUILD)/flags
	$(CC) -std=c11 $(CPPFLAGS) $(CFLAGS) -O1 $(COMMON) -c -o $@ $<
$(BUILD)/single_diffv2: $(BUILD)/single_diffv2.o $(BUILD)/revision.o
	$(CC) $(LINK)
$(BUILD)/single_diffv2.o: train_diffv2.c $(BUILD)/flags
	$(CC) -std=c11 $(CPPFLAGS) -UUSE_MPI $(CFLAGS) -O0 $(COMMON) -c -o $@ $<

# The GPU build. What it compiles and links with is found by a script, and only for goals that need it.
ifneq ($(filter train_diffv2cu test_diffv2cu all-archs $(CUDA_BUILD)/%,$(MAKECMDGOALS)),)
  ifneq ($(shell mkdir -p $(CUDA_BUILD) && CUDA='$(CUDA)' NVCC='$(NVCC)' CUDNN='$(CUDNN)' CUDNN_FRONTEND='$(CUDNN_FRONTEND)' \
      NVRTC='$(NVRTC)' NCCL='$(NCCL)' MPI='$(MPI)' DEPS='$(DEPS)' ARCHS='$(ARCHS)' scripts/find_cuda.sh $(CUDA_BUILD)/cuda.mk && echo yes),yes)
    $(error the CUDA program cannot be built here: the lines above say why)
  endif
  include $(CUDA_BUILD)/cuda.mk
endif
# attention by cuDNN: for bf16 alone, compiled apart from the rest since that takes a minute
CUDNN_UNIT = $(if $(CUDNN_LIBS),$(if $(filter bf16,$(PRECISION)),$(CUDA_BUILD)/attention_cudnn.o))
comma = ,
CUDA_HOST = -Wall,-Wextra$(if $(filter yes,$(STRICT)),$(comma)-Werror),-fopenmp,-fno-math-errno,-fno-trapping-math
# nvcc knows directories and macros; what else packages ask for (-fopenmp, -pthread) is for the host's compiler
joined = $(subst -isystem ,-isystem@,$(1))
nvcc_flags = $(subst -isystem@,-isystem ,$(filter -I% -isystem@% -D% -U%,$(call joined,$(1)))) \
  $(addprefix -Xcompiler ,$(filter-out -I% -isystem@% -D% -U%,$(call joined,$(1))))
CUDA_FLAGS = -std=c++17 -O3 -g -lineinfo $(call nvcc_flags,$(CPPFLAGS) $(CUDA_CFLAGS)) -DDEVICE_OPS -DPRECISION_$(if $(filter fp32,$(PRECISION)),FP32,BF16) \
  $(NCCL_CFLAGS) $(if $(CUDNN_UNIT),$(CUDNN_CFLAGS)) \
  -Xcompiler $(CUDA_HOST) $(if $(filter yes,$(STRICT)),-Werror all-warnings) -MD -MP $(foreach arch,$(CUDA_ARCHS),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) \
  $(foreach arch,$(lastword $(CUDA_ARCHS)),-gencode arch=compute_$(arch)$(comma)code=compute_$(arch)) # PTX, for later GPUs
# an rpath that libraries which the libraries load are looked for in, too
CUDA_LINK = $(CUDA_LIBS) -ldl $(NCCL_LIBS) $(if $(CUDNN_UNIT),$(CUDNN_LIBS)) -Wl,--disable-new-dtags

ifdef CUDA_ARCHS
  NVCC_VERSION := $(NVCC) $(shell $(NVCC) --version | cksum)
  $(call stamp,$(CUDA_BUILD)/flags,$(COMPILERS) $(NVCC_VERSION) $(SEARCHED) $(CUDA_FLAGS) $(CUDA_CFLAGS) $(CUDNN_CFLAGS) $(WARN) $(LDFLAGS) $(CUDA_LINK) $(LDLIBS))
endif

train_diffv2cu: $(CUDA_BUILD)/train_diffv2cu
	@$(copy)
test_diffv2cu: $(CUDA_BUILD)/test_diffv2cu
	@$(copy)
CUDA_UNITS = $(CUDNN_UNIT) $(CUDA_BUILD)/revision.o
$(CUDA_BUILD)/%cu: $(CUDA_BUILD)/%.cu.o $(CUDA_UNITS)
	$(CXX) -fopenmp $(LDFLAGS) -o $@ $^ $(CUDA_LINK) $(LDLIBS)
$(CUDA_BUILD)/%.cu.o: %.cu $(CUDA_BUILD)/flags
	$(NVCC) $(CUDA_FLAGS) -c -o $@ $<
$(CUDA_BUILD)/bench_cuda.cu.o: dev/bench/bench_cuda.cu $(CUDA_BUILD)/flags
	$(NVCC) $(CUDA_FLAGS) -c -o $@ $<
$(CUDA_BUILD)/bench_cuda: $(CUDA_BUILD)/bench_cuda.cu.o $(CUDA_UNITS)
	$(CXX) -fopenmp $(LDFLAGS) -o $@ $^ $(CUDA_LINK) $(LDLIBS)
$(CUDA_BUILD)/attention_cudnn.o: llmc/cuda/attention_cudnn.cpp $(CUDA_BUILD)/flags
	$(CXX) -std=c++17 -O1 -g1 $(WARN) $(CUDA_CFLAGS) $(CUDNN_CFLAGS) -MD -MP -c -o $@ $<
# its plans for devices that are not here (tests/cudnn_plans.cpp), with a driver that only says yes
$(CUDA_BUILD)/cudnn_plans: tests/cudnn_plans.cpp $(CUDA_BUILD)/no_gpu/libcuda.so.1 $(CUDA_BUILD)/flags
	$(CXX) -std=c++17 -O1 $(WARN) $(CUDA_CFLAGS) $(CUDNN_CFLAGS) -MD -MP -o $@ $< $(CUDA_LINK)
$(CUDA_BUILD)/no_gpu/libcuda.so.1: tests/cudnn_driver.c $(CUDA_BUILD)/flags
	mkdir -p $(@D)
	$(CC) -std=c11 $(WARN) -shared -fPIC -Wl,-soname,libcuda.so.1 -o $@ $<
.PRECIOUS: $(CUDA_BUILD)/%.cu.o
# bf16 and fp32, without a GPU
all-archs:
	$(foreach precision,bf16 fp32,$(MAKE) PRECISION=$(precision) ARCHS="80 90 100 120" $(BUILD)/cuda_$(precision)/train_diffv2cu $(BUILD)/cuda_$(precision)/test_diffv2cu &&) true

test:
	scripts/test.sh
bench: $(BUILD)/bench $(BUILD)/train_diffv2
	$(BUILD)/bench $(ARGS)
format:
	dev/format/format.sh
clean:
	rm -rf $(BUILD) train_diffv2 text_to_shards train_diffv2cu test_diffv2cu

include dev/cuda_on_cpu/rules.mk
-include $(wildcard $(BUILD)/*.d $(CUDA_BUILD)/*.d)
