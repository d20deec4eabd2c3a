/*
run_data.h: opens --train-data and --val-data, and compares them between ranks.
*/
#pragma once
#include "../data/data_identity.h"
#include "../options/options_model.h"
#include "../options/ranks.h"
#include "trainer_state.h"

// text: the value of --`option`. V: vocabulary of the model. Also finds the separators that --doc-mask needs.
static inline void run_data_open(DataLoader *loader, const Options *o, const char *option, const char *text, int V,
                                 bool shuffled) {
    dataloader_open(loader, text, (int)o->batch_size, o->model.T, V, comm_rank(), comm_ranks(), o->seed, shuffled);
    Separator given = {-1, false};
    if (o->separator) separator_parse(o->separator, &given); // run_tokenizer_open has checked it
    for (int i = 0; i < loader->corpus_count; i++) {
        Corpus *corpus = &loader->corpora[i];
        if (given.token >= 0) corpus->separator = given;
        CHECK(!o->doc_mask || corpus->separator.token >= 0,
              "--doc-mask: the token that separates the documents of --%s %s is unknown: give --separator ID", option,
              corpus->path);
    }
    loader->documents = o->doc_mask;
    dataloader_check_distinct_files(loader);
}

// Ranks on different machines may read different files under the same name.
static inline void run_data_compare(uint64_t fingerprint, uint64_t val_windows, uint64_t val_fingerprint) {
    char text[200];
    FORMAT(text,
           "the-fingerprint-of-the-training-data %016" PRIx64 "\nthe-number-of-validation-windows %" PRIu64
           "\nthe-fingerprint-of-the-validation-data %016" PRIx64 "\n",
           fingerprint, val_windows, val_fingerprint);
    ranks_compare(text, "all ranks must read the same files under --train-data and --val-data", EXIT_FAILED);
}

// Called after trainer_state_resume. The data must equal the data of the checkpoint at `path`, unless --train-data has
// another text or --seq-len another value: then each corpus continues at its position. saved: the checkpoint's options.
static inline void run_data_resume(DataLoader *train, uint64_t fingerprint, TrainerState *s, const cJSON *state,
                                   const cJSON *saved, const char *path, const Options *o) {
    char difference[PATH_SIZE];
    double T = 0;
    DataLoader before;
    const cJSON *data = cJSON_GetObjectItemCaseSensitive(state, "data");
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(saved, "train-data"));
    bool same = fingerprint == state_number(state, "data_fingerprint", UINT64_MAX, path);
    dataloader_describe_difference(train, data, difference, sizeof(difference));
    CHECK(same || (text && strcmp(text, o->train_data) != 0),
          "--train-data %s: not the data that %s was trained on%s; restore the same shards and weights, or give other "
          "data under another path",
          o->train_data, o->out, difference);
    json_get_number(saved, "seq-len", &T);
    if (!same || T != o->model.T) {
        CHECK(
            positions_open(&before, data, o->seed, (int)T),
            "%s: trainer_state.json has no valid \"data\", from which a resume with another --train-data or --seq-len "
            "continues",
            path);
        positions_enter(&s->opened, &before);
        positions_leave(&s->opened, &before, s->next_window);
        positions_close(&before);
        s->next_window = 0;
    }
    positions_enter(&s->opened, train);
}
