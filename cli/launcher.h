// Runs a training job on this machine: its aggregators, workers of nodes if there are any, and one
// process per rank, which start, fail and end as one.

#ifndef SIGNPOST_CLI_LAUNCHER_H_
#define SIGNPOST_CLI_LAUNCHER_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/failure_timeout.h"

namespace signpost::cli {

// What a process is in the run.
enum class Role { kAggregator, kNode, kRank };

// A line that one of the processes wrote.
struct OutputLine {
  Role role = Role::kRank;
  uint32_t index = 0;     // its shard, node or rank
  bool is_error = false;  // written to standard error
  absl::string_view text;
};

// "[rank 2] text", to standard output or standard error as the process wrote it. Lines that are not
// a rank's all go to standard error: standard output belongs to the job. With JSON as the log's
// format, what goes to standard error is that, and says whose it is.
void PrintPrefixed(const OutputLine& line);

// "signpost: aggregator 1 failed: killed by SIGKILL; started again (restart 1)", to standard error.
void PrintFailure(const std::string& what);

// An aggregator that can be connected to.
struct ListeningAggregator {
  uint32_t shard = 0;
  std::string address;  // "HOST:PORT"
  pid_t pid = 0;        // it has not been waited for yet
  std::string tls_dir;  // with which it can be observed; empty: in plain text
};

struct LaunchOptions {
  // One worker's program, found in PATH, and its arguments. Its environment says who it is:
  // SIGNPOST_AGGREGATORS, SIGNPOST_JOB (another one for each launch), SIGNPOST_RANK,
  // SIGNPOST_WORLD_SIZE, SIGNPOST_FAILURE_TIMEOUT, SIGNPOST_TLS_DIR; torchrun's RANK, LOCAL_RANK,
  // WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; with
  // min_workers SIGNPOST_ROUND_DEADLINE and SIGNPOST_MIN_WORKERS; and, unless they are set, glibc's
  // MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, and of several ranks each one's share of the
  // processors as OMP_NUM_THREADS.
  std::vector<std::string> command;
  uint32_t workers = 1;  // ranks
  uint32_t aggregators = 1;
  // So many ranks, one after the other, attach to the worker of a node of theirs, whose address is
  // in their environment as SIGNPOST_NODE. Divides `workers`. 0: each rank is a worker by itself.
  uint32_t per_node = 0;
  std::optional<int> node_gpu;     // on which the nodes' workers train; none: on their processors
  FailureTimeout failure_timeout;  // of workers and aggregators
  // Instead of mTLS, with certificates that are made for the run and go with it. On loopback other
  // users of this machine could then take part.
  bool plain_text = false;
  // Rounds close without workers that are so late, and the run goes on without workers that fail,
  // while so many are left. Both zero: the first worker to fail ends the run.
  absl::Duration round_deadline;
  uint32_t min_workers = 0;
  // How often each rank that fails is started again. With min_workers, while another runs, of which
  // it takes the state; with per_node it attaches to its node's worker again.
  uint32_t worker_restarts = 0;
  absl::Duration timeout = absl::InfiniteDuration();  // of the whole run
  absl::Duration grace = absl::Seconds(10);  // between asking a process to end and killing it
  // For a rank that has left the job to end, once another has with 75, which may be because of it.
  absl::Duration time_to_leave = absl::Seconds(2);
  // Starts an aggregator, with --listen, --shard, --drain-grace and --failure-timeout behind it,
  // and SIGNPOST_TLS_DIR.
  // The first line that it prints is "listening on HOST:PORT". Empty: this program's own.
  std::vector<std::string> aggregator_command;
  // The same for a node's worker, with --listen and --processes, and "listening on unix:PATH".
  std::vector<std::string> node_command;
  absl::Duration aggregator_start_timeout = absl::Seconds(30);  // and of the nodes' workers
  std::function<void(const OutputLine&)> on_line = PrintPrefixed;
  // Non-empty: where aggregators keep their state. Each is told --state-dir=STATE_DIR/JOB/shard-I
  // too, and one that ends while workers run is started again at the same address, up to
  // RestartLimit::kMost times within RestartLimit::kWindow. STATE_DIR/JOB is removed at the end,
  // unless an aggregator failed first, or did not come back there in time.
  std::string state_dir;
  // Something failed that the run survives.
  std::function<void(const std::string& what)> on_failure = PrintFailure;
  // All processes have it as SIGNPOST_TRACE, unless it is empty.
  std::string trace_dir;
  bool limit_restarts = true;  // false: they end because somebody wants them to
  // Called each time that an aggregator has been started and listens. Returns the address that
  // workers are told, at the first time.
  std::function<std::string(const ListeningAggregator&)> on_listening =
      [](const ListeningAggregator& aggregator) { return aggregator.address; };
};

struct LaunchResult {
  // 0 when all workers ended with 0, or all but those that the run went on without. Otherwise that
  // of the first process to fail (128 + n: killed by signal n), but for a rank with 75 that another
  // follows within `time_to_leave` with another code; 69 if the aggregators did not come up, 75 if
  // interrupted or out of time.
  int exit_code = 0;
  // Why it is not 0, for a person; with the last lines of the process that failed first.
  std::string explanation;
};

// Returns when all processes, and all that they started, have ended: none survives. SIGINT, SIGTERM
// or SIGHUP stops the run: ranks get SIGTERM, and once they have ended, the nodes' workers, and
// then the aggregators; after `grace`, or at the second signal, SIGKILL. The same happens to the
// others when one process fails, unless it is an aggregator that may be started again. If this
// process is killed itself, workers and aggregators are killed with it.
//
// To be called from the main thread of a process that has no other children and, while this runs,
// no thread that the signals above could go to.
LaunchResult Launch(const LaunchOptions& options);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_LAUNCHER_H_
