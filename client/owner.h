// Which process a session is of.

#ifndef SIGNPOST_CLIENT_OWNER_H_
#define SIGNPOST_CLIENT_OWNER_H_

#include <sys/types.h>

#include "absl/status/status.h"

namespace signpost {

// The process that has made it, and not a fork of that: fork(2) copies none of the threads that
// answer a session's calls, and its connections become both processes'. So a fork can neither use
// what was joined before, nor join by itself what would share gRPC with that. Thread-safe.
class Owner {
 public:
  Owner();
  ~Owner();
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  bool IsThisProcess() const;
  // INVALID_ARGUMENT unless it is.
  absl::Status Check() const;

  // INVALID_ARGUMENT in a fork of a process that had owners then.
  static absl::Status CheckMayJoin();

 private:
  const pid_t process_;
};

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_OWNER_H_
