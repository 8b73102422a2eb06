// How this host's TCP decides how fast it sends.

#ifndef SIGNPOST_DOCTOR_CONGESTION_H_
#define SIGNPOST_DOCTOR_CONGESTION_H_

#include <string>

#include "doctor/report.h"

namespace signpost::doctor {

// "cubic", "bbr" ...: the congestion control that connections begin with in this process's network
// namespace. Empty where the kernel does not tell.
std::string FindCongestionControl();

// Says nothing of one that is not known.
void CheckCongestionControl(const std::string& name, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_CONGESTION_H_
