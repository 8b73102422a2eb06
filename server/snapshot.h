// Snapshots: what an aggregator writes down of a job, so that it can go on after a crash.
//
// A file in sections (storage/section_file.h) that begins with "signpost snapshot 2\n". The
// sections are a SnapshotHeader (proto/snapshot.proto), and for each chunk that the shard owns, in
// order: a SnapshotChunk; the chunk's error as fp32, or nothing when all of it is zero; the
// payloads of its closed rounds' answers. The file ends with the last of them. Chunks may be at
// different steps: what becomes of one does not depend on the others.
//
// Which rounds close without which ranks is in a file of its own, which is written more often. It
// begins with "signpost late rounds 1\n" and has one section, a SnapshotLateRounds.

#ifndef SIGNPOST_SERVER_SNAPSHOT_H_
#define SIGNPOST_SERVER_SNAPSHOT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/job.h"
#include "storage/disk.h"

namespace signpost {

// Where a snapshot's chunks come from: `save` overwrites its argument, whose memory is used again
// for the next of `chunks`.
struct ChunkSource {
  absl::Span<const uint32_t> chunks;
  absl::FunctionRef<absl::Status(uint32_t chunk, ChunkState& state)> save;
};

// Replaces the file as a whole, as Replace does, with the job's state and those chunks: its own
// must be none. Asks for each of them when the one before is written. Errors are those of the disk
// and of the source. `scratch` is memory to work in, best the same each time.
absl::Status WriteSnapshot(Disk& disk, const std::string& name, const JobState& job,
                           const ChunkSource& source, ChunkState& scratch);

// DATA_LOSS, saying what is wrong where, for a file that is torn, changed or of another version:
// what comes back is what was written, or nothing does.
absl::StatusOr<JobState> ReadSnapshot(Disk& disk, const std::string& name);

// The same for late rounds. None if there is no such file.
absl::Status WriteLateRounds(Disk& disk, const std::string& name, const LateRounds& rounds);
absl::StatusOr<LateRounds> ReadLateRounds(Disk& disk, const std::string& name);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_SNAPSHOT_H_
