// What the missing experts of a layer take: slots, then reads. The provider is asked only for what native can't choose.
#include "expert_fetch.h"

#include <algorithm>

static bool stays(const expert_books * books, const expert_fetch & wanted, int64_t key) {
    const int64_t expert = key - books->layers[wanted.layer].first_key;
    if (std::find(wanted.active.begin(), wanted.active.end(), expert) != wanted.active.end()) {
        return true;
    }
    const expert_layer * kept = wanted.kept_layer < 0 ? nullptr : &books->layers[wanted.kept_layer];
    return kept && key >= kept->first_key && key < kept->first_key + kept->n_expert;
}

std::vector<int32_t> expert_take_next_slots(expert_books * books, const expert_fetch & wanted) {
    const expert_tables &        tables    = books->tables;
    const std::vector<int32_t> & missing   = wanted.missing;
    const int32_t                first_key = books->layers[wanted.layer].first_key;
    const int32_t * const        next      = tables.next_slots + tables.layer_pool[wanted.layer] * EXPERT_NEXT_SLOTS;
    std::vector<int32_t>         chosen;
    for (int32_t i = 0; i < EXPERT_NEXT_SLOTS && next[i] >= 0 && chosen.size() < missing.size(); i++) {
        // a failed read's slot may become free just now: the provider sets owner last, and takes no lock of ours
        const int64_t key = __atomic_load_n(&tables.owner[next[i]], __ATOMIC_ACQUIRE);
        if (key < 0 || (tables.slot_of[key] == next[i] && !stays(books, wanted, key))) {
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

std::vector<int32_t> expert_ask_for_slots(const expert_books * books, const expert_fetch & wanted) {
    const expert_provider & provider = books->provider;
    std::vector<int32_t>    slots(wanted.missing.size(), -1);
    const bool ok = provider.choose_slots(provider.user, wanted.layer, wanted.missing.data(), (int32_t) wanted.missing.size(),
                        wanted.active.data(), (int32_t) wanted.active.size(), wanted.kept_layer, slots.data()) != 0 &&
                    *std::min_element(slots.begin(), slots.end()) >= 0;
    return ok ? slots : std::vector<int32_t>();
}

// The op's missing experts that fit.
static expert_fetch missing_experts(const expert_books * books) {
    const expert_op & op      = books->op;
    const int32_t *   slot_of = books->slot_of(op.layer);
    expert_fetch      wanted  = {op.layer, {}, {}};
    for (int32_t expert : op.todo) {
        (slot_of[expert] >= 0 || op.in_flight[expert] ? wanted.active : wanted.missing).push_back(expert);
    }
    const int32_t n_free = books->tables.layer_slots[op.layer] - (int32_t) wanted.active.size();
    wanted.missing.resize(std::min<size_t>(wanted.missing.size(), std::max(n_free, 0)));
    wanted.active.insert(wanted.active.end(), wanted.missing.begin(), wanted.missing.end());
    return wanted;
}

// What was not started will not end.
static void forget_reads(expert_op & op, const std::vector<int32_t> & experts) {
    for (int32_t expert : experts) {
        op.n_in_flight -= op.in_flight[expert];
        op.in_flight[expert] = 0;
    }
}

bool expert_give_back(expert_books * books, const expert_fetch & wanted, const std::vector<int32_t> & slots,
    expert_host_slots & refused, std::unique_lock<std::mutex> & lock) {
    lock.lock();
    for (size_t i = 0; i < slots.size(); i++) {
        books->tables.reserved_slot[books->layers[wanted.layer].first_key + wanted.missing[i]] = -1;
        books->tables.owner[slots[i]]                                                          = -1;
    }
    lock.unlock();
    const std::vector<int32_t> gone = refused.missing();
    const bool                 ok   = books->provider.withdraw(books->provider.user, gone.data(), (int32_t) gone.size()) != 0;
    lock.lock();
    expert_trace_cut(*books->trace, "the cache has become smaller");
    return ok;
}

bool expert_fetch_missing(expert_books * books, std::unique_lock<std::mutex> & lock) {
    expert_op &  op     = books->op;
    expert_fetch wanted = missing_experts(books);
    if (wanted.missing.empty()) {
        return true;
    }
    for (int32_t expert : wanted.missing) {
        op.in_flight[expert] = 1;
    }
    op.n_in_flight += (int32_t) wanted.missing.size();
    expert_count(&books->tables.counters[EXPERT_PROVIDER_CALLS], 1);
    const auto           start = std::chrono::steady_clock::now();
    std::vector<int32_t> slots = expert_take_next_slots(books, wanted);
    lock.unlock();
    const auto loads = books->loader.announce(wanted.layer, books->layer_dev[wanted.layer], wanted.missing, slots.empty());
    if (slots.empty()) {
        slots = expert_ask_for_slots(books, wanted);
    }
    if (expert_host_slots * refused = expert_refused(books, slots)) {
        books->loader.cancel(loads);
        const bool ok = expert_give_back(books, wanted, slots, *refused, lock);
        forget_reads(op, wanted.missing);
        if (!ok) {
            books->fail(
                "slots in host memory that can't be had could not be withdrawn; the provider's own message is in the log");
        }
        return ok && expert_fetch_missing(books, lock); // there are fewer now
    }
    const bool ok = !slots.empty();
    lock.lock();
    if (ok) { // before a read can fail
        std::vector<int32_t> & active = wanted.active;
        std::rotate(active.begin(), active.end() - wanted.missing.size(), active.end()); // the missing ones first
        expert_trace_fetch(*books->trace, wanted.layer, active, wanted.missing.size());
    }
    lock.unlock();
    if (ok) {
        books->loader.assign_slots(loads, slots);
        books->provider.prepare(books->provider.user, wanted.layer, wanted.missing.data(), (int32_t) wanted.missing.size());
    } else {
        books->loader.cancel(loads);
    }
    lock.lock();
    books->count_wait(start);
    if (!ok) {
        forget_reads(op, wanted.missing);
        books->fail("the expert provider failed to choose slots; its own message is in the log");
    }
    return ok;
}
