// A job through the C ABI, and so through Session, as a training program in another language has
// it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "client/signpost.h"
#include "tests/cluster.h"
#include "worker/crew_threads.h"

namespace signpost::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint32_t kWorkers = 2;
constexpr size_t kElements = 3000;

// One worker, with one parameter of many elements.
class Rank {
 public:
  Rank(const Cluster& cluster, uint32_t rank, const char* resume)
      : rank_(rank), aggregators_(absl::StrJoin(cluster.targets(), ",")) {
    signpost_options_init(&options_);
    options_.aggregators = aggregators_.c_str();
    options_.job = "test";
    options_.rank = rank;
    options_.world_size = kWorkers;
    options_.block_elements = 64;
    options_.chunk_elements = 512;
    options_.freeze_step = 3;
    options_.resume = resume;
  }
  ~Rank() { signpost_close(session_); }

  int Join() {
    const uint64_t shape[] = {kElements};
    const signpost_parameter parameter = {"weights", shape, 1, values_.data(), 0, gradient_type_};
    return signpost_join(&options_, &parameter, 1, &session_, error_, sizeof error_);
  }

  // Which are both simulated: their memory is the host's (open_simulated_gpu.cc).
  void UseGpu(int32_t gpu, uint32_t gradient_type) {
    options_.gpu = gpu;
    gradient_type_ = gradient_type;
  }
  int SetStream(void* stream) {
    return signpost_set_stream(session_, stream, error_, sizeof error_);
  }

  int Step(signpost_report* report = nullptr) {
    const std::vector<float> gradient = Gradient();
    std::vector<uint16_t> bf16, fp16;  // which have such numbers
    for (const float g : gradient) {
      const uint32_t bits = std::bit_cast<uint32_t>(g);
      bf16.push_back(bits >> 16);
      fp16.push_back(g == 0 ? 0 : bits >> 31 << 15 | ((bits >> 13 & 0x3ffff) - (112 << 10)));
    }
    const void* gradients[] = {gradient.data()};
    if (gradient_type_ == SIGNPOST_GRADIENT_BF16) gradients[0] = bf16.data();
    if (gradient_type_ == SIGNPOST_GRADIENT_FP16) gradients[0] = fp16.data();
    return signpost_step(session_, gradients, 1, &rates_, 1, report, error_, sizeof error_);
  }

  int BeginStep() { return signpost_begin_step(session_, &rates_, 1, error_, sizeof error_); }
  int GradientReady(size_t parameter, const std::vector<float>& gradient) {
    return signpost_gradient_ready(session_, parameter, gradient.data(), error_, sizeof error_);
  }
  int FinishStep(signpost_report* report) {
    return signpost_finish_step(session_, report, error_, sizeof error_);
  }

  // Of the next step.
  std::vector<float> Gradient() const {
    std::vector<float> gradient(kElements);
    for (size_t i = 0; i < kElements; ++i) {
      gradient[i] = static_cast<float>((i * 7 + signpost_steps(session_) * 13 + rank_) % 17) - 8;
    }
    return gradient;
  }

  int Checkpoint(const char* directory) {
    return signpost_checkpoint(session_, directory, error_, sizeof error_);
  }
  int Leave() { return signpost_leave(session_, error_, sizeof error_); }

  signpost_session* session() { return session_; }
  signpost_options& options() { return options_; }
  std::vector<float>& values() { return values_; }
  const char* error() const { return error_; }

 private:
  const uint32_t rank_;
  const std::string aggregators_;
  signpost_options options_;
  const signpost_rates rates_ = [] {
    signpost_rates rates;
    signpost_rates_init(&rates);
    rates.learning_rate = 0.01;
    return rates;
  }();
  std::vector<float> values_ = std::vector<float>(kElements, 1);
  uint32_t gradient_type_ = SIGNPOST_GRADIENT_FP32;
  signpost_session* session_ = nullptr;
  char error_[512] = "";
};

TEST(CAbi, AJobThatIsSavedAndResumedEndsWithTheParametersOfOneThatIsNot) {
  const std::string directory = absl::StrCat(::testing::TempDir(), "/checkpoints");
  std::filesystem::remove_all(directory);
  constexpr uint64_t kSteps = 8, kSavedAt = 5;
  uint32_t expected[kWorkers] = {};
  {
    Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
    OnEachRank(kWorkers, [&](uint32_t index) {
      Rank rank(cluster, index, nullptr);
      ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
      while (signpost_steps(rank.session()) < kSteps) {
        if (signpost_steps(rank.session()) == kSavedAt) {
          EXPECT_EQ(rank.Checkpoint(nullptr), SIGNPOST_INVALID_ARGUMENT);
          ASSERT_EQ(rank.Checkpoint(directory.c_str()), SIGNPOST_OK) << rank.error();
        }
        ASSERT_EQ(rank.Step(), SIGNPOST_OK) << rank.error();
      }
      expected[index] = signpost_parameters_crc32c(rank.session());
      EXPECT_EQ(rank.Leave(), SIGNPOST_OK);
    });
  }
  uint64_t step = 0;
  char error[512] = "";
  EXPECT_EQ(signpost_checkpoint_step(directory.c_str(), &step, error, sizeof error), SIGNPOST_OK);
  EXPECT_EQ(step, kSavedAt);
  EXPECT_EQ(signpost_checkpoint_step("", &step, error, sizeof error), SIGNPOST_INVALID_ARGUMENT);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 3});
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, directory.c_str());
    ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
    EXPECT_EQ(signpost_steps(rank.session()), kSavedAt);
    EXPECT_STREQ(signpost_resume_warnings(rank.session()), "");
    while (signpost_steps(rank.session()) < kSteps) {
      ASSERT_EQ(rank.Step(), SIGNPOST_OK) << rank.error();
    }
    EXPECT_EQ(signpost_parameters_crc32c(rank.session()), expected[index]);
    EXPECT_EQ(rank.Leave(), SIGNPOST_OK);
  });

  Rank alone(cluster, 0, directory.c_str());
  alone.options().world_size = 1;
  EXPECT_EQ(alone.Join(), SIGNPOST_FAILED_PRECONDITION);
  EXPECT_THAT(alone.error(), HasSubstr("was taken of 2 workers, and 1 resume from it"));
  alone.options().resume_with_other_world_size = 1;
  EXPECT_EQ(alone.Join(), SIGNPOST_OK) << alone.error();
  EXPECT_EQ(signpost_steps(alone.session()), kSavedAt);
}

// Of a rank alone. Borrows the target.
signpost_options OptionsOf(const std::string& target, const char* job) {
  signpost_options options;
  signpost_options_init(&options);
  options.aggregators = target.c_str();
  options.job = job;
  return options;
}

// As embeddings that were tied by their memory instead of by their parameter.
TEST(CAbi, ParametersThatShareMemoryAreRefused) {
  Cluster cluster({.transport = Transport::kGrpc});
  char error[512];
  const std::string target = cluster.targets()[0];
  const signpost_options options = OptionsOf(target, "shared");
  const uint64_t shape[] = {4};
  float values[12] = {};
  signpost_session* session = nullptr;
  const auto join = [&](float* second) {
    const signpost_parameter parameters[] = {{"encoder", shape, 1, values + 4, 0, 0},
                                             {"decoder", shape, 1, second, 0, 0}};
    return signpost_join(&options, parameters, 2, &session, error, sizeof error);
  };
  for (float* second : {values + 1, values + 4, values + 7}) {
    EXPECT_EQ(join(second), SIGNPOST_INVALID_ARGUMENT);
    EXPECT_THAT(error, AllOf(HasSubstr("'encoder' [4]"), HasSubstr("'decoder' [4]"),
                             HasSubstr("share memory: what is trained once must be given once")));
  }
  ASSERT_EQ(join(values + 8), SIGNPOST_OK) << error;
  EXPECT_EQ(signpost_leave(session, error, sizeof error), SIGNPOST_OK) << error;
  signpost_close(session);
}

// As a program in another language may have, where its memory is gone.
TEST(CAbi, NullPointersAreRefused) {
  Cluster cluster({.transport = Transport::kGrpc});
  char error[512];
  const std::string target = cluster.targets()[0];
  signpost_options options = OptionsOf(target, "null");
  const uint64_t shape[] = {4};
  float values[4] = {};
  signpost_session* session = nullptr;
  signpost_parameter parameter = {"weights", shape, 1, /*values=*/nullptr, 0, 0};
  EXPECT_EQ(signpost_join(&options, &parameter, 1, &session, error, sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error, "tensor 'weights' [4]: it is a null pointer");
  parameter = {"weights", /*shape=*/nullptr, 1, values, 0, 0};
  EXPECT_EQ(signpost_join(&options, &parameter, 1, &session, error, sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error, "parameter weights has 1 dimensions and no shape");

  parameter = {"weights", shape, 1, values, 0, 0};
  ASSERT_EQ(signpost_join(&options, &parameter, 1, &session, error, sizeof error), SIGNPOST_OK)
      << error;
  signpost_rates rates;
  signpost_rates_init(&rates);
  const void* gradients[] = {nullptr};
  EXPECT_EQ(signpost_step(session, gradients, 1, &rates, 1, nullptr, error, sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error, "the gradient of tensor 'weights' [4]: it is a null pointer");
  gradients[0] = values;
  EXPECT_EQ(signpost_step(session, gradients, 1, &rates, 1, nullptr, error, sizeof error),
            SIGNPOST_OK);
  signpost_close(session);
}

// As a program may have that loads data in other processes.
TEST(CAbi, AForkHasNoPartInAJobAndLeavesItToItsParent) {
  Cluster cluster({.transport = Transport::kGrpc});
  char error[512] = "";
  const std::string target = cluster.targets()[0];
  signpost_options options = OptionsOf(target, "parent");
  options.join_timeout_s = 5;
  const uint64_t shape[] = {4};
  float values[4] = {}, gradient[4] = {1, 2, 3, 4};
  const void* gradients[] = {gradient};
  float* reduced[] = {gradient};
  const signpost_parameter parameter = {"weights", shape, 1, values, 0, 0};
  signpost_rates rates;
  signpost_rates_init(&rates);
  signpost_session* session = nullptr;
  signpost_reduction* reduction = nullptr;
  ASSERT_EQ(signpost_join(&options, &parameter, 1, &session, error, sizeof error), SIGNPOST_OK)
      << error;
  ASSERT_EQ(signpost_reduction_join(&options, "values", SIGNPOST_CODEC_FP32, 0, &parameter, 1,
                                    &reduction, error, sizeof error),
            SIGNPOST_OK)
      << error;
  const auto step = [&] {
    return signpost_step(session, gradients, 1, &rates, 1, nullptr, error, sizeof error);
  };

  // In the fork: the first that is not refused, and why the last was.
  const auto not_refused = [&]() -> std::string {
    signpost_options other = options;
    other.job = "child";
    signpost_session* joined = nullptr;
    signpost_reduction* joined_reduction = nullptr;
    if (signpost_join(&other, &parameter, 1, &joined, error, sizeof error) !=
        SIGNPOST_INVALID_ARGUMENT) {
      return "join";
    }
    if (signpost_reduction_join(&other, "values", SIGNPOST_CODEC_FP32, 0, &parameter, 1,
                                &joined_reduction, error,
                                sizeof error) != SIGNPOST_INVALID_ARGUMENT) {
      return "reduction_join";
    }
    if (step() != SIGNPOST_INVALID_ARGUMENT) return "step";
    if (signpost_reduce(reduction, reduced, 1, nullptr, error, sizeof error) !=
        SIGNPOST_INVALID_ARGUMENT) {
      return "reduce";
    }
    if (signpost_leave(session, error, sizeof error) != SIGNPOST_INVALID_ARGUMENT) return "leave";
    signpost_close(session);
    signpost_reduction_close(reduction);
    return error;
  };
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string said = not_refused();
    _exit(write(pipe_ends[1], said.data(), said.size()) < 0 ? 1 : 0);
  }
  close(pipe_ends[1]);
  std::string said;
  char bytes[512];
  for (ssize_t got; (got = read(pipe_ends[0], bytes, sizeof bytes)) > 0;) said.append(bytes, got);
  close(pipe_ends[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(said,
              HasSubstr(absl::StrCat("process ", getpid(), " is in a job, and this is process ",
                                     child, ", a fork of it")));

  EXPECT_EQ(step(), SIGNPOST_OK) << error;
  EXPECT_EQ(signpost_reduce(reduction, reduced, 1, nullptr, error, sizeof error), SIGNPOST_OK)
      << error;
  EXPECT_EQ(signpost_leave(session, error, sizeof error), SIGNPOST_OK) << error;
  EXPECT_EQ(signpost_reduction_leave(reduction, error, sizeof error), SIGNPOST_OK) << error;
  signpost_close(session);
  signpost_reduction_close(reduction);
}

TEST(CAbi, AStepInPartsIsAStep) {
  uint32_t digests[2][kWorkers] = {};
  for (const bool in_parts : {false, true}) {
    Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
    OnEachRank(kWorkers, [&](uint32_t index) {
      Rank rank(cluster, index, nullptr);
      ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
      for (uint64_t step = 0; step < 6; ++step) {
        if (!in_parts) {
          ASSERT_EQ(rank.Step(), SIGNPOST_OK) << rank.error();
          continue;
        }
        const std::vector<float> gradient = rank.Gradient();
        signpost_report report = {.step = 100};
        ASSERT_EQ(rank.BeginStep(), SIGNPOST_OK) << rank.error();
        EXPECT_EQ(rank.FinishStep(&report), SIGNPOST_FAILED_PRECONDITION);
        EXPECT_EQ(rank.GradientReady(1, gradient), SIGNPOST_INVALID_ARGUMENT);
        ASSERT_EQ(rank.GradientReady(0, gradient), SIGNPOST_OK) << rank.error();
        EXPECT_EQ(report.step, 100) << "outputs are untouched";
        ASSERT_EQ(rank.FinishStep(&report), SIGNPOST_OK) << rank.error();
        EXPECT_EQ(report.step, step);
        EXPECT_EQ(report.codec, step >= 3 ? SIGNPOST_CODEC_ONE_BIT : SIGNPOST_CODEC_FP32);
      }
      digests[in_parts][index] = signpost_parameters_crc32c(rank.session());
      EXPECT_EQ(rank.Leave(), SIGNPOST_OK);
    });
  }
  EXPECT_EQ(digests[0][0], digests[0][1]);
  EXPECT_EQ(digests[1][0], digests[0][0]);
  EXPECT_EQ(digests[1][1], digests[0][0]);
}

// Steps 5 and 6 are an interval of two, 7 to 10 one of four.
void UseZeroOneAdam(signpost_options& options) {
  options.zero_one = 1;
  options.var_update_scaler = 1;
  options.local_step_scaler = 2;
  options.local_step_clipper = 4;
}

TEST(CAbi, ZeroOneAdamSaysWhichStepsSentNothingAndWhenRanksAreAlike) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  uint32_t digests[kWorkers][12] = {};
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    UseZeroOneAdam(rank.options());
    ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
    EXPECT_EQ(signpost_is_synchronised(rank.session()), 1);
    const std::set<uint64_t> local_steps = {5, 7, 8, 9, 11};
    double sent_bits = 0;
    for (uint64_t step = 0; step < 12; ++step) {
      signpost_report report = {};
      ASSERT_EQ(rank.Step(&report), SIGNPOST_OK) << rank.error();
      // The variance is updated in steps 0 and 1, and next in 3.
      uint32_t wanted = step < 2 ? SIGNPOST_CODEC_FP32 : SIGNPOST_CODEC_ONE_BIT;
      if (local_steps.contains(step)) wanted = SIGNPOST_CODEC_NONE;
      EXPECT_EQ(report.codec, wanted) << step;
      EXPECT_EQ(signpost_is_synchronised(rank.session()), wanted != SIGNPOST_CODEC_NONE) << step;
      // A block of 64 is its signs and a scale; of 3000 elements there are 47.
      if (step < 2) sent_bits += 32;
      if (wanted == SIGNPOST_CODEC_ONE_BIT) sent_bits += (3008 + 47 * 32) / 3000.0;
      EXPECT_NEAR(report.sent_bits, sent_bits / (step + 1), 0.1) << step;
      digests[index][step] = signpost_parameters_crc32c(rank.session());
    }
    EXPECT_EQ(rank.Leave(), SIGNPOST_OK);
  });
  EXPECT_EQ(digests[0][10], digests[1][10]);
  EXPECT_NE(digests[0][9], digests[1][9]);
}

TEST(CAbi, RefusesOptionsThatZeroOneAdamCannotHave) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  const auto why_not = [&](void (*change)(signpost_options&)) {
    Rank rank(cluster, 0, nullptr);
    UseZeroOneAdam(rank.options());
    change(rank.options());
    EXPECT_EQ(rank.Join(), SIGNPOST_INVALID_ARGUMENT);
    return std::string(rank.error());
  };
  EXPECT_THAT(why_not([](signpost_options& options) { options.lamb = 1; }),
              HasSubstr("1-bit LAMB are different optimizers"));
  for (const auto change : {
           +[](signpost_options& options) { options.freeze_step = SIGNPOST_NEVER; },
           +[](signpost_options& options) { options.freeze_step = SIGNPOST_AUTO; },
       }) {
    EXPECT_THAT(why_not(change), HasSubstr("freeze_step of 0/1 Adam is a number of steps"));
  }
  EXPECT_THAT(why_not([](signpost_options& options) { options.var_update_scaler = 0; }),
              HasSubstr("var_update_scaler is 0"));
  EXPECT_THAT(why_not([](signpost_options& options) { options.local_step_scaler = UINT64_MAX; }),
              HasSubstr("local_step_scaler is 18446744073709551615"));
  EXPECT_THAT(why_not([](signpost_options& options) { options.local_step_clipper = 0; }),
              HasSubstr("local_step_clipper is 0"));
}

// 1-bit Adam's, in double precision and with one scale for all elements.
class DeepSpeedReference {
 public:
  void Step(int step, const std::vector<float> (&gradients)[kWorkers]) {
    if (step == 0) return;
    std::vector<double> mean(kElements);
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      std::vector<double> put_in(gradients[rank].begin(), gradients[rank].end());
      if (step >= 3) {
        for (size_t i = 0; i < kElements; ++i) put_in[i] = 0.9 * m_[i] + 0.1 * put_in[i];
        put_in = Compress(std::move(put_in), errors_[rank]);
      }
      for (size_t i = 0; i < kElements; ++i) mean[i] += put_in[i] / kWorkers;
    }
    if (step >= 3) mean = Compress(std::move(mean), errors_[kWorkers]);
    for (size_t i = 0; i < kElements; ++i) {
      m_[i] = step >= 3 ? mean[i] : 0.9 * m_[i] + 0.1 * mean[i];
      if (step < 3) v_[i] = 0.999 * v_[i] + 0.001 * mean[i] * mean[i];
      x_[i] -= 0.01 * m_[i] / (std::sqrt(v_[i]) + 1e-8);
    }
  }

  const std::vector<double>& parameters() const { return x_; }

 private:
  static std::vector<double> Compress(std::vector<double> u, std::vector<double>& error) {
    double squares = 0;
    for (size_t i = 0; i < kElements; ++i) squares += std::pow(u[i] += error[i], 2);
    for (size_t i = 0; i < kElements; ++i) {
      const double sent = std::copysign(std::sqrt(squares / kElements), u[i]);
      error[i] = u[i] - sent;
      u[i] = sent;
    }
    return u;
  }

  std::vector<double> x_ = std::vector<double>(kElements, 1);
  std::vector<double> m_ = std::vector<double>(kElements), v_ = m_;
  std::vector<double> errors_[kWorkers + 1] = {m_, m_, m_};  // the aggregator's last
};

TEST(CAbi, AsDeepSpeedItHasNeitherCorrectionNorFloorAndOneScaleForEachTensor) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  std::vector<float> gradients[8][kWorkers];
  std::vector<float> values[8];  // rank 0's
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    rank.options().as_deepspeed = 1;
    rank.options().variance_floor = 0.9;
    ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
    for (int step = 0; step < 8; ++step) {
      gradients[step][index] = rank.Gradient();
      ASSERT_EQ(rank.Step(), SIGNPOST_OK) << rank.error();
      if (index == 0) values[step] = rank.values();
    }
    EXPECT_EQ(rank.Leave(), SIGNPOST_OK);
  });
  DeepSpeedReference reference;
  for (int step = 0; step < 8; ++step) {
    reference.Step(step, gradients[step]);
    for (size_t i = 0; i < kElements; ++i) {
      ASSERT_NEAR(values[step][i], reference.parameters()[i], 1e-5) << "step " << step << ", " << i;
    }
  }
}

TEST(CAbi, AsDeepSpeedTheFirstStepIsLostAndSoOneThatFreezesThenIsRefused) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1});
  Rank rank(cluster, 0, nullptr);
  rank.options().as_deepspeed = 1;
  rank.options().freeze_step = 1;
  EXPECT_EQ(rank.Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(rank.error(), HasSubstr("freeze_step is 1, wanted at least 2: as DeepSpeed"));
}

TEST(CAbi, RanksThatBeginApartAreRefusedUnlessTheyAreToStartFromRank0) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  uint32_t crc[kWorkers] = {};
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    rank.values().assign(kElements, index + 0.5f);
    rank.options().start_from_rank_0 = 1;
    ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
    EXPECT_THAT(rank.values(), Each(0.5f));
    for (int step = 0; step < 5; ++step) ASSERT_EQ(rank.Step(), SIGNPOST_OK) << rank.error();
    crc[index] = signpost_parameters_crc32c(rank.session());
    EXPECT_EQ(rank.Leave(), SIGNPOST_OK);
  });
  EXPECT_EQ(crc[0], crc[1]);

  std::string errors;
  absl::Mutex mutex;
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    rank.values().assign(kElements, index + 0.5f);
    rank.options().join_timeout_s = 2;
    EXPECT_NE(rank.Join(), SIGNPOST_OK);
    absl::MutexLock lock(&mutex);
    errors += rank.error();
  });
  EXPECT_THAT(errors, HasSubstr("all workers must start from the same parameters"));
}

TEST(CAbi, ParametersOfRank0ThatAreNotFiniteAreNamedOnAllRanks) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    if (index == 0) rank.values()[100] = std::nanf("");
    rank.options().start_from_rank_0 = 1;
    EXPECT_EQ(rank.Join(), SIGNPOST_INVALID_ARGUMENT);
    EXPECT_THAT(rank.error(), HasSubstr("rank 0 begins with are not finite, or out of range: "
                                        "tensor 'weights' [3000], elements 64 to 127"));
    if (index == 0) {
      EXPECT_EQ(rank.values()[101], Rank(cluster, 0, nullptr).values()[101]);
    }
  });
}

TEST(CAbi, WorkersOnGpusHaveTheBytesOfThoseOnTheHost) {
  // GPU of each rank, and what its gradients are.
  constexpr int32_t kGpus[][kWorkers] = {{-1, -1}, {0, -1}, {0, 0}, {-1, 1}};
  std::set<uint32_t> digests;
  for (const auto& gpus : kGpus) {
    for (const uint32_t type :
         {SIGNPOST_GRADIENT_FP32, SIGNPOST_GRADIENT_BF16, SIGNPOST_GRADIENT_FP16}) {
      Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
      absl::Mutex mutex;
      OnEachRank(kWorkers, [&](uint32_t index) {
        Rank rank(cluster, index, nullptr);
        rank.values().assign(kElements, index + 0.5f);
        rank.options().start_from_rank_0 = 1;
        if (gpus[index] >= 0) rank.UseGpu(gpus[index], type);
        ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
        EXPECT_THAT(rank.values(), Each(0.5f));
        ASSERT_EQ(rank.SetStream(nullptr), SIGNPOST_OK) << rank.error();
        for (int step = 0; step < 7; ++step) ASSERT_EQ(rank.Step(), SIGNPOST_OK) << rank.error();
        const uint32_t digest = signpost_parameters_crc32c(rank.session());
        EXPECT_EQ(rank.Leave(), SIGNPOST_OK);
        absl::MutexLock lock(&mutex);
        digests.insert(digest);
      });
    }
  }
  EXPECT_EQ(digests.size(), 1u);
}

TEST(CAbi, AWorkerSaysWhichGpuItTrainsOn) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1});
  ::testing::internal::CaptureStderr();
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    if (index == 1) rank.UseGpu(0, SIGNPOST_GRADIENT_FP32);
    ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
  });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "signpost: rank 1: trains on GPU 0 (simulated)\n");
}

TEST(CAbi, AStreamThatIsNoneOfTheGpusIsRefused) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1});
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    rank.UseGpu(0, SIGNPOST_GRADIENT_FP32);
    rank.options().exchange_timeout_s = 5;
    ASSERT_EQ(rank.Join(), SIGNPOST_OK) << rank.error();
    EXPECT_EQ(rank.SetStream(reinterpret_cast<void*>(0x1234)), SIGNPOST_INVALID_ARGUMENT);
    EXPECT_THAT(
        rank.error(),
        HasSubstr("a stream of GPU 0 (simulated) is needed, where the tensors are, and this is"));
    EXPECT_EQ(rank.Step(), SIGNPOST_OK) << rank.error();
  });
}

TEST(CAbi, WhatCannotBeOnAGpuIsRefused) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1});
  Rank on_host(cluster, 0, nullptr);
  on_host.UseGpu(-1, SIGNPOST_GRADIENT_BF16);
  EXPECT_EQ(on_host.Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(on_host.error(), HasSubstr("gradient_type of parameter weights: on the host"));
  on_host.UseGpu(-1, 3);
  EXPECT_EQ(on_host.Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(on_host.error(), HasSubstr("gradient_type of parameter weights is 3; there are 0"));
  on_host.UseGpu(-2, SIGNPOST_GRADIENT_FP32);
  EXPECT_EQ(on_host.Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(on_host.error(), HasSubstr("gpu is -2, wanted a GPU"));
  Rank nowhere(cluster, 0, nullptr);
  nowhere.UseGpu(7, SIGNPOST_GRADIENT_FP32);
  EXPECT_EQ(nowhere.Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(nowhere.error(), HasSubstr("GPU 7 cannot be used: "));
}

TEST(CAbi, AWorkerHasTheThreadsThatItsOptionsSay) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1});
  const std::string aggregators = absl::StrJoin(cluster.targets(), ",");
  const uint64_t shape[] = {1'000'000};
  std::vector<float> values(shape[0]);
  const signpost_parameter parameter = {"weights", shape, 1, values.data(), 0};
  for (const uint32_t threads : {1u, 3u, 257u}) {
    signpost_options options;
    signpost_options_init(&options);
    options.aggregators = aggregators.c_str();
    const std::string job = absl::StrCat("with ", threads);
    options.job = job.c_str();
    options.world_size = 1;
    options.threads = threads;
    signpost_session* session = nullptr;
    char error[512] = "";
    const int code = signpost_join(&options, &parameter, 1, &session, error, sizeof error);
    if (threads > 256) {
      EXPECT_EQ(code, SIGNPOST_INVALID_ARGUMENT);
      EXPECT_THAT(std::string(error), HasSubstr("257 threads"));
      continue;
    }
    ASSERT_EQ(code, SIGNPOST_OK) << error;
    EXPECT_EQ(CrewThreads(), threads - 1);
    EXPECT_EQ(signpost_leave(session, error, sizeof error), SIGNPOST_OK) << error;
    signpost_close(session);
  }
}

TEST(CAbi, AReductionGivesAllRanksTheMean) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  OnEachRank(kWorkers, [&](uint32_t index) {
    Rank rank(cluster, index, nullptr);
    char error[512] = "";
    const uint64_t shape[] = {kElements};
    const signpost_parameter tensors[] = {{"a", shape, 1, nullptr, 0},
                                          {"b", nullptr, 0, nullptr, 7}};
    signpost_reduction* reduction = nullptr;
    ASSERT_EQ(signpost_reduction_join(&rank.options(), "pair", SIGNPOST_CODEC_FP32, /*sum=*/0,
                                      tensors, 2, &reduction, error, sizeof error),
              SIGNPOST_OK)
        << error;
    std::vector<float> a(kElements, index + 1.0f);
    float b = 10.0f * index;
    float* const values[] = {a.data(), &b};
    EXPECT_EQ(signpost_reduce(reduction, values, 1, nullptr, error, sizeof error),
              SIGNPOST_INVALID_ARGUMENT);
    signpost_report report;
    ASSERT_EQ(signpost_reduce(reduction, values, 2, &report, error, sizeof error), SIGNPOST_OK)
        << error;
    EXPECT_THAT(a, Each(1.5f));
    EXPECT_EQ(b, 5);
    EXPECT_EQ(report.codec, SIGNPOST_CODEC_FP32);
    EXPECT_GT(report.sent_bytes, 4 * kElements);
    EXPECT_EQ(signpost_reduction_leave(reduction, error, sizeof error), SIGNPOST_OK) << error;
    signpost_reduction_close(reduction);
  });
}

// On one that is simulated; another stream than the default one it does not know.
TEST(CAbi, AReductionOnAGpuFollowsTheStreamThatItIsGiven) {
  ASSERT_EQ(signpost_has_cuda(), 1);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1});
  Rank rank(cluster, 0, nullptr);
  rank.options().world_size = 1;
  rank.options().exchange_timeout_s = 5;
  rank.UseGpu(0, SIGNPOST_GRADIENT_FP32);
  char error[512] = "";
  const uint64_t shape[] = {kElements};
  const signpost_parameter tensor = {"a", shape, 1, nullptr, 0};
  signpost_reduction* reduction = nullptr;
  ASSERT_EQ(signpost_reduction_join(&rank.options(), "on a GPU", SIGNPOST_CODEC_ONE_BIT, 0, &tensor,
                                    1, &reduction, error, sizeof error),
            SIGNPOST_OK)
      << error;
  std::vector<float> a(kElements, 1);
  float* const values[] = {a.data()};
  EXPECT_EQ(signpost_reduce(reduction, values, 1, nullptr, error, sizeof error), SIGNPOST_OK)
      << error;
  void* const unknown = reinterpret_cast<void*>(0x1234);
  EXPECT_EQ(signpost_reduction_set_stream(reduction, unknown, error, sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(error, HasSubstr("a stream of GPU 0 (simulated) is needed"));
  EXPECT_EQ(signpost_reduce(reduction, values, 1, nullptr, error, sizeof error), SIGNPOST_OK)
      << error;
  signpost_reduction_close(reduction);
}

TEST(CAbi, AReductionNeedsANameAndACodecThatThereIs) {
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 1});
  Rank rank(cluster, 0, nullptr);
  char error[512] = "";
  const signpost_parameter scalar = {"scalar", nullptr, 0, nullptr, 0};
  signpost_reduction* reduction = nullptr;
  EXPECT_EQ(signpost_reduction_join(&rank.options(), nullptr, SIGNPOST_CODEC_FP32, 0, &scalar, 1,
                                    &reduction, error, sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error, "a reduction needs a name");
  EXPECT_EQ(signpost_reduction_join(&rank.options(), "name", 17, 0, &scalar, 1, &reduction, error,
                                    sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_THAT(error, HasSubstr("codec of a reduction is codec 17, wanted one of fp32, bf16, "));
}

}  // namespace
}  // namespace signpost::testing
