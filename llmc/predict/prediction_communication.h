/*
prediction_communication.h: the collectives of a predicted step, and how much of their time computation hides.

Gradients are reduced group by group in the order in which the backward completes them, and parameters are gathered
group by group after the update; with --zero 3 a layer two layers ahead of its computation, in the forward and in the
backward. Each group is a sequence of buckets, and all rings run one after the other.
Communication is exposed when computation waits for it.
*/
#ifndef LLMC_PREDICTION_COMMUNICATION_H
#define LLMC_PREDICTION_COMMUNICATION_H
#include "prediction_types.h"

// GB/s of a ring. *by_network: whether the network between machines limits it.
static inline double ring_gbs(const Prediction *p, bool *by_network) {
    int ranks = p->plan->sharding.ranks, here = min_int(ranks, device_ranks_here(p->plan->device));
    double link = p->plan->device->link_gbs * p->assumed[ASSUME_LINK];
    double network = here * p->assumed[ASSUME_NETWORK]; // rings use the network ports of all GPUs of a machine
    *by_network = ranks > here && network < link;
    return p->options->link_gbs > 0 ? p->options->link_gbs : *by_network ? network : link;
}

typedef struct {
    double ms, link_ms, network_ms; // total; latency of the hops within and between machines
} Ring;

// A collective over a bucket of so many bytes, with the fastest of NCCL's protocols.
static inline Ring ring_of(const Prediction *p, double bytes) {
    int ranks = p->plan->sharding.ranks, here = min_int(ranks, device_ranks_here(p->plan->device)),
        machines = (ranks + here - 1) / here;
    bool by_network;
    double us = 1e-3 * p->assumed[ASSUME_HOPS], most = ring_gbs(p, &by_network);
    Ring best = {INFINITY, 0, 0};
    for (int i = 0; i < RING_PROTOCOL_COUNT; i++) {
        const RingProtocol *r = &ring_protocols[i];
        double gbs = most * r->share, hop = p->plan->device->link_gbs < 100 ? r->pci_us : r->link_us;
        if (machines > 1 && r->most_gbs > 0) gbs = fmin(gbs, r->most_gbs);
        Ring ring = {0, us * (r->base_us + (ranks - machines) * hop), us * (machines - 1) * r->network_us};
        ring.ms = ring.link_ms + ring.network_ms + 1e-6 * bytes * (ranks - 1) / ranks / gbs;
        if (ring.ms < best.ms) best = ring;
    }
    return best;
}

// Milliseconds of `collectives` collectives over every bucket of a group.
static inline double group_ms(Prediction *p, int group, size_t element_bytes, int collectives) {
    const Sharding *s = &p->plan->sharding;
    double sum = 0;
    for (int i = s->first[group]; i < s->first[group + 1]; i++) {
        Ring ring = ring_of(p, (double)(s->buckets[i].piece * s->ranks * element_bytes));
        sum += collectives * ring.ms;
        p->link_hops_ms += collectives * ring.link_ms, p->network_hops_ms += collectives * ring.network_ms;
    }
    return sum;
}

// With --zero 3 adds a gather of layer l, if there is one, to the queue at time `now`. Returns when it ends.
static inline double predict_fetch(Prediction *p, int l, double now, double *queue) {
    if (p->plan->sharding.level < 3 || l < 0 || l >= p->plan->config.L) return now;
    double ms = group_ms(p, 1 + l, FLOATX_BYTES, 1);
    p->gather_ms += ms;
    return *queue = fmax(*queue, now) + ms;
}

// Milliseconds by which gathering layers with --zero 3 prolongs a forward that finds the first two.
static inline double predict_forward_gathers(Prediction *p) {
    int L = p->plan->config.L;
    double layer = p->part_ms[PART_LAYER], now = 0, queue = 0, ready[2] = {0, 0};
    for (int l = 0; l < L; l++) {
        now = fmax(now, ready[l % 2]) + layer;
        ready[l % 2] = predict_fetch(p, l + 2, now, &queue);
    }
    return now - L * layer;
}

// Milliseconds by which the reduction of gradients prolongs a backward, when later computation hides `hidden` of it.
// With --zero 3 gathers of parameters come between the reductions.
static inline double predict_reduction(Prediction *p, double hidden) {
    const Sharding *s = &p->plan->sharding;
    int L = p->plan->config.L;
    double layer = p->part_ms[PART_LAYER_BACKWARD] + p->part_ms[PART_RECOMPUTE] * (L - 1) / L, now = 0, queue = 0,
           work = 0, ready[2] = {0, 0};
    double *done = (double *)checked_calloc(s->groups, sizeof(double));
    for (int g = L + 1; g >= 0; g--) {
        // from --zero 2 on the gradients of layers g and g + 2 share a buffer
        if (s->level >= 2 && g > 0 && g + 2 < L + 1) now = fmax(now, done[g + 2]);
        if (g > 0 && g <= L) now = fmax(now, ready[g % 2]);
        now += g > L ? 0 : g ? layer : p->part_ms[PART_EMBED_BACKWARD];
        if (g > 0 && g <= L) ready[g % 2] = predict_fetch(p, g - 3, now, &queue);
        double ms = group_ms(p, g, FP32_BYTES, s->level ? 1 : 2); // --zero 0 also gathers the sums
        work += ms, queue = fmax(queue, now) + ms, done[g] = queue;
    }
    free(done);
    p->reduce_ms += work;
    return now - L * layer - p->part_ms[PART_EMBED_BACKWARD] + fmax(0, queue - now - hidden);
}

// Milliseconds by which gathering the updated parameters prolongs the update and the next forward.
static inline double predict_gathering(Prediction *p) {
    const ModelPlan *m = p->plan;
    int L = m->config.L;
    double update = p->part_ms[PART_UPDATE], updated = 0, queue = 0, now = update;
    for (int g = 0; g < L + 2; g++) {
        const size_t *at = m->tensors.group_offset;
        updated += update * (double)(at[g + 1] - at[g]) / (double)m->tensors.buffer_count;
        bool later = p->plan->sharding.level >= 3 && g > 2 && g <= L; // when it computes
        double ms = later ? 0 : group_ms(p, g, FLOATX_BYTES, 1);
        p->gather_ms += ms;
        queue = fmax(queue, updated) + ms;
        now = fmax(now, queue) + (g == 0 ? p->part_ms[PART_EMBED] : g <= L ? p->part_ms[PART_LAYER] : 0);
    }
    return now - update - p->part_ms[PART_EMBED] - L * p->part_ms[PART_LAYER];
}

static inline void predict_communication(Prediction *p) {
    if (p->plan->sharding.ranks == 1) return;
    double forward = p->part_ms[PART_EMBED] + p->plan->config.L * p->part_ms[PART_LAYER] + p->part_ms[PART_HEAD];
    double ahead = predict_forward_gathers(p), hides = fmax(0, forward - p->gather_ms);
    double exposed = ahead + predict_reduction(p, 0);
    if (p->plan->sharding.level >= 2 && p->micro_steps > 1) { // the next forward hides those of earlier micro-steps
        Prediction other = *p;
        exposed += (p->micro_steps - 1) * (ahead + predict_reduction(&other, hides));
        p->reduce_ms *= p->micro_steps, p->gather_ms *= p->micro_steps;
        p->link_hops_ms *= p->micro_steps, p->network_hops_ms *= p->micro_steps;
    }
    if (p->plan->sharding.level) exposed += predict_gathering(p);
    double hidden = fmax(0, p->reduce_ms + p->gather_ms - exposed);
    p->exposed_ms = p->class_ms[CLASS_COMMUNICATION] = p->bound_ms[BOUND_COMMUNICATION] =
        exposed + p->assumed[ASSUME_OVERLAP] * hidden;
}
#endif
