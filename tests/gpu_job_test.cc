// Jobs whose workers are on a GPU, alone and beside others on the host: the bytes are those of a
// job on the host. On a simulated GPU, or with SIGNPOST_REAL_GPU on a real one, where there is one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/gpu.h"
#include "proto/codec.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "tests/new_gpu.h"
#ifndef SIGNPOST_REAL_GPU
#include "kernels/simulated_gpu.h"
#include "worker/crew_threads.h"
#endif

namespace signpost::testing {
namespace {

using kernels::cuda::Gpu;

const std::set<int> kSpoiltSteps = {1, 6, 8, 12};  // warm-up, one-bit, and two refreshes

void Spoil(uint32_t rank, int step, std::vector<float>& gradient) {
  if (rank != 1 || !kSpoiltSteps.contains(step)) return;
  gradient[2] = std::numeric_limits<float>::quiet_NaN();
  gradient[20'000] = std::numeric_limits<float>::infinity();
}

// Two workers on the GPU and one on the host, in all stages, through three freezes.
class GpuJobTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_ == nullptr) GTEST_SKIP();
    job_.workers = 3;
    job_.tensors = {3700, 8, 1, 30'000, 64, 4096, 515};
    job_.worker.block_elements = 256;
    job_.worker.chunk_elements = 4096;
    UseExampleCodec(job_.worker);
    job_.optimizer = {.freeze_step = 4, .variance_refresh_interval = 4};
    job_.steps = 15;
  }

  // What ranks end with, by rank: the same on all.
  struct End {
    std::vector<float> values;
    std::vector<std::vector<float>> errors;  // by rank
    std::set<int> skipped_steps;
    // By rank, all that its reports say of rounds and blocks: "rank 1, block ...", sorted.
    std::vector<std::vector<std::string>> skipped;

    bool operator==(const End&) const = default;
  };

  End TrainOn(Gpu* gpu, const BeforeStep& before_step = nullptr) {
    JobOptionsForTest job = job_;
    job.gpu_of = [gpu](uint32_t rank) { return rank < 2 ? gpu : nullptr; };
    End end;
    end.errors.resize(job.workers);
    end.skipped.resize(job.workers);
    absl::Mutex mutex;
    job.take_step = [&](uint32_t rank, int step, Worker& worker,
                        absl::Span<const Gradient> gradients, const GroupRates& rates) {
      absl::StatusOr<StepReport> report = job_.take_step
                                              ? job_.take_step(rank, step, worker, gradients, rates)
                                              : worker.Step(gradients, {rates});
      if (step + 1 == job.steps) {
        const HostFloats error = worker.optimizer().error();
        end.errors[rank] = {error.begin(), error.end()};
      }
      if (!report.ok()) return report;
      for (const SkippedRound& skipped : report->skipped) {
        end.skipped[rank].push_back(absl::StrCat("rank ", skipped.rank, ", ", skipped.block));
      }
      absl::MutexLock lock(&mutex);
      if (!report->skipped.empty()) end.skipped_steps.insert(step);
      return report;
    };
    Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
    const std::vector<std::vector<float>> replicas =
        Train(cluster, job, /*after_step=*/nullptr, before_step);
    for (const std::vector<float>& replica : replicas) EXPECT_EQ(replica, replicas[0]);
    end.values = replicas[0];
    for (std::vector<std::string>& skipped : end.skipped) std::sort(skipped.begin(), skipped.end());
    return end;
  }

  std::unique_ptr<Gpu> gpu_ = NewGpu();
  JobOptionsForTest job_;
};

struct Stages {
  Codec warm_up, frozen, refresh = FLOAT32;

  void SetIn(OptimizerOptions& optimizer) const {
    optimizer.warm_up_codec = warm_up;
    optimizer.codec = frozen;
    optimizer.variance_codec = refresh;
  }
};
constexpr Stages kStages[] = {
    {FLOAT32, ONE_BIT},          {BFLOAT16, ONE_BIT, INT8}, {INT8, INT4, BFLOAT16},
    {ONE_BIT, FLOAT16, ONE_BIT}, {FLOAT16, INT8, CUSTOM},   {INT4, FLOAT32, FLOAT16},
    {FLOAT32, CUSTOM},           {CUSTOM, ONE_BIT, INT4},   {ONE_BIT, CUSTOM, INT8},
    {FLOAT32, ONE_BIT, CUSTOM},  {CUSTOM, CUSTOM, CUSTOM}};

TEST_F(GpuJobTest, HasTheBytesOfAJobOnTheHost) {
  for (const Stages& stages : kStages) {
    stages.SetIn(job_.optimizer);
    EXPECT_EQ(TrainOn(gpu_.get()), TrainOn(nullptr)) << DescribeOptions(job_.optimizer);
  }
}

TEST_F(GpuJobTest, AlsoWhenRoundsAreSkipped) {
  for (const Stages& stages : kStages) {
    stages.SetIn(job_.optimizer);
    const End end = TrainOn(gpu_.get(), Spoil);
    EXPECT_EQ(end.skipped_steps, kSpoiltSteps);
    EXPECT_EQ(end, TrainOn(nullptr, Spoil));
  }
}

TEST_F(GpuJobTest, AlsoWithLamb) {
  job_.optimizer.lamb.emplace();
  for (const Stages& stages : kStages) {
    stages.SetIn(job_.optimizer);
    SCOPED_TRACE(DescribeOptions(job_.optimizer));
    EXPECT_EQ(TrainOn(gpu_.get()), TrainOn(nullptr));
    // Then only a part of a tensor is in the step.
    EXPECT_EQ(TrainOn(gpu_.get(), Spoil), TrainOn(nullptr, Spoil));
  }
}

TEST_F(GpuJobTest, AlsoWithZeroOneAdam) {
  job_.optimizer = {.freeze_step = 6};
  job_.optimizer.zero_one = {
      .var_update_scaler = 2, .local_step_scaler = 2, .local_step_clipper = 3};
  job_.steps = 22;  // which ends an interval
  // Of momenta, and of gradients that update the variance.
  constexpr std::pair<Codec, Codec> kCodecs[] = {
      {ONE_BIT, FLOAT32}, {INT8, INT4}, {FLOAT32, INT8}, {ONE_BIT, CUSTOM}, {CUSTOM, BFLOAT16}};
  for (const auto& [codec, variance_codec] : kCodecs) {
    job_.optimizer.codec = codec;
    job_.optimizer.variance_codec = variance_codec;
    EXPECT_EQ(TrainOn(gpu_.get()), TrainOn(nullptr)) << CodecName(codec);
    // Rounds are skipped, and from the freeze on blocks left alone. That of a chunk which is none
    // of the last four is known on the GPU too when the step ends.
    const End spoilt = TrainOn(nullptr, Spoil);
    EXPECT_EQ(spoilt.skipped_steps, kSpoiltSteps);
    EXPECT_EQ(TrainOn(gpu_.get(), Spoil), spoilt) << CodecName(codec);
    EXPECT_NE(spoilt.values, TrainOn(nullptr).values);
  }
  // Rounds of local means are skipped: of steps 8 and 9, and of 13 to 15.
  job_.optimizer.codec = ONE_BIT;
  job_.optimizer.variance_codec = FLOAT32;
  const auto spoil = [](uint32_t rank, int step, std::vector<float>& gradient) {
    if (rank != 1 || (step != 9 && step != 14)) return;
    std::fill_n(gradient.begin() + 100, 64, 0x1p59f);  // finite, but too much for a scale
  };
  const End skipped = TrainOn(nullptr, spoil);
  EXPECT_EQ(skipped.skipped_steps, std::set<int>({9, 15}));
  EXPECT_EQ(TrainOn(gpu_.get(), spoil), skipped);
}

// In integers, or one bit, a tensor of one element takes more than in fp32.
TEST_F(GpuJobTest, AlsoWithManyTensorsOfOneElement) {
  job_.tensors = std::vector<size_t>(200, 1);
  for (const Codec codec : {INT8, INT4, ONE_BIT}) {
    for (const Stages& stages :
         {Stages{codec, ONE_BIT}, Stages{FLOAT32, codec}, Stages{FLOAT32, FLOAT32, codec}}) {
      stages.SetIn(job_.optimizer);
      EXPECT_EQ(TrainOn(gpu_.get()), TrainOn(nullptr)) << DescribeOptions(job_.optimizer);
    }
  }
}

TEST_F(GpuJobTest, AlsoInParts) {
  job_.take_step = [](uint32_t rank, int, Worker& worker, absl::Span<const Gradient> gradients,
                      const GroupRates& rates) -> absl::StatusOr<StepReport> {
    absl::Status status = worker.BeginStep({rates});
    for (size_t i = 0; i < gradients.size() && status.ok(); ++i) {
      const size_t tensor = rank == 0 ? i : gradients.size() - 1 - i;
      status = worker.GradientReady(tensor, gradients[tensor]);
    }
    if (!status.ok()) return status;
    return worker.FinishStep();
  };
  EXPECT_EQ(TrainOn(gpu_.get()), TrainOn(nullptr));
}

TEST_F(GpuJobTest, AlsoWithGradientsOfHalfTheBytes) {
  // Such as both types have.
  const auto round = [](uint32_t, int, std::vector<float>& gradient) {
    for (float& g : gradient) g = std::round(g * 16) / 16;
  };
  for (const Stages& stages : {Stages{FLOAT32, ONE_BIT, INT8}, Stages{CUSTOM, CUSTOM, CUSTOM}}) {
    stages.SetIn(job_.optimizer);
    const End expected = TrainOn(nullptr, round);
    for (const GradientType type : {GradientType::kBfloat16, GradientType::kFloat16}) {
      job_.gradient_type_on_gpu = type;
      EXPECT_EQ(TrainOn(gpu_.get(), round), expected);
    }
  }
}

TEST_F(GpuJobTest, AlsoWithThreadsForACodecFromOutside) {
  job_.tensors = {300'000, 5};  // more than a thread's piece in a chunk
  job_.worker.chunk_elements = 1 << 18;
  job_.optimizer = {.freeze_step = 2, .warm_up_codec = CUSTOM, .codec = CUSTOM};
  job_.steps = 4;
  const End expected = TrainOn(nullptr, Spoil);
  job_.worker.threads = 3;
  EXPECT_EQ(TrainOn(gpu_.get(), Spoil), expected);
}

TEST_F(GpuJobTest, FindsItsFreezeStepAndClimbsOutOfPlainAdam) {
  job_.optimizer.freeze_step = OptimizerOptions::kAuto;
  job_.rates.beta2 = 0.6;  // looks every 3 steps, at numbers that settle at once
  job_.steps = 24;
  EXPECT_EQ(TrainOn(gpu_.get()), TrainOn(nullptr));
}

TEST_F(GpuJobTest, RefusesWhatIsOnTheHost) {
  Cluster cluster({});
  job_.workers = 1;
  Replica on_host(job_, 0);
  WorkerOptions options = on_host.Options();
  options.gpu = gpu_.get();
  const auto no_worker =
      Worker::Join(options, job_.optimizer, on_host.Parameters(), cluster.Connect());
  EXPECT_EQ(no_worker.status().code(), absl::StatusCode::kInvalidArgument) << no_worker.status();
  EXPECT_TRUE(no_worker.status().message().find("tensor 'tensor0' [3700]: ") == 0)
      << no_worker.status();

  job_.gpu_of = [this](uint32_t) { return gpu_.get(); };
  Replica on_gpu(job_, 0);
  auto worker =
      Worker::Join(on_gpu.Options(), job_.optimizer, on_gpu.Parameters(), cluster.Connect());
  ASSERT_TRUE(worker.ok()) << worker.status();
  const absl::Status no_step = (*worker)->Step(on_host.Gradients(), {job_.rates}).status();
  EXPECT_EQ(no_step.code(), absl::StatusCode::kInvalidArgument) << no_step;
  EXPECT_TRUE(no_step.message().find("the gradient of tensor 'tensor0' [3700]: ") == 0) << no_step;
  on_gpu.BeforeStep(**worker);
  std::vector<Gradient> between = on_gpu.Gradients();
  between[3].values = static_cast<const uint8_t*>(between[3].values) + 2;
  EXPECT_EQ((*worker)->Step(between, {job_.rates}).status().code(),
            absl::StatusCode::kInvalidArgument);
  std::vector<Parameter> parameters = on_gpu.Parameters();
  auto* const first = reinterpret_cast<char*>(parameters[3].values.data());
  parameters[3].values = {reinterpret_cast<float*>(first + 2), parameters[3].values.size()};
  EXPECT_EQ(
      Worker::Join(on_gpu.Options(), job_.optimizer, parameters, cluster.Connect()).status().code(),
      absl::StatusCode::kInvalidArgument);
  // Nothing has happened.
  EXPECT_TRUE((*worker)->Step(on_gpu.Gradients(), {job_.rates}).ok());
}

// Gradients that were made on one stream, and are read on the next.
TEST_F(GpuJobTest, AStreamIsBehindTheOneBefore) {
  job_.workers = 1;
  job_.tensors = {40'000, 30'000};
  const auto train = [&](Gpu* gpu) {
    job_.gpu_of = [gpu](uint32_t) { return gpu; };
    Cluster cluster({});
    Replica replica(job_, 0);
    kernels::cuda::Owned<CUstream_st> stream;
    if (gpu != nullptr) stream = *gpu->NewStream();
    auto worker =
        Worker::Join(replica.Options(), job_.optimizer, replica.Parameters(), cluster.Connect());
    EXPECT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < job_.steps; ++step) {
      replica.gradient = GradientOf(0, step, replica.gradient.size());
      EXPECT_TRUE((*worker)->BeginStep({job_.rates}).ok());
      replica.BeforeStep(**worker);
      if (stream) {
        EXPECT_TRUE((*worker)->SetStream(stream.get()).ok());
      }
      const std::vector<Gradient> gradients = replica.Gradients();
      for (size_t tensor : {1, 0}) {
        EXPECT_TRUE((*worker)->GradientReady(tensor, gradients[tensor]).ok());
      }
      EXPECT_TRUE((*worker)->FinishStep().ok());
      if (stream) {
        EXPECT_TRUE((*worker)->SetStream(replica.stream()).ok());
      }
      replica.GetValues();
    }
    return replica.values;
  };
  EXPECT_EQ(train(gpu_.get()), train(nullptr));
}

#ifndef SIGNPOST_REAL_GPU

// What a test can ask of a simulated GPU only.
class SimulatedGpuJobTest : public GpuJobTest {
 protected:
  using SimulatedGpu = kernels::cuda::SimulatedGpu;

  SimulatedGpu& gpu() { return static_cast<SimulatedGpu&>(*gpu_); }

  // A worker alone, on the GPU.
  absl::StatusOr<std::unique_ptr<Worker>> JoinAlone(Cluster& cluster) {
    job_.workers = 1;
    job_.gpu_of = [this](uint32_t) { return gpu_.get(); };
    replica_ = std::make_unique<Replica>(job_, 0);
    return Worker::Join(replica_->Options(), job_.optimizer, replica_->Parameters(),
                        cluster.Connect());
  }
  absl::Status Step(Worker& worker) { return StepWithout(worker, {}).status(); }
  // Where it is not finite at those elements.
  absl::StatusOr<StepReport> StepWithout(Worker& worker, const std::vector<size_t>& elements) {
    replica_->gradient = GradientOf(0, static_cast<int>(worker.steps()), replica_->gradient.size());
    for (const size_t i : elements) replica_->gradient[i] = std::numeric_limits<float>::infinity();
    replica_->BeforeStep(worker);
    return worker.Step(replica_->Gradients(), {job_.rates});
  }

  std::unique_ptr<Replica> replica_;
};

TEST_F(SimulatedGpuJobTest, InOneBitRoundsSignBitsCrossAndLittleElse) {
  // One large tensor and a few small ones, and layers as a transformer's.
  const std::vector<size_t> few = {200'000, 3, 62'000};
  std::vector<size_t> many = {500'000};
  for (int layer = 0; layer < 3; ++layer) {
    many.insert(many.end(), {300'000, 1200, 100'000, 400, 400, 400});
  }
  struct Case {
    const char* rounds;
    OptimizerOptions optimizer;
    int steps_before, steps;  // that are looked at: of four rounds
  };
  const Case cases[] = {
      {"1-bit Adam's", {.freeze_step = 2}, 3, 4},
      {"1-bit LAMB's", {.freeze_step = 2, .lamb = LambOptions()}, 3, 4},
      // Between its updates of the variance, which are steps 0, 2, 6 and 14.
      {"0/1 Adam's of gradients",
       {.freeze_step = 100, .zero_one = ZeroOneOptions{.var_update_scaler = 1}},
       8,
       4},
      {"0/1 Adam's of momenta",
       {.freeze_step = 2, .zero_one = ZeroOneOptions{.local_step_scaler = 100}},
       3,
       4},
      // Which end with steps 4, 6, 8, and so on.
      {"0/1 Adam's of intervals of two steps",
       {.freeze_step = 2,
        .zero_one = ZeroOneOptions{.local_step_scaler = 1, .local_step_clipper = 2}},
       5,
       8}};
  for (const Case& c : cases) {
    for (const std::vector<size_t>& tensors : {few, many}) {
      SCOPED_TRACE(absl::StrCat(c.rounds, ", ", tensors.size()));
      Cluster cluster({});
      job_.tensors = tensors;
      job_.worker.block_elements = 4096;
      job_.worker.chunk_elements = 128 * 1024;
      job_.optimizer = c.optimizer;
      auto worker = JoinAlone(cluster);
      ASSERT_TRUE(worker.ok()) << worker.status();
      for (int step = 0; step < c.steps_before; ++step) ASSERT_TRUE(Step(**worker).ok());
      const SimulatedGpu::Counts before = gpu().counts();
      int rounds = 0;
      for (int step = 0; step < c.steps; ++step) {
        const auto report = StepWithout(**worker, {});
        ASSERT_TRUE(report.ok()) << report.status();
        if (report->codec == CODEC_UNSPECIFIED) continue;
        EXPECT_EQ(report->codec, ONE_BIT);
        ++rounds;
      }
      ASSERT_EQ(rounds, 4);
      const SimulatedGpu::Counts after = gpu().counts();
      // Without the test's own, for each gradient.
      EXPECT_EQ(after.allocations - before.allocations, c.steps);
      EXPECT_EQ(after.pinned_allocations - before.pinned_allocations, c.steps);
      EXPECT_EQ(after.streams, before.streams);
      EXPECT_EQ(after.events, before.events);
      const double parameters = replica_->gradient.size();
      const uint64_t crossed =
          after.bytes_in - before.bytes_in + after.bytes_out - before.bytes_out;
      const double bytes = (static_cast<double>(crossed) - c.steps * 4 * parameters) / rounds;
      const double bound = 2 * (1 + 32.0 / 4096) * parameters / 8;
      EXPECT_LE(bytes, 1.05 * bound);
      EXPECT_GE(bytes, bound);
    }
  }
}

// So that the GPU compresses the next chunk meanwhile.
TEST_F(SimulatedGpuJobTest, PayloadsLeaveTheGpuOnAnotherStreamThanTheCallers) {
  Cluster cluster({});
  job_.optimizer = {.freeze_step = 2};
  auto worker = JoinAlone(cluster);
  ASSERT_TRUE(worker.ok()) << worker.status();
  std::map<kernels::cuda::Stream, uint64_t> on_callers;
  for (int step = 0; step < 6; ++step) {  // of both stages, in turns on the caller's two streams
    const uint64_t before = gpu().counts().bytes_out;
    ASSERT_TRUE(Step(**worker).ok());
    EXPECT_GT(gpu().counts().bytes_out, before);
    const uint64_t now = gpu().BytesOutOn(replica_->stream());
    const bool is_freeze = step == 2;  // which reads the variance's sums there
    EXPECT_EQ(now > on_callers[replica_->stream()], is_freeze) << step;
    on_callers[replica_->stream()] = now;
  }
}

// Tensors whose lengths are odd do not keep the GPU from reading and writing those behind them 16
// bytes at a time, but where they are the caller's: gradients and parameters, which the test has
// without gaps.
TEST_F(SimulatedGpuJobTest, ItsOwnMemoryIsReadAndWrittenAtOnceBehindOddTensorsToo) {
  constexpr uint64_t kElements = 3 * 4096;
  job_.tensors = {3, kElements};
  job_.worker.block_elements = 4096;
  job_.worker.chunk_elements = 8192;
  // How often a step of the one-bit stage reads or writes the caller's memory.
  const auto expect = [&](const OptimizerOptions& optimizer, uint64_t accesses) {
    SCOPED_TRACE(DescribeOptions(optimizer));
    job_.optimizer = optimizer;
    Cluster cluster({});
    auto worker = JoinAlone(cluster);
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < 3; ++step) ASSERT_TRUE(Step(**worker).ok());
    replica_->GetValues();  // all that came before is done
    const uint64_t before = gpu().counts().quads_in_pieces;
    ASSERT_TRUE(Step(**worker).ok());
    replica_->GetValues();
    EXPECT_EQ(gpu().counts().quads_in_pieces - before, accesses * kElements / 4);
  };
  expect({.freeze_step = 2}, 3);
  expect({.freeze_step = 2, .codec = INT8}, 3);
  OptimizerOptions lamb = {.freeze_step = 2};
  lamb.lamb.emplace();
  expect(lamb, 4);  // the parameters' norm too
  OptimizerOptions zero_one = {.freeze_step = 1};
  zero_one.zero_one = {.var_update_scaler = 1, .local_step_scaler = 1, .local_step_clipper = 3};
  expect(zero_one, 3);
}

TEST_F(SimulatedGpuJobTest, ACodecFromOutsideHasTheThreadsThatItsOptionsSay) {
  job_.tensors = {300'000};
  job_.worker.chunk_elements = 1 << 18;
  job_.worker.threads = 3;
  for (const Codec codec : {ONE_BIT, CUSTOM}) {
    Cluster cluster({});
    job_.optimizer.codec = codec;
    const auto worker = JoinAlone(cluster);
    ASSERT_TRUE(worker.ok()) << worker.status();
    EXPECT_EQ(CrewThreads(), codec == CUSTOM ? 2 : 0);
  }
}

// To the host a chunk's numbers and errors, and back its errors and the answer, in fp32.
TEST_F(SimulatedGpuJobTest, OfACodecFromOutside16BytesCrossForEachElement) {
  Cluster cluster({});
  job_.tensors = {200'000, 3, 62'000};
  job_.worker.block_elements = 4096;
  job_.worker.chunk_elements = 128 * 1024;
  job_.optimizer = {.freeze_step = 3, .warm_up_codec = CUSTOM, .codec = CUSTOM};
  auto worker = JoinAlone(cluster);
  ASSERT_TRUE(worker.ok()) << worker.status();
  ASSERT_TRUE(Step(**worker).ok());
  for (const bool is_frozen : {false, true}) {
    const SimulatedGpu::Counts before = gpu().counts();
    ASSERT_TRUE(Step(**worker).ok());
    const SimulatedGpu::Counts after = gpu().counts();
    // Without the test's own, for the gradient.
    EXPECT_EQ(after.allocations - before.allocations, 1);
    EXPECT_EQ(after.pinned_allocations - before.pinned_allocations, 1);
    EXPECT_EQ(after.streams, before.streams);
    EXPECT_EQ(after.events, before.events);
    const double parameters = replica_->gradient.size();
    EXPECT_GE(after.bytes_out - before.bytes_out, 8 * parameters);
    EXPECT_LE(after.bytes_out - before.bytes_out, 8.01 * parameters) << "more than gaps";
    const double in = after.bytes_in - before.bytes_in - 4 * parameters;
    EXPECT_GE(in, 8 * parameters);
    EXPECT_LE(in, 8.01 * parameters) << "more than that and tables";
    if (is_frozen) continue;
    ASSERT_TRUE(Step(**worker).ok());
    ASSERT_TRUE(Step(**worker).ok());  // the freeze
  }
}

// In intervals of three steps, which all are by then.
TEST_F(SimulatedGpuJobTest, LocalStepsDoNotWaitForWhatTheyLeaveAloneWhichTheRoundReports) {
  job_.tensors = {600};
  job_.worker.chunk_elements = 512;
  job_.optimizer = {.freeze_step = 1};
  job_.optimizer.zero_one = {
      .var_update_scaler = 1, .local_step_scaler = 1, .local_step_clipper = 3};
  Cluster cluster({});
  auto worker = JoinAlone(cluster);
  ASSERT_TRUE(worker.ok()) << worker.status();
  do {
    ASSERT_TRUE(Step(**worker).ok());
  } while ((*worker)->steps() < 12 || !(*worker)->is_synchronised());
  const SimulatedGpu::Counts before = gpu().counts();
  replica_->GetValues();  // all that came before is done
  gpu().Hold();
  const auto held = StepWithout(**worker, {10, 300, 599});
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_TRUE(held->skipped.empty());
  gpu().LetGoOn();
  const auto fine = StepWithout(**worker, {});
  ASSERT_TRUE(fine.ok()) << fine.status();
  EXPECT_FALSE((*worker)->is_synchronised());
  const auto round = StepWithout(**worker, {599});
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_TRUE((*worker)->is_synchronised());
  const SimulatedGpu::Counts after = gpu().counts();

  std::vector<std::string> blocks;
  for (const auto* report : {&*fine, &*round}) {
    for (const SkippedRound& skipped : report->skipped) blocks.push_back(skipped.block);
  }
  const Layout& layout = (*worker)->layout();
  EXPECT_EQ(blocks,
            std::vector<std::string>({layout.DescribeBlock(0, 0), layout.DescribeBlock(1, 0),
                                      layout.DescribeBlock(1, 1)}));
  // But for the test's own, for each gradient.
  EXPECT_EQ(after.allocations - before.allocations, 3);
  EXPECT_EQ(after.pinned_allocations - before.pinned_allocations, 3);
  EXPECT_EQ(after.events, before.events);
  const auto next = StepWithout(**worker, {});
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(next->skipped.empty());
}

TEST_F(SimulatedGpuJobTest, WithoutRoomItIsRefusedAndSaysHowMuchItWanted) {
  Cluster cluster({});
  const size_t elements = Replica(job_, 0).values.size();
  gpu().LimitMemory(elements * 3 * sizeof(float));
  const auto worker = JoinAlone(cluster);
  EXPECT_EQ(worker.status().code(), absl::StatusCode::kResourceExhausted) << worker.status();
  EXPECT_NE(worker.status().message().find("GPU 0"), absl::string_view::npos) << worker.status();
  // The job is there for the next.
  gpu().LimitMemory(size_t{1} << 30);
  EXPECT_TRUE(JoinAlone(cluster).ok());
}

// Wherever it happens, a step says so: none succeeds whose work was not done, and none waits for
// ever.
TEST_F(SimulatedGpuJobTest, AFaultEndsTheStepItHappensInOrTheNext) {
  job_.tensors = {2000, 8};
  job_.worker.chunk_elements = 512;
  const OptimizerOptions one_bit = {
      .freeze_step = 2, .variance_codec = INT8, .variance_refresh_interval = 2};
  OptimizerOptions custom = {.freeze_step = 2, .warm_up_codec = CUSTOM};
  custom.codec = CUSTOM;
  for (const OptimizerOptions& optimizer : {one_bit, custom}) {
    job_.optimizer = optimizer;
    for (int operations = 0;; operations += 7) {
      SCOPED_TRACE(operations);
      replica_.reset();
      gpu_ = NewGpu();
      Cluster cluster({});
      auto worker = JoinAlone(cluster);
      ASSERT_TRUE(worker.ok()) << worker.status();
      gpu().FailOperationAfter(operations);
      absl::Status status;
      float last = 0;
      constexpr uint64_t kSteps = 6;
      while (status.ok() && (*worker)->steps() < kSteps) status = Step(**worker);
      // What the last step has left to do.
      if (status.ok() && !gpu()
                              .Read(&last, replica_->Parameters()[0].values.data(), sizeof last,
                                    replica_->stream())
                              .ok()) {
        status = Step(**worker);
      }
      (*worker)->Leave().IgnoreError();
      if (status.ok()) {
        EXPECT_GT(operations, 100);
        EXPECT_TRUE(gpu().Allocate(1).ok()) << "it has failed, and no step has said so";
        break;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_NE(status.message().find("GPU 0"), absl::string_view::npos) << status;
    }
  }
}

TEST_F(SimulatedGpuJobTest, SoDoSavingAndResuming) {
  job_.tensors = {2000, 8};
  job_.optimizer = {.freeze_step = 2};
  std::string state;
  {
    Cluster cluster({});
    auto worker = JoinAlone(cluster);
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < 4; ++step) ASSERT_TRUE(Step(**worker).ok());
    state = (*worker)->SaveState().value();
    gpu().FailOperationAfter(0);
    EXPECT_EQ((*worker)->SaveState().status().code(), absl::StatusCode::kUnavailable);
  }
  for (int operations = 0;; operations += 2) {
    SCOPED_TRACE(operations);
    replica_.reset();
    gpu_ = NewGpu();
    replica_ = std::make_unique<Replica>(job_, 0);
    gpu().FailOperationAfter(operations);
    Cluster cluster({});
    auto worker = Worker::Join(replica_->Options(), job_.optimizer, replica_->Parameters(),
                               cluster.Connect(), {.state = state});
    if (worker.ok()) {
      EXPECT_GT(operations, 10);
      EXPECT_TRUE(gpu().Allocate(1).ok()) << "it has failed, and nobody has said so";
      break;
    }
    EXPECT_EQ(worker.status().code(), absl::StatusCode::kUnavailable) << worker.status();
  }
}

TEST_F(SimulatedGpuJobTest, WhatTheStreamDoesNotComeToIsNamed) {
  Cluster cluster({});
  job_.worker.exchange_timeout = absl::Seconds(1);
  auto worker = JoinAlone(cluster);
  ASSERT_TRUE(worker.ok()) << worker.status();
  ASSERT_TRUE(Step(**worker).ok());
  gpu().Hold();
  const absl::Status status = Step(**worker);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("GPU 0 (simulated) has not compressed chunk"),
            absl::string_view::npos)
      << status;
  gpu().LetGoOn();
}

// More chunks than the GPU takes at a time, in an order in which all may be under way.
TEST_F(SimulatedGpuJobTest, AlsoWithMoreChunksThanItTakes) {
  for (const uint32_t aggregators : {1, 5}) {
    Cluster cluster({.aggregators = aggregators});
    job_.worker.exchange_timeout = absl::Seconds(1);
    job_.tensors.assign(20, 4096);
    auto worker = JoinAlone(cluster);
    ASSERT_TRUE(worker.ok()) << worker.status();
    ASSERT_TRUE(Step(**worker).ok());
    replica_->BeforeStep(**worker);
    gpu().Hold();
    absl::Status status = (*worker)->BeginStep({job_.rates});
    const std::vector<Gradient> gradients = replica_->Gradients();
    for (size_t i = gradients.size(); i-- > 0 && status.ok();) {
      status = (*worker)->GradientReady(i, gradients[i]);
    }
    EXPECT_TRUE(status.ok()) << status;
    status = (*worker)->FinishStep().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    gpu().LetGoOn();
  }
}

TEST_F(SimulatedGpuJobTest, AWorkerThatIsMissingIsNamedAndNotTheGpu) {
  Cluster cluster({.transport = Transport::kGrpc});
  job_.workers = 2;
  job_.worker.exchange_timeout = absl::Seconds(1);
  job_.gpu_of = [this](uint32_t) { return gpu_.get(); };
  OnEachRank(2, [&](uint32_t rank) {
    Replica replica(job_, rank);
    auto worker =
        Worker::Join(replica.Options(), job_.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) return;
    replica.BeforeStep(**worker);
    const absl::Status status = (*worker)->Step(replica.Gradients(), {job_.rates}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_NE(status.message().find("waiting for rank 1"), absl::string_view::npos) << status;
  });
}

TEST_F(SimulatedGpuJobTest, AStepThatIsLeftOpenSendsNothingMore) {
  Cluster cluster({});
  auto worker = JoinAlone(cluster);
  ASSERT_TRUE(worker.ok()) << worker.status();
  ASSERT_TRUE(Step(**worker).ok());
  replica_->BeforeStep(**worker);
  gpu().Hold();
  ASSERT_TRUE((*worker)->BeginStep({job_.rates}).ok());
  ASSERT_TRUE((*worker)->GradientReady(0, replica_->Gradients()[0]).ok());
  gpu().LetGoOn();
  EXPECT_TRUE((*worker)->Leave().ok());
  worker->reset();
}

// Whose aggregator asks for a state once, of a rank that comes back.
class AskingChannel final : public ForwardingChannel {
 public:
  AskingChannel(std::unique_ptr<Channel> inner, std::function<bool()> asks,
                std::vector<Codec>& sent)
      : ForwardingChannel(std::move(inner)), asks_(std::move(asks)), sent_(sent) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    sent_.push_back(header.codec());
    if (header.codec() == STATE) return;
    if (!asks_()) {
      return ForwardingChannel::Exchange(header, std::move(payload), deadline, std::move(done));
    }
    Answer answer;
    answer.header.set_step(header.step());
    answer.header.set_chunk(header.chunk());
    answer.header.set_codec(FETCH);
    answer.header.add_wanted_chunks(0);
    done(std::move(answer));
  }

 private:
  const std::function<bool()> asks_;
  std::vector<Codec>& sent_;
};

TEST_F(SimulatedGpuJobTest, NoStateIsGivenThatCannotBeRead) {
  for (const bool fails : {false, true}) {
    replica_.reset();
    gpu_ = NewGpu();
    Cluster cluster({});
    job_.workers = 1;
    job_.tensors = {3000};
    job_.optimizer = {.freeze_step = OptimizerOptions::kNever};
    job_.gpu_of = [this](uint32_t) { return gpu_.get(); };
    replica_ = std::make_unique<Replica>(job_, 0);
    bool asks = false;
    std::vector<Codec> sent;
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(std::make_unique<AskingChannel>(
        std::move(cluster.Connect()[0]),
        [&] {
          if (asks && fails) gpu().FailOperationAfter(0);
          return std::exchange(asks, false);
        },
        sent));
    auto worker = Worker::Join(replica_->Options(), job_.optimizer, replica_->Parameters(),
                               std::move(channels));
    ASSERT_TRUE(worker.ok()) << worker.status();
    ASSERT_TRUE(Step(**worker).ok());
    asks = true;
    EXPECT_EQ(Step(**worker).ok(), !fails);
    EXPECT_EQ(std::count(sent.begin(), sent.end(), STATE), fails ? 0 : 1);
  }
}

TEST_F(SimulatedGpuJobTest, AStreamOfAnotherGpuChangesNothing) {
  Cluster cluster({});
  auto worker = JoinAlone(cluster);
  ASSERT_TRUE(worker.ok()) << worker.status();
  ASSERT_TRUE(Step(**worker).ok());
  replica_->BeforeStep(**worker);
  kernels::cuda::SimulatedGpu other(1);
  const kernels::cuda::Owned<CUstream_st> stream = *other.NewStream();
  const absl::Status status = (*worker)->SetStream(stream.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE((*worker)->Step(replica_->Gradients(), {job_.rates}).ok());
}

#endif

}  // namespace
}  // namespace signpost::testing
