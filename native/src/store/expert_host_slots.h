// Slots in host memory that a device's kernels read in place. Internal to native/src/store.
#pragma once

#include "expert_hooks.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <future>
#include <vector>

extern uint64_t expert_host_chunk_bytes; // about 0.1 s of one thread's page faults; tests make it small

// A range of slots of one size. Their memory is page-locked in chunks of whole slots: when the first slot of a chunk is about to
// be filled, and the chunk behind it meanwhile. So a start costs nothing, and a short run locks little.
//
// One thread at a time calls it.
class expert_host_slots {
public:
    const int32_t first;
    const int32_t n;

    // lock: of the device that has an arena at `device_memory`. may_take: whether the machine has so many bytes left.
    expert_host_slots(int32_t first, int32_t n, uint64_t slot_bytes, expert_lock_t lock, const void * device_memory,
        std::function<bool(uint64_t n_bytes)> may_take);
    ~expert_host_slots();

    // Address space for all. False: there is none.
    bool   reserve();
    char * data(int32_t slot) const;
    // It will be asked for, with those before it: their memory is got together.
    void expect(int32_t slot) { expected = std::max(expected, (size_t) chunk_of(slot)); }
    // Waits until the slot's memory is there. False: it can't be had, and nothing that was not there before.
    bool prepare(int32_t slot);
    // The slots whose memory is not there: after prepare() has failed.
    std::vector<int32_t> missing();

private:
    int32_t  chunk_of(int32_t slot) const { return (slot - first) / per_chunk; }
    uint64_t chunk_bytes(int32_t chunk) const;
    char *   chunk_data(int32_t chunk) const { return base + chunk * stride; }
    void     start(size_t chunk);
    bool     touch_and_lock(int32_t chunk) const;

    const uint64_t                        slot_bytes;
    const int32_t                         per_chunk; // slots
    const uint64_t                        stride;    // bytes from chunk to chunk
    const expert_lock_t                   lock;
    const void * const                    device_memory;
    const std::function<bool(uint64_t)>   may_take;
    char *                                base     = nullptr;
    uint64_t                              size     = 0;
    bool                                  ended    = false; // a chunk could not be had: no more is asked for
    size_t                                expected = 0;     // chunk, and those before it
    std::vector<std::shared_future<bool>> chunks;           // those that were asked for: whether they are there
};
