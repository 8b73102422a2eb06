// Two threads that call one session through the C ABI: each call does its work, or is refused and
// changes nothing. With --config=tsan it shows that they do not meet in the session.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_join.h"
#include "client/signpost.h"
#include "tests/cluster.h"

namespace signpost::testing {
namespace {

constexpr size_t kElements = 3000;
constexpr uint64_t kSteps = 100;

// The only worker of a job, whose gradient is always the same.
class OneRank {
 public:
  OneRank(const Cluster& cluster, const char* job) {
    const std::string aggregators = absl::StrJoin(cluster.targets(), ",");
    signpost_options options;
    signpost_options_init(&options);
    options.aggregators = aggregators.c_str();
    options.job = job;
    options.world_size = 1;
    options.block_elements = 64;
    options.chunk_elements = 512;
    options.freeze_step = 3;
    const uint64_t shape[] = {kElements};
    const signpost_parameter parameter = {.name = "x",
                                          .shape = shape,
                                          .dimensions = 1,
                                          .values = values_.data()};
    char error[256] = "";
    EXPECT_EQ(signpost_join(&options, &parameter, 1, &session_, error, sizeof error), 0) << error;
    for (size_t i = 0; i < kElements; ++i) gradient_[i] = static_cast<float>(i % 17) - 8;
  }
  ~OneRank() { signpost_close(session_); }

  int Step(char* error, size_t size) {
    const void* gradients[] = {gradient_.data()};
    const signpost_rates rates = {
        .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8};
    return signpost_step(session_, gradients, 1, &rates, 1, nullptr, error, size);
  }

  signpost_session* session() { return session_; }
  std::vector<float>& values() { return values_; }

 private:
  std::vector<float> values_ = std::vector<float>(kElements, 1), gradient_ = values_;
  signpost_session* session_ = nullptr;
};

// One call of a session; returns its code.
int CallAtRandom(OneRank& rank, const std::string& directory, std::mt19937& random, char* error,
                 size_t size) {
  signpost_state* state = nullptr;
  int code = 0;
  switch (random() % 8) {
    case 0:
      code = signpost_checkpoint(rank.session(), directory.c_str(), error, size);
      break;
    case 1:
      code = signpost_save_state(rank.session(), &state, error, size);
      break;
    case 2:
      signpost_parameters_crc32c(rank.session());
      break;
    case 3:
      signpost_is_synchronised(rank.session());
      break;
    default:
      code = rank.Step(error, size);
  }
  signpost_free_state(state);
  return code;
}

TEST(SessionThreads, TakeTurnsOrAreRefusedAndLoseNothing) {
  const Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  const std::string directory = ::testing::TempDir() + "/session_threads";
  std::filesystem::create_directories(directory);
  OneRank shared(cluster, "shared"), alone(cluster, "alone");
  std::atomic<int> done = 0, refused = 0;
  const auto call = [&](uint32_t seed) {
    std::mt19937 random(seed);
    while (signpost_steps(shared.session()) < kSteps) {
      char error[256] = "";
      const int code = CallAtRandom(shared, directory, random, error, sizeof error);
      if (code == 0) {
        ++done;
        continue;
      }
      ++refused;
      EXPECT_EQ(code, SIGNPOST_FAILED_PRECONDITION) << error;
      EXPECT_NE(std::string(error).find("while another thread is in"), std::string::npos) << error;
    }
  };
  std::thread other(call, 1);
  call(2);
  other.join();
  EXPECT_GT(refused, 0);
  // Steps that were refused have left no trace.
  char error[256] = "";
  while (signpost_steps(alone.session()) < signpost_steps(shared.session())) {
    ASSERT_EQ(alone.Step(error, sizeof error), 0) << error;
  }
  EXPECT_EQ(shared.values(), alone.values());
}

}  // namespace
}  // namespace signpost::testing
