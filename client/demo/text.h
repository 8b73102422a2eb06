// Real text to train on, as bytes, split into a training part and a held-out part.

#ifndef SIGNPOST_CLIENT_DEMO_TEXT_H_
#define SIGNPOST_CLIENT_DEMO_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace signpost::demo {

// Files one after the other. No byte of `validation` is in `training`.
struct Text {
  std::vector<uint8_t> training;
  std::vector<uint8_t> validation;
};

// Where every Debian has the texts of the free licences.
inline constexpr char kLicenceDirectory[] = "/usr/share/common-licenses";

// The regular files of `directory` with at least kMinFileBytes, sorted by name, so that all workers
// read the same text in the same order. Symbolic links are skipped: they would name a text twice.
// NOT_FOUND if there are none.
absl::StatusOr<std::vector<std::string>> TextFiles(const std::string& directory);

// The default text of the demo: the licences, and the modules of Debian's Python. Both together
// are 5 MB, which a short training does not learn by heart. Where there is no Python, or another
// version of it, the text is another. NOT_FOUND if there is neither.
absl::StatusOr<std::vector<std::string>> DefaultTextFiles();

// Reads `files` in the order given. The last tenth of each is held out, in one piece, and the
// rest is for training.
//
// Errors name the file: NOT_FOUND or PERMISSION_DENIED if it cannot be read; INVALID_ARGUMENT if no
// file is given, or if a file has fewer than kMinFileBytes.
absl::StatusOr<Text> LoadText(absl::Span<const std::string> files);

inline constexpr uint64_t kMinFileBytes = 1000;

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_TEXT_H_
