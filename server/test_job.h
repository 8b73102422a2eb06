// What the server's tests exchange: a small job, and frames with arbitrary numbers in them.

#ifndef SIGNPOST_SERVER_TEST_JOB_H_
#define SIGNPOST_SERVER_TEST_JOB_H_

#include <cstdint>
#include <string>

#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"

namespace signpost {

// Tensors 'weight' [5, 9], 'bias' [11] and 'scale' [], 57 elements in blocks of 8, the last one of
// each tensor short: two chunks, and tensors meet within a chunk. Incarnation 1000 + rank, shard 0
// of 1.
JoinRequest TestJoin(uint32_t rank, uint32_t world_size, const std::string& job = "job");

Layout LayoutOf(const JoinRequest& request);

struct FrameKey {
  uint32_t rank = 0;
  uint64_t step = 0;
  uint32_t chunk = 0;
};

// A frame that passes CheckFrame. Its numbers look random, of magnitudes so far apart that the
// order of a sum shows in its bits; they depend on the arguments and nothing else. SKIP: the block
// is rank modulo the chunk's blocks. The header's job and epoch are empty.
Frame TestFrame(const Layout& layout, const FrameKey& key, Codec codec, uint32_t seed = 0);

// The frame as a member of a job would send it.
Frame Addressed(Frame frame, const std::string& job, uint64_t epoch);

Frame CopyOf(const Frame& frame);

// Header and payload as one string, for comparison.
std::string BytesOf(const Answer& answer);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_TEST_JOB_H_
