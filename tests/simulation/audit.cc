#include "tests/simulation/audit.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_format.h"
#include "proto/codec.h"

namespace signpost::simulation {
namespace {

using Vector = std::vector<double>;

// fp32 against double, through some dozens of steps.
constexpr double kTolerance = 1e-3;
constexpr double kBfloat16Tolerance = 1e-2;

constexpr double kBeta1 = GroupRates().beta1;

bool IsNear(double got, double wanted, double tolerance) {
  return std::abs(got - wanted) <= tolerance * (std::abs(wanted) + 0.1);
}

float FloatOf(const uint8_t* bytes) {
  float value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

float Bfloat16Of(const uint8_t* bytes) {
  uint16_t upper;
  std::memcpy(&upper, bytes, sizeof upper);
  const uint32_t bits = uint32_t{upper} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float Float16Of(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  const int exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                        : std::ldexp(1024.0f + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

float DenseOf(Codec codec, const uint8_t* bytes, uint32_t i) {
  if (codec == BFLOAT16) return Bfloat16Of(bytes + size_t{2} * i);
  if (codec == FLOAT16) return Float16Of(bytes + size_t{2} * i);
  return FloatOf(bytes + size_t{4} * i);
}

int CodeOf(Codec codec, const uint8_t* bytes, uint32_t i) {
  if (codec == INT8) return static_cast<int8_t>(bytes[i]);
  const int code = bytes[i / 2] >> (i % 2 * 4) & 0xf;
  return code < 8 ? code : code - 16;
}

// As kCodecOptions has it.
uint32_t CountOfLargest(uint32_t elements) { return (elements + 3) / 4; }

// What any codec packs, and bad gradients of plans are far from.
bool IsOrdinary(double number) { return std::abs(number) < 1e12; }

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
  std::erase_if(answers_, [&](const auto& answer) { return std::get<0>(answer.first) == chunk; });
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

void Audit::SetReturn(uint32_t rank, uint64_t step) {
  returns_.insert({rank, step});
  std::erase_if(frames_, [&](const auto& frame) {
    const auto [its_rank, chunk, round] = frame.first;
    return its_rank == rank && StepsOf(round).first_step >= step;
  });
}

bool Audit::HasClosedTwiceWithout(uint32_t rank, uint32_t shard, uint32_t shards) const {
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
  return CodecsOf([this](uint64_t round) { return IsOneBit(round); });
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
      if (round == freeze_step_) Freeze(round, model);
      for (uint32_t rank = 0; rank < workers_; ++rank) {
        if (returns_.contains({rank, StepsOf(round).first_step})) model.errors[rank] = zeros;
      }
      CheckRound(c, round, gradients, model);
    }
    for (const auto& [rank, error] : errors_) {
      // It took part in none.
      if (returns_.contains({rank, StepsOf(round).first_step})) continue;
      for (uint32_t i = 0; i < chunk.elements; ++i) {
        const double got = error[chunk.first_element + i];
        if (IsNear(got, model.errors[rank][i], kTolerance)) continue;
        return report_(
            absl::StrFormat("rank %d ends with error %g at element %d of chunk %d; %g "
                            "is what it has not sent",
                            rank, got, i, c, model.errors[rank][i]));
      }
    }
  }
}

void Audit::Freeze(uint64_t round, ChunkModel& model) const {
  if (optimizer_.bias_correction) {
    for (double& m : model.momentum) m /= 1 - std::pow(kBeta1, static_cast<double>(round));
  }
  const double scale = optimizer_.as_deepspeed && zero_one_ ? 0 : 1 - kBeta1;
  for (double& e : model.aggregator_error) e *= scale;
  for (Vector& error : model.errors) {
    for (double& e : error) e *= scale;
  }
}

std::vector<double> Audit::InputOf(uint32_t rank, const Chunk& chunk, uint64_t round,
                                   const Gradients& gradients, const ChunkModel& model) const {
  const auto [first_step, steps] = StepsOf(round);
  const bool is_one_bit = IsOneBit(round);
  Vector input(chunk.elements), momentum = model.momentum;
  double sum_of_rates = 0;
  for (uint64_t step = first_step; step < first_step + steps; ++step) {
    const auto gradient = gradients(rank, step);
    const double rate = learning_rate_(step);
    sum_of_rates += rate;
    ForEachBlock(chunk, layout_.front().options().block_elements(), [&](const Segment& block) {
      const float* const g = gradient[block.tensor].data() + block.tensor_offset;
      // A local step leaves a block alone that is not finite.
      const bool is_finite =
          std::all_of(g, g + block.elements, [](float value) { return std::isfinite(value); });
      if (steps > 1 && !is_finite) return;
      for (uint32_t i = 0; i < block.elements; ++i) {
        const uint32_t at = block.chunk_offset + i;
        if (!is_one_bit) {
          input[at] = g[i];
          continue;
        }
        momentum[at] = kBeta1 * momentum[at] + (1 - kBeta1) * g[i];
        input[at] += rate * momentum[at];
      }
    });
  }
  if (!is_one_bit) return input;
  for (double& u : input) u /= sum_of_rates;
  return input;
}

void Audit::CheckRound(uint32_t c, uint64_t round, const Gradients& gradients,
                       ChunkModel& model) const {
  const Layout& layout = layout_.front();
  const Chunk& chunk = layout.chunks()[c];
  const bool is_one_bit = IsOneBit(round);
  const bool is_apart = IsApart(round);
  const bool is_mean = StepsOf(round).steps > 1;  // of local momenta
  // After the freeze errors are in units of the momentum, of which a gradient is so much.
  const double unit = IsRefresh(round) ? 1 - kBeta1 : 1;
  // What of an input is the momentum's, which stays where it is when the input goes back.
  const auto share = [&](uint32_t i) {
    return is_one_bit && !is_mean ? kBeta1 * model.momentum[i] : 0;
  };
  const auto answer = answers_.find({c, round});
  if (answer == answers_.end()) {
    return report_(absl::StrFormat("round %d of chunk %d was never answered", round, c));
  }
  const bool is_skipped = answer->second.codec == SKIP;

  Vector sum(chunk.elements);
  for (uint32_t rank = 0; rank < workers_; ++rank) {
    const bool is_late = absl::c_linear_search(answer->second.late_ranks, rank);
    const std::string what =
        absl::StrFormat("the frame of rank %d for round %d, chunk %d", rank, round, c);
    const auto frame = frames_.find({rank, c, round});
    if (frame == frames_.end()) {
      if (is_late) continue;
      return report_(absl::StrFormat("%s was never sent, but counted", what));
    }
    Vector input = InputOf(rank, chunk, round, gradients, model);
    for (uint32_t i = 0; i < chunk.elements && !is_apart; ++i) input[i] += model.errors[rank][i];
    // A block that is not finite was not packed; plans have one at most.
    const bool has_numbers = frame->second.codec != SKIP;
    Vector decoded(chunk.elements);
    if (has_numbers) decoded = Decode(frame->second, c, input, what);
    uint32_t bad_block = chunk.blocks;
    if (!has_numbers) std::memcpy(&bad_block, frame->second.payload.data(), sizeof bad_block);
    ForEachBlock(chunk, layout.options().block_elements(), [&](const Segment& block) {
      const uint32_t begin = block.chunk_offset;
      if (block.first_block == bad_block &&
          absl::c_all_of(absl::MakeSpan(input).subspan(begin, block.elements), IsOrdinary)) {
        report_(absl::StrFormat("%s leaves out block %d, which could be packed", what, bad_block));
      }
      for (uint32_t i = begin; i < begin + block.elements; ++i) {
        double& error = model.errors[rank][i];
        if (block.first_block == bad_block) {
          // Only the gradient is dropped.
          if (!is_skipped) error += share(i);
          continue;
        }
        if (is_apart) {
          const bool counts = !is_skipped && !is_late;
          error += unit * (input[i] - (counts ? decoded[i] : 0));
          if (counts) sum[i] += decoded[i];
        } else if (is_skipped) {
          error = input[i] - share(i);
        } else {
          error = is_late ? input[i] : input[i] - decoded[i];
          if (!is_late) sum[i] += decoded[i];
        }
      }
    });
  }
  if (is_skipped) {
    if (is_mean) model.momentum.assign(chunk.elements, 0);
    return;
  }

  Vector input(chunk.elements);
  for (uint32_t i = 0; i < chunk.elements; ++i) {
    input[i] = sum[i] / workers_ + (is_apart ? 0 : model.aggregator_error[i]);
  }
  const Vector result = Decode(answer->second, c, input,
                               absl::StrFormat("the answer for round %d, chunk %d", round, c));
  for (uint32_t i = 0; i < chunk.elements; ++i) {
    const double lost = input[i] - result[i];
    model.aggregator_error[i] = is_apart ? model.aggregator_error[i] + unit * lost : lost;
    if (optimizer_.as_deepspeed && round == 0) continue;  // it changes nothing
    double& m = model.momentum[i];
    m = is_one_bit ? result[i] : kBeta1 * m + (1 - kBeta1) * result[i];
  }
}

std::vector<double> Audit::Decode(const Numbers& numbers, uint32_t c,
                                  absl::Span<const double> input, const std::string& what) const {
  const Layout& layout = layout_.front();
  const Chunk& chunk = layout.chunks()[c];
  const uint8_t* bytes = numbers.payload.data();
  Vector result(chunk.elements);
  if (numbers.codec == CUSTOM) return DecodeLargest(bytes, c, input, what);
  const bool is_int = numbers.codec == INT8 || numbers.codec == INT4;
  if (numbers.codec != ONE_BIT && !is_int) {
    const double tolerance = numbers.codec == BFLOAT16 ? kBfloat16Tolerance : kTolerance;
    for (uint32_t i = 0; i < chunk.elements; ++i) {
      result[i] = DenseOf(numbers.codec, bytes, i);
      if (IsNear(result[i], input[i], tolerance)) continue;
      report_(absl::StrFormat("%s has %g at element %d, wanted %g", what, result[i], i, input[i]));
      break;
    }
    return result;
  }
  const uint8_t* packed = bytes + size_t{4} * chunk.blocks;
  if (is_int) {
    const int bits = numbers.codec == INT8 ? 8 : 4;
    ForEachBlock(chunk, layout.options().block_elements(), [&](const Segment& block) {
      const double scale = FloatOf(bytes + size_t{4} * block.first_block);
      double largest = 0;
      for (uint32_t i = 0; i < block.elements; ++i) {
        const uint32_t at = block.chunk_offset + i;
        largest = std::max(largest, std::abs(input[at]));
        result[at] = CodeOf(numbers.codec, packed + bits * block.bits_offset, i) * scale;
        // To the nearest code, unless another is as near but for what fp32 makes of it.
        if (std::abs(result[at] - input[at]) <= 0.5 * scale + kTolerance * (largest + 0.1))
          continue;
        report_(
            absl::StrFormat("%s has %g at element %d, wanted %g", what, result[at], at, input[at]));
      }
      const double wanted = largest / (numbers.codec == INT8 ? 127 : 7);
      if (IsNear(scale, wanted, kTolerance)) return;
      report_(absl::StrFormat("%s has scale %g in block %d, wanted %g", what, scale,
                              block.first_block, wanted));
    });
    return result;
  }
  ForEachBlock(chunk, layout.options().block_elements(), [&](const Segment& block) {
    const double scale = FloatOf(bytes + size_t{4} * block.first_block);
    double squares = 0;
    for (uint32_t i = 0; i < block.elements; ++i) {
      const double u = input[block.chunk_offset + i];
      squares += u * u;
      const bool is_negative = packed[block.bits_offset + i / 8] >> (i % 8) & 1;
      result[block.chunk_offset + i] = is_negative ? -scale : scale;
    }
    const double wanted = layout.options().gamma() * std::sqrt(squares / block.elements);
    if (IsNear(scale, wanted, kTolerance)) return;
    report_(absl::StrFormat("%s has scale %g in block %d, wanted %g", what, scale,
                            block.first_block, wanted));
  });
  return result;
}

std::vector<double> Audit::DecodeLargest(const uint8_t* bytes, uint32_t c,
                                         absl::Span<const double> input,
                                         const std::string& what) const {
  const Layout& layout = layout_.front();
  const Chunk& chunk = layout.chunks()[c];
  const uint32_t block_elements = layout.options().block_elements();
  const size_t stride = 1 + (sizeof(uint16_t) + sizeof(float)) * CountOfLargest(block_elements);
  Vector result(chunk.elements);
  ForEachBlock(chunk, block_elements, [&](const Segment& block) {
    const uint8_t* const indices = bytes + stride * block.first_block + 1;
    const uint32_t count = CountOfLargest(block.elements);
    std::vector<bool> is_sent(block.elements);
    double least_sent = std::numeric_limits<double>::infinity(), largest_kept = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t index = indices[2 * i] | indices[2 * i + 1] << 8;
      if (index >= block.elements) {
        return report_(
            absl::StrFormat("%s sends element %d of a block of %d", what, index, block.elements));
      }
      const uint32_t at = block.chunk_offset + index;
      result[at] = FloatOf(indices + sizeof(uint16_t) * count + sizeof(float) * i);
      is_sent[index] = true;
      least_sent = std::min(least_sent, std::abs(input[at]));
      if (IsNear(result[at], input[at], kTolerance)) continue;
      report_(
          absl::StrFormat("%s has %g at element %d, wanted %g", what, result[at], at, input[at]));
    }
    for (uint32_t i = 0; i < block.elements; ++i) {
      if (!is_sent[i]) {
        largest_kept = std::max(largest_kept, std::abs(input[block.chunk_offset + i]));
      }
    }
    if (largest_kept <= least_sent || IsNear(largest_kept, least_sent, kTolerance)) return;
    report_(absl::StrFormat("%s sends %g of block %d, and not %g", what, least_sent,
                            block.first_block, largest_kept));
  });
  return result;
}

}  // namespace signpost::simulation
