#include "kernels/sum.h"

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels {
namespace {

using Values = std::vector<float>;
using Doubles = std::vector<double>;

// What sum.h says, as naively as it can be said: what lane l holds once `lanes` are left.
double Fold(const Doubles& run, size_t l, size_t lanes) {
  if (lanes < 128) return Fold(run, l, 2 * lanes) + Fold(run, l + lanes, 2 * lanes);
  double sum = 0;
  for (size_t i = l; i < run.size(); i += 128) sum += run[i];
  return sum;
}

double Model(Doubles values) {
  do {
    Doubles sums;
    for (size_t begin = 0; begin == 0 || begin < values.size(); begin += 4096) {
      const size_t end = std::min(begin + 4096, values.size());
      sums.push_back(Fold(Doubles(values.begin() + begin, values.begin() + end), 0, 1));
    }
    values = sums;
  } while (values.size() > 1);
  return values[0];
}

TEST(Sum, IsTakenInTheOrderThatTheHeaderSays) {
  Random random;
  std::vector<size_t> lengths(std::begin(kLengths), std::end(kLengths));
  lengths.push_back(size_t{4096} * 4096 + 5000);  // the runs' sums make more than one run
  for (const size_t n : lengths) {
    SCOPED_TRACE(n);
    const Values values = random.Values(n);
    Doubles terms(values.begin(), values.end());
    EXPECT_EQ(Sum(values), Model(terms));
    for (double& term : terms) term *= term;
    EXPECT_EQ(SumOfSquares(values), Model(terms));
  }
}

TEST(Sum, IsInDouble) {
  EXPECT_EQ(Sum({}), 0);
  EXPECT_EQ(Sum(Values{0x1p24f, 1, 1}), 0x1p24 + 2);
  EXPECT_EQ(SumOfSquares(Values{0x1p100f, 3, 4}), 0x1p200 + 25);
  EXPECT_EQ(SumOfSquares(Values{-3, 4}), 25);
}

// Elements 0 and 128 share a lane, 0 and 1 do not.
TEST(Sum, LanesAreAddedUpFirst) {
  Values values(129, 0.0f);
  values[0] = 0x1p60f;
  values[1] = 1;
  values[128] = -0x1p60f;
  EXPECT_EQ(Sum(values), 1);
}

}  // namespace
}  // namespace signpost::kernels
