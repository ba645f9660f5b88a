// The expert pack of the model that a server runs: from the flags to the launcher, and what it counts to /metrics.
#include "expert_session.h"

#include "expert_flags.h"
#include "expert_provider.h"
#include "expert_server.h"

#include "common.h"
#include "ggml-backend.h"
#include "log.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

static const expert_launcher * launcher = nullptr;
static std::string             executable;

static std::mutex                           mutex; // guards what follows: HTTP threads read it
static expert_opened                        opened       = {};
static bool                                 session_open = false;
static std::string                          info; // kept while asleep, as the cache's gauges are
static int64_t                              n_resident_last = 0;
static std::array<int64_t, EXPERT_COUNTERS> counted_before{}; // by sessions that are closed
static int64_t                              n_failures_known = 0;
static std::string                          load_failure; // of the last load, "": none of ours
static std::atomic<bool>                    loading{false};

void expert_session_set_launcher(const expert_launcher * given, const char * path) {
    launcher   = given;
    executable = path;
}

const std::string & expert_session_executable() { return executable; }

// ---- open

static std::string override_patterns(const common_params & params) {
    // later, the list also holds what memory fitting added
    static const std::string patterns = [&] {
        std::string lines;
        for (const auto & item : params.tensor_buft_overrides) {
            lines += item.pattern ? std::string(item.pattern) + "\n" : "";
        }
        return lines;
    }();
    return patterns;
}

static std::string integer_overrides(const common_params & params) {
    std::string lines;
    for (const auto & item : params.kv_overrides) {
        if (item.tag == LLAMA_KV_OVERRIDE_TYPE_INT && item.key[0]) { // an empty key ends the list
            lines += std::string(item.key) + "=" + std::to_string(item.val_i64) + "\n";
        }
    }
    return lines;
}

// A router gives each of its models the model's name as its only alias; the parser splits it at commas.
static std::string aliases(const common_params & params) {
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

static const char * given(const std::optional<std::string> & text) { return text ? text->c_str() : nullptr; }

// "" if all flags have an effect.
static std::string flags_without_pack(const expert_flags & flags) {
    const std::pair<bool, const char *> set[] = {
        {flags.cache.has_value(), "--expert-cache"},
        {flags.cache_reserve.has_value(), "--expert-cache-reserve"},
        {flags.policy.has_value(), "--expert-policy"},
        {flags.stage_slots.has_value(), "--expert-stage-slots"},
        {flags.read_splits.has_value(), "--expert-read-splits"},
        {flags.direct_io.has_value(), flags.direct_io.value_or(true) ? "--expert-direct-io" : "--no-expert-direct-io"},
        {flags.verify.has_value(), "--expert-verify"},
        {flags.stats_file.has_value(), "--expert-stats-file"},
        {flags.stats_interval.has_value(), "--expert-stats-interval"},
        {flags.trace.has_value(), "--expert-trace"},
    };
    std::string names;
    for (const auto & [is_set, name] : set) {
        names += !is_set ? "" : names.empty() ? name : std::string(", ") + name;
    }
    return names;
}

static bool load_failed(const std::string & why) {
    LOG_ERR("%s\n", why.c_str());
    load_failure = why;
    loading      = false;
    return false;
}

// No pack is used: false if that can't be what the user wants.
static bool open_without_pack(const expert_flags & flags) {
    const std::string unused = flags_without_pack(flags);
    if (unused.empty()) {
        return true;
    }
    const std::string why = unused + " would have no effect without an expert pack";
    // a router passes its own flags on to all its models
    if (!flags.pack && !getenv("LLAMA_SERVER_ROUTER_PORT")) {
        return load_failed(
            why + ": add --expert-pack auto or the path of the pack, or leave out what has no effect "
                  "(flags, LLAMA_ARG_EXPERT_* variables and config files count; --expert-pack none makes this a warning)");
    }
    LOG_WRN("%s\n", why.c_str());
    return true;
}

bool expert_session::open(const common_params & params, llama_model_params & mparams) {
    load_failure.clear();
    const expert_flags & flags = expert_flags_get();
    if (!launcher) {
        return true;
    }
    if (!flags.pack || *flags.pack == "none") {
        return open_without_pack(flags);
    }
    const std::string name      = aliases(params);
    const std::string overrides = override_patterns(params);
    const std::string integers  = integer_overrides(params);
    expert_request    request   = {};
    request.model_path          = params.model.path.c_str();
    request.pack                = given(flags.pack);
    request.cache               = given(flags.cache);
    request.cache_reserve       = given(flags.cache_reserve);
    request.policy              = given(flags.policy);
    request.verify              = given(flags.verify);
    request.stats_file          = given(flags.stats_file);
    request.trace               = given(flags.trace);
    request.child               = getenv("LLAMA_SERVER_ROUTER_PORT") ? name.c_str() : nullptr; // as upstream asks
    request.overrides           = overrides.c_str();
    request.kv_overrides        = integers.c_str();
    request.stats_interval      = given(flags.stats_interval);
    request.stage_slots         = given(flags.stage_slots);
    request.read_splits         = given(flags.read_splits);
    request.direct_io           = flags.direct_io ? *flags.direct_io : -1;
    request.n_gpu_layers        = model_gpus(params).empty() ? -1 : params.n_gpu_layers;
    request.split_by_layer      = params.split_mode == LLAMA_SPLIT_MODE_LAYER || params.split_mode == LLAMA_SPLIT_MODE_NONE;

    loading              = true;
    expert_opened result = {};
    if (!launcher->open(&request, &result)) {
        return load_failed(result.error ? result.error : "the expert pack could not be opened");
    }
    mparams.use_extra_bufts = false; // repacked weights add up in another order
    if (mparams.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK) {
        mparams.load_mode = LLAMA_LOAD_MODE_MLOCK; // locking a mapping would lock the experts in it
    }
    std::lock_guard<std::mutex> lock(mutex);
    opened           = result;
    n_failures_known = 0;
    session_open     = true;
    is_open          = true;
    return true;
}

static size_t free_bytes(ggml_backend_dev_t dev) {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    return free;
}

// How llama.cpp divides the layers: as the user says, else by what is free.
static std::vector<double> shares(const common_params & params, const std::vector<ggml_backend_dev_t> & devices) {
    std::vector<double> given(params.tensor_split, params.tensor_split + devices.size());
    if (std::accumulate(given.begin(), given.end(), 0.0) <= 0) {
        std::transform(devices.begin(), devices.end(), given.begin(), free_bytes);
    }
    const double sum = std::accumulate(given.begin(), given.end(), 0.0);
    for (double & share : given) {
        share = sum > 0 ? share / sum : 0;
    }
    return given;
}

std::vector<size_t> expert_session::fit_target(const common_params & params) const {
    std::vector<size_t> target = params.fit_params_target;
    if (!is_open || target.empty()) {
        return target;
    }
    std::vector<ggml_backend_dev_t> devices = model_gpus(params);
    if (devices.empty()) { // fitting takes the first target for the host then
        devices = devices_of_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    devices.resize(std::min(devices.size(), target.size()));
    const std::vector<double> share = shares(params, devices);
    for (size_t i = 0; i < devices.size(); i++) {
        const uint64_t allowed = opened.cache_max == UINT64_MAX ? free_bytes(devices[i]) / 2 : opened.cache_max;
        target[i] += std::min<uint64_t>(allowed, share[i] * (double) opened.expert_bytes);
    }
    return target;
}

void expert_session::loaded() {
    if (is_open) {
        expert_store_loaded((expert_store *) opened.store);
    }
}

bool expert_session_start() {
    if (!session_open) {
        return true;
    }
    expert_opened result = opened;
    if (!launcher->start(&result)) {
        return load_failed(result.error ? result.error : "the expert cache could not be opened");
    }
    std::lock_guard<std::mutex> lock(mutex);
    opened  = result;
    info    = result.info;
    loading = false;
    return true;
}

bool expert_session_is_open() { return session_open; }
bool expert_session_is_loading() { return loading; }

static int64_t n_resident() {
    return session_open ? opened.counters[EXPERT_LOADS] - opened.counters[EXPERT_EVICTIONS] : n_resident_last;
}

expert_session::~expert_session() {
    if (!is_open) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (int i = 0; i < EXPERT_COUNTERS; i++) {
            counted_before[i] += opened.counters[i];
        }
        n_resident_last = n_resident();
        session_open    = false;
        loading         = false;
    }
    launcher->close();
}

// ---- what is reported

std::string expert_session_failure(const std::string & otherwise) {
    if (!session_open || opened.counters[EXPERT_FAILURES] == n_failures_known) {
        return otherwise;
    }
    n_failures_known = opened.counters[EXPERT_FAILURES];
    const char * why = launcher->why();
    return why && *why ? why : otherwise;
}

bool expert_session_check() {
    const std::string why = expert_session_failure("");
    return why.empty() || load_failed(why);
}

std::string expert_session_load_failure(const std::string & otherwise) { return load_failure.empty() ? otherwise : load_failure; }

std::string expert_session_info() {
    std::lock_guard<std::mutex> lock(mutex);
    return info;
}

static const struct {
    expert_counter index;
    const char *   name;
    const char *   help;
    double         scale;
} reported[] = {
    {EXPERT_ACQUIRES, "lookups_total", "Expert layers looked up, one per layer and batch", 1},
    {EXPERT_HITS, "hits_total", "Unique experts of a lookup that were in the cache", 1},
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

std::string expert_session_metrics() {
    std::lock_guard<std::mutex> lock(mutex);
    if (info.empty()) {
        return "";
    }
    std::ostringstream text;
    text.precision(15);
    auto add = [&](const char * type, const std::string & name, const char * help, double value) {
        const std::string full = "llamacpp:expert_" + name;
        text << "# HELP " << full << " " << help << "\n# TYPE " << full << " " << type << "\n" << full << " " << value << "\n";
    };
    for (const auto & item : reported) {
        const int64_t now = session_open ? opened.counters[item.index] : 0;
        add("counter", item.name, item.help, (double) (counted_before[item.index] + now) * item.scale);
    }
    add("gauge", "cache_slots", "Experts that fit in the cache", opened.n_slots);
    add("gauge", "cache_resident", "Experts in the cache", (double) n_resident());
    add("gauge", "cache_bytes", "Size of the expert cache on all devices", (double) opened.cache_bytes);
    return text.str();
}
