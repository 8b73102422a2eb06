#include "tests/simulation/scheduler.h"

#include <algorithm>

namespace signpost::simulation {

Scheduler::~Scheduler() {
  for (const auto& task : tasks_) {
    if (task->thread.joinable()) task->thread.join();
  }
}

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
  Task& task = *tasks_.emplace_back(std::make_unique<Task>());
  task.body = std::move(body);
  task.thread = std::thread([this, &task] {
    {
      std::unique_lock lock(mutex_);
      task.turn.wait(lock, [&] { return running_ == &task; });
    }
    task.body();
    std::unique_lock lock(mutex_);
    task.ended = true;
    running_ = nullptr;
    scheduler_turn_.notify_one();
  });
}

void Scheduler::Run() {
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
    if (all_ended) return;
    if (!ready.empty()) {
      RunTask(*ready[Below(ready.size())]);
      continue;
    }
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

void Scheduler::RunTask(Task& task) {
  std::unique_lock lock(mutex_);
  running_ = &task;
  task.turn.notify_one();
  scheduler_turn_.wait(lock, [this] { return running_ == nullptr; });
}

void Scheduler::Yield() {
  std::unique_lock lock(mutex_);
  Task* const self = running_;
  running_ = nullptr;
  scheduler_turn_.notify_one();
  self->turn.wait(lock, [&] { return running_ == self; });
}

}  // namespace signpost::simulation
