#include "bench/line_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace signpost::bench {
namespace {

constexpr int kCannotRun = 127;  // as shells have it

std::atomic<bool> interrupted = false;

void Interrupt(int) { interrupted = true; }

// The child's life between fork and exec.
[[noreturn]] void Become(const std::vector<std::string>& command,
                         const LineProcess::Environment& environment, pid_t parent, int in, int out,
                         int error) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kCannotRun);  // the parent died before the line above
  signal(SIGPIPE, SIG_DFL);
  setpgid(0, 0);  // what interrupts this program is for it to tell the others of
  dup2(in, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(error, STDERR_FILENO);
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  dprintf(STDERR_FILENO, "cannot run '%s': %s\n", arguments[0], strerror(errno));
  _exit(kCannotRun);
}

std::string DescribeEnd(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    return absl::StrCat("was killed by SIG", sigabbrev_np(WTERMSIG(wait_status)));
  }
  return absl::StrCat("ended with exit code ", WEXITSTATUS(wait_status));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LineProcess>> LineProcess::Start(
    const std::vector<std::string>& command, const Environment& environment,
    const LineProcessOptions& options) {
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot open a pipe: ", strerror(errno)));
  }
  if (pipe2(out, O_CLOEXEC) != 0) {
    const int error = errno;
    for (int end : in) close(end);
    return absl::ResourceExhaustedError(absl::StrCat("cannot open a pipe: ", strerror(error)));
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(command, environment, parent, in[0], out[1], options.error);
  const int error = errno;
  close(in[0]);
  close(out[1]);
  if (pid > 0) {
    signal(SIGPIPE, SIG_IGN);  // writing to one that has ended is an error like others
    return std::unique_ptr<LineProcess>(
        new LineProcess(absl::StrJoin(command, " "), pid, in[1], out[0], options));
  }
  close(in[1]);
  close(out[0]);
  return absl::ResourceExhaustedError(absl::StrCat("cannot start a process: ", strerror(error)));
}

LineProcess::~LineProcess() {
  AskToEnd();
  close(out_);
  if (!ended_) Reap();
}

void LineProcess::AskToEnd() {
  if (in_ < 0) return;
  close(std::exchange(in_, -1));
  asked_to_end_ = absl::Now();
  if (!ended_ && end_signal_ != 0) kill(pid_, end_signal_);
}

absl::Status LineProcess::CheckRuns() {
  siginfo_t end = {};
  if (!ended_) waitid(P_PID, pid_, &end, WEXITED | WNOHANG | WNOWAIT);
  return ended_ || end.si_pid != 0 ? Ended() : absl::OkStatus();
}

bool LineProcess::is_stopped() const {
  siginfo_t stop = {};
  if (!ended_) waitid(P_PID, pid_, &stop, WSTOPPED | WNOHANG | WNOWAIT);
  return stop.si_pid != 0;
}

int LineProcess::Reap() {
  const absl::Time deadline = std::min(asked_to_end_, absl::Now()) + grace_;
  siginfo_t end = {};
  while (end.si_pid == 0 && absl::Now() < deadline) {
    waitid(P_PID, pid_, &end, WEXITED | WNOHANG | WNOWAIT);
    if (end.si_pid == 0) absl::SleepFor(absl::Milliseconds(2));
  }
  kill(-pid_, SIGKILL);  // with what it has started; its number is not free yet
  int wait_status = 0;
  while (waitpid(pid_, &wait_status, 0) < 0 && errno == EINTR) {
  }
  ended_ = true;
  return wait_status;
}

absl::Status LineProcess::Write(const std::string& line) {
  const std::string bytes = line + "\n";
  // A pipe takes so little at once.
  if (write(in_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())) {
    return absl::OkStatus();
  }
  return Ended();
}

absl::StatusOr<std::string> LineProcess::ReadLine(absl::Time deadline) {
  while (true) {
    const size_t end = unread_.find('\n');
    if (end != std::string::npos) {
      std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    const absl::Duration left = deadline - absl::Now();
    if (interrupted) return absl::CancelledError("interrupted");
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat("no answer from '", name_, "' in time"));
    }
    pollfd readable = {out_, POLLIN, 0};
    const int milliseconds = std::min<int64_t>(absl::ToInt64Milliseconds(left) + 1, 1000);
    if (poll(&readable, 1, milliseconds) <= 0) continue;
    char bytes[4096];
    const ssize_t read_bytes = read(out_, bytes, sizeof(bytes));
    if (read_bytes <= 0) return Ended();
    unread_.append(bytes, read_bytes);
  }
}

absl::Status LineProcess::Ended() {
  if (interrupted) return absl::CancelledError("interrupted");
  if (ended_) return absl::UnavailableError(absl::StrCat("'", name_, "' has ended"));
  return absl::UnavailableError(absl::StrCat("'", name_, "' ", DescribeEnd(Reap())));
}

absl::Duration LineProcess::cpu_time() const {
  clockid_t clock;
  timespec time = {};
  // It stands still for a process that has ended.
  if (clock_getcpuclockid(pid_, &clock) == 0) clock_gettime(clock, &time);
  return absl::DurationFromTimespec(time);
}

uint64_t LineProcess::peak_memory_bytes() const {
  std::ifstream status(absl::StrCat("/proc/", pid_, "/status"));
  for (std::string line; std::getline(status, line);) {
    absl::string_view rest = line;
    uint64_t kilobytes = 0;
    if (absl::ConsumePrefix(&rest, "VmHWM:") && absl::ConsumeSuffix(&rest, "kB") &&
        absl::SimpleAtoi(rest, &kilobytes)) {
      return kilobytes << 10;
    }
  }
  return 0;
}

InterruptScope::InterruptScope() {
  interrupted = false;
  struct sigaction action = {};
  action.sa_handler = Interrupt;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGHUP, &action, nullptr);
}

InterruptScope::~InterruptScope() {
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  signal(SIGHUP, SIG_DFL);
  interrupted = false;
}

}  // namespace signpost::bench
