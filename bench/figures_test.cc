#include "bench/figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace signpost::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Figures, AMedianIsTheMiddleOneOrTheMeanOfTwo) {
  EXPECT_EQ(Median({7}), 7);
  EXPECT_EQ(Median({9, 1, 2}), 2);
  EXPECT_EQ(Median({9, 1, 2, 4}), 3);
}

TEST(Figures, TurnsHaveTheMedianOfTheirMediansAndTheExtremesOfAll) {
  const std::vector<std::vector<double>> turns = {{1, 2, 900}, {0.5, 4, 4}, {3, 3, 3}};
  EXPECT_THAT(Medians(turns), ElementsAre(2, 4, 3));
  const Figure figure = FigureOfTurns("exchange", "s", turns);
  EXPECT_EQ(figure.value(), 3);
  EXPECT_EQ(figure.least(), 0.5);
  EXPECT_EQ(figure.most(), 900);
}

TEST(Figures, MoreOrLessIsBetterAndAllOfTheBoundIsOne) {
  Figure rate = MakeFigure("copy", "GB/s", {10.0, 30.0, 20.0});
  SetBound(40, Better::kMore, rate);
  EXPECT_EQ(rate.value(), 20);
  EXPECT_EQ(rate.least(), 10);
  EXPECT_EQ(rate.most(), 30);
  EXPECT_EQ(rate.of_bound(), 0.5);
  Figure time = MakeFigure("exchange", "s", {0.5});
  SetBound(0.4, Better::kLess, time);
  EXPECT_DOUBLE_EQ(time.of_bound(), 0.8);
}

TEST(Figures, AMeasuredBoundIsComparedPairByPair) {
  Figure rate = MakeFigure("compress", "GB/s", {9.0, 20.0, 4.0});
  SetBounds({9.0, 20.0, 4.0}, {10.0, 40.0, 5.0}, Better::kMore, rate);
  EXPECT_EQ(rate.bound(), 10);
  EXPECT_EQ(rate.of_bound(), 0.8);
  Figure time = MakeFigure("compress", "s", {2.0});
  SetBounds({2.0}, {1.0}, Better::kLess, time);
  EXPECT_EQ(time.of_bound(), 0.5);
}

TEST(Figures, APeerIsComparedPairByPair) {
  Figure figure = MakeFigure("exchange", "s", {1.0, 2.0, 4.0});
  SetPeer("Gloo", {1.0, 2.0, 4.0}, {10.0, 40.0, 20.0}, Better::kLess, figure);
  EXPECT_EQ(figure.times_faster(), 10);
}

TEST(Figures, TheTableHasTheColumnsThatAreNeeded) {
  Figures figures;
  *figures.add_figures() = MakeFigure("copy", "GB/s", {18.02, 18.0});
  EXPECT_THAT(TableOf(figures), ElementsAre(ElementsAre("", "MEDIAN", "LEAST", "MOST", "UNIT"),
                                            ElementsAre("copy", "18.0", "18.0", "18.0", "GB/s")));
  SetBound(20, Better::kMore, *figures.mutable_figures(0));
  SetPeer("Gloo", {1.0}, {12.345}, Better::kLess, *figures.mutable_figures(0));
  *figures.add_figures() = MakeFigure("rounds", "", {0.00001234});
  const auto table = TableOf(figures);
  EXPECT_THAT(table[0], ElementsAre("", "MEDIAN", "LEAST", "MOST", "UNIT", "BOUND", "OF BOUND",
                                    "TIMES FASTER", "THAN"));
  EXPECT_THAT(table[1],
              ElementsAre("copy", "18.0", "18.0", "18.0", "GB/s", "20.0", "90%", "12.3", "Gloo"));
  EXPECT_THAT(table[2],
              ElementsAre("rounds", "1.23e-05", "1.23e-05", "1.23e-05", "", "", "", "", ""));
}

TEST(Figures, WithoutASpreadThereAreOnlyValues) {
  Figures figures;
  *figures.add_figures() = MakeFigure("exchange", "s", {0.5});
  EXPECT_THAT(TableOf(figures),
              ElementsAre(ElementsAre("", "VALUE", "UNIT"), ElementsAre("exchange", "0.500", "s")));
}

TEST(Figures, JsonHasTheFieldsThatAreSet) {
  Figures figures;
  *figures.add_figures() = MakeFigure("copy", "GB/s", {18});
  SetBound(20, Better::kMore, *figures.mutable_figures(0));
  const std::string json = FormatJson(figures);
  EXPECT_THAT(json, HasSubstr("\"of_bound\": 0.9"));
  EXPECT_THAT(json, HasSubstr("\"unit\": \"GB/s\""));
  EXPECT_THAT(json, Not(HasSubstr("times_faster")));
}

}  // namespace
}  // namespace signpost::bench
