#include "client/owner.h"

#include <unistd.h>

#include <atomic>

#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

// Not under a mutex: a fork may come while another thread has it.
std::atomic<int> owners = 0;
std::atomic<pid_t> last_process = 0;  // of an owner

absl::Status ForkError(pid_t joined) {
  return absl::InvalidArgumentError(absl::StrCat(
      "process ", joined, " is in a job, and this is process ", getpid(),
      ", a fork of it, which has no part in that and cannot join another: make the call there, or "
      "start this process before the other joins, or by fork and exec"));
}

}  // namespace

Owner::Owner() : process_(getpid()) {
  last_process = process_;
  ++owners;
}

Owner::~Owner() {
  if (IsThisProcess()) --owners;
}

bool Owner::IsThisProcess() const { return process_ == getpid(); }

absl::Status Owner::Check() const {
  return IsThisProcess() ? absl::OkStatus() : ForkError(process_);
}

absl::Status Owner::CheckMayJoin() {
  const bool may = owners == 0 || last_process == getpid();
  return may ? absl::OkStatus() : ForkError(last_process);
}

}  // namespace signpost
