// Strips of dense payloads (dense.h): one struct per DenseType, for kernels to be instantiated
// with. Included once per Highway target.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/dense.h"
#include "kernels/strip-inl.h"

#if defined(SIGNPOST_KERNELS_DENSE_STRIP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIGNPOST_KERNELS_DENSE_STRIP_INL_H_
#undef SIGNPOST_KERNELS_DENSE_STRIP_INL_H_
#else
#define SIGNPOST_KERNELS_DENSE_STRIP_INL_H_
#endif

#if HWY_TARGET != HWY_SCALAR

HWY_BEFORE_NAMESPACE();
namespace signpost::kernels::HWY_NAMESPACE {

// A codec reads (Decode) and writes (Encode) the strip that begins at element i of a payload.
// Encode rounds u and returns what that lost.

struct Float32Codec {
  static constexpr DenseType kType = DenseType::kFloat32;

  // Payloads are not aligned, which LoadU and StoreU do not mind.
  template <class Count>
  static HWY_INLINE Strip Decode(const uint8_t* payload, size_t i, Count count) {
    return Load(reinterpret_cast<const float*>(payload) + i, count);
  }

  template <class Count>
  static HWY_INLINE Strip Encode(const Strip& u, uint8_t* payload, size_t i, Count count) {
    Store(u, reinterpret_cast<float*>(payload) + i, count);
    return Map([](Vector v) HWY_ATTR { return hn::Sub(v, v); }, u);
  }
};

// Of numbers that take two bytes. Half loads and stores a vector of them as it is in memory, and
// rounds floats to it and widens it.
template <class Half>
struct HalfCodec {
  static constexpr DenseType kType = Half::kType;

  static HWY_INLINE Strip Decode(const uint8_t* payload, size_t i, Full) {
    return MakeStrip(
        [=](size_t k) HWY_ATTR { return Half::Widen(Half::Load(payload + 2 * (i + k * kLanes))); });
  }

  static HWY_INLINE Strip Decode(const uint8_t* payload, size_t i, size_t count) {
    uint8_t all[2 * kStripElements] = {};
    std::memcpy(all, payload + 2 * i, 2 * count);
    return Decode(all, /*i=*/0, Full());
  }

  static HWY_INLINE Strip Encode(const Strip& u, uint8_t* payload, size_t i, Full) {
    return MakeStrip([&](size_t k) HWY_ATTR {
      const auto rounded = Half::Round(u.v[k]);
      Half::Store(rounded, payload + 2 * (i + k * kLanes));
      return hn::Sub(u.v[k], Half::Widen(rounded));
    });
  }

  static HWY_INLINE Strip Encode(const Strip& u, uint8_t* payload, size_t i, size_t count) {
    uint8_t all[2 * kStripElements];
    const Strip lost = Encode(u, all, /*i=*/0, Full());
    std::memcpy(payload + 2 * i, all, 2 * count);
    return lost;
  }
};

using Halves = hn::Rebind<uint16_t, Floats>;

// In the lower halves of 32-bit lanes.
struct Bfloat16Half {
  static constexpr DenseType kType = DenseType::kBfloat16;
  using Bits = hn::RebindToUnsigned<Floats>;

  static HWY_INLINE hn::Vec<Bits> Load(const uint8_t* p) {
    return hn::PromoteTo(Bits(), hn::LoadU(Halves(), reinterpret_cast<const uint16_t*>(p)));
  }
  static HWY_INLINE void Store(hn::Vec<Bits> half, uint8_t* p) {
    hn::StoreU(hn::TruncateTo(Halves(), half), Halves(), reinterpret_cast<uint16_t*>(p));
  }

  static HWY_INLINE Vector Widen(hn::Vec<Bits> half) {
    return hn::BitCast(Floats(), hn::ShiftLeft<16>(half));
  }

  // To nearest, ties to even.
  static HWY_INLINE hn::Vec<Bits> Round(Vector value) {
    const auto bits = hn::BitCast(Bits(), value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(Bits(), 1));
    const auto half = hn::Add(hn::Set(Bits(), 0x7fff), odd);
    return hn::ShiftRight<16>(hn::Add(bits, half));
  }
};

struct Float16Half {
  static constexpr DenseType kType = DenseType::kFloat16;
  using Lanes = hn::Rebind<hwy::float16_t, Floats>;

  static HWY_INLINE hn::Vec<Lanes> Load(const uint8_t* p) {
    return hn::BitCast(Lanes(), hn::LoadU(Halves(), reinterpret_cast<const uint16_t*>(p)));
  }
  static HWY_INLINE void Store(hn::Vec<Lanes> half, uint8_t* p) {
    hn::StoreU(hn::BitCast(Halves(), half), Halves(), reinterpret_cast<uint16_t*>(p));
  }

  static HWY_INLINE Vector Widen(hn::Vec<Lanes> half) { return hn::PromoteTo(Floats(), half); }

  // The processor's own instruction, which rounds to nearest, ties to even.
  static HWY_INLINE hn::Vec<Lanes> Round(Vector value) {
    const Vector most = hn::Set(Floats(), kMaxFloat16);
    return hn::DemoteTo(Lanes(), hn::Min(hn::Max(value, hn::Neg(most)), most));
  }
};

using Bfloat16Codec = HalfCodec<Bfloat16Half>;
using Float16Codec = HalfCodec<Float16Half>;

// body(codec) with the codec of `type`.
template <class Body>
HWY_INLINE auto WithCodec(DenseType type, Body body) {
  if (type == DenseType::kBfloat16) return body(Bfloat16Codec());
  if (type == DenseType::kFloat16) return body(Float16Codec());
  return body(Float32Codec());
}

}  // namespace signpost::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET != HWY_SCALAR
#endif  // SIGNPOST_KERNELS_DENSE_STRIP_INL_H_
