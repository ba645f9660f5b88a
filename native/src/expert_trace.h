// A trace: every acquire of a store, in order, appended to a file. docs/FORMAT.md describes it; the provider writes
// the header, this writes the records. All functions are called under the store's mutex.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

struct expert_trace {
    std::string          path;
    int                  fd = -1;
    std::vector<uint8_t> buffer;
    uint32_t             crc        = 0; // of all records so far
    uint64_t             n_bytes    = 0; // of all records so far
    uint32_t             step       = 0;
    int32_t              last_layer = -1;
    bool                 implied    = false; // the next fetch is what a reader expects: it needs no record
    bool                 failed     = false; // a write failed: nothing more is written

    expert_trace()                                 = default;
    expert_trace(const expert_trace &)             = delete;
    expert_trace & operator=(const expert_trace &) = delete;
    ~expert_trace();
};

// Opens a file that holds a header; NULL and expert_last_error() on failure.
std::unique_ptr<expert_trace> expert_trace_open(const char * path);
// A layer may use n_slots slots, in the arena of that number.
void expert_trace_slots(expert_trace & trace, int32_t layer, int32_t arena, int32_t n_slots);
// n_rows: pairs of token and expert. n_slots: of the layer.
void expert_trace_acquire(
    expert_trace & trace, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows, int32_t n_slots);
// The first n_missing of experts were fetched, the others must stay.
void expert_trace_fetch(expert_trace & trace, int32_t layer, const std::vector<int32_t> & experts, size_t n_missing);
// The read of an expert failed: its slot is free again.
void expert_trace_read_failed(expert_trace & trace, int32_t layer, int32_t expert);
// Writes the end mark with the store's counters. False and expert_last_error() if the trace is incomplete.
bool expert_trace_end(expert_trace & trace, const int64_t * counters);
