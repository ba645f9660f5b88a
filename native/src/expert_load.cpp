// Bringing fetched experts into their slots without the provider.
//
//   announce --> read into staging memory    \  place: the slot is known --> parts are copied on --> digest --> commit
//   place    --> read into the slot itself   /                                                  \--> wrong: the provider
//
// No interpreter lock in between: on a fast drive a block takes as long as a few of its switches. What goes wrong here
// is counted and left to the provider, which reads again, with its retries and its messages.
#include "expert_load.h"

#include "expert_store.h"

#include <algorithm>
#include <cstring>

static const int32_t UNKNOWN   = -1;
static const int32_t CANCELLED = -2;

void expert_loader::add_buffers(ggml_backend_dev_t dev, char * base, uint64_t buffer_bytes, int32_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int32_t i = 0; i < n; i++) {
        buffers[dev].push_back(base + i * buffer_bytes);
    }
}

static int32_t key_of(const expert_store * store, const expert_load & load) {
    return store->layers[load.layer].first_key + load.expert;
}

std::vector<expert_loader::load> expert_loader::announce(int32_t layer, const std::vector<int32_t> & experts) {
    std::vector<load>           loads;
    std::lock_guard<std::mutex> lock(mutex);
    const bool                  staged = buffers.count(store->layer_dev[layer]) != 0;
    for (int32_t expert : experts) {
        loads.push_back(std::make_shared<expert_load>(expert_load{layer, expert, UNKNOWN, false, nullptr}));
        if (staged && n_reading < store->tables.n_reads) {
            start(loads.back());
        }
    }
    return loads;
}

void expert_loader::place(const std::vector<load> & loads, const std::vector<int32_t> & slots) {
    std::vector<load> to_ask;
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (size_t i = 0; i < loads.size(); i++) {
            loads[i]->slot = slots[i];
            if (loads[i]->started) {
                continue;
            }
            if (store->tables.blocks[key_of(store, *loads[i])].fd >= 0 && n_reading >= store->tables.n_reads) {
                waiting.push_back(loads[i]);
            } else if (!start(loads[i])) {
                to_ask.push_back(loads[i]);
            }
        }
    }
    changed.notify_all();
    for (const load & load : to_ask) {
        ask_provider(load);
    }
}

void expert_loader::cancel(const std::vector<load> & loads) {
    std::unique_lock<std::mutex> lock(mutex);
    for (const load & load : loads) {
        load->slot = CANCELLED;
    }
    changed.notify_all();
    changed.wait(lock, [&] { return std::none_of(loads.begin(), loads.end(), [](const load & l) { return l->started; }); });
}

// Under the lock. False if only the provider can read it.
bool expert_loader::start(const load & load) {
    const expert_block & block = store->tables.blocks[key_of(store, *load)];
    expert_read          read;
    read.fd         = block.fd;
    read.n_bytes    = store->layers[load->layer].block_bytes;
    read.offset     = block.offset;
    read.n_parts    = store->tables.n_parts;
    read.hashed     = block.check != 0;
    const auto free = buffers.find(store->layer_dev[load->layer]);
    if (free == buffers.end()) {
        read.dest = expert_store_host_slot(store, load->slot);
    } else {
        read.dest = load->buffer = free->second.back();
        read.arrived             = [this, load](const char * bytes, uint64_t n) {
            const int32_t slot = wait_for_slot(load);
            return slot >= 0 && expert_store_write(store, slot, bytes - load->buffer, bytes, n);
        };
    }
    read.ended = [this, load, hashed = read.hashed](
                     int64_t result, const uint8_t * digest) { end(load, result, digest, hashed); };
    if (read.fd < 0 || !read.dest || !store->readers.start(read)) {
        load->buffer = nullptr;
        return false;
    }
    if (load->buffer) {
        free->second.pop_back();
    }
    load->started = true;
    n_reading++;
    return true;
}

int32_t expert_loader::wait_for_slot(const load & load) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return load->slot != UNKNOWN; });
    return load->slot;
}

void expert_loader::end(const load & load, int64_t result, const uint8_t * digest, bool hashed) {
    const int32_t        slot     = wait_for_slot(load);
    const expert_block & block    = store->tables.blocks[key_of(store, *load)];
    int64_t * const      counters = store->tables.counters;
    bool                 ok       = result == (int64_t) store->layers[load->layer].block_bytes;
    if (ok && hashed) {
        ok = memcmp(digest, block.digest, sizeof(block.digest)) == 0;
    }
    if (load->buffer && slot != CANCELLED) {
        ok = expert_store_written(store, slot) && ok; // in any case: the buffer is used again
    }
    if (result > 0) {
        expert_count(&counters[EXPERT_READ_BYTES], result);
    }
    release(load, ok);
    if (slot == CANCELLED) {
        return;
    }
    if (!ok) {
        expert_count(&counters[EXPERT_IO_ERRORS], 1);
        expert_count(&counters[EXPERT_IO_RETRIES], 1);
        ask_provider(load);
        return;
    }
    if (!store->tables.is_direct) {
        expert_count(&counters[EXPERT_FALLBACKS], 1);
    }
    expert_store_commit(store, load->layer, load->expert, slot);
}

// Its buffer is free: what waits for one may start.
void expert_loader::release(const load & load, bool was_right) {
    std::unique_lock<std::mutex> lock(mutex);
    expert_block &               block = store->tables.blocks[key_of(store, *load)];
    if (was_right && block.check == 1) {
        block.check = 0;
    }
    load->started = false;
    changed.notify_all();
    n_reading--;
    if (load->buffer) {
        buffers[store->layer_dev[load->layer]].push_back(load->buffer);
    }
    while (!waiting.empty() && n_reading < store->tables.n_reads) {
        const expert_loader::load next = waiting.front();
        waiting.pop_front();
        if (!start(next)) {
            lock.unlock();
            ask_provider(next);
            lock.lock();
        }
    }
}

void expert_loader::ask_provider(const load & load) {
    expert_count(&store->tables.counters[EXPERT_PROVIDER_CALLS], 1);
    store->provider.read(store->provider.user, load->layer, load->expert, load->slot);
}
