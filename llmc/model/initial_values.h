/*
initial_values.h: initial values of the parameters: a function of (seed, tensor name, element) alone, so that they
depend neither on the number of ranks nor on the precision.
*/
#pragma once
#include "../base/random.h"
#include "plan.h"

// Elements of a tensor that are drawn at a time; tests make it small (tests/small_sizes.h).
#ifndef INIT_CHUNK
#define INIT_CHUNK ((size_t)1 << 20)
#endif

static inline void init_scale(const Tensor *t, const ModelConfig *c, double *mean, double *std) {
    Init init = t->row->init;
    *mean = init == INIT_ONE ? 1 : init == INIT_LAMBDA && c->attention->factor == S_LINEAR ? lambda_init(t->layer) : 0;
    *std = init == INIT_RESIDUAL ? 0.02 / sqrt(2.0 * c->L) : init == INIT_NORMAL ? 0.02 : init == INIT_WIDE ? 0.1 : 0;
    double factor = scaling_of(c, t->row->kind).init;
    *mean *= factor, *std *= factor;
}

// Uploads elements begin .. begin+count-1 of a tensor to a buffer of all groups, or with a sharding to its pieces.
static inline void init_upload(void *to, const void *host, const Sharding *mine, const Tensor *t, size_t begin,
                               size_t count, size_t element_bytes) {
    for (RankRange r = sharding_ranges(mine, t); sharding_next(mine, t, &r);) {
        size_t low = max_size(begin, r.begin), high = min_size(begin + count, r.begin + r.count);
        if (low < high)
            buffer_upload((char *)to + (r.compact_at + (low - r.begin)) * element_bytes,
                          (const char *)host + (low - begin) * element_bytes, (high - low) * element_bytes);
    }
}

// Fills params [tensors.buffer_count] (with --zero 3 this rank's own pieces) and, unless it is NULL, master (with
// --zero this rank's own pieces).
static inline void model_init(const ModelPlan *plan, floatX *params, real *master, uint64_t seed) {
    const Sharding *mine = plan->sharding.level ? &plan->sharding : NULL, *part = params_two_layers(plan) ? mine : NULL;
    floatX *host = (floatX *)checked_calloc(INIT_CHUNK, sizeof(floatX));
    real *exact = (real *)checked_calloc(INIT_CHUNK, sizeof(real));
    for (int i = 0; i < plan->tensors.count; i++) {
        const Tensor *t = &plan->tensors.tensors[i];
        uint64_t key = random_key(t->name, seed);
        double mean, std;
        init_scale(t, &plan->config, &mean, &std);
        for (size_t begin = 0; begin < t->count; begin += INIT_CHUNK) {
            size_t count = min_size(INIT_CHUNK, t->count - begin);
#pragma omp parallel for schedule(static)
            for (size_t e = 0; e < count; e++) {
                float value = (float)(mean + (std > 0 ? std * random_normal(key, begin + e) : 0));
                exact[e] = (real)value;
                host[e] = (floatX)value;
            }
            init_upload(params, host, part, t, begin, count, sizeof(floatX));
            if (master) init_upload(master, exact, mine, t, begin, count, sizeof(real));
        }
    }
    free(exact);
    free(host);
}
