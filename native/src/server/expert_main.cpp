// llama-server's main for a launcher that lives in another program.
#include "expert_server_state.h"
#include "expert_signals.h"

#include "expert_hooks.h"

#include "log.h"

#include <clocale>
#include <cstdlib>
#include <cstring>

int llama_server(int argc, char ** argv);

// llama.cpp's parser does not tell a default that was given from one that was not.
static bool gives_batch(int argc, char ** argv) {
    for (const char * flag : {"-b", "--batch-size", "-ub", "--ubatch-size", "--batch_size", "--ubatch_size"}) {
        for (int i = 1; i < argc; i++) {
            if (strcmp(argv[i], flag) == 0) {
                return true;
            }
        }
    }
    return getenv("LLAMA_ARG_BATCH") || getenv("LLAMA_ARG_UBATCH");
}

int expert_server_main(int argc, char ** argv, const char * executable, const expert_launcher * launcher) {
    std::setlocale(LC_ALL, "C"); // as a C++ program starts; the launcher's language has set another
    expert_server_state::get().launcher    = launcher;
    expert_server_state::get().executable  = executable;
    expert_server_state::get().batch_given = gives_batch(argc, argv);
    expert_on_progress([](const char * text) { LOG_INF("prompt: %s\n", text); });
    const int status = llama_server(argc, argv);
    expert_signals_end();
    return status;
}
