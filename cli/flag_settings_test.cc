#include "cli/flag_settings.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cli/command.h"
#include "config/session_keys.h"
#include "config/setting.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A program with commands of the names that files have sections for.
class FlagSettingsTest : public ::testing::Test {
 protected:
  FlagSettingsTest() {
    for (const config::SessionKey& key : config::SessionKeys()) unsetenv(key.variable);
    for (const char* name : {"SIGNPOST_CONFIG", "SIGNPOST_CODEC_LIBRARIES"}) unsetenv(name);
    CLI::App& aggregator = *program_.add_subcommand("aggregator", "");
    aggregator.add_option("--listen", listen_, "")->capture_default_str();
    aggregator.add_option("--max-jobs", max_jobs_, "")->capture_default_str();
    AddSecurityFlags(aggregator, security_);
    AddFailureTimeoutFlag(aggregator, failure_timeout_, "Of workers");
    aggregator.add_flag("--quiet", quiet_, "");
    aggregator.add_option("--codec-library", libraries_, "")->envname("SIGNPOST_CODEC_LIBRARIES");
    CLI::App& worker = *program_.add_subcommand("worker", "");
    worker.add_option("--aggregators", aggregators_, "")
        ->envname("SIGNPOST_AGGREGATORS")
        ->required();
    CLI::App& status = *program_.add_subcommand("status", "");
    CLI::Option* const watch = status.add_flag("--watch", watch_, "");
    status.add_option("--interval", interval_, "")->needs(watch);
    CLI::App& init = *program_.add_subcommand("cert", "")->add_subcommand("init", "");
    init.add_option("--days", days_, "");
    AddConfigFlags(program_);
  }

  // Writes the file, and returns the flag that names it.
  std::string Config(const std::string& text) {
    std::ofstream(path_) << text;
    return "--config=" + path_;
  }

  absl::Status Run(const std::vector<std::string>& arguments) { return Parse(program_, arguments); }

  std::string Error(const std::vector<std::string>& arguments) {
    const absl::Status status = Run(arguments);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  }

  const std::string path_ = testing::TempDir() + "/flags.yaml";
  CLI::App program_{"", "signpost"};
  std::string listen_ = "127.0.0.1:0", aggregators_, interval_;
  int max_jobs_ = 16, days_ = 90;
  bool quiet_ = false, watch_ = false;
  TransportSecurity security_;
  FailureTimeout failure_timeout_;
  std::vector<std::string> libraries_;
};

TEST_F(FlagSettingsTest, TakeTheFlagBeforeTheVariableBeforeTheSectionBeforeWhatIsShared) {
  const auto timeout_with = [this](std::vector<std::string> arguments) {
    const absl::Status status = Run(arguments);
    EXPECT_TRUE(status.ok()) << status;
    return failure_timeout_.ToString();
  };
  const std::string shared = Config("failure-timeout: 21s\n");
  EXPECT_EQ(timeout_with({"aggregator"}), "10s");
  EXPECT_EQ(timeout_with({"aggregator", shared}), "21s");
  Config("failure-timeout: 21s\naggregator: {failure_timeout: 22s}\n");
  EXPECT_EQ(timeout_with({"aggregator", shared}), "22s");
  setenv("SIGNPOST_FAILURE_TIMEOUT", "23s", 1);
  EXPECT_EQ(timeout_with({"aggregator", shared}), "23s");
  EXPECT_EQ(timeout_with({"aggregator", shared, "--failure-timeout=24s"}), "24s");
}

TEST_F(FlagSettingsTest, GiveEveryKindOfFlagItsValue) {
  ASSERT_TRUE(Run({"aggregator", Config("aggregator:\n"
                                        "  listen: 10.0.0.1:4000\n"
                                        "  max-jobs: 3\n"
                                        "  quiet: true\n"
                                        "  codec-library: [a.so, b.so]\n")})
                  .ok());
  EXPECT_EQ(listen_, "10.0.0.1:4000");
  EXPECT_EQ(max_jobs_, 3);
  EXPECT_TRUE(quiet_);
  EXPECT_THAT(libraries_, ElementsAre("a.so", "b.so"));
  ASSERT_TRUE(Run({"worker", Config("aggregators: [a:1, b:2]\n")}).ok());
  EXPECT_EQ(aggregators_, "a:1,b:2");
  ASSERT_TRUE(Run({"cert", "init", Config("cert: {init: {days: 7}}\n")}).ok());
  EXPECT_EQ(days_, 7);
}

TEST_F(FlagSettingsTest, SplitAVariableOfSeveralValuesAsPathIs) {
  setenv("SIGNPOST_CODEC_LIBRARIES", "a.so:b.so", 1);
  ASSERT_TRUE(Run({"aggregator"}).ok());
  EXPECT_THAT(libraries_, ElementsAre("a.so", "b.so"));
  ASSERT_TRUE(Run({"aggregator", "--codec-library", "c.so"}).ok());
  EXPECT_THAT(libraries_, ElementsAre("c.so"));
}

TEST_F(FlagSettingsTest, LeaveTheDefaultWhereAVariableIsEmpty) {
  setenv("SIGNPOST_FAILURE_TIMEOUT", "", 1);
  ASSERT_TRUE(Run({"aggregator", Config("failure-timeout: 21s\n")}).ok());
  EXPECT_EQ(failure_timeout_.ToString(), "10s");
}

TEST_F(FlagSettingsTest, KeepASwitchOffThatTheFileTurnsOff) {
  ASSERT_TRUE(Run({"aggregator", Config("aggregator: {quiet: false}\n")}).ok());
  EXPECT_FALSE(quiet_);
}

TEST_F(FlagSettingsTest, AskForWhatIsRequiredOnlyIfNobodyGivesIt) {
  EXPECT_THAT(Error({"worker"}), HasSubstr("--aggregators is required"));
  setenv("SIGNPOST_AGGREGATORS", "c:3", 1);
  EXPECT_TRUE(Run({"worker"}).ok());
  EXPECT_EQ(aggregators_, "c:3");
}

TEST_F(FlagSettingsTest, KnowWhatAFlagNeedsWhoeverGivesIt) {
  EXPECT_THAT(Error({"status", "--interval=2s"}), HasSubstr("--interval requires --watch"));
  EXPECT_THAT(Error({"status", Config("status: {interval: 2s}\n")}), HasSubstr("requires --watch"));
  EXPECT_TRUE(Run({"status", "--interval=2s", Config("status: {watch: true}\n")}).ok());
}

TEST_F(FlagSettingsTest, LetTheStrongerOfTwoThatExcludeEachOtherStand) {
  setenv("SIGNPOST_TLS_DIR", "certificates", 1);
  ASSERT_TRUE(Run({"aggregator", "--insecure-i-understand"}).ok());
  EXPECT_TRUE(security_.insecure);
  EXPECT_EQ(security_.tls_dir, "");
  security_ = {};
  ASSERT_TRUE(Run({"aggregator", Config("insecure-i-understand: true\n")}).ok());
  EXPECT_FALSE(security_.insecure);
  EXPECT_EQ(security_.tls_dir, "certificates");
  unsetenv("SIGNPOST_TLS_DIR");
  security_ = {};
  ASSERT_TRUE(
      Run({"aggregator", Config("insecure-i-understand: true\naggregator: {tls-dir: a}\n")}).ok());
  EXPECT_FALSE(security_.insecure);
  EXPECT_EQ(security_.tls_dir, "a");
  setenv("SIGNPOST_TLS_DIR", "certificates", 1);
  Config("");
  EXPECT_THAT(Error({"aggregator", "--insecure-i-understand", "--tls-dir=x"}),
              HasSubstr("excludes"));
  setenv("SIGNPOST_INSECURE_I_UNDERSTAND", "1", 1);
  EXPECT_THAT(Error({"aggregator"}), AllOf(HasSubstr("$SIGNPOST_TLS_DIR"), HasSubstr("excludes")));
}

TEST_F(FlagSettingsTest, NameTheLineAndTheFlagOfABadValue) {
  EXPECT_THAT(Error({"aggregator", Config("aggregator:\n  max-jobs: many\n")}),
              AllOf(HasSubstr(path_ + ":2: "), HasSubstr("--max-jobs")));
  EXPECT_THAT(Error({"aggregator", Config("aggregator: {quiet: perhaps}\n")}),
              HasSubstr(path_ + ":1: --quiet is 'perhaps', wanted true or false"));
  EXPECT_THAT(Error({"aggregator", Config("failure-timeout: 1ms\n")}),
              AllOf(HasSubstr(path_ + ":1: "), HasSubstr("500ms to 1h")));
  EXPECT_THAT(Error({"aggregator", Config("aggregator: {listen: [a:1, b:2], max-jobs: [1, 2]}\n")}),
              HasSubstr("--max-jobs"));
  EXPECT_THAT(
      Error({"aggregator", Config("aggregator: {max-jobs: " + std::string(99, '9') + "x}")}),
      AllOf(HasSubstr("--max-jobs"), HasSubstr("99...'"), Not(HasSubstr("9x"))));
  setenv("SIGNPOST_INSECURE_I_UNDERSTAND", "yes", 1);
  EXPECT_THAT(Error({"aggregator", Config("")}),
              HasSubstr("$SIGNPOST_INSECURE_I_UNDERSTAND: --insecure-i-understand is 'yes'"));
}

TEST_F(FlagSettingsTest, RefuseUnknownKeysOfAllCommandsWithLineAndSuggestion) {
  EXPECT_THAT(Error({"aggregator", Config("worker:\n  agregators: a:1\n")}),
              HasSubstr(path_ + ":2: unknown key 'agregators' in section worker; did you mean "
                                "'aggregators'?"));
  EXPECT_THAT(Error({"aggregator", Config("cert: {init: {day: 7}}\n")}),
              HasSubstr("unknown key 'day' in section cert init; did you mean 'days'?"));
  EXPECT_THAT(Error({"aggregator", Config("cert: {init: 7}\n")}),
              HasSubstr("'init' is '7', wanted a section"));
  EXPECT_THAT(Error({"aggregator", Config("worker: {aggregators: {a: 1}}\n")}),
              HasSubstr("aggregators has a section, wanted a value"));
  EXPECT_THAT(Error({"aggregator", Config("aggregator: {config: other.yaml}\n")}),
              HasSubstr("unknown key 'config'"));
}

TEST_F(FlagSettingsTest, TakeTheFileThatTheEnvironmentNamesUnlessAFlagNamesOne) {
  Config("aggregator: {max-jobs: 3}\n");
  setenv("SIGNPOST_CONFIG", path_.c_str(), 1);
  ASSERT_TRUE(Run({"aggregator"}).ok());
  EXPECT_EQ(max_jobs_, 3);
  const std::string other = testing::TempDir() + "/other.yaml";
  std::ofstream(other) << "aggregator: {max-jobs: 4}\n";
  ASSERT_TRUE(Run({"aggregator", "--config", other}).ok());
  EXPECT_EQ(max_jobs_, 4);
  EXPECT_EQ(std::getenv("SIGNPOST_CONFIG"), other);  // for processes that it starts
  EXPECT_TRUE(absl::IsNotFound(Run({"aggregator", "--config", "/not/there"})));
}

TEST_F(FlagSettingsTest, NameTheFileWithItsDirectoryToProcessesThatAreStarted) {
  Config("aggregator: {max-jobs: 3}\n");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(testing::TempDir());
  setenv("SIGNPOST_CONFIG", "flags.yaml", 1);
  const absl::Status status = Run({"aggregator"});
  const std::string absolute = std::filesystem::absolute("flags.yaml");
  std::filesystem::current_path(before);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(std::getenv("SIGNPOST_CONFIG"), absolute);
}

TEST_F(FlagSettingsTest, SayWhereEachValueCameFrom) {
  setenv("SIGNPOST_FAILURE_TIMEOUT", "23s", 1);
  const absl::StatusOr<FlagSettings> settings = ParseAndExplain(
      program_, {"aggregator", "--max-jobs=5",
                 Config("failure-timeout: 21s\naggregator: {max-jobs: 3, listen: a:1}\n")});
  ASSERT_TRUE(settings.ok()) << settings.status();
  const auto rows = config::Explain(settings->keys);
  ASSERT_EQ(rows.size(), 8);
  EXPECT_THAT(rows[1], ElementsAre("listen", "a:1", path_ + ":2", ""));
  EXPECT_THAT(rows[2], ElementsAre("max-jobs", "5", "--max-jobs", "not 3 of " + path_ + ":2"));
  EXPECT_THAT(rows[3], ElementsAre("tls-dir", "-", "default", ""));
  EXPECT_THAT(rows[5], ElementsAre("failure-timeout", "23s", "$SIGNPOST_FAILURE_TIMEOUT",
                                   "not 21s of " + path_ + ":1"));
  EXPECT_THAT(rows[6], ElementsAre("quiet", "false", "default", ""));
}

}  // namespace
}  // namespace signpost::cli
