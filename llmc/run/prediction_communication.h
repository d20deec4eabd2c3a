/*
prediction_communication.h: what the ranks of a predicted step exchange, and how much of that computation hides. Part of
prediction.h, which includes it.

The backward's groups of gradients enter one queue of rings as they are complete, bucket by bucket, and so do the
parameters of an update. What the computation waits for is exposed.
*/
#ifndef LLMC_PREDICTION_COMMUNICATION_H
#define LLMC_PREDICTION_COMMUNICATION_H

// GB/s of a ring; *by_network: where the machines' network bounds it.
static double ring_gbs(const Prediction *p, bool *by_network) {
    int ranks = p->model->sharding.ranks, here = min_int(ranks, device_ranks_here(p->device));
    double link = p->device->link_gbs * p->assumed[ASSUME_LINK];
    double network = here * p->assumed[ASSUME_NETWORK]; // rings leave a machine by the ports of all its GPUs
    *by_network = ranks > here && network < link;
    return p->options->link_gbs > 0 ? p->options->link_gbs : *by_network ? network : link;
}

// Of a ring over a bucket of so many bytes.
typedef struct {
    double ms, link_ms, network_ms; // in all; of that, latency of the hops within and between machines
} Ring;
static Ring ring_of(const Prediction *p, double bytes) {
    int ranks = p->model->sharding.ranks, here = min_int(ranks, device_ranks_here(p->device)),
        machines = (ranks + here - 1) / here;
    bool by_network;
    double us = 1e-3 * p->assumed[ASSUME_HOPS], most = ring_gbs(p, &by_network);
    Ring best = {INFINITY, 0, 0};
    for (int i = 0; i < RING_PROTOCOL_COUNT; i++) {
        const RingProtocol *r = &ring_protocols[i];
        double gbs = most * r->share, hop = p->device->link_gbs < 100 ? r->pci_us : r->link_us;
        if (machines > 1 && r->most_gbs > 0) gbs = fmin(gbs, r->most_gbs);
        Ring ring = {0, us * (r->base_us + (ranks - machines) * hop), us * (machines - 1) * r->network_us};
        ring.ms = ring.link_ms + ring.network_ms + 1e-6 * bytes * (ranks - 1) / ranks / gbs;
        if (ring.ms < best.ms) best = ring;
    }
    return best;
}

// Milliseconds of the collectives of a group, bucket by bucket.
static double group_ms(Prediction *p, int group, size_t element_bytes, int collectives) {
    const Sharding *s = &p->model->sharding;
    double sum = 0;
    for (int i = s->first[group]; i < s->first[group + 1]; i++) {
        Ring ring = ring_of(p, (double)(s->buckets[i].piece * (size_t)s->ranks * element_bytes));
        sum += collectives * ring.ms;
        p->link_hops_ms += collectives * ring.link_ms, p->network_hops_ms += collectives * ring.network_ms;
    }
    return sum;
}

// A backward whose groups enter the queue: milliseconds beyond its own, until all but `hidden` of the queue is done.
static double predict_reduction(Prediction *p, double hidden) {
    const Sharding *s = &p->model->sharding;
    int L = p->model->config.L;
    double layer = p->part_ms[PART_LAYER_BACKWARD] + p->part_ms[PART_RECOMPUTE] * (L - 1) / L, now = 0, queue = 0,
           work = 0;
    double *done = (double *)checked_calloc((size_t)s->groups, sizeof(double));
    for (int g = L + 1; g >= 0; g--) {
        // with --zero 2 a layer has the place of the layer behind the next one
        if (s->level == 2 && g > 0 && g + 2 < L + 1) now = fmax(now, done[g + 2]);
        now += g > L ? 0 : g ? layer : p->part_ms[PART_EMBED_BACKWARD];
        double ms = group_ms(p, g, FP32_BYTES, s->level ? 1 : 2); // --zero 0 gathers the sums, too
        work += ms, queue = fmax(queue, now) + ms, done[g] = queue;
    }
    free(done);
    p->reduce_ms += work;
    return now - L * layer - p->part_ms[PART_EMBED_BACKWARD] + fmax(0, queue - now - hidden);
}

// The parameters of an update, gathered in the order of the groups while the update and the next forward go on.
static double predict_gathering(Prediction *p) {
    const ModelPlan *m = p->model;
    int L = m->config.L;
    double update = p->part_ms[PART_UPDATE], updated = 0, queue = 0, now = update;
    for (int g = 0; g < L + 2; g++) {
        const size_t *at = m->tensors.group_offset;
        updated += update * (double)(at[g + 1] - at[g]) / (double)m->tensors.buffer_count;
        double ms = group_ms(p, g, FLOATX_BYTES, 1);
        p->gather_ms += ms;
        queue = fmax(queue, updated) + ms;
        now = fmax(now, queue) + (g == 0 ? p->part_ms[PART_EMBED] : g <= L ? p->part_ms[PART_LAYER] : 0);
    }
    return now - update - p->part_ms[PART_EMBED] - L * p->part_ms[PART_LAYER];
}

static void predict_communication(Prediction *p) {
    if (p->model->sharding.ranks == 1) return;
    double forward = p->part_ms[PART_EMBED] + p->model->config.L * p->part_ms[PART_LAYER] + p->part_ms[PART_HEAD];
    double exposed = predict_reduction(p, 0);
    if (p->model->sharding.level == 2 && p->micro_steps > 1) { // the other micro-steps', which the next forward hides
        Prediction other = *p;
        exposed += (p->micro_steps - 1) * predict_reduction(&other, forward);
        p->reduce_ms *= p->micro_steps, p->link_hops_ms *= p->micro_steps, p->network_hops_ms *= p->micro_steps;
    }
    if (p->model->sharding.level) exposed += predict_gathering(p);
    double hidden = fmax(0, p->reduce_ms + p->gather_ms - exposed);
    p->exposed_ms = p->class_ms[CLASS_COMMUNICATION] = p->bound_ms[BOUND_COMMUNICATION] =
        exposed + p->assumed[ASSUME_OVERLAP] * hidden;
}
#endif
