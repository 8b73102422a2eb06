// Virtual time: threads that run one at a time, and events between them, in an order that a seed
// decides and nothing else does.

#ifndef SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_
#define SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "worker/clock.h"

namespace signpost::simulation {

// All methods are for the thread that owns it, and for its tasks and events: of all these only one
// is ever running. Which task is next its predecessor finds out, as a turn of a scheduler's own thread
// between any two would double what most of the time goes to, changes from one thread to another.
class Scheduler final : public Clock {
 public:
  explicit Scheduler(uint64_t seed) : random_(seed) {}
  ~Scheduler() override;

  absl::Time Now() override { return now_; }
  // For tasks: lets others run until the condition holds.
  bool Await(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout) override;
  // For tasks: lets time pass.
  void Sleep(absl::Duration duration);

  // Calls the event once that time has passed.
  void After(absl::Duration delay, std::function<void()> event);

  // A thread that Run will run.
  void Spawn(std::function<void()> body);

  // Runs tasks and events until all tasks have ended. Time passes only while no task can run.
  void Run();

  uint64_t Below(uint64_t n) { return random_() % n; }  // n >= 1
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  absl::Duration Between(absl::Duration least, absl::Duration most);

 private:
  struct Task {
    std::function<void()> body;
    const absl::Condition* condition = nullptr;  // null: it only waits for the deadline
    absl::Time deadline = absl::InfinitePast();
    bool ended = false;
    std::condition_variable turn;
    std::thread thread;
  };

  bool CanRun(const Task& task) const;
  // Lets time pass until a task can run, which is then returned; null: all have ended.
  Task* Next();
  // Ends the running task's turn; returns at its next.
  void Yield();
  // The next task's turn begins, or Run returns.
  void HandOver(Task* next);

  std::mt19937_64 random_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  std::multimap<absl::Time, std::function<void()>> events_;
  std::vector<std::unique_ptr<Task>> tasks_;

  std::mutex mutex_;  // what a turn reads and writes passes from one thread to the next by this
  std::condition_variable end_;
  Task* running_ = nullptr;  // null: none has begun, or all have ended
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_SCHEDULER_H_
