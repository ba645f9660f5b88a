// Records of a trace, little-endian:  u16 layer, u16 kind, u32 step, u32 number, u32 n_ids, u16 ids[n_ids]
//
//   0 acquire      number: rows (pairs of token and expert)      ids: the distinct experts, in the order of lookup
//   1 slots        number: slots that the layer may use          ids: the arena's number
//   2 fetch        number: how many of ids were fetched          ids: those, then the ones that had to stay
//   3 read failed  number: 0                                     ids: the expert
//   4 end          number: CRC-32 of all records before          ids: 48 bytes, see expert_trace_end
//   5 ahead        number: a layer whose experts had to stay     ids: experts fetched before their layer's acquire
#include "expert_trace.h"
#include "expert_error.h"

#include "ggml-impl.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

enum record_kind : uint16_t { ACQUIRE = 0, SLOTS = 1, FETCH = 2, READ_FAILED = 3, END = 4, AHEAD = 5 };

static const size_t   FLUSH_BYTES = 1 << 20;
static const uint16_t NO_LAYER    = 0xFFFF;

static std::array<uint32_t, 256> make_crc_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) {
            value = (value >> 1) ^ (value & 1 ? 0xEDB88320u : 0); // zlib's polynomial
        }
        table[i] = value;
    }
    return table;
}

static uint32_t crc32(uint32_t crc, const uint8_t * bytes, size_t n) {
    static const std::array<uint32_t, 256> table = make_crc_table();
    crc                                          = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc = (crc >> 8) ^ table[(crc ^ bytes[i]) & 0xFF];
    }
    return ~crc;
}

static bool write_all(int fd, const uint8_t * bytes, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t now = write(fd, bytes + done, n - done);
        if (now == 0 || (now < 0 && errno != EINTR)) {
            return false;
        }
        done += (size_t) std::max<ssize_t>(now, 0);
    }
    return true;
}

// Ends the trace, not the decode.
static void write_failed(expert_trace & trace) {
    trace.failed = true;
    GGML_LOG_ERROR("%s: the expert trace can't be written any further: %s; the model runs on without it\n", trace.path.c_str(),
        strerror(errno));
}

static void flush(expert_trace & trace) {
    if (!trace.failed && !write_all(trace.fd, trace.buffer.data(), trace.buffer.size())) {
        write_failed(trace);
    }
    trace.buffer.clear();
}

template <typename T> static void put(expert_trace & trace, T value) {
    for (size_t i = 0; i < sizeof(T); i++) {
        trace.buffer.push_back((uint8_t) ((uint64_t) value >> (8 * i)));
    }
}

static void put_head(expert_trace & trace, int32_t layer, record_kind kind, uint32_t step, uint32_t number, size_t n_ids) {
    put(trace, (uint16_t) layer);
    put(trace, (uint16_t) kind);
    put(trace, step);
    put(trace, number);
    put(trace, (uint32_t) n_ids);
}

static void put_record(
    expert_trace & trace, int32_t layer, record_kind kind, uint32_t number, const int32_t * ids, size_t n_ids) {
    if (trace.failed || trace.fd < 0) {
        return;
    }
    const size_t start = trace.buffer.size();
    put_head(trace, layer, kind, trace.step, number, n_ids);
    for (size_t i = 0; i < n_ids; i++) {
        put(trace, (uint16_t) ids[i]);
    }
    const size_t n_bytes = trace.buffer.size() - start;
    trace.crc            = crc32(trace.crc, trace.buffer.data() + start, n_bytes);
    trace.n_bytes += n_bytes;
    if (trace.buffer.size() >= FLUSH_BYTES) {
        flush(trace);
    }
}

expert_trace * expert_trace_new(int fd, const char * path) {
    auto * trace = new expert_trace();
    trace->fd    = fd;
    trace->path  = path;
    trace->buffer.reserve(FLUSH_BYTES + (FLUSH_BYTES >> 2));
    return trace;
}

void expert_trace_free(expert_trace * trace) { delete trace; }

void expert_trace_begin(expert_trace & trace) {
    if (trace.end_mark < 0 || trace.failed) {
        return;
    }
    if (ftruncate(trace.fd, trace.end_mark) != 0 || lseek(trace.fd, trace.end_mark, SEEK_SET) < 0) {
        write_failed(trace);
    }
    trace.end_mark   = -1;
    trace.last_layer = INT32_MAX; // whatever comes is the next batch
    trace.implied    = false;
}

void expert_trace_slots(expert_trace & trace, int32_t layer, int32_t arena, int32_t n_slots) {
    put_record(trace, layer, SLOTS, (uint32_t) n_slots, &arena, 1);
}

void expert_trace_acquire(
    expert_trace & trace, int32_t layer, const std::vector<int32_t> & experts, int64_t n_rows, int32_t n_slots) {
    if (layer <= trace.last_layer) { // layers come in order: this is the next batch
        trace.step++;
    }
    trace.last_layer = layer;
    trace.implied    = (int64_t) experts.size() <= n_slots;
    put_record(trace, layer, ACQUIRE, (uint32_t) n_rows, experts.data(), experts.size());
}

void expert_trace_fetch(expert_trace & trace, int32_t layer, const std::vector<int32_t> & experts, size_t n_missing) {
    if (!trace.implied) {
        put_record(trace, layer, FETCH, (uint32_t) n_missing, experts.data(), experts.size());
    }
    trace.implied = false;
}

void expert_trace_ahead(expert_trace & trace, int32_t layer, int32_t kept, const std::vector<int32_t> & experts) {
    put_record(trace, layer, AHEAD, (uint32_t) kept, experts.data(), experts.size());
}

void expert_trace_read_failed(expert_trace & trace, int32_t layer, int32_t expert) {
    put_record(trace, layer, READ_FAILED, 0, &expert, 1);
}

// The end's 48 bytes: u64 bytes of all records before, u64 each of acquires, hits, misses, evictions, failures.
void expert_trace_cut(expert_trace & trace, const char * why) {
    if (trace.failed || trace.fd < 0) {
        return;
    }
    flush(trace);
    trace.failed = true;
    GGML_LOG_WARN("%s: the expert trace ends here: %s; --allow-cut takes what is there\n", trace.path.c_str(), why);
}

bool expert_trace_end(expert_trace & trace, const int64_t * counters) {
    static const expert_counter order[] = {EXPERT_ACQUIRES, EXPERT_HITS, EXPERT_MISSES, EXPERT_EVICTIONS, EXPERT_FAILURES};
    flush(trace);
    trace.end_mark = lseek(trace.fd, 0, SEEK_CUR);
    put_head(trace, NO_LAYER, END, 0, trace.crc, (1 + std::size(order)) * (sizeof(uint64_t) / sizeof(uint16_t)));
    put(trace, trace.n_bytes);
    for (size_t i = 0; i < std::size(order); i++) {
        trace.counted[i] += (uint64_t) counters[order[i]];
        put(trace, trace.counted[i]);
    }
    flush(trace);
    if (!trace.failed && fsync(trace.fd) != 0 && errno != EINVAL && errno != EROFS) { // a pipe can't be synced
        trace.failed = true;
    }
    if (trace.failed) {
        expert_set_last_error("%s: the expert trace is incomplete: it could not be written", trace.path.c_str());
    }
    return !trace.failed;
}
