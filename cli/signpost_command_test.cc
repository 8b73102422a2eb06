// The program as its user has it, in what ends by itself: help, configuration, certificates,
// measurements, and what is said of mistakes.

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cli/started_program.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "security/certificate.h"
#include "security/identity.h"
#include "security/tls_dir.h"

namespace signpost::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(Signpost, ExplainsEachCommandWithAnExample) {
  const Outcome all = RunProgram("--help");
  EXPECT_EQ(all.exit_code, 0);
  EXPECT_THAT(all.output, Not(HasSubstr("demo-worker")));
  for (const char* command : {"demo", "run", "chaos", "bench", "codec", "aggregator", "worker",
                              "status", "checkpoint", "doctor", "config", "trace", "version"}) {
    EXPECT_THAT(all.output, HasSubstr(command));
    const Outcome one = RunProgram(absl::StrCat(command, " --help"));
    EXPECT_EQ(one.exit_code, 0);
    EXPECT_THAT(one.output,
                AllOf(HasSubstr("Example"), HasSubstr(absl::StrCat("signpost ", command))));
  }
}

TEST(Signpost, ShowsItsHelpToWhoGivesNoCommand) {
  const Outcome outcome = RunProgram("");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("Subcommands:"));
}

TEST(Signpost, RefusesUnknownFlagsWithASuggestion) {
  const Outcome outcome = RunProgram("demo --freze-step 3");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output,
              HasSubstr("unknown flag '--freze-step'; did you mean '--freeze-step'?"));
}

TEST(Signpost, RefusesUnknownCommandsWithASuggestion) {
  const Outcome outcome = RunProgram("statsu");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("unknown command 'statsu'; did you mean 'status'?"));
}

TEST(Help, OfACommandIsThereInBothOrders) {
  for (const std::string command : {"", "run ", "cert init "}) {
    const Outcome help = RunProgram(absl::StrCat("help ", command));
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_EQ(help.output, RunProgram(absl::StrCat(command, "--help")).output);
  }
}

TEST(Signpost, FailsWhenItsOutputIsLost) {
  // A short answer, a long one, and one of CLI11's.
  for (const char* command : {"version", "k8s render", "run --help"}) {
    const Outcome outcome =
        Started(absl::StrCat("sh -c '", kProgram, " ", command, " >/dev/full'")).End();
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_EQ(outcome.output,
              "signpost: cannot write to standard output: No space left on device\n");
  }
  // A run's output is no answer: what it was for may be done.
  EXPECT_EQ(
      Started(absl::StrCat("sh -c '", kProgram, " run -- echo hello >/dev/full'")).End().exit_code,
      0);
}

TEST(Signpost, SaysWhyItCannotLookAtAPath) {
  const std::string long_name(300, 'x');
  for (const std::string& command :
       {absl::StrCat("cert init ", long_name), absl::StrCat("run --trace ", long_name, " -- true"),
        absl::StrCat("trace merge out ", long_name), absl::StrCat("trace summary ", long_name),
        absl::StrCat("doctor --state-dir ", long_name)}) {
    const Outcome outcome = RunProgram(command);
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_THAT(outcome.output, HasSubstr("xxx")) << command;
    EXPECT_THAT(outcome.output, HasSubstr("File name too long")) << command;
  }
}

TEST(Signpost, SaysWhyItCannotReadOrWriteAndThatItIsTheCallersMistake) {
  const std::string file = testing::TempDir() + "/no-directory";
  std::ofstream(file) << "x";
  for (const std::string& command :
       {absl::StrCat("cert init ", file, "/x"), absl::StrCat("k8s render --output ", file, "/x"),
        absl::StrCat("checkpoint inspect ", file), absl::StrCat("trace summary ", file, "/x")}) {
    const Outcome outcome = RunProgram(command);
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr(file), HasSubstr("Not a directory"))) << command;
  }
}

TEST(Demo, SaysWhereThePythonPackageIsToBeHad) {
  const Outcome outcome = RunProgram("demo --torch --output " + testing::TempDir());
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("'./signpost demo --torch' builds one"));
}

TEST(Signpost, TellsItsVersionsInTwoWays) {
  const Outcome command = RunProgram("version");
  EXPECT_EQ(command.exit_code, 0);
  EXPECT_THAT(command.output,
              AllOf(StartsWith("signpost "), HasSubstr("gRPC"), HasSubstr("kernels")));
  EXPECT_EQ(RunProgram("--version").output, command.output);
}

TEST(Config, DocumentsAllKeys) {
  const Outcome keys = RunProgram("config keys");
  EXPECT_EQ(keys.exit_code, 0);
  EXPECT_THAT(keys.output, HasSubstr("| `metrics-listen` |"));
  EXPECT_TRUE(absl::StrContains(ReadFile("docs/configuration.md"), keys.output))
      << "the tables of docs/configuration.md are what `signpost config keys` prints:\n"
      << keys.output;
}

TEST(Config, ExplainsTheExampleOfItsDocumentation) {
  const std::string explain = "config explain --config docs/job.yaml";
  const Outcome both = RunProgram(explain);
  EXPECT_EQ(both.exit_code, 0);
  EXPECT_THAT(both.output, AllOf(HasSubstr("docs/job.yaml:"), HasSubstr("OneBitAdam"),
                                 Not(HasSubstr("not complete"))));
  const Outcome command = RunProgram(explain + " aggregator --shard 1/2");
  EXPECT_EQ(command.exit_code, 0);
  EXPECT_THAT(command.output,
              AllOf(HasSubstr("--shard"), HasSubstr("0.0.0.0:4000"), Not(HasSubstr("job  "))));
}

TEST(Config, ExplainsAHelpfulErrorAndExitsAsTheCommandWould) {
  EXPECT_EQ(RunProgram("config explain aggregator --lsten a:1").exit_code, 64);
  EXPECT_EQ(RunProgram("config explain aggregator --help").exit_code, 0);
  EXPECT_EQ(RunProgram("config").exit_code, 64);
}

// Which a cluster is to try again until the certificate is renewed.
TEST(Signpost, EndsWithTryAgainWhereACertificateIsOutOfDate) {
  const std::string directory = testing::TempDir() + "/out_of_date";
  const auto authority = Authority::Make("Test", absl::Hours(1));
  const auto aggregator = Identity::Parse("spiffe://signpost/aggregator");
  const auto files = authority->Issue(*aggregator, -absl::Seconds(1));
  ASSERT_TRUE(WriteTlsDir(directory, *files).ok());
  for (const char* command :
       {"aggregator --listen 127.0.0.1:0", "probe --aggregators 127.0.0.1:1"}) {
    const Outcome outcome = RunProgram(absl::StrCat(command, " --tls-dir ", directory));
    EXPECT_EQ(outcome.exit_code, 75) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("was valid until"));
  }
}

TEST(Signpost, RefusesAFlagThatIsEmpty) {
  for (const char* command : {"aggregator --state-dir ''", "run --state-dir '' -- true",
                              "cert init certificates-of-none --job ''"}) {
    const Outcome outcome = RunProgram(command);
    EXPECT_EQ(outcome.exit_code, 64) << command;
    EXPECT_THAT(outcome.output, HasSubstr(" is empty; give it a value, or leave it out"));
  }
}

TEST(Cert, ADirectoryThatIsRenewedKeepsItsIdentity) {
  const std::string directory = ::testing::TempDir() + "/renewed";
  ASSERT_EQ(RunProgram("cert init --trust-domain corp.example --job bert " + directory).exit_code,
            0);
  const std::string issue = absl::StrCat("cert issue ", directory, " --to ", directory);
  Outcome renewed = RunProgram(issue + "/worker --days 30");
  EXPECT_EQ(renewed.exit_code, 0);
  EXPECT_THAT(renewed.output, HasSubstr("spiffe://corp.example/worker/bert, until"));
  renewed = RunProgram(issue + "/aggregator");
  EXPECT_THAT(renewed.output, HasSubstr("spiffe://corp.example/aggregator, until"));
  for (const char* other :
       {"/aggregator --role worker", "/worker --job gpt", "/worker --trust-domain signpost"}) {
    const Outcome refused = RunProgram(issue + other);
    EXPECT_EQ(refused.exit_code, 64) << other;
    EXPECT_THAT(refused.output, HasSubstr(": give another directory, or without --role"));
  }
  EXPECT_THAT(RunProgram("cert show " + directory + "/worker").output,
              HasSubstr("spiffe://corp.example/worker/bert"));
  EXPECT_THAT(RunProgram(issue + "/new --role observer").output,
              HasSubstr("spiffe://signpost/observer, until"));
}

TEST(Cert, ADirectoryThatTrustsMoreAuthoritiesGoesOnToDoSo) {
  const std::string directory = ::testing::TempDir() + "/two_authorities";
  for (const char* authority : {"/old", "/new"}) {
    ASSERT_EQ(RunProgram(absl::StrCat("cert init ", directory, authority)).exit_code, 0);
  }
  const std::string both =
      ReadFile(directory + "/old/ca/ca.crt") + ReadFile(directory + "/new/ca/ca.crt");
  std::ofstream(directory + "/old/worker/ca.crt") << both;
  const Outcome renewed =
      RunProgram(absl::StrCat("cert issue ", directory, "/new --to ", directory, "/old/worker"));
  EXPECT_EQ(renewed.exit_code, 0) << renewed.output;
  EXPECT_EQ(ReadFile(directory + "/old/worker/ca.crt"), both);
  EXPECT_EQ(RunProgram(absl::StrCat("cert show ", directory, "/old/worker")).exit_code, 0);
}

TEST(Cert, KeysThatAreNoneOfItsOwnStay) {
  const std::string directory = ::testing::TempDir() + "/foreign_keys";
  ASSERT_EQ(RunProgram("cert init " + directory).exit_code, 0);
  const std::string web = directory + "/web";
  std::filesystem::create_directory(web);
  std::ofstream(web + "/tls.key") << "a web server's";
  Outcome refused = RunProgram(absl::StrCat("cert issue ", directory, " --to ", web));
  EXPECT_EQ(refused.exit_code, 64);
  EXPECT_THAT(refused.output, HasSubstr("has a tls.key, and is no TLS directory of Signpost"));
  EXPECT_EQ(ReadFile(web + "/tls.key"), "a web server's");

  const std::string key = ReadFile(directory + "/worker/tls.key");
  std::filesystem::rename(directory + "/ca", directory + "/kept_elsewhere");
  refused = RunProgram("cert init " + directory);
  EXPECT_EQ(refused.exit_code, 64);
  EXPECT_THAT(refused.output,
              HasSubstr("tls.key is there already, and its authority is elsewhere"));
  EXPECT_EQ(ReadFile(directory + "/worker/tls.key"), key);

  const std::string none = ::testing::TempDir() + "/none";
  EXPECT_EQ(RunProgram("cert init --job nlp/bert " + none).exit_code, 64);
  EXPECT_FALSE(std::filesystem::exists(none));
}

TEST(Cert, ADirectoryMayBeNamedWithASlashBehindIt) {
  const std::string directory = ::testing::TempDir() + "/with_slash";
  ASSERT_EQ(RunProgram("cert init " + directory).exit_code, 0);
  const mode_t before = umask(S_IWOTH);
  const Outcome issued =
      RunProgram(absl::StrCat("cert issue ", directory, " --to ", directory, "/more/"));
  umask(before);
  EXPECT_EQ(issued.exit_code, 0) << issued.output;
}

TEST(Chaos, RefusesFaultsThatThereAreNot) {
  const Outcome outcome = RunProgram("chaos --faults kill,explode -- true");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("--faults: 'explode' is not a fault"));
}

TEST(Chaos, ListsTheFailpoints) {
  const Outcome outcome = RunProgram("chaos --list-failpoints");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("round.closed         a round's answer is made"));
}

TEST(Failpoint, OfAnotherNameIsRefusedAtTheStart) {
  const Outcome outcome =
      Started(absl::StrCat("env SIGNPOST_FAILPOINT=round.close=kill ", kProgram, " aggregator"))
          .End();
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("SIGNPOST_FAILPOINT: failpoint 'round.close=kill': there "
                                        "is no 'round.close', but there are: "));
}

TEST(Bench, PrintsATableAndWritesItAsJson) {
  const std::string file = testing::TempDir() + "/figures.json";
  const Outcome outcome = RunProgram(absl::StrCat(
      "bench exchange --workers 2 --parameters 20000 --turns 1 --exchanges 1 --json ", file));
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("VALUE"), HasSubstr("packed frames, one-bit"),
                                    HasSubstr("gradients to mean, one-bit")));
  EXPECT_THAT(ReadFile(file), AllOf(HasSubstr("\"name\": \"packed frames, one-bit\""),
                                    HasSubstr("\"unit\": \"s\"")));
}

TEST(Bench, MeasuresKernels) {
  const Outcome outcome = RunProgram("bench kernels --elements 10000 --rounds 1");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("GB/s"), HasSubstr("OF BOUND")));
}

TEST(Bench, MeasuresWholeSteps) {
  const Outcome outcome = RunProgram(
      "bench step --workers 1 --aggregators 1 --codec fp32 --parameters 20000 --turns 1 "
      "--exchanges 1");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("optimizer step, fp32"));
}

TEST(Bench, PredictsWhetherOneBitPays) {
  const Outcome slow =
      RunProgram("bench predict --link 1gbit --parameters 340000000 --workers 8 --compute-ms 900");
  EXPECT_EQ(slow.exit_code, 0);
  EXPECT_THAT(slow.output, AllOf(HasSubstr("VALUE"), HasSubstr("one-bit"), HasSubstr("bf16")));
  EXPECT_THAT(slow.output, HasSubstr("340000000 parameters; 8 workers and 8 aggregators, each on a "
                                     "host of its own with 16 cores, 8 threads in each worker; "
                                     "links of 1000 Mbit/s\n"));
  EXPECT_THAT(slow.output, HasSubstr(", over a whole run "));
  const Outcome cheap = RunProgram(
      "bench predict --link 1gbit --parameters 340000000 --workers 8 --compute-ms 900 "
      "--warm-up-codec int8");
  EXPECT_EQ(cheap.exit_code, 0);
  EXPECT_THAT(cheap.output, HasSubstr("step with overlap, int8"));
  EXPECT_THAT(slow.output, Not(HasSubstr("int8")));
  const std::string file = absl::StrCat(::testing::TempDir(), "/predicted.json");
  EXPECT_EQ(RunProgram(absl::StrCat("bench predict --link 1gbit --compute-ms 900 --json ", file))
                .exit_code,
            0);
  EXPECT_THAT(ReadFile(file), HasSubstr("\"verdict\": \"one-bit "));
  const Outcome none =
      RunProgram(absl::StrCat("bench predict --link 1gbit --compute-ms 900 --kernels ", file));
  EXPECT_EQ(none.exit_code, 64);
  EXPECT_THAT(none.output, HasSubstr("is not what 'signpost bench kernels --json' writes: there is "
                                     "no 'compress, fp32' in Gelem/s"));
  const Outcome fast =
      RunProgram("bench predict --link 100gbit --parameters 100000 --workers 2 --compute-ms 900");
  EXPECT_THAT(fast.output, HasSubstr("does not pay"));
  EXPECT_EQ(RunProgram("bench predict --link 1gbit").exit_code, 64);
  const Outcome threads =
      RunProgram("bench predict --link 1gbit --compute-ms 900 --cores 2 --threads 3");
  EXPECT_EQ(threads.exit_code, 64);
  EXPECT_THAT(threads.output, HasSubstr("--threads is 3, and a host has --cores 2"));
}

TEST(Bench, PlaysAnExchangeOfManyWorkers) {
  const Outcome outcome =
      RunProgram("bench scale --link 10gbit --parameters 100000000 --workers 64");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("exchange, one-bit"), HasSubstr("OF BOUND"),
                                    HasSubstr("one-bit: the busiest link"),
                                    HasSubstr("one-bit: all of a host's cores")));
}

TEST(Bench, RefusesWhatItCannotMeasure) {
  EXPECT_EQ(RunProgram("bench").exit_code, 64);
  EXPECT_EQ(RunProgram("bench exchange --codec int3").exit_code, 64);
  EXPECT_THAT(RunProgram("bench exchange --codec int3").output,
              HasSubstr("--codec: int3 not in {bf16,fp16,fp32,int4,int8,onebit}"));
  EXPECT_THAT(RunProgram("bench step --optimizer Adam").output,
              HasSubstr("--optimizer: Adam not in {OneBitAdam,OneBitLamb,ZeroOneAdam}"));
  for (const std::string file : {"/nowhere/at.all", "/", "/proc/version/"}) {
    const Outcome none = RunProgram(absl::StrCat("bench kernels --json ", file));  // at once
    EXPECT_THAT(none.output, HasSubstr(absl::StrCat("--json: cannot write to '", file, "': ")));
    EXPECT_EQ(none.exit_code, 64);
  }
  const Outcome many = RunProgram("bench scale --link 10gbit --parameters 0.1B --workers 64");
  EXPECT_EQ(many.output,
            RunProgram("bench scale --link 10gbit --parameters 100000000 --workers 64").output);
  EXPECT_EQ(RunProgram("bench scale --link 10gbit --parameters 4.1M --workers 64").output,
            RunProgram("bench scale --link 10gbit --parameters 4100000 --workers 64").output);
  for (const std::string count : {"0", "-1", "many", "1.5", "25T", "1e30"}) {
    const Outcome none = RunProgram(absl::StrCat("bench exchange --parameters=", count));
    EXPECT_EQ(none.exit_code, 64);
    EXPECT_THAT(none.output, HasSubstr(absl::StrCat("--parameters: '", count,
                                                    "' is no whole number above 0, like 25M")));
  }
  EXPECT_EQ(RunProgram("k8s render --parameters 340M").output,
            RunProgram("k8s render --parameters 340000000").output);
  EXPECT_EQ(RunProgram("bench predict --link 1Gbit --compute-ms 900").exit_code, 0);
  for (const char* negative : {"k8s render --parameters", "k8s render --workers",
                               "doctor --parameters", "demo-worker --steps", "demo --hidden"}) {
    const Outcome none = RunProgram(absl::StrCat(negative, " -1"));
    EXPECT_EQ(none.exit_code, 64) << negative;
    EXPECT_THAT(none.output, AllOf(HasSubstr("-1"), Not(HasSubstr("18446744073709551615"))));
  }
  const Outcome never = RunProgram("bench predict --link 1gbit --compute-ms nan");
  EXPECT_EQ(never.exit_code, 64);
  EXPECT_THAT(never.output, HasSubstr("--compute-ms: 'nan' is no number above 0"));
  for (const char* large :
       {"predict --link 1gbit --compute-ms 1e308", "scale --link 1gbit --workers 4294967295",
        "predict --link 1gbit --compute-ms 1 --workers 1000000",
        "scale --link 1gbit --parameters 1000000B --workers 64",
        "kernels --elements 999999999999999", "exchange --parameters 1000000000B"}) {
    const Outcome refused = RunProgram(absl::StrCat("bench ", large));
    EXPECT_EQ(refused.exit_code, 64) << large;
    EXPECT_THAT(refused.output, testing::ContainsRegex("at most 1e9|a job has 1 to|are free"));
  }
  EXPECT_THAT(RunProgram("bench kernels --elements 4095").output,
              HasSubstr("--elements is 4095; a block has 4096"));
  EXPECT_EQ(RunProgram("bench exchange --what frames --codec bf16").exit_code, 64);
  EXPECT_THAT(RunProgram("bench exchange --netns fast").output,
              HasSubstr("'fast' is no rate of a link"));
  const Outcome outcome = RunProgram("bench step --peers gloo-adamw");
  EXPECT_EQ(outcome.exit_code, 64);
  EXPECT_THAT(outcome.output, HasSubstr("'./signpost bench ... --peers' builds one"));
  for (const auto& [python, why] : {std::pair{"/nowhere/python3", "No such file or directory"},
                                    {"no-such-python3", "No such file or directory"},
                                    {"/proc/version", "Permission denied"},
                                    {"/tmp", "Permission denied"}}) {
    const Outcome none =
        RunProgram(absl::StrCat("bench exchange --peers gloo-fp32 --python ", python));
    EXPECT_EQ(none.exit_code, 64) << python;
    EXPECT_THAT(none.output, HasSubstr(absl::StrCat("--python: cannot run '", python, "': ", why)));
  }
  const Outcome unknown = RunProgram("bench exchange --peers gloo-fp32,nonsense");
  EXPECT_EQ(unknown.exit_code, 64);
  EXPECT_THAT(unknown.output,
              HasSubstr("--peers: nonsense not in {gloo-fp32,gloo-fp16,gloo-bf16,powersgd-1,"
                        "powersgd-2,mpi}, which exchange and take no steps"));
  const Outcome unlike = RunProgram("bench exchange --peers gloo-fp32,gloo-adamw");
  EXPECT_EQ(unlike.exit_code, 64);
  EXPECT_THAT(unlike.output, HasSubstr("--peers: gloo-adamw not in {gloo-fp32,"));
  EXPECT_THAT(RunProgram("bench step --peers gloo-fp32").output,
              HasSubstr("--peers: gloo-fp32 not in {gloo-adamw}, which take whole steps"));
}

TEST(Checkpoint, NeedsOneToExamine) {
  EXPECT_EQ(RunProgram(absl::StrCat("checkpoint verify ", testing::TempDir(), "/none")).exit_code,
            64);
  const Outcome wrong = RunProgram("checkpoint repair /tmp");
  EXPECT_EQ(wrong.exit_code, 64);
  EXPECT_THAT(wrong.output, HasSubstr("inspect"));
}

TEST(Demo, RefusesBadOptionsBeforeItTrains) {
  const struct {
    const char* arguments;
    const char* error;
  } kCases[] = {
      {"--steps 10 --freeze-step 10", "--freeze-step is 10, wanted 1 to 9"},
      {"--steps 127", "--steps is 127, wanted at least 128"},
      {"--steps 1 --freeze-step 1", "--steps is 1, wanted at least 2"},
      {"--workers 0", "--workers"},
      {"--hidden 0", "--hidden is 0"},
      {"--failure-timeout 1ms", "--failure-timeout"},
      {"--text /nowhere/at.all", "/nowhere/at.all"},
      {"--json /nowhere/at.all", "--json: cannot write to '/nowhere/at.all': No such file"},
      {"--output /proc/nowhere", "--output: cannot write to directory '/proc/nowhere'"},
  };
  for (const auto& bad : kCases) {
    const Outcome outcome = RunProgram(absl::StrCat("demo ", bad.arguments));
    EXPECT_EQ(outcome.exit_code, 64) << bad.arguments;
    EXPECT_THAT(outcome.output, HasSubstr(bad.error));
  }
}

}  // namespace
}  // namespace signpost::cli
