#include "proto/codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/custom_codec.h"
#include "proto/payload.h"

namespace signpost {
namespace {

using kernels::BlockRule;

// Payloads from outside are read without regard to alignment: nothing is known about them yet.
uint32_t ReadWord(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

absl::Status CheckScales(const Layout& layout, uint32_t chunk, const uint8_t* scales) {
  // As integers, floats from +0 up are in order, and every negative, infinite or NaN one is above.
  constexpr uint32_t kMaxScaleBits = std::bit_cast<uint32_t>(kernels::kMaxScale);
  for (uint32_t block = 0; block < layout.chunks()[chunk].blocks; ++block) {
    const uint32_t bits = ReadWord(scales + size_t{4} * block);
    if (bits <= kMaxScaleBits) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the scale of block ", block, " (", layout.DescribeBlock(chunk, block), ") is ",
        std::bit_cast<float>(bits), ", not in [0, ", kernels::kMaxScale, "]"));
  }
  return absl::OkStatus();
}

// What packed numbers of `bits` each have behind a segment's last one: only a tensor's last block
// can end there. `what` they are called.
absl::Status CheckUnusedBits(const Layout& layout, uint32_t chunk, const uint8_t* packed,
                             size_t bits, absl::string_view what) {
  for (const Segment& segment : layout.chunks()[chunk].segments) {
    const size_t end = bits * kernels::SignBytes(segment.elements);
    const size_t used = bits * segment.elements;
    bool is_zero = true;
    for (size_t byte = used / 8; byte < end; ++byte) {
      const uint8_t value = packed[bits * segment.bits_offset + byte];
      is_zero &= (byte == used / 8 ? value >> used % 8 : value) == 0;
    }
    if (is_zero) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(what, " are set behind the last element of tensor ",
                     DescribeTensor(layout.tensors()[segment.tensor])));
  }
  return absl::OkStatus();
}

// Where packed numbers of `bits` each lie.
template <class Scales, class Bytes>
std::pair<Scales*, Bytes*> PackedPart(size_t bits, const Chunk& chunk, const Segment& part,
                                      Bytes* payload) {
  return {reinterpret_cast<Scales*>(payload) + part.first_block,
          payload + size_t{4} * chunk.blocks + bits * part.bits_offset};
}

class DenseCodec final : public NumberCodec {
 public:
  explicit DenseCodec(kernels::DenseType type) : type_(type) {}

  bool IsWithinRange(absl::Span<const uint8_t> piece) const override {
    return kernels::DenseWithinRange(type_, piece.data(),
                                     piece.size() / kernels::DenseBytes(type_, 1));
  }
  absl::Status Check(const Layout&, uint32_t, const uint8_t*) const override {
    return absl::OkStatus();
  }

  size_t Compress(const BlockRule& rule, const Chunk&, const Segment& part,
                  absl::Span<const float> values, absl::Span<float> error,
                  uint8_t* payload) const override {
    return kernels::CompressDense(rule, type_, values, error, At(part, payload));
  }

  size_t Aggregate(const BlockRule& rule, const Chunk&, const Segment& part,
                   absl::Span<const uint8_t* const> contributions, float inverse_count,
                   absl::Span<float> error, uint8_t* out) const override {
    std::vector<const uint8_t*> parts;
    parts.reserve(contributions.size());
    for (const uint8_t* payload : contributions) parts.push_back(At(part, payload));
    const uint8_t* const packed = At(part, out);
    kernels::AggregateDense(type_, parts, part.elements, inverse_count, error, At(part, out));
    const size_t blocks = kernels::BlockCount(part.elements, rule.block_elements);
    if (kernels::DenseWithinRange(type_, packed, part.elements)) return blocks;
    size_t first = 0;  // what is not is in the last block, if in none before
    while (first + 1 < blocks &&
           kernels::DenseWithinRange(
               type_, packed + kernels::DenseBytes(type_, first * rule.block_elements),
               rule.block_elements)) {
      ++first;
    }
    return first;
  }

  void Decompress(const BlockRule&, const Chunk&, const Segment& part, const uint8_t* payload,
                  absl::Span<float> values) const override {
    kernels::DecompressDense(type_, At(part, payload), values);
  }

  void Add(const BlockRule&, const Chunk&, const Segment& part, const uint8_t* payload,
           float factor, absl::Span<float> accumulator) const override {
    kernels::AddDense(type_, At(part, payload), factor, accumulator);
  }

  bool IsPacked(const Chunk&, const Segment& part, const uint8_t* payload) const override {
    return kernels::DenseWithinRange(type_, At(part, payload), /*elements=*/1);
  }

 private:
  template <class Bytes>
  Bytes* At(const Segment& part, Bytes* payload) const {
    return payload + kernels::DenseBytes(type_, part.chunk_offset);
  }

  const kernels::DenseType type_;
};

class OneBitCodec final : public NumberCodec {
 public:
  absl::Status Check(const Layout& layout, uint32_t chunk, const uint8_t* payload) const override {
    if (absl::Status status = CheckScales(layout, chunk, payload); !status.ok()) return status;
    return CheckUnusedBits(layout, chunk, payload + size_t{4} * layout.chunks()[chunk].blocks,
                           /*bits=*/1, "sign bits");
  }

  size_t Compress(const BlockRule& rule, const Chunk& chunk, const Segment& part,
                  absl::Span<const float> values, absl::Span<float> error,
                  uint8_t* payload) const override {
    return kernels::CompressOneBit(rule, values, error, OneBitPart(chunk, part, payload));
  }

  size_t Aggregate(const BlockRule& rule, const Chunk& chunk, const Segment& part,
                   absl::Span<const uint8_t* const> contributions, float inverse_count,
                   absl::Span<float> error, uint8_t* out) const override {
    std::vector<kernels::OneBitView> parts;
    parts.reserve(contributions.size());
    for (const uint8_t* payload : contributions) parts.push_back(OneBitPart(chunk, part, payload));
    return kernels::AggregateOneBit(rule, parts, inverse_count, error,
                                    OneBitPart(chunk, part, out));
  }

  void Decompress(const BlockRule& rule, const Chunk& chunk, const Segment& part,
                  const uint8_t* payload, absl::Span<float> values) const override {
    kernels::DecompressOneBit(rule, OneBitPart(chunk, part, payload), values);
  }

  void Add(const BlockRule& rule, const Chunk& chunk, const Segment& part, const uint8_t* payload,
           float factor, absl::Span<float> accumulator) const override {
    kernels::AddOneBit(rule, OneBitPart(chunk, part, payload), factor, accumulator);
  }

  bool IsPacked(const Chunk& chunk, const Segment& part, const uint8_t* payload) const override {
    return kernels::IsPacked(OneBitPart(chunk, part, payload), 0);
  }
};

class QuantizedCodec final : public NumberCodec {
 public:
  explicit QuantizedCodec(kernels::IntegerType type) : type_(type) {}

  absl::Status Check(const Layout& layout, uint32_t chunk, const uint8_t* payload) const override {
    if (absl::Status status = CheckScales(layout, chunk, payload); !status.ok()) return status;
    return CheckUnusedBits(layout, chunk, payload + size_t{4} * layout.chunks()[chunk].blocks,
                           kernels::BitsOf(type_), "codes");
  }

  size_t Compress(const BlockRule& rule, const Chunk& chunk, const Segment& part,
                  absl::Span<const float> values, absl::Span<float> error,
                  uint8_t* payload) const override {
    return kernels::CompressQuantized(rule, type_, values, error,
                                      QuantizedPart(type_, chunk, part, payload));
  }

  size_t Aggregate(const BlockRule& rule, const Chunk& chunk, const Segment& part,
                   absl::Span<const uint8_t* const> contributions, float inverse_count,
                   absl::Span<float> error, uint8_t* out) const override {
    std::vector<kernels::QuantizedView> parts;
    parts.reserve(contributions.size());
    for (const uint8_t* payload : contributions) {
      parts.push_back(QuantizedPart(type_, chunk, part, payload));
    }
    return kernels::AggregateQuantized(rule, type_, parts, inverse_count, error,
                                       QuantizedPart(type_, chunk, part, out));
  }

  void Decompress(const BlockRule& rule, const Chunk& chunk, const Segment& part,
                  const uint8_t* payload, absl::Span<float> values) const override {
    kernels::DecompressQuantized(rule, type_, QuantizedPart(type_, chunk, part, payload), values);
  }

  void Add(const BlockRule& rule, const Chunk& chunk, const Segment& part, const uint8_t* payload,
           float factor, absl::Span<float> accumulator) const override {
    kernels::AddQuantized(rule, type_, QuantizedPart(type_, chunk, part, payload), factor,
                          accumulator);
  }

  bool IsPacked(const Chunk& chunk, const Segment& part, const uint8_t* payload) const override {
    return kernels::IsPacked(QuantizedPart(type_, chunk, part, payload), 0);
  }

 private:
  const kernels::IntegerType type_;
};

// What pack(block, loss) makes of each block of a part whose error is apart: it returns how many
// blocks it has packed, and adds to `loss`, which is zero.
template <class Pack>
size_t PackApart(const BlockRule& rule, const Segment& part, float unit, absl::Span<float> error,
                 Pack pack) {
  Payload losses(sizeof(float) * std::min<size_t>(part.elements, rule.block_elements));
  size_t blocks = 0, packed = 0;
  ForEachBlock(part, rule.block_elements, [&](const Segment& block) {
    const absl::Span<float> loss(reinterpret_cast<float*>(losses.data()), block.elements);
    absl::c_fill(loss, 0);
    if (pack(block, loss) > 0) {
      kernels::AddDense(kernels::DenseType::kFloat32, losses.data(), unit,
                        error.subspan(block.tensor_offset - part.tensor_offset, block.elements));
      if (packed == blocks) ++packed;
    }
    ++blocks;
  });
  return packed;
}

// That users may choose from.
constexpr Codec kChoices[] = {FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, ONE_BIT, CUSTOM};

}  // namespace

const NumberCodec& NumberCodecOf(Codec codec, const Layout& layout) {
  static const auto* const fp32 = new DenseCodec(kernels::DenseType::kFloat32);
  static const auto* const bf16 = new DenseCodec(kernels::DenseType::kBfloat16);
  static const auto* const fp16 = new DenseCodec(kernels::DenseType::kFloat16);
  static const auto* const int8 = new QuantizedCodec(kernels::IntegerType::kInt8);
  static const auto* const int4 = new QuantizedCodec(kernels::IntegerType::kInt4);
  static const auto* const one_bit = new OneBitCodec();
  switch (codec) {
    case FLOAT32:
    case RESTORE:
      return *fp32;
    case BFLOAT16:
      return *bf16;
    case FLOAT16:
      return *fp16;
    case INT8:
      return *int8;
    case INT4:
      return *int4;
    case ONE_BIT:
      return *one_bit;
    case CUSTOM:
      ABSL_RAW_CHECK(layout.custom_codec() != nullptr, "nobody has opened the layout's codec");
      return *layout.custom_codec();
    default:
      ABSL_RAW_LOG(FATAL, "codec %d has no numbers", static_cast<int>(codec));
      return *fp32;
  }
}

size_t CompressApart(const NumberCodec& codec, const BlockRule& rule, const Chunk& chunk,
                     const Segment& part, absl::Span<const float> values, float unit,
                     absl::Span<float> error, uint8_t* payload) {
  return PackApart(rule, part, unit, error, [&](const Segment& block, absl::Span<float> loss) {
    const size_t begin = block.tensor_offset - part.tensor_offset;
    return codec.Compress(rule, chunk, block, values.subspan(begin, block.elements), loss, payload);
  });
}

size_t AggregateApart(const NumberCodec& codec, const BlockRule& rule, const Chunk& chunk,
                      const Segment& part, absl::Span<const uint8_t* const> contributions,
                      float inverse_count, float unit, absl::Span<float> error, uint8_t* out) {
  return PackApart(rule, part, unit, error, [&](const Segment& block, absl::Span<float> loss) {
    return codec.Aggregate(rule, chunk, block, contributions, inverse_count, loss, out);
  });
}

bool HasNumbers(Codec codec) {
  return codec == ONE_BIT || codec == CUSTOM || IntegerTypeOf(codec) ||
         (DenseTypeOf(codec) && codec != RESTORE);
}

bool Loses(Codec codec) { return DenseTypeOf(codec) != kernels::DenseType::kFloat32; }

std::optional<kernels::DenseType> DenseTypeOf(Codec codec) {
  switch (codec) {
    case FLOAT32:
    case RESTORE:
      return kernels::DenseType::kFloat32;
    case BFLOAT16:
      return kernels::DenseType::kBfloat16;
    case FLOAT16:
      return kernels::DenseType::kFloat16;
    default:
      return std::nullopt;
  }
}

std::optional<kernels::IntegerType> IntegerTypeOf(Codec codec) {
  switch (codec) {
    case INT8:
      return kernels::IntegerType::kInt8;
    case INT4:
      return kernels::IntegerType::kInt4;
    default:
      return std::nullopt;
  }
}

kernels::OneBitSpan OneBitPart(const Chunk& chunk, const Segment& part, uint8_t* payload) {
  const auto [scales, bits] = PackedPart<float>(/*bits=*/1, chunk, part, payload);
  return {scales, bits};
}

kernels::OneBitView OneBitPart(const Chunk& chunk, const Segment& part, const uint8_t* payload) {
  const auto [scales, bits] = PackedPart<const float>(/*bits=*/1, chunk, part, payload);
  return {scales, bits};
}

kernels::QuantizedSpan QuantizedPart(kernels::IntegerType type, const Chunk& chunk,
                                     const Segment& part, uint8_t* payload) {
  const auto [scales, codes] = PackedPart<float>(kernels::BitsOf(type), chunk, part, payload);
  return {scales, codes};
}

kernels::QuantizedView QuantizedPart(kernels::IntegerType type, const Chunk& chunk,
                                     const Segment& part, const uint8_t* payload) {
  const auto [scales, codes] = PackedPart<const float>(kernels::BitsOf(type), chunk, part, payload);
  return {scales, codes};
}

std::string CodecName(Codec codec) {
  switch (codec) {
    case FLOAT32:
      return "fp32";
    case BFLOAT16:
      return "bf16";
    case FLOAT16:
      return "fp16";
    case INT8:
      return "int8";
    case INT4:
      return "int4";
    case ONE_BIT:
      return "one-bit";
    case CUSTOM:
      return "custom";
    case SKIP:
      return "skip";
    case REPLAY:
      return "replay";
    case RESTORE:
      return "restore";
    case FETCH:
      return "fetch";
    case STATE:
      return "state";
    case LISTEN:
      return "listen";
    default:
      return absl::StrCat("codec ", static_cast<int>(codec));
  }
}

absl::Status CheckCodecOption(absl::string_view option, Codec codec) {
  if (absl::c_linear_search(kChoices, codec)) return absl::OkStatus();
  const std::string names = absl::StrJoin(
      kChoices, ", ", [](std::string* out, Codec choice) { out->append(CodecName(choice)); });
  return absl::InvalidArgumentError(
      absl::StrCat(option, " is ", CodecName(codec), ", wanted one of ", names));
}

}  // namespace signpost
