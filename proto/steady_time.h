// Time that only passes. The system's clock may be set, an hour back or forth, while somebody
// waits.

#ifndef SIGNPOST_PROTO_STEADY_TIME_H_
#define SIGNPOST_PROTO_STEADY_TIME_H_

#include <chrono>

#include "absl/time/time.h"

namespace signpost {

// What the system's clock said when this process first asked, plus the time since then. Deadlines
// are of this time. Thread-safe.
absl::Time SteadyNow();

// The same moment by the system's clock as it is now: for gRPC, which turns it back at once.
std::chrono::system_clock::time_point ToSystemClock(absl::Time steady);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_STEADY_TIME_H_
