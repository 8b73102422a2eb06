#include "kernels/device_heap.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

constexpr size_t kAlignment = 64;

// Before what is given out.
struct alignas(kAlignment) Header {
  int size;      // the binary logarithm of its bytes, this included
  Header* next;  // that is free and of that size
};

// All zero before the first constructor runs, which may take memory.
struct {
  char* begin;
  size_t bytes;
  size_t used;
  Header* free[64];  // by size
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
  if (heap.bytes == 0) {
    void* const memory = std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  const std::lock_guard lock(mutex);
  // Some, or the last block's would begin behind the heap.
  const int size = std::bit_width(std::max<size_t>(bytes, 1) + sizeof(Header) - 1);
  Header*& free = heap.free[size];
  Header* header = free;
  if (header != nullptr) {
    free = header->next;
    return header + 1;
  }
  const size_t taken = size_t{1} << size;
  if (taken > heap.bytes - heap.used) {
    std::fprintf(stderr, "the tests need more than %zu bytes\n", heap.bytes);
    std::abort();
  }
  header = reinterpret_cast<Header*>(heap.begin + heap.used);
  heap.used += taken;
  header->size = size;
  return header + 1;
}

void operator delete(void* memory) noexcept {
  if (!IsOfHeap(memory)) return std::free(memory);
  const std::lock_guard lock(mutex);
  Header* const header = static_cast<Header*>(memory) - 1;
  header->next = heap.free[header->size];
  heap.free[header->size] = header;
}

void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
