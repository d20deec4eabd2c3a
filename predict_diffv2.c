/*
predict_diffv2.c: the prediction of a training step on a GPU (--dry-run --device NAME): the trainer with operations that
record their FLOPs, bytes and times instead of computing (llmc/predict/recorded_operations.h). Model, forward, backward
and update are the very lines that train; precision, device and ranks are data. One object serves the CPU program and
the CUDA program.

  plan   that of the bf16 program: plan_build with the sizes of its types, workspaces and copies
  step   from the update of the step before to the gradients' norm: collectives of the update overlap the forward.
         The first and the last micro-step are recorded, and one of the others, which are alike
*/
#pragma GCC diagnostic ignored "-Wunused-function"  // operations and functions that no step calls
#pragma GCC diagnostic ignored "-Wunused-parameter" // values and pointers
#define inline                                      // no warning of operations that are declared but not defined
#define RECORDED_OPS
#include "llmc/predict/recorded_operations.h"
#include "llmc/predict/prediction.h"
#include "train_diffv2.c"

void predicted_plan(ModelPlan *plan, const ModelConfig *config, int B, int T, Purpose purpose, Recompute recompute,
                    int ranks, int zero, const Options *options) {
    RunRanks of = options_run_ranks(options, 0, ranks);
    of.zero = zero;
    recorded.options = options;
    recorded.device = device_peak_named(options->device);
    plan_build(plan, config, B, T, purpose, recompute, of);
    plan->device = recorded.device;
}

static void predict_micro_step(Model *model, int micro, bool last, double times) {
    static const int start_of_document = 0;
    const Options *o = recorded.options;
    recorded.times = times;
    grads_begin(&model->state, micro, last);
    model_micro_step(model, NULL, NULL, o->doc_mask ? &start_of_document : NULL, model->plan.B, model->plan.T,
                     (double)o->total_batch);
}

Prediction predict_step(const ModelPlan *plan, const Options *options, int change) {
    Prediction p;
    Model model;
    size_t N = (size_t)plan->B * plan->T;
    double *squares = (double *)checked_calloc(plan->sharding.count, sizeof(double));
    memset(&p, 0, sizeof(p));
    memset(&model, 0, sizeof(model));
    memset(&recorded, 0, sizeof(recorded));
    p.plan = plan, p.options = options;
    p.micro_steps = (double)options->total_batch / ((double)N * plan_ranks(plan));
    for (int i = 0; i < ASSUMPTION_COUNT; i++) p.assumed[i] = assumption_value(i, plan->device->generation, change);
    recorded.p = &p, recorded.options = options, recorded.device = plan->device;
    recorded.times = 1;
    comm.ranks = plan_ranks(plan), comm.group_ranks = plan->sharding.ranks;
    model.plan = *plan; // with its lists
    model_alloc(&model, NULL);
    recorded.head = param(&model.state, head_kind(plan), 0);
    model_update(&model, options, 0, 1, 1);
    buffer_zero(model.acts.losses, N * sizeof(real));
    predict_micro_step(&model, 0, p.micro_steps < 2, 1);
    if (p.micro_steps > 2) predict_micro_step(&model, 1, false, p.micro_steps - 2);
    if (p.micro_steps > 1) predict_micro_step(&model, 2, true, 1);
    recorded.times = 1;
    own_squares(&model.state, squares);
    double hidden = fmax(0, p.reduce_ms + p.gather_ms - p.exposed_ms);
    double numbers = (double)plan_ranks(plan) * (AGREED_NUMBERS + plan->sharding.count) * sizeof(double);
    if (comm.ranks > 1) p.agree_ms = AGREE_HOST_MS + ring_of(&p, ring_of_all(plan), numbers).ms;
    p.exposed_ms += p.assumed[ASSUME_OVERLAP] * hidden + p.agree_ms;
    p.class_ms[CLASS_COMMUNICATION] = p.bound_ms[BOUND_COMMUNICATION] = p.exposed_ms;
    for (int i = 0; i < PREDICTION_CLASSES; i++) p.step_ms += p.class_ms[i];
    state_free(&model.state, true);
    free(model.acts.layers);
    free(squares);
    return p;
}
