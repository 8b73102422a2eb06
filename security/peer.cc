#include "security/peer.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace signpost {

absl::StatusOr<Identity> IdentityOfPeer(const std::vector<grpc::string_ref>& uris,
                                        const Identity& own) {
  std::vector<absl::string_view> ids;
  for (const grpc::string_ref& uri : uris) {
    const absl::string_view text(uri.data(), uri.size());
    if (absl::StartsWith(text, "spiffe://")) ids.push_back(text);
  }
  if (ids.size() != 1) {
    return absl::UnauthenticatedError(
        absl::StrCat("the peer's certificate has ", ids.size(),
                     " SPIFFE IDs among its alternative names, wanted one"));
  }
  absl::StatusOr<Identity> identity = Identity::Parse(ids[0]);
  if (!identity.ok()) return absl::UnauthenticatedError(identity.status().message());
  if (identity->trust_domain != own.trust_domain) {
    return absl::UnauthenticatedError(absl::StrCat(
        "the peer is ", ids[0], ", wanted one of the trust domain ", own.trust_domain));
  }
  return identity;
}

absl::Status CheckAggregator(const std::vector<grpc::string_ref>& uris, const Identity& own,
                             absl::string_view job) {
  const absl::StatusOr<Identity> identity = IdentityOfPeer(uris, own);
  if (!identity.ok()) return identity.status();
  if (identity->role != PeerRole::kAggregator) {
    return absl::UnauthenticatedError(
        absl::StrCat("the server is ", identity->ToUri(), ", which is no aggregator"));
  }
  const absl::string_view wanted = own.job.has_value() ? *own.job : job;
  if (!wanted.empty() && !identity->Covers(wanted)) {
    return absl::UnauthenticatedError(absl::StrCat("the server is ", identity->ToUri(),
                                                   ", an aggregator of another job than ", wanted));
  }
  return absl::OkStatus();
}

}  // namespace signpost
