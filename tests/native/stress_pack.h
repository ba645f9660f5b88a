// A small pack for the stress programs: layers of one device whose blocks are as large share a pool, which may be larger than
// EXPERT_NEXT_SLOTS.
#pragma once

#include "expert_provider.h"
#include "stress_fakes.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

#include <fcntl.h>

static const struct {
    int      n_expert;
    uint64_t block_bytes;
    int      device;
} SHAPES[] = {{96, 20 << 10, 0}, {12, (1 << 20) + 12288, 1}, {4, (3 << 20) + 4096, 0}, {9, 300 << 10, 2}, {20, 20 << 10, 0},
    {3, (3 << 20) + 4096, 0}, {7, 300 << 10, 2}};

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
