// What a training process is told from outside its program: by its environment, and by a file.

#ifndef SIGNPOST_CONFIG_SESSION_SETTINGS_H_
#define SIGNPOST_CONFIG_SESSION_SETTINGS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/file.h"
#include "config/session_keys.h"
#include "config/setting.h"

namespace signpost::config {

// What was said of all of them: variable, then section `session`, then top level.
class SessionSettings {
 public:
  // `file` may be null. Errors as SettingOf's.
  static absl::StatusOr<SessionSettings> Collect(const File* file);
  // With the file that SIGNPOST_CONFIG names, if it does.
  static absl::StatusOr<SessionSettings> FromEnvironment();

  // What counts of the key, which is one of SessionKeys; null if nothing was said.
  const Setting* Find(absl::string_view name) const;
  const std::vector<Key>& keys() const { return keys_; }

 private:
  std::vector<Key> keys_;
};

}  // namespace signpost::config

#endif  // SIGNPOST_CONFIG_SESSION_SETTINGS_H_
