#include "proto/payload.h"

#include <cstdint>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

absl::Span<const uint8_t> Bytes(absl::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(Crc32c, OfTheCheckStringIsTheStandards) { EXPECT_EQ(Crc32c(Bytes("123456789")), 0xE3069283u); }

TEST(Crc32c, OfTheVectorsInRfc3720AppendixB4) {
  std::vector<uint8_t> bytes(32, 0);
  EXPECT_EQ(Crc32c(bytes), 0x8A9136AAu);
  bytes.assign(32, 0xFF);
  EXPECT_EQ(Crc32c(bytes), 0x62A8AB43u);
  std::iota(bytes.begin(), bytes.end(), 0);
  EXPECT_EQ(Crc32c(bytes), 0x46DD794Eu);
}

TEST(Crc32c, OfNothingIsZero) { EXPECT_EQ(Crc32c({}), 0u); }

TEST(Crc32c, ContinuesAcrossEverySplit) {
  const absl::Span<const uint8_t> whole = Bytes("123456789");
  for (size_t split = 0; split <= whole.size(); ++split) {
    EXPECT_EQ(Crc32c(whole.subspan(split), Crc32c(whole.first(split))), 0xE3069283u) << split;
  }
}

TEST(Payload, BeginsAtA64ByteBoundary) {
  for (const size_t size : {1, 4, 63, 64, 65, 4096, 1000003}) {
    const Payload payload(size);
    EXPECT_EQ(payload.size(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(payload.data()) % 64, 0u) << size;
  }
}

TEST(Payload, IsWritableToItsLastByte) {
  Payload payload(65);
  payload.data()[64] = 7;
  EXPECT_EQ(payload.span().back(), 7);
}

TEST(Payload, IsEmptyAfterItWasMovedFrom) {
  Payload from(10);
  const uint8_t* const bytes = from.data();
  Payload to(std::move(from));
  EXPECT_EQ(to.data(), bytes);
  EXPECT_EQ(to.size(), 10u);
  EXPECT_EQ(from.size(), 0u);

  from = std::move(to);
  EXPECT_EQ(from.data(), bytes);
  EXPECT_EQ(from.size(), 10u);
  EXPECT_EQ(to.size(), 0u);
}

TEST(Payload, ThrowsWhenTheSizeCannotBe) {
  EXPECT_THROW(Payload(SIZE_MAX), std::bad_alloc);
  EXPECT_THROW(Payload(SIZE_MAX / 2), std::bad_alloc);
}

}  // namespace
}  // namespace signpost
