// Jobs that train shards of the same tensors, through the C ABI: client/python/tests/shards_test.py
// has them under FSDP2.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/signpost.h"
#include "tests/cluster.h"

namespace signpost::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr uint64_t kElements = 3000, kSteps = 120;

// Adds up over several threads, which all call it the same number of times.
class Sums {
 public:
  explicit Sums(uint32_t threads) : threads_(threads) {}

  void Add(absl::Span<double> numbers) {
    const absl::MutexLock lock(&mutex_);
    const uint64_t round = round_;
    if (arrived_ == 0) total_.assign(numbers.size(), 0);
    for (size_t i = 0; i < numbers.size(); ++i) total_[i] += numbers[i];
    if (++arrived_ == threads_) {
      arrived_ = 0;
      last_ = total_;
      ++round_;
    }
    const auto is_over = [&] { return round_ > round; };
    mutex_.Await(absl::Condition(&is_over));
    std::copy(last_.begin(), last_.end(), numbers.begin());
  }

 private:
  const uint32_t threads_;
  absl::Mutex mutex_;
  uint32_t arrived_ = 0;
  uint64_t round_ = 0;
  std::vector<double> total_, last_;
};

using Sum = std::function<int(absl::Span<double>)>;

int CallSum(void* context, double* numbers, size_t count) {
  return (*static_cast<Sum*>(context))(absl::MakeSpan(numbers, count));
}

// A worker that has elements [begin, end) of a tensor, in a job of its own.
class Shard {
 public:
  Shard(const Cluster& cluster, uint64_t begin, uint64_t end, Sum sum)
      : begin_(begin),
        aggregator_(cluster.targets()[0]),
        job_(absl::StrCat("shard-", begin, "-to-", end)),
        sum_(std::move(sum)),
        values_(end - begin, 1) {
    signpost_options_init(&options_);
    options_.aggregators = aggregator_.c_str();
    options_.job = job_.c_str();
    options_.world_size = 1;
    options_.block_elements = 8;
    options_.freeze_step = SIGNPOST_AUTO;
    options_.variance_refresh_interval = SIGNPOST_AUTO;
    signpost_rates_init(&rates_);
    if (sum_ == nullptr) return;
    options_.shards = 2;
    options_.sum_over_shards = CallSum;
    options_.sum_context = &sum_;
  }
  ~Shard() { signpost_close(session_); }

  int Join() {
    const uint64_t shape[] = {values_.size()};
    const signpost_parameter parameter = {"weights",
                                          shape,
                                          1,
                                          values_.data(),
                                          0,
                                          SIGNPOST_GRADIENT_FP32,
                                          options_.shards > 1 ? whole_elements_ : 0};
    return signpost_join(&options_, &parameter, 1, &session_, error_, sizeof error_);
  }

  // Later elements have larger gradients, and those of the second half grow: it would freeze later.
  int Step() {
    const uint64_t step = signpost_steps(session_);
    std::vector<float> gradient(values_.size());
    for (uint64_t i = 0; i < gradient.size(); ++i) {
      const uint64_t element = begin_ + i;
      const float size = element < kElements / 2 ? 1 : 1 + 0.05f * step;
      gradient[i] = size * (static_cast<float>((element * 7 + step * 13) % 17) - 8);
    }
    const void* gradients[] = {gradient.data()};
    signpost_report report;
    const int code =
        signpost_step(session_, gradients, 1, &rates_, 1, &report, error_, sizeof error_);
    if (code == SIGNPOST_OK) codecs_.push_back(report.codec);
    return code;
  }

  signpost_options& options() { return options_; }
  void set_whole_elements(uint64_t elements) { whole_elements_ = elements; }
  const std::vector<uint32_t>& codecs() const { return codecs_; }
  const std::vector<float>& values() const { return values_; }
  const char* error() const { return error_; }

 private:
  const uint64_t begin_;
  const std::string aggregator_, job_;
  Sum sum_;
  uint64_t whole_elements_ = kElements;
  std::vector<float> values_;
  signpost_options options_;
  signpost_rates rates_;
  signpost_session* session_ = nullptr;
  std::vector<uint32_t> codecs_;  // by step
  char error_[512] = "";
};

TEST(Shards, DecideByTheWholeTensorAndHaveItsBits) {
  Cluster cluster({.transport = Transport::kGrpc});
  Shard whole(cluster, 0, kElements, nullptr);
  ASSERT_EQ(whole.Join(), SIGNPOST_OK) << whole.error();
  for (uint64_t step = 0; step < kSteps; ++step) {
    ASSERT_EQ(whole.Step(), SIGNPOST_OK) << whole.error();
  }
  EXPECT_THAT(whole.codecs(), Contains(SIGNPOST_CODEC_ONE_BIT));

  Sums sums(/*threads=*/2);
  const uint64_t bounds[] = {0, 1000, kElements};
  OnEachRank(2, [&](uint32_t index) {
    Shard shard(cluster, bounds[index], bounds[index + 1], [&](absl::Span<double> numbers) {
      sums.Add(numbers);
      return 0;
    });
    ASSERT_EQ(shard.Join(), SIGNPOST_OK) << shard.error();
    for (uint64_t step = 0; step < kSteps; ++step) {
      ASSERT_EQ(shard.Step(), SIGNPOST_OK) << shard.error();
    }
    EXPECT_EQ(shard.codecs(), whole.codecs());
    EXPECT_EQ(shard.values(), std::vector<float>(whole.values().begin() + bounds[index],
                                                 whole.values().begin() + bounds[index + 1]));
  });
}

TEST(Shards, ASumThatFailsEndsTheStep) {
  Cluster cluster({.transport = Transport::kGrpc});
  int calls = 0;
  Shard shard(cluster, 0, 1000, [&](absl::Span<double>) { return ++calls; });
  shard.options().freeze_step = 2;
  shard.options().variance_refresh_interval = 0;
  ASSERT_EQ(shard.Join(), SIGNPOST_OK) << shard.error();
  EXPECT_EQ(shard.Step(), SIGNPOST_OK) << shard.error();
  EXPECT_EQ(shard.Step(), SIGNPOST_OK) << shard.error();
  const std::vector<float> before = shard.values();
  EXPECT_EQ(shard.Step(), 10);
  EXPECT_THAT(shard.error(), HasSubstr("the sums over the shards of the model have failed"));
  EXPECT_EQ(shard.values(), before);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(shard.Step(), SIGNPOST_FAILED_PRECONDITION);
}

TEST(Shards, RefuseWhatNeedsMoreOfAWholeTensorThanSums) {
  Cluster cluster({.transport = Transport::kGrpc});
  const auto expect_refused = [&](const std::function<void(signpost_options&)>& set,
                                  const std::string& why) {
    Shard shard(cluster, 0, 1000, [](absl::Span<double>) { return 0; });
    shard.options().freeze_step = 2;
    shard.options().variance_refresh_interval = 0;
    set(shard.options());
    EXPECT_EQ(shard.Join(), SIGNPOST_INVALID_ARGUMENT);
    EXPECT_THAT(shard.error(), HasSubstr(why));
  };
  expect_refused([](signpost_options& options) { options.shards = 1; },
                 "shards is 1 with sum_over_shards");
  expect_refused([](signpost_options& options) { options.sum_over_shards = nullptr; },
                 "shards is 2 without sum_over_shards");
  expect_refused([](signpost_options& options) { options.lamb = 1; },
                 "1-bit LAMB does not train shards");
  expect_refused([](signpost_options& options) { options.as_deepspeed = 1; },
                 "where a tensor has one scale as a whole");
  expect_refused([](signpost_options& options) { options.node = "unix:/nowhere"; },
                 "a node's worker, which trains whole tensors");
  expect_refused(
      [](signpost_options& options) {
        options.min_workers = 1;
        options.round_deadline_s = 1;
        options.world_size = 2;
      },
      "min_workers is 1, but shards of one model are trained in step");
}

TEST(Shards, ThatAreLargerThanTheirTensorAreRefused) {
  Cluster cluster({.transport = Transport::kGrpc});
  Shard shard(cluster, 0, 1000, [](absl::Span<double>) { return 0; });
  shard.set_whole_elements(999);
  EXPECT_EQ(shard.Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(shard.error(), HasSubstr("whole_elements of parameter weights is 999, wanted 1000"));
}

}  // namespace
}  // namespace signpost::testing
