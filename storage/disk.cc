#include "storage/disk.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "failpoint/failpoint.h"
#include "storage/block_vector.h"
#include "storage/memory_limit.h"

namespace signpost {
namespace {

absl::Status SystemError(absl::string_view what, const std::string& path) {
  const int error = errno;
  const std::string text = absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(text);
  if (error == ENOENT) return absl::NotFoundError(text);
  if (error == EACCES || error == EPERM || error == EROFS || error == ENOTDIR || error == EISDIR) {
    return absl::FailedPreconditionError(text);  // until somebody mends it
  }
  return absl::UnavailableError(text);
}

// A directory that mkfs makes at the root of a file system. Only root may look into it.
constexpr absl::string_view kLostAndFound = "lost+found";

// Closes the descriptor when it goes out of scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  bool ok() const { return fd_ >= 0; }
  int get() const { return fd_; }

 private:
  int fd_;
};

// A file that is written from its begin to its end, past the system's cache, which costs more than
// all else that a large file does. What lies at a block of memory when it comes to one of the file
// is written from there, the rest is gathered.
class NewFile {
 public:
  // Takes a new file, open for writing; `path` is for messages.
  NewFile(Descriptor file, const std::string& path)
      : path_(path), file_(std::move(file)), gathered_(kGatherBytes) {}

  absl::Status Append(absl::string_view bytes) {
    if (bytes.size() >= kBlockBytes && IsAtBlock(bytes) && gathered_bytes_ % kBlockBytes == 0) {
      absl::Status status = Flush();
      if (status.ok()) status = Write(bytes.substr(0, WholeBlocks(bytes)));
      if (!status.ok()) return status;
      bytes.remove_prefix(WholeBlocks(bytes));
    }
    while (!bytes.empty()) {
      const absl::string_view piece = bytes.substr(0, kGatherBytes - gathered_bytes_);
      std::memcpy(gathered_.data() + gathered_bytes_, piece.data(), piece.size());
      gathered_bytes_ += piece.size();
      bytes.remove_prefix(piece.size());
      if (gathered_bytes_ < kGatherBytes) continue;
      if (absl::Status status = Flush(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Before the last one everything that it writes is whole blocks.
  absl::Status Flush() { return Write({gathered_.data(), std::exchange(gathered_bytes_, 0)}); }

 private:
  static constexpr size_t kGatherBytes = 64 * kBlockBytes;
  // Less is there sooner through the cache, which does not wait for the disk each time.
  static constexpr size_t kLeastDirectBytes = 16 * kBlockBytes;

  static bool IsAtBlock(absl::string_view bytes) {
    return reinterpret_cast<uintptr_t>(bytes.data()) % kBlockBytes == 0;
  }
  static size_t WholeBlocks(absl::string_view bytes) {
    return bytes.size() - bytes.size() % kBlockBytes;
  }

  // Requires that they are at a block.
  absl::Status Write(absl::string_view bytes) {
    WriteDirectly(bytes);
    while (!bytes.empty()) {
      const ssize_t written = pwrite(file_.get(), bytes.data(), bytes.size(), size_);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return SystemError("write", path_);
      Advance(written, bytes);
    }
    return absl::OkStatus();
  }

  // Leaves the last part of a block, and what the file system refuses, for whatever reason: writing
  // it the other way tells, or does it.
  void WriteDirectly(absl::string_view& bytes) {
    if (WholeBlocks(bytes) < kLeastDirectBytes) return;
    if (fcntl(file_.get(), F_SETFL, O_DIRECT) != 0) return;
    const ssize_t written = pwrite(file_.get(), bytes.data(), WholeBlocks(bytes), size_);
    fcntl(file_.get(), F_SETFL, 0);
    if (written > 0) Advance(written, bytes);
  }

  void Advance(size_t written, absl::string_view& bytes) {
    size_ += written;
    bytes.remove_prefix(written);
  }

  const std::string path_;
  const Descriptor file_;
  uint64_t size_ = 0;  // of what is written
  BlockVector<char> gathered_;
  size_t gathered_bytes_ = 0;  // that come next
};

absl::Status SyncNamesIn(const Descriptor& directory, const std::string& path) {
  if (!directory.ok() || fsync(directory.get()) != 0) return SystemError("sync", path);
  return absl::OkStatus();
}

absl::Status NotRegularError(const std::string& path) {
  return absl::DataLossError(absl::StrCat(path, " is no regular file"));
}

// A file that is larger is compared with the memory before it is read.
constexpr uint64_t kLargeFileBytes = uint64_t{64} << 20;

// Links are followed on the way to the directory, and never in it.
class Directory final : public Disk {
 public:
  explicit Directory(const std::string& path)
      : path_(path),
        root_(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
        opened_(root_.ok() ? absl::OkStatus() : SystemError("open", path)) {}

  absl::Status Write(const std::string& name, Fill fill) override {
    const std::string parent = ParentOf(name);
    if (!parent.empty() && opened_.ok() && mkdirat(root_.get(), parent.c_str(), 0700) != 0 &&
        errno != EEXIST) {
      return SystemError("create", PathOf(parent));
    }
    const absl::StatusOr<Place> place = Find(name);
    if (!place.ok()) return place.status();
    // Whatever is there, it is not written to: it may be a link, or a pipe that nobody reads.
    if (unlinkat(place->directory(), place->name.c_str(), 0) != 0 && errno != ENOENT) {
      return SystemError("replace", PathOf(name));
    }
    Descriptor created(openat(place->directory(), place->name.c_str(),
                              O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!created.ok()) return SystemError("create", PathOf(name));
    NewFile file(std::move(created), PathOf(name));
    Reach(Failpoint::kFileCreated);
    absl::Status status = fill([&](absl::string_view part) {
      absl::Status appended = file.Append(part);
      if (appended.ok()) Reach(Failpoint::kFileHalfWritten);
      return appended;
    });
    if (status.ok()) status = file.Flush();
    if (status.ok()) Reach(Failpoint::kFileWritten);
    return status;
  }

  absl::Status Sync(const std::string& name) override {
    const absl::StatusOr<Place> place = Find(name);
    if (!place.ok()) return place.status();
    const Descriptor file = OpenToRead(*place);
    if (!file.ok() || fsync(file.get()) != 0) return SystemError("sync", PathOf(name));
    return absl::OkStatus();
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    const absl::StatusOr<Place> source = Find(from);
    if (!source.ok()) return source.status();
    const absl::StatusOr<Place> target = Find(to);
    if (!target.ok()) return target.status();
    if (renameat(source->directory(), source->name.c_str(), target->directory(),
                 target->name.c_str()) == 0) {
      return absl::OkStatus();
    }
    return SystemError("rename to", PathOf(to));
  }

  absl::Status SyncDirectory() override {
    absl::StatusOr<std::vector<std::string>> names = NamesIn(".", path_);
    if (!names.ok()) return names.status();
    for (const std::string& name : *names) {
      if (name == kLostAndFound) continue;
      const absl::StatusOr<bool> is_directory = IsDirectory(name);
      if (!is_directory.ok()) return is_directory.status();
      if (!*is_directory) continue;
      const absl::Status status = SyncNamesIn(OpenDirectoryIn(name), PathOf(name));
      if (!status.ok() && !absl::IsNotFound(status)) return status;
    }
    return SyncNamesIn(root_, path_);
  }

  absl::StatusOr<std::string> Read(const std::string& name, uint64_t most_bytes) override {
    const absl::StatusOr<Place> place = Find(name);
    if (!place.ok()) return place.status();
    const Descriptor file = OpenToRead(*place);
    // A link, and a socket.
    if (!file.ok() && (errno == ELOOP || errno == ENXIO)) return NotRegularError(PathOf(name));
    struct stat status;
    if (!file.ok() || fstat(file.get(), &status) != 0) return SystemError("open", PathOf(name));
    if (!S_ISREG(status.st_mode)) return NotRegularError(PathOf(name));
    const uint64_t bytes = status.st_size;
    if (bytes > most_bytes) {
      return absl::DataLossError(absl::StrCat(PathOf(name), " has ", bytes, " bytes; ", most_bytes,
                                              " are the most that such a file may have"));
    }
    // Its reader makes something of about the same size of it.
    if (bytes > kLargeFileBytes && bytes > MemoryLimit() / 2) {
      return absl::ResourceExhaustedError(absl::StrCat(
          PathOf(name), " has ", bytes, " bytes, more than half of the memory of this process"));
    }
    std::string contents(bytes, '\0');
    size_t size = 0;
    while (size < contents.size()) {
      const ssize_t got = read(file.get(), contents.data() + size, contents.size() - size);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return SystemError("read", PathOf(name));
      if (got == 0) break;
      size += got;
    }
    contents.resize(size);
    return contents;
  }

  absl::StatusOr<std::vector<std::string>> List() override {
    absl::StatusOr<std::vector<std::string>> entries = NamesIn(".", path_);
    if (!entries.ok()) return entries;
    std::vector<std::string> names;
    for (const std::string& entry : *entries) {
      if (entry == kLostAndFound) continue;
      const absl::StatusOr<bool> is_directory = IsDirectory(entry);
      if (!is_directory.ok()) return is_directory.status();
      if (!*is_directory) {
        names.push_back(entry);
        continue;
      }
      absl::StatusOr<std::vector<std::string>> inside = NamesIn(entry, PathOf(entry));
      if (absl::IsNotFound(inside.status())) continue;  // it went meanwhile
      if (!inside.ok()) return inside;
      for (const std::string& name : *inside) names.push_back(absl::StrCat(entry, "/", name));
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::Status Remove(const std::string& name) override {
    {
      const absl::StatusOr<Place> place = Find(name);
      if (!place.ok()) return place.status();
      if (unlinkat(place->directory(), place->name.c_str(), 0) != 0) {
        return SystemError("remove", PathOf(name));
      }
    }
    if (const std::string parent = ParentOf(name); !parent.empty()) {
      unlinkat(root_.get(), parent.c_str(), AT_REMOVEDIR);  // fails while there are other files
    }
    return absl::OkStatus();
  }

 private:
  // A file's open directory and its name in there.
  struct Place {
    int directory() const { return parent.ok() ? parent.get() : root; }

    int root;
    Descriptor parent;  // the subdirectory, if the file is in one
    std::string name;
  };

  std::string PathOf(const std::string& name) const { return absl::StrCat(path_, "/", name); }

  // The subdirectory's name; empty for a file that is in none.
  static std::string ParentOf(const std::string& name) {
    const size_t slash = name.find('/');
    return slash == std::string::npos ? "" : name.substr(0, slash);
  }

  absl::StatusOr<Place> Find(const std::string& name) const {
    if (!opened_.ok()) return opened_;
    const std::string parent = ParentOf(name);
    Place place = {.root = root_.get(),
                   .parent = Descriptor(-1),
                   .name = parent.empty() ? name : name.substr(parent.size() + 1)};
    for (const std::string& part : {parent, place.name}) {
      if (part == "." || part == ".." || part.find('/') != std::string::npos) {
        return absl::FailedPreconditionError(
            absl::StrCat("'", name, "' is no name of a file in ", path_));
      }
    }
    if (parent.empty()) return place;
    Descriptor opened = OpenDirectoryIn(parent);
    if (!opened.ok()) return SystemError("open", PathOf(name));
    return Place{.root = root_.get(), .parent = std::move(opened), .name = place.name};
  }

  // A pipe would not open otherwise while nobody writes to it.
  static Descriptor OpenToRead(const Place& place) {
    return Descriptor(openat(place.directory(), place.name.c_str(),
                             O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  }

  Descriptor OpenDirectoryIn(const std::string& name) const {
    return Descriptor(
        openat(root_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  }

  // Returns false for links too, and for what was removed meanwhile.
  absl::StatusOr<bool> IsDirectory(const std::string& name) const {
    struct stat status;
    if (fstatat(root_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
      return S_ISDIR(status.st_mode);
    }
    if (errno == ENOENT) return false;
    return SystemError("look at", PathOf(name));
  }

  absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& name,
                                                   const std::string& path) const {
    if (!opened_.ok()) return opened_;
    const int fd =
        openat(root_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR* const directory = fd < 0 ? nullptr : fdopendir(fd);
    if (directory == nullptr) {
      const absl::Status status = SystemError("list", path);
      if (fd >= 0) close(fd);
      return status;
    }
    std::vector<std::string> names;
    while (true) {
      errno = 0;  // readdir(3): an error looks like the end otherwise
      const dirent* const entry = readdir(directory);
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    const absl::Status status = errno == 0 ? absl::OkStatus() : SystemError("list", path);
    closedir(directory);
    if (!status.ok()) return status;
    return names;
  }

  const std::string path_;
  const Descriptor root_;
  const absl::Status opened_;
};

}  // namespace

absl::Status CheckNobodyElseWrites(const std::string& path) {
  const char* const is_meant = std::getenv("SIGNPOST_SHARED_DIRECTORIES");
  struct stat status;
  if ((is_meant != nullptr && absl::string_view(is_meant) == "1") ||
      stat(path.c_str(), &status) != 0) {
    return absl::OkStatus();
  }
  std::string who;
  if (geteuid() != 0 && status.st_uid != geteuid() && status.st_uid != 0) {
    who = absl::StrCat("it belongs to user ", status.st_uid, ", and this process to user ",
                       geteuid());
  } else if (status.st_mode & S_IWOTH) {
    who = absl::StrFormat("its mode is %04o", status.st_mode & 07777);
  } else if ((status.st_mode & S_IWGRP) && status.st_gid != getegid()) {
    who = absl::StrFormat("its mode is %04o, and its group, %d, is not this process's",
                          status.st_mode & 07777, status.st_gid);
  } else {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("other users may write to the directory ", path, " (", who,
                   "): they could change or remove what is kept there. Use a directory of your "
                   "own, or take that "
                   "right from them (chmod go-w). To allow it, set SIGNPOST_SHARED_DIRECTORIES=1"));
}

absl::Status Replace(Disk& disk, const std::string& name,
                     absl::Span<const absl::string_view> parts) {
  return Replace(disk, name, [parts](Disk::Append append) {
    absl::Status status;
    for (const absl::string_view part : parts) {
      if (status = append(part); !status.ok()) break;
    }
    return status;
  });
}

absl::Status Replace(Disk& disk, const std::string& name, Disk::Fill fill) {
  const std::string temporary = absl::StrCat(name, ".tmp");
  absl::Status status = disk.Write(temporary, fill);
  // Contents first: a name must never lead to contents that a crash can still take away.
  if (status.ok()) status = disk.Sync(temporary);
  if (status.ok()) Reach(Failpoint::kFileSynced);
  if (status.ok()) status = disk.Rename(temporary, name);
  if (status.ok()) Reach(Failpoint::kFileRenamed);
  if (status.ok()) return disk.SyncDirectory();
  disk.Remove(temporary).IgnoreError();  // a full disk needs the room; why it failed is known
  return status;
}

absl::Status MakeDirectory(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string prefix = path.substr(0, end);
    if (mkdir(prefix.c_str(), 0700) != 0 && errno != EEXIST) {
      const absl::Status status = SystemError("create the directory", prefix);
      if (absl::IsResourceExhausted(status)) return status;
      return absl::FailedPreconditionError(status.message());
    }
    // Or a crash could take it away with all that is in it, whoever has made it just now; where it
    // may not be opened, the file system's own order is all there is.
    const std::string parent = std::filesystem::path(prefix).parent_path();
    const std::string at = parent.empty() ? "." : parent;
    SyncNamesIn(Descriptor(open(at.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), at).IgnoreError();
    if (end == std::string::npos) break;
  }
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return CheckNobodyElseWrites(path);
  return absl::FailedPreconditionError(
      absl::StrCat("cannot create the directory ", path, ": there is something else"));
}

std::unique_ptr<Disk> OpenDirectory(const std::string& path) {
  return std::make_unique<Directory>(path);
}

}  // namespace signpost
