#include "proto/payload_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "absl/base/config.h"

namespace signpost {
namespace {

// Sizes are few, so that chunks of nearly the same size share memory.
constexpr size_t kUnit = size_t{64} << 10;
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kMostBytes = size_t{1} << 46;

// Unmapping takes time, and whoever gives has no time for all of it.
constexpr int kMostUnmappedAtOnce = 4;

size_t Whole(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

#ifdef ABSL_HAVE_ADDRESS_SANITIZER

// Nothing is kept: whoever uses it afterwards, or beyond its end, is to be found.
constexpr bool kKeeps = false;

void* Map(size_t bytes) {
  void* memory = nullptr;
  const size_t alignment = bytes < kLargePage ? size_t{4096} : kLargePage;
  if (posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
  return memory;
}

void Unmap(void* memory, size_t) { std::free(memory); }

#else

constexpr bool kKeeps = true;

void* MapAnywhere(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                            /*fd=*/-1, /*offset=*/0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void Unmap(void* memory, size_t bytes) { munmap(memory, bytes); }

void* Map(size_t bytes) {
  if (bytes < kLargePage) return MapAnywhere(bytes);
  // The system looks up each page of what is written: large ones are fewer.
  char* const all = static_cast<char*>(MapAnywhere(bytes + kLargePage));
  const size_t before = (kLargePage - reinterpret_cast<uintptr_t>(all) % kLargePage) % kLargePage;
  if (before > 0) Unmap(all, before);
  if (before < kLargePage) Unmap(all + before + bytes, kLargePage - before);
  madvise(all + before, bytes, MADV_HUGEPAGE);  // where the system has them
  return all + before;
}

#endif

}  // namespace

PayloadPool& PayloadPool::Global() {
  static PayloadPool& pool = *new PayloadPool;
  return pool;
}

uint64_t PayloadPool::Footprint(size_t bytes) { return bytes < kLeastBytes ? bytes : Whole(bytes); }

PayloadPool::~PayloadPool() {
  absl::MutexLock lock(&mutex_);
  for (auto& [bytes, size] : sizes_) {
    while (size.idle != nullptr) Retire(std::exchange(size.idle, size.idle->next));
  }
  while (retired_ != nullptr) {
    Idle* const piece = std::exchange(retired_, retired_->next);
    Unmap(piece, piece->bytes);
  }
}

void* PayloadPool::Take(size_t bytes) {
  if (bytes >= kMostBytes) throw std::bad_alloc();
  const size_t whole = Whole(bytes);
  {
    absl::MutexLock lock(&mutex_);
    ++calls_;
    used_bytes_ += whole;
    most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
    Size& size = sizes_[whole];  // so that Give finds it
    size.was_taken = true;
    if (size.idle != nullptr) {
      idle_bytes_ -= whole;
      return std::exchange(size.idle, size.idle->next);
    }
    mapped_bytes_ += whole;
    if (used_bytes_ + idle_bytes_ > most_bytes_) {
      RetireIdle(most_bytes_ - std::min(most_bytes_, used_bytes_));
    }
  }
  try {
    return Map(whole);
  } catch (const std::bad_alloc&) {
    absl::MutexLock lock(&mutex_);
    used_bytes_ -= whole;
    mapped_bytes_ -= whole;
    throw;
  }
}

void PayloadPool::Give(void* memory, size_t bytes) {
  const size_t whole = Whole(bytes);
  Idle* retired[kMostUnmappedAtOnce] = {};
  {
    absl::MutexLock lock(&mutex_);
    used_bytes_ -= whole;
    Idle* const idle = new (memory) Idle{nullptr, whole};
    const auto size = sizes_.find(whole);
    // Sizes have their peaks at different times.
    const uint64_t most = 2 * std::max(most_used_bytes_, most_used_before_);
    if (kKeeps && size != sizes_.end() && idle_bytes_ + whole <= most &&
        used_bytes_ + idle_bytes_ + whole <= most_bytes_) {
      idle->next = std::exchange(size->second.idle, idle);
      idle_bytes_ += whole;
    } else {
      Retire(idle);
    }
    if (++calls_ >= kCallsBetweenLooks) Look();
    for (Idle*& piece : retired) {
      if (retired_ != nullptr) piece = std::exchange(retired_, retired_->next);
    }
  }
  for (Idle* const piece : retired) {
    if (piece != nullptr) Unmap(piece, piece->bytes);
  }
}

void PayloadPool::Look() {
  calls_ = 0;
  most_used_before_ = std::exchange(most_used_bytes_, used_bytes_);
  for (auto entry = sizes_.begin(); entry != sizes_.end();) {
    auto& [bytes, size] = *entry;
    if (std::exchange(size.was_taken, false)) {
      ++entry;
      continue;
    }
    while (size.idle != nullptr) {
      idle_bytes_ -= bytes;
      Retire(std::exchange(size.idle, size.idle->next));
    }
    entry = sizes_.erase(entry);
  }
}

void PayloadPool::RetireIdle(uint64_t most_idle_bytes) {
  for (auto& [bytes, size] : sizes_) {
    while (idle_bytes_ > most_idle_bytes && size.idle != nullptr) {
      idle_bytes_ -= bytes;
      Retire(std::exchange(size.idle, size.idle->next));
    }
  }
}

void PayloadPool::Retire(Idle* idle) { idle->next = std::exchange(retired_, idle); }

void PayloadPool::KeepWithin(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  most_bytes_ = bytes;
}

uint64_t PayloadPool::used_bytes() const {
  absl::MutexLock lock(&mutex_);
  return used_bytes_;
}

uint64_t PayloadPool::idle_bytes() const {
  absl::MutexLock lock(&mutex_);
  return idle_bytes_;
}

uint64_t PayloadPool::mapped_bytes() const {
  absl::MutexLock lock(&mutex_);
  return mapped_bytes_;
}

}  // namespace signpost
