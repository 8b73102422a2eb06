#include "kernels/simulated_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <iterator>
#include <new>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/attributes.h"
#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "kernels/adam_cuda-inl.h"
#include "kernels/dense_cuda-inl.h"
#include "kernels/gpu_messages.h"
#include "kernels/lamb_cuda-inl.h"
#include "kernels/momentum_cuda-inl.h"
#include "kernels/onebit_cuda-inl.h"
#include "kernels/quantized_cuda-inl.h"
#include "kernels/sum_cuda-inl.h"
#include "kernels/thread_block_cuda-inl.h"
#include "kernels/zero_one_cuda-inl.h"

namespace signpost::kernels::cuda {
namespace {

// Those that are there.
ABSL_CONST_INIT absl::Mutex gpus_mutex(absl::kConstInit);
std::set<SimulatedGpu*> gpus ABSL_GUARDED_BY(gpus_mutex);

// Of which some may be null.
using Arrays = std::vector<const void*>;

// A point on a stream, which the stream notifies when it comes there. Shared by who waits for it
// and the stream, of which each may be the last to look at it.
using Point = std::shared_ptr<absl::Notification>;

constexpr size_t kAlignment = 256;
constexpr uint8_t kFresh = 0xff;  // what fresh memory is full of: NaN in all types

// Where memory begins that GPUs of this process have imported.
class Imports {
 public:
  static Imports& OfThisProcess() {
    static auto* const imports = new Imports;
    return *imports;
  }

  void Add(uintptr_t address) {
    const absl::MutexLock lock(&mutex_);
    addresses_.insert(address);
  }
  void Remove(uintptr_t address) {
    const absl::MutexLock lock(&mutex_);
    addresses_.erase(addresses_.find(address));
  }
  bool Has(uintptr_t address) const {
    const absl::MutexLock lock(&mutex_);
    return addresses_.count(address) > 0;
  }

 private:
  mutable absl::Mutex mutex_;
  std::multiset<uintptr_t> addresses_ ABSL_GUARDED_BY(mutex_);
};

uintptr_t AddressOf(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

// Bytes by where they begin.
using Allocations = std::map<uintptr_t, size_t>;

// A handle of exported memory: a file of a process, which that one has mapped there.
struct Exported {
  pid_t process;
  int file;
  ino_t inode;  // tells it from whatever else has that number
  uint8_t* memory;
  size_t bytes;
};

uint8_t* Map(int file, size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ABSL_RAW_CHECK(memory != MAP_FAILED, "memory that is shared can be mapped");
  return static_cast<uint8_t*>(memory);
}

// Null if it cannot be found.
uint8_t* MapOfOtherProcess(const Exported& exported) {
  const std::string path = absl::StrCat("/proc/", exported.process, "/fd/", exported.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat found = {};
  const bool is_it = file >= 0 && fstat(file, &found) == 0 && found.st_ino == exported.inode;
  uint8_t* const memory = is_it ? Map(file, exported.bytes) : nullptr;
  if (file >= 0) close(file);
  return memory;
}

bool IsIn(const Allocations& allocations, const void* memory, size_t bytes) {
  auto after = allocations.upper_bound(AddressOf(memory));
  if (after == allocations.begin()) return false;
  const auto& [begin, length] = *std::prev(after);
  const size_t before = AddressOf(memory) - begin;
  return before < length && bytes <= length - before;
}

size_t BytesOf(const Allocations& allocations) {
  size_t bytes = 0;
  for (const auto& [begin, length] : allocations) bytes += length;
  return bytes;
}

// ThreadSanitizer, as .bazelrc has it, sees what is compiled here, but nothing of memcpy and
// memset.
absl::Status CopyBytes(void* to, const void* from, size_t bytes) {
  auto* const __restrict written = static_cast<uint8_t*>(to);
  const auto* const __restrict read = static_cast<const uint8_t*>(from);
  for (size_t i = 0; i < bytes; ++i) written[i] = read[i];
  return absl::OkStatus();
}
absl::Status Fill(void* memory, size_t bytes, uint8_t value) {
  auto* const written = static_cast<uint8_t*>(memory);
  for (size_t i = 0; i < bytes; ++i) written[i] = value;
  return absl::OkStatus();
}

template <class Rates>
Arrays ArraysOfStep(const AdamSegment<Rates>& s) {
  return {s.gradient, s.momentum, s.variance, s.parameters};
}

// Calls body(block, number) for each of so many thread blocks. In what order a GPU has them, and
// the threads in a phase, nobody knows: `order` chooses one.
template <class Body>
void OnThreadBlocks(uint32_t blocks, uint32_t order, Body body) {
  for (uint32_t i = 0; i < blocks; ++i) {
    const auto block = std::make_unique<HostBlock>(order);
    body(*block, (i + order) % blocks);
  }
}

}  // namespace

// A stream's work, and the thread that does it.
class SimulatedGpu::StreamThread {
 public:
  StreamThread(uint32_t seed, const std::atomic<bool>& is_held)
      : random_(seed), is_held_(is_held), thread_([this] { DoWork(); }) {}

  // Does what there is to do first.
  ~StreamThread() {
    {
      const absl::MutexLock lock(&mutex_);
      is_closed_ = true;
    }
    thread_.join();
  }

  void Put(std::function<void()> work) {
    const absl::MutexLock lock(&mutex_);
    work_.push_back(std::move(work));
  }

  Point PutPoint() {
    auto point = std::make_shared<absl::Notification>();
    Put([point] { point->Notify(); });
    return point;
  }

 private:
  void DoWork() {
    while (true) {
      std::function<void()> work;
      {
        const absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &StreamThread::IsAwake));
        if (work_.empty()) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      Delay();
      work();
    }
  }

  bool IsAwake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_closed_ || !work_.empty();
  }

  // Not to wait for anything, but so that others overtake.
  void Delay() {
    const uint32_t kind = random_() % 32;
    if (kind == 0) std::this_thread::sleep_for(std::chrono::microseconds(50 + random_() % 250));
    if (kind < 8) std::this_thread::yield();
    while (is_held_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::mt19937 random_;  // only the thread's
  const std::atomic<bool>& is_held_;
  std::thread thread_;
};

// What an Event points to. Guarded by the GPU's mutex.
struct SimulatedGpu::RecordedEvent {
  Point newest;  // or null before the first

  static RecordedEvent& Of(Event event) { return *reinterpret_cast<RecordedEvent*>(event); }
};

SimulatedGpu::SimulatedGpu(uint32_t seed) : memory_bytes_(size_t{16} << 30), random_(seed) {
  {
    const absl::MutexLock lock(&mutex_);
    streams_[nullptr] = std::make_unique<StreamThread>(random_(), is_held_);
  }
  const absl::MutexLock lock(&gpus_mutex);
  gpus.insert(this);
}

SimulatedGpu::~SimulatedGpu() {
  {
    const absl::MutexLock lock(&gpus_mutex);
    gpus.erase(this);
  }
  // Before any of them goes: one may wait for another.
  WaitForAllStreams();
}

SimulatedGpu::Counts SimulatedGpu::counts() const {
  const absl::MutexLock lock(&mutex_);
  Counts counts = counts_;
  counts.quads_in_pieces = quads_in_pieces;
  return counts;
}

uint64_t SimulatedGpu::BytesOutOn(Stream stream) const {
  const absl::MutexLock lock(&mutex_);
  const auto found = bytes_out_.find(stream);
  return found == bytes_out_.end() ? 0 : found->second;
}

void SimulatedGpu::LimitMemory(size_t bytes) {
  const absl::MutexLock lock(&mutex_);
  memory_bytes_ = bytes;
}

void SimulatedGpu::LimitPins(size_t bytes) {
  const absl::MutexLock lock(&mutex_);
  most_pins_ = bytes;
}

void SimulatedGpu::RefuseImports() {
  const absl::MutexLock lock(&mutex_);
  refuses_imports_ = true;
}

void SimulatedGpu::FailOperationAfter(uint64_t operations) {
  const absl::MutexLock lock(&mutex_);
  failing_operation_ = counts_.operations + operations;
}

void SimulatedGpu::Hold() { is_held_ = true; }

void SimulatedGpu::LetGoOn() { is_held_ = false; }

void SimulatedGpu::LetKernelsUseAllMemory() { can_kernels_use_all_memory_ = true; }

void SimulatedGpu::OwnAllMemory() {
  LetKernelsUseAllMemory();
  owns_all_memory_ = true;
}

void SimulatedGpu::AppendToName(absl::string_view whose) { absl::StrAppend(&whose_, whose); }

std::string SimulatedGpu::name() const { return "GPU 0 (simulated)" + whose_; }

absl::Status SimulatedGpu::CheckIsHere(const void* memory) const {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  if (owns_all_memory_) return absl::OkStatus();
  const absl::MutexLock lock(&mutex_);
  if (IsIn(device_memory_, memory, 1)) return absl::OkStatus();
  if (IsIn(pinned_memory_, memory, 1)) return NotHereError(name(), "the host's memory (pinned)");
  return NotHereError(name(), memory == nullptr ? "a null pointer" : "the host's memory");
}

absl::Status SimulatedGpu::CheckIsOurs(Stream stream) const {
  const absl::MutexLock lock(&mutex_);
  if (streams_.contains(stream)) return absl::OkStatus();
  return NotOursError(name(), "none of its");
}

absl::StatusOr<Owned<uint8_t>> SimulatedGpu::Allocate(size_t bytes) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  ++counts_.allocations;
  if (absl::Status status = CheckRoom(bytes); !status.ok()) return status;
  return Take(bytes, device_memory_);
}

absl::Status SimulatedGpu::CheckRoom(size_t bytes) const {
  const size_t free = memory_bytes_ - std::min(BytesOf(device_memory_), memory_bytes_);
  return bytes > free ? NoRoomError(name(), bytes, free, memory_bytes_) : absl::OkStatus();
}

absl::StatusOr<Owned<uint8_t>> SimulatedGpu::AllocatePinned(size_t bytes) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  ++counts_.pinned_allocations;
  return Take(bytes, pinned_memory_);
}

absl::StatusOr<Owned<uint8_t>> SimulatedGpu::Pin(void* memory, size_t bytes) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  ++counts_.pins;
  if (bytes > most_pins_ - std::min(BytesOf(pinned_memory_), most_pins_)) {
    return NotPinnedError(name(), bytes, "simulated");
  }
  pinned_memory_[AddressOf(memory)] = bytes;
  return Owned<uint8_t>(static_cast<uint8_t*>(memory), [this](uint8_t* pinned) {
    WaitForAllStreams();
    const absl::MutexLock lock(&mutex_);
    pinned_memory_.erase(AddressOf(pinned));
  });
}

absl::StatusOr<ExportedMemory> SimulatedGpu::AllocateExported(size_t bytes) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  ++counts_.allocations;
  if (absl::Status status = CheckRoom(bytes); !status.ok()) return status;
  const int file = memfd_create("simulated GPU", MFD_CLOEXEC);
  struct stat made = {};
  ABSL_RAW_CHECK(file >= 0 && ftruncate(file, bytes) == 0 && fstat(file, &made) == 0, "a file");
  uint8_t* const memory = Map(file, bytes);
  std::memset(memory, kFresh, bytes);
  device_memory_[AddressOf(memory)] = bytes;
  const Exported exported = {getpid(), file, made.st_ino, memory, bytes};
  return ExportedMemory{Owned<uint8_t>(memory,
                                       [this, file, bytes](uint8_t* given_back) {
                                         WaitForAllStreams();
                                         const absl::MutexLock lock(&mutex_);
                                         // On a GPU that is undefined. Only what this process
                                         // imports is seen.
                                         ABSL_RAW_CHECK(
                                             !Imports::OfThisProcess().Has(AddressOf(given_back)),
                                             "it is imported");
                                         device_memory_.erase(AddressOf(given_back));
                                         munmap(given_back, bytes);
                                         close(file);
                                       }),
                        {reinterpret_cast<const char*>(&exported), sizeof exported}};
}

absl::StatusOr<Owned<uint8_t>> SimulatedGpu::Import(absl::string_view handle) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  Exported exported;
  if (handle.size() != sizeof exported) return NotExportedError();
  std::memcpy(&exported, handle.data(), sizeof exported);
  const bool is_own = exported.process == getpid();
  const absl::MutexLock lock(&mutex_);
  if (refuses_imports_) return NotSharedError(name(), "simulated");
  uint8_t* const memory = is_own ? exported.memory : MapOfOtherProcess(exported);
  if (memory == nullptr) return NotSharedError(name(), "the other process cannot be seen");
  imported_memory_[AddressOf(memory)] = exported.bytes;
  ++imports_[AddressOf(memory)];
  Imports::OfThisProcess().Add(AddressOf(memory));
  return Owned<uint8_t>(memory, [this, is_own, bytes = exported.bytes](uint8_t* given_back) {
    WaitForAllStreams();
    const absl::MutexLock lock(&mutex_);
    if (--imports_[AddressOf(given_back)] == 0) imported_memory_.erase(AddressOf(given_back));
    Imports::OfThisProcess().Remove(AddressOf(given_back));
    if (!is_own) munmap(given_back, bytes);
  });
}

Owned<uint8_t> SimulatedGpu::Take(size_t bytes, Allocations& allocations) {
  if (bytes == 0) return nullptr;
  // As aligned as CUDA's, and no longer than asked for: AddressSanitizer sees what is behind it.
  auto* const memory = static_cast<uint8_t*>(::operator new (bytes, std::align_val_t{kAlignment}));
  std::memset(memory, kFresh, bytes);
  allocations[AddressOf(memory)] = bytes;
  return Owned<uint8_t>(memory, [this, &allocations](uint8_t* given_back) {
    WaitForAllStreams();
    const absl::MutexLock lock(&mutex_);
    allocations.erase(AddressOf(given_back));
    ::operator delete (given_back, std::align_val_t{kAlignment});
  });
}

void SimulatedGpu::FinishAll() {
  const absl::MutexLock lock(&gpus_mutex);
  for (SimulatedGpu* const gpu : gpus) gpu->WaitForAllStreams();
}

void SimulatedGpu::WaitForAllStreams() {
  std::vector<Point> points;
  {
    const absl::MutexLock lock(&mutex_);
    for (const auto& [stream, thread] : streams_) points.push_back(thread->PutPoint());
    for (const auto& thread : old_streams_) points.push_back(thread->PutPoint());
  }
  for (const Point& point : points) point->WaitForNotification();
}

absl::StatusOr<Owned<CUstream_st>> SimulatedGpu::NewStream() {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  ++counts_.streams;
  auto thread = std::make_unique<StreamThread>(random_(), is_held_);
  const auto stream = reinterpret_cast<Stream>(thread.get());
  streams_[stream] = std::move(thread);
  return Owned<CUstream_st>(stream, [this](Stream given_back) {
    const absl::MutexLock lock(&mutex_);
    old_streams_.push_back(std::move(streams_.extract(given_back).mapped()));
  });
}

absl::StatusOr<SimulatedGpu::StreamThread*> SimulatedGpu::ThreadOf(Stream stream) {
  const auto found = streams_.find(stream);
  if (found != streams_.end()) return found->second.get();
  return absl::UnavailableError(absl::StrCat(name(), ": there is no such stream"));
}

absl::StatusOr<Owned<CUevent_st>> SimulatedGpu::NewEvent() {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  ++counts_.events;
  return Owned<CUevent_st>(reinterpret_cast<Event>(new RecordedEvent),
                           [](Event event) { delete &RecordedEvent::Of(event); });
}

absl::Status SimulatedGpu::Record(Event event, Stream stream) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  const absl::StatusOr<StreamThread*> thread = ThreadOf(stream);
  if (!thread.ok()) return thread.status();
  RecordedEvent::Of(event).newest = (*thread)->PutPoint();
  return absl::OkStatus();
}

absl::Status SimulatedGpu::Wait(Stream stream, Event event) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  const absl::StatusOr<StreamThread*> thread = ThreadOf(stream);
  if (!thread.ok()) return thread.status();
  const Point newest = RecordedEvent::Of(event).newest;
  if (newest != nullptr) (*thread)->Put([newest] { newest->WaitForNotification(); });
  return absl::OkStatus();
}

absl::Status SimulatedGpu::Await(Event event) {
  Point newest;
  {
    const absl::MutexLock lock(&mutex_);
    newest = RecordedEvent::Of(event).newest;
  }
  if (newest != nullptr) newest->WaitForNotification();
  return Fault();
}

absl::StatusOr<bool> SimulatedGpu::HasHappened(Event event) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  const Point newest = RecordedEvent::Of(event).newest;
  return newest == nullptr || newest->HasBeenNotified();
}

absl::Status SimulatedGpu::CopyIn(void* to, const void* pinned, size_t bytes, Stream stream) {
  if (absl::Status status = CheckPinnedRange(pinned, bytes); !status.ok()) return status;
  return PutCopyIn(to, pinned, bytes, stream);
}

absl::Status SimulatedGpu::CopyOut(void* pinned, const void* from, size_t bytes, Stream stream) {
  if (absl::Status status = CheckPinnedRange(pinned, bytes); !status.ok()) return status;
  return PutCopyOut(pinned, from, bytes, stream);
}

absl::Status SimulatedGpu::Read(void* to, const void* from, size_t bytes, Stream stream) {
  if (absl::Status status = PutCopyOut(to, from, bytes, stream); !status.ok()) return status;
  return Finish(stream);
}

absl::Status SimulatedGpu::Write(void* to, const void* from, size_t bytes, Stream stream) {
  if (absl::Status status = PutCopyIn(to, from, bytes, stream); !status.ok()) return status;
  return Finish(stream);
}

absl::Status SimulatedGpu::PutCopyIn(void* to, const void* from, size_t bytes, Stream stream) {
  if (absl::Status status = CheckDeviceRange(to, bytes); !status.ok()) return status;
  const absl::Status status = Put(stream, [=] { return CopyBytes(to, from, bytes); });
  const absl::MutexLock lock(&mutex_);
  if (status.ok()) counts_.bytes_in += bytes;
  return status;
}

absl::Status SimulatedGpu::PutCopyOut(void* to, const void* from, size_t bytes, Stream stream) {
  if (absl::Status status = CheckDeviceRange(from, bytes); !status.ok()) return status;
  const absl::Status status = Put(stream, [=] { return CopyBytes(to, from, bytes); });
  const absl::MutexLock lock(&mutex_);
  if (status.ok()) {
    counts_.bytes_out += bytes;
    bytes_out_[stream] += bytes;
  }
  return status;
}

absl::Status SimulatedGpu::Copy(void* to, const void* from, size_t bytes, Stream stream) {
  if (absl::Status status = CheckDeviceRange(to, bytes); !status.ok()) return status;
  if (absl::Status status = CheckDeviceRange(from, bytes); !status.ok()) return status;
  return Put(stream, [=] { return CopyBytes(to, from, bytes); });
}

absl::Status SimulatedGpu::SetToZero(void* memory, size_t bytes, Stream stream) {
  if (absl::Status status = CheckDeviceRange(memory, bytes); !status.ok()) return status;
  return Put(stream, [=] { return Fill(memory, bytes, 0); });
}

bool SimulatedGpu::IsOnDevice(const void* memory, size_t bytes) const {
  return IsIn(device_memory_, memory, bytes) || IsIn(imported_memory_, memory, bytes);
}

absl::Status SimulatedGpu::CheckDeviceRange(const void* memory, size_t bytes) const {
  if (owns_all_memory_) return absl::OkStatus();
  const absl::MutexLock lock(&mutex_);
  if (bytes == 0 || IsOnDevice(memory, bytes)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(name(), ": invalid argument (", bytes,
                                             " bytes that are not all in memory of this GPU)"));
}

absl::Status SimulatedGpu::CheckPinnedRange(const void* memory, size_t bytes) const {
  const absl::MutexLock lock(&mutex_);
  if (bytes == 0 || IsIn(pinned_memory_, memory, bytes)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(name(), ": invalid argument (", bytes,
                                             " bytes that are not all in pinned memory)"));
}

bool SimulatedGpu::CanUse(const Arrays& arrays) const {
  if (can_kernels_use_all_memory_) return true;
  const absl::MutexLock lock(&mutex_);
  for (const void* array : arrays) {
    if (array == nullptr || IsOnDevice(array, 1)) continue;
    if (!IsIn(pinned_memory_, array, 1)) return false;
  }
  return true;
}

absl::Status SimulatedGpu::Fault() const {
  if (!has_fault_) return absl::OkStatus();
  const absl::MutexLock lock(&mutex_);
  return fault_;
}

void SimulatedGpu::SetFault(const absl::Status& fault) {
  const absl::MutexLock lock(&mutex_);
  fault_.Update(fault);
  has_fault_ = true;
}

absl::Status SimulatedGpu::IllegalAddress() const {
  return absl::UnavailableError(absl::StrCat(name(), ": an illegal memory access was encountered"));
}

absl::Status SimulatedGpu::Put(Stream stream, Operation operation) {
  if (absl::Status fault = Fault(); !fault.ok()) return fault;
  const absl::MutexLock lock(&mutex_);
  const absl::StatusOr<StreamThread*> thread = ThreadOf(stream);
  if (!thread.ok()) return thread.status();
  const bool fails = counts_.operations == failing_operation_;
  ++counts_.operations;
  (*thread)->Put([this, fails, operation = std::move(operation)] {
    if (has_fault_) return;
    const absl::Status status = fails ? IllegalAddress() : operation();
    if (!status.ok()) SetFault(status);
  });
  return absl::OkStatus();
}

absl::Status SimulatedGpu::Finish(Stream stream) {
  Point point;
  {
    const absl::MutexLock lock(&mutex_);
    const absl::StatusOr<StreamThread*> thread = ThreadOf(stream);
    if (!thread.ok()) return thread.status();
    point = (*thread)->PutPoint();
  }
  point->WaitForNotification();
  return Fault();
}

uint32_t SimulatedGpu::NewOrder() {
  const absl::MutexLock lock(&mutex_);
  return static_cast<uint32_t>(random_() % kThreads);
}

// Does body(block, segment, number) for each block, as LaunchOnBlocks has it done on a GPU;
// arrays_of(segment) is what of it is read or written.
template <class Segment, class ArraysOf, class Body>
absl::Status SimulatedGpu::OnBlocks(const Segment* segments, uint32_t count, uint32_t blocks,
                                    Stream stream, ArraysOf arrays_of, Body body) {
  if (blocks == 0) return Fault();
  return Put(stream, [=, this, order = NewOrder()] {
    if (!CanUse({segments})) return IllegalAddress();
    for (uint32_t s = 0; s < count; ++s) {
      if (!CanUse(arrays_of(segments[s]))) return IllegalAddress();
    }
    OnThreadBlocks(blocks, order, [&](HostBlock& block, uint32_t number) {
      body(block, SegmentOfBlock(segments, count, number), number);
    });
    return absl::OkStatus();
  });
}

absl::Status SimulatedGpu::CompressOneBit(const BlockRule& rule, const CompressSegment* segments,
                                          uint32_t count, uint32_t blocks,
                                          uint32_t* first_not_packed, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [=](const CompressSegment& s) {
        return Arrays{first_not_packed, s.gradient, s.dense_momentum, s.momentum.scales,
                      s.momentum.bits,  s.error,    s.out.scales,     s.out.bits};
      },
      [=](HostBlock& block, const CompressSegment& s, uint32_t number) {
        CompressBlock(block, rule, s, number, first_not_packed);
      });
}

absl::Status SimulatedGpu::CompressDense(const BlockRule& rule, const DenseSegment* segments,
                                         uint32_t count, uint32_t blocks,
                                         uint32_t* first_not_packed, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [=](const DenseSegment& s) {
        return Arrays{first_not_packed, s.gradient, s.error, s.out};
      },
      [=](HostBlock& block, const DenseSegment& s, uint32_t number) {
        CompressDenseBlock(block, rule, s, number, first_not_packed);
      });
}

absl::Status SimulatedGpu::CompressQuantized(const BlockRule& rule, const QuantizeSegment* segments,
                                             uint32_t count, uint32_t blocks,
                                             uint32_t* first_not_packed, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [=](const QuantizeSegment& s) {
        return Arrays{first_not_packed, s.gradient, s.error, s.out.scales, s.out.codes};
      },
      [=](HostBlock& block, const QuantizeSegment& s, uint32_t number) {
        QuantizeBlock(block, rule, s, number, first_not_packed);
      });
}

absl::Status SimulatedGpu::MomentumInput(const BlockRule& rule,
                                         const MomentumInputSegment* segments, uint32_t count,
                                         uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const MomentumInputSegment& s) {
        return Arrays{s.gradient, s.momentum, s.input};
      },
      [=](HostBlock& block, const MomentumInputSegment& s, uint32_t number) {
        MomentumInputBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::ApplyMomentum(const BlockRule& rule, const ApplySegment* segments,
                                         uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const ApplySegment& s) {
        return Arrays{s.momentum.scales, s.momentum.bits, s.inverse_denominator, s.parameters};
      },
      [=](HostBlock& block, const ApplySegment& s, uint32_t number) {
        ApplyBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::ApplyDenseMomentum(const BlockRule& rule,
                                              const ApplyDenseSegment* segments, uint32_t count,
                                              uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const ApplyDenseSegment& s) {
        return Arrays{s.momentum, s.inverse_denominator, s.parameters};
      },
      [=](HostBlock& block, const ApplyDenseSegment& s, uint32_t number) {
        ApplyDenseBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::DecompressOneBit(const BlockRule& rule,
                                            const DecompressSegment* segments, uint32_t count,
                                            uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const DecompressSegment& s) {
        return Arrays{s.compressed.scales, s.compressed.bits, s.values};
      },
      [=](HostBlock& block, const DecompressSegment& s, uint32_t number) {
        DecompressBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::DecompressQuantized(const BlockRule& rule,
                                               const DequantizeSegment* segments, uint32_t count,
                                               uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const DequantizeSegment& s) {
        return Arrays{s.compressed.scales, s.compressed.codes, s.values};
      },
      [=](HostBlock& block, const DequantizeSegment& s, uint32_t number) {
        DequantizeBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::DecompressDense(const BlockRule& rule,
                                           const DecompressDenseSegment* segments, uint32_t count,
                                           uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const DecompressDenseSegment& s) {
        return Arrays{s.compressed, s.values};
      },
      [=](HostBlock& block, const DecompressDenseSegment& s, uint32_t number) {
        DecompressDenseBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::AggregateDense(const BlockRule& rule,
                                          const AggregateDenseSegment* segments, uint32_t count,
                                          uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const AggregateDenseSegment& s) {
        Arrays arrays(s.contributions, s.contributions + s.ranks);
        arrays.insert(arrays.end(), {s.contributions, s.out});
        return arrays;
      },
      [=](HostBlock& block, const AggregateDenseSegment& s, uint32_t number) {
        AggregateDenseBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::AddOneBit(const BlockRule& rule, const AddSegment* segments,
                                     uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const AddSegment& s) {
        return Arrays{s.addend.scales, s.addend.bits, s.accumulator};
      },
      [=](HostBlock& block, const AddSegment& s, uint32_t number) {
        AddBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::AddQuantized(const BlockRule& rule, const AddQuantizedSegment* segments,
                                        uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const AddQuantizedSegment& s) {
        return Arrays{s.addend.scales, s.addend.codes, s.accumulator};
      },
      [=](HostBlock& block, const AddQuantizedSegment& s, uint32_t number) {
        AddQuantizedBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::AddDense(const BlockRule& rule, const AddDenseSegment* segments,
                                    uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const AddDenseSegment& s) {
        return Arrays{s.addend, s.accumulator};
      },
      [=](HostBlock& block, const AddDenseSegment& s, uint32_t number) {
        AddDenseBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::Scale(const BlockRule& rule, const ScaleSegment* segments,
                                 uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream, [](const ScaleSegment& s) { return Arrays{s.values}; },
      [=](HostBlock& block, const ScaleSegment& s, uint32_t number) {
        ScaleBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::AdamStep(const BlockRule& rule, const AdamSegment<AdamRates>* segments,
                                    uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(segments, count, blocks, stream, ArraysOfStep<AdamRates>,
                  [=](HostBlock& block, const AdamSegment<AdamRates>& s, uint32_t number) {
                    AdamBlock(block, rule, s, number);
                  });
}

absl::Status SimulatedGpu::Freeze(const BlockRule& rule, const AdamSegment<FreezeRates>* segments,
                                  uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const AdamSegment<FreezeRates>& s) {
        return Arrays{s.momentum, s.variance};
      },
      [=](HostBlock& block, const AdamSegment<FreezeRates>& s, uint32_t number) {
        FreezeBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::RefreshStep(const BlockRule& rule,
                                       const AdamSegment<RefreshRates>* segments, uint32_t count,
                                       uint32_t blocks, Stream stream) {
  return OnBlocks(segments, count, blocks, stream, ArraysOfStep<RefreshRates>,
                  [=](HostBlock& block, const AdamSegment<RefreshRates>& s, uint32_t number) {
                    RefreshBlock(block, rule, s, number);
                  });
}

absl::Status SimulatedGpu::Thaw(const BlockRule& rule, const AdamSegment<RefreshRates>* segments,
                                uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const AdamSegment<RefreshRates>& s) { return Arrays{s.variance}; },
      [=](HostBlock& block, const AdamSegment<RefreshRates>& s, uint32_t number) {
        ThawBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::UpdateMoments(const BlockRule& rule, const LambSegment* segments,
                                         uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const LambSegment& s) {
        return Arrays{s.gradient, s.momentum, s.variance, s.parameters, s.sums};
      },
      [=](HostBlock& block, const LambSegment& s, uint32_t number) {
        UpdateMomentsBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::LambStep(const BlockRule& rule, const LambSegment* segments,
                                    uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const LambSegment& s) {
        return Arrays{s.momentum, s.variance, s.parameters};
      },
      [=](HostBlock& block, const LambSegment& s, uint32_t number) {
        LambStepBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::FloorVariance(const BlockRule& rule, const FloorSegment* segments,
                                         uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const FloorSegment& s) {
        return Arrays{s.variance, s.fresh_variance};
      },
      [=](HostBlock& block, const FloorSegment& s, uint32_t number) {
        FloorBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::FollowMomentum(const BlockRule& rule, const FollowSegment* segments,
                                          uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const FollowSegment& s) {
        return Arrays{s.momentum.scales,        s.momentum.bits,        s.dense_momentum_before,
                      s.momentum_before.scales, s.momentum_before.bits, s.inverse_denominator,
                      s.fresh_variance,         s.parameters,           s.sums};
      },
      [=](HostBlock& block, const FollowSegment& s, uint32_t number) {
        FollowBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::AdaptiveStep(const BlockRule& rule, const AdaptiveSegment* segments,
                                        uint32_t count, uint32_t blocks, Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [](const AdaptiveSegment& s) {
        return Arrays{s.gradient, s.momentum, s.variance, s.parameters};
      },
      [=](HostBlock& block, const AdaptiveSegment& s, uint32_t number) {
        AdaptiveBlock(block, rule, s, number);
      });
}

absl::Status SimulatedGpu::LocalStep(const BlockRule& rule, const LocalSegment* segments,
                                     uint32_t count, uint32_t blocks, uint32_t* first_left_alone,
                                     Stream stream) {
  return OnBlocks(
      segments, count, blocks, stream,
      [=](const LocalSegment& s) {
        return Arrays{first_left_alone,      s.gradient,  s.momentum, s.accumulated,
                      s.inverse_denominator, s.parameters};
      },
      [=](HostBlock& block, const LocalSegment& s, uint32_t number) {
        LocalBlock(block, rule, s, number, first_left_alone);
      });
}

template <class Term>
absl::Status SimulatedGpu::SumOf(Term, const float* values, size_t n, double* workspace,
                                 double* sum, Stream stream) {
  return Put(stream, [=, this, order = NewOrder()] {
    if (!CanUse({values, workspace, sum})) return IllegalAddress();
    SumInRuns<Term::value>(
        values, n, workspace, sum,
        [=](auto term, size_t runs, const auto* terms, size_t count, double* sums) {
          OnThreadBlocks(static_cast<uint32_t>(runs), order,
                         [&](HostBlock& block, uint32_t number) {
                           SumBlock<term>(block, terms, count, number, sums);
                         });
        });
    return absl::OkStatus();
  });
}

absl::Status SimulatedGpu::Sum(const float* values, size_t n, double* workspace, double* sum,
                               Stream stream) {
  return SumOf(TermConstant<Term::kItself>(), values, n, workspace, sum, stream);
}

absl::Status SimulatedGpu::SumOfSquares(const float* values, size_t n, double* workspace,
                                        double* sum, Stream stream) {
  return SumOf(TermConstant<Term::kSquare>(), values, n, workspace, sum, stream);
}

}  // namespace signpost::kernels::cuda
