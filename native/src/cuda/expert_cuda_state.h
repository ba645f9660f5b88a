// What the CUDA backend keeps with a store's arena on one device. Internal to native/src/cuda.
#pragma once

#include "expert_store.h"

#include "common.cuh"

#include <mutex>
#include <set>
#include <vector>

#define EXPERT_LOOKUP_IDS_MAX 1024                            // ids of a layer in lookup mode; larger batches run in segments
#define EXPERT_ID_NONE INT32_MIN                              // in place of an id that no lookup has written yet
#define EXPERT_LOOKUP_UPDATES_MAX (3 * EXPERT_LOOKUP_IDS_MAX) // who came, who left for it, what was in transit
// Longer than any read with its retries: only a host that will never answer is given up. Tests shorten it with
// EXPERT_PACK_CUDA_LOOKUP_TIMEOUT_MS.
#define EXPERT_LOOKUP_TIMEOUT_MS 600000ull

// A change of the device's table.
struct expert_update {
    int32_t key;
    int32_t resident;
    int64_t offset;
};

// Mapped, pinned host memory that device and host write to each other. One graph uses it at a time.
struct expert_mailbox {
    volatile uint32_t request; // device: number of the lookup that waits, 0: none
    volatile uint32_t layer;   // device: its layer
    uint32_t          pad0[30];
    volatile uint32_t answer;    // host: number of the lookup that may go on
    volatile uint32_t abort;     // host: nobody waits any more
    volatile int32_t  n_updates; // host: what the waiting lookup writes into the table
    uint32_t          pad1[29];
    expert_update     updates[EXPERT_LOOKUP_UPDATES_MAX];
};

// Where the experts of one layer are and what the lookup needs to know of it.
struct expert_cuda_state final : expert_copier {
    expert_store *         store;
    int                    device;
    char *                 base;     // of the arena
    const bool             may_wait; // kernels for the host
    const uint64_t         lookup_timeout_ns;
    int64_t *              offsets  = nullptr; // device, [n_keys] bytes from base to the expert's slot, 0: not resident
    uint8_t *              resident = nullptr; // device, [n_keys]
    expert_update *        updates  = nullptr; // device, staging for updates in segments
    uint32_t *             sequence = nullptr; // device, number of the last lookup
    expert_mailbox *       mailbox  = nullptr; // host, mapped
    int32_t *              ids      = nullptr; // host, mapped, [n_layers][EXPERT_LOOKUP_IDS_MAX] what lookups saw
    std::vector<int32_t *> ids_segments;       // host, pinned, the last one with room for the ids of a batch
    size_t                 n_ids_segments = 0;
    std::vector<int32_t>   slot_key;       // [slot] what the device's table says is in it, -1: nothing
    std::vector<int32_t>   in_transit;     // slots of which it names a copy
    cudaEvent_t            used = nullptr; // the last kernel that reads the arena
    const void *           user = nullptr; // the context that launched it
    std::mutex             graph_mutex;    // one graph uses table, mailbox and arena at a time
    cudaStream_t           moving[2] = {}; // background copies to host memory, to the device
    std::set<cudaEvent_t>  moves;          // their ends

    expert_cuda_state(expert_store * store, int device, char * base);
    ~expert_cuda_state();

    int64_t offset_of(int32_t slot) const { return store->device_data(slot) - base; }
    // What must change in the device's table so that it says what slot_of says, for the experts of a layer and for
    // those whose slots they took.
    std::vector<expert_update> changes(int32_t layer, const std::vector<int32_t> & experts);
    // Writes the whole table anew: after a failure.
    void          rewrite(cudaStream_t stream);
    expert_update entry_of(int32_t key);
    void          apply(const std::vector<expert_update> & changed, cudaStream_t stream);
    // Experts change places between the arena and host memory: before a graph.
    void move(expert_arena & arena, cudaStream_t stream);

    void * start(char * dest, const char * src, uint64_t n_bytes, bool to_device) override;
    bool   end(void * copy) override;
};

// The state of the device that computes the weight's layer; opens the arena. NULL and the store's error if it can't.
expert_cuda_state * expert_cuda_state_of(const expert_ref * ref, int device);

// Lookup kernels.
void expert_cuda_launch_lookup(const expert_cuda_state & state, int32_t layer, const ggml_tensor * ids, cudaStream_t stream);
// Copies rows [row_bytes] of src to dst whose expert is in the pass: ids [n_used, n_tokens], in_pass [n_expert].
void expert_cuda_launch_keep_rows(
    const ggml_tensor * ids, const uint8_t * in_pass, const ggml_tensor * src, char * dst, cudaStream_t stream);

// Consecutive MUL_MAT_ID nodes of one expert layer: nodes [first, last] of the graph.
struct expert_span {
    const expert_ref *  ref;
    const ggml_tensor * ids;
    int                 first;
    int                 last;
};

// Valid until the thread asks for another graph's.
const std::vector<expert_span> & expert_cuda_find_spans(const ggml_cgraph * cgraph);
// The distinct ids of a batch; false and the store's error if one is out of range.
bool expert_cuda_distinct_ids(
    const expert_ref * ref, const volatile int32_t * ids, size_t n_ids, std::vector<int32_t> & distinct);

// An arena is used by one graph at a time: contexts of the same model take turns.
void expert_cuda_take_arena(expert_cuda_state & state, ggml_backend_cuda_context & ctx, const expert_ref * ref);
// After the last kernel of the graph.
void expert_cuda_mark_use(expert_cuda_state & state, ggml_backend_cuda_context & ctx);
void expert_cuda_give_arena();

// Around a graph whose kernels may wait for the host: until the last of them can't any more. Leaving twice does nothing.
void expert_cuda_enter_lookup();
void expert_cuda_leave_lookup();
