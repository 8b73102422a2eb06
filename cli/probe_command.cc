#include "cli/probe_command.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "proto/exit_code.h"
#include "proto/grpc_status.h"
#include "security/client_security.h"

namespace signpost::cli {
namespace {

constexpr char kHealthCheckMethod[] = "/grpc.health.v1.Health/Check";

// A grpc.health.v1.HealthCheckResponse with the status SERVING. Its request, about the whole
// server, has no bytes.
constexpr absl::string_view kServing("\x08\x01", 2);

struct Flags {
  std::string aggregators;
  TransportSecurity security;
  absl::Duration timeout = absl::Seconds(5);
};

absl::Status Probe(const std::string& address, const ClientSecurity& security,
                   absl::Duration timeout) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  grpc::GenericStub stub(OpenChannel(address, security.CredentialsFor(address), arguments));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(&context, kHealthCheckMethod, {}, &request, &response, [&](grpc::Status result) {
    status = result;
    done.Notify();
  });
  done.WaitForNotification();
  if (!status.ok()) return FromGrpcStatus(status);
  grpc::Slice answer;
  if (!response.DumpToSingleSlice(&answer).ok() ||
      absl::string_view(reinterpret_cast<const char*>(answer.begin()), answer.size()) != kServing) {
    return absl::AbortedError("it is there, and takes no new jobs: it is about to end");
  }
  return absl::OkStatus();
}

absl::StatusOr<int> ProbeAll(const Flags& flags) {
  const absl::StatusOr<std::vector<std::string>> addresses = ParseAddresses(flags.aggregators);
  if (!addresses.ok()) return addresses.status();
  const auto security = ClientSecurity::Open(flags.security, *addresses, [](const std::string&) {});
  if (!security.ok()) return security.status();
  for (const std::string& address : *addresses) {
    const absl::Status status = Probe(address, **security, flags.timeout);
    if (!status.ok()) {
      // One that does not answer in time cannot be reached, whatever stands in the way.
      return absl::Status(
          absl::IsDeadlineExceeded(status) ? absl::StatusCode::kUnavailable : status.code(),
          absl::StrCat("aggregator ", address, ": ", status.message()));
    }
  }
  return kExitOk;
}

}  // namespace

Command AddProbeCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand("probe", "Tell whether aggregators serve, by exit code");
  app.footer(
      "Asks gRPC's health protocol where workers connect to. Exit code 0: all of them serve; 69: "
      "one\n"
      "cannot be reached; 75: one is about to end. For probes of a cluster, with the aggregator's "
      "own\n"
      "certificate.\n\n"
      "Example:\n"
      "  signpost probe --aggregators 127.0.0.1:4000 --tls-dir certificates/aggregator");
  app.add_option("--aggregators", flags->aggregators, "Aggregators to ask, separated by commas")
      ->type_name("HOST:PORT,...")
      ->envname("SIGNPOST_AGGREGATORS")
      ->required();
  AddClientSecurityFlags(app, flags->security);
  AddDurationFlag(app, "--timeout", flags->timeout, "How long to wait for each answer [5s]");
  return {&app, [flags] { return ProbeAll(*flags); }};
}

}  // namespace signpost::cli
