/*
attention_report.cuh: the text that names the backend of attention, the warnings about slow shapes, and the memory that
--no-deterministic saves.
*/
#pragma once
#include "attention_mma.cuh"
#include "attention_plans.cuh"

enum { ATTENTION_TEXT = 4 * ATTENTION_WHY, MANY_CALLS = 16 };

static inline void attention_append(char *text, const char *format, ...) {
    size_t used = strlen(text);
    va_list values;
    va_start(values, format);
    vsnprintf(text + used, ATTENTION_TEXT - used, format, values);
    va_end(values);
}

// Which layers have the shape: " with a window of 256" or " without a window".
static inline void attention_append_layers(char *text, const AttentionPlan *p) {
    if (p->shape.window) attention_append(text, " with a window of %d", p->shape.window);
    else attention_append(text, " without a window");
}

// Why cuDNN computes a shape.
static inline void attention_append_choice(char *text, const AttentionPlan *p) {
    double speed = attention_speed(p->shape, p->signals, p->backward);
    if (attention_state.options.cudnn) attention_append(text, " (--attention-kernel cudnn)");
    else if (speed == 0) attention_append(text, " (the default, not measured on this GPU)");
    else attention_append(text, " (%.2f times as fast as the built-in kernel on this GPU)", 1 / speed);
}

// The plans of one shape; backward may be NULL.
static inline void attention_append_backend(char *text, const AttentionPlan *forward, const AttentionPlan *backward) {
    const AttentionPlan *refused = !forward->parts ? forward : backward && !backward->parts ? backward : NULL;
    const AttentionPlan *cudnn = backward && backward->parts ? backward : forward;
    if (!cudnn->parts) {
        attention_append(text, "the built-in kernel (%s)", forward->why);
        return;
    }
    attention_append(text, "%s", cudnn_attention_version());
    attention_append_choice(text, cudnn);
    if (cudnn->parts > 1) attention_append(text, ", values in two parts");
    if (cudnn->backward)
        attention_append(text, ", %s backward",
                         attention_state.options.deterministic ? "deterministic" : "nondeterministic");
    if (cudnn->documents) attention_append(text, ", up to %d documents per call", cudnn->sequences);
    else if (cudnn->sequences < cudnn->shape.B)
        attention_append(text, ", %d sequence%s per call", cudnn->sequences, cudnn->sequences == 1 ? "" : "s");
    if (cudnn->groups < cudnn->shape.NKV)
        attention_append(text, ", %d of %d groups of heads per call", cudnn->groups, cudnn->shape.NKV);
    if (refused)
        attention_append(text, "; %s by the built-in kernel (%s)", refused->backward ? "backward" : "forward",
                         refused->why);
}

// The backend of the first shape that was prepared, and the other layers' backend if it differs. Shapes with another
// number of sequences, such as the last batch of a validation, are left out.
static inline const char *attention_backend(void) {
    static char text[ATTENTION_TEXT];
    char first[ATTENTION_TEXT] = "";
    text[0] = 0;
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i], *backward = NULL;
        if (p->backward || p->shape.B != attention_state.plans[0].shape.B) continue;
        for (int j = attention_state.count - 1; j > i; j--) {
            const AttentionPlan *other = &attention_state.plans[j];
            if (other->backward && attention_same_shape(other->shape, p->shape)) backward = other;
        }
        char one[ATTENTION_TEXT] = "";
        attention_append_backend(one, p, backward);
        if (strcmp(one, first) == 0) continue;
        if (!first[0]) FORMAT(first, "%s", one);
        else {
            attention_append(text, "; layers");
            attention_append_layers(text, p);
            attention_append(text, ": ");
        }
        attention_append(text, "%s", one);
    }
    return text[0] ? text : NULL;
}

// ---------------------------------------------------------------------------------------------------
// Warnings

static inline bool attention_is_deterministic(const AttentionPlan *p) {
    return p->parts && p->backward && attention_state.options.deterministic;
}

// The workspace of a backward without the requirement of determinism.
static inline size_t attention_loose_bytes(const AttentionPlan *p) {
    AttentionPlan loose = *p;
    attention_state.options.deterministic = false;
    size_t bytes = attention_try_cudnn(&loose) ? attention_bytes(&loose) : attention_bytes(p);
    attention_state.options.deterministic = true;
    return bytes;
}

// The memory of the workspace that --no-deterministic saves.
static inline size_t attention_deterministic_bytes(void) {
    size_t bytes = 0, loose = 0;
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i];
        bytes = max_size(bytes, attention_bytes(p));
        loose = max_size(loose, attention_is_deterministic(p) ? attention_loose_bytes(p) : attention_bytes(p));
    }
    return bytes > loose ? bytes - loose : 0;
}

// A deterministic backward whose workspace exceeds the limit, or that takes many calls because of the limit.
static inline bool attention_warn_calls(char *text, AttentionPlan *p) {
    int n = p->documents ? attention_slots(p->shape) : p->shape.B;
    int calls = (n + p->sequences - 1) / max_int(1, p->sequences) * (p->shape.NKV / max_int(1, p->groups));
    bool fits = p->plan_bytes <= attention_limit;
    if (p->reported || !attention_is_deterministic(p) || (fits && calls <= MANY_CALLS)) return false;
    const double GIB = 1 << 30;
    p->reported = true;
    size_t loose = attention_loose_bytes(p);
    if (loose >= attention_bytes(p)) return false; // as on a B200
    attention_append(text, "attention's deterministic backward needs %.3g GiB of workspace ",
                     (double)attention_bytes(p) / GIB);
    if (fits) attention_append(text, "in each of %d calls per layer", calls);
    else
        attention_append(text, "for %d of %d groups of heads of one sequence, more than the limit of %.3g GiB",
                         p->groups, p->shape.NKV, (double)attention_limit / GIB);
    attention_append(text,
                     "; with --no-deterministic it needs %.3g GiB and is faster, but results vary in the last bits",
                     (double)loose / GIB);
    return true;
}

// Shapes that the built-in kernel computes for one reason.
static inline bool attention_warn_refused(char *text, AttentionPlan *first) {
    if (first->reported || first->parts || !first->remedy) return false;
    bool slow[2] = {false, false}, others = false; // forward, backward; whether other layers are computed by cuDNN
    for (int i = 0; i < attention_state.count; i++) {
        AttentionPlan *p = &attention_state.plans[i];
        if (!p->parts && !p->reported && strcmp(p->why, first->why) == 0) slow[p->backward] = p->reported = true;
        others = others || (p->parts && p->backward == first->backward && p->shape.window != first->shape.window);
    }
    attention_append(text, "attention%s", slow[0] && slow[1] ? "" : slow[0] ? "'s forward" : "'s backward");
    if (others) {
        attention_append(text, " in layers");
        attention_append_layers(text, first);
    }
    attention_append(text,
                     " is computed by the built-in kernel, %s: %s; %s; --attention-kernel own requests the "
                     "built-in kernel without this warning",
                     attention_mma_fits(first->shape) ? "on tensor cores, but perhaps slower"
                                                      : "without tensor cores and several times slower",
                     first->why, first->remedy);
    return true;
}

// One line about the plans that were made since the last call; NULL: no further warning.
static inline const char *attention_warning(void) {
    static char text[ATTENTION_TEXT];
    text[0] = 0;
    if (attention_state.ignored) {
        attention_append(text,
                         "%s is ignored, since it would change cuDNN's algorithm without a record; use "
                         "--no-deterministic",
                         attention_state.ignored);
        attention_state.ignored = NULL;
        return text;
    }
    for (int i = 0; i < attention_state.count; i++) {
        AttentionPlan *p = &attention_state.plans[i];
        if (attention_warn_refused(text, p) || attention_warn_calls(text, p)) return text;
    }
    return NULL;
}
