// Whether the bytes of a pack may still be taken unchecked, once they were right. Internal to native/src.
//
//   a block's first read is hashed (expert_block.check), and so are some of the later ones
//   a file is changed while it is open        -> doubt: every read is hashed from now on
//   a block that was right comes back wrong   -> doubt, and what was read unchecked before is not trusted either
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

struct expert_block;

class expert_trust {
public:
    // Remembers the files of the blocks as they are now. recheck: some of the later reads are hashed, too.
    expert_trust(const expert_block * blocks, size_t n_blocks, bool recheck);
    // Before a read: is it to be hashed? is_fast: reading a block takes no longer than hashing it.
    bool must_hash(const expert_block & block, bool is_fast);
    // After a read that was not hashed: has its file been changed meanwhile? Says so once in the log.
    bool has_changed(int fd);
    // After a read that was hashed and wrong, of a block that had been right before.
    void lied(int fd);
    // It happened, and nobody has drawn the consequence yet: what was read unchecked is not to be trusted.
    bool is_broken() const { return broken; }
    bool take_broken() { return broken.exchange(false); }
    // Why. One sentence.
    std::string reason() const;

private:
    std::map<int, struct stat> files; // by descriptor, as they were
    const bool                 recheck;
    std::atomic<uint32_t>      n_unhashed{0};
    std::atomic<bool>          doubted{false};
    std::atomic<bool>          broken{false};
    std::atomic<int>           liar{-1}; // the file
};
