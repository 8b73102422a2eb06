#include "bench/traffic.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace signpost::bench {
namespace {

constexpr Stream kRead = {Stream::Use::kRead, 4}, kChange = {Stream::Use::kChange, 4},
                 kBits = {Stream::Use::kWrite, 0.125};

TEST(Traffic, WhatIsChangedCountsTwice) {
  EXPECT_EQ(BytesOf({}), 0);
  EXPECT_EQ(BytesOf({kRead, kRead, kChange, kBits}), 16.125);
}

constexpr uint32_t kOnes = 0x01010101;

TEST(Traffic, ReadsAndChangesAllOfItOnce) {
  constexpr uint32_t kElements = 3 * 4096;  // whole blocks
  Traffic read({kRead, kRead}, kElements), changed({kChange}, kElements);
  for (const uint32_t changed_word : {0u, kOnes, 0u}) {
    read.Run();
    EXPECT_EQ(read.checksum(), 2 * kElements * kOnes);
    changed.Run();
    EXPECT_EQ(changed.checksum(), kElements * changed_word);
  }
}

TEST(Traffic, TakesManyArraysAndBlocksThatAreNotWhole) {
  Streams streams(64, Stream{Stream::Use::kRead, 0.125});
  streams.push_back(kChange);
  streams.push_back(kBits);
  Traffic traffic(streams, 4096 + 1);
  traffic.Run();
  EXPECT_EQ(traffic.checksum(), 64 * (2 * 4096 / 32) * kOnes);
}

}  // namespace
}  // namespace signpost::bench
