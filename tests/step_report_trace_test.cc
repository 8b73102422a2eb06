// What a trace has of steps is what their reports say; and what it has of frames is what happened
// to them, when they are sent twice too.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "trace/merge.h"
#include "trace/recorder.h"

namespace signpost::testing {
namespace {

using trace::Event;
using trace::Kind;

// All tests of the process are in one recording.
const std::string& TraceDirectory() {
  static const std::string& directory = *new std::string([] {
    std::string path = absl::StrCat(::testing::TempDir(), "/trace");
    std::filesystem::remove_all(path);
    const absl::Status started = trace::Start(path, "the test");
    EXPECT_TRUE(started.ok()) << started;
    return path;
  }());
  return directory;
}

JobOptionsForTest JobNamed(const std::string& name) {
  TraceDirectory();
  JobOptionsForTest job;
  job.workers = 3;
  job.tensors = {300'000, 700'000, 5};
  job.worker.job = name;
  job.worker.block_elements = 4096;
  job.worker.chunk_elements = 16 * 4096;
  job.steps = 15;
  return job;
}

trace::Timeline Read() {
  absl::StatusOr<trace::Timeline> timeline = trace::ReadRecordings({TraceDirectory()});
  EXPECT_TRUE(timeline.ok()) << timeline.status();
  return *std::move(timeline);
}

std::vector<Event> EventsOf(const trace::Timeline& timeline, const std::string& job,
                            uint32_t rank) {
  std::vector<Event> events;
  for (const Event& event : timeline.processes.at(0).events) {
    if (timeline.Label(event.job) == job && event.rank == rank) events.push_back(event);
  }
  return events;
}

absl::Duration Sum(const std::vector<Event>& events, std::initializer_list<Kind> kinds,
                   const Event& within) {
  int64_t sum = 0;
  for (const Event& event : events) {
    const bool counts = std::find(kinds.begin(), kinds.end(), event.kind) != kinds.end();
    if (counts && within.begin <= event.begin && event.end <= within.end) {
      sum += event.end - event.begin;
    }
  }
  return absl::Nanoseconds(sum);
}

std::vector<Event> Steps(const std::vector<Event>& events) {
  std::vector<Event> steps;
  for (const Event& event : events) {
    if (event.kind == Kind::kStep) steps.push_back(event);
  }
  return steps;
}

// Of most steps: between two looks at the clock a thread may lose its processor.
void ExpectAlike(const std::vector<absl::Duration>& traced,
                 const std::vector<absl::Duration>& reported) {
  ASSERT_EQ(traced.size(), reported.size());
  std::vector<double> excess;
  for (size_t i = 0; i < traced.size(); ++i) {
    const absl::Duration tolerance = absl::Microseconds(30) + reported[i] / 20;
    excess.push_back(absl::FDivDuration(absl::AbsDuration(traced[i] - reported[i]), tolerance));
  }
  std::nth_element(excess.begin(), excess.begin() + excess.size() / 2, excess.end());
  EXPECT_LE(excess[excess.size() / 2], 1);
}

TEST(StepReportTrace, HasWhatReportsSay) {
  JobOptionsForTest job = JobNamed("reports");
  absl::Mutex mutex;
  std::map<uint32_t, std::vector<StepReport>> reports;
  job.take_step = [&](uint32_t rank, int, Worker& worker, absl::Span<const Gradient> gradients,
                      const GroupRates& rates) {
    absl::StatusOr<StepReport> report = worker.Step(gradients, {rates});
    absl::MutexLock lock(&mutex);
    if (report.ok()) reports[rank].push_back(*report);
    return report;
  };
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  Train(cluster, job);
  const trace::Timeline timeline = Read();
  for (uint32_t rank = 0; rank < job.workers; ++rank) {
    const std::vector<Event> events = EventsOf(timeline, "reports", rank);
    const std::vector<Event> steps = Steps(events);
    ASSERT_EQ(steps.size(), size_t{15});
    std::vector<absl::Duration> kernels, wire, wait, reported_kernels, reported_wire, reported_wait;
    for (size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i].step, i);
      kernels.push_back(Sum(events, {Kind::kCompress, Kind::kApply, Kind::kEndStep}, steps[i]));
      wire.push_back(Sum(events, {Kind::kWire}, steps[i]));
      wait.push_back(Sum(events, {Kind::kWait}, steps[i]));
      reported_kernels.push_back(reports[rank][i].kernels);
      reported_wire.push_back(reports[rank][i].wire);
      reported_wait.push_back(reports[rank][i].wait);
      EXPECT_LE(kernels[i] + wire[i] + wait[i], Sum(events, {Kind::kStep}, steps[i]));
    }
    ExpectAlike(kernels, reported_kernels);
    ExpectAlike(wire, reported_wire);
    ExpectAlike(wait, reported_wait);
  }
}

// For longer than a worker waits before it asks whether the aggregators are there.
TEST(StepReportTrace, HasALongWaitForALateRankAsAWaitAndNotAsTheNetwork) {
  JobOptionsForTest job = JobNamed("late");
  job.steps = 2;
  absl::Mutex mutex;
  std::map<uint32_t, StepReport> last;
  job.take_step = [&](uint32_t rank, int step, Worker& worker, absl::Span<const Gradient> gradients,
                      const GroupRates& rates) {
    if (rank == 1 && step == 1) absl::SleepFor(absl::Seconds(3));
    absl::StatusOr<StepReport> report = worker.Step(gradients, {rates});
    absl::MutexLock lock(&mutex);
    if (report.ok()) last[rank] = *report;
    return report;
  };
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  Train(cluster, job);
  EXPECT_GT(last[0].wait, absl::Seconds(1));
  EXPECT_GT(last[0].wait, last[0].wire);
  const std::vector<Event> events = EventsOf(Read(), "late", 0);
  EXPECT_GT(Sum(events, {Kind::kWait}, Steps(events).at(1)), absl::Seconds(1));
}

TEST(StepReportTrace, HasTheCallsOfAStepInParts) {
  JobOptionsForTest job = JobNamed("parts");
  job.take_step = [](uint32_t, int, Worker& worker, absl::Span<const Gradient> gradients,
                     const GroupRates& rates) -> absl::StatusOr<StepReport> {
    absl::Status status = worker.BeginStep({rates});
    for (size_t i = gradients.size(); i-- > 0 && status.ok();) {
      status = worker.GradientReady(i, gradients[i]);
    }
    if (!status.ok()) return status;
    return worker.FinishStep();
  };
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  Train(cluster, job);
  const trace::Timeline timeline = Read();
  const std::vector<Event> events = EventsOf(timeline, "parts", 0);
  const std::vector<Event> steps = Steps(events);
  ASSERT_EQ(steps.size(), size_t{15});
  for (const Event& step : steps) {
    const auto calls = std::count_if(events.begin(), events.end(), [&](const Event& event) {
      return event.kind == Kind::kCall && step.begin <= event.begin && event.end <= step.end;
    });
    EXPECT_EQ(calls, 2 + 3);  // one for each tensor
    const absl::Duration in_calls = Sum(events, {Kind::kCall}, step);
    EXPECT_LE(Sum(events, {Kind::kCompress, Kind::kApply, Kind::kWire, Kind::kWait, Kind::kEndStep},
                  step),
              in_calls);
    EXPECT_LE(in_calls, Sum(events, {Kind::kStep}, step));
  }
}

TEST(StepReportTrace, HasEachRoundWithAllItsFramesWhenAggregatorsAreStartedAgain) {
  JobOptionsForTest job = JobNamed("restarts");
  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/state");
  std::filesystem::remove_all(state_dir);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2, .state_dir = state_dir});
  Train(cluster, job, [&](uint32_t rank, int step, const Replica&, Worker&) {
    if (rank == 0 && step == 9) cluster.Kill(0);
  });
  const trace::Timeline timeline = Read();
  const auto is_of_job = [&](const Event& event) {
    return timeline.Label(event.job) == "restarts";
  };
  std::map<Kind, int> counts;
  for (const Event& event : timeline.processes.at(0).events) {
    if (is_of_job(event)) ++counts[event.kind];
  }
  EXPECT_GT(counts[Kind::kReplay], 0);
  EXPECT_GT(counts[Kind::kSnapshot], 0);
  int arrows = 0;
  for (const trace::Arrow& arrow : timeline.arrows) {
    const Event& from = timeline.At(arrow.from);
    const Event& to = timeline.At(arrow.to);
    if (!is_of_job(from)) continue;
    ++arrows;
    EXPECT_EQ(trace::KeyOf(from), trace::KeyOf(to));
    EXPECT_EQ(from.rank, to.rank);
    const Event& exchange = from.kind == Kind::kExchange ? from : to;
    const Event& at_aggregator = from.kind == Kind::kExchange ? to : from;
    EXPECT_LE(exchange.begin, at_aggregator.begin);
    EXPECT_LE(at_aggregator.end, exchange.end);
  }
  // 16 chunks, whose frames of each rank arrive once, or again after the restart.
  EXPECT_GE(arrows, 2 * 3 * 15 * 16);
}

}  // namespace
}  // namespace signpost::testing
