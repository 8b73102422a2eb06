// What the C ABI does without an aggregator; tests/c_abi_test.cc has jobs.

#include "client/signpost.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// Called instead of taking this much memory, or more, at once; it throws.
constexpr size_t kMuchMemory = 1 << 20;
void (*on_much_memory)() = nullptr;

}  // namespace

void* operator new(size_t size) {
  if (size >= kMuchMemory && on_much_memory != nullptr) on_much_memory();
  if (void* memory = std::malloc(size); memory != nullptr) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

// What comes of joining a job with so many parameters that their descriptions take much memory.
class SignpostJoinTest : public testing::Test {
 protected:
  SignpostJoinTest() {
    signpost_options_init(&options_);
    options_.aggregators = "127.0.0.1:1";
    options_.job = "test";
    options_.join_timeout_s = 0.1;
    for (size_t i = 0; i < kParameters; ++i) names_.push_back("weight " + std::to_string(i));
    for (const std::string& name : names_) {
      parameters_.push_back({.name = name.c_str(), .values = &values_[parameters_.size()]});
    }
  }
  ~SignpostJoinTest() override { on_much_memory = nullptr; }

  int Join() {
    return signpost_join(&options_, parameters_.data(), kParameters, &session_, error_,
                         sizeof error_);
  }

  static constexpr size_t kParameters = 20'000;

  signpost_options options_;
  std::vector<float> values_ = std::vector<float>(kParameters);
  std::vector<std::string> names_;
  std::vector<signpost_parameter> parameters_;  // scalars
  signpost_session* session_ = nullptr;
  char error_[64] = "untouched";
};

TEST_F(SignpostJoinTest, SaysThatThereIsNoMemory) {
  on_much_memory = [] { throw std::bad_alloc(); };
  EXPECT_EQ(Join(), SIGNPOST_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(error_, "out of memory");
  EXPECT_EQ(session_, nullptr);
}

TEST_F(SignpostJoinTest, LetsNoOtherExceptionOut) {
  on_much_memory = [] { throw std::runtime_error("much memory"); };
  EXPECT_EQ(Join(), 13);  // INTERNAL
  EXPECT_STREQ(error_, "much memory");
  on_much_memory = [] { throw 1; };
  EXPECT_EQ(Join(), 13);
  EXPECT_STREQ(error_, "an exception that is no std::exception");
}

TEST_F(SignpostJoinTest, RefusesAParameterWithoutAName) {
  parameters_[0].name = nullptr;
  EXPECT_EQ(Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error_, "parameter 0 has no name");
}

TEST_F(SignpostJoinTest, RefusesAShapeThatNoMemoryHasBeforeItReadsIt) {
  const uint64_t shape[] = {static_cast<uint64_t>(-1)};
  parameters_[0].shape = shape;
  parameters_[0].dimensions = 1;
  EXPECT_EQ(Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_).find("has more than"), std::string::npos) << error_;
}

TEST_F(SignpostJoinTest, RefusesTimesThatAreNoNumbers) {
  options_.exchange_timeout_s = std::nan("");
  EXPECT_EQ(Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error_, "exchange_timeout_s is not a number");
}

TEST_F(SignpostJoinTest, RefusesStepsThatMayTakeNoTime) {
  for (const double seconds : {0, -1}) {
    options_.exchange_timeout_s = seconds;
    EXPECT_EQ(Join(), SIGNPOST_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error_).find(", wanted more than 0"), std::string::npos) << error_;
  }
}

TEST_F(SignpostJoinTest, RefusesToResumeFromADirectoryThatIsNotThere) {
  options_.resume = "/nowhere/at/all";
  EXPECT_EQ(Join(), SIGNPOST_NOT_FOUND);
  EXPECT_NE(std::string(error_).find("/nowhere/at/all"), std::string::npos) << error_;
}

// What else there is to know of an error, tests/c_abi_test.cc has.
TEST_F(SignpostJoinTest, HasAnExitCodeForEachCode) {
  EXPECT_EQ(signpost_exit_code(SIGNPOST_OK), 0);
  EXPECT_EQ(signpost_exit_code(SIGNPOST_INVALID_ARGUMENT), 64);
  EXPECT_EQ(signpost_exit_code(SIGNPOST_NOT_FOUND), 64);
  EXPECT_EQ(signpost_exit_code(SIGNPOST_DATA_LOSS), 65);
  EXPECT_EQ(signpost_exit_code(SIGNPOST_UNAVAILABLE), 69);
  EXPECT_EQ(signpost_exit_code(SIGNPOST_DEADLINE_EXCEEDED), 75);
  EXPECT_EQ(signpost_exit_code(SIGNPOST_FAILED_PRECONDITION), 76);
  EXPECT_EQ(signpost_exit_code(13), 70);  // INTERNAL
}

TEST(SignpostDeathTest, ReplacesTheExitStatusThatItIsGiven) {
  const auto end = [](int with) {
    std::atexit([] { std::fprintf(stderr, "first handler"); });
    signpost_replace_exit_status(2, 40);
    signpost_replace_exit_status(1, 42);
    std::exit(with);
  };
  EXPECT_EXIT(end(1), ::testing::ExitedWithCode(42), "first handler");
  EXPECT_EXIT(end(2), ::testing::ExitedWithCode(2), "first handler");
  EXPECT_EXIT(end(0), ::testing::ExitedWithCode(0), "first handler");
}

TEST_F(SignpostJoinTest, CutsMessagesToTheirBuffer) {
  parameters_[0].name = nullptr;
  char error[10];
  EXPECT_EQ(signpost_join(&options_, parameters_.data(), 1, &session_, error, sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error, "parameter");
  EXPECT_EQ(signpost_join(&options_, parameters_.data(), 1, &session_, nullptr, 0),
            SIGNPOST_INVALID_ARGUMENT);
}

// What a configuration's text makes of options and rates, or the error's message.
class SignpostConfigTest : public testing::Test {
 protected:
  SignpostConfigTest() {
    signpost_options_init(&options_);
    signpost_rates_init(&rates_);
  }
  ~SignpostConfigTest() override { signpost_config_close(config_); }

  int Open(const char* text) {
    return signpost_config_open("job.yaml", text, &config_, error_, sizeof error_);
  }
  int Optimizer() {
    return signpost_config_optimizer(config_, &options_, &rates_, error_, sizeof error_);
  }

  std::string Json() {
    const char* json = "unset";
    EXPECT_EQ(signpost_config_optimizer_json(config_, &json, error_, sizeof error_), SIGNPOST_OK)
        << error_;
    return json == nullptr ? "none" : json;
  }

  signpost_config* config_ = nullptr;
  signpost_options options_;
  signpost_rates rates_;
  char error_[500] = "";
};

TEST_F(SignpostConfigTest, GivesOptionsAndRatesWhatAFileSaysOfTheOptimizer) {
  options_.rank = 3;
  ASSERT_EQ(Open("optimizer: {type: OneBitLamb, params: {lr: 0.5, betas: [0.25, 0.75], "
                 "weight_decay: 0.125, freeze_step: 7, max_coeff: 3, gamma: 1.25}}"),
            SIGNPOST_OK)
      << error_;
  ASSERT_EQ(Optimizer(), SIGNPOST_OK) << error_;
  EXPECT_EQ(options_.rank, 3);
  EXPECT_EQ(options_.lamb, 1);
  EXPECT_EQ(options_.zero_one, 0);
  EXPECT_EQ(options_.freeze_step, 7);
  EXPECT_EQ(options_.max_coeff, 3);
  EXPECT_EQ(options_.min_coeff, 0.01);
  EXPECT_EQ(options_.gamma, 1.25f);
  EXPECT_EQ(rates_.learning_rate, 0.5);
  EXPECT_EQ(rates_.beta1, 0.25);
  EXPECT_EQ(rates_.beta2, 0.75);
  EXPECT_EQ(rates_.weight_decay, 0.125);
  EXPECT_EQ(rates_.epsilon, 1e-8);
}

TEST_F(SignpostConfigTest, NamesACodecFromOutsideAfterItWasClosed) {
  ASSERT_EQ(Open("optimizer: {type: OneBitAdam, params: {freeze_step: 7, "
                 "codec: [./libtopk.so, ratio=0.05]}}"),
            SIGNPOST_OK)
      << error_;
  ASSERT_EQ(Optimizer(), SIGNPOST_OK) << error_;
  signpost_config_close(std::exchange(config_, nullptr));
  EXPECT_EQ(options_.codec, SIGNPOST_CODEC_CUSTOM);
  EXPECT_STREQ(options_.codec_library, "./libtopk.so");
  EXPECT_STREQ(options_.codec_options, "ratio=0.05");
}

TEST_F(SignpostConfigTest, NamesTheLineOfAnError) {
  EXPECT_EQ(Open("job: a\njbo: b\n"), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_).find("job.yaml:2: "), std::string::npos) << error_;
  EXPECT_EQ(config_, nullptr);
  EXPECT_EQ(signpost_config_open("/not/there", nullptr, &config_, error_, sizeof error_),
            SIGNPOST_NOT_FOUND);
}

TEST_F(SignpostConfigTest, RefusesAnOptimizerThatIsNotThereNotCompleteOrClips) {
  ASSERT_EQ(Open("job: nightly"), SIGNPOST_OK);
  EXPECT_EQ(Optimizer(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_EQ(Json(), "none");
  signpost_config_close(config_);
  ASSERT_EQ(Open("optimizer: {type: OneBitLamb}"), SIGNPOST_OK);
  EXPECT_EQ(Optimizer(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_).find("freeze_step"), std::string::npos) << error_;
  EXPECT_EQ(Json(), "{\"type\": \"OneBitLamb\", \"params\": {}}");
  signpost_config_close(config_);
  ASSERT_EQ(Open("optimizer: {type: Adam, params: {max_grad_norm: 1}}"), SIGNPOST_OK);
  EXPECT_EQ(Optimizer(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_).find("max_grad_norm"), std::string::npos) << error_;
}

TEST_F(SignpostConfigTest, SaysWhatIsWrongWithAnOptimizerOnlyToThoseWhoWantIt) {
  ASSERT_EQ(Open("job: nightly\noptimizer: {type: Adam, params: {lr: auto}}\n"), SIGNPOST_OK)
      << error_;
  EXPECT_STREQ(signpost_config_session(config_, "job"), "nightly");
  EXPECT_EQ(Optimizer(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_).find("job.yaml:2: lr is 'auto'"), std::string::npos) << error_;
  const char* json = nullptr;
  EXPECT_EQ(signpost_config_optimizer_json(config_, &json, error_, sizeof error_),
            SIGNPOST_INVALID_ARGUMENT);
}

TEST_F(SignpostConfigTest, SaysWhatASessionIsTold) {
  setenv("SIGNPOST_RANK", "2", 1);
  ASSERT_EQ(Open("job: nightly\naggregators: [a:1, b:2]\nrank: 1\n"), SIGNPOST_OK);
  unsetenv("SIGNPOST_RANK");
  EXPECT_STREQ(signpost_config_session(config_, "job"), "nightly");
  EXPECT_STREQ(signpost_config_session(config_, "aggregators"), "a:1,b:2");
  EXPECT_STREQ(signpost_config_session(config_, "rank"), "2");
  EXPECT_EQ(signpost_config_session(config_, "node"), nullptr);
  EXPECT_EQ(signpost_config_session(config_, "no such key"), nullptr);
}

TEST(SignpostOptionsFromEnvironment, HasTextsThatStay) {
  const std::string path = testing::TempDir() + "/job.yaml";
  std::ofstream(path) << "job: nightly\naggregators: [a:1, b:2]\nrank: 1\nworld-size: 2\n"
                         "tls-dir: certificates\n";
  setenv("SIGNPOST_CONFIG", path.c_str(), 1);
  signpost_options options;
  char error[500] = "";
  ASSERT_EQ(signpost_options_from_environment(&options, error, sizeof error), SIGNPOST_OK) << error;
  const std::string other = testing::TempDir() + "/other.yaml";  // a file is read once
  std::ofstream(other) << "job: other\naggregators: [c:1]\nrank: 1\nworld-size: 2\n";
  setenv("SIGNPOST_CONFIG", other.c_str(), 1);
  signpost_options others;
  ASSERT_EQ(signpost_options_from_environment(&others, error, sizeof error), SIGNPOST_OK) << error;
  unsetenv("SIGNPOST_CONFIG");
  EXPECT_STREQ(options.job, "nightly");
  EXPECT_STREQ(options.aggregators, "a:1,b:2");
  EXPECT_STREQ(options.tls_dir, "certificates");
  EXPECT_EQ(options.node, nullptr);
  EXPECT_EQ(options.rank, 1);
  EXPECT_STREQ(others.job, "other");
  EXPECT_EQ(others.tls_dir, nullptr);
}

}  // namespace
