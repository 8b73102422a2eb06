#include "worker/worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "log/log.h"
#include "proto/codec.h"
#include "proto/exit_code.h"
#include "proto/try_again.h"
#include "proto/window.h"
#include "trace/recorder.h"
#include "trace/span.h"
#include "worker/float_mode.h"
#include "worker/kept_frames.h"
#include "worker/onebit_lamb.h"
#include "worker/page_vector.h"
#include "worker/parameter.h"
#include "worker/replica_fetch.h"
#include "worker/step_times.h"
#include "worker/zero_one_adam.h"

#ifdef __x86_64__
// Binds to the hypot that glibc 2.34 has as well: programs run on systems older than the one they
// were linked on. glibc 2.35 added a second one, which sets no errno and computes the same value.
// Only a figure that is reported depends on it.
__asm__(".symver hypot, hypot@GLIBC_2.2.5");
#endif

namespace signpost {
namespace {

// How long a start that failed may take to take back what it has done.
constexpr absl::Duration kGiveUpTimeout = absl::Seconds(3);

std::vector<Tensor> TensorsOf(absl::Span<const Parameter> parameters) {
  std::vector<Tensor> tensors;
  for (const Parameter& parameter : parameters) tensors.push_back(TensorOf(parameter));
  return tensors;
}

uint32_t ValuesCrc32c(absl::Span<const float> values, uint32_t crc_so_far) {
  return Crc32c({reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)},
                crc_so_far);
}

absl::StatusOr<uint32_t> Crc32cOf(absl::Span<const Parameter> parameters, kernels::cuda::Gpu* gpu) {
  uint32_t crc = 0;
  for (const Parameter& parameter : parameters) {
    if (gpu == nullptr) {
      crc = ValuesCrc32c(parameter.values, crc);
      continue;
    }
    PageVector<float> copy(parameter.values.size());
    absl::Status status = gpu->Read(copy.data(), parameter.values.data(),
                                    copy.size() * sizeof(float), /*stream=*/nullptr);
    if (!status.ok()) return status;
    crc = ValuesCrc32c(copy, crc);
  }
  return crc;
}

// Steps in a row with a skipped round. A loss scale that finds itself skips some 20.
constexpr uint64_t kMostStepsSkipped = 100;

// Of what decides how each parameter steps: in a local interval, in all of its steps.
uint32_t Crc32cOf(absl::Span<const Parameter> parameters, absl::Span<const GroupRates> rates,
                  const Schedule& schedule) {
  uint32_t crc = 0;
  for (const Parameter& parameter : parameters) {
    crc =
        Crc32c({reinterpret_cast<const uint8_t*>(&parameter.group), sizeof(parameter.group)}, crc);
  }
  crc = Crc32c({reinterpret_cast<const uint8_t*>(rates.data()), rates.size() * sizeof(GroupRates)},
               crc);
  for (const LocalSums& sums : schedule.local_sums()) {
    const double numbers[] = {sums.learning_rate(), sums.decay(), sums.momentum(),
                              sums.last_momentum()};
    crc = Crc32c({reinterpret_cast<const uint8_t*>(numbers), sizeof numbers}, crc);
  }
  return crc;
}

// Refuses more tensors than headers have scales of. Those travel to ranks that come back.
absl::Status CheckScales(const WorkerOptions& options, const OptimizerOptions& optimizer,
                         bool has_late_tensors, size_t tensors) {
  const bool has_scales =
      optimizer.lamb || optimizer.zero_one || optimizer.VarianceFollows() || has_late_tensors;
  if (!has_scales || options.min_workers == 0 || tensors <= size_t{kMaxTensorScales}) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s in a job with a round deadline may have %d tensors; got %d",
      optimizer.lamb                ? "1-bit LAMB"
      : optimizer.zero_one          ? "0/1 Adam"
      : optimizer.VarianceFollows() ? "1-bit Adam with variance_refresh_interval auto"
                                    : "an optimizer to which tensors were added",
      kMaxTensorScales, tensors));
}

template <typename Kind>
std::unique_ptr<OneBitAdam> NewOptimizerOf(const Layout& layout, const OptimizerOptions& optimizer,
                                           const std::vector<Parameter>& parameters,
                                           const WorkerOptions& options) {
  auto kind = std::make_unique<Kind>(layout, optimizer, parameters, options.threads, options.gpu);
  kind->SetSumOverShards(options.sum_over_shards);
  return kind;
}

std::unique_ptr<OneBitAdam> NewOptimizer(const Layout& layout, const OptimizerOptions& optimizer,
                                         const std::vector<Parameter>& parameters,
                                         const WorkerOptions& options) {
  if (optimizer.lamb) return NewOptimizerOf<OneBitLamb>(layout, optimizer, parameters, options);
  if (optimizer.zero_one) {
    return NewOptimizerOf<ZeroOneAdam>(layout, optimizer, parameters, options);
  }
  return NewOptimizerOf<OneBitAdam>(layout, optimizer, parameters, options);
}

// Refuses what needs more of the other shards than sums, or needs them at other times than where
// steps begin.
absl::Status CheckShards(const WorkerOptions& options, const OptimizerOptions& optimizer,
                         absl::Span<const Parameter> parameters) {
  const bool is_sharded = options.shards > 1;
  if (options.shards == 0 || is_sharded != (options.sum_over_shards != nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shards is ", options.shards, " ", options.sum_over_shards != nullptr ? "with" : "without",
        " sum_over_shards; wanted 1 without it, or more with it"));
  }
  for (const Parameter& parameter : parameters) {
    const size_t least = is_sharded ? parameter.values.size() : 0;
    const bool fits =
        is_sharded ? parameter.whole_elements >= least : parameter.whole_elements == 0;
    if (fits) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "whole_elements of parameter ", parameter.name, " is ", parameter.whole_elements,
        ", wanted ",
        is_sharded ? absl::StrCat(least, " or more, for one of ", options.shards, " shards")
                   : "0 for a tensor without shards"));
  }
  if (!is_sharded) return absl::OkStatus();
  if (optimizer.lamb) {
    return absl::InvalidArgumentError(
        "1-bit LAMB does not train shards: its trust ratios are of whole tensors, and known only "
        "behind the exchange. Use 1-bit Adam");
  }
  if (options.min_workers > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_workers is ", options.min_workers,
                     ", but shards of one model are trained in step, so that no worker of one shard "
                     "can be left behind. Set it to 0"));
  }
  return absl::OkStatus();
}

// Returns chunk_elements that suit one of so many shards of the model, the same for all of them.
uint32_t ChunkElementsOfShards(const WorkerOptions& options,
                               absl::Span<const Parameter> parameters) {
  uint64_t elements = 0;
  for (const Parameter& parameter : parameters) elements += parameter.WholeElements();
  return SuitableChunkElements((elements + options.shards - 1) / options.shards,
                               options.block_elements, options.world_size);
}

// How long the aggregator has waited for others before it answered.
absl::Duration WaitedFor(const absl::StatusOr<Answer>& answer) {
  return answer.ok() ? absl::Microseconds(answer->header.waited_us()) : absl::ZeroDuration();
}

}  // namespace

// What comes of its exchange with the open step.
struct Worker::ChunkState {
  uint64_t next_step = 0;   // of which the answer has not been applied
  bool owes_state = false;  // to a rank that comes back, once there is one that fits a step
  bool is_packing = false;  // on a GPU, until the inbox has it
  // Of the frame that is not answered yet, to take it back.
  std::shared_ptr<const Payload> packed;
};

Worker::Worker(const WorkerOptions& options, const OptimizerOptions* optimizer,
               const ReductionOptions* reduction, std::vector<Parameter> parameters,
               std::vector<std::unique_ptr<Channel>> channels, Layout layout)
    : options_(options),
      parameters_(std::move(parameters)),
      layout_(std::move(layout)),
      window_(WindowOf(channels.size())),
      adam_(optimizer ? NewOptimizer(layout_, *optimizer, parameters_, options) : nullptr),
      reduction_(
          reduction ? std::make_unique<Reduction>(layout_, *reduction, options.threads, options.gpu)
                    : nullptr),
      optimizer_(adam_ ? static_cast<Optimizer&>(*adam_) : *reduction_),
      chunks_(layout_.chunks().size()),
      inbox_(std::make_shared<WorkerInbox>(options.on_news)),
      shards_(options_, layout_, std::move(channels)),
      exchanges_(shards_, layout_, [inbox = inbox_](uint32_t chunk, absl::StatusOr<Answer> answer) {
        inbox->Put(chunk, std::move(answer));
      }) {}

Worker::~Worker() = default;

absl::StatusOr<std::unique_ptr<Worker>> Worker::Join(const WorkerOptions& options,
                                                     const OptimizerOptions& optimizer,
                                                     std::vector<Parameter> parameters,
                                                     std::vector<std::unique_ptr<Channel>> channels,
                                                     const ResumeFrom& resume_from) {
  if (absl::Status status = CheckOptions(optimizer); !status.ok()) return status;
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  if (absl::Status status = CheckShards(options, optimizer, parameters); !status.ok()) {
    return status;
  }
  if (channels.empty()) return absl::InvalidArgumentError("no aggregators to join");

  absl::StatusOr<WantedJob> wanted =
      DescribeJob(options, {optimizer.warm_up_codec, optimizer.codec, optimizer.variance_codec});
  if (!wanted.ok()) return wanted.status();
  JobOptions& job_options = wanted->options;
  job_options.set_optimizer(DescribeOptions(optimizer));
  job_options.set_state_numbers(StateNumbers(optimizer));
  if (options.shards > 1 && options.chunk_elements == 0) {
    job_options.set_chunk_elements(ChunkElementsOfShards(options, parameters));
  }
  if (absl::Status status = CheckParameters(parameters, options.gpu); !status.ok()) return status;
  if (!options.parameters_may_differ) {
    const absl::StatusOr<uint32_t> crc = Crc32cOf(parameters, options.gpu);
    if (!crc.ok()) return crc.status();
    job_options.set_parameters_crc32c(*crc);
  }
  std::optional<ResumeState> state;
  const std::vector<Tensor> tensors = TensorsOf(parameters);
  const DefaultFloatMode float_mode;
  if (resume_from.is_anything()) {
    absl::StatusOr<ResumeState> loaded = LoadResumeState(
        resume_from, {.tensors = tensors,
                      .options = job_options,
                      .rank = options.rank,
                      .world_size = options.world_size,
                      .allow_other_world_size = options.resume_with_other_world_size});
    if (!loaded.ok()) return loaded.status();
    state = *std::move(loaded);
    job_options.set_chunk_elements(state->chunk_elements);
    job_options.set_parameters_crc32c(state->parameters_crc32c);
    job_options.set_first_step(state->optimizer.schedule.begun_steps());
    job_options.set_local_steps(state->optimizer.schedule.local_steps());
  }
  const bool has_late_tensors = state && !state->optimizer.scales.empty();
  absl::Status has_room = CheckScales(options, optimizer, has_late_tensors, parameters.size());
  if (!has_room.ok()) return has_room;
  absl::StatusOr<Layout> layout = LayOut(tensors, *wanted);
  if (!layout.ok()) return layout.status();

  std::unique_ptr<Worker> worker(new Worker(options, &optimizer, /*reduction=*/nullptr,
                                            std::move(parameters), std::move(channels),
                                            *std::move(layout)));
  if (absl::Status status = worker->adam_->Check(); !status.ok()) return status;
  if (state) {
    if (absl::Status status = worker->CheckCanResume(*state); !status.ok()) return status;
  }
  if (absl::Status status = worker->JoinShards(job_options, std::move(state)); !status.ok()) {
    return status;
  }
  return worker;
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::JoinReduction(
    const WorkerOptions& options, const ReductionOptions& reduction, std::vector<Parameter> tensors,
    std::vector<std::unique_ptr<Channel>> channels) {
  if (absl::Status status = CheckOptions(reduction); !status.ok()) return status;
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  if (channels.empty()) return absl::InvalidArgumentError("no aggregators to join");

  const DefaultFloatMode float_mode;
  absl::StatusOr<WantedJob> wanted = DescribeJob(options, {reduction.codec});
  if (!wanted.ok()) return wanted.status();
  JobOptions& job_options = wanted->options;
  job_options.set_optimizer(DescribeOptions(reduction));
  job_options.set_sum(reduction.sum);
  absl::StatusOr<Layout> layout = LayOut(TensorsOf(tensors), *wanted);
  if (!layout.ok()) return layout.status();
  for (size_t i = 0; i < tensors.size(); ++i) {
    // Only their sizes are known before each Reduce.
    tensors[i].values = absl::Span<float>(nullptr, ElementCount(layout->tensors()[i]));
    tensors[i].group = 0;
  }
  std::unique_ptr<Worker> worker(new Worker(options, /*optimizer=*/nullptr, &reduction,
                                            std::move(tensors), std::move(channels),
                                            *std::move(layout)));
  if (absl::Status status = worker->reduction_->Check(); !status.ok()) return status;
  if (absl::Status status = worker->JoinShards(job_options, std::nullopt); !status.ok()) {
    return status;
  }
  return worker;
}

absl::Status Worker::JoinShards(const JobOptions& job_options, std::optional<ResumeState> state) {
  const trace::Span span(StepEvent(trace::Kind::kJoin));
  const absl::Time deadline = options_.clock->Now() + options_.join_timeout;
  uint32_t joined = 0;
  const auto check_may_wait = [this, &joined] {
    absl::Status status = options_.check_may_wait ? options_.check_may_wait() : absl::OkStatus();
    if (status.ok()) status = shards_.CheckEpochsStand(joined);
    return status;
  };
  absl::Status status;
  for (; joined < shards_.size(); ++joined) {
    status = JoinShard(joined, job_options, deadline, check_may_wait);
    if (!status.ok()) break;
  }
  // Before anything is written into parameters.
  if (status.ok() && (returned_ || state)) status = CheckMayWait();
  if (status.ok() && returned_) {
    status = ComeBack();
  } else if (status.ok() && state) {
    status = Resume(*std::move(state));
  }
  first_step_ = steps_;
  if (status.ok()) return status;
  // Otherwise the shards before would keep the job's name for a start that comes to nothing.
  SetDeadline(kGiveUpTimeout);
  for (uint32_t shard = 0; shard < joined; ++shard) {
    LeaveShard(shard, /*had_failed=*/true).IgnoreError();
  }
  return status;
}

absl::Status Worker::CheckCanResume(const ResumeState& state) const {
  const Schedule& schedule = state.optimizer.schedule;
  const uint64_t first = optimizer_.StepsBefore(schedule.begun_steps());
  const uint64_t end = optimizer_.StepsBefore(schedule.begun_steps() + 1);
  if (first + schedule.local_steps() != state.step || state.step >= end) {
    return absl::DataLossError(absl::StrFormat(
        "what was saved of step %d has the optimizer's schedule of another one", state.step));
  }
  if (schedule.local_steps() == 0) return absl::OkStatus();
  std::vector<uint32_t> groups;
  for (const Parameter& parameter : parameters_) groups.push_back(parameter.group);
  const bool has_sums = schedule.local_sums_size() == static_cast<int>(optimizer_.groups());
  if (has_sums && groups == state.groups) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "what was saved between two synchronisations has other parameter groups; those may change "
      "where one was saved after a synchronisation");
}

absl::Status Worker::Resume(ResumeState state) {
  const uint64_t first_step = state.optimizer.schedule.begun_steps();
  if (first_step > 0) {
    // The aggregators' errors go back in a round of its own: what holds for rounds, after a crash
    // too, holds for them.
    round_ = first_step - 1;
    rates_crc32c_ = 0;
    SetDeadline(options_.exchange_timeout);
    StepReport report;
    const ChunkErrors& errors = state.aggregator_errors;
    ChunkQueue queue(chunks_.size(), window_);
    for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) queue.SetReady(chunk);
    const absl::Status status = ExchangeChunks(
        queue, [&](uint32_t chunk) { SendRestore(chunk, errors); }, Until::kAllAreAnswered, report);
    if (!status.ok()) return status;
    round_ = first_step;
  }
  steps_ = optimizer_.StepsBefore(round_) + state.optimizer.schedule.local_steps();
  adam_->Restore(std::move(state.optimizer));
  adam_->SetValues(state.values);
  resumed_ = {std::move(state.checkpoint), std::move(state.warnings)};
  damaged_checkpoints_ = std::move(state.damaged);
  return adam_->Check();
}

absl::Status Worker::ComeBack() {
  ReplicaSource source = {.header_of = [this](uint32_t chunk) { return HeaderOf(chunk, FETCH); },
                          .clock = options_.clock,
                          .timeout = options_.exchange_timeout,
                          .window = 2,
                          .least_step = returned_->step};
  for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    source.channel_of_chunk.push_back(&shards_.ChannelOf(chunk));
  }
  absl::StatusOr<Replica> replica = FetchReplica(source, layout_, optimizer_);
  if (!replica.ok()) {
    return WithMessage(replica.status(),
                       absl::StrFormat("rank %d could not come back to job '%s': %s", options_.rank,
                                       options_.job, replica.status().message()));
  }
  const uint64_t step = replica->step;
  round_ = newest_step_ = step;
  steps_ = returned_->step = optimizer_.StepsBefore(step);
  exchanges_.SetFirstStep(step);
  for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    chunks_[chunk].next_step = step;
    for (SentFrame& listen : replica->followed[chunk]) exchanges_.Keep(chunk, std::move(listen));
  }
  return optimizer_.Check();
}

void Worker::SendRestore(uint32_t chunk, const ChunkErrors& errors) {
  const auto found = errors.find(chunk);
  const size_t elements = found == errors.end() ? 0 : found->second.size();
  auto payload = std::make_shared<Payload>(elements * sizeof(float));
  if (elements > 0) std::memcpy(payload->data(), found->second.data(), payload->size());
  SentFrame frame{HeaderOf(chunk, RESTORE), std::move(payload), RESTORE};
  frame.header.set_payload_crc32c(Crc32c(frame.payload->span()));
  exchanges_.Send(chunk, std::move(frame));
}

absl::Status Worker::JoinShard(uint32_t shard, const JobOptions& job_options, absl::Time deadline,
                               Channel::CheckMayWait check_may_wait) {
  const absl::StatusOr<JoinResponse> response =
      shards_.Join(shard, job_options, deadline, check_may_wait);
  if (!response.ok()) return response.status();
  exchanges_.SetGeneration(shard, response->generation());
  if (!response->returning()) return absl::OkStatus();
  if (!returned_) returned_.emplace().lost_error_norm = 0;
  returned_->step = std::max(returned_->step, response->first_step());
  if (response->has_lost_error_squared() && returned_->lost_error_norm) {
    returned_->lost_error_norm =
        std::hypot(*returned_->lost_error_norm, std::sqrt(response->lost_error_squared()));
  } else {
    returned_->lost_error_norm.reset();
  }
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Worker::Reduce(absl::Span<const absl::Span<float>> values) {
  const std::vector<Gradient> inputs(values.begin(), values.end());
  reduction_->SetResults(values);
  // Answers that come after a failure have nowhere to go.
  const absl::Cleanup forget_results = [this] { reduction_->SetResults({}); };
  return Step(inputs, {GroupRates()});
}

absl::StatusOr<StepReport> Worker::Step(absl::Span<const Gradient> gradients,
                                        absl::Span<const GroupRates> rates) {
  if (absl::Status status = CheckStepArguments(gradients, rates); !status.ok()) return status;
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  const trace::Span span(StepEvent(trace::Kind::kStep));
  StepReport report;
  const absl::Status status = TakePart([&] {
    if (absl::Status begun = BeginAt(rates); !begun.ok()) return begun;
    for (size_t tensor = 0; tensor < gradients.size(); ++tensor) {
      open_step_->AddGradient(tensor, gradients[tensor]);
    }
    return Finish(report);
  });
  if (!status.ok()) return status;
  return report;
}

absl::Status Worker::TakePart(absl::FunctionRef<absl::Status()> part) {
  const DefaultFloatMode float_mode;
  failure_ = absl::InternalError("an exception, which its caller has had");
  failure_ = part();
  return failure_;
}

absl::Status Worker::BeginStep(absl::Span<const GroupRates> rates) {
  if (absl::Status status = CheckRates(rates); !status.ok()) return status;
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  const int64_t begin = trace::IsOn() ? trace::Now() : 0;
  const trace::Span span(StepEvent(trace::Kind::kCall));
  return TakePart([&] {
    const absl::Status status = BeginAt(rates);
    open_step_->trace_begin = begin;
    return status;
  });
}

absl::Status Worker::GradientReady(size_t tensor, Gradient gradient) {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (open_step_ == nullptr) {
    return absl::FailedPreconditionError("a gradient came before its step has begun");
  }
  if (absl::Status status = CheckGradient(tensor, gradient); !status.ok()) return status;
  if (open_step_->has_gradient(tensor)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the gradient of tensor %s came twice in step %d",
                        DescribeTensor(layout_.tensors()[tensor]), steps_));
  }
  return TakePart([&] {
    open_step_->AddGradient(tensor, gradient);
    return Advance();
  });
}

absl::Status Worker::AdvanceStep() {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (open_step_ == nullptr) return absl::OkStatus();
  return TakePart([&] { return Advance(); });
}

absl::Status Worker::Advance() {
  const trace::Span span(StepEvent(trace::Kind::kCall));
  if (optimizer_.IsLocal()) return absl::OkStatus();
  SetDeadline(options_.exchange_timeout);
  return ExchangeChunks(
      open_step_->queue, [this](uint32_t chunk) { Pack(chunk); }, Until::kNothingIsThere,
      open_step_->report);
}

absl::StatusOr<StepReport> Worker::FinishStep() {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (open_step_ == nullptr) {
    return absl::FailedPreconditionError("there is no step to finish: none has begun");
  }
  if (open_step_->gradients_missing() > 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "step %d lacks the gradients of %d tensors, that of %s among them; one that is zero has to "
        "be given too",
        steps_, open_step_->gradients_missing(),
        DescribeTensor(layout_.tensors()[open_step_->first_missing()])));
  }
  const trace::Span step(StepEvent(trace::Kind::kStep), open_step_->trace_begin);
  const trace::Span call(StepEvent(trace::Kind::kCall));
  StepReport report = std::move(open_step_->report);
  const absl::Status status = TakePart([&] { return Finish(report); });
  if (!status.ok()) return status;
  return report;
}

absl::Status Worker::BeginAt(absl::Span<const GroupRates> rates) {
  optimizer_.BeginStep(round_, rates);
  OpenStepWith(rates);
  return optimizer_.CheckBegun();
}

void Worker::OpenStepWith(absl::Span<const GroupRates> rates) {
  was_interrupted_ = false;
  rates_crc32c_ = Crc32cOf(parameters_, rates, optimizer_.schedule());
  if (options_.min_workers > 0) rates_ = MessageOf(rates, optimizer_.schedule());
  open_step_ = std::make_unique<OpenStep>(layout_, window_);
}

absl::Status Worker::Finish(StepReport& report) {
  // Then its gradient counts in the round that ends the interval.
  const bool is_local = optimizer_.IsLocal();
  absl::Status status = is_local ? StepLocally(report) : ExchangeOpenStep(report);
  if (status.ok() && !is_local) status = CatchUp(report);
  if (!status.ok()) return status;
  report.step = steps_ - 1;
  for (const BlockLeftAlone& block : optimizer_.TakeBlocksLeftAlone()) {
    report.skipped.push_back({options_.rank, layout_.DescribeBlock(block.chunk, block.block)});
  }
  report.sent_bits = 8.0 * sent_bytes_ / layout_.elements() / (steps_ - first_step_);
  report.kept_bytes = exchanges_.kept_bytes();
  std::sort(report.late_ranks.begin(), report.late_ranks.end());
  steps_skipped_ = report.skipped.empty() ? 0 : steps_skipped_ + 1;
  if (steps_skipped_ < kMostStepsSkipped) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrFormat(
      "the training has diverged, or its loss scale is far too high: in each of the last %d steps "
      "up to step %d a gradient was not finite, this time on rank %d: %s. Go on from a checkpoint "
      "before, with a lower learning rate or loss scale",
      steps_skipped_, report.step, report.skipped[0].rank, report.skipped[0].block));
}

absl::Status Worker::StepLocally(StepReport& report) {
  const trace::Span span(StepEvent(trace::Kind::kLocalStep));
  const absl::Time start = options_.clock->Now();
  for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
    optimizer_.StepLocally(chunk, open_step_->gradients());
  }
  report.kernels += options_.clock->Now() - start;
  if (absl::Status status = optimizer_.Check(); !status.ok()) return status;
  open_step_.reset();
  ++steps_;
  return absl::OkStatus();
}

absl::Status Worker::ExchangeOpenStep(StepReport& report) {
  report.codec = optimizer_.codec();
  SetDeadline(options_.exchange_timeout);
  open_step_->may_apply = true;
  absl::Status status = ExchangeChunks(
      open_step_->queue, [this](uint32_t chunk) { Pack(chunk); }, Until::kAllAreAnswered, report);
  if (status.ok()) status = EndOpenStep(report);
  return status;
}

absl::Status Worker::EndOpenStep(StepReport& report) {
  const trace::Span span(StepEvent(trace::Kind::kEndStep));
  const absl::Time start = options_.clock->Now();
  optimizer_.EndStep();
  report.kernels += options_.clock->Now() - start;
  if (absl::Status status = optimizer_.Check(); !status.ok()) return status;
  open_step_.reset();
  steps_ = optimizer_.StepsBefore(++round_);
  for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (chunks_[chunk].owes_state) GiveState(chunk);
  }
  return absl::OkStatus();
}

absl::Status Worker::CatchUp(StepReport& report) {
  // Those that are taken while it catches up are for the next call, which has a gradient.
  const uint64_t newest_step = newest_step_;
  if (round_ >= newest_step) return absl::OkStatus();
  const trace::Span span(StepEvent(trace::Kind::kCatchUp));
  size_t largest = 0;
  for (const Parameter& parameter : parameters_) {
    largest = std::max(largest, parameter.values.size());
  }
  // A GPU needs no memory for them.
  const bool is_on_gpu = options_.gpu != nullptr;
  const PageVector<float> zeros(is_on_gpu ? 0 : largest);
  while (round_ < newest_step) {
    const StepRates message = std::move(later_rates_[round_]);
    const std::vector<GroupRates> rates = RatesOf(message);
    if (absl::Status status = CheckRates(rates); !status.ok()) {
      return absl::InternalError(
          absl::StrFormat("the others took step %d, but at which rates did not arrive: %s", steps_,
                          status.message()));
    }
    optimizer_.BeginMissedStep(round_, message);
    OpenStepWith(rates);
    for (size_t tensor = 0; tensor < parameters_.size(); ++tensor) {
      open_step_->AddGradient(
          tensor, Gradient(is_on_gpu ? nullptr : zeros.data(), parameters_[tensor].values.size(),
                           GradientType::kFloat32));
    }
    const uint64_t steps_before = steps_;
    if (absl::Status status = ExchangeOpenStep(report); !status.ok()) return status;
    report.steps_caught_up += steps_ - steps_before;
  }
  later_rates_.erase(later_rates_.begin(), later_rates_.lower_bound(round_));
  return absl::OkStatus();
}

absl::Status Worker::ExchangeChunks(ChunkQueue& queue, absl::FunctionRef<void(uint32_t chunk)> send,
                                    Until until, StepReport& report) {
  const bool all = until == Until::kAllAreAnswered;
  const auto event_of = [this](trace::Kind kind, uint32_t chunk) { return EventOf(kind, chunk); };
  StepTimes times(*options_.clock, report, event_of);
  absl::Time next_question = times.last() + kOfferInterval;
  while (!queue.all_answered() || HoldsAnswers()) {
    if (all && times.last() >= next_question) {
      if (absl::Status status = CheckMayWait(); !status.ok()) return times.GiveUp(status);
      next_question = options_.clock->Now() + kOfferInterval;
    }
    const std::optional<uint32_t> next = optimizer_.CanCompress() ? queue.TakeNext() : std::nullopt;
    if (next) {
      send(*next);
      times.AddWork(trace::Kind::kCompress, *next);
      continue;
    }
    const bool waits = all && !HoldsAnswers();
    std::optional<WorkerInbox::Item> item =
        waits ? inbox_->Take(*options_.clock, kOfferInterval) : inbox_->TakeIfAny();
    times.AddBlocked();
    if (item) {
      const uint32_t chunk = item->chunk;
      if (const auto* answer = std::get_if<absl::StatusOr<Answer>>(&item->what)) {
        times.EndBlockedByWire(chunk, waits, WaitedFor(*answer));
      } else {
        times.EndBlockedByGpu(chunk, waits);
      }
      const absl::StatusOr<bool> is_answered = Receive(*std::move(item), report);
      if (!is_answered.ok()) return is_answered.status();
      if (*is_answered) {
        queue.SetAnswered(chunk);
        SetDeadline(options_.exchange_timeout);  // a slow network is nobody who is missing
      }
      times.AddWork(trace::Kind::kApply, chunk);
    } else if (!all) {
      return absl::OkStatus();
    } else if (waits) {
      if (absl::Status status = CheckGpuIsInTime(); !status.ok()) return times.GiveUp(status);
      exchanges_.OfferToIdleShards();
    } else {
      OpenStep::HeldAnswer held = open_step_->TakeHeldAnswer();
      ApplyAnswer(held.chunk, std::move(held.answer), report);
      times.AddWork(trace::Kind::kApply, held.chunk);
    }
  }
  return absl::OkStatus();
}

bool Worker::HoldsAnswers() const {
  return open_step_ != nullptr && !open_step_->held_answers.empty();
}

absl::Status Worker::CheckStepArguments(absl::Span<const Gradient> gradients,
                                        absl::Span<const GroupRates> rates) const {
  if (gradients.size() != parameters_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("got gradients of %d tensors, the job has %d",
                                                      gradients.size(), parameters_.size()));
  }
  for (size_t tensor = 0; tensor < gradients.size(); ++tensor) {
    absl::Status status = CheckGradient(tensor, gradients[tensor]);
    if (!status.ok()) return status;
  }
  return CheckRates(rates);
}

absl::Status Worker::CheckGradient(size_t tensor, const Gradient& gradient) const {
  if (tensor >= parameters_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "got the gradient of tensor %d, the job has %d", tensor, parameters_.size()));
  }
  const size_t wanted = parameters_[tensor].values.size();
  if (gradient.size != wanted) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the gradient of tensor %s has %d values, wanted %d",
                        DescribeTensor(layout_.tensors()[tensor]), gradient.size, wanted));
  }
  const absl::Status status = optimizer_.CheckGradient(gradient);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrFormat("the gradient of tensor %s: %s",
                                      DescribeTensor(layout_.tensors()[tensor]), status.message()));
}

absl::Status Worker::CheckRates(absl::Span<const GroupRates> rates) const {
  if (options_.min_workers > 0 && rates.size() > size_t{kMaxGroups}) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rates came for %d groups; a job with a round deadline may have %d",
                        rates.size(), kMaxGroups));
  }
  if (absl::Status status = optimizer_.CheckRates(rates); !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].group < rates.size()) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("tensor %s is in parameter group %d, but rates came for %d groups",
                        DescribeTensor(layout_.tensors()[i]), parameters_[i].group, rates.size()));
  }
  return absl::OkStatus();
}

absl::Status Worker::CheckHasNotLeft() const {
  if (!has_left_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("this rank, %d, has left job '%s', and has no more part in it: join again",
                      options_.rank, options_.job));
}

absl::Status Worker::CheckNoStepFailed() const {
  if (absl::Status status = CheckHasNotLeft(); !status.ok()) return status;
  if (failure_.ok()) return absl::OkStatus();
  return AfterFailure(
      absl::StrCat("an earlier step failed, and parts of it may have been taken; leave, and start "
                   "the job again. It failed with: ",
                   failure_.message()));
}

absl::Status Worker::AfterFailure(const std::string& message) const {
  const absl::Status status = absl::FailedPreconditionError(message);
  return ExitCodeOf(failure_) == kExitTryAgain ? TryAgain(status) : status;
}

absl::Status Worker::CheckNoStepIsOpen() const {
  if (open_step_ == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "step %d has begun and is not finished: gradients of %d tensors have come, of %d", steps_,
      parameters_.size() - open_step_->gradients_missing(), parameters_.size()));
}

absl::Status Worker::CheckMayWait() {
  if (options_.is_interrupted && options_.is_interrupted()) {
    was_interrupted_ = true;
    return absl::CancelledError(
        absl::StrFormat("interrupted in step %d of job '%s'", steps_, options_.job));
  }
  if (options_.check_may_wait) return options_.check_may_wait();
  const bool still_joins = round_ < layout_.options().first_step();  // and gives errors back
  return still_joins ? CheckEpochStands() : absl::OkStatus();
}

absl::Status Worker::CheckGpuIsInTime() const {
  if (options_.clock->Now() < exchanges_.deadline()) return absl::OkStatus();
  for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (!chunks_[chunk].is_packing) continue;
    return absl::DeadlineExceededError(absl::StrFormat(
        "%s has not compressed chunk %d of step %d in %s: what was put on the stream before it is "
        "not done",
        options_.gpu->name(), chunk, steps_, absl::FormatDuration(options_.exchange_timeout)));
  }
  return absl::OkStatus();
}

FrameHeader Worker::HeaderOf(uint32_t chunk, Codec codec) const {
  FrameHeader header = shards_.HeaderOf(chunk, round_, codec);
  header.set_rates_crc32c(rates_crc32c_);
  return header;
}

void Worker::Pack(uint32_t chunk) {
  auto packed = std::make_shared<Payload>(layout_.PayloadBytes(optimizer_.codec(), chunk));
  chunks_[chunk].packed = packed;
  const std::optional<uint32_t> bad_block =
      optimizer_.Compress(chunk, open_step_->gradients(), packed->data(),
                          [inbox = inbox_, packed, chunk](absl::StatusOr<uint32_t> bad_block) {
                            inbox->Put(chunk, Packed{std::move(bad_block)});
                          });
  chunks_[chunk].is_packing = !bad_block;
  if (!bad_block) return;
  if (*bad_block < layout_.chunks()[chunk].blocks) {
    absl::Status status = NumberCodecOf(optimizer_.codec(), layout_)
                              .CheckCodecItself(layout_, chunk, *bad_block, packed->data());
    if (!status.ok()) return inbox_->Put(chunk, Packed{std::move(status)});
  }
  Send(chunk, *bad_block);
}

void Worker::Send(uint32_t chunk, uint32_t bad_block) {
  SentFrame frame;
  frame.payload = chunks_[chunk].packed;
  frame.round_codec = optimizer_.codec();
  frame.header = HeaderOf(chunk, optimizer_.codec());
  FrameHeader& header = frame.header;
  header.set_error_scale(optimizer_.error_scale());
  header.set_loss_unit(optimizer_.loss_unit());
  if (options_.min_workers > 0) {
    *header.mutable_rates() = rates_;
    *header.mutable_rates()->mutable_scales() = optimizer_.ScalesOf(chunk);
    header.set_next_fetch(1);
  }
  if (bad_block < layout_.chunks()[chunk].blocks) {
    frame.payload = std::make_shared<Payload>(SkipPayload(bad_block));
    header.set_codec(SKIP);
  }
  header.set_payload_crc32c(Crc32c(frame.payload->span()));
  sent_bytes_ += frame.payload->size();
  exchanges_.Send(chunk, std::move(frame));
}

absl::StatusOr<bool> Worker::Receive(WorkerInbox::Item item, StepReport& report) {
  const uint32_t chunk = item.chunk;
  if (const auto* packed = std::get_if<Packed>(&item.what)) {
    chunks_[chunk].is_packing = false;
    if (!packed->bad_block.ok()) return packed->bad_block.status();
    Send(chunk, *packed->bad_block);
    return false;
  }
  absl::StatusOr<std::optional<Answer>> answer =
      exchanges_.Receive(chunk, std::get<absl::StatusOr<Answer>>(std::move(item.what)), report);
  if (!answer.ok()) {
    // Whatever was called, no step may follow what an aggregator has lost.
    if (absl::IsDataLoss(answer.status())) failure_.Update(answer.status());
    return answer.status();
  }
  if (!*answer) return false;
  if ((*answer)->header.codec() == FETCH) {
    for (const uint32_t wanted : (*answer)->header.wanted_chunks()) GiveState(wanted);
    exchanges_.Exchange(chunk, (*answer)->header.step());
    return false;
  }
  if (open_step_ != nullptr && !open_step_->may_apply) {
    open_step_->held_answers.push_back({chunk, **std::move(answer)});
  } else {
    ApplyAnswer(chunk, **std::move(answer), report);
  }
  return true;
}

void Worker::ApplyAnswer(uint32_t chunk, Answer answer, StepReport& report) {
  ChunkState& state = chunks_[chunk];
  state.next_step = answer.header.step() + 1;
  if (answer.header.codec() == RESTORE) return;  // it says only that the round is closed
  const AnswerHeader& header = answer.header;
  bool is_late = false;
  for (const uint32_t rank : header.late_ranks()) {
    if (rank == options_.rank) is_late = true;
    if (!absl::c_linear_search(report.late_ranks, rank)) report.late_ranks.push_back(rank);
  }
  if (is_late && report.late_rounds++ == 0) {
    log::WriteEvent(log::Level::kWarning, "a round has closed without this rank, which was late",
                    shards_.AboutOf(chunk, header.step()));
  }
  newest_step_ = std::max(newest_step_, header.open_step());
  for (int i = 0; i < header.later_rates_size(); ++i) {
    later_rates_[header.step() + 1 + i] = header.later_rates(i);
  }
  if (header.codec() == SKIP) {
    optimizer_.TakeBack(chunk, state.packed->data());
    report.skipped.push_back({header.skipped_by_rank(),
                              layout_.DescribeBlock(chunk, SkippedBlock(answer.payload.span()))});
    if (report.skipped.size() == 1) {
      log::WriteEvent(log::Level::kWarning,
                      absl::StrFormat("a round is skipped: not finite on rank %d: %s",
                                      header.skipped_by_rank(), report.skipped.back().block),
                      shards_.AboutOf(chunk, header.step()));
    }
  } else {
    if (is_late) optimizer_.KeepInput(chunk, state.packed->data());
    optimizer_.Apply(chunk, std::move(answer));
  }
  state.packed.reset();
  if (state.owes_state) GiveState(chunk);
}

void Worker::GiveState(uint32_t chunk) {
  const uint64_t step = chunks_[chunk].next_step;
  if (round_ < layout_.options().first_step()) return;  // it has no state yet
  // Between a freeze of the variance and the first answer after it a state fits no step, nor does
  // it between an answer and the end of its step, where there is something left to do, or after a
  // local step.
  const bool has_still_to_end = optimizer_.EndsSteps() && open_step_ != nullptr && step > round_;
  chunks_[chunk].owes_state =
      optimizer_.HasFrozenFor(step) || has_still_to_end || optimizer_.HasLocalSteps(chunk);
  if (chunks_[chunk].owes_state) return;
  auto state = std::make_shared<const Payload>(optimizer_.State(chunk));
  if (!optimizer_.Check().ok()) return;  // it is worth nothing
  FrameHeader header = HeaderOf(chunk, STATE);
  header.set_step(step);
  header.set_payload_crc32c(Crc32c(state->span()));
  *header.mutable_rates()->mutable_schedule() = optimizer_.schedule();
  *header.mutable_rates()->mutable_scales() = optimizer_.Scales();
  // If it is lost, another worker is asked.
  shards_.ChannelOf(chunk).Exchange(header, std::move(state), exchanges_.deadline(),
                                    [](const absl::StatusOr<Answer>&) {});
}

trace::Event Worker::EventOf(trace::Kind kind, uint32_t chunk) const {
  return shards_.EventOf(kind, round_, chunk);
}

trace::Event Worker::StepEvent(trace::Kind kind) const {
  return shards_.EventOf(kind, steps_, trace::kNone);
}

void Worker::SetDeadline(absl::Duration timeout) {
  exchanges_.SetDeadline(options_.clock->Now() + timeout);
}

absl::Status Worker::Leave() {
  has_left_ = true;
  // Who was interrupted does not want to wait for long.
  SetDeadline(was_interrupted_ ? kGiveUpTimeout : options_.exchange_timeout);
  const bool had_failed = !failure_.ok();
  absl::Status first_error;
  for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
    first_error.Update(LeaveShard(shard, had_failed));
  }
  return first_error;
}

// In a job that goes on without this worker, its part of a step that failed counts where it was
// answered.
uint64_t Worker::StepsAt(uint32_t shard) const {
  uint64_t steps = round_;
  for (uint32_t chunk = 0; chunk < chunks_.size() && options_.min_workers > 0; ++chunk) {
    if (shards_.ShardOf(chunk) == shard) steps = std::max(steps, chunks_[chunk].next_step);
  }
  if (open_step_ == nullptr || options_.min_workers == 0) return steps;
  for (const OpenStep::HeldAnswer& held : open_step_->held_answers) {
    if (shards_.ShardOf(held.chunk) == shard) steps = std::max(steps, round_ + 1);
  }
  return steps;
}

absl::Status Worker::LeaveShard(uint32_t shard, bool had_failed) {
  while (true) {
    const absl::Status status = shards_.Leave(shard, StepsAt(shard), exchanges_.deadline());
    if (absl::IsAborted(status) && options_.clock->Now() < exchanges_.deadline()) {
      if (absl::Status offered = OfferAll(shard, had_failed); !offered.ok()) return offered;
      continue;
    }
    if (status.ok() || had_failed) return status;
    return shards_.Explain(
        status, shard,
        absl::StrFormat("rank %d could not leave job '%s'", options_.rank, options_.job));
  }
}

absl::Status Worker::OfferAll(uint32_t shard, bool had_failed) {
  exchanges_.OfferAll(shard);
  StepReport report;
  absl::Time now = options_.clock->Now();
  absl::Time next_question = now + kOfferInterval;
  for (; now < exchanges_.deadline() && exchanges_.is_any_under_way();
       now = options_.clock->Now()) {
    if (now >= next_question) {
      if (absl::Status status = CheckMayWait(); !status.ok()) return status;
      next_question = now + kOfferInterval;
    }
    std::optional<WorkerInbox::Item> item = inbox_->Take(*options_.clock, kOfferInterval);
    if (!item) {
      exchanges_.OfferToIdleShards();
      continue;
    }
    // A step that is left open sends nothing more.
    if (std::holds_alternative<Packed>(item->what)) continue;
    const bool is_this_shards = shards_.ShardOf(item->chunk) == shard;
    const absl::Status status = Receive(*std::move(item), report).status();
    // What failed before may fail again, and does not keep the worker from leaving; unless what
    // this shard answers is no good, so that asking again is no use.
    const bool is_no_good = absl::IsDataLoss(status) || absl::IsInvalidArgument(status);
    if (!status.ok() && (!had_failed || (is_this_shards && is_no_good))) return status;
  }
  return absl::OkStatus();
}

uint32_t Worker::ParametersCrc32c() const {
  uint32_t crc = 0;
  for (uint32_t tensor = 0; tensor < parameters_.size(); ++tensor) {
    crc = ValuesCrc32c(adam_->values(tensor), crc);
  }
  return crc;
}

}  // namespace signpost
