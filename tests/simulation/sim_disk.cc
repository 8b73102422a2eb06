#include "tests/simulation/sim_disk.h"

#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace signpost::simulation {
namespace {

absl::Status DeadError() { return absl::UnavailableError("the process is dead"); }

}  // namespace

bool SimDisk::Dies() {
  if (operations_left_ > 0 && --operations_left_ == 0) died_ = true;
  return died_;
}

absl::Status SimDisk::Write(const std::string& name, Fill fill) {
  Pause();
  const bool was_dead = died_;
  const bool dies = Dies();
  if (was_dead) return DeadError();
  std::shared_ptr<File>& entry = names_[name];
  if (entry == nullptr) entry = std::make_shared<File>();
  const std::shared_ptr<File> file = entry;
  file->contents.clear();
  const absl::Status status = fill([&](absl::string_view part) {
    Pause();
    if (died_ && !dies) return DeadError();
    file->contents.append(part.data(), part.size());
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  if (!dies && !full_) return absl::OkStatus();
  file->contents.resize(scheduler_.Below(file->contents.size() + 1));
  if (dies) return DeadError();
  return absl::ResourceExhaustedError(absl::StrCat("cannot write ", name, ": the disk is full"));
}

absl::Status SimDisk::Sync(const std::string& name) {
  Pause();
  if (Dies()) return DeadError();
  File& file = *names_.at(name);
  file.durable = file.contents;
  return absl::OkStatus();
}

absl::Status SimDisk::Rename(const std::string& from, const std::string& to) {
  Pause();
  const bool was_dead = died_;
  if (was_dead || (Dies() && scheduler_.OneIn(2))) return DeadError();
  names_[to] = names_.at(from);
  names_.erase(from);
  return died_ ? DeadError() : absl::OkStatus();
}

absl::Status SimDisk::SyncDirectory() {
  Pause();
  if (Dies()) return DeadError();
  durable_names_ = names_;
  return absl::OkStatus();
}

absl::StatusOr<std::string> SimDisk::Read(const std::string& name, uint64_t most_bytes) {
  Pause();
  if (Dies()) return DeadError();
  const auto found = names_.find(name);
  if (found == names_.end()) return absl::NotFoundError(absl::StrCat("no file ", name));
  if (found->second->contents.size() > most_bytes) {
    return absl::DataLossError(absl::StrCat(name, " has more bytes than it may have"));
  }
  return found->second->contents;
}

absl::StatusOr<std::vector<std::string>> SimDisk::List() {
  Pause();
  if (Dies()) return DeadError();
  std::vector<std::string> names;
  for (const auto& [name, file] : names_) names.push_back(name);
  return names;
}

absl::Status SimDisk::Remove(const std::string& name) {
  Pause();
  const bool was_dead = died_;
  if (was_dead || (Dies() && scheduler_.OneIn(2))) return DeadError();
  names_.erase(name);
  return died_ ? DeadError() : absl::OkStatus();
}

void SimDisk::Crash() {
  // Of each name that was made, changed or removed since the last sync, either version remains.
  for (const auto& [name, file] : names_) {
    const auto durable = durable_names_.find(name);
    const bool changed = durable == durable_names_.end() || durable->second != file;
    if (changed && scheduler_.OneIn(2)) durable_names_[name] = file;
  }
  for (auto entry = durable_names_.begin(); entry != durable_names_.end();) {
    const bool removed = !names_.contains(entry->first);
    entry = removed && scheduler_.OneIn(2) ? durable_names_.erase(entry) : std::next(entry);
  }
  names_ = durable_names_;
  for (auto& [name, file] : names_) Tear(*file);
  operations_left_ = 0;
  died_ = false;
}

// Some of what was not synced has reached the disk all the same.
void SimDisk::Tear(File& file) {
  if (file.contents != file.durable && scheduler_.OneIn(2)) {
    file.durable = file.contents.substr(0, scheduler_.Below(file.contents.size() + 1));
  }
  file.contents = file.durable;
}

void SimDisk::FlipBit(const std::string& name) {
  File& file = *names_.at(name);
  if (file.contents.empty()) return;
  file.contents[scheduler_.Below(file.contents.size())] ^=
      static_cast<char>(1 << scheduler_.Below(8));
  file.durable = file.contents;
}

}  // namespace signpost::simulation
