/*
text_to_shards: converts text to shards of tokens, the training data of train_diffv2.

  tokens      A token is a byte of the text: the vocabulary is 256, and there is no tokenizer. Token 0 separates
              documents: it precedes each document and occurs nowhere else. NUL bytes in the text are dropped; their
              number and the first file that has one are printed on stderr.
  binary      The first 256 KiB of a file decide. In a directory, a file with a NUL byte, or of which more than half is
              not UTF-8, is skipped and listed. Such a file on the command line, or stdin, is an error, unless it is
              UTF-8 apart from its NUL bytes, which are dropped. UTF-16 is binary, by its byte order mark. The mark of
              UTF-8 at the beginning of a file is skipped; elsewhere it is text.
  --bpe N     A byte-level BPE of at most N tokens is trained on the documents for training (bpe.h), and its tokens
              replace the bytes. Token 0 is <|endoftext|>; where a document spells it out, it is encoded as other text.
              Every byte is encoded, also NUL and what is not UTF-8. A piece of text of more than CHUNK bytes without a
              place to split is encoded in parts.
  documents   A file is a document. With --delimiter, each part of a file between delimiters is one. The delimiter is
              not stored. Empty documents are skipped.
  input       files, directories (recursive, in byte order of names; without names that begin with a dot and without
              links to directories, which are listed), or - for stdin, in the order of the arguments. A file that occurs
              twice, also under another name, is an error before any is read: its text could be in training and in
              validation. The text is not decoded, and newlines are not converted.
  shards      DIR/train_000000.bin ... and DIR/val_000000.bin ..., in the format of llm.c: 256 little-endian int32
              (magic 20240520, version 1, token count, then 0), then uint16 tokens. The number of shards is the minimum
              that --shard-tokens allows, and all have the same size, so that none is a short remainder. Documents
              continue across shards.
  description DIR/corpus.json, in the format of data/prepare.py, which llmc/data/corpus.h reads: vocabulary, separator,
              counts, and the tokens and xxh64 of each shard. With --bpe also DIR/tokenizer.json, as the `tokenizers`
              library stores it, and DIR/tokenizer.bin, which the trainer reads
  validation  Documents are taken in the order of a hash of their position, as long as they fit into what is left of the
              requested amount (1% of the text by default). They are spread over the whole text, the same in each run.
              If none fits, the smallest document is taken. At least one document is left for training. A single
              document is divided: its last part, the requested number of bytes from the beginning of a character,
              becomes a document for validation. More than 10% of the text are a warning. With --bpe too, the amount is
              one of bytes. data/validation.py has the same rule.
  method      The input is read once and spooled, one byte per token, to an unlinked file in DIR. Only the names of
              the files and the lengths of the documents are held in memory (at most 25 bytes per document). At the end
              of the input the split is chosen. With --bpe, the spool is read to count pieces of text and again to
              encode them, to a second one of two bytes per token. The shards and the other files are written under
              temporary names, flushed to disk and renamed, corpus.json last. A run that fails or is interrupted leaves
              no partial output.
  exit status 0 success, 1 failure, 2 usage error; errors are one line on stderr
*/
#define XXH_INLINE_ALL // with the state of XXH64
#include "../llmc/base/common.h"
#include "../llmc/base/files.h"
#include "../llmc/base/json.h"
#include "../llmc/base/random.h"
#include "../llmc/text/tokenizer.h"
#include "bpe_files.h"
#include <getopt.h>
#include <search.h>
#include <sys/file.h>

enum { HEADER_INTS = 256, MAGIC_U16 = 20240520, VERSION_U16 = 1, MAGIC_U32 = 20240801 };
enum { SEPARATOR = 0, VOCABULARY = 256, CHUNK = 1 << 18, SHARDS_MAX = 100000, LISTED = 8 };
enum { TRAIN, VAL, SPLITS };
static const char *const split_names[SPLITS] = {"train", "val"};
#define DESCRIPTION "corpus.json"
// Other files of a corpus, of this program or of data/prepare.py. --force removes them with the shards.
static const char *const corpus_files[] = {DESCRIPTION, "progress.json", "tokenizer.json", "tokenizer.bin"};
enum { CORPUS_FILES = sizeof(corpus_files) / sizeof(corpus_files[0]) };

typedef struct {
    const char *out, *delimiter; // delimiter: without escapes; NULL: none
    size_t delimiter_length;
    uint64_t shard_tokens, bpe; // bpe: size of the vocabulary to train; 0: bytes
    uint64_t val_tokens;
    bool has_val_tokens, force;
} Options;

typedef struct {
    uint64_t tokens, xxh64; // the digest of the whole file
} ShardFile;

typedef struct {
    dev_t device;
    ino_t inode;
    char path[];
} InputFile;

typedef struct {
    Options options;
    bool examines;     // the files of the input are found, and not yet read
    void *found;       // InputFile of each, a tree of tsearch
    int directory;     // descriptor of the output directory, locked
    FILE *spool;       // text of each document, later its tokens, unlinked
    bool wide;         // whether a token in it has two bytes
    uint64_t *lengths; // of each document, with its separator
    size_t documents, capacity;
    uint64_t tokens, text_bytes; // of all documents
    uint64_t val_text_bytes;     // of those for validation
    uint64_t length;             // of the current document, without its separator; 0: not started
    uint64_t files, empty_files, binary_files, dropped;
    char *binary_names; // of the first LISTED of them, with commas
    size_t matched;     // bytes of the delimiter matched so far
    char first_dropped[PATH_MAX];
    uint64_t shards[SPLITS];    // number written under temporary names so far
    ShardFile *written[SPLITS]; // [shards]: the complete ones
    const char *others[3];      // files that exist under their temporary names, in the order of their publication
    int other_count;
    Bpe bpe;
} Converter;

static Converter converter; // the only global: a failure removes its temporary files
static volatile sig_atomic_t interrupted;

// A new file in the output directory, in the place of what a killed process left or of a link. -1 and errno on failure.
static int create_temporary(const Converter *c, const char *name, int flags, mode_t mode) {
    if (unlinkat(c->directory, name, 0) != 0 && errno != ENOENT) return -1;
    return openat(c->directory, name, flags | O_CREAT | O_EXCL | O_CLOEXEC, mode);
}

static void shard_name(char *name, size_t size, int split, uint64_t index, const char *suffix) {
    snprintf(name, size, "%s_%06llu.bin%s", split_names[split], (unsigned long long)index, suffix);
}

// Reports a usage error.
#define USAGE(...) (warn(__VA_ARGS__), program_exit(EXIT_USAGE))

static void remove_temporary_files(void) {
    for (int split = 0; split < SPLITS; split++)
        for (uint64_t i = 0; i < converter.shards[split]; i++) {
            char name[64];
            shard_name(name, sizeof(name), split, i, ".tmp");
            unlinkat(converter.directory, name, 0);
        }
    for (int i = 0; i < converter.other_count; i++) {
        char name[64];
        snprintf(name, sizeof(name), "%s.tmp", converter.others[i]);
        unlinkat(converter.directory, name, 0);
    }
}

static void on_signal(int number) { interrupted = number; }
static void stop_when_interrupted(void) {
    CHECK(!interrupted, "interrupted by signal %d; nothing was written", (int)interrupted);
}

static void *grow(void *p, size_t bytes) {
    void *q = realloc(p, bytes);
    CHECK(q != NULL, "out of memory: cannot allocate %zu bytes", bytes);
    return q;
}

// ---------------------------------------------------------------------------------------------------------------------
// documents into the spool

static void document_token(Converter *c, int token) {
    if (putc_unlocked(token & 255, c->spool) == EOF || (c->wide && putc_unlocked(token >> 8, c->spool) == EOF))
        check_failed("cannot write to a temporary file in %s: %s", c->options.out, strerror(errno));
    c->length++;
}

static void document_end(Converter *c) {
    if (c->length == 0) return;
    if (c->documents == c->capacity) {
        c->capacity = c->capacity ? 2 * c->capacity : 1024;
        c->lengths = (uint64_t *)grow(c->lengths, c->capacity * sizeof(uint64_t));
    }
    c->lengths[c->documents++] = c->length + 1;
    c->tokens += c->length + 1;
    c->length = 0;
}

// One byte of text. A partial match of the delimiter is held back until it is complete or fails, so that delimiters are
// found across chunks. If a match fails, its longest end that is a beginning of the delimiter is still held back.
static void text_byte(Converter *c, int byte) {
    const char *delimiter = c->options.delimiter;
    if (delimiter == NULL) {
        document_token(c, byte);
        return;
    }
    while (c->matched > 0 && (unsigned char)delimiter[c->matched] != byte) {
        size_t kept = c->matched - 1;
        while (memcmp(delimiter, delimiter + c->matched - kept, kept) != 0) kept--;
        for (size_t i = 0; i < c->matched - kept; i++) document_token(c, (unsigned char)delimiter[i]);
        c->matched = kept;
    }
    if ((unsigned char)delimiter[c->matched] != byte) document_token(c, byte);
    else if (++c->matched == c->options.delimiter_length) {
        document_end(c);
        c->matched = 0;
    }
}

static void text_end(Converter *c) {
    for (size_t i = 0; i < c->matched; i++) document_token(c, (unsigned char)c->options.delimiter[i]);
    c->matched = 0;
    document_end(c);
}

// Fills the chunk, except at the end of the input, so that its content does not depend on the pace of a pipe.
static size_t read_chunk(int fd, unsigned char chunk[CHUNK], const char *path) {
    size_t filled = 0;
    while (filled < CHUNK) {
        ssize_t n = read(fd, chunk + filled, CHUNK - filled);
        stop_when_interrupted();
        if (n < 0 && errno == EINTR) continue;
        CHECK(n >= 0, "cannot read %s: %s", path, strerror(errno));
        if (n == 0) break;
        filled += (size_t)n;
    }
    return filled;
}

// Whether a file that begins with this chunk is skipped. Exits if it is named and binary, or if it is a token shard.
static bool skip_binary(Converter *c, const unsigned char chunk[CHUNK], size_t size, const char *path, bool named) {
    size_t zeros = 0, invalid = 0;
    if (size == CHUNK) size -= 3; // the last character may be incomplete
    for (size_t at = 0; at < size;) {
        int length = utf8_length(chunk + at);
        zeros += chunk[at] == 0;
        invalid += length == 0;
        at += (size_t)max_int(1, length);
    }
    int32_t magic = 0;
    if (size >= sizeof(magic)) memcpy(&magic, chunk, sizeof(magic));
    if (magic == MAGIC_U16 || magic == MAGIC_U32)
        check_failed("%s is a token shard, not text: remove it from the input", path);
    bool utf16 = size >= 2 && (memcmp(chunk, "\xFF\xFE", 2) == 0 || memcmp(chunk, "\xFE\xFF", 2) == 0);
    if (!utf16 && 2 * invalid <= size && (zeros == 0 || (named && invalid == 0))) return false;
    CHECK(!named || !utf16, "%s is UTF-16 or UTF-32: it begins with %02X %02X: convert it to UTF-8, or remove it", path,
          chunk[0], chunk[1]);
    CHECK(!named,
          "%s is not text: %zu of its first %zu bytes are NUL and %zu are not UTF-8; convert it to UTF-8, or remove it "
          "from the input",
          path, zeros, size, invalid);
    if (c->binary_files++ >= LISTED) return true;
    size_t used = c->binary_names ? strlen(c->binary_names) : 0, more = strlen(path) + 3;
    c->binary_names = (char *)grow(c->binary_names, used + more);
    snprintf(c->binary_names + used, more, "%s%s", used ? ", " : "", path);
    return true;
}

static void read_text(Converter *c, int fd, const char *path, bool named) {
    static unsigned char chunk[CHUNK + 3]; // utf8_length reads 3 bytes more
    uint64_t bytes = 0;
    size_t mark = 0; // the size of a byte order mark that begins the chunk
    for (size_t n; (n = read_chunk(fd, chunk, path)) > 0; bytes += n - mark, mark = 0) {
        memset(chunk + n, 0, 3);
        if (bytes == 0 && skip_binary(c, chunk, n, path, named)) return;
        if (bytes == 0 && memcmp(chunk, "\xEF\xBB\xBF", 3) == 0) mark = 3;
        for (size_t i = mark; i < n; i++) {
            if (chunk[i] != SEPARATOR || c->options.bpe) text_byte(c, chunk[i]);
            else if (c->dropped++ == 0) snprintf(c->first_dropped, sizeof(c->first_dropped), "%s", path);
        }
    }
    // An empty file on the command line is an error; in a directory it is not.
    if (bytes == 0 && named)
        check_failed("%s is empty: remove it from the input, or check the program that wrote it", path);
    text_end(c);
    c->files++;
    c->empty_files += bytes == 0;
}

static int compare_files(const void *a, const void *b) {
    const InputFile *x = (const InputFile *)a, *y = (const InputFile *)b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    return x->inode < y->inode ? -1 : x->inode > y->inode;
}

static void examine_file(Converter *c, const char *path, const struct stat *about) {
    size_t size = strlen(path) + 1;
    InputFile *file = (InputFile *)grow(NULL, sizeof(InputFile) + size);
    file->device = about->st_dev, file->inode = about->st_ino;
    memcpy(file->path, path, size);
    InputFile **found = (InputFile **)tsearch(file, &c->found, compare_files);
    CHECK(found != NULL, "out of memory for the name of %s", path);
    CHECK(*found == file, "%s and %s are one file, whose text would be there twice: specify it once", (*found)->path,
          path);
}

static void read_input(Converter *c, const char *path, bool named);

static int not_hidden(const struct dirent *entry) { return entry->d_name[0] != '.'; }
static int compare_names(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static void read_directory(Converter *c, const char *path) {
    struct dirent **entries;
    int count = scandir(path, &entries, not_hidden, compare_names);
    CHECK(count >= 0, "cannot read directory %s: %s", path, strerror(errno));
    char *inner = (char *)grow(NULL, PATH_MAX); // not on the stack, which thousands of levels would fill
    for (int i = 0; i < count; i++) {
        struct stat link, target;
        size_t n = snprintf(inner, PATH_MAX, "%s/%s", path, entries[i]->d_name); // -1: SIZE_MAX
        CHECK(n < PATH_MAX, "a name in %s is too long", path);
        if (lstat(inner, &link) != 0 || stat(inner, &target) != 0)
            check_failed("cannot examine %s: %s", inner, strerror(errno));
        if (S_ISREG(target.st_mode) || S_ISDIR(link.st_mode)) read_input(c, inner, false);
        else if (S_ISDIR(target.st_mode) && c->examines) warn("skipped %s, a link to a directory", inner);
        free(entries[i]);
    }
    free(inner);
    free(entries);
}

static void read_input(Converter *c, const char *path, bool named) {
    stop_when_interrupted();
    struct stat file;
    bool is_stdin = named && strcmp(path, "-") == 0;
    int failed = is_stdin ? fstat(STDIN_FILENO, &file) : stat(path, &file);
    CHECK(!failed, "cannot find %s: %s", path, strerror(errno));
    if (is_stdin) path = "stdin";
    else if (S_ISDIR(file.st_mode)) {
        read_directory(c, path);
        return;
    }
    if (c->examines) {
        examine_file(c, path, &file);
        return;
    }
    int fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0, "cannot open %s: %s", path, strerror(errno));
    read_text(c, fd, path, named);
    if (!is_stdin) close(fd);
}

// ---------------------------------------------------------------------------------------------------------------------
// the split

// A bijection, so that no two positions tie.
static uint64_t position_hash(uint64_t position) { return random_mix(position + 0x9E3779B97F4A7C15ull); }
static int compare_hashes(const void *a, const void *b) {
    uint64_t x = position_hash(*(const uint64_t *)a), y = position_hash(*(const uint64_t *)b);
    return x < y ? -1 : x > y;
}

// Cuts the only document in two, of which the second has about `target` bytes.
static void cut_document(Converter *c, uint64_t target) {
    uint64_t bytes = c->lengths[0] - 1, cut = bytes > target ? bytes - target : 1;
    for (int i = 0; i < 3 && cut > 0; i++) { // back to the first byte of a character
        CHECK(fseeko(c->spool, (off_t)cut, SEEK_SET) == 0, "cannot read back a temporary file in %s", c->options.out);
        if ((getc_unlocked(c->spool) & 0xC0) != 0x80) break;
        cut--;
    }
    CHECK(cut > 0 && cut < bytes,
          "a text of %llu bytes is too short for training and validation: add text, or use --val-tokens 0",
          (unsigned long long)bytes);
    c->lengths[0] = cut + 1;
    c->lengths[1] = bytes - cut + 1;
    c->documents++;
    c->tokens++;
}

// Returns the number of tokens for validation. Warns if it is far from the number that a user expects.
static uint64_t checked_validation(const Converter *c, uint64_t taken, uint64_t target) {
    const char *unit = c->options.bpe ? "bytes" : "tokens";
    if (taken > c->tokens / 10)
        warn("validation has %llu of %llu %s, more than 10%%: split long documents with --delimiter, or use a lower "
             "--val-tokens",
             (unsigned long long)taken, (unsigned long long)c->tokens, unit);
    else if (taken > 2 * target || taken < target / 2)
        warn("validation has %llu %s instead of about %llu, since documents are long: split them with --delimiter",
             (unsigned long long)taken, unit, (unsigned long long)target);
    return taken;
}

// is_val[document], which has room for another one; returns the number of tokens for validation.
static uint64_t choose_validation(Converter *c, unsigned char *is_val) {
    const Options *o = &c->options;
    uint64_t target = o->has_val_tokens ? o->val_tokens : max_size(1, c->tokens / 100);
    if (target == 0) return 0;
    if (o->has_val_tokens && target >= c->tokens)
        check_failed("--val-tokens %llu leaves nothing for training: the text has %llu %s", (unsigned long long)target,
                     (unsigned long long)c->tokens, c->options.bpe ? "bytes" : "tokens");
    if (c->documents == 1) {
        cut_document(c, target);
        is_val[1] = 1;
        return checked_validation(c, c->lengths[1], target);
    }
    uint64_t *order = (uint64_t *)grow(NULL, c->documents * sizeof(uint64_t));
    for (size_t i = 0; i < c->documents; i++) order[i] = i;
    qsort(order, c->documents, sizeof(uint64_t), compare_hashes);
    uint64_t taken = 0;
    size_t smallest = order[0];
    for (size_t i = 0; i < c->documents && taken < target; i++) { // less than all, so one is left for training
        size_t document = order[i];
        if (c->lengths[document] < c->lengths[smallest]) smallest = document;
        if (c->lengths[document] > target - taken) continue;
        is_val[document] = 1;
        taken += c->lengths[document];
    }
    free(order);
    if (taken == 0) {
        is_val[smallest] = 1;
        taken = c->lengths[smallest];
    }
    return checked_validation(c, taken, target);
}

// ---------------------------------------------------------------------------------------------------------------------
// the spool, and its tokens with --bpe

static FILE *open_spool(const Converter *c) {
    const char *name = "text_to_shards.spool.tmp"; // not O_TMPFILE, which some network file systems lack
    int fd = create_temporary(c, name, O_RDWR, 0600);
    FILE *spool = fd < 0 ? NULL : fdopen(fd, "w+b");
    if (spool == NULL || unlinkat(c->directory, name, 0) != 0)
        check_failed("cannot write to directory %s: %s", c->options.out, strerror(errno));
    return spool;
}

static void rewind_spool(const Converter *c) {
    if (fflush(c->spool) != 0 || fseeko(c->spool, 0, SEEK_SET) != 0)
        check_failed("cannot write to a temporary file in %s: %s", c->options.out, strerror(errno));
}

// Visits the pieces of a document of `left` bytes, which is next in the text. A piece of more than CHUNK bytes is cut.
static void document_pieces(const Converter *c, FILE *text, uint64_t left, const Tokenizer *t, PieceVisit *visit,
                            void *context) {
    static unsigned char chunk[CHUNK + 4]; // the text of a chunk, then zeros
    for (size_t size = 0, used; left > 0; size -= used) {
        size_t wanted = min_size(CHUNK - size, left);
        stop_when_interrupted();
        CHECK(fread(chunk + size, 1, wanted, text) == wanted, "cannot read back a temporary file in %s",
              c->options.out);
        size += wanted, left -= wanted;
        memset(chunk + size, 0, 4);
        used = bpe_pieces(t, chunk, size, left == 0, visit, context);
        if (used == 0) used = bpe_pieces(t, chunk, size, true, visit, context);
        memmove(chunk, chunk + used, size - used);
    }
}

static void count_piece(void *context, const unsigned char *bytes, size_t size) {
    bpe_count(&((Converter *)context)->bpe, bytes, size);
}

typedef struct {
    Converter *converter;
    const Tokenizer *t;
    Piece piece;
    TokenList tokens;
} Encoder;

static void encode_piece(void *context, const unsigned char *bytes, size_t size) {
    Encoder *e = (Encoder *)context;
    e->tokens.count = 0;
    tokenizer_encode_piece(e->t, &e->piece, bytes, size, &e->tokens);
    for (size_t i = 0; i < e->tokens.count; i++) document_token(e->converter, e->tokens.ids[i]);
}

// Writes a file under its temporary name. publish_corpus renames them in the order of these calls.
static void write_file(Converter *c, const char *name, const void *data, size_t size) {
    char path[PATH_SIZE];
    FORMAT(path, "%s/%s.tmp", c->options.out, name);
    c->others[c->other_count++] = name;
    file_write_new(path, data, size);
}

// Trains the BPE on the training documents, writes the files of the tokenizer under their temporary names, and replaces
// the bytes of the spool by tokens. Returns the number of tokens for validation.
static uint64_t bytes_to_tokens(Converter *c, const unsigned char *is_val) {
    bpe_start(&c->bpe);
    Tokenizer *t = bpe_tokenizer(&c->bpe); // without merges: its pieces are those of the trained one
    rewind_spool(c);
    for (size_t i = 0; i < c->documents; i++) {
        if (!is_val[i]) document_pieces(c, c->spool, c->lengths[i] - 1, t, count_piece, c);
        else if (fseeko(c->spool, (off_t)c->lengths[i] - 1, SEEK_CUR) != 0)
            check_failed("cannot read back a temporary file in %s: %s", c->options.out, strerror(errno));
    }
    tokenizer_close(t);
    bpe_train(&c->bpe, c->options.bpe, stop_when_interrupted);
    t = bpe_tokenizer(&c->bpe);
    size_t size = 0;
    char *json = bpe_json(&c->bpe, &size);
    write_file(c, "tokenizer.json", json, size);
    write_file(c, "tokenizer.bin", t->memory, t->size);
    free(json);
    FILE *text = c->spool;
    size_t documents = c->documents;
    uint64_t val_tokens = 0;
    Encoder e = {c, t, {0}, {0}};
    rewind_spool(c);
    c->spool = open_spool(c);
    c->wide = true, c->documents = 0, c->tokens = 0;
    for (size_t i = 0; i < documents; i++) {
        document_pieces(c, text, c->lengths[i] - 1, t, encode_piece, &e);
        document_end(c); // its length in tokens takes the place of its length in bytes
        if (is_val[i]) val_tokens += c->lengths[i];
    }
    fclose(text);
    free(e.tokens.ids);
    piece_free(&e.piece);
    tokenizer_close(t);
    return val_tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// shards

// Writes the `total` tokens of one split to `count` shards of equal size.
typedef struct {
    Converter *converter;
    int split;
    uint64_t total, count, written, begin, end; // begin, end: of the current shard
    int fd;                                     // of the current shard; -1: none is open
    XXH64_state_t digest;                       // of its content
    unsigned char *bytes;                       // [CHUNK]: buffered output
    size_t filled;
    char name[PATH_SIZE]; // of the current shard, for messages
} ShardWriter;

static ShardWriter writer_open(Converter *c, int split, uint64_t total) {
    ShardWriter w;
    memset(&w, 0, sizeof(w));
    w.converter = c, w.split = split, w.total = total, w.fd = -1;
    w.bytes = (unsigned char *)grow(NULL, CHUNK);
    w.count = (total + c->options.shard_tokens - 1) / c->options.shard_tokens;
    if (w.count > SHARDS_MAX)
        check_failed("%llu tokens require %llu shards, more than %d: use a larger --shard-tokens",
                     (unsigned long long)total, (unsigned long long)w.count, SHARDS_MAX);
    return w;
}

static void writer_next_shard(ShardWriter *w) {
    Converter *c = w->converter;
    uint64_t index = c->shards[w->split];
    w->begin = w->end;
    // shard i ends at total (i+1) / count; computed without overflow
    w->end = w->total / w->count * (index + 1) + w->total % w->count * (index + 1) / w->count;
    char name[64];
    shard_name(name, sizeof(name), w->split, index, ".tmp");
    FORMAT(w->name, "shard %llu of %s in %s", (unsigned long long)index, split_names[w->split], c->options.out);
    c->shards[w->split]++;
    c->written[w->split] = (ShardFile *)grow(c->written[w->split], (index + 1) * sizeof(ShardFile));
    w->fd = create_temporary(c, name, O_WRONLY, 0666);
    CHECK(w->fd >= 0, "cannot write %s: %s", w->name, strerror(errno));
    int32_t header[HEADER_INTS] = {MAGIC_U16, VERSION_U16, (int32_t)(w->end - w->begin)};
    memcpy(w->bytes, header, sizeof(header));
    w->filled = sizeof(header);
    XXH64_reset(&w->digest, 0);
}

static void writer_flush(ShardWriter *w) {
    XXH64_update(&w->digest, w->bytes, w->filled);
    file_write(w->fd, w->bytes, w->filled, w->name);
    w->filled = 0;
}

static void writer_token(ShardWriter *w, uint16_t token) {
    if (w->fd < 0) writer_next_shard(w);
    w->bytes[w->filled++] = (unsigned char)(token & 255);
    w->bytes[w->filled++] = (unsigned char)(token >> 8);
    if (w->filled == CHUNK) writer_flush(w);
    if (++w->written < w->end) return;
    writer_flush(w);
    file_close_synced(w->fd, w->name);
    w->fd = -1;
    ShardFile *shard = &w->converter->written[w->split][w->converter->shards[w->split] - 1];
    shard->tokens = w->end - w->begin;
    shard->xxh64 = XXH64_digest(&w->digest);
}

static void write_shards(Converter *c, const unsigned char *is_val, uint64_t val_tokens) {
    ShardWriter writers[SPLITS] = {writer_open(c, TRAIN, c->tokens - val_tokens), writer_open(c, VAL, val_tokens)};
    rewind_spool(c);
    for (size_t i = 0; i < c->documents; i++)
        for (uint64_t k = 0; k < c->lengths[i]; k++) {
            int low = k == 0 ? SEPARATOR : getc_unlocked(c->spool);
            int high = k > 0 && c->wide ? getc_unlocked(c->spool) : 0;
            CHECK(low != EOF && high != EOF, "cannot read back a temporary file in %s", c->options.out);
            if ((k & 0xFFFF) == 0) stop_when_interrupted();
            writer_token(&writers[is_val[i]], (uint16_t)(low | high << 8));
        }
    for (int split = 0; split < SPLITS; split++) {
        assert(writers[split].written == writers[split].total && writers[split].fd < 0);
        free(writers[split].bytes);
    }
}

// Writes corpus.json under its temporary name.
static void write_description(Converter *c, uint64_t val_tokens, char *const *inputs, int input_count) {
    char *out = realpath(c->options.out, NULL), *source = NULL, tokenizer[32] = "bytes"; // realpath resolves "."
    uint64_t bpe = c->options.bpe;
    size_t size = 0;
    if (bpe) FORMAT(tokenizer, "bpe-%llu", (unsigned long long)bpe);
    FILE *f = open_memstream(&source, &size);
    for (int i = 0; f && i < input_count; i++) fprintf(f, "%s%s", i ? " " : "", inputs[i]);
    CHECK(f && fclose(f) == 0, "out of memory for corpus.json");
    cJSON *o = cJSON_CreateObject(), *separator = cJSON_CreateObject(), *shards = cJSON_CreateArray();
    bool ok = cJSON_AddNumberToObject(separator, "token", SEPARATOR) &&
              cJSON_AddStringToObject(separator, "text", bpe ? BPE_SEPARATOR : "\\0") &&
              cJSON_AddStringToObject(separator, "place", "before") && cJSON_AddNumberToObject(o, "format", 1) &&
              cJSON_AddStringToObject(o, "name", out ? strrchr(out, '/') + 1 : c->options.out) &&
              cJSON_AddStringToObject(o, "source", source) &&
              cJSON_AddNumberToObject(o, "vocab_size", bpe ? (double)c->bpe.tokens.count : VOCABULARY) &&
              cJSON_AddStringToObject(o, "tokenizer", tokenizer) && cJSON_AddItemToObject(o, "separator", separator);
    json_add_u64(o, "documents", c->documents);
    json_add_u64(o, "text_bytes", c->text_bytes);
    json_add_u64(o, "train_tokens", c->tokens - val_tokens);
    json_add_u64(o, "val_tokens", val_tokens);
    json_add_u64(o, "val_text_bytes", c->val_text_bytes);
    ok = ok && cJSON_AddItemToObject(o, "shards", shards);
    for (int split = 0; split < SPLITS; split++)
        for (uint64_t i = 0; i < c->shards[split]; i++) {
            cJSON *shard = cJSON_CreateObject();
            char file[64], digest[20];
            shard_name(file, sizeof(file), split, i, "");
            FORMAT(digest, "%016llx", (unsigned long long)c->written[split][i].xxh64);
            ok = ok && cJSON_AddItemToArray(shards, shard) && cJSON_AddStringToObject(shard, "file", file);
            json_add_u64(shard, "tokens", c->written[split][i].tokens);
            ok = ok && cJSON_AddStringToObject(shard, "xxh64", digest);
        }
    CHECK(ok, "out of memory for corpus.json");
    char *text = json_text(o, &size);
    write_file(c, DESCRIPTION, text, size);
    cJSON_Delete(o);
    free(text);
    free(source);
    free(out);
}

// Whether the output directory has files of a corpus; `example` is the name of one. remove: removes them, corpus.json
// first, so that it never describes shards of another corpus.
static bool old_corpus(Converter *c, bool remove, char example[64]) {
    bool found = false;
    for (int i = 0; i < CORPUS_FILES; i++) {
        struct stat file;
        if (fstatat(c->directory, corpus_files[i], &file, AT_SYMLINK_NOFOLLOW) != 0) continue;
        found = true;
        snprintf(example, 64, "%s", corpus_files[i]);
        if (remove && unlinkat(c->directory, corpus_files[i], 0) != 0)
            check_failed("cannot remove %s/%s: %s", c->options.out, corpus_files[i], strerror(errno));
    }
    int copy = dup(c->directory);
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    CHECK(directory != NULL, "cannot read directory %s: %s", c->options.out, strerror(errno));
    rewinddir(directory);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        for (int split = 0; split < SPLITS; split++) {
            const char *name = entry->d_name;
            size_t prefix = strlen(split_names[split]);
            if (strncmp(name, split_names[split], prefix) != 0 || name[prefix] != '_') continue;
            name += prefix + 1;
            size_t digits = strspn(name, "0123456789");
            if (digits == 0 || strcmp(name + digits, ".bin") != 0) continue;
            found = true;
            snprintf(example, 64, "%.63s", entry->d_name);
            if (remove && unlinkat(c->directory, entry->d_name, 0) != 0)
                check_failed("cannot remove %s/%s: %s", c->options.out, entry->d_name, strerror(errno));
        }
    closedir(directory);
    return found;
}

static void rename_temporary(Converter *c, const char *from, const char *to) {
    if (renameat(c->directory, from, c->directory, to) != 0)
        check_failed("cannot rename %s/%s to %s: %s", c->options.out, from, to, strerror(errno));
}

// Removes the old corpus first: after a crash shards may be missing, but two corpora are never mixed.
static void publish_corpus(Converter *c) {
    char example[64];
    stop_when_interrupted();
    if (c->options.force) old_corpus(c, true, example);
    for (int split = 0; split < SPLITS; split++)
        for (uint64_t i = 0; i < c->shards[split]; i++) {
            char from[64], to[64];
            shard_name(from, sizeof(from), split, i, ".tmp");
            shard_name(to, sizeof(to), split, i, "");
            rename_temporary(c, from, to);
        }
    for (int i = 0; i < c->other_count; i++) {
        char from[64];
        snprintf(from, sizeof(from), "%s.tmp", c->others[i]);
        rename_temporary(c, from, c->others[i]);
    }
    CHECK(fsync(c->directory) == 0, "cannot flush %s to disk: %s", c->options.out, strerror(errno));
}

// ---------------------------------------------------------------------------------------------------------------------
// command line

enum {
    OPTION_OUT = 256,
    OPTION_DELIMITER,
    OPTION_BPE,
    OPTION_SHARD_TOKENS,
    OPTION_VAL_TOKENS,
    OPTION_FORCE,
    OPTION_HELP
};
static const struct {
    const char *name, *value, *help;
} option_table[] = {
    // in the order of the enum above
    {"out", "DIR", "directory of the shards, created if it does not exist (required)"},
    {"delimiter", "TEXT", "split files into documents at TEXT; C escapes: \\n \\t \\r \\f \\\\ (default: no split)"},
    {"bpe", "N", "train a tokenizer of N tokens on the text, from 512 to 32768 (default: tokens are bytes)"},
    {"shard-tokens", "N", "maximum number of tokens in a shard, with K, M or G for powers of 1000 (default 100M)"},
    {"val-tokens", "N", "number of tokens for validation, with --bpe of bytes; 0: none (default: 1% of the text)"},
    {"force", NULL, "replace the corpus in DIR"},
    {"help", NULL, "print this and exit"},
};
enum { OPTION_COUNT = sizeof(option_table) / sizeof(option_table[0]) };

static void print_help(void) {
    printf("usage: text_to_shards --out DIR [OPTIONS] PATH...\n"
           "Converts text to token shards and their corpus.json. A token is a byte (vocabulary 256), or with\n"
           "--bpe a piece of text. Token 0 precedes each document.\n"
           "PATH is a file, a directory or - for stdin. Binary files of a directory are skipped and listed.\n\n");
    for (int i = 0; i < OPTION_COUNT; i++) {
        char usage[64];
        snprintf(usage, sizeof(usage), "--%s %s", option_table[i].name,
                 option_table[i].value ? option_table[i].value : "");
        printf("  %-20s %s\n", usage, option_table[i].help);
    }
    printf("\nexample: zcat dictionary.gz | text_to_shards --out corpus --delimiter '\\n\\n' -\n");
}

static uint64_t parse_count(const char *name, const char *text, uint64_t min, uint64_t max) {
    char *end = NULL;
    errno = 0;
    unsigned long long x = strtoull(text, &end, 10);
    bool good = text[0] >= '0' && text[0] <= '9' && errno == 0;
    unsigned long long unit = *end == 'K' ? 1000ull : *end == 'M' ? 1000000ull : *end == 'G' ? 1000000000ull : 1;
    if (good && unit > 1) end++;
    if (!good || *end != 0 || x > max / unit || x * unit < min)
        USAGE("--%s %s: the value must be an integer from %llu to %llu", name, text, (unsigned long long)min,
              (unsigned long long)max);
    return x * unit;
}

static void parse_delimiter(Options *o, const char *text) {
    char *to = (char *)grow(NULL, strlen(text) + 1);
    size_t n = 0;
    for (const char *p = text; *p; p++) {
        static const char letters[] = "nrtf\\", bytes[] = "\n\r\t\f\\";
        const char *letter = *p == '\\' && p[1] ? strchr(letters, p[1]) : NULL;
        if (*p != '\\') to[n++] = *p;
        else if (letter) to[n++] = bytes[letter - letters], p++;
        else USAGE("--delimiter %s: '%.2s' is not one of the escapes \\n \\t \\r \\f \\\\", text, p);
    }
    if (n == 0) USAGE("--delimiter: the text is empty");
    to[n] = 0;
    o->delimiter = to;
    o->delimiter_length = n;
}

static void set_option(Options *o, int option, const char *value) {
    switch (option) {
    case OPTION_OUT: o->out = value; break;
    case OPTION_DELIMITER: parse_delimiter(o, value); break;
    case OPTION_BPE: o->bpe = parse_count("bpe", value, 512, 32768); break;
    // the header's count is an int32
    case OPTION_SHARD_TOKENS: o->shard_tokens = parse_count("shard-tokens", value, 1, INT32_MAX); break;
    case OPTION_VAL_TOKENS:
        o->val_tokens = parse_count("val-tokens", value, 0, INT64_MAX);
        o->has_val_tokens = true;
        break;
    case OPTION_FORCE: o->force = true; break;
    case OPTION_HELP: print_help(); exit(fflush(stdout) == 0 ? 0 : EXIT_FAILED);
    default: assert(!"an option of the table is not handled");
    }
}

static void parse_options(Options *o, int argc, char **argv) {
    struct option known[OPTION_COUNT + 1];
    memset(known, 0, sizeof(known));
    for (int i = 0; i < OPTION_COUNT; i++) {
        known[i].name = option_table[i].name;
        known[i].has_arg = option_table[i].value ? required_argument : no_argument;
        known[i].val = OPTION_OUT + i;
    }
    o->shard_tokens = 100000000;
    opterr = 0; // print our own messages
    for (int option; (option = getopt_long(argc, argv, ":", known, NULL)) != -1;) {
        if (option == ':') USAGE("%s requires a value; --help lists the options", argv[optind - 1]);
        if (option == '?' && optopt > 0 && optopt < 256) USAGE("unknown option -%c; --help lists the options", optopt);
        if (option == '?') USAGE("unknown option %s; --help lists the options", argv[optind - 1]);
        set_option(o, option, optarg);
    }
    if (o->out == NULL) USAGE("--out DIR is missing; --help lists the options");
    if (optind == argc) USAGE("no input: specify files or directories, or - for stdin");
    int stdin_count = 0;
    for (int i = optind; i < argc; i++) stdin_count += strcmp(argv[i], "-") == 0;
    if (stdin_count > 1) USAGE("- (stdin) can be read only once");
}

static void open_output(Converter *c) {
    const char *out = c->options.out;
    if (mkdir(out, 0777) != 0 && errno != EEXIST) check_failed("cannot make directory %s: %s", out, strerror(errno));
    c->directory = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(c->directory >= 0, "cannot open directory %s: %s", out, strerror(errno));
    if (flock(c->directory, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        check_failed("another text_to_shards is writing to %s: wait for it, or use another --out", out);
    char example[64];
    if (!c->options.force && old_corpus(c, false, example))
        check_failed("%s already has a corpus (%s): use another --out, or replace it with --force", out, example);
    c->spool = open_spool(c);
}

static const char *plural(uint64_t count) { return count == 1 ? "" : "s"; }

int main(int argc, char **argv) {
    Converter *c = &converter;
    double begin = now_seconds();
    program_name = "text_to_shards";
    failure_hook = remove_temporary_files;
    program_begin();
    parse_options(&c->options, argc, argv);
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = on_signal; // without SA_RESTART, so that a signal interrupts a read
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    open_output(c);
    c->examines = true;
    for (int i = optind; i < argc; i++) read_input(c, argv[i], true);
    c->examines = false;
    for (int i = optind; i < argc; i++) read_input(c, argv[i], true);
    if (c->binary_files)
        warn("skipped %llu binary file%s: %s%s", (unsigned long long)c->binary_files, plural(c->binary_files),
             c->binary_names, c->binary_files > LISTED ? ", ..." : "");
    CHECK(c->documents > 0, "no text in the input: nothing was written");
    unsigned char *is_val = (unsigned char *)grow(NULL, c->documents + 1);
    memset(is_val, 0, c->documents + 1);
    uint64_t val_tokens = choose_validation(c, is_val), val_documents = 0;
    c->text_bytes = c->tokens - c->documents;
    for (size_t i = 0; i < c->documents; i++) c->val_text_bytes += is_val[i] ? c->lengths[i] - 1 : 0;
    if (c->options.bpe) val_tokens = bytes_to_tokens(c, is_val);
    for (size_t i = 0; i < c->documents; i++) val_documents += is_val[i];
    write_shards(c, is_val, val_tokens);
    write_description(c, val_tokens, argv + optind, argc - optind);
    publish_corpus(c);
    if (c->dropped) warn("dropped %llu NUL bytes, the first in %s", (unsigned long long)c->dropped, c->first_dropped);
    uint64_t documents[SPLITS] = {(uint64_t)c->documents - val_documents, val_documents};
    uint64_t tokens[SPLITS] = {c->tokens - val_tokens, val_tokens};
    printf("%llu file%s (%llu empty), %llu document%s, %llu tokens, %.1f s\n", (unsigned long long)c->files,
           plural(c->files), (unsigned long long)c->empty_files, (unsigned long long)c->documents, plural(c->documents),
           (unsigned long long)c->tokens, now_seconds() - begin);
    if (c->options.bpe)
        printf("bpe   vocabulary %zu%s, %.2f bytes per token\n", c->bpe.tokens.count,
               c->bpe.tokens.count < c->options.bpe ? " (the training text has no more pairs)" : "",
               (double)c->text_bytes / (double)(c->tokens - c->documents));
    for (int split = 0; split < SPLITS; split++)
        printf("%-5s %llu document%s, %llu tokens in %llu shard%s %s/%s_*.bin\n", split_names[split],
               (unsigned long long)documents[split], plural(documents[split]), (unsigned long long)tokens[split],
               (unsigned long long)c->shards[split], plural(c->shards[split]), c->options.out, split_names[split]);
    free(is_val);
    for (int split = 0; split < SPLITS; split++) free(c->written[split]);
    bpe_free(&c->bpe);
    tdestroy(c->found, free);
    free(c->lengths);
    free(c->binary_names);
    free((void *)c->options.delimiter);
    fclose(c->spool);
    close(c->directory);
    if (fflush(stdout) != 0) check_failed("the shards are complete, but stdout cannot be written: %s", strerror(errno));
    return 0;
}
