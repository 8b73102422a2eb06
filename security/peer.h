// The other side of a connection, by the URIs in its certificate.

#ifndef SIGNPOST_SECURITY_PEER_H_
#define SIGNPOST_SECURITY_PEER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/string_ref.h"
#include "security/identity.h"

namespace signpost {

// UNAUTHENTICATED when there is not exactly one SPIFFE ID, or it is not an Identity, or of another
// trust domain than `own`'s.
absl::StatusOr<Identity> IdentityOfPeer(const std::vector<grpc::string_ref>& uris,
                                        const Identity& own);

// Whether it is an aggregator of the job that `own` is of, or, where that is of all, of `job`; of
// any if that is empty. UNAUTHENTICATED, saying what it is.
absl::Status CheckAggregator(const std::vector<grpc::string_ref>& uris, const Identity& own,
                             absl::string_view job);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_PEER_H_
