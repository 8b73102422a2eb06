#include "node/gpu_tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense_cuda.h"
#include "proto/frame.h"
#include "worker/page_vector.h"

namespace signpost::node {
namespace {

using Row = kernels::cuda::DecompressDenseSegment;

constexpr kernels::BlockRule kRule;

size_t PiecesOf(size_t elements) {
  return (elements + GpuTensors::kPieceElements - 1) / GpuTensors::kPieceElements;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuTensors>> GpuTensors::Create(
    kernels::cuda::Gpu& gpu, absl::Span<const Parameter> parameters, const SharedMemory& gradients,
    const SharedMemory& values) {
  absl::StatusOr<Memory> pinned_gradients = gpu.Pin(gradients.data(), gradients.bytes());
  absl::StatusOr<Memory> pinned_values = gpu.Pin(values.data(), values.bytes());
  absl::Status status = pinned_gradients.status();
  status.Update(pinned_values.status());
  if (absl::IsResourceExhausted(status)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(status.message(),
                     "; or join without SessionOptions::node (SIGNPOST_NODE), which pins little"));
  }
  if (!status.ok()) return status;
  std::unique_ptr<GpuTensors> tensors(new GpuTensors(
      gpu, parameters, SharedOn::kHost, *std::move(pinned_gradients), *std::move(pinned_values)));
  status = tensors->TakeMemory();
  if (!status.ok()) return status;
  return tensors;
}

absl::StatusOr<std::unique_ptr<GpuTensors>> GpuTensors::CreateBeside(
    kernels::cuda::Gpu& gpu, absl::Span<const Parameter> parameters, absl::string_view gradients,
    absl::string_view values) {
  absl::StatusOr<Memory> imported_gradients = gpu.Import(gradients);
  absl::StatusOr<Memory> imported_values = gpu.Import(values);
  absl::Status status = imported_gradients.status();
  status.Update(imported_values.status());
  if (absl::IsFailedPrecondition(status)) {
    return absl::FailedPreconditionError(absl::StrCat(
        status.message(),
        ", but the worker of this node is on one: start it without --gpu, and numbers go through "
        "the host's memory"));
  }
  if (!status.ok()) return status;
  std::unique_ptr<GpuTensors> tensors(new GpuTensors(gpu, parameters, SharedOn::kGpu,
                                                     *std::move(imported_gradients),
                                                     *std::move(imported_values)));
  status = tensors->TakeMemory();
  if (!status.ok()) return status;
  return tensors;
}

GpuTensors::GpuTensors(kernels::cuda::Gpu& gpu, absl::Span<const Parameter> parameters,
                       SharedOn shared_on, Memory gradients, Memory values)
    : Tensors(parameters, reinterpret_cast<float*>(gradients.get()),
              reinterpret_cast<float*>(values.get())),
      gpu_(gpu),
      shared_on_(shared_on),
      shared_gradients_(std::move(gradients)),
      shared_values_(std::move(values)) {}

absl::Status GpuTensors::TakeMemory() {
  size_t rows = 0, largest = 0;
  for (const Parameter& parameter : parameters_) {
    first_row_.push_back(rows);
    rows += PiecesOf(parameter.values.size());
    largest = std::max(largest, parameter.values.size());
  }
  const size_t widened = std::min(largest, kPieceElements) * sizeof(float);
  is_shared_.resize(parameters_.size());
  for (auto& event : is_shared_) {
    if (!Take(gpu_.NewEvent(), event)) return status_;
  }
  Take(gpu_.NewStream(), copies_) && Take(gpu_.NewEvent(), is_made_) &&
      Take(gpu_.NewEvent(), are_taken_) && Take(gpu_.NewEvent(), left_) &&
      Take(gpu_.Allocate(widened), widened_) && Take(gpu_.Allocate(rows * sizeof(Row)), rows_) &&
      Take(gpu_.AllocatePinned(rows * sizeof(Row)), pinned_rows_);
  return status_;
}

GpuTensors::~GpuTensors() {
  // Of what has failed nothing is waited for but what there is.
  if (are_taken_ != nullptr) Await().IgnoreError();
}

absl::Status GpuTensors::SetStream(kernels::cuda::Stream stream) {
  if (stream == stream_ || !status_.ok()) return absl::OkStatus();
  if (absl::Status status = gpu_.CheckIsOurs(stream); !status.ok()) return status;
  Do(gpu_.Record(left_.get(), stream_));
  Do(gpu_.Wait(stream, left_.get()));
  stream_ = stream;
  return absl::OkStatus();
}

absl::Status GpuTensors::Share(size_t tensor, const Gradient& gradient) {
  if (!status_.ok()) return status_;
  Do(gpu_.Record(is_made_.get(), stream_));
  Do(gpu_.Wait(copies_.get(), is_made_.get()));
  if (gradient.type == GradientType::kFloat32) {
    Do(CopyOut(SharedGradient(tensor), gradient.values, gradient.size));
  } else {
    CopyWidened(tensor, gradient);
  }
  Do(gpu_.Record(is_shared_[tensor].get(), copies_.get()));
  last_shared_ = tensor;
  return status_;
}

absl::StatusOr<bool> GpuTensors::IsShared(size_t tensor) {
  bool is_shared = false;
  if (status_.ok()) Take(gpu_.HasHappened(is_shared_[tensor].get()), is_shared);
  if (!status_.ok()) return status_;
  return is_shared;
}

absl::Status GpuTensors::AwaitShared(size_t tensor) {
  if (status_.ok()) Do(gpu_.Await(is_shared_[tensor].get()));
  return status_;
}

void GpuTensors::CopyWidened(size_t tensor, const Gradient& gradient) {
  const size_t count = PiecesOf(gradient.size), begin = first_row_[tensor] * sizeof(Row);
  auto* const widened = reinterpret_cast<float*>(widened_.get());
  const auto elements_of = [&](size_t piece) {
    return std::min(kPieceElements, gradient.size - piece * kPieceElements);
  };
  for (size_t piece = 0; piece < count; ++piece) {
    const Row row = {.compressed = static_cast<const uint8_t*>(gradient.values) +
                                   piece * kPieceElements * BytesOf(gradient.type),
                     .type = DenseTypeOf(gradient.type),
                     .values = widened,
                     .elements = static_cast<uint32_t>(elements_of(piece))};
    std::memcpy(pinned_rows_.get() + begin + piece * sizeof(Row), &row, sizeof(Row));
  }
  Do(gpu_.CopyIn(rows_.get() + begin, pinned_rows_.get() + begin, count * sizeof(Row),
                 copies_.get()));
  const auto* const rows = reinterpret_cast<const Row*>(rows_.get() + begin);
  float* to = SharedGradient(tensor);
  for (size_t piece = 0; piece < count; ++piece) {
    const size_t elements = elements_of(piece);
    const size_t blocks = kernels::BlockCount(elements, kRule.block_elements);
    Do(gpu_.DecompressDense(kRule, rows + piece, 1, static_cast<uint32_t>(blocks), copies_.get()));
    Do(CopyOut(to, widened, elements));
    to += elements;
  }
}

absl::Status GpuTensors::TakeParameters() {
  for (size_t i = 0; i < parameters_.size() && status_.ok(); ++i) {
    const absl::Span<float> values = parameters_[i].values;
    Do(CopyIn(values.data(), SharedValues(i), values.size()));
  }
  if (status_.ok()) Do(gpu_.Record(are_taken_.get(), stream_));
  return status_;
}

absl::Status GpuTensors::Await() {
  if (last_shared_) Do(gpu_.Await(is_shared_[*last_shared_].get()));
  Do(gpu_.Await(are_taken_.get()));
  return status_;
}

uint32_t GpuTensors::ParametersCrc32c() {
  uint32_t crc = 0;
  for (const Parameter& parameter : parameters_) {
    PageVector<float> copy(parameter.values.size());
    const size_t bytes = copy.size() * sizeof(float);
    if (status_.ok()) Do(gpu_.Read(copy.data(), parameter.values.data(), bytes, stream_));
    crc = Crc32c({reinterpret_cast<const uint8_t*>(copy.data()), bytes}, crc);
  }
  return crc;
}

}  // namespace signpost::node
