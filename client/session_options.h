// Where a training job's aggregators are, and which of its workers this process is.

#ifndef SIGNPOST_CLIENT_SESSION_OPTIONS_H_
#define SIGNPOST_CLIENT_SESSION_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/session_settings.h"
#include "proto/failure_timeout.h"
#include "security/transport_security.h"
#include "worker/channel.h"
#include "worker/worker.h"

namespace signpost {

// "signpost: rank 2: waiting for aggregator ...", to standard error, as SIGNPOST_LOG_FORMAT has it.
void PrintConnection(const std::string& line);

struct SessionOptions {
  WorkerOptions worker;
  // "host:port" of each shard, in shard order; blanks around one are not of it.
  std::vector<std::string> aggregators;
  // "unix:path" of this node's worker (`signpost worker`), which trains for the processes that
  // attach to it: the node sends what one worker would with the mean of their gradients. Rank and
  // world size then count processes, which are as many on each node, node by node; aggregators and
  // threads are the worker's affair. Empty: this process is a worker.
  std::string node;
  TransportSecurity security;      // of connections to aggregators
  FailureTimeout failure_timeout;  // an aggregator without sign of life is reconnected to
  // TCP connections to each aggregator, for links that one does not fill, since clouds and
  // firewalls limit what one may carry, or its encryption keeps one processor busy.
  uint32_t connections = 1;  // up to kMostConnections
  static constexpr uint32_t kMostConnections = 64;
  // A directory of checkpoints, which all workers see: go on from its newest that is whole. Empty:
  // start anew. See worker.resume_with_other_world_size too.
  std::string resume;
  // Instead of such a directory, what Session::SaveState gave this rank; must live until Join
  // returns.
  std::optional<absl::string_view> resume_state;
  // Ranks may join with different values: all begin with rank 0's, unless they resume or come back
  // to a job. Otherwise they are refused.
  bool start_from_rank_0 = false;
  // The GPU, as CUDA counts them, that has parameters and gradients, or the tensors of a reduction;
  // none: the host has them. worker.gpu is not looked at.
  std::optional<int> gpu;
  // What this process does when is recorded in a file of its own in this directory, from its first
  // session on: see docs/tracing.md. Empty: nothing is.
  std::string trace;
  // Gets a line for a person when an aggregator no longer answers, so that this worker waits for
  // it, and when it answers again; about its certificate, or plain text; and on which GPU it
  // trains. From any thread. Null: nobody is told.
  std::function<void(const std::string& line)> on_connection = PrintConnection;

  // What the environment says, as `signpost run` sets it, and the configuration file that
  // SIGNPOST_CONFIG names: config/session_keys.h has all keys, with their variables. aggregators,
  // job, rank and world-size must be there; with a node there need be no aggregators (but for
  // reductions). INVALID_ARGUMENT names the variable, or the line of the file, that is missing or
  // malformed; errors of the file as config::File's. A process reads the file once.
  static absl::StatusOr<SessionOptions> FromEnvironment();
  static absl::StatusOr<SessionOptions> FromSettings(const config::SessionSettings& settings);
};

// "host:port, host:port": blanks around an address are not of it.
std::vector<std::string> SplitAddresses(absl::string_view addresses);

// For worker.threads: what they say of `threads`; without it ShareOfProcessors.
absl::StatusOr<uint32_t> ThreadsFromEnvironment();

// For connections: what they say of them, or one.
absl::StatusOr<uint32_t> ConnectionsFromEnvironment();

// For trace: what they say of it, or nothing.
absl::StatusOr<std::string> TraceFromEnvironment();

// The share of each of so many processes of the processors that this one may run on, up to 8.
uint32_t ShareOfProcessors(uint32_t processes);
// This process's, of LOCAL_WORLD_SIZE (torchrun and `signpost run` set it).
uint32_t ShareOfProcessors();

// Gives the options' on_connection a line about this worker.
void Tell(const SessionOptions& options, const std::string& line);

// If the options say so, as "rank 3". Errors as trace::Start's.
absl::Status StartTrace(const SessionOptions& options);

// New channels, one for each of the options' aggregators, after StartTrace. INVALID_ARGUMENT if
// connections is not what it may be; other errors as StartTrace's and ClientSecurity::Open's.
absl::StatusOr<std::vector<std::unique_ptr<Channel>>> ConnectTo(const SessionOptions& options);

// The ports of the options' aggregators; one without a port has no TCP socket to count.
std::vector<uint16_t> PortsOf(const SessionOptions& options);

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_SESSION_OPTIONS_H_
