/*
options_help.h: --help [WORD].

  no WORD   the options that begin with EVERYDAY in the table: a line for each, with the first clause of its text
  all       all options
  WORD      the option or the section of this name; else the options whose name, text or values contain the word
*/
#pragma once
#include "options_table.h"

enum { OPTION_LINE = 80, OPTION_COLUMN = 25 }; // width of the help; column of its explanations
typedef enum { HELP_BRIEF, HELP_ALL, HELP_NAMED, HELP_MENTIONED } HelpKind;

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

// brief: one line, with the first clause of the text.
static inline void option_print_help(FILE *out, const OptionRow *row, bool brief) {
    OptionText left, text;
    const char *help = row->help + (row->help[0] == EVERYDAY[0]), *placeholder = row->placeholder;
    snprintf(left, sizeof(left), "  --%s%s%s%s%s", row->kind == OPTION_BOOL && !brief ? "[no-]" : "", row->name,
             placeholder ? " " : "", placeholder ? placeholder : "", strcmp(row->name, "help") == 0 ? ", -h" : "");
    int column = fprintf(out, "%-*s ", OPTION_COLUMN - 1, left);
    if (brief) column += fprintf(out, "%.*s", (int)strcspn(help, ";"), help);
    else column = print_words(out, column, OPTION_COLUMN, help);
    for (int i = 0, next; !brief && row->choice && row->choice(i); i = next) {
        next = option_listed(row, i + 1);
        if (i == 0) column += fprintf(out, ":");
        snprintf(text, sizeof(text), "%s%s", row->choice(i), row->choice(next) ? "," : "");
        column = print_words(out, column, OPTION_COLUMN, text);
    }
    int words = row->fallback && row->fallback[0] == '('; // its last parenthesis closes the one that starts here
    if (row->fallback && strcmp(row->fallback, "no") != 0 && !(brief && words)) {
        snprintf(text, sizeof(text), "(default: %s%s", row->fallback + words, words ? "" : ")");
        print_item(out, column, OPTION_COLUMN, text, (int)strlen(text));
    }
    fputc('\n', out);
}

static inline bool option_mentions(const OptionRow *row, const char *word) {
    bool found = strcasestr(row->name, word) || strcasestr(row->help, word);
    for (int i = 0; row->choice && row->choice(i) && !found; i++) found = strcasestr(row->choice(i), word) != NULL;
    return found;
}

static inline bool help_selects(HelpKind kind, const OptionRow *row, const char *word) {
    bool shown = option_exists(row) && row->programs != this_program.hides;
    size_t section = strcspn(row->section, " ");
    if (kind == HELP_ALL) return shown;
    if (kind == HELP_BRIEF) return shown && row->help[0] == EVERYDAY[0];
    if (kind == HELP_MENTIONED) return shown && option_mentions(row, word);
    if (shown && strlen(word) == section && memcmp(row->section, word, section) == 0) return true;
    word += strspn(word, "-");
    return option_exists(row) && strcmp(row->name, strncmp(word, "no-", 3) == 0 ? word + 3 : word) == 0;
}

// Prints the selected options by section. Returns whether there are any.
static inline bool help_print_options(FILE *out, HelpKind kind, const char *word) {
    const char *section = NULL;
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        const OptionRow *row = &option_rows[r];
        if (!help_selects(kind, row, word)) continue;
        if (!section || strcmp(row->section, section) != 0)
            fprintf(out, "%s%s\n", section && kind != HELP_BRIEF ? "\n" : "", row->section);
        section = row->section;
        option_print_help(out, row, kind == HELP_BRIEF);
    }
    return section != NULL;
}

// Returns whether an option matches the word; without a word (NULL or "") true.
static inline bool options_print_help(FILE *out, const char *word) {
    HelpKind kind = !word || !*word ? HELP_BRIEF : strcmp(word, "all") == 0 ? HELP_ALL : HELP_NAMED;
    if (kind == HELP_NAMED)
        return help_print_options(out, HELP_NAMED, word) || help_print_options(out, HELP_MENTIONED, word);
    fprintf(out, "Usage: %s%s [--NAME VALUE | --NAME | --no-NAME]...\n%s", this_program.name, this_program.required,
            kind == HELP_ALL ? "\n" : "");
    int column = print_words(out, 0, 0, this_program.purpose);
    if (kind == HELP_ALL)
        print_words(out, column, 0, "Names are exact; an option may be given only once; --NAME=VALUE is possible.\n");
    fputc('\n', out);
    help_print_options(out, kind, "");
    fputc('\n', out);
    if (kind == HELP_ALL) {
        fprintf(out, "Exit status: 0 done; 1 failed; 2 usage%s.\n", this_program.statuses);
        return true;
    }
    column = print_words(out, 0, 0, "All options: --help all, or docs/options.md. A section: --help with one of");
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        const char *section = option_rows[r].section;
        if (help_selects(HELP_ALL, &option_rows[r], "") && (r == 0 || strcmp(section, option_rows[r - 1].section) != 0))
            column = print_item(out, column, 0, section, (int)strcspn(section, " "));
    }
    fputc('\n', out);
    return true;
}
