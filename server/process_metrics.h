// What the system says of this process.

#ifndef SIGNPOST_SERVER_PROCESS_METRICS_H_
#define SIGNPOST_SERVER_PROCESS_METRICS_H_

#include <cstdint>

#include "absl/time/time.h"

namespace signpost {

struct ProcessMetrics {
  double cpu_seconds = 0;  // user and system, of all threads
  uint64_t resident_bytes = 0;
  uint64_t virtual_bytes = 0;
  uint64_t open_fds = 0;
  uint64_t max_fds = 0;  // the soft limit
  uint64_t threads = 0;
  absl::Time started;  // by the system's clock
};

// From /proc; what cannot be read there is 0.
ProcessMetrics ReadProcessMetrics();

}  // namespace signpost

#endif  // SIGNPOST_SERVER_PROCESS_METRICS_H_
