#include "security/credentials.h"

#include <fcntl.h>
#include <grpc/grpc_security_constants.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_certificate_verifier.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "security/peer.h"
#include "security/tls_dir.h"

namespace signpost {
namespace {

constexpr absl::Duration kLookInterval = absl::Seconds(1);
constexpr unsigned int kGrpcLookSeconds = 1;  // the least it takes
constexpr absl::Duration kExpiryWarningInterval = absl::Hours(1);
// How long gRPC may go on with credentials that nobody has any more.
constexpr absl::Duration kRetirement = absl::Minutes(5);

// Judges servers for those who connect to them. gRPC has verified the chain.
class ServerVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  ServerVerifier(Identity own, TlsCredentials::To to, std::string job)
      : own_(std::move(own)), to_(to), job_(std::move(job)) {}

  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request,
              std::function<void(grpc::Status)>, grpc::Status* sync_status) override {
    const absl::Status status = to_ == TlsCredentials::To::kAggregators
                                    ? CheckAggregator(request->uri_names(), own_, job_)
                                    : IdentityOfPeer(request->uri_names(), own_).status();
    *sync_status = status.ok() ? grpc::Status::OK
                               : grpc::Status(grpc::StatusCode::UNAUTHENTICATED,
                                              std::string(status.message()));
    return true;
  }

  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest*) override {}

 private:
  const Identity own_;
  const TlsCredentials::To to_;
  const std::string job_;
};

// For gRPC's watcher, which reads them by path as often as it likes.
int OpenMemoryFile() { return memfd_create("signpost-tls", MFD_CLOEXEC); }

absl::Status MemoryError() {
  return absl::ResourceExhaustedError(
      absl::StrCat("no file in memory for certificates: ", std::strerror(errno)));
}

absl::Status WriteMemoryFile(int fd, const std::string& contents, int64_t version) {
  const timespec time = {version, 0};
  const timespec times[2] = {time, time};
  if (write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size()) &&
      futimens(fd, times) == 0) {
    return absl::OkStatus();
  }
  return MemoryError();
}

// What gRPC's watchers may still read by path, since they let go of it when they like, and end the
// process when they find nothing there. The descriptors are closed when nobody can be reading them,
// or the next credentials of the same files take them: a process may join and leave many jobs.
class RetiredFiles {
 public:
  struct Pair {
    int pair, roots;
    int64_t version;
    TlsFiles files;
  };

  static RetiredFiles& All() {
    static RetiredFiles& files = *new RetiredFiles;
    return files;
  }

  void Add(Pair pair) {
    absl::MutexLock lock(&mutex_);
    retired_.emplace_back(SteadyNow(), std::move(pair));
    while (SteadyNow() - retired_.front().first > kRetirement) {
      close(retired_.front().second.pair);
      close(retired_.front().second.roots);
      retired_.pop_front();
    }
  }

  std::optional<Pair> Take(const TlsFiles& files) {
    absl::MutexLock lock(&mutex_);
    const auto found = std::find_if(retired_.begin(), retired_.end(), [&](const auto& retired) {
      return retired.second.files == files;
    });
    if (found == retired_.end()) return std::nullopt;
    Pair taken = std::move(found->second);
    retired_.erase(found);
    return taken;
  }

 private:
  absl::Mutex mutex_;
  std::deque<std::pair<absl::Time, Pair>> retired_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

std::string PathOf(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

}  // namespace

// What gRPC's own watcher reads. It takes whatever it finds, half a file or a key without its
// certificate included, so it is not shown the directory but copies in memory, which change from
// one version to the next in one instant: a new file takes the place of the old one's descriptor.
// It reads key and certificate one after the other, and both again if a file's time has changed
// meanwhile; so both are in one file, whose time is its version.
class TlsCredentials::Files {
 public:
  static absl::StatusOr<std::unique_ptr<Files>> Open(const TlsFiles& files) {
    if (auto taken = RetiredFiles::All().Take(files)) {
      return absl::WrapUnique(new Files(*std::move(taken)));
    }
    const int pair = OpenMemoryFile();
    const int roots = pair < 0 ? -1 : OpenMemoryFile();
    if (roots < 0) {
      const absl::Status status = MemoryError();
      close(pair);
      return status;
    }
    auto opened = absl::WrapUnique(new Files({.pair = pair, .roots = roots}));
    if (absl::Status status = opened->Set(files); !status.ok()) return status;
    return opened;
  }
  ~Files() {
    provider_.reset();
    RetiredFiles::All().Add({pair_, roots_, version_, std::move(current_)});
  }

  // Errors leave what was there before. Roots change an instant before the pair.
  absl::Status Set(const TlsFiles& files) {
    if (files == current_) return absl::OkStatus();
    const int64_t version = version_ + 1;
    const int roots = OpenMemoryFile();
    const int pair = roots < 0 ? -1 : OpenMemoryFile();
    if (pair < 0) {
      const absl::Status status = MemoryError();
      close(roots);
      return status;
    }
    absl::Status status = WriteMemoryFile(roots, files.roots, version);
    status.Update(WriteMemoryFile(pair, absl::StrCat(files.key, "\n", files.certificate), version));
    if (status.ok() && (dup3(roots, roots_, O_CLOEXEC) < 0 || dup3(pair, pair_, O_CLOEXEC) < 0)) {
      status = MemoryError();
    }
    close(roots);
    close(pair);
    if (!status.ok()) return status;
    version_ = version;
    current_ = files;
    return absl::OkStatus();
  }

  void Provide() {
    provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        PathOf(pair_), PathOf(pair_), PathOf(roots_), kGrpcLookSeconds);
  }

  const TlsFiles& current() const { return current_; }

  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider() const {
    return provider_;
  }

 private:
  explicit Files(RetiredFiles::Pair pair)
      : pair_(pair.pair),
        roots_(pair.roots),
        version_(pair.version),
        current_(std::move(pair.files)) {}

  const int pair_, roots_;
  int64_t version_;
  TlsFiles current_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

absl::StatusOr<std::shared_ptr<TlsCredentials>> TlsCredentials::Load(const std::string& directory,
                                                                     OnWarning on_warning) {
  absl::StatusOr<TlsFiles> files = ReadTlsDir(directory);
  if (!files.ok()) return files.status();
  const absl::StatusOr<CertificateFacts> facts = CheckTlsFiles(*files, absl::Now());
  if (!facts.ok()) {
    return WithMessage(facts.status(),
                       absl::StrCat("TLS directory ", directory, ": ", facts.status().message()));
  }
  absl::StatusOr<std::unique_ptr<Files>> in_memory = Files::Open(*files);
  if (!in_memory.ok()) return in_memory.status();
  std::shared_ptr<TlsCredentials> credentials(
      new TlsCredentials(directory, *std::move(in_memory), *facts, std::move(on_warning)));
  credentials->files_->Provide();
  credentials->thread_ = std::thread([self = credentials.get()] { self->Watch(); });
  return credentials;
}

TlsCredentials::TlsCredentials(std::string directory, std::unique_ptr<Files> files,
                               const CertificateFacts& facts, OnWarning on_warning)
    : directory_(std::move(directory)),
      identity_(facts.identity),
      on_warning_(std::move(on_warning)),
      files_(std::move(files)),
      facts_(facts) {}

TlsCredentials::~TlsCredentials() {
  stop_.Notify();
  if (thread_.joinable()) thread_.join();
}

absl::Time TlsCredentials::valid_until() const {
  absl::MutexLock lock(&mutex_);
  return facts_.valid_until;
}

void TlsCredentials::Watch() {
  do {
    Look(absl::Now());
    WarnOfExpiry(absl::Now());
  } while (!stop_.WaitForNotificationWithTimeout(kLookInterval));
}

void TlsCredentials::Look(absl::Time now) {
  absl::StatusOr<TlsFiles> files = ReadTlsDir(directory_);
  if (files.ok() && *files == files_->current()) {
    last_error_.clear();
    told_error_.clear();
    return;
  }
  absl::StatusOr<CertificateFacts> facts = files.ok() ? CheckTlsFiles(*files, now) : files.status();
  absl::Status status = facts.status();
  if (status.ok() && facts->identity.ToUri() != identity_.ToUri()) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "the certificate is now of ", facts->identity.ToUri(), ", and was of ", identity_.ToUri()));
  }
  if (status.ok()) status = files_->Set(*files);
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    facts_ = *facts;
  }
  // The first time it may be half of a change that is under way.
  const std::string error(status.message());
  if (error == std::exchange(last_error_, error) && error != told_error_) {
    told_error_ = error;
    if (!status.ok()) {
      on_warning_(absl::StrCat("TLS directory ", directory_, ": ", error,
                               "; the certificate from before stays in use"));
    }
  }
}

void TlsCredentials::WarnOfExpiry(absl::Time now) {
  absl::Duration left;
  bool is_near;
  {
    absl::MutexLock lock(&mutex_);
    left = facts_.valid_until - now;
    is_near = facts_.IsNearItsEnd(now);
  }
  if (!is_near || now < next_expiry_warning_) return;
  next_expiry_warning_ = now + kExpiryWarningInterval;
  on_warning_(absl::StrCat(
      "TLS directory ", directory_, ": the certificate ",
      left > absl::ZeroDuration()
          ? absl::StrCat("is valid for another ",
                         absl::FormatDuration(absl::Trunc(left, absl::Seconds(1))), " only")
          : "is no longer valid",
      "; a new one in its place is used without a restart (`signpost cert issue`)"));
}

std::shared_ptr<grpc::ChannelCredentials> TlsCredentials::ForChannels(
    To to, const std::string& job) const {
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(files_->provider());
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_verify_server_certs(true);
  options.set_check_call_host(false);
  options.set_certificate_verifier(
      grpc::experimental::ExternalCertificateVerifier::Create<ServerVerifier>(identity_, to, job));
  return grpc::experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::ServerCredentials> TlsCredentials::ForServers() const {
  grpc::experimental::TlsServerCredentialsOptions options(files_->provider());
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.set_check_call_host(false);
  // The chain has been verified by then, and what remains depends on the call.
  options.set_certificate_verifier(std::make_shared<grpc::experimental::NoOpCertificateVerifier>());
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace signpost
