// The disk under an aggregator's state directory.

#ifndef SIGNPOST_DOCTOR_STATE_DISK_H_
#define SIGNPOST_DOCTOR_STATE_DISK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "doctor/job.h"
#include "doctor/report.h"

namespace signpost::doctor {

struct StateDisk {
  std::string path;  // that was written to: the directory, or the nearest one above it
  // INVALID_ARGUMENT: there can be no such directory. Otherwise of writing: RESOURCE_EXHAUSTED,
  // PERMISSION_DENIED or UNAVAILABLE.
  absl::Status status;
  absl::Status shard;  // whether it is the aggregator's, as StateDir::CheckShard
  uint64_t free_bytes = 0;
  double fsync_s = 0;      // the median
  double bytes_per_s = 0;  // written and synced
};

// Writes some mebibytes to a file of its own there, and removes it.
StateDisk TryStateDisk(const std::string& state_dir, const ShardId& shard);

void CheckStateDisk(const StateDisk& disk, const Job& job, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_STATE_DISK_H_
