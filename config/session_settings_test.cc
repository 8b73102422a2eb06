#include "config/session_settings.h"

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SessionSettingsTest : public testing::Test {
 protected:
  SessionSettingsTest() {
    for (const SessionKey& key : SessionKeys()) unsetenv(key.variable);
    unsetenv("SIGNPOST_CONFIG");
  }

  SessionSettings Collect(absl::string_view text) {
    const absl::StatusOr<File> file = File::Parse("job.yaml", text);
    EXPECT_TRUE(file.ok()) << file.status();
    const absl::StatusOr<SessionSettings> settings = SessionSettings::Collect(&*file);
    EXPECT_TRUE(settings.ok()) << settings.status();
    return *settings;
  }
};

TEST_F(SessionSettingsTest, TakeTheVariableBeforeTheSectionBeforeWhatIsShared) {
  constexpr char kFile[] = "job: of-all\nsession: {job: of-sessions}\n";
  EXPECT_EQ(Collect("job: of-all\n").Find("job")->Text(), "of-all");
  EXPECT_EQ(Collect("job: of-all\n").Find("job")->origin, "job.yaml:1");
  EXPECT_EQ(Collect(kFile).Find("job")->Text(), "of-sessions");
  EXPECT_EQ(Collect(kFile).Find("job")->origin, "job.yaml:2");
  setenv("SIGNPOST_JOB", "of-the-environment", 1);
  EXPECT_EQ(Collect(kFile).Find("job")->Text(), "of-the-environment");
  EXPECT_EQ(Collect(kFile).Find("job")->origin, "$SIGNPOST_JOB");
}

TEST_F(SessionSettingsTest, TakeAnEmptyVariableForTheDefaultWhateverTheFileSays) {
  setenv("SIGNPOST_NODE", "", 1);
  EXPECT_EQ(Collect("node: unix:/run/worker\n").Find("node"), nullptr);
}

TEST_F(SessionSettingsTest, JoinAList) {
  EXPECT_EQ(Collect("aggregators: [a:1, b:2]").Find("aggregators")->Text(), "a:1,b:2");
  EXPECT_EQ(Collect("aggregators: a:1,b:2").Find("aggregators")->Text(), "a:1,b:2");
}

TEST_F(SessionSettingsTest, ReadTheFileThatTheEnvironmentNames) {
  EXPECT_EQ(SessionSettings::FromEnvironment()->Find("job"), nullptr);
  const std::string path = testing::TempDir() + "/session.yaml";
  std::ofstream(path) << "job: nightly\n";
  setenv("SIGNPOST_CONFIG", path.c_str(), 1);
  EXPECT_EQ(SessionSettings::FromEnvironment()->Find("job")->origin, path + ":1");
  std::ofstream(path) << "jbo: nightly\n";
  EXPECT_THAT(std::string(SessionSettings::FromEnvironment().status().message()),
              HasSubstr("SIGNPOST_CONFIG: " + path + ":1: unknown key 'jbo'"));
  setenv("SIGNPOST_CONFIG", "/not/there", 1);
  EXPECT_TRUE(absl::IsNotFound(SessionSettings::FromEnvironment().status()));
}

TEST_F(SessionSettingsTest, LetTheStrongerOfMtlsAndPlainTextStand) {
  setenv("SIGNPOST_INSECURE_I_UNDERSTAND", "1", 1);
  EXPECT_EQ(Collect("tls-dir: certificates\n").Find("tls-dir"), nullptr);
  setenv("SIGNPOST_INSECURE_I_UNDERSTAND", "0", 1);
  EXPECT_NE(Collect("tls-dir: certificates\n").Find("tls-dir"), nullptr);
  unsetenv("SIGNPOST_INSECURE_I_UNDERSTAND");
  setenv("SIGNPOST_TLS_DIR", "certificates", 1);
  EXPECT_EQ(Collect("insecure-i-understand: true\n").Find("insecure-i-understand"), nullptr);
  unsetenv("SIGNPOST_TLS_DIR");
  const SessionSettings plain = Collect("tls-dir: a\nsession: {insecure-i-understand: true}\n");
  EXPECT_EQ(plain.Find("tls-dir"), nullptr);
  EXPECT_NE(plain.Find("insecure-i-understand"), nullptr);
  const SessionSettings both = Collect("tls-dir: a\ninsecure-i-understand: true\n");
  EXPECT_NE(both.Find("tls-dir"), nullptr);
  EXPECT_NE(both.Find("insecure-i-understand"), nullptr);
}

TEST_F(SessionSettingsTest, AreExplainedWithWhatTheyStandBefore) {
  setenv("SIGNPOST_JOB", "tonight", 1);
  setenv("SIGNPOST_NODE", "", 1);
  const auto rows = Explain(Collect("job: nightly\n"
                                    "node: unix:/run/worker\n"
                                    "session: {job: daily, threads: 4}\n")
                                .keys());
  EXPECT_THAT(rows[0], ElementsAre("KEY", "VALUE", "FROM", ""));
  EXPECT_THAT(rows[1], ElementsAre("aggregators", "-", "default", ""));
  EXPECT_THAT(rows[2], ElementsAre("job", "tonight", "$SIGNPOST_JOB",
                                   "not daily of job.yaml:3, nightly of job.yaml:1"));
  EXPECT_THAT(rows[5], ElementsAre("node", "-", "$SIGNPOST_NODE, which is empty",
                                   "not unix:/run/worker of job.yaml:2"));
  EXPECT_THAT(rows[6], ElementsAre("failure-timeout", "10s", "default", ""));
  EXPECT_THAT(rows[12], ElementsAre("threads", "4", "job.yaml:3", ""));
}

}  // namespace
}  // namespace signpost::config
