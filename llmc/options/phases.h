/*
phases.h: options that change during a run: --phase STEP:NAME=VALUE,... and --batch-schedule TOKENS@STEP,...

  phase    begins after STEP updates and lasts until the next one, or until the end. Phase 0 has the options of the run;
           a later one has those of the phase before it, with its own values of the options in phase_rows
  text     Several --phase are one text, joined by ';'. A comma begins another option where NAME= follows it, outside of
           braces, so that the patterns of --train-data may have commas.
  batches  --batch-schedule is the phases that change --total-batch. K and M are 1024 and 1024^2.

  int      phases_build(phases, o)             returns the number of problems, each reported on one line
  int      phases_at(phases, step)             the phase of this step; steps count from 1
  bool     phases_begin(phases, step)          moves to the next phase if it begins after this step
  int64_t  phases_end(phases, k)               the last step of a phase
  double   phases_tokens(phases, from, to)     of the steps from + 1 .. to
*/
#pragma once
#include "options_table.h"

// Reports a usage error on one line. The program reports all errors, then exits with status 2.
#define REFUSE(count, ...) (warn(__VA_ARGS__), (count)++)

typedef struct {
    int64_t step;    // it begins after this one
    bool rebuilds;   // as PhaseRow
    Options options; // texts that did not change are those of the phase before
} TrainingPhase;

typedef struct {
    int count, current;
    TrainingPhase *items; // [count], by step
    int64_t dropped;      // the step of one that would begin after the last step; 0: none
} Phases;

typedef struct {
    int64_t step;
    int row;
    char *value;
} PhaseChange;

enum { PHASE_CHANGES = 256 };
typedef struct {
    int count, problems;
    PhaseChange items[PHASE_CHANGES]; // by step
} PhaseChanges;

static inline void phase_change_add(PhaseChanges *c, int64_t step, int row, const char *value, size_t length) {
    int at = c->count;
    for (int i = 0; i < c->count; i++)
        if (c->items[i].step == step && c->items[i].row == row && !c->problems)
            REFUSE(c->problems, "--phase %" PRId64 ": %s is specified more than once", step, option_rows[row].name);
    CHECK(c->count < PHASE_CHANGES, "--phase and --batch-schedule have more than %d changes", PHASE_CHANGES);
    while (at > 0 && c->items[at - 1].step > step) at--;
    memmove(c->items + at + 1, c->items + at, (size_t)(c->count++ - at) * sizeof(PhaseChange));
    c->items[at] = (PhaseChange){step, row, strndup(value, length)};
    CHECK(c->items[at].value, "out of memory for --phase");
}

// The end of the NAME=VALUE at `text`.
static inline const char *phase_value_end(const char *text) {
    for (int depth = 0; *text; text++) {
        size_t digits = strspn(text + 1, "0123456789"),
               name = strspn(text + 1, "abcdefghijklmnopqrstuvwxyz0123456789-");
        depth += (*text == '{') - (*text == '}');
        if (depth == 0 && *text == ',' && name && text[1 + name] == '=') break;
        if (*text == ';' && digits && text[1 + digits] == ':') break;
    }
    return text;
}

// The STEP at `text`, which must be after the one before it. Returns the text after it; NULL: there is none.
static inline const char *phase_step(PhaseChanges *c, const char *option, const char *text, char end, int64_t *step) {
    int64_t before = *step;
    size_t digits = strspn(text, "0123456789");
    if (!digits || digits > 15 || text[digits] != end) return NULL;
    *step = strtoll(text, NULL, 10);
    if (*step <= before)
        REFUSE(c->problems, "--%s: step %" PRId64 " is not after step %" PRId64 ": the steps must ascend", option,
               *step, before);
    return text + digits + (end != 0);
}

static inline void phase_read(PhaseChanges *c, const Options *o) {
    OptionText shown, accepted;
    int64_t step = 0;
    char before = ';'; // of STEP, else of a further NAME=VALUE
    for (const char *text = o->phase; before;) {
        if (before == ';') text = phase_step(c, "phase", text, ':', &step);
        size_t name = text ? strcspn(text, "=,;") : 0, r = 0;
        if (name == 0 || text[name] != '=') {
            REFUSE(c->problems, "--phase '%s' has an invalid format: it must be STEP:NAME=VALUE,NAME=VALUE,...",
                   option_shown(shown, o->phase));
            return;
        }
        const char *end = phase_value_end(text), *value = text + name + 1;
        while (r < PHASE_ROW_COUNT &&
               (strlen(phase_rows[r].option) != name || strncmp(phase_rows[r].option, text, name)))
            r++;
        if (r == PHASE_ROW_COUNT)
            REFUSE(c->problems, "--phase %" PRId64 ": a phase cannot change %.*s: it must be %s", step, (int)name, text,
                   option_accepts(accepted, &option_rows[option_row("phase")]));
        else if (o->batch_schedule && strcmp(phase_rows[r].option, "total-batch") == 0)
            REFUSE(c->problems, "--batch-schedule and total-batch of --phase are mutually exclusive: both set the "
                                "tokens of an update");
        else phase_change_add(c, step, option_row(phase_rows[r].option), value, (size_t)(end - value));
        before = *end;
        text = end + 1;
    }
}

// TOKENS at `text`. Returns the text after it; NULL: there is none.
static inline const char *batch_tokens(const char *text, int64_t *tokens) {
    size_t digits = strspn(text, "0123456789");
    char unit = text[digits];
    if (!digits || digits > 12) return NULL;
    *tokens = strtoll(text, NULL, 10) * (unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : 1);
    return text + digits + (unit == 'K' || unit == 'M');
}

static inline void batch_schedule_read(PhaseChanges *c, const Options *o) {
    OptionText number, shown;
    int64_t step = -1, tokens = 0;
    for (const char *text = o->batch_schedule; text;) {
        bool first = step < 0;
        text = batch_tokens(text, &tokens);
        bool more = text && strchr(text, ',');
        text = text && *text == '@' ? phase_step(c, "batch-schedule", text + 1, more ? ',' : 0, &step) : NULL;
        if (!text || tokens < 1 || tokens > (int64_t)1e15 || (first && step != 0)) {
            REFUSE(c->problems,
                   "--batch-schedule '%s' is not accepted: it must be TOKENS@0,TOKENS@STEP,..., such as "
                   "64K@0,256K@2000",
                   option_shown(shown, o->batch_schedule));
            return;
        }
        FORMAT(number, "%" PRId64, tokens);
        phase_change_add(c, step, option_row("total-batch"), number, strlen(number));
        if (!more) return;
    }
}

static inline bool phase_rebuilds(int row) {
    for (size_t i = 0; i < PHASE_ROW_COUNT; i++)
        if (phase_rows[i].rebuilds && option_row(phase_rows[i].option) == row) return true;
    return false;
}

static inline void phase_apply(PhaseChanges *c, TrainingPhase *phase, const PhaseChange *change) {
    const OptionRow *row = &option_rows[change->row];
    OptionText shown, accepted;
    if (row->kind == OPTION_TEXT) *(char **)((char *)&phase->options + row->field) = NULL;
    phase->rebuilds = phase->rebuilds || phase_rebuilds(change->row);
    if (!option_set(&phase->options, change->row, change->value))
        REFUSE(c->problems, "--phase %" PRId64 ": %s '%s' is not accepted: it must be %s", change->step, row->name,
               option_shown(shown, change->value), option_accepts(accepted, row));
}

static inline void phases_free(Phases *p) {
    for (int k = 1; k < p->count; k++)
        for (size_t i = 0; i < PHASE_ROW_COUNT; i++) {
            const OptionRow *row = &option_rows[option_row(phase_rows[i].option)];
            if (row->kind != OPTION_TEXT) continue;
            char *own = *(char **)((char *)&p->items[k].options + row->field);
            if (own != *(char **)((char *)&p->items[k - 1].options + row->field)) free(own);
        }
    free(p->items);
    memset(p, 0, sizeof(*p));
}

// o: finished options; the phases borrow their texts. A phase that begins after the last step is left out.
static inline int phases_build(Phases *p, const Options *o) {
    static PhaseChanges c;
    c.count = c.problems = 0;
    if (o->phase) phase_read(&c, o);
    if (o->batch_schedule) batch_schedule_read(&c, o);
    p->items = (TrainingPhase *)checked_calloc((size_t)c.count + 1, sizeof(TrainingPhase));
    p->items[0].options = *o;
    p->count = 1, p->current = 0, p->dropped = 0;
    for (int i = 0; i < c.count; i++) {
        TrainingPhase *last = &p->items[p->count - 1];
        if (c.items[i].step >= o->steps) p->dropped = c.items[i].step;
        if (c.items[i].step < o->steps && c.items[i].step > last->step) {
            p->items[p->count++] = (TrainingPhase){c.items[i].step, false, last->options};
            last++;
        }
        if (c.items[i].step == last->step && last->step) phase_apply(&c, last, &c.items[i]);
        free(c.items[i].value);
    }
    return c.problems;
}

// The tokens of the first update by --batch-schedule; 0: it is invalid.
static inline int64_t batch_schedule_first(const char *text) {
    int64_t tokens = 0;
    return batch_tokens(text, &tokens) ? tokens : 0;
}

static inline int phases_at(const Phases *p, int64_t step) {
    int k = p->count - 1;
    while (k > 0 && p->items[k].step >= step) k--;
    return k;
}
static inline bool phases_begin(Phases *p, int64_t step) {
    bool begins = p->current + 1 < p->count && p->items[p->current + 1].step == step;
    p->current += begins;
    return begins;
}
static inline int64_t phases_end(const Phases *p, int k) {
    return k + 1 < p->count ? p->items[k + 1].step : p->items[0].options.steps;
}
// The last step before data are opened again.
static inline int64_t phases_data_end(const Phases *p) {
    int k = p->current;
    while (k + 1 < p->count && !p->items[k + 1].rebuilds) k++;
    return phases_end(p, k);
}
static inline double phases_tokens(const Phases *p, int64_t from, int64_t to) {
    double tokens = 0;
    for (int k = 0; k < p->count; k++) {
        int64_t first = p->items[k].step > from ? p->items[k].step : from, last = phases_end(p, k);
        if (last > to) last = to;
        if (last > first) tokens += (double)(last - first) * (double)p->items[k].options.total_batch;
    }
    return tokens;
}
