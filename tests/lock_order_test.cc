// third_party/absl_for_grpc.cc. Where Abseil is compiled with NDEBUG, as on Debian 12, this passes without it too.

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
