#include "worker/open_step.h"

#include "absl/algorithm/container.h"

namespace signpost {

OpenStep::OpenStep(const Layout& layout, uint32_t window)
    : queue(layout.chunks().size(), window),
      layout_(layout),
      gradients_(layout.tensors().size()),
      has_gradient_(layout.tensors().size()),
      gradients_missing_(layout.tensors().size()) {
  segments_missing_.reserve(layout.chunks().size());
  for (const Chunk& chunk : layout.chunks()) segments_missing_.push_back(chunk.segments.size());
}

void OpenStep::AddGradient(size_t tensor, Gradient gradient) {
  gradients_[tensor] = gradient;
  has_gradient_[tensor] = true;
  --gradients_missing_;
  const auto [first, end] = layout_.ChunksOf(tensor);
  for (uint32_t chunk = first; chunk < end; ++chunk) {
    if (--segments_missing_[chunk] == 0) queue.SetReady(chunk);
  }
}

size_t OpenStep::first_missing() const {
  return absl::c_find(has_gradient_, false) - has_gradient_.begin();
}

}  // namespace signpost
