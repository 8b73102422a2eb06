#include "server/disk.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "failpoint/failpoint.h"

namespace signpost {
namespace {

absl::Status SystemError(absl::string_view what, const std::string& path) {
  const int error = errno;
  const std::string text = absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(text);
  if (error == ENOENT) return absl::NotFoundError(text);
  return absl::UnavailableError(text);
}

// Closes the descriptor when it goes out of scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  bool ok() const { return fd_ >= 0; }
  int get() const { return fd_; }

 private:
  const int fd_;
};

bool WriteAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(written);
  }
  return true;
}

class Directory final : public Disk {
 public:
  explicit Directory(const std::string& path) : path_(path) {}

  absl::Status Write(const std::string& name, absl::Span<const absl::string_view> parts) override {
    const std::string path = PathOf(name);
    const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!file.ok()) return SystemError("create", path);
    Reach(Failpoint::kFileCreated);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i == parts.size() / 2) Reach(Failpoint::kFileHalfWritten);
      if (!WriteAll(file.get(), parts[i])) return SystemError("write", path);
    }
    Reach(Failpoint::kFileWritten);
    return absl::OkStatus();
  }

  absl::Status Sync(const std::string& name) override {
    const std::string path = PathOf(name);
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.ok() || fsync(file.get()) != 0) return SystemError("sync", path);
    return absl::OkStatus();
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (std::rename(PathOf(from).c_str(), PathOf(to).c_str()) == 0) return absl::OkStatus();
    return SystemError("rename to", PathOf(to));
  }

  absl::Status SyncDirectory() override {
    const Descriptor directory(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory.ok() || fsync(directory.get()) != 0) return SystemError("sync", path_);
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Read(const std::string& name) override {
    const std::string path = PathOf(name);
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status;
    if (!file.ok() || fstat(file.get(), &status) != 0) return SystemError("open", path);
    std::string contents(status.st_size, '\0');
    size_t size = 0;
    while (size < contents.size()) {
      const ssize_t got = read(file.get(), contents.data() + size, contents.size() - size);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return SystemError("read", path);
      if (got == 0) break;
      size += got;
    }
    contents.resize(size);
    return contents;
  }

  absl::StatusOr<std::vector<std::string>> List() override {
    DIR* directory = opendir(path_.c_str());
    if (directory == nullptr) return SystemError("list", path_);
    std::vector<std::string> names;
    while (const dirent* entry = readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    closedir(directory);
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::Status Remove(const std::string& name) override {
    if (unlink(PathOf(name).c_str()) == 0) return absl::OkStatus();
    return SystemError("remove", PathOf(name));
  }

 private:
  std::string PathOf(const std::string& name) const { return absl::StrCat(path_, "/", name); }

  const std::string path_;
};

}  // namespace

absl::Status Replace(Disk& disk, const std::string& name,
                     absl::Span<const absl::string_view> parts) {
  const std::string temporary = absl::StrCat(name, ".tmp");
  absl::Status status = disk.Write(temporary, parts);
  // Contents first: a name must never lead to contents that a crash can still take away.
  if (status.ok()) status = disk.Sync(temporary);
  if (status.ok()) Reach(Failpoint::kFileSynced);
  if (status.ok()) status = disk.Rename(temporary, name);
  if (status.ok()) Reach(Failpoint::kFileRenamed);
  if (status.ok()) return disk.SyncDirectory();
  disk.Remove(temporary).IgnoreError();  // a full disk needs the room; why it failed is known
  return status;
}

std::unique_ptr<Disk> OpenDirectory(const std::string& path) {
  return std::make_unique<Directory>(path);
}

}  // namespace signpost
