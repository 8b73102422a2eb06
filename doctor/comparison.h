// What is found in what hosts say: about each, and between them.

#ifndef SIGNPOST_DOCTOR_COMPARISON_H_
#define SIGNPOST_DOCTOR_COMPARISON_H_

#include <cstdint>

#include "doctor/doctor.pb.h"
#include "doctor/hosts.h"

namespace signpost::doctor {

// What they found about themselves, and what there is between them.
DoctorReport CheckHosts(const Hosts& hosts);

// In bit/s, of the slowest host in its slower direction; 0: nothing was measured. The best that a
// host sent is its rate in one direction, the best that it received in the other.
double SlowestRate(const Hosts& hosts);

// Those that the program may run on, of the host where they are fewest; 0: no host tells.
uint32_t FewestProcessors(const Hosts& hosts);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_COMPARISON_H_
