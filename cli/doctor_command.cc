#include "cli/doctor_command.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "bench/costs.h"
#include "bench/hosts.h"
#include "bench/rank.h"
#include "cli/flag.h"
#include "deploy/requirements.h"
#include "doctor/comparison.h"
#include "doctor/host.h"
#include "doctor/hosts.h"
#include "doctor/job.h"
#include "doctor/listener.h"
#include "doctor/prediction.h"
#include "doctor/report.h"
#include "proto/exit_code.h"
#include "proto/processors.h"

namespace signpost::cli {
namespace {

struct Flags {
  doctor::Job job;
  TransportSecurity security;
  std::string aggregators, shard, device = "cpu";
  std::string listen, hosts;
  absl::Duration patience = absl::Minutes(10);
  bool predict = false;
  std::string link;
  double compute_ms = 0;
  bool json = false;
};

absl::Status ParseShard(const std::string& text, doctor::Job& job) {
  if (text.empty()) return absl::OkStatus();
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  ShardId shard;
  if (parts.size() == 2 && absl::SimpleAtoi(parts[0], &shard.shard) &&
      absl::SimpleAtoi(parts[1], &shard.shard_count) && shard.shard < shard.shard_count) {
    job.shard = shard;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--shard is '", text, "', wanted I/N with I from 0 to N-1"));
}

absl::Status ParseDevice(absl::string_view text, doctor::Job& job) {
  if (text == "cpu") return absl::OkStatus();
  int gpu = 0;
  if (absl::ConsumePrefix(&text, "cuda") &&
      (text.empty() ||
       (absl::ConsumePrefix(&text, ":") && absl::SimpleAtoi(text, &gpu) && gpu >= 0))) {
    job.gpu = gpu;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("--device is cpu, cuda or cuda:N");
}

// What the flags leave in words.
absl::Status Complete(Flags& flags) {
  absl::Status status = ParseShard(flags.shard, flags.job);
  status.Update(ParseDevice(flags.device, flags.job));
  if (!flags.aggregators.empty()) {
    absl::StatusOr<std::vector<std::string>> addresses = ParseAddresses(flags.aggregators);
    status.Update(addresses.status());
    if (addresses.ok()) flags.job.aggregators = *std::move(addresses);
  }
  if (flags.predict && flags.job.parameters == 0) {
    status.Update(absl::InvalidArgumentError("--predict needs --parameters, the model's size"));
  }
  if (flags.predict && flags.link.empty() && flags.hosts.empty()) {
    status.Update(absl::InvalidArgumentError(
        "--predict needs --link RATE, as 1gbit, or --hosts, between which it is measured"));
  }
  return status;
}

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = "";
  gethostname(name, HOST_NAME_MAX);
  return name;
}

// `cluster` has what was found: the link, 0 if it was not measured, as many workers as hosts that
// were asked, and the cores, 0 if they are unknown.
absl::Status AddPrediction(const Flags& flags, bench::Cluster cluster, DoctorReport& report) {
  if (!flags.link.empty()) {
    const absl::StatusOr<double> rate = bench::ParseRate(flags.link);
    if (!rate.ok()) return rate.status();
    cluster.link_bits_per_s = *rate;
  }
  doctor::Reporter to(flags.link.empty() ? "all hosts" : flags.link, report);
  if (cluster.link_bits_per_s == 0) {
    to.Unchecked("prediction", "no bandwidth was measured");
    return absl::OkStatus();
  }
  if (cluster.cores_per_host == 0) {
    to.Unchecked("prediction", "no host tells how many cores it has");
    return absl::OkStatus();
  }
  cluster.workers = flags.job.workers > 0 ? flags.job.workers : std::max(cluster.workers, 2u);
  cluster.shards = flags.job.aggregators.empty() ? cluster.workers : flags.job.aggregators.size();
  cluster.colocated = flags.job.aggregators.empty();
  const absl::Status status = deploy::RequirementsOf({.workers = cluster.workers,
                                                      .aggregators = cluster.shards,
                                                      .parameters = flags.job.parameters})
                                  .status();
  if (!status.ok()) {
    to.Unchecked("prediction", std::string(status.message()));
    return absl::OkStatus();
  }
  doctor::AddPrediction(cluster,
                        {.parameters = flags.job.parameters,
                         .compute_s = flags.compute_ms / 1000,
                         .warm_up_codec = flags.job.warm_up_codec},
                        to);
  return absl::OkStatus();
}

int Show(const DoctorReport& report, bool json) {
  const std::string text = json ? doctor::FormatJson(report) : doctor::FormatText(report);
  std::fputs(text.c_str(), stdout);
  return doctor::HasFault(report) ? kExitBadConfiguration : kExitOk;
}

absl::StatusOr<int> AskHosts(const Flags& flags) {
  const absl::StatusOr<std::vector<std::string>> addresses = ParseAddresses(flags.hosts);
  if (!addresses.ok()) return addresses.status();
  const absl::StatusOr<doctor::Hosts> hosts = doctor::AskHosts(*addresses, flags.security);
  if (!hosts.ok()) return absl::InvalidArgumentError(hosts.status().message());
  DoctorReport report = doctor::CheckHosts(*hosts);
  if (flags.predict) {
    const bench::Cluster found = {.link_bits_per_s = doctor::SlowestRate(*hosts),
                                  .workers = static_cast<uint32_t>(addresses->size()),
                                  .cores_per_host = doctor::FewestProcessors(*hosts)};
    if (absl::Status status = AddPrediction(flags, found, report); !status.ok()) return status;
  }
  return Show(report, flags.json);
}

// Until a signal comes, or patience ends.
void AwaitStop(const sigset_t& stop, absl::Duration patience) {
  const timespec time = absl::ToTimespec(patience);
  sigtimedwait(&stop, nullptr, &time);
}

// Where others reach it: the port may be the kernel's choice.
std::string Reached(const std::string& listen, uint16_t port) {
  return absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
}

absl::StatusOr<int> Listen(const Flags& flags) {
  // Blocked before there are threads, so that none of them is interrupted.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  sigaddset(&stop, SIGTERM);
  sigprocmask(SIG_BLOCK, &stop, nullptr);
  auto listener = doctor::Listener::Start(
      {.listen = flags.listen,
       .security = flags.security,
       .examine =
           [&flags] {
             return doctor::ExamineHost(flags.job, flags.security, flags.listen, flags.listen);
           },
       .on_warning = PrintWarning});
  if (absl::IsFailedPrecondition(listener.status())) {
    return absl::InvalidArgumentError(listener.status().message());
  }
  if (!listener.ok()) return listener.status();
  std::FILE* const to = flags.hosts.empty() ? stdout : stderr;
  std::fprintf(to, "listening on %s\n", Reached(flags.listen, (*listener)->port()).c_str());
  std::fflush(to);
  if (!flags.hosts.empty()) return AskHosts(flags);
  AwaitStop(stop, flags.patience);
  return kExitOk;
}

absl::StatusOr<int> ExamineHere(const Flags& flags) {
  DoctorReport report = doctor::ExamineHost(flags.job, flags.security, HostName());
  if (flags.predict) {
    const bench::Cluster found = {.link_bits_per_s = 0, .cores_per_host = ProcessorCount()};
    if (absl::Status status = AddPrediction(flags, found, report); !status.ok()) return status;
  }
  return Show(report, flags.json);
}

absl::StatusOr<int> Run(Flags& flags) {
  signal(SIGPIPE, SIG_IGN);  // whoever is tried may close the connection
  if (absl::Status status = Complete(flags); !status.ok()) return status;
  if (!flags.listen.empty()) return Listen(flags);
  return flags.hosts.empty() ? ExamineHere(flags) : AskHosts(flags);
}

void AddJobFlags(CLI::App& app, Flags& flags) {
  doctor::Job& job = flags.job;
  app.add_option(
         "--aggregators", flags.aggregators,
         "The job's aggregators, in the order of their shards: can each be reached, and is it "
         "the one that was meant?")
      ->type_name("HOST:PORT,...")
      ->envname("SIGNPOST_AGGREGATORS");
  app.add_option("--workers", job.workers, "Workers of the job")
      ->type_name("N")
      ->transform(PositiveCount());
  app.add_option("--parameters", job.parameters,
                 "Parameters of the model: is there enough memory for them?")
      ->type_name("N")
      ->transform(PositiveCount());
  AddChoice(app, "--codec", job.warm_up_codec, bench::Codecs(),
            "How gradients travel: warm_up_codec, or variance_codec if that has more bits [fp32]");
  app.add_option("--local-workers", job.local_workers, "Workers on this host")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber.description(""));
  app.add_option("--shard", flags.shard, "Shard of the aggregator on this host, if there is one")
      ->type_name("I/N");
  app.add_option("--state-dir", job.state_dir,
                 "State directory of that aggregator: will its disk do?")
      ->type_name("DIR");
  app.add_option("--device", flags.device, "What workers of this host train on")
      ->type_name("cpu|cuda[:N]")
      ->capture_default_str();
  app.add_option("--python", job.python, "The job's Python interpreter: does it have PyTorch?")
      ->type_name("FILE");
}

}  // namespace

Command AddDoctorCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "doctor", "Find what would stop a job or slow it down, before it runs, and how to mend it");
  app.footer(
      "By itself it looks at this host; the more it knows of the job, the more it looks at. "
      "Between\n"
      "hosts: start it with --listen on each, and once with --hosts on one of them. Exit code 0:\n"
      "nothing is in the way, at most warnings; 64: something is.\n\n"
      "Example:\n"
      "  signpost doctor --aggregators 10.0.0.1:4000,10.0.0.2:4000 --tls-dir certificates/worker\n"
      "  a$ signpost doctor --listen 10.0.0.1:7000 --tls-dir certificates/worker\n"
      "  b$ signpost doctor --listen 10.0.0.2:7000 --tls-dir certificates/worker\n"
      "  a$ signpost doctor --hosts 10.0.0.1:7000,10.0.0.2:7000 --tls-dir certificates/worker \\\n"
      "       --predict --parameters 340000000 --compute-ms 900");
  AddJobFlags(app, *flags);
  AddSecurityFlags(app, flags->security);
  app.add_option("--listen", flags->listen,
                 "Be one of the hosts that --hosts names, until SIGTERM or Ctrl-C")
      ->type_name("HOST:PORT");
  AddDurationFlag(app, "--for", flags->patience, "How long --listen lasts at most [10m]");
  app.add_option("--hosts", flags->hosts,
                 "Ask these hosts, where doctor runs with --listen, and have each try the others")
      ->type_name("HOST:PORT,...");
  app.add_flag("--predict", flags->predict,
               "Tell what an exchange should take with fp32, bf16 and one bit");
  app.add_option("--link", flags->link, "With --predict: what each host's link carries [measured]")
      ->type_name("RATE");
  app.add_option("--compute-ms", flags->compute_ms,
                 "With --predict: forward and backward pass of a step")
      ->type_name("MS")
      ->check(PositiveNumber());
  app.add_flag("--json", flags->json, "Write JSON, for programs: every line with its fields");
  return {&app, [flags] { return Run(*flags); }};
}

}  // namespace signpost::cli
