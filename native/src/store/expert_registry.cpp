// Which stores there are and whose they are: creation, claims of loads, references, the end, fork.
//
// A load belongs to the thread that began it, until its model is loaded: no load on another thread takes weights from the
// store, and the thread keeps the store alive for it. A store has one load at a time, as many models as want it, and belongs
// to the process that made it: a forked child has none of its threads.
#include "expert_books.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

static const char * const CLOSED = "the expert pack of this model is closed";
static const char * const FORKED = "this model was opened by the process that forked this one, whose reads this one has not";

static std::mutex registry_mutex; // guards the next one
// All that are not yet deleted. Never destroyed itself: threads may still look when the process ends.
static std::vector<expert_books *> & registry = *new std::vector<expert_books *>;

// A load that was begun on this thread.
struct load_here {
    std::shared_ptr<expert_books> books;
    int64_t                       number;

    bool ended() const { return books->load != number; }
};

static thread_local std::vector<load_here> loads_here;

expert_books::~expert_books() {
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry.erase(std::remove(registry.begin(), registry.end(), this), registry.end());
}

static bool is_valid(const expert_role & role, const expert_layer & layer) {
    return memchr(role.tensor, 0, sizeof(role.tensor)) != nullptr && role.type >= 0 && role.type < GGML_TYPE_COUNT &&
           role.ne[0] > 0 && role.ne[1] > 0 && role.ne[2] == layer.n_expert &&
           role.bytes == ggml_row_size((ggml_type) role.type, role.ne[0]) * role.ne[1] && role.bytes <= layer.block_bytes &&
           role.offset <= layer.block_bytes - role.bytes;
}

static bool layer_is_valid(const expert_layer & layer, int32_t index) {
    if (layer.n_expert <= 0 || layer.first_key < 0 || layer.n_roles <= 0 || layer.n_roles > EXPERT_MAX_ROLES) {
        expert_set_last_error("expert layer %d is described wrongly: %d experts, %d roles, first key %d", index, layer.n_expert,
            layer.n_roles, layer.first_key);
        return false;
    }
    for (int32_t r = 0; r < layer.n_roles; r++) {
        const expert_role & role = layer.roles[r];
        if (!is_valid(role, layer)) {
            expert_set_last_error("role %d of expert layer %d is described wrongly: %.*s, type %d, %lld x %lld x %lld, "
                                  "%llu bytes at %llu of %llu",
                r, index, (int) sizeof(role.tensor), role.tensor, role.type, (long long) role.ne[0], (long long) role.ne[1],
                (long long) role.ne[2], (unsigned long long) role.bytes, (unsigned long long) role.offset,
                (unsigned long long) layer.block_bytes);
            return false;
        }
    }
    return true;
}

static bool are_valid(const expert_provider & provider, const expert_tables & tables) {
    if (provider.abi_version != EXPERT_ABI_VERSION || provider.struct_size != sizeof(expert_provider)) {
        expert_set_last_error("the expert provider speaks ABI %u (%u bytes), the library ABI %d (%zu bytes): rebuild both "
                              "from one version",
            provider.abi_version, provider.struct_size, EXPERT_ABI_VERSION, sizeof(expert_provider));
        return false;
    }
    if (tables.n_reads < 1 || tables.n_parts < 1) {
        expert_set_last_error("%d reads at the same time in %d parts: both must be 1 at least", tables.n_reads, tables.n_parts);
        return false;
    }
    return true;
}

// The last reference frees the store.
static void forget_loads_that_ended() {
    loads_here.erase(
        std::remove_if(loads_here.begin(), loads_here.end(), [](const auto & load) { return load.ended(); }), loads_here.end());
}

static bool begin_load(const std::shared_ptr<expert_books> & books) {
    static std::atomic<int64_t> n_loads{0};
    const int64_t               number = ++n_loads;
    int64_t                     none   = 0;
    forget_loads_that_ended();
    if (!books->load.compare_exchange_strong(none, number)) {
        expert_set_last_error("another model of the same file is being loaded with its expert pack: wait until it is loaded");
        return false;
    }
    books->claimed.clear();
    books->load_dev.assign(books->layers.size(), nullptr);
    loads_here.push_back({books, number});
    return true;
}

static bool add_refs(expert_store & store) {
    for (size_t l = 0; l < store.layers.size(); l++) {
        for (int32_t r = 0; r < store.layers[l].n_roles; r++) {
            const char * tensor = store.layers[l].roles[r].tensor;
            if (!store.refs.emplace(tensor, expert_ref{&store, (int32_t) l, r}).second) {
                expert_set_last_error("%s is described twice", tensor);
                return false;
            }
        }
    }
    return true;
}

static bool add_to_registry(expert_books * books, const char * model_path, const struct stat & file) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    for (const expert_books * other : registry) {
        if (!other->gone && other->is_of(file)) {
            expert_set_last_error("%s: is already open with an expert pack in this process: close that one first", model_path);
            return false;
        }
    }
    registry.push_back(books);
    return true;
}

expert_store * expert_store_create(const char * model_path, const expert_layer * layers, int32_t n_layers,
    const expert_tables * tables, const expert_provider * provider) {
    struct stat file;
    if (!are_valid(*provider, *tables)) {
        return nullptr;
    }
    if (stat(model_path, &file) != 0) {
        expert_set_last_error("%s: can't be opened: %s", model_path, strerror(errno));
        return nullptr;
    }
    for (int32_t l = 0; l < n_layers; l++) {
        if (!layer_is_valid(layers[l], l)) {
            return nullptr;
        }
    }
    const std::shared_ptr<expert_books> books(
        new expert_books(file, layers, n_layers, *tables, *provider), [](expert_books * last) {
            if (last->gone != FORKED) { // that one's threads can't be joined
                delete last;
            }
        });
    if (!add_refs(*books) || !add_to_registry(books.get(), model_path, file) || !begin_load(books)) {
        return nullptr;
    }
    books->provided = books;
    return books.get();
}

expert_store * expert_store_find(int fd) {
    struct stat file;
    if (loads_here.empty() || fstat(fd, &file) != 0) {
        return nullptr;
    }
    for (const load_here & load : loads_here) {
        if (!load.ended() && load.books->is_of(file)) {
            return load.books.get();
        }
    }
    return nullptr;
}

bool expert_store_claim(const expert_ref & ref, ggml_backend_dev_t dev) {
    expert_books * books = expert_books_of(ref.store);
    if (!books->claimed.insert(&ref).second) { // memory fitting loads the model several times, without its weights
        books->claimed = {&ref};
        books->load_dev.assign(books->layers.size(), nullptr);
    }
    ggml_backend_dev_t & load_dev = books->load_dev[ref.layer];
    if (load_dev && load_dev != dev) {
        expert_set_last_error("%s would be computed on %s and other experts of its layer on %s: put the layer on one device",
            books->layers[ref.layer].roles[ref.role].tensor, ggml_backend_dev_name(dev), ggml_backend_dev_name(load_dev));
        return false;
    }
    load_dev = dev;
    return true;
}

int32_t expert_store_n_claimed(const expert_store * store) { return (int32_t) expert_books_of(store)->claimed.size(); }

const char * expert_store_device(const expert_store * store, int32_t layer) {
    ggml_backend_dev_t dev = layer >= 0 && layer < (int32_t) store->layers.size() ? store->layer_dev[layer] : nullptr;
    return dev ? ggml_backend_dev_name(dev) : nullptr;
}

// Where a layer has slots, other models compute with it, perhaps now: nothing of it is written.
static bool settle_devices(expert_books * books) {
    for (size_t l = 0; l < books->layers.size(); l++) {
        ggml_backend_dev_t dev = books->load_dev[l];
        if (dev && books->tables.layer_slots[l] > 0 && books->layer_dev[l] != dev) {
            expert_set_last_error("the model that is open already computes %s on %s, this one would on %s: load both with the "
                                  "same n_gpu_layers and devices, or close the other one first",
                books->layers[l].roles[0].tensor, ggml_backend_dev_name(books->layer_dev[l]), ggml_backend_dev_name(dev));
            return false;
        }
    }
    for (size_t l = 0; l < books->layers.size(); l++) {
        if (books->load_dev[l] && books->layer_dev[l] != books->load_dev[l]) {
            books->layer_dev[l] = books->load_dev[l];
        }
    }
    return true;
}

int expert_store_begin_load(expert_store * store) {
    expert_books * books = expert_books_of(store);
    if (books->gone) {
        expert_set_last_error("%s", books->gone.load());
        return 0;
    }
    return begin_load(std::static_pointer_cast<expert_books>(store->shared_from_this()));
}

int expert_store_loaded(expert_store * store) {
    const bool ok = expert_books_of(store)->load == 0 || settle_devices(expert_books_of(store));
    expert_store_not_loaded(store);
    return ok;
}

void expert_store_not_loaded(expert_store * store) {
    expert_books_of(store)->load = 0;
    forget_loads_that_ended();
}

int expert_store_trace(expert_store * store, expert_trace * trace) {
    expert_books * books = expert_books_of(store);
    if (books->gone) { // its buffered records are the parent's
        return 1;
    }
    std::lock_guard<std::mutex> lock(books->mutex);
    const bool                  none = books->trace == &books->no_trace;
    const bool                  ok   = none || expert_trace_end(*books->trace, books->tables.counters);
    books->trace                     = trace ? trace : &books->no_trace;
    expert_trace_begin(*books->trace);
    return ok;
}

void expert_store_free(expert_store * store) {
    if (!store || expert_books_of(store)->gone) {
        return;
    }
    const std::shared_ptr<expert_store> last = std::move(expert_books_of(store)->provided);
    expert_wait_for_reads_ahead(store); // what fails asks the provider
    expert_store_trace(store, nullptr); // while the provider's counters are alive
    {
        std::lock_guard<std::mutex> lock(registry_mutex);
        expert_books_of(store)->gone = CLOSED;
    }
    expert_books_of(store)->planner.stop(); // its callback is the provider's
    expert_store_not_loaded(store);
}

int32_t expert_abi_version(void) { return EXPERT_ABI_VERSION; }

int32_t expert_reads_under_way(int64_t * n_ended) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    int32_t                     n = 0;
    *n_ended                      = 0;
    for (const expert_books * books : registry) {
        n += books->op.n_in_flight + books->ahead.n_in_flight;
        *n_ended += books->n_reads_ended;
    }
    return n;
}

// ---- fork: the registry is whole in the child, and no store of the parent is used there

// C++'s and CUDA's destructors at the end of a process would join and free what lives in the parent only.
static void end_without_destructors(int status, void *) {
    fflush(nullptr);
    _exit(status);
}

static void forget_all_in_child() {
    if (expert_books::n_made > 0) {
        on_exit(end_without_destructors, nullptr); // the last that is registered is the first to run
    }
    // a thread that is not here may have held a lock, and been in the middle of what it guards
    new (&expert_opening) std::mutex;
    for (expert_books * books : registry) {
        books->gone = FORKED;
        books->load = 0;
        books->busy = false;
        new (&books->mutex) std::mutex;
        new (&books->changed) std::condition_variable;
        new (&books->op) expert_op;
        new (&books->ahead) expert_ahead;
        new (&books->broken) std::string;
    }
    registry.clear();
    registry_mutex.unlock();
}

[[maybe_unused]] static const int fork_is_watched =
    pthread_atfork([] { registry_mutex.lock(); }, [] { registry_mutex.unlock(); }, forget_all_in_child);
