// What the patched parts of ggml and llama.cpp call. C, because ggml-cpu.c is.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A weight whose experts come from a store: which store, layer and role.
typedef struct expert_ref expert_ref;

// NULL for every tensor that is not such a weight. Cheap: stock runs pass through here.
const expert_ref * expert_ref_of(const struct ggml_tensor * tensor);

bool expert_buft_is(ggml_backend_buffer_type_t buft);

// What a backend that takes experts from a store offers under this name: starts a copy of host memory to its device, in a
// stream of its own; with src NULL waits for all copies to dest's device that were started before. False on a device error.
#define EXPERT_COPY_PROC "expert_pack_copy"
typedef bool (*expert_copy_t)(void * dest, const void * src, size_t n_bytes);

// What it offers if its kernels can read host memory in place: page-locks n_bytes (whole pages) for the device that
// device_memory belongs to and all others, at the same address; n_bytes 0 takes that back; bytes NULL asks whether the device
// could. False, and no error is left behind, if the system or the device refuses.
#define EXPERT_LOCK_PROC "expert_pack_lock"
typedef bool (*expert_lock_t)(const void * device_memory, void * bytes, size_t n_bytes);

// ---- loader

// The buffer type for a weight of the model in file descriptor fd that is computed on dev, NULL if no store wants
// it; one wants it only from loads on the thread that made the store. *error gets a sentence when a store wants it and
// can't have it (another type or shape: not this pack's model).
ggml_backend_buffer_type_t expert_claim(int fd, const struct ggml_tensor * meta, ggml_backend_dev_t dev, const char ** error);

// Whether a store wants the tensor to be computed on the CPU, for the load on this thread.
bool expert_wants_cpu(int fd, const char * tensor);

// Whether a store provides the tensor for the load on this thread.
bool expert_is_described(int fd, const char * tensor);

// The process is to end: every computation that needs experts of a store fails from now on. For signal handlers.
void expert_interrupt(void);
bool expert_interrupted(void);

// Who hears, from the thread that computes, how far a batch has come that takes long; ggml's log otherwise.
void expert_on_progress(void (*say)(const char * text));

// How many experts computations of all stores wait for, and how many such reads have ended so far.
int32_t expert_reads_under_way(int64_t * n_ended);

// ---- MUL_MAT_ID in host memory
//
//   thread 0:     expert_op_begin(ref, rows per expert, threads, an id out of range or NULL)
//   all threads:  barrier, then passes: compute the experts whose expert_op_data() is not NULL,
//                 while expert_op_more(): barrier, thread 0 calls expert_op_next(), barrier
//   all threads:  expert_op_end()
//
// Several passes when experts are still on their way or do not fit all at once. Each expert is in exactly one pass.
// On failure no further expert has data and expert_op_end() returns false.

void                 expert_op_begin(const expert_ref * ref, const int64_t * rows, int n_threads, const int32_t * bad_id);
const char * const * expert_op_data(const expert_ref * ref);
bool                 expert_op_more(const expert_ref * ref);
void                 expert_op_next(const expert_ref * ref);
bool                 expert_op_end(const expert_ref * ref);

#ifdef __cplusplus
}
#endif
