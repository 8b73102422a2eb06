// Checks a job's frames and answers against the equations of 1-bit Adam, in the fp32 that
// ARCHITECTURE.md specifies, from nothing but the bytes that travelled: each byte must be what the
// worker's or aggregator's input and error make it, so nothing may be lost, counted twice or
// averaged otherwise.

#ifndef SIGNPOST_TESTS_SIMULATION_AUDIT_H_
#define SIGNPOST_TESTS_SIMULATION_AUDIT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "tests/simulation/packing.h"
#include "worker/onebit_adam.h"
#include "worker/variance_plan.h"
#include "worker/zero_one_options.h"

namespace signpost::simulation {

class Audit {
 public:
  // What must not happen and did.
  using Report = std::function<void(const std::string&)>;
  // Of one rank and step, by tensor; empty where a worker took a step without a gradient.
  using Gradients = std::function<std::vector<std::vector<float>>(uint32_t rank, uint64_t step)>;

  // Of one step.
  using LearningRate = std::function<double(uint64_t step)>;

  Audit(uint32_t workers, const OptimizerOptions& optimizer, LearningRate learning_rate,
        Report report)
      : workers_(workers),
        optimizer_(optimizer),
        learning_rate_(std::move(learning_rate)),
        report_(std::move(report)) {
    if (optimizer.zero_one) {
      zero_one_.emplace(*optimizer.zero_one, optimizer.freeze_step, optimizer.as_deepspeed);
    }
  }

  // The job's; the same from every rank.
  void SetLayout(const Layout& layout) { layout_.assign(1, layout); }
  // Each as it travels. Reports a frame or answer that is not the one before for the same key.
  void AddFrame(const FrameHeader& header, absl::Span<const uint8_t> payload);
  // To a frame of that epoch.
  void AddAnswer(uint64_t epoch, const AnswerHeader& header, absl::Span<const uint8_t> payload);
  // The aggregator's, as it is read in that epoch. Reports one that is not the one before for the
  // same key.
  void AddAggregatorError(uint64_t epoch, const ReadErrorResponse& error);
  // Another process takes the rank's place from that step on, which begins a round, and has no
  // error then. What the one before sent since counts nowhere.
  void SetReturn(uint32_t rank, uint64_t step);
  // Of the shard's chunks, whether two rounds that follow the rank's last frame, or that frame's
  // own and the next, are known to have closed without it.
  bool HasClosedTwiceWithout(uint32_t rank, uint32_t shard, uint32_t shards) const;
  // Where a rank's variance was frozen, 0 if it was not. Reports another one than before.
  void SetFreezeStep(uint64_t step);
  // Where the variance follows: whether a rank refreshes it in the round, or settles the momentum.
  // Reports another answer than before.
  using Kind = VariancePlan::Kind;
  void SetKind(uint64_t round, Kind kind);
  // A rank's error after its last step, in layout order.
  void SetError(uint32_t rank, absl::Span<const float> error) {
    errors_[rank].assign(error.begin(), error.end());
  }

  // Once all is in: the codecs of the answers whose rounds counted, before the freeze step, from it
  // on, and, apart from both, of those that brought the variance up to date.
  std::set<Codec> WarmUpCodecs() const;
  std::set<Codec> FrozenCodecs() const;
  std::set<Codec> VarianceCodecs() const;

  // Once all is in: looks at steps [0, steps).
  void Check(uint64_t steps, const Gradients& gradients) const;

 private:
  using FrameKey = std::tuple<uint32_t, uint32_t, uint64_t>;  // rank, chunk, round
  using AnswerKey = std::tuple<uint32_t, uint64_t>;           // chunk, round
  struct ChunkModel;
  struct Numbers {
    Codec codec = CODEC_UNSPECIFIED;
    std::vector<uint8_t> payload;
    std::vector<uint32_t> late_ranks;
  };

  // Whether the chunk's job has no later epoch. What there is of earlier ones counts no more.
  bool IsOfNewestEpoch(uint32_t chunk, uint64_t epoch);
  std::set<Codec> CodecsOf(absl::FunctionRef<bool(uint64_t round)> is_meant) const;
  // That the round ends.
  ZeroOneSchedule::Interval StepsOf(uint64_t round) const {
    return zero_one_ ? zero_one_->StepsOf(round) : ZeroOneSchedule::Interval{round, 1};
  }
  Kind KindOf(uint64_t round) const {
    const auto known = kinds_.find(round);
    return known == kinds_.end() ? Kind::kOneBit : known->second;
  }
  bool IsSettle(uint64_t round) const { return KindOf(round) == Kind::kSettle; }
  bool IsOneBit(uint64_t round) const { return round >= freeze_step_ && !IsRefresh(round); }
  bool IsRefresh(uint64_t round) const {
    const uint64_t interval = optimizer_.variance_refresh_interval;
    if (optimizer_.VarianceFollows()) return KindOf(round) == Kind::kRefresh;
    return interval > 0 && round > freeze_step_ && (round - freeze_step_) % interval == 0;
  }
  // Whether gradients travel apart from the errors.
  bool IsApart(uint64_t round) const {
    const bool is_update =
        zero_one_ && round < freeze_step_ && zero_one_->LastUpdate(round).step == round;
    return is_update || IsRefresh(round);
  }
  void Freeze(uint64_t round, ChunkModel& model) const;
  // The aggregator's before the round.
  void CheckError(uint32_t chunk, uint64_t round, const ChunkModel& model) const;
  void CheckRound(uint32_t chunk, uint64_t round, const Gradients& gradients,
                  ChunkModel& model) const;
  // In which a round travels that is not skipped.
  Codec CodecOf(uint64_t round) const;
  // What a rank has to send in that round, without its error.
  std::vector<float> InputOf(uint32_t rank, const Chunk& chunk, uint64_t round,
                             const Gradients& gradients, const ChunkModel& model) const;
  void CheckIs(const Packed& wanted, Codec codec, const Numbers& got,
               const std::string& what) const;

  const uint32_t workers_;
  const OptimizerOptions optimizer_;
  const LearningRate learning_rate_;
  const Report report_;
  std::optional<ZeroOneSchedule> zero_one_;  // of 0/1 Adam
  std::vector<Layout> layout_;               // one, once it is known
  std::map<uint32_t, uint64_t> epochs_;      // by chunk
  std::map<FrameKey, Numbers> frames_;
  std::map<AnswerKey, Numbers> answers_;
  std::map<AnswerKey, std::vector<float>> aggregator_errors_;  // before that round; empty: zeros
  std::map<uint32_t, std::vector<float>> errors_;              // by rank
  std::set<std::pair<uint32_t, uint64_t>> returns_;
  uint64_t freeze_step_ = 0;        // until it is known
  std::map<uint64_t, Kind> kinds_;  // of rounds, where the variance follows
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_AUDIT_H_
