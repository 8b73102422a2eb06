#include "node/job.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "log/log.h"
#include "node/definition.h"
#include "proto/try_again.h"

namespace signpost::node {
namespace {

// How often it looks whether other nodes have come again.
constexpr absl::Duration kLookInterval = absl::Milliseconds(100);

Reply ReplyOf(const absl::Status& status) {
  Reply reply;
  reply.set_code(static_cast<int>(status.code()));
  reply.set_message(std::string(status.message()));
  reply.set_try_again(IsTryAgain(status));
  return reply;
}

// For messages.
absl::string_view NameOf(const Request& request) {
  switch (request.call_case()) {
    case Request::kBegin:
      return "a join";
    case Request::kStep:
      return "a step";
    case Request::kCheckpoint:
      return "a checkpoint";
    default:
      return "another call";
  }
}

// INVALID_ARGUMENT, with both values, where the rates differ.
absl::Status CheckSameRates(const StepRates& theirs, const StepRates& wanted,
                            absl::string_view whose) {
  if (theirs.groups_size() != wanted.groups_size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s steps with rates of %d groups, local rank 0 with those of %d", whose,
                        theirs.groups_size(), wanted.groups_size()));
  }
  for (int group = 0; group < wanted.groups_size(); ++group) {
    const Rates& here = theirs.groups(group);
    const Rates& there = wanted.groups(group);
    if (here.SerializeAsString() == there.SerializeAsString()) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has other rates than local rank 0 in group %d: {%s}, not {%s}. All processes step at "
        "the same ones",
        whose, group, here.ShortDebugString(), there.ShortDebugString()));
  }
  return absl::OkStatus();
}

}  // namespace

class Job::Answers {
 public:
  ~Answers() {
    for (const auto& [job, line] : lines_) job->Tell(line);
    for (auto& [done, reply] : answers_) done(std::move(reply));
  }
  void AddLine(const Job& job, std::string line) { lines_.emplace_back(&job, std::move(line)); }
  void Add(Done done, Reply reply) { answers_.emplace_back(std::move(done), std::move(reply)); }
  void Add(Process& process, Reply reply) {
    process.is_at_work = false;
    Add(std::exchange(process.done, nullptr), std::move(reply));
  }

 private:
  std::vector<std::pair<const Job*, std::string>> lines_;  // for a person
  std::vector<std::pair<Done, Reply>> answers_;
};

std::string Job::Process::Describe() const {
  return absl::StrCat("local rank ", local_rank, " (process ", attach.pid(), ")");
}

std::vector<std::shared_ptr<const Numbers>> Job::GradientsOf(const Processes& processes) {
  std::vector<std::shared_ptr<const Numbers>> gradients;
  for (const std::shared_ptr<Process>& process : processes) {
    gradients.push_back(process->gradients);
  }
  return gradients;
}

Job::Job(const std::string& name, const NodeOptions& options)
    : name_(name), options_(options), cohort_(options.processes), thread_([this] { Run(); }) {}

Job::~Job() = default;

// What processes ask for.

absl::StatusOr<uint64_t> Job::Enter(const Attach& attach) {
  // Those of a cohort, of those before that have yet to notice its end, and a few for good measure.
  const size_t most = 4 * options_.processes + 4;
  const uint32_t first_rank = options_.session.worker.rank * options_.processes;
  absl::MutexLock lock(&mutex_);
  if (processes_.size() >= most) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d processes have job '%s' on this node, of %d that train", most, name_,
                        options_.processes));
  }
  processes_[++last_process_] = std::make_shared<Process>(attach.rank() - first_rank, attach);
  return last_process_;
}

void Job::Call(uint64_t number, const Request& request, Done done) {
  Answers answers;
  absl::MutexLock lock(&mutex_);
  const auto found = processes_.find(number);
  if (found == processes_.end()) {
    return answers.Add(std::move(done), ReplyOf(absl::CancelledError("the process is gone")));
  }
  const std::shared_ptr<Process> process = found->second;
  if (request.has_confirm()) {
    const bool is_current = process->cohort == cohorts_;
    return answers.Add(std::move(done), ReplyOf(is_current ? absl::OkStatus() : process->over));
  }
  process->saved_state.reset();
  process->request = request;
  process->done = std::move(done);
  process->since = Now();
  has_news_ = true;
  const auto call = request.call_case();
  const bool is_attached = process->gradients != nullptr;
  if (call == Request::kLeave) {
    TakeLeave(process, answers);
  } else if (call == Request::kSaveState && !stopping_ && IsOfLastCohort(*process)) {
    // It needs no others.
  } else if (!process->over.ok()) {
    answers.Add(*process, ReplyOf(process->over));
  } else if (call == Request::CALL_NOT_SET || process->has_left ||
             (call == Request::kAttach) == is_attached ||
             (is_attached && (call == Request::kBegin) == (process->cohort > 0))) {
    answers.Add(*process, ReplyOf(absl::InvalidArgumentError(
                              "a request out of order: attach, begin, and then steps")));
  } else if (!is_attached) {
    AdmitWaiting(answers);
  } else if (call == Request::kStep) {
    process->rates = request.step().rates();
    if (arrivals_) arrivals_->AddRest(process->local_rank);
  }
}

void Job::HearOfGradients(uint64_t number, const GradientsReady& gradients) {
  Answers answers;
  absl::MutexLock lock(&mutex_);
  const auto found = processes_.find(number);
  if (found == processes_.end()) return;
  const std::shared_ptr<Process> process = found->second;
  // One that is of no cohort any more is told when it calls.
  if (cohort_[process->local_rank] != process) return;
  const absl::Status status = TakeArrivals(*process, gradients);
  if (status.ok()) return;
  const std::string why = absl::StrCat(process->Describe(), ": ", status.message());
  Break(absl::AbortedError(why), answers);
  process->over = absl::InvalidArgumentError(why);
}

absl::Status Job::TakeArrivals(Process& process, const GradientsReady& gradients) {
  if (process.cohort == 0 || process.done != nullptr ||
      process.rates.has_value() == gradients.has_rates()) {
    return absl::InvalidArgumentError(
        "a request out of order: attach, begin, and then steps, each with its rates first");
  }
  if (gradients.has_rates()) process.rates = gradients.rates();
  if (!arrivals_) {
    arrivals_.emplace(training_->layout().tensors().size(), options_.processes);
    for (const std::shared_ptr<Process>& other : cohort_) {
      const bool has_all = other != nullptr && other->done != nullptr && other->request.has_step();
      if (has_all) arrivals_->AddRest(other->local_rank);
    }
  }
  return arrivals_->Add(process.local_rank, gradients.tensors());
}

void Job::AdmitWaiting(Answers& answers) {
  for (auto& [number, process] : processes_) {
    if (process->gradients != nullptr || process->done == nullptr) continue;
    if (!stopping_ && cohort_[process->local_rank] != nullptr) continue;
    Reply reply;
    const absl::Status status = Admit(*process, reply);
    if (status.ok()) {
      cohort_[process->local_rank] = process;
      refusals_.erase(process->local_rank);
    } else {
      refusals_[process->local_rank] = std::string(status.message());
      reply = ReplyOf(status);
      has_failed_ = has_news_ = true;
    }
    answers.Add(*process, std::move(reply));
  }
}

absl::Status Job::Admit(Process& process, Reply& reply) {
  if (stopping_) return absl::UnavailableError("the node's worker is about to end");
  if (options_.gpu != nullptr && !process.attach.on_gpu()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this process's tensors are on the host, and its node trains on ", options_.gpu->name(),
        ": move them to a GPU (SessionOptions::gpu), or start the worker without --gpu"));
  }
  const Definition& definition = process.attach.definition();
  if (training_ != nullptr) {
    absl::Status status = CheckSame(definition, training_->definition(), training_->layout());
    if (!status.ok()) {
      return absl::Status(
          status.code(),
          absl::StrFormat("%s%s", status.message(),
                          has_joined_ ? ". The node's worker still has this job, of processes that "
                                        "have not left it; to give that up, end the worker"
                                      : ""));
    }
  } else {
    absl::StatusOr<std::unique_ptr<Training>> training =
        Training::Create(definition, options_.max_parameters, options_.gpu);
    if (!training.ok()) return training.status();
    training_ = *std::move(training);
  }
  auto gradients = training_->NewGradients();
  if (!gradients.ok()) {
    ForgetIfUnused();
    return gradients.status();
  }
  process.gradients = *std::move(gradients);
  process.parameters = training_->parameters();
  *reply.mutable_attached()->mutable_gradients() = process.gradients->handle();
  *reply.mutable_attached()->mutable_parameters() = process.parameters->handle();
  return absl::OkStatus();
}

bool Job::IsOfLastCohort(const Process& process) const {
  return has_joined_ && process.cohort == cohorts_;
}

void Job::TakeLeave(const std::shared_ptr<Process>& process, Answers& answers) {
  // When the worker ends it leaves by itself.
  if (stopping_ || !IsOfLastCohort(*process)) return answers.Add(*process, Reply());
  process->has_left = true;
  left_.insert(process->local_rank);
  const bool was_attached = process->over.ok();
  if (was_attached) cohort_[process->local_rank].reset();
  // If the next cohort is there already, it is for that to leave.
  if (left_.size() == options_.processes && !IsUsed() && !is_at_work_) {
    // At once: whoever attaches from now on begins anew.
    left_training_ = GiveUp();
    last_to_leave_ = process;
    process->is_at_work = true;
  } else {
    answers.Add(*process, Reply());
  }
  if (!was_attached) return;
  Break(TryAgain(absl::FailedPreconditionError(
            absl::StrFormat("%s has left job '%s'", process->Describe(), name_))),
        answers);
}

void Job::Gone(uint64_t number) {
  std::shared_ptr<Process> process;  // goes without the lock: a GPU takes its time
  Answers answers;
  absl::MutexLock lock(&mutex_);
  const auto found = processes_.find(number);
  if (found == processes_.end()) return;
  process = found->second;
  processes_.erase(found);
  if (process->done != nullptr && !process->is_at_work) {
    answers.Add(*process, ReplyOf(absl::CancelledError("the process is gone")));
  }
  if (cohort_[process->local_rank] != process) return;
  cohort_[process->local_rank].reset();
  if (process->cohort == 0 && !process->is_at_work) {
    // Nothing has come of it yet: another one can take its place.
    ForgetIfUnused();
    return AdmitWaiting(answers);
  }
  answers.AddLine(*this, absl::StrFormat("%s is gone after %d steps; waiting for the node's "
                                         "processes to attach again",
                                         process->Describe(), steps_));
  Break(absl::AbortedError(absl::StrFormat(
            "%s of job '%s' is gone without having left, after %d steps. The node's worker keeps "
            "what these have made: start the process again, and have all processes of the node "
            "join again, at once or as new ones; they go on at the step where the worker is",
            process->Describe(), name_, steps_)),
        answers);
}

void Job::Break(const absl::Status& why, Answers& answers) {
  for (std::shared_ptr<Process>& process : cohort_) {
    if (process == nullptr) continue;
    process->over = why;
    const bool goes_on = process->is_at_work || (has_joined_ && process->request.has_save_state());
    if (process->done != nullptr && !goes_on) answers.Add(*process, ReplyOf(why));
    process.reset();
  }
  arrivals_.reset();
  holds_gradients_ |= has_joined_;
  is_step_open_ = false;
  ForgetIfUnused();
  AdmitWaiting(answers);
}

bool Job::IsUsed() const {
  return std::any_of(cohort_.begin(), cohort_.end(),
                     [](const auto& process) { return process != nullptr; });
}

void Job::ForgetIfUnused() {
  if (!IsUsed() && !has_joined_ && !is_at_work_) training_.reset();
}

// Waiting.

absl::Time Job::DeadlineOf(const Process& process) const {
  if (process.done == nullptr || process.is_at_work) return absl::InfiniteFuture();
  const Options& options = process.attach.definition().options();
  if (process.gradients == nullptr) {
    return process.since + options_.session.failure_timeout.duration();
  }
  return process.since + absl::Microseconds(process.request.has_begin()
                                                ? options.join_timeout_us()
                                                : options.exchange_timeout_us());
}

absl::Duration Job::TimeToNextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [number, process] : processes_) next = std::min(next, DeadlineOf(*process));
  return std::max(next - Now(), absl::ZeroDuration());
}

void Job::EndOverdue(Answers& answers) {
  const absl::Time now = Now();
  absl::Status why;
  for (auto& [number, process] : processes_) {
    if (now < DeadlineOf(*process)) continue;
    if (process->gradients != nullptr) {
      why = WhoIsWaitedFor(*process);
      continue;
    }
    answers.Add(*process, ReplyOf(absl::AlreadyExistsError(absl::StrFormat(
                              "%s of job '%s' is attached to the node's worker; no second process "
                              "can be",
                              cohort_[process->local_rank]->Describe(), name_))));
  }
  if (!why.ok()) Break(why, answers);
}

absl::Status Job::WhoIsWaitedFor(const Process& waiting) const {
  std::vector<std::string> missing;
  for (uint32_t local_rank = 0; local_rank < cohort_.size(); ++local_rank) {
    const std::shared_ptr<Process>& process = cohort_[local_rank];
    if (process == nullptr) {
      const auto refusal = refusals_.find(local_rank);
      missing.push_back(absl::StrCat(
          "local rank ", local_rank, ", which is not attached",
          refusal == refusals_.end() ? "" : absl::StrCat(" (refused: ", refusal->second, ")")));
    } else if (process->done == nullptr) {
      missing.push_back(process->Describe());
    }
  }
  return absl::DeadlineExceededError(absl::StrFormat(
      "%s of job '%s' on this node, after %d steps: waited %s for %s", NameOf(waiting.request),
      name_, steps_, absl::FormatDuration(Now() - waiting.since), absl::StrJoin(missing, "; ")));
}

Job::Work Job::NextWork() const {
  if (last_to_leave_ != nullptr) return Work::kLeave;
  if (holds_gradients_) return Work::kLetGo;
  for (const auto& [number, process] : processes_) {
    if (process->done != nullptr && process->request.has_save_state()) return Work::kSaveState;
  }
  if (stopping_) return Work::kEnd;
  const Request* first = nullptr;
  bool is_quarrel = false, is_computing = false;
  for (const std::shared_ptr<Process>& process : cohort_) {
    if (process == nullptr) return Work::kNone;
    is_computing |= process->done == nullptr;
    if (first == nullptr) first = &process->request;
    is_quarrel |= process->request.call_case() != first->call_case();
  }
  if (is_computing) {
    const bool has_gradients = arrivals_ && arrivals_->has_complete();
    return has_gradients || (is_step_open_ && worker_has_news_) ? Work::kAdvance : Work::kNone;
  }
  if (is_quarrel) return Work::kQuarrel;
  if (first->has_begin()) return Work::kBegin;
  return first->has_step() ? Work::kStep : Work::kCheckpoint;
}

bool Job::HasNewsOrWork() const { return has_news_ || NextWork() != Work::kNone; }

std::pair<Job::Work, Job::Processes> Job::TakeWork() {
  const Work work = NextWork();
  Processes processes;
  if (work == Work::kLeave) {
    processes.push_back(std::exchange(last_to_leave_, nullptr));
  } else if (work == Work::kSaveState) {
    for (const auto& [number, process] : processes_) {
      if (process->done != nullptr && process->request.has_save_state()) {
        processes = {process};
      }
    }
  } else if (work != Work::kNone && work != Work::kLetGo && work != Work::kEnd) {
    processes = cohort_;
  }
  if (work != Work::kAdvance) {  // which answers nobody
    for (const std::shared_ptr<Process>& process : processes) process->is_at_work = true;
    is_at_work_ = !processes.empty();
  }
  return {work, std::move(processes)};
}

void Job::Run() {
  while (true) {
    Work work;
    Processes processes;
    {
      Answers answers;
      absl::MutexLock lock(&mutex_);
      options_.session.worker.clock->Await(mutex_, absl::Condition(this, &Job::HasNewsOrWork),
                                           TimeToNextDeadline());
      has_news_ = false;
      std::tie(work, processes) = TakeWork();
      if (work == Work::kNone || work == Work::kAdvance) EndOverdue(answers);
    }
    if (work != Work::kNone) Do(work, processes);
    TellIfGpuIsLost();
    if (work == Work::kEnd) break;
  }
  // An error has nobody to tell it to; whoever is left finds out.
  std::unique_ptr<Training> training;
  {
    absl::MutexLock lock(&mutex_);
    if (has_joined_) training = GiveUp();
  }
  if (training != nullptr) training->Leave().IgnoreError();
}

void Job::HearOfNews() {
  absl::MutexLock lock(&mutex_);
  worker_has_news_ = true;
}

void Job::Stop() {
  {
    Answers answers;
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    Break(absl::UnavailableError(absl::StrFormat(
              "the node's worker is about to end, after %d steps of job '%s'", steps_, name_)),
          answers);
  }
  if (thread_.joinable()) thread_.join();
}

bool Job::is_idle() const {
  absl::MutexLock lock(&mutex_);
  return processes_.empty() && training_ == nullptr && left_training_ == nullptr && !is_at_work_;
}

void Job::Tell(const std::string& what) const {
  const log::Scope scope({.job = name_});
  if (options_.on_event) options_.on_event(absl::StrCat("job '", name_, "': ", what));
}

// What the job's thread does.

void Job::Do(Work work, const Processes& processes) {
  switch (work) {
    case Work::kBegin:
      Begin(processes);
      break;
    case Work::kAdvance:
      Advance(processes);
      break;
    case Work::kLetGo:
      LetGo();
      break;
    case Work::kStep:
      Step(processes);
      break;
    case Work::kCheckpoint:
      Checkpoint(processes);
      break;
    case Work::kSaveState:
      SaveState(processes);
      break;
    case Work::kLeave:
      Leave(processes);
      break;
    case Work::kQuarrel:
      Quarrel(processes);
      break;
    case Work::kNone:
    case Work::kEnd:
      break;
  }
  absl::MutexLock lock(&mutex_);
  ForgetIfUnused();
}

void Job::EndStep(const Processes& processes) {
  for (const std::shared_ptr<Process>& process : processes) process->rates.reset();
  arrivals_.reset();
  is_step_open_ = false;
}

void Job::AnswerAll(const Processes& processes, const Reply& reply) {
  Answers answers;
  absl::MutexLock lock(&mutex_);
  is_at_work_ = false;
  has_failed_ |= reply.code() != 0;
  for (const std::shared_ptr<Process>& process : processes) answers.Add(*process, reply);
}

void Job::RefuseStep(const absl::Status& status, const Processes& processes) {
  {
    absl::MutexLock lock(&mutex_);
    EndStep(processes);
  }
  AnswerAll(processes, ReplyOf(status));
}

std::unique_ptr<Training> Job::GiveUp() {
  has_joined_ = false;
  steps_ = 0;
  left_.clear();
  return std::move(training_);
}

void Job::Fail(const Training* training, const absl::Status& status, const Processes& processes) {
  std::unique_ptr<Training> failed;
  bool had_joined;
  {
    Answers answers;
    absl::MutexLock lock(&mutex_);
    if (training_.get() != training) return;  // all have left it
    is_at_work_ = false;
    has_failed_ = true;
    had_joined = has_joined_;
    failed = GiveUp();
    for (const std::shared_ptr<Process>& process : processes) {
      answers.Add(*process, ReplyOf(status));
    }
    Break(status, answers);
  }
  if (had_joined) failed->Leave().IgnoreError();  // the error that counts has been told
}

void Job::TellIfGpuIsLost() {
  {
    absl::MutexLock lock(&mutex_);
    if (!std::exchange(has_failed_, false)) return;
  }
  if (options_.gpu == nullptr) return;
  // After a fault it makes nothing any more. It may be full, too, and that passes.
  const absl::Status status = options_.gpu->NewEvent().status();
  if (absl::IsUnavailable(status)) options_.on_lost_gpu(status);
}

bool Job::OthersBeginAnew(const Processes& processes) {
  const auto is_disturbed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || cohort_ != processes;
  };
  JobOutlook outlook = training_->Outlook();
  if (outlook == JobOutlook::kIsLeft) {
    // Because they have taken all steps, or to begin anew: that is known when they do. What this
    // node has is kept until then, for it may be what all have trained.
    const absl::Duration most =
        absl::Microseconds(training_->definition().options().join_timeout_us());
    const absl::Time deadline = Now() + most;
    Tell(absl::StrFormat("other nodes have left it; waits %s for one to come again",
                         absl::FormatDuration(most)));
    while (outlook == JobOutlook::kIsLeft && Now() < deadline) {
      {
        absl::MutexLock lock(&mutex_);
        if (options_.session.worker.clock->Await(mutex_, absl::Condition(&is_disturbed),
                                                 kLookInterval)) {
          return false;
        }
      }
      outlook = training_->Outlook();
    }
  }
  return outlook == JobOutlook::kBeginsAnew;
}

absl::Status Job::CheckAreUntrained(const Processes& processes) {
  uint64_t steps;
  {
    absl::MutexLock lock(&mutex_);
    steps = steps_;
  }
  if (steps == 0) return absl::OkStatus();
  for (const std::shared_ptr<Process>& process : processes) {
    const Start& start = process->attach.start();
    if (!start.resume().empty() || start.has_resume_state()) continue;
    const absl::StatusOr<bool> is_trained = training_->AreParameters(*process->gradients);
    if (!is_trained.ok()) return is_trained.status();
    if (!*is_trained) continue;
    return TryAgain(absl::FailedPreconditionError(absl::StrFormat(
        "%s would begin with the parameters that job '%s' had after %d steps, and other nodes "
        "begin it anew. Start all processes of this node again, from the newest checkpoint if "
        "there is one",
        process->Describe(), name_, steps)));
  }
  return absl::OkStatus();
}

void Job::Begin(const Processes& processes) {
  bool goes_on;
  {
    absl::MutexLock lock(&mutex_);
    goes_on = has_joined_;
  }
  if (goes_on && OthersBeginAnew(processes)) {
    // They would wait for this one, and its processes for theirs.
    Tell("other nodes begin it anew; so does this one");
    const absl::Status status = CheckAreUntrained(processes);
    if (!status.ok()) return Fail(training_.get(), status, processes);
    training_->Leave().IgnoreError();
    absl::MutexLock lock(&mutex_);
    training_ = GiveUp();
    ++cohorts_;  // who is of the last one has nothing to read any more
    goes_on = false;
  }
  if (!goes_on) {
    absl::Status status;
    for (const std::shared_ptr<Process>& process : processes) {
      status.Update(CheckSame(process->attach.start(), processes[0]->attach.start()));
    }
    if (status.ok()) {
      SessionOptions session = options_.session;
      session.worker.on_news = [weak = weak_from_this()] {
        if (const std::shared_ptr<Job> job = weak.lock()) job->HearOfNews();
      };
      status = training_->Join(session, processes[0]->attach.start(), GradientsOf(processes));
    }
    if (!status.ok()) return Fail(training_.get(), status, processes);
  }
  Reply reply;
  Begun& begun = *reply.mutable_begun();
  begun = training_->begun();
  if (goes_on) {
    begun.set_returned(true);
    begun.set_returned_step(begun.steps());
    begun.set_lost_error_norm(0);
    const log::Scope scope({.step = begun.steps()});
    Tell(absl::StrFormat("goes on at step %d", begun.steps()));
  }
  Answers answers;
  absl::MutexLock lock(&mutex_);
  is_at_work_ = false;
  has_joined_ = true;
  steps_ = begun.steps();
  ++cohorts_;
  left_.clear();
  EndStep(processes);
  for (const std::shared_ptr<Process>& process : processes) {
    process->cohort = cohorts_;
    answers.Add(*process, reply);
  }
}

void Job::Advance(const Processes& processes) {
  Training* training;
  StepRates rates;
  std::vector<uint32_t> tensors;
  {
    absl::MutexLock lock(&mutex_);
    if (cohort_ != processes) return;  // it is over
    training = training_.get();
    rates = *processes[0]->rates;
    tensors = arrivals_->TakeComplete();
    worker_has_news_ = false;
    for (const std::shared_ptr<Process>& process : processes) {
      if (is_step_open_) break;  // they had the same
      // Nothing is sent, and they are told when they call for the step.
      if (!CheckSameRates(*process->rates, rates, process->Describe()).ok()) return;
    }
    is_step_open_ = true;
  }
  const absl::Status status = training->Advance(GradientsOf(processes), rates, tensors);
  // Of other rates than those of an open step they are told when they call, too.
  if (!status.ok() && !absl::IsInvalidArgument(status)) Fail(training, status, /*processes=*/{});
}

void Job::LetGo() {
  Training* training;
  {
    absl::MutexLock lock(&mutex_);
    holds_gradients_ = false;
    training = has_joined_ ? training_.get() : nullptr;  // others may forget one that has not
  }
  if (training != nullptr) training->LetGoOfGradients();
}

void Job::Step(const Processes& processes) {
  const StepRates& rates = processes[0]->request.step().rates();
  for (const std::shared_ptr<Process>& process : processes) {
    absl::Status status =
        CheckSameRates(process->request.step().rates(), rates, process->Describe());
    if (!status.ok()) return RefuseStep(status, processes);
  }
  const absl::Time start = Now();
  absl::StatusOr<Stepped> stepped = training_->Step(GradientsOf(processes), rates);
  if (absl::IsInvalidArgument(stepped.status())) return RefuseStep(stepped.status(), processes);
  if (!stepped.ok()) return Fail(training_.get(), stepped.status(), processes);
  Answers answers;
  absl::MutexLock lock(&mutex_);
  is_at_work_ = false;
  steps_ = stepped->steps();
  EndStep(processes);
  for (const std::shared_ptr<Process>& process : processes) {
    Reply reply;
    Stepped& to = *reply.mutable_stepped();
    to = *stepped;
    to.set_wait_ns(to.wait_ns() + absl::ToInt64Nanoseconds(start - process->since));
    answers.Add(*process, std::move(reply));
  }
}

void Job::Checkpoint(const Processes& processes) {
  const std::string& directory = processes[0]->request.checkpoint().directory();
  for (const std::shared_ptr<Process>& process : processes) {
    const std::string& theirs = process->request.checkpoint().directory();
    if (theirs == directory) continue;
    return AnswerAll(processes,
                     ReplyOf(absl::InvalidArgumentError(absl::StrFormat(
                         "%s saves a checkpoint in '%s', local rank 0 in '%s': it is one, in one "
                         "directory",
                         process->Describe(), theirs, directory))));
  }
  AnswerAll(processes, ReplyOf(training_->Checkpoint(directory)));
}

void Job::SaveState(const Processes& processes) {
  bool is_over;
  {
    absl::MutexLock lock(&mutex_);
    is_over = !IsOfLastCohort(*processes[0]);
  }
  if (is_over) {
    return AnswerAll(processes,
                     ReplyOf(absl::FailedPreconditionError(
                         "the job has gone on without this process, or is over; what was saved "
                         "before is what to go on from")));
  }
  absl::StatusOr<std::unique_ptr<SharedMemory>> state = training_->SaveState();
  Reply reply = ReplyOf(state.status());
  if (state.ok()) {
    *reply.mutable_saved_state()->mutable_state() = (*state)->handle();
    absl::MutexLock lock(&mutex_);
    processes[0]->saved_state = *std::move(state);
  }
  AnswerAll(processes, reply);
}

void Job::Leave(const Processes& processes) {
  std::unique_ptr<Training> training;
  {
    absl::MutexLock lock(&mutex_);
    training = std::move(left_training_);
  }
  AnswerAll(processes, ReplyOf(training->Leave()));
}

void Job::Quarrel(const Processes& processes) {
  std::vector<std::string> calls;
  for (const std::shared_ptr<Process>& process : processes) {
    calls.push_back(
        absl::StrFormat("%s calls for %s", process->Describe(), NameOf(process->request)));
  }
  const absl::Status status = absl::FailedPreconditionError(absl::StrCat(
      "the processes of a node make the same calls, but ", absl::StrJoin(calls, ", ")));
  Answers answers;
  absl::MutexLock lock(&mutex_);
  is_at_work_ = false;
  for (const std::shared_ptr<Process>& process : processes) {
    answers.Add(*process, ReplyOf(status));
  }
  Break(status, answers);
}

}  // namespace signpost::node
