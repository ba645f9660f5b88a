// Reading files: a block in several parts at once, each passed on as it arrives, hashed on the way.
//
//   start --cut--> parts --queue--> threads: pread, arrived() --> in the file's order: hash --> ended()
//
// The thread that brings the next part in order hashes it, and all that are there behind it: hashing costs no time of
// its own while other parts are still being read.
#include "expert_read.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>

static const uint64_t ALIGNMENT      = 4096;
static const uint64_t PART_BYTES_MIN = 256 << 10; // smaller ones cost more than their even spread over threads gains
static const size_t   N_THREADS      = 16;

// A fast drive's next reads come sooner than a sleeping thread can be woken.
static const std::chrono::microseconds POLL(300);

static const int64_t RUNNING = INT64_MIN;

struct expert_read_parts {
    const expert_read    read;
    const uint64_t       part_bytes;
    std::mutex           mutex;           // guards what follows
    std::vector<int64_t> results;         // [n_parts] bytes read, or -errno; RUNNING
    size_t               n_running;       // parts that have not ended
    size_t               n_seen  = 0;     // parts, from the first one, that are in what follows
    bool                 seeing  = false; // a thread looks at the next ones
    int64_t              error   = 0;
    uint64_t             n_there = 0; // bytes before the first gap
    bool                 gap     = false;
    XXH3_state_t         hash;

    expert_read_parts(const expert_read & read, uint64_t part_bytes) :
        read(read), part_bytes(part_bytes), results(std::max<uint64_t>(1, (read.n_bytes + part_bytes - 1) / part_bytes), RUNNING),
        n_running(results.size()) {
        XXH3_128bits_reset(&hash);
    }

    uint64_t length(size_t index) const { return std::min(part_bytes, read.n_bytes - index * part_bytes); }

    void run(size_t index) {
        const uint64_t start  = index * part_bytes;
        int64_t        result = fill(read.dest + start, length(index), read.offset + (int64_t) start);
        if (result > 0 && read.arrived && !read.arrived(read.dest + start, (uint64_t) result)) {
            result = -EREMOTEIO;
        }
        std::unique_lock<std::mutex> lock(mutex);
        results[index] = result;
        n_running--;
        if (seeing) {
            return; // the other thread will come to this part
        }
        seeing = true;
        while (n_seen < results.size() && results[n_seen] != RUNNING) {
            const size_t next = n_seen++;
            lock.unlock();
            see(next);
            lock.lock();
        }
        seeing = false;
        if (n_running == 0) {
            lock.unlock();
            end();
        }
    }

    int64_t fill(char * place, uint64_t length, int64_t at) const {
        uint64_t done = 0;
        while (done < length) {
            const ssize_t n = pread(read.fd, place + done, length - done, at + (int64_t) done);
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

    // By one thread at a time, in the order of the parts.
    void see(size_t index) {
        if (results[index] < 0) {
            error = error ? error : results[index];
        } else if (!gap) {
            n_there += results[index];
            gap = (uint64_t) results[index] < length(index);
        }
        if (read.hashed && !error && !gap) {
            XXH3_128bits_update(&hash, read.dest + index * part_bytes, length(index));
        }
    }

    void end() const {
        XXH128_canonical_t digest;
        XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(&hash));
        read.ended(error ? error : (int64_t) n_there, digest.digest);
    }
};

void expert_read_pool::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    wanted.notify_all();
    for (std::thread & thread : threads) {
        thread.join();
    }
    threads.clear();
}

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

void expert_read_pool::poll_between_reads() { polling = std::thread::hardware_concurrency() >= N_THREADS / 2; }

void expert_read_pool::poll() const {
    const auto until = std::chrono::steady_clock::now() + POLL;
    while (n_queued == 0 && !stopping && std::chrono::steady_clock::now() < until) {
        std::this_thread::yield();
    }
}

void expert_read_pool::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        if (polling && queue.empty()) {
            lock.unlock();
            poll();
            lock.lock();
        }
        wanted.wait(lock, [&] { return stopping || !queue.empty(); });
        if (queue.empty()) {
            return;
        }
        const part next = std::move(queue.front());
        queue.pop_front();
        n_queued = queue.size();
        lock.unlock();
        next.whole->run(next.index);
        lock.lock();
    }
}

static uint64_t part_bytes_of(const expert_read & read) {
    const uint64_t least = std::max(PART_BYTES_MIN, read.n_bytes / (uint64_t) std::max(read.n_parts, 1));
    return (least + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

bool expert_read_pool::start(const expert_read & read) {
    if (!start_threads()) {
        return false;
    }
    const auto whole = std::make_shared<expert_read_parts>(read, part_bytes_of(read));
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (size_t i = 0; i < whole->results.size(); i++) {
            queue.push_back({whole, i});
        }
        n_queued = queue.size();
    }
    wanted.notify_all();
    return true;
}
