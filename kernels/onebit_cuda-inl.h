// What a thread block does in the kernels of onebit_cuda.h: one block of a segment.

#ifndef SIGNPOST_KERNELS_ONEBIT_CUDA_INL_H_
#define SIGNPOST_KERNELS_ONEBIT_CUDA_INL_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/block.h"
#include "kernels/formulas.h"
#include "kernels/onebit.h"
#include "kernels/onebit_cuda.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {

// The sign bits of the quad at element i, a multiple of 4: the first one's is the lowest.
SIGNPOST_DEVICE inline uint32_t SignsOfQuad(const uint8_t* bits, uint32_t i) {
  return bits[i / 8] >> (i % 8) & 0xf;
}

SIGNPOST_DEVICE inline Quad SignedQuad(float magnitude, uint32_t signs) {
  Quad quad;
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    quad.v[k] = formulas::Signed(magnitude, (signs >> k & 1) != 0);
  }
  return quad;
}

// What momentum a segment has.
enum class MomentumIs { kNone, kOneBit, kDense };

SIGNPOST_DEVICE inline MomentumIs MomentumOf(const CompressSegment& segment) {
  if (segment.dense_momentum != nullptr) return MomentumIs::kDense;
  return segment.momentum.scales != nullptr ? MomentumIs::kOneBit : MomentumIs::kNone;
}

// As ForType.
template <class Use>
SIGNPOST_DEVICE void ForMomentum(MomentumIs momentum, Use use) {
  switch (momentum) {
    case MomentumIs::kOneBit:
      return use(std::integral_constant<MomentumIs, MomentumIs::kOneBit>());
    case MomentumIs::kDense:
      return use(std::integral_constant<MomentumIs, MomentumIs::kDense>());
    default:
      return use(std::integral_constant<MomentumIs, MomentumIs::kNone>());
  }
}

// u of the quad at element i of the segment, in block `index`; `type` and `momentum` are what the
// segment has.
template <bool kIsWhole>
SIGNPOST_DEVICE Quad LoadInput(const CompressSegment& segment, GradientType type,
                               MomentumIs momentum, uint32_t index, uint32_t i, uint32_t count) {
  Quad u = LoadGradient<kIsWhole>(type, segment.gradient, i, count);
  const Quad error = LoadQuad<kIsWhole>(segment.error + i, count);
  if (momentum == MomentumIs::kNone) {
    for (uint32_t k = 0; k < kQuadElements; ++k) u.v[k] = u.v[k] + error.v[k];
    return u;
  }
  const Quad m =
      momentum == MomentumIs::kDense
          ? LoadQuad<kIsWhole>(segment.dense_momentum + i, count)
          : SignedQuad(segment.momentum.scales[index], SignsOfQuad(segment.momentum.bits, i));
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    u.v[k] = formulas::MomentumAndError(segment.rates, m.v[k], u.v[k], error.v[k]);
  }
  return u;
}

// Adds a tile's squares to the lanes of block.h, of which each has a thread.
SIGNPOST_DEVICE inline void AddSquares(Shared& shared, uint32_t lane, uint32_t length) {
  float sum = shared.lanes[lane];
  SIGNPOST_UNROLL(8)
  for (uint32_t i = lane; i < length; i += kSumLanes) sum = sum + shared.u[i] * shared.u[i];
  shared.lanes[lane] = sum;
}

// Of four quads' sign bits, each in the lower half of a byte, the two bytes.
SIGNPOST_DEVICE inline uint32_t JoinSigns(uint32_t quads) {
  const uint32_t pairs = quads | quads >> 4;
  return (pairs & 0xff) | (pairs >> 8 & 0xff00);
}

// Puts the quads' sign bits where they belong: a thread has four bytes, and what is behind the
// tile's is anything.
SIGNPOST_DEVICE inline void StoreSigns(const Shared& shared, uint32_t thread, uint32_t length,
                                       uint8_t* bits) {
  const uint32_t bytes = static_cast<uint32_t>(SignBytes(length));
  const uint32_t begin = 4 * thread;
  if (begin >= bytes) return;
  const Bytes8 quads = *reinterpret_cast<const Bytes8*>(shared.signs + 2 * begin);
  const uint32_t word = JoinSigns(quads.words[0]) | JoinSigns(quads.words[1]) << 16;
  uint8_t* const to = bits + begin;
  if (bytes - begin >= sizeof word && reinterpret_cast<uintptr_t>(to) % sizeof word == 0) {
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
  SIGNPOST_UNROLL(1)
  for (uint32_t k = 0; k < Min<uint32_t>(sizeof word, bytes - begin); ++k) {
    to[k] = static_cast<uint8_t>(word >> 8 * k);
  }
}

template <class Block>
SIGNPOST_DEVICE void CompressBlock(Block& block, const BlockRule& rule,
                                   const CompressSegment& segment, uint32_t number,
                                   uint32_t* first_not_packed) {
  const BlockOfSegment at = BlockOf(segment, rule, number);
  Shared& shared = block.shared();
  typename Block::template PerThread<Tile> u;
  const bool is_whole = segment.gradient != nullptr &&
                        AreTilesWhole(at, segment.gradient, segment.error, segment.dense_momentum);
  const auto load_as = [&](auto whole, GradientType type, MomentumIs momentum, uint32_t thread,
                           uint32_t tile) {
    ForEachQuad<whole()>(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t q) {
      u[thread].quads[q] =
          LoadInput<whole()>(segment, type, momentum, at.index, at.begin + tile + begin, count);
    });
  };
  const auto load = [&](uint32_t thread, uint32_t tile) {
    if (!is_whole) {
      return load_as(std::false_type(), segment.type, MomentumOf(segment), thread, tile);
    }
    ForType(segment.type, [&](auto type) {
      ForMomentum(MomentumOf(segment),
                  [&](auto momentum) { load_as(std::true_type(), type, momentum, thread, tile); });
    });
  };

  block.Phase([&](uint32_t thread) {
    if (thread < kSumLanes) shared.lanes[thread] = 0;
  });
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    const uint32_t length = Min(at.length - tile, kTileElements);
    block.Phase([&](uint32_t thread) {
      load(thread, tile);
      ForEachQuad(thread, length, [&](uint32_t begin, uint32_t, uint32_t q) {
        for (uint32_t k = 0; k < kQuadElements; ++k) shared.u[begin + k] = u[thread].quads[q].v[k];
      });
    });
    block.Phase([&](uint32_t thread) {
      if (thread < kSumLanes) AddSquares(shared, thread, length);
    });
  }
  FoldLanes(block, shared.lanes);

  const float scale = formulas::BlockScale(rule.gamma, shared.lanes[0], at.length);
  const bool is_packed = scale <= kMaxScale;  // not when it is not a number
  block.Phase([&](uint32_t thread) {
    if (thread != 0) return;
    segment.out.scales[at.index] = is_packed ? scale : kNotPacked;
    if (!is_packed) block.LowerTo(*first_not_packed, number);
  });
  if (!is_packed) return;

  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    const uint32_t length = Min(at.length - tile, kTileElements);
    block.Phase([&](uint32_t thread) {
      if (at.length > kTileElements) load(thread, tile);  // the last tile's is what registers have
      ForEither(is_whole, [&](auto whole) {
        ForEachQuad<whole()>(thread, length, [&](uint32_t begin, uint32_t count, uint32_t q) {
          Quad& quad = u[thread].quads[q];
          uint32_t signs = 0;
          for (uint32_t k = 0; k < kQuadElements; ++k) {
            const bool is_negative = (whole() || k < count) && formulas::IsNegative(quad.v[k]);
            signs |= static_cast<uint32_t>(is_negative) << k;
            quad.v[k] = quad.v[k] - formulas::Signed(scale, is_negative);
          }
          shared.signs[begin / kQuadElements] = static_cast<uint8_t>(signs);
          StoreQuad<whole()>(quad, segment.error + at.begin + tile + begin, count);
        });
      });
      // The upper half of the last byte.
      const uint32_t behind = (length + kQuadElements - 1) / kQuadElements;
      if (thread == 0 && behind % 2 != 0) shared.signs[behind] = 0;
    });
    block.Phase([&](uint32_t thread) {
      StoreSigns(shared, thread, length, segment.out.bits + (at.begin + tile) / 8);
    });
  }
}

template <class Block>
SIGNPOST_DEVICE void ApplyBlock(Block& block, const BlockRule& rule, const ApplySegment& segment,
                                uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t index, uint32_t i, uint32_t count) {
    const Quad m =
        SignedQuad(segment.momentum.scales[index], SignsOfQuad(segment.momentum.bits, i));
    const Quad inverse = LoadQuad(segment.inverse_denominator + i, count);
    Quad x = LoadQuad(segment.parameters + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      x.v[k] = formulas::ApplyMomentum(m.v[k], inverse.v[k], segment.rates, x.v[k]);
    }
    StoreQuad(x, segment.parameters + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void DecompressBlock(Block& block, const BlockRule& rule,
                                     const DecompressSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t index, uint32_t i, uint32_t count) {
    StoreQuad(SignedQuad(segment.compressed.scales[index], SignsOfQuad(segment.compressed.bits, i)),
              segment.values + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void AddBlock(Block& block, const BlockRule& rule, const AddSegment& segment,
                              uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t index, uint32_t i, uint32_t count) {
    const float scale = segment.addend.scales[index];
    if (scale != scale) return;  // it is not packed
    const Quad value = SignedQuad(segment.factor * scale, SignsOfQuad(segment.addend.bits, i));
    Quad sum = LoadQuad(segment.accumulator + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) sum.v[k] = sum.v[k] + value.v[k];
    StoreQuad(sum, segment.accumulator + i, count);
  });
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_ONEBIT_CUDA_INL_H_
