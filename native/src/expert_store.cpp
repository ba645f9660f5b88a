// Registration, arenas and the end of reads: the provider's side of the ABI.
//
// A store belongs to the thread that made it until its model is loaded: only loads on that thread claim weights, and the
// thread keeps the store alive for them. It belongs to the process that made it: a forked child has none of its threads.
#include "expert_store.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

static thread_local std::string last_error;

static const char * const CLOSED = "the expert pack of this model is closed";
static const char * const FORKED = "this model was opened by the process that forked this one, whose reads this one has not";

static std::mutex opening;        // an arena: two contexts may come first
static std::mutex registry_mutex; // guards the next one
// All that are not yet deleted. Never destroyed itself: threads may still look when the process ends.
static std::vector<expert_store *> & registry = *new std::vector<expert_store *>;

struct unref {
    void operator()(expert_store * store) const { expert_store_unref(store); }
};

// Made on this thread, their models perhaps not yet loaded.
static thread_local std::vector<std::unique_ptr<expert_store, unref>> made_here;

static std::atomic<int64_t> n_reads_ended{0};
static std::atomic<bool>    made_any{false}; // a store, in this process or in the one that forked it

void expert_set_last_error(const char * format, ...) {
    char    text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    last_error = text;
}

const char * expert_last_error(void) { return last_error.c_str(); }
int32_t      expert_abi_version(void) { return EXPERT_ABI_VERSION; }
void         expert_count(int64_t * counter, int64_t n) { __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }

expert_arena::~expert_arena() {
    backend_state.reset();
    if (buffer) {
        ggml_backend_buffer_free(buffer);
    } else if (base) {
        munmap(base, size);
    }
}

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

// ---- registration

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
    for (const expert_store * store : registry) {
        n += store->op.n_in_flight;
    }
    *n_ended = n_reads_ended;
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
    new (&opening) std::mutex;
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

int expert_store_trace(expert_store * store, expert_trace * trace) {
    if (store->gone) { // its buffered records are the parent's
        return 1;
    }
    std::lock_guard<std::mutex> lock(store->mutex);
    const bool                  ok = !store->trace || expert_trace_end(*store->trace, store->tables.counters);
    store->trace                   = trace;
    if (trace) {
        expert_trace_begin(*trace);
    }
    return ok;
}

int32_t      expert_store_n_claimed(const expert_store * store) { return store->n_claimed; }
const char * expert_store_error(const expert_store * store) {
    static thread_local std::string copy; // another context may fail meanwhile
    std::lock_guard<std::mutex>     lock(const_cast<expert_store *>(store)->mutex);
    copy = store->error;
    return copy.c_str();
}

// ---- arenas

static ggml_backend_dev_t device_by_name(const expert_store * store, const char * name) {
    for (ggml_backend_dev_t dev : store->layer_dev) {
        if (dev && strcmp(ggml_backend_dev_name(dev), name) == 0) {
            return dev;
        }
    }
    expert_set_last_error("no expert layer is computed on a device %s", name);
    return nullptr;
}

static bool is_host(ggml_backend_dev_t dev) { return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; }

static bool allocate_host(expert_arena & arena) {
    void * base = mmap(nullptr, arena.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        expert_set_last_error("the expert cache of %llu bytes can't be allocated in memory: %s; lower expert_cache",
            (unsigned long long) arena.size, strerror(errno));
        return false;
    }
    madvise(base, arena.size, MADV_HUGEPAGE); // fewer pages to pin for each direct read; not available everywhere
    // a forked child gets zeros: to share pages that direct reads write to would let them land in either process
    madvise(base, arena.size, MADV_WIPEONFORK);
    arena.base = (char *) base;
    return true;
}

// Through ggml's own allocator: one CUDA runtime, correct accounting.
static bool allocate_device(expert_arena & arena) {
    const uint64_t tail = 64 * 1024; // kernels read a little past a row's end
    arena.buffer        = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(arena.dev), arena.size + tail);
    if (!arena.buffer) {
        size_t free  = 0;
        size_t total = 0;
        ggml_backend_dev_memory(arena.dev, &free, &total);
        expert_set_last_error("the expert cache of %llu MiB can't be allocated on %s, which has %zu of %zu MiB free: lower "
                              "expert_cache or raise expert_cache_reserve",
            (unsigned long long) (arena.size >> 20), ggml_backend_dev_name(arena.dev), free >> 20, total >> 20);
        return false;
    }
    ggml_backend_buffer_set_usage(arena.buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(arena.buffer, 0); // NaN times zero is NaN: padding must not hold leftovers
    arena.base = (char *) ggml_backend_buffer_get_base(arena.buffer);
    return true;
}

// Buffers for reads on their way to a device.
static bool allocate_staging(expert_store * store, ggml_backend_dev_t dev, int * pinned) {
    uint64_t buffer_bytes = 0;
    for (const expert_layer & layer : store->layers) {
        buffer_bytes = std::max(buffer_bytes, layer.block_bytes);
    }
    ggml_backend_buffer_type_t host_buft = ggml_backend_dev_host_buffer_type(dev);
    const uint64_t             page      = 4096; // direct reads need whole pages; small pinned allocations may start anywhere
    const uint64_t             n_bytes   = buffer_bytes * store->tables.n_reads + page;
    ggml_backend_buffer_t      buffer    = host_buft ? ggml_backend_buft_alloc_buffer(host_buft, n_bytes) : nullptr;
    // a backend that can't lock pages hands out an ordinary buffer of another type
    *pinned = buffer && ggml_backend_buffer_get_type(buffer) == host_buft;
    if (!buffer) {
        expert_set_last_error("%llu bytes of staging memory for %s can't be allocated: lower expert_stage_slots",
            (unsigned long long) n_bytes, ggml_backend_dev_name(dev));
        return false;
    }
    char * base = (char *) GGML_PAD((uintptr_t) ggml_backend_buffer_get_base(buffer), page);
    store->loader.add_buffers(dev, base, buffer_bytes, store->tables.n_reads);
    std::lock_guard<std::mutex> lock(store->mutex);
    store->staging.push_back(buffer);
    return true;
}

int expert_store_add_arena(expert_store * store, const char * device, uint64_t n_bytes, int32_t first_slot, int32_t n_slots,
    const uint64_t * offsets, void ** host, int * pinned) {
    *host       = nullptr;
    *pinned     = 1;
    auto arena  = std::make_unique<expert_arena>();
    arena->size = n_bytes;
    arena->dev  = device_by_name(store, device);
    if (!arena->dev || !(is_host(arena->dev) ? allocate_host(*arena) : allocate_device(*arena))) {
        return 0;
    }
    if (!is_host(arena->dev) && !allocate_staging(store, arena->dev, pinned)) {
        return 0;
    }
    std::lock_guard<std::mutex> lock(store->mutex);
    if (first_slot < 0 || n_slots <= 0 || (size_t) first_slot != store->slot_data.size()) {
        expert_set_last_error("slots of device %s must follow the %zu before: %d slots from %d", device, store->slot_data.size(),
            n_slots, first_slot);
        return 0;
    }
    for (int32_t i = 0; i < n_slots; i++) {
        store->slot_data.push_back(arena->base + offsets[i]);
        store->slot_arena.push_back(arena.get());
        store->slot_checked.push_back(0);
    }
    *host = is_host(arena->dev) ? arena->base : nullptr;
    store->arenas.push_back(std::move(arena));
    return 1;
}

static expert_arena * find_arena(expert_store * store, ggml_backend_dev_t dev) {
    std::lock_guard<std::mutex> lock(store->mutex);
    for (const auto & arena : store->arenas) {
        if (arena->dev == dev) {
            return arena.get();
        }
    }
    return nullptr;
}

static bool is_gone(const expert_store * store) {
    const char * why = store->gone;
    if (why) {
        expert_set_last_error("%s", why);
    }
    return why != nullptr;
}

static void trace_slots(expert_store * store, const std::vector<int32_t> & layers) {
    std::lock_guard<std::mutex> lock(store->mutex);
    if (store->trace) {
        for (int32_t layer : layers) {
            expert_trace_slots(*store->trace, layer, (int32_t) store->arenas.size() - 1, store->tables.layer_slots[layer]);
        }
    }
}

expert_arena * expert_store_open_arena(expert_store * store, ggml_backend_dev_t dev) {
    if (is_gone(store)) {
        return nullptr;
    }
    if (expert_arena * arena = find_arena(store, dev)) {
        return arena;
    }
    std::lock_guard<std::mutex> once(opening);
    if (expert_arena * arena = find_arena(store, dev)) {
        return arena;
    }
    std::vector<int32_t> layers;
    for (size_t l = 0; l < store->layers.size(); l++) {
        if (store->layer_dev[l] == dev) {
            layers.push_back((int32_t) l);
        }
    }
    const char * device = ggml_backend_dev_name(dev);
    size_t       free   = 0;
    size_t       total  = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    expert_count(&store->tables.counters[EXPERT_PROVIDER_CALLS], 1);
    expert_set_last_error("the provider could not open the expert cache on %s", device);
    if (!store->provider.open_arena(store->provider.user, device, free, layers.data(), (int32_t) layers.size())) {
        return nullptr;
    }
    trace_slots(store, layers);
    return find_arena(store, dev);
}

int expert_store_start(expert_store * store) {
    if (is_gone(store)) {
        return 0;
    }
    expert_store_loaded(store);
    for (ggml_backend_dev_t dev : store->layer_dev) {
        if (dev && !expert_store_open_arena(store, dev)) {
            return 0;
        }
    }
    return 1;
}

// ---- ends of reads

// False if no op waits for it: its fetch was given up.
static bool read_ended(expert_store * store, int32_t layer, int32_t expert) {
    expert_op & op = store->op;
    if (op.layer != layer || (size_t) expert >= op.in_flight.size() || !op.in_flight[expert]) {
        return false;
    }
    op.in_flight[expert] = 0;
    op.n_in_flight--;
    n_reads_ended++;
    store->changed.notify_all();
    return true;
}

char * expert_store_host_slot(expert_store * store, int32_t slot) {
    std::lock_guard<std::mutex> lock(store->mutex);
    const bool                  there = slot >= 0 && (size_t) slot < store->slot_data.size();
    return there && is_host(store->slot_arena[slot]->dev) ? store->slot_data[slot] : nullptr;
}

static bool copy_to_slot(expert_store * store, int32_t slot, uint64_t offset, const void * bytes, uint64_t n_bytes) {
    ggml_backend_dev_t dev   = nullptr;
    char *             place = nullptr;
    {
        std::lock_guard<std::mutex> lock(store->mutex);
        if (slot < 0 || (size_t) slot >= store->slot_data.size()) {
            return false;
        }
        dev   = store->slot_arena[slot]->dev;
        place = store->slot_data[slot] + offset;
    }
    ggml_backend_reg_t reg  = ggml_backend_dev_backend_reg(dev);
    const auto         copy = (expert_copy_t) ggml_backend_reg_get_proc_address(reg, EXPERT_COPY_PROC);
    return copy && copy(place, bytes, n_bytes);
}

bool expert_store_write(expert_store * store, int32_t slot, uint64_t offset, const void * bytes, uint64_t n_bytes) {
    expert_count(&store->tables.counters[EXPERT_H2D_BYTES], (int64_t) n_bytes);
    return copy_to_slot(store, slot, offset, bytes, n_bytes);
}

bool expert_store_written(expert_store * store, int32_t slot) { return copy_to_slot(store, slot, 0, nullptr, 0); }

int expert_store_fill(expert_store * store, int32_t slot, const void * bytes, uint64_t n_bytes) {
    return expert_store_write(store, slot, 0, bytes, n_bytes) && expert_store_written(store, slot);
}

void expert_store_publish(expert_store * store, int32_t layer, int32_t expert, int32_t slot, bool checked) {
    std::lock_guard<std::mutex> lock(store->mutex);
    store->slot_checked[slot]                                      = checked;
    store->tables.slot_of[store->layers[layer].first_key + expert] = slot;
    store->tables.counters[EXPERT_LOADS]++;
    read_ended(store, layer, expert);
}

void expert_store_commit(expert_store * store, int32_t layer, int32_t expert, int32_t slot) {
    expert_store_publish(store, layer, expert, slot, true);
}

void expert_store_drop_unchecked(expert_store * store) {
    const expert_tables & tables = store->tables;
    for (size_t slot = 0; slot < store->slot_checked.size(); slot++) {
        const int64_t key = tables.owner[slot];
        if (key < 0 || tables.slot_of[key] != (int32_t) slot || store->slot_checked[slot]) {
            continue;
        }
        tables.slot_of[key] = tables.place[key] = -1;
        tables.owner[slot]                      = -1;
        expert_count(&tables.counters[EXPERT_EVICTIONS], 1);
        store->slot_arena[slot]->touched = true; // the device's table must not name it
    }
}

void expert_store_fail(expert_store * store, int32_t layer, int32_t expert, const char * why) {
    std::lock_guard<std::mutex> lock(store->mutex);
    if (store->trace) {
        expert_trace_read_failed(*store->trace, layer, expert);
    }
    if (read_ended(store, layer, expert)) {
        store->op.failed = true;
        store->error     = why;
    }
}
