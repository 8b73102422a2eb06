// How a job's parameters are cut up: tensors into blocks, blocks into chunks, chunks to shards.
//
// Worker and aggregator each compute the layout from the same tensors and options, so it never
// travels. A block never straddles two tensors; a chunk is a run of consecutive blocks of at most
// chunk_elements. There are as few chunks as that allows, and they are as equal as blocks allow:
// none has more elements than an even share and one block. They are independent of the number of
// shards, so that this number never changes a bit of the result.

#ifndef SIGNPOST_PROTO_LAYOUT_H_
#define SIGNPOST_PROTO_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"

namespace signpost {

class NumberCodec;  // codec.h

inline constexpr size_t kMaxJobNameBytes = 256;

// INVALID_ARGUMENT unless it is 1 to kMaxJobNameBytes bytes of UTF-8, without control characters,
// also those that no byte by itself shows.
absl::Status CheckJobName(absl::string_view name);

// What Layout::Create accepts at most. A layout takes memory for each tensor and each chunk, but
// none for each block or element.
inline constexpr size_t kMaxTensors = 250'000;
inline constexpr size_t kMaxTensorNameBytes = 1024;
inline constexpr int kMaxTensorDimensions = 64;
inline constexpr uint64_t kMaxElements = uint64_t{1} << 40;
inline constexpr uint32_t kMaxChunkElements = uint32_t{1} << 24;
inline constexpr uint32_t kMaxBlockElements = kMaxChunkElements;  // whole tensors, as DeepSpeed's
inline constexpr size_t kMaxChunks = size_t{1} << 20;
inline constexpr size_t kMaxOptimizerBytes = 4096;
inline constexpr uint32_t kMaxStateNumbers = 16;

// The part of one tensor that lies in one chunk. Its blocks have block_elements each, the last one
// of a tensor may be short. Offsets say where the segment lies in its tensor, in the chunk's
// elements (tensors follow one another without gaps), and in the chunk's one-bit payload.
struct Segment {
  uint32_t tensor = 0;         // index into Layout::tensors()
  uint64_t tensor_offset = 0;  // in elements
  uint32_t elements = 0;
  uint32_t chunk_offset = 0;  // in elements
  uint32_t first_block = 0;   // in the chunk's blocks
  uint32_t bits_offset = 0;   // in bytes, behind the scales

  // Its elements [begin, end) by themselves; begin is a multiple of block_elements.
  Segment Part(uint32_t begin, uint32_t end, uint32_t block_elements) const {
    return {.tensor = tensor,
            .tensor_offset = tensor_offset + begin,
            .elements = end - begin,
            .chunk_offset = chunk_offset + begin,
            .first_block = first_block + begin / block_elements,
            .bits_offset = bits_offset + begin / 8};
  }
};

struct Chunk {
  uint64_t first_element = 0;  // in the job's elements
  uint32_t elements = 0;
  uint32_t blocks = 0;
  uint32_t sign_bytes = 0;
  std::vector<Segment> segments;  // in element order
};

// Calls use(block) for each block of a segment, or of a part of one that begins at a block.
template <class Use>
void ForEachBlock(const Segment& segment, uint32_t block_elements, Use use) {
  for (uint32_t begin = 0; begin < segment.elements; begin += block_elements) {
    use(segment.Part(begin, std::min(begin + block_elements, segment.elements), block_elements));
  }
}

// The same for all of the chunk's.
template <class Use>
void ForEachBlock(const Chunk& chunk, uint32_t block_elements, Use use) {
  for (const Segment& segment : chunk.segments) ForEachBlock(segment, block_elements, use);
}

// Immutable; copies are cheap enough for start-up only. Thread-safe.
class Layout {
 public:
  // INVALID_ARGUMENT, naming the tensor or option, for: no tensors, or more than kMaxTensors; a
  // name that is empty, repeated or over kMaxTensorNameBytes; a zero dimension, or more than
  // kMaxTensorDimensions; block_elements not a positive multiple of 8 or over kMaxBlockElements;
  // chunk_elements not a positive multiple of block_elements or over kMaxChunkElements; gamma
  // outside (0, 1.6); optimizer over kMaxOptimizerBytes; state_numbers over kMaxStateNumbers; more
  // than kMaxElements or kMaxChunks in all.
  static absl::StatusOr<Layout> Create(absl::Span<const Tensor> tensors, const JobOptions& options);

  absl::Span<const Tensor> tensors() const { return tensors_; }
  const JobOptions& options() const { return options_; }
  absl::Span<const Chunk> chunks() const { return chunks_; }
  uint64_t elements() const { return elements_; }

  // What CUSTOM is in payloads of this layout (custom_codec.h), open as long as a copy of this is
  // there. Null, also where options() describe one, until it was opened.
  const NumberCodec* custom_codec() const { return custom_codec_.get(); }
  void set_custom_codec(std::shared_ptr<const NumberCodec> codec) {
    custom_codec_ = std::move(codec);
  }

  // The chunks that have segments of the tensor, which follow one another.
  struct ChunkRange {
    uint32_t first;
    uint32_t end;
  };
  ChunkRange ChunksOf(size_t tensor) const;

  // The shard that owns each chunk: chunks in order, each to the shard that has the fewest elements
  // so far, the lowest-numbered of those. shard_count >= 1. No two shards differ by more elements
  // than the largest chunk has.
  std::vector<uint32_t> ShardOfChunk(uint32_t shard_count) const;
  // As many own a chunk, the first ones: a model may have fewer chunks than there are shards. The
  // others have no part in the job, and nobody joins it there.
  uint32_t OwningShards(uint32_t shard_count) const;

  // FNV-1a (64 bits) over the tensors, the options that shape the layout, and the chunks that came
  // out; WIRE.md has the bytes.
  uint64_t Fingerprint() const;

  // Bytes of a payload of this codec for this chunk, of RESTORE one with numbers; see WIRE.md.
  // CHECK-fails for a codec that has none.
  uint64_t PayloadBytes(Codec codec, uint32_t chunk) const;

  // For messages: "tensor 'fc1.weight' [512, 256], elements 4096 to 8191".
  std::string DescribeBlock(uint32_t chunk, uint32_t block) const;

 private:
  std::vector<Tensor> tensors_;
  JobOptions options_;
  std::vector<Chunk> chunks_;
  uint64_t elements_ = 0;
  std::shared_ptr<const NumberCodec> custom_codec_;
};

// The chunk_elements for a job of so many elements, a multiple of block_elements: about 3/8 Mi to
// 9/8 Mi, from 80 million elements on 5/8 to 2 Mi; and numbers of chunks that most numbers of
// shards divide, or nearly. Links stand idle for as long as a shard's first chunk takes; but each
// chunk costs a call, whatever is in it. The number of shards does not count: rounds are skipped or
// late chunk by chunk, and shards must not change that. A single worker mostly has its aggregator
// on the same machine, where calls take longer than the link: its job has at most 8 chunks, and
// from 36 Mi elements on chunks of 4 to 4.5 Mi.
uint32_t SuitableChunkElements(uint64_t elements, uint32_t block_elements, uint32_t workers);

// 1 for a scalar; UINT64_MAX when the product of the dimensions does not fit.
uint64_t ElementCount(const Tensor& tensor);
// "'fc1.weight' [512, 256]"; bytes of the name that are not printable UTF-8 are escaped.
std::string DescribeTensor(const Tensor& tensor);

// OK when both describe the same job. Otherwise FAILED_PRECONDITION that names the first tensor
// that differs, with both shapes, or the first option, with both values:
// "tensor 3 is 'fc2.bias' [256] here but 'fc2.bias' [128] in the job".
absl::Status CheckSameJob(absl::Span<const Tensor> theirs, const JobOptions& their_options,
                          const Layout& job);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_LAYOUT_H_
