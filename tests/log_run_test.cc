// What a run writes to standard error, as JSON: every line of it, whoever wrote it.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace signpost::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Expects each line on standard error of the shell command to be an object, and returns them.
std::vector<json> Lines(const std::string& command) {
  FILE* const stream = popen(absl::StrCat(command, " 2>&1 >/dev/null").c_str(), "r");
  std::string output;
  for (int byte; (byte = fgetc(stream)) != EOF;) output.push_back(static_cast<char>(byte));
  pclose(stream);
  std::vector<json> lines;
  for (const absl::string_view line : absl::StrSplit(output, '\n', absl::SkipEmpty())) {
    const json object = json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(object.is_object()) << line;
    if (object.is_object()) lines.push_back(object);
  }
  return lines;
}

// The first whose message has this in it.
json LineWith(const std::vector<json>& lines, const std::string& text) {
  for (const json& line : lines) {
    if (line.value("message", "").find(text) != std::string::npos) return line;
  }
  ADD_FAILURE() << "no line with " << text << " in " << json(lines);
  return json::object();
}

// Whether any whose message has this in it says which round of whom it is about.
bool AnyNamesItsRound(const std::vector<json>& lines, const std::string& text) {
  return std::any_of(lines.begin(), lines.end(), [&](const json& line) {
    return line.value("message", "").find(text) != std::string::npos && line.contains("job") &&
           line.contains("step") && line["step"].is_number_unsigned() && line.contains("chunk") &&
           line["chunk"].is_number_unsigned() && line.contains("worker") &&
           line["worker"].is_number_unsigned();
  });
}

TEST(LogRun, IsJsonFromEveryProcess) {
  const std::vector<json> lines = Lines(
      "cli/signpost run --log-format json -n 2 --aggregators 1 -- sh -c '"
      "echo a line of text >&2; echo \"{\\\"own\\\": 1.50}\" >&2; "
      "exec cli/signpost demo-worker --hidden 32 --steps 3'");
  const json begins = LineWith(lines, "a job begins");
  EXPECT_EQ(begins.at("level"), "info");
  EXPECT_THAT(begins.at("job"), HasSubstr("run-"));
  EXPECT_EQ(begins.at("shard"), 0);
  EXPECT_EQ(LineWith(lines, "a job is over").at("job"), begins.at("job"));
  EXPECT_TRUE(LineWith(lines, "a line of text").contains("worker"));
  const auto own = std::count_if(lines.begin(), lines.end(), [](const json& line) {
    return line.value("own", 0.0) == 1.5 && line.contains("worker");
  });
  EXPECT_EQ(own, 2);
}

TEST(LogRun, SaysWhichConnectionOfWhichWorkerIsLost) {
  const std::vector<json> lines = Lines(absl::StrCat(
      "cli/signpost chaos --log-format json --every 300ms -n 2 --aggregators 1 --state-dir ",
      ::testing::TempDir(), "/state -- cli/signpost demo-worker --hidden 256 --steps 200"));
  const json lost = LineWith(lines, "which does not answer");
  EXPECT_EQ(lost.at("level"), "warning");
  EXPECT_TRUE(lost.at("worker").is_number_unsigned());
  EXPECT_THAT(lost.at("aggregator"), HasSubstr("127.0.0.1:"));
  EXPECT_THAT(lost.at("job"), HasSubstr("run-"));
  EXPECT_EQ(LineWith(lines, "goes on with a job").at("shard"), 0);
  // From workers, and from the aggregator.
  EXPECT_TRUE(AnyNamesItsRound(lines, "which does not answer"));
  EXPECT_TRUE(AnyNamesItsRound(lines, "the aggregator was started again, and asks"));
  EXPECT_TRUE(AnyNamesItsRound(lines, "a rank is asked for its frames again"));
  EXPECT_TRUE(LineWith(lines, "started again").contains("time"));
}

TEST(LogRun, IsOneObjectForAnErrorOfManyLines) {
  const std::vector<json> lines =
      Lines("cli/signpost run --log-format json -n 1 -- sh -c 'echo why >&2; exit 3'");
  const json error = LineWith(lines, "failed first: exit code 3");
  EXPECT_EQ(error.at("level"), "error");
  EXPECT_THAT(error.at("message"), HasSubstr("\n[rank 0] "));
}

TEST(LogRun, HeedsTheVariableToo) {
  const std::vector<json> lines =
      Lines("SIGNPOST_LOG_FORMAT=json cli/signpost aggregator --shard 3/2");
  ASSERT_EQ(lines.size(), 1);
  EXPECT_EQ(lines[0].at("level"), "error");
  EXPECT_THAT(lines[0].at("message"), HasSubstr("--shard is '3/2'"));
}

}  // namespace
}  // namespace signpost::testing
