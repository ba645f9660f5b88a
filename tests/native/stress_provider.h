// A small pack, and a provider that does the least that the ABI asks for, and that wrongly when it is told to.
#pragma once

#include "expert_store.h"
#include "stress_fakes.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

#include <fcntl.h>

// ---- the pack

static const struct {
    int      n_expert;
    uint64_t block_bytes;
    int      device;
} SHAPES[] = {{32, 20 << 10, 0}, {12, (1 << 20) + 12288, 1}, {7, (3 << 20) + 4096, 0}, {9, 300 << 10, 2}};

static std::string               pack_path;
static std::vector<char>         pack;
static int                       short_fd; // of a file that ends within a block
static std::vector<expert_layer> layers;
static std::vector<expert_block> blocks;   // [key]
static std::vector<int>          layer_of; // [key]

static uint64_t bytes_of(int key) { return layers[layer_of[key]].block_bytes; }

static int write_file(const std::string & path, size_t n_bytes) {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    check(write(fd, pack.data(), n_bytes) == (ssize_t) n_bytes, "%s can't be written", path.c_str());
    return fd;
}

static void make_pack(const std::string & folder) {
    std::mt19937_64 draw(1);
    for (const auto & shape : SHAPES) {
        expert_layer layer = {shape.n_expert, 1, (int32_t) blocks.size(), 0, shape.block_bytes, {}};
        layer.roles[0] = {"", GGML_TYPE_I8, 0, {4096, (int64_t) shape.block_bytes / 4096, shape.n_expert}, shape.block_bytes, 0};
        snprintf(layer.roles[0].tensor, EXPERT_NAME_BYTES, "blk.%zu", layers.size());
        for (int e = 0; e < shape.n_expert; e++) {
            expert_block block = {(int64_t) pack.size(), 0, 0, {}};
            for (uint64_t i = 0; i < shape.block_bytes; i += sizeof(uint64_t)) {
                const uint64_t bits = draw();
                pack.insert(pack.end(), (const char *) &bits, (const char *) (&bits + 1));
            }
            XXH128_canonical_t digest;
            XXH128_canonicalFromHash(&digest, XXH3_128bits(&pack[block.offset], shape.block_bytes));
            memcpy(block.digest, digest.digest, sizeof(block.digest));
            blocks.push_back(block);
            layer_of.push_back((int) layers.size());
        }
        layers.push_back(layer);
    }
    pack_path    = folder + "/pack";
    const int fd = write_file(pack_path, pack.size());
    short_fd     = write_file(folder + "/short", pack.size() / 2 + 1000);
    for (expert_block & block : blocks) {
        block.fd = fd;
    }
}

// ---- a provider

enum fetch_fault { FETCH_RIGHT, FETCH_SLOW, FETCH_FAILS, FETCH_NO_SLOT, FETCH_FAULTS };
enum block_fault { BLOCK_RIGHT, BLOCK_NO_FILE, BLOCK_CLOSED_FILE, BLOCK_SHORT_FILE, BLOCK_WRONG_DIGEST, BLOCK_FAULTS };

struct books {
    expert_store *            store  = nullptr;
    std::vector<expert_block> blocks = ::blocks;
    std::vector<int32_t>      slot_of, layer_slots, first_slot;
    std::vector<int64_t>      freq, last_use, counters, expected;
    const int32_t             kind = below(3); // of check, for all blocks
    std::vector<char>         never_right;     // [key] when native reads it
    std::vector<char *>       host;            // [slot] NULL: on a device

    int              fetch_fault    = FETCH_RIGHT; // of this round, like the next
    std::atomic<int> provider_fails = 0;           // percent of its reads

    std::mutex               mutex;                // guards what follows, and expected
    std::vector<int32_t>     holder;               // [slot] key, -1: free
    std::vector<char>        given;                // [key] the provider has read it
    bool                     failed       = false; // this round: the decode must fail
    int64_t                  native_bytes = 0;     // of what native brought in, this round
    std::vector<std::thread> reading;

    books() :
        slot_of(blocks.size(), -1), layer_slots(layers.size(), 0), first_slot(layers.size(), 0), freq(blocks.size(), 0),
        last_use(blocks.size(), 0), counters(EXPERT_COUNTERS, 0), expected(EXPERT_COUNTERS, 0), never_right(blocks.size(), 0),
        given(blocks.size(), 0) {}
};

static int open_arena(void * user, const char * device, uint64_t, const int32_t * on_device, int32_t n_layers) {
    books &               b     = *(books *) user;
    const int32_t         first = (int32_t) b.holder.size();
    std::vector<uint64_t> offsets;
    uint64_t              n_bytes = 0;
    for (int i = 0; i < n_layers; i++) {
        const expert_layer & layer  = layers[on_device[i]];
        b.first_slot[on_device[i]]  = first + (int32_t) offsets.size();
        b.layer_slots[on_device[i]] = 1 + below(layer.n_expert);
        for (int s = 0; s < b.layer_slots[on_device[i]]; s++, n_bytes += layer.block_bytes) {
            offsets.push_back(n_bytes);
        }
    }
    void *    host   = nullptr;
    int       pinned = 0;
    const int n      = (int) offsets.size();
    const int ok     = expert_store_add_arena(b.store, device, n_bytes, first, n, offsets.data(), &host, &pinned);
    check(ok && pinned, "no arena: %s", expert_last_error());
    b.holder.resize(first + n, -1);
    for (uint64_t offset : offsets) {
        b.host.push_back(host ? (char *) host + offset : nullptr);
    }
    for (fake_device * gpu : gpus) {
        if (strcmp(gpu->name, device) == 0) {
            gpu->base = b.store->arenas.back()->base;
            gpu->size = n_bytes;
        }
    }
    b.expected[EXPERT_PROVIDER_CALLS]++;
    return 1;
}

static int fetch(void * user, int32_t layer, const int32_t * missing, int32_t n_missing, const int32_t * active, int32_t n_active,
    int32_t * slots) {
    books &       b         = *(books *) user;
    const int32_t first_key = layers[layer].first_key;
    check(n_active <= b.layer_slots[layer], "a fetch of more than fits");
    nap(50, 1000);
    if (b.fetch_fault == FETCH_SLOW) { // all parts are there before the slots are known
        std::this_thread::sleep_for(std::chrono::milliseconds(2 + below(10)));
    }
    std::lock_guard<std::mutex> lock(b.mutex);
    b.expected[EXPERT_PROVIDER_CALLS]++;
    std::vector<int32_t> next = b.holder;
    for (int i = 0; i < n_missing; i++) {
        int64_t oldest = INT64_MAX;
        for (int slot = b.first_slot[layer]; slot < b.first_slot[layer] + b.layer_slots[layer]; slot++) {
            const int32_t key  = next[slot];
            const int64_t used = key < 0 ? -1 : b.last_use[key];
            if (used < oldest && std::find(active, active + n_active, key - first_key) == active + n_active) {
                slots[i] = slot;
                oldest   = used;
            }
        }
        check(oldest < INT64_MAX, "a fetch without a slot to choose");
        next[slots[i]] = first_key + missing[i];
    }
    if (b.fetch_fault == FETCH_FAILS || b.fetch_fault == FETCH_NO_SLOT) { // what the chosen slots hold must stay right
        b.failed                = true;
        slots[below(n_missing)] = b.fetch_fault == FETCH_FAILS ? 0 : -1;
        return b.fetch_fault == FETCH_NO_SLOT;
    }
    for (int i = 0; i < n_missing; i++) {
        const int32_t victim = b.holder[slots[i]];
        if (victim >= 0) {
            b.slot_of[victim] = -1;
        }
        b.given[first_key + missing[i]] = 0;
        b.native_bytes += layers[layer].block_bytes;
        b.expected[EXPERT_LOADS]++;
        b.expected[EXPERT_FALLBACKS]++;
    }
    b.holder = next;
    return 1;
}

static void read_now(books & b, int32_t layer, int32_t expert, int32_t slot) {
    const int         key = layers[layer].first_key + expert;
    std::vector<char> bytes(layers[layer].block_bytes);
    nap(50, 2000);
    bool ok = !chance(b.provider_fails) &&
              __real_pread(::blocks[key].fd, bytes.data(), bytes.size(), ::blocks[key].offset) == (ssize_t) bytes.size();
    if (ok && b.host[slot]) {
        memcpy(b.host[slot], bytes.data(), bytes.size());
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
        }
    }
    ok ? expert_store_commit(b.store, layer, expert, slot) : expert_store_fail(b.store, layer, expert, "made to fail");
}

static void read(void * user, int32_t layer, int32_t expert, int32_t slot) {
    books &   b   = *(books *) user;
    const int key = layers[layer].first_key + expert;
    {
        std::lock_guard<std::mutex> lock(b.mutex);
        check(slot >= 0 && b.holder[slot] == key, "a read into a slot that was not chosen for it");
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
