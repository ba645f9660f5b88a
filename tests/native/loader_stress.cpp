// Stress of a path that else only a GPU takes: reads that start before their slots are chosen, land in staging memory, and
// are copied on to a device part by part. And of the slots that native takes by itself.
//
//   loader_stress FOLDER FIRST_SEED N_STORES       exits with 0 and one line, or with the first thing that was wrong
//
// Each seed is a store of its own, with other settings and faults. After each pass every byte of what was handed out is
// compared, after each round every counter, slot and buffer is looked at. Compiled without access control, for the last.
#include "stress_fakes.h"
#include "stress_provider.h"

#include <set>

static int64_t n_rounds = 0, n_experts = 0, n_failed = 0, n_native = 0, n_by_provider = 0, n_host_hits = 0, n_in_transit = 0,
               n_ahead = 0, n_moved[2] = {0, 0};

static void check_bytes(int key, const char * found) {
    const char * right = &pack[blocks[key].offset];
    if (memcmp(found, right, bytes_of(key)) != 0) {
        const ptrdiff_t at = std::mismatch(found, found + bytes_of(key), right).first - found;
        check(false, "key %d is wrong from byte %td of %llu", key, at, (unsigned long long) bytes_of(key));
    }
}

// What this pass hands out is wanted, was not handed out before, and is right.
static void check_pass(books & b, int layer) {
    std::lock_guard<std::mutex> lock(b.mutex);
    for (int expert = 0; expert < layers[layer].n_expert; expert++) {
        const char * data = b.store->op.data[expert];
        const int    key  = layers[layer].first_key + expert;
        if (data) {
            check(b.wanted[key], "expert %d is handed out twice, or was never asked for", expert);
            check(b.slot_of[key] >= 0 && data == b.store->slot_data[b.slot_of[key]], "expert %d is in no slot", expert);
            check(!b.in_place[b.slot_of[key]] || is_locked(data, bytes_of(key)), "a device can't read a slot");
            check_bytes(key, data);
            b.wanted[key] = 0;
            n_experts++;
        }
    }
}

// Nothing is being loaded: the tables say what the provider's own books say, of each slot and each expert.
static void check_tables(const books & b) {
    std::vector<int32_t> right(blocks.size(), -1); // [key] slot
    for (size_t slot = 0; slot < b.holder.size(); slot++) {
        const int key = b.holder[slot];
        check(b.owner[slot] == key, "slot %zu is key %lld's, not %d's", slot, (long long) b.owner[slot], key);
        if (key >= 0) {
            check(right[key] < 0, "key %d has slots %d and %zu", key, right[key], slot);
            const pool & pool = b.pools[b.layer_pool[layer_of[key]]];
            check(
                (int) slot >= pool.first && (int) slot < pool.first + pool.n, "key %d is in slot %zu of another pool", key, slot);
            right[key] = (int32_t) slot;
        }
    }
    for (size_t key = 0; key < blocks.size(); key++) {
        check(b.reserved_slot[key] == right[key], "key %zu has slot %d reserved, not %d", key, b.reserved_slot[key], right[key]);
        check(b.slot_of[key] == right[key], "key %zu is published in slot %d, not %d", key, b.slot_of[key], right[key]);
    }
    check(b.got.empty() && !b.by_fetch, "a fetch was not followed by prepare()");
}

// Nothing is under way, and no buffer or slot is lost.
static void check_quiet(books & b) {
    expert_loader &             loader = b.store->loader;
    std::lock_guard<std::mutex> lock(loader.mutex);
    check_tables(b);
    check(n_preads == 0, "%d reads of the file are under way", n_preads.load());
    check(loader.n_reading == 0 && loader.waiting.empty(), "%d reads go on, %zu wait", loader.n_reading, loader.waiting.size());
    for (const auto & buffers : loader.buffers) {
        const size_t                 n = (size_t) b.store->tables.n_reads;
        const std::set<const char *> distinct(buffers.second.begin(), buffers.second.end());
        check(buffers.second.size() == n && distinct.size() == n, "buffers are lost or given back twice");
    }
    std::set<const char *> copies;
    for (size_t slot = 0; slot < b.holder.size(); slot++) {
        const int          key  = b.holder[slot];
        const char * const copy = b.store->slot_copy[slot];
        if (copy && key >= 0 && b.slot_of[key] == (int) slot) {
            check_bytes(key, copy);
            check(b.in_place[slot] && copies.insert(copy).second, "a block in transit is that of two slots");
            n_in_transit++;
        }
        if (key >= 0) {
            check(b.given[key] || b.blocks[key].check != 1, "key %d was right and is still to be checked", key);
        }
    }
    for (size_t key = 0; key < blocks.size(); key++) {
        check(b.never_right[key] ? b.blocks[key].check == b.kind : b.blocks[key].check <= b.kind, "key %zu: check %d", key,
            b.blocks[key].check);
    }
    for (fake_device * gpu : gpus) {
        std::lock_guard<std::mutex> lock(gpu->mutex);
        check(gpu->copies.empty(), "copies go on");
        gpu->lost = false;
    }
}

static void check_counters(const books & b, int64_t bytes, int64_t bytes_min, int64_t bytes_max) {
    const int64_t    h2d        = h2d_bytes;
    static const int COUNTERS[] = {EXPERT_ACQUIRES, EXPERT_HITS, EXPERT_MISSES, EXPERT_EVICTIONS, EXPERT_LOADS,
        EXPERT_PROVIDER_CALLS, EXPERT_IO_ERRORS, EXPERT_FALLBACKS, EXPERT_FAILURES, EXPERT_HOST_HITS};
    for (int i : COUNTERS) {
        const int64_t expected = i == EXPERT_FALLBACKS && b.store->tables.is_direct ? 0 : b.expected[i];
        check(b.counters[i] == expected, "counter %d is %lld, not %lld", i, (long long) b.counters[i], (long long) expected);
    }
    check(b.counters[EXPERT_IO_RETRIES] == b.counters[EXPERT_IO_ERRORS], "errors that were not tried again");
    check(b.counters[EXPERT_H2D_BYTES] == h2d, "%lld bytes to the device, not %lld", (long long) b.counters[EXPERT_H2D_BYTES],
        (long long) h2d);
    check(bytes >= bytes_min && bytes <= bytes_max, "%lld bytes read, not %lld to %lld", (long long) bytes, (long long) bytes_min,
        (long long) bytes_max);
}

// Between two graphs of a device.
static void move_some(books & b) {
    fake_copier copier;
    for (const auto & arena : b.store->arenas) {
        bool quiet = false;
        b.store->planned_at -= chance(50) ? (int64_t) layers.size() : 0; // a token has passed
        b.store->planned_hits -= EXPERT_HITS_A_PLAN;
        for (const auto & [key, slot] : expert_store_move(b.store, *arena, copier, [&] { quiet = true; })) {
            check(quiet, "an expert moved while kernels may have read it");
            check(b.slot_of[key] == slot, "key %d moved in slot %d and is in %d", key, slot, b.slot_of[key]);
            check_bytes(key, b.store->slot_data[slot]);
            n_moved[b.in_place[slot]]++;
        }
    }
}

// Experts of the layer begin to be read while a device computes with those of another one, which stay. Whether it tried to.
static bool read_ahead(books & b, int32_t layer) {
    std::vector<int32_t> others;
    for (int32_t other = 0; other < (int32_t) layers.size(); other++) {
        if (other != layer && SHAPES[other].device == SHAPES[layer].device) {
            others.push_back(other);
        }
    }
    if (others.empty() || chance(40)) {
        return false;
    }
    const int32_t computing = others[below((int) others.size())];
    std::fill(b.wanted.begin(), b.wanted.end(), 0);
    for (size_t key = 0; key < blocks.size(); key++) {
        b.wanted[key] = b.reserved_slot[key] >= 0 && (layer_of[key] == computing || layer_of[key] == layer);
    }
    for (size_t key = 0; key < blocks.size(); key++) { // rows of a prompt
        b.store->of_prompt[key] = layer_of[key] == layer ? below(4) : b.store->of_prompt[key];
    }
    b.store->had_prompt[layer] = chance(50);
    b.ahead                    = true;
    n_ahead += expert_layer_read_ahead(b.store, layer, computing, chance(80));
    b.ahead = false;
    nap(50, 3000); // the device computes
    return true;
}

static bool run_round(books & b, bool by_layer) {
    expert_books * const store = b.store;
    const int            layer = below((int) layers.size());
    const int            n     = layers[layer].n_expert;
    std::vector<int32_t> experts(n);
    std::vector<int64_t> rows(n, 0);
    const int            first_key = layers[layer].first_key;
    std::iota(experts.begin(), experts.end(), 0);
    std::shuffle(experts.begin(), experts.end(), random_bits);
    experts.resize(chance(10) ? n : 1 + below(chance(50) ? n : std::min(n, 5)));
    b.failed                            = false;
    b.native_bytes                      = 0;
    const int64_t read_before           = b.counters[EXPERT_READ_BYTES];
    const int64_t withdrawn_before      = n_withdrawn;
    pread_bytes                         = 0;
    const bool                   ahead  = read_ahead(b, layer);
    const std::vector<char>      coming = ahead && store->ahead.layer == layer ? store->ahead.fetched : std::vector<char>(n, 0);
    std::unique_lock<std::mutex> lock(b.mutex);
    std::fill(b.wanted.begin(), b.wanted.end(), 0);
    for (int32_t expert : experts) {
        const bool hit = !coming[expert] && b.slot_of[first_key + expert] >= 0;
        rows[expert] = b.wanted[first_key + expert] = 1;
        b.expected[hit ? EXPERT_HITS : EXPERT_MISSES]++;
        b.expected[EXPERT_HOST_HITS] += hit && b.in_place[b.slot_of[first_key + expert]];
    }
    b.expected[EXPERT_ACQUIRES]++;
    lock.unlock();
    const expert_ref * ref = &store->refs.at(layers[layer].roles[0].tensor);

    if (by_layer) {
        expert_layer_begin(store, layer, experts, (int64_t) experts.size());
    } else { // passes begin while reads go on
        expert_op_begin(ref, rows.data(), 1, nullptr);
    }
    check_pass(b, layer);
    const int n_fits = b.layer_slots[layer]; // all at once, if they are as many, also where the cache has become smaller
    check(!by_layer || b.failed || store->op.todo.empty() || (int) experts.size() > n_fits,
        "%zu of %zu experts wait, of %d slots", store->op.todo.size(), experts.size(), n_fits);
    while (!store->op.todo.empty()) {
        nap(50, 3000); // the experts are being used
        expert_op_next(ref);
        check_pass(b, layer);
    }
    expert_wait_for_reads_ahead(store); // what was not needed
    check_quiet(b);
    const bool ok = expert_op_end(ref);
    for (std::thread & thread : b.reading) {
        thread.join();
    }
    b.reading.clear();
    move_some(b);

    // what was read ahead and failed before the decode began is read again
    check(ok == !b.failed || (ok && ahead), "the decode %s", ok ? "did not fail" : "failed");
    check(!ok || std::count(b.wanted.begin(), b.wanted.end(), 1) == 0, "experts were not handed out");
    check(ok != (*expert_take_failure() != 0), "a failure without a reason, or a reason without one");
    b.expected[EXPERT_FAILURES] += !ok;
    const bool exact = !b.failed && n_withdrawn == withdrawn_before && copy_faults != COPY_REFUSED &&
                       copy_faults != COPY_DEVICE_LOST && read_faults != READ_FAILS; // else what counts varies
    const int64_t bytes = b.counters[EXPERT_READ_BYTES] - read_before;
    check_counters(b, bytes, exact ? (int64_t) pread_bytes : b.native_bytes, pread_bytes);
    n_rounds++;
    n_failed += !ok;
    return ok;
}

static void damage(expert_block & block, int fault) {
    if (fault == BLOCK_NO_FILE) {
        block.fd = -1;
    } else if (fault == BLOCK_CLOSED_FILE) {
        block.fd = 1 << 30;
    } else if (fault == BLOCK_SHORT_FILE) {
        block.fd = short_fd;
    } else if (fault == BLOCK_WRONG_DIGEST) {
        block.digest[below(16)] ^= 1;
    }
}

static void run_store(uint32_t seed, fake_device ** devices) {
    random_bits.seed(seed);
    begin_step("seed %u, creation", seed);
    h2d_bytes               = 0;
    lock_refused            = chance(30) ? 30 : 0;
    expert_host_chunk_bytes = 1 << below(22);
    books         b;
    const int32_t n_reads = chance(50) ? 1 + below(3) : 1 + below(16);
    const int32_t n_parts = chance(30) ? 1 : 1 + below(64);
    moves_are_checked     = b.kind == 2;
    const int fault       = seed % 8 < BLOCK_FAULTS ? (int) seed % 8 : BLOCK_RIGHT;
    for (size_t key = 0; key < blocks.size(); key++) {
        b.blocks[key].check = b.kind;
        if (chance(40)) {
            damage(b.blocks[key], fault);
            b.never_right[key] = fault != BLOCK_RIGHT && fault != BLOCK_SHORT_FILE;
        }
    }
    const expert_tables   tables = {b.slot_of.data(), b.freq.data(), b.last_use.data(), b.counters.data(), b.reserved_slot.data(),
          b.owner.data(), b.layer_slots.data(), b.layer_pool.data(), b.next_slots.data(), b.in_place.data(), b.blocks.data(),
          b.seen_freq.data(), b.seen_owner.data(), b.seen_in_place.data(), b.moves_up.data(), b.moves_down.data(), n_reads, n_parts,
          chance(50)};
    const expert_provider provider = {
        EXPERT_ABI_VERSION, sizeof(expert_provider), &b, open_arena, choose_slots, prepare, read, may_take, plan, withdraw};
    b.store = expert_books_of(expert_store_create(pack_path.c_str(), layers.data(), (int32_t) layers.size(), &tables, &provider));
    check(b.store, "no store: %s", expert_last_error());
    for (size_t l = 0; l < layers.size(); l++) {
        b.store->layer_dev[l] = &devices[SHAPES[l].device]->dev;
    }
    const int      trace_fd = open("/dev/null", O_WRONLY);
    expert_trace * trace    = expert_trace_new(trace_fd, "/dev/null");
    check(expert_store_trace(b.store, trace) && expert_store_open_arenas(b.store), "no start: %s", expert_last_error());
    b.store->loader.readers.polling = chance(20);

    bool freed_at_once = false;
    for (int round = 0; round < 24 && !freed_at_once; round++) {
        random_bits.seed(seed << 8 | round); // what was drawn during the last one depends on the threads' order
        const bool by_layer = chance(65);
        freed_at_once       = chance(15);
        b.fetch_fault       = chance(60) ? FETCH_RIGHT : below(FETCH_FAULTS);
        b.provider_fails    = chance(by_layer ? 90 : 60) ? 0 : 30;
        copy_faults         = chance(70) ? COPY_RIGHT : below(COPY_FAULTS);
        read_faults         = chance(70) ? READ_RIGHT : below(b.kind == 2 ? READ_FAULTS : READ_WRONG_BYTES);
        begin_step("seed %u, round %d (%d reads of %d parts, check %d; faults of blocks %d, fetch %d, copies %d, reads %d; %s)",
            seed, round, n_reads, n_parts, b.kind, fault, b.fetch_fault, copy_faults.load(), read_faults.load(),
            by_layer ? "by layer" : "as they come");
        freed_at_once = !run_round(b, by_layer) && freed_at_once;
    }
    for (size_t slot = 0; slot < b.holder.size() && !freed_at_once; slot++) {
        if (b.holder[slot] >= 0) {
            check_bytes(b.holder[slot], b.store->slot_data[slot]);
        }
    }
    begin_step("seed %u, end", seed);
    for (const auto & arena : b.store->arenas) {
        for (expert_mover & mover : arena->movers) {
            fake_copier  copier; // a device's end waits for its copies
            expert_moved moved;
            mover.end(*b.store, copier, moved);
        }
    }
    b.failed = true;
    read_ahead(b, below((int) layers.size())); // which nobody waits for
    expert_store_free(b.store);
    for (std::thread & thread : b.reading) {
        thread.join();
    }
    expert_trace_free(trace);
    close(trace_fd);
    check(locked.empty(), "memory stays locked");
    n_host_hits += b.expected[EXPERT_HOST_HITS];
    n_native += b.expected[EXPERT_FALLBACKS];
    n_by_provider += b.expected[EXPERT_LOADS] - b.expected[EXPERT_FALLBACKS];
}

int main(int argc, char ** argv) {
    begin_step("the arguments");
    check(argc == 4, "%s FOLDER FIRST_SEED N_STORES", argv[0]);
    const int         first = atoi(argv[2]);
    const int         n     = atoi(argv[3]);
    std::atomic<bool> done{false};
    std::thread       watchdog([&] { watch(done); });
    fetching_thread = std::this_thread::get_id();
    make_pack(argv[1]);
    {
        fake_device   gpu0("GPU0", GGML_BACKEND_DEVICE_TYPE_GPU);
        fake_device   gpu1("GPU1", GGML_BACKEND_DEVICE_TYPE_GPU);
        fake_device   cpu("CPU", GGML_BACKEND_DEVICE_TYPE_CPU);
        fake_device * devices[] = {gpus[0] = &gpu0, gpus[1] = &gpu1, &cpu};
        for (int seed = first; seed < first + n; seed++) {
            run_store((uint32_t) seed, devices);
        }
    }
    done = true;
    watchdog.join();
    check(n_parts_kept > 0 && n_parts_passed_on > 0 && n_failed > 0, "not all was tried");
    check(n_host_hits > 0 && n_withdrawn > 0, "not all was tried in host memory");
    check(n_moved[0] > 0 && n_moved[1] > 0, "no experts moved up, or none down");
    check(n_in_transit > 0, "no experts were copied in transit");
    check(n_ahead > 0, "nothing was read ahead");
    check(n_moved_wrong > 0 || n < 24, "no copy to host memory was wrong"); // few are: then no more are made
    check(n_taken > 0 && n_chosen > 0 && n_skipped > 0, "not all slots were tried");
    printf(
        "ok: seeds %d to %d, %lld rounds (%lld failed as they must), %lld experts right; %lld read by native, %lld by the "
        "provider; %lld parts came before their slot was known, %lld after; %lld slots were taken by native, %lld chosen for it, "
        "%lld left out; %lld hits in host memory, %lld slots there could not be had; %lld experts moved up, %lld down\n",
        first, first + n - 1, (long long) n_rounds, (long long) n_failed, (long long) n_experts, (long long) n_native,
        (long long) n_by_provider, (long long) n_parts_kept.load(), (long long) n_parts_passed_on.load(), (long long) n_taken,
        (long long) n_chosen, (long long) n_skipped, (long long) n_host_hits, (long long) n_withdrawn, (long long) n_moved[0],
        (long long) n_moved[1]);
    return 0;
}
