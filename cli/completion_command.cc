#include "cli/completion_command.h"

#include <cstdio>
#include <memory>

#include "absl/status/statusor.h"
#include "cli/completion.h"
#include "proto/exit_code.h"

namespace signpost::cli {

Command AddCompletionCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto shell = std::make_shared<std::string>();
  CLI::App& app = *program.add_subcommand(
      "completion", "Write the script with which a shell completes commands and flags");
  app.footer(
      "The script asks the program whenever Tab is pressed, so it need not be installed again "
      "with\n"
      "another version.\n\n"
      "Examples:\n"
      "  source <(signpost completion bash)\n"
      "  signpost completion bash > ~/.local/share/bash-completion/completions/signpost\n"
      "  source <(signpost completion zsh)\n"
      "  signpost completion fish > ~/.config/fish/completions/signpost.fish");
  app.add_option("shell", *shell, "The shell that the script is for")
      ->type_name("bash|zsh|fish")
      ->required();
  return {&app, [shell]() -> absl::StatusOr<int> {
            const absl::StatusOr<std::string> script = CompletionScript(*shell);
            if (!script.ok()) return script.status();
            std::fputs(script->c_str(), stdout);
            return kExitOk;
          }};
}

Command AddCompleteCommand(CLI::App& program, const std::vector<std::string>& tail) {
  CLI::App& app = *program.add_subcommand("complete", "What may stand for the last of some words");
  app.group("");  // hidden
  return {&app, [&program, &tail]() -> absl::StatusOr<int> {
            std::fputs(FormatCompletion(Complete(program, tail)).c_str(), stdout);
            return kExitOk;
          }};
}

}  // namespace signpost::cli
