#include "worker/saved_state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "proto/checkpoint.pb.h"
#include "worker/checkpoint_file.h"

namespace signpost {
namespace {

// Tensors of 24 and 9 elements in chunks of 16, so that the first one lies in two chunks.
constexpr size_t kElements = 33;

std::vector<Tensor> Tensors() {
  std::vector<Tensor> tensors(2);
  tensors[0].set_name("weight");
  tensors[0].add_shape(6);
  tensors[0].add_shape(4);
  tensors[1].set_name("bias");
  tensors[1].add_shape(9);
  return tensors;
}

JobOptions Options() {
  JobOptions options;
  options.set_block_elements(8);
  options.set_chunk_elements(16);
  options.set_gamma(1.35f);
  options.set_optimizer("1-bit adam");
  return options;
}

// Has the state of rank 1 of 2, with other numbers in each field.
class SavedStateTest : public ::testing::Test {
 protected:
  SavedStateTest() : layout_(*Layout::Create(Tensors(), Options())) {
    manifest_.set_step(7);
    manifest_.set_world_size(2);
    *manifest_.mutable_options() = Options();
    for (const Tensor& tensor : Tensors()) *manifest_.add_tensors() = tensor;
    manifest_.mutable_schedule()->set_begun_steps(7);
    manifest_.mutable_schedule()->set_variance_sum(0.1);
    rank_.rank = 1;
    rank_.error = Numbers(100);
    for (uint32_t chunk = 1; chunk < layout_.chunks().size(); chunk += 2) {
      rank_.aggregator_errors[chunk].assign(layout_.chunks()[chunk].elements, 200.5f + chunk);
    }
    parameters_ = {.values = Numbers(300), .momentum = Numbers(-400), .variance = Numbers(500)};
  }

  static std::vector<float> Numbers(float first) {
    std::vector<float> numbers(kElements);
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
  }

  std::string State() const {
    const absl::Span<const float> values = parameters_.values;
    const std::vector<absl::Span<const float>> by_tensor = {values.subspan(0, 24),
                                                            values.subspan(24)};
    return WriteRankState(manifest_, layout_,
                          {.step = 7,
                           .rank = rank_.rank,
                           .error = rank_.error,
                           .aggregator_errors = rank_.aggregator_errors,
                           .values = rank_.values,
                           .momentum = rank_.momentum,
                           .local_sum = rank_.local_sum},
                          {.step = 7,
                           .values = by_tensor,
                           .momentum = parameters_.momentum,
                           .variance = parameters_.variance,
                           .fresh_variance = parameters_.fresh_variance});
  }

  // Takes the state apart and makes it again from the parts.
  std::string Again(const std::string& bytes) const {
    const absl::StatusOr<SavedState> state = SavedState::Read(bytes);
    EXPECT_TRUE(state.ok()) << state.status();
    std::vector<std::array<std::vector<float>, kStateFields>> fields(state->tensors());
    std::vector<TensorFields> numbers(state->tensors());
    for (size_t t = 0; t < state->tensors(); ++t) {
      for (size_t f = 0; f < kStateFields; ++f) {
        fields[t][f] = state->Field(t, static_cast<StateField>(f));
        EXPECT_EQ(fields[t][f].size(), state->FieldElements(t, static_cast<StateField>(f)));
        numbers[t][f] = fields[t][f];
      }
    }
    const std::vector<Tensor> tensors = Tensors();
    const absl::StatusOr<std::string> made =
        MakeState(state->Description(), {.rank = 1, .world_size = 2, .tensors = tensors}, numbers);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.value_or("");
  }

  Layout layout_;
  CheckpointManifest manifest_;
  SavedRank rank_;
  SavedParameters parameters_;
};

void ExpectSameNumbers(const std::string& got, const std::string& wanted) {
  const auto any = [](const CheckpointManifest&, const Layout&) { return absl::OkStatus(); };
  const absl::StatusOr<RankState> a = ReadRankState(got, any), b = ReadRankState(wanted, any);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  EXPECT_EQ(a->rank.rank, b->rank.rank);
  EXPECT_EQ(a->rank.error, b->rank.error);
  EXPECT_EQ(a->rank.aggregator_errors, b->rank.aggregator_errors);
  EXPECT_EQ(a->rank.values, b->rank.values);
  EXPECT_EQ(a->rank.momentum, b->rank.momentum);
  EXPECT_EQ(a->rank.local_sum, b->rank.local_sum);
  EXPECT_EQ(a->parameters.values, b->parameters.values);
  EXPECT_EQ(a->parameters.momentum, b->parameters.momentum);
  EXPECT_EQ(a->parameters.variance, b->parameters.variance);
  EXPECT_EQ(a->parameters.fresh_variance, b->parameters.fresh_variance);
  EXPECT_EQ(a->manifest.schedule().SerializeAsString(), b->manifest.schedule().SerializeAsString());
  EXPECT_EQ(a->manifest.options().SerializeAsString(), b->manifest.options().SerializeAsString());
}

TEST_F(SavedStateTest, HasEachFieldByTensor) {
  const SavedState state = *SavedState::Read(State());
  EXPECT_EQ(state.step(), 7);
  ASSERT_EQ(state.tensors(), 2);
  EXPECT_EQ(state.Field(0, StateField::kValue).front(), 300);
  EXPECT_EQ(state.Field(1, StateField::kValue).front(), 324);
  EXPECT_EQ(state.Field(1, StateField::kExpAvg).back(), -368);
  EXPECT_EQ(state.Field(1, StateField::kExpAvgSq).front(), 524);
  EXPECT_EQ(state.Field(0, StateField::kError).size(), 24);
  EXPECT_EQ(state.Field(1, StateField::kFreshExpAvgSq), std::vector<float>(9));
}

TEST_F(SavedStateTest, TheWholeErrorHasTheAggregatorsErrorsOfAllRanks) {
  const SavedState state = *SavedState::Read(State());
  std::vector<float> wanted = rank_.error;
  for (const auto& [chunk, errors] : rank_.aggregator_errors) {
    for (size_t i = 0; i < errors.size(); ++i) {
      wanted[layout_.chunks()[chunk].first_element + i] += 2 * errors[i];  // of 2 ranks
    }
  }
  EXPECT_NE(wanted, rank_.error);
  std::vector<float> whole = state.Field(0, StateField::kWholeError);
  const std::vector<float> of_bias = state.Field(1, StateField::kWholeError);
  whole.insert(whole.end(), of_bias.begin(), of_bias.end());
  EXPECT_EQ(whole, wanted);
  EXPECT_EQ(state.FieldElements(1, StateField::kWholeError), of_bias.size());
}

TEST_F(SavedStateTest, TakesAggregatorsErrorsAtTheirPlacesToo) {
  const SavedState state = *SavedState::Read(State());
  std::vector<std::array<std::vector<float>, kStateFields>> fields(state.tensors());
  std::vector<TensorFields> numbers(state.tensors());
  bool leaves_some_to_others = false;
  for (size_t t = 0; t < state.tensors(); ++t) {
    for (size_t f = 0; f < kStateFields; ++f) {
      const auto field = static_cast<StateField>(f);
      const bool is_placed = field == StateField::kAggregatorError;
      fields[t][f] = state.Field(t, is_placed ? StateField::kPlacedAggregatorError : field);
      numbers[t][f] = fields[t][f];
    }
    std::vector<float>& placed = fields[t][static_cast<size_t>(StateField::kAggregatorError)];
    EXPECT_EQ(placed.size(), state.Field(t, StateField::kValue).size());
    const std::vector<float> own = state.Field(t, StateField::kAggregatorError);
    EXPECT_EQ(std::accumulate(placed.begin(), placed.end(), 0.0),
              std::accumulate(own.begin(), own.end(), 0.0));
    leaves_some_to_others = leaves_some_to_others || own.size() < placed.size();
    // MakeState ignores the elements that other ranks save.
    for (float& error : placed) error = error == 0 ? 9 : error;
  }
  EXPECT_TRUE(leaves_some_to_others);
  const std::vector<Tensor> tensors = Tensors();
  const absl::StatusOr<std::string> made =
      MakeState(state.Description(), {.rank = 1, .world_size = 2, .tensors = tensors}, numbers);
  ASSERT_TRUE(made.ok()) << made.status();
  ExpectSameNumbers(*made, State());
}

TEST_F(SavedStateTest, IsTheSameWhenMadeAgain) { ExpectSameNumbers(Again(State()), State()); }

TEST_F(SavedStateTest, IsTheSameWithAFrozenVariance) {
  std::mt19937 random(1);
  for (size_t i = 0; i < kElements; ++i) {
    const float epsilon = i < 24 ? 1e-8f : 1e-6f;
    parameters_.variance[i] = 1 / (std::exp2(static_cast<float>(random() % 60) - 40) + epsilon);
  }
  parameters_.variance[3] = 0;
  manifest_.add_frozen_epsilons(1e-8f);
  manifest_.add_frozen_epsilons(1e-6f);
  ExpectSameNumbers(Again(State()), State());
  EXPECT_EQ(SavedState::Read(State())->Field(0, StateField::kExpAvgSq)[3], 0);
}

TEST_F(SavedStateTest, IsTheSameWithAFreshVariance) {
  parameters_.fresh_variance = Numbers(600);
  ExpectSameNumbers(Again(State()), State());
}

TEST_F(SavedStateTest, IsTheSameBetweenSynchronisations) {
  manifest_.mutable_schedule()->set_local_steps(2);
  parameters_.momentum.clear();
  rank_.values = Numbers(700);
  rank_.momentum = Numbers(800);
  rank_.local_sum = Numbers(900);
  ExpectSameNumbers(Again(State()), State());
  const SavedState state = *SavedState::Read(State());
  EXPECT_EQ(state.Field(0, StateField::kValue).front(), 700);
  EXPECT_EQ(state.Field(0, StateField::kAnchor).front(), 300);
}

TEST_F(SavedStateTest, ARankWithoutFieldsOfItsOwnHasZerosThere) {
  const std::string description = SavedState::Read(State())->Description();
  const std::vector<float> ones(24, 1);
  std::vector<TensorFields> numbers(2);
  numbers[0][0] = numbers[0][1] = numbers[0][2] = ones;
  const std::vector<Tensor> tensors = Tensors();
  const absl::StatusOr<std::string> made =
      MakeState(description, {.rank = 0, .world_size = 2, .tensors = tensors}, numbers);
  ASSERT_TRUE(made.ok()) << made.status();
  const SavedState state = *SavedState::Read(*made);
  EXPECT_EQ(state.Field(0, StateField::kExpAvg), ones);
  EXPECT_EQ(state.Field(0, StateField::kError), std::vector<float>(24));
  for (const float error : state.Field(0, StateField::kAggregatorError)) EXPECT_EQ(error, 0);
}

TEST_F(SavedStateTest, TheDescriptionIsThatOfAllRanks) {
  const std::string ours = SavedState::Read(State())->Description();
  manifest_.set_job("another");
  manifest_.set_committed_us(17);
  rank_.rank = 0;
  rank_.error.assign(kElements, 1);
  rank_.aggregator_errors.clear();
  EXPECT_EQ(SavedState::Read(State())->Description(), ours);
}

TEST_F(SavedStateTest, RefusesFieldsOfAnotherSizeByName) {
  const std::vector<float> few(5);
  std::vector<TensorFields> numbers(2);
  numbers[1][2] = few;
  const std::vector<Tensor> tensors = Tensors();
  const absl::Status status = MakeState(SavedState::Read(State())->Description(),
                                        {.rank = 1, .world_size = 2, .tensors = tensors}, numbers)
                                  .status();
  EXPECT_EQ(status.message(), "exp_avg_sq of tensor 'bias' [9] has 5 elements, wanted 9");
}

TEST_F(SavedStateTest, RefusesARankBeyondTheWorld) {
  const std::vector<Tensor> tensors = Tensors();
  const std::vector<TensorFields> numbers(2);
  const absl::Status status = MakeState(SavedState::Read(State())->Description(),
                                        {.rank = 2, .world_size = 2, .tensors = tensors}, numbers)
                                  .status();
  EXPECT_EQ(status.message(), "rank 2 is not in [0, 2)");
}

TEST_F(SavedStateTest, RefusesAnotherNumberOfRanks) {
  const std::vector<Tensor> tensors = Tensors();
  const std::vector<TensorFields> numbers(2);
  const absl::Status status = MakeState(SavedState::Read(State())->Description(),
                                        {.rank = 1, .world_size = 3, .tensors = tensors}, numbers)
                                  .status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.message().find("2 ranks, and this job has 3"), absl::string_view::npos);
}

TEST_F(SavedStateTest, RefusesWhatIsNoDescription) {
  const std::vector<Tensor> tensors = Tensors();
  const std::vector<TensorFields> numbers(2);
  for (const absl::string_view text : {"", "{}", "no JSON", "{\"worldSize\": \"x\"}"}) {
    const absl::Status status =
        MakeState(text, {.rank = 1, .world_size = 2, .tensors = tensors}, numbers).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text << status;
  }
}

TEST_F(SavedStateTest, RefusesDamagedBytes) {
  std::string state = State();
  state[state.size() / 2] ^= 1;
  EXPECT_TRUE(absl::IsDataLoss(SavedState::Read(state).status()));
}

TEST(VarianceOfInverse, ComesBackToTheSameBits) {
  std::mt19937 random(2);
  for (const float epsilon : {1e-12f, 1e-8f, 1e-6f, 1e-3f}) {
    const float most = static_cast<float>(1 / static_cast<double>(epsilon));
    std::uniform_real_distribution<float> exponent(-60, std::log2(most));
    for (int i = 0; i < 200'000; ++i) {
      const float inverse = std::min(std::exp2(exponent(random)), most);
      ASSERT_EQ(InverseOfVariance(VarianceOfInverse(inverse, epsilon), epsilon), inverse)
          << epsilon;
    }
    EXPECT_EQ(InverseOfVariance(VarianceOfInverse(most, epsilon), epsilon), most);
  }
  EXPECT_EQ(VarianceOfInverse(0, 1e-8f), 0);
  EXPECT_NEAR(VarianceOfInverse(1 / (0.5f + 1e-8f), 1e-8f), 0.25f, 1e-7f);
}

}  // namespace
}  // namespace signpost
