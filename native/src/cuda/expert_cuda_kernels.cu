// The device's side: looking experts up, changing the table, keeping the rows of a pass.
#include "expert_cuda.h"
#include "expert_cuda_state.h"

static __global__ void expert_apply_updates(const expert_update * updates, int n, int64_t * offsets, uint8_t * resident) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        offsets[updates[i].key]  = updates[i].offset;
        resident[updates[i].key] = (uint8_t) updates[i].resident;
    }
}

static __device__ __forceinline__ uint64_t global_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// One block. Writes the layer's ids to the host, and if one of them is not resident waits until the host has brought
// all of them in and says what changed. Where all are resident it costs two loads in a row and no fence: the host takes
// an id for written when it is no longer EXPERT_ID_NONE.
static __global__ void expert_lookup(char * ids, int64_t ids_stride, int n_used, int n_ids, int layer, int first_key,
    int n_expert, int64_t * offsets, uint8_t * resident, uint32_t * sequence, int32_t * ids_host, expert_mailbox * mailbox,
    uint64_t timeout_ns) {
    // All kernels before this one have ended when this returns, so that a slot whose expert one of them read may be taken:
    // each of upstream's that may start early has a thread that waits for its predecessor's end.
    ggml_cuda_pdl_sync();
    bool missing = false;
    for (int i = threadIdx.x; i < n_ids; i += blockDim.x) {
        const int id = *(const int32_t *) (ids + (i / n_used) * ids_stride + (i % n_used) * sizeof(int32_t));
        ids_host[i]  = id;
        missing |= id < 0 || id >= n_expert || !resident[first_key + id];
    }
    if (!__syncthreads_or(missing)) {
        ggml_cuda_pdl_lc(); // not before: blocks of the next kernels would fill the GPU while this one waits for a disk
        return;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint32_t number = ++*sequence ? *sequence : ++*sequence; // 0 means none
        mailbox->layer        = (uint32_t) layer;
        __threadfence_system();
        mailbox->request     = number;
        const uint64_t start = global_ns();
        while (mailbox->answer != number && !mailbox->abort) {
#if __CUDA_ARCH__ >= 700
            __nanosleep(2000); // looking more often slows the copies that are waited for
#endif
            if (global_ns() - start > timeout_ns) {
                mailbox->abort = 1;
            }
        }
        __threadfence_system();
    }
    __syncthreads();
    if (mailbox->abort) { // what follows is thrown away, but must not fault
        for (int i = threadIdx.x; i < n_ids; i += blockDim.x) {
            int32_t * id = (int32_t *) (ids + (i / n_used) * ids_stride + (i % n_used) * sizeof(int32_t));
            *id          = *id < 0 || *id >= n_expert ? 0 : *id;
        }
        return;
    }
    const int n = mailbox->n_updates;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const volatile expert_update * update = &mailbox->updates[i];
        offsets[update->key]                  = update->offset;
        resident[update->key]                 = (uint8_t) update->resident;
    }
    __threadfence();
}

static __global__ void expert_keep_rows(const char * ids, int64_t ids_nb0, int64_t ids_nb1, const uint8_t * in_pass,
    const char * src, char * dst, int64_t row_bytes, int64_t nb1, int64_t nb2) {
    const int used  = blockIdx.x;
    const int token = blockIdx.y;
    if (!in_pass[*(const int32_t *) (ids + token * ids_nb1 + used * ids_nb0)]) {
        return;
    }
    const int64_t row = used * nb1 + token * nb2;
    for (int64_t i = threadIdx.x * sizeof(float); i < row_bytes; i += blockDim.x * sizeof(float)) {
        *(float *) (dst + row + i) = *(const float *) (src + row + i);
    }
}

// One warp per expert, as upstream's helper, whose arrays it fills in the same order; but every position that names the
// expert counts, also a second one of the same token.
static __global__ void expert_sort_ids(const int32_t * ids, int32_t * ids_src1, int32_t * ids_dst, int32_t * expert_bounds,
    int n_ids, int n_used, int nchannels_y, int si1, int sis1, bool write_inverse) {
    const int      expert = blockIdx.x;
    const unsigned lane   = threadIdx.x;
    const auto     id_at  = [&](int i) { return i < n_ids ? ids[(i / n_used) * si1 + i % n_used] : INT_MAX; };

    int start = 0; // positions that name a lower expert
    for (int i = lane; i < n_ids; i += WARP_SIZE) {
        start += id_at(i) < expert;
    }
    start = warp_reduce_sum(start);

    int end = start;
    for (int i0 = 0; i0 < n_ids; i0 += WARP_SIZE) {
        const int      i    = i0 + lane;
        const bool     mine = id_at(i) == expert;
        const unsigned all  = __ballot_sync(0xffffffff, mine);
        if (mine) {
            const int row = end + __popc(all & ((1u << lane) - 1));
            ids_dst[row]  = i;
            if (write_inverse) {
                ids_src1[i] = row;
            } else {
                ids_src1[row] = (i / n_used) * sis1 + (i % n_used) % nchannels_y;
            }
        }
        end += __popc(all);
    }
    if (lane == 0) {
        expert_bounds[expert] = start;
        if (expert == (int) gridDim.x - 1) {
            expert_bounds[gridDim.x] = end;
        }
    }
}

void expert_cuda_sort_ids(const int32_t * ids, int32_t * ids_src1, int32_t * ids_dst, int32_t * expert_bounds, int n_experts,
    int n_tokens, int n_used, int nchannels_y, int si1, int sis1, bool write_inverse, cudaStream_t stream) {
    expert_sort_ids<<<n_experts, WARP_SIZE, 0, stream>>>(
        ids, ids_src1, ids_dst, expert_bounds, n_tokens * n_used, n_used, nchannels_y, si1, sis1, write_inverse);
    CUDA_CHECK(cudaGetLastError());
}

void expert_cuda_launch_lookup(const expert_cuda_state & state, int32_t layer, const ggml_tensor * ids, cudaStream_t stream) {
    const int                            n_used    = (int) ids->ne[0];
    const int                            n_ids     = (int) (ids->ne[0] * ids->ne[1]);
    const expert_layer &                 described = state.store->layers[layer];
    const ggml_cuda_kernel_launch_params params    = {dim3(1), dim3(n_ids <= 32 ? 32 : 256), 0, stream};
    ggml_cuda_kernel_launch(expert_lookup, params, (char *) ids->data, (int64_t) ids->nb[1], n_used, n_ids, layer,
        described.first_key, described.n_expert, state.offsets, state.resident, state.sequence,
        state.ids + (size_t) layer * EXPERT_LOOKUP_IDS_MAX, state.mailbox, state.lookup_timeout_ns);
}

void expert_cuda_launch_keep_rows(
    const ggml_tensor * ids, const uint8_t * in_pass, const ggml_tensor * src, char * dst, cudaStream_t stream) {
    const dim3 rows((unsigned) src->ne[1], (unsigned) src->ne[2]);
    expert_keep_rows<<<rows, 256, 0, stream>>>((const char *) ids->data, ids->nb[0], ids->nb[1], in_pass,
        (const char *) src->data, dst, src->ne[0] * sizeof(float), src->nb[1], src->nb[2]);
    CUDA_CHECK(cudaGetLastError());
}

// All copies to a device go through one stream: no thread waits for the copy of the part that it has read.
static cudaError_t copy_stream(int device, cudaStream_t * stream) {
    static std::mutex           mutex;
    static cudaStream_t         streams[GGML_CUDA_MAX_DEVICES] = {};
    std::lock_guard<std::mutex> lock(mutex);
    if (!streams[device]) {
        const cudaError_t error = cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking);
        if (error != cudaSuccess) {
            return error;
        }
    }
    *stream = streams[device];
    return cudaSuccess;
}

static cudaError_t choose_device_of(const void * memory, int * device) {
    cudaPointerAttributes found;
    const cudaError_t     error = cudaPointerGetAttributes(&found, memory);
    if (error == cudaSuccess) {
        ggml_cuda_set_device(*device = found.device);
    }
    return error;
}

// An expert_copy_t.
static bool copy_to_device(void * dest, const void * src, size_t n_bytes) {
    cudaStream_t stream = nullptr;
    int          device = 0;
    cudaError_t  error  = choose_device_of(dest, &device);
    if (error == cudaSuccess) {
        error = copy_stream(device, &stream);
    }
    if (error == cudaSuccess) {
        error = src ? cudaMemcpyAsync(dest, src, n_bytes, cudaMemcpyHostToDevice, stream) : cudaStreamSynchronize(stream);
    }
    if (error != cudaSuccess) {
        GGML_LOG_ERROR("%s: %s\n", __func__, cudaGetErrorString(error));
        (void) cudaGetLastError();
    }
    return error == cudaSuccess;
}

// An expert_lock_t. Only for devices that see the memory at the same address as the host.
static bool lock_memory(const void * device_memory, void * bytes, size_t n_bytes) {
    int         device = 0;
    int         can    = 0;
    cudaError_t error  = choose_device_of(device_memory, &device);
    if (error == cudaSuccess && !bytes) {
        error = cudaDeviceGetAttribute(&can, cudaDevAttrCanUseHostPointerForRegisteredMem, device);
        error = error == cudaSuccess && !can ? cudaErrorNotSupported : error;
    } else if (error == cudaSuccess && n_bytes == 0) {
        const expert_cuda_freeing no_kernel_waits;
        error = cudaHostUnregister(bytes);
    } else if (error == cudaSuccess) {
        error = cudaHostRegister(bytes, n_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    }
    if (error != cudaSuccess) {
        GGML_LOG_WARN("%s: %zu bytes of host memory: %s\n", __func__, n_bytes, cudaGetErrorString(error));
        (void) cudaGetLastError(); // or the next launch would be blamed for it
    }
    return error == cudaSuccess;
}

void * expert_cuda_proc(const char * name) {
    if (strcmp(name, EXPERT_COPY_PROC) == 0) {
        return (void *) copy_to_device;
    }
    return strcmp(name, EXPERT_LOCK_PROC) == 0 ? (void *) lock_memory : nullptr;
}

// ---- state

// Where a GPU drives a display, the driver ends kernels after a few seconds, and the process's context with them; a kernel
// that waits for the host takes as long as a read with its retries. EXPERT_PACK_CUDA_KERNEL_TIMEOUT=1 makes any GPU such a one.
static bool kernels_may_wait(int device) {
    int       limited  = 0;
    const int physical = ggml_cuda_info().devices[device].physical_device;
    CUDA_CHECK(cudaDeviceGetAttribute(&limited, cudaDevAttrKernelExecTimeout, physical));
    const char * forced = getenv("EXPERT_PACK_CUDA_KERNEL_TIMEOUT");
    return !limited && !(forced && atoi(forced) != 0);
}

static uint64_t lookup_timeout_ns_now() {
    const char * shorter = getenv("EXPERT_PACK_CUDA_LOOKUP_TIMEOUT_MS");
    return (shorter ? strtoull(shorter, nullptr, 10) : EXPERT_LOOKUP_TIMEOUT_MS) * 1000 * 1000;
}

expert_cuda_state::expert_cuda_state(expert_store * store, int device, char * base) :
    store(store), device(device), base(base), may_wait(kernels_may_wait(device)), lookup_timeout_ns(lookup_timeout_ns_now()),
    slot_key(store->slot_data.size(), -1) {
    ggml_cuda_set_device(device);
    const size_t n_keys = store->n_keys();
    CUDA_CHECK(cudaMalloc((void **) &offsets, n_keys * sizeof(int64_t)));
    CUDA_CHECK(cudaMalloc((void **) &resident, n_keys));
    CUDA_CHECK(cudaMalloc((void **) &updates, EXPERT_LOOKUP_UPDATES_MAX * sizeof(expert_update)));
    CUDA_CHECK(cudaMalloc((void **) &sequence, sizeof(uint32_t)));
    CUDA_CHECK(cudaMemset(offsets, 0, n_keys * sizeof(int64_t)));
    CUDA_CHECK(cudaMemset(resident, 0, n_keys));
    CUDA_CHECK(cudaMemset(sequence, 0, sizeof(uint32_t)));
    const size_t n_ids = store->layers.size() * EXPERT_LOOKUP_IDS_MAX;
    CUDA_CHECK(cudaHostAlloc((void **) &mailbox, sizeof(expert_mailbox), cudaHostAllocMapped | cudaHostAllocPortable));
    CUDA_CHECK(cudaHostAlloc((void **) &ids, n_ids * sizeof(int32_t), cudaHostAllocMapped | cudaHostAllocPortable));
    memset((void *) mailbox, 0, sizeof(expert_mailbox));
    CUDA_CHECK(cudaEventCreateWithFlags(&used, cudaEventDisableTiming));
    CUDA_CHECK(cudaDeviceSynchronize());
}

expert_cuda_state::~expert_cuda_state() {
    const expert_cuda_freeing no_kernel_waits;
    ggml_cuda_set_device(device);
    (void) cudaDeviceSynchronize(); // a graph that still reads the table ends first
    (void) cudaFree(offsets);
    (void) cudaFree(resident);
    (void) cudaFree(updates);
    (void) cudaFree(sequence);
    (void) cudaFreeHost(mailbox);
    (void) cudaFreeHost(ids);
    for (int32_t * room : ids_segments) {
        (void) cudaFreeHost(room);
    }
    (void) cudaEventDestroy(used);
    for (cudaEvent_t event : moves) {
        (void) cudaEventDestroy(event);
    }
    for (cudaStream_t stream : moving) {
        if (stream) {
            (void) cudaStreamDestroy(stream);
        }
    }
}

std::vector<expert_update> expert_cuda_state::changes(int32_t layer, const std::vector<int32_t> & experts) {
    std::vector<int32_t> keys;
    for (int32_t slot : in_transit) { // this pass may have taken the block
        const int32_t key = slot_key[slot];
        keys.push_back(key);
        if (store->tables.slot_of[key] != slot) {
            slot_key[slot] = -1; // it has left, and the table will not name it any more
        }
    }
    in_transit.clear();
    for (int32_t expert : experts) {
        const int32_t key  = store->layers[layer].first_key + expert;
        const int32_t slot = store->tables.slot_of[key];
        if (slot < 0 || slot_key[slot] == key) {
            continue;
        }
        if (slot_key[slot] >= 0) {
            keys.push_back(slot_key[slot]);
        }
        keys.push_back(key);
        slot_key[slot] = key;
    }
    std::vector<expert_update> changed;
    for (int32_t key : keys) { // may be named twice, and then say the same
        changed.push_back(entry_of(key));
    }
    return changed;
}

// What the table should say of an expert, if what it says of others is what slot_key says.
expert_update expert_cuda_state::entry_of(int32_t key) {
    const int32_t slot = store->tables.slot_of[key];
    if (slot < 0 || slot_key[slot] != key) {
        return {key, 0, 0};
    }
    if (store->slot_copy[slot] && std::find(in_transit.begin(), in_transit.end(), slot) == in_transit.end()) {
        in_transit.push_back(slot);
    }
    return {key, 1, offset_of(slot)};
}

void expert_cuda_state::apply(const std::vector<expert_update> & changed, cudaStream_t stream) {
    ggml_cuda_set_device(device); // what ran in between may have chosen another
    for (size_t start = 0; start < changed.size(); start += EXPERT_LOOKUP_UPDATES_MAX) {
        const size_t n = std::min<size_t>(changed.size() - start, EXPERT_LOOKUP_UPDATES_MAX);
        // pageable memory: the copy has read it when the call returns
        CUDA_CHECK(cudaMemcpyAsync(updates, changed.data() + start, n * sizeof(expert_update), cudaMemcpyHostToDevice, stream));
        expert_apply_updates<<<(unsigned) (n + 255) / 256, 256, 0, stream>>>(updates, (int) n, offsets, resident);
        CUDA_CHECK(cudaGetLastError());
    }
}

void expert_cuda_state::rewrite(cudaStream_t stream) {
    std::vector<expert_update> all;
    slot_key.assign(store->slot_data.size(), -1);
    in_transit.clear();
    for (int32_t key = 0; key < store->n_keys(); key++) {
        const int32_t slot = store->tables.slot_of[key];
        if (slot >= 0 && store->slot_arena[slot]->base == base) {
            slot_key[slot] = key;
        }
        all.push_back(entry_of(key));
    }
    apply(all, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

expert_cuda_state * expert_cuda_state_of(const expert_ref * ref, int device) {
    ggml_backend_dev_t dev   = ref->store->layer_dev[ref->layer];
    expert_arena *     arena = expert_store_open_arena(ref->store, dev);
    if (!arena) {
        expert_store_set_error(ref->store, expert_last_error());
        return nullptr;
    }
    static std::mutex           creating; // two contexts may come first
    std::lock_guard<std::mutex> once(creating);
    if (!arena->backend_state) {
        arena->backend_state = std::make_shared<expert_cuda_state>(ref->store, device, arena->base);
    }
    return (expert_cuda_state *) arena->backend_state.get();
}
