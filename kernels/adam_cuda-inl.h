// What a thread block does in the kernels of adam_cuda.h: one block of a segment.

#ifndef SIGNPOST_KERNELS_ADAM_CUDA_INL_H_
#define SIGNPOST_KERNELS_ADAM_CUDA_INL_H_

#include <cstdint>

#include "kernels/adam.h"
#include "kernels/adam_cuda.h"
#include "kernels/block.h"
#include "kernels/dense_cuda-inl.h"
#include "kernels/formulas.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {

// step(g, m, v, x) for each element of a block.
template <class Block, class Rates, class Step>
SIGNPOST_DEVICE void StepBlock(Block& block, const BlockRule& rule,
                               const AdamSegment<Rates>& segment, uint32_t number, Step step) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    const Quad g = LoadPayload(segment.type, segment.gradient, i, count);
    Quad m = LoadQuad(segment.momentum + i, count);
    Quad v = LoadQuad(segment.variance + i, count);
    Quad x = LoadQuad(segment.parameters + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) step(g.v[k], m.v[k], v.v[k], x.v[k]);
    StoreQuad(m, segment.momentum + i, count);
    StoreQuad(v, segment.variance + i, count);
    StoreQuad(x, segment.parameters + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void AdamBlock(Block& block, const BlockRule& rule,
                               const AdamSegment<AdamRates>& segment, uint32_t number) {
  StepBlock(block, rule, segment, number, [&](float g, float& m, float& v, float& x) {
    formulas::AdamStep(segment.rates, g, m, v, x);
  });
}

template <class Block>
SIGNPOST_DEVICE void RefreshBlock(Block& block, const BlockRule& rule,
                                  const AdamSegment<RefreshRates>& segment, uint32_t number) {
  StepBlock(block, rule, segment, number, [&](float g, float& m, float& d, float& x) {
    formulas::RefreshStep(segment.rates, g, m, d, x);
  });
}

template <class Block>
SIGNPOST_DEVICE void FreezeBlock(Block& block, const BlockRule& rule,
                                 const AdamSegment<FreezeRates>& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    Quad m = LoadQuad(segment.momentum + i, count);
    Quad v = LoadQuad(segment.variance + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      m.v[k] = m.v[k] * segment.rates.momentum_correction;
      v.v[k] = formulas::InverseDenominator(segment.rates, v.v[k]);
    }
    StoreQuad(m, segment.momentum + i, count);
    StoreQuad(v, segment.variance + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void ThawBlock(Block& block, const BlockRule& rule,
                               const AdamSegment<RefreshRates>& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    Quad d = LoadQuad(segment.variance + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      d.v[k] = formulas::VarianceOf(d.v[k], segment.rates.epsilon);
    }
    StoreQuad(d, segment.variance + i, count);
  });
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_ADAM_CUDA_INL_H_
