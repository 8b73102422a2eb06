#include "proto/payload.h"

#include <isa-l/crc.h>

#include <limits>
#include <new>

namespace signpost {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kMaxPayloadBytes = std::numeric_limits<ptrdiff_t>::max() - kAlignment;

// crc32_iscsi counts bytes in an int.
constexpr size_t kBytesPerCall = size_t{1} << 30;

}  // namespace

Payload::Payload(size_t size) : size_(size) {
  if (size == 0) return;
  if (size > kMaxPayloadBytes) throw std::bad_alloc();
  const size_t whole_lines = (size + kAlignment - 1) / kAlignment * kAlignment;
  bytes_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, whole_lines)));
  if (bytes_ == nullptr) throw std::bad_alloc();
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
