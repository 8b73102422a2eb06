// A job as one shard sees it: its layout, and the chunks of it that the shard owns.

#ifndef SIGNPOST_SERVER_JOB_H_
#define SIGNPOST_SERVER_JOB_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "server/owned_chunk.h"

namespace signpost {

struct JobId {
  std::string name;
  uint64_t epoch = 0;
};

struct ShardId {
  uint32_t shard = 0;  // less than shard_count
  uint32_t shard_count = 1;
};

// Thread-safe: everything is constant but what happens within a chunk, and chunks do not share it.
class Job {
 public:
  Job(JobId id, uint32_t world_size, Layout layout, ShardId shard);

  const JobId& id() const { return id_; }
  uint32_t world_size() const { return world_size_; }
  const Layout& layout() const { return layout_; }

  // Judges the frame (CheckFrame) and gives it to its chunk: see OwnedChunk. INVALID_ARGUMENT for
  // a frame that does not pass, or whose chunk another shard owns, which is named.
  void Exchange(Frame frame, absl::Time now, OwnedChunk::Done done);

  // As OwnedChunk::End, for all chunks.
  void End(const absl::Status& reason);

  // Sets everything in the status of a complete job but joined_ranks and refused_joins.
  void FillStatus(absl::Time now, JobStatus& status) const;

 private:
  absl::Status CheckOwnership(const FrameHeader& header) const;

  const JobId id_;
  const uint32_t world_size_;
  const Layout layout_;
  const ShardId shard_;
  const std::vector<uint32_t> shard_of_chunk_;
  std::vector<std::unique_ptr<OwnedChunk>> chunks_;  // by chunk; null: another shard's
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_JOB_H_
