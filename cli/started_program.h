// The program as its user has it: started, written to, interrupted.

#ifndef SIGNPOST_CLI_STARTED_PROGRAM_H_
#define SIGNPOST_CLI_STARTED_PROGRAM_H_

#include <sys/types.h>

#include <cstdio>
#include <string>

#include "absl/strings/string_view.h"

namespace signpost::cli {

inline constexpr char kProgram[] = "cli/signpost";  // tests run where their data is

struct Outcome {
  int exit_code = 0;
  std::string output;  // both streams
};

// A program that runs in its own right, with both its streams into one pipe.
class Started {
 public:
  explicit Started(const std::string& shell_command);
  ~Started();

  std::string ReadLine();

  // Reads what is left and waits for the end.
  Outcome End();

 private:
  FILE* stream_;
};

Outcome RunProgram(const std::string& arguments);

// Writes its process number as the first line of the shell command's output.
std::string WithPid(const std::string& arguments);
pid_t ToPid(absl::string_view line);

// A worker that trains until it is stopped (20000 steps are some seconds), and shows early that it
// has begun.
std::string Training(int steps = 20000);

std::string ReadFile(const std::string& path);
// Writes the file, and returns its path.
std::string WriteConfig(const std::string& text);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_STARTED_PROGRAM_H_
