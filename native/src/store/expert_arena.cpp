// Arenas: the memory that slots lie in, of each device that computes experts.
#include "expert_books.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

std::mutex expert_opening;

expert_arena::~expert_arena() {
    if (base && !buffer) {
        munmap(base, size);
    }
}

bool expert_are_new_slots(const expert_books * books, const int32_t * slots, int32_t n_slots) {
    return n_slots > 0 && std::all_of(slots, slots + n_slots,
                              [&](int32_t slot) { return slot >= 0 && slot < books->n_keys() && !books->slot_arena[slot]; });
}

ggml_backend_dev_t expert_device_by_name(const expert_books * books, const char * name) {
    for (ggml_backend_dev_t dev : books->layer_dev) {
        if (dev && strcmp(ggml_backend_dev_name(dev), name) == 0) {
            return dev;
        }
    }
    expert_set_last_error("no expert layer is computed on a device %s", name);
    return nullptr;
}

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
    arena.buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(arena.dev), arena.size + tail));
    if (!arena.buffer) {
        size_t free  = 0;
        size_t total = 0;
        ggml_backend_dev_memory(arena.dev, &free, &total);
        expert_set_last_error("the expert cache of %llu MiB can't be allocated on %s, which has %zu of %zu MiB free: lower "
                              "expert_cache or raise expert_cache_reserve",
            (unsigned long long) (arena.size >> 20), ggml_backend_dev_name(arena.dev), free >> 20, total >> 20);
        return false;
    }
    ggml_backend_buffer_set_usage(arena.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(arena.buffer.get(), 0); // NaN times zero is NaN: padding must not hold leftovers
    arena.base = (char *) ggml_backend_buffer_get_base(arena.buffer.get());
    return true;
}

// Buffers for reads on their way to a device.
static bool allocate_staging(expert_books * books, ggml_backend_dev_t dev, int * pinned) {
    uint64_t buffer_bytes = 0;
    for (const expert_layer & layer : books->layers) {
        buffer_bytes = std::max(buffer_bytes, layer.block_bytes);
    }
    ggml_backend_buffer_type_t host_buft = ggml_backend_dev_host_buffer_type(dev);
    const uint64_t             page      = 4096; // direct reads need whole pages; small pinned allocations may start anywhere
    const uint64_t             n_bytes   = buffer_bytes * books->tables.n_reads + page;
    ggml_backend_buffer_ptr    buffer(host_buft ? ggml_backend_buft_alloc_buffer(host_buft, n_bytes) : nullptr);
    // a backend that can't lock pages hands out an ordinary buffer of another type
    *pinned = buffer && ggml_backend_buffer_get_type(buffer.get()) == host_buft;
    if (!buffer) {
        expert_set_last_error("%llu bytes of staging memory for %s can't be allocated: lower expert_stage_slots",
            (unsigned long long) n_bytes, ggml_backend_dev_name(dev));
        return false;
    }
    char * base = (char *) GGML_PAD((uintptr_t) ggml_backend_buffer_get_base(buffer.get()), page);
    books->loader.add_buffers(dev, base, buffer_bytes, books->tables.n_reads);
    std::lock_guard<std::mutex> lock(books->mutex);
    books->staging.push_back(std::move(buffer));
    return true;
}

int expert_store_add_arena(expert_store * store, const char * device, uint64_t n_bytes, const int32_t * slots,
    const uint64_t * offsets, int32_t n_slots, int * pinned) {
    *pinned              = 1;
    expert_books * books = expert_books_of(store);
    auto           arena = std::make_unique<expert_arena>();
    arena->size          = n_bytes;
    arena->dev           = expert_device_by_name(books, device);
    if (!arena->dev) {
        return 0;
    }
    if (!expert_are_new_slots(books, slots, n_slots)) {
        expert_set_last_error("the slots of device %s are not %d new ones of %d", device, n_slots, books->n_keys());
        return 0;
    }
    const bool is_host = ggml_backend_dev_type(arena->dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
    if (!(is_host ? allocate_host(*arena) : allocate_device(*arena) && allocate_staging(books, arena->dev, pinned))) {
        return 0;
    }
    std::lock_guard<std::mutex> lock(books->mutex);
    for (int32_t i = 0; i < n_slots; i++) {
        books->slot_data[slots[i]]  = arena->base + offsets[i];
        books->slot_arena[slots[i]] = arena.get();
    }
    books->arenas.push_back(std::move(arena));
    return 1;
}

expert_arena * expert_find_arena(expert_books * books, ggml_backend_dev_t dev) {
    std::lock_guard<std::mutex> lock(books->mutex);
    for (const auto & arena : books->arenas) {
        if (arena->dev == dev) {
            return arena.get();
        }
    }
    return nullptr;
}

static bool is_gone(const expert_books * books) {
    const char * why = books->gone;
    if (why) {
        expert_set_last_error("%s", why);
    }
    return why != nullptr;
}

expert_arena * expert_store_open_arena(expert_store * store, ggml_backend_dev_t dev) {
    expert_books * books = expert_books_of(store);
    if (is_gone(books)) {
        return nullptr;
    }
    if (expert_arena * arena = expert_find_arena(books, dev)) {
        return arena;
    }
    std::lock_guard<std::mutex> once(expert_opening);
    if (expert_arena * arena = expert_find_arena(books, dev)) {
        return arena;
    }
    std::vector<int32_t> layers;
    for (size_t l = 0; l < books->layers.size(); l++) {
        if (books->layer_dev[l] == dev) {
            layers.push_back((int32_t) l);
        }
    }
    const char * device = ggml_backend_dev_name(dev);
    size_t       free   = 0;
    size_t       total  = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    expert_count(&books->tables.counters[EXPERT_PROVIDER_CALLS], 1);
    expert_set_last_error("the provider could not open the expert cache on %s", device);
    if (!books->provider.open_arena(books->provider.user, device, free, layers.data(), (int32_t) layers.size())) {
        return nullptr;
    }
    std::unique_lock<std::mutex> lock(books->mutex);
    for (int32_t layer : layers) {
        expert_trace_slots(*books->trace, layer, (int32_t) books->arenas.size() - 1, books->tables.layer_slots[layer]);
    }
    lock.unlock();
    return expert_find_arena(books, dev);
}

static bool is_gpu(ggml_backend_dev_t dev) { return dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU; }

int expert_store_open_arenas(expert_store * store) {
    if (is_gone(expert_books_of(store)) || !expert_store_loaded(store)) {
        return 0;
    }
    std::vector<ggml_backend_dev_t> devices(store->layer_dev.begin(), store->layer_dev.end());
    std::stable_partition(devices.begin(), devices.end(), is_gpu); // what the CPU's layers get depends on there being one
    return std::all_of(
        devices.begin(), devices.end(), [&](ggml_backend_dev_t dev) { return !dev || expert_store_open_arena(store, dev); });
}
