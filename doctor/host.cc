#include "doctor/host.h"

#include <grpcpp/grpcpp.h>
#include <sys/timex.h>

#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "doctor/aggregators.h"
#include "doctor/congestion.h"
#include "doctor/gpu.h"
#include "doctor/limits.h"
#include "doctor/name.h"
#include "doctor/proxy.h"
#include "doctor/report.h"
#include "doctor/state_disk.h"
#include "doctor/tls.h"
#include "kernels/target.h"
#include "proto/steady_time.h"
#include "proto/version.h"
#include "security/loopback.h"

namespace signpost::doctor {
namespace {

// Who keeps the time of a container is the host, so nothing is wrong when nobody does here.
std::string DescribeClock(absl::Time now) {
  timex state = {};
  const bool kept = adjtimex(&state) >= 0 && (state.status & STA_UNSYNC) == 0;
  return absl::StrCat(absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", now, absl::UTCTimeZone()),
                      kept ? ", kept by NTP" : "; the kernel does not know of NTP");
}

std::vector<std::string> AddressesOf(const Job& job, const std::string& listen) {
  std::vector<std::string> addresses;
  for (const std::string& address : job.aggregators) {
    if (!IsUnixAddress(address)) addresses.push_back(address);
  }
  if (!listen.empty()) addresses.push_back(listen);
  return addresses;
}

void ExamineNames(const std::vector<std::string>& addresses, Reporter& to) {
  std::set<std::string> hosts;
  for (const std::string& address : addresses) hosts.insert(HostOf(address));
  std::vector<ResolvedName> names;
  const absl::Time start = SteadyNow();
  for (const std::string& host : hosts) names.push_back(Resolve(host));
  CheckNames(names, absl::ToDoubleSeconds(SteadyNow() - start), to);
}

}  // namespace

DoctorReport ExamineHost(const Job& job, const TransportSecurity& security,
                         const std::string& where, const std::string& listen) {
  DoctorReport report;
  Reporter to(where, report);
  to.Fine("version", absl::StrCat("signpost ", kVersion, ", gRPC ", grpc::Version(), ", ",
                                  kernels::TargetName(kernels::CurrentTarget()), " kernels"));
  to.Fine("clock", DescribeClock(absl::Now()));
  CheckTlsDir(security, absl::Now(), to);
  CheckLimits(FindLimits(), job, to);
  CheckCongestionControl(FindCongestionControl(), to);
  const std::vector<std::string> addresses = AddressesOf(job, listen);
  CheckProxies(FindProxies(), addresses, to);
  if (!job.state_dir.empty()) {
    CheckStateDisk(TryStateDisk(job.state_dir, job.shard.value_or(ShardId())), job, to);
  }
  CheckGpu(FindGpu(job), job, to);
  ExamineNames(addresses, to);
  CheckAggregators(job, security, where, report);
  return report;
}

}  // namespace signpost::doctor
