#include "expert_progress.h"

#include "expert_hooks.h"

#include "ggml-impl.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

static void log_info(const char * text) { GGML_LOG_INFO("%s\n", text); }

static std::atomic<void (*)(const char *)> say{log_info};

void expert_say_progress(const char * text) { say.load()(text); }

void expert_on_progress(void (*other)(const char * text)) { say = other; }

// Tests shorten it.
static double seconds_between_lines() {
    static const char * const given = getenv("EXPERT_PACK_PROGRESS_SECONDS");
    return given ? atof(given) : 5;
}

std::string expert_progress::acquire(int32_t layer, int32_t n_layers, int64_t n_rows, int64_t n_read) {
    const clock::time_point now = clock::now();
    const auto seconds_since    = [&](clock::time_point then) { return std::chrono::duration<double>(now - then).count(); };
    if (layer <= last_layer) {
        started = said = now;
        n_read_before  = n_read;
    }
    last_layer = layer;
    if (layer == 0 || seconds_since(said) < seconds_between_lines()) {
        return "";
    }
    said                   = now;
    const double elapsed_s = seconds_since(started);
    const double n_gb      = (double) (n_read - n_read_before) / 1e9;
    char         text[200];
    snprintf(text, sizeof(text),
        "%d of %d expert layers of a batch after %.0f s: %.1f GB of experts read, %.1f GB/s, about %.0f s left (%lld rows a "
        "layer)",
        layer, n_layers, elapsed_s, n_gb, n_gb / elapsed_s, elapsed_s * (n_layers - layer) / layer, (long long) n_rows);
    return text;
}
