#include "security/server_security.h"

#include <utility>

#include "absl/status/status.h"
#include "security/loopback.h"

namespace signpost {
namespace {

absl::Status CheckTokens(const TokenOptions& tokens, bool is_tls) {
  if (absl::Status status = tokens.Check(); !status.ok()) return status;
  if (!tokens.wanted() || is_tls) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "tokens would travel in plain text: with a JWKS file an aggregator needs a TLS directory "
      "(--tls-dir or SIGNPOST_TLS_DIR) and a TCP address");
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerSecurity>> ServerSecurity::Open(
    const TransportSecurity& security, const std::string& address, const TokenOptions& tokens,
    TlsCredentials::OnWarning on_warning) {
  if (absl::Status status = CheckTransport(address, security); !status.ok()) return status;
  const bool is_tls = !security.tls_dir.empty() && !IsUnixAddress(address);
  if (absl::Status status = CheckTokens(tokens, is_tls); !status.ok()) return status;
  auto server = std::make_unique<ServerSecurity>();
  if (is_tls) {
    auto tls = TlsCredentials::Load(security.tls_dir, on_warning);
    if (!tls.ok()) return tls.status();
    server->tls_ = *std::move(tls);
    std::unique_ptr<TokenVerifier> verifier;
    if (tokens.wanted()) {
      auto opened = TokenVerifier::Open(tokens, on_warning);
      if (!opened.ok()) return opened.status();
      verifier = *std::move(opened);
    }
    server->authorizer_ = std::make_shared<Authorizer>(server->tls_->identity(),
                                                       std::move(verifier), std::move(on_warning));
  } else if (!IsLoopback(address).value_or(false)) {
    server->plain_text_warning_ =
        std::make_unique<PlainTextWarning>(address, std::move(on_warning));
  }
  return server;
}

std::shared_ptr<grpc::ServerCredentials> ServerSecurity::credentials() const {
  if (tls_ == nullptr) return grpc::InsecureServerCredentials();
  std::shared_ptr<grpc::ServerCredentials> credentials = tls_->ForServers();
  credentials->SetAuthMetadataProcessor(authorizer_);
  return credentials;
}

std::optional<absl::Time> ServerSecurity::valid_until() const {
  if (tls_ == nullptr) return std::nullopt;
  return tls_->valid_until();
}

}  // namespace signpost
