// What a kernel reads and writes, and nothing else: how fast a core goes through the same memory
// when it has nothing to compute.

#ifndef SIGNPOST_BENCH_TRAFFIC_H_
#define SIGNPOST_BENCH_TRAFFIC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/block_vector.h"

namespace signpost::bench {

// One array that a kernel goes through, from its begin to its end.
struct Stream {
  enum class Use {
    kRead,
    kChange,  // in place: what it takes counts twice
    kWrite,
  };
  Use use;
  double bytes;  // per element
};

// All arrays of a kernel, side by side.
using Streams = std::vector<Stream>;

// Bytes per element that must be read and written, once each.
double BytesOf(const Streams& streams);

// Goes through arrays of its own as a kernel does, a block at a time of each. What is to come is
// fetched ahead, and what is only written goes past the caches, which would read it first.
class Traffic {
 public:
  // Takes the streams' bytes for each element.
  Traffic(const Streams& streams, size_t elements);

  void Run();

  // Of all arrays: whole blocks.
  size_t bytes() const;

  // The sum, modulo 2^32, of all words that the last run has read or changed, as they are now.
  uint32_t checksum() const { return checksum_; }

 private:
  struct Array {
    Stream::Use use;
    size_t block_bytes;
    BlockVector<uint8_t> bytes;
  };

  std::vector<Array> arrays_;
  size_t blocks_;
  uint32_t checksum_ = 0;
};

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_TRAFFIC_H_
