/*
environment.h: variables that libraries read.

Those that a library reads before main begins are set here, and the program re-executes itself once.

  GOMP_SPINCOUNT      how long a thread of GCC's OpenMP waits by spinning before it sleeps. Its default, some
                      milliseconds, keeps the threads that it waits for from running where other processes need the
                      cores: with one busy process beside it, a small step takes 10 times as long. 3000 is about 30 us.
  KMP_BLOCKTIME       the same for LLVM's OpenMP, in milliseconds; a program compiled by clang has both
  OPENBLAS_CORETYPE   kernels of OpenBLAS, which may choose AVX2 on a CPU that is newer than itself (matmul.h)

What the user has set is left alone, and where nothing is to be set, the program is not started again. It cannot be
started again without /proc; under valgrind it would leave valgrind, and where the loader was named to run it, it would
start the loader. It then goes on as it is.

Variables that change the numbers of matrix products without a word are refused, or recorded in run.json and compared
between ranks: library_variables. Names: cuBLAS documentation, "Floating Point Emulation"; CUDA and cuDNN documentation
(NVIDIA_TF32_OVERRIDE); oneDNN documentation, "Primitive Attributes: floating-point math mode", "CPU Dispatcher
Control".
*/
#ifndef LLMC_ENVIRONMENT_H
#define LLMC_ENVIRONMENT_H
#include "../base/json.h"
#include "../ops/all_ops.h"
#include <strings.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

#ifdef __cplusplus
extern "C" {
#endif
extern void kmp_set_blocktime(int milliseconds) __attribute__((weak)); // absent from GCC's OpenMP
#ifdef __cplusplus
}
#endif

typedef struct {
    const char *name, *value;
    bool (*wanted)(void);
    const char *cost; // of going on without it
} EnvironmentVariable;

static inline bool gcc_threads_spin(void) { return getenv("OMP_WAIT_POLICY") == NULL; }
static inline bool llvm_threads_spin(void) { return getenv("OMP_WAIT_POLICY") == NULL && kmp_set_blocktime != NULL; }

static const EnvironmentVariable environment_variables[] = {
    {"GOMP_SPINCOUNT", "3000", gcc_threads_spin, "steps are slow when other processes use the cores"},
    {"KMP_BLOCKTIME", "0", llvm_threads_spin, "steps are slow when other processes use the cores"},
    {"OPENBLAS_CORETYPE", "SkylakeX", matmul_wants_wide_kernels,
     "OpenBLAS uses AVX2 kernels on a CPU with AVX-512, at about half speed"},
};
enum { ENVIRONMENT_VARIABLE_COUNT = sizeof(environment_variables) / sizeof(environment_variables[0]) };

typedef struct {
    const char *name;
    const char *harmless; // the one value that is accepted; NULL: any is, and recorded
    const char *effect;   // of another value
} LibraryVariable;

static const LibraryVariable library_variables[] = {
    {"NVIDIA_TF32_OVERRIDE", "0", "may multiply fp32 numbers rounded to TF32"},
    {"CUBLAS_EMULATE_SINGLE_PRECISION", "0", "multiplies fp32 numbers in pieces of bf16"},
    {"ONEDNN_DEFAULT_FPMATH_MODE", "STRICT", "may multiply fp32 numbers rounded to bf16 or TF32"},
    {"DNNL_DEFAULT_FPMATH_MODE", "STRICT", "may multiply fp32 numbers rounded to bf16 or TF32"},
    {"CUBLAS_EMULATION_STRATEGY", NULL, NULL},
    {"CUBLASLT_HEURISTICS_LUT_FILE", NULL, NULL}, // found in the library; it changes which algorithm is the first
    {"ONEDNN_MAX_CPU_ISA", NULL, NULL},
    {"DNNL_MAX_CPU_ISA", NULL, NULL},
};
enum { LIBRARY_VARIABLE_COUNT = sizeof(library_variables) / sizeof(library_variables[0]) };

// The value of a variable, for one line of text; NULL where it is not set.
static inline const char *library_variable(int i) {
    const char *value = getenv(library_variables[i].name);
    return value && !printable(value) ? "?" : value;
}

static inline void environment_refuse(void) {
    for (int i = 0; i < LIBRARY_VARIABLE_COUNT; i++) {
        const LibraryVariable *v = &library_variables[i];
        const char *value = library_variable(i);
        CHECK(!value || !v->harmless || strcasecmp(value, v->harmless) == 0,
              "%s=%s in the environment %s: unset it, or set it to %s", v->name, value, v->effect, v->harmless);
    }
}

// Whether /proc/self/exe is this program: not where the loader was named to run it, and not under valgrind.
static inline bool environment_can_reexecute(void) {
    const char *preloaded = getenv("LD_PRELOAD");
    return getauxval(AT_BASE) != 0 && !(preloaded && strstr(preloaded, "vgpreload"));
}

// The name of the process in ps, top and killall, which is "exe" after an exec of /proc/self/exe.
static inline void environment_name_process(const char *program) {
    const char *slash = program ? strrchr(program, '/') : NULL;
    if (program) prctl(PR_SET_NAME, slash ? slash + 1 : program); // a failure costs the name alone
}

// Called first in main, with the arguments of the process. Returns in the process that has the variables, or cannot
// get them.
static inline void environment_reexecute(char **argv) {
    bool missing[ENVIRONMENT_VARIABLE_COUNT], any = false;
    environment_name_process(argv[0]);
    if (!environment_can_reexecute()) return;
    for (int i = 0; i < ENVIRONMENT_VARIABLE_COUNT; i++) {
        const EnvironmentVariable *v = &environment_variables[i];
        missing[i] = getenv(v->name) == NULL && v->wanted();
        if (missing[i]) CHECK(setenv(v->name, v->value, 1) == 0, "out of memory for the environment");
        any = any || missing[i];
    }
    if (!any) return;
    execv("/proc/self/exe", argv);
    for (int i = 0; i < ENVIRONMENT_VARIABLE_COUNT; i++)
        if (missing[i])
            warn("%s; cannot start again with another environment (%s): set %s=%s before the start",
                 environment_variables[i].cost, strerror(errno), environment_variables[i].name,
                 environment_variables[i].value);
}
#endif
