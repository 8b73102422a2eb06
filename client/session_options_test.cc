#include "client/session_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace signpost {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class SessionOptionsTest : public testing::Test {
 protected:
  void SetUp() override {
    setenv("SIGNPOST_AGGREGATORS", "127.0.0.1:4000,127.0.0.1:4001", 1);
    setenv("SIGNPOST_JOB", "nightly", 1);
    setenv("SIGNPOST_RANK", "2", 1);
    setenv("SIGNPOST_WORLD_SIZE", "4", 1);
    for (const char* name :
         {"SIGNPOST_FAILURE_TIMEOUT", "SIGNPOST_JOIN_TIMEOUT", "SIGNPOST_EXCHANGE_TIMEOUT",
          "SIGNPOST_MIN_WORKERS", "SIGNPOST_ROUND_DEADLINE", "SIGNPOST_THREADS",
          "SIGNPOST_CONNECTIONS", "SIGNPOST_NODE", "SIGNPOST_CONFIG", "SIGNPOST_TLS_DIR",
          "SIGNPOST_TOKEN_FILE", "SIGNPOST_INSECURE_I_UNDERSTAND", "LOCAL_WORLD_SIZE"}) {
      unsetenv(name);
    }
  }
};

TEST_F(SessionOptionsTest, ComeFromTheEnvironmentThatRunSets) {
  const absl::StatusOr<SessionOptions> options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->aggregators, ElementsAre("127.0.0.1:4000", "127.0.0.1:4001"));
  EXPECT_EQ(options->worker.job, "nightly");
  EXPECT_EQ(options->worker.rank, 2);
  EXPECT_EQ(options->worker.world_size, 4);
  EXPECT_EQ(options->connections, 1);
  setenv("SIGNPOST_CONNECTIONS", "2", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->connections, 2);
}

TEST_F(SessionOptionsTest, HaveAddressesWithoutBlanksAround) {
  setenv("SIGNPOST_AGGREGATORS", "127.0.0.1:4000, 127.0.0.1:4001 ", 1);
  EXPECT_THAT(SessionOptions::FromEnvironment()->aggregators,
              ElementsAre("127.0.0.1:4000", "127.0.0.1:4001"));
}

TEST_F(SessionOptionsTest, HaveAddressesWithoutBlanksAroundAlsoIfAProgramSetsThem) {
  SessionOptions options = *SessionOptions::FromEnvironment();
  options.aggregators = {" 127.0.0.1:4000", "127.0.0.1:4001\n"};
  const auto channels = ConnectTo(options);
  ASSERT_TRUE(channels.ok()) << channels.status();
  EXPECT_EQ((*channels)[0]->target(), "127.0.0.1:4000");
  EXPECT_EQ((*channels)[1]->target(), "127.0.0.1:4001");
  EXPECT_THAT(PortsOf(options), ElementsAre(4000, 4001));
}

TEST_F(SessionOptionsTest, RefuseConnectionsThatAreTooFewOrTooMany) {
  SessionOptions options = *SessionOptions::FromEnvironment();
  for (const uint32_t connections : {0u, SessionOptions::kMostConnections + 1}) {
    options.connections = connections;
    const absl::Status status = ConnectTo(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("wanted 1 to 64"));
  }
}

TEST_F(SessionOptionsTest, NameTheVariableThatIsMissing) {
  for (const char* name :
       {"SIGNPOST_AGGREGATORS", "SIGNPOST_JOB", "SIGNPOST_RANK", "SIGNPOST_WORLD_SIZE"}) {
    SetUp();
    unsetenv(name);
    const absl::Status status = SessionOptions::FromEnvironment().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  }
}

TEST_F(SessionOptionsTest, NeedNoAggregatorsWhereTheNodeHasAWorker) {
  EXPECT_EQ(SessionOptions::FromEnvironment()->node, "");
  setenv("SIGNPOST_NODE", "unix:/run/signpost/worker", 1);
  EXPECT_THAT(SessionOptions::FromEnvironment()->aggregators,
              ElementsAre("127.0.0.1:4000", "127.0.0.1:4001"));
  unsetenv("SIGNPOST_AGGREGATORS");
  const absl::StatusOr<SessionOptions> options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->node, "unix:/run/signpost/worker");
  EXPECT_THAT(options->aggregators, ElementsAre());
  EXPECT_EQ(options->worker.rank, 2);
}

TEST_F(SessionOptionsTest, TakeTheFailureTimeoutFromTheEnvironmentIfItIsThere) {
  EXPECT_EQ(SessionOptions::FromEnvironment()->failure_timeout.duration(), absl::Seconds(10));
  setenv("SIGNPOST_FAILURE_TIMEOUT", "1500ms", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->failure_timeout.duration(),
            absl::Milliseconds(1500));
}

TEST_F(SessionOptionsTest, RefuseAFailureTimeoutThatIsNone) {
  for (const char* text : {"soon", "100ms"}) {
    setenv("SIGNPOST_FAILURE_TIMEOUT", text, 1);
    const absl::Status status = SessionOptions::FromEnvironment().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("SIGNPOST_FAILURE_TIMEOUT"), HasSubstr(text)));
  }
}

TEST_F(SessionOptionsTest, TakeTimeoutsFromTheEnvironmentIfTheyAreThere) {
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.join_timeout, absl::Minutes(5));
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.exchange_timeout, absl::Minutes(1));
  setenv("SIGNPOST_JOIN_TIMEOUT", "1h", 1);
  setenv("SIGNPOST_EXCHANGE_TIMEOUT", "1m30s", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.join_timeout, absl::Hours(1));
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.exchange_timeout, absl::Seconds(90));
}

TEST_F(SessionOptionsTest, RefuseTimeoutsThatAreNone) {
  for (const char* name : {"SIGNPOST_JOIN_TIMEOUT", "SIGNPOST_EXCHANGE_TIMEOUT"}) {
    for (const char* text : {"soon", "60", "0s", "-1s"}) {
      SetUp();
      setenv(name, text, 1);
      const absl::Status status = SessionOptions::FromEnvironment().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(std::string(name) + " is '" + text + "', wanted a duration above 0"));
    }
  }
}

TEST_F(SessionOptionsTest, SayHowConnectionsAreProtected) {
  setenv("SIGNPOST_TLS_DIR", "certificates", 1);
  setenv("SIGNPOST_TOKEN_FILE", "token", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->security.tls_dir, "certificates");
  EXPECT_EQ(SessionOptions::FromEnvironment()->security.token_file, "token");
  EXPECT_FALSE(SessionOptions::FromEnvironment()->security.insecure);
  setenv("SIGNPOST_INSECURE_I_UNDERSTAND", "1", 1);
  EXPECT_TRUE(SessionOptions::FromEnvironment()->security.insecure);
  setenv("SIGNPOST_INSECURE_I_UNDERSTAND", "yes", 1);
  EXPECT_THAT(std::string(SessionOptions::FromEnvironment().status().message()),
              HasSubstr("SIGNPOST_INSECURE_I_UNDERSTAND is 'yes', wanted 1"));
  setenv("SIGNPOST_INSECURE_I_UNDERSTAND", "0", 1);
  unsetenv("SIGNPOST_TLS_DIR");
  unsetenv("SIGNPOST_TOKEN_FILE");
  EXPECT_EQ(SessionOptions::FromEnvironment()->security.tls_dir, "");
  EXPECT_EQ(SessionOptions::FromEnvironment()->security.token_file, "");
  EXPECT_FALSE(SessionOptions::FromEnvironment()->security.insecure);
}

TEST_F(SessionOptionsTest, ComeFromAFileWhereTheEnvironmentSaysNothing) {
  const std::string path = testing::TempDir() + "/job.yaml";
  std::ofstream(path)
      << "job: of-the-file\n"
         "aggregators: [10.0.0.1:4000, 10.0.0.2:4000]\n"
         "world-size: 16\n"
         "failure-timeout: 20s\n"
         "exchange-timeout: 10m\n"
         "tls-dir: certificates\n"
         "session: {threads: 3, connections: 4, min-workers: 15, round-deadline: 2s}\n";
  setenv("SIGNPOST_CONFIG", path.c_str(), 1);
  for (const char* name : {"SIGNPOST_AGGREGATORS", "SIGNPOST_JOB", "SIGNPOST_WORLD_SIZE"}) {
    unsetenv(name);
  }
  const absl::StatusOr<SessionOptions> options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->aggregators, ElementsAre("10.0.0.1:4000", "10.0.0.2:4000"));
  EXPECT_EQ(options->worker.job, "of-the-file");
  EXPECT_EQ(options->worker.rank, 2);
  EXPECT_EQ(options->worker.world_size, 16);
  EXPECT_EQ(options->failure_timeout.duration(), absl::Seconds(20));
  EXPECT_EQ(options->worker.exchange_timeout, absl::Minutes(10));
  EXPECT_EQ(options->security.tls_dir, "certificates");
  EXPECT_EQ(options->worker.threads, 3);
  EXPECT_EQ(options->worker.min_workers, 15);
  EXPECT_EQ(options->worker.round_deadline, absl::Seconds(2));
  EXPECT_EQ(*ThreadsFromEnvironment(), 3);
  EXPECT_EQ(options->connections, 4);
  EXPECT_EQ(*ConnectionsFromEnvironment(), 4);
  setenv("SIGNPOST_JOB", "nightly", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.job, "nightly");
}

TEST_F(SessionOptionsTest, ComeFromTheFileAsItWasWhenTheProcessReadIt) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(testing::TempDir());
  setenv("SIGNPOST_CONFIG", "relative.yaml", 1);
  std::ofstream("relative.yaml") << "threads: 5\ntrace: traces\n";
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.threads, 5);
  std::ofstream("relative.yaml") << "half of a fi";
  EXPECT_EQ(*ThreadsFromEnvironment(), 5);
  std::filesystem::current_path("/");
  EXPECT_EQ(*TraceFromEnvironment(), "traces");
  setenv("SIGNPOST_THREADS", "6", 1);
  EXPECT_EQ(*ThreadsFromEnvironment(), 6);  // variables may change
  std::filesystem::current_path(before);
}

TEST_F(SessionOptionsTest, NameTheLineOfTheFileThatIsMalformed) {
  for (const auto& [line, complaint] : std::vector<std::pair<std::string, std::string>>{
           {"rank: second", "rank is 'second', wanted a number"},
           {"failure-timeout: soon", "failure-timeout: "},
           {"join-timeout: 300", "join-timeout is '300', wanted a duration above 0"},
           {"insecure-i-understand: yes", "insecure-i-understand is 'yes', wanted 1"},
           {"threads: 0", "threads is '0', wanted 1 to 256"},
           {"connections: 65", "connections is '65', wanted 1 to 64"},
           {"round-deadline: 2s", "SIGNPOST_MIN_WORKERS"},
           {"{min-workers: 3, round-deadline: soon}", "round-deadline is 'soon', wanted"}}) {
    const bool has_rank = line.find("rank") == 0;
    has_rank ? unsetenv("SIGNPOST_RANK") : setenv("SIGNPOST_RANK", "0", 1);
    const std::string path = testing::TempDir() + "/" + std::to_string(line.size()) + ".yaml";
    setenv("SIGNPOST_CONFIG", path.c_str(), 1);
    std::ofstream(path) << "# one key\n" << line << "\n";
    const std::string message(SessionOptions::FromEnvironment().status().message());
    EXPECT_THAT(message, HasSubstr(complaint));
    if (line == "round-deadline: 2s") continue;
    EXPECT_THAT(message, HasSubstr(path + ":2: "));
  }
}

TEST_F(SessionOptionsTest, TakeTheRoundDeadlineFromTheEnvironmentIfItIsThere) {
  setenv("SIGNPOST_MIN_WORKERS", "3", 1);
  EXPECT_THAT(std::string(SessionOptions::FromEnvironment().status().message()),
              HasSubstr("SIGNPOST_ROUND_DEADLINE"));
  setenv("SIGNPOST_ROUND_DEADLINE", "soon", 1);
  EXPECT_THAT(std::string(SessionOptions::FromEnvironment().status().message()),
              AllOf(HasSubstr("SIGNPOST_ROUND_DEADLINE"), HasSubstr("soon")));
  setenv("SIGNPOST_ROUND_DEADLINE", "1.5s", 1);
  const absl::StatusOr<SessionOptions> options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->worker.round_deadline, absl::Milliseconds(1500));
  EXPECT_EQ(options->worker.min_workers, 3);
}

// Confines this thread to some of its processors.
class Confined {
 public:
  explicit Confined(int processors) {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t some;
    CPU_ZERO(&some);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&some) < processors; ++cpu) {
      if (CPU_ISSET(cpu, &before_)) CPU_SET(cpu, &some);
    }
    sched_setaffinity(0, sizeof some, &some);
  }
  ~Confined() { sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_;
};

TEST_F(SessionOptionsTest, TakeThreadsFromTheProcessorsThereAreForThisProcess) {
  EXPECT_GE(SessionOptions::FromEnvironment()->worker.threads, 1);
  EXPECT_LE(SessionOptions::FromEnvironment()->worker.threads, 8);
  {
    const Confined one(1);
    EXPECT_EQ(SessionOptions::FromEnvironment()->worker.threads, 1);
  }
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  if (CPU_COUNT(&all) > 1) {
    const Confined two(2);
    EXPECT_EQ(SessionOptions::FromEnvironment()->worker.threads, 2);
    EXPECT_EQ(ShareOfProcessors(1), 2);
    EXPECT_EQ(ShareOfProcessors(2), 1);
    EXPECT_EQ(ShareOfProcessors(3), 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    EXPECT_EQ(SessionOptions::FromEnvironment()->worker.threads, 1);
  }
  setenv("LOCAL_WORLD_SIZE", "1000000", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.threads, 1);
  setenv("SIGNPOST_THREADS", "", 1);  // as if it were not set
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.threads, 1);
  setenv("SIGNPOST_THREADS", "12", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->worker.threads, 12);
  for (const char* text : {"0", "many", "257"}) {
    setenv("SIGNPOST_THREADS", text, 1);
    EXPECT_THAT(std::string(SessionOptions::FromEnvironment().status().message()),
                AllOf(HasSubstr("SIGNPOST_THREADS"), HasSubstr(text)));
  }
}

TEST_F(SessionOptionsTest, NameTheVariableThatIsNoNumber) {
  setenv("SIGNPOST_RANK", "two", 1);
  EXPECT_THAT(std::string(SessionOptions::FromEnvironment().status().message()),
              AllOf(HasSubstr("SIGNPOST_RANK"), HasSubstr("'two'")));
}

}  // namespace
}  // namespace signpost
