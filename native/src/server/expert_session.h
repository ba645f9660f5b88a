// What the patched common/ and tools/server ask about the expert pack of the one model that a server runs.
// Without a pack every function does nothing and answers with what stock would use.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

struct common_arg;
struct common_params;
struct llama_context_params;
struct llama_model;
struct llama_model_params;

// The launcher's flags, for llama.cpp's parser.
std::vector<common_arg> expert_args();
bool                    expert_arg_is(const common_arg & arg);

// Lives as long as the model: a member that is destroyed after it.
class expert_session {
public:
    expert_session()                                   = default;
    expert_session(const expert_session &)             = delete;
    expert_session & operator=(const expert_session &) = delete;
    ~expert_session();

    // Opens the pack if one is asked for and adapts how the model is loaded. False: logged why.
    bool open(const common_params & params, llama_model_params & mparams);
    // Memory that fitting must leave free on each device: the user's and the cache's.
    std::vector<size_t> fit_target(const common_params & params) const;
    // The model is loaded: no other may take its experts. Chooses the batches of its context, where the user did not.
    void loaded(const common_params & params, const llama_model * model, llama_context_params & cparams);

private:
    bool is_open = false;
};

bool expert_session_is_open();
// A model with a pack is being loaded, from the opening of the pack to that of the arenas.
bool expert_session_is_loading();
// Everything is loaded: opens the arenas. False: logged why.
bool expert_session_open_arenas();
// After a decode that is no request's. False if it failed because of an expert: logged why.
bool expert_session_check();
// Why a decode failed: `otherwise` if not because of an expert.
std::string expert_session_failure(const std::string & otherwise);
// Why the last load failed: `otherwise` if not because of the pack.
std::string expert_session_load_failure(const std::string & otherwise);
// Prometheus text, "" if there never was a pack. Totals go on through sleep; gauges keep their values in it.
std::string expert_session_metrics();
// JSON object for /props, "" if there never was a pack.
std::string expert_session_info();

// What a router starts for its models, "" for this process's own executable.
const std::string & expert_session_executable();
