#include "cli/man_command.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cli/flag.h"
#include "cli/manual.h"
#include "config/suggestion.h"
#include "proto/exit_code.h"

namespace signpost::cli {
namespace {

absl::StatusOr<std::string> PageOf(const CLI::App& program, const std::string& command) {
  if (command.empty()) return ManualOf(program);
  std::vector<std::string> names;
  for (const CLI::App* known : CommandsOf(program)) {
    if (known->get_name() == command) return ManualOfCommand(*known);
    names.push_back(known->get_name());
  }
  const std::string suggestion = config::Nearest(command, names);
  return absl::InvalidArgumentError(
      absl::StrCat("there is no command '", command, "'",
                   suggestion.empty() ? "" : absl::StrCat("; did you mean '", suggestion, "'?"),
                   "\nAll there are: signpost --help"));
}

}  // namespace

Command AddManCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto name = std::make_shared<std::string>();
  CLI::App& app = *program.add_subcommand("man", "Write the manual, for man(1)");
  app.footer(
      "Examples:\n"
      "  signpost man | man -l -\n"
      "  signpost man run | man -l -\n"
      "  signpost man > ~/.local/share/man/man1/signpost.1");
  app.add_option("command", *name, "The command whose manual is wanted [the whole program's]")
      ->type_name("COMMAND");
  return {&app, [name, &program]() -> absl::StatusOr<int> {
            const absl::StatusOr<std::string> page = PageOf(program, *name);
            if (!page.ok()) return page.status();
            std::fputs(page->c_str(), stdout);
            return kExitOk;
          }};
}

}  // namespace signpost::cli
