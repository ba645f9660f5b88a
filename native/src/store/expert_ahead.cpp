// Reading on while a device computes: what the next layer of a prompt misses.
#include "expert_books.h"
#include "expert_fetch.h"

#include <algorithm>
#include <numeric>

// What a prompt will need of the layer and has no slot, as many as have room beside those of it that have one and all of the
// layer `computing`.
static expert_fetch absent_experts(const expert_books * books, int32_t layer, int32_t computing, bool all) {
    const expert_tables & tables = books->tables;
    const expert_layer &  kept   = books->layers[computing];
    const int32_t *       slots  = tables.reserved_slot + books->layers[layer].first_key;
    const bool            known  = books->had_prompt[layer];
    expert_fetch          wanted = {layer, {}, {}, computing};
    for (int32_t expert = 0; expert < books->layers[layer].n_expert; expert++) {
        if (slots[expert] >= 0) {
            wanted.active.push_back(expert);
        } else if (known ? books->of_prompt[books->layers[layer].first_key + expert] > 0 : all) {
            wanted.missing.push_back(expert);
        }
    }
    int32_t n_free = tables.layer_slots[layer] - (int32_t) wanted.active.size();
    if (computing != layer && tables.layer_pool[computing] == tables.layer_pool[layer]) {
        const int32_t * of_kept = tables.reserved_slot + kept.first_key;
        n_free -= (int32_t) std::count_if(of_kept, of_kept + kept.n_expert, [](int32_t slot) { return slot >= 0; });
    }
    wanted.missing.resize(std::min<size_t>(wanted.missing.size(), std::max(n_free, 0)));
    wanted.active.insert(wanted.active.end(), wanted.missing.begin(), wanted.missing.end());
    return wanted;
}

// Who has most rows gets a slot on the device: kernels read an expert once for every 128 rows or so. Under the lock.
static void share_slots(expert_books * books, expert_fetch & wanted, const std::vector<int32_t> & slots) {
    const expert_tables & tables    = books->tables;
    const int32_t         first_key = books->layers[wanted.layer].first_key;
    std::vector<int32_t>  by_rows   = wanted.missing;
    std::vector<size_t>   by_place(slots.size()); // indices of slots, those on the device first
    std::iota(by_place.begin(), by_place.end(), 0);
    std::stable_sort(by_rows.begin(), by_rows.end(),
        [&](int32_t a, int32_t b) { return books->of_prompt[first_key + a] > books->of_prompt[first_key + b]; });
    std::stable_partition(by_place.begin(), by_place.end(), [&](size_t i) { return tables.in_place[slots[i]] == 0; });
    for (size_t i = 0; i < slots.size(); i++) {
        const size_t at                              = by_place[i];
        wanted.missing[at]                           = by_rows[i];
        tables.owner[slots[at]]                      = first_key + by_rows[i];
        tables.reserved_slot[first_key + by_rows[i]] = slots[at];
    }
}

// Under the lock.
static void begin_ahead(expert_books * books, const expert_fetch & wanted) {
    expert_ahead & ahead = books->ahead;
    ahead.layer          = wanted.layer;
    ahead.fetched.assign(books->layers[wanted.layer].n_expert, 0);
    for (int32_t expert : wanted.missing) {
        ahead.fetched[expert] = 1;
    }
    ahead.in_flight   = ahead.fetched;
    ahead.n_in_flight = (int32_t) wanted.missing.size();
    expert_trace_ahead(*books->trace, wanted.layer, wanted.kept_layer, wanted.missing);
}

// With the store taken, its lock held. False: it got no slots.
static bool read_on(expert_books * books, expert_fetch & wanted, std::unique_lock<std::mutex> & lock) {
    expert_count(&books->tables.counters[EXPERT_PROVIDER_CALLS], 1);
    std::vector<int32_t> slots = expert_take_next_slots(books, wanted);
    lock.unlock();
    if (slots.empty()) {
        slots = expert_ask_for_slots(books, wanted);
    }
    if (expert_host_slots * refused = expert_refused(books, slots)) {
        expert_give_back(books, wanted, slots, *refused, lock); // whoever needs them hears of it if that failed
        return false;
    }
    lock.lock();
    if (slots.empty()) {
        return false;
    }
    share_slots(books, wanted, slots);
    begin_ahead(books, wanted);
    books->slot_arena[slots[0]]->touched = true; // what has left is in no acquire's changes
    lock.unlock();
    const auto loads = books->loader.announce(wanted.layer, books->layer_dev[wanted.layer], wanted.missing, false);
    books->loader.assign_slots(loads, slots);
    books->provider.prepare(books->provider.user, wanted.layer, wanted.missing.data(), (int32_t) wanted.missing.size());
    lock.lock();
    return true;
}

bool expert_layer_read_ahead(expert_store * store, int32_t layer, int32_t computing, bool all) {
    expert_books * const         books = expert_books_of(store);
    std::unique_lock<std::mutex> lock(books->mutex);
    const bool open = books->tables.layer_slots[layer] > 0 && books->layer_dev[layer] == books->layer_dev[computing];
    if (books->busy || books->gone || !open || books->ahead.n_in_flight > 0 || expert_interrupted() || expert_is_cancelled()) {
        return false;
    }
    expert_fetch wanted = absent_experts(books, layer, computing, all);
    if (wanted.missing.empty()) {
        return false;
    }
    books->busy    = true; // the provider is asked by one at a time
    const bool any = read_on(books, wanted, lock);
    books->busy    = false;
    books->changed.notify_all();
    return any;
}

void expert_adopt_reads_ahead(expert_books * books) {
    expert_op &    op    = books->op;
    expert_ahead & ahead = books->ahead;
    if (ahead.layer != op.layer || ahead.n_in_flight == 0) {
        return;
    }
    for (int32_t expert : op.todo) { // nobody waits for the others
        op.in_flight[expert] = ahead.in_flight[expert];
        op.n_in_flight += ahead.in_flight[expert];
        ahead.n_in_flight -= ahead.in_flight[expert];
        ahead.in_flight[expert] = 0;
    }
}

void expert_wait_for_reads_ahead(expert_store * store) {
    expert_books * const         books = expert_books_of(store);
    std::unique_lock<std::mutex> lock(books->mutex);
    books->changed.wait(lock, [&] { return books->ahead.n_in_flight == 0; });
}

// Of what is read ahead.
static int32_t n_not_needed(const expert_books * books) {
    const expert_op &    op     = books->op;
    const expert_ahead & ahead  = books->ahead;
    int32_t              needed = 0;
    for (int32_t expert : op.todo) {
        needed += ahead.layer == op.layer && ahead.in_flight[expert];
    }
    return ahead.n_in_flight - needed;
}

void expert_wait_for_guesses(expert_books * books, std::unique_lock<std::mutex> & lock) {
    const expert_op & op       = books->op;
    const int32_t *   reserved = books->tables.reserved_slot + books->layers[op.layer].first_key;
    // a read may fail just now: the provider takes no lock of ours
    const auto is_missing = [&](int32_t expert) { return __atomic_load_n(&reserved[expert], __ATOMIC_RELAXED) < 0; };
    if (books->ahead.n_in_flight > 0 && std::any_of(op.todo.begin(), op.todo.end(), is_missing)) {
        books->changed.wait(lock, [&] { return n_not_needed(books) == 0; });
    }
}
