// libFuzzer target: identities, as a peer's certificate has them.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "fuzzing/seeds.h"
#include "security/identity.h"

namespace signpost {

std::vector<std::string> fuzzing::Seeds() {
  return {"spiffe://signpost/worker", "spiffe://a.b-c_d/aggregator/job.1", "spiffe://s/observer/J",
          "spiffe://signpost/admin/.."};
}

namespace {

void TryIdentity(absl::string_view uri) {
  const absl::StatusOr<Identity> identity = Identity::Parse(uri);
  if (!identity.ok()) return;
  ABSL_RAW_CHECK(identity->Check().ok(), "what is parsed can be issued");
  ABSL_RAW_CHECK(identity->ToUri() == uri, "an identity has one spelling");
  if (!identity->job.has_value()) return;
  ABSL_RAW_CHECK(identity->Covers(*identity->job), "it covers its job");
  ABSL_RAW_CHECK(identity->Covers(absl::StrCat(*identity->job, "/norms")), "and its reductions");
  ABSL_RAW_CHECK(!identity->Covers(absl::StrCat(*identity->job, "2")), "and no other");
}

}  // namespace
}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  signpost::TryIdentity({reinterpret_cast<const char*>(data), size});
  return 0;
}
