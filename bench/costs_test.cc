#include "bench/costs.h"

#include <gtest/gtest.h>

namespace signpost::bench {
namespace {

// Gelem/s of one core, docs/measurements.md; the formulas' fits are within 8%.
void ExpectRate(double seconds, double wanted) {
  EXPECT_NEAR(1e-9 / seconds, wanted, 0.08 * wanted);
}

TEST(Costs, KernelsTakeWhatWasMeasured) {
  ExpectRate(OneBitCosts().AggregateSeconds(2), 4.99);
  ExpectRate(OneBitCosts().AggregateSeconds(4), 4.63);
  ExpectRate(OneBitCosts().AggregateSeconds(8), 4.07);
  ExpectRate(OneBitCosts().AggregateSeconds(16), 2.80);
  ExpectRate(OneBitCosts().AggregateSeconds(64), 0.919);
  ExpectRate(Float32Costs().AggregateSeconds(4), 1.37);
  ExpectRate(Bfloat16Costs().AggregateSeconds(4), 2.04);
  ExpectRate(Float16Costs().AggregateSeconds(4), 2.06);
  ExpectRate(Int8Costs().AggregateSeconds(4), 2.78);
  ExpectRate(Int8Costs().AggregateSeconds(8), 1.59);
  ExpectRate(Int4Costs().AggregateSeconds(4), 3.28);
  ExpectRate(Int4Costs().AggregateSeconds(8), 1.88);
}

TEST(Costs, AreThoseOfTheKernelsThatWereMeasured) {
  Figures kernels;
  const auto add = [&kernels](const std::string& name, double value, const std::string& unit) {
    *kernels.add_figures() = MakeFigure(name, unit, {value});
  };
  for (const char* name : {"compress, fp32", "Adam step, fp32", "compress, bf16", "Adam step, bf16",
                           "compress, fp16", "Adam step, fp16", "compress, int8",
                           "decompress, int8", "compress, int4", "decompress, int4", "apply"}) {
    add(name, 50, "GB/s");
    add(name, 2, "Gelem/s");
  }
  for (const char* name :
       {"aggregate, fp32, 4 workers", "aggregate, bf16, 4 workers", "aggregate, fp16, 4 workers"}) {
    add(name, 1, "Gelem/s");
  }
  for (const char* name : {"aggregate, int8, 4 workers", "aggregate, int4, 4 workers"}) {
    add(name, 3, "Gelem/s");
  }
  add("aggregate, int8, 8 workers", 2, "Gelem/s");
  add("aggregate, int4, 8 workers", 1.8, "Gelem/s");
  add("aggregate, 4 workers", 4, "Gelem/s");
  add("aggregate, 16 workers", 3.6, "Gelem/s");
  add("aggregate, 64 workers", 1, "Gelem/s");
  const absl::StatusOr<Costs> without = CostsOfKernels(kernels);
  EXPECT_EQ(without.status().message(), "there is no 'compress, one-bit momentum' in Gelem/s");
  add("compress, one-bit momentum", 3, "Gelem/s");
  const absl::StatusOr<Costs> costs = CostsOfKernels(kernels);
  ASSERT_TRUE(costs.ok()) << costs.status();
  ExpectRate(costs->fp32.AggregateSeconds(4), 1);
  ExpectRate(costs->bf16.AggregateSeconds(4), 1);
  ExpectRate(costs->bf16.apply_s, 2);
  ExpectRate(costs->fp16.AggregateSeconds(4), 1);
  ExpectRate(costs->int8.compress_s, 2);
  ExpectRate(costs->int8.apply_s, 1);  // decompressing, and then Adam's step in fp32
  ExpectRate(costs->int8.AggregateSeconds(4), 3);
  ExpectRate(costs->int8.AggregateSeconds(8), 2);
  ExpectRate(costs->int4.AggregateSeconds(4), 3);
  ExpectRate(costs->int4.AggregateSeconds(8), 1.8);
  ExpectRate(costs->one_bit.compress_s, 3);
  ExpectRate(costs->one_bit.apply_s, 2);
  ExpectRate(costs->one_bit.AggregateSeconds(4), 4);
  ExpectRate(costs->one_bit.AggregateSeconds(16), 3.6);
  ExpectRate(costs->one_bit.AggregateSeconds(64), 1);
}

TEST(Costs, EachCodecHasItsOwn) {
  const Costs costs;
  EXPECT_EQ(costs.Of(FLOAT32).bytes, 4);
  EXPECT_EQ(costs.Of(BFLOAT16).bytes, 2);
  EXPECT_EQ(&costs.Of(FLOAT16), &costs.fp16);
  EXPECT_EQ(costs.Of(INT8).bytes, 1 + 4. / 4096);
  EXPECT_EQ(costs.Of(INT4).bytes, 0.5 + 4. / 4096);
  EXPECT_EQ(costs.Of(ONE_BIT).bytes, 0.125 + 4. / 4096);
}

TEST(Costs, ChunksAreAsManyAsJobsHave) {
  const Cluster cluster = {.link_bits_per_s = 8e9, .workers = 2, .shards = 2};
  EXPECT_EQ(ChunkTimesOf(cluster, 1000, {}, {}).chunks, 1);
  EXPECT_EQ(ChunkTimesOf(cluster, 25'000'000, {}, {}).chunks, 48);
  EXPECT_EQ(ChunkTimesOf(cluster, 340'000'000, {}, {}).chunks, 168);
}

TEST(Costs, ChunksAreAsFewAsTheirElementsAllow) {
  const Cluster cluster = {.link_bits_per_s = 8e9,
                           .workers = 2,
                           .shards = 2,
                           .chunk_elements = 1 << 20,
                           .worker_threads = 1};
  const CodecCosts codec = {.bytes = 2, .compress_s = 3e-9, .apply_s = 5e-9, .aggregate_s = 7e-9};
  const TransportCosts transport = {.cpu_s_per_byte = 1e-9, .cpu_s_per_frame = 1e-6};
  EXPECT_EQ(ChunkTimesOf(cluster, 1 << 20, codec, transport).chunks, 1);
  const ChunkTimes chunk = ChunkTimesOf(cluster, (1 << 20) + 2, codec, transport);
  EXPECT_EQ(chunk.chunks, 2);
  const double elements = (1 << 19) + 1;
  EXPECT_DOUBLE_EQ(chunk.link_s, 2e-9 * elements);
  EXPECT_DOUBLE_EQ(chunk.transport_s, 2e-9 * elements + 1e-6);
  EXPECT_DOUBLE_EQ(chunk.compress_s, 3e-9 * elements);
  EXPECT_DOUBLE_EQ(chunk.apply_s, 5e-9 * elements);
  EXPECT_DOUBLE_EQ(chunk.aggregate_s, 7e-9 * elements);
}

TEST(Costs, AWorkersThreadsShareItsKernels) {
  Cluster cluster = {.link_bits_per_s = 8e9, .workers = 2, .shards = 2};
  EXPECT_EQ(cluster.threads(), 8);
  cluster.cores_per_host = 1;
  EXPECT_EQ(cluster.threads(), 1);
  const CodecCosts codec = {.bytes = 2, .compress_s = 3e-9, .apply_s = 6e-9};
  const ChunkTimes one = ChunkTimesOf(cluster, 1000, codec, {});
  cluster.worker_threads = 2;
  const ChunkTimes two = ChunkTimesOf(cluster, 1000, codec, {});
  EXPECT_DOUBLE_EQ(two.compress_s, 2e-6);
  EXPECT_DOUBLE_EQ(two.apply_s, 4e-6);
  EXPECT_DOUBLE_EQ(one.kernels_s, one.compress_s + one.apply_s);
  EXPECT_DOUBLE_EQ(two.kernels_s, one.kernels_s);
}

TEST(Costs, TheWindowIsTheWorkers) {
  EXPECT_EQ((Cluster{.workers = 4, .shards = 3}.window()), 8);
  EXPECT_EQ((Cluster{.workers = 4, .shards = 5}.window()), 10);
}

}  // namespace
}  // namespace signpost::bench
