/*
cuda_operations.h: checks of CUDA operations that operations/catalogue.h does not describe. A check reads the dimensions
of its case, n[0], n[1], ..., in the order of the names in its Check.
*/
#pragma once
#include "cuda_engine.h"

// ---------------------------------------------------------------------------------------------------
// Rows

// The rows of a token are added in fp32 in the order of the C operation: the same bits.
static void check_embedding_order(const Case *c) {
    int N = c->n[0], V = c->n[1], C = c->n[2];
    Operands o(c->shift);
    Operand &dx = o.in("dx", product(N, C)), &tokens = o.ints("tokens", (size_t)N, V);
    Operand &dweight = o.updated_fp32("dweight", product(V, C));
    std::vector<float> want(product(V, C));
    for (size_t k = 0; k < want.size(); k++) want[k] = (float)dweight.twin[k];
    o.run(embedding_workspace_bytes(N), [&] { embedding_backward(dweight.f(), dx.x(), tokens.i(), N, C); });
    for (int n = 0; n < N; n++)
        for (int k = 0; k < C; k++)
            want[product(tokens.twin_ints[(size_t)n], C) + (size_t)k] += (float)dx.twin[product(n, C) + (size_t)k];
    for (size_t k = 0; k < want.size(); k++) dweight.twin[k] = (double)want[k];
    o.expect(dweight, {-1, 0}); // without the rounding at the store: equality
}
static const Check embedding_order_check = {"embedding_backward in order", check_embedding_order, "N V C"};

// C = A B, or C +=, in double; first: of each, the first element.
static void gemm_reference(GemmShape s, Operand &C, const Operand &A, const Operand &B, size_t first = 0) {
    auto at = [=](const Operand &t, bool transposed, int row, int column, int ld) {
        return t.twin[first + (transposed ? product(column, ld) + (size_t)row : product(row, ld) + (size_t)column)];
    };
    for (int m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++) {
            double sum = 0, &to = C.twin[first + product(m, s.ldc) + (size_t)n];
            for (int k = 0; k < s.K; k++) sum += at(A, s.transpose_a, m, k, s.lda) * at(B, s.transpose_b, k, n, s.ldb);
            to = sum + (s.add ? to : 0);
        }
}

// The kernel for what the library refuses: every layout of the operands, with each kind of output. n: M N K, gap
static void check_gemm_plain(const Case *c) {
    for (int way = 0; way < 16; way++) {
        GemmShape s = {
            (way & 1) != 0, (way & 2) != 0, (way & 4) != 0, (way & 8) != 0, c->n[0], c->n[1], c->n[2], 0, 0, 0};
        s.lda = (s.transpose_a ? s.M : s.K) + c->n[3];
        s.ldb = (s.transpose_b ? s.K : s.N) + c->n[3];
        s.ldc = s.N + c->n[3];
        Operands o(c->shift);
        o.integers = 3; // sums are exact
        Operand &A = o.in("A", product(s.transpose_a ? s.K : s.M, s.lda)),
                &B = o.in("B", product(s.transpose_b ? s.N : s.K, s.ldb)),
                &C = s.fp32_out ? o.updated_fp32("C", product(s.M, s.ldc)) : o.updated("C", product(s.M, s.ldc));
        if (!s.add) C.poison();
        o.run(0, [&] { gemm_plain(s, C.at(), A.x(), B.x()); });
        gemm_reference(s, C, A, B);
        o.expect(C, {0, 0});
    }
}
static const Check gemm_plain_check = {"gemm_plain", check_gemm_plain, "M N K gap"};

// Several products in one call; one that is not aligned may be refused. Gaps of C stay as before. n: M N K, products
static void check_gemm_batch(const Case *c) {
    for (int way = 0; way < 16; way++) {
        GemmShape s = {(way & 1) != 0, (way & 2) != 0, (way & 4) != 0, (way & 8) != 0, c->n[0], c->n[1], c->n[2], 0, 0,
                       c->n[1]};
        s.lda = s.transpose_a ? s.M : s.K, s.ldb = s.transpose_b ? s.K : s.N;
        const size_t count = (size_t)c->n[3], most = product(max_int(s.M, s.N), max_int(min_int(s.M, s.N), s.K)),
                     apart = round_up(most, 128) + 128;
        Operands o(c->shift);
        o.integers = 3; // sums are exact
        Operand &A = o.in("A", count * apart), &B = o.in("B", count * apart),
                &C = s.fp32_out ? o.updated_fp32("C", count * apart) : o.updated("C", count * apart);
        if (way == 13) setenv("CUDA_ON_CPU_GEMM", "aligned", 1); // once: the library's refusal is a warning
        o.run(0, [&] { gemm_batch(s, count, apart, C.at(), A.x(), B.x()); });
        unsetenv("CUDA_ON_CPU_GEMM");
        for (size_t i = 0; i < count; i++) gemm_reference(s, C, A, B, i * apart);
        o.expect(C, {0, 0});
    }
}
static const Check gemm_batch_check = {"gemm_batch", check_gemm_batch, "M N K products"};

#ifdef CUDA_ON_CPU
// A library that divides sums over K where it can, and drops a remainder. n: K, parts of the sum
static void check_gemm_split(const Case *c) {
    GemmShape s = {false, true, true, true, 9, 16, c->n[0], c->n[0], c->n[0], 16};
    Operands o(c->shift);
    o.integers = 3; // sums are exact
    Operand &A = o.in("A", product(s.M, s.K)), &B = o.in("B", product(s.N, s.K)),
            &C = o.updated_fp32("C", product(s.M, s.N));
    setenv("CUDA_ON_CPU_GEMM", "split", 1);
    o.run(0, [&] {
        gemm(s, C.at(), A.x(), B.x());
        int parts = gemm_parts_of_k(&gemm_state.plans[0].algorithm);
        EXPECT(gemm_state.count == 1 && parts == c->n[1], "%d plans, the first in %d parts", gemm_state.count, parts);
    });
    unsetenv("CUDA_ON_CPU_GEMM");
    gemm_reference(s, C, A, B);
    o.expect(C, {0, 0});
}
static const Check gemm_split_check = {"gemm", check_gemm_split, "K parts"};
#endif

// Small uploads use slots of pinned memory in turn, large ones block. n: bytes, times
static void check_buffers(const Case *c) {
    size_t bytes = (size_t)c->n[0];
    std::vector<unsigned char> sent(bytes), got(bytes);
    std::vector<char *> buffers((size_t)c->n[1]);
    for (char *&buffer : buffers) {
        buffer = (char *)buffer_alloc(bytes, "a test");
        buffer_download(got.data(), buffer, bytes);
        EXPECT(got == std::vector<unsigned char>(bytes), "a new buffer is not zero");
    }
    for (size_t i = 0; i < buffers.size(); i++) { // without a wait for the device between them
        for (unsigned char &x : sent) x = (unsigned char)test_random_bits(&test_random);
        sent[0] = (unsigned char)i;
        buffer_upload(buffers[i], sent.data(), bytes);
        std::fill(sent.begin() + 1, sent.end(), (unsigned char)0); // the buffer can be reused at once
    }
    for (size_t i = 0; i < buffers.size(); i++) {
        buffer_download(got.data(), buffers[i], bytes);
        size_t zeros = (size_t)std::count(got.begin() + 1, got.end(), 0);
        EXPECT(got[0] == (unsigned char)i && (bytes < 100 || zeros < bytes / 50),
               "buffer %zu does not have the uploaded bytes: %d, %zu zeros", i, got[0], zeros);
        buffer_zero(buffers[i], bytes - 1);
        buffer_download(got.data() + 1, buffers[i], bytes - 1);
        EXPECT(std::count(got.begin() + 1, got.end(), 0) == (ptrdiff_t)(bytes - 1),
               "buffer_zero did not clear all bytes");
        buffer_free(buffers[i]);
    }
    ops_wait();
}
static const Check buffers_check = {"buffers", check_buffers, "bytes times"};

// n: count, first element (1: unaligned packs)
static void check_sum_of_squares(const Case *c) {
    size_t count = (size_t)c->n[0], first = (size_t)c->n[1];
    for (int special = 0; special < 3; special++) {
        Operands o(c->shift);
        Operand &sum = o.out_fp64("sum", 1), &x = o.in_fp32("x", count + 1);
        x.set(count, 1e30);                       // after the end
        if (special == 1) x.set(count / 2, 3e38); // its square is infinite in fp32
        if (special == 2) x.set(count - 1, NAN);
        o.run(0, [&] { sum_of_squares(sum.d(), x.f() + first, count - first); });
        twin::sum_of_squares(sum.t(), x.t() + first, count - first);
        o.expect(sum, {0x1p-29 * error_of_sum((double)count), 0}); // in double
    }
}
static const Check sum_of_squares_check = {"sum_of_squares", check_sum_of_squares, "count first"};
