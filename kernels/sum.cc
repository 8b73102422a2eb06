#include "kernels/sum.h"

#include <algorithm>
#include <vector>

#include "kernels/block.h"

namespace signpost::kernels {
namespace {

double Square(double value) { return value * value; }
double Same(double value) { return value; }

template <double (*kTerm)(double), class T>
double SumOfRun(absl::Span<const T> values) {
  double lanes[kSumLanes] = {};
  size_t i = 0;
  for (; i + kSumLanes <= values.size(); i += kSumLanes) {
    for (size_t l = 0; l < kSumLanes; ++l) lanes[l] += kTerm(values[i + l]);
  }
  for (size_t l = 0; i + l < values.size(); ++l) lanes[l] += kTerm(values[i + l]);
  for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

template <double (*kTerm)(double), class T>
double SumOf(absl::Span<const T> values) {
  if (values.size() <= kSumRun) return SumOfRun<kTerm>(values);
  std::vector<double> sums;
  sums.reserve(BlockCount(values.size(), kSumRun));
  for (size_t begin = 0; begin < values.size(); begin += kSumRun) {
    sums.push_back(SumOfRun<kTerm>(values.subspan(begin, kSumRun)));
  }
  return SumOf<Same>(absl::MakeConstSpan(sums));
}

}  // namespace

double Sum(absl::Span<const float> values) { return SumOf<Same>(values); }

double SumOfSquares(absl::Span<const float> values) { return SumOf<Square>(values); }

}  // namespace signpost::kernels
