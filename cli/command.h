// What every command of the program has in common.

#ifndef SIGNPOST_CLI_COMMAND_H_
#define SIGNPOST_CLI_COMMAND_H_

#include <functional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cli/flag_settings.h"
#include "proto/failure_timeout.h"
#include "security/transport_security.h"

namespace signpost::cli {

// A command: its flags, and what it does once they are parsed.
struct Command {
  CLI::App* flags;
  // Returns the exit code, or the error that becomes message and exit code in main.
  std::function<absl::StatusOr<int>()> run;
  // Whether what it writes is what it was called for: then standard output must take all of it.
  bool answers = true;
};

// A flag whose value is a duration, such as 500ms, 10s or 1h30m, and not negative.
CLI::Option* AddDurationFlag(CLI::App& flags, const std::string& name, absl::Duration& value,
                             const std::string& help);

// --failure-timeout.
CLI::Option* AddFailureTimeoutFlag(CLI::App& flags, FailureTimeout& value, const std::string& help);

// "warning: ...", to standard error.
void PrintWarning(const std::string& line);

// --log-format, which is $SIGNPOST_LOG_FORMAT too, for all of the program's commands, and theirs.
void AddLogFlags(CLI::App& program);

// --tls-dir and --insecure-i-understand.
void AddSecurityFlags(CLI::App& flags, TransportSecurity& value);
// The same and --token-file, for commands that connect to aggregators.
void AddClientSecurityFlags(CLI::App& flags, TransportSecurity& value);

// "HOST:PORT" or "unix:PATH" addresses separated by commas. INVALID_ARGUMENT names the one that is
// none.
absl::StatusOr<std::vector<std::string>> ParseAddresses(const std::string& addresses);

// What stands behind the first "--" belongs to somebody else: it is taken out of `arguments` and
// returned.
std::vector<std::string> TakeTail(std::vector<std::string>& arguments);

// Whether that may be for this command: "signpost run", say.
bool TakesTail(absl::string_view command);

// Parses `arguments` (without the program's name) into the program's and its commands' flags.
// What the arguments do not say comes from the environment and from a configuration file (FillIn).
// INVALID_ARGUMENT for an unknown command or flag, with a suggestion, and for a bad value. When
// help was asked for, and not of an unknown command, prints it and returns CANCELLED.
absl::Status Parse(CLI::App& program, const std::vector<std::string>& arguments);
// The same, and where the command's flags come from.
absl::StatusOr<FlagSettings> ParseAndExplain(CLI::App& program,
                                             const std::vector<std::string>& arguments);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_COMMAND_H_
