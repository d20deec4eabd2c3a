/*
memory_report.h: the memory of a process (memory_parts.h) and the memory of the machine: for --dry-run, for the checks
at the start of a run, for the message of an allocation that fails, and for the log, after the first step.
*/
#pragma once
#include "../log/logger.h"
#include "../log/progress.h"
#include "../base/host.h"
#include "../checkpoint/checkpoint_background.h"
#include "../ops/runtime.h"
#include "memory_parts.h"

// Device memory available to a process: the free memory, and the part in use that the estimate already covers.
static inline size_t memory_available(const DeviceMemory *now, size_t estimated) {
    return now->total - now->used + min_size(now->used, estimated);
}

// Prints the size of the cache of a model for generation, before the first token, to stderr: stdout has the results.
static inline void print_cache(const ModelPlan *plan) {
    fprintf(stderr, "keys and values: %.1f MiB for %d sequence%s of up to %d positions\n", in_mib(plan->cache_bytes),
            plan->B, plan->B == 1 ? "" : "s", plan->T);
}

static inline void print_memory(const ModelPlan *plan, const ModelPlan *sampling) {
    MemoryPart parts[MEMORY_PARTS];
    int count = memory_parts(plan, sampling, parts);
    print_memory_parts(parts, count);
    size_t needed = memory_total(parts, count), on_host = ops_use_host_memory ? needed : 0;
    size_t copy = plan->purpose == FOR_TRAINING ? background_copy_bytes(&plan->sharding) : 0;
    DeviceMemory now;
    HostMemory host;
    if (copy) printf("  %-44s %10.1f MiB\n", "copy for checkpoints, in host memory", in_mib(copy));
    if (host_memory("", &host) && on_host + copy)
        printf("%s has %.1f MiB available: %s\n", host.limit, in_mib(host.available),
               on_host > host.available          ? "too little"
               : on_host + copy > host.available ? "enough, except for the copy: training waits while checkpoints are "
                                                   "written"
                                                 : "enough");
    if (!ops_memory(&now)) return;
    size_t available = memory_available(&now, memory_estimated(parts, count));
    printf("this device has %.1f MiB, of which %.1f MiB are free now: %s\n", in_mib(now.total),
           in_mib(now.total - now.used),
           needed <= available   ? "enough"
           : needed <= now.total ? "too little until other processes end"
                                 : "too little");
}

// ---- too little memory

static struct {
    const ModelPlan *plan, *sampling;
    int most_zero;
} announced; // the plans that are being allocated, and the highest --zero of the run

// Appends to the text how much a different batch size, recomputation or --zero would save, if it saves anything.
static inline void memory_offer(char *text, size_t size, size_t now, const char *option, int64_t value, int B,
                                Recompute recompute, int zero) {
    const ModelPlan *m = announced.plan;
    ModelPlan other;
    plan_build(&other, &m->config, B, m->T, m->purpose, recompute, plan_run_ranks(m, zero));
    size_t then = process_bytes(&other, announced.sampling), used = strlen(text);
    plan_free(&other);
    if (then < now)
        snprintf(text + used, size - used, "%s --%s %" PRId64 " (%.1f MiB)", strchr(text, '(') ? "," : "", option,
                 value, in_mib(now - then));
}

// Completes the message of an allocation that fails: the memory of the run, part by part, and the options that save
// memory.
static inline void memory_advice_text(char *text, size_t size) {
    const ModelPlan *m = announced.plan;
    MemoryPart parts[MEMORY_PARTS];
    int count = memory_parts(m, announced.sampling, parts);
    size_t now = memory_total(parts, count), used = 0;
    char offers[512] = "";
    used += snprintf(text, size, "the run needs %.1f MiB:", in_mib(now));
    for (int i = 0; i < count; i++)
        used += snprintf(text + used, size - used, "%s %s %.1f", i ? "," : "", parts[i].what, in_mib(parts[i].bytes));
    int level = m->sharding.level, B = m->B / 2;
    while (B > 0 && m->B % B) B--; // a divisor, so that --total-batch stays a multiple
    if (m->purpose == FOR_TRAINING) {
        for (int r = (int)m->recompute + 1; r <= RECOMPUTE_BLOCK; r++)
            memory_offer(offers, sizeof(offers), now, "recompute", r, m->B, (Recompute)r, level);
        for (int z = level + 1; z <= announced.most_zero && m->sharding.ranks > 1; z++)
            memory_offer(offers, sizeof(offers), now, "zero", z, m->B, m->recompute, z);
    }
    if (B > 0) memory_offer(offers, sizeof(offers), now, "batch-size", B, B, m->recompute, level);
    size_t saved = attention_deterministic_bytes();
    if (saved) {
        size_t at = strlen(offers);
        snprintf(offers + at, sizeof(offers) - at, "%s --no-deterministic (%.1f MiB)", at ? "," : "", in_mib(saved));
    }
    if (offers[0]) snprintf(text + used, size - used, "; options that save memory:%s", offers);
    else snprintf(text + used, size - used, "; use a smaller --seq-len or model");
}

// Fails if this machine has too little memory for all of its ranks. A system that overcommits memory would otherwise
// kill this run, or another process, later.
static inline void memory_check_host(const ModelPlan *plan, const ModelPlan *sampling) {
    HostMemory host;
    int ranks = comm_ranks_here();
    size_t needed = ranks * process_bytes(plan, sampling);
    if (!ops_use_host_memory || !host_memory("", &host) || needed <= host.available) return;
    char advice[2048], of_ranks[64] = "";
    memory_advise(advice, sizeof(advice));
    if (ranks > 1) FORMAT(of_ranks, ", %d times on this machine", ranks);
    CHECK(
        false,
        "too little memory: %.1f MiB needed, %s has %.1f MiB available; %s%s; --no-memory-check starts the run anyway",
        in_mib(needed), host.limit, in_mib(host.available), advice, of_ranks);
}

// Checks the memory of a device, which other processes may use. Fails only if the exact parts do not fit; warns if the
// estimated total does not fit.
static inline void memory_check_device(const ModelPlan *plan, const ModelPlan *sampling) {
    MemoryPart parts[MEMORY_PARTS];
    DeviceMemory now;
    if (!ops_memory(&now)) return;
    int count = memory_parts(plan, sampling, parts);
    size_t needed = memory_total(parts, count), estimated = memory_estimated(parts, count);
    size_t available = now.total - now.used;
    char advice[2048];
    if (needed - estimated > available) {
        memory_advise(advice, sizeof(advice));
        CHECK(false,
              "too little device memory: %.1f MiB needed without CUDA's own memory, %.1f of %.1f MiB free; %s; "
              "--no-memory-check starts the run anyway",
              in_mib(needed - estimated), in_mib(available), in_mib(now.total), advice);
    }
    if (needed > memory_available(&now, estimated))
        warn("device memory may be too little: %.1f MiB needed (%.1f MiB estimated), %.1f of %.1f MiB free",
             in_mib(needed), in_mib(estimated), in_mib(available), in_mib(now.total));
}

// Called by all ranks before they allocate. The message of a failing allocation contains the memory of this run.
static inline void memory_admit(const ModelPlan *plan, const ModelPlan *sampling, int most_zero, bool check) {
    announced.plan = plan, announced.sampling = sampling, announced.most_zero = most_zero;
    memory_advice = memory_advice_text;
    if (check) {
        memory_check_host(plan, sampling);
        memory_check_device(plan, sampling);
    }
    comm_barrier(); // all ranks have read the available memory
}

// ---- memory in use

// After the first step: logs and prints the device memory in use beside the plan. Does nothing on the CPU.
static inline void memory_log(Log *log, int64_t step, const ModelPlan *plan, const ModelPlan *sampling) {
    MemoryPart parts[MEMORY_PARTS];
    DeviceMemory now;
    if (!ops_memory(&now)) return;
    int count = memory_parts(plan, sampling, parts);
    size_t planned = memory_total(parts, count), estimated = memory_estimated(parts, count);
    log_begin(log, "event", step);
    log_string(log, "what", "device_memory");
    log_integer(log, "used_bytes", (int64_t)now.used);
    log_integer(log, "at_start_bytes", (int64_t)now.at_start);
    log_integer(log, "total_bytes", (int64_t)now.total);
    log_integer(log, "planned_bytes", (int64_t)planned);
    log_integer(log, "estimated_bytes", (int64_t)estimated);
    log_end(log);
    progress_break();
    printf(
        "device memory: %.1f of %.1f MiB in use, %.1f MiB of it before the first buffer; planned: %.1f MiB, %.1f MiB "
        "of it estimated\n",
        in_mib(now.used), in_mib(now.total), in_mib(now.at_start), in_mib(planned), in_mib(estimated));
}
