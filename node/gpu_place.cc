#include "node/gpu_place.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense_cuda.h"
#include "node/host_place.h"
#include "worker/page_vector.h"

namespace signpost::node {
namespace {

using Row = kernels::cuda::AggregateDenseSegment;
using kernels::cuda::Gpu;
using kernels::cuda::Stream;

constexpr kernels::BlockRule kRule;

class GpuNumbers final : public Numbers {
 public:
  GpuNumbers(Gpu& gpu, Stream stream, kernels::cuda::ExportedMemory exported, size_t elements)
      : gpu_(gpu), stream_(stream), memory_(std::move(exported.memory)), elements_(elements) {
    handle_.set_bytes(elements * sizeof(float));
    handle_.set_on_gpu(exported.handle);
  }

  absl::Span<float> values() const override {
    return {reinterpret_cast<float*>(memory_.get()), elements_};
  }
  const Memory& handle() const override { return handle_; }
  absl::StatusOr<HostFloats> OnHost(size_t first, size_t count) const override {
    PageVector<float> copy(count);
    absl::Status status =
        gpu_.Read(copy.data(), values().data() + first, count * sizeof(float), stream_);
    if (!status.ok()) return status;
    return HostFloats(std::move(copy));
  }

 private:
  Gpu& gpu_;
  const Stream stream_;
  const kernels::cuda::Owned<uint8_t> memory_;
  const size_t elements_;
  Memory handle_;
};

}  // namespace

GpuPlace::GpuPlace(Gpu& gpu) : gpu_(gpu) {
  Take(gpu.NewStream(), stream_) && Take(gpu.NewEvent(), done_);
}

GpuPlace::~GpuPlace() {
  if (done_ != nullptr) Await().IgnoreError();
}

absl::StatusOr<std::unique_ptr<Numbers>> GpuPlace::NewNumbers(size_t elements) {
  if (done_ == nullptr) return status_;
  absl::StatusOr<kernels::cuda::ExportedMemory> exported =
      gpu_.AllocateExported(elements * sizeof(float));
  if (!exported.ok()) return exported.status();
  return std::make_unique<GpuNumbers>(gpu_, stream_.get(), *std::move(exported), elements);
}

absl::Status GpuPlace::Copy(const Numbers& from, const Numbers& to) {
  if (!status_.ok()) return status_;
  Do(gpu_.Copy(to.values().data(), from.values().data(), from.values().size() * sizeof(float),
               stream_.get()));
  return Await();
}

absl::Status GpuPlace::Prepare(const Layout& layout, size_t processes, uint32_t) {
  if (!status_.ok()) return status_;
  layout_ = &layout;
  first_row_.clear();
  // Before others take their place.
  mean_.reset();
  rows_.reset();
  gradients_.reset();
  new_gradients_.reset();
  std::vector<Row> rows;
  for (const Chunk& chunk : layout.chunks()) {
    first_row_.push_back(rows.size());
    rows.push_back({.first = chunk.first_element, .elements = chunk.elements});
    if (chunk.segments.size() == 1) continue;
    for (const Segment& segment : chunk.segments) {
      rows.push_back(
          {.first = chunk.first_element + segment.chunk_offset, .elements = segment.elements});
    }
  }
  const size_t rows_bytes = rows.size() * sizeof(Row);
  const size_t table_bytes = processes * sizeof(const float*);
  const bool is_there = Take(gpu_.Allocate(layout.elements() * sizeof(float)), mean_) &&
                        Take(gpu_.Allocate(rows_bytes), rows_) &&
                        Take(gpu_.Allocate(table_bytes), gradients_) &&
                        Take(gpu_.AllocatePinned(table_bytes), new_gradients_);
  if (!is_there) return status_;
  for (Row& row : rows) {
    row.contributions = reinterpret_cast<const float* const*>(gradients_.get());
    row.ranks = static_cast<uint32_t>(processes);
    row.inverse_count = 1.0f / static_cast<float>(processes);
    row.out = reinterpret_cast<float*>(mean_.get()) + row.first;
  }
  Do(gpu_.Write(rows_.get(), rows.data(), rows_bytes, stream_.get()));
  return status_;
}

absl::Status GpuPlace::BeginStep(Gradients gradients) {
  // All was waited for, so the GPU has read the table before.
  auto* const table = reinterpret_cast<const float**>(new_gradients_.get());
  for (size_t i = 0; i < gradients.size(); ++i) table[i] = gradients[i]->values().data();
  if (status_.ok()) {
    Do(gpu_.CopyIn(gradients_.get(), table, gradients.size() * sizeof(const float*),
                   stream_.get()));
  }
  return status_;
}

absl::Status GpuPlace::Average(uint32_t chunk, absl::Span<const Segment> segments) {
  const Chunk& whole = layout_->chunks()[chunk];
  const size_t row = first_row_[chunk];
  if (segments.size() == whole.segments.size()) return Average(row, whole.elements);
  for (const Segment& segment : segments) {
    const size_t number = &segment - whole.segments.data();
    if (!Average(row + 1 + number, segment.elements).ok()) break;
  }
  return status_;
}

absl::Status GpuPlace::Average(size_t row, size_t elements) {
  if (!status_.ok()) return status_;
  const size_t blocks = kernels::BlockCount(elements, kRule.block_elements);
  Do(gpu_.AggregateDense(kRule, reinterpret_cast<const Row*>(rows_.get()) + row, 1,
                         static_cast<uint32_t>(blocks), stream_.get()));
  return status_;
}

absl::Span<const float> GpuPlace::mean() const {
  return {reinterpret_cast<const float*>(mean_.get()), layout_->elements()};
}

absl::Status GpuPlace::Await() {
  // After a failure too: what came before it may not have come to its end.
  Do(gpu_.Record(done_.get(), stream_.get()));
  Do(gpu_.Await(done_.get()));
  return status_;
}

std::unique_ptr<Place> NewPlace(Gpu* gpu) {
  if (gpu == nullptr) return std::make_unique<HostPlace>();
  return std::make_unique<GpuPlace>(*gpu);
}

}  // namespace signpost::node
