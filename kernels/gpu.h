// A GPU as a worker sees it: its memory, streams and events, and the kernels of *_cuda.h. OpenGpu
// gives a real one; tests have one that is simulated on the host (simulated_gpu.h).

#ifndef SIGNPOST_KERNELS_GPU_H_
#define SIGNPOST_KERNELS_GPU_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/adam_cuda.h"
#include "kernels/block.h"
#include "kernels/dense_cuda.h"
#include "kernels/lamb_cuda.h"
#include "kernels/momentum_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/quantized_cuda.h"
#include "kernels/types_cuda.h"
#include "kernels/zero_one_cuda.h"

struct CUevent_st;

namespace signpost::kernels::cuda {

using Event = CUevent_st*;  // cudaEvent_t

// What is given back to the GPU when its owner goes. The GPU must outlive it.
template <class T>
using Owned = std::unique_ptr<T, std::function<void(T*)>>;

struct ExportedMemory {
  Owned<uint8_t> memory;
  std::string handle;  // what others import it with, as long as it is there
};

// Thread-safe. Whichever GPU is the calling thread's, it stays so. What is put on a stream happens
// in that order, some time; nothing on one stream waits for another's, but by an event. An error of
// what happened there comes back from any later call.
class Gpu {
 public:
  virtual ~Gpu() = default;

  virtual std::string name() const = 0;  // "GPU 0 (NVIDIA H200)"

  // INVALID_ARGUMENT, saying where it points instead, unless to memory of this GPU.
  virtual absl::Status CheckIsHere(const void* memory) const = 0;
  // INVALID_ARGUMENT, saying whose it is instead, unless it is a stream of this GPU.
  virtual absl::Status CheckIsOurs(Stream stream) const = 0;

  // Uninitialised. RESOURCE_EXHAUSTED with how much was wanted, and is free.
  virtual absl::StatusOr<Owned<uint8_t>> Allocate(size_t bytes) = 0;
  // Memory of the host that can be copied from and to while the host does something else.
  virtual absl::StatusOr<Owned<uint8_t>> AllocatePinned(size_t bytes) = 0;
  // Makes such memory of some that is the caller's, until what it returns goes: that frees nothing,
  // and must go before the memory does. It begins at a page, and its pages are taken at once.
  // RESOURCE_EXHAUSTED, with the reason and what to do, when the system does not let it.
  virtual absl::StatusOr<Owned<uint8_t>> Pin(void* memory, size_t bytes) = 0;

  // As Allocate, of memory that other processes of this machine can import. FAILED_PRECONDITION,
  // with the reason, when the system has no such thing.
  virtual absl::StatusOr<ExportedMemory> AllocateExported(size_t bytes) = 0;
  // Such memory of another process, or this one, on this GPU or another: this GPU's copies and
  // kernels may use it, until what Import returns goes, which must be before the memory does.
  // FAILED_PRECONDITION, with the reason, when this GPU cannot get at it; INVALID_ARGUMENT for what
  // is no handle.
  virtual absl::StatusOr<Owned<uint8_t>> Import(absl::string_view handle) = 0;

  virtual absl::StatusOr<Owned<CUstream_st>> NewStream() = 0;
  virtual absl::StatusOr<Owned<CUevent_st>> NewEvent() = 0;
  // The event happens when all that is on the stream now is done. One that was not recorded yet has
  // happened.
  virtual absl::Status Record(Event event, Stream stream) = 0;
  // What comes on the stream from now on waits for it.
  virtual absl::Status Wait(Stream stream, Event event) = 0;
  // Blocks until it has happened.
  virtual absl::Status Await(Event event) = 0;
  virtual absl::StatusOr<bool> HasHappened(Event event) = 0;

  virtual absl::Status CopyIn(void* to, const void* pinned, size_t bytes, Stream stream) = 0;
  virtual absl::Status CopyOut(void* pinned, const void* from, size_t bytes, Stream stream) = 0;
  // From this GPU's memory, or imported one, to such memory; they must not overlap.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual absl::Status SetToZero(void* memory, size_t bytes, Stream stream) = 0;
  // Block until all that is on the stream, and then the copy, is done. Any memory of the host's.
  virtual absl::Status Read(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual absl::Status Write(void* to, const void* from, size_t bytes, Stream stream) = 0;

  // As the functions of these names.
  virtual absl::Status CompressOneBit(const BlockRule& rule, const CompressSegment* segments,
                                      uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                                      Stream stream) = 0;
  virtual absl::Status CompressDense(const BlockRule& rule, const DenseSegment* segments,
                                     uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                                     Stream stream) = 0;
  virtual absl::Status CompressQuantized(const BlockRule& rule, const QuantizeSegment* segments,
                                         uint32_t count, uint32_t blocks,
                                         uint32_t* first_not_packed, Stream stream) = 0;
  virtual absl::Status MomentumInput(const BlockRule& rule, const MomentumInputSegment* segments,
                                     uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status ApplyMomentum(const BlockRule& rule, const ApplySegment* segments,
                                     uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status ApplyDenseMomentum(const BlockRule& rule, const ApplyDenseSegment* segments,
                                          uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status DecompressOneBit(const BlockRule& rule, const DecompressSegment* segments,
                                        uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status DecompressQuantized(const BlockRule& rule, const DequantizeSegment* segments,
                                           uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status DecompressDense(const BlockRule& rule,
                                       const DecompressDenseSegment* segments, uint32_t count,
                                       uint32_t blocks, Stream stream) = 0;
  virtual absl::Status AggregateDense(const BlockRule& rule, const AggregateDenseSegment* segments,
                                      uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status AddOneBit(const BlockRule& rule, const AddSegment* segments, uint32_t count,
                                 uint32_t blocks, Stream stream) = 0;
  virtual absl::Status AddQuantized(const BlockRule& rule, const AddQuantizedSegment* segments,
                                    uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status AddDense(const BlockRule& rule, const AddDenseSegment* segments,
                                uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status Scale(const BlockRule& rule, const ScaleSegment* segments, uint32_t count,
                             uint32_t blocks, Stream stream) = 0;
  virtual absl::Status AdamStep(const BlockRule& rule, const AdamSegment<AdamRates>* segments,
                                uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status Freeze(const BlockRule& rule, const AdamSegment<FreezeRates>* segments,
                              uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status RefreshStep(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                                   uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status Thaw(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                            uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status UpdateMoments(const BlockRule& rule, const LambSegment* segments,
                                     uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status LambStep(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                                uint32_t blocks, Stream stream) = 0;
  virtual absl::Status FloorVariance(const BlockRule& rule, const FloorSegment* segments,
                                     uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status FollowMomentum(const BlockRule& rule, const FollowSegment* segments,
                                      uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status AdaptiveStep(const BlockRule& rule, const AdaptiveSegment* segments,
                                    uint32_t count, uint32_t blocks, Stream stream) = 0;
  virtual absl::Status LocalStep(const BlockRule& rule, const LocalSegment* segments,
                                 uint32_t count, uint32_t blocks, uint32_t* first_left_alone,
                                 Stream stream) = 0;
  virtual absl::Status Sum(const float* values, size_t n, double* workspace, double* sum,
                           Stream stream) = 0;
  virtual absl::Status SumOfSquares(const float* values, size_t n, double* workspace, double* sum,
                                    Stream stream) = 0;
};

// Whether the program is built with CUDA: otherwise OpenGpu always fails.
bool CanOpenGpus();

// A GPU of this process, as CUDA counts them. Its name, which all errors begin with, ends with
// `whose`: other processes may read them. Errors as CheckDevice, and UNAVAILABLE
// with what CUDA says.
absl::StatusOr<std::unique_ptr<Gpu>> OpenGpu(int device, absl::string_view whose = "");

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_GPU_H_
