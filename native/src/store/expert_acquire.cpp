// One MUL_MAT_ID of a store: wait for the store, count the acquire, fetch what is missing, hand out what is there in passes.
// In host memory reads go on while the threads compute; for a device a pass is as many experts as fit at once.
#include "expert_books.h"

#include <algorithm>
#include <thread>

static std::atomic<bool> interrupted{false};

static thread_local std::string failure; // why a computation on this thread has failed

// What this thread has computed of the store whose number it is: a graph is computed by one thread, and others may come
// between two of its roles.
static thread_local struct {
    int64_t               store = 0;
    std::vector<uint32_t> roles; // [layer] since the layer was last acquired
} seen;

static thread_local bool cancelled = false;

void expert_cancel(int on) { cancelled = on != 0; }
bool expert_is_cancelled() { return cancelled; }
void expert_interrupt(void) { interrupted = true; }
bool expert_interrupted(void) { return interrupted; }

static void note_prompt(expert_books * books, int32_t index, const int32_t * ids, int64_t n_rows) {
    const auto first = books->of_prompt.begin() + books->layers[index].first_key;
    std::fill(first, first + books->layers[index].n_expert, 0);
    for (int64_t i = 0; i < n_rows; i++) {
        first[ids[i]]++;
    }
    books->had_prompt[index] = 1;
}

// What is to be said of it, without the lock; mostly nothing.
static std::string count_acquire(expert_books * books, int32_t index, const std::vector<int32_t> & active, int64_t n_rows) {
    const expert_tables & tables = books->tables;
    expert_trace_acquire(*books->trace, index, active, n_rows, tables.layer_slots[index]);
    const int64_t     n_read = __atomic_load_n(&tables.counters[EXPERT_READ_BYTES], __ATOMIC_RELAXED);
    const std::string said   = books->progress.acquire(index, (int32_t) books->layers.size(), n_rows, n_read);
    const int64_t     now    = ++books->now;
    int64_t           n_hits = 0;
    int64_t           n_host = 0; // of these
    const bool        ahead  = books->ahead.layer == index;
    for (int32_t expert : active) {
        const int32_t key = books->layers[index].first_key + expert;
        tables.freq[key]++;
        tables.last_use[key] = now;
        const int32_t slot   = tables.slot_of[key];
        const bool    is_hit = slot >= 0 && !(ahead && books->ahead.fetched[expert]);
        n_hits += is_hit;
        n_host += is_hit && tables.in_place[slot];
    }
    if (ahead) {
        std::fill(books->ahead.fetched.begin(), books->ahead.fetched.end(), 0);
    }
    tables.counters[EXPERT_ACQUIRES]++;
    tables.counters[EXPERT_HITS] += n_hits;
    tables.counters[EXPERT_HOST_HITS] += n_host;
    tables.counters[EXPERT_HOST_BYTES] += n_host * (int64_t) books->layers[index].block_bytes;
    tables.counters[EXPERT_MISSES] += (int64_t) active.size() - n_hits;
    return said;
}

static void say_unlocked(const std::string & text, std::unique_lock<std::mutex> & lock) {
    if (!text.empty()) {
        lock.unlock();
        expert_say_progress(text.c_str());
        lock.lock();
    }
}

void expert_books::count_wait(std::chrono::steady_clock::time_point start) {
    tables.counters[EXPERT_WAIT_NS] +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

// A thread that feeds a device polls anyway; being woken takes as long as a part of a fast drive's read.
static void poll_for_reads(expert_books * books, std::unique_lock<std::mutex> & lock) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
    lock.unlock();
    while (books->op.n_in_flight > 0 && std::chrono::steady_clock::now() < until) {
        std::this_thread::yield();
    }
    lock.lock();
}

static void wait_for_reads(expert_books * books, std::unique_lock<std::mutex> & lock, bool all) {
    const auto start = std::chrono::steady_clock::now();
    if (!books->op.as_they_come) {
        poll_for_reads(books, lock);
    }
    const int32_t n = books->op.n_in_flight;
    books->changed.wait(lock, [&] { return books->op.n_in_flight == 0 || (!all && books->op.n_in_flight < n); });
    books->count_wait(start);
}

// Moves the resident experts of todo into this pass.
static bool hand_out(expert_books * books) {
    expert_op &     op      = books->op;
    const int32_t * slot_of = books->slot_of(op.layer);
    size_t          n_left  = 0;
    for (int32_t expert : op.todo) {
        if (slot_of[expert] >= 0) {
            op.data[expert] = books->slot_data[slot_of[expert]] + op.role_offset;
        } else {
            op.todo[n_left++] = expert;
        }
    }
    const bool any = n_left < op.todo.size();
    op.todo.resize(n_left);
    return any;
}

static void fail_op(expert_books * books, std::unique_lock<std::mutex> & lock) {
    wait_for_reads(books, lock, true); // nobody may write into a slot once the store is given back
    books->changed.wait(lock, [&] { return books->ahead.n_in_flight == 0; });
    if (books->loader.trust.take_broken()) {
        expert_drop_unchecked(books);
    }
    failure          = books->op.error;
    books->op.failed = true;
    books->op.todo.clear();
    books->tables.counters[EXPERT_FAILURES]++;
}

// A drive that was found to lie may have lied before.
static bool distrusts(expert_books * books) {
    if (books->loader.trust.is_broken() && !books->op.failed) {
        books->fail(books->loader.trust.reason());
    }
    return books->op.failed;
}

// The device waits: no kernel reads any more what the last pass read.
static void free_transits(expert_books * books) {
    for (const auto & arena : books->arenas) {
        if (!books->op.as_they_come && arena->dev == books->layer_dev[books->op.layer]) {
            for (auto & [pool, transit] : arena->transits) {
                transit.begin_pass();
            }
        }
    }
}

static void next_pass(expert_books * books, std::unique_lock<std::mutex> & lock) {
    expert_op & op = books->op;
    op.data.assign(books->layers[op.layer].n_expert, nullptr);
    free_transits(books);
    while (!op.todo.empty()) {
        if (interrupted || cancelled) {
            books->fail(interrupted ? "the server is shutting down" : "it was interrupted");
        }
        if (op.failed || !expert_fetch_missing(books, lock)) {
            fail_op(books, lock);
            return;
        }
        if (!op.as_they_come && op.n_in_flight > 0) {
            wait_for_reads(books, lock, true);
        }
        if (!distrusts(books) && hand_out(books)) {
            return;
        }
        wait_for_reads(books, lock, false);
    }
}

// Waits for the store, takes it and clears the last op. The op has failed if the tables may be no more: nothing is counted.
static std::unique_lock<std::mutex> take_store(expert_books * books, int32_t layer, uint64_t role_offset, int n_threads) {
    std::unique_lock<std::mutex> lock(books->mutex);
    books->changed.wait(lock, [&] { return !books->busy; });
    books->busy     = true;
    expert_op & op  = books->op;
    op.layer        = layer;
    op.role_offset  = role_offset;
    op.as_they_come = true;
    op.failed       = false;
    op.n_running    = n_threads;
    op.todo.clear();
    op.in_flight.assign(books->layers[layer].n_expert, 0);
    op.data.assign(books->layers[layer].n_expert, nullptr);
    if (books->gone) {
        books->fail(books->gone.load());
        failure = op.error;
    }
    return lock;
}

static bool ready_to_compute(expert_books * books, int32_t layer, std::unique_lock<std::mutex> & lock) {
    lock.unlock();
    const bool open = expert_store_open_arena(books, books->layer_dev[layer]) != nullptr;
    lock.lock();
    if (!books->broken.empty()) {
        books->fail(books->broken);
        books->broken.clear();
        fail_op(books, lock);
        return false;
    }
    if (!open || books->tables.layer_slots[layer] <= 0) {
        books->fail(open ? "the expert cache has no slots for this layer" : expert_last_error());
        fail_op(books, lock);
        return false;
    }
    return true;
}

// The layer's weights are computed one after another with the same experts: one acquire, counted at the first.
static bool is_first_role(expert_books * books, const expert_ref * ref) {
    if (seen.store != books->number) {
        seen.store = books->number;
        seen.roles.assign(books->layers.size(), 0);
    }
    uint32_t &     roles = seen.roles[ref->layer];
    const uint32_t bit   = 1u << ref->role;
    const bool     first = roles == 0 || (roles & bit) != 0;
    roles                = first ? bit : roles | bit;
    return first;
}

void expert_op_begin(const expert_ref * ref, const int64_t * rows, int n_threads, const int32_t * bad_id) {
    expert_books *               books = expert_books_of(ref->store);
    const expert_layer &         layer = books->layers[ref->layer];
    const expert_role &          role  = layer.roles[ref->role];
    std::unique_lock<std::mutex> lock  = take_store(books, ref->layer, role.offset, n_threads);
    expert_op &                  op    = books->op;
    if (op.failed) {
        return;
    }
    books->trace->implied = false; // a fetch that does not follow from an acquire of this op has a record of its own
    if (bad_id) {
        books->fail("the router of " + std::string(role.tensor) + " chose expert " + std::to_string(*bad_id) + " of " +
                    std::to_string(layer.n_expert));
        fail_op(books, lock);
        return;
    }
    if (!ready_to_compute(books, ref->layer, lock)) {
        return;
    }
    int64_t n_rows = 0;
    for (int32_t expert = 0; expert < layer.n_expert; expert++) {
        n_rows += rows[expert];
        if (rows[expert] > 0) {
            op.todo.push_back(expert);
        }
    }
    expert_wait_for_guesses(books, lock);
    if (is_first_role(books, ref)) {
        say_unlocked(count_acquire(books, ref->layer, op.todo, n_rows), lock);
    }
    expert_adopt_reads_ahead(books);
    next_pass(books, lock);
}

bool expert_layer_begin(
    expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows, const int32_t * ids) {
    expert_books *               books = expert_books_of(store);
    std::unique_lock<std::mutex> lock  = take_store(books, layer, 0, 1);
    if (books->op.failed || !ready_to_compute(books, layer, lock)) {
        return false;
    }
    books->op.as_they_come = false;
    books->op.todo         = experts;
    expert_wait_for_guesses(books, lock);
    if (n_rows > 0) {
        say_unlocked(count_acquire(books, layer, experts, n_rows), lock);
    }
    if (ids && expert_is_prompt(books->layers[layer], n_rows)) {
        note_prompt(books, layer, ids, n_rows);
    }
    expert_adopt_reads_ahead(books);
    next_pass(books, lock);
    return !books->op.failed;
}

void expert_layer_count(expert_store * store, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows) {
    expert_books *               books = expert_books_of(store);
    std::unique_lock<std::mutex> lock(books->mutex);
    say_unlocked(count_acquire(books, layer, experts, n_rows), lock);
}

const char * const * expert_op_data(const expert_ref * ref) { return expert_books_of(ref->store)->op.data.data(); }
bool                 expert_op_more(const expert_ref * ref) { return !expert_books_of(ref->store)->op.todo.empty(); }

void expert_op_next(const expert_ref * ref) {
    expert_books *               books = expert_books_of(ref->store);
    std::unique_lock<std::mutex> lock(books->mutex);
    next_pass(books, lock);
}

bool expert_op_end(const expert_ref * ref) {
    expert_books * books = expert_books_of(ref->store);
    const bool     ok    = !books->op.failed;
    if (--books->op.n_running == 0) { // the last thread frees the store for the next op
        std::lock_guard<std::mutex> lock(books->mutex);
        books->busy = false;
        books->changed.notify_all();
    }
    return ok;
}

// ---- errors of decodes

const char * expert_take_failure(void) {
    static thread_local std::string taken;
    taken.clear();
    taken.swap(failure);
    return taken.c_str();
}

void expert_store_set_error(expert_store * store, const std::string & why) {
    expert_books *              books = expert_books_of(store);
    std::lock_guard<std::mutex> lock(books->mutex);
    failure = why;
    if (!books->gone) {
        books->tables.counters[EXPERT_FAILURES]++;
    }
}

void expert_store_fail_next(expert_store * store, const std::string & why) {
    expert_books *              books = expert_books_of(store);
    std::lock_guard<std::mutex> lock(books->mutex);
    books->broken = why;
}
