#include "client/demo/worker_result.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_replace.h"

namespace signpost::demo {
namespace {

using ::testing::HasSubstr;

WorkerResult Example() {
  return {.rank = 1,
          .world_size = 4,
          .parameters = 3'000'000'000,
          .steps = 800,
          .one_bit_steps = 680,
          .seconds = 0.1,
          .parameters_crc32c = 0xfedcba98,
          .wire = {.sent = 10'000'000'000, .received = 20'000'000'000},
          .one_bit_wire = {.sent = 5, .received = 6},
          .validation = 2.0 / 3,
          .curve = {{40, 3.5, 3.25}, {80, 1.0 / 3, 2.5}}};
}

TEST(WorkerResult, ComesBackFromItsFile) {
  const std::string path = testing::TempDir() + "/result";
  ASSERT_TRUE(WriteResult(Example(), path).ok());
  const WorkerResult result = ReadResult(path).value();
  EXPECT_EQ(result.rank, 1);
  EXPECT_EQ(result.world_size, 4);
  EXPECT_EQ(result.parameters, 3'000'000'000);
  EXPECT_EQ(result.steps, 800);
  EXPECT_EQ(result.one_bit_steps, 680);
  EXPECT_EQ(result.seconds, 0.1);
  EXPECT_EQ(result.parameters_crc32c, 0xfedcba98);
  EXPECT_EQ(result.wire.sent, 10'000'000'000);
  EXPECT_EQ(result.wire.received, 20'000'000'000);
  EXPECT_EQ(result.one_bit_wire.sent, 5);
  EXPECT_EQ(result.one_bit_wire.received, 6);
  EXPECT_EQ(result.validation, 2.0 / 3);
  ASSERT_EQ(result.curve.size(), 2);
  EXPECT_EQ(result.curve[0].step, 40);
  EXPECT_EQ(result.curve[1].training_bpb, 1.0 / 3);
  EXPECT_EQ(result.curve[1].validation_bpb, 2.5);
}

TEST(WorkerResult, IsRefusedWhereverItStops) {
  const std::string text = FormatResult(Example());
  for (size_t length = 0; length + 1 < text.size(); ++length) {
    EXPECT_EQ(ParseResult(text.substr(0, length)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << "after " << length << " bytes";
  }
}

TEST(WorkerResult, NamesTheFigureThatIsMissing) {
  const std::string text = absl::StrReplaceAll(FormatResult(Example()), {{"seconds 0.1", "s 1"}});
  EXPECT_THAT(ParseResult(text).status().message(), HasSubstr("has no 'seconds'"));
}

TEST(WorkerResult, ShowsTheFigureThatIsNotANumber) {
  const std::string text = FormatResult(Example());
  EXPECT_THAT(ParseResult(absl::StrReplaceAll(text, {{"rank 1", "rank one"}})).status().message(),
              HasSubstr("'rank one'"));
  EXPECT_THAT(
      ParseResult(absl::StrReplaceAll(text, {{"curve 40 3.5 ", "curve 40 "}})).status().message(),
      HasSubstr("'curve 40 3.25'"));
}

TEST(WorkerResult, NamesItsFileInErrors) {
  EXPECT_THAT(ReadResult("/nowhere/at.all").status().message(), HasSubstr("'/nowhere/at.all'"));
}

}  // namespace
}  // namespace signpost::demo
