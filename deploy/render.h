// A job as Kubernetes wants it: manifests for a job of a given size. Pure: options in, files out.
//
// What comes out is a tree that `kubectl apply -k` takes, of plain resources without patches, so
// that a file says all that there is:
//
//   base/                 namespace, service accounts, the aggregators' headless service and
//                         disruption budget, network policies
//   overlays/production/  aggregators and workers, which are directories of their own, with TLS:
//                         cert-manager's Certificates; aggregators spread over nodes
//   overlays/monitoring/  production, with metrics for the Prometheus operator
//   overlays/local/       the same on a cluster of one node; `signpost cert init` makes certificates
//   overlays/dev/         the same without TLS
//   examples/             production's aggregators, with workers that JobSet, Kubeflow Trainer or
//                         Kueue run; none of these ever restarts aggregators
//
// deploy/kustomize is this tree for the default options: a test holds it.
//
// Aggregators are a StatefulSet, whose pods find their shard in their index (the label
// apps.kubernetes.io/pod-index, Kubernetes 1.28), and workers an Indexed Job, whose pods find their
// rank in theirs. Requirements are requirements.h's.

#ifndef SIGNPOST_DEPLOY_RENDER_H_
#define SIGNPOST_DEPLOY_RENDER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "deploy/requirements.h"
#include "proto/version.h"

namespace signpost::deploy {

inline constexpr uint16_t kDataPort = 4000;
inline constexpr uint16_t kMetricsPort = 9090;

// The defaults are the demo's job: what is rendered without options trains, with the image alone.
struct RenderOptions {
  std::string job = "demo";
  std::string name_space = "signpost";
  JobSize size = {.workers = 4, .aggregators = 2, .parameters = 2'895'104};
  std::string image = absl::StrCat("localhost/signpost:", kVersion);
  std::string worker_image;                 // empty: the image
  std::vector<std::string> worker_command;  // empty: the demo's training, from the image
  std::string worker_cpus = "2";
  std::string worker_memory = "4Gi";  // of the training program, beside Signpost's
  uint32_t gpus = 0;                  // of each worker
  std::string storage_class;          // of checkpoints and state; empty: the cluster's default
  // JobOptions.round_deadline_us and min_workers, as SIGNPOST_ROUND_DEADLINE and
  // SIGNPOST_MIN_WORKERS have them; with size.closes_without_late_workers.
  std::string round_deadline = "2s";
  uint32_t min_workers = 0;
  std::string trust_domain = "signpost";
};

// By path, as above.
using Files = std::map<std::string, std::string>;

// INVALID_ARGUMENT, naming the flag of `signpost k8s render`, for what Kubernetes would not take: a
// name that is no DNS label or too long for what is made of it, an image or quantity that is none;
// and for a size that no job can have.
absl::StatusOr<Files> Render(const RenderOptions& options);

// Those of one overlay, "local", "dev", "production" or "monitoring", with those of the base, as
// one stream of documents for `kubectl apply -f -`. INVALID_ARGUMENT for another overlay.
absl::StatusOr<std::string> DocumentsOf(const Files& files, const std::string& overlay);

}  // namespace signpost::deploy

#endif  // SIGNPOST_DEPLOY_RENDER_H_
