#include "kernels/gpu_messages.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::kernels::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(GpuMessages, CheckCapabilityTakesAmpereAndWhatCameAfterIt) {
  EXPECT_EQ(CheckCapability("NVIDIA A100", 8, 0), absl::OkStatus());
  EXPECT_EQ(CheckCapability("NVIDIA L4", 8, 9), absl::OkStatus());
  EXPECT_EQ(CheckCapability("NVIDIA H200", 9, 0), absl::OkStatus());
  EXPECT_EQ(CheckCapability("NVIDIA B200", 10, 0), absl::OkStatus());
}

TEST(GpuMessages, CheckCapabilityNamesAGpuThatIsTooOldAndWhatIsWanted) {
  EXPECT_EQ(CheckCapability("Tesla T4", 7, 5),
            absl::InvalidArgumentError(
                "Tesla T4 has compute capability 7.5, and this program is for 8.0 (Ampere) and "
                "later; name another, or train on the CPU"));
}

TEST(GpuMessages, ADriverIsNamedByTheVersionsOfCuda) {
  EXPECT_EQ(ExplainInsufficientDriver(/*driver=*/11080, /*built_with=*/13000),
            "the NVIDIA driver is for CUDA up to 11.8 and this program needs 13.0; install a newer "
            "driver");
  EXPECT_EQ(ExplainUnsupportedPtx(/*driver=*/12040, /*built_with=*/12090),
            "the NVIDIA driver, for CUDA up to 12.4, cannot compile for this GPU what CUDA 12.9 "
            "has made of the kernels; install a newer driver");
}

TEST(GpuMessages, NoDriverIsNotTakenForAnOldOne) {
  EXPECT_EQ(ExplainInsufficientDriver(/*driver=*/0, /*built_with=*/13000),
            "no NVIDIA driver is installed");
}

TEST(GpuMessages, WithoutKernelsForTheGpuItIsSaidForWhichThereAreSome) {
  const std::string message =
      ExplainNoKernelImage("no kernel image is available for execution on the device");
  EXPECT_THAT(message, StartsWith("no kernel image is available for execution on the device: "));
  EXPECT_THAT(message, HasSubstr("compute capability 8.x (Ampere) and 9.0, and PTX for later"));
  EXPECT_THAT(message, HasSubstr("CUDA_DISABLE_PTX_JIT"));
}

}  // namespace
}  // namespace signpost::kernels::cuda
