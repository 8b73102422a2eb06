#include "cli/config_command.h"

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "cli/flag_settings.h"
#include "config/session_keys.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ExplainConfigTest : public ::testing::Test {
 protected:
  ExplainConfigTest() {
    for (const config::SessionKey& key : config::SessionKeys()) unsetenv(key.variable);
    unsetenv("SIGNPOST_CONFIG");
    CLI::App& status = *program_.add_subcommand("status", "");
    status.add_option("--aggregators", aggregators_, "")->envname("SIGNPOST_AGGREGATORS");
    status.add_flag("--watch", watch_, "");
    AddConfigFlags(program_);
    std::ofstream("job.yaml") << "job: nightly\n"
                                 "aggregators: [a:1, b:2]\n"
                                 "session: {threads: 4}\n"
                                 "status: {watch: true}\n"
                                 "optimizer: {type: OneBitAdam, params: {lr: 0.5}}\n";
    std::ofstream("ds.json") << "{\"train_batch_size\": 8, \"gradient_clipping\": 1,\n"
                                " \"optimizer\": {\"type\": \"Adam\", \"params\": {\n"
                                "   \"torch_adam\": true}},\n"
                                " \"fp16\": {\"enabled\": true}}\n";
  }

  std::string Explain(const std::string& file, const std::vector<std::string>& arguments) {
    const absl::StatusOr<std::string> text = ExplainConfig(program_, file, arguments);
    EXPECT_TRUE(text.ok()) << text.status();
    return text.value_or("");
  }

  CLI::App program_{"", "signpost"};
  std::string aggregators_;
  bool watch_ = false;
};

TEST_F(ExplainConfigTest, SaysOfACommandsFlagsWhereTheyComeFrom) {
  setenv("SIGNPOST_AGGREGATORS", "c:3", 1);
  EXPECT_EQ(Explain("job.yaml", {"status"}),
            "KEY          VALUE  FROM\n"
            "aggregators  c:3    $SIGNPOST_AGGREGATORS  not a:1,b:2 of job.yaml:2\n"
            "watch        true   job.yaml:4\n");
  EXPECT_EQ(Explain("", {"status", "--aggregators=d:4", "--config", "job.yaml"}),
            "KEY          VALUE  FROM\n"
            "aggregators  d:4    --aggregators  not c:3 of $SIGNPOST_AGGREGATORS, a:1,b:2 of "
            "job.yaml:2\n"
            "watch        true   job.yaml:4\n");
}

TEST_F(ExplainConfigTest, SaysWhatTrainingProcessesRead) {
  EXPECT_EQ(Explain("job.yaml", {"session"}),
            "KEY                    VALUE    FROM\n"
            "aggregators            a:1,b:2  job.yaml:2\n"
            "job                    nightly  job.yaml:1\n"
            "rank                   -        default\n"
            "world-size             -        default\n"
            "node                   -        default\n"
            "failure-timeout        10s      default\n"
            "join-timeout           5m       default\n"
            "exchange-timeout       1m       default\n"
            "connections            1        default\n"
            "min-workers            -        default\n"
            "round-deadline         -        default\n"
            "threads                4        job.yaml:3\n"
            "tls-dir                -        default\n"
            "token-file             -        default\n"
            "trace                  -        default\n"
            "insecure-i-understand  false    default\n");
}

TEST_F(ExplainConfigTest, SaysWhatOfAFileOfDeepSpeedsIsReadAndWhatIsNot) {
  const std::string text = Explain("ds.json", {"optimizer"});
  EXPECT_EQ(text,
            "KEY              VALUE         FROM\n"
            "type             Adam          ds.json:2\n"
            "lr               0.001         default\n"
            "betas            [0.9, 0.999]  default\n"
            "eps              1e-08         default\n"
            "weight_decay     0             default\n"
            "bias_correction  true          default\n"
            "max_grad_norm    none          default\n"
            "codec            fp32          default\n"
            "amsgrad          false         default\n"
            "adam_w_mode      true          default\n"
            "torch_adam       true          ds.json:3, ignored\n"
            "not read, in DeepSpeed's file: train_batch_size (ds.json:1); gradient_clipping "
            "(ds.json:1), which is max_grad_norm in Python; fp16 (ds.json:4)\n");
  EXPECT_THAT(Explain("ds.json", {}), HasSubstr("session\nKEY"));
  EXPECT_THAT(Explain("ds.json", {}), HasSubstr("\noptimizer\n" + text));
}

TEST(TakeExplained, CutsBehindItsOwnFlags) {
  const auto taken = [](std::vector<std::string> arguments) { return TakeExplained(arguments); };
  EXPECT_THAT(taken({"config", "explain", "--config", "a", "status", "--config", "b"}),
              ElementsAre("status", "--config", "b"));
  EXPECT_THAT(taken({"config", "explain", "--config=a", "session"}), ElementsAre("session"));
  EXPECT_THAT(taken({"config", "explain", "--help"}), ElementsAre());
  EXPECT_THAT(taken({"config", "explain", "--config"}), ElementsAre());
  EXPECT_THAT(taken({"status", "explain", "x"}), ElementsAre());
  std::vector<std::string> arguments = {"config", "explain", "--config", "a", "status"};
  TakeExplained(arguments);
  EXPECT_THAT(arguments, ElementsAre("config", "explain", "--config", "a"));
}

TEST_F(ExplainConfigTest, ListsAllKeysInMarkdown) {
  const std::string keys = ListConfigKeys(program_);
  EXPECT_THAT(keys, HasSubstr("| `job` | text |  | `SIGNPOST_JOB` | the job's name |\n"));
  EXPECT_THAT(keys, HasSubstr("| `freeze_step` | OneBitAdam | number or auto | auto |"));
  EXPECT_THAT(keys, HasSubstr("### `status`\n"));
  EXPECT_THAT(keys, HasSubstr("| `watch` | true or false | false |  |"));
  EXPECT_THAT(keys, HasSubstr("| `aggregators` | TEXT |  | `SIGNPOST_AGGREGATORS` |"));
  EXPECT_THAT(keys, testing::Not(HasSubstr("`config`")));
}

TEST_F(ExplainConfigTest, SaysWhatAnOptimizerLacks) {
  std::ofstream("job.yaml") << "optimizer: {type: OneBitLamb}\n";
  EXPECT_THAT(Explain("job.yaml", {"optimizer"}), HasSubstr("OneBitLamb needs freeze_step"));
}

TEST_F(ExplainConfigTest, TakesTheFileThatTheEnvironmentNames) {
  setenv("SIGNPOST_CONFIG", "job.yaml", 1);
  EXPECT_THAT(Explain("", {"session"}), HasSubstr("nightly"));
  EXPECT_THAT(Explain("", {"status"}), HasSubstr("job.yaml:4"));
}

TEST_F(ExplainConfigTest, RefusesWhatTheCommandWouldRefuse) {
  const auto error = [this](const std::string& file, const std::vector<std::string>& arguments) {
    return std::string(ExplainConfig(program_, file, arguments).status().message());
  };
  EXPECT_THAT(error("", {"statsu"}), HasSubstr("did you mean 'status'?"));
  EXPECT_THAT(error("", {"status", "--wach"}), HasSubstr("did you mean '--watch'?"));
  EXPECT_THAT(error("", {"session", "--rank=0"}), HasSubstr("has no flags"));
  EXPECT_THAT(error("", {"optimizer"}), HasSubstr("--config FILE"));
  EXPECT_THAT(error("none.yaml", {"session"}), HasSubstr("none.yaml"));
}

}  // namespace
}  // namespace signpost::cli
