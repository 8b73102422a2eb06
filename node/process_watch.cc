#include "node/process_watch.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace signpost::node {
namespace {

constexpr uint64_t kWake = 0;  // no process has this number

bool AddTo(int epoll, int fd, uint64_t number) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = number;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

uint64_t PidNamespace() {
  struct stat file = {};
  return stat("/proc/self/ns/pid", &file) == 0 ? file.st_ino : 0;
}

ProcessWatch::ProcessWatch()
    : wake_(eventfd(0, EFD_CLOEXEC)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (AddTo(epoll_, wake_, kWake)) thread_ = std::thread([this] { Run(); });
}

ProcessWatch::~ProcessWatch() {
  if (thread_.joinable()) {
    eventfd_write(wake_, 1);
    thread_.join();
  }
  for (const auto& [number, process] : processes_) close(process.pidfd);
  close(epoll_);
  close(wake_);
}

uint64_t ProcessWatch::Add(pid_t pid, uint64_t pid_namespace, Ended ended) {
  if (pid_namespace == 0 || pid_namespace != PidNamespace()) return kWake;
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) {
    if (errno == ESRCH) ended();
    return kWake;
  }
  absl::MutexLock lock(&mutex_);
  const uint64_t number = ++last_;
  processes_[number] = {pidfd, std::move(ended)};
  if (!AddTo(epoll_, pidfd, number)) {
    close(pidfd);
    processes_.erase(number);
  }
  return number;
}

void ProcessWatch::Remove(uint64_t number) { Take(number); }

ProcessWatch::Ended ProcessWatch::Take(uint64_t number) {
  absl::MutexLock lock(&mutex_);
  const auto found = processes_.find(number);
  if (found == processes_.end()) return nullptr;
  Ended ended = std::move(found->second.ended);
  close(found->second.pidfd);
  processes_.erase(found);
  return ended;
}

void ProcessWatch::Run() {
  while (true) {
    epoll_event event = {};
    const int events = epoll_wait(epoll_, &event, 1, /*timeout=*/-1);
    if (events < 0 && errno == EINTR) continue;
    if (events < 0 || event.data.u64 == kWake) return;
    if (Ended ended = Take(event.data.u64)) ended();
  }
}

}  // namespace signpost::node
