#include "server/metrics_port.h"

#include <atomic>
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/raw_client.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class MetricsPortTest : public testing::Test {
 protected:
  MetricsPortTest() {
    const auto observe = [this] {
      Observation observation;
      observation.aggregator.shard_count = ++looks_;
      return observation;
    };
    const auto now = [this] {
      return absl::UnixEpoch() + absl::Milliseconds(milliseconds_.load());
    };
    absl::StatusOr<std::unique_ptr<MetricsPort>> port =
        MetricsPort::Listen("127.0.0.1:0", {}, observe, now);
    EXPECT_TRUE(port.ok()) << port.status();
    port_ = *std::move(port);
  }

  std::string Get(const std::string& path) { return HttpGet(port_->port(), path); }

  // Of the port's thread, too.
  std::atomic<uint32_t> looks_ = 0;
  std::atomic<int> milliseconds_ = 1000;
  std::unique_ptr<MetricsPort> port_;
};

TEST_F(MetricsPortTest, HasThreePages) {
  EXPECT_THAT(Get("/metrics"),
              AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("text/plain; version=0.0.4"),
                    HasSubstr("\nsignpost_shards{shard=\"0\"} 1\n")));
  EXPECT_THAT(Get("/status.json"), AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("application/json"),
                                         HasSubstr("\"jobs\":[]")));
  EXPECT_THAT(Get("/"), AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("text/html"),
                              HasSubstr("script-src 'sha256-"), HasSubstr("</html>")));
  EXPECT_THAT(Get("/status"), StartsWith("HTTP/1.1 404 "));
}

TEST_F(MetricsPortTest, LooksFourTimesASecondAtMostHoweverManyAsk) {
  for (int i = 0; i < 5; ++i) Get("/metrics");
  Get("/status.json");
  EXPECT_EQ(looks_, 1);
  milliseconds_ += 249;
  Get("/metrics");
  EXPECT_EQ(looks_, 1);
  milliseconds_ += 1;
  EXPECT_THAT(Get("/metrics"), HasSubstr("\nsignpost_shards{shard=\"0\"} 2\n"));
}

TEST_F(MetricsPortTest, LooksAtNothingForThePageItself) {
  Get("/");
  EXPECT_EQ(looks_, 0);
}

}  // namespace
}  // namespace signpost
