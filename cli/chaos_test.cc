#include "cli/chaos.h"

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ParseFaults, TakesThoseThatThereAre) {
  EXPECT_THAT(*ParseFaults("kill,stop,reset,stall"),
              ElementsAre(Fault::kKill, Fault::kStop, Fault::kReset, Fault::kStall));
  for (const char* wrong : {"", "kil", "kill,", "kill stop"}) {
    const absl::Status status = ParseFaults(wrong).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << wrong;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is not a fault; kill, stop"));
  }
}

TEST(FaultPlan, IsTheSameForASeedAndHasEverything) {
  FaultPlan plan(7, {Fault::kKill, Fault::kReset}, 3), again = plan, other(8, {Fault::kKill}, 3);
  int kills = 0, differences = 0;
  int faults_of_shard[3] = {};
  for (int i = 0; i < 300; ++i) {
    const PlannedFault planned = plan.Next();
    const PlannedFault same = again.Next();
    EXPECT_EQ(planned.fault, same.fault);
    EXPECT_EQ(planned.shard, same.shard);
    differences += planned.shard != other.Next().shard;
    kills += planned.fault == Fault::kKill;
    ++faults_of_shard[planned.shard];
  }
  EXPECT_GT(differences, 0);
  EXPECT_GT(kills, 100);
  EXPECT_LT(kills, 200);
  for (const int faults : faults_of_shard) EXPECT_GT(faults, 50);
}

TEST(Chaos, IsOverAtOnceIfNothingHasBegun) {
  Chaos chaos({.aggregators = 2});
  EXPECT_EQ(chaos.Finish(), "no fault: the run was too short");
  EXPECT_EQ(chaos.faults(), 0);
}

}  // namespace
}  // namespace signpost::cli
