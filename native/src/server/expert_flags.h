// What our flags were set to, as written by the user; those not given are the launcher's defaults.
#pragma once

#include <optional>
#include <string>

struct expert_flags {
    std::optional<std::string> pack;
    std::optional<std::string> cache;
    std::optional<std::string> cache_reserve;
    std::optional<std::string> policy;
    std::optional<std::string> verify;
    std::optional<std::string> stats_file;
    std::optional<std::string> trace;
    std::optional<std::string> stats_interval;
    std::optional<std::string> stage_slots;
    std::optional<std::string> read_splits;
    std::optional<bool>        direct_io;
};

expert_flags & expert_flags_get();
