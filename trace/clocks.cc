#include "trace/clocks.h"

#include <algorithm>
#include <cstdlib>

namespace signpost::trace {
namespace {

// Clocks that contradict each other make ways shorter without end.
constexpr int64_t kMost = int64_t{1} << 60;

void Lower(std::optional<int64_t>& most, int64_t to) { most = std::min(most.value_or(to), to); }

}  // namespace

Clocks::Clocks(size_t hosts) : hosts_(hosts), most_(hosts * hosts) {}

void Clocks::AddMessage(size_t from, int64_t sent, size_t to, int64_t received) {
  if (from != to) Lower(most_[from * hosts_ + to], received - sent);
}

std::vector<std::optional<Clocks::Offset>> Clocks::Solve() const {
  // The shortest of all ways, Floyd-Warshall's.
  std::vector<std::optional<int64_t>> most = most_;
  for (size_t via = 0; via < hosts_; ++via) {
    for (size_t from = 0; from < hosts_; ++from) {
      for (size_t to = 0; to < hosts_; ++to) {
        const std::optional<int64_t> first = most[from * hosts_ + via];
        const std::optional<int64_t> second = most[via * hosts_ + to];
        if (from == to || !first || !second) continue;
        Lower(most[from * hosts_ + to], std::clamp(*first + *second, -kMost, kMost));
      }
    }
  }
  std::vector<std::optional<Offset>> offsets(hosts_);
  if (hosts_ > 0) offsets[0] = Offset();
  for (size_t host = 1; host < hosts_; ++host) {
    const std::optional<int64_t> ahead = most[host];
    const std::optional<int64_t> behind = most[host * hosts_];
    if (!ahead || !behind) continue;
    const int64_t width = *ahead + *behind;
    offsets[host] = {(*ahead - *behind) / 2, std::abs(width) / 2, width < 0};
  }
  return offsets;
}

}  // namespace signpost::trace
