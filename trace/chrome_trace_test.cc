#include "trace/chrome_trace.h"

#include <ios>
#include <istream>
#include <sstream>
#include <streambuf>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace signpost::trace {
namespace {

using nlohmann::json;

Timeline ATimeline() {
  Recording rank = {.process = "rank 0", .host = "a", .clock = "A", .pid = 7, .dropped = 3};
  rank.refused_labels = 5;
  rank.labels = {"", "a \"job\"\n\xff", "one-bit"};
  rank.events = {{.kind = Kind::kExchange,
                  .begin = 1'000'000'001,
                  .end = 1'000'500'000,
                  .epoch = 1'800'000'000'000'000'001,
                  .step = 4,
                  .chunk = 2,
                  .rank = 0,
                  .bytes = 99,
                  .job = 1,
                  .codec = 2},
                 {.kind = Kind::kStep,
                  .begin = 1'000'000'000,
                  .end = 1'001'000'000,
                  .step = 4,
                  .rank = 0,
                  .job = 1}};
  Recording aggregator = {.process = "aggregator 0/1", .host = "a", .clock = "A"};
  aggregator.labels = rank.labels;
  Event event = rank.events[0];
  event.kind = Kind::kFrame;
  event.begin = event.end = 1'000'100'000;
  aggregator.events.push_back(event);
  event.kind = Kind::kRound;
  event.end = 1'000'400'000;
  aggregator.events.push_back(event);
  return Join({rank, aggregator});
}

std::string Written(const Timeline& timeline) {
  std::ostringstream written;
  WriteChromeTrace(timeline, written);
  return written.str();
}

TEST(ChromeTrace, IsJsonWhateverIsInNames) {
  const json trace = json::parse(Written(ATimeline()));
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") == "exchange") {
      EXPECT_EQ(event.at("args").at("job"), "a \"job\"\n\xEF\xBF\xBD");
      EXPECT_EQ(event.at("args").at("epoch"), "1800000000000000001");
      EXPECT_EQ(event.at("ts"), 0.001);
      EXPECT_EQ(event.at("dur"), 499.999);
    }
  }
}

TEST(ChromeTrace, SaysHowManyEventsAreMissing) {
  const json processes = json::parse(Written(ATimeline())).at("otherData").at("processes");
  EXPECT_EQ(processes[0].at("dropped_events"), 3);
  EXPECT_EQ(processes[1].at("dropped_events"), 0);
}

TEST(ChromeTrace, SaysHowOftenThereWasNoRoomForAName) {
  std::istringstream from(Written(ATimeline()));
  EXPECT_EQ(ReadChromeTrace(from, "trace.json")->processes.at(0).refused_labels, 5);
}

TEST(ChromeTrace, IsReadAsItWasWritten) {
  const std::string written = Written(ATimeline());
  std::istringstream from(written);
  const absl::StatusOr<Timeline> read = ReadChromeTrace(from, "trace.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(Written(*read), written);
  EXPECT_EQ(read->arrows.size(), 1);
}

TEST(ChromeTrace, OfNothingIsATraceToo) {
  std::istringstream from(Written(Join({})));
  EXPECT_TRUE(ReadChromeTrace(from, "trace.json").ok());
}

TEST(ChromeTrace, SaysWhatCannotBeRead) {
  for (const char* text : {"", "{", "[]", "{}", R"({"traceEvents":[]})",
                           R"({"traceEvents":[{"ph":"X","name":"step","cat":"signpost"}],)"
                           R"("otherData":{"hosts":[],"processes":[]}})",
                           R"({"traceEvents":[],"otherData":{"hosts":7,"processes":[3]}})"}) {
    std::istringstream from(text);
    const absl::StatusOr<Timeline> read = ReadChromeTrace(from, "trace.json");
    EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << text << read.status();
    EXPECT_THAT(std::string(read.status().message()), testing::HasSubstr("trace.json"));
  }
}

// As a file's whose disk has an error.
class FailingBuffer : public std::streambuf {
  int_type underflow() override { throw std::ios_base::failure("the disk"); }
};

TEST(ChromeTrace, SaysThatAFileCannotBeRead) {
  FailingBuffer buffer;
  std::istream from(&buffer);
  from.exceptions(std::ios_base::badbit);
  const absl::StatusOr<Timeline> read = ReadChromeTrace(from, "trace.json");
  EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << read.status();
  EXPECT_THAT(std::string(read.status().message()), testing::HasSubstr("trace.json"));
}

}  // namespace
}  // namespace signpost::trace
