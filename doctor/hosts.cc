#include "doctor/hosts.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "doctor/doctor.grpc.pb.h"
#include "doctor/name.h"
#include "doctor/path.h"
#include "doctor/report.h"
#include "doctor/tls.h"
#include "proto/steady_time.h"
#include "security/client_security.h"

namespace signpost::doctor {
namespace {

constexpr absl::Duration kConnected = absl::Seconds(3);
// A host may start Python, and wait for aggregators that are not there.
constexpr absl::Duration kDescribed = absl::Seconds(60);
constexpr absl::Duration kTried = absl::Seconds(40);

using Stub = std::unique_ptr<DoctorService::Stub>;

// Calls `ask(i)` for all i < count at once, and waits for all.
template <typename Ask>
void AtOnce(size_t count, const Ask& ask) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) threads.emplace_back([&ask, i] { ask(i); });
  for (std::thread& thread : threads) thread.join();
}

Stub StubOf(const std::string& address, const ClientSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return DoctorService::NewStub(OpenChannel(
      address, security.CredentialsFor(address, TlsCredentials::To::kMembers), arguments));
}

// Why a call to a host failed, from where we are.
std::vector<DoctorLine> Explain(const std::string& address, const std::string& error,
                                const TransportSecurity& security) {
  DoctorReport report;
  Reporter to(address, report);
  const PathFacts path = FindPath(address, kConnected);
  if (CheckPath(path, address, "signpost doctor", to) &&
      !ExplainByTls(address, path.address(), error, security, Wanted::kMember, to)) {
    to.Fault("reach", absl::StrCat(address, " does not answer: ", error),
             absl::StrCat("on ", HostOf(address), ": signpost doctor --listen ", address));
  }
  return {report.lines().begin(), report.lines().end()};
}

void Ask(DoctorService::Stub& stub, const std::vector<std::string>& addresses,
         const TransportSecurity& security, Host& host) {
  // In plain text, small packets may get through where the answer does not: see that at once.
  const PathFacts path = FindPath(host.address, kConnected);
  std::string error = "no connection";
  if (path.connection() == PathFacts::MADE && !path.packets_are_lost()) {
    grpc::ClientContext context;
    context.set_deadline(ToSystemClock(SteadyNow() + kDescribed));
    DescribeRequest request;
    request.mutable_hosts()->Add(addresses.begin(), addresses.end());
    HostFacts facts;
    const grpc::Status status = stub.Describe(&context, request, &facts);
    if (status.ok() && facts.names_size() == request.hosts_size()) {
      host.clock_ahead_s =
          absl::ToDoubleSeconds(absl::FromUnixMicros(facts.clock_us()) - absl::Now());
      host.facts = std::move(facts);
      return;
    }
    error = status.ok() ? "of another version" : status.error_message();
  }
  host.findings = Explain(host.address, error, security);
}

// A host that does not is a finding too: a path that nobody looked at is not a good one.
PathFacts Try(DoctorService::Stub& stub, const std::string& address) {
  grpc::ClientContext context;
  context.set_deadline(ToSystemClock(SteadyNow() + kTried));
  TryRequest request;
  request.set_host(address);
  PathFacts path;
  const grpc::Status status = stub.Try(&context, request, &path);
  if (status.ok()) return path;
  DoctorReport report;
  Reporter("", report)
      .Unchecked("path", absl::StrCat("it was not tried: ", status.error_message()));
  path.Clear();
  *path.mutable_findings() = report.lines();
  return path;
}

}  // namespace

absl::StatusOr<Hosts> AskHosts(const std::vector<std::string>& addresses,
                               const TransportSecurity& security) {
  std::set<std::string> seen;
  for (const std::string& address : addresses) {
    if (seen.insert(address).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--hosts names ", address, " twice: a host is asked once, and tries others"));
  }
  const auto client = ClientSecurity::Open(security, addresses, [](const std::string&) {});
  if (!client.ok()) return client.status();
  const size_t count = addresses.size();
  Hosts hosts;
  std::vector<Stub> stubs;
  for (const std::string& address : addresses) {
    hosts.hosts.push_back({.address = address});
    stubs.push_back(StubOf(address, **client));
  }
  hosts.paths.resize(count, std::vector<std::optional<PathFacts>>(count));
  AtOnce(count, [&](size_t i) { Ask(*stubs[i], addresses, security, hosts.hosts[i]); });
  // In each turn every host tries one other, and is tried by one.
  for (size_t turn = 1; turn < count; ++turn) {
    AtOnce(count, [&](size_t from) {
      const size_t to = (from + turn) % count;
      if (hosts.hosts[from].facts) hosts.paths[from][to] = Try(*stubs[from], addresses[to]);
    });
  }
  return hosts;
}

}  // namespace signpost::doctor
