// How what the system computes in fp32 is compared with references in double precision.

#ifndef SIGNPOST_TESTS_REFERENCE_COMPARISON_H_
#define SIGNPOST_TESTS_REFERENCE_COMPARISON_H_

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "proto/aggregator.pb.h"
#include "tests/exchange_reference.h"

namespace signpost::testing {

// What references call it; other codecs they do not have.
inline ReferenceCodec ReferenceCodecOf(Codec codec) {
  switch (codec) {
    case FLOAT32:
      return ReferenceCodec::kExact;
    case INT8:
      return ReferenceCodec::kInt8;
    case INT4:
      return ReferenceCodec::kInt4;
    default:
      EXPECT_EQ(codec, ONE_BIT);
      return ReferenceCodec::kOneBit;
  }
}

inline Vector ToDouble(absl::Span<const float> values) { return {values.begin(), values.end()}; }

// Every value in these tests stays below 16 in magnitude. A step rounds a value some ten times,
// each by at most half an ulp (2^-21), scales inherit as much relative to S < 8, and the errors
// carry it on to the next step: it grows linearly with the steps.
inline double Tolerance(int step) { return (step + 1) * 20 * 0x1p-21; }

// Of 1-bit LAMB's coefficients, relative. A momentum has some five roundings, each of at most
// 2^-24, in each step, and a gradient that is reconstructed from it 19 times as much; the fresh
// variance has its square, and the factor the root of that.
inline double FactorTolerance(int step) { return (step + 1) * 5 * 19 * 0x1p-24; }

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_REFERENCE_COMPARISON_H_
