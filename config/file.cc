#include "config/file.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "config/session_keys.h"
#include "config/suggestion.h"

namespace signpost::config {
namespace {

constexpr char kManual[] = "docs/configuration.md";

std::vector<std::string> SessionKeyNames() {
  std::vector<std::string> names;
  for (const SessionKey& key : SessionKeys()) names.emplace_back(key.name);
  return names;
}

bool IsSection(absl::string_view name) {
  const auto commands = CommandSections();
  return name == "session" || name == "optimizer" ||
         std::find(commands.begin(), commands.end(), name) != commands.end();
}

// A key that only files of DeepSpeed's have; null: there is none.
const Entry* DeepSpeedsKey(const Node& root) {
  for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu",
                          "gradient_accumulation_steps", "zero_optimization", "fp16", "bf16"}) {
    if (const Entry* const entry = root.Find(key); entry != nullptr) return entry;
  }
  return nullptr;
}

}  // namespace

absl::Span<const absl::string_view> CommandSections() {
  static constexpr absl::string_view kSections[] = {
      "aggregator", "bench", "cert",  "chaos", "checkpoint", "codec", "demo",
      "doctor",     "k8s",   "probe", "run",   "status",     "worker"};
  return kSections;
}

std::string Canonical(absl::string_view key) { return absl::StrReplaceAll(key, {{"_", "-"}}); }

const Entry* FindKey(const Node& section, absl::string_view key) {
  for (const Entry& entry : section.entries) {
    if (Canonical(entry.key) == Canonical(key)) return &entry;
  }
  return nullptr;
}

absl::StatusOr<File> File::Parse(absl::string_view name, absl::string_view text) {
  absl::StatusOr<Document> document = Document::Parse(name, text);
  if (!document.ok()) return document.status();
  File file;
  file.document_ = *std::move(document);
  if (absl::Status status = file.Check(); !status.ok()) return status;
  return file;
}

absl::StatusOr<File> File::Read(const std::string& path) {
  absl::StatusOr<Document> document = Document::Read(path);
  if (!document.ok()) return document.status();
  File file;
  file.document_ = *std::move(document);
  if (absl::Status status = file.Check(); !status.ok()) return status;
  return file;
}

absl::StatusOr<std::optional<File>> File::FromEnvironment() {
  const std::optional<Setting> path = SettingOf("SIGNPOST_CONFIG");
  if (!path.has_value() || path->values.empty()) return std::nullopt;
  absl::StatusOr<File> file = Read(path->values.front());
  if (!file.ok()) {
    return absl::Status(file.status().code(),
                        absl::StrCat("SIGNPOST_CONFIG: ", file.status().message()));
  }
  return std::optional<File>(*std::move(file));
}

const Node* File::Section(absl::string_view name) const {
  if (!not_read_.empty() && name != "optimizer") return nullptr;
  const Entry* const entry = document_.root.Find(name);
  const bool is_there = entry != nullptr && entry->value.kind == Node::Kind::kSection;
  return is_there ? &entry->value : nullptr;
}

const Entry* File::Shared(absl::string_view key) const {
  return not_read_.empty() ? FindKey(document_.root, key) : nullptr;
}

absl::Status File::CheckKeys(const Node& section, absl::string_view where,
                             const std::vector<std::string>& known) const {
  std::map<std::string, const Entry*> seen;
  for (const Entry& entry : section.entries) {
    const std::string key = Canonical(entry.key);
    const auto is_key = [&key](const std::string& name) { return Canonical(name) == key; };
    if (std::none_of(known.begin(), known.end(), is_key)) {
      const std::string nearest = Nearest(entry.key, known);
      return document_.Error(
          entry.line,
          absl::StrCat("unknown key ", Quoted(entry.key), " ", where,
                       nearest.empty() ? "" : absl::StrCat("; did you mean '", nearest, "'?"),
                       "\nAll there are: ", kManual));
    }
    const auto [before, is_new] = seen.emplace(key, &entry);
    if (!is_new) {
      return document_.Error(entry.line,
                             absl::StrCat("'", entry.key, "' is given twice: in line ",
                                          before->second->line, " as '", before->second->key, "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status File::Check() {
  const Node& root = document_.root;
  if (DeepSpeedsKey(root) != nullptr) return CheckDeepSpeeds();
  return CheckOurs();
}

absl::Status File::CheckOurs() const {
  std::vector<std::string> known = SessionKeyNames();
  for (const absl::string_view command : CommandSections()) known.emplace_back(command);
  known.insert(known.end(), {"session", "optimizer"});
  if (absl::Status status = CheckKeys(document_.root, "at the top level", known); !status.ok()) {
    return status;
  }
  for (const Entry& entry : document_.root.entries) {
    const Node& value = entry.value;
    if (IsSection(entry.key)) {
      if (value.kind == Node::Kind::kSection || value.kind == Node::Kind::kNothing) continue;
      return document_.Error(value.line, absl::StrCat("'", entry.key, "' is ", value.Describe(),
                                                      ", wanted a section of keys and values"));
    }
    if (absl::Status status = CheckSessionKey(entry); !status.ok()) return status;
  }
  const Node* const session = Section("session");
  if (session == nullptr) return absl::OkStatus();
  absl::Status status = CheckKeys(*session, "in section session", SessionKeyNames());
  for (const Entry& entry : session->entries) {
    if (status.ok()) status = CheckSessionKey(entry);
  }
  return status;
}

absl::Status File::CheckSessionKey(const Entry& entry) const {
  const absl::StatusOr<Setting> setting = SettingOf(document_, entry);
  if (!setting.ok()) return setting.status();
  if (setting->Text().find('\n') == std::string::npos) return absl::OkStatus();
  return document_.Error(entry.line, absl::StrCat(entry.key, " has more than one line"));
}

absl::Status File::CheckDeepSpeeds() {
  const std::vector<std::string> ours = SessionKeyNames();
  for (const Entry& entry : document_.root.entries) {
    if (entry.key == "optimizer") continue;
    // "checkpoint" is a key of theirs too.
    const bool is_ours = std::find(ours.begin(), ours.end(), Canonical(entry.key)) != ours.end() ||
                         (IsSection(entry.key) && entry.key != "checkpoint");
    if (is_ours) {
      return document_.Error(
          entry.line,
          absl::StrCat("'", entry.key,
                       "' is a key of Signpost's, but the file is DeepSpeed's (it has '",
                       DeepSpeedsKey(document_.root)->key,
                       "'), of which only 'optimizer' is read: put it into a file of its own"));
    }
    not_read_.push_back(&entry);
  }
  return absl::OkStatus();
}

}  // namespace signpost::config
