// What the patched llama.cpp loader asks about experts that come from a store.
#pragma once

#include "expert_hooks.h"
#include "llama-model-loader.h"

// Buffer type for a weight of this model if a store provides it, else nullptr. target: the device that computes the
// weight's layer and the buffer type it would be in; nullptr for the CPU.
// Throws if a store describes the weight differently, or the device can't take experts from it.
ggml_backend_buffer_type_t llama_expert_claim(
    const llama_model_loader & ml, const ggml_tensor * meta, const buft_list_t::value_type * target);

// Byte ranges of file idx that must not be read ahead: `lazy` and the experts of a store.
llama_mmap::ranges llama_expert_lazy_ranges(const llama_model_loader & ml, uint32_t idx, llama_mmap::ranges lazy);

// Where LoRA weights of a tensor in this buffer type go: beside the experts' device, not among the experts.
ggml_backend_buffer_type_t llama_expert_adapter_buft(ggml_backend_buffer_type_t buft);
