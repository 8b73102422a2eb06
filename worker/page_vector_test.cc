#include "worker/page_vector.h"

#include <cstddef>
#include <utility>

#include "absl/algorithm/container.h"
#include "gtest/gtest.h"
#include "worker/resident_bytes.h"

namespace signpost {
namespace {

constexpr size_t kElements = size_t{64} << 20;
constexpr size_t kBytes = kElements * sizeof(float);

TEST(PageVector, IsZeroWhateverItsSize) {
  for (size_t elements : {1, 1000, 1 << 16, 1 << 20}) {
    PageVector<float> values(elements);
    EXPECT_TRUE(absl::c_all_of(values, [](float value) { return value == 0; })) << elements;
    absl::c_fill(values, 1.0f);
    values = PageVector<float>();
    values = PageVector<float>(elements);
    EXPECT_TRUE(absl::c_all_of(values, [](float value) { return value == 0; })) << elements;
  }
}

TEST(PageVector, TakesMemoryOnlyWhenWrittenAndGivesItBack) {
  if (!kMemoryIsTheProgramsOwn) GTEST_SKIP();
  const size_t before = ResidentBytes();
  PageVector<float> values(kElements);
  EXPECT_LT(ResidentBytes(), before + kBytes / 8);
  absl::c_fill(values, 1.0f);
  EXPECT_GT(ResidentBytes(), before + kBytes / 2);
  values = PageVector<float>();
  EXPECT_LT(ResidentBytes(), before + kBytes / 8);
}

TEST(PageVector, IsAssignedAndCopiedAsOthers) {
  const float numbers[] = {1, -2, 3};
  PageVector<float> values(2);
  values.assign(numbers, numbers + 3);
  const PageVector<float> copy = values;
  PageVector<float> moved = std::move(values);
  EXPECT_EQ(copy, moved);
  EXPECT_EQ(copy[1], -2);
}

}  // namespace
}  // namespace signpost
