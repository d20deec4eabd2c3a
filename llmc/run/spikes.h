/*
spikes.h: rolling detectors for the loss and the gradient norm, and which updates are left out.

  z         (x - mean) / deviation over the window, the last 1000 accepted values; x itself is not among them.
            NaN, in the log null, for an x that is not finite and while the window has fewer than 128 values
  spike     z >= 7; the spike score is the percentage of spikes among the values that had a z
  accepted  the values of a step whose update was applied. So neither value of a step that was skipped, or where one of
            them is not finite, enters a window; those of a spike that was applied do
  skipped   a step with z >= --skip-loss-z or z >= --skip-grad-z (0: off)
  shift     A loss or norm that stays at a higher level would be skipped for ever, since its values do not enter. So
            skipped steps are counted against applied ones: one up for a skipped step, one down, but not below 0, for an
            applied one. When the count is SKIP_LIMIT, the next step that would be skipped is applied instead, and both
            windows begin anew with its values: nothing is skipped until they have 128. A step that is not finite does
            not change the count

  double  spike_z(detector, x)
  double  spike_observe(detector, x)     the same, counted
  void    spike_accept(detector, x)    finite
  double  spike_score(detector)        NaN before the first z
  UpdateDecision spike_guard_decide(guard, loss, grad_norm, skip_loss_z, skip_grad_z)    once per step, before its update
  cJSON  *spike_guard_to_json(guard)
  bool    spike_guard_from_json(guard, json) false, and the guard as it was, when this program cannot have written it

  numerics  double, in two passes over the distances to the oldest value, so a window of equal values has a deviation
            of exactly 0. The deviation is the window's own (divided by n, not by n - 1). Where it is 0, an equal x has
            z = 0, any other the largest double with its sign: a z is always finite. Sums run from the oldest value to
            the newest, the order in which the state is saved, so a resumed run has the same bits
  source    the spike score of OLMo 2 (arXiv 2501.00656); a step that is skipped is their SkipStep optimizer's
*/
#ifndef LLMC_SPIKES_H
#define LLMC_SPIKES_H
#include "../base/common.h"
#include "../base/json.h"

enum { SPIKE_WINDOW = 1000, SPIKE_LEAST = 128 };
static const double SPIKE_Z = 7;

typedef struct {
    double window[SPIKE_WINDOW];
    int count, oldest; // values in the window; where the oldest one is
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

// ---- what a step does about them

enum {
    NOT_FINITE_LIMIT = 10, // so many steps in a row end the run: weights that give NaN do not recover
    SKIP_LIMIT = 100       // so many more skipped than applied are no spikes but a shift
};

typedef struct {
    SpikeDetector loss, grad_norm;
    int64_t skipped, not_finite; // steps of the run whose update was left out, by the reason
    int64_t not_finite_in_row;   // up to the last step
    int64_t skip_excess;         // skipped steps less applied ones, see above
} SpikeGuard;

typedef struct {
    double loss_z, grad_z; // NaN: none
    bool finite;           // the loss and the gradient norm both are
    bool apply;            // the update
    bool shift;            // although its z says skip: the windows begin anew
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

// Into a detector that is all zero.
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
