// The buffer type of claimed weights. It holds no bytes: the weights' data live in slots.
//
// Any access that does not go through MUL_MAT_ID or ggml_backend_tensor_get() faults instead of computing with
// garbage: tensors point into reserved, inaccessible address space.
#include "expert_error.h"
#include "expert_store.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

// What a tensor takes in the buffer. Small: memory estimates must not count experts that are not loaded.
static const size_t TENSOR_BYTES = 256;

struct expert_buft : ggml_backend_buffer_type {
    expert_store * store;
    std::string    name;
};

struct expert_buffer_context {
    std::shared_ptr<expert_store> store;
    char *                        base     = nullptr;
    size_t                        reserved = 0;
    // by number in the buffer. Not in tensor->extra: upstream takes a tensor with extra for a repacked one
    std::vector<const expert_ref *> refs;
};

static void buffer_free(ggml_backend_buffer_t buffer) {
    auto * context = (expert_buffer_context *) buffer->context;
    if (context->base) {
        munmap(context->base, context->reserved);
    }
    delete context;
}

static void * buffer_get_base(ggml_backend_buffer_t buffer) { return ((expert_buffer_context *) buffer->context)->base; }

static ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    auto &       context = *(expert_buffer_context *) buffer->context;
    const auto & refs    = context.store->refs;
    const auto   it      = refs.find(ggml_get_name(tensor));
    if (it == refs.end()) {
        GGML_LOG_ERROR(
            "%s: tensor %s is not a routed expert weight and can't be kept with them\n", __func__, ggml_get_name(tensor));
        return GGML_STATUS_FAILED;
    }
    const size_t number = ((char *) tensor->data - context.base) / TENSOR_BYTES;
    if (number >= context.refs.size()) {
        return GGML_STATUS_FAILED;
    }
    context.refs[number] = &it->second;
    return GGML_STATUS_SUCCESS;
}

static void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void *, size_t, size_t) {
    GGML_LOG_ERROR("%s: %s comes from an expert pack and is read-only: the write is ignored\n", __func__, ggml_get_name(tensor));
}

static expert_arena * arena_of(const expert_ref * ref) {
    return expert_store_open_arena(ref->store, ref->store->layer_dev[ref->layer]);
}

static void copy_out(const expert_ref * ref, const char * source, void * data, size_t size) {
    const expert_arena * arena = arena_of(ref);
    if (!arena->buffer || source < arena->base || source >= arena->base + arena->size) { // or read in place
        memcpy(data, source, size);
        return;
    }
    ggml_tensor bytes = {};
    bytes.type        = GGML_TYPE_I8;
    bytes.buffer      = arena->buffer.get();
    bytes.data        = const_cast<char *>(source);
    bytes.ne[0]       = (int64_t) size;
    bytes.ne[1] = bytes.ne[2] = bytes.ne[3] = 1;
    bytes.nb[0]                             = 1;
    bytes.nb[1] = bytes.nb[2] = bytes.nb[3] = size;
    ggml_backend_tensor_get(&bytes, data, 0, size);
}

// Part of one expert, from `start` on.
static void get_from_expert(const ggml_tensor * tensor, size_t expert, size_t start, void * data, size_t size) {
    const expert_ref *   ref = expert_ref_of(tensor);
    std::vector<int64_t> rows(tensor->ne[2], 0);
    rows[expert] = 1;
    expert_op_begin(ref, rows.data(), 1, nullptr);
    if (const char * source = expert_op_data(ref)[expert]) {
        copy_out(ref, source + start, data, size);
    } else {
        memset(data, 0, size);
    }
    if (expert_arena * arena = arena_of(ref)) {
        arena->touched = true;
    }
    if (!expert_op_end(ref)) {
        const std::string why = expert_take_failure();
        GGML_LOG_ERROR("%s: expert %zu of %s can't be read: %s\n", __func__, expert, ggml_get_name(tensor), why.c_str());
        expert_store_fail_next(ref->store, why); // this call can't say so
    }
}

// Saving, quantizing and debugging read weights this way: expert by expert through the cache.
static void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const expert_ref * ref   = expert_ref_of(tensor);
    const size_t       bytes = ref->store->layers[ref->layer].roles[ref->role].bytes;
    while (size > 0) {
        const size_t n = std::min(size, bytes - offset % bytes);
        get_from_expert(tensor, offset / bytes, offset % bytes, data, n);
        data = (char *) data + n;
        offset += n;
        size -= n;
    }
}

static void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

static const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ nullptr,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

static const char * buft_get_name(ggml_backend_buffer_type_t buft) { return ((expert_buft *) buft)->name.c_str(); }

static ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    auto context   = std::make_unique<expert_buffer_context>();
    context->store = ((expert_buft *) buft)->store->shared_from_this();
    if (size > 0) {
        size_t tensor_bytes_max = 0; // so that no tensor reaches past the reserved space
        for (const auto & [tensor, ref] : context->store->refs) {
            const expert_layer & layer = context->store->layers[ref.layer];
            tensor_bytes_max           = std::max<size_t>(tensor_bytes_max, layer.roles[ref.role].bytes * layer.n_expert);
        }
        context->reserved = size + tensor_bytes_max;
        context->refs.assign(size / TENSOR_BYTES, nullptr);
        context->base = (char *) mmap(nullptr, context->reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (context->base == (char *) MAP_FAILED) {
            GGML_LOG_ERROR("%s: no address space for %zu bytes\n", __func__, context->reserved);
            return nullptr;
        }
    }
    return ggml_backend_buffer_init(buft, buffer_interface, context.release(), size);
}

static size_t buft_get_alignment(ggml_backend_buffer_type_t) { return TENSOR_BYTES; }
static size_t buft_get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *) { return TENSOR_BYTES; }

bool expert_buft_is(ggml_backend_buffer_type_t buft) { return buft && buft->iface.get_name == buft_get_name; }

const expert_ref * expert_ref_of(const ggml_tensor * tensor) {
    if (!tensor->buffer || tensor->buffer->iface.get_base != buffer_get_base || !tensor->data) {
        return nullptr;
    }
    // slices of a weight, which backends make for themselves, point elsewhere
    const auto & context = *(const expert_buffer_context *) tensor->buffer->context;
    const size_t number  = ((const char *) tensor->data - context.base) / TENSOR_BYTES;
    return (const char *) tensor->data >= context.base && number < context.refs.size() ? context.refs[number] : nullptr;
}

static ggml_backend_buffer_type_t buft_for(expert_store * store, ggml_backend_dev_t dev) {
    static const ggml_backend_buffer_type_i buft_interface = {
        /* .get_name       = */ buft_get_name,
        /* .alloc_buffer   = */ buft_alloc_buffer,
        /* .get_alignment  = */ buft_get_alignment,
        /* .get_max_size   = */ nullptr,
        /* .get_alloc_size = */ buft_get_alloc_size,
        /* .is_host        = */ nullptr, // no: nobody may use the data pointer
    };
    std::shared_ptr<void> & known = store->bufts[dev];
    if (!known) {
        known = std::make_shared<expert_buft>(
            expert_buft{{buft_interface, dev, nullptr}, store, std::string("ExpertPack_") + ggml_backend_dev_name(dev)});
    }
    return (expert_buft *) known.get();
}

// False and expert_last_error() if it is another weight, or on a device that can't take its experts from slots.
static bool fits(const expert_role & role, const ggml_tensor * meta, ggml_backend_dev_t dev) {
    if (meta->type != role.type || meta->ne[0] != role.ne[0] || meta->ne[1] != role.ne[1] || meta->ne[2] != role.ne[2]) {
        expert_set_last_error("%s is %s [%lld, %lld, %lld] in the model but %s [%lld, %lld, %lld] in the expert pack: "
                              "make the pack again from this model",
            ggml_get_name(meta), ggml_type_name(meta->type), (long long) meta->ne[0], (long long) meta->ne[1],
            (long long) meta->ne[2], ggml_type_name((ggml_type) role.type), (long long) role.ne[0], (long long) role.ne[1],
            (long long) role.ne[2]);
        return false;
    }
    if (ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU &&
        !ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), EXPERT_COPY_PROC)) {
        expert_set_last_error("the experts of %s would be computed on %s, a device that takes no expert pack: load the model "
                              "with n_gpu_layers=0 (--gpu-layers 0), or split it by layer",
            ggml_get_name(meta), ggml_backend_dev_name(dev));
        return false;
    }
    return true;
}

// NULL: no store provides it for the load on this thread.
static const expert_ref * find_ref(int fd, const char * tensor) {
    const expert_store * store = expert_store_find(fd);
    return store && store->refs.count(tensor) > 0 ? &store->refs.at(tensor) : nullptr;
}

ggml_backend_buffer_type_t expert_claim(int fd, const ggml_tensor * meta, ggml_backend_dev_t dev, const char ** error) {
    *error                 = nullptr;
    const expert_ref * ref = find_ref(fd, ggml_get_name(meta));
    if (!ref) {
        return nullptr;
    }
    if (!fits(ref->store->layers[ref->layer].roles[ref->role], meta, dev) || !expert_store_claim(*ref, dev)) {
        *error = expert_last_error();
        return nullptr;
    }
    return buft_for(ref->store, dev);
}

bool expert_wants_cpu(int fd, const char * tensor) {
    const expert_ref * ref = find_ref(fd, tensor);
    return ref && ref->store->layers[ref->layer].on_cpu;
}

bool expert_is_described(int fd, const char * tensor) { return find_ref(fd, tensor) != nullptr; }
