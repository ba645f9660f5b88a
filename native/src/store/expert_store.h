// The store: what native knows of one model's experts, as far as other rooms may touch it. The rest: expert_books.h.
#pragma once

#include "expert_hooks.h"
#include "expert_host_slots.h"
#include "expert_mover.h"
#include "expert_provider.h"
#include "expert_transit.h"

#include "ggml-cpp.h"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

struct expert_ref {
    expert_store * store;
    int32_t        layer;
    int32_t        role;
};

// Memory of one device that slots lie in, and what the device's backend keeps with it.
struct expert_arena {
    ggml_backend_dev_t                              dev  = nullptr;
    char *                                          base = nullptr;
    uint64_t                                        size = 0;
    ggml_backend_buffer_ptr                         buffer;   // NULL: mapped host memory
    std::vector<std::unique_ptr<expert_host_slots>> host;     // that the device reads in place; unlocked before the buffer goes
    std::vector<expert_mover>                       movers;   // between both
    std::map<int32_t, expert_transit>               transits; // by pool
    std::shared_ptr<void>                           backend_state;
    std::atomic<bool>                               touched{false}; // slots changed without the backend's knowledge

    ~expert_arena();
};

// The provider, buffers of claimed weights and loads under way share it.
struct expert_store : std::enable_shared_from_this<expert_store> {
    const std::vector<expert_layer>                     layers;
    const expert_tables                                 tables;
    std::unordered_map<std::string, expert_ref>         refs;       // by tensor name
    std::vector<ggml_backend_dev_t>                     layer_dev;  // [layer] device that computes it, NULL: no model is loaded
    std::vector<char *>                                 slot_data;  // [n_keys] address of the slot
    std::vector<char *>                                 slot_copy;  // [n_keys] of its bytes, that the device may use; NULL: none
    std::vector<expert_arena *>                         slot_arena; // [n_keys] of its device; NULL: there is no such slot yet
    std::map<ggml_backend_dev_t, std::shared_ptr<void>> bufts;      // of claimed weights

    const int32_t * slot_of(int32_t layer) const { return tables.slot_of + layers[layer].first_key; }
    // Where a device's kernels find what is in the slot.
    char *  device_data(int32_t slot) const { return slot_copy[slot] ? slot_copy[slot] : slot_data[slot]; }
    int32_t n_keys() const { return layers.back().first_key + layers.back().n_expert; }

protected:
    expert_store(const expert_layer * layers, int32_t n_layers, const expert_tables & tables) :
        layers(layers, layers + n_layers), tables(tables), layer_dev(n_layers, nullptr), slot_data(n_keys(), nullptr),
        slot_copy(n_keys(), nullptr), slot_arena(n_keys(), nullptr) {}
    ~expert_store() = default;
};

// The store that the load of the open file on this thread takes weights from, NULL if none. Stays alive until that load has
// ended.
expert_store * expert_store_find(int fd);
// The load takes a weight from the store, to be computed on dev. False and expert_last_error() if others of its layer are
// computed elsewhere.
bool expert_store_claim(const expert_ref & ref, ggml_backend_dev_t dev);
// The arena of a device, opened if it is not there yet; NULL and an error if that failed. Takes no lock while the
// provider is called.
expert_arena * expert_store_open_arena(expert_store * store, ggml_backend_dev_t dev);

// Between two graphs of an arena's device: ends the moves under way, once all kernels have ended that read the arena (quiet),
// and starts others. What lies elsewhere now. Does nothing while somebody computes with the store.
expert_moved expert_store_move(
    expert_store * store, expert_arena & arena, expert_copier & copier, const std::function<void()> & quiet);

// ---- a whole layer in device memory, between expert_layer_begin() and expert_op_end(): passes as in host memory

// Takes the store, counts the acquire and makes the first pass. experts: distinct, in range. n_rows: pairs of token and
// expert, 0: expert_layer_count() has counted it; ids: [n_rows] their experts, if it may be a prompt. False if that failed.
bool expert_layer_begin(
    expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows, const int32_t * ids = nullptr);
// A batch of so many pairs of token and expert is a prompt's: each expert of the layer would be used four times.
inline bool expert_is_prompt(const expert_layer & layer, int64_t n_rows) { return n_rows >= 4 * (int64_t) layer.n_expert; }
// While a device computes with the experts of the layer `computing` (or with none: the same layer), what a prompt will need of a layer
// and is missing begins to be read, as far as there is room beside: what the last prompt's batch needed of it; if there was none,
// all, if `all`. Its next acquire waits for what it needs of that. Not if somebody else computes with the store. False: nothing.
bool expert_layer_read_ahead(expert_store * store, int32_t layer, int32_t computing, bool all);
// Counts an acquire whose experts are all resident.
void expert_layer_count(expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows);
// Fails this thread's decode with a reason.
void expert_store_set_error(expert_store * store, const std::string & why);
// Bytes were handed out wrong to who can't be told: the next computation fails, with this reason.
void expert_store_fail_next(expert_store * store, const std::string & why);
