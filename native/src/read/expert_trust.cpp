#include "expert_trust.h"

#include "expert_provider.h"

#include "ggml-impl.h"

#include <unistd.h>

#include <algorithm>

// Hashing hides behind a slow drive's reads. From a fast one it takes as long as reading, and a layer waits for it.
static const uint32_t RECHECK_EVERY      = 16;
static const uint32_t RECHECK_EVERY_FAST = 256;

static std::string path_of(int fd) {
    char          path[4096];
    const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof(path));
    return n > 0 ? std::string(path, n) : "the expert pack";
}

static bool same(const timespec & a, const timespec & b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

expert_trust::stamp expert_trust::stamp_of(int fd) {
    struct stat st = {};
    fstat(fd, &st);
    return {fd, st.st_mtim, st.st_ctim, st.st_size};
}

void expert_trust::watch(const expert_block * blocks, size_t n_blocks, bool with_recheck) {
    recheck = with_recheck;
    for (size_t i = 0; i < n_blocks; i++) {
        const int  fd    = blocks[i].fd;
        const auto known = [fd](const stamp & s) { return s.fd == fd; };
        if (fd >= 0 && std::none_of(stamps.begin(), stamps.end(), known)) {
            stamps.push_back(stamp_of(fd));
        }
    }
}

bool expert_trust::must_hash(const expert_block & block, bool is_fast) {
    return block.check != 0 || doubted || (recheck && ++n_unhashed % (is_fast ? RECHECK_EVERY_FAST : RECHECK_EVERY) == 0);
}

bool expert_trust::has_changed(int fd) {
    const stamp now = stamp_of(fd);
    for (const stamp & was : stamps) {
        if (was.fd == fd && same(was.modified, now.modified) && same(was.changed, now.changed) && was.size == now.size) {
            return false;
        }
    }
    if (!doubted.exchange(true)) {
        GGML_LOG_WARN("%s was changed while it is open: every read of an expert is checked from now on\n", path_of(fd).c_str());
    }
    return true;
}

void expert_trust::lied(int fd) {
    doubted = true;
    liar    = fd;
    broken  = true;
}

std::string expert_trust::reason() const {
    return path_of(liar) +
           ": an expert that was right before came back with other bytes: the file was changed or the drive can't "
           "be trusted; every read is checked from now on and what was read unchecked is read again, so the call "
           "may be repeated; `expert-pack verify --deep` tells what is damaged";
}
