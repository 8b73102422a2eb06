#include "security/identity.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::HasSubstr;

TEST(Identity, IsParsedFromWhatItIsWrittenAs) {
  for (const std::string uri :
       {"spiffe://signpost/aggregator", "spiffe://signpost/worker", "spiffe://a.b-c_9/worker/run-1",
        "spiffe://signpost/observer/A.b_c-1", "spiffe://signpost/admin"}) {
    const auto identity = Identity::Parse(uri);
    ASSERT_TRUE(identity.ok()) << identity.status();
    EXPECT_EQ(identity->ToUri(), uri);
  }
  const auto identity = Identity::Parse("spiffe://domain/worker/bert");
  EXPECT_EQ(identity->trust_domain, "domain");
  EXPECT_EQ(identity->role, PeerRole::kWorker);
  EXPECT_EQ(identity->job, "bert");
}

TEST(Identity, IsNothingElse) {
  for (const std::string uri :
       {"", "spiffe://", "spiffe:///worker", "spiffe://signpost", "spiffe://signpost/",
        "spiffe://signpost/root", "spiffe://signpost/Worker", "spiffe://signpost/worker/",
        "spiffe://signpost/worker/a/b", "spiffe://signpost/worker/.", "spiffe://signpost/worker/..",
        "spiffe://signpost/worker/a%2Fb", "spiffe://signpost/worker/a b",
        "spiffe://SIGNPOST/worker", "spiffe://user@signpost/worker", "spiffe://signpost:1/worker",
        "https://signpost/worker", " spiffe://signpost/worker"}) {
    EXPECT_THAT(Identity::Parse(uri).status().message(),
                HasSubstr("wanted spiffe://TRUST-DOMAIN/ROLE"))
        << uri;
  }
  const std::string nul("spiffe://signpost/worker/a\0b", 28);
  EXPECT_FALSE(Identity::Parse(nul).ok());
  EXPECT_FALSE(Identity::Parse("spiffe://signpost/worker/" + std::string(257, 'j')).ok());
}

TEST(Identity, CoversItsJobAndThatJobsReductions) {
  const Identity of_a = *Identity::Parse("spiffe://signpost/worker/a");
  EXPECT_TRUE(of_a.Covers("a"));
  EXPECT_TRUE(of_a.Covers("a/norms"));
  EXPECT_FALSE(of_a.Covers("ab"));
  EXPECT_FALSE(of_a.Covers("b"));
  EXPECT_FALSE(of_a.Covers("b/a"));
  EXPECT_FALSE(of_a.Covers("A"));
  EXPECT_FALSE(of_a.Covers(""));
  EXPECT_TRUE(Identity::Parse("spiffe://signpost/worker")->Covers("any"));
}

TEST(Identity, SaysWhichNameItCannotHave) {
  EXPECT_THAT((Identity{"signpost", PeerRole::kWorker, "my job"}).Check().message(),
              HasSubstr("cannot name the job 'my job'"));
  EXPECT_THAT((Identity{"Signpost", PeerRole::kWorker, {}}).Check().message(),
              HasSubstr("the trust domain 'Signpost'"));
}

}  // namespace
}  // namespace signpost
