// How long k blocks take that are asked for at once, as a layer does: in parts, by threads that wait for work.
// cc -O2 -pthread raw_burst.c -o raw_burst;  raw_burst FILE BLOCK_BYTES N_BLOCKS N_THREADS PARTS GPU N_REPEATS STEP K...
// GPU: 1 if what is read leaves the core's cache, as it does where a GPU fetches it next, else 0.
// Prints one line a K: the mean seconds until all K blocks are in memory, blocks at random, O_DIRECT.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 64, MAX_BLOCKS = 64, PAGE = 4096, PART_BYTES_MIN = 512 << 10, COPY_BYTES_MIN = 256 << 10 };

static int             fd;
static size_t          block_bytes, part_bytes;
static long            n_parts; // of a block
static char *          buffers[MAX_BLOCKS];
static off_t           offsets[MAX_BLOCKS];
static int             demoting;
static pthread_mutex_t mutex  = PTHREAD_MUTEX_INITIALIZER; // guards what follows
static pthread_cond_t  wanted = PTHREAD_COND_INITIALIZER;
static pthread_cond_t  ended  = PTHREAD_COND_INITIALIZER;
static long            next_part, n_asked, n_ended;

static void read_part(long part) {
    const size_t start = (size_t) (part % n_parts) * part_bytes;
    const size_t end   = start + part_bytes < block_bytes ? start + part_bytes : block_bytes;
    for (size_t at = start; at < end;) {
        const ssize_t n = pread(fd, buffers[part / n_parts] + at, end - at, offsets[part / n_parts] + (off_t) at);
        if (n <= 0) {
            fprintf(stderr, "raw_burst: %s\n", n ? strerror(errno) : "end of file");
            exit(1);
        }
#ifdef __x86_64__
        for (size_t i = at; demoting && i < at + (size_t) n; i += 64) {
            __asm__ volatile("cldemote %0" ::"m"(buffers[part / n_parts][i]));
        }
#endif
        at += (size_t) n;
    }
}

static void * run(void * unused) {
    pthread_mutex_lock(&mutex);
    while (1) {
        while (next_part == n_asked) {
            pthread_cond_wait(&wanted, &mutex);
        }
        const long part = next_part++;
        pthread_mutex_unlock(&mutex);
        read_part(part);
        pthread_mutex_lock(&mutex);
        if (++n_ended == n_asked) {
            pthread_cond_signal(&ended);
        }
    }
    return unused;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

static double burst_s(long k) {
    const double start = now_s();
    pthread_mutex_lock(&mutex);
    next_part = n_ended = 0;
    n_asked             = k * n_parts;
    pthread_cond_broadcast(&wanted);
    while (n_ended < n_asked) {
        pthread_cond_wait(&ended, &mutex);
    }
    n_asked = next_part = 0;
    pthread_mutex_unlock(&mutex);
    return now_s() - start;
}

int main(int argc, char ** argv) {
    if (argc < 10 || (fd = open(argv[1], O_RDONLY | O_DIRECT)) < 0) {
        fprintf(stderr, "raw_burst FILE BLOCK_BYTES N_BLOCKS N_THREADS PARTS GPU N_REPEATS STEP K...: %s\n", strerror(errno));
        return 1;
    }
    const long n_blocks = atol(argv[3]), n_threads = atol(argv[4]), parts = atol(argv[5]), n_repeats = atol(argv[7]);
    demoting    = atoi(argv[6]);
    block_bytes = strtoull(argv[2], NULL, 10);
    part_bytes  = block_bytes / (size_t) (parts > 1 ? parts : 1);
    const size_t least = demoting ? COPY_BYTES_MIN : PART_BYTES_MIN;
    part_bytes         = part_bytes < least ? least : part_bytes;
    part_bytes  = (part_bytes + PAGE - 1) / PAGE * PAGE;
    n_parts     = (long) ((block_bytes + part_bytes - 1) / part_bytes);
    for (int i = 0; i < MAX_BLOCKS; i++) {
        buffers[i] = mmap(NULL, block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(buffers[i], block_bytes, MADV_HUGEPAGE);
    }
    for (int i = 0; i < n_threads && i < MAX_THREADS; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, run, NULL);
    }
    long number = 0;
    for (int arg = 9; arg < argc; arg++) {
        const long k = atol(argv[arg]);
        if (k < 1 || k > MAX_BLOCKS) {
            return 1;
        }
        double total_s = 0;
        for (long i = -1; i < n_repeats; i++) { // the first one touches the buffers
            for (long block = 0; block < k; block++) {
                offsets[block] = (off_t) (number++ * atol(argv[8]) % n_blocks) * (off_t) block_bytes;
            }
            const double s = burst_s(k);
            total_s += i < 0 ? 0 : s;
        }
        printf("%.9f\n", total_s / (double) n_repeats);
    }
    return 0;
}
