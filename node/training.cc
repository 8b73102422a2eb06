#include "node/training.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
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
  open_step_.reset();
  mean_.clear();
  session_.reset();
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
  if (status = session_->SetStream(place_->stream()); !status.ok()) return status;
  rank_ = options.worker.rank;
  absl::Span<const float> mean = place_->mean();
  for (const Tensor& tensor : layout_.tensors()) {
    mean_.push_back(mean.first(ElementCount(tensor)));
    mean.remove_prefix(ElementCount(tensor));
  }
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

absl::StatusOr<bool> Training::AreParameters(const Numbers& values) const {
  for (uint64_t first = 0; first < layout_.elements(); first += kAtOnce) {
    const uint64_t elements = std::min(kAtOnce, layout_.elements() - first);
    const absl::StatusOr<HostFloats> theirs = values.OnHost(first, elements);
    if (!theirs.ok()) return theirs.status();
    const absl::StatusOr<HostFloats> own = parameters_->OnHost(first, elements);
    if (!own.ok()) return own.status();
    if (std::memcmp(theirs->begin(), own->begin(), elements * sizeof(float)) != 0) return false;
  }
  return true;
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

absl::Status Training::Begin(Gradients gradients, const StepRates& rates) {
  if (open_step_ == nullptr) {
    if (absl::Status status = session_->BeginStep(RatesOf(rates)); !status.ok()) return status;
    open_step_ = std::make_unique<OpenStep>();
    open_step_->rates = rates;
    open_step_->has_mean.resize(layout_.tensors().size());
  } else if (rates.SerializeAsString() != open_step_->rates.SerializeAsString()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "step %d was begun by processes of which one did not finish it, at the rates '%s'; it "
        "cannot be finished at '%s'",
        session_->steps(), open_step_->rates.ShortDebugString(), rates.ShortDebugString()));
  }
  if (gradients == absl::MakeConstSpan(open_step_->gradients)) return absl::OkStatus();
  // What is under way reads those before.
  absl::Status status = place_->Await();
  if (!status.ok()) return Failed(status);
  open_step_->gradients.assign(gradients.begin(), gradients.end());
  std::vector<const Numbers*> numbers;
  for (const auto& gradient : gradients) numbers.push_back(gradient.get());
  status = place_->BeginStep(numbers);
  return status.ok() ? status : Failed(status);
}

absl::Status Training::SendMeansOf(size_t first, size_t end) {
  const auto is_before = [](const Segment& segment, size_t tensor) {
    return segment.tensor < tensor;
  };
  // What is averaged is compressed and sent while the rest is averaged.
  const uint32_t end_chunk = layout_.ChunksOf(end - 1).end;
  for (uint32_t chunk = layout_.ChunksOf(first).first; chunk < end_chunk; ++chunk) {
    absl::Span<const Segment> segments = layout_.chunks()[chunk].segments;
    const size_t before = absl::c_lower_bound(segments, first, is_before) - segments.begin();
    segments.remove_suffix(segments.end() - absl::c_lower_bound(segments, end, is_before));
    segments.remove_prefix(before);
    const absl::Time start = SteadyNow();
    if (absl::Status status = place_->Average(chunk, segments); !status.ok()) return Failed(status);
    open_step_->averaging += SteadyNow() - start;
    for (const Segment& segment : segments) {
      const absl::Span<const float> mean = mean_[segment.tensor];
      if (segment.tensor_offset + segment.elements < mean.size()) continue;  // more in the next one
      open_step_->has_mean[segment.tensor] = true;
      absl::Status status = session_->GradientReady(segment.tensor, mean);
      if (!status.ok()) return Failed(status);
    }
  }
  return absl::OkStatus();
}

absl::Status Training::Failed(const absl::Status& status) {
  place_->Await().IgnoreError();
  return absl::IsInvalidArgument(status) ? absl::InternalError(status.message()) : status;
}

absl::Status Training::SendMeans(std::vector<uint32_t> tensors) {
  const std::vector<bool>& has_mean = open_step_->has_mean;
  absl::c_sort(tensors);
  for (size_t i = 0; i < tensors.size();) {
    const size_t first = tensors[i];
    size_t end = first;
    while (i < tensors.size() && tensors[i] == end && !has_mean[end]) ++i, ++end;
    if (first == end) {
      ++i;
      continue;
    }
    if (absl::Status status = SendMeansOf(first, end); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Training::Advance(Gradients gradients, const StepRates& rates,
                               std::vector<uint32_t> tensors) {
  absl::Status status = Begin(gradients, rates);
  if (status.ok()) status = SendMeans(std::move(tensors));
  if (!status.ok()) return status;
  status = session_->AdvanceStep();
  return status.ok() ? status : Failed(status);
}

void Training::LetGoOfGradients() {
  if (open_step_ == nullptr) return;
  place_->Await().IgnoreError();  // what comes next tells it
  open_step_->gradients.clear();
}

absl::StatusOr<Stepped> Training::Step(Gradients gradients, const StepRates& rates) {
  if (absl::Status status = Begin(gradients, rates); !status.ok()) return status;
  std::vector<uint32_t> tensors(layout_.tensors().size());
  absl::c_iota(tensors, 0);
  if (absl::Status status = SendMeans(std::move(tensors)); !status.ok()) return status;
  absl::StatusOr<StepReport> report = session_->FinishStep();
  if (!report.ok()) return Failed(report.status());
  // Nothing is read or written any more that processes share.
  if (absl::Status status = place_->Await(); !status.ok()) return Failed(status);
  const std::unique_ptr<OpenStep> done = std::move(open_step_);
  report->kernels += done->averaging;
  Stepped stepped = MessageOf(*report);
  for (Stepped::SkippedRound& skipped : *stepped.mutable_skipped()) {
    const uint32_t node = skipped.rank();
    skipped.set_rank(node * gradients.size());  // of another node no more is known
    if (node != rank_) continue;
    const absl::StatusOr<std::vector<uint32_t>> who = WhoIsNotFinite(gradients);
    if (!who.ok()) return Failed(who.status());
    if (!who->empty()) skipped.set_rank(skipped.rank() + who->front());
    // Sums of numbers that are in range may be out of it.
    skipped.set_block(absl::StrCat(
        skipped.block(), ", of ",
        who->empty() ? "the sum over the node's processes"
                     : absl::StrCat("local rank ", absl::StrJoin(*who, ", local rank "))));
  }
  stepped.set_steps(session_->steps());
  *stepped.mutable_wire() = MessageOf(session_->wire_bytes());
  stepped.set_is_synchronised(session_->is_synchronised());
  return stepped;
}

absl::StatusOr<std::vector<uint32_t>> Training::WhoIsNotFinite(Gradients gradients) const {
  std::vector<uint32_t> local_ranks;
  for (uint32_t i = 0; i < gradients.size(); ++i) {
    bool is_finite = true;
    for (uint64_t first = 0; first < layout_.elements() && is_finite; first += kAtOnce) {
      const absl::StatusOr<HostFloats> part =
          gradients[i]->OnHost(first, std::min(kAtOnce, layout_.elements() - first));
      if (!part.ok()) return part.status();
      is_finite =
          kernels::DenseWithinRange(kernels::DenseType::kFloat32,
                                    reinterpret_cast<const uint8_t*>(part->begin()), part->size());
    }
    if (!is_finite) local_ranks.push_back(i);
  }
  return local_ranks;
}

absl::Status Training::CheckNoStepIsOpen() const {
  if (open_step_ == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("step %d was begun by processes of which one did not finish it, and a part "
                      "of it may have been "
                      "sent. Take it, and save then; or go on from what was saved before",
                      session_->steps()));
}

absl::Status Training::Checkpoint(const std::string& directory) {
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  return session_->Checkpoint(directory);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> Training::SaveState() {
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  const absl::StatusOr<std::string> state = session_->SaveState();
  if (!state.ok()) return state.status();
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = SharedMemory::Create(state->size());
  if (memory.ok()) std::memcpy((*memory)->data(), state->data(), state->size());
  return memory;
}

}  // namespace signpost::node
