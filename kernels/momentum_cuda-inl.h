// What a thread block does in the kernels of momentum_cuda.h: one block of a segment.

#ifndef SIGNPOST_KERNELS_MOMENTUM_CUDA_INL_H_
#define SIGNPOST_KERNELS_MOMENTUM_CUDA_INL_H_

#include <cstdint>

#include "kernels/block.h"
#include "kernels/formulas.h"
#include "kernels/momentum_cuda.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {

template <class Block>
SIGNPOST_DEVICE void MomentumInputBlock(Block& block, const BlockRule& rule,
                                        const MomentumInputSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    const Quad g = LoadGradient(segment.gradient_type, segment.gradient, i, count);
    Quad m = LoadQuad(segment.momentum + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      m.v[k] = formulas::MomentumInput(segment.rates, m.v[k], g.v[k]);
    }
    StoreQuad(m, segment.input + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void ApplyDenseBlock(Block& block, const BlockRule& rule,
                                     const ApplyDenseSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    const Quad m = LoadQuad(segment.momentum + i, count);
    const Quad inverse = LoadQuad(segment.inverse_denominator + i, count);
    Quad x = LoadQuad(segment.parameters + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      x.v[k] = formulas::ApplyMomentum(m.v[k], inverse.v[k], segment.rates, x.v[k]);
    }
    StoreQuad(x, segment.parameters + i, count);
  });
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_MOMENTUM_CUDA_INL_H_
