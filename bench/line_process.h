// A process that is told what to do, and answers, line by line.

#ifndef SIGNPOST_BENCH_LINE_PROCESS_H_
#define SIGNPOST_BENCH_LINE_PROCESS_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace signpost::bench {

struct LineProcessOptions {
  int error = STDERR_FILENO;                // where its errors go
  int end_signal = 0;                       // asks it to end, besides the end of its input; 0: none
  absl::Duration grace = absl::Seconds(1);  // between asking it to end and killing it
};

// Leads its own process group, and dies with the process that started it. Not thread-safe; to be
// started from the main thread, since the kernel ties its life to that thread.
class LineProcess {
 public:
  using Environment = std::vector<std::pair<std::string, std::string>>;

  // Runs command[0], looked up in PATH, in this process's environment with `environment` on top.
  // RESOURCE_EXHAUSTED if there can be no further process or pipe.
  static absl::StatusOr<std::unique_ptr<LineProcess>> Start(const std::vector<std::string>& command,
                                                            const Environment& environment,
                                                            const LineProcessOptions& options = {});

  // Asks it to end, if that has not been done, and kills what is left of it, and of what it has
  // started, when its grace is over.
  ~LineProcess();
  LineProcess(const LineProcess&) = delete;
  LineProcess& operator=(const LineProcess&) = delete;

  // UNAVAILABLE, with how it ended, if it does not read any more.
  absl::Status Write(const std::string& line);

  // Closes its standard input: nothing more can be written to it. Sends its end_signal.
  void AskToEnd();

  // UNAVAILABLE, with how it ended, if it has.
  absl::Status CheckRuns();
  // By a signal, as SIGSTOP, until another one lets it go on.
  bool is_stopped() const;

  // Without its end. UNAVAILABLE, with how it ended, if there is no further line; DEADLINE_EXCEEDED
  // if none has come until then; CANCELLED when interrupted (InterruptScope).
  absl::StatusOr<std::string> ReadLine(absl::Time deadline);

  // Processor time of all its threads so far.
  absl::Duration cpu_time() const;

  // The most memory that it has had at once; 0 once it has ended.
  uint64_t peak_memory_bytes() const;

  const std::string& name() const { return name_; }  // its command line
  pid_t pid() const { return pid_; }
  int in() const { return in_; }  // where it reads from, for others to write to; -1: closed

 private:
  LineProcess(std::string name, pid_t pid, int in, int out, const LineProcessOptions& options)
      : name_(std::move(name)),
        pid_(pid),
        end_signal_(options.end_signal),
        grace_(options.grace),
        in_(in),
        out_(out) {}
  absl::Status Ended();
  // Waits for its end, until its grace is over; then it is killed, and what it has started. How it
  // ended.
  int Reap();

  const std::string name_;
  const pid_t pid_;
  const int end_signal_;
  const absl::Duration grace_;
  int in_, out_;
  absl::Time asked_to_end_ = absl::InfiniteFuture();
  bool ended_ = false;
  std::string unread_;
};

// While it lives, SIGINT, SIGTERM and SIGHUP end what is waited for instead of this process, so
// that what was set up can be taken down.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
};

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_LINE_PROCESS_H_
