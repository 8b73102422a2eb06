// The program as a process of its own, for tests that kill or stop it.

#ifndef SIGNPOST_TESTS_SERVER_PROCESS_H_
#define SIGNPOST_TESTS_SERVER_PROCESS_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace signpost::testing {

class ProgramProcess {
 public:
  // `environment` is what is set in it: "NAME=VALUE NAME=VALUE".
  explicit ProgramProcess(const std::string& command, const std::string& environment = "")
      : output_(popen(
            absl::StrCat("echo $$; exec env ", environment, " cli/signpost ", command).c_str(),
            "r")) {
    EXPECT_TRUE(absl::SimpleAtoi(ReadLine(), &pid_));
  }
  ~ProgramProcess() {
    if (output_ == nullptr) return;
    kill(pid_, SIGKILL);
    pclose(output_);
  }
  ProgramProcess(const ProgramProcess&) = delete;
  ProgramProcess& operator=(const ProgramProcess&) = delete;

  // SIGKILL or SIGSTOP. Returns when it has ended, or stopped.
  void Signal(int signal) {
    kill(pid_, signal);
    Await(WEXITED | WSTOPPED);
  }
  void Continue() { kill(pid_, SIGCONT); }
  // Returns when it has stopped itself, or ended.
  void AwaitStop() { Await(WEXITED | WSTOPPED); }
  // Its exit code, once it has ended by itself.
  int End() {
    Await(WEXITED);
    const int status = pclose(std::exchange(output_, nullptr));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 protected:
  std::string ReadLine() {
    char line[256] = "";
    EXPECT_NE(fgets(line, sizeof line, output_), nullptr);
    return std::string(absl::StripSuffix(line, "\n"));
  }

 private:
  void Await(int events) {
    siginfo_t info;
    EXPECT_EQ(waitid(P_PID, pid_, &info, events | WNOWAIT), 0);
  }

  FILE* output_;
  pid_t pid_ = 0;
};

// `signpost aggregator` or `signpost worker`.
class ServerProcess : public ProgramProcess {
 public:
  // Returns when it listens.
  explicit ServerProcess(const std::string& command) : ProgramProcess(command) {
    const std::string line = ReadLine();
    target_ = std::string(absl::StripPrefix(line, "listening on "));
    EXPECT_NE(target_, line);
  }

  const std::string& target() const { return target_; }

 private:
  std::string target_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_SERVER_PROCESS_H_
