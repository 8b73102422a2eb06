#include "security/peer.h"

#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::HasSubstr;

const Identity kWorkerOfA = {"signpost", PeerRole::kWorker, "a"};
const Identity kWorker = {"signpost", PeerRole::kWorker, std::nullopt};

TEST(Peer, IsWhoItsOnlySpiffeIdSays) {
  EXPECT_EQ(IdentityOfPeer({"https://x", "spiffe://signpost/worker/b"}, kWorkerOfA)->job, "b");
  for (const std::vector<grpc::string_ref>& uris :
       {std::vector<grpc::string_ref>{},
        {"https://x"},
        {"spiffe://signpost/worker/a", "spiffe://signpost/worker/b"},
        {"spiffe://signpost/nobody"},
        {"spiffe://other/worker/a"}}) {
    EXPECT_EQ(IdentityOfPeer(uris, kWorkerOfA).status().code(), absl::StatusCode::kUnauthenticated);
  }
}

TEST(Peer, IsAnAggregatorOfTheJobOrOfAll) {
  EXPECT_TRUE(CheckAggregator({"spiffe://signpost/aggregator"}, kWorkerOfA, "a").ok());
  EXPECT_TRUE(CheckAggregator({"spiffe://signpost/aggregator/a"}, kWorkerOfA, "a").ok());
  EXPECT_TRUE(CheckAggregator({"spiffe://signpost/aggregator/b"}, kWorker, "b").ok());
  EXPECT_TRUE(CheckAggregator({"spiffe://signpost/aggregator/b"}, kWorker, "b/norm").ok());
  EXPECT_TRUE(CheckAggregator({"spiffe://signpost/aggregator/b"}, kWorker, "").ok());
  EXPECT_THAT(CheckAggregator({"spiffe://signpost/aggregator/b"}, kWorker, "a").message(),
              HasSubstr("an aggregator of another job than a"));
  EXPECT_THAT(CheckAggregator({"spiffe://signpost/aggregator/b"}, kWorkerOfA, "a").message(),
              HasSubstr("an aggregator of another job than a"));
  EXPECT_THAT(CheckAggregator({"spiffe://signpost/worker/a"}, kWorkerOfA, "a").message(),
              HasSubstr("which is no aggregator"));
  EXPECT_THAT(CheckAggregator({"spiffe://other/aggregator"}, kWorkerOfA, "a").message(),
              HasSubstr("wanted one of the trust domain signpost"));
}

}  // namespace
}  // namespace signpost
