#include "cli/aggregator_command.h"

#include <signal.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "cli/flag.h"
#include "cli/trace_command.h"
#include "proto/custom_codec.h"
#include "proto/exit_code.h"
#include "proto/try_again.h"
#include "server/server.h"
#include "trace/recorder.h"

namespace signpost::cli {
namespace {

// More than a chunk of one block, of 4096 elements, takes in one bit.
constexpr uint64_t kLeastMessageBytes = 1024;

struct Flags {
  ServerOptions server;
  std::string shard = "0/1";
  absl::Duration drain_grace = absl::Seconds(30);
  std::vector<std::string> codec_libraries;
  std::string trace;
};

absl::Status ParseShard(const std::string& text, AggregatorOptions& options) {
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  if (parts.size() == 2 && absl::SimpleAtoi(parts[0], &options.shard) &&
      absl::SimpleAtoi(parts[1], &options.shard_count) && options.shard < options.shard_count) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--shard is '", text,
      "', wanted I/N with I from 0 to N-1: the aggregators of a job are 0/2 and 1/2, say"));
}

// Sooner its processes may only be cut off.
absl::Status CheckForgetAfter(const ServerOptions& options) {
  const absl::Duration least = 6 * options.failure_timeout.duration();
  if (options.aggregator.forget_after >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--forget-after is less than ",
                                                 absl::FormatDuration(least),
                                                 ", six times --failure-timeout"));
}

// "127.0.0.1:0" to "127.0.0.1:43211"; "unix:path", which has no port, as it is.
std::string Address(const std::string& listen, uint16_t port) {
  if (port == 0) return listen;
  return absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
}

absl::Status LoadCodecs(const std::vector<std::string>& libraries) {
  for (const std::string& library : libraries) {
    if (absl::Status status = LoadCodecLibrary(library).status(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Serve(Flags& flags) {
  if (absl::Status status = ParseShard(flags.shard, flags.server.aggregator); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckForgetAfter(flags.server); !status.ok()) return status;
  if (absl::Status status = LoadCodecs(flags.codec_libraries); !status.ok()) return status;
  if (!flags.trace.empty()) {
    absl::Status status = trace::Start(flags.trace, absl::StrCat("aggregator ", flags.shard));
    if (!status.ok()) return status;
  }
  // Blocked before the server starts its threads, so that none of them is interrupted.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  sigaddset(&stop, SIGTERM);
  sigprocmask(SIG_BLOCK, &stop, nullptr);

  flags.server.on_warning = PrintWarning;
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(flags.server);
  // Of a server that does not start, a precondition is a flag; or a certificate, which passes.
  if (absl::IsFailedPrecondition(server.status()) && !IsTryAgain(server.status())) {
    return absl::InvalidArgumentError(server.status().message());
  }
  if (!server.ok()) return server.status();
  for (const std::string& warning : (*server)->warnings()) PrintWarning(warning);
  std::printf("listening on %s\n", Address(flags.server.listen, (*server)->port()).c_str());
  if (!flags.server.metrics_listen.empty()) {
    std::printf("metrics on %s\n",
                Address(flags.server.metrics_listen, (*server)->metrics_port()).c_str());
  }
  std::fflush(stdout);

  int signal = 0;
  sigwait(&stop, &signal);
  // A second signal ends the process at once.
  sigprocmask(SIG_UNBLOCK, &stop, nullptr);
  if (absl::Status status = (*server)->Drain(flags.drain_grace); !status.ok()) {
    // Whatever it was, a disk that is full perhaps: no flag is wrong.
    return absl::UnavailableError(absl::StrCat(
        "jobs' last states could not be written down, and are recovered as after a crash: ",
        status.message()));
  }
  return kExitOk;
}

void AddTokenFlags(CLI::App& app, TokenOptions& tokens) {
  app.add_option(
         "--token-jwks", tokens.jwks,
         "Public keys of a Kubernetes cluster (`kubectl get --raw /openid/v1/jwks`), which "
         "may change at any time: callers then need a service account's token besides their "
         "certificate (SIGNPOST_TOKEN_FILE); needs --tls-dir and the other three --token flags")
      ->type_name("FILE");
  app.add_option("--token-issuer", tokens.rules.issuer,
                 "Who must have issued a token: https://kubernetes.default.svc, say")
      ->type_name("ISS");
  app.add_option("--token-audience", tokens.rules.audience, "Whom a token must be for")
      ->type_name("AUD");
  app.add_option("--token-subject", tokens.rules.subjects,
                 "Service account that a token must be of; may be repeated")
      ->type_name("system:serviceaccount:NAMESPACE:NAME");
}

// A limit of zero would take nothing.
template <class Number>
CLI::Option* AddLimit(CLI::App& app, const std::string& name, Number& value,
                      const std::string& help) {
  return app.add_option(name, value, help)->transform(PositiveCount());
}

void AddLimits(CLI::App& app, ServerOptions& server) {
  AggregatorLimits& limits = server.aggregator.limits;
  AddLimit(app, "--max-jobs", limits.jobs, "Most jobs at a time")->capture_default_str();
  AddLimit(app, "--max-workers", limits.workers, "Most workers of a job")->capture_default_str();
  AddLimit(app, "--max-parameters", limits.parameters, "Most parameters, of all jobs")
      ->capture_default_str();
  AddLimit(app, "--max-frames", limits.frames,
           "Most frames of a step, of all jobs: chunks times workers")
      ->capture_default_str();
  AddLimit(app, "--max-message-bytes", limits.payload_bytes, "Largest payload of a frame")
      ->check(CLI::Validator(
          [](const std::string& text) {
            uint64_t bytes = 0;
            if (absl::SimpleAtoi(text, &bytes) && bytes >= kLeastMessageBytes) return std::string();
            return absl::StrCat("'", text, "' is too little for a frame, which takes ",
                                kLeastMessageBytes);
          },
          /*validator_desc=*/""))
      ->type_name("BYTES")
      ->capture_default_str();
  ConnectionLimits& connections = server.connections;
  AddLimit(app, "--max-connections", connections.connections, "Most connections at a time")
      ->capture_default_str();
  AddLimit(app, "--max-connections-per-peer", connections.connections_per_peer,
           "Most connections of one address")
      ->capture_default_str();
  AddDurationFlag(app, "--handshake-timeout", server.handshake_timeout,
                  "How long a new connection may take to show who it is [10s]");
  AddLimit(app, "--max-receive-bytes", server.receive_bytes,
           "Most bytes that are received and not handed on yet, over all connections [three "
           "tenths of the memory]")
      ->type_name("BYTES");
  AddLimit(app, "--max-held-bytes", limits.held_bytes,
           "Most bytes of payloads and errors, over all jobs: beyond that, frames wait with their "
           "workers, "
           "and a job that needs more does not begin "
           "[six tenths of the memory]")
      ->type_name("BYTES");
}

}  // namespace

Command AddAggregatorCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "aggregator", "Serve one shard of any number of jobs: average what their workers send");
  app.footer(
      "The first line that it prints is 'listening on HOST:PORT'; with --metrics-listen the second "
      "one\nis 'metrics on HOST:PORT'. SIGTERM ends it: with "
      "--state-dir\n"
      "at once, and jobs go on when it is started again; without, running jobs may end and new "
      "ones\n"
      "are refused.\n\n"
      "Example, a job's two shards on two hosts, after `signpost cert init certificates`:\n"
      "  a$ signpost aggregator --listen 10.0.0.1:4000 --tls-dir certificates/aggregator --shard "
      "0/2\n"
      "  b$ signpost aggregator --listen 10.0.0.2:4000 --tls-dir certificates/aggregator --shard "
      "1/2\n"
      "Workers then have SIGNPOST_AGGREGATORS=10.0.0.1:4000,10.0.0.2:4000 and\n"
      "SIGNPOST_TLS_DIR=certificates/worker");
  ServerOptions& server = flags->server;
  app.add_option("--listen", server.listen, "Where to listen; port 0: the kernel chooses one")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  app.add_option("--metrics-listen", server.metrics_listen,
                 "Serve metrics here, in plain text, to whoever asks: http://HOST:PORT/metrics "
                 "for Prometheus and http://HOST:PORT/ for a browser; it takes nothing there")
      ->type_name("HOST:PORT");
  app.add_option("--metrics-host", server.metrics_hosts,
                 "A name by which browsers may ask there, as that of a proxy; may be repeated. "
                 "Addresses, localhost and the name in --metrics-listen are answered anyway")
      ->type_name("NAME");
  app.add_option("--shard", flags->shard, "This process's shard and the number of shards")
      ->type_name("I/N")
      ->capture_default_str();
  app.add_option("--state-dir", server.state_dir,
                 "Keep here what running jobs need to survive a crash or restart of this process")
      ->type_name("DIR");
  app.add_flag(
      "--allow-error-reset", server.allow_error_reset,
      "Give up jobs whose state in --state-dir cannot be read, instead of refusing to start: they "
      "end, and can be started again, from a checkpoint if they have one");
  AddSecurityFlags(app, server.security);
  AddTokenFlags(app, server.tokens);
  AddFailureTimeoutFlag(app, server.failure_timeout,
                        "A worker without sign of life for this long is disconnected");
  AddDurationFlag(app, "--forget-after", server.aggregator.forget_after,
                  "How long a job is kept that no process is connected to and nothing comes from; "
                  "inf: for ever [24h]");
  AddLimits(app, server);
  app.add_option(
         "--codec-library", flags->codec_libraries,
         "A codec from outside, for jobs that ask for it: a shared object as signpost_codec.h "
         "has it; may be repeated. The variable has ':' in between")
      ->type_name("FILE")
      ->envname("SIGNPOST_CODEC_LIBRARIES");
  AddTraceFlag(app, flags->trace);
  AddDurationFlag(app, "--drain-grace", flags->drain_grace,
                  "How long running jobs may go on after SIGTERM [30s]");
  return {&app, [flags] { return Serve(*flags); }, /*answers=*/false};
}

}  // namespace signpost::cli
