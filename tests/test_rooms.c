/*
test_rooms.c: the tests of options, data, tokenizer, files of runs, the watchdog and devices, which need no model, with
the arguments of test_main.h. Tests of what ends a program start this one with --child.
*/
#include "small_sizes.h"
#define PLANNED_FAULTS
#include "../llmc/base/dtype.h"
#include "../llmc/experts/all_operations.h"
#include "../llmc/options/environment.h"
#include "planned_faults.h"
#include "test_main.h"
#include "options.h"
#include "data.h"
#include "corpora.h"
#include "tokenizer.h"
#include "safetensors.h"
#include "config_json.h"
#include "checkpoint.h"
#include "run_files.h"
#include "progress.h"
#include "watchdog.h"
#include "device.h"

static const TestTable test_tables[] = {
    {"options", TESTS(options_tests), FP32_BUILD},        {"data", TESTS(data_tests), FP32_BUILD},
    {"corpora", TESTS(corpora_tests), FP32_BUILD},        {"tokenizer", TESTS(tokenizer_tests), FP32_BUILD},
    {"checkpoint", TESTS(safetensors_tests), FP32_BUILD}, {"checkpoint", TESTS(config_json_tests), FP32_BUILD},
    {"checkpoint", TESTS(checkpoint_tests), FP32_BUILD},  {"checkpoint", TESTS(run_files_tests), FP32_BUILD},
    {"progress", TESTS(progress_tests), FP32_BUILD},      {"watchdog", TESTS(watchdog_tests), FP32_BUILD},
    {"devices", TESTS(device_tests), FP32_BUILD},
};

int main(int argc, char **argv) {
    environment_reexecute(argv);
    if (checkpoint_test_child(argc, argv)) return EXIT_DONE;
    return test_main(TESTS(test_tables), argc, argv);
}
