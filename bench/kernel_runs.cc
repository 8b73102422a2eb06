#include "bench/kernel_runs.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/adam.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/lamb.h"
#include "kernels/momentum.h"
#include "kernels/onebit.h"
#include "kernels/quantized.h"
#include "kernels/sum.h"
#include "kernels/zero_one.h"
#include "storage/block_vector.h"

namespace signpost::bench {
namespace {

using kernels::BlockRule;
using kernels::DenseType;
using kernels::IntegerType;
using kernels::OneBitSpan;
using kernels::OneBitView;
using kernels::QuantizedView;

using Values = BlockVector<float>;
using Bytes = BlockVector<uint8_t>;

constexpr BlockRule kRule;
constexpr kernels::MomentumRates kMomentumRates;
constexpr kernels::AdamRates kAdamRates = {0.9f, 0.1f, 0.999f, 0.001f, 1e-3f, 1.0f, 1e-8f, 1e-5f};
constexpr kernels::FreezeRates kFreezeRates = {1.0f, 1.0f, 1e-9f, 1e-8f};
// beta2^2000: with much more of it kept, variances that are taken for inverse denominators, again
// and again, would not settle.
constexpr kernels::RefreshRates kRefreshRates = {0.9f, 0.1f, 0.135f, 0.865f, 1e-3f, 1e-8f, 1e-5f};
constexpr kernels::AdaptiveRates kAdaptiveRates = {.beta1 = 0.9f,
                                                   .one_minus_beta1 = 0.1f,
                                                   .kept_variance = 0.999f,
                                                   .one_minus_kept_variance = 0.001f,
                                                   .step_size = 1e-3f,
                                                   .inverse_sqrt_correction2 = 1.0f,
                                                   .floor = 1e-6f,
                                                   .epsilon = 1e-8f,
                                                   .decay = 1e-5f,
                                                   .updates_variance = true};
constexpr kernels::LambRates kLambRates = {.beta1 = 0.9f,
                                           .one_minus_beta1 = 0.1f,
                                           .beta2 = 0.999f,
                                           .one_minus_beta2 = 0.001f,
                                           .inverse_correction1 = 1.0f,
                                           .inverse_sqrt_correction2 = 1.0f,
                                           .epsilon = 1e-8f,
                                           .weight_decay = 0.01f};
constexpr kernels::FreshRates kFreshRates = {.beta1 = 0.9f,
                                             .inverse_one_minus_beta1 = 10.0f,
                                             .beta2 = 0.999f,
                                             .one_minus_beta2 = 0.001f,
                                             .epsilon = 1e-8f,
                                             .weight_decay = 0.01f};
constexpr kernels::LocalRates kLocalRates = {
    .beta1 = 0.9f, .one_minus_beta1 = 0.1f, .learning_rate = 1e-3f, .weight_decay = 0.01f};
constexpr Stream kRead = {Stream::Use::kRead, 4}, kChange = {Stream::Use::kChange, 4},
                 kWrite = {Stream::Use::kWrite, 4};
constexpr Stream kReadSigns = {Stream::Use::kRead, 0.125},
                 kWriteSigns = {Stream::Use::kWrite, 0.125};
constexpr size_t kDenseRanks = 4;
constexpr size_t kIntegerRanks = 8;  // two in a dense payload's memory
constexpr size_t kMostRanks = 64;

// Numbers that look random, of either sign and in [-1, 1).
Values RandomValues(size_t n) {
  Values values(n);
  uint32_t state = 1;
  for (float& value : values) {
    state = state * 1664525 + 1013904223;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  return values;
}

// A compressed span of n elements.
struct Compressed {
  Compressed(size_t n, uint32_t seed)
      : scales(kernels::BlockCount(n, kRule.block_elements), 1.0f), bits(kernels::SignBytes(n)) {
    uint32_t state = seed;
    for (uint8_t& byte : bits) {
      state = state * 1664525 + 1013904223;
      byte = static_cast<uint8_t>(state >> 24);
    }
  }
  OneBitSpan span() { return {scales.data(), bits.data()}; }
  OneBitView view() const { return {scales.data(), bits.data()}; }

  Values scales;
  Bytes bits;
};

// What kernels read and write; each uses those that it needs.
struct Arrays {
  explicit Arrays(size_t n)
      : gradient(RandomValues(n)),
        momentum(gradient),
        parameters(gradient),
        error(n),
        variance(n, 1.0f),
        ones(n, 1.0f),
        lamb_sums(kernels::BlockCount(n, kRule.block_elements)),
        answer(n, /*seed=*/0),
        payload(kernels::DenseBytes(DenseType::kFloat32, n + 8)),  // codes are by eights
        payloads(kDenseRanks, Bytes(payload.size(), 0x3f)) {
    for (size_t rank = 0; rank < kMostRanks; ++rank) sent.emplace_back(n, rank + 1);
    for (const Compressed& of_rank : sent) contributions.push_back(of_rank.view());
    for (const Bytes& of_rank : payloads) dense_contributions.push_back(of_rank.data());
    for (size_t rank = 0; rank < kIntegerRanks; ++rank) {
      const size_t begin = rank < kDenseRanks ? 0 : payload.size() / 2;
      integer_contributions.push_back(
          {sent[rank].scales.data(), payloads[rank % kDenseRanks].data() + begin});
    }
  }

  Values gradient, momentum, parameters, error;
  Values variance;  // or inverse denominators
  Values ones;      // which stay such, whichever of the two they are taken for
  std::vector<kernels::LambSums> lamb_sums;
  Compressed answer;
  std::vector<Compressed> sent;
  std::vector<OneBitView> contributions;
  Bytes payload;
  std::vector<Bytes> payloads;
  std::vector<const uint8_t*> dense_contributions;
  std::vector<QuantizedView> integer_contributions;
};

std::vector<KernelRun> CompressKernels(const std::shared_ptr<Arrays>& a) {
  return {{"compress, one-bit momentum",
           {/*g=*/kRead, /*m=*/kReadSigns, /*e=*/kChange, kWriteSigns},
           [a] {
             CompressMomentum(kRule, kMomentumRates, a->gradient, a->sent[0].view(),
                              absl::MakeSpan(a->error), a->answer.span());
           }},
          {"compress, dense momentum",
           {/*g=*/kRead, /*m=*/kRead, /*e=*/kChange, kWriteSigns},
           [a] {
             CompressMomentum(kRule, kMomentumRates, a->gradient, a->momentum.data(),
                              absl::MakeSpan(a->error), a->answer.span());
           }},
          {"compress, no momentum", {/*x=*/kRead, /*e=*/kChange, kWriteSigns}, [a] {
             CompressOneBit(kRule, a->gradient, absl::MakeSpan(a->error), a->answer.span());
           }}};
}

std::vector<KernelRun> UseKernels(const std::shared_ptr<Arrays>& a) {
  return {{"apply",
           {/*m=*/kReadSigns, /*inverse=*/kRead, /*x=*/kChange},
           [a] {
             ApplyMomentum(kRule, a->sent[0].view(),
                           {.learning_rate = 1e-3f, .weight_decay = 0.01f}, a->variance,
                           absl::MakeSpan(a->parameters));
           }},
          {"decompress",
           {kReadSigns, /*x=*/kWrite},
           [a] { DecompressOneBit(kRule, a->sent[0].view(), absl::MakeSpan(a->momentum)); }},
          {"take back", {kReadSigns, /*e=*/kChange}, [a] {
             AddOneBit(kRule, a->sent[0].view(), /*factor=*/1e-3f, absl::MakeSpan(a->error));
           }}};
}

KernelRun AggregateKernel(const std::shared_ptr<Arrays>& a, size_t ranks) {
  Streams streams(ranks, kReadSigns);
  streams.insert(streams.end(), {/*e=*/kChange, kWriteSigns});
  return {absl::StrCat("aggregate, ", ranks, " workers"), std::move(streams), [a, ranks] {
            AggregateOneBit(kRule, absl::MakeConstSpan(a->contributions).first(ranks),
                            1 / static_cast<float>(ranks), absl::MakeSpan(a->error),
                            a->answer.span());
          }};
}

std::vector<KernelRun> DenseKernels(const std::shared_ptr<Arrays>& a, DenseType type,
                                    const std::string& type_name) {
  const auto payload_bytes = static_cast<double>(kernels::DenseBytes(type, 1));
  const Stream payload = {Stream::Use::kRead, payload_bytes};
  const Stream out = {Stream::Use::kWrite, payload_bytes};
  const bool has_error = type != DenseType::kFloat32;
  const auto error = [a, has_error] {
    return has_error ? absl::MakeSpan(a->error) : absl::Span<float>();
  };
  Streams compress = {/*g=*/kRead}, aggregate(kDenseRanks, payload);
  for (Streams* streams : {&compress, &aggregate}) {
    if (has_error) streams->push_back(/*e=*/kChange);
    streams->push_back(out);
  }
  const Streams step = {payload, /*m=*/kChange, /*v=*/kChange, /*x=*/kChange};
  return {
      {"compress, " + type_name, compress,
       [a, type, error] { CompressDense(kRule, type, a->gradient, error(), a->payload.data()); }},
      {absl::StrCat("aggregate, ", type_name, ", ", kDenseRanks, " workers"), aggregate,
       [a, type, error] {
         AggregateDense(type, a->dense_contributions, a->gradient.size(), 1.0f / kDenseRanks,
                        error(), a->payload.data());
       }},
      {"decompress, " + type_name,
       {payload, /*x=*/kWrite},
       [a, type] { DecompressDense(type, a->payloads[0].data(), absl::MakeSpan(a->momentum)); }},
      {"Adam step, " + type_name, step,
       [a, type] {
         AdamStep(kAdamRates, type, a->payloads[0].data(), absl::MakeSpan(a->momentum),
                  absl::MakeSpan(a->variance), absl::MakeSpan(a->parameters));
       }},
      {"adaptive step, " + type_name, step,
       [a, type] {
         AdaptiveStep(kAdaptiveRates, type, a->payloads[0].data(), absl::MakeSpan(a->momentum),
                      absl::MakeSpan(a->variance), absl::MakeSpan(a->parameters));
       }},
      {"refresh step, " + type_name, step,
       [a, type] {
         RefreshStep(kRefreshRates, type, a->payloads[0].data(), absl::MakeSpan(a->momentum),
                     absl::MakeSpan(a->variance), absl::MakeSpan(a->parameters));
       }},
      {"take back, " + type_name, {payload, /*e=*/kChange}, [a, type] {
         AddDense(type, a->payloads[0].data(), /*factor=*/1e-3f, absl::MakeSpan(a->error));
       }}};
}

// What goes through state without a gradient: at the freeze step, in refreshes, and where errors
// change their scale or are looked at.
std::vector<KernelRun> StateKernels(const std::shared_ptr<Arrays>& a) {
  return {
      {"freeze",
       {/*m=*/kChange, /*v=*/kChange},
       [a] { Freeze(kFreezeRates, absl::MakeSpan(a->momentum), absl::MakeSpan(a->variance)); }},
      {"thaw",
       {/*d=*/kChange},
       [a] { kernels::Thaw(kFreezeRates.epsilon, absl::MakeSpan(a->ones)); }},
      {"scale", {/*e=*/kChange}, [a] { kernels::Scale(/*factor=*/-1, absl::MakeSpan(a->error)); }},
      {"sum", {/*v=*/kRead}, [a] { kernels::Sum(a->variance); }},
      {"sum of squares", {/*e=*/kRead}, [a] { kernels::SumOfSquares(a->error); }}};
}

std::vector<KernelRun> MomentumKernels(const std::shared_ptr<Arrays>& a) {
  return {{"momentum input",
           {/*g=*/kRead, /*m=*/kRead, /*input=*/kWrite},
           [a] {
             MomentumInput(kMomentumRates, a->gradient, a->momentum.data(),
                           absl::MakeSpan(a->parameters));
           }},
          {"apply, dense momentum", {/*m=*/kRead, /*inverse=*/kRead, /*x=*/kChange}, [a] {
             kernels::ApplyDenseMomentum(a->momentum,
                                         {.learning_rate = 1e-3f, .weight_decay = 0.01f},
                                         a->variance, absl::MakeSpan(a->parameters));
           }}};
}

KernelRun LocalStepKernel(const std::shared_ptr<Arrays>& a) {
  return {"local step",
          {/*g=*/kRead, /*m=*/kChange, /*u=*/kChange, /*inverse=*/kRead, /*x=*/kChange},
          [a] {
            LocalStep(kRule, kLocalRates, a->gradient, absl::MakeSpan(a->momentum),
                      absl::MakeSpan(a->error), a->variance, absl::MakeSpan(a->parameters));
          }};
}

// Each block's sums do not count as streams either.
std::vector<KernelRun> LambKernels(const std::shared_ptr<Arrays>& a) {
  return {{"LAMB moments, fp32",
           {/*g=*/kRead, /*m=*/kChange, /*v=*/kChange, /*x=*/kRead},
           [a] {
             UpdateMoments(kRule, kLambRates, DenseType::kFloat32, a->payloads[0].data(),
                           absl::MakeSpan(a->momentum), absl::MakeSpan(a->variance), a->parameters,
                           a->lamb_sums.data());
           }},
          {"LAMB step",
           {/*m=*/kRead, /*v=*/kRead, /*x=*/kChange},
           [a] {
             LambStep(kLambRates, /*step_size=*/1e-3f, a->momentum, a->variance,
                      absl::MakeSpan(a->parameters));
           }},
          {"floor variance",
           {/*v=*/kRead, /*f=*/kWrite},
           [a] { FloorVariance(kFreezeRates, a->variance, absl::MakeSpan(a->error)); }},
          {"follow momentum",
           {/*m=*/kReadSigns, /*before=*/kReadSigns, /*inverse=*/kRead, /*f=*/kChange, /*x=*/kRead},
           [a] {
             FollowMomentum(kRule, kFreshRates, a->sent[0].view(), a->sent[1].view(), a->variance,
                            absl::MakeSpan(a->error), a->parameters, a->lamb_sums.data());
           }},
          {"follow momentum, dense",
           {/*answer=*/kRead, /*m=*/kChange, /*inverse=*/kRead, /*f=*/kChange, /*x=*/kRead},
           [a] {
             FollowMomentum(kRule, kFreshRates, a->gradient.data(), absl::MakeSpan(a->momentum),
                            a->variance, absl::MakeSpan(a->error), a->parameters,
                            a->lamb_sums.data());
           }}};
}

std::vector<KernelRun> IntegerKernels(const std::shared_ptr<Arrays>& a, IntegerType type,
                                      const std::string& type_name) {
  const double bytes = static_cast<double>(kernels::BitsOf(type)) / 8;
  const Stream codes = {Stream::Use::kRead, bytes}, codes_out = {Stream::Use::kWrite, bytes};
  const auto out = [a] {
    return kernels::QuantizedSpan{a->answer.scales.data(), a->payload.data()};
  };
  std::vector<KernelRun> all = {
      {"compress, " + type_name,
       {/*x=*/kRead, /*e=*/kChange, codes_out},
       [a, type, out] {
         CompressQuantized(kRule, type, a->gradient, absl::MakeSpan(a->error), out());
       }},
      {"decompress, " + type_name,
       {codes, /*x=*/kWrite},
       [a, type] {
         DecompressQuantized(kRule, type, a->integer_contributions[0], absl::MakeSpan(a->momentum));
       }},
      {"take back, " + type_name, {codes, /*e=*/kChange}, [a, type] {
         AddQuantized(kRule, type, a->integer_contributions[0], /*factor=*/1e-3f,
                      absl::MakeSpan(a->error));
       }}};
  for (const size_t ranks : {kIntegerRanks / 2, kIntegerRanks}) {
    Streams streams(ranks, codes);
    streams.insert(streams.end(), {/*e=*/kChange, codes_out});
    all.push_back({absl::StrCat("aggregate, ", type_name, ", ", ranks, " workers"),
                   std::move(streams), [a, type, ranks, out] {
                     AggregateQuantized(
                         kRule, type, absl::MakeConstSpan(a->integer_contributions).first(ranks),
                         1 / static_cast<float>(ranks), absl::MakeSpan(a->error), out());
                   }});
  }
  return all;
}

}  // namespace

std::vector<KernelRun> MakeKernelRuns(size_t elements) {
  const auto a = std::make_shared<Arrays>(elements);
  std::vector<KernelRun> all;
  const auto add = [&all](std::vector<KernelRun> some) {
    for (KernelRun& kernel : some) all.push_back(std::move(kernel));
  };
  add(CompressKernels(a));
  add(UseKernels(a));
  for (size_t ranks : {2, 4, 8, 16, 64}) all.push_back(AggregateKernel(a, ranks));
  add(DenseKernels(a, DenseType::kFloat32, "fp32"));
  add(DenseKernels(a, DenseType::kBfloat16, "bf16"));
  add(DenseKernels(a, DenseType::kFloat16, "fp16"));
  add(IntegerKernels(a, IntegerType::kInt8, "int8"));
  add(IntegerKernels(a, IntegerType::kInt4, "int4"));
  add(StateKernels(a));
  add(MomentumKernels(a));
  all.push_back(LocalStepKernel(a));
  add(LambKernels(a));
  return all;
}

}  // namespace signpost::bench
