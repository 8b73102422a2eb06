// Chunks of tensors that are on a GPU, as a worker exchanges them: its error, which is there too,
// compression and what undoes it, and all that crosses to the host and back.
//
// Work goes on the caller's stream, but for copies to the host, which have a stream of their own:
// while chunk k is compressed, or the answer for k - 3 applied, k - 1 is copied to the host, and
// k - 2 is on the wire. What crosses to or from the host, payloads and tables of what kernels are
// to do, goes through two rings of slots in pinned memory. Calls wait for the GPU only where their
// comments say so, and those that apply or add something for a slot that the GPU has not come past:
// without a deadline, since CUDA has none.
//
// A codec from outside (CUSTOM) is on the host. Of each chunk that it compresses, numbers and
// errors cross to the host and the errors back, 12 bytes for each element, and nothing else goes on
// until they have; its answers cross as fp32.

#ifndef SIGNPOST_WORKER_GPU_CHUNKS_H_
#define SIGNPOST_WORKER_GPU_CHUNKS_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/gpu.h"
#include "proto/layout.h"
#include "proto/payload.h"
#include "worker/addition.h"
#include "worker/chunk_crew.h"
#include "worker/event_watch.h"
#include "worker/gradient.h"
#include "worker/host_floats.h"
#include "worker/optimizer.h"

namespace signpost {

// Borrows layout and gpu. Not thread-safe. A kernel is one of Gpu's functions, and row_of(segment)
// what it does to a segment, but for the segment's size, which is put in.
class GpuChunks {
 public:
  using Memory = kernels::cuda::Owned<uint8_t>;
  using Gpu = kernels::cuda::Gpu;

  struct Needs {
    std::vector<Codec> codecs;  // that payloads may have
    bool error = true;
    bool scratch = true;  // whether Scratch, or CUSTOM, is used
    // Chunks that may be on their way from the GPU, and to it, each of which takes a payload's
    // memory there and as much on the host.
    size_t packing_slots = 8, applying_slots = 4;
  };

  // Takes all memory at once; when there is not so much, Check says so from the beginning. A codec
  // from outside has `threads` threads, the caller's included.
  GpuChunks(const Layout& layout, const Needs& needs, uint32_t threads, Gpu& gpu);
  // As Await, for ever if the GPU does not come to an end: what was put on its streams may use
  // memory of whoever has these chunks, which must be given back later, or after an Await.
  ~GpuChunks();

  // Waits for what was put on the caller's streams.
  void Await() const;

  // The first failure of any call. From then on none does anything.
  absl::Status Check() const { return status_; }
  bool ok() const { return status_.ok(); }
  // Keeps it if it is one.
  bool Do(const absl::Status& status) const {
    status_.Update(status);
    return status.ok();
  }
  template <class T>
  bool Take(absl::StatusOr<T> made, T& to) {
    if (!Do(made.status())) return false;
    to = *std::move(made);
    return true;
  }

  // INVALID_ARGUMENT for one that is not on this GPU, or not aligned.
  absl::Status CheckGradient(const Gradient& gradient) const { return CheckOn(gpu_, gradient); }
  // INVALID_ARGUMENT for one that is not this GPU's.
  absl::Status SetStream(kernels::cuda::Stream stream);

  const Layout& layout() const { return layout_; }
  const kernels::BlockRule& rule() const { return rule_; }
  Gpu& gpu() const { return gpu_; }
  kernels::cuda::Stream stream() const { return stream_; }

  // Where a GPU reads as many bytes at a time as it can: whole lines of its cache.
  static constexpr size_t Aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

  // Memory that has a number for each element, in layout order, with gaps: each tensor begins at a
  // place that is Aligned. Numbers are what the memory had, or zero.
  bool TakeFloats(Memory& to);
  bool TakeZeros(Memory& to);
  // A segment's numbers there.
  float* In(const Memory& numbers, const Segment& segment) const {
    return reinterpret_cast<float*>(numbers.get()) + OnGpu(segment);
  }
  // Null without an error.
  float* Error(const Segment& segment) const {
    return error_ == nullptr ? nullptr : In(error_, segment);
  }
  // The same in memory that has one for each of one chunk's elements: what is done there for the
  // next chunk comes later on the stream.
  float* Scratch(uint32_t chunk, const Segment& segment) const {
    return reinterpret_cast<float*>(scratch_.get()) + InChunk(chunk, segment);
  }
  // How many floats a chunk takes, gaps included.
  size_t RoomFor(uint32_t chunk) const;

  // All of these wait for the GPU.
  void Read(void* to, const void* from, size_t bytes) const;
  void Write(void* to, const void* from, size_t bytes);
  // A chunk's numbers, to the host and from there, where they have no gaps.
  void Read(float* to, const Memory& numbers, uint32_t chunk) const;
  void Write(const Memory& numbers, uint32_t chunk, const float* from);
  HostFloats Copy(const float* from, size_t elements) const;
  HostFloats Copy(const Memory& numbers) const;
  HostFloats Errors() const { return Copy(error_); }

  // Compression, while there is a slot: as Optimizer::Compress. It returns nothing, but with
  // CUSTOM: then it waits for the GPU, and is done when it returns, unless it has failed.
  bool CanCompress() const;
  std::optional<uint32_t> CompressGradient(uint32_t chunk, Codec codec, bool adds_error,
                                           absl::Span<const Gradient> gradients, uint8_t* payload,
                                           Optimizer::Later later);
  // Apart from the error, which takes what the codec loses times unit(tensor).
  std::optional<uint32_t> CompressApart(uint32_t chunk, Codec codec,
                                        absl::FunctionRef<float(uint32_t tensor)> unit,
                                        absl::Span<const Gradient> gradients, uint8_t* payload,
                                        Optimizer::Later later);
  // With the error, of numbers that the kernel makes, in Scratch.
  template <class RowOf, class Kernel>
  std::optional<uint32_t> CompressMade(uint32_t chunk, Codec codec, RowOf row_of, Kernel kernel,
                                       uint8_t* payload, Optimizer::Later later);

  // Kernels on a chunk. Launches one on all its segments.
  template <class RowOf, class Kernel>
  void Run(uint32_t chunk, RowOf row_of, Kernel kernel);
  // An answer becomes numbers, at to_of(segment).
  template <class ToOf>
  void Decompress(uint32_t chunk, Codec codec, const Payload& answer, ToOf to_of);
  // The same, and then the kernel.
  template <class ToOf, class RowOf, class Kernel>
  void RunOnDecompressed(uint32_t chunk, Codec codec, const Payload& answer, ToOf to_of,
                         RowOf row_of, Kernel kernel);
  // A kernel that reads dense numbers, in any type, on an answer, which is decompressed if it is
  // not dense: row_of(segment, type, numbers).
  template <class RowOf, class Kernel>
  void RunOnDense(uint32_t chunk, Codec codec, const Payload& answer, RowOf row_of, Kernel kernel);

  // Memory of the host and as much of the GPU's, in the same order: room that ends with a payload,
  // the first bad block (which was not packed, or left alone), tables.
  struct Slot {
    Memory pinned;
    Memory device;
    kernels::cuda::Owned<CUevent_st> used;    // on the caller's stream
    kernels::cuda::Owned<CUevent_st> copied;  // to the host
  };

  // One that nothing on the GPU uses any more.
  Slot& NextApplying();
  // Where a slot has the first bad block, behind all payloads, and where tables begin, behind that.
  size_t BadBlockBegin() const { return payload_room_; }
  size_t TablesBegin() const;
  // Writes a chunk's payload to the slot, on the host. Returns where it begins.
  size_t PutPayload(Slot& slot, uint32_t chunk, Codec codec, const uint8_t* payload);
  void CopyIn(Slot& slot, size_t begin, size_t end);
  // Writes a table of the parts' rows to the slot, from `begin` on, copies all from `copied_from`
  // to its end to the GPU, and launches the kernel on it; `more` are what it takes beside. Returns
  // where the table ends.
  template <class Parts, class RowOf, class Kernel, class... More>
  size_t Launch(Slot& slot, size_t copied_from, size_t begin, const Parts& parts, RowOf row_of,
                Kernel kernel, More... more);
  // What is done on the slot's memory has been put on the stream.
  void Release(Slot& slot);
  // Copies what is in the slot from `begin` to the tables to the host, once that is done.
  void CopyOut(Slot& slot, size_t begin);
  // The slot has no bad block. Returns where a kernel lowers it, on the GPU, to which it gets with
  // what is copied from BadBlockBegin() on.
  uint32_t* ClearBadBlock(Slot& slot) const;
  // Which one came back, or kNoBadBlock.
  uint32_t BadBlock(const Slot& slot) const;
  static constexpr uint32_t kNoBadBlock = std::numeric_limits<uint32_t>::max();

  // fill(slot, payload, first_not_packed) launches what compresses the chunk; the latter two are on
  // the GPU, and what the first table copies includes the last. The payload is then copied to the
  // host, and `later` is called.
  template <class Fill>
  void Pack(uint32_t chunk, Codec codec, uint8_t* payload, Optimizer::Later later, Fill fill);

  // What goes back into the error, in a slot, with tables from `begin` on: each addition of what
  // the kernel adds, where row_of(part) has what is added. Returns where they end.
  template <class RowOf, class Kernel>
  size_t AddToError(Slot& slot, size_t begin, absl::Span<const Addition> additions, RowOf row_of,
                    Kernel kernel);
  // The same of what a payload has packed, which gets to the GPU. Tables begin at TablesBegin().
  size_t AddToError(Slot& slot, uint32_t chunk, Codec codec, const uint8_t* payload,
                    absl::Span<const Addition> additions);

 private:
  // Where a payload of so many bytes begins in a slot.
  size_t PayloadBegin(size_t bytes) const;
  bool TakeMemory(const Needs& needs, uint32_t threads);
  // Where a segment's numbers begin on the GPU, in memory that has one for each element.
  size_t OnGpu(const Segment& segment) const {
    return first_on_gpu_[segment.tensor] + segment.tensor_offset;
  }
  size_t InChunk(uint32_t chunk, const Segment& segment) const;

  // Launches the codec's kernel: gradient_of(segment) has where it is, and its type, and
  // error_of(segment) has the error, or null. Returns where its table ends.
  template <class GradientOf, class ErrorOf>
  size_t Compress(Slot& slot, size_t begin, uint32_t chunk, Codec codec, GradientOf gradient_of,
                  ErrorOf error_of, uint8_t* out, uint32_t* first_not_packed);
  // Puts gradients into Scratch.
  void DecompressGradient(uint32_t chunk, absl::Span<const Gradient> gradients);
  // Compresses what is in Scratch on the host, in CUSTOM, by compress(codec, part, numbers, error,
  // payload), which is NumberCodec::Compress or CompressApart. Without a result `later` was called.
  template <class CompressPart>
  std::optional<uint32_t> CompressOnHost(uint32_t chunk, uint8_t* payload, Optimizer::Later later,
                                         CompressPart compress);
  // The former.
  std::optional<uint32_t> CompressOnHost(uint32_t chunk, uint8_t* payload, Optimizer::Later later);
  // A payload of CUSTOM as fp32 numbers, but for blocks that are not packed, which nobody takes.
  void DecompressOnHost(uint32_t chunk, const uint8_t* payload, float* numbers);
  // Puts an answer into the slot and decompresses it. Returns where the table ends.
  template <class ToOf>
  size_t Decompress(Slot& slot, uint32_t chunk, Codec codec, const Payload& answer, ToOf to_of);

  const Layout& layout_;
  const kernels::BlockRule rule_;
  Gpu& gpu_;
  size_t payload_room_ = 0;  // in each slot
  size_t slot_bytes_ = 0;

  mutable absl::Status status_;  // of the first failure
  kernels::cuda::Stream stream_ = nullptr;
  kernels::cuda::Owned<CUevent_st> left_;  // on the one before, when it was left
  kernels::cuda::Event last_ = nullptr;    // the last that is behind work of these chunks'
  kernels::cuda::Owned<CUstream_st> copies_;

  std::vector<size_t> first_on_gpu_;  // by tensor, in floats
  size_t floats_ = 0;                 // with the gaps
  Memory error_;                      // null without one
  Memory scratch_;                    // of one chunk at a time, on the caller's stream

  // Of a codec from outside, if there is one.
  std::optional<ChunkCrew> crew_;
  Memory on_host_;  // pinned: a chunk's numbers, and then its errors

  std::vector<Slot> packing_, applying_;   // rings
  uint64_t packings_ = 0, applyings_ = 0;  // so many were taken
  mutable absl::Mutex mutex_;
  uint64_t packed_ ABSL_GUARDED_BY(mutex_) = 0;  // so many of packings_ are over
  std::optional<EventWatch> watch_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_GPU_CHUNKS_H_
