// Threads that work on a chunk together.

#ifndef SIGNPOST_WORKER_CHUNK_CREW_H_
#define SIGNPOST_WORKER_CHUNK_CREW_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "proto/layout.h"

namespace signpost {

class HelperThreads;

// The segments of each chunk, cut into pieces that threads share out among themselves. Blocks are
// whole, and each stands alone in all that workers do with a chunk, so results do not depend on how
// many threads there are.
//
// A step's chunks still come one after the other: what is shared out is one chunk's arithmetic, in
// the middle of a call, so that nobody else need know of threads. All crews of a process have the
// same helpers, as many as the largest of them asks for. Not thread-safe.
class ChunkCrew {
 public:
  // Some 20 to 50 us of work: more would leave threads idle at a chunk's end, less would spend
  // more on sharing out.
  static constexpr uint32_t kPieceElements = 64 * 1024;

  static constexpr uint32_t kMostThreads = 256;

  // `threads` in [1, kMostThreads], whoever calls ForEachPart included: with 1 there are no others.
  // There are fewer where no chunk has a piece for each, or the system has no more. The layout is
  // only looked at here.
  ChunkCrew(const Layout& layout, uint32_t threads);
  ~ChunkCrew();

  // Calls work(part) for parts of segments that make up the chunk, on any of the threads, and
  // returns when all are done.
  void ForEachPart(uint32_t chunk, absl::FunctionRef<void(const Segment& part)> work);

  // The same with compress(part), which returns the first of the part's blocks that it did not
  // pack, or their number, as kernels do. Returns the first of the chunk's, or their number.
  uint32_t Compress(uint32_t chunk, absl::FunctionRef<size_t(const Segment& part)> compress);

 private:
  using Piece = std::vector<Segment>;  // about kPieceElements, of one segment or more

  const uint32_t block_elements_;
  std::vector<uint32_t> blocks_of_chunk_;
  std::vector<std::vector<Piece>> pieces_of_chunk_;
  std::shared_ptr<HelperThreads> helpers_;  // null: there are none
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CHUNK_CREW_H_
