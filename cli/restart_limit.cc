#include "cli/restart_limit.h"

namespace signpost::cli {

bool RestartLimit::Restart(absl::Time now) {
  while (!recent_.empty() && now - recent_.front() >= kWindow) recent_.pop_front();
  if (recent_.size() == most_) return false;
  recent_.push_back(now);
  ++restarts_;
  return true;
}

}  // namespace signpost::cli
