// A frame's payload in memory: bytes at a 64-byte boundary.

#ifndef SIGNPOST_PROTO_PAYLOAD_H_
#define SIGNPOST_PROTO_PAYLOAD_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"

namespace signpost {

// Owns `size` bytes, uninitialised at first. Movable, and empty after it was moved from; const
// access is safe from any thread.
class Payload {
 public:
  Payload() = default;
  // Throws std::bad_alloc, as operator new does.
  explicit Payload(size_t size);
  ~Payload();
  Payload(Payload&& other) noexcept
      : bytes_(std::exchange(other.bytes_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Payload& operator=(Payload&& other) noexcept {
    Payload moved = std::move(other);  // which may be this one
    std::swap(bytes_, moved.bytes_);
    std::swap(size_, moved.size_);
    return *this;
  }

  uint8_t* data() { return bytes_; }
  const uint8_t* data() const { return bytes_; }
  size_t size() const { return size_; }
  absl::Span<const uint8_t> span() const { return {data(), size_}; }

 private:
  uint8_t* bytes_ = nullptr;
  size_t size_ = 0;
};

// CRC-32C (Castagnoli), as in RFC 3720.
uint32_t Crc32c(absl::Span<const uint8_t> bytes);
// Of two spans one after the other: Crc32c(b, Crc32c(a)).
uint32_t Crc32c(absl::Span<const uint8_t> bytes, uint32_t crc_so_far);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_PAYLOAD_H_
