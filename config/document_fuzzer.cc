// libFuzzer target: configuration files.

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/string_view.h"
#include "config/document.h"
#include "fuzzing/seeds.h"

namespace signpost {

std::vector<std::string> fuzzing::Seeds() {
  return {
      "job: nightly\naggregators: [a:1, b:2]\nfailure-timeout: 10s\n"
      "aggregator: {listen: \"0.0.0.0:4000\", shard: 0/2}\n",
      "{\"optimizer\": {\"type\": \"OneBitAdam\", \"params\": {\"lr\": 1e-3, \"betas\": [0.9, "
      "0.999]}},\n\"fp16\": {\"enabled\": true}}",
      "a: &x [1, *x]\nb: !!str 'c'\n? d\n: |\n  e\n  f\n"};
}

namespace {

void CheckNode(const config::Node& node, int depth) {
  ABSL_RAW_CHECK(depth <= config::Document::kMaxDepth + 1, "nothing is deeper than it may be");
  ABSL_RAW_CHECK(node.line >= 1, "lines count from 1");
  std::set<absl::string_view> keys;
  for (const config::Entry& entry : node.entries) {
    ABSL_RAW_CHECK(keys.insert(entry.key).second, "no key is there twice");
    CheckNode(entry.value, depth + 1);
  }
  for (const config::Node& item : node.items) CheckNode(item, depth + 1);
}

}  // namespace
}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::StatusOr<signpost::config::Document> document =
      signpost::config::Document::Parse("fuzz", {reinterpret_cast<const char*>(data), size});
  if (document.ok()) signpost::CheckNode(document->root, /*depth=*/1);
  return 0;
}
