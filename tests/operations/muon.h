/*
muon.h: what the cases of the catalogue do not show of Muon: matrices without a direction, and the numbers of
torch.optim.Muon in fp32 (dev/reference/make_muon_fixture.py).
*/
#pragma once
#include "engine.h"
#include "../../llmc/checkpoint/safetensors.h"

static void muon_run(real *out, real *second, const real *x, int rows, int columns) {
    const MuonMatrices one = {rows, columns, 1, 0};
    if (ops_workspace.bytes < muon_workspace_bytes(one)) ops_init(muon_workspace_bytes(one));
    muon_orthogonalize(out, second, x, one, 0.95);
}

// 1 x n and n x 1 become a unit vector times the band; zeros stay zeros; a matrix of rank 1 keeps its rank.
static void test_muon_degenerate(void) {
    static const int shapes[][2] = {{1, 50}, {50, 1}, {1, 1}, {20, 30}, {30, 20}};
    for (int i = 0; i < 5; i++)
        for (int kind = 0; kind < 4; kind++) { // zeros; of rank 1; the same, tiny; the same with rows of zeros
            const int m = shapes[i][0], n = shapes[i][1];
            const double size = kind == 0 ? 0 : kind == 2 ? 1e-20 : 3;
            real *x = op_alloc(product(m, n)), *out = op_alloc(product(m, n)), *second = op_alloc((size_t)m);
            for (int normuon = 0; normuon < 2; normuon++) {
                double sum = 0;
                for (int r = 0; r < m; r++)
                    for (int c = 0; c < n; c++)
                        x[r * n + c] = (real)(kind == 3 && r % 2 ? 0 : size * cos(r + 1) * sin(2 * c + 1));
                for (int r = 0; r < m; r++) second[r] = 0;
                muon_run(out, normuon ? second : NULL, x, m, n);
                int bad = op_not_finite(out, product(m, n)) + op_not_finite(second, (size_t)m);
                for (int k = 0; k < m * n; k++) sum += (double)out[k] * (double)out[k];
                double limit = 1.25 * 0.2 * sqrt(normuon ? (double)m * n : max_int(m, n));
                EXPECT(bad == 0 && sqrt(sum) <= limit, "%d x %d, kind %d: %d elements not finite, a step of %.3g", m, n,
                       kind, bad, sqrt(sum));
                EXPECT(kind != 0 || sum == 0, "%d x %d: zeros became a step of %.3g", m, n, sqrt(sum));
                EXPECT(kind != 1 || sqrt(sum) > 0.65 * 0.2 * sqrt(max_int(m, n)), "%d x %d: a step of %.3g", m, n,
                       sqrt(sum));
            }
            op_free("matrices without a direction");
        }
}

// Three updates of each matrix of the fixture with its gradients.
static void test_muon_reference(void) {
    SafeTensors *file = safetensors_open("dev/reference/muon.safetensors");
    int compared = 0;
    for (size_t i = 0; i < file->count; i++) {
        const SafeTensor *t = &file->tensors[i];
        if (strncmp(t->name, "before.", 7) != 0) continue;
        const int m = (int)t->shape[0], n = (int)t->shape[1];
        real *w = op_alloc(t->count), *want = op_alloc(t->count), *momentum = op_alloc(t->count),
             *direction = op_alloc(t->count), *grads = op_alloc(t->count), *step = op_alloc(t->count);
        safetensors_read(file, t->name, 0, t->count, w, DTYPE_OF(real));
        memset(momentum, 0, t->count * sizeof(real));
        for (int update = 0; update < 3; update++) {
            safetensors_read(file, test_text("grad%d.%s", update, t->name + 7), 0, t->count, grads, DTYPE_OF(real));
            muon_direction(direction, momentum, grads, t->count, 1, 0.95);
            muon_run(step, NULL, direction, m, n);
            muon_update(w, NULL, step, t->count, 0.02, 0.1);
        }
        safetensors_read(file, test_text("after.%s", t->name + 7), 0, t->count, want, DTYPE_OF(real));
        double error = 0, norm = 0;
        for (size_t e = 0; e < t->count; e++) {
            error += ((double)w[e] - (double)want[e]) * ((double)w[e] - (double)want[e]);
            norm += (double)want[e] * (double)want[e];
        }
        EXPECT(sqrt(error / norm) < 2e-5, "%s: off by %.3g of its norm after 3 updates", t->name + 7,
               sqrt(error / norm));
        compared++;
        op_free(t->name);
    }
    EXPECT(compared >= 4, "only %d matrices were compared", compared);
    safetensors_close(file);
}

static void test_muon(void) {
    op_check_all(OP_MUON_DIRECTION);
    op_check_all(OP_MUON_ORTHOGONALIZE);
    op_check_all(OP_MUON_UPDATE);
}
