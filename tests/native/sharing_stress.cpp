// Stress of models that share a store: threads that load one after another, while others compute, that compute at the same
// time, whose reads fail, whose loads fail, and that are freed in any order.
//
//   sharing_stress FOLDER FIRST_SEED N_STORES       exits with 0 and one line, or with the first thing that was wrong
//
// Each model looks at every byte that it is given; a failure must name an expert that it asked for itself, and each layer
// that it computes must be counted once, whoever computed between its roles.
#include "stress_fakes.h"

#include "expert_provider.h"
#include "expert_store.h"

#include <fcntl.h>

#include <string>
#include <vector>

static const int N_LAYERS = 3, N_ROLES = 2, N_EXPERT = 6, N_SLOTS = 3; // of a layer; fewer than experts: passes
static const int ROLE_BYTES = 2048;

static std::vector<expert_layer> layers;
static std::string               path;
static int                       fd;
static fake_device *             cpu;
static std::atomic<int64_t>      n_computed{0}, n_failed{0}, n_loads{0}, n_failed_loads{0};

static void describe_layers() {
    for (int l = 0; l < N_LAYERS; l++) {
        expert_layer layer = {N_EXPERT, N_ROLES, l * N_EXPERT, 0, N_ROLES * ROLE_BYTES, {}};
        for (int r = 0; r < N_ROLES; r++) {
            layer.roles[r] = {"", GGML_TYPE_I8, 0, {ROLE_BYTES, 1, N_EXPERT}, ROLE_BYTES, (uint64_t) r * ROLE_BYTES};
            snprintf(layer.roles[r].tensor, EXPERT_NAME_BYTES, "blk.%d.role%d", l, r);
        }
        layers.push_back(layer);
    }
}

// ---- what the models share: a provider that reads all blocks itself, and a pool of slots for each layer

struct shared_store {
    std::vector<int32_t>      slot_of       = std::vector<int32_t>(N_LAYERS * N_EXPERT, -1);
    std::vector<int32_t>      reserved_slot = slot_of;
    std::vector<int64_t>      freq          = std::vector<int64_t>(N_LAYERS * N_EXPERT, 0);
    std::vector<int64_t>      last_use      = freq;
    std::vector<int64_t>      counters      = std::vector<int64_t>(EXPERT_COUNTERS, 0);
    std::vector<int64_t>      owner         = std::vector<int64_t>(N_LAYERS * N_EXPERT, -1);
    std::vector<uint8_t>      in_place      = std::vector<uint8_t>(N_LAYERS * N_EXPERT, 0);
    std::vector<int32_t>      layer_slots   = std::vector<int32_t>(N_LAYERS, 0);
    std::vector<int32_t>      layer_pool    = {0, 1, 2};
    std::vector<int32_t>      next_slots    = std::vector<int32_t>(N_LAYERS * EXPERT_NEXT_SLOTS, -1);
    std::vector<expert_block> blocks        = std::vector<expert_block>(N_LAYERS * N_EXPERT);
    char *                    slots         = nullptr;
    expert_store *            store         = nullptr;
    std::atomic<int64_t>      n_acquires{0};
    std::mutex                turn;  // to load
    std::mutex                mutex; // guards the next one
    std::vector<std::thread>  reading;

    shared_store();
    ~shared_store() {
        check(counters[EXPERT_ACQUIRES] == n_acquires, "%lld acquires are counted, not %lld",
            (long long) counters[EXPERT_ACQUIRES], (long long) n_acquires);
        expert_store_free(store);
    }
    void join_reads() {
        std::lock_guard<std::mutex> lock(mutex);
        for (std::thread & thread : reading) {
            thread.join();
        }
        reading.clear();
    }
};

static int open_arena(void * user, const char * device, uint64_t, const int32_t *, int32_t n_layers) {
    shared_store &        shared = *(shared_store *) user;
    std::vector<int32_t>  slots;
    std::vector<uint64_t> offsets;
    for (int i = 0; i < N_LAYERS * N_SLOTS; i++) {
        slots.push_back(i);
        offsets.push_back((uint64_t) i * N_ROLES * ROLE_BYTES);
    }
    check(n_layers == N_LAYERS, "an arena for %d layers", n_layers);
    check(!shared.slots, "an arena is opened twice");
    int       pinned = 0;
    const int ok     = expert_store_add_arena(shared.store, device, offsets.size() * N_ROLES * ROLE_BYTES, slots.data(),
            offsets.data(), (int32_t) offsets.size(), &pinned);
    check(ok, "no arena: %s", expert_last_error());
    shared.slots = (char *) expert_store_host_slot(shared.store, 0);
    std::fill(shared.layer_slots.begin(), shared.layer_slots.end(), N_SLOTS);
    return 1;
}

static int choose_slots(void * user, int32_t layer, const int32_t * missing, int32_t n_missing, const int32_t * active,
    int32_t n_active, int32_t, int32_t * slots) {
    shared_store & shared = *(shared_store *) user;
    int            slot   = layer * N_SLOTS;
    for (int i = 0; i < n_missing; i++, slot++) {
        const auto is_active = [&](int64_t key) {
            return key >= 0 && std::find(active, active + n_active, key - layers[layer].first_key) != active + n_active;
        };
        while (is_active(__atomic_load_n(&shared.owner[slot], __ATOMIC_ACQUIRE))) {
            slot++;
        }
        check(slot < (layer + 1) * N_SLOTS, "no slot can go");
        if (shared.owner[slot] >= 0) {
            shared.slot_of[shared.owner[slot]] = shared.reserved_slot[shared.owner[slot]] = -1;
        }
        shared.owner[slot]                                         = layers[layer].first_key + missing[i];
        shared.reserved_slot[layers[layer].first_key + missing[i]] = slots[i] = slot;
    }
    return 1;
}

static void prepare(void * user, int32_t layer, const int32_t *, int32_t) {
    int32_t * next = &((shared_store *) user)->next_slots[layer * EXPERT_NEXT_SLOTS];
    const int n    = below(N_SLOTS + 1);
    for (int i = 0; i < n; i++) {
        next[i] = layer * N_SLOTS + (i + n) % N_SLOTS;
    }
    next[n] = -1;
}

static void read_now(shared_store & shared, int32_t layer, int32_t expert, int32_t slot) {
    const int key = layers[layer].first_key + expert;
    nap(30, 300);
    if (chance(2)) {
        __atomic_store_n(&shared.reserved_slot[key], -1, __ATOMIC_RELAXED);
        __atomic_store_n(&shared.owner[slot], -1, __ATOMIC_RELEASE);
        expert_store_fail(shared.store, layer, expert, ("expert " + std::to_string(key) + " is made to fail").c_str());
        return;
    }
    for (int r = 0; r < N_ROLES; r++) {
        memset(shared.slots + (slot * N_ROLES + r) * ROLE_BYTES, key * N_ROLES + r, ROLE_BYTES);
    }
    expert_store_commit(shared.store, layer, expert, slot);
}

static void read(void * user, int32_t layer, int32_t expert, int32_t slot) {
    shared_store & shared = *(shared_store *) user;
    if (chance(50)) {
        read_now(shared, layer, expert, slot);
        return;
    }
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.reading.emplace_back(read_now, std::ref(shared), layer, expert, slot);
}

shared_store::shared_store() {
    for (expert_block & block : blocks) {
        block.fd = -1;
    }
    const expert_tables   tables   = {slot_of.data(), freq.data(), last_use.data(), counters.data(), reserved_slot.data(),
            owner.data(), layer_slots.data(), layer_pool.data(), next_slots.data(), in_place.data(), blocks.data(), nullptr, nullptr,
            nullptr, nullptr, nullptr, 2, 1, 0, 0};
    const expert_provider provider = {
        EXPERT_ABI_VERSION, sizeof(expert_provider), this, open_arena, choose_slots, prepare, ::read, nullptr, nullptr, nullptr};
    store = expert_store_create(path.c_str(), layers.data(), N_LAYERS, &tables, &provider);
    check(store, "no store: %s", expert_last_error());
    expert_store_not_loaded(store); // that was the load of this thread's model, which has none
}

// ---- a model

struct model {
    std::vector<ggml_backend_buffer_t> buffers;
    std::vector<const expert_ref *>    refs; // [layer * N_ROLES + role]

    // The first n weights, as far as a store provides them.
    void load(int n) {
        for (int i = 0; i < n; i++) {
            const expert_role & role  = layers[i / N_ROLES].roles[i % N_ROLES];
            ggml_tensor         meta  = {};
            const char *        error = nullptr;
            meta.type                 = GGML_TYPE_I8;
            std::copy(role.ne, role.ne + 3, meta.ne);
            ggml_set_name(&meta, role.tensor);
            ggml_backend_buffer_type_t buft = expert_claim(fd, &meta, &cpu->dev, &error);
            check(!error, "a claim failed: %s", error);
            if (buft) {
                nap(10, 200);
                buffers.push_back(ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alignment(buft)));
                meta.buffer = buffers.back();
                meta.data   = ggml_backend_buffer_get_base(meta.buffer);
                check(ggml_backend_buffer_init_tensor(meta.buffer, &meta) == GGML_STATUS_SUCCESS, "no tensor");
                refs.push_back(expert_ref_of(&meta));
            }
        }
    }
    void free() {
        for (ggml_backend_buffer_t buffer : buffers) {
            ggml_backend_buffer_free(buffer);
        }
        buffers.clear();
        refs.clear();
    }
};

static void load_model(shared_store & shared, model & llm) {
    std::lock_guard<std::mutex> turn(shared.turn);
    if (chance(30)) {
        check(expert_store_begin_load(shared.store), "no load: %s", expert_last_error());
        llm.load(below(N_LAYERS * N_ROLES));
        llm.free();
        expert_store_not_loaded(shared.store);
        n_failed_loads++;
    }
    check(expert_store_begin_load(shared.store), "no load: %s", expert_last_error());
    check(!expert_store_begin_load(shared.store) && strstr(expert_last_error(), "is being loaded"), "two loads at a time");
    llm.load(N_LAYERS * N_ROLES);
    check(expert_store_n_claimed(shared.store) == N_LAYERS * N_ROLES, "a load claims too little");
    check(expert_store_open_arenas(shared.store), "no arenas: %s", expert_last_error());
    n_loads++;
}

// False if it failed.
static bool compute_role(const expert_ref * ref, const std::vector<int64_t> & rows) {
    const int         first_key = layers[ref->layer].first_key;
    std::vector<char> given(N_EXPERT, 0);
    expert_op_begin(ref, rows.data(), 1, nullptr);
    while (true) {
        const char * const * data = expert_op_data(ref);
        for (int expert = 0; expert < N_EXPERT; expert++) {
            const char right = (char) ((first_key + expert) * N_ROLES + ref->role);
            if (data[expert]) {
                check(rows[expert] && !given[expert], "expert %d was not asked for, or is given twice", expert);
                check(std::count(data[expert], data[expert] + ROLE_BYTES, right) == ROLE_BYTES, "expert %d is wrong", expert);
                given[expert] = 1;
            }
        }
        if (!expert_op_more(ref)) {
            break;
        }
        nap(20, 100);
        expert_op_next(ref);
    }
    const bool        ok  = expert_op_end(ref);
    const std::string why = expert_take_failure();
    check(ok == why.empty(), "a failure without a reason, or a reason without one");
    if (ok) {
        check(std::equal(given.begin(), given.end(), rows.begin()), "an expert was not given");
        return true;
    }
    const int key = atoi(why.c_str() + strlen("expert ")) - first_key;
    check(key >= 0 && key < N_EXPERT && rows[key], "it failed, it is said, for %s", why.c_str());
    n_failed++;
    return false;
}

static void be_a_model(shared_store & shared, uint32_t seed) {
    random_bits.seed(seed);
    nap(50, 3000);
    model llm;
    load_model(shared, llm);
    for (int round = 0; round < 30; round++) {
        const int            layer = round % N_LAYERS;
        std::vector<int64_t> rows(N_EXPERT, 0);
        rows[below(N_EXPERT)] = 1;
        for (int64_t & n : rows) {
            n |= chance(40);
        }
        shared.n_acquires++;
        n_computed++;
        for (int r = 0; r < N_ROLES && compute_role(llm.refs[layer * N_ROLES + r], rows); r++) {
            nap(20, 100);
        }
        model plain;
        if (chance(5)) {
            plain.load(N_LAYERS * N_ROLES);
            check(plain.buffers.empty(), "a load without a store claims");
        }
    }
    llm.free();
    if (chance(50)) { // it runs again, beside the others
        load_model(shared, llm);
        llm.free();
    }
}

int main(int argc, char ** argv) {
    begin_step("the arguments");
    check(argc == 4, "%s FOLDER FIRST_SEED N_STORES", argv[0]);
    std::atomic<bool> done{false};
    std::thread       watchdog([&] { watch(done); });
    describe_layers();
    path = std::string(argv[1]) + "/model.gguf";
    fd   = open(path.c_str(), O_CREAT | O_RDWR, 0600);
    check(fd >= 0, "%s can't be made", path.c_str());
    fake_device device("CPU", GGML_BACKEND_DEVICE_TYPE_CPU);
    cpu = &device;
    for (int i = 0; i < atoi(argv[3]); i++) {
        const uint32_t seed = (uint32_t) (atoi(argv[2]) + i);
        begin_step("seed %u", seed);
        shared_store             shared;
        std::vector<std::thread> models;
        for (uint32_t m = 0; m < 3; m++) {
            models.emplace_back(be_a_model, std::ref(shared), seed * 16 + m);
        }
        for (std::thread & thread : models) {
            thread.join();
        }
        shared.join_reads();
    }
    done = true;
    watchdog.join();
    check(n_failed > 0 && n_failed_loads > 0, "not all was tried");
    printf("ok: %lld models computed %lld layers, %lld failed as they must, %lld loads failed\n", (long long) n_loads,
        (long long) n_computed, (long long) n_failed, (long long) n_failed_loads);
}
