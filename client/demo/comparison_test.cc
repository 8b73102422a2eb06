#include "client/demo/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

namespace signpost::demo {
namespace {

using ::testing::HasSubstr;

RunResults MakeRun(uint64_t one_bit_steps) {
  RunResults run;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    run.push_back({.rank = rank,
                   .world_size = 2,
                   .parameters = 1000,
                   .steps = 100,
                   .one_bit_steps = one_bit_steps,
                   .parameters_crc32c = 7});
  }
  run[0].curve = {{100, 2, 2}};
  return run;
}

Comparison MakeComparison() { return {MakeRun(/*one_bit_steps=*/0), MakeRun(80)}; }

TEST(Comparison, IsOfTwoRunsOfTheSameJob) { EXPECT_TRUE(CheckComparison(MakeComparison()).ok()); }

TEST(Comparison, SaysWhatDoesNotFit) {
  const auto expect_error = [](const std::function<void(Comparison&)>& change,
                               const std::string& message) {
    Comparison comparison = MakeComparison();
    change(comparison);
    const absl::Status status = CheckComparison(comparison);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(message));
  };
  expect_error([](Comparison& c) { c.adam.clear(); }, "Adam: no results");
  expect_error([](Comparison& c) { c.onebit.pop_back(); },
               "1-bit Adam: result 0 is of rank 0 of 2, wanted rank 0 of 1");
  expect_error([](Comparison& c) { std::swap(c.adam[0], c.adam[1]); },
               "Adam: result 0 is of rank 1 of 2, wanted rank 0 of 2");
  expect_error([](Comparison& c) { c.adam[1].steps = 99; }, "ranks 0 and 1 trained different jobs");
  expect_error([](Comparison& c) { c.onebit[0].curve.clear(); }, "rank 0 has no loss curve");
  expect_error(
      [](Comparison& c) {
        for (auto& r : c.onebit) r.parameters = 999;
      },
      "Adam ran 100 steps of 1000 parameters on 2 workers, 1-bit Adam 100 of 999 on 2");
  expect_error([](Comparison& c) { c.onebit = c.adam; }, "it had 0, and Adam 0");
  expect_error([](Comparison& c) { c.adam = c.onebit; }, "it had 80, and Adam 80");
}

TEST(MostBytes, AreThoseOfTheWorkerThatHadMostEachWay) {
  RunResults run = MakeRun(80);
  run[0].wire = {.sent = 10, .received = 40};
  run[1].wire = {.sent = 20, .received = 30};
  run[0].one_bit_wire = {.sent = 1, .received = 4};
  run[1].one_bit_wire = {.sent = 2, .received = 3};
  EXPECT_EQ(MostBytes(run).sent, 20);
  EXPECT_EQ(MostBytes(run).received, 40);
  EXPECT_EQ(MostOneBitBytes(run).sent, 2);
  EXPECT_EQ(MostOneBitBytes(run).received, 4);
}

TEST(RatioToFp32, IsOneForFourBytesPerParameterEachWay) {
  EXPECT_EQ(RatioToFp32({.sent = 4000, .received = 4000}, /*parameters=*/100, /*steps=*/10), 1);
  EXPECT_EQ(RatioToFp32({.sent = 125, .received = 125}, /*parameters=*/100, /*steps=*/10), 32);
}

TEST(BitsPerParameter, AreEightPerByte) {
  EXPECT_EQ(BitsPerParameter(/*bytes=*/250, /*parameters=*/100, /*steps=*/10), 2);
}

TEST(ReplicasIdentical, IsFalseWhenOneDiffers) {
  RunResults run = MakeRun(80);
  EXPECT_TRUE(ReplicasIdentical(run));
  run[1].parameters_crc32c = 8;
  EXPECT_FALSE(ReplicasIdentical(run));
}

}  // namespace
}  // namespace signpost::demo
