#include "cli/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace signpost::cli {
namespace {

constexpr size_t kReadBytes = 65536;  // at a time: other processes have their turn in between
constexpr int kCannotRun = 127;       // as shells have it

using Environment = std::vector<std::pair<std::string, std::string>>;

// A pipe that no other child inherits, and whose end to read does not block.
absl::Status OpenPipe(int (&ends)[2]) {
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot open a pipe: ", strerror(errno),
                     "; more processes need a higher limit: ulimit -n"));
  }
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return absl::OkStatus();
}

// "NAME=value" strings: this process's, with those of `changes` in place of their namesakes.
std::vector<std::string> ChangedEnvironment(const Environment& changes) {
  std::vector<std::string> strings;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    bool changed = false;
    for (const auto& [name, value] : changes) {
      changed = changed || absl::StartsWith(*entry, absl::StrCat(name, "="));
    }
    if (!changed) strings.emplace_back(*entry);
  }
  for (const auto& [name, value] : changes) strings.push_back(absl::StrCat(name, "=", value));
  return strings;
}

// As execve wants them. Points into `strings`.
std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

// The child's life between fork and exec.
[[noreturn]] void Become(char* const* command, char* const* environment, pid_t parent, int output,
                         int error) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kCannotRun);  // the parent died before the line above

  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);  // which this program may ignore
  dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(error, STDERR_FILENO);
  execvpe(command[0], command, environment);
  dprintf(STDERR_FILENO, "cannot run '%s': %s\n", command[0], strerror(errno));
  _exit(kCannotRun);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::vector<std::string>& command, const Environment& environment) {
  int output[2], error[2];
  if (absl::Status status = OpenPipe(output); !status.ok()) return status;
  if (absl::Status status = OpenPipe(error); !status.ok()) {
    close(output[0]), close(output[1]);
    return status;
  }

  std::vector<std::string> arguments = command;
  std::vector<std::string> variables = ChangedEnvironment(environment);
  const std::vector<char*> argument_pointers = Pointers(arguments);
  const std::vector<char*> variable_pointers = Pointers(variables);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0)
    Become(argument_pointers.data(), variable_pointers.data(), parent, output[1], error[1]);
  const int fork_error = errno;
  close(output[1]);
  close(error[1]);
  if (pid < 0) {
    close(output[0]), close(error[0]);
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start '", command[0], "': ", strerror(fork_error)));
  }
  setpgid(pid, pid);  // here as well: whoever comes first, the group is there from now on
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid, output[0], error[0]));
}

ChildProcess::ChildProcess(pid_t pid, int output, int error) : pid_(pid) {
  pipes_[0].fd = output;
  pipes_[1].fd = error;
  pipes_[1].is_error = true;
}

ChildProcess::~ChildProcess() {
  Signal(SIGKILL);
  for (const int fd : pipes()) close(fd);
}

std::vector<int> ChildProcess::pipes() const {
  std::vector<int> open;
  for (const Pipe& pipe : pipes_) {
    if (pipe.fd >= 0) open.push_back(pipe.fd);
  }
  return open;
}

void ChildProcess::ReadOutput(const OnLine& on_line) {
  for (Pipe& pipe : pipes_) {
    if (pipe.fd >= 0) Read(pipe, on_line);
  }
}

void ChildProcess::SetEnded(int wait_status, const OnLine& on_line) {
  ended_ = true;
  wait_status_ = wait_status;
  // A pipe holds 64 KiB unless made larger; who still writes now has left the group, and is not
  // waited for.
  for (int reads = 0; reads < 16; ++reads) ReadOutput(on_line);
  for (Pipe& pipe : pipes_) {
    if (pipe.fd >= 0) close(std::exchange(pipe.fd, -1));
    pipe.splitter.Finish([&](absl::string_view line) { Deliver(pipe.is_error, line, on_line); });
  }
}

void ChildProcess::Read(Pipe& pipe, const OnLine& on_line) {
  char bytes[kReadBytes];
  const ssize_t size = read(pipe.fd, bytes, sizeof bytes);
  if (size > 0) {
    pipe.splitter.Add({bytes, static_cast<size_t>(size)},
                      [&](absl::string_view line) { Deliver(pipe.is_error, line, on_line); });
  } else if (size == 0) {
    close(std::exchange(pipe.fd, -1));
  }
}

void ChildProcess::Deliver(bool is_error, absl::string_view line, const OnLine& on_line) {
  last_lines_.emplace_back(line);
  if (last_lines_.size() > kLastLines) last_lines_.pop_front();
  on_line(is_error, line);
}

int ChildProcess::exit_code() const {
  return WIFSIGNALED(wait_status_) ? 128 + WTERMSIG(wait_status_) : WEXITSTATUS(wait_status_);
}

std::string ChildProcess::DescribeEnd() const {
  if (!WIFSIGNALED(wait_status_)) return absl::StrCat("exit code ", WEXITSTATUS(wait_status_));
  const char* name = sigabbrev_np(WTERMSIG(wait_status_));
  return name == nullptr ? absl::StrCat("killed by signal ", WTERMSIG(wait_status_))
                         : absl::StrCat("killed by SIG", name);
}

void ChildProcess::Signal(int signal) const {
  if (!ended_) kill(-pid_, signal);
}

std::string OwnExecutable() {
  constexpr char kLink[] = "/proc/self/exe";
  char path[PATH_MAX];
  const ssize_t size = readlink(kLink, path, sizeof path);
  const std::string executable(path, std::max<ssize_t>(size, 0));
  // The link works even if the file has been replaced since, but looks odd in a list of processes.
  return size > 0 && access(executable.c_str(), X_OK) == 0 ? executable : kLink;
}

}  // namespace signpost::cli
