#include "cli/flag_settings.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "config/document.h"
#include "config/session_keys.h"

namespace signpost::cli {
namespace {

using config::Entry;
using config::File;
using config::Key;
using config::Node;
using config::Setting;
using config::Source;

constexpr char kConfig[] = "config";
constexpr char kConfigVariable[] = "SIGNPOST_CONFIG";

// "listen"; empty for what is no flag, and for the flags that no file has.
std::string KeyOf(const CLI::Option& option) {
  if (option.get_lnames().empty()) return "";
  const std::string& name = option.get_lnames().front();
  return name == "help" || name == "version" || name == kConfig ? "" : name;
}

bool IsSwitch(const CLI::Option& option) { return option.get_expected_min() == 0; }

bool IsRepeatable(const CLI::Option& option) { return option.get_items_expected_max() > 1; }

// The commands that were chosen, from the outside in: "cert", "init".
std::vector<CLI::App*> Chosen(CLI::App& program) {
  std::vector<CLI::App*> chosen;
  for (std::vector<CLI::App*> next = program.get_subcommands(); !next.empty();
       next = chosen.back()->get_subcommands()) {
    chosen.push_back(next.back());
  }
  return chosen;
}

// What --help says: what was captured, or the brackets at the description's end.
std::string DefaultOf(const CLI::Option& option) {
  if (!option.get_default_str().empty()) return option.get_default_str();
  if (IsSwitch(option)) return "false";
  const std::string& text = option.get_description();
  const size_t bracket = text.rfind('[');
  if (bracket == std::string::npos || text.back() != ']' || text[bracket + 1] == '$') return "";
  return text.substr(bracket + 1, text.size() - bracket - 2);
}

std::vector<CLI::App*> CommandsOf(CLI::App& app) {
  return app.get_subcommands([](CLI::App*) { return true; });
}

std::vector<CLI::Option*> OptionsOf(CLI::App& app) {
  return app.get_options([](CLI::Option*) { return true; });
}

CLI::App* FindCommand(CLI::App& program, absl::string_view name) {
  for (CLI::App* command : CommandsOf(program)) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

absl::Status CheckSection(const File& file, const Node& section, const std::string& where,
                          CLI::App& app) {
  std::vector<std::string> known;
  for (const CLI::Option* option : OptionsOf(app)) {
    if (!KeyOf(*option).empty()) known.push_back(KeyOf(*option));
  }
  for (const CLI::App* command : CommandsOf(app)) known.push_back(command->get_name());
  absl::Status status = file.CheckKeys(section, absl::StrCat("in section ", where), known);
  if (!status.ok()) return status;
  for (const Entry& entry : section.entries) {
    CLI::App* const command = FindCommand(app, entry.key);
    if (command == nullptr) {
      status = config::SettingOf(file.document(), entry).status();
    } else if (entry.value.kind == Node::Kind::kSection) {
      status = CheckSection(file, entry.value, absl::StrCat(where, " ", entry.key), *command);
    } else {
      status = file.document().Error(
          entry.line,
          absl::StrCat("'", entry.key, "' is ", entry.value.Describe(),
                       ", wanted a section: it is a command of `signpost ", where, "`"));
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Of all commands: what is wrong there would be found much later otherwise.
absl::Status CheckSections(const File& file, CLI::App& program) {
  for (const absl::string_view name : config::CommandSections()) {
    const Node* const section = file.Section(name);
    CLI::App* const command = FindCommand(program, name);
    if (section == nullptr || command == nullptr) continue;
    absl::Status status = CheckSection(file, *section, std::string(name), *command);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Processes that this one starts get the file too, in whatever directory.
void NameForOthers(const std::string& path) {
  std::error_code ignored;
  setenv(kConfigVariable, std::filesystem::absolute(path, ignored).c_str(), /*replace=*/1);
}

// The file that the command's flag or the environment names.
absl::StatusOr<std::optional<File>> FileOf(const CLI::App& command) {
  const CLI::Option* const option = command.get_option_no_throw(absl::StrCat("--", kConfig));
  if (option == nullptr) return std::nullopt;
  if (option->count() > 0) {
    const std::string path = option->as<std::string>();
    absl::StatusOr<File> file = File::Read(path);
    if (!file.ok()) return file.status();
    NameForOthers(path);
    return std::optional<File>(*std::move(file));
  }
  absl::StatusOr<std::optional<File>> file = File::FromEnvironment();
  if (file.ok() && file->has_value()) NameForOthers((*file)->document().name);
  return file;
}

// What is said of one flag, the strongest first.
absl::StatusOr<Key> SettingsOf(const CLI::Option& option, const std::string& variable,
                               const File* file, const Node* section) {
  Key key = {.name = KeyOf(option), .standard = DefaultOf(option)};
  if (option.count() > 0) {
    key.settings.push_back(
        {.source = Source::kFlag, .origin = option.get_name(), .values = option.results()});
  }
  if (std::optional<Setting> said = config::SettingOf(variable);
      !variable.empty() && said.has_value()) {
    // Several are joined as in PATH.
    if (IsRepeatable(option)) {
      said->values = absl::StrSplit(said->Text(), ':', absl::SkipEmpty());
    }
    key.settings.push_back(*std::move(said));
  }
  const Entry* const own = section == nullptr ? nullptr : config::FindKey(*section, key.name);
  const config::SessionKey* const shared = config::SessionKeyOf(variable);
  const Entry* const of_all =
      file == nullptr || shared == nullptr ? nullptr : file->Shared(shared->name);
  for (const Entry* const entry : {own, of_all}) {
    if (entry == nullptr) continue;
    absl::StatusOr<Setting> setting = config::SettingOf(file->document(), *entry);
    if (!setting.ok()) return setting.status();
    if (entry == of_all) setting->source = Source::kTopLevel;
    if (!IsRepeatable(option) && setting->values.size() > 1) setting->values = {setting->Text()};
    key.settings.push_back(*std::move(setting));
  }
  return key;
}

// As if the command line had it.
absl::Status Give(CLI::Option& option, const Setting& setting) {
  std::string complaint;
  try {
    if (!IsSwitch(option)) {
      option.add_result(setting.values);
      option.run_callback();
      return absl::OkStatus();
    }
    const std::optional<bool> value = config::ParseSwitch(setting.Text());
    if (value.has_value()) {
      if (!*value) return absl::OkStatus();
      option.add_result("true");
      option.run_callback();
      return absl::OkStatus();
    }
    complaint = absl::StrCat(option.get_name(), " is ", config::Quoted(setting.Text()),
                             ", wanted true or false");
  } catch (const CLI::Error& error) {
    complaint = error.what();
    for (const std::string& value : setting.values) {
      if (value.size() <= config::kMostQuotedBytes) continue;
      complaint = absl::StrReplaceAll(complaint, {{value, config::Quoted(value)}});
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(setting.origin, ": ", complaint));
}

// A flag, and what is said of it.
struct Flag {
  CLI::Option* option;
  Key key;
};

bool IsOff(const Flag& flag) {
  const Setting* const setting = flag.key.Strongest();
  return setting == nullptr ||
         (IsSwitch(*flag.option) && config::ParseSwitch(setting->Text()) == false);
}

// Takes back what is excluded by a flag that has a stronger source; equal ones are an error.
absl::Status Exclude(std::vector<Flag>& flags) {
  for (Flag& flag : flags) {
    for (const Flag& other : flags) {
      if (IsOff(flag) || IsOff(other) || flag.option->get_excludes().count(other.option) == 0) {
        continue;
      }
      const Setting &here = *flag.key.Strongest(), &there = *other.key.Strongest();
      if (there.source < here.source) {
        flag.key.settings.clear();
      } else if (there.source == here.source) {
        return absl::InvalidArgumentError(absl::StrCat(flag.option->get_name(), " (", here.origin,
                                                       ") excludes ", other.option->get_name(),
                                                       " (", there.origin, ")"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRequirements(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_required() && option->count() == 0) {
      return absl::InvalidArgumentError(CLI::RequiredError(option->get_name()).what());
    }
    for (const CLI::Option* needed : option->get_needs()) {
      if (option->count() == 0 || needed->count() > 0) continue;
      return absl::InvalidArgumentError(
          CLI::RequiresError(option->get_name(), needed->get_name()).what());
    }
  }
  return absl::OkStatus();
}

// A variable or key that is empty is the default; a flag that is was to say something, and what it
// was made of is missing.
absl::Status CheckNotEmpty(const Flag& flag) {
  const Setting* const setting = flag.key.Strongest();
  const bool is_empty =
      setting != nullptr && setting->source == Source::kFlag &&
      std::find(setting->values.begin(), setting->values.end(), "") != setting->values.end();
  if (!is_empty) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag.option->get_name(), " is empty; give it a value, or leave it out"));
}

absl::StatusOr<std::vector<Key>> FillInCommand(CLI::App& app, const File* file,
                                               const Node* section) {
  std::vector<Flag> flags;
  for (CLI::Option* option : OptionsOf(app)) {
    if (KeyOf(*option).empty()) continue;
    absl::StatusOr<Key> key = SettingsOf(*option, option->get_envname(), file, section);
    if (!key.ok()) return key.status();
    flags.push_back({option, *std::move(key)});
  }
  if (absl::Status status = Exclude(flags); !status.ok()) return status;
  std::vector<Key> keys;
  for (Flag& flag : flags) {
    if (absl::Status status = CheckNotEmpty(flag); !status.ok()) return status;
    const Setting* const setting = flag.key.Strongest();
    if (setting != nullptr && setting->source != Source::kFlag) {
      if (absl::Status status = Give(*flag.option, *setting); !status.ok()) return status;
    }
    keys.push_back(std::move(flag.key));
  }
  if (absl::Status status = CheckRequirements(app); !status.ok()) return status;
  return keys;
}

void AddConfigFlag(CLI::App& app) {
  for (CLI::App* command : CommandsOf(app)) AddConfigFlag(*command);
  if (!CommandsOf(app).empty()) return;
  app.add_option(absl::StrCat("--", kConfig),
                 "YAML or JSON file with values for flags that neither the command line nor the "
                 "environment sets: docs/configuration.md")
      ->type_name("FILE")
      ->envname(kConfigVariable);
}

// What is in front of the default.
std::string MeaningOf(const CLI::Option& option) {
  std::string text = option.get_description();
  const std::string standard = absl::StrCat(" [", DefaultOf(option), "]");
  if (absl::EndsWith(text, standard)) text.resize(text.size() - standard.size());
  return text;
}

using Sections = std::vector<std::pair<std::string, std::vector<FileKey>>>;

void AddKeys(CLI::App& app, const std::string& name, Sections& sections) {
  std::vector<FileKey> keys;
  for (const CLI::Option* option : OptionsOf(app)) {
    if (KeyOf(*option).empty() || option->get_group().empty()) continue;
    const std::string type = IsSwitch(*option) ? "true or false" : option->get_type_name();
    keys.push_back({KeyOf(*option), IsRepeatable(*option) ? "list of " + type : type,
                    DefaultOf(*option), option->get_envname(), MeaningOf(*option)});
  }
  if (!keys.empty()) sections.emplace_back(name, std::move(keys));
  for (CLI::App* command : CommandsOf(app)) {
    if (command->get_group().empty()) continue;
    AddKeys(*command, absl::StrCat(name, " ", command->get_name()), sections);
  }
}

}  // namespace

Sections FileKeys(CLI::App& program) {
  Sections sections;
  for (const absl::string_view name : config::CommandSections()) {
    CLI::App* const command = FindCommand(program, name);
    if (command != nullptr) AddKeys(*command, std::string(name), sections);
  }
  return sections;
}

void AddConfigFlags(CLI::App& program) {
  for (const absl::string_view name : config::CommandSections()) {
    CLI::App* const command = FindCommand(program, name);
    if (command != nullptr) AddConfigFlag(*command);
  }
}

CommandLineAlone::CommandLineAlone(CLI::App& program) { PutAside(program); }

void CommandLineAlone::PutAside(CLI::App& app) {
  for (CLI::Option* option : OptionsOf(app)) {
    Rules rules = {.variable = option->get_envname(),
                   .is_required = option->get_required(),
                   .needs = option->get_needs(),
                   .excludes = option->get_excludes()};
    for (CLI::Option* needed : rules.needs) option->remove_needs(needed);
    for (CLI::Option* excluded : rules.excludes) option->remove_excludes(excluded);
    option->envname("")->required(false);
    rules_.emplace(option, std::move(rules));
  }
  for (CLI::App* command : CommandsOf(app)) PutAside(*command);
}

CommandLineAlone::~CommandLineAlone() {
  for (auto& [option, rules] : rules_) {
    option->envname(rules.variable)->required(rules.is_required);
    for (CLI::Option* needed : rules.needs) option->needs(needed);
    for (CLI::Option* excluded : rules.excludes) option->excludes(excluded);
  }
}

absl::StatusOr<FlagSettings> FillIn(CLI::App& program) {
  FlagSettings settings;
  const std::vector<CLI::App*> commands = Chosen(program);
  if (commands.empty()) return settings;
  absl::StatusOr<std::optional<File>> file = FileOf(*commands.back());
  if (!file.ok()) return file.status();
  settings.file = *std::move(file);
  const File* const read = settings.file.has_value() ? &*settings.file : nullptr;
  const Node* section = nullptr;
  if (read != nullptr) {
    if (absl::Status status = CheckSections(*read, program); !status.ok()) return status;
    section = read->Section(commands.front()->get_name());
  }
  for (CLI::App* command : commands) {
    if (command != commands.front() && section != nullptr) {
      const Entry* const inner = config::FindKey(*section, command->get_name());
      section = inner == nullptr ? nullptr : &inner->value;
    }
    absl::StatusOr<std::vector<Key>> keys = FillInCommand(*command, read, section);
    if (!keys.ok()) return keys.status();
    std::move(keys->begin(), keys->end(), std::back_inserter(settings.keys));
  }
  return settings;
}

}  // namespace signpost::cli
