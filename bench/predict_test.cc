#include "bench/predict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace signpost::bench {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChunk = uint64_t{1} << 20;
constexpr TransportCosts kFree = {};

// A codec and a network in which a chunk is on a link for a second.
constexpr CodecCosts kOneByte = {.bytes = 1};
constexpr double kChunkPerSecond = 8. * kChunk;

double SecondsOf(const Cluster& cluster, uint64_t chunks, const CodecCosts& codec = kOneByte,
                 const TransportCosts& transport = kFree) {
  return PredictExchange(cluster, chunks * kChunk, codec, transport).exchange_s;
}

// Seconds of a chunk.
CodecCosts Kernels(double compress, double apply, double aggregate) {
  return {.bytes = 1,
          .compress_s = compress / kChunk,
          .apply_s = apply / kChunk,
          .aggregate_s = aggregate / kChunk};
}

// Nothing but bytes.
Costs FreeCosts() {
  return {.transport = kFree,
          .fp32 = {.bytes = 4},
          .bf16 = {.bytes = 2},
          .int8 = {.bytes = 1},
          .one_bit = {.bytes = 0.125}};
}

TEST(Predict, OneWorkersChunksFollowOneAnother) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 1, .shards = 1, .chunk_elements = kChunk};
  // The first is there after a second, and back after another.
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 1), 2);
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 10), 11);
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 10, kOneByte, {.latency_s = 0.5}), 11.5);
}

TEST(Predict, ALoneShardsLinkCarriesAllWorkersFrames) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 64, .shards = 1, .chunk_elements = kChunk};
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 10), (10 + 1) * 64);
}

TEST(Predict, AsManyShardsAsWorkersMakeTheirLinksCarryTheModelOnce) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 64, .shards = 64, .chunk_elements = kChunk};
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 10'000), (10'000 - 1) + 2 * 64);
}

TEST(Predict, ColocatedShardsMakeLinksCarryWhatARingDoes) {
  const Cluster cluster = {.link_bits_per_s = kChunkPerSecond,
                           .workers = 4,
                           .shards = 4,
                           .colocated = true,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  // 10,000 chunks, 3/4 of them to other hosts and as much for each of these three.
  EXPECT_NEAR(SecondsOf(cluster, 10'000), 2 * 0.75 * 10'000, 10);
  const Cluster alone = {.link_bits_per_s = kChunkPerSecond,
                         .workers = 1,
                         .shards = 1,
                         .colocated = true,
                         .chunk_elements = kChunk};
  EXPECT_EQ(SecondsOf(alone, 10'000), 0);
}

TEST(Predict, TheBusiestOfProcessorsAndLinksCounts) {
  const Cluster cluster = {.link_bits_per_s = kChunkPerSecond,
                           .workers = 1,
                           .shards = 1,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  // The round, and nine times the sum.
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 10, Kernels(0.1, 0.1, 7)), 9.2 + 9 * 7);
  // Ten times both, one of which waits for the round of the last chunk: the thread has applied all
  // the others meanwhile.
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 10, Kernels(3, 0.1, 0)), 10 * 3 + 2 * 0.1 + 2 + 0.1);
  // Sent and received at both ends in each direction.
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 10, kOneByte, {.cpu_s_per_frame = 5}), (2 + 4 * 5) + 9 * 5);
}

TEST(Predict, AWindowsChunksShareAWait) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 1, .shards = 1, .chunk_elements = kChunk};
  // 2 s on links and 30 s of latency; 8 are under way.
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 17, kOneByte, {.latency_s = 30}), 32 + 16 * 32 / 8.);
}

TEST(Predict, AHostsCoresShareItsWork) {
  const Cluster cluster = {.link_bits_per_s = kChunkPerSecond,
                           .workers = 1,
                           .shards = 1,
                           .colocated = true,
                           .cores_per_host = 2,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  // A worker's 2 s and 2 s, an aggregator's 3 s, and 1 s for each end of each frame.
  EXPECT_DOUBLE_EQ(SecondsOf(cluster, 100, Kernels(2, 2, 3), {.cpu_s_per_frame = 1}),
                   100 * 11 / 2.);
}

TEST(Predict, OverlapHidesTheShorterOfBackwardPassAndExchange) {
  const Cluster cluster = {.link_bits_per_s = kChunkPerSecond,
                           .workers = 1,
                           .shards = 1,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  Costs costs = FreeCosts();
  costs.one_bit.bytes = 1;  // 100 chunks take 101 s
  Training training = {.parameters = 100 * kChunk, .compute_s = 30, .backward_share = 0.5};
  StepTimes times = Predict(cluster, training, costs).one_bit;
  EXPECT_DOUBLE_EQ(times.step_s, 30 + 101);
  // The forward pass, and the part of the backward pass before the first chunk.
  EXPECT_DOUBLE_EQ(times.overlapped_s, 15 + 0.15 + 101);
  training.compute_s = 3000;
  times = Predict(cluster, training, costs).one_bit;
  // All but the last chunk is exchanged meanwhile.
  EXPECT_DOUBLE_EQ(times.overlapped_s, 3000 + 2);
  // Compressing is the backward pass' thread's; applying comes behind it, and takes longer than the
  // last chunk's 2 s on links.
  costs.one_bit.compress_s = 1. / kChunk;
  costs.one_bit.apply_s = 2. / kChunk;
  times = Predict(cluster, training, costs).one_bit;
  EXPECT_DOUBLE_EQ(times.overlapped_s, 3000 + 100 * 1 + 100 * 2);
}

TEST(Predict, ARingCarriesAlmostTwiceTheModel) {
  const Cluster cluster = {.link_bits_per_s = 1e9, .workers = 4, .shards = 4, .worker_threads = 1};
  Costs costs = FreeCosts();
  costs.fp32.apply_s = 1e-9;
  const Prediction prediction =
      Predict(cluster, {.parameters = 100'000'000, .compute_s = 3}, costs);
  // 2 * 3/4 * 32 bits.
  EXPECT_DOUBLE_EQ(prediction.ring.exchange_s, 4.8);
  EXPECT_DOUBLE_EQ(prediction.ring.step_s, 3 + 4.8 + 0.1);
  EXPECT_DOUBLE_EQ(prediction.ring.overlapped_s, 1 + 4.8 + 0.1);
  EXPECT_DOUBLE_EQ(prediction.ring16.exchange_s, 2.4);
  EXPECT_DOUBLE_EQ(prediction.ring16.overlapped_s, 1 + 2.4 + 0.1);
}

TEST(Predict, AWarmUpTakesItsShareOfTheVolumeAndOfTheTime) {
  // The "up to 5x" of 1-bit Adam's abstract (arXiv:2102.02888).
  EXPECT_NEAR(VolumeRatio(0.15, 16), 4.92, 0.005);
  EXPECT_DOUBLE_EQ(VolumeRatio(0, 32), 32);
  EXPECT_DOUBLE_EQ(VolumeRatio(1, 32), 1);

  const Cluster cluster = {.link_bits_per_s = 1e9, .workers = 4, .shards = 4};
  const Training training = {.parameters = 100 * kChunk, .compute_s = 0.1, .warm_up_share = 0.25};
  const Prediction prediction = Predict(cluster, training, FreeCosts());
  const double fp32_s = prediction.fp32.overlapped_s, one_bit_s = prediction.one_bit.overlapped_s;
  EXPECT_DOUBLE_EQ(prediction.run_speedup_over_fp32 * (0.25 * fp32_s + 0.75 * one_bit_s), fp32_s);
  EXPECT_DOUBLE_EQ(prediction.run_speedup_over_ring / prediction.run_speedup_over_fp32,
                   prediction.ring.overlapped_s / fp32_s);
  EXPECT_DOUBLE_EQ(prediction.run_speedup_over_ring16 / prediction.run_speedup_over_fp32,
                   prediction.ring16.overlapped_s / fp32_s);
  EXPECT_DOUBLE_EQ(prediction.run_volume_ratio, 1 / (0.25 + 0.75 / 32));
}

TEST(Predict, TheVerdictIsAboutTheBestOfTheOthers) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 2, .shards = 2, .chunk_elements = kChunk};
  Costs costs = FreeCosts();
  Training training = {.parameters = kChunk, .compute_s = 9, .backward_share = 1};
  // The backward pass hides a ring's 4 s, but not the only chunk's round through Signpost: two
  // frames up, two answers down, 16 s in fp32, 8 s in bf16, 0.5 s in one bit.
  EXPECT_EQ(Predict(cluster, training, costs).verdict,
            "one-bit would add 500 ms to a 9.00 s step with a ring all-reduce in fp32: it does not "
            "pay here");
  // 400 s through the ring, 200 s in 16 bits. Through Signpost bf16 takes a round more than that.
  training.parameters = 100 * kChunk;
  EXPECT_THAT(
      Predict(cluster, training, costs).verdict,
      HasSubstr(" of a 200.00 s step with a ring all-reduce in 16 bits: after the warm-up "));
  costs.bf16.bytes = 1.5;
  EXPECT_THAT(Predict(cluster, training, costs).verdict,
              HasSubstr(" step in bf16: after the warm-up "));
}

TEST(Predict, AWarmUpThatTakesBackWhatOneBitSavesDoesNotPay) {
  // One shard's link carries everything twice for four workers: 16 s a chunk in fp32, 0.5 s in one
  // bit, where a ring in 16 bits takes 3 s.
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 4, .shards = 1, .chunk_elements = kChunk};
  const Training training = {
      .parameters = 1000 * kChunk, .compute_s = 3, .backward_share = 1, .warm_up_share = 0.15};
  const Prediction prediction = Predict(cluster, training, FreeCosts());
  ASSERT_LT(prediction.one_bit.overlapped_s, 0.2 * prediction.ring16.overlapped_s);
  const double run_s = 0.15 * prediction.fp32.overlapped_s + 0.85 * prediction.one_bit.overlapped_s;
  EXPECT_DOUBLE_EQ(prediction.run_speedup_over_ring16, prediction.ring16.overlapped_s / run_s);
  EXPECT_THAT(prediction.verdict,
              HasSubstr("step with a ring all-reduce in 16 bits: after the warm-up "));
  Training longer = training;
  longer.warm_up_share = 0.2;
  EXPECT_THAT(Predict(cluster, longer, FreeCosts()).verdict,
              HasSubstr("but its warm-up in fp32 takes that back: a whole run does 0.8"));
}

TEST(Predict, AWarmUpTakesTheVolumeAndTheTimeOfItsCodec) {
  const Cluster cluster = {.link_bits_per_s = 1e9, .workers = 4, .shards = 4};
  Training training = {.parameters = 100 * kChunk, .compute_s = 0.1, .warm_up_share = 0.25};
  const Prediction in_fp32 = Predict(cluster, training, FreeCosts());
  EXPECT_EQ(in_fp32.warm_up.overlapped_s, in_fp32.fp32.overlapped_s);
  training.warm_up_codec = BFLOAT16;
  EXPECT_EQ(Predict(cluster, training, FreeCosts()).warm_up.overlapped_s,
            in_fp32.bf16.overlapped_s);
  training.warm_up_codec = INT8;
  const Prediction in_int8 = Predict(cluster, training, FreeCosts());
  EXPECT_DOUBLE_EQ(in_int8.warm_up.exchange_s, in_fp32.fp32.exchange_s / 4);
  const double run_s = 0.25 * in_int8.warm_up.overlapped_s + 0.75 * in_int8.one_bit.overlapped_s;
  EXPECT_DOUBLE_EQ(in_int8.run_speedup_over_fp32, in_fp32.fp32.overlapped_s / run_s);
  EXPECT_DOUBLE_EQ(in_int8.run_volume_ratio, 4 / (0.25 * 1 + 0.75 * 0.125));
}

TEST(Predict, ACheaperWarmUpLeavesWhatOneBitSaves) {
  // As above, 4 s a chunk in int8, where the ring in 16 bits takes 3 s.
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 4, .shards = 1, .chunk_elements = kChunk};
  Training training = {
      .parameters = 1000 * kChunk, .compute_s = 3, .backward_share = 1, .warm_up_share = 0.2};
  training.warm_up_codec = INT8;
  EXPECT_THAT(Predict(cluster, training, FreeCosts()).verdict,
              HasSubstr("after the warm-up 5.99 times as many steps, over a whole run 2.50 times"));
  training.warm_up_share = 0.9;
  EXPECT_THAT(Predict(cluster, training, FreeCosts()).verdict,
              HasSubstr("but its warm-up in int8 takes that back: a whole run does 0.8"));
}

TEST(Predict, SavingLittleDoesNotPay) {
  const Cluster cluster = {.link_bits_per_s = 1e9, .workers = 2, .shards = 2};
  const Costs costs = FreeCosts();
  Training training = {.parameters = 100'000, .compute_s = 0.9};
  // Only the last chunk's round is not hidden: two chunks up and down, 6.4 ms in bf16 and 0.4 ms in
  // one bit; a ring is hidden.
  EXPECT_EQ(Predict(cluster, training, costs).verdict,
            "one-bit would add 0.4 ms to a 900 ms step with a ring all-reduce in fp32: it does not "
            "pay here");
  // 600 ms of a ring's 608 ms in 16 bits are hidden, and all but 3.2 ms of one-bit's exchange.
  training.parameters = 38'000'000;
  EXPECT_EQ(Predict(cluster, training, costs).verdict,
            "one-bit would save 4.8 ms of a 908 ms step with a ring all-reduce in 16 bits: it does "
            "not pay here");
  training.parameters = 20'000'000;
  training.compute_s = 0.3;
  // A ring in 16 bits takes 320 ms, of which 200 ms are hidden.
  EXPECT_THAT(Predict(cluster, training, costs).verdict, HasSubstr("one-bit saves "));
}

TEST(Predict, FiguresCompareWithTheRing) {
  const Cluster cluster = {.link_bits_per_s = 1e9, .workers = 4, .shards = 4};
  const Prediction prediction = Predict(cluster, {.parameters = 100'000'000, .compute_s = 0.3});
  const Figures figures = FiguresOf(prediction);
  ASSERT_EQ(figures.figures_size(), 3 * 5 + 4);
  EXPECT_EQ(figures.figures(4).name(), "exchange, a ring all-reduce in 16 bits");
  EXPECT_EQ(figures.figures(4).value(), prediction.ring16.exchange_s);
  const Figure& ring = figures.figures(13);
  EXPECT_EQ(ring.name(), "step with overlap, a ring all-reduce in fp32");
  EXPECT_EQ(ring.value(), prediction.ring.overlapped_s);
  EXPECT_EQ(ring.peer(), "");
  const Figure& last_step = figures.figures(12);
  EXPECT_EQ(last_step.name(), "step with overlap, one-bit");
  EXPECT_EQ(last_step.value(), prediction.one_bit.overlapped_s);
  EXPECT_DOUBLE_EQ(last_step.times_faster(),
                   prediction.ring.overlapped_s / prediction.one_bit.overlapped_s);
  EXPECT_EQ(figures.figures(18).value(), prediction.run_volume_ratio);
  EXPECT_EQ(figures.verdict(), prediction.verdict);
}

TEST(Predict, FiguresHaveTheWarmUpsCodecOnce) {
  const Cluster cluster = {.link_bits_per_s = 1e9, .workers = 4, .shards = 4};
  Training training = {.parameters = 100'000'000, .compute_s = 0.3, .warm_up_codec = INT8};
  const Prediction prediction = Predict(cluster, training);
  const Figures figures = FiguresOf(prediction);
  ASSERT_EQ(figures.figures_size(), 3 * 6 + 4);
  EXPECT_EQ(figures.figures(14).name(), "step with overlap, int8");
  EXPECT_EQ(figures.figures(14).value(), prediction.warm_up.overlapped_s);
  for (const Codec shown : {FLOAT32, BFLOAT16, ONE_BIT}) {
    training.warm_up_codec = shown;
    EXPECT_EQ(FiguresOf(Predict(cluster, training)).figures_size(), 3 * 5 + 4);
  }
}

}  // namespace
}  // namespace signpost::bench
