/*
run_report.h: what stdout shows of a run at its start and at its end.

  print_start(r)          options, and a line each for parameters, data, tokens, memory and time
  print_losses(r, last)   last: the last validation
  print_next(r)           files, and the commands that come next
*/
#pragma once
#include "memory_report.h"
#include "model_report.h"
#include "run_description.h"

// A word for a shell.
static inline const char *shell_word(OptionText out, const char *text) {
    size_t n = 0;
    bool plain = *text && strspn(text, CORPUS_LETTERS "./,:@%+=") == strlen(text);
    if (plain) return text;
    out[n++] = '\'';
    for (; *text && n + 8 < sizeof(OptionText); text++) {
        if (*text == '\'') n += (size_t)snprintf(out + n, sizeof(OptionText) - n, "'\\''");
        else out[n++] = iscntrl((unsigned char)*text) ? '?' : *text;
    }
    snprintf(out + n, sizeof(OptionText) - n, "%s'", *text ? "..." : "");
    return out;
}

// Prints the options for which `shown` is set, as arguments, on lines that begin with a title; prints nothing if there
// are none.
static inline void print_options(const Options *o, const bool shown[OPTION_ROW_COUNT], const char *title) {
    int indent = (int)strlen(title), column = 0;
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        OptionText text, word;
        char item[2 * sizeof(OptionText)];
        const char *value = option_text(text, o, r);
        if (!shown[r] || !value) continue;
        if (!column) column = printf("%s", title);
        if (option_rows[r].kind == OPTION_BOOL)
            snprintf(item, sizeof(item), "--%s%s", strcmp(value, "no") == 0 ? "no-" : "", option_rows[r].name);
        else snprintf(item, sizeof(item), "--%s %s", option_rows[r].name, shell_word(word, value));
        column = print_item(stdout, column, indent, item, (int)strlen(item));
    }
    if (column) printf("\n");
}

// Finds the options that were not given and whose values differ from the defaults and the preset: the values of a
// checkpoint, and the vocabulary of a corpus.
static inline void options_differing(const Options *o, bool differs[OPTION_ROW_COUNT]) {
    Options usual;
    options_defaults(&usual);
    int preset = option_row("preset");
    bool other_preset = usual.preset != o->preset && !o->given[preset];
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        OptionText text;
        const char *value = option_text(text, o, r);
        if (value && (o->given[r] || r == preset)) option_set(&usual, r, value);
    }
    options_derive(&usual, options_ranks(o));
    for (int r = 0; r < OPTION_ROW_COUNT; r++) {
        OptionText one, other;
        const char *value = option_text(one, o, r), *of_default = option_text(other, &usual, r);
        differs[r] = value && !(of_default && strcmp(value, of_default) == 0);
    }
    differs[preset] = other_preset;
    options_free(&usual);
}

static inline void print_memory_line(const RunFacts *r) {
    size_t needed = process_bytes(r->plan, r->sampling);
    HostMemory host;
    DeviceMemory now;
    if (ops_memory(&now)) printf("memory: %.0f of %.0f MiB of the device\n", in_mib(needed), in_mib(now.total));
    else if (host_memory("", &host))
        printf("memory: %.0f MiB of this process; %s has %.0f MiB available\n", in_mib(needed), host.limit,
               in_mib(host.available));
}

// The time that the products of the remaining steps take at the peak.
static inline void print_time_line(const RunFacts *r) {
    char duration[32], flops[32];
    double left = (double)(options_last_step(r->options) - r->state->step) * r->micro_steps *
                  training_flops(r->plan, r->plan->B, r->plan->T);
    if (!(r->peak.gflops > 0)) return;
    format_duration(duration, sizeof(duration), left / (1e9 * r->peak.gflops));
    format_count(flops, sizeof(flops), left * comm_ranks());
    printf("time: at least %s (%s FLOPs; %.0f GFLOP/s: %s)\n", duration, flops, r->peak.gflops, r->peak.from);
}

static inline void print_start(const RunFacts *r) {
    const Options *o = r->options;
    const ModelConfig *c = &r->plan->config;
    OptionText out;
    char tokens[32];
    bool differs[OPTION_ROW_COUNT];
    int64_t step = r->state->step, end = options_last_step(o);
    int ranks = comm_ranks();
    options_differing(o, differs);
    print_options(o, o->given, "given:       ");
    print_options(o, differs, "not default: ");
    printf("parameters: %zu, %s, %d layers, hidden %d, vocabulary %d, context %d\n", r->plan->tensors.parameter_count,
           c->attention->name, c->L, c->C, c->V, c->T);
    if (o->match_params) print_match(r->plan, o);
    dataloader_print(&r->inputs->train, r->windows);
    format_count(tokens, sizeof(tokens), (double)(end - step) * (double)o->total_batch);
    printf("training from step %" PRId64 " to %" PRId64 ": %s tokens, %" PRId64 " in a step (", step, end, tokens,
           o->total_batch);
    if (ranks > 1) printf("%d ranks, ", ranks);
    printf("%d micro-step%s of %d x %d)\n", r->micro_steps, r->micro_steps == 1 ? "" : "s", (int)o->batch_size, c->T);
    print_memory_line(r);
    print_time_line(r);
    if (o->out) {
        const char *run = shell_word(out, o->out);
        printf("all options: %s/run.json\n", o->out);
        if (step == 0)
            printf("curves: scripts/export/export_run.py %s --follow --tensorboard DIR  # or --wandb PROJECT\n", run);
    }
    progress_flush();
}

static inline void print_losses(const RunFacts *r, const Validation *last) {
    enum { LAST = 100 };
    const SpikeDetector *d = &r->state->guard.loss;
    int count = d->count < LAST ? (int)d->count : LAST;
    printf("loss: training %.4f (mean of the last %d steps)", signless_nan(spike_mean(d, count)), count);
    if (!isnan(last->loss)) printf(", validation %.4f nats per token", signless_nan(last->loss));
    if (!isnan(last->bits_per_byte)) printf(", %.3f bits per byte", last->bits_per_byte);
    printf("\n");
}

// What a run has written, and commands that come next.
static inline void print_next(const RunFacts *r) {
    const Options *o = r->options;
    OptionText out, program;
    const char *run = shell_word(out, o->out), *trainer = shell_word(program, r->argv[0]);
    int64_t step = r->state->step;
    bool text = r->inputs->token_bytes != NULL;
    printf("options and machine  %s/run.json\n"
           "log of every step    %s/log.jsonl\n"
           "checkpoint           %s/checkpoints/step_%08" PRId64 "\n"
           "next:\n",
           o->out, o->out, o->out, step);
    printf("  %s --out %s --resume %s  # continues %s\n", trainer, run, text ? "--interactive" : "--generate 100",
           text ? "your text" : "a text");
    printf("  %s --out %s --resume --steps %" PRId64 "  # trains as long again\n", trainer, run, 2 * step);
    printf("  scripts/export/export_hub.py %s/checkpoints/step_%08" PRId64 " DIR  # for Transformers\n", run, step);
    progress_flush();
}
