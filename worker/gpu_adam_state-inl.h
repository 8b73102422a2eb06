// How kernels are launched on a chunk's segments: for gpu_adam_state.cc and gpu_lamb_state.cc.

#ifndef SIGNPOST_WORKER_GPU_ADAM_STATE_INL_H_
#define SIGNPOST_WORKER_GPU_ADAM_STATE_INL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/dense_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/quantized_cuda.h"
#include "proto/codec.h"
#include "worker/gpu_adam_state.h"

namespace signpost {

// What kernels take for a codec: on a GPU the numbers of one from outside are fp32, which loses
// nothing.
inline Codec CodecOnGpu(Codec codec) { return codec == CUSTOM ? FLOAT32 : codec; }

// Where it may be in a list.
inline const Segment& PartOf(const Segment& segment) { return segment; }
inline const Segment& PartOf(const AdamState::Addition& addition) { return addition.part; }

// Where the part's gradient begins.
inline const void* PartOf(const Gradient& gradient, const Segment& part) {
  if (gradient.values == nullptr) return nullptr;  // zeros
  return static_cast<const uint8_t*>(gradient.values) + BytesOf(gradient.type) * part.tensor_offset;
}

template <class Row, class Parts, class RowOf>
GpuAdamState::Table<Row> GpuAdamState::Write(Slot& slot, size_t begin, const Parts& parts,
                                             RowOf row_of) {
  Table<Row> table = {.rows = reinterpret_cast<const Row*>(slot.device.get() + begin),
                      .end = begin + parts.size() * sizeof(Row)};
  for (const auto& item : parts) {
    const Segment& part = PartOf(item);
    Row row = row_of(item);
    row.elements = part.elements;
    row.first_block = table.blocks;
    std::memcpy(slot.pinned.get() + begin + table.count * sizeof(Row), &row, sizeof(Row));
    table.blocks += kernels::BlockCount(part.elements, rule_.block_elements);
    ++table.count;
  }
  return table;
}

template <class Parts, class RowOf, class Kernel>
size_t GpuAdamState::Launch(Slot& slot, size_t copied_from, size_t begin, const Parts& parts,
                            RowOf row_of, Kernel kernel) {
  if (parts.empty()) return begin;
  const auto table = Write<decltype(row_of(parts[0]))>(slot, begin, parts, row_of);
  CopyIn(slot, copied_from, table.end);
  Do(kernel(table.rows, table.count, table.blocks));
  return table.end;
}

template <class RowOf, class Kernel>
void GpuAdamState::Run(uint32_t chunk, RowOf row_of, Kernel kernel) {
  if (!status_.ok()) return;
  Slot& slot = NextApplying();
  Launch(slot, TablesBegin(), TablesBegin(), layout_.chunks()[chunk].segments, row_of, kernel);
  Release(slot);
}

template <class RowOf, class Kernel>
void GpuAdamState::RunOnAnswer(uint32_t chunk, Codec codec, const Payload& answer, RowOf row_of,
                               Kernel kernel) {
  if (!status_.ok()) return;
  Slot& slot = NextApplying();
  const size_t begin = PutPayload(slot, chunk, codec, answer.data());
  const uint8_t* const on_gpu = slot.device.get() + begin;
  Launch(
      slot, begin, TablesBegin(), layout_.chunks()[chunk].segments,
      [&](const Segment& segment) { return row_of(segment, on_gpu); }, kernel);
  Release(slot);
}

template <class ToOf, class RowOf, class Kernel>
void GpuAdamState::RunOnDecompressed(uint32_t chunk, Codec codec, const Payload& answer, ToOf to_of,
                                     RowOf row_of, Kernel kernel) {
  if (!status_.ok()) return;
  const Chunk& at = layout_.chunks()[chunk];
  Slot& slot = NextApplying();
  const size_t begin = PutPayload(slot, chunk, codec, answer.data());
  codec = CodecOnGpu(codec);
  const uint8_t* const on_gpu = slot.device.get() + begin;
  const auto decompress = [&](auto decompressed_row_of, auto decompress_kernel) {
    return Launch(slot, begin, TablesBegin(), at.segments, decompressed_row_of, decompress_kernel);
  };
  size_t end;
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(codec)) {
    end = decompress(
        [&](const Segment& segment) {
          return kernels::cuda::DecompressDenseSegment{
              .compressed = on_gpu + kernels::DenseBytes(*type, segment.chunk_offset),
              .type = *type,
              .values = to_of(segment)};
        },
        [&](auto... table) { return gpu_.DecompressDense(rule_, table..., stream_); });
  } else if (const std::optional<kernels::IntegerType> type = IntegerTypeOf(codec)) {
    end = decompress(
        [&](const Segment& segment) {
          return kernels::cuda::DequantizeSegment{
              .compressed = QuantizedPart(*type, at, segment, on_gpu),
              .type = *type,
              .values = to_of(segment)};
        },
        [&](auto... table) { return gpu_.DecompressQuantized(rule_, table..., stream_); });
  } else {
    end = decompress(
        [&](const Segment& segment) {
          return kernels::cuda::DecompressSegment{.compressed = OneBitPart(at, segment, on_gpu),
                                                  .values = to_of(segment)};
        },
        [&](auto... table) { return gpu_.DecompressOneBit(rule_, table..., stream_); });
  }
  Launch(slot, end, end, at.segments, row_of, kernel);
  Release(slot);
}

template <class RowOf, class Kernel>
void GpuAdamState::RunOnGradient(uint32_t chunk, Codec codec, const Payload& answer, RowOf row_of,
                                 Kernel kernel) {
  if (const std::optional<kernels::DenseType> type = DenseTypeOf(CodecOnGpu(codec))) {
    return RunOnAnswer(
        chunk, codec, answer,
        [&](const Segment& segment, const uint8_t* payload) {
          return row_of(segment, *type, payload + kernels::DenseBytes(*type, segment.chunk_offset));
        },
        kernel);
  }
  RunOnDecompressed(
      chunk, codec, answer, [&](const Segment& segment) { return Scratch(chunk, segment); },
      [&](const Segment& segment) {
        return row_of(segment, kernels::DenseType::kFloat32,
                      reinterpret_cast<const uint8_t*>(Scratch(chunk, segment)));
      },
      kernel);
}

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_ADAM_STATE_INL_H_
