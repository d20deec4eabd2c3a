/*
test_diffv2.c: the tests of the CPU build, in one program.

  build/test_diffv2            all of them; the last line is `N passed, N failed`
  build/test_diffv2 WORDS      those whose sentence or subject contains WORDS
  build/test_diffv2 -WORDS...  all but those of these subjects and those whose sentence contains one of the WORDS

The trainer is included whole, so tests call its functions; those that need a process of their own
start $TRAIN_DIFFV2 (default ./train_diffv2), $TEXT_TO_SHARDS or this program with --child. Run it in
the root of the repository. Compiled with -DREAL=double it tests the mathematics alone, and differentiates the whole
model: what the program does with files and processes is tested with the build that people run.
*/
#define main train_diffv2_main
#include "train_diffv2.c"
#undef main
#include "tests/harness.h"
#include "tests/operations.h"
#include "tests/model.h"
#include "tests/options.h"
#include "tests/data.h"
#include "tests/checkpoint.h"
#include "tests/program.h"
#include "tests/faults.h"
#include "tests/stats.h"
#include "tests/corpora.h"
#include "tests/tokenizer.h"
#include "tests/spikes.h"
#include "tests/recompute.h"
#include "tests/ranks.h"
#include "tests/strangers.h"
#include "tests/evaluation.h"
#include "tests/device.h"

static const struct {
    const char *subject;
    const Test *tests;
    int count;
    enum { EVERY_BUILD, FP32_BUILD, FP64_BUILD } build;
} test_tables[] = {
    {"operations", operations_tests, OPERATIONS_TEST_COUNT, EVERY_BUILD},
    {"model", model_tests, MODEL_TEST_COUNT, EVERY_BUILD},
    {"model in fp64", model_fp64_tests, MODEL_FP64_TEST_COUNT, FP64_BUILD},
    {"recompute", recompute_tests, RECOMPUTE_TEST_COUNT, EVERY_BUILD},
    {"recompute", recompute_program_tests, RECOMPUTE_PROGRAM_TEST_COUNT, FP32_BUILD},
    {"options", options_tests, OPTIONS_TEST_COUNT, FP32_BUILD},
    {"data", data_tests, DATA_TEST_COUNT, FP32_BUILD},
    {"corpora", corpora_tests, CORPORA_TEST_COUNT, FP32_BUILD},
    {"tokenizer", tokenizer_tests, TOKENIZER_TEST_COUNT, FP32_BUILD},
    {"documents", documents_tests, DOCUMENTS_TEST_COUNT, EVERY_BUILD},
    {"checkpoint", checkpoint_tests, CHECKPOINT_TEST_COUNT, FP32_BUILD},
    {"program", program_tests, PROGRAM_TEST_COUNT, FP32_BUILD},
    {"faults", faults_tests, FAULTS_TEST_COUNT, FP32_BUILD},
    {"statistics", stats_tests, STATS_TEST_COUNT, EVERY_BUILD},
    {"spikes", spikes_tests, SPIKES_TEST_COUNT, FP32_BUILD},
    {"sharding", ranks_tests, RANKS_TEST_COUNT, EVERY_BUILD},
    {"ranks", ranks_program_tests, RANKS_PROGRAM_TEST_COUNT, FP32_BUILD},
    {"strangers", strangers_tests, STRANGERS_TEST_COUNT, FP32_BUILD},
    {"devices", device_tests, DEVICE_TEST_COUNT, FP32_BUILD},
    {"evaluation", evaluation_tests, EVALUATION_TEST_COUNT, EVERY_BUILD},
    {"evaluation program", evaluation_program_tests, EVALUATION_PROGRAM_TEST_COUNT, FP32_BUILD},
};

static bool chosen(int argc, char **argv, const char *subject, const char *sentence) {
    if (argc == 1) return true;
    if (argv[1][0] != '-') return strstr(sentence, argv[1]) || strstr(subject, argv[1]);
    for (int i = 1; i < argc; i++)
        if (strcmp(subject, argv[i] + 1) == 0 || strstr(sentence, argv[i] + 1)) return false;
    return true;
}

int main(int argc, char **argv) {
    matmul_prepare(argv);
    int child = data_test_child(argc, argv);
    if (child >= 0) return child;
    if (checkpoint_test_child(argc, argv)) return EXIT_DONE;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int passed = 0, failed = 0;
    for (size_t i = 0; i < sizeof(test_tables) / sizeof(test_tables[0]); i++) {
        bool fp64 = sizeof(real) == sizeof(double);
        if (test_tables[i].build == (fp64 ? FP32_BUILD : FP64_BUILD)) continue;
        for (int t = 0; t < test_tables[i].count; t++) {
            const Test *test = &test_tables[i].tests[t];
            if (!chosen(argc, argv, test_tables[i].subject, test->sentence)) continue;
            double start = now_seconds();
            test_failures = 0;
            test->run();
            printf("%s %s: %s (%.2f s)\n", test_failures ? "FAIL" : "ok  ", test_tables[i].subject, test->sentence,
                   now_seconds() - start);
            if (test_failures) failed++;
            else passed++;
        }
    }
    CHECK(passed + failed > 0, "no test's sentence contains '%s'", argc > 1 ? argv[1] : "");
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? EXIT_FAILED : EXIT_DONE;
}
