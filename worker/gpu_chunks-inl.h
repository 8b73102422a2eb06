// GpuChunks' templates, for those who run kernels on chunks.

#ifndef SIGNPOST_WORKER_GPU_CHUNKS_INL_H_
#define SIGNPOST_WORKER_GPU_CHUNKS_INL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/dense_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/quantized_cuda.h"
#include "proto/codec.h"
#include "worker/gpu_chunks.h"

namespace signpost {

// What kernels take for a codec: on a GPU the numbers of one from outside are fp32, which loses
// nothing.
inline Codec CodecOnGpu(Codec codec) { return codec == CUSTOM ? FLOAT32 : codec; }

// Where it may be in a list.
inline const Segment& PartOf(const Segment& segment) { return segment; }
inline const Segment& PartOf(const Addition& addition) { return addition.part; }

// Where the part's gradient begins.
inline const void* PartOf(const Gradient& gradient, const Segment& part) {
  if (gradient.values == nullptr) return nullptr;  // zeros
  return static_cast<const uint8_t*>(gradient.values) + BytesOf(gradient.type) * part.tensor_offset;
}

template <class Parts, class RowOf, class Kernel, class... More>
size_t GpuChunks::Launch(Slot& slot, size_t copied_from, size_t begin, const Parts& parts,
                         RowOf row_of, Kernel kernel, More... more) {
  if (parts.empty()) return begin;
  using Row = decltype(row_of(parts[0]));
  uint32_t count = 0, blocks = 0;
  size_t end = begin;
  for (const auto& item : parts) {
    const Segment& part = PartOf(item);
    Row row = row_of(item);
    row.elements = part.elements;
    row.first_block = blocks;
    std::memcpy(slot.pinned.get() + end, &row, sizeof row);
    end += sizeof row;
    ++count;
    blocks += kernels::BlockCount(part.elements, rule_.block_elements);
  }
  CopyIn(slot, copied_from, end);
  const auto* const rows = reinterpret_cast<const Row*>(slot.device.get() + begin);
  Do((gpu_.*kernel)(rule_, rows, count, blocks, more..., stream_));
  return end;
}

template <class RowOf, class Kernel>
void GpuChunks::Run(uint32_t chunk, RowOf row_of, Kernel kernel) {
  if (!ok()) return;
  Slot& slot = NextApplying();
  Launch(slot, TablesBegin(), TablesBegin(), layout_.chunks()[chunk].segments, row_of, kernel);
  Release(slot);
}

template <class ToOf>
size_t GpuChunks::Decompress(Slot& slot, uint32_t chunk, Codec codec, const Payload& answer,
                             ToOf to_of) {
  const Chunk& at = layout_.chunks()[chunk];
  const size_t begin = PutPayload(slot, chunk, codec, answer.data());
  codec = CodecOnGpu(codec);
  const uint8_t* const on_gpu = slot.device.get() + begin;
  const auto launch = [&](auto row_of, auto kernel) {
    return Launch(slot, begin, TablesBegin(), at.segments, row_of, kernel);
  };
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(codec)) {
    return launch(
        [&](const Segment& segment) {
          return kernels::cuda::DecompressDenseSegment{
              .compressed = on_gpu + kernels::DenseBytes(*type, segment.chunk_offset),
              .type = *type,
              .values = to_of(segment)};
        },
        &Gpu::DecompressDense);
  }
  if (const std::optional<kernels::IntegerType> type = IntegerTypeOf(codec)) {
    return launch(
        [&](const Segment& segment) {
          return kernels::cuda::DequantizeSegment{
              .compressed = QuantizedPart(*type, at, segment, on_gpu),
              .type = *type,
              .values = to_of(segment)};
        },
        &Gpu::DecompressQuantized);
  }
  return launch(
      [&](const Segment& segment) {
        return kernels::cuda::DecompressSegment{.compressed = OneBitPart(at, segment, on_gpu),
                                                .values = to_of(segment)};
      },
      &Gpu::DecompressOneBit);
}

template <class ToOf>
void GpuChunks::Decompress(uint32_t chunk, Codec codec, const Payload& answer, ToOf to_of) {
  if (!ok()) return;
  Slot& slot = NextApplying();
  Decompress(slot, chunk, codec, answer, to_of);
  Release(slot);
}

template <class ToOf, class RowOf, class Kernel>
void GpuChunks::RunOnDecompressed(uint32_t chunk, Codec codec, const Payload& answer, ToOf to_of,
                                  RowOf row_of, Kernel kernel) {
  if (!ok()) return;
  Slot& slot = NextApplying();
  const size_t end = Decompress(slot, chunk, codec, answer, to_of);
  Launch(slot, end, end, layout_.chunks()[chunk].segments, row_of, kernel);
  Release(slot);
}

template <class RowOf, class Kernel>
void GpuChunks::RunOnDense(uint32_t chunk, Codec codec, const Payload& answer, RowOf row_of,
                           Kernel kernel) {
  const std::optional<kernels::DenseType> type = DenseTypeOf(CodecOnGpu(codec));
  if (!type) {
    return RunOnDecompressed(
        chunk, codec, answer, [&](const Segment& segment) { return Scratch(chunk, segment); },
        [&](const Segment& segment) {
          return row_of(segment, kernels::DenseType::kFloat32,
                        reinterpret_cast<const uint8_t*>(Scratch(chunk, segment)));
        },
        kernel);
  }
  if (!ok()) return;
  Slot& slot = NextApplying();
  const size_t begin = PutPayload(slot, chunk, codec, answer.data());
  const uint8_t* const on_gpu = slot.device.get() + begin;
  Launch(
      slot, begin, TablesBegin(), layout_.chunks()[chunk].segments,
      [&](const Segment& segment) {
        return row_of(segment, *type, on_gpu + kernels::DenseBytes(*type, segment.chunk_offset));
      },
      kernel);
  Release(slot);
}

template <class Fill>
void GpuChunks::Pack(uint32_t chunk, Codec codec, uint8_t* payload, Optimizer::Later later,
                     Fill fill) {
  if (!ok()) return later(status_);
  const size_t bytes = layout_.PayloadBytes(codec, chunk);
  const size_t begin = PayloadBegin(bytes);
  Slot& slot = packing_[packings_++ % packing_.size()];
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
size_t GpuChunks::Compress(Slot& slot, size_t begin, uint32_t chunk, Codec codec,
                           GradientOf gradient_of, ErrorOf error_of, uint8_t* out,
                           uint32_t* first_not_packed) {
  const Chunk& at = layout_.chunks()[chunk];
  const auto launch = [&](auto row_of, auto kernel) {
    return Launch(slot, BadBlockBegin(), begin, at.segments, row_of, kernel, first_not_packed);
  };
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(codec)) {
    return launch(
        [&](const Segment& segment) {
          const auto [gradient, gradient_type] = gradient_of(segment);
          return kernels::cuda::DenseSegment{
              .gradient = gradient,
              .gradient_type = gradient_type,
              .type = *type,
              .error = error_of(segment),
              .out = out + kernels::DenseBytes(*type, segment.chunk_offset)};
        },
        &Gpu::CompressDense);
  }
  if (const std::optional<kernels::IntegerType> type = IntegerTypeOf(codec)) {
    return launch(
        [&](const Segment& segment) {
          const auto [gradient, gradient_type] = gradient_of(segment);
          return kernels::cuda::QuantizeSegment{.gradient = gradient,
                                                .gradient_type = gradient_type,
                                                .error = error_of(segment),
                                                .out = QuantizedPart(*type, at, segment, out),
                                                .type = *type};
        },
        &Gpu::CompressQuantized);
  }
  return launch(
      [&](const Segment& segment) {
        const auto [gradient, gradient_type] = gradient_of(segment);
        return kernels::cuda::CompressSegment{.gradient = gradient,
                                              .type = gradient_type,
                                              .error = error_of(segment),
                                              .out = OneBitPart(at, segment, out)};
      },
      &Gpu::CompressOneBit);
}

template <class RowOf, class Kernel>
std::optional<uint32_t> GpuChunks::CompressMade(uint32_t chunk, Codec codec, RowOf row_of,
                                                Kernel kernel, uint8_t* payload,
                                                Optimizer::Later later) {
  if (codec == CUSTOM) {
    Run(chunk, row_of, kernel);
    return CompressOnHost(chunk, payload, std::move(later));
  }
  Pack(chunk, codec, payload, std::move(later),
       [&](Slot& slot, uint8_t* out, uint32_t* first_not_packed) {
         const size_t end = Launch(slot, TablesBegin(), TablesBegin(),
                                   layout_.chunks()[chunk].segments, row_of, kernel);
         const auto made = [&](const Segment& segment) {
           return std::pair<const void*, GradientType>(Scratch(chunk, segment),
                                                       GradientType::kFloat32);
         };
         Compress(
             slot, end, chunk, codec, made, [&](const Segment& s) { return Error(s); }, out,
             first_not_packed);
       });
  return std::nullopt;
}

template <class RowOf, class Kernel>
size_t GpuChunks::AddToError(Slot& slot, size_t begin, absl::Span<const Addition> additions,
                             RowOf row_of, Kernel kernel) {
  return Launch(
      slot, begin, begin, additions,
      [&](const Addition& addition) {
        auto row = row_of(addition.part);
        row.factor = addition.factor;
        row.accumulator = Error(addition.part);
        return row;
      },
      kernel);
}

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_CHUNKS_INL_H_
