#include "expert_planner.h"

#include <system_error>

void expert_planner::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return stopping || asked; });
        if (stopping) {
            return;
        }
        lock.unlock();
        asked(); // nobody else touches it until it is done
        lock.lock();
        asked = nullptr;
    }
}

void expert_planner::ask(std::function<void()> plan) {
    std::lock_guard<std::mutex> lock(mutex);
    if (stopping) {
        return;
    }
    if (!thread.joinable()) {
        try {
            thread = std::thread([this] { run(); });
        } catch (const std::system_error &) {
            return;
        }
    }
    asked = std::move(plan);
    changed.notify_all();
}

bool expert_planner::is_idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return !asked;
}

void expert_planner::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}
