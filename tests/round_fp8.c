/*
round_fp8.c: the rounding and the scales of FP8 as a filter, for tests/fp8_test.py.

  round_fp8 e4m3|e5m2 MULTIPLIER < X > ROUNDED   fp32 numbers x; ROUNDED of each: fp8_round(x * MULTIPLIER), and that
                                                 of the matrix functions, stored as fp32 and stored as bf16
  round_fp8 e4m3|e5m2 scales < MAX > SCALES      fp32 maxima; SCALES of each: its multiplier and its scale
*/
#include "../llmc/experts/all_operations.h"

int main(int argc, char **argv) {
    if (argc != 3 || (strcmp(argv[1], "e4m3") != 0 && strcmp(argv[1], "e5m2") != 0)) {
        warn("usage: round_fp8 e4m3|e5m2 MULTIPLIER|scales");
        return EXIT_USAGE;
    }
    const Fp8Format format = strcmp(argv[1], "e4m3") == 0 ? FP8_E4M3 : FP8_E5M2;
    const bool scales = strcmp(argv[2], "scales") == 0;
    const float multiplier = scales ? 1 : strtof(argv[2], NULL);
    omp_set_num_threads(1);
    enum { BLOCK = 4096 };
    float in[BLOCK], wide[BLOCK], out[3 * BLOCK];
    bf16_t narrow[BLOCK];
    for (size_t count; (count = fread(in, sizeof(float), BLOCK, stdin)) > 0;) {
        size_t columns = scales ? 2 : 3;
        fp8_round_matrix_wide(wide, (int)count, in, (int)count, 1, (int)count, multiplier, format);
        fp8_round_matrix(narrow, (int)count, in, (int)count, 1, (int)count, multiplier, format);
        for (size_t i = 0; i < count; i++) {
            absmax_t max = 0;
            absmax_update(activation(&in[i], &max), 1, 1, 1);
            uint32_t bits = (uint32_t)narrow[i] << 16;
            out[columns * i] = scales ? fp8_multiplier(max, format) : fp8_round(in[i] * multiplier, format);
            out[columns * i + 1] = scales ? fp8_scale(max, format) : wide[i];
            if (!scales) memcpy(&out[columns * i + 2], &bits, sizeof(bits));
        }
        CHECK(fwrite(out, columns * sizeof(float), count, stdout) == count, "cannot write to stdout: %s",
              strerror(errno));
    }
    return fflush(stdout) == 0 ? EXIT_DONE : EXIT_FAILED;
}
