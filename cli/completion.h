// What a shell offers behind the words that have been typed. Shells' scripts only ask for it, so
// what they offer is what this program has, whenever they were installed.

#ifndef SIGNPOST_CLI_COMPLETION_H_
#define SIGNPOST_CLI_COMPLETION_H_

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost::cli {

struct Candidate {
  std::string word;  // the whole word, with what has been typed of it
  std::string help;  // what it is for; may be empty
};

struct Completion {
  enum class Kind {
    kWords,        // one of the candidates, and nothing else
    kFiles,        // a file or directory
    kDirectories,  // a directory
    kCommand,      // a program and its arguments, which begin behind the first "--"
  };
  Kind kind = Kind::kWords;
  std::vector<Candidate> candidates;  // of kWords, in the order in which the program has them
};

// What may stand for the last of `words`, which has been typed in part or not at all. The words
// are those behind the program's name.
Completion Complete(const CLI::App& program, const std::vector<std::string>& words);

// What the scripts read: the kind, then a line for each candidate, with a tab before its help.
std::string FormatCompletion(const Completion& completion);

// The script by which bash, zsh or fish asks for that, with `signpost complete`. INVALID_ARGUMENT
// for another shell.
absl::StatusOr<std::string> CompletionScript(absl::string_view shell);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_COMPLETION_H_
