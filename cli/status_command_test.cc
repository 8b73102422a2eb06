#include "cli/status_command.h"

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
      "JOB  STEP  STEPS/s  JOINED  WAITING FOR  RECEIVED/s  SENT/s  LATE\n"
      "j    105   2.5      0/2     nobody       3.0 kB      250 B   3\n"
      "job j goes on without rank 1\n");
}

TEST(WatchTable, DoesNotGuessWhatItCannotTell) {
  const AggregatorStatus now = Job(105, 7000, 2500, 4);
  const AggregatorStatus gone = {"b:1", absl::UnavailableError("refused")};
  const auto unknown =
      HasSubstr("j    105   -        0/2     nobody       -           -       -\n");
  EXPECT_THAT(FormatWatchTable({}, {now}, absl::Seconds(1)), unknown);
  // Started again, so that its counters begin anew; or another one answers than before.
  EXPECT_THAT(FormatWatchTable({Job(104, 9000, 2000, 1)}, {now}, absl::Seconds(1)), unknown);
  EXPECT_THAT(
      FormatWatchTable({Job(104, 6000, 2000, 1), gone}, {now, Answer("b:1", "")}, absl::Seconds(1)),
      unknown);
}

TEST(StatusJson, HasEachAnswerAsItIs) {
  EXPECT_THAT(FormatStatusJson({Answer("a:1", R"pb(shard_count: 2
                                                   jobs { job: "j" step: 7 })pb")}),
              testing::AllOf(HasSubstr(R"({"aggregators": [)"),
                             HasSubstr(R"({"address": "a:1", "status": {)"),
                             HasSubstr(R"("shard":0)"), HasSubstr(R"("step":"7")")));
}

TEST(StatusJson, QuotesErrors) {
  EXPECT_THAT(FormatStatusJson({AggregatorStatus{"b:2", absl::UnavailableError("say \"no\"\n\\")}}),
              HasSubstr(R"({"address": "b:2", "error": "say \"no\"\u000a\\"})"));
}

}  // namespace
}  // namespace signpost::cli
