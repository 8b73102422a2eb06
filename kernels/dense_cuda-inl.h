// What a thread block does in the kernels of dense_cuda.h: one block of a segment.

#ifndef SIGNPOST_KERNELS_DENSE_CUDA_INL_H_
#define SIGNPOST_KERNELS_DENSE_CUDA_INL_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/dense_cuda.h"
#include "kernels/formulas.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {

// The quad at element i of a dense payload.
SIGNPOST_DEVICE inline Quad LoadPayload(DenseType type, const uint8_t* payload, uint32_t i,
                                        uint32_t count) {
  switch (type) {
    case DenseType::kBfloat16:
      return LoadGradient(GradientType::kBfloat16, payload, i, count);
    case DenseType::kFloat16:
      return LoadGradient(GradientType::kFloat16, payload, i, count);
    default:
      return LoadGradient(GradientType::kFloat32, payload, i, count);
  }
}

// Rounds a quad to `type` and writes it; it becomes what was written.
template <bool kIsWhole = false>
SIGNPOST_DEVICE void StorePayload(DenseType type, Quad& quad, uint8_t* payload, uint32_t i,
                                  uint32_t count) {
  if (type == DenseType::kFloat32) {
    return StoreQuad<kIsWhole>(quad, reinterpret_cast<float*>(payload) + i, count);
  }
  Halves halves;
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    if (type == DenseType::kBfloat16) {
      halves.v[k] = formulas::RoundToBfloat16(quad.v[k]);
      quad.v[k] = formulas::WidenBfloat16(halves.v[k]);
    } else {
      halves.v[k] = formulas::RoundToFloat16(quad.v[k]);
      quad.v[k] = formulas::WidenFloat16(halves.v[k]);
    }
  }
  StoreHalves<kIsWhole>(halves, payload + size_t{2} * i, count);
}

// u of the quad at element i of the segment; `type` and `has_error` are what the segment has.
template <bool kIsWhole>
SIGNPOST_DEVICE Quad LoadInput(const DenseSegment& segment, GradientType type, bool has_error,
                               uint32_t i, uint32_t count) {
  Quad u = LoadGradient<kIsWhole>(type, segment.gradient, i, count);
  const Quad error = has_error ? LoadQuad<kIsWhole>(segment.error + i, count) : Quad{};
  for (uint32_t k = 0; k < kQuadElements; ++k) u.v[k] = u.v[k] + error.v[k];
  return u;
}

template <class Block>
SIGNPOST_DEVICE void CompressDenseBlock(Block& block, const BlockRule& rule,
                                        const DenseSegment& segment, uint32_t number,
                                        uint32_t* first_not_packed) {
  const BlockOfSegment at = BlockOf(segment, rule, number);
  uint32_t& is_within_range = block.shared().flag;
  typename Block::template PerThread<Tile> u;
  const bool has_error = segment.error != nullptr;
  const bool is_whole = segment.gradient != nullptr &&
                        AreTilesWhole(at, segment.gradient, segment.error, segment.out);
  const auto load_as = [&](auto whole, GradientType type, bool adds_error, uint32_t thread,
                           uint32_t tile) {
    ForEachQuad<whole()>(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t q) {
      u[thread].quads[q] =
          LoadInput<whole()>(segment, type, adds_error, at.begin + tile + begin, count);
    });
  };
  const auto load = [&](uint32_t thread, uint32_t tile) {
    if (!is_whole) {
      return load_as(std::false_type(), segment.gradient_type, has_error, thread, tile);
    }
    ForType(segment.gradient_type, [&](auto type) {
      ForEither(has_error, [&](auto adds_error) {
        load_as(std::true_type(), type, adds_error, thread, tile);
      });
    });
  };

  block.Phase([&](uint32_t thread) {
    if (thread == 0) is_within_range = 1;
  });
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    block.Phase([&](uint32_t thread) {
      load(thread, tile);
      bool is_mine = true;
      ForEachQuad(thread, at.length - tile, [&](uint32_t, uint32_t count, uint32_t q) {
        for (uint32_t k = 0; k < Min(count, kQuadElements); ++k) {
          is_mine = is_mine && formulas::IsWithinRange(u[thread].quads[q].v[k]);
        }
      });
      if (!is_mine) block.LowerTo(is_within_range, 0);
    });
  }
  if (is_within_range == 0) {
    for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
      block.Phase([&](uint32_t thread) {
        ForEachQuad(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t) {
          const bool is_first = tile + begin == 0;
          Quad mark = {{is_first ? kNotPacked : 0.0f}};
          StorePayload(segment.type, mark, segment.out, at.begin + tile + begin, count);
          if (is_first) block.LowerTo(*first_not_packed, number);
        });
      });
    }
    return;
  }
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    block.Phase([&](uint32_t thread) {
      if (at.length > kTileElements) load(thread, tile);  // the last tile's is what registers have
      ForEither(is_whole, [&](auto whole) {
        ForEachQuad<whole()>(thread, at.length - tile,
                             [&](uint32_t begin, uint32_t count, uint32_t q) {
                               const uint32_t i = at.begin + tile + begin;
                               Quad lost = u[thread].quads[q], rounded = lost;
                               StorePayload<whole()>(segment.type, rounded, segment.out, i, count);
                               if (!has_error) return;
                               for (uint32_t k = 0; k < kQuadElements; ++k)
                                 lost.v[k] = lost.v[k] - rounded.v[k];
                               StoreQuad<whole()>(lost, segment.error + i, count);
                             });
      });
    });
  }
}

// The sum over a segment's ranks of the quad at element i.
SIGNPOST_DEVICE inline Quad SumOverRanks(const AggregateDenseSegment& segment, uint32_t i,
                                         uint32_t count) {
  const auto add = [](Quad& sum, const Quad& term) {
    for (uint32_t k = 0; k < kQuadElements; ++k) sum.v[k] = sum.v[k] + term.v[k];
  };
  const auto load = [&](uint32_t rank) {
    return LoadQuad(segment.contributions[rank] + segment.first + i, count);
  };
  constexpr auto kGroup = static_cast<uint32_t>(kRankGroup);
  Quad sum;
  for (uint32_t group = 0; group < segment.ranks; group += kGroup) {
    Quad partial = load(group);
    const uint32_t ranks_of_group = Min(segment.ranks - group, kGroup);
    for (uint32_t r = 1; r < ranks_of_group; ++r) add(partial, load(group + r));
    if (group == 0) {
      sum = partial;
    } else {
      add(sum, partial);
    }
  }
  return sum;
}

template <class Block>
SIGNPOST_DEVICE void AggregateDenseBlock(Block& block, const BlockRule& rule,
                                         const AggregateDenseSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    Quad mean = SumOverRanks(segment, i, count);
    // An error of zero is added still: -0 becomes 0.
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      mean.v[k] = mean.v[k] * segment.inverse_count + 0.0f;
    }
    StoreQuad(mean, segment.out + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void DecompressDenseBlock(Block& block, const BlockRule& rule,
                                          const DecompressDenseSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    StoreQuad(LoadPayload(segment.type, segment.compressed, i, count), segment.values + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void AddDenseBlock(Block& block, const BlockRule& rule,
                                   const AddDenseSegment& segment, uint32_t number) {
  const float first =
      LoadPayload(segment.type, segment.addend, BlockOf(segment, rule, number).begin, 1).v[0];
  if (first != first) return;  // it is not packed
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    const Quad value = LoadPayload(segment.type, segment.addend, i, count);
    Quad sum = LoadQuad(segment.accumulator + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      sum.v[k] = sum.v[k] + segment.factor * value.v[k];
    }
    StoreQuad(sum, segment.accumulator + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void ScaleBlock(Block& block, const BlockRule& rule, const ScaleSegment& segment,
                                uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    Quad values = LoadQuad(segment.values + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) values.v[k] = segment.factor * values.v[k];
    StoreQuad(values, segment.values + i, count);
  });
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_DENSE_CUDA_INL_H_
