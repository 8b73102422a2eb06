// Whole files.

#ifndef SIGNPOST_CLIENT_DEMO_FILE_H_
#define SIGNPOST_CLIENT_DEMO_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost::demo {

// The bytes of a file. Errors carry errno's code and name the file; INVALID_ARGUMENT for a
// directory.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Creates or replaces the file. Errors carry errno's code and name the file.
absl::Status WriteFile(const std::string& path, absl::string_view contents);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_FILE_H_
