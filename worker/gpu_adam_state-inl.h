// How kernels are launched on a chunk's segments: for gpu_adam_state.cc and gpu_lamb_state.cc.

#ifndef SIGNPOST_WORKER_GPU_ADAM_STATE_INL_H_
#define SIGNPOST_WORKER_GPU_ADAM_STATE_INL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/block.h"
#include "worker/gpu_adam_state.h"

namespace signpost {

// Where it may be in a list.
inline const Segment& PartOf(const Segment& segment) { return segment; }
inline const Segment& PartOf(const AdamState::Addition& addition) { return addition.part; }

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

template <class RowOf, class Launch>
void GpuAdamState::Run(uint32_t chunk, RowOf row_of, Launch launch) {
  if (!status_.ok()) return;
  const Chunk& at = layout_.chunks()[chunk];
  Slot& slot = NextApplying();
  const auto table =
      Write<decltype(row_of(at.segments[0]))>(slot, TablesBegin(), at.segments, row_of);
  CopyIn(slot, TablesBegin(), table.end);
  Do(launch(table.rows, table.count, table.blocks));
  Release(slot);
}

template <class RowOf, class Launch>
void GpuAdamState::RunOnAnswer(uint32_t chunk, const Payload& answer, RowOf row_of, Launch launch) {
  if (!status_.ok()) return;
  const Chunk& at = layout_.chunks()[chunk];
  Slot& slot = NextApplying();
  const size_t begin = PayloadBegin(answer.size());
  std::memcpy(slot.pinned.get() + begin, answer.data(), answer.size());
  const uint8_t* const on_gpu = slot.device.get() + begin;
  const auto table = Write<decltype(row_of(at.segments[0], on_gpu))>(
      slot, TablesBegin(), at.segments,
      [&](const Segment& segment) { return row_of(segment, on_gpu); });
  CopyIn(slot, begin, table.end);
  Do(launch(table.rows, table.count, table.blocks));
  Release(slot);
}

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_ADAM_STATE_INL_H_
