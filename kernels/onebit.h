// One-bit compression with error feedback: 1-bit Adam, arXiv:2102.02888, Algorithm 1.
//
// A span of elements is cut into blocks of `rule.block_elements`; the last may be short. A
// compressed block is one fp32 scale S >= 0 and one IEEE sign bit per element (1 = negative, so -0
// is negative), element i in bit i mod 8 of byte i div 8. It stands for copysign(S, bit).
//
// Compressing u, per block of length len, everything in fp32:
//   q    = sum of u_i * u_i            in the lane order of block.h
//   S    = gamma * sqrt(q / len)
//   bits = the sign bits of u
//   e_i  = u_i - copysign(S, u_i)      what compression lost, kept for the next input
//
// All pointers are host memory with no alignment requirement beyond their type's. Spans of one call
// must not overlap unless a comment says so. Functions are thread-safe: they touch their arguments
// only.

#ifndef SIGNPOST_KERNELS_ONEBIT_H_
#define SIGNPOST_KERNELS_ONEBIT_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/block.h"
#include "kernels/momentum.h"

namespace signpost::kernels {

// A compressed span of n elements: BlockCount(n) scales and SignBytes(n) bytes of sign bits.
struct OneBitView {
  const float* scales = nullptr;
  const uint8_t* bits = nullptr;
};
struct OneBitSpan {
  float* scales = nullptr;
  uint8_t* bits = nullptr;
  operator OneBitView() const { return {scales, bits}; }
};

inline bool IsPacked(OneBitView view, size_t block) { return !std::isnan(view.scales[block]); }

// A worker's one-bit contribution, in one pass over memory: compresses
//   u = ((beta1 * m) + (one_minus_beta1 * g)) + e
// of the span, rounded after each operation, into `out` and leaves the new error in `error`.
// `gradient` and `error` have equal sizes, n.
//
// A block whose S is not finite or exceeds kMaxScale (a NaN or infinite gradient does that) is not
// packed: kNotPacked is its scale in `out`, and its bits and its part of `error` are untouched.
// Returns the index of the first such block, or BlockCount(n): whether all are packed.
//
// The momentum is dense (n elements) in the first one-bit round, and afterwards what the
// aggregators answered in the last one.
size_t CompressMomentum(const BlockRule& rule, MomentumRates rates,
                        absl::Span<const float> gradient, const float* momentum,
                        absl::Span<float> error, OneBitSpan out);
size_t CompressMomentum(const BlockRule& rule, MomentumRates rates,
                        absl::Span<const float> gradient, OneBitView momentum,
                        absl::Span<float> error, OneBitSpan out);

// A contribution without momentum, in one pass over memory: compresses u = value + error of the
// span into `out` and leaves the new error in `error`. `values` and `error` have equal sizes, n.
// What is not finite, and what it returns, as CompressMomentum.
size_t CompressOneBit(const BlockRule& rule, absl::Span<const float> values,
                      absl::Span<float> error, OneBitSpan out);

// values = copysign(S, bit).
void DecompressOneBit(const BlockRule& rule, OneBitView compressed, absl::Span<float> values);

// An aggregator's one-bit round, in one pass over memory, no contribution expanded to floats:
//   u = (sum over ranks of copysign(S_r, bits_r)) * inverse_count + error
// summed in the order of block.h (kRankGroup), compressed into `out`, the new error left in
// `error`. `contributions` are in rank order, at least one, with all blocks packed; inverse_count
// is fp32 1/world size. What is not finite, and what it returns, as CompressMomentum.
size_t AggregateOneBit(const BlockRule& rule, absl::Span<const OneBitView> contributions,
                       float inverse_count, absl::Span<float> error, OneBitSpan out);

// A worker's use of the answer, in one pass over memory; the answer is the new momentum:
//   x = x - lr * (max(-most, min(copysign(S, bit) * inverse_denominator, most)) + weight_decay * x)
// rounded after each operation as written, with most = most_update. `inverse_denominator` is 1 /
// (sqrt(v) + epsilon), or 0 for an element that has no variance (adam.h), and never above
// most_inverse_denominator; it and `parameters` have equal sizes.
void ApplyMomentum(const BlockRule& rule, OneBitView momentum, const UpdateRates& rates,
                   absl::Span<const float> inverse_denominator, absl::Span<float> parameters);

// accumulator = accumulator + copysign(factor * S, bit), with the sign flipped for factor < 0.
// With factor 1 it takes a contribution back that did not count.
void AddOneBit(const BlockRule& rule, OneBitView addend, float factor,
               absl::Span<float> accumulator);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_ONEBIT_H_
