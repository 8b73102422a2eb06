// Tensors' means or sums over all workers, without an optimizer: the exchange as a primitive.
//
//   auto reduction = ReductionSession::Join(*SessionOptions::FromEnvironment(), "logits",
//                                           {.codec = ONE_BIT}, {{"logits", {1000}}});
//   (*reduction)->Reduce({absl::MakeSpan(logits)});  // in place

#ifndef SIGNPOST_CLIENT_REDUCTION_SESSION_H_
#define SIGNPOST_CLIENT_REDUCTION_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/one_call.h"
#include "client/owner.h"
#include "client/session_options.h"
#include "kernels/gpu.h"
#include "worker/reduction.h"
#include "worker/wire_bytes.h"
#include "worker/worker.h"

namespace signpost {

// A reduction belongs to the process that has joined, and has one call at a time, as a Session.
class ReductionSession {
 public:
  // Waits for a call that is under way.
  ~ReductionSession() {
    calls_.Wait([&] { worker_.reset(); });
  }

  // Connects, and blocks until all ranks have joined: a reduction is a job of its own, and so has
  // errors of its own on workers and aggregators. It is called "<job>/<name>"; `name` tells the
  // training job's reductions apart and must be the same on all ranks, as must be `tensors`: their
  // values and groups are not looked at, and options.resume is not either. With options.gpu they
  // are on that GPU, and so are errors: packed numbers alone cross to the host. Nor is options.node
  // looked at: the processes of a node reduce each for itself, with the aggregators, and wait for
  // all others. Errors as Worker::Join, and of a GPU as Session's.
  static absl::StatusOr<std::unique_ptr<ReductionSession>> Join(const SessionOptions& options,
                                                                absl::string_view name,
                                                                const ReductionOptions& reduction,
                                                                std::vector<Parameter> tensors);

  // As Worker's.
  absl::Status SetStream(kernels::cuda::Stream stream) {
    return calls_.Run("SetStream", [&] { return worker_->SetStream(stream); });
  }

  // In place: values[i], of tensor i's size, becomes its mean or sum over all ranks, as
  // Worker::Reduce. All ranks must call it equally often.
  absl::StatusOr<StepReport> Reduce(absl::Span<const absl::Span<float>> values) {
    return calls_.Run("Reduce", [&] { return worker_->Reduce(values); });
  }

  // Ends this worker's membership, and with those of all ranks the errors.
  absl::Status Leave() {
    return calls_.Run("Leave", [&] { return worker_->Leave(); });
  }

  // Calls that were done.
  uint64_t steps() const {
    return calls_.Wait([&] { return worker_->steps(); });
  }

  // As Session's.
  WireBytes wire_bytes() {
    return calls_.Wait([&] { return counter_.Read(); });
  }

  const Owner& owner() const { return owner_; }

 private:
  ReductionSession(std::unique_ptr<kernels::cuda::Gpu> gpu, std::unique_ptr<Worker> worker,
                   WireByteCounter counter)
      : gpu_(std::move(gpu)), worker_(std::move(worker)), counter_(std::move(counter)) {}

  std::unique_ptr<kernels::cuda::Gpu> gpu_;  // null: tensors are the host's
  std::unique_ptr<Worker> worker_;
  WireByteCounter counter_;
  mutable OneCall calls_;
  const Owner owner_;
};

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_REDUCTION_SESSION_H_
