#include "cli/line_splitter.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

std::vector<std::string> Split(const std::vector<std::string>& pieces) {
  std::vector<std::string> lines;
  const auto collect = [&](absl::string_view line) { lines.emplace_back(line); };
  LineSplitter splitter;
  for (const std::string& piece : pieces) splitter.Add(piece, collect);
  splitter.Finish(collect);
  return lines;
}

using Lines = std::vector<std::string>;

TEST(LineSplitter, JoinsLinesAcrossReads) {
  EXPECT_EQ(Split({"st", "ep 1\nste", "p 2\n"}), (Lines{"step 1", "step 2"}));
}

TEST(LineSplitter, KeepsEmptyLines) { EXPECT_EQ(Split({"a\n\nb\n"}), (Lines{"a", "", "b"})); }

TEST(LineSplitter, EndsLinesAtCarriageReturns) {
  EXPECT_EQ(Split({"10%\r20%\r\ndone\n"}), (Lines{"10%", "20%", "done"}));
}

TEST(LineSplitter, TakesACarriageReturnAndANewlineOfTwoReadsForOneEnd) {
  EXPECT_EQ(Split({"a\r", "\nb\n"}), (Lines{"a", "b"}));
}

TEST(LineSplitter, DeliversALastLineWithoutAnEnd) { EXPECT_EQ(Split({"a\nb"}), (Lines{"a", "b"})); }

TEST(LineSplitter, DeliversNothingForNothing) { EXPECT_EQ(Split({"", ""}), Lines{}); }

TEST(LineSplitter, CutsEndlessLines) {
  const Lines lines = Split({std::string(2 * LineSplitter::kMaxLineBytes + 1, 'x')});
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].size(), LineSplitter::kMaxLineBytes);
  EXPECT_EQ(lines[2], "x");
}

}  // namespace
}  // namespace signpost::cli
