// Certificates for processes that one program starts, and that nobody else has to know.

#ifndef SIGNPOST_SECURITY_THROWAWAY_CERTIFICATES_H_
#define SIGNPOST_SECURITY_THROWAWAY_CERTIFICATES_H_

#include <initializer_list>
#include <string>

#include "absl/status/status.h"
#include "security/identity.h"

namespace signpost {

// Writes a TLS directory for each role, of every job: ThrowawayTlsDir(directory, role). The
// authority is new, and nobody ever sees its key; what it has issued outlives any run. Errors as
// WriteTlsDir's, and INTERNAL when OpenSSL cannot.
absl::Status WriteThrowawayCertificates(const std::string& directory,
                                        std::initializer_list<PeerRole> roles);

std::string ThrowawayTlsDir(const std::string& directory, PeerRole role);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_THROWAWAY_CERTIFICATES_H_
