#include "expert_signals.h"

#include "expert_hooks.h"
#include "expert_session.h"

#include "log.h"

#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>

// A drive in order reads an expert in a fraction of that.
static const std::chrono::seconds GRACE(5);

static sem_t             posted;
static std::atomic<int>  last{0};
static std::atomic<bool> exit_is_sudden{false};

void expert_signals_end() { exit_is_sudden = false; }

void expert_signals_deliver_to(std::function<void(int)> handler) {
    exit_is_sudden = std::atexit([] {
        if (exit_is_sudden) {
            _exit(1); // upstream's status
        }
    }) == 0;
    sem_init(&posted, 0, 0);
    std::thread([handler = std::move(handler)] {
        while (true) {
            if (sem_wait(&posted) == 0) {
                handler(last);
            }
        }
    }).detach();
}

void expert_signals_post(int number) {
    last = number;
    sem_post(&posted);
}

static void watch() {
    auto    since        = std::chrono::steady_clock::now(); // the last read that ended, or the signal
    int64_t n_ended_then = -1;
    while (true) {
        int64_t    n_ended = 0;
        const bool reads   = expert_reads_under_way(&n_ended) > 0;
        const bool loads   = expert_session_is_loading();
        if ((!reads && !loads) || n_ended != n_ended_then) {
            since        = std::chrono::steady_clock::now();
            n_ended_then = n_ended;
        }
        if (std::chrono::steady_clock::now() - since > GRACE) { // a thread that reads can't be woken: the file system has it
            LOG_ERR("%s: the process ends without waiting any longer\n",
                reads ? "no read of an expert has ended for 5 seconds since the server was told to stop; look at the "
                        "disk or the network behind the expert pack"
                      : "the model was still being loaded 5 seconds after the server was told to stop");
            common_log_flush(common_log_main());
            _exit(1);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

void expert_stop() {
    expert_interrupt();
    try {
        std::thread(watch).detach();
    } catch (const std::system_error &) { // a second signal still ends it
    }
}
