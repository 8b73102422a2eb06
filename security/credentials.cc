#include "security/credentials.h"

#include <fcntl.h>
#include <grpc/grpc_security_constants.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_certificate_verifier.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "proto/steady_time.h"
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

absl::Status MemoryError(int error = errno) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no file in memory for certificates: ", std::strerror(error)));
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

// Descriptors that gRPC's watchers may still read by path, since it lets go of them when it likes,
// and ends the process when it finds nothing there. They are closed when nobody can be reading
// them.
class RetiredFiles {
 public:
  static RetiredFiles& All() {
    static RetiredFiles& files = *new RetiredFiles;
    return files;
  }

  void Add(int fd) {
    absl::MutexLock lock(&mutex_);
    retired_.emplace_back(SteadyNow(), fd);
    while (SteadyNow() - retired_.front().first > kRetirement) {
      close(retired_.front().second);
      retired_.pop_front();
    }
  }

 private:
  absl::Mutex mutex_;
  std::deque<std::pair<absl::Time, int>> retired_ ABSL_GUARDED_BY(mutex_);  // oldest first
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
  Files() : pair_(OpenMemoryFile()), roots_(OpenMemoryFile()) {
    if (pair_ < 0 || roots_ < 0) open_error_ = errno;
  }
  ~Files() {
    provider_.reset();
    for (const int fd : {pair_, roots_}) RetiredFiles::All().Add(fd);
  }

  // Errors leave what was there before. Roots change an instant before the pair.
  absl::Status Set(const TlsFiles& files) {
    if (files == current_) return absl::OkStatus();
    const int64_t version = version_ + 1;
    if (open_error_ != 0) return MemoryError(open_error_);
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

  // After the first Set.
  void Provide() {
    provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        PathOf(pair_), PathOf(pair_), PathOf(roots_), kGrpcLookSeconds);
  }

  const TlsFiles& current() const { return current_; }

  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider() const {
    return provider_;
  }

 private:
  const int pair_, roots_;
  int open_error_ = 0;  // why they could not be opened
  int64_t version_ = 0;
  TlsFiles current_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

absl::StatusOr<std::shared_ptr<TlsCredentials>> TlsCredentials::Load(const std::string& directory,
                                                                     OnWarning on_warning) {
  absl::StatusOr<TlsFiles> files = ReadTlsDir(directory);
  if (!files.ok()) return files.status();
  const absl::StatusOr<CertificateFacts> facts = CheckTlsFiles(*files, absl::Now());
  if (!facts.ok()) {
    return absl::Status(facts.status().code(),
                        absl::StrCat("TLS directory ", directory, ": ", facts.status().message()));
  }
  std::shared_ptr<TlsCredentials> credentials(
      new TlsCredentials(directory, *files, *facts, std::move(on_warning)));
  if (absl::Status status = credentials->files_->Set(*files); !status.ok()) return status;
  credentials->files_->Provide();
  credentials->thread_ = std::thread([self = credentials.get()] { self->Watch(); });
  return credentials;
}

TlsCredentials::TlsCredentials(std::string directory, const TlsFiles& files,
                               const CertificateFacts& facts, OnWarning on_warning)
    : directory_(std::move(directory)),
      identity_(facts.identity),
      on_warning_(std::move(on_warning)),
      files_(std::make_unique<Files>()),
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
