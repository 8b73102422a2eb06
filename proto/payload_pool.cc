#include "proto/payload_pool.h"

#include <sys/mman.h>

#include <new>
#include <utility>

#include "absl/base/config.h"

namespace signpost {
namespace {

// Sizes are few, so that chunks of nearly the same size share memory.
constexpr size_t kUnit = size_t{64} << 10;
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kMostBytes = size_t{1} << 46;

size_t Whole(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

void* Map(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                            /*fd=*/-1, /*offset=*/0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

// The system looks up each page of what is written: large ones are fewer.
void* MapAtLargePage(size_t bytes) {
  char* const all = static_cast<char*>(Map(bytes + kLargePage));
  const size_t before = (kLargePage - reinterpret_cast<uintptr_t>(all) % kLargePage) % kLargePage;
  if (before > 0) munmap(all, before);
  if (before < kLargePage) munmap(all + before + bytes, kLargePage - before);
  madvise(all + before, bytes, MADV_HUGEPAGE);  // where the system has them
  return all + before;
}

}  // namespace

PayloadPool& PayloadPool::Global() {
  static PayloadPool& pool = *new PayloadPool;
  return pool;
}

void* PayloadPool::Take(size_t bytes) {
  if (bytes > kMostBytes) throw std::bad_alloc();
  const size_t whole = Whole(bytes);
  {
    absl::MutexLock lock(&mutex_);
    ++calls_;
    Size& size = sizes_[whole];
    size.was_taken = true;
    if (!size.free.empty()) {
      void* const memory = size.free.back();
      size.free.pop_back();
      return memory;
    }
    bytes_mapped_ += whole;
  }
  return whole < kLargePage ? Map(whole) : MapAtLargePage(whole);
}

void PayloadPool::Give(void* memory, size_t bytes) {
#ifdef ABSL_HAVE_ADDRESS_SANITIZER
  munmap(memory, Whole(bytes));  // whoever still uses it is to be found
#else
  std::vector<Unused> unused;
  {
    absl::MutexLock lock(&mutex_);
    sizes_[Whole(bytes)].free.push_back(memory);
    if (++calls_ >= kCallsBetweenLooks) unused = Look();
  }
  for (const Unused& size : unused) {
    for (void* const piece : size.memory) munmap(piece, size.bytes);
  }
#endif
}

std::vector<PayloadPool::Unused> PayloadPool::Look() {
  calls_ = 0;
  std::vector<Unused> unused;
  for (auto& [bytes, size] : sizes_) {
    if (!std::exchange(size.was_taken, false)) unused.push_back({std::move(size.free), bytes});
  }
  for (const Unused& size : unused) sizes_.erase(size.bytes);
  return unused;
}

uint64_t PayloadPool::bytes_mapped() const {
  absl::MutexLock lock(&mutex_);
  return bytes_mapped_;
}

}  // namespace signpost
