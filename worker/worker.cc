#include "worker/worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>
#include <random>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "failpoint/failpoint.h"
#include "kernels/dense.h"
#include "log/log.h"
#include "proto/codec.h"
#include "proto/custom_codec.h"
#include "proto/try_again.h"
#include "proto/window.h"
#include "trace/recorder.h"
#include "trace/span.h"
#include "worker/kept_frames.h"
#include "worker/onebit_lamb.h"
#include "worker/page_vector.h"
#include "worker/parameter.h"
#include "worker/replica_fetch.h"
#include "worker/zero_one_adam.h"

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

absl::Status CheckLateness(const WorkerOptions& options) {
  if ((options.round_deadline == absl::ZeroDuration()) != (options.min_workers == 0)) {
    return absl::InvalidArgumentError(
        "a round deadline and the least number of workers go together: set both, or neither");
  }
  if (options.round_deadline < absl::ZeroDuration() ||
      options.round_deadline >= options.exchange_timeout) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the round deadline is %s; it must be less than the exchange timeout, %s",
                        absl::FormatDuration(options.round_deadline),
                        absl::FormatDuration(options.exchange_timeout)));
  }
  if (options.min_workers <= options.world_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("the least number of workers is %d, of %d",
                                                    options.min_workers, options.world_size));
}

// What travels in headers to ranks that come back.
absl::Status CheckScales(const WorkerOptions& options, const OptimizerOptions& optimizer,
                         size_t tensors) {
  const bool has_scales = optimizer.lamb || optimizer.zero_one;
  if (!has_scales || options.min_workers == 0 || tensors <= size_t{kMaxTensorScales}) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s in a job with a round deadline may have %d tensors; got %d",
                      optimizer.lamb ? "1-bit LAMB" : "0/1 Adam", kMaxTensorScales, tensors));
}

absl::Status CheckThreads(const WorkerOptions& options) {
  if (options.threads >= 1 && options.threads <= ChunkCrew::kMostThreads) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("a worker of %d threads; wanted 1 to %d",
                                                    options.threads, ChunkCrew::kMostThreads));
}

// What does not depend on what the job does.
JobOptions JobOptionsOf(const WorkerOptions& options) {
  JobOptions job_options;
  job_options.set_block_elements(options.block_elements);
  job_options.set_chunk_elements(options.chunk_elements);
  job_options.set_gamma(options.gamma);
  job_options.set_round_deadline_us(absl::ToInt64Microseconds(options.round_deadline));
  job_options.set_min_workers(options.min_workers);
  return job_options;
}

std::unique_ptr<OneBitAdam> NewOptimizer(const Layout& layout, const OptimizerOptions& optimizer,
                                         const std::vector<Parameter>& parameters,
                                         const WorkerOptions& options) {
  if (optimizer.lamb) {
    return std::make_unique<OneBitLamb>(layout, optimizer, parameters, options.threads,
                                        options.gpu);
  }
  if (optimizer.zero_one) {
    return std::make_unique<ZeroOneAdam>(layout, optimizer, parameters, options.threads,
                                         options.gpu);
  }
  return std::make_unique<OneBitAdam>(layout, optimizer, parameters, options.threads, options.gpu);
}

// Has it in the job's options, if one of the codecs is CUSTOM.
absl::Status UseCustomCodec(const WorkerOptions& options, std::initializer_list<Codec> codecs,
                            JobOptions& job_options) {
  if (!absl::c_linear_search(codecs, CUSTOM)) return absl::OkStatus();
  if (options.codec_library.empty()) {
    return absl::InvalidArgumentError("a codec is custom, and there is no codec_library");
  }
  const absl::StatusOr<std::string> name = LoadCodecLibrary(options.codec_library);
  if (!name.ok()) return name.status();
  absl::StatusOr<CustomCodec> codec =
      DescribeCustomCodec(*name, options.codec_options, options.block_elements);
  if (!codec.ok()) return codec.status();
  *job_options.mutable_custom_codec() = *std::move(codec);
  return absl::OkStatus();
}

// Chunks of the size that was asked for, or of one that suits the tensors.
absl::StatusOr<Layout> LayOut(absl::Span<const Tensor> tensors, JobOptions& options) {
  if (options.chunk_elements() == 0) {
    uint64_t elements = 0;
    for (const Tensor& tensor : tensors) elements += ElementCount(tensor);
    options.set_chunk_elements(SuitableChunkElements(elements, options.block_elements()));
  }
  return Layout::Create(tensors, options);
}

uint64_t NewIncarnation() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

std::vector<uint32_t> FirstChunkOfTensor(const Layout& layout) {
  std::vector<uint32_t> first(layout.tensors().size());
  for (uint32_t chunk = layout.chunks().size(); chunk-- > 0;) {
    for (const Segment& segment : layout.chunks()[chunk].segments) first[segment.tensor] = chunk;
  }
  return first;
}

// How long the aggregator has waited for others before it answered.
absl::Duration WaitedFor(const absl::StatusOr<Answer>& answer) {
  return answer.ok() ? absl::Microseconds(answer->header.waited_us()) : absl::ZeroDuration();
}

// "waiting for rank 3", or the empty string when the aggregator waits for nobody.
std::string WhoIsWaitedFor(const StatusResponse& response) {
  std::vector<std::string> parts;
  for (const JobStatus& job : response.jobs()) {
    for (uint32_t rank : job.waiting_for_ranks()) {
      std::string part = absl::StrCat("rank ", rank);
      for (const RefusedJoin& refused : job.refused_joins()) {
        if (refused.rank() == rank) absl::StrAppend(&part, " (refused: ", refused.reason(), ")");
      }
      parts.push_back(std::move(part));
    }
  }
  return parts.empty() ? "" : absl::StrCat("waiting for ", absl::StrJoin(parts, ", "));
}

}  // namespace

// A chunk's exchanges: one at a time, of consecutive steps.
struct Worker::ChunkExchange {
  KeptFrames kept;
  std::optional<uint64_t> step_under_way;
  uint64_t next_step = 0;   // of which the answer has not been applied
  bool owes_state = false;  // to a rank that comes back, once there is one that fits a step
  // The aggregator was started again, and is to find its way to the step at which this worker came
  // back without it.
  bool offers_again = false;
  bool is_packing = false;  // on a GPU, until the inbox has it
  // Of the frame that is not answered yet, to take it back.
  std::shared_ptr<const Payload> packed;
};

// A step that has begun.
struct Worker::OpenStep {
  struct HeldAnswer {
    uint32_t chunk;
    Answer answer;
  };

  std::vector<Gradient> gradients;  // by tensor
  std::vector<bool> has_gradient;   // likewise
  size_t gradients_missing = 0;
  std::vector<uint32_t> segments_missing;  // by chunk: without a gradient
  ChunkQueue queue;
  bool may_apply = false;
  std::deque<HeldAnswer> held_answers;  // until it may
  StepReport report;
  int64_t trace_begin = 0;
};

Worker::Worker(const WorkerOptions& options, const OptimizerOptions* optimizer,
               const ReductionOptions* reduction, std::vector<Parameter> parameters,
               std::vector<std::unique_ptr<Channel>> channels, Layout layout)
    : options_(options),
      parameters_(std::move(parameters)),
      layout_(std::move(layout)),
      shard_of_chunk_(layout_.ShardOfChunk(channels.size())),
      first_chunk_of_tensor_(FirstChunkOfTensor(layout_)),
      window_(WindowOf(channels.size())),
      incarnation_(NewIncarnation()),
      trace_job_(trace::LabelOf(options.job)),
      adam_(optimizer ? NewOptimizer(layout_, *optimizer, parameters_, options) : nullptr),
      reduction_(reduction ? std::make_unique<Reduction>(layout_, *reduction, options.threads)
                           : nullptr),
      optimizer_(adam_ ? static_cast<Optimizer&>(*adam_) : *reduction_),
      epochs_(channels.size()),
      generations_(channels.size()),
      exchanges_(layout_.chunks().size()),
      inbox_(std::make_shared<WorkerInbox>()),
      channels_(std::move(channels)) {}

Worker::~Worker() = default;

absl::StatusOr<std::unique_ptr<Worker>> Worker::Join(const WorkerOptions& options,
                                                     const OptimizerOptions& optimizer,
                                                     std::vector<Parameter> parameters,
                                                     std::vector<std::unique_ptr<Channel>> channels,
                                                     const ResumeFrom& resume_from) {
  if (absl::Status status = CheckOptions(optimizer); !status.ok()) return status;
  if (absl::Status status = CheckLateness(options); !status.ok()) return status;
  if (absl::Status status = CheckThreads(options); !status.ok()) return status;
  if (absl::Status status = CheckScales(options, optimizer, parameters.size()); !status.ok()) {
    return status;
  }
  if (channels.empty()) return absl::InvalidArgumentError("no aggregators to join");

  JobOptions job_options = JobOptionsOf(options);
  job_options.set_optimizer(DescribeOptions(optimizer));
  if (absl::Status status = UseCustomCodec(
          options, {optimizer.warm_up_codec, optimizer.codec, optimizer.variance_codec},
          job_options);
      !status.ok()) {
    return status;
  }
  job_options.set_state_numbers(StateNumbers(optimizer));
  if (absl::Status status = CheckParameters(parameters, options.gpu); !status.ok()) return status;
  if (!options.parameters_may_differ) {
    const absl::StatusOr<uint32_t> crc = Crc32cOf(parameters, options.gpu);
    if (!crc.ok()) return crc.status();
    job_options.set_parameters_crc32c(*crc);
  }
  std::optional<ResumeState> state;
  const std::vector<Tensor> tensors = TensorsOf(parameters);
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
  }
  absl::StatusOr<Layout> layout = LayOut(tensors, job_options);
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
  if (absl::Status status = CheckLateness(options); !status.ok()) return status;
  if (absl::Status status = CheckThreads(options); !status.ok()) return status;
  if (channels.empty()) return absl::InvalidArgumentError("no aggregators to join");

  JobOptions job_options = JobOptionsOf(options);
  job_options.set_optimizer(DescribeOptions(reduction));
  if (absl::Status status = UseCustomCodec(options, {reduction.codec}, job_options); !status.ok()) {
    return status;
  }
  job_options.set_sum(reduction.sum);
  absl::StatusOr<Layout> layout = LayOut(TensorsOf(tensors), job_options);
  if (!layout.ok()) return layout.status();
  for (size_t i = 0; i < tensors.size(); ++i) {
    // Only their sizes are known before each Reduce.
    tensors[i].values = absl::Span<float>(nullptr, ElementCount(layout->tensors()[i]));
    tensors[i].group = 0;
  }
  std::unique_ptr<Worker> worker(new Worker(options, /*optimizer=*/nullptr, &reduction,
                                            std::move(tensors), std::move(channels),
                                            *std::move(layout)));
  if (absl::Status status = worker->JoinShards(job_options, std::nullopt); !status.ok()) {
    return status;
  }
  return worker;
}

absl::Status Worker::JoinShards(const JobOptions& job_options, std::optional<ResumeState> state) {
  const trace::Span span(StepEvent(trace::Kind::kJoin));
  const absl::Time deadline = options_.clock->Now() + options_.join_timeout;
  uint32_t joined = 0;
  absl::Status status;
  for (; joined < channels_.size(); ++joined) {
    status = JoinShard(joined, job_options, deadline);
    if (!status.ok()) break;
  }
  if (status.ok() && returned_) {
    status = ComeBack();
  } else if (status.ok() && state) {
    status = Resume(*std::move(state));
  }
  first_step_ = steps_;
  if (status.ok()) return status;
  // Otherwise the shards before would keep the job's name for a start that comes to nothing.
  deadline_ = options_.clock->Now() + kGiveUpTimeout;
  for (uint32_t shard = 0; shard < joined; ++shard) LeaveShard(shard).IgnoreError();
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
    deadline_ = options_.clock->Now() + options_.exchange_timeout;
    StepReport report;
    const ChunkErrors& errors = state.aggregator_errors;
    ChunkQueue queue(exchanges_.size(), window_);
    for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) queue.SetReady(chunk);
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
                          .window = static_cast<uint32_t>(2 * channels_.size()),
                          .least_step = returned_->step};
  for (const uint32_t shard : shard_of_chunk_) {
    source.channel_of_chunk.push_back(channels_[shard].get());
  }
  const absl::StatusOr<uint64_t> step = FetchReplica(source, layout_, optimizer_);
  if (!step.ok()) {
    return absl::Status(step.status().code(),
                        absl::StrFormat("rank %d could not come back to job '%s': %s",
                                        options_.rank, options_.job, step.status().message()));
  }
  round_ = newest_step_ = *step;
  steps_ = returned_->step = optimizer_.StepsBefore(*step);
  for (ChunkExchange& exchange : exchanges_) exchange.next_step = *step;
  return optimizer_.Check();
}

void Worker::SendRestore(uint32_t chunk, const ChunkErrors& errors) {
  const auto found = errors.find(chunk);
  const size_t elements = found == errors.end() ? 0 : found->second.size();
  auto payload = std::make_shared<Payload>(elements * sizeof(float));
  if (elements > 0) std::memcpy(payload->data(), found->second.data(), payload->size());
  SentFrame frame{HeaderOf(chunk, RESTORE), std::move(payload)};
  frame.header.set_payload_crc32c(Crc32c(frame.payload->span()));
  exchanges_[chunk].kept.Add(std::move(frame));
  Exchange(chunk, round_);
}

absl::Status Worker::JoinShard(uint32_t shard, const JobOptions& job_options, absl::Time deadline) {
  JoinRequest request;
  request.set_job(options_.job);
  request.set_rank(options_.rank);
  request.set_world_size(options_.world_size);
  request.set_incarnation(incarnation_);
  request.set_shard(shard);
  request.set_shard_count(channels_.size());
  *request.mutable_options() = job_options;
  request.mutable_tensors()->Add(layout_.tensors().begin(), layout_.tensors().end());

  absl::StatusOr<JoinResponse> response = channels_[shard]->Join(request, deadline);
  if (!response.ok()) {
    return Explain(response.status(), shard,
                   absl::StrFormat("rank %d could not join job '%s'", options_.rank, options_.job));
  }
  if (response->layout_fingerprint() != layout_.Fingerprint()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "aggregator %s lays job '%s' out differently (fingerprint %016x, here %016x): "
        "it runs another version of signpost",
        channels_[shard]->target(), options_.job, response->layout_fingerprint(),
        layout_.Fingerprint()));
  }
  epochs_[shard] = response->epoch();
  generations_[shard] = response->generation();
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
  absl::StatusOr<StepReport> report = Step(inputs, {GroupRates()});
  // Answers that come after a failure have nowhere to go.
  reduction_->SetResults({});
  return report;
}

absl::StatusOr<StepReport> Worker::Step(absl::Span<const Gradient> gradients,
                                        absl::Span<const GroupRates> rates) {
  if (absl::Status status = CheckStepArguments(gradients, rates); !status.ok()) return status;
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  const trace::Span span(StepEvent(trace::Kind::kStep));
  optimizer_.BeginStep(round_, rates);
  OpenStepWith(rates);
  for (size_t tensor = 0; tensor < gradients.size(); ++tensor) {
    AddGradient(tensor, gradients[tensor]);
  }
  return Finish();
}

absl::Status Worker::BeginStep(absl::Span<const GroupRates> rates) {
  if (absl::Status status = CheckRates(rates); !status.ok()) return status;
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  const int64_t begin = trace::IsOn() ? trace::Now() : 0;
  const trace::Span span(StepEvent(trace::Kind::kCall));
  optimizer_.BeginStep(round_, rates);
  OpenStepWith(rates);
  open_step_->trace_begin = begin;
  return absl::OkStatus();
}

absl::Status Worker::GradientReady(size_t tensor, Gradient gradient) {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (open_step_ == nullptr) {
    return absl::FailedPreconditionError("a gradient came before its step has begun");
  }
  if (absl::Status status = CheckGradient(tensor, gradient); !status.ok()) return status;
  if (open_step_->has_gradient[tensor]) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the gradient of tensor %s came twice in step %d",
                        DescribeTensor(layout_.tensors()[tensor]), steps_));
  }
  const trace::Span span(StepEvent(trace::Kind::kCall));
  AddGradient(tensor, gradient);
  if (optimizer_.IsLocal()) return absl::OkStatus();
  deadline_ = options_.clock->Now() + options_.exchange_timeout;
  failure_ = ExchangeChunks(
      open_step_->queue, [this](uint32_t chunk) { Pack(chunk); }, Until::kNothingIsThere,
      open_step_->report);
  return failure_;
}

absl::StatusOr<StepReport> Worker::FinishStep() {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (open_step_ == nullptr) {
    return absl::FailedPreconditionError("there is no step to finish: none has begun");
  }
  if (open_step_->gradients_missing > 0) {
    const auto missing = absl::c_find(open_step_->has_gradient, false);
    const size_t tensor = missing - open_step_->has_gradient.begin();
    return absl::FailedPreconditionError(absl::StrFormat(
        "step %d lacks the gradients of %d tensors, that of %s among them; one that is zero has to "
        "be given too",
        steps_, open_step_->gradients_missing, DescribeTensor(layout_.tensors()[tensor])));
  }
  const trace::Span step(StepEvent(trace::Kind::kStep), open_step_->trace_begin);
  const trace::Span call(StepEvent(trace::Kind::kCall));
  return Finish();
}

void Worker::OpenStepWith(absl::Span<const GroupRates> rates) {
  rates_crc32c_ = Crc32cOf(parameters_, rates, optimizer_.schedule());
  if (options_.min_workers > 0) rates_ = MessageOf(rates, optimizer_.schedule());
  const size_t tensors = parameters_.size();
  const uint32_t chunks = layout_.chunks().size();
  open_step_.reset(new OpenStep{.gradients = std::vector<Gradient>(tensors),
                                .has_gradient = std::vector<bool>(tensors),
                                .gradients_missing = tensors,
                                .queue = ChunkQueue(chunks, window_)});
  for (const Chunk& chunk : layout_.chunks()) {
    open_step_->segments_missing.push_back(chunk.segments.size());
  }
}

void Worker::AddGradient(size_t tensor, Gradient gradient) {
  open_step_->gradients[tensor] = gradient;
  open_step_->has_gradient[tensor] = true;
  --open_step_->gradients_missing;
  const absl::Span<const Chunk> chunks = layout_.chunks();
  for (uint32_t chunk = first_chunk_of_tensor_[tensor];
       chunk < chunks.size() && chunks[chunk].segments.front().tensor <= tensor; ++chunk) {
    if (--open_step_->segments_missing[chunk] == 0) open_step_->queue.SetReady(chunk);
  }
}

absl::StatusOr<StepReport> Worker::Finish() {
  StepReport report = std::move(open_step_->report);
  if (optimizer_.IsLocal()) {
    failure_ = StepLocally(report);  // its gradient counts in the round that ends the interval
  } else {
    failure_ = ExchangeOpenStep(report);
    if (failure_.ok()) failure_ = CatchUp(report);
  }
  if (!failure_.ok()) return failure_;
  report.step = steps_ - 1;
  for (const BlockLeftAlone& block : optimizer_.TakeBlocksLeftAlone()) {
    report.skipped.push_back({options_.rank, layout_.DescribeBlock(block.chunk, block.block)});
  }
  report.sent_bits = 8.0 * sent_bytes_ / layout_.elements() / (steps_ - first_step_);
  for (const ChunkExchange& exchange : exchanges_) {
    report.kept_bytes += exchange.kept.payload_bytes();
  }
  std::sort(report.late_ranks.begin(), report.late_ranks.end());
  return report;
}

absl::Status Worker::StepLocally(StepReport& report) {
  const trace::Span span(StepEvent(trace::Kind::kLocalStep));
  const absl::Time start = options_.clock->Now();
  for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
    optimizer_.StepLocally(chunk, open_step_->gradients);
  }
  report.kernels += options_.clock->Now() - start;
  if (absl::Status status = optimizer_.Check(); !status.ok()) return status;
  open_step_.reset();
  ++steps_;
  return absl::OkStatus();
}

absl::Status Worker::ExchangeOpenStep(StepReport& report) {
  report.codec = optimizer_.codec();
  deadline_ = options_.clock->Now() + options_.exchange_timeout;
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
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (exchanges_[chunk].owes_state) GiveState(chunk);
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
  const bool is_on_gpu = adam_ != nullptr && options_.gpu != nullptr;
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
      AddGradient(tensor, Gradient(is_on_gpu ? nullptr : zeros.data(),
                                   parameters_[tensor].values.size(), GradientType::kFloat32));
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
  const auto holds_answers = [this] {
    return open_step_ != nullptr && !open_step_->held_answers.empty();
  };
  trace::Laps laps;
  absl::Time last = options_.clock->Now();
  // Adds the time since the last call to one of the report's durations.
  auto account = [this, &last](absl::Duration& to) {
    const absl::Time now = options_.clock->Now();
    to += now - last;
    last = now;
  };
  while (!queue.all_answered() || holds_answers()) {
    const std::optional<uint32_t> chunk =
        optimizer_.CanCompress() ? queue.TakeNext() : std::nullopt;
    if (chunk) {
      send(*chunk);
      account(report.kernels);
      laps.Record(EventOf(trace::Kind::kCompress, *chunk));
      continue;
    }
    const bool waits = all && !holds_answers();
    std::optional<WorkerInbox::Item> item =
        waits ? inbox_->Take(*options_.clock, kOfferInterval) : inbox_->TakeIfAny();
    absl::Duration blocked;
    account(blocked);
    if (item && std::holds_alternative<Packed>(item->what)) {
      report.kernels += blocked;
      if (waits) laps.Record(EventOf(trace::Kind::kCompress, item->chunk));
    } else {
      const absl::Duration waited =
          std::min(blocked, item ? WaitedFor(std::get<absl::StatusOr<Answer>>(item->what))
                                 : absl::ZeroDuration());
      report.wait += waited;
      report.wire += blocked - waited;
      if (waits && waited > absl::ZeroDuration()) {
        laps.Record(EventOf(trace::Kind::kWait, item->chunk), waited);
      }
      if (waits) {
        laps.Record(EventOf(trace::Kind::kWire, item ? item->chunk : trace::kNone));
      }
    }
    if (!item) {
      if (!all) return absl::OkStatus();
      if (waits) {
        if (absl::Status status = CheckGpuIsInTime(); !status.ok()) return status;
        OfferToIdleShards();
      } else {
        OpenStep::HeldAnswer held = std::move(open_step_->held_answers.front());
        open_step_->held_answers.pop_front();
        ApplyAnswer(held.chunk, std::move(held.answer), report);
        account(report.kernels);
        laps.Record(EventOf(trace::Kind::kApply, held.chunk));
      }
      continue;
    }
    const uint32_t received = item->chunk;
    absl::StatusOr<bool> done = Receive(*std::move(item), report);
    if (!done.ok()) return done.status();
    if (*done) queue.SetAnswered(received);
    account(report.kernels);
    laps.Record(EventOf(trace::Kind::kApply, received));
  }
  return absl::OkStatus();
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

absl::Status Worker::CheckNoStepFailed() const {
  if (failure_.ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("an earlier step failed, and parts of it may have been taken; leave, and start "
                   "the job again. It failed with: ",
                   failure_.message()));
}

absl::Status Worker::CheckNoStepIsOpen() const {
  if (open_step_ == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "step %d has begun and is not finished: gradients of %d tensors have come, of %d", steps_,
      parameters_.size() - open_step_->gradients_missing, parameters_.size()));
}

absl::Status Worker::CheckGpuIsInTime() const {
  if (options_.clock->Now() < deadline_) return absl::OkStatus();
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (!exchanges_[chunk].is_packing) continue;
    return absl::DeadlineExceededError(absl::StrFormat(
        "%s has not compressed chunk %d of step %d in %s: what was put on the stream before it is "
        "not done",
        options_.gpu->name(), chunk, steps_, absl::FormatDuration(options_.exchange_timeout)));
  }
  return absl::OkStatus();
}

FrameHeader Worker::HeaderOf(uint32_t chunk, Codec codec) const {
  FrameHeader header;
  header.set_job(options_.job);
  header.set_epoch(epochs_[shard_of_chunk_[chunk]]);
  header.set_rank(options_.rank);
  header.set_step(round_);
  header.set_chunk(chunk);
  header.set_codec(codec);
  header.set_rates_crc32c(rates_crc32c_);
  header.set_incarnation(incarnation_);
  return header;
}

void Worker::Pack(uint32_t chunk) {
  auto packed = std::make_shared<Payload>(layout_.PayloadBytes(optimizer_.codec(), chunk));
  exchanges_[chunk].packed = packed;
  const std::optional<uint32_t> bad_block =
      optimizer_.Compress(chunk, open_step_->gradients, packed->data(),
                          [inbox = inbox_, packed, chunk](absl::StatusOr<uint32_t> bad_block) {
                            inbox->Put(chunk, Packed{std::move(bad_block)});
                          });
  exchanges_[chunk].is_packing = !bad_block;
  if (!bad_block) return;
  if (*bad_block < layout_.chunks()[chunk].blocks) {
    absl::Status status = NumberCodecOf(optimizer_.codec(), layout_)
                              .CheckCodecItself(layout_, chunk, *bad_block, packed->data());
    if (!status.ok()) return inbox_->Put(chunk, Packed{std::move(status)});
  }
  Send(chunk, *bad_block);
}

void Worker::Send(uint32_t chunk, uint32_t bad_block) {
  ChunkExchange& exchange = exchanges_[chunk];
  SentFrame frame;
  frame.payload = exchange.packed;
  frame.header = HeaderOf(chunk, optimizer_.codec());
  FrameHeader& header = frame.header;
  header.set_error_scale(optimizer_.error_scale());
  header.set_loss_unit(optimizer_.loss_unit());
  if (options_.min_workers > 0) {
    *header.mutable_rates() = rates_;
    *header.mutable_rates()->mutable_scales() = optimizer_.ScalesOf(chunk);
  }
  if (bad_block < layout_.chunks()[chunk].blocks) {
    frame.payload = std::make_shared<Payload>(SkipPayload(bad_block));
    header.set_codec(SKIP);
  }
  header.set_payload_crc32c(Crc32c(frame.payload->span()));
  sent_bytes_ += frame.payload->size();
  exchange.kept.Add(std::move(frame));
  // Otherwise it follows the one that is under way.
  if (!exchange.step_under_way) Exchange(chunk, round_);
}

void Worker::Exchange(uint32_t chunk, uint64_t step) {
  ChunkExchange& exchange = exchanges_[chunk];
  exchange.step_under_way.reset();
  exchange.offers_again = false;
  SentFrame* frame = exchange.kept.Find(step);
  if (frame == nullptr) return;
  exchange.step_under_way = step;
  const uint32_t shard = shard_of_chunk_[chunk];
  frame->header.set_generation(generations_[shard]);
  frame->header.set_answered_steps(exchange.kept.answered_steps());
  Reach(Failpoint::kWorkerSending);
  trace::Event sent = EventOf(trace::Kind::kExchange, chunk);
  if (trace::IsOn()) {
    sent.step = step;
    sent.begin = trace::Now();
    sent.bytes = frame->payload->size();
    sent.codec = trace::LabelOf(CodecName(frame->header.codec()));
  }
  channels_[shard]->Exchange(frame->header, frame->payload, deadline_,
                             [inbox = inbox_, chunk, sent](absl::StatusOr<Answer> answer) mutable {
                               if (trace::IsOn()) sent.end = trace::Now();
                               trace::Record(sent);
                               inbox->Put(chunk, std::move(answer));
                             });
}

log::About Worker::AboutOf(uint32_t chunk, uint64_t step) const {
  return {.job = options_.job,
          .step = step,
          .chunk = chunk,
          .worker = options_.rank,
          .aggregator = channels_[shard_of_chunk_[chunk]]->target()};
}

absl::StatusOr<bool> Worker::Receive(WorkerInbox::Item item, StepReport& report) {
  if (const auto* packed = std::get_if<Packed>(&item.what)) {
    exchanges_[item.chunk].is_packing = false;
    if (!packed->bad_block.ok()) return packed->bad_block.status();
    Send(item.chunk, *packed->bad_block);
    return false;
  }
  const uint64_t step = exchanges_[item.chunk].step_under_way.value_or(round_);
  absl::StatusOr<bool> is_news =
      ReceiveAnswer(item.chunk, std::get<absl::StatusOr<Answer>>(std::move(item.what)), report);
  if (!is_news.ok()) {
    log::WriteEvent(log::Level::kWarning,
                    absl::StrCat("an exchange has failed: ", is_news.status().message()),
                    AboutOf(item.chunk, step));
  }
  return is_news;
}

absl::StatusOr<bool> Worker::ReceiveAnswer(uint32_t chunk, absl::StatusOr<Answer> answer,
                                           StepReport& report) {
  const uint32_t shard = shard_of_chunk_[chunk];
  ChunkExchange& exchange = exchanges_[chunk];
  const uint64_t step = *exchange.step_under_way;
  SentFrame& frame = *exchange.kept.Find(step);
  if (!answer.ok() && frame.answered) {
    // Nobody needs the answer. If the frame was needed, this step's will be answered with REPLAY.
    exchange.step_under_way.reset();
    if (!exchange.kept.newest().answered) Exchange(chunk, round_);
    return false;
  }
  if (!answer.ok()) {
    exchange.step_under_way.reset();
    return Explain(answer.status(), shard,
                   absl::StrFormat("step %d, chunk %d of job '%s'", step, chunk, options_.job));
  }
  absl::Status status = CheckAnswer(answer->header, answer->payload.span(), frame.header, layout_);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrFormat("answer from aggregator %s: %s", channels_[shard]->target(),
                                        status.message()));
  }
  if (answer->header.codec() == FETCH) {
    for (const uint32_t wanted : answer->header.wanted_chunks()) GiveState(wanted);
    Exchange(chunk, step);
    return false;
  }
  if (answer->header.codec() == REPLAY) {
    if (status = Replay(chunk, answer->header, report); !status.ok()) return status;
    return false;
  }
  const uint32_t crc = answer->header.payload_crc32c();
  if (frame.answered && crc != frame.answer_crc32c) {
    return absl::DataLossError(absl::StrFormat(
        "aggregator %s (shard %d of %d) was started again and comes to another result than before "
        "for step %d, chunk %d: CRC-32C %08x, it was %08x. Its error is not what it was; start the "
        "job again from a checkpoint",
        channels_[shard]->target(), shard, channels_.size(), step, chunk, crc,
        frame.answer_crc32c));
  }
  const uint64_t durable_step = answer->header.durable_step();
  const bool is_news = !frame.answered;
  if (is_news) {
    // CheckAnswer compares it with the frame's, which may be SKIP.
    const Codec codec = answer->header.codec();
    if (frame.header.codec() == SKIP && codec != SKIP && codec != optimizer_.codec()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "aggregator %s answers step %d, chunk %d as %s, wanted %s", channels_[shard]->target(),
          step, chunk, CodecName(codec), CodecName(optimizer_.codec())));
    }
    frame.answered = true;
    frame.answer_crc32c = crc;
    *frame.header.mutable_late_ranks() = answer->header.late_ranks();
    Reach(Failpoint::kWorkerAnswered);
    if (open_step_ != nullptr && !open_step_->may_apply) {
      open_step_->held_answers.push_back({chunk, *std::move(answer)});
    } else {
      ApplyAnswer(chunk, *std::move(answer), report);
    }
  }
  Exchange(chunk, step + 1);
  // A late worker's older answers may be durable before it has them.
  exchange.kept.Forget(std::min(durable_step, exchange.step_under_way.value_or(durable_step)));
  return is_news;
}

void Worker::ApplyAnswer(uint32_t chunk, Answer answer, StepReport& report) {
  ChunkExchange& exchange = exchanges_[chunk];
  exchange.next_step = answer.header.step() + 1;
  if (answer.header.codec() == RESTORE) return;  // it says only that the round is closed
  const AnswerHeader& header = answer.header;
  bool is_late = false;
  for (const uint32_t rank : header.late_ranks()) {
    if (rank == options_.rank) is_late = true;
    if (!absl::c_linear_search(report.late_ranks, rank)) report.late_ranks.push_back(rank);
  }
  if (is_late && report.late_rounds++ == 0) {
    log::WriteEvent(log::Level::kWarning, "a round has closed without this rank, which was late",
                    AboutOf(chunk, header.step()));
  }
  newest_step_ = std::max(newest_step_, header.open_step());
  for (int i = 0; i < header.later_rates_size(); ++i) {
    later_rates_[header.step() + 1 + i] = header.later_rates(i);
  }
  if (header.codec() == SKIP) {
    optimizer_.TakeBack(chunk, exchange.packed->data());
    report.skipped.push_back({header.skipped_by_rank(),
                              layout_.DescribeBlock(chunk, SkippedBlock(answer.payload.span()))});
    if (report.skipped.size() == 1) {
      log::WriteEvent(log::Level::kWarning,
                      absl::StrFormat("a round is skipped: not finite on rank %d: %s",
                                      header.skipped_by_rank(), report.skipped.back().block),
                      AboutOf(chunk, header.step()));
    }
  } else {
    if (is_late) optimizer_.KeepInput(chunk, exchange.packed->data());
    optimizer_.Apply(chunk, std::move(answer));
  }
  exchange.packed.reset();
  if (exchange.owes_state) GiveState(chunk);
}

void Worker::GiveState(uint32_t chunk) {
  const uint64_t step = exchanges_[chunk].next_step;
  if (round_ < layout_.options().first_step()) return;  // it has no state yet
  // Between a freeze of the variance and the first answer after it a state fits no step, nor does
  // it between an answer and the end of its step, where there is something left to do, or after a
  // local step.
  const bool has_still_to_end = optimizer_.EndsSteps() && open_step_ != nullptr && step > round_;
  exchanges_[chunk].owes_state =
      optimizer_.HasFrozenFor(step) || has_still_to_end || optimizer_.HasLocalSteps(chunk);
  if (exchanges_[chunk].owes_state) return;
  auto state = std::make_shared<const Payload>(optimizer_.State(chunk));
  if (!optimizer_.Check().ok()) return;  // it is worth nothing
  FrameHeader header = HeaderOf(chunk, STATE);
  header.set_step(step);
  header.set_payload_crc32c(Crc32c(state->span()));
  *header.mutable_rates()->mutable_schedule() = optimizer_.schedule();
  *header.mutable_rates()->mutable_scales() = optimizer_.Scales();
  // If it is lost, another worker is asked.
  channels_[shard_of_chunk_[chunk]]->Exchange(header, std::move(state), deadline_,
                                              [](const absl::StatusOr<Answer>&) {});
}

absl::Status Worker::Replay(uint32_t chunk, const AnswerHeader& wanted, StepReport& report) {
  trace::RecordMoment(EventOf(trace::Kind::kReplay, chunk));
  const uint32_t shard = shard_of_chunk_[chunk];
  ChunkExchange& exchange = exchanges_[chunk];
  KeptFrames& kept = exchange.kept;
  const bool knew_of_it =
      kept.Find(*exchange.step_under_way)->header.generation() == wanted.generation();
  const bool is_news = wanted.generation() > generations_[shard];
  if (is_news) generations_[shard] = wanted.generation();
  if (kept.Find(wanted.step()) != nullptr) {
    report.replayed_frames += kept.newest().header.step() - wanted.step();
    Exchange(chunk, wanted.step());
  } else if (!returned_ || optimizer_.StepsBefore(wanted.step()) >= returned_->step) {
    return absl::DataLossError(absl::StrFormat(
        "aggregator %s (shard %d of %d) was started again from an older state than it had promised "
        "to keep: it asks for step %d of chunk %d, and frames are kept from step %d on. Start the "
        "job again from a checkpoint",
        channels_[shard]->target(), shard, channels_.size(), wanted.step(), chunk,
        kept.oldest_step()));
  } else if (knew_of_it) {
    // Those rounds closed without this rank, and will again.
    exchange.step_under_way.reset();
    exchange.offers_again = true;
  } else {
    // But of what closed with it, it must be told at once.
    Exchange(chunk, kept.oldest_step());
  }
  if (!is_news) return absl::OkStatus();
  ++report.restarted_aggregators;
  log::WriteEvent(log::Level::kWarning,
                  "the aggregator was started again, and asks for frames from this step on",
                  AboutOf(chunk, wanted.step()));
  for (uint32_t other = 0; other < exchanges_.size(); ++other) {
    if (shard_of_chunk_[other] == shard) Offer(other);
  }
  return absl::OkStatus();
}

void Worker::Offer(uint32_t chunk) {
  const ChunkExchange& exchange = exchanges_[chunk];
  if (exchange.step_under_way || exchange.kept.empty()) return;
  Exchange(chunk, exchange.kept.newest().header.step());
}

void Worker::OfferToIdleShards() {
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (exchanges_[chunk].offers_again) Exchange(chunk, exchanges_[chunk].kept.oldest_step());
  }
  std::vector<bool> is_idle(channels_.size(), true);
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (exchanges_[chunk].step_under_way) is_idle[shard_of_chunk_[chunk]] = false;
  }
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (!is_idle[shard_of_chunk_[chunk]] || exchanges_[chunk].kept.empty()) continue;
    Offer(chunk);
    is_idle[shard_of_chunk_[chunk]] = false;
  }
}

trace::Event Worker::EventOf(trace::Kind kind, uint32_t chunk) const {
  trace::Event event = {.kind = kind, .step = round_, .chunk = chunk};
  event.rank = options_.rank;
  event.job = trace_job_;
  if (chunk != trace::kNone) event.epoch = epochs_[shard_of_chunk_[chunk]];
  return event;
}

trace::Event Worker::StepEvent(trace::Kind kind) const {
  trace::Event event = EventOf(kind, trace::kNone);
  event.step = steps_;
  return event;
}

// A status with what failed, where, and, when time ran out, whom the aggregator waits for.
absl::Status Worker::Explain(const absl::Status& status, uint32_t shard,
                             absl::string_view what) const {
  std::string message =
      absl::StrFormat("%s: aggregator %s (shard %d of %d): %s", what, channels_[shard]->target(),
                      shard, channels_.size(), status.message());
  if (absl::IsDeadlineExceeded(status)) {
    StatusRequest request;
    request.set_job(options_.job);
    absl::StatusOr<StatusResponse> response =
        channels_[shard]->Status(request, options_.clock->Now() + kStatusTimeout);
    const std::string who = response.ok() ? WhoIsWaitedFor(*response) : "";
    if (!who.empty()) absl::StrAppend(&message, "; it is ", who);
    if (!response.ok()) absl::StrAppend(&message, "; it no longer answers");
  }
  const absl::Status explained(status.code(), message);
  return IsTryAgain(status) ? TryAgain(explained) : explained;
}

absl::Status Worker::Leave() {
  deadline_ = options_.clock->Now() + options_.exchange_timeout;
  absl::Status first_error;
  for (uint32_t shard = 0; shard < channels_.size(); ++shard) first_error.Update(LeaveShard(shard));
  return first_error;
}

// In a job that goes on without this worker, its part of a step that failed counts where it was
// answered.
uint64_t Worker::StepsAt(uint32_t shard) const {
  uint64_t steps = round_;
  for (uint32_t chunk = 0; chunk < exchanges_.size() && options_.min_workers > 0; ++chunk) {
    if (shard_of_chunk_[chunk] == shard) steps = std::max(steps, exchanges_[chunk].next_step);
  }
  if (open_step_ == nullptr || options_.min_workers == 0) return steps;
  for (const OpenStep::HeldAnswer& held : open_step_->held_answers) {
    if (shard_of_chunk_[held.chunk] == shard) steps = std::max(steps, round_ + 1);
  }
  return steps;
}

absl::Status Worker::LeaveShard(uint32_t shard) {
  LeaveRequest request;
  request.set_job(options_.job);
  request.set_epoch(epochs_[shard]);
  request.set_rank(options_.rank);
  request.set_steps(StepsAt(shard));
  request.set_incarnation(incarnation_);
  while (true) {
    const absl::Status status = channels_[shard]->Leave(request, deadline_);
    if (!absl::IsAborted(status) || options_.clock->Now() >= deadline_) return status;
    if (absl::Status offered = OfferAll(shard); !offered.ok()) return offered;
  }
}

absl::Status Worker::OfferAll(uint32_t shard) {
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (shard_of_chunk_[chunk] == shard) Offer(chunk);
  }
  return AwaitOffers();
}

absl::Status Worker::AwaitOffers() {
  StepReport report;
  const auto under_way = [](const ChunkExchange& exchange) {
    return exchange.step_under_way.has_value() || exchange.offers_again;
  };
  while (options_.clock->Now() < deadline_ &&
         std::any_of(exchanges_.begin(), exchanges_.end(), under_way)) {
    std::optional<WorkerInbox::Item> item = inbox_->Take(*options_.clock, kOfferInterval);
    if (!item) {
      OfferToIdleShards();
      continue;
    }
    // A step that is left open sends nothing more.
    if (std::holds_alternative<Packed>(item->what)) continue;
    absl::StatusOr<bool> done = Receive(*std::move(item), report);
    // What failed before may fail again, and does not keep the worker from leaving.
    if (!done.ok() && failure_.ok()) return done.status();
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
