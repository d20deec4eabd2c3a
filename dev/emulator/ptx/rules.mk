# The compiled kernels on the CPU: make build/ptx/sm_90/test_diffv2 translates what nvcc compiles for that architecture
# (80, 89, 90, 90a, 100 or 120) to C++, and links it with the program of dev/emulator. Requires nvcc; see README.md.
# Variables: those of dev/emulator/rules.mk.

PTX_NVCC = $(or $(NVCC),$(or $(CUDA),/usr/local/cuda)/bin/nvcc)
PTX = $(BUILD)/ptx
PTX_NVCC_FLAGS = -std=c++17 -O3 -lineinfo $(call nvcc_flags,$(CPPFLAGS)) -DDEVICE_OPS $(ONCPU_NCCL) $(ONCPU_PRECISION) \
  -isystem $(CUDA_HEADERS) -Xcompiler -fopenmp
# -ffp-contract=off: each operation is rounded where the PTX says so
PTX_CFLAGS = -std=c++17 -O1 $(ARCH) -fno-math-errno -fno-trapping-math -ffp-contract=off -fno-strict-aliasing \
  -DCUDA_ON_CPU -Idev -isystem $(CUDA_HEADERS)

ifneq ($(filter $(PTX)/%,$(MAKECMDGOALS)),)
  $(call stamp,$(PTX)/nvcc_flags,$(PTX_NVCC) $(PTX_NVCC_FLAGS))
  $(call stamp,$(PTX)/flags,$(COMPILERS) $(PTX_CFLAGS))
endif

PTX_LAYER = $(PTX)/runtime.o $(PTX)/hopper.o
$(PTX_LAYER): $(PTX)/%.o: dev/emulator/ptx/%.cpp $(PTX)/flags
	$(CACHED) $(CXX) $(PTX_CFLAGS) -g1 $(WARN) -MMD -MP -c -o $@ $<
$(PTX)/%.o: $(PTX)/%.cpp $(PTX)/flags
	$(CACHED) $(CXX) $(PTX_CFLAGS) -MMD -MP -c -o $@ $<

# The PTX of a program for all its kernels; their translation, in parts that g++ compiles in seconds each; the object of
# the emulated program, with kernels that the parts can name.
define ptx_program # architecture, name, source, numbers of the parts
$(PTX)/sm_$(1)/$(2).ptx: $(3) $(PTX)/nvcc_flags
	mkdir -p $(PTX)/sm_$(1)/$(2)_parts
	$$(PTX_NVCC) $$(PTX_NVCC_FLAGS) -ptx -arch=compute_$(1) -MD -MP -MF $$(@:.ptx=.d) -MT $$@ -o $$@ $$<
$(PTX)/sm_$(1)/$(2)_parts/part_0.cpp: $(PTX)/sm_$(1)/$(2).ptx $(ONCPU)/$(2).cu.o \
  $(addprefix dev/emulator/ptx/,translate.py forms.py)
	nm $(ONCPU)/$(2).cu.o >$$(@D)/host_symbols
	PYTHONDONTWRITEBYTECODE=1 python3 dev/emulator/ptx/translate.py $$< $$(@D)/host_symbols $$(@D) $(words $(4))
$(patsubst %,$(PTX)/sm_$(1)/$(2)_parts/part_%.cpp,$(filter-out 0,$(4))): $(PTX)/sm_$(1)/$(2)_parts/part_0.cpp ;
$(PTX)/sm_$(1)/$(2)_parts/host.o: $(PTX)/sm_$(1)/$(2)_parts/part_0.cpp
	objcopy --globalize-symbols=$$(@D)/symbols $(ONCPU)/$(2).cu.o $$@
$(PTX)/sm_$(1)/$(2): $(PTX)/sm_$(1)/$(2)_parts/host.o $(patsubst %,$(PTX)/sm_$(1)/$(2)_parts/part_%.o,$(4)) \
  $(PTX_LAYER) $(ONCPU_LAYER) $(BUILD)/revision.o
	$$(CXX) $$(ONCPU_CFLAGS) -fopenmp $$(LDFLAGS) -o $$@ $$^ $$(LDLIBS)
.PRECIOUS: $(PTX)/sm_$(1)/$(2).ptx $(patsubst %,$(PTX)/sm_$(1)/$(2)_parts/part_%.cpp,$(4))
endef
$(foreach arch,80 89 90 90a 100 120,$(eval $(call ptx_program,$(arch),test_diffv2,test_diffv2.cu,0 1 2 3 4 5 6 7)))
$(eval $(call ptx_program,90a,planted90a,dev/emulator/ptx/planted90a.cu,0))
.PRECIOUS: $(PTX)/%.o

-include $(wildcard $(PTX)/*.d $(PTX)/sm_*/*.d $(PTX)/sm_*/*/*.d)
