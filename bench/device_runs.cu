// MeasureOnDevice of a build with CUDA.

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/device_runs.h"
#include "kernels/adam_cuda.h"
#include "kernels/block.h"
#include "kernels/dense_cuda.h"
#include "kernels/device.h"
#include "kernels/lamb_cuda.h"
#include "kernels/momentum_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/quantized_cuda.h"
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
    return StatusOf(cudaMemset(begin_, 0, bytes));
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(begin_);
  }

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
  Device(size_t elements, int rounds)
      : elements_(elements),
        blocks_(kernels::BlockCount(elements, kRule.block_elements)),
        rounds_(rounds) {}

  absl::StatusOr<std::vector<DeviceRun>> Measure() {
    if (absl::Status status = TakeMemory(); !status.ok()) return status;
    const double bits = 1.0 / 8;
    for (const auto& [type, name, bytes] :
         {std::tuple(GradientType::kFloat32, "fp32", 4), {GradientType::kBfloat16, "bf16", 2}}) {
      kernels::cuda::CompressSegment compress = {.gradient = gradient_.as<void>(),
                                                 .type = type,
                                                 .error = error_.as<float>(),
                                                 .out = {scales_.as<float>(), bits_.as<uint8_t>()},
                                                 .rates = {},
                                                 .elements = static_cast<uint32_t>(elements_)};
      compress.momentum = {scales_of_momentum_.as<float>(), bits_of_momentum_.as<uint8_t>()};
      Run(absl::StrCat("compress, ", name, " gradient, one-bit momentum"), bytes + 8 + 2 * bits,
          compress, Compress());
      compress.momentum = {};
      compress.dense_momentum = momentum_.as<float>();
      Run(absl::StrCat("compress, ", name, " gradient, dense momentum"), bytes + 12 + bits,
          compress, Compress());
    }
    Run("apply", 12 + bits,
        kernels::cuda::ApplySegment{
            .momentum = {scales_of_momentum_.as<float>(), bits_of_momentum_.as<uint8_t>()},
            .inverse_denominator = variance_.as<float>(),
            .parameters = parameters_.as<float>(),
            .learning_rate = 1e-3f,
            .elements = static_cast<uint32_t>(elements_)},
        Plain(kernels::cuda::ApplyMomentum));
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
          [this](const auto* segment) {
            return kernels::cuda::CompressDense(kRule, segment, 1, blocks_,
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
          Plain(kernels::cuda::AdamStep));
      Run(absl::StrCat("adaptive step, ", name), bytes + 24,
          kernels::cuda::AdaptiveSegment{
              .rates = {0.9f, 0.1f, 0.999f, 1e-3f, 1e-3f, 1, 1e-6f, 1e-8f, 0, true},
              .gradient = gradient_.as<uint8_t>(),
              .type = type,
              .momentum = momentum_.as<float>(),
              .variance = variance_.as<float>(),
              .parameters = parameters_.as<float>(),
              .elements = static_cast<uint32_t>(elements_)},
          Plain(kernels::cuda::AdaptiveStep));
    }
    for (const auto& [type, name] :
         {std::pair(IntegerType::kInt8, "int8"), {IntegerType::kInt4, "int4"}}) {
      Run(absl::StrCat("compress, ", name), 12 + kernels::BitsOf(type) / 8.0,
          kernels::cuda::QuantizeSegment{.gradient = gradient_.as<void>(),
                                         .error = error_.as<float>(),
                                         .out = {scales_.as<float>(), momentum_.as<uint8_t>()},
                                         .type = type,
                                         .elements = static_cast<uint32_t>(elements_)},
          [this](const auto* segment) {
            return kernels::cuda::CompressQuantized(kRule, segment, 1, blocks_,
                                                    first_not_packed_.as<uint32_t>(), nullptr);
          });
    }
    for (const auto& [type, name, bytes] :
         {std::tuple(GradientType::kFloat32, "fp32", 4), {GradientType::kBfloat16, "bf16", 2}}) {
      Run(absl::StrCat("local step, ", name, " gradient"), bytes + 28,
          kernels::cuda::LocalSegment{.rates = {0.9f, 0.1f, 1e-3f, 0},
                                      .gradient = gradient_.as<void>(),
                                      .gradient_type = type,
                                      .momentum = momentum_.as<float>(),
                                      .accumulated = error_.as<float>(),
                                      .inverse_denominator = variance_.as<float>(),
                                      .parameters = parameters_.as<float>(),
                                      .elements = static_cast<uint32_t>(elements_)},
          [this](const auto* segment) {
            return kernels::cuda::LocalStep(kRule, segment, 1, blocks_,
                                            first_not_packed_.as<uint32_t>(), nullptr);
          });
    }
    RunDecompression();
    RunDenseMomentum();
    RunLamb();
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
          Plain(kernels::cuda::DecompressDense));
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
                                         .learning_rate = 1e-3f,
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
    for (Memory* array : {&gradient_, &error_, &momentum_, &variance_, &parameters_}) {
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
    if (status.ok()) status = segment_.Take(kSegmentBytes);
    if (!status.ok()) return status;
    return first_not_packed_.Take(sizeof(uint32_t));
  }

  std::function<absl::Status(const kernels::cuda::CompressSegment*)> Compress() {
    return [this](const auto* segment) {
      return kernels::cuda::CompressOneBit(kRule, segment, 1, blocks_,
                                           first_not_packed_.as<uint32_t>(), nullptr);
    };
  }

  template <class Segment>
  std::function<absl::Status(const Segment*)> Plain(absl::Status (*launch)(
      const BlockRule&, const Segment*, uint32_t, uint32_t, kernels::cuda::Stream)) {
    return [this, launch](const Segment* segment) {
      return launch(kRule, segment, 1, blocks_, nullptr);
    };
  }

  // Times launch(segment), and a copy of half as many bytes as it moves: each is read and written.
  template <class Segment, class Launch>
  void Run(const std::string& name, double bytes_per_element, const Segment& segment,
           Launch launch) {
    static_assert(sizeof(Segment) <= kSegmentBytes);
    if (!status_.ok()) return;
    status_ =
        StatusOf(cudaMemcpy(segment_.as<void>(), &segment, sizeof segment, cudaMemcpyHostToDevice));
    DeviceRun run = {.name = name, .bytes_per_element = bytes_per_element};
    const auto copied = static_cast<size_t>(bytes_per_element * elements_ / 2);
    // From one array into the next ones, which lie apart.
    const auto copy = [&] {
      size_t left = copied;
      for (const auto& [from, to] : {std::pair(&gradient_, &error_),
                                     {&momentum_, &variance_},
                                     {&variance_, &parameters_},
                                     {&error_, &gradient_}}) {
        const size_t bytes = std::min(left, 4 * elements_);
        left -= bytes;
        const cudaError_t error = cudaMemcpyAsync(
            to->template as<void>(), from->template as<void>(), bytes, cudaMemcpyDeviceToDevice);
        if (error != cudaSuccess) return StatusOf(error);
      }
      return absl::OkStatus();
    };
    const auto once = [&](const std::function<absl::Status()>& work) {
      if (!status_.ok()) return 0.0;
      absl::StatusOr<double> seconds = stopwatch_.SecondsOf(work);
      status_ = seconds.status();
      return seconds.value_or(0);
    };
    const auto work = [&] { return launch(segment_.as<Segment>()); };
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
  const int rounds_;
  Stopwatch stopwatch_;
  Memory gradient_, error_, momentum_, variance_, parameters_;
  Memory bits_, bits_of_momentum_, scales_, scales_of_momentum_;
  Memory sums_, contributions_;
  Memory segment_, first_not_packed_;
  absl::Status status_;  // of the first failure
  std::vector<DeviceRun> runs_;
};

}  // namespace

absl::StatusOr<std::vector<DeviceRun>> MeasureOnDevice(size_t elements, int rounds) {
  if (elements > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("arrays of ", elements, " elements: at most 2^32 - 1 are measured"));
  }
  if (absl::Status status = kernels::CheckDevice(0); !status.ok()) return status;
  return Device(elements, rounds).Measure();
}

}  // namespace signpost::bench
