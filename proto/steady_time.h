// Time that only passes. The system's clock may be set, an hour back or forth, while somebody
// waits.

#ifndef SIGNPOST_PROTO_STEADY_TIME_H_
#define SIGNPOST_PROTO_STEADY_TIME_H_

#include <chrono>

#include "absl/time/time.h"

namespace signpost {

// What the system's clock said when this process first asked, plus the time since then; or after
// CountWhileRunning, as much of it as that counts. Deadlines are of this time. Thread-safe.
absl::Time SteadyNow();

// From now on, time in which this process stands still counts for a second at most (RunningTime):
// whoever is waited for was not late meanwhile. For processes that wait for others. From the first
// call on a thread wakes up twice a second, until the process ends; a fork, which does not have it,
// counts all time. Thread-safe.
void CountWhileRunning();

// The same moment by the system's clock as it is now: for gRPC, which turns it back at once. There
// it comes sooner if this process stands still.
std::chrono::system_clock::time_point ToSystemClock(absl::Time steady);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_STEADY_TIME_H_
