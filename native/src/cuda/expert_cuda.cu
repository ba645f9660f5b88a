// Running graphs whose experts come from a store. See expert_cuda.h for the two ways.
#include "expert_cuda.h"
#include "expert_cuda_state.h"

#include <algorithm>

const std::vector<expert_span> & expert_cuda_find_spans(const ggml_cgraph * cgraph) {
    static thread_local uint64_t                 uid; // of the graph that the spans are of: the same in each decode step
    static thread_local std::vector<expert_span> spans;
    if (cgraph->uid != 0 && cgraph->uid == uid) {
        return spans;
    }
    uid = 0;
    spans.clear();
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (node->op != GGML_OP_MUL_MAT_ID || ggml_is_empty(node) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            continue;
        }
        const expert_ref * ref = expert_ref_of(node->src[0]);
        if (!ref) {
            continue;
        }
        if (!spans.empty() && spans.back().ref->store == ref->store && spans.back().ref->layer == ref->layer) {
            spans.back().last = i;
        } else {
            spans.push_back({ref, node->src[2], i, i});
        }
    }
    uid = cgraph->uid;
    return spans;
}

// ---- weights

const void * expert_cuda_weight(int device, const ggml_tensor * weight, const int64_t ** offsets) {
    const expert_ref * ref = expert_ref_of(weight);
    if (!ref) {
        return weight->data;
    }
    const expert_cuda_state * state = expert_cuda_state_of(ref, device);
    GGML_ASSERT(state && "expert_cuda_mode_of opens the arena first");
    const expert_layer & layer = ref->store->layers[ref->layer];
    *offsets                   = state->offsets + layer.first_key;
    return state->base + layer.roles[ref->role].offset;
}

const void * expert_cuda_matrix(int device, const ggml_tensor * weight, int64_t expert) {
    const expert_ref * ref = expert_ref_of(weight);
    if (!ref) {
        return (const char *) weight->data + expert * weight->nb[2];
    }
    const expert_cuda_state * state = expert_cuda_state_of(ref, device);
    GGML_ASSERT(state && "expert_cuda_mode_of opens the arena first");
    const int32_t slot  = ref->store->slot_of(ref->layer)[expert];
    const char *  block = slot >= 0 ? ref->store->device_data(slot) : state->base; // rows of another pass: anything readable
    return block + ref->store->layers[ref->layer].roles[ref->role].offset;
}

bool expert_cuda_ids_repeat(const ggml_tensor * weight) {
    const expert_ref * ref = expert_ref_of(weight);
    return ref && strstr(ref->store->layers[ref->layer].roles[ref->role].tensor, "_chexps.");
}

// ---- choosing

expert_cuda_mode expert_cuda_mode_of(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    if (expert_cuda_in_segments()) {
        return EXPERT_CUDA_NONE;
    }
    const std::vector<expert_span> & spans = expert_cuda_find_spans(cgraph);
    if (spans.empty()) {
        return EXPERT_CUDA_NONE;
    }
    const expert_ref * opened = nullptr; // the last one whose arena is there: all layers of a store here share one
    for (const expert_span & span : spans) {
        if (!opened || opened->store != span.ref->store) {
            const expert_cuda_state * state = expert_cuda_state_of(span.ref, ctx.device);
            if (!state || !state->may_wait) {
                return EXPERT_CUDA_SEGMENTS; // which reports the error, or needs no kernel that waits for this thread
            }
            opened = span.ref;
        }
        const int64_t        n_ids      = span.ids->ne[0] * span.ids->ne[1];
        const expert_store * store      = span.ref->store;
        const int64_t        n_distinct = std::min<int64_t>(n_ids, store->layers[span.ref->layer].n_expert);
        if (n_ids > EXPERT_LOOKUP_IDS_MAX || n_distinct > store->tables.layer_slots[span.ref->layer]) {
            return EXPERT_CUDA_SEGMENTS;
        }
    }
    // a launch that waits for its kernels would wait for a lookup that waits for this thread
    static const bool blocking = getenv("CUDA_LAUNCH_BLOCKING") && atoi(getenv("CUDA_LAUNCH_BLOCKING")) != 0;
    return blocking ? EXPERT_CUDA_SEGMENTS : EXPERT_CUDA_LOOKUP;
}

// ---- the arena is used by one graph at a time: contexts of the same model take turns

static thread_local std::unique_lock<std::mutex> held; // from expert_cuda_take_arena to expert_cuda_give_arena

void expert_cuda_take_arena(expert_cuda_state & state, ggml_backend_cuda_context & ctx, const expert_ref * ref) {
    if (held.owns_lock()) {
        return;
    }
    held = std::unique_lock<std::mutex>(state.graph_mutex);
    if (state.user && state.user != &ctx) {
        CUDA_CHECK(cudaEventSynchronize(state.used));
    }
    state.user           = &ctx;
    expert_arena * arena = expert_store_open_arena(ref->store, ref->store->layer_dev[ref->layer]);
    if (arena->touched.exchange(false)) {
        state.rewrite(ctx.stream());
    }
    state.move(*arena, ctx.stream());
}

void expert_cuda_mark_use(expert_cuda_state & state, ggml_backend_cuda_context & ctx) {
    CUDA_CHECK(cudaEventRecord(state.used, ctx.stream()));
}

void expert_cuda_give_arena() {
    if (held.owns_lock()) {
        held.unlock();
    }
    expert_cuda_leave_lookup();
}

bool expert_cuda_distinct_ids(
    const expert_ref * ref, const volatile int32_t * ids, size_t n_ids, std::vector<int32_t> & distinct) {
    const expert_layer & layer = ref->store->layers[ref->layer];
    std::vector<char>    seen(layer.n_expert, 0);
    distinct.clear();
    for (size_t i = 0; i < n_ids; i++) {
        const int32_t id = ids[i];
        if (id < 0 || id >= layer.n_expert) {
            expert_store_set_error(ref->store, "the router of " + std::string(layer.roles[ref->role].tensor) + " chose expert " +
                                                   std::to_string(id) + " of " + std::to_string(layer.n_expert));
            return false;
        }
        if (!seen[id]) {
            seen[id] = 1;
            distinct.push_back(id);
        }
    }
    return true;
}
