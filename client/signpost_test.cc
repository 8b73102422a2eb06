// What the C ABI does without an aggregator; tests/c_abi_test.cc has jobs.

#include "client/signpost.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
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
      parameters_.push_back({.name = name.c_str(), .values = &value_});
    }
  }
  ~SignpostJoinTest() override { on_much_memory = nullptr; }

  int Join() {
    return signpost_join(&options_, parameters_.data(), kParameters, &session_, error_,
                         sizeof error_);
  }

  static constexpr size_t kParameters = 20'000;

  signpost_options options_;
  float value_ = 0;
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
}

TEST_F(SignpostJoinTest, RefusesAParameterWithoutAName) {
  parameters_[0].name = nullptr;
  EXPECT_EQ(Join(), SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error_, "parameter 0 has no name");
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

TEST_F(SignpostJoinTest, CutsMessagesToTheirBuffer) {
  parameters_[0].name = nullptr;
  char error[10];
  EXPECT_EQ(signpost_join(&options_, parameters_.data(), 1, &session_, error, sizeof error),
            SIGNPOST_INVALID_ARGUMENT);
  EXPECT_STREQ(error, "parameter");
  EXPECT_EQ(signpost_join(&options_, parameters_.data(), 1, &session_, nullptr, 0),
            SIGNPOST_INVALID_ARGUMENT);
}

}  // namespace
