/*
run_description.h: run.json of a start: options, model, data, revision, machine, libraries. docs/formats.md describes
it.
*/
#pragma once
#include "../base/host.h"
#include "../base/revision.h"
#include "../base/start_parts.h"
#include "../comm/comm.h"
#include "../data/data_identity.h"
#include "../options/environment.h"
#include "inputs.h"
#include "run_records.h"
#include "trainer_state.h"
#include <sys/utsname.h>

typedef struct {
    int argc;
    char **argv;
    const Options *options;
    const ModelPlan *plan, *sampling; // sampling: the plan of the model that draws samples, or NULL
    const Inputs *inputs;
    const TrainerState *state;
    int micro_steps;
    double windows; // windows of the training order of these data that the run reads
    Peak peak;      // flops_util of the log is a share of it
} RunFacts;

static inline void describe_run(cJSON *json, const RunFacts *f) {
    cJSON *command = cJSON_AddArrayToObject(json, "command_line");
    for (int i = 0; i < f->argc; i++) cJSON_AddItemToArray(command, cJSON_CreateString(f->argv[i]));
    const Options *o = f->options;
    cJSON_AddItemToObject(json, "options", options_to_json(o));
    const ModelPlan *plan = f->plan;
    const ModelConfig *c = &plan->config;
    cJSON *model = cJSON_AddObjectToObject(json, "model"); // with the data of a step, what a comparison of runs needs
    json_add_u64(model, "parameters", plan->tensors.parameter_count);
    if (c->FE) json_add_u64(model, "active_parameters", model_parameter_count(c, true));
    cJSON_AddNumberToObject(model, "ffn", c->F);
    if (c->FE) cJSON_AddNumberToObject(model, "expert_ffn", c->FE);
    double flops = training_flops(plan, plan->B, plan->T) / ((double)plan->B * plan->T);
    cJSON_AddNumberToObject(model, "flops_per_token", flops);
    json_add_u64(json, "data_fingerprint", f->inputs->fingerprint);
    cJSON *data = cJSON_AddObjectToObject(json, "data");
    cJSON_AddItemToObject(data, "train", dataloader_describe(&f->inputs->train, f->windows));
    if (o->val_data) cJSON_AddItemToObject(data, "val", dataloader_describe(&f->inputs->val, 0));
    if (f->inputs->choices.count) cJSON_AddItemToObject(data, "choices", choices_describe(&f->inputs->choices));
    cJSON_AddStringToObject(json, "version", program_version);
    cJSON_AddStringToObject(json, "revision", source_revision());
}

static inline void describe_libraries(cJSON *json, const Options *o, const char *driver) {
    char text[32];
    cJSON *libraries = cJSON_AddObjectToObject(json, "libraries");
    cJSON_AddStringToObject(libraries, "gemm", matmul_library());
    bool as_others = o->matmul_dtype != GEMM_FP8 || linear_experts_in_fp8();
    if (o->model.E)
        cJSON_AddStringToObject(libraries, "experts", gemm_choice(as_others ? (int)o->matmul_dtype : (int)GEMM_BF16));
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
    cJSON_AddNumberToObject(peak, "gflops", f->peak.gflops);
    cJSON_AddStringToObject(peak, "from", f->peak.from);
    cJSON_AddNumberToObject(json, "ranks", comm_ranks());
    cJSON_AddNumberToObject(json, "threads", threads);
    describe_libraries(json, f->options, on_device ? driver : NULL);
}

static inline void describe_start(cJSON *json) {
    start_part("log");
    cJSON *all = cJSON_AddArrayToObject(json, "start_phases");
    for (int i = 0; i < start_parts.count - 1; i++) { // without this part
        cJSON *part = cJSON_CreateObject();
        cJSON_AddStringToObject(part, "name", start_parts.names[i]);
        cJSON_AddNumberToObject(part, "seconds", 1e-3 * round(1e3 * start_parts.seconds[i]));
        CHECK(cJSON_AddItemToArray(all, part), "out of memory for a JSON text");
    }
}

// The caller deletes it.
static inline cJSON *run_description(const RunFacts *f) {
    cJSON *json = cJSON_CreateObject();
    describe_run(json, f);
    describe_machine(json, f);
    describe_start(json);
    return json;
}
