/*
routing.h: the shape of a routing: each of N tokens with C elements goes to K of E experts.
*/
#pragma once

enum { MAX_EXPERTS = 1024, MAX_EXPERTS_ACTIVE = 64 };

typedef struct {
    int N, C, E, K;
} Routing;
