// What a context of a loaded model would take of each device, without taking it: for who chooses the size of its batches.
#include "llama-context.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

// While it lives: contexts of the model get no memory, and nobody hears of them. One at a time, for there is one log.
struct trial {
    inline static std::mutex          one;
    const std::lock_guard<std::mutex> lock{one};
    llama_model &                     model;
    const uint32_t                    n_ctx_train; // some contexts change it
    ggml_log_callback                 callback = nullptr;
    void *                            data     = nullptr;

    explicit trial(llama_model & model) : model(model), n_ctx_train(model.hparams.n_ctx_train) {
        llama_log_get(&callback, &data);
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        model.hparams.no_alloc = true;
    }
    ~trial() {
        model.hparams.no_alloc    = false;
        model.hparams.n_ctx_train = n_ctx_train;
        llama_log_set(callback, data);
    }
};

static ggml_backend_dev_t device_of(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_is_host(buft) ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)
                                           : ggml_backend_buft_get_device(buft);
}

// By device: the cache of keys and values, and what computing a batch takes.
static std::map<ggml_backend_dev_t, uint64_t> bytes_of(llama_context & context, uint32_t n_outputs_max) {
    std::map<ggml_backend_dev_t, uint64_t> taken;
    if (const llama_memory_t memory = context.get_memory()) {
        for (const auto & [buft, n_bytes] : memory->memory_breakdown()) {
            taken[device_of(buft)] += n_bytes;
        }
    }
    const llama_memory_context_ptr full     = context.get_memory() ? context.get_memory()->init_full() : nullptr;
    const ggml_backend_sched_t     sched    = context.get_sched();
    const uint32_t                 n_tokens = std::min(context.n_ctx(), context.n_ubatch());
    std::vector<size_t>            sizes(ggml_backend_sched_get_n_backends(sched));
    context.graph_reserve(n_tokens, context.n_seq_max(), std::min(n_tokens, n_outputs_max), full.get(), true, sizes.data());
    for (size_t i = 0; i < sizes.size(); i++) {
        taken[device_of(ggml_backend_sched_get_buffer_type(sched, ggml_backend_sched_get_backend(sched, (int) i)))] += sizes[i];
    }
    return taken;
}

static std::map<ggml_backend_dev_t, size_t> free_now() {
    std::map<ggml_backend_dev_t, size_t> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        size_t total = 0;
        ggml_backend_dev_memory(ggml_backend_dev_get(i), &found[ggml_backend_dev_get(i)], &total);
    }
    return found;
}

// Of a context with these parameters, but physical batches of n_ubatch tokens. Writes for each device, [n_max] at most, its name,
// bytes that are free on it now, and bytes that it would take. Returns how many, 0: there can be no such context.
extern "C" LLAMA_API int32_t llama_expert_context_bytes(llama_model * model, const llama_context_params * params,
    uint32_t n_ubatch, int32_t n_max, const char ** names, uint64_t * free_bytes, uint64_t * taken_bytes) {
    llama_context_params changed = *params;
    changed.n_ubatch             = n_ubatch;
    changed.n_batch              = std::max(changed.n_batch, n_ubatch);
    const trial                          nothing_is_allocated(*model);
    std::map<ggml_backend_dev_t, size_t> free = free_now(); // some memory of recurrent models is taken all the same
    std::unique_ptr<llama_context>       context(llama_init_from_model(model, changed));
    if (!context) {
        return 0;
    }
    int32_t n = 0;
    for (const auto & [dev, n_bytes] : bytes_of(*context, changed.n_outputs_max ? changed.n_outputs_max : changed.n_batch)) {
        if (dev && n < n_max) {
            names[n]         = ggml_backend_dev_name(dev);
            free_bytes[n]    = free[dev];
            taken_bytes[n++] = n_bytes;
        }
    }
    return n;
}
