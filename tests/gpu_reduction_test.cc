// Reductions of tensors that are on a GPU, beside ranks whose tensors are the host's: the bytes are
// those of reductions on the host. On a simulated GPU, or with SIGNPOST_REAL_GPU on a real one,
// where there is one.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gpu.h"
#include "proto/codec.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/new_gpu.h"
#include "worker/worker.h"
#ifndef SIGNPOST_REAL_GPU
#include "kernels/simulated_gpu.h"
#endif

namespace signpost::testing {
namespace {

using kernels::cuda::Gpu;
using kernels::cuda::Owned;
using ::testing::Each;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using Values = std::vector<float>;

constexpr Codec kCodecs[] = {FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT, CUSTOM};

// A rank's tensors, one behind the other, on a GPU or the host.
class Tensors {
 public:
  Tensors(const std::vector<size_t>& sizes, Gpu* gpu) : sizes_(sizes), gpu_(gpu) {
    for (const size_t size : sizes) elements_ += size;
    if (gpu == nullptr) return;
    memory_ = *gpu->Allocate(bytes());
    pinned_ = *gpu->AllocatePinned(bytes());
    for (Owned<CUstream_st>& stream : streams_) stream = *gpu->NewStream();
    done_ = *gpu->NewEvent();
  }

  // On a GPU each call's work is on another stream than the last one's.
  absl::StatusOr<StepReport> Reduce(Worker& worker, Values& values) {
    if (gpu_ == nullptr) return worker.Reduce(Spans(values.data()));
    const kernels::cuda::Stream stream = streams_[calls_++ % 2].get();
    std::memcpy(pinned_.get(), values.data(), bytes());
    gpu_->CopyIn(memory_.get(), pinned_.get(), bytes(), stream).IgnoreError();
    if (absl::Status status = worker.SetStream(stream); !status.ok()) return status;
    absl::StatusOr<StepReport> report = worker.Reduce(Spans(OnGpu()));
    gpu_->CopyOut(pinned_.get(), memory_.get(), bytes(), stream).IgnoreError();
    gpu_->Record(done_.get(), stream).IgnoreError();
    const absl::Status status = gpu_->Await(done_.get());
    if (!status.ok()) return status;
    std::memcpy(values.data(), pinned_.get(), bytes());
    return report;
  }

  std::vector<absl::Span<float>> Spans(float* first) const {
    std::vector<absl::Span<float>> spans;
    for (const size_t size : sizes_) {
      spans.emplace_back(first, size);
      first += size;
    }
    return spans;
  }
  float* OnGpu() const { return reinterpret_cast<float*>(memory_.get()); }
  size_t elements() const { return elements_; }
  size_t bytes() const { return elements_ * sizeof(float); }

 private:
  const std::vector<size_t> sizes_;
  Gpu* const gpu_;
  size_t elements_ = 0;
  Owned<uint8_t> memory_, pinned_;
  Owned<CUstream_st> streams_[2];
  Owned<CUevent_st> done_;
  int calls_ = 0;
};

class GpuReductionTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kRanks = 3;
  static constexpr int kCalls = 6;

  // Of what a rank puts in.
  using Spoil = std::function<void(uint32_t rank, int call, Values& input)>;

  void SetUp() override {
    if (gpu_ == nullptr) GTEST_SKIP();
    UseExampleCodec(worker_);
  }

  WorkerOptions OptionsOf(uint32_t rank, Gpu* gpu) const {
    WorkerOptions options = worker_;
    options.rank = rank;
    options.gpu = gpu;
    return options;
  }

  std::vector<Parameter> Parameters() const {
    std::vector<Parameter> tensors;
    for (const size_t size : sizes_) {
      tensors.push_back({.name = absl::StrCat("tensor", tensors.size()), .shape = {size}});
    }
    return tensors;
  }

  absl::StatusOr<std::unique_ptr<Worker>> Join(Cluster& cluster, uint32_t rank, Gpu* gpu,
                                               const ReductionOptions& reduction) const {
    return Worker::JoinReduction(OptionsOf(rank, gpu), reduction, Parameters(), cluster.Connect());
  }

  struct End {
    std::vector<std::vector<uint32_t>> answers;  // bits, by call: the same on all ranks
    std::vector<Values> errors;                  // by rank
    std::vector<std::string> skipped;            // on rank 0

    bool operator==(const End&) const = default;
  };

  // With the first two ranks' tensors on that GPU; null: on the host.
  End ReduceOn(Gpu* gpu, const ReductionOptions& reduction, const Spoil& spoil = nullptr) const {
    End end;
    end.errors.resize(kRanks);
    std::vector<std::vector<std::vector<uint32_t>>> answers(kRanks);
    Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
    OnEachRank(kRanks, [&](uint32_t rank) {
      Gpu* const gpu_of_rank = rank < 2 ? gpu : nullptr;
      const auto worker = Join(cluster, rank, gpu_of_rank, reduction);
      ASSERT_TRUE(worker.ok()) << worker.status();
      Tensors tensors(sizes_, gpu_of_rank);
      for (int call = 0; call < kCalls; ++call) {
        Values values = GradientOf(rank, call, tensors.elements());
        if (spoil) spoil(rank, call, values);
        const auto report = tensors.Reduce(**worker, values);
        ASSERT_TRUE(report.ok()) << report.status();
        std::vector<uint32_t> bits(values.size());
        std::memcpy(bits.data(), values.data(), tensors.bytes());
        answers[rank].push_back(std::move(bits));
        for (const SkippedRound& skipped : report->skipped) {
          if (rank == 0) end.skipped.push_back(absl::StrCat(skipped.rank, ": ", skipped.block));
        }
      }
      const HostFloats error = (*worker)->reduction().error();
      end.errors[rank] = {error.begin(), error.end()};
      EXPECT_TRUE((*worker)->Leave().ok());
    });
    for (const auto& of_rank : answers) EXPECT_EQ(of_rank, answers[0]);
    end.answers = std::move(answers[0]);
    std::sort(end.skipped.begin(), end.skipped.end());
    return end;
  }

  std::unique_ptr<Gpu> gpu_ = NewGpu();
  std::vector<size_t> sizes_ = {3700, 8, 1, 30'000, 64, 4096, 515};
  WorkerOptions worker_ = {.job = "test/reduction",
                           .world_size = kRanks,
                           .block_elements = 256,
                           .chunk_elements = 4096,
                           .join_timeout = absl::Seconds(30),
                           .exchange_timeout = absl::Seconds(30)};
};

TEST_F(GpuReductionTest, HasTheBytesOfAReductionOnTheHost) {
  for (const Codec codec : kCodecs) {
    for (const bool sum : {false, true}) {
      if (sum && codec == FLOAT16) continue;  // which is refused
      SCOPED_TRACE(absl::StrCat(CodecName(codec), sum ? ", sum" : ", mean"));
      const ReductionOptions reduction = {.codec = codec, .sum = sum};
      const End end = ReduceOn(gpu_.get(), reduction);
      EXPECT_EQ(end, ReduceOn(nullptr, reduction));
      EXPECT_EQ(end.errors[0].empty(), codec == FLOAT32);
    }
  }
}

TEST_F(GpuReductionTest, AlsoWhenChunksAreSkipped) {
  const auto spoil = [](uint32_t rank, int call, Values& input) {
    if (rank == 1 && call == 1) input[20'000] = std::numeric_limits<float>::quiet_NaN();
    if (rank == 2 && call == 3) input[2] = std::numeric_limits<float>::infinity();
  };
  for (const Codec codec : kCodecs) {
    SCOPED_TRACE(CodecName(codec));
    const End end = ReduceOn(gpu_.get(), {.codec = codec}, spoil);
    EXPECT_EQ(end.skipped.size(), 2u);
    EXPECT_EQ(end, ReduceOn(nullptr, {.codec = codec}, spoil));
  }
}

// In integers, or one bit, a tensor of one element takes more than in fp32.
TEST_F(GpuReductionTest, AlsoWithManyTensorsOfOneElement) {
  sizes_ = std::vector<size_t>(200, 1);
  for (const Codec codec : kCodecs) {
    EXPECT_EQ(ReduceOn(gpu_.get(), {.codec = codec}), ReduceOn(nullptr, {.codec = codec}))
        << CodecName(codec);
  }
}

TEST_F(GpuReductionTest, RefusesWhatIsOnTheHost) {
  worker_.world_size = 1;
  Cluster cluster({});
  const auto worker = Join(cluster, 0, gpu_.get(), {.codec = ONE_BIT});
  ASSERT_TRUE(worker.ok()) << worker.status();
  Tensors tensors(sizes_, gpu_.get());
  Values values(tensors.elements(), 1);
  const absl::Status refused = (*worker)->Reduce(tensors.Spans(values.data())).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_THAT(std::string(refused.message()),
              StartsWith("the gradient of tensor 'tensor0' [3700]"));
  EXPECT_TRUE(tensors.Reduce(**worker, values).ok());  // nothing was sent
}

// The rank that is late, and has no tensors for the rounds that it has missed, is on the GPU.
TEST_F(GpuReductionTest, ALateCallGetsTheNewestAnswerAndItsTensorsComeLater) {
  worker_.world_size = 2;
  worker_.round_deadline = absl::Seconds(2);  // of which busy machines need some
  worker_.min_workers = 1;
  sizes_ = {3700, 8};
  constexpr uint64_t kAlone = 4, kTotal = 8;
  for (const Codec codec : {FLOAT32, INT8, ONE_BIT}) {
    SCOPED_TRACE(CodecName(codec));
    Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
    absl::Notification is_alone, has_caught_up;
    Values later[2];  // the sum of the answers since
    OnEachRank(2, [&](uint32_t rank) {
      Gpu* const gpu = rank == 1 ? gpu_.get() : nullptr;
      const auto worker = Join(cluster, rank, gpu, {.codec = codec});
      ASSERT_TRUE(worker.ok()) << worker.status();
      Tensors tensors(sizes_, gpu);
      const auto reduce = [&](float value) {
        Values values(tensors.elements(), value);
        const auto report = tensors.Reduce(**worker, values);
        EXPECT_TRUE(report.ok()) << report.status();
        return values;
      };
      if (rank == 0) {
        while ((*worker)->steps() < kAlone) reduce(0);
        is_alone.Notify();
        has_caught_up.WaitForNotification();
      } else {
        is_alone.WaitForNotification();
        EXPECT_THAT(reduce(1), Each(0.0f));
        EXPECT_EQ((*worker)->steps(), kAlone);
        has_caught_up.Notify();
      }
      later[rank].resize(tensors.elements());
      while ((*worker)->steps() < kTotal) {
        const Values values = reduce(0);
        for (size_t i = 0; i < values.size(); ++i) later[rank][i] += values[i];
      }
      EXPECT_TRUE((*worker)->Leave().ok());
    });
    EXPECT_EQ(later[0], later[1]);
    if (codec == FLOAT32) {
      EXPECT_THAT(later[0], Each(0.0f));
    } else {
      EXPECT_THAT(later[0], Each(Ge(0.25f)));  // of 0.5 at last
    }
  }
}

#ifndef SIGNPOST_REAL_GPU

// What a test can ask of a simulated GPU only.
class SimulatedGpuReductionTest : public GpuReductionTest {
 protected:
  using SimulatedGpu = kernels::cuda::SimulatedGpu;

  void SetUp() override {
    GpuReductionTest::SetUp();
    worker_.world_size = 1;
  }

  SimulatedGpu& gpu() { return static_cast<SimulatedGpu&>(*gpu_); }
};

TEST_F(SimulatedGpuReductionTest, PackedNumbersCrossAndLittleElse) {
  sizes_ = {200'000, 3, 62'000};
  worker_.block_elements = 4096;
  worker_.chunk_elements = 128 * 1024;
  constexpr std::pair<Codec, double> kBits[] = {
      {FLOAT32, 32}, {BFLOAT16, 16}, {INT8, 8 + 32.0 / 4096}, {ONE_BIT, 1 + 32.0 / 4096}};
  for (const auto& [codec, bits] : kBits) {
    SCOPED_TRACE(CodecName(codec));
    Cluster cluster({});
    const auto worker = Join(cluster, 0, &gpu(), {.codec = codec});
    ASSERT_TRUE(worker.ok()) << worker.status();
    Tensors tensors(sizes_, &gpu());
    Values values(tensors.elements(), 1);
    ASSERT_TRUE(tensors.Reduce(**worker, values).ok());
    const SimulatedGpu::Counts before = gpu().counts();
    ASSERT_TRUE(tensors.Reduce(**worker, values).ok());
    const SimulatedGpu::Counts after = gpu().counts();
    EXPECT_EQ(after.allocations, before.allocations);
    EXPECT_EQ(after.pinned_allocations, before.pinned_allocations);
    EXPECT_EQ(after.streams, before.streams);
    EXPECT_EQ(after.events, before.events);
    // Without the test's own.
    const double in = after.bytes_in - before.bytes_in - static_cast<double>(tensors.bytes());
    const double out = after.bytes_out - before.bytes_out - static_cast<double>(tensors.bytes());
    const double bound = bits * tensors.elements() / 8;
    EXPECT_GE(in, bound);
    EXPECT_GE(out, bound);
    EXPECT_LE(in + out, 1.05 * 2 * bound);
  }
}

TEST_F(SimulatedGpuReductionTest, WithoutRoomItIsRefusedAndSaysHowMuchItWanted) {
  Cluster cluster({});
  gpu().LimitMemory(Tensors(sizes_, nullptr).bytes());
  const auto worker = Join(cluster, 0, &gpu(), {.codec = ONE_BIT});
  EXPECT_EQ(worker.status().code(), absl::StatusCode::kResourceExhausted) << worker.status();
  EXPECT_THAT(std::string(worker.status().message()), HasSubstr("GPU 0"));
  // The job is there for the next.
  gpu().LimitMemory(size_t{1} << 30);
  EXPECT_TRUE(Join(cluster, 0, &gpu(), {.codec = ONE_BIT}).ok());
}

// Wherever it happens, a call says so: none succeeds whose work was not done, and none waits for
// ever.
TEST_F(SimulatedGpuReductionTest, AFaultEndsTheCallItHappensIn) {
  sizes_ = {2000, 8};
  worker_.chunk_elements = 512;
  for (const Codec codec : {FLOAT32, ONE_BIT, CUSTOM}) {
    for (int operations = 0;; operations += 3) {
      SCOPED_TRACE(absl::StrCat(CodecName(codec), ", ", operations));
      gpu_ = NewGpu();
      Cluster cluster({});
      const auto worker = Join(cluster, 0, &gpu(), {.codec = codec});
      ASSERT_TRUE(worker.ok()) << worker.status();
      Tensors tensors(sizes_, &gpu());
      gpu().FailOperationAfter(operations);
      absl::Status status;
      for (int call = 0; call < 3 && status.ok(); ++call) {
        Values values(tensors.elements(), 1);
        status = tensors.Reduce(**worker, values).status();
      }
      (*worker)->Leave().IgnoreError();
      if (status.ok()) {
        EXPECT_GT(operations, 50);
        EXPECT_TRUE(gpu().Allocate(1).ok()) << "it has failed, and no call has said so";
        break;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("GPU 0"));
    }
  }
}

#endif  // SIGNPOST_REAL_GPU

}  // namespace
}  // namespace signpost::testing
