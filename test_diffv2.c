/*
test_diffv2.c: the tests of the CPU build, in one program.

  build/test_diffv2            all tests; the last line is `N passed, N failed`, and `, N skipped` if any were skipped
  build/test_diffv2 WORDS...   those whose sentence or subject contains one of the WORDS
  build/test_diffv2 -WORDS...  all except those of these subjects, or whose sentence contains one of the WORDS
  build/test_diffv2 --trainer ARGUMENTS   the trainer itself, with pieces of work as small as in the tests

This file includes the trainer, so that tests can call its functions. Tests that need another process start
$TRAIN_DIFFV2 (default ./train_diffv2), $TEXT_TO_SHARDS or this program with --child. Run it in the root of the
repository. Compiled with -DREAL=double it tests the mathematics alone, with finite differences of the whole model, and
starts no other program; the default build tests files and processes.
*/
#include "tests/small_sizes.h"
#define PLANNED_FAULTS
#define main train_diffv2_main
#include "train_diffv2.c"
#undef main
#include "tests/planned_faults.h"
#include "tests/harness.h"
#include "tests/operations.h"
#include "tests/model.h"
#include "tests/upcycle.h"
#include "tests/windows.h"
#include "tests/sparse.h"
#include "tests/options.h"
#include "tests/data.h"
#include "tests/safetensors.h"
#include "tests/config_json.h"
#include "tests/checkpoint.h"
#include "tests/run_files.h"
#include "tests/program.h"
#include "tests/generation.h"
#include "tests/host.h"
#include "tests/stats.h"
#include "tests/qk_clip.h"
#include "tests/corpora.h"
#include "tests/tokenizer.h"
#include "tests/spikes.h"
#include "tests/recompute.h"
#include "tests/expert_runs.h"
#include "tests/experts.h"
#include "tests/low_precision.h"
#include "tests/sharding.h"
#include "tests/progress.h"
#include "tests/watchdog.h"
#include "tests/evaluation.h"
#include "tests/choices.h"
#include "tests/device.h"
#include "tests/prediction.h"
#include "tests/isolated_cases.h"

static const struct {
    const char *subject;
    const Test *tests;
    int count;
    enum { EVERY_BUILD, FP32_BUILD, FP64_BUILD } build;
} test_tables[] = {
    {"operations", operations_tests, OPERATIONS_TEST_COUNT, EVERY_BUILD},
    {"model", model_tests, MODEL_TEST_COUNT, EVERY_BUILD},
    {"upcycling", upcycle_tests, UPCYCLE_TEST_COUNT, EVERY_BUILD},
    {"windows", windows_tests, WINDOWS_TEST_COUNT, EVERY_BUILD},
    {"sparse", sparse_tests, SPARSE_TEST_COUNT, EVERY_BUILD},
    {"sparse in fp64", sparse_fp64_tests, SPARSE_FP64_TEST_COUNT, FP64_BUILD},
    {"model in fp64", model_fp64_tests, MODEL_FP64_TEST_COUNT, FP64_BUILD},
    {"recompute", recompute_tests, RECOMPUTE_TEST_COUNT, EVERY_BUILD},
    {"experts", expert_tests, EXPERT_TEST_COUNT, EVERY_BUILD},
    {"experts", expert_runs_tests, EXPERT_RUNS_TEST_COUNT, FP32_BUILD},
    {"experts in fp64", expert_fp64_tests, EXPERT_FP64_TEST_COUNT, FP64_BUILD},
    {"low precision", low_precision_tests, LOW_PRECISION_TEST_COUNT, FP32_BUILD},
    {"options", options_tests, OPTIONS_TEST_COUNT, FP32_BUILD},
    {"data", data_tests, DATA_TEST_COUNT, FP32_BUILD},
    {"corpora", corpora_tests, CORPORA_TEST_COUNT, FP32_BUILD},
    {"tokenizer", tokenizer_tests, TOKENIZER_TEST_COUNT, FP32_BUILD},
    {"documents", documents_tests, DOCUMENTS_TEST_COUNT, EVERY_BUILD},
    {"checkpoint", safetensors_tests, SAFETENSORS_TEST_COUNT, FP32_BUILD},
    {"checkpoint", config_json_tests, CONFIG_JSON_TEST_COUNT, FP32_BUILD},
    {"checkpoint", checkpoint_tests, CHECKPOINT_TEST_COUNT, FP32_BUILD},
    {"checkpoint", run_files_tests, RUN_FILES_TEST_COUNT, FP32_BUILD},
    {"program", program_tests, PROGRAM_TEST_COUNT, FP32_BUILD},
    {"generation", generation_tests, GENERATION_TEST_COUNT, EVERY_BUILD},
    {"host", host_tests, HOST_TEST_COUNT, EVERY_BUILD},
    {"host", host_program_tests, HOST_PROGRAM_TEST_COUNT, FP32_BUILD},
    {"progress", progress_tests, PROGRESS_TEST_COUNT, FP32_BUILD},
    {"statistics", stats_tests, STATS_TEST_COUNT, EVERY_BUILD},
    {"QK-clip", qk_clip_tests, QK_CLIP_TEST_COUNT, EVERY_BUILD},
    {"statistics", stats_program_tests, STATS_PROGRAM_TEST_COUNT, FP32_BUILD},
    {"spikes", spikes_tests, SPIKES_TEST_COUNT, FP32_BUILD},
    {"sharding", sharding_tests, SHARDING_TEST_COUNT, EVERY_BUILD},
    {"watchdog", watchdog_tests, WATCHDOG_TEST_COUNT, FP32_BUILD},
    {"devices", device_tests, DEVICE_TEST_COUNT, FP32_BUILD},
    {"prediction", prediction_tests, PREDICTION_TEST_COUNT, FP32_BUILD},
    {"devices", isolated_tests, ISOLATED_TEST_COUNT, FP32_BUILD},
    {"evaluation", evaluation_tests, EVALUATION_TEST_COUNT, EVERY_BUILD},
    {"choices", choices_tests, CHOICES_TEST_COUNT, EVERY_BUILD},
};

static bool is_of_this_build(int table) {
    return test_tables[table].build != (sizeof(real) == sizeof(double) ? FP32_BUILD : FP64_BUILD);
}

// Ends the program if a word matches no test of this build.
static void check_words(int count, char **words) {
    for (int w = 0; w < count; w++) {
        bool fits = false;
        for (size_t i = 0; i < sizeof(test_tables) / sizeof(test_tables[0]); i++)
            for (int t = 0; t < test_tables[i].count && is_of_this_build((int)i); t++)
                fits = fits || test_word_fits(words[w], test_tables[i].subject, test_tables[i].tests[t].sentence);
        CHECK(fits, "no test's subject or sentence contains '%s'", words[w] + test_word_excludes(words[w]));
    }
}

int main(int argc, char **argv) {
    environment_reexecute(argv);
    if (argc > 1 && strcmp(argv[1], "--trainer") == 0) return train_diffv2_main(argc - 1, argv + 1);
    if (checkpoint_test_child(argc, argv)) return EXIT_DONE;
    setvbuf(stdout, NULL, _IOLBF, 0);
    check_words(argc - 1, argv + 1);
    TestCounts counts = {0, 0, 0};
    for (size_t i = 0; i < sizeof(test_tables) / sizeof(test_tables[0]); i++)
        for (int t = 0; t < test_tables[i].count && is_of_this_build((int)i); t++) {
            const Test *test = &test_tables[i].tests[t];
            if (test_chosen(argc - 1, argv + 1, test_tables[i].subject, test->sentence))
                test_run(&counts, test_tables[i].subject, test);
        }
    return test_end(&counts);
}
