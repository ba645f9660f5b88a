// What the patched ggml-cuda calls to compute MUL_MAT_ID with experts from a store's VRAM arena.
//
// Addressing: ids and ne[2] stay the model's. A table on the device holds, for each expert of each layer, where its
// slot starts in the arena; kernels add that to the weight's base. An expert that is not resident has offset 0: an
// address that may be read, whose result nobody uses.
//
// Two ways to run a graph with expert layers:
//   lookup    in captured graphs: a kernel in front of each expert layer checks the table and waits for the host only
//             if an expert is missing. While the graph runs, the calling thread serves these requests. Not on a GPU
//             where the driver ends kernels that take long.
//   segments  else: the graph runs up to an expert layer, its ids are read back, the experts made resident, and on.
//             If they do not fit all at once, the layer runs once per pass and keeps the rows of that pass's experts.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstdint>

struct ggml_backend_cuda_context;

enum expert_cuda_mode {
    EXPERT_CUDA_NONE,     // no expert weights in the graph, or part of a graph that runs in segments
    EXPERT_CUDA_LOOKUP,   // may be captured
    EXPERT_CUDA_SEGMENTS, // must run in segments
};

typedef enum ggml_status (*expert_cuda_compute)(ggml_backend_t backend, ggml_cgraph * cgraph);

// Base address of a weight, and in *offsets the device table of what to add for each expert; for any tensor that does
// not come from a store its data, and *offsets as it was.
const void * expert_cuda_weight(int device, const ggml_tensor * weight, const int64_t ** offsets);
// Address of one expert of a weight, for code that takes them one by one on the host.
const void * expert_cuda_matrix(int device, const ggml_tensor * weight, int64_t expert);

// True for weights whose router may name the same expert twice for one token (grovemoe's chunks of experts do).
bool expert_cuda_ids_repeat(const ggml_tensor * weight);
// ggml_cuda_launch_mm_ids_helper for such ids: upstream's counts an expert once per token, leaves the positions that it did
// not count unwritten, and what reads them afterwards takes any number for an index.
void expert_cuda_sort_ids(const int32_t * ids, int32_t * ids_src1, int32_t * ids_dst, int32_t * expert_bounds, int n_experts,
    int n_tokens, int n_used, int nchannels_y, int si1, int sis1, bool write_inverse, cudaStream_t stream);

// EXPERT_COPY_PROC, EXPERT_LOCK_PROC; NULL for other names.
void * expert_cuda_proc(const char * name);

expert_cuda_mode expert_cuda_mode_of(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);
// True inside a graph that runs in segments: its parts are not captured.
bool             expert_cuda_in_segments();
enum ggml_status expert_cuda_run_segments(ggml_backend_t backend, ggml_cgraph * cgraph, expert_cuda_compute compute);

// Frees or unlocks memory of a GPU while it lives: no kernel waits for the host meanwhile.
struct expert_cuda_freeing {
    expert_cuda_freeing();
    ~expert_cuda_freeing();
};

// Around the capture or launch of a whole graph in lookup mode.
void             expert_cuda_lookup_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);
void             expert_cuda_lookup_node(ggml_backend_cuda_context & ctx, const ggml_tensor * node);
enum ggml_status expert_cuda_lookup_serve(ggml_backend_cuda_context & ctx);
