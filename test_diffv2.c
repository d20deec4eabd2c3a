/*
test_diffv2.c: the tests of the CPU build that need the trainer. tests/test_operations.c has those of operations,
tests/test_rooms.c those of what is below the model, since both compile in a fraction of the time.

  build/test_diffv2 [ARGUMENTS]           as tests/test_main.h says
  build/test_diffv2 --trainer ARGUMENTS   the trainer itself, with pieces of work as small as in the tests

This file includes the trainer, so that tests can call its functions. Tests that need another process start
$TRAIN_DIFFV2 (default ./train_diffv2) or $TEXT_TO_SHARDS. Run it in the root of the repository. Compiled with
-DREAL=double it tests the mathematics alone, with finite differences of the whole model, and starts no other program;
the default build tests files and processes.
*/
#include "tests/small_sizes.h"
#define PLANNED_FAULTS
#define main train_diffv2_main
#include "train_diffv2.c"
#undef main
#include "tests/planned_faults.h"
#include "tests/test_main.h"
#include "tests/model.h"
#include "tests/windows.h"
#include "tests/sparse.h"
#include "tests/program.h"
#include "tests/generation.h"
#include "tests/host.h"
#include "tests/stats.h"
#include "tests/documents.h"
#include "tests/spikes.h"
#include "tests/recompute.h"
#include "tests/experts.h"
#include "tests/low_precision.h"
#include "tests/sharding.h"
#include "tests/evaluation.h"
#include "tests/choices.h"

static const TestTable test_tables[] = {
    {"model", TESTS(model_tests), EVERY_BUILD},
    {"windows", TESTS(windows_tests), EVERY_BUILD},
    {"sparse", TESTS(sparse_tests), EVERY_BUILD},
    {"sparse in fp64", TESTS(sparse_fp64_tests), FP64_BUILD},
    {"model in fp64", TESTS(model_fp64_tests), FP64_BUILD},
    {"recompute", TESTS(recompute_tests), EVERY_BUILD},
    {"experts", TESTS(expert_tests), EVERY_BUILD},
    {"experts in fp64", TESTS(expert_fp64_tests), FP64_BUILD},
    {"low precision", TESTS(low_precision_tests), FP32_BUILD},
    {"documents", TESTS(documents_tests), EVERY_BUILD},
    {"program", TESTS(program_tests), FP32_BUILD},
    {"generation", TESTS(generation_tests), EVERY_BUILD},
    {"host", TESTS(host_tests), EVERY_BUILD},
    {"host", TESTS(host_program_tests), FP32_BUILD},
    {"statistics", TESTS(stats_tests), EVERY_BUILD},
    {"statistics", TESTS(stats_program_tests), FP32_BUILD},
    {"spikes", TESTS(spikes_tests), FP32_BUILD},
    {"sharding", TESTS(sharding_tests), EVERY_BUILD},
    {"evaluation", TESTS(evaluation_tests), EVERY_BUILD},
    {"choices", TESTS(choices_tests), EVERY_BUILD},
};

int main(int argc, char **argv) {
    environment_reexecute(argv);
    if (argc > 1 && strcmp(argv[1], "--trainer") == 0) return train_diffv2_main(argc - 1, argv + 1);
    return test_main(TESTS(test_tables), argc, argv);
}
