#include "server/aggregator.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "failpoint/failpoint.h"
#include "log/log.h"
#include "proto/payload_pool.h"
#include "proto/try_again.h"
#include "proto/version.h"
#include "server/membership.h"
#include "trace/span.h"

namespace signpost {
namespace {

// A snapshot that takes longer is worth a line.
constexpr absl::Duration kSlowSnapshot = absl::Seconds(10);

std::string InSeconds(absl::Duration duration) {
  return absl::StrFormat("%.1f s", absl::ToDoubleSeconds(duration));
}

absl::Status ShuttingDownError() {
  return absl::UnavailableError("this aggregator is shutting down");
}

// There will be room.
absl::Status WaitForOthersError(const absl::Status& room,
                                const Membership::Connections& connections) {
  return TryAgain(absl::ResourceExhaustedError(absl::StrFormat(
      "%s; it passes when jobs of other programs have ended, or nothing has come for %s from one "
      "whose processes are gone, or for %s from any. `signpost status` shows them",
      room.message(), absl::FormatDuration(connections.grace),
      absl::FormatDuration(connections.idle_timeout))));
}

// A program's jobs are its SIGNPOST_JOB and what is named after it, behind a slash: "bert",
// "bert/optimizer-1".
bool AreOfOneProgram(absl::string_view job, absl::string_view other) {
  return job.substr(0, job.find('/')) == other.substr(0, other.find('/'));
}

absl::Status RoomIsUsedError(uint64_t used, uint64_t reserved, uint64_t limit) {
  return TryAgain(absl::ResourceExhaustedError(absl::StrFormat(
      "jobs need %d bytes of %d, which --max-held-bytes of `signpost aggregator` sets, and frames "
      "that can wait take %d: the frame is to be sent again",
      reserved, limit, used)));
}

// Where a job's rounds begin: the later, the later it was saved. At {0, 0} one that starts anew.
using Beginning = std::pair<uint64_t, uint64_t>;

Beginning BeginningOf(const JobOptions& options) {
  return {options.first_step(), options.local_steps()};
}

std::string Describe(const Beginning& beginning) {
  const auto [first_step, local_steps] = beginning;
  if (local_steps == 0) return absl::StrCat(first_step);
  return absl::StrFormat("%d with local_steps %d", first_step, local_steps);
}

// A new process may join what comes next under that name.
absl::Status OverError(const JobId& id, absl::string_view why) {
  return TryAgain(absl::FailedPreconditionError(
      absl::StrFormat("epoch %d of job '%s' is over: %s", id.epoch, id.name, why)));
}

constexpr absl::string_view kFromCheckpoint = "from the newest checkpoint if there is one";

// To the others of a job whose rank has come anew.
absl::Status SucceededError(const JobId& id, uint32_t rank) {
  return OverError(
      id, absl::StrFormat("the process of rank %d was gone, and its state with it, and another has "
                          "come. Start this rank again as well, %s",
                          rank, kFromCheckpoint));
}

// To those who wait for a job to begin, when another rank begins it later.
absl::Status BeginsLaterError(const JobId& id, const Beginning& beginning, uint32_t rank,
                              const Beginning& later) {
  return OverError(id,
                   absl::StrFormat("its first_step was to be %s, and that of rank %d is %s, of "
                                   "what was saved later. Start this rank again, %s",
                                   Describe(beginning), rank, Describe(later), kFromCheckpoint));
}

// To those who wait to come back to a job.
absl::Status AllGoneError(const JobId& id) {
  return OverError(id, absl::StrCat("all of its processes are gone, and its state with them. Start "
                                    "this rank again, ",
                                    kFromCheckpoint));
}

absl::Status GaveWayError(const JobId& id) {
  return OverError(id, "the job had come to a halt, and another took its place");
}

// That a process is gone, nothing tells.
constexpr absl::Duration kLookInterval = absl::Seconds(1);

void Call(Callbacks callbacks) {
  for (auto& callback : callbacks) callback();
}

}  // namespace

// Epochs are told apart across restarts too: they count up from the time.
Aggregator::Aggregator(const AggregatorOptions& options, StateDir* state_dir)
    : options_(options),
      connections_({options.is_connected, 2 * options.restart_grace, options.idle_timeout}),
      state_dir_(state_dir),
      first_epoch_(absl::ToUnixNanos(options.now())),
      last_epoch_(first_epoch_) {}

Aggregator::~Aggregator() { Drain(); }

absl::Status Aggregator::Restore(StateDir::Recovered recovered) {
  absl::MutexLock lock(&mutex_);
  warnings_ = std::move(recovered.warnings);
  given_up_epochs_ = std::move(recovered.given_up);
  known_epochs_ = std::move(recovered.known);
  for (JobState& state : recovered.jobs) {
    const JobId id = state.id;
    known_epochs_.push_back(id.epoch);
    last_epoch_ = std::max(last_epoch_, id.epoch);
    const OpenSteps saved_steps = OpenStepsOf(state);
    const std::vector<uint64_t> incarnations = state.incarnations;
    const std::vector<uint32_t> left_ranks = state.left_ranks;
    const std::vector<uint32_t> given_up_ranks = state.given_up_ranks;
    const std::vector<uint32_t> returning_ranks = state.returning_ranks;
    absl::StatusOr<std::unique_ptr<Job>> job =
        Job::Restore(std::move(state), {options_.shard, options_.shard_count}, &bell_, generation(),
                     options_.now());
    if (!job.ok()) return job.status();
    for (const uint32_t rank : left_ranks) {
      if (!(*job)->Leave(rank)) (*job)->End(LeftError(rank, id.name));
    }
    for (const uint32_t rank : given_up_ranks) (*job)->GiveUp(rank, incarnations[rank]);
    for (const uint32_t rank : returning_ranks) (*job)->SetCameBack(rank);
    Membership membership = Membership::Restore(incarnations, left_ranks, (*job)->min_workers(),
                                                ServedJob::WelcomeTo(**job, generation()),
                                                connections_, options_.now());
    ServedJob served(*std::move(job), generation(), {bell_, late_bell_}, std::move(membership),
                     saved_steps);
    if (served.AllLeft()) {
      Forget(id.epoch);
      continue;
    }
    // Epochs ascend: of a name that was used again, the later job stays.
    if (const auto earlier = jobs_.find(id.name); earlier != jobs_.end()) {
      Forget(earlier->second.job()->id().epoch);
      jobs_.erase(earlier);
    }
    log::WriteEvent(log::Level::kInfo, "goes on with a job, from its snapshot",
                    {.job = id.name, .step = served.job()->open_step(), .shard = options_.shard});
    jobs_.emplace(id.name, std::move(served));
  }
  return absl::OkStatus();
}

uint64_t Aggregator::Join(const JoinRequest& request, JoinDone done, std::string peer) {
  Reach(Failpoint::kJoinReceived);
  const absl::Time now = options_.now();
  absl::StatusOr<Applicant> applicant =
      CheckJoin(request, std::move(peer), {options_.shard, options_.shard_count}, options_.limits);
  const Membership::Claim claim = applicant.ok() ? applicant->claim : Membership::Claim();
  Callbacks callbacks;
  uint64_t call = 0;
  {
    absl::MutexLock lock(&mutex_);
    call = ++last_call_;
    const absl::StatusOr<ServedJob*> job =
        applicant.ok() ? Admit(*std::move(applicant), now, callbacks) : applicant.status();
    callbacks.push_back([this] { MakeRoom(); });
    if (!job.ok()) {
      RecordRefusal(request, job.status());
      Finish(std::move(done), job.status(), callbacks);
    } else if ((*job)->Join(claim, call, std::move(done), now, callbacks)) {
      callbacks.push_back([job = request.job(), shard = options_.shard] {
        log::WriteEvent(log::Level::kInfo, "a job begins: all of its ranks have joined",
                        {.job = job, .shard = shard});
      });
    }
  }
  Call(std::move(callbacks));
  return call;
}

absl::StatusOr<ServedJob*> Aggregator::Admit(Applicant applicant, absl::Time now,
                                             Callbacks& callbacks) {
  if (drained_) return ShuttingDownError();
  const auto old = jobs_.find(applicant.job);
  absl::Status why_over;
  if (old != jobs_.end()) {
    ServedJob& job = old->second;
    why_over = WhyOver(applicant, job, now);
    if (why_over.ok()) {
      absl::Status status = CheckMayJoin(applicant, job, now);
      if (!status.ok()) return status;
      return &job;
    }
  }
  if (!admitting_) return ShuttingDownError();
  std::vector<Jobs::iterator> leaving;
  if (old != jobs_.end()) leaving.push_back(old);
  const uint64_t reserved =
      ReservedBytes(applicant.world_size, applicant.layout, {options_.shard, options_.shard_count});
  absl::Status room;
  while (room = CheckRoom(applicant, reserved, leaving), !room.ok()) {
    leaving.push_back(FindGivingWay(now, leaving));
    if (leaving.back() != jobs_.end()) continue;
    leaving.pop_back();
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
      // One that nobody is in gives way soon, whosever it was.
      if (!AreOfOneProgram(job->first, applicant.job) || job->second.NobodyIsThere(now)) {
        leaving.push_back(job);
      }
    }
    const bool passes = CheckRoom(applicant, reserved, leaving).ok();
    return passes ? WaitForOthersError(room, connections_) : room;
  }
  for (const Jobs::iterator job : leaving) {
    LetGo(job, job == old ? why_over : GaveWayError(job->second.job()->id()), callbacks);
  }
  return &AddJob(std::move(applicant));
}

absl::Status Aggregator::WhyOver(const Applicant& applicant, const ServedJob& served,
                                 absl::Time now) const {
  const Membership::Claim& claim = applicant.claim;
  const Job& job = *served.job();
  if (served.IsSucceeded(claim, now)) return SucceededError(job.id(), claim.rank);
  const bool holds = served.membership().Holds(claim);
  if (served.GivesWay(now) && !holds) return GaveWayError(job.id());
  const Beginning jobs = BeginningOf(job.layout().options());
  const Beginning theirs = BeginningOf(applicant.layout.options());
  const bool matches = CheckMatchesButBeginning(applicant, job).ok();
  if (served.membership().complete()) {
    // Where no process is left, one of other options begins the job with them.
    const bool is_in_the_way = matches || holds || !served.membership().AllGone(now);
    return is_in_the_way ? absl::OkStatus() : GaveWayError(job.id());
  }
  if (theirs <= jobs || !matches) return absl::OkStatus();
  return BeginsLaterError(job.id(), jobs, claim.rank, theirs);
}

absl::Status Aggregator::CheckMayJoin(const Applicant& applicant, const ServedJob& served,
                                      absl::Time now) const {
  const Membership::Claim& claim = applicant.claim;
  const Job& job = *served.job();
  const Membership& membership = served.membership();
  const bool returns = served.Returns(claim);
  const bool begins = !returns && (!membership.complete() || membership.Holds(claim));
  absl::Status status =
      begins ? CheckMatches(applicant, job) : CheckMatchesButBeginning(applicant, job);
  // A checkpoint may have been committed since it looked for the newest. Who found none would find
  // none again.
  const Beginning theirs = BeginningOf(applicant.layout.options());
  const bool is_older = theirs > Beginning() && theirs < BeginningOf(job.layout().options());
  if (!status.ok() && begins && is_older && CheckMatchesButBeginning(applicant, job).ok()) {
    status = TryAgain(status);
  }
  if (status.ok() && !returns) status = membership.CheckClaim(claim, now);
  return status;
}

absl::Status Aggregator::CheckRoom(const Applicant& applicant, uint64_t reserved,
                                   absl::Span<const Jobs::iterator> leaving) {
  uint64_t jobs = 1, parameters = applicant.layout.elements(),
           frames = FramesOf(applicant.world_size, applicant.layout);
  for (auto served = jobs_.begin(); served != jobs_.end(); ++served) {
    if (absl::c_linear_search(leaving, served)) continue;
    const Job& job = *served->second.job();
    ++jobs;
    parameters += job.layout().elements();
    frames += FramesOf(job.world_size(), job.layout());
    reserved += job.reserved_bytes();
  }
  const AggregatorLimits& limits = options_.limits;
  if (jobs > limits.jobs) {
    const absl::Status status = LimitError("jobs", jobs, limits.jobs, "--max-jobs");
    return WithMessage(status, absl::StrCat(status.message(),
                                            ". Each optimizer and each name of an all_reduce is a "
                                            "job until all ranks call its leave() or end"));
  }
  if (parameters > limits.parameters) {
    return LimitError("parameters of all jobs", parameters, limits.parameters, "--max-parameters");
  }
  if (frames > limits.frames) {
    return LimitError("frames of a step of all jobs", frames, limits.frames, "--max-frames");
  }
  if (reserved > limits.held_bytes) {
    return LimitError("bytes that all jobs need to go on", reserved, limits.held_bytes,
                      "--max-held-bytes");
  }
  return absl::OkStatus();
}

Aggregator::Jobs::iterator Aggregator::FindGivingWay(absl::Time now,
                                                     absl::Span<const Jobs::iterator> others) {
  return FindSilent([&](const ServedJob& served) {
    const auto is_it = [&](Jobs::iterator other) { return &other->second == &served; };
    return served.GivesWay(now) && absl::c_none_of(others, is_it);
  });
}

Aggregator::Jobs::iterator Aggregator::FindSilent(
    absl::FunctionRef<bool(const ServedJob& job)> is_one) {
  auto found = jobs_.end();
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    if (!is_one(job->second)) continue;
    const absl::Time heard = job->second.membership().last_heard();
    if (found == jobs_.end() || heard < found->second.membership().last_heard()) found = job;
  }
  return found;
}

void Aggregator::LetGo(Jobs::iterator job, absl::Status why, Callbacks& callbacks) {
  Forget(job->second.job()->id().epoch);
  callbacks.push_back(
      [job = std::move(job->second), why = std::move(why)]() mutable { job.End(why); });
  jobs_.erase(job);
}

ServedJob& Aggregator::AddJob(Applicant applicant) {
  auto job = std::make_shared<Job>(
      JobId{applicant.job, ++last_epoch_}, applicant.world_size, std::move(applicant.layout),
      ShardId{options_.shard, options_.shard_count}, state_dir_ == nullptr ? nullptr : &bell_);
  late_bell_.Ring();
  return jobs_
      .emplace(applicant.job,
               ServedJob(std::move(job), generation(), {bell_, late_bell_}, connections_))
      .first->second;
}

void Aggregator::RecordRefusal(const JoinRequest& request, const absl::Status& status) {
  const auto job = jobs_.find(request.job());
  if (job == jobs_.end()) return;
  job->second.RecordRefusal(request.rank(), status);
}

void Aggregator::CancelJoin(uint64_t call, const absl::Status& reason) {
  Callbacks callbacks;
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [name, job] : jobs_) job.CancelJoin(call, reason, callbacks);
  }
  Call(std::move(callbacks));
}

void Aggregator::Exchange(Frame frame, ExchangeDone done, std::string peer) {
  Reach(Failpoint::kFrameReceived);
  const absl::Time now = options_.now();
  std::shared_ptr<Job> job;
  absl::StatusOr<Room::Offer> offer;
  {
    absl::ReleasableMutexLock lock(&mutex_);
    const absl::StatusOr<ServedJob*> served = FindRunningJob(frame.header, now, std::move(peer));
    if (!served.ok()) {
      lock.Release();
      return done(served.status());
    }
    job = (*served)->job();
    offer = OfferRoom(**served);
  }
  if (!offer.ok() && IsContribution(frame.header.codec())) {
    MakeRoom();  // of what could not be given up when the job began
    return done(offer.status());
  }
  if (job->Exchange(std::move(frame), now, std::move(done), offer.value_or(Room::Offer()))) {
    late_bell_.Ring();
  }
}

uint64_t Aggregator::ReservedByJobs() const {
  uint64_t bytes = 0;
  for (const auto& [name, job] : jobs_) bytes += job.job()->reserved_bytes();
  return bytes;
}

absl::Status Aggregator::CheckRoomIsLeft() const {
  const uint64_t used = room_.taken(), reserved = ReservedByJobs();
  const uint64_t limit = options_.limits.held_bytes;
  if (used == 0 || used + reserved <= limit) return absl::OkStatus();
  return RoomIsUsedError(used, reserved, limit);
}

void Aggregator::MakeRoom() {
  std::vector<std::shared_ptr<Job>> jobs;
  absl::Status reason;
  {
    absl::MutexLock lock(&mutex_);
    if (reason = CheckRoomIsLeft(); reason.ok()) return;
    for (const auto& [name, job] : jobs_) jobs.push_back(job.job());
  }
  for (const std::shared_ptr<Job>& job : jobs) job->GiveRoomBack(reason);

  // What an earlier process may have decided cannot be given back, and may be of a job that nobody
  // goes on with.
  Callbacks callbacks;
  {
    absl::MutexLock lock(&mutex_);
    if (CheckRoomIsLeft().ok()) return;
    std::vector<Jobs::iterator> others;
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
      if (!job->second.job()->waits_with_room()) others.push_back(job);
    }
    const auto job = FindGivingWay(options_.now(), others);
    if (job == jobs_.end()) return;
    LetGo(job, GaveWayError(job->second.job()->id()), callbacks);
  }
  Call(std::move(callbacks));
}

absl::StatusOr<Room::Offer> Aggregator::OfferRoom(ServedJob& job) {
  const uint64_t limit = options_.limits.held_bytes;
  if (limit == AggregatorLimits::kUnlimited) return Room::Offer();
  const uint64_t reserved = ReservedByJobs();
  if (!job.has_room) {
    if (absl::Status status = CheckRoomIsLeft(); !status.ok()) return status;
    job.has_room = true;
  }
  // Answers on their way to ranks that do not read them are nobody's.
  const bool has_any = PayloadPool::Global().used_bytes() <= limit;
  return Room::Offer{&room_, has_any ? limit - std::min(limit, reserved) : 0, limit};
}

absl::StatusOr<ReadErrorResponse> Aggregator::ReadError(const ReadErrorRequest& request,
                                                        std::string peer) {
  FrameHeader sender;
  sender.set_job(request.job());
  sender.set_epoch(request.epoch());
  sender.set_rank(request.rank());
  sender.set_incarnation(request.incarnation());
  std::shared_ptr<Job> job;
  {
    absl::MutexLock lock(&mutex_);
    const absl::StatusOr<ServedJob*> served =
        FindRunningJob(sender, options_.now(), std::move(peer));
    if (!served.ok()) return served.status();
    job = (*served)->job();
  }
  return job->ReadError(request);
}

absl::StatusOr<ServedJob*> Aggregator::FindRunningJob(const FrameHeader& header, absl::Time now,
                                                      std::string peer) {
  if (drained_) return ShuttingDownError();
  const auto served = jobs_.find(header.job());
  if (served == jobs_.end()) return NotHereError(header);
  const std::shared_ptr<Job>& job = served->second.job();
  const Membership& membership = served->second.membership();
  if (header.epoch() < job->id().epoch) {
    return TryAgain(absl::FailedPreconditionError(
        absl::StrFormat("epoch %d of job '%s' is over, and epoch %d has begun. Start rank %d again "
                        "as well, from the "
                        "newest checkpoint if there is one",
                        header.epoch(), header.job(), job->id().epoch, header.rank())));
  }
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
  const Membership::Claim sender = {header.rank(), header.incarnation(), std::move(peer)};
  if (header.rank() < job->world_size() && !membership.Holds(sender)) {
    return TryAgain(absl::FailedPreconditionError(absl::StrFormat(
        "another process has taken rank %d of job '%s': this one had been away for too long",
        header.rank(), header.job())));
  }
  if (header.generation() > generation()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "rank %d has heard from generation %d of this shard, and this process is generation %d: "
        "another has replaced it, and it must be stopped",
        header.rank(), header.generation(), generation()));
  }
  served->second.Hear(sender, now);
  return &served->second;
}

absl::Status Aggregator::NotHereError(const FrameHeader& header) const {
  const std::string what =
      absl::StrFormat("rank %d sent a frame for a job that is not here, '%s': ", header.rank(),
                      header.job().substr(0, kMaxJobNameBytes));
  const auto is_in = [&](const std::vector<uint64_t>& epochs) {
    return absl::c_linear_search(epochs, header.epoch());
  };
  absl::string_view why;
  if (is_in(given_up_epochs_)) {
    why =
        "what this aggregator had written down of it cannot be read, and --allow-error-reset has "
        "given it up.";
  } else if ((header.epoch() > first_epoch_ && header.epoch() <= last_epoch_) ||
             is_in(known_epochs_)) {
    return TryAgain(absl::FailedPreconditionError(absl::StrCat(what, "it is over")));
  } else {
    why = state_dir_ == nullptr
              ? "this aggregator was started after it had begun, and has no --state-dir."
              : "this aggregator was started after it had begun, and its state directory does not "
                "have it. Has it lost its volume, or been given another one?";
  }
  return absl::DataLossError(absl::StrCat(
      what, why,
      " The job cannot go on; start it again, from its newest checkpoint if it has one"));
}

void Aggregator::Leave(const LeaveRequest& request, LeaveDone done) {
  Reach(Failpoint::kLeaveReceived);
  Callbacks callbacks;
  {
    absl::MutexLock lock(&mutex_);
    const auto job = jobs_.find(request.job());
    const absl::StatusOr<bool> member = IsMember(job, request);
    if (member.ok() && *member) {
      job->second.Leave(request, std::move(done), callbacks);
      ForgetIfAllLeft(job, callbacks);
    } else {
      Finish(std::move(done), member.status(), callbacks);
    }
  }
  Call(std::move(callbacks));
}

// False when the job, or this epoch of it, is over.
absl::StatusOr<bool> Aggregator::IsMember(Jobs::iterator served,
                                          const LeaveRequest& request) const {
  if (drained_) return ShuttingDownError();
  if (served == jobs_.end()) return false;
  const std::shared_ptr<Job>& job = served->second.job();
  const Membership& membership = served->second.membership();
  if (request.epoch() != job->id().epoch) return false;
  if (request.rank() >= job->world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank(), " is not in [0, ", job->world_size(), ")"));
  }
  if (!membership.complete()) {
    return absl::FailedPreconditionError("not all ranks have joined yet");
  }
  if (!membership.Holds({request.rank(), request.incarnation()})) {
    return TryAgain(absl::FailedPreconditionError(absl::StrFormat(
        "another process has taken rank %d of job '%s'", request.rank(), request.job())));
  }
  const uint64_t open_step = job->open_step();
  if (state_dir_ == nullptr || request.steps() <= open_step) return true;
  return absl::AbortedError(
      absl::StrFormat("rank %d has completed %d steps of job '%s', but this aggregator, started "
                      "again since, knows of %d: it must have the frames of the others first",
                      request.rank(), request.steps(), request.job(), open_step));
}

void Aggregator::ForgetIfAllLeft(Jobs::iterator job, Callbacks& callbacks) {
  if (!job->second.AllLeft()) return;
  Forget(job->second.job()->id().epoch);
  callbacks.push_back([name = job->first, shard = options_.shard] {
    log::WriteEvent(log::Level::kInfo, "a job is over: all of its ranks have left",
                    {.job = name, .shard = shard});
  });
  job->second.EndReturning(
      TryAgain(absl::FailedPreconditionError("the job is over: all of its ranks have left")),
      callbacks);
  jobs_.erase(job);
}

StatusResponse Aggregator::Status(const StatusRequest& request) const {
  StatusResponse response;
  response.set_shard(options_.shard);
  response.set_shard_count(options_.shard_count);
  response.set_version(kVersion);
  // They may be about other jobs.
  if (request.job().empty()) {
    absl::MutexLock lock(&mutex_);
    for (const std::string& warning : warnings_) {
      response.add_warnings(state_dir_->WithoutPath(warning));
    }
  }
  for (JobMetrics& job : MetricsOf(request.job())) *response.add_jobs() = std::move(job.status);
  return response;
}

void Aggregator::FillStatus(const ServedJob& job, absl::Time now, JobStatus& status) const {
  job.membership().FillStatus(now, status);
  const absl::Status error = job.state_error();
  if (!error.ok()) status.set_state_error(state_dir_->WithoutPath(error.message()));
  status.set_generation(generation());
  if (const absl::Time heard = job.membership().last_heard();
      heard < now && job.NobodyIsThere(now)) {
    status.set_silent_us(absl::ToInt64Microseconds(now - heard));
  }
  if (job.joins_held_since() < now) {
    status.set_held_us(absl::ToInt64Microseconds(now - job.joins_held_since()));
  }
  if (writing_ && writing_->job.epoch == job.job()->id().epoch && writing_->since < now) {
    status.set_snapshot_us(absl::ToInt64Microseconds(now - writing_->since));
  }
}

AggregatorMetrics Aggregator::Metrics() const {
  return {options_.shard, options_.shard_count, generation(), MetricsOf("")};
}

std::vector<JobMetrics> Aggregator::MetricsOf(absl::string_view name) const {
  const absl::Time now = options_.now();
  std::vector<JobMetrics> metrics;
  std::vector<std::shared_ptr<const Job>> jobs;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [job_name, served] : jobs_) {
      if (!name.empty() && job_name != name) continue;
      JobMetrics& job = metrics.emplace_back();
      FillStatus(served, now, job.status);
      if (state_dir_ != nullptr) job.snapshots = served.snapshots();
      jobs.push_back(served.job());
    }
  }
  for (size_t i = 0; i < jobs.size(); ++i) jobs[i]->FillMetrics(now, metrics[i]);
  return metrics;
}

void Aggregator::StopAdmitting() {
  absl::MutexLock lock(&mutex_);
  admitting_ = false;
}

bool Aggregator::AwaitNoJobs(absl::Duration timeout) const {
  const absl::Condition has_no_jobs(this, &Aggregator::HasNoJobs);
  absl::MutexLock lock(&mutex_);
  for (absl::Duration left = timeout; left > kLookInterval; left -= kLookInterval) {
    if (mutex_.AwaitWithTimeout(has_no_jobs, kLookInterval)) return true;
    timeout = left - kLookInterval;
  }
  return mutex_.AwaitWithTimeout(has_no_jobs, timeout);
}

bool Aggregator::HasNoJobs() const {
  const absl::Time now = options_.now();
  return absl::c_all_of(jobs_, [now](const auto& job) { return job.second.IsAbandoned(now); });
}

void Aggregator::Drain() {
  Jobs jobs = TakeJobs();
  for (auto& [name, job] : jobs) job.End(ShuttingDownError());
}

Aggregator::Jobs Aggregator::TakeJobs() {
  absl::MutexLock lock(&mutex_);
  admitting_ = false;
  drained_ = true;
  return std::exchange(jobs_, {});
}

absl::Status Aggregator::Suspend() {
  Reach(Failpoint::kSuspendBegun);
  absl::MutexLock state_lock(&state_mutex_);
  Jobs jobs = TakeJobs();
  absl::Status first_error = RemoveForgotten();
  for (auto& [name, job] : jobs) {
    // Rounds first: once a state is written, nothing may close any more.
    job.End(ShuttingDownError());
    if (!job.is_saved()) continue;  // nobody was welcomed yet
    Reach(Failpoint::kSuspendHalfDone);
    DueSnapshot due = job.Snapshot();
    due.with_answers = true;
    first_error.Update(Save(due).status());
  }
  return first_error;
}

void Aggregator::Forget(uint64_t epoch) {
  if (state_dir_ == nullptr) return;
  forgotten_epochs_.push_back(epoch);
  bell_.Ring();
}

absl::Status Aggregator::RemoveForgotten() {
  std::vector<uint64_t> epochs;
  {
    absl::MutexLock lock(&mutex_);
    epochs.swap(forgotten_epochs_);
  }
  absl::Status first_error;
  std::vector<uint64_t> left;
  for (const uint64_t epoch : epochs) {
    const absl::Status status = state_dir_->Forget(epoch);
    if (!status.ok()) left.push_back(epoch);
    first_error.Update(status);
  }
  if (left.empty()) return first_error;
  absl::MutexLock lock(&mutex_);
  absl::c_copy(left, std::back_inserter(forgotten_epochs_));
  return first_error;
}

absl::Status Aggregator::TakeSnapshots() {
  absl::MutexLock state_lock(&state_mutex_);
  absl::Status first_error = RemoveForgotten();
  std::vector<DueSnapshot> all_due;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, job] : jobs_) {
      if (job.IsSnapshotDue()) all_due.push_back(job.Snapshot());
    }
  }
  for (const DueSnapshot& due : all_due) {
    const absl::Time begin = options_.now();
    const absl::StatusOr<OpenSteps> saved = [&] {
      trace::Event event = {.kind = trace::Kind::kSnapshot, .epoch = due.job->id().epoch};
      event.job = trace::LabelOf(due.job->id().name);
      const trace::Span span(event);
      return Save(due);
    }();
    first_error.Update(saved.status());
    if (!saved.ok()) {
      log::WriteEvent(log::Level::kWarning,
                      absl::StrCat("a snapshot has failed: ", saved.status().message()),
                      {.job = due.job->id().name, .shard = options_.shard});
    }
    SetSaved(due, saved, options_.now() - begin);
  }
  if (absl::IsResourceExhausted(first_error)) MakeRoomOnDisk();
  return first_error;
}

void Aggregator::MakeRoomOnDisk() {
  const absl::Time now = options_.now();
  Callbacks callbacks;
  {
    absl::MutexLock lock(&mutex_);
    const auto job = FindSilent([now](const ServedJob& served) { return served.IsAbandoned(now); });
    if (job == jobs_.end()) return;
    const JobId& id = job->second.job()->id();
    log::WriteEvent(log::Level::kWarning,
                    "the disk is full: a job whose workers are all gone is forgotten",
                    {.job = id.name, .shard = options_.shard});
    LetGo(job, GaveWayError(id), callbacks);
  }
  Call(std::move(callbacks));
}

absl::Duration Aggregator::CloseLateRounds() {
  struct Due {
    std::shared_ptr<Job> job;
    std::set<uint32_t> gone;
  };
  std::vector<Due> jobs;
  absl::Duration shortest = absl::InfiniteDuration();
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = options_.now();
    for (const auto& [name, job] : jobs_) {
      if (job.job()->round_deadline() == absl::InfiniteDuration()) continue;
      shortest = std::min(shortest, job.job()->round_deadline());
      // Frames come when all ranks have been welcomed, which with a state directory takes a save.
      if (!job.membership().complete()) continue;
      jobs.push_back({job.job(), job.membership().GoneRanks(now)});
    }
  }
  for (auto& [job, gone] : jobs) {
    job->AskForStates(gone, options_.now());
    if (!job->LeaveOut(options_.restart_grace, std::move(gone), options_.now())) continue;
    absl::Status status;
    if (state_dir_ != nullptr) {
      status = state_dir_->SaveLateRounds(job->id().epoch, job->late_rounds());
      absl::MutexLock lock(&mutex_);
      const auto served = jobs_.find(job->id().name);
      if (served != jobs_.end() && served->second.job() == job) {
        served->second.SetLateRoundsSaved(status);
      }
    }
    if (status.ok()) job->SetLateRoundsDurable(options_.now());
  }
  absl::Duration next = shortest / 8;  // to which deadlines are kept
  Callbacks over, callbacks;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = options_.now();
    for (auto job = jobs_.begin(); job != jobs_.end();) {
      const auto it = job++;
      it->second.AdmitReturning(now, callbacks);
      if (!LetGoIfLongGone(it, now, over)) LetGoIfHalted(it, now, over);
    }
    if (!jobs_.empty()) next = std::min(next, std::max(options_.forget_after / 8, kLookInterval));
    const auto is_watched = [](const auto& job) { return job.second.IsToBeWatched(); };
    if (absl::c_any_of(jobs_, is_watched)) next = std::min(next, kLookInterval);
  }
  Call(std::move(over));
  Call(std::move(callbacks));
  return next;
}

bool Aggregator::LetGoIfLongGone(Jobs::iterator job, absl::Time now, Callbacks& over) {
  const ServedJob& served = job->second;
  const absl::Duration silent = now - served.membership().last_heard();
  if (silent < options_.forget_after || !served.NobodyIsThere(now)) return false;
  const std::string why = absl::StrFormat(
      "none of its processes has a connection, and nothing has come from them for "
      "%s (--forget-after)",
      absl::FormatDuration(absl::Trunc(silent, absl::Seconds(1))));
  over.push_back([name = job->first, shard = options_.shard, why] {
    log::Write(log::Level::kWarning, "signpost aggregator",
               absl::StrFormat("job '%s' is forgotten: %s", name, why),
               {.job = name, .shard = shard});
  });
  LetGo(job, OverError(served.job()->id(), why), over);
  return true;
}

void Aggregator::LetGoIfHalted(Jobs::iterator job, absl::Time now, Callbacks& over) {
  ServedJob& served = job->second;
  if (!served.membership().complete()) return;
  const JobId& id = served.job()->id();
  if (const std::optional<uint32_t> rank = served.FindSucceededRank(now)) {
    return LetGo(job, SucceededError(id, *rank), over);
  }
  const ServedJob::Halt halt = served.FindHalt(now);
  if (halt == ServedJob::Halt::kWithThoseWhoWait) {
    LetGo(job, AllGoneError(id), over);
  } else if (halt == ServedJob::Halt::kAtItsEnd) {
    log::WriteEvent(log::Level::kInfo, "a job is over: all of its ranks have left or are gone",
                    {.job = id.name, .shard = options_.shard});
    LetGo(job, OverError(id, "all of its ranks have left or are gone"), over);
  }
}

absl::StatusOr<OpenSteps> Aggregator::Save(const DueSnapshot& due) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = Writing{due.job->id(), options_.now()};
  }
  absl::StatusOr<OpenSteps> saved = Write(due);
  std::optional<Writing> written;
  {
    absl::MutexLock lock(&mutex_);
    written.swap(writing_);
  }
  if (written->is_told) {
    Log(log::Level::kInfo, *written,
        absl::StrCat(saved.ok() ? "was written in " : "has failed after ",
                     InSeconds(options_.now() - written->since)));
  }
  return saved;
}

void Aggregator::TellOfSlowSnapshot() {
  const absl::Time now = options_.now();
  std::optional<Writing> slow;
  {
    absl::MutexLock lock(&mutex_);
    if (!writing_ || writing_->is_told || now <= writing_->since + kSlowSnapshot) return;
    writing_->is_told = true;
    slow = writing_;
  }
  // Without the lock: standard error may go to the same disk.
  const absl::Duration taken = now - slow->since;
  Log(log::Level::kWarning, *slow,
      absl::StrCat(
          "has been under way for ", InSeconds(taken),
          ": its disk is slow, or hangs. Rounds go on until workers would have to keep too "
          "many frames, and then wait"));
}

void Aggregator::Log(log::Level level, const Writing& writing, absl::string_view what) const {
  log::Write(level, "signpost aggregator",
             absl::StrFormat("the snapshot of job '%s' in %s %s", writing.job.name,
                             state_dir_->Describe(), what),
             {.job = writing.job.name, .shard = options_.shard});
}

absl::StatusOr<OpenSteps> Aggregator::Write(const DueSnapshot& due) {
  // Before anything is written.
  if (absl::Status status = due.job->CheckCanBeSaved(); !status.ok()) return status;
  JobState state = due.job->Describe();
  state.incarnations = due.incarnations;
  state.left_ranks = due.left_ranks;
  state.given_up_ranks = due.given_up_ranks;
  state.returning_ranks = due.returning_ranks;
  OpenSteps steps;
  const auto save = [&](uint32_t chunk, ChunkState& saved) {
    absl::Status status = due.job->SaveChunk(chunk, due.with_answers, saved);
    if (status.ok()) steps[chunk] = saved.open_step;
    return status;
  };
  const absl::Status status = state_dir_->Save(state, {due.job->owned_chunks(), save});
  if (!status.ok()) return status;
  return steps;
}

void Aggregator::SetSaved(const DueSnapshot& due, const absl::StatusOr<OpenSteps>& saved,
                          absl::Duration duration) {
  Callbacks callbacks;
  OpenSteps durable;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = jobs_.find(due.job->id().name);
    if (found == jobs_.end() || found->second.job() != due.job) return Forget(due.job->id().epoch);
    durable = found->second.SetSaved(due, saved, duration, callbacks);
    ForgetIfAllLeft(found, callbacks);
  }
  due.job->SetDurable(durable, options_.now());
  Reach(Failpoint::kSnapshotAnnounced);
  Call(std::move(callbacks));
}

}  // namespace signpost
