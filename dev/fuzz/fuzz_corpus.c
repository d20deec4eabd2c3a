/*
fuzz_corpus.c: corpus_read_info and corpus_check_shards with a damaged corpus.json, and corpus_parse with the same bytes
as the value of --train-data.
*/
#include "fuzz.h"
#include "../../llmc/data/corpus.h"

const char fuzz_file[] = "corpus.json";

void fuzz_prepare(void) {}

void fuzz_seeds(void) {
    const char *const texts[] = {
        "{\"format\": 1, \"vocab_size\": 50257, \"separator\": {\"token\": 50256, \"text\": \"<|endoftext|>\", "
        "\"place\": \"before\"}}",
        "{\"format\": 1, \"vocab_size\": 256, \"separator\": null}",
        "{\"format\": 1, \"vocab_size\": 9, \"shards\": [{\"file\": \"val_000000.bin\", \"tokens\": 3}, {\"file\": "
        "\"train_000001.bin\", \"tokens\": 7}]}",
        "web=a/b:0.7 code=c\\ d/*.bin:3e-1",
        "a=b:1\tc=d:e:2",
    };
    const char *const names[] = {"whole", "no_separator", "shards", "mixture", "tabs"};
    for (int i = 0; i < 5; i++) fuzz_seed(names[i], texts[i], strlen(texts[i]));
}

void fuzz_large(void) {
    fuzz_large_text("one array", "{\"a\": [", "0,", "0]}", 64 << 20);
    fuzz_large_text("shards", "{\"format\": 1, \"vocab_size\": 9, \"shards\": [",
                    "{\"file\": \"train_000001.bin\", \"tokens\": 7}, ", "{\"file\": \"train_0.bin\", \"tokens\": 7}]}",
                    8 << 20);
}

void fuzz_one(const uint8_t *data, size_t size) {
    CorpusInfo about;
    if (size > 0 && data[0] == '{') {
        FUZZ_EXPECT(corpus_read_info(fuzz_directory(), &about), "a directory is none");
        FUZZ_EXPECT(about.vocab_size >= 1 && about.separator.token >= -1 && about.separator.token < about.vocab_size,
                    "vocabulary %d, separator %d", about.vocab_size, about.separator.token);
        char name[PATH_MAX];
        FORMAT(name, "%s/train_000001.bin", fuzz_directory());
        Shard shard;
        memset(&shard, 0, sizeof(shard));
        shard.path = name;
        shard.token_count = 7;
        corpus_check_shards(fuzz_directory(), "train", &shard, 1);
        return;
    }
    char *text = (char *)checked_calloc(size + 1, 1);
    memcpy(text, data, size);
    for (size_t i = 0; i < size; i++)
        if (text[i] == 0 || iscntrl((unsigned char)text[i])) text[i] = ' ';
    CorpusSpecs list = corpus_parse(text);
    double sum = 0;
    for (int i = 0; i < list.count; i++) sum += list.items[i].weight;
    FUZZ_EXPECT(list.count >= 1 && fabs(sum - 1) < 1e-9, "%d corpora with weights of %g", list.count, sum);
    free(list.items);
    free(text);
}
