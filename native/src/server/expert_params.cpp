#include "expert_params.h"

#include "common.h"
#include "ggml-backend.h"

#include <algorithm>

std::string expert_override_patterns(const common_params & params) {
    std::string lines;
    for (const auto & item : params.tensor_buft_overrides) {
        lines += item.pattern ? std::string(item.pattern) + "=" + ggml_backend_buft_name(item.buft) + "\n" : "";
    }
    return lines;
}

std::string expert_integer_overrides(const common_params & params) {
    std::string lines;
    for (const auto & item : params.kv_overrides) {
        if (item.tag == LLAMA_KV_OVERRIDE_TYPE_INT && item.key[0]) { // an empty key ends the list
            lines += std::string(item.key) + "=" + std::to_string(item.val_i64) + "\n";
        }
    }
    return lines;
}

// A router gives each of its models the model's name as its only alias; the parser splits it at commas.
std::string expert_child_name(const common_params & params) {
    std::string names;
    for (const std::string & alias : params.model_alias) {
        names += names.empty() ? alias : "," + alias;
    }
    return names;
}

static std::vector<ggml_backend_dev_t> devices_of_type(enum ggml_backend_dev_type type) {
    std::vector<ggml_backend_dev_t> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) == type) {
            found.push_back(ggml_backend_dev_get(i));
        }
    }
    return found;
}

// Those that llama.cpp gives layers to, in its order, which is that of the targets.
static std::vector<ggml_backend_dev_t> model_gpus(const common_params & params) {
    std::vector<ggml_backend_dev_t> gpus = params.devices; // a null pointer ends them
    if (gpus.empty()) {
        gpus = devices_of_type(GGML_BACKEND_DEVICE_TYPE_GPU);
        gpus = gpus.empty() ? devices_of_type(GGML_BACKEND_DEVICE_TYPE_IGPU) : gpus;
    }
    gpus.erase(std::remove(gpus.begin(), gpus.end(), nullptr), gpus.end());
    if (params.split_mode == LLAMA_SPLIT_MODE_NONE) {
        const bool any = params.main_gpu >= 0 && (size_t) params.main_gpu < gpus.size();
        gpus           = any ? std::vector<ggml_backend_dev_t>{gpus[params.main_gpu]} : std::vector<ggml_backend_dev_t>();
    }
    return gpus;
}

bool expert_has_gpu(const common_params & params) { return !model_gpus(params).empty(); }

// Where batches are not llama.cpp's default somebody has chosen them. What a draft model or a projector will take is not known yet.
uint32_t expert_batch_max(const common_params & params, const llama_model * model, const llama_context_params & cparams) {
    const common_params defaults{};
    const auto &        types = params.speculative.types;
    const bool is_ours        = params.n_batch == defaults.n_batch && params.n_ubatch == defaults.n_ubatch && !params.embedding &&
                         params.mmproj.path.empty() && !params.speculative.has_dft() &&
                         std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP) == types.end();
    const uint32_t n_ctx = cparams.n_ctx ? cparams.n_ctx : (uint32_t) llama_model_n_ctx_train(model);
    return is_ours ? n_ctx : cparams.n_ubatch;
}

std::vector<expert_device_share> expert_device_shares(const common_params & params, size_t n_max) {
    std::vector<ggml_backend_dev_t> devices = model_gpus(params);
    if (devices.empty()) { // fitting takes the first target for the host then
        devices = devices_of_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    devices.resize(std::min(devices.size(), n_max));
    std::vector<expert_device_share> found;
    double                           given = 0;
    double                           free  = 0;
    for (size_t i = 0; i < devices.size(); i++) {
        size_t free_bytes  = 0;
        size_t total_bytes = 0;
        ggml_backend_dev_memory(devices[i], &free_bytes, &total_bytes);
        found.push_back({free_bytes, params.tensor_split[i]});
        given += params.tensor_split[i];
        free += free_bytes;
    }
    for (expert_device_share & device : found) { // as the user says, else by what is free
        device.share = given > 0 ? device.share / given : free > 0 ? device.free_bytes / free : 0;
    }
    return found;
}
