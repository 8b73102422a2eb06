#include "config/setting.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace signpost::config {
namespace {

std::string OrDash(std::string text) { return text.empty() ? "-" : text; }

std::vector<std::string> ExplainKey(const Key& key) {
  if (key.settings.empty()) return {key.name, OrDash(key.standard), "default", ""};
  std::vector<std::string> weaker;
  for (size_t i = 1; i < key.settings.size(); ++i) {
    const Setting& setting = key.settings[i];
    weaker.push_back(absl::StrCat(OrDash(setting.Text()), " of ", setting.origin));
  }
  const Setting& setting = key.settings.front();
  const bool is_default = setting.values.empty();
  return {key.name, OrDash(is_default ? key.standard : setting.Text()),
          is_default ? absl::StrCat(setting.origin, ", which is empty") : setting.origin,
          weaker.empty() ? "" : absl::StrCat("not ", absl::StrJoin(weaker, ", "))};
}

}  // namespace

std::string Setting::Text() const { return absl::StrJoin(values, ","); }

std::optional<Setting> SettingOf(const std::string& variable) {
  const char* const value = std::getenv(variable.c_str());
  if (value == nullptr) return std::nullopt;
  Setting setting = {.source = Source::kVariable, .origin = absl::StrCat("$", variable)};
  if (*value != '\0') setting.values.emplace_back(value);
  return setting;
}

absl::StatusOr<Setting> SettingOf(const Document& document, const Entry& entry) {
  Setting setting = {.source = Source::kSection, .origin = document.Place(entry.line)};
  const Node& value = entry.value;
  if (value.kind == Node::Kind::kNothing) return setting;
  if (value.kind == Node::Kind::kScalar) {
    if (!value.text.empty()) setting.values = {value.text};
    return setting;
  }
  const auto error = [&](const Node& node) {
    return document.Error(node.line,
                          absl::StrCat(entry.key, " has ", node.Describe(), ", wanted a value"));
  };
  if (value.kind == Node::Kind::kSection) return error(value);
  for (const Node& item : value.items) {
    if (item.kind != Node::Kind::kScalar) return error(item);
    setting.values.push_back(item.text);
  }
  return setting;
}

const Setting* Key::Strongest() const {
  if (settings.empty() || settings.front().values.empty()) return nullptr;
  return &settings.front();
}

std::optional<bool> ParseSwitch(absl::string_view text) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  return std::nullopt;
}

std::vector<std::vector<std::string>> Explain(const std::vector<Key>& keys) {
  std::vector<std::vector<std::string>> rows = {{"KEY", "VALUE", "FROM", ""}};
  for (const Key& key : keys) rows.push_back(ExplainKey(key));
  return rows;
}

}  // namespace signpost::config
