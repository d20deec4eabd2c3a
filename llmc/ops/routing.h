/*
routing.h: the shape of a routing: each of N tokens with C elements goes to K of E experts.
*/
#ifndef LLMC_ROUTING_H
#define LLMC_ROUTING_H

enum { MAX_EXPERTS = 1024, MAX_EXPERTS_ACTIVE = 64 };

typedef struct {
    int N, C, E, K;
} Routing;
#endif
