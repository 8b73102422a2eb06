// Blocks: runs of elements that share one scale, and the numbers that every kernel agrees on.
//
// Bit-exactness. Every kernel is specified to the bit: fp32, one rounding per written operation, no
// fused multiply-add, sums in the order given here, in the floating-point mode that C begins with,
// which callers see to. The scalar reference, AVX2, AVX-512 and CUDA
// variants give the same bytes, so workers on different machines stay byte-identical. Only which
// NaN an operation gives is left open: no kernel packs a block that has one, and parameters that
// have one are lost anyway.

#ifndef SIGNPOST_KERNELS_BLOCK_H_
#define SIGNPOST_KERNELS_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <limits>

namespace signpost::kernels {

// A block's sum of squares is kept in this many lanes: element i of the block is added to lane
// i mod kSumLanes, in increasing i, and the lanes are then folded in halves:
// for w = 64, 32, ..., 1: lane[l] += lane[l + w] for every l < w.
inline constexpr size_t kSumLanes = 128;

// Contributions of this many consecutive ranks are added up first, in rank order; then these
// partial sums, in rank order; each sum begins with its first term. For up to four workers that is
// plain rank order.
inline constexpr size_t kRankGroup = 4;

// The largest scale that a compressed block may have, and the largest magnitude of a dense element.
// Beyond them a block counts as not finite: sums of squares, sums over ranks and Adam's second
// moment cannot overflow.
inline constexpr float kMaxScale = 0x1p50f;
inline constexpr float kMaxDense = 0x1p60f;

// What a payload has for a block that is not finite: as its scale, or as its first element. The
// block is not packed: its error is untouched, and the rest of it in the payload means nothing. The
// others are.
inline constexpr float kNotPacked = std::numeric_limits<float>::quiet_NaN();

// Blocks that `elements` take; the last one may be short.
constexpr size_t BlockCount(size_t elements, size_t block_elements) {
  return (elements + block_elements - 1) / block_elements;
}

// Bytes of packed sign bits that `elements` take; unused bits of the last byte are zero.
constexpr size_t SignBytes(size_t elements) { return (elements + 7) / 8; }

// How kernels cut a span into blocks, and one-bit ones scale them.
struct BlockRule {
  // A positive multiple of 8. Above 4096, kernels may take the memory of a block from the heap.
  size_t block_elements = 4096;
  float gamma = 1.35f;  // one-bit: S = gamma * ||u||_2 / sqrt(length); below 1.6 (ARCHITECTURE.md)
};

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_BLOCK_H_
