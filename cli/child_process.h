// A process that this one starts, and whose output it reads.

#ifndef SIGNPOST_CLI_CHILD_PROCESS_H_
#define SIGNPOST_CLI_CHILD_PROCESS_H_

#include <sys/types.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cli/line_splitter.h"

namespace signpost::cli {

// Leads its own process group, reads nothing from standard input, and dies with the process that
// started it. Not thread-safe; to be started from the main thread, since the kernel ties its life
// to that thread.
class ChildProcess {
 public:
  static constexpr size_t kLastLines = 20;

  using OnLine = std::function<void(bool is_error, absl::string_view line)>;

  // Runs command[0], looked up in PATH, in this process's environment changed by `environment`
  // (name and value). A command that cannot be run ends with exit code 127, having said why.
  // RESOURCE_EXHAUSTED if there can be no further process or pipe.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(
      const std::vector<std::string>& command,
      const std::vector<std::pair<std::string, std::string>>& environment);

  // Kills its process group if it has not ended.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }

  // The pipes to poll for input: those still open.
  std::vector<int> pipes() const;

  // Calls on_line for the complete lines that can be read without blocking.
  void ReadOutput(const OnLine& on_line);

  // To be called when the process has been waited for: reads the rest of its output.
  void SetEnded(int wait_status, const OnLine& on_line);

  bool ended() const { return ended_; }
  // Requires ended(). As a shell has it: 128 + the signal's number if a signal ended it.
  int exit_code() const;
  std::string DescribeEnd() const;  // "exit code 3", "killed by SIGSEGV"

  // Sends a signal to the process group, unless it has ended.
  void Signal(int signal) const;

  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  struct Pipe {
    int fd = -1;  // the end to read; -1: closed
    bool is_error = false;
    LineSplitter splitter;
  };

  ChildProcess(pid_t pid, int output, int error);
  void Read(Pipe& pipe, const OnLine& on_line);
  void Deliver(bool is_error, absl::string_view line, const OnLine& on_line);

  const pid_t pid_;
  Pipe pipes_[2];
  std::deque<std::string> last_lines_;
  bool ended_ = false;
  int wait_status_ = 0;
};

// This program's executable, to start more processes of it.
std::string OwnExecutable();

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_CHILD_PROCESS_H_
