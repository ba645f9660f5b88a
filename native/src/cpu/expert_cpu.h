// The part of MUL_MAT_ID on a CPU that takes experts from a store. Included by the patched ggml-cpu.c only, behind
// the definition of struct ggml_threadpool.
#pragma once

#include "expert_hooks.h"

// dst and src0 as they would be if all experts lay in a row with this one at `data`: for code that takes the op.
struct expert_view {
    struct ggml_tensor dst;
    struct ggml_tensor src0;
};

static struct ggml_tensor * expert_view_init(
    struct expert_view * view, const struct ggml_tensor * dst, int64_t expert, const char * data) {
    view->dst        = *dst;
    view->src0       = *dst->src[0];
    view->src0.data  = (char *) (uintptr_t) data - expert * view->src0.nb[2];
    view->dst.src[0] = &view->src0;
    return &view->dst;
}

// After a pass: true if there is another one. The last time it gives the store back; a failed read fails the graph.
static bool expert_next_pass(const struct ggml_compute_params * params, const expert_ref * experts) {
    if (expert_op_more(experts)) {
        ggml_barrier(params->threadpool);
        if (params->ith == 0) {
            expert_op_next(experts);
        }
        ggml_barrier(params->threadpool);
        return true;
    }
    if (!expert_op_end(experts) && params->ith == 0) {
        params->threadpool->ec = GGML_STATUS_FAILED;
    }
    return false;
}
