#include "fuzzing/crafted_directory.h"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/base/internal/raw_logging.h"

namespace signpost::fuzzing {
namespace {

constexpr char kPrecious[] = "precious";

uint8_t TakeByte(absl::string_view& input) {
  const uint8_t byte = input.empty() ? 0 : static_cast<uint8_t>(input.front());
  input.remove_prefix(input.empty() ? 0 : 1);
  return byte;
}

}  // namespace

CraftedDirectory::CraftedDirectory(absl::string_view input, const std::vector<Name>& names)
    : place_(TemporaryPrefix("signpost-fuzz")),
      path_(place_.path() + "/state"),
      outside_(place_.path() + "/outside") {
  ABSL_RAW_CHECK(!place_.path().empty(), "there must be room for temporary directories");
  std::error_code ignored;
  std::filesystem::create_directory(path_);
  std::filesystem::create_directory(outside_);
  std::ofstream(outside_ + "/victim") << kPrecious;
  while (!input.empty()) {
    const int type = TakeByte(input) % 8;
    const Name& name = names[TakeByte(input) % names.size()];
    const absl::string_view bytes = input.substr(0, TakeByte(input));
    input.remove_prefix(bytes.size());
    const std::filesystem::path entry = path_ + "/" + name.name;
    std::filesystem::create_directory(entry.parent_path(), ignored);
    const auto parent = std::filesystem::symlink_status(entry.parent_path(), ignored);
    const auto taken = std::filesystem::symlink_status(entry, ignored);
    if (!std::filesystem::is_directory(parent) || std::filesystem::exists(taken)) continue;
    if (type == 0) std::ofstream(entry) << bytes;
    if (type == 1) std::ofstream(entry) << name.good;
    if (type == 2) std::filesystem::create_symlink(outside_ + "/victim", entry, ignored);
    if (type == 3) std::filesystem::create_symlink(outside_, entry, ignored);
    if (type == 4) mkfifo(entry.c_str(), 0600);
    if (type == 5) std::filesystem::create_directory(entry, ignored);
    if (type == 6) {
      std::ofstream(entry) << name.good;
      std::filesystem::resize_file(entry, uint64_t{1} << 42, ignored);
    }
    if (type == 7) std::filesystem::create_symlink(entry.filename(), entry, ignored);
  }
}

bool CraftedDirectory::IsOutsideUnchanged() const {
  const std::filesystem::directory_iterator names(outside_), places(place_.path());
  std::ifstream victim(outside_ + "/victim");
  const std::string bytes{std::istreambuf_iterator<char>(victim), {}};
  return std::distance(begin(names), end(names)) == 1 &&
         std::distance(begin(places), end(places)) == 2 && bytes == kPrecious;
}

}  // namespace signpost::fuzzing
