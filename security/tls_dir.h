// A TLS directory: ca.crt, tls.crt and tls.key, named as in a Kubernetes secret of cert-manager.

#ifndef SIGNPOST_SECURITY_TLS_DIR_H_
#define SIGNPOST_SECURITY_TLS_DIR_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "security/certificate.h"

namespace signpost {

// As the files are: CheckTlsFiles has not looked at them. NOT_FOUND for one that is not there, and
// PERMISSION_DENIED for one that may not be read, with its path; INVALID_ARGUMENT for one of more
// than a mebibyte, or that is no regular file.
absl::StatusOr<TlsFiles> ReadTlsDir(const std::string& directory);

// For its owner only, if it is not there. UNAVAILABLE, with the path and the reason, when it cannot
// be made, or when others may write there.
absl::Status MakePrivateDirectory(const std::string& directory);

// Makes the directory, as above; each file comes whole, in the place
// of the one before. UNAVAILABLE, with the path and the reason, when it cannot be written.
absl::Status WriteTlsDir(const std::string& directory, const TlsFiles& files);

// A file that only its owner may read, whole. Errors as WriteTlsDir's.
absl::Status WritePrivateFile(const std::string& path, absl::string_view contents);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_TLS_DIR_H_
