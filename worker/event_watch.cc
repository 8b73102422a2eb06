#include "worker/event_watch.h"

#include <utility>

namespace signpost {

EventWatch::EventWatch(kernels::cuda::Gpu& gpu) : gpu_(gpu), thread_([this] { Run(); }) {}

EventWatch::~EventWatch() {
  {
    absl::MutexLock lock(&mutex_);
    ends_ = true;
  }
  thread_.join();
}

void EventWatch::Add(kernels::cuda::Event event, Happened happened) {
  absl::MutexLock lock(&mutex_);
  items_.push_back({event, std::move(happened)});
}

void EventWatch::Run() {
  while (true) {
    Item item;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &EventWatch::HasWork));
      if (items_.empty()) return;
      item = std::move(items_.front());
      items_.pop_front();
    }
    item.happened(gpu_.Await(item.event));
  }
}

}  // namespace signpost
