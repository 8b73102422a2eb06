// Vectors of a model's size. The system gives their memory page by page as it is first written, and
// has it back as soon as they go; malloc would keep it. Until then their elements are zero.

#ifndef SIGNPOST_WORKER_PAGE_VECTOR_H_
#define SIGNPOST_WORKER_PAGE_VECTOR_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include "absl/base/config.h"

namespace signpost {

template <typename T>
struct PageAllocator {
  using value_type = T;

  PageAllocator() = default;
  template <typename U>
  explicit PageAllocator(const PageAllocator<U>&) {}

  T* allocate(size_t count) {
    void* const memory = IsLarge(count) ? mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0)
                                        : std::calloc(count, sizeof(T));
    if (memory == nullptr || memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) {
    if (IsLarge(count)) {
      munmap(memory, count * sizeof(T));
    } else {
      std::free(memory);
    }
  }

  // An element without a value is zero already, and is not to be written.
  void construct(T*) {}

  bool operator==(const PageAllocator&) const { return true; }

 private:
  static bool IsLarge(size_t count) {
#ifdef ABSL_HAVE_ADDRESS_SANITIZER
    return false;  // it finds what goes beyond malloc's memory
#else
    return count * sizeof(T) >= size_t{256} << 10;
#endif
  }
};

// To be made with its final size: elements that resize() brings back are as they were.
template <typename T>
using PageVector = std::vector<T, PageAllocator<T>>;

}  // namespace signpost

#endif  // SIGNPOST_WORKER_PAGE_VECTOR_H_
