/*
apply_changes.h: what --change does to the steps of a run. llmc/options/changes.h has the keys. All ranks call these
functions together.

  void   changes_check(options, plan, step)   exits with status 2 if a start after this step cannot make them
  void   changes_open(a, options, tensors, loader, step, next_window)   before the loader starts
  void   changes_update(a, state, step)   before the update of a step: resets moments, and sets the update's rates
  double changes_norm(a, step)            the largest norm of an update; INFINITY: no limit
  void   changes_past_window(a, step, window, text, size)   the option of a resume that replaces a window
  void   log_changes(log, step, a, loader)   an event for each change that begins
  void   changes_close(a)
*/
#pragma once
#include "../data/dataloader.h"
#include "../model/state.h"
#include "../options/changes.h"
#include "run_records.h"

typedef struct {
    Changes changes;
    const TensorList *tensors;
    Rates rates;                     // room for all ranges of one step
    WindowMove moves[CHANGES_LIMIT]; // moves of the loader's windows
} AppliedChanges;

// Whether the change concerns tensor t; *range: its elements.
static inline bool change_range(const Change *c, const Tensor *t, RateRange *range) {
    size_t width = t->ndim == 2 ? t->shape[1] : 1;
    if (strncmp(t->name, c->tensor, strlen(c->tensor)) != 0) return false;
    range->begin = t->offset + (size_t)c->begin * width;
    range->end = c->end ? t->offset + (size_t)c->end * width : t->offset + t->count;
    range->factor = c->kind == CHANGE_RATE ? c->value : 0;
    return true;
}

// The change's tensor with the fewest rows; NULL: the model has no tensor with such a name.
static inline const Tensor *change_tensor(const Change *c, const TensorList *list) {
    RateRange range;
    const Tensor *least = NULL;
    for (int i = 0; i < list->count; i++) {
        const Tensor *t = &list->tensors[i];
        if (change_range(c, t, &range) && (!least || t->shape[0] < least->shape[0])) least = t;
    }
    return least;
}

static inline bool change_moves(const Change *c) { return c->kind == CHANGE_REPLACE || c->kind == CHANGE_ORDER; }

// Reports at most one problem. Returns their number.
static inline int change_problems(const Change *c, const Options *o, const ModelPlan *plan, int64_t step) {
    int problems = 0;
    const int64_t windows = o->total_batch / plan->T;
    const Tensor *t = change_tensor(c, &plan->tensors);
    if (c->first <= step || c->last > o->steps)
        REFUSE(problems, "--change %s: this start has the steps %" PRId64 " to %" PRId64 ": use one of these", c->text,
               step + 1, o->steps);
    else if (c->kind == CHANGE_NORM && o->optimizer != OPTIMIZER_ADAMW)
        REFUSE(problems, "--change %s: updates of %s have a constant norm: use lr=FACTOR", c->text,
               optimizer_choice(o->optimizer));
    else if (change_moves(c) && c->first != c->last)
        REFUSE(problems, "--change %s: %s requires a single step: give a change for each step", c->text,
               change_names[c->kind]);
    else if (c->high >= windows)
        REFUSE(problems, "--change %s: an update has %" PRId64 " windows: use 0 to %" PRId64, c->text, windows,
               windows - 1);
    else if (!t)
        REFUSE(problems,
               "--change %s: no tensor has a name that begins with %s: use a name of a checkpoint's model.safetensors",
               c->text, c->tensor);
    else if (c->end > (int64_t)t->shape[0])
        REFUSE(problems, "--change %s: %s has %zu rows: use [A:B] with B up to %zu", c->text, t->name, t->shape[0],
               t->shape[0]);
    else if (o->stop_after && c->first > o->stop_after)
        warn("--change %s has no effect: this start ends after --stop-after %" PRId64, c->text, o->stop_after);
    return problems;
}

static inline void changes_check(const Options *o, const ModelPlan *plan, int64_t step) {
    char wrong[200];
    Changes changes;
    int problems = 0;
    if (!o->change) return;
    changes_parse(&changes, o->change, wrong);
    for (int i = 0; i < changes.count; i++) problems += change_problems(&changes.all[i], o, plan, step);
    if (problems) program_exit(EXIT_USAGE);
}

static inline void changes_open(AppliedChanges *a, const Options *o, const TensorList *list, DataLoader *loader,
                                int64_t step, uint64_t next_window) {
    char wrong[200];
    uint64_t windows = (uint64_t)(o->total_batch / loader->T);
    a->tensors = list;
    if (!o->change) return;
    changes_parse(&a->changes, o->change, wrong);
    a->rates.ranges = (RateRange *)checked_calloc((size_t)list->count * CHANGES_LIMIT, sizeof(RateRange));
    for (int i = 0; i < a->changes.count; i++) {
        const Change *c = &a->changes.all[i];
        if (!change_moves(c)) continue;
        uint64_t first = next_window + (uint64_t)(c->first - step - 1) * windows;
        bool reverse = c->kind == CHANGE_ORDER;
        uint64_t high = reverse ? windows - 1 : (uint64_t)c->high;
        a->moves[loader->move_count++] = (WindowMove){first + (uint64_t)c->low, first + high, windows, reverse};
    }
    loader->moves = a->moves;
}

static inline void change_reset_moments(ModelState *s, const Tensor *t, RateRange range) {
    s->rates = (Rates){1, &range};
    for (RankPiece p = rank_pieces(s, t); rank_next(s, t, &p);) {
        if (p.rate != 0) continue;
        buffer_zero(p.m, p.count * sizeof(real));
        if (p.v) buffer_zero(p.v, p.count * sizeof(real));
    }
    bool whole = range.begin <= t->offset && t->offset + t->count <= range.end;
    if (t->rows && whole) buffer_zero(s->v + t->moment2_at[s->plan->sharding.level > 0], t->rows * sizeof(real));
}

static inline void changes_update(AppliedChanges *a, ModelState *s, int64_t step) {
    a->rates.count = 0;
    for (int i = 0; i < a->changes.count; i++) {
        const Change *c = &a->changes.all[i];
        bool rate = c->kind == CHANGE_RATE;
        if (!change_active(c, step) || (!rate && c->kind != CHANGE_MOMENTS)) continue;
        for (int k = 0; k < a->tensors->count; k++) {
            RateRange range;
            if (!change_range(c, &a->tensors->tensors[k], &range)) continue;
            if (rate) a->rates.ranges[a->rates.count++] = range;
            else change_reset_moments(s, &a->tensors->tensors[k], range);
        }
    }
    s->rates = a->rates;
}

static inline double changes_norm(const AppliedChanges *a, int64_t step) {
    double most = INFINITY;
    for (int i = 0; i < a->changes.count; i++) {
        const Change *c = &a->changes.all[i];
        if (c->kind == CHANGE_NORM && change_active(c, step)) most = fmin(most, c->value);
    }
    return most;
}

// Writes the option with which a resume replaces this window in the update of `step`. The option keeps the changes of
// this and later steps.
static inline void changes_past_window(const AppliedChanges *a, int64_t step, uint64_t window, char *text,
                                       size_t size) {
    size_t length = (size_t)snprintf(text, size, "--change '");
    for (int i = 0; i < a->changes.count && length < size; i++) {
        const Change *c = &a->changes.all[i];
        char steps[48] = "";
        if (c->last < step) continue;
        if (c->first < step) FORMAT(steps, "%" PRId64 "-%" PRId64, step, c->last);
        length +=
            (size_t)snprintf(text + length, size - length, "%s%s ", steps, *steps ? strchr(c->text, ':') : c->text);
    }
    if (length < size)
        snprintf(text + length, size - length, "%" PRId64 ":replace=%" PRIu64 "-%" PRIu64 "'", step, window, window);
}

// The shard and first token of a window that the change replaces or moves.
static inline cJSON *change_window(const DataLoader *l, uint64_t index) {
    CorpusWindow at = dataloader_locate(l, index);
    const Shard *s = &l->shards[dataloader_shard(l, at)];
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "file", s->path);
    json_add_u64(json, "first_token", (at.window - s->first_window) * (uint64_t)l->T);
    return json;
}

static inline void log_changes(Log *log, int64_t step, const AppliedChanges *a, const DataLoader *loader) {
    int move = 0;
    for (int i = 0; i < a->changes.count; i++) {
        const Change *c = &a->changes.all[i];
        const WindowMove *m = change_moves(c) ? &a->moves[move++] : NULL;
        if (c->first != step) continue;
        cJSON *record = cJSON_CreateObject();
        cJSON_AddStringToObject(record, "kind", "event");
        json_add_u64(record, "step", (uint64_t)step);
        cJSON_AddStringToObject(record, "what", "change");
        cJSON_AddStringToObject(record, "change", c->text);
        cJSON *windows = m ? cJSON_AddArrayToObject(record, "windows") : NULL;
        for (uint64_t w = m ? m->first : 1; w <= (m ? m->last : 0); w++)
            cJSON_AddItemToArray(windows, change_window(loader, w));
        log_record(log, record);
        cJSON_Delete(record);
    }
}

static inline void changes_close(AppliedChanges *a) { free(a->rates.ranges); }
