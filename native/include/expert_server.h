// The C ABI between the patched llama-server (native) and its launcher (Python), which opens packs.
// cffi reads the part between the two "cffi" marks.
//
// What happens:
//   1. expert_server_main() is llama-server's main. The launcher's flags become arguments of llama.cpp's own parser.
//   2. A model is about to be loaded: open_pack(), with the flags that were given. Without a pack it ends there.
//   3. llama.cpp fits the model into what is free: cache_room() says what the cache needs on each device.
//   4. The model is loaded: choose_batch(). Its context is made with the answer.
//   5. All that takes memory is loaded: open_arenas().
//   6. The model was freed, at the end or to sleep: close_pack(). Loading it again begins with 2.
//   7. A decode failed: why_failed() says whether an expert could not be brought in.
#ifndef EXPERT_SERVER_H
#define EXPERT_SERVER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
#define EXPERT_FLAGS_MAX 64

typedef struct expert_flag {
    const char * name;     // --expert-cache
    const char * off;      // what turns a switch off; NULL: the flag takes a value
    const char * hint;     // stands for the value
    const char * help;     // with its default
    const char * variable; // in the environment
} expert_flag;

// A flag that was given, with its value as written by the user; a switch is "on" or "off".
typedef struct expert_setting {
    const char * name;
    const char * value;
} expert_setting;

typedef struct expert_request {
    const expert_setting * settings;
    int32_t                n_settings;
    int32_t                split_by_layer; // 0: split mode row or tensor
    int32_t                n_gpu_layers;   // negative: all, or no GPU
    const char *           model_path;     // first file of the model, on this disk
    const char *           child;          // a router started this process: its name for the model; NULL: none did
    const char *           overrides;      // of --override-tensor and its kin: pattern=name of a buffer type, one a line
    const char *           kv_overrides;   // integers of --override-kv, key=value, one a line
} expert_request;

// Strings and arrays belong to the launcher and stay valid until close_pack().
typedef struct expert_opened {
    const char *    message;     // why a callback returned 0; else a warning or NULL, from open_arenas() where experts have room
    void *          store;       // expert_store *; NULL: no pack is used
    const int64_t * counters;    // [EXPERT_COUNTERS]
    const char *    info;        // JSON object for /props, set by open_arenas(), as is what follows
    uint64_t        cache_bytes; // of all devices
    int32_t         n_slots;
} expert_opened;

// Callbacks that return an int return 1, or 0 and set the message.
typedef struct expert_launcher {
    const expert_flag * flags;
    int32_t             n_flags; // EXPERT_FLAGS_MAX at most
    int (*open_pack)(const expert_request * request, expert_opened * opened);
    // Bytes that the cache will need on a device that has free_bytes and gets this share, 0 to 1, of what is divided.
    uint64_t (*cache_room)(uint64_t free_bytes, double share);
    // Tokens of a physical batch for a context of this llama_model with these llama_context_params, from least to most.
    uint32_t (*choose_batch)(const void * model, const void * params, uint32_t least, uint32_t most);
    int (*open_arenas)(expert_opened * opened);
    void (*close_pack)(void);
    const char * (*why_failed)(void); // one sentence, "" if the failure was none of ours
} expert_launcher;

// executable: what a router starts for each of its models. Returns the exit status.
int expert_server_main(int argc, char ** argv, const char * executable, const expert_launcher * launcher);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif
