// The connecting side of a connection's security.

#ifndef SIGNPOST_SECURITY_CLIENT_SECURITY_H_
#define SIGNPOST_SECURITY_CLIENT_SECURITY_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "security/credentials.h"
#include "security/plain_text_warning.h"
#include "security/token_file.h"
#include "security/transport_security.h"

namespace signpost {

// Shared by a process's channels, which keep it. Thread-safe.
class ClientSecurity {
 public:
  // For connections to all of these, about `job`, or if that is empty about any. Warnings are of
  // TlsCredentials and TokenFile, or PlainTextWarning's when a target is beyond loopback; from any
  // thread. Errors as CheckTransport's, TlsCredentials::Load's and TokenFile::Open's.
  static absl::StatusOr<std::shared_ptr<const ClientSecurity>> Open(
      const TransportSecurity& security, const std::vector<std::string>& targets,
      TlsCredentials::OnWarning on_warning, const std::string& job = "");

  bool is_tls() const { return tls_ != nullptr; }
  // This process's, with mTLS.
  const Identity& identity() const { return tls_->identity(); }

  // The job that a Status call of this process's has to name, for who has a part in one only may
  // not ask about others; empty: it may ask about all.
  std::string JobToAskAbout() const;

  // Returns credentials for that target, which must not outlive this object.
  std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(
      const std::string& target, TlsCredentials::To to = TlsCredentials::To::kAggregators) const;

 private:
  std::string job_;
  std::shared_ptr<TlsCredentials> tls_;                   // or null
  std::shared_ptr<TokenFile> token_;                      // with mTLS, or null
  std::unique_ptr<PlainTextWarning> plain_text_warning_;  // or null
};

// Calls grpc::CreateCustomChannel for "host:port" or "unix:path". Connects to loopback by number,
// whatever gRPC's resolver takes localhost for (see GrpcTarget).
std::shared_ptr<grpc::Channel> OpenChannel(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_CLIENT_SECURITY_H_
