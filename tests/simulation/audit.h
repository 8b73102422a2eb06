// Checks a job's frames and answers against the equations of 1-bit Adam, in double precision, from
// nothing but the bytes that travelled: each number must be what the worker's or aggregator's input
// and error make it, so nothing may be lost, counted twice or averaged otherwise.

#ifndef SIGNPOST_TESTS_SIMULATION_AUDIT_H_
#define SIGNPOST_TESTS_SIMULATION_AUDIT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "worker/onebit_adam.h"

namespace signpost::simulation {

class Audit {
 public:
  // What must not happen and did.
  using Report = std::function<void(const std::string&)>;
  // Of one rank and step, by tensor; all zero where a worker took a step without a gradient.
  using Gradients = std::function<std::vector<std::vector<float>>(uint32_t rank, uint64_t step)>;

  Audit(uint32_t workers, const OptimizerOptions& optimizer, Report report)
      : workers_(workers), optimizer_(optimizer), report_(std::move(report)) {}

  // The job's; the same from every rank.
  void SetLayout(const Layout& layout) { layout_.assign(1, layout); }
  // Each as it travels. Reports a frame or answer that is not the one before for the same key.
  void AddFrame(const FrameHeader& header, absl::Span<const uint8_t> payload);
  void AddAnswer(const AnswerHeader& header, absl::Span<const uint8_t> payload);
  // Another process takes the rank's place from that step on, and has no error then.
  void SetReturn(uint32_t rank, uint64_t step) { returns_.insert({rank, step}); }
  // Where a rank's variance was frozen, 0 if it was not. Reports another one than before.
  void SetFreezeStep(uint64_t step);
  // A rank's error after its last step, in layout order.
  void SetError(uint32_t rank, absl::Span<const float> error) {
    errors_[rank].assign(error.begin(), error.end());
  }

  // Once all is in: looks at steps [0, steps).
  void Check(uint64_t steps, const Gradients& gradients) const;

 private:
  using FrameKey = std::tuple<uint32_t, uint32_t, uint64_t>;  // rank, chunk, step
  using AnswerKey = std::tuple<uint32_t, uint64_t>;           // chunk, step
  struct ChunkModel;
  struct Numbers {
    Codec codec = CODEC_UNSPECIFIED;
    std::vector<uint8_t> payload;
    std::vector<uint32_t> late_ranks;
  };

  bool IsOneBit(uint64_t step) const { return step >= freeze_step_ && !IsRefresh(step); }
  bool IsRefresh(uint64_t step) const {
    const uint64_t interval = optimizer_.variance_refresh_interval;
    return interval > 0 && step > freeze_step_ && (step - freeze_step_) % interval == 0;
  }
  void CheckRound(uint32_t chunk, uint64_t step, const Gradients& gradients,
                  ChunkModel& model) const;
  // Whether `numbers` is `input` in its codec; what it stands for.
  std::vector<double> Decode(const Numbers& numbers, uint32_t chunk, absl::Span<const double> input,
                             const std::string& what) const;

  const uint32_t workers_;
  const OptimizerOptions optimizer_;
  const Report report_;
  std::vector<Layout> layout_;  // one, once it is known
  std::map<FrameKey, Numbers> frames_;
  std::map<AnswerKey, Numbers> answers_;
  std::map<uint32_t, std::vector<float>> errors_;  // by rank
  std::set<std::pair<uint32_t, uint64_t>> returns_;
  uint64_t freeze_step_ = 0;  // until it is known
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_AUDIT_H_
