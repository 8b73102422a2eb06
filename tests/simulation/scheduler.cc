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
    task.ended = true;
    HandOver(Next());
  });
}

void Scheduler::Run() {
  HandOver(Next());
  std::unique_lock lock(mutex_);
  end_.wait(lock, [this] { return running_ == nullptr; });
}

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
  if (next == self) return;
  HandOver(next);
  std::unique_lock lock(mutex_);
  self->turn.wait(lock, [&] { return running_ == self; });
}

void Scheduler::HandOver(Task* next) {
  {
    std::lock_guard lock(mutex_);
    running_ = next;
  }
  (next != nullptr ? next->turn : end_).notify_one();
}

}  // namespace signpost::simulation
