// OpenGpu of a build with CUDA.

#include "kernels/gpu.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/adam_cuda.h"
#include "kernels/dense_cuda.h"
#include "kernels/device.h"
#include "kernels/error_cuda.h"
#include "kernels/gpu_messages.h"
#include "kernels/kernel_list_cuda.h"
#include "kernels/lamb_cuda.h"
#include "kernels/momentum_cuda.h"
#include "kernels/onebit_cuda.h"
#include "kernels/quantized_cuda.h"
#include "kernels/sum_cuda.h"
#include "kernels/zero_one_cuda.h"

namespace signpost::kernels::cuda {
namespace {

// The driver's functions are found at run time, as the runtime does: programs must start without.
template <class Function>
absl::Status Find(const char* name, Function*& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) return StatusOf(error);
  if (found == nullptr) {
    return absl::UnavailableError(absl::StrCat("the NVIDIA driver has no ", name));
  }
  function = reinterpret_cast<Function*>(found);
  return absl::OkStatus();
}

// The runtime's errors have the driver's numbers.
absl::Status StatusOfDriver(CUresult result) { return StatusOf(static_cast<cudaError_t>(result)); }

// What the runtime uses of a device in this process.
//
// It is made a thread's by pushing it, not by cudaSetDevice: to set back the GPU that a thread had
// would give a thread that has used none a context on GPU 0, and with it hundreds of megabytes
// there for each process.
class Context {
 public:
  absl::Status Open(int device) {
    absl::Status status;
    decltype(cuDeviceGet)* device_get = nullptr;
    status.Update(Find("cuDeviceGet", device_get));
    status.Update(Find("cuCtxPushCurrent", push_));
    status.Update(Find("cuCtxPopCurrent", pop_));
    status.Update(Find("cuDevicePrimaryCtxRetain", retain_));
    status.Update(Find("cuDevicePrimaryCtxRelease", release_));
    status.Update(Find("cuCtxGetDevice", device_of_thread_));
    status.Update(Find("cuStreamGetCtx", context_of_));
    if (!status.ok()) return status;
    CUdevice handle;
    status = StatusOfDriver(device_get(&handle, device));
    if (status.ok()) status = StatusOfDriver(retain_(&context_, handle));
    if (status.ok()) device_ = handle;
    return status;
  }

  Context() = default;
  ~Context() {
    if (device_ >= 0) release_(device_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Calls call() with this device as the thread's, which has its own again afterwards.
  template <class Call>
  absl::Status With(Call call) const {
    return With(context_, call);
  }

  // Whose stream it is; of this device where the driver does not say.
  int DeviceOf(Stream stream) const {
    CUdevice device = device_;
    With([&] {
      CUcontext context;
      if (context_of_(stream, &context) != CUDA_SUCCESS) return absl::OkStatus();
      return With(context, [&] {
        device_of_thread_(&device);
        return absl::OkStatus();
      });
    }).IgnoreError();
    return device;
  }

 private:
  template <class Call>
  absl::Status With(CUcontext context, Call call) const {
    if (const CUresult pushed = push_(context); pushed != CUDA_SUCCESS)
      return StatusOfDriver(pushed);
    absl::Status status = call();
    CUcontext popped;
    pop_(&popped);
    return status;
  }

  CUdevice device_ = -1;  // or none is held
  CUcontext context_ = nullptr;
  decltype(cuCtxPushCurrent)* push_ = nullptr;
  decltype(cuCtxPopCurrent)* pop_ = nullptr;
  decltype(cuDevicePrimaryCtxRetain)* retain_ = nullptr;
  decltype(cuDevicePrimaryCtxRelease)* release_ = nullptr;
  decltype(cuCtxGetDevice)* device_of_thread_ = nullptr;
  decltype(cuStreamGetCtx)* context_of_ = nullptr;
};

// Tells this process from others, also where process numbers do not: in another container.
uint64_t ThisProcess() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return number;
}

// A handle of exported memory.
struct Exported {
  uint64_t process;
  uint8_t* memory;  // there
  cudaIpcMemHandle_t handle;
};

// Whether it is because of what was to be shared, and not of what has gone wrong before.
bool IsAboutSharing(cudaError_t error) {
  switch (error) {
    case cudaErrorDeviceUninitialized:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorInvalidValue:
    case cudaErrorMapBufferObjectFailed:
    case cudaErrorNotSupported:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorTooManyPeers:
      return true;
    default:
      return false;
  }
}

class CudaGpu final : public Gpu {
 public:
  explicit CudaGpu(int device) : device_(device), name_(absl::StrCat("GPU ", device)) {}

  absl::Status Open(absl::string_view whose) {
    cudaDeviceProp properties;
    absl::Status status = StatusOf(cudaGetDeviceProperties(&properties, device_));
    if (status.ok()) absl::StrAppend(&name_, " (", properties.name, ")");
    absl::StrAppend(&name_, whose);
    status.Update(context_.Open(device_));
    if (!status.ok()) return Named(status);
    return Launch([] { return ListedKernel::LoadAll(); });
  }

  std::string name() const override { return name_; }

  absl::Status CheckIsHere(const void* memory) const override {
    if (memory == nullptr) return NotHereError(name_, "a null pointer");
    cudaPointerAttributes attributes;
    const absl::Status status = Call([&] { return cudaPointerGetAttributes(&attributes, memory); });
    if (!status.ok()) return status;
    switch (attributes.type) {
      case cudaMemoryTypeDevice:
      case cudaMemoryTypeManaged:
        if (attributes.device == device_) return absl::OkStatus();
        return NotHereError(name_, absl::StrCat("memory of GPU ", attributes.device));
      case cudaMemoryTypeHost:
        return NotHereError(name_, "the host's memory (pinned)");
      default:
        return NotHereError(name_, "the host's memory");
    }
  }

  absl::Status CheckIsOurs(Stream stream) const override {
    const int device = context_.DeviceOf(stream);
    if (device == device_) return absl::OkStatus();
    return NotOursError(name_, absl::StrCat("one of GPU ", device));
  }

  absl::StatusOr<Owned<uint8_t>> Allocate(size_t bytes) override {
    if (bytes == 0) return Owned<uint8_t>();
    void* memory = nullptr;
    size_t free = 0, total = 0;
    bool is_full = false;
    const absl::Status status = Call([&] {
      const cudaError_t error = cudaMalloc(&memory, bytes);
      is_full = error == cudaErrorMemoryAllocation;
      if (is_full) cudaMemGetInfo(&free, &total);
      return error;
    });
    if (is_full) return NoRoomError(name_, bytes, free, total);
    if (!status.ok()) return status;
    return MadeHere(static_cast<uint8_t*>(memory), [](uint8_t* m) { return cudaFree(m); });
  }

  absl::StatusOr<Owned<uint8_t>> AllocatePinned(size_t bytes) override {
    if (bytes == 0) return Owned<uint8_t>();
    void* memory = nullptr;
    std::string refusal;
    const absl::Status status =
        CallSystem(refusal, [&] { return cudaHostAlloc(&memory, bytes, cudaHostAllocPortable); });
    if (!refusal.empty()) return NotPinnedError(name_, bytes, refusal);
    if (!status.ok()) return status;
    return MadeHere(static_cast<uint8_t*>(memory), [](uint8_t* m) { return cudaFreeHost(m); });
  }

  absl::StatusOr<Owned<uint8_t>> Pin(void* memory, size_t bytes) override {
    std::string refusal;
    const absl::Status status = CallSystem(
        refusal, [&] { return cudaHostRegister(memory, bytes, cudaHostRegisterPortable); });
    if (!refusal.empty()) return NotPinnedError(name_, bytes, refusal);
    if (!status.ok()) return status;
    return MadeHere(static_cast<uint8_t*>(memory),
                    [](uint8_t* m) { return cudaHostUnregister(m); });
  }

  absl::StatusOr<ExportedMemory> AllocateExported(size_t bytes) override {
    // What shares a page of the GPU with it would be shared too, and CUDA cuts small pieces from
    // one.
    constexpr size_t kPage = size_t{2} << 20;
    absl::StatusOr<Owned<uint8_t>> memory = Allocate((bytes + kPage - 1) / kPage * kPage);
    if (!memory.ok()) return memory.status();
    Exported exported = {.process = ThisProcess(), .memory = memory->get()};
    const absl::Status status =
        Share([&] { return cudaIpcGetMemHandle(&exported.handle, exported.memory); });
    if (!status.ok()) return status;
    return ExportedMemory{*std::move(memory),
                          {reinterpret_cast<const char*>(&exported), sizeof exported}};
  }

  absl::StatusOr<Owned<uint8_t>> Import(absl::string_view handle) override {
    Exported exported;
    if (handle.size() != sizeof exported) return NotExportedError();
    std::memcpy(&exported, handle.data(), sizeof exported);
    if (exported.process == ThisProcess()) {
      // CUDA opens nothing in the process that has it.
      return Owned<uint8_t>(exported.memory, [](uint8_t*) {});
    }
    void* memory = nullptr;
    const absl::Status status = Share([&] {
      return cudaIpcOpenMemHandle(&memory, exported.handle, cudaIpcMemLazyEnablePeerAccess);
    });
    if (!status.ok()) return status;
    return MadeHere(static_cast<uint8_t*>(memory),
                    [](uint8_t* m) { return cudaIpcCloseMemHandle(m); });
  }

  absl::StatusOr<Owned<CUstream_st>> NewStream() override {
    Stream stream = nullptr;
    const absl::Status status =
        Call([&] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); });
    if (!status.ok()) return status;
    return MadeHere(stream, [](Stream s) { return cudaStreamDestroy(s); });
  }

  absl::StatusOr<Owned<CUevent_st>> NewEvent() override {
    Event event = nullptr;
    const absl::Status status = Call([&] {
      return cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);
    });
    if (!status.ok()) return status;
    return MadeHere(event, [](Event e) { return cudaEventDestroy(e); });
  }

  absl::Status Record(Event event, Stream stream) override {
    return Call([&] { return cudaEventRecord(event, stream); });
  }
  absl::Status Wait(Stream stream, Event event) override {
    return Call([&] { return cudaStreamWaitEvent(stream, event, 0); });
  }
  absl::Status Await(Event event) override {
    return Call([&] { return cudaEventSynchronize(event); });
  }
  absl::StatusOr<bool> HasHappened(Event event) override {
    bool has_happened = true;
    const absl::Status status = Call([&] {
      const cudaError_t error = cudaEventQuery(event);
      has_happened = error != cudaErrorNotReady;
      // It is no error, but cudaGetLastError would tell PyTorch of it.
      return has_happened ? error : (static_cast<void>(cudaGetLastError()), cudaSuccess);
    });
    if (!status.ok()) return status;
    return has_happened;
  }

  absl::Status CopyIn(void* to, const void* pinned, size_t bytes, Stream stream) override {
    return Call([&] { return cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, stream); });
  }
  absl::Status CopyOut(void* pinned, const void* from, size_t bytes, Stream stream) override {
    return Call(
        [&] { return cudaMemcpyAsync(pinned, from, bytes, cudaMemcpyDeviceToHost, stream); });
  }
  absl::Status Copy(void* to, const void* from, size_t bytes, Stream stream) override {
    return Call([&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream); });
  }
  absl::Status SetToZero(void* memory, size_t bytes, Stream stream) override {
    return Call([&] { return cudaMemsetAsync(memory, 0, bytes, stream); });
  }
  absl::Status Read(void* to, const void* from, size_t bytes, Stream stream) override {
    return Finish(CopyOut(to, from, bytes, stream), stream);
  }
  absl::Status Write(void* to, const void* from, size_t bytes, Stream stream) override {
    return Finish(CopyIn(to, from, bytes, stream), stream);
  }

  absl::Status CompressOneBit(const BlockRule& rule, const CompressSegment* segments,
                              uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                              Stream stream) override {
    return Launch([&] {
      return cuda::CompressOneBit(rule, segments, count, blocks, first_not_packed, stream);
    });
  }
  absl::Status CompressDense(const BlockRule& rule, const DenseSegment* segments, uint32_t count,
                             uint32_t blocks, uint32_t* first_not_packed, Stream stream) override {
    return Launch([&] {
      return cuda::CompressDense(rule, segments, count, blocks, first_not_packed, stream);
    });
  }
  absl::Status CompressQuantized(const BlockRule& rule, const QuantizeSegment* segments,
                                 uint32_t count, uint32_t blocks, uint32_t* first_not_packed,
                                 Stream stream) override {
    return Launch([&] {
      return cuda::CompressQuantized(rule, segments, count, blocks, first_not_packed, stream);
    });
  }
  absl::Status MomentumInput(const BlockRule& rule, const MomentumInputSegment* segments,
                             uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::MomentumInput(rule, segments, count, blocks, stream); });
  }
  absl::Status ApplyMomentum(const BlockRule& rule, const ApplySegment* segments, uint32_t count,
                             uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::ApplyMomentum(rule, segments, count, blocks, stream); });
  }
  absl::Status ApplyDenseMomentum(const BlockRule& rule, const ApplyDenseSegment* segments,
                                  uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::ApplyDenseMomentum(rule, segments, count, blocks, stream); });
  }
  absl::Status DecompressOneBit(const BlockRule& rule, const DecompressSegment* segments,
                                uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::DecompressOneBit(rule, segments, count, blocks, stream); });
  }
  absl::Status DecompressQuantized(const BlockRule& rule, const DequantizeSegment* segments,
                                   uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::DecompressQuantized(rule, segments, count, blocks, stream); });
  }
  absl::Status DecompressDense(const BlockRule& rule, const DecompressDenseSegment* segments,
                               uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::DecompressDense(rule, segments, count, blocks, stream); });
  }
  absl::Status AggregateDense(const BlockRule& rule, const AggregateDenseSegment* segments,
                              uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::AggregateDense(rule, segments, count, blocks, stream); });
  }
  absl::Status AddOneBit(const BlockRule& rule, const AddSegment* segments, uint32_t count,
                         uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::AddOneBit(rule, segments, count, blocks, stream); });
  }
  absl::Status AddQuantized(const BlockRule& rule, const AddQuantizedSegment* segments,
                            uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::AddQuantized(rule, segments, count, blocks, stream); });
  }
  absl::Status AddDense(const BlockRule& rule, const AddDenseSegment* segments, uint32_t count,
                        uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::AddDense(rule, segments, count, blocks, stream); });
  }
  absl::Status Scale(const BlockRule& rule, const ScaleSegment* segments, uint32_t count,
                     uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::Scale(rule, segments, count, blocks, stream); });
  }
  absl::Status AdamStep(const BlockRule& rule, const AdamSegment<AdamRates>* segments,
                        uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::AdamStep(rule, segments, count, blocks, stream); });
  }
  absl::Status Freeze(const BlockRule& rule, const AdamSegment<FreezeRates>* segments,
                      uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::Freeze(rule, segments, count, blocks, stream); });
  }
  absl::Status RefreshStep(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                           uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::RefreshStep(rule, segments, count, blocks, stream); });
  }
  absl::Status Thaw(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                    uint32_t count, uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::Thaw(rule, segments, count, blocks, stream); });
  }
  absl::Status UpdateMoments(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                             uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::UpdateMoments(rule, segments, count, blocks, stream); });
  }
  absl::Status LambStep(const BlockRule& rule, const LambSegment* segments, uint32_t count,
                        uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::LambStep(rule, segments, count, blocks, stream); });
  }
  absl::Status FloorVariance(const BlockRule& rule, const FloorSegment* segments, uint32_t count,
                             uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::FloorVariance(rule, segments, count, blocks, stream); });
  }
  absl::Status FollowMomentum(const BlockRule& rule, const FollowSegment* segments, uint32_t count,
                              uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::FollowMomentum(rule, segments, count, blocks, stream); });
  }
  absl::Status AdaptiveStep(const BlockRule& rule, const AdaptiveSegment* segments, uint32_t count,
                            uint32_t blocks, Stream stream) override {
    return Launch([&] { return cuda::AdaptiveStep(rule, segments, count, blocks, stream); });
  }
  absl::Status LocalStep(const BlockRule& rule, const LocalSegment* segments, uint32_t count,
                         uint32_t blocks, uint32_t* first_left_alone, Stream stream) override {
    return Launch([&] {
      return cuda::LocalStep(rule, segments, count, blocks, first_left_alone, stream);
    });
  }
  absl::Status Sum(const float* values, size_t n, double* workspace, double* sum,
                   Stream stream) override {
    return Launch([&] { return cuda::Sum(values, n, workspace, sum, stream); });
  }
  absl::Status SumOfSquares(const float* values, size_t n, double* workspace, double* sum,
                            Stream stream) override {
    return Launch([&] { return cuda::SumOfSquares(values, n, workspace, sum, stream); });
  }

 private:
  absl::Status Named(const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat(name_, ": ", status.message()));
  }

  // What launch() puts on a stream of this GPU.
  template <class Launched>
  absl::Status Launch(Launched launch) const {
    return Named(context_.With(launch));
  }

  // What call() tells CUDA to do.
  template <class Function>
  absl::Status Call(Function call) const {
    return Launch([&] { return StatusOf(call()); });
  }

  // Of what pins memory: `refusal` says why the system does not let it, when it is that and not what
  // has gone wrong before.
  template <class Function>
  absl::Status CallSystem(std::string& refusal, Function pin) const {
    return Call([&] {
      const cudaError_t error = pin();
      switch (error) {
        case cudaErrorInvalidValue:
        case cudaErrorMemoryAllocation:
        case cudaErrorNotPermitted:
        case cudaErrorNotSupported:
        case cudaErrorOperatingSystem:
          refusal = cudaGetErrorString(error);
          break;
        default:
          break;
      }
      return error;
    });
  }

  template <class Function>
  absl::Status Share(Function share) const {
    std::string refusal;
    const absl::Status status = Call([&] {
      const cudaError_t error = share();
      if (IsAboutSharing(error)) refusal = cudaGetErrorString(error);
      return error;
    });
    return refusal.empty() ? status : NotSharedError(name_, refusal);
  }

  absl::Status Finish(absl::Status copied, Stream stream) const {
    if (!copied.ok()) return copied;
    return Call([&] { return cudaStreamSynchronize(stream); });
  }

  // Given back by give_back(made). That it fails tells only what an earlier error has said.
  template <class T, class GiveBack>
  Owned<T> MadeHere(T* made, GiveBack give_back) {
    return Owned<T>(
        made, [this, give_back](T* it) { Call([&] { return give_back(it); }).IgnoreError(); });
  }

  const int device_;
  std::string name_;
  Context context_;
};

}  // namespace

// Weak, because tests have others (open_simulated_gpu.cc).
__attribute__((weak)) bool CanOpenGpus() { return true; }

__attribute__((weak)) absl::StatusOr<std::unique_ptr<Gpu>> OpenGpu(int device,
                                                                   absl::string_view whose) {
  if (absl::Status status = CheckDevice(device); !status.ok()) return status;
  auto gpu = std::make_unique<CudaGpu>(device);
  if (absl::Status status = gpu->Open(whose); !status.ok()) return status;
  return gpu;
}

}  // namespace signpost::kernels::cuda
