#include "config/file.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string Error(absl::string_view text) {
  const absl::Status status = File::Parse("job.yaml", text).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(File, HasSectionsAndWhatAllProcessesShare) {
  const absl::StatusOr<File> file = File::Parse("job.yaml",
                                                "job: nightly\n"
                                                "failure_timeout: 20s\n"
                                                "aggregator: {shard: 0/2}\n"
                                                "session:\n"
                                                "optimizer: {type: Adam}\n");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Shared("job")->value.text, "nightly");
  EXPECT_EQ(file->Shared("failure-timeout")->line, 2);
  EXPECT_EQ(file->Shared("rank"), nullptr);
  EXPECT_EQ(FindKey(*file->Section("aggregator"), "shard")->value.text, "0/2");
  EXPECT_EQ(file->Section("session"), nullptr);  // nothing is in it
  EXPECT_NE(file->Section("optimizer"), nullptr);
  EXPECT_EQ(file->Section("worker"), nullptr);
}

TEST(File, RefusesAnUnknownKeyWithItsLineAndTheNearestOne) {
  EXPECT_THAT(Error("job: a\nfailure-timout: 10s\n"),
              StartsWith("job.yaml:2: unknown key 'failure-timout' at the top level; did you mean "
                         "'failure-timeout'?"));
  EXPECT_THAT(Error("agregator: {listen: a:1}\n"), HasSubstr("did you mean 'aggregator'?"));
  EXPECT_THAT(Error("session:\n  thread: 4\n"),
              StartsWith("job.yaml:2: unknown key 'thread' in section session; did you mean "
                         "'threads'?"));
  EXPECT_THAT(Error("zzzzzzzz: 1\n"), AllOf(HasSubstr("'zzzzzzzz'"), HasSubstr("\nAll there are")));
}

TEST(File, RefusesAKeyInBothSpellings) {
  EXPECT_THAT(Error("failure-timeout: 10s\nfailure_timeout: 20s\n"),
              StartsWith("job.yaml:2: 'failure_timeout' is given twice: in line 1"));
  EXPECT_THAT(Error("session: {tls-dir: a, tls_dir: b}"), HasSubstr("given twice"));
}

TEST(File, RefusesASectionWhereAValueBelongsAndTheOtherWayRound) {
  EXPECT_THAT(Error("job: {name: a}\n"), HasSubstr("job has a section, wanted a value"));
  EXPECT_THAT(Error("aggregators: [[a:1]]\n"), HasSubstr("aggregators has a list"));
  EXPECT_THAT(Error("aggregator: 10.0.0.1:4000\n"),
              HasSubstr("'aggregator' is '10.0.0.1:4000', wanted a section"));
  EXPECT_THAT(Error("session: [job]\n"), HasSubstr("'session' is a list"));
}

TEST(File, RefusesALineBreakInWhatSessionsAreTold) {
  EXPECT_THAT(Error("rank: 0\njob: \"a\\nb\"\n"), StartsWith("job.yaml:2: job has more than one"));
  EXPECT_THAT(Error("session: {job: \"a\\nb\"}\n"), HasSubstr("job has more than one line"));
}

TEST(File, OfDeepSpeedsIsReadForItsOptimizerOnly) {
  const absl::StatusOr<File> file = File::Parse("ds_config.json",
                                                "{\n"
                                                "  \"train_batch_size\": 4096,\n"
                                                "  \"checkpoint\": {\"parallel_write\": {}},\n"
                                                "  \"optimizer\": {\"type\": \"OneBitAdam\"},\n"
                                                "  \"fp16\": {\"enabled\": true}\n"
                                                "}\n");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_NE(file->Section("optimizer"), nullptr);
  EXPECT_EQ(file->Section("checkpoint"), nullptr);
  ASSERT_EQ(file->not_read().size(), 3);
  EXPECT_EQ(file->not_read()[1]->key, "checkpoint");
  EXPECT_EQ(file->not_read()[2]->line, 5);
}

TEST(File, OfDeepSpeedsIsKnownByAnyKeyThatOnlyDeepSpeedHas) {
  for (const char* key : {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                          "zero_optimization", "fp16", "bf16"}) {
    const auto file = File::Parse("ds.json", std::string(key) + ": 1\nsteps_per_print: 9\n");
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->not_read().size(), 2);
  }
  EXPECT_THAT(Error("steps_per_print: 9\n"), HasSubstr("unknown key 'steps_per_print'"));
}

TEST(File, OfDeepSpeedsMayNotHoldKeysThatWouldNotBeRead) {
  EXPECT_THAT(Error("train_micro_batch_size_per_gpu: 8\nfailure-timeout: 10s\n"),
              AllOf(StartsWith("job.yaml:2: 'failure-timeout'"),
                    HasSubstr("(it has 'train_micro_batch_size_per_gpu')"),
                    HasSubstr("a file of its own")));
  EXPECT_THAT(Error("train_batch_size: 8\nsession: {}\n"), HasSubstr("'session'"));
}

}  // namespace
}  // namespace signpost::config
