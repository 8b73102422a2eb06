// Bytes of a pipe to lines of text.

#ifndef SIGNPOST_CLI_LINE_SPLITTER_H_
#define SIGNPOST_CLI_LINE_SPLITTER_H_

#include <cstddef>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace signpost::cli {

// A line ends with "\n", "\r\n" or "\r" (progress bars). Lines over kMaxLineBytes come in pieces.
class LineSplitter {
 public:
  static constexpr size_t kMaxLineBytes = 16384;

  using OnLine = std::function<void(absl::string_view line)>;

  // Calls on_line for each line that `bytes` completes.
  void Add(absl::string_view bytes, const OnLine& on_line);

  // The end: what is left, if anything, is a line.
  void Finish(const OnLine& on_line);

 private:
  std::string begun_;                   // a line's beginning, without its end
  bool after_carriage_return_ = false;  // a "\n" now would belong to the "\r" before it
};

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_LINE_SPLITTER_H_
