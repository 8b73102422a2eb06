#include "bench/plain_tcp.h"

#include <gtest/gtest.h>

namespace signpost::bench {
namespace {

TEST(PlainTcp, ExchangesAsOftenAsItIsAskedTo) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, 3 * PlainTcp::kRoom + 5}) {
    auto tcp = PlainTcp::Connect(/*workers=*/2, /*servers=*/3, bytes);
    ASSERT_TRUE(tcp.ok()) << tcp.status();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE((*tcp)->Exchange().ok());
    EXPECT_EQ((*tcp)->bytes_received(), 3 * 2 * 3 * ((bytes + 2) / 3));
    EXPECT_TRUE((*tcp)->Leave().ok());
  }
}

TEST(PlainTcp, OneThatIsNeverAskedEnds) { EXPECT_TRUE(PlainTcp::Connect(1, 1, 1).ok()); }

}  // namespace
}  // namespace signpost::bench
