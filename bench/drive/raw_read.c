// The yardstick of raw_rate.py and native_rate.py: threads that read whole blocks with O_DIRECT and do nothing else.
// cc -O2 -pthread raw_read.c -o raw_read;  raw_read FILE BLOCK_BYTES N_BLOCKS N_READS N_THREADS STEP
// Read number i is of block (i * STEP) % N_BLOCKS. Prints bytes per second.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int         fd;
static size_t      block_bytes;
static long        n_blocks, n_reads, step;
static atomic_long next_read;

static void * run(void * buffer) {
    for (long i; (i = atomic_fetch_add(&next_read, 1)) < n_reads;) {
        const off_t offset = (off_t) (i * step % n_blocks) * (off_t) block_bytes;
        for (size_t done = 0; done < block_bytes;) {
            const ssize_t n = pread(fd, (char *) buffer + done, block_bytes - done, offset + (off_t) done);
            if (n <= 0) {
                fprintf(stderr, "raw_read: %s\n", n ? strerror(errno) : "end of file");
                exit(1);
            }
            done += (size_t) n;
        }
    }
    return NULL;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

int main(int argc, char ** argv) {
    if (argc != 7 || (fd = open(argv[1], O_RDONLY | O_DIRECT)) < 0) {
        fprintf(stderr, "raw_read FILE BLOCK_BYTES N_BLOCKS N_READS N_THREADS STEP: %s\n", strerror(errno));
        return 1;
    }
    block_bytes = strtoull(argv[2], NULL, 10);
    n_blocks    = atol(argv[3]);
    n_reads     = atol(argv[4]);
    step        = atol(argv[6]);
    enum { MAX_THREADS = 64 };
    const int n_threads = atoi(argv[5]);
    pthread_t threads[MAX_THREADS];
    char *    buffers[MAX_THREADS];
    if (n_threads < 1 || n_threads > MAX_THREADS) {
        return 1;
    }
    for (int i = 0; i < n_threads; i++) {
        buffers[i] = mmap(NULL, block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(buffers[i], block_bytes, MADV_HUGEPAGE);
        memset(buffers[i], 1, block_bytes);
    }
    const double start = now_s();
    for (int i = 0; i < n_threads; i++) {
        pthread_create(&threads[i], NULL, run, buffers[i]);
    }
    for (int i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    printf("%.0f\n", (double) n_reads * (double) block_bytes / (now_s() - start));
    return 0;
}
