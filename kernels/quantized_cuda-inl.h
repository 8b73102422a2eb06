// What a thread block does in the kernels of quantized_cuda.h: one block of a segment.

#ifndef SIGNPOST_KERNELS_QUANTIZED_CUDA_INL_H_
#define SIGNPOST_KERNELS_QUANTIZED_CUDA_INL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/block.h"
#include "kernels/formulas.h"
#include "kernels/quantized.h"
#include "kernels/quantized_cuda.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {

// The bytes of a word, from the lowest on; at once where it is aligned.
template <class Word>
SIGNPOST_DEVICE uint32_t LoadWord(const uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Word) == 0) return *reinterpret_cast<const Word*>(p);
  uint32_t word = 0;
  for (uint32_t byte = 0; byte < sizeof(Word); ++byte) word |= uint32_t{p[byte]} << (8 * byte);
  return word;
}

template <class Word>
SIGNPOST_DEVICE void StoreWord(uint32_t word, uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Word) == 0) {
    *reinterpret_cast<Word*>(p) = static_cast<Word>(word);
    return;
  }
  for (uint32_t byte = 0; byte < sizeof(Word); ++byte)
    p[byte] = static_cast<uint8_t>(word >> (8 * byte));
}

// The codes of the quad at element i, a multiple of 4, from the lowest bits on.
SIGNPOST_DEVICE inline uint32_t LoadCodes(IntegerType type, const uint8_t* codes, uint32_t i) {
  return type == IntegerType::kInt8 ? LoadWord<uint32_t>(codes + i)
                                    : LoadWord<uint16_t>(codes + i / 2);
}

SIGNPOST_DEVICE inline void StoreCodes(IntegerType type, uint32_t word, uint8_t* codes,
                                       uint32_t i) {
  if (type == IntegerType::kInt8) {
    StoreWord<uint32_t>(word, codes + i);
  } else {
    StoreWord<uint16_t>(word, codes + i / 2);
  }
}

// What the quad at element i of a span stands for, in a block of that scale.
SIGNPOST_DEVICE inline Quad DequantizeQuad(IntegerType type, QuantizedView view, float scale,
                                           uint32_t i) {
  const uint32_t word = LoadCodes(type, view.codes, i);
  const auto bits = static_cast<uint32_t>(BitsOf(type));
  Quad quad;
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    quad.v[k] = formulas::Dequantize(formulas::CodeOf(type, word >> (bits * k)), scale);
  }
  return quad;
}

// The codes of a quad, which becomes what they lose.
SIGNPOST_DEVICE inline uint32_t QuantizeQuad(IntegerType type, float inverse_scale, float scale,
                                             Quad& quad) {
  const auto bits = static_cast<uint32_t>(BitsOf(type));
  const uint32_t mask = (uint32_t{1} << bits) - 1;
  uint32_t word = 0;
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    const int32_t code = formulas::Quantize(quad.v[k], inverse_scale);
    word |= (static_cast<uint32_t>(code) & mask) << (bits * k);
    quad.v[k] = quad.v[k] - formulas::Dequantize(code, scale);
  }
  return word;
}

// u of the quad at element i of the segment; zeros behind the first `count`.
SIGNPOST_DEVICE inline Quad LoadInput(const QuantizeSegment& segment, uint32_t i, uint32_t count) {
  Quad u = LoadGradient(segment.gradient_type, segment.gradient, i, count);
  const Quad error = LoadQuad(segment.error + i, count);
  for (uint32_t k = 0; k < kQuadElements; ++k) u.v[k] = u.v[k] + error.v[k];
  return u;
}

template <class Block>
SIGNPOST_DEVICE void QuantizeBlock(Block& block, const BlockRule& rule,
                                   const QuantizeSegment& segment, uint32_t number,
                                   uint32_t* first_not_packed) {
  const BlockOfSegment at = BlockOf(segment, rule, number);
  float* const magnitudes = block.shared().u;
  typename Block::template PerThread<Tile> u;
  typename Block::template PerThread<float> largest;
  const auto load = [&](uint32_t thread, uint32_t tile) {
    ForEachQuad(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t q) {
      u[thread].quads[q] = LoadInput(segment, at.begin + tile + begin, count);
    });
  };

  block.Phase([&](uint32_t thread) { largest[thread] = 0; });
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    block.Phase([&](uint32_t thread) {
      load(thread, tile);
      ForEachQuad(thread, at.length - tile, [&](uint32_t, uint32_t, uint32_t q) {
        for (uint32_t k = 0; k < kQuadElements; ++k) {
          largest[thread] = formulas::LargerMagnitude(largest[thread], u[thread].quads[q].v[k]);
        }
      });
    });
  }
  block.Phase([&](uint32_t thread) { magnitudes[thread] = largest[thread]; });
  FoldInHalves(block, magnitudes, kThreads,
               [](float a, float b) { return formulas::LargerMagnitude(a, b); });

  const float scale = formulas::ScaleOf(segment.type, magnitudes[0]);
  const float inverse_scale = formulas::InverseScale(segment.type, magnitudes[0]);
  const bool is_packed = scale <= kMaxScale;  // not when it is not a number
  block.Phase([&](uint32_t thread) {
    if (thread != 0) return;
    segment.out.scales[at.index] = is_packed ? scale : kNotPacked;
    if (!is_packed) block.LowerTo(*first_not_packed, number);
  });
  if (!is_packed) return;

  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    block.Phase([&](uint32_t thread) {
      if (at.length > kTileElements) load(thread, tile);  // the last tile's is what registers have
      ForEachQuad(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t q) {
        const uint32_t i = at.begin + tile + begin;
        Quad& quad = u[thread].quads[q];
        StoreCodes(segment.type, QuantizeQuad(segment.type, inverse_scale, scale, quad),
                   segment.out.codes, i);
        StoreQuad(quad, segment.error + i, count);
        // The second half of the span's last eight, when no quad has it.
        if (count <= kQuadElements && i % 8 == 0) {
          StoreCodes(segment.type, 0, segment.out.codes, i + kQuadElements);
        }
      });
    });
  }
}

template <class Block>
SIGNPOST_DEVICE void DequantizeBlock(Block& block, const BlockRule& rule,
                                     const DequantizeSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t index, uint32_t i, uint32_t count) {
    StoreQuad(DequantizeQuad(segment.type, segment.compressed, segment.compressed.scales[index], i),
              segment.values + i, count);
  });
}

template <class Block>
SIGNPOST_DEVICE void AddQuantizedBlock(Block& block, const BlockRule& rule,
                                       const AddQuantizedSegment& segment, uint32_t number) {
  ForEachQuadOfBlock(block, rule, segment, number, [&](uint32_t index, uint32_t i, uint32_t count) {
    const float scale = segment.addend.scales[index];
    if (scale != scale) return;  // it is not packed
    const Quad value = DequantizeQuad(segment.type, segment.addend, scale, i);
    Quad sum = LoadQuad(segment.accumulator + i, count);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      sum.v[k] = sum.v[k] + segment.factor * value.v[k];
    }
    StoreQuad(sum, segment.accumulator + i, count);
  });
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_QUANTIZED_CUDA_INL_H_
