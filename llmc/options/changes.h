/*
changes.h: what --change replaces in single steps of a run, to find the cause of a spike by experiment.

  --change 'FIRST[-LAST]:KEY=VALUE ...', separated by spaces; steps FIRST to LAST count from 1

  lr[@TENSOR[A:B]]=F    the rate of all tensors is multiplied by F, or only of tensors whose names begin with TENSOR, or
                        of their rows A .. B-1; 0 freezes them
  moments[@TENSOR[A:B]]=0   Adam's moments are set to 0 before the update
  update-norm=X         the update is scaled down to the norm X, if its norm is larger
  replace=A-B           windows A .. B of the update, from 0, are read from the following update instead
  order=reverse         the windows of the update are read in reverse order

  rates of overlapping changes multiply, the smallest norm counts, and a window that is replaced is not reordered

  int         changes_count(text)
  const char *changes_parse(changes, text, wrong)   at most CHANGES_LIMIT; NULL, or what the change `wrong` must be
*/
#pragma once
#include "../base/common.h"

enum { CHANGES_LIMIT = 64 };
typedef enum { CHANGE_RATE, CHANGE_MOMENTS, CHANGE_NORM, CHANGE_REPLACE, CHANGE_ORDER, CHANGE_KINDS } ChangeKind;
static const char *const change_names[CHANGE_KINDS] = {"lr", "moments", "update-norm", "replace", "order"};

typedef struct {
    int64_t first, last; // steps
    ChangeKind kind;
    char tensor[96];    // beginning of the names; empty: all tensors
    int64_t begin, end; // rows; end 0: all
    double value;       // value of lr, moments or update-norm
    int64_t low, high;  // A and B of replace
    char text[200];
} Change;
typedef struct {
    int count;
    Change all[CHANGES_LIMIT];
} Changes;

// Reads a whole number at *text and moves *text behind it; -1: there is none.
static inline int64_t change_number(const char **text) {
    char *end = NULL;
    int64_t value = isdigit((unsigned char)**text) ? strtoll(*text, &end, 10) : -1;
    if (end) *text = end;
    return value;
}

static inline bool change_parse_tensor(Change *c, const char **text) {
    size_t n = strcspn(++*text, "[= ");
    if (n == 0 || n >= sizeof(c->tensor)) return false;
    memcpy(c->tensor, *text, n);
    *text += n;
    if (**text != '[') return true;
    ++*text;
    c->begin = change_number(text);
    if (c->begin < 0 || *(*text)++ != ':') return false;
    c->end = change_number(text);
    return c->end > c->begin && *(*text)++ == ']';
}

static inline bool change_parse_value(Change *c, const char *text) {
    char *end = NULL;
    if (c->kind == CHANGE_ORDER) return strcmp(text, "reverse") == 0;
    if (c->kind == CHANGE_REPLACE) {
        c->low = change_number(&text);
        if (c->low < 0 || *text++ != '-') return false;
        c->high = change_number(&text);
        return c->high >= c->low && !*text;
    }
    if (!*text || strspn(text, "0123456789.eE+-") != strlen(text)) return false;
    c->value = strtod(text, &end);
    bool good = !*end && isfinite(c->value) && c->value >= 0;
    return good && (c->kind != CHANGE_MOMENTS || c->value == 0) && (c->kind != CHANGE_NORM || c->value > 0);
}

// Parses one change, without the spaces around it. Returns NULL, or what it must be.
static inline const char *change_parse(Change *c, const char *text) {
    static const char format[] = "it must be FIRST[-LAST]:KEY=VALUE, such as 120:lr=0.5; --help change lists the keys";
    memset(c, 0, sizeof(*c));
    FORMAT(c->text, "%s", text);
    c->first = c->last = change_number(&text);
    if (*text == '-') text++, c->last = change_number(&text);
    if (c->first < 0 || c->last < 0 || *text++ != ':') return format;
    if (c->first == 0) return "its steps must be 1 or more";
    if (c->last < c->first) return "its first step must not be after its last one";
    size_t n = strcspn(text, "@=");
    int kind = 0;
    while (kind < CHANGE_KINDS && (strlen(change_names[kind]) != n || memcmp(change_names[kind], text, n) != 0)) kind++;
    if (kind == CHANGE_KINDS) return format;
    c->kind = (ChangeKind)kind;
    text += n;
    if (*text == '@' && (kind > CHANGE_MOMENTS || !change_parse_tensor(c, &text))) return format;
    return *text == '=' && change_parse_value(c, text + 1) ? NULL : format;
}

static inline int changes_count(const char *text) {
    int count = 0;
    for (text += strspn(text, " "); *text; text += strspn(text, " ")) text += strcspn(text, " "), count++;
    return count;
}

static inline const char *changes_parse(Changes *changes, const char *text, char wrong[200]) {
    changes->count = 0;
    for (text += strspn(text, " "); *text; text += strspn(text, " ")) {
        size_t n = strcspn(text, " ");
        snprintf(wrong, 200, "%.*s", (int)n, text);
        assert(changes->count < CHANGES_LIMIT);
        const char *why =
            n < 200 ? change_parse(&changes->all[changes->count++], wrong) : "it must have at most 199 characters";
        if (why) return why;
        text += n;
    }
    return NULL;
}

static inline bool change_active(const Change *c, int64_t step) { return c->first <= step && step <= c->last; }
