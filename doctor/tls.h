// Certificates: this host's own, against its clock, and what a server shows.

#ifndef SIGNPOST_DOCTOR_TLS_H_
#define SIGNPOST_DOCTOR_TLS_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "doctor/report.h"
#include "security/certificate.h"
#include "security/transport_security.h"

namespace signpost::doctor {

// The TLS directory at the clock's `now`. Returns what is in it if it can be used.
std::optional<CertificateFacts> CheckTlsDir(const TransportSecurity& security, absl::Time now,
                                            Reporter& to);

struct ShownCertificate {
  std::string uri;       // the SPIFFE ID; empty: none
  std::string distrust;  // why no root vouches for it now, as OpenSSL says; empty: one does
  absl::Time valid_from, valid_until;
};

// Shakes hands with whoever listens at `address` (of a host, without a name) and looks at its
// certificate. SIGPIPE must be ignored. FAILED_PRECONDITION: it does not speak TLS. UNAVAILABLE:
// nothing comes.
absl::StatusOr<ShownCertificate> LookAtCertificate(const std::string& address,
                                                   const std::string& port, const TlsFiles& own,
                                                   absl::Duration timeout);

// Why a call to `host` failed with `error`, if certificates have to do with it; returns whether
// they have. `address` is what its name stands for. `role`: whether it must be an aggregator.
enum class Wanted { kAggregator, kMember };
bool ExplainByTls(const std::string& host, const std::string& address, const std::string& error,
                  const TransportSecurity& security, Wanted wanted, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_TLS_H_
