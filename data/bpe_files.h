/*
bpe_files.h: the tokenizer of a trained BPE, and its files.

  Tokenizer *bpe_tokenizer(b)      the table, whose memory is the content of tokenizer.bin; tokenizer_close()
  char      *bpe_json(b, &size)    the content of tokenizer.json; free()

  agreement  data/test_bpe.py compares the first with data/token_table.py and the second with the `tokenizers` library.
*/
#pragma once
#include "bpe.h"
#include "unicode_classes.h"

static Tokenizer *bpe_tokenizer(const Bpe *b) {
    size_t vocab = b->tokens.count, bytes = b->tokens.size, merges = 12 * b->merge_count;
    Tokenizer *t = tokenizer_new();
    t->size = TOKENIZER_HEADER_BYTES + 4 * vocab + round_up(bytes, 4) + merges + 4 + sizeof(unicode_classes) + 8;
    t->memory = (char *)checked_calloc(t->size, 1);
    uint32_t header[12] = {TOKENIZER_BPE, (uint32_t)vocab, PATTERN_GPT2}, *to = (uint32_t *)(t->memory + 8);
    header[5] = (uint32_t)b->merge_count, header[6] = 1, header[7] = sizeof(unicode_classes) / 12;
    header[9] = (uint32_t)bytes; // header[4], the separator, is 0, and so is the added token
    memcpy(t->memory, "DV2TOK\0\1", 8);
    memcpy(to, header, sizeof(header));
    to += 12;
    for (size_t i = 0; i < vocab; i++) *to++ = b->tokens.strings[i].size;
    memcpy(to, b->tokens.bytes, bytes);
    to += round_up(bytes, 4) / 4;
    if (merges) memcpy(to, b->merges, merges);
    memcpy(to + merges / 4 + 1, unicode_classes, sizeof(unicode_classes));
    uint64_t hash = XXH64(t->memory, t->size - 8, 0);
    memcpy(t->memory + t->size - 8, &hash, 8);
    bool valid = tokenizer_read(t);
    assert(valid);
    return t;
}

static void json_print_token(FILE *f, const Bpe *b, uint32_t token) {
    const unsigned char *bytes = b->tokens.bytes + b->tokens.strings[token].at;
    size_t size = b->tokens.strings[token].size, n = 0;
    char text[2 * PART_BYTES + 1];
    for (size_t i = 0; i < size; i++) {
        uint32_t character = byte_character(bytes[i]);
        if (character >= 0x80) text[n++] = (char)(0xC0 | character >> 6);
        text[n++] = (char)(character < 0x80 ? character : 0x80 | (character & 0x3F));
    }
    text[n] = 0;
    json_print_bytes(f, text, n);
}

// As the library writes it, up to the tokens.
static const char json_head[] =
    "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  \"added_tokens\": [\n"
    "    {\"id\": 0, \"content\": \"" BPE_SEPARATOR "\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
    "\"normalized\": false, \"special\": true}\n  ],\n  \"normalizer\": null,\n"
    "  \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
    "\"use_regex\": true},\n  \"post_processor\": null,\n"
    "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": true, \"use_regex\": "
    "true},\n"
    "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
    "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n    \"fuse_unk\": false,\n"
    "    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n    \"vocab\": {\n";

static char *bpe_json(const Bpe *b, size_t *size) {
    char *text = NULL;
    FILE *f = open_memstream(&text, size);
    CHECK(f != NULL, "out of memory for tokenizer.json");
    fputs(json_head, f);
    for (uint32_t i = 0; i < b->tokens.count; i++) {
        fputs(i ? ",\n      " : "      ", f);
        json_print_token(f, b, i);
        fprintf(f, ": %" PRIu32, i);
    }
    fputs("\n    },\n    \"merges\": [", f);
    for (size_t i = 0; i < b->merge_count; i++) {
        fputs(i ? ",\n      [" : "\n      [", f);
        json_print_token(f, b, b->merges[i][0]);
        fputs(", ", f);
        json_print_token(f, b, b->merges[i][1]);
        fputc(']', f);
    }
    fputs("\n    ]\n  }\n}\n", f);
    bool failed = ferror(f) != 0;
    CHECK(fclose(f) == 0 && !failed, "out of memory for tokenizer.json");
    return text;
}
