// That one process at a time serves a socket's path: looking whether somebody listens there, and
// taking the place of a socket that nobody does, are two things.

#ifndef SIGNPOST_NODE_PATH_LOCK_H_
#define SIGNPOST_NODE_PATH_LOCK_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace signpost::node {

// The lock of the file <path>.lock, which is there while the lock is held, and after a process that
// was killed with it.
class PathLock {
 public:
  // ALREADY_EXISTS while another holds it, of this process or another; UNAVAILABLE when there can
  // be no such file, or no lock of it.
  static absl::StatusOr<std::unique_ptr<PathLock>> Take(const std::string& path);

  ~PathLock();  // Removes the file.
  PathLock(const PathLock&) = delete;
  PathLock& operator=(const PathLock&) = delete;

 private:
  PathLock(const std::string& file, int fd) : file_(file), fd_(fd) {}

  const std::string file_;
  const int fd_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_PATH_LOCK_H_
