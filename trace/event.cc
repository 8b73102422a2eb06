#include "trace/event.h"

#include <chrono>
#include <cstddef>
#include <iterator>

namespace signpost::trace {
namespace {

constexpr KindName kNames[] = {
    {Kind::kJoin, "join", Row::kSteps},
    {Kind::kStep, "step", Row::kSteps},
    {Kind::kCall, "call", Row::kSteps},
    {Kind::kCompress, "compress", Row::kSteps},
    {Kind::kApply, "apply", Row::kSteps},
    {Kind::kWire, "wire", Row::kSteps},
    {Kind::kWait, "wait", Row::kSteps},
    {Kind::kEndStep, "end of step", Row::kSteps},
    {Kind::kLocalStep, "local step", Row::kSteps},
    {Kind::kCatchUp, "catch up", Row::kSteps},
    {Kind::kCheckpoint, "checkpoint", Row::kSteps},
    {Kind::kReplay, "replay", Row::kSteps},
    {Kind::kExchange, "exchange", Row::kExchanges},
    {Kind::kLost, "no connection", Row::kConnections},
    {Kind::kRetry, "retry", Row::kConnections},
    {Kind::kFrame, "frame", Row::kRounds},
    {Kind::kAnswer, "answer", Row::kRounds},
    {Kind::kRound, "round", Row::kRounds},
    {Kind::kGather, "gather", Row::kRounds},
    {Kind::kHold, "hold", Row::kRounds},
    {Kind::kAverage, "average", Row::kRounds},
    {Kind::kSnapshot, "snapshot", Row::kSnapshots},
    {Kind::kMissing, "missing", Row::kRounds},
    {Kind::kFailed, "failed", Row::kExchanges},
};

constexpr bool EachIsAtItsPlace() {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (static_cast<size_t>(kNames[i].kind) != i) return false;
  }
  return std::size(kNames) == kKinds;
}
static_assert(EachIsAtItsPlace());

}  // namespace

const KindName& NameOf(Kind kind) { return kNames[static_cast<size_t>(kind)]; }

std::optional<Kind> KindNamed(absl::string_view name) {
  for (const KindName& known : kNames) {
    if (known.name == name) return known.kind;
  }
  return std::nullopt;
}

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace signpost::trace
