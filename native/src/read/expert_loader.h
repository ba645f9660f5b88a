// Bringing fetched experts into their slots without the provider.
#pragma once

#include "expert_provider.h"
#include "expert_read.h"
#include "expert_trust.h"

#include "ggml-backend.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

// One expert on its way.
struct expert_load {
    static const int32_t UNKNOWN   = -1;
    static const int32_t CANCELLED = -2;

    const int32_t            layer;
    const int32_t            expert;
    expert_block &           block;
    const uint64_t           n_bytes;
    const ggml_backend_dev_t dev;
    int32_t                  slot    = UNKNOWN;
    bool                     started = false;
    bool                     hashed  = false;   // its digest is compared
    char *                   dest    = nullptr; // what it is read into:
    char *                   buffer  = nullptr; // staging memory; NULL: the slot itself
    char *                   transit = nullptr; // memory of the device that gets a copy; NULL: only its slot does

    // until the slot is known:
    std::vector<std::pair<const char *, uint64_t>> arrived;        // parts that can't be copied on yet
    bool                                           ended  = false; // with this result:
    int64_t                                        n_read = 0;
    bool                                           right  = false;
    bool                                           copied = true; // false: a copy could not be started
};

// What the loader asks and tells who keeps the books of the slots. From any thread.
class expert_slots {
public:
    // NULL: not in host memory.
    virtual char * host_slot(int32_t slot) = 0;
    // A block of a device that should get a copy of what is read into this slot in host memory; NULL: none.
    virtual char * transit(int32_t layer, int32_t slot) = 0;
    // Starts to copy bytes of a block to its slot in a device's memory. They must stay until a copy of NULL, which waits for
    // all that was started. False if the device failed.
    virtual bool copy(int32_t slot, uint64_t offset, const void * bytes, uint64_t n_bytes) = 0;
    // The same to other memory of the slot's device.
    virtual bool copy_to(int32_t slot, char * dest, const void * bytes, uint64_t n_bytes) = 0;
    // The slot holds the expert's bytes, and `copy` if it is not NULL: whoever looks it up may use them. checked: their digest
    // was compared.
    virtual void publish(int32_t layer, int32_t expert, int32_t slot, char * copy, bool checked) = 0;
    // The loader can't read it.
    virtual void ask_provider(int32_t layer, int32_t expert, int32_t slot) = 0;
};

// Takes its own lock, and under it that of the slots, which must not be held.
class expert_loader {
public:
    using load = std::shared_ptr<expert_load>;

    expert_loader(const std::vector<expert_layer> & layers, const expert_tables & tables, expert_slots & slots);

    // Staging memory for a device's slots.
    void add_buffers(ggml_backend_dev_t dev, char * base, uint64_t buffer_bytes, int32_t n);

    // These experts will get slots. start_now: reads into staging memory start, so that choosing the slots costs no time.
    std::vector<load> announce(int32_t layer, ggml_backend_dev_t dev, const std::vector<int32_t> & experts, bool start_now);
    // They have slots: what has not started yet starts.
    void assign_slots(const std::vector<load> & loads, const std::vector<int32_t> & slots);
    // They get none. Returns when no read of them is under way.
    void cancel(const std::vector<load> & loads);

    expert_trust trust;

private:
    bool start_read(const load & load);
    void copy_arrived(expert_load & load, int32_t slot, std::unique_lock<std::mutex> & lock);
    bool pass_on(const load & load, const char * bytes, uint64_t n_bytes);
    bool is_right(const expert_load & load, const uint8_t * digest);
    void read_ended(const load & load, int64_t n_read, bool right);
    void finish_or_park(const load & load);
    void finish(expert_load & load);
    void release(expert_load & load);

    const std::vector<expert_layer> & layers;
    const expert_tables &             tables;
    expert_slots &                    slots;

    std::mutex                                        mutex; // guards what follows, and the loads
    std::condition_variable                           released;
    std::map<ggml_backend_dev_t, std::vector<char *>> buffers;       // free ones
    std::deque<load>                                  waiting;       // have slots, but too many are being read
    std::vector<load>                                 parked;        // read, but their copies may be under way
    int32_t                                           n_reading = 0; // started, their buffers not yet free
    int32_t                                           n_unread  = 0; // of these, neither parked nor finished
    expert_read_pool                                  readers;       // the last member: its threads use the others
};
