// Names of hosts, as this host resolves them.

#ifndef SIGNPOST_DOCTOR_NAME_H_
#define SIGNPOST_DOCTOR_NAME_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "doctor/doctor.pb.h"
#include "doctor/report.h"

namespace signpost::doctor {

// "a" of "a:7000", "::1" of "[::1]:7000"; what has no port is returned as it is.
std::string HostOf(absl::string_view address);
std::string PortOf(absl::string_view address);

// Blocks for as long as the resolver does.
ResolvedName Resolve(const std::string& host);

// Whether it is no address, but a name for one.
bool IsName(absl::string_view host);
bool IsLoopbackAddress(absl::string_view address);

// Whether a name other than localhost stands for this machine's loopback, as Debian's installer
// writes it into /etc/hosts: who listens there is reached by nobody else.
bool IsHiddenBehindLoopback(const ResolvedName& name);

// One line for each; `took_s` is how long all of them took.
void CheckNames(const std::vector<ResolvedName>& names, double took_s, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_NAME_H_
