/*
encode_text.c: the C tokenizer as a filter, for data/test_tokenizer.py.

  encode_text TABLE < TEXTS > TOKENS     texts: uint32 size, bytes; tokens: uint32 count, uint32 ids; little-endian
  encode_text TABLE --bytes              the same, and the decoded bytes of each text's tokens: uint32 size, bytes
  encode_text TABLE --pieces             in place of tokens the ends of the pieces that merges stay within, in bytes
  encode_text TABLE --speed FILE         MB/s over a text file
*/
#include "../llmc/text/tokenizer.h"

static bool read_all(void *to, size_t bytes) { return fread(to, 1, bytes, stdin) == bytes; }
static void write_all(const void *from, size_t bytes) {
    CHECK(fwrite(from, 1, bytes, stdout) == bytes, "cannot write to stdout: %s", strerror(errno));
}

static size_t cut(const Tokenizer *t, const char *text, size_t size, int **ends) {
    CodePoints c;
    CHECK(codepoints_read(&c, t, (const unsigned char *)text, size), "stdin: a text is not UTF-8");
    TokenList list = {NULL, 0, 0};
    for (size_t i = 0; i < c.count;) {
        i = pretokenize(t, &c, i);
        tokens_add(&list, (int)c.at[i]);
    }
    codepoints_free(&c);
    *ends = list.ids;
    return list.count;
}

static void print_speed(const Tokenizer *t, const char *path) {
    size_t bytes = 0;
    int *ids = NULL;
    char *text = file_read(path, SIZE_MAX, &bytes);
    CHECK(text != NULL, "cannot read %s: %s", path, strerror(errno));
    double start = now_seconds();
    size_t count = tokenizer_encode(t, text, bytes, &ids);
    double seconds = now_seconds() - start;
    printf("%zu bytes, %zu tokens, %.2f s, %.1f MB/s\n", bytes, count, seconds, 1e-6 * (double)bytes / seconds);
    free(ids);
    free(text);
}

int main(int argc, char **argv) {
    const char *mode = argc > 2 ? argv[2] : "";
    bool decode = argc == 3 && strcmp(mode, "--bytes") == 0, pieces = argc == 3 && strcmp(mode, "--pieces") == 0;
    bool speed = argc == 4 && strcmp(mode, "--speed") == 0;
    if (argc != 2 && !decode && !pieces && !speed) {
        warn("usage: encode_text TABLE [--bytes | --pieces | --speed FILE]");
        return EXIT_USAGE;
    }
    Tokenizer *t = tokenizer_open(argv[1]);
    if (speed) print_speed(t, argv[3]);
    int *ids = NULL;
    for (uint32_t size; !speed && read_all(&size, 4); free(ids), ids = NULL) {
        char *text = (char *)checked_calloc((size_t)size + 1, 1);
        CHECK(read_all(text, size), "stdin ends within a text");
        size_t count = pieces ? cut(t, text, size, &ids) : tokenizer_encode(t, text, size, &ids), bytes = 0;
        uint32_t number = (uint32_t)count;
        write_all(&number, 4);
        write_all(ids, count * sizeof(int));
        free(text);
        if (!decode) continue;
        text = tokenizer_decode(t, ids, count, &bytes);
        number = (uint32_t)bytes;
        write_all(&number, 4);
        write_all(text, bytes);
        free(text);
    }
    tokenizer_close(t);
    return fflush(stdout) == 0 ? EXIT_DONE : EXIT_FAILED;
}
