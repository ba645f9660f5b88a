// The C ABI between an expert provider (pack files, cache policy: Python) and ggml's MUL_MAT_ID (native).
// This header is its only definition: C++ compiles it, cffi reads the part between the two "cffi" marks.
//
// How the two sides work together:
//   1. The provider describes the model's expert layers and shares its tables: expert_store_create().
//   2. llama.cpp loads the model of that file; weights named in a role are claimed, not loaded.
//   3. Before the first use of a device the store asks open_arena(): the provider decides its size in bytes.
//   4. A MUL_MAT_ID on a claimed weight looks its experts up in slot_of[]. All there: no callback is made.
//   5. Else native takes slots for the missing experts from next_slots[], which the provider chose before; if they
//      don't do, choose_slots() asks the provider. Native reads the blocks by itself. While it does,
//      prepare() lets the provider choose the next ones: its time is hidden behind the reads.
//   6. What native can't read, or reads wrong, it asks the provider to read(): the one with retries and messages.
//      Such a read ends in expert_store_commit() or expert_store_fail(), from any thread.
//   7. A slot is published in slot_of[] only after its bytes are in place. A failed read fails the decode.
#ifndef EXPERT_PROVIDER_H
#define EXPERT_PROVIDER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
#define EXPERT_ABI_VERSION 10
#define EXPERT_MAX_ROLES 8
#define EXPERT_NAME_BYTES 128
#define EXPERT_NEXT_SLOTS 64
#define EXPERT_MOVES 16
#define EXPERT_HITS_A_PLAN 16

// Indices into expert_tables.counters. Those with two writers are added to with expert_count() only.
enum expert_counter {
    EXPERT_ACQUIRES = 0,   // expert layers looked up (one per layer and batch)
    EXPERT_HITS,           // unique (layer, expert) of an acquire that were in a slot
    EXPERT_MISSES,         // unique (layer, expert) of an acquire that were not
    EXPERT_EVICTIONS,      // slots taken from an expert that was in it        (written by both)
    EXPERT_LOADS,          // experts brought into a slot and published
    EXPERT_READ_BYTES,     // bytes read from the pack                         (written by both)
    EXPERT_H2D_BYTES,      // bytes copied to a device; 0 where slots are host memory
    EXPERT_PROVIDER_CALLS, // fetches, reads and arenas that the provider had to do with: 0 while everything is resident
    EXPERT_WAIT_NS,        // time that computation waited for experts, and for the provider to choose slots
    EXPERT_IO_ERRORS,      // reads that failed or whose checksum was wrong    (written by both)
    EXPERT_IO_RETRIES,     // of these, the ones that were tried again         (written by both)
    EXPERT_FALLBACKS,      // reads that did not use direct I/O                (written by both)
    EXPERT_FAILURES,       // decodes that failed because an expert could not be brought in
    EXPERT_HOST_HITS,      // of the hits, those in host memory that a device reads in place
    EXPERT_HOST_BYTES,     // of their blocks
    EXPERT_MOVES_UP,       // experts that went from there to the device, in the background
    EXPERT_MOVES_DOWN,     // experts that went from the device to there
    EXPERT_COUNTERS
};

// One per-expert weight of a layer. The expert's rows are `bytes` long and start `offset` bytes into its slot.
typedef struct expert_role {
    char     tensor[EXPERT_NAME_BYTES]; // name in the GGUF, e.g. blk.3.ffn_up_exps.weight
    int32_t  type;                      // enum ggml_type
    int32_t  reserved;
    int64_t  ne[3];  // shape: columns, rows, experts
    uint64_t bytes;  // of one expert
    uint64_t offset; // in the block, and so in a slot
} expert_role;

// The experts that one router picks from. Keys first_key .. first_key + n_expert - 1 are theirs in the tables.
typedef struct expert_layer {
    int32_t     n_expert;
    int32_t     n_roles;
    int32_t     first_key;
    int32_t     on_cpu;      // 1: computed on the CPU, wherever the rest of the model is
    uint64_t    block_bytes; // of one expert, all roles and padding: what a slot must hold
    expert_role roles[EXPERT_MAX_ROLES];
} expert_layer;

// Where native finds an expert's block, if it is one piece of a file.
typedef struct expert_block {
    int64_t offset;     // in bytes, and n_bytes like the layer's block_bytes: multiples of 4096 for direct I/O
    int32_t fd;         // open for reading; -1: only the provider can read it
    int32_t check;      // the digest at each read: 0 no; 1 until it was right once, native sets 0 then; 2 yes
    uint8_t digest[16]; // xxh3_128 of the block, big-endian
} expert_block;

// Shared memory, owned by the provider, alive until expert_store_free().
typedef struct expert_tables {
    int32_t *      slot_of;       // [n_keys] slot that holds the expert, -1: none. Native sets, both clear
    int64_t *      freq;          // [n_keys] acquires that asked for it. Native writes
    int64_t *      last_use;      // [n_keys] number of the last acquire that asked for it. Native writes
    int64_t *      counters;      // [EXPERT_COUNTERS]
    int32_t *      reserved_slot; // [n_keys] slot that holds it or is being filled with it, -1: none. Both write
    int64_t *      owner;         // [n_keys] key of the expert that a slot is reserved for, by slot; -1: free. Both write
    int32_t *      layer_slots;   // [n_layers] slots that the layer may use. Provider writes in open_arena
    int32_t *      layer_pool;    // [n_layers] pool that they belong to. Provider writes in open_arena
    int32_t *      next_slots;    // [n_pools][EXPERT_NEXT_SLOTS] to be taken next, in this order; -1 ends them. Provider writes
    uint8_t *      in_place;      // [n_keys] by slot, 1: it lies in host memory, where a device reads it. Native writes
    expert_block * blocks;        // [n_keys]
    int64_t *      seen_freq;     // [n_keys] freq, owner and in_place as they were when plan() was asked for. Native writes
    int64_t *      seen_owner;
    uint8_t *      seen_in_place;
    int32_t *      moves_up;   // [n_pools][EXPERT_MOVES] slots whose experts should go to the device, in this order; -1 ends
    int32_t *      moves_down; // [n_pools][EXPERT_MOVES] slots whose experts should go to host memory, likewise. plan() writes
    int32_t        n_reads;    // blocks that native reads at the same time, 1 at least
    int32_t        n_parts;    // that it cuts each of them into at most, 1 at least
    int32_t        is_direct;  // the files are open for direct I/O
    int32_t        recheck;    // some of the reads whose check is 0 are checked all the same: a drive may begin to lie
} expert_tables;

typedef struct expert_store expert_store;
typedef struct expert_trace expert_trace;

// Callbacks return 1 on success, 0 on failure.
typedef struct expert_provider {
    uint32_t abi_version; // EXPERT_ABI_VERSION
    uint32_t struct_size; // sizeof(expert_provider)
    void *   user;
    // A device is about to compute layers[0..n_layers): call expert_store_add_arena() for it before returning.
    // device: its ggml name ("CPU", "CUDA0"); free_bytes: memory it has left now, 0 if unknown.
    int (*open_arena)(void * user, const char * device, uint64_t free_bytes, const int32_t * layers, int32_t n_layers);
    // Choose slots for missing[] without touching those of active[] (which includes missing[]), clear slot_of of
    // what they held, set reserved_slot and owner, and write the slots to slots[n_missing]. n_missing never exceeds what fits
    // beside the rest of active[]. kept_layer: all experts of this layer stay too, a device computes with them; -1: none.
    int (*choose_slots)(void * user, int32_t layer, const int32_t * missing, int32_t n_missing, const int32_t * active,
        int32_t n_active, int32_t kept_layer, int32_t * slots);
    // The experts of fetched[] have got slots, and their reads have started: choose next_slots of their pool anew.
    void (*prepare)(void * user, int32_t layer, const int32_t * fetched, int32_t n_fetched);
    // Start to read a fetched expert into its slot, and return. From any thread. Ends in commit or fail, in any case.
    void (*read)(void * user, int32_t layer, int32_t expert, int32_t slot);
    // n_bytes of host memory are about to be taken for slots: 0 if there are not so many left. From any thread.
    int (*may_take)(void * user, uint64_t n_bytes);
    // Choose what should change places between devices and host memory, from seen_*. On a thread of the store's own, once a
    // token at most, and after so many hits in host memory: below that there is little to gain.
    void (*plan)(void * user);
    // These slots in host memory can't be had: the system gives no more, or does not lock it. They are free; never choose them
    // again. Some may have been withdrawn before. On the thread that fetches.
    int (*withdraw)(void * user, const int32_t * slots, int32_t n_slots);
} expert_provider;

// Registers a provider for models whose first GGUF file is model_path (compared by device and inode), and begins the load of
// one on this thread. A forked child has no part in it: there the file may be opened again, and computing with this one fails.
// NULL on failure, with the reason in expert_last_error(). Copies layers; keeps the tables' pointers.
expert_store * expert_store_create(const char * model_path, const expert_layer * layers, int32_t n_layers,
    const expert_tables * tables, const expert_provider * provider);
// Unregisters it. Call after the models that use it are freed and no read is under way.
void expert_store_free(expert_store * store);

// Another model of the file is to be loaded on this thread, to share the slots; the others may compute meanwhile. 1 on
// success, else 0 and expert_last_error(): one load at a time, until its arenas are open.
int expert_store_begin_load(expert_store * store);
// The model is loaded, on this thread: from now on no other one of the file takes weights from this store. 0 and
// expert_last_error() if it can't be used, for it computes experts on another device than the one that has their slots.
int expert_store_loaded(expert_store * store);
// The same for a load that has failed, after what it had loaded is freed. Nothing if none is under way.
void expert_store_not_loaded(expert_store * store);
// How many of the described weights the load under way, or the last, took from this store.
int32_t expert_store_n_claimed(const expert_store * store);
// The ggml name of the device that computes a layer, once the model is loaded; NULL: none does.
const char * expert_store_device(const expert_store * store, int32_t layer);

// Gives `device` an arena of n_bytes, in which slots[i] lies offsets[i] bytes from the start. It starts zeroed. Reads for a
// device land in expert_tables.n_reads buffers first, which *pinned says are page-locked: pageable ones are slower to copy
// from. 1 on success; else 0 and expert_last_error().
int expert_store_add_arena(expert_store * store, const char * device, uint64_t n_bytes, const int32_t * slots,
    const uint64_t * offsets, int32_t n_slots, int * pinned);
// Gives a pool of `device`, which has an arena, slots first_slot .. first_slot + n_slots - 1 in host memory that it reads in
// place: of slot_bytes each, page-locked in chunks as they are needed, from the first slot on. spares[n_spares],
// transits[n_transits]: where blocks of no slot start in the arena, bytes. Through spares experts change places; transits get
// copies of what is read into host memory, while it arrives. 1 on success; else 0 and expert_last_error().
int expert_store_add_host_slots(expert_store * store, const char * device, int32_t pool, int32_t first_slot, int32_t n_slots,
    uint64_t slot_bytes, const uint64_t * spares, int32_t n_spares, const uint64_t * transits, int32_t n_transits);
// Where a slot's bytes lie; NULL if not in host memory. For a read() into it.
void * expert_store_host_slot(expert_store * store, int32_t slot);
// After expert_store_loaded(), which it calls if that was not done: opens the arenas of every device that has claimed weights,
// so that a wrong budget is known before the first decode. 1 on success, else 0 and expert_last_error(). Done on first use
// otherwise.
int expert_store_open_arenas(expert_store * store);

// A trace in an open file, written up to the end of its header (docs/FORMAT.md). The caller closes fd after it frees the
// trace, which it does after the stores that write it are freed. path: for messages, copied.
expert_trace * expert_trace_new(int fd, const char * path);
void           expert_trace_free(expert_trace * trace);
// Appends every acquire from now on to the trace; before the model is loaded, or arenas are missing. A trace that was
// ended, by this store or one before, goes on where its end mark was. NULL writes the end mark, as expert_store_free()
// does. 1 on success, else 0 and expert_last_error(): the trace that ends is incomplete. A write that fails in between
// is logged once, ends the trace and disturbs no decode.
int expert_store_trace(expert_store * store, expert_trace * trace);

// Copies a block to a slot that is not host memory. Done when it returns 1; 0: the device failed.
int expert_store_fill(expert_store * store, int32_t slot, const void * bytes, uint64_t n_bytes);
// A read() has ended: the slot holds the expert's bytes, or it could not be filled (why: one sentence, copied).
// The provider's own books must be right before the call: it may wake a computation that fetches at once.
void expert_store_commit(expert_store * store, int32_t layer, int32_t expert, int32_t slot);
void expert_store_fail(expert_store * store, int32_t layer, int32_t expert, const char * why);

// Adds to a counter that both sides write.
void expert_count(int64_t * counter, int64_t n);

// Why the last call of this thread failed, one sentence.
const char * expert_last_error(void);
// Why a computation on this thread, which is that of llama_decode(), has failed for want of experts since this was last asked;
// one sentence, or "". Other threads may compute with the same store meanwhile, and fail for reasons of their own.
const char * expert_take_failure(void);
// Somebody has interrupted the computation on this thread: it fails at its next layer, as do those after it until on is 0.
void    expert_cancel(int on);
int32_t expert_abi_version(void);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif
