// The C ABI between the patched llama-server (native) and its launcher (Python), which opens packs.
// cffi reads the part between the two "cffi" marks.
//
// What happens:
//   1. expert_server_main() is llama-server's main. Our flags are ordinary arguments of llama.cpp's own parser.
//   2. A model with a pack is about to be loaded: open(). The launcher opens the pack and makes a provider.
//   3. All that takes memory is loaded: start(). The arenas are opened.
//   4. The model was freed, at the end or to sleep: close(). Loading it again begins with 2.
//   5. A decode failed: why() says whether an expert could not be brought in.
#ifndef EXPERT_SERVER_H
#define EXPERT_SERVER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
// What the flags say, as written by the user; NULL or -1: not given.
typedef struct expert_request {
    const char * model_path; // first file of the model, on this disk
    const char * pack;       // a path, or "auto": beside the model
    const char * cache;
    const char * cache_reserve;
    const char * policy;
    const char * verify;
    const char * stats_file;
    const char * stats_interval; // seconds
    const char * trace;
    const char * child;        // a router started this process: its name for the model; NULL: none did
    const char * overrides;    // patterns of --override-tensor and its kin, one a line
    const char * kv_overrides; // integers of --override-kv, key=value, one a line
    const char * stage_slots;
    const char * read_splits;
    int32_t      direct_io;
    int32_t      split_by_layer; // 0: split mode row or tensor
    int32_t      n_gpu_layers;   // negative: all, or no GPU
} expert_request;

// Strings and arrays belong to the launcher and stay valid until close().
typedef struct expert_opened {
    void *          store;        // expert_store *
    const int64_t * counters;     // [EXPERT_COUNTERS]
    const char *    info;         // JSON object for /props, set by start()
    const char *    error;        // one sentence when a callback returned 0
    uint64_t        cache_max;    // what the cache may take on a device, UINT64_MAX: half of what is free there
    uint64_t        expert_bytes; // of the layers on GPUs, or of all if there is none: no cache takes more
    uint64_t        cache_bytes;  // of all devices
    int32_t         n_slots;
} expert_opened;

// open and start return 1, or 0 and set error.
typedef struct expert_launcher {
    int (*open)(const expert_request * request, expert_opened * opened);
    int (*start)(expert_opened * opened);
    void (*close)(void);
    const char * (*why)(void); // one sentence, "" if the failure was none of ours
} expert_launcher;

// executable: what a router starts for each of its models. Returns the exit status.
int expert_server_main(int argc, char ** argv, const char * executable, const expert_launcher * launcher);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif
