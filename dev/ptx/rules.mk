# The compiled kernels on the CPU: make build/ptx/sm_90/test_diffv2 translates what nvcc compiles for that architecture
# (80 or 90) to C++, and links it with the program of dev/cuda_on_cpu. Requires nvcc; see dev/ptx/README.md.
# Variables: those of dev/cuda_on_cpu/rules.mk.

PTX_NVCC = $(or $(NVCC),$(or $(CUDA),/usr/local/cuda)/bin/nvcc)
PTX = $(BUILD)/ptx
PTX_NVCC_FLAGS = -std=c++17 -O3 -lineinfo $(call nvcc_flags,$(CPPFLAGS)) -DDEVICE_OPS $(ONCPU_NCCL) $(ONCPU_PRECISION) \
  -isystem $(CUDA_HEADERS) -Xcompiler -fopenmp
PTX_PARTS = 0 1 2 3 4 5 6 7
# each operation is rounded where the PTX says so
PTX_CFLAGS = -std=c++17 -O1 $(ARCH) -fno-math-errno -fno-trapping-math -ffp-contract=off -fno-strict-aliasing \
  -DCUDA_ON_CPU -Idev -isystem $(CUDA_HEADERS) $(if $(COUNT),-DPTX_COUNT)

ifneq ($(filter $(PTX)/%,$(MAKECMDGOALS)),)
  $(call stamp,$(PTX)/flags,$(COMPILERS) $(PTX_NVCC) $(PTX_NVCC_FLAGS) $(PTX_CFLAGS))
endif

# The PTX of a program, for all its kernels.
$(PTX)/sm_%/test_diffv2.ptx: test_diffv2.cu $(PTX)/flags
	mkdir -p $(@D)
	$(PTX_NVCC) $(PTX_NVCC_FLAGS) -ptx -arch=compute_$* -MD -MF $(@:.ptx=.d) -MT $@ -o $@ $<
# Its translation, in parts that g++ compiles in seconds, and the program with visible kernels.
$(PTX)/%/part_0.cpp: $(PTX)/%/test_diffv2.ptx $(ONCPU)/test_diffv2.cu.o dev/ptx/translate.py dev/ptx/forms.py
	nm $(ONCPU)/test_diffv2.cu.o >$(@D)/host_symbols
	PYTHONDONTWRITEBYTECODE=1 python3 dev/ptx/translate.py $< $(@D)/host_symbols $(@D) $(words $(PTX_PARTS))
$(PTX)/%/host.o: $(PTX)/%/part_0.cpp
	objcopy --globalize-symbols=$(@D)/symbols $(ONCPU)/test_diffv2.cu.o $@
$(PTX)/%.o: $(PTX)/%.cpp
	$(CXX) $(PTX_CFLAGS) -MMD -MP -c -o $@ $<
$(PTX)/runtime.o: dev/ptx/runtime.cpp $(PTX)/flags
	$(CXX) $(PTX_CFLAGS) -g1 $(WARN) -MMD -MP -c -o $@ $<
define ptx_program
$(patsubst %,$(PTX)/sm_$(1)/part_%.cpp,$(filter-out 0,$(PTX_PARTS))): $(PTX)/sm_$(1)/part_0.cpp ;
$(PTX)/sm_$(1)/test_diffv2: $(PTX)/sm_$(1)/host.o $(patsubst %,$(PTX)/sm_$(1)/part_%.o,$(PTX_PARTS)) $(PTX)/runtime.o \
  $(ONCPU_LAYER) $(BUILD)/predict_diffv2.o $(BUILD)/revision.o
	$$(CXX) $$(ONCPU_CFLAGS) -fopenmp $$(LDFLAGS) -o $$@ $$^ $$(LDLIBS)
endef
$(foreach arch,80 90,$(eval $(call ptx_program,$(arch))))
.PRECIOUS: $(PTX)/sm_%/test_diffv2.ptx $(PTX)/%.cpp $(PTX)/%.o

-include $(wildcard $(PTX)/*.d $(PTX)/*/*.d)
