// Virtual time: tasks that run one at a time, and events between them, in an order that a seed
// decides and nothing else does.

#ifndef SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_
#define SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "worker/clock.h"

namespace signpost::simulation {

// All methods are for the thread that owns it, which also runs its tasks and events: each task has
// a stack of its own. (With a thread of its own, much of the time went to changes from one to the
// next.) What a task holds when it waits, of a mutex or of thread_local variables, the next one
// has.
class Scheduler final : public Clock {
 public:
  explicit Scheduler(uint64_t seed);
  ~Scheduler() override;

  absl::Time Now() override { return now_; }
  // For tasks: lets others run until the condition holds.
  bool Await(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout) override;
  // For tasks: lets time pass.
  void Sleep(absl::Duration duration);

  // Calls the event once that time has passed.
  void After(absl::Duration delay, std::function<void()> event);

  // A task that Run will run.
  void Spawn(std::function<void()> body);

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

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_
