// A job as the node's worker has it: the processes that are attached, and what they train.

#ifndef SIGNPOST_NODE_JOB_H_
#define SIGNPOST_NODE_JOB_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/session_options.h"
#include "kernels/gpu.h"
#include "node/arrivals.h"
#include "node/numbers.h"
#include "node/shared_memory.h"
#include "node/training.h"
#include "proto/node.pb.h"

namespace signpost::node {

struct NodeOptions {
  uint32_t processes = 1;  // of this node that train; as many as of every other node
  // Where the aggregators are, and which of the job's workers this node is. The processes say the
  // rest when they attach.
  SessionOptions session;
  // Where it trains, which all processes' tensors must then be on GPUs for. Outlives it. Null: on
  // its processors. session.gpu is not looked at.
  kernels::cuda::Gpu* gpu = nullptr;
  // Is told why the GPU can be used no more: no job can go on. From any thread, perhaps repeatedly.
  std::function<void(const absl::Status& why)> on_lost_gpu = [](const absl::Status&) {};
  uint64_t max_parameters = uint64_t{1} << 34;  // --max-parameters, of each job
  // Gets a line for a person when processes come or go. From any thread.
  std::function<void(const std::string& line)> on_event = PrintConnection;
};

// Requests and their errors are as proto/node.proto has them. What it does to the numbers it does
// on a thread of its own, one thing after the other; nobody else waits for that. Thread-safe. Held
// by shared pointers: its worker's connections may have news for it until they are gone.
class Job : public std::enable_shared_from_this<Job> {
 public:
  // Is called exactly once, with no lock held, before the call returns or later by any thread.
  using Done = absl::AnyInvocable<void(Reply)>;

  Job(const std::string& name, const NodeOptions& options);
  ~Job();  // Requires Stop.

  // A process is there, which `attach` describes, and gets a number. It is of this node.
  // RESOURCE_EXHAUSTED when too many are there already, most of which can only wait.
  absl::StatusOr<uint64_t> Enter(const Attach& attach) ABSL_LOCKS_EXCLUDED(mutex_);
  // A request of that process, whose last one has been answered. The first one is to attach, and
  // waits for the failure timeout at most while another process is attached as its rank, whose end
  // may not have been noticed yet.
  void Call(uint64_t process, const Request& request, Done done) ABSL_LOCKS_EXCLUDED(mutex_);
  // That process's gradients are ready, as it tells; nothing is answered.
  void HearOfGradients(uint64_t process, const GradientsReady& gradients)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The process is there no more. What it waits for is answered still, if only when that is done;
  // later requests are CANCELLED. Idempotent.
  void Gone(uint64_t process) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends calls that wait with UNAVAILABLE, finishes what is under way, and leaves the job. Blocks.
  // Later calls end at once.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // No process is attached, and there is nothing to come back to.
  bool is_idle() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class Work {
    kNone,
    kBegin,
    kAdvance,
    kLetGo,
    kStep,
    kCheckpoint,
    kSaveState,
    kLeave,
    kQuarrel,
    kEnd
  };

  struct Process {
    Process(uint32_t local_rank, const Attach& attach) : local_rank(local_rank), attach(attach) {}
    std::string Describe() const;  // "local rank 1 (process 4711)"

    const uint32_t local_rank;
    const Attach attach;
    std::shared_ptr<const Numbers> gradients;   // null: it is not attached yet
    std::shared_ptr<const Numbers> parameters;  // what it reads, until it is gone
    std::unique_ptr<SharedMemory> saved_state;  // until the next request
    uint64_t cohort = 0;                        // which, from 1 on; 0: it has not begun
    bool has_left = false;
    std::optional<StepRates> rates;  // of the step that it has begun
    absl::Status over;               // why the cohort is over that it was of

    Request request;
    Done done;  // null: it waits for nothing
    absl::Time since;
    bool is_at_work = false;  // the job's thread will answer it
  };
  using Processes = std::vector<std::shared_ptr<Process>>;

  static std::vector<std::shared_ptr<const Numbers>> GradientsOf(const Processes& processes);

  // Answers that are given once the lock is free.
  class Answers;

  void Run();
  void HearOfNews() ABSL_LOCKS_EXCLUDED(mutex_);  // of the worker
  bool HasNewsOrWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Work NextWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same, and for which processes.
  std::pair<Work, Processes> TakeWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration TimeToNextDeadline() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // On the job's thread; they answer these processes, and are not at work any more when they do.
  void Do(Work work, const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Begin(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether other nodes begin the job anew, so that this one has to. If they have left it, waits
  // for one to come again, for as long as a join may take.
  bool OthersBeginAnew(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether these can begin anew with the other nodes' processes: none has what has been trained.
  absl::Status CheckAreUntrained(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Advance(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  void LetGo() ABSL_LOCKS_EXCLUDED(mutex_);
  void Step(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Checkpoint(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  void SaveState(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Quarrel(const Processes& processes) ABSL_LOCKS_EXCLUDED(mutex_);
  // The session is worth nothing any more: the cohort is over, and the next one begins anew. Does
  // nothing if that is not what is trained any more.
  void Fail(const Training* training, const absl::Status& status, const Processes& processes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void RefuseStep(const absl::Status& status, const Processes& processes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // They may begin another step.
  void EndStep(const Processes& processes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerAll(const Processes& processes, const Reply& reply) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whatever has failed since the last time may have done so because of the GPU.
  void TellIfGpuIsLost() ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets go of what is trained, as if nobody had attached yet.
  std::unique_ptr<Training> GiveUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Gives its place to each process that waits for one which is free.
  void AdmitWaiting(Answers& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Admit(Process& process, Reply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeArrivals(Process& process, const GradientsReady& gradients)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndOverdue(Answers& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WhoIsWaitedFor(const Process& waiting) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The cohort is over, for that reason.
  void Break(const absl::Status& why, Answers& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether what is trained is what the process has taken part in, and nobody after it.
  bool IsOfLastCohort(const Process& process) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The process will not take part any more.
  void TakeLeave(const std::shared_ptr<Process>& process, Answers& answers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsUsed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // whether a process is attached
  // Forgets what nobody has begun.
  void ForgetIfUnused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time DeadlineOf(const Process& process) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time Now() const { return options_.session.worker.clock->Now(); }
  void Tell(const std::string& what) const;

  const std::string name_;
  const NodeOptions options_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_process_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::shared_ptr<Process>> processes_ ABSL_GUARDED_BY(mutex_);
  Processes cohort_ ABSL_GUARDED_BY(mutex_);  // by local rank; null: that place is free
  std::map<uint32_t, std::string> refusals_ ABSL_GUARDED_BY(mutex_);  // the last of each local rank
  bool is_at_work_ ABSL_GUARDED_BY(mutex_) =
      false;  // until it answers: what follows may be at once
  bool has_joined_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;       // done, once it has joined
  uint64_t cohorts_ ABSL_GUARDED_BY(mutex_) = 0;     // that have begun
  std::set<uint32_t> left_ ABSL_GUARDED_BY(mutex_);  // local ranks of the last of them
  // Whose call is answered once the job has been left, and with what it has been trained.
  std::shared_ptr<Process> last_to_leave_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Training> left_training_ ABSL_GUARDED_BY(mutex_);
  // Of the step that the cohort has begun; none before a process tells of gradients.
  std::optional<Arrivals> arrivals_ ABSL_GUARDED_BY(mutex_);
  bool is_step_open_ ABSL_GUARDED_BY(mutex_) = false;     // of this cohort, in training_
  bool worker_has_news_ ABSL_GUARDED_BY(mutex_) = false;  // with which an open step can go on
  bool holds_gradients_ ABSL_GUARDED_BY(mutex_) = false;  // an open step may, of a cohort before
  // A deadline may be nearer, or something has failed.
  bool has_news_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_failed_ ABSL_GUARDED_BY(mutex_) = false;  // a request, since the GPU was last asked
  // Changes hands under the lock; while is_at_work_ by the job's thread only, which uses it then. A
  // step may advance in one that has changed hands.
  std::unique_ptr<Training> training_;

  std::thread thread_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_JOB_H_
