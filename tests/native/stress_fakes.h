// What surrounds the loader in loader_stress.cpp: devices whose copies are done some time after they were started, a pread
// that is slow and fails, chance, and who ends the program when a step is wrong or hangs.
#pragma once

#include "expert_hooks.h"
#include "expert_mover.h"

#include "ggml-backend-impl.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

// ---- chance

static std::atomic<uint32_t>     n_drawing{0};
static thread_local std::mt19937 random_bits(n_drawing++);

static int  below(int n) { return (int) (random_bits() % (uint32_t) n); }
static bool chance(int percent) { return below(100) < percent; }
static void nap(int percent, int us_max) {
    if (chance(percent)) {
        std::this_thread::sleep_for(std::chrono::microseconds(below(us_max)));
    }
}

// ---- steps

static const std::chrono::seconds            STEP_MAX(30);
static std::mutex                            step_mutex; // guards the next two
static char                                  step[256];
static std::chrono::steady_clock::time_point step_start;

__attribute__((format(printf, 1, 2))) static void begin_step(const char * format, ...) {
    std::lock_guard<std::mutex> lock(step_mutex);
    va_list                     args;
    va_start(args, format);
    vsnprintf(step, sizeof(step), format, args);
    va_end(args);
    step_start = std::chrono::steady_clock::now();
}

__attribute__((format(printf, 2, 3))) static void check(bool ok, const char * format, ...) {
    if (ok) {
        return;
    }
    std::lock_guard<std::mutex> lock(step_mutex);
    fprintf(stderr, "FAILED in %s: ", step);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    _exit(1);
}

static void watch(const std::atomic<bool> & done) {
    while (!done) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        std::unique_lock<std::mutex> lock(step_mutex);
        const bool                   hung = std::chrono::steady_clock::now() - step_start > STEP_MAX;
        lock.unlock();
        check(!hung, "hung");
    }
}

// ---- devices

enum copy_fault { COPY_RIGHT, COPY_REFUSED, COPY_WAIT_FAILS, COPY_DEVICE_LOST, COPY_FAULTS };
static std::atomic<int> copy_faults{COPY_RIGHT}; // of this round

struct fake_device {
    struct copy {
        char *       dest;
        const char * src;
        size_t       n_bytes;
    };

    const char *               name;
    enum ggml_backend_dev_type type;
    ggml_backend_device        dev  = {};
    const char *               base = nullptr; // of its arena
    uint64_t                   size = 0;
    std::mutex                 mutex; // guards what follows
    std::condition_variable    changed;
    std::deque<copy>           copies; // not done; the first one may be under way
    uint64_t                   n_started = 0;
    uint64_t                   n_done    = 0;
    bool                       lost      = false;
    bool                       stopping  = false;
    std::thread                thread;

    fake_device(const char * name, enum ggml_backend_dev_type type);
    ~fake_device() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stopping = true;
        }
        changed.notify_all();
        thread.join();
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [&] { return stopping || !copies.empty(); });
            if (copies.empty()) {
                return;
            }
            const copy next    = copies.front();
            const bool dropped = lost;
            lock.unlock();
            nap(30, 1500);
            if (!dropped) {
                memcpy(next.dest, next.src, next.n_bytes);
            }
            lock.lock();
            copies.pop_front();
            n_done++;
            changed.notify_all();
        }
    }

    bool start(const copy & copy) {
        nap(20, 300); // starting one takes a while, too
        std::lock_guard<std::mutex> lock(mutex);
        lost = lost || (copy_faults == COPY_DEVICE_LOST && chance(20));
        if (lost || (copy_faults == COPY_REFUSED && chance(20))) {
            return false;
        }
        copies.push_back(copy);
        n_started++;
        changed.notify_all();
        return true;
    }

    bool wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const uint64_t               n = n_started;
        changed.wait(lock, [&] { return n_done >= n; });
        return !lost && !(copy_faults == COPY_WAIT_FAILS && chance(30));
    }
};

static fake_device *        gpus[2];
static std::thread::id      fetching_thread;
static std::atomic<int64_t> h2d_bytes{0};
static std::atomic<int64_t> n_parts_kept{0}; // copied by the thread that fetches: they came before the slot was known
static std::atomic<int64_t> n_parts_passed_on{0};

static bool fake_copy(void * dest, const void * src, size_t n_bytes) {
    const bool    on_first = dest >= gpus[0]->base && dest < gpus[0]->base + gpus[0]->size;
    fake_device & gpu      = *gpus[on_first ? 0 : 1];
    check(dest >= gpu.base && (char *) dest + n_bytes <= gpu.base + gpu.size, "a copy that is in no arena");
    if (!src) {
        return gpu.wait();
    }
    h2d_bytes += (int64_t) n_bytes;
    (std::this_thread::get_id() == fetching_thread ? n_parts_kept : n_parts_passed_on)++;
    return gpu.start({(char *) dest, (const char *) src, n_bytes});
}

// ---- host memory that a device reads in place

static std::mutex                     locked_mutex;    // guards the next one
static std::map<const char *, size_t> locked;          // bytes, by address
static std::atomic<int>               lock_refused{0}; // percent, of this store

static bool fake_lock(const void * device_memory, void * bytes, size_t n_bytes) {
    if (!bytes) {
        return true; // it could
    }
    check(device_memory == gpus[0]->base || device_memory == gpus[1]->base, "memory is locked for no device");
    nap(30, 2000);
    std::lock_guard<std::mutex> lock(locked_mutex);
    if (n_bytes == 0) {
        check(locked.erase((const char *) bytes) == 1, "memory that was not locked is unlocked");
        return true;
    }
    check((uintptr_t) bytes % 4096 == 0 && n_bytes % 4096 == 0, "no whole pages are locked");
    check(!locked.count((const char *) bytes), "memory is locked twice");
    return !chance(lock_refused) && locked.emplace((const char *) bytes, n_bytes).second;
}

static bool is_locked(const char * bytes, size_t n_bytes) {
    std::lock_guard<std::mutex> lock(locked_mutex);
    auto                        next = locked.upper_bound(bytes);
    return next != locked.begin() && bytes + n_bytes <= std::prev(next)->first + std::prev(next)->second;
}

// A copy in the background, of what may be written meanwhile: then nobody uses it.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))
#endif
static void
copy_racing(char * dest, const char * src, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i++) {
        ((volatile char *) dest)[i] = ((const volatile char *) src)[i];
    }
}

static bool                 moves_are_checked = false; // of this store
static std::atomic<int64_t> n_moved_wrong{0};

struct fake_copier final : expert_copier {
    void * start(char * dest, const char * src, uint64_t n_bytes, bool to_device) override {
        check(is_locked(to_device ? src : dest, n_bytes), "host memory of a move is not locked");
        if (copy_faults == COPY_REFUSED && chance(20)) {
            return nullptr;
        }
        return new std::thread([=] {
            nap(50, 3000);
            copy_racing(dest, src, n_bytes);
            if (!to_device && moves_are_checked && chance(50)) {
                dest[below((int) n_bytes)] ^= 1;
                n_moved_wrong++;
            }
        });
    }
    bool end(void * copy) override {
        std::thread * thread = (std::thread *) copy;
        thread->join();
        delete thread;
        return !(copy_faults == COPY_WAIT_FAILS && chance(20));
    }
};

static void * fake_proc(ggml_backend_reg_t, const char * name) {
    return strcmp(name, EXPERT_COPY_PROC) == 0   ? (void *) fake_copy
           : strcmp(name, EXPERT_LOCK_PROC) == 0 ? (void *) fake_lock
                                                 : nullptr;
}

fake_device::fake_device(const char * name, enum ggml_backend_dev_type type) : name(name), type(type) {
    static ggml_backend_reg reg    = {GGML_BACKEND_API_VERSION, {nullptr, nullptr, nullptr, fake_proc}, nullptr};
    const auto              buft   = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
    dev.context                    = this;
    dev.reg                        = &reg;
    dev.iface.get_name             = [](ggml_backend_dev_t dev) { return ((fake_device *) dev->context)->name; };
    dev.iface.get_type             = [](ggml_backend_dev_t dev) { return ((fake_device *) dev->context)->type; };
    dev.iface.get_memory           = [](ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; };
    dev.iface.get_buffer_type      = buft;
    dev.iface.get_host_buffer_type = buft;
    thread                         = std::thread([this] { run(); });
}

// ---- files: the linker sends native's reads here

enum read_fault { READ_RIGHT, READ_FAILS, READ_WRONG_BYTES, READ_FAULTS };
static std::atomic<int>     read_faults{READ_RIGHT}; // of this round
static std::atomic<int64_t> pread_bytes{0};
static std::atomic<int>     n_preads{0}; // under way

extern "C" ssize_t __real_pread(int fd, void * dest, size_t n_bytes, off_t at);
extern "C" ssize_t __wrap_pread(int fd, void * dest, size_t n_bytes, off_t at) {
    n_preads++;
    for (fake_device * gpu : gpus) {
        std::lock_guard<std::mutex> lock(gpu->mutex);
        for (const fake_device::copy & copy : gpu->copies) {
            check((char *) dest + n_bytes <= copy.src || dest >= copy.src + copy.n_bytes, "a buffer used again too early");
        }
    }
    nap(20, 1000);
    ssize_t n = -1;
    if (chance(5)) {
        errno = EINTR;
    } else if (read_faults == READ_FAILS && chance(10)) {
        errno = EIO;
    } else {
        n = __real_pread(fd, dest, chance(5) ? std::min<size_t>(n_bytes, 4096) : n_bytes, at);
        n -= n > 0 && read_faults == READ_FAILS && chance(10); // direct I/O can't go on from there
        pread_bytes += std::max<ssize_t>(n, 0);
    }
    if (n > 0 && read_faults == READ_WRONG_BYTES && chance(10)) {
        ((char *) dest)[below((int) n)] ^= 1;
    }
    n_preads--; // keeps errno
    return n;
}
