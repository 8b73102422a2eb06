// A GPU's block of threads, as the CUDA kernels see it, and the same on the host, so that what they
// compute can be tested where there is no GPU.
//
// A kernel is a function of a thread block, in phases: block.Phase(f) calls f(thread) for each
// thread of the block, and all have come back from it before the next phase begins (a barrier on
// the GPU). Within a phase threads may run in any order and must not depend on each other. What a
// thread keeps in registers from phase to phase is a Block::PerThread, what they share is in
// block.shared().

#ifndef SIGNPOST_KERNELS_THREAD_BLOCK_CUDA_INL_H_
#define SIGNPOST_KERNELS_THREAD_BLOCK_CUDA_INL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "kernels/block.h"
#include "kernels/formulas.h"
#include "kernels/types_cuda.h"

// On what runs in a thread block.
#ifdef __CUDACC__
#define SIGNPOST_DEVICE __device__
#define SIGNPOST_PRAGMA(text) _Pragma(#text)
#define SIGNPOST_UNROLL(n) SIGNPOST_PRAGMA(unroll n)
#else
#define SIGNPOST_DEVICE
#define SIGNPOST_UNROLL(n)
#endif

namespace signpost::kernels::cuda {

inline constexpr uint32_t kThreads = 256;

// Elements are walked in tiles, of which each thread has kQuads quads: four consecutive elements,
// one access of 16 bytes. The threads of a warp have consecutive ones.
inline constexpr uint32_t kQuadElements = 4;
inline constexpr uint32_t kQuads = 4;
inline constexpr uint32_t kTileElements = kThreads * kQuads * kQuadElements;
static_assert(kTileElements % kSumLanes == 0, "a tile goes on where the lanes of the last one end");

// Where quad q of a thread lies in its tile.
SIGNPOST_DEVICE inline uint32_t QuadBegin(uint32_t thread, uint32_t q) {
  return (q * kThreads + thread) * kQuadElements;
}

struct Quad {
  float v[kQuadElements];
};

struct Tile {
  Quad quads[kQuads];
};

// What the threads of a block share: 18 KiB.
struct Shared {
  float u[kTileElements];
  float lanes[kSumLanes];
  alignas(8) uint8_t signs[kTileElements / kQuadElements];  // of a quad, in its lower half
  uint32_t flag;
  double sums[kSumLanes];
};

// By value: std::min takes references, which constants have none of on a GPU.
template <class T>
SIGNPOST_DEVICE T Min(T a, T b) {
  return b < a ? b : a;
}

// 16 and 8 bytes, which GPUs read and write at once.
struct alignas(16) Bytes16 {
  uint32_t words[4];
};
struct alignas(8) Bytes8 {
  uint32_t words[2];
};

#ifndef __CUDACC__
// For tests: whole quads that were not where they can be accessed at once.
inline std::atomic<uint64_t> quads_in_pieces;
#endif

// Most tiles are whole: all quads are there, and each is accessed at once. With kIsWhole, that is
// known, and what follows has no branches: all that a thread loads is on its way before the first
// of it is used.

// Whether the first `count` elements from p on are a quad that is accessed as Bytes.
template <class Bytes, bool kIsWhole>
SIGNPOST_DEVICE inline bool IsAtOnce(const void* p, uint32_t count) {
#ifdef __CUDACC__
  if (kIsWhole) return true;
#endif
  const bool is_there = count >= kQuadElements;
  const bool is_aligned = reinterpret_cast<uintptr_t>(p) % sizeof(Bytes) == 0;
#ifndef __CUDACC__
  if (kIsWhole && !(is_there && is_aligned)) std::abort();  // as a GPU would
  if (is_there && !is_aligned) quads_in_pieces.fetch_add(1, std::memory_order_relaxed);
#endif
  return is_there && is_aligned;
}

// The first `count` elements of a quad from p on; the others are zero.
template <bool kIsWhole = false>
SIGNPOST_DEVICE inline Quad LoadQuad(const float* p, uint32_t count) {
  Quad quad;
  if (IsAtOnce<Bytes16, kIsWhole>(p, count)) {
    const Bytes16 bytes = *reinterpret_cast<const Bytes16*>(p);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      quad.v[k] = formulas::BitsToFloat(bytes.words[k]);
    }
    return quad;
  }
  for (uint32_t k = 0; k < kQuadElements; ++k) quad.v[k] = k < count ? p[k] : 0.0f;
  return quad;
}

template <bool kIsWhole = false>
SIGNPOST_DEVICE inline void StoreQuad(const Quad& quad, float* p, uint32_t count) {
  if (IsAtOnce<Bytes16, kIsWhole>(p, count)) {
    Bytes16 bytes;
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      bytes.words[k] = formulas::FloatToBits(quad.v[k]);
    }
    *reinterpret_cast<Bytes16*>(p) = bytes;
    return;
  }
  for (uint32_t k = 0; k < Min(count, kQuadElements); ++k) p[k] = quad.v[k];
}

// Four numbers of two bytes each, likewise.
struct Halves {
  uint16_t v[kQuadElements];
};

template <bool kIsWhole = false>
SIGNPOST_DEVICE inline Halves LoadHalves(const uint8_t* p, uint32_t count) {
  Halves halves;
  if (IsAtOnce<Bytes8, kIsWhole>(p, count)) {
    const Bytes8 bytes = *reinterpret_cast<const Bytes8*>(p);
    for (uint32_t k = 0; k < kQuadElements; ++k) {
      halves.v[k] = static_cast<uint16_t>(bytes.words[k / 2] >> (16 * (k % 2)));
    }
    return halves;
  }
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    halves.v[k] = k < count ? static_cast<uint16_t>(p[2 * k] | p[2 * k + 1] << 8) : uint16_t{0};
  }
  return halves;
}

template <bool kIsWhole = false>
SIGNPOST_DEVICE inline void StoreHalves(const Halves& halves, uint8_t* p, uint32_t count) {
  if (IsAtOnce<Bytes8, kIsWhole>(p, count)) {
    Bytes8 bytes;
    for (uint32_t word = 0; word < 2; ++word) {
      bytes.words[word] = halves.v[2 * word] | static_cast<uint32_t>(halves.v[2 * word + 1]) << 16;
    }
    *reinterpret_cast<Bytes8*>(p) = bytes;
    return;
  }
  for (uint32_t k = 0; k < Min(count, kQuadElements); ++k) {
    p[2 * k] = static_cast<uint8_t>(halves.v[k]);
    p[2 * k + 1] = static_cast<uint8_t>(halves.v[k] >> 8);
  }
}

#ifdef __CUDACC__
class DeviceBlock {
 public:
  // One thread's.
  template <class T>
  class PerThread {
   public:
    __device__ T& operator[](uint32_t) { return value_; }

   private:
    T value_;
  };

  __device__ explicit DeviceBlock(Shared& shared) : shared_(shared) {}
  __device__ Shared& shared() { return shared_; }

  template <class Body>
  __device__ void Phase(Body body) {
    body(threadIdx.x);
    __syncthreads();
  }

  __device__ void LowerTo(uint32_t& least, uint32_t value) { atomicMin(&least, value); }

 private:
  Shared& shared_;
};
#else
// Threads one after the other, in an order that `order` chooses: what depends on it is wrong.
class HostBlock {
 public:
  template <class T>
  class PerThread {
   public:
    T& operator[](uint32_t thread) { return values_[thread]; }

   private:
    T values_[kThreads];
  };

  explicit HostBlock(uint32_t order) : order_(order) {}
  Shared& shared() { return shared_; }

  template <class Body>
  void Phase(Body body) {
    for (uint32_t i = 0; i < kThreads; ++i) body((i * (2 * order_ + 1) + order_) % kThreads);
  }

  void LowerTo(uint32_t& least, uint32_t value) { least = Min(least, value); }

 private:
  const uint32_t order_;
  Shared shared_;
};
#endif

// Folds so many lanes, a power of two up to 2 * kThreads, in halves; what `combine` makes of all of
// them is then in the first.
template <class Block, class T, class Combine>
SIGNPOST_DEVICE void FoldInHalves(Block& block, T* lanes, uint32_t count, Combine combine) {
  for (uint32_t width = count / 2; width > 0; width /= 2) {
    block.Phase([&](uint32_t thread) {
      if (thread < width) lanes[thread] = combine(lanes[thread], lanes[thread + width]);
    });
  }
}

// Folds the lanes of a sum, as block.h says.
template <class Block, class T>
SIGNPOST_DEVICE void FoldLanes(Block& block, T (&lanes)[kSumLanes]) {
  FoldInHalves(block, lanes, kSumLanes, [](T a, T b) { return a + b; });
}

// Which of `count` segments has the block of that number: segments come in the order of their
// first_block, and the first has block 0.
template <class Segment>
SIGNPOST_DEVICE const Segment& SegmentOfBlock(const Segment* segments, uint32_t count,
                                              uint32_t block) {
  uint32_t first = 0;
  while (count > 1) {
    const uint32_t half = count / 2;
    if (segments[first + half].first_block <= block) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return segments[first];
}

// Elements [begin, begin + length) of a segment, whose block `index` they are.
struct BlockOfSegment {
  uint32_t index;
  uint32_t begin;
  uint32_t length;
};

template <class Segment>
SIGNPOST_DEVICE BlockOfSegment BlockOf(const Segment& segment, const BlockRule& rule,
                                       uint32_t block) {
  const uint32_t index = block - segment.first_block;
  const auto block_elements = static_cast<uint32_t>(rule.block_elements);
  const uint32_t begin = index * block_elements;
  return {index, begin, Min(block_elements, segment.elements - begin)};
}

// Calls use(begin, count, quad) for each quad of a thread that a tile of `length` elements, or what
// there is of it, has: where it begins, and how many elements it has, of which only the first four
// count.
template <bool kIsWhole = false, class Use>
SIGNPOST_DEVICE void ForEachQuad(uint32_t thread, uint32_t length, Use use) {
  SIGNPOST_UNROLL(4)
  for (uint32_t q = 0; q < kQuads; ++q) {
    const uint32_t begin = QuadBegin(thread, q);
    if (kIsWhole || begin < length) use(begin, length - begin, q);
  }
}

// Whether all of a block's tiles are whole, in each of its arrays.
template <class... Arrays>
SIGNPOST_DEVICE bool AreTilesWhole(const BlockOfSegment& at, Arrays... arrays) {
  return at.length % kTileElements == 0 &&
         (... && (reinterpret_cast<uintptr_t>(arrays) % sizeof(Bytes16) == 0));
}

// Calls use() with std::true_type or std::false_type, so that what follows is compiled for each.
template <class Use>
SIGNPOST_DEVICE void ForEither(bool value, Use use) {
  if (value) {
    use(std::true_type());
  } else {
    use(std::false_type());
  }
}

// Likewise with a std::integral_constant.
template <class Use>
SIGNPOST_DEVICE void ForType(GradientType type, Use use) {
  switch (type) {
    case GradientType::kBfloat16:
      return use(std::integral_constant<GradientType, GradientType::kBfloat16>());
    case GradientType::kFloat16:
      return use(std::integral_constant<GradientType, GradientType::kFloat16>());
    default:
      return use(std::integral_constant<GradientType, GradientType::kFloat32>());
  }
}

// The quad at element i of a gradient; zeros where there is none, which no tile with kIsWhole has.
template <bool kIsWhole = false>
SIGNPOST_DEVICE inline Quad LoadGradient(GradientType type, const void* gradient, uint32_t i,
                                         uint32_t count) {
  if (!kIsWhole && gradient == nullptr) return Quad{};
  if (type == GradientType::kFloat32) {
    return LoadQuad<kIsWhole>(static_cast<const float*>(gradient) + i, count);
  }
  const Halves halves =
      LoadHalves<kIsWhole>(static_cast<const uint8_t*>(gradient) + size_t{2} * i, count);
  Quad quad;
  for (uint32_t k = 0; k < kQuadElements; ++k) {
    quad.v[k] = type == GradientType::kBfloat16 ? formulas::WidenBfloat16(halves.v[k])
                                                : formulas::WidenFloat16(halves.v[k]);
  }
  return quad;
}

// For kernels that do something to each quad by itself.
template <class Block, class Segment, class Use>
SIGNPOST_DEVICE void ForEachQuadOfBlock(Block& block, const BlockRule& rule, const Segment& segment,
                                        uint32_t number, Use use) {
  const BlockOfSegment at = BlockOf(segment, rule, number);
  for (uint32_t tile = 0; tile < at.length; tile += kTileElements) {
    block.Phase([&](uint32_t thread) {
      ForEachQuad(thread, at.length - tile, [&](uint32_t begin, uint32_t count, uint32_t) {
        use(at.index, at.begin + tile + begin, count);
      });
    });
  }
}

}  // namespace signpost::kernels::cuda

#endif  // SIGNPOST_KERNELS_THREAD_BLOCK_CUDA_INL_H_
