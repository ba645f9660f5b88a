// The expert pack of the model that a server runs: from the flags to the launcher, and what it counts to /metrics.
#include "expert_session.h"

#include "expert_params.h"
#include "expert_server_state.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

expert_server_state & expert_server_state::get() {
    static expert_server_state state;
    return state;
}

// ---- a model's life

bool expert_server_state::load_failed(const std::string & why) {
    LOG_ERR("%s\n", why.c_str());
    load_failure = why;
    loading      = false;
    return false;
}

bool expert_server_state::open_pack(const common_params & params) {
    load_failure.clear();
    if (!launcher) {
        return true;
    }
    if (!override_patterns) {
        override_patterns = expert_override_patterns(params);
    }
    std::vector<expert_setting> settings;
    for (int i = 0; i < launcher->n_flags; i++) {
        if (flags[i]) {
            settings.push_back({launcher->flags[i].name, flags[i]->c_str()});
        }
    }
    const std::string name     = expert_child_name(params);
    const std::string integers = expert_integer_overrides(params);
    expert_request    request  = {};
    request.settings           = settings.data();
    request.n_settings         = (int32_t) settings.size();
    request.split_by_layer     = params.split_mode == LLAMA_SPLIT_MODE_LAYER || params.split_mode == LLAMA_SPLIT_MODE_NONE;
    request.n_gpu_layers       = expert_has_gpu(params) ? params.n_gpu_layers : -1;
    request.model_path         = params.model.path.c_str();
    request.child              = getenv("LLAMA_SERVER_ROUTER_PORT") ? name.c_str() : nullptr; // as upstream asks
    request.overrides          = override_patterns->c_str();
    request.kv_overrides       = integers.c_str();

    loading              = true;
    expert_opened result = {};
    if (!launcher->open_pack(&request, &result)) {
        return load_failed(result.message ? result.message : "the expert pack could not be opened");
    }
    if (result.message) {
        LOG_WRN("%s\n", result.message);
    }
    if (!result.store) {
        loading = false;
        return true;
    }
    std::lock_guard<std::mutex> lock(mutex);
    opened           = result;
    n_failures_known = 0;
    session_open     = true;
    return true;
}

bool expert_server_state::open_arenas() {
    if (!session_open) {
        return true;
    }
    expert_opened result = opened;
    if (!launcher->open_arenas(&result)) {
        return load_failed(result.message ? result.message : "the expert cache could not be opened");
    }
    LOG_INF("%s\n", result.message);
    std::lock_guard<std::mutex> lock(mutex);
    opened    = result;
    info_text = result.info;
    loading   = false;
    return true;
}

void expert_server_state::close_pack() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (int i = 0; i < EXPERT_COUNTERS; i++) {
            counted_before[i] += opened.counters[i];
        }
        n_resident_last = n_resident();
        session_open    = false;
        loading         = false;
    }
    launcher->close_pack();
}

bool expert_session::open(const common_params & params, llama_model_params & mparams) {
    expert_server_state & state = expert_server_state::get();
    if (!state.open_pack(params)) {
        return false;
    }
    is_open = state.is_open();
    if (is_open) {
        mparams.use_extra_bufts = false; // repacked weights add up in another order
        if (mparams.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK) {
            mparams.load_mode = LLAMA_LOAD_MODE_MLOCK; // locking a mapping would lock the experts in it
        }
    }
    return true;
}

std::vector<size_t> expert_session::fit_target(const common_params & params) const {
    std::vector<size_t> target = params.fit_params_target;
    if (is_open) {
        const std::vector<expert_device_share> devices = expert_device_shares(params, target.size());
        for (size_t i = 0; i < devices.size(); i++) {
            target[i] += expert_server_state::get().launcher->cache_room(devices[i].free_bytes, devices[i].share);
        }
    }
    return target;
}

void expert_session::loaded(const common_params & params, const llama_model * model, llama_context_params & cparams) {
    expert_server_state & state = expert_server_state::get();
    if (!is_open || !expert_store_loaded(state.store())) {
        return; // open_arenas() says why not
    }
    const uint32_t most = state.batch_given ? cparams.n_ubatch : expert_batch_max(params, model, cparams);
    cparams.n_ubatch    = state.launcher->choose_batch(model, &cparams, cparams.n_ubatch, most);
    cparams.n_batch     = std::max(cparams.n_batch, cparams.n_ubatch);
}

expert_session::~expert_session() {
    if (is_open) {
        expert_server_state::get().close_pack();
    }
}

// ---- what is reported

int64_t expert_server_state::n_resident() const {
    return session_open ? opened.counters[EXPERT_LOADS] - opened.counters[EXPERT_EVICTIONS] : n_resident_last;
}

std::string expert_server_state::why_failed() {
    if (!session_open || opened.counters[EXPERT_FAILURES] == n_failures_known) {
        return "";
    }
    n_failures_known = opened.counters[EXPERT_FAILURES];
    const char * why = launcher->why_failed();
    return why ? why : "";
}

std::string expert_server_state::info() {
    std::lock_guard<std::mutex> lock(mutex);
    return info_text;
}

static const struct {
    expert_counter index;
    const char *   name;
    const char *   help;
    double         scale;
} reported[] = {
    {EXPERT_ACQUIRES, "lookups_total", "Expert layers looked up, one per layer and batch", 1},
    {EXPERT_HITS, "hits_total", "Unique experts of a lookup that were in the cache", 1},
    {EXPERT_HOST_HITS, "host_hits_total", "Of the hits, those that a device read in host memory", 1},
    {EXPERT_HOST_BYTES, "host_bytes_total", "Bytes of the blocks of these", 1},
    {EXPERT_MOVES_UP, "moves_up_total", "Experts that went from host memory to a device in the background", 1},
    {EXPERT_MOVES_DOWN, "moves_down_total", "Experts that went from a device to host memory in the background", 1},
    {EXPERT_MISSES, "misses_total", "Unique experts of a lookup that were not in the cache", 1},
    {EXPERT_EVICTIONS, "evictions_total", "Experts that left the cache for another one", 1},
    {EXPERT_LOADS, "loads_total", "Experts brought into the cache", 1},
    {EXPERT_READ_BYTES, "read_bytes_total", "Bytes read from the expert pack", 1},
    {EXPERT_H2D_BYTES, "device_copy_bytes_total", "Bytes of experts copied to a device", 1},
    {EXPERT_WAIT_NS, "wait_seconds_total", "Time that computation waited for experts", 1e-9},
    {EXPERT_IO_ERRORS, "read_errors_total", "Reads of experts that failed or had a wrong checksum", 1},
    {EXPERT_IO_RETRIES, "read_retries_total", "Failed reads of experts that were tried again", 1},
    {EXPERT_FALLBACKS, "buffered_reads_total", "Reads of experts that did not use direct I/O", 1},
    {EXPERT_FAILURES, "failed_decodes_total", "Decodes that failed because an expert could not be brought in", 1},
};

std::string expert_server_state::metrics() {
    std::lock_guard<std::mutex> lock(mutex);
    if (info_text.empty()) {
        return "";
    }
    std::ostringstream text;
    text.precision(15);
    auto add = [&](const char * type, const std::string & name, const char * help, double value) {
        const std::string full = "llamacpp:expert_" + name;
        text << "# HELP " << full << " " << help << "\n# TYPE " << full << " " << type << "\n" << full << " " << value << "\n";
    };
    for (const auto & item : reported) {
        add("counter", item.name, item.help, (double) counted(item.index) * item.scale);
    }
    add("gauge", "cache_slots", "Experts that fit in the cache", opened.n_slots);
    add("gauge", "cache_resident", "Experts in the cache", (double) n_resident());
    add("gauge", "cache_bytes", "Size of the expert cache on all devices", (double) opened.cache_bytes);
    return text.str();
}

static const size_t REQUESTS_MAX = 1024; // more than run at a time

void expert_server_state::request_started(int64_t t_us) {
    std::lock_guard<std::mutex> lock(mutex);
    if (info_text.empty()) {
        return;
    }
    for (int i = 0; i < EXPERT_COUNTERS; i++) {
        at_start[t_us][i] = counted(i);
    }
    while (at_start.size() > REQUESTS_MAX) {
        at_start.erase(at_start.begin());
    }
}

std::optional<std::array<int64_t, EXPERT_COUNTERS>> expert_server_state::counted_since(int64_t t_us) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  found = at_start.find(t_us);
    if (found == at_start.end()) {
        return std::nullopt;
    }
    std::array<int64_t, EXPERT_COUNTERS> since{};
    for (int i = 0; i < EXPERT_COUNTERS; i++) {
        since[i] = counted(i) - found->second[i];
    }
    return since;
}

// ---- what the patches call

static const std::string & either(const std::string & text, const std::string & otherwise) {
    return text.empty() ? otherwise : text;
}

bool expert_session_is_open() { return expert_server_state::get().is_open(); }
bool expert_session_is_loading() { return expert_server_state::get().is_loading(); }
bool expert_session_open_arenas() { return expert_server_state::get().open_arenas(); }
bool expert_session_check() {
    const std::string why = expert_server_state::get().why_failed();
    return why.empty() || expert_server_state::get().load_failed(why);
}
std::string expert_session_failure(const std::string & otherwise) {
    return either(expert_server_state::get().why_failed(), otherwise);
}
std::string expert_session_load_failure(const std::string & otherwise) {
    return either(expert_server_state::get().why_load_failed(), otherwise);
}
std::string         expert_session_info() { return expert_server_state::get().info(); }
std::string         expert_session_metrics() { return expert_server_state::get().metrics(); }
const std::string & expert_session_executable() { return expert_server_state::get().executable; }
