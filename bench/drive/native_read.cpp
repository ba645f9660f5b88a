// What native_rate.py measures: native's own threads, in the library that was built, read whole blocks with O_DIRECT.
// native_read FILE BLOCK_BYTES N_BLOCKS N_READS N_IN_FLIGHT STEP N_PARTS HASHED
// Read number i is of block (i * STEP) % N_BLOCKS, as in raw_read.c. Prints bytes per second.
#include "expert_read.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>

static expert_read        plan; // what all reads share
static long               n_blocks, n_reads, step;
static std::atomic<long>  next_read{0}, n_ended{0};
static std::promise<void> all_ended;

// The end of a read starts the next one into its memory, as a loader's does.
static void read_next(expert_read_pool & pool, char * buffer) {
    const long i = next_read++;
    if (i >= n_reads) {
        return;
    }
    expert_read read = plan;
    read.dest        = buffer;
    read.offset      = (int64_t) (i * step % n_blocks) * (int64_t) plan.n_bytes;
    read.ended       = [&pool, buffer](int64_t result, const uint8_t *) {
        if (result != (int64_t) plan.n_bytes) {
            fprintf(stderr, "native_read: %s\n", result < 0 ? strerror((int) -result) : "end of file");
            exit(1);
        }
        if (++n_ended == n_reads) {
            all_ended.set_value();
        }
        read_next(pool, buffer);
    };
    if (!pool.submit(read)) {
        fprintf(stderr, "native_read: no threads\n");
        exit(1);
    }
}

int main(int argc, char ** argv) {
    if (argc != 9 || (plan.fd = open(argv[1], O_RDONLY | O_DIRECT)) < 0) {
        fprintf(stderr, "native_read FILE BLOCK_BYTES N_BLOCKS N_READS N_IN_FLIGHT STEP N_PARTS HASHED: %s\n", strerror(errno));
        return 1;
    }
    plan.n_bytes       = strtoull(argv[2], nullptr, 10);
    n_blocks           = atol(argv[3]);
    n_reads            = atol(argv[4]);
    const int n_slots  = atoi(argv[5]);
    step               = atol(argv[6]);
    plan.n_parts       = atoi(argv[7]);
    plan.hashed        = atoi(argv[8]) != 0;
    const size_t bytes = (size_t) n_slots * plan.n_bytes;
    char * const slots = (char *) mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slots == MAP_FAILED) {
        perror("native_read");
        return 1;
    }
    madvise(slots, bytes, MADV_HUGEPAGE);
    memset(slots, 1, bytes);

    expert_read_pool pool;
    const auto       start = std::chrono::steady_clock::now();
    for (int i = 0; i < n_slots; i++) {
        read_next(pool, slots + (size_t) i * plan.n_bytes);
    }
    all_ended.get_future().wait();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    printf("%.0f\n", (double) n_reads * (double) plan.n_bytes / took.count());
    return 0;
}
