// A disk for tests.

#ifndef SIGNPOST_STORAGE_FAULTY_DISK_H_
#define SIGNPOST_STORAGE_FAULTY_DISK_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/disk.h"

namespace signpost {

// An empty directory of this machine, which is full, read-only or at fault whenever a test says so.
// Its switches are not for several threads.
class FaultyDisk final : public Disk {
 public:
  explicit FaultyDisk(const std::string& path) : directory_(Empty(path)) {}

  bool is_full = false;
  bool is_read_only = false;  // nothing can be removed
  bool loses_names = false;   // cannot make them durable
  bool fails_to_read = false;
  std::function<void()> before_write;  // if any

  absl::Status Write(const std::string& name, Fill fill) override {
    if (before_write) before_write();
    if (is_full) return absl::ResourceExhaustedError("No space left on device");
    return directory_->Write(name, fill);
  }
  absl::Status Sync(const std::string& name) override { return directory_->Sync(name); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return directory_->Rename(from, to);
  }
  absl::Status SyncDirectory() override {
    if (loses_names) return absl::UnavailableError("Too many open files");
    return directory_->SyncDirectory();
  }
  absl::StatusOr<std::string> Read(const std::string& name, uint64_t most_bytes) override {
    if (fails_to_read) return absl::UnavailableError("Input/output error");
    return directory_->Read(name, most_bytes);
  }
  absl::StatusOr<std::vector<std::string>> List() override { return directory_->List(); }
  absl::Status Remove(const std::string& name) override {
    if (is_read_only) return absl::FailedPreconditionError("Read-only file system");
    return directory_->Remove(name);
  }

 private:
  static std::unique_ptr<Disk> Empty(const std::string& path) {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
    return OpenDirectory(path);
  }

  const std::unique_ptr<Disk> directory_;
};

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_FAULTY_DISK_H_
