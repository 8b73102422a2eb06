#include "node/training.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/worker_session.h"
#include "kernels/dense.h"
#include "node/definition.h"
#include "proto/steady_time.h"

namespace signpost::node {
namespace {

// Elements that the host looks at: on a GPU that is a copy.
constexpr uint64_t kAtOnce = uint64_t{1} << 20;

Wire MessageOf(const WireBytes& bytes) {
  Wire wire;
  wire.set_sent_bytes(bytes.sent);
  wire.set_received_bytes(bytes.received);
  return wire;
}

Stepped MessageOf(const StepReport& report) {
  Stepped message;
  message.set_step(report.step);
  message.set_steps_caught_up(report.steps_caught_up);
  message.set_late_rounds(report.late_rounds);
  message.mutable_late_ranks()->Add(report.late_ranks.begin(), report.late_ranks.end());
  message.set_codec(report.codec);
  message.set_kernels_ns(absl::ToInt64Nanoseconds(report.kernels));
  message.set_wire_ns(absl::ToInt64Nanoseconds(report.wire));
  message.set_wait_ns(absl::ToInt64Nanoseconds(report.wait));
  for (const SkippedRound& skipped : report.skipped) {
    Stepped::SkippedRound& to = *message.add_skipped();
    to.set_rank(skipped.rank);
    to.set_block(skipped.block);
  }
  message.set_restarted_aggregators(report.restarted_aggregators);
  message.set_replayed_frames(report.replayed_frames);
  message.set_kept_bytes(report.kept_bytes);
  message.set_sent_bits(report.sent_bits);
  return message;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Training>> Training::Create(const Definition& definition,
                                                           uint64_t max_parameters,
                                                           kernels::cuda::Gpu* gpu) {
  absl::StatusOr<Layout> layout = LayOut(definition);
  if (!layout.ok()) return layout.status();
  if (layout->elements() > max_parameters) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d parameters; the node's worker takes %d (--max-parameters)",
                        layout->elements(), max_parameters));
  }
  std::unique_ptr<Place> place = NewPlace(gpu);
  absl::StatusOr<std::unique_ptr<Numbers>> parameters = place->NewNumbers(layout->elements());
  if (!parameters.ok()) return parameters.status();
  return std::unique_ptr<Training>(
      new Training(definition, *std::move(layout), std::move(place), *std::move(parameters)));
}

Training::Training(const Definition& definition, Layout layout, std::unique_ptr<Place> place,
                   std::shared_ptr<const Numbers> parameters)
    : definition_(definition),
      layout_(std::move(layout)),
      place_(std::move(place)),
      parameters_(std::move(parameters)) {}

absl::Status Training::Join(const SessionOptions& node, const Start& start, Gradients values) {
  if (!start.start_from_rank_0()) {
    if (absl::Status status = CheckSameValues(values); !status.ok()) return status;
  }
  if (absl::Status status = place_->Copy(*values[0], *parameters_); !status.ok()) return status;
  SessionOptions options = node;
  SetWorkerOptions(definition_.options(), options.worker);
  options.worker.resume_with_other_world_size = start.resume_with_other_world_size();
  options.start_from_rank_0 = start.start_from_rank_0();
  options.resume = start.resume();
  std::string state;  // of its own: the process could still write where it is
  if (start.has_resume_state()) {
    // Numbers of each element, and what is written around them.
    const uint64_t most = 28 * layout_.elements() + (uint64_t{16} << 20);
    if (start.resume_state().bytes() > most) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a state to resume from of %d bytes; of this job's parameters none has "
                          "more than %d",
                          start.resume_state().bytes(), most));
    }
    const absl::StatusOr<std::unique_ptr<SharedMemory>> memory =
        SharedMemory::Open(start.resume_state(), start.resume_state().bytes());
    if (!memory.ok()) return memory.status();
    state = std::string((*memory)->text());
    options.resume_state = state;
  }
  absl::Status status = place_->Prepare(layout_, values.size(), options.worker.threads);
  if (!status.ok()) return status;
  auto session =
      WorkerSession::JoinOn(place_->gpu(), options, OptimizerOptionsOf(definition_.options()),
                            ParametersOf(definition_, parameters_->values()));
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  session_->SetStream(place_->stream());
  rank_ = options.worker.rank;
  return place_->Await();
}

absl::Status Training::CheckSameValues(Gradients values) const {
  uint64_t first = 0;
  for (const Tensor& tensor : layout_.tensors()) {
    const uint64_t end = first + ElementCount(tensor);
    for (; first < end; first += std::min(kAtOnce, end - first)) {
      const uint64_t elements = std::min(kAtOnce, end - first);
      const absl::StatusOr<HostFloats> wanted = values[0]->OnHost(first, elements);
      if (!wanted.ok()) return wanted.status();
      for (size_t process = 1; process < values.size(); ++process) {
        const absl::StatusOr<HostFloats> theirs = values[process]->OnHost(first, elements);
        if (!theirs.ok()) return theirs.status();
        if (std::memcmp(theirs->begin(), wanted->begin(), elements * sizeof(float)) != 0) {
          return absl::FailedPreconditionError(absl::StrFormat(
              "tensor %s has other values on local rank %d than on local rank 0: use the same "
              "seed, or have all begin with rank 0's values (start_from_rank_0)",
              DescribeTensor(tensor), process));
        }
      }
    }
  }
  return absl::OkStatus();
}

Begun Training::begun() {
  Begun begun;
  begun.set_steps(session_->steps());
  begun.set_resumed_checkpoint(session_->resumed().checkpoint);
  for (const std::string& warning : session_->resumed().warnings) {
    begun.add_resume_warnings(warning);
  }
  if (const std::optional<Returned>& returned = session_->returned()) {
    begun.set_returned(true);
    begun.set_returned_step(returned->step);
    if (returned->lost_error_norm) begun.set_lost_error_norm(*returned->lost_error_norm);
  }
  *begun.mutable_wire() = MessageOf(session_->wire_bytes());
  begun.set_is_synchronised(session_->is_synchronised());
  return begun;
}

absl::StatusOr<Stepped> Training::Step(Gradients gradients, const StepRates& rates) {
  if (absl::Status status = session_->BeginStep(RatesOf(rates)); !status.ok()) return status;
  // From here on something was sent, and INVALID_ARGUMENT would say that nothing was. What is
  // under way reads gradients, which processes may give back once they are answered.
  const auto failed = [this](const absl::Status& status) {
    place_->Await().IgnoreError();
    return absl::IsInvalidArgument(status) ? absl::InternalError(status.message()) : status;
  };
  if (absl::Status status = place_->BeginStep(gradients); !status.ok()) return failed(status);
  absl::Duration averaging;
  // What is averaged is compressed and sent while the rest is averaged.
  const absl::Span<const float> mean = place_->mean();
  uint32_t averaged = 0;  // tensors
  uint64_t first = 0;     // element of that tensor
  for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
    const absl::Time start = SteadyNow();
    if (absl::Status status = place_->Average(chunk); !status.ok()) return failed(status);
    averaging += SteadyNow() - start;
    const Chunk& done = layout_.chunks()[chunk];
    for (; averaged < layout_.tensors().size(); ++averaged) {
      const uint64_t elements = ElementCount(layout_.tensors()[averaged]);
      if (first + elements > done.first_element + done.elements) break;
      absl::Status status = session_->GradientReady(averaged, mean.subspan(first, elements));
      if (!status.ok()) return failed(status);
      first += elements;
    }
  }
  absl::StatusOr<StepReport> report = session_->FinishStep();
  if (!report.ok()) return failed(report.status());
  // Nothing is read or written any more that processes share.
  if (absl::Status status = place_->Await(); !status.ok()) return failed(status);
  report->kernels += averaging;
  Stepped stepped = MessageOf(*report);
  for (Stepped::SkippedRound& skipped : *stepped.mutable_skipped()) {
    if (skipped.rank() != rank_) continue;
    const absl::StatusOr<std::string> who = WhoIsNotFinite(gradients);
    if (!who.ok()) return failed(who.status());
    skipped.set_block(absl::StrCat(skipped.block(), ", of ", *who));
  }
  stepped.set_steps(session_->steps());
  *stepped.mutable_wire() = MessageOf(session_->wire_bytes());
  stepped.set_is_synchronised(session_->is_synchronised());
  return stepped;
}

absl::StatusOr<std::string> Training::WhoIsNotFinite(Gradients gradients) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < gradients.size(); ++i) {
    bool is_finite = true;
    for (uint64_t first = 0; first < layout_.elements() && is_finite; first += kAtOnce) {
      const absl::StatusOr<HostFloats> part =
          gradients[i]->OnHost(first, std::min(kAtOnce, layout_.elements() - first));
      if (!part.ok()) return part.status();
      is_finite =
          kernels::DenseWithinRange(kernels::DenseType::kFloat32,
                                    reinterpret_cast<const uint8_t*>(part->begin()), part->size());
    }
    if (!is_finite) names.push_back(absl::StrCat("local rank ", i));
  }
  // Sums of numbers that are in range may be out of it.
  return names.empty() ? "the sum over the node's processes" : absl::StrJoin(names, ", ");
}

absl::StatusOr<std::unique_ptr<SharedMemory>> Training::SaveState() {
  const absl::StatusOr<std::string> state = session_->SaveState();
  if (!state.ok()) return state.status();
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = SharedMemory::Create(state->size());
  if (memory.ok()) std::memcpy((*memory)->data(), state->data(), state->size());
  return memory;
}

}  // namespace signpost::node
