// What doctor looked at: lines with a verdict, and for each finding what mends it.

#ifndef SIGNPOST_DOCTOR_REPORT_H_
#define SIGNPOST_DOCTOR_REPORT_H_

#include <string>
#include <utility>

#include "doctor/doctor.pb.h"

namespace signpost::doctor {

// Appends lines, about one host or two.
class Reporter {
 public:
  // `report` must outlive it.
  Reporter(std::string where, DoctorReport& report) : where_(std::move(where)), report_(report) {}

  void Fine(const std::string& check, const std::string& text);
  void Warn(const std::string& check, const std::string& text, const std::string& mend);
  void Fault(const std::string& check, const std::string& text, const std::string& mend);
  void Unchecked(const std::string& check, const std::string& text);

 private:
  void Add(Verdict verdict, const std::string& check, const std::string& text,
           const std::string& mend);

  const std::string where_;
  DoctorReport& report_;
};

bool HasFault(const DoctorReport& report);

// For a person: a line for each, findings last, with "mend:" below them, and one that counts. What
// could stir a terminal is replaced: some lines come from other hosts.
std::string FormatText(const DoctorReport& report);

// As protobuf writes JSON, with the fields' names as they are in doctor.proto.
std::string FormatJson(const DoctorReport& report);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_REPORT_H_
