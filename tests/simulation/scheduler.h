// Virtual time: tasks that run one at a time, and events between them, in an order that a seed
// decides and nothing else does. Tasks are of processes, which may stand still.

#ifndef SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_
#define SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/clock.h"

namespace signpost::simulation {

class ProcessClock;

// All methods are for the thread that owns it, which also runs its tasks and events: each task has
// a stack of its own. (With a thread of its own, much of the time went to changes from one to the
// next.) What a task holds when it waits, of a mutex or of thread_local variables, the next one
// has.
class Scheduler final {
 public:
  explicit Scheduler(uint64_t seed);
  ~Scheduler();

  absl::Time Now() const { return now_; }

  // Calls the event once that time has passed.
  void After(absl::Duration delay, std::function<void()> event);

  // A task that Run will run, of the process with that clock.
  void Spawn(ProcessClock& clock, std::function<void()> body);
  // For tasks: lets others run until the condition, if there is one, holds, or it is that time in
  // its process.
  void Wait(const absl::Condition* condition, absl::Time deadline);

  // Runs tasks and events until all tasks have ended. Time passes only while no task can run.
  void Run();

  uint64_t Below(uint64_t n) { return random_() % n; }  // n >= 1
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  absl::Duration Between(absl::Duration least, absl::Duration most);

 private:
  struct Task;

  // What a task's stack begins with; makecontext passes ints.
  static void Begin(unsigned int high_half_of_task, unsigned int low_half);

  bool CanRun(const Task& task) const;
  // Lets time pass until a task can run, which is then returned; null: all have ended.
  Task* Next();
  // Ends the running task's turn; returns at its next.
  void Yield();
  // The next task's turn begins, or Run's; returns at the next one of whose `from` is.
  void HandOver(ucontext_t& from, Task* next);

  std::mt19937_64 random_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  std::multimap<absl::Time, std::function<void()>> events_;
  std::vector<std::unique_ptr<Task>> tasks_;

  ucontext_t end_;           // Run
  Task* running_ = nullptr;  // null: none has begun, or all have ended
};

// A process's clock, which stands still with it. As RunningTime, which counts a second of a
// standstill at most; this one counts nothing, since a deadline is a few milliseconds here.
class ProcessClock final : public Clock {
 public:
  explicit ProcessClock(Scheduler& scheduler) : scheduler_(scheduler) {}

  absl::Time Now() override { return std::max(scheduler_.Now(), goes_on_) - stood_still_; }
  // For the process's tasks: lets others run until the condition holds.
  bool Await(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout) override;
  // For the process's tasks: lets time pass.
  void Sleep(absl::Duration duration);
  // Calls the event, in the process, once that time has passed.
  void After(absl::Duration delay, std::function<void()> event);
  // Calls the event at once, or when the process goes on: what comes waits in its buffers.
  void Receive(std::function<void()> event);

  // From now on, for that long: none of its tasks runs, and no time passes.
  void StandStill(absl::Duration duration);
  bool stands_still() const { return scheduler_.Now() < goes_on_; }

  // When it will be that time, for the scheduler, as far as is known.
  absl::Time ScheduledTime(absl::Time time) const {
    return std::max(goes_on_, time + stood_still_);
  }

 private:
  void At(absl::Time time, std::function<void()> event);

  Scheduler& scheduler_;
  absl::Duration stood_still_;                 // in all, until then:
  absl::Time goes_on_ = absl::InfinitePast();  // of the scheduler
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_
