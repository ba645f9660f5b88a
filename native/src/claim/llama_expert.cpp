#include "llama_expert.h"

#include "expert_hooks.h"

ggml_backend_buffer_type_t llama_expert_claim(
    const llama_model_loader & ml, const ggml_tensor * meta, const buft_list_t::value_type * target) {
    if (ml.files.empty()) {
        return nullptr;
    }
    const int fd = ml.files.front()->file_id();
    if (expert_wants_cpu(fd, ggml_get_name(meta))) {
        target = nullptr;
    }
    ggml_backend_dev_t         dev   = target ? target->first : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const char *               error = nullptr;
    ggml_backend_buffer_type_t buft  = expert_claim(fd, meta, dev, &error);
    if (error) {
        throw std::runtime_error(error);
    }
    if (buft && target && target->second != ggml_backend_dev_buffer_type(target->first)) {
        throw std::runtime_error(
            format("%s: an expert pack can't be used with split mode row or tensor: use split mode layer", ggml_get_name(meta)));
    }
    return buft;
}

llama_mmap::ranges llama_expert_lazy_ranges(const llama_model_loader & ml, uint32_t idx, llama_mmap::ranges lazy) {
    const int fd = ml.files.front()->file_id();
    for (const auto & [name, weight] : ml.weights_map) {
        if (weight.idx == idx && expert_is_described(fd, name.c_str())) {
            lazy.emplace_back(weight.offs, weight.offs + ggml_nbytes(weight.tensor));
        }
    }
    return lazy;
}

ggml_backend_buffer_type_t llama_expert_adapter_buft(ggml_backend_buffer_type_t buft) {
    return expert_buft_is(buft) ? ggml_backend_dev_buffer_type(ggml_backend_buft_get_device(buft)) : buft;
}

// For bindings that keep copies of llama.h's structs: 0 for a name it does not know.
extern "C" LLAMA_API size_t llama_expert_struct_size(const char * name) {
    const std::pair<const char *, size_t> sizes[] = {
        {"llama_model_params", sizeof(llama_model_params)},
        {"llama_context_params", sizeof(llama_context_params)},
        {"llama_batch", sizeof(llama_batch)},
        {"llama_model_kv_override", sizeof(llama_model_kv_override)},
    };
    for (const auto & [known, size] : sizes) {
        if (strcmp(known, name) == 0) {
            return size;
        }
    }
    return 0;
}
