#include "worker/worker.h"

#include <algorithm>
#include <deque>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace signpost {
namespace {

// How long a failed call may take to find out whom the aggregator waits for.
constexpr absl::Duration kStatusTimeout = absl::Seconds(3);

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

  // Blocks; each exchange ends by its deadline, so this does too.
  Item Take() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &Inbox::HasItem));
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

 private:
  bool HasItem() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !items_.empty(); }

  absl::Mutex mutex_;
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
};

// A frame under way, with what is needed to take it back.
struct Worker::InFlight {
  FrameHeader header;
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
      in_flight_(layout_.chunks().size()),
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
  const absl::Time deadline = absl::Now() + options.join_timeout;
  const uint64_t incarnation = NewIncarnation();
  for (uint32_t shard = 0; shard < worker->channels_.size(); ++shard) {
    absl::Status status = worker->JoinShard(shard, job_options, incarnation, deadline);
    if (!status.ok()) return status;
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
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Worker::Step(absl::Span<const absl::Span<const float>> gradients,
                                        absl::Span<const GroupRates> rates) {
  if (absl::Status status = CheckStepArguments(gradients, rates); !status.ok()) return status;
  optimizer_.BeginStep(step_, rates);
  rates_crc32c_ =
      Crc32c({reinterpret_cast<const uint8_t*>(rates.data()), rates.size() * sizeof(GroupRates)});
  StepReport report;
  report.step = step_;
  report.codec = optimizer_.codec();

  const absl::Time deadline = absl::Now() + options_.exchange_timeout;
  const uint32_t chunks = layout_.chunks().size();
  uint32_t sent = 0;
  uint32_t received = 0;
  absl::Time last = absl::Now();
  // Adds the time since the last call to one of the report's durations.
  auto account = [&last](absl::Duration& to) {
    const absl::Time now = absl::Now();
    to += now - last;
    last = now;
  };
  while (received < chunks) {
    if (sent < chunks && sent - received < window_) {
      Send(sent++, gradients, deadline);
      account(report.kernels);
      continue;
    }
    Inbox::Item item = inbox_->Take();
    absl::Duration blocked;
    account(blocked);
    const absl::Duration waited = item.answer.ok()
                                      ? absl::Microseconds(item.answer->header.waited_us())
                                      : absl::ZeroDuration();
    report.wait += std::min(blocked, waited);
    report.wire += blocked - std::min(blocked, waited);

    absl::Status status = Receive(item.chunk, std::move(item.answer), report);
    if (!status.ok()) return status;
    ++received;
    account(report.kernels);
  }
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

void Worker::Send(uint32_t chunk, absl::Span<const absl::Span<const float>> gradients,
                  absl::Time deadline) {
  const uint32_t shard = shard_of_chunk_[chunk];
  InFlight& in_flight = in_flight_[chunk];
  auto packed = std::make_shared<Payload>(layout_.PayloadBytes(optimizer_.codec(), chunk));
  in_flight.blocks_packed = optimizer_.Compress(chunk, gradients, packed->data());
  in_flight.packed = packed;
  std::shared_ptr<const Payload> payload = packed;

  FrameHeader& header = in_flight.header;
  header.set_job(options_.job);
  header.set_epoch(epochs_[shard]);
  header.set_rank(options_.rank);
  header.set_step(step_);
  header.set_chunk(chunk);
  header.set_codec(optimizer_.codec());
  header.set_error_scale(optimizer_.error_scale());
  header.set_rates_crc32c(rates_crc32c_);
  if (in_flight.blocks_packed < layout_.chunks()[chunk].blocks) {
    payload = std::make_shared<Payload>(SkipPayload(in_flight.blocks_packed));
    header.set_codec(SKIP);
  }
  header.set_payload_crc32c(Crc32c(payload->span()));
  channels_[shard]->Exchange(header, std::move(payload), deadline,
                             [inbox = inbox_, chunk](absl::StatusOr<Answer> answer) {
                               inbox->Put(chunk, std::move(answer));
                             });
}

absl::Status Worker::Receive(uint32_t chunk, absl::StatusOr<Answer> answer, StepReport& report) {
  const uint32_t shard = shard_of_chunk_[chunk];
  InFlight& in_flight = in_flight_[chunk];
  if (!answer.ok()) {
    return Explain(answer.status(), shard,
                   absl::StrFormat("step %d, chunk %d of job '%s'", step_, chunk, options_.job));
  }
  absl::Status status =
      CheckAnswer(answer->header, answer->payload.span(), in_flight.header, layout_);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrFormat("answer from aggregator %s: %s", channels_[shard]->target(),
                                        status.message()));
  }
  if (answer->header.codec() == SKIP) {
    optimizer_.TakeBack(chunk, in_flight.packed->data(), in_flight.blocks_packed);
    report.skipped.push_back({answer->header.skipped_by_rank(),
                              layout_.DescribeBlock(chunk, SkippedBlock(answer->payload.span()))});
  } else {
    optimizer_.Apply(chunk, *std::move(answer));
  }
  in_flight.packed.reset();
  return absl::OkStatus();
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
        channels_[shard]->Status(request, absl::Now() + kStatusTimeout);
    const std::string who = response.ok() ? WhoIsWaitedFor(*response) : "";
    if (!who.empty()) absl::StrAppend(&message, "; it is ", who);
    if (!response.ok()) absl::StrAppend(&message, "; it no longer answers");
  }
  return absl::Status(status.code(), message);
}

absl::Status Worker::Leave() {
  absl::Status first_error;
  for (uint32_t shard = 0; shard < channels_.size(); ++shard) {
    LeaveRequest request;
    request.set_job(options_.job);
    request.set_epoch(epochs_[shard]);
    request.set_rank(options_.rank);
    first_error.Update(channels_[shard]->Leave(request, absl::Now() + options_.exchange_timeout));
  }
  return first_error;
}

uint32_t Worker::ParametersCrc32c() const { return Crc32cOf(parameters_); }

}  // namespace signpost
