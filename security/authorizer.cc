#include "security/authorizer.h"

#include <grpc/grpc_security_constants.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/grpc_status.h"
#include "proto/steady_time.h"
#include "security/access.h"
#include "security/peer.h"

namespace signpost {
namespace {

constexpr absl::Duration kLineInterval = absl::Seconds(1);

// gRPC has it among the metadata.
absl::string_view MethodOf(const Authorizer::InputMetadata& metadata) {
  const auto path = metadata.find(":path");
  if (path == metadata.end()) return "";
  return absl::string_view(path->second.data(), path->second.size());
}

// Of an earlier connection, whose certificate is not looked at again: it may no longer be valid.
bool IsResumed(const grpc::AuthContext& context) {
  const std::vector<grpc::string_ref> resumed =
      context.FindPropertyValues(GRPC_SSL_SESSION_REUSED_PROPERTY);
  return !resumed.empty() && resumed[0] == "true";
}

absl::Status ResumedError() {
  return absl::UnauthenticatedError(
      "the connection goes on with the TLS session of an earlier one: connect without it");
}

absl::StatusOr<Identity> CallerOf(const grpc::AuthContext& context, const Identity& own) {
  return IdentityOfPeer(context.FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME), own);
}

}  // namespace

grpc::Status Authorizer::Process(const InputMetadata& metadata, grpc::AuthContext* context,
                                 OutputMetadata*, OutputMetadata*) {
  if (IsResumed(*context)) return ToGrpcStatus(Count(ResumedError()));
  const absl::StatusOr<Identity> caller = CallerOf(*context, own_);
  return ToGrpcStatus(
      Count(caller.ok() ? CheckMethod(MethodOf(metadata), *caller) : caller.status()));
}

absl::Status Authorizer::Check(const grpc::AuthContext& context, absl::string_view job) {
  const absl::StatusOr<Identity> caller = CallerOf(context, own_);
  return Count(caller.ok() ? CheckJob(job, *caller) : caller.status());
}

absl::Status Authorizer::Count(absl::Status status) {
  if (status.ok()) return status;
  const uint64_t calls = ++denied_calls_;
  {
    absl::MutexLock lock(&mutex_);
    if (SteadyNow() < next_line_) return status;
    next_line_ = SteadyNow() + kLineInterval;
  }
  on_denied_(absl::StrCat("denied: ", status.message(), " (", calls, " calls so far)"));
  return status;
}

}  // namespace signpost
