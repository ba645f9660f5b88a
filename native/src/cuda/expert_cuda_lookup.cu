// Running a whole captured graph, whose lookups this thread answers.
#include "expert_cuda.h"
#include "expert_cuda_state.h"

#include <algorithm>

// Of the graph that runs. Kept, because to look for the state takes a lock whose owner may wait for this graph.
static thread_local std::vector<expert_span> looked_up;
static thread_local expert_cuda_state *      looked_up_state;

static volatile int32_t * ids_of(const expert_cuda_state & state, const expert_span & span) {
    return (volatile int32_t *) state.ids + (size_t) span.ref->layer * EXPERT_LOOKUP_IDS_MAX; // the device writes them
}

static size_t n_ids_of(const expert_span & span) { return (size_t) (span.ids->ne[0] * span.ids->ne[1]); }

void expert_cuda_lookup_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    looked_up                 = expert_cuda_find_spans(cgraph);
    looked_up_state           = expert_cuda_state_of(looked_up.front().ref, ctx.device);
    expert_cuda_state & state = *looked_up_state;
    expert_cuda_take_arena(state, ctx, looked_up.front().ref);
    expert_cuda_enter_lookup(); // second: who waits for the arena holds nobody up
#ifdef USE_CUDA_GRAPH
    ctx.last_graph_eviction_sweep = ggml_time_us(); // it took long, perhaps: the graph that is about to be launched stays
#endif
    state.mailbox->abort   = 0;
    state.mailbox->request = 0;
    for (const expert_span & span : looked_up) {
        std::fill_n(ids_of(state, span), n_ids_of(span), EXPERT_ID_NONE);
    }
}

void expert_cuda_lookup_node(ggml_backend_cuda_context & ctx, const ggml_tensor * node) {
    if (expert_cuda_in_segments() || node->op != GGML_OP_MUL_MAT_ID) {
        return;
    }
    const expert_ref * ref = expert_ref_of(node->src[0]);
    if (!ref) {
        return;
    }
    for (const expert_span & span : looked_up) {
        if (span.ref == ref && span.ids == node->src[2]) {
            expert_cuda_launch_lookup(*looked_up_state, ref->layer, span.ids, ctx.stream());
            return;
        }
    }
}

// Answers a lookup that found a miss, whose acquire is counted. False if the experts could not be brought in.
static bool answer(expert_cuda_state & state, const expert_span & span, const std::vector<int32_t> & experts) {
    const bool                 ok       = expert_layer_begin(span.ref->store, span.ref->layer, experts, 0);
    const bool                 complete = !expert_op_more(span.ref);
    std::vector<expert_update> changed;
    if (ok && !complete) {
        expert_store_set_error(
            span.ref->store, "the cache became smaller than the experts of this step, as host memory is short: repeat it");
    }
    if (ok) {
        changed = state.changes(span.ref->layer, experts);
    }
    if (!expert_op_end(span.ref) || !complete || changed.size() > EXPERT_LOOKUP_UPDATES_MAX) {
        return false;
    }
    for (size_t i = 0; i < changed.size(); i++) {
        state.mailbox->updates[i] = changed[i];
    }
    state.mailbox->n_updates = (int32_t) changed.size();
    return true;
}

// Counts the acquires of a graph in the order of its layers, while the graph runs.
struct acquire_counter {
    const expert_cuda_state & state;
    size_t                    next = 0; // span
    std::vector<int32_t>      experts;

    bool is_written(const expert_span & span) const {
        const volatile int32_t * ids = ids_of(state, span);
        return std::find(ids, ids + n_ids_of(span), EXPERT_ID_NONE) == ids + n_ids_of(span);
    }
    void count_one() {
        const expert_span & span = looked_up[next++];
        if (expert_cuda_distinct_ids(span.ref, ids_of(state, span), n_ids_of(span), experts)) {
            expert_layer_count(span.ref->store, span.ref->layer, experts, (int64_t) n_ids_of(span));
        }
    }
    void count_to(size_t end) {
        while (next < end) {
            count_one();
        }
    }
    void count_what_is_written() {
        while (next < looked_up.size() && is_written(looked_up[next])) {
            count_one();
        }
    }
};

// Whether the lookup of the span, whose ids are known, can't wait: what it looks for is in the table.
static bool all_resident(const expert_cuda_state & state, const expert_span & span) {
    const int32_t            first_key = state.store->layers[span.ref->layer].first_key;
    const int32_t            n_expert  = state.store->layers[span.ref->layer].n_expert;
    const volatile int32_t * ids       = ids_of(state, span);
    return std::all_of(ids, ids + n_ids_of(span), [&](int32_t id) {
        const int32_t slot = id >= 0 && id < n_expert ? state.store->tables.slot_of[first_key + id] : -1;
        return slot >= 0 && (size_t) slot < state.slot_key.size() && state.slot_key[slot] == first_key + id;
    });
}

// The span whose lookup waits.
static size_t requested(const expert_mailbox & mailbox, size_t from) {
    while (from < looked_up.size() && (uint32_t) looked_up[from].ref->layer != mailbox.layer) {
        from++;
    }
    GGML_ASSERT(from < looked_up.size());
    return from;
}

enum ggml_status expert_cuda_lookup_serve(ggml_backend_cuda_context & ctx) {
    expert_cuda_state & state   = *looked_up_state;
    expert_mailbox &    mailbox = *state.mailbox;
    expert_cuda_mark_use(state, ctx);

    bool                 ok      = true;
    acquire_counter      counter = {state};
    std::vector<int32_t> experts;
    uint32_t             answered      = 0;
    size_t               last_answered = SIZE_MAX; // span
    while (ok) {
        const cudaError_t done    = cudaEventQuery(state.used);
        const uint32_t    request = mailbox.request;
        if (mailbox.abort) { // one gave up: those after it do not wait for what they ask, and layers come out of order
            break;
        }
        if (request != answered && request != 0) {
            std::atomic_thread_fence(std::memory_order_seq_cst);
            const size_t i = requested(mailbox, counter.next > 0 ? counter.next - 1 : 0);
            counter.count_to(i + 1); // before anything is evicted for this layer
            ok = expert_cuda_distinct_ids(looked_up[i].ref, ids_of(state, looked_up[i]), n_ids_of(looked_up[i]), experts) &&
                 answer(state, looked_up[i], experts);
            answered      = request;
            last_answered = i;
            std::atomic_thread_fence(std::memory_order_seq_cst);
            if (ok) {
                mailbox.answer = request;
            }
            continue;
        }
        if (done == cudaSuccess) {
            break;
        }
        if (done != cudaErrorNotReady) {
            CUDA_CHECK(done);
        }
        counter.count_what_is_written();
        const size_t last = looked_up.size() - 1;
        if (counter.next > last && last_answered != last && all_resident(state, looked_up[last])) {
            break; // no lookup will ask any more: the caller goes on while the rest of the graph runs, as without experts
        }
    }
    if (ok && mailbox.abort) {
        expert_store_set_error(looked_up.front().ref->store, "the GPU waited too long for an expert");
        ok = false;
    }
    if (!ok) {
        mailbox.n_updates = 0;
        std::atomic_thread_fence(std::memory_order_seq_cst);
        mailbox.abort = 1; // the rest of the graph computes with whatever is there; nobody uses it
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
        state.rewrite(ctx.stream());
        expert_cuda_give_arena();
        return GGML_STATUS_FAILED;
    }
    counter.count_to(looked_up.size());
    expert_cuda_give_arena();
    return GGML_STATUS_SUCCESS;
}
