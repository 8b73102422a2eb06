#include "node/path_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace signpost::node {
namespace {

// Who held the lock before may have removed the file that was opened.
bool IsStillAt(const std::string& file, int fd) {
  struct stat there = {}, opened = {};
  return stat(file.c_str(), &there) == 0 && fstat(fd, &opened) == 0 &&
         there.st_ino == opened.st_ino && there.st_dev == opened.st_dev;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PathLock>> PathLock::Take(const std::string& path) {
  const std::string file = absl::StrCat(path, ".lock");
  while (true) {
    const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
      return absl::UnavailableError(absl::StrCat("cannot open ", file, ": ", std::strerror(errno)));
    }
    const int error = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (error == 0 && IsStillAt(file, fd)) return absl::WrapUnique(new PathLock(file, fd));
    close(fd);
    if (error == EWOULDBLOCK) {
      return absl::AlreadyExistsError(absl::StrCat("another process has locked ", file));
    }
    if (error != 0 && error != EINTR) {
      return absl::UnavailableError(absl::StrCat("cannot lock ", file, ": ", std::strerror(error)));
    }
  }
}

PathLock::~PathLock() {
  unlink(file_.c_str());  // before another can have the lock
  close(fd_);
}

}  // namespace signpost::node
