// What a thread block does in the kernels of lamb_cuda.h: one block of a segment.

#ifndef SIGNPOST_KERNELS_LAMB_CUDA_INL_H_
#define SIGNPOST_KERNELS_LAMB_CUDA_INL_H_

#include <cstdint>

#include "kernels/block.h"
#include "kernels/dense_cuda-inl.h"
#include "kernels/formulas.h"
#include "kernels/lamb_cuda.h"
#include "kernels/onebit_cuda-inl.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {

// The squares of a quad's two values, and the least quotient so far.
struct LambTerms {
  Quad numerator, update;
  float least_quotient;
};

// Writes the least of all threads' `value` to *least.
template <class Block, class Values>
SIGNPOST_DEVICE void FoldLeast(Block& block, Values& values, float* least) {
  Shared& shared = block.shared();
  block.Phase([&](uint32_t thread) { shared.u[thread] = values[thread]; });
  for (uint32_t width = kThreads / 2; width > 0; width /= 2) {
    block.Phase([&](uint32_t thread) {
      if (thread < width) shared.u[thread] = Min(shared.u[thread], shared.u[thread + width]);
    });
  }
  block.Phase([&](uint32_t thread) {
    if (thread == 0) *least = shared.u[0];
  });
}

// Writes the sum of all lanes' `values`, folded as block.h says, to *sum.
template <class Block, class Values>
SIGNPOST_DEVICE void FoldSums(Block& block, Values& values, float* sum) {
  Shared& shared = block.shared();
  block.Phase([&](uint32_t thread) {
    if (thread < kSumLanes) shared.lanes[thread] = values[thread];
  });
  FoldLanes(block, shared.lanes);
  block.Phase([&](uint32_t thread) {
    if (thread == 0) *sum = shared.lanes[0];
  });
}

// Calls terms(i, count, least) for each quad of the block, which is at element i of the segment,
// does what is to be done to it, and returns its LambTerms; `least` is the thread's quotient so
// far. `sums` gets what they come to.
template <class Block, class Terms>
SIGNPOST_DEVICE void SumTerms(Block& block, const BlockOfSegment& at, LambSums* sums,
                              float least_quotient, Terms terms) {
  Shared& shared = block.shared();
  typename Block::template PerThread<Tile> updates;
  typename Block::template PerThread<float> numerator, update, least;
  const auto add_squares = [&](uint32_t lane, uint32_t length, float& sum) {
    SIGNPOST_UNROLL(8)
    for (uint32_t i = lane; i < length; i += kSumLanes) sum = sum + shared.u[i] * shared.u[i];
  };
  block.Phase([&](uint32_t thread) {
    numerator[thread] = update[thread] = 0;
    least[thread] = least_quotient;
  });
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    const uint32_t length = Min(at.length - tile, kTileElements);
    block.Phase([&](uint32_t thread) {
      ForEachQuad(thread, length, [&](uint32_t begin, uint32_t, uint32_t q) {
        const uint32_t i = tile + begin;
        const LambTerms quad = terms(at.begin + i, at.length - i, least[thread]);
        least[thread] = quad.least_quotient;
        updates[thread].quads[q] = quad.update;
        for (uint32_t k = 0; k < kQuadElements; ++k) shared.u[begin + k] = quad.numerator.v[k];
      });
    });
    block.Phase([&](uint32_t thread) {
      if (thread < kSumLanes) add_squares(thread, length, numerator[thread]);
    });
    block.Phase([&](uint32_t thread) {
      ForEachQuad(thread, length, [&](uint32_t begin, uint32_t, uint32_t q) {
        const Quad& quad = updates[thread].quads[q];
        for (uint32_t k = 0; k < kQuadElements; ++k) shared.u[begin + k] = quad.v[k];
      });
    });
    block.Phase([&](uint32_t thread) {
      if (thread < kSumLanes) add_squares(thread, length, update[thread]);
    });
  }
  FoldSums(block, numerator, &sums->numerator);
  FoldSums(block, update, &sums->update);
  FoldLeast(block, least, &sums->least_quotient);
}

template <class Block>
SIGNPOST_DEVICE void UpdateMomentsBlock(Block& block, const BlockRule& rule,
                                        const LambSegment& segment, uint32_t number) {
  const BlockOfSegment at = BlockOf(segment, rule, number);
  SumTerms(block, at, segment.sums + at.index, /*least_quotient=*/0,
           [&](uint32_t i, uint32_t count, float least) {
             const Quad g = LoadPayload(segment.type, segment.gradient, i, count);
             Quad m = LoadQuad(segment.momentum + i, count);
             Quad v = LoadQuad(segment.variance + i, count);
             LambTerms terms = {.numerator = LoadQuad(segment.parameters + i, count),
                                .least_quotient = least};
             for (uint32_t k = 0; k < kQuadElements; ++k) {
               formulas::UpdateMoments(segment.rates, g.v[k], m.v[k], v.v[k]);
               terms.update.v[k] =
                   formulas::LambUpdate(segment.rates, m.v[k], v.v[k], terms.numerator.v[k]);
             }
             StoreQuad(m, segment.momentum + i, count);
             StoreQuad(v, segment.variance + i, count);
             return terms;
           });
}

template <class Block>
SIGNPOST_DEVICE void LambStepBlock(Block& block, const BlockRule& rule, const LambSegment& segment,
                                   uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    const Quad m = LoadQuad(segment.momentum + i, count);
    const Quad v = LoadQuad(segment.variance + i, count);
    Quad x = LoadQuad(segment.parameters + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      const float update = formulas::LambUpdate(segment.rates, m.v[k], v.v[k], x.v[k]);
      x.v[k] = x.v[k] - segment.step_size * update;
    }
    StoreQuad(x, segment.parameters + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void FloorBlock(Block& block, const BlockRule& rule, const FloorSegment& segment,
                                uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t, uint32_t i, uint32_t count) {
    Quad v = LoadQuad(segment.variance + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      v.v[k] = formulas::FlooredVariance(segment.rates, v.v[k]);
    }
    StoreQuad(v, segment.fresh_variance + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void FollowBlock(Block& block, const BlockRule& rule, const FollowSegment& segment,
                                 uint32_t number) {
  const BlockOfSegment at = BlockOf(segment, rule, number);
  const float infinity = formulas::BitsToFloat(0x7f800000);
  SumTerms(
      block, at, segment.sums + at.index, infinity, [&](uint32_t i, uint32_t count, float least) {
        const auto momentum_of = [&](const float* dense, const OneBitView& one_bit) {
          return dense != nullptr
                     ? LoadQuad(dense + i, count)
                     : SignedQuad(one_bit.scales[at.index], SignsOfQuad(one_bit.bits, i));
        };
        const Quad m = momentum_of(segment.dense_momentum, segment.momentum);
        const Quad before = momentum_of(segment.dense_momentum_before, segment.momentum_before);
        const Quad d = LoadQuad(segment.inverse_denominator + i, count);
        const Quad x = LoadQuad(segment.parameters + i, count);
        Quad f = LoadQuad(segment.fresh_variance + i, count);
        LambTerms terms = {.least_quotient = least};
        for (uint32_t k = 0; k < kQuadElements; ++k) {
          const formulas::FreshStep step =
              formulas::FollowMomentum(segment.rates, m.v[k], before.v[k], d.v[k], x.v[k], f.v[k]);
          terms.numerator.v[k] = step.step;
          terms.update.v[k] = step.update;
          // d is zero behind the segment's end.
          if (d.v[k] > 0 && step.quotient < terms.least_quotient) {
            terms.least_quotient = step.quotient;
          }
        }
        StoreQuad(f, segment.fresh_variance + i, count);
        if (segment.dense_momentum != nullptr) {
          StoreQuad(m, segment.dense_momentum_before + i, count);
        }
        return terms;
      });
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_LAMB_CUDA_INL_H_
