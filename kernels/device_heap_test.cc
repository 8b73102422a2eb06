#include "kernels/device_heap.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace signpost::kernels {
namespace {

constexpr size_t kBytes = size_t{16} << 20;
alignas(64) char memory[kBytes];

bool IsOfHeap(const void* p) { return p >= memory && p < memory + kBytes; }

class DeviceHeap : public testing::Test {
 protected:
  static void SetUpTestSuite() { TakeMemoryFrom(memory, kBytes); }
};

TEST_F(DeviceHeap, GivesAgainWhatWasGivenBack) {
  // More than a hundred times what there is.
  for (size_t i = 0; i < 2000; ++i) {
    const std::vector<char> large(1 << 20), small(i);
    ASSERT_TRUE(IsOfHeap(large.data()));
    ASSERT_EQ(reinterpret_cast<uintptr_t>(large.data()) % 64, 0);
  }

  // What is in use is nobody else's.
  std::vector<std::vector<uint8_t>> kept;
  for (size_t i = 0; i < 200; ++i) {
    kept.emplace_back(37 * i + 1, static_cast<uint8_t>(i));
    if (i % 3 == 2) kept.erase(kept.end() - 2);
  }
  for (const std::vector<uint8_t>& bytes : kept) {
    const auto value = static_cast<uint8_t>((bytes.size() - 1) / 37);
    for (const uint8_t byte : bytes) ASSERT_EQ(byte, value);
  }
}

TEST_F(DeviceHeap, SaysWhenItIsFull) {
  EXPECT_DEATH(static_cast<void>(::operator new (size_t{1} << 30)),
               "the tests need more than 16777216 bytes");
}

}  // namespace
}  // namespace signpost::kernels
