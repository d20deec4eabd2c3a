/*
test_diffv2.c: the tests of the CPU build, in one program.

  build/test_diffv2            all tests; the last line is `N passed, N failed`, and `, N skipped` if any were skipped
  build/test_diffv2 WORDS...   those whose sentence or subject contains one of the WORDS
  build/test_diffv2 -WORDS...  all except those of these subjects, or whose sentence contains one of the WORDS
  build/test_diffv2 --tier N [WORDS...]   of these, the tests of tier 1 or 2 of scripts/test.sh
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

#define TESTS(list) list, sizeof(list) / sizeof(list[0])
static const struct {
    const char *subject;
    const Test *tests;
    int count;
    enum { EVERY_BUILD, FP32_BUILD, FP64_BUILD } build;
} test_tables[] = {
    {"operations", TESTS(operations_tests), EVERY_BUILD},
    {"model", TESTS(model_tests), EVERY_BUILD},
    {"upcycling", TESTS(upcycle_tests), EVERY_BUILD},
    {"windows", TESTS(windows_tests), EVERY_BUILD},
    {"sparse", TESTS(sparse_tests), EVERY_BUILD},
    {"sparse in fp64", TESTS(sparse_fp64_tests), FP64_BUILD},
    {"model in fp64", TESTS(model_fp64_tests), FP64_BUILD},
    {"recompute", TESTS(recompute_tests), EVERY_BUILD},
    {"experts", TESTS(expert_tests), EVERY_BUILD},
    {"experts", TESTS(expert_runs_tests), FP32_BUILD},
    {"experts in fp64", TESTS(expert_fp64_tests), FP64_BUILD},
    {"low precision", TESTS(low_precision_tests), FP32_BUILD},
    {"options", TESTS(options_tests), FP32_BUILD},
    {"data", TESTS(data_tests), FP32_BUILD},
    {"corpora", TESTS(corpora_tests), FP32_BUILD},
    {"tokenizer", TESTS(tokenizer_tests), FP32_BUILD},
    {"documents", TESTS(documents_tests), EVERY_BUILD},
    {"checkpoint", TESTS(safetensors_tests), FP32_BUILD},
    {"checkpoint", TESTS(config_json_tests), FP32_BUILD},
    {"checkpoint", TESTS(checkpoint_tests), FP32_BUILD},
    {"checkpoint", TESTS(run_files_tests), FP32_BUILD},
    {"program", TESTS(program_tests), FP32_BUILD},
    {"generation", TESTS(generation_tests), EVERY_BUILD},
    {"host", TESTS(host_tests), EVERY_BUILD},
    {"host", TESTS(host_program_tests), FP32_BUILD},
    {"progress", TESTS(progress_tests), FP32_BUILD},
    {"statistics", TESTS(stats_tests), EVERY_BUILD},
    {"QK-clip", TESTS(qk_clip_tests), EVERY_BUILD},
    {"statistics", TESTS(stats_program_tests), FP32_BUILD},
    {"spikes", TESTS(spikes_tests), FP32_BUILD},
    {"sharding", TESTS(sharding_tests), EVERY_BUILD},
    {"watchdog", TESTS(watchdog_tests), FP32_BUILD},
    {"devices", TESTS(device_tests), FP32_BUILD},
    {"prediction", TESTS(prediction_tests), FP32_BUILD},
    {"devices", TESTS(isolated_tests), FP32_BUILD},
    {"evaluation", TESTS(evaluation_tests), EVERY_BUILD},
    {"choices", TESTS(choices_tests), EVERY_BUILD},
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
    test_read_tier(&argc, &argv);
    check_words(argc - 1, argv + 1);
    TestCounts counts = {0, 0, 0};
    for (size_t i = 0; i < sizeof(test_tables) / sizeof(test_tables[0]); i++)
        for (int t = 0; t < test_tables[i].count && is_of_this_build((int)i); t++) {
            const Test *test = &test_tables[i].tests[t];
            if (test_of_tier(test) && test_chosen(argc - 1, argv + 1, test_tables[i].subject, test->sentence))
                test_run(&counts, test_tables[i].subject, test);
        }
    return test_end(&counts);
}
