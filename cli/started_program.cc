#include "cli/started_program.h"

#include <sys/wait.h>

#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace signpost::cli {

Started::Started(const std::string& shell_command)
    : stream_(popen(absl::StrCat("exec ", shell_command, " 2>&1").c_str(), "r")) {}

Started::~Started() {
  if (stream_ != nullptr) End();
}

std::string Started::ReadLine() {
  char line[4096];
  if (fgets(line, sizeof line, stream_) == nullptr) return "";
  return std::string(absl::StripSuffix(line, "\n"));
}

Outcome Started::End() {
  Outcome outcome;
  for (int byte; (byte = fgetc(stream_)) != EOF;) {
    outcome.output.push_back(static_cast<char>(byte));
  }
  const int status = pclose(std::exchange(stream_, nullptr));
  outcome.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return outcome;
}

Outcome RunProgram(const std::string& arguments) {
  return Started(absl::StrCat(kProgram, " ", arguments)).End();
}

std::string WithPid(const std::string& arguments) {
  return absl::StrCat("sh -c 'echo $$; exec ", kProgram, " ", arguments, "'");
}

pid_t ToPid(absl::string_view line) {
  pid_t pid = 0;
  EXPECT_TRUE(absl::SimpleAtoi(line, &pid)) << line;
  return pid;
}

std::string Training(int steps) {
  return absl::StrCat(kProgram, " demo-worker --hidden 8 --layers 1 --batch 1 --steps ", steps,
                      " --results ", testing::TempDir());
}

std::string ReadFile(const std::string& path) {
  std::ostringstream contents;
  contents << std::ifstream(path).rdbuf();
  return contents.str();
}

std::string WriteConfig(const std::string& text) {
  const std::string path = testing::TempDir() + "/job.yaml";
  std::ofstream(path) << text;
  return path;
}

}  // namespace signpost::cli
