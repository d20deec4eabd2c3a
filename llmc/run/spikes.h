/*
spikes.h: detects spikes of the loss and the gradient norm, and decides which updates are skipped.

  z        0.6745 (x - median) / (upper quartile - median) of the window: the last 128 values of all finite steps,
           including skipped steps, without x. For normally distributed values z is the number of standard deviations.
           NaN (null in the log) for an x that is not finite, and while the window has fewer values
  spike    z >= 7; the spike score is the percentage of spikes among the values that had a z
  skipped  a step with z >= --skip-loss-z or z >= --skip-grad-z (0: off)
  robust   A tenth of the values, however large, changes the scale little: a few corrupt batches remain visible. Large
           values set the scale when they are more than a quarter. So a loss that stays at a higher level is skipped for
           about 32 steps, or with Z < 0.6745 for 64

  double  spike_z(detector, x)
  double  spike_observe(detector, x)   returns spike_z, and counts x and the spike
  void    spike_enter(detector, x)     adds a finite x to the window
  double  spike_score(detector)        NaN before the first z
  double  spike_mean(detector, most)   of the newest values, at most `most`; NaN of an empty window
  UpdateDecision spike_guard_decide(guard, loss, grad_norm, skip_loss_z, skip_grad_z)   once per step, before its update
  cJSON  *spike_guard_to_json(guard)
  bool    spike_guard_from_json(guard, json)   false, with the guard unchanged, when the format is invalid

  numerics  double. Median and quartile are values 64 and 96 of the window in ascending order, from 0. When both are
            equal, an equal x has z = 0, and any other x the largest double with its sign: z is always finite
  source    the spike score of OLMo 2 (arXiv 2501.00656), there with mean and deviation of the last 1000 values;
            skipping as in its SkipStep optimizer
*/
#pragma once
#include "../base/common.h"
#include "../base/json.h"

enum { SPIKE_WINDOW = 128 };
static const double SPIKE_Z = 7, QUARTILE_Z = 0.6744897501960817; // the upper quartile of a normal distribution

typedef struct {
    double window[SPIKE_WINDOW];
    int count, oldest; // values in the window; index of the oldest one
    int64_t judged, spikes;
} SpikeDetector;

// Value i of the window, from the oldest.
static inline double spike_value(const SpikeDetector *d, int i) { return d->window[(d->oldest + i) % SPIKE_WINDOW]; }

static inline double spike_z(const SpikeDetector *d, double x) {
    double sorted[SPIKE_WINDOW];
    if (!isfinite(x) || d->count < SPIKE_WINDOW) return NAN;
    memcpy(sorted, d->window, sizeof(sorted));
    qsort(sorted, SPIKE_WINDOW, sizeof(double), compare_doubles);
    double median = sorted[SPIKE_WINDOW / 2], above = x - median,
           scale = (sorted[SPIKE_WINDOW * 3 / 4] - median) / QUARTILE_Z;
    return above == 0 ? 0 : fmax(-DBL_MAX, fmin(DBL_MAX, above / scale));
}

static inline double spike_observe(SpikeDetector *d, double x) {
    double z = spike_z(d, x);
    d->judged += !isnan(z);
    d->spikes += z >= SPIKE_Z;
    return z;
}

static inline void spike_enter(SpikeDetector *d, double x) {
    assert(isfinite(x));
    if (d->count < SPIKE_WINDOW) d->window[d->count++] = x;
    else {
        d->window[d->oldest] = x;
        d->oldest = (d->oldest + 1) % SPIKE_WINDOW;
    }
}

static inline double spike_score(const SpikeDetector *d) { return 100.0 * (double)d->spikes / (double)d->judged; }

static inline double spike_mean(const SpikeDetector *d, int most) {
    double sum = 0;
    int n = d->count < most ? d->count : most;
    for (int i = d->count - n; i < d->count; i++) sum += spike_value(d, i);
    return sum / n;
}

// ---- decisions

enum { NOT_FINITE_LIMIT = 10 }; // this many steps in a row end the run: weights that give NaN do not recover

typedef struct {
    SpikeDetector loss, grad_norm;
    int64_t skipped, not_finite; // steps of the run whose update was skipped, by the reason
    int64_t not_finite_in_row;   // up to the last step
} SpikeGuard;

typedef struct {
    double loss_z, grad_z; // NaN: none
    bool finite;           // both the loss and the gradient norm
    bool apply;            // the update
} UpdateDecision;

static inline UpdateDecision spike_guard_decide(SpikeGuard *g, double loss, double grad_norm, double skip_loss_z,
                                                double skip_grad_z) {
    UpdateDecision v;
    v.loss_z = spike_observe(&g->loss, loss);
    v.grad_z = spike_observe(&g->grad_norm, grad_norm);
    v.finite = isfinite(loss) && isfinite(grad_norm);
    bool skip = (skip_loss_z > 0 && v.loss_z >= skip_loss_z) || (skip_grad_z > 0 && v.grad_z >= skip_grad_z);
    v.apply = v.finite && !skip;
    g->skipped += v.finite && skip;
    g->not_finite += !v.finite;
    g->not_finite_in_row = v.finite ? 0 : g->not_finite_in_row + 1;
    if (v.finite) {
        spike_enter(&g->loss, loss);
        spike_enter(&g->grad_norm, grad_norm);
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
        if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble)) return false;
        spike_enter(d, item->valuedouble);
    }
    return true;
}

static inline bool spike_guard_from_json(SpikeGuard *guard, const cJSON *json) {
    SpikeGuard g;
    memset(&g, 0, sizeof(g));
    bool good = cJSON_IsObject(json) && spike_read_count(json, "skipped", &g.skipped) &&
                spike_read_count(json, "not_finite", &g.not_finite) &&
                spike_read_count(json, "not_finite_in_row", &g.not_finite_in_row) &&
                g.not_finite_in_row < NOT_FINITE_LIMIT && g.not_finite_in_row <= g.not_finite &&
                spike_from_json(&g.loss, cJSON_GetObjectItemCaseSensitive(json, "loss")) &&
                spike_from_json(&g.grad_norm, cJSON_GetObjectItemCaseSensitive(json, "grad_norm")) &&
                g.loss.count == g.grad_norm.count;
    if (good) *guard = g;
    return good;
}
