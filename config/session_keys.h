// The keys of what a training process is told from outside its program.

#ifndef SIGNPOST_CONFIG_SESSION_KEYS_H_
#define SIGNPOST_CONFIG_SESSION_KEYS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace signpost::config {

// A key that may stand on the top level of a file or in its section `session`, and the variable
// that is stronger. Flags of commands that have the same variable are set by the top level too.
struct SessionKey {
  const char* name;
  const char* variable;
  const char* type;
  const char* standard;  // the default; "" if there is none
  const char* meaning;
};

absl::Span<const SessionKey> SessionKeys();

// The key whose variable this is, or null.
const SessionKey* SessionKeyOf(absl::string_view variable);

}  // namespace signpost::config

#endif  // SIGNPOST_CONFIG_SESSION_KEYS_H_
