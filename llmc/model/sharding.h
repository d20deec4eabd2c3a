// clang-format off
/*
sharding.h: the distribution of parameters, gradients and optimizer state over ranks (ZeRO). With --zero-group they are
distributed over the ranks of a group, and each group has the whole state, as in HSDP. Below, `ranks` is the size of a
group and `rank` the place in it.

Tensors form groups that become ready together: group 0 before the layers, 1 + l for layer l, L + 1 after the layers. A
group is divided into buckets, and a bucket into `ranks` equal pieces; rank r owns piece r. The tensor list pads groups
so that they divide evenly.

  level 0   every rank has all gradients and moments; gradients are reduced piece by piece, then gathered
  level 1   each rank has the moments and master weights of its pieces; gradients are reduced to their owner, and
            parameters are gathered
  level 2   as level 1, and gradients of complete groups exist only during the backward, two layers at a time
  level 3   as level 2, and each rank has the parameters of its pieces. The groups before and after the layers are
            gathered after an update, a layer when it computes, two layers at a time

A buffer of two layers has places for group 0, twice the largest layer, and group L + 1: layer l is in place l % 2. A
compact buffer has only a rank's pieces, in the order of the buckets. The piece of bucket b begins at b.begin / ranks,
which is exact, since buckets have no gaps.
  source    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; Zhao et al.
            2023, "PyTorch FSDP", for groups
*/
// clang-format on
#pragma once
#include "../comm/comm.h"
#include "tensors.h"

// The maximum number of elements of a bucket. A ring transfers a bucket in ranks - 1 steps of one piece each. A step
// has a latency of 3.4 us over NVLink and 14 us over a network (NCCL's src/graph/tuning.cc); with 8 GPUs per machine
// the mean is 5 us. A piece of 2 MiB takes 42 us at 50 GB/s, so latency is about a tenth. With few ranks a bucket has
// 32 MiB, which limits the memory of received pieces (comm_received_bytes). With many it has 256 MiB, more than most
// layers; groups of 8 then sum pieces of 32 MiB over the groups.
static inline size_t bucket_elements(int ranks) {
    const size_t piece = 512 << 10, least = 8 << 20, most = 64 << 20;
    return min_size(most, max_size(least, ranks * piece));
}
enum { ZERO_MOST = 3 }; // the highest level
#ifndef BUCKET_ELEMENTS
#define BUCKET_ELEMENTS bucket_elements // a function of the number of ranks
#endif

typedef struct {
    int group;
    size_t begin, piece; // elements begin .. begin + ranks*piece - 1 of the buffers
} Bucket;

typedef struct {
    int rank, ranks, level;
    int replicas; // groups of ranks that each have the whole state; the run has ranks * replicas
    int count, groups;
    Bucket *buckets;      // [count], in the order of the buffers
    int *first;           // [groups+1]: the first bucket of each group
    size_t largest;       // elements of the largest bucket
    size_t owned;         // elements that each rank owns
    size_t moment2_count; // this rank's elements of second moments; Muon has fewer (muon.h)
} Sharding;

typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON, OPTIMIZER_NORMUON } Optimizer;

// The place of a process in its run: each `group` ranks in a row share their state as --zero `zero` says. The optimizer
// decides what the state is.
typedef struct {
    int rank, ranks, group, zero;
    Optimizer optimizer;
} RunRanks;
static const RunRanks one_rank = {0, 1, 1, 0, OPTIMIZER_ADAMW};

static inline Sharding sharding_build(const TensorList *list, RunRanks r, size_t bucket_limit) {
    Sharding s;
    memset(&s, 0, sizeof(s));
    s.rank = r.rank % r.group, s.replicas = r.ranks / r.group;
    s.ranks = list->ranks, s.level = list->ranks > 1 ? r.zero : 0;
    s.groups = list->L + 2;
    s.owned = s.moment2_count = list->buffer_count / list->ranks;
    s.first = (int *)checked_calloc(s.groups + 1, sizeof(int));
    size_t step = list->ranks * TENSOR_ALIGN;
    // with one rank, a group is one bucket
    size_t limit = list->ranks == 1 ? list->buffer_count : max_size(step, bucket_limit / step * step);
    for (int pass = 0; pass < 2; pass++) { // counts, then fills
        s.count = 0;
        for (int g = 0; g < s.groups; g++) {
            s.first[g] = s.count;
            for (size_t at = list->group_offset[g], end = list->group_offset[g + 1]; at < end; s.count++) {
                size_t n = min_size(limit, end - at);
                s.largest = max_size(s.largest, n);
                if (pass) {
                    s.buckets[s.count].group = g;
                    s.buckets[s.count].begin = at;
                    s.buckets[s.count].piece = n / list->ranks;
                }
                at += n;
            }
        }
        s.first[s.groups] = s.count;
        if (!pass) s.buckets = (Bucket *)checked_calloc(s.count, sizeof(Bucket));
    }
    return s;
}

static inline void sharding_free(Sharding *s) {
    free(s->buckets);
    free(s->first);
    memset(s, 0, sizeof(*s));
}

// The first element of a group in a buffer of all groups, or of two layers.
static inline size_t group_place(const TensorList *list, int group, bool two_layers) {
    const size_t *at = list->group_offset;
    if (!two_layers || group == 0) return at[group];
    return at[1] + (size_t)(group == list->L + 1 ? min_int(list->L, 2) : (group - 1) % 2) * list->largest_layer;
}
static inline size_t group_places_count(const TensorList *list, bool two_layers) {
    const size_t *last = &list->group_offset[list->L + 1];
    return group_place(list, list->L + 1, two_layers) + (last[1] - last[0]);
}

// A part of a tensor that this rank owns, or the whole tensor.
typedef struct {
    int bucket;            // private; set by sharding_ranges
    size_t begin, count;   // elements within the tensor
    size_t at, compact_at; // its first element in a full buffer and in a compact one
} RankRange;

// for (RankRange r = sharding_ranges(s, t); sharding_next(s, t, &r);)
static inline RankRange sharding_ranges(const Sharding *s, const Tensor *t) {
    RankRange r;
    memset(&r, 0, sizeof(r));
    r.bucket = s ? s->first[t->layer + 1] - 1 : -1;
    return r;
}
static inline bool sharding_next(const Sharding *s, const Tensor *t, RankRange *r) {
    if (!s) { // without a sharding: the whole tensor
        r->count = t->count, r->at = r->compact_at = t->offset;
        return r->bucket++ < 0;
    }
    while (++r->bucket < s->first[t->layer + 2]) {
        const Bucket *b = &s->buckets[r->bucket];
        size_t piece = b->begin + s->rank * b->piece;
        size_t low = max_size(piece, t->offset), high = min_size(piece + b->piece, t->offset + t->count);
        if (low >= high) continue;
        r->begin = low - t->offset, r->count = high - low;
        r->at = low, r->compact_at = b->begin / s->ranks + (low - piece);
        return true;
    }
    return false;
}

// Starts to gather a group in place on all ranks. Each rank has its pieces there, or in the compact buffer `from`.
// Returns a ticket.
static inline uint64_t sharding_gather(const Sharding *s, int group, void *place, const void *from,
                                       size_t element_bytes) {
    uint64_t ticket = 0;
    for (int i = s->first[group]; s->ranks > 1 && i < s->first[group + 1]; i++) {
        const Bucket *b = &s->buckets[i];
        char *bucket = (char *)place + (b->begin - s->buckets[s->first[group]].begin) * element_bytes;
        size_t bytes = b->piece * element_bytes;
        const char *piece = from ? (const char *)from + b->begin / s->ranks * element_bytes : bucket + s->rank * bytes;
        ticket = comm_all_gather(bucket, piece, bytes);
    }
    return ticket;
}
// Gathers all groups of a buffer that has all groups and in which each rank has its pieces; waits.
static inline void sharding_gather_all(const Sharding *s, void *buffer, size_t element_bytes) {
    for (int g = 0; g < s->groups; g++) {
        if (s->first[g] == s->first[g + 1]) continue;
        char *place = (char *)buffer + s->buckets[s->first[g]].begin * element_bytes;
        comm_wait(sharding_gather(s, g, place, NULL, element_bytes));
    }
}
