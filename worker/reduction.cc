#include "worker/reduction.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/codec.h"
#include "worker/gpu_reduction_state.h"
#include "worker/host_reduction_state.h"

namespace signpost {
namespace {

std::unique_ptr<ReductionState> NewState(const Layout& layout, Codec codec, uint32_t threads,
                                         kernels::cuda::Gpu* gpu) {
  if (gpu == nullptr) return std::make_unique<HostReductionState>(layout, codec, threads);
  return std::make_unique<GpuReductionState>(layout, codec, threads, *gpu);
}

}  // namespace

absl::Status CheckOptions(const ReductionOptions& options) {
  // Sums beyond its range would wait in errors for ever.
  if (options.sum && options.codec == FLOAT16) {
    return absl::InvalidArgumentError(
        "the codec of a reduction is fp16, which has no room for sums");
  }
  return CheckCodecOption("the codec of a reduction", options.codec);
}

std::string DescribeOptions(const ReductionOptions& options) {
  return absl::StrCat("reduction codec=", CodecName(options.codec));
}

Reduction::Reduction(const Layout& layout, const ReductionOptions& options, uint32_t threads,
                     kernels::cuda::Gpu* gpu)
    : layout_(layout),
      codec_(options.codec),
      state_(NewState(layout, options.codec, threads, gpu)) {}

void Reduction::SetResults(absl::Span<const absl::Span<float>> results) {
  results_.assign(results.begin(), results.end());
}

void Reduction::Apply(uint32_t chunk, Answer answer) {
  if (!results_.empty()) state_->Decompress(chunk, answer.payload, results_);
}

void Reduction::TakeBack(uint32_t chunk, const uint8_t* payload) {
  if (payload != nullptr) KeepInput(chunk, payload);
  if (!results_.empty()) state_->SetToNan(chunk, results_);
}

void Reduction::KeepInput(uint32_t chunk, const uint8_t* payload) {
  if (!Loses(codec_)) return;
  const Chunk& at = layout_.chunks()[chunk];
  const NumberCodec& codec = NumberCodecOf(codec_, layout_);
  std::vector<Addition> packed;
  ForEachBlock(at, layout_.options().block_elements(), [&](const Segment& block) {
    if (codec.IsPacked(at, block, payload)) packed.push_back({block, /*factor=*/1});
  });
  state_->AddToError(chunk, payload, packed);
}

Payload Reduction::State(uint32_t chunk) const {
  Payload state(layout_.PayloadBytes(STATE, chunk));
  std::memset(state.data(), 0, state.size());
  return state;
}

}  // namespace signpost
