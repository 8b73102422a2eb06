#include "client/demo/text.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/demo/file.h"

namespace signpost::demo {
namespace {

constexpr uint64_t kHeldOut = 10;  // one byte in so many

absl::Status CheckLength(const std::string& path, uint64_t bytes) {
  if (bytes >= kMinFileBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the text '", path, "' has ", bytes, " bytes, wanted at least ", kMinFileBytes));
}

// "/usr/lib/python3.11", say.
std::vector<std::string> PythonDirectories() {
  std::vector<std::string> directories;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/usr/lib", error)) {
    const std::string path = entry.path().string();
    if (absl::StartsWith(path, "/usr/lib/python3.")) directories.push_back(path);
  }
  std::sort(directories.begin(), directories.end());
  return directories;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& directory) {
  std::vector<std::string> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (!entry.is_symlink() && entry.is_regular_file() && entry.file_size() >= kMinFileBytes) {
      files.push_back(entry.path().string());
    }
  }
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat("no text in '", directory, "'",
                                            error ? absl::StrCat(" (", error.message(), ")") : "",
                                            "; name files to train on with --text"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

absl::StatusOr<std::vector<std::string>> DefaultTextFiles() {
  absl::StatusOr<std::vector<std::string>> files = TextFiles(kLicenceDirectory);
  for (const std::string& directory : PythonDirectories()) {
    const absl::StatusOr<std::vector<std::string>> modules = TextFiles(directory);
    if (!modules.ok()) continue;
    if (!files.ok()) files = std::vector<std::string>();
    files->insert(files->end(), modules->begin(), modules->end());
  }
  return files;
}

absl::StatusOr<Text> LoadText(absl::Span<const std::string> files) {
  if (files.empty()) return absl::InvalidArgumentError("no text file to train on");
  Text text;
  for (const std::string& path : files) {
    absl::StatusOr<std::string> bytes = ReadFile(path);
    if (!bytes.ok()) return bytes.status();
    if (absl::Status status = CheckLength(path, bytes->size()); !status.ok()) return status;
    const auto cut = bytes->end() - bytes->size() / kHeldOut;
    text.training.insert(text.training.end(), bytes->begin(), cut);
    text.validation.insert(text.validation.end(), cut, bytes->end());
  }
  return text;
}

}  // namespace signpost::demo
