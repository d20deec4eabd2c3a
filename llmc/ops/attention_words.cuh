/*
attention_words.cuh: what computes attention, and a warning where it is the built-in kernel although nobody asked for it; see
attention_library.cuh.
*/
#ifndef LLMC_ATTENTION_WORDS_CUH
#define LLMC_ATTENTION_WORDS_CUH

// What computes the attention of the first shape that was prepared, in words.
static inline const char *attention_backend(void) {
    static char text[2 * ATTENTION_WHY];
    const AttentionRoute *forward = NULL, *backward = NULL;
    for (int i = attention_state.count - 1; i >= 0; i--) {
        const AttentionRoute *r = &attention_state.routes[i];
        if (r->backward) backward = r;
        else forward = r;
    }
    if (!forward) return NULL;
    const AttentionRoute *refused = !forward->parts ? forward : backward && !backward->parts ? backward : NULL;
    const AttentionRoute *taken = backward && backward->parts ? backward : forward;
    if (!forward->parts && !(backward && backward->parts)) {
        FORMAT(text, "the built-in kernel (%s)", forward->why);
        return text;
    }
    FORMAT(text, "%s%s", cudnn_attention_version(), taken->parts > 1 ? ", values in halves" : "");
    size_t used = strlen(text);
    if (taken->backward)
        used += (size_t)snprintf(text + used, sizeof(text) - used, ", %sdeterministic backward",
                                 attention_state.use.deterministic ? "" : "not ");
    if (taken->sequences < taken->shape.B)
        used += (size_t)snprintf(text + used, sizeof(text) - used, " of %d sequence%s at a time", taken->sequences,
                                 taken->sequences == 1 ? "" : "s");
    if (taken->groups < taken->shape.NKV)
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%d of %d groups of heads",
                                 taken->sequences < taken->shape.B ? ", " : " of ", taken->groups, taken->shape.NKV);
    if (refused)
        snprintf(text + used, sizeof(text) - used, "; %s by the built-in kernel (%s)",
                 refused->backward ? "backward" : "forward", refused->why);
    return text;
}

// One line, of the routes that were prepared since the last call; NULL: nothing more to warn of.
static inline const char *attention_warning(void) {
    static char text[2 * ATTENTION_WHY];
    const AttentionRoute *first = NULL;
    if (attention_state.ignored) {
        FORMAT(text, "%s is ignored: it would choose cuDNN's algorithm unseen; --sdpa-linear and --no-deterministic do",
               attention_state.ignored);
        attention_state.ignored = NULL;
        return text;
    }
    bool own[2] = {false, false}; // forward, backward
    for (int i = attention_state.warned; i < attention_state.count; i++) {
        const AttentionRoute *r = &attention_state.routes[i];
        if (r->parts || !r->remedy) continue;
        first = first ? first : r;
        own[r->backward] = true;
    }
    attention_state.warned = attention_state.count;
    if (!first) return NULL;
    FORMAT(text,
           "attention%s is computed by the built-in kernel, without tensor cores and several times slower: %s; %s; "
           "--sdpa own asks for our kernel",
           own[0] && own[1] ? ""
           : own[0]         ? "'s forward"
                            : "'s backward",
           first->why, first->remedy);
    return text;
}
#endif
