// What the processes of a node train together: one worker's share of a job.

#ifndef SIGNPOST_NODE_TRAINING_H_
#define SIGNPOST_NODE_TRAINING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/session_options.h"
#include "client/worker_session.h"
#include "kernels/gpu.h"
#include "node/numbers.h"
#include "node/place.h"
#include "node/shared_memory.h"
#include "proto/layout.h"
#include "proto/node.pb.h"

namespace signpost::node {

// One worker's session, whose parameters are in memory that the node's processes reach, and whose
// gradients are the mean of theirs:
//   g = (sum over local ranks of g_i) * (1 / n)
// in fp32, summed in the order of kernels/block.h, as aggregators sum over ranks. So a node does
// what one worker would with that mean.
//
// Not thread-safe, but for definition, layout, parameters and NewGradients.
class Training {
 public:
  // By local rank. Who holds them keeps them until nothing of the step reads them any more.
  using Gradients = absl::Span<const std::shared_ptr<const Numbers>>;

  // Borrows the GPU that it is to be on; null: on the host. Takes memory for the parameters,
  // which on the host counts as it is written. INVALID_ARGUMENT as LayOut; RESOURCE_EXHAUSTED for
  // more than `max_parameters`, and as Place::NewNumbers.
  static absl::StatusOr<std::unique_ptr<Training>> Create(const Definition& definition,
                                                          uint64_t max_parameters,
                                                          kernels::cuda::Gpu* gpu);

  const Definition& definition() const { return definition_; }
  const Layout& layout() const { return layout_; }
  // Whoever holds them may read them when this is gone.
  std::shared_ptr<const Numbers> parameters() const { return parameters_; }
  // For a process. Errors as Place::NewNumbers.
  absl::StatusOr<std::unique_ptr<Numbers>> NewGradients() const {
    return place_->NewNumbers(layout_.elements());
  }

  // Joins the job as the worker that `node` says, which has no node itself, with the values of the
  // first of `values`. FAILED_PRECONDITION names the tensor in which another has other values,
  // unless they are to begin with rank 0's. Otherwise errors as Session::Join. While a step is
  // open, whoever node.worker.on_news tells of news calls Advance. After Leave it may join again.
  absl::Status Join(const SessionOptions& node, const Start& start, Gradients values);
  Begun begun();  // after Join

  // The gradients of these tensors have come: sends their means, unless they were sent in this
  // step, and whatever else can be sent now, without waiting. The first call begins a step, which
  // stays open until Step. When gradients are in other memory than those before, the processes are
  // others: the means that were sent stay, and the others are of these. Errors as Step.
  absl::Status Advance(Gradients gradients, const StepRates& rates, std::vector<uint32_t> tensors);
  // A step on the mean of the gradients, all of which have come. INVALID_ARGUMENT, with nothing
  // sent, for rates as Session::Step, or others than those that it has begun with; after other
  // errors there is nothing left but to leave.
  absl::StatusOr<Stepped> Step(Gradients gradients, const StepRates& rates);

  // Of processes that are gone, whose gradients an open step still holds: nothing reads them any
  // more. Means that were not sent will be of others.
  void LetGoOfGradients();

  // FAILED_PRECONDITION while a step is open, as SaveState. Otherwise as Session's.
  absl::Status Checkpoint(const std::string& directory);
  absl::StatusOr<std::unique_ptr<SharedMemory>> SaveState();
  absl::Status Leave() { return session_->Leave(); }
  // As Worker's.
  JobOutlook Outlook() const { return session_->Outlook(); }
  // Whether these values are what the parameters are now.
  absl::StatusOr<bool> AreParameters(const Numbers& values) const;

 private:
  Training(const Definition& definition, Layout layout, std::unique_ptr<Place> place,
           std::shared_ptr<const Numbers> parameters);

  struct OpenStep {
    StepRates rates;
    std::vector<std::shared_ptr<const Numbers>> gradients;  // by local rank
    std::vector<bool> has_mean;                             // by tensor
    absl::Duration averaging;
  };

  absl::Status CheckSameValues(Gradients values) const;
  absl::Status CheckNoStepIsOpen() const;
  absl::Status Begin(Gradients gradients, const StepRates& rates);
  // Hands the session the means of those of these tensors that have none yet.
  absl::Status SendMeans(std::vector<uint32_t> tensors);
  // Of all tensors from `first` on, before `end`.
  absl::Status SendMeansOf(size_t first, size_t end);
  // Waits for what is under way, which reads gradients. Something was sent, which INVALID_ARGUMENT
  // would deny.
  absl::Status Failed(const absl::Status& status);
  // The local ranks whose gradients are not finite. None: their sum is not.
  absl::StatusOr<std::vector<uint32_t>> WhoIsNotFinite(Gradients gradients) const;

  const Definition definition_;
  const Layout layout_;
  const std::unique_ptr<Place> place_;
  const std::shared_ptr<const Numbers> parameters_;
  uint32_t rank_ = 0;
  std::unique_ptr<WorkerSession> session_;     // null: not joined
  std::vector<absl::Span<const float>> mean_;  // by tensor; once it has joined
  std::unique_ptr<OpenStep> open_step_;        // null: none
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_TRAINING_H_
