// The listening side of a connection's security.

#ifndef SIGNPOST_SECURITY_SERVER_SECURITY_H_
#define SIGNPOST_SECURITY_SERVER_SECURITY_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "security/authorizer.h"
#include "security/credentials.h"
#include "security/plain_text_warning.h"
#include "security/token_verifier.h"
#include "security/transport_security.h"

namespace signpost {

// What one server listens with. A unix: socket is in plain text, and its directory's mode guards
// it. Thread-safe.
class ServerSecurity {
 public:
  // For a server at "host:port" or "unix:path". Warnings are of all that is in here; from any
  // thread. FAILED_PRECONDITION for tokens without mTLS; otherwise errors as CheckTransport's,
  // TlsCredentials::Load's, TokenOptions::Check's and TokenVerifier::Open's.
  static absl::StatusOr<std::unique_ptr<ServerSecurity>> Open(const TransportSecurity& security,
                                                              const std::string& address,
                                                              const TokenOptions& tokens,
                                                              TlsCredentials::OnWarning on_warning);

  // Must not be used after this object.
  std::shared_ptr<grpc::ServerCredentials> credentials() const;

  // Null in plain text, where everyone may call everything.
  Authorizer* authorizer() const { return authorizer_.get(); }

  // With mTLS: this process's, and until when its certificate is valid.
  const Identity* identity() const { return tls_ == nullptr ? nullptr : &tls_->identity(); }
  std::optional<absl::Time> valid_until() const;

  // Plain text, beyond loopback.
  bool is_exposed() const { return plain_text_warning_ != nullptr; }

 private:
  std::shared_ptr<TlsCredentials> tls_;                   // or null
  std::shared_ptr<Authorizer> authorizer_;                // with mTLS
  std::unique_ptr<PlainTextWarning> plain_text_warning_;  // or null
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_SERVER_SECURITY_H_
