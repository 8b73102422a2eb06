#include "trace/recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "trace/recording.h"

namespace signpost::trace {
namespace {

// A process has one of them, whatever is started twice.
absl::Mutex& StartMutex() {
  static absl::Mutex& mutex = *new absl::Mutex;
  return mutex;
}

template <size_t kBytes>
void Copy(absl::string_view text, char (&to)[kBytes]) {
  std::memcpy(to, text.data(), std::min(text.size(), kBytes - 1));
}

std::string HostName() {
  char name[kTextBytes] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// Containers of a host share its steady clock, unless they have a time namespace of their own.
std::string ClockName() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[64] = {};
  const ssize_t bytes = readlink("/proc/self/ns/time", name, sizeof name - 1);
  return absl::StrCat(boot, " ", absl::string_view(name, std::max<ssize_t>(bytes, 0)));
}

absl::Status ErrorOf(int error, absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrCat("trace file ", path, ": ", what));
}

template <typename Number>
void Store(Number& to, Number number, std::memory_order order = std::memory_order_relaxed) {
  std::atomic_ref<Number>(to).store(number, order);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Recorder>> Recorder::Create(const std::string& path,
                                                           absl::string_view process,
                                                           uint32_t events) {
  const uint64_t bytes = RecordingBytes(events);
  // Who merges while it is made, or after the process has died meanwhile, does not find it.
  const std::string temporary = absl::StrCat(path, ".tmp");
  const int fd = open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return ErrorOf(errno, "it cannot be created", path);
  if (access(path.c_str(), F_OK) == 0) {
    close(fd);
    unlink(temporary.c_str());
    return ErrorOf(EEXIST, "it cannot be created", path);
  }
  if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes)); error != 0) {
    close(fd);
    unlink(temporary.c_str());
    return ErrorOf(error, absl::StrCat("there is no room for its ", bytes, " bytes"), path);
  }
  // Populated: no step pays for a page's first event.
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  const int error = errno;
  close(fd);
  if (memory == MAP_FAILED) {
    unlink(temporary.c_str());
    return ErrorOf(error, "it cannot be mapped", path);
  }
  auto* const header = static_cast<RecordingHeader*>(memory);
  header->events = events;
  header->labels = 1;
  header->wall_offset = absl::ToUnixNanos(absl::Now()) - Now();
  header->pid = static_cast<uint64_t>(getpid());
  Copy(process, header->process);
  Copy(HostName(), header->host);
  Copy(ClockName(), header->clock);
  std::memcpy(header->magic, kRecordingMagic, sizeof kRecordingMagic);
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    munmap(memory, bytes);
    unlink(temporary.c_str());
    return ErrorOf(error, "it cannot be given its name", path);
  }
  return std::unique_ptr<Recorder>(new Recorder(header, bytes, events));
}

Recorder::Recorder(RecordingHeader* header, uint64_t bytes, uint32_t events)
    : header_(header), bytes_(bytes), events_(events) {}

Recorder::~Recorder() { munmap(header_, bytes_); }

// Two threads have the same slot only when one sleeps while the others go once around the ring. The
// event is then lost or, at worst, made of two.
void Recorder::Record(const Event& event) {
  const uint64_t ticket =
      std::atomic_ref<uint64_t>(header_->tickets).fetch_add(1, std::memory_order_relaxed);
  RecordingSlot& slot = reinterpret_cast<RecordingSlot*>(header_ + 1)[ticket % events_];
  // What follows is not written before it.
  std::atomic_ref<uint64_t>(slot.number).exchange(0, std::memory_order_acquire);
  Store(slot.begin, event.begin);
  Store(slot.end, event.end);
  Store(slot.epoch, event.epoch);
  Store(slot.step, event.step);
  Store(slot.chunk_and_rank, uint64_t{event.chunk} << 32 | event.rank);
  Store(slot.bytes, event.bytes);
  Store(slot.kind_and_labels, uint64_t{static_cast<uint8_t>(event.kind)} |
                                  uint64_t{event.job} << 16 | uint64_t{event.codec} << 32);
  Store(slot.number, ticket + 1, std::memory_order_release);
}

uint16_t Recorder::LabelOf(absl::string_view text) {
  if (text.empty()) return 0;
  absl::MutexLock lock(&mutex_);
  const auto found = labels_.find(text);
  if (found != labels_.end()) return found->second;
  const uint32_t label = header_->labels;
  if (label == kMostLabels) {
    Store(header_->refused_labels, header_->refused_labels + 1);
    return 0;
  }
  Copy(text, header_->label[label]);
  Store(header_->labels, label + 1, std::memory_order_release);
  labels_[text] = static_cast<uint16_t>(label);
  return static_cast<uint16_t>(label);
}

absl::Status Start(const std::string& directory, absl::string_view process) {
  absl::MutexLock lock(&StartMutex());
  if (IsOn()) return absl::OkStatus();
  if (mkdir(directory.c_str(), 0755) != 0 && errno != EEXIST) {
    return ErrorOf(errno, "its directory cannot be made", directory);
  }
  // Process numbers repeat: in containers, and when a process is started again.
  const std::string path = absl::StrCat(
      directory, "/", absl::StrReplaceAll(process, {{" ", "-"}, {"/", "-of-"}}), "-", HostName(),
      "-", absl::ToUnixMicros(absl::Now()), "-", getpid(), kRecordingSuffix);
  absl::StatusOr<std::unique_ptr<Recorder>> recorder = Recorder::Create(path, process);
  if (!recorder.ok()) return recorder.status();
  // For ever: threads may record until the process ends.
  trace_internal::recorder.store(recorder->release(), std::memory_order_release);
  return absl::OkStatus();
}

void Record(const Event& event) {
  Recorder* const recorder = trace_internal::recorder.load(std::memory_order_acquire);
  if (recorder != nullptr) recorder->Record(event);
}

uint16_t LabelOf(absl::string_view text) {
  Recorder* const recorder = trace_internal::recorder.load(std::memory_order_acquire);
  return recorder == nullptr ? 0 : recorder->LabelOf(text);
}

}  // namespace signpost::trace
