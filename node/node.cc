#include "node/node.h"

#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace signpost::node {

absl::Status Node::Check(const Attach& request) const {
  const WorkerOptions& worker = options_.session.worker;
  const uint64_t world_size = uint64_t{worker.world_size} * options_.processes;
  const uint64_t first = uint64_t{worker.rank} * options_.processes;
  if (request.world_size() != world_size || request.rank() < first ||
      request.rank() >= first + options_.processes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rank %d of %d does not belong to this node, %d of %d, which has the ranks %d to %d of %d: "
        "%d processes on each node (--processes)",
        request.rank(), request.world_size(), worker.rank, worker.world_size, first,
        first + options_.processes - 1, world_size, options_.processes));
  }
  if (!request.job().empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("a process names the job that it trains (SIGNPOST_JOB)");
}

absl::StatusOr<Node::Process> Node::Enter(const Attach& request) {
  if (absl::Status status = Check(request); !status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<std::shared_ptr<Job>> job = JobOf(request.job());
  if (!job.ok()) return job.status();
  // Under the lock, so that the job is not taken for one that nobody needs.
  const absl::StatusOr<uint64_t> number = (*job)->Enter(request);
  if (!number.ok()) return number.status();
  return Process{*std::move(job), *number};
}

absl::StatusOr<std::shared_ptr<Job>> Node::JobOf(const std::string& name) {
  if (stopped_) return absl::UnavailableError("the node's worker is about to end");
  if (const auto found = jobs_.find(name); found != jobs_.end()) return found->second;
  for (auto job = jobs_.begin(); jobs_.size() >= kMostJobs && job != jobs_.end();) {
    if (!job->second->is_idle()) {
      ++job;
      continue;
    }
    job->second->Stop();
    job = jobs_.erase(job);
  }
  if (jobs_.size() >= kMostJobs) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("the node's worker has %d jobs, which is the most", kMostJobs));
  }
  NodeOptions options = options_;
  options.session.worker.job = name;
  return jobs_[name] = std::make_shared<Job>(name, options);
}

void Node::Stop() {
  std::vector<Job*> jobs;
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    for (const auto& [name, job] : jobs_) jobs.push_back(job.get());
  }
  // Side by side: each may wait for other nodes.
  std::vector<std::thread> threads;
  for (Job* job : jobs) threads.emplace_back([job] { job->Stop(); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace signpost::node
