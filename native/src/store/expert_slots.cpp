// Slots: what is copied to them, what is in them, and the ends of the provider's reads.
#include "expert_books.h"

#include "ggml-backend-impl.h"

#include <cstring>

void expert_count(int64_t * counter, int64_t n) { __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }

char * expert_books::host_slot(int32_t slot) {
    std::lock_guard<std::mutex> lock(mutex);
    const bool                  there = slot >= 0 && slot < n_keys() && slot_arena[slot];
    return there && (tables.in_place[slot] || !slot_arena[slot]->buffer) ? slot_data[slot] : nullptr;
}

bool expert_books::copy(int32_t slot, uint64_t offset, const void * bytes, uint64_t n_bytes) {
    if (char * here = host_slot(slot)) { // what was read before its slot was known
        if (bytes) {
            memcpy(here + offset, bytes, n_bytes);
        }
        return true;
    }
    std::unique_lock<std::mutex> lock(mutex);
    if (slot < 0 || slot >= n_keys() || !slot_arena[slot]) {
        return false;
    }
    char * const dest = slot_data[slot] + offset;
    lock.unlock();
    return copy_to(slot, dest, bytes, n_bytes);
}

bool expert_books::copy_to(int32_t slot, char * dest, const void * bytes, uint64_t n_bytes) {
    expert_count(&tables.counters[EXPERT_H2D_BYTES], (int64_t) n_bytes);
    std::unique_lock<std::mutex> lock(mutex);
    ggml_backend_reg_t           reg = ggml_backend_dev_backend_reg(slot_arena[slot]->dev);
    lock.unlock();
    const auto copy = (expert_copy_t) ggml_backend_reg_get_proc_address(reg, EXPERT_COPY_PROC);
    return copy && copy(dest, bytes, n_bytes);
}

char * expert_books::transit(int32_t layer, int32_t slot) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  found  = slot_arena[slot]->transits.find(tables.layer_pool[layer]);
    const int64_t               expert = tables.owner[slot] - layers[layer].first_key;
    const bool                  waits = !op.as_they_come && layer == op.layer && op.in_flight[expert]; // the device, in this pass
    return waits && found != slot_arena[slot]->transits.end() ? found->second.take(slot, slot_copy) : nullptr;
}

int expert_store_fill(expert_store * store, int32_t slot, const void * bytes, uint64_t n_bytes) {
    expert_books * books = expert_books_of(store);
    return books->copy(slot, 0, bytes, n_bytes) && books->copy(slot, 0, nullptr, 0);
}

void expert_books::ask_provider(int32_t layer, int32_t expert, int32_t slot) {
    expert_count(&tables.counters[EXPERT_PROVIDER_CALLS], 1);
    provider.read(provider.user, layer, expert, slot);
}

// ---- ends of reads

// Under the lock. False if no op waits for it: its fetch was given up, or it was read ahead.
bool expert_books::read_ended(int32_t layer, int32_t expert) {
    if (ahead.layer == layer && ahead.in_flight[expert]) {
        ahead.in_flight[expert] = 0;
        ahead.n_in_flight--;
        n_reads_ended++;
        changed.notify_all();
        return false;
    }
    if (op.layer != layer || (size_t) expert >= op.in_flight.size() || !op.in_flight[expert]) {
        return false;
    }
    op.in_flight[expert] = 0;
    op.n_in_flight--;
    n_reads_ended++;
    changed.notify_all();
    return true;
}

void expert_books::publish(int32_t layer, int32_t expert, int32_t slot, char * copy, bool checked) {
    std::lock_guard<std::mutex> lock(mutex);
    slot_loads[slot]++;
    slot_copy[slot]                                  = copy;
    slot_checked[slot]                               = checked;
    tables.slot_of[layers[layer].first_key + expert] = slot;
    tables.counters[EXPERT_LOADS]++;
    read_ended(layer, expert);
}

void expert_store_commit(expert_store * store, int32_t layer, int32_t expert, int32_t slot) {
    expert_books_of(store)->publish(layer, expert, slot, nullptr, true);
}

void expert_store_fail(expert_store * store, int32_t layer, int32_t expert, const char * why) {
    expert_books *              books = expert_books_of(store);
    std::lock_guard<std::mutex> lock(books->mutex);
    expert_trace_read_failed(*books->trace, layer, expert);
    if (books->read_ended(layer, expert)) {
        books->fail(why);
    }
}

void expert_drop_unchecked(expert_books * books) {
    const expert_tables & tables = books->tables;
    for (size_t slot = 0; slot < books->slot_checked.size(); slot++) {
        const int64_t key = tables.owner[slot];
        if (key < 0 || tables.slot_of[key] != (int32_t) slot || books->slot_checked[slot]) {
            continue;
        }
        tables.slot_of[key] = tables.reserved_slot[key] = -1;
        tables.owner[slot]                              = -1;
        expert_count(&tables.counters[EXPERT_EVICTIONS], 1);
        books->slot_arena[slot]->touched = true; // the device's table must not name it
    }
}
