// A trace: every acquire of a store, in order, appended to a file. docs/FORMAT.md describes it; the provider writes
// the header, this writes the records. All functions are called under the store's mutex.
#pragma once

#include <stdint.h>

#include <array>
#include <string>
#include <vector>

struct expert_trace {
    std::string             path;
    int                     fd = -1; // the provider's; -1: nothing is written
    std::vector<uint8_t>    buffer;
    std::array<uint64_t, 5> counted{};       // as in the end mark, by stores that have ended
    uint32_t                crc        = 0;  // of all records so far
    uint64_t                n_bytes    = 0;  // of all records so far
    int64_t                 end_mark   = -1; // where it is in the file, -1: there is none
    uint32_t                step       = 0;
    int32_t                 last_layer = -1;
    bool                    implied    = false; // the next fetch is what a reader expects: it needs no record
    bool                    failed     = false; // a write failed: nothing more is written
};

// A store begins to write: over the end mark of the one before, if there is one.
void expert_trace_begin(expert_trace & trace);
// A layer may use n_slots slots, in the arena of that number.
void expert_trace_slots(expert_trace & trace, int32_t layer, int32_t arena, int32_t n_slots);
// n_rows: pairs of token and expert. n_slots: of the layer.
void expert_trace_acquire(
    expert_trace & trace, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows, int32_t n_slots);
// The first n_missing of experts were fetched, the others must stay.
void expert_trace_fetch(expert_trace & trace, int32_t layer, const std::vector<int32_t> & experts, size_t n_missing);
// Experts of a layer were fetched before its acquire, while a device computed with those of the layer `kept`, which had to stay.
void expert_trace_ahead(expert_trace & trace, int32_t layer, int32_t kept, const std::vector<int32_t> & experts);
// The read of an expert failed: its slot is free again.
void expert_trace_read_failed(expert_trace & trace, int32_t layer, int32_t expert);
// What follows could not be replayed: nothing more is written, and the trace is incomplete.
void expert_trace_cut(expert_trace & trace, const char * why);
// Writes the end mark with the counters of all stores so far. False and expert_last_error() if the trace is incomplete.
bool expert_trace_end(expert_trace & trace, const int64_t * counters);
