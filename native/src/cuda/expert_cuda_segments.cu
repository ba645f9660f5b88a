// Running a graph in segments, and a layer in passes.
#include "expert_cuda.h"
#include "expert_cuda_state.h"

#include <algorithm>

static thread_local bool in_segments = false;

bool expert_cuda_in_segments() { return in_segments; }

static const int32_t * read_ids(expert_cuda_state & state, const ggml_tensor * ids, cudaStream_t stream) {
    const size_t n_ids = ids->ne[0] * ids->ne[1];
    if (state.n_ids_segments < n_ids) { // the smaller ones stay: to free one waits for kernels, also for those that wait
        state.n_ids_segments = std::max(n_ids, 2 * state.n_ids_segments);
        state.ids_segments.push_back(nullptr);
        CUDA_CHECK(
            cudaHostAlloc((void **) &state.ids_segments.back(), state.n_ids_segments * sizeof(int32_t), cudaHostAllocPortable));
    }
    int32_t * const read = state.ids_segments.back();
    const size_t    row  = ids->ne[0] * sizeof(int32_t);
    GGML_ASSERT(ids->nb[0] == sizeof(int32_t));
    CUDA_CHECK(cudaMemcpy2DAsync(read, row, ids->data, ids->nb[1], row, ids->ne[1], cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream)); // also: kernels of earlier layers have ended, their slots may be taken
    return read;
}

// Tensors that nodes [first, last] read from compute buffers and do not make: a second run needs them as they were,
// but their memory may be given to a later node of the span.
static std::vector<const ggml_tensor *> outside_inputs(const ggml_cgraph * cgraph, int first, int last) {
    std::vector<const ggml_tensor *> made;
    std::vector<const ggml_tensor *> inputs;
    const auto root_of  = [](const ggml_tensor * tensor) { return tensor->view_src ? tensor->view_src : tensor; };
    const auto contains = [](const std::vector<const ggml_tensor *> & list, const ggml_tensor * tensor) {
        return std::find(list.begin(), list.end(), tensor) != list.end();
    };
    for (int i = first; i <= last; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        for (const ggml_tensor * src : node->src) {
            const ggml_tensor * root = src ? root_of(src) : nullptr;
            if (root && root->buffer && root->data && !contains(made, root) && !contains(inputs, root) && !expert_ref_of(root) &&
                ggml_backend_buffer_get_usage(root->buffer) == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
                inputs.push_back(root);
            }
        }
        made.push_back(root_of(node));
    }
    return inputs;
}

// Results per token and expert that are read after nodes [first, last]: the last one, and what LoRA or a cut of the graph
// takes from the middle.
static std::vector<ggml_tensor *> outside_outputs(ggml_cgraph * cgraph, const expert_span & span) {
    std::vector<ggml_tensor *> outputs = {cgraph->nodes[span.last]};
    for (int i = span.first; i < span.last; i++) {
        ggml_tensor * node = cgraph->nodes[i];
        if (node->view_src || node->type != GGML_TYPE_F32 || node->ne[1] != span.ids->ne[0] || node->ne[2] != span.ids->ne[1]) {
            continue;
        }
        int  n_uses = 0;
        bool later  = node->flags & GGML_TENSOR_FLAG_OUTPUT;
        for (int j = i + 1; j < cgraph->n_nodes; j++) {
            for (const ggml_tensor * src : cgraph->nodes[j]->src) {
                n_uses += src == node;
                later |= j > span.last && src && (src == node || src->view_src == node);
            }
        }
        if (later || n_uses < ggml_node_get_use_count(cgraph, i)) {
            outputs.push_back(node);
        }
    }
    return outputs;
}

static ggml_cgraph part_of(ggml_cgraph * cgraph, int first, int end) {
    ggml_cgraph part = ggml_graph_view(cgraph, first, end);
    part.uid         = 0;
    return part;
}

// Where each tensor's bytes lie in one buffer; *n_bytes: how large it must be.
template <typename T> static std::vector<size_t> lay_out(const std::vector<T *> & tensors, size_t * n_bytes) {
    std::vector<size_t> offsets;
    *n_bytes = 0;
    for (const ggml_tensor * tensor : tensors) {
        offsets.push_back(*n_bytes);
        *n_bytes += GGML_PAD(ggml_nbytes(tensor), 256);
    }
    return offsets;
}

static void copy_on_device(void * dest, const void * src, size_t n_bytes, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(dest, src, n_bytes, cudaMemcpyDeviceToDevice, stream));
}

// The experts of this pass: their numbers, and [n_expert] 1 for each.
static void experts_of_pass(
    const expert_ref * ref, const std::vector<int32_t> & experts, std::vector<int32_t> & pass, std::vector<uint8_t> & chosen) {
    const char * const * data = expert_op_data(ref);
    pass.clear();
    std::fill(chosen.begin(), chosen.end(), 0);
    for (int32_t expert : experts) {
        if (data[expert]) {
            pass.push_back(expert);
            chosen[expert] = 1;
        }
    }
}

// Runs nodes [span.first, span.last] once per pass, each time with the experts of the pass, and keeps their rows.
static enum ggml_status run_passes(ggml_backend_t backend, ggml_cgraph * cgraph, const expert_span & span,
    expert_cuda_compute compute, expert_cuda_state & state, const std::vector<int32_t> & experts) {
    auto &        ctx      = *(ggml_backend_cuda_context *) backend->context;
    cudaStream_t  stream   = ctx.stream();
    const int32_t n_expert = span.ref->store->layers[span.ref->layer].n_expert;

    const std::vector<const ggml_tensor *> inputs       = outside_inputs(cgraph, span.first, span.last);
    const std::vector<ggml_tensor *>       outputs      = outside_outputs(cgraph, span);
    size_t                                 n_saved      = 0;
    size_t                                 n_kept       = 0;
    const std::vector<size_t>              saved_offset = lay_out(inputs, &n_saved); // of each input in `saved`
    const std::vector<size_t>              kept_offset  = lay_out(outputs, &n_kept); // of each output in `kept`
    ggml_cuda_pool_alloc<char>             saved(ctx.pool(), std::max<size_t>(n_saved, 1));
    ggml_cuda_pool_alloc<char>             kept(ctx.pool(), n_kept);
    ggml_cuda_pool_alloc<uint8_t>          in_pass(ctx.pool(), n_expert);

    // the router's ids may be overwritten by the time the rows are kept: take them from where they are saved
    ggml_tensor         ids  = *span.ids;
    const ggml_tensor * root = span.ids->view_src ? span.ids->view_src : span.ids;
    for (size_t i = 0; i < inputs.size(); i++) {
        copy_on_device(saved.get() + saved_offset[i], inputs[i]->data, ggml_nbytes(inputs[i]), stream);
        if (inputs[i] == root) {
            ids.data = saved.get() + saved_offset[i] + ((const char *) span.ids->data - (const char *) root->data);
        }
    }

    std::vector<int32_t> pass;
    std::vector<uint8_t> chosen(n_expert);
    bool                 ok = true;
    for (bool first = true;; first = false) {
        experts_of_pass(span.ref, experts, pass, chosen);
        if (pass.empty()) {
            break; // a read failed
        }
        state.apply(state.changes(span.ref->layer, pass), stream);
        CUDA_CHECK(cudaMemcpyAsync(in_pass.get(), chosen.data(), n_expert, cudaMemcpyHostToDevice, stream));
        for (size_t i = 0; i < inputs.size() && !first; i++) {
            copy_on_device(inputs[i]->data, saved.get() + saved_offset[i], ggml_nbytes(inputs[i]), stream);
        }
        ggml_cgraph part = part_of(cgraph, span.first, span.last + 1);
        ok               = compute(backend, &part) == GGML_STATUS_SUCCESS;
        for (size_t i = 0; i < outputs.size(); i++) {
            expert_cuda_launch_keep_rows(&ids, in_pass.get(), outputs[i], kept.get() + kept_offset[i], stream);
        }
        if (!ok || !expert_op_more(span.ref)) {
            break;
        }
        CUDA_CHECK(cudaStreamSynchronize(stream)); // the next pass takes slots of this one
        expert_op_next(span.ref);
    }
    for (size_t i = 0; i < outputs.size(); i++) {
        copy_on_device(outputs[i]->data, kept.get() + kept_offset[i], ggml_nbytes(outputs[i]), stream);
    }
    CUDA_CHECK(cudaStreamSynchronize(stream)); // the pool's memory is free again
    return ok ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

// Makes the span's experts resident; runs the span itself if it takes several passes. *next: where the graph goes on; *n_needed:
// experts.
static enum ggml_status run_span(ggml_backend_t backend, ggml_cgraph * cgraph, const expert_span & span,
    expert_cuda_compute compute, int * next, int64_t * n_needed) {
    auto & ctx                = *(ggml_backend_cuda_context *) backend->context;
    *next                     = span.first;
    expert_cuda_state * state = expert_cuda_state_of(span.ref, ctx.device);
    if (!state) {
        return GGML_STATUS_FAILED;
    }
    std::vector<int32_t> experts;
    const int64_t        n_ids = span.ids->ne[0] * span.ids->ne[1];
    const int32_t *      ids   = read_ids(*state, span.ids, ctx.stream());
    if (!expert_cuda_distinct_ids(span.ref, ids, n_ids, experts)) {
        return GGML_STATUS_FAILED;
    }
    *n_needed               = (int64_t) experts.size();
    const bool       ok     = expert_layer_begin(span.ref->store, span.ref->layer, experts, n_ids, ids);
    enum ggml_status status = GGML_STATUS_SUCCESS;
    if (ok && expert_op_more(span.ref)) {
        status = run_passes(backend, cgraph, span, compute, *state, experts);
        *next  = span.last + 1;
    } else if (ok) {
        state->apply(state->changes(span.ref->layer, experts), ctx.stream());
    }
    if (!expert_op_end(span.ref)) {
        state->rewrite(ctx.stream());
        status = GGML_STATUS_FAILED;
    }
    return status;
}

static bool is_prompt(const expert_span & span) {
    return expert_is_prompt(span.ref->store->layers[span.ref->layer], span.ids->ne[0] * span.ids->ne[1]);
}

// What a prompt will need of the next layer is read while one is computed. A prompt that needed nearly all of one will need nearly
// all of the next.
static void read_ahead(const expert_span & computing, int64_t n_needed, const expert_span & next) {
    expert_store * const store    = computing.ref->store;
    const int64_t        n_expert = store->layers[computing.ref->layer].n_expert;
    if (next.ref->store == store && is_prompt(next)) {
        expert_layer_read_ahead(store, next.ref->layer, computing.ref->layer, 10 * n_needed >= 9 * n_expert);
    }
}

// The first layer's are read while what comes before it is computed.
static void read_first(const expert_span & first, cudaStream_t stream) {
    if (is_prompt(first)) {
        CUDA_CHECK(cudaStreamSynchronize(stream)); // what was launched before reads slots that may be taken now
        expert_layer_read_ahead(first.ref->store, first.ref->layer, first.ref->layer, false);
    }
}

enum ggml_status expert_cuda_run_segments(ggml_backend_t backend, ggml_cgraph * cgraph, expert_cuda_compute compute) {
    auto &                         ctx   = *(ggml_backend_cuda_context *) backend->context;
    const std::vector<expert_span> spans = expert_cuda_find_spans(cgraph);
    expert_cuda_state *            state = expert_cuda_state_of(spans.front().ref, ctx.device); // there is one span at least
    if (!state) {
        return GGML_STATUS_FAILED;
    }
    // before anything is launched: a first launch loads code, which waits for the GPU, and that may wait for a lookup
    expert_cuda_take_arena(*state, ctx, spans.front().ref);
    read_first(spans.front(), ctx.stream());
    in_segments               = true;
    enum ggml_status status   = GGML_STATUS_SUCCESS;
    int              next     = 0;
    int64_t          n_needed = 0; // by the span before
    for (size_t i = 0; i <= spans.size() && status == GGML_STATUS_SUCCESS; i++) {
        const int end = i < spans.size() ? spans[i].first : cgraph->n_nodes;
        if (next < end) {
            ggml_cgraph part = part_of(cgraph, next, end);
            status           = compute(backend, &part);
            next             = end;
        }
        if (i > 0 && i < spans.size() && status == GGML_STATUS_SUCCESS) {
            read_ahead(spans[i - 1], n_needed, spans[i]);
        }
        if (i < spans.size() && status == GGML_STATUS_SUCCESS) {
            status = run_span(backend, cgraph, spans[i], compute, &next, &n_needed);
        }
    }
    in_segments = false;
    expert_cuda_mark_use(*state, ctx);
    expert_cuda_give_arena();
    return status;
}
