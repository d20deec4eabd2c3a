/*
fuzz_prompts.c: prompts_read with a damaged file of prompts. Every accepted prompt is a text in UTF-8 without NUL bytes,
or a list of token IDs.
*/
#include "fuzz.h"
#include "../../llmc/text/prompts.h"

const char fuzz_file[] = "prompts";

void fuzz_prepare(void) {}

void fuzz_seeds(void) {
    const char *const texts[] = {
        "one\ntwo\r\n\r\n \xC3\xA9\t\xE2\x82\xAC\xF0\x9F\x98\x80\nlast",
        "\xEF\xBB\xBF{\"prompt\": \"a\\n\\\"\\\\\\u00e9\\ud83d\\ude00\"}\n\n{\"tokens\":[255]}\r\n{\"prompt\":\"\"}\n",
        " \n{\"tokens\":[1]}",
    };
    const char *const names[] = {"text", "json", "spaces"};
    for (int i = 0; i < 3; i++) fuzz_seed(names[i], texts[i], strlen(texts[i]));
}

void fuzz_large(void) {
    fuzz_large_text("many texts", "a\n", "b\n", "c", 2 << 20);
    fuzz_large_text("empty lines", "a\n", "\n", "c", 100 << 20);
    fuzz_large_text("a long text", "a", "b", "c\n", 100 << 20);
    fuzz_large_text("a long JSON text", "{\"prompt\": \"", "\\u00e9", "\"}", 32 << 20);
    fuzz_large_text("tokens", "{\"tokens\": [", "0,", "0]}", 4 << 20);
    fuzz_large_text("nested lists", "{\"tokens\": ", "[", "", 16 << 20);
    fuzz_large_text("keys", "{\"prompt\": \"\"", ",\"a\":0", "}", 8 << 20);
}

void fuzz_one(const uint8_t *data, size_t size) {
    (void)data;
    char path[PATH_MAX];
    FORMAT(path, "%s/%s", fuzz_directory(), fuzz_file);
    Prompts p = prompts_read(path);
    size_t bytes = 0;
    FUZZ_EXPECT(p.count >= 1 && p.count <= (int)size, "%d prompts in %zu bytes", p.count, size);
    for (int i = 0; i < p.count; i++) {
        const Prompt *q = &p.items[i];
        FUZZ_EXPECT((q->text != NULL) != (q->tokens != NULL), "prompt %d is not a text or a list", i);
        FUZZ_EXPECT(q->line >= 1 && (i == 0 || q->line > p.items[i - 1].line), "prompt %d is in line %d", i, q->line);
        for (int t = 0; t < q->count; t++) FUZZ_EXPECT(q->tokens[t] >= 0, "token %d", q->tokens[t]);
        FUZZ_EXPECT(q->tokens ? q->count > 0 : strlen(q->text) == q->size, "prompt %d of %zu bytes", i, q->size);
        for (size_t at = 0; q->text && at < q->size;) {
            int length = utf8_length((const unsigned char *)q->text + at);
            FUZZ_EXPECT(length > 0, "prompt %d is not UTF-8", i);
            at += (size_t)length;
        }
        bytes += q->size;
    }
    FUZZ_EXPECT(bytes <= size, "%zu bytes of text from %zu", bytes, size);
    prompts_close(&p);
}
