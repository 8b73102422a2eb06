#include "cli/line_splitter.h"

#include <utility>

namespace signpost::cli {

void LineSplitter::Add(absl::string_view bytes, const OnLine& on_line) {
  for (const char byte : bytes) {
    if (byte == '\n' && std::exchange(after_carriage_return_, false)) continue;
    after_carriage_return_ = byte == '\r';
    const bool end = byte == '\n' || byte == '\r';
    if (!end) begun_.push_back(byte);
    if (end || begun_.size() == kMaxLineBytes) {
      on_line(begun_);
      begun_.clear();
    }
  }
}

void LineSplitter::Finish(const OnLine& on_line) {
  if (!begun_.empty()) on_line(std::exchange(begun_, {}));
}

}  // namespace signpost::cli
