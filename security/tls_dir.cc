#include "security/tls_dir.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/small_file.h"

namespace signpost {
namespace {

absl::Status WriteError(const std::string& path) {
  return absl::InvalidArgumentError(
      absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
}

absl::Status WriteWhole(const std::string& path, absl::string_view contents, mode_t mode) {
  const std::string unfinished = absl::StrCat(path, ".new");
  unlink(unfinished.c_str());  // what is left of an earlier try, or somebody else's
  const int fd =
      open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
  if (fd < 0) return WriteError(unfinished);
  const bool written =
      fchmod(fd, mode) == 0 &&
      write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size()) &&
      fsync(fd) == 0;
  const absl::Status status = written ? absl::OkStatus() : WriteError(unfinished);
  close(fd);
  if (!status.ok()) return status;
  return rename(unfinished.c_str(), path.c_str()) == 0 ? absl::OkStatus() : WriteError(path);
}

}  // namespace

absl::StatusOr<TlsFiles> ReadTlsDir(const std::string& directory) {
  TlsFiles files;
  for (const auto& [name, contents] : {std::pair{"ca.crt", &files.roots},
                                       {"tls.crt", &files.certificate},
                                       {"tls.key", &files.key}}) {
    absl::StatusOr<std::string> read = ReadSmallFile(absl::StrCat(directory, "/", name));
    if (absl::IsNotFound(read.status())) {
      return absl::NotFoundError(absl::StrCat(read.status().message(),
                                              "; a TLS directory has ca.crt, tls.crt and tls.key "
                                              "(`signpost cert init` makes some)"));
    }
    if (!read.ok()) return read.status();
    *contents = *std::move(read);
  }
  return files;
}

absl::Status MakePrivateDirectory(const std::string& name) {
  std::string directory = name;  // without the slashes behind it, whose parent it would be
  while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::path(directory).parent_path();
  if (!parent.empty()) std::filesystem::create_directories(parent, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot make the directory ", parent.string(), ": ", error.message()));
  }
  if (mkdir(directory.c_str(), S_IRWXU) == 0) return absl::OkStatus();
  if (errno != EEXIST) return WriteError(directory);
  struct stat facts = {};
  if (stat(directory.c_str(), &facts) != 0) return WriteError(directory);
  if ((facts.st_uid == geteuid() || facts.st_uid == 0) &&
      (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("keys are not written to ", directory,
                   ", where others can write: choose another directory, or "
                   "make it your own (chmod go-w)"));
}

absl::Status WriteTlsDir(const std::string& directory, const TlsFiles& files) {
  absl::Status status = MakePrivateDirectory(directory);
  if (!status.ok()) return status;
  constexpr mode_t kForAll = S_IRUSR | S_IWUSR | S_IRGRP | S_IROTH;
  status = WriteWhole(absl::StrCat(directory, "/tls.crt"), files.certificate, kForAll);
  if (!status.ok()) return status;
  status = WriteWhole(absl::StrCat(directory, "/ca.crt"), files.roots, kForAll);
  if (!status.ok()) return status;
  // Last: with a key it is somebody's.
  return WritePrivateFile(absl::StrCat(directory, "/tls.key"), files.key);
}

absl::Status WritePrivateFile(const std::string& path, absl::string_view contents) {
  return WriteWhole(path, contents, S_IRUSR | S_IWUSR);
}

}  // namespace signpost
