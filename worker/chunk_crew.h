// Threads that work on a chunk together.

#ifndef SIGNPOST_WORKER_CHUNK_CREW_H_
#define SIGNPOST_WORKER_CHUNK_CREW_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "proto/layout.h"

namespace signpost {

// The segments of each chunk, cut into pieces that threads share out among themselves. Blocks are
// whole, and each stands alone in all that workers do with a chunk, so results do not depend on how
// many threads there are.
//
// A step's chunks still come one after the other: what is shared out is one chunk's arithmetic, in
// the middle of a call, so that nobody else need know of threads. Not thread-safe.
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

  void Help();
  // Takes pieces of the chunk at hand until all are taken.
  void TakePieces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasPiece() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return next_ < pieces_.size(); }
  bool HasPieceOrStops() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return HasPiece() || stops_; }
  bool IsDone() const { return unfinished_ == 0; }

  const uint32_t block_elements_;
  std::vector<uint32_t> blocks_of_chunk_;
  std::vector<std::vector<Piece>> pieces_of_chunk_;

  absl::Mutex mutex_;
  // The chunk at hand: pieces from next_ on are not taken yet.
  absl::Span<const Piece> pieces_ ABSL_GUARDED_BY(mutex_);
  const absl::FunctionRef<void(const Segment& part)>* work_ ABSL_GUARDED_BY(mutex_) = nullptr;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  // Also looked at without the mutex, before a thread goes to sleep.
  std::atomic<uint64_t> calls_ = 0;  // of ForEachPart
  std::atomic<size_t> unfinished_ = 0;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> helpers_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CHUNK_CREW_H_
