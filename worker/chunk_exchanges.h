// A rank's frames on their way to the aggregators, until nobody can ask for them again.

#ifndef SIGNPOST_WORKER_CHUNK_EXCHANGES_H_
#define SIGNPOST_WORKER_CHUNK_EXCHANGES_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "worker/kept_frames.h"
#include "worker/shards.h"
#include "worker/step_report.h"

namespace signpost {

// One exchange at a time for each chunk, of consecutive steps. An aggregator that was started again
// gets what it has lost, from the frames that are kept for that: it asks for them (REPLAY) when it
// is sent one, so frames are offered where it might be waiting. Not thread-safe.
class ChunkExchanges {
 public:
  // What became of a chunk's exchange, once for each; from any thread. Must not block. Receive
  // wants it.
  using Deliver = std::function<void(uint32_t chunk, absl::StatusOr<Answer> answer)>;

  // `shards` and `layout` must outlive it.
  ChunkExchanges(Shards& shards, const Layout& layout, Deliver deliver);

  // Which of its processes the aggregator is, as far as is known.
  void SetGeneration(uint32_t shard, uint64_t generation) { generations_[shard] = generation; }
  // This rank came back to the job: rounds before that step closed without its frames.
  void SetFirstStep(uint64_t step) { first_step_ = step; }
  // A LISTEN by which this rank, which then came back, had the answer of such a round: kept as
  // frames are, since an aggregator that is started again may not know any more how it closed.
  void Keep(uint32_t chunk, SentFrame listen) { exchanges_[chunk].kept.Add(std::move(listen)); }
  // Of what is sent from now on.
  void SetDeadline(absl::Time deadline) { deadline_ = deadline; }
  absl::Time deadline() const { return deadline_; }

  // Sends the chunk's frame, of the step after its last, at once or behind the one under way.
  void Send(uint32_t chunk, SentFrame frame);
  // Takes what was delivered, and sends what is to come next: once more that to which no answer
  // came in its time, if the deadline has been put off since it was sent. Returns the answer if it
  // is the first one to its frame, or if it asks for chunks' states (FETCH): behind them that
  // step's frame is to be sent again, with Exchange. Errors are logged: DATA_LOSS when an
  // aggregator has lost what it had promised to keep, or comes to another result than before;
  // otherwise as Shards::Explain or CheckAnswer.
  absl::StatusOr<std::optional<Answer>> Receive(uint32_t chunk, absl::StatusOr<Answer> answer,
                                                StepReport& report);
  // Sends the frame of that step, if there is one. Requires that none of the chunk is under way.
  void Exchange(uint32_t chunk, uint64_t step);

  // Sends the newest frame of each of the shard's chunks again, but where an exchange is under way.
  void OfferAll(uint32_t shard);
  // Offers a frame to every shard that could have been started again without our knowing.
  void OfferToIdleShards();

  bool is_any_under_way() const;
  uint64_t kept_bytes() const;  // of payloads

 private:
  struct ChunkExchange {
    KeptFrames kept;
    std::optional<uint64_t> step_under_way;
    absl::Time deadline;  // of what is under way
    // The aggregator was started again, and is to find its way to the step at which this rank came
    // back without it.
    bool offers_again = false;
  };

  // `step` is that of the frame.
  absl::StatusOr<std::optional<Answer>> Take(uint32_t chunk, uint64_t step,
                                             absl::StatusOr<Answer> answer, StepReport& report);
  absl::Status Replay(uint32_t chunk, uint64_t step, const AnswerHeader& wanted,
                      StepReport& report);
  void Offer(uint32_t chunk);
  bool IsAnyAwaited() const;  // an answer that is needed

  Shards& shards_;
  const Layout& layout_;
  const Deliver deliver_;
  uint64_t first_step_ = 0;
  absl::Time deadline_;
  std::vector<uint64_t> generations_;     // by shard
  std::vector<ChunkExchange> exchanges_;  // by chunk
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CHUNK_EXCHANGES_H_
