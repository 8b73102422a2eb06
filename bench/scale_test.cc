#include "bench/scale.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "bench/predict.h"

namespace signpost::bench {
namespace {

constexpr uint64_t kChunk = uint64_t{1} << 20;
constexpr TransportCosts kFree = {};

// A codec and a network in which a chunk is on a link for a second.
constexpr CodecCosts kOneByte = {.bytes = 1};
constexpr double kChunkPerSecond = 8. * kChunk;

// Seconds of a chunk.
CodecCosts Kernels(double compress, double apply, double aggregate) {
  return {.bytes = 1,
          .compress_s = compress / kChunk,
          .apply_s = apply / kChunk,
          .aggregate_s = aggregate / kChunk};
}

TEST(Scale, OneWorkersChunksFollowOneAnother) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 1, .shards = 1, .chunk_elements = kChunk};
  EXPECT_DOUBLE_EQ(PlayExchange(cluster, kChunk, kOneByte, kFree).exchange_s, 2);
  EXPECT_DOUBLE_EQ(PlayExchange(cluster, 10 * kChunk, kOneByte, kFree).exchange_s, 11);
  EXPECT_DOUBLE_EQ(PlayExchange(cluster, 10 * kChunk, kOneByte, {.latency_s = 0.5}).exchange_s,
                   11.5);
}

TEST(Scale, ALineOfProcessorsAndLinksIsAsSlowAsItsSlowest) {
  const Cluster cluster = {.link_bits_per_s = kChunkPerSecond,
                           .workers = 1,
                           .shards = 1,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  // Compress 0.25, four times transport 0.5, two links 1, aggregate 3; nothing is applied, so
  // nothing comes twice to where it was.
  const TransportCosts transport = {.cpu_s_per_frame = 0.5};
  EXPECT_DOUBLE_EQ(PlayExchange(cluster, 10 * kChunk, Kernels(0.25, 0, 3), transport).exchange_s,
                   (0.25 + 4 * 0.5 + 2 * 1 + 3) + 9 * 3);
}

TEST(Scale, AThreadThatCompressesAndAppliesDoesOneAtATime) {
  const Cluster cluster = {.link_bits_per_s = 1e3 * kChunkPerSecond,
                           .workers = 1,
                           .shards = 1,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  const PlayedExchange played = PlayExchange(cluster, 100 * kChunk, Kernels(2, 3, 0), kFree);
  EXPECT_DOUBLE_EQ(played.exchange_s, 100 * (2 + 3));
  EXPECT_DOUBLE_EQ(played.worker_s, 100 * (2 + 3));
}

TEST(Scale, AWindowsChunksShareAWait) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 1, .shards = 1, .chunk_elements = kChunk};
  // Eight leave in the first eight seconds, and come back from 32 s on; then eight others leave.
  EXPECT_DOUBLE_EQ(PlayExchange(cluster, 17 * kChunk, kOneByte, {.latency_s = 30}).exchange_s,
                   3 * 32);
}

TEST(Scale, ALoneShardsLinkCarriesAllWorkersFrames) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 64, .shards = 1, .chunk_elements = kChunk};
  const PlayedExchange played = PlayExchange(cluster, 10 * kChunk, kOneByte, kFree);
  EXPECT_DOUBLE_EQ(played.exchange_s, (10 + 1) * 64);
  EXPECT_DOUBLE_EQ(played.link_s, 10 * 64);
  EXPECT_EQ(played.frames, 2 * 10 * 64);
}

TEST(Scale, ShardsShareTheFrames) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 64, .shards = 4, .chunk_elements = kChunk};
  const PlayedExchange played = PlayExchange(cluster, 40 * kChunk, kOneByte, kFree);
  EXPECT_DOUBLE_EQ(played.link_s, 10 * 64);
  // The last shard's first frames come three seconds after the first shard's.
  EXPECT_NEAR(played.exchange_s, (10 + 1) * 64, 3 + 1e-9);
}

TEST(Scale, AsManyShardsAsWorkersMakeTheirLinksCarryTheModelOnce) {
  const Cluster cluster = {
      .link_bits_per_s = kChunkPerSecond, .workers = 16, .shards = 16, .chunk_elements = kChunk};
  const PlayedExchange played = PlayExchange(cluster, 800 * kChunk, kOneByte, kFree);
  EXPECT_DOUBLE_EQ(played.link_s, 800);
  // As fast as a link lets through, behind the first round, up and down.
  EXPECT_GE(played.exchange_s, 800 + 1);
  EXPECT_LE(played.exchange_s, (800 - 1) + 2 * 16);
}

TEST(Scale, ColocatedShardsMakeLinksCarryWhatARingDoes) {
  const Cluster cluster = {.link_bits_per_s = kChunkPerSecond,
                           .workers = 4,
                           .shards = 4,
                           .colocated = true,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  EXPECT_DOUBLE_EQ(PlayExchange(cluster, 800 * kChunk, kOneByte, kFree).link_s, 2 * 0.75 * 800);
  const Cluster alone = {.link_bits_per_s = kChunkPerSecond,
                         .workers = 1,
                         .shards = 1,
                         .colocated = true,
                         .chunk_elements = kChunk};
  EXPECT_EQ(PlayExchange(alone, 800 * kChunk, kOneByte, kFree).exchange_s, 0);
}

TEST(Scale, ShardsWithoutAChunkTakeNoCores) {
  Cluster cluster = {.link_bits_per_s = 1e9,
                     .workers = 1,
                     .shards = 2,
                     .colocated = true,
                     .cores_per_host = 2,
                     .chunk_elements = kChunk};
  const CodecCosts codec = Costs().fp32;
  const double of_two = PlayExchange(cluster, 2 * kChunk, codec, Costs().transport).cores_s;
  cluster.shards = 64;
  EXPECT_EQ(PlayExchange(cluster, 2 * kChunk, codec, Costs().transport).cores_s, of_two);
}

TEST(Scale, AHostsCoresShareItsWork) {
  const Cluster cluster = {.link_bits_per_s = kChunkPerSecond,
                           .workers = 1,
                           .shards = 1,
                           .colocated = true,
                           .cores_per_host = 2,
                           .chunk_elements = kChunk,
                           .worker_threads = 1};
  const PlayedExchange played =
      PlayExchange(cluster, 100 * kChunk, Kernels(2, 2, 3), {.cpu_s_per_frame = 1});
  EXPECT_DOUBLE_EQ(played.cores_s, 100 * 11 / 2.);
  EXPECT_DOUBLE_EQ(played.exchange_s, played.cores_s);
}

// The closed form knows nothing of who waits for whom. Where a host's link carries both its
// worker's frames and its shard's answers, it takes their rounds for longer than they are.
TEST(Scale, ComesToWhatTheClosedFormPredicts) {
  for (const CodecCosts& codec : {OneBitCosts(), Float32Costs()}) {
    for (const bool colocated : {false, true}) {
      for (const double rate : {1e9, 1e11}) {
        for (const uint32_t workers : {1, 2, 4, 16, 64, 1024}) {
          for (const uint32_t shards : {uint32_t{1}, workers}) {
            const Cluster cluster = {rate, workers, shards, colocated};
            const double played =
                PlayExchange(cluster, 100'000'000, codec, MeasuredTransportCosts()).exchange_s;
            const double predicted =
                PredictExchange(cluster, 100'000'000, codec, MeasuredTransportCosts()).exchange_s;
            EXPECT_NEAR(played / predicted, 1, colocated ? 0.13 : 0.03)
                << codec.bytes << " bytes, " << workers << " workers, " << shards << " shards, "
                << colocated << ", " << rate << " bit/s";
          }
        }
      }
    }
  }
}

TEST(Scale, ThousandsOfHostsArePlayed) {
  const Cluster cluster = {.link_bits_per_s = 1e9, .workers = 1024, .shards = 1024};
  const PlayedExchange played =
      PlayExchange(cluster, 1'000'000'000, OneBitCosts(), MeasuredTransportCosts());
  EXPECT_EQ(played.frames, 2 * 1024 * 479);
  EXPECT_GT(played.exchange_s, played.link_s);
  EXPECT_LT(played.exchange_s, 3 * played.link_s);
}

}  // namespace
}  // namespace signpost::bench
