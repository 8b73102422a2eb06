// signpost status: what the aggregators are doing, and whom they wait for.

#ifndef SIGNPOST_CLI_STATUS_COMMAND_H_
#define SIGNPOST_CLI_STATUS_COMMAND_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/command.h"
#include "proto/aggregator.pb.h"

namespace signpost::cli {

Command AddStatusCommand(CLI::App& program);

// What one aggregator answered.
struct AggregatorStatus {
  std::string address;
  absl::StatusOr<StatusResponse> response;
};

// A line per job, all shards together, then the refused joins and the aggregators that did not
// answer. A job is as far as its last shard, and waits for whom that shard waits for. Compression
// and norms are known of a job when all of its shards say them; columns without any are left out.
std::string FormatStatusTable(const std::vector<AggregatorStatus>& aggregators);

// The same for who looks again and again: what jobs have done since `before`, `elapsed` ago, as
// rates in each second, and how many rounds closed late or were skipped in that time. Compression
// is that of the frames that came in it, or if none did, of all. "-" for what cannot be told: no
// aggregator had been asked before, others answer now, or one was started again.
std::string FormatWatchTable(const std::vector<AggregatorStatus>& before,
                             const std::vector<AggregatorStatus>& now, absl::Duration elapsed);

// {"aggregators": [{"address": ..., "status": a StatusResponse in protobuf's JSON} or
//                  {"address": ..., "error": ...}, ...]}
std::string FormatStatusJson(const std::vector<AggregatorStatus>& aggregators);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_STATUS_COMMAND_H_
