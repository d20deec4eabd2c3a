/*
attention_report.cuh: the text that names the backend of attention, the warnings about slow shapes, and the memory that
--no-deterministic saves.
*/
#pragma once
#include "attention_mma.cuh"
#include "attention_plans.cuh"

enum { ATTENTION_TEXT = 4 * ATTENTION_WHY };

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

// The memory of the workspace that --no-deterministic saves.
static inline size_t attention_deterministic_bytes(void) {
    size_t bytes = 0, least = 0;
    const bool deterministic = attention_state.options.deterministic;
    attention_state.options.deterministic = false;
    for (int i = 0; i < attention_state.count; i++) {
        const AttentionPlan *p = &attention_state.plans[i];
        AttentionPlan loose = *p;
        bytes = max_size(bytes, attention_bytes(p));
        bool other = deterministic && p->parts && p->backward && attention_try_cudnn(&loose);
        least = max_size(least, attention_bytes(other ? &loose : p));
    }
    attention_state.options.deterministic = deterministic;
    return bytes > least ? bytes - least : 0;
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
    for (int i = 0; i < attention_state.count; i++)
        if (attention_warn_refused(text, &attention_state.plans[i])) return text;
    return NULL;
}
