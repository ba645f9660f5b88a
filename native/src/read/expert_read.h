// Threads that read files for a store, each read cut into parts. Internal to native/src.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

struct expert_read {
    int      fd      = -1;
    char *   dest    = nullptr;
    uint64_t n_bytes = 0;
    int64_t  offset  = 0;
    int32_t  n_parts = 1; // at most
    bool     hashed  = false;

    // More bytes are there for a device, from the first one on; false: they could not be passed on. From any thread, one at
    // a time. May be empty.
    std::function<bool(const char * bytes, uint64_t n_bytes)> arrived;
    // All has ended. result: bytes there before the first gap, or -errno; -EREMOTEIO if `arrived` failed. digest: the
    // xxh3_128 of the bytes, big-endian, if hashed and all are there. From any thread, once.
    std::function<void(int64_t result, const uint8_t * digest)> ended;
};

// Whether the xxh3_128 of the bytes, big-endian, is this.
bool expert_has_digest(const char * bytes, uint64_t n_bytes, const uint8_t digest[16]);

struct expert_read_parts;

class expert_read_pool {
public:
    ~expert_read_pool(); // returns when all reads have ended

    // False if the system has no thread to give: nothing is called then.
    bool submit(const expert_read & read);
    // From now on a thread without work looks for it for a while before it sleeps, where there are cores to spare and the
    // drive is so fast that it matters.
    void poll_between_reads();
    // The last read took less than it would be worth to sleep for.
    bool is_fast() const { return fast; }

private:
    static constexpr size_t N_THREADS = 16; // for reads that wait for a drive

    bool                               start_threads();
    std::shared_ptr<expert_read_parts> next_read();
    void                               run();
    void                               poll() const;

    std::mutex                                     mutex; // guards what follows
    std::condition_variable                        wanted;
    std::deque<std::shared_ptr<expert_read_parts>> queue; // reads with parts that nobody has taken yet
    std::vector<std::thread>                       threads;
    std::atomic<size_t>                            n_threads{N_THREADS};
    std::atomic<size_t>                            n_queued{0};
    std::atomic<bool>                              stopping{false};
    std::atomic<bool>                              polling{false};
    std::atomic<bool>                              fast{false}; // the last read was
};
