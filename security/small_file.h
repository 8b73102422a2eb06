// Files that others put where this process finds them: certificates, keys, tokens.

#ifndef SIGNPOST_SECURITY_SMALL_FILE_H_
#define SIGNPOST_SECURITY_SMALL_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace signpost {

// All of it. With the path: NOT_FOUND when it is not there, PERMISSION_DENIED when it may not be
// read, INVALID_ARGUMENT when it has more than a mebibyte, or is no regular file nor a link to one.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_SMALL_FILE_H_
