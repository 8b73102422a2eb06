#include "cli/k8s_command.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "bench/rank.h"
#include "cli/flag.h"
#include "deploy/render.h"
#include "proto/exit_code.h"

namespace signpost::cli {
namespace {

namespace fs = std::filesystem;

struct Flags {
  deploy::RenderOptions render;
  std::string overlay = "production";
  std::string output;
};

absl::Status Write(const fs::path& path, const std::string& text) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error) {
    return absl::InvalidArgumentError(absl::StrCat("--output: cannot make the directory ",
                                                   path.parent_path().string(), ": ",
                                                   error.message()));
  }
  std::ofstream file(path);
  file << text << std::flush;
  if (file) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--output: cannot write ", path.string(), ": ", std::strerror(errno)));
}

absl::StatusOr<int> Render(const Flags& flags) {
  const absl::StatusOr<deploy::Files> files = deploy::Render(flags.render);
  if (!files.ok()) return files.status();
  // Named wrongly it is an error with a directory too.
  const absl::StatusOr<std::string> documents = deploy::DocumentsOf(*files, flags.overlay);
  if (!documents.ok()) return documents.status();
  if (flags.output.empty()) {
    std::fputs(documents->c_str(), stdout);
    return kExitOk;
  }
  for (const auto& [path, text] : *files) {
    if (absl::Status status = Write(fs::path(flags.output) / path, text); !status.ok()) {
      return status;
    }
  }
  std::printf("kubectl apply -k %s/overlays/%s\n", flags.output.c_str(), flags.overlay.c_str());
  return kExitOk;
}

void AddSizeFlags(CLI::App& app, deploy::RenderOptions& render) {
  deploy::JobSize& size = render.size;
  app.add_option("--workers", size.workers, "Workers of the job")
      ->transform(PositiveCount())
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--aggregators", size.aggregators, "Aggregators, each with a shard")
      ->transform(PositiveCount())
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--parameters", size.parameters, "How many parameters the model has")
      ->transform(PositiveCount())
      ->type_name("N")
      ->capture_default_str();
  AddChoice(app, "--warm-up-codec", size.warm_up_codec, bench::Codecs(),
            "How gradients travel: warm_up_codec, or variance_codec if that has more bits [fp32]");
  AddChoice(app, "--codec", size.codec, bench::Codecs(),
            "How numbers travel after the warm-up [onebit]");
  app.add_option("--min-workers", render.min_workers,
                 "Workers with which a round closes if others are late [all]")
      ->type_name("N");
  app.add_option("--round-deadline", render.round_deadline,
                 "With --min-workers: how long late workers are waited for")
      ->type_name("DURATION")
      ->capture_default_str();
}

void AddClusterFlags(CLI::App& app, deploy::RenderOptions& render) {
  app.add_option("--job", render.job, "The job's name, and what its objects' names begin with")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--namespace", render.name_space,
                 "The job's namespace, which is made with network policies for all of its pods")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--image", render.image, "Image of the aggregators: deploy/Dockerfile")
      ->type_name("IMAGE")
      ->capture_default_str();
  app.add_option("--worker-image", render.worker_image,
                 "Image of the training program: deploy/worker.Dockerfile [the aggregators']")
      ->type_name("IMAGE");
  app.add_option("--worker-cpus", render.worker_cpus, "Processors of each worker")
      ->type_name("QUANTITY")
      ->capture_default_str();
  app.add_option("--worker-memory", render.worker_memory,
                 "Memory of each worker's training program; Signpost's comes on top")
      ->type_name("QUANTITY")
      ->capture_default_str();
  app.add_option("--gpus", render.gpus, "GPUs of each worker, nvidia.com/gpu [none]")
      ->type_name("N");
  app.add_option("--storage-class", render.storage_class,
                 "Storage class of aggregators' state and of checkpoints [the cluster's default]")
      ->type_name("NAME");
  app.add_option("--trust-domain", render.trust_domain, "Trust domain of the certificates")
      ->type_name("DOMAIN")
      ->capture_default_str();
}

}  // namespace

Command AddK8sCommand(CLI::App& program, const std::vector<std::string>& tail) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand("k8s", "Put a job into a Kubernetes cluster");
  app.require_subcommand(1);
  app.footer(
      "Example:\n"
      "  signpost k8s render --workers 8 --aggregators 4 --parameters 340000000 | kubectl apply -f "
      "-");
  CLI::App& render = *app.add_subcommand(
      "render", "Write manifests for a job of a given size: memory and disk are computed");
  SetUsageOfTail(render, "[-- COMMAND [ARG ...]]");
  render.footer(
      "Without --output the documents of one overlay go to standard output. The training program\n"
      "stands behind ' -- '; without one it is the demo's.\n\n"
      "Example:\n"
      "  signpost k8s render --job bert --workers 8 --aggregators 4 --parameters 340000000 \\\n"
      "    --worker-image registry.example/bert:1 --gpus 1 --output bert -- python train.py\n"
      "  kubectl apply -k bert/overlays/production");
  AddSizeFlags(render, flags->render);
  AddClusterFlags(render, flags->render);
  render
      .add_option("--overlay", flags->overlay,
                  "dev is without TLS, local for one node, monitoring is production with metrics")
      ->type_name("local|dev|production|monitoring")
      ->capture_default_str();
  render
      .add_option("--output", flags->output,
                  "Write base and overlays for kustomize to this directory")
      ->type_name("DIR");
  flags->render.worker_command = tail;
  return {&app, [flags, &render]() -> absl::StatusOr<int> {
            if (render.count("--round-deadline") > 0 && flags->render.min_workers == 0) {
              return absl::InvalidArgumentError(
                  "--round-deadline needs --min-workers above 0: with how many a round may close");
            }
            return Render(*flags);
          }};
}

}  // namespace signpost::cli
