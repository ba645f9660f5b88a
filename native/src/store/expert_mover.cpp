#include "expert_mover.h"

#include "expert_books.h"

#include "ggml-impl.h"

#include <algorithm>

// Its expert is there, and it lies on the other side.
bool expert_mover::may_move(const expert_books & books, int32_t slot, bool up) const {
    const int64_t key = books.tables.owner[slot];
    return key >= 0 && books.tables.slot_of[key] == slot && (books.tables.in_place[slot] != 0) == up &&
           std::none_of(moves.begin(), moves.end(), [&](const move & move) { return move.slot == slot; });
}

// What a copy brought to host memory is looked at where every read is: a copy to a device can't be.
bool expert_mover::is_right(const expert_books & books, const move & move, int64_t key) const {
    const expert_block & block = books.tables.blocks[key];
    return move.up || block.check != 2 || expert_has_digest(move.to, slot_bytes, block.digest);
}

void expert_mover::end(expert_books & books, expert_copier & copier, expert_moved & moved) {
    for (const move & move : moves) {
        const int64_t key  = books.tables.owner[move.slot];
        const bool    same = key >= 0 && books.tables.slot_of[key] == move.slot && books.slot_loads[move.slot] == move.load;
        bool          ok   = copier.end(move.copy);
        char *        free = move.to;
        if (ok && same && !is_right(books, move, key)) { // where it lies it is
            GGML_LOG_ERROR("an expert was copied wrong from a device to host memory: none will change places any more\n");
            ok = false;
        }
        broken = broken || !ok;
        if (ok && same) {
            std::swap(books.slot_data[move.slot], free);
            books.slot_copy[move.slot]       = nullptr;
            books.tables.in_place[move.slot] = !move.up;
            books.tables.counters[move.up ? EXPERT_MOVES_UP : EXPERT_MOVES_DOWN]++;
            moved.emplace_back((int32_t) key, move.slot);
        }
        (move.up == (ok && same) ? in_host : on_device).push_back(free);
    }
    moves.clear();
}

void expert_mover::start_some(expert_books & books, expert_copier & copier, const int32_t * slots, bool up) {
    std::vector<char *> & spares = up ? on_device : in_host;
    for (int32_t i = 0; i < EXPERT_MOVES && slots[i] >= 0 && !spares.empty() && !broken; i++) {
        if (!may_move(books, slots[i], up)) {
            continue;
        }
        void * copy = copier.start(spares.back(), books.slot_data[slots[i]], slot_bytes, up);
        broken      = !copy;
        if (copy) {
            moves.push_back({slots[i], books.slot_loads[slots[i]], spares.back(), up, copy});
            spares.pop_back();
        }
    }
}

void expert_mover::start(expert_books & books, expert_copier & copier) {
    start_some(books, copier, books.tables.moves_down + pool * EXPERT_MOVES, false);
    start_some(books, copier, books.tables.moves_up + pool * EXPERT_MOVES, true);
}
