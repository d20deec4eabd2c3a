/*
changes.h: what --change replaces in single steps of a run, to find the cause of a spike by experiment.

  --change 'FIRST[-LAST]:KEY=VALUE ...', separated by spaces; steps FIRST to LAST count from 1

  lr[@TENSOR[A:B]]=F    the rate of all tensors, or of those whose names begin with TENSOR, or of their rows A .. B-1,
                        times F; 0 freezes them
  moments[@TENSOR[A:B]]=0   Adam's moments are set to 0 before the update
  update-norm=X         the update is scaled down to the norm X, if its norm is larger
  replace=A-B           windows A .. B of the update, from 0, are read from the following update instead
  order=reverse         the windows of the update are read in reverse order

  bool changes_parse(changes, text, wrong)   false, with the change that is wrong, when the format is invalid
*/
#pragma once
#include "../base/common.h"

enum { CHANGES_LIMIT = 64 };
typedef enum { CHANGE_RATE, CHANGE_MOMENTS, CHANGE_NORM, CHANGE_REPLACE, CHANGE_ORDER, CHANGE_KINDS } ChangeKind;
static const char *const change_names[CHANGE_KINDS] = {"lr", "moments", "update-norm", "replace", "order"};

typedef struct {
    int64_t first, last; // steps
    ChangeKind kind;
    char tensor[96];    // beginning of the names; empty: all
    int64_t begin, end; // rows; end 0: all
    double value;       // of lr, moments, update-norm
    int64_t low, high;  // of replace
    char text[200];
} Change;
typedef struct {
    int count;
    Change all[CHANGES_LIMIT];
} Changes;

// A whole number at *text, which moves behind it; -1: none.
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

// One change, without the spaces around it.
static inline bool change_parse(Change *c, const char *text) {
    memset(c, 0, sizeof(*c));
    FORMAT(c->text, "%s", text);
    c->first = c->last = change_number(&text);
    if (*text == '-') text++, c->last = change_number(&text);
    if (c->first < 1 || c->last < c->first || *text++ != ':') return false;
    size_t n = strcspn(text, "@=");
    int kind = 0;
    while (kind < CHANGE_KINDS && (strlen(change_names[kind]) != n || memcmp(change_names[kind], text, n) != 0)) kind++;
    if (kind == CHANGE_KINDS) return false;
    c->kind = (ChangeKind)kind;
    text += n;
    if (*text == '@' && (kind > CHANGE_MOMENTS || !change_parse_tensor(c, &text))) return false;
    return *text == '=' && change_parse_value(c, text + 1);
}

static inline bool changes_parse(Changes *changes, const char *text, char wrong[200]) {
    changes->count = 0;
    for (text += strspn(text, " "); *text; text += strspn(text, " ")) {
        size_t n = strcspn(text, " ");
        snprintf(wrong, 200, "%.*s", (int)n, text);
        if (n >= 200 || changes->count == CHANGES_LIMIT) return false;
        if (!change_parse(&changes->all[changes->count++], wrong)) return false;
        text += n;
    }
    snprintf(wrong, 200, " ");
    return changes->count > 0;
}

static inline bool change_active(const Change *c, int64_t step) { return c->first <= step && step <= c->last; }
