/*
gemm_tuning.h: --tune-gemm: rank 0 chooses the algorithm of each matrix product; all ranks use its choices, which
run.json and the checkpoints contain.
*/
#pragma once
#include "../comm/comm.h"
#include "../evaluate/evaluation_model.h"
#include "../ops/all_ops.h"
#include "resume.h"

// Rank 0's choices, on all ranks. The caller deletes them.
static inline cJSON *gemm_choices_share(void) {
    size_t size = 0;
    char *text = comm_rank() == 0 ? json_text(matmul_choices(), &size) : NULL;
    comm_broadcast(&size, sizeof(size));
    if (!text) text = (char *)checked_calloc(size + 1, 1);
    comm_broadcast(text, size);
    cJSON *choices = json_parse(text, size);
    free(text);
    return choices;
}

// Takes the choices of the checkpoint, or of run.json before the first one, and computes two micro-steps, of which one
// writes the gradients and one adds to them, to choose for the other products. documents: attention of this run stays
// within documents. All ranks call it.
static inline void gemm_tune(const EvaluationModel *m, const Resume *resume, bool documents) {
    int B = m->plan->B, T = m->plan->T;
    int *tokens = (int *)checked_calloc((size_t)B * T, sizeof(int)); // all 0
    const cJSON *from = resume->state ? resume->state : json_member(resume->run_json, "libraries");
    double start = now_seconds();
    int before = max_int(matmul_tune(json_member(from, "gemm_choices"), comm_rank() == 0), 0);
    for (m->state->micro_step = 0; m->state->micro_step < 2; m->state->micro_step++)
        m->gradients(m->model, tokens, tokens, documents ? tokens : NULL, B, T, B * T);
    m->state->micro_step = 0;
    buffer_zero(m->acts->losses, (size_t)(B * T) * sizeof(real));
    free(tokens);
    cJSON *choices = gemm_choices_share();
    int count = matmul_tune(choices, false);
    CHECK(count >= 0, "--tune-gemm requires the same device and library on all ranks; rank 0 has %s",
          cJSON_GetStringValue(json_member(choices, "made_for")));
    if (count > before)
        printf("--tune-gemm: %d matrix products timed in %.1f s on %s\n", count - before, now_seconds() - start,
               cJSON_GetStringValue(json_member(choices, "made_for")));
    cJSON_Delete(choices);
}
