// How many of a worker's chunks are under way at once, at most: each shard then has one to sum up
// while another is on its way, and with few shards there are still enough to keep a link, the
// worker and the aggregators at work at the same time. ARCHITECTURE.md has what fewer cost.

#ifndef SIGNPOST_PROTO_WINDOW_H_
#define SIGNPOST_PROTO_WINDOW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace signpost {

constexpr uint32_t WindowOf(size_t shard_count) {
  return std::max(uint32_t{8}, static_cast<uint32_t>(2 * shard_count));
}

}  // namespace signpost

#endif  // SIGNPOST_PROTO_WINDOW_H_
