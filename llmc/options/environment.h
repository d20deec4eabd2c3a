/*
environment.h: environment variables that libraries read.

  GOMP_SPINCOUNT   how long a thread of GCC's OpenMP spins before it sleeps. The default, some milliseconds, delays the
                   threads it waits for when other processes use the cores: with one busy process, a small step takes
                   10 times as long. 3000 is about 30 us. The library reads it in a constructor of its shared object,
                   before main and before any constructor of the program, and offers no function that sets it later:
                   environment_reexecute() sets it and executes the program again, once.

If the user has set this variable or OMP_WAIT_POLICY, the program is not executed again. It cannot execute itself
without /proc, under valgrind (which it would leave), and when it was started through the dynamic loader (which would be
executed instead). It then continues unchanged.

Variables that silently change the numerics of matrix products are refused, or recorded in run.json and compared between
ranks: library_variables. Names: cuBLAS documentation, "Floating Point Emulation"; CUDA and cuDNN documentation
(NVIDIA_TF32_OVERRIDE); oneDNN documentation, "Primitive Attributes: floating-point math mode", "CPU Dispatcher
Control".
*/
#pragma once
#include "../base/json.h"
#include <strings.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

typedef struct {
    const char *name;
    const char *harmless; // the only accepted value; NULL: any value is accepted and recorded
    const char *effect;   // the effect of another value
} LibraryVariable;

static const LibraryVariable library_variables[] = {
    {"NVIDIA_TF32_OVERRIDE", "0", "may multiply fp32 numbers rounded to TF32"},
    {"CUBLAS_EMULATE_SINGLE_PRECISION", "0", "multiplies fp32 numbers in pieces of bf16"},
    {"ONEDNN_DEFAULT_FPMATH_MODE", "STRICT", "may multiply fp32 numbers rounded to bf16 or TF32"},
    {"DNNL_DEFAULT_FPMATH_MODE", "STRICT", "may multiply fp32 numbers rounded to bf16 or TF32"},
    {"CUBLAS_EMULATION_STRATEGY", NULL, NULL},
    {"CUBLASLT_HEURISTICS_LUT_FILE", NULL, NULL}, // undocumented; it changes which algorithm is the first
    {"ONEDNN_MAX_CPU_ISA", NULL, NULL},
    {"DNNL_MAX_CPU_ISA", NULL, NULL},
};
enum { LIBRARY_VARIABLE_COUNT = sizeof(library_variables) / sizeof(library_variables[0]) };

// The value of a variable, printable; NULL: not set.
static inline const char *library_variable(int i) {
    const char *value = getenv(library_variables[i].name);
    return value && !printable(value) ? "?" : value;
}

static inline void environment_check(void) {
    for (int i = 0; i < LIBRARY_VARIABLE_COUNT; i++) {
        const LibraryVariable *v = &library_variables[i];
        const char *value = library_variable(i);
        CHECK(!value || !v->harmless || strcasecmp(value, v->harmless) == 0,
              "%s=%s in the environment %s: unset it, or set it to %s", v->name, value, v->effect, v->harmless);
    }
}

// Whether /proc/self/exe is this program. It is not if the dynamic loader started the program, or under valgrind.
static inline bool environment_can_reexecute(void) {
    const char *preloaded = getenv("LD_PRELOAD");
    return getauxval(AT_BASE) != 0 && !(preloaded && strstr(preloaded, "vgpreload"));
}

// Sets the name of the process in ps, top and killall, which is "exe" after an exec of /proc/self/exe.
static inline void environment_name_process(const char *program) {
    const char *slash = program ? strrchr(program, '/') : NULL;
    if (program) prctl(PR_SET_NAME, slash ? slash + 1 : program); // after a failure only the name is wrong
}

// Called first in main, with the arguments of the process. Returns in the process that has the variable, or with a
// warning when it cannot execute itself.
static inline void environment_reexecute(char **argv) {
    environment_name_process(argv[0]);
    if (!environment_can_reexecute() || getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    CHECK(setenv("GOMP_SPINCOUNT", "3000", 1) == 0, "out of memory for the environment");
    execv("/proc/self/exe", argv);
    warn("steps are slow when other processes use the cores; the program cannot execute itself with another "
         "environment (%s): set GOMP_SPINCOUNT=3000 before the start",
         strerror(errno));
}
