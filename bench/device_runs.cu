// MeasureOnDevice of a build with CUDA.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/device_runs.h"
#include "kernels/adam_cuda.h"
#include "kernels/block.h"
#include "kernels/dense_cuda.h"
#include "kernels/device.h"
#include "kernels/formulas.h"
#include "kernels/lamb_cuda.h"
#include "kernels/momentum_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/quantized_cuda.h"
#include "kernels/sum_cuda.h"
#include "kernels/zero_one_cuda.h"

namespace signpost::bench {
namespace {

using kernels::BlockRule;
using kernels::DenseType;
using kernels::IntegerType;
using kernels::cuda::GradientType;

absl::Status StatusOf(cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat("CUDA: ", cudaGetErrorString(error));
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(absl::StrCat(
                                                  message, "; fewer --elements take less of it"))
                                            : absl::UnavailableError(message);
}

GradientType AsGradient(DenseType type) {
  switch (type) {
    case DenseType::kBfloat16:
      return GradientType::kBfloat16;
    case DenseType::kFloat16:
      return GradientType::kFloat16;
    case DenseType::kFloat32:
      break;
  }
  return GradientType::kFloat32;
}

// Numbers such as gradients are, and what arrays are filled with. Of bytes that are anything, many
// would be no numbers, which kernels treat apart.
class Pattern {
 public:
  Pattern() {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal(0, 1e-2f);
    for (float& value : values_) value = normal(engine);
    for (uint32_t& word : words_) word = engine();
  }

  std::vector<uint8_t> Values(GradientType type) const {
    const size_t size = type == GradientType::kFloat32 ? 4 : 2;
    std::vector<uint8_t> bytes(size * values_.size());
    for (size_t i = 0; i < values_.size(); ++i) {
      if (type == GradientType::kFloat32) {
        std::memcpy(&bytes[4 * i], &values_[i], 4);
        continue;
      }
      const uint16_t half = type == GradientType::kBfloat16
                                ? kernels::formulas::RoundToBfloat16(values_[i])
                                : kernels::formulas::RoundToFloat16(values_[i]);
      std::memcpy(&bytes[2 * i], &half, 2);
    }
    return bytes;
  }
  std::vector<uint8_t> PositiveValues() const {
    std::vector<float> positive = values_;
    for (float& value : positive) value = std::abs(value) + 1e-4f;
    return BytesOf(positive);
  }
  std::vector<uint8_t> Bits() const { return BytesOf(words_); }

 private:
  static constexpr size_t kCount = size_t{1} << 20;

  template <class T>
  static std::vector<uint8_t> BytesOf(const std::vector<T>& values) {
    std::vector<uint8_t> bytes(sizeof(T) * values.size());
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  std::vector<float> values_ = std::vector<float>(kCount);
  std::vector<uint32_t> words_ = std::vector<uint32_t>(kCount);
};

// Memory of the device, all zero.
class Memory {
 public:
  Memory() = default;
  ~Memory() { cudaFree(begin_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  absl::Status Take(size_t bytes) {
    if (cudaError_t error = cudaMalloc(&begin_, bytes); error != cudaSuccess) {
      return StatusOf(error);
    }
    bytes_ = bytes;
    return StatusOf(cudaMemset(begin_, 0, bytes));
  }

  // With these bytes, again and again.
  absl::Status Fill(const std::vector<uint8_t>& bytes) {
    size_t filled = std::min(bytes.size(), bytes_);
    cudaError_t error = cudaMemcpy(begin_, bytes.data(), filled, cudaMemcpyHostToDevice);
    while (filled < bytes_ && error == cudaSuccess) {
      const size_t more = std::min(filled, bytes_ - filled);
      error = cudaMemcpy(as<uint8_t>() + filled, begin_, more, cudaMemcpyDeviceToDevice);
      filled += more;
    }
    return StatusOf(error);
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(begin_);
  }

 private:
  void* begin_ = nullptr;
  size_t bytes_ = 0;
};

// Memory of the host that copies to the device need not wait for.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() { cudaFreeHost(begin_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  absl::Status Take(size_t bytes) { return StatusOf(cudaMallocHost(&begin_, bytes)); }
  uint8_t* data() const { return static_cast<uint8_t*>(begin_); }

 private:
  void* begin_ = nullptr;
};

// The seconds that the device takes for what `work` launches.
class Stopwatch {
 public:
  Stopwatch() {
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
  }
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  absl::StatusOr<double> SecondsOf(const std::function<absl::Status()>& work) {
    cudaEventRecord(begin_);
    if (absl::Status status = work(); !status.ok()) return status;
    cudaEventRecord(end_);
    if (cudaError_t error = cudaEventSynchronize(end_); error != cudaSuccess) {
      return StatusOf(error);
    }
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin_, end_);
    return milliseconds / 1e3;
  }

 private:
  cudaEvent_t begin_, end_;
};

class Device {
 public:
  Device(size_t elements, int rounds, uint32_t chunk_elements)
      : elements_(elements),
        blocks_(kernels::BlockCount(elements, kRule.block_elements)),
        chunk_elements_(chunk_elements),
        chunks_((elements + chunk_elements - 1) / chunk_elements),
        rounds_(rounds) {}

  absl::StatusOr<std::vector<DeviceRun>> Measure() {
    if (absl::Status status = TakeMemory(); !status.ok()) return status;
    const double bits = 1.0 / 8;
    for (const auto& [type, name, bytes] : {std::tuple(GradientType::kFloat32, "fp32", 4),
                                            {GradientType::kBfloat16, "bf16", 2},
                                            {GradientType::kFloat16, "fp16", 2}}) {
      kernels::cuda::CompressSegment compress = {.gradient = gradient_.as<void>(),
                                                 .type = type,
                                                 .error = error_.as<float>(),
                                                 .out = {scales_.as<float>(), bits_.as<uint8_t>()},
                                                 .rates = {},
                                                 .elements = static_cast<uint32_t>(elements_)};
      compress.momentum = {scales_of_momentum_.as<float>(), bits_of_momentum_.as<uint8_t>()};
      Run(absl::StrCat("compress, ", name, " gradient, one-bit momentum"), bytes + 8 + 2 * bits,
          compress, Compress(), {.gradient = type});
      if (type == GradientType::kFloat32) {
        RunInChunks("compress, fp32 gradient, one-bit momentum, in chunks", 12 + 2 * bits, compress,
                    Compress(), [](kernels::cuda::CompressSegment segment, size_t begin) {
                      segment.gradient = static_cast<const float*>(segment.gradient) + begin;
                      segment.error += begin;
                      segment.out = {segment.out.scales + begin / kRule.block_elements,
                                     segment.out.bits + begin / 8};
                      segment.momentum = PartOf(segment.momentum, begin);
                      return segment;
                    });
      }
      compress.momentum = {};
      compress.dense_momentum = momentum_.as<float>();
      Run(absl::StrCat("compress, ", name, " gradient, dense momentum"), bytes + 12 + bits,
          compress, Compress(), {.gradient = type});
    }
    const kernels::cuda::ApplySegment apply = {
        .momentum = {scales_of_momentum_.as<float>(), bits_of_momentum_.as<uint8_t>()},
        .inverse_denominator = variance_.as<float>(),
        .parameters = parameters_.as<float>(),
        .rates = {.learning_rate = 1e-3f},
        .elements = static_cast<uint32_t>(elements_)};
    Run("apply", 12 + bits, apply, Plain(kernels::cuda::ApplyMomentum));
    RunInChunks("apply, in chunks", 12 + bits, apply, Plain(kernels::cuda::ApplyMomentum),
                [](kernels::cuda::ApplySegment segment, size_t begin) {
                  segment.momentum = PartOf(segment.momentum, begin);
                  segment.inverse_denominator += begin;
                  segment.parameters += begin;
                  return segment;
                });
    for (const auto& [type, name, bytes] : {std::tuple(DenseType::kFloat32, "fp32", 4),
                                            {DenseType::kBfloat16, "bf16", 2},
                                            {DenseType::kFloat16, "fp16", 2}}) {
      const bool has_error = type != DenseType::kFloat32;
      Run(absl::StrCat("compress, ", name), 4 + bytes + (has_error ? 8 : 0),
          kernels::cuda::DenseSegment{.gradient = gradient_.as<void>(),
                                      .type = type,
                                      .error = has_error ? error_.as<float>() : nullptr,
                                      .out = momentum_.as<uint8_t>(),
                                      .elements = static_cast<uint32_t>(elements_)},
          [this](const auto* segment, uint32_t blocks) {
            return kernels::cuda::CompressDense(kRule, segment, 1, blocks,
                                                first_not_packed_.as<uint32_t>(), nullptr);
          });
      Run(absl::StrCat("Adam step, ", name), bytes + 24,
          kernels::cuda::AdamSegment<kernels::AdamRates>{
              .rates = {0.9f, 0.1f, 0.999f, 1e-3f, 1e-3f, 1, 1e-8f, 0},
              .gradient = gradient_.as<uint8_t>(),
              .type = type,
              .momentum = momentum_.as<float>(),
              .variance = variance_.as<float>(),
              .parameters = parameters_.as<float>(),
              .elements = static_cast<uint32_t>(elements_)},
          Plain(kernels::cuda::AdamStep), {.gradient = AsGradient(type)});
      Run(absl::StrCat("adaptive step, ", name), bytes + 24,
          kernels::cuda::AdaptiveSegment{
              .rates = {0.9f, 0.1f, 0.999f, 1e-3f, 1e-3f, 1, 1e-6f, 1e-8f, 0, true},
              .gradient = gradient_.as<uint8_t>(),
              .type = type,
              .momentum = momentum_.as<float>(),
              .variance = variance_.as<float>(),
              .parameters = parameters_.as<float>(),
              .elements = static_cast<uint32_t>(elements_)},
          Plain(kernels::cuda::AdaptiveStep), {.gradient = AsGradient(type)});
    }
    for (const auto& [type, name] :
         {std::pair(IntegerType::kInt8, "int8"), {IntegerType::kInt4, "int4"}}) {
      Run(absl::StrCat("compress, ", name), 12 + kernels::BitsOf(type) / 8.0,
          kernels::cuda::QuantizeSegment{.gradient = gradient_.as<void>(),
                                         .error = error_.as<float>(),
                                         .out = {scales_.as<float>(), momentum_.as<uint8_t>()},
                                         .type = type,
                                         .elements = static_cast<uint32_t>(elements_)},
          [this](const auto* segment, uint32_t blocks) {
            return kernels::cuda::CompressQuantized(kRule, segment, 1, blocks,
                                                    first_not_packed_.as<uint32_t>(), nullptr);
          });
    }
    for (const auto& [type, name, bytes] : {std::tuple(GradientType::kFloat32, "fp32", 4),
                                            {GradientType::kBfloat16, "bf16", 2},
                                            {GradientType::kFloat16, "fp16", 2}}) {
      Run(absl::StrCat("local step, ", name, " gradient"), bytes + 28,
          kernels::cuda::LocalSegment{.rates = {0.9f, 0.1f, 1e-3f, 0},
                                      .gradient = gradient_.as<void>(),
                                      .gradient_type = type,
                                      .momentum = momentum_.as<float>(),
                                      .accumulated = error_.as<float>(),
                                      .inverse_denominator = variance_.as<float>(),
                                      .parameters = parameters_.as<float>(),
                                      .elements = static_cast<uint32_t>(elements_)},
          [this](const auto* segment, uint32_t blocks) {
            return kernels::cuda::LocalStep(kRule, segment, 1, blocks,
                                            first_not_packed_.as<uint32_t>(), nullptr);
          },
          {.gradient = type});
    }
    RunDecompression();
    RunAdditions();
    RunDenseMomentum();
    RunVariance();
    RunLamb();
    RunSums();
    if (!status_.ok()) return status_;
    return std::move(runs_);
  }

 private:
  static constexpr BlockRule kRule = {};
  static constexpr uint32_t kRanks = 4;  // of a node

  void RunDecompression() {
    const auto elements = static_cast<uint32_t>(elements_);
    Run("decompress", 4 + 1.0 / 8,
        kernels::cuda::DecompressSegment{.compressed = {scales_.as<float>(), bits_.as<uint8_t>()},
                                         .values = parameters_.as<float>(),
                                         .elements = elements},
        Plain(kernels::cuda::DecompressOneBit));
    for (const auto& [type, name, bytes] : {std::tuple(DenseType::kFloat32, "fp32", 4),
                                            {DenseType::kBfloat16, "bf16", 2},
                                            {DenseType::kFloat16, "fp16", 2}}) {
      Run(absl::StrCat("decompress, ", name), 4 + bytes,
          kernels::cuda::DecompressDenseSegment{.compressed = momentum_.as<uint8_t>(),
                                                .type = type,
                                                .values = parameters_.as<float>(),
                                                .elements = elements},
          Plain(kernels::cuda::DecompressDense), {.momentum = AsGradient(type)});
    }
    for (const auto& [type, name] :
         {std::pair(IntegerType::kInt8, "int8"), {IntegerType::kInt4, "int4"}}) {
      Run(absl::StrCat("decompress, ", name), 4 + kernels::BitsOf(type) / 8.0,
          kernels::cuda::DequantizeSegment{
              .compressed = {scales_.as<float>(), momentum_.as<uint8_t>()},
              .type = type,
              .values = parameters_.as<float>(),
              .elements = elements},
          Plain(kernels::cuda::DecompressQuantized));
    }
    const float* const contributions[kRanks] = {gradient_.as<float>(), error_.as<float>(),
                                                momentum_.as<float>(), variance_.as<float>()};
    status_.Update(StatusOf(cudaMemcpy(contributions_.as<void>(), contributions,
                                       sizeof contributions, cudaMemcpyHostToDevice)));
    Run(absl::StrCat("mean of ", kRanks, " processes"), 4 * (kRanks + 1),
        kernels::cuda::AggregateDenseSegment{.contributions = contributions_.as<const float*>(),
                                             .ranks = kRanks,
                                             .inverse_count = 1.0f / kRanks,
                                             .out = parameters_.as<float>(),
                                             .elements = elements},
        Plain(kernels::cuda::AggregateDense));
  }

  void RunAdditions() {
    const auto elements = static_cast<uint32_t>(elements_);
    constexpr float kFactor = 1e-3f;
    Run("add", 8 + 1.0 / 8,
        kernels::cuda::AddSegment{.addend = {scales_.as<float>(), bits_.as<uint8_t>()},
                                  .factor = kFactor,
                                  .accumulator = error_.as<float>(),
                                  .elements = elements},
        Plain(kernels::cuda::AddOneBit));
    for (const auto& [type, name] :
         {std::pair(IntegerType::kInt8, "int8"), {IntegerType::kInt4, "int4"}}) {
      Run(absl::StrCat("add, ", name), 8 + kernels::BitsOf(type) / 8.0,
          kernels::cuda::AddQuantizedSegment{
              .addend = {scales_.as<float>(), momentum_.as<uint8_t>()},
              .type = type,
              .factor = kFactor,
              .accumulator = error_.as<float>(),
              .elements = elements},
          Plain(kernels::cuda::AddQuantized));
    }
    for (const auto& [type, name, bytes] : {std::tuple(DenseType::kFloat32, "fp32", 4),
                                            {DenseType::kBfloat16, "bf16", 2},
                                            {DenseType::kFloat16, "fp16", 2}}) {
      Run(absl::StrCat("add, ", name), 8 + bytes,
          kernels::cuda::AddDenseSegment{.addend = momentum_.as<uint8_t>(),
                                         .type = type,
                                         .factor = kFactor,
                                         .accumulator = error_.as<float>(),
                                         .elements = elements},
          Plain(kernels::cuda::AddDense), {.momentum = AsGradient(type)});
    }
    Run("scale", 8,
        kernels::cuda::ScaleSegment{
            .factor = -1, .values = error_.as<float>(), .elements = elements},
        Plain(kernels::cuda::Scale));
  }

  // What happens at the freeze step, in each refresh, and before either.
  void RunVariance() {
    const auto elements = static_cast<uint32_t>(elements_);
    const kernels::FreezeRates freeze = {1, 1, 1e-9f, 1e-8f};
    Run("freeze", 16,
        kernels::cuda::AdamSegment<kernels::FreezeRates>{.rates = freeze,
                                                         .momentum = momentum_.as<float>(),
                                                         .variance = variance_.as<float>(),
                                                         .elements = elements},
        Plain(kernels::cuda::Freeze));
    const kernels::cuda::AdamSegment<kernels::RefreshRates> refresh = {
        .rates = {0.9f, 0.1f, 0.99f, 0.01f, 1e-3f, 1e-8f, 0},
        .gradient = gradient_.as<uint8_t>(),
        .momentum = momentum_.as<float>(),
        .variance = variance_.as<float>(),
        .parameters = parameters_.as<float>(),
        .elements = elements};
    Run("refresh step", 28, refresh, Plain(kernels::cuda::RefreshStep));
    Run("thaw", 8, refresh, Plain(kernels::cuda::Thaw));
    Run("floor variance", 8,
        kernels::cuda::FloorSegment{.rates = freeze,
                                    .variance = variance_.as<float>(),
                                    .fresh_variance = error_.as<float>(),
                                    .elements = elements},
        Plain(kernels::cuda::FloorVariance));
  }

  void RunSums() {
    Fill({});
    Time("sum", 4, [this] {
      return kernels::cuda::Sum(parameters_.as<float>(), elements_, workspace_.as<double>(),
                                sum_.as<double>(), nullptr);
    });
    Time("sum of squares", 4, [this] {
      return kernels::cuda::SumOfSquares(parameters_.as<float>(), elements_,
                                         workspace_.as<double>(), sum_.as<double>(), nullptr);
    });
  }

  void RunDenseMomentum() {
    const auto elements = static_cast<uint32_t>(elements_);
    Run("momentum input", 12,
        kernels::cuda::MomentumInputSegment{.gradient = gradient_.as<void>(),
                                            .momentum = momentum_.as<float>(),
                                            .input = error_.as<float>(),
                                            .rates = {},
                                            .elements = elements},
        Plain(kernels::cuda::MomentumInput));
    Run("apply, dense momentum", 16,
        kernels::cuda::ApplyDenseSegment{.momentum = momentum_.as<float>(),
                                         .inverse_denominator = variance_.as<float>(),
                                         .parameters = parameters_.as<float>(),
                                         .rates = {.learning_rate = 1e-3f},
                                         .elements = elements},
        Plain(kernels::cuda::ApplyDenseMomentum));
  }

  void RunLamb() {
    const auto elements = static_cast<uint32_t>(elements_);
    const kernels::cuda::LambSegment dense = {
        .rates = {0.9f, 0.1f, 0.999f, 0.001f, 1, 1, 1e-8f, 0.01f},
        .step_size = 1e-3f,
        .gradient = gradient_.as<uint8_t>(),
        .momentum = momentum_.as<float>(),
        .variance = variance_.as<float>(),
        .parameters = parameters_.as<float>(),
        .sums = sums_.as<kernels::LambSums>(),
        .elements = elements};
    Run("LAMB moments, fp32", 24, dense, Plain(kernels::cuda::UpdateMoments));
    Run("LAMB step", 16, dense, Plain(kernels::cuda::LambStep));
    kernels::cuda::FollowSegment follow = {
        .rates = {0.9f, 10, 0.999f, 0.001f, 1e-8f, 0.01f},
        .momentum = {scales_.as<float>(), bits_.as<uint8_t>()},
        .momentum_before = {scales_of_momentum_.as<float>(), bits_of_momentum_.as<uint8_t>()},
        .inverse_denominator = error_.as<float>(),
        .fresh_variance = variance_.as<float>(),
        .parameters = parameters_.as<float>(),
        .sums = sums_.as<kernels::LambSums>(),
        .elements = elements};
    Run("follow momentum", 16 + 2.0 / 8, follow, Plain(kernels::cuda::FollowMomentum));
    follow.momentum = follow.momentum_before = {};
    follow.dense_momentum = gradient_.as<float>();
    follow.dense_momentum_before = momentum_.as<float>();
    Run("follow momentum, dense", 28, follow, Plain(kernels::cuda::FollowMomentum));
  }

  absl::Status TakeMemory() {
    for (Memory* array :
         {&gradient_, &error_, &momentum_, &variance_, &parameters_, &copied_, &copy_}) {
      if (absl::Status status = array->Take(4 * elements_); !status.ok()) return status;
    }
    for (Memory* array : {&bits_, &bits_of_momentum_}) {
      if (absl::Status status = array->Take(kernels::SignBytes(elements_)); !status.ok()) {
        return status;
      }
    }
    for (Memory* array : {&scales_, &scales_of_momentum_}) {
      if (absl::Status status = array->Take(4 * blocks_); !status.ok()) return status;
    }
    absl::Status status = sums_.Take(sizeof(kernels::LambSums) * blocks_);
    if (status.ok()) status = contributions_.Take(sizeof(float*) * kRanks);
    if (status.ok())
      status = workspace_.Take(sizeof(double) * kernels::cuda::SumWorkspace(elements_));
    if (status.ok()) status = sum_.Take(sizeof(double));
    if (status.ok()) status = segments_.Take(kSegmentBytes * chunks_);
    if (status.ok()) status = pinned_segments_.Take(kSegmentBytes * chunks_);
    if (!status.ok()) return status;
    return first_not_packed_.Take(sizeof(uint32_t));
  }

  static kernels::OneBitView PartOf(kernels::OneBitView all, size_t begin) {
    return {all.scales + begin / kRule.block_elements, all.bits + begin / 8};
  }

  // launch(segment, blocks)
  template <class Segment>
  using Launch = std::function<absl::Status(const Segment*, uint32_t)>;

  Launch<kernels::cuda::CompressSegment> Compress() {
    return [this](const auto* segment, uint32_t blocks) {
      return kernels::cuda::CompressOneBit(kRule, segment, 1, blocks,
                                           first_not_packed_.as<uint32_t>(), nullptr);
    };
  }

  template <class Segment>
  static Launch<Segment> Plain(absl::Status (*launch)(const BlockRule&, const Segment*, uint32_t,
                                                      uint32_t, kernels::cuda::Stream)) {
    return [launch](const Segment* segment, uint32_t blocks) {
      return launch(kRule, segment, 1, blocks, nullptr);
    };
  }

  // What a run finds, beside numbers of four bytes: the types of what is in these arrays.
  struct Inputs {
    GradientType gradient = GradientType::kFloat32;
    GradientType momentum = GradientType::kFloat32;
  };
  void Fill(const Inputs& inputs) {
    status_.Update(gradient_.Fill(pattern_.Values(inputs.gradient)));
    status_.Update(momentum_.Fill(pattern_.Values(inputs.momentum)));
    for (Memory* array : {&error_, &parameters_}) {
      status_.Update(array->Fill(pattern_.Values(GradientType::kFloat32)));
    }
    for (Memory* array : {&variance_, &scales_, &scales_of_momentum_}) {
      status_.Update(array->Fill(pattern_.PositiveValues()));
    }
    for (Memory* array : {&bits_, &bits_of_momentum_}) {
      status_.Update(array->Fill(pattern_.Bits()));
    }
  }

  // Times it with all elements in one launch.
  template <class Segment>
  void Run(const std::string& name, double bytes_per_element, const Segment& segment,
           std::type_identity_t<Launch<Segment>> launch, const Inputs& inputs = {}) {
    static_assert(sizeof(Segment) <= kSegmentBytes);
    Fill(inputs);
    status_.Update(StatusOf(
        cudaMemcpy(segments_.as<void>(), &segment, sizeof segment, cudaMemcpyHostToDevice)));
    Time(name, bytes_per_element, [&] { return launch(segments_.as<Segment>(), blocks_); });
  }

  // As a worker does it: a launch for each chunk, whose table, of one segment here, is copied to
  // the device before it. part(segment, begin) is the segment from that element on.
  template <class Segment, class Part>
  void RunInChunks(const std::string& name, double bytes_per_element, const Segment& segment,
                   std::type_identity_t<Launch<Segment>> launch, Part part) {
    Fill({});
    Time(name, bytes_per_element, [&] {
      absl::Status status;
      for (size_t chunk = 0; chunk < chunks_; ++chunk) {
        const size_t begin = chunk * chunk_elements_;
        Segment of_chunk = part(segment, begin);
        of_chunk.elements =
            static_cast<uint32_t>(std::min<size_t>(chunk_elements_, elements_ - begin));
        const size_t at = chunk * kSegmentBytes;
        uint8_t* const table = segments_.as<uint8_t>() + at;
        std::memcpy(pinned_segments_.data() + at, &of_chunk, sizeof of_chunk);
        status.Update(StatusOf(cudaMemcpyAsync(table, pinned_segments_.data() + at, sizeof of_chunk,
                                               cudaMemcpyHostToDevice)));
        status.Update(launch(reinterpret_cast<const Segment*>(table),
                             kernels::BlockCount(of_chunk.elements, kRule.block_elements)));
      }
      return status;
    });
  }

  // Times work(), and a copy of half as many bytes as it moves: each is read and written.
  void Time(const std::string& name, double bytes_per_element,
            const std::function<absl::Status()>& work) {
    if (!status_.ok()) return;
    DeviceRun run = {.name = name, .bytes_per_element = bytes_per_element};
    const auto copy = [&] {
      auto left = static_cast<size_t>(bytes_per_element * elements_ / 2);
      while (left > 0) {
        const size_t bytes = std::min(left, 4 * elements_);
        left -= bytes;
        const cudaError_t error =
            cudaMemcpyAsync(copy_.as<void>(), copied_.as<void>(), bytes, cudaMemcpyDeviceToDevice);
        if (error != cudaSuccess) return StatusOf(error);
      }
      return absl::OkStatus();
    };
    const auto once = [&](const std::function<absl::Status()>& timed) {
      if (!status_.ok()) return 0.0;
      absl::StatusOr<double> seconds = stopwatch_.SecondsOf(timed);
      status_ = seconds.status();
      return seconds.value_or(0);
    };
    once(work);  // not timed: the first launch loads the code
    for (int round = 0; round < rounds_; ++round) {
      run.copy_seconds.push_back(once(copy));
      run.seconds.push_back(once(work));
    }
    runs_.push_back(std::move(run));
  }

  static constexpr size_t kSegmentBytes = 256;

  const size_t elements_;
  const uint32_t blocks_;
  const uint32_t chunk_elements_;
  const size_t chunks_;
  const int rounds_;
  const Pattern pattern_;
  Stopwatch stopwatch_;
  Memory gradient_, error_, momentum_, variance_, parameters_;
  Memory bits_, bits_of_momentum_, scales_, scales_of_momentum_;
  Memory sums_, contributions_, workspace_, sum_;
  Memory copied_, copy_;  // not the kernels' arrays: their numbers must stay such
  Memory segments_, first_not_packed_;
  PinnedMemory pinned_segments_;
  absl::Status status_;  // of the first failure
  std::vector<DeviceRun> runs_;
};

}  // namespace

absl::StatusOr<std::vector<DeviceRun>> MeasureOnDevice(size_t elements, int rounds,
                                                       uint32_t chunk_elements) {
  if (elements > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("arrays of ", elements, " elements: at most 2^32 - 1 are measured"));
  }
  if (absl::Status status = kernels::CheckDevice(0); !status.ok()) return status;
  return Device(elements, rounds, chunk_elements).Measure();
}

}  // namespace signpost::bench
