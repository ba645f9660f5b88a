// Threads that read pack files for a store. Internal to native/src.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

struct expert_read_parts; // one read, cut into parts

class expert_read_pool {
public:
    using arrived_t = std::function<bool(const char * bytes, uint64_t n_bytes)>;

    expert_read_pool() = default;
    ~expert_read_pool();
    expert_read_pool(const expert_read_pool &)             = delete;
    expert_read_pool & operator=(const expert_read_pool &) = delete;

    // Reads n_bytes at offset into dest, in n_parts parts at most; `arrived` is called for each, from any thread.
    // How many bytes are there before the first gap, or -errno; -EREMOTEIO if `arrived` failed. digest: see
    // expert_store_read().
    int64_t read(
        int fd, char * dest, uint64_t n_bytes, int64_t offset, int32_t n_parts, const arrived_t & arrived, uint8_t * digest);

private:
    struct part {
        expert_read_parts * whole;
        size_t              index;
    };

    bool start_threads();
    void run();

    std::mutex               mutex; // guards what follows
    std::condition_variable  wanted;
    std::deque<part>         queue;
    std::vector<std::thread> threads;
    bool                     stopping = false;
};
