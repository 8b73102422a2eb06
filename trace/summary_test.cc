#include "trace/summary.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::trace {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
// Labels of what is Written.
constexpr uint16_t kFp32 = 3, kOneBit = 4, kSkip = 5, kRestore = 6;

// Events of one process, in whole milliseconds.
class Written {
 public:
  explicit Written(std::string process) {
    recording_.process = std::move(process);
    recording_.labels = {"", "job", "job/once", "fp32", "one-bit", "skip", "restore"};
  }

  Written& Add(Kind kind, int64_t begin, int64_t end, uint64_t step, uint32_t chunk = kNone,
               uint32_t rank = 0) {
    recording_.events.push_back({.kind = kind,
                                 .begin = begin * kMillisecond,
                                 .end = end * kMillisecond,
                                 .epoch = chunk == kNone ? 0 : epoch_,
                                 .step = step,
                                 .chunk = chunk,
                                 .rank = rank,
                                 .job = 1});
    return *this;
  }

  // What follows.
  Written& OfEpoch(uint64_t epoch) {
    epoch_ = epoch;
    return *this;
  }

  // The event before, of the job "job/once".
  Written& OfJobOnce() {
    recording_.events.back().job = 2;
    return *this;
  }

  // The event before.
  Written& OfBytes(uint64_t bytes, uint16_t codec = 0) {
    recording_.events.back().bytes = bytes;
    recording_.events.back().codec = codec;
    return *this;
  }

  Written& On(std::string host) {
    recording_.clock = recording_.host = std::move(host);
    return *this;
  }

  Written& Drop(uint64_t events) {
    recording_.dropped = events;
    return *this;
  }

  Written& RefuseLabels(uint64_t labels) {
    recording_.refused_labels = labels;
    return *this;
  }

  operator Recording() const { return recording_; }  // NOLINT: it is one, written down

 private:
  Recording recording_;
  uint64_t epoch_ = 0;
};

// 10 ms of model, then 1 of anything, 4 of compression, 2 blocked by rank 1, 3 on the wire, 5 that
// apply and 1 in the end.
Written ARank() {
  Written rank("rank 0");
  rank.Add(Kind::kJoin, 0, 100, 0);
  for (uint64_t step = 0; step < 2; ++step) {
    const int64_t t = 110 + 26 * step;
    rank.Add(Kind::kCompress, t + 1, t + 5, step, 0)
        .Add(Kind::kWait, t + 5, t + 7, step, 0)
        .Add(Kind::kExchange, t + 5, t + 10, step, 0)
        .Add(Kind::kWire, t + 7, t + 10, step, 0)
        .Add(Kind::kApply, t + 10, t + 15, step, 0)
        .Add(Kind::kEndStep, t + 15, t + 16, step)
        .Add(Kind::kStep, t, t + 16, step);
  }
  return rank;
}

Written AnAggregator() {
  Written aggregator("aggregator 0/1");
  for (uint64_t step = 0; step < 2; ++step) {
    const int64_t t = 110 + 26 * step;
    aggregator.Add(Kind::kGather, t + 5, t + 8, step, 0, /*rank=*/1)
        .Add(Kind::kHold, t + 8, t + 8, step, 0, 1)
        .Add(Kind::kAverage, t + 8, t + 9, step, 0, 1)
        .Add(Kind::kRound, t + 5, t + 9, step, 0, 1);
  }
  return aggregator;
}

TEST(Summary, SaysWhereAStepHasGone) {
  const Summary summary = Summarise(Join({ARank(), AnAggregator()}));
  ASSERT_EQ(summary.workers.size(), 1);
  EXPECT_THAT(summary.workers[0].steps, testing::ElementsAre(0, 1));
  for (const StepTime& time : summary.workers[0].times) {
    EXPECT_EQ(time.total, absl::Milliseconds(26));
    EXPECT_EQ(time.outside, absl::Milliseconds(10));
    EXPECT_EQ(time.compress, absl::Milliseconds(4));
    EXPECT_EQ(time.wait, absl::Milliseconds(2));
    EXPECT_EQ(time.wire, absl::Milliseconds(3));
    EXPECT_EQ(time.apply, absl::Milliseconds(6));
    EXPECT_EQ(time.rest, absl::Milliseconds(1));
  }
}

TEST(Summary, CountsWhatLiesBetweenTheCallsOfAStepAsOutside) {
  Written rank("rank 0");
  rank.Add(Kind::kCall, 0, 1, 0)
      .Add(Kind::kCompress, 10, 12, 0, 0)
      .Add(Kind::kCall, 10, 13, 0)
      .Add(Kind::kWire, 21, 25, 0, 0)
      .Add(Kind::kCall, 20, 27, 0)
      .Add(Kind::kStep, 0, 27, 0);
  const Summary summary = Summarise(Join({rank}));
  ASSERT_EQ(summary.workers.size(), 1);
  const StepTime& time = summary.workers[0].sum;
  EXPECT_EQ(time.total, absl::Milliseconds(27));
  EXPECT_EQ(time.outside, absl::Milliseconds(16));
  EXPECT_EQ(time.compress, absl::Milliseconds(2));
  EXPECT_EQ(time.wire, absl::Milliseconds(4));
  EXPECT_EQ(time.rest, absl::Milliseconds(5));
}

// What another job does between the calls of a step is Signpost's, and what it does within one is
// that call's already.
TEST(Summary, CountsCheckpointsJoinsAndOtherJobsApart) {
  Written rank("rank 0");
  rank.Add(Kind::kStep, 0, 10, 0)
      .Add(Kind::kCheckpoint, 11, 14, 1)
      .Add(Kind::kJoin, 15, 20, 0)
      .OfJobOnce()
      .Add(Kind::kStep, 18, 23, 0)
      .OfJobOnce()
      .Add(Kind::kCall, 30, 32, 1)
      .Add(Kind::kStep, 31, 34, 1)
      .OfJobOnce()
      .Add(Kind::kCall, 40, 45, 1)
      .Add(Kind::kStep, 30, 45, 1)
      .Add(Kind::kStep, 40, 50, 0, kNone, /*rank=*/1);
  const Summary summary = Summarise(Join({rank}));
  ASSERT_EQ(summary.workers.size(), 3);
  EXPECT_EQ(summary.workers[0].job, "job");
  ASSERT_THAT(summary.workers[0].steps, testing::ElementsAre(0, 1));
  const StepTime& time = summary.workers[0].times[1];
  EXPECT_EQ(time.total, absl::Milliseconds(35));
  EXPECT_EQ(time.other, absl::Milliseconds(3 + 8 + 2));
  EXPECT_EQ(time.rest, absl::Milliseconds(7));
  EXPECT_EQ(time.outside, absl::Milliseconds(15));
}

TEST(Summary, NamesTheRankThatIsWaitedFor) {
  const Summary summary = Summarise(Join({ARank(), AnAggregator()}));
  ASSERT_EQ(summary.delays.size(), 1);
  EXPECT_EQ(summary.delays[0].rank, 1);
  EXPECT_EQ(summary.delays[0].last, 2);
  EXPECT_EQ(summary.delays[0].gathered, absl::Milliseconds(6));
  EXPECT_EQ(summary.delays[0].waited, absl::Milliseconds(4));
}

// Rank 0 comes at 0, rank 2 at 145, and rank 1 last, at 160.
TEST(Summary, SharesAWaitBetweenTheRanksThatAreMissing) {
  Written rank("rank 0");
  rank.Add(Kind::kWait, 5, 160, 0, 0);
  Written aggregator("aggregator 0/1");
  aggregator.Add(Kind::kFrame, 0, 0, 0, 0, 0)
      .Add(Kind::kFrame, 145, 145, 0, 0, 2)
      .Add(Kind::kFrame, 160, 160, 0, 0, 1)
      .Add(Kind::kGather, 0, 160, 0, 0, /*rank=*/1);
  const Summary summary = Summarise(Join({rank, aggregator}));
  ASSERT_EQ(summary.delays.size(), 2);
  EXPECT_EQ(summary.delays[0].rank, 1);
  EXPECT_EQ(summary.delays[0].last, 1);
  EXPECT_EQ(summary.delays[0].gathered, absl::Milliseconds(72.5 + 15));
  EXPECT_NEAR(absl::ToDoubleMilliseconds(summary.delays[0].waited), 70 + 15, 1e-3);
  EXPECT_EQ(summary.delays[1].rank, 2);
  EXPECT_EQ(summary.delays[1].last, 0);
  EXPECT_EQ(summary.delays[1].gathered, absl::Milliseconds(72.5));
  EXPECT_NEAR(absl::ToDoubleMilliseconds(summary.delays[1].waited), 70, 1e-3);
}

// Rank 2 itself waits, for rank 1 alone; the round closes without that.
TEST(Summary, SharesNoWaitWithTheRankThatWaits) {
  Written rank("rank 2");
  rank.Add(Kind::kWait, 140, 160, 0, 0, 2);
  Written aggregator("aggregator 0/1");
  aggregator.Add(Kind::kFrame, 0, 0, 0, 0, 0)
      .Add(Kind::kFrame, 145, 145, 0, 0, 2)
      .Add(Kind::kGather, 0, 160, 0, 0, /*rank=*/1);
  const Summary summary = Summarise(Join({rank, aggregator}));
  ASSERT_EQ(summary.delays.size(), 2);
  EXPECT_EQ(summary.delays[0].rank, 1);
  EXPECT_EQ(summary.delays[0].waited, absl::Milliseconds(20));
  EXPECT_EQ(summary.delays[1].waited, absl::ZeroDuration());
}

// Rank 0 comes at 0, rank 1 at 10, and the round closes at 200 without ranks 2 and 3.
TEST(Summary, SharesAWaitBetweenAllThatARoundClosesWithout) {
  Written rank("rank 0");
  rank.Add(Kind::kWait, 0, 200, 0, 0).Add(Kind::kExchange, 0, 200, 0, 0);
  Written aggregator("aggregator 0/1");
  aggregator.Add(Kind::kFrame, 0, 0, 0, 0, 0)
      .Add(Kind::kFrame, 10, 10, 0, 0, 1)
      .Add(Kind::kMissing, 199, 199, 0, 0, 2)
      .Add(Kind::kMissing, 200, 200, 0, 0, 3)
      .Add(Kind::kGather, 0, 200, 0, 0, /*rank=*/3);
  const std::string text = Format(Summarise(Join({rank, aggregator})), /*with_steps=*/false);
  EXPECT_THAT(text, testing::HasSubstr(R"(
rank 2      job          1    98.333          98.333  49%
rank 3      job          1    98.333          98.333  49%
rank 1      job          0     3.333           3.333   2%
)"));
}

// Rank 1 comes at 10, is started again, and comes anew at 100; rank 2 comes last.
TEST(Summary, CountsARankOnceThatSendsItsFrameAnew) {
  Written aggregator("aggregator 0/1");
  aggregator.Add(Kind::kFrame, 0, 0, 0, 0, 0)
      .Add(Kind::kFrame, 10, 10, 0, 0, 1)
      .Add(Kind::kFrame, 100, 100, 0, 0, 1)
      .Add(Kind::kFrame, 160, 160, 0, 0, 2)
      .Add(Kind::kGather, 0, 160, 0, 0, /*rank=*/2);
  const Summary summary = Summarise(Join({aggregator}));
  ASSERT_EQ(summary.delays.size(), 2);
  EXPECT_EQ(summary.delays[0].rank, 2);
  EXPECT_EQ(summary.delays[0].gathered, absl::Milliseconds(50 + 60));
  EXPECT_EQ(summary.delays[1].rank, 1);
  EXPECT_EQ(summary.delays[1].gathered, absl::Milliseconds(50));
}

// Its processes have ranks too, which are others.
TEST(Summary, CallsANodeThatIsWaitedForANode) {
  Written node("node 1");
  node.Add(Kind::kExchange, 115, 120, 0, 0, /*rank=*/1);
  const Summary summary = Summarise(Join({ARank(), node, AnAggregator()}));
  ASSERT_EQ(summary.delays.size(), 1);
  EXPECT_TRUE(summary.delays[0].is_node);
  EXPECT_THAT(Format(summary, /*with_steps=*/false), testing::HasSubstr("\nnode 1      job "));
}

TEST(Summary, LeavesOutStepsOfWhichSomethingWasOverwritten) {
  // The first step began before the end of the oldest event that is there.
  Written rank("rank 0");
  rank.Add(Kind::kApply, 10, 15, 0, 0)
      .Add(Kind::kStep, 0, 16, 0)
      .Add(Kind::kApply, 21, 25, 1, 0)
      .Add(Kind::kStep, 20, 26, 1)
      .Drop(7);
  const Summary summary = Summarise(Join({rank}));
  ASSERT_EQ(summary.workers.size(), 1);
  EXPECT_THAT(summary.workers[0].steps, testing::ElementsAre(1));
  EXPECT_EQ(summary.dropped, 7);
}

TEST(Summary, KeepsJobsAndRanksOfAProcessApart) {
  Written process("rank 0");
  process.Add(Kind::kStep, 0, 5, 0, kNone, 0).Add(Kind::kStep, 3, 9, 0, kNone, 1);
  EXPECT_EQ(Summarise(Join({process})).workers.size(), 2);
}

TEST(Summary, ReadsLikeThis) {
  EXPECT_EQ(Format(Summarise(Join({ARank().Drop(0), AnAggregator()})), /*with_steps=*/true),
            R"(Milliseconds; of steps, rounds and exchanges, the mean of one.

process           a step  outside  other  compress  apply   wire   wait   rest
rank 0   2 steps  26.000   10.000  0.000     4.000  6.000  3.000  2.000  1.000
         job        100%      38%     0%       15%    23%    12%     8%     4%
         step 0   26.000   10.000  0.000     4.000  6.000  3.000  2.000  1.000
         step 1   26.000   10.000  0.000     4.000  6.000  3.000  2.000  1.000

waited for  job  came last  gathered  others blocked
rank 1      job          2     6.000           4.000  100%

slowest                  job  rounds  exchange  gather   hold  average
chunk 0, aggregator 0/1  job       2     5.000   3.000  0.000    1.000
)");
}

// A dense step, a one-bit one that rank 1 skips, a local one, and one whose round is the third.
TEST(Summary, TellsStepsByWhatWasSent) {
  Written rank("rank 0");
  rank.Add(Kind::kCompress, 9, 10, 0, 0)
      .Add(Kind::kExchange, 10, 50, 0, 0)
      .OfBytes(3200, kFp32)
      .Add(Kind::kStep, 0, 60, 0)
      .Add(Kind::kCompress, 60, 61, 1, 0)
      .Add(Kind::kExchange, 61, 66, 1, 0)
      .OfBytes(100, kOneBit)
      .Add(Kind::kStep, 60, 70, 1)
      .Add(Kind::kLocalStep, 70, 71, 2)
      .Add(Kind::kStep, 70, 72, 2)
      .Add(Kind::kCompress, 72, 73, 2, 0)
      .Add(Kind::kExchange, 73, 78, 2, 0)
      .OfBytes(100, kOneBit)
      .Add(Kind::kStep, 72, 80, 3);
  Written other("rank 1");
  other.Add(Kind::kExchange, 61, 66, 1, 0, 1).OfBytes(4, kSkip);
  const std::string text =
      Format(Summarise(Join({rank, other, AnAggregator()})), /*with_steps=*/true);
  EXPECT_THAT(text, testing::HasSubstr(R"(
rank 0   1 step           60.000    0.000  0.000     1.000  0.000  0.000  0.000  59.000
         job, fp32          100%       0%     0%        2%     0%     0%     0%     98%
         step 0           60.000    0.000  0.000     1.000  0.000  0.000  0.000  59.000
rank 0   1 step            2.000    0.000  0.000     0.000  1.000  0.000  0.000   1.000
         job, local         100%       0%     0%        0%    50%     0%     0%     50%
         step 2            2.000    0.000  0.000     0.000  1.000  0.000  0.000   1.000
rank 0   2 steps           9.000    0.000  0.000     1.000  0.000  0.000  0.000   8.000
         job, one-bit       100%       0%     0%       11%     0%     0%     0%     89%
         step 1           10.000    0.000  0.000     1.000  0.000  0.000  0.000   9.000
         step 3, round 2   8.000    0.000  0.000     1.000  0.000  0.000  0.000   7.000
)"));
  EXPECT_THAT(text, testing::HasSubstr(R"(
chunk 0, aggregator 0/1  job, fp32          1    40.000   3.000  0.000    1.000
chunk 0, aggregator 0/1  job, one-bit       1     5.000   3.000  0.000    1.000
job, fp32: 1 chunk, and 3200 bytes in a frame, in the mean.
job, one-bit: 1 chunk, and 68 bytes in a frame, in the mean.
)"));
}

// The worker of its node, which took a local step, has recorded nothing: step 3 had round 2.
TEST(Summary, TakesNoStepOfAProcessForThatOfARoundIfSomeHadNone) {
  Written process("rank 0"), aggregator("aggregator 0/1");
  for (uint64_t step = 0; step < 4; ++step) process.Add(Kind::kStep, step, step + 1, step);
  for (uint64_t round = 0; round < 3; ++round) {
    aggregator.Add(Kind::kFrame, round, round, round, 0).OfBytes(100, round == 2 ? kOneBit : kFp32);
  }
  const Summary summary = Summarise(Join({process, aggregator}));
  ASSERT_EQ(summary.workers.size(), 1);
  EXPECT_EQ(summary.workers[0].stage, "");
  EXPECT_EQ(summary.workers[0].steps.size(), 4);
}

// It goes on from a checkpoint of step 1, in the same directory of recordings.
TEST(Summary, TakesTheRoundThatAResumeBeginsWithForNoStep) {
  Written rank("rank 0");
  rank.Add(Kind::kCompress, 0, 1, 0, 0)
      .Add(Kind::kExchange, 1, 9, 0, 0)
      .OfBytes(100, kOneBit)
      .Add(Kind::kStep, 0, 10, 0);
  Written resumed("rank 0");
  resumed.OfEpoch(2)
      .Add(Kind::kExchange, 20, 30, 0, 0)
      .OfBytes(3200, kRestore)
      .Add(Kind::kCompress, 31, 32, 1, 0)
      .Add(Kind::kExchange, 32, 39, 1, 0)
      .OfBytes(100, kOneBit)
      .Add(Kind::kStep, 31, 40, 1);
  const std::string text = Format(Summarise(Join({rank, resumed})), /*with_steps=*/false);
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("restore")));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("one-bit")));
}

TEST(Summary, PutsFirstTheChunksWhoseExchangesTookLongestTogether) {
  Written rank("rank 0");
  for (uint64_t step = 0; step < 10; ++step) {
    rank.Add(Kind::kExchange, 10 * step, 10 * step + 5, step, 0);
  }
  rank.Add(Kind::kExchange, 200, 240, 0, 0).OfJobOnce();
  const Summary summary = Summarise(Join({rank}));
  ASSERT_EQ(summary.chunks.size(), 2);
  EXPECT_EQ(summary.chunks[0].job, "job");
  EXPECT_EQ(summary.chunks[0].exchange, absl::Milliseconds(5));
  EXPECT_EQ(summary.chunks[1].exchange, absl::Milliseconds(40));
}

std::string TextOfChunks(uint32_t chunks, uint64_t bytes) {
  Written rank("rank 0");
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    rank.Add(Kind::kExchange, 0, 5, 0, chunk).OfBytes(bytes - 100);
    rank.Add(Kind::kExchange, 10, 15, 1, chunk).OfBytes(bytes + 100);
  }
  return Format(Summarise(Join({rank})), /*with_steps=*/false);
}

TEST(Summary, SaysWhenChunksAreManyAndSmall) {
  EXPECT_THAT(
      TextOfChunks(490, 513),
      testing::HasSubstr("\njob: 490 chunks, and 513 bytes in a frame, in the mean. So many "
                         "and so small cost more"));
  EXPECT_THAT(TextOfChunks(490, 131072),
              testing::HasSubstr("131072 bytes in a frame, in the mean.\n"));
  EXPECT_THAT(TextOfChunks(1, 513),
              testing::HasSubstr("\njob: 1 chunk, and 513 bytes in a frame, in the mean.\n"));
}

TEST(Summary, SaysWhichConnectionsWereLost) {
  Written rank = ARank();
  rank.Add(Kind::kLost, 200, 240, 0, kNone, kNone)
      .Add(Kind::kRetry, 220, 220, 1, 0)
      .Add(Kind::kLost, 300, 310, 0, kNone, kNone);
  EXPECT_THAT(
      Format(Summarise(Join({rank, AnAggregator()})), /*with_steps=*/false),
      testing::HasSubstr("\nrank 0 has lost a connection 2 times, for 50.000 together; sent "
                         "again to aggregator 0/1: 1.\n"));
}

TEST(Summary, SaysWhatWasSentAgainWithoutALostConnection) {
  Written rank = ARank();
  rank.Add(Kind::kRetry, 220, 220, 1, 0);
  EXPECT_THAT(
      Format(Summarise(Join({rank, AnAggregator()})), /*with_steps=*/false),
      testing::HasSubstr("\nrank 0 has lost no connection; sent again to aggregator 0/1: 1.\n"));
}

// Two ranks and two aggregators; frames to aggregator 1 and answers from it take their time.
std::vector<Recording> AFarAggregator(const std::string& its_host) {
  std::vector<Recording> recordings;
  for (uint32_t chunk = 0; chunk < 2; ++chunk) {
    const int64_t in = chunk == 0 ? 1 : 20, back = chunk == 0 ? 2 : 30;
    Written aggregator(chunk == 0 ? "aggregator 0/2" : "aggregator 1/2");
    if (chunk == 1) aggregator.On(its_host);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      aggregator.Add(Kind::kFrame, 10 + in, 10 + in, 0, chunk, rank)
          .Add(Kind::kAnswer, 100 - back, 100 - back, 0, chunk, rank);
    }
    recordings.push_back(aggregator.Add(Kind::kRound, 11, 98, 0, chunk, 1));
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    Written written(rank == 0 ? "rank 0" : "rank 1");
    recordings.push_back(written.Add(Kind::kExchange, 10, 100, 0, 0, rank)
                             .Add(Kind::kExchange, 10, 100, 0, 1, rank));
  }
  return recordings;
}

TEST(Summary, TellsTheWayToAnAggregatorFromThatOfARank) {
  EXPECT_THAT(Format(Summarise(Join(AFarAggregator(""))), /*with_steps=*/false),
              testing::HasSubstr(R"(
on the way      job  frames  way in  way back
aggregator 1/2  job       2  20.000    30.000
aggregator 0/2  job       2   1.000     2.000
rank 0          job       2  10.500    16.000
rank 1          job       2  10.500    16.000
)"));
}

TEST(Summary, LeavesOutTheWayOfAFrameThatWasSentAgain) {
  std::vector<Recording> recordings = AFarAggregator("");
  Written again("rank 1");  // of chunk 0, as it was under way
  recordings.push_back(again.Add(Kind::kRetry, 50, 50, 0, 0, 1));
  recordings.push_back(again.Add(Kind::kRetry, 5, 5, 0, 1, 1));
  EXPECT_THAT(Format(Summarise(Join(recordings)), /*with_steps=*/false), testing::HasSubstr(R"(
aggregator 1/2  job       2  20.000    30.000
aggregator 0/2  job       1   1.000     2.000
rank 1          job       1  20.000    30.000
rank 0          job       2  10.500    16.000
)"));
}

// Rank 1's exchange of chunk 1 gave up at 60, before the answer at 70, and another had what was
// answered then.
TEST(Summary, LeavesOutTheWayOfAFrameWhoseExchangeFailed) {
  std::vector<Recording> recordings = AFarAggregator("");
  Recording& rank = recordings[3];
  Event& exchange = rank.events.at(1);
  ASSERT_EQ(exchange.chunk, 1);
  exchange.end = 60 * kMillisecond;
  Event again = exchange, failed = exchange;
  failed.kind = Kind::kFailed;
  failed.begin = failed.end;
  again.begin = 75 * kMillisecond;
  again.end = 80 * kMillisecond;
  rank.events.insert(rank.events.end(), {failed, again});
  EXPECT_THAT(Format(Summarise(Join(recordings)), /*with_steps=*/false), testing::HasSubstr(R"(
aggregator 1/2  job       1  20.000    30.000
aggregator 0/2  job       2   1.000     2.000
rank 0          job       2  10.500    16.000
rank 1          job       1   1.000     2.000
)"));
  rank.events.pop_back();  // there was no other
  EXPECT_THAT(Format(Summarise(Join(recordings)), /*with_steps=*/false),
              testing::HasSubstr("\naggregator 1/2  job       1  20.000    30.000\n"));
}

TEST(Summary, SaysHowWellTheClocksKnowAWay) {
  // The clocks know the sum alone, and take half of it for each.
  EXPECT_THAT(Format(Summarise(Join(AFarAggregator("far"))), /*with_steps=*/false),
              testing::AllOf(testing::HasSubstr("aggregator 1/2  job       2  25.000    25.000\n"),
                             testing::HasSubstr("clocks differ: give or take 25.000.\n")));
}

TEST(Summary, SaysThatClocksRunAtDifferentSpeeds) {
  Timeline timeline = Join(AFarAggregator("far"));
  timeline.hosts.at(1).is_contradictory = true;
  EXPECT_THAT(Format(Summarise(timeline), /*with_steps=*/false),
              testing::HasSubstr("give or take 25.000, or more, as they run at different speeds."));
}

TEST(Summary, SaysHowManyWaysNobodyKnows) {
  Timeline timeline = Join(AFarAggregator("far"));
  timeline.hosts.at(1).bound.reset();
  EXPECT_THAT(Format(Summarise(timeline), /*with_steps=*/false),
              testing::HasSubstr("Ways of 4 frames and answers are left out: nothing compares"));
}

TEST(Summary, ShowsNoTimesOfRoundsThatNobodyRecorded) {
  const std::string text = Format(Summarise(Join({ARank()})), /*with_steps=*/false);
  EXPECT_THAT(text, testing::EndsWith(R"(
slowest  job  rounds  exchange  gather  hold  average
chunk 0  job       -     5.000       -     -        -

No recording of an aggregator has rounds of 1 of 1 chunks: who was waited for in those is not known. `signpost aggregator --trace DIR` records them.
)"));
  EXPECT_THAT(Format(Summarise(Join({ARank(), AnAggregator()})), /*with_steps=*/false),
              testing::Not(testing::HasSubstr("No recording")));
}

TEST(Summary, ShowsNoTimesOfWorkersThatNobodyRecorded) {
  const std::string text = Format(Summarise(Join({AnAggregator()})), /*with_steps=*/false);
  EXPECT_THAT(text, testing::HasSubstr("  job          2     6.000               -  -\n"));
  EXPECT_THAT(text, testing::HasSubstr("  job       2         -   3.000  0.000    1.000\n"));
}

TEST(Summary, SaysThatRoundsMayHaveBeenOverwritten) {
  Written rank = ARank();
  rank.Add(Kind::kExchange, 200, 205, 2, /*chunk=*/1);
  const std::string text = Format(Summarise(Join({rank, AnAggregator().Drop(7)})), false);
  EXPECT_THAT(text, testing::HasSubstr("rounds of 1 of 2 chunks: who was waited for in those is "
                                       "not known. They were overwritten, or nobody recorded"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("--trace DIR")));
}

TEST(Summary, ShowsThatRecordedWorkersWereNeverBlocked) {
  Written rank("rank 1");
  rank.Add(Kind::kExchange, 115, 120, 0, 0, /*rank=*/1);
  EXPECT_THAT(Format(Summarise(Join({rank, AnAggregator()})), /*with_steps=*/false),
              testing::HasSubstr("  job          2     6.000           0.000  -\n"));
}

TEST(Summary, SaysThatNamesDidNotFit) {
  const Summary summary = Summarise(Join({ARank().RefuseLabels(7), AnAggregator()}));
  EXPECT_THAT(Format(summary, false), testing::HasSubstr("no room for a name 7 times"));
}

TEST(Summary, OfNothingSaysSo) {
  EXPECT_THAT(Format(Summarise(Join({})), false), testing::HasSubstr("process"));
}

}  // namespace
}  // namespace signpost::trace
