/*
prediction_communication.h: the predicted time of a collective: a ring over the ranks of a group (--zero-group), or over
the ranks with the same place in all groups.
*/
#pragma once
#include "prediction_types.h"

// The ranks of a ring, and those of one machine.
typedef struct {
    int ranks, here;
} RingSpan;
static inline RingSpan ring_in_group(const Prediction *p) {
    int ranks = p->plan->sharding.ranks;
    return (RingSpan){ranks, min_int(ranks, device_ranks_here(p->device))};
}
static inline RingSpan ring_across_groups(const Prediction *p) {
    int ranks = p->plan->sharding.replicas, here = device_ranks_here(p->device) / p->plan->sharding.ranks;
    return (RingSpan){ranks, min_int(ranks, max_int(1, here))};
}
static inline RingSpan ring_of_all(const Prediction *p) {
    int ranks = plan_ranks(p->plan);
    return (RingSpan){ranks, min_int(ranks, device_ranks_here(p->device))};
}
static inline int ring_machines(RingSpan s) { return (s.ranks + s.here - 1) / s.here; }

// GB/s of a ring. *by_network: whether the network between machines limits it.
static inline double ring_gbs(const Prediction *p, RingSpan s, bool *by_network) {
    double link = p->device->link_gbs * p->assumed[ASSUME_LINK];
    double network = s.here * p->assumed[ASSUME_NETWORK]; // rings use the network ports of all their GPUs of a machine
    *by_network = s.ranks > s.here && network < link;
    return p->options->link_gbs > 0 ? p->options->link_gbs : *by_network ? network : link;
}

typedef struct {
    double ms, link_ms, network_ms; // total; latency of the hops within and between machines
} Ring;

// A collective over a bucket of so many bytes, with the fastest of NCCL's protocols.
static inline Ring ring_of(const Prediction *p, RingSpan s, double bytes) {
    int machines = ring_machines(s);
    bool by_network;
    double us = 1e-3 * p->assumed[ASSUME_HOPS], most = ring_gbs(p, s, &by_network);
    Ring best = {INFINITY, 0, 0};
    for (int i = 0; i < RING_PROTOCOL_COUNT; i++) {
        const RingProtocol *r = &ring_protocols[i];
        double gbs = most * r->share, hop = p->device->link_gbs < 100 ? r->pci_us : r->link_us;
        if (machines > 1 && r->most_gbs > 0) gbs = fmin(gbs, r->most_gbs);
        Ring ring = {0, us * (r->base_us + (s.ranks - machines) * hop), us * (machines - 1) * r->network_us};
        ring.ms = ring.link_ms + ring.network_ms + 1e-6 * bytes * (s.ranks - 1) / s.ranks / gbs;
        if (ring.ms < best.ms) best = ring;
    }
    return best;
}

// A sum of so many bytes that all get: scattered and gathered by rings, or by two binary trees (NCCL takes the faster).
static inline Ring all_reduce_of(const Prediction *p, RingSpan s, double bytes) {
    bool by_network;
    double us = 1e-3 * p->assumed[ASSUME_HOPS], gbs = TREE_SHARE * ring_gbs(p, s, &by_network);
    Ring ring = ring_of(p, s, bytes), tree = {0, us * (TREE_BASE_US + 2 * (s.here - 1) * TREE_LINK_US),
                                              us * 2 * ceil(log2(ring_machines(s))) * TREE_NETWORK_US};
    ring.ms *= 2, ring.link_ms *= 2, ring.network_ms *= 2;
    tree.ms = tree.link_ms + tree.network_ms + 2e-6 * bytes / gbs;
    return tree.ms < ring.ms ? tree : ring;
}
