// A directory of files, as snapshots and checkpoints need one. A name is "file" or
// "subdirectory/file". A subdirectory is created with its first file and removed with its last.
// Tests replace the disk by one that tears files, fills up and forgets.

#ifndef SIGNPOST_STORAGE_DISK_H_
#define SIGNPOST_STORAGE_DISK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace signpost {

// Thread-safe for different names. Errors name the file and say what the system said;
// RESOURCE_EXHAUSTED when the disk is full, NOT_FOUND, FAILED_PRECONDITION when this process may
// not, or the directory is none, else UNAVAILABLE.
class Disk {
 public:
  virtual ~Disk() = default;

  // Takes the next part of a file, and needs the bytes until it returns.
  using Append = absl::FunctionRef<absl::Status(absl::string_view part)>;
  // Appends the parts of a file, one after the other. Returns the first error.
  using Fill = absl::FunctionRef<absl::Status(Append append)>;
  // Creates a file, in place of what has the name, with what `fill` appends; returns the first
  // error, be it `fill`'s own. A crash may leave any part of it, until Sync. Large parts are best
  // at blocks (block_vector.h).
  virtual absl::Status Write(const std::string& name, Fill fill) = 0;
  // Returns when the file's contents survive a crash.
  virtual absl::Status Sync(const std::string& name) = 0;
  // Replaces `to`, if it is there. Until SyncDirectory a crash may leave either.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // Returns when the names of all files survive a crash.
  virtual absl::Status SyncDirectory() = 0;

  // Returns DATA_LOSS for more bytes than that and for what is no regular file, and
  // RESOURCE_EXHAUSTED for more than half of the memory.
  virtual absl::StatusOr<std::string> Read(const std::string& name, uint64_t most_bytes) = 0;
  virtual absl::StatusOr<std::vector<std::string>> List() = 0;  // sorted
  virtual absl::Status Remove(const std::string& name) = 0;
};

// Replaces a file as a whole: after a crash at any moment it has the old contents or the new ones,
// and the new ones once this has returned OK. On error the old ones stay. Leaves "<name>.tmp" at
// worst.
absl::Status Replace(Disk& disk, const std::string& name, Disk::Fill fill);
absl::Status Replace(Disk& disk, const std::string& name,
                     absl::Span<const absl::string_view> parts);

// Creates the directory, and those that it is in, if need be; once this has returned they survive a
// crash. RESOURCE_EXHAUSTED when the disk is full, else FAILED_PRECONDITION, says what the system
// said. Fails as CheckNobodyElseWrites does too.
absl::Status MakeDirectory(const std::string& path);

// Returns FAILED_PRECONDITION if the directory is there and users other than this process's, its
// group and root may write to it, unless SIGNPOST_SHARED_DIRECTORIES is 1. Looks at owner and mode
// of that directory alone. A process of root accepts any owner.
absl::Status CheckNobodyElseWrites(const std::string& path);

// A directory of this machine, which must exist: otherwise each call says so. Whatever lies in it,
// nothing else is written to or read: symbolic links in it are not followed.
std::unique_ptr<Disk> OpenDirectory(const std::string& path);

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_DISK_H_
