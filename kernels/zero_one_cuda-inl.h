// What a thread block does in the kernels of zero_one_cuda.h: one block of a segment.

#ifndef SIGNPOST_KERNELS_ZERO_ONE_CUDA_INL_H_
#define SIGNPOST_KERNELS_ZERO_ONE_CUDA_INL_H_

#include <cstdint>

#include "kernels/block.h"
#include "kernels/dense_cuda-inl.h"
#include "kernels/formulas.h"
#include "kernels/thread_block_cuda-inl.h"
#include "kernels/zero_one_cuda.h"

namespace signpost::kernels::cuda {

template <class Block>
SIGNPOST_DEVICE void AdaptiveBlock(Block& block, const BlockRule& rule,
                                   const AdaptiveSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    const Quad g = LoadPayload(segment.type, segment.gradient, i, count);
    Quad m = LoadQuad(segment.momentum + i, count);
    Quad v = LoadQuad(segment.variance + i, count);
    Quad x = LoadQuad(segment.parameters + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      formulas::AdaptiveStep(segment.rates, g.v[k], m.v[k], v.v[k], x.v[k]);
    }
    StoreQuad(m, segment.momentum + i, count);
    if (segment.rates.updates_variance) StoreQuad(v, segment.variance + i, count);
    StoreQuad(x, segment.parameters + i, count);
  });
}

// The step of the quad at element i of the segment, with its gradient.
SIGNPOST_DEVICE inline void LocalStepOfQuad(const LocalSegment& segment, const Quad& g, uint32_t i,
                                            uint32_t count) {
  const LocalRates& rates = segment.rates;
  Quad m = LoadQuad(segment.momentum + i, count);
  Quad u = LoadQuad(segment.accumulated + i, count);
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    formulas::Accumulate(rates, g.v[k], m.v[k], u.v[k]);
  }
  StoreQuad(m, segment.momentum + i, count);
  StoreQuad(u, segment.accumulated + i, count);
  if (segment.parameters == nullptr) return;
  const Quad d = LoadQuad(segment.inverse_denominator + i, count);
  Quad x = LoadQuad(segment.parameters + i, count);
  const UpdateRates update = {rates.learning_rate, rates.weight_decay, rates.most_update};
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    x.v[k] = formulas::ApplyMomentum(m.v[k], d.v[k], update, x.v[k]);
  }
  StoreQuad(x, segment.parameters + i, count);
}

template <class Block>
SIGNPOST_DEVICE void LocalBlock(Block& block, const BlockRule& rule, const LocalSegment& segment,
                                uint32_t number, uint32_t* first_left_alone) {
  const BlockOfSegment at = BlockOf(segment, rule, number);
  uint32_t& is_within_range = block.shared().flag;
  typename Block::template PerThread<Tile> g;
  const auto load = [&](uint32_t thread, uint32_t tile) {
    ForEachQuad(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t q) {
      g[thread].quads[q] =
          LoadGradient(segment.gradient_type, segment.gradient, at.begin + tile + begin, count);
    });
  };

  block.Phase([&](uint32_t thread) {
    if (thread == 0) is_within_range = 1;
  });
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    block.Phase([&](uint32_t thread) {
      load(thread, tile);
      bool is_mine = true;
      ForEachQuad(thread, at.length - tile, [&](uint32_t, uint32_t, uint32_t q) {
        // Zeros behind the end.
        for (float value : g[thread].quads[q].v) {
          is_mine = is_mine && formulas::IsWithinRange(value);
        }
      });
      if (!is_mine) block.LowerTo(is_within_range, 0);
    });
  }
  if (is_within_range == 0) {
    block.Phase([&](uint32_t thread) {
      if (thread == 0) block.LowerTo(*first_left_alone, number);
    });
    return;
  }
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    block.Phase([&](uint32_t thread) {
      if (at.length > kTileElements) load(thread, tile);  // the last tile's is what registers have
      ForEachQuad(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t q) {
        LocalStepOfQuad(segment, g[thread].quads[q], at.begin + tile + begin, count);
      });
    });
  }
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_ZERO_ONE_CUDA_INL_H_
