// What tests of state directories write down.

#ifndef SIGNPOST_SERVER_TEST_STATE_H_
#define SIGNPOST_SERVER_TEST_STATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "proto/layout.h"
#include "server/snapshot.h"
#include "server/state_dir.h"

namespace signpost {

inline constexpr ShardId kShard = {0, 1};

// A state of TestJoin's job with two workers: the first chunk in one-bit rounds, the second after a
// round in fp32.
JobState TestState(uint64_t epoch = 7, uint64_t open_step = 5);

absl::Status Save(StateDir& state_dir, JobState state);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_TEST_STATE_H_
