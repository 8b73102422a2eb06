// 1-bit Adam's state on a GPU, beside the parameters, and the CUDA kernels.
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

#ifndef SIGNPOST_WORKER_GPU_ADAM_STATE_H_
#define SIGNPOST_WORKER_GPU_ADAM_STATE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/gpu.h"
#include "proto/layout.h"
#include "worker/adam_state.h"
#include "worker/chunk_crew.h"
#include "worker/event_watch.h"

namespace signpost {

// Borrows layout, values and gpu: values[i] is tensor i's parameters, on the GPU. All memory that
// it needs it takes at once; when there is not so much, Check says so from the beginning. A codec
// from outside has `threads` threads, the caller's included.
class GpuAdamState final : public AdamState {
 public:
  // In which gradients travel before the freeze, the momentum after it, and gradients that are
  // apart from the errors.
  struct Codecs {
    Codec gradient = FLOAT32;
    Codec momentum = ONE_BIT;
    Codec apart = FLOAT32;
  };
  GpuAdamState(const Layout& layout, std::vector<absl::Span<float>> values, const Codecs& codecs,
               uint32_t threads, kernels::cuda::Gpu& gpu);
  // Waits for the GPU, which uses its memory, for ever if it does not come to an end.
  ~GpuAdamState() override;

  absl::Status Check() const override { return status_; }
  // INVALID_ARGUMENT for one that is not on this GPU, or not aligned.
  absl::Status CheckGradient(const Gradient& gradient) const override;
  void SetStream(kernels::cuda::Stream stream) override;

  // While there is a slot.
  bool CanCompress() const override;
  // All three return nothing, but with CUSTOM: then they wait for the GPU, and are done when they
  // return, unless it has failed.
  std::optional<uint32_t> CompressGradient(uint32_t chunk, Codec codec, bool adds_error,
                                           absl::Span<const Gradient> gradients, uint8_t* payload,
                                           Optimizer::Later later) override;
  std::optional<uint32_t> CompressApart(uint32_t chunk, Codec codec, RatesOf<float> unit,
                                        absl::Span<const Gradient> gradients, uint8_t* payload,
                                        Optimizer::Later later) override;
  std::optional<uint32_t> CompressMomentum(uint32_t chunk, Codec codec,
                                           RatesOf<kernels::MomentumRates> rates,
                                           absl::Span<const Gradient> gradients, uint8_t* payload,
                                           Optimizer::Later later) override;

  void AdamStep(uint32_t chunk, Codec codec, RatesOf<kernels::AdamRates> rates,
                Payload answer) override;
  void ApplyMomentum(uint32_t chunk, Codec codec, RatesOf<UpdateRates> rates,
                     Payload answer) override;
  void RefreshStep(uint32_t chunk, Codec codec, RatesOf<kernels::RefreshRates> rates,
                   Payload answer) override;
  void MakeMomentumDense(uint32_t chunk) override;

  void AddToError(uint32_t chunk, Codec codec, const uint8_t* payload,
                  absl::Span<const Addition> of_payload,
                  absl::Span<const Addition> of_momentum) override;

  double SumOfVariance(uint32_t tensor) override;  // waits for the GPU
  void Freeze(uint32_t chunk, RatesOf<kernels::FreezeRates> rates) override;
  void Thaw(uint32_t chunk, RatesOf<float> epsilon) override;
  void Scale(Field field, uint32_t chunk, RatesOf<float> factor) override;

  // All of these wait for the GPU.
  void Get(Field field, uint32_t chunk, float* numbers) const override;
  void Set(Field field, uint32_t chunk, const float* numbers) override;
  HostFloats Errors() const override { return Copy(error_); }
  HostFloats Variances() const override { return Copy(variance_); }
  HostFloats ValuesOf(uint32_t tensor) const override {
    return Copy(values_[tensor].data(), values_[tensor].size());
  }
  std::unique_ptr<LambState> NewLambState() override;
  std::unique_ptr<ZeroOneState> NewZeroOneState() override;

 private:
  friend class GpuLambState;     // the rest of 1-bit LAMB's state
  friend class GpuZeroOneState;  // and of 0/1 Adam's

  using Memory = kernels::cuda::Owned<uint8_t>;
  using OwnedEvent = kernels::cuda::Owned<CUevent_st>;

  // Memory of the host and as much of the GPU's, in the same order: room that ends with a payload,
  // the first bad block (which was not packed, or left alone), tables.
  struct Slot {
    Memory pinned;
    Memory device;
    OwnedEvent used;    // on the caller's stream
    OwnedEvent copied;  // to the host
  };

  // Below: gpu_adam_state-inl.h has the templates that others need too.

  // Rows of a table in a slot, for one launch.
  template <class Row>
  struct Table {
    const Row* rows;  // on the GPU
    uint32_t count = 0;
    uint32_t blocks = 0;
    size_t end;  // in the slot
  };

  // Writes the row of each part, whose blocks it numbers, to the slot, from `begin` on.
  template <class Row, class Parts, class RowOf>
  Table<Row> Write(Slot& slot, size_t begin, const Parts& parts, RowOf row_of);
  // One that nothing on the GPU uses any more.
  Slot& NextApplying();
  // Where a payload of so many bytes begins in a slot, and where tables do.
  size_t PayloadBegin(size_t bytes) const;
  size_t TablesBegin() const;
  // Writes a chunk's payload to the slot, as one of CodecOnGpu(codec). Returns where it begins.
  size_t PutPayload(Slot& slot, uint32_t chunk, Codec codec, const uint8_t* payload);
  void CopyIn(Slot& slot, size_t begin, size_t end);
  // What is done on the slot's memory has been put on the stream.
  void Release(Slot& slot);
  // Copies what is in the slot from `begin` to the tables to the host, once that is done.
  void CopyOut(Slot& slot, size_t begin);
  // The slot has no bad block. Returns where a kernel lowers it, on the GPU, to which it gets with
  // what is copied from payload_room_ on.
  uint32_t* ClearBadBlock(Slot& slot) const;
  // Which one came back, or kNoBadBlock.
  uint32_t BadBlock(const Slot& slot) const;
  static constexpr uint32_t kNoBadBlock = std::numeric_limits<uint32_t>::max();

  // Writes a table of the parts to the slot, from `begin` on, copies all from `copied_from` to its
  // end to the GPU, and launches the kernel on it. Returns where it ends.
  template <class Parts, class RowOf, class Kernel>
  size_t Launch(Slot& slot, size_t copied_from, size_t begin, const Parts& parts, RowOf row_of,
                Kernel kernel);
  // fill(slot, payload, first_not_packed) launches what compresses the chunk; the latter two are on
  // the GPU, and what the first table copies includes the last. The payload is then copied to the
  // host, and `later` is called.
  template <class Fill>
  void Pack(uint32_t chunk, Codec codec, uint8_t* payload, Optimizer::Later later, Fill fill);
  // Launches the codec's kernel: gradient_of(segment) has where it is, and its type, and
  // error_of(segment) has the error, or null. Returns where its table ends.
  template <class GradientOf, class ErrorOf>
  size_t Compress(Slot& slot, size_t begin, uint32_t chunk, Codec codec, GradientOf gradient_of,
                  ErrorOf error_of, uint8_t* out, uint32_t* first_not_packed);
  void CompressSigns(Slot& slot, uint32_t chunk, RatesOf<kernels::MomentumRates> rates,
                     absl::Span<const Gradient> gradients, uint8_t* out,
                     uint32_t* first_not_packed);
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
  void ApplySigns(uint32_t chunk, RatesOf<UpdateRates> rates, Payload answer);
  // Launches a kernel on all of the chunk's segments, of which row_of(segment) has all.
  template <class RowOf, class Kernel>
  void Run(uint32_t chunk, RowOf row_of, Kernel kernel);
  // The same with an answer that is dense there: row_of(segment, payload) has where it is.
  template <class RowOf, class Kernel>
  void RunOnAnswer(uint32_t chunk, Codec codec, const Payload& answer, RowOf row_of, Kernel kernel);
  // The same once the answer is decompressed, to to_of(segment).
  template <class ToOf, class RowOf, class Kernel>
  void RunOnDecompressed(uint32_t chunk, Codec codec, const Payload& answer, ToOf to_of,
                         RowOf row_of, Kernel kernel);
  // Whichever of the two it takes, for a mean of gradients: row_of(segment, type, gradient).
  template <class RowOf, class Kernel>
  void RunOnGradient(uint32_t chunk, Codec codec, const Payload& answer, RowOf row_of,
                     Kernel kernel);

  bool TakeMemory(const Codecs& codecs, uint32_t threads);
  // Keeps the first error.
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
  // To the host.
  void Read(void* to, const void* from, size_t bytes) const;
  HostFloats Copy(const float* from, size_t elements) const;
  HostFloats Copy(const Memory& numbers) const;
  // A chunk's numbers, to the host and from there, where they have no gaps.
  void Read(float* to, const Memory& numbers, uint32_t chunk) const;
  void Write(const Memory& numbers, uint32_t chunk, const float* from);

  // Where a segment's numbers begin on the GPU, in memory that has one for each element.
  size_t OnGpu(const Segment& segment) const {
    return first_on_gpu_[segment.tensor] + segment.tensor_offset;
  }
  float* In(const Memory& numbers, const Segment& segment) const {
    return reinterpret_cast<float*>(numbers.get()) + OnGpu(segment);
  }
  float* Error(const Segment& segment) const { return In(error_, segment); }
  float* Variance(const Segment& segment) const { return In(variance_, segment); }
  float* DenseMomentum(const Segment& segment) const { return In(dense_momentum_, segment); }
  float* Values(const Segment& segment) const;
  float* DenseField(Field field, const Segment& segment) const;
  // The same in memory that has one for each of the chunk's.
  size_t InChunk(uint32_t chunk, const Segment& segment) const;
  float* Scratch(uint32_t chunk, const Segment& segment) const {
    return reinterpret_cast<float*>(scratch_.get()) + InChunk(chunk, segment);
  }
  // How many floats the chunk takes there, gaps included.
  size_t RoomFor(uint32_t chunk) const;
  kernels::OneBitView SignedMomentum(uint32_t chunk, const Segment& segment) const;

  const Layout& layout_;
  const kernels::BlockRule rule_;
  const std::vector<absl::Span<float>> values_;  // by tensor
  kernels::cuda::Gpu& gpu_;
  size_t payload_room_ = 0;  // in each slot
  size_t slot_bytes_ = 0;

  mutable absl::Status status_;  // of the first failure
  kernels::cuda::Stream stream_ = nullptr;
  OwnedEvent left_;                      // on the one before, when it was left
  kernels::cuda::Event last_ = nullptr;  // the last that is behind work of this state's
  kernels::cuda::Owned<CUstream_st> copies_;

  // 4 bytes for each element, in layout order, with gaps: each tensor begins where a GPU reads as
  // many bytes at a time as it can.
  std::vector<size_t> first_on_gpu_;  // by tensor, in floats
  size_t floats_ = 0;                 // with the gaps
  Memory error_;
  Memory variance_;
  Memory dense_momentum_;
  Memory scratch_;                        // of one chunk at a time, on the caller's stream
  Memory signed_momentum_;                // each chunk's one-bit payload, from first_signed_ on
  std::vector<size_t> first_signed_;      // by chunk
  std::vector<bool> momentum_is_signed_;  // by chunk: which of the two counts
  Memory sums_;                           // what it takes to make a sum, and the sum

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

#endif  // SIGNPOST_WORKER_GPU_ADAM_STATE_H_
