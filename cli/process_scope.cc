#include "cli/process_scope.h"

#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"

namespace signpost::cli {
namespace {

// What our processes started and left behind. When one of them has ended, its children are ours.
void KillChildren() {
  do {
    std::ifstream children(absl::StrCat("/proc/self/task/", getpid(), "/children"));
    if (!children) return;  // a kernel without CONFIG_PROC_CHILDREN: nobody to wait for
    for (pid_t child; children >> child;) kill(child, SIGKILL);
  } while (waitpid(-1, nullptr, 0) > 0);
}

}  // namespace

ProcessScope::ProcessScope() {
  sigemptyset(&signals_);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGCHLD}) sigaddset(&signals_, signal);
  sigprocmask(SIG_BLOCK, &signals_, &old_mask_);
  fd_ = signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

ProcessScope::~ProcessScope() {
  KillChildren();
  // Signals that came too late to be read would otherwise end this process now.
  while (NextSignal().has_value()) {
  }
  close(fd_);
  prctl(PR_SET_CHILD_SUBREAPER, 0);
  sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
}

std::optional<int> ProcessScope::NextSignal() const {
  signalfd_siginfo info;
  if (read(fd_, &info, sizeof info) != sizeof info) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

}  // namespace signpost::cli
