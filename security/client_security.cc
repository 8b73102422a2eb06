#include "security/client_security.h"

#include <utility>

#include "security/loopback.h"

namespace signpost {

absl::StatusOr<std::shared_ptr<const ClientSecurity>> ClientSecurity::Open(
    const TransportSecurity& security, const std::vector<std::string>& targets,
    TlsCredentials::OnWarning on_warning) {
  auto client = std::make_shared<ClientSecurity>();
  std::string exposed;
  for (const std::string& target : targets) {
    if (absl::Status status = CheckTransport(target, security); !status.ok()) return status;
    if (exposed.empty() && !IsLoopback(target).value_or(false)) exposed = target;
  }
  if (!security.tls_dir.empty()) {
    auto tls = TlsCredentials::Load(security.tls_dir, std::move(on_warning));
    if (!tls.ok()) return tls.status();
    client->tls_ = *std::move(tls);
  } else if (!exposed.empty()) {
    client->plain_text_warning_ =
        std::make_unique<PlainTextWarning>(exposed, std::move(on_warning));
  }
  return client;
}

std::shared_ptr<grpc::ChannelCredentials> ClientSecurity::credentials(TlsCredentials::To to) const {
  return tls_ == nullptr ? grpc::InsecureChannelCredentials() : tls_->ForChannels(to);
}

}  // namespace signpost
