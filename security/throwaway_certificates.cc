#include "security/throwaway_certificates.h"

#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "security/certificate.h"
#include "security/tls_dir.h"

namespace signpost {
namespace {

constexpr absl::Duration kLifetime = absl::Hours(24 * 3650);

}  // namespace

absl::Status WriteThrowawayCertificates(const std::string& directory,
                                        std::initializer_list<PeerRole> roles) {
  const absl::StatusOr<Authority> authority = Authority::Make("Signpost throw-away", kLifetime);
  if (!authority.ok()) return authority.status();
  for (const PeerRole role : roles) {
    const auto files = authority->Issue({"signpost", role, std::nullopt}, kLifetime);
    if (!files.ok()) return files.status();
    absl::Status status = WriteTlsDir(ThrowawayTlsDir(directory, role), *files);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string ThrowawayTlsDir(const std::string& directory, PeerRole role) {
  return absl::StrCat(directory, "/", NameOf(role));
}

}  // namespace signpost
