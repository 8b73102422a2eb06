// Who asks to join a job, with a request of which nothing is wrong in itself.

#ifndef SIGNPOST_SERVER_APPLICANT_H_
#define SIGNPOST_SERVER_APPLICANT_H_

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/aggregator.pb.h"
#include "proto/layout.h"
#include "server/job.h"
#include "server/membership.h"

namespace signpost {

// Checked before memory is taken; over them a Join gets RESOURCE_EXHAUSTED, naming the flag of
// `signpost aggregator` that raises the limit. Parameters and frames are counted over all jobs.
struct AggregatorLimits {
  static constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

  uint32_t jobs = 256;                          // --max-jobs
  uint32_t workers = 1024;                      // --max-workers, per job
  uint64_t parameters = uint64_t{1} << 34;      // --max-parameters, of all jobs and shards
  uint64_t frames = uint64_t{1} << 22;          // --max-frames, of a step: chunks times workers
  uint64_t payload_bytes = uint64_t{64} << 20;  // --max-message-bytes, per frame
  // --max-held-bytes: what jobs hold of frames, and of the errors and answers that become of them.
  // All jobs together reserve at most as much (ReservedBytes), or the last one does not begin: so
  // each of them can go on, chunk by chunk, whatever the others do. Frames of other chunks than the
  // one that is furthest behind have what is not reserved; when that is used up, or payloads and
  // errors of the process take more than the limit, they get RESOURCE_EXHAUSTED, with TryAgain's
  // mark, and are to be sent again. So are those that are here when a job begins which needs their
  // memory; its own are refused for as long as it takes complete rounds among them to close.
  uint64_t held_bytes = kUnlimited;
};

struct Applicant {
  std::string job;
  uint32_t world_size = 0;
  Membership::Claim claim;
  Layout layout;
};

// Looks at no state. Errors as Aggregator::Join's: what is malformed, over a limit, or for another
// shard.
absl::StatusOr<Applicant> CheckJoin(const JoinRequest& request, std::string peer, ShardId shard,
                                    const AggregatorLimits& limits);

// FAILED_PRECONDITION names what is not the job's; the second one lets it begin elsewhere.
absl::Status CheckMatches(const Applicant& applicant, const Job& job);
absl::Status CheckMatchesButBeginning(const Applicant& applicant, const Job& job);

// Of a step. Each has a place in memory, whatever a chunk's size.
uint64_t FramesOf(uint32_t world_size, const Layout& layout);

absl::Status LimitError(absl::string_view what, uint64_t got, uint64_t limit,
                        absl::string_view flag);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_APPLICANT_H_
