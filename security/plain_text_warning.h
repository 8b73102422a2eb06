// Says that connections are neither encrypted nor authenticated, for as long as it is so.

#ifndef SIGNPOST_SECURITY_PLAIN_TEXT_WARNING_H_
#define SIGNPOST_SECURITY_PLAIN_TEXT_WARNING_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace signpost {

class PlainTextWarning {
 public:
  // Calls `warn` at once, from this thread, and once every interval after that from another one.
  // `where` is an address.
  PlainTextWarning(std::string where, std::function<void(const std::string& line)> warn,
                   absl::Duration interval = absl::Minutes(1));
  ~PlainTextWarning();

 private:
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_PLAIN_TEXT_WARNING_H_
