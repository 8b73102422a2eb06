#include "worker/zero_one_adam.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "proto/codec.h"

namespace signpost {
namespace {

// What a sum over an interval is multiplied by to be the mean. None where the learning rates come
// to nothing: as well then all momenta have the same weight, and the last one stands for them.
std::optional<float> WeightOf(const LocalSums& sums) {
  const auto weight = static_cast<float>(1 / sums.learning_rate());
  if (!std::isfinite(weight)) return std::nullopt;
  return weight;
}

}  // namespace

ZeroOneAdam::ZeroOneAdam(const Layout& layout, const OptimizerOptions& options,
                         std::vector<Parameter> parameters, uint32_t threads,
                         kernels::cuda::Gpu* gpu)
    : OneBitAdam(layout, options, std::move(parameters), threads, gpu),
      steps_(*options.zero_one, options.freeze_step, options.as_deepspeed),
      local_(state().NewZeroOneState()),
      floors_(layout.tensors().size()),
      has_local_steps_(layout.chunks().size()) {}

void ZeroOneAdam::Restore(OptimizerState saved) {
  if (!saved.anchor.empty()) {
    for (size_t c = 0; c < layout().chunks().size(); ++c) {
      const size_t first = layout().chunks()[c].first_element;
      local_->Set(ZeroOneState::Field::kAnchor, c, saved.anchor.data() + first);
      local_->Set(ZeroOneState::Field::kSum, c, saved.local_sum.data() + first);
      has_local_steps_[c] = true;
    }
    std::vector<float>().swap(saved.anchor);  // not to have them twice
    std::vector<float>().swap(saved.local_sum);
  }
  OneBitAdam::Restore(std::move(saved));
}

void ZeroOneAdam::BeginStep(uint64_t round, absl::Span<const GroupRates> rates) {
  SetRates({rates.begin(), rates.end()});
  Schedule& schedule = mutable_schedule();
  schedule.set_begun_steps(round);  // others may have begun it before this worker came back
  SetKind(round);
  FreezeIfDue(round);
  const bool is_first_of_round = schedule.local_steps() == 0;
  if (is_first_of_round && round > options().freeze_step) {
    CheckMomentum(steps_.StepsOf(round - 1).steps);
  }
  UpdateFloors();
  const uint64_t steps = steps_.StepsOf(round).steps;
  if (steps > 1) {
    AddToLocalSums();
  } else {
    schedule.clear_local_sums();
  }
  if (schedule.local_steps() + 1 < steps) {
    kind_ = Kind::kLocal;
    schedule.set_local_steps(schedule.local_steps() + 1);
  } else {
    schedule.set_local_steps(0);
    schedule.set_begun_steps(round + 1);
  }
}

void ZeroOneAdam::BeginMissedStep(uint64_t round, const StepRates& rates) {
  SetKind(round);
  if (kind_ != Kind::kMean) return BeginStep(round, signpost::RatesOf(rates));
  is_missed_ = true;
  SetRates(signpost::RatesOf(rates));
  SetSchedule(rates.schedule());
}

void ZeroOneAdam::FollowStep(uint64_t round, const StepRates& rates) {
  SetRates(signpost::RatesOf(rates));
  SetSchedule(rates.schedule());
  SetKind(round);
  floors_of_.reset();
  for (const TensorScale& scale : rates.scales()) floors_[scale.tensor()] = scale.floor();
}

void ZeroOneAdam::SetSchedule(Schedule schedule) {
  schedule.set_local_steps(0);
  OneBitAdam::SetSchedule(std::move(schedule));
}

// As it is if it is not local.
void ZeroOneAdam::SetKind(uint64_t round) {
  SetStage(round);
  is_missed_ = false;
  if (stage() == Stage::kWarmUp) {
    kind_ = steps_.LastUpdate(round).step == round ? Kind::kUpdate : Kind::kGradient;
  } else {
    kind_ = steps_.StepsOf(round).steps == 1 ? Kind::kMomentum : Kind::kMean;
  }
}

// As long as there has been a dense gradient in every step it is Adam.
bool ZeroOneAdam::HasFloor() const {
  return kind_ == Kind::kGradient ||
         (kind_ == Kind::kUpdate && steps_.LastUpdate(step()).interval > 1);
}

void ZeroOneAdam::UpdateFloors() {
  if (!HasFloor() || options().variance_floor == 0) return;
  const uint64_t update = steps_.LastUpdate(step() - 1).step;
  if (floors_of_ == update) return;
  floors_of_ = update;
  const std::vector<double> sums = SumsOfVariance();
  for (uint32_t tensor = 0; tensor < floors_.size(); ++tensor) {
    floors_[tensor] = options().variance_floor * sums[tensor] / WholeElements(tensor);
  }
}

void ZeroOneAdam::AddToLocalSums() {
  Schedule& schedule = mutable_schedule();
  if (schedule.local_steps() == 0) {
    schedule.clear_local_sums();
    for (uint32_t g = 0; g < groups(); ++g) schedule.add_local_sums()->set_last_momentum(1);
  }
  for (uint32_t g = 0; g < groups(); ++g) {
    const GroupRates& rates = RatesOfGroup(g);
    LocalSums& sums = *schedule.mutable_local_sums(g);
    sums.set_last_momentum(rates.beta1 * sums.last_momentum());
    sums.set_learning_rate(sums.learning_rate() + rates.learning_rate);
    sums.set_decay(sums.decay() + rates.learning_rate * rates.weight_decay);
    sums.set_momentum(sums.momentum() + rates.learning_rate * sums.last_momentum());
  }
}

const LocalSums& ZeroOneAdam::SumsOf(uint32_t tensor) const {
  const int group = static_cast<int>(GroupOf(tensor));
  // A schedule that came from outside may lack it.
  const bool is_known = group < schedule().local_sums_size();
  return is_known ? schedule().local_sums(group) : LocalSums::default_instance();
}

uint64_t ZeroOneAdam::StepsOfVariance() const {
  return steps_.LastUpdate(options().freeze_step - 1).step + 1;
}

float ZeroOneAdam::ErrorScaleOf(const GroupRates& rates) const {
  // Aggregators take 0 for 1.
  if (options().as_deepspeed) return std::numeric_limits<float>::min();
  return OneBitAdam::ErrorScaleOf(rates);
}

Codec ZeroOneAdam::codec() const {
  return kind_ == Kind::kUpdate ? options().variance_codec : options().codec;
}

// All that its variance is made of comes without the errors: what the codec takes for zero each
// time would never train. bf16 has fp32's range, so there zero is zero.
bool ZeroOneAdam::LiftsZeros() const {
  return Loses(options().variance_codec) && options().variance_codec != BFLOAT16;
}

float ZeroOneAdam::loss_unit() const { return kind_ == Kind::kUpdate ? 1 : 0; }

std::optional<uint32_t> ZeroOneAdam::Compress(uint32_t chunk, absl::Span<const Gradient> gradients,
                                              uint8_t* payload, Later later) {
  if (kind_ == Kind::kUpdate) {
    if (Loses(codec())) SetHasError(chunk);
    return state().CompressApart(
        chunk, codec(), [](uint32_t) { return 1.0f; }, gradients, payload, std::move(later));
  }
  if (kind_ != Kind::kMean) {
    return OneBitAdam::Compress(chunk, gradients, payload, std::move(later));
  }
  SetHasError(chunk);
  if (is_missed_) {
    // With gradients of zero the momentum that all had would have decayed from step to step.
    local_->SetSumToMomentum(chunk);
    return local_->CompressSum(
        chunk, codec(),
        [this](uint32_t tensor) {
          const LocalSums& sums = SumsOf(tensor);
          return static_cast<float>(WeightOf(sums) ? sums.momentum() / sums.learning_rate()
                                                   : sums.last_momentum());
        },
        payload, std::move(later));
  }
  local_->Step(
      chunk,
      [this](uint32_t tensor) {
        kernels::LocalRates rates = LocalRatesOf(tensor);
        if (!WeightOf(SumsOf(tensor))) rates.learning_rate = 1;
        return rates;
      },
      gradients, ZeroOneState::Parameters::kStay);
  return local_->CompressSum(
      chunk, codec(), [this](uint32_t tensor) { return WeightOf(SumsOf(tensor)).value_or(1); },
      payload, std::move(later));
}

void ZeroOneAdam::Apply(uint32_t chunk, Answer answer) {
  if (kind_ == Kind::kMean) {
    EndInterval(chunk);
    NoteMomentum(chunk, answer.payload);
    return state().ApplyMomentum(
        chunk, codec(),
        [this](uint32_t tensor) {
          const LocalSums& sums = SumsOf(tensor);
          if (!WeightOf(sums)) return kernels::UpdateRates{0, 0};
          return UpdateRatesOf(tensor, sums.learning_rate(), sums.decay() / sums.learning_rate());
        },
        std::move(answer.payload));
  }
  if (!HasFloor()) return OneBitAdam::Apply(chunk, std::move(answer));
  local_->AdaptiveStep(
      chunk, codec(), [this](uint32_t tensor) { return AdaptiveRatesOf(tensor); },
      std::move(answer.payload));
}

void ZeroOneAdam::TakeBack(uint32_t chunk, const uint8_t* payload) {
  if (kind_ != Kind::kMean) return OneBitAdam::TakeBack(chunk, payload);
  if (payload != nullptr) PutBack(chunk, payload, MomentumShare::kNone);
  EndInterval(chunk);
  // Its share is in the errors.
  const std::vector<float> zeros(layout().chunks()[chunk].elements);
  state().Set(AdamState::Field::kMomentum, chunk, zeros.data());
  ForgetMomentum(chunk);
  state().Scale(AdamState::Field::kParameters, chunk,
                [this](uint32_t tensor) { return static_cast<float>(1 - SumsOf(tensor).decay()); });
}

void ZeroOneAdam::KeepInput(uint32_t chunk, const uint8_t* payload) {
  if (kind_ != Kind::kMean) return OneBitAdam::KeepInput(chunk, payload);
  PutBack(chunk, payload, MomentumShare::kNone);
}

void ZeroOneAdam::StepLocally(uint32_t chunk, absl::Span<const Gradient> gradients) {
  if (!has_local_steps_[chunk]) local_->Begin(chunk);
  has_local_steps_[chunk] = true;
  local_->Step(
      chunk, [this](uint32_t tensor) { return LocalRatesOf(tensor); }, gradients,
      ZeroOneState::Parameters::kMove);
}

std::vector<BlockLeftAlone> ZeroOneAdam::TakeBlocksLeftAlone() {
  return local_->TakeBlocksLeftAlone(IsLocal() ? ZeroOneState::Wanted::kKnown
                                               : ZeroOneState::Wanted::kAll);
}

void ZeroOneAdam::EndInterval(uint32_t chunk) {
  if (has_local_steps_[chunk]) local_->ReturnToAnchor(chunk);
  has_local_steps_[chunk] = false;
}

void ZeroOneAdam::SetState(uint32_t chunk, absl::Span<const uint8_t> saved) {
  OneBitAdam::SetState(chunk, saved);
  floors_of_.reset();
}

TensorScales ZeroOneAdam::ScalesOf(uint32_t chunk) const {
  TensorScales scales;
  if (!HasFloor()) return scales;
  for (const Segment& segment : layout().chunks()[chunk].segments) {
    TensorScale& scale = *scales.Add();
    scale.set_tensor(segment.tensor);
    scale.set_floor(floors_[segment.tensor]);
  }
  return scales;
}

HostFloats ZeroOneAdam::anchor() const {
  if (schedule().local_steps() == 0) return OneBitAdam::anchor();
  return local_->All(ZeroOneState::Field::kAnchor);
}

HostFloats ZeroOneAdam::local_sum() const {
  if (schedule().local_steps() == 0) return OneBitAdam::local_sum();
  return local_->All(ZeroOneState::Field::kSum);
}

kernels::AdaptiveRates ZeroOneAdam::AdaptiveRatesOf(uint32_t tensor) const {
  const GroupRates& group = RatesOfTensor(tensor);
  const ZeroOneSchedule::Update update = steps_.LastUpdate(step());
  const uint64_t weighed_steps = options().as_deepspeed ? 1 : update.interval;
  const double kept_variance = Power(group.beta2, weighed_steps);
  const double correction2 = Correction(group.beta2, update.step + 1);
  // The floor is that of the variance before the step.
  const uint64_t updated = steps_.LastUpdate(step() - 1).step;
  const double floor = floors_[tensor] / Correction(group.beta2, updated + 1);
  return {
      .beta1 = static_cast<float>(group.beta1),
      .one_minus_beta1 = static_cast<float>(1 - group.beta1),
      .kept_variance = static_cast<float>(kept_variance),
      .one_minus_kept_variance = static_cast<float>(1 - kept_variance),
      .step_size = static_cast<float>(group.learning_rate / Correction(group.beta1, step() + 1)),
      .inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(correction2)),
      .floor = static_cast<float>(floor * correction2),
      .epsilon = static_cast<float>(group.epsilon),
      .decay = static_cast<float>(group.learning_rate * group.weight_decay),
      .updates_variance = kind_ == Kind::kUpdate,
      .lifts_zeros = LiftsZeros(),
  };
}

kernels::LocalRates ZeroOneAdam::LocalRatesOf(uint32_t tensor) const {
  const GroupRates& group = RatesOfTensor(tensor);
  return {
      .beta1 = static_cast<float>(group.beta1),
      .one_minus_beta1 = static_cast<float>(1 - group.beta1),
      .learning_rate = static_cast<float>(group.learning_rate),
      .weight_decay = static_cast<float>(group.weight_decay),
      .most_update = MostUpdate(),
  };
}

}  // namespace signpost
