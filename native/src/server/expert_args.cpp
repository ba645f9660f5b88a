// The launcher's flags as arguments of llama.cpp's parser: help, environment variables, config files and router presets
// treat them like upstream's own. The launcher checks the values when it opens a pack.
#include "expert_server_state.h"
#include "expert_session.h"

#include "arg.h"

#include <cstring>
#include <utility>

template <size_t I> static void set_text(common_params &, const std::string & value) {
    expert_server_state::get().flags[I] = value;
}
template <size_t I> static void set_switch(common_params &, bool on) { expert_server_state::get().flags[I] = on ? "on" : "off"; }

// The parser takes plain functions, which can't know their flag: one of each kind for each index.
template <size_t... I> static common_arg argument(size_t i, const expert_flag & flag, std::index_sequence<I...>) {
    static constexpr void (*texts[])(common_params &, const std::string &) = {set_text<I>...};
    static constexpr void (*switches[])(common_params &, bool)             = {set_switch<I>...};
    return flag.off ? common_arg({flag.name}, {flag.off}, flag.help, switches[i])
                    : common_arg({flag.name}, flag.hint, flag.help, texts[i]);
}

std::vector<common_arg> expert_args() {
    std::vector<common_arg> args;
    const expert_launcher * launcher = expert_server_state::get().launcher;
    for (int i = 0; launcher && i < launcher->n_flags; i++) {
        const expert_flag & flag = launcher->flags[i];
        args.push_back(argument(i, flag, std::make_index_sequence<EXPERT_FLAGS_MAX>()));
        args.back().set_env(flag.variable).set_examples({LLAMA_EXAMPLE_SERVER});
    }
    return args;
}

bool expert_arg_is(const common_arg & arg) { return strncmp(arg.args.front(), "--expert-", strlen("--expert-")) == 0; }
