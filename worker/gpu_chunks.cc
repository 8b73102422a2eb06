#include "worker/gpu_chunks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/adam_cuda.h"
#include "kernels/lamb_cuda.h"
#include "kernels/momentum_cuda.h"
#include "kernels/zero_one_cuda.h"
#include "worker/gpu_chunks-inl.h"
#include "worker/page_vector.h"

namespace signpost {
namespace {

using kernels::cuda::AdamSegment;
using kernels::cuda::AddDenseSegment;
using kernels::cuda::AddQuantizedSegment;
using kernels::cuda::AddSegment;
using kernels::cuda::DecompressDenseSegment;
using kernels::cuda::Stream;

// Of the first bad block, between a slot's payload and its tables.
constexpr size_t kBadBlockBytes = 16;

constexpr size_t kLargestRow = std::max({sizeof(AddDenseSegment),
                                         sizeof(AddQuantizedSegment),
                                         sizeof(AddSegment),
                                         sizeof(AdamSegment<kernels::AdamRates>),
                                         sizeof(AdamSegment<kernels::FreezeRates>),
                                         sizeof(AdamSegment<kernels::RefreshRates>),
                                         sizeof(kernels::cuda::ApplyDenseSegment),
                                         sizeof(kernels::cuda::ApplySegment),
                                         sizeof(kernels::cuda::CompressSegment),
                                         sizeof(DecompressDenseSegment),
                                         sizeof(kernels::cuda::DecompressSegment),
                                         sizeof(kernels::cuda::DenseSegment),
                                         sizeof(kernels::cuda::DequantizeSegment),
                                         sizeof(kernels::cuda::MomentumInputSegment),
                                         sizeof(kernels::cuda::QuantizeSegment),
                                         sizeof(kernels::cuda::ScaleSegment),
                                         sizeof(kernels::cuda::FloorSegment),
                                         sizeof(kernels::cuda::FollowSegment),
                                         sizeof(kernels::cuda::LambSegment),
                                         sizeof(kernels::cuda::AdaptiveSegment),
                                         sizeof(kernels::cuda::LocalSegment)});

// Where the part's gradient begins, and its type.
std::pair<const void*, GradientType> WhereAndType(const Gradient& gradient, const Segment& part) {
  return {PartOf(gradient, part), gradient.type};
}

}  // namespace

GpuChunks::GpuChunks(const Layout& layout, const Needs& needs, uint32_t threads, Gpu& gpu)
    : layout_(layout),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      gpu_(gpu) {
  if (TakeMemory(needs, threads)) watch_.emplace(gpu);
}

bool GpuChunks::TakeMemory(const Needs& needs, uint32_t threads) {
  first_on_gpu_.reserve(layout_.tensors().size());
  for (const Tensor& tensor : layout_.tensors()) {
    first_on_gpu_.push_back(floats_);
    floats_ += Aligned(ElementCount(tensor) * sizeof(float)) / sizeof(float);
  }
  size_t most_room = 0, most_blocks = 0;
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const Chunk& chunk = layout_.chunks()[c];
    most_room = std::max(most_room, RoomFor(c));
    most_blocks = std::max<size_t>(most_blocks, chunk.blocks);
    for (const Codec codec : needs.codecs) {
      payload_room_ = std::max(payload_room_, layout_.PayloadBytes(CodecOnGpu(codec), c));
    }
  }
  payload_room_ = Aligned(payload_room_);
  // A table may have a row for each block, and a slot two of them.
  slot_bytes_ = payload_room_ + Aligned(kBadBlockBytes + 2 * most_blocks * kLargestRow);
  const size_t scratch_bytes = needs.scratch ? most_room * sizeof(float) : 0;

  bool is_there = Take(gpu_.NewStream(), copies_) && Take(gpu_.NewEvent(), left_) &&
                  Take(gpu_.Allocate(scratch_bytes), scratch_);
  if (std::count(needs.codecs.begin(), needs.codecs.end(), CUSTOM) > 0) {
    crew_.emplace(layout_, threads);
    is_there = is_there && Take(gpu_.AllocatePinned(2 * most_room * sizeof(float)), on_host_);
  }
  packing_.resize(std::min(needs.packing_slots, layout_.chunks().size()));
  applying_.resize(needs.applying_slots);
  for (std::vector<Slot>* ring : {&packing_, &applying_}) {
    for (Slot& slot : *ring) {
      is_there = is_there && Take(gpu_.AllocatePinned(slot_bytes_), slot.pinned) &&
                 Take(gpu_.Allocate(slot_bytes_), slot.device) &&
                 Take(gpu_.NewEvent(), slot.used) && Take(gpu_.NewEvent(), slot.copied);
    }
  }
  return is_there && (!needs.error || TakeZeros(error_));
}

GpuChunks::~GpuChunks() {
  watch_.reset();  // what it waits for uses all the rest
  Await();
}

void GpuChunks::Await() const {
  if (last_ != nullptr) gpu_.Await(last_).IgnoreError();
}

bool GpuChunks::TakeFloats(Memory& to) {
  return ok() && Take(gpu_.Allocate(floats_ * sizeof(float)), to);
}

bool GpuChunks::TakeZeros(Memory& to) {
  if (!TakeFloats(to)) return false;
  Do(gpu_.SetToZero(to.get(), floats_ * sizeof(float), stream_));
  Release(applying_[0]);
  return ok();
}

absl::Status GpuChunks::SetStream(Stream stream) {
  if (stream == stream_ || !ok()) return absl::OkStatus();
  if (absl::Status status = gpu_.CheckIsOurs(stream); !status.ok()) return status;
  // What is on the one before may be the caller's too: gradients that have come already.
  Do(gpu_.Record(left_.get(), stream_));
  Do(gpu_.Wait(stream, left_.get()));
  stream_ = stream;
  return absl::OkStatus();
}

bool GpuChunks::CanCompress() const {
  absl::MutexLock lock(&mutex_);
  return packings_ - packed_ < packing_.size();
}

GpuChunks::Slot& GpuChunks::NextApplying() {
  Slot& slot = applying_[applyings_++ % applying_.size()];
  Do(gpu_.Await(slot.used.get()));
  Do(gpu_.Await(slot.copied.get()));
  return slot;
}

void GpuChunks::CopyIn(Slot& slot, size_t begin, size_t end) {
  Do(gpu_.CopyIn(slot.device.get() + begin, slot.pinned.get() + begin, end - begin, stream_));
}

void GpuChunks::Release(Slot& slot) {
  if (Do(gpu_.Record(slot.used.get(), stream_))) last_ = slot.used.get();
}

void GpuChunks::CopyOut(Slot& slot, size_t begin) {
  Do(gpu_.Wait(copies_.get(), slot.used.get()));
  Do(gpu_.CopyOut(slot.pinned.get() + begin, slot.device.get() + begin, TablesBegin() - begin,
                  copies_.get()));
  Do(gpu_.Record(slot.copied.get(), copies_.get()));
}

uint32_t* GpuChunks::ClearBadBlock(Slot& slot) const {
  std::memcpy(slot.pinned.get() + payload_room_, &kNoBadBlock, sizeof kNoBadBlock);
  return reinterpret_cast<uint32_t*>(slot.device.get() + payload_room_);
}

uint32_t GpuChunks::BadBlock(const Slot& slot) const {
  uint32_t block;
  std::memcpy(&block, slot.pinned.get() + payload_room_, sizeof block);
  return block;
}

size_t GpuChunks::PayloadBegin(size_t bytes) const {
  return payload_room_ - (bytes + 15) / 16 * 16;
}

size_t GpuChunks::PutPayload(Slot& slot, uint32_t chunk, Codec codec, const uint8_t* payload) {
  const size_t bytes = layout_.PayloadBytes(CodecOnGpu(codec), chunk);
  const size_t begin = PayloadBegin(bytes);
  uint8_t* const to = slot.pinned.get() + begin;
  if (codec == CUSTOM) {
    DecompressOnHost(chunk, payload, reinterpret_cast<float*>(to));
  } else {
    std::memcpy(to, payload, bytes);
  }
  return begin;
}

size_t GpuChunks::TablesBegin() const { return payload_room_ + kBadBlockBytes; }

std::optional<uint32_t> GpuChunks::CompressGradient(uint32_t chunk, Codec codec, bool adds_error,
                                                    absl::Span<const Gradient> gradients,
                                                    uint8_t* payload, Optimizer::Later later) {
  if (codec == CUSTOM) {
    DecompressGradient(chunk, gradients);
    return CompressOnHost(chunk, payload, std::move(later));
  }
  Pack(chunk, codec, payload, std::move(later),
       [&](Slot& slot, uint8_t* out, uint32_t* first_not_packed) {
         Compress(
             slot, TablesBegin(), chunk, codec,
             [&](const Segment& s) { return WhereAndType(gradients[s.tensor], s); },
             [&](const Segment& s) { return adds_error ? Error(s) : nullptr; }, out,
             first_not_packed);
       });
  return std::nullopt;
}

void GpuChunks::DecompressGradient(uint32_t chunk, absl::Span<const Gradient> gradients) {
  Run(
      chunk,
      [&](const Segment& segment) {
        const auto [gradient, type] = WhereAndType(gradients[segment.tensor], segment);
        return DecompressDenseSegment{.compressed = static_cast<const uint8_t*>(gradient),
                                      .type = DenseTypeOf(type),
                                      .values = Scratch(chunk, segment)};
      },
      &Gpu::DecompressDense);
}

std::optional<uint32_t> GpuChunks::CompressApart(uint32_t chunk, Codec codec,
                                                 absl::FunctionRef<float(uint32_t)> unit,
                                                 absl::Span<const Gradient> gradients,
                                                 uint8_t* payload, Optimizer::Later later) {
  if (!Loses(codec)) {
    return CompressGradient(chunk, codec, /*adds_error=*/false, gradients, payload,
                            std::move(later));
  }
  const Chunk& at = layout_.chunks()[chunk];
  if (codec == CUSTOM) {
    DecompressGradient(chunk, gradients);
    return CompressOnHost(chunk, payload, std::move(later),
                          [&](const NumberCodec& number_codec, const Segment& part,
                              absl::Span<const float> numbers, absl::Span<float> error) {
                            return signpost::CompressApart(number_codec, rule_, at, part, numbers,
                                                           unit(part.tensor), error, payload);
                          });
  }
  // As the error of a codec that begins without one, what is lost is in Scratch.
  const auto loss_of = [&](const Segment& segment) { return Scratch(chunk, segment); };
  if (ok()) {
    Do(gpu_.SetToZero(loss_of(at.segments[0]), RoomFor(chunk) * sizeof(float), stream_));
  }
  Pack(chunk, codec, payload, std::move(later),
       [&](Slot& slot, uint8_t* out, uint32_t* first_not_packed) {
         const size_t end = Compress(
             slot, TablesBegin(), chunk, codec,
             [&](const Segment& s) { return WhereAndType(gradients[s.tensor], s); }, loss_of, out,
             first_not_packed);
         Launch(
             slot, end, end, at.segments,
             [&](const Segment& segment) {
               return AddDenseSegment{.addend = reinterpret_cast<const uint8_t*>(loss_of(segment)),
                                      .type = kernels::DenseType::kFloat32,
                                      .factor = unit(segment.tensor),
                                      .accumulator = Error(segment)};
             },
             &Gpu::AddDense);
       });
  return std::nullopt;
}

std::optional<uint32_t> GpuChunks::CompressOnHost(uint32_t chunk, uint8_t* payload,
                                                  Optimizer::Later later) {
  return CompressOnHost(chunk, payload, std::move(later),
                        [&](const NumberCodec& codec, const Segment& part,
                            absl::Span<const float> numbers, absl::Span<float> error) {
                          return codec.Compress(rule_, layout_.chunks()[chunk], part, numbers,
                                                error, payload);
                        });
}

template <class CompressPart>
std::optional<uint32_t> GpuChunks::CompressOnHost(uint32_t chunk, uint8_t* payload,
                                                  Optimizer::Later later, CompressPart compress) {
  const Chunk& at = layout_.chunks()[chunk];
  const size_t room = RoomFor(chunk);
  const size_t bytes = room * sizeof(float);
  auto* const input = reinterpret_cast<float*>(on_host_.get());
  float* const error = input + room;
  float* const error_on_gpu = Error(at.segments[0]);
  Read(input, Scratch(chunk, at.segments[0]), bytes);
  Read(error, error_on_gpu, bytes);
  if (ok()) {
    const NumberCodec& codec = NumberCodecOf(CUSTOM, layout_);
    const uint32_t bad_block = crew_->Compress(chunk, [&](const Segment& part) {
      const size_t begin = InChunk(chunk, part);
      return compress(codec, part, absl::MakeConstSpan(input + begin, part.elements),
                      absl::MakeSpan(error + begin, part.elements));
    });
    if (Do(gpu_.Write(error_on_gpu, error, bytes, stream_))) return bad_block;
  }
  later(status_);
  return std::nullopt;
}

void GpuChunks::DecompressOnHost(uint32_t chunk, const uint8_t* payload, float* numbers) {
  const Chunk& at = layout_.chunks()[chunk];
  const NumberCodec& codec = NumberCodecOf(CUSTOM, layout_);
  crew_->ForEachPart(chunk, [&](const Segment& part) {
    ForEachBlock(part, rule_.block_elements, [&](const Segment& block) {
      if (!codec.IsPacked(at, block, payload)) return;
      codec.Decompress(rule_, at, block, payload, {numbers + block.chunk_offset, block.elements});
    });
  });
}

size_t GpuChunks::AddToError(Slot& slot, uint32_t chunk, Codec codec, const uint8_t* payload,
                             absl::Span<const Addition> additions) {
  const Chunk& at = layout_.chunks()[chunk];
  const size_t begin = PutPayload(slot, chunk, codec, payload);
  codec = CodecOnGpu(codec);
  const uint8_t* const on_gpu = slot.device.get() + begin;
  CopyIn(slot, begin, BadBlockBegin());
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(codec)) {
    return AddToError(
        slot, TablesBegin(), additions,
        [&](const Segment& part) {
          return AddDenseSegment{.addend = on_gpu + kernels::DenseBytes(*type, part.chunk_offset),
                                 .type = *type};
        },
        &Gpu::AddDense);
  }
  if (const std::optional<kernels::IntegerType> type = IntegerTypeOf(codec)) {
    return AddToError(
        slot, TablesBegin(), additions,
        [&](const Segment& part) {
          return AddQuantizedSegment{.addend = QuantizedPart(*type, at, part, on_gpu),
                                     .type = *type};
        },
        &Gpu::AddQuantized);
  }
  return AddToError(
      slot, TablesBegin(), additions,
      [&](const Segment& part) { return AddSegment{.addend = OneBitPart(at, part, on_gpu)}; },
      &Gpu::AddOneBit);
}

void GpuChunks::Read(void* to, const void* from, size_t bytes) const {
  if (ok()) Do(gpu_.Read(to, from, bytes, stream_));
}

void GpuChunks::Write(void* to, const void* from, size_t bytes) {
  if (ok()) Do(gpu_.Write(to, from, bytes, stream_));
}

void GpuChunks::Read(float* to, const Memory& numbers, uint32_t chunk) const {
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    Read(to + segment.chunk_offset, In(numbers, segment), segment.elements * sizeof(float));
  }
}

void GpuChunks::Write(const Memory& numbers, uint32_t chunk, const float* from) {
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    Write(In(numbers, segment), from + segment.chunk_offset, segment.elements * sizeof(float));
  }
}

HostFloats GpuChunks::Copy(const Memory& numbers) const {
  PageVector<float> copy(layout_.elements());
  for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) {
    Read(copy.data() + layout_.chunks()[chunk].first_element, numbers, chunk);
  }
  return HostFloats(std::move(copy));
}

HostFloats GpuChunks::Copy(const float* from, size_t elements) const {
  PageVector<float> copy(elements);
  Read(copy.data(), from, elements * sizeof(float));
  return HostFloats(std::move(copy));
}

size_t GpuChunks::InChunk(uint32_t chunk, const Segment& segment) const {
  return OnGpu(segment) - OnGpu(layout_.chunks()[chunk].segments[0]);
}

size_t GpuChunks::RoomFor(uint32_t chunk) const {
  const Segment& last = layout_.chunks()[chunk].segments.back();
  return InChunk(chunk, last) + last.elements;
}

}  // namespace signpost
