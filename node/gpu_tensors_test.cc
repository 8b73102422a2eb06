#include "node/gpu_tensors.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/simulated_gpu.h"
#include "kernels/test_inputs.h"

namespace signpost::node {
namespace {

using kernels::Succeeds;
using kernels::Take;
using kernels::cuda::Owned;
using kernels::cuda::SimulatedGpu;
using ::testing::HasSubstr;

constexpr GradientType kTypes[] = {GradientType::kFloat32, GradientType::kBfloat16,
                                   GradientType::kFloat16};

// What the bits of a number of 2 bytes stand for.
float WidenedBfloat16(uint16_t bits) {
  const uint32_t widened = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &widened, sizeof value);
  return value;
}
float WidenedFloat16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                          : exponent == 31 ? std::numeric_limits<float>::infinity()
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

// Who has the memory that is shared.
enum class SharedOn { kHost, kGpuOfWorker };

class GpuTensorsFixture : public ::testing::Test {
 protected:
  // A gradient's numbers, and what has them on the GPU.
  struct Made {
    std::vector<float> numbers;
    Owned<uint8_t> pinned, memory;
    Gradient gradient;
  };

  explicit GpuTensorsFixture(SharedOn shared_on) : shared_on_(shared_on) {
    for (const size_t elements : elements_) {
      on_gpu_.push_back(Take(gpu_.Allocate(elements * sizeof(float))));
      auto* const values = reinterpret_cast<float*>(on_gpu_.back().get());
      parameters_.push_back(
          {absl::StrCat("x", parameters_.size()), {elements}, {values, elements}});
      total_ += elements;
    }
    host_gradients_ = Take(SharedMemory::Create(total_ * sizeof(float)));
    host_values_ = Take(SharedMemory::Create(total_ * sizeof(float)));
    gpu_gradients_ = Take(worker_.AllocateExported(total_ * sizeof(float)));
    gpu_values_ = Take(worker_.AllocateExported(total_ * sizeof(float)));
    tensors_ = Take(Create());
  }
  ~GpuTensorsFixture() override { tensors_.reset(); }

  absl::StatusOr<std::unique_ptr<GpuTensors>> Create() {
    if (shared_on_ == SharedOn::kHost) {
      return GpuTensors::Create(gpu_, parameters_, *host_gradients_, *host_values_);
    }
    return GpuTensors::CreateBeside(gpu_, parameters_, gpu_gradients_.handle, gpu_values_.handle);
  }

  // What is shared, which the host reaches also where it is a simulated GPU's.
  absl::Span<float> gradients() const { return Shared(*host_gradients_, gpu_gradients_); }
  absl::Span<float> values() const { return Shared(*host_values_, gpu_values_); }
  absl::Span<float> Shared(const SharedMemory& of_host,
                           const kernels::cuda::ExportedMemory& of_gpu) const {
    if (shared_on_ == SharedOn::kHost) return of_host.floats();
    return {reinterpret_cast<float*>(of_gpu.memory.get()), total_};
  }

  // Keeps the stream busy for a while.
  void Delay(kernels::cuda::Stream stream) {
    for (int i = 0; i < 500; ++i) Succeeds(gpu_.SetToZero(idle_.get(), 8, stream));
  }

  // A gradient of such numbers, which is there when the stream comes to that.
  Made Make(size_t tensor, GradientType type, kernels::cuda::Stream stream) {
    Made made;
    const size_t elements = elements_[tensor], bytes = elements * BytesOf(type);
    made.pinned = Take(gpu_.AllocatePinned(bytes));
    made.memory = Take(gpu_.Allocate(bytes));
    for (size_t i = 0; i < elements; ++i) {
      const auto bits = static_cast<uint16_t>(random_());
      if (type == GradientType::kFloat32) {
        made.numbers.push_back(static_cast<float>(random_()) * 0x1p-20f);
        std::memcpy(made.pinned.get() + 4 * i, &made.numbers.back(), 4);
        continue;
      }
      const bool is_bfloat16 = type == GradientType::kBfloat16;
      const uint16_t number = bits % (is_bfloat16 ? 0x7f80u : 0x7c00u) | (random_() % 2)
                                                                             << 15;  // no NaN
      made.numbers.push_back(is_bfloat16 ? WidenedBfloat16(number) : WidenedFloat16(number));
      std::memcpy(made.pinned.get() + 2 * i, &number, 2);
    }
    Succeeds(gpu_.CopyIn(made.memory.get(), made.pinned.get(), bytes, stream));
    made.gradient = Gradient(made.memory.get(), elements, type);
    return made;
  }

  std::vector<float> OfTensor(absl::Span<const float> all, size_t tensor) const {
    size_t first = 0;
    for (size_t i = 0; i < tensor; ++i) first += elements_[i];
    const absl::Span<const float> numbers = all.subspan(first, elements_[tensor]);
    return {numbers.begin(), numbers.end()};
  }

  std::vector<float> OnGpu(size_t tensor, kernels::cuda::Stream stream) {
    std::vector<float> numbers(elements_[tensor]);
    Succeeds(gpu_.Read(numbers.data(), on_gpu_[tensor].get(), 4 * numbers.size(), stream));
    return numbers;
  }

  // Whole pieces and parts of one, between two small ones.
  const std::vector<size_t> elements_ = {7, GpuTensors::kPieceElements, 1,
                                         2 * GpuTensors::kPieceElements + 3, 300};
  const SharedOn shared_on_;
  SimulatedGpu worker_{/*seed=*/6};
  SimulatedGpu gpu_{/*seed=*/7};
  std::mt19937 random_{7};
  const Owned<uint8_t> idle_ = Take(gpu_.Allocate(8));
  std::vector<Owned<uint8_t>> on_gpu_;  // by tensor
  std::vector<Parameter> parameters_;
  size_t total_ = 0;
  std::unique_ptr<SharedMemory> host_gradients_, host_values_;
  kernels::cuda::ExportedMemory gpu_gradients_, gpu_values_;
  std::unique_ptr<GpuTensors> tensors_;
};

class GpuTensorsTest : public GpuTensorsFixture, public ::testing::WithParamInterface<SharedOn> {
 protected:
  GpuTensorsTest() : GpuTensorsFixture(GetParam()) {}
};
INSTANTIATE_TEST_SUITE_P(, GpuTensorsTest,
                         ::testing::Values(SharedOn::kHost, SharedOn::kGpuOfWorker),
                         [](const auto& test) {
                           return test.param == SharedOn::kHost ? "ThroughTheHost" : "BesideAGpu";
                         });

class GpuTensorsThroughTheHostTest : public GpuTensorsFixture {
 protected:
  GpuTensorsThroughTheHostTest() : GpuTensorsFixture(SharedOn::kHost) {}
};

class GpuTensorsBesideAGpuTest : public GpuTensorsFixture {
 protected:
  GpuTensorsBesideAGpuTest() : GpuTensorsFixture(SharedOn::kGpuOfWorker) {}
};

TEST_P(GpuTensorsTest, SharesGradientsOfAllTypesInAnyOrder) {
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<Made> made(elements_.size());
    for (const size_t tensor : {3, 0, 4, 1, 2}) {
      made[tensor] = Make(tensor, kTypes[(tensor + turn) % 3], nullptr);
      Succeeds(tensors_->CheckGradient(made[tensor].gradient));
      Succeeds(tensors_->Share(tensor, made[tensor].gradient));
    }
    Succeeds(tensors_->Await());
    for (size_t tensor = 0; tensor < elements_.size(); ++tensor) {
      EXPECT_TRUE(OfTensor(gradients(), tensor) == made[tensor].numbers) << tensor;
    }
  }
}

TEST_P(GpuTensorsTest, AGradientIsReadOnceItsStreamHasMadeIt) {
  const Owned<CUstream_st> first = Take(gpu_.NewStream()), second = Take(gpu_.NewStream());
  for (const GradientType type : kTypes) {
    EXPECT_TRUE(tensors_->SetStream(first.get()).ok());
    Delay(first.get());
    const Made early = Make(0, type, first.get());
    Succeeds(tensors_->Share(0, early.gradient));
    Delay(first.get());
    const Made late = Make(4, type, first.get());
    EXPECT_TRUE(tensors_->SetStream(second.get()).ok());  // which is behind the first
    Succeeds(tensors_->Share(4, late.gradient));
    Succeeds(tensors_->Await());
    EXPECT_EQ(OfTensor(gradients(), 0), early.numbers);
    EXPECT_EQ(OfTensor(gradients(), 4), late.numbers);
  }
}

TEST_P(GpuTensorsTest, ParametersComeInTheOrderOfTheStream) {
  const Owned<CUstream_st> stream = Take(gpu_.NewStream());
  for (size_t i = 0; i < total_; ++i) values()[i] = static_cast<float>(i);
  EXPECT_TRUE(tensors_->SetStream(stream.get()).ok());
  Delay(stream.get());
  for (size_t tensor = 0; tensor < elements_.size(); ++tensor) {
    Succeeds(gpu_.SetToZero(on_gpu_[tensor].get(), 4 * elements_[tensor], stream.get()));
  }
  Succeeds(tensors_->TakeParameters());
  for (size_t tensor = 0; tensor < elements_.size(); ++tensor) {
    EXPECT_TRUE(OnGpu(tensor, stream.get()) == OfTensor(values(), tensor)) << tensor;
  }
}

TEST_P(GpuTensorsTest, NothingWaitsButToAwait) {
  const Made made = Make(0, GradientType::kBfloat16, nullptr);
  gpu_.Hold();
  Succeeds(tensors_->Share(0, made.gradient));
  Succeeds(tensors_->TakeParameters());
  gpu_.LetGoOn();
  Succeeds(tensors_->Await());
}

TEST_P(GpuTensorsTest, KnowsWhichGradientsAreShared) {
  const Made first = Make(4, GradientType::kFloat32, nullptr);
  const Made second = Make(0, GradientType::kBfloat16, nullptr);
  Succeeds(tensors_->Share(4, first.gradient));
  Succeeds(tensors_->AwaitShared(4));
  EXPECT_TRUE(Take(tensors_->IsShared(4)));
  EXPECT_EQ(OfTensor(gradients(), 4), first.numbers);
  gpu_.Hold();
  Succeeds(tensors_->Share(0, second.gradient));
  EXPECT_TRUE(Take(tensors_->IsShared(4)));
  EXPECT_FALSE(Take(tensors_->IsShared(0)));
  gpu_.LetGoOn();
  Succeeds(tensors_->AwaitShared(0));
  EXPECT_TRUE(Take(tensors_->IsShared(0)));
  EXPECT_EQ(OfTensor(gradients(), 0), second.numbers);
}

TEST_P(GpuTensorsTest, WhatWasAwaitedIsNotReadAnyMore) {
  const Owned<CUstream_st> stream = Take(gpu_.NewStream());
  EXPECT_TRUE(tensors_->SetStream(stream.get()).ok());
  for (float& value : values()) value = 1;
  Delay(stream.get());
  Succeeds(tensors_->TakeParameters());
  Succeeds(tensors_->Await());
  for (float& value : values()) value = 2;
  EXPECT_EQ(OnGpu(4, stream.get()), std::vector<float>(300, 1.0f));
}

TEST_P(GpuTensorsTest, TheChecksumIsOfWhatTheStreamLeaves) {
  const Owned<CUstream_st> stream = Take(gpu_.NewStream());
  EXPECT_TRUE(tensors_->SetStream(stream.get()).ok());
  const auto checksum_of = [&](float value) {
    for (float& to : values()) to = value;
    Delay(stream.get());
    Succeeds(tensors_->TakeParameters());
    const uint32_t checksum = tensors_->ParametersCrc32c();
    Succeeds(tensors_->Await());
    return checksum;
  };
  const uint32_t of_ones = checksum_of(1);
  EXPECT_NE(checksum_of(2), of_ones);
  EXPECT_EQ(checksum_of(1), of_ones);
}

TEST_P(GpuTensorsTest, AStepTakesNoMemoryAndCopiesFourBytesForEachParameterEitherWay) {
  for (const GradientType type : kTypes) {
    std::vector<Made> made;
    for (size_t tensor = 0; tensor < elements_.size(); ++tensor) {
      made.push_back(Make(tensor, type, nullptr));
    }
    const SimulatedGpu::Counts before = gpu_.counts();
    for (size_t tensor = 0; tensor < elements_.size(); ++tensor) {
      Succeeds(tensors_->Share(tensor, made[tensor].gradient));
    }
    Succeeds(tensors_->Await());
    Succeeds(tensors_->TakeParameters());
    const SimulatedGpu::Counts after = gpu_.counts();
    EXPECT_EQ(after.allocations, before.allocations);
    EXPECT_EQ(after.pinned_allocations, before.pinned_allocations);
    EXPECT_EQ(after.pins, before.pins);
    EXPECT_EQ(after.streams, before.streams);
    EXPECT_EQ(after.events, before.events);
    // Beside a GPU they do not cross to the host.
    const size_t crossing = GetParam() == SharedOn::kHost ? 4 * total_ : 0;
    EXPECT_EQ(after.bytes_out - before.bytes_out, crossing);
    EXPECT_GE(after.bytes_in - before.bytes_in, crossing);
    EXPECT_LT(after.bytes_in - before.bytes_in, crossing + 1000);
  }
}

TEST_P(GpuTensorsTest, RefusesGradientsThatAreNotOnTheGpuOrNotAligned) {
  const Made made = Make(4, GradientType::kFloat32, nullptr);
  const auto code_of = [&](const void* values, GradientType type) {
    return tensors_->CheckGradient(Gradient(values, 8, type)).code();
  };
  const auto refused = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code_of(made.memory.get() + 4, GradientType::kFloat32), absl::StatusCode::kOk);
  EXPECT_EQ(code_of(made.memory.get() + 2, GradientType::kFloat32), refused);
  EXPECT_EQ(code_of(made.memory.get() + 2, GradientType::kFloat16), absl::StatusCode::kOk);
  EXPECT_EQ(code_of(made.memory.get() + 1, GradientType::kFloat16), refused);
  EXPECT_EQ(code_of(made.numbers.data(), GradientType::kFloat32), refused);
  EXPECT_EQ(code_of(made.pinned.get(), GradientType::kFloat32), refused);
  EXPECT_EQ(code_of(nullptr, GradientType::kFloat32), refused);
}

TEST_F(GpuTensorsThroughTheHostTest, MemoryThatCannotBePinnedIsAnErrorThatSaysWhatToDo) {
  tensors_.reset();
  const size_t bytes = total_ * sizeof(float);
  for (const size_t limit : {bytes - 1, 2 * bytes - 1}) {
    gpu_.LimitPins(limit);
    const absl::Status refused = Create().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    for (const char* const said : {"GPU 0 (simulated)", "MiB of the host's memory pinned",
                                   "ulimit -l unlimited", "without SessionOptions::node"}) {
      EXPECT_THAT(std::string(refused.message()), HasSubstr(said));
    }
  }
  gpu_.LimitPins(2 * bytes + 4096);
  Succeeds(Create().status());
}

TEST_P(GpuTensorsTest, WithoutRoomOnTheGpuItSaysHowMuchItWanted) {
  tensors_.reset();
  gpu_.LimitMemory(total_ * sizeof(float) + 1000);
  const absl::Status refused = Create().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no room for another 4.0 MiB"));
}

TEST_F(GpuTensorsBesideAGpuTest, MemoryThatItCannotGetAtIsAnErrorThatSaysWhatToDo) {
  gpu_.RefuseImports();
  const absl::Status refused = Create().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("start it without --gpu, and numbers go through the host's memory"));
  EXPECT_EQ(GpuTensors::CreateBeside(gpu_, parameters_, "", "").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(GpuTensors, AFaultComesBackFromWhatFollows) {
  for (int operation = 0; operation < 3; ++operation) {  // rows, kernel, copy
    SimulatedGpu gpu(/*seed=*/8);
    const Owned<uint8_t> memory = Take(gpu.Allocate(16)), gradient = Take(gpu.Allocate(8));
    const Parameter parameter = {"x", {4}, {reinterpret_cast<float*>(memory.get()), 4}};
    const auto shared = Take(SharedMemory::Create(16)), values = Take(SharedMemory::Create(16));
    const auto tensors = Take(GpuTensors::Create(gpu, {&parameter, 1}, *shared, *values));
    gpu.FailOperationAfter(operation);
    tensors->Share(0, Gradient(gradient.get(), 4, GradientType::kFloat16)).IgnoreError();
    const absl::Status failed = tensors->Await();
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(tensors->TakeParameters(), failed);
    EXPECT_EQ(tensors->IsShared(0).status(), failed);
    EXPECT_EQ(tensors->AwaitShared(0), failed);
    EXPECT_EQ(tensors->Share(0, Gradient(gradient.get(), 4, GradientType::kFloat16)), failed);
  }
}

}  // namespace
}  // namespace signpost::node
