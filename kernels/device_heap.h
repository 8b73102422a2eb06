// For tests: a heap that a GPU can reach.

#ifndef SIGNPOST_KERNELS_DEVICE_HEAP_H_
#define SIGNPOST_KERNELS_DEVICE_HEAP_H_

#include <cstddef>

namespace signpost::kernels {

// From now on operator new takes memory from here, and operator delete keeps it for the next that
// needs about as much. A program that needs more is aborted.
void TakeMemoryFrom(void* begin, size_t bytes);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_DEVICE_HEAP_H_
