/*
state.h: a model's parameters on this rank, their gradients and optimizer state. It hides how these are sharded
over the ranks (--zero, sharding.h), and the rounded copies of weights (--matmul-dtype).

A group of tensors moves together: group 0 is before the layers, 1 + l is layer l, L + 1 is after the layers.

  param(s, kind, l), grad(s, kind, l)   a tensor of layer l, or of the whole model; NULL: there is none
  linear_of(s, kind, l), experts_of     a linear layer with its weight, gradient and copy

  Forward and backward, where l = -1 is the group before the layers and L the one after them:
    forward_begin(s)        starts to gather the first layers
    layer_params(s, l)      waits for the parameters, then makes the copies of its linear layers if they are not current
    layer_done(s, l, way)   parameters of layer l are no longer needed; with --zero 3 starts to gather layer
                            l + 2 * way, where way is 1 in the forward and -1 in the backward
    grads_begin(s, micro, last)   before a micro-step of an update
    grads_open(s, l)        waits until gradients can be written, and zeroes the ones that operations add to
    grads_close(s, l)       gradients are complete: starts to sum them over the ranks
  Update:
    rank_squares(s, squares)   waits for the summed gradients; squares of this rank's pieces
    rank_pieces, rank_next  the pieces of a tensor that this rank updates, each with one rate
    layer_orthogonalize(s, l, beta2)   Muon: orthogonalizes the directions of a layer's matrices into their gradients
    params_updated(s, i)    span i of the tensors is updated: starts to gather its group when it is complete
  Otherwise:
    params_changed(s)       parameters were loaded or restored
    params_await(s)         waits until this rank has all parameters, with --zero 3 the parameters in transfer
    follow_forward(s)       a rank without rows takes part in a forward of the other ranks

  --zero 3   layer l is in place l % 2. An update gathers the first two layers; the others are gathered when a layer in
             their place is done
*/
#pragma once
#include "../ops/measure/operations.h"
#include "activations.h"
#include "linear_layers.h"

// Elements begin .. end-1 of a buffer of all tensors; their rate is multiplied (--change).
typedef struct {
    size_t begin, end;
    double factor;
} RateRange;
typedef struct {
    int count;
    RateRange *ranges;
} Rates;

typedef struct {
    const ModelPlan *plan;
    floatX *params;     // [tensors.buffer_count]; with --zero 3: ends, two layers, rank_params (plan.h)
    grad_t *grads;      // [tensors.buffer_count]; from --zero 2 on: ends, two layers, rank_grads (plan.h)
    real *m, *v;        // moments of Adam; from --zero 1 on only this rank's own pieces. Muon: muon_plan.h
    floatX *directions; // Muon: directions of the matrices of a layer, in its layout; else NULL
    real *master;       // unrounded weights, with m's layout; params are rounded. NULL if floatX is as wide as real
    double *rank_sums;  // device memory of rank_squares: [buckets]
    double *grad_square_sums; // [buckets][ranks]: sums of squares of the pieces of the summed gradients
    int micro_step; // number in the update: the backward of micro-step 0 writes the gradients, the others add to them
    bool reduce;    // this micro-step's backward sums the gradients over the ranks of a rank group (--zero-group)
    bool last_micro_step; // the sum then includes all other rank groups
    Rates rates;          // factors of the rates in the next update
    // private to this file, but checkpoints read rank_params
    WeightCopies copies;
    grad_t **group_grads; // [groups]: where the gradients of each group are
    grad_t *rank_grads;   // from --zero 2 on: this rank's own pieces, summed over ranks and micro-steps; else NULL
    floatX *rank_params;  // --zero 3: this rank's own pieces; else NULL
    int held[2];          // --zero 3: the layer whose parameters are in each place, or on their way; -1: none
    uint64_t *reduced, *gathered; // [groups]: tickets of the collectives on a group's gradients and parameters
} ModelState;

typedef void (*LayerVisit)(void *data, int layer); // what a forward calls after each layer

// ---- tensors and linear layers

static inline floatX *param(const ModelState *s, TensorKind kind, int l) {
    const Tensor *t = tensor_of(&s->plan->tensors, kind, l);
    return t ? s->params + param_place(s->plan, t) : NULL;
}
static inline grad_t *tensor_grad(const ModelState *s, const Tensor *t) {
    return s->group_grads[t->layer + 1] + (t->offset - s->plan->tensors.group_offset[t->layer + 1]);
}
static inline grad_t *grad(const ModelState *s, TensorKind kind, int l) {
    const Tensor *t = s->grads ? tensor_of(&s->plan->tensors, kind, l) : NULL;
    return t ? tensor_grad(s, t) : NULL;
}

// The linear layer of block l, or of the model.
static inline Linear linear_of(const ModelState *s, LinearKind kind, int l) {
    Linear w = linear_at(s->plan, s->params, &s->copies, kind, l);
    w.dweight = grad(s, linear_weight(s->plan, kind), l);
    return w;
}
static inline ExpertLinear experts_of(const ModelState *s, LinearKind kind, int l) {
    ExpertLinear w = expert_linear_at(s->plan, s->params, &s->copies, kind, l);
    w.first = linear_of(s, kind, l);
    return w;
}

// ---- memory

// Allocates the buffers of a plan. shared: the state whose parameters this state uses, or NULL.
static inline void state_alloc(ModelState *s, const ModelPlan *plan, const ModelState *shared) {
    size_t groups = (size_t)plan->sharding.groups;
    memset(s, 0, sizeof(*s));
    s->plan = plan;
    s->group_grads = (grad_t **)checked_calloc(groups, sizeof(grad_t *));
    s->reduced = (uint64_t *)checked_calloc(groups, sizeof(uint64_t));
    s->gathered = (uint64_t *)checked_calloc(groups, sizeof(uint64_t));
    s->grad_square_sums = (double *)checked_calloc((size_t)plan->sharding.count * plan->sharding.ranks, sizeof(double));
    s->held[0] = s->held[1] = -1;
    s->params = shared ? shared->params : (floatX *)buffer_alloc(plan->params_bytes, "parameters");
    if (plan->purpose == FOR_TRAINING) {
        s->grads = (grad_t *)buffer_alloc(plan->grads_bytes, "gradients");
        for (int g = 0; g < plan->sharding.groups; g++) s->group_grads[g] = s->grads + grads_place(plan, g);
        if (grads_two_layers(plan)) s->rank_grads = s->grads + grads_groups_count(plan);
        if (params_two_layers(plan)) s->rank_params = s->params + group_places_count(&plan->tensors, true);
        s->m = (real *)buffer_alloc(plan->moments_bytes, "optimizer states");
        s->v = s->m + (plan->moments_bytes / sizeof(real) - plan->moment2_count);
        if (plan->directions_bytes) s->directions = (floatX *)buffer_alloc(plan->directions_bytes, "directions (Muon)");
        if (plan->master_bytes) s->master = (real *)buffer_alloc(plan->master_bytes, "master weights");
    }
    s->copies = weight_copies_alloc(plan);
}

static inline void state_free(ModelState *s, bool owns_params) {
    if (owns_params) buffer_free(s->params);
    buffer_free(s->grads);
    buffer_free(s->m);
    buffer_free(s->directions);
    buffer_free(s->master);
    weight_copies_free(&s->copies);
    free(s->group_grads);
    free(s->reduced);
    free(s->gathered);
    free(s->grad_square_sums);
    memset(s, 0, sizeof(*s));
}

// ---- parameters of other ranks

static inline void params_gather(ModelState *s, int group) {
    floatX *place = s->params + params_place(s->plan, group);
    s->gathered[group] = sharding_gather(&s->plan->sharding, group, place, s->rank_params, sizeof(floatX));
}

// --zero 3: starts to gather the parameters of layer l, unless they are already in their place.
static inline void params_fetch(ModelState *s, int l) {
    if (!params_two_layers(s->plan) || l < 0 || l >= s->plan->config.L || s->held[l % 2] == l) return;
    s->held[l % 2] = l;
    weight_copies_drop(&s->copies, l);
    params_gather(s, 1 + l);
}

// Gathers a group after this rank's pieces have changed. With --zero 3 only the first two layers are gathered now.
static inline void params_renew(ModelState *s, int group) {
    int l = group - 1;
    bool layer = params_two_layers(s->plan) && l >= 0 && l < s->plan->config.L;
    if (layer && l >= 2) return;
    if (layer) s->held[l] = l;
    params_gather(s, group);
}

static inline void params_changed(ModelState *s) {
    weight_copies_forget(&s->copies, s->plan);
    for (int g = 0; g < s->plan->sharding.groups && params_two_layers(s->plan); g++) params_renew(s, g);
}

static inline void params_await(const ModelState *s) {
    for (int g = 0; g < s->plan->sharding.groups; g++) comm_wait(s->gathered[g]);
}

static inline void layer_params(ModelState *s, int l) {
    comm_wait(s->gathered[1 + l]);
    if (l >= 0) weight_copies_refresh(&s->copies, s->plan, s->params, l);
}
static inline void layer_done(ModelState *s, int l, int way) { params_fetch(s, l + 2 * way); }

static inline void forward_begin(ModelState *s) {
    params_fetch(s, 0);
    params_fetch(s, 1);
}

static inline void follow_forward(ModelState *s) {
    if (!params_two_layers(s->plan)) return;
    params_fetch(s, 0);
    params_fetch(s, 1);
    for (int l = 0; l < s->plan->config.L; l++) {
        comm_wait(s->gathered[1 + l]);
        params_fetch(s, l + 2);
    }
}

// ---- gradients

// Called before micro-step `micro` of an update. The backward of the last micro-step sums the gradients over the ranks;
// from --zero 2 on, the backward of each micro-step does.
static inline void grads_begin(ModelState *s, int micro, bool last) {
    s->micro_step = micro;
    s->reduce = comm_ranks() > 1 && (last || s->rank_grads);
    s->last_micro_step = last;
}

// Whether the backward adds to the gradients. From --zero 2 on it writes them in every micro-step, and rank_grads sums
// them.
static inline bool grads_add(const ModelState *s) { return s->micro_step > 0 && !grads_two_layers(s->plan); }

// From --zero 2 on waits until the gradients that were in the same place have been summed.
static inline void grads_await_place(ModelState *s, int group) {
    const size_t *at = s->plan->tensors.group_offset;
    int last = s->plan->config.L + 1;
    bool end = (group == 0 || group == last) && grads_ends_share(s->plan);
    comm_wait(s->reduced[group]);
    if (group > 0 && group + 2 < last) comm_wait(s->reduced[group + 2]);
    if (end) comm_wait(s->reduced[last - group]);
    // the norm includes the padding between tensors, which held gradients of a group of another shape
    if (end || s->plan->config.yoco || s->plan->config.dense_layers)
        buffer_zero(s->group_grads[group], (at[group + 1] - at[group]) * sizeof(grad_t));
}

// Matrix products write their gradients; other operations add to them.
static inline void grads_open(ModelState *s, int l) {
    const TensorList *list = &s->plan->tensors;
    assert(l >= -1 && l <= s->plan->config.L);
    if (grads_two_layers(s->plan)) grads_await_place(s, 1 + l);
    for (int i = 0; i < list->span_count && !grads_add(s); i++) {
        const Tensor *t = &list->spans[i];
        if (t->layer == l && !is_product_weight(s->plan, t)) buffer_zero(tensor_grad(s, t), t->count * sizeof(grad_t));
    }
}

// This rank's piece of a bucket of gradients, which receives the sum over all ranks.
static inline grad_t *rank_bucket(const ModelState *s, const Bucket *b) {
    const Sharding *sharding = &s->plan->sharding;
    if (s->rank_grads) return s->rank_grads + b->begin / (size_t)sharding->ranks;
    return s->group_grads[b->group] + (b->begin - s->plan->tensors.group_offset[b->group]) +
           (size_t)sharding->rank * b->piece;
}

// Starts the sum, which runs while the backward continues.
static inline void grads_close(ModelState *s, int l) {
    const Sharding *sharding = &s->plan->sharding;
    int group = 1 + l;
    if (!s->reduce) return;
    for (int i = sharding->first[group]; i < sharding->first[group + 1]; i++) {
        const Bucket *b = &sharding->buckets[i];
        grad_t *bucket = s->group_grads[group] + (b->begin - s->plan->tensors.group_offset[group]);
        bool add = s->rank_grads && s->micro_step > 0;
        s->reduced[group] = comm_reduce_scatter(bucket, b->piece, rank_bucket(s, b), add, s->last_micro_step);
        if (sharding->level == 0)
            s->reduced[group] = comm_all_gather(bucket, rank_bucket(s, b), b->piece * sizeof(grad_t));
    }
}

enum { AGREED_NUMBERS = 5 }; // numbers that the ranks exchange in each step, besides the squares
// squares [buckets]
static inline void rank_squares(const ModelState *s, double *squares) {
    const Sharding *sharding = &s->plan->sharding;
    for (int g = 0; g < sharding->groups; g++) comm_wait(s->reduced[g]);
    for (int i = 0; i < sharding->count; i++)
        sum_of_squares(s->rank_sums + i, rank_bucket(s, &sharding->buckets[i]), sharding->buckets[i].piece);
    buffer_download(squares, s->rank_sums, (size_t)sharding->count * sizeof(double));
}

// Norm of the gradients of groups first .. last. It sums the squares of all pieces in the same order on all ranks, and
// is NaN or infinite if an element is.
static inline double squares_norm(const ModelState *s, int first, int last) {
    const Sharding *sharding = &s->plan->sharding;
    double sum = 0;
    for (int i = sharding->first[first] * sharding->ranks; i < sharding->first[last + 1] * sharding->ranks; i++)
        sum += s->grad_square_sums[i];
    return sqrt(sum);
}

// ---- update

// A part of a tensor that this rank updates.
typedef struct {
    floatX *weights;
    real *master, *m, *v; // master: NULL where the model has none; v: only for AdamW's tensors
    const grad_t *grads;  // summed over the ranks; for Muon's tensors, layer_orthogonalize replaces them by the step
    floatX *direction;    // only for Muon's tensors
    size_t begin, count;  // elements within the tensor
    double rate;          // factor of the learning rate
    RankRange range;      // private, as is `rest`
    size_t rest;          // elements of the range behind this piece
} RankPiece;

// for (RankPiece p = rank_pieces(s, t); rank_next(s, t, &p);)
static inline RankPiece rank_pieces(const ModelState *s, const Tensor *t) {
    RankPiece p;
    memset(&p, 0, sizeof(p));
    p.range = sharding_ranges(s->plan->sharding.level ? &s->plan->sharding : NULL, t);
    return p;
}
static inline bool rank_next(const ModelState *s, const Tensor *t, RankPiece *p) {
    RankRange *r = &p->range; // at level 0 every rank updates everything
    if (p->rest == 0) {
        if (!sharding_next(s->plan->sharding.level ? &s->plan->sharding : NULL, t, r)) return false;
        p->rest = r->count;
    }
    size_t done = r->count - p->rest, at = r->at + done, compact = r->compact_at + done,
           first = t->offset + r->begin + done;
    p->begin = r->begin + done, p->count = p->rest, p->rate = 1;
    for (int i = 0; i < s->rates.count; i++) {
        const RateRange *range = &s->rates.ranges[i];
        bool inside = first >= range->begin && first < range->end;
        if (inside) p->rate *= range->factor;
        if (inside || first < range->begin) p->count = min_size(p->count, (inside ? range->end : range->begin) - first);
    }
    p->rest -= p->count;
    p->weights = s->rank_params ? s->rank_params + compact : s->params + at;
    p->grads = s->rank_grads ? s->rank_grads + compact : s->grads + at;
    p->master = s->master ? s->master + compact : NULL;
    p->m = s->m + compact;
    p->v = t->muon ? NULL : s->v + compact - t->moment2_at[s->plan->sharding.level > 0];
    p->direction = t->muon ? s->directions + (at - s->plan->tensors.group_offset[t->layer + 1]) : NULL;
    return true;
}

// Replaces the gradients of layer l's matrices by Muon's step, from this rank's pieces of their directions: gathers the
// directions, orthogonalizes the matrices of this rank, and sums the ranks' results. An element is 0 on all ranks but
// the owner, so the sum has the owner's bits.
static inline void layer_orthogonalize(ModelState *s, int l, double beta2) {
    const ModelPlan *plan = s->plan;
    const Sharding *sharding = &plan->sharding;
    const int group = 1 + l, level = sharding->level;
    const size_t begin = plan->tensors.group_offset[group], end = plan->tensors.group_offset[group + 1];
    grad_t *steps = s->group_grads[group];
    uint64_t ticket = 0;
    if (level) comm_wait(sharding_gather(sharding, group, s->directions, NULL, sizeof(floatX)));
    if (sharding->ranks > 1) buffer_zero(steps, (end - begin) * sizeof(grad_t));
    for (int i = 0; i < plan->tensors.count; i++) {
        const Tensor *t = &plan->tensors.tensors[i];
        if (t->layer != l || !t->muon || t->owner != sharding->rank) continue;
        muon_orthogonalize(steps + (t->offset - begin), t->rows ? s->v + t->moment2_at[level > 0] : NULL,
                           s->directions + (t->offset - begin), muon_matrices(t), beta2);
        i += muon_matrices(t).count - 1;
    }
    for (int i = sharding->first[group]; i < sharding->first[group + 1] && sharding->ranks > 1; i++) {
        const Bucket *b = &sharding->buckets[i];
        grad_t *bucket = steps + (b->begin - begin);
        ticket = comm_reduce_scatter(bucket, b->piece, rank_bucket(s, b), false, false);
        if (level == 0) ticket = comm_all_gather(bucket, rank_bucket(s, b), b->piece * sizeof(grad_t));
    }
    comm_wait(ticket);
}

static inline void params_updated(ModelState *s, int span) {
    const Tensor *t = &s->plan->tensors.spans[span];
    if (!span_ends_group(&s->plan->tensors, span)) return;
    weight_copies_forget(&s->copies, s->plan);
    if (s->plan->sharding.level) params_renew(s, t->layer + 1);
}
