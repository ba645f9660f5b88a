// What the server knows of its expert pack: one owner, from the launcher's call to the end of the process.
#pragma once

#include "expert_provider.h"
#include "expert_server.h"

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>

struct common_params;

class expert_server_state {
public:
    // That of this process: upstream's code has no pointer to hand on.
    static expert_server_state & get();

    // Set before upstream's main runs.
    const expert_launcher * launcher = nullptr;
    std::string             executable;
    bool                    batch_given = false; // the user chose the size of batches
    // What the launcher's flags were set to, by their index.
    std::array<std::optional<std::string>, EXPERT_FLAGS_MAX> flags;

    // In the order of the calls. False: logged why.
    bool open_pack(const common_params & params);
    bool open_arenas();
    void close_pack();

    bool           is_open() const { return session_open; }
    bool           is_loading() const { return loading; }
    expert_store * store() const { return (expert_store *) opened.store; }

    // "": not because of an expert.
    std::string why_failed();
    // Logs why, which is the reason of the last load's failure then.
    bool        load_failed(const std::string & why);
    std::string why_load_failed() const { return load_failure; }
    std::string info();
    std::string metrics();
    // Remembers the counters for counted_since(). Of so many requests, the last ones.
    void                                                request_started(int64_t t_us);
    std::optional<std::array<int64_t, EXPERT_COUNTERS>> counted_since(int64_t t_us);

private:
    int64_t n_resident() const;
    int64_t counted(int index) const { return counted_before[index] + (session_open ? opened.counters[index] : 0); }

    std::atomic<bool>          loading{false};
    std::optional<std::string> override_patterns; // later, the list also holds what memory fitting added
    std::string                load_failure;      // of the last load, "": none of ours
    int64_t                    n_failures_known = 0;

    std::mutex                                              mutex; // guards what follows: HTTP threads read it
    expert_opened                                           opened       = {};
    bool                                                    session_open = false;
    std::string                                             info_text; // kept while asleep, as the cache's gauges are
    int64_t                                                 n_resident_last = 0;
    std::array<int64_t, EXPERT_COUNTERS>                    counted_before{}; // by sessions that are closed
    std::map<int64_t, std::array<int64_t, EXPERT_COUNTERS>> at_start;         // of requests, by their time
};
