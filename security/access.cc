#include "security/access.h"

#include <algorithm>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

struct Grant {
  absl::string_view method;
  PeerRole role;
};

constexpr Grant kGrants[] = {
    {"/signpost.AggregatorService/Join", PeerRole::kWorker},
    {"/signpost.AggregatorService/Exchange", PeerRole::kWorker},
    {"/signpost.AggregatorService/Leave", PeerRole::kWorker},
    {"/signpost.AggregatorService/ReadError", PeerRole::kWorker},
    // A worker asks whom it waits for.
    {"/signpost.AggregatorService/Status", PeerRole::kWorker},
    // A person on an aggregator's host, or in its pod, has its certificate.
    {"/signpost.AggregatorService/Status", PeerRole::kAggregator},
    {"/signpost.AggregatorService/Status", PeerRole::kObserver},
    {"/signpost.AggregatorService/Status", PeerRole::kAdmin},
    // Whoever has a certificate may know whether there is an aggregator; its own probes have its.
    {"/grpc.health.v1.Health/Check", PeerRole::kAggregator},
    {"/grpc.health.v1.Health/Check", PeerRole::kWorker},
    {"/grpc.health.v1.Health/Check", PeerRole::kObserver},
    {"/grpc.health.v1.Health/Check", PeerRole::kAdmin},
    // Before a run, of hosts that will be any of these.
    {"/signpost.DoctorService/Describe", PeerRole::kAggregator},
    {"/signpost.DoctorService/Describe", PeerRole::kWorker},
    {"/signpost.DoctorService/Describe", PeerRole::kAdmin},
    {"/signpost.DoctorService/Try", PeerRole::kAggregator},
    {"/signpost.DoctorService/Try", PeerRole::kWorker},
    {"/signpost.DoctorService/Try", PeerRole::kAdmin},
    {"/signpost.DoctorService/Swallow", PeerRole::kAggregator},
    {"/signpost.DoctorService/Swallow", PeerRole::kWorker},
    {"/signpost.DoctorService/Swallow", PeerRole::kAdmin},
};

// What a peer has sent, for messages and logs.
std::string Printable(absl::string_view text) {
  constexpr size_t kMostBytes = 128;
  return absl::StrCat(absl::CHexEscape(text.substr(0, kMostBytes)),
                      text.size() > kMostBytes ? "..." : "");
}

}  // namespace

absl::Status CheckMethod(absl::string_view method, const Identity& caller) {
  const bool granted = std::any_of(std::begin(kGrants), std::end(kGrants), [&](const Grant& grant) {
    return grant.method == method && grant.role == caller.role;
  });
  if (granted) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      caller.ToUri(), " may not call ", Printable(method), ": its role has no part in that"));
}

absl::Status CheckJob(absl::string_view job, const Identity& caller) {
  if (job.empty() && caller.job.has_value()) {
    return absl::PermissionDeniedError(
        absl::StrCat(caller.ToUri(), " may only ask about its own job, which the call must name"));
  }
  if (caller.Covers(job)) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(caller.ToUri(), " has no part in the job '",
                                                  Printable(job),
                                                  "': its certificate is of another job"));
}

}  // namespace signpost
