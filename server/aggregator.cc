#include "server/aggregator.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "failpoint/failpoint.h"
#include "log/log.h"
#include "proto/custom_codec.h"
#include "proto/payload_pool.h"
#include "proto/try_again.h"
#include "proto/version.h"
#include "trace/span.h"

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

// Of a step. Each has a place in memory, whatever a chunk's size.
uint64_t FramesOf(uint32_t world_size, const Layout& layout) {
  return uint64_t{world_size} * layout.chunks().size();
}

absl::Status RoomIsUsedError(uint64_t used, uint64_t reserved, uint64_t limit) {
  return TryAgain(absl::ResourceExhaustedError(absl::StrFormat(
      "jobs need %d bytes of %d, which --max-held-bytes of `signpost aggregator` sets, and frames "
      "that can wait take %d: the frame is to be sent again",
      reserved, limit, used)));
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

constexpr uint64_t kMaxRoundDeadlineUs = uint64_t{24} * 3600 * 1'000'000;

absl::Status CheckLateness(const JoinRequest& request) {
  const JobOptions& options = request.options();
  if (options.min_workers() > request.world_size()) {
    return absl::InvalidArgumentError(absl::StrFormat("option min_workers is %d, of %d workers",
                                                      options.min_workers(), request.world_size()));
  }
  if (options.round_deadline_us() != 0 &&
      (options.round_deadline_us() < 1000 || options.round_deadline_us() > kMaxRoundDeadlineUs)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("option round_deadline_us is %d; a deadline is between a millisecond and a "
                        "day",
                        options.round_deadline_us()));
  }
  if ((options.min_workers() == 0) != (options.round_deadline_us() == 0)) {
    return absl::InvalidArgumentError(
        "options min_workers and round_deadline_us go together: set both, or neither");
  }
  return absl::OkStatus();
}

// The layout that the request asks for, unless the request is malformed or over a limit. Looks at
// no state.
absl::StatusOr<Layout> CheckJoin(const JoinRequest& request, const AggregatorOptions& options) {
  if (absl::Status status = CheckIdentity(request, options); !status.ok()) return status;
  if (absl::Status status = CheckLateness(request); !status.ok()) return status;
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
  if (const uint64_t frames = FramesOf(request.world_size(), *layout); frames > limits.frames) {
    return LimitError("frames of a step", frames, limits.frames, "--max-frames");
  }
  if (request.options().has_custom_codec()) {
    absl::Status status =
        CheckCustomCodec(request.options().custom_codec(), request.options().block_elements());
    if (!status.ok()) return status;
  }
  uint64_t payload_bytes = 0;
  for (uint32_t chunk = 0; chunk < layout->chunks().size(); ++chunk) {
    payload_bytes = std::max(payload_bytes, LargestPayload(*layout, chunk));
    // Of ranks that come back.
    if (request.options().min_workers() > 0) {
      payload_bytes = std::max(payload_bytes, layout->PayloadBytes(STATE, chunk));
    }
  }
  if (payload_bytes > limits.payload_bytes) {
    return LimitError("bytes of a frame", payload_bytes, limits.payload_bytes,
                      "--max-message-bytes");
  }
  return layout;
}

// `returns`: what the options say of the job's start is not compared.
absl::Status CheckMatches(uint32_t world_size, const Layout& layout, bool returns, const Job& job) {
  if (world_size != job.world_size()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the world size is %d here but %d in the job", world_size, job.world_size()));
  }
  JobOptions options = layout.options();
  if (returns) {
    options.set_parameters_crc32c(job.layout().options().parameters_crc32c());
    options.set_first_step(job.layout().options().first_step());
  }
  return CheckSameJob(layout.tensors(), options, job.layout());
}

absl::Status GaveWayError(const JobId& id) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "epoch %d of job '%s' is over: the job had come to a halt, and another took its place",
      id.epoch, id.name));
}

JoinResponse WelcomeTo(const Job& job, uint64_t generation) {
  JoinResponse welcome;
  welcome.set_generation(generation);
  welcome.set_epoch(job.id().epoch);
  welcome.set_layout_fingerprint(job.layout().Fingerprint());
  return welcome;
}

absl::Status TakesPartError(uint32_t rank) {
  return absl::AlreadyExistsError(
      absl::StrCat("rank ", rank, " is held by another process, which takes part in the job"));
}

bool AllReached(const OpenSteps& steps, const OpenSteps& wanted) {
  return absl::c_all_of(wanted, [&](const auto& step) {
    const auto found = steps.find(step.first);
    return found != steps.end() && found->second >= step.second;
  });
}

absl::AnyInvocable<void()> Finishing(Membership::EndedJoin join) {
  return [join = std::move(join)]() mutable { join.done(std::move(join.result)); };
}

void Call(std::vector<absl::AnyInvocable<void()>> callbacks) {
  for (auto& callback : callbacks) callback();
}

void Finish(std::vector<Membership::EndedJoin> ended) {
  for (Membership::EndedJoin& join : ended) join.done(std::move(join.result));
}

absl::Status LeftError(uint32_t rank, absl::string_view job) {
  return TryAgain(
      absl::FailedPreconditionError(absl::StrFormat("rank %d has left job '%s'", rank, job)));
}

// The least of them; there is none if the shard owns no chunk.
uint64_t LeastOf(const OpenSteps& steps) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const auto& [chunk, step] : steps) least = std::min(least, step);
  return least;
}

}  // namespace

// Epochs are told apart across restarts too: they count up from the time.
Aggregator::Aggregator(const AggregatorOptions& options, StateDir* state_dir)
    : options_(options),
      state_dir_(state_dir),
      first_epoch_(absl::ToUnixNanos(options.now())),
      last_epoch_(first_epoch_) {}

Aggregator::~Aggregator() { Drain(); }

absl::Status Aggregator::Restore(const StateDir::Recovered& recovered) {
  absl::MutexLock lock(&mutex_);
  warnings_ = recovered.warnings;
  given_up_epochs_ = recovered.given_up;
  for (const JobState& state : recovered.jobs) {
    restored_epochs_.push_back(state.id.epoch);
    absl::StatusOr<std::unique_ptr<Job>> job =
        Job::Restore(state, {options_.shard, options_.shard_count}, &bell_,
                     state_dir_->generation(), options_.now());
    if (!job.ok()) return job.status();
    last_epoch_ = std::max(last_epoch_, state.id.epoch);
    for (const uint32_t rank : state.left_ranks) {
      if (!(*job)->Leave(rank)) (*job)->End(LeftError(rank, state.id.name));
    }
    Membership membership =
        Membership::Restore(state.incarnations, state.left_ranks, (*job)->min_workers(),
                            WelcomeTo(**job, generation()), options_.now());
    if (membership.AllLeft()) {
      Forget(state.id.epoch);
      continue;
    }
    // Epochs ascend: of a name that was used again, the later job stays.
    if (const auto earlier = jobs_.find(state.id.name); earlier != jobs_.end()) {
      Forget(earlier->second.job->id().epoch);
      jobs_.erase(earlier);
    }
    jobs_.emplace(state.id.name, Entry{.job = *std::move(job),
                                       .membership = std::move(membership),
                                       .has_room = true,
                                       .saved = true,
                                       .saved_steps = OpenStepsOf(state)});
    log::WriteEvent(
        log::Level::kInfo, "goes on with a job, from its snapshot",
        {.job = state.id.name, .step = LeastOf(OpenStepsOf(state)), .shard = options_.shard});
  }
  return absl::OkStatus();
}

uint64_t Aggregator::Join(const JoinRequest& request, JoinDone done) {
  Reach(Failpoint::kJoinReceived);
  const absl::Time now = options_.now();
  absl::StatusOr<Layout> layout = CheckJoin(request, options_);
  const Membership::Claim claim = {request.rank(), request.incarnation()};
  Callbacks callbacks;
  Entries replaced;
  uint64_t call = 0;
  {
    absl::MutexLock lock(&mutex_);
    call = ++last_call_;
    const absl::StatusOr<Entry*> entry =
        layout.ok() ? Admit(request, *std::move(layout), now, replaced) : layout.status();
    if (entry.ok() && Returns(**entry, claim)) {
      AddReturning(**entry, {claim, call, std::move(done)}, callbacks);
      late_bell_.Ring();
    } else if (entry.ok()) {
      Membership& membership = (*entry)->membership;
      const bool was_complete = membership.complete();
      Welcome(**entry, membership.Join(claim, call, std::move(done), now), callbacks);
      if (!was_complete && membership.complete()) {
        callbacks.push_back([job = request.job(), shard = options_.shard] {
          log::WriteEvent(log::Level::kInfo, "a job begins: all of its ranks have joined",
                          {.job = job, .shard = shard});
        });
      }
    } else {
      RecordRefusal(request, entry.status());
      callbacks.push_back(
          [done = std::move(done), status = entry.status()]() mutable { done(status); });
    }
  }
  for (auto& [name, entry] : replaced) EndCalls(entry, GaveWayError(entry.job->id()));
  MakeRoom();
  Call(std::move(callbacks));
  return call;
}

bool Aggregator::Returns(const Entry& entry, const Membership::Claim& claim) {
  if (!entry.membership.complete() || !entry.job->takes_back()) return false;
  // One that holds the rank already did not get the answer to its first Join, and the others went
  // on; or the aggregator was started again while it waited.
  return !entry.membership.Holds(claim) ||
         (entry.job->has_begun() && !entry.job->has_heard(claim.rank));
}

void Aggregator::AddReturning(Entry& entry, Returning returning, Callbacks& callbacks) {
  // Frames of later steps than these are sent by a process that is alive.
  returning.newest_step = entry.job->newest_step(returning.claim.rank);
  for (const auto& [chunk, step] : entry.job->open_steps()) {
    returning.newest_step = std::max(returning.newest_step, step);
  }
  const auto [found, is_new] = entry.returning.try_emplace(returning.claim.rank);
  Returning& waiting = found->second;
  if (waiting.done) {
    callbacks.push_back([done = std::move(waiting.done)]() mutable {
      done(absl::AbortedError("another call claimed the rank"));
    });
  }
  if (!is_new && waiting.claim.incarnation == returning.claim.incarnation) {
    waiting.call = returning.call;
    waiting.done = std::move(returning.done);
  } else {
    waiting = std::move(returning);
  }
}

void Aggregator::AdmitReturning() {
  Callbacks callbacks;
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [name, entry] : jobs_) {
      for (auto returning = entry.returning.begin(); returning != entry.returning.end();) {
        const bool stays = AdmitReturning(entry, returning->second, callbacks);
        returning = stays ? std::next(returning) : entry.returning.erase(returning);
      }
    }
  }
  Call(std::move(callbacks));
}

bool Aggregator::AdmitReturning(Entry& entry, Returning& returning, Callbacks& callbacks) {
  const uint32_t rank = returning.claim.rank;
  const bool may_have_rank =
      entry.membership.Holds(returning.claim) || entry.job->is_absent(rank, options_.now());
  if (!returning.has_rank && !may_have_rank &&
      entry.job->newest_step(rank) > returning.newest_step) {
    const absl::Status refusal = TakesPartError(rank);
    entry.membership.RecordRefusal(rank, std::string(refusal.message()));
    callbacks.push_back(Finishing({std::move(returning.done), refusal}));
    return false;
  }
  if (!returning.has_rank && !may_have_rank) return true;
  if (!returning.has_rank) GiveRank(entry, returning);
  if (state_dir_ != nullptr) {
    if (IsAwaited(entry)) bell_.Ring();
    return true;
  }
  if (returning.done) {
    callbacks.push_back(Finishing({std::move(returning.done), returning.welcome}));
  }
  return false;
}

void Aggregator::GiveRank(Entry& entry, Returning& returning) {
  const uint32_t rank = returning.claim.rank;
  returning.welcome = WelcomeTo(*entry.job, generation());
  returning.welcome.set_returning(true);
  if (const std::optional<double> lost = entry.job->MostErrorSquared(rank)) {
    returning.welcome.set_lost_error_squared(*lost);
  }
  returning.has_rank = true;
  const uint64_t before = entry.membership.incarnations()[rank];
  entry.membership.Return(returning.claim);
  const bool is_same_process = before == returning.claim.incarnation;
  returning.needed = entry.job->Withdraw(rank, is_same_process ? 0 : before);
  uint64_t first_step = 0;
  for (const auto& [chunk, step] : returning.needed) first_step = std::max(first_step, step);
  returning.welcome.set_first_step(first_step);
  entry.job->Return(rank, first_step, is_same_process);
}

bool Aggregator::IsAwaited(const Entry& entry) {
  return absl::c_any_of(entry.returning, [&](const auto& returning) {
    return returning.second.has_rank &&
           AllReached(entry.job->open_steps(), returning.second.needed);
  });
}

void Aggregator::WelcomeReturning(Entry& entry, const DueSnapshot& due, const OpenSteps& saved,
                                  Callbacks& callbacks) {
  for (auto found = entry.returning.begin(); found != entry.returning.end();) {
    Returning& returning = found->second;
    const bool is_in_it = returning.has_rank && AllReached(saved, returning.needed) &&
                          due.incarnations[found->first] == returning.claim.incarnation;
    if (is_in_it) ++returning.snapshots;
    if (returning.snapshots < 2) {
      ++found;
      continue;
    }
    if (returning.done) {
      callbacks.push_back(Finishing({std::move(returning.done), std::move(returning.welcome)}));
    }
    found = entry.returning.erase(found);
  }
}

void Aggregator::Welcome(Entry& entry, std::vector<Membership::EndedJoin> joins,
                         Callbacks& callbacks) {
  const bool must_wait = state_dir_ != nullptr && !entry.saved;
  for (Membership::EndedJoin& join : joins) {
    if (must_wait && join.result.ok()) {
      entry.joins.push_back(std::move(join));
      bell_.Ring();
    } else {
      callbacks.push_back(Finishing(std::move(join)));
    }
  }
}

absl::StatusOr<Aggregator::Entry*> Aggregator::Admit(const JoinRequest& request, Layout layout,
                                                     absl::Time now, Entries& replaced) {
  if (drained_) return ShuttingDownError();
  const Membership::Claim claim = {request.rank(), request.incarnation()};
  auto old = jobs_.find(request.job());
  if (old != jobs_.end()) {
    const Membership& membership = old->second.membership;
    const bool gives_way =
        membership.GivesWay(now, options_.idle_timeout) && !membership.Holds(claim);
    if (!gives_way) {
      const bool returns = Returns(old->second, claim);
      absl::Status status = CheckMatches(request.world_size(), layout, returns, *old->second.job);
      if (status.ok() && !returns) status = membership.CheckClaim(claim, now);
      if (!status.ok()) return status;
      return &old->second;
    }
  }
  if (!admitting_) return ShuttingDownError();
  std::vector<Entries::iterator> leaving;
  if (old != jobs_.end()) leaving.push_back(old);
  const uint64_t reserved =
      ReservedBytes(request.world_size(), layout, {options_.shard, options_.shard_count});
  absl::Status room;
  while (room = CheckRoom(request.world_size(), layout, reserved, leaving), !room.ok()) {
    leaving.push_back(FindGivingWay(now, leaving));
    if (leaving.back() == jobs_.end()) return room;
  }
  for (const Entries::iterator entry : leaving) {
    Forget(entry->second.job->id().epoch);
    replaced.insert(jobs_.extract(entry));
  }
  return &CreateEntry(request, std::move(layout));
}

absl::Status Aggregator::CheckRoom(uint32_t world_size, const Layout& layout, uint64_t reserved,
                                   absl::Span<const Entries::iterator> leaving) {
  uint64_t jobs = 1, parameters = layout.elements(), frames = FramesOf(world_size, layout);
  for (auto entry = jobs_.begin(); entry != jobs_.end(); ++entry) {
    if (absl::c_linear_search(leaving, entry)) continue;
    const Job& job = *entry->second.job;
    ++jobs;
    parameters += job.layout().elements();
    frames += FramesOf(job.world_size(), job.layout());
    reserved += job.reserved_bytes();
  }
  const AggregatorLimits& limits = options_.limits;
  if (jobs > limits.jobs) return LimitError("jobs", jobs, limits.jobs, "--max-jobs");
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

Aggregator::Entries::iterator Aggregator::FindGivingWay(
    absl::Time now, absl::Span<const Entries::iterator> leaving) {
  auto found = jobs_.end();
  for (auto entry = jobs_.begin(); entry != jobs_.end(); ++entry) {
    const Membership& membership = entry->second.membership;
    if (!membership.GivesWay(now, options_.idle_timeout)) continue;
    if (absl::c_linear_search(leaving, entry)) continue;
    if (found == jobs_.end() || membership.last_heard() < found->second.membership.last_heard()) {
      found = entry;
    }
  }
  return found;
}

Aggregator::Entry& Aggregator::CreateEntry(const JoinRequest& request, Layout layout) {
  auto job = std::make_shared<Job>(JobId{request.job(), ++last_epoch_}, request.world_size(),
                                   std::move(layout), ShardId{options_.shard, options_.shard_count},
                                   state_dir_ == nullptr ? nullptr : &bell_);
  Membership membership(request.world_size(), job->min_workers(), WelcomeTo(*job, generation()));
  late_bell_.Ring();
  return jobs_.emplace(request.job(), Entry{std::move(job), std::move(membership)}).first->second;
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
    for (auto& [name, entry] : jobs_) {
      if (ended.empty()) ended = entry.membership.Cancel(call, reason);
      for (auto found = entry.returning.begin(); found != entry.returning.end(); ++found) {
        Returning& returning = found->second;
        if (returning.call != call || !returning.done) continue;
        ended.push_back({std::exchange(returning.done, nullptr), reason});
        // One that has the rank may call again.
        if (!returning.has_rank) entry.returning.erase(found);
        break;
      }
    }
  }
  Finish(std::move(ended));
}

void Aggregator::Exchange(Frame frame, ExchangeDone done) {
  Reach(Failpoint::kFrameReceived);
  const absl::Time now = options_.now();
  std::shared_ptr<Job> job;
  absl::StatusOr<Room::Offer> offer;
  {
    absl::ReleasableMutexLock lock(&mutex_);
    const absl::StatusOr<Entry*> entry = FindRunningJob(frame.header, now);
    if (!entry.ok()) {
      lock.Release();
      return done(entry.status());
    }
    job = (*entry)->job;
    offer = OfferRoom(**entry);
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
  for (const auto& [name, entry] : jobs_) bytes += entry.job->reserved_bytes();
  return bytes;
}

void Aggregator::MakeRoom() {
  std::vector<std::shared_ptr<Job>> jobs;
  absl::Status reason;
  {
    absl::MutexLock lock(&mutex_);
    const uint64_t used = room_.taken(), reserved = ReservedByJobs();
    const uint64_t limit = options_.limits.held_bytes;
    if (used == 0 || used + reserved <= limit) return;
    reason = RoomIsUsedError(used, reserved, limit);
    for (const auto& [name, entry] : jobs_) jobs.push_back(entry.job);
  }
  for (const std::shared_ptr<Job>& job : jobs) job->GiveRoomBack(reason);
}

absl::StatusOr<Room::Offer> Aggregator::OfferRoom(Entry& entry) {
  const uint64_t limit = options_.limits.held_bytes;
  if (limit == AggregatorLimits::kUnlimited) return Room::Offer();
  const uint64_t reserved = ReservedByJobs();
  if (!entry.has_room) {
    const uint64_t used = room_.taken();
    if (used + reserved > limit) return RoomIsUsedError(used, reserved, limit);
    entry.has_room = true;
  }
  // Answers on their way to ranks that do not read them are nobody's.
  const bool has_any = PayloadPool::Global().used_bytes() <= limit;
  return Room::Offer{&room_, has_any ? limit - std::min(limit, reserved) : 0, limit};
}

absl::StatusOr<ReadErrorResponse> Aggregator::ReadError(const ReadErrorRequest& request) {
  FrameHeader sender;
  sender.set_job(request.job());
  sender.set_epoch(request.epoch());
  sender.set_rank(request.rank());
  sender.set_incarnation(request.incarnation());
  std::shared_ptr<Job> job;
  {
    absl::MutexLock lock(&mutex_);
    const absl::StatusOr<Entry*> entry = FindRunningJob(sender, options_.now());
    if (!entry.ok()) return entry.status();
    job = (*entry)->job;
  }
  return job->ReadError(request);
}

absl::StatusOr<Aggregator::Entry*> Aggregator::FindRunningJob(const FrameHeader& header,
                                                              absl::Time now) {
  if (drained_) return ShuttingDownError();
  const auto entry = jobs_.find(header.job());
  if (entry == jobs_.end()) return NotHereError(header);
  const std::shared_ptr<Job>& job = entry->second.job;
  Membership& membership = entry->second.membership;
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
  const Membership::Claim sender = {header.rank(), header.incarnation()};
  if (header.rank() < job->world_size() && !membership.Holds(sender)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "another process has taken rank %d of job '%s': this one had been away for too long",
        header.rank(), header.job()));
  }
  if (header.generation() > generation()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "rank %d has heard from generation %d of this shard, and this process is generation %d: "
        "another has replaced it, and it must be stopped",
        header.rank(), header.generation(), generation()));
  }
  membership.Hear(now);
  return &entry->second;
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
  } else if (header.epoch() > first_epoch_ || is_in(restored_epochs_)) {
    return absl::FailedPreconditionError(absl::StrCat(what, "it is over"));
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
    const auto entry = jobs_.find(request.job());
    const absl::StatusOr<bool> member = IsMember(entry, request);
    if (!member.ok() || !*member) {
      callbacks.push_back(
          [done = std::move(done), status = member.status()]() mutable { done(status); });
    } else if (state_dir_ == nullptr) {
      EndMembership(entry->second, {request, std::move(done)}, callbacks);
      ForgetIfAllLeft(entry, callbacks);
    } else {
      const std::shared_ptr<Job>& job = entry->second.job;
      entry->second.leaves.push_back(
          {request, std::move(done),
           job->takes_back() ? job->Withdraw(request.rank(), request.incarnation()) : OpenSteps()});
      bell_.Ring();
    }
  }
  Call(std::move(callbacks));
}

// False when the job, or this epoch of it, is over.
absl::StatusOr<bool> Aggregator::IsMember(Entries::iterator entry,
                                          const LeaveRequest& request) const {
  if (drained_) return ShuttingDownError();
  if (entry == jobs_.end()) return false;
  const std::shared_ptr<Job>& job = entry->second.job;
  const Membership& membership = entry->second.membership;
  if (request.epoch() != job->id().epoch) return false;
  if (request.rank() >= job->world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank(), " is not in [0, ", job->world_size(), ")"));
  }
  if (!membership.complete()) {
    return absl::FailedPreconditionError("not all ranks have joined yet");
  }
  if (!membership.Holds({request.rank(), request.incarnation()})) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "another process has taken rank %d of job '%s'", request.rank(), request.job()));
  }
  const uint64_t open_step = job->open_step();
  if (state_dir_ == nullptr || request.steps() <= open_step) return true;
  return absl::AbortedError(
      absl::StrFormat("rank %d has completed %d steps of job '%s', but this aggregator, started "
                      "again since, knows of %d: it must have the frames of the others first",
                      request.rank(), request.steps(), request.job(), open_step));
}

void Aggregator::ForgetIfAllLeft(Entries::iterator entry, Callbacks& callbacks) {
  if (!entry->second.membership.AllLeft()) return;
  Forget(entry->second.job->id().epoch);
  callbacks.push_back([job = entry->first, shard = options_.shard] {
    log::WriteEvent(log::Level::kInfo, "a job is over: all of its ranks have left",
                    {.job = job, .shard = shard});
  });
  for (auto& [rank, returning] : entry->second.returning) {
    if (!returning.done) continue;
    callbacks.push_back(
        Finishing({std::move(returning.done),
                   absl::FailedPreconditionError("the job is over: all of its ranks have left")}));
  }
  jobs_.erase(entry);
}

void Aggregator::EndMembership(Entry& entry, WaitingLeave leave, Callbacks& callbacks) {
  if (!entry.membership.Holds({leave.request.rank(), leave.request.incarnation()})) {
    // Another process took the rank meanwhile.
    callbacks.push_back([done = std::move(leave.done)]() mutable { done(absl::OkStatus()); });
    return;
  }
  entry.membership.Leave(leave.request.rank());
  const bool goes_on = entry.job->Leave(leave.request.rank());
  callbacks.push_back([this, job = entry.job, goes_on, leave = std::move(leave)]() mutable {
    if (!goes_on) job->End(LeftError(leave.request.rank(), leave.request.job()));
    job->EndReturnsIfAlone();
    late_bell_.Ring();
    leave.done(absl::OkStatus());
  });
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

void Aggregator::FillStatus(const Entry& entry, JobStatus& status) const {
  entry.membership.FillStatus(status);
  absl::Status error = entry.state_error;
  error.Update(entry.late_error);
  if (!error.ok()) status.set_state_error(state_dir_->WithoutPath(error.message()));
  status.set_generation(generation());
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
    for (const auto& [job_name, entry] : jobs_) {
      if (!name.empty() && job_name != name) continue;
      JobMetrics& job = metrics.emplace_back();
      FillStatus(entry, job.status);
      if (state_dir_ != nullptr) job.snapshots = entry.snapshots;
      jobs.push_back(entry.job);
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
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(this, &Aggregator::HasNoJobs), timeout);
}

bool Aggregator::HasNoJobs() const {
  return std::all_of(jobs_.begin(), jobs_.end(),
                     [](const auto& entry) { return entry.second.membership.Deserted(); });
}

void Aggregator::Drain() {
  Entries jobs = TakeJobs();
  for (auto& [name, entry] : jobs) EndCalls(entry, ShuttingDownError());
}

Aggregator::Entries Aggregator::TakeJobs() {
  absl::MutexLock lock(&mutex_);
  admitting_ = false;
  drained_ = true;
  return std::exchange(jobs_, {});
}

void Aggregator::EndCalls(Entry& entry, const absl::Status& reason) {
  Finish(entry.membership.CancelAll(reason));
  for (Membership::EndedJoin& join : entry.joins) join.done(reason);
  for (auto& [rank, returning] : entry.returning) {
    if (returning.done) returning.done(reason);
  }
  for (WaitingLeave& leave : entry.leaves) leave.done(reason);
  entry.job->End(reason);
}

absl::Status Aggregator::Suspend() {
  Reach(Failpoint::kSuspendBegun);
  absl::MutexLock state_lock(&state_mutex_);
  Entries jobs = TakeJobs();
  absl::Status first_error = RemoveForgotten();
  for (auto& [name, entry] : jobs) {
    // Rounds first: once a state is written, nothing may close any more.
    EndCalls(entry, ShuttingDownError());
    if (!entry.saved) continue;  // nobody was welcomed yet
    Reach(Failpoint::kSuspendHalfDone);
    DueSnapshot due = SnapshotOf(entry);
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
  for (const uint64_t epoch : epochs) first_error.Update(state_dir_->Forget(epoch));
  return first_error;
}

absl::Status Aggregator::TakeSnapshots() {
  absl::MutexLock state_lock(&state_mutex_);
  absl::Status first_error = RemoveForgotten();
  std::vector<DueSnapshot> all_due;
  {
    absl::MutexLock lock(&mutex_);
    all_due = FindDueSnapshots();
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
  return first_error;
}

absl::Duration Aggregator::CloseLateRounds() {
  std::vector<std::shared_ptr<Job>> jobs;
  absl::Duration shortest = absl::InfiniteDuration();
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, entry] : jobs_) {
      if (entry.job->round_deadline() == absl::InfiniteDuration()) continue;
      shortest = std::min(shortest, entry.job->round_deadline());
      // Frames come when all ranks have been welcomed, which with a state directory takes a save.
      if (entry.membership.complete()) jobs.push_back(entry.job);
    }
  }
  for (const std::shared_ptr<Job>& job : jobs) {
    job->AskForStates(options_.now());
    if (!job->LeaveOut(options_.restart_grace, options_.now())) continue;
    absl::Status status;
    if (state_dir_ != nullptr) {
      status = state_dir_->SaveLateRounds(job->id().epoch, job->late_rounds());
      absl::MutexLock lock(&mutex_);
      const auto entry = jobs_.find(job->id().name);
      if (entry != jobs_.end() && entry->second.job == job) entry->second.late_error = status;
    }
    if (status.ok()) job->SetLateRoundsDurable(options_.now());
  }
  AdmitReturning();
  return shortest / 8;  // to which deadlines are kept
}

std::vector<Aggregator::DueSnapshot> Aggregator::FindDueSnapshots() {
  std::vector<DueSnapshot> all_due;
  for (const auto& [name, entry] : jobs_) {
    if (!entry.membership.complete()) continue;
    if (entry.saved && entry.state_error.ok() && entry.leaves.empty() &&
        !entry.job->snapshot_due() && !IsAwaited(entry)) {
      continue;
    }
    all_due.push_back(SnapshotOf(entry));
  }
  return all_due;
}

Aggregator::DueSnapshot Aggregator::SnapshotOf(const Entry& entry) {
  DueSnapshot due = {entry.job, entry.membership.incarnations(), entry.membership.left_ranks(),
                     /*with_answers=*/!entry.leaves.empty() || IsAwaited(entry)};
  // Once it is written they have left, whether or not they are told.
  for (const WaitingLeave& leave : entry.leaves) {
    const bool is_member =
        entry.membership.Holds({leave.request.rank(), leave.request.incarnation()});
    if (is_member) due.left_ranks.push_back(leave.request.rank());
  }
  return due;
}

absl::StatusOr<OpenSteps> Aggregator::Save(const DueSnapshot& due) {
  JobState state = due.job->Describe();
  state.incarnations = due.incarnations;
  state.left_ranks = due.left_ranks;
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

// Workers may forget what is before the snapshot before this one: if this one cannot be read when
// it is needed, that one still can be gone on from.
void Aggregator::SetSaved(const DueSnapshot& due, const absl::StatusOr<OpenSteps>& saved,
                          absl::Duration duration) {
  Callbacks callbacks;
  OpenSteps durable;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = jobs_.find(due.job->id().name);
    if (found == jobs_.end() || found->second.job != due.job) return Forget(due.job->id().epoch);
    Entry& entry = found->second;
    entry.state_error = saved.status();
    entry.snapshots.Add(saved.status(), duration);
    if (saved.ok()) {
      durable = std::exchange(entry.saved_steps, *saved);
      entry.saved = true;
      if (!entry.joins.empty()) Reach(Failpoint::kJoinDurable);
      Welcome(entry, std::exchange(entry.joins, {}), callbacks);
      WelcomeReturning(entry, due, *saved, callbacks);
      if (IsAwaited(entry)) bell_.Ring();
    }
    // Leaves that came meanwhile ring for themselves. After an error of the job itself there is
    // nothing left to save.
    std::vector<WaitingLeave> leaves = std::exchange(entry.leaves, {});
    for (WaitingLeave& leave : leaves) {
      // Others may go on without it, and its frames go with it: both snapshots must do without
      // them.
      const bool others_go_on = entry.job->takes_back();
      const bool is_safe = saved.ok() &&
                           leave.request.steps() <= LeastOf(others_go_on ? durable : *saved) &&
                           AllReached(durable, leave.needed) &&
                           absl::c_linear_search(due.left_ranks, leave.request.rank());
      if (is_safe || absl::IsInternal(saved.status())) {
        Reach(Failpoint::kLeaveDurable);
        EndMembership(entry, std::move(leave), callbacks);
      } else {
        entry.leaves.push_back(std::move(leave));
        if (saved.ok()) bell_.Ring();
      }
    }
    ForgetIfAllLeft(found, callbacks);
  }
  due.job->SetDurable(durable, options_.now());
  Reach(Failpoint::kSnapshotAnnounced);
  Call(std::move(callbacks));
}

}  // namespace signpost
