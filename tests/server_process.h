// `signpost aggregator` or `signpost worker` as a process of its own, for tests that kill or stop
// it.

#ifndef SIGNPOST_TESTS_SERVER_PROCESS_H_
#define SIGNPOST_TESTS_SERVER_PROCESS_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdio>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace signpost::testing {

class ServerProcess {
 public:
  // Returns when it listens.
  explicit ServerProcess(const std::string& command)
      : output_(popen(absl::StrCat("echo $$; exec cli/signpost ", command).c_str(), "r")) {
    EXPECT_TRUE(absl::SimpleAtoi(ReadLine(), &pid_));
    const std::string line = ReadLine();
    target_ = std::string(absl::StripPrefix(line, "listening on "));
    EXPECT_NE(target_, line);
  }
  ~ServerProcess() {
    kill(pid_, SIGKILL);
    pclose(output_);
  }

  const std::string& target() const { return target_; }

  // SIGKILL or SIGSTOP. Returns when it has ended, or stopped.
  void Signal(int signal) {
    kill(pid_, signal);
    siginfo_t info;
    EXPECT_EQ(waitid(P_PID, pid_, &info, WEXITED | WSTOPPED | WNOWAIT), 0);
  }
  void Continue() { kill(pid_, SIGCONT); }

 private:
  std::string ReadLine() {
    char line[256] = "";
    EXPECT_NE(fgets(line, sizeof line, output_), nullptr);
    return std::string(absl::StripSuffix(line, "\n"));
  }

  FILE* output_;
  pid_t pid_ = 0;
  std::string target_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_SERVER_PROCESS_H_
