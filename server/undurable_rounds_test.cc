#include "server/undurable_rounds.h"

#include <gtest/gtest.h>

namespace signpost {
namespace {

// So 4096 bytes in fp32, of which a rank keeps half.
constexpr uint64_t kElements = 1024;

TEST(UndurableRounds, HaveHalfOfTheChunksSizeInFp32) {
  UndurableRounds rounds(kElements, /*step=*/0);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(rounds.HasRoomFor(500));
    rounds.Add(500);
  }
  EXPECT_TRUE(rounds.HasRoomFor(48));
  EXPECT_FALSE(rounds.HasRoomFor(49));
  EXPECT_EQ(rounds.bytes(), 2000);
}

TEST(UndurableRounds, HaveFourOfTheLargestIfThatIsMore) {
  UndurableRounds rounds(kElements, /*step=*/0);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(rounds.HasRoomFor(4096));
    rounds.Add(4096);
  }
  EXPECT_FALSE(rounds.HasRoomFor(1));
}

TEST(UndurableRounds, AreNotMoreThanSixtyFourHoweverSmall) {
  UndurableRounds rounds(kElements, /*step=*/0);
  for (int i = 0; i < 64; ++i) {
    EXPECT_TRUE(rounds.HasRoomFor(0));
    rounds.Add(0);
  }
  EXPECT_FALSE(rounds.HasRoomFor(0));
}

TEST(UndurableRounds, OfASingleNumberAreSixteen) {
  UndurableRounds rounds(/*elements=*/1, /*step=*/0);
  for (int i = 0; i < 16; ++i) {
    EXPECT_TRUE(rounds.HasRoomFor(sizeof(float))) << i;
    rounds.Add(sizeof(float));
  }
  EXPECT_FALSE(rounds.HasRoomFor(sizeof(float)));
}

// Two snapshots make the first of them durable: there is room for another before that is needed.
TEST(UndurableRounds, OfASingleNumberWantASnapshotAfterSix) {
  UndurableRounds rounds(/*elements=*/1, /*step=*/0);
  for (int i = 0; i < 5; ++i) rounds.Add(sizeof(float));
  EXPECT_FALSE(rounds.WantSnapshot());
  rounds.Add(sizeof(float));
  EXPECT_TRUE(rounds.WantSnapshot());
}

TEST(UndurableRounds, AreThoseFromTheDurableStepOn) {
  UndurableRounds rounds(kElements, /*step=*/10);
  for (int i = 0; i < 3; ++i) rounds.Add(100);
  rounds.SetDurable(12);
  EXPECT_EQ(rounds.bytes(), 100);
  EXPECT_EQ(rounds.durable_step(), 12);
  rounds.SetDurable(11);
  EXPECT_EQ(rounds.durable_step(), 12);
  rounds.SetDurable(20);
  EXPECT_EQ(rounds.bytes(), 0);
}

TEST(UndurableRounds, WantASnapshotWhenThreeSixteenthsAreInNone) {
  UndurableRounds rounds(kElements, /*step=*/0);
  rounds.Add(767);
  EXPECT_FALSE(rounds.WantSnapshot());
  rounds.Add(1);
  EXPECT_TRUE(rounds.WantSnapshot());
  rounds.SetSaved();
  EXPECT_FALSE(rounds.WantSnapshot());
  EXPECT_EQ(rounds.bytes(), 768);
}

}  // namespace
}  // namespace signpost
