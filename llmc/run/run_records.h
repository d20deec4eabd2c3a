/*
run_records.h: what a training run reports: records of log.jsonl, lines of stdout, warnings on stderr. Each function
takes plain data; a closed Log writes nothing. docs/formats.md describes the records.
*/
#pragma once
#include "../experts/all_operations.h"
#include "../log/logger.h"
#include "../options/options_table.h"
#include "../log/progress.h"
#include "../evaluate/evaluation_model.h"
#include "spikes.h"

// A training step.
typedef struct {
    double loss, grad_norm, lr, seconds;
    double comm_seconds; // the part of `seconds` spent waiting for other ranks
    bool routed;         // the model has experts
    double router_aux, router_z;
    UpdateDecision decision;
    bool measured; // the update
    double update_norm, update_scale;
} StepResult;

// The speed of matrix products, with which the speed of a step is compared.
typedef struct {
    double gflops;
    const char *from; // source of that number
    const char *name; // "peak", or "rate": a measured rate, which a step can exceed
} Peak;

// The peak that the manufacturer states, or the measured peak of a matrix product.
static inline Peak peak_find(void) {
    const DevicePeak *rated = ops_rated();
    if (!rated) return (Peak){matmul_peak_gflops(), "a large matrix product, measured", "rate"};
    return (Peak){1e3 * rated->tflops, rated->source, "peak"};
}

// flops: work of the step, whose speed is logged as a share of the peak.
static inline void log_step(Log *log, const Options *o, int64_t step, int64_t tokens, const StepResult *r, double flops,
                            Peak peak, double seconds_left) {
    double share = peak.gflops > 0 ? flops / r->seconds / (peak.gflops * 1e9) : NAN,
           tokens_per_s = (double)o->total_batch / r->seconds;
    log_begin(log, "train", step);
    log_number(log, "loss", r->loss);
    log_number(log, "grad_norm", r->grad_norm);
    log_number(log, "lr", r->lr);
    log_integer(log, "tokens", tokens);
    log_number(log, "tokens_per_s", tokens_per_s);
    log_number(log, "ms", 1e3 * r->seconds);
    log_number(log, "flops_util", share);
    log_number(log, "comm_ms", 1e3 * r->comm_seconds);
    log_number(log, "loss_z", r->decision.loss_z);
    log_number(log, "grad_z", r->decision.grad_z);
    log_bool(log, "skipped", !r->decision.apply);
    if (r->measured) {
        log_number(log, "update_norm", r->update_norm);
        log_number(log, "update_scale", r->update_scale);
    }
    if (r->routed) {
        log_number(log, "router_aux", r->router_aux);
        log_number(log, "router_z", r->router_z);
    }
    log_end(log);
    progress_step(step, o->steps, r->loss, r->grad_norm, r->lr, tokens_per_s, share, peak.name, seconds_left);
}

static inline void log_event(Log *log, int64_t step, const char *what) {
    log_begin(log, "event", step);
    log_string(log, "what", what);
}

static inline void log_spike(Log *log, int64_t step, const char *metric, double value, double z) {
    if (!(z >= SPIKE_Z)) return;
    log_event(log, step, "spike");
    log_string(log, "of", metric);
    log_number(log, "value", value);
    log_number(log, "z", z);
    log_end(log);
}

// Logs unusual events of a step: spikes, an update that was not applied. not_finite_in_row: steps up to this one
static inline void log_step_events(Log *log, int64_t step, const StepResult *r, int64_t not_finite_in_row) {
    const UpdateDecision *d = &r->decision;
    log_spike(log, step, "loss", r->loss, d->loss_z);
    log_spike(log, step, "grad_norm", r->grad_norm, d->grad_z);
    if (d->apply) return;
    log_event(log, step, d->finite ? "skipped" : "not_finite");
    log_number(log, "loss", r->loss);
    log_number(log, "grad_norm", r->grad_norm);
    log_number(log, "loss_z", d->loss_z);
    log_number(log, "grad_z", d->grad_z);
    if (!d->finite) log_integer(log, "in_row", not_finite_in_row);
    log_end(log);
    progress_break();
    if (d->finite)
        warn("step %" PRId64 ": loss %.4f (z %.3g), gradient norm %.4g (z %.3g): the update was skipped", step, r->loss,
             d->loss_z, r->grad_norm, d->grad_z);
    else
        warn("step %" PRId64 ": loss %g, gradient norm %g: not finite (%" PRId64 " in a row), the update was skipped",
             step, signless_nan(r->loss), signless_nan(r->grad_norm), not_finite_in_row);
}

static inline void log_validation(Log *log, int64_t step, const Validation *v, uint64_t windows,
                                  uint64_t data_fingerprint) {
    char fingerprint[24];
    FORMAT(fingerprint, "%" PRIu64, data_fingerprint);
    log_begin(log, "val", step);
    log_number(log, "loss", v->loss);
    if (!isnan(v->bits_per_byte)) log_number(log, "bits_per_byte", v->bits_per_byte);
    log_integer(log, "windows", (int64_t)windows); // losses over other windows do not compare
    log_string(log, "data_fingerprint", fingerprint);
    log_end(log);
    progress_break();
    printf("step %" PRId64 ": validation loss %.4f (perplexity %.2f", step, signless_nan(v->loss),
           signless_nan(exp(v->loss)));
    if (!isnan(v->bits_per_byte)) printf(", %.3f bits per byte", v->bits_per_byte);
    printf(")\n");
    progress_flush();
}

// The checkpoint of step `of_step` is complete. Training waited `stall` of the seconds that writing it took.
static inline void log_checkpoint(Log *log, int64_t step, int64_t of_step, bool in_background, double seconds,
                                  double stall) {
    log_event(log, step, "checkpoint");
    log_integer(log, "of_step", of_step);
    log_bool(log, "background", in_background);
    log_number(log, "ms", 1e3 * seconds);
    log_number(log, "stall_ms", 1e3 * stall);
    log_end(log);
    progress_break();
    printf("checkpoint of step %" PRId64 " written in %.1f s", of_step, seconds);
    if (in_background) printf(", training waited %.2f s", stall);
    printf("\n");
}

static inline void log_rollback(Log *log, int64_t step, int64_t from, int64_t first_bad, uint64_t next_window) {
    log_event(log, step, "rollback");
    log_integer(log, "from_step", from);
    log_integer(log, "first_bad_step", first_bad);
    log_integer(log, "next_window", (int64_t)next_window);
    log_end(log);
}

// The run stops before its last step. last_good_checkpoint: NULL, or where a run that diverged can continue from.
static inline void log_stopped(Log *log, int64_t step, const char *why, const char *last_good_checkpoint) {
    log_event(log, step, "stopped");
    log_string(log, "why", why);
    if (last_good_checkpoint) log_string(log, "last_good_checkpoint", last_good_checkpoint);
    log_end(log);
}

static inline void print_spike_score(const char *of, const SpikeDetector *d, const char *end) {
    if (d->judged)
        printf("%s %.2f%% (%" PRId64 " of %" PRId64 " steps)%s", of, spike_score(d), d->spikes, d->judged, end);
    else printf("%s not judged%s", of, end);
}

static inline void print_spikes(const SpikeGuard *g) {
    printf("spikes: ");
    if (!g->loss.judged && !g->grad_norm.judged)
        printf("no step has a score, which requires %d earlier finite steps; ", (int)SPIKE_WINDOW);
    else {
        print_spike_score("loss", &g->loss, ", ");
        print_spike_score("gradient norm", &g->grad_norm, "; ");
    }
    printf("updates skipped: %" PRId64 " as spikes, %" PRId64 " not finite\n", g->skipped, g->not_finite);
}

static inline void print_stopped(int64_t step, int64_t steps, const char *why, const char *out) {
    progress_break();
    if (out)
        printf("stopped after step %" PRId64 " of %" PRId64 " (%s); to continue: --out %s --resume\n", step, steps, why,
               out);
    else
        printf("stopped after step %" PRId64 " of %" PRId64 " (%s); nothing was saved without --out\n", step, steps,
               why);
}

// comm_seconds: waiting for other ranks; NaN with one rank.
static inline void print_done(int64_t steps, double seconds, double data_seconds, double checkpoint_seconds,
                              double comm_seconds) {
    char duration[32];
    format_duration(duration, sizeof(duration), seconds);
    printf("done: %" PRId64 " steps in %s, waiting for data %.2f s, for checkpoints %.2f s", steps, duration,
           data_seconds, checkpoint_seconds);
    if (!isnan(comm_seconds)) printf(", for other ranks %.2f s", comm_seconds);
    printf("\n");
}

static inline void warn_not_finite(int64_t step, const char *last_good_checkpoint) {
    warn("the run ends at step %" PRId64
         " with a loss or gradient that is not finite: it has diverged; try a lower --lr, a longer --warmup or "
         "--grad-clip from an earlier checkpoint; last good checkpoint: %s",
         step, last_good_checkpoint);
}

// Mean losses of several steps; start: NaN where the run had too few of them.
static inline void warn_loss_rose(double last, double start, double untrained) {
    warn("the mean of the last losses is %.4f, more than 1 above %s, %.4f: the run has diverged; try a lower --lr, a "
         "longer --warmup or --grad-clip",
         last, start < untrained ? "the mean at the start" : "the loss of an untrained model", fmin(start, untrained));
}
