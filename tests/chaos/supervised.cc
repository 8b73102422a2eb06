#include "tests/chaos/supervised.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"
#include "proto/failure_timeout.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

// Points into `strings`, which it ends with a null.
std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

Supervised::Supervised(const SupervisedOptions& options)
    : options_(options), thread_([this] { Supervise(); }) {}

Supervised::~Supervised() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (pid_ != 0) kill(pid_, SIGKILL);
  }
  thread_.join();
}

std::string Supervised::target() const {
  absl::MutexLock lock(&mutex_);
  const auto is_known = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !target_.empty(); };
  EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&is_known), kPatience)) << "nobody listens";
  return target_;
}

void Supervised::Signal(int signal) const {
  absl::MutexLock lock(&mutex_);
  if (pid_ != 0) kill(pid_, signal);
}

pid_t Supervised::pid() const {
  absl::MutexLock lock(&mutex_);
  return pid_;
}

std::vector<int> Supervised::ends() const {
  absl::MutexLock lock(&mutex_);
  return ends_;
}

bool Supervised::AwaitListeningAfter(size_t ends) const {
  absl::MutexLock lock(&mutex_);
  const auto is_so = [this, ends]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return ends_.size() >= ends && listening_;
  };
  return mutex_.AwaitWithTimeout(absl::Condition(&is_so), kPatience);
}

// The thread.

void Supervised::Supervise() {
  for (size_t start = 0;; ++start) {
    RunOnce(start);
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    options_.before_restart();
  }
}

void Supervised::RunOnce(size_t start) {
  int output[2];
  ASSERT_EQ(pipe2(output, O_CLOEXEC), 0) << std::strerror(errno);
  const pid_t pid = Start(start, output[1]);
  close(output[1]);
  {
    absl::MutexLock lock(&mutex_);
    pid_ = pid;
    if (stopping_) kill(pid, SIGKILL);
  }
  FILE* const lines = fdopen(output[0], "r");
  char line[256] = "";
  absl::string_view address;
  if (fgets(line, sizeof line, lines) != nullptr) {
    address = absl::StripSuffix(line, "\n");
    EXPECT_TRUE(absl::ConsumePrefix(&address, "listening on ")) << line;
    absl::MutexLock lock(&mutex_);
    target_ = std::string(address);
    listening_ = true;
  }
  siginfo_t info;  // it keeps its number until nobody can send it a signal any more
  EXPECT_EQ(waitid(P_PID, pid, &info, WEXITED | WNOWAIT), 0);
  fclose(lines);
  absl::MutexLock lock(&mutex_);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  pid_ = 0;
  listening_ = false;
  ends_.push_back(status);
}

pid_t Supervised::Start(size_t start, int output) const {
  std::string listen = options_.listen;
  {
    absl::MutexLock lock(&mutex_);
    if (!target_.empty()) listen = target_;
  }
  // It dies with the thread that starts it.
  std::vector<std::string> command = {"setpriv", "--pdeathsig", "KILL"};
  command.insert(command.end(), options_.wrapper.begin(), options_.wrapper.end());
  for (const std::string& argument :
       {std::string("cli/signpost"), std::string("aggregator"), absl::StrCat("--listen=", listen),
        absl::StrCat("--shard=", options_.shard, "/", options_.shard_count),
        absl::StrCat("--failure-timeout=", options_.failure_timeout)}) {
    command.push_back(argument);
  }
  command.insert(command.end(), options_.flags.begin(), options_.flags.end());
  if (!options_.state_dir.empty()) {
    command.push_back(absl::StrCat("--state-dir=", options_.state_dir));
  }
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  if (start < options_.failpoints.size()) {
    environment.push_back(absl::StrCat("SIGNPOST_FAILPOINT=", options_.failpoints[start]));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, command[0].c_str(), &actions, nullptr,
                                 Pointers(command).data(), Pointers(environment).data());
  EXPECT_EQ(error, 0) << std::strerror(error);
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

std::vector<std::unique_ptr<Channel>> ConnectTo(
    const std::vector<std::unique_ptr<Supervised>>& shards) {
  std::vector<std::unique_ptr<Channel>> channels;
  for (const auto& shard : shards) {
    channels.push_back(ConnectToAggregator(shard->target(), *FailureTimeout::Of(absl::Seconds(1))));
  }
  return channels;
}

}  // namespace signpost::testing
