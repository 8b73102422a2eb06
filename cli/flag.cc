#include "cli/flag.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace signpost::cli {
namespace {

// CLI11's own words for the types of numbers are not for readers.
std::string ValueOf(const CLI::Option& option) {
  if (option.get_type_size_max() == 0) return "";
  const std::string type = option.get_type_name();
  if (type == "UINT" || type == "INT") return "N";
  if (type == "FLOAT") return "X";
  return type.empty() && option.get_positional() ? option.get_name(true) : type;
}

Flag FlagOf(const CLI::Option& option) {
  Flag flag = {.value = ValueOf(option),
               .help = option.get_description(),
               .default_value = option.get_default_str(),
               .variable = option.get_envname(),
               .is_required = option.get_required(),
               .is_repeated = option.get_expected_max() > 1 && option.get_delimiter() == '\0',
               .is_list = option.get_delimiter() == ','};
  if (absl::EndsWith(flag.value, ",...")) flag.is_list = true;
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  return flag;
}

std::vector<Flag> Shown(const CLI::App& command, bool arguments) {
  std::vector<Flag> flags;
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_group().empty() || option->get_positional() != arguments) continue;
    flags.push_back(FlagOf(*option));
  }
  return flags;
}

// CLI11 knows nothing of what stands behind " -- ".
class FormatterOfTail final : public CLI::Formatter {
 public:
  explicit FormatterOfTail(std::string tail) : tail_(std::move(tail)) {}

  const std::string& tail() const { return tail_; }

  std::string make_usage(const CLI::App* command, std::string name) const override {
    const std::string usage = CLI::Formatter::make_usage(command, std::move(name));
    return absl::StrCat(absl::StripSuffix(usage, "\n"), " ", tail_, "\n");
  }

 private:
  const std::string tail_;
};

}  // namespace

void SetUsageOfTail(CLI::App& command, std::string tail) {
  command.formatter(std::make_shared<FormatterOfTail>(std::move(tail)));
}

std::string UsageOfTail(const CLI::App& command) {
  const auto* formatter = dynamic_cast<const FormatterOfTail*>(command.get_formatter().get());
  return formatter == nullptr ? "" : formatter->tail();
}

CLI::Validator PositiveNumber() {
  return CLI::Validator(
      [](const std::string& text) {
        double value = 0;
        constexpr double kMost = 1e9;  // what is computed of it has an end
        if (absl::SimpleAtod(text, &value) && value > 0 && value <= kMost) return std::string();
        return absl::StrCat("'", text, "' is no number above 0, and at most 1e9");
      },
      /*validator_desc=*/"");
}

CLI::Validator Share() {
  return CLI::Validator(
      [](const std::string& text) {
        double value = 0;
        if (absl::SimpleAtod(text, &value) && value >= 0 && value <= 1) return std::string();
        return absl::StrCat("'", text, "' is no number from 0 to 1");
      },
      /*validator_desc=*/"");
}

CLI::Validator PositiveCount() {
  return CLI::Validator(
      [](std::string& text) {
        absl::string_view number = text;
        double unit = 1;
        if (absl::ConsumeSuffix(&number, "K")) unit = 1e3;
        if (absl::ConsumeSuffix(&number, "M")) unit = 1e6;
        if (absl::ConsumeSuffix(&number, "B")) unit = 1e9;
        double value = 0;
        constexpr double kMost = 1e18;
        constexpr double kRounding = 1e-12;  // 4.1 is no binary fraction
        if (!absl::SimpleAtod(number, &value) || !(value * unit >= 1 && value * unit <= kMost) ||
            std::abs(std::round(value * unit) - value * unit) > kRounding * value * unit) {
          return absl::StrCat("'", text, "' is no whole number above 0, like 25M");
        }
        text = absl::StrCat(static_cast<uint64_t>(std::round(value * unit)));
        return std::string();
      },
      /*validator_desc=*/"");
}

std::string WhyNotWritable(const std::filesystem::path& file) {
  const std::filesystem::path directory = file.has_parent_path() ? file.parent_path() : ".";
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) {
    errno = EISDIR;
  } else if (std::filesystem::exists(file, ignored)) {
    if (access(file.c_str(), W_OK) == 0) return "";
  } else if (access(directory.c_str(), W_OK | X_OK) == 0) {
    return "";
  }
  return absl::StrCat("cannot write to '", file.string(),
                      "': ", std::system_category().message(errno));
}

CLI::Validator WritableFile() {
  return CLI::Validator([](const std::string& file) { return WhyNotWritable(file); }, "");
}

std::vector<Flag> FlagsOf(const CLI::App& command) { return Shown(command, /*arguments=*/false); }

std::vector<Flag> ArgumentsOf(const CLI::App& command) {
  return Shown(command, /*arguments=*/true);
}

std::vector<const CLI::App*> CommandsOf(const CLI::App& command) {
  return command.get_subcommands(
      [](const CLI::App* subcommand) { return !subcommand->get_group().empty(); });
}

std::string FullNameOf(const CLI::App& command) {
  const CLI::App* const parent = command.get_parent();
  return parent == nullptr ? command.get_name()
                           : absl::StrCat(FullNameOf(*parent), " ", command.get_name());
}

std::vector<std::string> ChoicesOf(const Flag& flag) {
  if (!absl::StrContains(flag.value, '|')) return {};
  std::vector<std::string> choices;
  const absl::string_view values = absl::StripSuffix(flag.value, ",...");
  for (const absl::string_view value : absl::StrSplit(values, '|')) {
    choices.emplace_back(value.substr(0, value.find('[')));
  }
  return choices;
}

}  // namespace signpost::cli
