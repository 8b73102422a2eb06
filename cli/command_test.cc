#include "cli/command.h"

#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A program of three commands, one of which has commands of its own, and one that is hidden.
class ParseTest : public ::testing::Test {
 protected:
  ParseTest() {
    CLI::App& run = *program_.add_subcommand("run", "");
    run.add_option("-n,--workers", workers_, "");
    AddDurationFlag(run, "--timeout", timeout_, "");
    AddFailureTimeoutFlag(run, failure_timeout_, "");
    CLI::App& bench = *program_.add_subcommand("bench", "")->require_subcommand(1);
    bench.add_subcommand("predict", "")->add_option("--link", link_, "");
    program_.add_subcommand("status", "");
    program_.add_subcommand("stacks", "")->group("");
  }

  std::string Error(const std::vector<std::string>& arguments) {
    const absl::Status status = Parse(program_, arguments);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  }

  CLI::App program_{"", "signpost"};
  uint32_t workers_ = 1;
  absl::Duration timeout_;
  std::string link_;
  FailureTimeout failure_timeout_;
};

TEST_F(ParseTest, ReadsFlagsInBothForms) {
  ASSERT_TRUE(Parse(program_, {"run", "-n", "3", "--timeout=1m30s"}).ok());
  EXPECT_EQ(workers_, 3u);
  EXPECT_EQ(timeout_, absl::Seconds(90));
}

TEST_F(ParseTest, ReadsAFailureTimeoutAndRefusesOneThatIsNone) {
  ASSERT_TRUE(Parse(program_, {"run", "--failure-timeout=1s"}).ok());
  EXPECT_EQ(failure_timeout_.duration(), absl::Seconds(1));
  EXPECT_THAT(
      Error({"run", "--failure-timeout=100ms"}),
      AllOf(HasSubstr("--failure-timeout"), HasSubstr("'100ms'"), HasSubstr("500ms to 1h")));
}

TEST_F(ParseTest, SuggestsAFlag) {
  EXPECT_THAT(Error({"run", "--wrokers", "3"}),
              HasSubstr("unknown flag '--wrokers'; did you mean '--workers'?"));
  EXPECT_THAT(Error({"run", "--worker=3"}), HasSubstr("did you mean '--workers'?"));
}

TEST_F(ParseTest, SuggestsACommandButNeverAHiddenOne) {
  EXPECT_THAT(Error({"statsu"}), HasSubstr("unknown command 'statsu'; did you mean 'status'?"));
  EXPECT_THAT(Error({"stacsk"}), testing::Not(HasSubstr("stacks'?")));
}

TEST_F(ParseTest, KnowsCommandsOfCommands) {
  EXPECT_THAT(Error({"bench", "predict", "--lnik", "1gbit"}),
              HasSubstr("unknown flag '--lnik'; did you mean '--link'?\n"
                        "All there are: signpost bench predict --help"));
  EXPECT_THAT(Error({"bench", "pedict", "--link", "1gbit"}),
              HasSubstr("unknown command 'pedict'; did you mean 'predict'?\n"
                        "All there are: signpost bench --help"));
  EXPECT_THAT(Error({"bench"}), HasSubstr("More: signpost bench --help"));
}

TEST_F(ParseTest, HasNoHelpOfUnknownCommands) {
  EXPECT_THAT(Error({"statsu", "--help"}), HasSubstr("did you mean 'status'?"));
  EXPECT_THAT(Error({"bench", "pedict", "--help"}), HasSubstr("did you mean 'predict'?"));
  EXPECT_TRUE(absl::IsCancelled(Parse(program_, {"run", "--wrokers", "--help"})));
}

TEST_F(ParseTest, TellsOfACommandBehindDashesWhereOneMayStand) {
  EXPECT_THAT(Error({"run", "python3"}), HasSubstr("a command to run stands behind ' -- '"));
  EXPECT_THAT(Error({"status", "python3"}), testing::Not(HasSubstr(" -- ")));
  EXPECT_THAT(Error({"bench", "predict", "python3"}), testing::Not(HasSubstr(" -- ")));
}

TEST_F(ParseTest, SaysWhereTheKnownOnesAreListed) {
  EXPECT_THAT(Error({"--x"}), HasSubstr("unknown flag '--x'\nAll there are: signpost --help"));
  EXPECT_THAT(Error({"run", "-x"}), HasSubstr("signpost run --help"));
}

TEST_F(ParseTest, RefusesStrayArguments) {
  EXPECT_THAT(Error({"run", "python3", "--lr", "3"}), HasSubstr("unexpected argument 'python3'"));
}

TEST_F(ParseTest, NamesTheFlagOfABadValue) {
  EXPECT_THAT(Error({"run", "-n", "four"}), HasSubstr("--workers"));
  EXPECT_THAT(Error({"run", "--timeout", "10"}), HasSubstr("--timeout: '10' is not a duration"));
  EXPECT_THAT(Error({"run", "--timeout=-1s"}), HasSubstr("'-1s' is not a duration"));
}

TEST(TakeTail, CutsAtTheFirstDashes) {
  std::vector<std::string> arguments = {"run", "-n", "2", "--", "sh", "--", "-c"};
  EXPECT_THAT(TakeTail(arguments), ElementsAre("sh", "--", "-c"));
  EXPECT_THAT(arguments, ElementsAre("run", "-n", "2"));
}

TEST(TakeTail, IsEmptyWithoutDashes) {
  std::vector<std::string> arguments = {"run", "-n", "2"};
  EXPECT_THAT(TakeTail(arguments), IsEmpty());
  EXPECT_THAT(arguments, ElementsAre("run", "-n", "2"));
}

TEST(ParseAddresses, SplitsAtCommas) {
  EXPECT_THAT(*ParseAddresses("a:1,[::1]:2"), ElementsAre("a:1", "[::1]:2"));
}

TEST(ParseAddresses, RefusesWhatIsNoAddress) {
  for (const char* addresses : {"", "a", "a:1,", ",a:1", "a:", "a:65536", "a:1,b:99999"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseAddresses(addresses).status())) << addresses;
  }
  EXPECT_THAT(std::string(ParseAddresses("a:1,b:99999").status().message()),
              HasSubstr("with ports up to 65535; 'b:99999' is none"));
  EXPECT_THAT(*ParseAddresses("a:65535,unix:b"), ElementsAre("a:65535", "unix:b"));
}

}  // namespace
}  // namespace signpost::cli
