// Certificates and keys in PEM: what is in them, and an authority that makes them.

#ifndef SIGNPOST_SECURITY_CERTIFICATE_H_
#define SIGNPOST_SECURITY_CERTIFICATE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "security/identity.h"

namespace signpost {

// What a process shows its peers, and what it judges theirs by.
struct TlsFiles {
  std::string roots;        // certificates of authorities
  std::string certificate;  // its own first, then those between it and a root
  std::string key;          // of the first one, not encrypted

  bool operator==(const TlsFiles&) const = default;
};

// What the first certificate says.
struct CertificateFacts {
  Identity identity;
  absl::Time valid_from, valid_until;

  // Less than a fifth of its time is left: it is to be warned of.
  bool IsNearItsEnd(absl::Time now) const {
    return 5 * (valid_until - now) <= valid_until - valid_from;
  }
};

// Checks at `now` all that the other side would, and that the three belong together.
// INVALID_ARGUMENT says which part is not PEM, which key is another certificate's, what no root
// vouches for, what use is not allowed, or why there is no identity in it; FAILED_PRECONDITION that
// it, or its authority's, is not valid yet, or no longer, which is to be tried again.
absl::StatusOr<CertificateFacts> CheckTlsFiles(const TlsFiles& files, absl::Time now);

// Whose the first certificate of these in PEM is; whether it is good for anything is not looked at.
// INVALID_ARGUMENT when there is none, or no identity in it.
absl::StatusOr<Identity> IdentityIn(const std::string& certificates);

// Makes certificates, with P-256 keys. The authority's own certificate may sign no other authority.
class Authority {
 public:
  // A new one. INTERNAL when OpenSSL cannot.
  static absl::StatusOr<Authority> Make(absl::string_view name, absl::Duration lifetime);
  // From PEM. INVALID_ARGUMENT when it is none, or the two do not belong together.
  static absl::StatusOr<Authority> Load(const std::string& certificate, const std::string& key);

  Authority(Authority&&);
  Authority& operator=(Authority&&);
  ~Authority();

  const std::string& certificate() const { return certificate_; }
  const std::string& key() const { return key_; }

  // Valid from a little before now, since clocks differ, for as client and server, until the
  // authority itself is no longer valid at most. INVALID_ARGUMENT as Identity::Check, or when it
  // is not valid any more.
  absl::StatusOr<TlsFiles> Issue(const Identity& identity, absl::Duration lifetime) const;

 private:
  struct Parsed;
  Authority(std::string certificate, std::string key, std::unique_ptr<Parsed> parsed);

  std::string certificate_, key_;
  std::unique_ptr<Parsed> parsed_;
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_CERTIFICATE_H_
