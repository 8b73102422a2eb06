#include "log/log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"

namespace signpost::log {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kVariable[] = "SIGNPOST_LOG_FORMAT";
constexpr char kText[] = "text";
constexpr char kJson[] = "json";

std::atomic<Format>& FormatOfProcess() {
  static std::atomic<Format> format = [] {
    const char* const value = std::getenv(kVariable);
    return value != nullptr && absl::string_view(value) == kJson ? Format::kJson : Format::kText;
  }();
  return format;
}

About& AboutOfThread() {
  thread_local About about;
  return about;
}

template <typename Value>
void SetIfKnown(const Value& value, const Value& other, Value& to) {
  to = value == Value() ? other : value;
}

// What is not known of the one is the other's.
About Join(const About& one, const About& other) {
  About both;
  SetIfKnown(one.job, other.job, both.job);
  SetIfKnown(one.step, other.step, both.step);
  SetIfKnown(one.chunk, other.chunk, both.chunk);
  SetIfKnown(one.worker, other.worker, both.worker);
  SetIfKnown(one.aggregator, other.aggregator, both.aggregator);
  SetIfKnown(one.shard, other.shard, both.shard);
  SetIfKnown(one.node, other.node, both.node);
  return both;
}

const char* NameOf(Level level) {
  switch (level) {
    case Level::kInfo:
      return "info";
    case Level::kWarning:
      return "warning";
    case Level::kError:
      break;
  }
  return "error";
}

// In one piece: other threads, and other processes of this standard error, write too.
void WriteLine(std::string line) {
  line.push_back('\n');
  std::fwrite(line.data(), 1, line.size(), stderr);
}

template <typename Number>
void Add(const char* name, const std::optional<Number>& number, Json& line) {
  if (number) line[name] = *number;
}
void Add(const char* name, const std::string& text, Json& line) {
  if (!text.empty()) line[name] = text;
}

Json FieldsOf(const About& about) {
  Json fields = Json::object();
  Add("job", about.job, fields);
  Add("step", about.step, fields);
  Add("chunk", about.chunk, fields);
  Add("worker", about.worker, fields);
  Add("aggregator", about.aggregator, fields);
  Add("shard", about.shard, fields);
  Add("node", about.node, fields);
  return fields;
}

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace

absl::Status SetFormat(absl::string_view format) {
  if (format != kText && format != kJson) {
    return absl::InvalidArgumentError(
        absl::StrCat("the log format is '", format, "', wanted ", kText, " or ", kJson));
  }
  FormatOfProcess() = format == kJson ? Format::kJson : Format::kText;
  setenv(kVariable, format == kJson ? kJson : kText, /*overwrite=*/1);
  return absl::OkStatus();
}

Format format() { return FormatOfProcess(); }

void Write(Level level, absl::string_view prefix, absl::string_view message, const About& about) {
  if (format() == Format::kText) return WriteLine(absl::StrCat(prefix, ": ", message));
  WriteLine(JsonLine(level, message, Join(about, AboutOfThread()), absl::Now()));
}

void WriteEvent(Level level, absl::string_view message, const About& about) {
  if (format() == Format::kJson) Write(level, "", message, about);
}

std::string JsonLine(Level level, absl::string_view message, const About& about, absl::Time now) {
  Json line = {{"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now, absl::UTCTimeZone())},
               {"level", NameOf(level)},
               {"message", std::string(message)}};
  line.update(FieldsOf(about));
  return Dump(line);
}

// What is there stays as it is written, but for a byte order mark: the parser takes one, and those
// who read the line need not.
std::optional<std::string> AddTo(absl::string_view line, const About& about) {
  absl::ConsumePrefix(&line, "\xEF\xBB\xBF");
  const Json object = Json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return std::nullopt;
  std::string all(line.substr(0, line.rfind('}')));
  bool is_empty = object.empty();
  const Json fields = FieldsOf(about);
  for (const auto& [name, value] : fields.items()) {
    if (object.contains(name)) continue;
    absl::StrAppend(&all, is_empty ? "" : ",", Dump(name), ":", Dump(value));
    is_empty = false;
  }
  return absl::StrCat(all, "}");
}

Scope::Scope(About about) : before_(std::move(AboutOfThread())) {
  AboutOfThread() = Join(about, before_);
}

Scope::~Scope() { AboutOfThread() = before_; }

}  // namespace signpost::log
