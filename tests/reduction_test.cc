// Reductions: tensors become their mean or sum over all ranks, and what compression loses comes
// later.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
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
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/codec.h"
#include "proto/layout.h"
#include "tests/cluster.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"
#include "worker/worker.h"

namespace signpost::testing {
namespace {

using ::testing::HasSubstr;

using Values = std::vector<float>;
using Vector = std::vector<double>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint32_t kRanks = 3;
const std::vector<size_t> kTensors = {37, 8, 1, 300, 64};  // of 7 chunks
constexpr size_t kElements = 37 + 8 + 1 + 300 + 64;

// Of rank and call, normally distributed around a drift that is the same for all.
Values InputOf(uint32_t rank, int call) { return GradientOf(rank, call, kElements); }

Vector MeanInput(int call, uint32_t ranks = kRanks) {
  Vector mean(kElements);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const Values input = InputOf(rank, call);
    for (size_t i = 0; i < kElements; ++i) mean[i] += double{input[i]} / ranks;
  }
  return mean;
}

std::vector<absl::Span<float>> Spans(Values& values) {
  std::vector<absl::Span<float>> spans;
  size_t first = 0;
  for (const size_t elements : kTensors) {
    spans.push_back(absl::MakeSpan(values).subspan(first, elements));
    first += elements;
  }
  return spans;
}

std::vector<Parameter> Tensors() {
  std::vector<Parameter> tensors;
  for (const size_t elements : kTensors) {
    tensors.push_back({.name = absl::StrCat("tensor", tensors.size()), .shape = {elements}});
  }
  return tensors;
}

WorkerOptions OptionsOf(uint32_t rank, uint32_t ranks = kRanks) {
  return {.job = "test/reduction",
          .rank = rank,
          .world_size = ranks,
          .block_elements = 16,
          .chunk_elements = 64,
          .join_timeout = absl::Seconds(30),
          .exchange_timeout = absl::Seconds(30)};
}

std::unique_ptr<Worker> Join(const WorkerOptions& options, const ReductionOptions& reduction,
                             std::vector<std::unique_ptr<Channel>> channels) {
  auto worker = Worker::JoinReduction(options, reduction, Tensors(), std::move(channels));
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

StepReport Reduce(Worker& worker, Values& values) {
  auto report = worker.Reduce(Spans(values));
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : StepReport();
}

// The answers of `calls` calls, of which all ranks must have the same. `before` may change what a
// rank puts in.
std::vector<Values> ReduceAll(
    Cluster& cluster, const ReductionOptions& options, int calls,
    const std::function<void(uint32_t rank, int call, Values& input)>& before = nullptr,
    const std::function<void(uint32_t rank, int call)>& after = nullptr) {
  std::vector<std::vector<Values>> answers(kRanks);
  OnEachRank(kRanks, [&](uint32_t rank) {
    const auto worker = Join(OptionsOf(rank), options, cluster.Connect());
    for (int call = 0; call < calls; ++call) {
      Values values = InputOf(rank, call);
      if (before) before(rank, call, values);
      Reduce(*worker, values);
      if (after) after(rank, call);
      answers[rank].push_back(std::move(values));
    }
    EXPECT_TRUE(worker->Leave().ok());
  });
  for (const auto& of_rank : answers) {
    for (int call = 0; call < calls; ++call) {
      EXPECT_EQ(std::memcmp(of_rank[call].data(), answers[0][call].data(), 4 * kElements), 0);
    }
  }
  return answers[0];
}

// One side's compression with error feedback as 1-bit Adam's paper has it, in double precision.
class Compressor {
 public:
  Vector Compress(const Vector& input) {
    Vector sent(kElements);
    for (size_t i = 0; i < kElements; ++i) error_[i] += input[i];
    size_t first = 0;
    for (const size_t elements : kTensors) {
      for (size_t begin = 0; begin < elements; begin += 16) {
        const size_t length = std::min<size_t>(16, elements - begin);
        CompressBlock(first + begin, length, sent);
      }
      first += elements;
    }
    return sent;
  }

 private:
  void CompressBlock(size_t begin, size_t length, Vector& sent) {
    double squares = 0;
    for (size_t i = begin; i < begin + length; ++i) squares += error_[i] * error_[i];
    const double scale = 1.35 * std::sqrt(squares / length);
    for (size_t i = begin; i < begin + length; ++i) {
      sent[i] = std::copysign(scale, error_[i]);
      error_[i] -= sent[i];
    }
  }

  Vector error_ = Vector(kElements);  // u before a block is compressed
};

TEST(Reduction, InFp32IsTheMean) {
  Cluster cluster({.aggregators = 2});
  const std::vector<Values> answers = ReduceAll(cluster, {.codec = FLOAT32}, 3);
  for (int call = 0; call < 3; ++call) {
    const Vector mean = MeanInput(call);
    for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(answers[call][i], mean[i], 1e-6);
  }
}

TEST(Reduction, SumInFp32OfOneRanksValuesAndZerosIsTheseValues) {
  Cluster cluster({.aggregators = 2});
  const std::vector<Values> answers =
      ReduceAll(cluster, {.codec = FLOAT32, .sum = true}, 2, [](uint32_t rank, int, Values& input) {
        if (rank != 0) std::fill(input.begin(), input.end(), 0.0f);
      });
  for (int call = 0; call < 2; ++call) EXPECT_EQ(answers[call], InputOf(0, call));
}

TEST(Reduction, InOneBitFollowsThePaper) {
  for (const bool sum : {false, true}) {
    Cluster cluster({.aggregators = 2, .fault_seed = 7});
    const std::vector<Values> answers = ReduceAll(cluster, {.codec = ONE_BIT, .sum = sum}, 10);
    std::vector<Compressor> workers(kRanks);
    Compressor aggregator;
    for (int call = 0; call < 10; ++call) {
      Vector total(kElements);
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const Values input = InputOf(rank, call);
        const Vector sent = workers[rank].Compress(Vector(input.begin(), input.end()));
        for (size_t i = 0; i < kElements; ++i) total[i] += sent[i] / (sum ? 1 : kRanks);
      }
      const Vector expected = aggregator.Compress(total);
      for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(answers[call][i], expected[i], 1e-4);
    }
  }
}

// Knows enough of a shard's job to read the aggregator's errors as a worker would.
class ReadingChannel final : public ForwardingChannel {
 public:
  using ForwardingChannel::ForwardingChannel;

  absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                    CheckMayWait check_may_wait) override {
    auto response = ForwardingChannel::Join(request, deadline, check_may_wait);
    read_.set_job(request.job());
    read_.set_rank(request.rank());
    read_.set_incarnation(request.incarnation());
    read_.set_epoch(response->epoch());
    return response;
  }

  Values ErrorOf(uint32_t chunk, uint64_t step) {
    read_.set_chunk(chunk);
    read_.set_step(step);
    const auto response = ReadError(read_, absl::Now() + absl::Seconds(10));
    EXPECT_TRUE(response.ok()) << response.status();
    const auto* numbers = reinterpret_cast<const float*>(response->payload().data());
    return Values(numbers, numbers + response->payload().size() / sizeof(float));
  }

 private:
  ReadErrorRequest read_;
};

TEST(Reduction, WhatWasNotAnsweredYetIsInErrors) {
  constexpr int kCalls = 20;
  for (const Codec codec : {BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT}) {
    Cluster cluster({.aggregators = 1});
    std::vector<Vector> answered(kRanks), missing(kRanks);
    OnEachRank(kRanks, [&](uint32_t rank) {
      auto reading = std::make_unique<ReadingChannel>(std::move(cluster.Connect()[0]));
      ReadingChannel& channel = *reading;
      std::vector<std::unique_ptr<Channel>> channels;
      channels.push_back(std::move(reading));
      const auto worker = Join(OptionsOf(rank), {.codec = codec}, std::move(channels));
      answered[rank].resize(kElements);
      missing[rank].resize(kElements);
      for (int call = 0; call < kCalls; ++call) {
        Values values = InputOf(rank, call);
        Reduce(*worker, values);
        for (size_t i = 0; i < kElements; ++i) answered[rank][i] += values[i];
      }
      for (size_t i = 0; i < kElements; ++i) {
        missing[rank][i] = worker->reduction().error()[i] / double{kRanks};
      }
      const absl::Span<const Chunk> chunks = worker->layout().chunks();
      for (uint32_t chunk = 0; chunk < chunks.size() && rank == 0; ++chunk) {
        const Values error = channel.ErrorOf(chunk, kCalls);
        ASSERT_EQ(error.size(), chunks[chunk].elements);
        for (size_t i = 0; i < error.size(); ++i) {
          missing[0][chunks[chunk].first_element + i] += error[i];
        }
      }
      EXPECT_TRUE(worker->Leave().ok());
    });
    Vector put_in(kElements);
    for (int call = 0; call < kCalls; ++call) {
      const Vector mean = MeanInput(call);
      for (size_t i = 0; i < kElements; ++i) put_in[i] += mean[i];
    }
    for (size_t i = 0; i < kElements; ++i) {
      const double all = answered[0][i] + missing[0][i] + missing[1][i] + missing[2][i];
      ASSERT_NEAR(all, put_in[i], 1e-4) << CodecName(codec);
    }
  }
}

// Of the layout: tensor 3's elements 66 to 129, in the chunk from there on.
constexpr size_t kBadElement = 37 + 8 + 1 + 70;

// Whether each answer of the call is NaN, for the chunk of the bad element and nowhere else.
void ExpectOneChunkOfNan(const Layout& layout, const Values& values) {
  for (const Chunk& chunk : layout.chunks()) {
    const bool is_bad = kBadElement - chunk.first_element < chunk.elements;
    for (uint32_t i = 0; i < chunk.elements; ++i) {
      ASSERT_EQ(std::isnan(values[chunk.first_element + i]), is_bad);
    }
  }
}

TEST(Reduction, AValueThatIsNotFiniteMakesItsChunkNanOnAllRanksAndIsNamed) {
  for (const Codec codec : {FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT}) {
    Cluster cluster({.aggregators = 2});
    OnEachRank(kRanks, [&](uint32_t rank) {
      const auto worker = Join(OptionsOf(rank), {.codec = codec}, cluster.Connect());
      Values values = InputOf(rank, 0);
      if (rank == 1) values[kBadElement] = kNan;
      const StepReport report = Reduce(*worker, values);
      ASSERT_EQ(report.skipped.size(), 1u);
      EXPECT_EQ(report.skipped[0].rank, 1u);
      EXPECT_THAT(report.skipped[0].block, HasSubstr("'tensor3' [300], elements 64 to 79"));
      ExpectOneChunkOfNan(worker->layout(), values);
      EXPECT_TRUE(worker->Leave().ok());
    });
  }
}

TEST(Reduction, WhatHealthyRanksPutIntoASkippedChunkComesInTheNextCall) {
  Cluster cluster({.aggregators = 2});
  const auto one_is_bad = [](uint32_t rank, int call, Values& input) {
    if (call == 0) std::fill(input.begin(), input.end(), rank == 1 ? kNan : 1.0f);
    if (call == 1) std::fill(input.begin(), input.end(), 0.0f);
  };
  // All elements of a block are alike, so that one bit of each loses only what gamma adds: 0.35.
  const Values in_one_bit = ReduceAll(cluster, {.codec = ONE_BIT}, 2, one_is_bad)[1];
  for (const float value : in_one_bit) ASSERT_NEAR(value, 1.35 * 1.35 * 2 / 3, 1e-5);
  const Values in_bf16 = ReduceAll(cluster, {.codec = BFLOAT16}, 2, one_is_bad)[1];
  for (const float value : in_bf16) ASSERT_NEAR(value, 2.0 / 3, 0.01);
}

TEST(Reduction, InFp32ASkippedChunkLeavesNothingBehind) {
  Cluster cluster({.aggregators = 2});
  const std::vector<Values> answers =
      ReduceAll(cluster, {.codec = FLOAT32}, 2, [](uint32_t rank, int call, Values& input) {
        if (rank == 1 && call == 0) input[kBadElement] = kNan;
      });
  const Vector mean = MeanInput(1);
  for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(answers[1][i], mean[i], 1e-6);
}

TEST(Reduction, AnAggregatorThatIsKilledInBetweenChangesNothing) {
  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/reduction-state");
  std::filesystem::remove_all(state_dir);
  constexpr ReductionOptions kOptions = {.codec = ONE_BIT, .sum = true};
  constexpr int kCalls = 16;
  Cluster undisturbed({.aggregators = 2});
  const std::vector<Values> expected = ReduceAll(undisturbed, kOptions, kCalls);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2, .state_dir = state_dir});
  int kills = 0;
  const std::vector<Values> answers =
      ReduceAll(cluster, kOptions, kCalls, nullptr, [&](uint32_t rank, int call) {
        if (rank != 0 || call % 5 != 2) return;
        cluster.Kill(0);
        cluster.Kill(1);
        ++kills;
      });
  EXPECT_EQ(kills, 3);
  EXPECT_EQ(answers, expected);
}

TEST(Reduction, SizesAreChecked) {
  Cluster cluster({.aggregators = 1});
  const auto worker = Join(OptionsOf(0, 1), {.codec = ONE_BIT}, cluster.Connect());
  Values values(kElements);
  std::vector<absl::Span<float>> spans = Spans(values);
  spans[1] = spans[1].first(7);
  const auto report = worker->Reduce(spans);
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(report.status().message(), HasSubstr("'tensor1' [8] has 7 values, wanted 8"));
  Reduce(*worker, values);  // nothing was sent
}

TEST(Reduction, OtherCodecsAreRefused) {
  Cluster cluster({.aggregators = 1});
  const auto worker =
      Worker::JoinReduction(OptionsOf(0, 1), {.codec = SKIP}, Tensors(), cluster.Connect());
  EXPECT_EQ(worker.status().message(),
            "the codec of a reduction is skip, wanted one of fp32, bf16, fp16, int8, int4, "
            "one-bit, custom");
}

TEST(Reduction, RanksWithAnotherCodecOrOperationAreToldWhichDiffers) {
  for (const ReductionOptions& other :
       {ReductionOptions{.codec = ONE_BIT}, ReductionOptions{.codec = FLOAT32, .sum = true}}) {
    Cluster cluster({.aggregators = 1});
    std::vector<absl::Status> results(2);
    OnEachRank(2, [&](uint32_t rank) {
      WorkerOptions options = OptionsOf(rank, 2);
      options.join_timeout = absl::Seconds(1);
      const ReductionOptions reduction = rank == 0 ? ReductionOptions{.codec = FLOAT32} : other;
      results[rank] =
          Worker::JoinReduction(options, reduction, Tensors(), cluster.Connect()).status();
    });
    const bool first_is_refused = results[0].code() == absl::StatusCode::kFailedPrecondition;
    EXPECT_THAT(results[first_is_refused ? 0 : 1].message(),
                HasSubstr(other.sum ? "option sum is" : "option optimizer is 'codec="));
  }
}

class LateReductionTest : public ::testing::TestWithParam<Codec> {
 protected:
  static WorkerOptions Options(uint32_t rank) {
    WorkerOptions options = OptionsOf(rank, 2);
    options.round_deadline = absl::Seconds(2);  // of which busy machines need some
    options.min_workers = 1;
    return options;
  }
};

TEST_P(LateReductionTest, ALateCallGetsTheNewestAnswerAndItsTensorsComeLater) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  constexpr uint64_t kAlone = 4, kCalls = 8;
  absl::Notification is_alone, has_caught_up;
  Values later[2];  // the sum of the answers since
  OnEachRank(2, [&](uint32_t rank) {
    const auto worker = Join(Options(rank), {.codec = GetParam()}, cluster.Connect());
    if (rank == 0) {
      while (worker->steps() < kAlone) {
        Values values(kElements);
        Reduce(*worker, values);
      }
      is_alone.Notify();
      has_caught_up.WaitForNotification();
    } else {
      is_alone.WaitForNotification();
      Values values(kElements, 1.0f);
      const StepReport report = Reduce(*worker, values);
      EXPECT_EQ(worker->steps(), kAlone);
      EXPECT_EQ(report.steps_caught_up, kAlone - 1);
      EXPECT_GT(report.late_rounds, 0u);
      EXPECT_THAT(values, ::testing::Each(0.0f));
      has_caught_up.Notify();
    }
    later[rank].resize(kElements);
    while (worker->steps() < kCalls) {
      Values values(kElements);
      Reduce(*worker, values);
      for (size_t i = 0; i < kElements; ++i) later[rank][i] += values[i];
    }
    EXPECT_TRUE(worker->Leave().ok());
  });
  EXPECT_EQ(later[0], later[1]);
  if (GetParam() == FLOAT32) {
    EXPECT_THAT(later[0], ::testing::Each(0.0f));
  } else {
    EXPECT_THAT(later[0], ::testing::Each(::testing::Ge(0.25f)));  // of 0.5 at last
  }
}

TEST_P(LateReductionTest, AProcessTakesThePlaceOfOneThatIsGone) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  std::atomic<bool> is_back = false;
  OnEachRank(2, [&](uint32_t rank) {
    auto worker = Join(Options(rank), {.codec = GetParam()}, cluster.Connect());
    Values values(kElements, 1.0f);
    Reduce(*worker, values);
    if (rank == 0) {
      while (!is_back) {
        std::fill(values.begin(), values.end(), 1.0f);
        Reduce(*worker, values);
        absl::SleepFor(absl::Milliseconds(10));
      }
    } else {
      worker.reset();
      worker = Join(Options(rank), {.codec = GetParam()}, cluster.Connect());
      ASSERT_TRUE(worker->returned());
      EXPECT_GE(worker->steps(), 1u);
      std::fill(values.begin(), values.end(), 1.0f);
      Reduce(*worker, values);
      is_back = true;
    }
    EXPECT_TRUE(worker->Leave().ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Codecs, LateReductionTest,
                         ::testing::Values(FLOAT32, BFLOAT16, INT8, ONE_BIT),
                         [](const auto& info) { return absl::StrCat("codec", info.param); });

}  // namespace
}  // namespace signpost::testing
