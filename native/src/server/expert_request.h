// What the experts of a request cost, for its timings and the log. A request is known by the time at which it began. Counts
// are of all requests that ran meanwhile: they share the cache, and a batch.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

void expert_request_started(int64_t t_us);
// By their names in the response; none without a pack.
std::vector<std::pair<std::string, double>> expert_request_figures(int64_t t_us);
// The same in a line, "" without a pack.
std::string expert_request_line(int64_t t_us);
