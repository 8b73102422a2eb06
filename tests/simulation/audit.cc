#include "tests/simulation/audit.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "proto/codec.h"
#include "tests/simulation/packing.h"

namespace signpost::simulation {
namespace {

using Vector = std::vector<float>;

// As options and rates are rounded, once.
constexpr float kBeta1 = GroupRates().beta1;
constexpr float kOneMinusBeta1 = 1 - GroupRates().beta1;

// What any codec packs, and bad gradients of plans are far from.
bool IsOrdinary(float number) { return std::abs(number) < 1e12f; }

}  // namespace

// What the equations make of one chunk.
struct Audit::ChunkModel {
  Vector momentum, aggregator_error;
  std::vector<Vector> errors;  // by rank
};

void Audit::AddFrame(const FrameHeader& header, absl::Span<const uint8_t> payload) {
  if (!IsContribution(header.codec())) return;
  if (!IsOfNewestEpoch(header.chunk(), header.epoch())) return;
  const auto [frame, is_new] =
      frames_.try_emplace({header.rank(), header.chunk(), header.step()},
                          Numbers{header.codec(), {payload.begin(), payload.end()}, {}});
  if (is_new || absl::MakeConstSpan(frame->second.payload) == payload) return;
  report_(absl::StrFormat("rank %d sends other bytes for step %d, chunk %d than before",
                          header.rank(), header.step(), header.chunk()));
}

bool Audit::IsOfNewestEpoch(uint32_t chunk, uint64_t epoch) {
  uint64_t& newest = epochs_[chunk];
  if (epoch <= newest) return epoch == newest;
  newest = epoch;
  std::erase_if(frames_, [&](const auto& frame) { return std::get<1>(frame.first) == chunk; });
  const auto is_of_chunk = [&](const auto& entry) { return std::get<0>(entry.first) == chunk; };
  std::erase_if(answers_, is_of_chunk);
  std::erase_if(aggregator_errors_, is_of_chunk);
  return true;
}

void Audit::AddAnswer(uint64_t epoch, const AnswerHeader& header,
                      absl::Span<const uint8_t> payload) {
  if (header.codec() == REPLAY || !IsContribution(header.codec())) return;
  if (!IsOfNewestEpoch(header.chunk(), epoch)) return;
  Numbers numbers{header.codec(), {payload.begin(), payload.end()}, {}};
  numbers.late_ranks.assign(header.late_ranks().begin(), header.late_ranks().end());
  const auto [answer, is_new] =
      answers_.try_emplace({header.chunk(), header.step()}, std::move(numbers));
  if (is_new || (absl::MakeConstSpan(answer->second.payload) == payload &&
                 absl::c_equal(answer->second.late_ranks, header.late_ranks()))) {
    return;
  }
  report_(absl::StrFormat("step %d, chunk %d has two answers", header.step(), header.chunk()));
}

void Audit::AddAggregatorError(uint64_t epoch, const ReadErrorResponse& error) {
  if (!IsOfNewestEpoch(error.chunk(), epoch)) return;
  std::vector<float> numbers(error.payload().size() / sizeof(float));
  if (!numbers.empty()) std::memcpy(numbers.data(), error.payload().data(), error.payload().size());
  if (absl::c_all_of(numbers, [](float number) { return number == 0; })) numbers.clear();
  const auto [before, is_new] =
      aggregator_errors_.try_emplace({error.chunk(), error.step()}, numbers);
  if (is_new || before->second == numbers) return;
  report_(absl::StrFormat("the aggregator has two errors before step %d, chunk %d", error.step(),
                          error.chunk()));
}

void Audit::SetReturn(uint32_t rank, uint64_t step) {
  returns_.insert({rank, step});
  std::erase_if(frames_, [&](const auto& frame) {
    const auto [its_rank, chunk, round] = frame.first;
    return its_rank == rank && StepsOf(round).first_step >= step;
  });
}

bool Audit::HasClosedTwiceWithout(uint32_t rank, uint32_t shard, uint32_t shards) const {
  if (layout_.empty()) return false;  // nobody has trained
  const std::vector<uint32_t> shard_of_chunk = layout_.front().ShardOfChunk(shards);
  for (uint32_t chunk = 0; chunk < shard_of_chunk.size(); ++chunk) {
    if (shard_of_chunk[chunk] != shard) continue;
    auto frame = frames_.lower_bound({rank, chunk + 1, 0});
    if (frame == frames_.begin()) return false;
    const auto [its_rank, its_chunk, last_step] = std::prev(frame)->first;
    const bool has_sent = its_rank == rank && its_chunk == chunk;
    auto answer = answers_.lower_bound({chunk + 1, 0});
    for (int rounds = 0; rounds < 2; ++rounds) {
      if (answer == answers_.begin()) return false;
      --answer;
      const auto [answered_chunk, step] = answer->first;
      const bool follows = answered_chunk == chunk && (!has_sent || step >= last_step);
      if (!follows || !absl::c_linear_search(answer->second.late_ranks, rank)) return false;
    }
  }
  return true;
}

void Audit::SetFreezeStep(uint64_t step) {
  if (step == 0) step = OptimizerOptions::kNever;
  if (freeze_step_ != 0 && freeze_step_ != step) {
    report_(absl::StrFormat("one rank froze the variance at step %d, another at %d", freeze_step_,
                            step));
  }
  freeze_step_ = step;
}

void Audit::SetKind(uint64_t round, Kind kind) {
  const auto [known, is_new] = kinds_.emplace(round, kind);
  if (is_new || known->second == kind) return;
  report_(
      absl::StrFormat("in round %d one rank refreshes the variance, and another does not", round));
}

std::set<Codec> Audit::CodecsOf(absl::FunctionRef<bool(uint64_t round)> is_meant) const {
  std::set<Codec> codecs;
  for (const auto& [key, answer] : answers_) {
    if (HasNumbers(answer.codec) && is_meant(std::get<1>(key))) codecs.insert(answer.codec);
  }
  return codecs;
}

std::set<Codec> Audit::WarmUpCodecs() const {
  return CodecsOf([this](uint64_t round) { return round < freeze_step_ && !IsApart(round); });
}

std::set<Codec> Audit::FrozenCodecs() const {
  return CodecsOf([this](uint64_t round) { return IsOneBit(round) && !IsSettle(round); });
}

std::set<Codec> Audit::VarianceCodecs() const {
  return CodecsOf([this](uint64_t round) { return IsApart(round); });
}

void Audit::Check(uint64_t steps, const Gradients& gradients) const {
  if (layout_.empty()) return report_("nobody has joined");
  const Layout& layout = layout_.front();
  for (uint32_t c = 0; c < layout.chunks().size(); ++c) {
    const Chunk& chunk = layout.chunks()[c];
    const Vector zeros(chunk.elements);
    ChunkModel model = {zeros, zeros, std::vector<Vector>(workers_, zeros)};
    uint64_t round = 0;
    for (; StepsOf(round + 1).first_step <= steps; ++round) {
      CheckError(c, round, model);
      if (round == freeze_step_) Freeze(round, model);
      for (uint32_t rank = 0; rank < workers_; ++rank) {
        if (returns_.contains({rank, StepsOf(round).first_step})) model.errors[rank] = zeros;
      }
      CheckRound(c, round, gradients, model);
    }
    CheckError(c, round, model);
    for (const auto& [rank, error] : errors_) {
      // It took part in none.
      if (returns_.contains({rank, StepsOf(round).first_step})) continue;
      for (uint32_t i = 0; i < chunk.elements; ++i) {
        const float got = error[chunk.first_element + i];
        if (got == model.errors[rank][i]) continue;
        return report_(
            absl::StrFormat("rank %d ends with error %g at element %d of chunk %d; %g "
                            "is what it has not sent",
                            rank, got, i, c, model.errors[rank][i]));
      }
    }
  }
}

void Audit::CheckError(uint32_t c, uint64_t round, const ChunkModel& model) const {
  const auto error = aggregator_errors_.find({c, round});
  if (error == aggregator_errors_.end()) return;
  Vector numbers = error->second;
  numbers.resize(model.aggregator_error.size());
  if (numbers == model.aggregator_error) return;
  report_(absl::StrFormat("the aggregator's error before round %d of chunk %d is not what it lost",
                          round, c));
}

void Audit::Freeze(uint64_t round, ChunkModel& model) const {
  if (optimizer_.bias_correction) {
    const double correction = 1 / (1 - std::pow(GroupRates().beta1, static_cast<double>(round)));
    for (float& m : model.momentum) m *= static_cast<float>(correction);
  }
  // As little as there is, where zero would mean one.
  const float scale =
      optimizer_.as_deepspeed && zero_one_ ? std::numeric_limits<float>::min() : kOneMinusBeta1;
  for (float& e : model.aggregator_error) e *= scale;
  for (Vector& error : model.errors) {
    for (float& e : error) e *= scale;
  }
}

Codec Audit::CodecOf(uint64_t round) const {
  if (IsApart(round) || IsSettle(round)) return optimizer_.variance_codec;
  return IsOneBit(round) || zero_one_ ? optimizer_.codec : optimizer_.warm_up_codec;
}

std::vector<float> Audit::InputOf(uint32_t rank, const Chunk& chunk, uint64_t round,
                                  const Gradients& gradients, const ChunkModel& model) const {
  const auto [first_step, steps] = StepsOf(round);
  const bool is_one_bit = IsOneBit(round);
  Vector input(chunk.elements), momentum = model.momentum;
  double sum_of_rates = 0, decayed = 1, sum_of_decayed = 0;
  bool is_missed = steps > 1;
  for (uint64_t step = first_step; step < first_step + steps; ++step) {
    const auto gradient = gradients(rank, step);
    is_missed = is_missed && gradient.empty();
    const double rate = learning_rate_(step);
    sum_of_rates += rate;
    decayed *= GroupRates().beta1;
    sum_of_decayed += rate * decayed;
    ForEachBlock(chunk, layout_.front().options().block_elements(), [&](const Segment& block) {
      const float* const g =
          gradient.empty() ? nullptr : gradient[block.tensor].data() + block.tensor_offset;
      // A local step leaves a block alone that is not finite.
      const bool is_finite = g == nullptr || std::all_of(g, g + block.elements, [](float value) {
                               return std::isfinite(value);
                             });
      if (steps > 1 && !is_finite) return;
      for (uint32_t i = 0; i < block.elements; ++i) {
        const uint32_t at = block.chunk_offset + i;
        const float number = g == nullptr ? 0 : g[i];
        if (!is_one_bit) {
          input[at] = number;
          continue;
        }
        momentum[at] = kBeta1 * momentum[at] + kOneMinusBeta1 * number;
        input[at] = steps == 1 ? momentum[at] : input[at] + static_cast<float>(rate) * momentum[at];
      }
    });
  }
  if (steps == 1) return input;
  // Who has missed all of them knows at the end only that the momentum decayed.
  if (is_missed) input = model.momentum;
  const double factor = is_missed ? sum_of_decayed / sum_of_rates : 1 / sum_of_rates;
  for (float& u : input) u = static_cast<float>(factor) * u;
  return input;
}

void Audit::CheckRound(uint32_t c, uint64_t round, const Gradients& gradients,
                       ChunkModel& model) const {
  const Layout& layout = layout_.front();
  const Chunk& chunk = layout.chunks()[c];
  const Codec codec = CodecOf(round);
  const bool is_one_bit = IsOneBit(round);
  const bool is_apart = IsApart(round);
  const bool is_mean = StepsOf(round).steps > 1;  // of local momenta
  // After the freeze errors are in units of the momentum, of which a gradient is so much.
  const float unit = IsRefresh(round) ? kOneMinusBeta1 : 1;
  // What of an input is the momentum's, which stays where it is when the input goes back.
  const float share = is_one_bit && !is_mean ? kBeta1 : 0;
  const auto answer = answers_.find({c, round});
  if (answer == answers_.end()) {
    return report_(absl::StrFormat("round %d of chunk %d was never answered", round, c));
  }
  const bool is_skipped = answer->second.codec == SKIP;
  // What a side keeps of what it wanted to send, where the other has the rest.
  const auto keep_loss = [&](float u, float packed, float& error) {
    error = is_apart ? error + unit * (u - packed) : u - packed;
  };

  Vector sum(chunk.elements);
  bool is_first = true;
  std::vector<uint8_t> skip;  // of the lowest rank that counts and asks for it
  for (uint32_t rank = 0; rank < workers_; ++rank) {
    const bool is_late = absl::c_linear_search(answer->second.late_ranks, rank);
    const std::string what =
        absl::StrFormat("the frame of rank %d for round %d, chunk %d", rank, round, c);
    const auto frame = frames_.find({rank, c, round});
    if (frame == frames_.end()) {
      if (is_late) continue;
      return report_(absl::StrFormat("%s was never sent, but counted", what));
    }
    Vector u = InputOf(rank, chunk, round, gradients, model);
    Vector& error = model.errors[rank];
    for (uint32_t i = 0; i < chunk.elements; ++i) u[i] += is_apart ? 0 : error[i];
    // A block that is not finite was not packed; plans have one at most.
    const bool has_numbers = frame->second.codec != SKIP;
    uint32_t bad_block = chunk.blocks;
    if (!has_numbers) {
      std::memcpy(&bad_block, frame->second.payload.data(), sizeof bad_block);
      if (!is_late && skip.empty()) skip = frame->second.payload;
    }
    const Packed packed = Pack(layout, c, codec, u);
    if (has_numbers) CheckIs(packed, codec, frame->second, what);
    ForEachBlock(chunk, layout.options().block_elements(), [&](const Segment& block) {
      const uint32_t begin = block.chunk_offset;
      const bool is_packed = block.first_block != bad_block;
      if (!is_packed &&
          absl::c_all_of(absl::MakeSpan(u).subspan(begin, block.elements), IsOrdinary)) {
        report_(absl::StrFormat("%s leaves out block %d, which could be packed", what, bad_block));
      }
      for (uint32_t i = begin; i < begin + block.elements; ++i) {
        if (is_packed) keep_loss(u[i], packed.numbers[i], error[i]);
        const bool comes_back = is_skipped || is_late;
        if (is_packed && comes_back) error[i] += unit * packed.numbers[i];
        // Only the gradient is dropped of what was not packed.
        if (is_packed && is_skipped) error[i] += -share * model.momentum[i];
        if (!is_packed && !is_skipped) error[i] += share * model.momentum[i];
        if (!comes_back) sum[i] = is_first ? packed.numbers[i] : sum[i] + packed.numbers[i];
      }
    });
    if (!is_late) is_first = false;
  }
  if (is_skipped ? answer->second.payload != skip : !skip.empty()) {
    report_(absl::StrFormat("round %d of chunk %d was%s skipped, and not as its ranks ask for it",
                            round, c, is_skipped ? "" : " not"));
  }
  if (is_skipped) {
    if (is_mean) model.momentum.assign(chunk.elements, 0);
    return;
  }

  Vector u(chunk.elements);
  for (uint32_t i = 0; i < chunk.elements; ++i) {
    u[i] = sum[i] * (1 / static_cast<float>(workers_)) + (is_apart ? 0 : model.aggregator_error[i]);
  }
  const Packed packed = Pack(layout, c, codec, u);
  CheckIs(packed, codec, answer->second,
          absl::StrFormat("the answer for round %d, chunk %d", round, c));
  for (uint32_t i = 0; i < chunk.elements; ++i) {
    const float result = packed.numbers[i];
    keep_loss(u[i], result, model.aggregator_error[i]);
    if (optimizer_.as_deepspeed && round == 0) continue;  // it changes nothing
    float& m = model.momentum[i];
    m = is_one_bit ? result : kBeta1 * m + kOneMinusBeta1 * result;
  }
}

void Audit::CheckIs(const Packed& wanted, Codec codec, const Numbers& got,
                    const std::string& what) const {
  if (got.codec != codec) {
    return report_(
        absl::StrFormat("%s is in %s, not in %s", what, CodecName(got.codec), CodecName(codec)));
  }
  const auto [differs, _] = absl::c_mismatch(got.payload, wanted.payload);
  if (got.payload.size() == wanted.payload.size() && differs == got.payload.end()) return;
  report_(absl::StrFormat("%s, in %s, has other bytes than it should, from byte %d of %d on", what,
                          CodecName(codec), differs - got.payload.begin(), wanted.payload.size()));
}

}  // namespace signpost::simulation
