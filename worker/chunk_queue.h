// Which of a round's chunks goes next.

#ifndef SIGNPOST_WORKER_CHUNK_QUEUE_H_
#define SIGNPOST_WORKER_CHUNK_QUEUE_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace signpost {

// Chunks are sent in the order in which they became ready, as long as fewer than `window` are under
// way. Other ranks may have theirs ready in another order, and a round closes when all have sent
// it: two ranks whose windows were full of different chunks would wait for each other for ever. So
// the first chunk that is not answered, and the window - 1 behind it, are sent as soon as they are
// ready, whatever is under way. Every rank comes to them, and at most 2 * window - 1 are under way.
//
// Chunks that become ready in ascending order never need that. Not thread-safe.
class ChunkQueue {
 public:
  // window >= 1.
  ChunkQueue(uint32_t chunks, uint32_t window) : states_(chunks), window_(window) {}

  // The chunk can be sent. Once for each.
  void SetReady(uint32_t chunk);
  // A chunk that is to be sent now, and counts as sent; none if none is ready that may be.
  std::optional<uint32_t> TakeNext();
  // The answer has come. Requires that the chunk was sent.
  void SetAnswered(uint32_t chunk);

  bool all_answered() const { return first_unanswered_ == states_.size(); }

 private:
  enum class State : uint8_t { kNotReady, kReady, kSent, kAnswered };

  uint32_t Send(uint32_t chunk);

  std::vector<State> states_;  // by chunk
  const uint32_t window_;
  std::deque<uint32_t> ready_;  // in the order in which they became so; some may be sent already
  uint32_t under_way_ = 0;
  uint32_t first_unanswered_ = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CHUNK_QUEUE_H_
