// One MUL_MAT_ID of a store in host memory: look up, fetch what is missing, hand out what is there.
//
//   begin:  wait for the store; count the acquire if this is the layer's first role of the batch; next()
//   next:   ask the provider for as many missing experts as fit beside those that are still needed,
//           then hand out the resident ones; if there are none, wait until a read ends
//   end:    the last thread gives the store back
//
// Reads go on while the threads compute what is already there. For a device a pass is as many experts as fit at once.
#include "expert_store.h"

#include <algorithm>
#include <chrono>
#include <thread>

static std::atomic<bool> interrupted{false};

void expert_interrupt(void) { interrupted = true; }
bool expert_interrupted(void) { return interrupted; }

static void count_acquire(expert_store * store, int32_t index, const std::vector<int32_t> & active, int64_t n_rows) {
    const expert_layer &  layer  = store->layers[index];
    const expert_tables & tables = store->tables;
    if (store->trace) {
        expert_trace_acquire(*store->trace, index, active, n_rows, tables.layer_slots[index]);
    }
    const int64_t now    = ++store->now;
    int64_t       n_hits = 0;
    for (int32_t expert : active) {
        const int32_t key = layer.first_key + expert;
        tables.freq[key]++;
        tables.last_use[key] = now;
        n_hits += tables.slot_of[key] >= 0;
    }
    tables.counters[EXPERT_ACQUIRES]++;
    tables.counters[EXPERT_HITS] += n_hits;
    tables.counters[EXPERT_MISSES] += (int64_t) active.size() - n_hits;
}

static void count_wait(expert_store * store, std::chrono::steady_clock::time_point start) {
    store->tables.counters[EXPERT_WAIT_NS] +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

// Gives the missing experts the first of the next slots that can go: that are free, or hold an expert that is not
// active. False, and nothing is changed, if there are too few.
static bool take_next_slots(expert_store * store, int32_t layer, const std::vector<int32_t> & missing,
    const std::vector<int32_t> & active, std::vector<int32_t> & slots) {
    const expert_tables & tables    = store->tables;
    const int32_t         first_key = store->layers[layer].first_key;
    const int32_t * const next      = tables.next_slots + tables.layer_pool[layer] * EXPERT_NEXT_SLOTS;
    std::vector<int32_t>  chosen;
    for (int32_t i = 0; i < EXPERT_NEXT_SLOTS && next[i] >= 0 && chosen.size() < missing.size(); i++) {
        // a failed read's slot may become free just now: the provider sets owner last, and takes no lock of ours
        const int64_t key       = __atomic_load_n(&tables.owner[next[i]], __ATOMIC_ACQUIRE);
        const bool    is_active = std::find(active.begin(), active.end(), key - first_key) != active.end();
        if (key < 0 || (tables.slot_of[key] == next[i] && !is_active)) {
            chosen.push_back(next[i]);
        }
    }
    if (chosen.size() < missing.size()) {
        return false;
    }
    for (size_t i = 0; i < missing.size(); i++) {
        const int64_t victim = tables.owner[chosen[i]];
        if (victim >= 0) {
            tables.slot_of[victim] = tables.place[victim] = -1;
            expert_count(&tables.counters[EXPERT_EVICTIONS], 1);
        }
        tables.owner[chosen[i]]              = first_key + missing[i];
        tables.place[first_key + missing[i]] = chosen[i];
    }
    slots = chosen;
    return true;
}

// Starts reads. The provider is called without the lock: it may take long.
static bool fetch(expert_store * store, std::unique_lock<std::mutex> & lock) {
    expert_op &          op      = store->op;
    const int32_t *      slot_of = store->slot_of(op.layer);
    std::vector<int32_t> missing;
    std::vector<int32_t> active; // what must not be evicted, then what is to be read
    for (int32_t expert : op.todo) {
        (slot_of[expert] >= 0 || op.in_flight[expert] ? active : missing).push_back(expert);
    }
    const int32_t n_free = store->tables.layer_slots[op.layer] - (int32_t) active.size();
    if (missing.empty() || n_free <= 0) {
        return true;
    }
    if ((size_t) n_free < missing.size()) {
        missing.resize(n_free);
    }
    for (int32_t expert : missing) {
        op.in_flight[expert] = 1;
        active.push_back(expert);
    }
    op.n_in_flight += (int32_t) missing.size();
    std::vector<int32_t> slots(missing.size(), -1);
    expert_count(&store->tables.counters[EXPERT_PROVIDER_CALLS], 1);
    const auto start = std::chrono::steady_clock::now();
    bool       ok    = take_next_slots(store, op.layer, missing, active, slots);
    lock.unlock();
    const std::vector<expert_loader::load> loads    = store->loader.announce(op.layer, missing);
    const expert_provider &                provider = store->provider;
    if (!ok) {
        ok = provider.fetch(provider.user, op.layer, missing.data(), (int32_t) missing.size(), active.data(),
                 (int32_t) active.size(), slots.data()) != 0;
        ok = ok && *std::min_element(slots.begin(), slots.end()) >= 0;
    }
    lock.lock();
    if (ok && store->trace) {                                                     // before a read can fail
        std::rotate(active.begin(), active.end() - missing.size(), active.end()); // the missing ones first
        expert_trace_fetch(*store->trace, op.layer, active, missing.size());
    }
    lock.unlock();
    if (ok) {
        store->loader.place(loads, slots);
        provider.prepare(provider.user, op.layer, missing.data(), (int32_t) missing.size());
    } else {
        store->loader.cancel(loads);
    }
    lock.lock();
    count_wait(store, start);
    if (!ok) { // what was not started will not end
        for (int32_t expert : missing) {
            op.n_in_flight -= op.in_flight[expert];
            op.in_flight[expert] = 0;
        }
        store->error = "the expert provider failed to choose slots; its own message is in the log";
    }
    return ok;
}

// A thread that feeds a device polls anyway; being woken takes as long as a part of a fast drive's read.
static void poll_for_reads(expert_store * store, std::unique_lock<std::mutex> & lock) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
    lock.unlock();
    while (store->op.n_in_flight > 0 && std::chrono::steady_clock::now() < until) {
        std::this_thread::yield();
    }
    lock.lock();
}

static void wait_for_reads(expert_store * store, std::unique_lock<std::mutex> & lock, bool all) {
    const auto start = std::chrono::steady_clock::now();
    if (!store->op.as_they_come) {
        poll_for_reads(store, lock);
    }
    const int32_t n = store->op.n_in_flight;
    store->changed.wait(lock, [&] { return store->op.n_in_flight == 0 || (!all && store->op.n_in_flight < n); });
    count_wait(store, start);
}

// Moves the resident experts of todo into this pass.
static bool hand_out(expert_store * store) {
    expert_op &     op      = store->op;
    const int32_t * slot_of = store->slot_of(op.layer);
    size_t          n_left  = 0;
    for (int32_t expert : op.todo) {
        if (slot_of[expert] >= 0) {
            op.data[expert] = store->slot_data[slot_of[expert]] + op.role_offset;
        } else {
            op.todo[n_left++] = expert;
        }
    }
    const bool any = n_left < op.todo.size();
    op.todo.resize(n_left);
    return any;
}

static void fail_op(expert_store * store, std::unique_lock<std::mutex> & lock) {
    wait_for_reads(store, lock, true); // nobody may write into a slot once the store is given back
    if (store->trust.take_broken()) {
        expert_store_drop_unchecked(store);
    }
    store->op.failed = true;
    store->op.todo.clear();
    store->tables.counters[EXPERT_FAILURES]++;
}

// A drive that was found to lie may have lied before.
static bool distrusts(expert_store * store) {
    if (store->trust.is_broken() && !store->op.failed) {
        store->error     = store->trust.reason();
        store->op.failed = true;
    }
    return store->op.failed;
}

static void next_pass(expert_store * store, std::unique_lock<std::mutex> & lock) {
    expert_op & op = store->op;
    op.data.assign(store->layers[op.layer].n_expert, nullptr);
    while (!op.todo.empty()) {
        if (interrupted) {
            store->error = "the server is shutting down";
            op.failed    = true;
        }
        if (op.failed || !fetch(store, lock)) {
            fail_op(store, lock);
            return;
        }
        if (!op.as_they_come && op.n_in_flight > 0) {
            wait_for_reads(store, lock, true);
        }
        if (!distrusts(store) && hand_out(store)) {
            return;
        }
        wait_for_reads(store, lock, false);
    }
}

// Waits for the store, takes it and clears the last op.
static std::unique_lock<std::mutex> take_store(expert_store * store, int32_t layer, uint64_t role_offset, int n_threads) {
    std::unique_lock<std::mutex> lock(store->mutex);
    store->changed.wait(lock, [&] { return !store->busy; });
    store->busy     = true;
    expert_op & op  = store->op;
    op.layer        = layer;
    op.role_offset  = role_offset;
    op.as_they_come = true;
    op.failed       = false;
    op.n_running    = n_threads;
    op.todo.clear();
    op.in_flight.assign(store->layers[layer].n_expert, 0);
    op.data.assign(store->layers[layer].n_expert, nullptr);
    return lock;
}

// A fetch that does not follow from an acquire of this op has a record of its own.
static void forget_implied(expert_store * store) {
    if (store->trace) {
        store->trace->implied = false;
    }
}

// The tables may be no more: nothing is counted.
static bool is_gone(expert_store * store) {
    if (!store->gone) {
        return false;
    }
    store->error     = store->gone.load();
    store->op.failed = true;
    return true;
}

static bool ready_to_compute(expert_store * store, int32_t layer, std::unique_lock<std::mutex> & lock) {
    lock.unlock();
    const bool open = expert_store_open_arena(store, store->layer_dev[layer]) != nullptr;
    lock.lock();
    if (store->broken) { // with the reason that is already there
        store->broken = false;
        fail_op(store, lock);
        return false;
    }
    if (!open || store->tables.layer_slots[layer] <= 0) {
        store->error = open ? "the expert cache has no slots for this layer" : expert_last_error();
        fail_op(store, lock);
        return false;
    }
    return true;
}

void expert_op_begin(const expert_ref * ref, const int64_t * rows, int n_threads, const int32_t * bad_id) {
    expert_store *               store = ref->store;
    const expert_layer &         layer = store->layers[ref->layer];
    const expert_role &          role  = layer.roles[ref->role];
    std::unique_lock<std::mutex> lock  = take_store(store, ref->layer, role.offset, n_threads);
    expert_op &                  op    = store->op;
    if (is_gone(store)) {
        return;
    }
    forget_implied(store);
    if (bad_id) {
        store->error = "the router of " + std::string(role.tensor) + " chose expert " + std::to_string(*bad_id) + " of " +
                       std::to_string(layer.n_expert);
        fail_op(store, lock);
        return;
    }
    if (!ready_to_compute(store, ref->layer, lock)) {
        return;
    }
    int64_t n_rows = 0;
    for (int32_t expert = 0; expert < layer.n_expert; expert++) {
        n_rows += rows[expert];
        if (rows[expert] > 0) {
            op.todo.push_back(expert);
        }
    }
    // the layer's weights are computed one after another with the same experts: one acquire, counted at the first
    uint32_t &     seen = store->roles_seen[ref->layer];
    const uint32_t bit  = 1u << ref->role;
    if (seen & bit) {
        seen = 0;
    }
    if (seen == 0) {
        count_acquire(store, ref->layer, op.todo, n_rows);
    }
    seen |= bit;
    next_pass(store, lock);
}

void expert_layer_begin(expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows) {
    std::unique_lock<std::mutex> lock = take_store(store, layer, 0, 1);
    if (is_gone(store) || !ready_to_compute(store, layer, lock)) {
        return;
    }
    store->op.as_they_come = false;
    store->op.todo         = experts;
    if (n_rows > 0) {
        forget_implied(store);
        count_acquire(store, layer, experts, n_rows);
    }
    next_pass(store, lock);
}

void expert_layer_count(expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows) {
    std::lock_guard<std::mutex> lock(store->mutex);
    count_acquire(store, layer, experts, n_rows);
}

void expert_store_set_error(expert_store * store, const std::string & why) {
    std::lock_guard<std::mutex> lock(store->mutex);
    store->error = why;
    if (!store->gone) {
        store->tables.counters[EXPERT_FAILURES]++;
    }
}

const char * const * expert_op_data(const expert_ref * ref) { return ref->store->op.data.data(); }
bool                 expert_op_more(const expert_ref * ref) { return !ref->store->op.todo.empty(); }

void expert_op_next(const expert_ref * ref) { expert_store_next_pass(ref->store); }

void expert_store_next_pass(expert_store * store) {
    std::unique_lock<std::mutex> lock(store->mutex);
    next_pass(store, lock);
}

bool expert_op_end(const expert_ref * ref) { return expert_store_give_back(ref->store); }

bool expert_store_give_back(expert_store * store) {
    const bool ok = !store->op.failed;
    if (--store->op.n_running == 0) {
        std::lock_guard<std::mutex> lock(store->mutex);
        store->busy = false;
        store->changed.notify_all();
    }
    return ok;
}
