// libFuzzer target: what a training process tells the worker of its node, as it is checked there.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "fuzzing/seeds.h"
#include "node/definition.h"
#include "proto/node.pb.h"

namespace signpost::node {
namespace {

constexpr uint64_t kMaxParameters = 1 << 16;  // `signpost worker --max-parameters` here

std::string SeedOf(const OptimizerOptions& optimizer) {
  std::vector<float> values(20);
  const std::vector<Parameter> parameters = {
      {.name = "weight", .shape = {4, 4}, .values = absl::MakeSpan(values).first(16)},
      {.name = "bias", .shape = {4}, .values = absl::MakeSpan(values).last(4), .group = 1}};
  SessionOptions session;
  session.worker.min_workers = 2;
  session.worker.round_deadline = absl::Seconds(3);
  return DefinitionOf(session, optimizer, parameters).SerializeAsString();
}

void CheckTensors(const Definition& definition, const Layout& layout) {
  std::vector<float> values(layout.elements());
  size_t elements = 0;
  for (const Parameter& parameter : ParametersOf(definition, absl::MakeSpan(values))) {
    ABSL_RAW_CHECK(parameter.values.data() == values.data() + elements, "one behind the other");
    elements += parameter.values.size();
  }
  ABSL_RAW_CHECK(elements == values.size(), "they fill their memory");
}

void CheckOptionsOf(const Definition& definition) {
  const OptimizerOptions optimizer = OptimizerOptionsOf(definition.options());
  if (!CheckOptions(optimizer).ok()) return;
  SessionOptions session;
  SetWorkerOptions(definition.options(), session.worker);
  const OptimizerOptions again = OptimizerOptionsOf(DefinitionOf(session, optimizer, {}).options());
  ABSL_RAW_CHECK(DescribeOptions(again) == DescribeOptions(optimizer), "options come through");
}

void TryDefinition(absl::string_view bytes) {
  Definition definition;
  if (!definition.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  CheckOptionsOf(definition);
  const absl::StatusOr<Layout> layout = LayOut(definition);
  if (!layout.ok()) return;
  if (layout->elements() <= kMaxParameters) CheckTensors(definition, *layout);
  // Numbers that are none are unlike themselves, which is for the worker to refuse too.
  if (CheckOptions(OptimizerOptionsOf(definition.options())).ok()) {
    ABSL_RAW_CHECK(CheckSame(definition, definition, *layout).ok(), "the same is the same");
  }
  Definition other = definition;
  other.mutable_tensors(0)->mutable_name()->append("2");
  ABSL_RAW_CHECK(!CheckSame(other, definition, *layout).ok(), "another tensor is told apart");
}

}  // namespace
}  // namespace signpost::node

namespace signpost {

std::vector<std::string> fuzzing::Seeds() {
  OptimizerOptions lamb = {.freeze_step = 9};
  lamb.lamb.emplace();
  OptimizerOptions zero_one = {.freeze_step = 9};
  zero_one.zero_one.emplace();
  return {node::SeedOf({.freeze_step = 7, .warm_up_codec = INT8}), node::SeedOf(lamb),
          node::SeedOf(zero_one)};
}

}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  signpost::node::TryDefinition({reinterpret_cast<const char*>(data), size});
  return 0;
}
