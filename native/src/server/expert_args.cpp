// The --expert-* flags as arguments of llama.cpp's parser: help, environment variables, config files and router presets
// treat them like upstream's own. The launcher checks the values when it opens a pack.
#include "expert_flags.h"
#include "expert_session.h"

#include "arg.h"

#include <cstring>

expert_flags & expert_flags_get() {
    static expert_flags flags;
    return flags;
}

std::vector<common_arg> expert_args() {
    std::vector<common_arg> args = {
        common_arg({"--expert-pack"}, "{PATH,auto,none}",
            "take the routed experts from this expert pack; auto: the one beside the model\n"
            "(default: none, stock behaviour; weights are not repacked with a pack)",
            [](common_params &, const std::string & value) { expert_flags_get().pack = value; })
            .set_env("LLAMA_ARG_EXPERT_PACK"),
        common_arg({"--expert-cache"}, "{SIZE,N%,auto}",
            "memory for experts on each device that computes expert layers: 20GiB, or 60% of what is free after the reserve; "
            "auto: all experts if they fit in half of that (on a GPU: in all of it), else that half (or all) (default: auto)",
            [](common_params &, const std::string & value) { expert_flags_get().cache = value; })
            .set_env("LLAMA_ARG_EXPERT_CACHE"),
        common_arg({"--expert-cache-reserve"}, "{SIZE,N%}", "memory that the expert cache leaves free (default: 1GiB)",
            [](common_params &, const std::string & value) { expert_flags_get().cache_reserve = value; })
            .set_env("LLAMA_ARG_EXPERT_CACHE_RESERVE"),
        common_arg({"--expert-policy"}, "NAME", "policy that chooses which experts leave the cache; a wrong name lists them",
            [](common_params &, const std::string & value) { expert_flags_get().policy = value; })
            .set_env("LLAMA_ARG_EXPERT_POLICY"),
        common_arg({"--expert-stage-slots"}, "N", "experts that are read at the same time at most, 1 to 1024 (default: 12)",
            [](common_params &, const std::string & value) { expert_flags_get().stage_slots = value; })
            .set_env("LLAMA_ARG_EXPERT_STAGE_SLOTS"),
        common_arg({"--expert-read-splits"}, "N",
            "parts that one expert is read in at most, in parallel, 1 to 1024 (default: 64)",
            [](common_params &, const std::string & value) { expert_flags_get().read_splits = value; })
            .set_env("LLAMA_ARG_EXPERT_READ_SPLITS"),
        common_arg({"--expert-direct-io"}, {"--no-expert-direct-io"},
            "read experts past the page cache, with O_DIRECT (default: enabled)",
            [](common_params &, bool value) { expert_flags_get().direct_io = value; })
            .set_env("LLAMA_ARG_EXPERT_DIRECT_IO"),
        common_arg({"--expert-verify"}, "{first,every,off}",
            "check an expert's checksum at its first read, at every read, or not at all (default: first)",
            [](common_params &, const std::string & value) { expert_flags_get().verify = value; })
            .set_env("LLAMA_ARG_EXPERT_VERIFY"),
        common_arg({"--expert-stats-file"}, "FNAME", "file that gets the expert cache's counters as JSON",
            [](common_params &, const std::string & value) { expert_flags_get().stats_file = value; })
            .set_env("LLAMA_ARG_EXPERT_STATS_FILE"),
        common_arg({"--expert-stats-interval"}, "SECONDS", "seconds between updates of the statistics file (default: 10)",
            [](common_params &, const std::string & value) { expert_flags_get().stats_interval = value; })
            .set_env("LLAMA_ARG_EXPERT_STATS_INTERVAL"),
        common_arg({"--expert-trace"}, "FNAME", "file that gets every lookup of experts, to replay with other policies",
            [](common_params &, const std::string & value) { expert_flags_get().trace = value; })
            .set_env("LLAMA_ARG_EXPERT_TRACE"),
    };
    for (common_arg & arg : args) {
        arg.set_examples({LLAMA_EXAMPLE_SERVER});
    }
    return args;
}

bool expert_arg_is(const common_arg & arg) { return strncmp(arg.args.front(), "--expert-", strlen("--expert-")) == 0; }
