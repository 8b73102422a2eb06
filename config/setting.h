// What somebody has set, and where: of all who did, the strongest counts.

#ifndef SIGNPOST_CONFIG_SETTING_H_
#define SIGNPOST_CONFIG_SETTING_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/document.h"

namespace signpost::config {

// From the strongest to the weakest.
enum class Source {
  kFlag,
  kVariable,
  kSection,   // of a file, for those who are asked
  kTopLevel,  // of the file, for all
};

struct Setting {
  Source source = Source::kFlag;
  std::string origin;               // "--listen", "$SIGNPOST_JOB", "job.yaml:7"
  std::vector<std::string> values;  // several, of a list

  // "a,b"
  std::string Text() const;
};

// What the environment says; none where the variable is not set. One that is empty says that the
// default counts, whatever weaker sources say: no values.
std::optional<Setting> SettingOf(const std::string& variable);

// Of an entry of a section of the file: the same for a key without a value. INVALID_ARGUMENT for a
// section, or a list of more than scalars.
absl::StatusOr<Setting> SettingOf(const Document& document, const Entry& entry);

// All that was said of one key, the strongest first.
struct Key {
  std::string name;
  std::vector<Setting> settings;
  std::string standard;  // the default, for people; empty if there is none

  // That which counts; null: nobody has said anything, or the default is to count.
  const Setting* Strongest() const;
};

// "true", "1", "false" or "0". None for another text.
std::optional<bool> ParseSwitch(absl::string_view text);

// A line for each key, in columns: key, value, where from, and what that stands before. Values that
// are empty are "-".
std::vector<std::vector<std::string>> Explain(const std::vector<Key>& keys);

}  // namespace signpost::config

#endif  // SIGNPOST_CONFIG_SETTING_H_
