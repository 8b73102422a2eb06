// Judges each call to a server that speaks mTLS, before its handler sees it.

#ifndef SIGNPOST_SECURITY_AUTHORIZER_H_
#define SIGNPOST_SECURITY_AUTHORIZER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/security/auth_context.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "security/identity.h"
#include "security/token_verifier.h"

namespace signpost {

// Thread-safe. Denied calls end with UNAUTHENTICATED (peer.h and token_verifier.h say when; or TLS
// was resumed, so that the certificate has not been looked at) or PERMISSION_DENIED (access.h), and
// the message says who was denied what.
class Authorizer final : public grpc::AuthMetadataProcessor {
 public:
  // Gets a line about a denied call, at most once a second. From gRPC's threads.
  using OnDenied = std::function<void(const std::string& line)>;

  // With `tokens`, each call needs one, "authorization: Bearer TOKEN", but for gRPC health: who
  // watches over processes has no account of theirs. Null: none does.
  Authorizer(Identity own, std::unique_ptr<TokenVerifier> tokens, OnDenied on_denied)
      : own_(std::move(own)), tokens_(std::move(tokens)), on_denied_(std::move(on_denied)) {}

  // What a caller may do with any job: gRPC asks by itself, once for each call. Handlers do not see
  // the token.
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* response) override;

  // What it may do with this one: for handlers to ask, who know it.
  absl::Status Check(const grpc::AuthContext& context, absl::string_view job);

  uint64_t denied_calls() const { return denied_calls_; }

 private:
  absl::Status CheckCall(const InputMetadata& metadata, const grpc::AuthContext& context);
  absl::Status CheckToken(const InputMetadata& metadata, const Identity& caller);
  absl::Status Count(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);

  const Identity own_;
  const std::unique_ptr<TokenVerifier> tokens_;  // or null
  const OnDenied on_denied_;
  std::atomic<uint64_t> denied_calls_ = 0;
  absl::Mutex mutex_;
  absl::Time next_line_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_AUTHORIZER_H_
