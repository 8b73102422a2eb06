// Files that others put where this process finds them: certificates, keys, tokens, configuration.

#ifndef SIGNPOST_STORAGE_SMALL_FILE_H_
#define SIGNPOST_STORAGE_SMALL_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace signpost {

// All of it. With the path: NOT_FOUND when it is not there, PERMISSION_DENIED when it may not be
// read, INVALID_ARGUMENT when it has more bytes than that, or is no regular file nor a link to one.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t most_bytes = size_t{1} << 20);

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_SMALL_FILE_H_
