// All that is looked at on one host.

#ifndef SIGNPOST_DOCTOR_HOST_H_
#define SIGNPOST_DOCTOR_HOST_H_

#include <string>

#include "doctor/doctor.pb.h"
#include "doctor/job.h"
#include "security/transport_security.h"

namespace signpost::doctor {

// Of this host, for this job. `where` is what lines call it; `listen`, if not empty, the HOST:PORT
// at which others find it. Takes some seconds.
DoctorReport ExamineHost(const Job& job, const TransportSecurity& security,
                         const std::string& where, const std::string& listen = "");

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_HOST_H_
