/*
predict_diffv2.c: predicts the memory and the time of a training step on a GPU: the trainer with operations that record
their FLOPs, bytes and times instead of computing (recorded_operations.h). Model, forward, backward and
update are the very lines that train; precision, device and ranks are data.

  plan   that of the bf16 program: plan_build with the sizes of its types, workspaces and copies
  step   from the update of the step before to the gradients' norm: collectives of the update overlap the forward.
         The first and the last micro-step are recorded, and one of the others, which are alike
*/
#pragma GCC diagnostic ignored "-Wunused-function"  // operations and functions that no step calls
#pragma GCC diagnostic ignored "-Wunused-parameter" // values and pointers
#define inline                                      // no warning of operations that are declared but not defined
#define RECORDED_OPS
#include "recorded_operations.h"
#include "../../llmc/options/options.h"
#include "prediction_report.h"
#include "../../llmc/run/init_model.h"
#include "../../train_diffv2.c"

static void predicted_plan(ModelPlan *plan, const ModelConfig *config, int B, int T, Purpose purpose,
                           Recompute recompute, int ranks, int zero, const Options *options) {
    RunRanks of = options_run_ranks(options, 0, ranks);
    of.zero = zero;
    recorded.options = options;
    recorded.device = device_peak_named(options->device);
    plan_build(plan, config, B, T, purpose, recompute, of);
}

static void predict_micro_step(Model *model, int micro, bool last, double times) {
    static const int start_of_document = 0;
    const Options *o = recorded.options;
    recorded.times = times;
    grads_begin(&model->state, micro, last);
    model_micro_step(model, NULL, NULL, o->doc_mask ? &start_of_document : NULL, model->plan.B, model->plan.T,
                     (double)o->total_batch);
}

static Prediction predict_step(const ModelPlan *plan, const Options *options, AssumptionEnd end) {
    Prediction p;
    Model model;
    size_t N = (size_t)plan->B * plan->T;
    double *squares = (double *)checked_calloc(plan->sharding.count, sizeof(double));
    memset(&p, 0, sizeof(p));
    memset(&model, 0, sizeof(model));
    memset(&recorded, 0, sizeof(recorded));
    p.plan = plan, p.options = options, p.device = device_peak_named(options->device);
    p.micro_steps = (double)options->total_batch / ((double)N * plan_ranks(plan));
    for (int i = 0; i < ASSUMPTION_COUNT; i++) p.assumed[i] = assumption_value(i, p.device->generation, end);
    recorded.p = &p, recorded.options = options, recorded.device = p.device;
    recorded.times = 1;
    comm.ranks = plan_ranks(plan), comm.group_ranks = plan->sharding.ranks;
    model.plan = *plan; // with its lists
    model_alloc(&model, NULL);
    recorded.head = param(&model.state, lm_head_tensor(plan), 0);
    model_update(&model, options, 0, 1, 1);
    buffer_zero(model.acts.losses, N * sizeof(real));
    predict_micro_step(&model, 0, p.micro_steps < 2, 1);
    if (p.micro_steps > 2) predict_micro_step(&model, 1, false, p.micro_steps - 2);
    if (p.micro_steps > 1) predict_micro_step(&model, 2, true, 1);
    recorded.times = 1;
    rank_squares(&model.state, squares);
    double hidden = fmax(0, p.reduce_ms + p.gather_ms - p.exposed_ms);
    double numbers = (double)plan_ranks(plan) * (AGREED_NUMBERS + plan->sharding.count) * sizeof(double);
    if (comm.ranks > 1) p.agree_ms = AGREE_HOST_MS + ring_of(&p, ring_of_all(&p), numbers).ms;
    p.exposed_ms += p.assumed[ASSUME_OVERLAP] * hidden + p.agree_ms;
    p.class_ms[CLASS_COMMUNICATION] = p.bound_ms[BOUND_COMMUNICATION] = p.exposed_ms;
    for (int i = 0; i < PREDICTION_CLASSES; i++) p.step_ms += p.class_ms[i];
    state_free(&model.state, true);
    free(model.acts.layers);
    free(model.layers);
    free(model.mlps);
    free(squares);
    return p;
}

// Reports a --device that no row matches. Returns 1.
static int unknown_device(const char *name) {
    char list[2048] = "";
    size_t used = 0;
    OptionText shown;
    for (int i = 0; i < DEVICE_PEAK_COUNT; i++)
        if (i == 0 || strcmp(device_peaks[i].name, device_peaks[i - 1].name) != 0)
            used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "", device_peaks[i].name);
    assert(used < sizeof(list));
    warn("--device '%s' is unknown: it must be one of %s, or a prefix of one", option_shown(shown, name), list);
    return 1;
}

static int device_problems(const Options *o) {
    const DevicePeak *gpu = o->device ? device_peak_named(o->device) : NULL;
    int problems = 0;
    if (!o->device && !o->refused[option_row("device")])
        REFUSE(problems, "the GPU is missing: specify --device NAME, such as H100");
    else if (o->device && !gpu) problems += unknown_device(o->device);
    if (gpu && o->matmul_dtype == GEMM_FP8 && device_fp8_tflops(gpu) == 0)
        REFUSE(problems,
               "--matmul-dtype fp8 requires a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell); "
               "--device is %s",
               gpu->name);
    if (options_given(o, "link-gbs") && o->ranks <= 1) REFUSE(problems, "--link-gbs requires --ranks W with W above 1");
    return problems;
}

// The options and the model. Ends the program with status 2 after reporting all errors.
static ModelConfig predict_configure(Options *o) {
    int ranks = options_ranks(o), problems = options_report(o) + device_problems(o) + options_sharding_problems(o);
    if (!o->init) { // its model may change the checks
        Options trial = *o;
        options_derive(&trial, ranks);
        problems += options_number_problems(&trial, ranks);
    }
    if (problems) program_exit(EXIT_USAGE);
    if (o->init) {
        init_refuse_run(o->init);
        ModelConfig loaded = config_json_read(o->init);
        init_refuse_conversion(o, &loaded, o->init);
        init_sparse(o, &loaded);
        options_adopt_model(o, &loaded);
    }
    options_adopt_data(o);
    options_derive(o, ranks);
    if (options_number_problems(o, ranks)) program_exit(EXIT_USAGE);
    return options_config(o);
}

int main(int argc, char **argv) {
    Options o;
    ModelPlan plan, sampling;
    program_begin();
    options_read(&o, argc, argv);
    if (!options_help_or_version(&o, true)) {
        ModelConfig config = predict_configure(&o);
        int ranks = options_ranks(&o), zero = (int)o.zero;
        predicted_plan(&plan, &config, (int)o.batch_size, config.T, FOR_TRAINING, (Recompute)o.recompute, ranks, zero,
                       &o);
        if (o.sample_every) {
            predicted_plan(&sampling, &config, 1, config.T, FOR_GENERATION, RECOMPUTE_NOTHING, ranks, zero, &o);
            plan.workspace_bytes = max_size(plan.workspace_bytes, sampling.workspace_bytes); // both models share it
        }
        print_prediction(&plan, o.sample_every ? &sampling : NULL, &o);
        if (o.prediction_out) write_prediction(o.prediction_out, &plan, o.sample_every ? &sampling : NULL, &o);
    }
    program_exit(end_of_output(EXIT_DONE));
}
