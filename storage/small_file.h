// Files that others put where this process finds them: certificates, keys, tokens, configuration.

#ifndef SIGNPOST_STORAGE_SMALL_FILE_H_
#define SIGNPOST_STORAGE_SMALL_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace signpost {

// Returns the whole file. Errors name the path: NOT_FOUND when there is none, PERMISSION_DENIED
// when this process may not read it, INVALID_ARGUMENT when it has more than `most_bytes` bytes, or
// is neither a regular file nor a link to one.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t most_bytes = size_t{1} << 20);

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_SMALL_FILE_H_
