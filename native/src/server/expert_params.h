// What the launcher is told of upstream's parameters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct common_params;
struct llama_context_params;
struct llama_model;

// Patterns of the tensors that the user places, one a line.
std::string expert_override_patterns(const common_params & params);
// The user's integers for the model's metadata, key=value, one a line.
std::string expert_integer_overrides(const common_params & params);
// The router's name for the model.
std::string expert_child_name(const common_params & params);
bool        expert_has_gpu(const common_params & params);

// The largest physical batch that may be chosen; that of cparams: the user has chosen.
uint32_t expert_batch_max(const common_params & params, const llama_model * model, const llama_context_params & cparams);

struct expert_device_share {
    uint64_t free_bytes;
    double   share; // of the layers, 0 to 1
};

// The first n_max devices that fitting divides the model among, in the order of its targets.
std::vector<expert_device_share> expert_device_shares(const common_params & params, size_t n_max);
