// While a kernel waits for the host, a call that waits for all kernels of the GPU - to free memory, to unlock it - would keep
// the copies away that the kernel waits for. So graphs whose kernels may wait, and such calls, take turns, in the whole process.
#include "expert_cuda.h"
#include "expert_cuda_state.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <new>

static std::mutex              gate; // guards what follows
static std::condition_variable opened;
static int                     n_lookups  = 0; // graphs whose kernels may wait
static int                     n_freeings = 0; // that go on, or wait for these; before them no graph starts

static thread_local bool in_lookup = false; // this thread's; it may free nothing of a GPU meanwhile, and does not

// In a forked child nobody else goes on with what the parent's threads were at.
static const int renewed_in_children = pthread_atfork(nullptr, nullptr, [] {
    new (&gate) std::mutex;
    new (&opened) std::condition_variable;
    n_lookups = n_freeings = 0;
    in_lookup              = false;
});

void expert_cuda_enter_lookup() {
    (void) renewed_in_children;
    std::unique_lock<std::mutex> lock(gate);
    opened.wait(lock, [] { return n_freeings == 0; });
    n_lookups++;
    in_lookup = true;
}

void expert_cuda_leave_lookup() {
    if (!in_lookup) {
        return;
    }
    std::lock_guard<std::mutex> lock(gate);
    in_lookup = false;
    n_lookups--;
    opened.notify_all();
}

expert_cuda_freeing::expert_cuda_freeing() {
    std::unique_lock<std::mutex> lock(gate);
    n_freeings++;
    opened.wait(lock, [] { return n_lookups == 0 || in_lookup; });
}

expert_cuda_freeing::~expert_cuda_freeing() {
    std::lock_guard<std::mutex> lock(gate);
    n_freeings--;
    opened.notify_all();
}
