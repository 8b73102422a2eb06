#include "bench/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace signpost::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Hosts, RatesAreAsTcWritesThem) {
  EXPECT_EQ(*ParseRate("1gbit"), 1e9);
  EXPECT_EQ(*ParseRate("2.5gbit"), 2.5e9);
  EXPECT_EQ(*ParseRate("100mbit"), 1e8);
  EXPECT_EQ(*ParseRate("64kbit"), 64e3);
  EXPECT_EQ(*ParseRate("1Gbit"), 1e9);
  EXPECT_EQ(*ParseRate("1 gbit"), 1e9);
  EXPECT_EQ(*ParseRate("1tbit"), 1e12);
  EXPECT_EQ(*ParseRate("9600bit"), 9600);
  EXPECT_EQ(*ParseRate("125MBps"), 1e9);
  EXPECT_EQ(*ParseRate("64Kibit"), 65536);
  for (const char* wrong : {"", "gbit", "1", "1g", "-1gbit", "0mbit", "1gbit;rm", "1e9gbit",
                            "1ibit", "1e-9kbit", "nangbit"}) {
    const absl::Status status = ParseRate(wrong).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << wrong;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is no rate of a link")) << wrong;
  }
}

TEST(Hosts, WithoutLinksAllAreThisMachine) {
  const auto hosts = Hosts::Create(1000, "");
  ASSERT_TRUE(hosts.ok()) << hosts.status();
  EXPECT_EQ((*hosts)->address(7), "127.0.0.1");
  EXPECT_THAT((*hosts)->On(7, {"true", "x"}), ElementsAre("true", "x"));
}

TEST(Hosts, SoManyBehindLinksAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(Hosts::Create(251, "1gbit").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Hosts::Create(2, "fast").status()));
}

}  // namespace
}  // namespace signpost::bench
