#include "doctor/aggregators.h"

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "doctor/name.h"
#include "doctor/path.h"
#include "doctor/tls.h"
#include "proto/aggregator.grpc.pb.h"
#include "proto/grpc_status.h"
#include "proto/steady_time.h"
#include "proto/version.h"
#include "security/client_security.h"
#include "security/loopback.h"

namespace signpost::doctor {
namespace {

constexpr absl::Duration kConnected = absl::Seconds(3);
constexpr absl::Duration kAnswered = absl::Seconds(5);
constexpr absl::string_view kNotMeasured = "its bandwidth is not measured here, --hosts does that";

grpc::Status Ask(const std::string& address, const ClientSecurity& security,
                 StatusResponse& response) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  const auto stub =
      AggregatorService::NewStub(OpenChannel(address, security.CredentialsFor(address), arguments));
  grpc::ClientContext context;
  context.set_deadline(ToSystemClock(SteadyNow() + kAnswered));
  StatusRequest request;
  request.set_job(security.JobToAskAbout());
  return stub->Status(&context, request, &response);
}

void CheckOne(const Job& job, uint32_t shard, const TransportSecurity& security,
              const ClientSecurity* client, Reporter& to) {
  const std::string& address = job.aggregators[shard];
  const uint32_t shards = static_cast<uint32_t>(job.aggregators.size());
  std::string way = address;
  std::string ip;
  if (!IsUnixAddress(address)) {
    if (IsHiddenBehindLoopback(Resolve(HostOf(address)))) {
      to.Unchecked("reach", absl::StrCat(address, " cannot be tried before its name is right"));
      return;
    }
    const PathFacts path = FindPath(address, kConnected);
    // The name has been looked at.
    if (path.connection() == PathFacts::UNRESOLVED) return;
    if (!CheckPath(path, address, absl::StrCat("signpost aggregator --shard ", shard, "/", shards),
                   to)) {
      return;
    }
    way = absl::StrCat(Describe(path), "; ", kNotMeasured);
    ip = path.address();
  }
  to.Fine("reach", way);
  if (client == nullptr) return;
  StatusResponse response;
  const grpc::Status status = Ask(address, *client, response);
  if (status.ok()) {
    CheckAggregatorStatus(response, address, shard, shards, to);
  } else if (status.error_code() == grpc::StatusCode::PERMISSION_DENIED) {
    to.Unchecked(
        "aggregator",
        absl::StrCat(address, " answers, but does not tell its shard: ", status.error_message()));
  } else if (ip.empty() || !ExplainByTls(address, ip, status.error_message(), security,
                                         Wanted::kAggregator, to)) {
    to.Fault("aggregator",
             absl::StrCat(address, " does not answer: ", FromGrpcStatus(status).ToString()),
             absl::StrCat("is it signpost that listens there? ss -ltnp 'sport = :", PortOf(address),
                          "'"));
  }
}

}  // namespace

void CheckAggregatorStatus(const StatusResponse& status, const std::string& address, uint32_t shard,
                           uint32_t shard_count, Reporter& to) {
  const auto shard_text = [](uint32_t number, uint32_t of) {
    return absl::StrCat(number, "/", of);
  };
  const std::string found = shard_text(status.shard(), status.shard_count());
  const std::string version =
      status.version().empty() ? "older than versions tell" : status.version();
  if (status.version() != kVersion) {
    to.Fault(
        "version",
        absl::StrCat("aggregator ", address, " is signpost ", version, ", and this is ", kVersion),
        absl::StrCat("the same version on all hosts: `signpost version` tells; on ",
                     HostOf(address), " install ", kVersion, ", and start it again"));
  }
  if (status.shard_count() != shard_count) {
    to.Fault("shards",
             absl::StrCat(address, " is shard ", found, ", and ", shard_count,
                          shard_count == 1 ? " aggregator is" : " aggregators are", " named"),
             absl::StrCat("name all ", status.shard_count(),
                          " in --aggregators (SIGNPOST_AGGREGATORS), or start it with --shard ",
                          shard_text(shard, shard_count)));
  } else if (status.shard() != shard) {
    to.Fault(
        "shards",
        absl::StrCat(address, " stands where shard ", shard_text(shard, shard_count),
                     " belongs, and is shard ", found),
        absl::StrCat("in --aggregators (SIGNPOST_AGGREGATORS) the addresses stand in the order "
                     "of their shards: ",
                     address, " is number ", status.shard() + 1));
  }
  for (const std::string& warning : status.warnings()) {
    to.Warn(
        "aggregator", absl::StrCat(address, " warned when it was started: ", warning),
        "jobs that it gave up are started again, from their newest checkpoint if they have one");
  }
  if (status.version() == kVersion && status.shard_count() == shard_count &&
      status.shard() == shard) {
    to.Fine("aggregator", absl::StrCat(address, " serves shard ", found, ", signpost ", version));
  }
}

void CheckAggregators(const Job& job, const TransportSecurity& security, const std::string& where,
                      DoctorReport& report) {
  Reporter to(where, report);
  absl::StatusOr<std::shared_ptr<const ClientSecurity>> client =
      ClientSecurity::Open(security, job.aggregators, [](const std::string&) {});
  const bool needs_tls = !client.ok() && security.tls_dir.empty();
  if (needs_tls) {
    to.Fault("certificate", std::string(client.status().message()),
             "signpost cert init certificates, and --tls-dir certificates/worker");
  }
  for (uint32_t shard = 0; shard < job.aggregators.size(); ++shard) {
    CheckOne(job, shard, security, client.ok() ? client->get() : nullptr, to);
  }
}

}  // namespace signpost::doctor
