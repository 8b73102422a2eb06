// Tests third_party/absl_for_grpc.cc. Debian 12's Abseil does not search for deadlocks, so the test can fail on Debian 13
// only.

#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"

namespace {

TEST(LockOrder, EndsNoProcessThatLinksWithGrpc) {
  absl::Mutex a, b;
  a.Lock();
  b.Lock();
  b.Unlock();
  a.Unlock();

  b.Lock();
  a.Lock();
  a.Unlock();
  b.Unlock();
}

}  // namespace
