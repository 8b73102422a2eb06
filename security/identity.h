// Who a process is, as its certificate says: a SPIFFE ID in the subject's alternative names.
//
//   spiffe://TRUST-DOMAIN/ROLE        in every job
//   spiffe://TRUST-DOMAIN/ROLE/JOB    in one job, and in its reductions, which are called JOB/...

#ifndef SIGNPOST_SECURITY_IDENTITY_H_
#define SIGNPOST_SECURITY_IDENTITY_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost {

enum class PeerRole {
  kAggregator,
  kWorker,
  kObserver,  // sees what a job does
  kAdmin,     // as kObserver, and may look at hosts before a run
};

inline constexpr PeerRole kPeerRoles[] = {PeerRole::kAggregator, PeerRole::kWorker,
                                          PeerRole::kObserver, PeerRole::kAdmin};

// "aggregator", "worker", "observer", "admin".
absl::string_view NameOf(PeerRole role);
std::optional<PeerRole> ParsePeerRole(absl::string_view name);

struct Identity {
  std::string trust_domain;  // lower-case letters, digits and "-._"
  PeerRole role = PeerRole::kWorker;
  // Letters, digits and "-._". A job whose name has others has no certificates of its own: who
  // takes part in it needs one for every job.
  std::optional<std::string> job;

  // INVALID_ARGUMENT, with the form above, for anything else.
  static absl::StatusOr<Identity> Parse(absl::string_view uri);
  // INVALID_ARGUMENT when a name has characters that it may not have, or more than 256.
  absl::Status Check() const;
  std::string ToUri() const;

  bool Covers(absl::string_view job_name) const;
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_IDENTITY_H_
