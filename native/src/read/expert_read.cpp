// Reading files: a block in several parts at once, each passed on as it arrives, hashed on the way.
//
//   submit --> queue --> threads: take the next part, pread --> in the file's order: arrived(), hash --> ended()
//
// The thread that brings the next part in order passes it on and hashes it, with all that are there behind it; the
// others go on reading. No lock is taken for a part: 16 threads that end their parts at the same time would queue for it.
#include "expert_read.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <system_error>

static const uint64_t ALIGNMENT      = 4096;
static const uint64_t PART_BYTES_MIN = 512 << 10;
static const uint64_t COPY_BYTES_MIN = 256 << 10; // of parts that are copied on: their copies start earlier
static const size_t   N_CORES_MIN    = 8;         // for polling

// Where reads take less than this, being woken for the next one is worth avoiding: threads poll that long for it.
static const std::chrono::milliseconds POLL(2);

static const int64_t RUNNING = INT64_MIN;

// The bytes that this core has just written leave its own cache, from which a device reads them at half the speed: on
// CPUs that have the instruction; others take it for a no-op.
static void demote(const char * bytes, size_t n_bytes) {
#ifdef __x86_64__
    for (size_t i = 0; i < n_bytes; i += 64) {
        asm volatile("cldemote %0" ::"m"(bytes[i]));
    }
#else
    (void) bytes, (void) n_bytes;
#endif
}

static void pause_briefly() {
#ifdef __x86_64__
    for (int i = 0; i < 32; i++) {
        asm volatile("pause");
    }
#endif
    std::this_thread::yield(); // each time, it would slow all others down
}

static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

bool expert_has_digest(const char * bytes, uint64_t n_bytes, const uint8_t digest[16]) {
    XXH128_canonical_t found;
    XXH128_canonicalFromHash(&found, XXH3_128bits(bytes, n_bytes));
    return memcmp(found.digest, digest, sizeof(found.digest)) == 0;
}

struct expert_read_parts {
    const expert_read                 read;
    const decltype(now())             started = now();
    const uint64_t                    part_bytes;
    const size_t                      n_parts;
    std::atomic<size_t>               next{0};       // part to read next
    std::vector<std::atomic<int64_t>> results;       // [n_parts] bytes read, or -errno; RUNNING
    std::atomic<bool>                 seeing{false}; // a thread takes what is there in order, and owns what follows
    std::atomic<size_t>               n_seen{0};     // parts; the others read it
    int64_t                           error = 0;
    decltype(now() - now())           took{};      // when all have ended
    uint64_t                          n_there = 0; // bytes before the first gap
    XXH3_state_t                      hash;

    expert_read_parts(const expert_read & read, uint64_t part_bytes) :
        read(read), part_bytes(part_bytes), n_parts(std::max<uint64_t>(1, (read.n_bytes + part_bytes - 1) / part_bytes)),
        results(n_parts) {
        for (auto & result : results) {
            result.store(RUNNING, std::memory_order_relaxed);
        }
        XXH3_128bits_reset(&hash);
    }

    uint64_t length(size_t index) const { return std::min(part_bytes, read.n_bytes - index * part_bytes); }

    bool is_there(size_t index) const { return index < n_parts && results[index] != RUNNING; }

    // True if all have ended.
    bool run(size_t index) {
        const uint64_t start = index * part_bytes;
        results[index]       = fill(read.dest + start, length(index), read.offset + (int64_t) start);
        while (is_there(n_seen) && !seeing.exchange(true)) { // else another thread comes to this part
            const size_t before = n_seen;
            while (is_there(n_seen)) {
                see();
            }
            const bool done = before < n_parts && n_seen == n_parts;
            seeing          = false;
            if (done) {
                took = now() - started;
                end();
                return true;
            }
        }
        return false;
    }

    int64_t fill(char * dest, uint64_t length, int64_t at) const {
        uint64_t done = 0;
        while (done < length) {
            const ssize_t n = pread(read.fd, dest + done, length - done, at + (int64_t) done);
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0) {
                return -errno;
            }
            if (read.arrived) {
                demote(dest + done, n);
            }
            done += n;
            if (n == 0 || n % ALIGNMENT != 0) {
                break; // the file ends, or direct I/O can't go on from here
            }
        }
        return (int64_t) done;
    }

    // Takes the next parts, as many as are there in a row.
    void see() {
        const bool   whole = !error && n_there == n_seen * part_bytes; // so far
        char * const start = read.dest + n_there;
        uint64_t     n     = 0;
        size_t       i     = n_seen;
        for (; is_there(i); i++) {
            const int64_t result = results[i];
            error                = error ? error : std::min<int64_t>(result, 0);
            if (whole && !error && n == (i - n_seen) * part_bytes) {
                n += result;
            }
        }
        n_there += n;
        if (n > 0 && read.arrived && !read.arrived(start, n)) {
            error = error ? error : -EREMOTEIO;
        }
        if (n > 0 && read.hashed) {
            XXH3_128bits_update(&hash, start, n);
        }
        n_seen = i;
    }

    void end() const {
        XXH128_canonical_t digest;
        XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(&hash));
        read.ended(error ? error : (int64_t) n_there, digest.digest);
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

// Cores that this process may keep busy.
static size_t n_cores() {
    cpu_set_t     set;
    double        n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : std::thread::hardware_concurrency();
    std::string   quota;
    double        period = 0;
    std::ifstream limit("/sys/fs/cgroup/cpu.max"); // of a container: microseconds, or "max"
    if (limit >> quota >> period && quota != "max" && period > 0) {
        n = std::min(n, strtod(quota.c_str(), nullptr) / period);
    }
    return (size_t) n;
}

bool expert_read_pool::start_threads() {
    std::lock_guard<std::mutex> lock(mutex);
    try {
        while (threads.size() < n_threads) {
            threads.emplace_back([this] { run(); });
        }
    } catch (const std::system_error &) { // fewer do as well
    }
    return !threads.empty();
}

void expert_read_pool::poll_between_reads() {
    const size_t n = n_cores();
    if (n >= N_CORES_MIN && !polling) {
        n_threads = std::min<size_t>(N_THREADS, n - 1); // each keeps a core busy: one is left to what feeds the device
        polling   = true;
    }
}

void expert_read_pool::poll() const {
    const auto until = now() + POLL;
    while (n_queued == 0 && !stopping && now() < until) {
        pause_briefly();
    }
}

// A read with parts that nobody has taken; NULL: stop.
std::shared_ptr<expert_read_parts> expert_read_pool::next_read() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        while (!queue.empty() && queue.front()->next >= queue.front()->n_parts) {
            queue.pop_front();
        }
        n_queued = queue.size();
        if (!queue.empty()) {
            return queue.front();
        }
        if (stopping) {
            return nullptr;
        }
        if (polling && fast) {
            lock.unlock();
            poll();
            lock.lock();
        }
        wanted.wait(lock, [&] { return stopping || !queue.empty(); });
    }
}

void expert_read_pool::run() {
    while (const auto whole = next_read()) {
        for (size_t i = whole->next++; i < whole->n_parts; i = whole->next++) {
            if (whole->run(i)) {
                fast = whole->took < POLL;
            }
        }
    }
}

static uint64_t part_bytes_of(const expert_read & read) {
    const uint64_t least =
        std::max(read.arrived ? COPY_BYTES_MIN : PART_BYTES_MIN, read.n_bytes / (uint64_t) std::max(read.n_parts, 1));
    return (least + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

bool expert_read_pool::submit(const expert_read & read) {
    if (!start_threads()) {
        return false;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(std::make_shared<expert_read_parts>(read, part_bytes_of(read)));
        n_queued = queue.size();
    }
    wanted.notify_all();
    return true;
}
