/*
spikes.h: detects spikes of the loss and the gradient norm, and decides which updates are skipped.

  z         (x - mean) / deviation over the window: the last 1000 accepted values, without x. NaN (null in the log) for
            an x that is not finite, and while the window has fewer than 128 values
  spike     z >= 7; the spike score is the percentage of spikes among the values that had a z
  accepted  the two values of a step whose update was applied enter the windows, also those of a spike
  skipped   a step with z >= --skip-loss-z or z >= --skip-grad-z (0: off)
  shift     A loss or norm that stays at a higher level would be skipped forever, because its values do not enter the
            window. Therefore a counter goes up by 1 for each skipped step and down by 1, but not below 0, for each
            applied one. When it is SKIP_LIMIT, the next step that would be skipped is applied, and both windows restart
            with its values: no step is skipped until they have 128. A step that is not finite does not change the
            counter

  double  spike_z(detector, x)
  double  spike_observe(detector, x)   the same, and counts x and the spike
  void    spike_accept(detector, x)    adds a finite x to the window
  double  spike_score(detector)        NaN before the first z
  UpdateDecision spike_guard_decide(guard, loss, grad_norm, skip_loss_z, skip_grad_z)   once per step, before its update
  cJSON  *spike_guard_to_json(guard)
  bool    spike_guard_from_json(guard, json)   false, with the guard unchanged, when the format is invalid

  numerics  double, in two passes over the differences to the oldest value, so that equal values have a deviation of
            exactly 0. The variance is divided by n, not by n - 1. With deviation 0 an equal x has z = 0, and any other
            x the largest double with its sign: z is always finite. Sums run from the oldest value to the newest, the
            order in which the state is saved, so that a resumed run has equal bits
  source    the spike score of OLMo 2 (arXiv 2501.00656); skipping as in its SkipStep optimizer
*/
#ifndef LLMC_SPIKES_H
#define LLMC_SPIKES_H
#include "../base/common.h"
#include "../base/json.h"

enum { SPIKE_WINDOW = 1000, SPIKE_LEAST = 128 };
static const double SPIKE_Z = 7;

typedef struct {
    double window[SPIKE_WINDOW];
    int count, oldest; // values in the window; index of the oldest one
    int64_t judged, spikes;
} SpikeDetector;

// Value i of the window, from the oldest.
static inline double spike_value(const SpikeDetector *d, int i) { return d->window[(d->oldest + i) % SPIKE_WINDOW]; }

static inline double spike_z(const SpikeDetector *d, double x) {
    if (!isfinite(x) || d->count < SPIKE_LEAST) return NAN;
    double origin = spike_value(d, 0), mean = 0, variance = 0;
    for (int i = 0; i < d->count; i++) mean += spike_value(d, i) - origin;
    mean /= d->count;
    for (int i = 0; i < d->count; i++) {
        double distance = spike_value(d, i) - origin - mean;
        variance += distance * distance;
    }
    variance /= d->count;
    double above = x - origin - mean;
    return above == 0 ? 0 : fmax(-DBL_MAX, fmin(DBL_MAX, above / sqrt(variance)));
}

static inline double spike_observe(SpikeDetector *d, double x) {
    double z = spike_z(d, x);
    d->judged += !isnan(z);
    d->spikes += z >= SPIKE_Z;
    return z;
}

static inline void spike_accept(SpikeDetector *d, double x) {
    assert(isfinite(x));
    if (d->count < SPIKE_WINDOW) d->window[(d->oldest + d->count++) % SPIKE_WINDOW] = x;
    else {
        d->window[d->oldest] = x;
        d->oldest = (d->oldest + 1) % SPIKE_WINDOW;
    }
}

static inline double spike_score(const SpikeDetector *d) { return 100.0 * (double)d->spikes / (double)d->judged; }

// ---- decisions

enum {
    NOT_FINITE_LIMIT = 10, // this many steps in a row end the run: weights that give NaN do not recover
    SKIP_LIMIT = 100       // this many more skipped than applied steps are a shift, not spikes
};

typedef struct {
    SpikeDetector loss, grad_norm;
    int64_t skipped, not_finite; // steps of the run whose update was skipped, by the reason
    int64_t not_finite_in_row;   // up to the last step
    int64_t skip_excess;         // the counter of "shift"
} SpikeGuard;

typedef struct {
    double loss_z, grad_z; // NaN: none
    bool finite;           // both the loss and the gradient norm
    bool apply;            // the update
    bool shift;            // applied despite its z; the windows restart
} UpdateDecision;

static inline void spike_reset(SpikeDetector *d) { d->count = d->oldest = 0; }

static inline UpdateDecision spike_guard_decide(SpikeGuard *g, double loss, double grad_norm, double skip_loss_z,
                                                double skip_grad_z) {
    UpdateDecision v;
    v.loss_z = spike_observe(&g->loss, loss);
    v.grad_z = spike_observe(&g->grad_norm, grad_norm);
    v.finite = isfinite(loss) && isfinite(grad_norm);
    bool skip = (skip_loss_z > 0 && v.loss_z >= skip_loss_z) || (skip_grad_z > 0 && v.grad_z >= skip_grad_z);
    v.shift = v.finite && skip && g->skip_excess == SKIP_LIMIT;
    if (v.shift) {
        spike_reset(&g->loss);
        spike_reset(&g->grad_norm);
        g->skip_excess = 0;
        skip = false;
    }
    v.apply = v.finite && !skip;
    g->skipped += v.finite && skip;
    if (v.finite && skip) g->skip_excess++;
    else if (v.finite && g->skip_excess > 0) g->skip_excess--;
    g->not_finite += !v.finite;
    g->not_finite_in_row = v.finite ? 0 : g->not_finite_in_row + 1;
    if (v.apply) {
        spike_accept(&g->loss, loss);
        spike_accept(&g->grad_norm, grad_norm);
    }
    return v;
}

// ---- state

static inline cJSON *spike_to_json(const SpikeDetector *d) {
    cJSON *json = cJSON_CreateObject();
    json_add_u64(json, "judged", (uint64_t)d->judged);
    json_add_u64(json, "spikes", (uint64_t)d->spikes);
    cJSON *window = cJSON_AddArrayToObject(json, "window");
    for (int i = 0; i < d->count; i++)
        CHECK(cJSON_AddItemToArray(window, cJSON_CreateNumber(spike_value(d, i))), "out of memory for a JSON text");
    return json;
}

static inline cJSON *spike_guard_to_json(const SpikeGuard *g) {
    cJSON *json = cJSON_CreateObject();
    json_add_u64(json, "skipped", (uint64_t)g->skipped);
    json_add_u64(json, "not_finite", (uint64_t)g->not_finite);
    json_add_u64(json, "not_finite_in_row", (uint64_t)g->not_finite_in_row);
    json_add_u64(json, "skip_excess", (uint64_t)g->skip_excess);
    CHECK(cJSON_AddItemToObject(json, "loss", spike_to_json(&g->loss)) &&
              cJSON_AddItemToObject(json, "grad_norm", spike_to_json(&g->grad_norm)),
          "out of memory for a JSON text");
    return json;
}

static inline bool spike_read_count(const cJSON *json, const char *key, int64_t *count) {
    uint64_t value = 0;
    bool good = json_size(cJSON_GetObjectItemCaseSensitive(json, key), &value);
    if (good) *count = (int64_t)value;
    return good;
}

// Requires a detector that is all zero.
static inline bool spike_from_json(SpikeDetector *d, const cJSON *json) {
    const cJSON *window = cJSON_GetObjectItemCaseSensitive(json, "window"), *item;
    if (!cJSON_IsObject(json) || !cJSON_IsArray(window)) return false;
    if (!spike_read_count(json, "judged", &d->judged) || !spike_read_count(json, "spikes", &d->spikes)) return false;
    if (d->spikes > d->judged) return false;
    cJSON_ArrayForEach(item, window) {
        if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble) || d->count == SPIKE_WINDOW) return false;
        spike_accept(d, item->valuedouble);
    }
    return true;
}

static inline bool spike_guard_from_json(SpikeGuard *guard, const cJSON *json) {
    SpikeGuard g;
    memset(&g, 0, sizeof(g));
    bool has_excess = cJSON_HasObjectItem(json, "skip_excess"); // not in checkpoints of earlier programs
    bool good = cJSON_IsObject(json) && spike_read_count(json, "skipped", &g.skipped) &&
                (!has_excess || spike_read_count(json, "skip_excess", &g.skip_excess)) && g.skip_excess <= SKIP_LIMIT &&
                g.skip_excess <= g.skipped && spike_read_count(json, "not_finite", &g.not_finite) &&
                spike_read_count(json, "not_finite_in_row", &g.not_finite_in_row) &&
                g.not_finite_in_row < NOT_FINITE_LIMIT && g.not_finite_in_row <= g.not_finite &&
                spike_from_json(&g.loss, cJSON_GetObjectItemCaseSensitive(json, "loss")) &&
                spike_from_json(&g.grad_norm, cJSON_GetObjectItemCaseSensitive(json, "grad_norm")) &&
                g.loss.count == g.grad_norm.count;
    if (good) *guard = g;
    return good;
}
#endif
