/*
memory_parts.h: the memory of a process, part by part.

On a GPU this is device memory. The parts that the program allocates are exact; CUDA's and NCCL's parts are estimates.
*/
#pragma once
#include "../comm/comm.h"
#include "../model/activations.h"
#include "../ops/runtime.h"

enum { MEMORY_PARTS = 16 };

// Lists the parts that are not empty, and returns their number. `sampling`: the plan of the model that generates
// samples, or NULL.
static inline int memory_parts(const ModelPlan *plan, const ModelPlan *sampling, MemoryPart parts[MEMORY_PARTS]) {
    const MemoryPart all[] = {
        memory_part("parameters", plan->params_bytes, false),
        memory_part("gradients", plan->grads_bytes, false),
        memory_part("optimizer states", plan->moments_bytes, false),
        memory_part("master weights", plan->master_bytes, false),
        memory_part("directions of a layer (Muon)", plan->directions_bytes, false),
        memory_part("rounded copies of weights", plan->copies_bytes, false),
        memory_part("activations", plan->activations_bytes - plan->cache_bytes, false),
        memory_part("keys and values of earlier positions", plan->cache_bytes, false),
        memory_part("activations for samples", sampling ? sampling->activations_bytes - sampling->cache_bytes : 0,
                    false),
        memory_part("keys and values for samples", sampling ? sampling->cache_bytes : 0, false),
        memory_part("gradients received from other ranks", plan->received_bytes, false),
        memory_part("workspace", plan->workspace_bytes, false),
    };
    int count = 0;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i].bytes) parts[count++] = all[i];
    count += ops_memory_parts(parts + count);
    const char *comm_name = "";
    size_t comm_bytes = comm_library_bytes(plan_ranks(plan), &comm_name);
    if (comm_bytes) parts[count++] = memory_part(comm_name, comm_bytes, true);
    return count;
}

static inline size_t memory_total(const MemoryPart *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].bytes;
    return sum;
}

// Bytes of a whole process.
static inline size_t process_bytes(const ModelPlan *plan, const ModelPlan *sampling) {
    MemoryPart parts[MEMORY_PARTS];
    return memory_total(parts, memory_parts(plan, sampling, parts));
}

// The estimated part of the total: memory of CUDA and NCCL.
static inline size_t memory_estimated(const MemoryPart *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].about ? parts[i].bytes : 0;
    return sum;
}

static inline double in_mib(size_t bytes) { return (double)bytes / 1048576.0; }

// Prints the parts and their total.
static inline void print_memory_parts(const MemoryPart *parts, int count) {
    for (int i = 0; i < count; i++) printf("  %-44s %10.1f MiB\n", parts[i].what, in_mib(parts[i].bytes));
    printf("  %-44s %10.1f MiB\n", "total", in_mib(memory_total(parts, count)));
}
