//   announce      --> read into staging memory    \  the slot is known --> parts are copied on --> digest --> publish
//   assign_slots  --> read into the slot itself   /                                           \--> wrong: the provider
//
// No interpreter lock in between: on a fast drive a block takes as long as a few of its switches. What goes wrong here
// is counted and left to the provider, which reads again, with its retries and its messages.
#include "expert_loader.h"

#include <algorithm>
#include <cstring>

expert_loader::expert_loader(const std::vector<expert_layer> & layers, const expert_tables & tables, expert_slots & slots) :
    trust(tables.blocks, (size_t) layers.back().first_key + layers.back().n_expert, tables.recheck != 0), layers(layers),
    tables(tables), slots(slots) {}

void expert_loader::add_buffers(ggml_backend_dev_t dev, char * base, uint64_t buffer_bytes, int32_t n) {
    readers.poll_between_reads();
    std::lock_guard<std::mutex> lock(mutex);
    for (int32_t i = 0; i < n; i++) {
        buffers[dev].push_back(base + i * buffer_bytes);
    }
}

std::vector<expert_loader::load> expert_loader::announce(
    int32_t index, ggml_backend_dev_t dev, const std::vector<int32_t> & experts, bool start_now) {
    const expert_layer &        layer = layers[index];
    std::vector<load>           loads;
    std::lock_guard<std::mutex> lock(mutex);
    const bool                  staged = start_now && buffers.count(dev) != 0;
    for (int32_t expert : experts) {
        expert_block & block = tables.blocks[layer.first_key + expert];
        loads.push_back(std::make_shared<expert_load>(expert_load{index, expert, block, layer.block_bytes, dev}));
        if (staged && n_reading < tables.n_reads) {
            start_read(loads.back());
        }
    }
    return loads;
}

// The slot is made known when nothing is left behind.
void expert_loader::copy_arrived(expert_load & load, int32_t slot, std::unique_lock<std::mutex> & lock) {
    while (!load.arrived.empty()) {
        const auto parts = std::move(load.arrived);
        load.arrived.clear();
        lock.unlock();
        for (const auto & [bytes, n_bytes] : parts) {
            const bool ok = slots.copy(slot, bytes - load.dest, bytes, n_bytes);
            load.copied   = load.copied && ok;
        }
        lock.lock();
    }
    load.slot = slot;
}

void expert_loader::assign_slots(const std::vector<load> & loads, const std::vector<int32_t> & chosen) {
    std::vector<load> to_finish;
    std::vector<load> to_ask;
    {
        std::unique_lock<std::mutex> lock(mutex);
        for (size_t i = 0; i < loads.size(); i++) {
            const load & load = loads[i];
            copy_arrived(*load, chosen[i], lock);
            if (load->ended) {
                to_finish.push_back(load);
            } else if (!load->started && load->block.fd >= 0 && n_reading >= tables.n_reads) {
                waiting.push_back(load);
            } else if (!load->started && !start_read(load)) {
                to_ask.push_back(load);
            }
        }
    }
    for (const load & load : to_ask) {
        slots.ask_provider(load->layer, load->expert, load->slot);
    }
    for (const load & load : to_finish) {
        finish_or_park(load);
    }
}

void expert_loader::cancel(const std::vector<load> & loads) {
    std::vector<load>            to_finish;
    std::unique_lock<std::mutex> lock(mutex);
    for (const load & load : loads) {
        load->slot = expert_load::CANCELLED;
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
bool expert_loader::is_right(const expert_load & load, const uint8_t * digest) {
    if (!load.hashed) {
        return !trust.has_changed(load.block.fd); // changed meanwhile: the provider reads and checks it
    }
    const bool right = memcmp(digest, load.block.digest, sizeof(load.block.digest)) == 0;
    if (!right && load.block.check == 0) {
        trust.lied(load.block.fd);
    }
    return right;
}

// Under the lock. False if only the provider can read it.
bool expert_loader::start_read(const load & load) {
    if (load->block.fd < 0) {
        return false; // it needs no buffer, of which there may be none
    }
    load->hashed = trust.must_hash(load->block, readers.is_fast());
    expert_read read;
    read.fd         = load->block.fd;
    read.n_bytes    = load->n_bytes;
    read.offset     = load->block.offset;
    read.n_parts    = tables.n_parts;
    read.hashed     = load->hashed;
    const auto free = buffers.find(load->dev);
    load->dest      = load->slot >= 0 ? slots.host_slot(load->slot) : nullptr;
    if (!load->dest && free != buffers.end()) {
        load->dest = load->buffer = free->second.back();
    } else if (load->dest) {
        load->transit = slots.transit(load->layer, load->slot);
    }
    if (load->buffer || load->transit) {
        read.arrived = [this, load](const char * bytes, uint64_t n) { return pass_on(load, bytes, n); };
    }
    read.dest  = load->dest;
    read.ended = [this, load](int64_t result, const uint8_t * digest) {
        read_ended(load, result, result == (int64_t) load->n_bytes && is_right(*load, digest));
    };
    if (!read.dest || !readers.submit(read)) {
        load->buffer = load->transit = nullptr;
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
        if (load->slot == expert_load::UNKNOWN) {
            load->arrived.emplace_back(bytes, n_bytes);
            return true;
        }
    }
    const uint64_t offset = bytes - load->dest;
    return load->slot >= 0 && (load->transit ? slots.copy_to(load->slot, load->transit + offset, bytes, n_bytes)
                                             : slots.copy(load->slot, offset, bytes, n_bytes));
}

void expert_loader::read_ended(const load & load, int64_t n_read, bool right) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        load->n_read = n_read;
        load->right  = right;
        load->ended  = true;
        if (load->slot == expert_load::UNKNOWN) {
            return; // assign_slots() or cancel() will finish it
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
        if ((load->buffer || load->transit) && waiting.empty() && n_unread > 0) {
            return;
        }
        to_finish.swap(parked);
    }
    for (const auto & one : to_finish) {
        finish(*one);
    }
}

void expert_loader::finish(expert_load & load) {
    int64_t * const counters = tables.counters;
    if (load.transit) {
        load.right = slots.copy_to(load.slot, load.transit, nullptr, 0) && load.right;
    } else if (load.buffer && load.slot != expert_load::CANCELLED) { // in any case: the buffer is used again
        load.right = slots.copy(load.slot, 0, nullptr, 0) && load.copied && load.right;
    }
    if (load.n_read > 0) {
        expert_count(&counters[EXPERT_READ_BYTES], load.n_read);
    }
    release(load);
    if (load.slot == expert_load::CANCELLED) {
        return;
    }
    if (!load.right) {
        expert_count(&counters[EXPERT_IO_ERRORS], 1);
        expert_count(&counters[EXPERT_IO_RETRIES], 1);
        slots.ask_provider(load.layer, load.expert, load.slot);
        return;
    }
    if (!tables.is_direct) {
        expert_count(&counters[EXPERT_FALLBACKS], 1);
    }
    slots.publish(load.layer, load.expert, load.slot, load.transit, load.hashed);
}

// Its buffer is free: what waits for one may start.
void expert_loader::release(expert_load & load) {
    std::unique_lock<std::mutex> lock(mutex);
    if (load.right && load.block.check == 1) {
        load.block.check = 0;
    }
    load.started = false;
    released.notify_all();
    n_reading--;
    if (load.buffer) {
        buffers[load.dev].push_back(load.buffer);
    }
    while (!waiting.empty() && n_reading < tables.n_reads) {
        const expert_loader::load next = waiting.front();
        waiting.pop_front();
        if (!start_read(next)) {
            lock.unlock();
            slots.ask_provider(next->layer, next->expert, next->slot);
            lock.lock();
        }
    }
}
