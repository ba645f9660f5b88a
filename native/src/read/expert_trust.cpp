#include "expert_trust.h"

#include "expert_provider.h"

#include "ggml-impl.h"

#include <unistd.h>

// Hashing hides behind a slow drive's reads. From a fast one it takes as long as reading, and a layer waits for it.
static const uint32_t RECHECK_EVERY      = 16;
static const uint32_t RECHECK_EVERY_FAST = 256;

static std::string path_of(int fd) {
    char          path[4096];
    const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof(path));
    return n > 0 ? std::string(path, n) : "the expert pack";
}

static bool same(const timespec & a, const timespec & b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

static bool same(const struct stat & a, const struct stat & b) {
    return same(a.st_mtim, b.st_mtim) && same(a.st_ctim, b.st_ctim) && a.st_size == b.st_size;
}

static struct stat stat_of(int fd) {
    struct stat st = {};
    fstat(fd, &st);
    return st;
}

expert_trust::expert_trust(const expert_block * blocks, size_t n_blocks, bool recheck) : recheck(recheck) {
    for (size_t i = 0; i < n_blocks; i++) {
        if (blocks[i].fd >= 0 && files.count(blocks[i].fd) == 0) {
            files[blocks[i].fd] = stat_of(blocks[i].fd);
        }
    }
}

bool expert_trust::must_hash(const expert_block & block, bool is_fast) {
    return block.check != 0 || doubted || (recheck && ++n_unhashed % (is_fast ? RECHECK_EVERY_FAST : RECHECK_EVERY) == 0);
}

bool expert_trust::has_changed(int fd) {
    const struct stat now = stat_of(fd);
    const auto        was = files.find(fd);
    if (was != files.end() && same(was->second, now)) {
        return false;
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
