// What a trace is made of: something that a process did, from when to when, for which frame.

#ifndef SIGNPOST_TRACE_EVENT_H_
#define SIGNPOST_TRACE_EVENT_H_

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace signpost::trace {

// KindOf says what each is called; docs/tracing.md what each is.
enum class Kind : uint8_t {
  // A worker's, one within or after the other.
  kJoin,
  kStep,
  kCall,
  kCompress,
  kApply,
  kWire,
  kWait,
  kEndStep,
  kLocalStep,
  kCatchUp,
  kCheckpoint,
  kReplay,
  // A worker's, several at a time.
  kExchange,
  kLost,
  kRetry,
  // An aggregator's.
  kFrame,
  kAnswer,
  kRound,
  kGather,
  kHold,
  kAverage,
  kSnapshot,
  kMissing,
  // New ones come last, as recordings have their numbers. A worker's.
  kFailed,
};
inline constexpr int kKinds = static_cast<int>(Kind::kFailed) + 1;

// The row of a process's picture that an event is in. Of kExchanges and kRounds there are as many
// as there are at a time.
enum class Row : uint8_t { kSteps, kExchanges, kConnections, kRounds, kSnapshots };

struct KindName {
  Kind kind;
  absl::string_view name;  // "compress"
  Row row;
};

const KindName& NameOf(Kind kind);
std::optional<Kind> KindNamed(absl::string_view name);

inline constexpr uint32_t kNone = UINT32_MAX;

// Times are of this host's steady clock (Now), in nanoseconds.
struct Event {
  Kind kind = Kind::kStep;
  int64_t begin = 0;
  int64_t end = 0;  // the same: a moment
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint32_t chunk = kNone;
  // Whose. Of rounds, for which the others waited: the last that contributed, or the last of those
  // that it closed without (kMissing).
  uint32_t rank = kNone;
  uint64_t bytes = 0;  // of payload
  uint16_t job = 0;    // labels (recorder.h); 0: none
  uint16_t codec = 0;
};

// Nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
int64_t Now();

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_EVENT_H_
