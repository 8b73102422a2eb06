// Memory that two processes of a node map.

#ifndef SIGNPOST_NODE_SHARED_MEMORY_H_
#define SIGNPOST_NODE_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/node.pb.h"

namespace signpost::node {

// Of a size that neither side can change. It has no name in any file system: nothing is left of it
// when both processes have ended, however they do. Pages are taken as they are first written, and
// are zero until then; begins at a page. Thread-safe, as far as its contents are not concerned.
class SharedMemory {
 public:
  // `bytes` > 0. RESOURCE_EXHAUSTED when the system has no more descriptors or address space.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(uint64_t bytes);

  // What another process has created, or this one, of exactly `bytes`.
  //   FAILED_PRECONDITION  it is not to be seen from here: another user's, or of a process that
  //                        counts processes otherwise (another container)
  //   INVALID_ARGUMENT     it has another size, or one that the other side could change
  //   RESOURCE_EXHAUSTED   as Create
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Open(const Memory& memory, uint64_t bytes);

  ~SharedMemory();  // The other side keeps it.
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // For Open, as long as this object is there. Only of what was created.
  Memory handle() const;

  uint64_t bytes() const { return bytes_; }
  void* data() const { return data_; }
  absl::Span<float> floats() const {
    return {static_cast<float*>(data_), static_cast<size_t>(bytes_ / sizeof(float))};
  }
  absl::string_view text() const {
    return {static_cast<const char*>(data_), static_cast<size_t>(bytes_)};
  }

 private:
  SharedMemory(int fd, uint64_t bytes, void* data) : fd_(fd), bytes_(bytes), data_(data) {}

  // Takes over the descriptor.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Map(int fd, uint64_t bytes);

  const int fd_;
  const uint64_t bytes_;
  void* const data_;
};

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_SHARED_MEMORY_H_
