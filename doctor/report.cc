#include "doctor/report.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace signpost::doctor {
namespace {

const char* NameOf(Verdict verdict) {
  switch (verdict) {
    case FINE:
      return "ok";
    case WARNING:
      return "WARNING";
    case FAULT:
      return "FAULT";
    default:
      return "unknown";
  }
}

// What is to be seen stands last, where the eye is.
int UrgencyOf(Verdict verdict) {
  return verdict == FAULT ? 3 : verdict == WARNING ? 2 : verdict == UNCHECKED ? 1 : 0;
}

// On one line, without anything that is not to be read.
std::string Tame(const std::string& text) {
  std::string tame = text;
  std::replace_if(
      tame.begin(), tame.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return tame;
}

std::string Count(size_t number, const std::string& noun) {
  return absl::StrCat(number, " ", noun, number == 1 ? "" : "s");
}

}  // namespace

void Reporter::Add(Verdict verdict, const std::string& check, const std::string& text,
                   const std::string& mend) {
  DoctorLine& line = *report_.add_lines();
  line.set_verdict(verdict);
  line.set_check(check);
  line.set_where(where_);
  line.set_text(text);
  line.set_mend(mend);
}

void Reporter::Fine(const std::string& check, const std::string& text) {
  Add(FINE, check, text, "");
}

void Reporter::Warn(const std::string& check, const std::string& text, const std::string& mend) {
  Add(WARNING, check, text, mend);
}

void Reporter::Fault(const std::string& check, const std::string& text, const std::string& mend) {
  Add(FAULT, check, text, mend);
}

void Reporter::Unchecked(const std::string& check, const std::string& text) {
  Add(UNCHECKED, check, text, "");
}

bool HasFault(const DoctorReport& report) {
  return std::any_of(report.lines().begin(), report.lines().end(),
                     [](const DoctorLine& line) { return line.verdict() == FAULT; });
}

std::string FormatText(const DoctorReport& report) {
  size_t check_width = 0, where_width = 0, faults = 0, warnings = 0;
  for (const DoctorLine& line : report.lines()) {
    check_width = std::max(check_width, line.check().size());
    where_width = std::max(where_width, line.where().size());
    faults += line.verdict() == FAULT ? 1 : 0;
    warnings += line.verdict() == WARNING ? 1 : 0;
  }
  std::vector<DoctorLine> lines(report.lines().begin(), report.lines().end());
  std::stable_sort(lines.begin(), lines.end(), [](const DoctorLine& a, const DoctorLine& b) {
    return UrgencyOf(a.verdict()) < UrgencyOf(b.verdict());
  });
  std::string text;
  for (const DoctorLine& line : lines) {
    absl::StrAppendFormat(&text, "%-7s  %-*s  %-*s  %s\n", NameOf(line.verdict()), check_width,
                          Tame(line.check()), where_width, Tame(line.where()), Tame(line.text()));
    if (!line.mend().empty()) {
      absl::StrAppendFormat(&text, "         mend: %s\n", Tame(line.mend()));
    }
  }
  return absl::StrCat(text, Count(report.lines_size(), "check"), ": ", Count(faults, "fault"), ", ",
                      Count(warnings, "warning"), "\n");
}

std::string FormatJson(const DoctorReport& report) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(report, &json, options);
  return status.ok() ? json : "{}";
}

}  // namespace signpost::doctor
