// For tests: what kernels are fed with, how their output is compared, and calls that must succeed.

#ifndef SIGNPOST_KERNELS_TEST_INPUTS_H_
#define SIGNPOST_KERNELS_TEST_INPUTS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/block.h"

namespace signpost::kernels {

// Every tail of the vectors, the sum lanes and the blocks below, and several blocks.
inline constexpr size_t kLengths[] = {0,   1,   7,   8,    9,    15,   16,    17,    31,
                                      32,  33,  63,  64,   65,   127,  128,   129,   255,
                                      256, 257, 511, 4095, 4096, 4097, 12389, 100003};
inline constexpr size_t kBlocks[] = {8, 40, 256, 4096, 10000};

// Those but 0 that are no more blocks than a GPU's sanitizers have room for, which keep what each
// has done.
inline std::vector<size_t> LengthsInBlocks(size_t block_elements) {
  constexpr size_t kMostBlocks = 2048;
  std::vector<size_t> lengths;
  for (const size_t n : kLengths) {
    if (n > 0 && BlockCount(n, block_elements) <= kMostBlocks) lengths.push_back(n);
  }
  return lengths;
}

// A new seed in each run, printed; SIGNPOST_SEED repeats one.
inline uint32_t TestSeed() {
  static const uint32_t seed = [] {
    const char* fixed = std::getenv("SIGNPOST_SEED");
    const uint32_t chosen =
        fixed != nullptr ? static_cast<uint32_t>(std::stoul(fixed)) : std::random_device()();
    std::cout << "SIGNPOST_SEED=" << chosen << std::endl;
    return chosen;
  }();
  return seed;
}

// Random numbers, drawn in the order of the calls.
class Random {
 public:
  // Normally distributed, of any of the magnitudes that training sees, with some numbers that
  // arithmetic treats apart.
  std::vector<float> Values(size_t n) {
    static constexpr float kSpecial[] = {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(),
                                         -0x1.8p-130f, std::numeric_limits<float>::min()};
    std::vector<float> values(n);
    for (float& value : values) {
      const uint32_t kind = engine_() % 32;
      value = kind < std::size(kSpecial)
                  ? kSpecial[kind]
                  : std::ldexp(normal_(engine_), static_cast<int>(kind) - 24);
    }
    return values;
  }

  std::vector<float> PositiveValues(size_t n) {
    std::vector<float> values = Values(n);
    for (float& value : values) value = std::abs(value);
    return values;
  }

  // With the largest numbers that gradients may have, and in some blocks one that they may not.
  std::vector<float> Gradient(size_t n, const BlockRule& rule) {
    static const float kBad[] = {
        std::numeric_limits<float>::quiet_NaN(),  -std::numeric_limits<float>::quiet_NaN(),
        std::numeric_limits<float>::infinity(),   -std::numeric_limits<float>::infinity(),
        std::nextafter(kMaxDense, 2 * kMaxDense), -std::nextafter(kMaxDense, 2 * kMaxDense)};
    std::vector<float> values = Values(n);
    for (float& value : values) {
      if (engine_() % 64 == 0) value = std::copysign(kMaxDense, value);
    }
    for (size_t begin = 0; begin < n; begin += rule.block_elements) {
      const size_t length = std::min(rule.block_elements, n - begin);
      if (engine_() % 3 == 0) {
        values[begin + engine_() % length] = kBad[engine_() % std::size(kBad)];
      }
    }
    return values;
  }

  std::vector<uint8_t> Bytes(size_t n) {
    std::vector<uint8_t> bytes(n);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(engine_());
    return bytes;
  }

 private:
  std::mt19937 engine_{TestSeed()};
  std::normal_distribution<float> normal_;
};

// As long as there is one, what Guarded makes lies at multiples of 16.
class AlignedMemory {
 public:
  explicit AlignedMemory(bool is_aligned) { is_aligned_ = is_aligned; }
  ~AlignedMemory() { is_aligned_ = false; }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;

  static bool IsAligned() { return is_aligned_; }

 private:
  static inline bool is_aligned_ = false;
};

// A copy of some values at the worst alignment that their type allows, between guards that a write
// out of bounds would break.
template <class T>
class Guarded {
 public:
  Guarded(const std::vector<T>& values)  // NOLINT: a conversion is what it is for
      : size_(values.size()), memory_(begin_ + size_ * sizeof(T) + begin_, kFill) {
    if (size_ != 0) std::memcpy(data(), values.data(), size_ * sizeof(T));
  }
  explicit Guarded(size_t size) : Guarded(std::vector<T>(size, T{})) {}

  ~Guarded() {
    for (size_t i = 0; i < begin_; ++i) {
      EXPECT_EQ(memory_[i], kFill) << "written " << begin_ - i << " bytes before the beginning";
      EXPECT_EQ(memory_[memory_.size() - 1 - i], kFill) << "written behind the end";
    }
  }

  T* data() { return reinterpret_cast<T*>(memory_.data() + begin_); }
  const T* data() const { return reinterpret_cast<const T*>(memory_.data() + begin_); }
  absl::Span<T> span() { return absl::MakeSpan(data(), size_); }
  absl::Span<const T> span() const { return absl::MakeConstSpan(data(), size_); }

 private:
  static constexpr uint8_t kFill = 0xa5;

  size_t begin_ = AlignedMemory::IsAligned() ? 64 : 64 + sizeof(T);  // new gives multiples of 16
  size_t size_;
  std::vector<uint8_t> memory_;
};

// Whether it is a NaN that an operation may have given, which is any: kernels give kNotPacked.
template <class T>
bool IsSomeNan(const T& value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::isnan(value) && std::memcmp(&value, &kNotPacked, sizeof value) != 0;
  }
  return false;
}

// Whether two spans hold the same bytes: +0 is not -0, and kNotPacked equals itself. Not when
// another NaN is expected: a test that holds by one may fail on another machine.
template <class T>
testing::AssertionResult SameBytes(absl::Span<const T> actual, absl::Span<const T> expected) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure() << actual.size() << " elements, not " << expected.size();
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    if (IsSomeNan(expected[i])) {
      return testing::AssertionFailure() << "element " << i << " of " << actual.size()
                                         << " is expected to be a NaN, and which is left open";
    }
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) != 0) {
      return testing::AssertionFailure() << "element " << i << " of " << actual.size() << " is "
                                         << +actual[i] << ", not " << +expected[i];
    }
  }
  return testing::AssertionSuccess();
}

template <class T>
testing::AssertionResult SameBytes(const Guarded<T>& actual, const std::vector<T>& expected) {
  return SameBytes(actual.span(), absl::MakeConstSpan(expected));
}

template <class T>
testing::AssertionResult SameBytes(const Guarded<T>& actual, const Guarded<T>& expected) {
  return SameBytes(actual.span(), expected.span());
}

// Asserts that it is OK.
inline void Succeeds(const absl::Status& status) { ASSERT_TRUE(status.ok()) << status; }
template <class T>
T Take(absl::StatusOr<T> result) {
  EXPECT_TRUE(result.ok()) << result.status();
  return *std::move(result);
}

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_TEST_INPUTS_H_
