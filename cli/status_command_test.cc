#include "cli/status_command.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

AggregatorStatus Answer(const std::string& address, const std::string& text) {
  StatusResponse response;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &response)) << text;
  return {address, response};
}

TEST(StatusTable, HasALineForEachJobWithAllItsShards) {
  EXPECT_EQ(FormatStatusTable({Answer("a:1", R"pb(
                                 shard: 0
                                 shard_count: 2
                                 jobs {
                                   job: "bert"
                                   world_size: 4
                                   joined_ranks: [ 0, 1, 2, 3 ]
                                   step: 1201
                                   payload_bytes_received: 1500000
                                   payload_bytes_sent: 999
                                 })pb"),
                               Answer("b:1", R"pb(
                                 shard: 1
                                 shard_count: 2
                                 jobs {
                                   job: "bert"
                                   world_size: 4
                                   joined_ranks: [ 0, 1, 2, 3 ]
                                   step: 1200
                                   waiting_for_ranks: [ 2 ]
                                   waiting_us: 1230000
                                   payload_bytes_received: 1500000
                                   payload_bytes_sent: 1
                                 })pb")}),
            "JOB   STEP  JOINED  WAITING FOR       RECEIVED  SENT    REFUSED\n"
            "bert  1200  4/4     rank 2 for 1.2 s  3.0 MB    1.0 kB  0\n");
}

TEST(StatusTable, NamesTheDiskThatAJobWaitsForTheLongest) {
  std::vector<AggregatorStatus> shards = {Answer("a:1", R"pb(jobs { job: "j" step: 7 })pb"),
                                          Answer("b:1", R"pb(jobs { job: "j" step: 7 })pb"),
                                          Answer("c:1", R"pb(jobs { job: "j" step: 7 })pb")};
  const auto set_held = [&](size_t shard, absl::Duration held) {
    shards[shard].response->mutable_jobs(0)->set_held_us(absl::ToInt64Microseconds(held));
  };
  set_held(0, absl::Milliseconds(99));
  EXPECT_THAT(FormatStatusTable(shards), HasSubstr("  nobody  "));
  set_held(1, absl::Milliseconds(12300));
  set_held(2, absl::Seconds(5));
  EXPECT_THAT(FormatStatusTable(shards), HasSubstr("  the disk of b:1 for 12.3 s  "));
  EXPECT_THAT(FormatWatchTable(shards, shards, absl::Seconds(1)),
              HasSubstr("  the disk of b:1 for 12.3 s  "));
  // At a step that is further behind.
  shards[0].response->mutable_jobs(0)->set_step(6);
  shards[0].response->mutable_jobs(0)->add_waiting_for_ranks(2);
  shards[0].response->mutable_jobs(0)->set_waiting_us(1000000);
  EXPECT_THAT(FormatStatusTable(shards),
              HasSubstr("  rank 2 for 1.0 s, the disk of b:1 for 12.3 s  "));
}

TEST(StatusTable, TellsForHowLongNobodyIsThereAtAnyShard) {
  const char* const kNobody = "has no connection to anybody";
  std::vector<AggregatorStatus> shards = {Answer("a:1", R"pb(jobs { job: "j" step: 7 })pb"),
                                          Answer("b:1", R"pb(jobs { job: "j" step: 7 })pb")};
  shards[0].response->mutable_jobs(0)->set_silent_us(absl::ToInt64Microseconds(absl::Hours(9)));
  EXPECT_THAT(FormatStatusTable(shards), Not(HasSubstr(kNobody)));
  shards[1].response->mutable_jobs(0)->set_silent_us(7384500000);
  EXPECT_THAT(FormatStatusTable(shards),
              HasSubstr("\njob j has no connection to anybody, and nothing has come for 2h3m4s; "
                        "`signpost aggregator --forget-after` says when it is forgotten\n"));
  EXPECT_THAT(FormatWatchTable(shards, shards, absl::Seconds(1)), HasSubstr(kNobody));
}

// One of a job's two shards, as the status page would show it.
AggregatorStatus ShardWithFigures(uint32_t shard) {
  AggregatorStatus status = Answer("a:1", R"pb(jobs {
                                                 job: "j"
                                                 world_size: 2
                                                 payload_bytes_received: 100
                                                 uncompressed_bytes_received: 400
                                                 error_norm: 3
                                                 answer_norm: 0.05
                                               })pb");
  if (shard == 0) return status;
  JobStatus& job = *status.response->mutable_jobs(0);
  job.set_uncompressed_bytes_received(2400);
  job.set_error_norm(4);
  job.set_answer_norm(0.12);
  return status;
}

TEST(StatusTable, HasCompressionAndNormsOverAllShards) {
  EXPECT_EQ(FormatStatusTable({ShardWithFigures(0), ShardWithFigures(1)}),
            "JOB  STEP  JOINED  WAITING FOR  RECEIVED  SENT  COMPRESSION  ERROR NORM  "
            "MOMENTUM NORM  REFUSED\n"
            "j    0     0/2     nobody       200 B     0 B   14x          5           "
            "0.13           0\n");
}

TEST(StatusTable, LeavesOutWhatIsKnownOfNoJob) {
  AggregatorStatus dense = ShardWithFigures(1);
  dense.response->mutable_jobs(0)->clear_answer_norm();
  const std::string without_momentum = FormatStatusTable({ShardWithFigures(0), dense});
  EXPECT_THAT(without_momentum, HasSubstr("COMPRESSION  ERROR NORM  REFUSED\n"));
  // An older aggregator among them.
  const std::string without_any =
      FormatStatusTable({ShardWithFigures(0), Answer("b:1", R"pb(jobs { job: "j" })pb")});
  EXPECT_THAT(without_any, HasSubstr("SENT  REFUSED\n"));
  // What is known of another job has its column.
  AggregatorStatus two_jobs = dense;
  *two_jobs.response->add_jobs() = ShardWithFigures(1).response->jobs(0);
  two_jobs.response->mutable_jobs(1)->set_job("k");
  EXPECT_THAT(FormatStatusTable({two_jobs}),
              testing::AllOf(HasSubstr("24x          4           -              0\n"),
                             HasSubstr("24x          4           0.12           0\n")));
}

TEST(StatusTable, SaysWhoIsNotWaitedForAndWhyAJobIsNotDurable) {
  const std::string table = FormatStatusTable({Answer("a:1", R"pb(jobs {
                                                                    job: "j"
                                                                    world_size: 4
                                                                    absent_ranks: [ 3 ]
                                                                  })pb"),
                                               Answer("b:1", R"pb(jobs {
                                                                    job: "j"
                                                                    world_size: 4
                                                                    absent_ranks: [ 1, 3 ]
                                                                    state_error: "disk full"
                                                                  })pb")});
  EXPECT_THAT(table, HasSubstr("\njob j goes on without ranks 1, 3\n"));
  EXPECT_THAT(table, HasSubstr("\njob j cannot be written down: disk full\n"));
}

TEST(StatusTable, RepeatsWhatAnAggregatorWarnedOf) {
  EXPECT_EQ(FormatStatusTable({Answer("a:1", "warnings: 'a job is given up'")}),
            "aggregator a:1 warned when it was started: a job is given up\n");
}

TEST(StatusTable, CountsARankAsJoinedWhenItHasJoinedEverywhere) {
  EXPECT_THAT(FormatStatusTable({Answer("a:1", R"pb(jobs {
                                                      job: "j"
                                                      world_size: 3
                                                      joined_ranks: [ 0, 1 ]
                                                      waiting_for_ranks: [ 2 ]
                                                    })pb"),
                                 Answer("b:1", R"pb(jobs {
                                                      job: "j"
                                                      world_size: 3
                                                      joined_ranks: [ 0 ]
                                                      waiting_for_ranks: [ 1, 2 ]
                                                      waiting_us: 5
                                                    })pb")}),
              testing::AllOf(HasSubstr("1/3"), HasSubstr("ranks 1, 2 for 0.0 s")));
}

TEST(StatusTable, SaysWhoWasRefusedAndWhy) {
  EXPECT_THAT(FormatStatusTable({Answer("a:1", R"pb(
                jobs {
                  job: "j"
                  world_size: 2
                  refused_joins { rank: 1 reason: "tensor 3" }
                })pb")}),
              HasSubstr("job j refused rank 1: tensor 3\n"));
}

TEST(StatusTable, SaysWhichAggregatorDidNotAnswer) {
  const std::string table = FormatStatusTable(
      {Answer("a:1", ""), AggregatorStatus{"b:2", absl::UnavailableError("refused")}});
  EXPECT_EQ(table, "no answer from aggregator b:2: refused\n");
}

TEST(StatusTable, SaysSoWhenThereAreNoJobs) {
  EXPECT_EQ(FormatStatusTable({Answer("a:1", "")}), "no jobs\n");
}

TEST(StatusTable, PutsNoControlCharactersOnATerminal) {
  const std::string table =
      FormatStatusTable({Answer("a:1", R"pb(jobs {
                                              job: "\x1b[2Jj\n"
                                              refused_joins { rank: 1 reason: "\x1b]0;x\x07" }
                                            })pb")});
  EXPECT_THAT(table, HasSubstr("?[2Jj?"));
  EXPECT_THAT(table, Not(HasSubstr("\x1b")));
}

AggregatorStatus Job(uint64_t step, uint64_t received, uint64_t sent, uint64_t late) {
  AggregatorStatus status = Answer("a:1", R"pb(jobs { job: "j" world_size: 2 absent_ranks: 1 })pb");
  JobStatus& job = *status.response->mutable_jobs(0);
  job.set_step(step);
  job.set_payload_bytes_received(received);
  job.set_payload_bytes_sent(sent);
  job.set_rounds_closed_late(late);
  return status;
}

TEST(WatchTable, HasWhatWasDoneInEachSecondSinceTheLastLook) {
  EXPECT_EQ(
      FormatWatchTable({Job(100, 1000, 2000, 1)}, {Job(105, 7000, 2500, 4)}, absl::Seconds(2)),
      "JOB  STEP  STEPS/s  JOINED  WAITING FOR  RECEIVED/s  SENT/s  LATE  SKIPPED\n"
      "j    105   2.5      0/2     nobody       3.0 kB      250 B   3     0\n"
      "job j goes on without rank 1\n");
}

TEST(WatchTable, DoesNotGuessWhatItCannotTell) {
  const AggregatorStatus now = Job(105, 7000, 2500, 4);
  const AggregatorStatus gone = {"b:1", absl::UnavailableError("refused")};
  const auto unknown =
      HasSubstr("j    105   -        0/2     nobody       -           -       -     -\n");
  EXPECT_THAT(FormatWatchTable({}, {now}, absl::Seconds(1)), unknown);
  // Started again, so that its counters begin anew; or another one answers than before.
  EXPECT_THAT(FormatWatchTable({Job(104, 9000, 2000, 1)}, {now}, absl::Seconds(1)), unknown);
  EXPECT_THAT(
      FormatWatchTable({Job(104, 6000, 2000, 1), gone}, {now, Answer("b:1", "")}, absl::Seconds(1)),
      unknown);
}

TEST(WatchTable, HasTheCompressionOfWhatCameSinceTheLastLook) {
  AggregatorStatus before = Job(100, 1000, 2000, 1);
  before.response->mutable_jobs(0)->set_uncompressed_bytes_received(1000);
  AggregatorStatus now = Job(105, 2000, 2500, 1);
  JobStatus& job = *now.response->mutable_jobs(0);
  job.set_uncompressed_bytes_received(33000);
  job.set_error_norm(0.25);
  job.set_rounds_skipped(2);
  EXPECT_THAT(FormatWatchTable({before}, {now}, absl::Seconds(2)),
              HasSubstr("SENT/s  COMPRESSION  ERROR NORM  LATE  SKIPPED\n"
                        "j    105   2.5      0/2     nobody       500 B       250 B   32x          "
                        "0.25        0     2\n"));
  // Nothing came since, or it cannot be told: of all.
  const auto overall = HasSubstr("16.5x");
  EXPECT_THAT(FormatWatchTable({now}, {now}, absl::Seconds(2)), overall);
  EXPECT_THAT(FormatWatchTable({}, {now}, absl::Seconds(2)), overall);
}

TEST(StatusJson, HasEachAnswerAsItIs) {
  EXPECT_THAT(FormatStatusJson({Answer("a:1", R"pb(shard_count: 2
                                                   jobs { job: "j" step: 7 })pb")}),
              testing::AllOf(
                  HasSubstr(R"({"aggregators": [)"), HasSubstr(R"({"address": "a:1", "status": {)"),
                  HasSubstr(R"("shard":0)"), HasSubstr(R"("step":"7")"), Not(HasSubstr("norm"))));
  EXPECT_THAT(FormatStatusJson({ShardWithFigures(0)}),
              testing::AllOf(HasSubstr(R"("uncompressed_bytes_received":"400")"),
                             HasSubstr(R"("error_norm":3)"), HasSubstr(R"("answer_norm":0.05)")));
}

TEST(StatusJson, QuotesErrors) {
  EXPECT_THAT(FormatStatusJson({AggregatorStatus{"b:2", absl::UnavailableError("say \"no\"\n\\")}}),
              HasSubstr(R"({"address": "b:2", "error": "say \"no\"\u000a\\"})"));
}

}  // namespace
}  // namespace signpost::cli
