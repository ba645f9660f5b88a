// What the missing experts of a layer take: slots, then reads. The provider is asked only for what native can't choose.
#include "expert_books.h"

#include <algorithm>

// Gives the missing experts the first of the next slots that can go: that are free, or hold an expert that is not
// active. None, and nothing is changed, if there are too few.
static std::vector<int32_t> take_next_slots(
    expert_books * books, int32_t layer, const std::vector<int32_t> & missing, const std::vector<int32_t> & active) {
    const expert_tables & tables    = books->tables;
    const int32_t         first_key = books->layers[layer].first_key;
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
        return {};
    }
    for (size_t i = 0; i < missing.size(); i++) {
        const int64_t victim = tables.owner[chosen[i]];
        if (victim >= 0) {
            tables.slot_of[victim] = tables.reserved_slot[victim] = -1;
            expert_count(&tables.counters[EXPERT_EVICTIONS], 1);
        }
        tables.owner[chosen[i]]                      = first_key + missing[i];
        tables.reserved_slot[first_key + missing[i]] = chosen[i];
    }
    return chosen;
}

// None if the provider failed.
static std::vector<int32_t> ask_for_slots(
    const expert_books * books, int32_t layer, const std::vector<int32_t> & missing, const std::vector<int32_t> & active) {
    const expert_provider & provider = books->provider;
    std::vector<int32_t>    slots(missing.size(), -1);
    const bool ok = provider.choose_slots(provider.user, layer, missing.data(), (int32_t) missing.size(), active.data(),
                        (int32_t) active.size(), slots.data()) != 0 &&
                    *std::min_element(slots.begin(), slots.end()) >= 0;
    return ok ? slots : std::vector<int32_t>();
}

// The missing experts that fit. active: what must not be evicted, then these.
static std::vector<int32_t> missing_experts(const expert_books * books, std::vector<int32_t> & active) {
    const expert_op &    op      = books->op;
    const int32_t *      slot_of = books->slot_of(op.layer);
    std::vector<int32_t> missing;
    for (int32_t expert : op.todo) {
        (slot_of[expert] >= 0 || op.in_flight[expert] ? active : missing).push_back(expert);
    }
    const int32_t n_free = books->tables.layer_slots[op.layer] - (int32_t) active.size();
    missing.resize(std::min<size_t>(missing.size(), std::max(n_free, 0)));
    active.insert(active.end(), missing.begin(), missing.end());
    return missing;
}

// What was not started will not end.
static void forget_reads(expert_op & op, const std::vector<int32_t> & experts) {
    for (int32_t expert : experts) {
        op.n_in_flight -= op.in_flight[expert];
        op.in_flight[expert] = 0;
    }
}

// These experts have got slots of which some can't be had. All of these are free again; the provider hears of those that
// will never be. False if it can't do without them.
static bool give_back(expert_books * books, int32_t layer, const std::vector<int32_t> & experts,
    const std::vector<int32_t> & slots, expert_host_slots & refused, std::unique_lock<std::mutex> & lock) {
    lock.lock();
    for (size_t i = 0; i < slots.size(); i++) {
        books->tables.reserved_slot[books->layers[layer].first_key + experts[i]] = -1;
        books->tables.owner[slots[i]]                                            = -1;
    }
    lock.unlock();
    const std::vector<int32_t> gone = refused.missing();
    const bool                 ok   = books->provider.withdraw(books->provider.user, gone.data(), (int32_t) gone.size()) != 0;
    lock.lock();
    forget_reads(books->op, experts);
    expert_trace_cut(*books->trace, "the cache has become smaller");
    if (!ok) {
        books->fail("slots in host memory that can't be had could not be withdrawn; the provider's own message is in the log");
    }
    return ok;
}

bool expert_fetch_missing(expert_books * books, std::unique_lock<std::mutex> & lock) {
    expert_op &                op    = books->op;
    const int32_t              layer = op.layer;
    std::vector<int32_t>       active;
    const std::vector<int32_t> missing = missing_experts(books, active);
    if (missing.empty()) {
        return true;
    }
    for (int32_t expert : missing) {
        op.in_flight[expert] = 1;
    }
    op.n_in_flight += (int32_t) missing.size();
    expert_count(&books->tables.counters[EXPERT_PROVIDER_CALLS], 1);
    const auto           start = std::chrono::steady_clock::now();
    std::vector<int32_t> slots = take_next_slots(books, layer, missing, active);
    lock.unlock();
    const auto loads = books->loader.announce(layer, books->layer_dev[layer], missing, slots.empty());
    if (slots.empty()) {
        slots = ask_for_slots(books, layer, missing, active);
    }
    if (expert_host_slots * refused = expert_refused(books, slots)) {
        books->loader.cancel(loads);
        return give_back(books, layer, missing, slots, *refused, lock) &&
               expert_fetch_missing(books, lock); // there are fewer now
    }
    const bool ok = !slots.empty();
    lock.lock();
    if (ok) {                                                                     // before a read can fail
        std::rotate(active.begin(), active.end() - missing.size(), active.end()); // the missing ones first
        expert_trace_fetch(*books->trace, layer, active, missing.size());
    }
    lock.unlock();
    if (ok) {
        books->loader.assign_slots(loads, slots);
        books->provider.prepare(books->provider.user, layer, missing.data(), (int32_t) missing.size());
    } else {
        books->loader.cancel(loads);
    }
    lock.lock();
    books->count_wait(start);
    if (!ok) {
        forget_reads(op, missing);
        books->fail("the expert provider failed to choose slots; its own message is in the log");
    }
    return ok;
}
