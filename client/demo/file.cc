#include "client/demo/file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <ios>
#include <iterator>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace signpost::demo {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code unreadable;
  if (std::filesystem::is_directory(path, unreadable)) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is a directory, wanted a file"));
  }
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read '", path, "'"));
  }
  return bytes;
}

absl::Status WriteFile(const std::string& path, absl::string_view contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  file.close();
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write '", path, "'"));
  return absl::OkStatus();
}

}  // namespace signpost::demo
