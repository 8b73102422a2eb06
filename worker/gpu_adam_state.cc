#include "worker/gpu_adam_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/dense.h"
#include "kernels/momentum.h"
#include "kernels/sum_cuda.h"
#include "proto/codec.h"
#include "worker/gpu_adam_state-inl.h"
#include "worker/gpu_lamb_state.h"
#include "worker/gpu_zero_one_state.h"

namespace signpost {
namespace {

using kernels::cuda::AdamSegment;
using kernels::cuda::AddDenseSegment;
using kernels::cuda::AddQuantizedSegment;
using kernels::cuda::AddSegment;
using kernels::cuda::ApplyDenseSegment;
using kernels::cuda::ApplySegment;
using kernels::cuda::CompressSegment;
using kernels::cuda::DecompressDenseSegment;
using kernels::cuda::DecompressSegment;
using kernels::cuda::DenseSegment;
using kernels::cuda::DequantizeSegment;
using kernels::cuda::MomentumInputSegment;
using kernels::cuda::QuantizeSegment;
using kernels::cuda::ScaleSegment;
using kernels::cuda::Stream;

// Chunks that may be on their way from the GPU, and to it.
constexpr size_t kPackingSlots = 8;
constexpr size_t kApplyingSlots = 4;

// What a GPU reads 16 bytes at a time, and whole lines of its cache, begins at such a multiple.
constexpr size_t kAlignment = 256;
constexpr size_t Aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Of the first bad block, between a slot's payload and its tables.
constexpr size_t kBadBlockBytes = 16;

constexpr size_t kLargestRow = std::max({sizeof(AddDenseSegment),
                                         sizeof(AddQuantizedSegment),
                                         sizeof(AddSegment),
                                         sizeof(AdamSegment<kernels::AdamRates>),
                                         sizeof(AdamSegment<kernels::FreezeRates>),
                                         sizeof(AdamSegment<kernels::RefreshRates>),
                                         sizeof(ApplyDenseSegment),
                                         sizeof(ApplySegment),
                                         sizeof(CompressSegment),
                                         sizeof(DecompressDenseSegment),
                                         sizeof(DecompressSegment),
                                         sizeof(DenseSegment),
                                         sizeof(DequantizeSegment),
                                         sizeof(MomentumInputSegment),
                                         sizeof(QuantizeSegment),
                                         sizeof(ScaleSegment),
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

GpuAdamState::GpuAdamState(const Layout& layout, std::vector<absl::Span<float>> values,
                           const Codecs& codecs, uint32_t threads, kernels::cuda::Gpu& gpu)
    : layout_(layout),
      rule_{layout.options().block_elements(), layout.options().gamma()},
      values_(std::move(values)),
      gpu_(gpu),
      momentum_is_signed_(layout.chunks().size()) {
  if (TakeMemory(codecs, threads)) watch_.emplace(gpu);
}

bool GpuAdamState::TakeMemory(const Codecs& codecs, uint32_t threads) {
  first_on_gpu_.reserve(values_.size());
  size_t most_in_tensor = 0;
  for (const absl::Span<float> values : values_) {
    first_on_gpu_.push_back(floats_);
    floats_ += Aligned(values.size() * sizeof(float)) / sizeof(float);
    most_in_tensor = std::max(most_in_tensor, values.size());
  }
  size_t most_elements = 0, most_room = 0, most_blocks = 0, signed_bytes = 0;
  for (size_t c = 0; c < layout_.chunks().size(); ++c) {
    const Chunk& chunk = layout_.chunks()[c];
    most_elements = std::max<size_t>(most_elements, chunk.elements);
    most_room = std::max(most_room, RoomFor(c));
    most_blocks = std::max<size_t>(most_blocks, chunk.blocks);
    for (const Codec codec : {codecs.gradient, codecs.momentum, codecs.apart}) {
      payload_room_ = std::max(payload_room_, layout_.PayloadBytes(CodecOnGpu(codec), c));
    }
    first_signed_.push_back(signed_bytes);
    if (codecs.momentum == ONE_BIT) signed_bytes += Aligned(layout_.PayloadBytes(ONE_BIT, c));
  }
  payload_room_ = Aligned(std::max(payload_room_, most_elements * sizeof(float)));
  // A table may have a row for each block, and a slot two of them.
  slot_bytes_ = payload_room_ + Aligned(kBadBlockBytes + 2 * most_blocks * kLargestRow);
  const bool needs_scratch =
      codecs.momentum != ONE_BIT || !DenseTypeOf(codecs.gradient) || Loses(codecs.apart);
  const size_t scratch_bytes = needs_scratch ? most_room * sizeof(float) : 0;

  const size_t bytes = floats_ * sizeof(float);
  const size_t sums = kernels::cuda::SumWorkspace(most_in_tensor) + 1;
  bool is_there = Take(gpu_.NewStream(), copies_) && Take(gpu_.NewEvent(), left_) &&
                  Take(gpu_.Allocate(bytes), error_) && Take(gpu_.Allocate(bytes), variance_) &&
                  Take(gpu_.Allocate(bytes), dense_momentum_) &&
                  Take(gpu_.Allocate(signed_bytes), signed_momentum_) &&
                  Take(gpu_.Allocate(scratch_bytes), scratch_) &&
                  Take(gpu_.Allocate(sums * sizeof(double)), sums_);
  if (codecs.gradient == CUSTOM || codecs.momentum == CUSTOM || codecs.apart == CUSTOM) {
    crew_.emplace(layout_, threads);
    is_there = is_there && Take(gpu_.AllocatePinned(2 * most_room * sizeof(float)), on_host_);
  }
  packing_.resize(kPackingSlots);
  applying_.resize(kApplyingSlots);
  for (std::vector<Slot>* ring : {&packing_, &applying_}) {
    for (Slot& slot : *ring) {
      is_there = is_there && Take(gpu_.AllocatePinned(slot_bytes_), slot.pinned) &&
                 Take(gpu_.Allocate(slot_bytes_), slot.device) &&
                 Take(gpu_.NewEvent(), slot.used) && Take(gpu_.NewEvent(), slot.copied);
    }
  }
  for (const Memory* memory : {&error_, &variance_, &dense_momentum_}) {
    is_there = is_there && Do(gpu_.SetToZero(memory->get(), bytes, stream_));
  }
  if (is_there) Release(applying_[0]);
  return is_there && status_.ok();
}

GpuAdamState::~GpuAdamState() {
  watch_.reset();  // what it waits for uses all the rest
  // What was put on the stream uses this memory.
  if (last_ != nullptr) gpu_.Await(last_).IgnoreError();
}

absl::Status GpuAdamState::CheckGradient(const Gradient& gradient) const {
  return CheckOn(gpu_, gradient);
}

void GpuAdamState::SetStream(Stream stream) {
  if (stream == stream_ || !status_.ok()) return;
  // What is on the one before may be the caller's too: gradients that have come already.
  Do(gpu_.Record(left_.get(), stream_));
  Do(gpu_.Wait(stream, left_.get()));
  stream_ = stream;
}

bool GpuAdamState::CanCompress() const {
  absl::MutexLock lock(&mutex_);
  return packings_ - packed_ < kPackingSlots;
}

GpuAdamState::Slot& GpuAdamState::NextApplying() {
  Slot& slot = applying_[applyings_++ % kApplyingSlots];
  Do(gpu_.Await(slot.used.get()));
  Do(gpu_.Await(slot.copied.get()));
  return slot;
}

void GpuAdamState::CopyIn(Slot& slot, size_t begin, size_t end) {
  Do(gpu_.CopyIn(slot.device.get() + begin, slot.pinned.get() + begin, end - begin, stream_));
}

void GpuAdamState::Release(Slot& slot) {
  if (Do(gpu_.Record(slot.used.get(), stream_))) last_ = slot.used.get();
}

void GpuAdamState::CopyOut(Slot& slot, size_t begin) {
  Do(gpu_.Wait(copies_.get(), slot.used.get()));
  Do(gpu_.CopyOut(slot.pinned.get() + begin, slot.device.get() + begin, TablesBegin() - begin,
                  copies_.get()));
  Do(gpu_.Record(slot.copied.get(), copies_.get()));
}

uint32_t* GpuAdamState::ClearBadBlock(Slot& slot) const {
  std::memcpy(slot.pinned.get() + payload_room_, &kNoBadBlock, sizeof kNoBadBlock);
  return reinterpret_cast<uint32_t*>(slot.device.get() + payload_room_);
}

uint32_t GpuAdamState::BadBlock(const Slot& slot) const {
  uint32_t block;
  std::memcpy(&block, slot.pinned.get() + payload_room_, sizeof block);
  return block;
}

size_t GpuAdamState::PayloadBegin(size_t bytes) const {
  return payload_room_ - (bytes + 15) / 16 * 16;
}

size_t GpuAdamState::PutPayload(Slot& slot, uint32_t chunk, Codec codec, const uint8_t* payload) {
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

size_t GpuAdamState::TablesBegin() const { return payload_room_ + kBadBlockBytes; }

template <class Fill>
void GpuAdamState::Pack(uint32_t chunk, Codec codec, uint8_t* payload, Optimizer::Later later,
                        Fill fill) {
  if (!status_.ok()) return later(status_);
  const size_t bytes = layout_.PayloadBytes(codec, chunk);
  const size_t begin = PayloadBegin(bytes);
  Slot& slot = packing_[packings_++ % kPackingSlots];
  uint8_t* const on_gpu = slot.device.get() + begin;
  fill(slot, on_gpu, ClearBadBlock(slot));
  Release(slot);
  CopyOut(slot, begin);
  watch_->Add(slot.copied.get(),
              [this, &slot, begin, bytes, payload, blocks = layout_.chunks()[chunk].blocks,
               launched = status_, later = std::move(later)](absl::Status status) mutable {
                status.Update(launched);
                uint32_t bad_block = kNoBadBlock;
                if (status.ok()) {
                  std::memcpy(payload, slot.pinned.get() + begin, bytes);
                  bad_block = BadBlock(slot);
                }
                {
                  absl::MutexLock lock(&mutex_);
                  ++packed_;
                }
                if (status.ok()) {
                  later(std::min(bad_block, blocks));
                } else {
                  later(status);
                }
              });
}

template <class GradientOf, class ErrorOf>
size_t GpuAdamState::Compress(Slot& slot, size_t begin, uint32_t chunk, Codec codec,
                              GradientOf gradient_of, ErrorOf error_of, uint8_t* out,
                              uint32_t* first_not_packed) {
  const Chunk& at = layout_.chunks()[chunk];
  const auto launch = [&](auto row_of, auto kernel) {
    return Launch(slot, payload_room_, begin, at.segments, row_of, kernel);
  };
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(codec)) {
    return launch(
        [&](const Segment& segment) {
          const auto [gradient, gradient_type] = gradient_of(segment);
          return DenseSegment{.gradient = gradient,
                              .gradient_type = gradient_type,
                              .type = *type,
                              .error = error_of(segment),
                              .out = out + kernels::DenseBytes(*type, segment.chunk_offset)};
        },
        [&](auto... table) {
          return gpu_.CompressDense(rule_, table..., first_not_packed, stream_);
        });
  }
  if (const std::optional<kernels::IntegerType> type = IntegerTypeOf(codec)) {
    return launch(
        [&](const Segment& segment) {
          const auto [gradient, gradient_type] = gradient_of(segment);
          return QuantizeSegment{.gradient = gradient,
                                 .gradient_type = gradient_type,
                                 .error = error_of(segment),
                                 .out = QuantizedPart(*type, at, segment, out),
                                 .type = *type};
        },
        [&](auto... table) {
          return gpu_.CompressQuantized(rule_, table..., first_not_packed, stream_);
        });
  }
  return launch(
      [&](const Segment& segment) {
        const auto [gradient, gradient_type] = gradient_of(segment);
        return CompressSegment{.gradient = gradient,
                               .type = gradient_type,
                               .error = error_of(segment),
                               .out = OneBitPart(at, segment, out)};
      },
      [&](auto... table) {
        return gpu_.CompressOneBit(rule_, table..., first_not_packed, stream_);
      });
}

std::optional<uint32_t> GpuAdamState::CompressGradient(uint32_t chunk, Codec codec, bool adds_error,
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

void GpuAdamState::DecompressGradient(uint32_t chunk, absl::Span<const Gradient> gradients) {
  Run(
      chunk,
      [&](const Segment& segment) {
        const auto [gradient, type] = WhereAndType(gradients[segment.tensor], segment);
        return DecompressDenseSegment{.compressed = static_cast<const uint8_t*>(gradient),
                                      .type = DenseTypeOf(type),
                                      .values = Scratch(chunk, segment)};
      },
      [&](auto... table) { return gpu_.DecompressDense(rule_, table..., stream_); });
}

std::optional<uint32_t> GpuAdamState::CompressApart(uint32_t chunk, Codec codec,
                                                    RatesOf<float> unit,
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
  if (status_.ok()) {
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
             [&](auto... table) { return gpu_.AddDense(rule_, table..., stream_); });
       });
  return std::nullopt;
}

std::optional<uint32_t> GpuAdamState::CompressMomentum(uint32_t chunk, Codec codec,
                                                       RatesOf<kernels::MomentumRates> rates,
                                                       absl::Span<const Gradient> gradients,
                                                       uint8_t* payload, Optimizer::Later later) {
  const auto input_row_of = [&](const Segment& segment) {
    const Gradient& gradient = gradients[segment.tensor];
    return MomentumInputSegment{.gradient = PartOf(gradient, segment),
                                .gradient_type = gradient.type,
                                .momentum = DenseMomentum(segment),
                                .input = Scratch(chunk, segment),
                                .rates = rates(segment.tensor)};
  };
  const auto make_input = [&](auto... table) {
    return gpu_.MomentumInput(rule_, table..., stream_);
  };
  if (codec == CUSTOM) {
    Run(chunk, input_row_of, make_input);
    return CompressOnHost(chunk, payload, std::move(later));
  }
  Pack(chunk, codec, payload, std::move(later),
       [&](Slot& slot, uint8_t* out, uint32_t* first_not_packed) {
         if (codec == ONE_BIT) {
           return CompressSigns(slot, chunk, rates, gradients, out, first_not_packed);
         }
         const size_t end = Launch(slot, TablesBegin(), TablesBegin(),
                                   layout_.chunks()[chunk].segments, input_row_of, make_input);
         const auto input_of = [&](const Segment& segment) {
           return std::pair<const void*, GradientType>(Scratch(chunk, segment),
                                                       GradientType::kFloat32);
         };
         Compress(
             slot, end, chunk, codec, input_of, [&](const Segment& s) { return Error(s); }, out,
             first_not_packed);
       });
  return std::nullopt;
}

void GpuAdamState::CompressSigns(Slot& slot, uint32_t chunk, RatesOf<kernels::MomentumRates> rates,
                                 absl::Span<const Gradient> gradients, uint8_t* out,
                                 uint32_t* first_not_packed) {
  const Chunk& at = layout_.chunks()[chunk];
  Launch(
      slot, payload_room_, TablesBegin(), at.segments,
      [&](const Segment& segment) {
        const Gradient& gradient = gradients[segment.tensor];
        CompressSegment row = {.gradient = PartOf(gradient, segment),
                               .type = gradient.type,
                               .error = Error(segment),
                               .out = OneBitPart(at, segment, out),
                               .rates = rates(segment.tensor)};
        if (momentum_is_signed_[chunk]) {
          row.momentum = SignedMomentum(chunk, segment);
        } else {
          row.dense_momentum = DenseMomentum(segment);
        }
        return row;
      },
      [&](auto... table) {
        return gpu_.CompressOneBit(rule_, table..., first_not_packed, stream_);
      });
}

std::optional<uint32_t> GpuAdamState::CompressOnHost(uint32_t chunk, uint8_t* payload,
                                                     Optimizer::Later later) {
  return CompressOnHost(chunk, payload, std::move(later),
                        [&](const NumberCodec& codec, const Segment& part,
                            absl::Span<const float> numbers, absl::Span<float> error) {
                          return codec.Compress(rule_, layout_.chunks()[chunk], part, numbers,
                                                error, payload);
                        });
}

template <class CompressPart>
std::optional<uint32_t> GpuAdamState::CompressOnHost(uint32_t chunk, uint8_t* payload,
                                                     Optimizer::Later later,
                                                     CompressPart compress) {
  const Chunk& at = layout_.chunks()[chunk];
  const size_t room = RoomFor(chunk);
  const size_t bytes = room * sizeof(float);
  auto* const input = reinterpret_cast<float*>(on_host_.get());
  float* const error = input + room;
  float* const error_on_gpu = Error(at.segments[0]);
  Read(input, Scratch(chunk, at.segments[0]), bytes);
  Read(error, error_on_gpu, bytes);
  if (status_.ok()) {
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

void GpuAdamState::DecompressOnHost(uint32_t chunk, const uint8_t* payload, float* numbers) {
  const Chunk& at = layout_.chunks()[chunk];
  const NumberCodec& codec = NumberCodecOf(CUSTOM, layout_);
  crew_->ForEachPart(chunk, [&](const Segment& part) {
    ForEachBlock(part, rule_.block_elements, [&](const Segment& block) {
      if (!codec.IsPacked(at, block, payload)) return;
      codec.Decompress(rule_, at, block, payload, {numbers + block.chunk_offset, block.elements});
    });
  });
}

void GpuAdamState::AdamStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdamRates> rates,
                            Payload answer) {
  const auto row_of = [&](const Segment& segment, kernels::DenseType type,
                          const uint8_t* gradient) {
    return AdamSegment<kernels::AdamRates>{.rates = rates(segment.tensor),
                                           .gradient = gradient,
                                           .type = type,
                                           .momentum = DenseMomentum(segment),
                                           .variance = Variance(segment),
                                           .parameters = Values(segment)};
  };
  RunOnGradient(chunk, codec, answer, row_of,
                [&](auto... table) { return gpu_.AdamStep(rule_, table..., stream_); });
}

void GpuAdamState::RefreshStep(uint32_t chunk, Codec codec, RatesOf<kernels::RefreshRates> rates,
                               Payload answer) {
  const auto row_of = [&](const Segment& segment, kernels::DenseType type,
                          const uint8_t* gradient) {
    return AdamSegment<kernels::RefreshRates>{.rates = rates(segment.tensor),
                                              .gradient = gradient,
                                              .type = type,
                                              .momentum = DenseMomentum(segment),
                                              .variance = Variance(segment),
                                              .parameters = Values(segment)};
  };
  RunOnGradient(chunk, codec, answer, row_of,
                [&](auto... table) { return gpu_.RefreshStep(rule_, table..., stream_); });
}

void GpuAdamState::ApplyMomentum(uint32_t chunk, Codec codec, RatesOf<UpdateRates> rates,
                                 Payload answer) {
  if (codec == ONE_BIT) return ApplySigns(chunk, rates, std::move(answer));
  RunOnDecompressed(
      chunk, codec, answer, [&](const Segment& segment) { return DenseMomentum(segment); },
      [&](const Segment& segment) {
        const UpdateRates update = rates(segment.tensor);
        return ApplyDenseSegment{.momentum = DenseMomentum(segment),
                                 .inverse_denominator = Variance(segment),
                                 .parameters = Values(segment),
                                 .learning_rate = update.learning_rate,
                                 .weight_decay = update.weight_decay};
      },
      [&](auto... table) { return gpu_.ApplyDenseMomentum(rule_, table..., stream_); });
}

void GpuAdamState::ApplySigns(uint32_t chunk, RatesOf<UpdateRates> rates, Payload answer) {
  if (!status_.ok()) return;
  // The last answer has been read by all that came before on the stream.
  Slot& slot = NextApplying();
  std::memcpy(slot.pinned.get(), answer.data(), answer.size());
  Do(gpu_.CopyIn(signed_momentum_.get() + first_signed_[chunk], slot.pinned.get(), answer.size(),
                 stream_));
  momentum_is_signed_[chunk] = true;
  Launch(
      slot, TablesBegin(), TablesBegin(), layout_.chunks()[chunk].segments,
      [&](const Segment& segment) {
        const UpdateRates update = rates(segment.tensor);
        return ApplySegment{.momentum = SignedMomentum(chunk, segment),
                            .inverse_denominator = Variance(segment),
                            .parameters = Values(segment),
                            .learning_rate = update.learning_rate,
                            .weight_decay = update.weight_decay};
      },
      [&](auto... table) { return gpu_.ApplyMomentum(rule_, table..., stream_); });
  Release(slot);
}

void GpuAdamState::MakeMomentumDense(uint32_t chunk) {
  if (!momentum_is_signed_[chunk]) return;
  Run(
      chunk,
      [&](const Segment& segment) {
        return DecompressSegment{.compressed = SignedMomentum(chunk, segment),
                                 .values = DenseMomentum(segment)};
      },
      [&](auto... table) { return gpu_.DecompressOneBit(rule_, table..., stream_); });
  momentum_is_signed_[chunk] = false;
}

void GpuAdamState::AddToError(uint32_t chunk, Codec codec, const uint8_t* payload,
                              absl::Span<const Addition> of_payload,
                              absl::Span<const Addition> of_momentum) {
  if (!status_.ok()) return;
  const Chunk& at = layout_.chunks()[chunk];
  Slot& slot = NextApplying();
  const size_t begin = PutPayload(slot, chunk, codec, payload);
  codec = CodecOnGpu(codec);
  const uint8_t* const on_gpu = slot.device.get() + begin;
  CopyIn(slot, begin, payload_room_);

  size_t end = TablesBegin();
  const auto add = [&](absl::Span<const Addition> additions, auto row_of, auto kernel) {
    const auto whole_row_of = [&](const Addition& addition) {
      auto row = row_of(addition.part);
      row.factor = addition.factor;
      row.accumulator = Error(addition.part);
      return row;
    };
    end = Launch(slot, end, end, additions, whole_row_of, kernel);
  };
  const auto add_one_bit = [&](auto... table) { return gpu_.AddOneBit(rule_, table..., stream_); };
  const auto add_dense = [&](auto... table) { return gpu_.AddDense(rule_, table..., stream_); };
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(codec)) {
    add(
        of_payload,
        [&](const Segment& part) {
          return AddDenseSegment{.addend = on_gpu + kernels::DenseBytes(*type, part.chunk_offset),
                                 .type = *type};
        },
        add_dense);
  } else if (const std::optional<kernels::IntegerType> type = IntegerTypeOf(codec)) {
    add(
        of_payload,
        [&](const Segment& part) {
          return AddQuantizedSegment{.addend = QuantizedPart(*type, at, part, on_gpu),
                                     .type = *type};
        },
        [&](auto... table) { return gpu_.AddQuantized(rule_, table..., stream_); });
  } else {
    add(
        of_payload,
        [&](const Segment& part) { return AddSegment{.addend = OneBitPart(at, part, on_gpu)}; },
        add_one_bit);
  }
  if (momentum_is_signed_[chunk]) {
    add(
        of_momentum,
        [&](const Segment& part) { return AddSegment{.addend = SignedMomentum(chunk, part)}; },
        add_one_bit);
  } else {
    add(
        of_momentum,
        [&](const Segment& part) {
          const float* const dense = DenseMomentum(part);
          return AddDenseSegment{.addend = reinterpret_cast<const uint8_t*>(dense)};
        },
        add_dense);
  }
  Release(slot);
}

double GpuAdamState::SumOfVariance(uint32_t tensor) {
  double sum = 0;
  if (!status_.ok()) return sum;
  auto* const workspace = reinterpret_cast<double*>(sums_.get());
  const size_t elements = values_[tensor].size();
  double* const on_gpu = workspace + kernels::cuda::SumWorkspace(elements);
  Do(gpu_.Sum(Variance({.tensor = tensor}), elements, workspace, on_gpu, stream_));
  Do(gpu_.Read(&sum, on_gpu, sizeof sum, stream_));
  return sum;
}

void GpuAdamState::Freeze(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) {
  Run(
      chunk,
      [&](const Segment& segment) {
        return AdamSegment<kernels::FreezeRates>{.rates = rates(segment.tensor),
                                                 .momentum = DenseMomentum(segment),
                                                 .variance = Variance(segment)};
      },
      [&](auto... table) { return gpu_.Freeze(rule_, table..., stream_); });
}

void GpuAdamState::Thaw(uint32_t chunk, RatesOf<float> epsilon) {
  Run(
      chunk,
      [&](const Segment& segment) {
        AdamSegment<kernels::RefreshRates> row = {.variance = Variance(segment)};
        row.rates.epsilon = epsilon(segment.tensor);
        return row;
      },
      [&](auto... table) { return gpu_.Thaw(rule_, table..., stream_); });
}

void GpuAdamState::Scale(Field field, uint32_t chunk, RatesOf<float> factor) {
  Run(
      chunk,
      [&](const Segment& segment) {
        return ScaleSegment{.factor = factor(segment.tensor), .values = DenseField(field, segment)};
      },
      [&](auto... table) { return gpu_.Scale(rule_, table..., stream_); });
}

void GpuAdamState::Get(Field field, uint32_t chunk, float* numbers) const {
  const Chunk& at = layout_.chunks()[chunk];
  const bool is_signed = field == Field::kMomentum && momentum_is_signed_[chunk];
  Payload payload(is_signed ? layout_.PayloadBytes(ONE_BIT, chunk) : 0);
  if (is_signed)
    Read(payload.data(), signed_momentum_.get() + first_signed_[chunk], payload.size());
  for (const Segment& segment : at.segments) {
    float* const to = numbers + segment.chunk_offset;
    if (is_signed) {
      kernels::DecompressOneBit(rule_, OneBitPart(at, segment, payload.data()),
                                {to, segment.elements});
    } else {
      Read(to, DenseField(field, segment), segment.elements * sizeof(float));
    }
  }
}

void GpuAdamState::Set(Field field, uint32_t chunk, const float* numbers) {
  if (!status_.ok()) return;
  if (field == Field::kMomentum) momentum_is_signed_[chunk] = false;
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    Do(gpu_.Write(DenseField(field, segment), numbers + segment.chunk_offset,
                  segment.elements * sizeof(float), stream_));
  }
}

std::unique_ptr<LambState> GpuAdamState::NewLambState() {
  return std::make_unique<GpuLambState>(*this);
}

std::unique_ptr<ZeroOneState> GpuAdamState::NewZeroOneState() {
  return std::make_unique<GpuZeroOneState>(*this);
}

void GpuAdamState::Read(void* to, const void* from, size_t bytes) const {
  if (status_.ok()) Do(gpu_.Read(to, from, bytes, stream_));
}

void GpuAdamState::Read(float* to, const Memory& numbers, uint32_t chunk) const {
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    Read(to + segment.chunk_offset, In(numbers, segment), segment.elements * sizeof(float));
  }
}

void GpuAdamState::Write(const Memory& numbers, uint32_t chunk, const float* from) {
  if (!status_.ok()) return;
  for (const Segment& segment : layout_.chunks()[chunk].segments) {
    Do(gpu_.Write(In(numbers, segment), from + segment.chunk_offset,
                  segment.elements * sizeof(float), stream_));
  }
}

HostFloats GpuAdamState::Copy(const Memory& numbers) const {
  PageVector<float> copy(layout_.elements());
  float* to = copy.data();
  for (uint32_t tensor = 0; tensor < values_.size(); ++tensor) {
    Read(to, In(numbers, {.tensor = tensor}), values_[tensor].size() * sizeof(float));
    to += values_[tensor].size();
  }
  return HostFloats(std::move(copy));
}

HostFloats GpuAdamState::Copy(const float* from, size_t elements) const {
  PageVector<float> copy(elements);
  Read(copy.data(), from, elements * sizeof(float));
  return HostFloats(std::move(copy));
}

float* GpuAdamState::DenseField(Field field, const Segment& segment) const {
  switch (field) {
    case Field::kParameters:
      return Values(segment);
    case Field::kMomentum:
      return DenseMomentum(segment);
    case Field::kVariance:
      return Variance(segment);
    case Field::kError:
      break;
  }
  return Error(segment);
}

float* GpuAdamState::Values(const Segment& segment) const {
  return values_[segment.tensor].data() + segment.tensor_offset;
}

size_t GpuAdamState::InChunk(uint32_t chunk, const Segment& segment) const {
  return OnGpu(segment) - OnGpu(layout_.chunks()[chunk].segments[0]);
}

size_t GpuAdamState::RoomFor(uint32_t chunk) const {
  const Segment& last = layout_.chunks()[chunk].segments.back();
  return InChunk(chunk, last) + last.elements;
}

kernels::OneBitView GpuAdamState::SignedMomentum(uint32_t chunk, const Segment& segment) const {
  const uint8_t* const payload = signed_momentum_.get() + first_signed_[chunk];
  return OneBitPart(layout_.chunks()[chunk], segment, payload);
}

}  // namespace signpost
