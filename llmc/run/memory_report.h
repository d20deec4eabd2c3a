/*
memory_report.h: what a run takes of memory, part by part: for --dry-run, for a run that finds too little, and beside
what is in use once a step has been done. Part of train_diffv2.c, which includes it.

On a GPU it is device memory: the parts that the program allocates are exact, what CUDA and NCCL take is estimated.
*/
#ifndef LLMC_MEMORY_REPORT_H
#define LLMC_MEMORY_REPORT_H

enum { MEMORY_PARTS = 16 };

// The parts of what a process takes, those of no bytes left out. `sampling_model` NULL, or the model that speaks samples.
static int model_memory(const ModelPlan *model, const ModelPlan *sampling_model, MemoryPart parts[MEMORY_PARTS]) {
    const MemoryPart all[] = {
        memory_part("parameters", model->params_bytes, false),
        memory_part("gradients", model->grads_bytes, false),
        memory_part("Adam's moments", model->moments_bytes, false),
        memory_part("master weights", model->master_bytes, false),
        memory_part("activations", model->activations_bytes, false),
        memory_part("activations of samples", sampling_model ? sampling_model->activations_bytes : 0, false),
        memory_part("gradients received from other ranks", model->received_bytes, false),
        memory_part("workspace", model->workspace_bytes, false),
    };
    int count = 0;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i].bytes) parts[count++] = all[i];
    bool elsewhere = model->device && ops_use_host_memory; // --device, in the program for the CPU
    if (elsewhere) parts[count++] = memory_part("CUDA and its libraries, about", PREDICTED_CUDA_BYTES, true);
    else count += ops_memory_parts(parts + count);
    const char *comm_of = "NCCL, roughly";
    size_t comm_bytes = elsewhere ? (model->sharding.ranks > 1 ? PREDICTED_NCCL_BYTES : 0)
                                  : comm_library_bytes(model->sharding.ranks, &comm_of);
    if (comm_bytes) parts[count++] = memory_part(comm_of, comm_bytes, true);
    return count;
}

static size_t memory_total(const MemoryPart *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].bytes;
    return sum;
}

// All that a process takes.
static size_t model_bytes(const ModelPlan *model, const ModelPlan *sampling_model) {
    MemoryPart parts[MEMORY_PARTS];
    return memory_total(parts, model_memory(model, sampling_model, parts));
}

// Of it what is estimated: what CUDA and NCCL take themselves.
static size_t memory_about(const MemoryPart *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].about ? parts[i].bytes : 0;
    return sum;
}

// What a process may still take of a device: what is free, and what is in use already that the estimates are for.
static size_t memory_room(const DeviceMemory *now, size_t about) {
    return now->total - now->used + min_size(now->used, about);
}

static double in_mib(size_t bytes) { return (double)bytes / 1048576.0; }

static void print_memory(const ModelPlan *model, const ModelPlan *sampling_model) {
    MemoryPart parts[MEMORY_PARTS];
    int count = model_memory(model, sampling_model, parts);
    for (int i = 0; i < count; i++) printf("  %-44s %10.1f MiB\n", parts[i].what, in_mib(parts[i].bytes));
    size_t needed = memory_total(parts, count), on_host = ops_use_host_memory ? needed : 0;
    size_t copy = model->purpose == FOR_TRAINING ? background_copy_bytes(&model->sharding) : 0;
    printf("  %-44s %10.1f MiB\n", "total", in_mib(needed));
    if (model->device) {
        double has = device_memory_bytes(model->device);
        printf("%s has about %.1f MiB: %s\n", model->device->name, has / 1048576,
               (double)needed <= has ? "enough" : "too little");
        return;
    }
    DeviceMemory now;
    HostMemory host;
    if (copy) printf("  %-44s %10.1f MiB\n", "copy for checkpoints, in host memory", in_mib(copy));
    if (host_memory("", &host) && on_host + copy)
        printf("%s has %.1f MiB available: %s\n", host.limit, in_mib(host.available),
               on_host > host.available          ? "too little"
               : on_host + copy > host.available ? "enough, but not for the copy: training stops for checkpoints"
                                                 : "enough");
    if (!ops_memory(&now)) return;
    size_t room = memory_room(&now, memory_about(parts, count));
    printf("this device has %.1f MiB, of which %.1f MiB are free now: %s\n", in_mib(now.total),
           in_mib(now.total - now.used),
           needed <= room        ? "enough"
           : needed <= now.total ? "too little until other processes end"
                                 : "too little");
}

// ---------------------------------------------------------------------------------------------------
// Too little memory

static struct { const ModelPlan *model, *sampling_model; } memory_of; // what is being allocated

// Appends to the text what a change of an option would save, when it saves anything.
static void memory_offer(char *text, size_t size, size_t now, const char *option, int64_t value, int B,
                         Recompute recompute, int zero) {
    const ModelPlan *m = memory_of.model;
    ModelPlan other;
    plan_build(&other, &m->config, B, m->T, m->purpose, recompute, m->sharding.rank, m->sharding.ranks, zero);
    size_t then = model_bytes(&other, memory_of.sampling_model), used = strlen(text);
    plan_free(&other);
    if (then < now)
        snprintf(text + used, size - used, "%s --%s %" PRId64 " (%.1f MiB)", strchr(text, '(') ? "," : "", option,
                 value, in_mib(now - then));
}

// The rest of the line that ends a program whose memory is short: what the run needs, part by part, and what would need
// less.
static void memory_advice_text(char *text, size_t size) {
    const ModelPlan *m = memory_of.model;
    MemoryPart parts[MEMORY_PARTS];
    int count = model_memory(m, memory_of.sampling_model, parts), used = 0;
    size_t now = memory_total(parts, count);
    char offers[512] = "";
    used = snprintf(text, size, "the run needs %.1f MiB:", in_mib(now));
    for (int i = 0; i < count; i++)
        used += snprintf(text + used, size - (size_t)used, "%s %s %.1f", i ? "," : "", parts[i].what,
                         in_mib(parts[i].bytes));
    int level = m->sharding.level, B = m->B / 2;
    while (B > 0 && m->B % B) B--; // a divisor, so that --total-batch stays a multiple
    if (m->purpose == FOR_TRAINING) {
        for (int r = (int)m->recompute + 1; r <= RECOMPUTE_BLOCK; r++)
            memory_offer(offers, sizeof(offers), now, "recompute", r, m->B, (Recompute)r, level);
        for (int z = level + 1; z <= 2 && m->sharding.ranks > 1; z++)
            memory_offer(offers, sizeof(offers), now, "zero", z, m->B, m->recompute, z);
    }
    if (B > 0 && m->purpose != FOR_GENERATION)
        memory_offer(offers, sizeof(offers), now, "batch-size", B, B, m->recompute, level);
    if (offers[0]) snprintf(text + used, size - (size_t)used, "; less with%s", offers);
    else snprintf(text + used, size - (size_t)used, "; a smaller --seq-len or model needs less");
}

// From here on a failing allocation says what this run needs.
static void memory_announce(const ModelPlan *model, const ModelPlan *sampling_model) {
    memory_of.model = model;
    memory_of.sampling_model = sampling_model;
    memory_advice = memory_advice_text;
}

// Ends the program when the memory of this machine is too little for what all ranks on it are about to allocate. A
// system that promises more memory than it has would otherwise end the run, or another process, in the middle.
static void memory_check_host(const ModelPlan *model, const ModelPlan *sampling_model) {
    HostMemory host;
    int ranks = comm_ranks_here();
    size_t needed = (size_t)ranks * model_bytes(model, sampling_model);
    if (!ops_use_host_memory || !host_memory("", &host) || needed <= host.available) return;
    char advice[2048], of_ranks[64] = "";
    memory_advise(advice, sizeof(advice));
    if (ranks > 1) FORMAT(of_ranks, ", %d times on this machine", ranks);
    CHECK(false, "too little memory: %.1f MiB needed, %s has %.1f MiB available; %s%s; --no-memory-check starts anyway",
          in_mib(needed), host.limit, in_mib(host.available), advice, of_ranks);
}

// The same for a device, which other processes may use. What CUDA and NCCL take is estimated: it warns, and does not
// refuse.
static void memory_check_device(const ModelPlan *model, const ModelPlan *sampling_model) {
    MemoryPart parts[MEMORY_PARTS];
    DeviceMemory now;
    if (!ops_memory(&now)) return;
    int count = model_memory(model, sampling_model, parts);
    size_t needed = memory_total(parts, count), about = memory_about(parts, count), available = now.total - now.used;
    char advice[2048];
    if (needed - about > available) {
        memory_advise(advice, sizeof(advice));
        CHECK(false,
              "too little device memory: %.1f MiB needed besides what CUDA takes, %.1f of %.1f MiB free; %s; "
              "--no-memory-check starts anyway",
              in_mib(needed - about), in_mib(available), in_mib(now.total), advice);
    }
    if (needed > memory_room(&now, about))
        warn("device memory may be too little: %.1f MiB needed, %.1f of them estimated, %.1f of %.1f MiB free",
             in_mib(needed), in_mib(about), in_mib(available), in_mib(now.total));
}

// ---------------------------------------------------------------------------------------------------
// What is in use

// Of a device, once a step has been done: the plan beside it, as a record of the log and a line. Nothing on the CPU.
static void memory_log(Log *log, int64_t step, const ModelPlan *model, const ModelPlan *sampling_model) {
    MemoryPart parts[MEMORY_PARTS];
    DeviceMemory now;
    if (!ops_memory(&now)) return;
    int count = model_memory(model, sampling_model, parts);
    size_t planned = memory_total(parts, count), about = memory_about(parts, count);
    log_begin(log, "event", step);
    log_string(log, "what", "device_memory");
    log_integer(log, "used_bytes", (int64_t)now.used);
    log_integer(log, "at_start_bytes", (int64_t)now.at_start);
    log_integer(log, "total_bytes", (int64_t)now.total);
    log_integer(log, "planned_bytes", (int64_t)planned);
    log_integer(log, "estimated_bytes", (int64_t)about);
    log_end(log);
    progress_break();
    printf("device memory: %.1f of %.1f MiB in use, %.1f of them before the first buffer; planned %.1f, %.1f of them "
           "estimated\n",
           in_mib(now.used), in_mib(now.total), in_mib(now.at_start), in_mib(planned), in_mib(about));
}
#endif
