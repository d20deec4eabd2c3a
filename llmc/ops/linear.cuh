/*
linear.cuh: a linear layer without bias whose operands are rounded as --gemm says. Equations in linear.h.
*/
#ifndef LLMC_LINEAR_CUH
#define LLMC_LINEAR_CUH
#include "matmul.cuh"

static inline bool linear_native(void) { return true; }
static inline const char *linear_configure(GemmType type) {
    return type == GEMM_FP8 ? "the CUDA program has no FP8 products yet" : NULL;
}
static inline bool linear_in_fp8(void) { return false; }
static inline size_t linear_copy_bytes(int IC, int OC, bool head) {
    (void)IC, (void)OC, (void)head;
    return 0;
}
static inline size_t linear_workspace_bytes(int N, int IC, int OC) {
    (void)N, (void)IC, (void)OC;
    return 0;
}
static inline void linear_copy_weight(Linear w) { (void)w; }

static inline void linear_forward(floatX *y, const floatX *x, Linear w, int N) {
    matmul_forward(y, x, w.weight, N, w.IC, w.OC, w.ld);
}
static inline void linear_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x, Linear w, int N,
                                   bool add) {
    matmul_backward(dx, dweight, dy, x, w.weight, N, w.IC, w.OC, w.ld, add);
}
#endif
