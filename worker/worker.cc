#include "worker/worker.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "failpoint/failpoint.h"
#include "worker/kept_frames.h"

namespace signpost {
namespace {

// How long a failed call may take to find out whom the aggregator waits for.
constexpr absl::Duration kStatusTimeout = absl::Seconds(3);

// How long a start that failed may take to take back what it has done.
constexpr absl::Duration kGiveUpTimeout = absl::Seconds(3);

// When nothing has come for this long, an aggregator that owes us nothing may have been started
// again, and what others wait for may be frames of ours that it has lost.
constexpr absl::Duration kOfferInterval = absl::Milliseconds(500);

std::vector<Tensor> TensorsOf(absl::Span<const Parameter> parameters) {
  std::vector<Tensor> tensors;
  for (const Parameter& parameter : parameters) {
    Tensor& tensor = tensors.emplace_back();
    tensor.set_name(parameter.name);
    tensor.mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
  }
  return tensors;
}

uint32_t Crc32cOf(absl::Span<const Parameter> parameters) {
  uint32_t crc = 0;
  for (const Parameter& parameter : parameters) {
    crc = Crc32c({reinterpret_cast<const uint8_t*>(parameter.values.data()),
                  parameter.values.size() * sizeof(float)},
                 crc);
  }
  return crc;
}

// Of what decides how each parameter steps.
uint32_t Crc32cOf(absl::Span<const Parameter> parameters, absl::Span<const GroupRates> rates) {
  uint32_t crc = 0;
  for (const Parameter& parameter : parameters) {
    crc =
        Crc32c({reinterpret_cast<const uint8_t*>(&parameter.group), sizeof(parameter.group)}, crc);
  }
  return Crc32c({reinterpret_cast<const uint8_t*>(rates.data()), rates.size() * sizeof(GroupRates)},
                crc);
}

absl::Status CheckParameters(absl::Span<const Parameter> parameters, const Layout& layout) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const uint64_t wanted = ElementCount(layout.tensors()[i]);
    if (parameters[i].values.size() == wanted) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("tensor %s has %d values, its shape asks for %d",
                        DescribeTensor(layout.tensors()[i]), parameters[i].values.size(), wanted));
  }
  return absl::OkStatus();
}

uint64_t NewIncarnation() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
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

// What became of each exchange, in the order in which they ended. Thread-safe.
class Worker::Inbox {
 public:
  struct Item {
    uint32_t chunk;
    absl::StatusOr<Answer> answer;
  };

  void Put(uint32_t chunk, absl::StatusOr<Answer> answer) {
    absl::MutexLock lock(&mutex_);
    items_.push_back({chunk, std::move(answer)});
  }

  // Blocks for at most `timeout`.
  std::optional<Item> Take(Clock& clock, absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    if (!clock.Await(mutex_, absl::Condition(this, &Inbox::HasItem), timeout)) {
      return std::nullopt;
    }
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

 private:
  bool HasItem() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !items_.empty(); }

  absl::Mutex mutex_;
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
};

// A chunk's exchanges: one at a time, of consecutive steps.
struct Worker::ChunkExchange {
  KeptFrames kept;
  std::optional<uint64_t> step_under_way;
  // Of the frame that is not answered yet, to take it back.
  std::shared_ptr<const Payload> packed;
  uint32_t blocks_packed = 0;
};

Worker::Worker(const WorkerOptions& options, const OptimizerOptions& optimizer,
               std::vector<Parameter> parameters, std::vector<std::unique_ptr<Channel>> channels,
               Layout layout)
    : options_(options),
      parameters_(std::move(parameters)),
      layout_(std::move(layout)),
      shard_of_chunk_(layout_.ShardOfChunk(channels.size())),
      window_(std::max<uint32_t>(8, 2 * channels.size())),
      optimizer_(layout_, optimizer, parameters_),
      epochs_(channels.size()),
      generations_(channels.size()),
      exchanges_(layout_.chunks().size()),
      inbox_(std::make_shared<Inbox>()),
      channels_(std::move(channels)) {}

Worker::~Worker() = default;

absl::StatusOr<std::unique_ptr<Worker>> Worker::Join(
    const WorkerOptions& options, const OptimizerOptions& optimizer,
    std::vector<Parameter> parameters, std::vector<std::unique_ptr<Channel>> channels) {
  if (absl::Status status = CheckOptions(optimizer); !status.ok()) return status;
  if (channels.empty()) return absl::InvalidArgumentError("no aggregators to join");

  JobOptions job_options;
  job_options.set_block_elements(options.block_elements);
  job_options.set_chunk_elements(options.chunk_elements);
  job_options.set_gamma(options.gamma);
  job_options.set_optimizer(DescribeOptions(optimizer));
  job_options.set_parameters_crc32c(Crc32cOf(parameters));
  absl::StatusOr<Layout> layout = Layout::Create(TensorsOf(parameters), job_options);
  if (!layout.ok()) return layout.status();
  if (absl::Status status = CheckParameters(parameters, *layout); !status.ok()) return status;

  std::unique_ptr<Worker> worker(new Worker(options, optimizer, std::move(parameters),
                                            std::move(channels), *std::move(layout)));
  const absl::Time deadline = options.clock->Now() + options.join_timeout;
  const uint64_t incarnation = NewIncarnation();
  for (uint32_t shard = 0; shard < worker->channels_.size(); ++shard) {
    absl::Status status = worker->JoinShard(shard, job_options, incarnation, deadline);
    if (status.ok()) continue;
    // Otherwise the shards before would keep the job's name for a start that comes to nothing.
    worker->deadline_ = options.clock->Now() + kGiveUpTimeout;
    for (uint32_t joined = 0; joined < shard; ++joined) worker->LeaveShard(joined).IgnoreError();
    return status;
  }
  return worker;
}

absl::Status Worker::JoinShard(uint32_t shard, const JobOptions& job_options, uint64_t incarnation,
                               absl::Time deadline) {
  JoinRequest request;
  request.set_job(options_.job);
  request.set_rank(options_.rank);
  request.set_world_size(options_.world_size);
  request.set_incarnation(incarnation);
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
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Worker::Step(absl::Span<const absl::Span<const float>> gradients,
                                        absl::Span<const GroupRates> rates) {
  if (absl::Status status = CheckStepArguments(gradients, rates); !status.ok()) return status;
  if (!failure_.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "an earlier step failed, and parts of it may have been taken; leave, and start "
        "the job again. It failed with: ",
        failure_.message()));
  }
  absl::StatusOr<StepReport> report = TakeStep(gradients, rates);
  failure_ = report.status();
  return report;
}

absl::StatusOr<StepReport> Worker::TakeStep(absl::Span<const absl::Span<const float>> gradients,
                                            absl::Span<const GroupRates> rates) {
  optimizer_.BeginStep(step_, rates);
  rates_crc32c_ = Crc32cOf(parameters_, rates);
  StepReport report;
  report.step = step_;
  report.codec = optimizer_.codec();

  deadline_ = options_.clock->Now() + options_.exchange_timeout;
  const uint32_t chunks = layout_.chunks().size();
  uint32_t sent = 0;
  uint32_t received = 0;
  absl::Time last = options_.clock->Now();
  // Adds the time since the last call to one of the report's durations.
  auto account = [this, &last](absl::Duration& to) {
    const absl::Time now = options_.clock->Now();
    to += now - last;
    last = now;
  };
  while (received < chunks) {
    if (sent < chunks && sent - received < window_) {
      Send(sent++, gradients);
      account(report.kernels);
      continue;
    }
    std::optional<Inbox::Item> item = inbox_->Take(*options_.clock, kOfferInterval);
    absl::Duration blocked;
    account(blocked);
    const absl::Duration waited = item && item->answer.ok()
                                      ? absl::Microseconds(item->answer->header.waited_us())
                                      : absl::ZeroDuration();
    report.wait += std::min(blocked, waited);
    report.wire += blocked - std::min(blocked, waited);
    if (!item) {
      OfferToIdleShards();
      continue;
    }
    absl::StatusOr<bool> done = Receive(item->chunk, std::move(item->answer), report);
    if (!done.ok()) return done.status();
    if (*done) ++received;
    account(report.kernels);
  }
  for (const ChunkExchange& exchange : exchanges_)
    report.kept_bytes += exchange.kept.payload_bytes();
  ++step_;
  return report;
}

absl::Status Worker::CheckStepArguments(absl::Span<const absl::Span<const float>> gradients,
                                        absl::Span<const GroupRates> rates) const {
  if (gradients.size() != parameters_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("got gradients of %d tensors, the job has %d",
                                                      gradients.size(), parameters_.size()));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].size() != parameters_[i].values.size()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the gradient of tensor %s has %d values, wanted %d",
          DescribeTensor(layout_.tensors()[i]), gradients[i].size(), parameters_[i].values.size()));
    }
    if (parameters_[i].group >= rates.size()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "tensor %s is in parameter group %d, but rates came for %d groups",
          DescribeTensor(layout_.tensors()[i]), parameters_[i].group, rates.size()));
    }
  }
  return absl::OkStatus();
}

void Worker::Send(uint32_t chunk, absl::Span<const absl::Span<const float>> gradients) {
  const uint32_t shard = shard_of_chunk_[chunk];
  ChunkExchange& exchange = exchanges_[chunk];
  auto packed = std::make_shared<Payload>(layout_.PayloadBytes(optimizer_.codec(), chunk));
  exchange.blocks_packed = optimizer_.Compress(chunk, gradients, packed->data());
  exchange.packed = packed;

  SentFrame frame;
  frame.payload = packed;
  FrameHeader& header = frame.header;
  header.set_job(options_.job);
  header.set_epoch(epochs_[shard]);
  header.set_rank(options_.rank);
  header.set_step(step_);
  header.set_chunk(chunk);
  header.set_codec(optimizer_.codec());
  header.set_error_scale(optimizer_.error_scale());
  header.set_rates_crc32c(rates_crc32c_);
  if (exchange.blocks_packed < layout_.chunks()[chunk].blocks) {
    frame.payload = std::make_shared<Payload>(SkipPayload(exchange.blocks_packed));
    header.set_codec(SKIP);
  }
  header.set_payload_crc32c(Crc32c(frame.payload->span()));
  exchange.kept.Add(std::move(frame));
  // Otherwise it follows the one that is under way.
  if (!exchange.step_under_way) Exchange(chunk, step_);
}

void Worker::Exchange(uint32_t chunk, uint64_t step) {
  ChunkExchange& exchange = exchanges_[chunk];
  exchange.step_under_way.reset();
  SentFrame* frame = exchange.kept.Find(step);
  if (frame == nullptr) return;
  exchange.step_under_way = step;
  const uint32_t shard = shard_of_chunk_[chunk];
  frame->header.set_generation(generations_[shard]);
  Reach(Failpoint::kWorkerSending);
  channels_[shard]->Exchange(frame->header, frame->payload, deadline_,
                             [inbox = inbox_, chunk](absl::StatusOr<Answer> answer) {
                               inbox->Put(chunk, std::move(answer));
                             });
}

absl::StatusOr<bool> Worker::Receive(uint32_t chunk, absl::StatusOr<Answer> answer,
                                     StepReport& report) {
  const uint32_t shard = shard_of_chunk_[chunk];
  ChunkExchange& exchange = exchanges_[chunk];
  const uint64_t step = *exchange.step_under_way;
  SentFrame& frame = *exchange.kept.Find(step);
  if (!answer.ok() && frame.answered) {
    // Nobody needs the answer. If the frame was needed, this step's will be answered with REPLAY.
    exchange.step_under_way.reset();
    if (!exchange.kept.newest().answered) Exchange(chunk, step_);
    return false;
  }
  if (!answer.ok()) {
    return Explain(answer.status(), shard,
                   absl::StrFormat("step %d, chunk %d of job '%s'", step, chunk, options_.job));
  }
  absl::Status status = CheckAnswer(answer->header, answer->payload.span(), frame.header, layout_);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrFormat("answer from aggregator %s: %s", channels_[shard]->target(),
                                        status.message()));
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
    frame.answered = true;
    frame.answer_crc32c = crc;
    Reach(Failpoint::kWorkerAnswered);
    ApplyAnswer(chunk, *std::move(answer), report);
  }
  Exchange(chunk, step + 1);
  exchange.kept.Forget(durable_step);
  return is_news;
}

void Worker::ApplyAnswer(uint32_t chunk, Answer answer, StepReport& report) {
  ChunkExchange& exchange = exchanges_[chunk];
  if (answer.header.codec() == SKIP) {
    optimizer_.TakeBack(chunk, exchange.packed->data(), exchange.blocks_packed);
    report.skipped.push_back({answer.header.skipped_by_rank(),
                              layout_.DescribeBlock(chunk, SkippedBlock(answer.payload.span()))});
  } else {
    optimizer_.Apply(chunk, std::move(answer));
  }
  exchange.packed.reset();
}

absl::Status Worker::Replay(uint32_t chunk, const AnswerHeader& wanted, StepReport& report) {
  const uint32_t shard = shard_of_chunk_[chunk];
  KeptFrames& kept = exchanges_[chunk].kept;
  if (kept.Find(wanted.step()) == nullptr) {
    return absl::DataLossError(absl::StrFormat(
        "aggregator %s (shard %d of %d) was started again from an older state than it had promised "
        "to keep: it asks for step %d of chunk %d, and frames are kept from step %d on. Start the "
        "job again from a checkpoint",
        channels_[shard]->target(), shard, channels_.size(), wanted.step(), chunk,
        kept.oldest_step()));
  }
  const bool is_news = wanted.generation() > generations_[shard];
  if (is_news) generations_[shard] = wanted.generation();
  report.replayed_frames += kept.newest().header.step() - wanted.step();
  Exchange(chunk, wanted.step());
  if (!is_news) return absl::OkStatus();
  ++report.restarted_aggregators;
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
  std::vector<bool> is_idle(channels_.size(), true);
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (exchanges_[chunk].step_under_way) is_idle[shard_of_chunk_[chunk]] = false;
  }
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (!is_idle[shard_of_chunk_[chunk]]) continue;
    Offer(chunk);
    is_idle[shard_of_chunk_[chunk]] = false;
  }
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
  return absl::Status(status.code(), message);
}

absl::Status Worker::Leave() {
  deadline_ = options_.clock->Now() + options_.exchange_timeout;
  absl::Status first_error;
  for (uint32_t shard = 0; shard < channels_.size(); ++shard) first_error.Update(LeaveShard(shard));
  return first_error;
}

absl::Status Worker::LeaveShard(uint32_t shard) {
  LeaveRequest request;
  request.set_job(options_.job);
  request.set_epoch(epochs_[shard]);
  request.set_rank(options_.rank);
  request.set_steps(step_);
  while (true) {
    const absl::Status status = channels_[shard]->Leave(request, deadline_);
    if (!absl::IsAborted(status) || options_.clock->Now() >= deadline_) return status;
    for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
      if (shard_of_chunk_[chunk] == shard) Offer(chunk);
    }
    if (absl::Status offered = AwaitOffers(); !offered.ok()) return offered;
  }
}

absl::Status Worker::AwaitOffers() {
  StepReport report;
  const auto under_way = [](const ChunkExchange& exchange) {
    return exchange.step_under_way.has_value();
  };
  while (options_.clock->Now() < deadline_ &&
         std::any_of(exchanges_.begin(), exchanges_.end(), under_way)) {
    std::optional<Inbox::Item> item = inbox_->Take(*options_.clock, kOfferInterval);
    if (!item) {
      OfferToIdleShards();
      continue;
    }
    absl::StatusOr<bool> done = Receive(item->chunk, std::move(item->answer), report);
    if (!done.ok()) return done.status();
  }
  return absl::OkStatus();
}

uint32_t Worker::ParametersCrc32c() const { return Crc32cOf(parameters_); }

}  // namespace signpost
