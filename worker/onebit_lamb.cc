#include "worker/onebit_lamb.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"

namespace signpost {

struct OneBitLamb::Norms {
  bool is_in_step = false;
  double numerator = 0, update = 0;  // squares of norms, as LambSums
  float least_quotient = std::numeric_limits<float>::infinity();
};

OneBitLamb::OneBitLamb(const Layout& layout, const OptimizerOptions& options,
                       std::vector<Parameter> parameters, uint32_t threads, kernels::cuda::Gpu* gpu)
    : OneBitAdam(layout, options, std::move(parameters), threads, gpu),
      lamb_(state().NewLambState()),
      awaits_end_(layout.chunks().size()) {
  for (uint32_t tensor = 0; tensor < layout.tensors().size(); ++tensor) {
    scale(tensor).set_ratio(1);
    scale(tensor).set_factor(1);
  }
}

void OneBitLamb::Restore(OptimizerState saved) {
  if (!saved.fresh_variance.empty()) {
    for (size_t c = 0; c < layout().chunks().size(); ++c) {
      const size_t first = layout().chunks()[c].first_element;
      lamb_->SetFreshVariance(c, saved.fresh_variance.data() + first);
    }
    std::vector<float>().swap(saved.fresh_variance);  // not to have it twice
  }
  OneBitAdam::Restore(std::move(saved));
}

Payload OneBitLamb::State(uint32_t chunk) const {
  Payload saved = OneBitAdam::State(chunk);
  const size_t elements = layout().chunks()[chunk].elements;
  lamb_->GetFreshVariance(chunk, reinterpret_cast<float*>(saved.data()) + 3 * elements);
  return saved;
}

void OneBitLamb::SetState(uint32_t chunk, absl::Span<const uint8_t> saved) {
  OneBitAdam::SetState(chunk, saved);
  const size_t elements = layout().chunks()[chunk].elements;
  lamb_->SetFreshVariance(chunk, reinterpret_cast<const float*>(saved.data()) + 3 * elements);
  awaits_end_[chunk] = false;
}

bool OneBitLamb::HasFrozen() const {
  const uint64_t freeze_step = schedule().freeze_step();
  return freeze_step > 0 && schedule().begun_steps() > freeze_step;
}

HostFloats OneBitLamb::fresh_variance() const {
  return HasFrozen() ? lamb_->FreshVariances() : OneBitAdam::fresh_variance();
}

void OneBitLamb::ApplyGradient(uint32_t chunk, Payload answer) {
  lamb_->UpdateMoments(
      chunk, codec(), [this](uint32_t tensor) { return LambRatesOf(tensor); }, std::move(answer));
  awaits_end_[chunk] = true;
}

void OneBitLamb::ApplyMomentum(uint32_t chunk, Payload answer) {
  lamb_->FollowMomentum(
      chunk, codec(), [this](uint32_t tensor) { return FreshRatesOf(tensor); }, std::move(answer));
  awaits_end_[chunk] = true;
}

void OneBitLamb::BeforeFreeze(AdamState::RatesOf<kernels::FreezeRates> rates) {
  for (size_t c = 0; c < layout().chunks().size(); ++c) lamb_->StartFreshVariance(c, rates);
  for (uint32_t t = 0; t < layout().tensors().size(); ++t) scale(t).set_factor(1);
}

void OneBitLamb::EndStep() {
  if (!absl::c_linear_search(awaits_end_, true)) return;
  const std::vector<Norms> norms = NormsOfTensors();
  for (uint32_t tensor = 0; tensor < norms.size(); ++tensor) {
    if (!norms[tensor].is_in_step) continue;
    if (stage() == Stage::kWarmUp) {
      UpdateRatio(norms[tensor], scale(tensor));
    } else {
      UpdateFactor(norms[tensor], scale(tensor));
    }
  }
  for (uint32_t chunk = 0; chunk < awaits_end_.size(); ++chunk) Step(chunk);
}

std::vector<OneBitLamb::Norms> OneBitLamb::NormsOfTensors() {
  std::vector<Norms> tensors(layout().tensors().size());
  const absl::Span<const kernels::LambSums> sums = lamb_->Sums();
  size_t first_block = 0;
  for (uint32_t c = 0; c < awaits_end_.size(); ++c) {
    const Chunk& chunk = layout().chunks()[c];
    if (awaits_end_[c]) {
      ForEachBlock(chunk, layout().options().block_elements(), [&](const Segment& block) {
        const kernels::LambSums& of_block = sums[first_block + block.first_block];
        Norms& norms = tensors[block.tensor];
        norms.is_in_step = true;
        norms.numerator += of_block.numerator;
        norms.update += of_block.update;
        norms.least_quotient = std::min(norms.least_quotient, of_block.least_quotient);
      });
    }
    first_block += chunk.blocks;
  }
  return tensors;
}

void OneBitLamb::UpdateRatio(const Norms& norms, TensorScale& scale) const {
  const LambOptions& lamb = *options().lamb;
  scale.set_ratio(1);
  if (!(norms.numerator > 0 && norms.update > 0)) return;
  const double ratio = std::sqrt(norms.numerator) / std::sqrt(norms.update);
  if (std::isnan(ratio)) return;  // neither norm is finite
  scale.set_ratio(std::clamp(ratio, lamb.min_coeff, lamb.max_coeff));
  scale.set_average(lamb.coeff_beta * scale.average() + (1 - lamb.coeff_beta) * scale.ratio());
  scale.set_weight(lamb.coeff_beta * scale.weight() + (1 - lamb.coeff_beta));
}

void OneBitLamb::UpdateFactor(const Norms& norms, TensorScale& scale) const {
  const LambOptions& lamb = *options().lamb;
  // The momentum's share of the update. Without a momentum there is no variance to make up for.
  double share = 0;
  if (norms.update > 0) {
    share = std::min(1.0, std::sqrt(norms.numerator) / std::sqrt(norms.update));
  }
  constexpr double kLeast = std::numeric_limits<float>::min();
  const double largest = 1 / std::max<double>(norms.least_quotient, kLeast);
  const double factor = std::clamp(largest * share + (1 - share), lamb.factor_min, lamb.factor_max);
  scale.set_factor(std::clamp(factor, scale.factor() * (1 - lamb.factor_threshold),
                              scale.factor() * (1 + lamb.factor_threshold)));
}

double OneBitLamb::ScaleOf(uint32_t tensor) const {
  const TensorScale& of_tensor = scale(tensor);
  if (stage() == Stage::kWarmUp) return of_tensor.ratio();
  if (!(of_tensor.weight() > 0)) return of_tensor.factor();
  const double weight = options().bias_correction ? of_tensor.weight() : 1;
  return of_tensor.average() / weight * of_tensor.factor();
}

void OneBitLamb::Step(uint32_t chunk) {
  if (!awaits_end_[chunk]) return;
  awaits_end_[chunk] = false;
  if (stage() == Stage::kWarmUp) {
    return lamb_->Step(chunk, [this](uint32_t tensor) {
      const double step_size = RatesOfTensor(tensor).learning_rate * ScaleOf(tensor);
      return LambState::StepRates{LambRatesOf(tensor), static_cast<float>(step_size)};
    });
  }
  lamb_->StepAlongMomentum(chunk, [this](uint32_t tensor) {
    const GroupRates& rates = RatesOfTensor(tensor);
    return UpdateRatesOf(tensor, rates.learning_rate * ScaleOf(tensor), rates.weight_decay);
  });
}

void OneBitLamb::EndFollowedStep(uint32_t chunk, uint64_t step, const StepRates& rates,
                                 const TensorScales& after) {
  if (!awaits_end_[chunk]) return;
  SetRates(signpost::RatesOf(rates));
  SetStage(step);
  SetScales(after);
  Step(chunk);
}

kernels::LambRates OneBitLamb::LambRatesOf(uint32_t tensor) const {
  const GroupRates& group = RatesOfTensor(tensor);
  const uint64_t steps = step() + 1 - FirstStep(tensor);
  return {
      .beta1 = static_cast<float>(group.beta1),
      .one_minus_beta1 = static_cast<float>(1 - group.beta1),
      .beta2 = static_cast<float>(group.beta2),
      .one_minus_beta2 = static_cast<float>(1 - group.beta2),
      .inverse_correction1 = static_cast<float>(1 / Correction(group.beta1, steps)),
      .inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(Correction(group.beta2, steps))),
      .epsilon = static_cast<float>(group.epsilon),
      .weight_decay = static_cast<float>(group.weight_decay),
  };
}

kernels::FreshRates OneBitLamb::FreshRatesOf(uint32_t tensor) const {
  const GroupRates& group = RatesOfTensor(tensor);
  return {
      .beta1 = static_cast<float>(group.beta1),
      .inverse_one_minus_beta1 = static_cast<float>(1 / (1 - group.beta1)),
      .beta2 = static_cast<float>(group.beta2),
      .one_minus_beta2 = static_cast<float>(1 - group.beta2),
      .epsilon = FrozenEpsilon(tensor),
      .weight_decay = static_cast<float>(group.weight_decay),
  };
}

}  // namespace signpost
