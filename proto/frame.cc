#include "proto/frame.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "kernels/block.h"
#include "proto/codec.h"

namespace signpost {
namespace {

static_assert(std::endian::native == std::endian::little, "payloads are used where they lie");

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Payloads from outside are read without regard to alignment: nothing is known about them yet.
uint32_t ReadWord(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

bool IsKnown(Codec codec, const Layout& layout) {
  if (codec == CUSTOM) return layout.options().has_custom_codec();
  return HasNumbers(codec) || codec == SKIP || codec == RESTORE || !IsContribution(codec);
}

// A job that goes on from a checkpoint restores the aggregators' errors first, and then never
// again.
absl::Status CheckCodecFitsStep(const FrameHeader& header, const Layout& layout) {
  if (!IsContribution(header.codec())) return absl::OkStatus();
  const uint64_t first_step = layout.options().first_step();
  const bool restores = first_step > 0 && header.step() == first_step - 1;
  if (restores == (header.codec() == RESTORE)) return absl::OkStatus();
  if (restores) {
    return Invalid("its codec is ", CodecName(header.codec()),
                   "; the round before first_step, which restores the errors, takes restore only");
  }
  return Invalid("its codec is restore, which is for the round before the job's first_step, ",
                 first_step, ", only");
}

// What looks at every byte of a payload finds out.
struct Examined {
  uint32_t crc32c = 0;
  bool is_within_range = true;  // the numbers, if it has any
};

// Piece by piece, so that the second look at each is into the cache.
Examined Examine(Codec codec, absl::Span<const uint8_t> payload, const Layout& layout) {
  constexpr size_t kPieceBytes = 32 << 10;
  const bool has_numbers = HasNumbers(codec) || codec == RESTORE;
  const NumberCodec* const number_codec = has_numbers ? &NumberCodecOf(codec, layout) : nullptr;
  Examined examined;
  for (size_t begin = 0; begin < payload.size(); begin += kPieceBytes) {
    const absl::Span<const uint8_t> piece = payload.subspan(begin, kPieceBytes);
    examined.crc32c = Crc32c(piece, examined.crc32c);
    if (has_numbers) examined.is_within_range &= number_codec->IsWithinRange(piece);
  }
  return examined;
}

absl::Status CheckContent(Codec codec, uint32_t chunk_index, const uint8_t* payload,
                          bool is_within_range, const Layout& layout) {
  // A state is for a worker alone, and is what it is: the parameters may have any value.
  if (!IsContribution(codec)) return absl::OkStatus();
  const Chunk& chunk = layout.chunks()[chunk_index];
  if (codec == SKIP) {
    const uint32_t block = ReadWord(payload);
    if (block < chunk.blocks) return absl::OkStatus();
    return Invalid("the skipped block is ", block, ", but the chunk has ", chunk.blocks);
  }
  if (is_within_range) return NumberCodecOf(codec, layout).Check(layout, chunk_index, payload);
  return Invalid("a ", CodecName(codec), " element is not finite, or above ", kernels::kMaxDense,
                 " in magnitude");
}

// From the cheapest check to the dearest; each relies on those before.
absl::Status CheckPayload(Codec codec, uint32_t chunk, uint32_t crc32c,
                          absl::Span<const uint8_t> payload, const Layout& layout) {
  if (!IsKnown(codec, layout)) return Invalid(CodecName(codec), " is unknown to this version");
  const uint64_t size = layout.PayloadBytes(codec, chunk);
  const bool is_nothing = codec == RESTORE && payload.empty();
  if (payload.size() != size && !is_nothing) {
    return Invalid("a ", CodecName(codec), " payload of this chunk has ", size, " bytes; got ",
                   payload.size());
  }
  const Examined examined = Examine(codec, payload, layout);
  if (examined.crc32c != crc32c) {
    return Invalid(
        absl::StrFormat("the payload's CRC-32C is %08x, but the header says %08x: it was "
                        "changed on the way",
                        examined.crc32c, crc32c));
  }
  if (is_nothing) return absl::OkStatus();
  return CheckContent(codec, chunk, payload.data(), examined.is_within_range, layout);
}

absl::Status CheckFactor(absl::string_view field, float factor) {
  if (std::isfinite(factor) && factor >= 0) return absl::OkStatus();
  return Invalid(field, " is ", factor, "; it must be finite and not negative");
}

bool AreFinite(std::initializer_list<double> values) {
  return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

bool HasPartOf(const Chunk& chunk, uint32_t tensor) {
  const auto before = [](const Segment& segment, uint32_t other) { return segment.tensor < other; };
  const auto found = std::lower_bound(chunk.segments.begin(), chunk.segments.end(), tensor, before);
  return found != chunk.segments.end() && found->tensor == tensor;
}

// `of`: the chunk whose tensors alone may have scales; null: all may.
absl::Status CheckRates(const StepRates& rates, const Chunk* of, const Layout& layout) {
  const Schedule& schedule = rates.schedule();
  for (const int size : {rates.groups_size(), schedule.learning_rates_size(),
                         schedule.epsilons_size(), schedule.local_sums_size()}) {
    if (size > kMaxGroups) return Invalid("rates of ", size, " groups; at most ", kMaxGroups);
  }
  for (const Rates& group : rates.groups()) {
    if (AreFinite({group.learning_rate(), group.weight_decay(), group.beta1(), group.beta2(),
                   group.epsilon()})) {
      continue;
    }
    return Invalid("a learning rate, weight decay, beta or epsilon is not finite");
  }
  for (const LocalSums& sums : schedule.local_sums()) {
    if (AreFinite({sums.learning_rate(), sums.decay(), sums.momentum(), sums.last_momentum()})) {
      continue;
    }
    return Invalid("a sum over an interval of local steps is not finite");
  }
  const size_t tensors = layout.tensors().size();
  if (rates.scales_size() > kMaxTensorScales) {
    return Invalid("scales of ", rates.scales_size(), " tensors; at most ", kMaxTensorScales);
  }
  int64_t last = -1;
  for (const TensorScale& scale : rates.scales()) {
    if (scale.tensor() >= tensors) {
      return Invalid("the scale of tensor ", scale.tensor(), "; the job has ", tensors);
    }
    if (scale.tensor() <= last) return Invalid("the tensors that it has scales of do not ascend");
    last = scale.tensor();
    if (of != nullptr && !HasPartOf(*of, scale.tensor())) {
      return Invalid("the scale of tensor ", DescribeTensor(layout.tensors()[scale.tensor()]),
                     ", of which the chunk has no part");
    }
    if (AreFinite({scale.ratio(), scale.average(), scale.weight(), scale.factor(), scale.floor(),
                   scale.mean_variance()})) {
      continue;
    }
    return Invalid("the scale of tensor ", DescribeTensor(layout.tensors()[scale.tensor()]),
                   " is not finite: the training has diverged");
  }
  return absl::OkStatus();
}

absl::Status CheckAsk(const AnswerHeader& header, absl::Span<const uint8_t> payload,
                      const FrameHeader& frame, const Layout& layout) {
  if (header.step() != frame.step() || header.chunk() != frame.chunk() || !payload.empty()) {
    return Invalid("asked for states in answer to step ", header.step(), ", chunk ", header.chunk(),
                   ", with ", payload.size(), " bytes; the frame was for step ", frame.step(),
                   ", chunk ", frame.chunk());
  }
  for (const uint32_t chunk : header.wanted_chunks()) {
    if (chunk < layout.chunks().size()) continue;
    return Invalid("asked for the state of chunk ", chunk, " of ", layout.chunks().size());
  }
  return absl::OkStatus();
}

absl::Status CheckState(const AnswerHeader& header, absl::Span<const uint8_t> payload,
                        const FrameHeader& frame, const Layout& layout) {
  if (header.codec() != STATE || header.chunk() != frame.chunk()) {
    return Invalid("the answer is ", CodecName(header.codec()), " of chunk ", header.chunk(),
                   "; the frame asked for the state of chunk ", frame.chunk());
  }
  return CheckPayload(STATE, header.chunk(), header.payload_crc32c(), payload, layout);
}

absl::Status CheckReplay(const AnswerHeader& header, absl::Span<const uint8_t> payload,
                         const FrameHeader& frame) {
  if (header.chunk() == frame.chunk() && header.step() <= frame.step() && payload.empty()) {
    return absl::OkStatus();
  }
  return Invalid("asked for a replay of chunk ", header.chunk(), " from step ", header.step(),
                 ", with ", payload.size(), " bytes; the frame was for step ", frame.step(),
                 ", chunk ", frame.chunk());
}

absl::Status CheckLateRanks(const FrameHeader& header, uint32_t world_size) {
  const auto& ranks = header.late_ranks();
  if (ranks.empty()) return absl::OkStatus();
  if (std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) != ranks.end()) {
    return Invalid("its late ranks do not ascend");
  }
  const uint32_t highest = ranks.Get(ranks.size() - 1);
  if (highest >= world_size) {
    return Invalid("late rank ", highest, " is not in [0, ", world_size, ")");
  }
  if (ranks.size() < static_cast<int>(world_size)) return absl::OkStatus();
  return Invalid("its late ranks are all ranks");
}

// Says whose frame it is in front of what is wrong with it.
absl::Status Annotate(absl::string_view whose, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(whose, ": ", status.message()));
}

}  // namespace

absl::Status CheckFrame(const FrameHeader& header, absl::Span<const uint8_t> payload,
                        uint32_t world_size, const Layout& layout) {
  if (header.rank() >= world_size) {
    return Invalid("rank ", header.rank(), " is not in [0, ", world_size, ")");
  }
  if (header.chunk() >= layout.chunks().size()) {
    return Invalid("chunk ", header.chunk(), " is not in [0, ", layout.chunks().size(), ")");
  }
  absl::Status status = CheckFactor("error_scale", header.error_scale());
  if (status.ok()) status = CheckFactor("loss_unit", header.loss_unit());
  const Chunk* const of = header.codec() == STATE ? nullptr : &layout.chunks()[header.chunk()];
  if (status.ok()) status = CheckRates(header.rates(), of, layout);
  if (status.ok()) status = CheckLateRanks(header, world_size);
  if (status.ok()) status = CheckCodecFitsStep(header, layout);
  if (status.ok()) {
    status = CheckPayload(header.codec(), header.chunk(), header.payload_crc32c(), payload, layout);
  }
  if (status.ok()) return status;
  return Annotate(absl::StrCat("frame of rank ", header.rank(), " for step ", header.step(),
                               ", chunk ", header.chunk()),
                  status);
}

absl::Status CheckAnswer(const AnswerHeader& header, absl::Span<const uint8_t> payload,
                         const FrameHeader& frame, const Layout& layout) {
  for (const StepRates& rates : header.later_rates()) {
    const absl::Status status = CheckRates(rates, /*of=*/nullptr, layout);
    if (status.ok()) continue;
    return Annotate(absl::StrCat("the rates that come with the answer for step ", header.step(),
                                 ", chunk ", header.chunk()),
                    status);
  }
  if (header.codec() == REPLAY) return CheckReplay(header, payload, frame);
  if (frame.codec() == FETCH) return CheckState(header, payload, frame, layout);
  if (header.codec() == FETCH && IsContribution(frame.codec())) {
    return CheckAsk(header, payload, frame, layout);
  }
  if (header.step() != frame.step() || header.chunk() != frame.chunk()) {
    return Invalid("the answer is for step ", header.step(), ", chunk ", header.chunk(),
                   "; the frame was for step ", frame.step(), ", chunk ", frame.chunk());
  }
  const auto& late_ranks = header.late_ranks();
  const bool is_late =
      std::find(late_ranks.begin(), late_ranks.end(), frame.rank()) != late_ranks.end();
  const bool may_skip = header.codec() == SKIP && frame.codec() != RESTORE;
  const bool any_codec = (frame.codec() == LISTEN && IsContribution(header.codec())) ||
                         (is_late && frame.codec() == SKIP);
  if (header.codec() != frame.codec() && !may_skip && !any_codec) {
    return Invalid("the answer is ", CodecName(header.codec()), "; the frame was ",
                   CodecName(frame.codec()));
  }
  if (IsContribution(frame.codec()) && header.loss_unit() != frame.loss_unit()) {
    return Invalid("the answer has loss_unit ", header.loss_unit(), "; the frame had ",
                   frame.loss_unit(), ": is the aggregator of another version?");
  }
  absl::Status status =
      CheckPayload(header.codec(), header.chunk(), header.payload_crc32c(), payload, layout);
  if (status.ok() && header.codec() == RESTORE && !payload.empty()) {
    status = Invalid("a restore answer has no payload; got ", payload.size(), " bytes");
  }
  if (status.ok()) return status;
  return Annotate(absl::StrCat("answer for step ", header.step(), ", chunk ", header.chunk()),
                  status);
}

bool IsContribution(Codec codec) { return codec != FETCH && codec != STATE && codec != LISTEN; }

Payload SkipPayload(uint32_t block) {
  Payload payload(sizeof(block));
  std::memcpy(payload.data(), &block, sizeof(block));
  return payload;
}

uint32_t SkippedBlock(absl::Span<const uint8_t> payload) { return ReadWord(payload.data()); }

}  // namespace signpost
