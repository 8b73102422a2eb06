#include "storage/temporary_directory.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace signpost {

TemporaryDirectory::TemporaryDirectory(const std::string& prefix) : path_(prefix + "-XXXXXX") {
  if (mkdtemp(path_.data()) != nullptr) return;
  const char* const reason = std::strerror(errno);
  why_not_ = "cannot make the directory " + prefix + "-XXXXXX: " + reason;
  path_.clear();
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;  // what is left there is in nobody's way
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

std::string TemporaryPrefix(const std::string& name) {
  const char* const place = std::getenv("TMPDIR");
  return std::string(place == nullptr || *place == '\0' ? "/tmp" : place) + "/" + name;
}

}  // namespace signpost
