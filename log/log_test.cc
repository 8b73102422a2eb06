#include "log/log.h"

#include <cstdlib>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace signpost::log {
namespace {

using nlohmann::json;

class LogTest : public ::testing::Test {
 protected:
  ~LogTest() override { Set("text"); }

  static void Set(const char* format) { ASSERT_TRUE(SetFormat(format).ok()); }

  // What `write` writes to standard error.
  template <typename Write>
  static std::string Written(const Write& write) {
    testing::internal::CaptureStderr();
    write();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, WritesTextWithItsPrefixAndWithoutFields) {
  EXPECT_EQ(Written([] { Write(Level::kWarning, "warning", "it rains", {.worker = 3}); }),
            "warning: it rains\n");
}

TEST_F(LogTest, WritesJsonWithTheFieldsThatAreKnown) {
  Set("json");
  const json line = json::parse(Written([] {
    Write(Level::kWarning, "warning", "it rains", {.job = "j", .step = 1ull << 40, .chunk = 0});
  }));
  EXPECT_EQ(line.at("level"), "warning");
  EXPECT_EQ(line.at("message"), "it rains");
  EXPECT_EQ(line.at("job"), "j");
  EXPECT_EQ(line.at("step"), 1ull << 40);
  EXPECT_EQ(line.at("chunk"), 0);
  EXPECT_FALSE(line.contains("worker"));
}

TEST_F(LogTest, SaysTimesAsRfc3339DoesInUtc) {
  const absl::Time time = absl::UnixEpoch() + absl::Milliseconds(1'769'860'800'042);
  EXPECT_EQ(JsonLine(Level::kInfo, "m", {.worker = 2, .aggregator = "a:1"}, time),
            R"({"time":"2026-01-31T12:00:00.042Z","level":"info","message":"m","worker":2,)"
            R"("aggregator":"a:1"})");
}

TEST_F(LogTest, IsOneLineOfValidJsonWhateverIsInAText) {
  for (const std::string& text :
       {std::string("a\nb\r\t\"\\"), std::string("\0\x01\x1f\x7f", 4),
        std::string("\xff\xc3(\xed\xa0\x80"), std::string("\xe2\x82\xac \xf0\x9f\x98\x80")}) {
    const std::string line = JsonLine(Level::kError, text, {.job = text}, absl::UnixEpoch());
    EXPECT_EQ(line.find('\n'), std::string::npos);
    EXPECT_TRUE(json::accept(line)) << line;
  }
  EXPECT_EQ(json::parse(JsonLine(Level::kInfo, "a\n\"\x01", {}, absl::UnixEpoch())).at("message"),
            "a\n\"\x01");
}

TEST_F(LogTest, SaysWhatTheScopesAroundALineAreAbout) {
  Set("json");
  const Scope rank({.job = "j", .worker = 2});
  const json inner = json::parse(Written([] {
    const Scope connection({.aggregator = "a:1"});
    Write(Level::kInfo, "signpost", "m", {.job = "other"});
  }));
  EXPECT_EQ(inner.at("worker"), 2);
  EXPECT_EQ(inner.at("aggregator"), "a:1");
  EXPECT_EQ(inner.at("job"), "other");
  const json outer = json::parse(Written([] { Write(Level::kInfo, "signpost", "m"); }));
  EXPECT_EQ(outer.at("job"), "j");
  EXPECT_FALSE(outer.contains("aggregator"));
  std::thread([] {
    const json elsewhere = json::parse(Written([] { Write(Level::kInfo, "signpost", "m"); }));
    EXPECT_FALSE(elsewhere.contains("job"));
  }).join();
}

TEST_F(LogTest, SaysEventsInJsonOnly) {
  EXPECT_EQ(Written([] { WriteEvent(Level::kInfo, "a job begins"); }), "");
  Set("json");
  EXPECT_EQ(json::parse(Written([] { WriteEvent(Level::kInfo, "a job begins"); })).at("level"),
            "info");
}

TEST_F(LogTest, TellsProcessesThatItStartsInTheirEnvironment) {
  Set("json");
  EXPECT_STREQ(std::getenv("SIGNPOST_LOG_FORMAT"), "json");
  EXPECT_TRUE(absl::IsInvalidArgument(SetFormat("xml")));
  EXPECT_EQ(format(), Format::kJson);
}

TEST_F(LogTest, AddsWhatAnObjectLacksAndLeavesTheRestAsItIsWritten) {
  const About about = {.job = "j", .worker = 2};
  EXPECT_EQ(AddTo(R"({"n": 1.50, "worker": 7} )", about), R"({"n": 1.50, "worker": 7,"job":"j"})");
  EXPECT_EQ(AddTo("{}", about), R"({"job":"j","worker":2})");
  EXPECT_EQ(AddTo(R"({"a":{"worker":1}})", {.worker = 2}), R"({"a":{"worker":1},"worker":2})");
  for (const char* line : {"", "{", "{}}", "[1]", "7", "{a}", "text {}", "{\"a\":\"\xff\"}"}) {
    EXPECT_FALSE(AddTo(line, about).has_value()) << line;
  }
}

TEST_F(LogTest, AddsToALineBehindAByteOrderMarkWhichIsNotPassedOn) {
  EXPECT_EQ(AddTo("\xEF\xBB\xBF{\"a\":1}", {.worker = 2}), "{\"a\":1,\"worker\":2}");
  EXPECT_EQ(AddTo("\xEF\xBB\xBFtext", {.worker = 2}), std::nullopt);
}

}  // namespace
}  // namespace signpost::log
