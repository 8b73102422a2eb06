#include "security/identity.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace signpost {
namespace {

constexpr std::pair<PeerRole, absl::string_view> kRoles[] = {
    {PeerRole::kAggregator, "aggregator"},
    {PeerRole::kWorker, "worker"},
    {PeerRole::kObserver, "observer"},
    {PeerRole::kAdmin, "admin"},
};

constexpr size_t kMaxNameBytes = 256;

bool IsPunctuation(char c) { return c == '-' || c == '.' || c == '_'; }

bool IsTrustDomain(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_islower(c) || absl::ascii_isdigit(c) || IsPunctuation(c);
         });
}

// As SPIFFE has it, "." and ".." are none.
bool IsPathSegment(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes && name != "." && name != ".." &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return absl::ascii_isalnum(c) || IsPunctuation(c); });
}

}  // namespace

absl::string_view NameOf(PeerRole role) {
  for (const auto& [known, name] : kRoles) {
    if (known == role) return name;
  }
  return "";
}

std::optional<PeerRole> ParsePeerRole(absl::string_view name) {
  for (const auto& [role, known] : kRoles) {
    if (known == name) return role;
  }
  return std::nullopt;
}

absl::StatusOr<Identity> Identity::Parse(absl::string_view uri) {
  absl::string_view path = uri;
  if (absl::ConsumePrefix(&path, "spiffe://")) {
    const std::vector<absl::string_view> parts = absl::StrSplit(path, '/');
    Identity identity;
    identity.trust_domain = std::string(parts[0]);
    const std::optional<PeerRole> role =
        parts.size() == 2 || parts.size() == 3 ? ParsePeerRole(parts[1]) : std::nullopt;
    if (parts.size() == 3) identity.job = std::string(parts[2]);
    if (role.has_value() && identity.Check().ok()) {
      identity.role = *role;
      return identity;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the identity '", uri,
                   "' is none of Signpost's: wanted spiffe://TRUST-DOMAIN/ROLE or "
                   "spiffe://TRUST-DOMAIN/ROLE/JOB, with the role aggregator, worker, observer or "
                   "admin"));
}

absl::Status Identity::Check() const {
  if (!IsTrustDomain(trust_domain)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the trust domain '", trust_domain,
                     "' has something else than lower-case letters, digits, '-', '.' and '_', or "
                     "is empty or too long"));
  }
  if (job.has_value() && !IsPathSegment(*job)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a certificate cannot name the job '", *job,
                     "': wanted letters, digits, '-', '.' and '_'. Name the job otherwise, or use "
                     "certificates for every job"));
  }
  return absl::OkStatus();
}

std::string Identity::ToUri() const {
  std::string uri = absl::StrCat("spiffe://", trust_domain, "/", NameOf(role));
  if (job.has_value()) absl::StrAppend(&uri, "/", *job);
  return uri;
}

bool Identity::Covers(absl::string_view job_name) const {
  if (!job.has_value()) return true;
  return absl::ConsumePrefix(&job_name, *job) && (job_name.empty() || job_name[0] == '/');
}

}  // namespace signpost
