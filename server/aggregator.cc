#include "server/aggregator.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace signpost {
namespace {

absl::Status ShuttingDownError() {
  return absl::UnavailableError("this aggregator is shutting down");
}

absl::Status LimitError(absl::string_view what, uint64_t got, uint64_t limit,
                        absl::string_view flag) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: %d is over this aggregator's limit of %d, which %s sets", what, got, limit, flag));
}

absl::Status CheckIdentity(const JoinRequest& request, const AggregatorOptions& options) {
  if (request.job().empty() || request.job().size() > kMaxJobNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a job's name has 1 to ", kMaxJobNameBytes,
                                                   " bytes; this one has ", request.job().size()));
  }
  if (request.rank() >= request.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank(), " is not in [0, ", request.world_size(), ")"));
  }
  if (request.shard() != options.shard || request.shard_count() != options.shard_count) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "this aggregator is shard %d of %d, but rank %d takes it for shard %d of %d: all workers "
        "must list the aggregators in shard order",
        options.shard, options.shard_count, request.rank(), request.shard(),
        request.shard_count()));
  }
  return absl::OkStatus();
}

// UINT64_MAX if it is more.
uint64_t CountElements(const JoinRequest& request) {
  uint64_t sum = 0;
  for (const Tensor& tensor : request.tensors()) {
    const uint64_t before = sum;
    sum += ElementCount(tensor);
    if (sum < before) return UINT64_MAX;
  }
  return sum;
}

// The layout that the request asks for, unless the request is malformed or over a limit. Looks at
// no state.
absl::StatusOr<Layout> CheckJoin(const JoinRequest& request, const AggregatorOptions& options) {
  if (absl::Status status = CheckIdentity(request, options); !status.ok()) return status;
  const AggregatorLimits& limits = options.limits;
  if (request.world_size() > limits.workers) {
    return LimitError("workers", request.world_size(), limits.workers, "--max-workers");
  }
  if (const uint64_t elements = CountElements(request); elements > limits.parameters) {
    return LimitError("parameters", elements, limits.parameters, "--max-parameters");
  }
  const std::vector<Tensor> tensors(request.tensors().begin(), request.tensors().end());
  absl::StatusOr<Layout> layout = Layout::Create(tensors, request.options());
  if (!layout.ok()) return layout;
  uint64_t payload_bytes = 0;
  for (uint32_t chunk = 0; chunk < layout->chunks().size(); ++chunk) {
    payload_bytes = std::max(payload_bytes, layout->PayloadBytes(FLOAT32, chunk));
  }
  if (payload_bytes > limits.payload_bytes) {
    return LimitError("bytes of a chunk in fp32", payload_bytes, limits.payload_bytes,
                      "--max-message-bytes");
  }
  return layout;
}

absl::Status CheckMatches(uint32_t world_size, const Layout& layout, const Job& job) {
  if (world_size != job.world_size()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the world size is %d here but %d in the job", world_size, job.world_size()));
  }
  return CheckSameJob(layout.tensors(), layout.options(), job.layout());
}

absl::Status GaveWayError(const JobId& id) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "epoch %d of job '%s' is over: the job had come to a halt, and another took its place",
      id.epoch, id.name));
}

void Finish(std::vector<Membership::EndedJoin> ended) {
  for (Membership::EndedJoin& join : ended) join.done(std::move(join.result));
}

}  // namespace

// Epochs are told apart across restarts too: they count up from the time.
Aggregator::Aggregator(const AggregatorOptions& options)
    : options_(options), last_epoch_(absl::ToUnixNanos(options.now())) {}

Aggregator::~Aggregator() { Drain(); }

uint64_t Aggregator::Join(const JoinRequest& request, JoinDone done) {
  const absl::Time now = options_.now();
  absl::StatusOr<Layout> layout = CheckJoin(request, options_);
  std::vector<Membership::EndedJoin> ended;
  std::shared_ptr<Job> replaced;
  uint64_t call = 0;
  {
    absl::MutexLock lock(&mutex_);
    call = ++last_call_;
    const absl::StatusOr<Entry*> entry =
        layout.ok() ? Admit(request, *std::move(layout), now, replaced) : layout.status();
    if (entry.ok()) {
      ended = (*entry)->membership.Join({request.rank(), request.incarnation()}, call,
                                        std::move(done), now);
    } else {
      RecordRefusal(request, entry.status());
      ended.push_back({std::move(done), entry.status()});
    }
  }
  if (replaced != nullptr) replaced->End(GaveWayError(replaced->id()));
  Finish(std::move(ended));
  return call;
}

absl::StatusOr<Aggregator::Entry*> Aggregator::Admit(const JoinRequest& request, Layout layout,
                                                     absl::Time now,
                                                     std::shared_ptr<Job>& replaced) {
  if (drained_) return ShuttingDownError();
  const Membership::Claim claim = {request.rank(), request.incarnation()};
  auto old = jobs_.find(request.job());
  if (old != jobs_.end()) {
    const Membership& membership = old->second.membership;
    const bool gives_way =
        membership.GivesWay(now, options_.idle_timeout) && !membership.Holds(claim);
    if (!gives_way) {
      absl::Status status = CheckMatches(request.world_size(), layout, *old->second.job);
      if (status.ok()) status = membership.CheckClaim(claim, now);
      if (!status.ok()) return status;
      return &old->second;
    }
  }
  if (!admitting_) return ShuttingDownError();
  if (old == jobs_.end() && jobs_.size() >= options_.limits.jobs) {
    old = FindGivingWay(now);
    if (old == jobs_.end()) {
      return LimitError("jobs", jobs_.size() + 1, options_.limits.jobs, "--max-jobs");
    }
  }
  if (old != jobs_.end()) {
    replaced = old->second.job;
    jobs_.erase(old);
  }
  return &CreateEntry(request, std::move(layout));
}

Aggregator::Entries::iterator Aggregator::FindGivingWay(absl::Time now) {
  auto found = jobs_.end();
  for (auto entry = jobs_.begin(); entry != jobs_.end(); ++entry) {
    const Membership& membership = entry->second.membership;
    if (!membership.GivesWay(now, options_.idle_timeout)) continue;
    if (found == jobs_.end() || membership.last_heard() < found->second.membership.last_heard()) {
      found = entry;
    }
  }
  return found;
}

Aggregator::Entry& Aggregator::CreateEntry(const JoinRequest& request, Layout layout) {
  JoinResponse welcome;
  welcome.set_epoch(++last_epoch_);
  welcome.set_layout_fingerprint(layout.Fingerprint());
  auto job =
      std::make_shared<Job>(JobId{request.job(), last_epoch_}, request.world_size(),
                            std::move(layout), ShardId{options_.shard, options_.shard_count});
  Entry entry = {std::move(job), Membership(request.world_size(), std::move(welcome))};
  return jobs_.emplace(request.job(), std::move(entry)).first->second;
}

void Aggregator::RecordRefusal(const JoinRequest& request, const absl::Status& status) {
  const auto entry = jobs_.find(request.job());
  if (entry == jobs_.end() || request.rank() >= entry->second.job->world_size()) return;
  entry->second.membership.RecordRefusal(request.rank(), std::string(status.message()));
}

void Aggregator::CancelJoin(uint64_t call, const absl::Status& reason) {
  std::vector<Membership::EndedJoin> ended;
  {
    absl::MutexLock lock(&mutex_);
    for (auto entry = jobs_.begin(); entry != jobs_.end() && ended.empty(); ++entry) {
      ended = entry->second.membership.Cancel(call, reason);
    }
  }
  Finish(std::move(ended));
}

void Aggregator::Exchange(Frame frame, ExchangeDone done) {
  const absl::Time now = options_.now();
  absl::StatusOr<std::shared_ptr<Job>> job = FindRunningJob(frame.header, now);
  if (!job.ok()) return done(job.status());
  (*job)->Exchange(std::move(frame), now, std::move(done));
}

absl::StatusOr<std::shared_ptr<Job>> Aggregator::FindRunningJob(const FrameHeader& header,
                                                                absl::Time now) {
  absl::MutexLock lock(&mutex_);
  if (drained_) return ShuttingDownError();
  const auto entry = jobs_.find(header.job());
  if (entry == jobs_.end()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("rank %d sent a frame for a job that is not here, '%s': it is over, or the "
                        "aggregator was started again",
                        header.rank(), header.job().substr(0, kMaxJobNameBytes)));
  }
  auto& [job, membership] = entry->second;
  if (header.epoch() != job->id().epoch) {
    return absl::FailedPreconditionError(
        absl::StrFormat("rank %d sent a frame of epoch %d of job '%s', but epoch %d is expected",
                        header.rank(), header.epoch(), header.job(), job->id().epoch));
  }
  if (!membership.complete()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("rank %d sent a frame of job '%s' before all of its ranks have joined",
                        header.rank(), header.job()));
  }
  membership.Hear(now);
  return job;
}

absl::Status Aggregator::Leave(const LeaveRequest& request) {
  std::shared_ptr<Job> job;
  {
    absl::MutexLock lock(&mutex_);
    if (drained_) return ShuttingDownError();
    const auto entry = jobs_.find(request.job());
    if (entry == jobs_.end()) return absl::OkStatus();
    job = entry->second.job;
    Membership& membership = entry->second.membership;
    if (request.epoch() != job->id().epoch) return absl::OkStatus();
    if (request.rank() >= job->world_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", request.rank(), " is not in [0, ", job->world_size(), ")"));
    }
    if (!membership.complete()) {
      return absl::FailedPreconditionError("not all ranks have joined yet");
    }
    membership.Leave(request.rank());
    if (membership.AllLeft()) jobs_.erase(entry);
  }
  job->End(absl::FailedPreconditionError(
      absl::StrFormat("rank %d has left job '%s'", request.rank(), request.job())));
  return absl::OkStatus();
}

StatusResponse Aggregator::Status(const StatusRequest& request) const {
  const absl::Time now = options_.now();
  StatusResponse response;
  response.set_shard(options_.shard);
  response.set_shard_count(options_.shard_count);
  std::vector<std::shared_ptr<const Job>> jobs;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, entry] : jobs_) {
      if (!request.job().empty() && name != request.job()) continue;
      entry.membership.FillStatus(*response.add_jobs());
      jobs.push_back(entry.job);
    }
  }
  for (size_t i = 0; i < jobs.size(); ++i) jobs[i]->FillStatus(now, *response.mutable_jobs(i));
  return response;
}

void Aggregator::StopAdmitting() {
  absl::MutexLock lock(&mutex_);
  admitting_ = false;
}

bool Aggregator::AwaitNoJobs(absl::Duration timeout) const {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(this, &Aggregator::HasNoJobs), timeout);
}

bool Aggregator::HasNoJobs() const {
  return std::all_of(jobs_.begin(), jobs_.end(),
                     [](const auto& entry) { return entry.second.membership.Deserted(); });
}

void Aggregator::Drain() {
  Entries jobs;
  {
    absl::MutexLock lock(&mutex_);
    admitting_ = false;
    drained_ = true;
    jobs.swap(jobs_);
  }
  for (auto& [name, entry] : jobs) {
    Finish(entry.membership.CancelAll(ShuttingDownError()));
    entry.job->End(ShuttingDownError());
  }
}

}  // namespace signpost
