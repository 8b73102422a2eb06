#include "node/host_place.h"

#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/dense.h"
#include "node/shared_memory.h"

namespace signpost::node {
namespace {

class HostNumbers final : public Numbers {
 public:
  explicit HostNumbers(std::unique_ptr<SharedMemory> memory)
      : memory_(std::move(memory)), handle_(memory_->handle()) {}

  absl::Span<float> values() const override { return memory_->floats(); }
  const Memory& handle() const override { return handle_; }
  absl::StatusOr<HostFloats> OnHost(size_t first, size_t count) const override {
    return HostFloats(values().subspan(first, count));
  }

 private:
  const std::unique_ptr<SharedMemory> memory_;
  const Memory handle_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Numbers>> HostPlace::NewNumbers(size_t elements) {
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory =
      SharedMemory::Create(elements * sizeof(float));
  if (!memory.ok()) return memory.status();
  return std::make_unique<HostNumbers>(*std::move(memory));
}

absl::Status HostPlace::Copy(const Numbers& from, const Numbers& to) {
  std::memcpy(to.values().data(), from.values().data(), from.values().size() * sizeof(float));
  return absl::OkStatus();
}

absl::Status HostPlace::Prepare(const Layout& layout, size_t, uint32_t threads) {
  layout_ = &layout;
  crew_.emplace(layout, threads);
  mean_.resize(layout.elements());
  return absl::OkStatus();
}

absl::Status HostPlace::BeginStep(Gradients gradients) {
  gradients_.clear();
  for (const Numbers* gradient : gradients) gradients_.push_back(gradient->values().data());
  return absl::OkStatus();
}

absl::Status HostPlace::Average(uint32_t chunk, absl::Span<const Segment> segments) {
  const float inverse = 1.0f / static_cast<float>(gradients_.size());
  const uint64_t first = layout_->chunks()[chunk].first_element;
  crew_->ForEachPart(chunk, [&](const Segment& part) {
    if (part.tensor < segments.front().tensor || part.tensor > segments.back().tensor) return;
    const uint64_t begin = first + part.chunk_offset;
    std::vector<const uint8_t*> of_processes;
    for (const float* gradient : gradients_) {
      of_processes.push_back(reinterpret_cast<const uint8_t*>(gradient + begin));
    }
    kernels::AggregateDense(kernels::DenseType::kFloat32, of_processes, part.elements, inverse,
                            /*error=*/{}, reinterpret_cast<uint8_t*>(mean_.data() + begin));
  });
  return absl::OkStatus();
}

}  // namespace signpost::node
