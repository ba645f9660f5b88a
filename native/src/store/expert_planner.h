// The thread on which the provider plans. Internal to native/src/store.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

class expert_planner {
public:
    ~expert_planner() { stop(); }

    // Calls plan() on the thread. Not while it runs. Where the system has no thread to give, nothing is planned.
    void ask(std::function<void()> plan);
    // What was asked for is done.
    bool is_idle();
    // Nothing is called any more.
    void stop();

private:
    void run();

    std::mutex              mutex; // guards what follows
    std::condition_variable changed;
    std::function<void()>   asked; // empty: nothing, or it is done
    bool                    stopping = false;
    std::thread             thread;
};
