/*
bench_gemm.c: compares OpenBLAS and oneDNN, alternating in one run, on the products of a training step: y = x W^T,
dx = dy W, dW = dy^T x for N rows, IC inputs and OC outputs of the layers below.

  cc -O2 -fopenmp -o build/bench_gemm dev/bench/bench_gemm.c -lopenblas -ldnnl && build/bench_gemm

Requires both libraries (Debian: libopenblas-openmp-dev libdnnl-dev). Prints GFLOP/s, the best of REPEATS, and the ratio
OpenBLAS / oneDNN.
*/
#include <cblas.h>
#include <dnnl.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

enum { REPEATS = 10 };

typedef struct {
    const char *what;
    int N, IC, OC;
} Layer;
static const Layer layers[] = {
    {"124m q,k,v,lambda", 1024, 768, 2316}, {"124m o_proj", 1024, 768, 768},   {"124m gate,up", 1024, 768, 4096},
    {"124m down", 1024, 2048, 768},         {"124m head", 320, 768, 50257},    {"small gate,up", 4096, 256, 1408},
    {"tiny q,k,v,lambda", 2048, 128, 388},  {"tiny gate,up", 2048, 128, 704},  {"tiny down", 2048, 352, 128},
    {"attention scores", 64, 64, 512},      {"attention values", 64, 512, 64},
};

// Seconds for C (M x N) = op(A) op(B), row-major.
static double seconds(int dnnl, char ta, char tb, int M, int N, int K, const float *A, const float *B, float *C) {
    int lda = ta == 'T' ? M : K, ldb = tb == 'T' ? K : N;
    double start = omp_get_wtime();
    if (dnnl) {
        if (dnnl_sgemm(ta, tb, M, N, K, 1, A, lda, B, ldb, 0, C, N) != dnnl_success) exit(1);
    } else {
        cblas_sgemm(CblasRowMajor, ta == 'T' ? CblasTrans : CblasNoTrans, tb == 'T' ? CblasTrans : CblasNoTrans, M, N,
                    K, 1, A, lda, B, ldb, 0, C, N);
    }
    return omp_get_wtime() - start;
}

int main(void) {
    printf("%d threads, OpenBLAS kernels %s; GFLOP/s of OpenBLAS and oneDNN, and their ratio\n", omp_get_max_threads(),
           openblas_get_corename());
    printf("%-20s %5s %5s %6s   %-22s %-22s %-22s\n", "", "N", "IC", "OC", "y = x W^T", "dx = dy W", "dW = dy^T x");
    for (size_t l = 0; l < sizeof(layers) / sizeof(layers[0]); l++) {
        int N = layers[l].N, IC = layers[l].IC, OC = layers[l].OC;
        size_t counts[3] = {(size_t)N * (size_t)IC, (size_t)OC * (size_t)IC, (size_t)N * (size_t)OC};
        float *m[3];
        for (int i = 0; i < 3; i++) {
            m[i] = malloc(counts[i] * sizeof(float));
            if (!m[i]) return 1;
            for (size_t e = 0; e < counts[i]; e++) m[i][e] = (float)((e * 2654435761u >> 8) % 1000) / 1000 - 0.5f;
        }
        printf("%-20s %5d %5d %6d ", layers[l].what, N, IC, OC);
        for (int product = 0; product < 3; product++) {
            double best[2] = {1e9, 1e9};
            for (int r = 0; r < 2 * REPEATS; r++) {
                double s = product == 0   ? seconds(r % 2, 'N', 'T', N, OC, IC, m[0], m[1], m[2])
                           : product == 1 ? seconds(r % 2, 'N', 'N', N, IC, OC, m[2], m[1], m[0])
                                          : seconds(r % 2, 'T', 'N', OC, IC, N, m[2], m[0], m[1]);
                if (s < best[r % 2]) best[r % 2] = s;
            }
            double flops = 2e-9 * N * IC * OC;
            printf("  %6.0f %6.0f  %5.2f", flops / best[0], flops / best[1], best[1] / best[0]);
        }
        printf("\n");
        for (int i = 0; i < 3; i++) free(m[i]);
    }
    return 0;
}
