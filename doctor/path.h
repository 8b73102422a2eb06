// The way from this host to an address, as the kernel's TCP finds it.

#ifndef SIGNPOST_DOCTOR_PATH_H_
#define SIGNPOST_DOCTOR_PATH_H_

#include <string>

#include "absl/time/time.h"
#include "doctor/doctor.pb.h"
#include "doctor/report.h"

namespace signpost::doctor {

// Connects to HOST:PORT and has one packet of full size acknowledged; if none is, looks for the
// largest that is. All but bits_per_s and findings. Blocks for the timeout at most, and ten
// seconds if packets are lost.
PathFacts FindPath(const std::string& host, absl::Duration timeout);

// True: there is a connection, and packets of full size go through it. Otherwise says what is
// wrong. `listener` is the command that should listen there.
bool CheckPath(const PathFacts& path, const std::string& host, const std::string& listener,
               Reporter& to);

// "10.0.0.2 by eth0 (10.0.0.1, MTU 1500, 10000 Mbit/s), 0.21 ms there and back".
std::string Describe(const PathFacts& path);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_PATH_H_
