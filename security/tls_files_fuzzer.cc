// libFuzzer target: the files of a TLS directory. Keys are new in each process, so an input is a
// change of good files rather than files.
//
//   input = part (uint8: 0 roots, 1 certificate, 2 key) rest
//   rest  = "!" bytes, which are the part; or (place (uint16) byte)*, which are changes of it

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "fuzzing/seeds.h"
#include "security/certificate.h"

namespace signpost {

std::vector<std::string> fuzzing::Seeds() {
  std::vector<std::string> seeds;
  for (const char part : {'\0', '\1', '\2'}) {
    seeds.push_back(std::string(1, part));
    seeds.push_back(std::string(1, part) + std::string("\x40\x00M", 3));
    seeds.push_back(std::string(1, part) + "!-----BEGIN CERTIFICATE-----\nMIIB\n");
  }
  return seeds;
}

namespace {

const TlsFiles& GoodFiles() {
  static const TlsFiles* const files =
      new TlsFiles(*Authority::Make("Fuzzed", absl::Hours(24))
                        ->Issue({"signpost", PeerRole::kAggregator, "a"}, absl::Hours(1)));
  return *files;
}

std::string Changed(std::string text, absl::string_view changes) {
  if (absl::ConsumePrefix(&changes, "!")) return std::string(changes);
  for (; changes.size() >= 3; changes.remove_prefix(3)) {
    const size_t place = static_cast<uint8_t>(changes[0]) + 256 * static_cast<uint8_t>(changes[1]);
    text[place % text.size()] = changes[2];
  }
  return text;
}

// Neither roots nor keys come from peers, but all three are files that others write.
void TryFiles(absl::string_view input) {
  if (input.empty()) return;
  std::string TlsFiles::*const parts[] = {&TlsFiles::roots, &TlsFiles::certificate, &TlsFiles::key};
  TlsFiles files = GoodFiles();
  std::string& part = files.*parts[static_cast<uint8_t>(input[0]) % 3];
  part = Changed(part, input.substr(1));
  const absl::Time now = absl::Now();
  const absl::StatusOr<CertificateFacts> facts = CheckTlsFiles(files, now);
  ABSL_RAW_CHECK(facts.ok() || files != GoodFiles(), "good files are good");
  if (!facts.ok()) return;
  ABSL_RAW_CHECK(facts->identity.ToUri() == "spiffe://signpost/aggregator/a",
                 "nobody is who the authority did not say");
  ABSL_RAW_CHECK(facts->valid_from <= now && now < facts->valid_until, "and not for longer");
}

}  // namespace
}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  signpost::TryFiles({reinterpret_cast<const char*>(data), size});
  return 0;
}
