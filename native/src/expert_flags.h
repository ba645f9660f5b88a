// What our flags were set to.
#pragma once

#include <string>

struct expert_flags {
    std::string pack; // "": no pack
    std::string cache         = "auto";
    std::string cache_reserve = "1GiB";
    std::string policy; // "": the launcher's default
    std::string verify = "first";
    std::string stats_file;
    std::string trace;
    std::string stats_interval = "10";
    int         stage_slots    = 12;
    int         read_splits    = 64;
    bool        direct_io      = true;
};

expert_flags & expert_flags_get();
