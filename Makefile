# make                     builds the trainer for CPUs, predict_diffv2 and text_to_shards
# make train_diffv2        the trainer for CPUs
# make train_diffv2cu      the trainer for GPUs (requires the CUDA toolkit 13)
# make predict_diffv2      predicts memory and speed on a GPU
# make text_to_shards      converts text files to token shards
# make test_diffv2cu       tests the CUDA operations against their C twins, on a GPU
# make all-archs           both CUDA programs for all supported architectures, in bf16 and fp32
# make test                runs scripts/test.sh
# make bench ARGS=...      speed of the CPU trainer and its share of the machine's limits (dev/bench/bench.c)
# make format              formats all sources (dev/format/format.sh)
# make docs                writes --help all into docs/options.md
# make rooms               checks the includes of llmc/ and draws them as docs/rooms.svg
# make clean               removes what make has built; keeps build/python and the virtual environments
# make help                prints this text
#
# Variables:
#   CC, CXX        compilers (gcc, g++); CXX is also nvcc's host compiler
#   OPT, ARCH      optimization (-O3; of test programs -O1), architecture (-march=native)
#   DEBUG          debug information (-g)
#   CCACHE         no: compiles without ccache (default: with it where it is installed)
#   BUILD          directory of objects and programs (build)
#   REAL           element type of the CPU build: float, or double for tests
#   SANITIZE       sanitizers, e.g. address,undefined
#   STRICT         no: warnings are not errors, for compilers that print additional ones (default: yes)
#   ONEDNN         no: OpenBLAS computes all products (default: yes where its header is found)
#   MPI            no: a program for one process (default: yes where OpenMPI is found)
#   PRECISION      of the GPU build: bf16 or fp32
#   ARCHS          GPU architectures, e.g. "80 90" (default: those of the installed GPUs, else all)
#   PTX            no: code for ARCHS alone (default: also PTX, from which a driver compiles code for later GPUs)
#   CUDA, CUDNN, CUDNN_FRONTEND, NVRTC, NCCL   where each is installed (default: see scripts/find_cuda.sh); "no" builds
#                  without it (not CUDA)
#   DEPS           a directory with include/ and lib/ that is searched first

CC ?= gcc
CXX ?= g++
ARCH = -march=native
BUILD ?= build
PRECISION ?= bf16
CUDA_BUILD = $(BUILD)/cuda_$(PRECISION)
STRICT ?= yes
WARN = -Wall -Wextra -Wshadow $(if $(filter yes,$(STRICT)),-Werror)
ifneq ($(findstring clang,$(shell $(CC) --version 2>/dev/null)),)
  WARN += -Wno-pass-failed # loops that clang does not vectorize are correct
endif
REVISION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
# A library is taken from DEPS, else from pkg-config, else from the search path of the compiler. One message lists all
# missing libraries.
lib_file = $(firstword $(wildcard $(addprefix $(DEPS)/lib/lib$(1).,so so.* a)))
in_deps = $(and $(DEPS),$(wildcard $(DEPS)/include/$(2)),$(lib_file))
define find_library # name for pkg-config, library, header, name in messages
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
ifeq ($(filter clean format help rooms test,$(MAKECMDGOALS)),)
  $(if $(word 2,$(DEPS)),$(error DEPS '$(DEPS)' contains a space: specify a link without spaces))
  $(eval $(call find_library,openblas,openblas,cblas.h,OpenBLAS))
  $(eval $(call find_library,libcjson,cjson,cjson/cJSON.h,cJSON))
  $(eval $(call find_library,libxxhash,xxhash,xxhash.h,xxHash))
  ifneq ($(MISSING),)
    $(error missing: $(MISSING); scripts/install_deps.sh installs them; or give DEPS=DIRECTORY with include/ and lib/)
  endif
endif

ONEDNN ?= $(shell echo '\#include <dnnl.h>' | $(CC) -E -x c - >/dev/null 2>&1 && echo yes || echo no)
ifeq ($(ONEDNN),yes)
  PACKAGE_CFLAGS += -DONEDNN
  PACKAGE_LIBS += -ldnnl
endif

# Runs with several processes require OpenMPI, which pkg-config or its compiler wrapper finds.
MPI ?= $(shell { pkg-config --exists ompi-c || mpicc --showme:compile; } >/dev/null 2>&1 && echo yes || echo no)
ifeq ($(MPI),yes)
  MPI_CFLAGS := $(shell pkg-config --cflags ompi-c 2>/dev/null || mpicc --showme:compile)
  PACKAGE_CFLAGS += -DUSE_MPI $(patsubst -I%,-isystem %,$(MPI_CFLAGS))
  PACKAGE_LIBS += $(shell pkg-config --libs ompi-c 2>/dev/null || mpicc --showme:link)
endif

# AVX-512 at full width, where the CPU has it: the default of GCC is half of it.
WIDE := $(shell echo | $(CC) -mprefer-vector-width=512 -E -x c - >/dev/null 2>&1 && echo -mprefer-vector-width=512)
OPT ?= -O3
OPTIMIZE = $(OPT) $(ARCH) $(WIDE) -fno-math-errno -fno-trapping-math -ffp-contract=fast
CPPFLAGS += $(PACKAGE_CFLAGS)
DEBUG = -g
CFLAGS ?= $(OPTIMIZE) $(DEBUG)
COMMON = $(WARN) -fopenmp -MD -MP # -MD: with system headers, since another version of a library may replace them
ifdef SANITIZE
  CFLAGS = -O1 -g1 $(ARCH) -fno-omit-frame-pointer -fsanitize=$(SANITIZE) -fno-sanitize-recover=all
endif
ifdef REAL
  CPPFLAGS += -DREAL=$(REAL)
endif
# Programs of tests, whose speed nobody measures, compile in a third of the time.
TEST_PROGRAMS = test_diffv2 test_operations test_prediction test_rooms
TEST_FLAGS = $(if $(and $(filter file,$(origin OPT)),$(filter file,$(origin CFLAGS))),-O1 -g1)
LDLIBS = $(PACKAGE_LIBS) -lpthread -lm

# A stamp is a file with the flags of compilers and linker. Objects depend on it; it is written only when it changes. It
# also contains the predefined macros of the compilers, which depend on their version and on -march=native.
same = $(and $(findstring x$(1)x,x$(2)x),$(findstring x$(2)x,x$(1)x))
stamp = $(if $(call same,$(file <$(1)),$(2)),,$(shell mkdir -p $(dir $(1)))$(file >$(1),$(2)))
ifeq ($(filter clean format help rooms test,$(MAKECMDGOALS)),)
  COMPILERS := $(CC) $(CXX) $(shell for compiler in '$(CC)' '$(CXX)'; do \
    echo | $$compiler $(ARCH) -dM -E -x c - 2>/dev/null | cksum; done)
  SEARCHED := $(CPATH) $(C_INCLUDE_PATH) $(CPLUS_INCLUDE_PATH) $(LIBRARY_PATH)
  STAMP = $(COMPILERS) $(SEARCHED) $(CPPFLAGS) $(CFLAGS) $(TEST_FLAGS) $(COMMON) $(LDFLAGS) $(LDLIBS)
  $(call stamp,$(BUILD)/flags,$(STAMP))
  $(call stamp,$(BUILD)/revision.c,const char program_revision[] = "$(REVISION)";)
endif

.PHONY: all test bench format docs rooms help clean all-archs
.PHONY: train_diffv2 predict_diffv2 text_to_shards train_diffv2cu test_diffv2cu
all: train_diffv2 predict_diffv2 text_to_shards

# Phony: another BUILD or PRECISION may have made the copy. -f: the program may be running.
copy = cmp -s $< $@ || cp -f $< $@
train_diffv2 predict_diffv2 text_to_shards: %: $(BUILD)/%
	@$(copy)

# ccache, which also compares the stamp: it has what -march=native means on this CPU.
CCACHE_PROGRAM := $(if $(filter no,$(CCACHE))$(findstring ccache,$(CC) $(CXX)),,$(shell command -v ccache))
CACHED = $(if $(CCACHE_PROGRAM),CCACHE_EXTRAFILES=$(filter %/flags,$^) $(CCACHE_PROGRAM))

# In its own object, so that a commit recompiles nothing else.
$(BUILD)/revision.o $(CUDA_BUILD)/revision.o: %/revision.o: $(BUILD)/revision.c %/flags
	$(CC) -std=c11 $(WARN) -fPIE -c -o $@ $<

# encode_text is the tokenizer as a filter, for data/test_tokenizer.py. faulty_diffv2 has planned faults and
# single_diffv2 has no MPI, for the tests of several ranks; with little optimization they compile in a third of the
# time.
LINK = $(CFLAGS) -fopenmp $(LDFLAGS) -o $@ $^ $(LDLIBS)
PROGRAMS = train_diffv2 predict_diffv2 $(TEST_PROGRAMS) bench encode_text faulty_diffv2 single_diffv2
$(PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/revision.o
	$(CC) $(LINK)
$(BUILD)/text_to_shards: $(BUILD)/text_to_shards.o
	$(CC) $(LINK)

vpath %.c data tests dev/bench dev/predict
$(BUILD)/%.o: %.c $(BUILD)/flags
	$(CACHED) $(CC) -std=c11 $(CPPFLAGS) $(CFLAGS) $(TARGET_FLAGS) $(COMMON) -c -o $@ $<
$(TEST_PROGRAMS:%=$(BUILD)/%.o): TARGET_FLAGS = $(TEST_FLAGS)
$(BUILD)/faulty_diffv2.o: TARGET_FLAGS = -O1 -g1
$(BUILD)/single_diffv2.o: train_diffv2.c $(BUILD)/flags
	$(CACHED) $(CC) -std=c11 $(CPPFLAGS) -UUSE_MPI $(CFLAGS) -O0 -g1 $(COMMON) -c -o $@ $<

# The GPU build. A script finds its compiler and libraries, only for goals that require them.
ifneq ($(filter train_diffv2cu test_diffv2cu all-archs $(CUDA_BUILD)/%,$(MAKECMDGOALS)),)
  find_cuda = CUDA='$(CUDA)' NVCC='$(NVCC)' CUDNN='$(CUDNN)' CUDNN_FRONTEND='$(CUDNN_FRONTEND)' NVRTC='$(NVRTC)' \
    NCCL='$(NCCL)' MPI='$(MPI)' DEPS='$(DEPS)' ARCHS='$(ARCHS)' scripts/find_cuda.sh $(CUDA_BUILD)/cuda.mk
  ifneq ($(shell mkdir -p $(CUDA_BUILD) && $(find_cuda) && echo yes),yes)
    $(error the CUDA program cannot be built here; see the lines above)
  endif
  include $(CUDA_BUILD)/cuda.mk
endif
# Attention by cuDNN, for bf16 only. It is compiled separately, since that takes a minute.
CUDNN_UNIT = $(if $(CUDNN_LIBS),$(if $(filter bf16,$(PRECISION)),$(CUDA_BUILD)/attention_cudnn.o))
comma = ,
CUDA_HOST = -Wall,-Wextra$(if $(filter yes,$(STRICT)),$(comma)-Werror),-fopenmp,-fno-math-errno,-fno-trapping-math
# nvcc accepts directories and macros. Other flags of packages (-fopenmp, -pthread) go to the host compiler.
joined = $(subst -isystem ,-isystem@,$(1))
nvcc_flags = $(subst -isystem@,-isystem ,$(filter -I% -isystem@% -D% -U%,$(call joined,$(1)))) \
  $(addprefix -Xcompiler ,$(filter-out -I% -isystem@% -D% -U%,$(call joined,$(1))))
# 90 is compiled as 90a, with the instructions of hopper.cuh, which run on all GPUs of 9.0. Its PTX is for later GPUs.
CUDA_CODE = $(foreach arch,$(CUDA_ARCHS:90=90a),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) \
  $(if $(filter no,$(PTX)),,$(foreach arch,$(lastword $(CUDA_ARCHS)),-gencode \
  arch=compute_$(arch)$(comma)code=compute_$(arch))) # for later GPUs
CUDA_FLAGS = -std=c++17 -O3 -g -lineinfo $(call nvcc_flags,$(CPPFLAGS) $(CUDA_CFLAGS)) \
  $(if $(filter-out default,$(origin CXX)),-ccbin $(lastword $(filter-out -%,$(CXX)))) \
  -DDEVICE_OPS -DPRECISION_$(if $(filter fp32,$(PRECISION)),FP32,BF16) $(NCCL_CFLAGS) \
  $(if $(filter 90 90a,$(CUDA_ARCHS)),-DCODE_FOR_SM_90A) \
  $(if $(CUDNN_UNIT),$(CUDNN_CFLAGS)) -Xcompiler $(CUDA_HOST) $(if $(filter yes,$(STRICT)),-Werror all-warnings) \
  -MD -MP $(CUDA_CODE)
# Without new dtags the rpath also applies to libraries that other libraries load.
CUDA_LINK = $(CUDA_LIBS) -ldl $(NCCL_LIBS) $(if $(CUDNN_UNIT),$(CUDNN_LIBS)) -Wl,--disable-new-dtags

ifdef CUDA_ARCHS
  NVCC_VERSION := $(NVCC) $(shell $(NVCC) --version | cksum)
  CUDA_STAMP = $(COMPILERS) $(NVCC_VERSION) $(SEARCHED) $(CUDA_FLAGS) $(CUDA_CFLAGS) $(CUDNN_CFLAGS) $(WARN) $(LDFLAGS)
  $(call stamp,$(CUDA_BUILD)/flags,$(CUDA_STAMP) $(CUDA_LINK) $(LDLIBS))
endif

train_diffv2cu test_diffv2cu: %: $(CUDA_BUILD)/%
	@$(copy)
CUDA_UNITS = $(CUDNN_UNIT) $(CUDA_BUILD)/revision.o
$(CUDA_BUILD)/%cu: $(CUDA_BUILD)/%.cu.o $(CUDA_UNITS)
	$(CXX) -fopenmp $(LDFLAGS) -o $@ $^ $(CUDA_LINK) $(LDLIBS)
$(CUDA_BUILD)/bench_cuda: $(CUDA_BUILD)/bench_cuda.cu.o $(CUDA_UNITS)
	$(CXX) -fopenmp $(LDFLAGS) -o $@ $^ $(CUDA_LINK) $(LDLIBS)
vpath %.cu dev/bench dev/emulator dev/emulator/ptx tests
# What ptxas says of registers goes to a file, which dev/registers.py checks.
$(CUDA_BUILD)/%.cu.o: %.cu $(CUDA_BUILD)/flags
	@echo "$(NVCC) $(CUDA_FLAGS) -c -o $@ $<"
	@$(NVCC) $(CUDA_FLAGS) -Xptxas -v -c -o $@ $< 2>$@.ptxas; status=$$?; \
	    grep -v '^ptxas info\|bytes stack frame' $@.ptxas >&2; exit $$status
$(CUDA_BUILD)/attention_cudnn.o: llmc/cuda/attention_cudnn.cpp $(CUDA_BUILD)/flags
	$(CACHED) $(CXX) -std=c++17 -O1 -g1 $(WARN) $(CUDA_CFLAGS) $(CUDNN_CFLAGS) -MD -MP -c -o $@ $<
# The plans of cuDNN for other devices (tests/cudnn_plans.cpp), with a replacement for the driver.
$(CUDA_BUILD)/cudnn_plans: tests/cudnn_plans.cpp $(CUDA_BUILD)/no_gpu/libcuda.so.1 $(CUDA_BUILD)/flags
	$(CXX) -std=c++17 -O1 $(WARN) $(CUDA_CFLAGS) $(CUDNN_CFLAGS) -MD -MP -o $@ $< $(CUDA_LINK)
$(CUDA_BUILD)/no_gpu/libcuda.so.1: tests/cudnn_driver.c $(CUDA_BUILD)/flags
	mkdir -p $(@D)
	$(CC) -std=c11 $(WARN) -shared -fPIC -Wl,-soname,libcuda.so.1 -o $@ $<
.PRECIOUS: $(CUDA_BUILD)/%.cu.o
all-archs:
	$(foreach precision,bf16 fp32,$(MAKE) PRECISION=$(precision) ARCHS="80 89 90 100 120" \
	    $(BUILD)/cuda_$(precision)/train_diffv2cu $(BUILD)/cuda_$(precision)/test_diffv2cu &&) true

test:
	scripts/test.sh
bench: $(BUILD)/bench $(BUILD)/train_diffv2
	$(BUILD)/bench $(ARGS)
format:
	dev/format/format.sh
docs: $(BUILD)/train_diffv2
	sed -i '/^```/,$$d' docs/options.md && { echo '```'; $< --help all; echo '```'; } >>docs/options.md
rooms:
	dev/rooms.py
	dev/rooms_figure.py
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
clean:
	rm -rf $(filter-out $(BUILD)/python $(BUILD)/venv-%,$(wildcard $(BUILD)/*)) train_diffv2 predict_diffv2 \
	    text_to_shards train_diffv2cu test_diffv2cu

include dev/emulator/rules.mk
include dev/emulator/ptx/rules.mk
DEPENDENCIES = $(wildcard $(BUILD)/*.d $(CUDA_BUILD)/*.d $(BUILD)/oncpu/*.d)
$(sort $(filter %.c %.cu %.cpp,$(shell cat $(DEPENDENCIES) /dev/null))) /dev/null: # as -MP: a source may have moved
-include $(wildcard $(BUILD)/*.d $(CUDA_BUILD)/*.d)
