// What this process may have: descriptors and memory.

#ifndef SIGNPOST_DOCTOR_LIMITS_H_
#define SIGNPOST_DOCTOR_LIMITS_H_

#include <cstdint>
#include <string>

#include "doctor/job.h"
#include "doctor/report.h"

namespace signpost::doctor {

struct Limits {
  uint64_t open_files;  // the soft limit
  uint64_t most_open_files;
  uint64_t free_memory_bytes;
  std::string memory_bound;  // what limits it: "this machine", a control group, `ulimit -v`
};

// Of this process, now.
Limits FindLimits();

void CheckLimits(const Limits& limits, const Job& job, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_LIMITS_H_
