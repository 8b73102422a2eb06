#include "client/demo/worker_result.h"

#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/demo/file.h"

namespace signpost::demo {
namespace {

constexpr char kEnd[] = "end";      // the last line: without it the file is not whole
constexpr char kCurve[] = "curve";  // a line per point

// Calls visit(name, member) for each figure of a result that is a single number.
template <typename Result, typename Visit>
void ForEachFigure(Result& result, Visit visit) {
  visit("rank", result.rank);
  visit("world_size", result.world_size);
  visit("parameters", result.parameters);
  visit("steps", result.steps);
  visit("one_bit_steps", result.one_bit_steps);
  visit("seconds", result.seconds);
  visit("parameters_crc32c", result.parameters_crc32c);
  visit("wire_sent", result.wire.sent);
  visit("wire_received", result.wire.received);
  visit("one_bit_wire_sent", result.one_bit_wire.sent);
  visit("one_bit_wire_received", result.one_bit_wire.received);
  visit("validation", result.validation);
}

std::string FormatNumber(uint32_t number) { return absl::StrCat(number); }
std::string FormatNumber(uint64_t number) { return absl::StrCat(number); }
std::string FormatNumber(double number) { return absl::StrFormat("%.17g", number); }

bool ParseNumber(absl::string_view text, uint32_t& number) {
  return absl::SimpleAtoi(text, &number);
}
bool ParseNumber(absl::string_view text, uint64_t& number) {
  return absl::SimpleAtoi(text, &number);
}
bool ParseNumber(absl::string_view text, double& number) { return absl::SimpleAtod(text, &number); }

bool ParsePoint(absl::string_view text, CurvePoint& point) {
  const std::vector<absl::string_view> numbers = absl::StrSplit(text, ' ');
  return numbers.size() == 3 && ParseNumber(numbers[0], point.step) &&
         ParseNumber(numbers[1], point.training_bpb) &&
         ParseNumber(numbers[2], point.validation_bpb);
}

absl::Status LineError(absl::string_view line) {
  return absl::InvalidArgumentError(absl::StrCat("not a figure of a result: '", line, "'"));
}

}  // namespace

std::string FormatResult(const WorkerResult& result) {
  std::string text;
  ForEachFigure(result, [&](absl::string_view name, auto number) {
    absl::StrAppend(&text, name, " ", FormatNumber(number), "\n");
  });
  for (const CurvePoint& point : result.curve) {
    absl::StrAppend(&text, kCurve, " ", point.step, " ", FormatNumber(point.training_bpb), " ",
                    FormatNumber(point.validation_bpb), "\n");
  }
  return absl::StrCat(text, kEnd, "\n");
}

absl::StatusOr<WorkerResult> ParseResult(absl::string_view text) {
  WorkerResult result;
  std::map<absl::string_view, absl::string_view> figures;
  bool whole = false;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> words =
        absl::StrSplit(line, absl::MaxSplits(' ', 1));
    whole = line == kEnd;
    if (whole) break;
    if (words.first == kCurve) {
      if (!ParsePoint(words.second, result.curve.emplace_back())) return LineError(line);
    } else {
      figures.insert(words);
    }
  }
  if (!whole) return absl::InvalidArgumentError("the result stops before its end");

  absl::Status status;
  ForEachFigure(result, [&](absl::string_view name, auto& number) {
    const auto figure = figures.find(name);
    if (figure == figures.end()) {
      status.Update(absl::InvalidArgumentError(absl::StrCat("the result has no '", name, "'")));
    } else if (!ParseNumber(figure->second, number)) {
      status.Update(LineError(absl::StrCat(name, " ", figure->second)));
    }
  });
  if (!status.ok()) return status;
  return result;
}

absl::Status WriteResult(const WorkerResult& result, const std::string& path) {
  return WriteFile(path, FormatResult(result));
}

absl::StatusOr<WorkerResult> ReadResult(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  absl::StatusOr<WorkerResult> result = ParseResult(*text);
  if (!result.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "': ", result.status().message()));
  }
  return result;
}

}  // namespace signpost::demo
