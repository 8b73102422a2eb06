#include "client/demo/loss_chart.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace signpost::demo {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Ticks, AreRoundNumbersWithinTheRange) {
  EXPECT_THAT(Ticks(0, 800, 9), ElementsAre(0, 100, 200, 300, 400, 500, 600, 700, 800));
  EXPECT_THAT(Ticks(1.9, 4.1, 6), ElementsAre(DoubleEq(2), 2.5, DoubleEq(3), 3.5, DoubleEq(4)));
  EXPECT_THAT(Ticks(0, 7, 9), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

// 100 steps, the loss falls from 4 to 2, so that with its margins of 0.08 the axis reaches
// from 1.92 to 4.08.
Comparison MakeComparison() {
  WorkerResult result = {.world_size = 1, .steps = 100};
  result.curve = {{50, 4, 3}, {100, 2.5, 2}};
  WorkerResult onebit = result;
  onebit.one_bit_steps = 80;
  return {{result}, {onebit}};
}

TEST(LossChart, DrawsACurvePerRunAndText) {
  const std::string svg = FormatLossChart(MakeComparison());
  size_t curves = 0;
  for (size_t at = 0; (at = svg.find("<polyline", at)) != std::string::npos; ++at) ++curves;
  EXPECT_EQ(curves, 4);
}

TEST(LossChart, PutsPointsWhereTheAxesSay) {
  // x: 70 to 830 for 0 to 100 steps. y: 422 to 64 for 1.92 to 4.08, so 3 is in the middle.
  EXPECT_THAT(FormatLossChart(MakeComparison()), HasSubstr("points=\"450.0,243.0 830.0,408.7\""));
}

TEST(LossChart, LeavesOutWhatIsNotFinite) {
  Comparison comparison = MakeComparison();
  comparison.onebit[0].curve[1].validation_bpb = std::numeric_limits<double>::quiet_NaN();
  comparison.onebit[0].curve[1].training_bpb = std::numeric_limits<double>::infinity();
  const std::string svg = FormatLossChart(comparison);
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

TEST(LossChart, SurvivesRunsOfNothingFinite) {
  Comparison comparison = MakeComparison();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  comparison.adam[0].curve = comparison.onebit[0].curve = {{100, nan, nan}};
  EXPECT_THAT(FormatLossChart(comparison), Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace signpost::demo
