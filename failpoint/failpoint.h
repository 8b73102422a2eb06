// Named places at which a test, or a person who wants to see a recovery, has a process die, stop or
// dawdle, as SIGNPOST_FAILPOINT=round.closed=kill@3 does.

#ifndef SIGNPOST_FAILPOINT_FAILPOINT_H_
#define SIGNPOST_FAILPOINT_FAILPOINT_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace signpost {

// AllFailpoints says what each is called, and where it is.
enum class Failpoint : uint8_t {
  kStateDirCounted,
  kStateDirLoaded,
  kServerListening,
  kJoinReceived,
  kJoinDurable,
  kFrameReceived,
  kFrameContributed,
  kRoundClosed,
  kAnswerSent,
  kReplayAsked,
  kSnapshotBegun,
  kFileCreated,
  kFileHalfWritten,
  kFileWritten,
  kFileSynced,
  kFileRenamed,
  kSnapshotSaved,
  kSnapshotPruned,
  kSnapshotAnnounced,
  kLeaveReceived,
  kLeaveDurable,
  kJobHalfForgotten,
  kSuspendBegun,
  kSuspendHalfDone,
  kWorkerSending,
  kWorkerAnswered,
  kNodeAnswered,
};

struct FailpointPlace {
  Failpoint point;
  absl::string_view name;   // "round.closed"
  absl::string_view where;  // "a round's answer is made, and nobody has it yet"
};

// In the order of the enumeration, which is about that of a process's life.
absl::Span<const FailpointPlace> AllFailpoints();

// "NAME=ACTION[@COUNT]", several of them separated by commas. At the COUNT-th (the first, unless
// given) time that a thread of this process comes by that place, and not again:
//   kill            SIGKILL to this process
//   stop            SIGSTOP to this process, which goes on at SIGCONT
//   sleep:DURATION  that thread sleeps, with the locks that it holds
// INVALID_ARGUMENT, with nothing armed, for anything else; it names what is not understood. To be
// called once at most, before there are other threads.
absl::Status ArmFailpoints(absl::string_view spec);

namespace failpoint_internal {
inline std::atomic<bool> armed = false;
void Act(Failpoint point);
}  // namespace failpoint_internal

// Marks the place. Thread-safe. A load and a branch while nothing is armed.
inline void Reach(Failpoint point) {
  if (failpoint_internal::armed.load(std::memory_order_relaxed)) [[unlikely]] {
    failpoint_internal::Act(point);
  }
}

}  // namespace signpost

#endif  // SIGNPOST_FAILPOINT_FAILPOINT_H_
