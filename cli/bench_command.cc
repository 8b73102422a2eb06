#include "cli/bench_command.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "bench/exchange.h"
#include "bench/figures.h"
#include "bench/hosts.h"
#include "bench/kernels.h"
#include "bench/predict.h"
#include "bench/rank.h"
#include "bench/scale.h"
#include "cli/flag.h"
#include "cli/table.h"
#include "client/session_options.h"
#include "deploy/requirements.h"
#include "proto/exit_code.h"
#include "proto/layout.h"
#include "worker/worker_options.h"

namespace signpost::cli {
namespace {

namespace fs = std::filesystem;

// Those that client/python/benchmarks/peers.py has, by what they are compared with.
struct Peers {
  std::vector<std::string> names;
  std::string which;  // for messages
  std::string help;
};

Peers PeersOfExchange() {
  return {.names = {"gloo-fp32", "gloo-fp16", "gloo-bf16", "powersgd-1", "powersgd-2", "mpi"},
          .which = "which exchange and take no steps",
          .help = "All-reduces of others to measure in turns with ours, separated by commas"};
}

Peers PeersOfStep() {
  return {.names = {"gloo-adamw"},
          .which = "which take whole steps",
          .help = "Steps of others to measure in turns with ours, separated by commas"};
}

using bench::ExchangeOptions;
using bench::Figures;
using bench::RankOptions;

struct Flags {
  ExchangeOptions exchange;
  RankOptions rank;
  std::vector<std::string> modes;  // that "exchange" was asked for
  std::string device = "cpu";      // of `kernels`
  std::optional<size_t> elements;  // likewise
  int rounds = bench::KernelsOptions().rounds;
  bench::Cluster cluster = {.link_bits_per_s = 0, .workers = 4, .shards = 0};
  std::string kernels;  // what `kernels --json` wrote, for the cluster's processors
  bench::Training training = {.parameters = 25'000'000, .compute_s = 0};
  std::string link;
  std::string json;
};

// The table to standard output, and the file that was asked for.
absl::StatusOr<int> Show(const absl::StatusOr<Figures>& figures, const std::string& json) {
  if (!figures.ok()) return figures.status();
  std::fputs(Align(bench::TableOf(*figures)).c_str(), stdout);
  if (json.empty()) return kExitOk;
  std::ofstream file(json);
  file << bench::FormatJson(*figures) << std::flush;
  if (file) return kExitOk;
  return absl::InvalidArgumentError(absl::StrCat("--json: cannot write ", json));
}

// Of the environment, for what it starts: flags say all, and a job's options would change what is
// measured.
void ForgetSettings() {
  std::vector<std::string> names;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string name(*variable, strcspn(*variable, "="));
    if (absl::StartsWith(name, "SIGNPOST_") && name != "SIGNPOST_LOG_FORMAT") {
      names.push_back(name);
    }
  }
  for (const std::string& name : names) unsetenv(name.c_str());
}

// Looked up in PATH, as where it is started. Empty: it is there.
std::string WhyNotRunnable(const std::string& program) {
  std::vector<std::string> files = {program};
  const char* const path = std::getenv("PATH");
  if (!absl::StrContains(program, '/') && path != nullptr) {
    files.clear();
    for (absl::string_view directory : absl::StrSplit(path, ':')) {
      files.push_back(fs::path(std::string(directory)) / program);
    }
  }
  int reason = ENOENT;
  for (const std::string& file : files) {
    std::error_code ignored;
    if (access(file.c_str(), X_OK) != 0) {
      if (errno != ENOENT) reason = errno;
    } else if (!fs::is_regular_file(file, ignored)) {
      reason = EACCES;
    } else {
      return "";
    }
  }
  return std::strerror(reason);
}

absl::StatusOr<int> MeasureExchange(const Flags& flags, const std::vector<std::string>& modes) {
  if (flags.rank.chunk_elements % WorkerOptions().block_elements != 0 ||
      flags.rank.chunk_elements > kMaxChunkElements) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--chunk-elements is %d; it must be a multiple of %d, and at most %d",
        flags.rank.chunk_elements, WorkerOptions().block_elements, kMaxChunkElements));
  }
  ForgetSettings();
  ExchangeOptions options = flags.exchange;
  std::error_code ignored;
  options.program = fs::read_symlink("/proc/self/exe", ignored);
  if (options.shards == 0) options.shards = options.rate.empty() ? 2 : options.workers;
  if (!options.peers.empty()) {
    if (const std::string why = WhyNotRunnable(options.python); !why.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--python: cannot run '", options.python, "': ", why));
    }
    const fs::path package = fs::path(options.program).parent_path();
    options.peers_script = package / "benchmarks" / "peers.py";
    if (!fs::exists(options.peers_script, ignored)) {
      return absl::NotFoundError(
          absl::StrCat("--peers: there is no Python package around '", options.program,
                       "'. In a checkout './signpost bench ... --peers' builds one; elsewhere "
                       "install the wheel, which has a signpost of its own"));
    }
  }
  for (const std::string& mode : modes) {
    if (mode == "frames" && !bench::CanPackFrames(flags.rank.codec)) {
      return absl::InvalidArgumentError("--what frames: they are packed as onebit or fp32 only");
    }
    options.ranks.push_back(flags.rank);
    options.ranks.back().mode = mode;
  }
  return Show(bench::MeasureExchange(options), flags.json);
}

// Of "exchange": those that were asked for, or all that the codec has.
std::vector<std::string> ModesOf(const Flags& flags) {
  if (!flags.modes.empty()) return flags.modes;
  if (!bench::CanPackFrames(flags.rank.codec)) return {"mean"};
  return {"frames", "mean"};
}

absl::StatusOr<bench::Cluster> ClusterOf(const Flags& flags) {
  const absl::StatusOr<double> rate = bench::ParseRate(flags.link);
  if (!rate.ok()) return rate.status();
  bench::Cluster cluster = flags.cluster;
  cluster.link_bits_per_s = *rate;
  if (cluster.shards == 0) cluster.shards = cluster.workers;
  absl::Status status = deploy::RequirementsOf({.workers = cluster.workers,
                                                .aggregators = cluster.shards,
                                                .parameters = flags.training.parameters})
                            .status();
  if (!status.ok()) return status;  // no job can be so large
  if (cluster.worker_threads > cluster.cores_per_host) {
    return absl::InvalidArgumentError(absl::StrFormat("--threads is %d, and a host has --cores %d",
                                                      cluster.worker_threads,
                                                      cluster.cores_per_host));
  }
  return cluster;
}

absl::StatusOr<int> MeasureKernels(const Flags& flags) {
  if (flags.device == "cuda") {
    bench::DeviceKernelsOptions options = {.rounds = flags.rounds};
    if (flags.elements) options.elements = *flags.elements;
    return Show(bench::MeasureDeviceKernels(options), flags.json);
  }
  const uint64_t block = WorkerOptions().block_elements;
  if (flags.elements && *flags.elements < block) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--elements is %d; a block has %d, and kernels are compared with memory that "
        "has whole blocks",
        *flags.elements, block));
  }
  bench::KernelsOptions options = {.rounds = flags.rounds};
  if (flags.elements) options.elements = *flags.elements;
  if (absl::Status status = bench::CheckMemory(options); !status.ok()) return status;
  return Show(bench::MeasureKernels(options), flags.json);
}

absl::StatusOr<bench::Costs> CostsOf(const Flags& flags) {
  if (flags.kernels.empty()) return bench::Costs();
  std::ifstream file(flags.kernels);
  std::stringstream text;
  text << file.rdbuf();
  absl::StatusOr<Figures> figures = bench::ParseJson(text.str());
  absl::StatusOr<bench::Costs> costs =
      figures.ok() ? bench::CostsOfKernels(*figures) : figures.status();
  if (costs.ok()) return costs;
  return absl::InvalidArgumentError(absl::StrCat(
      "--kernels: '", flags.kernels,
      "' is not what 'signpost bench kernels --json' writes: ", costs.status().message()));
}

// What the figures that follow are of.
void Introduce(const bench::Cluster& cluster, const Flags& flags) {
  std::puts(
      absl::StrCat(flags.training.parameters, " parameters; ", bench::Describe(cluster)).c_str());
}

absl::StatusOr<int> PredictStep(const Flags& flags) {
  const absl::StatusOr<bench::Cluster> cluster = ClusterOf(flags);
  if (!cluster.ok()) return cluster.status();
  const absl::StatusOr<bench::Costs> costs = CostsOf(flags);
  if (!costs.ok()) return costs.status();
  Introduce(*cluster, flags);
  const bench::Prediction prediction = bench::Predict(*cluster, flags.training, *costs);
  const absl::StatusOr<int> code = Show(bench::FiguresOf(prediction), flags.json);
  std::puts(prediction.verdict.c_str());
  return code;
}

// One exchange of each codec, with what kept it so long.
absl::StatusOr<int> PlayExchanges(const Flags& flags) {
  const absl::StatusOr<bench::Cluster> cluster = ClusterOf(flags);
  if (!cluster.ok()) return cluster.status();
  const absl::StatusOr<bench::Costs> costs = CostsOf(flags);
  if (!costs.ok()) return costs.status();
  Introduce(*cluster, flags);
  Figures figures;
  const auto add = [&figures](const std::string& name, double seconds) -> bench::Figure& {
    return *figures.add_figures() = bench::MakeFigure(name, "s", {seconds});
  };
  for (const auto& [name, codec] :
       {std::pair{"fp32", costs->fp32}, {"bf16", costs->bf16}, {"one-bit", costs->one_bit}}) {
    const bench::PlayedExchange played =
        bench::PlayExchange(*cluster, flags.training.parameters, codec, costs->transport);
    bench::Figure& exchange = add(absl::StrCat("exchange, ", name), played.exchange_s);
    if (played.link_s > 0) bench::SetBound(played.link_s, bench::Better::kLess, exchange);
    add(absl::StrCat(name, ": the busiest link"), played.link_s);
    add(absl::StrCat(name, ": a worker's kernels"), played.worker_s);
    add(absl::StrCat(name, ": an aggregator's sums"), played.aggregator_s);
    add(absl::StrCat(name, ": its transport"), played.transport_s);
    add(absl::StrCat(name, ": all of a host's cores"), played.cores_s);
  }
  return Show(figures, flags.json);
}

absl::StatusOr<int> BeRank(const RankOptions& options) {
  const absl::StatusOr<SessionOptions> session = SessionOptions::FromEnvironment();
  if (!session.ok()) return session.status();
  absl::StatusOr<std::unique_ptr<bench::Rank>> rank = bench::JoinAsRank(*session, options);
  if (!rank.ok()) return rank.status();
  if (absl::Status status = bench::ServeLines(**rank); !status.ok()) return status;
  return kExitOk;
}

void AddJsonFlag(CLI::App& app, std::string& json) {
  app.add_option("--json", json, "Write the figures to this file too")
      ->type_name("FILE")
      ->check(WritableFile());
}

void AddKernelsFlags(CLI::App& app, Flags& flags) {
  app.add_option("--device", flags.device, "Where the kernels run")
      ->type_name("cpu|cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""));
  app.add_option(
         "--elements", flags.elements,
         "Elements of each array; the default fits in no cache [16777216; with cuda 100000000]")
      ->type_name("N")
      ->transform(PositiveCount());
  app.add_option("--rounds", flags.rounds, "Rounds that are measured")
      ->type_name("N")
      ->capture_default_str()
      ->transform(PositiveCount());
  AddJsonFlag(app, flags.json);
}

void AddClusterFlags(CLI::App& app, Flags& flags) {
  app.add_option("--link", flags.link, "What each host's link carries in each direction, as 1gbit")
      ->type_name("RATE")
      ->required();
  app.add_option("--parameters", flags.training.parameters, "How many parameters the model has")
      ->type_name("N")
      ->capture_default_str()
      ->transform(PositiveCount());
  app.add_option("--workers", flags.cluster.workers, "Workers, each on a host")
      ->type_name("N")
      ->capture_default_str()
      ->transform(PositiveCount());
  app.add_option("--aggregators", flags.cluster.shards, "Aggregators [as many as workers]")
      ->type_name("N");
  app.add_flag("--colocated", flags.cluster.colocated,
               "Aggregators run on the workers' hosts [on hosts of their own]");
  app.add_option("--cores", flags.cluster.cores_per_host, "Processor cores of each host")
      ->type_name("N")
      ->capture_default_str()
      ->transform(PositiveCount());
  app.add_option("--threads", flags.cluster.worker_threads,
                 "Threads of each worker that compress and apply [a core each, at most 8]")
      ->type_name("N");
  app.add_option("--kernels", flags.kernels,
                 "What 'signpost bench kernels --json' wrote on such a host [an AMD EPYC's]")
      ->type_name("FILE")
      ->check(CLI::ExistingFile.description(""));
  AddJsonFlag(app, flags.json);
}

void AddPredictFlags(CLI::App& app, Flags& flags) {
  AddClusterFlags(app, flags);
  app.add_option_function<double>(
         "--compute-ms",
         [&flags](double milliseconds) { flags.training.compute_s = milliseconds / 1000; },
         "Forward and backward pass of a step, without any exchange")
      ->type_name("MS")
      ->required()
      ->check(PositiveNumber());
  app.add_option("--warm-up", flags.training.warm_up_share, "Share of all steps that are dense")
      ->type_name("SHARE")
      ->capture_default_str()
      ->check(Share());
  AddChoice(app, "--warm-up-codec", flags.training.warm_up_codec, bench::Codecs(),
            "How gradients travel in the warm-up [fp32]");
}

void AddOptimizerFlag(CLI::App& app, RankOptions& rank) {
  AddChoice(app, "--optimizer", rank.optimizer, bench::StepOptimizers(),
            "Whose steps are measured; of ZeroOneAdam, in any codec, the mean of those from one "
            "synchronisation to the next, 16 of them [OneBitAdam]");
}

void AddRankFlags(CLI::App& app, RankOptions& rank) {
  app.add_option("--parameters", rank.parameters, "How many parameters the model has")
      ->type_name("N")
      ->capture_default_str()
      ->transform(PositiveCount());
  AddChoice(app, "--codec", rank.codec, bench::Codecs(), "How numbers travel [onebit]");
  app.add_option("--chunk-elements", rank.chunk_elements,
                 "Elements that travel in one frame [by the number of parameters]")
      ->type_name("N");
}

CLI::Validator IsOneOf(const Peers& peers) {
  const auto check = [known = CLI::IsMember(peers.names), which = peers.which](std::string& peer) {
    const std::string error = known(peer);
    return error.empty() ? error : absl::StrCat(error, ", ", which);
  };
  return CLI::Validator(check, "");
}

void AddMeasuringFlags(CLI::App& app, const Peers& peers, Flags& flags) {
  AddRankFlags(app, flags.rank);
  ExchangeOptions& exchange = flags.exchange;
  app.add_option("--workers", exchange.workers, "Workers, each a process")
      ->type_name("N")
      ->capture_default_str()
      ->transform(PositiveCount());
  exchange.shards = 0;
  app.add_option("--aggregators", exchange.shards,
                 "Aggregators, each a process [2; with --netns as many as workers]")
      ->type_name("N");
  app.add_option("--threads", exchange.threads,
                 "Threads of each worker that compress and apply, and of each peer's rank [its "
                 "share of the processors]")
      ->type_name("N");
  app.add_option("--connections", exchange.connections,
                 "TCP connections of each worker to each aggregator")
      ->check(CLI::Range(1u, SessionOptions::kMostConnections).description(""))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--netns", exchange.rate,
                 "Make each process a host of its own behind a link of this rate (network "
                 "namespaces; as root)")
      ->type_name("RATE");
  app.add_flag("--tls", exchange.tls,
               "Measure each of ours over mTLS too, and compare with plain text");
  app.add_option("--peers", exchange.peers, peers.help)
      ->delimiter(',')
      ->check(IsOneOf(peers))
      ->type_name(absl::StrCat(absl::StrJoin(peers.names, "|"), ",..."));
  app.add_option("--python", exchange.python,
                 "With --peers: the Python interpreter, which must have PyTorch")
      ->envname("SIGNPOST_PYTHON")
      ->type_name("FILE")
      ->capture_default_str();
  app.add_option("--turns", exchange.turns, "Turns that are measured, after one that is not")
      ->type_name("N")
      ->capture_default_str()
      ->transform(PositiveCount());
  app.add_option("--exchanges", exchange.exchanges, "Exchanges in a turn")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000).description(""));
  AddJsonFlag(app, flags.json);
}

}  // namespace

Command AddBenchCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "bench", "Measure how fast it is here, against what the links and the memory allow");
  app.require_subcommand(1);
  app.footer(
      "The bound of an exchange or a step is the time that the busiest link of --netns needs for\n"
      "its bytes. Without --netns it is the time that plain TCP takes to send the same bytes over\n"
      "loopback, without adding anything up. A step has a second one, as all hosts are one "
      "machine\n"
      "here: the time in which its processors change as many bytes in memory as all kernels of "
      "the\n"
      "step must read and write. MEDIAN is that of the turns' medians; LEAST and MOST are of all\n"
      "exchanges. Ours is TIMES FASTER THAN the first of --peers, and each of them than what of "
      "ours\n"
      "does the same (below 1: slower), by the median of the turns' ratios.\n\n"
      "Examples:\n"
      "  signpost bench kernels\n"
      "  signpost bench exchange\n"
      "  signpost bench exchange --netns 1gbit --parameters 100000000\n"
      "  signpost bench exchange --peers gloo-fp32,mpi\n"
      "  signpost bench step --optimizer ZeroOneAdam --json figures.json\n"
      "  signpost bench predict --link 1gbit --parameters 340000000 --workers 8 --compute-ms 900\n"
      "  signpost bench scale --link 10gbit --parameters 1000000000 --workers 256");
  CLI::App& kernels = *app.add_subcommand(
      "kernels",
      "Measure kernels: on one core, against changing as many bytes in place; on a GPU, against "
      "copying them");
  AddKernelsFlags(kernels, *flags);
  CLI::App& exchange = *app.add_subcommand(
      "exchange",
      "Measure exchanges: of frames that were packed before, and of gradients to their mean");
  AddMeasuringFlags(exchange, PeersOfExchange(), *flags);
  exchange
      .add_option(
          "--what", flags->modes,
          "What to measure: frames that were packed before, or gradients to their mean [both]")
      ->delimiter(',')
      ->check(CLI::IsMember({"frames", "mean"}).description(""))
      ->type_name("frames|mean");
  CLI::App& step = *app.add_subcommand(
      "step",
      "Measure whole steps of an optimizer: in its one-bit stage, or dense with another codec");
  AddMeasuringFlags(step, PeersOfStep(), *flags);
  AddOptimizerFlag(step, flags->rank);
  CLI::App& predict = *app.add_subcommand(
      "predict", "Predict what a step takes with fp32, bf16 and one bit, and whether one bit pays");
  AddPredictFlags(predict, *flags);
  CLI::App& scale = *app.add_subcommand(
      "scale", "Predict what an exchange takes, frame by frame, with up to a thousand workers");
  AddClusterFlags(scale, *flags);
  CLI::App& rank = *app.add_subcommand("rank", "One rank of those that are measured");
  rank.group("");  // hidden
  rank.add_option("--mode", flags->rank.mode, "What an exchange is")->type_name("");
  AddRankFlags(rank, flags->rank);
  AddOptimizerFlag(rank, flags->rank);
  return {&app, [flags, &kernels, &exchange, &step, &predict, &scale]() -> absl::StatusOr<int> {
            if (predict.parsed()) return PredictStep(*flags);
            if (scale.parsed()) return PlayExchanges(*flags);
            if (kernels.parsed()) return MeasureKernels(*flags);
            if (exchange.parsed()) return MeasureExchange(*flags, ModesOf(*flags));
            if (step.parsed()) return MeasureExchange(*flags, {"step"});
            return BeRank(flags->rank);
          }};
}

}  // namespace signpost::cli
