// A provider for the small pack that does the least that the ABI asks for, and that wrongly when it is told to.
//
// It keeps books of its own beside the shared tables: what native did to these is looked at as soon as the provider
// hears of it, and all of them after each round. Which slots native may take next is random.
#pragma once

#include "expert_books.h"
#include "stress_pack.h"

#include <map>
#include <numeric>

// ---- a provider

enum fetch_fault { FETCH_RIGHT, FETCH_SLOW, FETCH_FAILS, FETCH_NO_SLOT, FETCH_FAULTS };
enum next_slots { NEXT_AS_BEFORE, NEXT_NONE, NEXT_FEW, NEXT_FETCHED_FIRST, NEXT_RANDOM };
enum block_fault { BLOCK_RIGHT, BLOCK_NO_FILE, BLOCK_CLOSED_FILE, BLOCK_SHORT_FILE, BLOCK_WRONG_DIGEST, BLOCK_FAULTS };

struct pool {
    uint64_t block_bytes;
    int32_t  first;
    int32_t  n;
    int32_t  n_host; // the last ones are in host memory that the device reads in place
};

static int64_t n_taken     = 0; // slots that native took by itself; both from the fetching thread
static int64_t n_chosen    = 0; // that it had chosen for it
static int64_t n_skipped   = 0; // that were to be taken next and were not: in use
static int64_t n_withdrawn = 0; // that could not be had in host memory

static std::atomic<int64_t> n_plans{0};
static const int            N_SPARE   = 2; // blocks of a pool that has slots in host memory
static const int            N_TRANSIT = 2; // behind them

struct books {
    expert_books *            store  = nullptr;
    std::vector<expert_block> blocks = ::blocks;
    std::vector<int32_t>      slot_of, reserved_slot, layer_slots, layer_pool, next_slots;
    std::vector<int64_t>      owner, freq, last_use, counters, expected, seen_freq, seen_owner;
    std::vector<uint8_t>      in_place, seen_in_place;
    std::vector<int32_t>      moves_up, moves_down;
    std::vector<pool>         pools;
    const int32_t             kind = below(3); // of check, for all blocks
    std::vector<char>         never_right;     // [key] when native reads it
    std::vector<char>         gone;            // [slot] withdrawn

    const int        memory_short   = chance(30) ? 50 : 0; // percent of the times that host memory is asked for
    int              fetch_fault    = FETCH_RIGHT;         // of this round, like the next
    std::atomic<int> provider_fails = 0;                   // percent of its reads

    std::mutex               mutex;                // guards what follows, and expected
    std::vector<int32_t>     holder;               // [slot] key, -1: free: what owner must be
    std::vector<char>        wanted;               // [key] active: this round asks for it, and it was not handed out yet
    std::map<int, int32_t>   got;                  // slots by key, of the fetch under way: those the provider knows of
    std::vector<int32_t>     can_go;               // at the first of these: next slots that are not in use, in order
    bool                     by_fetch = false;     // the provider chose them
    bool                     ahead    = false;     // and native may have shared them out otherwise
    std::vector<char>        given;                // [key] the provider has read it
    bool                     failed       = false; // this round: the decode must fail
    int64_t                  native_bytes = 0;     // of what native brought in, this round
    std::vector<std::thread> reading;

    books() :
        slot_of(blocks.size(), -1), reserved_slot(blocks.size(), -1), layer_slots(layers.size(), 0),
        layer_pool(layers.size(), -1), next_slots(layers.size() * EXPERT_NEXT_SLOTS, -1), owner(blocks.size(), -1),
        freq(blocks.size(), 0), last_use(blocks.size(), 0), counters(EXPERT_COUNTERS, 0), expected(EXPERT_COUNTERS, 0),
        seen_freq(blocks.size(), 0), seen_owner(blocks.size(), -1), in_place(blocks.size(), 0), seen_in_place(blocks.size(), 0),
        moves_up(layers.size() * EXPERT_MOVES, -1), moves_down(layers.size() * EXPERT_MOVES, -1), never_right(blocks.size(), 0),
        wanted(blocks.size(), 0), given(blocks.size(), 0) {}
};

// Any slots of the pool, in any order: also slots of experts that are active, on their way, or just fetched.
static void choose_next(books & b, int32_t index, const std::vector<int32_t> & fetched) {
    static const next_slots KINDS[] = {
        NEXT_AS_BEFORE, NEXT_NONE, NEXT_FEW, NEXT_FETCHED_FIRST, NEXT_RANDOM, NEXT_RANDOM, NEXT_RANDOM};
    const next_slots kind = KINDS[below(sizeof(KINDS) / sizeof(KINDS[0]))];
    if (kind == NEXT_AS_BEFORE) {
        return;
    }
    std::vector<int32_t> slots;
    for (int32_t slot = b.pools[index].first; slot < b.pools[index].first + b.pools[index].n; slot++) {
        if (!b.gone[slot]) {
            slots.push_back(slot);
        }
    }
    std::shuffle(slots.begin(), slots.end(), random_bits);
    if (kind == NEXT_FETCHED_FIRST) {
        std::stable_partition(slots.begin(), slots.end(),
            [&](int32_t slot) { return std::find(fetched.begin(), fetched.end(), slot) != fetched.end(); });
    }
    const size_t n = kind == NEXT_NONE ? 0 : kind == NEXT_FEW ? below(4) : EXPERT_NEXT_SLOTS;
    slots.resize(std::min(n, slots.size()));
    slots.resize(EXPERT_NEXT_SLOTS, -1);
    std::copy(slots.begin(), slots.end(), &b.next_slots[index * EXPERT_NEXT_SLOTS]);
}

static int open_arena(void * user, const char * device, uint64_t, const int32_t * on_device, int32_t n_layers) {
    books &               b          = *(books *) user;
    const int32_t         first      = (int32_t) b.holder.size();
    const size_t          first_pool = b.pools.size();
    std::vector<int32_t>  slots;
    std::vector<uint64_t> offsets;
    uint64_t              n_bytes = 0;
    int32_t               n       = 0;
    for (int i = 0; i < n_layers; i++) { // as many slots as experts, so far
        const expert_layer & layer = layers[on_device[i]];
        size_t               index = first_pool;
        while (index < b.pools.size() && b.pools[index].block_bytes != layer.block_bytes) {
            index++;
        }
        if (index == b.pools.size()) {
            b.pools.push_back({layer.block_bytes, 0, 0, 0});
        }
        b.pools[index].n += layer.n_expert;
        b.layer_pool[on_device[i]] = (int32_t) index;
    }
    b.gone.resize(blocks.size(), 0);
    for (size_t index = first_pool; index < b.pools.size(); index++) {
        pool & pool = b.pools[index];
        pool.first  = first + n;
        pool.n      = chance(30) ? pool.n : 1 + below(pool.n);
        pool.n_host = strcmp(device, "CPU") == 0 || chance(40) ? 0 : below(pool.n);
        for (int s = 0; s < pool.n - pool.n_host; s++, n_bytes += pool.block_bytes) {
            slots.push_back(pool.first + s);
            offsets.push_back(n_bytes);
        }
        n_bytes += (N_SPARE + N_TRANSIT) * pool.block_bytes * (pool.n_host > 0);
        n += pool.n;
        choose_next(b, (int32_t) index, {});
    }
    for (int i = 0; i < n_layers; i++) {
        b.layer_slots[on_device[i]] = b.pools[b.layer_pool[on_device[i]]].n;
    }
    int n_host_before = 0;
    int pinned        = 0;
    int ok = expert_store_add_arena(b.store, device, n_bytes, slots.data(), offsets.data(), (int) slots.size(), &pinned);
    check(ok && pinned, "no arena: %s", expert_last_error());
    check(!expert_store_add_arena(b.store, device, n_bytes, slots.data(), offsets.data(), 1, &pinned), "a slot was added twice");
    for (size_t index = first_pool; index < b.pools.size(); index++) {
        const pool &   pool       = b.pools[index];
        const int      end        = pool.first + pool.n;
        const uint64_t size       = pool.block_bytes;
        const uint64_t past       = offsets[end - pool.n_host - 1 - first - n_host_before] + size;
        const uint64_t spares[]   = {past, past + size};
        const uint64_t transits[] = {past + 2 * size, past + 3 * size};
        static_assert(N_SPARE == 2 && N_TRANSIT == 2, "");
        n_host_before += pool.n_host;
        ok = !pool.n_host || expert_store_add_host_slots(b.store, device, (int) index, end - pool.n_host, pool.n_host, size,
                                 spares, N_SPARE, transits, N_TRANSIT);
        check(ok, "no slots in host memory: %s", expert_last_error());
    }
    b.holder.resize(first + n, -1);
    for (fake_device * gpu : gpus) {
        if (strcmp(gpu->name, device) == 0) {
            gpu->base = b.store->arenas.back()->base;
            gpu->size = n_bytes;
        }
    }
    b.expected[EXPERT_PROVIDER_CALLS]++;
    return 1;
}

// ---- what native took: all under the books' mutex

static void see_next(books & b, int32_t layer) {
    const int32_t * const next = &b.next_slots[b.layer_pool[layer] * EXPERT_NEXT_SLOTS];
    b.can_go.clear();
    for (int i = 0; i < EXPERT_NEXT_SLOTS && next[i] >= 0; i++) {
        if (b.holder[next[i]] < 0 || !b.wanted[b.holder[next[i]]]) {
            b.can_go.push_back(next[i]);
        }
    }
}

// The expert has got this slot: the provider's own books.
static void book(books & b, int32_t layer, int32_t expert, int32_t slot) {
    const pool & pool   = b.pools[b.layer_pool[layer]];
    const int    key    = layers[layer].first_key + expert;
    const bool   inside = slot >= pool.first && slot < pool.first + pool.n && !b.gone[slot];
    check(inside, "expert %d of layer %d has got slot %d, which is not its pool's", expert, layer, slot);
    const int32_t victim = b.holder[slot];
    check(victim < 0 || !b.wanted[victim], "slot %d was taken from key %d, which is active, for key %d", slot, victim, key);
    check(std::find(b.holder.begin(), b.holder.end(), key) == b.holder.end(), "key %d has got a second slot", key);
    b.holder[slot] = key;
    b.got[key]     = slot;
    b.given[key]   = 0;
    b.native_bytes += (int64_t) layers[layer].block_bytes;
    b.expected[EXPERT_EVICTIONS] += victim >= 0;
    b.expected[EXPERT_LOADS]++;
    b.expected[EXPERT_FALLBACKS]++;
}

// What is read ahead gets the slots that were chosen for it, each expert any of them.
static void see_shared(books & b) {
    if (!b.by_fetch || !b.ahead) {
        return;
    }
    b.ahead = false;
    std::vector<int32_t> before, after;
    for (const auto & [key, slot] : b.got) {
        before.push_back(slot);
        after.push_back(b.reserved_slot[key]);
    }
    for (auto & [key, slot] : b.got) {
        slot           = b.reserved_slot[key];
        b.holder[slot] = key;
    }
    std::sort(before.begin(), before.end());
    std::sort(after.begin(), after.end());
    check(before == after, "experts got other slots than were chosen for them");
}

// The provider hears of a slot that it did not choose.
static void see_taken(books & b, int32_t layer, int32_t expert, int32_t slot) {
    see_shared(b);
    if (b.got.empty()) {
        see_next(b, layer);
    }
    check(slot >= 0 && (size_t) slot < b.holder.size(), "expert %d has got slot %d", expert, slot);
    if (b.holder[slot] != layers[layer].first_key + expert) {
        check(!b.by_fetch, "expert %d got another slot than was chosen for it", expert);
        book(b, layer, expert, slot);
    }
}

static void prepare(void * user, int32_t layer, const int32_t * fetched, int32_t n_fetched) {
    books & b = *(books *) user;
    nap(30, 1000);
    std::lock_guard<std::mutex> lock(b.mutex);
    b.expected[EXPERT_PROVIDER_CALLS]++;
    see_shared(b);
    for (int i = 0; i < n_fetched; i++) {
        const int key = layers[layer].first_key + fetched[i];
        if (!b.got.count(key)) { // else it may be nowhere again
            see_taken(b, layer, fetched[i], b.reserved_slot[key]);
        }
    }
    check((int) b.got.size() == n_fetched, "%zu experts have got slots, not %d", b.got.size(), n_fetched);
    std::vector<int32_t> slots;
    for (int i = 0; i < n_fetched; i++) {
        slots.push_back(b.got.at(layers[layer].first_key + fetched[i]));
        check(b.by_fetch || b.failed || slots[i] == b.can_go.at(i), "slot %d was taken out of turn", slots[i]);
    }
    if (!b.by_fetch) {
        const int32_t * const next = &b.next_slots[b.layer_pool[layer] * EXPERT_NEXT_SLOTS];
        const int32_t * const last = std::find(next, next + EXPERT_NEXT_SLOTS, slots.back());
        check(last < next + EXPERT_NEXT_SLOTS, "slot %d was not to be taken next", slots.back());
        n_skipped += (last - next) + 1 - n_fetched;
    }
    (b.by_fetch ? n_chosen : n_taken) += n_fetched;
    b.by_fetch = false;
    b.got.clear();
    choose_next(b, b.layer_pool[layer], slots);
}

// ---- callbacks

static int choose_slots(void * user, int32_t layer, const int32_t * missing, int32_t n_missing, const int32_t * active,
    int32_t n_active, int32_t kept_layer, int32_t * slots) {
    books &       b         = *(books *) user;
    const int32_t first_key = layers[layer].first_key;
    check(n_active <= b.layer_slots[layer], "a fetch of more than fits");
    nap(50, 1000);
    if (b.fetch_fault == FETCH_SLOW) { // all parts are there before the slots are known
        std::this_thread::sleep_for(std::chrono::milliseconds(2 + below(10)));
    }
    std::lock_guard<std::mutex> lock(b.mutex);
    check(b.got.empty(), "slots were taken without being told");
    see_next(b, layer);
    check(b.failed || b.can_go.size() < (size_t) n_missing, "%zu of the next slots would have done for %d experts",
        b.can_go.size(), n_missing);
    const pool &         pool = b.pools[b.layer_pool[layer]];
    std::vector<int32_t> next = b.holder;
    for (int i = 0; i < n_missing; i++) {
        int64_t oldest = INT64_MAX;
        for (int slot = pool.first; slot < pool.first + pool.n; slot++) {
            const int32_t key   = next[slot];
            const int64_t used  = key < 0 ? -1 : b.last_use[key];
            const bool    stays = std::find(active, active + n_active, key - first_key) != active + n_active ||
                               (key >= 0 && layer_of[key] == kept_layer) || (key >= 0 && b.slot_of[key] != slot);
            if (used < oldest && !b.gone[slot] && !stays) {
                slots[i] = slot;
                oldest   = used;
            }
        }
        check(oldest < INT64_MAX, "a fetch without a slot to choose");
        next[slots[i]] = first_key + missing[i];
    }
    if (b.fetch_fault == FETCH_FAILS || b.fetch_fault == FETCH_NO_SLOT) { // what the chosen slots hold must stay right
        b.expected[EXPERT_PROVIDER_CALLS]++;
        b.failed                = true;
        slots[below(n_missing)] = b.fetch_fault == FETCH_FAILS ? 0 : -1;
        return b.fetch_fault == FETCH_NO_SLOT;
    }
    for (int i = 0; i < n_missing; i++) {
        const int32_t victim = b.holder[slots[i]];
        if (victim >= 0) {
            b.slot_of[victim] = b.reserved_slot[victim] = -1;
            expert_count(&b.counters[EXPERT_EVICTIONS], 1);
        }
        book(b, layer, missing[i], slots[i]);
        b.owner[slots[i]]                       = first_key + missing[i];
        b.reserved_slot[first_key + missing[i]] = slots[i];
    }
    b.by_fetch = true;
    return 1;
}

// Slots of any kind, also what can't move: free ones, ones being loaded, ones that lie on the other side.
static void plan(void * user) {
    books & b = *(books *) user;
    nap(50, 2000);
    for (size_t slot = 0; slot < b.holder.size(); slot++) {
        check(b.seen_owner[slot] < (int64_t) blocks.size() && b.seen_in_place[slot] <= 1, "slot %zu was seen wrong", slot);
    }
    for (size_t index = 0; index < b.pools.size(); index++) {
        for (auto * moves : {&b.moves_up, &b.moves_down}) {
            const int n = below(EXPERT_MOVES + 1);
            for (int i = 0; i < EXPERT_MOVES; i++) {
                (*moves)[index * EXPERT_MOVES + i] = i < n ? b.pools[index].first + below(b.pools[index].n) : -1;
            }
        }
    }
    n_plans++;
}

static int may_take(void * user, uint64_t) { return !chance(((books *) user)->memory_short); }

// What was chosen for the fetch under way is free again, and these slots, the last of their pool, are gone.
static int withdraw(void * user, const int32_t * slots, int32_t n_slots) {
    books &                     b = *(books *) user;
    std::lock_guard<std::mutex> lock(b.mutex);
    b.expected[EXPERT_PROVIDER_CALLS]++;
    for (const auto & [key, slot] : b.got) {
        b.holder[slot] = -1;
        b.expected[EXPERT_LOADS]--;
        b.expected[EXPERT_FALLBACKS]--;
        b.native_bytes -= (int64_t) bytes_of(key);
    }
    b.got.clear();
    b.by_fetch = false;
    for (size_t slot = 0; slot < b.holder.size(); slot++) { // victims of slots that native took by itself
        if (b.holder[slot] >= 0 && b.owner[slot] < 0) {
            b.holder[slot] = -1;
            b.expected[EXPERT_EVICTIONS]++;
        }
    }
    int n_new = 0; // some may have been withdrawn before
    for (int i = 0; i < n_slots; i++) {
        check(b.owner[slots[i]] < 0 && b.holder[slots[i]] < 0, "slot %d is in use and can't be had", slots[i]);
        n_new += !b.gone[slots[i]];
        b.gone[slots[i]] = 1;
    }
    check(n_new > 0, "nothing new is withdrawn");
    for (size_t index = 0; index < b.pools.size(); index++) {
        const pool & pool = b.pools[index];
        if (slots[0] < pool.first || slots[0] >= pool.first + pool.n) {
            continue;
        }
        check(slots[0] >= pool.first + pool.n - pool.n_host, "slots on a device are withdrawn");
        choose_next(b, (int32_t) index, {});
        int32_t * const next = &b.next_slots[index * EXPERT_NEXT_SLOTS]; // what was published before may stay
        int32_t * const end  = std::remove_if(next, next + EXPERT_NEXT_SLOTS, [&](int32_t s) { return s >= 0 && b.gone[s]; });
        std::fill(end, next + EXPERT_NEXT_SLOTS, -1);
        for (size_t l = 0; l < layers.size(); l++) {
            b.layer_slots[l] -= b.layer_pool[l] == (int32_t) index ? n_new : 0;
        }
    }
    n_withdrawn += n_new;
    return 1;
}

static void read_now(books & b, int32_t layer, int32_t expert, int32_t slot) {
    const int         key = layers[layer].first_key + expert;
    std::vector<char> bytes(layers[layer].block_bytes);
    nap(50, 2000);
    bool ok = !chance(b.provider_fails) &&
              __real_pread(::blocks[key].fd, bytes.data(), bytes.size(), ::blocks[key].offset) == (ssize_t) bytes.size();
    void * const in_host = expert_store_host_slot(b.store, slot); // it may have moved since the last time
    if (ok && in_host) {
        memcpy(in_host, bytes.data(), bytes.size());
    } else if (ok) {
        ok = expert_store_fill(b.store, slot, bytes.data(), bytes.size());
    }
    {
        std::lock_guard<std::mutex> lock(b.mutex);
        b.given[key] = 1;
        if (!ok) {
            b.holder[slot] = -1;
            b.failed       = true;
            b.expected[EXPERT_LOADS]--;
            __atomic_store_n(&b.reserved_slot[key], -1, __ATOMIC_RELAXED);
            nap(50, 300);
            __atomic_store_n(&b.owner[slot], -1, __ATOMIC_RELEASE); // the last one: native may take it now
        }
    }
    nap(50, ok ? 1000 : 8000); // native may fetch meanwhile, as long as it does not know
    ok ? expert_store_commit(b.store, layer, expert, slot) : expert_store_fail(b.store, layer, expert, "made to fail");
}

static void read(void * user, int32_t layer, int32_t expert, int32_t slot) {
    books &   b   = *(books *) user;
    const int key = layers[layer].first_key + expert;
    {
        std::lock_guard<std::mutex> lock(b.mutex);
        see_taken(b, layer, expert, slot); // prepare() may come later
        b.native_bytes -= (int64_t) layers[layer].block_bytes;
        b.expected[EXPERT_PROVIDER_CALLS]++;
        b.expected[EXPERT_IO_ERRORS] += b.blocks[key].fd >= 0;
        b.expected[EXPERT_FALLBACKS]--;
        if (chance(70)) {
            b.reading.emplace_back(read_now, std::ref(b), layer, expert, slot);
            return;
        }
    }
    read_now(b, layer, expert, slot);
}
