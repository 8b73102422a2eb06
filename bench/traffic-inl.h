// What Traffic does with a block of an array. Included once per Highway target.

#include <cstddef>
#include <cstdint>

#include "bench/traffic.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

#if defined(SIGNPOST_BENCH_TRAFFIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIGNPOST_BENCH_TRAFFIC_INL_H_
#undef SIGNPOST_BENCH_TRAFFIC_INL_H_
#else
#define SIGNPOST_BENCH_TRAFFIC_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace signpost::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Words = hn::ScalableTag<uint32_t>;

inline constexpr size_t kLine = 64;
inline constexpr size_t kFetchAhead = 2048;  // bytes, as kernels

// body(words) is called for each vector of a cache line, once one that is so far ahead is fetched.
template <class Body>
HWY_INLINE void ForEachVector(uint8_t* bytes, size_t count, Body body) {
  constexpr size_t kVector = hn::MaxLanes(Words()) * sizeof(uint32_t);
  for (size_t i = 0; i < count; i += kLine) {
    __builtin_prefetch(bytes + i + kFetchAhead, /*rw=*/0, /*locality=*/2);
    for (size_t j = 0; j < kLine; j += kVector) {
      body(reinterpret_cast<uint32_t*>(bytes + i + j));
    }
  }
}

// The sum of the words that it has read or changed.
uint32_t GoThrough(Stream::Use use, uint8_t* bytes, size_t count) {
  const Words words;
  const auto ones = hn::Set(words, 0x01010101);
  auto sum = hn::Zero(words);
  switch (use) {
    case Stream::Use::kRead:
      ForEachVector(bytes, count,
                    [&](const uint32_t* at) HWY_ATTR { sum = hn::Add(sum, hn::Load(words, at)); });
      break;
    case Stream::Use::kChange:
      ForEachVector(bytes, count, [&](uint32_t* at) HWY_ATTR {
        const auto changed = hn::Xor(ones, hn::Load(words, at));
        hn::Store(changed, words, at);
        sum = hn::Add(sum, changed);
      });
      break;
    case Stream::Use::kWrite:
      for (size_t i = 0; i < count; i += hn::MaxLanes(words) * sizeof(uint32_t)) {
        hn::Stream(ones, words, reinterpret_cast<uint32_t*>(bytes + i));
      }
      break;
  }
  return hn::GetLane(hn::SumOfLanes(words, sum));
}

}  // namespace signpost::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SIGNPOST_BENCH_TRAFFIC_INL_H_
