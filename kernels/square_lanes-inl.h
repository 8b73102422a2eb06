// A block's sum of squares in strips, in the order of block.h. Included once per Highway target.

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/block.h"
#include "kernels/strip-inl.h"

#if defined(SIGNPOST_KERNELS_SQUARE_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIGNPOST_KERNELS_SQUARE_LANES_INL_H_
#undef SIGNPOST_KERNELS_SQUARE_LANES_INL_H_
#else
#define SIGNPOST_KERNELS_SQUARE_LANES_INL_H_
#endif

#if HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

// Folds a vector in halves: the second is added to the first.
template <class Lanes>
HWY_INLINE float Fold(Lanes lanes, hn::Vec<Lanes> v) {
  if constexpr (hn::MaxLanes(lanes) == 1) {
    return hn::GetLane(v);
  } else {
    const hn::Half<Lanes> half;
    return Fold(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// Folds the lanes of block.h in halves.
HWY_INLINE float FoldLanes(float* lanes) {
  for (size_t w = kSumLanes / 2; w >= kLanes; w /= 2) {
    for (size_t l = 0; l < w; l += kLanes) {
      const Vector folded =
          hn::Add(hn::Load(Floats(), lanes + l), hn::Load(Floats(), lanes + l + w));
      hn::Store(folded, Floats(), lanes + l);
    }
  }
  return Fold(Floats(), hn::Load(Floats(), lanes));
}

class SquareLanes {
 public:
  HWY_INLINE SquareLanes() {
    ForEachStrip(kSumLanes, [&](size_t i, auto) STRIP_BODY { Store(Zeros(), lanes_ + i, Full()); });
  }

  // The strip at element i of the block. Lanes beyond a short one must be zero: they add +0, which
  // changes no sum of squares.
  HWY_INLINE void Add(size_t i, const Strip& u) {
    float* const sums = lanes_ + i % kSumLanes;
    const auto add_square = [](Vector sum, Vector v)
                                STRIP_BODY { return hn::Add(sum, hn::Mul(v, v)); };
    Store(Map(add_square, Load(sums, Full()), u), sums, Full());
  }

  // Once.
  HWY_INLINE float Fold() { return FoldLanes(lanes_); }

 private:
  HWY_ALIGN float lanes_[kSumLanes];
};

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_SQUARE_LANES_INL_H_
