#include "deploy/render.h"

#include <algorithm>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "deploy/monitoring/alerts.h"
#include "deploy/templates.h"
#include "server/aggregator.h"
#include "worker/worker_options.h"

namespace signpost::deploy {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A StatefulSet's name and eleven characters of a revision are a label's value, of at most 63.
constexpr size_t kMaxJobBytes = 52 - absl::string_view("-aggregator").size();
constexpr size_t kMaxLabelBytes = 63;

// How long an aggregator may take to write its state: at a disk's worst.
constexpr uint64_t kStateBytesPerSecond = 20 * kMiB;
constexpr int kDrainGraceSeconds = 30;
constexpr uint32_t kMostGpus = 1024;

// What an overlay has of its own.
struct Overlay {
  const char* name;
  bool tls;
  bool spread;        // over nodes
  bool certificates;  // cert-manager's
  bool one_node;      // all pods are on
  bool metrics;       // on a port of their own
};
constexpr Overlay kProduction = {.name = "production",
                                 .tls = true,
                                 .spread = true,
                                 .certificates = true,
                                 .one_node = false,
                                 .metrics = false};
constexpr Overlay kOverlays[] = {
    {.name = "dev",
     .tls = false,
     .spread = false,
     .certificates = false,
     .one_node = false,
     .metrics = false},
    {.name = "local",
     .tls = true,
     .spread = false,
     .certificates = false,
     .one_node = true,
     .metrics = false},
    {.name = "monitoring",
     .tls = true,
     .spread = true,
     .certificates = true,
     .one_node = false,
     .metrics = true},
    kProduction,
};

// By word, with its braces. What stands for one is not looked at again.
using Words = std::map<std::string, std::string>;

std::string Fill(absl::string_view text, const Words& words) {
  return absl::StrReplaceAll(text, words);
}

// Each line of it that is not empty.
std::string Indent(absl::string_view text, size_t spaces) {
  std::string indented;
  for (const absl::string_view line : absl::StrSplit(absl::StripSuffix(text, "\n"), '\n')) {
    absl::StrAppend(&indented, line.empty() ? "" : std::string(spaces, ' '), line, "\n");
  }
  return indented;
}

// Of Prometheus' own file, without the comment above them.
std::string AlertGroups() {
  const absl::string_view file = kAlerts;
  return Indent(file.substr(file.find("groups:")), 2);
}

bool IsLabel(absl::string_view name) {
  const auto is_inner = [](char c) {
    return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-';
  };
  return !name.empty() && name.size() <= kMaxLabelBytes && name.front() != '-' &&
         name.back() != '-' && std::all_of(name.begin(), name.end(), is_inner);
}

absl::Status CheckLabel(absl::string_view flag, absl::string_view name, size_t most_bytes) {
  if (IsLabel(name) && name.size() <= most_bytes && !absl::ascii_isdigit(name.front())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s is '%s', wanted a name as Kubernetes has them: at most %d of a-z, 0-9 and '-', beginning "
      "with a letter and not ending with '-'",
      flag, absl::CHexEscape(name), most_bytes));
}

// Lower-case labels with dots in between.
absl::Status CheckDomain(absl::string_view flag, absl::string_view name) {
  for (const absl::string_view label : absl::StrSplit(name, '.')) {
    if (!IsLabel(label)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s is '%s', wanted a name of a-z, 0-9, '-' and '.'", flag, absl::CHexEscape(name)));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckImage(absl::string_view flag, absl::string_view image) {
  const auto may_be_in_image = [](char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("._-/:@", c);
  };
  if (!image.empty() && image.size() <= 255 && absl::ascii_isalnum(image.front()) &&
      absl::ascii_isalnum(image.back()) &&
      std::all_of(image.begin(), image.end(), may_be_in_image)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s', wanted an image such as registry.example/signpost:1.2", flag,
                      absl::CHexEscape(image)));
}

// In what `units` are, by name; none for what is no such quantity.
absl::Status CheckQuantity(absl::string_view flag, absl::string_view quantity,
                           const std::vector<absl::string_view>& units, uint64_t& number,
                           absl::string_view& unit) {
  const size_t digits =
      std::find_if_not(quantity.begin(), quantity.end(), absl::ascii_isdigit) - quantity.begin();
  unit = quantity.substr(digits);
  if (digits <= 9 && absl::SimpleAtoi(quantity.substr(0, digits), &number) && number > 0 &&
      std::find(units.begin(), units.end(), unit) != units.end()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s', wanted a whole number with a unit of Kubernetes: %s", flag,
                      absl::CHexEscape(quantity), absl::StrJoin(units, ", ")));
}

absl::StatusOr<uint64_t> ParseBytes(absl::string_view flag, absl::string_view quantity) {
  uint64_t number = 0;
  absl::string_view unit;
  if (absl::Status status = CheckQuantity(flag, quantity, {"Mi", "Gi", "Ti"}, number, unit);
      !status.ok()) {
    return status;
  }
  const int shift = unit == "Mi" ? 20 : unit == "Gi" ? 30 : 40;
  constexpr uint64_t kMost = uint64_t{1} << 50;  // what has more is no machine
  if (number <= kMost >> shift) return number << shift;
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " is ", quantity, "; at most 1024Ti can be asked for"));
}

uint64_t WholeMebibytes(uint64_t bytes) { return (bytes + kMiB - 1) / kMiB; }

std::string Mebibytes(uint64_t bytes) { return absl::StrCat(WholeMebibytes(bytes), "Mi"); }

// JSON's strings are YAML's.
std::string Quote(absl::string_view text) {
  std::string quoted = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    if (c < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&quoted, "\\u%04x", c);
    } else {
      quoted.push_back(static_cast<char>(c));
    }
  }
  quoted.push_back('"');
  return quoted;
}

// Kubernetes puts variables where it finds "$(NAME)".
std::string QuoteArgument(absl::string_view text) {
  return Quote(absl::StrReplaceAll(text, {{"$(", "$$("}}));
}

std::string WorkerCommand(const RenderOptions& options) {
  if (options.worker_command.empty()) {
    return "          args:\n"
           "            - demo-worker\n"
           "            - --text=/usr/share/common-licenses/GPL-3\n"
           "            - --checkpoint-dir=/checkpoints\n"
           "            - --checkpoint-every=100\n"
           "            - --resume-if-any\n";
  }
  std::string lines = "          command:\n";
  for (const std::string& argument : options.worker_command) {
    absl::StrAppend(&lines, "            - ", QuoteArgument(argument), "\n");
  }
  return lines;
}

std::string LateWorkersEnvironment(const RenderOptions& options) {
  if (options.min_workers == 0) return "";
  return absl::StrFormat(
      "            - name: SIGNPOST_MIN_WORKERS\n"
      "              value: \"%d\"\n"
      "            - name: SIGNPOST_ROUND_DEADLINE\n"
      "              value: %s\n",
      options.min_workers, Quote(options.round_deadline));
}

std::string AggregatorAddresses(const RenderOptions& options) {
  std::vector<std::string> addresses;
  for (uint32_t shard = 0; shard < options.size.aggregators; ++shard) {
    addresses.push_back(absl::StrFormat("%s-aggregator-%d.%s-aggregator:%d", options.job, shard,
                                        options.job, kDataPort));
  }
  return absl::StrJoin(addresses, ",");
}

std::string Labels(const RenderOptions& options, absl::string_view component) {
  return absl::StrFormat(
      "{app.kubernetes.io/name: signpost, app.kubernetes.io/instance: %s, "
      "app.kubernetes.io/component: %s}",
      Quote(options.job), component);
}

std::string StorageClass(const RenderOptions& options, absl::string_view indentation) {
  if (options.storage_class.empty()) return "";
  return absl::StrCat(indentation, "storageClassName: ", Quote(options.storage_class), "\n");
}

absl::Status Check(const RenderOptions& options) {
  absl::Status status = CheckLabel("--job", options.job, kMaxJobBytes);
  status.Update(CheckLabel("--namespace", options.name_space, kMaxLabelBytes));
  status.Update(CheckImage("--image", options.image));
  if (!options.worker_image.empty()) {
    status.Update(CheckImage("--worker-image", options.worker_image));
    if (options.worker_command.empty()) {
      status.Update(absl::InvalidArgumentError(
          "--worker-image without a command: the training program stands behind ' -- '"));
    }
  }
  uint64_t number = 0;
  absl::string_view unit;
  status.Update(CheckQuantity("--worker-cpus", options.worker_cpus, {"", "m"}, number, unit));
  if (!options.storage_class.empty()) {
    status.Update(CheckDomain("--storage-class", options.storage_class));
  }
  status.Update(CheckDomain("--trust-domain", options.trust_domain));
  absl::Duration deadline;
  if (!absl::ParseDuration(options.round_deadline, &deadline) || deadline <= absl::ZeroDuration()) {
    status.Update(absl::InvalidArgumentError(
        absl::StrFormat("--round-deadline is '%s', wanted a duration such as 2s",
                        absl::CHexEscape(options.round_deadline))));
  }
  // Which jobs check that workers wait for as long; see WorkerOptions.
  const absl::Duration most = WorkerOptions().exchange_timeout;
  if (options.min_workers > 0 && deadline >= most) {
    status.Update(absl::InvalidArgumentError(absl::StrFormat(
        "--round-deadline is %s; it must be less than workers wait for an answer, %s",
        options.round_deadline, absl::FormatDuration(most))));
  }
  if (options.gpus > kMostGpus) {
    status.Update(absl::InvalidArgumentError(
        absl::StrFormat("--gpus is %d, of one worker; at most %d", options.gpus, kMostGpus)));
  }
  if (options.min_workers > options.size.workers) {
    status.Update(
        absl::InvalidArgumentError(absl::StrFormat("--min-workers is %d, and there are %d workers",
                                                   options.min_workers, options.size.workers)));
  }
  return status;
}

// Of all workers together. Requires a quantity that was checked.
std::string AllWorkersCpus(const RenderOptions& options) {
  char* unit = nullptr;
  const uint64_t number = std::strtoull(options.worker_cpus.c_str(), &unit, 10);
  return absl::StrCat(number * options.size.workers, unit);
}

// All that is the same in all overlays.
Words WordsOf(const RenderOptions& options, const Requirements& required, uint64_t program_bytes) {
  const uint64_t state_seconds = required.aggregator_disk_bytes / 3 / kStateBytesPerSecond;
  const JobSize& size = options.size;
  const uint64_t worker_bytes = required.worker_memory_bytes + program_bytes;
  // Values, moments and the aggregators' errors once, and each worker's error.
  const uint64_t checkpoint_bytes = 4 * size.parameters * (size.workers + 4) + 16 * kMiB;
  const std::string worker_image =
      options.worker_image.empty() ? options.image : options.worker_image;
  return {
      {"{job}", options.job},
      {"{job_name}", Quote(options.job)},
      {"{namespace}", Quote(options.name_space)},
      {"{trust_domain}", options.trust_domain},
      {"{image}", Quote(options.image)},
      {"{worker_image}", Quote(worker_image)},
      {"{workers}", absl::StrCat(size.workers)},
      {"{aggregators}", absl::StrCat(size.aggregators)},
      // Twice the model, for whatever takes its place while it is still there, or a reduction of
      // all of it. The rest is for what is reduced besides: the norm of `max_grad_norm`, and other
      // numbers of the program's own, a loss perhaps.
      {"{most_parameters}", absl::StrCat(2 * size.parameters + (uint64_t{1} << 20))},
      {"{most_frames}",
       absl::StrCat(std::max(2 * size.workers * required.chunks, AggregatorLimits().frames))},
      {"{data_port}", absl::StrCat(kDataPort)},
      {"{metrics}", absl::StrCat(kMetricsPort)},
      {"{drain_grace}", absl::StrCat(kDrainGraceSeconds)},
      {"{state}", Mebibytes(required.aggregator_disk_bytes / 3)},
      {"{aggregator_grace}", absl::StrCat(2 * kDrainGraceSeconds + state_seconds)},
      {"{startup_failures}", absl::StrCat(150 + state_seconds)},
      {"{held_bytes}", absl::StrCat(required.aggregator_held_bytes)},
      {"{receive_bytes}", absl::StrCat(required.aggregator_receive_bytes)},
      {"{aggregator_memory}", Mebibytes(required.aggregator_memory_bytes)},
      {"{aggregator_disk}", Mebibytes(required.aggregator_disk_bytes)},
      {"{worker_memory}", Mebibytes(worker_bytes)},
      {"{worker_cpus}", Quote(options.worker_cpus)},
      {"{gpus}", options.gpus == 0
                     ? ""
                     : absl::StrFormat("              nvidia.com/gpu: %d\n", options.gpus)},
      {"{kueue_gpu}", options.gpus == 0 ? "" : ", nvidia.com/gpu"},
      {"{kueue_gpus}",
       options.gpus == 0
           ? ""
           : absl::StrFormat("            - name: nvidia.com/gpu\n              nominalQuota: %d\n",
                             size.workers * options.gpus)},
      {"{all_workers_cpus}", Quote(AllWorkersCpus(options))},
      {"{all_workers_memory}", absl::StrCat(size.workers * WholeMebibytes(worker_bytes), "Mi")},
      {"{checkpoint_disk}", Mebibytes(3 * checkpoint_bytes)},
      {"{backoff_limit}", absl::StrCat(3 * size.workers)},
      {"{aggregator_labels}", Labels(options, "aggregator")},
      {"{worker_labels}", Labels(options, "worker")},
      {"{alerts}", AlertGroups()},
      {"{aggregator_addresses}", Quote(AggregatorAddresses(options))},
      {"{storage_class_2}", StorageClass(options, "  ")},
      {"{storage_class_8}", StorageClass(options, "        ")},
      {"{late_workers_env}", LateWorkersEnvironment(options)},
      {"{worker_command}", WorkerCommand(options)},
      {"{container_security}", kContainerSecurity},
      {"{probe}", absl::StrFormat("[signpost, probe, --aggregators, \"127.0.0.1:%d\"]", kDataPort)},
  };
}

// Those, and what is of the overlay's.
Words WordsOf(const Overlay& overlay, Words words) {
  const auto of_role = [&words](const char* text, const char* role) {
    words["{role}"] = role;
    return Fill(text, words);
  };
  words["{checkpoint_access}"] = overlay.one_node ? "ReadWriteOnce" : "ReadWriteMany";
  words["{spread}"] = overlay.spread ? Fill(kSpread, words) : "";
  words["{security_env}"] = overlay.tls ? kTlsEnvironment : kInsecureEnvironment;
  words["{metrics_args}"] = overlay.metrics ? Fill(kMetricsArgument, words) : "";
  words["{metrics_port}"] = overlay.metrics ? Fill(kMetricsPortLines, words) : "";
  words["{tls_mount}"] = overlay.tls ? kTlsMount : "";
  words["{tls_volume}"] = overlay.tls ? of_role(kTlsVolume, "worker") : "";
  words["{worker_spec}"] = Fill(kWorkerSpec, words);
  words["{worker_spec_8}"] = Indent(words["{worker_spec}"], 8);
  words["{worker_spec_12}"] = Indent(words["{worker_spec}"], 12);
  words["{aggregator_volumes}"] =
      overlay.tls ? absl::StrCat("      volumes:\n", of_role(kTlsVolume, "aggregator")) : "";
  return words;
}

std::string Certificates(const Words& words) {
  std::string text = Fill(kIssuers, words);
  for (const char* role : {"aggregator", "worker", "admin", "observer"}) {
    Words with_role = words;
    with_role["{role}"] = role;
    text += Fill(kCertificate, with_role);
  }
  return text;
}

std::string Kustomization(const std::vector<std::string>& resources) {
  return absl::StrCat(
      kGenerated,
      "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - ",
      absl::StrJoin(resources, "\n  - "), "\n");
}

// A directory's kustomization, and its files, which are templates by name.
void AddDirectory(const std::string& directory, std::vector<std::string> others,
                  const std::map<std::string, std::string>& templates, const Words& words,
                  Files& files) {
  for (const auto& [name, text] : templates) {
    files[absl::StrCat(directory, "/", name)] = kGenerated + Fill(text, words);
    others.push_back(name);
  }
  files[directory + "/kustomization.yaml"] = Kustomization(others);
}

void AddOverlay(const Overlay& overlay, const Words& words, Files& files) {
  const std::string directory = absl::StrCat("overlays/", overlay.name);
  std::map<std::string, std::string> aggregators = {{"aggregators.yaml", kAggregators},
                                                    {"checkpoints.yaml", kCheckpoints}};
  if (overlay.certificates) aggregators["certificates.yaml"] = Certificates(words);
  if (overlay.metrics) {
    aggregators["monitoring.yaml"] = kMonitoring;
    aggregators["alerts.yaml"] = kAlertRules;
  }
  AddDirectory(directory, {"../../base", "aggregators", "workers"}, {}, words, files);
  AddDirectory(directory + "/aggregators", {}, aggregators, words, files);
  AddDirectory(directory + "/workers", {}, {{"workers.yaml", kJob}}, words, files);
}

void AddExamples(const Words& words, Files& files) {
  const std::map<std::string, std::string> examples = {
      {"jobset", kJobSet}, {"kubeflow-trainer", kTrainer}, {"kueue", kKueue}};
  for (const auto& [name, text] : examples) {
    AddDirectory("examples/" + name, {"../../base", "../../overlays/production/aggregators"},
                 {{name + ".yaml", text}}, words, files);
  }
}

}  // namespace

absl::StatusOr<Files> Render(const RenderOptions& options) {
  if (absl::Status status = Check(options); !status.ok()) return status;
  const absl::StatusOr<uint64_t> program_bytes =
      ParseBytes("--worker-memory", options.worker_memory);
  if (!program_bytes.ok()) return program_bytes.status();
  JobSize size = options.size;
  size.closes_without_late_workers = options.min_workers != 0;
  const absl::StatusOr<Requirements> required = RequirementsOf(size);
  if (!required.ok()) return required.status();
  if (required->chunks < size.aggregators) {
    return absl::InvalidArgumentError(absl::StrCat(
        size.parameters, " parameters are ", required->chunks, " chunks, fewer than the ",
        size.aggregators, " aggregators: some would have nothing to do"));
  }

  const Words words = WordsOf(options, *required, *program_bytes);
  Files files;
  AddDirectory("base", {},
               {{"namespace.yaml", kNamespace},
                {"network-policies.yaml", kNetworkPolicies},
                {"services.yaml", kServices}},
               words, files);
  for (const Overlay& overlay : kOverlays) AddOverlay(overlay, WordsOf(overlay, words), files);
  AddExamples(WordsOf(kProduction, words), files);
  return files;
}

absl::StatusOr<std::string> DocumentsOf(const Files& files, const std::string& overlay) {
  std::vector<std::string> names;
  for (const Overlay& known : kOverlays) names.push_back(known.name);
  if (std::find(names.begin(), names.end(), overlay) == names.end()) {
    return absl::InvalidArgumentError(absl::StrFormat("--overlay is '%s', wanted one of: %s",
                                                      overlay, absl::StrJoin(names, ", ")));
  }
  std::vector<std::string> documents;
  for (const auto& [path, text] : files) {
    const bool is_ours = absl::StartsWith(path, "base/") ||
                         absl::StartsWith(path, absl::StrCat("overlays/", overlay, "/"));
    if (is_ours && !absl::EndsWith(path, "/kustomization.yaml")) documents.push_back(text);
  }
  return absl::StrJoin(documents, "---\n");
}

}  // namespace signpost::deploy
