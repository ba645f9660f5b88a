// All of a store. Internal to native/src/store.
#pragma once

#include "expert_error.h"
#include "expert_loader.h"
#include "expert_planner.h"
#include "expert_progress.h"
#include "expert_store.h"
#include "expert_trace.h"

#include <sys/stat.h>

#include <chrono>
#include <unordered_set>

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
    std::string               error; // why it failed
    std::atomic<int>          n_running{0};
};

// Reads for a layer whose op has not begun yet. Those that it needs become its own.
struct expert_ahead {
    int32_t              layer = -1;
    std::vector<char>    fetched;   // [n_expert] by these: missing at the layer's next acquire, whether they have ended or not
    std::vector<char>    in_flight; // [n_expert] of these, the ones under way
    std::atomic<int32_t> n_in_flight{0};
};

struct expert_books final : expert_store, expert_slots {
    const expert_provider provider;
    const dev_t           file_dev;
    const ino_t           file_ino;
    const int64_t         number; // that no other store has had

    std::atomic<int64_t>                   load{0};  // number of the load that may claim, 0: none
    std::unordered_set<const expert_ref *> claimed;  // by it, or by the last
    std::vector<ggml_backend_dev_t>        load_dev; // [layer] device that it computes the layer on, NULL: not claimed

    std::shared_ptr<expert_store> provided; // the provider's share
    std::atomic<int64_t>          n_reads_ended{0};
    std::atomic<const char *>     gone{nullptr}; // why nothing of the provider may be touched any more

    mutable std::mutex                         mutex; // guards what follows, and the slots
    std::condition_variable                    changed;
    std::vector<ggml_backend_buffer_ptr>       staging;
    std::vector<std::unique_ptr<expert_arena>> arenas;
    std::vector<char>                          slot_checked; // [slot] the digest of what is in it was compared when it was read
    std::vector<int32_t>                       slot_loads;   // [slot] how many experts were published in it
    std::vector<int32_t>                       of_prompt;    // [key] rows of the last prompt's batch of its layer
    std::vector<char>                          had_prompt;   // [layer] there was one
    bool                                       busy = false; // an op holds the store
    expert_op                                  op;
    expert_ahead                               ahead;
    int64_t                                    now = 0; // number of the last acquire
    expert_progress                            progress;
    expert_trace                               no_trace;
    expert_trace *                             trace = &no_trace; // the provider's, or that: nobody wants one
    std::string                                broken;            // why the next op fails: bytes were handed out wrong

    expert_loader  loader{layers, tables, *this}; // the last members: their threads use the others
    expert_planner planner;
    int64_t        planned_at   = 0; // number of the acquire
    int64_t        planned_hits = 0; // in host memory, until then

    expert_books(const struct stat & file, const expert_layer * layers, int32_t n_layers, const expert_tables & tables,
        const expert_provider & provider) :
        expert_store(layers, n_layers, tables), provider(provider), file_dev(file.st_dev), file_ino(file.st_ino),
        number(++n_made), slot_checked(n_keys(), 0), slot_loads(n_keys(), 0), of_prompt(n_keys(), 0), had_prompt(n_layers, 0) {}
    ~expert_books();

    inline static std::atomic<int64_t> n_made{0}; // in this process and in those that forked it

    bool is_of(const struct stat & file) const { return file_dev == file.st_dev && file_ino == file.st_ino; }
    void fail(const std::string & why) {
        op.error  = why;
        op.failed = true;
    }
    void count_wait(std::chrono::steady_clock::time_point start);

    bool read_ended(int32_t layer, int32_t expert);

    char * host_slot(int32_t slot) override;
    char * transit(int32_t layer, int32_t slot) override;
    bool   copy(int32_t slot, uint64_t offset, const void * bytes, uint64_t n_bytes) override;
    bool   copy_to(int32_t slot, char * dest, const void * bytes, uint64_t n_bytes) override;
    void   publish(int32_t layer, int32_t expert, int32_t slot, char * copy, bool checked) override;
    void   ask_provider(int32_t layer, int32_t expert, int32_t slot) override;
};

inline expert_books *       expert_books_of(expert_store * store) { return static_cast<expert_books *>(store); }
inline const expert_books * expert_books_of(const expert_store * store) { return static_cast<const expert_books *>(store); }

extern std::mutex expert_opening; // held while an arena is opened: two contexts may come first

// In range, and none there yet.
bool               expert_are_new_slots(const expert_books * books, const int32_t * slots, int32_t n_slots);
ggml_backend_dev_t expert_device_by_name(const expert_books * books, const char * name);
// NULL if the device has none. Takes the lock.
expert_arena * expert_find_arena(expert_books * books, ggml_backend_dev_t dev);

// Waits until these slots' memory is there. Not NULL: of these host slots one can't be had. Without the lock, which the
// fetching thread needs not: slots are added before, and by no other thread.
expert_host_slots * expert_refused(expert_books * books, const std::vector<int32_t> & slots);

// Chooses slots for the op's missing experts, as many as fit, and starts their reads. Under the lock, which is given back
// meanwhile: the provider may take long. False and the store's error if there are no slots.
bool expert_fetch_missing(expert_books * books, std::unique_lock<std::mutex> & lock);
// What was read ahead and the op does not need has slots that it may need: if it will fetch anything, it waits for that. Before
// the acquire is counted: what then is where must not depend on when reads end. With the store taken.
void expert_wait_for_guesses(expert_books * books, std::unique_lock<std::mutex> & lock);
// Somebody has interrupted the computation on this thread.
bool expert_is_cancelled();
// The op waits for what was read ahead of what it has to do. Under the lock.
void expert_adopt_reads_ahead(expert_books * books);
void expert_wait_for_reads_ahead(expert_store * store);
// All experts leave whose digest was not compared when they were read. With the store taken, its lock held and no read
// under way.
void expert_drop_unchecked(expert_books * books);
