// Speed of each kernel on each target, against what one core of the same machine moves through
// memory in the same run. GB/s counts each byte that a kernel reads and each that it writes once;
// elements/s is the figure to compare between kernels.
//
// The baselines: Copy reads one array and writes another; ReadModifyWrite changes one in place,
// which is what the kernels do to the error and to the parameters.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "kernels/adam.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/onebit.h"
#include "kernels/target.h"

namespace signpost::kernels {
namespace {

using Values = std::vector<float>;

constexpr BlockRule kRule;
constexpr MomentumRates kRates;
constexpr double kSignBytes = 0.125;  // per element; scales are not counted

Values RandomValues(size_t n) {
  std::mt19937 engine(/*seed=*/1);
  std::normal_distribution<float> normal;
  Values values(n);
  for (float& value : values) value = normal(engine);
  return values;
}

// A compressed span of n elements.
struct Compressed {
  explicit Compressed(size_t n)
      : scales(BlockCount(n, kRule.block_elements), 1.0f), bits(SignBytes(n)) {
    std::mt19937 engine(/*seed=*/2);
    for (uint8_t& byte : bits) byte = static_cast<uint8_t>(engine());
  }
  OneBitSpan span() { return {scales.data(), bits.data()}; }

  Values scales;
  std::vector<uint8_t> bits;
};

void Report(benchmark::State& state, double bytes_per_element) {
  const double elements = static_cast<double>(state.iterations()) * state.range(0);
  state.counters["elements/s"] = benchmark::Counter(elements, benchmark::Counter::kIsRate);
  state.SetBytesProcessed(static_cast<int64_t>(elements * bytes_per_element));
}

void Copy(benchmark::State& state) {
  const Values from = RandomValues(state.range(0));
  Values to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), to.size() * sizeof(float));
    benchmark::ClobberMemory();
  }
  Report(state, /*bytes_per_element=*/4 + 4);
}

void ReadModifyWrite(benchmark::State& state) {
  Values values = RandomValues(state.range(0));
  for (auto _ : state) Scale(/*factor=*/-1, absl::MakeSpan(values));
  Report(state, 4 + 4);
}

void CompressDenseMomentum(benchmark::State& state) {
  const Values gradient = RandomValues(state.range(0)), momentum = gradient;
  Values error(gradient.size());
  Compressed out(gradient.size());
  for (auto _ : state) {
    CompressMomentum(kRule, kRates, gradient, momentum.data(), absl::MakeSpan(error), out.span());
  }
  Report(state, /*g, m, e=*/12 + /*e=*/4 + kSignBytes);
}

void CompressOneBitMomentum(benchmark::State& state) {
  const Values gradient = RandomValues(state.range(0));
  Compressed momentum(gradient.size()), out(gradient.size());
  Values error(gradient.size());
  for (auto _ : state) {
    CompressMomentum(kRule, kRates, gradient, OneBitView(momentum.span()), absl::MakeSpan(error),
                     out.span());
  }
  Report(state, /*g, e=*/8 + kSignBytes + /*e=*/4 + kSignBytes);
}

void Aggregate(benchmark::State& state, size_t ranks) {
  std::vector<Compressed> sent(ranks, Compressed(state.range(0)));
  std::vector<OneBitView> contributions;
  for (Compressed& of_rank : sent) contributions.push_back(of_rank.span());
  Values error = RandomValues(state.range(0));
  Compressed out(error.size());
  const float inverse_count = 1 / static_cast<float>(ranks);
  for (auto _ : state) {
    AggregateOneBit(kRule, contributions, inverse_count, absl::MakeSpan(error), out.span());
  }
  Report(state, /*e=*/4 + ranks * kSignBytes + /*e=*/4 + kSignBytes);
}

void Apply(benchmark::State& state) {
  Compressed momentum(state.range(0));
  const Values inverse(state.range(0), 1.0f);
  Values parameters = RandomValues(state.range(0));
  for (auto _ : state) {
    ApplyMomentum(kRule, momentum.span(), /*learning_rate=*/1e-3f, /*weight_decay=*/0.01f, inverse,
                  absl::MakeSpan(parameters));
  }
  Report(state, kSignBytes + /*inverse, x=*/8 + /*x=*/4);
}

void Add(benchmark::State& state) {
  Compressed addend(state.range(0));
  Values accumulator = RandomValues(state.range(0));
  float factor = 1;
  for (auto _ : state) {
    AddOneBit(kRule, addend.span(), factor, absl::MakeSpan(accumulator));
    factor = -factor;
  }
  Report(state, kSignBytes + 4 + 4);
}

void DenseCompress(benchmark::State& state, DenseType type) {
  const Values gradient = RandomValues(state.range(0));
  Values error(gradient.size());
  std::vector<uint8_t> out(DenseBytes(type, gradient.size()));
  for (auto _ : state) {
    CompressDense(kRule, type, gradient, absl::MakeSpan(error), out.data());
  }
  Report(state, /*g, e=*/8 + /*e=*/4 + DenseBytes(type, 1));
}

void DenseAggregate(benchmark::State& state, DenseType type, size_t ranks) {
  const std::vector<std::vector<uint8_t>> sent(
      ranks, std::vector<uint8_t>(DenseBytes(type, state.range(0)), 0x3f));
  std::vector<const uint8_t*> contributions;
  for (const std::vector<uint8_t>& payload : sent) contributions.push_back(payload.data());
  Values error(state.range(0));
  std::vector<uint8_t> out(DenseBytes(type, error.size()));
  const float inverse_count = 1 / static_cast<float>(ranks);
  for (auto _ : state) {
    AggregateDense(type, contributions, inverse_count, absl::MakeSpan(error), out.data());
  }
  Report(state, ranks * DenseBytes(type, 1) + /*e=*/4 + /*e=*/4 + DenseBytes(type, 1));
}

void Adam(benchmark::State& state) {
  const AdamRates rates = {0.9f, 0.1f, 0.999f, 0.001f, 1e-3f, 1.0f, 1e-8f, 1e-5f};
  const Values gradient = RandomValues(state.range(0));
  Values momentum = gradient, variance(gradient.size(), 1.0f), parameters = gradient;
  for (auto _ : state) {
    AdamStep(rates, DenseType::kFloat32, reinterpret_cast<const uint8_t*>(gradient.data()),
             absl::MakeSpan(momentum), absl::MakeSpan(variance), absl::MakeSpan(parameters));
  }
  Report(state, /*g, m, v, x=*/16 + /*m, v, x=*/12);
}

// The sizes: in the second-level cache, one chunk, and far beyond every cache.
void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(1 << 16)->Arg(1 << 20)->Arg(1 << 24);
}

template <class Body>
void Register(Target target, const std::string& kernel, Body body) {
  const std::string name = kernel + "/" + TargetName(target);
  benchmark::RegisterBenchmark(name.c_str(), [target, body](benchmark::State& state) {
    UseTarget(target);
    body(state);
  })->Apply(Sizes);
}

void RegisterKernels(Target target) {
  using State = benchmark::State;
  Register(target, "CompressMomentum", CompressOneBitMomentum);
  Register(target, "CompressMomentum(dense)", CompressDenseMomentum);
  for (size_t n : {2, 4, 8, 16}) {
    Register(target, "AggregateOneBit(" + std::to_string(n) + ")",
             [n](State& state) { Aggregate(state, n); });
  }
  Register(target, "ApplyMomentum", Apply);
  Register(target, "AddOneBit", Add);
  for (DenseType type : {DenseType::kFloat32, DenseType::kBfloat16}) {
    const std::string name = type == DenseType::kFloat32 ? "fp32" : "bf16";
    Register(target, "CompressDense(" + name + ")",
             [type](State& state) { DenseCompress(state, type); });
    Register(target, "AggregateDense(" + name + ",4)",
             [type](State& state) { DenseAggregate(state, type, /*ranks=*/4); });
  }
  Register(target, "AdamStep(fp32)", Adam);
}

void RegisterAll() {
  const Target best = SupportedTargets().back();
  benchmark::RegisterBenchmark("Copy", Copy)->Apply(Sizes);
  Register(best, "ReadModifyWrite", ReadModifyWrite);
  for (Target target : SupportedTargets()) RegisterKernels(target);
}

}  // namespace
}  // namespace signpost::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  signpost::kernels::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
}
