/*
options.h: parses and prints the command line. The options are in options_table.h.

  --name value, --name=value   exact names; no abbreviations; the only short option is -h
  --name, --no-name            for options that are on or off
  A value that starts with two dashes requires "=": without it, it is parsed as the next option, because that is what a
  missing value looks like.

All errors are reported, one line each on stderr, before exit status 2. These include options specified more than once,
and combinations that can be checked without reading a checkpoint.

Call order: options_parse; with --resume options_adopt_json (options_json.h); with --resume or --init
options_adopt_model; options_finish; options_model (options_model.h).
*/
#pragma once
#include "../checkpoint/checkpoint.h"
#include "../model/removed.h"
#include "options_json.h"
#include "options_model.h"
#include "options_table.h"
#include "../base/revision.h"

enum { OPTION_LINE = 100, OPTION_COLUMN = 27 }; // width of the help; column of its explanations

// Prints an item, which is not broken, at `column` of a line, or at `indent` of the next one. Returns the column after
// it.
static inline int print_item(FILE *out, int column, int indent, const char *item, int length) {
    bool first = column <= indent, wrap = !first && column + 1 + length > OPTION_LINE;
    if (wrap) fprintf(out, "\n%*s", indent, "");
    else if (!first) fputc(' ', out);
    fprintf(out, "%.*s", length, item);
    return (wrap ? indent : column + !first) + length;
}

static inline int print_words(FILE *out, int column, int indent, const char *words) {
    while (*words) {
        int length = (int)strcspn(words, " ");
        column = print_item(out, column, indent, words, length);
        words += length + (words[length] == ' ');
    }
    return column;
}

static inline void option_print_help(FILE *out, const OptionRow *row) {
    OptionText left, text;
    bool flag = row->kind == OPTION_BOOL || row->kind == OPTION_ACTION;
    snprintf(left, sizeof(left), "  --%s%s%s%s%s", row->kind == OPTION_BOOL ? "[no-]" : "", row->name, flag ? "" : " ",
             flag ? "" : row->placeholder, strcmp(row->name, "help") == 0 ? ", -h" : "");
    int column = fprintf(out, "%-*s", OPTION_COLUMN - 1, left) + 1;
    fputc(' ', out);
    column = print_words(out, column, OPTION_COLUMN, row->help);
    for (int i = 0, next; row->choice && row->choice(i); i = next) {
        next = option_listed(row, i + 1);
        if (i == 0) column += fprintf(out, ":");
        snprintf(text, sizeof(text), "%s%s", row->choice(i), row->choice(next) ? "," : "");
        column = print_words(out, column, OPTION_COLUMN, text);
    }
    if (row->fallback && strcmp(row->fallback, "no") != 0) {
        int words = row->fallback[0] == '('; // its last parenthesis closes ours
        snprintf(text, sizeof(text), "(default: %s%s", row->fallback + words, words ? "" : ")");
        print_item(out, column, OPTION_COLUMN, text, (int)strlen(text));
    }
    fputc('\n', out);
}

static inline void options_print_help(FILE *out) {
    fprintf(out, "Usage: train_diffv2 [--NAME VALUE | --NAME=VALUE | --NAME | --no-NAME]...\n\n");
    print_words(out, 0, 0,
                "Pretrains the Differential Transformer V2 and the models it is compared with. Names are exact; an "
                "option may be given only once.");
    fputc('\n', out);
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        if (r == 0 || strcmp(option_rows[r].section, option_rows[r - 1].section) != 0)
            fprintf(out, "\n%s\n", option_rows[r].section);
        option_print_help(out, &option_rows[r]);
    }
    fprintf(out, "\nExit status: 0 done; 1 failed; 2 usage; 3 stopped by a signal, and no step is lost.\n");
}

// Prints at the start of a run every option that has a value, by section; those given are marked.
static inline void options_print(const Options *o) {
    int column = 0;
    printf("options (* given on the command line)\n");
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        OptionText text, shown;
        char item[sizeof(OptionText) + 80]; // a name and a value
        const OptionRow *row = &option_rows[r];
        if (r == 0 || strcmp(row->section, option_rows[r - 1].section) != 0) {
            if (r) printf("\n");
            column = printf("  %-10.*s", (int)strcspn(row->section, " "), row->section);
        }
        const char *value = row->kind == OPTION_ACTION ? NULL : option_text(text, o, r);
        if (!value) continue;
        snprintf(item, sizeof(item), "%s%s=%s", row->name, o->given[r] ? "*" : "", option_shown(shown, value));
        column = print_item(stdout, column, 12, item, (int)strlen(item));
    }
    printf("\n");
}

// ---- suggestions for misspelt names

enum { NAME_LIMIT = 64 };

// Lower case, without - and _.
static inline int name_fold(char out[NAME_LIMIT + 1], const char *name, size_t length) {
    int n = 0;
    for (size_t i = 0; i < length && n < NAME_LIMIT; i++)
        if (name[i] != '-' && name[i] != '_') out[n++] = (char)tolower((unsigned char)name[i]);
    out[n] = 0;
    return n;
}

// Letters to insert, delete or replace to turn a into b.
static inline int edit_distance(const char *a, int a_length, const char *b, int b_length) {
    int row[NAME_LIMIT + 1];
    for (int j = 0; j <= b_length; j++) row[j] = j;
    for (int i = 1; i <= a_length; i++) {
        int diagonal = row[0]; // distance of the prefixes i-1 and j-1
        row[0] = i;
        for (int j = 1; j <= b_length; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_int(replaced, 1 + min_int(row[j], row[j - 1]));
        }
    }
    return row[b_length];
}

// The candidate closest to a name: few letters differ, or the name is a prefix of it. NULL: none.
static inline const char *name_nearest(const char *name, size_t length, const char *(*candidate)(int i)) {
    char folded[NAME_LIMIT + 1], other[NAME_LIMIT + 1];
    const char *nearest = NULL;
    int n = name_fold(folded, name, length), best = max_int(1, n / 3) + 1;
    if (n < 2 || length > NAME_LIMIT) return NULL;
    for (int i = 0; candidate(i); i++) {
        int m = name_fold(other, candidate(i), strlen(candidate(i)));
        int distance = strncmp(other, folded, (size_t)n) == 0 ? m > n : edit_distance(folded, n, other, m);
        if (distance < best) nearest = candidate(i), best = distance;
    }
    return nearest;
}

static inline const char *option_name(int r) { return r < OPTION_ROW_COUNT ? option_rows[r].name : NULL; }

// Names of these options in other programs.
typedef struct {
    const char *name, *option;
} OptionSynonym;
static const OptionSynonym option_synonyms[] = {
    {"learning-rate", "lr"},
    {"max-steps", "steps"},
    {"iterations", "steps"},
    {"model", "preset"},
    {"dataset", "train-data"},
    {"data", "train-data"},
    {"context-length", "seq-len"},
    {"block-size", "seq-len"},
    {"max-seq-len", "seq-len"},
    {"output-dir", "out"},
    {"num-layers", "layers"},
    {"hidden-size", "hidden"},
    {"dim", "hidden"},
    {"num-heads", "heads"},
    {"mlp", "ffn"},
    {"intermediate-size", "ffn"},
    {"vocab-size", "vocab"},
    {"wd", "weight-decay"},
    {"save-every", "checkpoint-every"},
    {"save-interval", "checkpoint-every"},
    {"checkpoint", "init"},
    {"load", "init"},
    {"clip-grad", "grad-clip"},
    {"max-grad-norm", "grad-clip"},
    {"gradient-accumulation-steps", "total-batch"},
    {"dtype", "gemm"},
};
enum { OPTION_SYNONYM_COUNT = sizeof(option_synonyms) / sizeof(option_synonyms[0]) };

// The row of the option that an unknown name most likely means; -1: none.
static inline int option_nearest(const char *name, size_t length) {
    char folded[NAME_LIMIT + 1], other[NAME_LIMIT + 1];
    name_fold(folded, name, length);
    for (int i = 0; i < OPTION_SYNONYM_COUNT; i++) {
        name_fold(other, option_synonyms[i].name, strlen(option_synonyms[i].name));
        if (strcmp(folded, other) == 0) return option_row(option_synonyms[i].option);
    }
    const char *nearest = name_nearest(name, length, option_name);
    return nearest ? option_row(nearest) : -1;
}

typedef struct {
    int count, unknown;          // of problems, and of unknown options among them
    bool removed[REMOVED_COUNT]; // reported
} ParseProblems;

// Reports an option that does not exist. Returns the number of arguments it takes, including what looks like its value.
static inline int option_unknown(ParseProblems *problems, int count, char **arguments) {
    OptionText shown, suggestion;
    const char *name = arguments[0] + strspn(arguments[0], "-");
    bool no = strncmp(name, "no-", 3) == 0, joined = strchr(name, '=') != NULL;
    if (no) name += 3;
    size_t length = strcspn(name, "=");
    int taken = !joined && count > 1 && arguments[1][0] != '-' ? 2 : 1;
    const Removed *row = removed_option(name, length);
    problems->count++;
    problems->unknown++;
    if (row) {
        if (!problems->removed[row - removed])
            warn("--%s was removed: %s; the last revision with it is %s", row->name, row->instead, row->revision);
        problems->removed[row - removed] = true;
        return taken;
    }
    int nearest = option_nearest(name, length);
    if (no && nearest >= 0 && option_rows[nearest].kind != OPTION_BOOL) no = false;
    suggestion[0] = 0;
    if (nearest >= 0)
        snprintf(suggestion, sizeof(suggestion), "did you mean --%s%s? ", no ? "no-" : "", option_rows[nearest].name);
    option_shown(shown, arguments[0]);
    if (joined) shown[min_size(strcspn(shown, "="), 100)] = 0;
    warn("unknown option %s: %s--help lists all", shown, suggestion);
    return taken;
}

// Parses the option at arguments[0]. Returns the number of arguments it takes.
static inline int option_parse(Options *o, ParseProblems *problems, int count, char **arguments) {
    OptionText shown, accepts;
    const char *argument = strcmp(arguments[0], "-h") == 0 ? "--help" : arguments[0];
    if (argument[0] != '-' || !argument[1] || isdigit((unsigned char)argument[1])) {
        REFUSE(problems->count, "unexpected argument '%s': every setting is an option, --NAME VALUE",
               option_shown(shown, argument));
        return 1;
    }
    const char *name = argument[1] == '-' ? argument + 2 : "";
    size_t length = strcspn(name, "=");
    const char *value = name[length] ? name + length + 1 : NULL;
    int r = option_find(name, length);
    bool on = true;
    if (r < 0 && strncmp(name, "no-", 3) == 0) {
        r = option_find(name + 3, length - 3);
        if (r >= 0 && option_rows[r].kind != OPTION_BOOL) r = -1;
        on = false;
    }
    if (r < 0) return option_unknown(problems, count, arguments);
    const OptionRow *row = &option_rows[r];
    bool flag = row->kind == OPTION_BOOL || row->kind == OPTION_ACTION;
    const Removed *gone = NULL;
    int taken = !flag && !value && count > 1 && strncmp(arguments[1], "--", 2) != 0 ? 2 : 1;
    if (taken == 2) value = arguments[1];
    if (o->given[r]) {
        REFUSE(problems->count, "--%s is specified more than once", row->name);
        return taken;
    }
    o->given[r] = true;
    if (flag && value)
        REFUSE(problems->count, "--%s takes no value, not '%s'%s%s", row->name, option_shown(shown, value),
               row->kind == OPTION_BOOL ? "; its opposite is --no-" : "", row->kind == OPTION_BOOL ? row->name : "");
    else if (!flag && !value)
        REFUSE(problems->count, "--%s requires a value: %s", row->name, option_accepts(accepts, row));
    else if (value && (gone = removed_value(row->name, value)) != NULL)
        REFUSE(problems->count, "--%s %s was removed: %s; the last revision with it is %s", gone->name, gone->value,
               gone->instead, gone->revision);
    else if (!option_set(o, r, flag ? (on ? "yes" : "no") : value)) {
        const char *nearest = row->choice ? name_nearest(value, strlen(value), row->choice) : NULL;
        errno = 0;
        bool beyond = row->kind == OPTION_REAL && (strtod(value, NULL), errno) == ERANGE;
        option_accepts(accepts, row);
        const char *begin = !nearest ? "it must be " : strlen(accepts) < 80 ? "? It must be " : "? --help lists all";
        REFUSE(problems->count, "--%s '%s' is not accepted: %s%s%s%s%s", row->name, option_shown(shown, value),
               nearest ? "did you mean " : "", nearest ? nearest : "", begin,
               nearest && strlen(accepts) >= 80 ? "" : accepts,
               beyond ? ", 0 or of a magnitude from 2.3e-308 to 1.7e308" : "");
    } else return taken;
    o->refused[r] = true;
    return taken;
}

// How the ranks connect: --start-timeout or its default, --rendezvous or --out, and whether --no-deterministic is
// given. Ranks connect before options are parsed, so that only one rank reports errors in them.
static inline CommStart options_comm_start(int argc, char **argv) {
    static const char *const names[] = {"--start-timeout", "--out", "--rendezvous"}; // the last one counts
    Options o;
    CommStart start;
    memset(&start, 0, sizeof(start));
    options_defaults(&o);
    for (int n = 0; n < 3; n++)
        for (int i = 1; i < argc; i++) {
            size_t length = strlen(names[n]);
            if (strncmp(argv[i], names[n], length) != 0) continue;
            char *value = argv[i][length] == '=' ? argv[i] + length + 1 : argv[i][length] ? NULL : argv[i + 1];
            if (!value || !*value) continue;
            if (n > 0) start.directory = value;
            else option_set(&o, option_row(names[n] + 2), value); // options_parse reports what this does not accept
        }
    for (int i = 1; i < argc; i++) start.nvls = start.nvls || strcmp(argv[i], "--no-deterministic") == 0;
    start.timeout = o.start_timeout;
    options_free(&o);
    return start;
}

// --help and --version: handled before errors are reported and before other processes or devices are accessed. Returns
// whether one of them is given. prints: this process prints the text.
static inline bool options_answer(int argc, char **argv, bool prints) {
    for (int i = 1; i < argc; i++) {
        bool help = strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
        if (!help && strcmp(argv[i], "--version") != 0) continue;
        if (prints && help) options_print_help(stdout);
        else if (prints) printf("train_diffv2 %s, revision %s\n", program_version, source_revision());
        return true;
    }
    return false;
}

// Sets all options that do not depend on a checkpoint. Ends the program with status 2 after reporting all errors.
static inline void options_parse(Options *o, int argc, char **argv) {
    ParseProblems problems = {0, 0, {false}};
    options_defaults(o);
    for (int i = 1; i < argc;) i += option_parse(o, &problems, argc - i, argv + i);
    if (o->minutes > 0 && !options_given(o, "steps")) o->steps = CHECKPOINT_STEP_LIMIT; // until the trial
    problems.count += options_exclusions(o);
    // an unknown option may be a misspelt required one
    if (!problems.unknown) problems.count += options_missing(o, false);
    if (!o->resume && !o->init) {
        Options trial = *o; // the caller's are completed after a checkpoint has been read
        int ranks = options_ranks(o);
        options_derive(&trial, ranks);
        problems.count += options_number_problems(&trial, ranks);
    }
    if (problems.count) program_exit(EXIT_USAGE);
}
