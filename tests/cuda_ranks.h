/*
cuda_ranks.h: the CUDA trainer on several GPUs, one process per GPU: those of the machine, or those that dev/cuda_on_cpu
emulates, with NCCL. Several ranks compute what one rank computes, with every --zero. A missing wait between streams is
detected. A rank that is killed, stopped or whose device hangs is named. A launch that cannot start prints one line.

Processes start with the variables that srun sets, and once by mpirun.
*/
#pragma once
#include "cuda_collectives.h"
#include "cuda_trainer.h"

#ifdef USE_NCCL

// Skips the test on a machine with fewer GPUs.
static bool has_gpus(int count) {
#ifdef CUDA_ON_CPU
    (void)count;
    return true;
#else
    int there = 0;
    if (cudaGetDeviceCount(&there) == cudaSuccess && there >= count) return true;
    test_skip("%d GPUs are needed", count);
    return false;
#endif
}

// Three layers: with --zero 2 the first reuses the gradient buffer of the third.
#define TRAIN_RANKS                                                        \
    "--train-data data.bin "                                               \
    "--layers 3 --hidden 20 --heads 2 --kv-heads 1 --head-dim 8 --ffn 27 " \
    "--vocab 43 --seq-len 7 --no-tie-embeddings --lr 3e-3 --warmup 1"

// Runs ranks with the assignments of `environment`. The status is the first that is not 0; then the other ranks have 2
// seconds to end, as with a launcher.
PRINTF_LIKE(6, 7)
static bool run_ranks(ProgramResult *r, const TestDirectory *d, int ranks, const char *environment, int status,
                      const char *fmt, ...) {
    static int job;
    va_list args;
    va_start(args, fmt);
    const char *options = test_text_of(fmt, args);
    va_end(args);
    run_command(r,
                "cd '%s' && for i in $(seq 0 %d); do env SLURM_JOB_ID=%d.%d SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=%d "
                "SLURM_STEP_TASKS_PER_NODE=%d SLURM_NODEID=0 "
                "SLURM_PROCID=$i SLURM_LOCALID=$i CUDA_ON_CPU_DEVICES=%d BUCKET=1024 "
                "OMP_NUM_THREADS=1 %s %s --threads 1 --rendezvous . %s & pids=\"$pids $!\"; done; "
                "{ sleep 60; kill -KILL $pids; } >&- 2>&- <&- & killer=$!; status=0; for p in $pids; do wait $p || { "
                "s=$?; [ $status -gt 0 ] || { status=$s; { sleep 2; kill -KILL $pids; } & }; }; done >&- 2>&-; "
                "kill $killer; exit $status",
                d->path, ranks - 1, (int)getpid(), ++job, ranks, ranks, ranks, environment, device_trainer(), options);
    if (status >= 0)
        EXPECT(r->status == status, "%d ranks, %s %s: status %d, not %d: %.600s", ranks, environment, options,
               r->status, status, r->err);
    return r->status == status;
}

static void expect_same_state(const TestDirectory *d, int step, const char *a, const char *b, bool same) {
    ProgramResult r;
    run_command(&r,
                "cd '%s' && for f in model optimizer; do cmp %s/checkpoints/step_%08d/$f.safetensors "
                "%s/checkpoints/step_%08d/$f.safetensors || exit 1; done",
                d->path, a, step, b, step);
    EXPECT((r.status == 0) == same, "%s and %s are %s: %.300s%.300s", a, b, same ? "not the same" : "the same", r.out,
           r.err);
}

static void test_ranks_losses(void) {
    ProgramResult r;
    if (!has_gpus(2)) return;
    for (int zero = 0; zero <= ZERO_MOST; zero++) {
        TestDirectory d = cuda_data(43);
        run_in(&r, &d, cpu_trainer(), 0, TRAIN_RANKS " --batch-size 8 --steps 3 --out cpu");
        run_ranks(&r, &d, 2, "", 0,
                  TRAIN_RANKS " --batch-size 2 --total-batch 56 --steps 3 --zero %d --check-ranks-every 1 "
                              "--out device",
                  zero);
        compare_records(&d, "2 ranks", "train", 3, cuda_fp32 ? 1e-4 : 0.03);
        int waited = 0;
        cJSON *records = read_records(&d, "device", "train"), *record;
        cJSON_ArrayForEach(record, records) {
            double ms = record_number(record, "comm_ms");
            EXPECT(ms >= 0 && ms < 60000, "--zero %d: comm_ms is %g", zero, ms);
            waited += ms > 0;
        }
        cJSON_Delete(records);
        EXPECT(waited > 0, "--zero %d: two processes that never waited for each other", zero);
    }
}

// Only the waits of the step order the gathers of parameters. In one of the runs, --check-ranks-every waits for all.
static void test_ranks_zero_bits(void) {
    static const char *const orders[] = {"CUDA_ON_CPU_STREAMS=late", "CUDA_ON_CPU_STREAMS=hasty"};
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    if (has_gpus(2))
        for (int order = 0; order < 2; order++)
            for (int zero = 0; zero <= ZERO_MOST; zero++) {
                const char *out = test_text("z%d%d", order, zero);
                run_ranks(&r, &d, 2, orders[order], 0,
                          TRAIN_RANKS " --batch-size 2 --total-batch 28 --steps 3 --zero %d %s --out %s", zero,
                          order + zero == 3 ? "--check-ranks-every 1" : "", out);
                if (order + zero > 0) expect_same_state(&d, 3, "z00", out, true);
            }
}

// Four ranks in two groups (--zero-group) compute what one rank computes, with the same bits at every --zero, in fp32
// and with gradients sent in bf16.
static void test_ranks_groups(void) {
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    if (has_gpus(4)) run_in(&r, &d, cpu_trainer(), 0, TRAIN_RANKS " --batch-size 8 --steps 3 --out cpu");
    for (int run = 0; run <= 2 * ZERO_MOST + 1 && has_gpus(4); run++) {
        int zero = run / 2;
        const char *type = run % 2 ? "bf16" : "fp32";
        const char *out = run ? test_text("%s%d", type, zero) : "device"; // whose records are compared
        run_ranks(&r, &d, 4, zero % 2 ? "CUDA_ON_CPU_STREAMS=hasty" : "", 0,
                  TRAIN_RANKS " --batch-size 2 --total-batch 56 --steps 3 --zero %d --zero-group 2 --reduce-dtype %s "
                              "--check-ranks-every 1 --out %s",
                  zero, type, out);
        if (run == 0) compare_records(&d, "4 ranks in groups of 2", "train", 3, cuda_fp32 ? 1e-4 : 0.03);
        if (run > 1) expect_same_state(&d, 3, run % 2 ? "bf160" : "device", out, true);
    }
    if (has_gpus(4)) expect_same_state(&d, 3, "device", "bf160", false);
}

#ifdef CUDA_ON_CPU
// Sums of NCCL depend on the size of the buffer; its emulation sums in the order of ranks. No clipping: the norm is a
// sum over buckets.
static void test_ranks_bucket_sizes(void) {
    static const char *const buckets[] = {"BUCKET=512", "BUCKET=3000", "BUCKET=100000", "BUCKET=700"};
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (int k = 0; k <= ZERO_MOST; k++) {
        const char *out = test_text("bucket%d", k);
        run_ranks(&r, &d, 2, buckets[k], 0,
                  TRAIN_RANKS " --batch-size 2 --total-batch 28 --steps 3 --grad-clip 0 --zero %d --out %s", k, out);
        if (k) expect_same_state(&d, 3, "bucket0", out, true);
    }
}
#endif

// With --zero 1 and 2 the gather of parameters has not ended when the sample begins.
static void test_ranks_sample(void) {
    static char sample[3][16384];
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (int zero = 0; zero <= 2 && has_gpus(2); zero++) {
        run_ranks(&r, &d, 2, "", 0, TRAIN_RANKS " --batch-size 2 --total-batch 28 --steps 1 --sample-every 1 --zero %d",
                  zero);
        const char *from = strstr(r.out, "--- sample after step 1\n"), *to = from ? strstr(from, "\n---\n") : NULL;
        EXPECT(to, "--zero %d: no sample: %.600s", zero, r.out);
        snprintf(sample[zero], sizeof(sample[zero]), "%.*s", to ? (int)(to - from) : 0, from ? from : "");
        EXPECT(strcmp(sample[0], sample[zero]) == 0, "--zero %d: another sample: %.200s", zero, sample[zero]);
    }
}

static void test_ranks_resume(void) {
    static const int ranks[] = {2, 1, 3}, zero[] = {3, 0, 3};
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    if (has_gpus(3)) {
        run_in(&r, &d, cpu_trainer(), 0, TRAIN_RANKS " --batch-size 6 --total-batch 42 --steps 6 --out cpu");
        run_ranks(&r, &d, 2, "", 0,
                  TRAIN_RANKS " --batch-size 1 --total-batch 42 --steps 6 --zero 3 --stop-after 2 --out device");
        for (int k = 1; k < 3; k++)
            run_ranks(&r, &d, ranks[k], "", 0, "--out device --resume --zero %d %s", zero[k],
                      k < 2 ? "--stop-after 4" : "");
        compare_records(&d, "2, 1, 3 ranks", "train", 6, cuda_fp32 ? 2e-4 : 0.03);
    }
}

// Without a wait for the copy, streams that run late would give the writer old values.
static void test_ranks_background_checkpoint(void) {
    static const char *const orders[] = {"CUDA_ON_CPU_STREAMS=late", "CUDA_ON_CPU_STREAMS=hasty"};
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (int k = 0; k < 5 && has_gpus(2); k++) {
        for (int beside = 0; beside < 2; beside++)
            run_ranks(&r, &d, k ? 2 : 1, orders[k % 2], 0,
                      TRAIN_RANKS " --batch-size 2 --total-batch 28 --steps 6 --checkpoint-every 2 --keep 0 "
                                  "--zero %d --out run%d%d %s",
                      max_int(0, k - 1), k, beside, beside ? "" : "--no-checkpoint-background");
        run_command(&r,
                    "cd '%s' && diff -r run%d0/checkpoints run%d1/checkpoints && grep -c '\"background\": true' "
                    "run%d1/log.jsonl",
                    d.path, k, k, k);
        EXPECT(r.status == 0 && atoi(r.out) == 2, "case %d: %.300s%.300s", k, r.out, r.err);
    }
}

#ifdef CUDA_ON_CPU

// For sanitizers.
static void test_ranks_sanitized(void) {
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    run_ranks(&r, &d, 2, "CUDA_ON_CPU_STREAMS=hasty", 0,
              TRAIN_RANKS " --batch-size 1 --total-batch 28 --steps 2 --zero 3 --check-ranks-every 1 "
                          "--checkpoint-every 1 --out run");
    run_ranks(&r, &d, 2, "FAULT=kill:1:3:backward", -1, "--out run --resume --steps 4 --timeout 5");
    EXPECT(r.status != 0 && count_lines(r.err) == 1 && strstr(r.err, "rank 1 ("), "status %d, %.400s", r.status, r.err);
}

// Without the waits between streams, results differ: the tests above would detect it.
static void test_ranks_missing_waits(void) {
    static const struct {
        const char *environment;
        int zero;
    } cases[] = {
        {"MISSING_WAIT=collectives CUDA_ON_CPU_STREAMS=hasty", 0}, // sums what the backward has not written yet
        {"MISSING_WAIT=collectives CUDA_ON_CPU_STREAMS=hasty", 1}, // gathers what the update has not written yet
        {"MISSING_WAIT=operations", 0},                            // updates by gradients that are not summed yet
        {"MISSING_WAIT=operations", 1},                            // reads weights that are not gathered yet
        {"MISSING_WAIT=collectives CUDA_ON_CPU_STREAMS=hasty", 3}, // gathers a layer in the place of one that is read
        {"MISSING_WAIT=operations", 3}};                           // reads a layer that is not gathered yet
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    run_ranks(&r, &d, 2, "", 0, TRAIN_RANKS " --batch-size 2 --total-batch 28 --steps 3 --out right");
    for (int c = 0; c < 6; c++) {
        const char *out = test_text("wrong%d", c);
        run_ranks(&r, &d, 2, cases[c].environment, -1,
                  TRAIN_RANKS " --batch-size 2 --total-batch 28 --steps 3 --zero %d --out %s", cases[c].zero, out);
        if (r.status == 0) expect_same_state(&d, 3, "right", out, false);
        else
            EXPECT(r.status == 1 && strstr(r.err, "diffv2:"), "%s: status %d, %.300s", cases[c].environment, r.status,
                   r.err); // for example, weights that are not finite
    }
}

// Whether the line names a current step from `first` to `last`, and a last state of the other rank at `first` or
// earlier.
static bool names_steps(const char *line, int first, int last) {
    static const char heard_text[] = "last state at step ", now_text[] = " is at step ";
    const char *heard = strstr(line, heard_text), *now = strstr(line, now_text);
    if (!heard || !now) return false;
    int heard_step = atoi(heard + sizeof(heard_text) - 1), now_step = atoi(now + sizeof(now_text) - 1);
    return heard_step <= first && first <= now_step && now_step <= last;
}

static void test_ranks_lost(void) {
    static const struct {
        const char *fault, *word;
    } cases[] = {{"kill:1:3:backward", "rank 1 ("},
                 {"kill:0:3:update", "rank 0 ("},
                 {"stop:1:3:gradients", "has been unresponsive"},
                 {"hang:1:3:backward", "has not reached the collective"}};
    ProgramResult r;
    char text[1000];
    for (int c = 0; c < 4; c++) {
        TestDirectory d = cuda_data(43);
        const char *const options = "--batch-size 2 --steps 6 --checkpoint-every 2 --timeout 2";
        const char *environment = test_text("FAULT=%s CUDA_ON_CPU_NCCL_ABORTS=aborts", cases[c].fault);
        double begin = now_seconds();
        run_ranks(&r, &d, 2, environment, -1, TRAIN_RANKS " %s --zero %d --out run", options, c % 3);
        double seconds = now_seconds() - begin;
        // a rank that has read the norm does not wait for the other's update, and may be at the next step
        int last = c == 1 ? 4 : 3;
        EXPECT(r.status != 0 && strstr(r.err, cases[c].word) && names_steps(r.err, 3, last), "%s: status %d, %.400s",
               cases[c].fault, r.status, r.err);
        EXPECT(c == 1 || strstr(r.err, "rank 1 ("), "%s: the wrong rank is named: %.400s", cases[c].fault, r.err);
        EXPECT(seconds < 20, "%s: %.0f s until the others noticed", cases[c].fault, seconds);
        test_read_file(test_text("%s/aborts", d.path), text, sizeof(text)); // empty if there is none
        EXPECT(strstr(text, "rank"), "%s: nobody has aborted the communicator", cases[c].fault);
        if (c == 3) {
            run_ranks(&r, &d, 2, "", 0, "--out run --resume");
            run_ranks(&r, &d, 2, "", 0, TRAIN_RANKS " %s --out whole", options);
            expect_same_state(&d, 6, "whole", "run", true);
        }
    }
}

// After an abort, the device continues without the result of the collective, which must not be printed.
static void test_ranks_aborted_collective(void) {
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    run_ranks(&r, &d, 2, "FAULT=hang:1:3:update", -1,
              TRAIN_RANKS " --batch-size 2 --steps 6 --timeout 2 --zero 1 --sample-every 3");
    EXPECT(r.status == 1 && strstr(r.out, "step 3/6"), "status %d, %.400s", r.status, r.err);
    EXPECT(!strstr(r.out, "--- ") && !strstr(r.out, "not finite"), "after the abort: %.600s", r.out);
}

// The host waits in the first call between two ranks, which connects them, for a rank that does not make it.
static void test_ranks_unconnected(void) {
    static const char *const cases[][2] = {{"ncclReduceScatter", ""}, {"an exchange", "--reduce-dtype bf16"}};
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (int c = 0; c < 2; c++) {
        const char *environment = test_text("CUDA_ON_CPU_NCCL_HANG=\"$([ $i = 0 ] || echo %s)\"", cases[c][0]);
        double begin = now_seconds();
        run_ranks(&r, &d, 2, environment, 1, TRAIN_RANKS " --batch-size 2 --steps 2 --timeout 2 --start-timeout 5 %s",
                  cases[c][1]);
        double seconds = now_seconds() - begin;
        EXPECT(count_lines(r.err) == 1 && strstr(r.err, "rank ") && !strstr(r.out, "step 1/"), "%s: %.400s",
               cases[c][0], r.err);
        EXPECT(seconds < 20, "%s: %.0f s until the others noticed", cases[c][0], seconds);
    }
}

static void test_ranks_device_errors(void) {
    static const struct {
        const char *environment, *word;
    } cases[] = {
        {"CUDA_ON_CPU_FAULT=adamw:4", "diffv2: CUDA failed: an illegal memory access was encountered ("},
        {"CUDA_ON_CPU_FAULT=$([ $i = 0 ] || echo adamw:4)",
         "; an earlier kernel may be the cause; CUDA_LAUNCH_BLOCKING"},
        {"CUDA_ON_CPU_NCCL_ASYNC='1:30:NET/IB : a port is down'",
         "NCCL failed: remote process exited or there was a network error (in the background): NET/IB : a port is "
         "down ;"},
        {"CUDA_ON_CPU_NCCL_ASYNC='0:30:NET/IB : a port is down'", "NET/IB : a port is down ; NCCL_DEBUG=WARN"},
    };
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        run_ranks(&r, &d, 2, cases[c].environment, 1, TRAIN_RANKS " --batch-size 2 --steps 6 --timeout 20");
        EXPECT(count_lines(r.err) == 1 && strstr(r.err, cases[c].word), "%s: %.600s", cases[c].environment, r.err);
    }
}

static void test_ranks_refused(void) {
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    struct {
        int ranks, status;
        const char *environment, *options, *word;
    } cases[] = {
        {2, 1, "CUDA_ON_CPU_DEVICES=1", "", "would share one GPU"},
        {3, 1, "CUDA_ON_CPU_DEVICES=2", "", "3 processes on a machine with 2 GPUs: start at most one"},
        {3, 1, "CUDA_ON_CPU_DEVICES=2 CUDA_VISIBLE_DEVICES=4,5", "",
         "3 processes on a machine with 2 GPUs in CUDA_VISIBLE_DEVICES='4,5': start at most one process per GPU"},
        {2, 1, "SLURM_GPUS_PER_TASK=a100:2", "", "srun gives each process 2 GPUs, and a rank uses one"},
        {2, 0, "SLURM_GPUS_PER_TASK=1 CUDA_ON_CPU_DEVICES=2 CUDA_ON_CPU_VISIBLE=$i", "", ""},
        {2, 1, "CUDA_ON_CPU_DEVICES=0", "", "no CUDA device"},
        {2, 1, "CUDA_ON_CPU_NAME='NVIDIA A100-SXM4-40GB MIG 1g.5gb'", "",
         "would share one GPU: start at most one process per GPU, also with MIG slices"},
        {2, 1, "CUDA_ON_CPU_NCCL_INIT='Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000'", "",
         "(ncclCommInitRank(handle, comm.ranks, nccl.ids[0], comm.rank)): Duplicate GPU detected : rank 1 and rank 0 "
         "both "
         "on CUDA device 1b000 ; NCCL_DEBUG=WARN"},
        {2, 1, "CUDA_ON_CPU_NCCL_INIT=\"Cuda failure 2 'out of memory'\"", "",
         "out of device memory: cannot allocate memory for NCCL"},
        {2, 2, "", "--batch-sizes 3", "unknown option --batch-sizes"},
        {2, 2, "", "--seed $((i + 1))", "--seed is '2' here and '1' on rank 0"},
    };
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        run_ranks(&r, &d, cases[c].ranks, cases[c].environment, cases[c].status,
                  TRAIN_RANKS " --batch-size 2 --steps 1 %s", cases[c].options);
        EXPECT(count_lines(r.err) == (cases[c].status != 0) && strstr(r.err, cases[c].word), "%s %s: %.400s",
               cases[c].environment, cases[c].options, r.err);
    }
    // a program without NCCL
    const char *program = test_self();
    const char *alone = test_text("%.*s/single_diffv2", (int)(strrchr(program, '/') - program), program);
    CHECK(access(alone, X_OK) == 0, "cannot find %s: make it", alone);
    for (int launched = 0; launched < 2; launched++) {
        run_command(&r, "cd '%s' && %s '%s' %s --batch-size 2 --steps 1", d.path,
                    launched ? "OMPI_COMM_WORLD_SIZE=2" : "", alone, TRAIN_RANKS);
        EXPECT(r.status == launched, "a program without NCCL: status %d, %.400s", r.status, r.err);
        EXPECT(count_lines(r.err) == launched && (!launched || strstr(r.err, "built without NCCL")),
               "a program without NCCL: %.400s", r.err);
    }
}

static void test_launcher_variables(void) {
    static const struct {
        const char *variables, *word;
    } wrong[] = {
        {"SLURM_PROCID=x SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0", "SLURM_PROCID is 'x'"},
        {"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=2,x SLURM_NODEID=1",
         "SLURM_STEP_TASKS_PER_NODE is '2,x'"},
        {"SLURM_PROCID=1 SLURM_LOCALID=1 'SLURM_STEP_TASKS_PER_NODE=2(x-1)' SLURM_NODEID=0",
         "SLURM_STEP_TASKS_PER_NODE is '2(x-1)'"},
        {"SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0",
         "srun has started 2 ranks without MPI, which find each other in a directory: specify --out or --rendezvous"},
        {"SLURM_JOB_ID=a/b SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0",
         "SLURM_JOB_ID 'a/b' must not contain a slash"},
        {"SLURM_STEP_NUM_TASKS=x", "SLURM_STEP_NUM_TASKS is 'x'"},
        {"SLURM_STEP_NUM_TASKS=0", "SLURM_STEP_NUM_TASKS is '0'"},
        {"SLURM_STEP_NUM_TASKS=-2", "SLURM_STEP_NUM_TASKS is '-2'"},
        {"SLURM_STEP_NUM_TASKS=4294967298", "SLURM_STEP_NUM_TASKS is '4294967298'"},
        {"OMPI_COMM_WORLD_SIZE=two", "OMPI_COMM_WORLD_SIZE is 'two'"}};
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (size_t c = 0; c < sizeof(wrong) / sizeof(wrong[0]); c++) {
        run_command(&r, "cd '%s' && export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 && env %s %s %s", d.path,
                    wrong[c].variables, device_trainer(), TRAIN_RANKS);
        EXPECT(r.status == 1 && count_lines(r.err) == 1 && strstr(r.err, wrong[c].word), "%s: status %d, %.400s",
               wrong[c].variables, r.status, r.err);
    }
    // variables of an earlier version
    run_ranks(&r, &d, 2, "DIFFV2_SECRET=1 MASTER_ADDR=a", 0, TRAIN_RANKS " --batch-size 2 --steps 1");
    EXPECT(count_lines(r.err) == 2 &&
               strstr(r.err, "DIFFV2_SECRET is not used any more: the ranks find each other in") &&
               strstr(r.err, "MASTER_ADDR is not used"),
           "%.400s", r.err);
}

static void test_help_without_device(void) {
    static const char *const launches[] = {
        "",
        "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0",
        "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1",
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0",
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1",
    };
    static const struct {
        const char *option, *text;
    } asks[] = {{"--help", "Usage: "}, {"--version", "train_diffv2 0."}};
    ProgramResult r;
    for (size_t l = 0; l < sizeof(launches) / sizeof(launches[0]); l++) {
        bool first = strstr(launches[l], "=1") == NULL;
        for (int a = 0; a < 2; a++) {
            run_command(&r, "%s CUDA_ON_CPU_DEVICES=0 timeout 20 %s %s", launches[l], device_trainer(), asks[a].option);
            EXPECT(r.status == 0 && r.err[0] == 0 && (first ? strstr(r.out, asks[a].text) == r.out : r.out[0] == 0),
                   "%s %s: status %d, %.100s %.300s", launches[l], asks[a].option, r.status, r.out, r.err);
        }
    }
}

// Two starts in one directory at the same time, and one without its second rank.
static void test_ranks_rendezvous(void) {
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    run_ranks(&r, &d, 4,
              "SLURM_RESTART_COUNT=$((i / 2)) SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$((i % 2)) SLURM_LOCALID=$((i % 2))",
              0, TRAIN_RANKS " --batch-size 2 --steps 2 --out run$((i / 2))");
    EXPECT(!r.err[0], "%.400s", r.err);
    expect_same_state(&d, 2, "run0", "run1", true);
    run_command(&r, "ls -d '%s'/ranks* '%s'/run*/ranks*", d.path, d.path);
    EXPECT(!r.out[0], "left behind: %.300s", r.out);
    run_ranks(&r, &d, 2, "SLURM_RESTART_COUNT=$i", 1,
              TRAIN_RANKS " --batch-size 2 --steps 2 --start-timeout 2 --out alone");
    EXPECT(count_lines(r.err) == 2 && strstr(r.err, "1 of 2 ranks (the first is rank 1) have not started within 2 s") &&
               strstr(r.err, "rank 0 has not written "),
           "two restarts: %.600s", r.err);
}

// All ranks use the choices of rank 0, which a resume does not measure again.
static void test_ranks_gemm_choices(void) {
    static const char timed[] = " matrix products timed in ";
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (int zero = 0; zero <= 3; zero += 3) {
        run_ranks(&r, &d, 2, "", 0,
                  TRAIN_RANKS " --sdpa own --batch-size 2 --steps 3 --check-ranks-every 1 --tune-gemm --zero %d "
                              "--stop-after 1 --out run%d",
                  zero, zero);
        const char *line = strstr(r.out, timed);
        EXPECT(line && !strstr(line + 1, timed) && !r.err[0], "--zero %d: %.400s%.400s", zero, r.out, r.err);
        run_ranks(&r, &d, 2, "", 0, "--resume --out run%d --stop-after 2", zero);
        EXPECT(!strstr(r.out, timed) && !r.err[0], "--zero %d: %.400s%.400s", zero, r.out, r.err);
        run_ranks(&r, &d, 1, "", 0, "--resume --out run%d", zero);
        EXPECT(!r.err[0], "--zero %d: %.400s", zero, r.err); // matrices of one rank may have other alignments
    }
    run_ranks(&r, &d, 2, "CUDA_ON_CPU_NAME=\"GPU $i\"", 1, TRAIN_RANKS " --batch-size 2 --tune-gemm");
    EXPECT(strstr(r.err, "--tune-gemm requires the same device and library on all ranks; rank 0 has GPU 0, "), "%.400s",
           r.err);
}

// Five ranks have roots 0 and 3. --nvls alone decides what NCCL gets.
static void test_ranks_roots(void) {
    static const struct {
        int ranks, roots;
        const char *options, *nvls;
    } cases[] = {{5, 2, "", "0"}, {3, 1, "--nvls --no-deterministic", "2"}, {2, 1, "", "0"}};
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    for (int i = 0; i < 3; i++) {
        int ranks = cases[i].ranks;
        run_ranks(&r, &d, ranks, "NCCL_NVLS_ENABLE=1 CUDA_ON_CPU_NCCL_JOINS=joins", 0,
                  TRAIN_RANKS " --batch-size 2 --total-batch %d --steps 1 %s", 14 * ranks, cases[i].options);
        run_command(&r, "cd '%s' && grep -cx '%d ids, NCCL_NVLS_ENABLE=%s' joins && rm joins", d.path, cases[i].roots,
                    cases[i].nvls);
        EXPECT(atoi(r.out) == ranks, "%d ranks: %s of them join by %d roots", ranks, r.out, cases[i].roots);
    }
}

#ifdef USE_MPI
static void test_mpirun(void) {
    ProgramResult r;
    TestDirectory d = cuda_data(43);
    const char *options = TRAIN_RANKS " --batch-size 2 --total-batch 56 --steps 2 --zero 1";
    run_ranks(&r, &d, 4, "", 0, "%s --out by_srun", options);
    run_command(&r,
                "cd '%s' && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
                "OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none "
                "CUDA_ON_CPU_DEVICES=4 CUDA_ON_CPU_NCCL_JOINS=joins BUCKET=1024 OMP_NUM_THREADS=1 && mpirun -q -n 4 "
                "%s %s --threads 1 --out by_mpirun && [ $(grep -c '^2 ids' joins) = 4 ] && mpirun -q -n 2 %s --help",
                d.path, device_trainer(), options, device_trainer());
    EXPECT(r.status == 0 && strstr(r.out, "Usage") && strstr(r.out, "NCCL 2."), "status %d, %.400s", r.status, r.err);
    expect_same_state(&d, 2, "by_srun", "by_mpirun", true);
}
#endif
#endif

static void test_one_rank_collectives(void) { collectives_of_one_rank(40000); }

static void test_slurm_lists(void) {
    static const struct {
        const char *list;
        int machine, count;
    } counts[] = {{"4", 0, 4},
                  {"4(x3),2", 0, 4},
                  {"4(x3),2", 2, 4},
                  {"4(x3),2", 3, 2},
                  {"4(x3),2", 4, -1},
                  {"1,8,2", 1, 8},
                  {"", 0, -1},
                  {"x", 0, -1},
                  {"2;3", 1, -1},
                  {"0", 0, -1},
                  {"4(x-1),2", 0, -1},
                  {"4(x0)", 0, -1},
                  {"4(x4294967297)", 0, -1},
                  {"4(x2", 0, -1},
                  {"4(x2]", 0, -1},
                  {"99999999999", 0, -1},
                  {"4(x2)3", 2, -1}};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        EXPECT(launch_tasks_on_node(counts[i].list, counts[i].machine) == counts[i].count,
               "machine %d of %s has %d processes", counts[i].machine, counts[i].list,
               launch_tasks_on_node(counts[i].list, counts[i].machine));
}

static const CudaTest cuda_ranks_tests[] = {
    {BOTH_PRECISIONS, {"several devices have the losses of the CPU trainer, with every --zero", test_ranks_losses}},
    {BF16_ALONE, {"--zero 0, 1, 2 and 3 give the same bits, in any order of streams", test_ranks_zero_bits}},
    {BF16_ALONE,
     {"two groups of two ranks give the losses of one rank, and the same bits at every --zero", test_ranks_groups}},
#ifdef CUDA_ON_CPU
    {BF16_ALONE, {"results do not depend on the size of buckets", test_ranks_bucket_sizes}},
#endif
    {BF16_ALONE, {"a sample uses all parameters of the last update, with --zero 0, 1 and 2", test_ranks_sample}},
    {BOTH_PRECISIONS, {"a run resumes with another number of devices", test_ranks_resume}},
    {BOTH_PRECISIONS,
     {"a checkpoint written in the background has the weights of its step", test_ranks_background_checkpoint}},
    {BF16_ALONE, {"a communicator of one rank sums and gathers", test_one_rank_collectives}},
    {BF16_ALONE, {"the lists that srun sets are parsed", test_slurm_lists}},
#ifdef CUDA_ON_CPU
    {SANITIZED, {"a run on two devices succeeds, and a rank ends when its peer is killed", test_ranks_sanitized}},
    {BF16_ALONE, {"a missing wait between streams is detected", test_ranks_missing_waits}},
    {BF16_ALONE, {"a lost process or device is reported by rank, and the run resumes", test_ranks_lost}},
    {BOTH_PRECISIONS, {"--help and --version need neither a device nor other ranks", test_help_without_device}},
    {BF16_ALONE, {"starts by srun in one directory do not read each other's files", test_ranks_rendezvous}},
    {BF16_ALONE, {"invalid variables of a launcher are reported by name", test_launcher_variables}},
    {BF16_ALONE, {"the result of an aborted collective is not used", test_ranks_aborted_collective}},
    {BF16_ALONE, {"a wait in a call of NCCL, before ranks are connected, is limited", test_ranks_unconnected}},
    {BF16_ALONE, {"an error of a device or of NCCL during a run prints one line", test_ranks_device_errors}},
    {BF16_ALONE, {"ranks that cannot start print one line", test_ranks_refused}},
    {BF16_ALONE, {"several roots join many ranks, and NCCL gets what --nvls says", test_ranks_roots}},
    {BF16_ALONE, {"all ranks use the algorithms that --tune-gemm has chosen on rank 0", test_ranks_gemm_choices}},
#ifdef USE_MPI
    {BF16_ALONE, {"mpirun and srun start the same run", test_mpirun}},
#endif
#endif
};
enum { CUDA_RANKS_TEST_COUNT = sizeof(cuda_ranks_tests) / sizeof(cuda_ranks_tests[0]) };

#else
static void test_without_nccl(void) { test_skip("this build has no NCCL"); }
static const CudaTest cuda_ranks_tests[] = {
    {BOTH_PRECISIONS, {"several devices compute the same as one", test_without_nccl}}};
enum { CUDA_RANKS_TEST_COUNT = 1 };
#endif
