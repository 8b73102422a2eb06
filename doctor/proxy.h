// Proxy variables, which some programs around a job heed and others do not.

#ifndef SIGNPOST_DOCTOR_PROXY_H_
#define SIGNPOST_DOCTOR_PROXY_H_

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "doctor/report.h"

namespace signpost::doctor {

// http_proxy and its like, in either case, and no_proxy, by name: those that are set in this
// process's environment.
std::map<std::string, std::string> FindProxies();

// Whether no_proxy names the host: itself, a domain that it is of, a network in CIDR form that it
// is in, or "*".
bool IsExcepted(absl::string_view host, absl::string_view no_proxy);

// `hosts` are HOST:PORT of the job.
void CheckProxies(const std::map<std::string, std::string>& proxies,
                  const std::vector<std::string>& hosts, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_PROXY_H_
