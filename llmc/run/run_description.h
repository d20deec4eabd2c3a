/*
run_description.h: run.json of a start: options, model, data, revision, machine, libraries. docs/formats.md describes
it.
*/
#ifndef LLMC_RUN_DESCRIPTION_H
#define LLMC_RUN_DESCRIPTION_H
#include "../base/host.h"
#include "../base/revision.h"
#include "../comm/comm.h"
#include "../data/data_identity.h"
#include "environment.h"
#include "evaluation_choices.h"
#include "options_json.h"
#include <sys/utsname.h>

typedef struct {
    int argc;
    char **argv;
    const Options *options;
    size_t parameters, active_parameters; // active: those that a token passes
    int F, FE;                            // widths of the MLP and, with experts, of one; else FE is 0
    double flops_per_token;
    const DataLoader *train, *val; // val: NULL without --val-data
    const ChoiceTasks *choices;
    uint64_t data_fingerprint;
    double windows;        // of the training order that the whole run reads
    double peak_gflops;    // flops_util of the log is a share of it
    const char *peak_from; // source of that number
    uint64_t gemm_table;   // digest of the table of --tune-gemm
} RunFacts;

static inline void describe_run(cJSON *json, const RunFacts *f) {
    cJSON *command = cJSON_AddArrayToObject(json, "command_line");
    for (int i = 0; i < f->argc; i++) cJSON_AddItemToArray(command, cJSON_CreateString(f->argv[i]));
    cJSON_AddItemToObject(json, "options", options_to_json(f->options));
    cJSON *model = cJSON_AddObjectToObject(json, "model"); // with the data of a step, what a comparison of runs needs
    json_add_u64(model, "parameters", f->parameters);
    if (f->FE) json_add_u64(model, "active_parameters", f->active_parameters);
    cJSON_AddNumberToObject(model, "ffn", f->F);
    if (f->FE) cJSON_AddNumberToObject(model, "expert_ffn", f->FE);
    cJSON_AddNumberToObject(model, "flops_per_token", f->flops_per_token);
    json_add_u64(json, "data_fingerprint", f->data_fingerprint);
    cJSON *data = cJSON_AddObjectToObject(json, "data");
    cJSON_AddItemToObject(data, "train", dataloader_describe(f->train, f->windows));
    if (f->val) cJSON_AddItemToObject(data, "val", dataloader_describe(f->val, 0));
    if (f->choices->count) cJSON_AddItemToObject(data, "choices", choices_describe(f->choices));
    cJSON_AddStringToObject(json, "revision", source_revision());
}

static inline void describe_libraries(cJSON *json, const RunFacts *f, const char *driver) {
    char text[32];
    cJSON *libraries = cJSON_AddObjectToObject(json, "libraries");
    cJSON_AddStringToObject(libraries, "gemm", matmul_library());
    FORMAT(text, "%016" PRIx64, f->gemm_table);
    if (f->options->tune_gemm) cJSON_AddStringToObject(libraries, "gemm_table_xxh3_64", text);
    if (attention_backend()) cJSON_AddStringToObject(libraries, "attention", attention_backend());
    if (driver) cJSON_AddStringToObject(libraries, "cuda", driver);
    if (comm_ranks() > 1 && comm_library()) cJSON_AddStringToObject(libraries, "ranks", comm_library());
    cJSON_AddStringToObject(libraries, "cjson", cJSON_Version());
    FORMAT(text, "%u", XXH_versionNumber());
    cJSON_AddStringToObject(libraries, "xxhash", text);
    cJSON_AddStringToObject(libraries, "compiler", __VERSION__);
    cJSON *environment = cJSON_AddObjectToObject(json, "environment"); // variables that change what libraries compute
    for (int i = 0; i < LIBRARY_VARIABLE_COUNT; i++)
        if (library_variable(i)) cJSON_AddStringToObject(environment, library_variables[i].name, library_variable(i));
}

static inline void describe_machine(cJSON *json, const RunFacts *f) {
    struct utsname host;
    char text[256], driver[sizeof(text)];
    int cores = host_cores(""), threads = (int)f->options->threads;
    CHECK(uname(&host) == 0, "cannot get the name of this host: %s", strerror(errno));
    cJSON_AddStringToObject(json, "host", host.nodename);
    FORMAT(text, "%s %s %s", host.sysname, host.release, host.machine);
    cJSON_AddStringToObject(json, "system", text);
    cJSON *devices = cJSON_AddArrayToObject(json, "devices");
    bool on_device = ops_device(text, driver, sizeof(text));
    if (on_device) cJSON_AddItemToArray(devices, cJSON_CreateString(text));
    FORMAT(text, "CPU: %d thread%s on %d core%s", threads, threads == 1 ? "" : "s", cores, cores == 1 ? "" : "s");
    cJSON_AddItemToArray(devices, cJSON_CreateString(text));
    cJSON *peak = cJSON_AddObjectToObject(json, "peak");
    cJSON_AddNumberToObject(peak, "gflops", f->peak_gflops);
    cJSON_AddStringToObject(peak, "from", f->peak_from);
    cJSON_AddNumberToObject(json, "ranks", comm_ranks());
    describe_libraries(json, f, on_device ? driver : NULL);
}

// The caller deletes it.
static inline cJSON *run_description(const RunFacts *f) {
    cJSON *json = cJSON_CreateObject();
    describe_run(json, f);
    describe_machine(json, f);
    return json;
}
#endif
