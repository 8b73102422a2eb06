#include "cli/command.h"

#include <algorithm>
#include <iostream>
#include <iterator>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cli/flag.h"
#include "config/suggestion.h"
#include "log/log.h"
#include "security/loopback.h"

namespace signpost::cli {

CLI::Option* AddDurationFlag(CLI::App& flags, const std::string& name, absl::Duration& value,
                             const std::string& help) {
  auto parse = [&value, name](const std::string& text) {
    if (!absl::ParseDuration(text, &value) || value < absl::ZeroDuration()) {
      throw CLI::ValidationError(
          name, absl::StrCat("'", text, "' is not a duration: 500ms, 10s, 5m or 1h30m are"));
    }
  };
  return flags.add_option_function<std::string>(name, parse, help)->type_name("DURATION");
}

CLI::Option* AddFailureTimeoutFlag(CLI::App& flags, FailureTimeout& value,
                                   const std::string& help) {
  static constexpr char kName[] = "--failure-timeout";
  auto parse = [&value](const std::string& text) {
    const absl::StatusOr<FailureTimeout> parsed = FailureTimeout::Parse(text);
    if (!parsed.ok()) {
      throw CLI::ValidationError(kName, std::string(parsed.status().message()));
    }
    value = *parsed;
  };
  return flags
      .add_option_function<std::string>(kName, parse,
                                        absl::StrCat(help, " [", value.ToString(), "]"))
      ->type_name("DURATION")
      ->envname("SIGNPOST_FAILURE_TIMEOUT");
}

void PrintWarning(const std::string& line) { log::Write(log::Level::kWarning, "warning", line); }

void AddLogFlags(CLI::App& program) {
  const auto set = [](const std::string& format) {
    if (absl::Status status = log::SetFormat(format); !status.ok()) {
      throw CLI::ValidationError("--log-format", std::string(status.message()));
    }
  };
  for (CLI::App* command : program.get_subcommands({})) {
    if (!command->get_subcommands({}).empty()) {
      AddLogFlags(*command);
      continue;
    }
    command
        ->add_option_function<std::string>("--log-format", set,
                                           "What goes to standard error: text for people, or json, "
                                           "one object for each line [text]")
        ->type_name("text|json")
        ->envname("SIGNPOST_LOG_FORMAT");
  }
}

void AddSecurityFlags(CLI::App& flags, TransportSecurity& value) {
  CLI::Option* const tls_dir =
      flags
          .add_option("--tls-dir", value.tls_dir,
                      "mTLS with the ca.crt, tls.crt and tls.key in here, which may be replaced at "
                      "any time (`signpost cert init` makes some)")
          ->type_name("DIR")
          ->envname("SIGNPOST_TLS_DIR");
  flags
      .add_flag("--insecure-i-understand", value.insecure,
                "Allow plain text beyond this machine: whoever is in between can read gradients, "
                "and forge them")
      ->envname("SIGNPOST_INSECURE_I_UNDERSTAND")
      ->excludes(tls_dir);
}

void AddClientSecurityFlags(CLI::App& flags, TransportSecurity& value) {
  AddSecurityFlags(flags, value);
  flags
      .add_option("--token-file", value.token_file,
                  "A Kubernetes service account's token, for aggregators that want one besides the "
                  "certificate; it may be renewed at any time")
      ->type_name("FILE")
      ->envname("SIGNPOST_TOKEN_FILE");
}

absl::StatusOr<std::vector<std::string>> ParseAddresses(const std::string& addresses) {
  std::vector<std::string> parsed = absl::StrSplit(addresses, ',');
  for (const std::string& address : parsed) {
    if (!IsLoopback(address).ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", addresses,
                       "' should be HOST:PORT[,HOST:PORT...], one address for each shard, "
                       "such as 10.0.0.1:4000,10.0.0.2:4000, with ports up to 65535; '",
                       address, "' is none"));
    }
  }
  return parsed;
}

std::vector<std::string> TakeTail(std::vector<std::string>& arguments) {
  const auto mark = std::find(arguments.begin(), arguments.end(), "--");
  if (mark == arguments.end()) return {};
  std::vector<std::string> tail(std::make_move_iterator(mark + 1),
                                std::make_move_iterator(arguments.end()));
  arguments.erase(mark, arguments.end());
  return tail;
}

bool TakesTail(absl::string_view command) {
  for (const absl::string_view one :
       {"signpost run", "signpost chaos", "signpost k8s", "signpost complete"}) {
    if (command == one || absl::StartsWith(command, absl::StrCat(one, " "))) return true;
  }
  return false;
}

namespace {

bool IsFlag(const std::string& word) { return word.size() > 1 && word[0] == '-'; }

std::vector<std::string> FlagNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::vector<std::string> CommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : CommandsOf(app)) names.push_back(command->get_name());
  return names;
}

// What was chosen, from the outside in: the program, "bench", "bench predict".
std::vector<const CLI::App*> Chosen(const CLI::App& program) {
  std::vector<const CLI::App*> chosen = {&program};
  while (!chosen.back()->get_subcommands().empty()) {
    chosen.push_back(chosen.back()->get_subcommands().back());
  }
  return chosen;
}

// What no command takes stays with the innermost one, which can say more about it than CLI11.
void AllowExtras(CLI::App& app) {
  app.allow_extras();
  for (CLI::App* command : app.get_subcommands({})) AllowExtras(*command);
}

bool WantsCommand(const CLI::App& app, const std::string& word) {
  return !IsFlag(word) && !CommandsOf(app).empty();
}

absl::Status Unknown(const CLI::App& app, const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  const bool command = WantsCommand(app, word);
  const std::string suggestion =
      config::Nearest(name, command ? CommandNames(app) : FlagNames(app));
  const absl::string_view kind = command        ? "unknown command"
                                 : IsFlag(word) ? "unknown flag"
                                                : "unexpected argument";
  const absl::string_view hint = kind == "unexpected argument" && TakesTail(FullNameOf(app))
                                     ? "; a command to run stands behind ' -- '"
                                     : "";
  return absl::InvalidArgumentError(
      absl::StrCat(kind, " '", name, "'",
                   suggestion.empty() ? "" : absl::StrCat("; did you mean '", suggestion, "'?"),
                   hint, "\nAll there are: ", FullNameOf(app), " --help"));
}

// The first word that nothing takes, if there is one; of those that asked for help, the first that
// is no command: whose help it should be is not known.
absl::Status CheckWords(const std::vector<const CLI::App*>& chosen, bool for_help) {
  for (const CLI::App* app : chosen) {
    for (const std::string& word : app->remaining()) {
      if (!for_help || WantsCommand(*app, word)) return Unknown(*app, word);
    }
  }
  return absl::OkStatus();
}

// The command line alone. CANCELLED with the help that was asked for.
absl::Status ParseCommandLine(CLI::App& program, const std::vector<std::string>& arguments,
                              std::optional<CLI::Success>& help) {
  const CommandLineAlone alone(program);
  try {
    program.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::Success& success) {
    help = success;
    return absl::CancelledError();
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FlagSettings> ParseAndExplain(CLI::App& program,
                                             const std::vector<std::string>& arguments) {
  AllowExtras(program);
  std::optional<CLI::Success> help;
  absl::Status status = ParseCommandLine(program, arguments, help);
  const std::vector<const CLI::App*> chosen = Chosen(program);
  if (absl::Status words = CheckWords(chosen, help.has_value()); !words.ok()) return words;
  if (help.has_value()) program.exit(*help);
  if (absl::IsCancelled(status)) return status;

  absl::StatusOr<FlagSettings> settings;
  if (status.ok()) {
    settings = FillIn(program);
    status = settings.status();
  }
  if (status.ok()) return settings;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), "\nMore: ", FullNameOf(*chosen.back()), " --help"));
}

absl::Status Parse(CLI::App& program, const std::vector<std::string>& arguments) {
  return ParseAndExplain(program, arguments).status();
}

}  // namespace signpost::cli
