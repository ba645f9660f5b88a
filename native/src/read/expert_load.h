// Bringing fetched experts into their slots without the provider. Internal to native/src.
#pragma once

#include "ggml-backend.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

struct expert_store;

// One expert on its way.
struct expert_load {
    static const int32_t UNKNOWN   = -1;
    static const int32_t CANCELLED = -2;

    const int32_t layer;
    const int32_t expert;
    int32_t       slot    = UNKNOWN;
    bool          started = false;
    bool          hashed  = false;   // its digest is compared
    char *        buffer  = nullptr; // staging memory that it is read into; NULL: the slot itself

    // until the slot is known:
    std::vector<std::pair<const char *, uint64_t>> arrived;        // parts that can't be copied on yet
    bool                                           ended  = false; // with this result:
    int64_t                                        n_read = 0;
    bool                                           right  = false;
    bool                                           copied = true; // false: a copy could not be started

    expert_load(int32_t layer, int32_t expert) : layer(layer), expert(expert) {}
};

// Takes its own lock only; the store's must not be held.
class expert_loader {
public:
    using load = std::shared_ptr<expert_load>;

    explicit expert_loader(expert_store * store) : store(store) {}

    // Staging memory for a device's slots.
    void add_buffers(ggml_backend_dev_t dev, char * base, uint64_t buffer_bytes, int32_t n);

    // These experts will get slots. Reads into staging memory start now: choosing the slots costs no time then.
    std::vector<load> announce(int32_t layer, const std::vector<int32_t> & experts);
    // They have slots: what has not started yet starts.
    void place(const std::vector<load> & loads, const std::vector<int32_t> & slots);
    // They get none. Returns when no read of them is under way.
    void cancel(const std::vector<load> & loads);

private:
    bool start(const load & load);
    bool pass_on(const load & load, const char * bytes, uint64_t n_bytes);
    void end(const load & load, int64_t n_read, bool right);
    void finish_or_park(const load & load);
    void finish(const load & load);
    void release(const load & load);
    void ask_provider(const load & load);

    expert_store *                                    store;
    std::mutex                                        mutex; // guards what follows, and the loads
    std::condition_variable                           released;
    std::map<ggml_backend_dev_t, std::vector<char *>> buffers;       // free ones
    std::deque<load>                                  waiting;       // placed, but too many are being read
    std::vector<load>                                 parked;        // read, but their copies may be under way
    int32_t                                           n_reading = 0; // started, their buffers not yet free
    int32_t                                           n_unread  = 0; // of these, neither parked nor finished
};
