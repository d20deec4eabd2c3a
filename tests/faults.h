/*
faults.h: what happens to a run when it is stopped, killed, or loses its disk: a checkpoint that is there is whole,
a resume continues bit for bit, and nothing is ever lost that was saved. Every test causes the fault for real.
*/
#ifndef TESTS_FAULTS_H
#define TESTS_FAULTS_H
#include "choice_file.h"
#include "data.h"
#include "harness.h"
#include "program.h"
#include <time.h>

// A run of 12 steps whose epoch ends within it: 40 windows of 16 tokens, 8 per update.
static ProgramData fault_data(void) {
    ProgramData d;
    char path[600];
    d.dir = test_make_directory();
    FORMAT(path, "%s/train.bin", d.dir.path);
    d.entropy = write_grammar_shard(path, 40 * 16 + 1, 1);
    return d;
}
static const char *const fault_options = "--steps 12 --total-batch 128 --batch-size 4";
static const char *const fault_model =
    "--layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 --seq-len 16 --warmup 2 --threads 1";

static void fault_run(ProgramResult *r, const ProgramData *d, const char *out, const char *options) {
    run_command(r, "cd '%s' && %s --train-data train.bin %s %s --out '%s' %s", d->dir.path, test_program_path(),
                fault_model, fault_options, out, options);
}
static void fault_resume(ProgramResult *r, const ProgramData *d, const char *out, const char *options) {
    run_command(r, "cd '%s' && %s --out '%s' --resume --threads 1 %s", d->dir.path, test_program_path(), out, options);
}

// The final checkpoint of `out` and its records of steps are those of the run "whole".
static void expect_whole(const ProgramData *d, const char *out) {
    char a[600], b[600];
    FORMAT(a, "whole/checkpoints/step_%08d", 12);
    FORMAT(b, "%s/checkpoints/step_%08d", out, 12);
    expect_same_directories(d, a, b);
    ProgramResult r; // times differ, all else in the records of steps must not
    run_command(&r,
                "cd '%s' && for run in whole '%s'; do grep '\"train\"' $run/log.jsonl | sed -E "
                "'s/\"(tokens_per_s|ms|flops_util|comm_ms)\": *[^,]*,//g' > $run.steps; done; "
                "cmp whole.steps '%s.steps'",
                d->dir.path, out, out);
    EXPECT(r.status == 0, "the records of %s are not those of the uninterrupted run: %s%s", out, r.out, r.err);
}

static void test_resume_at_every_step(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    fault_run(&r, &d, "whole", "");
    EXPECT_STATUS(r, 0);
    for (int step = 1; step < 12; step++) {
        char out[32], options[64];
        FORMAT(out, "stop%d", step);
        FORMAT(options, "--stop-after %d", step);
        fault_run(&r, &d, out, options);
        EXPECT(r.status == 0 && strstr(r.out, "--resume"), "--stop-after %d: status %d, %.200s", step, r.status, r.err);
        fault_resume(&r, &d, out, "");
        EXPECT_STATUS(r, 0);
        expect_whole(&d, out);
    }
    test_remove_directory(&d.dir);
}

static void test_old_checkpoints_removed(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    fault_run(&r, &d, "run", "--checkpoint-every 2 --keep 2 --stop-after 5");
    EXPECT_STATUS(r, 0);
    run_command(&r,
                "cd '%s/run' && ls checkpoints | tr '\\n' ' ' && mkdir checkpoints/step_1 "
                "checkpoints/step_00000099.tmp checkpoints/notes && "
                "echo mine > checkpoints/step_00000007 && echo mine > checkpoints/notes/a && echo mine > plan.txt",
                d.dir.path);
    EXPECT(strcmp(r.out, "step_00000004 step_00000005 ") == 0, "with --keep 2 there are: %s", r.out);
    fault_resume(&r, &d, "run", "");
    EXPECT_STATUS(r, 0);
    run_command(
        &r,
        "cd '%s/run' && ls checkpoints | tr '\\n' ' ' && cat checkpoints/step_00000007 checkpoints/notes/a plan.txt",
        d.dir.path);
    EXPECT(strcmp(r.out, "notes step_00000007 step_00000010 step_00000012 step_1 mine\nmine\nmine\n") == 0,
           "left are: %s", r.out);
    test_remove_directory(&d.dir);
}

// Starts a run of 12 steps with a checkpoint after each in the background, does `fault` (with $pid) and waits for it.
static void fault_in_background(ProgramResult *r, const ProgramData *d, const char *out, const char *steps,
                                const char *fault) {
    run_command(
        r,
        "cd '%s' && { %s --train-data train.bin %s %s --out '%s' --checkpoint-every 1 > printed & } && pid=$! && %s; "
        "wait $pid; status=$?; cat printed; exit $status",
        d->dir.path, test_program_path(), fault_model, steps, out, fault);
}
#define WAIT_FOR_STEP "until grep -qs '\"step\": *3,' run/log.jsonl; do sleep 0.01; done"

static void test_signal_saves(void) {
    static const char *const signals[] = {"TERM", "INT", "USR1", "HUP"};
    for (int i = 0; i < 4; i++) {
        ProgramData d = fault_data();
        ProgramResult r;
        char fault[200];
        // enough steps that the signal arrives in the middle; the schedule is constant so that --steps may differ
        FORMAT(fault, WAIT_FOR_STEP "; kill -%s $pid", signals[i]);
        fault_in_background(&r, &d, "run", "--steps 1000000 --schedule constant --total-batch 128 --batch-size 4",
                            fault);
        EXPECT(r.status == EXIT_SIGNALLED && strstr(r.out, "--resume"), "SIG%s: status %d, stderr %.200s", signals[i],
               r.status, r.err);
        EXPECT(count_lines(r.err) == 1 && strstr(r.err, "saves a checkpoint"), "SIG%s: stderr %.300s", signals[i],
               r.err);
        double step = 0, after = 0;
        log_records(&d, "run", "train", "step", &step);
        char options[64];
        FORMAT(options, "--steps %d", (int)step + 2);
        fault_resume(&r, &d, "run", options);
        EXPECT_STATUS(r, 0);
        int records = log_records(&d, "run", "train", "step", &after);
        EXPECT(after == step + 2 && records == (int)after, "SIG%s at step %g: %d records up to step %g", signals[i],
               step, records, after);
        run_command(&r,
                    "cd '%s' && %s --train-data train.bin %s --steps %d --schedule constant --total-batch 128 "
                    "--batch-size 4 --out whole",
                    d.dir.path, test_program_path(), fault_model, (int)step + 2);
        EXPECT_STATUS(r, 0);
        run_command(&r,
                    "cd '%s' && last=$(ls run/checkpoints | tail -n 1) && diff -rq run/checkpoints/$last "
                    "whole/checkpoints/$last | grep -v trainer_state",
                    d.dir.path);
        EXPECT(r.out[0] == 0, "SIG%s: after the resume the weights differ: %s", signals[i], r.out);
        test_remove_directory(&d.dir);
    }
}

static void test_second_signal(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    // one step that takes long: many micro-steps, so that the first signal is still waiting for its end
    fault_in_background(&r, &d, "run", "--steps 10 --batch-size 1 --total-batch 16000000",
                        "until grep -qs 'training from' printed; do sleep 0.01; done; sleep 0.2; kill -INT $pid; "
                        "sleep 1; echo between >&2; kill -INT $pid");
    const char *answer = strstr(r.err, "the run stops after the current step"), *between = strstr(r.err, "between");
    EXPECT(answer && between && answer < between && count_lines(r.err) == 3, "stderr %.400s", r.err);
    EXPECT(r.status == 1 && strstr(r.err, "second signal: ending at once"), "status %d, stderr %.400s", r.status,
           r.err);
    test_remove_directory(&d.dir);
}

static void test_hangup_under_nohup(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    run_command(&r,
                "cd '%s' && { nohup %s --train-data train.bin %s %s --out run > printed & } && pid=$! && " WAIT_FOR_STEP
                "; kill -HUP $pid; wait $pid; status=$?; cat printed; exit $status",
                d.dir.path, test_program_path(), fault_model, "--steps 300 --total-batch 128 --batch-size 4");
    EXPECT(r.status == 0 && !strstr(r.err, "signal"), "status %d, stderr %.300s", r.status, r.err);
    test_remove_directory(&d.dir);
}

static void test_stdout_closed(void) {
    static const char *const readers[] = {"true", "head -n 1",
                                          "sed /step..*2.12/q"}; // before the start, and during the run
    ProgramData d = fault_data();
    ProgramResult r;
    fault_run(&r, &d, "whole", "");
    EXPECT_STATUS(r, 0);
    for (int i = 0; i < 3; i++) {
        run_command(&r,
                    "cd '%s' && rm -rf run && { %s --train-data train.bin %s %s --out run; echo $? > status; } | "
                    "{ %s > head; }; cat head status",
                    d.dir.path, test_program_path(), fault_model, fault_options, readers[i]);
        const char *status = r.out + max_int(0, (int)strlen(r.out) - 2);
        bool said = count_lines(r.err) == 1 && strstr(r.err, "stdout was closed");
        EXPECT(strcmp(status, "0\n") == 0 && (said || (i == 2 && !r.err[0])), // the third may come too late
               "%s: status %s, stderr %.300s", readers[i], status, r.err);
        expect_whole(&d, "run");
    }
    // what prints a result and nothing else ends as other programs do
    run_command(&r, "cd '%s' && { %s --generate 30 --vocab 256; echo $? >&2; } | true", d.dir.path,
                test_program_path());
    EXPECT(strcmp(r.err, "141\n") == 0, "--generate: stderr %.300s", r.err);
    test_remove_directory(&d.dir);
}

// Descriptors that are closed at the start must not become those of files that the program writes.
static void test_closed_descriptors(void) {
    static const char *const closed[] = {">&-", "<&- >&- 2>&-"};
    ProgramData d = fault_data();
    ProgramResult r;
    fault_run(&r, &d, "whole", "");
    EXPECT_STATUS(r, 0);
    for (int i = 0; i < 2; i++) {
        run_command(&r,
                    "cd '%s' && rm -rf run && %s --train-data train.bin %s %s --out run --stop-after "
                    "6 %s && %s --out run --resume --threads 1 %s",
                    d.dir.path, test_program_path(), fault_model, fault_options, closed[i], test_program_path(),
                    closed[i]);
        EXPECT(r.status == 0 && !r.out[0] && !r.err[0], "%s: status %d, %.300s%.300s", closed[i], r.status, r.out,
               r.err);
        expect_whole(&d, "run");
        run_command(&r, "rm -rf '%s/shards' && %s --out '%s/shards' README.md %s", d.dir.path, data_converter(),
                    d.dir.path, closed[i]);
        EXPECT(r.status == 0, "text_to_shards %s: status %d, %.300s", closed[i], r.status, r.err);
    }
    test_remove_directory(&d.dir);
}

// A process that leads a session of its own on a new terminal. Returns its number, and the terminal's other end.
static pid_t start_on_terminal(const ProgramData *d, const char *options, int *master) {
    static char text[2000];
    char *words[64], tty[100];
    int count = 0;
    *master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    CHECK(*master >= 0 && grantpt(*master) == 0 && unlockpt(*master) == 0, "no terminal: %s", strerror(errno));
    FORMAT(tty, "%s", ptsname(*master));
    FORMAT(text, "%s --train-data %s/train.bin %s --out %s/run %s", test_program_path(), d->dir.path, fault_model,
           d->dir.path, options);
    for (char *word = strtok(text, " "); word && count < 63; word = strtok(NULL, " ")) words[count++] = word;
    words[count] = NULL;
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        int fd = open(tty, O_RDWR); // the first one that a session's leader opens is its controlling terminal
        if (fd >= 0 && dup2(fd, 0) >= 0 && dup2(fd, 1) >= 0 && dup2(fd, 2) >= 0) execv(words[0], words);
        _exit(127);
    }
    CHECK(pid > 0, "cannot fork: %s", strerror(errno));
    return pid;
}

static void test_terminal_closed(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    char c[256];
    int master = 0, status = 0;
    pid_t pid = start_on_terminal(&d, "--steps 1000000 --schedule constant --batch-size 4", &master);
    run_command(&r,
                "cd '%s' && for i in $(seq 3000); do grep -qs '\"step\": *3,' run/log.jsonl && break; sleep 0.01; done",
                d.dir.path);
    while (read(master, c, sizeof(c)) == (ssize_t)sizeof(c)) continue; // else the run waits for room in the terminal
    close(master);
    CHECK(waitpid(pid, &status, 0) == pid, "cannot wait: %s", strerror(errno));
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SIGNALLED, "the run ended with %d", status);
    double step = 0;
    log_records(&d, "run", "train", "step", &step);
    run_command(&r, "ls -d '%s/run/checkpoints/step_%08d' && grep -c Hangup '%s/run/log.jsonl'", d.dir.path, (int)step,
                d.dir.path);
    EXPECT_STATUS(r, 0);
    test_remove_directory(&d.dir);
}

// Products of a width at which oneDNN computes with its stack pointer in a buffer on the heap, where a signal handler
// must not run; and a signal comes more than once, as when a launcher passes on what a scheduler has sent to all
// processes.
static void test_signal_during_product(void) {
#ifdef __SANITIZE_ADDRESS__
    enum { ROUNDS = 2 }; // each takes ten times as long
#else
    enum { ROUNDS = 8 };
#endif
    for (int i = 0; i < ROUNDS; i++) {
        ProgramData d = fault_data();
        ProgramResult r;
        run_command(&r,
                    "cd '%s' && { %s --preset tiny --layers 2 --seq-len 128 --batch-size 2 --total-batch 2048 --steps "
                    "1000000 --threads 1 "
                    "--train-data train.bin --out run > printed & } && pid=$! && until grep -qs '\"step\": *2,' "
                    "run/log.jsonl; do sleep 0.01; done; "
                    "kill -USR1 $pid; sleep 0.0%d; kill -TERM $pid; wait $pid",
                    d.dir.path, test_program_path(), i);
        EXPECT(r.status == EXIT_SIGNALLED, "round %d: status %d, stderr %.300s", i, r.status, r.err);
        test_remove_directory(&d.dir);
    }
}

// Killed at moments spread over a run that saves after every step, and resumed each time; once it is done, another
// begins.
static void test_kill_while_saving(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    struct timespec begin, end;
    timespec_get(&begin, TIME_UTC);
    fault_run(&r, &d, "whole", "--checkpoint-every 1");
    timespec_get(&end, TIME_UTC);
    EXPECT_STATUS(r, 0);
    // machines differ much, and so do their minutes: what a run takes is learnt as the starts go on
    double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    char start[1500]; // the first start makes the run; a later one resumes it
    FORMAT(start,
           "if test -e run/run.json; then start='--out run --resume --threads 1'; "
           "else start=\"--train-data train.bin %s %s --out run --checkpoint-every 1\"; fi",
           fault_model, fault_options);
    enum { KILLS = 25 };
    int killed = 0;
    for (int i = 0; i < KILLS; i++) {
        run_command(&r,
                    "cd '%s' && if test -e run/checkpoints/step_00000012; then rm -r run; fi; %s; "
                    "{ %s $start & } && pid=$! && sleep %.4f; kill -9 $pid; wait $pid",
                    d.dir.path, start, test_program_path(), seconds * (0.1 + 0.9 * (i * 7 % KILLS) / KILLS));
        bool refused = strstr(r.err, "diffv2: ") && !strstr(r.err, "skipping checkpoint");
        EXPECT(!refused, "after kill %d the run was refused: %.300s", i, r.err);
        EXPECT(!strstr(r.err, "skipping checkpoint"), "kill %d left a broken checkpoint under its final name: %.300s",
               i, r.err);
        if (r.status == 128 + 9) killed++;
        seconds *= r.status == 128 + 9 ? 1.1 : 0.7;
    }
    EXPECT(killed > KILLS / 3, "only %d of %d starts were killed: the test tests little", killed, KILLS);
    run_command(&r, "cd '%s' && %s; %s $start", d.dir.path, start, test_program_path());
    EXPECT_STATUS(r, 0);
    expect_whole(&d, "run");
    run_command(&r, "ls '%s/run/checkpoints' | grep -c tmp", d.dir.path);
    EXPECT(atoi(r.out) == 0, "%d unfinished checkpoints are left", atoi(r.out));
    test_remove_directory(&d.dir);
}

static void test_broken_checkpoint_skipped(void) {
    static const char *const files[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                        "trainer_state.json"};
    ProgramData d = fault_data();
    ProgramResult r;
    fault_run(&r, &d, "whole", "--checkpoint-every 4");
    EXPECT_STATUS(r, 0);
    for (int i = 0; i < 4; i++)
        for (int place = 0; place < 3; place++) { // flipped near the start, in the middle, at the end; then cut short
            run_command(&r,
                        "cd '%s' && rm -rf run && cp -r whole run && f=run/checkpoints/step_00000012/%s && n=$(stat -c "
                        "%%s $f) && "
                        "at=$((n * %d / 2 - (%d > 0))) && b=$(od -An -tu1 -j $at -N 1 $f) && "
                        "printf \"\\\\$(printf %%o $((b ^ 1)))\" | dd of=$f bs=1 seek=$at conv=notrunc status=none",
                        d.dir.path, files[i], place, place);
            EXPECT_STATUS(r, 0);
            fault_resume(&r, &d, "run", "");
            EXPECT(r.status == 0 && count_lines(r.err) == 1 && strstr(r.err, "/step_00000012: ") &&
                       strstr(r.err, files[i]),
                   "%s, place %d: status %d, stderr %.300s", files[i], place, r.status, r.err);
            expect_whole(&d, "run");
        }
    run_command(&r,
                "cd '%s' && rm -rf run && cp -r whole run && for c in run/checkpoints/*; do truncate -s -1 "
                "$c/model.safetensors; done",
                d.dir.path);
    fault_resume(&r, &d, "run", "");
    EXPECT(r.status == 1 && count_lines(r.err) == 4, "no checkpoint is whole: status %d, stderr %.500s", r.status,
           r.err);
    test_remove_directory(&d.dir);
}

static void test_damaged_checkpoint_rejected(void) {
    static const char *const modes[] = {"--train-data train.bin --steps 1 --seq-len 16", "--generate 5",
                                        "--eval --val-data train.bin --seq-len 16",
                                        "--dump-grads dump --train-data train.bin --seq-len 16"};
    static const struct {
        const char *damage, *refused; // NULL: it is not
    } cases[] = {
        {"true", NULL},
        {"rm optimizer.safetensors", NULL},
        {"printf x >> optimizer.safetensors", NULL},
        {"printf '\\n' >> config.json", "its config.json has"},
        {"printf x | dd of=model.safetensors bs=1 seek=5001 conv=notrunc status=none",
         "its model.safetensors does not match its checksum"},
        {"truncate -s -1 trainer_state.json", "trainer_state.json does not match its checksum"},
        {"sed -i 's/\"step\": 1/\"step\": 9/' trainer_state.json", "trainer_state.json does not match its checksum"},
        {"truncate -s 0 trainer_state.json", "trainer_state.json does not match its checksum"},
        {"printf x | dd of=model.safetensors bs=1 seek=5001 conv=notrunc status=none; rm trainer_state.json", NULL},
        {"printf '\\n' >> config.json; echo '{\"log_history\": []}' > trainer_state.json", NULL}, // of Transformers
    };
    ProgramData d = fault_data();
    ProgramResult r;
    fault_run(&r, &d, "whole", "");
    EXPECT_STATUS(r, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (int m = 0; m < 4; m++) {
            run_command(&r,
                        "cd '%s' && rm -rf start && cp -r whole/checkpoints/step_00000012 start && (cd start && %s) && "
                        "%s --init start --batch-size 2 --threads 1 %s",
                        d.dir.path, cases[i].damage, test_program_path(), modes[m]);
            if (cases[i].refused) EXPECT_ONE_LINE(r, EXIT_FAILED, cases[i].refused);
            else EXPECT(r.status == 0, "%s, %s: status %d, %.300s", cases[i].damage, modes[m], r.status, r.err);
        }
    // a run that was stopped before its first checkpoint starts again from what it was started from
    run_command(&r,
                "cd '%s' && rm -rf start && cp -r whole/checkpoints/step_00000012 start && %s --init start --out run "
                "--train-data train.bin --batch-size 2 --steps 1 && rm -r run/checkpoints && printf '\\n' >> "
                "start/config.json && %s --out run --resume",
                d.dir.path, test_program_path(), test_program_path());
    EXPECT_ONE_LINE(r, EXIT_FAILED, "its config.json has");
    test_remove_directory(&d.dir);
}

static void test_run_lock(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    char fault[300];
    FORMAT(fault, WAIT_FOR_STEP "; %s --out run --resume; echo second $? >&2; kill -TERM $pid", test_program_path());
    fault_in_background(&r, &d, "run", "--steps 1000000 --total-batch 128 --batch-size 4", fault);
    EXPECT(r.status == EXIT_SIGNALLED && strstr(r.err, "second 1") && count_lines(r.err) == 3,
           "status %d, stderr %.300s", r.status, r.err);
    test_remove_directory(&d.dir);
}

static void test_changed_shard(void) {
    static const char *const faults[] = {
        "rm train.bin",                                                  // vanishes
        "truncate -s 1100 train.bin",                                    // shrinks
        "cp train.bin other && printf x >> other && mv other train.bin", // is replaced
    };
    for (int i = 0; i < 3; i++) {
        ProgramData d = fault_data();
        ProgramResult r;
        char fault[300];
        FORMAT(fault, WAIT_FOR_STEP "; %s", faults[i]);
        fault_in_background(&r, &d, "run", "--steps 1000000 --total-batch 128 --batch-size 4", fault);
        EXPECT(r.status == 1 && count_lines(r.err) == 1 && strstr(r.err, "train.bin"), "%s: status %d, stderr %.300s",
               faults[i], r.status, r.err);
        test_remove_directory(&d.dir);
    }
}

// A file system of 400 KB in a mount namespace of its own.
static void test_full_or_read_only_disk(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    run_command(&r, "unshare -rm true");
    if (r.status != 0) {
        test_skip("there are no mount namespaces here");
        test_remove_directory(&d.dir);
        return;
    }
    fault_run(&r, &d, "whole", "--checkpoint-every 1 --keep 0");
    EXPECT_STATUS(r, 0);
    run_command(&r,
                "cd '%s' && mkdir disk && unshare -rm sh -c 'mount -t tmpfs -o size=400k tmpfs disk && %s --train-data "
                "train.bin %s %s --out disk/run "
                "--checkpoint-every 1 --keep 0; echo status $? >&2; ls disk/run/checkpoints; cp -r disk/run run'",
                d.dir.path, test_program_path(), fault_model, fault_options);
    EXPECT(strstr(r.err, "status 1") && count_lines(r.err) == 2 && strstr(r.err, "No space left"),
           "a full disk: stderr %.300s", r.err);
    EXPECT(strstr(r.out, "step_00000001\n"), "no checkpoint was saved before the disk was full: %.300s", r.out);
    EXPECT(!strstr(r.out, "tmp"), "an unfinished checkpoint keeps the disk full: %.300s", r.out);
    fault_resume(&r, &d, "run", "");
    EXPECT_STATUS(r, 0);
    expect_whole(&d, "run");
    run_command(&r,
                "cd '%s' && unshare -rm sh -c 'mount -t tmpfs -o ro tmpfs disk && %s --train-data train.bin %s %s "
                "--out disk/run'",
                d.dir.path, test_program_path(), fault_model, fault_options);
    EXPECT_ONE_LINE(r, 1, "disk/run");
    test_remove_directory(&d.dir);
}

// A file size limit is a disk that is full for the file of the optimizer.
static void test_limits(void) {
    static const struct {
        const char *limit, *options, *line;
    } cases[] = {
        {"-f 0", "", "cannot write run/run.json.tmp: File too large"},
        {"-f 200", "--no-checkpoint-background",
         "cannot write run/checkpoints/step_00000012.tmp/optimizer.safetensors: "
         "File too large"},
        {"-f 200", "--checkpoint-every 5",
         "cannot write run/checkpoints/step_00000005.tmp/optimizer.safetensors: File "
         "too large"},
#ifndef __SANITIZE_ADDRESS__ // its startup requires more
        {"-s 128", "", "the stack is limited to 128 KiB"},
#endif
    };
    ProgramData d = fault_data();
    ProgramResult r;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run_command(
            &r,
            "cd '%s' && rm -rf run && (ulimit %s; %s --train-data train.bin %s %s --out run %s 2>&1 >/dev/null; "
            "echo status $?) | cat >&2; find . -name '*tmp*'",
            d.dir.path, cases[i].limit, test_program_path(), fault_model, fault_options, cases[i].options);
        EXPECT(strstr(r.err, cases[i].line) && strstr(r.err, "status 1") && count_lines(r.err) == 2 && !r.out[0],
               "ulimit %s %s: stderr %.300s, left are: %.300s", cases[i].limit, cases[i].options, r.err, r.out);
    }
    test_remove_directory(&d.dir);
}

// What another program does to the directory of a run between two checkpoints.
static void test_lost_directory(void) {
    static const struct {
        const char *fault, *line;
        int lines, status;
    } cases[] = {
        {"rm run/log.jsonl", "run/log.jsonl was deleted during the run", 2, EXIT_SIGNALLED},
        {"cp run/log.jsonl x; mv x run/log.jsonl", "run/log.jsonl was replaced during the run", 2, EXIT_SIGNALLED},
        {"rm run/run.json", "run/run.json was deleted during the run", 2, EXIT_SIGNALLED},
        {"mv run old", "run/run.json was deleted during the run", 3, EXIT_SIGNALLED},
        {"cp run/run.json x; mv x run/run.json", "run/run.json was replaced during the run", 2, EXIT_FAILED},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ProgramData d = fault_data();
        ProgramResult r;
        double step = 0;
        run_command(&r,
                    "cd '%s' && { %s --train-data train.bin %s --steps 1000000 --schedule constant --total-batch 128 "
                    "--batch-size 4 --out run > printed & } && pid=$! && " WAIT_FOR_STEP "; %s; kill -TERM $pid; wait "
                    "$pid",
                    d.dir.path, test_program_path(), fault_model, cases[i].fault);
        EXPECT(r.status == cases[i].status && strstr(r.err, cases[i].line) && count_lines(r.err) == cases[i].lines,
               "%s: status %d, stderr %.400s", cases[i].fault, r.status, r.err);
        int records = log_records(&d, "run", "train", "step", &step);
        EXPECT(records == (int)step && step >= 3, "%s: %d records up to step %g", cases[i].fault, records, step);
        if (cases[i].status == EXIT_SIGNALLED) {
            fault_resume(&r, &d, "run", "--steps 1000000 --stop-after 1");
            EXPECT(r.status == 0 && strstr(r.out, "nothing to do"), "%s: status %d, %.300s", cases[i].fault, r.status,
                   r.err);
        }
        test_remove_directory(&d.dir);
    }
}

static void test_one_validation_of_a_step(void) {
    ProgramData d = fault_data();
    ProgramResult r;
    char path[600];
    double step = 0;
    FORMAT(path, "%s/task", d.dir.path);
    choice_write_random(path, 3, 2, 2, 256, 15, 1);
    fault_run(&r, &d, "run", "--val-data train.bin --eval-choices task=task --stop-after 1");
    EXPECT_STATUS(r, 0);
    run_command(&r, "rm -r '%s/run/checkpoints'", d.dir.path); // as if it was killed before the first one
    fault_resume(&r, &d, "run", "--stop-after 2");
    EXPECT_STATUS(r, 0);
    int val = log_records(&d, "run", "val", "step", &step), choices = log_records(&d, "run", "choices", "step", &step),
        events = log_records(&d, "run", "event", "step", &step);
    EXPECT(val == 1 && choices == 1, "step 0 has %d validations and %d scores of its task", val, choices);
    EXPECT(events > 2, "%d events are left", events);
    test_remove_directory(&d.dir);
}

static const Test faults_tests[] = {
    {"a run resumes bitwise at every step, with accumulation and across the end of an epoch",
     test_resume_at_every_step},
    {"old checkpoints are removed, and files of other programs are kept", test_old_checkpoints_removed},
    {"a signal causes a checkpoint, and a resume continues bitwise", test_signal_saves},
    {"a signal during a matrix product stops the run with a checkpoint, even if it is repeated",
     test_signal_during_product},
    {"the first signal is acknowledged at once, and a second ends the run", test_second_signal},
    {"SIGHUP is ignored under nohup", test_hangup_under_nohup},
    {"a run continues after the reader of its stdout has closed it", test_stdout_closed},
    {"a run and a conversion of text are complete when stdin, stdout and stderr are closed", test_closed_descriptors},
    {"closing the terminal stops the run with a checkpoint", test_terminal_closed},
    {"kill -9 never leaves a partial checkpoint under its final name", test_kill_while_saving},
    {"a damaged checkpoint is reported, and the run resumes bitwise from an older one", test_broken_checkpoint_skipped},
    {"--init rejects a damaged checkpoint in every mode, and accepts weights of other programs",
     test_damaged_checkpoint_rejected},
    {"two processes cannot use the same run", test_run_lock},
    {"a shard that changes during the run stops it with a one-line error", test_changed_shard},
    {"a limit of the stack or of the size of files is a one-line error, and nothing incomplete is left", test_limits},
    {"a deleted or replaced log.jsonl, run.json or directory of a run is written again, or ends it",
     test_lost_directory},
    {"a run that starts again from step 0 has one validation of step 0", test_one_validation_of_a_step},
    {"a full or read-only disk is a one-line error, and the run can be resumed", test_full_or_read_only_disk},
};
enum { FAULTS_TEST_COUNT = sizeof(faults_tests) / sizeof(faults_tests[0]) };
#endif
