// Blocks of a device that also get the bytes of an expert which is read into a slot in host memory, while they arrive: the
// kernels that wait for it find it there, and need not read it in place after the drive. Internal to native/src/store.
//
// A block serves one pass of one layer, and is anybody's in the next: no kernel reads it then any more. Until somebody takes
// it, it stays a copy of the expert that the device may use.
#pragma once

#include <cstdint>
#include <vector>

class expert_transit {
public:
    explicit expert_transit(std::vector<char *> blocks) : blocks(std::move(blocks)), slot_in(this->blocks.size(), -1) {}

    // The last pass has ended.
    void begin_pass() { n_taken = 0; }
    // A block for the bytes of a slot; NULL: all are taken. copies: [slot] the block that holds a copy of its bytes, NULL: none.
    char * take(int32_t slot, std::vector<char *> & copies) {
        if (n_taken == blocks.size()) {
            return nullptr;
        }
        n_taken++;
        next                = (next + 1) % blocks.size();
        const int32_t other = slot_in[next];
        if (other >= 0 && copies[other] == blocks[next]) {
            copies[other] = nullptr;
        }
        slot_in[next] = slot;
        return blocks[next];
    }

private:
    std::vector<char *>  blocks;
    std::vector<int32_t> slot_in; // [block] that took it last, -1: none
    size_t               next    = 0;
    size_t               n_taken = 0; // in this pass
};
