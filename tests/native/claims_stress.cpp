// Stress of who may claim what, and of lifetimes: threads that make stores for the same files, load one model or several, fail,
// and free in any order; threads that load without a store; and forks in between, whose children have nothing of it.
//
//   claims_stress FOLDER FIRST_SEED N_ROUNDS       exits with 0 and one line, or with the first thing that was wrong
#include "stress_fakes.h"

#include "expert_provider.h"
#include "expert_store.h"

#include <fcntl.h>
#include <sys/wait.h>

#include <string>
#include <vector>

static const int N_LAYERS = 3, N_ROLES = 2, N_EXPERT = 4, N_WEIGHTS = N_LAYERS * N_ROLES;
static const int COLUMNS = 256, ROWS = 2;

static std::vector<expert_layer> layers;
static std::string               paths[2];
static int                       fds[2];
static ggml_backend_dev_t        device, other_device;
static std::atomic<int64_t>      n_claims{0}, n_refused{0}, n_loads{0}, n_plain{0}, n_children{0}, n_more{0};

static void describe_layers() {
    for (int l = 0; l < N_LAYERS; l++) {
        expert_layer layer = {N_EXPERT, N_ROLES, l * N_EXPERT, 0, 0, {}};
        for (int r = 0; r < N_ROLES; r++) {
            expert_role & role = layer.roles[r];
            snprintf(role.tensor, sizeof(role.tensor), "blk.%d.role%d", l, r);
            role.type   = GGML_TYPE_F32;
            role.ne[0]  = COLUMNS;
            role.ne[1]  = ROWS;
            role.ne[2]  = N_EXPERT;
            role.bytes  = sizeof(float) * COLUMNS * ROWS;
            role.offset = layer.block_bytes;
            layer.block_bytes += role.bytes;
        }
        layers.push_back(layer);
    }
}

// What a provider shares, and what it answers: these stores never read.
struct tables {
    std::vector<int32_t>      slot_of   = std::vector<int32_t>(N_LAYERS * N_EXPERT, -1);
    std::vector<int64_t>      numbers   = std::vector<int64_t>(N_LAYERS * N_EXPERT, 0);
    std::vector<int64_t>      counters  = std::vector<int64_t>(EXPERT_COUNTERS, 0);
    std::vector<int32_t>      per_layer = std::vector<int32_t>(N_LAYERS, 0);
    std::vector<expert_block> blocks    = std::vector<expert_block>(N_LAYERS * N_EXPERT);

    expert_store * make(int file) {
        for (expert_block & block : blocks) {
            block.fd = -1;
        }
        const expert_tables   shared   = {slot_of.data(), numbers.data(), numbers.data(), counters.data(), slot_of.data(),
                numbers.data(), per_layer.data(), per_layer.data(), slot_of.data(), nullptr, blocks.data(), nullptr, nullptr, nullptr,
                nullptr, nullptr, 1, 1, 0};
        const auto            no_arena = [](void *, const char *, uint64_t, const int32_t *, int32_t) { return 0; };
        const expert_provider provider = {
            EXPERT_ABI_VERSION, sizeof(expert_provider), this, no_arena, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
        return expert_store_create(paths[file].c_str(), layers.data(), N_LAYERS, &shared, &provider);
    }
};

static ggml_tensor meta_of(int weight) {
    ggml_tensor meta = {};
    meta.type        = GGML_TYPE_F32;
    meta.ne[0]       = COLUMNS;
    meta.ne[1]       = ROWS;
    meta.ne[2]       = N_EXPERT;
    meta.ne[3]       = 1;
    ggml_set_name(&meta, layers[weight / N_ROLES].roles[weight % N_ROLES].tensor);
    return meta;
}

// A load of the file on this thread; how many weights it claimed, which must be the store's. Stops after n weights.
static int load(
    int file, expert_store * store, int n, std::vector<ggml_backend_buffer_t> & buffers, ggml_backend_dev_t dev = device) {
    int n_claimed = 0;
    for (int weight = 0; weight < n; weight++) {
        ggml_tensor                meta  = meta_of(weight);
        const char *               error = nullptr;
        ggml_backend_buffer_type_t buft  = expert_claim(fds[file], &meta, dev, &error);
        check(!error, "a claim failed: %s", error);
        check(expert_is_described(fds[file], ggml_get_name(&meta)) == (buft != nullptr), "a weight is and is not described");
        if (!buft) {
            continue;
        }
        nap(10, 200);
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alignment(buft));
        check(buffer, "no buffer");
        meta.buffer = buffer;
        meta.data   = ggml_backend_buffer_get_base(buffer);
        check(ggml_backend_buffer_init_tensor(buffer, &meta) == GGML_STATUS_SUCCESS, "a tensor can't be initialized");
        const expert_ref * ref = expert_ref_of(&meta);
        check(ref && ref->store == store, "a weight comes from another load's store");
        buffers.push_back(buffer);
        n_claimed++;
    }
    return n_claimed;
}

static void free_all(std::vector<ggml_backend_buffer_t> & buffers) {
    for (ggml_backend_buffer_t buffer : buffers) {
        nap(5, 100);
        ggml_backend_buffer_free(buffer);
    }
    buffers.clear();
}

static bool compute_fails(expert_store * store) {
    const int64_t rows[N_EXPERT] = {1, 1, 1, 1};
    expert_op_begin(&store->refs.at(layers[0].roles[0].tensor), rows, 1, nullptr);
    return !expert_op_end(&store->refs.at(layers[0].roles[0].tensor)) && *expert_take_failure();
}

// In the child: what the parent has open is open no more, and ends in an error at once.
static void be_a_child(expert_store * inherited) {
    alarm(30);
    if (inherited) {
        check(compute_fails(inherited), "a child computes with its parent's experts");
        check(!expert_store_open_arenas(inherited), "a child opens its parent's arenas");
        check(!expert_store_begin_load(inherited), "a child shares its parent's experts");
        check(expert_store_trace(inherited, nullptr), "a child can't leave a trace alone");
        expert_store_free(inherited);
    }
    for (int file = 0; file < 2; file++) {
        tables                             own;
        std::vector<ggml_backend_buffer_t> buffers;
        expert_store *                     store = own.make(file);
        check(store, "a child can't open a file: %s", expert_last_error());
        check(load(file, store, N_WEIGHTS, buffers) == N_WEIGHTS, "a child's load claims too little");
        expert_store_loaded(store);
        free_all(buffers);
        expert_store_free(store);
    }
    _exit(0);
}

// A sanitizer's allocator may be locked by another thread at a fork: with one, only the last thread forks.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const bool FORK_AMONG_THREADS = false;
#else
static const bool FORK_AMONG_THREADS = true;
#endif
static std::atomic<bool> among_threads{true};

static void fork_now(expert_store * store) {
    if (among_threads && !FORK_AMONG_THREADS) {
        return;
    }
    const pid_t pid = fork();
    if (pid == 0) {
        be_a_child(store);
    }
    int status = 0;
    check(pid > 0 && waitpid(pid, &status, 0) == pid, "no child");
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child ended with %x", status);
    n_children++;
}

// Another model of the file, on a thread of its own: of two such, one may have to wait. Its weights go to kept, or are freed.
static void load_another(
    int file, expert_store * store, uint32_t seed, std::mutex & mutex, std::vector<ggml_backend_buffer_t> & kept) {
    random_bits.seed(seed);
    std::vector<ggml_backend_buffer_t> buffers, none;
    while (!expert_store_begin_load(store)) {
        check(strstr(expert_last_error(), "is being loaded"), "no load: %s", expert_last_error());
        check(load(file, nullptr, N_WEIGHTS, none) == 0, "a load that was refused claims");
    }
    if (chance(30)) { // fitting tries devices, of which the last load's count
        check(load(file, store, N_WEIGHTS, buffers, other_device) == N_WEIGHTS, "fitting claims too little");
        free_all(buffers);
    }
    const int n = chance(30) ? below(N_WEIGHTS) : N_WEIGHTS;
    check(load(file, store, n, buffers) == n, "another load claims too little");
    check(expert_store_n_claimed(store) == n || n == 0, "%d weights are claimed, not %d", expert_store_n_claimed(store), n);
    if (n < N_WEIGHTS) {
        free_all(buffers);
        chance(50) ? std::thread(expert_store_not_loaded, store).join() : expert_store_not_loaded(store);
    } else {
        check(expert_store_loaded(store), "another load: %s", expert_last_error());
    }
    check(load(file, nullptr, N_WEIGHTS, none) == 0, "a load after the end of another claims");
    check(!*expert_take_failure(), "another thread's failure");
    std::lock_guard<std::mutex> lock(mutex);
    kept.insert(kept.end(), buffers.begin(), buffers.end());
    n_more++;
}

static void load_more(int file, expert_store * store, tables & shared, std::vector<ggml_backend_buffer_t> & buffers) {
    std::mutex               mutex;
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; i++) {
        threads.emplace_back(load_another, file, store, (uint32_t) random_bits(), std::ref(mutex), std::ref(buffers));
    }
    std::vector<ggml_backend_buffer_t> none;
    check(load(file, nullptr, N_WEIGHTS, none) == 0, "a load claims what is another thread's");
    check(compute_fails(store), "there is no arena");
    for (std::thread & thread : threads) {
        thread.join();
    }
    std::vector<ggml_backend_buffer_t> elsewhere;
    std::fill(shared.per_layer.begin(), shared.per_layer.end(), 1); // slots, on the device of the first model
    check(expert_store_begin_load(store), "no load: %s", expert_last_error());
    check(load(file, store, N_WEIGHTS, elsewhere, other_device) == N_WEIGHTS, "another load claims too little");
    check(!expert_store_loaded(store) && strstr(expert_last_error(), "n_gpu_layers"), "slots of another device are shared");
    free_all(elsewhere);
    check(load(file, nullptr, N_WEIGHTS, none) == 0, "a load after a refused one claims");
}

static void load_with_store(int file) {
    tables         shared;
    expert_store * store = shared.make(file);
    if (!store) {
        check(strstr(expert_last_error(), "already open"), "no store: %s", expert_last_error());
        n_refused++;
        return;
    }
    std::vector<ggml_backend_buffer_t> buffers;
    std::vector<ggml_backend_buffer_t> before; // of fitting
    if (chance(30)) {
        check(load(file, store, N_WEIGHTS, before) == N_WEIGHTS, "fitting claims too little");
        free_all(before);
    }
    const int n = chance(30) ? below(N_WEIGHTS) : N_WEIGHTS; // it may fail in between
    check(load(file, store, n, buffers) == n, "a load claims too little");
    check(expert_store_n_claimed(store) == n || n == 0, "%d weights are claimed, not %d", expert_store_n_claimed(store), n);
    if (chance(10)) {
        fork_now(store);
    }
    if (n == N_WEIGHTS && chance(80)) {
        expert_store_loaded(store);
        std::vector<ggml_backend_buffer_t> none;
        check(load(file, store, N_WEIGHTS, none) == 0, "a second load claims");
        if (chance(50)) {
            check(compute_fails(store), "there is no arena");
        }
        if (chance(50)) {
            load_more(file, store, shared, buffers);
        }
    }
    if (chance(10)) { // by another thread: this one still refers to it, until its next load
        std::thread(expert_store_free, store).join();
        free_all(buffers);
        n_loads++;
        return;
    }
    const bool store_first = chance(50);
    if (store_first) {
        expert_store_free(store);
        shared = {}; // a provider that is gone
        check(buffers.empty() || compute_fails(store), "a closed store computes");
    }
    free_all(buffers);
    if (!store_first) {
        expert_store_free(store);
    }
    n_claims += n;
    n_loads++;
}

static void run_thread(uint32_t seed, int n_rounds) {
    random_bits.seed(seed);
    for (int round = 0; round < n_rounds; round++) {
        const int file = below(2);
        if (chance(50)) {
            load_with_store(file);
        } else {
            std::vector<ggml_backend_buffer_t> none;
            check(load(file, nullptr, N_WEIGHTS, none) == 0, "a load without a store claims");
            n_plain++;
        }
        if (chance(3)) {
            fork_now(nullptr);
        }
    }
}

int main(int argc, char ** argv) {
    begin_step("the arguments");
    check(argc == 4, "%s FOLDER FIRST_SEED N_ROUNDS", argv[0]);
    describe_layers();
    fake_device cpu("CPU", GGML_BACKEND_DEVICE_TYPE_CPU);
    fake_device gpu("GPU", GGML_BACKEND_DEVICE_TYPE_GPU);
    device       = &cpu.dev;
    other_device = &gpu.dev;
    for (int file = 0; file < 2; file++) {
        paths[file] = std::string(argv[1]) + "/" + std::to_string(file) + ".gguf";
        fds[file]   = open(paths[file].c_str(), O_CREAT | O_RDWR, 0600);
        check(fds[file] >= 0, "%s can't be made", paths[file].c_str());
    }
    begin_step("the threads");
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 4; i++) {
        threads.emplace_back(run_thread, (uint32_t) atoi(argv[2]) * 16 + i, atoi(argv[3]));
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    among_threads = false;
    run_thread((uint32_t) atoi(argv[2]), 100);
    int64_t       n_ended = 0;
    const int32_t n       = expert_reads_under_way(&n_ended);
    check(n == 0, "%d reads are under way", n);
    check(n_claims > 0 && n_refused > 0 && n_plain > 0 && n_children > 0 && n_more > 0, "it was not tried");
    printf(
        "%lld loads claimed %lld weights, %lld more shared them, %lld stores were refused, %lld loads had none, %lld children\n",
        (long long) n_loads, (long long) n_claims, (long long) n_more, (long long) n_refused, (long long) n_plain,
        (long long) n_children);
}
