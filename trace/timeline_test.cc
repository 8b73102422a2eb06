#include "trace/timeline.h"

#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::trace {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

// One rank and one aggregator, each on a host of its own whose steady clock is ahead of the true
// time by so much, and some rounds between them.
std::vector<Recording> Exchanges(int64_t rank_ahead, int64_t aggregator_ahead, int rounds) {
  Recording rank = {.process = "rank 0", .host = "a", .clock = "A"};
  Recording aggregator = {.process = "aggregator 0/1", .host = "b", .clock = "B"};
  // What the systems' clocks say is the true time, but for an error.
  rank.wall_offset = -rank_ahead;
  aggregator.wall_offset = -aggregator_ahead + 40 * kMillisecond;
  rank.labels = {"", "job"};
  aggregator.labels = {"", "one-bit", "job"};  // another order
  std::mt19937_64 random(1);
  const auto way = [&] { return 100'000 + static_cast<int64_t>(random() % kMillisecond); };
  for (int i = 0; i < rounds; ++i) {
    Event event = {.epoch = 9, .step = static_cast<uint64_t>(i), .chunk = 0, .rank = 0};
    const int64_t sent = 10 * i * kMillisecond;
    const int64_t arrived = sent + way(), answered = arrived + kMillisecond;
    const auto add = [&](Recording& to, Kind kind, int64_t begin, int64_t end, int64_t ahead,
                         uint16_t job) {
      event.kind = kind;
      event.begin = begin + ahead;
      event.end = end + ahead;
      event.job = job;
      to.events.push_back(event);
    };
    add(aggregator, Kind::kFrame, arrived, arrived, aggregator_ahead, 2);
    add(aggregator, Kind::kAnswer, answered, answered, aggregator_ahead, 2);
    add(aggregator, Kind::kRound, arrived, answered, aggregator_ahead, 2);
    add(rank, Kind::kExchange, sent, answered + way(), rank_ahead, 1);
  }
  return {aggregator, rank};
}

TEST(Join, PutsRanksFirstInTheirOrder) {
  std::vector<Recording> recordings;
  for (const char* process : {"aggregator 1/2", "rank 10", "rank 9", "aggregator 0/2", "node 1"}) {
    recordings.push_back({.process = process});
  }
  std::vector<std::string> names;
  for (const Process& process : Join(std::move(recordings)).processes) {
    names.push_back(process.name);
  }
  EXPECT_THAT(names, testing::ElementsAre("node 1", "rank 9", "rank 10", "aggregator 0/2",
                                          "aggregator 1/2"));
}

TEST(Join, FindsClocksThatAreHoursApart) {
  const int64_t rank_ahead = 5'000'000 * kMillisecond, aggregator_ahead = -700 * kMillisecond;
  const Timeline timeline = Join(Exchanges(rank_ahead, aggregator_ahead, 50));
  ASSERT_EQ(timeline.hosts.size(), 2);
  EXPECT_EQ(timeline.hosts[1].host, "b");
  ASSERT_TRUE(timeline.hosts[1].bound.has_value());
  EXPECT_LE(std::abs(timeline.hosts[1].offset - (aggregator_ahead - rank_ahead)),
            *timeline.hosts[1].bound);
  EXPECT_LE(*timeline.hosts[1].bound, 300'000);
  for (const Arrow& arrow : timeline.arrows) {
    const Event& to = timeline.At(arrow.to);
    EXPECT_LE(timeline.At(arrow.from).begin, to.kind == Kind::kFrame ? to.begin : to.end);
  }
}

TEST(Join, TakesTheSystemsClocksWhereNoAnswerTells) {
  std::vector<Recording> recordings = Exchanges(7 * kMillisecond, 0, 1);
  std::erase_if(recordings[0].events, [](const Event& e) { return e.kind == Kind::kAnswer; });
  const Timeline timeline = Join(std::move(recordings));
  EXPECT_FALSE(timeline.hosts[1].bound.has_value());
  EXPECT_EQ(timeline.hosts[1].offset, -7 * kMillisecond - 40 * kMillisecond);
}

TEST(Join, GivesEachFrameAndAnswerAnArrow) {
  const Timeline timeline = Join(Exchanges(0, 0, 20));
  EXPECT_EQ(timeline.arrows.size(), 40);
  for (const Arrow& arrow : timeline.arrows) {
    const Event& from = timeline.At(arrow.from);
    const Event& to = timeline.At(arrow.to);
    EXPECT_EQ(KeyOf(from), KeyOf(to));
    EXPECT_TRUE((from.kind == Kind::kExchange && to.kind == Kind::kFrame) ||
                (from.kind == Kind::kAnswer && to.kind == Kind::kExchange));
    EXPECT_EQ(timeline.Label(to.job), "job");
  }
}

TEST(Join, GivesAFrameThatWasSentTwiceToTheExchangeThatWasUnderWay) {
  std::vector<Recording> recordings = Exchanges(0, 0, 1);
  Event again = recordings[1].events[0];
  again.begin += 1000 * kMillisecond;
  again.end += 1000 * kMillisecond;
  recordings[1].events.push_back(again);
  const Timeline timeline = Join(std::move(recordings));
  ASSERT_EQ(timeline.arrows.size(), 2);
  EXPECT_EQ(timeline.arrows[0].from, (EventId{0, 0}));
}

// The worker gives up before the round closes, and says nothing of its clock by that.
TEST(Join, HasNoArrowFromAnAnswerToAnExchangeThatHadFailed) {
  std::vector<Recording> recordings = Exchanges(0, 0, 1);
  Event& exchange = recordings[1].events[0];
  exchange.end = recordings[0].events[1].begin - kMillisecond / 2;
  Event failed = exchange;
  failed.kind = Kind::kFailed;
  failed.begin = failed.end;
  recordings[1].events.push_back(failed);
  const Timeline timeline = Join(std::move(recordings));
  ASSERT_EQ(timeline.arrows.size(), 1);
  EXPECT_EQ(timeline.At(timeline.arrows[0].to).kind, Kind::kFrame);
  EXPECT_FALSE(timeline.hosts[1].bound.has_value());
}

// What had been sent before was overwritten.
TEST(Join, HasNoArrowThatGoesBackInTime) {
  std::vector<Recording> recordings = Exchanges(0, 0, 1);
  for (Recording& recording : recordings) recording.clock = "A";
  Event& later = recordings[1].events[0];
  later.begin += 1000 * kMillisecond;
  later.end += 1000 * kMillisecond;
  const Timeline timeline = Join(std::move(recordings));
  ASSERT_EQ(timeline.arrows.size(), 1);
  EXPECT_EQ(timeline.At(timeline.arrows[0].from).kind, Kind::kAnswer);
}

TEST(Join, HasNoArrowToAFrameOfWhichNoRoundIsKnown) {
  std::vector<Recording> recordings = Exchanges(0, 0, 1);
  std::erase_if(recordings[0].events, [](const Event& e) { return e.kind == Kind::kRound; });
  EXPECT_TRUE(Join(std::move(recordings)).arrows.empty());
}

TEST(Join, OfNothingIsEmpty) { EXPECT_TRUE(Join({}).processes.empty()); }

}  // namespace
}  // namespace signpost::trace
