#include "worker/saved_state.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/checkpoint.pb.h"
#include "worker/checkpoint_file.h"

namespace signpost {
namespace {

std::vector<uint64_t> FirstElements(const Layout& layout) {
  std::vector<uint64_t> first;
  uint64_t next = 0;
  for (const Tensor& tensor : layout.tensors()) {
    first.push_back(next);
    next += ElementCount(tensor);
  }
  return first;
}

// Calls use(chunk, segment) for each part of the tensor in the chunks of which this rank saves the
// aggregators' errors: every world_size-th, as Worker does.
template <class Use>
void ForEachSavedSegment(const Layout& layout, size_t tensor, uint32_t rank, uint32_t world_size,
                         Use use) {
  const Layout::ChunkRange range = layout.ChunksOf(tensor);
  for (uint32_t chunk = range.first; chunk < range.end; ++chunk) {
    if (chunk % world_size != rank) continue;
    for (const Segment& segment : layout.chunks()[chunk].segments) {
      if (segment.tensor == tensor) use(chunk, segment);
    }
  }
}

constexpr absl::string_view kFieldNames[kStateFields] = {
    "value",  "exp_avg",  "exp_avg_sq", "error", "aggregator_error", "fresh_exp_avg_sq",
    "anchor", "local_sum"};

absl::Status CheckElements(const Tensor& tensor, size_t field, size_t got, size_t wanted) {
  if (got == 0 || got == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s of tensor %s has %d elements, wanted %d",
                                                    kFieldNames[field], DescribeTensor(tensor), got,
                                                    wanted));
}

absl::StatusOr<CheckpointManifest> ParseDescription(absl::string_view description) {
  CheckpointManifest manifest;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;  // of later versions
  const auto status = google::protobuf::util::JsonStringToMessage(
      {description.data(), description.size()}, &manifest, options);
  if (!status.ok() || manifest.world_size() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the saved state has no description that this version can read: it begins "
                     "with '",
                     description.substr(0, 40), "'"));
  }
  return manifest;
}

}  // namespace

float InverseOfVariance(float variance, float epsilon) {
  if (!(variance > 0)) return 0;
  return static_cast<float>(1 / (std::sqrt(static_cast<double>(variance)) + epsilon));
}

// An inverse denominator moves by less than one unit in its last place where the variance moves by
// one in its own. So there is a variance for each, next to what the formula gives.
float VarianceOfInverse(float inverse_denominator, float epsilon) {
  if (!(inverse_denominator > 0)) return 0;
  const double root = 1 / static_cast<double>(inverse_denominator) - epsilon;
  const float near = std::max(static_cast<float>(root > 0 ? root * root : 0),
                              std::numeric_limits<float>::denorm_min());
  float above = near, below = near;
  for (int distance = 0; distance < 4; ++distance) {
    if (InverseOfVariance(above, epsilon) == inverse_denominator) return above;
    if (InverseOfVariance(below, epsilon) == inverse_denominator) return below;
    above = std::nextafter(above, std::numeric_limits<float>::infinity());
    below = std::max(std::nextafter(below, 0.0f), std::numeric_limits<float>::denorm_min());
  }
  return near;
}

SavedState::SavedState(RankState state)
    : state_(std::move(state)), first_element_(FirstElements(state_.layout)) {}

absl::StatusOr<SavedState> SavedState::Read(absl::string_view state) {
  absl::StatusOr<RankState> read = ReadRankState(
      state, [](const CheckpointManifest&, const Layout&) { return absl::OkStatus(); });
  if (!read.ok()) return read.status();
  const int epsilons = read->manifest.frozen_epsilons_size();
  if (epsilons > 0 && epsilons != read->manifest.tensors_size()) {
    return absl::DataLossError("the saved state is damaged: it has not an epsilon for each tensor");
  }
  return SavedState(*std::move(read));
}

std::string SavedState::Description() const {
  CheckpointManifest description = state_.manifest;
  description.clear_job();
  description.clear_tensors();
  description.clear_committed_us();
  description.mutable_options()->clear_parameters_crc32c();  // of this rank's numbers
  description.set_has_fresh_variance(!state_.parameters.fresh_variance.empty());
  std::string json;
  // Converting fails for messages of type Any alone.
  static_cast<void>(google::protobuf::util::MessageToJsonString(description, &json));
  return json;
}

std::vector<float> SavedState::Field(size_t tensor, StateField field) const {
  const uint64_t first = first_element_[tensor];
  const uint64_t elements = ElementCount(state_.layout.tensors()[tensor]);
  const auto part_of = [&](const std::vector<float>& numbers) {
    if (numbers.empty()) return std::vector<float>(elements);
    return std::vector<float>(numbers.begin() + first, numbers.begin() + first + elements);
  };
  const bool is_local = !state_.rank.local_sum.empty();
  switch (field) {
    case StateField::kValue:
      return part_of(is_local ? state_.rank.values : state_.parameters.values);
    case StateField::kExpAvg:
      return part_of(is_local ? state_.rank.momentum : state_.parameters.momentum);
    case StateField::kExpAvgSq: {
      std::vector<float> variance = part_of(state_.parameters.variance);
      if (state_.manifest.frozen_epsilons().empty()) return variance;
      const float epsilon = state_.manifest.frozen_epsilons(tensor);
      for (float& number : variance) number = VarianceOfInverse(number, epsilon);
      return variance;
    }
    case StateField::kError:
      return part_of(state_.rank.error);
    case StateField::kFreshExpAvgSq:
      return part_of(state_.parameters.fresh_variance);
    case StateField::kAnchor:
      return part_of(state_.parameters.values);
    case StateField::kLocalSum:
      return part_of(state_.rank.local_sum);
    case StateField::kWholeError: {
      std::vector<float> error = part_of(state_.rank.error);
      AddAggregatorErrors(tensor, absl::MakeSpan(error));
      return error;
    }
    case StateField::kPlacedAggregatorError:
      return AggregatorErrors(tensor, /*is_placed=*/true);
    case StateField::kAggregatorError:
      break;
  }
  return AggregatorErrors(tensor, /*is_placed=*/false);
}

std::vector<float> SavedState::AggregatorErrors(size_t tensor, bool is_placed) const {
  std::vector<float> errors(is_placed ? ElementCount(state_.layout.tensors()[tensor]) : 0);
  ForEachSavedSegment(state_.layout, tensor, state_.rank.rank, state_.manifest.world_size(),
                      [&](uint32_t chunk, const Segment& segment) {
                        const size_t first = is_placed ? segment.tensor_offset : errors.size();
                        if (!is_placed) errors.resize(first + segment.elements);
                        const auto error = state_.rank.aggregator_errors.find(chunk);
                        if (error == state_.rank.aggregator_errors.end()) return;
                        if (error->second.empty()) return;  // zeros
                        std::copy_n(error->second.begin() + segment.chunk_offset, segment.elements,
                                    errors.begin() + first);
                      });
  return errors;
}

void SavedState::AddAggregatorErrors(size_t tensor, absl::Span<float> error) const {
  const auto ranks = static_cast<float>(state_.manifest.world_size());
  for (const auto& [index, of_chunk] : state_.rank.aggregator_errors) {
    if (of_chunk.empty()) continue;  // zeros
    const Chunk& chunk = state_.layout.chunks()[index];
    for (const Segment& segment : chunk.segments) {
      if (segment.tensor != tensor) continue;
      const uint64_t first = chunk.first_element + segment.chunk_offset - first_element_[tensor];
      for (size_t i = 0; i < segment.elements; ++i) {
        error[first + i] += ranks * of_chunk[segment.chunk_offset + i];
      }
    }
  }
}

size_t SavedState::FieldElements(size_t tensor, StateField field) const {
  if (field != StateField::kAggregatorError) return ElementCount(state_.layout.tensors()[tensor]);
  size_t elements = 0;
  ForEachSavedSegment(state_.layout, tensor, state_.rank.rank, state_.manifest.world_size(),
                      [&](uint32_t, const Segment& segment) { elements += segment.elements; });
  return elements;
}

absl::StatusOr<std::string> MakeState(absl::string_view description, const StateOwner& owner,
                                      absl::Span<const TensorFields> numbers) {
  absl::StatusOr<CheckpointManifest> manifest = ParseDescription(description);
  if (!manifest.ok()) return manifest.status();
  if (owner.rank >= owner.world_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d is not in [0, %d)", owner.rank, owner.world_size));
  }
  if (manifest->world_size() != owner.world_size) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the saved state is that of %d ranks, and this job has %d; checkpoint() saves what another "
        "number of ranks can resume from, with resume_with_other_world_size",
        manifest->world_size(), owner.world_size));
  }
  *manifest->mutable_tensors() = {owner.tensors.begin(), owner.tensors.end()};
  const absl::StatusOr<Layout> layout = Layout::Create(owner.tensors, manifest->options());
  if (!layout.ok()) return layout.status();
  const std::vector<uint64_t> first_element = FirstElements(*layout);
  if (numbers.size() != owner.tensors.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("there are numbers of %d tensors, wanted %d",
                                                      numbers.size(), owner.tensors.size()));
  }

  // All of a field, in layout order; zeros where a tensor has none.
  const auto gather =
      [&](StateField field,
          std::optional<StateField> otherwise) -> absl::StatusOr<std::vector<float>> {
    std::vector<float> all(layout->elements());
    for (size_t t = 0; t < numbers.size(); ++t) {
      absl::Span<const float> of_tensor = numbers[t][static_cast<size_t>(field)];
      if (of_tensor.empty() && otherwise) of_tensor = numbers[t][static_cast<size_t>(*otherwise)];
      const absl::Status status = CheckElements(owner.tensors[t], static_cast<size_t>(field),
                                                of_tensor.size(), ElementCount(owner.tensors[t]));
      if (!status.ok()) return status;
      std::copy(of_tensor.begin(), of_tensor.end(), all.begin() + first_element[t]);
    }
    return all;
  };

  const bool is_local = manifest->schedule().local_steps() > 0;
  SavedRank rank = {.rank = owner.rank};
  SavedParameters parameters;
  std::vector<std::pair<std::vector<float>*, StateField>> fields = {
      {&rank.error, StateField::kError},
      {&parameters.variance, StateField::kExpAvgSq},
      {is_local ? &rank.values : &parameters.values, StateField::kValue},
      {is_local ? &rank.momentum : &parameters.momentum, StateField::kExpAvg}};
  if (is_local) fields.push_back({&rank.local_sum, StateField::kLocalSum});
  if (manifest->has_fresh_variance()) {
    fields.push_back({&parameters.fresh_variance, StateField::kFreshExpAvgSq});
  }
  for (const auto& [to, field] : fields) {
    absl::StatusOr<std::vector<float>> all = gather(field, std::nullopt);
    if (!all.ok()) return all.status();
    *to = *std::move(all);
  }
  if (is_local) {
    absl::StatusOr<std::vector<float>> anchor = gather(StateField::kAnchor, StateField::kValue);
    if (!anchor.ok()) return anchor.status();
    parameters.values = *std::move(anchor);
  }

  if (manifest->frozen_epsilons_size() > 0) {
    if (manifest->frozen_epsilons_size() != static_cast<int>(numbers.size())) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the saved state is that of %d tensors, and this job has %d",
                          manifest->frozen_epsilons_size(), numbers.size()));
    }
    for (size_t t = 0; t < numbers.size(); ++t) {
      const absl::Span<float> variance =
          absl::MakeSpan(parameters.variance)
              .subspan(first_element[t], ElementCount(owner.tensors[t]));
      for (float& number : variance) {
        number = InverseOfVariance(number, manifest->frozen_epsilons(t));
      }
    }
  }

  for (uint32_t chunk = owner.rank; chunk < layout->chunks().size(); chunk += owner.world_size) {
    rank.aggregator_errors[chunk].resize(layout->chunks()[chunk].elements);
  }
  for (size_t t = 0; t < numbers.size(); ++t) {
    constexpr auto kField = static_cast<size_t>(StateField::kAggregatorError);
    const absl::Span<const float> errors = numbers[t][kField];
    size_t wanted = 0;
    const auto count = [&](uint32_t, const Segment& segment) { wanted += segment.elements; };
    ForEachSavedSegment(*layout, t, owner.rank, owner.world_size, count);
    const bool is_placed = errors.size() == ElementCount(owner.tensors[t]);
    if (!is_placed) {
      const absl::Status status = CheckElements(owner.tensors[t], kField, errors.size(), wanted);
      if (!status.ok()) return status;
      if (errors.empty()) continue;
    }
    size_t next = 0;
    ForEachSavedSegment(*layout, t, owner.rank, owner.world_size,
                        [&](uint32_t chunk, const Segment& segment) {
                          const size_t from = is_placed ? segment.tensor_offset : next;
                          std::copy_n(errors.begin() + from, segment.elements,
                                      rank.aggregator_errors[chunk].begin() + segment.chunk_offset);
                          next += segment.elements;
                        });
  }
  std::vector<absl::Span<const float>> values;
  for (size_t t = 0; t < numbers.size(); ++t) {
    values.push_back(absl::MakeConstSpan(parameters.values)
                         .subspan(first_element[t], ElementCount(owner.tensors[t])));
  }
  return WriteRankState(*manifest, *layout,
                        {.step = manifest->step(),
                         .rank = rank.rank,
                         .error = rank.error,
                         .aggregator_errors = rank.aggregator_errors,
                         .values = rank.values,
                         .momentum = rank.momentum,
                         .local_sum = rank.local_sum},
                        {.step = manifest->step(),
                         .values = values,
                         .momentum = parameters.momentum,
                         .variance = parameters.variance,
                         .fresh_variance = parameters.fresh_variance});
}

}  // namespace signpost
