#include "server/metrics.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "log/log.h"
#include "nlohmann/json.hpp"
#include "server/aggregator.h"
#include "server/state_dir.h"
#include "server/test_job.h"

namespace signpost {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

// A microsecond: seconds are summed in doubles.
constexpr double kTolerance = 1e-6;

// An aggregator whose time only the test advances, and a job of some ranks that all have joined.
class MetricsTest : public testing::Test {
 protected:
  MetricsTest() : aggregator_({.now = [this] { return now_; }}) {}

  void Join(uint32_t world_size, uint32_t min_workers = 0) {
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      JoinRequest request = TestJoin(rank, world_size);
      if (min_workers != 0) {
        request.mutable_options()->set_min_workers(min_workers);
        request.mutable_options()->set_round_deadline_us(1'000'000);
      }
      aggregator_.Join(request, [this](absl::StatusOr<JoinResponse> response) {
        ASSERT_TRUE(response.ok()) << response.status();
        epoch_ = response->epoch();
      });
    }
  }

  void Send(const FrameKey& key, Codec codec, float error_scale = 1) {
    Frame frame = Addressed(TestFrame(layout_, key, codec), "job", epoch_);
    frame.header.set_error_scale(error_scale);
    aggregator_.Exchange(std::move(frame), [](absl::StatusOr<Aggregator::Reply> reply) {
      // When a frame is sent again the call before ends.
      EXPECT_TRUE(reply.ok() || absl::IsAborted(reply.status())) << reply.status();
    });
  }

  JobMetrics Metrics() { return aggregator_.Metrics().jobs.at(0); }

  // The aggregator's errors of all chunks before the round of that step.
  double ErrorSquared(uint64_t step) {
    double sum = 0;
    for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
      ReadErrorRequest request;
      request.set_job("job");
      request.set_epoch(epoch_);
      request.set_incarnation(1000);
      request.set_chunk(chunk);
      request.set_step(step);
      const absl::StatusOr<ReadErrorResponse> response = aggregator_.ReadError(request);
      EXPECT_TRUE(response.ok()) << response.status();
      for (size_t at = 0; at < response->payload().size(); at += sizeof(float)) {
        float error = 0;
        std::memcpy(&error, response->payload().data() + at, sizeof error);
        sum += static_cast<double>(error) * error;
      }
    }
    return sum;
  }

  absl::Time now_ = absl::FromUnixSeconds(1700000000);
  const Layout layout_ = LayoutOf(TestJoin(0, 1));
  uint64_t epoch_ = 0;
  Aggregator aggregator_;
};

TEST(DurationHistogram, CountsEachDurationInAllBucketsThatReachIt) {
  DurationHistogram histogram;
  histogram.Add(absl::Milliseconds(1));  // a bucket's end belongs to it
  histogram.Add(absl::Milliseconds(2));
  histogram.Add(absl::Hours(1));
  histogram.Add(-absl::Seconds(1));
  std::vector<uint64_t> counts;
  for (size_t i = 0; i < DurationHistogram::kBounds.size(); ++i) {
    counts.push_back(histogram.count_up_to(i));
  }
  EXPECT_THAT(counts, ElementsAre(1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3));
  EXPECT_EQ(histogram.count(), 4);
  EXPECT_THAT(histogram.sum_seconds(), DoubleNear(3600.003, kTolerance));
}

TEST(DurationHistogram, MergesByAdding) {
  DurationHistogram a, b;
  a.Add(absl::Seconds(1));
  b.Add(absl::Seconds(1));
  b.Add(absl::Seconds(200));
  a.Merge(b);
  EXPECT_EQ(a.count(), 3);
  EXPECT_EQ(a.count_up_to(DurationHistogram::kBounds.size() - 1), 2);
  EXPECT_THAT(a.sum_seconds(), DoubleNear(202, kTolerance));
}

TEST(SnapshotMetrics, KeepTheLastSuccessThroughFailures) {
  SnapshotMetrics metrics;
  metrics.Add(absl::InternalError("disk"), absl::Seconds(1));
  EXPECT_FALSE(metrics.last);
  const absl::Time before = absl::Now();
  metrics.Add(absl::OkStatus(), absl::Seconds(2));
  metrics.Add(absl::InternalError("disk"), absl::Seconds(3));
  EXPECT_EQ(metrics.failures, 2);
  EXPECT_EQ(metrics.durations.count(), 1);
  ASSERT_TRUE(metrics.last);
  EXPECT_GE(*metrics.last, before);
}

TEST_F(MetricsTest, TheTimeOfARoundIsSharedAmongThoseItWaitedFor) {
  Join(/*world_size=*/3);
  Send({.rank = 1}, ONE_BIT);
  now_ += absl::Seconds(2);  // for ranks 0 and 2
  Send({.rank = 2}, ONE_BIT);
  now_ += absl::Seconds(3);    // for rank 0
  Send({.rank = 2}, ONE_BIT);  // again, which changes nothing
  now_ += absl::Seconds(4);
  Send({.rank = 0}, ONE_BIT);
  const RoundMetrics rounds = Metrics().rounds;
  EXPECT_THAT(rounds.straggler_seconds,
              ElementsAre(DoubleNear(8, kTolerance), 0, DoubleNear(1, kTolerance)));
  EXPECT_EQ(rounds.gathering.count(), 1);
  EXPECT_THAT(rounds.gathering.sum_seconds(), DoubleNear(9, kTolerance));
  EXPECT_EQ(rounds.holding.sum_seconds(), 0);
  EXPECT_EQ(rounds.averaging.count(), 1);
  EXPECT_GT(rounds.averaging.sum_seconds(), 0);
  EXPECT_EQ(rounds.rounds_full, 1);
}

TEST_F(MetricsTest, ARoundThatClosesWithoutARankIsPartialAndThatRankWasWaitedFor) {
  Join(/*world_size=*/2, /*min_workers=*/1);
  Send({.rank = 0}, ONE_BIT);
  now_ += absl::Seconds(5);
  aggregator_.CloseLateRounds();
  const JobMetrics job = Metrics();
  EXPECT_EQ(job.rounds.rounds_partial, 1);
  EXPECT_EQ(job.rounds.rounds_full, 0);
  EXPECT_THAT(job.rounds.straggler_seconds, ElementsAre(0, DoubleNear(5, kTolerance)));
  EXPECT_THAT(job.rounds.gathering.sum_seconds(), DoubleNear(5, kTolerance));
  EXPECT_THAT(job.status.absent_ranks(), ElementsAre(1));
}

TEST_F(MetricsTest, ARankThatStaysAbsentIsNotWaitedForAgain) {
  Join(/*world_size=*/3, /*min_workers=*/1);
  for (uint32_t rank : {0, 1}) Send({.rank = rank}, ONE_BIT);
  now_ += absl::Seconds(1);
  aggregator_.CloseLateRounds();
  Send({.rank = 0, .step = 1}, ONE_BIT);
  now_ += absl::Milliseconds(500);
  Send({.rank = 1, .step = 1}, ONE_BIT);
  aggregator_.CloseLateRounds();
  const RoundMetrics rounds = Metrics().rounds;
  EXPECT_EQ(rounds.rounds_partial, 2);
  EXPECT_THAT(rounds.straggler_seconds,
              ElementsAre(0, DoubleNear(0.5, kTolerance), DoubleNear(1, kTolerance)));
}

// One that is hardly in time is not waited for alone, wherever the sweep comes first.
TEST_F(MetricsTest, ARankThatBecomesLateWasWaitedForInEachChunk) {
  Join(/*world_size=*/3, /*min_workers=*/1);
  for (uint32_t chunk : {0, 1}) Send({.rank = 0, .chunk = chunk}, ONE_BIT);
  now_ += absl::Milliseconds(800);
  for (uint32_t chunk : {0, 1}) Send({.rank = 1, .chunk = chunk}, ONE_BIT);
  now_ += absl::Milliseconds(200);
  aggregator_.CloseLateRounds();
  const RoundMetrics rounds = Metrics().rounds;
  EXPECT_EQ(rounds.rounds_partial, 2);
  EXPECT_THAT(rounds.straggler_seconds,
              ElementsAre(0, DoubleNear(2 * 0.4, kTolerance), DoubleNear(2 * 0.6, kTolerance)));
}

TEST_F(MetricsTest, ARankThatBecomesLateIsNamedWithTheRoundInJson) {
  Join(/*world_size=*/2, /*min_workers=*/1);
  Send({.rank = 0, .chunk = 1}, ONE_BIT);
  now_ += absl::Seconds(5);
  ASSERT_TRUE(log::SetFormat("json").ok());
  testing::internal::CaptureStderr();
  aggregator_.CloseLateRounds();
  const nlohmann::json line = nlohmann::json::parse(testing::internal::GetCapturedStderr());
  ASSERT_TRUE(log::SetFormat("text").ok());
  EXPECT_EQ(line.at("worker"), 1);
  EXPECT_EQ(line.at("step"), 0);
  EXPECT_EQ(line.at("chunk"), 1);
}

TEST_F(MetricsTest, ARoundThatSomebodySkipsCountsAsSkippedOnly) {
  Join(/*world_size=*/2);
  Send({.rank = 0}, SKIP);
  Send({.rank = 1}, ONE_BIT);
  const RoundMetrics rounds = Metrics().rounds;
  EXPECT_EQ(rounds.rounds_skipped, 1);
  EXPECT_EQ(rounds.rounds_full, 0);
}

TEST_F(MetricsTest, RoundsThatMultiplyTheErrorAreCounted) {
  Join(/*world_size=*/2);
  const auto send = [this](uint64_t step, float error_scale) {
    for (uint32_t rank : {0, 1}) Send({.rank = rank, .step = step}, ONE_BIT, error_scale);
    return Metrics().rounds.errors_rescaled;
  };
  EXPECT_EQ(send(/*step=*/0, 1), 0);
  EXPECT_EQ(send(1, 0.1f), 1);
  EXPECT_EQ(send(2, 0), 1) << "a worker that says nothing of it";
  EXPECT_EQ(send(3, std::numeric_limits<float>::min()), 2) << "as good as dropped";
}

TEST_F(MetricsTest, CompressionIsHeldAgainstTheSameNumbersInFp32) {
  Join(/*world_size=*/2);
  for (uint32_t rank : {0, 1}) Send({.rank = rank}, ONE_BIT);
  for (uint32_t rank : {0, 1}) Send({.rank = rank, .step = 1}, FLOAT32);
  for (uint32_t rank : {0, 1}) Send({.rank = rank, .step = 2}, SKIP);
  const RoundMetrics rounds = Metrics().rounds;
  const uint64_t fp32 = layout_.PayloadBytes(FLOAT32, 0);
  EXPECT_EQ(rounds.float32_bytes_received, 4 * fp32);
  EXPECT_EQ(rounds.float32_bytes_sent, 4 * fp32);
  const uint64_t skip = SkipPayload(0).size();
  EXPECT_EQ(rounds.payload_bytes_received, 2 * (layout_.PayloadBytes(ONE_BIT, 0) + fp32 + skip));
}

TEST_F(MetricsTest, NormsAreThoseOfTheErrorsAndAnswers) {
  Join(/*world_size=*/1);
  double answer_squared = 0;
  for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
    // One rank: what it sends is the mean.
    Send({.rank = 0, .step = 0, .chunk = chunk}, FLOAT32);
    EXPECT_FALSE(Metrics().norms.answer_squared);
  }
  EXPECT_EQ(Metrics().norms.error_squared, 0);
  for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
    Frame frame = TestFrame(layout_, {.rank = 0, .step = 1, .chunk = chunk}, ONE_BIT);
    aggregator_.Exchange(
        Addressed(std::move(frame), "job", epoch_), [&](absl::StatusOr<Aggregator::Reply> reply) {
          ASSERT_TRUE(reply.ok()) << reply.status();
          // Blocks of 8; the scales come first.
          const Chunk& there = layout_.chunks()[chunk];
          const auto* scales = reinterpret_cast<const float*>(reply->answer->payload.data());
          for (const Segment& segment : there.segments) {
            for (uint32_t i = 0; i < segment.elements; ++i) {
              const double scale = *(scales + segment.first_block + i / 8);
              answer_squared += scale * scale;
            }
          }
        });
  }
  const NormMetrics norms = Metrics().norms;
  const double error_squared = ErrorSquared(/*step=*/2);
  EXPECT_GT(error_squared, 0);
  // Both sums are in doubles, in different orders.
  EXPECT_NEAR(norms.error_squared / error_squared, 1, 1e-12);
  ASSERT_TRUE(norms.answer_squared);
  EXPECT_NEAR(*norms.answer_squared / answer_squared, 1, 1e-12);
}

TEST_F(MetricsTest, StatusHasWhatThePageHas) {
  Join(/*world_size=*/1);
  const auto status = [this] { return aggregator_.Status({}).jobs(0); };
  EXPECT_EQ(status().error_norm(), 0);
  EXPECT_FALSE(status().has_answer_norm()) << "there is no answer yet";
  for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
    Send({.rank = 0, .chunk = chunk}, ONE_BIT);
  }
  const JobMetrics metrics = Metrics();
  for (const JobStatus& job : {status(), metrics.status}) {
    EXPECT_EQ(job.payload_bytes_received(), metrics.rounds.payload_bytes_received);
    EXPECT_EQ(job.payload_bytes_sent(), metrics.rounds.payload_bytes_sent);
    EXPECT_EQ(job.uncompressed_bytes_received(), metrics.rounds.float32_bytes_received);
    EXPECT_EQ(job.uncompressed_bytes_sent(), metrics.rounds.float32_bytes_sent);
    EXPECT_GT(job.uncompressed_bytes_received(), job.payload_bytes_received());
    EXPECT_EQ(job.error_norm(), std::sqrt(metrics.norms.error_squared));
    EXPECT_EQ(job.answer_norm(), std::sqrt(*metrics.norms.answer_squared));
    EXPECT_GT(job.error_norm(), 0);
  }
}

TEST_F(MetricsTest, RetainedBytesAreThoseOfOpenRoundsAnswersAndErrors) {
  Join(/*world_size=*/2);
  const uint64_t onebit = layout_.PayloadBytes(ONE_BIT, 0);
  Send({.rank = 0}, ONE_BIT);
  EXPECT_EQ(Metrics().retained.open_frames, onebit);
  EXPECT_EQ(Metrics().retained.answers, 0);
  Send({.rank = 1}, ONE_BIT);
  const RetainedBytes retained = Metrics().retained;
  EXPECT_EQ(retained.open_frames, 0);
  EXPECT_EQ(retained.answers, onebit);
  EXPECT_EQ(retained.error, 4 * layout_.chunks()[0].elements);
  EXPECT_EQ(retained.undurable, 0);
}

TEST_F(MetricsTest, SnapshotsAreCountedWhereTheyAreTaken) {
  Join(/*world_size=*/1);
  EXPECT_FALSE(Metrics().snapshots) << "there is no state directory";

  const std::string path = absl::StrCat(testing::TempDir(), "/metrics");
  std::filesystem::remove_all(path);
  const absl::StatusOr<std::unique_ptr<StateDir>> state_dir = StateDir::Open(path, {});
  ASSERT_TRUE(state_dir.ok()) << state_dir.status();
  Aggregator aggregator({.now = [this] { return now_; }}, state_dir->get());
  aggregator.Join(TestJoin(0, 1), [](absl::StatusOr<JoinResponse> response) {
    EXPECT_TRUE(response.ok()) << response.status();
  });
  EXPECT_FALSE(aggregator.Metrics().jobs.at(0).snapshots->last);
  ASSERT_TRUE(aggregator.TakeSnapshots().ok());
  const AggregatorMetrics metrics = aggregator.Metrics();
  EXPECT_EQ(metrics.generation, (*state_dir)->generation());
  EXPECT_EQ(metrics.jobs.at(0).snapshots->durations.count(), 1);
  EXPECT_EQ(metrics.jobs.at(0).snapshots->failures, 0);
  EXPECT_TRUE(metrics.jobs.at(0).snapshots->last);
}

TEST_F(MetricsTest, AJobThatIsOverIsNotAmongThem) {
  Join(/*world_size=*/1);
  EXPECT_EQ(aggregator_.Metrics().jobs.size(), 1);
  LeaveRequest request;
  request.set_job("job");
  request.set_epoch(epoch_);
  request.set_incarnation(1000);
  aggregator_.Leave(request, [](absl::Status status) { EXPECT_TRUE(status.ok()) << status; });
  EXPECT_TRUE(aggregator_.Metrics().jobs.empty());
}

}  // namespace
}  // namespace signpost
