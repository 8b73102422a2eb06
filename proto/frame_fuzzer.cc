// libFuzzer target: arbitrary bytes through the path that a frame from outside takes, and an
// answer's. What passes the checks goes through the kernels, which trust them.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/onebit.h"
#include "proto/aggregator.pb.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/message.h"
#include "proto/payload.h"

namespace signpost {
namespace {

constexpr uint32_t kWorkers = 3;
constexpr uint32_t kBlockElements = 8;
constexpr uint64_t kMaxPayloadBytes = 192;  // the largest of the layout below, STATE

// Chunk 0: 'a', blocks of 8 and 8. Chunk 1: 'b', a block of 8 and one of 3, and 'c', one of 5.
Layout MakeLayout() {
  std::vector<Tensor> tensors;
  for (const auto& [name, elements] : {std::pair{"a", 16}, {"b", 11}, {"c", 5}}) {
    Tensor& tensor = tensors.emplace_back();
    tensor.set_name(name);
    tensor.add_shape(elements);
  }
  JobOptions options;
  options.set_block_elements(kBlockElements);
  options.set_chunk_elements(16);
  options.set_gamma(1.35f);
  options.set_first_step(100);  // frames of step 99 are RESTORE
  return *Layout::Create(tensors, options);
}

const Layout& TheLayout() {
  static const Layout* const layout = new Layout(MakeLayout());
  return *layout;
}

grpc::ByteBuffer InSlices(absl::Span<const uint8_t> bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += slices.back().size()) {
    const absl::Span<const uint8_t> piece = bytes.subspan(begin, slice_bytes);
    slices.emplace_back(piece.data(), piece.size());
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Whether the generated class sees the same fields. It keeps unknown ones; the parser under test
// drops them.
template <typename Message, typename Parsed>
void ExpectSameAsGenerated(absl::Span<const uint8_t> bytes, bool parsed_ok, const Parsed& parsed) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const bool within_limits = message.payload().size() <= kMaxPayloadBytes;
  if (!parsed_ok) {
    // A repeated field can have been over a limit where the last one is not: only single ones tell.
    const bool single = message.ByteSizeLong() == bytes.size();
    ABSL_RAW_CHECK(!single || !within_limits || bytes.size() > kMaxHeaderBytes,
                   "a message that the generated class parses was refused");
    return;
  }
  message.DiscardUnknownFields();
  ABSL_RAW_CHECK(message.header().SerializeAsString() == parsed.header.SerializeAsString(),
                 "the header differs from the generated class's");
  ABSL_RAW_CHECK(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(message.payload().data()),
                                     message.payload().size()) == parsed.payload.span(),
                 "the payload differs from the generated class's");
}

// What a server or worker does with a payload that was found good. kMaxDense is over every
// number in it.
void UsePayload(Codec codec, uint32_t chunk_index, const Payload& payload) {
  const Chunk& chunk = TheLayout().chunks()[chunk_index];
  if (codec == REPLAY) {
    ABSL_RAW_CHECK(payload.size() == 0, "a replay has no payload");
    return;
  }
  if (codec == RESTORE && payload.size() == 0) return;
  if (!IsContribution(codec)) {
    const size_t size = codec == STATE ? 12 * chunk.elements : 0;
    ABSL_RAW_CHECK(payload.size() == size, "a state has its size, and the others have none");
    return;
  }
  if (codec == SKIP) {
    const std::string place = TheLayout().DescribeBlock(chunk_index, SkippedBlock(payload.span()));
    ABSL_RAW_CHECK(!place.empty(), "a skipped block is in a tensor");
    return;
  }
  std::vector<float> sum(chunk.elements);
  const kernels::BlockRule rule{.block_elements = kBlockElements};
  for (const Segment& segment : chunk.segments) {
    NumberCodecOf(codec, TheLayout())
        .Add(rule, chunk, segment, payload.data(), /*factor=*/1.0f,
             absl::MakeSpan(sum).subspan(segment.chunk_offset, segment.elements));
  }
  for (const float value : sum) {
    ABSL_RAW_CHECK(value >= -kernels::kMaxDense && value <= kernels::kMaxDense,
                   "numbers are finite and within their range");
  }
}

void TryFrame(const Frame& frame) {
  if (CheckFrame(frame.header, frame.payload.span(), kWorkers, TheLayout()).ok()) {
    UsePayload(frame.header.codec(), frame.header.chunk(), frame.payload);
  }
}

void TryAnswerTo(Codec codec, const Answer& answer) {
  FrameHeader sent;
  sent.set_step(answer.header.step());
  sent.set_chunk(answer.header.chunk() % TheLayout().chunks().size());
  sent.set_codec(codec);
  if (!CheckAnswer(answer.header, answer.payload.span(), sent, TheLayout()).ok()) return;
  for (const StepRates& rates : answer.header.later_rates()) {
    for (const TensorScale& scale : rates.scales()) {
      ABSL_RAW_CHECK(scale.tensor() < TheLayout().tensors().size(), "scales are of tensors");
    }
  }
  UsePayload(answer.header.codec(), answer.header.chunk(), answer.payload);
}

void TryAnswer(const Answer& answer) {
  for (const Codec codec : {answer.header.codec(), ONE_BIT, FETCH, LISTEN}) {
    TryAnswerTo(codec, answer);
  }
}

// As it came, and with the checksum put right: guessing one takes a fuzzer for ever.
void TryRequest(absl::Span<const uint8_t> bytes, size_t slice_bytes) {
  Frame frame;
  const bool ok = ParseRequest(InSlices(bytes, slice_bytes), kMaxPayloadBytes, frame).ok();
  ExpectSameAsGenerated<ExchangeRequest>(bytes, ok, frame);
  if (!ok) return;
  TryFrame(frame);
  frame.header.set_payload_crc32c(Crc32c(frame.payload.span()));
  TryFrame(frame);
}

void TryResponse(absl::Span<const uint8_t> bytes, size_t slice_bytes) {
  Answer answer;
  const bool ok = ParseResponse(InSlices(bytes, slice_bytes), kMaxPayloadBytes, answer).ok();
  ExpectSameAsGenerated<ExchangeResponse>(bytes, ok, answer);
  if (!ok) return;
  TryAnswer(answer);
  answer.header.set_payload_crc32c(Crc32c(answer.payload.span()));
  TryAnswer(answer);
}

}  // namespace
}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const size_t slice_bytes : {size_t{3}, SIZE_MAX}) {
    signpost::TryRequest({data, size}, slice_bytes);
    signpost::TryResponse({data, size}, slice_bytes);
  }
  return 0;
}
