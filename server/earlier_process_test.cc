#include "server/earlier_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/try_again.h"
#include "server/undurable_rounds.h"

namespace signpost {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kGeneration = 3;

class EarlierProcessTest : public ::testing::Test {
 protected:
  static FrameHeader From(uint32_t rank, uint64_t answered_steps,
                          uint64_t generation = kGeneration) {
    FrameHeader header;
    header.set_rank(rank);
    header.set_step(answered_steps);
    header.set_answered_steps(answered_steps);
    header.set_generation(generation);
    return header;
  }

  EarlierProcess earlier_{/*world_size=*/2, kGeneration, absl::UnixEpoch()};
};

TEST_F(EarlierProcessTest, AnyRoundMayHaveClosedUntilAllRanksAreBack) {
  EXPECT_TRUE(earlier_.MayHaveClosed(7));
  earlier_.Hear(From(0, 7));
  EXPECT_TRUE(earlier_.MayHaveClosed(7));
  earlier_.Hear(From(1, 7));
  EXPECT_FALSE(earlier_.MayHaveClosed(7));
  EXPECT_TRUE(earlier_.MayHaveClosed(6));
}

TEST_F(EarlierProcessTest, ARoundHasClosedOfWhichOneRankHasHadTheAnswer) {
  earlier_.Hear(From(0, 7));
  earlier_.Hear(From(1, 5));
  EXPECT_TRUE(earlier_.HasClosed(6));
  EXPECT_FALSE(earlier_.HasClosed(7));
}

TEST_F(EarlierProcessTest, AFrameThatWasSentToAnEarlierProcessTellsNothing) {
  earlier_.Hear(From(0, 7, kGeneration - 1));
  EXPECT_FALSE(earlier_.HasClosed(6));
  EXPECT_FALSE(earlier_.AllAreBack({false, true}));
}

TEST_F(EarlierProcessTest, IsAskedForByWhoDoesNotKnowOfTheRestartOrIsFurther) {
  EXPECT_TRUE(earlier_.MustReplay(From(0, 5, kGeneration - 1), /*open_step=*/5));
  EXPECT_FALSE(earlier_.MustReplay(From(0, 5), /*open_step=*/5));
  EXPECT_TRUE(earlier_.MustReplay(From(0, 6), /*open_step=*/5));
}

TEST_F(EarlierProcessTest, WhoHasLeftNeedNotComeBack) {
  earlier_.Hear(From(0, 7));
  EXPECT_FALSE(earlier_.AllAreBack({false, false}));
  EXPECT_TRUE(earlier_.AllAreBack({false, true}));
}

TEST_F(EarlierProcessTest, NobodyMustHaveHadTheAnswerOfARoundThatClosesOtherwise) {
  earlier_.SetDecided(5);
  earlier_.SetDecided(6);
  EXPECT_TRUE(earlier_.Check(From(1, 5), /*open_step=*/7).ok());
  const absl::Status status = earlier_.Check(From(1, 6), /*open_step=*/7);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 was away for too long"));
  EXPECT_THAT(status.message(), HasSubstr("step 5"));
  EXPECT_THAT(status.message(), HasSubstr("Started again, it gets the others' state"));
  EXPECT_TRUE(IsTryAgain(status));
}

TEST_F(EarlierProcessTest, ARankThatIsBackHasItsLaterAnswersFromThisProcess) {
  earlier_.SetDecided(5);
  earlier_.Hear(From(1, 5));
  EXPECT_TRUE(earlier_.Check(From(1, 8), /*open_step=*/7).ok());
}

TEST_F(EarlierProcessTest, AProcessThatReturnsHasHadNoAnswers) {
  earlier_.SetDecided(5);
  earlier_.SetReturning(1, /*has_state=*/false);
  EXPECT_TRUE(earlier_.Check(From(1, 8), /*open_step=*/7).ok());
  EXPECT_TRUE(earlier_.AllAreBack({true, false}));
}

TEST_F(EarlierProcessTest, OneThatHasAStateMayHaveItOfWhoHadOtherAnswers) {
  earlier_.SetReturning(1, /*has_state=*/true);
  EXPECT_TRUE(earlier_.AllAreBack({true, false}));
  earlier_.SetDecided(5);
  EXPECT_TRUE(earlier_.Check(From(1, 5), /*open_step=*/7).ok());
  EXPECT_TRUE(IsTryAgain(earlier_.Check(From(1, 8), /*open_step=*/7)));
}

TEST_F(EarlierProcessTest, AStateOfRoundsThatAreStillToCloseIsNone) {
  EXPECT_TRUE(earlier_.HasStateOfThisProcess(1, 2, /*open_step=*/2));
  EXPECT_FALSE(earlier_.HasStateOfThisProcess(1, 3, /*open_step=*/2));
  earlier_.Hear(From(1, 3));
  EXPECT_FALSE(earlier_.HasStateOfThisProcess(1, 3, /*open_step=*/2)) << "it may die with them";
}

TEST_F(EarlierProcessTest, AStateOfRoundsThatHaveClosedOtherwiseIsNone) {
  earlier_.SetDecided(5);
  EXPECT_TRUE(earlier_.HasStateOfThisProcess(1, 5, /*open_step=*/7));
  EXPECT_FALSE(earlier_.HasStateOfThisProcess(1, 6, /*open_step=*/7));
  earlier_.Hear(From(1, 5));
  EXPECT_TRUE(earlier_.HasStateOfThisProcess(1, 6, /*open_step=*/7))
      << "it has had the answer of this process";
}

TEST_F(EarlierProcessTest, NobodyHasHadMoreAnswersThanCouldBeLost) {
  EXPECT_TRUE(earlier_.Check(From(0, 2 + kMostKeptRounds), /*open_step=*/2).ok());
  EXPECT_EQ(earlier_.Check(From(0, 3 + kMostKeptRounds), /*open_step=*/2).code(),
            absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace signpost
