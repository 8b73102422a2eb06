#include "kernels/device_heap.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

// All zero before the first constructor runs, which may take memory.
struct {
  char* begin;
  size_t bytes;
  size_t used;
} heap;
std::mutex mutex;

bool IsOfHeap(const void* memory) {
  return memory >= heap.begin && memory < heap.begin + heap.bytes;
}

}  // namespace

namespace signpost::kernels {

void TakeMemoryFrom(void* begin, size_t bytes) { heap = {static_cast<char*>(begin), bytes, 0}; }

}  // namespace signpost::kernels

void* operator new(size_t bytes) {
  constexpr size_t kAlignment = 64;
  if (heap.bytes == 0) {
    void* const memory = std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  const std::lock_guard lock(mutex);
  const size_t at = heap.used;
  heap.used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (heap.used <= heap.bytes) return heap.begin + at;
  std::fprintf(stderr, "the tests need more than %zu bytes\n", heap.bytes);
  std::abort();
}

void operator delete(void* memory) noexcept {
  if (!IsOfHeap(memory)) std::free(memory);
}

void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
