#ifndef SIGNPOST_TESTS_MEMORY_DISK_H_
#define SIGNPOST_TESTS_MEMORY_DISK_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "storage/disk.h"

namespace signpost::testing {

// Files in memory. A crash can be planned: what is written until then is there, and nothing that
// comes after it.
class MemoryDisk final : public Disk {
 public:
  MemoryDisk() = default;
  explicit MemoryDisk(const MemoryDisk& other) : files_(other.Files()) {}

  // Each byte that is written counts as 1, and so does each operation.
  void DieAfter(uint64_t budget) {
    absl::MutexLock lock(&mutex_);
    budget_ = budget;
  }
  void Revive() {
    absl::MutexLock lock(&mutex_);
    budget_.reset();
  }
  uint64_t spent() const {
    absl::MutexLock lock(&mutex_);
    return spent_;
  }
  // Files of that name cannot be written: of none at first.
  void FillUpFor(const std::string& name) {
    absl::MutexLock lock(&mutex_);
    has_no_room_ = name;
  }
  // Called before each file is written.
  void OnWrite(std::function<void(const std::string& name)> on_write) {
    on_write_ = std::move(on_write);
  }
  std::map<std::string, std::string> Files() const {
    absl::MutexLock lock(&mutex_);
    return files_;
  }
  void FlipBit(const std::string& name, size_t byte, int bit) {
    absl::MutexLock lock(&mutex_);
    files_.at(name)[byte] ^= static_cast<char>(1 << bit);
  }

  absl::Status Write(const std::string& name, Fill fill) override {
    if (on_write_) on_write_(name);
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    if (!has_no_room_.empty() && absl::EndsWith(name, has_no_room_)) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot write ", name));
    }
    std::string& file = files_[name];
    file.clear();
    return fill([&](absl::string_view part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const uint64_t written = Spend(part.size());
      file.append(part.data(), written);
      return written < part.size() ? Dead() : absl::OkStatus();
    });
  }
  absl::Status Sync(const std::string& name) override { return Operation(); }
  absl::Status SyncDirectory() override { return Operation(); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    files_[to] = std::move(files_.at(from));
    files_.erase(from);
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Read(const std::string& name, uint64_t most_bytes) override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    const auto found = files_.find(name);
    if (found == files_.end()) return absl::NotFoundError(absl::StrCat("no file ", name));
    if (found->second.size() > most_bytes) {
      return absl::DataLossError(absl::StrCat(name, " has more bytes than it may have"));
    }
    return found->second;
  }
  absl::StatusOr<std::vector<std::string>> List() override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    std::vector<std::string> names;
    for (const auto& [name, contents] : files_) names.push_back(name);
    return names;
  }
  absl::Status Remove(const std::string& name) override {
    absl::MutexLock lock(&mutex_);
    if (Spend(1) == 0) return Dead();
    files_.erase(name);
    return absl::OkStatus();
  }

 private:
  static absl::Status Dead() { return absl::UnavailableError("the process is dead"); }
  absl::Status Operation() {
    absl::MutexLock lock(&mutex_);
    return Spend(1) == 0 ? Dead() : absl::OkStatus();
  }
  // As much of it as is left.
  uint64_t Spend(uint64_t cost) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (budget_) {
      cost = std::min(cost, *budget_);
      *budget_ -= cost;
    }
    spent_ += cost;
    return cost;
  }

  mutable absl::Mutex mutex_;
  std::map<std::string, std::string> files_ ABSL_GUARDED_BY(mutex_);
  absl::optional<uint64_t> budget_ ABSL_GUARDED_BY(mutex_);
  std::string has_no_room_ ABSL_GUARDED_BY(mutex_);
  uint64_t spent_ ABSL_GUARDED_BY(mutex_) = 0;
  std::function<void(const std::string& name)> on_write_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_MEMORY_DISK_H_
