// Traces as `signpost run --trace` makes them, of a run that ends well and of one that does not.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace signpost::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kAggregators = 2;
constexpr int kSteps = 12;

struct Outcome {
  int exit_code = 0;
  std::string output;

  // With which rank 0 says that it ends.
  std::string digest() const {
    const size_t at = output.find("CRC-32C is ");
    return at == std::string::npos ? "none" : output.substr(at + 11, 8);
  }
};

Outcome RunShell(const std::string& command) {
  Outcome outcome;
  FILE* const stream = popen(absl::StrCat(command, " 2>&1").c_str(), "r");
  for (int byte; (byte = fgetc(stream)) != EOF;) outcome.output.push_back(static_cast<char>(byte));
  outcome.exit_code = WEXITSTATUS(pclose(stream));
  return outcome;
}

Outcome RunDemo(const std::string& flags, const std::string& variables = "") {
  return RunShell(absl::StrCat(variables, " cli/signpost run -n ", kRanks, " --aggregators ",
                               kAggregators, " ", flags,
                               " -- cli/signpost demo-worker --hidden 1024 --batch 4 "
                               "--freeze-step 4 --steps ",
                               kSteps));
}

// A place for a trace, which has none yet.
std::string TraceFile(const std::string& name) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name, ".json");
  std::filesystem::remove(path);
  std::filesystem::remove_all(path + ".parts");
  return path;
}

json Read(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);  // throws, and so fails
}

const json& TraceOfARun() {
  static const json& trace = *new json([] {
    const std::string path = TraceFile("run");
    const Outcome outcome = RunDemo("--trace " + path);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("5 processes on 1 host, "));
    EXPECT_FALSE(std::filesystem::exists(path + ".parts"));
    return Read(path);
  }());
  return trace;
}

using RowId = std::pair<int, int>;  // process and row
RowId RowOf(const json& event) { return {event.at("pid"), event.at("tid")}; }

// Microseconds are written to the nanosecond.
int64_t Nanoseconds(const json& microseconds) {
  return std::llround(microseconds.get<double>() * 1000);
}
int64_t BeginOf(const json& event) { return Nanoseconds(event.at("ts")); }
int64_t EndOf(const json& event) { return BeginOf(event) + Nanoseconds(event.at("dur")); }

std::vector<json> EventsOf(const json& trace, const std::string& ph, const std::string& name = "") {
  std::vector<json> events;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") == ph && (name.empty() || event.at("name") == name)) events.push_back(event);
  }
  return events;
}

// By row, in the order in which they are drawn.
std::map<RowId, std::vector<json>> SlicesByRow(const json& trace) {
  std::map<RowId, std::vector<json>> rows;
  for (json& event : EventsOf(trace, "X")) rows[RowOf(event)].push_back(std::move(event));
  for (auto& [row, slices] : rows) {
    std::stable_sort(slices.begin(), slices.end(), [](const json& a, const json& b) {
      return std::pair(BeginOf(a), -EndOf(a)) < std::pair(BeginOf(b), -EndOf(b));
    });
  }
  return rows;
}

TEST(TraceRun, HasEachProcessByItsName) {
  std::vector<std::string> names;
  for (const json& event : EventsOf(TraceOfARun(), "M", "process_name")) {
    names.push_back(event.at("args").at("name"));
  }
  EXPECT_THAT(names, ::testing::ElementsAre("rank 0", "rank 1", "rank 2", "aggregator 0/2",
                                            "aggregator 1/2"));
}

TEST(TraceRun, HasOnlyEventsThatTheFormatKnows) {
  for (const json& event : TraceOfARun().at("traceEvents")) {
    const std::string ph = event.at("ph");
    EXPECT_TRUE(event.at("name").is_string() && event.at("pid").is_number_unsigned() &&
                event.at("tid").is_number_unsigned())
        << event;
    if (ph == "M") continue;
    EXPECT_TRUE(event.at("cat").is_string()) << event;
    EXPECT_GE(event.at("ts").get<double>(), 0) << event;
    if (ph == "X") {
      EXPECT_GE(event.at("dur").get<double>(), 0) << event;
    } else if (ph == "i") {
      EXPECT_EQ(event.at("s"), "t") << event;
    } else if (ph == "f") {
      EXPECT_EQ(event.at("bp"), "e") << event;
    } else {
      EXPECT_EQ(ph, "s") << event;
    }
  }
}

TEST(TraceRun, NamesEachRowOnce) {
  std::map<RowId, int> names;
  for (const json& event : EventsOf(TraceOfARun(), "M", "thread_name")) ++names[RowOf(event)];
  for (const auto& [row, slices] : SlicesByRow(TraceOfARun())) EXPECT_EQ(names[row], 1);
}

TEST(TraceRun, HasNoTwoEventsInARowThatCross) {
  for (const auto& [row, slices] : SlicesByRow(TraceOfARun())) {
    std::vector<json> around;
    for (const json& slice : slices) {
      while (!around.empty() && EndOf(around.back()) <= BeginOf(slice)) around.pop_back();
      const int64_t latest = around.empty() ? EndOf(slice) : EndOf(around.back());
      EXPECT_LE(EndOf(slice), latest) << slice;
      around.push_back(slice);
    }
  }
}

TEST(TraceRun, HasBothEndsOfEachFrameAndAnswer) {
  const std::map<RowId, std::vector<json>> rows = SlicesByRow(TraceOfARun());
  const auto slice_around = [&](const json& end) -> std::string {
    for (const json& slice : rows.at(RowOf(end))) {
      if (BeginOf(slice) <= BeginOf(end) && BeginOf(end) <= EndOf(slice) &&
          (slice.at("name") == "exchange" || slice.at("name") == "round")) {
        return slice.at("name");
      }
    }
    return "nothing";
  };
  std::map<uint64_t, json> begins;
  for (const json& begin : EventsOf(TraceOfARun(), "s")) {
    EXPECT_TRUE(begins.emplace(begin.at("id").get<uint64_t>(), begin).second) << begin;
  }
  const std::vector<json> ends = EventsOf(TraceOfARun(), "f");
  for (const json& end : ends) {
    ASSERT_TRUE(begins.contains(end.at("id").get<uint64_t>())) << end;
    const json& begin = begins.at(end.at("id").get<uint64_t>());
    const bool is_frame = end.at("name") == "frame";
    EXPECT_EQ(begin.at("name"), end.at("name"));
    EXPECT_LE(BeginOf(begin), BeginOf(end)) << begin << end;
    EXPECT_EQ(slice_around(begin), is_frame ? "exchange" : "round") << begin;
    EXPECT_EQ(slice_around(end), is_frame ? "round" : "exchange") << end;
  }
  EXPECT_EQ(ends.size(), begins.size());
  const size_t exchanges = EventsOf(TraceOfARun(), "X", "exchange").size();
  EXPECT_GE(exchanges, size_t{kRanks * kSteps * kAggregators});
  EXPECT_EQ(ends.size(), 2 * exchanges);
}

TEST(TraceRun, HasEachRoundWithItsParts) {
  std::map<int, int> rounds;  // by process
  for (const json& round : EventsOf(TraceOfARun(), "X", "round")) {
    ++rounds[round.at("pid").get<int>()];
    EXPECT_LT(round.at("args").at("last_rank"), kRanks);
  }
  EXPECT_EQ(rounds.size(), kAggregators);
  const size_t count = EventsOf(TraceOfARun(), "X", "round").size();
  EXPECT_EQ(count % kSteps, 0);
  EXPECT_EQ(EventsOf(TraceOfARun(), "X", "gather").size(), count);
  EXPECT_EQ(EventsOf(TraceOfARun(), "X", "average").size(), count);
  EXPECT_EQ(EventsOf(TraceOfARun(), "i", "frame").size(), count * kRanks);
}

TEST(TraceRun, HasAllStepsWhosePartsAreNotLongerThanThey) {
  int steps = 0;
  for (const auto& [row, slices] : SlicesByRow(TraceOfARun())) {
    for (const json& step : slices) {
      if (step.at("name") != "step") continue;
      ++steps;
      int64_t parts = 0;
      for (const json& part : slices) {
        const bool is_within = BeginOf(step) <= BeginOf(part) && EndOf(part) <= EndOf(step);
        if (is_within && part.at("name") != "step") parts += EndOf(part) - BeginOf(part);
      }
      EXPECT_LE(parts, EndOf(step) - BeginOf(step));
      EXPECT_GT(parts, 0);
    }
  }
  EXPECT_EQ(steps, kRanks * kSteps);
}

TEST(TraceRun, IsSummedUp) {
  const std::string path = TraceFile("summary");
  std::ofstream(path) << TraceOfARun();
  const Outcome summary = RunShell("cli/signpost trace summary --steps " + path);
  EXPECT_EQ(summary.exit_code, 0);
  for (const char* line : {"rank 0 ", "rank 2 ", "4 steps", "fp32", "8 steps", "one-bit", "step 11",
                           "came last", "chunk "}) {
    EXPECT_THAT(summary.output, HasSubstr(line));
  }
}

TEST(TraceRun, ChangesNoBit) {
  const Outcome without = RunDemo("");
  const Outcome with = RunDemo("--trace " + TraceFile("bits"));
  EXPECT_EQ(without.exit_code, 0) << without.output;
  EXPECT_NE(without.digest(), "none");
  EXPECT_EQ(with.digest(), without.digest());
}

TEST(TraceRun, IsThereAfterARunThatFails) {
  const std::string path = TraceFile("failure");
  const Outcome outcome = RunShell(
      absl::StrCat("cli/signpost run -n 2 --trace ", path,
                   " -- sh -c 'SIGNPOST_FAILPOINT=worker.answered=kill@6 exec cli/signpost "
                   "demo-worker --hidden 64 --steps 100000'"));
  EXPECT_NE(outcome.exit_code, 0);
  const json trace = Read(path);
  EXPECT_GE(EventsOf(trace, "X", "step").size(), 5) << outcome.output;
}

TEST(TraceRun, IsThereAfterCtrlC) {
  const std::string path = TraceFile("interrupted");
  const Outcome outcome = RunShell(
      absl::StrCat("cli/signpost run -n 2 --trace ", path,
                   " -- sh -c 'cli/signpost demo-worker --hidden 8 --batch 1 --steps 100000 | "
                   "(read line; [ $SIGNPOST_RANK = 1 ] || kill -INT $PPID; cat)'"));
  EXPECT_EQ(outcome.exit_code, 75) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("3 processes on 1 host, "));
  EXPECT_GE(EventsOf(Read(path), "X", "step").size(), 5);
  EXPECT_FALSE(std::filesystem::exists(path + ".parts"));
}

TEST(TraceRun, IsMergedOfDirectoriesToo) {
  const std::string path = TraceFile("directories");
  const Outcome run = RunDemo("", "SIGNPOST_TRACE=" + path + ".parts");
  EXPECT_EQ(run.exit_code, 0) << run.output;
  const Outcome merge =
      RunShell(absl::StrCat("cli/signpost trace merge ", path, " ", path, ".parts"));
  EXPECT_EQ(merge.exit_code, 0);
  EXPECT_THAT(merge.output, HasSubstr("5 processes on 1 host, "));
  EXPECT_EQ(EventsOf(Read(path), "X", "step").size(), kRanks * kSteps);
  const Outcome nothing = RunShell("cli/signpost trace merge " + path + " " + ::testing::TempDir());
  EXPECT_EQ(nothing.exit_code, 64);
  EXPECT_THAT(nothing.output, HasSubstr("SIGNPOST_TRACE"));
}

TEST(TraceRun, IsNotMergedOverARecording) {
  const std::string path = TraceFile("over");
  const Outcome run = RunDemo("", "SIGNPOST_TRACE=" + path + ".parts");
  EXPECT_EQ(run.exit_code, 0) << run.output;
  const auto bytes_of_all = [&] {
    std::map<std::string, std::string> bytes;
    for (const auto& entry : std::filesystem::directory_iterator(path + ".parts")) {
      std::ifstream file(entry.path(), std::ios::binary);
      bytes[entry.path()] = std::string((std::istreambuf_iterator<char>(file)), {});
    }
    return bytes;
  };
  const std::map<std::string, std::string> before = bytes_of_all();
  const Outcome merge = RunShell(absl::StrCat("cli/signpost trace merge ", path, ".parts/*"));
  EXPECT_EQ(merge.exit_code, 64);
  EXPECT_THAT(merge.output, HasSubstr("signpost trace merge OUT IN"));
  EXPECT_TRUE(bytes_of_all() == before);
}

TEST(TraceRun, KeepsRecordingsOfWhichSomeCannotBeRead) {
  const std::string path = TraceFile("unreadable");
  const Outcome outcome = RunShell(
      absl::StrCat("cli/signpost run -n 1 --trace ", path, " -- sh -c 'true > ", path,
                   ".parts/other.signpost-trace; exec cli/signpost demo-worker --hidden 64 "
                   "--steps 3'"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("left out: "));
  EXPECT_EQ(EventsOf(Read(path), "X", "step").size(), 3);
  EXPECT_TRUE(std::filesystem::exists(path + ".parts/other.signpost-trace"));
  const Outcome summary = RunShell(absl::StrCat("cli/signpost trace summary ", path, ".parts"));
  EXPECT_EQ(summary.exit_code, 0);
  EXPECT_THAT(summary.output, AllOf(HasSubstr("left out: "), HasSubstr("3 steps")));
}

TEST(TraceRun, LeavesWhatAKilledRunHasRecordedAlone) {
  const std::string path = TraceFile("killed");
  std::filesystem::create_directory(path + ".parts");
  const Outcome outcome = RunDemo("--trace " + path);
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("signpost trace merge " + path));
}

TEST(TraceRun, HasWorkersOfTheCAbi) {
  const std::string path = TraceFile("c");
  const Outcome outcome = RunShell(
      absl::StrCat("cli/signpost run -n 2 --trace ", path, " -- client/examples/two_tensors"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_GT(EventsOf(Read(path), "X", "step").size(), 0);
}

TEST(TraceRun, HasANodesWorkerAndItsProcesses) {
  const std::string path = TraceFile("node");
  const Outcome outcome = RunDemo(absl::StrCat("--per-node ", kRanks, " --trace ", path));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const json trace = Read(path);
  std::map<std::string, int> steps;
  for (const json& step : EventsOf(trace, "X", "step")) {
    ++steps[trace.at("otherData").at("processes")[step.at("pid").get<int>() - 1].at("process")];
  }
  EXPECT_THAT(steps, ::testing::UnorderedElementsAre(
                         ::testing::Pair("node 0", kSteps), ::testing::Pair("rank 0", kSteps),
                         ::testing::Pair("rank 1", kSteps), ::testing::Pair("rank 2", kSteps)));
}

TEST(TraceRun, SaysWhatItsFilesAreWhenTheyCannotBeMerged) {
  const std::string path = ::testing::TempDir() + "/no/such/directory/trace.json";
  const Outcome outcome = RunDemo("--trace " + path);
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("trace file"), HasSubstr(".parts")));
}

}  // namespace
}  // namespace signpost::testing
