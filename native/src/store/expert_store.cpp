// Arenas and the end of reads: the provider's side of the ABI.
#include "expert_store.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

static thread_local std::string last_error;

std::mutex expert_opening;

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
    std::lock_guard<std::mutex> once(expert_opening);
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
    store->n_reads_ended++;
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
