// What hosts say of themselves and of the ways between them; each has a Listener.

#ifndef SIGNPOST_DOCTOR_HOSTS_H_
#define SIGNPOST_DOCTOR_HOSTS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "doctor/doctor.pb.h"
#include "security/transport_security.h"

namespace signpost::doctor {

struct Host {
  std::string address;             // HOST:PORT of its listener
  std::optional<HostFacts> facts;  // none: it could not be asked
  double clock_ahead_s = 0;        // of the clock of who asked
  // Why it could not be asked, from where we are.
  std::vector<DoctorLine> findings;
};

struct Hosts {
  std::vector<Host> hosts;
  // How hosts get to each other: paths[from][to]; none when `from` could not be asked, or for
  // itself.
  std::vector<std::vector<std::optional<PathFacts>>> paths;
};

// Asks all at once, and then has each try the others, one at a time, so that no link carries two
// tries in one direction. Takes some seconds, and one or two more for each host.
// INVALID_ARGUMENT names an address that is there twice; other errors as ClientSecurity::Open's.
absl::StatusOr<Hosts> AskHosts(const std::vector<std::string>& addresses,
                               const TransportSecurity& security);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_HOSTS_H_
