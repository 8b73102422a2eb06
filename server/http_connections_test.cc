#include "server/http_connections.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "absl/time/time.h"

namespace signpost {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

HttpConnections Connections() {
  return HttpConnections(
      {.request = absl::Seconds(10), .answer = absl::Seconds(60), .most = 4, .most_per_peer = 3});
}

// However many bytes of it have come.
TEST(HttpConnections, ARequestHasOneDeadline) {
  HttpConnections connections = Connections();
  connections.Begin(5, "a", At(0));
  connections.Begin(6, "a", At(1));
  EXPECT_THAT(connections.TakeOverdue(At(9)), IsEmpty());
  EXPECT_THAT(connections.TakeOverdue(At(10)), ElementsAre(5));
  EXPECT_THAT(connections.TakeOverdue(At(11)), ElementsAre(6));
  connections.End(5);
  connections.Begin(5, "b", At(11));  // with a descriptor that was used before
  EXPECT_THAT(connections.TakeOverdue(At(21)), ElementsAre(5));
}

TEST(HttpConnections, AnAnswerHasOneAndTheNextRequestToo) {
  HttpConnections connections = Connections();
  connections.Begin(5, "a", At(0));
  connections.Asked(5, At(9));
  EXPECT_THAT(connections.TakeOverdue(At(68)), IsEmpty());
  connections.Answered(5, At(68));
  EXPECT_THAT(connections.TakeOverdue(At(77)), IsEmpty());
  EXPECT_THAT(connections.TakeOverdue(At(78)), ElementsAre(5));
  connections.Begin(6, "a", At(0));
  connections.Asked(6, At(9));
  EXPECT_THAT(connections.TakeOverdue(At(69)), ElementsAre(6));
}

TEST(HttpConnections, BeyondAPeersLimitItsOwnSlowestIsEnded) {
  HttpConnections connections = Connections();
  connections.Begin(4, "other", At(0));
  for (const int fd : {5, 6, 7}) {
    connections.Begin(fd, "a", At(fd));
    EXPECT_EQ(connections.TakeOneToEnd(fd), std::nullopt);
  }
  connections.Asked(5, At(8));
  connections.Begin(8, "a", At(8));
  EXPECT_EQ(connections.TakeOneToEnd(8), 6);
  EXPECT_EQ(connections.TakeOneToEnd(8), std::nullopt);  // as if 6 were gone
  connections.Begin(9, "a", At(9));
  EXPECT_EQ(connections.TakeOneToEnd(9), 7);
  connections.Asked(8, At(9));
  connections.Begin(10, "a", At(10));
  connections.Asked(9, At(10));
  EXPECT_EQ(connections.TakeOneToEnd(10), 5);  // its answer is the oldest that nobody takes
}

TEST(HttpConnections, BeyondAllPlacesThePeerWithMostGivesOneUp) {
  HttpConnections connections = Connections();
  connections.Begin(4, "honest", At(0));
  for (const int fd : {5, 6, 7}) connections.Begin(fd, "slow", At(fd));
  connections.Begin(8, "another", At(8));
  EXPECT_EQ(connections.TakeOneToEnd(8), 5);
  EXPECT_EQ(connections.TakeOneToEnd(8), std::nullopt);
}

TEST(IsOwnHost, TakesNumbersLocalhostAndTheNamesGiven) {
  for (const char* host :
       {"127.0.0.1", "10.1.2.3:9090", "[::1]", "[fd00::1]:9090", "localhost", "LocalHost:80",
        "localhost.", "metrics.example:443", "METRICS.example."}) {
    EXPECT_TRUE(IsOwnHost(host, {"metrics.example"})) << host;
    EXPECT_TRUE(IsOwnHost(host, {"Metrics.example."})) << host;
  }
  for (const char* host : {"", "evil.example", "metrics.example.evil.example", "evil.example:9090",
                           "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "[evil]",
                           "metrics.example@evil.example", "0x7f000001", "127.1"}) {
    EXPECT_FALSE(IsOwnHost(host, {"metrics.example"})) << host;
  }
}

}  // namespace
}  // namespace signpost
