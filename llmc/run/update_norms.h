/*
update_norms.h: the norms of the last updates: announces updates that are larger than usual, and clips them
(--clip-update-norm SIGMA,WINDOW).

  norm     of the change of all weights that AdamW updates, without the weight decay; it includes the learning rate
  z        (norm - mean) / deviation of the window: the norms of the last WINDOW updates that were measured, without
           this one. NaN while the window has fewer
  rise     z >= 4: announced
  clipped  an update with z > SIGMA is scaled down to the norm mean + SIGMA deviation, with its weight decay. The window
           receives the norm of the update as it is made. With SIGMA > 1 a higher level widens it, and is accepted
           after some windows. Nothing is clipped after a window of zeros, as of rates of 0.
  measured with --clip-update-norm every update, otherwise those of --stats-every, in a window of 128

  UpdateNorm update_norm_decide(window, norm, sigma, most)   once per measured update; sigma 0: no clipping
  cJSON     *update_norms_to_json(window)
  bool       update_norms_from_json(window, json)      requires the window's size; the newest values are kept

  numerics  double. With equal values in the window an equal norm has z = 0, any other the largest double
  source    update norms rise before the loss does, and clipping by them: the run of Marin 32B (2025)
*/
#pragma once
#include "../base/json.h"
#include "../options/options_table.h"

enum { UPDATE_NORMS_DEFAULT = 128 };
static const double UPDATE_RISE_Z = 4;

typedef struct {
    int64_t size, count, oldest;
    double norms[UPDATE_NORMS_LIMIT];
} UpdateNorms;

typedef struct {
    double norm, z, mean, deviation; // before clipping; NaN: not measured, or no z
    double scale;                    // of the update
} UpdateNorm;

static inline double update_norms_value(const UpdateNorms *w, int64_t i) { return w->norms[(w->oldest + i) % w->size]; }

static inline void update_norms_enter(UpdateNorms *w, double norm) {
    if (w->count < w->size) w->norms[(w->oldest + w->count++) % w->size] = norm;
    else {
        w->norms[w->oldest] = norm;
        w->oldest = (w->oldest + 1) % w->size;
    }
}

// most: the largest norm that is allowed besides (--change).
static inline UpdateNorm update_norm_decide(UpdateNorms *w, double norm, double sigma, double most) {
    UpdateNorm u = {norm, NAN, NAN, NAN, 1};
    if (w->count == w->size) {
        double sum = 0, squares = 0;
        for (int64_t i = 0; i < w->count; i++) sum += update_norms_value(w, i);
        u.mean = sum / (double)w->count;
        for (int64_t i = 0; i < w->count; i++) squares += pow(update_norms_value(w, i) - u.mean, 2);
        u.deviation = sqrt(squares / (double)w->count);
        if (isfinite(norm)) u.z = norm == u.mean ? 0 : fmin(DBL_MAX, fmax(-DBL_MAX, (norm - u.mean) / u.deviation));
        if (sigma > 0 && u.z > sigma && u.mean > 0) u.scale = (u.mean + sigma * u.deviation) / norm;
    }
    u.scale = fmin(u.scale, most / norm);
    if (isfinite(norm)) update_norms_enter(w, norm * u.scale);
    return u;
}

static inline cJSON *update_norms_to_json(const UpdateNorms *w) {
    cJSON *json = cJSON_CreateArray();
    for (int64_t i = 0; i < w->count; i++)
        CHECK(cJSON_AddItemToArray(json, cJSON_CreateNumber(update_norms_value(w, i))),
              "out of memory for a JSON text");
    return json;
}

// json NULL: a checkpoint without measured updates.
static inline bool update_norms_from_json(UpdateNorms *w, const cJSON *json) {
    const cJSON *item;
    w->count = w->oldest = 0;
    if (!json) return true;
    if (!cJSON_IsArray(json)) return false;
    cJSON_ArrayForEach(item, json) {
        if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble) || item->valuedouble < 0) return false;
        update_norms_enter(w, item->valuedouble);
    }
    return true;
}
