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
  return HttpConnections({.request = absl::Seconds(10), .answer = absl::Seconds(60)});
}

// However many bytes of it have come.
TEST(HttpConnections, ARequestHasOneDeadline) {
  HttpConnections connections = Connections();
  connections.Begin(5, "a", At(0));
  connections.Begin(6, "a", At(1));
  EXPECT_THAT(connections.Overdue(At(9)), IsEmpty());
  EXPECT_THAT(connections.Overdue(At(10)), ElementsAre(5));
  connections.End(5);
  EXPECT_THAT(connections.Overdue(At(11)), ElementsAre(6));
}

TEST(HttpConnections, AnAnswerHasOneAndTheNextRequestToo) {
  HttpConnections connections = Connections();
  connections.Begin(5, "a", At(0));
  connections.Asked(5, At(9));
  EXPECT_THAT(connections.Overdue(At(68)), IsEmpty());
  EXPECT_THAT(connections.Overdue(At(69)), ElementsAre(5));
  connections.Answered(5, At(20));
  EXPECT_THAT(connections.Overdue(At(29)), IsEmpty());
  EXPECT_THAT(connections.Overdue(At(30)), ElementsAre(5));
}

TEST(HttpConnections, RoomIsMadeByThePeerThatHasMostOfThem) {
  HttpConnections connections = Connections();
  connections.Begin(5, "honest", At(0));
  connections.Begin(6, "slow", At(2));
  connections.Begin(7, "slow", At(1));
  EXPECT_EQ(connections.ToMakeRoom(3, /*newcomer=*/6), std::nullopt);
  EXPECT_EQ(connections.ToMakeRoom(2, /*newcomer=*/6), 7);
  connections.Asked(7, At(3));
  EXPECT_EQ(connections.ToMakeRoom(2, /*newcomer=*/6), 5);  // nobody else waits
  connections.Asked(5, At(3));
  EXPECT_EQ(connections.ToMakeRoom(2, /*newcomer=*/6), std::nullopt);  // who has asked is answered
}

TEST(IsOwnHost, TakesNumbersLocalhostAndTheNamesGiven) {
  for (const char* host :
       {"127.0.0.1", "10.1.2.3:9090", "[::1]", "[fd00::1]:9090", "localhost", "LocalHost:80",
        "localhost.", "metrics.example:443", "METRICS.example."}) {
    EXPECT_TRUE(IsOwnHost(host, {"metrics.example"})) << host;
  }
  for (const char* host : {"", "evil.example", "metrics.example.evil.example", "evil.example:9090",
                           "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "[evil]",
                           "metrics.example@evil.example", "0x7f000001", "127.1"}) {
    EXPECT_FALSE(IsOwnHost(host, {"metrics.example"})) << host;
  }
}

}  // namespace
}  // namespace signpost
