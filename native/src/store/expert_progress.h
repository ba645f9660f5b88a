// How far a batch has come that takes long: layers, bytes, time left. Internal to native/src/store.
#pragma once

#include <chrono>
#include <climits>
#include <cstdint>
#include <string>

// Without a lock: who hears may wait for one that another thread has.
void expert_say_progress(const char * text);

// Of one store, under its lock.
class expert_progress {
public:
    // A layer is looked up, of n_layers: what is to be said every few seconds, else "". n_rows: pairs of token and expert; n_read: bytes
    // that were ever read.
    std::string acquire(int32_t layer, int32_t n_layers, int64_t n_rows, int64_t n_read);

private:
    using clock = std::chrono::steady_clock;

    clock::time_point started;
    clock::time_point said;
    int64_t           n_read_before = 0;
    int32_t           last_layer    = INT_MAX; // whatever comes is the next batch
};
