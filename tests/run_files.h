/*
run_files.h: tests of log.jsonl, run.json and the lock of a run (llmc/log/logger.h).
*/
#pragma once
#include "checkpoint_files.h"

// ---------------------------------------------------------------------------------------------------------------------
// logger.h

static Log *ckpt_log_open(const char *dir) {
    Log *log = (Log *)checked_calloc(1, sizeof(Log));
    cJSON *run = cJSON_CreateObject();
    cJSON_AddStringToObject(run, "command", "x");
    log_create(log, dir, run);
    cJSON_Delete(run);
    return log;
}

static void ckpt_log_record(Log *log, const char *kind, int64_t step) {
    log_begin(log, kind, step);
    log_end(log);
}

static void test_log_records(void) {
    TestDirectory d = test_make_directory();
    const char *dir = test_text("%s/a/b", d.path); // parents are made
    Log *log = ckpt_log_open(dir);
    log_begin(log, "train", 3);
    log_number(log, "loss", (double)(float)3.14159274);
    log_number(log, "nan", NAN);
    log_number(log, "inf", -INFINITY);
    log_integer(log, "tokens", INT64_MIN);
    log_number(log, "loss_z", NAN);
    log_bool(log, "skipped", true);
    log_string(log, "text", "a \"b\"\n\xFF");
    log_bytes(log, "bytes", "c\0d", 3);
    log_end(log);
    static char text[200000];
    memset(text, '\n', sizeof(text) - 1); // twelve times too long when escaped
    log_begin(log, "event", 3);
    log_string(log, "long", text);
    log_end(log);
    cJSON *whole = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(whole, "list");
    cJSON_AddItemToArray(list, cJSON_CreateString(text));
    cJSON_AddItemToArray(list, cJSON_CreateObject());
    cJSON_AddNumberToObject(cJSON_GetArrayItem(list, 1), "x", 1);
    cJSON_AddNullToObject(cJSON_GetArrayItem(list, 1), "y");
    log_record(log, whole);
    Log *none = (Log *)checked_calloc(1, sizeof(Log)); // a closed log takes records, too
    ckpt_log_record(none, "train", 1);
    log_record(none, whole);
    log_sync(none);
    log_close(none);
    log_sync(log);
    log_close(log);
    free(none);
    free(log);

    size_t size = 0;
    char *lines = ckpt_read_file(test_text("%s/log.jsonl", dir), &size);
    const char *want = "{\"kind\": \"train\", \"step\": 3, \"loss\": 3.14159274, \"nan\": null, \"inf\": null, "
                       "\"tokens\": -9223372036854775808, \"loss_z\": null, \"skipped\": true, "
                       "\"text\": \"a \\\"b\\\"\\u000a\xEF\xBF\xBD\", \"bytes\": \"c\\u0000d\"}\n";
    EXPECT(strncmp(lines, want, strlen(want)) == 0, "the record is %.300s", lines);
    EXPECT(count_lines(lines) == 3, "%d lines", count_lines(lines));
    char *second = strchr(lines, '\n') + 1, *third = strchr(second, '\n') + 1;
    third[-1] = 0;
    cJSON *record = json_parse(second, strlen(second));
    EXPECT(cJSON_IsObject(record), "a cut string leaves no JSON: %.100s", second);
    cJSON_Delete(record);
    record = json_parse(third, strlen(third));
    EXPECT(cJSON_Compare(record, whole, true) && strstr(third, "\", {\"x\": 1, \"y\": null}]}\n"),
           "a long record is another: %.100s", third);
    cJSON_Delete(record);
    cJSON_Delete(whole);
    free(lines);
    cJSON *run = log_read_run_json(dir);
    EXPECT(run->child && strcmp(run->child->string, "command") == 0, "run.json is not what was given");
    cJSON_Delete(run);
}

static void test_log_resume(void) {
    static const struct {
        const char *add, *left; // behind the records of steps 1 to 4, with a checkpoint at step 2
        int warnings;
    } cases[] = {
        {"", "", 0},
        {"{\"kind\": \"train\", \"step\": 2, \"lo", "", 0},
        {"{\"kind\": \"train\", \"step\": 2}", "", 0}, // whole but for its newline
        {"{\"kind\": \"val\", \"step\": 2}\n", "{\"kind\": \"val\", \"step\": 2}\n", 0},
        {"{\"kind\": \"tr\n{\"kind\": \"val\", \"step\": 1}\n", "{\"kind\": \"val\", \"step\": 1}\n", 1},
        {"{\"kind\": \"val\", \"step\": 10}\n{\"kind\": \"val\", \"step\": 1}\n", "{\"kind\": \"val\", \"step\": 1}\n",
         0},
        {"\n", "", 0},
        {"[1]\n", "", 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TestDirectory d = test_make_directory();
        const char *dir = test_text("%s/run", d.path), *path = test_text("%s/run/log.jsonl", d.path);
        Log *log = ckpt_log_open(dir);
        for (int64_t step = 1; step <= 4; step++) ckpt_log_record(log, "train", step);
        log_close(log);
        int fd = open(path, O_WRONLY | O_APPEND);
        file_write(fd, cases[i].add, strlen(cases[i].add), path);
        close(fd);
        free(log);
        static ProgramResult r;
        run_command(&r, "%s --child checkpoint-resume '%s' 2", test_self(), dir);
        EXPECT(r.status == 0 && count_lines(r.err) == cases[i].warnings, "case %zu: status %d: %s", i, r.status, r.err);
        char want[500];
        FORMAT(want,
               "{\"kind\": \"train\", \"step\": 1}\n{\"kind\": \"train\", \"step\": 2}\n%s{\"kind\": \"train\", "
               "\"step\": 3}\n",
               cases[i].left);
        size_t size = 0;
        char *text = ckpt_read_file(path, &size);
        EXPECT(strcmp(text, want) == 0 && size == strlen(want), "case %zu: the log is\n%s", i, text);
        EXPECT(ckpt_count_entries(dir) == 2, "case %zu: something was left behind", i);
        free(text);
    }
}

static void test_run_directories(void) {
    TestDirectory d = test_make_directory();
    const char *dir = test_text("%s/run", d.path), *log_file = test_text("%s/run/log.jsonl", d.path);
    ckpt_refused("resume", dir, "", "has no run.json: it is not a run");
    ckpt_accepted("create", dir, "", "");
    ckpt_refused("create", dir, "", "already contains a run; use --resume");
    ckpt_accepted("resume", dir, "", "");
    CHECK(unlink(log_file) == 0, "cannot remove %s", log_file);
    ckpt_accepted("resume", dir, "", ""); // stopped between run.json and its log
    Log *log = (Log *)checked_calloc(1, sizeof(Log));
    log_resume(log, dir, 0, false);
    ckpt_refused("resume", dir, "", "another process is running this run");
    log_close(log);
    free(log);
    ckpt_accepted("resume", dir, "", "");
    CHECK(unlink(test_text("%s/run.json", dir)) == 0, "cannot remove run.json");
    ckpt_refused("create", dir, "", "log.jsonl exists without a run.json");
    CHECK(unlink(log_file) == 0, "cannot remove %s", log_file);
    directory_create(test_text("%s/checkpoints", dir));
    ckpt_refused("create", dir, "", "checkpoints exists without a run.json");
    test_write_text(log_file, "");
    ckpt_refused("create", log_file, "", "log.jsonl: File exists");
}

// The one that the log names by its first record has written run.json, and the other has changed nothing.
static void test_run_simultaneous_starts(void) {
    enum { TRIES = 60 };
    TestDirectory d = test_make_directory();
    static ProgramResult r;
    run_command(
        &r,
        "for try in $(seq %d); do for n in 1 2; do { %s --child checkpoint-create '%s/run'$try $n 2>> '%s/err'; } "
        "& done; wait; done",
        TRIES, test_self(), d.path, d.path);
    EXPECT(r.status == 0, "status %d: %s", r.status, r.err);
    for (int try_count = 1; try_count <= TRIES; try_count++) {
        const char *dir = test_text("%s/run%d", d.path, try_count);
        double step = 0;
        size_t size = 0;
        char *text = ckpt_read_file(test_text("%s/log.jsonl", dir), &size);
        cJSON *run = log_read_run_json(dir), *record = cJSON_Parse(text);
        const char *by = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(run, "by"));
        EXPECT(json_get_number(record, "step", &step) && by && strtod(by, NULL) == step - 1 && count_lines(text) == 1,
               "try %d: run.json is by start %s, the log by start %g: %s", try_count, by ? by : "?", step - 1, text);
        EXPECT(ckpt_count_entries(dir) == 2, "try %d: something was left behind", try_count);
        cJSON_Delete(run);
        cJSON_Delete(record);
        free(text);
    }
    char lines[16384];
    test_read_file(test_text("%s/err", d.path), lines, sizeof(lines));
    int refused = 0;
    for (char *line = strtok(lines, "\n"); line; line = strtok(NULL, "\n")) {
        EXPECT(strstr(line, "another process is running this run") || strstr(line, "already contains a run"), "%s",
               line);
        refused++;
    }
    EXPECT(refused == TRIES, "%d of %d starts were refused", refused, TRIES);
}

static void test_run_locked_out(void) {
    TestDirectory d = test_make_directory();
    const char *dir = test_text("%s/run", d.path), *temporary = test_text("%s/run/run.json.tmp", d.path);
    directory_create(dir);
    int fd = log_lock_new(dir, temporary); // another start, before it writes
    file_write(fd, "x", 1, temporary);
    ckpt_refused("create", dir, "", "another process is running this run");
    struct stat st;
    EXPECT(fstat(fd, &st) == 0 && st.st_size == 1 && ckpt_count_entries(dir) == 1, "the loser changed something");
    close(fd); // it died: what it left is no obstacle
    ckpt_accepted("create", dir, "", "");
    EXPECT(ckpt_count_entries(dir) == 2, "something was left behind");

    Log *log = (Log *)checked_calloc(1, sizeof(Log));
    cJSON *run = log_read_run_json(dir);
    log->lock = log_lock(dir);
    for (int i = 0; i < 3; i++) {
        log_write_run(log, dir, run);
        ckpt_refused("resume", dir, "", "another process is running this run");
        ckpt_refused("create", dir, "", "already contains a run");
        EXPECT(ckpt_count_entries(dir) == 2, "something was left behind");
    }
    cJSON_Delete(run);
    log_close(log);
    free(log);
    ckpt_accepted("resume", dir, "", "");
}

// A link to a file, or another name of it. hard: the latter.
static void test_run_link(const char *target, const char *path, bool hard) {
    CHECK((hard ? link(target, path) : symlink(target, path)) == 0, "cannot link %s: %s", path, strerror(errno));
}

static void test_run_planted_links(void) {
    TestDirectory d = test_make_directory();
    const char *target = test_text("%s/target", d.path), *dir = test_text("%s/run", d.path),
               *run = test_text("%s/run/run.json.tmp", d.path), *copy = test_text("%s/run/log.jsonl.tmp", d.path),
               *log = test_text("%s/run/log.jsonl", d.path);
    char text[100];
    test_write_text(target, "mine");
    directory_create(dir);
    test_run_link(target, run, false);
    ckpt_refused("create", dir, "", "run.json.tmp: it is a link; remove it");
    CHECK(unlink(run) == 0, "cannot remove %s", run);
    for (int hard = 0; hard < 2; hard++) {
        if (hard) test_run_link(target, run, true);
        ckpt_accepted("create", dir, "", "");
        test_run_link(target, run, hard);
        test_run_link(target, copy, hard);
        ckpt_accepted("resume", dir, "", "");
        EXPECT(ckpt_count_entries(dir) == 2, "something was left behind");
        CHECK(unlink(log) == 0 && unlink(test_text("%s/run.json", dir)) == 0, "cannot remove the run");
    }
    ckpt_accepted("create", dir, "", "");
    CHECK(unlink(log) == 0, "cannot remove %s", log);
    test_run_link(target, log, false);
    ckpt_refused("resume", dir, "", "log.jsonl is a link");
    test_read_file(target, text, sizeof(text));
    EXPECT(strcmp(text, "mine") == 0, "the target of a link has changed: %s", text);
}

static const Test run_files_tests[] = {
    {"a log record is one line of valid JSON", test_log_records},
    {"a resume removes an incomplete line and the records after its checkpoint from the log", test_log_resume},
    {"a directory that contains a run is not started again, and one without a run is not resumed",
     test_run_directories},
    {"of two simultaneous first starts one locks the run, and the other changes nothing", test_run_simultaneous_starts},
    {"a start without the lock changes nothing, and a replaced run.json stays locked", test_run_locked_out},
    {"links in the place of files of a run do not change their targets, and temporary files are removed",
     test_run_planted_links},
};
