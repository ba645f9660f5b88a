// Reading pack files: one expert in several parts at once, each passed on as it arrives.
//
//   expert_store_read --cut--> parts --queue--> threads: pread --> to the slot, where that is not the destination itself
//
// Which bytes, when, and what a failure means is the provider's business. Here is only what its interpreter lock would
// put in a line: on a fast drive a part of 1 MiB takes less time than getting that lock.
#include "expert_read.h"
#include "expert_store.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

static const uint64_t ALIGNMENT      = 4096;
static const uint64_t PART_BYTES_MIN = 1 << 20;
static const size_t   N_THREADS      = 16;

static const int64_t RUNNING = INT64_MIN;

struct expert_read_parts {
    int                                 fd;
    char *                              dest;
    uint64_t                            n_bytes;
    int64_t                             offset;
    uint64_t                            part_bytes;
    const expert_read_pool::arrived_t & arrived;

    std::mutex              mutex; // guards what follows
    std::condition_variable ended;
    std::vector<int64_t>    results; // [n_parts] bytes read, or -errno; RUNNING

    uint64_t length(size_t index) const { return std::min(part_bytes, n_bytes - index * part_bytes); }

    void run(size_t index) {
        const uint64_t start  = index * part_bytes;
        int64_t        result = fill(dest + start, length(index), offset + (int64_t) start);
        if (result > 0 && arrived && !arrived(dest + start, (uint64_t) result)) {
            result = -EREMOTEIO;
        }
        std::lock_guard<std::mutex> lock(mutex);
        results[index] = result;
        ended.notify_all();
    }

    int64_t fill(char * place, uint64_t length, int64_t at) const {
        uint64_t done = 0;
        while (done < length) {
            const ssize_t n = pread(fd, place + done, length - done, at + (int64_t) done);
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0) {
                return -errno;
            }
            done += n;
            if (n == 0 || n % ALIGNMENT != 0) {
                break; // the file ends, or direct I/O can't go on from here
            }
        }
        return (int64_t) done;
    }

    int64_t wait_for(size_t index) {
        std::unique_lock<std::mutex> lock(mutex);
        ended.wait(lock, [&] { return results[index] != RUNNING; });
        return results[index];
    }

    // Waits for all parts, and hashes each while the next ones are still being read.
    int64_t finish(uint8_t * digest) {
        XXH3_state_t hash;
        XXH3_128bits_reset(&hash);
        int64_t  error   = 0;
        uint64_t n_there = 0;
        bool     gap     = false;
        for (size_t i = 0; i < results.size(); i++) {
            const int64_t result = wait_for(i);
            if (result < 0) {
                error = error ? error : result;
            } else if (!gap) {
                n_there += result;
                gap = (uint64_t) result < length(i);
            }
            if (digest && !error && !gap) {
                XXH3_128bits_update(&hash, dest + i * part_bytes, length(i));
            }
        }
        if (digest) {
            XXH128_canonicalFromHash((XXH128_canonical_t *) digest, XXH3_128bits_digest(&hash));
        }
        return error ? error : (int64_t) n_there;
    }
};

expert_read_pool::~expert_read_pool() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    wanted.notify_all();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

// False if the system has no thread to give.
bool expert_read_pool::start_threads() {
    std::lock_guard<std::mutex> lock(mutex);
    try {
        while (threads.size() < N_THREADS) {
            threads.emplace_back([this] { run(); });
        }
    } catch (const std::system_error &) { // fewer do as well
    }
    return !threads.empty();
}

void expert_read_pool::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        wanted.wait(lock, [&] { return stopping || !queue.empty(); });
        if (queue.empty()) {
            return;
        }
        const part next = queue.front();
        queue.pop_front();
        lock.unlock();
        next.whole->run(next.index);
        lock.lock();
    }
}

int64_t expert_read_pool::read(
    int fd, char * dest, uint64_t n_bytes, int64_t offset, int32_t n_parts, const arrived_t & arrived, uint8_t * digest) {
    const uint64_t least = std::max(PART_BYTES_MIN, n_bytes / (uint64_t) std::max(n_parts, 1));
    uint64_t       each  = (least + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (n_bytes > each && !start_threads()) {
        each = n_bytes;
    }
    const size_t      n     = std::max<size_t>(1, (n_bytes + each - 1) / each);
    expert_read_parts whole = {fd, dest, n_bytes, offset, each, arrived, {}, {}, std::vector<int64_t>(n, RUNNING)};
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (size_t i = 1; i < n; i++) {
            queue.push_back({&whole, i});
        }
    }
    wanted.notify_all();
    whole.run(0); // this thread would only wait
    return whole.finish(digest);
}

// ---- the provider's side

void expert_store_stage(expert_store * store, const void * buffer, uint64_t n_bytes, int32_t slot) {
    std::lock_guard<std::mutex> lock(store->mutex);
    store->staged[(const char *) buffer] = {(const char *) buffer + n_bytes, slot};
}

int64_t expert_store_read(
    expert_store * store, int fd, void * dest, uint64_t n_bytes, int64_t offset, int32_t n_parts, uint8_t * digest) {
    const char *                buffer = nullptr; // that dest lies in
    int32_t                     slot   = -1;
    expert_read_pool::arrived_t arrived;
    {
        std::lock_guard<std::mutex> lock(store->mutex);
        auto                        after = store->staged.upper_bound((const char *) dest);
        if (after != store->staged.begin() && (const char *) dest < std::prev(after)->second.end) {
            buffer = std::prev(after)->first;
            slot   = std::prev(after)->second.slot;
        }
    }
    if (buffer) {
        arrived = [=](const char * bytes, uint64_t n) { return expert_store_write(store, slot, bytes - buffer, bytes, n); };
    }
    return store->readers.read(fd, (char *) dest, n_bytes, offset, n_parts, arrived, digest);
}
