#include "kernels/device.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::kernels {
namespace {

using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::StartsWith;

// That this test starts at all on a machine without a driver is half of what it is for.
TEST(Device, DescriptionSaysWhatIsThereOrWhyNothingIs) {
#ifdef SIGNPOST_HAVE_CUDA
  EXPECT_THAT(DescribeDevices(),
              AnyOf(ContainsRegex("^cuda: .+, [0-9]+ GiB, compute [0-9]+\\.[0-9]+"),
                    ContainsRegex("^cuda: none \\(.+\\)$")));
#else
  EXPECT_THAT(DescribeDevices(), StartsWith("cuda: not built in"));
#endif
}

}  // namespace
}  // namespace signpost::kernels
