#include "config/session_settings.h"

#include <algorithm>
#include <utility>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"

namespace signpost::config {
namespace {

absl::StatusOr<Key> Collect(const SessionKey& of, const File* file) {
  Key key = {.name = of.name, .standard = of.standard};
  if (std::optional<Setting> variable = SettingOf(of.variable)) key.settings.push_back(*variable);
  if (file == nullptr) return key;
  const Node* const section = file->Section("session");
  const Entry* const shared = file->Shared(of.name);
  for (const Entry* const entry :
       {section == nullptr ? nullptr : FindKey(*section, of.name), shared}) {
    if (entry == nullptr) continue;
    absl::StatusOr<Setting> setting = SettingOf(file->document(), *entry);
    if (!setting.ok()) return setting.status();
    if (entry == shared) setting->source = Source::kTopLevel;
    key.settings.push_back(*std::move(setting));
  }
  return key;
}

// mTLS and plain text exclude each other: the one that has the stronger source stays.
void KeepStronger(Key& tls_dir, Key& insecure) {
  const Setting* const directory = tls_dir.Strongest();
  const Setting* const plain = insecure.Strongest();
  if (directory == nullptr || plain == nullptr || ParseSwitch(plain->Text()) != true) return;
  if (directory->source < plain->source) {
    insecure.settings.clear();
  } else if (plain->source < directory->source) {
    tls_dir.settings.clear();
  }
}

}  // namespace

absl::StatusOr<SessionSettings> SessionSettings::Collect(const File* file) {
  SessionSettings settings;
  for (const SessionKey& of : SessionKeys()) {
    absl::StatusOr<Key> key = config::Collect(of, file);
    if (!key.ok()) return key.status();
    settings.keys_.push_back(*std::move(key));
  }
  const auto key = [&settings](absl::string_view name) -> Key& {
    return *std::find_if(settings.keys_.begin(), settings.keys_.end(),
                         [name](const Key& key) { return key.name == name; });
  };
  KeepStronger(key("tls-dir"), key("insecure-i-understand"));
  return settings;
}

absl::StatusOr<SessionSettings> SessionSettings::FromEnvironment() {
  const absl::StatusOr<std::optional<File>> file = File::FromEnvironment();
  if (!file.ok()) return file.status();
  return Collect(file->has_value() ? &**file : nullptr);
}

const Setting* SessionSettings::Find(absl::string_view name) const {
  for (const Key& key : keys_) {
    if (key.name == name) return key.Strongest();
  }
  ABSL_RAW_LOG(FATAL, "no key of sessions: %s", std::string(name).c_str());
  return nullptr;
}

}  // namespace signpost::config
