// mTLS for gRPC, from a TLS directory that may change at any time.

#ifndef SIGNPOST_SECURITY_CREDENTIALS_H_
#define SIGNPOST_SECURITY_CREDENTIALS_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "security/certificate.h"

namespace signpost {

// Looks at the directory once a second. New files are used for connections that are made from then
// on, within three seconds, if they pass CheckTlsFiles and name the same identity; otherwise the
// ones before stay in use and a line says why. Connections that there are stay. Thread-safe.
//
// TLS 1.2 at least; both sides show a certificate that a root of the other vouches for.
class TlsCredentials {
 public:
  // Gets a line for a person: files that were not taken, a certificate with less than a fifth of
  // its time left (once an hour), or none. From a thread of its own.
  using OnWarning = std::function<void(const std::string& line)>;

  // Errors as ReadTlsDir's and CheckTlsFiles', with the directory.
  static absl::StatusOr<std::shared_ptr<TlsCredentials>> Load(const std::string& directory,
                                                              OnWarning on_warning);
  ~TlsCredentials();

  const Identity& identity() const { return identity_; }
  absl::Time valid_until() const ABSL_LOCKS_EXCLUDED(mutex_);

  // For connections to whom. Names of hosts are not looked at. Must not be used after this object.
  //
  // To aggregators: a server is one if its certificate has that role, this trust domain, and this
  // identity's job or all jobs; where this identity is of all, `job` is, unless it is empty. To
  // members: whoever is of this trust domain.
  enum class To { kAggregators, kMembers };
  std::shared_ptr<grpc::ChannelCredentials> ForChannels(To to, const std::string& job) const;

  // For servers that only talk to who has a certificate. What those may do is for an Authorizer.
  // Must not be used after this object.
  std::shared_ptr<grpc::ServerCredentials> ForServers() const;

 private:
  class Files;

  TlsCredentials(std::string directory, std::unique_ptr<Files> files, const CertificateFacts& facts,
                 OnWarning on_warning);

  void Watch();
  void Look(absl::Time now);
  void WarnOfExpiry(absl::Time now);

  const std::string directory_;
  const Identity identity_;
  const OnWarning on_warning_;
  const std::unique_ptr<Files> files_;

  // Of the thread.
  std::string last_error_, told_error_;
  absl::Time next_expiry_warning_ = absl::InfinitePast();

  mutable absl::Mutex mutex_;
  CertificateFacts facts_ ABSL_GUARDED_BY(mutex_);
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_CREDENTIALS_H_
