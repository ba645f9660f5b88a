// Experts of one pool change places between a device and host memory that it reads in place, in the background. Internal to
// native/src/store.
//
//   plan() names slots --> their bytes are copied to a spare block on the other side, while kernels read them where they lie
//                      --> between two graphs the slot gets that block; its old one is the spare now
//
// A slot keeps its number and its expert: only where its bytes lie changes, so policies and tables have no part in it.
#pragma once

#include "expert_provider.h"

#include <cstdint>
#include <utility>
#include <vector>

struct expert_books;

// What copies for a device in the background.
class expert_copier {
public:
    // A copy between two blocks; NULL if the device failed.
    virtual void * start(char * dest, const char * src, uint64_t n_bytes, bool to_device) = 0;
    // Waits for it. False if the device failed.
    virtual bool end(void * copy) = 0;

protected:
    ~expert_copier() = default;
};

typedef std::vector<std::pair<int32_t, int32_t>> expert_moved; // key and slot

class expert_mover {
public:
    const int32_t pool;

    expert_mover(int32_t pool, uint64_t slot_bytes, std::vector<char *> spares) :
        pool(pool), slot_bytes(slot_bytes), on_device(std::move(spares)) {}

    bool has_moves() const { return !moves.empty(); }
    // Ends all moves; no kernel of the device runs. Adds to `moved` what lies elsewhere now. Under the lock.
    void end(expert_books & books, expert_copier & copier, expert_moved & moved);
    // Starts what was planned, as far as there are spare blocks. Under the lock.
    void start(expert_books & books, expert_copier & copier);

private:
    struct move {
        int32_t slot;
        int32_t load; // number of the slot's load whose bytes it copies
        char *  to;
        bool    up;
        void *  copy;
    };
    bool is_right(const expert_books & books, const move & move, int64_t key) const;
    bool may_move(const expert_books & books, int32_t slot, bool up) const;
    void start_some(expert_books & books, expert_copier & copier, const int32_t * slots, bool up);

    const uint64_t      slot_bytes;
    std::vector<char *> on_device; // spare blocks
    std::vector<char *> in_host;
    std::vector<move>   moves;          // under way
    bool                broken = false; // a copy failed: no more
};
