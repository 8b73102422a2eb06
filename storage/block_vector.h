// Numbers in memory that a disk can take as they lie there.

#ifndef SIGNPOST_STORAGE_BLOCK_VECTOR_H_
#define SIGNPOST_STORAGE_BLOCK_VECTOR_H_

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include "proto/payload_pool.h"

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
    const size_t bytes = WholeBlocks(count);
    if (bytes >= PayloadPool::kLeastBytes) {
      return static_cast<T*>(PayloadPool::Global().Take(bytes));
    }
    void* const memory = std::aligned_alloc(kBlockBytes, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) {
    const size_t bytes = WholeBlocks(count);
    if (bytes >= PayloadPool::kLeastBytes) {
      PayloadPool::Global().Give(memory, bytes);
    } else {
      std::free(memory);
    }
  }

  bool operator==(const BlockAllocator&) const { return true; }

 private:
  static size_t WholeBlocks(size_t count) {
    return (count * sizeof(T) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  }
};

template <typename T>
using BlockVector = std::vector<T, BlockAllocator<T>>;

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_BLOCK_VECTOR_H_
