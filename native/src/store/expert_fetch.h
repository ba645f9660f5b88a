// Fetches: experts of a layer that are to get slots. Internal to native/src/store.
#pragma once

#include "expert_books.h"

struct expert_fetch {
    int32_t              layer;
    std::vector<int32_t> missing;
    std::vector<int32_t> active;          // of the layer: what must stay, then the missing ones
    int32_t              kept_layer = -1; // all experts of this layer must stay too; -1: none
};

// A slot for each of the missing, from those that the provider has published: free, or of an expert that need not stay. None, and
// nothing is changed, if there are too few. Under the lock.
std::vector<int32_t> expert_take_next_slots(expert_books * books, const expert_fetch & wanted);
// The same from the provider. None if it failed. Without the lock.
std::vector<int32_t> expert_ask_for_slots(const expert_books * books, const expert_fetch & wanted);
// They have got slots of which some can't be had. All of these are free again; the provider hears of those that will never be.
// False if it can't do without them. Takes the lock.
bool expert_give_back(expert_books * books, const expert_fetch & wanted, const std::vector<int32_t> & slots,
    expert_host_slots & refused, std::unique_lock<std::mutex> & lock);
