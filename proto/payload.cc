#include "proto/payload.h"

#include <isa-l/crc.h>

#include <cstdlib>
#include <new>

#include "proto/payload_pool.h"

namespace signpost {
namespace {

constexpr size_t kAlignment = 64;

// crc32_iscsi counts bytes in an int.
constexpr size_t kBytesPerCall = size_t{1} << 30;

}  // namespace

Payload::Payload(size_t size) : size_(size) {
  if (size == 0) return;
  if (size >= PayloadPool::kLeastBytes) {
    bytes_ = static_cast<uint8_t*>(PayloadPool::Global().Take(size));
    return;
  }
  const size_t whole_lines = (size + kAlignment - 1) / kAlignment * kAlignment;
  bytes_ = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, whole_lines));
  if (bytes_ == nullptr) throw std::bad_alloc();
}

Payload::~Payload() {
  if (size_ >= PayloadPool::kLeastBytes) {
    PayloadPool::Global().Give(bytes_, size_);
  } else {
    std::free(bytes_);
  }
}

uint32_t Crc32c(absl::Span<const uint8_t> bytes) { return Crc32c(bytes, /*crc_so_far=*/0); }

uint32_t Crc32c(absl::Span<const uint8_t> bytes, uint32_t crc_so_far) {
  // isa-l leaves RFC 3720's inversions, before the first byte and after the last one, to its
  // caller.
  uint32_t remainder = ~crc_so_far;
  while (!bytes.empty()) {
    const absl::Span<const uint8_t> piece = bytes.subspan(0, kBytesPerCall);
    // It only reads, though its signature does not say so.
    remainder = crc32_iscsi(const_cast<unsigned char*>(piece.data()),
                            static_cast<int>(piece.size()), remainder);
    bytes.remove_prefix(piece.size());
  }
  return ~remainder;
}

}  // namespace signpost
