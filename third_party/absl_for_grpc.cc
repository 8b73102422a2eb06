// gRPC 1.51 takes some mutexes in one order here and in another there, at moments when no two threads can wait for
// each other: in grpc_shutdown(), for one. Debian 13's Abseil is compiled without NDEBUG, and so ends the process
// when it sees that. It is told not to look.

#include "absl/synchronization/mutex.h"

namespace {

[[maybe_unused]] const bool is_told = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();

}  // namespace
