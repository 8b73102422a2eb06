// A disk that has what a fuzz target puts there.

#ifndef SIGNPOST_FUZZING_MEMORY_DISK_H_
#define SIGNPOST_FUZZING_MEMORY_DISK_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "storage/disk.h"

namespace signpost::fuzzing {

class MemoryDisk final : public Disk {
 public:
  std::map<std::string, std::string> files;

  absl::Status Write(const std::string& name, Fill fill) override {
    std::string& file = files[name];
    file.clear();
    return fill([&](absl::string_view part) {
      file.append(part.data(), part.size());
      return absl::OkStatus();
    });
  }
  absl::Status Sync(const std::string&) override { return absl::OkStatus(); }
  absl::Status SyncDirectory() override { return absl::OkStatus(); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    files[to] = std::exchange(files[from], "");
    return Remove(from);
  }
  absl::StatusOr<std::string> Read(const std::string& name, uint64_t most_bytes) override {
    const auto found = files.find(name);
    if (found == files.end()) return absl::NotFoundError(name);
    if (found->second.size() > most_bytes) {
      return absl::DataLossError(absl::StrCat(name, " has more bytes than it may have"));
    }
    return found->second;
  }
  absl::StatusOr<std::vector<std::string>> List() override {
    std::vector<std::string> names;
    for (const auto& [name, contents] : files) names.push_back(name);
    return names;
  }
  absl::Status Remove(const std::string& name) override {
    return files.erase(name) > 0 ? absl::OkStatus() : absl::NotFoundError(name);
  }
};

}  // namespace signpost::fuzzing

#endif  // SIGNPOST_FUZZING_MEMORY_DISK_H_
