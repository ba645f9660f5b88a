// Experts that change places between the arena and host memory, between two graphs: see expert_mover.h.
#include "expert_cuda_state.h"

void expert_cuda_state::move(expert_arena & arena, cudaStream_t stream) {
    const auto                 quiet = [&] { CUDA_CHECK(cudaEventSynchronize(used)); };
    std::vector<expert_update> changed;
    for (const auto & [key, slot] : expert_store_move(store, arena, *this, quiet)) {
        slot_key[slot] = key;
        changed.push_back(entry_of(key));
        slot_key[slot] = changed.back().resident ? key : -1; // it may have left meanwhile
    }
    if (!changed.empty()) {
        apply(changed, stream);
    }
}

static bool is_done(cudaError_t error, const char * what) {
    if (error != cudaSuccess) {
        GGML_LOG_ERROR("%s: %s\n", what, cudaGetErrorString(error));
        (void) cudaGetLastError();
    }
    return error == cudaSuccess;
}

void * expert_cuda_state::start(char * dest, const char * src, uint64_t n_bytes, bool to_device) {
    ggml_cuda_set_device(device);
    cudaStream_t & stream = moving[to_device];
    cudaEvent_t    event  = nullptr;
    const auto     kind   = to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    const bool     ok     = (stream || is_done(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), __func__)) &&
                    is_done(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), __func__) &&
                    is_done(cudaMemcpyAsync(dest, src, n_bytes, kind, stream), __func__) &&
                    is_done(cudaEventRecord(event, stream), __func__);
    if (event) {
        moves.insert(event);
    }
    return ok ? event : nullptr;
}

bool expert_cuda_state::end(void * copy) {
    const bool ok = is_done(cudaEventSynchronize((cudaEvent_t) copy), __func__);
    moves.erase((cudaEvent_t) copy);
    (void) cudaEventDestroy((cudaEvent_t) copy);
    return ok;
}
