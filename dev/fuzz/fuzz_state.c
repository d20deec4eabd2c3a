/*
fuzz_state.c: a damaged trainer_state.json: its checksum and those of the files beside it, its numbers, its spike
detectors, and its options, which --resume adopts. Accepted options and detectors must be equal after saving and reading
them.

Most mutations repair the checksum; otherwise the reader rejects the file at once.
*/
#include "fuzz.h"
#include "../../llmc/checkpoint/checkpoint.h"
#include "../../llmc/options/options_json.h"
#include "../../llmc/options/options_model.h"
#include "../../llmc/run/rollback.h"
#include "../../llmc/run/spikes.h"

const char fuzz_file[] = "trainer_state.json";

enum { STEP = 7 };

int omp_get_num_procs(void) { return 1; } // the targets are compiled without OpenMP

void fuzz_prepare(void) {
    fuzz_put("config.json", "{}\n", 3);
    fuzz_put("model.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
    fuzz_put("optimizer.safetensors", "", 0); // a file has no chunk when it is empty
}

static cJSON *build_state(uint64_t big) {
    cJSON *state = cJSON_CreateObject();
    Options o;
    options_defaults(&o);
    option_set(&o, option_row("train-data"), "corpus/*.bin");
    option_set(&o, option_row("layers"), "2");
    option_set(&o, option_row("window"), "64");
    if (big > UINT32_MAX) option_set(&o, option_row("yoco"), "yes");
    else option_set(&o, option_row("full-every"), "2");
    if (big > UINT32_MAX) option_set(&o, option_row("seed"), "18446744073709551615");
    json_add_u64(state, "step", STEP);
    json_add_u64(state, "updates", STEP);
    json_add_u64(state, "next_window", big);
    json_add_u64(state, "seed", o.seed);
    json_add_u64(state, "data_fingerprint", big);
    SpikeGuard guard;
    memset(&guard, 0, sizeof(guard));
    for (int i = 0; i < 3; i++) spike_guard_decide(&guard, 1.5 + i, i ? 0.25 * i : NAN, 0, 0);
    cJSON_AddItemToObject(state, "detectors", spike_guard_to_json(&guard));
    cJSON_AddItemToObject(state, "options", options_state_to_json(&o));
    FileDigests files[CHECKPOINT_FILE_COUNT];
    checksums_read(fuzz_directory(), files);
    cJSON_AddItemToObject(state, "checksums", checksums_build(fuzz_directory(), files));
    options_free(&o);
    return state;
}

void fuzz_seeds(void) {
    char path[PATH_SIZE];
    for (int big = 0; big < 2; big++) {
        cJSON *state = build_state(big ? UINT64_MAX - 5 : 56);
        if (!big) cJSON_DeleteItemFromObject(state, "checksums");
        FORMAT(path, "%s/%s", fuzz_seed_path, big ? "big_numbers" : "without_checksums");
        checkpoint_state_write(path, state);
        cJSON_Delete(state);
    }
    cJSON *empty = cJSON_CreateObject();
    cJSON_AddNullToObject(empty, "step");
    FORMAT(path, "%s/empty", fuzz_seed_path);
    checkpoint_state_write(path, empty);
    cJSON_Delete(empty);
}

static char *saved_text(const Options *o, size_t *size) {
    cJSON *json = options_state_to_json(o);
    char *text = json_text(json, size);
    cJSON_Delete(json);
    return text;
}

static void check_options(const Options *o) {
    Options again;
    size_t size = 0, size_again = 0;
    char *text = saved_text(o, &size);
    cJSON *json = json_parse(text, size);
    FUZZ_EXPECT(json, "saved options are not JSON: %s", text);
    options_defaults(&again);
    options_adopt_json(&again, json, "the checkpoint");
    char *text_again = saved_text(&again, &size_again);
    FUZZ_EXPECT(size == size_again && memcmp(text, text_again, size) == 0, "options were saved as %s and again as %s",
                text, text_again);
    cJSON_Delete(json);
    free(text);
    free(text_again);
    options_free(&again);
}

static void check_detectors(const cJSON *json) {
    SpikeGuard guard, again;
    memset(&guard, 0, sizeof(guard));
    memset(&again, 0, sizeof(again));
    if (!spike_guard_from_json(&guard, json)) return;
    cJSON *saved = spike_guard_to_json(&guard);
    FUZZ_EXPECT(spike_guard_from_json(&again, saved), "detectors that were read cannot be read again");
    cJSON *saved_again = spike_guard_to_json(&again);
    FUZZ_EXPECT(cJSON_Compare(saved, saved_again, true), "detectors changed by being saved and read");
    cJSON_Delete(saved);
    cJSON_Delete(saved_again);
}

// A trainer_state.json with the right checksum.
static void large_state(const char *name, const char *head, const char *piece, const char *end, size_t size) {
    char *text = (char *)checked_calloc(size + 64, 1), tail[64];
    size_t n = fuzz_repeat(text, head, piece, end, size);
    n += (size_t)checkpoint_state_tail(text, n, tail);
    strcat(text, tail);
    fuzz_large_input(name, text, n);
    free(text);
}

void fuzz_large(void) {
    large_state("one array", "{\"a\": [", "0,", "0],\n  ", 32 << 20);
    large_state("bad steps", "{\"rollback\": {\"target\": 1, \"times\": 1, \"bad\": [", "0,", "0]},\n  ", 4 << 20);
    large_state("options", "{\"step\": 1, \"options\": {\"lr\": 1", ",\"lr\":1", "},\n  ", 8 << 20);
}

void fuzz_one(const uint8_t *data, size_t size) {
    (void)data;
    static const char *const numbers[] = {"step", "updates", "next_window", "seed", "data_fingerprint"};
    Reason why;
    if (!checkpoint_verify(fuzz_directory(), STEP, why)) warn("%s", why);
    cJSON *state = checkpoint_load_state(fuzz_directory());
    for (int i = 0; i < 5; i++) {
        uint64_t value = 0, back = 0;
        if (!json_get_u64(state, numbers[i], &value)) continue;
        cJSON *object = cJSON_CreateObject();
        json_add_u64(object, "number", value);
        FUZZ_EXPECT(json_get_u64(object, "number", &back) && back == value, "a number was saved as another");
        cJSON_Delete(object);
    }
    check_detectors(cJSON_GetObjectItemCaseSensitive(state, "detectors"));
    Rollback rollback;
    memset(&rollback, 0, sizeof(rollback));
    rollback.count = rollback.steps = ROLLBACK_LIMIT;
    if (rollback_from_json(&rollback, cJSON_GetObjectItemCaseSensitive(state, "rollback")))
        FUZZ_EXPECT(rollback.bad_count >= 0 && rollback.bad_count <= ROLLBACK_LIMIT, "%d bad steps",
                    (int)rollback.bad_count);
    Options o;
    options_defaults(&o);
    o.given[option_row("lr")] = true;            // may differ from the checkpoint's
    o.given[option_row("seed")] = size % 8 == 0; // must not
    options_adopt_json(&o, cJSON_GetObjectItemCaseSensitive(state, "options"), "the checkpoint");
    cJSON_Delete(state);
    check_options(&o);
    options_finish(&o, 1);
    ModelConfig c = options_config(&o);
    FUZZ_EXPECT(attention_dims(&c, false).fused_rows > 0 && attention_dims(&c, true).fused_rows > 0,
                "a model without a projection");
    FUZZ_EXPECT(!c.full_every || (c.window && c.full_every <= c.L), "a layer is full, and none has a window");
    FUZZ_EXPECT(!c.yoco || (c.window && c.L % 2 == 0), "YOCO with %d layers and a window of %d", c.L, c.window);
    options_free(&o);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    char tail[64];
    if (seed % 16 == 0 || max_size < 4 * sizeof(tail)) return LLVMFuzzerMutate(data, size, max_size);
    size_t tail_bytes = (size_t)checkpoint_state_tail("", 0, tail), body = size;
    if (size > tail_bytes && memcmp(data + size - tail_bytes, tail, strlen("\"checksum\": \"")) == 0)
        body -= tail_bytes;
    body = LLVMFuzzerMutate(data, body, max_size - tail_bytes);
    checkpoint_state_tail((const char *)data, body, tail);
    memcpy(data + body, tail, tail_bytes);
    return body + tail_bytes;
}
