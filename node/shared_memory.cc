#include "node/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace signpost::node {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status NoMemory(uint64_t bytes, absl::string_view what) {
  return absl::ResourceExhaustedError(
      absl::StrFormat("no shared memory of %d bytes: %s: %s", bytes, what, std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(uint64_t bytes) {
  const int fd = memfd_create("signpost", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return NoMemory(bytes, "memfd_create");
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    const absl::Status status = NoMemory(bytes, "its size");
    close(fd);
    return status;
  }
  return Map(fd, bytes);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Open(const Memory& memory,
                                                                 uint64_t bytes) {
  const std::string path = absl::StrCat("/proc/", memory.pid(), "/fd/", memory.fd());
  // Whatever it is: opening it does not wait.
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  struct stat found = {};
  if (fd < 0 || fstat(fd, &found) != 0 || found.st_ino != memory.inode()) {
    const std::string why = fd < 0 ? std::strerror(errno) : "it is another file";
    if (fd >= 0) close(fd);
    return absl::FailedPreconditionError(absl::StrCat(
        "the memory of process ", memory.pid(), " cannot be seen at ", path, ": ", why,
        ". The node's worker and the processes that attach to it need the same user, and the same "
        "view of processes: run them in one container, or let their containers share it"));
  }
  const int seals = fcntl(fd, F_GET_SEALS);  // -1: it is on a disk, which has none
  const bool is_sealed = seals >= 0 && (seals & kSeals) == kSeals;
  if (!is_sealed || static_cast<uint64_t>(found.st_size) != bytes || bytes == 0) {
    close(fd);
    return absl::InvalidArgumentError(
        absl::StrFormat("the memory at %s has %d bytes%s, wanted %d that are sealed", path,
                        found.st_size, is_sealed ? "" : " that are not sealed", bytes));
  }
  return Map(fd, bytes);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int fd, uint64_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, /*offset=*/0);
  if (data == MAP_FAILED) {
    const absl::Status status = NoMemory(bytes, "mmap");
    close(fd);
    return status;
  }
  return std::unique_ptr<SharedMemory>(new SharedMemory(fd, bytes, data));
}

SharedMemory::~SharedMemory() {
  munmap(data_, bytes_);
  close(fd_);
}

Memory SharedMemory::handle() const {
  struct stat found = {};
  fstat(fd_, &found);
  Memory memory;
  memory.set_pid(getpid());
  memory.set_fd(fd_);
  memory.set_inode(found.st_ino);
  memory.set_bytes(bytes_);
  return memory;
}

}  // namespace signpost::node
