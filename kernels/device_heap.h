// For tests: a heap that a GPU can reach.

#ifndef SIGNPOST_KERNELS_DEVICE_HEAP_H_
#define SIGNPOST_KERNELS_DEVICE_HEAP_H_

#include <cstddef>

namespace signpost::kernels {

// From now on operator new takes memory from here, beginning to end, and never gives it back: what
// tests need of it is known. A program that needs more is aborted.
void TakeMemoryFrom(void* begin, size_t bytes);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_DEVICE_HEAP_H_
