#include "storage/small_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

absl::Status NotRegularError(const std::string& path) {
  return absl::InvalidArgumentError(absl::StrCat(
      path,
      ": it is no regular file or link to one; a pipe, such as the shell's <(...), is neither"));
}

absl::Status ReadError(const std::string& path, int error) {
  if (error == ENXIO) return NotRegularError(path);  // a socket
  const std::string message = absl::StrCat(path, ": ", std::strerror(error));
  return error == ENOENT || error == ENOTDIR ? absl::NotFoundError(message)
                                             : absl::PermissionDeniedError(message);
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t most_bytes) {
  // O_NONBLOCK: opening a pipe without a writer would block.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ReadError(path, errno);
  const absl::Cleanup closer = [fd] { close(fd); };
  struct stat facts = {};
  if (fstat(fd, &facts) != 0) return ReadError(path, errno);
  if (!S_ISREG(facts.st_mode)) return NotRegularError(path);
  std::string contents(most_bytes + 1, '\0');
  size_t size = 0;
  while (size < contents.size()) {
    const ssize_t got = read(fd, contents.data() + size, contents.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ReadError(path, errno);
    if (got == 0) break;
    size += got;
  }
  if (size > most_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": more than ", most_bytes, " bytes"));
  }
  contents.resize(size);
  contents.shrink_to_fit();
  return contents;
}

}  // namespace signpost
