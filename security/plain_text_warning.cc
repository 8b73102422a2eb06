#include "security/plain_text_warning.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace signpost {

PlainTextWarning::PlainTextWarning(std::string where,
                                   std::function<void(const std::string& line)> warn,
                                   absl::Duration interval) {
  const std::string line =
      absl::StrCat("plain text at ", where,
                   ": anyone in between can read gradients and forge them (--tls-dir, or "
                   "SIGNPOST_TLS_DIR, ends this)");
  warn(line);
  thread_ = std::thread([this, line, warn = std::move(warn), interval] {
    while (!stop_.WaitForNotificationWithTimeout(interval)) warn(line);
  });
}

PlainTextWarning::~PlainTextWarning() {
  stop_.Notify();
  thread_.join();
}

}  // namespace signpost
