// The two-phase exchange by itself: tensors become their mean, or sum, over all ranks. What
// compression loses is kept in this worker's error, and added to the next call's tensors.
//
// Invariant, for codecs that lose something: the sum over calls of answers, plus the aggregator's
// error, plus the sum over ranks of errors (divided by their number, for the mean), is the sum over
// calls of what the ranks put in. fp32 loses nothing and keeps nothing.

#ifndef SIGNPOST_WORKER_REDUCTION_H_
#define SIGNPOST_WORKER_REDUCTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/gpu.h"
#include "proto/layout.h"
#include "worker/host_floats.h"
#include "worker/optimizer.h"
#include "worker/reduction_state.h"

namespace signpost {

struct ReductionOptions {
  Codec codec = FLOAT32;  // one that CheckCodecOption takes
  bool sum = false;       // over the ranks, instead of the mean
};

// INVALID_ARGUMENT that names the option.
absl::Status CheckOptions(const ReductionOptions& options);

// "reduction codec=one-bit": JobOptions.optimizer.
std::string DescribeOptions(const ReductionOptions& options);

// Not thread-safe. Borrows layout and gpu. With a GPU tensors and error are there; without, each
// chunk is compressed and applied with `threads` threads, the caller's included. Steps have no
// learning rates: those that come are ignored.
class Reduction final : public Optimizer {
 public:
  Reduction(const Layout& layout, const ReductionOptions& options, uint32_t threads = 1,
            kernels::cuda::Gpu* gpu = nullptr);

  absl::Status Check() const override { return state_->Check(); }
  absl::Status SetStream(kernels::cuda::Stream stream) override {
    return state_->SetStream(stream);
  }

  // Where answers go until the next call: results[i] is tensor i's, of its size. Without any they
  // go nowhere. They may be the memory of the gradients: a chunk is read before it is written.
  void SetResults(absl::Span<const absl::Span<float>> results);

  void BeginStep(uint64_t step, absl::Span<const GroupRates> rates) override {
    schedule_.set_begun_steps(step + 1);
  }
  void BeginMissedStep(uint64_t step, const StepRates& rates) override { BeginStep(step, {}); }
  absl::Status CheckRates(absl::Span<const GroupRates> rates) const override {
    return absl::OkStatus();
  }
  uint32_t groups() const override { return 0; }
  Codec codec() const override { return codec_; }
  float error_scale() const override { return 1; }

  absl::Status CheckGradient(const Gradient& gradient) const override {
    return state_->CheckGradient(gradient);
  }
  bool CanCompress() const override { return state_->CanCompress(); }
  std::optional<uint32_t> Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                   uint8_t* payload, Later later) override {
    return state_->Compress(chunk, gradients, payload, std::move(later));
  }
  void Apply(uint32_t chunk, Answer answer) override;
  // The chunk's results are NaN. With fp32 nothing goes into an error: a result is of the tensors
  // of its own call.
  void TakeBack(uint32_t chunk, const uint8_t* payload) override;
  void KeepInput(uint32_t chunk, const uint8_t* payload) override;

  // A reduction has no parameters, momentum or variance: zeros, which nobody looks at.
  Payload State(uint32_t chunk) const override;
  void SetState(uint32_t chunk, absl::Span<const uint8_t> state) override {}
  const Schedule& schedule() const override { return schedule_; }
  void SetSchedule(Schedule schedule) override { schedule_ = std::move(schedule); }
  void FollowStep(uint64_t step, const StepRates& rates) override {}
  bool FreezesBefore(uint64_t step) const override { return false; }
  bool HasFrozenFor(uint64_t step) const override { return false; }

  HostFloats error() const { return state_->Errors(); }  // in layout order; empty with fp32

 private:
  const Layout& layout_;
  const Codec codec_;
  Schedule schedule_;                       // steps alone
  std::vector<absl::Span<float>> results_;  // by tensor, or none
  const std::unique_ptr<ReductionState> state_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_REDUCTION_H_
