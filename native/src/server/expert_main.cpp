// llama-server's main for a launcher that lives in another program.
#include "expert_server_state.h"
#include "expert_signals.h"

#include <clocale>

int llama_server(int argc, char ** argv);

int expert_server_main(int argc, char ** argv, const char * executable, const expert_launcher * launcher) {
    std::setlocale(LC_ALL, "C"); // as a C++ program starts; the launcher's language has set another
    expert_server_state::get().launcher   = launcher;
    expert_server_state::get().executable = executable;
    const int status                      = llama_server(argc, argv);
    expert_signals_end();
    return status;
}
