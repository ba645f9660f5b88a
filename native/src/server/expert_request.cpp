#include "expert_request.h"

#include "expert_server_state.h"

#include <cstdio>

void expert_request_started(int64_t t_us) { expert_server_state::get().request_started(t_us); }

std::vector<std::pair<std::string, double>> expert_request_figures(int64_t t_us) {
    const auto counted = expert_server_state::get().counted_since(t_us);
    if (!counted) {
        return {};
    }
    const auto   of       = [&](expert_counter index) { return (double) (*counted)[index]; };
    const double n_wanted = of(EXPERT_HITS) + of(EXPERT_MISSES);
    const double share    = n_wanted > 0 ? 1 / n_wanted : 0;
    return {{"expert_hit_rate", of(EXPERT_HITS) * share}, {"expert_host_hit_rate", of(EXPERT_HOST_HITS) * share},
        {"expert_read_bytes", of(EXPERT_READ_BYTES)}, {"expert_host_bytes", of(EXPERT_HOST_BYTES)},
        {"expert_wait_ms", of(EXPERT_WAIT_NS) / 1e6}};
}

std::string expert_request_line(int64_t t_us) {
    const auto figures = expert_request_figures(t_us);
    if (figures.empty()) {
        return "";
    }
    char text[200];
    snprintf(text, sizeof(text),
        "%.1f %% hits (%.1f %% in host memory), %.1f MB read from the drive, %.1f MB from host memory, "
        "%.0f ms waited",
        100 * figures[0].second, 100 * figures[1].second, figures[2].second / 1e6, figures[3].second / 1e6, figures[4].second);
    return text;
}
