// signpost config: where values come from.

#ifndef SIGNPOST_CLI_CONFIG_COMMAND_H_
#define SIGNPOST_CLI_CONFIG_COMMAND_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/command.h"

namespace signpost::cli {

// What stands behind `config explain` and its own flags is for another command to parse, which
// CLI11 would start instead: it is taken out of `arguments` and returned.
std::vector<std::string> TakeExplained(std::vector<std::string>& arguments);

// `signpost config explain` parses another command's flags, `explained`, with the whole program.
Command AddConfigCommand(CLI::App& program, const std::vector<std::string>& explained);

// What `signpost config explain` prints of what stands behind it: a command and its flags,
// "session", "optimizer", or nothing, which is the latter two. `file` is its own --config, or
// empty. Errors as Parse's, SessionSettings' and OptimizerConfig's.
absl::StatusOr<std::string> ExplainConfig(CLI::App& program, const std::string& file,
                                          const std::vector<std::string>& arguments);

// All keys that a file may have, as tables in Markdown: those of docs/configuration.md.
std::string ListConfigKeys(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_CONFIG_COMMAND_H_
