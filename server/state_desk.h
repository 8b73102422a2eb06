// Where ranks that come back wait for the state of chunks, and others are asked for it.

#ifndef SIGNPOST_SERVER_STATE_DESK_H_
#define SIGNPOST_SERVER_STATE_DESK_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "server/owned_chunk.h"

namespace signpost {

// Thread-safe. Callbacks are called exactly once, with no lock held; all must have ended (End)
// before the destructor.
class StateDesk {
 public:
  using Done = OwnedChunk::Done;

  explicit StateDesk(const Layout& layout) : layout_(layout) {}  // which must outlive it

  // A FETCH that waits for a STATE of its chunk. A later one of the same rank and chunk takes its
  // place; it ends with ABORTED. After End it ends at once.
  void Fetch(const FrameHeader& header, Done done) ABSL_LOCKS_EXCLUDED(mutex_);

  // Chunks whose state the rank is to be asked for now, in answer to its frame with that header: of
  // those of which it may have one that somebody has a use for. It is then up to it: if it does not
  // give them in some seconds, and the time that a slow link takes for them, another one is to be
  // asked, or, when as much time has passed again, the same. At once where all that were asked are
  // gone; and in answer to the frame that the last question was the answer to, when that comes
  // again as it was (see next_fetch): the question has been lost.
  std::vector<uint32_t> TakeWanted(const FrameHeader& header, absl::Time now,
                                   const std::set<uint32_t>& gone = {}) ABSL_LOCKS_EXCLUDED(mutex_);
  std::set<uint32_t> WaitingRanks() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Those of them for whom others were asked kInVain ago, and have not given.
  std::set<uint32_t> RanksInVain(absl::Time now) const ABSL_LOCKS_EXCLUDED(mutex_);

  // The process of the rank is there no more: ends its FETCH with `reason`.
  void Withdraw(uint32_t rank, const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

  // What an asked rank is answered: see FETCH in aggregator.proto.
  static OwnedChunk::Reply Ask(const FrameHeader& header, const std::vector<uint32_t>& chunks);

  // A STATE: ends all FETCH of its chunk with it, as one of the process of that generation. The
  // reply is for its sender.
  OwnedChunk::Reply Give(Frame frame, uint64_t generation) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for one that is not passed on.
  static OwnedChunk::Reply Receipt(const FrameHeader& header);

  // Ends those that wait with `reason`; and, after End, those that come. The first End counts.
  void Cancel(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Waiting {
    Done done;
    uint64_t least_step = 0;                       // an earlier state is of no use
    absl::Time asked_at = absl::InfiniteFuture();  // others were, first, for this one
  };
  // The frame that a question was the answer to.
  struct AskedFrame {
    uint32_t rank = 0;
    uint64_t step = 0;
    uint32_t chunk = 0;
    uint32_t next_fetch = 0;

    bool operator==(const AskedFrame&) const = default;
  };
  struct Wish {
    absl::Time asked_at = absl::InfinitePast();      // the last time
    absl::Duration patience = absl::ZeroDuration();  // from then on
    AskedFrame last;                                 // that time's
    std::set<uint32_t> asked;                        // ranks
    std::map<uint32_t, Waiting> fetches;             // by rank
  };

  const Layout& layout_;
  mutable absl::Mutex mutex_;
  std::map<uint32_t, Wish> wishes_ ABSL_GUARDED_BY(mutex_);  // by chunk
  absl::Status end_ ABSL_GUARDED_BY(mutex_);                 // OK: it has not ended
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_STATE_DESK_H_
