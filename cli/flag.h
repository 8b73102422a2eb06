// What CLI11 knows of a command's flags and arguments, in the words of those who tell of them: the
// manual and the completion.

#ifndef SIGNPOST_CLI_FLAG_H_
#define SIGNPOST_CLI_FLAG_H_

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_join.h"

namespace signpost::cli {

// A flag, or an argument, which has no names.
struct Flag {
  std::vector<std::string> names;  // "-n", "--workers"
  std::string value;               // "DIR", "I/N", "kill|stop,..."; empty: it takes none
  std::string help;
  std::string default_value;  // empty: none, or the help tells it
  std::string variable;       // of the environment, that says it too; empty: none
  bool is_required = false;
  bool is_repeated = false;  // it takes several values, one behind the other
  bool is_list = false;      // several with commas in between
};

// In the order in which they were added, without those that are hidden.
std::vector<Flag> FlagsOf(const CLI::App& command);
std::vector<Flag> ArgumentsOf(const CLI::App& command);

// Its commands, without those that are hidden.
std::vector<const CLI::App*> CommandsOf(const CLI::App& command);

// For options that are numbers above 0, and up to 1e9. A count may have a unit: 25M, 1.5B.
CLI::Validator PositiveNumber();
CLI::Validator Share();  // 0 to 1
CLI::Validator PositiveCount();

// An option whose value is one of these names, and its variable what stands behind that. They must
// stay as long as `app`.
template <class T>
CLI::Option* AddChoice(CLI::App& app, const std::string& flag, T& variable,
                       const std::map<std::string, T>& names, const std::string& help) {
  std::vector<std::string> all;
  for (const auto& [name, value] : names) all.push_back(name);
  return app
      .add_option_function<std::string>(
          flag, [&variable, &names](const std::string& name) { variable = names.at(name); }, help)
      ->check(CLI::IsMember(all).description(""))
      ->type_name(absl::StrJoin(all, "|"));
}

// For options that name a file which will be written: it must be writable, or its directory.
CLI::Validator WritableFile();
// "cannot write to 'out/figures.json': Permission denied"; empty if it can be written now.
std::string WhyNotWritable(const std::filesystem::path& file);

// Has the usage say that such a command line stands behind the flags: "-- COMMAND [ARG ...]".
void SetUsageOfTail(CLI::App& command, std::string tail);
std::string UsageOfTail(const CLI::App& command);  // empty: nothing does

// "signpost cert init"
std::string FullNameOf(const CLI::App& command);

// What a value may be where it is one of a few, as "cpu|cuda[:N]" says: "cpu", "cuda".
std::vector<std::string> ChoicesOf(const Flag& flag);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_FLAG_H_
