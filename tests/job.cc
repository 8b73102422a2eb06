#include "tests/job.h"

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace signpost::testing {

void UseExampleCodec(WorkerOptions& options) {
  options.codec_library = "client/examples/libtopk.so";
  options.codec_options = "ratio=0.25";
}

std::vector<NamedOptimizer> EachOptimizerWithEachCodec(uint64_t freeze_step,
                                                       const ZeroOneOptions& zero_one) {
  constexpr struct {
    const char* name;
    Codec codec;
  } kCodecs[] = {{"Fp32", FLOAT32},
                 {"Bf16", BFLOAT16},
                 {"Fp16", FLOAT16},
                 {"Int8", INT8},
                 {"Int4", INT4},
                 {"OneBit", ONE_BIT},
                 {"ACodecFromOutside", CUSTOM}};
  const OptimizerOptions adam = {.freeze_step = freeze_step};
  OptimizerOptions lamb = adam, zero_one_adam = adam;
  lamb.lamb.emplace();
  zero_one_adam.zero_one = zero_one;
  const NamedOptimizer optimizers[] = {
      {"OneBitAdam", adam}, {"OneBitLamb", lamb}, {"ZeroOneAdam", zero_one_adam}};
  std::vector<NamedOptimizer> all;
  for (const NamedOptimizer& optimizer : optimizers) {
    for (const auto& codec : kCodecs) {
      all.push_back({absl::StrCat(optimizer.name, "In", codec.name), optimizer.options});
      all.back().options.codec = codec.codec;
      // The default is had above.
      if (codec.codec == FLOAT32) continue;
      all.push_back(
          {absl::StrCat(optimizer.name, "WithVariancesFrom", codec.name), optimizer.options});
      all.back().options.variance_codec = codec.codec;
      if (optimizer.options.zero_one) continue;
      all.back().options.variance_refresh_interval = 3;
      all.push_back({absl::StrCat(optimizer.name, "After", codec.name), optimizer.options});
      all.back().options.warm_up_codec = codec.codec;
    }
  }
  return all;
}

std::vector<float> GradientOf(uint32_t rank, int step, size_t elements) {
  std::mt19937 random(36'000'000 + 1000 * step +
                      rank);  // reference_test.cc wants no close decisions
  std::normal_distribution<float> normal;
  std::vector<float> gradient(elements);
  for (size_t i = 0; i < elements; ++i) gradient[i] = normal(random) + 0.5f * (i % 7) - 1.5f;
  return gradient;
}

std::vector<float> InitialParameters(size_t elements) {
  std::vector<float> values(elements);
  for (size_t i = 0; i < elements; ++i) values[i] = 0.01f * (i % 100) - 0.3f;
  return values;
}

namespace {

void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

// As training in bf16 or fp16 would have it. The numbers must be such ones.
uint16_t HalfOf(GradientType type, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (type == GradientType::kBfloat16) return bits >> 16;
  const uint32_t sign = bits >> 31 << 15, exponent = bits >> 23 & 0xff;
  if (exponent == 0xff) return sign | 0x7c00 | (bits & 0x7fffff) >> 13;
  if (exponent == 0) return sign;
  return sign | (exponent - 112) << 10 | (bits & 0x7fffff) >> 13;
}

}  // namespace

struct Replica::OnGpu {
  using Memory = kernels::cuda::Owned<uint8_t>;

  struct GradientOfStep {
    Memory pinned, memory;
  };

  OnGpu(kernels::cuda::Gpu& gpu, GradientType type, const std::vector<float>& initial)
      : gpu(gpu),
        type(type),
        bytes(initial.size() * sizeof(float)),
        values(*gpu.Allocate(bytes)),
        pinned(*gpu.AllocatePinned(bytes)),
        streams{*gpu.NewStream(), *gpu.NewStream()},
        done(*gpu.NewEvent()) {
    ExpectOk(gpu.Write(values.get(), initial.data(), bytes, nullptr));
  }
  ~OnGpu() { gpu.Await(done.get()).IgnoreError(); }

  CUstream_st* stream() const { return streams[steps % 2].get(); }

  kernels::cuda::Gpu& gpu;
  const GradientType type;
  const size_t bytes;
  const Memory values, pinned;
  const kernels::cuda::Owned<CUstream_st> streams[2];
  const kernels::cuda::Owned<CUevent_st> done;
  std::vector<GradientOfStep> gradients;  // all of them: nobody waits until one has been read
  int steps = 0;
};

Replica::Replica(const JobOptionsForTest& options, uint32_t rank)
    : tensors(options.tensors),
      values(InitialParameters(std::accumulate(tensors.begin(), tensors.end(), size_t{0}))),
      gradient(values.size()),
      worker_(options.worker) {
  worker_.rank = rank;
  worker_.world_size = options.workers;
  worker_.gpu = options.gpu_of ? options.gpu_of(rank) : nullptr;
  if (worker_.gpu == nullptr) return;
  on_gpu_ = std::make_unique<OnGpu>(*worker_.gpu, options.gradient_type_on_gpu, values);
}

Replica::~Replica() = default;

WorkerOptions Replica::Options() const { return worker_; }

kernels::cuda::Stream Replica::NextStream() {
  ++on_gpu_->steps;
  return on_gpu_->stream();
}

void Replica::PutGradient() {
  OnGpu& on = *on_gpu_;
  auto pinned = on.gpu.AllocatePinned(on.bytes);
  auto memory = on.gpu.Allocate(on.bytes);
  if (!pinned.ok() || !memory.ok()) return;  // it has failed, which is the worker's to say
  OnGpu::GradientOfStep& to =
      on.gradients.emplace_back(OnGpu::GradientOfStep{*std::move(pinned), *std::move(memory)});
  std::memcpy(to.pinned.get(), gradient.data(), on.bytes);
  if (on.type != GradientType::kFloat32) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      const uint16_t half = HalfOf(on.type, gradient[i]);
      std::memcpy(to.pinned.get() + i * sizeof half, &half, sizeof half);
    }
  }
  on.gpu.CopyIn(to.memory.get(), to.pinned.get(), on.bytes, on.stream()).IgnoreError();
}

kernels::cuda::Stream Replica::stream() const { return on_gpu_->stream(); }

void Replica::GetValues() {
  if (on_gpu_ == nullptr) return;
  OnGpu& on = *on_gpu_;
  ExpectOk(on.gpu.CopyOut(on.pinned.get(), on.values.get(), on.bytes, on.stream()));
  ExpectOk(on.gpu.Record(on.done.get(), on.stream()));
  ExpectOk(on.gpu.Await(on.done.get()));
  std::memcpy(values.data(), on.pinned.get(), on.bytes);
}

std::vector<Parameter> Replica::Parameters() {
  absl::Span<float> values = absl::MakeSpan(this->values);
  if (on_gpu_) values = {reinterpret_cast<float*>(on_gpu_->values.get()), values.size()};
  std::vector<Parameter> parameters;
  size_t first = 0;
  for (size_t elements : tensors) {
    parameters.push_back({"tensor" + std::to_string(parameters.size()),
                          {elements},
                          values.subspan(first, elements)});
    first += elements;
  }
  return parameters;
}

std::vector<Gradient> Replica::Gradients() const {
  std::vector<Gradient> gradients;
  size_t first = 0;
  for (size_t elements : tensors) {
    if (on_gpu_) {
      const size_t bytes = on_gpu_->type == GradientType::kFloat32 ? 4 : 2;
      // Any memory will do if the GPU had failed before the first was there.
      const uint8_t* const memory = on_gpu_->gradients.empty()
                                        ? on_gpu_->values.get()
                                        : on_gpu_->gradients.back().memory.get();
      gradients.emplace_back(memory + bytes * first, elements, on_gpu_->type);
    } else {
      gradients.push_back(absl::MakeSpan(gradient).subspan(first, elements));
    }
    first += elements;
  }
  return gradients;
}

std::vector<std::vector<float>> Train(const Connect& connect, const JobOptionsForTest& options,
                                      const AfterStep& after_step, const BeforeStep& before_step) {
  std::vector<std::vector<float>> results(options.workers);
  OnEachRank(options.workers, [&](uint32_t rank) {
    Replica replica(options, rank);
    auto worker =
        Worker::Join(replica.Options(), options.optimizer, replica.Parameters(), connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < options.steps; ++step) {
      replica.gradient = GradientOf(rank, step, replica.values.size());
      if (before_step) before_step(rank, step, replica.gradient);
      replica.BeforeStep(**worker);
      const absl::StatusOr<StepReport> report =
          options.take_step
              ? options.take_step(rank, step, **worker, replica.Gradients(), options.rates)
              : (*worker)->Step(replica.Gradients(), {options.rates});
      ASSERT_TRUE(report.ok()) << report.status();
      if (!after_step) continue;
      replica.GetValues();
      after_step(rank, step, replica, **worker);
    }
    replica.GetValues();
    EXPECT_TRUE((*worker)->Leave().ok());
    results[rank] = replica.values;
  });
  return results;
}

std::vector<std::vector<float>> Train(Cluster& cluster, const JobOptionsForTest& options,
                                      const AfterStep& after_step, const BeforeStep& before_step) {
  return Train([&cluster] { return cluster.Connect(); }, options, after_step, before_step);
}

}  // namespace signpost::testing
