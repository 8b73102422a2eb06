// How glibc keeps the memory of messages for the next ones, instead of returning it to the kernel
// and faulting it in again, which costs up to a quarter of the transport's processor time. Setting
// only one of the two ends what glibc does about the other by itself.

#ifndef SIGNPOST_CLI_KEPT_MEMORY_H_
#define SIGNPOST_CLI_KEPT_MEMORY_H_

#include <climits>

namespace signpost::cli {

inline constexpr int kMmapThreshold = 32 << 20;  // M_MMAP_THRESHOLD: the highest that glibc takes
inline constexpr int kTrimThreshold = INT_MAX;   // M_TRIM_THRESHOLD

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_KEPT_MEMORY_H_
