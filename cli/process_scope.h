// What a process must hold while it owns others: their signals, and their orphans.

#ifndef SIGNPOST_CLI_PROCESS_SCOPE_H_
#define SIGNPOST_CLI_PROCESS_SCOPE_H_

#include <signal.h>

#include <optional>

namespace signpost::cli {

// While it lives, the signals that a launch must see (SIGINT, SIGTERM, SIGHUP, SIGPIPE of what this
// thread writes, SIGCHLD) are read from fd() instead of interrupting, and the descendants that lose
// their parents become children of this process. When it goes, it kills all children that are left,
// and drops what signals are.
class ProcessScope {
 public:
  ProcessScope();
  ~ProcessScope();
  ProcessScope(const ProcessScope&) = delete;
  ProcessScope& operator=(const ProcessScope&) = delete;

  int fd() const { return fd_; }  // to poll for input

  // None: there is no further one yet.
  std::optional<int> NextSignal() const;

 private:
  sigset_t signals_, old_mask_;
  int fd_ = -1;
};

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_PROCESS_SCOPE_H_
