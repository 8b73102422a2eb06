// Lines about what happens, on standard error: for people, or one JSON object each for programs
// that collect them.

#ifndef SIGNPOST_LOG_LOG_H_
#define SIGNPOST_LOG_LOG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace signpost::log {

enum class Format { kText, kJson };
enum class Level { kInfo, kWarning, kError };

// What a line is about, as far as it is known.
struct About {
  std::string job = {};
  std::optional<uint64_t> step = std::nullopt;
  std::optional<uint32_t> chunk = std::nullopt;
  std::optional<uint32_t> worker = std::nullopt;  // its rank
  std::string aggregator = {};                    // where it listens
  std::optional<uint32_t> shard = std::nullopt;
  std::optional<uint32_t> node = std::nullopt;
};

// Of this process and, by SIGNPOST_LOG_FORMAT, of those that it starts from then on: "text" or
// "json". INVALID_ARGUMENT for anything else. To be called before there are other threads.
absl::Status SetFormat(absl::string_view format);

// That was set; otherwise SIGNPOST_LOG_FORMAT's, and text if that is neither. Thread-safe, as what
// follows.
Format format();

// As text "PREFIX: MESSAGE". As JSON the prefix is left out, and `about` is put before what the
// scopes around say.
void Write(Level level, absl::string_view prefix, absl::string_view message,
           const About& about = {});

// The same of what is said in JSON only: people look at `signpost status`.
void WriteEvent(Level level, absl::string_view message, const About& about = {});

// What Write writes as JSON, without the end of the line:
//   {"time":"2026-01-31T12:00:00.123Z","level":"info","message":"...","job":"...","worker":2}
// Bytes of the texts that are not UTF-8 are replaced.
std::string JsonLine(Level level, absl::string_view message, const About& about, absl::Time now);

// A line that is a JSON object already, with those of the fields that it lacks. Nothing for others.
std::optional<std::string> AddTo(absl::string_view line, const About& about);

// What this thread's lines are about while it lives, inside what the scopes around it say. To be
// destroyed in the reverse order.
class Scope {
 public:
  explicit Scope(About about);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const About before_;
};

}  // namespace signpost::log

#endif  // SIGNPOST_LOG_LOG_H_
