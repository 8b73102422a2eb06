#include "storage/temporary_directory.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace signpost {

TemporaryDirectory::TemporaryDirectory(const std::string& prefix) : path_(prefix + "-XXXXXX") {
  if (mkdtemp(path_.data()) == nullptr) path_.clear();
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;  // what is left there is in nobody's way
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace signpost
