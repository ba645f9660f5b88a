// Which stores there are and whose they are: creation, claims of loads, references, the end, fork.
//
// A store belongs to the thread that made it until its model is loaded: only loads on that thread claim weights, and the
// thread keeps the store alive for them. It belongs to the process that made it: a forked child has none of its threads.
#include "expert_store.h"

#include <pthread.h>
#include <sys/stat.h>
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
static std::vector<expert_store *> & registry = *new std::vector<expert_store *>;

struct unref {
    void operator()(expert_store * store) const { expert_store_unref(store); }
};

// Made on this thread, their models perhaps not yet loaded.
static thread_local std::vector<std::unique_ptr<expert_store, unref>> made_here;

static std::atomic<bool> made_any{false}; // a store, in this process or in the one that forked it

expert_store::~expert_store() {
    {
        std::lock_guard<std::mutex> lock(registry_mutex);
        registry.erase(std::remove(registry.begin(), registry.end(), this), registry.end());
    }
    readers.stop();
    arenas.clear();
    for (ggml_backend_buffer_t buffer : staging) {
        ggml_backend_buffer_free(buffer);
    }
}

static bool layer_is_valid(const expert_layer & layer, int32_t index) {
    if (layer.n_expert <= 0 || layer.first_key < 0 || layer.n_roles <= 0 || layer.n_roles > EXPERT_MAX_ROLES) {
        expert_set_last_error("expert layer %d is described wrongly: %d experts, %d roles, first key %d", index, layer.n_expert,
            layer.n_roles, layer.first_key);
        return false;
    }
    for (int32_t r = 0; r < layer.n_roles; r++) {
        const expert_role & role = layer.roles[r];
        if (memchr(role.tensor, 0, sizeof(role.tensor)) == nullptr || role.type < 0 || role.type >= GGML_TYPE_COUNT ||
            role.ne[0] <= 0 || role.ne[1] <= 0 || role.ne[2] != layer.n_expert ||
            role.bytes != ggml_row_size((ggml_type) role.type, role.ne[0]) * role.ne[1] || role.bytes > layer.block_bytes ||
            role.offset > layer.block_bytes - role.bytes) {
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

// Not while another load may use them: the last reference frees the store.
static void forget_loads_that_ended() {
    made_here.erase(
        std::remove_if(made_here.begin(), made_here.end(), [](const auto & store) { return !store->loading; }), made_here.end());
}

expert_store * expert_store_create(const char * model_path, const expert_layer * layers, int32_t n_layers,
    const expert_tables * tables, const expert_provider * provider) {
    if (provider->abi_version != EXPERT_ABI_VERSION || provider->struct_size != sizeof(expert_provider)) {
        expert_set_last_error("the expert provider speaks ABI %u (%u bytes), the library ABI %d (%zu bytes): rebuild both "
                              "from one version",
            provider->abi_version, provider->struct_size, EXPERT_ABI_VERSION, sizeof(expert_provider));
        return nullptr;
    }
    if (tables->n_reads < 1 || tables->n_parts < 1) {
        expert_set_last_error("%d reads at the same time in %d parts: both must be 1 at least", tables->n_reads, tables->n_parts);
        return nullptr;
    }
    struct stat st;
    if (stat(model_path, &st) != 0) {
        expert_set_last_error("%s: can't be opened: %s", model_path, strerror(errno));
        return nullptr;
    }

    auto store      = std::make_unique<expert_store>();
    store->file_dev = st.st_dev;
    store->file_ino = st.st_ino;
    store->layers.assign(layers, layers + n_layers);
    store->tables   = *tables;
    store->provider = *provider;
    store->layer_dev.assign(n_layers, nullptr);
    store->roles_seen.assign(n_layers, 0);
    for (int32_t l = 0; l < n_layers; l++) {
        if (!layer_is_valid(layers[l], l)) {
            return nullptr;
        }
        for (int32_t r = 0; r < layers[l].n_roles; r++) {
            if (!store->refs.emplace(layers[l].roles[r].tensor, expert_ref{store.get(), l, r}).second) {
                expert_set_last_error("%s is described twice", layers[l].roles[r].tensor);
                return nullptr;
            }
        }
    }

    const expert_layer & last = store->layers.back(); // there is one: an empty pack is refused
    store->trust.watch(tables->blocks, (size_t) last.first_key + last.n_expert, tables->recheck != 0);

    forget_loads_that_ended();
    std::lock_guard<std::mutex> lock(registry_mutex);
    for (const expert_store * other : registry) {
        if (!other->gone && other->file_dev == st.st_dev && other->file_ino == st.st_ino) {
            expert_set_last_error("%s: is already open with an expert pack in this process: close that one first", model_path);
            return nullptr;
        }
    }
    made_here.emplace_back(store.get());
    expert_store_ref(store.get());
    registry.push_back(store.get());
    made_any = true;
    return store.release();
}

expert_store * expert_store_find(int fd) {
    struct stat st;
    if (made_here.empty() || fstat(fd, &st) != 0) {
        return nullptr;
    }
    for (const auto & store : made_here) {
        if (store->loading && store->file_dev == st.st_dev && store->file_ino == st.st_ino) {
            return store.get();
        }
    }
    return nullptr;
}

void expert_store_ref(expert_store * store) { store->n_refs++; }

void expert_store_unref(expert_store * store) {
    if (--store->n_refs == 0 && store->gone != FORKED) { // that one's threads can't be joined
        delete store;
    }
}

void expert_store_loaded(expert_store * store) {
    store->loading = false;
    forget_loads_that_ended();
}

void expert_store_free(expert_store * store) {
    if (!store || store->gone) {
        return;
    }
    expert_store_trace(store, nullptr); // while the provider's counters are alive
    {
        std::lock_guard<std::mutex> lock(registry_mutex);
        store->gone = CLOSED;
    }
    expert_store_loaded(store);
    expert_store_unref(store);
}

int32_t expert_reads_under_way(int64_t * n_ended) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    int32_t                     n = 0;
    *n_ended                      = 0;
    for (const expert_store * store : registry) {
        n += store->op.n_in_flight;
        *n_ended += store->n_reads_ended;
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
    if (made_any) {
        on_exit(end_without_destructors, nullptr); // the last that is registered is the first to run
    }
    // a thread that is not here may have held a lock, and been in the middle of what it guards
    new (&expert_opening) std::mutex;
    for (expert_store * store : registry) {
        store->gone    = FORKED;
        store->loading = false;
        store->busy    = false;
        new (&store->mutex) std::mutex;
        new (&store->changed) std::condition_variable;
        new (&store->op) expert_op;
        new (&store->error) std::string;
    }
    registry.clear();
    registry_mutex.unlock();
}

[[maybe_unused]] static const int fork_is_watched =
    pthread_atfork([] { registry_mutex.lock(); }, [] { registry_mutex.unlock(); }, forget_all_in_child);
