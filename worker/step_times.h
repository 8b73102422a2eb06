// Whose time a step's exchange takes, for its report and for the trace.

#ifndef SIGNPOST_WORKER_STEP_TIMES_H_
#define SIGNPOST_WORKER_STEP_TIMES_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "trace/event.h"
#include "trace/span.h"
#include "worker/clock.h"
#include "worker/step_report.h"

namespace signpost {

// Each call accounts for the time since the one before. Not thread-safe.
class StepTimes {
 public:
  using EventOf = absl::FunctionRef<trace::Event(trace::Kind kind, uint32_t chunk)>;

  // All must outlive it.
  StepTimes(Clock& clock, StepReport& report, EventOf event_of)
      : clock_(clock), report_(report), event_of_(event_of), last_(clock.Now()) {}

  absl::Time last() const { return last_; }  // when the last call was

  void AddWork(trace::Kind kind, uint32_t chunk) {
    report_.kernels += Lap();
    laps_.Record(event_of_(kind, chunk));
  }

  // Something was waited for, which has not come yet; whose time it was tells what comes.
  void AddBlocked() { blocked_ += Lap(); }
  // What comes is what a GPU has compressed,
  void EndBlockedByGpu(uint32_t chunk, bool has_waited) {
    report_.kernels += std::exchange(blocked_, absl::ZeroDuration());
    if (has_waited) laps_.Record(event_of_(trace::Kind::kCompress, chunk));
  }
  // or an answer, which waited for other ranks for so long.
  void EndBlockedByWire(uint32_t chunk, bool has_waited, absl::Duration others) {
    const absl::Duration blocked = std::exchange(blocked_, absl::ZeroDuration());
    const absl::Duration waited = std::min(blocked, others);
    report_.wait += waited;
    report_.wire += blocked - waited;
    if (!has_waited) return;
    if (waited > absl::ZeroDuration()) laps_.Record(event_of_(trace::Kind::kWait, chunk), waited);
    laps_.Record(event_of_(trace::Kind::kWire, chunk));
  }
  // Nothing is waited for any more, because of that error.
  absl::Status GiveUp(absl::Status error) {
    laps_.Record(event_of_(trace::Kind::kWire, trace::kNone));
    return error;
  }

 private:
  absl::Duration Lap() {
    const absl::Time before = std::exchange(last_, clock_.Now());
    return last_ - before;
  }

  Clock& clock_;
  StepReport& report_;
  const EventOf event_of_;
  trace::Laps laps_;
  absl::Time last_;
  absl::Duration blocked_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_STEP_TIMES_H_
