#include "server/exposition.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Observation OneJob(const std::string& name) {
  Observation observation;
  observation.time = absl::FromUnixSeconds(1000);
  observation.aggregator.shard = 1;
  observation.aggregator.shard_count = 2;
  observation.aggregator.jobs.emplace_back().status.set_job(name);
  return observation;
}

google::protobuf::Struct Parse(const std::string& json) {
  google::protobuf::Struct parsed;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &parsed);
  EXPECT_TRUE(status.ok()) << status.ToString() << "\n" << json;
  return parsed;
}

TEST(Prometheus, DescribesAMetricOnceAheadOfAllItsJobs) {
  Observation observation = OneJob("a");
  observation.aggregator.jobs[0].status.set_step(7);
  observation.aggregator.jobs.emplace_back().status.set_job("b");
  EXPECT_THAT(FormatPrometheus(observation),
              HasSubstr("# HELP signpost_job_step Step of the chunk that is furthest behind.\n"
                        "# TYPE signpost_job_step gauge\n"
                        "signpost_job_step{shard=\"1\",job_name=\"a\"} 7\n"
                        "signpost_job_step{shard=\"1\",job_name=\"b\"} 0\n"
                        "# HELP "));
}

TEST(Prometheus, SaysNothingOfMetricsWithoutSamples) {
  EXPECT_THAT(FormatPrometheus(OneJob("a")), Not(HasSubstr("signpost_snapshot")));
  EXPECT_THAT(FormatPrometheus(Observation()), Not(HasSubstr("signpost_job_step")));
}

TEST(Prometheus, EscapesWhatANameMayHave) {
  EXPECT_THAT(
      FormatPrometheus(OneJob("a\"b\\c\nd{e=\"f\"} 1")),
      HasSubstr(
          "\nsignpost_job_step{shard=\"1\",job_name=\"a\\\"b\\\\c\\nd{e=\\\"f\\\"} 1\"} 0\n"));
}

TEST(Prometheus, HasHistogramsWithAllTheirBuckets) {
  Observation observation = OneJob("a");
  DurationHistogram& gathering = observation.aggregator.jobs[0].rounds.gathering;
  gathering.Add(absl::Milliseconds(500));
  gathering.Add(absl::Seconds(1000));
  const std::string labels = "{shard=\"1\",job_name=\"a\",phase=\"gather\"";
  EXPECT_THAT(FormatPrometheus(observation),
              AllOf(HasSubstr("# TYPE signpost_round_seconds histogram\n"),
                    HasSubstr("\nsignpost_round_seconds_bucket" + labels + ",le=\"0.0001\"} 0\n"),
                    HasSubstr("\nsignpost_round_seconds_bucket" + labels + ",le=\"1\"} 1\n"),
                    HasSubstr("\nsignpost_round_seconds_bucket" + labels + ",le=\"+Inf\"} 2\n"),
                    HasSubstr("\nsignpost_round_seconds_sum" + labels + "} 1000.5\n"),
                    HasSubstr("\nsignpost_round_seconds_count" + labels + "} 2\n")));
}

TEST(Prometheus, HasSeriesOfTheWorstStragglersOnly) {
  Observation observation = OneJob("a");
  std::vector<double>& seconds = observation.aggregator.jobs[0].rounds.straggler_seconds;
  for (int rank = 0; rank < 1000; ++rank) seconds.push_back(rank);
  const std::string text = FormatPrometheus(observation);
  EXPECT_THAT(text, AllOf(HasSubstr("rank=\"999\"} 999\n"), HasSubstr("rank=\"936\"} 936\n"),
                          Not(HasSubstr("rank=\"935\"}"))));
}

TEST(Prometheus, CountsTheRanksThatAreGoneWithoutHavingLeft) {
  Observation observation = OneJob("a");
  JobStatus& status = observation.aggregator.jobs[0].status;
  for (const uint32_t rank : {0, 1, 2}) status.add_joined_ranks(rank);
  for (const uint32_t rank : {0, 2}) status.add_disconnected_ranks(rank);
  const std::string labels = "{shard=\"1\",job_name=\"a\"}";
  EXPECT_THAT(FormatPrometheus(observation),
              AllOf(HasSubstr("\nsignpost_job_joined_workers" + labels + " 3\n"),
                    HasSubstr("\nsignpost_job_disconnected_workers" + labels + " 2\n")));
}

TEST(Prometheus, SaysForHowLongTheDiskHasKeptAJob) {
  Observation observation = OneJob("a");
  JobMetrics& job = observation.aggregator.jobs[0];
  job.status.set_held_us(1'500'000);
  job.status.set_snapshot_us(12'250'000);
  job.snapshots.emplace();
  const std::string labels = "{shard=\"1\",job_name=\"a\"}";
  EXPECT_THAT(FormatPrometheus(observation),
              AllOf(HasSubstr("\nsignpost_job_held_seconds" + labels + " 1.5\n"),
                    HasSubstr("\nsignpost_snapshot_running_seconds" + labels + " 12.25\n")));
}

TEST(Prometheus, SaysHowConnectionsAreProtected) {
  Observation observation = OneJob("a");
  EXPECT_THAT(FormatPrometheus(observation),
              AllOf(HasSubstr("\nsignpost_insecure_plain_text{shard=\"1\"} 0\n"),
                    Not(HasSubstr("signpost_tls_certificate_expiry_timestamp_seconds{"))));
  observation.security = {.insecure = true,
                          .certificate_valid_until = absl::FromUnixSeconds(1700000000),
                          .denied_calls = 3,
                          .refused_connections = 4};
  EXPECT_THAT(
      FormatPrometheus(observation),
      AllOf(HasSubstr("\nsignpost_insecure_plain_text{shard=\"1\"} 1\n"),
            HasSubstr("\nsignpost_tls_certificate_expiry_timestamp_seconds{shard=\"1\"} 1.7e+09\n"),
            HasSubstr("\nsignpost_denied_calls_total{shard=\"1\"} 3\n"),
            HasSubstr("\nsignpost_refused_connections_total{shard=\"1\"} 4\n")));
}

TEST(StatusJson, IsJsonWhateverAJobIsCalled) {
  const std::string name = "</script>\"\\\n\x01 \xf0\x9f\x9a\xa6";
  const google::protobuf::Struct status = Parse(FormatStatusJson(OneJob(name)));
  const auto& job = status.fields().at("jobs").list_value().values(0).struct_value();
  EXPECT_EQ(job.fields().at("job").string_value(), name);
  EXPECT_EQ(status.fields().at("shard").number_value(), 1);
}

TEST(StatusJson, SaysWhomAJobWaitsForAndHowMuchItHasCompressed) {
  Observation observation = OneJob("a");
  JobMetrics& metrics = observation.aggregator.jobs[0];
  metrics.status.add_waiting_for_ranks(3);
  metrics.status.set_waiting_us(1'500'000);
  metrics.rounds.payload_bytes_sent = 1;
  metrics.rounds.float32_bytes_sent = 32;
  metrics.norms = {.error_squared = 4, .answer_squared = std::nullopt};
  metrics.status.set_held_us(2'500'000);
  metrics.status.set_snapshot_us(3'500'000);
  metrics.snapshots.emplace().last = absl::FromUnixSeconds(990);
  const auto parsed = Parse(FormatStatusJson(observation));
  const auto& job = parsed.fields().at("jobs").list_value().values(0).struct_value().fields();
  EXPECT_EQ(job.at("waiting_for").list_value().values(0).number_value(), 3);
  EXPECT_EQ(job.at("waiting_seconds").number_value(), 1.5);
  EXPECT_EQ(job.at("held_seconds").number_value(), 2.5);
  EXPECT_EQ(job.at("payload_bytes").struct_value().fields().at("sent").number_value(), 1);
  EXPECT_EQ(job.at("uncompressed_bytes").struct_value().fields().at("sent").number_value(), 32);
  EXPECT_EQ(job.at("error_norm").number_value(), 2);
  EXPECT_TRUE(job.at("answer_norm").has_null_value());
  const auto& snapshot = job.at("snapshot").struct_value().fields();
  EXPECT_EQ(snapshot.at("age_seconds").number_value(), 10);
  EXPECT_EQ(snapshot.at("running_seconds").number_value(), 3.5);
}

}  // namespace
}  // namespace signpost
