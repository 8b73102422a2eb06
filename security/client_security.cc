#include "security/client_security.h"

#include <utility>

#include "absl/status/status.h"
#include "grpcpp/create_channel.h"
#include "security/loopback.h"

namespace signpost {

absl::StatusOr<std::shared_ptr<const ClientSecurity>> ClientSecurity::Open(
    const TransportSecurity& security, const std::vector<std::string>& targets,
    TlsCredentials::OnWarning on_warning, const std::string& job) {
  auto client = std::make_shared<ClientSecurity>();
  client->job_ = job;
  std::string exposed;
  for (const std::string& target : targets) {
    if (absl::Status status = CheckTransport(target, security); !status.ok()) return status;
    if (exposed.empty() && !IsLoopback(target).value_or(false)) exposed = target;
  }
  if (!security.token_file.empty()) {
    auto token = TokenFile::Open(security.token_file, on_warning);
    if (!token.ok()) return token.status();
    client->token_ = *std::move(token);
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

std::string ClientSecurity::JobToAskAbout() const {
  return is_tls() ? identity().job.value_or("") : "";
}

std::shared_ptr<grpc::ChannelCredentials> ClientSecurity::CredentialsFor(
    const std::string& target, TlsCredentials::To to) const {
  if (tls_ == nullptr || IsUnixAddress(target)) return grpc::InsecureChannelCredentials();
  if (token_ == nullptr) return tls_->ForChannels(to, job_);
  return grpc::CompositeChannelCredentials(tls_->ForChannels(to, job_), CredentialsOf(token_));
}

std::shared_ptr<grpc::Channel> OpenChannel(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments) {
  const std::string target = GrpcTarget(address);
  // gRPC would take a list of numbers for a name.
  if (target != address) arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, address);
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

}  // namespace signpost
