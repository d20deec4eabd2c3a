/*
attention_answers.cuh: the answers of cuDNN to descriptions of attention: a plan with its workspace, or a reason. cuDNN
needs most of a second to build a plan, so a process asks once per description; attention_close drops all answers,
attention_stop only the shapes that use them. A plan keeps its kernels on the device.
*/
#pragma once
#include "../../cuda/attention_cudnn.h"
#include "../../cuda/device.cuh"

enum { ATTENTION_WHY = 400 };

typedef struct AttentionAnswer {
    CudnnAttention of;
    CudnnPlan *plan; // NULL: not supported
    size_t bytes;    // workspace
    char why[ATTENTION_WHY];
    struct AttentionAnswer *next;
} AttentionAnswer;
static AttentionAnswer *attention_answers;

// The plan of a description, which the answers own; NULL with the reason in `why`.
static inline CudnnPlan *attention_ask(const CudnnAttention *of, size_t *bytes, char *why, size_t size) {
    AttentionAnswer *answer = attention_answers;
    while (answer && memcmp(&answer->of, of, sizeof(*of)) != 0) answer = answer->next;
    if (!answer) {
        answer = (AttentionAnswer *)checked_calloc(1, sizeof(*answer));
        answer->of = *of;
        answer->plan = cudnn_attention_plan(of, &answer->bytes, answer->why, sizeof(answer->why));
        answer->next = attention_answers;
        attention_answers = answer;
    }
    *bytes = answer->bytes;
    if (!answer->plan) snprintf(why, size, "%s", answer->why);
    return answer->plan;
}

static inline void attention_forget_answers(void) {
    for (AttentionAnswer *answer = attention_answers, *next; answer; answer = next) {
        next = answer->next;
        cudnn_attention_free(answer->plan);
        free(answer);
    }
    attention_answers = NULL;
}
