#include "client/stop_request.h"

#include <atomic>

#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

// A handler of signals may touch nothing else.
std::atomic<bool> requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);

}  // namespace

StopRequest::StopRequest() {
  requested = false;
  struct sigaction note = {};
  note.sa_handler = [](int) { requested = true; };
  note.sa_flags = SA_RESTART | SA_RESETHAND;
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &note, &before_[i]);
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
}

bool StopRequest::made() const { return requested; }

absl::Status StopRequest::Excuse(const absl::Status& error) const {
  if (!made()) return error;
  return absl::CancelledError(absl::StrCat("asked to stop; ", error.message()));
}

}  // namespace signpost
