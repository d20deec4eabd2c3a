/*
test_diffv2.cu: every CUDA operation against its C twin, on a GPU or (built with CUDA_ON_CPU) on the CPU.

  test_diffv2cu [--seed N] [--shard I/N] [--one-process] [WORDS]
      all cases, or those whose line contains WORDS; it ends with `N passed, N failed`.
  test_diffv2 --tier N [...]
      in dev/emulator, with N = 1 each case in one order of threads and copies, in turn by its number; with N = 2
      also in another one, which must give the same bits; without in all of them. On a GPU it has no effect.

Each case prints one line that begins with `ok `, `FAIL ` or `skip `, with its dimensions and the reason for them. On a
GPU the inputs differ in every run; --seed repeats them. --shard I/N keeps every Nth case from number I (0 to N - 1) on:
N programs at once run all cases, with the inputs that they have in one program. A case that ends its process, for
example by a failing CHECK, or takes too long, is one failure (isolation.h). --one-process runs all cases in one
process, for debuggers and compute-sanitizer; such a case then ends the run. tests/cuda_engine.h lists what a case
checks besides the numbers.
*/
// Small, so that a case of few elements takes several rounds, the last of them partial. test_trainer.cu includes this
// file and defines CASE_SIZE: its trainer has the usual sizes.
#ifndef CASE_SIZE
#define CASE_SIZE(small, usual) (small)
#endif
#define RMSNORM_BLOCKS CASE_SIZE(64, 512)
#define HEAD_NORM_BLOCKS CASE_SIZE(16, 1024)
#define SQUARES_PARTS CASE_SIZE(64, 512)
#define SQUARES_LEAST CASE_SIZE(2048, 8192)
#define LINEAR_PIECE_BYTES CASE_SIZE(20000, 16 << 20)
#define EXPERT_GROUP_WARPS CASE_SIZE(8, 256)
#define STATS_LEAST CASE_SIZE(32, 8192)
#include "tests/cuda_attention.h"
#include "tests/cuda_collectives.h"
#include "tests/cuda_linear.h"
#include "tests/isolation.h"
#include "llmc/options/environment.h"

#ifdef USE_NCCL
static void check_collectives(const Case *c) { collectives_of_one_rank((size_t)c->n[0]); }
static const Check collectives_check = {"collectives of one rank", check_collectives, "elements"};
#endif

// Checks of CUDA alone; the cases of tests/operations follow.
static const Case cuda_cases[] = {
    {&embedding_order_check, {1500, 46, 24}, 0, "fp32 sums in the order of the rows, more and fewer than a warp"},
    {&embedding_order_check, {700, 3, 40}, 0, "rows of several warps, two blocks of columns"},
    {&gemm_batch_check, {24, 16, 40, 3}, 0, "three products in one call"},
    {&gemm_batch_check, {9, 7, 33, 4}, 1, "four, unaligned"},
#ifdef CUDA_ON_CPU
    {&gemm_split_check, {256, 4}, 0, "the sum over K may be divided"},
    {&gemm_split_check, {200, 1}, 0, "a remainder of K would be left out"},
    {&gemm_split_check, {40, 1}, 0, "the same, all of it"},
#endif
    {&fp8_quantize_check, {64, 96, 0}, 0, "multiples of 16, packs, part of a tile"},
    {&fp8_quantize_check, {16, 32, 8}, 1, "unaligned packs, columns that are not read"},
    {&fp8_quantize_check, {129, 264, 24}, 0, "one past a tile, three tiles across"},
    {&fp8_quantize_check, {37, 131, 2}, 0, "nothing aligned"},
    {&fp8_quantize_check, {1, 16, 0}, 0, "one row"},
    {&fp8_quantize_check, {1, 1, 0}, 0, "the smallest"},
    {&fp8_quantize_check, {300, 8, 0}, 0, "a narrow matrix of three tiles"},
    {&gemm_plain_check, {72, 136, 40, 0}, 0, "packs, parts of tiles"},
    {&gemm_plain_check, {65, 67, 33, 3}, 0, "one past a tile, odd strides"},
    {&gemm_plain_check, {1, 8, 64, 8}, 1, "one row, unaligned packs"},
    {&gemm_plain_check, {1, 1, 1, 0}, 0, "the smallest"},
    {&buffers_check, {1000, 20}, 0, "more small uploads than pinned slots"},
    {&buffers_check, {3000001, 2}, 0, "larger than a slot"},
    {&buffers_check, {2, 3}, 0, "tiny"},
#ifdef USE_NCCL
    {&collectives_check, {70003}, 0, "NCCL, its stream and its thread; no multiple of a pack"},
#endif
    {&cudnn_check, {2, 64, 4, 2, 64, 64, 1, 1}, 0, "whole tiles, groups"},
    {&cudnn_check, {1, 131, 2, 2, 128, 128, 1, 1}, 0, "no groups, D = 128, three tiles"},
    {&cudnn_check, {6, 70, 6, 2, 64, 64, 1, 1, 4, 3}, 0, "two sequences at a time, T is a tile and a part"},
    {&cudnn_check, {3, 65, 2, 2, 64, 64, 1, 1, 2, 1}, 0, "room for one sequence, whose lse is unaligned: all at once"},
    {&cudnn_check, {3, 64, 2, 1, 64, 64, 1, 1, 2, 3}, 0, "room for two of three sequences: one at a time"},
    {&cudnn_check, {2, 100, 4, 1, 64, 128, 2, 1}, 0, "diff_v1: values of width 2D, the second key set"},
    {&cudnn_check, {2, 100, 4, 2, 64, 128, 2, 2}, 0, "the same in two parts"},
    {&cudnn_check, {3, 65, 4, 2, 128, 256, 1, 2, 2, 3}, 0, "values of width 2D in two parts, one sequence at a time"},
    {&cudnn_check, {2, 68, 12, 6, 64, 64, 1, 1, 4, 4}, 0, "three groups of six at a time, with room for four"},
    {&cudnn_check, {2, 68, 8, 2, 64, 128, 2, 2, 1, 4}, 0, "one group at a time, values in two parts, second key set"},
    {&cudnn_check, {1, 65, 6, 6, 64, 64, 1, 1, 1, 1}, 0, "groups whose lse is unaligned: all at once"},
    {&cudnn_check, {1, 65, 2, 1, 128, 256, 1}, 0, "D = 128, values of width 2D, if cuDNN supports it"},
    {&cudnn_check, {2, 33, 6, 2, 32, 64, 1}, 0, "diff_scalar: keys of width 32"},
    {&cudnn_check, {2, 65, 4, 2, 16, 16, 1}, 0, "narrow heads"},
    {&cudnn_check, {1, 131, 2, 1, 8, 16, 2}, 0, "the narrowest"},
    {&cudnn_check, {2, 17, 4, 1, 72, 72, 1}, 0, "no power of two"},
    {&cudnn_check, {3, 33, 3, 3, 12, 12, 1}, 0, "a width that cuDNN does not support"},
    {&cudnn_check, {2, 64, 4, 2, 64, 64, 1, 1, 0, 0, 20}, 0, "a window of 20 keys"},
    {&cudnn_check, {1, 131, 2, 2, 128, 128, 1, 1, 0, 0, 1}, 0, "a window of one key"},
    {&cudnn_check, {2, 65, 4, 2, 16, 16, 1, 1, 0, 0, 64}, 0, "a window that only the last row notices"},
    {&cudnn_check, {2, 17, 4, 1, 72, 72, 1, 1, 0, 0, 17}, 0, "a window of T keys: none"},
    {&cudnn_check, {6, 70, 6, 2, 64, 64, 1, 1, 4, 3, 33}, 0, "two sequences at a time, with a window"},
    {&cudnn_check, {2, 68, 8, 2, 64, 128, 2, 2, 1, 4, 40}, 0, "one group at a time, in two parts, with a window"},
    {&cudnn_check, {2, 64, 4, 2, 64, 64, 1, 0, 0, 0, 0, 1}, 0, "documents"},
    {&cudnn_check, {3, 70, 6, 2, 64, 64, 1, 0, 0, 0, 9, 1}, 0, "documents, with a window"},
    {&cudnn_check, {3, 70, 6, 2, 64, 64, 1, 0, 4, 2, 0, 1}, 0, "two documents at a time"},
    {&cudnn_check, {2, 100, 4, 2, 64, 128, 2, 2, 0, 0, 0, 1}, 0, "documents, diff_v1 in two parts, second key set"},
    {&cudnn_check,
     {2, 68, 8, 2, 64, 128, 2, 2, 1, 6, 7, 1},
     0,
     "the same, one group of one document at a time, window"},
    {&cudnn_check, {2, 17, 4, 1, 72, 72, 1, 0, 0, 0, 0, 1}, 0, "short documents"},
    {&cudnn_check, {1, 4096, 2, 2, 8, 8, 1, 1, 1, 2, 9}, 0, "4K positions, one group at a time, a window"},
#ifdef CUDA_ON_CPU
    {&attention_answers_check, {16, 3}, 0, "plans of a forward and of two backwards"},
    {&attention_answers_check, {272, 0}, 0, "heads that are too wide"},
    {&attention_choice_check, {64, 1, 0, 0, 0, 1, 1, 1}, 0, "a pair, the built-in kernel is faster"},
    {&attention_choice_check, {180, 1, 0, 0, 0, 1, 1, 1}, 0, "the nearest length that was measured"},
    {&attention_choice_check, {182, 1, 0, 0, 0, 1, 0, 0}, 0, "cuDNN is faster"},
    {&attention_choice_check, {64, 0, 0, 0, 0, 1, 0, 1}, 0, "attention, the faster kernel in each direction"},
    {&attention_choice_check, {64, 1, 0, 0, 2, 1, 0, 0}, 0, "--attention-kernel cudnn"},
    {&attention_choice_check, {512, 1, 0, 0, 1, 1, 1, 1}, 0, "--attention-kernel own"},
    {&attention_choice_check, {64, 2, 0, 0, 0, 0, 0, 0}, 0, "a device that was not measured"},
    {&attention_choice_check, {64, 1, 16, 0, 0, 1, 0, 0}, 0, "a window, which is not measured"},
    {&attention_choice_check, {64, 1, 0, 1, 0, 1, 0, 0}, 0, "documents, which are not measured"},
    {&attention_split_check, {2, 16384, 32, 8, 128, 40000, 2, 8, 0}, 0, "16K positions, all at once"},
    {&attention_split_check, {2, 16384, 32, 8, 128, 17000, 1, 8, 0}, 0, "one sequence at a time"},
    {&attention_split_check, {2, 16384, 32, 8, 128, 10000, 1, 4, 0}, 0, "half of one sequence"},
    {&attention_split_check, {2, 16384, 32, 8, 128, 2100, 1, 1, 0}, 0, "one group"},
    {&attention_split_check, {2, 16384, 32, 8, 128, 2000, 1, 1, 1}, 0, "one group does not fit"},
    {&attention_split_check, {1, 32768, 32, 8, 128, 9000, 1, 1, 0}, 0, "32K positions, one group"},
    {&attention_split_check, {1, 32768, 32, 8, 128, 1024, 1, 1, 1}, 0, "32K positions, one group does not fit"},
#endif
    {&attention_nan_check, {150, 2, 2, 64, 0, 0}, 0, "attention"},
    {&attention_nan_check, {150, 4, 2, 64, 0, 1}, 0, "pairs of heads"},
    {&attention_nan_check, {200, 4, 2, 128, 40, 1}, 0, "pairs of heads, a window"},
    {&attention_nan_check, {100, 2, 1, 12, 30, 0}, 0, "no packs, a window"},
    {&attention_rotated_check, {150, 4, 2, 64, 0, 1, 1}, 0, "attention"},
    {&attention_rotated_check, {70, 4, 2, 64, 0, 2, 1}, 0, "the first of two key sets"},
    {&attention_rotated_check, {150, 4, 2, 64, 1, 1, 1}, 0, "pairs of heads"},
    {&attention_rotated_check, {70, 2, 1, 128, 0, 1, 1}, 0, "wider heads"},
    {&attention_rotated_check, {130, 4, 1, 128, 1, 1, 0}, 0, "pairs of wider heads, keys that are not rotated"},
    {&attention_rotated_check, {40, 4, 2, 96, 1, 1, 1}, 0, "by two kernels"},
    {&attention_sparse_check,
     {2, 70, 4, 2, 16, 16, 2, 4, 0, 0},
     0,
     "documents, blocks of fewer keys than groups of lanes"},
    {&attention_sparse_check, {1, 200, 8, 2, 64, 64, 3, 16, 0}, 0, "four heads share a list"},
    {&attention_sparse_check, {2, 150, 12, 1, 64, 128, 1, 32, 40}, 0, "a window, wide values"},
    {&attention_sparse_check, {1, 101, 8, 1, 128, 128, 2, 16, 0}, 0, "wide keys"},
    {&attention_sparse_check, {1, 90, 4, 1, 72, 40, 2, 10, 0}, 0, "no power of two"},
    {&attention_sparse_check, {1, 40, 2, 1, 12, 12, 1, 5, 0}, 0, "no packs"},
    {&attention_sparse_check, {1, 33, 2, 1, 256, 512, 1, 8, 0}, 0, "the widest heads: several packs a lane"},
    {&attention_sparse_check, {1, 19, 2, 1, 256, 512, 1, 8, 0}, 1, "the widest heads without packs"},
    {&attention_sparse_check, {1, 300, 2, 1, 8, 8, 3, 2, 0}, 0, "more blocks than threads"},
    {&sum_of_squares_check, {150011, 0}, 0, "all blocks, two rounds and a remainder each"},
    {&sum_of_squares_check, {100001, 1}, 0, "unaligned packs, 49 blocks"},
    {&sum_of_squares_check, {3, 0}, 0, "less than a pack"},
    {&means_check, {70, 3, 64, 16}, 0, "ordinary"},
    {&means_check, {1, 1, 1, 10}, 1, "one row"},
    {&means_check, {1003, 5, 5, 256}, 0, "several rows per warp"},
    {&means_check, {3301, 5, 6, 8}, 0, "more rows than threads"},
    {&update_squares_check, {20003}, 0, "packs and a remainder of 3"},
    {&update_squares_check, {5}, 1, "no packs"},
    {&attention_order_check, {7, 6, 3, 2048, 128}, 0, "sections of 11 and 10 heads (on a CPU of 1; in fp32 of 7)"},
    {&attention_order_check, {5, 6, 3, 40, 16}, 0, "one section (on a CPU of 3; in fp32 of 1)"},
    {&attention_order_check, {3, 6, 3, 50000, 64}, 0, "one head in a section"},
    {&attention_stats_check, {2, 40, 4, 0, 0, 1, 0}, 0, "one map"},
    {&attention_stats_check, {2, 40, 4, 1, 1, 1, 0}, 0, "neighbouring pairs"},
    {&attention_stats_check, {1, 300, 2, 1, 1, 1, 0}, 0, "more keys than threads"},
    {&attention_stats_check, {1, 200, 2, 2, 2, 1, 1}, 0, "pairs (h, h + NH), documents, more keys than threads"},
    {&attention_stats_check, {2, 40, 8, 4, 1, 1, 0}, 0, "four signal heads share a noise head"},
    {&attention_stats_check, {1, 30, 8, 4, 2, 1, 1}, 0, "blocks of four signal heads and two noise heads"},
    {&attention_stats_check, {3, 17, 4, 1, 1, 2, 1}, 1, "two key sets"},
    {&attention_stats_check, {2, 200, 4, 1, 1, 1, 0, 9}, 0, "a window"},
    {&attention_stats_check, {1, 300, 2, 2, 2, 1, 1, 20}, 0, "a window and documents"},
    {&attention_stats_check, {2, 40, 2, 1, 1, 1, 0, 1}, 0, "window 1: no statistics"},
    {&attention_stats_check, {2, 1, 2, 1, 1, 1, 0}, 0, "T = 1: no statistics"},
};

static void case_line(char *line, size_t size, const Case *c) {
    size_t used = (size_t)snprintf(line, size, "%s ", c->check->operation);
    const char *name = c->check->dims;
    for (int i = 0; *name; i++) {
        int length = (int)strcspn(name, " ");
        used += (size_t)snprintf(line + used, size - used, " %.*s=%d", length, name, c->n[i]);
        name += length + (name[length] == ' ');
    }
    if (c->shift) used += (size_t)snprintf(line + used, size - used, " shift=%d", c->shift);
    snprintf(line + used, size - used, "  (%s)", c->why);
}

// The selected cases, and their places in the table, from which the seeds of their inputs derive.
static struct {
    std::vector<const Case *> cases;
    std::vector<size_t> places;
    uint64_t seed;
} chosen;

static void describe_case(int i, char *line, size_t size) { case_line(line, size, chosen.cases[(size_t)i]); }
static void run_case(int i, TestCounts *counts) {
    const Case *c = chosen.cases[(size_t)i];
    char line[512];
    case_line(line, sizeof(line), c);
    double begin = test_begin();
    test_random.state = chosen.seed + chosen.places[(size_t)i];
    first_way = test_tier ? (int)(chosen.places[(size_t)i] % WAYS) : 0;
    way_count = test_tier ? test_tier : WAYS;
    c->check->run(c);
    test_finish(counts, line, begin);
}

static std::vector<Case> all_cases(void) {
    std::vector<Case> table(std::begin(cuda_cases), std::end(cuda_cases));
    operation_cases(table);
    return table;
}

static void choose_cases(const std::vector<Case> &table, int count, char **words) {
    std::vector<bool> fits((size_t)count);
    for (size_t i = 0; i < table.size(); i++) {
        char line[512];
        case_line(line, sizeof(line), &table[i]);
        for (size_t w = 0; w < fits.size(); w++) fits[w] = fits[w] || test_word_fits(words[w], "", line);
        if (test_chosen(count, words, "", line)) chosen.cases.push_back(&table[i]), chosen.places.push_back(i);
    }
    for (size_t w = 0; w < fits.size(); w++) CHECK(fits[w], "no case's line contains '%s'", words[w]);
}

// Keeps the cases of a shard. They keep their inputs.
static void keep_shard(const char *shard) {
    unsigned at = 0, count = 0;
    int read = 0;
    CHECK(sscanf(shard, "%u/%u%n", &at, &count, &read) == 2 && !shard[read] && at < count,
          "--shard '%s': expected I/N with I less than N", shard);
    CHECK(at < chosen.cases.size(), "--shard '%s': only %zu cases are chosen", shard, chosen.cases.size());
    size_t kept = 0;
    for (size_t i = at; i < chosen.cases.size(); i += count, kept++)
        chosen.cases[kept] = chosen.cases[i], chosen.places[kept] = chosen.places[i];
    chosen.cases.resize(kept), chosen.places.resize(kept);
}

int main(int argc, char **argv) {
    environment_reexecute(argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
#ifdef CUDA_ON_CPU
    chosen.seed = 1;
#else
    chosen.seed = (uint64_t)time(NULL);
#endif
    test_read_tier(&argc, &argv);
    bool one_process = false;
    const char *shard = "0/1";
    for (; argc > 1 && strncmp(argv[1], "--", 2) == 0; argc--, argv++) {
        if (strcmp(argv[1], "--one-process") == 0) one_process = true;
        else if (strcmp(argv[1], "--seed") == 0 && argc > 2) chosen.seed = strtoull(argv[2], NULL, 10), argc--, argv++;
        else if (strcmp(argv[1], "--shard") == 0 && argc > 2) shard = argv[2], argc--, argv++;
        else break;
    }
    std::vector<Case> table = all_cases();
    choose_cases(table, argc - 1, argv + 1);
    keep_shard(shard);
    printf("storage %s, --seed %" PRIu64 "\n", sizeof(floatX) == 2 ? "bf16" : "fp32", chosen.seed);
    TestCounts counts = {0, 0, 0};
    const IsolatedCases isolated = {(int)chosen.cases.size(), CASE_SECONDS, device_start, run_case, describe_case};
    if (one_process) {
        device_start();
        for (int i = 0; i < isolated.count; i++) run_case(i, &counts);
    } else counts = run_isolated(&isolated);
    return test_end(&counts);
}
