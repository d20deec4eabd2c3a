/*
options.h: parses and prints the command line. The options are in options_table.h.

  --name value, --name=value   exact names; no abbreviations; the only short option is -h
  --name, --no-name            for options that are on or off
  --help, --help WORD          the next argument is the word, whatever it is
  A value that starts with two dashes requires "=": without it, it is parsed as the next option, because that is what a
  missing value looks like.

All errors are reported, one line each on stderr, before exit status 2. These include options specified more than once,
and combinations that can be checked without reading a checkpoint.

Call order: options_read; options_help_or_version; comm_open with options_comm_start; options_check; with --resume
options_adopt_json (options_json.h); with --resume or --init options_adopt_model; options_finish; options_config
(options_model.h).
*/
#pragma once
#include "../checkpoint/checkpoint.h"
#include "../comm/comm_launch.h"
#include "option_names.h"
#include "options_help.h"
#include "options_json.h"
#include "options_model.h"
#include "options_table.h"
#include "../base/revision.h"

// Parses the option at arguments[0]. Returns the number of arguments it takes.
static inline int option_parse(Options *o, FILE *errors, int count, char **arguments) {
    OptionText shown, accepts;
    const char *argument = strcmp(arguments[0], "-h") == 0 ? "--help" : arguments[0];
    if (argument[0] != '-' || !argument[1] || isdigit((unsigned char)argument[1])) {
        fprintf(errors, "unexpected argument '%s': every setting is an option, --NAME VALUE\n",
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
    if (r < 0 || !option_exists(&option_rows[r])) {
        o->unknown = true;
        fprintf(errors, "%s\n", option_unknown_text(shown, "unknown option", arguments[0]));
        bool joined = strchr(arguments[0], '=') != NULL;
        return !joined && count > 1 && arguments[1][0] != '-' ? 2 : 1; // also what looks like its value
    }
    const OptionRow *row = &option_rows[r];
    if (row->kind == OPTION_ACTION && row->placeholder) { // --help: the next argument may be an option too
        bool next = !value && count > 1;
        o->has[r] = true;
        o->help_word = next ? arguments[1] : value;
        return next ? 2 : 1;
    }
    bool flag = row->kind == OPTION_BOOL || row->kind == OPTION_ACTION;
    int taken = !flag && !value && count > 1 && strncmp(arguments[1], "--", 2) != 0 ? 2 : 1;
    if (taken == 2) value = arguments[1];
    if (o->given[r]) {
        fprintf(errors, "--%s is specified more than once\n", row->name);
        return taken;
    }
    o->given[r] = true;
    if (flag && value)
        fprintf(errors, "--%s takes no value, not '%s'%s%s\n", row->name, option_shown(shown, value),
                row->kind == OPTION_BOOL ? "; its opposite is --no-" : "", row->kind == OPTION_BOOL ? row->name : "");
    else if (!flag && !value) fprintf(errors, "--%s requires a value: %s\n", row->name, option_accepts(accepts, row));
    else if (!option_set(o, r, flag ? (on ? "yes" : "no") : value)) {
        const char *nearest = row->choice ? name_nearest(value, strlen(value), row->choice) : NULL;
        errno = 0;
        bool beyond = row->kind == OPTION_REAL && (strtod(value, NULL), errno) == ERANGE;
        option_accepts(accepts, row);
        bool brief = nearest && strlen(accepts) >= 80;
        const char *begin = !nearest ? "it must be " : !brief ? "? It must be " : "? All values: --help ";
        fprintf(errors, "--%s '%s' is not accepted: %s%s%s%s%s\n", row->name, option_shown(shown, value),
                nearest ? "did you mean " : "", nearest ? nearest : "", begin, brief ? row->name : accepts,
                beyond ? ", 0 or of a magnitude from 2.3e-308 to 1.7e308" : "");
    } else return taken;
    o->refused[r] = true;
    return taken;
}

// Reads the command line, once: sets the values and collects the errors, which options_check reports.
static inline void options_read(Options *o, int argc, char **argv) {
    size_t size = 0;
    options_defaults(o);
    FILE *errors = open_memstream(&o->errors, &size);
    CHECK(errors, "out of memory for the errors of the command line");
    for (int i = 1; i < argc;) i += option_parse(o, errors, argc - i, argv + i);
    CHECK(fclose(errors) == 0, "out of memory for the errors of the command line");
    if (o->minutes > 0 && !options_given(o, "steps")) o->steps = CHECKPOINT_STEP_LIMIT; // until the trial
}

// --help and --version: handled before errors are reported and before other processes or devices are accessed. Returns
// whether one of them is given. prints: this process prints the text. Exits with status 2 if no option matches the word
// of --help.
static inline bool options_help_or_version(const Options *o, bool prints) {
    OptionText text;
    bool help = o->has[option_row("help")], version = o->has[option_row("version")];
    if (prints && help && !options_print_help(stdout, o->help_word)) {
        warn("%s", option_unknown_text(text, "no option mentions", o->help_word));
        program_exit(EXIT_USAGE);
    }
    if (prints && version && !help)
        printf("%s %s, revision %s\n", this_program.name, program_version, source_revision());
    return help || version;
}

// How the ranks connect. A refused value is ignored: ranks connect before errors are reported, so that only one rank
// reports them.
static inline CommStart options_comm_start(const Options *o) {
    return (CommStart){o->start_timeout, o->rendezvous ? o->rendezvous : o->out, !o->deterministic};
}

// Reports the errors of the command line; returns their number.
static inline int options_report(const Options *o) {
    int problems = 0;
    for (const char *line = o->errors, *end; (end = strchr(line, '\n')) != NULL; line = end + 1)
        REFUSE(problems, "%.*s", (int)(end - line), line);
    return problems;
}

// Checks all options that do not depend on a checkpoint. Ends the program with status 2 after reporting all errors.
static inline void options_check(const Options *o) {
    int problems = options_report(o) + options_exclusions(o);
    // an unknown option may be a misspelt required one
    if (!o->unknown) problems += options_missing(o, false);
    if (!o->resume && !o->init) {
        Options trial = *o; // the caller's options are completed after a checkpoint has been read
        int ranks = options_ranks(o);
        options_derive(&trial, ranks);
        problems += options_number_problems(&trial, ranks);
    }
    if (problems) program_exit(EXIT_USAGE);
}
