#include "cli/config_command.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "cli/flag_settings.h"
#include "cli/table.h"
#include "client/optimizer_config.h"
#include "config/document.h"
#include "config/file.h"
#include "config/session_keys.h"
#include "config/session_settings.h"
#include "config/setting.h"
#include "proto/exit_code.h"

namespace signpost::cli {
namespace {

using config::File;

std::string Table(const std::vector<config::Key>& keys) { return Align(config::Explain(keys)); }

// The keys of a file of DeepSpeed's that nobody reads.
std::string NotRead(const std::optional<File>& file) {
  if (!file.has_value() || file->not_read().empty()) return "";
  std::vector<std::string> keys;
  for (const config::Entry* entry : file->not_read()) {
    keys.push_back(absl::StrCat(entry->key, " (", file->document().Place(entry->line), ")"));
    if (entry->key == "gradient_clipping") keys.back() += ", which is max_grad_norm in Python";
  }
  return absl::StrCat("not read, in DeepSpeed's file: ", absl::StrJoin(keys, "; "), "\n");
}

absl::StatusOr<std::string> ExplainSession(const std::optional<File>& file) {
  const absl::StatusOr<config::SessionSettings> settings =
      config::SessionSettings::Collect(file.has_value() ? &*file : nullptr);
  if (!settings.ok()) return settings.status();
  return Table(settings->keys());
}

absl::StatusOr<std::string> ExplainOptimizer(const std::optional<File>& file) {
  if (!file.has_value()) {
    return absl::InvalidArgumentError("no file: give --config FILE, or set SIGNPOST_CONFIG");
  }
  const absl::StatusOr<OptimizerConfig> optimizer = OptimizerConfig::Read(*file);
  if (!optimizer.ok()) return optimizer.status();
  std::string note;
  if (const absl::Status status = optimizer->Check(); !status.ok()) {
    note = absl::StrCat("not complete: ", status.message(), "\n");
  }
  return absl::StrCat(Table(optimizer->keys), note, NotRead(file));
}

absl::StatusOr<std::string> ExplainBoth(const std::optional<File>& file) {
  absl::StatusOr<std::string> session = ExplainSession(file);
  if (!session.ok()) return session.status();
  std::string all = absl::StrCat("session\n", *session);
  if (!file.has_value() || file->Section("optimizer") == nullptr) {
    return absl::StrCat(all, NotRead(file));
  }
  absl::StatusOr<std::string> optimizer = ExplainOptimizer(file);
  if (!optimizer.ok()) return optimizer.status();
  return absl::StrCat(all, "\noptimizer\n", *optimizer);
}

absl::StatusOr<std::string> ExplainCommand(CLI::App& program, const std::string& file,
                                           std::vector<std::string> arguments) {
  if (!file.empty()) arguments.push_back(absl::StrCat("--config=", file));
  const absl::StatusOr<FlagSettings> settings = ParseAndExplain(program, arguments);
  if (!settings.ok()) return settings.status();
  return absl::StrCat(Table(settings->keys), NotRead(settings->file));
}

std::string Code(absl::string_view text) {
  return text.empty() ? "" : absl::StrCat("`", text, "`");
}

// A row of a table.
std::string Row(const std::vector<std::string>& cells) {
  std::string row = "|";
  for (const std::string& cell : cells) {
    absl::StrAppend(&row, " ", absl::StrReplaceAll(cell, {{"|", "\\|"}}), " |");
  }
  return row + "\n";
}

}  // namespace

std::string ListConfigKeys(CLI::App& program) {
  const std::string head =
      Row({"key", "type", "default", "variable", ""}) + Row({"---", "---", "---", "---", "---"});
  std::string text = absl::StrCat("### Top level and `session`\n\n", head);
  for (const config::SessionKey& key : config::SessionKeys()) {
    text += Row({Code(key.name), key.type, key.standard, Code(key.variable), key.meaning});
  }
  absl::StrAppend(&text, "\n### `params` of `optimizer`\n\n",
                  Row({"param", "of types", "value", "default", ""}),
                  Row({"---", "---", "---", "---", "---"}));
  for (const OptimizerParam& param : OptimizerParams()) {
    text += Row({Code(param.name), param.types, param.kind, param.standard, param.meaning});
  }
  for (const auto& [command, keys] : FileKeys(program)) {
    absl::StrAppend(&text, "\n### ", Code(command), "\n\n", head);
    for (const FileKey& key : keys) {
      text += Row({Code(key.name), key.type, key.standard, Code(key.variable), key.meaning});
    }
  }
  return text;
}

absl::StatusOr<std::string> ExplainConfig(CLI::App& program, const std::string& file,
                                          const std::vector<std::string>& arguments) {
  const std::string what = arguments.empty() ? "" : arguments.front();
  if (!what.empty() && what != "session" && what != "optimizer") {
    return ExplainCommand(program, file, arguments);
  }
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", arguments[1],
                                                   "' behind '", what, "', which has no flags"));
  }
  std::optional<File> read;
  if (file.empty()) {
    absl::StatusOr<std::optional<File>> of_environment = File::FromEnvironment();
    if (!of_environment.ok()) return of_environment.status();
    read = *std::move(of_environment);
  } else {
    absl::StatusOr<File> of_flag = File::Read(file);
    if (!of_flag.ok()) return of_flag.status();
    read = *std::move(of_flag);
  }
  if (what == "session") return ExplainSession(read);
  return what == "optimizer" ? ExplainOptimizer(read) : ExplainBoth(read);
}

std::vector<std::string> TakeExplained(std::vector<std::string>& arguments) {
  if (arguments.size() < 2 || arguments[0] != "config" || arguments[1] != "explain") return {};
  auto what = arguments.begin() + 2;
  while (what != arguments.end() && absl::StartsWith(*what, "-")) {
    const bool has_value = *what == "--config" && what + 1 != arguments.end();
    what += has_value ? 2 : 1;
  }
  std::vector<std::string> explained(what, arguments.end());
  arguments.erase(what, arguments.end());
  return explained;
}

Command AddConfigCommand(CLI::App& program, const std::vector<std::string>& explained) {
  // Shared by the flags' and the command's closures.
  auto file = std::make_shared<std::string>();
  CLI::App& app = *program.add_subcommand(
      "config", "Tell which settings commands and training processes have, and where from");
  app.footer(
      "Flags come before variables, variables before the file, and a section of the file before "
      "its\n"
      "top level: docs/configuration.md. WHAT is a command with its flags, 'session' (what "
      "training\n"
      "processes read), 'optimizer', or, if it is missing, both of these.\n\n"
      "Example:\n"
      "  signpost config explain --config job.yaml aggregator --shard 1/2");
  app.require_subcommand(1);
  CLI::App& explain = *app.add_subcommand(
      "explain",
      "Tell for each key of WHAT its value, where that comes from, and what it overrides");
  explain
      .add_option("--config", *file, "YAML or JSON file: docs/configuration.md [$SIGNPOST_CONFIG]")
      ->type_name("FILE");
  const CLI::App& keys =
      *app.add_subcommand("keys", "List all keys that a file may have, in Markdown");
  return {&app, [&program, &explained, &keys, file]() -> absl::StatusOr<int> {
            if (keys.parsed()) {
              std::fputs(ListConfigKeys(program).c_str(), stdout);
              return kExitOk;
            }
            // Parsing again forgets what was parsed.
            const std::string path = *file;
            const absl::StatusOr<std::string> text = ExplainConfig(program, path, explained);
            if (absl::IsCancelled(text.status())) return kExitOk;  // help
            if (!text.ok()) return text.status();
            std::fputs(text->c_str(), stdout);
            return kExitOk;
          }};
}

}  // namespace signpost::cli
