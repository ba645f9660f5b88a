#include "expert_host_slots.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

uint64_t expert_host_chunk_bytes = 256ull << 20;

static const uint64_t TAIL_BYTES = 64 * 1024; // kernels read a little past a row's end: of locked memory
static const uint64_t PAGE_BYTES = 4096;
static const int      N_TOUCHING = 4; // threads for a chunk: each fault zeroes a page
static const size_t   N_AT_ONCE  = 4; // chunks

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif

expert_host_slots::expert_host_slots(int32_t first, int32_t n, uint64_t slot_bytes, expert_lock_t lock,
    const void * device_memory, std::function<bool(uint64_t)> may_take) :
    first(first), n(n), slot_bytes(slot_bytes), per_chunk((int32_t) std::max<uint64_t>(1, expert_host_chunk_bytes / slot_bytes)),
    stride(per_chunk * slot_bytes + TAIL_BYTES), lock(lock), device_memory(device_memory), may_take(std::move(may_take)) {}

expert_host_slots::~expert_host_slots() {
    for (size_t i = 0; i < chunks.size(); i++) {
        if (chunks[i].get()) {
            lock(device_memory, chunk_data((int32_t) i), 0);
        }
    }
    if (base) {
        munmap(base, size);
    }
}

bool expert_host_slots::reserve() {
    size        = (uint64_t) (chunk_of(first + n - 1) + 1) * stride;
    void * area = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) {
        return false;
    }
    madvise(area, size, MADV_HUGEPAGE); // fewer page faults; not available everywhere
    madvise(area, size, MADV_DONTFORK); // pages that a device knows by their place must not be copied for a child
    base = (char *) area;
    return true;
}

char * expert_host_slots::data(int32_t slot) const {
    return chunk_data(chunk_of(slot)) + (uint64_t) ((slot - first) % per_chunk) * slot_bytes;
}

uint64_t expert_host_slots::chunk_bytes(int32_t chunk) const {
    return (uint64_t) std::min(per_chunk, n - chunk * per_chunk) * slot_bytes + TAIL_BYTES;
}

// Page faults are what takes long, 1.7 GiB/s a thread; locking pages that are there runs at 26 GiB/s.
static bool touch(char * bytes, uint64_t n_bytes) {
    if (madvise(bytes, n_bytes, MADV_POPULATE_WRITE) == 0) {
        return true;
    }
    if (errno != EINVAL) {
        return false;
    }
    for (uint64_t i = 0; i < n_bytes; i += PAGE_BYTES) {
        ((volatile char *) bytes)[i] = 0;
    }
    return true;
}

bool expert_host_slots::touch_and_lock(int32_t chunk) const {
    char * const   bytes   = chunk_data(chunk);
    const uint64_t n_bytes = chunk_bytes(chunk);
    const uint64_t piece   = (n_bytes / N_TOUCHING + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    bool           ok      = true;
    {
        std::vector<std::future<bool>> touching;
        for (uint64_t at = piece; at < n_bytes; at += piece) {
            touching.push_back(
                std::async(std::launch::async | std::launch::deferred, touch, bytes + at, std::min(piece, n_bytes - at)));
        }
        ok = touch(bytes, std::min(piece, n_bytes));
        for (auto & part : touching) {
            ok = part.get() && ok;
        }
    }
    ok = ok && lock(device_memory, bytes, n_bytes);
    if (!ok) {
        madvise(bytes, n_bytes, MADV_DONTNEED); // memory is short
    }
    return ok;
}

void expert_host_slots::start(size_t chunk) {
    if (ended || chunk != chunks.size() || (int32_t) chunk * per_chunk >= n) {
        return;
    }
    uint64_t n_bytes = chunk_bytes((int32_t) chunk);
    for (size_t i = 0; i < chunks.size(); i++) { // those on their way are not taken yet
        n_bytes += chunks[i].wait_for(std::chrono::seconds(0)) == std::future_status::ready ? 0 : chunk_bytes((int32_t) i);
    }
    ended = !may_take(n_bytes);
    if (!ended) { // on a thread of its own if the system has one
        chunks.push_back(std::async(std::launch::async | std::launch::deferred, [=] { return touch_and_lock((int32_t) chunk); }));
    }
}

bool expert_host_slots::prepare(int32_t slot) {
    const size_t chunk = chunk_of(slot);
    const size_t last  = std::max(chunk, std::min(expected, chunk + N_AT_ONCE - 1));
    while (chunks.size() <= last && !ended) {
        start(chunks.size());
    }
    const bool there = chunk < chunks.size() && chunks[chunk].get();
    ended            = ended || !there;
    if (there) {
        start(chunk + 1);
    }
    return there;
}

std::vector<int32_t> expert_host_slots::missing() {
    std::vector<int32_t> slots;
    for (int32_t i = 0; i < n; i++) {
        const size_t chunk = i / per_chunk;
        if (chunk >= chunks.size() || !chunks[chunk].get()) {
            slots.push_back(first + i);
        }
    }
    return slots;
}
