// Slots in host memory that a device reads in place: adding them to a store, and what happens where they can't be had.
#include "expert_books.h"

#include <algorithm>
#include <numeric>

static std::vector<char *> blocks_at(char * base, const uint64_t * offsets, int32_t n) {
    std::vector<char *> blocks;
    std::transform(offsets, offsets + n, std::back_inserter(blocks), [base](uint64_t offset) { return base + offset; });
    return blocks;
}

int expert_store_add_host_slots(expert_store * store, const char * device, int32_t pool, int32_t first_slot, int32_t n_slots,
    uint64_t slot_bytes, const uint64_t * spares, int32_t n_spares, const uint64_t * transits, int32_t n_transits) {
    expert_books * const     books = expert_books_of(store);
    const ggml_backend_dev_t dev   = expert_device_by_name(books, device);
    expert_arena * const     arena = dev ? expert_find_arena(books, dev) : nullptr;
    const auto               reg   = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    const auto               lock  = reg ? (expert_lock_t) ggml_backend_reg_get_proc_address(reg, EXPERT_LOCK_PROC) : nullptr;
    if (!arena || !arena->buffer || !lock || !lock(arena->base, nullptr, 0)) {
        expert_set_last_error("device %s can't read experts in host memory: set expert_ram to 0", device);
        return 0;
    }
    const auto may_take = [books](uint64_t n_bytes) { return books->provider.may_take(books->provider.user, n_bytes) != 0; };
    auto       host     = std::make_unique<expert_host_slots>(first_slot, n_slots, slot_bytes, lock, arena->base, may_take);
    std::vector<int32_t> slots(std::max(n_slots, 0));
    std::iota(slots.begin(), slots.end(), first_slot);
    std::lock_guard<std::mutex> guard(books->mutex);
    if (!expert_are_new_slots(books, slots.data(), n_slots) || !host->reserve()) {
        expert_set_last_error("%d slots of %llu bytes from slot %d can't be had in host memory: lower expert_ram", n_slots,
            (unsigned long long) slot_bytes, first_slot);
        return 0;
    }
    for (int32_t slot : slots) {
        books->slot_data[slot]       = host->data(slot);
        books->slot_arena[slot]      = arena;
        books->tables.in_place[slot] = 1;
    }
    arena->host.push_back(std::move(host));
    if (n_spares > 0) { // else nothing can change places
        arena->movers.emplace_back(pool, slot_bytes, blocks_at(arena->base, spares, n_spares));
    }
    if (n_transits > 0) {
        arena->transits.emplace(pool, blocks_at(arena->base, transits, n_transits));
    }
    return 1;
}

void * expert_store_host_slot(expert_store * store, int32_t slot) { return expert_books_of(store)->host_slot(slot); }

// NULL: it was not one in host memory at first.
static expert_host_slots * host_slots_of(const expert_books * books, int32_t slot) {
    for (const auto & host : books->slot_arena[slot]->host) {
        if (slot >= host->first && slot < host->first + host->n) {
            return host.get();
        }
    }
    return nullptr;
}

expert_host_slots * expert_refused(expert_books * books, const std::vector<int32_t> & slots) {
    for (int32_t slot : slots) {
        if (expert_host_slots * const host = host_slots_of(books, slot)) {
            host->expect(slot);
        }
    }
    for (int32_t slot : slots) {
        expert_host_slots * const host = host_slots_of(books, slot);
        if (host && !host->prepare(slot)) {
            return host;
        }
    }
    return nullptr;
}

// Once a token at most: its layers have had their turn. Under the lock, and not while a plan is made.
static void ask_for_plan(expert_books * books) {
    const int64_t hits = books->tables.counters[EXPERT_HOST_HITS];
    if (books->now - books->planned_at < (int64_t) books->layers.size() || hits - books->planned_hits < EXPERT_HITS_A_PLAN) {
        return;
    }
    books->planned_at            = books->now;
    books->planned_hits          = hits;
    const expert_tables & tables = books->tables;
    const size_t          n      = books->n_keys();
    std::copy_n(tables.freq, n, tables.seen_freq);
    std::copy_n(tables.owner, n, tables.seen_owner);
    std::copy_n(tables.in_place, n, tables.seen_in_place);
    books->planner.ask([books] { books->provider.plan(books->provider.user); });
}

expert_moved expert_store_move(
    expert_store * store, expert_arena & arena, expert_copier & copier, const std::function<void()> & quiet) {
    expert_books * const books = expert_books_of(store);
    expert_moved         moved;
    if (arena.movers.empty() || books->gone) {
        return moved;
    }
    if (std::any_of(arena.movers.begin(), arena.movers.end(), [](const expert_mover & mover) { return mover.has_moves(); })) {
        quiet();
    }
    std::lock_guard<std::mutex> lock(books->mutex);
    if (books->busy) { // somebody else reads what lies in the slots
        return moved;
    }
    for (expert_mover & mover : arena.movers) {
        mover.end(*books, copier, moved);
    }
    if (books->planner.is_idle()) { // else the plan is late: nobody waits for it
        for (expert_mover & mover : arena.movers) {
            mover.start(*books, copier);
        }
        ask_for_plan(books);
    }
    return moved;
}
