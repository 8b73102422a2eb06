// Codecs that carry numbers: what a payload has for each part of a chunk, and the arithmetic of a
// round on it. WIRE.md describes the bytes; kernels/ has the arithmetic.

#ifndef SIGNPOST_PROTO_CODEC_H_
#define SIGNPOST_PROTO_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/onebit.h"
#include "kernels/quantized.h"
#include "proto/aggregator.pb.h"
#include "proto/layout.h"

namespace signpost {

// One codec. A `payload` is a whole chunk's (Layout::PayloadBytes) and begins at a multiple of 4
// bytes, as a Payload does; `part` is a segment of the chunk or a part of one that begins at a
// block. Every block stands alone. Stateless and thread-safe: calls for different parts of a
// payload may overlap.
class NumberCodec {
 public:
  virtual ~NumberCodec() = default;

  // The two halves of the trust boundary: any piece of the payload by itself, of whole numbers
  // where it is dense, while it is in the cache; and then the whole, whose size is right.
  virtual bool IsWithinRange(absl::Span<const uint8_t> piece) const { return true; }
  virtual absl::Status Check(const Layout& layout, uint32_t chunk,
                             const uint8_t* payload) const = 0;

  // u = value + error, compressed; error = u - what was packed. `values` has the part's elements,
  // and so has `error`, or it is empty where the codec loses nothing. Blocks that are not finite
  // are not packed (kernels/block.h): returns the first of the part's, or their number.
  virtual size_t Compress(const kernels::BlockRule& rule, const Chunk& chunk, const Segment& part,
                          absl::Span<const float> values, absl::Span<float> error,
                          uint8_t* payload) const = 0;

  // An aggregator's round: u = (sum over `contributions`, payloads in rank order) * inverse_count +
  // error, compressed into `out`; the rest as Compress.
  virtual size_t Aggregate(const kernels::BlockRule& rule, const Chunk& chunk, const Segment& part,
                           absl::Span<const uint8_t* const> contributions, float inverse_count,
                           absl::Span<float> error, uint8_t* out) const = 0;

  virtual void Decompress(const kernels::BlockRule& rule, const Chunk& chunk, const Segment& part,
                          const uint8_t* payload, absl::Span<float> values) const = 0;

  // accumulator = accumulator + factor * what the payload has there.
  virtual void Add(const kernels::BlockRule& rule, const Chunk& chunk, const Segment& part,
                   const uint8_t* payload, float factor, absl::Span<float> accumulator) const = 0;

  // Whether the block at which `part` begins is packed.
  virtual bool IsPacked(const Chunk& chunk, const Segment& part, const uint8_t* payload) const = 0;

  // Of a block that was not packed: INTERNAL if its numbers were finite, and the codec itself has
  // failed.
  virtual absl::Status CheckCodecItself(const Layout&, uint32_t /*chunk*/, uint32_t /*block*/,
                                        const uint8_t* /*payload*/) const {
    return absl::OkStatus();
  }
};

// Both, of a codec that loses something, apart from the error feedback: the error is not added to
// u, and takes what is lost times `unit`: error = error + unit * (u - what was packed).
size_t CompressApart(const NumberCodec& codec, const kernels::BlockRule& rule, const Chunk& chunk,
                     const Segment& part, absl::Span<const float> values, float unit,
                     absl::Span<float> error, uint8_t* payload);
size_t AggregateApart(const NumberCodec& codec, const kernels::BlockRule& rule, const Chunk& chunk,
                      const Segment& part, absl::Span<const uint8_t* const> contributions,
                      float inverse_count, float unit, absl::Span<float> error, uint8_t* out);

// CHECK-fails for a codec that has none: unless HasNumbers, or it is RESTORE. CUSTOM is the
// layout's custom_codec(), which must be there.
const NumberCodec& NumberCodecOf(Codec codec, const Layout& layout);

// Whether a round of that codec takes the mean of numbers.
bool HasNumbers(Codec codec);
// Whether what such numbers are decompressed to can differ from what was compressed, and so leave
// an error.
bool Loses(Codec codec);

// A one-bit payload: one scale per block of the chunk, then the sign bits of its segments.
kernels::OneBitSpan OneBitPart(const Chunk& chunk, const Segment& part, uint8_t* payload);
kernels::OneBitView OneBitPart(const Chunk& chunk, const Segment& part, const uint8_t* payload);

// An int8 or int4 payload: one scale per block of the chunk, then the codes of its segments.
kernels::QuantizedSpan QuantizedPart(kernels::IntegerType type, const Chunk& chunk,
                                     const Segment& part, uint8_t* payload);
kernels::QuantizedView QuantizedPart(kernels::IntegerType type, const Chunk& chunk,
                                     const Segment& part, const uint8_t* payload);

// Of the codecs that have numbers of such a type, RESTORE included; none for others.
std::optional<kernels::DenseType> DenseTypeOf(Codec codec);
std::optional<kernels::IntegerType> IntegerTypeOf(Codec codec);

// "fp32", "bf16", "fp16", "int8", "int4", "one-bit", "custom", "skip", "replay",
// "restore", "fetch", "state", "listen"; for others "codec 17".
std::string CodecName(Codec codec);

// INVALID_ARGUMENT, naming the option, unless it is a codec that users may choose: one that has
// numbers.
absl::Status CheckCodecOption(absl::string_view option, Codec codec);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_CODEC_H_
