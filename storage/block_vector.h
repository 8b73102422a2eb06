// Numbers in memory that a disk can take as they lie there.

#ifndef SIGNPOST_STORAGE_BLOCK_VECTOR_H_
#define SIGNPOST_STORAGE_BLOCK_VECTOR_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace signpost {

// Whole blocks that lie at a multiple of this, in memory and in a file, go to a disk without a copy
// on the way: see Disk::Write.
inline constexpr size_t kBlockBytes = 4096;

template <typename T>
struct BlockAllocator {
  using value_type = T;

  BlockAllocator() = default;
  template <typename U>
  explicit BlockAllocator(const BlockAllocator<U>&) {}

  T* allocate(size_t count) {
    // The system looks up each page of what it writes: large ones are fewer.
    constexpr size_t kHugePageBytes = size_t{2} << 20;
    const size_t bytes = count * sizeof(T);
    const bool is_large = bytes >= kHugePageBytes;
    const size_t alignment = is_large ? kHugePageBytes : kBlockBytes;
    const size_t whole = (bytes + alignment - 1) / alignment * alignment;
    void* const memory = std::aligned_alloc(alignment, whole);
    if (memory == nullptr) throw std::bad_alloc();
    if (is_large) madvise(memory, whole, MADV_HUGEPAGE);  // where the system has them
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { std::free(memory); }

  bool operator==(const BlockAllocator&) const { return true; }
};

template <typename T>
using BlockVector = std::vector<T, BlockAllocator<T>>;

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_BLOCK_VECTOR_H_
