// For tests: a GPU that is simulated on the host.
//
// Each stream, the null stream too, does its work in order on a thread of its own, some time, with
// delays drawn at random; thread blocks and threads run in random order. Copies read and write when
// the stream comes to them. So what no stream and no event orders sooner or later comes out wrong,
// and is a data race for ThreadSanitizer. Fresh memory is not zero. Pointers are the host's.
//
// Kernels that are given memory that is neither this GPU's nor pinned fail as on a GPU, and so do
// copies of what is not within an allocation.

#ifndef SIGNPOST_KERNELS_SIMULATED_GPU_H_
#define SIGNPOST_KERNELS_SIMULATED_GPU_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/gpu.h"

namespace signpost::kernels::cuda {

class SimulatedGpu final : public Gpu {
 public:
  // Calls, and the bytes of copies, since the beginning.
  struct Counts {
    uint64_t allocations = 0;
    uint64_t pinned_allocations = 0;
    uint64_t pins = 0;
    uint64_t streams = 0;
    uint64_t events = 0;
    uint64_t operations = 0;  // kernels, copies and fills that were put on streams
    uint64_t bytes_in = 0;    // of CopyIn and Write
    uint64_t bytes_out = 0;   // of CopyOut and Read
    // Of kernels: four numbers that were not where a GPU reads or writes them at once. Counts those
    // of all such GPUs, as their streams come to them.
    uint64_t quads_in_pieces = 0;
  };

  // The seed draws the delays and the order of thread blocks.
  explicit SimulatedGpu(uint32_t seed);
  ~SimulatedGpu() override;  // all work is done first

  Counts counts() const;
  // Of CopyOut and Read, on that stream alone.
  uint64_t BytesOutOn(Stream stream) const;
  // As if it had that much memory in all. What is allocated stays.
  void LimitMemory(size_t bytes);
  // As if the system let so many bytes be pinned in all.
  void LimitPins(size_t bytes);
  // As if it could get at no other GPU's memory.
  void RefuseImports();
  // The operation after that many more goes wrong when its stream comes to it. It and all that is
  // done later has no effect, and the GPU can be used no more.
  void FailOperationAfter(uint64_t operations);
  // Streams do nothing more, until they are let go on.
  void Hold();
  void LetGoOn();
  // Kernels may be given any memory of the host's, as if all of it were pinned.
  void LetKernelsUseAllMemory();
  // As if any memory of the host's were its own.
  void OwnAllMemory();
  // Waits until all such GPUs of this process are done with what their streams have.
  static void FinishAll();
  // For OpenGpu.
  void AppendToName(absl::string_view whose);

  std::string name() const override;
  absl::Status CheckIsHere(const void* memory) const override;
  absl::Status CheckIsOurs(Stream stream) const override;

  // Giving back memory waits until all streams are done with what they have then. It ends the
  // program if a GPU of this process has imported it still.
  absl::StatusOr<Owned<uint8_t>> Allocate(size_t bytes) override;
  absl::StatusOr<Owned<uint8_t>> AllocatePinned(size_t bytes) override;
  absl::StatusOr<Owned<uint8_t>> Pin(void* memory, size_t bytes) override;
  // In a file that has no name. Processes of one user, which see each other, can share it.
  absl::StatusOr<ExportedMemory> AllocateExported(size_t bytes) override;
  absl::StatusOr<Owned<uint8_t>> Import(absl::string_view handle) override;

  // A stream that is given back does its work to the end.
  absl::StatusOr<Owned<CUstream_st>> NewStream() override;
  absl::StatusOr<Owned<CUevent_st>> NewEvent() override;
  absl::Status Record(Event event, Stream stream) override;
  absl::Status Wait(Stream stream, Event event) override;
  absl::Status Await(Event event) override;
  absl::StatusOr<bool> HasHappened(Event event) override;

  absl::Status CopyIn(void* to, const void* pinned, size_t bytes, Stream stream) override;
  absl::Status CopyOut(void* pinned, const void* from, size_t bytes, Stream stream) override;
  absl::Status Copy(void* to, const void* from, size_t bytes, Stream stream) override;
  absl::Status SetToZero(void* memory, size_t bytes, Stream stream) override;
  absl::Status Read(void* to, const void* from, size_t bytes, Stream stream) override;
  absl::Status Write(void* to, const void* from, size_t bytes, Stream stream) override;

  absl::Status CompressOneBit(const BlockRule& rule, const CompressSegment* segments,
                              uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                              Stream stream) override;
  absl::Status CompressDense(const BlockRule& rule, const DenseSegment* segments, uint32_t count,
                             uint32_t blocks, uint32_t* first_not_packed, Stream stream) override;
  absl::Status CompressQuantized(const BlockRule& rule, const QuantizeSegment* segments,
                                 uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                                 Stream stream) override;
  absl::Status MomentumInput(const BlockRule& rule, const MomentumInputSegment* segments,
                             uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status ApplyMomentum(const BlockRule& rule, const ApplySegment* segments, uint32_t count,
                             uint32_t blocks, Stream stream) override;
  absl::Status ApplyDenseMomentum(const BlockRule& rule, const ApplyDenseSegment* segments,
                                  uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status DecompressOneBit(const BlockRule& rule, const DecompressSegment* segments,
                                uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status DecompressQuantized(const BlockRule& rule, const DequantizeSegment* segments,
                                   uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status DecompressDense(const BlockRule& rule, const DecompressDenseSegment* segments,
                               uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status AggregateDense(const BlockRule& rule, const AggregateDenseSegment* segments,
                              uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status AddOneBit(const BlockRule& rule, const AddSegment* segments, uint32_t count,
                         uint32_t blocks, Stream stream) override;
  absl::Status AddQuantized(const BlockRule& rule, const AddQuantizedSegment* segments,
                            uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status AddDense(const BlockRule& rule, const AddDenseSegment* segments, uint32_t count,
                        uint32_t blocks, Stream stream) override;
  absl::Status Scale(const BlockRule& rule, const ScaleSegment* segments, uint32_t count,
                     uint32_t blocks, Stream stream) override;
  absl::Status AdamStep(const BlockRule& rule, const AdamSegment<AdamRates>* segments,
                        uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status Freeze(const BlockRule& rule, const AdamSegment<FreezeRates>* segments,
                      uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status RefreshStep(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                           uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status Thaw(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                    uint32_t count, uint32_t blocks, Stream stream) override;
  absl::Status UpdateMoments(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                             uint32_t blocks, Stream stream) override;
  absl::Status LambStep(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                        uint32_t blocks, Stream stream) override;
  absl::Status FloorVariance(const BlockRule& rule, const FloorSegment* segments, uint32_t count,
                             uint32_t blocks, Stream stream) override;
  absl::Status FollowMomentum(const BlockRule& rule, const FollowSegment* segments, uint32_t count,
                              uint32_t blocks, Stream stream) override;
  absl::Status AdaptiveStep(const BlockRule& rule, const AdaptiveSegment* segments, uint32_t count,
                            uint32_t blocks, Stream stream) override;
  absl::Status LocalStep(const BlockRule& rule, const LocalSegment* segments, uint32_t count,
                         uint32_t blocks, uint32_t* first_left_alone, Stream stream) override;
  absl::Status Sum(const float* values, size_t n, double* workspace, double* sum,
                   Stream stream) override;
  absl::Status SumOfSquares(const float* values, size_t n, double* workspace, double* sum,
                            Stream stream) override;

 private:
  class StreamThread;
  struct RecordedEvent;
  using Operation = std::function<absl::Status()>;
  using Allocations = std::map<uintptr_t, size_t>;  // bytes by where they begin

  // RESOURCE_EXHAUSTED unless there is room for so many bytes more.
  absl::Status CheckRoom(size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Owned<uint8_t> Take(size_t bytes, Allocations& allocations) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WaitForAllStreams();
  absl::StatusOr<StreamThread*> ThreadOf(Stream stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Of this GPU, or imported.
  bool IsOnDevice(const void* memory, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether all of them are, or pinned, or null.
  bool CanUse(const std::vector<const void*>& arrays) const;
  absl::Status CheckDeviceRange(const void* memory, size_t bytes) const;
  absl::Status CheckPinnedRange(const void* memory, size_t bytes) const;

  // What an earlier operation did wrong.
  absl::Status Fault() const;
  void SetFault(const absl::Status& fault);
  absl::Status IllegalAddress() const;
  absl::Status Put(Stream stream, Operation operation);
  absl::Status PutCopyIn(void* to, const void* from, size_t bytes, Stream stream);
  absl::Status PutCopyOut(void* to, const void* from, size_t bytes, Stream stream);
  // Waits until the stream is done with what it has.
  absl::Status Finish(Stream stream);

  // Below 256.
  uint32_t NewOrder();
  template <class Segment, class ArraysOf, class Body>
  absl::Status OnBlocks(const Segment* segments, uint32_t count, uint32_t blocks, Stream stream,
                        ArraysOf arrays_of, Body body);
  template <class TermConstant>
  absl::Status SumOf(TermConstant, const float* values, size_t n, double* workspace, double* sum,
                     Stream stream);

  std::atomic<bool> is_held_ = false;
  std::atomic<bool> can_kernels_use_all_memory_ = false;
  std::atomic<bool> owns_all_memory_ = false;
  // Says whether there is a fault without ordering streams, as the mutex would.
  std::atomic<bool> has_fault_ = false;

  mutable absl::Mutex mutex_;
  absl::Status fault_ ABSL_GUARDED_BY(mutex_);
  Counts counts_ ABSL_GUARDED_BY(mutex_);
  std::map<Stream, uint64_t> bytes_out_ ABSL_GUARDED_BY(mutex_);
  size_t memory_bytes_ ABSL_GUARDED_BY(mutex_);
  Allocations device_memory_ ABSL_GUARDED_BY(mutex_);
  Allocations pinned_memory_ ABSL_GUARDED_BY(mutex_);
  Allocations imported_memory_ ABSL_GUARDED_BY(mutex_);
  std::map<uintptr_t, int> imports_ ABSL_GUARDED_BY(mutex_);  // how often, by where they begin
  std::string whose_;
  bool refuses_imports_ ABSL_GUARDED_BY(mutex_) = false;
  size_t most_pins_ ABSL_GUARDED_BY(mutex_) = std::numeric_limits<size_t>::max();  // bytes
  std::optional<uint64_t> failing_operation_ ABSL_GUARDED_BY(mutex_);  // by counts_.operations
  std::mt19937 random_ ABSL_GUARDED_BY(mutex_);
  std::map<Stream, std::unique_ptr<StreamThread>> streams_ ABSL_GUARDED_BY(mutex_);
  // Those that were given back, perhaps with work to do.
  std::vector<std::unique_ptr<StreamThread>> old_streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_SIMULATED_GPU_H_
