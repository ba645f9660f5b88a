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

static const int32_t UNKNOWN   = expert_load::UNKNOWN;
static const int32_t CANCELLED = expert_load::CANCELLED;

void expert_loader::add_buffers(ggml_backend_dev_t dev, char * base, uint64_t buffer_bytes, int32_t n) {
    store->readers.poll_between_reads();
    std::lock_guard<std::mutex> lock(mutex);
    for (int32_t i = 0; i < n; i++) {
        buffers[dev].push_back(base + i * buffer_bytes);
    }
}

static expert_block & block_of(const expert_store * store, const expert_load & load) {
    return store->tables.blocks[store->layers[load.layer].first_key + load.expert];
}

static bool is_readable(const expert_store * store, const expert_load & load) { return block_of(store, load).fd >= 0; }

std::vector<expert_loader::load> expert_loader::announce(int32_t layer, const std::vector<int32_t> & experts) {
    std::vector<load>           loads;
    std::lock_guard<std::mutex> lock(mutex);
    const bool                  staged = buffers.count(store->layer_dev[layer]) != 0;
    for (int32_t expert : experts) {
        loads.push_back(std::make_shared<expert_load>(layer, expert));
        if (staged && n_reading < store->tables.n_reads) {
            start(loads.back());
        }
    }
    return loads;
}

void expert_loader::place(const std::vector<load> & loads, const std::vector<int32_t> & slots) {
    std::vector<load> to_finish;
    std::vector<load> to_ask;
    {
        std::unique_lock<std::mutex> lock(mutex);
        for (size_t i = 0; i < loads.size(); i++) {
            const load & load = loads[i];
            while (!load->arrived.empty()) { // the slot is made known when nothing is left behind
                const auto parts = std::move(load->arrived);
                load->arrived.clear();
                lock.unlock();
                for (const auto & part : parts) {
                    const bool ok = expert_store_write(store, slots[i], part.first - load->buffer, part.first, part.second);
                    load->copied  = load->copied && ok;
                }
                lock.lock();
            }
            load->slot = slots[i];
            if (load->ended) {
                to_finish.push_back(load);
            } else if (!load->started && is_readable(store, *load) && n_reading >= store->tables.n_reads) {
                waiting.push_back(load);
            } else if (!load->started && !start(load)) {
                to_ask.push_back(load);
            }
        }
    }
    for (const load & load : to_ask) {
        ask_provider(load);
    }
    for (const load & load : to_finish) {
        finish_or_park(load);
    }
}

void expert_loader::cancel(const std::vector<load> & loads) {
    std::vector<load>            to_finish;
    std::unique_lock<std::mutex> lock(mutex);
    for (const load & load : loads) {
        load->slot = CANCELLED;
        if (load->ended) {
            to_finish.push_back(load);
        }
    }
    lock.unlock();
    for (const load & load : to_finish) {
        finish_or_park(load);
    }
    lock.lock();
    released.wait(lock, [&] { return std::none_of(loads.begin(), loads.end(), [](const load & l) { return l->started; }); });
}

// What was read whole.
static bool is_right(expert_store * store, const expert_load & load, const expert_block & block, const uint8_t * digest) {
    if (!load.hashed) {
        return !store->trust.has_changed(block.fd); // changed meanwhile: the provider reads and checks it
    }
    const bool right = memcmp(digest, block.digest, sizeof(block.digest)) == 0;
    if (!right && block.check == 0) {
        store->trust.lied(block.fd);
    }
    return right;
}

// Under the lock. False if only the provider can read it.
bool expert_loader::start(const load & load) {
    if (!is_readable(store, *load)) {
        return false; // it needs no buffer, of which there may be none
    }
    const expert_block & block   = block_of(store, *load);
    const uint64_t       n_bytes = store->layers[load->layer].block_bytes;
    load->hashed                 = store->trust.must_hash(block, store->readers.is_fast());
    expert_read read;
    read.fd         = block.fd;
    read.n_bytes    = n_bytes;
    read.offset     = block.offset;
    read.n_parts    = store->tables.n_parts;
    read.hashed     = load->hashed;
    const auto free = buffers.find(store->layer_dev[load->layer]);
    if (free == buffers.end()) {
        read.dest = expert_store_host_slot(store, load->slot);
    } else {
        read.dest = load->buffer = free->second.back();
        read.arrived             = [this, load](const char * bytes, uint64_t n) { return pass_on(load, bytes, n); };
    }
    read.ended = [this, load, &block, n_bytes](int64_t result, const uint8_t * digest) {
        end(load, result, result == (int64_t) n_bytes && is_right(store, *load, block, digest));
    };
    if (!read.dest || !store->readers.start(read)) {
        load->buffer = nullptr;
        return false;
    }
    if (load->buffer) {
        free->second.pop_back();
    }
    load->started = true;
    n_reading++;
    n_unread++;
    return true;
}

// No reading thread waits for the slot: others' parts are to be read meanwhile.
bool expert_loader::pass_on(const load & load, const char * bytes, uint64_t n_bytes) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (load->slot == UNKNOWN) {
            load->arrived.emplace_back(bytes, n_bytes);
            return true;
        }
    }
    return load->slot >= 0 && expert_store_write(store, load->slot, bytes - load->buffer, bytes, n_bytes);
}

void expert_loader::end(const load & load, int64_t n_read, bool right) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        load->n_read = n_read;
        load->right  = right;
        load->ended  = true;
        if (load->slot == UNKNOWN) {
            return; // place() or cancel() will finish it
        }
    }
    finish_or_park(load);
}

// To wait for its copy would keep this thread from reading, while the device wants all of the layer's experts anyway:
// the last read waits for all, unless somebody needs the buffer.
void expert_loader::finish_or_park(const load & load) {
    std::vector<expert_loader::load> to_finish;
    {
        std::lock_guard<std::mutex> lock(mutex);
        n_unread--;
        parked.push_back(load);
        if (load->buffer && waiting.empty() && n_unread > 0) {
            return;
        }
        to_finish.swap(parked);
    }
    for (const auto & one : to_finish) {
        finish(one);
    }
}

void expert_loader::finish(const load & load) {
    int64_t * const counters = store->tables.counters;
    if (load->buffer && load->slot != CANCELLED) { // in any case: the buffer is used again
        load->right = expert_store_written(store, load->slot) && load->copied && load->right;
    }
    if (load->n_read > 0) {
        expert_count(&counters[EXPERT_READ_BYTES], load->n_read);
    }
    release(load);
    if (load->slot == CANCELLED) {
        return;
    }
    if (!load->right) {
        expert_count(&counters[EXPERT_IO_ERRORS], 1);
        expert_count(&counters[EXPERT_IO_RETRIES], 1);
        ask_provider(load);
        return;
    }
    if (!store->tables.is_direct) {
        expert_count(&counters[EXPERT_FALLBACKS], 1);
    }
    expert_store_publish(store, load->layer, load->expert, load->slot, load->hashed);
}

// Its buffer is free: what waits for one may start.
void expert_loader::release(const load & load) {
    std::unique_lock<std::mutex> lock(mutex);
    expert_block &               block = block_of(store, *load);
    if (load->right && block.check == 1) {
        block.check = 0;
    }
    load->started = false;
    released.notify_all();
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
