// Turns off Abseil's search for possible deadlocks in each program that links with gRPC. Debian 13's Abseil aborts the
// process when two mutexes have been locked in both orders, even if no thread waits. gRPC 1.51 locks in both orders:
// tests ended that way in grpc_shutdown().

#include "absl/synchronization/mutex.h"

namespace {

[[maybe_unused]] const bool is_off = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();

}  // namespace
