/*
prediction_communication.h: the predicted time of a collective: a ring over all ranks.
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
#endif
