#include "tests/simulation/scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

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
  std::function<void()> body;
  Stack stack = {};
  ucontext_t context = {};
  const absl::Condition* condition = nullptr;  // null: it only waits for the deadline
  absl::Time deadline = absl::InfinitePast();
  bool ended = false;
};

Scheduler::Scheduler(uint64_t seed) : random_(seed) {}
Scheduler::~Scheduler() = default;

bool Scheduler::Await(absl::Mutex& mutex, const absl::Condition& condition,
                      absl::Duration timeout) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (condition.Eval()) return true;
  running_->condition = &condition;
  running_->deadline = now_ + timeout;
  mutex.Unlock();
  Yield();
  mutex.Lock();
  return condition.Eval();
}

void Scheduler::Sleep(absl::Duration duration) {
  running_->condition = nullptr;
  running_->deadline = now_ + duration;
  Yield();
}

void Scheduler::After(absl::Duration delay, std::function<void()> event) {
  events_.emplace(now_ + delay, std::move(event));
}

absl::Duration Scheduler::Between(absl::Duration least, absl::Duration most) {
  const int64_t range = absl::ToInt64Microseconds(most - least) + 1;
  return least + absl::Microseconds(Below(range));
}

void Scheduler::Spawn(std::function<void()> body) {
  Task& task = *tasks_.emplace_back(new Task{*this, std::move(body)});
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
      next = std::min(next, task->deadline);
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
  return task.deadline <= now_ || (task.condition != nullptr && task.condition->Eval());
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

}  // namespace signpost::simulation
