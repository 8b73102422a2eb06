#include "kernels/device.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gpu.h"

namespace signpost::kernels {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// That this test starts at all on a machine without a driver is half of what it is for.
TEST(Device, DescriptionSaysWhatIsThereOrWhyNothingIs) {
#ifdef SIGNPOST_HAVE_CUDA
  EXPECT_THAT(DescribeDevices(),
              AnyOf(ContainsRegex("^cuda: .+, [0-9]+ GiB, compute [0-9]+\\.[0-9]+"),
                    ContainsRegex("^cuda: none \\(.+\\)$")));
#else
  EXPECT_THAT(DescribeDevices(), StartsWith("cuda: none (built with"));
#endif
}

TEST(Device, WhatCannotBeUsedIsExplained) {
  const absl::Status status = CheckDevice(1000);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
#ifdef SIGNPOST_HAVE_CUDA
  EXPECT_THAT(std::string(status.message()),
              AllOf(StartsWith("GPU 1000 cannot be used: "),
                    AnyOf(HasSubstr("counted from 0; name one of them"),
                          HasSubstr("no NVIDIA driver is installed; install one, or give the"))));
#else
  EXPECT_THAT(std::string(status.message()), HasSubstr("--config=cuda"));
#endif
  EXPECT_EQ(cuda::OpenGpu(1000).status(), status);
}

}  // namespace
}  // namespace signpost::kernels
