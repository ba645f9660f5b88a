// Slots in host memory that a device reads in place: adding them to a store, and what happens where they can't be had.
#include "expert_books.h"

#include <algorithm>
#include <numeric>

int expert_store_add_host_slots(
    expert_store * store, const char * device, int32_t first_slot, int32_t n_slots, uint64_t slot_bytes) {
    expert_books * const     books = expert_books_of(store);
    const ggml_backend_dev_t dev   = expert_device_by_name(books, device);
    expert_arena * const     arena = dev ? expert_find_arena(books, dev) : nullptr;
    const auto               reg   = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    const auto lock = reg ? (expert_lock_t) ggml_backend_reg_get_proc_address(reg, EXPERT_LOCK_PROC) : nullptr;
    if (!arena || !arena->buffer || !lock) {
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
        books->slot_data[slot]     = host->data(slot);
        books->slot_arena[slot]    = arena;
        books->slot_in_place[slot] = 1;
    }
    arena->host.push_back(std::move(host));
    return 1;
}

void * expert_store_host_slot(expert_store * store, int32_t slot) { return expert_books_of(store)->host_slot(slot); }

expert_host_slots * expert_refused(expert_books * books, const std::vector<int32_t> & slots) {
    for (int32_t slot : slots) {
        for (const auto & host : books->slot_arena[slot]->host) {
            if (slot >= host->first && slot < host->first + host->n && !host->prepare(slot)) {
                return host.get();
            }
        }
    }
    return nullptr;
}
