#include "security/authorizer.h"

#include <grpc/grpc_security_constants.h>

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "proto/grpc_status.h"
#include "proto/steady_time.h"
#include "security/access.h"
#include "security/peer.h"

namespace signpost {
namespace {

constexpr absl::Duration kLineInterval = absl::Seconds(1);

constexpr char kAuthorization[] = "authorization";
constexpr absl::string_view kBearer = "Bearer ";
constexpr absl::string_view kHealthService = "/grpc.health.v1.Health/";

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
                                 OutputMetadata* consumed, OutputMetadata*) {
  const auto [first, last] = metadata.equal_range(kAuthorization);
  for (auto entry = first; entry != last; ++entry) {
    consumed->emplace(kAuthorization, std::string(entry->second.data(), entry->second.size()));
  }
  return ToGrpcStatus(Count(CheckCall(metadata, *context)));
}

absl::Status Authorizer::CheckCall(const InputMetadata& metadata,
                                   const grpc::AuthContext& context) {
  if (IsResumed(context)) return ResumedError();
  const absl::StatusOr<Identity> caller = CallerOf(context, own_);
  if (!caller.ok()) return caller.status();
  const absl::string_view method = MethodOf(metadata);
  absl::Status status = CheckMethod(method, *caller);
  if (!status.ok() || tokens_ == nullptr || absl::StartsWith(method, kHealthService)) return status;
  return CheckToken(metadata, *caller);
}

absl::Status Authorizer::CheckToken(const InputMetadata& metadata, const Identity& caller) {
  const auto refuse = [&](absl::string_view why) {
    return absl::UnauthenticatedError(absl::StrCat(caller.ToUri(), ": ", why));
  };
  if (const size_t count = metadata.count(kAuthorization); count != 1) {
    return refuse(absl::StrCat("the call has ", count,
                               " tokens, wanted one (--token-file or SIGNPOST_TOKEN_FILE)"));
  }
  const grpc::string_ref value = metadata.find(kAuthorization)->second;
  absl::string_view token(value.data(), value.size());
  if (!absl::ConsumePrefix(&token, kBearer)) {
    return refuse("the call's authorization is none of a bearer, 'Bearer TOKEN'");
  }
  const absl::Status status = tokens_->Check(token, absl::Now());
  return status.ok() ? status : refuse(status.message());
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
