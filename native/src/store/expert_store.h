// The store: what native knows of one model's experts. Internal to native/src.
#pragma once

#include "expert_hooks.h"
#include "expert_load.h"
#include "expert_provider.h"
#include "expert_read.h"
#include "expert_trace.h"
#include "expert_trust.h"

#include "ggml-backend-impl.h"

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

struct expert_ref {
    expert_store * store;
    int32_t        layer;
    int32_t        role;
};

// Memory of one device that slots lie in, and what the device's backend keeps with it.
struct expert_arena {
    ggml_backend_dev_t    dev    = nullptr;
    char *                base   = nullptr;
    uint64_t              size   = 0;
    ggml_backend_buffer_t buffer = nullptr; // NULL: mapped host memory
    std::shared_ptr<void> backend_state;
    std::atomic<bool>     touched{false}; // slots changed without the backend's knowledge

    expert_arena()                                 = default;
    expert_arena(const expert_arena &)             = delete;
    expert_arena & operator=(const expert_arena &) = delete;
    ~expert_arena();
};

// One MUL_MAT_ID in progress. A store runs one at a time: contexts of the same model take turns.
struct expert_op {
    int32_t                   layer       = 0;
    uint64_t                  role_offset = 0;
    std::vector<int32_t>      todo;      // experts not yet handed to the threads
    std::vector<char>         in_flight; // [n_expert] a read of it is under way
    std::atomic<int32_t>      n_in_flight{0};
    bool                      as_they_come = true; // hand out what is there; false: as many as fit, at once
    std::vector<const char *> data;                // [n_expert] experts of this pass
    bool                      failed = false;
    std::atomic<int>          n_running{0};
};

struct expert_store {
    dev_t file_dev = 0;
    ino_t file_ino = 0;

    std::vector<expert_layer> layers;
    expert_tables             tables   = {};
    expert_provider           provider = {};

    std::unordered_map<std::string, expert_ref>            refs;      // by tensor name
    std::unordered_set<const expert_ref *>                 claimed;   // by the load under way
    std::vector<ggml_backend_dev_t>                        layer_dev; // [layer] device that computes it, NULL: not claimed
    std::atomic<int32_t>                                   n_claimed{0};
    std::atomic<bool>                                      loading{true}; // its model's load may still claim
    std::vector<std::unique_ptr<ggml_backend_buffer_type>> bufts;         // one a device
    std::vector<std::shared_ptr<void>>                     buft_contexts;

    std::atomic<int64_t>      n_reads_ended{0};
    std::atomic<const char *> gone{nullptr}; // why nothing of the provider may be touched any more

    std::mutex                                 mutex; // guards what follows
    std::condition_variable                    changed;
    std::vector<std::unique_ptr<expert_arena>> arenas;
    std::vector<ggml_backend_buffer_t>         staging;
    std::vector<char *>                        slot_data;    // [slot] address in its arena
    std::vector<expert_arena *>                slot_arena;   // [slot]
    std::vector<char>                          slot_checked; // [slot] the digest of what is in it was compared when it was read
    bool                                       busy = false; // an op holds the store
    expert_op                                  op;
    std::vector<uint32_t>                      roles_seen;       // [layer] roles computed since the layer was last acquired
    int64_t                                    now = 0;          // number of the last acquire
    std::string                                error;            // why the last failed decode failed
    expert_trace *                             trace  = nullptr; // the provider's; NULL: nobody wants one
    bool                                       broken = false;   // bytes were handed out wrong: the next op fails

    std::atomic<int> n_refs{1}; // the provider, buffers and the load under way keep the store alive
    expert_trust     trust;
    expert_loader    loader{this};
    expert_read_pool readers; // the last member: its threads use the others

    const int32_t * slot_of(int32_t layer) const { return tables.slot_of + layers[layer].first_key; }

    ~expert_store();
};

extern std::mutex expert_opening; // held while an arena is opened: two contexts may come first

void expert_set_last_error(const char * format, ...) __attribute__((format(printf, 1, 2)));
void expert_store_ref(expert_store * store);
void expert_store_unref(expert_store * store);
// The store that was made on this thread for a load of the open file, NULL if none. Stays alive until that load has ended.
expert_store * expert_store_find(int fd);
// The arena of a device, opened if it is not there yet; NULL and an error if that failed. Takes no lock while the
// provider is called.
expert_arena * expert_store_open_arena(expert_store * store, ggml_backend_dev_t dev);

// The address of a slot in host memory; NULL if there is none of that number.
char * expert_store_host_slot(expert_store * store, int32_t slot);
// Starts to copy bytes of a block to its slot in a device's memory; they must stay until expert_store_written(), which
// waits for all that was started. False if the device failed.
bool expert_store_write(expert_store * store, int32_t slot, uint64_t offset, const void * bytes, uint64_t n_bytes);
bool expert_store_written(expert_store * store, int32_t slot);

// The slot holds the expert's bytes: whoever looks it up may use them.
void expert_store_publish(expert_store * store, int32_t layer, int32_t expert, int32_t slot, bool checked);
// All experts leave whose digest was not compared when they were read. With the store taken, its lock held and no read
// under way.
void expert_store_drop_unchecked(expert_store * store);

// ---- a whole layer in device memory: begin, then passes over its experts while op.todo is not empty, then give back

// Takes the store, counts the acquire and makes the first pass. experts: distinct, in range. n_rows: pairs of token and
// expert, 0: expert_layer_count() has counted it.
void expert_layer_begin(expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows);
void expert_store_next_pass(expert_store * store);
// False if a read failed. The last thread of the op frees the store for the next one.
bool expert_store_give_back(expert_store * store);
// Counts an acquire whose experts are all resident.
void expert_layer_count(expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows);
// Fails the decode in progress with a reason.
void expert_store_set_error(expert_store * store, const std::string & why);
