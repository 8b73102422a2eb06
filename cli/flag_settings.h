// Flags that the command line does not give: the environment says what they are, or a configuration
// file. CLI11 reads both too, but takes the file before the environment, and does not say where a
// value came from.

#ifndef SIGNPOST_CLI_FLAG_SETTINGS_H_
#define SIGNPOST_CLI_FLAG_SETTINGS_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/file.h"
#include "config/setting.h"

namespace signpost::cli {

// Gives --config to each command that a file has a section for, and to those inside it.
void AddConfigFlags(CLI::App& program);

// A flag as files have it.
struct FileKey {
  std::string name, type, standard, variable, meaning;
};

// Of each of the commands that files have sections for, "cert init", and in their order; without
// hidden ones.
std::vector<std::pair<std::string, std::vector<FileKey>>> FileKeys(CLI::App& program);

// While it lives, CLI11 takes the command line for all there is: it reads no variables, and does
// not ask for flags that somebody else may give. Afterwards all is as it was.
class CommandLineAlone {
 public:
  explicit CommandLineAlone(CLI::App& program);
  ~CommandLineAlone();
  CommandLineAlone(const CommandLineAlone&) = delete;
  CommandLineAlone& operator=(const CommandLineAlone&) = delete;

 private:
  struct Rules {
    std::string variable;
    bool is_required;
    std::set<CLI::Option*> needs, excludes;
  };
  void PutAside(CLI::App& app);

  std::map<CLI::Option*, Rules> rules_;
};

// Where the flags of a command come from.
struct FlagSettings {
  std::optional<config::File> file;
  std::vector<config::Key> keys;  // the flags that a file can have, in the order of --help
};

// After the command line has been parsed with CommandLineAlone: gives the chosen command's flags
// what variables (envname) and file say, where they are stronger, and then holds all to what
// CLI11 was not asked to. Of two that exclude each other the stronger one counts.
//
// The file is --config, or SIGNPOST_CONFIG; processes that this one starts get it too. Any key of
// it that no command has is an error, also in sections of other commands. INVALID_ARGUMENT names
// the flag, the variable or the line.
absl::StatusOr<FlagSettings> FillIn(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_FLAG_SETTINGS_H_
