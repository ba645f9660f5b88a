#include "expert_signals.h"

#include <semaphore.h>

#include <atomic>
#include <thread>

static sem_t            posted;
static std::atomic<int> last{0};

void expert_signals_start(std::function<void(int)> handler) {
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
