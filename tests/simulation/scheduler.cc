#include "tests/simulation/scheduler.h"

#include <sys/mman.h>

#include <cstdlib>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace signpost::simulation {
namespace {

constexpr size_t kGuard = 4096;  // below the stack: what needs more than there is ends the program
constexpr size_t kStack = 1 << 20;

class Stack {
 public:
  Stack()
      : memory_(mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     /*fd=*/-1, /*offset=*/0)) {
    if (memory_ == MAP_FAILED || mprotect(memory_, kGuard, PROT_NONE) != 0) std::abort();
  }
  ~Stack() { munmap(memory_, kGuard + kStack); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  stack_t whole() const { return {.ss_sp = memory_, .ss_flags = 0, .ss_size = kGuard + kStack}; }

 private:
  void* const memory_;
};

}  // namespace

struct Scheduler::Task {
  Scheduler& scheduler;
  ProcessClock& clock;
  std::function<void()> body;
  Stack stack = {};
  ucontext_t context = {};
  const absl::Condition* condition = nullptr;  // null: it only waits for the deadline
  absl::Time deadline = absl::InfinitePast();  // of its clock
  bool ended = false;
};

Scheduler::Scheduler(uint64_t seed) : random_(seed) {}
Scheduler::~Scheduler() = default;

void Scheduler::Wait(const absl::Condition* condition, absl::Time deadline) {
  running_->condition = condition;
  running_->deadline = deadline;
  Yield();
}

void Scheduler::After(absl::Duration delay, std::function<void()> event) {
  events_.emplace(now_ + delay, std::move(event));
}

absl::Duration Scheduler::Between(absl::Duration least, absl::Duration most) {
  const int64_t range = absl::ToInt64Microseconds(most - least) + 1;
  return least + absl::Microseconds(Below(range));
}

void Scheduler::Spawn(ProcessClock& clock, std::function<void()> body) {
  Task& task = *tasks_.emplace_back(new Task{*this, clock, std::move(body)});
  getcontext(&task.context);
  task.context.uc_stack = task.stack.whole();
  const auto address = reinterpret_cast<uintptr_t>(&task);
  makecontext(&task.context, reinterpret_cast<void (*)()>(&Begin), 2,
              static_cast<unsigned int>(address >> 32), static_cast<unsigned int>(address));
}

void Scheduler::Begin(unsigned int high_half_of_task, unsigned int low_half) {
  Task& task = *reinterpret_cast<Task*>(uintptr_t{high_half_of_task} << 32 | low_half);
  task.body();
  task.ended = true;
  task.scheduler.HandOver(task.context, task.scheduler.Next());
}

void Scheduler::Run() { HandOver(end_, Next()); }

Scheduler::Task* Scheduler::Next() {
  while (true) {
    std::vector<Task*> ready;
    absl::Time next = absl::InfiniteFuture();
    bool all_ended = true;
    for (const auto& task : tasks_) {
      if (task->ended) continue;
      all_ended = false;
      if (CanRun(*task)) ready.push_back(task.get());
      // One that stands still may find its condition hold as soon as it goes on.
      const absl::Time due = task->clock.stands_still() ? absl::InfinitePast() : task->deadline;
      next = std::min(next, task->clock.ScheduledTime(due));
    }
    if (all_ended) return nullptr;
    if (!ready.empty()) return ready[Below(ready.size())];
    if (events_.empty() || next < events_.begin()->first) {
      now_ = next;
      continue;
    }
    auto event = events_.extract(events_.begin());
    now_ = std::max(now_, event.key());
    event.mapped()();
  }
}

bool Scheduler::CanRun(const Task& task) const {
  if (task.clock.stands_still()) return false;
  return task.deadline <= task.clock.Now() || (task.condition != nullptr && task.condition->Eval());
}

void Scheduler::Yield() {
  Task* const self = running_;
  Task* const next = Next();
  if (next != self) HandOver(self->context, next);
}

void Scheduler::HandOver(ucontext_t& from, Task* next) {
  running_ = next;
  swapcontext(&from, next != nullptr ? &next->context : &end_);
}

bool ProcessClock::Await(absl::Mutex& mutex, const absl::Condition& condition,
                         absl::Duration timeout) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (condition.Eval()) return true;
  const absl::Time deadline = Now() + timeout;
  mutex.Unlock();
  scheduler_.Wait(&condition, deadline);
  mutex.Lock();
  return condition.Eval();
}

void ProcessClock::Sleep(absl::Duration duration) {
  scheduler_.Wait(/*condition=*/nullptr, Now() + duration);
}

void ProcessClock::After(absl::Duration delay, std::function<void()> event) {
  At(Now() + delay, std::move(event));
}

void ProcessClock::Receive(std::function<void()> event) {
  if (stands_still()) return At(Now(), std::move(event));
  event();
}

void ProcessClock::At(absl::Time time, std::function<void()> event) {
  scheduler_.After(ScheduledTime(time) - scheduler_.Now(), [this, time, event = std::move(event)] {
    if (stands_still() || Now() < time) return At(time, event);  // it has stood still since
    event();
  });
}

void ProcessClock::StandStill(absl::Duration duration) {
  const absl::Time begin = std::max(scheduler_.Now(), goes_on_);
  goes_on_ = std::max(begin, scheduler_.Now() + duration);
  stood_still_ += goes_on_ - begin;
}

}  // namespace signpost::simulation
